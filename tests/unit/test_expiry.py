"""Deadlines as the sweep sees them: which rows, in which order, and what becomes of a run that cannot be expired (EXPIRE-1, EXPIRE-2)."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from dramatiq_saga import Settings, SignalTimeoutError
from dramatiq_saga.engine import timers
from dramatiq_saga.errors import StoreError
from dramatiq_saga.recovery import timer_loop
from dramatiq_saga.recovery.timer_loop import TimerLoop
from tests.support.waiting import eventually
from tests.support.workbench import MakeBench, Workbench


@pytest.fixture(params=["joined", "another broker"])
def desk(request: pytest.FixtureRequest, make_bench: MakeBench) -> Workbench:
    return make_bench(joins=request.param == "joined")


def waits_for_ever(flow: Any, traveller: str) -> Any:
    return flow.await_signal("never")


def times_out(flow: Any, traveller: str) -> Any:
    try:
        return flow.await_signal("never", wait_seconds=60)
    except SignalTimeoutError:
        flow.await_signal("never again")


# --- the sweep ---------------------------------------------------------------------------------------------------------


def test_a_sweep_says_what_it_has_ended(desk: Workbench) -> None:
    """EXPIRE-1: a wait, a step and a run; the line and the report name them, and the next sweep finds nothing."""
    desk.flow_function = times_out
    wait = desk.send()
    desk.drive(wait)

    def late_step(flow: Any, traveller: str) -> Any:
        flow.optional_action(desk.actors["pay"], traveller).expires_in(60).run()
        return flow.await_signal("never")

    desk.flow_function = late_step
    step = desk.send()
    desk.drive(step)
    desk.flow_function = waits_for_ever
    run = desk.send(expires_in=60)
    desk.drive(run)
    desk.lose_messages()
    desk.advance(59.999)
    assert desk.sweep().line().startswith("no held run was due")
    desk.advance(0.001)
    report = desk.sweep()
    assert report.line().startswith("overdue: 1 timed out (waits), 1 expired (steps), 1 expired (runs); no held run was due")
    assert (report.monitor.timed_out, report.monitor.expired_steps, report.monitor.expired_runs) == (1, 1, 1)
    assert report.as_dict()["monitor"]["expired_runs"] == 1
    assert [handle.status for handle in (wait, step, run)][2] == "expired"
    assert desk.sweep().line().startswith("no held run was due")


def test_a_sweep_takes_a_batch_the_oldest_first_and_only_live_runs(make_bench: MakeBench) -> None:
    """EXPIRE-1: two at a time, in the order of their moments; a cancelled run's wait, due before all, is no business of it."""
    desk = make_bench(settings=Settings.from_mapping({"monitor.expiration.batch_size": 2}))
    desk.flow_function = times_out
    runs = []
    for _ in range(5):
        runs.append(desk.send())
        desk.drive(runs[-1])
        desk.advance(1)
    desk.write("UPDATE {waits} SET status = 'waiting', ended_at = NULL, due_at = 1 WHERE run_id = ?", runs[0].id)
    desk.write("UPDATE {flow_runs} SET status = 'cancelled', ended_at = 1 WHERE id = ?", runs[0].id)
    desk.advance(60)
    ended = []
    for _ in range(3):
        ended.append(desk.sweep().monitor.timed_out)
        rows = desk.engine.store.read(lambda tx: tx.all("SELECT run_id FROM {waits} WHERE status = 'timed_out'"))
        assert {run_id for (run_id,) in rows} == {run.id for run in runs[1 : 1 + sum(ended)]}
    assert ended == [2, 2, 0]


def test_a_long_downtime_is_caught_up_batch_by_batch_and_the_line_says_how_late(make_bench: MakeBench) -> None:
    """C37: 40 timers, 10 timeouts and 5 run deadlines, some of one run, have passed; no sweep takes on more than a batch of each kind,
    and each fires once."""
    desk = make_bench(settings=Settings.from_mapping({"monitor.expiration.batch_size": 10}))

    def waits(flow: Any, what: str) -> Any:
        if what == "timeout":
            with suppress(SignalTimeoutError):
                flow.await_signal("never", wait_seconds=60)
            return
        flow.sleep(60)
        if what == "doomed":
            flow.await_signal("never")

    desk.flow_function = waits
    runs = [desk.send(what) for what, count in (("nap", 35), ("timeout", 10)) for _ in range(count)]
    runs += [desk.send("doomed", expires_in=120) for _ in range(5)]
    for run in runs:
        desk.drive(run)
    desk.lose_messages()
    desk.advance(7200)
    reports = [desk.sweep()]
    while reports[-1].monitor.timed_out or reports[-1].monitor.expired_runs:
        reports.append(desk.sweep())
    assert "up to 7140 seconds late" in reports[0].line()
    assert [report.monitor.late_ms for report in reports] == [7_140_000] * (len(reports) - 1) + [0]
    assert all(report.monitor.timed_out <= 15 for report in reports)  # ten of all waits, and those of the overdue runs
    assert sum(report.monitor.timed_out for report in reports) == 50
    assert sum(report.monitor.expired_runs for report in reports) == 5
    desk.work_until(lambda: all(run.status in ("completed", "expired") for run in runs))
    assert [run.status for run in runs] == ["completed"] * 45 + ["expired"] * 5


