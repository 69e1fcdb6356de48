"""Back ends on each database in turn: two of them, on stores of their own, as two processes would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dramatiq_saga.clock import ManualClock
from dramatiq_saga.store.database import Store, open_store

OpenStore = Callable[[], Store]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def new_store(database_url: str, table_prefix: str, tables_stand: None, clock: ManualClock) -> Iterator[OpenStore]:
    """Opens one more store on this test's tables and clock."""
    stores: list[Store] = []

    def opener() -> Store:
        stores.append(open_store(database_url, prefix=table_prefix, auto_create=True, clock=clock))
        stores[-1].prepare()
        return stores[-1]

    yield opener
    for store in stores:
        store.abandon_host_transaction()
        store.close_thread()
        store.close()
