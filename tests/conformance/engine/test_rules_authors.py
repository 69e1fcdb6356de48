"""What an author or a caller gets wrong: a clear error that names the thing and the way out, and nothing half written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest

from dramatiq_saga import Flow, FlowFailedError, RunConflictError, SagaError, get_flow
from dramatiq_saga.errors import NotSerializableError, WouldBlockError
from tests.support.application import Application, Applications
from tests.support.deploying import deploy


def held(declared: Any, *args: Any) -> tuple[Any, dict[str, Any]]:
    """A run that is held by its function's fault: its handle, and the error that is on it."""
    with pytest.raises(WouldBlockError) as caught:
        declared.run_sync(*args)
    assert caught.value.held is not None
    handle = get_flow(caught.value.run_id)
    assert handle.status == "waiting"
    return handle, caught.value.held


def nothing_was_written(app: Application) -> None:
    for table in ("flow_runs", "action_runs", "tags", "flow_events"):
        assert app.sql(f"SELECT COUNT(*) FROM {{{table}}}") == [(0,)], table
    assert app.messages() == 0


# --- suspension ------------------------------------------------------------------------------------------------------


def goes_on(step: Any, flow: Flow) -> None:
    try:
        flow.run(step, 1)
    except BaseException:
        pass
    flow.run(step, 2)


def returns(step: Any, flow: Flow) -> str:
    try:
        flow.run(step, 1)
    except BaseException:
        return "done"
    return "really done"


def raises_something_else(step: Any, flow: Flow) -> None:
    try:
        flow.run(step, 1)
    except BaseException as error:
        raise ValueError("wrapped") from error


def swallows_everything(step: Any, flow: Flow) -> None:
    for number in (1, 2, 3):
        try:
            flow.run(step, number)
        except BaseException:
            continue


@pytest.mark.parametrize("code", [goes_on, returns, raises_something_else, swallows_everything])
def test_a_function_that_swallows_its_suspension_is_held_and_told_so(lite: Application, code: Any) -> None:
    """API SuspensionSwallowedError: the run neither completes nor fails of it; it goes on with code that lets it pass."""
    step = lite.step("step")

    @lite.workflow
    def order(flow: Flow) -> Any:
        return code(step, flow)

    handle, error = held(order)
    assert error["type"] == "dramatiq_saga.errors.SuspensionSwallowedError"
    assert "catch Exception instead, or re-raise" in error["message"]
    assert handle.actions() == []
    assert lite.calls == []

    def mended(flow: Flow) -> None:
        flow.run(step, 1)

    deploy(lite.engine, "order", mended)
    handle.kick()
    lite.start()
    assert lite.ended(handle) == "completed"
    assert lite.calls == [("step", 1)]


def test_an_except_exception_never_swallows_the_suspension_and_a_finally_does_no_harm(lite: Application) -> None:
    """API: suspension is a BaseException; what a finally block asks of the flow on the way out does not exist."""
    step, last = lite.step("step"), lite.step("last")

    @lite.workflow
    def order(flow: Flow) -> str:
        try:
            flow.run(step)
        except Exception as error:
            return f"swallowed {error!r}"
        finally:
            flow.run(last)
        return "done"

    handle = order.run_sync()
    assert handle.result() == "done"
    assert lite.calls == [("step",), ("last",)]


# --- sending from inside a workflow ----------------------------------------------------------------------------------

