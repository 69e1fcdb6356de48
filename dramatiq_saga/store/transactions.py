"""What an operation is handed: ``Tx``, and its two implementations.

A transaction object executes rendered templates on one connection and collects what has to wait for the commit. It owns
neither BEGIN nor COMMIT. Rows are always fetched to the end: a half-read cursor would hold locks and could make COMMIT
fail. Errors surface as Peewee's classes, whatever the driver.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from peewee import DataError

from .peewee_internals import driver_errors
from .sql import SQLITE, Statements


class Tx(Protocol):
    """An open transaction; valid only inside the function that it was given to.

    Operations may run more than once before one of their runs commits (a batch that is taken apart, a deadlock, a lost
    connection). They must be pure functions of the database; what they return or register is taken from the run that
    committed.
    """

    dialect: str

    def run(self, sql: str, params: Sequence[object] = ()) -> int:
        """Execute a template; the number of rows that it changed (MySQL and MariaDB count changed rows, not matched ones)."""
        ...

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Execute a template that yields rows; all of them."""
        ...

    def one(self, sql: str, params: Sequence[object] = ()) -> tuple[Any, ...] | None:
        """Execute a template that yields rows; the first, or None."""
        ...

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in the caller's thread once the commit is known, outside every transaction of the engine.

        In a joined host transaction: after the host's outermost commit; never after a rollback, a savepoint's included
        (HOST-1). Its exceptions are logged, never raised.
        """
        ...


def reraise_as_peewee() -> NoReturn:
    """From an ``except`` block: raise Peewee's class for the driver's error at hand, the original in ``orig``."""
    with driver_errors:
        raise  # the exception that the caller's except block handles
    raise AssertionError("unreachable")


def as_peewee(error: BaseException) -> BaseException:
    """Peewee's error for one of ``sqlite3``; any other exception as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    try:
        with driver_errors:
            raise error
    except BaseException as wrapped:
        return wrapped


class SQLiteTx:
    """A transaction on one ``sqlite3`` connection. One object serves a connection for as long as it lives."""

    __slots__ = ("_execute", "_texts", "callbacks")

    dialect = SQLITE

    def __init__(self, connection: sqlite3.Connection, texts: Statements) -> None:
        self._execute = connection.execute
        self._texts = texts
        self.callbacks: list[Callable[[], None]] | None = None

    def run(self, sql: str, params: Sequence[object] = ()) -> int:
        try:
            cursor = self._execute(self._texts[sql], params)
            if cursor.description is not None:
                cursor.fetchall()
        except sqlite3.Error:
            reraise_as_peewee()
        return cursor.rowcount

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._execute(self._texts[sql], params).fetchall()
        except sqlite3.Error:
            reraise_as_peewee()

    def one(self, sql: str, params: Sequence[object] = ()) -> tuple[Any, ...] | None:
        try:
            rows = self._execute(self._texts[sql], params).fetchall()
        except sqlite3.Error:
            reraise_as_peewee()
        return rows[0] if rows else None

    def after_commit(self, callback: Callable[[], None]) -> None:
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(callback)


class ServerTx:
    """A transaction on one connection to PostgreSQL, MySQL or MariaDB, through one cursor."""

    __slots__ = ("_cursor", "_quirks", "_texts", "callbacks", "dialect")

    def __init__(self, cursor: Any, texts: Statements, *, dialect: str, quirks: Quirks) -> None:
        self._cursor = cursor
        self._texts = texts
        self._quirks = quirks
        self.dialect = dialect
        self.callbacks: list[Callable[[], None]] | None = None

    def run(self, sql: str, params: Sequence[object] = ()) -> int:
        cursor = self._cursor
        self._quirks.check(params)
        with driver_errors:
            cursor.execute(self._texts[sql], params)
            changed: int = cursor.rowcount
            if cursor.description is not None:
                cursor.fetchall()
        return changed

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        cursor = self._cursor
        self._quirks.check(params)
        with driver_errors:
            cursor.execute(self._texts[sql], params)
            rows: list[tuple[Any, ...]] = list(cursor.fetchall())
        if self._quirks.memoryviews:
            rows = [tuple(bytes(value) if isinstance(value, memoryview) else value for value in row) for row in rows]
        return rows

    def one(self, sql: str, params: Sequence[object] = ()) -> tuple[Any, ...] | None:
        rows = self.all(sql, params)
        return rows[0] if rows else None

    def after_commit(self, callback: Callable[[], None]) -> None:
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(callback)


@dataclass(slots=True)
class Quirks:
    """What a server or its driver does otherwise than the others."""

    #: psycopg2 hands out bytes as memoryviews.
    memoryviews: bool = False
    #: The longest statement that a MySQL or MariaDB server takes, bytes. At a longer one it drops the connection.
    largest: int | None = None

    def check(self, params: Sequence[object]) -> None:
        """Raise DataError where the values of a statement are more than the server takes: they travel inside it."""
        if self.largest is None:
            return
        values = [value for value in params if isinstance(value, str | bytes)]
        # at worst four bytes for a character and each of them escaped; mostly far from it, and then nothing is counted
        if 8 * sum(map(len, values)) < self.largest:
            return
        size = _STATEMENT_SIZE + sum(map(_size_in_statement, values))
        if size > self.largest:
            raise DataError(
                f"{size} bytes in one statement are more than the server takes (max_allowed_packet = {self.largest}): "
                "raise that limit, or store the value elsewhere and pass a reference"
            )


#: Room for the text of a statement around its values, bytes.
_STATEMENT_SIZE = 4096

_ESCAPED = tuple("\\'\"\0\n\r\x1a")


def _size_in_statement(value: str | bytes) -> int:
    if isinstance(value, bytes):
        return 2 * len(value)  # in hexadecimal, or with every byte escaped
    return len(value.encode()) + sum(map(value.count, _ESCAPED))
