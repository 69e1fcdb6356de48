"""Locks in a real Redis, and what is refused where they are set up (LOCK-1)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from dramatiq.middleware import TimeLimitExceeded

from dramatiq_saga import SagaMiddleware
from dramatiq_saga.errors import MissingExtraError
from dramatiq_saga.locks import RedisLocks
from tests.support.waiting import eventually

HOUR = 3_600_000


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as made:
        yield made


@pytest.fixture
def locks(redis_url: str) -> RedisLocks:
    return RedisLocks(redis_url)


def test_a_key_has_one_holder_until_that_one_gives_it_back(locks: RedisLocks, client: redis.Redis) -> None:
    """LOCK-1: whoever comes second is told who was first; only the holder ends it."""
    assert locks.take("key", "first", ttl_ms=HOUR) == "first"
    assert locks.take("key", "first", ttl_ms=HOUR) == "first"
    assert locks.take("key", "second", ttl_ms=HOUR) == "first"
    assert locks.take("other", "second", ttl_ms=HOUR) == "second"
    assert locks.release("key", "second") is False
    assert client.get("key") == "first"
    assert locks.release("key", "first") is True
    assert locks.release("key", "first") is False
    assert client.get("key") is None


def test_a_lock_dies_with_its_ttl(locks: RedisLocks, client: redis.Redis) -> None:
    """LOCK-1: a holder that never comes back holds nobody up for longer, and what it gives back then is not the next one's."""
    locks.take("key", "first", ttl_ms=HOUR)
    left: Any = client.pttl("key")
    assert 0 < left <= HOUR
    client.pexpire("key", 1)
    eventually(lambda: locks.take("key", "second", ttl_ms=HOUR) == "second")
    assert locks.release("key", "first") is False
    assert client.get("key") == "second"


def test_a_lock_is_taken_over_from_the_holder_that_was_looked_at_and_from_no_other(locks: RedisLocks) -> None:
    """LOCK-1: of two that find the same holder gone, one takes over."""
    locks.take("key", "dead", ttl_ms=HOUR)
    assert locks.take("key", "second", ttl_ms=HOUR, instead_of="dead") == "second"
    assert locks.take("key", "third", ttl_ms=HOUR, instead_of="dead") == "second"
    assert locks.release("key", "dead") is False


def test_of_many_at_once_one_holds(locks: RedisLocks) -> None:
    """LOCK-1: threads share the locks, each with a connection of its own."""
    start, told = threading.Barrier(8), []

    def take(number: int) -> None:
        start.wait()
        told.append(locks.take("key", str(number), ttl_ms=HOUR) == str(number))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [False] * 7 + [True]


@pytest.mark.parametrize("decoding", [False, True])
def test_a_client_of_ones_own_will_do(redis_url: str, decoding: bool) -> None:
    """API: RedisLocks(url_or_client)."""
    with redis.Redis.from_url(redis_url, decode_responses=decoding) as client:
        locks = RedisLocks(client)
        assert locks.take("key", "first", ttl_ms=HOUR) == "first"
        assert locks.take("key", "second", ttl_ms=HOUR) == "first"
        assert locks.release("key", "first") is True


@pytest.mark.parametrize(
    "wrong", [None, 6379, b"redis://localhost", redis.asyncio.Redis(), object()], ids=lambda wrong: type(wrong).__name__
)
def test_what_is_no_address_and_no_client_is_refused(wrong: Any) -> None:
    """API: the message says what will do."""
    with pytest.raises(TypeError, match=r"redis://localhost:6379/0', or a redis\.Redis, not"):
        RedisLocks(wrong)


def test_an_address_that_is_none_is_refused_at_once() -> None:
    """API: by the package that reads it."""
    with pytest.raises(ValueError, match="redis://"):
        RedisLocks("localhost:6379")


@pytest.mark.claims_alone
def test_the_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """API: Redis is an extra."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"PATH-OF-THE-CHECKOUT\[redis\]"):
        RedisLocks("redis://localhost")


@pytest.mark.parametrize("wrong", ["redis://localhost:6379/0", True, RedisLocks])
def test_locks_that_are_none_are_refused_by_the_middleware(wrong: Any) -> None:
    """API: an address instead of RedisLocks(address), most of all."""
    if wrong is RedisLocks:
        assert SagaMiddleware(locks=RedisLocks("redis://localhost")).broker is None
        return
    with pytest.raises(TypeError, match=r"locks=RedisLocks\('redis://localhost:6379/0'\), not"):
        SagaMiddleware(locks=wrong)


def test_nothing_is_opened_before_the_first_lock() -> None:
    """API: a set-up module is imported by commands that take no lock, too; a server that is away is told by the lock."""
    locks = RedisLocks("redis://127.0.0.1:1/0")
    with pytest.raises(redis.ConnectionError):
        locks.take("key", "first", ttl_ms=HOUR)


def test_a_connection_that_the_server_has_closed_is_made_anew(locks: RedisLocks, client: redis.Redis) -> None:
    """LOCK-1: an idle worker's, for example: its next lock is not lost for it."""
    locks.take("key", "first", ttl_ms=HOUR)
    own = client.client_id()
    for other in client.client_list():
        if int(other["id"]) != own and other["db"] == str(client.connection_pool.connection_kwargs["db"]):
            client.client_kill_filter(_id=other["id"])
    assert locks.release("key", "first") is True


def test_a_forked_child_uses_no_connection_of_its_parent(locks: RedisLocks) -> None:
    """Dramatiq forks its workers: two processes on one socket would read each other's answers."""
    locks.take("key", "parent", ttl_ms=HOUR)
    parent = locks._line.client
    child = os.fork()
    if child == 0:
        code = 1
        try:
            told = locks.take("key", "child", ttl_ms=HOUR)
            code = 0 if told == "parent" and locks._line.client is not parent else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.release("key", "parent") is True


def interrupted(call: Callable[[], Any], at: int) -> tuple[bool, int]:
    """``call()`` with an interrupt at the place numbered ``at``: whether it was interrupted, and how many places there were."""
    seen = 0

    def place(frame: Any, event: str, _: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code is not interrupted.__code__:
            seen += 1
            if seen == at:
                raise TimeLimitExceeded

    sys.setprofile(place)
    try:
        call()
    except TimeLimitExceeded:
        return True, seen
    finally:
        sys.setprofile(None)
    return False, seen


def test_an_interrupt_leaves_no_answer_for_somebody_else(locks: RedisLocks) -> None:
    """LOCK-1, FENCE-5: between a command and its answer too; whoever asks next is told about what it has asked."""
    locks.take("held", "somebody", ttl_ms=HOUR)
    locks.take("warm", "up", ttl_ms=HOUR)
    _, places = interrupted(lambda: locks.take("key", "mine", ttl_ms=HOUR), -1)
    assert places > 30
    hits = 0
    for place in range(1, places + 1, 3):
        was, _ = interrupted(lambda: locks.take("key", "mine", ttl_ms=HOUR), place)
        assert locks.take("held", "other", ttl_ms=HOUR) == "somebody", place
        assert locks.release("held", "other") is False, place
        assert locks.release("warm", "up") is True, place
        assert locks.take("warm", "up", ttl_ms=HOUR) == "up", place
        assert locks.take("key", "mine", ttl_ms=HOUR) == "mine", place
        hits += was
    assert hits > 30  # fewer than there are places: on a connection that stands already, the way is shorter
