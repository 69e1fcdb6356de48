"""The monitor: held runs, their windows, and the deploy that mends them (HISTORY-1, and the window of EXPIRE-2)."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga import Flow, FlowHandle, Settings
from dramatiq_saga.recovery.monitor import MonitorReport, _drive, find_held, monitor
from dramatiq_saga.recovery.patience import Patience
from tests.support.workbench import MakeBench, Workbench


def edited(bench: Workbench) -> Any:
    """A deploy that asks for another actor where book_hotel is recorded; returns the function that agrees with it."""
    fitting = bench.flow_function

    def trip(flow: Flow, traveller: str) -> Any:
        return flow.run(bench.actors["book_flight"], traveller)

    bench.flow_function = trip
    return fitting


def held(bench: Workbench) -> FlowHandle[Any]:
    """A run whose first step is recorded, driven by code that does not fit: held for the first time."""
    run = bench.send("ada")
    bench.drive(run)
    bench.write("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = ? WHERE id = ?", bench.clock.now(), run.id)
    edited(bench)
    bench.drive(run)
    assert bench.run_row(run, "hold_count", "status") == (1, "waiting")
    return run


def look(bench: Workbench) -> MonitorReport:
    return monitor(bench.engine, bench.sender)


def act(bench: Workbench, report: MonitorReport, *, run: Any) -> None:
    _drive(bench.engine, bench.sender, report, Patience(bench.engine, None), run=run)


def test_a_held_run_is_driven_when_its_window_is_over_and_not_before(bench: Workbench) -> None:
    """HISTORY-1: base_seconds is 60."""
    run = held(bench)
    bench.advance(59)
    assert look(bench).driven == 0
    bench.advance(1)
    assert look(bench).held_again == 1
    assert bench.run_row(run, "hold_count") == (2,)


def test_the_window_doubles_with_every_failure_up_to_its_end(bench: Workbench) -> None:
    """EXPIRE-2: 60 seconds, doubling, at most an hour, for ever."""
    run = held(bench)
    windows = []
    for _ in range(9):
        until, now = bench.run_row(run, "hold_until")[0], bench.clock.now()
        windows.append((until - now) // 1000)
        bench.advance(windows[-1])
        assert look(bench).held_again == 1
    assert windows == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert bench.run_row(run, "hold_count", "status") == (10, "waiting")


def test_a_deploy_that_fits_lets_the_run_go_on_by_itself(bench: Workbench) -> None:
    """HISTORY-1: nothing was failed and nothing rolled back."""
    fitting = bench.flow_function
    run = held(bench)
    bench.flow_function = fitting
    bench.advance(60)
    assert look(bench).resumed == 1
    assert bench.run_row(run, "hold_count", "hold_until", "hold_error") == (0, None, None)
    bench.advance(60)
    bench.sweep()  # its first step had lost its message
    bench.work_until(lambda: run.status == "completed")


def test_of_two_sweeps_one_drives_a_held_run(bench: Workbench) -> None:
    """DOCTOR-2: the second finds the window moved, and the failure is counted once."""
    run = held(bench)
    bench.advance(60)
    first, second = find_held(bench.engine), find_held(bench.engine)
    reports = (MonitorReport(), MonitorReport())
    for report, found in zip(reports, (first, second), strict=True):
        for one in found:
            act(bench, report, run=one)
    assert (reports[0].held_again, reports[1].skipped, reports[1].driven) == (1, 1, 0)
    assert bench.run_row(run, "hold_count") == (2,)


def test_a_run_of_an_unknown_workflow_is_driven_by_a_message(bench: Workbench) -> None:
    """DRIVE-6: a sweep drives only what it knows; the window moves, so that not every sweep sends another message."""
    run = held(bench)
    bench.lose_messages()
    del bench.engine.workflows["trip"]
    bench.advance(60)
    assert look(bench).sent == 1
    assert bench.asked() == [("drive", None)]
    bench.advance(119)
    assert look(bench).sent == 0
    assert bench.run_row(run, "hold_count") == (1,)
    bench.advance(1)
    assert look(bench).sent == 1


def test_of_two_sweeps_one_sends_the_message_of_a_held_run(bench: Workbench) -> None:
    """DOCTOR-2: nothing but the window tells the second that it is late."""
    held(bench)
    bench.lose_messages()
    del bench.engine.workflows["trip"]
    bench.advance(60)
    first, second = find_held(bench.engine), find_held(bench.engine)
    report = MonitorReport()
    for one in (*first, *second):
        act(bench, report, run=one)
    assert (report.sent, report.skipped) == (1, 1)
    assert bench.asked() == [("drive", None)]


def test_an_engine_fault_holds_the_run_like_a_mismatch(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """HISTORY-1: an engine fault in a drive is treated the same way."""
    run = held(bench)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault in the engine")

    monkeypatch.setattr("dramatiq_saga.engine.drive.replay", broken)
    bench.advance(60)
    assert look(bench).held_again == 1
    count, until = bench.run_row(run, "hold_count", "hold_until")
    assert (count, until - bench.clock.now()) == (2, 120_000)


def test_a_run_that_is_held_off_does_not_stand_in_front_of_one_that_is_due(make_bench: MakeBench) -> None:
    """EXPIRE-2: the oldest due first, a batch at a time, and whoever failed goes to the back."""
    bench = make_bench(settings=Settings.from_mapping({"monitor.expiration.batch_size": 1}))
    runs = []
    fitting = bench.flow_function
    for _ in range(3):
        bench.flow_function = fitting
        runs.append(held(bench))
        bench.advance(1)
    bench.advance(60)
    for _ in range(3):
        look(bench)
    assert [bench.run_row(run, "hold_count") for run in runs] == [(2,), (2,), (2,)]
    assert look(bench).driven == 0


def test_a_run_that_has_ended_meanwhile_is_left_alone(bench: Workbench) -> None:
    """STATUS: a terminal status is never left."""
    run = held(bench)
    bench.advance(60)
    (found,) = find_held(bench.engine)
    run.cancel()
    report = MonitorReport()
    act(bench, report, run=found)
    assert (report.skipped, run.status) == (1, "cancelled")


def test_a_run_that_breaks_the_sweep_itself_is_passed_by(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOP-1: one bad row never ends a sweep."""
    fitting = bench.flow_function
    bad = held(bench)
    bench.flow_function = fitting
    good = held(bench)
    bench.flow_function = fitting
    bench.advance(60)
    plain = bench.engine.clock.now

    from dramatiq_saga.recovery import monitor as module

    def drive(engine: Any, run_id: str, *rest: Any) -> Any:
        if run_id == bad.id:
            engine.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET revision = revision + 1 WHERE id = ?", (run_id,)))
            raise RuntimeError("something nobody has thought of")
        return real(engine, run_id, *rest)

    real = module.drives.drive
    monkeypatch.setattr(module.drives, "drive", drive)
    report = look(bench)
    assert (report.errors, report.resumed) == (1, 1)
    assert bench.run_row(good, "hold_count") == (0,)
    assert bench.run_row(bad, "hold_until")[0] > plain()


def test_a_broker_that_is_down_is_counted_and_the_next_run_follows(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRIVE-3: what the drive has decided is committed; the message of the step it scheduled is the doctor's."""
    bench = make_bench(joins=False)
    fitting = bench.flow_function
    runs = []
    for _ in range(2):
        bench.flow_function = fitting
        run = held(bench)
        bench.write(
            "UPDATE {action_runs} SET status = 'completed', result = args, started_at = 1, ended_at = 1, attempts = 1 WHERE run_id = ?",
            run.id,
        )
        runs.append(run)
    bench.flow_function = fitting
    bench.advance(60)

    def down(message: Any, *, delay: int | None = None) -> Any:
        raise ConnectionError("no route to the broker")

    with monkeypatch.context() as patched:
        patched.setattr(bench.broker, "enqueue", down)
        report = look(bench)
    assert (report.unsent, report.errors) == (2, 0)
    assert [bench.run_row(run, "hold_error") for run in runs] == [(None,), (None,)]
    bench.advance(60)
    bench.sweep()
    assert bench.asked() == [("step", 2), ("step", 2)]
