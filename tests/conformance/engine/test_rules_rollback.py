"""What is undone, in which order, and what stands in its way."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from dramatiq_saga import CompensationFailurePolicy, Flow, FlowCancelledError, FlowFailedError, Settings, current_step
from dramatiq_saga.codec import load_error
from dramatiq_saga.engine.drive import drive
from dramatiq_saga.errors import ConcurrentTransitionError, HistoryMismatchError
from dramatiq_saga.recovery.monitor import monitor
from tests.support.application import Application, Applications
from tests.support.bench import Background, Bench
from tests.support.deploying import deploy
from tests.support.waiting import DEADLINE, eventually


def undos(handle: Any) -> list[tuple[int, str, str]]:
    return [(undo.sequence, undo.status, undo.undoes) for undo in handle.compensations()]


def recorded_error(app: Application, handle: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The run's original error, and that of its rollback."""
    error, rollback_error = app.sql("SELECT error, rollback_error FROM {flow_runs} WHERE id = ?", handle.id)[0]
    return load_error(error), load_error(rollback_error) if rollback_error else None


# --- COMP-1: cancel and compensate -----------------------------------------------------------------------------------


def parked(app: Application) -> Any:
    """A run with two completed steps that can be undone, waiting for one on a queue that nobody consumes."""
    step, undo, never = app.step("step", gives="done"), app.step("undo"), app.step("never", queue_name=app.queue + "x")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step, 1).compensate_with(undo, 1).run()
        flow.action(step, 2).compensate_with(lambda made: undo.message(f"2 {made}")).run()
        flow.run(never)

    handle = order.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 3, because="the third step is scheduled")
    return handle


def test_compensate_undoes_in_reverse_and_then_the_run_is_cancelled(joined: Application) -> None:
    """COMP-1, STATUS-2: every level by itself, the step that had not begun is cancelled, the reason is kept."""
    handle = parked(joined)
    assert handle.compensate("sold out") is True
    assert joined.ended(handle) == "cancelled"
    assert handle.rollback == "done"
    assert joined.calls == [("step", 1), ("step", 2), ("undo", "2 done"), ("undo", 1)]
    assert [action.status for action in handle.actions()] == ["completed", "completed", "cancelled"]
    assert undos(handle) == [(2, "completed", "completed"), (1, "completed", "completed")]
    with pytest.raises(FlowCancelledError, match="sold out"):
        handle.result()


def test_cancel_undoes_nothing(joined: Application) -> None:
    """COMP-1, STATUS-2: what is done stays done; what has not begun never begins."""
    handle = parked(joined)
    assert handle.cancel("enough") is True
    joined.start(queues={joined.queue + "x"})
    joined.drain()
    assert (handle.status, handle.rollback) == ("cancelled", "none")
    assert joined.calls == [("step", 1), ("step", 2)]
    assert handle.compensations() == []
    assert handle.actions()[2].status == "cancelled"


def test_a_run_with_nothing_to_undo_ends_at_once_when_it_is_compensated(lite: Application) -> None:
    """COMP-1: no rollback is reported where there was none."""

    @lite.workflow
    def empty(flow: Flow) -> None: ...

    handle = empty.send()
    assert handle.compensate() is True
    assert (handle.status, handle.rollback) == ("cancelled", "none")


# --- COMP-2, COMP-3: plans -------------------------------------------------------------------------------------------


