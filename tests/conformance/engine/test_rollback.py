"""COMP: what is undone, in which order, by what, and how it ends (C23, C25, C26, C28 without kills)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowCancelledError, FlowFailedError, Settings, StepFailedError, current_step
from dramatiq_saga.errors import ConcurrentTransitionError, SagaError
from dramatiq_saga.events import FlowFailed, RollbackFinished, listening
from tests.conformance.engine.test_claims_and_fences import Gate, lines, send_again
from tests.conformance.engine.test_history import deploy, drive_again, hold_error
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def undone(handle: Any) -> list[Any]:
    return [(c.sequence, c.status) for c in handle.compensations()]


# --- cancelled ---------------------------------------------------------------------------------------------------------


def test_compensate_undoes_what_is_done_fences_what_is_at_work_and_ends_cancelled(every_app: Application) -> None:
    """C23, COMP-1, COMP-9, STATUS-2: A and B done, C at work; a second request while B is undone changes nothing."""
    app, in_c, in_undo = every_app, Gate(), Gate()
    a, undo_a = app.step("a"), app.step("undo_a")

    @app.actor
    def c() -> str:
        in_c()
        return "too late"

    @app.actor
    def undo_b() -> None:
        app.calls.append(("undo_b",))
        in_undo()

    @app.workflow
    def three(flow: Flow) -> None:
        flow.action(a, "A").compensate_with(undo_a).run()
        flow.action(a, "B").compensate_with(undo_b).run()
        flow.action(c).compensate_with(undo_a).run()

    handle = three.send()
    app.start(threads=3)
    in_c.wait()
    assert handle.compensate("customer called") is True
    assert handle.actions()[2].status == "cancelled"
    in_undo.wait()
    assert (handle.status, handle.rollback) == ("rolling_back", "running")
    assert handle.compensate() is False
    assert handle.cancel() is False
    in_c.leave.release()
    in_undo.leave.release()
    assert app.ended(handle) == "cancelled"
    app.drain()
    assert handle.rollback == "done"
    assert app.calls == [("a", "A"), ("a", "B"), ("undo_b",), ("undo_a",)]
    assert undone(handle) == [(2, "completed"), (1, "completed")]
    assert (handle.actions()[2].status, handle.actions()[2].result) == ("cancelled", None)
    with pytest.raises(FlowCancelledError) as caught:
        handle.result()
    assert caught.value.reason == "customer called"
    assert app.types(handle).count("compensation.started") == 1
    assert app.messages() == 0


def test_cancel_leaves_what_is_done(app: Application) -> None:
    """COMP-1: cancel() does not compensate; steps with an outcome keep it, the pending one is settled."""
    a, undo, gate = app.step("a"), app.step("undo"), app.step("gate", queue_name=app.queue + "x")

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(a).compensate_with(undo).run()
        flow.run(gate)

    handle = two.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 2)
    assert handle.cancel() is True
    app.stop()
    app.start()
    app.drain()
    assert (handle.status, handle.rollback) == ("cancelled", "none")
    assert [action.status for action in handle.actions()] == ["completed", "cancelled"]
    assert app.calls == [("a",)]
    assert handle.compensate() is False


def test_compensating_a_run_that_has_done_nothing_cancels_it(app: Application) -> None:
    """COMP-1: no compensation, no rollback; the answer is the same."""

    @app.workflow
    def one(flow: Flow) -> None: ...

    handle = one.send_with_options(delay=60_000)
    assert handle.compensate("nothing yet") is True
    assert (handle.status, handle.rollback) == ("cancelled", "none")
    assert handle.compensations() == []


def completed_unseen(app: Application, applications: Applications, function: Any) -> tuple[Any, Any]:
    """A run whose first step has completed in a worker that knows no workflow; no drive has seen it yet."""
    from tests.conformance.engine.test_neighbours import partial_application

    steps = partial_application(app, applications)
    steps.actor(lambda: {"id": "r-1"}, actor_name="step")
    declared = app.workflow(function, name="unseen", queue_name=app.queue + "flows")
    handle = declared.send()
    app.middleware.runner(app.broker).wake(handle.id)  # the first drive
    app.broker.flush(app.queue + "flows")
    if not app.joined:
        app.middleware.runner(app.broker).wake(handle.id)
    steps.start()
    eventually(lambda: handle.actions()[0].status == "completed")
    steps.stop()
    return handle, declared


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_compensation_built_from_a_result_that_no_drive_has_seen_is_built_for_the_plan(
    kind: str, applications: Applications
) -> None:
    """COMP-2: compensate() replays for it and writes nothing else of that replay; no next step starts, and it is undone."""
    app = applications(kind)
    step, undo, after = app.step("step"), app.step("undo"), app.step("after")

    def two(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda made: undo.message(made["id"])).run()
        flow.run(after)

    handle, _ = completed_unseen(app, applications, two)
    assert app.sql("SELECT comp_args FROM {action_runs} WHERE run_id = ?", handle.id) == [(None,)]
    assert handle.compensate() is True
    app.start()
    assert app.ended(handle) == "cancelled"
    app.drain()
    assert app.calls == [("undo", "r-1")]
    assert len(handle.actions()) == 1
    assert undone(handle) == [(1, "completed")]


def test_a_plan_that_needs_code_which_does_not_fit_raises_and_leaves_the_run_as_found(
    applications: Applications, journal: list[Any]
) -> None:
    """COMP-3: for an operator's call the error is raised; nothing partial is started. ANOM-1: replan_incomplete."""
    from dramatiq_saga.engine.core import WorkflowDefinition

    app = applications("sqlite")
    step, undo, other = app.step("step"), app.step("undo"), app.step("other")

    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda made: undo.message(made["id"])).run()

    handle, _ = completed_unseen(app, applications, one)
    before = app.sql("SELECT * FROM {flow_runs}"), app.sql("SELECT * FROM {action_runs}"), app.types(handle)

    def raises(flow: Flow) -> None:
        raise ValueError("reads something that is gone")

    def forgets(flow: Flow) -> None:
        flow.run(step)
        flow.run(other)

    deploy(app, "unseen", lambda flow: flow.run(other))
    with pytest.raises(SagaError, match="recorded is step 'step'"):
        handle.compensate()
    deploy(app, "unseen", raises)
    with pytest.raises(SagaError, match="reads something that is gone"):
        handle.compensate()
    deploy(app, "unseen", forgets)
    with pytest.raises(ConcurrentTransitionError, match="step 1"):
        handle.compensate()
    line = lines(journal, "replan_incomplete")[0]
    assert (line["run_id"], line["workflow"], line["missing"]) == (handle.id, "unseen", 1)
    del app.engine.workflows["unseen"]
    with pytest.raises(ConcurrentTransitionError, match="does not know"):
        handle.compensate()
    app.engine.workflows["unseen"] = WorkflowDefinition("unseen", one, app.queue + "flows", None)
    with pytest.raises(ConcurrentTransitionError, match="about to complete"):
        handle.compensate()
    assert (app.sql("SELECT * FROM {flow_runs}"), app.sql("SELECT * FROM {action_runs}"), app.types(handle)) == before
    drive_again(app, handle)
    assert handle.status == "completed"


