"""The order, and a bank that knows how much is on each card."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, RetryContext, RetryPolicy, SagaMiddleware, Settings, StepFailedError, current_step, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("declined_card.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)

cards = {"ada": 10, "bob": 10, "eve": 0}
stolen = {"eve"}
paid: list[str] = []


class Declined(Exception):
    """The bank said no."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dramatiq.actor(max_retries=3, min_backoff=100)
def reserve(order: str) -> None:
    print(f"{order}: the teapot is set aside")


@dramatiq.actor(max_retries=3, min_backoff=100)
def put_back(order: str) -> None:
    print(f"{order}: the teapot goes back to the shelf")


@dramatiq.actor(max_retries=3, min_backoff=100, throws=Declined)  # a declined card is no reason for Dramatiq to try again
def charge(order: str, card: str, amount: int) -> str:
    step = current_step()
    assert step is not None
    # The bank repeats its answer for a key that it has seen. Each retry by a signal has a key of its own, so it may say yes this time.
    key = step.idempotency_key.removeprefix(step.run_id)
    print(f"{order}: charge {amount} to {card}'s card, key {key}")
    if card in stolen:
        raise Declined("stolen", "this card was reported stolen")
    if cards[card] < amount:
        raise Declined("funds", f"{cards[card]} is not enough")
    cards[card] -= amount
    paid.append(order)
    return f"receipt for {order}"


@dramatiq.actor(max_retries=3, min_backoff=100)
def ship(order: str) -> None:
    print(f"{order}: shipped")


def may_be_topped_up(context: RetryContext) -> bool:
    """Looks at the failure and decides; it must not do anything."""
    failure = context.failure
    return isinstance(failure, StepFailedError) and failure.code == "funds"


topped_up = RetryPolicy("topped-up", max_retries=2, wait_seconds=3 * 24 * 3600, only=Declined, when=may_be_topped_up)


@workflow
def buy(flow: Flow, order: str, card: str, amount: int) -> str:
    flow.action(reserve, order).compensate_with(put_back, order).run()
    receipt = flow.action(charge, order, card, amount).retry_on_signal(topped_up).run()
    flow.run(ship, order)
    return receipt
