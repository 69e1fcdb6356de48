"""Steps that are async, and values that JSON does not have: decimals, dates, sets, a class of one's own.

``python -m examples.invoices`` runs it in one process; in workers it is the same.
"""
