"""HISTORY-1, C67, C68: ``verify`` says before a deploy what a drive would find after it, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dramatiq_saga import Flow
from dramatiq_saga.engine import verify as verifying
from dramatiq_saga.engine.drive import drive
from dramatiq_saga.engine.verify import Finding, VerifyReport, summarise, verify_run, verify_runs
from dramatiq_saga.errors import FlowNotFoundError
from dramatiq_saga.operations import Operator, RefusedError
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.store.models import TABLES
from tests.conformance.engine.test_rules_history import CHANGES, Parcels
from tests.support.application import Application, Applications
from tests.support.bench import Bench
from tests.support.deploying import deploy
from tests.support.waiting import eventually


def everything(bench: Bench) -> dict[str, list[Any]]:
    """Every row of every table."""
    return {table: sorted(bench.all(f"SELECT * FROM {{{table}}}"), key=repr) for table in TABLES}


class ReadOnly:
    """From here on a write of this bench, or a message of it, fails the test."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.before = everything(bench)
        self.queued = len(bench.messages)

        def refuse(*_: Any) -> Any:
            raise AssertionError("verifying wrote something")

        monkeypatch.setattr(bench.store, "write", refuse)

    def holds(self) -> None:
        assert everything(self.bench) == self.before
        assert len(self.bench.messages) == self.queued


# --- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "sequence", "recorded", "asked"), CHANGES)
def test_each_change_is_told_before_it_is_deployed(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch, code: Any, sequence: int, recorded: str, asked: str
) -> None:
    """C68: the difference that would hold the run, without holding it; the code that is there now fits."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    watched = ReadOnly(bench, monkeypatch)
    verdict = verify_run(bench.engine, run)
    assert verdict is not None
    assert (verdict.fits, verdict.ends, verdict.findings) == (True, "suspended", ())
    deploy(bench.engine, "parcel", lambda flow: code(parcels, flow))
    verdict = verify_run(bench.engine, run)
    assert verdict is not None
    assert not verdict.fits
    (finding,) = verdict.findings
    assert (finding.kind, finding.sequence, finding.recorded, finding.asked) == ("mismatch", sequence, recorded, asked)
    assert parcels.ran == ["pack", "weigh"]
    watched.holds()


def test_a_walk_that_needs_an_unrecorded_side_effect_has_fitted_so_far(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIDE-1, HISTORY-1: the side effect is not called, and what follows from it is nobody's guess."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    bench.store.write(
        lambda tx: tx.run(
            "UPDATE {action_runs} SET status = 'completed', started_at = 1, ended_at = 2, attempts = 1, result = ?", (b"1",)
        )
    )

    def later(flow: Flow) -> None:
        parcels.parcel(flow)
        flow.side_effect("dice", lambda: parcels.ran.append("thrown"))
        raise AssertionError("went on without it")

    deploy(bench.engine, "parcel", later)
    watched = ReadOnly(bench, monkeypatch)
    verdict = verify_run(bench.engine, run)
    assert verdict is not None
    assert (verdict.fits, verdict.ends) == (True, "side effect")
    assert "thrown" not in parcels.ran
    watched.holds()


def test_a_workflow_that_nobody_declares_is_named_with_the_way_out(by_hand: Any) -> None:
    """C67: runs that nobody can resume are told, with the reason; they are not silently stranded."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    del bench.engine.workflows["parcel"]
    report = summarise(verify_runs(bench.engine))
    (problem,) = report.problems
    assert (problem.finding.kind, problem.finding.workflow, problem.run_ids) == ("unknown workflow", "parcel", [run])
    assert "declares no workflow named 'parcel'" in problem.finding.reason
    assert "workflow(name=...)" in problem.finding.reason
    assert not report.fits


