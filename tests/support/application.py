"""A small application on real parts: a broker, a store, the middleware, and Dramatiq workers in this process.

``Application`` declares actors and workflows on a queue of its own, starts workers and stops them again, and keeps what the
bodies did in ``calls``. Kinds differ in where rows and messages live; everything else is the same:

* ``sqlite``      rows and queue in one SQLite file
* ``postgresql``, ``mariadb``   rows and queue in one server
* ``redis``       RedisBroker in front of a PostgreSQL store
* ``rabbitmq``    RabbitmqBroker in front of an SQLite store
* ``stub``        StubBroker in front of an SQLite store
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq import Broker, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Retries, TimeLimit, default_middleware

from dramatiq_saga import FlowHandle, SagaMiddleware, Settings, Workflow, workflow
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.locks import LockBackend
from dramatiq_saga.statuses import FLOW_TERMINAL, FlowStatus
from dramatiq_saga.store.database import Store, open_store
from dramatiq_saga.store.models import TABLES
from tests.support import servers
from tests.support.locks import chosen
from tests.support.waiting import DEADLINE, eventually

#: Kinds that write rows and messages in one transaction.
JOINED = ("sqlite", "postgresql", "mariadb")


class Application:
    """One broker with its middleware, on one store."""

    def __init__(self, kind: str, broker: Broker, middleware: SagaMiddleware, *, queue: str) -> None:
        self.kind = kind
        self.broker = broker
        self.middleware = middleware
        self.queue = queue
        self.calls: list[Any] = []
        self._workers: list[Worker] = []
        broker.add_middleware(middleware)
        for known in broker.middleware:
            if isinstance(known, Retries):
                known.min_backoff, known.max_backoff = 4, 16
        dramatiq.set_broker(broker)

    # --- parts -------------------------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        return self.kind in JOINED

    @property
    def engine(self) -> Any:
        return self.middleware.engine(self.broker)

    @property
    def store(self) -> Store:
        return self.engine.store

    # --- declaring ---------------------------------------------------------------------------------------------------

    def actor(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """``dramatiq.actor`` on this broker and queue; no retries unless asked for."""
        if fn is None:
            return functools.partial(self.actor, **options)
        if any(isinstance(known, Retries) for known in self.broker.middleware) and "retry_when" not in options:
            options.setdefault("max_retries", 0)
        options.setdefault("queue_name", self.queue)
        return dramatiq.actor(fn, broker=self.broker, **options)

    def step(self, name: str, *, gives: Any = None, raises: BaseException | None = None, **options: Any) -> Any:
        """An actor that notes its call as ``(name, *args)`` and gives or raises what it is told to."""

        def body(*args: Any) -> Any:
            self.calls.append((name, *args))
            if raises is not None:
                raise raises
            return gives

        return self.actor(body, actor_name=name, **options)

    def workflow(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """``workflow`` on this broker and queue."""
        if fn is None:
            return functools.partial(self.workflow, **options)
        options.setdefault("queue_name", self.queue)
        declared: Workflow[Any, Any] = workflow(broker=self.broker, **options)(fn)
        return declared

    # --- running -----------------------------------------------------------------------------------------------------

    def start(self, *, threads: int = 2, queues: set[str] | None = None, time_limits: bool = False) -> Worker:
        """A real worker, in this process. ``time_limits``: start what enforces them, as the command line does."""
        if time_limits:
            for known in self.broker.middleware:
                if isinstance(known, TimeLimit):
                    known.manager.interval = 0.01
            self.broker.emit_after("process_boot")
        worker = Worker(self.broker, worker_threads=threads, worker_timeout=20, queues=queues)
        worker.start()
        self._workers.append(worker)
        return worker

    @contextmanager
    def working(self, **options: Any) -> Iterator[Worker]:
        """A worker for the length of a block."""
        worker = self.start(**options)
        try:
            yield worker
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop the workers that :meth:`start` has started."""
        while self._workers:
            worker = self._workers.pop()
            worker.stop(timeout=30_000)
            self.broker.middleware = [known for known in self.broker.middleware if type(known).__name__ != "_WorkerMiddleware"]

    def drain(self, timeout: float = DEADLINE) -> None:
        """Return once no message is left, delayed ones included, and the workers have nothing in hand."""
        for queue in list(self.broker.get_declared_queues()):
            options: dict[str, Any] = {"fail_fast": False} if self.kind == "stub" else {}
            self.broker.join(queue, timeout=int(timeout * 1000), **options)
        for worker in self._workers:
            worker.join()

    def ended(self, handle: FlowHandle[Any], timeout: float = DEADLINE) -> str:
        """The run's terminal status, waited for."""

        def terminal() -> FlowStatus | None:
            status = handle.status
            return status if status in FLOW_TERMINAL else None

        return str(eventually(terminal, timeout, because=f"run {handle.id} ends").value)

    def run(self, declared: Workflow[Any, Any], *args: Any, **kwargs: Any) -> FlowHandle[Any]:
        """Send a run and wait for its end with a worker running, which is started if there is none."""
        if not self._workers:
            self.start()
        handle = declared.send(*args, **kwargs)
        self.ended(handle)
        return handle

    # --- looking -----------------------------------------------------------------------------------------------------

    def sql(self, text: str, *params: Any) -> list[tuple[Any, ...]]:
        """Rows of a query in the store's template language."""
        return self.store.read(lambda tx: tx.all(text, params))

    def execute(self, text: str, *params: Any) -> int:
        """Run one statement, as an operator with a database shell would."""
        return self.store.write(lambda tx: tx.run(text, params))

    def messages(self) -> int:
        """How many messages are anywhere in the broker, dead letters aside."""
        if self.joined:
            return int(self.sql("SELECT COUNT(*) FROM {messages} WHERE state <> 3")[0][0])
        if isinstance(self.broker, StubBroker):
            return sum(queue.unfinished_tasks for queue in self.broker.queues.values())
        if self.kind == "rabbitmq":
            counts: Any = self.broker.get_queue_message_counts  # type: ignore[attr-defined]
            return sum(sum(counts(queue)[:2]) for queue in self.broker.get_declared_queues())
        return sum(self.broker.do_qsize(queue) for queue in self.broker.get_declared_queues())  # type: ignore[attr-defined]

    def types(self, handle: FlowHandle[Any]) -> list[str]:
        """The words of a run's history, in order."""
        return [event.type for event in handle.events()]

    def close(self) -> None:
        self.stop()
        for known in self.broker.middleware:
            if isinstance(known, TimeLimit):
                known.manager.interval = 3600.0  # its thread has no end; let it sleep
        if not hasattr(self.broker, "store") and self.middleware._engine is not None:
            self.store.close()
        self.broker.close()


