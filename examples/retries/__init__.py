"""Tries are Dramatiq's own: how many, how far apart, which errors end them at once, and how one step differs from the rest.

``python -m examples.retries`` runs it in one process, where tries follow each other without waiting.
"""
