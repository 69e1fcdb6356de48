"""SQLite connections of the engine: pragmas, files that cannot serve, reads."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peewee
import pytest
from playhouse.pool import PooledSqliteDatabase

from dramatiq_saga.errors import DatabaseUnusableError, StoreError, WriteRefusedError
from dramatiq_saga.store import connections
from dramatiq_saga.store.database import Store, Tx, open_store
from tests.support.processes import Process
from tests.support.stores import add, count, faulty_store, sqlite_error, write_lock_held
from tests.support.threads import writer_threads

ENGINE = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


def pragmas(tx: Tx) -> dict[str, object]:
    """The effective pragmas of the connection that an operation runs on."""
    found = {}
    for name in ENGINE:
        row = tx.one(f"PRAGMA {name}")
        assert row is not None
        found[name] = row[0]
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def opener(*args: Any, **kwargs: Any) -> Store:
        stores.append(open_store(*args, **kwargs))
        return stores[-1]

    yield opener
    for store in stores:
        store.close()
        store.close_thread()


# --- pragmas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["shop.db", "sqlite:///shop.db", Path("shop.db")], ids=["text", "url", "path"])
def test_a_program_that_goes_to_another_directory_keeps_its_database(
    target: str | Path, tmp_path: Path, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread opens the file anew: an address without a directory names the one that it stood for when it was given."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    store = opened(target)
    store.write(lambda tx: tx.run("CREATE TABLE orders (id)"))
    monkeypatch.chdir(there)
    assert store.read(lambda tx: tx.all("SELECT * FROM orders")) == []
    store.close()
    store.write(lambda tx: tx.run("INSERT INTO orders VALUES (1)"))
    assert store.is_same_database(here / "shop.db")
    assert not list(there.iterdir())


@pytest.mark.parametrize("kind", ["path", "text", "url", "database", "pooled"])
def test_every_connection_of_the_engine_has_its_pragmas(kind: str, sqlite_path: Path, opened: Callable[..., Store]) -> None:
    """C40: writers, readers of later threads, and after closing; a Database made by the user too."""
    target: Any = {
        "path": sqlite_path,
        "text": str(sqlite_path),
        "url": f"sqlite:///{sqlite_path}",
        "database": peewee.SqliteDatabase(str(sqlite_path)),
        "pooled": PooledSqliteDatabase(str(sqlite_path)),
    }[kind]
    store = opened(target)
    assert store.write(pragmas) == ENGINE
    assert store.read(pragmas) == ENGINE
    both = threading.Barrier(2)  # two reads at once take two connections
    found: list[dict[str, object]] = []

    def read() -> None:
        found.append(store.read(lambda tx: (both.wait(20), pragmas(tx))[1]))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ENGINE, ENGINE]
    store.close()
    assert (store.write(pragmas), store.read(pragmas)) == (ENGINE, ENGINE)


def test_what_the_user_has_chosen_stands(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    store = opened(
        peewee.SqliteDatabase(
            str(sqlite_path), timeout=1, pragmas={"SYNCHRONOUS": "normal", "journal_mode": "delete", "foreign_keys": 0}
        )
    )
    chosen = {"journal_mode": "delete", "synchronous": 1, "foreign_keys": 0, "busy_timeout": 1000}
    assert store.write(pragmas) == chosen
    assert store.read(pragmas) == chosen


def test_a_host_connection_is_as_durable_as_the_engine_but_keeps_its_foreign_keys(
    sqlite_path: Path, opened: Callable[..., Store]
) -> None:
    """The engine joins host transactions; whether a host enforces its foreign keys is the host's affair."""
    database = peewee.SqliteDatabase(str(sqlite_path), pragmas={"cache_size": -1000})
    store = opened(database)
    store.write(add())
    assert (database.journal_mode, database.synchronous, database.foreign_keys) == ("wal", 2, 0)
    assert database.cache_size == -1000


