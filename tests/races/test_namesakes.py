"""A run that was pruned, another one of the same id, and whoever has not heard of it yet.

Applications name runs after their orders and invoices, so an id may come again once its run has been pruned. With a retention shorter
than a body, or than the wait in a queue, a message or an outcome of the first run meets the rows of the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dramatiq.middleware import Shutdown, SkipMessage

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import runs
from dramatiq_saga.engine.claim import ClaimAttempt, Lost
from dramatiq_saga.engine.drive import drive
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.recovery import doctor
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.monitor import monitor
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import RECLAIM, Doorstep, at_first_step
from tests.support.bench import Background, Bench

REPAIRED = Settings.from_mapping({"repair.enabled": True})
RECLAIMED_UNDOS = Settings.from_mapping({"sagas": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 60}}}})


def again(worker: Bench, clock: ManualClock, run: str, workflow: str = "checkout") -> None:
    """End the run, prune it, and start another one under its id, up to its first step's message."""
    worker.cancel(run)
    clock.advance(1)
    assert prune(worker.store, before=clock.now()).pruned == 1
    worker.sender.queue.clear()
    worker.start(workflow, "another", run_id=run)
    worker.deliver(worker.take())


def at_undo(worker: Bench, run: str) -> Any:
    """Carry out the run's first step and have it undone: that undo's message."""
    worker.deliver(worker.take())
    assert worker.compensate(run)
    worker.sender.queue.popleft()
    return worker.message(worker.take())


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_message_of_a_pruned_run_runs_nothing_of_its_namesake(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """CLAIM-1, PRUNE-1: not even where the row at its place is one of another actor."""
    worker = bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    late = worker.message(worker.take())
    shop.bodies["number"] = lambda order: 7
    again(worker, clock, run, "lucky")
    assert (late.actor_name, worker.messages[0].actor) == ("reserve", "ship")
    worker.deliver(late)
    assert shop.order() == ["charge"]
    assert worker.step(run, 2) == ("pending", 0)
    assert worker.codes() == ["claim_lost"]
    worker.run()
    assert worker.status(run) == "completed"
    assert shop.order() == ["charge", "ship"]


def test_a_message_of_a_pruned_run_is_not_kept_for_a_row_of_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """CLAIM-2: the row is running, and may be claimed later, and not by this message."""
    first, second = bench(settings=RECLAIM), bench(settings=RECLAIM)
    run, message = at_first_step(first)
    again(first, clock, run)
    job = Delivery(first.message(first.take())).job
    late = Delivery(message).job
    assert job is not None
    assert late is not None
    ClaimAttempt(first.engine, job, nonce="1").run()
    lost = ClaimAttempt(second.engine, late, nonce="2").run()
    assert isinstance(lost, Lost)
    assert (lost.status, lost.retry_at) == ("running", None)


def test_a_message_that_does_not_say_which_run_it_is_of_is_taken_at_its_word(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1: one that was sent by a worker of an earlier version."""
    worker = bench()
    run, message = at_first_step(worker)
    del message.options["saga"]["created"]
    worker.deliver(message)
    assert worker.step(run) == ("completed", 1)
    undo = Outgoing("compensation", run, "refund", "default", 1)
    worker.sender.queue.clear()
    assert worker.compensate(run)
    worker.sender.queue.clear()
    worker.deliver(undo)
    assert worker.undos(run) == [("refund", "completed")]


def test_a_message_of_a_pruned_run_that_is_refused_fails_nothing_of_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """NATIVE-3: it was too old, and its step was pending, as that of the other run is."""
    worker = bench()
    run, message = at_first_step(worker)
    again(worker, clock, run)
    job = Delivery(message).job
    assert job is not None
    worker.runner.refuse(job, "charge", TimeoutError("too old"))
    assert worker.step(run) == ("pending", 0)
    undo = at_undo(worker, run)
    late = Delivery(undo).job
    assert late is not None
    worker.deliver(undo)
    again(worker, clock, run)
    at_undo(worker, run)
    worker.runner.refuse(late, "refund", TimeoutError("too old"))
    assert worker.undo(run) == ("pending", 0)


@pytest.mark.claims_alone
@pytest.mark.parametrize("ending", ["value", "failure", "last failure", "shutdown"])
@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_straggler_of_a_pruned_run_does_not_end_a_step_of_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock, ending: str
) -> None:
    """FENCE-1, PRUNE-1: the step at its place is running as well, after as many claims."""
    first, second = bench(), bench()
    old, new = Doorstep(), Doorstep()
    shop.bodies["charge"] = old
    run, message = at_first_step(first)
    straggler = Background(lambda: first.deliver(message))
    old.wait()
    again(second, clock, run)
    shop.bodies["charge"] = new
    successor = Background(lambda: second.deliver(second.take()))
    new.wait()
    if ending == "value":
        old.succeed("charged too late")
    elif ending == "shutdown":
        old.fail(Shutdown())
    else:
        old.fail(ValueError("too late") if ending == "failure" else SkipMessage())
    delivery = straggler.result()
    assert delivery.state == "done"
    assert second.step(run) == ("running", 1)
    assert ("outcome_rejected" in first.codes()) == (ending != "shutdown")
    new.succeed("charged")
    successor.result()
    second.run()
    assert second.status(run) == "completed"
    assert shop.ran[2:] == [("reserve", "another"), ("ship", "another")]


def test_a_failure_of_a_pruned_run_is_not_given_up_for_its_namesake(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """NATIVE-2: both steps have failed once, and only the one that is gone has no further try."""
    first, second = bench(), bench()

    def declined(order: str) -> Any:
        raise ValueError("declined")

    shop.bodies["charge"] = declined
    run, message = at_first_step(first)
    old = first.deliver(message)
    again(second, clock, run)
    new = second.deliver(second.take())
    assert (old.state, new.state) == ("failed", "failed")
    first.runner.give_up(old)
    assert second.status(run) == "running"
    assert second.one("SELECT status, given_up FROM {action_runs} WHERE run_id = ?", run) == ("failed", False)
    second.runner.give_up(new)
    assert second.status(run) == "failed"


def test_a_failed_undo_of_a_pruned_run_is_not_given_up_for_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """NATIVE-2, for undos: another worker has carried out the first, and the second waits for its next try."""
    first, second = bench(), bench()

    def declined(order: str) -> Any:
        raise ValueError("declined")

    run = first.start("checkout", "42")
    first.deliver(first.take())
    shop.bodies["refund"] = declined
    undo = at_undo(first, run)
    old = first.deliver(undo)
    del shop.bodies["refund"]
    second.deliver(undo)
    assert second.status(run) == "cancelled"
    again(second, clock, run)
    shop.bodies["refund"] = declined
    new = second.deliver(at_undo(second, run))
    assert (old.state, new.state) == ("failed", "failed")
    first.runner.give_up(old)
    assert second.one("SELECT status, given_up FROM {compensation_runs} WHERE run_id = ?", run) == ("failed", False)
    assert second.status(run) == "rolling_back"


@pytest.mark.claims_alone
def test_a_straggler_of_a_pruned_run_does_not_take_the_outcome_of_its_namesake_for_its_own(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """FENCE-1: what it has done is journalled, and not lost in silence."""
    first, second = bench(), bench()
    charge = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(first)
    straggler = Background(lambda: first.deliver(message))
    charge.wait()
    del shop.bodies["charge"]
    again(second, clock, run)
    second.deliver(second.take())
    assert second.step(run) == ("completed", 1)
    charge.succeed("charged too late")
    straggler.result()
    assert first.codes() == ["outcome_rejected"]


@pytest.mark.claims_alone
def test_a_straggling_undo_of_a_pruned_run_does_not_take_the_outcome_of_its_namesake_for_its_own(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """FENCE-1."""
    first, second = bench(settings=RECLAIMED_UNDOS), bench(settings=RECLAIMED_UNDOS)
    run = first.start("checkout", "42")
    first.deliver(first.take())
    refund = shop.bodies["refund"] = Doorstep()
    undo = at_undo(first, run)
    straggler = Background(lambda: first.deliver(undo))
    refund.wait()
    del shop.bodies["refund"]
    clock.advance(61)
    second.deliver(undo)
    again(second, clock, run)
    second.deliver(at_undo(second, run))
    assert second.undo(run) == ("completed", 1)
    refund.succeed(None)
    straggler.result()
    assert first.codes() == ["outcome_rejected"]


@pytest.mark.claims_alone
def test_a_straggler_of_a_pruned_run_does_not_end_an_undo_of_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """FENCE-1, RECLAIM-1: its undo was taken over and the run ended without it."""
    first, second = bench(settings=RECLAIMED_UNDOS), bench(settings=RECLAIMED_UNDOS)
    old, new = Doorstep(), Doorstep()
    run = first.start("checkout", "42")
    first.deliver(first.take())
    shop.bodies["refund"] = old
    undo = at_undo(first, run)
    straggler = Background(lambda: first.deliver(undo))
    old.wait()
    clock.advance(61)
    shop.bodies["refund"] = lambda order: None
    second.deliver(undo)
    assert second.status(run) == "cancelled"
    again(second, clock, run)
    shop.bodies["refund"] = new
    undo = at_undo(second, run)
    successor = Background(lambda: second.deliver(undo))
    new.wait()
    old.succeed(None)
    straggler.result()
    assert second.undo(run) == ("running", 1)
    assert first.codes() == ["outcome_rejected"]
    new.succeed(None)
    successor.result()
    assert second.status(run) == "cancelled"


@pytest.mark.claims_alone
def test_the_report_of_a_straggler_of_a_pruned_run_lets_no_undo_of_its_namesake_go(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """COMP-9: no refund before the charge of this very run has reported."""
    first, second = bench(), bench()
    old, new = Doorstep(), Doorstep()
    shop.bodies["charge"] = old
    run, message = at_first_step(first, "careful")
    straggler = Background(lambda: first.deliver(message))
    old.wait()
    again(second, clock, run, "careful")
    shop.bodies["charge"] = new
    charge = second.take()
    successor = Background(lambda: second.deliver(charge))
    new.wait()
    assert second.compensate(run)
    second.sender.queue.clear()
    old.succeed("charged too late")
    straggler.result()
    assert first.messages == []
    assert second.one("SELECT not_before IS NULL FROM {compensation_runs} WHERE run_id = ?", run) == (False,)
    new.succeed("charged")
    successor.result()
    assert replace(second.messages[-1], created_at=None) == Outgoing("compensation", run, "refund", "default", 1)


def test_a_straggler_of_a_pruned_run_is_told_that_nobody_wants_it_any_more(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """API, ``current_step().cancelled``: the row at its place belongs to another run."""
    first, second = bench(), bench()
    run, message = at_first_step(first)
    delivery = Delivery(message)
    assert delivery.job is not None
    claim = ClaimAttempt(first.engine, delivery.job, nonce="1").run()
    assert not isinstance(claim, Lost)
    step = first.runner._step(claim)
    assert not step.cancelled
    again(second, clock, run)
    job = Delivery(second.message(second.take())).job
    assert job is not None
    ClaimAttempt(second.engine, job, nonce="1").run()
    assert second.step(run) == ("running", 1)
    assert step.cancelled


# --- drives, plans and sweeps that come late -------------------------------------------------------------------------


def replaced(worker: Bench, clock: ManualClock, run: str, workflow: str = "checkout") -> None:
    """End the run, prune it, and start another one under its id, which nobody drives yet."""
    worker.cancel(run)
    clock.advance(1)
    assert prune(worker.store, before=clock.now()).pruned == 1
    worker.start(workflow, "another", run_id=run)


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_drive_of_a_pruned_run_decides_nothing_for_its_namesake(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """DRIVE-1, PRUNE-1: the first drive of each stands at the same revision and wake count."""
    first, second = bench(), bench()
    run = first.start("checkout", "42")
    first.overtake("decision", lambda: replaced(second, clock, run))
    first.deliver(first.take())
    assert first.codes() == ["transition_lost"]
    first.run()
    assert first.status(run) == "completed"
    assert shop.ran == [("charge", "another"), ("reserve", "another"), ("ship", "another")]


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_drive_that_ends_a_pruned_run_does_not_end_its_namesake(bench: MakeBench, clock: ManualClock) -> None:
    """DRIVE-1."""
    first, second = bench(), bench()
    run = first.start("polite", "42")
    first.overtake("decision", lambda: replaced(second, clock, run, "polite"))
    first.deliver(first.take())
    assert first.one("SELECT status, result FROM {flow_runs} WHERE id = ?", run) == ("completed", b'"thanks for another"')


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_drive_of_a_pruned_run_records_no_side_effect_for_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """SIDE-1."""
    first, second = bench(), bench()
    shop.bodies["number"] = lambda order: f"number of {order}"
    run = first.start("lucky", "42")
    first.overtake("side effect", lambda: replaced(second, clock, run, "lucky"))
    first.deliver(first.take())
    first.run()
    assert shop.ran == [("ship", "another/number of another")]


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_the_rollback_of_a_pruned_run_is_not_that_of_its_namesake(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """COMP-1: both have come as far as the other, and what is undone is what the one has done that is there."""
    first, second = bench(), bench()
    run, message = at_first_step(first)
    first.deliver(message)

    def overtaking() -> None:
        again(second, clock, run)
        second.deliver(second.take())

    first.overtake("plan", overtaking)
    assert first.compensate(run)
    first.sender.queue.popleft()
    first.run()
    assert first.status(run) == "cancelled"
    assert shop.ran == [("charge", "42"), ("charge", "another"), ("refund", "another")]


def test_the_deadline_of_a_pruned_run_does_not_end_its_namesake(bench: MakeBench, clock: ManualClock) -> None:
    """EXPIRE-1: nothing of it was to be undone."""
    first, second = bench(), bench()
    run = first.start("checkout", "42", expires_in=5)
    clock.advance(6)
    first.overtake("cancel", lambda: replaced(second, clock, run))
    first.ring()
    assert first.one("SELECT status, expires_at FROM {flow_runs} WHERE id = ?", run) == ("running", None)
    assert first.codes() == ["transition_lost"]


def test_a_pruned_run_that_was_to_be_held_does_not_hold_its_namesake(bench: MakeBench, clock: ManualClock) -> None:
    """HISTORY-1."""
    first, second = bench(), bench()
    run, _ = at_first_step(first)
    found = runs.as_found(first.engine, run)
    assert found is not None
    again(second, clock, run)
    assert not runs.hold(first.engine, found, ValueError("what it was held for"), first.sender, None)
    assert first.one("SELECT hold_error, hold_count FROM {flow_runs} WHERE id = ?", run) == (None, 0)


def test_a_sweep_that_has_seen_a_pruned_run_held_does_not_take_its_namesake(bench: MakeBench, clock: ManualClock) -> None:
    """HISTORY-1: not even where that is held until the same moment."""
    first, second = bench(), bench()
    due = clock.now()

    def held(worker: Bench) -> None:
        found = runs.as_found(worker.engine, run)
        assert found is not None
        assert runs.hold(worker.engine, found, ValueError("no such step"), worker.sender, None)
        worker.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET hold_until = ? WHERE id = ?", (due, run)))

    def overtaking() -> None:
        replaced(second, clock, run)
        held(second)

    run = first.start("checkout", "42")
    held(first)
    first.overtake("held run", overtaking)
    report = monitor(first.engine, first.sender)
    assert (report.skipped, report.driven) == (1, 0)
    assert first.one("SELECT hold_until FROM {flow_runs} WHERE id = ?", run) == (due,)


def test_a_kick_that_meets_the_end_of_a_pruned_run_sends_what_its_namesake_waits_for(
    bench: MakeBench, clock: ManualClock
) -> None:
    """KICK-1: a message of the one that is gone would claim nothing."""
    first, second = bench(), bench()
    run, _ = at_first_step(first)
    first.overtake("kick", lambda: again(second, clock, run))
    assert len(kick(first.engine, run, first.sender).sent) == 1
    assert [message.kind for message in first.messages] == ["drive", "step"]
    first.run()
    assert first.status(run) == "completed"


def test_a_kick_that_meets_the_rollback_of_a_namesake_sends_its_undo(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """KICK-1, COMP-1."""
    first, second = bench(settings=RECLAIMED_UNDOS), bench(settings=RECLAIMED_UNDOS)
    run = first.start("checkout", "42")
    first.deliver(first.take())
    at_undo(first, run)

    def overtaking() -> None:
        end_undo(second, run)
        again(second, clock, run)
        at_undo(second, run)

    first.overtake("kick", overtaking)
    assert len(kick(first.engine, run, first.sender).sent) == 1
    first.run()
    assert first.status(run) == "cancelled"
    assert shop.ran[-1] == ("refund", "another")


def end_undo(worker: Bench, run: str) -> None:
    """Carry out the undo of the run's first step, whose message nobody has."""
    kick(worker.engine, run, worker.sender)
    worker.run()
    assert worker.status(run) == "cancelled"


def test_a_look_at_the_rollback_of_a_pruned_run_sends_the_undo_of_its_namesake(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """COMP-1: of both the first undo was not sent yet."""
    first, second = bench(settings=RECLAIMED_UNDOS), bench(settings=RECLAIMED_UNDOS)

    def unsent(worker: Bench) -> None:
        at_undo(worker, run)
        worker.store.write(lambda tx: tx.run("UPDATE {compensation_runs} SET sent_at = NULL WHERE run_id = ?", (run,)))

    def overtaking() -> None:
        end_undo(second, run)
        again(second, clock, run)
        unsent(second)

    run = first.start("checkout", "42")
    first.deliver(first.take())
    unsent(first)
    first.overtake("advance", overtaking)
    drive(first.engine, run, first.sender)
    first.run()
    assert first.status(run) == "cancelled"
    assert shop.ran[-1] == ("refund", "another")


@pytest.mark.parametrize("lost", ["step", "run", "undo"])
@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_doctor_that_has_seen_a_pruned_run_lost_does_not_repair_its_namesake(
    bench: MakeBench, clock: ManualClock, lost: str
) -> None:
    """DOCTOR-2: it stands where the other stood, and is too young to be lost."""
    first, second = bench(settings=REPAIRED), bench(settings=REPAIRED)
    run = first.start("checkout", "42")
    if lost != "run":
        first.deliver(first.take())
    if lost == "undo":
        at_undo(first, run)
    clock.advance(61)
    first.sender.queue.clear()

    def overtaking() -> None:
        if lost == "undo":
            end_undo(second, run)
        if lost == "run":
            replaced(second, clock, run)
        else:
            again(second, clock, run)
        if lost == "undo":
            at_undo(second, run)

    first.overtake("repair of a run" if lost == "run" else "repair", overtaking)
    report = doctor.repair(first.engine, first.sender)
    assert report.skipped == 1
    assert first.messages == []
    spent = "SELECT repair_attempts FROM {%s} WHERE %s = ?"
    table = {"run": ("flow_runs", "id"), "step": ("action_runs", "run_id"), "undo": ("compensation_runs", "run_id")}[lost]
    assert first.all(spent % table, run) == [(0,)]
