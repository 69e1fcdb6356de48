"""A database broker and the middleware share one store: settings about tables count there too, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dramatiq
import pytest

from dramatiq_saga import FlowHandle, SagaMiddleware, Settings, query, workflow
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.errors import SchemaVersionError, SettingsError


@pytest.fixture
def start(postgres_url: str, table_prefix: str) -> Iterator[object]:
    brokers = []

    def start(settings: Settings) -> FlowHandle[None]:
        broker = DatabaseBroker(postgres_url, prefix=table_prefix)
        brokers.append(broker)
        broker.add_middleware(SagaMiddleware(settings=settings))
        return workflow(name="checkout", broker=broker)(lambda flow: None).run_sync()

    yield start
    for broker in brokers:
        broker.close()


def test_tables_on_a_server_are_created_by_a_database_broker_where_the_settings_allow_it(start: object) -> None:
    """The message for missing tables names ``schema.auto_create``: it has to help whoever owns the store."""
    with pytest.raises(SchemaVersionError, match=r"schema\.auto_create"):
        start(Settings())  # type: ignore[operator]
    assert start(Settings.from_mapping({"schema.auto_create": True})).status == "completed"  # type: ignore[operator]


def test_a_table_prefix_that_the_broker_does_not_use_is_refused(sqlite_path: Path) -> None:
    broker = SQLiteBroker(sqlite_path)
    broker.add_middleware(SagaMiddleware(settings=Settings.from_mapping({"schema.table_prefix": "shop_"})))
    with pytest.raises(SettingsError, match="give the broker prefix='shop_' as well"):
        workflow(broker=broker)(lambda flow: None)


def test_the_prefix_of_the_broker_is_enough(sqlite_path: Path) -> None:
    broker = SQLiteBroker(sqlite_path, prefix="shop_")
    broker.add_middleware(SagaMiddleware())
    dramatiq.set_broker(broker)
    workflow(name="checkout")(lambda flow: None).run_sync()
    assert query().count() == 1