# --- the step that failed ----------------------------------------------------------------------------------------------


def test_a_step_that_failed_is_undone_only_where_that_is_asked_for(app: Application) -> None:
    """COMP-5, COMP-7: with compensate_step_on_self_failure the undo learns that it failed; without it, nothing."""

    @app.actor
    def undo(word: str) -> None:
        step = current_step()
        assert step is not None
        assert step.undoes is not None
        app.calls.append((word, step.undoes.outcome))

    bad = app.step("bad", raises=ValueError())

    @app.workflow(name="with_flag")
    def with_flag(flow: Flow) -> None:
        flow.action(bad).compensate_with(undo, "asked").compensate_step_on_self_failure().run()

    @app.workflow(name="without")
    def without(flow: Flow) -> None:
        flow.action(bad).compensate_with(undo, "not asked").run()

    first, second = app.run(with_flag), app.run(without)
    assert app.calls == [("bad",), ("asked", "failed"), ("bad",)]
    assert (first.rollback, second.rollback) == ("done", "none")


def test_the_settings_may_ask_for_it_everywhere(applications: Applications) -> None:
    """COMP-5: sagas.compensate_failed_step; a step's own word is stronger; one built from the result is left out."""
    app = applications("sqlite", settings=Settings.from_mapping({"sagas": {"compensate_failed_step": True}}))
    bad, undo = app.step("bad", raises=ValueError()), app.step("undo")

    @app.workflow(name="all_of_them")
    def three(flow: Flow, number: int) -> None:
        builder = flow.action(bad)
        if number == 0:
            builder.compensate_with(undo, 0).run()
        elif number == 1:
            builder.compensate_with(undo, 1).compensate_step_on_self_failure(False).run()
        else:
            builder.compensate_with(lambda result: undo.message(2)).run()

    for number in range(3):
        app.run(three, number)
    assert [call for call in app.calls if call[0] == "undo"] == [("undo", 0)]