def test_what_cannot_be_decoded_is_told_and_the_next_run_follows(by_hand: Any) -> None:
    """C67: one unreadable history does not end the pass."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    runs = [parcels.parked(bench)]
    runs.append(bench.start("parcel"))
    bench.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET args = ? WHERE id = ?", (b"\x80no", runs[0])))
    verdicts = {verdict.run_id: verdict for verdict in verify_runs(bench.engine)}
    assert [finding.kind for finding in verdicts[runs[0]].findings] == ["unreadable"]
    assert verdicts[runs[1]].fits


@pytest.mark.parametrize("mistake", ["a builder dropped", "a send", "sys.exit"])
def test_a_mistake_that_would_hold_a_run_is_told(by_hand: Any, mistake: str) -> None:
    """HISTORY-1: as a drive would have it: not a mismatch, and the run would be held."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)

    def careless(flow: Flow) -> Any:
        flow.run(parcels.pack)
        if mistake == "a send":
            parcels.wrap.send()
        elif mistake == "sys.exit":
            raise SystemExit(3)
        else:
            flow.action(parcels.weigh)
        return parcels.parcel

    deploy(bench.engine, "parcel", careless)
    verdict = verify_run(bench.engine, run)
    assert verdict is not None
    assert [finding.kind for finding in verdict.findings] == ["refused"]
    assert not verdict.fits


def test_a_compensation_that_nobody_declares_any_more_is_told(by_hand: Any) -> None:
    """COMP-2, C67: what undoes a step is recorded with it; a deploy that drops the actor would leave the step not undone."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    parcels.parked(bench)
    del bench.broker.actors["undo"]
    del bench.broker.actors["ship"]
    report = summarise(verify_runs(bench.engine))
    assert [(one.finding.kind, one.finding.sequence) for one in report.problems] == [("unknown actor", 1), ("unknown actor", 3)]
    assert "to be undone by 'undo'" in report.problems[0].finding.reason
    assert "declares no actor 'ship'" in report.problems[1].finding.reason
    assert not report.fits


def test_code_that_fits_and_would_fail_the_run_is_a_warning(by_hand: Any) -> None:
    """DRIVE-5: an error on new ground is the code's own affair; it is told, and it is no mismatch."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = bench.start("parcel")

    def broken(flow: Flow) -> None:
        raise AttributeError("no such helper")

    deploy(bench.engine, "parcel", broken)
    report = summarise(verify_runs(bench.engine))
    assert report.fits
    assert report.problems[0].finding == Finding(
        "fails", "parcel", "the next drive fails the run: AttributeError: no such helper"
    )
    assert report.problems[0].run_ids == [run]


# --- every construct -------------------------------------------------------------------------------------------------


class Harbour:
    """A run with every construct behind it, parked on a signal; and changes of each."""

    def __init__(self) -> None:
        self.change = ""
        self.ran: list[str] = []

    def declare(self, bench: Bench) -> None:
        def load(name: str = "") -> str:
            self.ran.append(name)
            return name

        self.load = bench.actor(load)
        self.inner = bench.workflow(lambda flow: flow.run(self.load, "inner"), name="inner")
        self.other = bench.workflow(lambda flow: flow.run(self.load, "other"), name="other")
        bench.workflow(self.trip)

    def trip(self, flow: Flow) -> Any:
        is_ = self.change.__eq__
        if is_("a child into a step"):
            flow.run(self.load, "inner")
        else:
            flow.child(self.other if is_("another child") else self.inner).run()
        width = 3 if is_("a wider block") else 1 if is_("a narrower block") else 2
        members = [flow.action(self.load, f"member {number}") for number in range(width)]
        if is_("a block one by one"):
            for member in members:
                member.run()
        else:
            (flow.saga if is_("a block into a group") else flow.parallel)(*members).run()
        if is_("a step into a child"):
            flow.child(self.other).run()
        else:
            flow.run(self.load, "step")
        flow.side_effect("tide", lambda: 1) if not is_("the time before a side effect") else flow.now()
        if is_("a timer for a signal"):
            flow.sleep(1)
        else:
            flow.await_signal("departed" if is_("another signal") else "arrived")
        return flow.run(self.load, "last")


HARBOUR = {
    "a child into a step": (1, "child 'inner'", "step 'load'"),
    "another child": (1, "child 'inner'", "child 'other'"),
    "a wider block": (2, "parallel block of 2", "parallel block of 3"),
    "a narrower block": (2, "parallel block of 2", "parallel block of 1"),
    "a block into a group": (2, "parallel block of 2", "saga group of 2"),
    "a block one by one": (2, "parallel block of 2", "step 'load'"),
    "a step into a child": (5, "step 'load'", "child 'other'"),
    "the time before a side effect": (6, "side effect 'tide'", "side effect 'now'"),
    "a timer for a signal": (7, "wait for signal 'arrived'", "timer"),
    "another signal": (7, "wait for signal 'arrived'", "wait for signal 'departed'"),
}


