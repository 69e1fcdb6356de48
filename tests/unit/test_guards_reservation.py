"""The reservation guard of the SQLite broker (QUEUE-3). The cases are listed in ``tests/conformance/broker/ACCEPTANCE.md``."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import peewee
import pytest

from dramatiq_saga.brokers import reservations
from dramatiq_saga.errors import DatabaseUnusableError, StoreError, WriteUnknownError
from tests.support.brokers import recording, row, rows, take, working
from tests.support.faults import BUSY, FULL, IOERR_WRITE, READONLY
from tests.support.gates import Gates
from tests.support.waiting import eventually
from tests.unit.guards import Guarded

READY, RESERVED = 0, 2


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with Guarded(tmp_path / "queue.db") as guarded:
        yield guarded


def untouched(guarded: Guarded) -> None:
    only = row(guarded.broker)
    assert (only["state"], only["attempts"], only["reserved_at"], only["lease_until"]) == (READY, 0, None, None)


@pytest.mark.parametrize(
    ("statement", "containing"), [("BEGIN IMMEDIATE", ""), ("UPDATE", "SET state = 0, lease"), ("UPDATE", "SET state = 2")]
)
@pytest.mark.parametrize("code", [5, 6, 261, 262, 517, 773])
def test_a_refused_reservation_changes_nothing_and_the_next_look_takes_the_same_row(
    guarded: Guarded, statement: str, containing: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """R1: writer busy at BEGIN or at the write, root proven rolled back: row unclaimed, attempts unchanged, nothing failed,
    reported, backoff, next poll takes the same row."""
    guarded.send()
    consumer = guarded.consumer()
    guarded.faults.arm(statement, code, containing=containing)
    assert next(consumer) is None
    untouched(guarded)
    assert "no attempt was spent" in caplog.text
    assert take(consumer).reservation.attempt == 1


def test_a_refusal_is_reported_once_per_episode_and_its_end_too(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    """R1: reported."""
    caplog.set_level("INFO")
    guarded.send()
    consumer = guarded.consumer()
    for _ in range(2):
        guarded.faults.arm("BEGIN IMMEDIATE", times=3)
        for _ in range(3):
            assert next(consumer) is None
        consumer.requeue([take(consumer)])
        consumer._arrived = True
    assert caplog.text.count("refused to reserve") == 2
    assert caplog.text.count("work again after 3 refusals") == 2


def test_refused_reservations_back_off(guarded: Guarded) -> None:
    """R1: backoff."""
    consumer = guarded.consumer()

    def longest(misses: int) -> float:
        consumer._misses = misses
        return max(consumer._backoff() for _ in range(50))

    assert longest(1) <= 0.02 < longest(4) < longest(6) < longest(30) <= 1.0


def test_a_row_survives_any_number_of_refusals(guarded: Guarded) -> None:
    """R2: exhausted claim races leave the original row available."""
    guarded.send()
    consumer = guarded.consumer()
    guarded.faults.arm("UPDATE", times=12, containing="SET state = 2")
    for _ in range(12):
        consumer._misses = 0
        assert next(consumer) is None
    untouched(guarded)
    assert take(consumer).reservation.attempt == 1


def test_a_lock_held_by_another_process_costs_the_message_nothing(
    guarded: Guarded, python_process: Callable[..., Any], gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    """R1, with a real lock."""
    guarded.send()
    consumer = guarded.consumer()
    holder = python_process("-m", "tests.support.lock_holder", str(guarded.path))
    gates.wait_reached("locked")
    assert next(consumer) is None
    assert next(consumer) is None
    untouched(guarded)
    gates.open("locked")
    assert holder.wait() == 0
    assert eventually(lambda: next(consumer)).reservation.attempt == 1
    assert caplog.text.count("refused to reserve") == 1


@pytest.mark.parametrize("code", [FULL, IOERR_WRITE, READONLY])
def test_a_broken_disk_is_not_taken_for_contention(guarded: Guarded, code: int) -> None:
    """R3: disk full / read-only / I/O: row untouched, reported, not retried as contention. Raised once: Dramatiq reports it,
    closes the consumer and makes a new one after its pause."""
    guarded.send()
    consumer = guarded.consumer()
    guarded.faults.arm("UPDATE", code, containing="SET state = 2")
    with pytest.raises((StoreError, DatabaseUnusableError), match="UPDATE"):
        next(consumer)
    assert sum(1 for sql in guarded.faults.statements if "SET state = 2" in sql) == 1
    untouched(guarded)
    assert take(consumer).reservation.attempt == 1


def test_a_file_that_became_read_only_leaves_the_row_alone(guarded: Guarded) -> None:
    """R3, with SQLite's own refusal."""
    guarded.send()
    consumer = guarded.consumer()
    guarded.broker.store.submit(lambda tx: None).result()
    guarded.broker.store._control(lambda: guarded.database.execute_sql("PRAGMA query_only = on"))
    with pytest.raises((peewee.DatabaseError, StoreError)) as refused:
        next(consumer)
    assert "readonly" in str(refused.value)
    untouched(guarded)
    guarded.broker.store._control(lambda: guarded.database.execute_sql("PRAGMA query_only = off"))
    assert take(consumer).reservation.attempt == 1