class Trip:
    """A workflow whose second undo is built from its step's result."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.refused: set[str] = set()

    def declare(self, bench: Bench) -> None:
        def book(what: str) -> str:
            self.ran.append(("book", what))
            if what in self.refused:
                raise LookupError(f"no {what}")
            return f"no {what}"

        def undo(number: str) -> None:
            self.ran.append(("undo", number))

        def undo_nothing() -> None:
            self.ran.append("undo nothing")

        self.book, self.undo, self.undo_nothing = (bench.actor(fn) for fn in (book, undo, undo_nothing))
        bench.workflow(self.trip)

    def trip(self, flow: Flow) -> None:
        flow.action(self.book, "flight").compensate_with(self.undo, "flight").run()
        flow.action(self.book, "hotel").compensate_with(lambda number: self.undo.message(number)).run()
        flow.run(self.book, "car")

    def unseen(self, bench: Bench) -> str:
        """A run whose second step has completed before any drive could see it."""
        run = bench.start("trip")
        bench.deliver(bench.take())
        bench.deliver(bench.take())
        known = bench.engine.workflows.pop("trip")
        bench.deliver(bench.take())
        bench.engine.workflows["trip"] = known
        assert bench.steps(run) == [("book", "completed"), ("book", "completed")]
        return run


def everything(bench: Bench, run: str) -> list[Any]:
    """All that the database holds of a run."""
    return [
        bench.one("SELECT * FROM {flow_runs} WHERE id = ?", run),
        bench.all("SELECT * FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run),
        bench.all("SELECT * FROM {compensation_runs} WHERE run_id = ?", run),
        bench.events(run),
    ]


def test_a_plan_needs_no_workflow_code_once_a_drive_has_seen_the_results(by_hand: Any) -> None:
    """COMP-2: the undo built from a result stands on the step's row; planning runs nothing of the application's."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = bench.start("trip")
    for _ in range(3):
        bench.deliver(bench.take())

    def gone(flow: Flow) -> None:
        raise AssertionError("the function was replayed for a plan")

    deploy(bench.engine, "trip", gone)
    assert bench.compensate(run) is True
    bench.run()
    assert bench.status(run) == "cancelled"
    assert trip.ran[2:] == [("undo", "no hotel"), ("undo", "flight")]


def test_a_plan_asks_the_function_for_the_undo_of_a_result_that_no_drive_has_seen(by_hand: Any) -> None:
    """COMP-2: the replay settles nothing and starts nothing; its next step never exists."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = trip.unseen(bench)
    assert bench.compensate(run) is True
    bench.run()
    assert trip.ran[2:] == [("undo", "no hotel"), ("undo", "flight")]
    assert bench.steps(run) == [("book", "completed"), ("book", "completed")]


def _mismatch(trip: Trip, flow: Flow) -> None:
    flow.run(trip.undo, "other")


def _broken_builder(trip: Trip, flow: Flow) -> None:
    flow.action(trip.book, "flight").compensate_with(trip.undo, "flight").run()
    flow.action(trip.book, "hotel").compensate_with(lambda number: number["id"]).run()


def _no_builder(trip: Trip, flow: Flow) -> None:
    flow.action(trip.book, "flight").compensate_with(trip.undo, "flight").run()
    flow.action(trip.book, "hotel").compensate_with(trip.undo, "hotel").run()
    flow.run(trip.book, "car")


def _about_to_complete(trip: Trip, flow: Flow) -> None:
    flow.action(trip.book, "flight").compensate_with(trip.undo, "flight").run()
    flow.action(trip.book, "hotel").compensate_with(lambda number: trip.undo.message(number)).run()


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (_mismatch, HistoryMismatchError, "book"),
        (_broken_builder, Exception, r"the compensation of step 2 \(book\) could not be built: TypeError"),
        (_no_builder, ConcurrentTransitionError, "step 2, which has to be undone"),
        (_about_to_complete, ConcurrentTransitionError, "about to complete"),
    ],
)
def test_a_plan_that_cannot_be_made_is_raised_and_the_run_stays_as_found(
    by_hand: Any, code: Any, error: Any, words: str
) -> None:
    """COMP-3, ANOM-1: an operator's call; never a partial rollback. It works once the code agrees."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = trip.unseen(bench)
    before = everything(bench, run)
    deploy(bench.engine, "trip", lambda flow: code(trip, flow))
    with pytest.raises(error, match=words):
        bench.compensate(run)
    assert everything(bench, run) == before
    assert (("replan_incomplete", {"run_id": run, "workflow": "trip", "missing": 2}) in bench.anomalies.lines) == (
        code is _no_builder
    )
    deploy(bench.engine, "trip", trip.trip)
    assert bench.compensate(run) is True
    bench.run()
    assert trip.ran[2:] == [("undo", "no hotel"), ("undo", "flight")]


