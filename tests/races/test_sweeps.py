"""Sweeps that meet: real processes, stopped between what they have seen and what they do (DOCTOR-2, C05).

As a rule one of them does the pass and the other skips it (``test_passes.py``). Here the first is so slow that it counts as dead.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates

MakeField = Callable[..., Field]


def stale_step(field: Field, gates: Gates) -> str:
    """A run whose step is running past its reclaim deadline: its worker was killed, its message is lost."""
    run = field.send("job", "gate", reclaim=3600)
    worker = field.worker(threads=1)
    gates.wait_reached("work-gate")
    worker.kill()
    gates.open("work-gate")
    field.sql("UPDATE {action_runs} SET reclaim_stale_at = ? WHERE run_id = ?", 1, run)
    field.sql("DELETE FROM {messages}")
    return run


def outlive_the_lease(field: Field) -> None:
    """Passes under way no longer keep others from theirs."""
    field.sql("UPDATE {passes} SET began_at = 1")


def test_a_sweep_with_a_stale_listing_repairs_nothing(
    database_url: str, make_field: MakeField, effects: EffectLog, gates: Gates
) -> None:
    """C05, DOCTOR-2: two sweeps list the same row; the first sends it, a worker finishes it, the second touches nothing."""
    field = make_field(database_url)
    field.settings(repair__enabled=True)
    run = stale_step(field, gates)
    first = field.start("sweep", "--json", stop_at="first")
    gates.wait_reached("first")
    outlive_the_lease(field)
    second = field.start("sweep", "--json", stop_at="second")
    gates.wait_reached("second")
    field.worker(threads=1)
    gates.open("first")
    assert first.wait() == 0
    assert '"reclaims": 1' in first.output()
    field.wait_ended(run)
    gates.open("second")
    assert second.wait() == 0
    assert '"reclaims": 0' in second.output()
    assert '"skipped": 1' in second.output()
    report = field.run(run)
    assert (report.status, report.steps[0].row.status, report.steps[0].row.attempts) == ("completed", "completed", 2)
    assert report.steps[0].repair_attempts == 1
    assert effects.names() == ["work", "work", "work ended"]


def test_a_sweep_that_was_beaten_to_a_row_that_is_still_stale_sends_no_second_message(
    database_url: str, make_field: MakeField, gates: Gates
) -> None:
    """DOCTOR-2: the row is as stale as it was, but its repair is somebody else's already."""
    field = make_field(database_url)
    field.settings(repair__enabled=True)
    run = stale_step(field, gates)
    sweeps = []
    for number in (1, 2):
        sweeps.append(field.start("sweep", "--json", stop_at="listed"))
        gates.wait_reached("listed", times=number)
        outlive_the_lease(field)
    gates.open("listed")
    outputs = []
    for sweep in sweeps:
        assert sweep.wait() == 0
        outputs.append(sweep.output())
    assert sorted('"reclaims": 1' in output for output in outputs) == [False, True]
    assert sorted('"skipped": 1' in output for output in outputs) == [False, True]
    assert field.count("SELECT COUNT(*) FROM {messages}") == 1
    assert field.step(run).repair_attempts == 1
