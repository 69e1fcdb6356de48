"""What a root transaction on SQLite can prove, with an error at each of its steps (QUEUE-3, QUEUE-4, QUEUE-8)."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import peewee
import pytest

from dramatiq_saga.store.rollback_proof import Verdict, run_root
from dramatiq_saga.store.sqlite_errors import RETRYABLE, sqlite_code
from tests.support.processes import Process
from tests.support.stores import Faults, faulty_connection, sqlite_error, write_lock_held


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def database(sqlite_path: Path, faults: Faults) -> Iterator[peewee.SqliteDatabase]:
    factory = faulty_connection()
    factory.faults = faults
    database = peewee.SqliteDatabase(str(sqlite_path), factory=factory, timeout=0.05, pragmas={"journal_mode": "wal"})
    database.connect()
    database.execute_sql("CREATE TABLE rows (id INTEGER PRIMARY KEY, pad BLOB)")
    yield database
    database.dispose()


@pytest.fixture
def seen(sqlite_path: Path) -> Iterator[Callable[[], list[int]]]:
    """The ids that another connection sees."""
    connection = sqlite3.connect(sqlite_path)
    yield lambda: [row for (row,) in connection.execute("SELECT id FROM rows ORDER BY id").fetchall()]
    connection.close()


def insert(database: peewee.SqliteDatabase, row: int = 1) -> Callable[[], str]:
    def body() -> str:
        database.execute_sql("INSERT INTO rows (id) VALUES (?)", (row,))
        return "value"

    return body


def is_idle(database: peewee.SqliteDatabase) -> bool:
    return database.transaction_depth() == 0 and not database.connection().in_transaction


# --- proven ----------------------------------------------------------------------------------------------------------


def test_a_body_that_returns_is_committed(database: peewee.SqliteDatabase, seen: Any) -> None:
    outcome = run_root(database, insert(database))

    assert (outcome.verdict, outcome.phase, outcome.value, outcome.error) == (Verdict.COMMITTED, "done", "value", None)
    assert seen() == [1]
    assert is_idle(database)


def test_a_writer_that_finds_the_file_locked_is_proven_not_to_have_begun(
    database: peewee.SqliteDatabase, sqlite_path: Path, python_process: Callable[..., Process]
) -> None:
    """QUEUE-3: refused at BEGIN, by the lock of another process; the body is not called."""
    called: list[int] = []
    with write_lock_held(python_process, sqlite_path):
        outcome = run_root(database, lambda: called.append(1))

    assert (outcome.verdict, outcome.phase, outcome.code, outcome.contended) == (Verdict.ROLLED_BACK, "begin", 5, True)
    assert isinstance(outcome.error, peewee.OperationalError)
    assert called == []
    assert run_root(database, insert(database)).verdict is Verdict.COMMITTED


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_body_that_raises_is_rolled_back_and_its_error_is_kept(
    database: peewee.SqliteDatabase, seen: Any, error: BaseException
) -> None:
    def body() -> None:
        insert(database)()
        raise error

    outcome = run_root(database, body)

    assert (outcome.verdict, outcome.phase) == (Verdict.ROLLED_BACK, "body")
    assert outcome.error is error
    assert not outcome.contended
    assert seen() == []
    assert is_idle(database)


def test_a_statement_refused_in_the_body_is_rolled_back_with_its_code(
    database: peewee.SqliteDatabase, faults: Faults, seen: Any
) -> None:
    def body() -> None:
        insert(database)()
        raise peewee.OperationalError(sqlite_error(517), "database is locked")

    outcome = run_root(database, body)

    assert (outcome.verdict, outcome.code, outcome.contended) == (Verdict.ROLLED_BACK, 517, True)
    assert seen() == []


def test_a_constraint_is_proven_and_not_contention(database: peewee.SqliteDatabase, seen: Any) -> None:
    run_root(database, insert(database))
    outcome = run_root(database, insert(database))

    assert (outcome.verdict, outcome.contended) == (Verdict.ROLLED_BACK, False)
    assert isinstance(outcome.error, peewee.IntegrityError)
    assert seen() == [1]


def test_failing_between_begin_and_body_is_proven(database: peewee.SqliteDatabase, faults: Faults) -> None:
    faults.before("SAVEPOINT", sqlite_error(1))
    outcome = run_root(database, insert(database))

    assert (outcome.verdict, outcome.phase) == (Verdict.ROLLED_BACK, "begin")
    assert is_idle(database)


def test_atomic_inside_the_body_is_a_savepoint_of_the_root(database: peewee.SqliteDatabase, seen: Any) -> None:
    def body() -> None:
        with database.atomic():
            insert(database, 1)()
        with suppress(ValueError), database.atomic():
            insert(database, 2)()
            raise ValueError
        assert seen() == []

    assert run_root(database, body).verdict is Verdict.COMMITTED
    assert seen() == [1]


# --- unknown ---------------------------------------------------------------------------------------------------------


def test_a_commit_that_fails_is_unknown_and_leaves_the_connection_idle(
    database: peewee.SqliteDatabase, faults: Faults, seen: Any
) -> None:
    """QUEUE-4: nothing was committed here, and still that is no proof."""
    faults.before("COMMIT", sqlite_error(5))
    outcome = run_root(database, insert(database))

    assert (outcome.verdict, outcome.phase, outcome.code) == (Verdict.UNKNOWN, "commit", 5)
    assert seen() == []
    assert is_idle(database)


def test_a_commit_that_fails_after_it_has_committed_is_unknown(
    database: peewee.SqliteDatabase, faults: Faults, seen: Any
) -> None:
    faults.after("COMMIT", sqlite_error(1034, "disk I/O error"))
    outcome = run_root(database, insert(database))

    assert (outcome.verdict, outcome.phase) == (Verdict.UNKNOWN, "commit")
    assert seen() == [1]


@pytest.mark.parametrize("skip", [0, 1], ids=["to the savepoint", "of the root"])
def test_a_rollback_that_fails_proves_nothing(database: peewee.SqliteDatabase, faults: Faults, skip: int) -> None:
    faults.before("ROLLBACK", sqlite_error(10), skip=skip)

    def body() -> None:
        insert(database)()
        raise ValueError("the original")

    outcome = run_root(database, body)

    assert (outcome.verdict, outcome.phase) == (Verdict.UNKNOWN, "body")
    assert isinstance(outcome.error, ValueError)
    assert is_idle(database)


def test_a_root_that_the_engine_ended_proves_nothing(database: peewee.SqliteDatabase) -> None:
    """The error itself rolled the transaction back, so nobody can show that it was this transaction."""
    run_root(database, insert(database))
    outcome = run_root(database, lambda: database.execute_sql("INSERT OR ROLLBACK INTO rows (id) VALUES (1)"))

    assert (outcome.verdict, outcome.phase) == (Verdict.UNKNOWN, "body")


def test_a_root_whose_end_was_swallowed_is_not_committed(database: peewee.SqliteDatabase, seen: Any) -> None:
    run_root(database, insert(database))

    def body() -> None:
        with pytest.raises(peewee.IntegrityError):
            database.execute_sql("INSERT OR ROLLBACK INTO rows (id) VALUES (1)")
        database.execute_sql("INSERT INTO rows (id) VALUES (2)")  # in autocommit by now

    outcome = run_root(database, body)

    assert outcome.verdict is Verdict.UNKNOWN
    assert seen() == [1, 2], "the second row has been written, which is why this must not pass as rolled back"


def test_a_body_that_commits_and_begins_anew_proves_nothing(database: peewee.SqliteDatabase, seen: Any) -> None:
    def body() -> None:
        insert(database)()
        database.connection().execute("COMMIT")
        database.connection().execute("BEGIN IMMEDIATE")
        raise ValueError

    assert run_root(database, body).verdict is Verdict.UNKNOWN
    assert seen() == [1]
    assert is_idle(database)


def test_a_body_that_commits_and_begins_anew_is_not_taken_for_committed(database: peewee.SqliteDatabase, seen: Any) -> None:
    """What it wrote first stands whatever becomes of the rest: not one transaction any more."""

    def body() -> None:
        insert(database, 1)()
        database.connection().execute("COMMIT")
        database.connection().execute("BEGIN IMMEDIATE")
        insert(database, 2)()

    assert run_root(database, body).verdict is Verdict.UNKNOWN
    assert seen() == [1]


def test_a_replaced_connection_proves_nothing(database: peewee.SqliteDatabase) -> None:
    kept = database.connection()

    def body() -> None:
        insert(database)()
        database.dispose()
        database.connect()
        raise ValueError

    assert run_root(database, body).verdict is Verdict.UNKNOWN
    assert not kept.in_transaction, "the abandoned connection must not keep its locks"
    kept.close()


def test_a_closed_connection_proves_nothing(database: peewee.SqliteDatabase) -> None:
    def body() -> None:
        database.connection().close()
        raise ValueError

    assert run_root(database, body).verdict is Verdict.UNKNOWN


def test_another_process_proves_nothing(database: peewee.SqliteDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()

    def body() -> None:
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        raise ValueError

    outcome = run_root(database, body)
    monkeypatch.undo()

    assert outcome.verdict is Verdict.UNKNOWN
    assert database.connection().in_transaction, "a child does not touch its parent's transaction"
    database.connection().execute("ROLLBACK")


def test_a_transaction_left_on_the_books_proves_nothing(database: peewee.SqliteDatabase) -> None:
    def body() -> None:
        database.push_transaction(object())
        raise ValueError

    assert run_root(database, body).verdict is Verdict.UNKNOWN


def test_a_full_disk_is_never_taken_for_a_commit(database: peewee.SqliteDatabase, seen: Any) -> None:
    pages = database.execute_sql("PRAGMA page_count").fetchone()[0]
    database.execute_sql(f"PRAGMA max_page_count = {pages + 1}").fetchall()
    outcome = run_root(database, lambda: database.execute_sql("INSERT INTO rows (id, pad) VALUES (1, zeroblob(300000))"))

    assert outcome.verdict in (Verdict.ROLLED_BACK, Verdict.UNKNOWN)
    assert (outcome.code, outcome.contended) == (13, False)
    assert seen() == []


# --- not attempted ---------------------------------------------------------------------------------------------------


def test_a_call_inside_a_transaction_is_not_attempted(database: peewee.SqliteDatabase) -> None:
    called: list[int] = []
    with database.atomic():
        assert run_root(database, lambda: called.append(1)).verdict is Verdict.NOT_ROOT
    database.connection().execute("BEGIN")  # one that Peewee has not heard of
    assert run_root(database, lambda: called.append(1)).verdict is Verdict.NOT_ROOT
    database.connection().execute("ROLLBACK")
    with database.manual_commit():  # one that has not begun
        assert run_root(database, lambda: called.append(1)).verdict is Verdict.NOT_ROOT
    database.close()
    assert run_root(database, lambda: called.append(1)).verdict is Verdict.NOT_ROOT
    assert called == []


def test_only_contention_may_be_tried_again() -> None:
    assert frozenset({5, 6, 261, 262, 517, 773}) == RETRYABLE


def test_the_code_is_found_behind_peewee_and_behind_causes() -> None:
    error = sqlite_error(261)
    wrapped = peewee.OperationalError(error, "locked")
    outer = RuntimeError("outer")
    outer.__cause__ = wrapped

    assert [sqlite_code(each) for each in (error, wrapped, outer, ValueError(), None)] == [261, 261, 261, None, None]
