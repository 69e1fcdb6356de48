"""Two workers of one run, stopped where they meet: who comes second loses, and knows it.

Every test stops one worker at a named point, lets another do what must happen in between, and lets the first go on. On SQLite
a write has the file to itself, so the points lie between reading and writing; on PostgreSQL they lie inside transactions as
well, while real row locks are held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from dramatiq.middleware import Shutdown

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import runs
from dramatiq_saga.engine.claim import Claim, ClaimAttempt
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import ConcurrentTransitionError
from dramatiq_saga.events import ActionOutcomeRejected, subscribe, unsubscribe
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench, Shop
from tests.support import servers
from tests.support.bench import Background, Bench
from tests.support.waiting import eventually

postgresql_only = pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)

RECLAIM = Settings.from_mapping({"actions": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 60}}}})


def at_first_step(worker: Bench, workflow: str = "checkout") -> tuple[str, Any]:
    """A run whose first step is scheduled: its id, and that step's message."""
    run = worker.start(workflow, "42")
    assert worker.deliver(worker.take()) is Driven.DECIDED
    return run, worker.message(worker.take())


def blocked(prefix: str) -> int:
    """How many connections wait for a lock while they work on tables with this prefix."""
    with servers.connect_postgresql() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s", (f"%{prefix}%",)
        ).fetchone()
    return int(row[0])


class Doorstep:
    """A body that stands until it is told how to end."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._leave = threading.Event()
        self._ending: Callable[[], Any] = lambda: None

    def __call__(self, order: str) -> Any:
        self.entered.set()
        assert self._leave.wait(20)
        return self._ending()

    def wait(self) -> None:
        assert self.entered.wait(20)

    def succeed(self, value: Any) -> None:
        self._ending = lambda: value
        self._leave.set()

    def fail(self, error: BaseException) -> None:
        def ending() -> Any:
            raise error

        self._ending = ending
        self._leave.set()


# --- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.claims_alone
def test_the_second_of_two_claims_of_one_row_runs_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1, CLAIM-2: both workers have decided to claim; the one whose write comes second loses."""
    first, second = bench(), bench()
    run, message = at_first_step(first)
    stop = second.stop("claim")
    late = Background(lambda: second.deliver(message))
    stop.wait_reached()
    first.deliver(message)
    stop.go()
    assert late.result().state == "done"
    assert shop.order() == ["charge"]
    assert first.step(run) == ("completed", 1)
    assert second.codes() == ["claim_lost"]
    assert first.events(run).count("action.started") == 1


@postgresql_only
def test_a_start_that_meets_a_prune_starts(bench: MakeBench) -> None:
    """DRIVE-3, PRUNE-1: the run was there when the new one was to be stored, and is not any more when it is looked at."""
    worker, operator = bench(), bench()
    worker.start("checkout", "42", run_id="nightly")
    worker.take()
    assert operator.cancel("nightly")
    stop = worker.stop("start", where="inside", statement="{flow_runs} (id, workflow")
    starting = Background(lambda: worker.start("checkout", "42", run_id="nightly"))
    stop.wait_reached()
    assert prune(operator.store, before=operator.engine.now() + 1).pruned == 1
    stop.go()
    starting.result()
    assert [outgoing.run_id for outgoing in worker.messages] == ["nightly"]
    assert worker.one("SELECT status FROM {flow_runs} WHERE id = ?", "nightly") == ("pending",)


@pytest.mark.claims_alone
@postgresql_only
def test_a_claim_waits_for_the_row_that_another_is_claiming_and_loses(bench: MakeBench, shop: Shop, table_prefix: str) -> None:
    """CLAIM-1, DRIVE-7: the winner has changed the row and not committed yet."""
    first, second = bench(), bench()
    run, message = at_first_step(first)
    stop = first.stop("claim", where="inside", statement="UPDATE {action_runs}")
    winner = Background(lambda: first.deliver(message))
    stop.wait_reached()
    loser = Background(lambda: second.deliver(message))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    winner.result()
    loser.result()
    assert shop.order() == ["charge"]
    assert first.step(run) == ("completed", 1)
    assert second.codes() == ["claim_lost"]


def test_a_claim_that_comes_after_a_cancel_runs_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1, STATUS-2, C29."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    stop = worker.stop("claim")
    late = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    assert operator.cancel(run)
    stop.go()
    late.result()
    assert shop.ran == []
    assert worker.status(run) == "cancelled"
    assert worker.step(run) == ("cancelled", 0)
    assert worker.codes() == ["claim_lost"]


