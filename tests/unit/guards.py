"""What the tests of the two SQLite guards share: a broker whose connections can be made to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dramatiq

from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.clock import ManualClock
from tests.support.brokers import middleware
from tests.support.faults import Database, Faults

#: Seconds: what "the application's busy timeout" is in these tests.
BUSY_TIMEOUT = 0.05


class Guarded:
    """A broker with one queue, its clock, and the faults of its connections."""

    def __init__(self, path: Path, *, timeout: float = BUSY_TIMEOUT) -> None:
        self.path = path
        self.clock = ManualClock()
        self.database = Database(path, timeout=timeout)
        self.broker = SQLiteBroker(self.database, middleware=middleware(), clock=self.clock)
        dramatiq.set_broker(self.broker)
        self.broker.declare_queue("default")
        self.broker.join("default")  # the tables are there
        self.faults.clear()

    @property
    def faults(self) -> Faults:
        return self.database.faults

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *exc: object) -> None:
        self.faults.clear()
        self.broker.close()

    def send(self, value: Any = "x") -> None:
        message = dramatiq.Message(queue_name="default", actor_name="record", args=(value,), kwargs={}, options={})
        self.broker.enqueue(message)
        self.faults.clear()

    def consumer(self, prefetch: int = 1) -> Any:
        return self.broker.consume("default", prefetch=prefetch, timeout=20)

    def delivered(self, value: Any = "x") -> tuple[Any, Any]:
        """A consumer and the message that it has just delivered."""
        self.send(value)
        consumer = self.consumer()
        proxy = next(consumer)
        assert proxy is not None
        self.faults.clear()
        return consumer, proxy
