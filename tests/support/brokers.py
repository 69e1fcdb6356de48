"""Brokers of every kind for the conformance suite, and consumers driven by hand.

A test that drives a consumer itself decides when a message is taken, acknowledged or forgotten, and moves a manual clock;
nothing happens behind its back.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Broker, Worker
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    CurrentMessage,
    Middleware,
    Pipelines,
    Retries,
    ShutdownNotifications,
    TimeLimit,
)

from dramatiq_saga.brokers import DatabaseBroker, DatabaseMessageProxy, SQLiteBroker
from dramatiq_saga.brokers.consumer import DatabaseConsumer
from dramatiq_saga.clock import Clock
from tests.support import servers

DATABASE_KINDS = ("sqlite", "postgresql", "mariadb")
KINDS = (*DATABASE_KINDS, "redis", "rabbitmq")

COLUMNS = (
    *("id", "queue", "state", "priority", "available_at", "reserved_at", "lease_until", "attempts"),
    *("actor", "message_id", "enqueued_at", "died_at", "reason", "message"),
)


def middleware() -> list[Middleware]:
    """Dramatiq's defaults without Prometheus, which opens a port, and with the current message."""
    return [AgeLimit(), TimeLimit(interval=50), ShutdownNotifications(), Callbacks(), Pipelines(), Retries(), CurrentMessage()]


class Brokers:
    """Makes brokers of one kind that share one queue store, as processes would, and closes them."""

    def __init__(self, kind: str, request: pytest.FixtureRequest) -> None:
        self.kind = kind
        self._request = request
        self._stack = contextlib.ExitStack()
        self._swept = False

    def __call__(self, *, clock: Clock | None = None, **options: Any) -> Any:
        broker = self._make(clock, options)
        if self.kind == "redis":
            self._stack.callback(broker.client.close)
        self._stack.callback(broker.close)
        dramatiq.set_broker(broker)
        return broker

    def _make(self, clock: Clock | None, options: dict[str, Any]) -> Broker:
        options.setdefault("middleware", middleware())
        value = self._request.getfixturevalue
        if self.kind == "redis":
            from dramatiq.brokers.redis import RedisBroker

            return RedisBroker(url=value("redis_url"), **options)
        if self.kind == "rabbitmq":
            from dramatiq.brokers.rabbitmq import RabbitmqBroker

            return RabbitmqBroker(url=value("rabbitmq_url"), **options)
        if self.kind == "sqlite":
            return SQLiteBroker(value("sqlite_path"), clock=clock, **options)
        # Making and dropping the tables takes longer than most tests: those of a server serve the whole session, swept.
        prefix = value("server_prefixes").setdefault(self.kind, servers.random_name() + "_")
        broker = DatabaseBroker(servers.require(self.kind), prefix=prefix, clock=clock, **options)
        broker.store.migrate()
        if not self._swept:
            broker.store.write(lambda tx: tx.run("DELETE FROM {messages}"))
            self._swept = True
        return broker

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def working(broker: Broker, *, threads: int = 4, **options: Any) -> Iterator[Worker]:
    """A Worker in this process, stopped at the end."""
    worker = Worker(broker, worker_threads=threads, worker_timeout=options.pop("worker_timeout", 100), **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def take(consumer: DatabaseConsumer) -> DatabaseMessageProxy:
    """The next delivery; fails when there is none."""
    proxy = next(consumer)
    assert proxy is not None, "nothing was delivered"
    return proxy


def take_all(consumer: DatabaseConsumer) -> list[DatabaseMessageProxy]:
    """Deliveries until there are none."""
    return list(iter(lambda: next(consumer), None))


def rows(broker: DatabaseBroker) -> list[dict[str, Any]]:
    """What the queue's table holds, by id."""
    found = broker.store.read(lambda tx: tx.all(f"SELECT {', '.join(COLUMNS)} FROM {{messages}} ORDER BY id"))
    return [dict(zip(COLUMNS, row, strict=True)) for row in found]


def row(broker: DatabaseBroker) -> dict[str, Any]:
    """The only row."""
    (only,) = rows(broker)
    return only


def sql(broker: DatabaseBroker, statement: str, *params: object) -> int:
    """Change the table behind the broker's back."""
    return broker.store.write(lambda tx: tx.run(statement, params))


def recording(broker: Broker, name: str = "record", **options: Any) -> tuple[Any, list[Any]]:
    """An actor that notes its argument, and the notes."""
    seen: list[Any] = []

    def record(value: Any = None) -> None:
        seen.append(value)

    actor: Callable[..., Any] = dramatiq.actor(record, broker=broker, actor_name=name, **options)
    return actor, seen


@contextlib.contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the SQLite file's write lock from a connection that nobody else knows."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=5)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()
