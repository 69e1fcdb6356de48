"""Waiting for a person, with a deadline: a signal in time, one too late, and a run that is undone because nobody came.

``python -m examples.approval`` runs it in one process.
"""
