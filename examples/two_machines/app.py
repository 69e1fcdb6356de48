"""The shop of ``examples/checkout`` on servers."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow

broker = RedisBroker(
    url=os.environ.get("SHOP_REDIS", "redis://localhost:6379/0"),
    namespace=os.environ.get("SHOP_NAMESPACE", "dramatiq"),
)
# Redis cannot join a transaction of PostgreSQL: a message leaves after the commit that makes it necessary. One that is lost in
# between is sent again by a sweep, which is why repair belongs on here.
broker.add_middleware(
    SagaMiddleware(
        os.environ.get("SHOP_DATABASE", "postgresql://localhost/shop"),
        settings=Settings.from_env(base=Settings.recommended()),
    )
)
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)
def charge_card(order_id: str) -> dict[str, str]:
    return {"id": f"charge-for-{order_id}"}


@dramatiq.actor(max_retries=3)
def refund_card(charge_id: str) -> None:
    print("refunded", charge_id, flush=True)


@dramatiq.actor(max_retries=3, throws=ValueError)
def ship_order(order_id: str) -> None:
    if "nowhere" in order_id:
        raise ValueError("no such address")


@workflow
def checkout(flow: Flow, order_id: str) -> dict[str, str]:
    charge = (
        flow.action(charge_card, order_id)
        .compensate_with(lambda charge: refund_card.message(charge["id"]))  # built from the step's own result
        .run()
    )
    flow.run(ship_order, order_id)
    return {"charge": charge["id"]}
