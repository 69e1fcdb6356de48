"""The queue's own promises (QUEUE-1, -2, -5, -6, -7), on every database, consumers driven by hand on a manual clock."""

from __future__ import annotations

import json
import threading
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import QueueNotFound
from dramatiq.middleware import SkipMessage

from dramatiq_saga.brokers import Reservation, reservations
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.errors import StoreError
from tests.support.bench import Background
from tests.support.brokers import Brokers, recording, row, rows, sql, take, take_all
from tests.support.stores import all_waiting

READY, DELAYED, RESERVED, DEAD = 0, 1, 2, 3


def message(value: Any = None, *, actor: str = "record", queue: str = "default", **options: Any) -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name=queue, actor_name=actor, args=(value,), kwargs={}, options=options)


def consume(broker: Any, prefetch: int = 1, queue: str = "default") -> Any:
    return broker.consume(queue, prefetch=prefetch, timeout=20)


# --- order, room, delay ----------------------------------------------------------------------------------------------


def test_the_urgent_come_first_then_the_old_then_the_lower_id(broker: Any, clock: ManualClock) -> None:
    """QUEUE-1. RETURNING promises no order, so a batch is sorted."""
    for name, priority in (("b", 5), ("a", 1), ("c", 5)):
        broker.enqueue(message(name, priority=priority))
    clock.advance(-1)
    broker.enqueue(message("older than b", priority=5))
    clock.advance(1)
    broker.enqueue(message("most urgent", priority=0))
    assert [proxy.args[0] for proxy in take_all(consume(broker, 8))] == ["most urgent", "a", "older than b", "b", "c"]


def test_an_actors_priority_counts_unless_the_message_has_its_own(broker: Any) -> None:
    late, _ = recording(broker, "late", priority=100)
    early, _ = recording(broker, "early", priority=1)
    late.send(1)
    early.send(2)
    late.send_with_options(args=(3,), priority=0)
    assert [proxy.args[0] for proxy in take_all(consume(broker, 8))] == [3, 2, 1]


def test_no_more_is_reserved_than_was_asked_for(broker: Any) -> None:
    """QUEUE-1: together up to the free prefetch; what is running counts."""
    for number in range(7):
        broker.enqueue(message(number))
    consumer = consume(broker, 3)
    first = take_all(consumer)
    assert [proxy.args[0] for proxy in first] == [0, 1, 2]
    assert [one["state"] for one in rows(broker)] == [RESERVED] * 3 + [READY] * 4
    consumer.ack(first[1])
    assert [proxy.args[0] for proxy in take_all(consumer)] == [3]


def test_a_delayed_message_stays_in_the_table_until_it_is_due(broker: Any, clock: ManualClock) -> None:
    """QUEUE-1: nothing is held in memory for its ETA."""
    broker.enqueue(message("later"), delay=5000)
    consumer = consume(broker, 4)
    assert take_all(consumer) == []
    assert (row(broker)["state"], row(broker)["available_at"]) == (DELAYED, clock.now() + 5000)
    clock.advance(4.999)
    assert take_all(consumer) == []
    clock.advance(0.001)
    proxy = take(consumer)
    assert proxy.args[0] == "later"
    assert "eta" not in proxy.options, "a worker would hold it in memory"
    assert broker.get_declared_delay_queues() == set()


def test_a_message_may_bring_its_own_time(broker: Any, clock: ManualClock) -> None:
    broker.enqueue(message("eta", eta=clock.now() + 1000))
    broker.enqueue(message("past", eta=clock.now() - 1000))
    broker.enqueue(message("nothing", eta=None))
    broker.enqueue(message("option", delay=2000))
    assert [one["state"] for one in rows(broker)] == [DELAYED, READY, READY, DELAYED]
    consumer = consume(broker, 8)
    assert [proxy.args[0] for proxy in take_all(consumer)] == ["past", "nothing"]
    clock.advance(1)
    assert [proxy.args[0] for proxy in take_all(consumer)] == ["eta"]
    clock.advance(1)
    assert [proxy.args[0] for proxy in take_all(consumer)] == ["option"]


def test_a_row_that_carries_an_eta_is_delivered_without_it(broker: Any) -> None:
    """Somebody else's row: the worker would hold the message in its memory, and the lease would be extended meanwhile."""
    broker.enqueue(message("x"))
    sql(broker, "UPDATE {messages} SET message = ?", as_json(options={"eta": 1 << 60}))
    assert take(consume(broker)).options == {}


