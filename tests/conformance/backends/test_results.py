"""What Dramatiq expects of a result back end, on each database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.results import ResultFailure, ResultMissing, Results, ResultTimeout

from dramatiq_saga.backends import DatabaseResultBackend
from dramatiq_saga.backends.keys import PURGED_AT_ONCE
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.errors import StoreError
from tests.support.brokers import middleware, working

from .conftest import OpenStore

Backend = DatabaseResultBackend


@pytest.fixture
def backend(new_store: OpenStore) -> Backend:
    return Backend(new_store())


@pytest.fixture
def rival(new_store: OpenStore) -> Backend:
    """Another process's."""
    return Backend(new_store())


def message(name: str = "add") -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name="default", actor_name=name, args=(), kwargs={}, options={})


def rows(backend: Backend) -> int:
    found = backend.store.read(lambda tx: tx.one("SELECT COUNT(*) FROM {results}"))
    assert found is not None
    return int(found[0])


@pytest.mark.parametrize("value", [42, None, "é", [1, {"a": [True]}], "x" * 70_000])
def test_a_result_comes_back_as_it_was_stored(backend: Backend, rival: Backend, value: object) -> None:
    sent = message()
    backend.store_result(sent, value, 60_000)
    assert rival.get_result(sent) == value
    assert rival.get_result(sent, block=True) == value


def test_a_result_is_missing_until_it_is_there_and_once_it_has_expired(backend: Backend, clock: ManualClock) -> None:
    sent = message()
    with pytest.raises(ResultMissing):
        backend.get_result(sent)
    backend.store_result(sent, 1, 1000)
    clock.advance(1)
    with pytest.raises(ResultMissing):
        backend.get_result(sent)


def test_who_blocks_gets_a_result_that_comes_later(backend: Backend, rival: Backend) -> None:
    sent = message()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(backend.get_result, sent, block=True, timeout=30_000)
        rival.store_result(sent, 7, 60_000)
        assert waiting.result(30) == 7


def test_who_blocks_gives_up_in_time(backend: Backend) -> None:
    with pytest.raises(ResultTimeout):
        backend.get_result(message(), block=True, timeout=20)


def test_a_failure_is_raised(backend: Backend) -> None:
    sent = message()
    backend.store_exception(sent, ValueError("no"), 60_000)
    with pytest.raises(ResultFailure, match="no") as caught:
        backend.get_result(sent)
    assert caught.value.orig_exc_type == "ValueError"


def test_a_second_result_of_one_message_replaces_the_first(backend: Backend) -> None:
    sent = message()
    backend.store_result(sent, 1, 1000)
    backend.store_result(sent, 2, 1000)
    backend.store_result(sent, 2, 1000)
    assert backend.get_result(sent) == 2
    assert rows(backend) == 1


def test_namespaces_are_apart_and_long_names_are_taken(backend: Backend) -> None:
    sent = message("a" * 150)
    plain = Backend(backend.store, namespace="n" * 150, use_namespace_prefix_keys=True)
    plain.store_result(sent, "plain", 60_000)
    assert plain.get_result(sent) == "plain"
    with pytest.raises(ResultMissing):
        backend.get_result(sent)


def test_expired_results_are_deleted_in_passing_a_few_at_a_time(backend: Backend, clock: ManualClock) -> None:
    for _ in range(PURGED_AT_ONCE + 1):
        backend.store_result(message(), 1, 1000)
    clock.advance(1)
    backend.store_result(message(), 1, 1000)
    assert rows(backend) == 2
    backend.store_result(message(), 1, 1000)
    assert rows(backend) == 2


def test_blocking_inside_a_transaction_is_refused(backend: Backend) -> None:
    sent = message()
    with backend.store.database.atomic():
        backend.store_result(sent, 3, 60_000)
        assert backend.get_result(sent) == 3
        with pytest.raises(StoreError, match="open transaction"):
            backend.get_result(sent, block=True)


def test_the_results_of_actors(backend: Backend) -> None:
    broker = StubBroker(middleware=middleware())
    broker.add_middleware(Results(backend=backend))

    @dramatiq.actor(broker=broker, store_results=True)
    def double(n: int) -> int:
        return n * 2

    @dramatiq.actor(broker=broker, store_results=True, max_retries=0)
    def fail() -> None:
        raise ValueError("no")

    with working(broker):
        sent = [double.send(n) for n in range(5)]
        assert [one.get_result(backend=backend, block=True) for one in sent] == [0, 2, 4, 6, 8]
        with pytest.raises(ResultFailure):
            fail.send().get_result(backend=backend, block=True)
    broker.close()
