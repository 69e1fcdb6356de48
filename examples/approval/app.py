"""Expenses above a limit wait for somebody to approve them; the money is reserved meanwhile, and not for ever."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, SignalTimeoutError, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("expenses.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)
def reserve(amount: int) -> str:
    return f"budget-{amount}"


@dramatiq.actor(max_retries=3)
def release(reservation: str) -> None:
    print(f"released {reservation}")


@dramatiq.actor(max_retries=3)
def ask(who: str, amount: int) -> None:
    print(f"asked {who} about {amount}")


@dramatiq.actor(max_retries=3)
def pay(reservation: str) -> str:
    return f"paid from {reservation}"


@workflow
def expense(flow: Flow, amount: int, patience: float) -> str:
    reservation = flow.action(reserve, amount).compensate_with(lambda made: release.message(made)).run()
    for who in ("the team lead", "the head of department"):
        flow.run(ask, who, amount)
        try:
            answer = flow.await_signal("answer", wait_seconds=patience)
        except SignalTimeoutError:
            continue  # the next one is asked
        if answer["granted"]:
            return f"{flow.run(pay, reservation)}, granted by {answer['by']}"
        raise PermissionError(f"refused by {answer['by']}")  # the run fails, and the reservation is undone
    flow.await_signal("answer")  # nobody answers: the run's own deadline ends it, and undoes the reservation
    return "unreachable"
