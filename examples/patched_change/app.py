"""The shop with a change of its workflow: orders are checked for fraud before they are charged.

Orders in flight have been charged already. For them ``flow.patched`` is false, and stays false; for all others it is true. Once
no order of version 1 is live, the ``if`` can go, and the check stays.
"""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("orders.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)
def check_fraud(number: str) -> str:
    return "checked"


@dramatiq.actor(max_retries=3)
def charge_card(number: str) -> str:
    return f"charge-for-{number}"


@dramatiq.actor(max_retries=3, queue_name="warehouse")
def ship(number: str) -> None: ...


@workflow(version="2")
def order(flow: Flow, number: str) -> list[str]:
    done = []
    if flow.patched("check-fraud-before-charging"):
        done.append(flow.run(check_fraud, number))
    done.append(flow.run(charge_card, number))
    flow.run(ship, number)
    return [*done, "shipped"]
