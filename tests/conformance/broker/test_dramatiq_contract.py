"""What Dramatiq promises about any broker, on ours and on its own: the same tests on all of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import ActorNotFound, QueueJoinTimeout, Retry

from tests.support.brokers import Brokers, recording, working
from tests.support.waiting import eventually


def test_a_message_arrives_with_its_arguments(any_broker: Any) -> None:
    got: list[Any] = []

    @dramatiq.actor(broker=any_broker)
    def receive(*args: Any, **kwargs: Any) -> None:
        got.append((args, kwargs))

    receive.send(1, "zwei", [3.5, None], deep={"er": True})
    with working(any_broker):
        any_broker.join("default")
        assert got == [((1, "zwei", [3.5, None]), {"deep": {"er": True}})]


def test_the_same_message_sent_twice_arrives_twice(any_broker: Any) -> None:
    """A message id is no key: a retried message keeps its own, and an application may send one twice."""
    actor, seen = recording(any_broker)
    message = actor.message("again")
    any_broker.enqueue(message)
    any_broker.enqueue(message)
    with working(any_broker):
        eventually(lambda: seen == ["again", "again"])


def test_a_delayed_message_arrives_not_before_its_time(any_broker: Any) -> None:
    at: list[float] = []

    @dramatiq.actor(broker=any_broker)
    def note() -> None:
        at.append(time.monotonic())

    sent = time.monotonic()
    note.send_with_options(delay=400)
    with working(any_broker):
        eventually(lambda: at)
    assert at[0] - sent >= 0.4


def test_a_failing_message_is_tried_again_until_it_succeeds(any_broker: Any) -> None:
    tries: list[int] = []

    @dramatiq.actor(broker=any_broker, max_retries=5, min_backoff=1, max_backoff=5)
    def flaky() -> None:
        tries.append(len(tries))
        if len(tries) < 4:
            raise ValueError("not yet")

    flaky.send()
    with working(any_broker):
        eventually(lambda: len(tries) == 4)
        any_broker.join("default", timeout=5000)
    assert len(tries) == 4


def test_a_retry_without_delay_runs_as_often_as_it_should(any_broker: Any) -> None:
    """A retry keeps its message id; the acknowledgement of one try must not close the next."""
    tries: list[int] = []

    @dramatiq.actor(broker=any_broker, max_retries=5)
    def again() -> None:
        tries.append(len(tries))
        raise Retry(delay=0)

    again.send()
    with working(any_broker):
        eventually(lambda: len(tries) == 6)
        any_broker.join("default", timeout=5000)
    assert len(tries) == 6


def test_each_message_of_a_pipeline_gets_the_result_before(any_broker: Any) -> None:
    got: list[int] = []

    @dramatiq.actor(broker=any_broker)
    def double(x: int) -> int:
        got.append(x)
        return 2 * x

    dramatiq.pipeline([double.message(1), double.message(), double.message()]).run()
    with working(any_broker):
        eventually(lambda: len(got) == 3)
    assert got == [1, 2, 4]


def test_a_callback_follows_success(any_broker: Any) -> None:
    seen: list[Any] = []

    @dramatiq.actor(broker=any_broker)
    def note(message: dict[str, Any], result: int) -> None:
        seen.append((message["actor_name"], result))

    @dramatiq.actor(broker=any_broker)
    def succeed() -> int:
        return 7

    succeed.send_with_options(on_success=note)
    with working(any_broker):
        eventually(lambda: seen == [("succeed", 7)])


def test_a_message_for_an_unknown_actor_harms_no_other(any_broker: Any) -> None:
    actor, seen = recording(any_broker)
    stranger = dramatiq.Message(queue_name="default", actor_name="stranger", args=(), kwargs={}, options={})
    any_broker.enqueue(stranger)
    actor.send("known")
    with working(any_broker):
        eventually(lambda: seen == ["known"])
        any_broker.join("default", timeout=5000)
    with pytest.raises(ActorNotFound):
        any_broker.get_actor("stranger")


def test_a_worker_takes_only_the_queues_that_it_was_given(any_broker: Any) -> None:
    wanted, wanted_seen = recording(any_broker, "wanted", queue_name="wanted")
    other, other_seen = recording(any_broker, "other", queue_name="other")
    other.send(1)
    wanted.send(1)
    with working(any_broker, queues={"wanted"}):
        any_broker.join("wanted", timeout=10_000)
    assert (wanted_seen, other_seen) == ([1], [])
    with working(any_broker, queues={"other"}):
        any_broker.join("other", timeout=10_000)
    assert other_seen == [1]


def test_a_queue_is_declared_once_however_often_it_is_asked_for(any_broker: Any) -> None:
    told: list[str] = []

    class Listener(dramatiq.Middleware):
        def after_declare_queue(self, broker: Any, queue_name: str) -> None:
            told.append(queue_name)

    any_broker.add_middleware(Listener())
    any_broker.declare_queue("fresh")
    any_broker.declare_queue("fresh")
    assert told == ["fresh"]
    assert "fresh" in any_broker.get_declared_queues()


def test_joining_a_queue_that_is_not_emptied_times_out(any_broker: Any) -> None:
    actor, _ = recording(any_broker)
    actor.send()
    with pytest.raises(QueueJoinTimeout):
        any_broker.join("default", timeout=100)


def test_flushed_messages_never_arrive(any_broker: Any) -> None:
    actor, seen = recording(any_broker)
    for number in range(5):
        actor.send(number)
    any_broker.flush("default")
    actor.send("after")
    with working(any_broker):
        eventually(lambda: seen == ["after"])
        any_broker.join("default", timeout=5000)
    any_broker.flush_all()
    assert seen == ["after"]


def test_a_worker_that_stops_gives_back_what_it_has_not_started(any_brokers: Brokers) -> None:
    """QUEUE-7"""
    broker = any_brokers()
    started, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    @dramatiq.actor(broker=broker)
    def slow(number: int) -> None:
        ran.append(number)
        started.set()
        go_on.wait(20)

    for number in range(6):
        slow.send(number)
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    assert started.wait(20)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    eventually(lambda: not worker.workers[0].running)
    go_on.set()
    stopping.join(20)
    assert len(ran) < 6
    with working(broker, threads=1):
        broker.join("default", timeout=10_000)
    assert sorted(ran) == [0, 1, 2, 3, 4, 5]


def test_a_paused_worker_takes_nothing_until_it_goes_on(any_broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.05)
    actor, seen = recording(any_broker)
    with working(any_broker, threads=1, worker_timeout=50) as worker:
        worker.pause()
        actor.send("later")
        assert seen == []
        worker.resume()
        eventually(lambda: seen == ["later"])