def test_hooks_see_when_a_delayed_message_is_due(broker: Any, clock: ManualClock) -> None:
    told: list[Any] = []

    class Listener(dramatiq.Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            told.append(("before", message.options.get("eta"), delay))
            message.options["trace"] = "abc"

        def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            told.append(("after", message.options.get("eta"), delay))

    broker.add_middleware(Listener())
    returned = broker.enqueue(message("x"), delay=10)
    due = clock.now() + 10
    assert told == [("before", due, 10), ("after", due, 10)]
    assert returned.options["eta"] == due
    assert json.loads(bytes(row(broker)["message"]))["options"] == {"trace": "abc"}


def test_an_urgent_message_that_comes_due_behind_many_is_not_passed_by(broker: Any, clock: ManualClock) -> None:
    for number in range(20):
        broker.enqueue(message(number, priority=9), delay=1000 + number)
    broker.enqueue(message("urgent", priority=0), delay=2000)
    clock.advance(5)
    assert take(consume(broker, 1)).args[0] == "urgent"


def test_a_row_that_is_due_exists_once(broker: Any, clock: ManualClock) -> None:
    """C02: there is no copy that could survive beside its original."""
    broker.enqueue(message("once"), delay=10)
    before = row(broker)["id"]
    clock.advance(1)
    first, second = consume(broker, 4), consume(broker, 4)
    proxy = take(first)
    assert take_all(second) == []
    assert row(broker)["id"] == before
    first.ack(proxy)
    assert rows(broker) == []


def test_undeclared_queues_are_refused(broker: Any) -> None:
    with pytest.raises(QueueNotFound):
        broker.enqueue(message(queue="nowhere"))
    with pytest.raises(QueueNotFound):
        broker.consume("nowhere")
    with pytest.raises(QueueNotFound):
        broker.join("nowhere")


# --- the fence -------------------------------------------------------------------------------------------------------


def test_a_reservation_is_one_attempt_and_two_never_share_a_row(broker: Any, clock: ManualClock) -> None:
    """QUEUE-1; acceptance: two claimers never share a row; one claim = one attempt."""
    for number in range(4):
        broker.enqueue(message(number))
    one, other = take_all(consume(broker, 2)), take_all(consume(broker, 8))
    assert not {p.reservation.id for p in one} & {p.reservation.id for p in other}
    assert [entry["attempts"] for entry in rows(broker)] == [1, 1, 1, 1]


def test_a_lapsed_reservation_is_taken_with_a_new_fence_and_an_unlapsed_one_is_not(broker: Any, clock: ManualClock) -> None:
    """QUEUE-1; acceptance: expired lease gets new token and attempt+1, unexpired does not."""
    broker.enqueue(message("x"))
    first = take(consume(broker)).reservation
    clock.advance(59.999)
    second_consumer = consume(broker)
    assert take_all(second_consumer) == []
    clock.advance(0.001)
    second = take(second_consumer).reservation
    assert (second.id, second.attempt) == (first.id, 2)
    assert second.reserved_at > first.reserved_at


def test_the_acknowledgement_of_a_lost_reservation_deletes_nothing(
    broker: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """QUEUE-2, C04; acceptance: lease lost: 0 rows deleted, newer claim intact, reported as lost, not an error."""
    broker.enqueue(message("x"))
    old = consume(broker)
    straggler = take(old)
    clock.advance(60)
    new = consume(broker)
    current = take(new)
    before = rows(broker)
    old.ack(straggler)
    old.nack(straggler)
    assert rows(broker) == before
    assert "came too late" in caplog.text
    new.ack(current)
    assert rows(broker) == []


def test_a_second_acknowledgement_is_harmless(broker: Any) -> None:
    """Acceptance: second ack harmless."""
    broker.enqueue(message("x"))
    consumer = consume(broker)
    proxy = take(consumer)
    consumer.ack(proxy)
    broker.enqueue(message("y"))
    consumer.ack(proxy)
    assert len(rows(broker)) == 1


@pytest.mark.parametrize("wrong", [{"id": 10**9}, {"queue": "other"}, {"reserved_at": 1}, {"attempt": 7}])
@pytest.mark.parametrize("verb", ["delete", "bury", "give_back", "extend"])
def test_a_fence_that_differs_anywhere_matches_nothing(broker: Any, wrong: dict[str, Any], verb: str) -> None:
    """QUEUE-2; acceptance: wrong any of them: 0 rows."""
    broker.enqueue(message("x"))
    right = take(consume(broker)).reservation
    fence = Reservation(**{name: wrong.get(name, getattr(right, name)) for name in ("id", "queue", "reserved_at", "attempt")})
    before = rows(broker)

    def operation(tx: Any) -> bool:
        if verb == "delete":
            return reservations.delete(tx, fence)
        if verb == "bury":
            return reservations.bury(tx, fence, "no", now=5)
        if verb == "give_back":
            return reservations.give_back(tx, fence, due_at=None, now=5)
        return reservations.extend(tx, fence, 5)

    assert broker.store.write(operation) is False
    assert rows(broker) == before


def test_a_row_that_is_not_reserved_cannot_be_acknowledged(broker: Any) -> None:
    """Acceptance: deletes only id + queue + token + attempts (+ LEASED)."""
    broker.enqueue(message("x"))
    consumer = consume(broker)
    proxy = take(consumer)
    sql(broker, "UPDATE {messages} SET state = 0, lease_until = NULL")
    consumer.ack(proxy)
    assert row(broker)["state"] == READY


def test_a_fence_is_never_used_twice_even_when_an_attempt_is_given_back(broker: Any) -> None:
    """The clock stands still here, and the attempt count goes back; the reservation time still moves on."""
    broker.enqueue(message("x"))
    seen = set()
    for _ in range(3):
        consumer = consume(broker)
        proxy = take(consumer)
        assert proxy.reservation not in seen
        seen.add(proxy.reservation)
        consumer.requeue([proxy])
        assert row(broker)["attempts"] == 0


def test_a_new_consumer_acknowledges_what_an_old_one_delivered(broker: Any) -> None:
    for number in range(2):
        broker.enqueue(message(number))
    old = consume(broker, 2)
    first, second = take_all(old)
    old.close()
    assert [one["state"] for one in rows(broker)] == [RESERVED, RESERVED], "handed out: not the consumer's to give back"
    new = consume(broker, 2)
    new.ack(first)
    new.nack(second)
    assert [one["state"] for one in rows(broker)] == [DEAD]


# --- retries and what hooks send -------------------------------------------------------------------------------------


def process(broker: Any, consumer: Any, proxy: Any, error: BaseException | None = None) -> None:
    """What Dramatiq's worker does around an actor."""
    broker.emit_before("process_message", proxy)
    if error is not None:
        proxy.stuff_exception(error)
        broker.emit_after("process_message", proxy, exception=error)
    else:
        broker.emit_after("process_message", proxy, result=None)
    if proxy.failed:
        broker.emit_before("nack", proxy)
        consumer.nack(proxy)
        broker.emit_after("nack", proxy)
    else:
        broker.emit_before("ack", proxy)
        consumer.ack(proxy)
        broker.emit_after("ack", proxy)


def test_a_retry_is_the_same_row_made_its_own_next_try(broker: Any, clock: ManualClock) -> None:
    """One fenced UPDATE: the retry and the original can neither both exist nor both vanish."""
    actor, _ = recording(broker, max_retries=3, min_backoff=1000, max_backoff=1000)
    actor.send("x")
    before = row(broker)
    consumer = consume(broker)
    process(broker, consumer, take(consumer), ValueError("boom"))
    after = row(broker)
    assert (after["id"], after["message_id"], after["state"]) == (before["id"], before["message_id"], DELAYED)
    assert after["attempts"] == 1
    clock.advance(10)
    second = take(consumer)
    assert (second.options["retries"], second.reservation.attempt) == (1, 2)


def test_a_retry_that_cannot_be_stored_keeps_the_message(
    broker: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C07: the error surfaces in the acknowledgement instead of vanishing in a hook; the row comes back after its lease."""
    actor, _ = recording(broker, max_retries=3)
    actor.send("x")
    consumer = consume(broker)
    proxy = take(consumer)

    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "postpone", refuse)
        with pytest.raises(RuntimeError, match="on fire"):
            process(broker, consumer, proxy, ValueError("boom"))
    assert row(broker)["state"] == RESERVED
    clock.advance(60)
    again = take(consumer)
    assert (again.message_id, again.reservation.attempt) == (proxy.message_id, 2)


def test_a_retry_asked_for_outside_the_hooks_is_stored_at_once(broker: Any, clock: ManualClock) -> None:
    actor, _ = recording(broker)
    actor.send("x")
    consumer = consume(broker)
    proxy = take(consumer)
    proxy.options["retries"] = 1
    broker.enqueue(proxy, delay=500)
    assert proxy.settled
    assert (row(broker)["state"], row(broker)["available_at"]) == (DELAYED, clock.now() + 500)
    consumer.ack(proxy)
    assert row(broker)["state"] == DELAYED


def test_an_acknowledgement_after_a_failed_retry_is_withheld(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C07, where Retries is not the one who asks."""
    actor, _ = recording(broker)
    actor.send("x")
    consumer = consume(broker)
    proxy = take(consumer)
    proxy.options["retries"] = 1

    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "postpone", refuse)
        with pytest.raises(RuntimeError):
            broker.enqueue(proxy, delay=500)
    with pytest.raises(StoreError, match="comes back after its lease"):
        consumer.ack(proxy)
    assert row(broker)["state"] == RESERVED


def test_a_retry_of_a_lost_reservation_is_not_a_second_message(broker: Any, clock: ManualClock) -> None:
    """Who took the message over runs it, and retries it; the straggler's retry would be a copy."""
    actor, _ = recording(broker, max_retries=3)
    actor.send("x")
    old, new = consume(broker), consume(broker)
    straggler = take(old)
    clock.advance(60)
    current = take(new)
    process(broker, old, straggler, ValueError("boom"))
    assert row(broker)["state"] == RESERVED
    new.ack(current)
    assert rows(broker) == []


def test_a_body_that_enqueues_a_copy_of_its_message_makes_a_second_row(broker: Any) -> None:
    """Only a try that Retries has counted is a retry."""
    actor, _ = recording(broker)
    actor.send("x")
    consumer = consume(broker)
    proxy = take(consumer)
    broker.emit_before("process_message", proxy)
    broker.enqueue(proxy)
    broker.emit_after("process_message", proxy, result=None)
    consumer.ack(proxy)
    only = row(broker)
    assert (only["state"], only["message_id"]) == (READY, proxy.message_id)
    assert only["id"] != proxy.reservation.id


def test_what_hooks_send_is_stored_with_the_acknowledgement(broker: Any) -> None:
    """The next message of a pipeline appears in the transaction in which the one before disappears."""
    actor, _ = recording(broker)
    dramatiq.pipeline([actor.message("first"), actor.message("second")]).run()
    consumer = consume(broker)
    proxy = take(consumer)
    broker.emit_before("process_message", proxy)
    broker.emit_after("process_message", proxy, result="from first")
    assert [one["id"] for one in rows(broker)] == [proxy.reservation.id]
    consumer.ack(proxy)
    only = row(broker)
    assert (only["state"], json.loads(bytes(only["message"]))["args"]) == (READY, ["second", "from first"])


def test_what_hooks_of_a_superseded_delivery_send_is_dropped_with_it(broker: Any, clock: ManualClock) -> None:
    """The delivery that took over sends it: twice would be once too often."""
    actor, _ = recording(broker)
    dramatiq.pipeline([actor.message("first"), actor.message("second")]).run()
    old, new = consume(broker), consume(broker)
    straggler = take(old)
    clock.advance(60)
    current = take(new)
    process(broker, old, straggler)
    assert len(rows(broker)) == 1
    process(broker, new, current)
    assert [one["state"] for one in rows(broker)] == [READY]


def test_an_acknowledgement_that_fails_takes_the_follow_ups_with_it(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, _ = recording(broker)
    dramatiq.pipeline([actor.message("first"), actor.message("second")]).run()
    consumer = consume(broker)
    proxy = take(consumer)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("full")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "insert", refuse)
        with pytest.raises(RuntimeError):
            process(broker, consumer, proxy)
    assert row(broker)["state"] == RESERVED


# --- dead letters ----------------------------------------------------------------------------------------------------


def test_a_rejected_message_is_kept_with_its_reason_and_can_be_sent_again(broker: Any, clock: ManualClock) -> None:
    """QUEUE-5"""
    actor, _ = recording(broker, max_retries=0)
    actor.send("x")
    consumer = consume(broker)
    process(broker, consumer, take(consumer), ValueError("boom"))
    (letter,) = broker.dead_letters()
    assert letter.reason.startswith("ValueError: boom")
    assert (letter.queue, letter.actor, letter.died_at, letter.attempts) == ("default", "record", clock.now(), 1)
    assert letter.message is not None
    assert letter.message.args == ("x",)
    assert broker.dead_letters("elsewhere") == []
    assert broker.requeue_dead_letter(letter.id) is True
    assert broker.requeue_dead_letter(letter.id) is False, "it is sent once"
    again = take(consumer)
    assert (again.args, again.reservation.attempt) == (("x",), 1)
    assert broker.dead_letters() == []


def test_a_requeued_dead_letter_has_its_tries_renewed(broker: Any, clock: ManualClock) -> None:
    actor, _ = recording(broker, max_retries=1, min_backoff=1, max_backoff=1)
    actor.send("x")
    consumer = consume(broker)
    for _ in range(2):
        clock.advance(1)
        process(broker, consumer, take(consumer), ValueError("boom"))
    (letter,) = broker.dead_letters()
    broker.requeue_dead_letter(letter.id)
    process(broker, consumer, take(consumer), ValueError("boom"))
    assert row(broker)["state"] == DELAYED


def test_dead_letters_are_listed_newest_first_and_purged_by_age(broker: Any, clock: ManualClock) -> None:
    actor, _ = recording(broker, max_retries=0)
    consumer = consume(broker)
    for number in range(3):
        actor.send(number)
        process(broker, consumer, take(consumer), ValueError(str(number)))
        clock.advance(10)
    assert [letter.message.args[0] for letter in broker.dead_letters()] == [2, 1, 0]
    assert [letter.message.args[0] for letter in broker.dead_letters("default", limit=2)] == [2, 1]
    assert broker.purge_dead_letters(before=clock.now() - 15_000) == 2
    assert broker.purge_dead_letters("elsewhere") == 0
    assert broker.purge_dead_letters("default") == 1
    assert rows(broker) == []


def test_a_message_refused_for_its_age_says_so(broker: Any) -> None:
    actor, _ = recording(broker)
    actor.send("x")
    consumer = consume(broker)
    proxy = take(consumer)
    proxy.fail()
    proxy.stuff_exception(SkipMessage("Message age limit exceeded"))
    consumer.nack(proxy)
    assert "age limit" in broker.dead_letters()[0].reason


def as_json(**wrong: Any) -> bytes:
    right = {"queue_name": "default", "actor_name": "a", "args": [], "kwargs": {}, "options": {}, "message_id": "1"}
    return json.dumps({**right, "message_timestamp": 1, **wrong}).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x00not json",
        b"{}",
        b"[1, 2]",
        as_json(kwargs=[]),
        as_json(actor_name=7, options=None),
    ],
    ids=["bytes", "empty", "list", "kwargs", "types"],
)
def test_a_row_that_is_no_message_is_buried_alone(broker: Any, payload: bytes) -> None:
    """QUEUE-5; acceptance: invalid payload: dead-lettered on its own, others unaffected."""
    for number in range(3):
        broker.enqueue(message(number))
    sql(broker, "UPDATE {messages} SET message = ? WHERE id = ?", payload, rows(broker)[1]["id"])
    consumer = consume(broker, 8)
    assert [proxy.args[0] for proxy in take_all(consumer)] == [0, 2]
    (letter,) = broker.dead_letters()
    assert "DecodeError" in letter.reason
    assert letter.payload == payload
    assert broker.requeue_dead_letter(letter.id) is True