def test_what_is_overdue_in_one_run_ends_in_due_order(make_bench: MakeBench) -> None:
    """C37, EXPIRE-1: three steps and then the run, in the order of their moments, whatever the order of the steps."""
    desk = make_bench()

    def late(flow: Any, traveller: str) -> Any:
        flow.parallel(
            *[flow.optional_action(desk.actors["pay"], seconds).expires_in(seconds) for seconds in (30, 10, 20)]
        ).run()
        return flow.await_signal("never")

    desk.flow_function = late
    run = desk.send(expires_in=40)
    desk.drive(run)
    desk.lose_messages()
    desk.advance(7200)
    assert desk.sweep().monitor.expired_steps == 3
    ended = desk.engine.store.read(
        lambda tx: tx.all(
            "SELECT e.type, a.expires_at FROM {flow_events} e LEFT JOIN {action_runs} a ON a.run_id = e.run_id "
            "AND a.sequence = e.sequence WHERE e.run_id = ? AND e.type IN ('action.expired', 'flow.expired') ORDER BY e.id",
            (run.id,),
        )
    )
    assert [word for word, _ in ended] == ["action.expired"] * 3 + ["flow.expired"]
    moments = [moment for _, moment in ended[:3]]
    assert moments == sorted(moments)


def test_one_run_that_goes_wrong_does_not_end_the_sweep(desk: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOP-1, EXPIRE-1: counted as an error; the next one is ended all the same, and the store's own refusal ends the sweep."""
    desk.flow_function = times_out
    runs = [desk.send() for _ in range(3)]
    for run in runs:
        desk.drive(run)
    desk.advance(60)
    original = timers.fire

    def fire(engine: Any, run_id: str, sender: Any, **options: Any) -> Any:
        if run_id == runs[0].id:
            raise RuntimeError("a bad row")
        return original(engine, run_id, sender, **options)

    monkeypatch.setattr(timers, "fire", fire)
    report = desk.sweep().monitor
    assert (report.timed_out, report.errors) == (2, 1)

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError("the disk is full")

    monkeypatch.setattr(timers, "fire", refuse)
    with pytest.raises(StoreError):
        desk.sweep()


# --- EXPIRE-2 ----------------------------------------------------------------------------------------------------------


def books_then_waits(desk: Workbench) -> Any:
    """A run whose rollback needs a replay: no drive has seen the result that the undo is built from."""

    def run(flow: Any, traveller: str) -> Any:
        flow.action(desk.actors["book_hotel"], traveller).compensate_with(
            lambda made: desk.actors["cancel_hotel"].message(made["by"])
        ).run()
        return flow.await_signal("never")

    return run


def completed_unseen(desk: Workbench) -> Any:
    """That run, its step completed, and the drive that would have seen it lost."""
    desk.flow_function = books_then_waits(desk)
    run = desk.send(expires_in=60)
    desk.drive(run)
    desk.lose_messages()
    desk.write(
        "UPDATE {action_runs} SET status = 'completed', attempts = 1, started_at = 1, ended_at = 1, result = ? WHERE run_id = ?",
        b'{"by":"book_hotel"}', run.id,
    )  # fmt: skip
    desk.engine.cache.drop(run.id)
    return run


def test_a_run_that_cannot_be_expired_is_left_as_found_and_held_off_twice_as_long_each_time(
    desk: Workbench, journal: list[dict[str, Any]]
) -> None:
    """EXPIRE-2, COMP-3: no cap, never reset; each failure is journalled with its count, and the row is as it was."""
    run = completed_unseen(desk)
    good = desk.flow_function

    def broken(flow: Any, traveller: str) -> Any:
        flow.run(desk.actors["pay"], traveller)  # does not fit the history

    desk.flow_function = broken
    desk.advance(60)
    before = desk.run_row(run, "status", "revision", "wakes", "wakes_seen", "rollback", "error", "hold_error")
    windows = []
    for count in range(1, 9):
        assert desk.sweep().monitor.expiry_failed == 1
        assert desk.run_row(run, "status", "revision", "wakes", "wakes_seen", "rollback", "error", "hold_error") == before
        attempts, after = desk.run_row(run, "expiry_attempts", "expiry_after")
        assert attempts == count
        windows.append((after - desk.clock.now()) // 1000)
        desk.advance(windows[-1] - 0.001)
        assert desk.sweep().monitor.expiry_failed == 0
        desk.advance(0.001)
    assert windows == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    lines = [line for line in journal if line["event"] == "expiry_failed"]
    assert [line["expiry_attempts"] for line in lines] == list(range(1, 9))
    assert {(line["run_id"], line["workflow"]) for line in lines} == {(run.id, "trip")}
    assert "HistoryMismatchError" in str(lines[0])

    desk.flow_function = good
    assert desk.sweep().monitor.expired_runs == 1
    desk.work_until(lambda: run.status == "expired")
    assert desk.done[-1] == ("cancel_hotel", ("book_hotel",))
    assert desk.run_row(run, "expiry_attempts") == (8,)


def test_runs_that_are_held_off_do_not_stand_in_front_of_others(make_bench: MakeBench) -> None:
    """EXPIRE-2: a batch of one; the older run cannot be expired, the younger one is by the next sweep."""
    desk = make_bench(settings=Settings.from_mapping({"monitor.expiration.batch_size": 1}))
    bad = completed_unseen(desk)

    def broken(flow: Any, traveller: str) -> Any:
        if traveller == "ada":
            flow.run(desk.actors["pay"], traveller)
        return flow.await_signal("never")

    desk.flow_function = broken
    desk.advance(1)
    good = desk.send("bob", expires_in=60)
    desk.advance(61)
    assert desk.sweep().monitor.expiry_failed == 1
    assert desk.sweep().monitor.expired_runs == 1
    assert (bad.status, good.status) == ("running", "expired")


def test_overdue_runs_of_unknown_workflows_do_not_stand_in_front_of_known_ones(make_bench: MakeBench) -> None:
    """EXPIRE-1: a batch of one; the older run can only be sent to a process that knows it, the younger one is ended all the same."""
    desk = make_bench(settings=Settings.from_mapping({"monitor.expiration.batch_size": 1}))
    foreign = completed_unseen(desk)
    desk.write("UPDATE {flow_runs} SET workflow = 'elsewhere' WHERE id = ?", foreign.id)
    desk.advance(1)
    run = desk.send("bob", expires_in=60)
    desk.advance(61)
    report = desk.sweep().monitor
    assert (report.sent, report.expired_runs) == (1, 1)
    assert (desk.run_row(foreign, "status"), run.status) == (("running",), "expired")


def test_a_run_that_would_complete_now_is_left_to_the_drive_that_completes_it(desk: Workbench) -> None:
    """COMP-3, C38: a replay that ends in completion is no plan; nothing is undone of a run whose function returns."""
    run = completed_unseen(desk)

    def returns(flow: Any, traveller: str) -> Any:
        return (
            flow.action(desk.actors["book_hotel"], traveller)
            .compensate_with(lambda made: desk.actors["cancel_hotel"].message(made["by"]))
            .run()
        )

    desk.flow_function = returns
    desk.advance(60)
    assert desk.sweep().monitor.expiry_failed == 1
    assert run.status == "running"
    desk.write("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = 1 WHERE id = ?", run.id)
    desk.advance(61)
    assert desk.sweep().monitor.expired_runs == 0
    assert run.status == "completed"


# --- the loop of a worker ----------------------------------------------------------------------------------------------


def test_the_loop_survives_errors_and_ends_with_the_last_worker(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIMER-1: a store that refuses, a broker that is down; two workers of one process share a loop."""
    desk = make_bench(joins=False)
    looks = threading.Semaphore(0)
    broken = threading.Event()
    broken.set()

    def look(engine: Any, sender: Any) -> int:
        looks.release()
        if broken.is_set():
            raise StoreError("the server is away")
        return 0

    monkeypatch.setattr(timer_loop, "look", look)
    loop = TimerLoop(desk.engine, desk.sender, interval=0.001)
    loop.start("one")
    loop.start("another")
    for _ in range(3):
        assert looks.acquire(timeout=20)
    broken.clear()
    loop.stop("another")
    loop.stop("another")
    for _ in range(3):
        assert looks.acquire(timeout=20)
    loop.stop("one")
    assert not [thread for thread in threading.enumerate() if thread.name == "saga-timers"]


def test_a_loop_whose_broker_is_down_tries_again(make_bench: MakeBench) -> None:
    """TIMER-1, DRIVE-3: what was not sent is as it was, so the next look sends it."""
    desk = make_bench(joins=False)
    desk.flow_function = times_out
    run = desk.send()
    desk.drive(run)
    desk.advance(60)
    enqueue = desk.broker.enqueue

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the broker is down")

    desk.broker.enqueue = refuse  # type: ignore[method-assign]
    assert timer_loop.look(desk.engine, desk.sender) == 0
    assert desk.run_row(run, "timer_at") == (None,)
    desk.broker.enqueue = enqueue  # type: ignore[method-assign]
    assert timer_loop.look(desk.engine, desk.sender) == 1
    assert desk.asked() == [("timer", None)]
    desk.work_until(lambda: desk.row(run, 1, "status", table="waits") == ("timed_out",))
    eventually(lambda: desk.run_row(run, "timer_at") == (None,))


def test_a_loop_leaves_the_runs_of_others_workflows_to_their_own_workers(make_bench: MakeBench) -> None:
    """DRIVE-6: another service's runs on the same tables are neither sent for nor in the way."""
    desk = make_bench(joins=False)
    desk.flow_function = times_out
    run = desk.send()
    desk.drive(run)
    desk.write("UPDATE {flow_runs} SET workflow = 'another' WHERE id = ?", run.id)
    desk.advance(60)
    assert timer_loop.look(desk.engine, desk.sender) == 0
    assert desk.messages() == []
