"""What Dramatiq expects of a rate-limiter back end, on each database, and who loses where two want the same place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from dramatiq.rate_limits import Barrier, BucketRateLimiter, ConcurrentRateLimiter, RateLimitExceeded, WindowRateLimiter

from dramatiq_saga.backends import DatabaseRateLimiterBackend
from dramatiq_saga.backends.keys import DIGEST_MARK, LONGEST_KEY, PURGED_AT_ONCE, row_id
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.errors import StoreError
from dramatiq_saga.store.database import Store

from .conftest import OpenStore

Backend = DatabaseRateLimiterBackend


@pytest.fixture
def backend(new_store: OpenStore) -> Backend:
    return Backend(new_store())


@pytest.fixture
def rival(new_store: OpenStore) -> Backend:
    """Another process's."""
    return Backend(new_store())


def value_of(backend: Backend, key: str) -> int | None:
    row = backend.store.read(lambda tx: tx.one("SELECT value FROM {rate_limits} WHERE id = ?", (row_id(key),)))
    return None if row is None else int(row[0])


def keys_of(backend: Backend) -> set[str]:
    return {str(key) for (key,) in backend.store.read(lambda tx: tx.all("SELECT id FROM {rate_limits}"))}


@contextlib.contextmanager
def uncommitted(store: Store, change: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """``change`` has been made in a transaction of ``store`` that is still open; what is yielded commits it."""
    changed, commit = threading.Event(), threading.Event()

    def operation(_tx: object) -> None:
        change()
        changed.set()
        assert commit.wait(30)

    with ThreadPoolExecutor(1) as pool:
        future: Future[None] = pool.submit(store.write, operation)
        try:
            assert changed.wait(30)
            yield commit.set
        finally:
            commit.set()
            future.result(30)


# --- the contract ----------------------------------------------------------------------------------------------------


def test_a_key_is_added_once_until_it_has_expired(backend: Backend, clock: ManualClock) -> None:
    assert backend.add("key", 3, 1000)
    assert not backend.add("key", 5, 1000)
    assert value_of(backend, "key") == 3
    clock.advance(1)
    assert backend.add("key", 7, 1000)
    assert value_of(backend, "key") == 7


def test_a_key_is_raised_up_to_its_maximum_and_lowered_to_its_minimum(backend: Backend) -> None:
    assert [backend.incr("key", 1, 2, 1000) for _ in range(3)] == [True, True, False]
    assert value_of(backend, "key") == 2
    assert [backend.decr("key", 1, 1, 1000) for _ in range(2)] == [True, False]
    assert value_of(backend, "key") == 1


def test_an_absent_key_counts_as_zero(backend: Backend) -> None:
    assert not backend.incr("key", 3, 2, 1000)
    assert not backend.decr("key", 1, 0, 1000)
    assert value_of(backend, "key") is None
    assert backend.decr("key", 1, -1, 1000)
    assert value_of(backend, "key") == -1


def test_an_expired_key_counts_as_zero(backend: Backend, clock: ManualClock) -> None:
    assert backend.add("key", 5, 1000)
    clock.advance(1)
    assert not backend.decr("key", 1, 1, 1000)
    assert not backend.incr("key", 4, 3, 1000)
    assert backend.incr("key", 2, 3, 1000)
    assert value_of(backend, "key") == 2


def test_a_change_renews_a_key_and_a_refusal_does_not(backend: Backend, clock: ManualClock) -> None:
    backend.add("key", 1, 1000)
    clock.advance(0.6)
    assert backend.incr("key", 1, 2, 1000)
    clock.advance(0.6)
    assert not backend.incr("key", 1, 2, 1000)
    assert not backend.add("key", 1, 1000)
    clock.advance(0.4)
    assert backend.add("key", 1, 1000)


def test_a_sum_stays_within_its_maximum(backend: Backend, clock: ManualClock) -> None:
    def take(second: int) -> bool:
        return backend.incr_and_sum(f"w@{second}", lambda: [f"w@{second - n}" for n in range(3)], 1, 2, 3000)

    assert [take(10), take(11), take(11)] == [True, True, False]
    assert not take(12)
    assert take(13)  # the tenth second is none of its keys
    clock.advance(3)
    assert [take(13), take(13), take(13)] == [True, True, False]


def test_a_sum_reaches_over_more_keys_than_one_statement_names(backend: Backend) -> None:
    keys = [f"w@{n}" for n in range(600)]
    for key in (keys[0], keys[8], keys[599]):
        assert backend.add(key, 1, 1000)
    assert not backend.incr_and_sum("w@1", lambda: keys, 1, 3, 1000)
    assert backend.incr_and_sum("w@1", lambda: keys, 1, 4, 1000)


def test_a_mutex_is_taken_once_and_given_back(backend: Backend, rival: Backend) -> None:
    mine, theirs = (ConcurrentRateLimiter(one, "mutex", limit=1) for one in (backend, rival))
    with mine.acquire():
        with pytest.raises(RateLimitExceeded), theirs.acquire():
            pass
        with theirs.acquire(raise_on_failure=False) as acquired:
            assert not acquired
    with theirs.acquire():
        pass


def test_a_bucket_lets_so_many_through(backend: Backend) -> None:
    limiter = BucketRateLimiter(backend, "bucket", limit=2, bucket=3_600_000)
    limiter._acquire()  # whatever the hour, the three that follow fall into at most two buckets
    taken = 0
    for _ in range(5):
        with limiter.acquire(raise_on_failure=False) as acquired:
            taken += bool(acquired)
    assert taken in (1, 2, 3)
    assert all(value <= 2 for value in (value_of(backend, key) or 0 for key in keys_of(backend)))


def test_a_window_lets_so_many_through(backend: Backend) -> None:
    limiter = WindowRateLimiter(backend, "window", limit=2, window=3600)
    taken = 0
    for _ in range(4):
        with limiter.acquire(raise_on_failure=False) as acquired:
            taken += bool(acquired)
    assert taken == 2


def test_a_barrier_is_created_once_and_reached_by_the_last(backend: Backend, rival: Backend) -> None:
    mine, theirs = (Barrier(one, "barrier", ttl=30_000) for one in (backend, rival))
    assert mine.create(parties=3)
    assert not theirs.create(parties=3)
    assert [mine.wait(block=False), theirs.wait(block=False), mine.wait(block=False)] == [False, False, True]


def test_a_party_that_blocks_goes_on_when_the_last_has_come(backend: Backend, rival: Backend) -> None:
    mine, theirs = (Barrier(one, "barrier", ttl=30_000) for one in (backend, rival))
    mine.create(parties=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.wait, timeout=30_000)
        # who blocks, and who is the last: either may be first here, and both come through
        assert theirs.wait(timeout=30_000)
        assert waiting.result(30)


def test_a_party_that_blocks_gives_up_in_time(backend: Backend) -> None:
    barrier = Barrier(backend, "barrier", ttl=30_000)
    barrier.create(parties=2)
    assert not barrier.wait(timeout=20)


def test_a_notification_stays_for_its_time(backend: Backend, rival: Backend, clock: ManualClock) -> None:
    backend.wait_notify("event", 1000)
    backend.wait_notify("event", 1000)
    assert rival.wait("event", 0)
    assert rival.wait("event", None)
    clock.advance(1)
    assert not rival.wait("event", 0)


def test_a_lost_barrier_reads_as_reached_as_on_redis(backend: Backend, clock: ManualClock) -> None:
    """C17: so nothing of the engine may rest on one."""
    barrier = Barrier(backend, "barrier", ttl=1000)
    barrier.create(parties=3)
    clock.advance(1)
    assert barrier.wait(block=False)


# --- races -----------------------------------------------------------------------------------------------------------


def test_two_who_add_one_key_do_not_both_succeed(backend: Backend, rival: Backend) -> None:
    with ThreadPoolExecutor(1) as pool, uncommitted(backend.store, lambda: backend.add("key", 1, 1000)) as commit:
        second = pool.submit(rival.add, "key", 1, 1000)
        commit()
        assert not second.result(30)


@pytest.mark.parametrize("there", [True, False], ids=["there", "absent"])
def test_two_who_take_the_last_place_do_not_both_get_it(backend: Backend, rival: Backend, there: bool) -> None:
    if there:
        backend.add("key", 1, 1000)
    limit = 2 if there else 1
    with ThreadPoolExecutor(1) as pool, uncommitted(backend.store, lambda: backend.incr("key", 1, limit, 1000)) as commit:
        second = pool.submit(rival.incr, "key", 1, limit, 1000)
        commit()
        assert not second.result(30)
    assert value_of(backend, "key") == limit


def test_a_key_that_expired_is_taken_over_by_one(backend: Backend, rival: Backend, clock: ManualClock) -> None:
    backend.add("key", 1, 1000)
    clock.advance(1)
    with ThreadPoolExecutor(1) as pool, uncommitted(backend.store, lambda: backend.add("key", 5, 1000)) as commit:
        second = pool.submit(rival.add, "key", 6, 1000)
        commit()
        assert not second.result(30)
    assert value_of(backend, "key") == 5


def test_a_window_never_takes_in_more_than_its_limit(backend: Backend, rival: Backend) -> None:
    """The two are in neighbouring seconds, so they change different rows."""
    keys = ["w@1", "w@2"]
    with (
        ThreadPoolExecutor(1) as pool,
        uncommitted(backend.store, lambda: backend.incr_and_sum("w@1", lambda: keys, 1, 1, 1000)) as commit,
    ):
        second = pool.submit(rival.incr_and_sum, "w@2", lambda: keys, 1, 1, 1000)
        commit()
        assert not second.result(30)


def test_two_parties_do_not_both_miss_that_they_are_the_last(backend: Backend, rival: Backend) -> None:
    mine, theirs = (Barrier(one, "barrier", ttl=30_000) for one in (backend, rival))
    mine.create(parties=2)
    with ThreadPoolExecutor(1) as pool, uncommitted(backend.store, lambda: mine.wait(block=False)) as commit:
        second = pool.submit(theirs.wait, block=False)
        commit()
        assert second.result(30)


def test_many_at_once_get_as_many_places_as_there_are(backend: Backend, rival: Backend) -> None:
    start = threading.Barrier(8)

    def take(number: int) -> int:
        start.wait(30)
        mine = backend if number % 2 else rival
        return sum(mine.add("key", 1, 60_000) or mine.incr("key", 1, 10, 60_000) for _ in range(4))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 10


# --- what has expired ------------------------------------------------------------------------------------------------


def test_expired_keys_are_deleted_in_passing_a_few_at_a_time(backend: Backend, clock: ManualClock) -> None:
    old = {f"old-{n}" for n in range(PURGED_AT_ONCE + 1)}
    for key in old:
        backend.add(key, 1, 1000)
    clock.advance(1)
    backend.add("new", 1, 1000)
    assert len(keys_of(backend) & old) == 1
    backend.incr("other", 1, 1, 1000)
    assert keys_of(backend) == {"new", "other"}


def test_a_key_that_is_renewed_is_not_deleted_in_passing(backend: Backend, rival: Backend, clock: ManualClock) -> None:
    backend.add("key", 1, 1000)
    clock.advance(1)
    with ThreadPoolExecutor(1) as pool, uncommitted(backend.store, lambda: backend.add("key", 2, 1000)) as commit:
        passing = pool.submit(rival.add, "other", 1, 1000)
        commit()
        assert passing.result(30)
    assert value_of(backend, "key") == 2


# --- keys and places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [("k" * 400 + "a", "k" * 400 + "b"), ("key", "key "), ("key", "KEY"), ("a\0b", "a\0c"), ("\ud800", "\ud801"), ("é", "e")],
)
def test_keys_that_differ_are_kept_apart(backend: Backend, one: str, other: str) -> None:
    assert backend.add(one, 1, 1000)
    assert backend.add(other, 2, 1000)
    assert (value_of(backend, one), value_of(backend, other)) == (1, 2)


