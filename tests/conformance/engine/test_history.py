"""HISTORY-1, SIDE-1, DRIVE-5: a function that no longer fits its history, and authors' mistakes, hold the run and fail nothing."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest

from dramatiq_saga import Flow, FlowFailedError, StepFailedError, get_flow
from dramatiq_saga.engine.core import WorkflowDefinition
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def deploy(app: Application, name: str, function: Callable[..., Any]) -> None:
    """The same workflow with other code, as a deployment would bring it."""
    known = app.engine.workflows[name]
    app.engine.workflows[name] = WorkflowDefinition(known.name, function, known.queue, known.version)


def hold_error(app: Application, handle: Any) -> dict[str, Any]:
    """Why the run is held."""
    text = eventually(lambda: app.sql("SELECT hold_error FROM {flow_runs} WHERE id = ?", handle.id)[0][0], because="it is held")
    error: dict[str, Any] = json.loads(text)
    return error


def drive_again(app: Application, handle: Any) -> None:
    """What the monitor does once the hold-off is over."""
    app.middleware.runner(app.broker).wake(handle.id)


# --- deployments (C67, C68) --------------------------------------------------------------------------------------------


CHANGES: dict[str, tuple[str, str]] = {
    "a step renamed": ("step 'first'", "step 'renamed'"),
    "two steps swapped": ("step 'first'", "step 'second'"),
    "a step inserted": ("step 'second'", "step 'renamed'"),
    "a step removed": ("step 'second'", "step 'third'"),
    "a step made a side effect": ("step 'second'", "side effect 'second'"),
    "a side effect made a step": ("side effect 'dice'", "step 'renamed'"),
    "a side effect renamed": ("side effect 'dice'", "side effect 'cards'"),
    "the end moved forward": ("step 'second'", "nothing more"),
    "an error moved forward": ("step 'second'", "nothing more"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_changed_sequence_holds_the_run_and_agreeing_code_resumes_it(
    kind: str, change: str, applications: Applications, journal: list[Any]
) -> None:
    """C68, HISTORY-1: kind and name are compared at every position; held with a readable difference, not failed, not undone."""
    app = applications(kind)
    first, second, third = (
        app.step("first", gives=1),
        app.step("second", gives=2),
        app.step("third", gives=3, queue_name=app.queue + "x"),
    )
    renamed, undo = app.step("renamed", gives=9), app.step("undo")

    @app.workflow
    def flow_of_steps(flow: Flow) -> list[Any]:
        return [
            flow.action(first).compensate_with(undo).run(),
            flow.run(second),
            flow.side_effect("dice", lambda: 4),
            flow.run(third),
        ]

    def changed(flow: Flow) -> list[Any]:
        match change:
            case "a step renamed":
                flow.run(renamed)
            case "two steps swapped":
                flow.run(second)
            case "a step inserted":
                flow.run(first), flow.run(renamed)
            case "a step removed":
                flow.run(first), flow.run(third)
            case "a step made a side effect":
                flow.run(first), flow.side_effect("second", lambda: 0)
            case "a side effect made a step":
                flow.run(first), flow.run(second), flow.run(renamed)
            case "a side effect renamed":
                flow.run(first), flow.run(second), flow.side_effect("cards", lambda: 0)
            case "the end moved forward":
                return [flow.run(first)]
            case _:
                flow.run(first)
                raise ValueError("new rule")
        return []

    handle = flow_of_steps.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 3)
    app.stop()
    before = app.engine.workflows["flow_of_steps"].function
    deploy(app, "flow_of_steps", changed)
    app.start()
    error = hold_error(app, handle)
    app.drain()
    assert error["type"].endswith("HistoryMismatchError")
    recorded, asked = CHANGES[change]
    assert f"recorded is {recorded}" in error["message"]
    assert f"the code asks for {asked}" in error["message"]
    assert (handle.status, handle.rollback) == ("waiting", "none")
    assert handle.actions()[2].result == 3  # the outcome stands by itself
    row = app.sql("SELECT hold_count, hold_until, wakes, wakes_seen FROM {flow_runs} WHERE id = ?", handle.id)[0]
    assert row[0] == 1
    assert row[1] is not None
    assert row[2] > row[3]
    assert [line["run_id"] for line in journal if line["event"] == "flow_held"] == [handle.id]
    drive_again(app, handle)
    assert app.sql("SELECT hold_count FROM {flow_runs} WHERE id = ?", handle.id) == [(2,)]
    deploy(app, "flow_of_steps", before)
    drive_again(app, handle)
    assert app.ended(handle) == "completed"
    assert handle.result() == [1, 2, 4, 3]
    assert app.sql("SELECT hold_error, hold_until FROM {flow_runs} WHERE id = ?", handle.id) == [(None, None)]
    assert app.calls == [("first",), ("second",), ("third",)]


def test_code_that_changes_without_changing_the_sequence_goes_on(app: Application) -> None:
    """C67: arguments, branches on recorded values, bodies and options may change under a run."""
    first, second = app.step("first", gives=1), app.step("second", gives=2, queue_name=app.queue + "x")
    third = app.step("third", gives=3)

    @app.workflow
    def changes(flow: Flow) -> Any:
        return flow.run(first, "old"), flow.run(second)

    handle = changes.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 2)
    app.stop()

    def later(flow: Flow) -> Any:
        value = flow.action(first, "new", "arguments").with_options(max_retries=9).run()
        flow.action(second).run()
        return [value, flow.run(third)]

    deploy(app, "changes", later)
    app.start()
    assert app.ended(handle) == "completed"
    assert handle.result() == [1, 3]
    assert handle.actions()[0].args == ["old"]


def test_a_held_run_can_be_cancelled_and_rolled_back(app: Application) -> None:
    """HISTORY-1, COMP-2: what is known of its compensations needs no code that fits."""
    first, second, undo = app.step("first"), app.step("second", queue_name=app.queue + "x"), app.step("undo")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(first).compensate_with(undo, "x").run()
        flow.run(second)

    handle = one.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 2)
    app.stop()

    def other(flow: Flow) -> None:
        flow.run(second)

    deploy(app, "one", other)
    app.start()
    hold_error(app, handle)
    assert handle.compensate("nobody can drive it") is True
    assert app.ended(handle) == "cancelled"
    assert app.calls == [("first",), ("second",), ("undo", "x")]
    assert handle.rollback == "done"


def test_a_recorded_value_that_cannot_be_read_holds_the_run_and_never_the_outcome_of_a_step(app: Application) -> None:
    """HISTORY-1, CODEC-1: another encoder, or a damaged row; the step at hand is recorded as it ended."""
    first, second = app.step("first", gives=1), app.step("second", gives=2, queue_name=app.queue + "x")

    @app.workflow
    def two(flow: Flow) -> list[int]:
        return [flow.run(first), flow.run(second)]

    handle = two.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 2)
    app.stop()
    app.execute("UPDATE {action_runs} SET result = ? WHERE run_id = ? AND sequence = 1", b"\xffnot json", handle.id)
    app.engine.cache.drop(handle.id)
    app.start()
    error = hold_error(app, handle)
    app.drain()
    assert "Decode" in error["type"] or "Unicode" in error["type"]
    assert handle.status == "waiting"
    assert (handle.actions()[1].status, handle.actions()[1].result) == ("completed", 2)
    app.execute("UPDATE {action_runs} SET result = ? WHERE run_id = ? AND sequence = 1", b"1", handle.id)
    drive_again(app, handle)
    assert app.ended(handle) == "completed"
    assert app.calls == [("first",), ("second",)]


# --- authors' mistakes -------------------------------------------------------------------------------------------------


def held(app: Application, function: Callable[..., Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Run a workflow that is expected to be held."""
    handle = app.workflow(function, **options).send()
    app.start()
    return handle, hold_error(app, handle)


