"""SQLite connections of the engine's own: how they are opened, with which pragmas, and the pool that reads use.

Invariant: every connection that the engine opens has the engine's pragmas, whoever made the ``Database`` object (C40), and
no host or step ever sees one of them (C59). What the user has set explicitly stands. Nothing is opened before its first use,
and a connection never crosses a fork.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from peewee import Database, SqliteDatabase

from ..errors import DatabaseUnusableError, StoreError
from .peewee_internals import keep_inherited, new_connection, pragmas_of, set_pragmas, twin_of
from .sql import Statements
from .sqlite_errors import RETRYABLE, is_of_the_surroundings, sqlite_code, unusable
from .transactions import SQLiteTx, Tx, as_peewee

T = TypeVar("T")

logger = logging.getLogger("dramatiq_saga")

#: How long a connection waits for a lock that somebody else holds, seconds.
BUSY_TIMEOUT = 5.0

#: What the engine wants on each of its connections, unless the user has set it otherwise. The page size counts only for a
#: file that does not exist yet, and has to come before the journal mode, which creates it. A transaction of the engine
#: changes a few rows on each of several pages: small pages halve what it writes (benchmarks/store.py).
PRAGMAS: dict[str, object] = {
    "page_size": 2048,
    "journal_mode": "wal",
    "synchronous": "full",
    "foreign_keys": "on",
    "journal_size_limit": 64 * 1024 * 1024,
}

#: Of those, what a user's own ``Database`` is given for good, so that host transactions which the engine joins are as
#: durable as the engine's. Foreign keys stay the host's affair on the host's connections.
SHARED_PRAGMAS = ("journal_mode", "synchronous")

#: Statements that a connection keeps prepared: all of the engine's and the broker's.
CACHED_STATEMENTS = 256

#: The first SQLite with RETURNING.
MINIMUM_SQLITE = (3, 35, 0)


def new_sqlite(path: str, **options: Any) -> SqliteDatabase:
    """A Database object for a file of ours; ``options`` are its own, ``timeout`` for example.

    A relative path counts from here and now: each thread opens the file anew, and the program may have gone to another directory.
    """
    if path not in ("", ":memory:") and not path.startswith("file:"):
        path = os.path.abspath(path)
    return SqliteDatabase(path, **{"pragmas": list(PRAGMAS.items()), "timeout": BUSY_TIMEOUT, **options})


def share_pragmas(database: SqliteDatabase) -> None:
    """Set on a user's own Database what joined host transactions need and the user has not chosen."""
    chosen = dict(pragmas_of(database))
    set_pragmas(database, [*pragmas_of(database), *((name, PRAGMAS[name]) for name in SHARED_PRAGMAS if name not in chosen)])


def is_memory(database: Database) -> bool:
    """Whether each connection of this Database is a database of its own."""
    name = str(database.database)
    return name in (":memory:", "") or "mode=memory" in name or name.startswith("file::memory:")


def file_of(database: Database) -> str | None:
    """The path of the file, where there is one."""
    name = str(database.database)
    if is_memory(database):
        return None
    return name.removeprefix("file:").partition("?")[0] if name.startswith("file:") else name


class Connector:
    """Opens connections for the engine from a user's Database, without touching its state."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._warned = False

    def open(self, **params: object) -> sqlite3.Connection:
        """A new connection with the engine's pragmas. Raises DatabaseUnusableError, naming the path and the way out."""
        if sqlite3.sqlite_version_info < MINIMUM_SQLITE:
            raise DatabaseUnusableError(
                f"SQLite {sqlite3.sqlite_version} has no RETURNING: dramatiq-saga needs SQLite 3.35 or newer; "
                "use a newer build of Python"
            )
        path = file_of(self._database)
        if path is not None and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise DatabaseUnusableError(f"cannot use {path} as an SQLite file: it is a device or a pipe; name a file")
        chosen = dict(pragmas_of(self._database))
        # ours first: the page size has to be set before anything that creates the file
        pragmas = [(name, value) for name, value in PRAGMAS.items() if name not in chosen] + list(chosen.items())
        twin = twin_of(self._database, pragmas, **{"cached_statements": CACHED_STATEMENTS, **params})
        deadline = time.monotonic() + max(float(self._database.timeout or 0), BUSY_TIMEOUT)
        while True:
            try:
                connection: sqlite3.Connection = new_connection(twin)
                self._check(connection, str(dict(pragmas)["journal_mode"]))
                return connection
            except sqlite3.Error as exc:
                # Who else is here: another process that turns the same new file into WAL. It holds the file for itself for
                # a moment, and SQLite does not wait for that everywhere, so this does. test_twelve_processes_start_at_once
                if sqlite_code(exc) not in RETRYABLE or time.monotonic() > deadline:
                    raise unusable(exc, str(file_of(self._database))) from as_peewee(exc)
            time.sleep(random.uniform(0.001, 0.02))

    def _check(self, connection: object, wanted: str) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise DatabaseUnusableError(
                f"{type(self._database).__name__} does not use Python's sqlite3 driver: use peewee.SqliteDatabase"
            )
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        if mode != "wal" and wanted.lower() == "wal" and not is_memory(self._database) and not self._warned:
            self._warned = True
            logger.warning(
                "%s has journal mode %s, not WAL: readers and the writer will wait for each other. A network or read-only file "
                "system cannot do WAL; keep the file on a local disk",
                self._database.database,
                mode,
            )


class Readers:
    """Read-only connections, each lent to one read at a time. As many exist as there were reads at once."""

    def __init__(self, connector: Connector, texts: Statements) -> None:
        self._connector = connector
        self._texts = texts
        self._idle: deque[tuple[sqlite3.Connection, SQLiteTx]] = deque()

    def read(self, operation: Callable[[Tx], T]) -> tuple[T, list[Callable[[], None]] | None]:
        """Run ``operation`` in one snapshot, in the calling thread.

        An interrupt that lands anywhere in here costs at most the connection: only one that is known to be idle goes back.
        """
        try:
            pair = self._idle.pop()
        except IndexError:
            connection = self._connector.open(check_same_thread=False)
            connection.execute("PRAGMA query_only = on")
            pair = connection, SQLiteTx(connection, self._texts)
        connection, tx = pair
        tx.callbacks = None
        try:
            connection.execute("BEGIN")
            value = operation(tx)
            callbacks = tx.callbacks
            connection.execute("COMMIT")
        except BaseException as exc:
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._idle.append(pair)
            except sqlite3.Error:
                connection.close()
            error = as_peewee(exc)
            if is_of_the_surroundings(code := sqlite_code(error)):
                raise StoreError(f"the database could not be read: {error}", "body", code, True) from error
            if error is exc:
                raise
            raise error from None
        self._idle.append(pair)
        return value, callbacks

    def close(self) -> None:
        """Close what is idle; what is in use meanwhile stays for the next read, or for the next close."""
        while self._idle:
            self._idle.pop()[0].close()

    def abandon(self) -> None:
        """In a forked child: forget the parent's connections without closing them."""
        keep_inherited(self._idle)
        self._idle = deque()


def same_file(path: str, identity: tuple[int, int]) -> bool:
    """Whether the path still leads to the file that was opened."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == identity
