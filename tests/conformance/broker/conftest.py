"""``brokers`` makes brokers of one kind after the other; ``broker`` is one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dramatiq_saga.clock import ManualClock
from tests.support import servers
from tests.support.brokers import DATABASE_KINDS, KINDS, Brokers


@pytest.fixture(scope="session")
def server_prefixes() -> Iterator[dict[str, str]]:
    """Which prefix this session uses on which server; its tables are dropped at the end."""
    prefixes: dict[str, str] = {}
    yield prefixes
    for server, prefix in prefixes.items():
        servers.drop_tables(server, prefix)


@pytest.fixture(params=KINDS)
def any_brokers(request: pytest.FixtureRequest) -> Iterator[Brokers]:
    """Every kind, Dramatiq's own included."""
    brokers = Brokers(request.param, request)
    yield brokers
    brokers.close()


@pytest.fixture
def any_broker(any_brokers: Brokers) -> Any:
    return any_brokers()


@pytest.fixture(params=DATABASE_KINDS)
def brokers(request: pytest.FixtureRequest) -> Iterator[Brokers]:
    """Ours, on every database."""
    brokers = Brokers(request.param, request)
    yield brokers
    brokers.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(brokers: Brokers, clock: ManualClock) -> Any:
    """One of ours, on a clock that the test moves, with leases of 60 s."""
    broker = brokers(clock=clock)
    broker.declare_queue("default")
    return broker