SENDS: dict[str, Callable[..., Any]] = {
    "actor.send": lambda app, step, other, handle: step.send(),
    "actor.send_with_options": lambda app, step, other, handle: step.send_with_options(delay=1000),
    "broker.enqueue": lambda app, step, other, handle: app.broker.enqueue(step.message()),
    "group": lambda app, step, other, handle: dramatiq.group([step.message(), step.message()]).run(),
    "pipeline": lambda app, step, other, handle: (step.message() | step.message()).run(),
    "workflow.send": lambda app, step, other, handle: other.send(),
    "workflow.run_sync": lambda app, step, other, handle: other.run_sync(),
    "handle.cancel": lambda app, step, other, handle: handle.cancel(),
    "handle.compensate": lambda app, step, other, handle: handle.compensate(),
    "handle.kick": lambda app, step, other, handle: handle.kick(),
    "handle.tag": lambda app, step, other, handle: handle.tag("k", "v"),
}


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("what", list(SENDS))
def test_sending_from_inside_a_workflow_is_refused(lite: Application, what: str, caught: bool) -> None:
    """API SendInsideWorkflowError: it would repeat at every replay; caught or not, the run is held and nothing has happened."""
    step = lite.step("step")

    @lite.workflow
    def other(flow: Flow) -> None: ...

    there = other.send()
    waiting, before = lite.messages(), lite.types(there)

    @lite.workflow
    def order(flow: Flow) -> str:
        try:
            SENDS[what](lite, step, other, there)
        except Exception:
            if not caught:
                raise
        return "done"

    handle, error = held(order)
    assert error["type"] == "dramatiq_saga.errors.SendInsideWorkflowError"
    assert "inside a workflow function would repeat at every replay; use flow, or do it inside a step" in error["message"]
    assert lite.messages() == waiting
    assert (there.status, there.tags, lite.types(there)) == ("pending", {}, before)
    assert lite.sql("SELECT COUNT(*) FROM {flow_runs}") == [(2,)]
    assert handle.status == "waiting"


def test_a_step_may_send_what_a_workflow_may_not(lite: Application) -> None:
    """API: inside a step it happens once; the refusal ends with the function."""
    step = lite.step("step")

    @lite.workflow
    def other(flow: Flow) -> None: ...

    @lite.actor
    def sends() -> str:
        step.send()
        return other.send().id

    @lite.workflow
    def order(flow: Flow) -> str:
        return str(flow.run(sends))

    handle = lite.run(order)
    lite.drain()
    assert lite.calls == [("step",)]
    assert get_flow(handle.result()).status == "completed"


# --- functions that make the message of an undo -----------------------------------------------------------------------

NOT_A_MESSAGE: dict[str, Callable[[Flow, Any, Any], Any]] = {
    "runs it as a step": lambda flow, refund, made: flow.run(refund, made),
    "describes a step": lambda flow, refund, made: flow.action(refund, made),
    "asks for the time": lambda flow, refund, made: refund.message(flow.now()),
    "writes a tag": lambda flow, refund, made: flow.tag("refunded"),
    "calls the actor": lambda flow, refund, made: refund(made),
    "sends it": lambda flow, refund, made: refund.send(made),
    "sends it later": lambda flow, refund, made: refund.send_with_options(args=(made,), delay=1),
}


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("what", list(NOT_A_MESSAGE))
@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_compensate_with_function_that_does_something_holds_the_run(
    kind: str, what: str, caught: bool, applications: Applications
) -> None:
    """COMP-10: ``compensate_with(lambda made: flow.run(refund, made))`` refunded in the middle of a healthy run."""
    app = applications(kind)
    charge, refund, ship = app.step("charge", gives="c-1"), app.step("refund"), app.step("ship")

    @app.workflow
    def order(flow: Flow) -> None:
        def undo(made: Any) -> Any:
            try:
                return NOT_A_MESSAGE[what](flow, refund, made)
            except Exception:
                if not caught:
                    raise
            return refund.message(made)

        flow.action(charge).compensate_with(undo).run()
        flow.run(ship)

    handle, error = held(order)
    assert error["type"] == "dramatiq_saga.errors.CompensationBuildError"
    assert "the compensation of step 1 (charge) could not be built: " in error["message"]
    assert "return " in error["message"]
    assert "refund.message(...)" in error["message"]
    assert "flow.run(" not in error["message"]
    assert [(step.actor, step.status) for step in handle.actions()] == [("charge", "completed")]
    assert (app.calls, handle.compensations(), handle.tags, app.messages()) == ([("charge",)], [], {}, 0)


