"""A trip whose bookings belong together: undone side by side, after which the rollback halts, is mended, and resumed.

``python -m examples.trip_booking`` starts a worker with four threads in this process and books a trip that cannot be paid.
"""
