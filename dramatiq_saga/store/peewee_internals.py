"""What the store uses of Peewee that Peewee does not promise; everything of that kind stands here.

Peewee keeps one connection per thread and opens it when it likes. The engine needs more say than that: connections that no
pool hands around, a thread's connection put in place or dropped without closing it, and a fork that leaves the parent's
connections alone. ``tests/unit/test_store_peewee.py`` fails when a new Peewee works otherwise.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import peewee
from peewee import Database, SqliteDatabase

#: Turns an error of any driver into Peewee's class of that name, the original in ``orig``.
driver_errors = cast("AbstractContextManager[None]", peewee.__exception_wrapper__)  # type: ignore[attr-defined]

# Connections that belong to a parent process. Closing one here could end its session or let go of its locks: none is closed.
_inherited: list[object] = []


def keeps_connections_per_thread(database: Database) -> bool:
    """Whether each thread has a connection of its own, as everything here supposes."""
    return isinstance(cast("Any", database)._state, threading.local)


def has_driver(database: Database) -> bool:
    """Whether the driver of this kind of database is installed."""
    try:
        cast("Any", database).get_binary_type()
    except (AttributeError, peewee.ImproperlyConfigured):  # of a module that is None
        return False
    return True


def gives_memoryviews(database: Database) -> bool:
    """Whether its driver hands out bytes as memoryviews: psycopg2 does."""
    return isinstance(getattr(database, "_adapter", None), peewee.Psycopg2Adapter)


def pragmas_of(database: SqliteDatabase) -> list[tuple[str, object]]:
    """What a Database sets on each new connection, in its order."""
    return [(str(name).lower(), value) for name, value in cast("Any", database)._pragmas]


def set_pragmas(database: SqliteDatabase, pragmas: list[tuple[str, object]]) -> None:
    """Replace that."""
    cast("Any", database)._pragmas = pragmas


def twin_of(database: SqliteDatabase, pragmas: list[tuple[str, object]], **params: object) -> SqliteDatabase:
    """A copy that only opens connections: same file, functions and extensions, its own pragmas and driver parameters."""
    twin = copy.copy(database)
    twin.connect_params = {**database.connect_params, **params}
    set_pragmas(twin, pragmas)
    return twin


def is_pooled(database: Database) -> bool:
    """Whether its connections are lent and returned."""
    from playhouse.pool import PooledDatabase

    return isinstance(database, PooledDatabase)


def new_connection(database: Database) -> Any:
    """A driver connection made the way this class makes them, past any pool: a pool may hand out a used one."""
    if is_pooled(database):
        from playhouse.pool import PooledDatabase

        return super(PooledDatabase, database)._connect()
    return cast("Any", database)._connect()


def adopt(database: Database, connection: Any) -> None:
    """Make ``connection`` the calling thread's connection of ``database``."""
    cast("Any", database)._state.set_connection(connection)


def forget(database: Database) -> None:
    """The calling thread has no connection of ``database`` any more; none is closed."""
    cast("Any", database)._state.reset()


def destroy(database: Database) -> None:
    """Close the calling thread's connection for good: it never goes back to a pool. Raises what the driver raises."""
    if database.is_closed():
        return
    connection = database.connection()
    try:
        if is_pooled(database):
            cast("Any", database)._close(connection, close_conn=True)
        else:
            connection.close()
    finally:
        forget(database)


def is_manual(database: Database) -> bool:
    """Whether the calling thread is inside ``manual_commit()``."""
    return isinstance(database.top_transaction(), peewee._manual)


def is_in_transaction(database: Database) -> bool | None:
    """Whether the calling thread's open connection is inside a transaction; None where the driver cannot tell."""
    connection = database.connection()
    if isinstance(database, SqliteDatabase):
        return bool(connection.in_transaction)
    adapter = getattr(database, "_adapter", None)
    if adapter is not None:
        return bool(adapter.txn_status(connection) != adapter.txn_idle)
    status = getattr(connection, "server_status", None)  # PyMySQL: the flags of the last answer
    return bool(status & 1) if isinstance(status, int) else None


def commit_callbacks(database: Database) -> list[Callable[[], None]]:
    """What waits for the calling thread's commit: the very list, for as long as the thread keeps its connection."""
    return cast("list[Callable[[], None]]", cast("Any", database)._state.commit_callbacks)


def abandon_transaction(database: Database) -> bool:
    """Roll back whatever transaction the calling thread has open, with what waits for its commit; false without one.

    Where ROLLBACK fails, the connection goes with it.
    """
    if database.is_closed() or not (database.in_transaction() or is_in_transaction(database)):
        return False
    try:
        database.rollback()
    except peewee.PeeweeException:
        destroy(database)
        return True
    while database.transaction_depth():
        database.pop_transaction()
    commit_callbacks(database).clear()
    return True


def keep_inherited(thing: object) -> None:
    """Never let what the parent process owns be closed here."""
    _inherited.append(thing)


def leave_to_parent(database: Database) -> None:
    """In a forked child: drop the connections that came with the fork without closing any, and locks that nobody holds."""
    state = cast("Any", database)
    keep_inherited((state._state.conn, dict(vars(database))))
    state._lock = threading.Lock()
    if is_pooled(database):
        state._pool_lock = threading.RLock()
        state._pool_available = threading.Condition(state._pool_lock)
    database.dispose()