def test_a_full_disk_leaves_the_row_alone(guarded: Guarded) -> None:
    """R3, with SQLite's own refusal: the page limit is reached inside the reservation."""
    guarded.send()
    consumer = guarded.consumer()
    store, database = guarded.broker.store, guarded.database

    def fill_up() -> None:
        database.execute_sql(
            "CREATE TEMP TRIGGER boom BEFORE UPDATE ON saga_messages BEGIN"
            " INSERT INTO saga_results (id, value, expires_at) VALUES ('big', zeroblob(900000), 0); END"
        )
        (pages,) = database.execute_sql("PRAGMA page_count").fetchone()
        database.execute_sql(f"PRAGMA max_page_count = {pages}")

    store._control(fill_up)
    with pytest.raises((peewee.DatabaseError, StoreError)):
        next(consumer)
    only = sqlite3.connect(guarded.path).execute("SELECT state, attempts FROM saga_messages").fetchall()
    assert only == [(READY, 0)]


@pytest.mark.parametrize("executed", [False, True], ids=["rolled back", "durable"])
def test_a_reservation_whose_commit_failed_delivers_nothing_and_its_lease_recovers_it(guarded: Guarded, executed: bool) -> None:
    """R4: COMMIT failure: nothing delivered, no retry; lease expiry recovers whatever became durable."""
    guarded.send()
    consumer = guarded.consumer()
    guarded.faults.arm("COMMIT", BUSY, executed=executed)
    with pytest.raises(WriteUnknownError):
        next(consumer)
    assert sum(1 for sql in guarded.faults.statements if "SET state = 2" in sql) == 1
    assert row(guarded.broker)["state"] == (RESERVED if executed else READY)
    assert not consumer.held
    guarded.clock.advance(60)
    assert take(guarded.consumer()).reservation.attempt == (2 if executed else 1)


def test_a_rollback_that_fails_is_no_proof(guarded: Guarded) -> None:
    """R4: "finished root rollback": without it the ordinary handling stands."""
    guarded.send()
    consumer = guarded.consumer()
    guarded.faults.arm("UPDATE", BUSY, containing="SET state = 2")
    guarded.faults.arm("ROLLBACK", IOERR_WRITE)
    with pytest.raises(WriteUnknownError):
        next(consumer)
    untouched(guarded)


def test_a_replaced_connection_is_no_proof(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: the guard checks the connection."""
    guarded.send()
    consumer = guarded.consumer()
    real = reservations.reserve

    def replaced(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        guarded.database.dispose()
        raise peewee.OperationalError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(reservations, "reserve", replaced)
        with pytest.raises(WriteUnknownError):
            next(consumer)
    guarded.clock.advance(60)
    assert take(guarded.consumer()) is not None


def test_the_writer_is_taken_before_anything_is_read(guarded: Guarded) -> None:
    """E3: a stale snapshot cannot be upgraded, so no reservation ever begins as a reader."""
    guarded.send()
    consumer = guarded.consumer()
    take(consumer)
    statements = guarded.faults.statements
    position = next(number for number, sql in enumerate(statements) if "SET state = 2" in sql)
    begins = [sql for sql in statements[:position] if sql.startswith("BEGIN")]
    assert begins[-1] == "BEGIN IMMEDIATE"
    assert not [sql for sql in statements[:position] if sql.startswith("SELECT") and "saga_messages" in sql]


def test_a_failing_handler_keeps_its_normal_handling(guarded: Guarded) -> None:
    """R8: handler failure and domain failure keep their normal handling: tries are counted, then the message is given up."""
    broker = guarded.broker

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1, max_backoff=1)
    def fail() -> None:
        raise ValueError("domain")

    fail.send()
    consumer = guarded.consumer()
    for attempt in (1, 2):
        guarded.clock.advance(1)
        proxy = take(consumer)
        assert proxy.reservation.attempt == attempt
        broker.emit_before("process_message", proxy)
        error = ValueError("domain")
        proxy.stuff_exception(error)
        broker.emit_after("process_message", proxy, exception=error)
        (consumer.nack if proxy.failed else consumer.ack)(proxy)
    assert next(consumer) is None
    assert [letter.reason.splitlines()[0] for letter in broker.dead_letters()] == ["ValueError: domain"]


def test_a_dead_letter_is_not_started_again_by_the_guard(guarded: Guarded) -> None:
    """R8: a failed saga is never restarted by the guard: what was given up stays so through refusals and lapses."""
    broker = guarded.broker
    consumer, proxy = guarded.delivered()
    proxy.fail()
    consumer.nack(proxy)
    guarded.faults.arm("BEGIN IMMEDIATE", times=2)
    for _ in range(4):
        guarded.clock.advance(120)
        consumer._arrived = True
        assert next(consumer) is None
    assert [one["state"] for one in rows(broker)] == [3]


def test_a_memory_database_is_guarded_too(tmp_path: Path) -> None:
    """R1: the guard does not depend on a file."""
    guarded = Guarded(Path(":memory:"))
    try:
        guarded.send()
        consumer = guarded.consumer()
        guarded.faults.arm("UPDATE", BUSY, containing="SET state = 2")
        assert next(consumer) is None
        assert take(consumer).reservation.attempt == 1
    finally:
        guarded.broker.close()


def test_dramatiq_workers_go_on_after_a_refusal(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    """R1, end to end: the consumer thread does not fall over, so Dramatiq does not pause for three seconds."""
    actor, seen = recording(guarded.broker)
    actor.send("x")
    guarded.faults.arm("UPDATE", BUSY, containing="SET state = 2", times=3)
    with working(guarded.broker, threads=1, worker_timeout=50):
        eventually(lambda: seen == ["x"])
    assert "refused to reserve" in caplog.text
    assert "Consumer encountered" not in caplog.text
