"""An invoice with its money as money and its dates as dates, and steps that wait for others on an event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import dramatiq
from dramatiq.middleware import AsyncIO

from dramatiq_saga import Flow, SagaMiddleware, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.codec import TaggedJSONEncoder


@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str

    def __str__(self) -> str:
        return f"{self.amount} {self.currency}"


encoder = TaggedJSONEncoder()
encoder.register(Money, "money", to_plain=lambda m: (m.amount, m.currency), from_plain=lambda plain: Money(*plain))
dramatiq.set_encoder(encoder)  # for Dramatiq's ordinary messages as well

broker = SQLiteBroker(Path(__file__).with_name("invoices.db"))
broker.add_middleware(AsyncIO())  # runs async actors
broker.add_middleware(SagaMiddleware())
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, time_limit=30_000)
async def look_up_rate(currencies: frozenset[str]) -> Decimal:
    await asyncio.sleep(0)  # an async client at work
    return Decimal("1.10") if currencies == {"EUR", "USD"} else Decimal(1)


@dramatiq.actor(max_retries=3)
async def post_invoice(price: Money, due: date) -> dict[str, object]:
    await asyncio.sleep(0)
    return {"price": price, "reminders": {due - timedelta(days=7), due}}


@dramatiq.actor(max_retries=5)
async def withdraw_invoice(price: Money) -> None:
    print(f"withdrawing the invoice of {price}")


@dramatiq.actor(max_retries=0)
def archive(reminders: set[date]) -> int:
    if len(reminders) > 1:
        raise OSError("the archive is on fire")
    return len(reminders)


@workflow
def invoice(flow: Flow, price: Money, due: date) -> Money:
    rate = flow.run(look_up_rate, frozenset({price.currency, "USD"}))
    billed = Money((price.amount * rate).quantize(Decimal("0.01")), "USD")
    posted = flow.action(post_invoice, billed, due).compensate_with(withdraw_invoice, billed).run()
    reminders = posted["reminders"]
    assert isinstance(reminders, set)
    flow.action(archive, reminders).continue_on_failure(due.year > 2000).run()
    return billed
