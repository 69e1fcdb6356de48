"""A trip: paid for, approved by somebody, booked, invoiced, and asked about a month later."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("trips.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)

HOUR = 3_600_000  # milliseconds, as everywhere in Dramatiq


class CardDeclined(Exception):
    """Trying again will not help."""


@dramatiq.actor(max_retries=3, min_backoff=HOUR, max_backoff=12 * HOUR, throws=CardDeclined)
def charge_card(traveller: str) -> str:
    raise NotImplementedError("it would call the bank")


@dramatiq.actor(max_retries=10)
def refund_card(charge: str) -> None:
    raise NotImplementedError("it would call the bank")


@dramatiq.actor(max_retries=0)
def book_hotel(traveller: str) -> str:
    return f"room for {traveller}"


@dramatiq.actor(max_retries=3)
def cancel_hotel(traveller: str) -> None:
    print("the room is free again")


@dramatiq.actor(max_retries=0)
def book_flight(traveller: str) -> str:
    return f"seat for {traveller}"


@dramatiq.actor(max_retries=3)
def cancel_flight(traveller: str) -> None:
    print("the seat is free again")


@dramatiq.actor(max_retries=3)
def write_invoice(traveller: str, things: list[str]) -> str:
    return f"{traveller}: {', '.join(things)}"


@dramatiq.actor(max_retries=3)
def ask_how_it_was(traveller: str) -> None:
    print("dear", traveller)


@workflow
def invoice(flow: Flow, traveller: str, things: list[str]) -> str:
    return flow.run(write_invoice, traveller, things)


@workflow
def trip(flow: Flow, traveller: str) -> str:
    flow.action(charge_card, traveller).compensate_with(lambda charge: refund_card.message(charge)).run()
    approved_by: str = flow.await_signal("approved", wait_seconds=timedelta(days=7))
    booked = flow.parallel(
        flow.action(book_hotel, traveller).compensate_with(cancel_hotel, traveller),
        flow.action(book_flight, traveller).compensate_with(cancel_flight, traveller),
    ).run()
    text = flow.child(invoice, traveller, booked).run()
    flow.sleep(timedelta(days=30))
    flow.run(ask_how_it_was, traveller)
    return f"{text} (approved by {approved_by})"
