# shop.py
from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("shop.db"))  # queue and saga state in one file: nothing else to run
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)  # Dramatiq's default is 20 tries over a month before a rollback would begin
def charge_card(order_id: str) -> dict[str, str]:
    return {"id": f"charge-for-{order_id}"}


@dramatiq.actor(max_retries=3)
def refund_card(charge_id: str) -> None:
    print("refunded", charge_id)


@dramatiq.actor(max_retries=3)
def reserve_stock(order_id: str) -> None:
    print("reserved the goods of", order_id)


@dramatiq.actor(max_retries=3)
def release_stock(order_id: str) -> None:
    print("released the goods of", order_id)


@dramatiq.actor(max_retries=3, throws=ValueError)  # a ValueError is final: no further tries
def ship_order(order_id: str) -> None:
    if "nowhere" in order_id:
        raise ValueError("no such address")
    print("shipped", order_id)


@workflow
def checkout(flow: Flow, order_id: str) -> dict[str, str]:
    charge = (
        flow.action(charge_card, order_id)
        .compensate_with(lambda charge: refund_card.message(charge["id"]))  # built from the step's own result
        .run()
    )
    flow.action(reserve_stock, order_id).compensate_with(release_stock, order_id).run()
    flow.run(ship_order, order_id)
    return {"charge": charge["id"]}