def test_a_key_that_looks_like_a_digest_is_no_other_keys() -> None:
    long = "k" * (LONGEST_KEY + 1)
    assert row_id(long).startswith(DIGEST_MARK)
    assert row_id(row_id(long)) != row_id(long)
    assert row_id("plain@1700000000") == "plain@1700000000"


def test_a_change_inside_a_host_transaction_vanishes_with_it(backend: Backend) -> None:
    backend.add("key", 1, 60_000)
    database = backend.store.database
    with pytest.raises(ZeroDivisionError), database.atomic():
        assert backend.incr("key", 1, 2, 60_000)
        raise ZeroDivisionError
    assert value_of(backend, "key") == 1


def test_waiting_inside_a_transaction_is_refused(backend: Backend) -> None:
    with backend.store.database.atomic(), pytest.raises(StoreError, match="open transaction"):
        backend.wait("key", 1000)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_backend_opens_a_url_and_a_database_by_itself(new_store: OpenStore, database_url: str, table_prefix: str) -> None:
    store = new_store()
    by_url = Backend(database_url, prefix=table_prefix)
    by_database = Backend(store.database, prefix=table_prefix)
    try:
        assert by_url.add("key", 1, 60_000)
        assert value_of(by_database, "key") == 1
    finally:
        by_url.store.close()
        by_database.store.close()
