"""A workflow changes while orders are in flight: ``before.py`` started them, ``app.py`` goes on with them, each in its own way.

``python -m examples.patched_change`` is the deploy, and shows what becomes of three orders.
"""
