"""Timers and deadlines that meet somebody: a signal, an outcome, a claim, the end of the run, another that fires the same.

As in ``test_interleavings.py``: one worker stands at a named point while another does what must happen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_saga import SignalTimeoutError, StepExpiredError
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import timers
from dramatiq_saga.engine.claim import ClaimAttempt, Job, Lost
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.engine.wakes import WAKE
from dramatiq_saga.recovery import timer_loop
from dramatiq_saga.recovery.monitor import monitor
from tests.races.test_interleavings import Doorstep, blocked, postgresql_only
from tests.races.test_signals import result, signals
from tests.support.bench import Background, Bench
from tests.support.deploying import deploy
from tests.support.waiting import eventually

Make = Callable[[], Bench]


class World:
    """What the steps' bodies do and have done."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.actors: dict[str, Any] = {}
        self.doomed: Callable[..., Any]
        self.bodies: dict[str, Callable[[], Any]] = {}

    def body(self, name: str) -> Callable[[], Any]:
        def body() -> Any:
            self.ran.append(name)
            return self.bodies[name]() if name in self.bodies else name

        return body

    def declare(self, bench: Bench) -> None:
        self.actors = {name: bench.actor(self.body(name), actor_name=name) for name in ("charge", "refund")}
        charge, refund = self.actors.values()

        def patient(flow: Any) -> Any:
            try:
                return flow.await_signal("decision", wait_seconds=60)
            except SignalTimeoutError:
                return ["late", flow.await_signal("decision")]

        def hurry(flow: Any) -> Any:
            try:
                return flow.action(charge).expires_in(60).run()
            except StepExpiredError:
                return "expired"

        def careful(flow: Any) -> Any:
            return flow.action(charge).compensate_with(refund).compensate_step_on_self_failure().expires_in(60).run()

        def forgiving(flow: Any) -> Any:
            try:
                flow.action(charge).compensate_with(refund).compensate_step_on_self_failure().expires_in(60).run()
            except StepExpiredError:
                return flow.await_signal("decision")

        def doomed(flow: Any) -> Any:
            flow.action(charge).compensate_with(lambda made: refund.message()).run()
            return flow.await_signal("decision")

        def naps(flow: Any) -> Any:
            flow.sleep(60)
            flow.sleep(60)
            return "rested"

        def pair(flow: Any) -> Any:
            flow.action(charge).compensate_with(lambda made: refund.message()).run()
            return flow.run(charge)

        def notes(flow: Any) -> Any:
            flow.await_signal("decision")
            flow.side_effect("note", lambda: self.ran.append("note"))

        self.doomed = doomed
        for function in (patient, hurry, careful, forgiving, doomed, naps, pair, notes):
            bench.workflow(function)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bench(address: str, table_prefix: str, clock: ManualClock, world: World) -> Iterator[Make]:
    """``bench()`` makes one more worker on this test's tables."""
    made: list[Bench] = []

    def make() -> Bench:
        made.append(Bench(address, world.declare, prefix=table_prefix, clock=clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def fire(worker: Bench, run: str) -> timers.Fired:
    return timers.fire(worker.engine, run, worker.sender)


def waits(worker: Bench, run: str) -> list[str]:
    return [row[0] for row in worker.all("SELECT status FROM {waits} WHERE run_id = ? ORDER BY sequence", run)]


# --- a wait's signal and its timeout -----------------------------------------------------------------------------------


def test_a_signal_and_the_timeout_of_its_wait_have_one_winner(bench: Make, clock: ManualClock) -> None:
    """SIG-2: the timeout has found the wait overdue; the signal comes before its write, and after the wait's moment."""
    one, two = bench(), bench()
    run = one.start("patient")
    one.run()
    clock.advance(60)
    stop = one.stop("timers")
    firing = Background(lambda: fire(one, run))
    stop.wait_reached()
    two.signal(run, "decision", "yes")
    assert waits(two, run) == ["timed_out"]
    stop.go()
    assert not firing.result().any
    two.run()
    one.run()
    assert result(one, run) == '["late","yes"]'
    assert [word for word in one.events(run) if word.startswith("signal.")] == [
        "signal.received", "signal.timed_out", "signal.consumed",
    ]  # fmt: skip


@postgresql_only
def test_a_timeout_stands_behind_the_signal_that_was_in_time_and_loses(
    bench: Make, clock: ManualClock, table_prefix: str
) -> None:
    """SIG-2, DRIVE-7: the signal was accepted in time and is not committed yet when the wait's moment passes."""
    one, two = bench(), bench()
    run = one.start("patient")
    one.run()
    stop = two.stop("signal", where="inside", statement="INSERT INTO {signals}")
    sending = Background(lambda: two.signal(run, "decision", "yes"))
    stop.wait_reached()
    clock.advance(60)
    firing = Background(lambda: fire(one, run))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    sending.result()
    assert not firing.result().any
    two.run()
    assert result(one, run) == '"yes"'
    assert waits(one, run) == ["consumed"]


def test_of_two_that_fire_one_run_each_thing_is_ended_once(bench: Make, clock: ManualClock) -> None:
    """TIMER-1, C37: an alarm and a sweep have found the same wait; the second finds it ended."""
    one, two = bench(), bench()
    run = one.start("patient")
    one.run()
    clock.advance(60)
    fired: list[timers.Fired] = []
    one.overtake("timers", lambda: fired.append(fire(two, run)))
    fired.append(fire(one, run))
    assert [(each.waits, each.steps, each.runs) for each in fired] == [(1, 0, 0), (0, 0, 0)]
    assert one.events(run).count("signal.timed_out") == 1


# --- a step's outcome and its deadline ---------------------------------------------------------------------------------


def test_an_outcome_and_the_deadline_of_its_step_have_one_winner(bench: Make, clock: ManualClock, world: World) -> None:
    """EXPIRE-1, FENCE-1: the deadline has found the step at work; its outcome lands first, and stands."""
    one, two = bench(), bench()
    run = one.start("hurry")
    one.deliver(one.take())
    world.bodies["charge"] = lambda: clock.advance(60)
    stop = one.stop("outcome and decision")
    working = Background(lambda: one.deliver(one.take()))
    stop.wait_reached()
    second = two.stop("timers")
    firing = Background(lambda: fire(two, run))
    second.wait_reached()
    stop.go()
    working.result()
    second.go()
    assert not firing.result().any
    assert result(one, run) == "null"
    assert one.step(run) == ("completed", 1)


def test_a_deadline_that_is_written_first_voids_the_claim(bench: Make, clock: ManualClock, world: World) -> None:
    """EXPIRE-1, FENCE-1, FENCE-2: the body has returned, its outcome is about to be written; it is refused, and the row stays expired."""
    one, two = bench(), bench()
    run = one.start("hurry")
    one.deliver(one.take())
    world.bodies["charge"] = lambda: clock.advance(60)

    def expire() -> None:
        assert fire(two, run).steps == 1

    one.overtake("outcome and decision", expire)
    one.deliver(one.take())
    assert one.step(run) == ("expired", 1)
    assert result(one, run) == '"expired"'
    assert one.codes() == ["outcome_rejected"]
    assert one.events(run).count("action.completed") == 0


def test_a_claim_that_lands_before_the_deadline_is_written_does_not_save_the_step(
    bench: Make, clock: ManualClock, world: World
) -> None:
    """EXPIRE-1, STATUS-1: the row has moved on since it was read, so it is read again, and is overdue all the same."""
    one, two = bench(), bench()
    run = one.start("hurry")
    one.deliver(one.take())
    message = one.message(one.take())
    clock.advance(59.999)
    claim = one.stop("claim", where="after")
    working: list[Background] = []

    def be_claimed() -> None:  # while the deadline is still ahead; the clocks of two machines may differ that much
        clock.advance(-0.001)
        working.append(Background(lambda: one.deliver(message)))
        claim.wait_reached()
        clock.advance(0.001)

    clock.advance(0.001)
    two.overtake("timers", be_claimed)
    try:
        fired = fire(two, run)
    finally:
        claim.go()
    working[0].result()
    assert fired.steps == 1
    assert one.step(run)[0] == "expired"
    assert result(one, run) == '"expired"'


def test_no_body_begins_after_the_deadline_of_its_step(bench: Make, clock: ManualClock, world: World) -> None:
    """EXPIRE-1, C37: the step's message comes before its alarm; the claim says no, and the step expires on the spot."""
    one = bench()
    run = one.start("hurry")
    one.deliver(one.take())
    clock.advance(60)
    one.run()
    assert world.ran == []
    assert one.step(run) == ("expired", 0)
    assert result(one, run) == '"expired"'
    assert one.ring() == 1
    assert one.events(run).count("action.expired") == 1


def test_an_expired_step_is_undone_only_once_its_body_can_have_ended(bench: Make, clock: ManualClock, world: World) -> None:
    """EXPIRE-1, COMP-9: it was at work when it expired; no refund before the charge has reported."""
    one, two = bench(), bench()
    run = one.start("careful")
    one.deliver(one.take())

    def expire() -> str:
        clock.advance(60)
        assert fire(two, run).steps == 1
        assert two.status(run) == "rolling_back"
        assert two.undo(run) == ("pending", 0)
        row = two.one("SELECT undoes, not_before FROM {compensation_runs} WHERE run_id = ?", run)
        assert row is not None
        assert row[0] == "unknown"
        assert row[1] > clock.now()
        for message in list(two.sender.queue):  # due later: an early delivery claims nothing
            two.sender.queue.remove(message)
        return "charged"

    world.bodies["charge"] = expire
    one.deliver(one.take())
    assert world.ran == ["charge"]
    one.run()
    assert world.ran == ["charge", "refund"]
    assert one.status(run) == "failed"


def test_no_undo_waits_for_a_body_that_reported_before_its_rollback_was_planned(
    bench: Make, clock: ManualClock, world: World
) -> None:
    """COMP-9: its report was refused, for the step had expired; the rollback that comes later knows that it is over."""
    one, two = bench(), bench()
    run = one.start("forgiving")
    one.deliver(one.take())

    def expire() -> str:
        clock.advance(60)
        assert fire(two, run).steps == 1
        return "charged"

    world.bodies["charge"] = expire
    one.run()
    assert one.codes() == ["outcome_rejected"]
    assert two.status(run) == "waiting"
    assert two.compensate(run)
    assert two.one("SELECT undoes, not_before FROM {compensation_runs} WHERE run_id = ?", run) == ("unknown", None)
    two.run()
    assert world.ran == ["charge", "refund"]
    assert one.status(run) == "cancelled"


def at_work_after_its_deadline(
    worker: Bench, other: Bench, world: World, clock: ManualClock
) -> tuple[str, Doorstep, Background]:
    """A run that waits for a signal, whose only step has expired and is still at work."""
    door = Doorstep()
    world.bodies["charge"] = lambda: door("")
    run = worker.start("forgiving")
    worker.deliver(worker.take())
    message = worker.take()
    working = Background(lambda: worker.deliver(message))
    door.wait()
    clock.advance(60)
    assert fire(other, run).steps == 1
    assert other.status(run) == "waiting"
    return run, door, working


def test_a_plan_loses_to_a_refused_report_that_lands_while_it_is_made(bench: Make, clock: ManualClock, world: World) -> None:
    """COMP-9: it has found the body of an expired step at work; that reports, and the plan that is written has its undo wait for nobody."""
    one, two = bench(), bench()
    run, door, working = at_work_after_its_deadline(one, two, world, clock)
    stop = two.stop("plan")
    planning = Background(lambda: two.compensate(run))
    stop.wait_reached()
    door.succeed("charged")
    working.result()
    stop.go()
    assert planning.result()
    assert two.one("SELECT undoes, not_before FROM {compensation_runs} WHERE run_id = ?", run) == ("unknown", None)
    two.run()
    assert world.ran == ["charge", "refund"]


@postgresql_only
def test_a_refused_report_that_comes_while_a_plan_is_written_lets_the_undo_go(
    bench: Make, clock: ManualClock, world: World, table_prefix: str
) -> None:
    """COMP-9, DRIVE-7: the plan has looked at the step for the last time; the note of the report waits for it, and finds the undo waiting."""
    one, two = bench(), bench()
    run, door, working = at_work_after_its_deadline(one, two, world, clock)
    note = one.stop("body reported")
    door.succeed("charged")
    note.wait_reached()
    stop = two.stop("plan", where="inside", statement="SELECT status, attempts, worker_id FROM {action_runs}")
    planning = Background(lambda: two.compensate(run))
    stop.wait_reached()
    note.go()
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert planning.result()
    working.result()
    assert two.one("SELECT undoes, not_before FROM {compensation_runs} WHERE run_id = ?", run) == ("unknown", None)
    one.run()
    assert world.ran == ["charge", "refund"]


# --- a run's end and its deadline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["completion", "cancel", "compensate"])
def test_a_run_that_ends_before_its_expiry_is_written_has_ended_so(bench: Make, clock: ManualClock, other: str) -> None:
    """C38, EXPIRE-1: the plan is made; the run completes, or is ended by an operator; the expiry changes nothing."""
    one, two = bench(), bench()
    run = one.start("doomed")
    one.run()
    one.engine.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET expires_at = ? WHERE id = ?", (clock.now() + 60_000, run)))
    clock.advance(60)

    def end() -> None:
        if other == "completion":
            two.signal(run, "decision", "yes")
            two.run()
        elif other == "cancel":
            two.cancel(run)
        else:
            two.compensate(run)

    one.overtake("plan", end)
    assert fire(one, run).runs == 0
    one.run()
    two.run()
    assert one.status(run) == ("completed" if other == "completion" else "cancelled")
    assert one.events(run).count("flow.expired") == 0
    assert one.undos(run) == ([("refund", "completed")] if other == "compensate" else [])


def test_a_decision_that_comes_after_the_expiry_loses(bench: Make, clock: ManualClock) -> None:
    """C38: the drive was about to complete the run; it is being undone, and ends as expired, once."""
    one, two = bench(), bench()
    run = one.start("doomed")
    one.run()
    one.signal(run, "decision", "yes")
    one.engine.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET expires_at = ? WHERE id = ?", (clock.now() - 1, run)))

    def expire() -> None:
        assert fire(two, run).runs == 1

    one.overtake("decision", expire)
    assert one.deliver(one.take()) is Driven.ROLLING_BACK
    one.run()
    two.run()
    assert one.status(run) == "expired"
    assert one.undos(run) == [("refund", "completed")]
    assert [word for word in one.events(run) if word in ("flow.expired", "flow.completed")] == ["flow.expired"]


def test_a_signal_that_was_in_time_is_seen_before_the_run_expires(bench: Make, clock: ManualClock) -> None:
    """C37: the signal had come before the deadline, and no drive had seen it when everybody went down."""
    one = bench()
    run = one.start("doomed")
    one.run()
    one.engine.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET expires_at = ? WHERE id = ?", (clock.now() + 1000, run)))
    one.signal(run, "decision", "yes")
    clock.advance(3600)
    assert fire(one, run).runs == 0
    assert result(one, run) == '"yes"'


# --- after the run's deadline, before anybody has ended it -------------------------------------------------------------


def overdue(worker: Bench, workflow: str, deliver: int = 0) -> str:
    """A run that is ``deliver`` messages old when its deadline passes; its alarm has not come yet."""
    run = worker.start(workflow, expires_in=60)
    for _ in range(deliver):
        worker.deliver(worker.take())
    worker.engine.clock.advance(60)
    return run


def test_the_first_drive_of_an_overdue_run_expires_it_and_does_not_call_its_function(
    bench: Make, clock: ManualClock, world: World
) -> None:
    """EXPIRE-1, C37: every worker was down; the drive's message is older than the alarm and comes first."""
    one = bench()
    called: list[str] = []
    deploy(one.engine, "naps", lambda flow: called.append("naps"))
    run = overdue(one, "naps")
    assert one.deliver(one.take()) is Driven.EXPIRED
    assert (called, one.status(run)) == ([], "expired")
    assert one.events(run) == ["flow.started", "flow.expired"]
    assert one.ring() == 1, "and the alarm finds nothing to do"
    assert one.events(run) == ["flow.started", "flow.expired"]


def test_no_body_begins_after_the_deadline_of_its_run(bench: Make, clock: ManualClock, world: World) -> None:
    """EXPIRE-1: the step was scheduled in time and its message comes too late; the claim says no, and the run expires on the spot."""
    one = bench()
    run = overdue(one, "doomed", deliver=1)
    delivery = one.deliver(one.take())
    assert (world.ran, delivery.state) == ([], "done")
    assert one.codes() == ["claim_lost"]
    assert (one.step(run), one.status(run)) == (("cancelled", 0), "expired")
    assert list(one.sender.queue) == []


@pytest.mark.parametrize("alone", [False, True])
def test_an_outcome_after_the_deadline_starts_nothing_and_is_undone(
    bench: Make, clock: ManualClock, world: World, alone: bool
) -> None:
    """EXPIRE-1, FENCE-2: the body was at work when the moment passed; its outcome stands, nothing follows it, its undo runs once."""
    one = bench()
    run = one.start("pair", expires_in=60)
    one.deliver(one.take())
    world.bodies["charge"] = lambda: clock.advance(60)
    if alone:
        one.engine.drives = lambda workflow, queue: False  # type: ignore[method-assign]
    one.deliver(one.take())
    one.engine.drives = lambda workflow, queue: True  # type: ignore[method-assign]
    one.run()
    assert world.ran == ["charge", "refund"]
    assert one.steps(run) == [("charge", "completed")]
    assert one.status(run) == "expired"
    assert one.events(run).count("flow.expired") == 1


@pytest.mark.parametrize("workflow", ["doomed", "notes"])
def test_a_drive_of_an_overdue_run_starts_no_step_and_records_no_side_effect(
    bench: Make, clock: ManualClock, world: World, workflow: str
) -> None:
    """EXPIRE-1, SIDE-1: the signal came in time, and what would follow it would not be."""
    one = bench()
    run = one.start(workflow, expires_in=60)
    one.run()
    one.signal(run, "decision", "more")
    clock.advance(60)
    ran = list(world.ran)
    deploy(one.engine, "doomed", lambda flow: [world.doomed(flow), flow.run(world.actors["charge"])])
    assert one.deliver(one.take()) is Driven.EXPIRED
    one.run()
    assert one.status(run) == "expired"
    assert world.ran == ran + ["refund"] * (workflow == "doomed")
    assert one.one("SELECT COUNT(*) FROM {side_effects} WHERE run_id = ?", run) == (0,)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_an_overdue_run_that_can_only_end_ends_as_it_would_have(
    bench: Make, clock: ManualClock, world: World, ending: str, alone: bool
) -> None:
    """C38, EXPIRE-1: its last outcome lands after the deadline and before anybody has looked; the work is done, and is not undone."""
    one = bench()
    run = one.start("hurry" if ending == "returns" else "pair", expires_in=60)
    one.deliver(one.take())
    one.store.write(lambda tx: tx.run("UPDATE {action_runs} SET expires_at = NULL WHERE run_id = ?", (run,)))

    def late() -> str:
        clock.advance(60)
        if ending == "raises":
            raise LookupError("no such card")
        return "charged"

    world.bodies["charge"] = late
    one.engine.drives = lambda workflow, queue: not alone  # type: ignore[method-assign]
    delivery = one.deliver(one.take())
    if delivery.state == "failed":
        one.runner.give_up(delivery)
    one.engine.drives = lambda workflow, queue: True  # type: ignore[method-assign]
    one.run()
    assert one.status(run) == ("completed" if ending == "returns" else "failed")
    assert one.events(run).count("flow.expired") == 0


@pytest.mark.parametrize("other", ["cancel", "alarm"])
def test_a_drive_that_expires_a_run_loses_to_its_end(bench: Make, clock: ManualClock, world: World, other: str) -> None:
    """C38, STATUS-1: an operator, or the alarm in another worker, is first; the run ends once, and the drive looks again."""
    one, two = bench(), bench()
    run = one.start("doomed", expires_in=60)
    one.run()
    one.store.write(lambda tx: tx.run(WAKE, (clock.now(), run)))
    clock.advance(60)
    one.overtake("plan", lambda: two.cancel(run) if other == "cancel" else fire(two, run))
    one.deliver(Outgoing("drive", run, "doomed", "default"))
    one.run()
    two.run()
    assert one.status(run) == ("cancelled" if other == "cancel" else "expired")
    assert one.codes() == ["transition_lost"]
    assert world.ran == ["charge"] + ["refund"] * (other == "alarm")
    assert one.events(run).count("flow.expired") == (other == "alarm")


def test_an_overdue_run_that_cannot_be_planned_starts_nothing_while_it_is_held_off(
    bench: Make, clock: ManualClock, world: World
) -> None:
    """EXPIRE-2, RECLAIM-3: a step's message is neither run nor put back for ever; once the code is mended the run expires."""
    one = bench()
    run = one.start("pair", expires_in=60)
    one.deliver(one.take())
    one.engine.drives = lambda workflow, queue: False  # type: ignore[method-assign]
    one.deliver(one.take())
    one.store.write(lambda tx: tx.run("UPDATE {action_runs} SET expires_at = NULL WHERE run_id = ?", (run,)))
    one.engine.drives = lambda workflow, queue: True  # type: ignore[method-assign]
    good = one.engine.workflows["pair"].function
    one.sender.queue.clear()
    clock.advance(60)
    deploy(one.engine, "pair", lambda flow: flow.sleep(1))
    assert fire(one, run).failed == 1
    one.store.write(
        lambda tx: tx.run(
            "UPDATE {action_runs} SET status = 'running', reclaim_stale_at = 1, ended_at = NULL, result = NULL WHERE run_id = ?",
            (run,),
        )
    )
    one.engine.cache.drop(run)  # that was behind everybody's back
    lost = ClaimAttempt(one.engine, Job("step", run, 1, 0, 1, "message"), nonce="n").run()
    assert isinstance(lost, Lost)
    assert (lost.overdue, lost.status, lost.retry_at) == (True, "running", None)
    assert world.ran == ["charge"]
    deploy(one.engine, "pair", good)
    clock.advance(3600)
    assert fire(one, run).runs == 1
    assert one.status(run) == "expired"


# --- alarms ------------------------------------------------------------------------------------------------------------


def test_a_run_has_one_alarm_at_a_time_and_the_next_when_it_has_gone_off(bench: Make, clock: ManualClock) -> None:
    """TIMER-1: two naps, two alarms, each staged with what creates or ends a nap; a repeated delivery sends nothing."""
    one = bench()
    began = clock.now()
    run = one.start("naps")
    one.run()
    assert one.alarms == [began + 60_000]
    (first,) = one.sender.alarms
    assert one.ring() == 0
    clock.advance(60)
    assert one.ring() == 1
    assert one.alarms == [began + 120_000]
    one.deliver(first)
    assert one.alarms == [began + 120_000]
    assert waits(one, run) == ["consumed", "waiting"]
    clock.advance(60)
    assert one.ring() == 1
    assert one.alarms == []
    assert result(one, run) == '"rested"'


def test_an_alarm_that_comes_too_early_is_set_again(bench: Make, clock: ManualClock) -> None:
    """TIMER-1, CLOCK-1: delivered by a machine whose clock runs ahead; the nap is not lost."""
    one = bench()
    run = one.start("naps")
    one.run()
    early = one.sender.alarms.popleft()
    one.deliver(early)
    assert one.alarms == [early.at]
    assert waits(one, run) == ["waiting"]


def test_a_deadline_that_is_created_while_an_alarm_goes_off_has_its_own(bench: Make, clock: ManualClock) -> None:
    """TIMER-1: the alarm has looked and found nothing to come; a decision parks the run before it says so."""
    one, two = bench(), bench()
    run = one.start("doomed")
    one.run()
    one.engine.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET timer_at = ? WHERE id = ?", (clock.now(), run)))
    moment = clock.now() + 5000

    def new_wait() -> None:
        def write(tx: Any) -> None:
            tx.run(
                "INSERT INTO {waits} (run_id, sequence, kind, cycle, status, due_at, created_at) VALUES (?, 9, 'timer', 0, 'waiting', ?, ?)",
                (run, moment, clock.now()),
            )

        two.store.write(write)

    one.overtake("alarm", new_wait)
    fire(one, run)
    assert one.alarms == [moment]


def test_an_expired_deadline_leaves_no_alarm_behind(bench: Make, clock: ManualClock) -> None:
    """TIMER-1: once nothing is to come, the run's row says so, and the next deadline sets an alarm of its own."""
    one = bench()
    run = one.start("patient")
    one.run()
    clock.advance(60)
    assert one.ring() == 1
    assert one.alarms == []
    assert one.one("SELECT timer_at FROM {flow_runs} WHERE id = ?", run) == (None,)
    assert one.status(run) == "waiting"
    assert signals(one, run) == []


# --- loops and sweeps --------------------------------------------------------------------------------------------------


def test_of_two_loops_one_sends_for_what_is_due(bench: Make, clock: ManualClock) -> None:
    """TIMER-1: both have the same listing; the message is sent once, and again only when it seems lost."""
    one, two = bench(), bench()
    run = one.start("patient")
    one.run()
    one.sender.alarms.clear()
    one.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET timer_at = NULL"))
    assert timer_loop.look(one.engine, one.sender) == 0
    clock.advance(60)
    (seen,) = timers.find_due(two.engine, unsent=True)
    assert timer_loop.look(one.engine, one.sender) == 1
    assert not timers.send(two.engine, two.sender, seen, again_after=15_000)
    assert timer_loop.look(two.engine, two.sender) == 0
    assert (len(one.alarms), len(two.alarms)) == (1, 0)
    clock.advance(16)
    assert timer_loop.look(two.engine, two.sender) == 1
    two.ring()
    one.ring()
    assert waits(one, run)[0] == "timed_out"


def test_a_sweep_that_meets_an_alarm_counts_what_it_has_not_done(bench: Make, clock: ManualClock) -> None:
    """DOCTOR-2, LOOP-1: the sweep has listed the run; the alarm ends what is due; the sweep skips it."""
    one, two = bench(), bench()
    one.start("patient")
    one.run()
    clock.advance(60)
    two.overtake("timers", lambda: one.ring() and None)
    report = monitor(two.engine, two.sender)
    assert (report.timed_out, report.skipped, report.errors) == (0, 1, 0)