@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_retry_policy_that_sends_a_message_sends_none(kind: str, applications: Applications) -> None:
    """RSIG-3: on every broker; Dramatiq's own lets only a MiddlewareError out of a hook, and would go on and send."""
    app = applications(kind)
    charge, mail = app.step("charge", raises=ValueError("no")), app.step("mail")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(charge).retry_on_signal("again", when=lambda context: bool(mail.send())).run()

    _, error = held(order)
    assert error["type"] == "dramatiq_saga.errors.RetryPolicyReentryError"
    assert (app.calls, app.messages()) == ([("charge",)], 0)


# --- flow and builders -----------------------------------------------------------------------------------------------


def test_a_builder_that_was_dropped_is_named_and_nothing_after_it_exists(lite: Application) -> None:
    """API BuilderNotRunError: learnt at the next use of the flow."""
    step = lite.step("step")

    @lite.workflow
    def order(flow: Flow) -> None:
        flow.action(step, 1).max_claims(1)
        flow.run(step, 2)

    handle, error = held(order)
    assert error["type"] == "dramatiq_saga.errors.BuilderNotRunError"
    assert "flow.action(step) was built but never run: call .run() on it" in error["message"]
    assert handle.actions() == []
    assert lite.calls == []


@pytest.mark.parametrize("where", ["a step", "another thread", "afterwards"])
def test_a_flow_outside_its_function_is_refused(lite: Application, where: str) -> None:
    """API: a flow belongs to one drive; the error names the run and says what to do instead."""
    kept: list[Flow] = []
    errors: list[SagaError] = []
    step = lite.step("step")

    def use() -> None:
        with pytest.raises(SagaError, match="was used outside its workflow function, or from another thread") as caught:
            kept[-1].run(step)
        errors.append(caught.value)

    @lite.actor
    def body() -> None:
        if where == "a step":
            use()

    @lite.workflow
    def order(flow: Flow) -> None:
        kept.append(flow)
        if where == "another thread":
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        flow.run(body)

    handle = order.run_sync()
    if where == "afterwards":
        use()
    assert handle.status == "completed"
    assert errors
    assert handle.id in str(errors[0])
    assert lite.calls == []


def test_a_flow_in_another_thread_is_refused_where_the_answer_is_recorded_too(lite: Application) -> None:
    """API: it would move the walk of the function's own thread, and hand its step's result to somebody else."""
    step = lite.step("step", gives="result")
    seen: list[Any] = []

    @lite.workflow
    def order(flow: Flow) -> str:
        def elsewhere() -> None:
            try:
                seen.append(flow.run(step))
            except SagaError as error:
                seen.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return str(flow.run(step))

    handle = order.run_sync()
    assert handle.result() == "result" and len(handle.actions()) == 1
    assert len(seen) == 2 and all("from another thread" in str(error) for error in seen)


def test_a_side_effect_that_uses_the_flow_is_told_to_ask_before(lite: Application) -> None:
    """SIDE-1: its function runs once, so nothing in it may be a part of the history."""
    step = lite.step("step")

    @lite.workflow
    def order(flow: Flow) -> None:
        flow.side_effect("dice", lambda: flow.run(step))

    handle, error = held(order)
    assert "the function of side effect 'dice' used the flow" in error["message"]
    assert handle.actions() == []


# --- what is given to a run or a step --------------------------------------------------------------------------------


def test_arguments_that_cannot_be_stored_are_refused_to_the_caller_and_nothing_is_written(joined: Application) -> None:
    """C46, C47, CODEC-2: the error names the path and the way out."""
    app = joined

    @app.workflow
    def order(flow: Flow, *args: Any, **options: Any) -> None: ...

    loop: list[Any] = []
    loop.append(loop)
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((object(),), {}, r"args\[0\] cannot be stored: object"),
        ((1, {"a": [1, {2}]}), {}, r"args\[1\]\['a'\]\[1\] cannot be stored: set"),
        ((), {"when": float("inf")}, r"kwargs\['when'\] cannot be stored: inf is not JSON"),
        ((loop,), {}, r"args\[0\]\[0\] cannot be stored: it contains itself"),
        ((threading.Lock(),), {}, r"args\[0\] cannot be stored: _thread\.lock"),
    ]
    for args, kwargs, words in bad:
        for send in (order.send, order.run_sync):
            with pytest.raises(NotSerializableError, match=words):
                send(*args, **kwargs)
    with pytest.raises(NotSerializableError, match=r"dramatiq\.set_encoder"):
        order.send(object())
    nothing_was_written(app)


