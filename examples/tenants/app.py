"""Code that asks for its tenant without being told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.settings import Context

tenant: ContextVar[str] = ContextVar("tenant")


@contextmanager
def as_tenant(name: str) -> Iterator[None]:
    """What a web application would do for each request, and what ``restore`` does for each piece of a run's code."""
    token = tenant.set(name)
    try:
        yield
    finally:
        tenant.reset(token)


settings = Settings(context=Context(capture=tenant.get, restore=as_tenant))
broker = SQLiteBroker(Path(__file__).with_name("tenants.db"))
broker.add_middleware(SagaMiddleware(settings=settings))
dramatiq.set_broker(broker)

stock = {"acme": 1, "globex": 0}  # a database per tenant, in real life


@dramatiq.actor(max_retries=0)
def reserve(order: str) -> str:
    if not stock[tenant.get()]:
        raise LookupError(f"{tenant.get()} is sold out")
    return f"{tenant.get()}-{order}"


@dramatiq.actor(max_retries=3)
def note(text: str) -> None:
    print(f"[{tenant.get()}] {text}")


@workflow
def sell(flow: Flow, order: str) -> str:
    flow.action(note, f"selling {order}").compensate_with(note, f"{order} was not sold").run()
    return flow.run(reserve, order)