@pytest.mark.parametrize("change", HARBOUR)
def test_a_change_of_any_construct_is_told_holds_the_run_and_is_resumed_by_a_kick(by_hand: Any, change: str) -> None:
    """C68, C67: width, kind and name; told before, held when the signal comes, which is kept; and on with code that fits."""
    sequence, recorded, asked = HARBOUR[change]
    harbour = Harbour()
    bench = by_hand(harbour.declare)
    run = bench.start("trip")
    bench.run()
    assert bench.status(run) == "waiting"
    ran = list(harbour.ran)
    assert summarise(verify_runs(bench.engine)).fits
    harbour.change = change
    (problem,) = summarise(verify_runs(bench.engine)).problems
    finding = problem.finding
    assert (finding.kind, finding.sequence, finding.recorded, finding.asked) == ("mismatch", sequence, recorded, asked)
    bench.signal(run, "arrived")
    bench.run()
    (held,) = bench.one("SELECT hold_error FROM {flow_runs} WHERE id = ?", run)
    assert (bench.status(run), bench.undos(run), harbour.ran) == ("waiting", [], ran)
    assert f"at sequence {sequence}: recorded is {recorded}, the code asks for {asked}" in json.loads(held)["message"]
    harbour.change = ""
    kick(bench.engine, run, bench.sender)
    bench.run()
    assert bench.status(run) == "completed"
    assert harbour.ran == [*ran, "last"]


# --- held runs -------------------------------------------------------------------------------------------------------


def test_runs_that_are_held_already_are_looked_at_too(by_hand: Any) -> None:
    """C68: held, verified with code that fits, and going on at once by a kick."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    deploy(bench.engine, "parcel", lambda flow: CHANGES[0][0](parcels, flow))
    bench.deliver(bench.take())
    report = summarise(verify_runs(bench.engine))
    assert (report.looked_at, report.unfit, report.held, report.held_and_fit) == (1, 1, 1, 0)
    assert report.problems[0].held == 1
    deploy(bench.engine, "parcel", parcels.parcel)
    report = summarise(verify_runs(bench.engine))
    assert (report.unfit, report.held, report.held_and_fit, report.problems) == (0, 1, 1, [])
    drive(bench.engine, run, bench.sender)
    assert bench.status(run) == "completed"


def test_a_run_that_is_rolling_back_is_not_walked(by_hand: Any) -> None:
    """COMP-2: from the plan on the rows decide alone, so no code can fail to fit."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    bench.compensate(run)
    deploy(bench.engine, "parcel", lambda flow: pytest.fail("was walked"))
    (verdict,) = verify_runs(bench.engine)
    assert (verdict.run_id, verdict.status, verdict.ends, verdict.fits) == (run, "rolling_back", None, True)
    del bench.broker.actors["undo"]
    again = verify_run(bench.engine, run)
    assert again is not None
    assert [(finding.kind, finding.sequence) for finding in again.findings] == [("unknown actor", 1)]
    assert "step 'pack', sequence 1, is to be undone by 'undo'" in again.findings[0].reason


# --- many runs -------------------------------------------------------------------------------------------------------