def test_arguments_that_do_not_fit_are_refused_to_the_caller_with_the_signature(lite: Application) -> None:
    """API Workflow.send(): the name, what is wrong, and the signature."""

    @lite.workflow
    def order(flow: Flow, customer: str, *, express: bool = False) -> None: ...

    for args, kwargs in (((), {}), (("ann", 2), {}), (("ann",), {"fast": True})):
        for send in (order.send, order.run_sync):
            with pytest.raises(TypeError, match=r"^order: .*its signature is order\(customer: .*express: "):
                send(*args, **kwargs)
    with pytest.raises(TypeError, match=r"does not take 'max_retries': "):
        order.send_with_options(args=("ann",), max_retries=3)
    with pytest.raises(ValueError, match="must be text of 1 to 128 printable characters"):
        order.send_with_options(args=("ann",), run_id="x" * 129)
    with pytest.raises(SagaError, match=r"order is a workflow: start it with order\.send"):
        order("ann")
    nothing_was_written(lite)


STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    "too few arguments": (lambda flow, step, undo: flow.run(step), r"charge: missing a required argument: 'order'; its signature is"),
    "too many arguments": (lambda flow, step, undo: flow.run(step, 1, 2), "charge: too many positional arguments"),
    "an unknown keyword": (lambda flow, step, undo: flow.run(step, 1, currency="x"), "unexpected keyword argument 'currency'"),
    "an undo without its argument": (
        lambda flow, step, undo: flow.action(step, 1).compensate_with(undo).run(), r"refund: missing a required argument: 'number'",
    ),
    "an undo that is no actor": (
        lambda flow, step, undo: flow.action(step, 1).compensate_with("refund").run(), "takes an actor or a callable .* not str",
    ),
    "a callable with arguments": (
        lambda flow, step, undo: flow.action(step, 1).compensate_with(lambda made: undo.message(made), 1).run(),
        "a callable gets the step's result and nothing else",
    ),
    "an undo's argument": (
        lambda flow, step, undo: flow.action(step, 1).compensate_with(undo, object()).run(), r"refund: args\[0\] cannot be stored",
    ),
    "a plain function": (lambda flow, step, undo: flow.run(step.fn, 1), "a step is a Dramatiq actor, not function: decorate"),
    "a policy": (
        lambda flow, step, undo: flow.action(step, 1).compensate_with(undo, 1).on_compensation_failure("sometimes").run(), "sometimes",
    ),
    "claims": (lambda flow, step, undo: flow.action(step, 1).max_claims(0).run(), "at least 1, not 0"),
    "a window": (lambda flow, step, undo: flow.action(step, 1).reclaim_stale_after(0).run(), r"reclaim_stale_after\(\) takes at least one"),
    "a deadline": (lambda flow, step, undo: flow.action(step, 1).expires_in(-1).run(), r"expires_in\(\) takes a duration above zero"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(STEPS))
def test_a_step_that_is_described_wrongly_fails_the_run_there_and_never_exists(lite: Application, what: str) -> None:
    """API Action builder: a mistake is an error at its line, not a surprise during a rollback; what was done before is undone."""
    code, words = STEPS[what]
    before, undo_before = lite.step("before"), lite.step("undo_before")

    @lite.actor
    def charge(order: Any) -> None:
        lite.calls.append("charged")

    @lite.actor
    def refund(number: Any) -> None:
        lite.calls.append("refunded")

    @lite.workflow
    def order(flow: Flow) -> None:
        flow.action(before).compensate_with(undo_before).run()
        code(flow, charge, refund)

    handle = order.run_sync()
    with pytest.raises(FlowFailedError, match=words):
        handle.result()
    assert lite.calls == [("before",), ("undo_before",)]
    assert [action.actor for action in handle.actions()] == ["before"]


