"""What is lost comes back, with real workers that are really killed (RECLAIM, CLAIM-2, DOCTOR-1, KICK-1)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.processes import Process
from tests.support.servers import flush_redis
from tests.support.waiting import eventually

HOUR_MS = 3_600_000


def killed_at_work(field: Field, gates: Gates, **kwargs: Any) -> str:
    """A run whose only step was claimed by a worker that has been killed; the gate that it stood at is open now."""
    run = field.send("job", "gate", **kwargs)
    worker = field.worker(threads=1)
    gates.wait_reached("work-gate")
    worker.kill()
    gates.open("work-gate")
    assert field.step(run).row.status == "running"
    return run


# --- reclaim, without and with a doctor ------------------------------------------------------------------------------


@pytest.mark.claims_alone
def test_a_killed_workers_step_is_reclaimed_without_any_doctor(field: Field, effects: EffectLog, gates: Gates) -> None:
    """CLAIM-2, RECLAIM-3: the redelivered message loses its claim, is put back until the deadline, and then wins it."""
    field.set(retry_after=1)
    run = killed_at_work(field, gates, reclaim=3600)
    worker = field.worker(threads=1)
    worker.wait_for_output("claim_lost")
    assert "orphaned=True" in worker.output()
    deadline = field.step(run).row.reclaim_stale_at
    due = "SELECT available_at FROM {messages} WHERE state = 1"
    eventually(lambda: field.count(due) > 0, because="the message is put back")
    assert deadline is not None
    assert 0 <= field.count(due) - deadline < 1000
    now = field.operator.store.clock.now()
    field.sql("UPDATE {action_runs} SET reclaim_stale_at = ?", now)  # an hour later
    field.sql("UPDATE {messages} SET available_at = ?", now)
    field.wait_ended(run)
    assert field.step(run).row.attempts == 2
    assert effects.names() == ["work", "work", "work ended"]


def test_a_killed_workers_step_whose_message_is_lost_is_reclaimed_by_a_sweep(
    field: Field, effects: EffectLog, gates: Gates
) -> None:
    """R3 of DOCTOR-1."""
    field.settings(repair__enabled=True)
    run = killed_at_work(field, gates, reclaim=1)
    field.sql("DELETE FROM {messages}")
    worker = field.worker(threads=1)
    eventually(lambda: field.done("sweep")["repair"]["reclaims"] == 1, interval=0.2)
    field.wait_ended(run)
    assert worker.running
    assert effects.count("work") == 2
    assert [event.detail for event in field.run(run).events or [] if event.type == "action.redispatched"] == [
        "R3: its reclaim deadline has passed"
    ]


def test_a_killed_workers_step_whose_message_is_lost_is_reclaimed_by_a_kick(
    field: Field, effects: EffectLog, gates: Gates
) -> None:
    """RECLAIM-3, KICK-1: with repair off, an operator; and not before the deadline."""
    run = killed_at_work(field, gates, reclaim=3600)
    field.sql("DELETE FROM {messages}")
    field.worker(threads=1)
    early = field.done("kick", run)
    assert (early["sent"], early["left"][0]["why"]) == ([], "it is running, and its reclaim deadline has not passed")
    field.sql("UPDATE {action_runs} SET reclaim_stale_at = ? WHERE run_id = ?", 1, run)
    assert [row["sequence"] for row in field.done("kick", run)["sent"]] == [1]
    field.wait_ended(run)
    assert effects.count("work") == 2


@pytest.mark.claims_alone
def test_without_reclaim_a_killed_workers_step_is_never_run_again(field: Field, effects: EffectLog, gates: Gates) -> None:
    """C20, RECLAIM-1, RECLAIM-4: never silently. A redelivery, a sweep and a kick leave the row alone, and sweeps count it."""
    field.settings(repair__enabled=True, repair__grace_seconds=0, repair__backoff__base_seconds=1)
    field.set(retry_after=1)
    run = killed_at_work(field, gates)
    worker = field.worker(threads=1)
    worker.wait_for_output("claim_lost")
    eventually(lambda: field.count("SELECT COUNT(*) FROM {messages}") == 0, because="the orphaned message is acknowledged")
    assert field.done("sweep")["never_reclaimed"] == 0
    field.sql("UPDATE {action_runs} SET started_at = started_at - ? WHERE run_id = ?", HOUR_MS, run)
    swept = field.command("sweep")
    assert swept.stdout == (
        "sweep: no held run was due; repair: nothing was lost; 1 row running for over an hour that nothing will ever reclaim\n"
    )
    kicked = field.done("kick", run)
    assert (kicked["sent"], "reclaim is off" in kicked["left"][0]["why"]) == ([], True)
    eventually(lambda: field.count("SELECT COUNT(*) FROM {messages}") == 0, because="the kick's drive is done")
    assert (field.run(run).status, field.step(run).row.status, field.step(run).row.attempts) == ("running", "running", 1)
    assert effects.names() == ["work"]
    assert field.command("cancel", run, "--keep").returncode == 0


def test_a_killed_workers_undo_is_reclaimed_and_the_rollback_finishes(field: Field, effects: EffectLog, gates: Gates) -> None:
    """CLAIM-2 for compensations, C28: the undo is tried again under its own count, and nothing is undone twice."""
    field.set(retry_after=1)
    run = field.send("job", "a", "gate", "gate2", reclaim=2)
    gates.open("work-gate")
    first = field.worker(threads=1)
    gates.wait_reached("work-gate2")
    assert field.command("cancel", run, "--compensate").returncode == 0
    gates.open("work-gate2")
    gates.wait_reached("undo-gate")
    first.kill()
    gates.open("undo-gate")
    field.worker(threads=1)
    field.wait_ended(run, "cancelled")
    assert field.run(run).rollback == "done"
    undone = [(entry["effect"], entry["name"]) for entry in effects if entry["effect"].startswith("undo")]
    assert undone == [("undo", "gate"), ("undo", "gate"), ("undo ended", "gate"), ("undo", "a"), ("undo ended", "a")]


# --- staged deployments ----------------------------------------------------------------------------------------------


def test_a_step_whose_actor_is_deployed_later_runs_then(field: Field, effects: EffectLog) -> None:
    """C11, NATIVE-3: with repair on, an actor that no worker knows yet is waited for, and the doctor tries again."""
    field.settings(
        repair__enabled=True, repair__grace_seconds=0, repair__backoff__base_seconds=0.2, repair__backoff__max_seconds=1
    )
    run = field.send("errand", "x")
    field.worker(threads=1, queues=["default"])
    partial = field.worker(threads=1, queues=["late"], env={"RECOVERY_APP_WITHOUT": "late"})
    partial.wait_for_output("actor_unknown")
    assert (field.run(run).status, field.step(run, 2).row.status) == ("running", "pending")
    assert "late" in field.command("queues").stdout
    partial.terminate()
    field.worker(threads=1, queues=["late"])
    eventually(lambda: field.done("sweep")["repair"]["steps"] == 1, interval=0.1)
    field.wait_ended(run)
    assert effects.names() == ["work", "work ended", "late", "late ended"]


# --- a locked file ---------------------------------------------------------------------------------------------------


def test_a_file_that_a_backup_has_locked_costs_no_claim_and_no_run(
    field: Field, effects: EffectLog, gates: Gates, python_process: Callable[..., Process], sqlite_path: Path
) -> None:
    """C41: longer than the busy timeout. A start raises to its caller, a sweep ends with one line, healthy work is not reclaimed."""
    field.settings(repair__enabled=True)
    field.set(retry_after=3)
    run = field.send("job", "gate", "after", reclaim=600)
    lost = field.send("job", "lost")
    field.sql("DELETE FROM {messages} WHERE id = (SELECT MAX(id) FROM {messages})")
    field.sql("UPDATE {flow_runs} SET woken_at = 1 WHERE id = ?", lost)
    worker = field.worker(threads=1)
    gates.wait_reached("work-gate")
    backup = python_process("-m", "tests.support.lock_holder", str(sqlite_path), "EXCLUSIVE")
    gates.wait_reached("locked")
    gates.open("work-gate")  # its outcome has to wait for the file
    commands = [field.start("send", "job", "--args", '["late"]'), field.start("sweep")]
    for command in commands:
        assert command.wait() == 1
        assert "Traceback" not in command.output()
        assert "locked" in command.output()
    gates.open("locked")
    assert backup.wait() == 0
    field.wait_ended(run)
    assert worker.running
    assert effects.names() == ["work", "work ended", "work", "work ended"]
    assert field.step(run).row.attempts == 1
    assert {run.id for run in field.operator.list_runs()} == {run, lost}
    assert field.done("sweep")["repair"]["runs"] == 1
    field.wait_ended(lost)


# --- deployments and dying pools -------------------------------------------------------------------------------------


def test_steps_that_a_dying_pool_cut_off_run_again_and_every_run_finishes(
    field: Field, effects: EffectLog, gates: Gates
) -> None:
    """C44: one of four processes is killed, Dramatiq stops the rest; what was cut off is reclaimed, and no try is spent by it."""
    field.set(retry_after=2)
    runs = field.send_many(8, "job", "gate", reclaim=3)
    alone = {"dramatiq_queue_prefetch": "2"}  # nobody holds what another could run
    pool = field.worker(processes=4, threads=2, arguments=["--worker-shutdown-timeout", "500"], env=alone)
    eventually(lambda: effects.count("work") >= 8)
    os.kill(effects.entries("work")[0]["pid"], signal.SIGKILL)
    pool.wait()
    gates.open("work-gate")
    field.worker(processes=2, threads=2)
    for run in runs:
        field.wait_ended(run)
    reports = [field.step(run) for run in runs]
    assert all(report.row.tries == 0 for report in reports)
    assert {report.row.status for report in reports} == {"completed"}


def test_steps_that_outlive_a_deployment_lose_no_try_and_run_once_more(field: Field, effects: EffectLog, gates: Gates) -> None:
    """C44: SIGTERM with a step longer than the grace period; max_retries=0 is no reason to fail it."""
    field.set(retry_after=1)
    run = field.send("job", "gate", reclaim=2)
    old = field.worker(threads=1, arguments=["--worker-shutdown-timeout", "200"])
    gates.wait_reached("work-gate")
    old.terminate()
    gates.open("work-gate")
    field.worker(threads=1)
    field.wait_ended(run)
    step = field.step(run)
    assert (step.row.attempts, step.row.tries) == (2, 0)
    assert effects.count("work") == 2


# --- queue and store apart -------------------------------------------------------------------------------------------


def test_a_queue_that_lost_everything_is_made_good_by_sweeps(
    postgres_url: str, redis_url: str, make_field: Callable[..., Field], effects: EffectLog
) -> None:
    """DOCTOR-1, DRIVE-3: rows in PostgreSQL, messages in a Redis that has been emptied."""
    field = make_field(postgres_url, redis=redis_url)
    field.settings(repair__enabled=True, repair__grace_seconds=0.1, repair__backoff__base_seconds=0.1)
    server = redis.Redis.from_url(redis_url)
    try:
        run = field.send("job", "a", "b")
        assert server.hlen("dramatiq:default.msgs") == 1
        flush_redis(server)
        eventually(lambda: field.done("sweep")["repair"]["runs"] == 1, interval=0.1)
    finally:
        server.close()
    field.worker(threads=1)
    field.wait_ended(run)
    assert effects.names() == ["work", "work ended", "work", "work ended"]