def test_a_step_whose_time_ran_out_is_undone_as_unknown(app: Application) -> None:
    """C25, COMP-7: charged, then interrupted before it returned; the undo learns "unknown" and the key of the attempt."""
    from tests.conformance.engine.test_interrupts import spin

    @app.actor(time_limit=40)
    def charge() -> None:
        step = current_step()
        assert step is not None
        app.calls.append(("charged", step.idempotency_key))
        spin()

    @app.actor
    def refund() -> None:
        step = current_step()
        assert step is not None
        assert step.undoes is not None
        app.calls.append(("refunded", step.undoes.outcome, step.undoes.idempotency_key))

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(charge).compensate_with(refund).compensate_step_on_self_failure().run()

    app.start(time_limits=True)
    handle = app.run(one)
    key = f"{handle.id}:1:0"
    assert app.calls[-1] == ("refunded", "unknown", key)
    assert set(app.calls[:-1]) == {("charged", key)}


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_step_at_work_is_undone_only_after_its_body_has_reported(kind: str, applications: Applications) -> None:
    """COMP-9: no refund before the charge; the refused report lets the waiting undo go, as "unknown"."""
    app, gate = applications(kind), Gate()

    @app.actor
    def charge() -> None:
        gate()
        app.calls.append("charged")

    @app.actor
    def refund() -> None:
        step = current_step()
        assert step is not None
        assert step.undoes is not None
        app.calls.append(("refunded", step.undoes.outcome))

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(charge).compensate_with(refund).compensate_step_on_self_failure().run()

    handle = one.send()
    app.start(threads=3)
    gate.wait()
    assert handle.compensate() is True
    row = handle.compensations()[0]
    assert (row.status, row.undoes) == ("pending", "unknown")
    assert row.not_before is not None
    assert row.not_before > app.engine.now()
    assert app.calls == []
    gate.leave.release()
    assert app.ended(handle) == "cancelled"
    assert app.calls == ["charged", ("refunded", "unknown")]


def test_a_compensation_from_the_result_cannot_be_asked_to_undo_a_failure(applications: Applications) -> None:
    """COMP-10: there would be no result; refused in either order, where it is written."""
    app = applications("sqlite")
    step, undo = app.step("step"), app.step("undo")

    @app.workflow
    def wrong(flow: Flow, order: int) -> str:
        builder = flow.action(step)
        try:
            if order:
                builder.compensate_step_on_self_failure().compensate_with(lambda r: undo.message())
            else:
                builder.compensate_with(lambda r: undo.message()).compensate_step_on_self_failure()
        except TypeError as error:
            return str(error)
        return ""

    for order in (0, 1):
        assert "compensate_with(actor, ...)" in app.run(wrong, order).result()
    assert app.calls == []


# --- compensations that cannot be built, or fail -----------------------------------------------------------------------