@postgresql_only
def test_a_claim_waits_for_a_cancel_that_holds_the_run_and_loses(bench: MakeBench, shop: Shop, table_prefix: str) -> None:
    """CLAIM-1, DRIVE-7: the run's row is locked first, so neither can slip between the other's two writes."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    stop = operator.stop("cancel", where="inside", statement="UPDATE {flow_runs}")
    cancelling = Background(lambda: operator.cancel(run))
    stop.wait_reached()
    late = Background(lambda: worker.deliver(message))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert cancelling.result()
    late.result()
    assert shop.ran == []
    assert worker.step(run) == ("cancelled", 0)


@postgresql_only
def test_a_cancel_waits_for_a_claim_and_cancels_the_step_that_it_claimed(
    bench: MakeBench, shop: Shop, table_prefix: str
) -> None:
    """STATUS-2, FENCE-1: the claim was first, so its body runs, and its outcome is refused."""
    worker, operator = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(worker)
    stop = worker.stop("claim", where="inside", statement="UPDATE {action_runs}")
    doubt = operator.stop("cancel", where="inside", statement="UPDATE {flow_runs}")
    working = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    cancelling = Background(lambda: operator.cancel(run))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    body.wait()
    doubt.go()
    assert cancelling.result()
    body.succeed("too late")
    working.result()
    assert worker.step(run) == ("cancelled", 1)
    assert worker.codes() == ["outcome_rejected"]


@pytest.mark.parametrize("database_kind", ["mariadb"], indirect=True)
def test_a_claim_that_was_cancelled_before_it_was_read_back_runs_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-3, where COMMIT is no proof: nothing is wrong with the transaction; the claim is lost to the cancel, and says so."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    engine = worker.runner.engine
    write = engine.store.write

    def then_cancelled(operation: Any) -> Any:
        done = write(operation)
        if operation.__qualname__.endswith("ClaimAttempt._write"):
            assert operator.cancel(run)
        return done

    engine.store.write = then_cancelled  # type: ignore[method-assign]
    worker.deliver(message)
    assert shop.order() == []
    assert worker.step(run) == ("cancelled", 1)
    assert worker.codes() == ["claim_lost"]


def test_a_claim_that_comes_after_the_plan_of_a_rollback_runs_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1, COMP-1: under ``rolling_back`` no step starts."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)  # charge is done, reserve is scheduled
    stop = worker.stop("claim")
    late = Background(lambda: worker.deliver(worker.take()))
    stop.wait_reached()
    assert operator.compensate(run)
    stop.go()
    late.result()
    assert shop.order() == ["charge"]
    assert worker.steps(run) == [("charge", "completed"), ("reserve", "cancelled")]
    operator.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.status(run) == "cancelled"


def test_a_plan_loses_to_a_claim_that_lands_while_it_is_made_and_undoes_that_step_too(bench: MakeBench, shop: Shop) -> None:
    """COMP-9: a step that is running when the rollback is planned is undone as ``unknown``; a plan made before it ran is dropped."""
    worker, operator = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(worker, "careful")
    stop = operator.stop("cancel")
    planning = Background(lambda: operator.compensate(run))
    stop.wait_reached()  # it has found nothing to undo
    working = Background(lambda: worker.deliver(message))
    body.wait()
    stop.go()
    assert planning.result()
    assert operator.undos(run) == [("refund", "pending")]
    assert operator.one("SELECT undoes FROM {compensation_runs} WHERE run_id = ?", run) == ("unknown",)
    body.succeed("charged")
    working.result()
    assert worker.codes() == ["outcome_rejected"]
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert worker.status(run) == "cancelled"


def test_an_undo_waits_until_the_fenced_body_has_reported(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """COMP-9: no refund before the charge has reported, gone stale or run out of time; its message is put back meanwhile."""
    worker, operator = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(worker, "careful")
    working = Background(lambda: worker.deliver(message))
    body.wait()
    assert operator.compensate(run)
    refund = operator.message(operator.take())
    assert operator.deliver(refund).claim is None
    assert operator.undo(run) == ("pending", 0)
    clock.advance(61)  # the charge's claim has gone stale
    operator.deliver(refund)
    assert shop.order() == ["charge", "refund"]
    assert operator.status(run) == "cancelled"
    body.succeed("charged after all")
    working.result()
    assert worker.codes() == ["outcome_rejected"]


@pytest.mark.parametrize("ending", ["fails", "is given back"])
def test_a_plan_loses_to_a_failed_try_that_lands_while_it_is_written(bench: MakeBench, shop: Shop, ending: str) -> None:
    """COMP-5, COMP-9: the plan was made of a step at work; it is made again of one that has reported, and nothing is waited for."""
    worker, operator = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(worker, "careful")
    working = Background(lambda: worker.deliver(message))
    body.wait()
    stop = operator.stop("plan")
    planning = Background(lambda: operator.compensate(run))
    stop.wait_reached()
    body.fail(ValueError("declined") if ending == "fails" else Shutdown())
    working.result()
    assert worker.step(run) == ("failed" if ending == "fails" else "pending", 1)
    stop.go()
    assert planning.result()
    expected = ("failed" if ending == "fails" else "unknown", None)
    assert operator.one("SELECT undoes, not_before FROM {compensation_runs} WHERE run_id = ?", run) == expected
    operator.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.status(run) == "cancelled"
    assert worker.codes() == []


@postgresql_only
@pytest.mark.parametrize("ending", ["fails", "is given back"])
def test_a_step_that_reports_while_its_plan_is_written_is_refused_and_its_undo_goes(
    bench: MakeBench, shop: Shop, table_prefix: str, ending: str
) -> None:
    """COMP-9, DRIVE-7: between the plan's last look at the step and its settling no report can slip in; it waits, and is fenced."""
    worker, operator = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(worker, "careful")
    working = Background(lambda: worker.deliver(message))
    body.wait()
    stop = operator.stop("plan", where="inside", statement="SELECT status, attempts, worker_id FROM {action_runs}")
    planning = Background(lambda: operator.compensate(run))
    stop.wait_reached()
    body.fail(ValueError("declined") if ending == "fails" else Shutdown())
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert planning.result()
    working.result()
    assert worker.step(run) == ("cancelled", 1)
    assert worker.codes() == (["outcome_rejected"] if ending == "fails" else [])
    assert "action.released" not in worker.events(run)
    assert operator.one("SELECT undoes, not_before FROM {compensation_runs} WHERE run_id = ?", run) == ("unknown", None)
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert worker.status(run) == "cancelled"


