"""The acknowledgement guard of the SQLite broker (QUEUE-4). The cases are listed in
``tests/conformance/broker/ACCEPTANCE.md``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dramatiq
import peewee
import pytest
from dramatiq.broker import Consumer
from dramatiq.errors import BrokerConnectionError, ConnectionClosed

from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker, reservations, sqlite
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.errors import StoreError, WriteRefusedError, WriteUnknownError
from tests.support.brokers import middleware, recording, row, rows, take, working, write_lock
from tests.support.faults import BUSY, CONSTRAINT, FULL, IOERR_WRITE, READONLY
from tests.support.gates import Gates
from tests.support.waiting import eventually
from tests.unit.guards import Guarded

READY, DELAYED, RESERVED, DEAD = 0, 1, 2, 3


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with Guarded(tmp_path / "queue.db") as guarded:
        yield guarded


@pytest.mark.parametrize("code", [5, 6, 261, 262, 517, 773])
@pytest.mark.parametrize("refusals", [1, 2])
def test_a_refused_acknowledgement_is_tried_again_after_a_proven_rollback(guarded: Guarded, refusals: int, code: int) -> None:
    """A3: busy then free: retried after proven rollback, handler run once."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", code, times=refusals)
    consumer.ack(proxy)
    assert rows(guarded.broker) == []
    assert guarded.faults.count("DELETE") == refusals + 1


def test_the_handler_runs_once_however_often_its_acknowledgement_is_refused(guarded: Guarded) -> None:
    """A3, end to end."""
    actor, seen = recording(guarded.broker)
    actor.send("x")
    guarded.faults.arm("DELETE", times=2)
    with working(guarded.broker, threads=1):
        eventually(lambda: rows(guarded.broker) == [])
    assert seen == ["x"]


def test_a_fourth_delete_is_never_tried(guarded: Guarded) -> None:
    """A4, E2: sustained: at most 3 statements, original error propagated, row stays leased until lease expiry."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", times=99)
    with pytest.raises(WriteRefusedError) as refused:
        consumer.ack(proxy)
    assert not isinstance(refused.value, BrokerConnectionError), "Dramatiq would repeat it without bound"
    assert refused.value.sqlite_errorcode == BUSY
    assert isinstance(refused.value.__cause__, peewee.OperationalError)
    assert guarded.faults.count("DELETE") == 3
    assert row(guarded.broker)["state"] == RESERVED
    guarded.clock.advance(60)
    assert take(guarded.consumer()).reservation.attempt == 2


def test_three_deletes_are_all_that_a_message_gets(guarded: Guarded) -> None:
    """A4: "per message in all": an acknowledgement that is asked for again begins where the first one stopped."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", times=99)
    for _ in range(2):
        with pytest.raises(WriteRefusedError):
            consumer.ack(proxy)
    assert guarded.faults.count("DELETE") == 3


def a_clock(**replaced: Callable[..., Any]) -> SimpleNamespace:
    """For the guard alone: other threads of this process go by the machine's."""
    return SimpleNamespace(**{"monotonic": time.monotonic, "sleep": time.sleep, **replaced})