def test_a_new_file_has_small_pages_and_an_old_one_keeps_its_own(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    assert opened(sqlite_path).read(lambda tx: tx.one("PRAGMA page_size")) == (2048,)
    other = sqlite_path.with_name("old.db")
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("CREATE TABLE old (id)")
    connection.close()
    assert opened(other).read(lambda tx: tx.one("PRAGMA page_size")) == (8192,)


def test_a_file_system_without_wal_is_warned_about(
    sqlite_path: Path, opened: Callable[..., Store], caplog: pytest.LogCaptureFixture
) -> None:
    """C40: reported, once."""
    store = opened(peewee.SqliteDatabase(f"file:{sqlite_path}?vfs=unix-dotfile", uri=True))
    with caplog.at_level(logging.WARNING, "dramatiq_saga"):
        store.write(add())
        store.close()
        store.write(add())
    assert [record.getMessage().count("not WAL") for record in caplog.records] == [1]


def test_functions_of_a_users_database_are_there(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    database = peewee.SqliteDatabase(str(sqlite_path))
    database.register_function(lambda value: value * 2, "twice", 1)
    assert opened(database).read(lambda tx: tx.one("SELECT twice(21)")) == (42,)


# --- what cannot serve -----------------------------------------------------------------------------------------------


def test_nothing_is_opened_before_the_first_use(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    others = writer_threads()
    store = opened(sqlite_path)
    assert store.schema_version() is None
    assert not sqlite_path.exists()
    assert writer_threads() <= others


@pytest.mark.parametrize("use", ["read", "write"])
@pytest.mark.parametrize("case", ["no directory", "a directory", "no database"])
def test_a_file_that_cannot_serve_is_named_with_the_way_out(
    case: str, use: str, tmp_path: Path, opened: Callable[..., Store]
) -> None:
    path = tmp_path / "missing" / "saga.db" if case == "no directory" else tmp_path / "saga.db"
    if case == "a directory":
        path.mkdir()
    elif case == "no database":
        path.write_text("this is a text, and long enough not to be taken for an empty database" * 20)
    store = opened(path)
    with pytest.raises(DatabaseUnusableError) as caught:
        store.write(add()) if use == "write" else count(store)
    assert str(path) in str(caught.value)
    assert {"no directory": "create it", "a directory": "is a file", "no database": "not an SQLite"}[case] in str(caught.value)
    assert isinstance(caught.value, StoreError), "whoever waits for the store to come back waits for this one too"


def test_a_file_opened_read_only_is_named_with_the_way_out(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    opened(sqlite_path).write(add())
    store = opened(peewee.SqliteDatabase(f"file:{sqlite_path}?mode=ro", uri=True))
    with pytest.raises(DatabaseUnusableError, match="read-only"):
        store.write(add())
    assert count(store) == 1


def test_a_database_that_shares_its_connection_among_threads_is_refused(sqlite_path: Path) -> None:
    with pytest.raises(DatabaseUnusableError, match="thread_safe"):
        open_store(peewee.SqliteDatabase(str(sqlite_path), thread_safe=False))


def test_another_driver_than_sqlite3_is_refused(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    class Other(peewee.SqliteDatabase):
        def _connect(self) -> Any:
            return object()

    with pytest.raises(DatabaseUnusableError, match="driver"):
        opened(Other(str(sqlite_path))).write(add())


def test_an_old_sqlite_is_refused(sqlite_path: Path, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(DatabaseUnusableError, match="RETURNING"):
        opened(sqlite_path).write(add())


def test_a_proxy_is_followed_and_an_empty_one_refused(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    proxy = peewee.DatabaseProxy()
    with pytest.raises(DatabaseUnusableError, match="initialize"):
        open_store(proxy)
    proxy.initialize(peewee.SqliteDatabase(str(sqlite_path)))
    assert opened(proxy).write(add()) == 1


def test_a_url_may_carry_options(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    assert opened(f"sqlite:///{sqlite_path}?timeout=2").write(pragmas) == {**ENGINE, "busy_timeout": 2000}
    assert opened("sqlite:///:memory:").write(add()) == 1


@pytest.mark.parametrize("kind", [peewee.PostgresqlDatabase, peewee.MySQLDatabase])
def test_a_missing_driver_is_named_with_the_extra_that_brings_it(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mysql", "psycopg2", "psycopg"):
        monkeypatch.setattr(peewee, module, None)
    with pytest.raises(DatabaseUnusableError, match=r"PATH-OF-THE-CHECKOUT\[postgres\]"):
        open_store(kind("test"))


def test_what_is_no_database_is_refused() -> None:
    with pytest.raises(TypeError):
        open_store(42)  # type: ignore[arg-type]
    with pytest.raises(DatabaseUnusableError, match="oracle"):
        open_store("oracle://localhost/saga")


def test_first_use_under_a_held_lock_is_refused_and_works_later(
    sqlite_path: Path, opened: Callable[..., Store], python_process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C41: the start is refused to its caller, nothing is left half made."""
    monkeypatch.setattr(connections, "BUSY_TIMEOUT", 0.2)
    sqlite3.connect(sqlite_path).close()
    store = opened(peewee.SqliteDatabase(str(sqlite_path), timeout=0.2))
    with write_lock_held(python_process, sqlite_path):
        with pytest.raises((WriteRefusedError, DatabaseUnusableError)) as caught:
            store.write(add())
        assert not caught.value.executed
    assert store.write(add()) == 1


# --- reads -----------------------------------------------------------------------------------------------------------


def test_a_read_sees_one_snapshot(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    store = opened(sqlite_path)
    store.write(add())

    def operation(tx: Tx) -> list[Any]:
        first = tx.one("SELECT value FROM {rate_limits}")
        thread = threading.Thread(target=store.write, args=(add(),))
        thread.start()
        thread.join()
        return [first, tx.one("SELECT value FROM {rate_limits}")]

    assert store.read(operation) == [(1,), (1,)]
    assert count(store) == 2


def test_a_read_does_not_wait_for_a_writer(
    sqlite_path: Path, opened: Callable[..., Store], python_process: Callable[..., Process]
) -> None:
    store = opened(sqlite_path)
    store.write(add())
    with write_lock_held(python_process, sqlite_path):
        assert count(store) == 1


def test_a_read_cannot_write(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    store = opened(sqlite_path)
    with pytest.raises(StoreError):
        store.read(add())
    assert count(store) == 0


def test_reads_one_after_the_other_share_a_connection(sqlite_path: Path) -> None:
    """C59: as many connections as there were reads at once, however many threads."""
    with faulty_store(sqlite_path) as (store, _):
        count(store)
        factory: Any = store.database.connect_params["factory"]
        opened = factory.opened
        for _ in range(5):
            thread = threading.Thread(target=count, args=(store,))
            thread.start()
            thread.join()
        assert factory.opened == opened


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_read_that_is_broken_off_leaves_no_open_snapshot(
    sqlite_path: Path, opened: Callable[..., Store], error: type[BaseException]
) -> None:
    """An interrupt may land anywhere in a read: the next one must not see old rows."""
    store = opened(sqlite_path)
    store.write(add())

    def operation(tx: Tx) -> None:
        tx.one("SELECT value FROM {rate_limits}")
        raise error

    with pytest.raises(error):
        store.read(operation)
    store.write(add())
    assert count(store) == 2


def test_a_failing_read_of_the_disk_is_a_store_error_and_a_wrong_statement_is_not(sqlite_path: Path) -> None:
    with faulty_store(sqlite_path) as (store, faults):
        faults.before("SELECT value", sqlite_error(266, "disk I/O error"))
        with pytest.raises(StoreError) as caught:
            count(store)
        assert caught.value.sqlite_errorcode == 266
        with pytest.raises(peewee.OperationalError):
            store.read(lambda tx: tx.all("SELECT nothing"))
        faults.before("BEGIN", sqlite_error(1, "odd"))
        with pytest.raises(peewee.OperationalError, match="odd"):
            count(store)
        assert count(store) == 0


def test_callbacks_of_a_read_run_after_it(sqlite_path: Path, opened: Callable[..., Store]) -> None:
    store = opened(sqlite_path)
    seen: list[int] = []

    def broken_off(tx: Tx) -> None:
        tx.after_commit(lambda: seen.append(-1))
        raise ValueError

    with pytest.raises(ValueError):
        store.read(broken_off)
    store.read(lambda tx: tx.after_commit(lambda: seen.append(store.write(add()))))
    count(store)
    assert seen == [1]