def test_an_undo_does_not_take_the_report_of_an_earlier_claim_for_that_of_the_last(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """COMP-9: the straggler's body has ended, its successor's has not: no refund before that charge has reported."""
    first, second, operator = bench(), bench(), bench()
    slow, quick = Doorstep(), Doorstep()
    bodies = iter([slow, quick])
    shop.bodies["charge"] = lambda order: next(bodies)(order)
    run, message = at_first_step(first, "careful")
    straggler = Background(lambda: first.deliver(message))
    slow.wait()
    clock.advance(61)
    successor = Background(lambda: second.deliver(message))
    quick.wait()
    assert operator.compensate(run)
    slow.succeed("charged")
    straggler.result()
    assert first.messages == []
    operator.deliver(operator.take())
    assert shop.count("refund") == 0
    quick.succeed("charged twice, under one key")
    successor.result()
    second.run()
    assert shop.order() == ["charge", "charge", "refund"]
    assert operator.status(run) == "cancelled"


# --- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_the_workflow", [True, False])
def test_an_outcome_that_comes_after_a_cancel_is_rejected(bench: MakeBench, shop: Shop, knows_the_workflow: bool) -> None:
    """FENCE-1, FENCE-2, C29: with the decision in its transaction, and alone."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    if not knows_the_workflow:
        worker.engine.workflows.clear()
    heard: list[ActionOutcomeRejected] = []
    listener = heard.append
    subscribe(listener, ActionOutcomeRejected)
    try:
        stop = worker.stop("outcome and decision" if knows_the_workflow else "outcome")
        late = Background(lambda: worker.deliver(message))
        stop.wait_reached()
        assert operator.cancel(run)
        stop.go()
        late.result()
    finally:
        unsubscribe(listener, ActionOutcomeRejected)
    assert worker.status(run) == "cancelled"
    assert worker.step(run) == ("cancelled", 1)
    assert worker.codes() == ["outcome_rejected"]
    assert worker.messages == []
    assert [(event.outcome, event.result) for event in heard] == [("completed", "charge of 42")]
    assert "action.completed" not in worker.events(run)


def test_a_cancel_that_comes_after_an_outcome_keeps_it(bench: MakeBench, shop: Shop) -> None:
    """FENCE-2, STATUS-2: a step with an outcome keeps it; what has not begun is cancelled."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    stop = operator.stop("cancel")
    cancelling = Background(lambda: operator.cancel(run))
    stop.wait_reached()
    worker.deliver(message)
    stop.go()
    assert cancelling.result()
    assert worker.steps(run) == [("charge", "completed"), ("reserve", "cancelled")]
    assert operator.undos(run) == []


@postgresql_only
def test_an_outcome_waits_for_a_cancel_that_holds_the_run_and_is_rejected(
    bench: MakeBench, shop: Shop, table_prefix: str
) -> None:
    """FENCE-1, DRIVE-7."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    door = worker.stop("outcome and decision")
    working = Background(lambda: worker.deliver(message))
    door.wait_reached()
    stop = operator.stop("cancel", where="inside", statement="UPDATE {flow_runs}")
    cancelling = Background(lambda: operator.cancel(run))
    stop.wait_reached()
    door.go()
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert cancelling.result()
    working.result()
    assert worker.step(run) == ("cancelled", 1)
    assert worker.codes() == ["outcome_rejected"]


@postgresql_only
def test_a_cancel_waits_for_an_outcome_and_finds_the_next_step(bench: MakeBench, shop: Shop, table_prefix: str) -> None:
    """STATUS-2, DRIVE-7: what the decision creates is cancelled with the rest."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    stop = worker.stop("outcome and decision", where="inside", statement="UPDATE {action_runs}")
    working = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    cancelling = Background(lambda: operator.cancel(run))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    working.result()
    assert cancelling.result()
    assert worker.steps(run) == [("charge", "completed"), ("reserve", "cancelled")]


def test_an_outcome_that_comes_after_compensate_is_rejected(bench: MakeBench, shop: Shop) -> None:
    """COMP-9: the step that was running is fenced; what had completed is undone."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    stop = worker.stop("outcome and decision")
    late = Background(lambda: worker.deliver(worker.take()))
    stop.wait_reached()
    assert operator.compensate(run)
    stop.go()
    late.result()
    operator.run()
    assert worker.codes() == ["outcome_rejected"]
    assert shop.order() == ["charge", "reserve", "refund"]
    assert worker.steps(run) == [("charge", "completed"), ("reserve", "cancelled")]
    assert worker.status(run) == "cancelled"


def test_a_compensate_that_found_nothing_to_undo_loses_to_an_outcome(bench: MakeBench, shop: Shop) -> None:
    """COMP-1: the step that completed meanwhile is undone; the run is not simply ended."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    stop = operator.stop("cancel")
    planning = Background(lambda: operator.compensate(run))
    stop.wait_reached()
    worker.deliver(message)
    stop.go()
    assert planning.result()
    operator.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.undos(run) == [("refund", "completed")]
    assert operator.status(run) == "cancelled"
    assert operator.codes() == ["transition_lost"]


def test_a_plan_loses_to_an_outcome_and_undoes_that_step_too(bench: MakeBench, shop: Shop) -> None:
    """COMP-1, DRIVE-1, COMP-2: the compensation built from a result that no drive had seen when the plan was begun."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    stop = operator.stop("plan")
    planning = Background(lambda: operator.compensate(run))
    stop.wait_reached()
    worker.deliver(worker.take())
    stop.go()
    assert planning.result()
    operator.run()
    assert shop.order() == ["charge", "reserve", "unreserve", "refund"]
    assert shop.ran[2] == ("unreserve", "reserve of 42")
    assert operator.undos(run) == [("unreserve", "completed"), ("refund", "completed")]


def test_of_compensate_and_completion_the_second_is_told_where_the_run_is(bench: MakeBench, shop: Shop) -> None:
    """STATUS-3, C29: the run completed while the rollback was being planned."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    worker.deliver(worker.take())
    stop = operator.stop("plan")
    planning = Background(lambda: operator.compensate(run))
    stop.wait_reached()
    worker.deliver(worker.take())
    stop.go()
    with pytest.raises(ConcurrentTransitionError, match="completed"):
        planning.result()
    assert worker.status(run) == "completed"
    assert operator.undos(run) == []


def test_a_cancel_never_interrupts_a_rollback(bench: MakeBench, shop: Shop) -> None:
    """COMP-9, C23: the second call is answered with false and changes nothing."""
    worker, operator = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    stop = operator.stop("cancel")
    cancelling = Background(lambda: operator.cancel(run))
    stop.wait_reached()
    assert worker.compensate(run)
    stop.go()
    assert cancelling.result() is False
    assert worker.status(run) == "rolling_back"
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert worker.status(run) == "cancelled"


# --- stragglers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [True, False], ids=["after the second has finished", "while the second runs"])
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_straggler_cannot_touch_a_step_that_was_reclaimed(
    bench: MakeBench, shop: Shop, clock: ManualClock, fails: bool, finished: bool
) -> None:
    """FENCE-1, FENCE-2, C01: ``attempts`` fences the first worker out, however it ends and however far the second has come."""
    first, second = bench(settings=RECLAIM), bench(settings=RECLAIM)
    slow, quick = Doorstep(), Doorstep()
    bodies = iter([slow, quick])
    shop.bodies["charge"] = lambda order: next(bodies)(order)
    run, message = at_first_step(first)
    straggler = Background(lambda: first.deliver(message))
    slow.wait()
    clock.advance(61)
    successor = Background(lambda: second.deliver(message))
    quick.wait()
    assert first.step(run) == ("running", 2)
    if finished:
        quick.succeed("the one that counts")
        successor.result()
    if fails:
        slow.fail(ValueError("too late"))
    else:
        slow.succeed("stale")
    straggler.result()
    assert first.step(run) == ("completed" if finished else "running", 2)
    quick.succeed("the one that counts")
    successor.result()
    assert first.codes() == ["outcome_rejected"]
    assert second.codes() == []
    assert (
        first.one("SELECT result, error FROM {action_runs} WHERE run_id = ? AND sequence = 1", run)[0]
        == b'"the one that counts"'
    )  # type: ignore[index]
    assert first.steps(run) == [("charge", "completed"), ("reserve", "pending")]
    assert first.events(run).count("action.completed") == 1
    assert first.events(run).count("action.failed") == 0


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_straggler_cannot_touch_an_undo_that_was_reclaimed(
    bench: MakeBench, shop: Shop, clock: ManualClock, fails: bool
) -> None:
    """FENCE-1, COMP-1: the first worker reports while the second is at it; the rollback goes on once, after the second."""
    settings = Settings.from_mapping({"sagas": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 60}}}})
    first, second = bench(settings=settings), bench(settings=settings)
    slow, quick = Doorstep(), Doorstep()
    bodies = iter([slow, quick])
    shop.bodies["unreserve"] = lambda order: next(bodies)(order)
    run, message = at_first_step(first)
    first.deliver(message)
    first.deliver(first.take())
    assert first.compensate(run)
    first.sender.queue.popleft()
    undo = first.message(first.take())
    straggler = Background(lambda: first.deliver(undo))
    slow.wait()
    clock.advance(61)
    successor = Background(lambda: second.deliver(undo))
    quick.wait()
    if fails:
        slow.fail(ValueError("too late"))
    else:
        slow.succeed(None)
    straggler.result()
    assert first.undo(run, 2) == ("running", 2)
    assert first.undo(run, 1) == ("pending", 0)
    assert first.messages == []
    assert first.codes() == ["outcome_rejected"]
    quick.succeed(None)
    successor.result()
    second.run()
    assert first.undos(run) == [("unreserve", "completed"), ("refund", "completed")]
    assert shop.order().count("refund") == 1


