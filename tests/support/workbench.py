"""An application on a test bench: real store, real broker, real worker threads, and a clock that moves when it is told to.

``Workbench`` stands on a database broker, whose messages join the transactions, or (``joins=False``) on Dramatiq's stub broker,
whose messages leave after the commit. Actors do what ``bodies`` says, at the moment they run; what they did is in ``done``.
Messages can be looked at and lost on purpose, because that is what recovery is about.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq import Broker, Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.message import Message

from dramatiq_saga import Flow, FlowHandle, SagaMiddleware, Settings, Workflow, workflow
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.core import Engine, Sender
from dramatiq_saga.engine.drive import Driven, drive
from dramatiq_saga.recovery.sweep import SweepReport, sweep
from dramatiq_saga.step import OPTION
from tests.support.locks import chosen
from tests.support.waiting import eventually

Body = Callable[..., Any]

#: Makes benches, each with a file of its own, and closes them at the end: see ``tests/unit/conftest.py``.
MakeBench = Callable[..., "Workbench"]


class Workbench:
    """``bench.send()`` starts a run of ``trip``: book_hotel (undone by cancel_hotel), book_flight (undone by cancel_flight), pay."""

    def __init__(
        self,
        database: str | Path,
        *,
        joins: bool = True,
        settings: Settings | None = None,
        prefix: str = "saga_",
        actors: tuple[str, ...] = ("book_hotel", "cancel_hotel", "book_flight", "cancel_flight", "pay"),
    ) -> None:
        self.clock = ManualClock()
        self.settings = Settings.from_mapping(
            {"schema.table_prefix": prefix}, base=settings or Settings.from_mapping({"repair.enabled": True})
        )
        self.joins = joins
        self.broker: Broker = DatabaseBroker(database, prefix=prefix, clock=self.clock) if joins else StubBroker()
        self.middleware = SagaMiddleware(None if joins else database, settings=self.settings, locks=chosen())
        self.broker.add_middleware(self.middleware)
        self.engine.store.clock = self.clock
        self.engine.store.migrate()
        self.bodies: dict[str, Body] = {}
        self.done: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        self.actors = {name: self.declare(name) for name in actors}
        self.trip = self._declare_trip()

    @property
    def engine(self) -> Engine:
        return self.middleware.engine(self.broker)

    @property
    def sender(self) -> Sender:
        return self.middleware.sender(self.broker)

    def declare(self, name: str, **options: Any) -> dramatiq.Actor[Any, Any]:
        """An actor that does what ``bodies[name]`` says; without one it returns its name."""

        def body(*args: Any) -> Any:
            with self._lock:
                self.done.append((name, args))
            return self.bodies[name](*args) if name in self.bodies else {"by": name}

        return dramatiq.actor(
            body,
            actor_name=name,
            broker=self.broker,
            **{"max_retries": 3, "min_backoff": 20_000, "max_backoff": 20_000, **options},
        )

    def _declare_trip(self) -> Workflow[Any, Any]:
        def trip(flow: Flow, traveller: str = "ada") -> Any:
            hotel = (
                flow.action(self.actors["book_hotel"], traveller).compensate_with(self.actors["cancel_hotel"], traveller).run()
            )
            flow.action(self.actors["book_flight"], traveller).compensate_with(self.actors["cancel_flight"], traveller).run()
            flow.run(self.actors["pay"], traveller)
            return hotel

        self.flow_function: Callable[..., Any] = trip

        def through(flow: Flow, traveller: str = "ada") -> Any:
            return self.flow_function(flow, traveller)

        return workflow(name="trip", broker=self.broker)(through)

    # --- what happens ------------------------------------------------------------------------------------------------

    def send(self, *args: Any, **options: Any) -> FlowHandle[Any]:
        return self.trip.send_with_options(args=args, **options)

    def drive(self, run: FlowHandle[Any]) -> Driven:
        """Drive a run here and now, without its drive message: what it asks for is scheduled, and nobody has taken it."""
        self.lose_messages()
        return drive(self.engine, run.id, self.sender)

    @contextmanager
    def working(self, threads: int = 2) -> Iterator[None]:
        """A worker runs meanwhile, in this process."""
        worker = Worker(self.broker, worker_timeout=10, worker_threads=threads)
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    def work_until(self, fact: Callable[[], Any], *, because: str = "") -> None:
        """Let a worker run until ``fact``."""
        with self.working():
            eventually(fact, because=because)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def sweep(self) -> SweepReport:
        return sweep(self.engine, self.sender)

    # --- rows and messages -------------------------------------------------------------------------------------------

    def row(self, run: FlowHandle[Any], sequence: int, *columns: str, table: str = "action_runs") -> tuple[Any, ...]:
        sql = f"SELECT {', '.join(columns)} FROM {{{table}}} WHERE run_id = ? AND sequence = ?"
        found = self.engine.store.read(lambda tx: tx.one(sql, (run.id, sequence)))
        assert found is not None, f"run {run.id} has no row {sequence} in {table}"
        return found

    def run_row(self, run: FlowHandle[Any], *columns: str) -> tuple[Any, ...]:
        found = self.engine.store.read(
            lambda tx: tx.one(f"SELECT {', '.join(columns)} FROM {{flow_runs}} WHERE id = ?", (run.id,))
        )
        assert found is not None
        return found

    def write(self, sql: str, *params: Any) -> int:
        """Change rows behind everybody's back."""
        return self.engine.store.write(lambda tx: tx.run(sql, params))

    def messages(self) -> list[Message[Any]]:
        """What waits in the queues, dead letters aside, in the order in which it was sent."""
        if self.joins:
            rows = self.engine.store.read(lambda tx: tx.all("SELECT message FROM {messages} WHERE state <> 3 ORDER BY id"))
            return [Message.decode(bytes(row[0])) for row in rows]
        queues: Any = self.broker.queues
        return [Message.decode(data) for queue in queues.values() for data in list(queue.queue)]

    def asked(self) -> list[tuple[str, int | None]]:
        """What those messages ask for: ``[("drive", None), ("step", 2)]``."""
        found = [message.options[OPTION] for message in self.messages()]
        return [(facts["kind"], facts.get("sequence")) for facts in found]

    def lose_messages(self) -> int:
        """Every message that waits is gone, as after the loss of a broker's disk; how many there were."""
        lost = len(self.messages())
        if self.joins:
            self.write("DELETE FROM {messages} WHERE state <> 3")
        else:
            self.broker.flush_all()
        return lost

    def close(self) -> None:
        self.broker.close()
        self.engine.store.close()
