"""A shop on one SQLite file: README's quickstart, complete.

    dramatiq examples.checkout.shop                                                     # workers
    python -c "from examples.checkout.shop import checkout; print(checkout.send('order-42').result(wait=30))"

``python -m examples.checkout`` runs two orders in one process, without workers: one completes, one is rolled back.
"""
