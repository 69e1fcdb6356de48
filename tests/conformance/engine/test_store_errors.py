"""A store that refuses, or that does not answer whether it has written: nothing is lost, nothing is done twice."""

from __future__ import annotations

import threading
from typing import Any

import dramatiq.worker
import pytest
from dramatiq.results import Results

from dramatiq_saga import Flow, Settings
from tests.conformance.engine.test_neighbours import Noting, plus
from tests.support import store_faults as f
from tests.support.application import Application, Applications
from tests.support.store_faults import Faults
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dramatiq looks again at an acknowledgement that it could not make after some seconds; here at once."""
    monkeypatch.setattr(dramatiq.worker, "POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.02)


def one_step(app: Application, **options: Any) -> Any:
    """A workflow of one step, whose body notes what its row says while it runs."""

    @app.actor(**options)
    def body() -> str:
        app.calls.append(app.sql("SELECT status, attempts, tries FROM {action_runs}")[-1])
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(body)

    return one


def test_a_claim_that_is_refused_never_lets_the_actor_run_unclaimed(app: Application) -> None:
    """CLAIM-4, NATIVE-7: the store refuses three times; then one claim, one call, no try spent, no message lost."""
    one = one_step(app)
    refused = Faults(app.store).refuse(f.CLAIM, 3)
    handle = app.run(one)
    app.drain()
    assert refused.met == 3
    assert handle.result() == "done"
    assert app.calls == [("running", 1, 0)]
    assert app.messages() == 0


def test_a_claim_of_which_nobody_knows_is_found_again_by_its_mark(app: Application) -> None:
    """CLAIM-4: it had landed, so it is not taken a second time."""
    one = one_step(app)
    unknown = Faults(app.store).unknown(f.CLAIM, landed=True)
    handle = app.run(one)
    assert unknown.met == 1
    assert app.calls == [("running", 1, 0)]
    assert handle.actions()[0].attempts == 1


def test_a_claim_of_which_nobody_knows_and_that_never_was_is_taken_again(app: Application) -> None:
    """CLAIM-4: it had not landed, so it is made anew."""
    one = one_step(app)
    unknown = Faults(app.store).unknown(f.CLAIM, 2, landed=False)
    app.run(one)
    assert unknown.met == 2
    assert app.calls == [("running", 1, 0)]


def test_an_outcome_that_is_refused_is_kept_and_the_acknowledgement_waits(app: Application) -> None:
    """FENCE-3: the body ran once; its message is in the broker until its outcome is written."""
    one = one_step(app)
    held: list[int] = []
    refused = Faults(app.store).refuse(f.COMPLETE, 3, then=lambda: held.append(app.messages()))
    handle = app.run(one)
    app.drain()
    assert refused.met == 3
    assert len(held) == 3
    assert min(held) >= 1
    assert handle.result() == "done"
    assert len(app.calls) == 1
    assert handle.actions()[0].tries == 0
    assert app.messages() == 0


def test_an_outcome_of_which_nobody_knows_is_not_taken_for_a_stranger(app: Application, journal: list[Any]) -> None:
    """FENCE-1: a retried write that finds its own attempt and outcome has landed; what follows happens once."""
    two = app.step("two", gives=2)

    @app.actor
    def body() -> int:
        return 1

    @app.workflow
    def pair(flow: Flow) -> int:
        return flow.run(body) + flow.run(two)

    unknown = Faults(app.store).unknown(f.COMPLETE, landed=True)
    handle = app.run(pair)
    app.drain()
    assert unknown.met == 1
    assert handle.result() == 3
    assert app.calls == [("two",)]
    assert app.types(handle).count("action.completed") == 2
    assert [line for line in journal if line["event"] in ("outcome_rejected", "claim_lost")] == []


def test_a_failure_that_cannot_be_written_spends_one_try_and_not_two(app: Application) -> None:
    """FENCE-3, NATIVE-1: the row shows each of the two tries once."""
    refuse = app.step("refuse", raises=ValueError("no"), max_retries=1)

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(refuse)

    faults = Faults(app.store)
    tries, given_up = faults.refuse(f.FAIL, 2), faults.refuse(f.GIVE_UP, 2)
    handle = app.run(one)
    app.drain()
    assert (tries.met, given_up.met) == (2, 2)
    assert app.calls == [("refuse",)] * 2
    step = handle.actions()[0]
    assert (step.status, step.given_up, step.tries, step.attempts) == ("failed", True, 2, 2)
    assert handle.status == "failed"


def test_a_drive_that_cannot_be_written_is_made_again(app: Application) -> None:
    """NATIVE-7, DRIVE-1: the first decision is refused twice, then it stands; the run is none the worse."""
    one = one_step(app)
    refused = Faults(app.store).refuse(f.DECIDE, 2)
    handle = app.run(one)
    assert refused.met == 2
    assert handle.result() == "done"


def test_a_side_effect_that_cannot_be_recorded_does_not_fail_the_run(app: Application) -> None:
    """NATIVE-7, SIDE-1: the store's error is no error of the function."""

    @app.workflow
    def rolls(flow: Flow) -> int:
        try:
            return flow.side_effect("dice", lambda: app.calls.append("rolled") or 4)
        except Exception as error:  # what users write
            app.calls.append(repr(error))
            return -1

    refused = Faults(app.store).refuse(f.RECORD_SIDE_EFFECT, 2)
    handle = app.run(rolls)
    assert refused.met == 2
    assert handle.result() == 4


