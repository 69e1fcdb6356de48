"""Starts a run for each order named, and waits for it."""

from __future__ import annotations

import sys

from dramatiq_saga import FlowFailedError
from examples.two_machines.app import checkout

for order_id in sys.argv[1:]:
    run = checkout.send(order_id)
    try:
        print(f"{order_id}: {run.result(wait=60)}")
    except FlowFailedError as error:
        print(f"{error}; undone by {[row.actor for row in run.compensations()]}")