def test_a_step_whose_actor_nobody_declares_fails_with_its_name(applications: Any) -> None:
    """NATIVE-3: the actor of another broker, in the calling process; the step before it is undone."""
    app, elsewhere = applications("sqlite"), applications("stub")
    dramatiq.set_broker(app.broker)
    foreign = elsewhere.step("foreign")
    before, undo = app.step("before"), app.step("undo")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(before).compensate_with(undo).run()
        flow.run(foreign)

    handle = order.run_sync()
    with pytest.raises(
        FlowFailedError, match=r"actor 'foreign' is not declared in this process: import the module that declares it"
    ):
        handle.result()
    assert app.calls == [("before",), ("undo",)]
    assert elsewhere.calls == []


def test_a_run_id_that_is_taken_is_refused_with_the_reason_and_changes_nothing(lite: Application) -> None:
    """API RunConflictError: same call, other arguments, other workflow; the run that is there is as it was."""

    @lite.workflow
    def one(flow: Flow, n: int) -> int:
        return n

    @lite.workflow
    def two(flow: Flow, n: int) -> int:
        return n

    first = one.send_with_options(args=(1,), run_id="order-1", tags={"k": "v"})
    before = lite.sql("SELECT * FROM {flow_runs}")
    assert one.send_with_options(args=(1,), run_id="order-1", tags={"k": "other"}) == first
    with pytest.raises(
        RunConflictError, match=r"run id 'order-1' is taken: it is a run of one with other arguments; use another id"
    ):
        one.send_with_options(args=(2,), run_id="order-1")
    with pytest.raises(RunConflictError, match=r"it is a run of one, not of two"):
        two.send_with_options(args=(1,), run_id="order-1")
    assert lite.sql("SELECT * FROM {flow_runs}") == before
    assert first.tags == {"k": "v"}
    assert lite.messages() == 1
    assert lite.types(first) == ["flow.started"]


def test_the_actor_behind_a_workflow_starts_nothing_by_itself(lite: Application) -> None:
    """API: a bare message to a workflow would drive no run; it is refused with the verb to use."""

    @lite.workflow
    def order(flow: Flow) -> None: ...

    with pytest.raises(SagaError, match=r"order is a workflow: start a run with Workflow\.send\(\)"):
        order.actor.send()
    nothing_was_written(lite)


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (
            lambda app: app.workflow(lambda: None, name="none"),
            r"must take the flow as its first argument: def none\(flow, \.\.\.\)",
        ),
        (lambda app: app.workflow(lambda flow: None, name="n" * 200), "a workflow's name has between"),
        (
            lambda app: app.workflow(lambda flow: None, max_retries=3),
            "does not take 'max_retries': a workflow is driven until it ends",
        ),
        (lambda app: app.workflow(lambda flow: None, max_age=3), "does not take 'max_age': a run has a deadline: expires_in"),
        (
            lambda app: app.workflow(lambda flow: None, store_results=True),
            r"does not take 'store_results': .*FlowHandle\.result",
        ),
        (lambda app: app.workflow(lambda flow: None, tries=3), "does not take 'tries'"),
    ],
)
def test_a_workflow_that_cannot_work_is_refused_where_it_is_declared(lite: Application, declare: Any, words: str) -> None:
    """API workflow(): also a coroutine function; nothing is declared."""
    with pytest.raises((TypeError, ValueError), match=words):
        declare(lite)
    assert lite.broker.actors == {}
    assert lite.engine.workflows == {}


def test_a_coroutine_function_is_no_workflow(lite: Application) -> None:
    """API workflow(): its steps may be async actors."""

    async def order(flow: Flow) -> None: ...

    with pytest.raises(TypeError, match="workflow order is a coroutine function: a workflow is a plain function"):
        lite.workflow(order)
