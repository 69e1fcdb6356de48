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
from dramatiq_saga.engine.claim import ClaimAttempt, Lost
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import RECLAIM, Doorstep, at_first_step
from tests.support.bench import Background, Bench

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