@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_swallowed_suspension_is_told_and_nothing_after_it_happens(kind: str, applications: Applications) -> None:
    """API Flow: a bare except around a step; SuspensionSwallowedError at the next call, and the run is held."""
    app = applications(kind)
    first, second = app.step("first"), app.step("second")

    def swallows(flow: Flow) -> None:
        try:
            flow.run(first)
        except:  # noqa: E722
            pass
        flow.run(second)

    handle, error = held(app, swallows)
    app.drain()
    assert error["type"].endswith("SuspensionSwallowedError")
    assert "catch Exception instead" in error["message"]
    assert app.calls == []
    assert handle.status == "waiting"


@pytest.mark.parametrize("ending", ["return", "raise", "exit", "generator"])
def test_a_function_that_ends_after_swallowing_its_suspension_is_held(applications: Applications, ending: str) -> None:
    """API Flow: it is no completion and no failure of the run, whatever it ends with."""
    app = applications("sqlite")
    first = app.step("first")

    def swallows(flow: Flow) -> Any:
        try:
            return flow.run(first)
        except BaseException:
            if ending == "return":
                return "made up"
            if ending == "exit":
                sys.exit(3)
            if ending == "generator":
                raise GeneratorExit from None
            raise ValueError("hides it") from None

    _, error = held(app, swallows)
    assert error["type"].endswith("SuspensionSwallowedError" if ending in ("return", "raise") else "SagaError")
    assert app.calls == []


