"""Creating and upgrading the tables (C64, C65, SAFE-3)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import peewee
import pytest

from dramatiq_saga import Settings
from dramatiq_saga.errors import SchemaVersionError
from dramatiq_saga.store import migrations
from dramatiq_saga.store.database import Store, open_store
from dramatiq_saga.store.models import TABLES
from tests.support.bench import Bench
from tests.support.gates import Gates
from tests.support.processes import Process
from tests.support.stores import add, count

FORK_TWELVE = """
import os, sys
from dramatiq_saga.store.database import open_store
from tests.support.bench import Bench
from tests.support.gates import Gates
from tests.support.stores import add

url, prefix, children = sys.argv[1], sys.argv[2], []
for number in range(12):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Gates.from_env().reach("start")
            store = open_store(url, prefix=prefix, auto_create=True)
            store.write(add())
            store.close()
            status = 0
        except BaseException as exc:
            print(repr(exc), flush=True)
        os._exit(status)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


@pytest.fixture
def fresh(database_url: str, open_on: Callable[..., Store]) -> Callable[..., Store]:
    """Stores on an empty database whose tables are not made by themselves."""
    return lambda **options: open_on(database_url, **{"auto_create": False, **options})


def tables(store: Store) -> set[str]:
    """What is there under the store's prefix, seen on a connection of the engine."""
    found: set[str] = store._control(lambda: set(store.database.get_tables()))
    return {name for name in found if name.startswith(store.prefix)}


def test_tables_are_made_only_where_that_is_allowed(fresh: Callable[..., Store]) -> None:
    store = fresh()
    assert store.schema_version() is None
    with pytest.raises(SchemaVersionError) as caught:
        store.check_schema()
    assert (caught.value.found, caught.value.expected) == (None, migrations.latest())
    with pytest.raises(SchemaVersionError):
        store.write(add())
    with pytest.raises(SchemaVersionError):
        count(store)
    with pytest.raises(SchemaVersionError):
        store.prepare()
    with store.database.atomic(), pytest.raises(SchemaVersionError):
        store.write(add())
    store.close_thread()
    assert tables(store) == set()

    assert store.migrate() == migrations.names()
    assert tables(store) == {store.prefix + name for name in (*TABLES, "schema_migrations")}
    assert (store.write(add()), store.schema_version()) == (1, migrations.latest())
    store.check_schema()


