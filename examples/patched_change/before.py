"""The shop as it was when the first orders came in: what ``app.py`` looked like before the change."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("orders.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)
def charge_card(number: str) -> str:
    return f"charge-for-{number}"


@dramatiq.actor(max_retries=3, queue_name="warehouse")  # its workers start later in the day
def ship(number: str) -> None: ...


@workflow(version="1")
def order(flow: Flow, number: str) -> list[str]:
    done = [flow.run(charge_card, number)]
    flow.run(ship, number)
    return [*done, "shipped"]
