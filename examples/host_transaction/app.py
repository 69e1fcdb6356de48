"""Orders in a table of ours, in the same SQLite file as queue and saga state."""

from __future__ import annotations

from pathlib import Path

import dramatiq
import peewee

from dramatiq_saga import Flow, FlowHandle, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

database = peewee.SqliteDatabase(str(Path(__file__).with_name("orders.db")))
broker = SQLiteBroker(database)  # the same Database object: that is what lets a run join its transactions
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


class Order(peewee.Model):
    id = peewee.AutoField()
    item = peewee.TextField()
    status = peewee.TextField(default="new")

    class Meta:
        database = database


@dramatiq.actor(max_retries=3)
def ship(order_id: int) -> None:
    # A step's own transaction is its own affair: end it before the step returns.
    with database.atomic("IMMEDIATE"):
        Order.update(status="shipped").where(Order.id == order_id).execute()


@workflow
def fulfil(flow: Flow, order_id: int) -> None:
    flow.run(ship, order_id)


def place_order(item: str) -> FlowHandle[None]:
    """The order and its run, in one transaction; an error leaves neither."""
    with database.atomic("IMMEDIATE"):  # begin as a writer: a transaction that starts with a read may find the file taken
        if not item:
            raise ValueError("an order of nothing")
        order = Order.create(item=item)
        run = fulfil.send(order.id)
        if item == "unicorn":
            raise LookupError("we have no unicorns")  # after send(): the run has not happened either
        return run
