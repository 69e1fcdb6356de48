"""Workflow functions that hang in a worker: what is done stays done, others go on, and operators are told (DRIVE-1, HISTORY-1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowHandle, Settings, workflow
from dramatiq_saga.engine import lookout, timers
from dramatiq_saga.engine.drive import drive
from dramatiq_saga.engine.lookout import Call
from dramatiq_saga.operations import Operator
from dramatiq_saga.recovery.prune import prune
from tests.support.waiting import eventually
from tests.support.workbench import MakeBench, Workbench


class Hang:
    """Where a workflow function stays until it is let go. ``age`` is for how long it counts as being there, in seconds."""

    def __init__(self) -> None:
        self.on = threading.Event()
        self.over = threading.Event()
        self.inside = 0
        self.age = 0.0

    def __call__(self) -> None:
        if self.on.is_set():
            self.inside += 1
            assert self.over.wait(timeout=60)

    def let_go(self) -> None:
        self.on.clear()
        self.over.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    found = Hang()
    monkeypatch.setattr(Call, "age", lambda call: found.age if call.workflow == "bad" else 0.0)
    yield found
    found.let_go()


@pytest.fixture(params=["joined", "another broker"])
def desk(request: pytest.FixtureRequest, make_bench: MakeBench) -> Workbench:
    return make_bench(joins=request.param == "joined")


def charges_and_hangs(desk: Workbench, hang: Hang, **options: Any) -> Any:
    @workflow(name="bad", broker=desk.broker, **options)
    def bad(flow: Flow, traveller: str) -> Any:
        paid = flow.run(desk.actors["pay"], traveller)
        hang()
        flow.await_signal("go on")
        return paid

    return bad


def signal(run: FlowHandle[Any]) -> None:
    run.signal("go on")


# --- an outcome --------------------------------------------------------------------------------------------------------


def test_an_outcome_does_not_wait_for_a_function_that_hangs(desk: Workbench, hang: Hang) -> None:
    """FENCE-1, DRIVE-1: the step has completed while its thread is still inside; what follows comes when the function is back, once."""
    run = charges_and_hangs(desk, hang).send("ada")
    hang.on.set()
    with desk.working():
        eventually(lambda: hang.inside)
        assert run.actions()[0].status == "running"
        hang.age = lookout.OUTCOME_WAITS
        eventually(lambda: run.actions()[0].status == "completed", because="the outcome is recorded by itself")
        hang.let_go()
        eventually(lambda: not desk.engine.lookout.calls())
        signal(run)
        eventually(lambda: run.status == "completed")
        desk.advance(10)  # the message that the look-out has sent was put back meanwhile
        eventually(lambda: desk.messages() == [])
    assert [name for name, _ in desk.done] == ["pay"]
    assert [event.type for event in run.events()].count("action.completed") == 1


@pytest.mark.parametrize("first", ["the look-out", "the thread"])
def test_an_outcome_that_is_recorded_while_its_function_comes_back_lands_once(
    desk: Workbench, hang: Hang, journal: list[dict[str, Any]], first: str
) -> None:
    """FENCE-1: of the two that write it one lands, and the other finds it there; nothing is refused, and the run goes on."""
    run = charges_and_hangs(desk, hang).send("ada")
    hang.on.set()
    with desk.working():
        eventually(lambda: hang.inside)
        (call,) = desk.engine.lookout.calls()
        assert call.record is not None
        if first == "the look-out":
            call.record()
            hang.let_go()
        else:
            hang.let_go()
            eventually(lambda: run.actions()[0].status == "completed")
            call.record()
        eventually(lambda: not desk.engine.lookout.calls())
        signal(run)
        eventually(lambda: run.status == "completed")
    assert [event.type for event in run.events()].count("action.completed") == 1
    assert [line["event"] for line in journal if line["event"] == "outcome_rejected"] == []


# --- a drive -------------------------------------------------------------------------------------------------------------


def test_a_drive_that_hangs_is_held_and_costs_a_worker_one_thread(make_bench: MakeBench, hang: Hang) -> None:
    """HISTORY-1, DOCTOR-1: of two threads one is lost; the other workflow's runs go on, and no sweep sends another thread after the first."""
    desk = make_bench(settings=Settings.from_mapping({"repair.enabled": True}))
    bad = charges_and_hangs(desk, hang)
    runs = [bad.send("ada"), bad.send("bob"), bad.send("cyd")]
    desk.work_until(lambda: all(run.status == "waiting" for run in runs))
    hang.on.set()
    hang.age = lookout.OUTCOME_WAITS
    with desk.working(threads=2):
        signal(runs[0])
        eventually(lambda: hang.inside)
        for run in runs:
            signal(run)
        good = desk.send("eve")
        eventually(lambda: good.status == "completed", because="the other thread is free")
        assert hang.inside == 1
        hang.age = lookout.HUNG
        eventually(lambda: desk.run_row(runs[0], "hold_count") == (1,))
        assert "did not come back within 60 seconds" in str(desk.run_row(runs[0], "hold_error")[0])
        assert [stuck.run_id for stuck in Operator(desk.engine.store, settings=Settings()).stuck().runs] == [runs[0].id]
        sent = desk.run_row(runs[0], "repair_attempts")
        desk.advance(61)
        desk.sweep()
        assert (hang.inside, desk.run_row(runs[0], "repair_attempts")) == (1, sent)
        hang.let_go()
        desk.advance(10)
        eventually(lambda: all(run.status == "completed" for run in runs))
    assert desk.run_row(runs[0], "hold_error", "hold_until") == (None, None)