def test_finally_blocks_run_at_every_suspension_and_what_they_ask_for_is_not_done(applications: Applications) -> None:
    """API Flow: a call on flow on the way out raises the suspension again; once there is no suspension, it counts."""
    app = applications("sqlite")
    first, last = app.step("first"), app.step("last")

    @app.workflow
    def tidy(flow: Flow) -> None:
        try:
            flow.run(first)
        finally:
            flow.run(last)

    handle = app.run(tidy)
    assert handle.status == "completed"
    assert app.calls == [("first",), ("last",)]


WAYS: dict[str, Callable[..., Any]] = {
    "send": lambda actor, other, handle: actor.send(),
    "send_with_options": lambda actor, other, handle: actor.send_with_options(delay=10),
    "broker.enqueue": lambda actor, other, handle: actor.broker.enqueue(actor.message()),
    "group": lambda actor, other, handle: dramatiq.group([actor.message()]).run(),
    "pipeline": lambda actor, other, handle: dramatiq.pipeline([actor.message(), actor.message()]).run(),
    "workflow.send": lambda actor, other, handle: other.send(),
    "workflow.run_sync": lambda actor, other, handle: other.run_sync(),
    "handle.cancel": lambda actor, other, handle: handle.cancel(),
    "handle.compensate": lambda actor, other, handle: handle.compensate(),
    "handle.tag": lambda actor, other, handle: handle.tag("a", "b"),
    "handle.kick": lambda actor, other, handle: handle.kick(),
}


@pytest.mark.parametrize("caught", [False, True], ids=["let through", "caught"])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_sent_from_inside_a_workflow_function_is_refused(
    applications: Applications, way: str, caught: bool
) -> None:
    """API Flow: it would repeat at every replay; SendInsideWorkflowError, the run is held, and nothing was sent or changed."""
    app = applications("sqlite")
    actor = app.step("actor")

    @app.workflow
    def other(flow: Flow) -> None: ...

    victim = other.send_with_options(delay=3_600_000)
    messages = app.messages()

    def sends(flow: Flow) -> None:
        try:
            WAYS[way](actor, other, get_flow(victim.id))
        except Exception:
            if not caught:
                raise

    _, error = held(app, sends)
    app.stop()
    assert error["type"].endswith("SendInsideWorkflowError")
    assert "inside a workflow function" in error["message"]
    assert app.calls == []
    assert app.messages() == messages
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(2,)]
    assert (victim.status, victim.tags) == ("pending", {})


@pytest.mark.parametrize("where", ["last", "before another", "in an except block", "before a return"])
def test_a_builder_that_was_never_run_is_told(applications: Applications, where: str) -> None:
    """API Flow: BuilderNotRunError names it; the run is held, not completed without the step."""
    app = applications("sqlite")
    first, forgotten = app.step("first", raises=ValueError()), app.step("forgotten")
    undo = app.step("undo")

    def forgets(flow: Flow) -> Any:
        if where == "last":
            flow.action(forgotten)
        elif where == "before another":
            flow.action(forgotten).compensate_with(undo)
            flow.run(first)
        elif where == "in an except block":
            try:
                flow.run(first)
            except StepFailedError:
                flow.action(forgotten)
        else:
            flow.action(forgotten)
            return 1
        return None

    _, error = held(app, forgets)
    assert error["type"].endswith("BuilderNotRunError")
    assert "action(forgotten)" in error["message"]
    assert ("forgotten",) not in app.calls


def test_a_builder_described_ahead_of_its_turn_keeps_its_compensation(app: Application) -> None:
    """COMP-2: made while the step before it is being replayed, run after it; its undo has its arguments."""
    first, second, undo = app.step("first"), app.step("second"), app.step("undo")
    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def ahead(flow: Flow) -> None:
        one = flow.action(first, 1).compensate_with(undo, "first")
        two = flow.action(second, 2).compensate_with(undo, "second", 2)
        one.run()
        two.run()
        flow.run(refuse)

    handle = app.run(ahead)
    assert handle.rollback == "done"
    assert app.calls == [("first", 1), ("second", 2), ("refuse",), ("undo", "second", 2), ("undo", "first")]


def test_a_flow_outside_its_function_is_refused(applications: Applications) -> None:
    """API Flow: kept after the function has ended, or used by another thread."""
    from dramatiq_saga import SagaError

    app = applications("sqlite")
    step = app.step("step")
    kept: list[Flow] = []
    errors: list[BaseException] = []

    @app.workflow
    def keeps(flow: Flow) -> None:
        kept.append(flow)

        def elsewhere() -> None:
            try:
                flow.run(step)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    assert app.run(keeps).status == "completed"
    with pytest.raises(SagaError, match="outside its workflow function"):
        kept[0].run(step)
    with pytest.raises(SagaError, match="outside its workflow function"):
        kept[0].side_effect("x", lambda: 1)
    assert "outside its workflow function" in str(errors[0])
    assert app.calls == []