def test_every_live_run_is_looked_at_once_and_page_by_page(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page and one history at a time, in one order, although all were created in the same millisecond; nothing is cached."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    ended = parcels.parked(bench)
    bench.run()
    started = {bench.start("parcel") for _ in range(8)}
    bench.engine.cache.drop(ended)
    monkeypatch.setattr(verifying, "BATCH", 3)
    reads: list[int] = []
    real = bench.store.read

    def count(operation: Callable[[Any], Any]) -> Any:
        reads.append(1)
        return real(operation)

    monkeypatch.setattr(bench.store, "read", count)
    verdicts = verify_runs(bench.engine)
    first = next(verdicts)
    assert len(reads) == 2  # one page, one history
    assert {first.run_id, *(verdict.run_id for verdict in verdicts)} == started
    assert len(reads) == 3 + 8
    assert len(bench.engine.cache._entries) == 0
    everyone = [verdict.run_id for verdict in verify_runs(bench.engine, finished=True)]
    assert sorted(everyone) == sorted({*started, ended})


def test_runs_that_start_or_go_meanwhile_do_not_disturb_it(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run pruned after it was listed is passed over; one started after the pass began is not part of it."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    runs = [bench.start("parcel") for _ in range(3)]
    monkeypatch.setattr(verifying, "BATCH", 2)
    verdicts = verify_runs(bench.engine)
    seen = [next(verdicts).run_id]
    bench.engine.store.clock.advance(1)
    bench.start("parcel")
    (gone,) = set(sorted(runs)[:2]) - set(seen)
    bench.store.write(lambda tx: tx.run("DELETE FROM {flow_runs} WHERE id = ?", (gone,)))
    seen += [verdict.run_id for verdict in verdicts]
    assert sorted(seen) == sorted(set(runs) - {gone})


def test_a_report_is_as_long_as_its_findings_and_not_as_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded memory: the same finding is kept once, with the first runs by name; beyond the most it is counted."""
    monkeypatch.setattr(verifying, "MOST_FINDINGS", 2)
    monkeypatch.setattr(verifying, "MOST_NAMED", 3)

    def verdict(number: int, finding: Finding | None) -> verifying.Verdict:
        return verifying.Verdict(f"r{number}", "w", None, "waiting", number % 2, "suspended", (finding,) if finding else ())

    findings = [Finding("mismatch", "w", f"number {number}") for number in range(3)]
    report: VerifyReport = summarise(
        [*(verdict(n, findings[0]) for n in range(5)), verdict(5, findings[1]), verdict(6, findings[2]), verdict(7, None)]
    )
    assert [(one.finding, one.runs, one.run_ids) for one in report.problems] == [
        (findings[0], 5, ["r0", "r1", "r2"]),
        (findings[1], 1, ["r5"]),
    ]
    assert (report.looked_at, report.unfit, report.more, report.held, report.held_and_fit) == (8, 7, 1, 4, 1)


# --- as an operator asks for it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_an_operator_verifies_a_deploy_on_every_store(kind: str, applications: Applications) -> None:
    """C67, C68: parked runs of two workflows, one of which the new code does not fit; named one by one, and by workflow."""
    app = applications(kind)
    first, second = app.step("first", gives=1), app.step("second", gives=2, queue_name=app.queue + "x")

    @app.workflow(version="1")
    def one(flow: Flow) -> Any:
        return flow.run(first), flow.run(second)

    @app.workflow
    def two(flow: Flow) -> Any:
        return flow.side_effect("dice", lambda: 4), flow.run(second)

    runs = [one.send(), two.send(), one.send()]
    app.start(queues={app.queue})
    for run in runs:
        eventually(lambda run=run: run.actions() and run.actions()[-1].actor == "second")
    app.stop()
    operator = Operator.on_broker(app.broker)
    assert operator.verify().fits
    deploy(app.engine, "one", lambda flow: (flow.run(second), flow.run(first)))
    report = operator.verify()
    assert (report.looked_at, report.unfit) == (3, 2)
    (problem,) = report.problems
    assert (problem.finding.recorded, problem.finding.asked) == ("step 'first'", "step 'second'")
    assert sorted(problem.run_ids) == sorted([runs[0].id, runs[2].id])
    assert operator.verify(workflow="two").looked_at == 1
    assert operator.verify(runs[1].id).fits
    assert not operator.verify(runs[0].id).fits
    assert {run.status for run in runs} <= {"running", "waiting"}
    with pytest.raises(FlowNotFoundError):
        operator.verify("nobody")
    with pytest.raises(RefusedError, match=r"no workflow named 'onne'.*did you mean one"):
        operator.verify(workflow="onne")


def test_a_run_that_has_ended_can_be_verified_by_name(lite: Application) -> None:
    """A finished run shows what code has to fit; verified only when it is asked for."""
    step = lite.step("step", gives=1)

    @lite.workflow
    def order(flow: Flow) -> Any:
        return flow.run(step)

    handle = order.run_sync()
    operator = Operator.on_broker(lite.broker)
    assert operator.verify().looked_at == 0
    assert operator.verify(finished=True).looked_at == 1
    deploy(lite.engine, "order", lambda flow: None)
    assert not operator.verify(handle.id).fits
