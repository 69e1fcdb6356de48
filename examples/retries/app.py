"""Every way in which a step may be tried again, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dramatiq
from dramatiq import Retry

from dramatiq_saga import Flow, SagaMiddleware, Settings, StepFailedError, current_step, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("retries.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


class CardDeclined(Exception):
    """Trying again will not help."""


def attempt() -> int:
    """Which try this is, counted from 1."""
    step = current_step()
    assert step is not None
    return step.attempt


@dramatiq.actor
def page_someone(message: dict[str, Any], info: dict[str, Any]) -> None:
    """An ordinary actor. The message of a step carries ids, no arguments: ``get_flow(run).actions()`` has the rest."""
    step = message["options"]["saga"]
    print(f"page: step {step['sequence']} of run {step['run']} has spent {info['max_retries']} retries")


@dramatiq.actor(max_retries=3, min_backoff=1_000, max_backoff=60_000)  # milliseconds, as everywhere in Dramatiq
def fetch_price(item: str) -> int:
    if attempt() < 3:
        raise ConnectionError("the price list does not answer")
    return 42


@dramatiq.actor(max_retries=5, throws=CardDeclined)  # declined is final: given up at the first try
def charge_card(item: str, price: int) -> None:
    raise CardDeclined(f"not enough money for {item}")


@dramatiq.actor(max_retries=5)
def wait_for_invoice(item: str) -> str:
    if attempt() == 1:
        raise Retry("not printed yet", delay=2_000)  # when to try again is up to the step
    return f"invoice for {item}"


@dramatiq.actor(max_retries=3, on_retry_exhausted="page_someone")
def post_invoice(invoice: str) -> None:
    raise ConnectionError("the printer is on fire")


@workflow
def sell(flow: Flow, item: str) -> str:
    price = flow.run(fetch_price, item)
    try:
        flow.run(charge_card, item, price)
    except StepFailedError as error:
        if not error.is_a(CardDeclined):  # judged by recorded names: works in every process, and for subclasses
            raise
    invoice = flow.run(wait_for_invoice, item)
    try:
        flow.action(post_invoice, invoice).with_options(max_retries=1, queue_name="post").run()  # this step alone
    except StepFailedError as error:
        return f"{invoice}, on credit, to be fetched ({error.message})"
    return f"{invoice}, on credit"
