"""One sweep: monitor, then repair; what it says, and what it counts where it may not act (RECLAIM-4, LOOP-1, DOCTOR-1)."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga import FlowHandle, Settings
from dramatiq_saga.errors import WriteRefusedError
from dramatiq_saga.recovery.sweep import sweep
from tests.support.workbench import MakeBench, Workbench

HOUR = 3600


def running_step(bench: Workbench, *, reclaim_in: int | None = None) -> FlowHandle[Any]:
    run = bench.send()
    bench.drive(run)
    stale_at = None if reclaim_in is None else bench.clock.now() + reclaim_in * 1000
    bench.write(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, started_at = ?, reclaim_stale_at = ? WHERE run_id = ?",
        bench.clock.now(), stale_at, run.id,
    )  # fmt: skip
    return run


def test_a_quiet_sweep_says_so_in_one_line(bench: Workbench) -> None:
    assert bench.sweep().line() == "no held run was due; repair: nothing was lost"


def test_a_sweep_says_what_it_repaired(bench: Workbench) -> None:
    run = bench.send()
    bench.drive(run)
    bench.send()
    bench.lose_messages()
    bench.advance(60)
    report = bench.sweep()
    assert report.line() == "no held run was due; repair: 1 sent again (steps), 1 driven (runs)"
    assert report.as_dict()["repair"]["steps"] == 1


def test_with_repair_off_nothing_is_changed_and_everything_is_counted(make_bench: MakeBench) -> None:
    """DOCTOR-1: off until enabled; a sweep says that it is off and what nothing will pick up."""
    bench = make_bench(settings=Settings())
    lost = bench.send()
    bench.drive(lost)
    running_step(bench, reclaim_in=1)
    bench.send()
    bench.lose_messages()
    bench.advance(60)
    report = bench.sweep()
    assert report.repair is None
    assert report.unrepaired == {"R1": 1, "R2": 1, "R3": 1}
    assert report.line() == (
        "no held run was due; repair is off (repair.enabled): unless their messages still come, nothing will pick up "
        "1 waiting to run, 1 not driven, 1 past the reclaim deadline"
    )
    assert bench.asked() == []
    assert bench.row(lost, 1, "repair_attempts") == (0,)


def test_with_repair_off_and_nothing_lost_it_says_that_too(make_bench: MakeBench) -> None:
    assert (
        make_bench(settings=Settings()).sweep().line()
        == "no held run was due; repair is off (repair.enabled): nothing seems lost"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_rows_that_nothing_will_ever_reclaim_are_counted_after_an_hour(make_bench: MakeBench, enabled: bool) -> None:
    """RECLAIM-4: running, older than an hour, without a reclaim deadline."""
    bench = make_bench(settings=Settings.from_mapping({"repair.enabled": enabled}))
    running_step(bench)
    running_step(bench, reclaim_in=10 * HOUR)
    bench.advance(HOUR - 1)
    assert bench.sweep().never_reclaimed == 0
    bench.advance(1)
    report = bench.sweep()
    assert report.never_reclaimed == 1
    assert "1 row running for over an hour that nothing will ever reclaim" in report.line()


def test_an_undo_that_nothing_will_ever_reclaim_is_counted_and_one_of_an_ended_run_is_not(bench: Workbench) -> None:
    """RECLAIM-4; STATUS-2: what a halted rollback has left running is nobody's any more."""
    runs = []
    for _ in range(2):
        bench.bodies["pay"] = lambda *_: 1 / 0
        run = bench.send()
        bench.work_until(lambda run=run: len(run.actions()) == 3 and run.actions()[2].status == "failed")
        run.compensate()
        bench.lose_messages()
        bench.write(
            "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = ? WHERE run_id = ? AND sequence = 2",
            bench.clock.now(), run.id,
        )  # fmt: skip
        runs.append(run)
    bench.write(
        "UPDATE {flow_runs} SET status = 'cancelled', rollback = 'halted', ended_at = ? WHERE id = ?",
        bench.clock.now(),
        runs[0].id,
    )
    bench.advance(HOUR)
    assert bench.sweep().never_reclaimed == 1


def test_rows_that_are_out_of_repairs_are_in_the_line(make_bench: MakeBench) -> None:
    bench = make_bench(settings=Settings.from_mapping({"repair": {"enabled": True, "max_attempts": 1}}))
    run = bench.send()
    bench.drive(run)
    for _ in range(2):
        bench.lose_messages()
        bench.advance(600)
        report = bench.sweep()
    assert report.line() == "no held run was due; repair: 1 out of repairs: kick them"


def test_two_sweeps_at_once_send_everything_once(bench: Workbench) -> None:
    """C58: several at once do no harm; the second finds nothing left to do."""
    for _ in range(3):
        bench.drive(bench.send())
    bench.lose_messages()
    bench.advance(60)
    first, second = bench.sweep(), bench.sweep()
    assert first.repair is not None
    assert second.repair is not None
    assert (first.repair.repaired, second.repair.repaired) == (3, 0)
    assert len(bench.messages()) == 3


def test_a_store_that_refuses_ends_the_sweep_with_its_error(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """C41: the caller learns it, and the next sweep does what this one could not."""
    bench = make_bench()
    bench.drive(bench.send())
    bench.lose_messages()
    bench.advance(60)

    def refuse(_: Any) -> Any:
        raise WriteRefusedError("database is locked", sqlite_errorcode=5)

    with monkeypatch.context() as patched:
        patched.setattr(bench.engine.store, "write", refuse)
        with pytest.raises(WriteRefusedError):
            sweep(bench.engine, bench.sender)
    report = bench.sweep().repair
    assert report is not None
    assert report.steps == 1