def test_a_compensation_survives_a_store_that_refuses(app: Application) -> None:
    """CLAIM-4, FENCE-3, NATIVE-7: planning, claim and outcome of an undo are refused; it is undone once."""
    step, undo = app.step("step"), app.step("undo")
    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(refuse)

    faults = Faults(app.store)
    rules = [faults.refuse(what, 2) for what in (f.PLAN_ROLLBACK, f.CLAIM_UNDO, f.COMPLETE_UNDO)]
    handle = app.run(one)
    app.drain()
    assert [rule.met for rule in rules] == [2, 2, 2]
    assert app.calls == [("step",), ("refuse",), ("undo",)]
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert app.messages() == 0


def test_the_outcome_of_an_undo_of_which_nobody_knows_goes_on_once(app: Application) -> None:
    """FENCE-1, COMP-1: the second level is undone once, the run ends once."""
    step, undo = app.step("step"), app.step("undo")
    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(step).compensate_with(undo, 1).run()
        flow.action(step).compensate_with(undo, 2).run()
        flow.run(refuse)

    undo_options = Faults(app.store).unknown(f.COMPLETE_UNDO, 2, landed=True)
    handle = app.run(two)
    app.drain()
    assert undo_options.met == 2
    assert app.calls[-2:] == [("undo", 2), ("undo", 1)]
    assert app.types(handle).count("compensation.completed") == 2
    assert app.types(handle).count("rollback.finished") == 1


# --- the worker stops before the store is back ------------------------------------------------------------------------


# StubBroker is left out where a message has to outlive its worker: it forgets what a stopping worker has prefetched.


def stopped_while(app: Application, rule: f.Rule, check: Any) -> None:
    """Stop the worker while ``rule`` refuses everything, look, let the store heal, and see the stop come to its end."""
    eventually(lambda: rule.met >= 1)
    stopper = threading.Thread(target=app.stop)
    stopper.start()
    try:
        met = rule.met
        eventually(lambda: rule.met >= met + 3, because="the worker goes on trying while it stops")
        check()
    finally:
        rule.heal()
        stopper.join(20)
    assert not stopper.is_alive()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis", "stub"])
def test_an_outcome_is_recorded_before_the_acknowledgement_although_the_worker_stops(
    kind: str, applications: Applications
) -> None:
    """FENCE-3: the store comes back while the worker is stopping; the result is recorded, the message then acknowledged."""
    app = applications(kind)
    one = one_step(app)
    rule = Faults(app.store).refuse(f.COMPLETE, None)
    app.start(threads=1)
    handle = one.send()

    def check() -> None:
        assert app.messages() >= 1
        assert handle.actions()[0].status == "running"

    stopped_while(app, rule, check)
    step = handle.actions()[0]
    assert (step.status, step.result, step.tries) == ("completed", "done", 0)
    app.start()
    assert app.ended(handle) == "completed"
    app.drain()
    assert len(app.calls) == 1
    assert app.messages() == 0


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("before", ["the other stops", "the last stops, and one starts"])
def test_a_worker_waits_out_a_refusing_store_whoever_else_has_stopped_in_its_process(
    kind: str, before: str, applications: Applications
) -> None:
    """NATIVE-7: the patience of a process ends with its last worker, and begins anew with the next."""
    app = applications(kind)
    one = one_step(app)
    app.start(threads=1)
    if before == "the other stops":
        other = app.start(threads=1)
        other.stop()
        other.stop()
    else:
        app.stop()
        app.start(threads=1)
    stopping = app.middleware.runner(app.broker).stopping
    rule = Faults(app.store).refuse(f.CLAIM, 3)
    handle = one.send()
    assert app.ended(handle) == "completed"
    assert rule.met == 3
    assert handle.actions()[0].attempts == 1
    assert not stopping.is_set()
    app.stop()
    assert stopping.is_set()


