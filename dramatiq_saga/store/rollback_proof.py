"""A root transaction on SQLite that can prove its own rollback; what both guards of the SQLite broker stand on.

The runner owns BEGIN, COMMIT and ROLLBACK, so it always knows which of them failed: an exception alone never tells. It
believes the driver's state, not the type of the error, and says *rolled back* only with proof:

* the very connection that began the transaction is still there, in the process that opened it;
* the savepoint set right after BEGIN could be rolled back to, so the *original* root was still open: the body had not
  committed and begun anew, the engine had not ended the root behind its back, nothing was written in autocommit;
* ROLLBACK succeeded, and the driver is out of the transaction.

A failed COMMIT is never proof of anything, not even after reading back: its frames may be in the log and come to life
at the next recovery. Nothing here ever retries.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from peewee import SqliteDatabase

from .sqlite_errors import RETRYABLE, sqlite_code
from .transactions import as_peewee

T = TypeVar("T")

# Nobody else can name this savepoint, and the runner never nests: that it is there means that our root is.
_TOKEN = f"saga_root_{os.urandom(8).hex()}"
_SAVEPOINT = f"SAVEPOINT {_TOKEN}"
_RELEASE = f"RELEASE {_TOKEN}"
_ROLLBACK_TO = f"ROLLBACK TO {_TOKEN}"


class Verdict(Enum):
    """What is known about a transaction that was attempted."""

    COMMITTED = "committed"
    #: Proven: nothing of it will ever be seen.
    ROLLED_BACK = "rolled_back"
    #: It may have happened or not.
    UNKNOWN = "unknown"
    #: Not attempted: a transaction was open already.
    NOT_ROOT = "not_root"


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Verdict, the phase that was reached (``begin``, ``body``, ``commit``, ``done``), the value or the original error."""

    verdict: Verdict
    phase: str
    value: T | None = None
    error: BaseException | None = None

    @property
    def code(self) -> int | None:
        """SQLite's extended result code of the error."""
        return sqlite_code(self.error)

    @property
    def contended(self) -> bool:
        """Whether the error is one that a later attempt may not meet."""
        return self.code in RETRYABLE


class _Marker:
    """Stands on Peewee's transaction stack while the runner owns the root, so ``atomic()`` inside becomes a savepoint."""


def run_root(database: SqliteDatabase, body: Callable[[], T]) -> Outcome[T]:
    """Run ``body`` in a ``BEGIN IMMEDIATE`` transaction on the calling thread's open connection of ``database``.

    Required: the connection is open and idle, else :attr:`Verdict.NOT_ROOT` and nothing was done. Afterwards the connection
    is idle again, or it is not to be used any more (:attr:`Verdict.UNKNOWN`: close it). Never raises what ``body``
    raised, whatever its class: the outcome holds it.
    """
    if database.is_closed() or database.transaction_depth():
        return Outcome(Verdict.NOT_ROOT, "begin")
    connection: sqlite3.Connection = database.connection()
    if connection.in_transaction:
        return Outcome(Verdict.NOT_ROOT, "begin")
    pid = os.getpid()
    execute = connection.execute
    marker = _Marker()
    phase = "begin"
    try:
        execute("BEGIN IMMEDIATE")
        database.push_transaction(marker)
        execute(_SAVEPOINT)
        phase = "body"
        value = body()
        execute(_RELEASE)  # succeeds only while the original root is open
        phase = "commit"
        execute("COMMIT")
        phase = "done"
    except BaseException as exc:
        error = as_peewee(exc)
    else:
        _pop(database, marker)
        return Outcome(Verdict.COMMITTED, phase, value)
    proven = phase != "commit" and _roll_back(database, connection, pid, phase)
    _pop(database, marker)
    proven = proven and not database.transaction_depth()
    if not proven:
        _clean(database, connection, pid)
    return Outcome(Verdict.ROLLED_BACK if proven else Verdict.UNKNOWN, phase, None, error)


def _roll_back(database: SqliteDatabase, connection: sqlite3.Connection, pid: int, phase: str) -> bool:
    """Undo the root and say whether that is proven."""
    # is_closed() first: Database.connection() would quietly open another connection
    if os.getpid() != pid or database.is_closed() or database.connection() is not connection:
        return False
    try:
        if phase == "body":
            connection.execute(_ROLLBACK_TO)
            connection.execute("ROLLBACK")
        elif connection.in_transaction:
            connection.execute("ROLLBACK")
        return not connection.in_transaction
    except BaseException:
        return False


def _clean(database: SqliteDatabase, connection: sqlite3.Connection, pid: int) -> None:
    """Leave no open transaction behind; proves nothing."""
    if os.getpid() != pid:
        return
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except BaseException:  # closed, or refused: the caller drops the connection
        pass


def _pop(database: SqliteDatabase, marker: object) -> None:
    if database.top_transaction() is marker:
        database.pop_transaction()
