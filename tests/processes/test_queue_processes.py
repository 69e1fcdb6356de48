"""The SQLite queue under real worker processes, real kills and real locks."""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.errors import StoreError
from tests.support.brokers import middleware, recording, row, rows, working
from tests.support.effects import EffectLog
from tests.support.gates import Gates
from tests.support.waiting import eventually

APP = "tests.processes.queue_app"
PATH, RETRY_AFTER, WAKE_BY = "QUEUE_APP_PATH", "QUEUE_APP_RETRY_AFTER", "QUEUE_APP_WAKE_BY"
READY, RESERVED = 0, 2


@pytest.fixture(autouse=True)
def app_path(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, str(sqlite_path))


@pytest.fixture
def sender(sqlite_path: Path) -> Iterator[SQLiteBroker]:
    """The same queue, seen from this process, which runs no worker."""
    broker = SQLiteBroker(sqlite_path, middleware=middleware())
    broker.declare_queue("default")
    yield broker
    broker.close()


def send(broker: SQLiteBroker, actor: str, *args: Any) -> None:
    broker.enqueue(dramatiq.Message(queue_name="default", actor_name=actor, args=args, kwargs={}, options={}))


def test_a_message_of_a_killed_worker_is_run_by_another(
    sender: SQLiteBroker, worker_process: Callable[..., Any], effects: EffectLog, gates: Gates
) -> None:
    """QUEUE-6: a dead worker's messages come back soon after; C04: the row stays until it is acknowledged."""
    short = {RETRY_AFTER: "1"}
    send(sender, "stand", "gate")
    first = worker_process(APP, threads=1, env=short)
    gates.wait_reached("gate")
    first.kill()
    assert row(sender)["state"] == RESERVED
    worker_process(APP, threads=1, env=short)
    gates.wait_reached("gate", times=2)
    assert row(sender)["attempts"] == 2
    gates.open("gate")
    eventually(lambda: rows(sender) == [])
    assert effects.names() == ["began", "began", "ended"]


def test_a_live_workers_long_message_is_not_taken_by_another(
    sender: SQLiteBroker, worker_process: Callable[..., Any], effects: EffectLog, gates: Gates
) -> None:
    """QUEUE-6: the lease is extended while the thread lives, over many times its length."""
    send(sender, "stand", "gate")
    worker_process(APP, processes=2, threads=1, env={RETRY_AFTER: "0.5"})
    gates.wait_reached("gate")
    before = row(sender)["lease_until"]
    eventually(lambda: row(sender)["lease_until"] > before + 1500, because="three leases have gone by")
    assert (row(sender)["attempts"], effects.names()) == (1, ["began"])
    gates.open("gate")
    eventually(lambda: rows(sender) == [])
    assert effects.names() == ["began", "ended"]


def test_the_straggler_of_a_redelivered_message_deletes_nothing(
    sender: SQLiteBroker, worker_process: Callable[..., Any], effects: EffectLog, gates: Gates
) -> None:
    """C01: a step keeps the interpreter busy for longer than the lease, so nothing can be extended; its message is delivered
    again while it runs. Its late acknowledgement must not take the second delivery's row."""
    send(sender, "hog", 3)
    first = worker_process(APP, threads=1, env={RETRY_AFTER: "1"})
    eventually(lambda: effects.count("hog") == 1)
    worker_process(APP, threads=1, env={RETRY_AFTER: "1"})
    gates.wait_reached("second")
    eventually(lambda: effects.count("hog ended", first=True) == 1)
    first.wait_for_output("came too late")
    assert (row(sender)["state"], row(sender)["attempts"]) == (RESERVED, 2)
    gates.open("second")
    eventually(lambda: rows(sender) == [])


def test_prefetched_messages_of_a_terminated_worker_are_given_back(
    sender: SQLiteBroker, worker_process: Callable[..., Any], effects: EffectLog, gates: Gates
) -> None:
    """QUEUE-7: at once and uncounted, not after their lease."""
    for name in ("gate", "b", "c", "d"):
        send(sender, "stand", name)
    worker = worker_process(APP, threads=1)
    gates.wait_reached("gate")
    eventually(lambda: sum(one["state"] == RESERVED for one in rows(sender)) == 2, because="one runs, one is prefetched")
    worker.send(signal.SIGTERM)
    eventually(
        lambda: sum(one["state"] == READY for one in rows(sender)) == 3, because="it was given back while the other runs"
    )
    worker.wait_for_output("Shutting down...")
    gates.open("gate")
    assert worker.wait() == 0
    assert [(one["state"], one["attempts"]) for one in rows(sender)] == [(READY, 0)] * 3
    assert effects.names() == ["began", "ended"]