@pytest.mark.parametrize("leaves", [SystemExit(2), GeneratorExit()], ids=["SystemExit", "GeneratorExit"])
def test_a_function_that_leaves_by_no_exception_is_held(app: Application, leaves: BaseException) -> None:
    """DRIVE-5: only an Exception fails a run; the worker lives on."""
    step = app.step("step", gives=1)

    def exits(flow: Flow) -> None:
        flow.run(step)
        raise leaves

    handle, error = held(app, exits)
    app.drain()
    assert type(leaves).__name__.lower().removesuffix("exit") in error["message"].lower() or "sys.exit" in error["message"]
    assert handle.status == "waiting"
    assert (handle.actions()[0].status, handle.actions()[0].tries) == ("completed", 0)

    @app.workflow
    def fine(flow: Flow) -> int:
        return flow.run(step)

    assert app.run(fine).result() == 1


# --- side effects ------------------------------------------------------------------------------------------------------


def test_a_side_effect_is_recorded_once_before_what_follows(app: Application) -> None:
    """SIDE-1, CODEC-1: called once per run, seen in its stored form from the first time on."""
    step = app.step("step")
    seen: list[Any] = []

    @app.workflow
    def rolls(flow: Flow) -> Any:
        value = flow.side_effect("pair", lambda: (app.calls.append("rolled"), {1: len(app.calls)})[1:])
        seen.append(value)
        flow.run(step, value)
        again = flow.side_effect("pair", lambda: "second")
        return [value, again]

    handle = app.run(rolls)
    assert handle.result() == [[{"1": 1}], "second"]
    assert all(value == [{"1": 1}] for value in seen)
    assert app.calls == ["rolled", ("step", [{"1": 1}])]
    assert app.sql("SELECT sequence, name FROM {side_effects} ORDER BY sequence") == [(1, "pair"), (3, "pair")]


def test_an_error_of_a_side_effects_function_is_the_functions_own(app: Application) -> None:
    """SIDE-1: nothing is recorded; the workflow may catch it, and otherwise fails."""

    def fails() -> int:
        raise OSError("no dice")

    @app.workflow
    def rolls(flow: Flow, careful: bool) -> Any:
        try:
            return flow.side_effect("dice", fails)
        except OSError:
            if careful:
                return "caught"
            raise

    assert app.run(rolls, True).result() == "caught"
    with pytest.raises(FlowFailedError, match="no dice"):
        app.run(rolls, False).result()
    assert app.sql("SELECT COUNT(*) FROM {side_effects}") == [(0,)]


def test_the_function_of_a_side_effect_may_not_use_the_flow(applications: Applications) -> None:
    """SIDE-1: what it would ask for has no place in the history; the run is held with a word about the way out."""
    app = applications("sqlite")
    step = app.step("step", gives=1)

    def nested(flow: Flow) -> Any:
        return flow.side_effect("outer", lambda: flow.side_effect("inner", lambda: 1) + flow.run(step))

    _, error = held(app, nested)
    assert "'outer' used the flow" in error["message"]
    assert app.sql("SELECT COUNT(*) FROM {side_effects}") == [(0,)]


def test_a_side_effect_is_not_called_once_the_run_is_rolling_back(app: Application) -> None:
    """SIDE-1: a late drive of a run that is being undone calls no function of the workflow."""
    from tests.conformance.engine.test_claims_and_fences import Gate

    gate = Gate()
    step = app.step("step")

    @app.actor
    def undo() -> None:
        gate()

    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def rolls(flow: Flow) -> None:
        app.calls.append("drive")
        flow.action(step).compensate_with(undo).run()
        try:
            flow.run(refuse)
        except StepFailedError as error:
            raise RuntimeError from error

    handle = rolls.send()
    app.start()
    gate.wait()
    drives = app.calls.count("drive")
    drive_again(app, handle)
    gate.leave.release()
    assert app.ended(handle) == "failed"
    assert app.calls.count("drive") == drives


def test_the_flows_logger_speaks_once_per_run(applications: Applications, journal: list[Any]) -> None:
    """API Flow.logger, is_replaying: quiet while replaying."""
    app = applications("sqlite")
    step = app.step("step")

    @app.workflow
    def talks(flow: Flow) -> None:
        flow.logger.info("begun")
        flow.run(step)
        flow.logger.info("half way", n=1)
        flow.run(step)
        flow.logger.info("done")

    handle = app.run(talks)
    said = [(line["event"], line["run"]) for line in journal if line.get("workflow") == "talks" and "run" in line]
    assert said == [("begun", handle.id), ("half way", handle.id), ("done", handle.id)]
