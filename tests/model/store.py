"""The engine's store for a model: one SQLite database in memory, one transaction at a time, and every one of them a place to stop.

An actor is a call of a verb of the engine. Between two of its transactions all that it knows is what its statements have answered so
far. So an actor that stands still is a list of answers (:class:`Entry`), and going on means calling its verb once more from the
beginning: statements that were executed before are answered from the list, the next transaction is executed on the database as it is
now, and at the one after that the actor stands still again (:class:`Pause`). Nothing of a verb is imitated: its statements, and the
code between them, are the ones that workers run.

What was computed before a pause is as old as that pause: "now" is the moment at which the last transaction was executed, so an actor
that has stood still writes with an old clock, as a worker does that was suspended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from peewee import SqliteDatabase

from dramatiq_saga.clock import ManualClock
from dramatiq_saga.errors import WriteUnknownError
from dramatiq_saga.store import migrations
from dramatiq_saga.store.models import TABLES
from dramatiq_saga.store.sql import SQLITE, Statements
from dramatiq_saga.store.transactions import SQLiteTx

T = TypeVar("T")

PREFIX = "saga_"

#: The tables that the scenarios write, and so what a state of the database is. The history is not a part of it: nothing reads it.
KEPT = ("flow_runs", "action_runs", "compensation_runs", "blocks", "waits")

#: Moments that nobody reads, but for whether they are there.
UNREAD = frozenset({"started_at", "ended_at"})

#: The rows of every table of ``KEPT``, in the order of their keys.
Content = tuple[tuple[tuple[Any, ...], ...], ...]


class Pause(BaseException):
    """An actor stands still: before its next transaction, or where something outside of it decides."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A statement that raised an error, in place of its answer."""

    error: BaseException

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and repr(self.error) == repr(other.error)

    def __hash__(self) -> int:
        return hash(repr(self.error))


