"""Async actors as steps, for worker processes of the tests: ``dramatiq tests.processes.async_app``."""

from __future__ import annotations

import asyncio
import os

import dramatiq
from dramatiq.middleware import AsyncIO

from dramatiq_saga import Flow, SagaMiddleware, current_step, workflow
from dramatiq_saga.brokers import SQLiteBroker
from tests.support.effects import EffectLog

PATH = "ASYNC_APP_PATH"

broker = SQLiteBroker(os.environ[PATH])
broker.add_middleware(AsyncIO())
broker.add_middleware(SagaMiddleware())
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=0)
async def charge(order: str) -> dict[str, str]:
    """Answers on another turn of the event loop."""
    await asyncio.sleep(0)
    EffectLog.from_env().record("charge", order=order)
    return {"id": f"c-{order}"}


@dramatiq.actor(max_retries=0)
async def refund(charge_id: str) -> None:
    """Undoes it."""
    await asyncio.sleep(0)
    step = current_step()
    assert step is not None and step.undoes is not None
    EffectLog.from_env().record("refund", charge=charge_id, undoes=step.undoes.actor)


@dramatiq.actor(max_retries=1, min_backoff=1, max_backoff=2, time_limit=1_000)
async def deliver(order: str) -> str:
    """Takes too long the first time."""
    effects = EffectLog.from_env()
    first = effects.count("deliver") == 0
    effects.record("deliver")
    try:
        if first:
            await asyncio.sleep(600)
    finally:
        effects.record("delivered")
    return "there"


@dramatiq.actor(max_retries=0, notify_shutdown=True)
async def rest(order: str) -> str:
    """Rests for ever in the first worker."""
    effects = EffectLog.from_env()
    first = effects.count("rest") == 0
    effects.record("rest")
    try:
        if first:
            await asyncio.sleep(600)
    finally:
        effects.record("rested")
    return "rested"


@dramatiq.actor(max_retries=0)
async def refuse(order: str) -> None:
    """Fails for good."""
    raise ValueError(f"no such address: {order}")


@workflow
def checkout(flow: Flow, order: str) -> str:
    flow.action(charge, order).compensate_with(lambda made: refund.message(made["id"])).run()
    return flow.run(deliver, order)


@workflow
def lost(flow: Flow, order: str) -> None:
    flow.action(charge, order).compensate_with(lambda made: refund.message(made["id"])).run()
    flow.run(refuse, order)


@workflow
def slow(flow: Flow, order: str) -> str:
    return flow.run(rest, order)
