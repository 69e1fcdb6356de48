"""What the store uses of Peewee beyond its promises; a new Peewee that works otherwise fails here first."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import peewee
import pytest
from playhouse.pool import PooledSqliteDatabase

from dramatiq_saga.store import peewee_internals as internals


@pytest.fixture
def database(sqlite_path: Path) -> peewee.SqliteDatabase:
    return peewee.SqliteDatabase(str(sqlite_path), pragmas={"cache_size": -500})


def test_an_adopted_connection_is_the_threads_and_a_forgotten_one_stays_open(database: peewee.SqliteDatabase) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    internals.adopt(database, connection)
    assert database.connection() is connection
    other: list[bool] = []
    thread = threading.Thread(target=lambda: other.append(database.is_closed()))
    thread.start()
    thread.join()
    assert other == [True]
    internals.forget(database)
    assert database.is_closed()
    assert connection.execute("SELECT 1").fetchone() == (1,)
    connection.close()


def test_a_twin_opens_connections_and_shares_nothing_that_a_host_would_notice(database: peewee.SqliteDatabase) -> None:
    database.register_function(lambda: 42, "answer", 0)
    twin = internals.twin_of(database, [("cache_size", -700)], check_same_thread=False)
    connection = internals.new_connection(twin)
    assert connection.execute("SELECT answer()").fetchone() == (42,)
    assert connection.execute("PRAGMA cache_size").fetchone() == (-700,)
    assert database.is_closed()
    assert database.connect_params == {}
    assert internals.pragmas_of(database) == [("cache_size", -500)]
    connection.close()


def test_a_new_connection_is_made_past_the_pool(sqlite_path: Path) -> None:
    pool = PooledSqliteDatabase(str(sqlite_path))
    assert internals.is_pooled(pool)
    connection = internals.new_connection(pool)
    assert (pool._in_use, pool._connections) == ({}, [])
    connection.close()
    pool.connect()
    internals.destroy(pool)
    assert (pool.is_closed(), pool._in_use, pool._connections) == (True, {}, [])


def test_what_waits_for_a_commit_is_one_list_as_long_as_the_connection_lives(database: peewee.SqliteDatabase) -> None:
    database.connect()
    waiting = internals.commit_callbacks(database)
    with database.atomic():
        database.after_commit(lambda: None)
        assert len(waiting) == 1
    assert waiting == []
    assert internals.commit_callbacks(database) is waiting
    database.close()


def test_a_transaction_that_was_left_open_goes_with_its_callbacks(database: peewee.SqliteDatabase) -> None:
    seen: list[int] = []
    assert not internals.abandon_transaction(database)
    database.connect()
    assert not internals.abandon_transaction(database)
    database.atomic().__enter__()
    database.after_commit(lambda: seen.append(1))
    assert internals.abandon_transaction(database)
    assert not database.in_transaction()
    with database.atomic():
        pass
    assert seen == []
    database.atomic().__enter__()
    database.connection().close()
    assert internals.abandon_transaction(database), "a connection that cannot roll back goes too"
    assert database.is_closed()


def test_manual_mode_is_recognised(database: peewee.SqliteDatabase) -> None:
    with database.connection_context():
        with database.manual_commit():
            assert internals.is_manual(database)
        with database.atomic():
            assert not internals.is_manual(database)


def test_errors_of_a_driver_become_peewees_with_the_original_in_orig() -> None:
    with pytest.raises(peewee.IntegrityError) as caught, internals.driver_errors:
        raise sqlite3.IntegrityError("text")
    assert isinstance(caught.value.orig, sqlite3.IntegrityError)
    with pytest.raises(ValueError), internals.driver_errors:
        raise ValueError


def test_only_databases_with_a_connection_per_thread_will_do(database: peewee.SqliteDatabase) -> None:
    assert internals.keeps_connections_per_thread(database)
    assert not internals.keeps_connections_per_thread(peewee.SqliteDatabase(":memory:", thread_safe=False))


def test_savepoints_can_be_heard(database: peewee.SqliteDatabase) -> None:
    """The callbacks of host transactions rest on Peewee announcing them to its query hooks."""
    heard: list[str] = []
    database.query_hooks.append(lambda event: heard.append(event.sql.split()[0]))
    with database.atomic(), database.atomic() as savepoint:
        savepoint.rollback()
    assert heard == ["SAVEPOINT", "ROLLBACK", "SAVEPOINT", "RELEASE"]
    database.close()