@dataclass(frozen=True, slots=True)
class Entry:
    """One transaction of an actor, or one decision about it: when it was, and what the actor was answered.

    ``unknown``: the transaction has committed, and the actor was told that nobody knows.
    """

    now: int
    answers: Any
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an actor stands: before a transaction (``options`` is empty), or before one of several ways to go on."""

    name: str
    options: tuple[str, ...] = ()
    writes: bool = False


#: In place of a choice, where an actor stands before a write: it commits, and the actor is told that nobody knows.
UNKNOWN = "unknown"


class ModelStore:
    """Stands in for :class:`~dramatiq_saga.store.database.Store`; transactions are serial, as SQLite's writes are."""

    commit_is_proof = True

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.database = SqliteDatabase(":memory:")
        migrations.migrate(self.database, PREFIX)
        self._connection = self.database.connection()
        self._texts = Statements(SQLITE, PREFIX, tables=TABLES)
        for (name,) in self._rows("SELECT name FROM sqlite_master WHERE type = 'index' AND sql LIKE 'CREATE INDEX%'"):
            self._connection.execute(f"DROP INDEX {name}")  # they serve speed, and here they would cost it
        self.columns = {
            table: tuple(row[1] for row in self._rows(f"PRAGMA table_info({PREFIX}{table})")) for table in TABLES
        }  # fmt: skip
        self._keys = {
            table: ", ".join(row[1] for row in self._rows(f"PRAGMA table_info({PREFIX}{table})") if row[5]) for table in TABLES
        }
        self._loaded: Content | None = None
        self._log: tuple[Entry, ...] = ()
        self._position = 0
        self._now = 0
        self._choice: str | None = None
        self._fresh: list[Entry] = []
        self._spent = False  # one transaction, or one step outside of the database, is what an actor may take at a time
        self._standing: Standing | None = None
        self._freely: Callable[[Standing], str] | None = None
        #: Whether what happens now happens for the first time: otherwise it is only called to mind.
        self.live = False

    def close(self) -> None:
        self.database.close()

    # --- playing an actor --------------------------------------------------------------------------------------------

    def play(
        self, call: Callable[[], None], log: tuple[Entry, ...], *, now: int, choice: str | None
    ) -> tuple[tuple[Entry, ...], Standing | None]:
        """Call an actor to mind, and let it go on by one transaction; what is new in its log then, and where it stands.

        ``None`` for where it stands: the call has returned.
        """
        self._log, self._position, self._now, self._choice = log, 0, now, choice
        self._fresh, self._standing = [], None
        self._spent = self.live = False
        self._set_clock(log[0].now if log else now)
        try:
            call()
        except Pause:
            return tuple(self._fresh), self._standing
        finally:
            self.live = False
        assert self._standing is None, "an actor has gone on from where it should stand still"
        return tuple(self._fresh), None

    def freely(self, call: Callable[[], T], choose: Callable[[Standing], str]) -> T:
        """Carry a call out to its end, without a stop; ``choose`` decides what is outside of it."""
        self._freely, self.live = choose, True
        try:
            return call()
        finally:
            self._freely, self.live = None, False
            self._fresh.clear()

    def choose(self, name: str, *options: str) -> str:
        """What happens next is not the actor's to decide: one of ``options``. It is decided when the actor goes on."""
        if self._freely is not None:
            return self._freely(Standing(name, options))
        if self._position < len(self._log):
            return str(self._recall().answers)
        if self._choice not in options:
            self._stand_still(Standing(name, options))
        assert self._choice is not None
        chosen, self._choice = self._choice, None
        self._begin()
        self._fresh.append(Entry(self._now, chosen))
        return chosen

    def step(self, name: str) -> bool:
        """A step outside of the database, which an actor takes by itself; whether it is taken now."""
        if self._freely is not None:
            return True
        if self._position < len(self._log):
            self._recall()
            return False
        if self._spent:
            self._stand_still(Standing(name))
        self._begin()
        self._spent = True
        self._fresh.append(Entry(self._now, None))
        return True

    def _stand_still(self, standing: Standing) -> None:
        self._standing = self._standing or standing
        raise Pause

    def _begin(self) -> None:
        """What is done from here on is new."""
        self.live = True
        self._set_clock(self._now)

    def _recall(self) -> Entry:
        entry = self._log[self._position]
        self._position += 1
        self._set_clock(entry.now)
        return entry

    def _set_clock(self, now: int) -> None:
        self.clock._now = now

    # --- what the engine calls ---------------------------------------------------------------------------------------

    def write(self, operation: Callable[[Any], T]) -> T:
        return self._transaction(operation, writes=True)

    def read(self, operation: Callable[[Any], T]) -> T:
        return self._transaction(operation, writes=False)

    def _transaction(self, operation: Callable[[Any], T], *, writes: bool) -> T:
        if self._freely is not None:
            return self._execute(operation)
        if self._spent or self._standing is not None:  # somebody may have caught the pause: a body lets nothing through
            self._stand_still(Standing(operation.__qualname__, (), writes))
        if self._position < len(self._log):
            entry = self._recall()
            recalled = _Recalled(entry.answers)
            value = operation(recalled)
            if entry.unknown:
                raise WriteUnknownError("the connection was lost while COMMIT was under way", "commit", None, True)
            _call_all(recalled.callbacks)
            return value
        self._begin()
        return self._execute(operation, unknown=writes and self._choice == UNKNOWN)

    def _execute(self, operation: Callable[[Any], T], *, unknown: bool = False) -> T:
        tx = _Recording(SQLiteTx(self._connection, self._texts))
        self._connection.execute("BEGIN")
        try:
            value = operation(tx)
        except BaseException:
            unknown = False
            self._connection.execute("ROLLBACK")
            raise
        else:
            self._connection.execute("COMMIT")
        finally:
            self._spent = True
            self._fresh.append(Entry(self.clock.now(), tuple(tx.answers), unknown))
        if tx.wrote:
            self._loaded = None
        _call_all(tx.parts)
        if unknown:
            raise WriteUnknownError("the connection was lost while COMMIT was under way", "commit", None, True)
        _call_all(tx.callbacks)
        return value

    def joined(self) -> bool:
        return False

    def abandon_host_transaction(self) -> bool:
        return False

    # --- what the database holds -------------------------------------------------------------------------------------

    def content(self) -> Content:
        """What the tables hold. A moment that nobody reads is as good as any other."""
        if self._loaded is None:
            self._loaded = tuple(
                tuple(
                    tuple(
                        0 if value is not None and column in UNREAD else value
                        for column, value in zip(self.columns[table], row, strict=True)
                    )
                    for row in self._rows(f"SELECT * FROM {PREFIX}{table} ORDER BY {self._keys[table]}")
                )
                for table in KEPT
            )
        return self._loaded

    def load(self, content: Content) -> None:
        """Have the tables hold ``content``."""
        if content is self._loaded:
            return
        before = self._loaded or (None,) * len(KEPT)
        self._connection.execute("BEGIN")
        for table, rows, old in zip(KEPT, content, before, strict=True):
            if rows == old:
                continue
            self._connection.execute(f"DELETE FROM {PREFIX}{table}")
            if rows:
                markers = ", ".join("?" * len(self.columns[table]))
                self._connection.executemany(f"INSERT INTO {PREFIX}{table} VALUES ({markers})", rows)
        self._connection.execute("COMMIT")
        self._loaded = content

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()  # type: ignore[no-any-return]


class _Recording:
    """A transaction that writes down what its statements answer."""

    dialect = SQLITE

    def __init__(self, tx: SQLiteTx) -> None:
        self._tx = tx
        self.answers: list[Any] = []
        self.callbacks: list[Callable[[], None]] = []
        self.parts: list[Callable[[], None]] = []
        self.wrote = False

    def run(self, sql: str, params: Sequence[object] = ()) -> int:
        self.wrote = True
        return self._note(self._tx.run, sql, params)

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        self.wrote = self.wrote or not sql.startswith("SELECT")
        return list(self._note(lambda *args: tuple(self._tx.all(*args)), sql, params))

    def one(self, sql: str, params: Sequence[object] = ()) -> tuple[Any, ...] | None:
        self.wrote = self.wrote or not sql.startswith("SELECT")
        return self._note(self._tx.one, sql, params)

    def _note(self, execute: Callable[[str, Sequence[object]], T], sql: str, params: Sequence[object]) -> T:
        try:
            answer = execute(sql, params)
        except Exception as error:
            self.answers.append(Raised(error))
            raise
        self.answers.append(answer)
        return answer

    def after_commit(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def take_part(self, change: Callable[[], None]) -> None:
        """A change of the queue, which commits with the transaction whatever anybody is told of it."""
        self.parts.append(change)


class _Recalled:
    """A transaction that was executed before."""

    dialect = SQLITE

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self._answers = iter(answers)
        self.callbacks: list[Callable[[], None]] = []

    def run(self, sql: str, params: Sequence[object] = ()) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    one = run

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return list(self.run(sql, params))

    def after_commit(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def take_part(self, change: Callable[[], None]) -> None:
        """It has been done."""


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