class Places:
    """Where applications put their rows and messages: made once per session, emptied for each test."""

    def __init__(self, directory: Path) -> None:
        self.prefix = servers.random_name() + "_"
        self._template = directory / "template.db"
        self._servers: set[str] = set()
        self._vhost: str | None = None
        self._lock = threading.Lock()

    def sqlite(self, path: Path) -> Path:
        """A file with the tables in it, at ``path``."""
        with self._lock:
            if not self._template.exists():
                store = open_store(self._template)
                store.prepare()
                store.close()
        shutil.copy(self._template, path)
        return path

    def server(self, name: str) -> tuple[str, str]:
        """The address of a server and the prefix of tables of this session's own, which are empty."""
        url = servers.require(name)
        if name in self._servers:
            servers.empty_tables(name, [self.prefix + table for table in TABLES])
        else:
            self._servers.add(name)
            store = open_store(url, prefix=self.prefix)
            store.migrate()
            store.close()
        return url, self.prefix

    def rabbitmq(self) -> str:
        """A virtual host of this session's own; applications have queues of their own on it."""
        if self._vhost is None:
            servers.require("rabbitmq")
            self._vhost = servers.create_vhost()
        return self._vhost

    def close(self) -> None:
        for name in self._servers:
            servers.drop_tables(name, self.prefix)
        if self._vhost is not None:
            servers.delete_vhost(self._vhost)


class Applications:
    """Makes applications, and closes them at the end of the test."""

    def __init__(self, places: Places, directory: Path) -> None:
        self._places = places
        self._directory = directory
        self._made: list[Application] = []
        self._redis: list[str] = []

    def __call__(
        self,
        kind: str = "sqlite",
        *,
        settings: Settings | None = None,
        broker: Callable[..., Broker] | None = None,
        middleware: list[Any] | None = None,
        prefix: str | None = None,
        locks: LockBackend | None = None,
        **options: Any,
    ) -> Application:
        """An application of that kind. ``broker`` replaces the broker's class, ``middleware`` what stands before ours."""
        before = [known() for known in default_middleware] if middleware is None else middleware
        if middleware is None:
            before.append(CurrentMessage())
        database: Any = None
        number = len(self._made)
        settings = settings or Settings()
        if kind in JOINED:
            if kind == "sqlite":
                made = (broker or SQLiteBroker)(self._places.sqlite(self.path(number)), middleware=before, **options)
            else:
                url, prefix = self._places.server(kind)
                made = (broker or DatabaseBroker)(url, prefix=prefix, middleware=before, **options)
        elif kind == "redis":
            database, prefix = self._places.server("postgresql")
            self._redis.append(servers.claim_redis())
            made = (broker or RedisBroker)(url=self._redis[-1], middleware=before, **options)
        elif kind == "rabbitmq":
            from dramatiq.brokers.rabbitmq import RabbitmqBroker

            database = self._places.sqlite(self.path(number))
            made = (broker or RabbitmqBroker)(url=self._places.rabbitmq(), middleware=before, confirm_delivery=True, **options)
        else:
            database = self._places.sqlite(self.path(number))
            made = (broker or StubBroker)(middleware=before, **options)
        if prefix is not None:
            schema = Settings.from_mapping({"schema": {"table_prefix": prefix}}).schema
            settings = replace(settings, schema=schema)
        app = Application(
            kind, made, SagaMiddleware(database, settings=settings, locks=locks or chosen()), queue=servers.random_name()
        )
        self._made.append(app)
        return app

    def path(self, number: int) -> Path:
        return self._directory / f"saga-{number}.db"

    def close(self) -> None:
        for app in reversed(self._made):
            app.close()
        for url in self._redis:
            servers.release_redis(url)
