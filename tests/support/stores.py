"""Stores under test: rows to count with, faults to inject, and locks that another process holds."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import peewee

from dramatiq_saga.store import servers
from dramatiq_saga.store.database import Store, Tx, open_store
from tests.support.processes import Process
from tests.support.waiting import DEADLINE, eventually

#: Holds the write lock of a SQLite file until it is killed.
HOLD_WRITE_LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(600)
"""


# --- a row that counts -----------------------------------------------------------------------------------------------


def add(name: str = "n", amount: int = 1) -> Callable[[Tx], int]:
    """An operation that adds to a counter of that name, and returns its new value."""

    def operation(tx: Tx) -> int:
        update = "UPDATE {rate_limits} SET value = value + ? WHERE id = ?"
        if tx.run(update, (amount, name)) == 0:
            tx.run("{insert_ignore} {rate_limits} (id, value, expires_at) VALUES (?, 0, 0){or_ignore}", (name,))
            tx.run(update, (amount, name))
        row = tx.one("SELECT value FROM {rate_limits} WHERE id = ?", (name,))
        assert row is not None
        return int(row[0])

    return operation


def count(store: Store, name: str = "n") -> int:
    """The counter's value, 0 without one."""
    row = store.read(lambda tx: tx.one("SELECT value FROM {rate_limits} WHERE id = ?", (name,)))
    return 0 if row is None else int(row[0])


@contextmanager
def all_waiting(store: Store, other: Store) -> Iterator[None]:
    """For the length of the block, every engine thread of ``store`` waits for a row that ``other``, another process, keeps locked."""
    locked, release = threading.Event(), threading.Event()
    begun: list[Tx] = []

    def hold(tx: Tx) -> None:
        add("locked")(tx)
        locked.set()
        assert release.wait(DEADLINE)

    def come(tx: Tx) -> None:
        begun.append(tx)
        add("locked")(tx)

    other.write(add("locked"))
    with ThreadPoolExecutor(servers.MAX_THREADS + 1) as pool:
        try:
            writes = [pool.submit(other.write, hold)]
            assert locked.wait(DEADLINE)
            writes += [pool.submit(store.write, come) for _ in range(servers.MAX_THREADS)]
            eventually(lambda: len(begun) == servers.MAX_THREADS)
            yield
            assert not any(write.done() for write in writes)
        finally:
            release.set()
        for write in writes:
            write.result(DEADLINE)


# --- faults ----------------------------------------------------------------------------------------------------------


def sqlite_error(code: int, text: str = "injected") -> sqlite3.OperationalError:
    """An error as the driver makes it."""
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


class Faults:
    """What a :class:`FaultyConnection` does wrong, and what it was asked to execute."""

    def __init__(self) -> None:
        self.executed: list[str] = []
        self._plans: list[tuple[str, str, BaseException | Callable[[], None], list[int]]] = []

    def before(self, statement: str, error: BaseException | Callable[[], None], *, times: int = 1, skip: int = 0) -> None:
        """Fail instead of executing a statement that starts so; a function is called instead of raising."""
        self._plans.append(("before", statement, error, [skip, times]))

    def after(self, statement: str, error: BaseException | Callable[[], None], *, times: int = 1, skip: int = 0) -> None:
        """Execute it, and fail then."""
        self._plans.append(("after", statement, error, [skip, times]))

    def count(self, statement: str) -> int:
        """How many statements started so."""
        return sum(1 for text in self.executed if text.startswith(statement))

    def act(self, when: str, statement: str) -> None:
        for moment, start, error, left in self._plans:
            if moment == when and statement.startswith(start):
                if left[0] > 0:
                    left[0] -= 1
                elif left[1] > 0:
                    left[1] -= 1
                    if isinstance(error, BaseException):
                        raise error
                    error()


class FaultyConnection(sqlite3.Connection):
    """A connection that fails where it is told to."""

    faults: ClassVar[Faults]
    opened: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        type(self).opened += 1
        super().__init__(*args, **kwargs)

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]
        self.faults.executed.append(sql)
        self.faults.act("before", sql)
        cursor = super().execute(sql, *args)
        self.faults.act("after", sql)
        return cursor


def faulty_connection() -> type[FaultyConnection]:
    """A class of its own for each test, with no faults yet."""
    return type("Faulty", (FaultyConnection,), {"faults": Faults(), "opened": 0})


@contextmanager
def faulty_store(path: Path, **options: Any) -> Iterator[tuple[Store, Faults]]:
    """A store on a file whose connections fail as planned. Its tables are there; what happened so far is forgotten."""
    factory = faulty_connection()
    database = peewee.SqliteDatabase(
        str(path), factory=factory, timeout=options.pop("timeout", 5), pragmas={"synchronous": "off"}
    )
    store = open_store(database, **options)
    store.prepare()
    store.write(add("warm"))
    factory.faults.executed.clear()
    try:
        yield store, factory.faults
    finally:
        store.close()
        store.close_thread()


# --- threads and locks -----------------------------------------------------------------------------------------------


class Standstill:
    """Keeps SQLite's writer thread busy, so that what is submitted meanwhile waits together."""

    def __init__(self, store: Store) -> None:
        self._stopped, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: store._control(self._stand))
        self._thread.start()
        assert self._stopped.wait(20)

    def _stand(self) -> None:
        self._stopped.set()
        assert self._go_on.wait(60)

    def end(self) -> None:
        self._go_on.set()
        self._thread.join()


@contextmanager
def write_lock_held(python_process: Callable[..., Process], path: Path) -> Iterator[None]:
    """Another process holds the file's write lock meanwhile."""
    holder = python_process("-c", HOLD_WRITE_LOCK, str(path))
    holder.wait_for_output("locked")
    try:
        yield
    finally:
        holder.kill()