@pytest.mark.parametrize("builds", ["raises", "returns None", "returns an actor", "unknown actor", "wrong arguments"])
@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_compensation_that_cannot_be_built_holds_the_run(kind: str, builds: str, applications: Applications) -> None:
    """COMP-10: like a history mismatch; the step's outcome stands, nothing is undone, and a mended deploy goes on."""
    app = applications(kind)
    step, undo = app.step("step", gives={"id": 1}), app.actor(lambda charge: app.calls.append(charge), actor_name="undo")
    after = app.step("after", raises=ValueError("then this"))

    def build(made: Any) -> Any:
        match builds:
            case "raises":
                return undo.message(made["no such key"])
            case "returns None":
                return None
            case "returns an actor":
                return undo
            case "unknown actor":
                return undo.message(1).copy(actor_name="nobody")
            case _:
                return undo.message(1, 2, 3)

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(build).run()
        flow.run(after)

    handle = one.send()
    app.start()
    error = hold_error(app, handle)
    app.drain()
    assert "the compensation of step 1 (step)" in error["message"]
    assert (handle.status, handle.rollback) == ("waiting", "none")
    assert handle.actions()[0].status == "completed"

    def mended(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda made: undo.message(made["id"])).run()
        flow.run(after)

    deploy(app, "one", mended)
    drive_again(app, handle)
    assert app.ended(handle) == "failed"
    assert app.calls == [("step",), ("after",), 1]


def chain(app: Application, *, fails: str, policy: str | None = None, tries: int = 0) -> Any:
    """A, B and C done, D fails; one of the undos fails as well."""
    step, bad = app.step("step"), app.step("bad", raises=ValueError("the original cause"))
    for name in "ABC":
        raises = RuntimeError(f"undo of {name} is broken") if name == fails else None
        app.step(f"undo{name}", raises=raises, max_retries=tries)
    actors = app.broker.actors

    @app.workflow
    def four(flow: Flow) -> None:
        for name in "ABC":
            builder = flow.action(step, name).compensate_with(actors[f"undo{name}"])
            if policy is not None and name == fails:
                builder = builder.on_compensation_failure(policy)
            builder.run()
        flow.run(bad)

    return four


def test_a_compensation_that_fails_stops_the_rollback(app: Application) -> None:
    """C26, COMP-4, COMP-6: under stop A stays done; the run says halted, keeps its original error and names the undo's."""
    handle = app.run(chain(app, fails="B", tries=1))
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "halted")
    assert [call[0] for call in app.calls if call[0].startswith("undo")] == ["undoC", "undoB", "undoB"]
    assert undone(handle) == [(3, "completed"), (2, "failed"), (1, "pending")]
    error, rollback_error = app.sql("SELECT error, rollback_error FROM {flow_runs}")[0]
    assert "the original cause" in error
    assert "CompensationFailedError" in rollback_error
    assert "undo of B is broken" in rollback_error
    with pytest.raises(FlowFailedError, match="the original cause"):
        handle.result()
    last = [event for event in handle.events() if event.type == "rollback.finished"]
    assert [event.detail for event in last] == ["halted; undone: 3"]


def test_a_compensation_that_fails_lets_the_rollback_go_on_where_that_is_the_policy(app: Application) -> None:
    """C26, COMP-4: under continue A is still undone; the error of B's undo is on the run beside its own."""
    handle = app.run(chain(app, fails="B", policy="continue"))
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert undone(handle) == [(3, "completed"), (2, "failed"), (1, "completed")]
    rollback_error = app.sql("SELECT rollback_error FROM {flow_runs}")[0][0]
    assert "undo of B is broken" in rollback_error
    assert handle.events()[-2].detail == "done; undone: 3, 1"


@pytest.mark.parametrize(
    ("default", "step", "expected"), [("stop", None, "halted"), ("continue", None, "done"), ("continue", "stop", "halted")]
)
def test_the_policy_of_the_step_is_stronger_than_that_of_the_settings(
    applications: Applications, default: str, step: str | None, expected: str
) -> None:
    """COMP-4: step, then settings."""
    app = applications("sqlite", settings=Settings.from_mapping({"sagas": {"default_compensation_failure_policy": default}}))
    assert app.run(chain(app, fails="C", policy=step)).rollback == expected


