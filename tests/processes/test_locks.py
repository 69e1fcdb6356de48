"""Overlap locks, with a real worker that is killed while it holds some (LOCK-1)."""

from __future__ import annotations

import os

import pytest
import redis

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.locks import VARIABLE
from tests.support.waiting import eventually


@pytest.mark.parametrize("_overlap_locks", ["redis"], indirect=True)
def test_a_killed_workers_lock_does_not_hold_its_step_up(field: Field, effects: EffectLog, gates: Gates) -> None:
    """LOCK-1, RECLAIM-5: kill -9 in the middle of a body; the lease brings the step back, long before the lock's fifteen minutes."""
    field.settings(reclaim__dead_workers__enabled=True, reclaim__dead_workers__lease_seconds=1.5)
    field.set(retry_after=1)
    run = field.send("job", "gate")
    victim = field.worker(threads=1)
    gates.wait_reached("work-gate")
    with redis.Redis.from_url(os.environ[VARIABLE]) as server:
        key = f"dramatiq-saga:action:{run}:1"
        assert server.exists(key) == 1
        victim.kill()
        gates.open("work-gate")
        survivor = field.worker(threads=1)
        field.wait_ended(run)
        eventually(lambda: not server.exists(key))
    assert field.step(run).row.attempts == 2
    assert effects.names() == ["work", "work", "work ended"]
    assert survivor.terminate() == 0
    assert "lock_taken_over" in survivor.output()
