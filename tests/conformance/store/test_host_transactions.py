"""Calls inside a transaction that the host has open on the store's own Database (HOST-1, C08, C59)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import peewee
import pytest

from dramatiq_saga.errors import StoreError
from dramatiq_saga.store.database import Store, Tx
from tests.support.stores import add, count


class Rolled(Exception):
    pass


@contextmanager
def rolled_back(database: peewee.Database) -> Iterator[None]:
    """A block of the host whose transaction, or savepoint, is rolled back at its end."""
    with suppress(Rolled), database.atomic():
        yield
        raise Rolled


@pytest.fixture
def seen() -> list[int]:
    """What callbacks have seen committed."""
    return []


@pytest.fixture
def operation(store: Store, seen: list[int]) -> Any:
    def operation(tx: Tx) -> int:
        tx.after_commit(lambda: seen.append(count(store)))
        return add()(tx)

    return operation


def elsewhere(store: Store) -> int:
    """The counter as another thread sees it, outside every transaction of this one."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(count(store)))
    thread.start()
    thread.join()
    return found[0]


def test_a_write_commits_with_its_host_and_not_before(store: Store, operation: Any, seen: list[int]) -> None:
    with store.database.atomic():
        assert store.joined()
        assert store.write(operation) == 1
        assert store.submit(operation).result() == 2
        assert count(store) == 2, "the host reads what it has written"
        assert elsewhere(store) == 0
        assert seen == []
    assert not store.joined()
    assert elsewhere(store) == 2
    assert seen == [2, 2]


def test_a_write_vanishes_with_its_host(store: Store, operation: Any, seen: list[int]) -> None:
    with rolled_back(store.database):
        store.write(operation)
    assert (count(store), seen) == (0, [])
    store.write(add())
    with store.database.atomic():
        pass
    assert seen == [], "and its callback does not wait for the next commit"


def test_two_savepoints_deep_it_waits_for_the_outermost_commit(store: Store, operation: Any, seen: list[int]) -> None:
    with store.database.atomic():
        with store.database.atomic():
            with store.database.atomic():
                store.write(operation)
            assert seen == []
        assert seen == []
    assert seen == [1]


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_a_rolled_back_savepoint_takes_the_callback_with_the_write(
    store: Store, operation: Any, seen: list[int], level: str
) -> None:
    """C08: a message must never be sent for a run that does not exist. Peewee itself forgets this case."""
    database = store.database
    with database.atomic():
        if level == "inner":
            with rolled_back(database):
                store.write(operation)
        else:
            with rolled_back(database):
                with database.atomic():
                    store.write(operation)
        store.write(add("kept"))
    assert (count(store), count(store, "kept"), seen) == (0, 1, [])


