"""Timers and deadlines with real worker processes, restarted and killed; no sweep runs (TIMER-1, EXPIRE-1, C31, C37)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.waiting import eventually

APP = "tests.processes.timer_app"


@pytest.fixture(params=["sqlite", "redis"])
def timed(request: pytest.FixtureRequest, make_field: Callable[..., Field], sqlite_path: Path) -> Field:
    """On one SQLite file, and on Redis in front of PostgreSQL."""
    if request.param == "sqlite":
        return make_field(f"sqlite:///{sqlite_path}", app=APP)
    return make_field(request.getfixturevalue("postgres_url"), redis=request.getfixturevalue("redis_url"), app=APP)


def count(field: Field, what: str) -> int:
    return field.count(f"SELECT COUNT(*) FROM {what}")


def come_due(field: Field) -> None:
    """Every moment that rows and messages name is now."""
    now = field.operator.store.clock.now()
    field.sql("UPDATE {waits} SET due_at = ? WHERE due_at IS NOT NULL", now)
    field.sql("UPDATE {flow_runs} SET expires_at = ? WHERE expires_at IS NOT NULL", now)
    field.sql("UPDATE {flow_runs} SET timer_at = ? WHERE timer_at IS NOT NULL", now)
    field.sql("UPDATE {messages} SET available_at = ? WHERE state = 1", now)


def test_moments_come_by_themselves_and_outlive_restarts(timed: Field, effects: EffectLog) -> None:
    """TIMER-1: ten runs nap three times, in two workers, both of which are stopped meanwhile."""
    workers = [timed.worker(threads=2) for _ in range(2)]
    runs = timed.send_many(10, "naps", "n", 0.5, 3)
    eventually(lambda: count(timed, "{waits} WHERE status = 'consumed'") >= 5)
    workers[0].terminate()
    workers[1].terminate()
    timed.worker(threads=2)
    for run in runs:
        timed.wait_ended(run)
    assert effects.count("note") == 30
    assert count(timed, "{waits} WHERE status = 'consumed'") == 30


def test_what_came_due_while_no_worker_was_there_happens_once(timed: Field, effects: EffectLog, gates: Gates) -> None:
    """C37: parked by workers that are killed; the moments pass; a new worker finds a nap, a timeout and an overdue run."""
    worker = timed.worker(threads=2)
    nap, wait, doom = timed.send("naps", "nap", 600, 1), timed.send("patient", "wait", 600), timed.send("doomed", "doom")
    eventually(lambda: count(timed, "{waits} WHERE status = 'waiting'") == 3)
    worker.kill()
    come_due(timed)
    gates.open("timed-out-wait")
    timed.worker(threads=2)
    for run in (nap, wait):
        timed.wait_ended(run)
    timed.wait_ended(doom, "expired")
    assert sorted((entry["effect"], entry["name"]) for entry in effects if not entry["effect"].endswith("ended")) == [
        ("note", "doom"), ("note", "nap 0"), ("note", "wait"), ("unnote", "doom"),
    ]  # fmt: skip


@pytest.mark.claims_alone
def test_a_worker_that_is_killed_between_a_timeout_and_its_drive_loses_nothing(
    make_field: Callable[..., Field], sqlite_path: Path, effects: EffectLog, gates: Gates
) -> None:
    """TIMER-1, DRIVE-2: the wait has ended, the message at hand has become the drive's, and comes back."""
    field = make_field(f"sqlite:///{sqlite_path}", app=APP)
    field.set(retry_after=1)
    run = field.send("patient", "gate", 0.1)
    worker = field.worker(threads=1)
    gates.wait_reached("timed-out-gate")
    assert count(field, "{waits} WHERE status = 'timed_out'") == 1
    worker.kill()
    gates.open("timed-out-gate")
    gates.open("note-gate")
    field.worker(threads=1)
    field.wait_ended(run)
    assert effects.count("note") == 1
    assert [event.type for event in field.run(run).events or []].count("signal.timed_out") == 1


def test_a_cancelled_runs_timer_that_comes_due_finds_it_cancelled(timed: Field, effects: EffectLog) -> None:
    """C31: due in the same second; acknowledged without effect, and nothing is left in the queue."""
    timed.worker(threads=2)
    run, other = timed.send("naps", "nap", 600, 1), timed.send("naps", "other", 600, 1)
    eventually(lambda: count(timed, "{waits} WHERE status = 'waiting'") == 2)
    timed.done("cancel", run, "--keep")
    come_due(timed)
    timed.wait_ended(other)
    assert timed.run(run).status == "cancelled"
    assert count(timed, "{waits} WHERE status = 'cancelled'") == 1
    assert {entry["name"] for entry in effects} == {"other 0"}
    eventually(lambda: count(timed, "{messages} WHERE state <> 3") == 0)


def test_a_race_between_the_last_step_and_the_deadline_ends_in_one_of_both(timed: Field, effects: EffectLog) -> None:
    """C38: two hundred runs whose signal and deadline come in the same moments; each completes, or expires and is undone, never both."""
    timed.worker(threads=4)
    runs = timed.send_many(200, "doomed", "d")
    eventually(lambda: count(timed, "{waits} WHERE status = 'waiting'") == 200)
    now = timed.operator.store.clock.now()
    for number, run in enumerate(runs):
        timed.sql("UPDATE {flow_runs} SET expires_at = ? WHERE id = ?", now + 3 * number, run)
    code = f"from dramatiq_saga import get_flow\nimport {APP}\nfor run in {runs!r}: get_flow(run).signal_if_running('go')"
    signals = timed._python_process("-c", code, env=timed.env)
    sweeps: list[Any] = []

    def swept() -> bool:
        sweeps.append(timed.done("sweep")["monitor"]["errors"])
        return count(timed, "{flow_runs} WHERE ended_at IS NULL") == 0

    eventually(swept, interval=0.1)
    signals.wait()
    assert not any(sweeps)
    expired = count(timed, "{flow_runs} WHERE status = 'expired' AND rollback = 'done'")
    completed = count(timed, "{flow_runs} WHERE status = 'completed' AND rollback = 'none'")
    assert expired + completed == 200
    assert effects.count("unnote") == expired
    assert count(timed, "{flow_events} WHERE type = 'flow.expired'") == expired
    assert count(timed, "{flow_events} WHERE type = 'flow.completed'") == completed