def test_a_halted_rollback_is_resumed_once_its_cause_is_mended(app: Application) -> None:
    """C26, COMP-8, COMP-6: only what is not undone runs; the run keeps its end, its error and the moment of its end."""
    step, bad, undo = app.step("step"), app.step("bad", raises=ValueError("the original cause")), app.step("undo")
    broken = [True]

    @app.actor(actor_name="fragile")
    def fragile(number: int) -> None:
        app.calls.append(("fragile", number))
        if broken[0]:
            raise RuntimeError("no line to the bank")

    @app.workflow
    def three(flow: Flow) -> None:
        flow.action(step).compensate_with(undo, 1).run()
        flow.action(step).compensate_with(fragile, 2).run()
        flow.action(step).compensate_with(undo, 3).run()
        flow.run(bad)

    handle = app.run(three)
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "halted")
    (before,) = app.sql("SELECT status, error, ended_at, result FROM {flow_runs}")
    broken[0] = False
    assert handle.resume_rollback() is True
    eventually(lambda: handle.rollback == "done", because="the rollback goes on")
    app.drain()
    assert app.sql("SELECT status, error, ended_at, result FROM {flow_runs}") == [before]
    assert app.sql("SELECT rollback_error FROM {flow_runs}") == [(None,)]
    assert app.calls[4:] == [("undo", 3), ("fragile", 2), ("fragile", 2), ("undo", 1)]
    assert undone(handle) == [(3, "completed"), (2, "completed"), (1, "completed")]
    with pytest.raises(FlowFailedError, match="the original cause"):
        handle.result()
    types = app.types(handle)
    assert types.count("flow.failed") == 1
    assert types[types.index("flow.failed") + 1] == "rollback.resumed"
    assert types[-1] == "rollback.finished"
    assert app.messages() == 0
    with pytest.raises(ConcurrentTransitionError, match="its rollback is done"):
        handle.resume_rollback()


def test_a_resume_passes_over_what_nothing_can_build(lite: Application) -> None:
    """COMP-8, CODEC-2: the result that its undo needs could not be stored; undoing that by hand is the operator's, the rest is not."""
    step, undo = lite.step("step"), lite.step("undo")
    strange = lite.step("strange", gives=object())

    @lite.workflow
    def two(flow: Flow) -> None:
        flow.action(step).compensate_with(undo, 1).run()
        flow.action(strange).compensate_with(lambda made: undo.message(made)).run()

    with listening(FlowFailed, RollbackFinished) as heard:
        handle = lite.run(two)
        eventually(lambda: len(heard) == 2, because="listeners hear of an end that comes with the plan itself (EVENT-1)")
    assert {type(event) for event in heard} == {FlowFailed, RollbackFinished}
    assert (handle.status, handle.rollback) == ("failed", "halted")
    assert undone(handle) == [(2, "failed"), (1, "pending")]
    assert handle.resume_rollback() is True
    eventually(lambda: handle.rollback == "done", because="the rollback goes on")
    assert undone(handle) == [(2, "failed"), (1, "completed")]
    (error,) = lite.sql("SELECT rollback_error FROM {flow_runs}")[0]
    assert "the compensation of step 2 (strange) is built from the step's result" in error


def test_compensations_have_native_retries(app: Application) -> None:
    """COMP-1, NATIVE-1: an undo that fails twice and then works has undone its step."""
    step, bad = app.step("step"), app.step("bad", raises=ValueError())

    @app.actor(max_retries=3)
    def undo() -> None:
        app.calls.append("undo")
        if app.calls.count("undo") < 3:
            raise OSError

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(bad)

    handle = app.run(one)
    row = handle.compensations()[0]
    assert (handle.rollback, row.status, row.tries, row.attempts) == ("done", "completed", 2, 3)
    assert app.calls.count("undo") == 3