def test_no_delete_begins_after_the_window_has_closed(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A4, E2: none admitted after 5 s (monotonic), whatever is left of the statements."""
    consumer, proxy = guarded.delivered()
    moments = iter([100.0, 105.1, 105.2, 105.3])
    monkeypatch.setattr(sqlite, "time", a_clock(monotonic=lambda: next(moments)))
    guarded.faults.arm("DELETE", times=99)
    with pytest.raises(WriteRefusedError):
        consumer.ack(proxy)
    assert guarded.faults.count("DELETE") == 1


def test_a_delete_inside_the_window_is_admitted(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: the other side of the boundary."""
    consumer, proxy = guarded.delivered()
    moments = iter([100.0, 104.9, 104.9, 104.9, 104.9])
    monkeypatch.setattr(sqlite, "time", a_clock(monotonic=lambda: next(moments)))
    guarded.faults.arm("DELETE", times=1)
    consumer.ack(proxy)
    assert guarded.faults.count("DELETE") == 2


def test_attempts_that_never_reached_the_delete_use_the_window_with_growing_pauses(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: more proven-rollback attempts in the same window, with capped backoff: refused at BEGIN, no DELETE was spent."""
    consumer, proxy = guarded.delivered()
    pauses: list[float] = []
    monkeypatch.setattr(sqlite, "time", a_clock(sleep=pauses.append))
    guarded.faults.arm("BEGIN IMMEDIATE", times=12)
    consumer.ack(proxy)
    assert rows(guarded.broker) == []
    assert guarded.faults.count("DELETE") == 1
    assert len(pauses) == 12
    assert pauses[0] <= 0.01
    assert max(pauses) <= sqlite.MAX_PAUSE


def test_a_lock_that_another_process_holds_for_a_while_is_waited_out(
    guarded: Guarded, python_process: Callable[..., Any], gates: Gates
) -> None:
    """A3, with a real lock that outlasts the busy timeout several times."""
    consumer, proxy = guarded.delivered()
    holder = python_process("-m", "tests.support.lock_holder", str(guarded.path))
    gates.wait_reached("locked")
    done: list[Any] = []

    def acknowledge() -> None:
        consumer.ack(proxy)
        done.append(True)

    thread = threading.Thread(target=acknowledge, daemon=True)
    thread.start()
    eventually(lambda: guarded.faults.count("BEGIN IMMEDIATE") >= 3, because="several attempts were refused")
    assert not done
    gates.open("locked")
    thread.join(20)
    holder.wait()
    assert done
    assert rows(guarded.broker) == []


def test_a_lock_that_is_never_released_is_reported_and_the_lease_brings_the_message_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A4, with a real lock: the worker logs the error once and goes on; the message stays reserved until its lease lapses."""
    monkeypatch.setattr(sqlite, "ADMISSION", 0.2)
    guarded = Guarded(tmp_path / "queue.db")
    ran, locked = threading.Event(), threading.Event()

    @dramatiq.actor(broker=guarded.broker)
    def work() -> None:
        ran.set()
        locked.wait(20)

    work.send()
    with working(guarded.broker, threads=1):
        assert ran.wait(20)
        with write_lock(guarded.path):
            locked.set()
            eventually(lambda: "post_process_message" in caplog.text, because="the refusal is logged")
        assert row(guarded.broker)["state"] == RESERVED
        guarded.clock.advance(60)
        eventually(lambda: rows(guarded.broker) == [], because="the message comes back, runs and is acknowledged")
    assert caplog.text.count("You've found a bug") == 1
    guarded.broker.close()


@pytest.mark.parametrize("executed", [False, True], ids=["rolled back", "durable"])
def test_a_commit_that_failed_is_never_repeated(guarded: Guarded, executed: bool) -> None:
    """A5: COMMIT failure: exactly one statement, propagated."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("COMMIT", BUSY, executed=executed)
    with pytest.raises(WriteUnknownError):
        consumer.ack(proxy)
    assert guarded.faults.count("DELETE") == 1
    guarded.clock.advance(60)
    assert (next(guarded.consumer()) is None) == executed


def test_a_rollback_that_failed_is_never_followed_by_another_delete(guarded: Guarded) -> None:
    """A5: rollback failure."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", BUSY)
    guarded.faults.arm("ROLLBACK", IOERR_WRITE)
    with pytest.raises(WriteUnknownError):
        consumer.ack(proxy)
    assert guarded.faults.count("DELETE") == 1
    assert row(guarded.broker)["state"] == RESERVED


@pytest.mark.parametrize("how", ["replaced", "closed", "other process"])
def test_a_connection_that_is_not_the_same_proves_nothing(guarded: Guarded, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: replaced or closed connection, other pid: exactly one statement, propagated."""
    consumer, proxy = guarded.delivered()
    real, calls = reservations.delete, []

    def strange(tx: Any, reservation: Any) -> bool:
        calls.append(real(tx, reservation))
        if how == "replaced":
            guarded.database.dispose()
            guarded.database.connect()
        elif how == "closed":
            guarded.database.dispose()
        else:
            import os
            from types import SimpleNamespace

            patch.setattr("dramatiq_saga.store.rollback_proof.os", SimpleNamespace(getpid=lambda: os.getpid() + 1))
        error = peewee.OperationalError("database is locked")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "delete", strange)
        with pytest.raises(WriteUnknownError):
            consumer.ack(proxy)
    assert calls == [True]
    assert guarded.faults.count("DELETE") == 1


@pytest.mark.parametrize("code", [CONSTRAINT, READONLY, FULL, IOERR_WRITE])
def test_other_errors_are_passed_on_after_one_delete(guarded: Guarded, code: int) -> None:
    """A5: constraint/read-only: exactly one statement, propagated."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", code, times=99)
    with pytest.raises((peewee.DatabaseError, StoreError)) as refused:
        consumer.ack(proxy)
    assert not isinstance(refused.value, BrokerConnectionError)
    assert guarded.faults.count("DELETE") == 1
    assert row(guarded.broker)["state"] == RESERVED


def test_extension_stops_once_the_acknowledgement_has_failed(guarded: Guarded) -> None:
    """QUEUE-6, A4: "row stays leased until lease expiry", and no longer."""
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", times=99)
    with pytest.raises(WriteRefusedError):
        consumer.ack(proxy)
    guarded.clock.advance(59)
    assert guarded.broker.here._keeper.extend()
    guarded.clock.advance(1)
    assert take(guarded.consumer()).reservation.attempt == 2


def test_the_busy_timeout_of_no_connection_is_touched(tmp_path: Path) -> None:
    """A6, E6: a long driver wait is bounded by admission alone: each statement keeps the application's busy timeout, which is
    never lowered on any connection and so never has to be put back, not even after a failure."""
    guarded = Guarded(tmp_path / "queue.db", timeout=0.123)
    consumer, proxy = guarded.delivered()
    guarded.faults.arm("DELETE", times=99)
    with pytest.raises(WriteRefusedError):
        consumer.ack(proxy)
    assert not [sql for sql in guarded.faults.statements if "busy_timeout" in sql]
    engine = guarded.broker.store._control(lambda: guarded.database.execute_sql("PRAGMA busy_timeout").fetchone()[0])
    host = guarded.database.execute_sql("PRAGMA busy_timeout").fetchone()[0]
    assert (engine, host) == (123, 123)
    guarded.database.close()
    guarded.broker.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_rejection_is_guarded_like_an_acknowledgement(guarded: Guarded, times: int) -> None:
    """A7: nack uses the same fence and keeps exactly one row on the same queue."""
    consumer, proxy = guarded.delivered()
    proxy.fail()
    proxy.stuff_exception(ValueError("boom"))
    guarded.faults.arm("UPDATE", times=times, containing="SET state = 3")
    consumer.nack(proxy)
    only = row(guarded.broker)
    assert (only["id"], only["queue"], only["state"]) == (proxy.reservation.id, "default", DEAD)


def test_a_retry_is_guarded_like_an_acknowledgement(guarded: Guarded) -> None:
    """A7: release keeps exactly one row on the same queue. E5: what the handler produced is kept in memory and stored by the
    next attempt; the handler is not called again."""
    actor, _ = recording(guarded.broker, max_retries=3, min_backoff=1000, max_backoff=1000)
    actor.send("x")
    consumer = guarded.consumer()
    proxy = take(consumer)
    guarded.faults.arm("UPDATE", times=2, containing="priority = ?, message = ?")
    guarded.broker.emit_before("process_message", proxy)
    guarded.broker.emit_after("process_message", proxy, exception=ValueError("boom"))
    consumer.ack(proxy)
    only = row(guarded.broker)
    assert (only["id"], only["queue"], only["state"]) == (proxy.reservation.id, "default", DELAYED)


def test_a_follow_up_is_kept_in_memory_until_its_transaction_lands(guarded: Guarded) -> None:
    """E5: a finished result is kept in memory and its publication retried, never the callback."""
    ran: list[str] = []

    @dramatiq.actor(broker=guarded.broker)
    def step(name: str, before: Any = None) -> str:
        ran.append(name)
        return name

    dramatiq.pipeline([step.message("first"), step.message("second")]).run()
    guarded.faults.arm("INSERT", times=2)
    with working(guarded.broker, threads=1):
        eventually(lambda: rows(guarded.broker) == [])
    assert ran == ["first", "second"]


def test_giving_back_uses_the_same_fence(guarded: Guarded) -> None:
    """A7: release: a straggler that gives back after the lease lapsed gives nothing back."""
    consumer, proxy = guarded.delivered()
    guarded.clock.advance(60)
    current = take(guarded.consumer())
    consumer.requeue([proxy])
    only = row(guarded.broker)
    assert (only["state"], only["attempts"], only["reserved_at"]) == (RESERVED, 2, current.reservation.reserved_at)


def test_the_acknowledgement_deletes_one_row_in_one_statement(guarded: Guarded) -> None:
    """A1, E2: never read and then delete; never by id alone."""
    guarded.send("other")
    consumer, proxy = guarded.delivered()
    consumer.ack(proxy)
    deletes = [sql for sql in guarded.faults.statements if sql.startswith("DELETE")]
    assert deletes == [
        "DELETE FROM saga_messages WHERE id = ? AND queue = ? AND reserved_at = ? AND attempts = ? AND state = 2"
    ]
    assert not [sql for sql in guarded.faults.statements if sql.startswith("SELECT") and "saga_messages" in sql]
    assert len(rows(guarded.broker)) == 1


def test_neighbours_in_a_refused_batch_are_acknowledged_all_the_same(guarded: Guarded) -> None:
    """QUEUE-8: a refused batch is taken apart; each acknowledgement runs again in a root of its own."""
    for number in range(8):
        guarded.send(number)
    consumer = guarded.consumer(8)
    proxies = [take(consumer) for _ in range(8)]
    guarded.faults.arm("DELETE", times=1)
    barrier = threading.Barrier(8)

    def acknowledge(proxy: Any) -> None:
        barrier.wait()
        consumer.ack(proxy)

    threads = [threading.Thread(target=acknowledge, args=(proxy,)) for proxy in proxies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(guarded.broker) == []


# --- the others ------------------------------------------------------------------------------------------------------


def test_a_plain_database_broker_has_no_guard(tmp_path: Path) -> None:
    """A8, QUEUE-5: other databases keep their own behaviour: one statement, and the error as it is."""
    from tests.support.faults import Database

    database = Database(tmp_path / "queue.db", timeout=0.05)
    broker = DatabaseBroker(database, middleware=middleware(), clock=ManualClock())
    broker.declare_queue("default")
    broker.enqueue(dramatiq.Message(queue_name="default", actor_name="a", args=(), kwargs={}, options={}))
    consumer = broker.consume("default", timeout=20)
    database.faults.arm("UPDATE", BUSY, containing="SET state = 2")
    with pytest.raises(WriteRefusedError):
        next(consumer)
    proxy = take(consumer)
    database.faults.clear()
    database.faults.arm("DELETE", BUSY)
    with pytest.raises(WriteRefusedError):
        consumer.ack(proxy)
    assert database.faults.count("DELETE") == 1
    broker.close()


def test_a_lost_server_becomes_dramatiqs_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A8: on a server the acknowledgement may be repeated: it is fenced, so a repeat that finds nothing has already landed."""
    broker = DatabaseBroker(tmp_path / "q.db")
    monkeypatch.setattr(broker.store, "dialect", "postgresql")

    def lost(tx: Any) -> None:
        raise peewee.OperationalError("server closed the connection unexpectedly")

    with pytest.raises(ConnectionClosed):
        broker.execute(lost)
    monkeypatch.setattr(broker.store, "dialect", "sqlite")
    broker.close()


def test_a_hosts_own_broker_is_never_replaced() -> None:
    """A8, QUEUE-5: importing and making our brokers changes no other broker and no global one."""
    from dramatiq.brokers.stub import StubBroker

    theirs = StubBroker()
    dramatiq.set_broker(theirs)
    before = {name: getattr(StubBroker, name) for name in ("enqueue", "consume", "join")}
    SQLiteBroker(":memory:")
    assert dramatiq.get_broker() is theirs
    assert {name: getattr(StubBroker, name) for name in before} == before
    assert Consumer.ack.__module__ == "dramatiq.broker"


def test_a_step_longer_than_the_lease_is_not_redelivered_while_it_runs(tmp_path: Path) -> None:
    """A8: the lease must exceed the time limit, or be renewed by heartbeat: it is renewed."""
    broker = SQLiteBroker(tmp_path / "q.db", retry_after=0.4, middleware=middleware())
    runs: list[int] = []

    @dramatiq.actor(broker=broker)
    def long() -> None:
        runs.append(1)
        first = row(broker)["lease_until"]
        eventually(lambda: row(broker)["lease_until"] > first + 800, because="the lease was extended over twice its length")

    long.send()
    with working(broker, threads=2):
        broker.join("default", timeout=20_000)
    assert runs == [1]
    broker.close()
