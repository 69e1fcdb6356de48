"""Three orders: one completes, one whose shipment fails, one that fails after its shipment has completed."""

from __future__ import annotations

from dramatiq_saga import get_flow
from examples.order_shipment.app import order

for order_id in ("order-1", "order-to-nowhere", "order-unpaid"):
    run = order.run_sync(order_id)
    (child,) = run.children()
    print(f"{order_id}: {run.status}; its shipment: {get_flow(child.child_id).status}")
