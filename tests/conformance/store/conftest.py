"""A store on each database in turn; on servers its tables are this test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_saga.store.database import Store, open_store


@pytest.fixture
def open_on(table_prefix: str) -> Iterator[Callable[..., Store]]:
    """Opens stores that are closed at the end, by default under this test's prefix and with tables made as needed."""
    stores: list[Store] = []

    def opener(database: Any, **options: Any) -> Store:
        stores.append(open_store(database, **{"prefix": table_prefix, "auto_create": True, **options}))
        return stores[-1]

    yield opener
    for store in stores:
        store.abandon_host_transaction()
        store.close_thread()
        store.close()


@pytest.fixture
def store(database_url: str, tables_stand: None, open_on: Callable[..., Store]) -> Store:
    """A store whose tables are there."""
    store = open_on(database_url)
    store.prepare()
    return store
