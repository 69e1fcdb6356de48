"""A deploy with orders in flight: one that has been charged, one that no worker has seen yet, and one that comes afterwards."""

from __future__ import annotations

import time

import dramatiq

from dramatiq_saga import get_flow
from dramatiq_saga.operations import Operator
from examples.patched_change import before

charged = before.order.send("order-1").id
worker = dramatiq.Worker(before.broker, queues={"default"}, worker_timeout=100)
worker.start()
while len(get_flow(charged).actions()) < 2:  # until it waits for the warehouse
    time.sleep(0.01)
worker.stop()
unseen = before.order.send("order-2").id

from examples.patched_change import app  # noqa: E402  the deploy

report = Operator.on_broker(app.broker).verify()
print(f"{report.looked_at} orders in flight, {report.unfit} of them do not fit")

worker = dramatiq.Worker(app.broker, worker_timeout=100)
worker.start()
for run in (get_flow(charged), get_flow(unseen), app.order.send("order-3")):
    print(run.result(wait=30))
worker.stop()