def test_migrating_twice_is_a_no_op(fresh: Callable[..., Store]) -> None:
    """C64."""
    store = fresh()
    store.migrate()
    store.write(add())
    assert store.migrate() == []
    assert fresh().migrate() == []
    assert count(store) == 1


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_by_default_only_sqlite_makes_its_tables_itself(database_url: str, open_on: Callable[..., Store]) -> None:
    store = open_on(database_url, auto_create=None)
    if store.dialect == "sqlite":
        assert store.write(add()) == 1
    else:
        with pytest.raises(SchemaVersionError):
            store.write(add())


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``later(up, …)``: this code has migrations 0002, 0003, … beside the first."""

    def install(*ups: Callable[[peewee.Database, str], None]) -> None:
        added = []
        for number, up in enumerate(ups, 2):
            name = f"{number:04}_{up.__name__}"
            module: Any = ModuleType(name)
            module.up = up
            monkeypatch.setitem(sys.modules, f"{migrations.__name__}.{name}", module)
            added.append(name)
        monkeypatch.setattr(migrations, "names", lambda: ["0001_initial", *added])

    return install


def colour(database: peewee.Database, prefix: str) -> None:
    database.execute_sql(f"ALTER TABLE {prefix}workers ADD COLUMN colour VARCHAR(10)")


def test_older_tables_are_refused_until_they_are_migrated_and_rows_survive(
    fresh: Callable[..., Store], later: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fresh()
    old.migrate()
    old.write(add())
    later(colour)
    store = fresh()
    with pytest.raises(SchemaVersionError) as caught:
        store.write(add())
    assert (caught.value.found, caught.value.expected) == ("0001", "0002")
    assert store.migrate() == ["0002_colour"]
    assert store.write(add()) == 2
    assert store.read(lambda tx: tx.all("SELECT colour FROM {workers}")) == []
    monkeypatch.undo()
    with pytest.raises(SchemaVersionError) as newer:
        fresh().write(add())
    assert (newer.value.found, newer.value.expected) == ("0002", "0001")
    with pytest.raises(SchemaVersionError):
        fresh(auto_create=True).write(add())
    with pytest.raises(SchemaVersionError):
        fresh().migrate()


def test_tables_that_may_be_made_are_migrated_at_the_first_use(fresh: Callable[..., Store], later: Callable[..., None]) -> None:
    fresh().migrate()
    later(colour)
    store = fresh(auto_create=True)
    store.write(add())
    assert store.schema_version() == "0002"


def test_an_interrupted_migration_is_finished_by_the_next_one(
    fresh: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C64: SQLite and PostgreSQL forget the half, MySQL and MariaDB meet it again."""
    original: Any = peewee.Database.create_tables

    def break_off(database: peewee.Database, models: list[Any], **options: Any) -> None:
        original(database, models[:5], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(peewee.Database, "create_tables", break_off)
    store = fresh()
    with pytest.raises(KeyboardInterrupt):
        store.migrate()
    assert len(tables(store)) == (6 if store.dialect == "mysql" else 0)
    assert store.schema_version() is None
    monkeypatch.undo()

    assert store.migrate() == migrations.names()
    assert tables(store) == {store.prefix + name for name in (*TABLES, "schema_migrations")}
    assert store.write(add()) == 1


def size(database: peewee.Database, prefix: str) -> None:
    """Needs what :func:`colour` has made."""
    database.execute_sql(f"UPDATE {prefix}workers SET colour = NULL")
    again = "IF NOT EXISTS " if isinstance(database, peewee.MySQLDatabase) else ""  # there it may meet its own remains
    database.execute_sql(f"ALTER TABLE {prefix}workers ADD COLUMN {again}size INTEGER")


@pytest.mark.parametrize("way", ["step by step", "in one jump", "interrupted"])
def test_a_waiting_run_goes_on_whichever_way_the_tables_were_upgraded(
    database_url: str, table_prefix: str, fresh: Callable[..., Store], later: Callable[..., None], way: str
) -> None:
    """C64, SAFE-3: migrations in order, each once; what an interrupted one has left is no version, and no worker takes it for one."""

    def workflows(bench: Bench) -> None:
        bench.workflow(lambda flow: flow.await_signal("go"), name="waits")

    before = Bench(
        database_url, workflows, prefix=table_prefix, settings=Settings.from_mapping({"schema.table_prefix": table_prefix})
    )
    run = before.start("waits")
    before.run()
    before.close()
    store = fresh()
    if way == "step by step":
        later(colour)
        assert store.migrate() == ["0002_colour"]
    elif way == "interrupted":

        def size_interrupted(database: peewee.Database, prefix: str) -> None:
            size(database, prefix)
            raise KeyboardInterrupt

        later(colour, size_interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.migrate()
        assert store.schema_version() == ("0002" if store.dialect == "mysql" else "0001")
        with pytest.raises(SchemaVersionError):
            fresh().prepare()
    later(colour, size)
    pending = ["0003_size"] if store.schema_version() == "0002" else ["0002_colour", "0003_size"]
    assert store.migrate() == pending
    assert store.migrate() == []
    assert store.read(lambda tx: tx.all(f"SELECT name FROM {table_prefix}schema_migrations ORDER BY name")) == [
        ("0001_initial",), ("0002_colour",), ("0003_size",),
    ]  # fmt: skip
    after = Bench(
        database_url, workflows, prefix=table_prefix, settings=Settings.from_mapping({"schema.table_prefix": table_prefix})
    )
    after.signal(run, "go", "on")
    after.run()
    assert after.status(run) == "completed"
    after.close()


def test_twelve_processes_start_at_once(
    database_url: str, table_prefix: str, python_process: Callable[..., Process], gates: Gates, open_on: Callable[..., Store]
) -> None:
    """C65: one makes the tables, the others see that it is done, and nothing distinguishes the result."""
    starter = python_process("-c", FORK_TWELVE, database_url, table_prefix)
    gates.wait_reached("start", 12)
    gates.open("start")
    assert starter.wait(60) == 0, starter.output()

    store = open_on(database_url, auto_create=False)
    assert count(store) == 12
    assert store.read(lambda tx: len(tx.all(f"SELECT name FROM {table_prefix}schema_migrations"))) == len(migrations.names())
    assert tables(store) == {store.prefix + name for name in (*TABLES, "schema_migrations")}


def test_two_prefixes_live_side_by_side(database_url: str, open_on: Callable[..., Store], table_prefix: str) -> None:
    """C64, with table prefix and without; tables and indexes of one do not get in the way of the other's."""
    first, second = open_on(database_url), open_on(database_url, prefix=table_prefix + "b_")
    assert (first.write(add()), first.write(add()), second.write(add())) == (1, 2, 1)


def test_without_a_prefix_it_works_too(sqlite_path: Path) -> None:
    store = open_store(sqlite_path, prefix="")
    assert store.write(add()) == 1
    store.close()
