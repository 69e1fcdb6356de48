"""An order, and its shipment as a run of its own."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("orders.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)
def charge_card(order_id: str) -> None:
    print(f"{order_id}: charged")


@dramatiq.actor(max_retries=3)
def refund_card(order_id: str) -> None:
    print(f"{order_id}: refunded")


@dramatiq.actor(max_retries=3)
def pack(order_id: str) -> str:
    print(f"{order_id}: packed")
    return f"parcel of {order_id}"


@dramatiq.actor(max_retries=3)
def unpack(order_id: str) -> None:
    print(f"{order_id}: unpacked")


@dramatiq.actor(max_retries=3, throws=ValueError)
def hand_over(parcel: str) -> None:
    if "nowhere" in parcel:
        raise ValueError("no such address")


@dramatiq.actor(max_retries=3)
def call_back(parcel: str) -> None:
    print(f"{parcel}: called back")


@dramatiq.actor(max_retries=3, throws=ValueError)
def send_invoice(order_id: str) -> None:
    if "unpaid" in order_id:
        raise ValueError("the bank has no such customer any more")


@workflow
def shipment(flow: Flow, order_id: str) -> str:
    parcel = flow.action(pack, order_id).compensate_with(unpack, order_id).run()
    flow.run(hand_over, parcel)
    return parcel


@workflow
def order(flow: Flow, order_id: str) -> str:
    flow.action(charge_card, order_id).compensate_with(refund_card, order_id).run()
    # A run of its own. If the order is cancelled meanwhile, so is the shipment; once it has completed, only what is said here
    # undoes it.
    parcel = (
        flow.child(shipment, order_id).close_policy("cancel").compensate_with(lambda parcel: call_back.message(parcel)).run()
    )
    flow.run(send_invoice, order_id)
    return parcel
