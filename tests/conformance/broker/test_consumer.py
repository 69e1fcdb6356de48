"""The waiting side: what a consumer notices, when, and what it never does (QUEUE-1, -3, -7)."""

from __future__ import annotations

import threading
from typing import Any

import dramatiq
import pytest

from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.clock import SystemClock
from dramatiq_saga.errors import SettingsError
from tests.support.brokers import Brokers, recording, rows, take, working
from tests.support.waiting import eventually


def message(value: Any = None, **options: Any) -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name="default", actor_name="record", args=(value,), kwargs={}, options=options)


class Waiting(threading.Thread):
    """Stands in ``next(consumer)`` until something is delivered."""

    def __init__(self, consumer: Any) -> None:
        super().__init__(daemon=True)
        self.consumer = consumer
        self.got: list[Any] = []
        self.start()

    def run(self) -> None:
        self.got.append(next(self.consumer))

    def result(self) -> Any:
        self.join(20)
        assert self.got, "still waiting"
        return self.got[0]


def asleep(consumer: Any) -> None:
    """Returns once the consumer has looked, found nothing, and waits."""
    eventually(lambda: consumer._wake._cond._waiters, because="the consumer waits")


@pytest.fixture
def live(brokers: Brokers) -> Any:
    """A broker on the real clock whose helper threads never poll by themselves."""
    broker = brokers(poll_interval=30)
    broker.declare_queue("default")
    broker.join("default")
    return broker


