"""What is looked at before a worker starts, or at the first use of a database."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peewee
import pytest
from dramatiq import Worker

from dramatiq_saga import SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.errors import DatabaseUnusableError, SagaError
from dramatiq_saga.store.database import open_store
from tests.support.servers import drop_tables


@pytest.fixture(params=["sqlite", "postgresql"])
def make_broker(request: pytest.FixtureRequest, sqlite_path: Path, table_prefix: str) -> Iterator[Callable[[], Any]]:
    """``make_broker()``: a broker on this test's own tables, which nobody makes by himself."""
    made: list[Any] = []
    url = f"sqlite:///{sqlite_path}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")

    def make() -> Any:
        schema = {"auto_create": False, "table_prefix": table_prefix}
        broker = (
            SQLiteBroker(sqlite_path, prefix=table_prefix)
            if request.param == "sqlite"
            else DatabaseBroker(url, prefix=table_prefix)
        )
        made.append(broker)
        broker.add_middleware(SagaMiddleware(settings=Settings(schema=schema)))  # type: ignore[arg-type]
        workflow(name="shop", broker=broker)(lambda flow: None)
        return broker

    make.url = url  # type: ignore[attr-defined]
    yield make
    for broker in made:
        broker.close()
    if request.param == "postgresql":
        drop_tables("postgresql", table_prefix)


def schema_at(url: str, prefix: str, version: str | None) -> None:
    """Tables that call themselves ``version``; ``None``: as they should be."""
    store = open_store(url, prefix=prefix)
    store.migrate()
    if version is not None:
        with store.database.connection_context():
            store.database.execute_sql(f"UPDATE {prefix}schema_migrations SET name = '{version}'")
    store.close()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("missing", r"the tables of dramatiq-saga are missing: .* run `dramatiq-saga init`, or set schema\.auto_create"),
        ("0000", r"the schema is at 0000, this code needs \d+: run `dramatiq-saga init` to migrate it"),
        ("9999", r"the schema is at 9999, newer than this code \(\d+\): upgrade dramatiq-saga here"),
    ],
)
def test_a_worker_does_not_start_on_a_schema_that_is_not_its_own(
    make_broker: Any, table_prefix: str, version: str, words: str
) -> None:
    """SAFE-3: refused at start, not at the first step, with the command that mends it; so is a send. Mended, it starts."""
    if version != "missing":
        schema_at(make_broker.url, table_prefix, version)
    broker = make_broker()
    worker = Worker(broker, worker_threads=1)
    with pytest.raises(SagaError, match=words):
        worker.start()
    assert worker.workers == []
    with pytest.raises(SagaError, match=words):
        make_broker().actors["shop"].workflow.send()
    if version == "missing":
        schema_at(make_broker.url, table_prefix, None)
        broker = make_broker()
        worker = Worker(broker, worker_threads=1, worker_timeout=20)
        worker.start()
        worker.stop()


def a_directory(path: Path) -> None:
    path.mkdir()


def some_other_file(path: Path) -> None:
    path.write_text("this is a diary and no database, though it is long enough to be one " * 40)


@pytest.mark.parametrize("made", [a_directory, some_other_file])
def test_a_file_that_is_no_database_is_refused_by_its_name_and_left_alone(tmp_path: Path, made: Any) -> None:
    """API SQLiteBroker: at the first use, by a sender and at a worker's start alike."""
    path = tmp_path / "shop.db"
    made(path)
    before = path.read_text() if path.is_file() else os.listdir(path)
    broker = SQLiteBroker(path)
    try:
        broker.add_middleware(SagaMiddleware())
        shop = workflow(name="shop", broker=broker)(lambda flow: None)
        with pytest.raises(DatabaseUnusableError, match=r"shop\.db"):
            shop.send()
        with pytest.raises(SagaError, match=r"shop\.db"):
            Worker(broker, worker_threads=1).start()
    finally:
        broker.close()
    assert (path.read_text() if path.is_file() else os.listdir(path)) == before


def test_a_database_in_a_directory_that_does_not_exist_is_refused_by_its_name(tmp_path: Path) -> None:
    """API SQLiteBroker: a mistyped path is no new, empty application."""
    broker = SQLiteBroker(tmp_path / "nowhere" / "shop.db")
    try:
        broker.add_middleware(SagaMiddleware())
        shop = workflow(name="shop", broker=broker)(lambda flow: None)
        with pytest.raises(DatabaseUnusableError, match=r"nowhere.shop\.db"):
            shop.send()
    finally:
        broker.close()
    assert not (tmp_path / "nowhere").exists()


def test_a_read_only_database_is_refused_in_words_and_a_run_is_not_half_started(sqlite_path: Path) -> None:
    """API SQLiteBroker: readers still read."""
    store = open_store(sqlite_path)
    store.migrate()
    store.close()
    broker = SQLiteBroker(peewee.SqliteDatabase(f"file:{sqlite_path}?mode=ro", uri=True))
    try:
        broker.add_middleware(SagaMiddleware())
        shop = workflow(name="shop", broker=broker)(lambda flow: None)
        with pytest.raises(SagaError, match="read-only"):
            shop.send()
    finally:
        broker.close()
    store = open_store(sqlite_path)
    assert store.read(lambda tx: tx.all("SELECT id FROM {flow_runs}")) == []
    store.close()
