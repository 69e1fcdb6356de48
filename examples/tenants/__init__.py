"""A tenant travels with each run: captured where it is sent, restored around every piece of its code, in whatever process.

``python -m examples.tenants`` sends for two tenants and works both off in one worker thread.
"""
