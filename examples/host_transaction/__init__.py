"""A row of your own, and the run that works on it, commit together or not at all.

``python -m examples.host_transaction`` runs it in one process, worker included.
"""