def test_a_reason_is_cut_in_the_middle(broker: Any) -> None:
    actor, _ = recording(broker, max_retries=0)
    actor.send("x")
    consumer = consume(broker)
    process(broker, consumer, take(consumer), ValueError("a" + "\0" + "b" * 100_000 + "z"))
    reason = broker.dead_letters()[0].reason
    assert len(reason) <= 4010
    assert reason.startswith("ValueError: a")
    assert reason.endswith("z")


def test_a_row_whose_message_names_another_queue_is_sent_on(broker: Any) -> None:
    broker.declare_queue("other")
    broker.enqueue(message("x", queue="other"))
    sql(broker, "UPDATE {messages} SET queue = 'default'")
    assert take_all(consume(broker, 4)) == []
    proxy = take(consume(broker, 4, "other"))
    assert (proxy.args[0], proxy.reservation.attempt) == ("x", 1)


# --- giving back -----------------------------------------------------------------------------------------------------


def test_what_was_reserved_and_not_started_is_given_back_uncounted(broker: Any) -> None:
    """QUEUE-7; acceptance: requeue of an unstarted one: attempts not consumed."""
    for number in range(4):
        broker.enqueue(message(number))
    consumer = consume(broker, 4)
    started, queued = take(consumer), take(consumer)
    consumer.requeue([queued])
    consumer.close()
    assert [(one["state"], one["attempts"]) for one in rows(broker)] == [(RESERVED, 1), (READY, 0), (READY, 0), (READY, 0)]
    consumer.ack(started)
    consumer.ack(queued)
    assert len(rows(broker)) == 3