def test_a_plan_in_a_process_that_does_not_know_the_workflow_says_what_to_load(by_hand: Any) -> None:
    """COMP-3: the command line without the application's module, for example."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = trip.unseen(bench)
    before = everything(bench, run)
    del bench.engine.workflows["trip"]
    with pytest.raises(
        ConcurrentTransitionError, match=r"'trip', which this process does not know: load the application's module"
    ):
        bench.compensate(run)
    assert everything(bench, run) == before


def test_a_failing_run_whose_undos_the_code_no_longer_builds_is_held_and_nothing_is_undone(by_hand: Any) -> None:
    """COMP-3, ANOM-1: never a partial rollback; with code that builds them, the run fails and everything is undone."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = trip.unseen(bench)

    def code(build: Any) -> Any:
        def fails(flow: Flow) -> None:
            flow.action(trip.book, "flight").compensate_with(trip.undo, "flight").run()
            flow.action(trip.book, "hotel").compensate_with(build).run()
            raise ValueError("no car")

        return fails

    deploy(bench.engine, "trip", code(trip.undo_nothing))
    bench.run()
    assert bench.status(run) == "waiting"
    assert bench.undos(run) == []
    assert ("replan_incomplete", {"run_id": run, "workflow": "trip", "missing": 2}) in bench.anomalies.lines
    [error] = bench.one("SELECT hold_error FROM {flow_runs} WHERE id = ?", run)
    assert "step 2 (book)" in error
    assert "nothing was rolled back" in error
    deploy(bench.engine, "trip", code(lambda number: trip.undo.message(number)))
    drive(bench.engine, run, bench.sender)
    bench.run()
    assert bench.status(run) == "failed"
    assert trip.ran[2:] == [("undo", "no hotel"), ("undo", "flight")]


def _breaks_off(trip: Trip, flow: Flow) -> None:
    flow.action(trip.book, "flight").compensate_with(trip.undo, "flight").run()
    raise ValueError("no longer sold")