def test_a_drive_that_its_time_limit_cuts_short_twice_is_held(desk: Workbench, hang: Hang) -> None:
    """HISTORY-1, FENCE-5: it is begun again once, and not for ever; the deploy that mends it needs nothing else."""
    spin = threading.Event()

    @workflow(name="bad", broker=desk.broker, time_limit=50)
    def bad(flow: Flow) -> None:
        while spin.is_set():
            time.sleep(0.01)
        flow.await_signal("go on")

    spin.set()
    hang.age = 0.05
    desk.broker.emit_after("process_boot")  # the clock of time limits
    run = bad.send()
    with desk.working():
        eventually(lambda: desk.engine.lookout._cut_short.get(run.id) == 1, because="the time limit has cut it short")
        assert desk.run_row(run, "hold_count") == (0,)
        desk.advance(1)
        eventually(lambda: desk.run_row(run, "hold_count") == (1,), because="it has once more, and it is held")
        assert "WorkflowStalledError" in str(desk.run_row(run, "hold_error")[0])
        eventually(lambda: desk.messages() == [], because="its message is used up")
        spin.clear()
        desk.advance(60)
        assert desk.sweep().monitor.resumed == 1  # type: ignore[union-attr]
        signal(run)
        eventually(lambda: run.status == "completed")


def test_an_overdue_run_whose_function_hangs_in_a_worker_counts_as_not_expired(
    make_bench: MakeBench, hang: Hang, journal: list[dict[str, Any]]
) -> None:
    """EXPIRE-2: the alarm is in the function; the run is held off by the look-out, and ends by itself once the function is back."""
    desk = make_bench()

    @workflow(name="bad", broker=desk.broker)
    def bad(flow: Flow) -> Any:
        hang()
        flow.action(desk.actors["book_hotel"], "ada").compensate_with(
            lambda made: desk.actors["cancel_hotel"].message(made["by"])
        ).run()
        return flow.await_signal("never")

    run = bad.send_with_options(expires_in=60)
    drive(desk.engine, run.id, desk.sender)
    desk.write(
        "UPDATE {action_runs} SET status = 'completed', attempts = 1, started_at = 1, ended_at = 1, result = ? WHERE run_id = ?",
        b'{"by":"book_hotel"}', run.id,
    )  # fmt: skip
    desk.write("DELETE FROM {messages} WHERE actor = 'book_hotel'")
    desk.engine.cache.drop(run.id)
    hang.on.set()
    hang.age = lookout.HUNG
    with desk.working():
        desk.advance(61)
        eventually(lambda: hang.inside)
        eventually(lambda: desk.run_row(run, "expiry_attempts") == (1,))
        hang.let_go()
        eventually(lambda: run.status == "expired", because="what comes back is a drive like any other")
    assert desk.done == [("cancel_hotel", ("book_hotel",))]