def test_a_worker_that_is_stopped_twice_ends_nothing_that_its_process_keeps_for_another(applications: Applications) -> None:
    """RECLAIM-5, LOOP-1: the other one's claims have a heartbeat behind them, and sweeps go on."""
    app = applications("sqlite", settings=Settings.recommended())
    app.start(threads=1)
    other = app.start(threads=1)
    other.stop()
    other.stop()
    assert {"saga-heartbeat", "saga-sweeps"} <= {thread.name for thread in threading.enumerate()}
    assert app.engine.heart is not None
    assert app.sql("SELECT COUNT(*) FROM {workers}") == [(1,)]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_message_whose_claim_was_refused_until_the_worker_stopped_is_run_by_the_next(
    kind: str, applications: Applications
) -> None:
    """CLAIM-4: no try spent, nothing dead-lettered, nothing lost, and the actor has not run."""
    app = applications(kind)
    one = one_step(app)
    rule = Faults(app.store).refuse(f.CLAIM, None)
    app.start(threads=1)
    handle = one.send()

    def check() -> None:
        assert app.messages() >= 1
        assert handle.actions()[0].status == "pending"
        assert app.calls == []

    stopped_while(app, rule, check)
    step = handle.actions()[0]
    assert (step.status, step.tries, step.given_up) == ("pending", 0, False)
    app.start()
    assert app.ended(handle) == "completed"
    assert [(status, tries) for status, _, tries in app.calls] == [("running", 0)]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_result_is_stored_although_a_worker_that_stopped_had_the_message_first(kind: str, applications: Applications) -> None:
    """NATIVE-5, CLAIM-4: the message that goes back asks Dramatiq for what its sender asked for."""
    backend = Noting()
    app = applications(kind, middleware=plus(Results(backend=backend)))
    one = one_step(app, store_results=True)
    rule = Faults(app.store).refuse(f.CLAIM, None)
    app.start(threads=1)
    handle = one.send()
    stopped_while(app, rule, lambda: None)
    app.start()
    assert app.ended(handle) == "completed"
    app.drain()
    assert backend.stored == ["done"]


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_a_step_is_given_up_before_its_message_is_rejected_although_the_worker_stops(
    kind: str, applications: Applications
) -> None:
    """NATIVE-2, FENCE-3: the run learns of the failure although the store came back late."""
    app = applications(kind)
    refuse = app.step("refuse", raises=ValueError("no"))

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(refuse)

    rule = Faults(app.store).refuse(f.GIVE_UP, None)
    app.start(threads=1)
    handle = one.send()
    stopped_while(app, rule, lambda: None)
    step = handle.actions()[0]
    assert (step.status, step.given_up) == ("failed", True)
    app.start()
    assert app.ended(handle) == "failed"


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_failed_try_is_recorded_although_the_worker_stops(kind: str, applications: Applications) -> None:
    """NATIVE-1, FENCE-3: one try, recorded before its message is dealt with; the next worker makes the second."""
    app = applications(kind)
    refuse = app.step("refuse", raises=ValueError("no"), max_retries=1)

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(refuse)

    rule = Faults(app.store).refuse(f.FAIL, None)
    app.start(threads=1)
    handle = one.send()
    stopped_while(app, rule, lambda: None)
    assert handle.actions()[0].tries == 1
    app.start()
    assert app.ended(handle) == "failed"
    assert handle.actions()[0].tries == 2
    assert app.calls == [("refuse",)] * 2


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_drive_is_not_forgotten_although_the_worker_stops(kind: str, applications: Applications) -> None:
    """NATIVE-7, DRIVE-2: the message that drives the run is there until the run has been driven."""
    app = applications(kind)
    one = one_step(app)
    rule = Faults(app.store).refuse(f.DECIDE, None)
    app.start(threads=1)
    handle = one.send()
    eventually(lambda: rule.met)
    app.stop()
    assert handle.status == "pending"
    rule.heal()
    app.start()
    assert app.ended(handle) == "completed"