@pytest.mark.parametrize("code", [_mismatch, _broken_builder, _breaks_off])
def test_a_failing_run_that_cannot_be_planned_is_told_of_and_held_off_twice_as_long_each_time(by_hand: Any, code: Any) -> None:
    """COMP-3, EXPIRE-2, ANOM-1: its step has failed for good while the code did not fit; nothing is committed. With code that fits,
    everything is undone."""
    trip = Trip()
    trip.refused.add("car")
    bench = by_hand(trip.declare)
    run = bench.start("trip")
    for _ in range(3):
        bench.deliver(bench.take())
    deploy(bench.engine, "trip", lambda flow: code(trip, flow))
    bench.runner.give_up(bench.deliver(bench.take()))
    bench.sender.queue.clear()  # the drive that it is woken for has taken place
    assert bench.steps(run)[2] == ("book", "failed")
    told = ("replan_incomplete", {"missing": 2}) if code is _breaks_off else ("replan_failed", {})
    windows = []
    for count in range(1, 4):
        lines = [line for line in bench.anomalies.lines if line[0].startswith("replan")]
        assert len(lines) == count
        assert lines[-1][0] == told[0]
        assert {"run_id": run, "workflow": "trip", **told[1]}.items() <= lines[-1][1].items()
        assert bench.one("SELECT status, rollback, hold_count FROM {flow_runs} WHERE id = ?", run) == ("waiting", "none", count)
        assert bench.undos(run) == []
        [until] = bench.one("SELECT hold_until FROM {flow_runs} WHERE id = ?", run)
        windows.append((until - bench.engine.now()) // 1000)
        bench.engine.clock.advance(windows[-1])
        assert monitor(bench.engine, bench.sender).held_again == 1
    assert windows == [60, 120, 240]
    deploy(bench.engine, "trip", trip.trip)
    bench.engine.clock.advance(480)
    assert monitor(bench.engine, bench.sender).resumed == 1
    bench.run()
    assert bench.status(run) == "failed"
    assert trip.ran[3:] == [("undo", "no hotel"), ("undo", "flight")]


def test_a_run_that_is_held_without_having_failed_is_no_rollback_that_is_due(by_hand: Any) -> None:
    """ANOM-1, HISTORY-1: an ordinary mismatch is told by the log line of held runs, and by no anomaly."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = bench.start("trip")
    bench.deliver(bench.take())
    deploy(bench.engine, "trip", lambda flow: _mismatch(trip, flow))
    bench.deliver(bench.take())
    assert bench.status(run) == "waiting"
    assert bench.codes() == []


# --- COMP-4, COMP-6: a compensation that fails -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_settings", "of_step", "halts"),
    [
        (None, None, True),
        ("continue", None, False),
        ("continue", "stop", True),
        ("stop", "continue", False),
        (None, CompensationFailurePolicy.CONTINUE, False),
    ],
)
def test_a_failing_undo_halts_the_rollback_or_is_passed_over(
    applications: Applications, of_settings: str | None, of_step: Any, halts: bool
) -> None:
    """COMP-4, COMP-6: stop by default, the step's policy before the settings'; both errors stand on the run."""
    sagas = {} if of_settings is None else {"default_compensation_failure_policy": of_settings}
    app = applications("sqlite", settings=Settings(sagas=sagas))  # type: ignore[arg-type]
    step, undo = app.step("step"), app.step("undo")
    fails = app.step("fails", raises=OSError("no line to the bank"))
    refuse = app.step("refuse", raises=ValueError("no such address"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo, 1).run()
        builder = flow.action(step).compensate_with(fails)
        (builder.on_compensation_failure(of_step) if of_step else builder).run()
        flow.action(step).compensate_with(undo, 3).run()
        flow.run(refuse)

    handle = order.run_sync()
    assert (handle.status, handle.rollback) == ("failed", "halted" if halts else "done")
    assert app.calls[4:] == [("undo", 3), ("fails",), *([] if halts else [("undo", 1)])]
    assert undos(handle) == [
        (3, "completed", "completed"), (2, "failed", "completed"), (1, "pending" if halts else "completed", "completed"),
    ]  # fmt: skip
    with pytest.raises(FlowFailedError, match="no such address"):
        handle.result()
    error, rollback_error = recorded_error(app, handle)
    assert error["cause"]["message"] == "no such address"
    assert rollback_error is not None
    assert rollback_error["type"] == "dramatiq_saga.errors.CompensationFailedError"
    assert "undo of step 2 (fails): OSError: no line to the bank" in rollback_error["message"]
    finished = next(event for event in handle.events() if event.type == "rollback.finished")
    assert finished.detail == ("halted; undone: 3" if halts else "done; undone: 3, 1")


@pytest.mark.claims_alone
def test_an_undo_whose_worker_is_gone_for_good_ends_its_level_unfinished(by_hand: Any) -> None:
    """COMP-4, PAR-3: nothing will ever reclaim it; the rollback halts with CompensationUnfinishedError, not in silence."""
    trip = Trip()
    bench = by_hand(trip.declare)
    run = trip.unseen(bench)
    bench.take()  # the drive's message
    bench.compensate(run)
    message = bench.message(bench.take())
    stop = bench.stop("undo outcome", where="before")
    dying = Background(lambda: bench.deliver(message))
    stop.wait_reached()  # claimed, and as good as dead
    bench.deliver(message)
    assert (bench.status(run), bench.undo(run, 2)) == ("cancelled", ("running", 1))
    rollback, error = bench.one("SELECT rollback, rollback_error FROM {flow_runs} WHERE id = ?", run)  # type: ignore[misc]
    assert rollback == "halted"
    assert "CompensationUnfinishedError" in error
    assert "undo of step 2 (undo) had not finished" in error
    stop.go()
    dying.result()
    assert bench.undo(run, 2) == ("completed", 1)  # a late report still lands on its own row
    assert bench.status(run) == "cancelled"


def test_an_undo_has_native_tries_of_its_own(lite: Application) -> None:
    """COMP-1, COMP-6: Dramatiq tries it again; the run waits for it."""
    step, refuse = lite.step("step"), lite.step("refuse", raises=ValueError("no"))

    @lite.actor(max_retries=3)
    def undo() -> None:
        lite.calls.append("undo")
        if lite.calls.count("undo") < 3:
            raise OSError("busy")

    @lite.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(refuse)

    handle = lite.run(order)
    assert (handle.status, handle.rollback) == ("failed", "done")
    [row] = handle.compensations()
    assert (row.status, row.attempts, row.tries) == ("completed", 3, 2)


# --- COMP-5, COMP-7, C25: the step that failed -----------------------------------------------------------------------


def test_the_undo_of_a_failed_step_is_told_whether_its_outcome_is_known(lite: Application) -> None:
    """C25, COMP-5, COMP-7: cut off by its time limit: unknown; refused by itself: failed; without the flag: not undone."""
    told: list[Any] = []

    @lite.actor
    def undo(name: str) -> None:
        step = current_step()
        assert step is not None
        assert step.undoes is not None
        told.append((name, step.undoes.sequence, step.undoes.actor, step.undoes.outcome, step.undoes.idempotency_key))

    @lite.actor(time_limit=40)
    def hangs() -> None:
        lite.calls.append("charged")
        give_up = threading.Event()
        while not give_up.wait(0.005):
            pass

    refuses = lite.step("refuses", raises=ValueError("no money"))

    @lite.workflow
    def unknown(flow: Flow) -> None:
        flow.action(hangs).compensate_with(undo, "unknown").compensate_step_on_self_failure().run()

    @lite.workflow
    def failed(flow: Flow) -> None:
        flow.action(refuses).compensate_with(undo, "failed").compensate_step_on_self_failure().run()

    @lite.workflow
    def plain(flow: Flow) -> None:
        flow.action(refuses).compensate_with(undo, "never").run()

    lite.start(time_limits=True)
    runs = [lite.run(declared) for declared in (unknown, failed, plain)]
    assert [run.status for run in runs] == ["failed"] * 3
    assert [run.rollback for run in runs] == ["done", "done", "none"]
    assert told == [
        ("unknown", 1, "hangs", "unknown", f"{runs[0].id}:1:0"),
        ("failed", 1, "refuses", "failed", f"{runs[1].id}:1:0"),
    ]


@pytest.mark.parametrize("flag", [True, False, None])
def test_the_settings_may_undo_every_failed_step_and_a_step_may_say_no(applications: Applications, flag: bool | None) -> None:
    """COMP-5: step before settings."""
    app = applications("sqlite", settings=Settings(sagas={"compensate_failed_step": True}))  # type: ignore[arg-type]
    refuse, undo = app.step("refuse", raises=ValueError("no")), app.step("undo")

    @app.workflow
    def order(flow: Flow) -> None:
        builder = flow.action(refuse).compensate_with(undo)
        (builder if flag is None else builder.compensate_step_on_self_failure(flag)).run()

    order.run_sync()
    assert app.calls == [("refuse",), *([("undo",)] if flag is not False else [])]


# --- COMP-9, C23: a rollback while a step is running -----------------------------------------------------------------


@pytest.mark.parametrize("self_failure", [False, True], ids=["plain", "self-failure"])
def test_a_step_that_runs_while_its_run_is_compensated_is_fenced(
    joined: Application, journal: list[dict[str, Any]], self_failure: bool
) -> None:
    """COMP-9, C23: its late outcome is rejected; with the flag it is undone as unknown, and not before its body has reported."""
    app = joined
    begun, go = threading.Event(), threading.Event()
    step, undo = app.step("step"), app.step("undo")

    @app.actor
    def charge() -> str:
        begun.set()
        assert go.wait(DEADLINE)
        app.calls.append("charged")
        return "late"

    @app.actor
    def refund() -> None:
        found = current_step()
        assert found is not None
        assert found.undoes is not None
        app.calls.append(("refund", found.undoes.outcome))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.action(charge).compensate_with(refund).compensate_step_on_self_failure(self_failure).run()

    handle = order.send()
    app.start(threads=4)
    assert begun.wait(DEADLINE)
    assert handle.compensate() is True
    if self_failure:
        assert app.calls == [("step",)]
        assert handle.status == "rolling_back"
    else:
        assert app.ended(handle) == "cancelled"
    go.set()
    assert app.ended(handle) == "cancelled"
    if self_failure:  # the message that would have looked again in ten minutes is still there, and will find nothing to do
        assert eventually(lambda: app.messages() == 1)
    else:
        app.drain()
    expected = ["charged", ("refund", "unknown"), ("undo",)] if self_failure else [("undo",), "charged"]
    assert app.calls == [("step",), *expected]
    assert (handle.actions()[1].status, handle.actions()[1].result) == ("cancelled", None)
    assert [line["sequence"] for line in journal if line["event"] == "outcome_rejected"] == [2]


def test_a_cancel_never_interrupts_a_rollback(joined: Application) -> None:
    """C23, COMP-9, STATUS-3: cancelled while an undo is executing, twice; both say no, and everything is undone."""
    app = joined
    begun, go = threading.Event(), threading.Event()
    step, refuse = app.step("step"), app.step("refuse", raises=ValueError("no"))

    @app.actor
    def undo(number: int) -> None:
        begun.set()
        assert go.wait(DEADLINE)
        app.calls.append(("undo", number))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo, 1).run()
        flow.action(step).compensate_with(undo, 2).run()
        flow.run(refuse)

    handle = order.send()
    app.start()
    assert begun.wait(DEADLINE)
    assert handle.cancel() is False
    assert handle.cancel() is False
    assert handle.compensate() is False
    assert handle.status == "rolling_back"
    go.set()
    assert app.ended(handle) == "failed"
    assert app.calls[3:] == [("undo", 2), ("undo", 1)]
    assert handle.rollback == "done"


# --- COMP-10: undos that cannot be built -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (lambda number: number["id"], r"the compensation of step 1 \(book\) could not be built: TypeError"),
        (lambda number: None, r"the compensation of step 1 \(book\) was built as NoneType: return a message"),
        (lambda number: number, "was built as str: return a message"),
    ],
)
def test_an_undo_that_cannot_be_built_holds_the_run_and_fails_nothing(by_hand: Any, builder: Any, words: str) -> None:
    """COMP-10, HISTORY-1: the step's result is kept, nothing is rolled back, and the run goes on with code that can build it."""
    trip = Trip()
    bench = by_hand(trip.declare)

    def code(build: Any) -> Any:
        def trip_(flow: Flow) -> None:
            flow.action(trip.book, "hotel").compensate_with(build).run()
            flow.run(trip.book, "car")

        return trip_

    deploy(bench.engine, "trip", code(builder))
    run = bench.start("trip")
    bench.run()
    assert bench.status(run) == "waiting"
    assert bench.steps(run) == [("book", "completed")]
    error, wakes, seen = bench.one("SELECT hold_error, wakes, wakes_seen FROM {flow_runs} WHERE id = ?", run)  # type: ignore[misc]
    assert re.search(words, error)
    assert wakes > seen
    assert bench.undos(run) == []
    deploy(bench.engine, "trip", code(lambda number: trip.undo.message(number)))
    drive(bench.engine, run, bench.sender)
    bench.run()
    assert bench.status(run) == "completed"
    assert bench.one("SELECT hold_error FROM {flow_runs} WHERE id = ?", run) == (None,)


def test_an_undo_built_from_a_result_is_refused_for_a_step_that_has_none(lite: Application) -> None:
    """COMP-10: together with compensate_step_on_self_failure(), in either order; the step never runs."""
    step, undo = lite.step("step"), lite.step("undo")

    @lite.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda made: undo.message(made)).compensate_step_on_self_failure().run()

    @lite.workflow
    def other(flow: Flow) -> None:
        flow.action(step).compensate_step_on_self_failure().compensate_with(lambda made: undo.message(made)).run()

    for declared in (one, other):
        with pytest.raises(FlowFailedError, match="no result to build one from; use compensate_with"):
            declared.run_sync().result()
    assert lite.calls == []
