"""A flight, and three bookings on the ground that are cancelled side by side when the trip falls through."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("trips.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)

closed = {"airline"}  # who does not answer today


@dramatiq.actor(max_retries=3)
def book(what: str, city: str) -> str:
    return f"{what}-{city}"


@dramatiq.actor(max_retries=0)
def cancel_flight(city: str) -> None:
    if "airline" in closed:
        raise ConnectionError("the airline does not answer")


@dramatiq.actor(max_retries=3)
def cancel_booking(number: str, language: str) -> None:
    """Cancel what was booked on the ground, in writing."""


@dramatiq.actor(max_retries=0)
def cancel_theatre(city: str) -> None:
    raise PermissionError("tickets are not taken back")


@dramatiq.actor(max_retries=3, throws=ValueError)
def take_payment(city: str) -> None:
    raise ValueError("the card is declined")


@workflow
def trip(flow: Flow, city: str) -> list[str]:
    flow.action(book, "flight", city).compensate_with(cancel_flight, city).run()
    bookings: list[str] = (
        flow.saga(
            flow.action(book, "hotel", city).compensate_with(lambda number: cancel_booking.message(number, "pt")),
            flow.action(book, "car", city).compensate_with(lambda number: cancel_booking.message(number, "en")),
            # What the group says about a failing undo counts for all of its steps, unless one says something else.
            flow.action(book, "theatre", city).compensate_with(cancel_theatre, city),
        )
        .compensate_in_parallel()
        .on_compensation_failure("continue")
        .run()
    )
    flow.run(take_payment, city)
    return bookings