# --- beside a function that hangs ------------------------------------------------------------------------------------------


def test_a_refused_outcome_whose_function_hangs_is_told_once(
    desk: Workbench, hang: Hang, journal: list[dict[str, Any]]
) -> None:
    """FENCE-1: whoever listens for refused outcomes may make one good; the look-out leaves that to the thread that is inside."""
    run = charges_and_hangs(desk, hang).send("ada")
    hang.on.set()
    with desk.working():
        eventually(lambda: hang.inside)
        (call,) = desk.engine.lookout.calls()
        assert run.cancel()
        assert call.record is not None
        call.record()
        assert [line["event"] for line in journal if line["event"] == "outcome_rejected"] == []
        hang.let_go()
        eventually(lambda: [line["event"] for line in journal if line["event"] == "outcome_rejected"])
        eventually(lambda: desk.messages() == [])
    assert [line["event"] for line in journal if line["event"] == "outcome_rejected"] == ["outcome_rejected"]


@pytest.mark.parametrize("since", ["claimed again", "pruned"])
def test_an_outcome_that_was_recorded_is_not_refused_later(
    desk: Workbench, hang: Hang, journal: list[dict[str, Any]], since: str
) -> None:
    """FENCE-1: it has landed, whatever has become of its row before the function came back."""
    run = charges_and_hangs(desk, hang).send("ada")
    hang.on.set()
    with desk.working():
        eventually(lambda: hang.inside)
        (call,) = desk.engine.lookout.calls()
        assert call.record is not None
        call.record()
        if since == "pruned":
            assert run.cancel()
            desk.advance(1)
            prune(desk.engine.store, before=desk.clock.now())
        else:
            desk.write("UPDATE {action_runs} SET attempts = attempts + 1, delivery = 'another' WHERE run_id = ?", run.id)
        hang.let_go()
        eventually(lambda: not desk.engine.lookout.calls())
        desk.advance(10)
        eventually(lambda: desk.messages() == [])
    assert [line["event"] for line in journal if line["event"] in ("outcome_rejected", "write_refused")] == []


def test_a_lost_claim_sends_no_second_thread_after_the_first(desk: Workbench, hang: Hang) -> None:
    """DRIVE-6: what a lost claim wakes is driven by a message then, and that is put back."""
    bad = charges_and_hangs(desk, hang)
    run = bad.send("ada")
    desk.work_until(lambda: run.status == "waiting")
    hang.on.set()
    with desk.working():
        signal(run)
        eventually(lambda: hang.inside)
        hang.age = lookout.OUTCOME_WAITS
        desk.middleware.runner(desk.broker).wake(run.id)
        assert hang.inside == 1
        hang.let_go()
        desk.advance(10)
        eventually(lambda: run.status == "completed")


def test_deadlines_of_other_runs_are_kept_while_one_hangs(make_bench: MakeBench, hang: Hang) -> None:
    """TIMER-1, EXPIRE-1: what needs no call of the function ends in its time."""
    desk = make_bench()
    bad = charges_and_hangs(desk, hang)
    run, other = bad.send("ada"), bad.send_with_options(args=("bob",), expires_in=60)
    desk.work_until(lambda: run.status == other.status == "waiting")
    hang.on.set()
    with desk.working():
        signal(run)
        eventually(lambda: hang.inside)
        hang.age = lookout.OUTCOME_WAITS
        desk.advance(61)
        eventually(lambda: other.status == "expired")
        assert hang.inside == 1


def test_the_look_out_leaves_the_namesake_of_a_pruned_run_alone(desk: Workbench, hang: Hang) -> None:
    """PRUNE-1: what hangs is a drive of another run that had the id before."""
    bad = charges_and_hangs(desk, hang)
    run = bad.send_with_options(args=("ada",), run_id="order-1")
    created = desk.run_row(run, "created_at")[0]
    desk.lose_messages()
    error = lookout.WorkflowStalledError("bad", 60)
    assert timers.hold_off(desk.engine, run.id, error, created_at=created - 1) == (False, False)
    assert desk.run_row(run, "hold_count") == (0,)
    assert timers.hold_off(desk.engine, run.id, error, created_at=created) == (False, True)