def test_eight_processes_never_run_one_message_twice(sqlite_path: Path, python_process: Callable[..., Any]) -> None:
    """C04: half of the winners are killed right after their reservation; the message is neither lost nor run twice."""
    storm = python_process("-m", "tests.processes.queue_storm", str(sqlite_path), "8")
    assert storm.wait(90) == 0
    told = [json.loads(line) for line in storm.output().splitlines()]
    assert len(told) == 8
    for one in told:
        assert one["told"] == (["r1", "r2", "e2"] if one["killed"] else ["r1", "e1"]), one
        assert one["left"] == 0


def test_a_long_lock_costs_no_lease_and_no_start(
    tmp_path: Path, python_process: Callable[..., Any], gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    """C41, scaled: another process holds the file's lock for longer than the busy timeout and several extension intervals,
    while a step runs and a delayed message comes due."""
    import peewee

    path = tmp_path / "queue.db"
    database = peewee.SqliteDatabase(str(path), timeout=0.1)
    broker = SQLiteBroker(database, retry_after=8, extend_every=0.2, middleware=middleware())
    dramatiq.set_broker(broker)
    note, seen = recording(broker)
    runs: list[int] = []

    @dramatiq.actor(broker=broker)
    def healthy() -> None:
        runs.append(1)
        Gates(gates.directory).reach("step")

    healthy.send()
    with working(broker, threads=2):
        gates.wait_reached("step")
        note.send_with_options(args=("due",), delay=200)
        holder = python_process("-m", "tests.support.lock_holder", str(path), "EXCLUSIVE")
        gates.wait_reached("locked")
        eventually(lambda: "Could not extend" in caplog.text, because="an extension was refused")
        eventually(lambda: "refused to reserve" in caplog.text, because="a reservation was refused")
        with pytest.raises(StoreError):
            note.send("refused: raised to its caller")
        gates.open("locked")
        assert holder.wait() == 0
        eventually(lambda: seen == ["due"])
        before = rows(broker)[0]["lease_until"]
        eventually(lambda: rows(broker)[0]["lease_until"] > before, because="the lease is extended again")
        assert rows(broker)[0]["attempts"] == 1
        gates.open("step")
        broker.join("default", timeout=20_000)
    assert (runs, seen) == ([1], ["due"])
    broker.close()


@pytest.mark.parametrize("how", ["bell", "polling"])
def test_an_idle_worker_notices_what_another_process_sends(
    sender: SQLiteBroker, worker_process: Callable[..., Any], effects: EffectLog, how: str
) -> None:
    """Each way by itself: nothing else would wake this worker within the hour."""
    if how == "bell" and sys.platform != "linux":
        pytest.skip("the bell rings on Linux only")
    worker_process(APP, threads=1, env={WAKE_BY: how})
    for number in range(3):
        send(sender, "note", f"message {number}")
        eventually(lambda number=number: effects.count("note", name=f"message {number}") == 1)


def test_a_forked_child_sends_and_consumes_with_connections_of_its_own(
    sender: SQLiteBroker, python_process: Callable[..., Any]
) -> None:
    """The parent's deliveries and threads stay the parent's."""
    child = python_process("-m", "tests.processes.queue_fork")
    assert child.wait() == 0, child.output()
    assert rows(sender) == []


def test_workers_of_one_queue_share_its_messages(
    sender: SQLiteBroker, worker_process: Callable[..., Any], effects: EffectLog
) -> None:
    """Nothing is run twice and nothing is left, whoever gets what."""
    worker_process(APP, processes=2, threads=4)
    names = [str(number) for number in range(200)]
    for name in names:
        send(sender, "note", name)
    eventually(lambda: effects.count("note") >= 200)
    eventually(lambda: rows(sender) == [])
    assert sorted(entry["name"] for entry in effects) == sorted(names)


def test_the_table_is_sound_after_all_this(sender: SQLiteBroker, sqlite_path: Path, worker_process: Callable[..., Any]) -> None:
    """A worker killed in the middle of a stream of messages leaves a file that SQLite calls sound, and loses nothing."""
    worker = worker_process(APP, threads=4, env={RETRY_AFTER: "1"})
    for number in range(100):
        send(sender, "note", str(number))
    worker.kill()
    connection = sqlite3.connect(sqlite_path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    worker_process(APP, threads=4, env={RETRY_AFTER: "1"})
    eventually(lambda: rows(sender) == [])