def test_a_savepoint_rolled_back_beside_the_write_does_not_touch_it(store: Store, operation: Any, seen: list[int]) -> None:
    database = store.database
    with database.atomic():
        with rolled_back(database):
            store.write(add("before"))
        with database.atomic():
            store.write(operation)
            with rolled_back(database):
                store.write(operation)
        with rolled_back(database):
            pass
    assert (count(store), count(store, "before"), seen) == (1, 0, [1])


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_host_whose_commit_was_a_rollback_has_nothing_sent(
    store: Store, operation: Any, seen: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """HOST-1: a statement of the host's has failed, and it goes on; PostgreSQL answers its COMMIT with a rollback, and no error."""
    with store.database.atomic():
        store.write(operation)
        with suppress(peewee.PeeweeException):
            store.database.execute_sql("SELECT * FROM no_such_table_anywhere")
    assert (count(store), seen) == (0, [])
    assert "rolled back by COMMIT" in caplog.text
    with store.database.atomic():
        store.write(operation)
        with suppress(peewee.PeeweeException), store.database.atomic():  # in a savepoint of its own, it does no harm
            store.database.execute_sql("SELECT * FROM no_such_table_anywhere")
    assert (count(store), seen) == (1, [1])


def test_savepoints_made_by_hand_are_followed_too(store: Store, operation: Any, seen: list[int]) -> None:
    execute = store.database.execute_sql
    with store.database.atomic():
        execute("SAVEPOINT one")
        store.write(operation)
        execute("savepoint two")
        store.write(operation)
        execute("ROLLBACK TO two")
        store.write(operation)
        execute("release savepoint one")
        execute("SAVEPOINT three")
        store.write(operation)
        execute("ROLLBACK TO SAVEPOINT three")
    assert (count(store), seen) == (2, [2, 2])


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_savepoint_hides_an_outer_one_of_its_name_only_while_it_is_open(
    store: Store, operation: Any, seen: list[int]
) -> None:
    """(On MySQL and MariaDB it replaces it.)"""
    execute = store.database.execute_sql
    with store.database.atomic():
        execute("SAVEPOINT name")
        store.write(operation)
        execute("SAVEPOINT name")
        store.write(add("other"))
        execute("RELEASE SAVEPOINT name")
        execute("ROLLBACK TO SAVEPOINT name")
    assert (count(store), seen) == (0, [])


def test_a_failing_operation_leaves_the_host_able_to_go_on(store: Store, operation: Any, seen: list[int]) -> None:
    def failing(tx: Tx) -> None:
        operation(tx)
        tx.run("INSERT INTO {rate_limits} (id, value, expires_at) VALUES ('n', 1, 0)")

    with store.database.atomic():
        with pytest.raises(peewee.IntegrityError):
            store.write(failing)
        with pytest.raises(peewee.IntegrityError):
            store.submit(failing).result()
        assert store.write(add("kept")) == 1
    assert (count(store), count(store, "kept"), seen) == (0, 1, [])


def test_a_callback_that_fails_does_not_fail_the_host(store: Store, seen: list[int]) -> None:
    def operation(tx: Tx) -> None:
        tx.after_commit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        tx.after_commit(lambda: seen.append(1))

    with store.database.atomic():
        store.write(operation)
    assert seen == [1]


def test_a_commit_in_the_middle_of_a_block_releases_what_came_before(store: Store, operation: Any, seen: list[int]) -> None:
    with store.database.atomic() as transaction:
        store.write(operation)
        transaction.commit()
        assert seen == [1]
        store.write(operation)
        transaction.rollback()
        store.write(operation)
    assert (count(store), seen) == (2, [1, 2])


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_a_host_transaction_of_another_thread_is_nobody_elses(store: Store) -> None:
    """C59: the engine's work and a step's open transaction do not mix. (SQLite has one writer: there the engine waits.)"""
    inside, done = threading.Event(), threading.Event()

    def host() -> None:
        with rolled_back(store.database):
            store.database.execute_sql(f"DELETE FROM {store.prefix}tags")
            inside.set()
            done.wait(20)
        store.close_thread()

    thread = threading.Thread(target=host)
    thread.start()
    assert inside.wait(20)
    assert store.write(add()) == 1
    done.set()
    thread.join()
    assert count(store) == 1


def test_a_manual_commit_block_is_refused_because_nobody_learns_of_its_commit(
    store: Store, operation: Any, seen: list[int]
) -> None:
    store.database.connect()
    with store.database.manual_commit():
        store.database.begin()
        with pytest.raises(StoreError, match="manual_commit"):
            store.write(operation)
        store.database.rollback()
    assert (count(store), seen) == (0, [])


def test_an_open_connection_without_a_transaction_is_not_joined(store: Store, operation: Any, seen: list[int]) -> None:
    with store.database.connection_context():
        assert not store.joined()
        store.write(operation)
        assert seen == [1]


@pytest.mark.parametrize("how", ["atomic", "begin"])
def test_a_transaction_that_a_step_left_open_can_be_rolled_back_whole(
    store: Store, operation: Any, seen: list[int], how: str
) -> None:
    """C59: what waited for its commit is dropped with it, and the thread's next transaction is a new one."""
    if how == "atomic":
        store.database.atomic().__enter__()
        store.database.atomic().__enter__()
        store.write(operation)
    else:
        store.database.connect()
        store.database.execute_sql("BEGIN")
        store.database.execute_sql(f"DELETE FROM {store.prefix}tags")
    assert store.abandon_host_transaction()
    assert not store.abandon_host_transaction()
    assert (store.joined(), count(store)) == (False, 0)
    with store.database.atomic():
        store.write(add())
    assert (count(store), seen) == (1, [])


def test_an_operation_is_no_host_transaction_to_abandon(store: Store) -> None:
    assert store.write(lambda tx: (store.abandon_host_transaction(), add()(tx))) == (False, 1)


def test_the_first_use_may_be_inside_a_host_transaction(database_url: str, open_on: Any) -> None:
    """On SQLite the tables are made in the host's transaction, whose lock nobody else gets; they vanish with it."""
    store = open_on(database_url)
    with rolled_back(store.database):
        store.prepare()
    with rolled_back(store.database):
        store.write(add())
    with store.database.atomic():
        store.prepare()
        store.write(add())
    assert count(store) == 1
    store.check_schema()
