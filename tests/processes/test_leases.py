"""Leases, with real workers that are really killed or stopped (RECLAIM-5): nothing of what follows needs a sweep or a window."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.processes import Process
from tests.support.waiting import eventually


@pytest.fixture(params=["sqlite", "postgresql"])
def leased(
    request: pytest.FixtureRequest, make_field: Callable[..., Field], sqlite_path: Path, effects: EffectLog, gates: Gates
) -> Field:
    """An application whose workers have leases of two seconds; its messages are delivered again after one. Reclaim and repair are off."""
    address = f"sqlite:///{sqlite_path}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    field = make_field(address)
    field.settings(reclaim__dead_workers__enabled=True, reclaim__dead_workers__lease_seconds=2)
    field.set(retry_after=1)
    return field


#: Runs a command under process ids of its own, as a container does.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child"]


def known(field: Field) -> set[tuple[str, str, int]]:
    """Id, host and process id of every worker that has a row."""
    return set(field.operator.store.read(lambda tx: tx.all("SELECT id, host, pid FROM {workers}")))


def heartbeats(field: Field) -> int:
    return field.count("SELECT COUNT(*) FROM {workers}")


def stop(field: Field, process: Process) -> None:
    """Stop a worker and its processes where they are in no transaction: nobody else would get past what one has locked."""
    store = field.operator.store
    tables = (store.prefix.replace("_", r"\_") + "%",)

    def stopped() -> bool:
        os.killpg(process.pid, signal.SIGSTOP)
        if store.dialect != "postgresql" or not store.read(lambda tx: tx.all(LOCKED, tables)):
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return False

    eventually(stopped, because="the worker is in no transaction")


LOCKED = "SELECT 1 FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE c.relname LIKE ? AND l.pid <> pg_backend_pid()"


def test_a_killed_workers_step_runs_again_on_another_worker(leased: Field, effects: EffectLog, gates: Gates) -> None:
    """RECLAIM-5, CLAIM-2: kill -9 in the middle of a body; the message alone brings the step back. And an orderly stop leaves no row."""
    run = leased.send("job", "gate")
    victim = leased.worker(threads=1)
    gates.wait_reached("work-gate")
    survivor = leased.worker(threads=1)
    victim.kill()
    gates.open("work-gate")
    leased.wait_ended(run)
    row = leased.step(run).row
    assert (row.attempts, row.reclaim_stale_at) == (2, None)
    assert effects.names() == ["work", "work", "work ended"]
    assert heartbeats(leased) == 2
    assert survivor.terminate() == 0
    assert heartbeats(leased) == 1


@pytest.mark.parametrize("leased", ["sqlite"], indirect=True)
def test_the_step_of_a_killed_worker_that_no_row_remembers_runs_again(leased: Field, effects: EffectLog, gates: Gates) -> None:
    """C10, RECLAIM-5: every trace of it is deleted from ``workers``; the step's own row says whose it was, and that is enough."""
    run = leased.send("job", "gate")
    victim = leased.worker(threads=1)
    gates.wait_reached("work-gate")
    victim.kill()
    assert leased.sql("DELETE FROM {workers}") == 1
    gates.open("work-gate")
    leased.worker(threads=1)
    leased.wait_ended(run)
    assert leased.step(run).row.attempts == 2
    assert effects.names() == ["work", "work", "work ended"]


@pytest.mark.parametrize("leased", ["sqlite"], indirect=True)
def test_a_namesake_of_a_killed_worker_does_not_keep_its_claims_alive(leased: Field, effects: EffectLog, gates: Gates) -> None:
    """C10, RECLAIM-5: a container that is started again has the host name and the process id of the one that was killed in it."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("process ids of one's own (unshare --pid) are not allowed here")
    run = leased.send("job", "gate")
    victim = leased.worker(threads=1, wrapper=CONTAINER)
    gates.wait_reached("work-gate")
    (before,) = known(leased)
    victim.kill()
    namesake = leased.worker(threads=1, wrapper=CONTAINER)
    gates.open("work-gate")
    leased.wait_ended(run)
    assert leased.step(run).row.attempts == 2
    (after,) = known(leased) - {before}
    assert before[1:] == after[1:]
    assert namesake.running


def test_a_living_workers_step_outlives_many_leases(leased: Field, effects: EffectLog, gates: Gates) -> None:
    """RECLAIM-5: a long step needs no tuning; a second delivery of its message loses its claim for as long as the worker beats."""
    leased.settings(reclaim__dead_workers__enabled=True, reclaim__dead_workers__lease_seconds=2, repair__enabled=True)
    run = leased.send("job", "gate")
    leased.worker(threads=1)
    gates.wait_reached("work-gate")
    seen = leased.count("SELECT seen_at FROM {workers}")
    eventually(lambda: leased.count("SELECT seen_at FROM {workers}") > seen + 4_000, because="two leases have gone by")
    swept = leased.done("sweep")
    assert (swept["repair"]["reclaims"], leased.done("kick", run)["sent"]) == (0, [])
    gates.open("work-gate")
    leased.wait_ended(run)
    assert effects.names() == ["work", "work ended"]


def test_a_stopped_worker_that_goes_on_is_refused(leased: Field, effects: EffectLog, gates: Gates) -> None:
    """RECLAIM-5, FENCE-1: another worker has run the step meanwhile; the late outcome is not recorded."""
    run = leased.send("job", "gate")
    paused = leased.worker(threads=1)
    gates.wait_reached("work-gate")
    group: Process = paused
    stop(leased, paused)
    try:
        gates.open("work-gate")
        leased.worker(threads=1)
        leased.wait_ended(run)
        ended = leased.step(run).row
    finally:
        os.killpg(group.pid, signal.SIGCONT)
    paused.wait_for_output("outcome_rejected")
    row = leased.step(run).row
    assert (row.status, row.attempts, row.ended_at) == ("completed", 2, ended.ended_at)
    assert effects.count("work") == 2


@pytest.mark.claims_alone
@pytest.mark.parametrize("leased", ["sqlite"], indirect=True)
def test_a_database_that_nobody_could_reach_for_longer_than_the_lease_kills_nobody(
    leased: Field, effects: EffectLog, gates: Gates, sqlite_path: Path, python_process: Callable[..., Process]
) -> None:
    """RECLAIM-5: the message of a step at work comes to another worker afterwards, and that one waits for the first to be heard from."""
    run = leased.send("job", "gate")
    leased.worker(threads=1, env={"dramatiq_queue_prefetch": "1"})  # it has no room for the message that comes back
    gates.wait_reached("work-gate")
    other = leased.worker(threads=1)
    clock = leased.operator.store.clock
    leased.sql(  # a second delivery that falls due meanwhile: whether the first one lapses, or is extended just in time, is chance
        "INSERT INTO {messages} (queue, state, priority, available_at, attempts, actor, message_id, enqueued_at, message) "
        "SELECT queue, 1, priority, ?, 0, actor, message_id, enqueued_at, message FROM {messages} WHERE state = 2",
        clock.now() + 3_000,
    )
    python_process("-m", "tests.support.lock_holder", str(sqlite_path))
    gates.wait_reached("locked")
    eventually(
        lambda: clock.now() - leased.count("SELECT MAX(seen_at) FROM {workers}") > 2_500, because="nobody has been heard from"
    )
    gates.open("locked")
    other.wait_for_output("claim_lost")
    assert leased.step(run).row.attempts == 1
    gates.open("work-gate")
    leased.wait_ended(run)
    assert leased.step(run).row.attempts == 1
    assert effects.names() == ["work", "work ended"]