def test_options_of_the_compensations_message_are_kept(app: Application) -> None:
    """COMP-2: queue and options of a message that the callable builds."""
    step, bad = app.step("step", gives=5), app.step("bad", raises=ValueError())
    undo = app.step("undo", raises=OSError())
    app.broker.declare_queue(app.queue + "u")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(
            lambda n: undo.message_with_options(args=(n,), max_retries=2, min_backoff=2, max_backoff=4).copy(
                queue_name=app.queue + "u"
            )
        ).run()
        flow.run(bad)

    handle = app.run(one)
    row = handle.compensations()[0]
    assert (row.queue, row.args, row.tries) == (app.queue + "u", [5], 3)
    assert app.calls.count(("undo", 5)) == 3


@pytest.mark.claims_alone
def test_deliveries_of_a_rollback_that_come_twice_undo_once(app: Application, journal: list[Any]) -> None:
    """C28 without kills: the order C, B, A; every message twice, the run driven again meanwhile; each undone once."""
    gates = {name: Gate() for name in "ABC"}
    step, bad = app.step("step"), app.step("bad", raises=ValueError("cause of D"))

    @app.actor
    def undo(name: str) -> None:
        app.calls.append(name)
        gates[name]()

    @app.workflow
    def four(flow: Flow) -> None:
        for name in "ABC":
            flow.action(step, name).compensate_with(undo, name).run()
        flow.run(bad)

    handle = four.send()
    app.start(threads=3)
    for sequence, name in ((3, "C"), (2, "B"), (1, "A")):
        gates[name].wait()
        lost = len(lines(journal, "claim_lost"))
        send_again(app, handle.id, sequence, kind="compensation")
        eventually(lambda lost=lost: len(lines(journal, "claim_lost")) > lost)
        drive_again(app, handle)
        gates[name].leave.release()
    assert app.ended(handle) == "failed"
    app.drain()
    for sequence in (3, 2, 1):
        send_again(app, handle.id, sequence, kind="compensation")
    app.drain()
    assert [call for call in app.calls if isinstance(call, str)] == ["C", "B", "A"]
    assert [c.attempts for c in handle.compensations()] == [1, 1, 1]
    assert app.calls.count(("step", "A")) == 1
    with pytest.raises(FlowFailedError, match="cause of D"):
        handle.result()


def test_no_step_starts_under_a_rollback(app: Application) -> None:
    """STATUS: a drive under rolling_back schedules nothing, and a step's message that is late runs nothing."""
    gate = Gate()
    step, late, bad = app.step("step"), app.step("late"), app.step("bad", raises=ValueError())

    @app.actor
    def undo() -> None:
        gate()

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        try:
            flow.run(bad)
        except StepFailedError as error:
            raise ValueError("so be it") from error
        flow.run(late)

    handle = one.send()
    app.start()
    gate.wait()
    send_again(app, handle.id, 1)
    send_again(app, handle.id, 2)
    drive_again(app, handle)
    gate.leave.release()
    assert app.ended(handle) == "failed"
    app.drain()
    assert app.calls == [("step",), ("bad",)]


def test_a_compensation_returning_a_value_or_one_that_cannot_be_stored_has_undone_its_step(app: Application) -> None:
    """COMP-1: nobody reads an undo's value, so nothing about it can fail."""
    step, bad = app.step("step"), app.step("bad", raises=ValueError())
    undo = app.actor(lambda: threading.Lock(), actor_name="undo")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(bad)

    assert app.run(one).rollback == "done"


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_compensation_whose_actor_nobody_knows_halts_the_rollback(kind: str, applications: Applications) -> None:
    """NATIVE-3, COMP-4: with a clear cause, at once with repair off."""
    app = applications(kind)
    step, undo, bad = app.step("step"), app.step("undo"), app.step("bad", raises=ValueError())

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(bad)

    del app.broker.actors["undo"]
    handle = app.run(one)
    assert (handle.status, handle.rollback) == ("failed", "halted")
    assert "UnknownActorError" in app.sql("SELECT rollback_error FROM {flow_runs}")[0][0]
