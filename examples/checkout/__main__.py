"""Two orders in this process: one completes, one is rolled back."""

from __future__ import annotations

from dramatiq_saga import FlowFailedError
from examples.checkout.shop import checkout

run = checkout.run_sync("order-42")
print(f"{run.status}: {run.result()}")

run = checkout.run_sync("order-to-nowhere")
try:
    run.result()
except FlowFailedError as error:
    print(f"{run.status}: {error}")
print("undone, in this order:", [(row.actor, row.args[0]) for row in run.compensations()])