def test_a_worker_that_begins_to_stop_gives_back_what_waits_in_its_work_queue(broker: Any) -> None:
    """QUEUE-7: at once, not when the longest of its running messages has ended."""
    for number in range(3):
        broker.enqueue(message(number))
    consumer = consume(broker, 3)
    worker = FakeWorker(Thread(consumer))
    broker.emit_before("worker_boot", worker)
    running, queued, _ = take_all(consumer)
    broker.emit_before("process_message", running)
    broker.emit_before("worker_shutdown", worker)
    assert [(one["state"], one["attempts"]) for one in rows(broker)] == [(RESERVED, 1), (READY, 0), (READY, 0)]
    consumer.ack(running)
    consumer.requeue([queued])
    assert [one["state"] for one in rows(broker)] == [READY, READY]
    broker.emit_after("worker_shutdown", worker)


def test_a_message_given_back_at_shutdown_is_not_run_by_a_thread_that_got_it(broker: Any) -> None:
    """QUEUE-7: the thread loses, and neither its skip nor its acknowledgement reaches a hook, or the row."""
    told: list[str] = []

    class Listener(dramatiq.Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            told.append("before")

        def after_skip_message(self, broker: Any, message: Any) -> None:
            told.append("skip")

        def before_ack(self, broker: Any, message: Any) -> None:
            told.append("ack")

        def after_ack(self, broker: Any, message: Any) -> None:
            told.append("acked")

    broker.add_middleware(Listener())
    broker.enqueue(message("x"))
    consumer = consume(broker)
    worker = FakeWorker(Thread(consumer))
    broker.emit_before("worker_boot", worker)
    proxy = take(consumer)
    assert proxy.claim_fate(), "the main thread has decided, and has not written yet"
    with pytest.raises(SkipMessage):
        broker.emit_before("process_message", proxy)
    broker.emit_after("skip_message", proxy)
    broker.emit_before("ack", proxy)
    consumer.ack(proxy)
    broker.emit_after("ack", proxy)
    assert told == []
    assert row(broker)["state"] == RESERVED, "giving it back is the main thread's business"
    broker.emit_before("worker_shutdown", worker)
    broker.emit_after("worker_shutdown", worker)


def test_giving_back_never_raises(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would abort Dramatiq's shutdown; the lease brings the message back all the same."""
    broker.enqueue(message("x"))
    consumer = consume(broker)
    proxy = take(consumer)

    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "give_back", refuse)
        consumer.requeue([proxy])
    assert row(broker)["state"] == RESERVED


def test_a_delayed_message_that_is_given_back_does_not_wait_again(broker: Any, clock: ManualClock) -> None:
    """Acceptance: early delivery of a delayed message, requeue of an unstarted one: attempts not consumed."""
    broker.enqueue(message("x"), delay=1000)
    clock.advance(1)
    consumer = consume(broker)
    consumer.requeue([take(consumer)])
    assert (row(broker)["state"], row(broker)["attempts"]) == (READY, 0)
    assert take(consume(broker)).args[0] == "x"


# --- leases ----------------------------------------------------------------------------------------------------------


def extend(broker: Any) -> bool:
    return bool(broker.here._keeper.extend())


def test_a_live_worker_keeps_what_it_runs_and_what_it_has_queued(broker: Any, clock: ManualClock) -> None:
    """QUEUE-6"""
    for number in range(2):
        broker.enqueue(message(number))
    mine, theirs = consume(broker, 2), consume(broker, 2)
    running, queued = take_all(mine)
    broker.emit_before("process_message", running)
    for _ in range(4):
        clock.advance(30)
        assert extend(broker)
    assert take_all(theirs) == []
    assert [one["reserved_at"] for one in rows(broker)] == [running.reservation.reserved_at, queued.reservation.reserved_at]
    mine.ack(running)
    mine.ack(queued)
    assert rows(broker) == []


@pytest.mark.parametrize("brokers", ["postgresql"], indirect=True)
def test_leases_are_extended_while_all_writers_of_the_process_wait_for_a_locked_row(
    broker: Any, brokers: Brokers, clock: ManualClock
) -> None:
    """QUEUE-6"""
    broker.enqueue(message("x"))
    proxy = take(consume(broker))
    other = brokers(clock=clock)
    with all_waiting(broker.store, other.store):
        clock.advance(50)
        assert Background(lambda: extend(broker)).result()
        assert row(other)["lease_until"] == clock.now() + 60_000
    assert proxy.lease_until == clock.now() + 60_000


def test_the_lease_of_a_thread_that_ended_lapses(broker: Any, clock: ManualClock) -> None:
    """QUEUE-6: extension stops when the thread that runs the message has ended."""
    broker.enqueue(message("x"))
    mine = consume(broker)
    proxy = take(mine)
    thread = threading.Thread(target=lambda: broker.emit_before("process_message", proxy))
    thread.start()
    thread.join()
    clock.advance(50)
    assert extend(broker)
    clock.advance(10)
    assert take(consume(broker)).reservation.attempt == 2


def test_the_lease_of_a_message_whose_acknowledgement_failed_lapses(
    broker: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUEUE-6: extension stops when its acknowledgement has failed."""
    broker.enqueue(message("x"))
    mine = consume(broker)
    proxy = take(mine)
    broker.emit_before("process_message", proxy)

    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "delete", refuse)
        with pytest.raises(RuntimeError):
            mine.ack(proxy)
    clock.advance(50)
    assert extend(broker)
    clock.advance(10)
    assert take(consume(broker)).reservation.attempt == 2


def test_queued_messages_of_a_worker_without_threads_lapse(broker: Any, clock: ManualClock) -> None:
    """QUEUE-6: a lease is not extended on behalf of work that nothing will finish."""
    broker.enqueue(message("x"))
    thread = threading.Thread(target=lambda: None)
    thread.start()
    broker.emit_after("worker_thread_boot", thread)
    thread.join()
    take(consume(broker))
    clock.advance(50)
    assert extend(broker)
    clock.advance(10)
    assert take(consume(broker)).reservation.attempt == 2


def test_a_reservation_that_was_lost_while_held_is_told_once(
    broker: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    broker.enqueue(message("x"))
    mine = consume(broker)
    take(mine)
    clock.advance(60)
    theirs = consume(broker)
    thief = take(theirs)
    clock.advance(30)
    for _ in range(4):
        assert extend(broker)
    assert caplog.text.count("Lost the reservation") == 1
    assert take_all(consume(broker)) == []
    theirs.ack(thief)


def test_a_refused_extension_is_tried_again_within_the_lease(
    broker: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C41: a missed heartbeat does not lose the claim."""
    broker.enqueue(message("x"))
    take(consume(broker))
    clock.advance(20)

    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise StoreError("locked")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "extend", refuse)
        assert not extend(broker)
        assert not extend(broker)
    assert caplog.text.count("Could not extend") == 1
    clock.advance(20)
    assert extend(broker)
    clock.advance(30)
    assert take_all(consume(broker)) == []


# --- joining transactions --------------------------------------------------------------------------------------------


def test_a_message_sent_in_a_host_transaction_shares_its_fate(broker: Any) -> None:
    """HOST-1, C08"""
    actor, _ = recording(broker)
    broker.join("default")  # the tables are there
    told: list[str] = []

    class Listener(dramatiq.Middleware):
        def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            told.append(message.args[0])

    broker.add_middleware(Listener())
    database = broker.store.database
    with database.atomic() as transaction:
        actor.send("never")
        transaction.rollback()
    assert (rows(broker), told) == ([], [])
    with database.atomic():
        actor.send("with the host")
        assert told == []
    assert (len(rows(broker)), told) == (1, ["with the host"])
    database.close()


def test_no_message_is_reserved_inside_a_foreign_transaction(broker: Any) -> None:
    """QUEUE-3; acceptance: inside a foreign transaction: not attempted."""
    broker.enqueue(message("x"))
    consumer = consume(broker)
    with broker.store.database.atomic(), pytest.raises(StoreError, match="open transaction"):
        next(consumer)
    assert (row(broker)["state"], row(broker)["attempts"]) == (READY, 0)
    assert take(consumer).args[0] == "x"
    broker.store.database.close()


def test_an_acknowledgement_does_not_join_a_transaction_that_a_step_left_open(broker: Any) -> None:
    """C59"""
    broker.enqueue(message("x"))
    consumer = consume(broker)
    proxy = take(consumer)
    with broker.store.database.atomic() as transaction:
        consumer.ack(proxy)
        transaction.rollback()
    assert rows(broker) == []
    broker.store.database.close()


def test_an_engine_stages_settles_and_announces(broker: Any) -> None:
    """DRIVE-3: outcome, follow-up and acknowledgement in one transaction."""
    told: list[str] = []

    class Listener(dramatiq.Middleware):
        def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            told.append(message.args[0])

    broker.add_middleware(Listener())
    broker.enqueue(message("step"))
    consumer = consume(broker)
    proxy = take(consumer)
    following = broker.prepare(message("following"))
    told.clear()

    def write(tx: Any) -> bool:
        broker.stage(tx, following)
        return bool(broker.settle(tx, proxy.reservation))

    assert broker.store.write(write) is True
    assert told == []
    proxy.settled = True
    broker.announce([following])
    assert told == ["following"]
    consumer.ack(proxy)
    assert take(consumer).args[0] == "following"
    assert broker.store.write(lambda tx: broker.settle(tx, proxy.reservation)) is False


def test_a_recycled_row_keeps_its_age_and_starts_its_attempts_anew(broker: Any, clock: ManualClock) -> None:
    """QUEUE-1: a run that goes on does not queue up again behind those that came later."""
    broker.enqueue(message("step"))
    clock.advance(10)
    broker.enqueue(message("another run"))
    consumer = consume(broker, 1)
    proxy = take(consumer)
    following = broker.prepare(message("following"))
    broker.store.write(lambda tx: broker.stage(tx, following, proxy.reservation))
    proxy.settled = True
    consumer.ack(proxy)
    first = take(consumer)
    assert (first.args[0], first.reservation.attempt) == ("following", 1)
    assert first.reservation.id == proxy.reservation.id


def test_staging_on_a_lost_reservation_adds_a_row(broker: Any, clock: ManualClock) -> None:
    broker.enqueue(message("step"))
    straggler = take(consume(broker))
    clock.advance(60)
    current = take(consume(broker))
    following = broker.prepare(message("following"), delay=100)
    broker.store.write(lambda tx: broker.stage(tx, following, straggler.reservation))
    assert [one["state"] for one in rows(broker)] == [RESERVED, DELAYED]
    assert rows(broker)[0]["id"] == current.reservation.id


def test_a_retained_row_is_redelivered_as_the_new_message(broker: Any, clock: ManualClock) -> None:
    broker.declare_queue("drives")
    broker.enqueue(message("step"))
    proxy = take(consume(broker))
    drive = broker.prepare(message("drive", queue="drives"))
    assert broker.store.write(lambda tx: broker.retain(tx, drive, proxy.reservation)) is True
    assert take_all(consume(broker)) == []
    clock.advance(60)
    assert take_all(consume(broker)) == [], "it belongs to the other queue"
    assert take(consume(broker, 1, "drives")).args[0] == "drive"
    assert broker.store.write(lambda tx: broker.retain(tx, drive, proxy.reservation)) is False


def test_a_retained_row_can_still_be_settled_by_its_holder(broker: Any) -> None:
    broker.declare_queue("drives")
    broker.enqueue(message("step"))
    proxy = take(consume(broker))
    drive = broker.prepare(message("drive", queue="drives"))
    broker.store.write(lambda tx: broker.retain(tx, drive, proxy.reservation))
    assert broker.store.write(lambda tx: broker.settle(tx, proxy.reservation)) is True


def test_a_released_row_is_due_later_and_its_attempt_is_none(broker: Any, clock: ManualClock) -> None:
    broker.enqueue(message("step"))
    proxy = take(consume(broker))
    assert broker.store.write(lambda tx: broker.release(tx, proxy.reservation, delay=3000)) is True
    assert broker.store.write(lambda tx: broker.release(tx, proxy.reservation)) is False
    assert (row(broker)["state"], row(broker)["attempts"]) == (DELAYED, 0)
    assert take_all(consume(broker)) == []
    clock.advance(3)
    assert take(consume(broker)).reservation.attempt == 1


# --- operators -------------------------------------------------------------------------------------------------------


def test_stats_count_each_state(broker: Any) -> None:
    actor, _ = recording(broker, max_retries=0)
    broker.declare_queue("other")
    for number in range(4):
        actor.send(number)
    actor.send_with_options(args=(5,), delay=1000)
    broker.enqueue(message("x", queue="other"))
    consumer = consume(broker, 2)
    first, _second = take_all(consumer)
    process(broker, consumer, first, ValueError("boom"))
    stats = {entry.queue: (entry.ready, entry.delayed, entry.reserved, entry.dead) for entry in broker.queue_stats()}
    assert stats == {"default": (2, 1, 1, 1), "other": (1, 0, 0, 0)}


def test_flushing_leaves_the_dead_letters_and_other_queues(broker: Any) -> None:
    actor, _ = recording(broker, max_retries=0)
    broker.declare_queue("other")
    consumer = consume(broker, 1)
    actor.send("dead")
    process(broker, consumer, take(consumer), ValueError("boom"))
    for _ in range(2):
        actor.send("gone")
    actor.send_with_options(args=("gone",), delay=1000)
    broker.enqueue(message("kept", queue="other"))
    broker.flush("default")
    assert [(one["queue"], one["state"]) for one in rows(broker)] == [("default", DEAD), ("other", READY)]
    broker.flush_all()
    assert [one["state"] for one in rows(broker)] == [DEAD]


def test_joining_waits_for_delayed_and_reserved_messages(broker: Any, clock: ManualClock) -> None:
    broker.enqueue(message("x"), delay=1000)
    with pytest.raises(dramatiq.errors.QueueJoinTimeout):
        broker.join("default", timeout=1)
    clock.advance(1)
    consumer = consume(broker)
    proxy = take(consumer)
    with pytest.raises(dramatiq.errors.QueueJoinTimeout):
        broker.join("default", timeout=1)
    consumer.ack(proxy)
    broker.join("default", timeout=1)


def test_brokers_with_the_same_prefix_share_their_queues(brokers: Brokers) -> None:
    one, other = brokers(), brokers()
    for broker in (one, other):
        broker.declare_queue("default")
    one.enqueue(message("hello"))
    consumer = other.consume("default", prefetch=1, timeout=5000)
    assert take(consumer).args[0] == "hello"


# --- straight on to this process's workers ---------------------------------------------------------------------------


class Thread:
    """As much of Dramatiq's consumer thread as counts here."""

    running, paused = True, False

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.got: list[Any] = []

    def handle_message(self, message: Any) -> None:
        self.got.append(message)


class FakeWorker:
    def __init__(self, thread: Thread, queue: str = "default") -> None:
        self.consumers = {queue: thread}


def hand_over(broker: Any, proxy: Any, following: Any) -> Any:
    taken = broker.store.write(lambda tx: broker.hand_over(tx, following, proxy.reservation))
    if taken is not None:
        proxy.settled = True
        broker.taken(following, taken, lease_until=proxy.lease_until)
    return taken


def test_a_row_that_is_handed_over_stays_reserved_under_a_new_fence(broker: Any, clock: ManualClock) -> None:
    recording(broker)
    broker.enqueue(message("step"))
    consumer = consume(broker, 4)
    thread = Thread(consumer)
    worker = FakeWorker(thread)
    broker.emit_before("worker_boot", worker)
    proxy = take(consumer)
    following = broker.prepare(message("following"))
    assert broker.can_take(following)
    taken = hand_over(broker, proxy, following)
    assert taken.id == proxy.reservation.id
    assert taken.reserved_at > proxy.reservation.reserved_at
    assert row(broker)["state"] == RESERVED
    consumer.ack(proxy)
    assert len(rows(broker)) == 1, "the old fence matches nothing"
    assert thread.got[0].args == ("following",)
    clock.advance(59)
    assert extend(broker)
    clock.advance(59)
    assert take_all(consume(broker)) == [], "its lease is extended like any other"
    consumer.ack(thread.got[0])
    assert rows(broker) == []
    assert consumer.held == {}
    broker.emit_before("worker_shutdown", worker)
    broker.emit_after("worker_shutdown", worker)


def test_nothing_is_handed_over_on_a_lost_reservation(broker: Any, clock: ManualClock) -> None:
    recording(broker)
    broker.enqueue(message("step"))
    straggler = take(consume(broker))
    clock.advance(60)
    take(consume(broker))
    before = rows(broker)
    assert hand_over(broker, straggler, broker.prepare(message("following"))) is None
    assert rows(broker) == before


def test_a_message_handed_over_during_a_shutdown_goes_back_to_its_queue(broker: Any) -> None:
    """QUEUE-7"""
    recording(broker)
    broker.enqueue(message("step"))
    consumer = consume(broker, 4)
    worker = FakeWorker(Thread(consumer))
    broker.emit_before("worker_boot", worker)
    proxy = take(consumer)
    following = broker.prepare(message("following"))
    assert broker.can_take(following)
    broker.emit_before("process_message", proxy)
    broker.emit_before("worker_shutdown", worker)
    assert hand_over(broker, proxy, following) is not None
    assert (row(broker)["state"], row(broker)["attempts"]) == (READY, 0)
    broker.emit_after("worker_shutdown", worker)
    assert take(consume(broker)).args[0] == "following"


def test_only_messages_that_this_process_could_run_now_are_handed_over(broker: Any) -> None:
    recording(broker)
    broker.declare_queue("other")
    worker = FakeWorker(Thread(consume(broker)))
    broker.emit_before("worker_boot", worker)
    assert broker.can_take(broker.prepare(message("now")))
    assert not broker.can_take(broker.prepare(message("later"), delay=1000))
    assert not broker.can_take(broker.prepare(message("elsewhere", queue="other")))
    assert not broker.can_take(broker.prepare(message("stranger", actor="stranger")))
    broker.emit_before("worker_shutdown", worker)
    assert not broker.can_take(broker.prepare(message("too late")))
    broker.emit_after("worker_shutdown", worker)


def test_runs_go_on_without_end_while_there_is_room(broker: Any) -> None:
    """Nobody is passed by: whatever else waits is reserved too."""
    recording(broker)
    consumer = consume(broker, 8)
    worker = FakeWorker(Thread(consumer))
    broker.emit_before("worker_boot", worker)
    broker.enqueue(message("step"))
    take_all(consumer)
    assert all(broker.can_take(broker.prepare(message(number))) for number in range(100))
    broker.emit_before("worker_shutdown", worker)
    broker.emit_after("worker_shutdown", worker)


def test_endless_runs_cannot_keep_an_urgent_message_out(broker: Any) -> None:
    """QUEUE-1: slots that are passed on are won by priority and age again after a while."""
    recording(broker)
    consumer = consume(broker, 3)
    thread = Thread(consumer)
    worker = FakeWorker(thread)
    broker.emit_before("worker_boot", worker)
    for number in range(3):
        broker.enqueue(message(number, priority=5))
    running = take_all(consumer)
    broker.enqueue(message("urgent", priority=0))
    for _ in range(100):
        proxy = running.pop(0)
        following = broker.prepare(message("next step", priority=5))
        if broker.can_take(following):
            assert hand_over(broker, proxy, following) is not None
            consumer.ack(proxy)
            running.append(thread.got.pop())
            continue
        broker.store.write(lambda tx, proxy=proxy, one=following: broker.stage(tx, one, proxy.reservation))
        proxy.settled = True
        consumer.ack(proxy)
        running += take_all(consumer)
        if any(proxy.args[0] == "urgent" for proxy in running):
            break
    else:
        pytest.fail("the urgent message never got a slot")
    broker.emit_before("worker_shutdown", worker)
    broker.emit_after("worker_shutdown", worker)


# --- many at once ----------------------------------------------------------------------------------------------------


def test_consumers_at_work_at_once_never_get_the_same_row(brokers: Brokers) -> None:
    """QUEUE-1, with connections that really race: SKIP LOCKED on servers, the one writer on SQLite."""
    sending = brokers()
    sending.declare_queue("default")
    for number in range(120):
        sending.enqueue(message(number, priority=number % 3))
    crowd = [brokers() for _ in range(4)]
    for one in crowd:
        one.declare_queue("default")
    got: list[int] = []
    barrier = threading.Barrier(len(crowd))
    failed: list[BaseException] = []

    def work(broker: Any) -> None:
        try:
            consumer = broker.consume("default", prefetch=5, timeout=50)
            barrier.wait()
            while batch := take_all(consumer):
                for proxy in batch:
                    got.append(proxy.args[0])
                    consumer.ack(proxy)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(broker,)) for broker in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert sorted(got) == list(range(120))
    assert rows(sending) == []