def test_an_undo_that_comes_after_its_rollback_has_halted_runs_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1: a compensation is claimed only while its run's rollback is running."""
    worker, other = bench(), bench()
    body = shop.bodies["unreserve"] = Doorstep()
    body.fail(ValueError("no"))
    run, message = at_first_step(worker)
    worker.deliver(message)
    worker.deliver(worker.take())
    assert worker.compensate(run)
    worker.sender.queue.popleft()
    worker.runner.give_up(worker.deliver(worker.take()))
    assert worker.one("SELECT status, rollback FROM {flow_runs} WHERE id = ?", run) == ("cancelled", "halted")
    early = other.message(Outgoing("compensation", run, "refund", "default", 1))
    other.deliver(early)
    assert shop.order() == ["charge", "reserve", "unreserve"]
    assert other.undo(run, 1) == ("pending", 0)
    assert other.codes() == ["claim_lost"]


def test_a_step_of_a_run_that_has_ended_is_never_claimed(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1: whatever the row says (here: as a run that was ended by hand would leave it), the run's status decides."""
    worker = bench()
    run, message = at_first_step(worker)
    worker.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET status = 'failed', ended_at = 1 WHERE id = ?", (run,)))
    worker.deliver(message)
    assert shop.ran == []
    assert worker.step(run) == ("pending", 0)
    assert worker.codes() == ["claim_lost"]


@pytest.mark.claims_alone
def test_a_message_whose_row_is_still_owned_is_put_back_until_the_row_may_be_claimed(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """CLAIM-2, RECLAIM-3: losing costs no attempt, and says that an earlier delivery of this message holds the row."""
    first, second = bench(settings=RECLAIM), bench(settings=RECLAIM)
    slow = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(first)
    working = Background(lambda: first.deliver(message))
    slow.wait()
    second.deliver(message)
    assert second.anomalies.lines[0][1]["orphaned"] is True
    assert first.step(run) == ("running", 1)
    slow.succeed("charged")
    working.result()
    assert first.step(run) == ("completed", 1)


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_claim_that_is_made_again_by_its_own_worker_counts_once(bench: MakeBench, clock: ManualClock) -> None:
    """RECLAIM-6: its body has not begun, so it has killed nobody; the claim of another worker after it counts."""
    worker = bench(settings=RECLAIM)
    run, message = at_first_step(worker)
    job = Delivery(message).job
    assert job is not None
    stalled = ClaimAttempt(worker.engine, job, nonce="1")
    found = []
    for attempt in (stalled, stalled, ClaimAttempt(worker.engine, job, nonce="2")):
        claim = attempt.run()
        assert isinstance(claim, Claim)
        found.append((claim.attempts, claim.claims))
        clock.advance(61)
    assert found == [(1, 1), (2, 1), (3, 2)]
    assert worker.step(run) == ("running", 3)


def test_a_row_of_a_lost_worker_is_never_run_again_with_reclaim_off(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """C20, CLAIM-2: without a deadline nothing takes the row over, however late."""
    worker = bench()
    run, message = at_first_step(worker)
    job = Delivery(message).job
    assert job is not None
    ClaimAttempt(worker.engine, job, nonce="of a worker that died").run()
    clock.advance(100_000)
    for _ in range(3):
        worker.deliver(message)
    assert shop.ran == []
    assert worker.step(run) == ("running", 1)
    assert worker.codes() == ["claim_lost"] * 3
    assert all(fields["orphaned"] for _, fields in worker.anomalies.lines)


# --- drives ----------------------------------------------------------------------------------------------------------


@pytest.mark.claims_alone
def test_the_second_of_two_drives_writes_nothing_and_looks_again(bench: MakeBench, shop: Shop) -> None:
    """DRIVE-1: both have replayed the same history."""
    first, second = bench(), bench()
    run = first.start("checkout", "42")
    message = first.take()
    stop = second.stop("decision")
    late = Background(lambda: second.deliver(message))
    stop.wait_reached()
    assert first.deliver(message) is Driven.DECIDED
    stop.go()
    assert late.result() is Driven.IDLE
    assert second.codes() == ["transition_lost"]
    assert second.messages == []
    assert len(first.messages) == 1
    assert first.steps(run) == [("charge", "pending")]


@pytest.mark.claims_alone
@postgresql_only
def test_a_drive_waits_for_the_decision_of_another_and_loses(bench: MakeBench, shop: Shop, table_prefix: str) -> None:
    """DRIVE-1, DRIVE-7: the revision is compared after the lock was waited for."""
    first, second = bench(), bench()
    run = first.start("checkout", "42")
    message = first.take()
    stop = first.stop("decision", where="inside", statement="UPDATE {flow_runs}")
    winner = Background(lambda: first.deliver(message))
    stop.wait_reached()
    loser = Background(lambda: second.deliver(message))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert winner.result() is Driven.DECIDED
    assert loser.result() is Driven.IDLE
    assert second.codes() == ["transition_lost"]
    assert first.steps(run) == [("charge", "pending")]


def test_a_decision_loses_to_a_wake_that_it_has_not_seen(bench: MakeBench, shop: Shop) -> None:
    """DRIVE-1, DRIVE-2: something happened to the run between a drive's reading and its commit; no wake is counted as seen unseen."""
    worker, other = bench(), bench()
    run = worker.start("checkout", "42")
    stop = worker.stop("decision")
    driving = Background(lambda: worker.deliver(worker.take()))
    stop.wait_reached()
    other.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1 WHERE id = ?", (run,)))
    stop.go()
    assert driving.result() is Driven.DECIDED
    assert worker.codes() == ["transition_lost"]
    assert worker.one("SELECT wakes, wakes_seen, revision FROM {flow_runs} WHERE id = ?", run) == (2, 2, 1)
    assert worker.steps(run) == [("charge", "pending")]


def test_an_outcome_whose_history_has_grown_meanwhile_commits_alone_and_is_driven(bench: MakeBench, shop: Shop) -> None:
    """DRIVE-1: the decision that was to go with it rests on a history that is no longer there; the outcome does not."""
    worker, other = bench(), bench()
    run, message = at_first_step(worker)
    stop = worker.stop("outcome and decision")
    working = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    other.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1 WHERE id = ?", (run,)))
    stop.go()
    working.result()
    assert worker.steps(run) == [("charge", "completed"), ("reserve", "pending")]
    assert worker.one("SELECT wakes, wakes_seen FROM {flow_runs} WHERE id = ?", run) == (3, 3)
    assert worker.events(run).count("action.completed") == 1


def test_an_outcome_recorded_by_a_worker_that_cannot_drive_is_seen_by_the_drive_that_was_under_way(
    bench: MakeBench, shop: Shop
) -> None:
    """DRIVE-2, DRIVE-6: the outcome lands between a drive's load and its commit; the drive loses, looks again and sees it."""
    stranger, driver = bench(), bench()
    run, message = at_first_step(driver)
    stranger.engine.workflows.clear()
    driver.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1 WHERE id = ?", (run,)))
    stop = driver.stop("decision")
    driving = Background(lambda: driver.runner.wake(run))
    stop.wait_reached()
    stranger.deliver(message)
    assert [outgoing.kind for outgoing in stranger.messages] == ["drive"]
    stop.go()
    driving.result()
    assert driver.steps(run) == [("charge", "completed"), ("reserve", "pending")]
    assert driver.deliver(stranger.take()) is Driven.IDLE
    assert driver.steps(run) == [("charge", "completed"), ("reserve", "pending")]


@pytest.mark.claims_alone
def test_of_two_side_effects_of_two_drives_one_value_counts(bench: MakeBench, shop: Shop) -> None:
    """SIDE-1: the second drive goes on with the value of the first, and its decision is dropped."""
    first, second = bench(), bench()
    numbers = iter([1, 2])
    shop.bodies["number"] = lambda order: next(numbers)
    run = first.start("lucky", "42")
    message = first.take()
    stop = first.stop("side effect")
    slow = Background(lambda: first.deliver(message))
    stop.wait_reached()
    assert second.deliver(message) is Driven.DECIDED
    stop.go()
    assert slow.result() is Driven.IDLE
    assert first.all("SELECT sequence, value FROM {side_effects} WHERE run_id = ?", run) == [(1, b"2")]
    assert first.events(run).count("side_effect.recorded") == 1
    second.run()
    assert shop.ran == [("ship", "42/2")]


def test_a_side_effect_that_the_store_refuses_is_no_failure_of_the_workflow(bench: MakeBench, shop: Shop) -> None:
    """NATIVE-7, SIDE-1: the drive is carried out again; the function's own ``except Exception`` cannot see the error either."""
    worker = bench()
    shop.bodies["number"] = lambda order: 7
    run = worker.start("lucky", "42")
    worker.fail("side effect", happened=False, unknown=False, times=2)
    drive = worker.take()
    delivery = Delivery(worker.message(drive))
    worker.runner.drive(delivery)
    worker.run()
    assert worker.status(run) == "completed"
    assert shop.ran == [("ship", "42/7")]


# --- giving up -------------------------------------------------------------------------------------------------------


def test_a_give_up_that_comes_after_the_next_claim_changes_nothing(bench: MakeBench, shop: Shop) -> None:
    """NATIVE-2: the row is no longer what was given up."""
    first, second = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(first)
    body.fail(ValueError("declined"))
    failed = first.deliver(message)
    assert first.step(run) == ("failed", 1)
    again = shop.bodies["charge"] = Doorstep()
    retrying = Background(lambda: second.deliver(message))
    again.wait()
    first.runner.give_up(failed)
    assert first.codes() == ["write_refused"]
    assert first.step(run) == ("running", 2)
    again.succeed("charged")
    retrying.result()
    assert first.steps(run) == [("charge", "completed"), ("reserve", "pending")]


def test_a_claim_that_comes_after_the_give_up_runs_nothing(bench: MakeBench, shop: Shop) -> None:
    """NATIVE-2, CLAIM-1: a duplicate of a message whose tries are spent."""
    first, second = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run, message = at_first_step(first)
    body.fail(ValueError("declined"))
    failed = first.deliver(message)
    stop = second.stop("claim")
    late = Background(lambda: second.deliver(message))
    stop.wait_reached()
    first.runner.give_up(failed)
    stop.go()
    late.result()
    assert shop.order() == ["charge"]
    assert second.codes() == ["claim_lost"]
    assert first.status(run) == "failed"


def test_a_late_outcome_loses_to_a_give_up_of_the_claim_after_it(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """FENCE-1, FENCE-2: the straggler succeeds after its successor has failed for good."""
    first, second = bench(settings=RECLAIM), bench(settings=RECLAIM)
    slow, quick = Doorstep(), Doorstep()
    bodies = iter([slow, quick])
    shop.bodies["charge"] = lambda order: next(bodies)(order)
    run, message = at_first_step(first)
    straggler = Background(lambda: first.deliver(message))
    slow.wait()
    clock.advance(61)
    quick.fail(ValueError("declined"))
    second.runner.give_up(second.deliver(message))
    slow.succeed("charged after all")
    straggler.result()
    assert first.codes() == ["outcome_rejected"]
    assert first.step(run) == ("failed", 2)
    assert first.status(run) == "failed"


@pytest.mark.parametrize("kind", ["step", "undo"])
def test_a_give_up_of_an_earlier_failure_changes_nothing(bench: MakeBench, shop: Shop, kind: str) -> None:
    """NATIVE-2: the row has failed once more since; only the last of its claims may give it up."""
    first, second = bench(), bench()
    run, message = at_first_step(first)
    actor, state = ("charge", first.step) if kind == "step" else ("refund", first.undo)
    if kind == "undo":
        first.deliver(message)
        assert first.compensate(run)
        first.sender.queue.popleft()
        message = first.message(first.take())
    body = shop.bodies[actor] = Doorstep()
    body.fail(ValueError("declined"))
    failed = first.deliver(message)
    second.deliver(message)
    assert state(run) == ("failed", 2)
    first.runner.give_up(failed)
    assert state(run) == ("failed", 2)
    assert not any(event.endswith("given_up") for event in first.events(run))
    assert set(first.codes()) <= {"write_refused", "outcome_rejected"}
    assert first.codes() != []


def test_a_give_up_that_comes_after_a_cancel_changes_nothing(bench: MakeBench, shop: Shop) -> None:
    """NATIVE-2, STATUS-2: a row that was cancelled between two tries is no failure."""
    worker, operator = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    body.fail(ValueError("declined"))
    run, message = at_first_step(worker)
    failed = worker.deliver(message)
    assert operator.cancel(run)
    worker.runner.give_up(failed)
    assert worker.codes() == ["write_refused"]
    assert worker.one("SELECT status, given_up FROM {action_runs} WHERE run_id = ?", run) == ("cancelled", False)
    assert "action.given_up" not in worker.events(run)


# --- duplicates ------------------------------------------------------------------------------------------------------


@pytest.mark.claims_alone
def test_duplicates_before_during_and_after_change_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-2, C01, C02: the same message and a copy of it, delivered around the one that counts."""
    worker, other = bench(), bench()
    body = shop.bodies["charge"] = Doorstep()
    run = worker.start("checkout", "42")
    worker.deliver(worker.take())
    outgoing = worker.take()
    message, copy = worker.message(outgoing), worker.message(outgoing)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    other.deliver(message)
    other.deliver(copy)
    assert [fields["orphaned"] for _, fields in other.anomalies.lines] == [True, False]
    body.succeed("charged")
    working.result()
    other.deliver(message)
    other.deliver(copy)
    assert shop.order() == ["charge"]
    assert other.codes() == ["claim_lost"] * 4
    assert worker.steps(run) == [("charge", "completed"), ("reserve", "pending")]
    assert [outgoing.sequence for outgoing in worker.messages] == [2]
    assert other.messages == []


def test_duplicates_of_an_undo_change_nothing(bench: MakeBench, shop: Shop) -> None:
    """CLAIM-1, C28: and none of them moves the rollback on twice."""
    worker, other = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    worker.deliver(worker.take())
    assert worker.compensate(run)
    worker.sender.queue.popleft()  # the message of ``ship``, which is cancelled
    undo = worker.message(worker.take())
    worker.deliver(undo)
    other.deliver(undo)
    assert worker.undos(run) == [("unreserve", "completed"), ("refund", "pending")]
    assert len(worker.messages) == 1
    refund = worker.message(worker.take())
    worker.deliver(refund)
    other.deliver(refund)
    other.deliver(undo)
    assert shop.order() == ["charge", "reserve", "unreserve", "refund"]
    assert worker.status(run) == "cancelled"
    assert worker.events(run).count("rollback.finished") == 1


def test_two_drives_of_a_rollback_send_each_undo_once(bench: MakeBench, shop: Shop) -> None:
    """C28: the sweep drives a run that is rolling back, at the moment when an undo is recorded."""
    worker, sweep = bench(), bench()
    run, message = at_first_step(worker)
    worker.deliver(message)
    worker.deliver(worker.take())
    assert worker.compensate(run)
    worker.sender.queue.popleft()
    stop = sweep.stop("advance")
    driving = Background(lambda: sweep.runner.wake(run))
    stop.wait_reached()
    worker.deliver(worker.take())
    stop.go()
    driving.result()
    assert sweep.messages == []
    worker.run()
    assert shop.order() == ["charge", "reserve", "unreserve", "refund"]
    assert worker.undos(run) == [("unreserve", "completed"), ("refund", "completed")]


@pytest.mark.claims_alone
def test_an_undo_whose_worker_is_gone_ends_its_level(bench: MakeBench, shop: Shop) -> None:
    """PAR-3, COMP-4: its message comes again, nothing will ever reclaim the row; a late outcome is recorded all the same."""
    first, second = bench(), bench()
    body = shop.bodies["refund"] = Doorstep()
    run, message = at_first_step(first)
    first.deliver(message)
    assert first.compensate(run)
    first.sender.queue.popleft()
    refund = first.message(first.take())
    lost = Background(lambda: first.deliver(refund))
    body.wait()
    second.deliver(refund)
    assert second.status(run) == "cancelled"
    row = second.one("SELECT rollback, rollback_error FROM {flow_runs} WHERE id = ?", run)
    assert row is not None
    assert row[0] == "halted"
    assert "CompensationUnfinishedError" in row[1]
    assert second.undo(run) == ("running", 1)
    body.succeed(None)
    lost.result()
    assert second.undo(run) == ("completed", 1)
    assert second.status(run) == "cancelled"


# --- writes that nobody knows about ----------------------------------------------------------------------------------


@pytest.mark.parametrize("happened", [True, False], ids=["it did happen", "it did not"])
@pytest.mark.parametrize(
    "write", ["claim", "outcome and decision", "outcome", "failed try", "decision", "side effect", "undo outcome"]
)
def test_an_unknown_write_settles_by_its_token(bench: MakeBench, shop: Shop, write: str, happened: bool) -> None:
    """QUEUE-8, CLAIM-4, FENCE-1, NATIVE-7: a body runs once per claim, and everything is recorded once, either way."""
    worker = bench()
    tries = iter([ValueError("declined"), None])

    def reserve(order: str) -> str:
        error = next(tries) if write == "failed try" else None
        if error is not None:
            raise error
        return "reserved"

    def ship(order: str) -> str:
        raise ValueError("no ship")

    shop.bodies |= {"reserve": reserve, "ship": ship, "number": lambda order: 7}
    if write == "outcome":
        worker.engine.drives = lambda workflow, queue: False  # type: ignore[method-assign]
    worker.fail(write, happened=happened)
    workflow = "lucky" if write == "side effect" else "checkout"
    run = worker.start(workflow, "42")
    while worker.messages:
        outgoing = worker.take()
        message = worker.message(outgoing)
        if outgoing.kind == "drive":
            delivery = Delivery(message)
            worker.runner.drive(delivery)
            worker.runner.leave(delivery)
            continue
        delivery = worker.deliver(message)
        if delivery.state == "failed" and delivery.actor == "reserve":
            delivery = worker.deliver(message)
        if delivery.state == "failed":
            worker.runner.give_up(delivery)
    assert worker._faults == [], f"no {write!r} was written"
    assert worker.status(run) == "failed"
    if write == "side effect":
        assert shop.order() == ["ship"]
    else:
        tried = ["reserve"] * (2 if write == "failed try" else 1)
        assert shop.order() == ["charge", *tried, "ship", "unreserve", "refund"]
        assert worker.undos(run) == [("unreserve", "completed"), ("refund", "completed")]
    assert worker.codes() == []
    events = worker.events(run)
    claims = {
        row[0]
        for row in worker.all("SELECT attempts - tries FROM {action_runs} WHERE run_id = ? AND status = 'completed'", run)
    }
    assert claims <= {1}
    assert events.count("action.given_up") == 1
    assert events.count("flow.failed") == 1
    assert events.count("action.started") == shop.count("charge") + shop.count("reserve") + shop.count("ship")


@pytest.mark.parametrize("happened", [True, False], ids=["it did happen", "it did not"])
@pytest.mark.parametrize("knows_the_workflow", [True, False])
def test_an_unknown_give_up_settles_by_its_token(
    bench: MakeBench, shop: Shop, happened: bool, knows_the_workflow: bool
) -> None:
    """NATIVE-2, QUEUE-8: the failure is given up once, and the rollback it leads to is planned once."""
    worker = bench()

    def decline(order: str) -> str:
        raise ValueError("out of stock")

    shop.bodies["reserve"] = decline
    run, message = at_first_step(worker)
    worker.deliver(message)
    failed = worker.deliver(worker.take())
    if not knows_the_workflow:
        workflows = dict(worker.engine.workflows)
        worker.engine.workflows.clear()
    worker.fail("outcome and decision" if knows_the_workflow else "outcome", happened=happened)
    worker.runner.give_up(failed)
    if not knows_the_workflow:
        worker.engine.workflows.update(workflows)
    worker.run()
    assert shop.order() == ["charge", "reserve", "refund"]
    assert worker.status(run) == "failed"
    assert worker.events(run).count("action.given_up") == 1
    assert worker.events(run).count("compensation.started") == 1
    assert worker.codes() == []


@postgresql_only
def test_a_claim_whose_commit_is_unknown_is_found_by_its_mark(bench: MakeBench, shop: Shop, table_prefix: str) -> None:
    """CLAIM-4, QUEUE-8: the connection was lost while COMMIT was under way, and it lands only after the worker tries again."""
    worker, shadow = bench(), bench()
    run, message = at_first_step(worker)
    stop = shadow.stop("claim", where="inside", statement="UPDATE {action_runs}")
    under_way: list[Background] = []
    write = worker.store.write

    def lose_the_answer(operation: Any) -> Any:
        if not under_way:
            under_way.append(Background(lambda: shadow.store.write(operation)))
            stop.wait_reached()
            worker.fail("claim", happened=False)
        return write(operation)

    worker.store.write = lose_the_answer  # type: ignore[method-assign]
    working = Background(lambda: worker.deliver(message))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    working.result()
    assert shop.order() == ["charge"]
    assert worker.step(run) == ("completed", 1)
    assert worker.codes() == []


# --- lock order ------------------------------------------------------------------------------------------------------


def _add_sibling(tx: Any, run: str, sequence: int) -> None:
    """One more step like the first, as a parallel block has them."""
    columns = (
        "actor, queue, args, status, given_up, attempts, tries, claims, cycle, optional, comp_from_result, comp_on_self_failure, "
        "comp_parallel, held_back, repair_attempts, created_at"
    )
    tx.run(
        f"INSERT INTO {{action_runs}} (run_id, sequence, {columns}) SELECT run_id, CAST(? AS INTEGER), {columns} FROM {{action_runs}} "
        "WHERE run_id = ? AND sequence = 1",
        (sequence, run),
    )


@postgresql_only
def test_writers_of_one_run_never_deadlock(
    bench: MakeBench, shop: Shop, monkeypatch: pytest.MonkeyPatch, table_prefix: str
) -> None:
    """DRIVE-7: claims, outcomes, failed tries, drives, cancels and rollbacks of the same runs, all at once."""
    from dramatiq_saga.store import servers as store_servers
    from dramatiq_saga.store.server_errors import Fate

    seen: list[BaseException] = []
    fate_of = store_servers.fate_of

    def watched(error: BaseException, dialect: str, *, committing: bool) -> Fate:
        fate = fate_of(error, dialect, committing=committing)
        if fate is Fate.AGAIN:
            seen.append(error)
        return fate

    monkeypatch.setattr(store_servers, "fate_of", watched)
    stranger, driver = bench(), bench()
    stranger.engine.workflows.clear()
    run = driver.start("checkout", "42")
    driver.deliver(driver.take())
    size = 12
    driver.store.write(lambda tx: [_add_sibling(tx, run, sequence) for sequence in range(2, size + 1)])
    flaky = iter([True, False] * size * 4)

    def charge(order: str) -> str:
        if next(flaky):
            raise ValueError("declined")
        return "charged"

    shop.bodies["charge"] = charge
    first = driver.take()
    start = threading.Barrier(8)

    def work(number: int) -> None:
        worker = stranger if number % 2 else driver
        worker_messages = [worker.message(replace(first, sequence=sequence)) for sequence in range(1, size + 1)]
        start.wait(20)
        for message in worker_messages if number < 4 else reversed(worker_messages):
            if worker is stranger:
                for _ in range(2):
                    worker.deliver(message)
            else:
                worker.runner.wake(run)
                worker.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1 WHERE id = ?", (run,)))

    workers = [Background(lambda number=number: work(number)) for number in range(8)]  # type: ignore[misc]
    eventually(lambda: shop.count("charge") > size)
    runs.cancel(driver.engine, run, driver.sender)
    for background in workers:
        background.result()
    assert seen == []
    assert {status for _, status in driver.steps(run)} <= {"completed", "failed", "cancelled", "running"}


def test_a_worker_that_remembers_a_pruned_run_does_not_take_its_namesake_for_it(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """C55, DRIVE-1: the same run id again, at the same revision and wake count as the one that a worker still has in memory."""
    first, second = bench(), bench()
    run, message = at_first_step(first)
    second.deliver(message)
    second.sender.queue.clear()
    first.cancel(run)
    clock.advance(1)
    assert prune(first.store, before=clock.now()).pruned == 1
    assert first.start("checkout", "another order", run_id=run) == run
    for _ in range(2):
        first.deliver(first.take())
    second.deliver(first.take())
    second.run()
    first.run()
    assert first.status(run) == "completed"
    assert shop.ran[-3:] == [(actor, "another order") for actor in ("charge", "reserve", "ship")]
