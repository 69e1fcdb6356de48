"""The schema's history: numbered modules ``NNNN_name.py``, applied in order, each once, under a lock.

A migration defines ``up(database, prefix)``. Its number is the schema's version once it has been applied; the table
``<prefix>schema_migrations`` remembers. Invariants: whoever starts first creates the tables and the others wait for it
(C65); applying what is applied changes nothing (C64); an interrupted run can be repeated. SQLite and PostgreSQL apply all
pending migrations in one transaction; MySQL and MariaDB commit each statement of a schema by itself, so there a migration
must be able to meet its own remains.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from peewee import Database

from ...clock import SystemClock
from ...errors import StoreError
from ..sql import MYSQL, POSTGRESQL, SQLITE, dialect_of

#: How long a process waits for another one that is migrating, seconds (MySQL and MariaDB; PostgreSQL waits until it is done).
LOCK_TIMEOUT = 300


def names() -> list[str]:
    """Every migration that this code knows, oldest first."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[:4].isdigit())


def latest() -> str:
    """The version that this code needs."""
    return names()[-1][:4]


def version(database: Database, prefix: str) -> str | None:
    """The version of the tables that are there, seen on the calling thread's connection; None without tables."""
    table = _table(prefix)
    lookup = {
        SQLITE: "SELECT name FROM sqlite_master WHERE type = 'table' AND name = ?",
        POSTGRESQL: "SELECT to_regclass(%s)",
        MYSQL: "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
    }[dialect_of(database)]
    found = database.execute_sql(lookup, (table,)).fetchall()
    if not found or found[0][0] is None:
        return None
    newest: str | None = database.execute_sql(f"SELECT MAX(name) FROM {table}").fetchone()[0]
    return None if newest is None else newest[:4]


def migrate(database: Database, prefix: str) -> list[str]:
    """Bring the tables up to date, on the calling thread's connection; the names of what was applied."""
    if database.in_transaction():
        return _apply(database, prefix)  # SQLite, within the host's transaction: see Store._prepare_joined
    with _alone(database, prefix):
        return _apply(database, prefix)


def _apply(database: Database, prefix: str) -> list[str]:
    table = _table(prefix)
    # Before anything is read: PostgreSQL's session may still believe what it knew before it waited for its turn, that there
    # is no such table. Creating it makes the session look again. test_twelve_processes_start_at_once
    database.execute_sql(
        f"CREATE TABLE IF NOT EXISTS {table} (name VARCHAR(191) NOT NULL PRIMARY KEY, applied_at BIGINT NOT NULL)"
    )
    applied = {name for (name,) in database.execute_sql(f"SELECT name FROM {table}").fetchall()}
    pending = [name for name in names() if name not in applied]
    now = SystemClock().now()
    for name in pending:
        importlib.import_module(f"{__name__}.{name}").up(database, prefix)
        database.execute_sql(f"INSERT INTO {table} (name, applied_at) VALUES ({database.param}, {database.param})", (name, now))
    return pending


@contextmanager
def _alone(database: Database, prefix: str) -> Iterator[None]:
    """Keep every other process that wants to migrate these tables waiting."""
    dialect = dialect_of(database)
    key = zlib.crc32(f"dramatiq-saga {prefix}".encode())
    if dialect == SQLITE:
        with database.atomic("IMMEDIATE"):
            yield
    elif dialect == POSTGRESQL:
        with database.atomic():
            database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (key,)).fetchall()
            yield
    else:
        name = f"CONCAT('dramatiq-saga {key} ', MD5(DATABASE()))"
        if database.execute_sql(f"SELECT GET_LOCK({name}, %s)", (LOCK_TIMEOUT,)).fetchone()[0] != 1:
            raise StoreError(
                f"another process has been migrating the tables for {LOCK_TIMEOUT} seconds: see SHOW PROCESSLIST", "begin"
            )
        try:
            yield
        finally:
            database.execute_sql(f"SELECT RELEASE_LOCK({name})").fetchall()


def _table(prefix: str) -> str:
    return f"{prefix}schema_migrations"
