"""How steps are undone: from their result, in which order, when nobody knows how they ended, and when an undo fails.

``python -m examples.compensations`` runs it in one process.
"""