def test_a_message_sent_in_this_process_wakes_the_consumer(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq_saga.brokers.database.LOOK_ANYWAY", 30.0)
    consumer = live.consume("default", timeout=30_000)
    waiting = Waiting(consumer)
    asleep(consumer)
    live.enqueue(message("hello"))
    assert waiting.result().args[0] == "hello"


def test_a_message_staged_by_an_engine_and_announced_wakes_the_consumer(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq_saga.brokers.database.LOOK_ANYWAY", 30.0)
    consumer = live.consume("default", timeout=30_000)
    waiting = Waiting(consumer)
    asleep(consumer)
    prepared = live.prepare(message("hello"))
    live.store.write(lambda tx: live.stage(tx, prepared))
    live.announce([prepared])
    assert waiting.result().args[0] == "hello"


def test_a_due_time_is_kept_to_the_millisecond(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """QUEUE-1: the consumer sleeps until the next due row, not until the next poll."""
    monkeypatch.setattr("dramatiq_saga.brokers.database.LOOK_ANYWAY", 30.0)
    consumer = live.consume("default", timeout=30_000)
    waiting = Waiting(consumer)
    asleep(consumer)
    live.enqueue(message("hello"), delay=300)
    due = rows(live)[0]["available_at"]
    assert waiting.result().args[0] == "hello"
    assert rows(live)[0]["reserved_at"] >= due


def test_a_due_row_that_was_there_before_the_consumer_is_not_missed(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq_saga.brokers.consumer.LOOK_ANYWAY", 30.0)
    monkeypatch.setattr("dramatiq_saga.brokers.database.LOOK_ANYWAY", 30.0)
    live.enqueue(message("hello"), delay=300)
    assert Waiting(live.consume("default", timeout=60_000)).result().args[0] == "hello"


def test_an_acknowledgement_that_frees_a_slot_wakes_the_consumer(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq_saga.brokers.consumer.LOOK_ANYWAY", 30.0)
    for number in range(2):
        live.enqueue(message(number))
    consumer = live.consume("default", prefetch=1, timeout=30_000)
    first = take(consumer)
    waiting = Waiting(consumer)
    asleep(consumer)
    consumer.ack(first)
    assert waiting.result().args[0] == 1


def test_a_single_slot_among_many_is_used_where_the_others_stay_taken(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """QUEUE-1: slots are filled by the third, but a thread that is free beside long bodies is not left without work."""
    monkeypatch.setattr("dramatiq_saga.brokers.consumer.LOOK_ANYWAY", 0.2)
    consumer = live.consume("default", prefetch=6, timeout=200)
    for number in range(7):
        live.enqueue(message(number))
    bodies = [take(consumer) for _ in range(6)]
    assert next(consumer) is None  # no slot is free
    consumer.ack(bodies[0])
    found = eventually(lambda: next(consumer), because="the seventh message takes the only free slot")
    assert found.args[0] == 6


def test_a_message_that_arrives_during_a_reservation_is_not_forgotten(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reservation has looked already and found nothing; what is committed now must be looked for again."""
    monkeypatch.setattr("dramatiq_saga.brokers.consumer.LOOK_ANYWAY", 30.0)
    monkeypatch.setattr("dramatiq_saga.brokers.database.LOOK_ANYWAY", 30.0)
    monkeypatch.setattr(live.here, "_bell", None)  # it would mend what is checked here
    consumer = live.consume("default", timeout=60_000)
    consumer._changed = False
    real = live.reserve

    def reserve(queue: str, limit: int) -> Any:
        found = real(queue, limit)
        monkeypatch.setattr(live, "reserve", real)
        live.enqueue(message("meanwhile"))
        return found

    monkeypatch.setattr(live, "reserve", reserve)
    assert Waiting(consumer).result().args[0] == "meanwhile"


def test_a_consumer_that_is_closed_stops_waiting(live: Any) -> None:
    consumer = live.consume("default", timeout=60_000)
    waiting = Waiting(consumer)
    asleep(consumer)
    consumer.close()
    assert waiting.result() is None


def test_nothing_is_reserved_while_every_worker_shuts_down(live: Any) -> None:
    """QUEUE-7: nobody would start it."""
    worker = dramatiq.Worker(live)
    live.emit_before("worker_boot", worker)
    consumer = live.consume("default", timeout=100)
    live.emit_before("worker_shutdown", worker)
    live.enqueue(message("x"))
    assert next(consumer) is None
    live.emit_after("worker_shutdown", worker)
    assert take(consumer).args[0] == "x"


def test_a_worker_can_be_started_again_on_the_same_broker(live: Any) -> None:
    actor, seen = recording(live)
    for number in range(3):
        actor.send(number)
        with working(live):
            eventually(lambda number=number: number in seen)
    assert seen == [0, 1, 2]


def test_a_broker_can_be_used_again_after_it_was_closed(live: Any) -> None:
    actor, seen = recording(live)
    live.close()
    actor.send(1)
    with working(live):
        eventually(lambda: seen == [1])
    live.close()


def test_leases_are_extended_again_after_the_broker_was_closed_and_used_again(brokers: Brokers) -> None:
    broker = brokers(retry_after=0.4)
    broker.declare_queue("default")
    broker.consume("default").close()
    broker.close()
    broker.enqueue(message("x"))
    take(broker.consume("default", timeout=20_000))
    first = rows(broker)[0]["lease_until"]
    eventually(lambda: rows(broker)[0]["lease_until"] > first + 300)


def test_a_message_can_be_acknowledged_after_its_broker_was_closed(live: Any) -> None:
    """A worker thread that outlived the shutdown finishes its work."""
    live.enqueue(message("x"))
    consumer = live.consume("default", timeout=20_000)
    proxy = take(consumer)
    consumer.close()
    live.close()
    consumer.ack(proxy)
    assert rows(live) == []


def test_a_consumer_never_raises_for_what_it_cannot_see(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails is followed by a reservation, which knows what to do about the trouble."""
    live.enqueue(message("x"))
    consumer = live.consume("default", timeout=20_000)
    consumer._arrived = False

    def broken(operation: Any) -> Any:
        raise RuntimeError("no view today")

    monkeypatch.setattr(live.store, "read", broken)
    assert take(consumer).args[0] == "x"


def test_an_idle_consumer_of_a_server_looks_less_and_less_often() -> None:
    class Server:
        polls = True
        poll_interval = 0.01

    pauses = [DatabaseBroker.idle_pause(Server(), fruitless) for fruitless in range(8)]  # type: ignore[arg-type]
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25, 0.25]


def test_the_sqlite_broker_refuses_another_database() -> None:
    with pytest.raises(SettingsError) as refused:
        SQLiteBroker("postgresql://root@127.0.0.1/test")
    assert refused.value.key == "database"


def test_nothing_is_opened_before_the_first_use(tmp_path: Any) -> None:
    before = threading.active_count()
    SQLiteBroker(tmp_path / "q.db").declare_queue("default")
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


def test_a_process_that_only_sends_has_no_helper_threads(tmp_path: Any) -> None:
    broker = SQLiteBroker(tmp_path / "q.db")
    broker.declare_queue("default")
    broker.enqueue(message("x"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("saga-leases", "saga-watcher"))]
    broker.close()


def test_a_database_broker_on_sqlite_works_without_guards(tmp_path: Any) -> None:
    broker = DatabaseBroker(tmp_path / "q.db", clock=SystemClock())
    actor, seen = recording(broker)
    actor.send(1)
    with working(broker):
        eventually(lambda: seen == [1])
    broker.close()


def test_a_memory_database_serves_one_process(tmp_path: Any) -> None:
    broker = SQLiteBroker(":memory:")
    actor, seen = recording(broker)
    with working(broker):
        actor.send(1)
        actor.send_with_options(args=(2,), delay=50)
        eventually(lambda: seen == [1, 2])
        broker.join("default", timeout=5000)
    broker.close()
