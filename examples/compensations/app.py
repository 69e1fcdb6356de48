"""A journey: three bookings, each undone in its own way."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, current_step, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("journeys.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


class NoSeats(Exception):
    """The train is full."""


@dramatiq.actor(max_retries=3)
def book_hotel(city: str) -> dict[str, str]:
    return {"booking": f"hotel-{city}", "pin": "1234"}


@dramatiq.actor(max_retries=3)
def cancel_hotel(booking: str, pin: str) -> None:
    print(f"cancelled {booking} with pin {pin}")


@dramatiq.actor(max_retries=3)
def send_greeting(city: str) -> None:
    pass


@dramatiq.actor(max_retries=0)
def call_greeting_back(city: str) -> None:
    raise RuntimeError("a postcard cannot be called back")


@dramatiq.actor(max_retries=0)
def reserve_seat(city: str) -> str:
    step = current_step()
    assert step is not None
    # Whatever the railway does with this request, it knows it by this key; the undo is told the same one.
    print(f"asking for a seat as {step.idempotency_key.partition(':')[2]}")
    raise NoSeats("the railway hung up before it said whether the seat is ours")


@dramatiq.actor(max_retries=3)
def release_seat(city: str) -> None:
    step = current_step()
    assert step is not None
    assert step.undoes is not None
    print(f"releasing the seat asked for as {step.undoes.idempotency_key.partition(':')[2]}, which {step.undoes.outcome}")


@workflow
def journey(flow: Flow, city: str) -> str:
    # From the result: the function gets what the step has returned, and makes the message of the undo.
    hotel = (
        flow.action(book_hotel, city)
        .compensate_with(lambda hotel: cancel_hotel.message(hotel["booking"], pin=hotel["pin"]))
        .run()
    )
    # An undo that fails halts the rollback, unless it is said to be worth less than the rest.
    flow.action(send_greeting, city).compensate_with(call_greeting_back, city).on_compensation_failure("continue").run()
    # A step that failed is not undone: as far as one knows, it has done nothing. This one may have done something all the same.
    seat = flow.action(reserve_seat, city).compensate_with(release_seat, city).compensate_step_on_self_failure().run()
    return f"{hotel['booking']}, {seat}"
