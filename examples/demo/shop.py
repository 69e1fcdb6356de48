"""The shop: what its workers run. An ordinary Dramatiq application with one workflow.

Only the bodies are odd: they tell the world what they do, and two of them wait at a point where the demonstration is going to
kill their process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, current_step, workflow
from dramatiq_saga.brokers import SQLiteBroker
from examples.demo.world import World

DIRECTORY = Path(os.environ["SAGA_DEMO_DIRECTORY"])

#: Seconds, all much shorter than in real life, so that you need not wait. A message is delivered again when its worker has not
#: been heard from for RETRY_AFTER; a step whose claim is older than RECLAIM_AFTER may be claimed again.
RETRY_AFTER, RECLAIM_AFTER, TIME_LIMIT = 2, 4, 3

broker = SQLiteBroker(DIRECTORY / "shop.db", retry_after=RETRY_AFTER)
broker.add_middleware(
    SagaMiddleware(
        settings=Settings.recommended(
            actions={"reclaim.stale_running.after_seconds": RECLAIM_AFTER},
            sagas={"reclaim.stale_running.after_seconds": RECLAIM_AFTER},
        )
    )
)
dramatiq.set_broker(broker)
world = World(DIRECTORY / "world.jsonl")


class CarrierBusy(Exception):
    """No van is free; there will be one soon."""


class NoSuchAddress(Exception):
    """Nothing can be delivered there, however often one tries."""


def begin(actor: str, order: str) -> str:
    """Tell the world that this body runs, and where; returns the step's idempotency key."""
    step = current_step()
    assert step is not None
    worker = os.environ.get("SAGA_DEMO_WORKER")
    world.note("body", actor=actor, order=order, run=step.run_id, key=step.idempotency_key, attempt=step.attempt, worker=worker)
    return step.idempotency_key


def first_try() -> bool:
    step = current_step()
    return step is not None and step.attempt == 1


@dramatiq.actor(max_retries=3, time_limit=TIME_LIMIT * 1000)
def charge_card(order: str) -> dict[str, str]:
    key = begin("charge_card", order)
    charge = world.charge(order, key)
    if order == "lamp" and first_try():
        time.sleep(60)  # the money has moved and the shop does not know it yet: here the worker is killed
    return charge


@dramatiq.actor(max_retries=3, time_limit=TIME_LIMIT * 1000)
def refund_card(order: str, charge_id: str) -> None:
    world.refund(charge_id, begin("refund_card", order))


@dramatiq.actor(max_retries=3, time_limit=TIME_LIMIT * 1000)
def reserve_stock(order: str) -> None:
    begin("reserve_stock", order)


@dramatiq.actor(max_retries=3, time_limit=TIME_LIMIT * 1000)
def release_stock(order: str) -> None:
    begin("release_stock", order)
    if order == "mirror" and first_try():
        time.sleep(60)  # here the worker is killed in the middle of a rollback


@dramatiq.actor(max_retries=3, min_backoff=200, throws=NoSuchAddress, time_limit=TIME_LIMIT * 1000)
def ship_order(order: str) -> str:
    begin("ship_order", order)
    if order == "vase" and first_try():
        raise CarrierBusy("no van is free")
    if order in ("piano", "mirror"):
        raise NoSuchAddress("1 Nowhere Street")
    return f"parcel-{order}"


@workflow
def checkout(flow: Flow, order: str) -> dict[str, str]:
    charge = (
        flow.action(charge_card, order)
        .compensate_with(lambda charge: refund_card.message(order, charge["id"]))  # built from the step's own result
        .run()
    )
    flow.action(reserve_stock, order).compensate_with(release_stock, order).run()
    parcel = flow.run(ship_order, order)
    return {"charge": charge["id"], "parcel": parcel}
