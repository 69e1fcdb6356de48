"""The workflows that the golden histories were recorded of, and how each came about.

A file that is there is never changed: it stands for a run that somebody has in flight. So a workflow here may be given new code
only as far as its files still fit, like any workflow that is in use. For a new construct, add a workflow and a scenario.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dramatiq_saga import Flow, StepFailedError
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import timers
from dramatiq_saga.errors import ChildFailedError, SignalTimeoutError, StepExpiredError
from tests.support.bench import Bench
from tests.support.deploying import deploy

#: How a history comes about: starts a run with the name of its file as its id, and takes it as far as the history goes.
Scenario = Callable[[Bench, str], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """``function``'s name is that of the file, with dashes."""
    SCENARIOS[function.__name__.replace("_", "-")] = function
    return function


class Refused(ValueError):
    """An error with a code and a cause, for what is kept of errors."""

    code = 402


def declare(bench: Bench) -> None:
    """Actors and workflows, on a bench's broker."""

    def give(value: Any = None) -> Any:
        return value

    def refuse(reason: str) -> None:
        raise Refused(reason) from KeyError("card")

    def undo(what: Any = None) -> None:
        pass

    step = bench.actor(give, actor_name="give")
    failing = bench.actor(refuse, actor_name="refuse", max_retries=0)
    undoing = bench.actor(undo, actor_name="undo")

    def steps(flow: Flow, count: int, label: str = "") -> list[Any]:
        return [flow.run(step, {"number": number, "label": label}) for number in range(count)]

    def caught(flow: Flow) -> Any:
        try:
            flow.run(failing, "no money")
        except StepFailedError as error:
            return flow.run(step, [error.error_type, error.message, error.is_a(ValueError)])
        return None

    def undone(flow: Flow) -> None:
        made = flow.action(step, {"id": 7}).compensate_with(lambda made: undoing.message(made["id"])).run()
        flow.action(step, made).compensate_with(undoing, "second").run()
        flow.action(step, None).compensate_with(undoing).compensate_step_on_self_failure().run()
        flow.run(failing, "no seats")

    def side_effects(flow: Flow) -> list[Any]:
        first = flow.side_effect("dice", lambda: 4)
        second = flow.run(step, first)
        third = flow.side_effect("words", lambda: {"größe": ["groß", None, 1.5, True]})
        return [first, second, third, flow.side_effect("dice", lambda: 6)]

    def tagged(flow: Flow) -> Any:
        flow.tag("stage", "first")
        flow.run(step, 1)
        flow.tag("stage", 2)
        flow.tag("bare")
        return dict(flow.tags)

    def raises(flow: Flow) -> None:
        flow.run(step, 1)
        raise Refused("a rule of the workflow's own")

    def chosen(flow: Flow, way: str) -> Any:
        if flow.side_effect("way", lambda: way) == "long":
            for number in range(3):
                flow.run(step, number)
        return flow.run(step, "there")

    def values(flow: Flow) -> Any:
        started = flow.now()
        flow.run(step, str(flow.uuid4()))
        flow.run(step, flow.random())
        return [started.isoformat(), flow.now() >= started]

    def optional(flow: Flow) -> list[Any]:
        nothing = flow.optional_action(failing, "closed").run()
        other = flow.action(failing, "closed").fallback_value_on_fail({"instead": 1}).run()
        return [nothing, other, flow.optional_action(step, 3).run()]

    def gated(flow: Flow) -> list[Any]:
        done = [flow.run(step, "first")]
        if flow.patched("check-before"):
            done.append(flow.run(step, "checked"))
        done.append(flow.run(step, "second"))
        if flow.patched("check-behind"):
            done.append(flow.run(step, "checked behind"))
        return [*done, flow.patched("check-before")]

    def mended(flow: Flow) -> list[Any]:
        return [flow.run(step, "first"), flow.run(step, "checked"), flow.run(step, "second")]

    def approved(flow: Flow, *names: str) -> list[Any]:
        flow.run(step, "asked")
        return [flow.run(step, flow.await_signal(name, wait_seconds=3600)) for name in names]

    def tells(flow: Flow, other: str) -> Any:
        flow.run(step, "first")
        flow.signal_flow(other, "told", {"by": flow.run_id})
        return flow.await_signal("told")

    def side_by_side(flow: Flow, width: int, policy: str = "fail_fast", bad: int = -1, limit: int = 100) -> list[Any]:
        members = [
            flow.action(failing, f"member {number}") if number == bad
            else flow.action(step, number).compensate_with(undoing, number)
            for number in range(width)
        ]  # fmt: skip
        block = flow.parallel(*members).max_in_flight(limit)
        return (block.fail_fast() if policy == "fail_fast" else block.wait_all_then_fail()).run()

    def nested(flow: Flow) -> list[Any]:
        inner = flow.parallel(flow.action(step, "b"), flow.optional_action(failing, "c"))
        return [flow.parallel(flow.action(step, "a"), inner, flow.parallel()).run(), flow.run(step, "d")]

    def grouped(flow: Flow, last: str) -> list[Any]:
        group = flow.saga(
            flow.action(step, 1).compensate_with(undoing, 1),
            flow.parallel(flow.action(step, 2).compensate_with(undoing, 2), flow.action(step, 3)),
            flow.action(step, 4).compensate_with(lambda made: undoing.message(made)),
        )
        done = group.compensate_in_parallel().on_compensation_failure("continue").run()
        return [done, flow.run(failing if last == "fails" else step, last)]

    def parcel(flow: Flow, order: str, fails: bool = False) -> str:
        flow.action(step, order).compensate_with(undoing, order).run()
        flow.run(failing if fails else step, "no truck")
        return f"parcel of {order}"

    def open_ended(flow: Flow) -> Any:
        return flow.await_signal("end")

    parcels, endless = bench.workflow(parcel), bench.workflow(open_ended)

    def with_child(flow: Flow, then_fails: bool = False) -> list[Any]:
        made = flow.child(parcels, "A").close_policy("cancel").compensate_with(lambda made: undoing.message(made)).run()
        return [made, flow.run(failing if then_fails else step, "after")]

    def with_failing_child(flow: Flow, way: str) -> Any:
        child = flow.child(parcels, "B", fails=True)
        if way == "optional":
            return child.continue_on_failure().run()
        try:
            return child.run()
        except ChildFailedError as error:
            if way == "caught":
                return flow.run(step, str(error.cause["message"] if error.cause else ""))
            raise

    def with_children(flow: Flow) -> Any:
        return flow.parallel(flow.child(parcels, "C"), flow.action(step, 1), flow.child(parcels, "D")).run()

    def with_open_child(flow: Flow) -> Any:
        return flow.child(endless).close_policy("fail").run()

    def repaired(flow: Flow, cap: int | None = None, optional: bool = False) -> Any:
        builder = flow.action(failing, "no money").retry_on_signal("topped-up", max_retries=cap, wait_seconds=3600)
        return builder.fallback_value_on_fail("nothing").run() if optional else builder.run()

    tried: list[int] = []

    def moody() -> int:
        tried.append(1)
        if len(tried) == 1:
            raise Refused("not today")
        return len(tried)

    moods = bench.actor(moody, max_retries=0)

    def patient(flow: Flow) -> Any:
        return [flow.action(moods).retry_on_signal("again").run(), flow.run(step, "after")]

    def impatient(flow: Flow) -> Any:
        try:
            return flow.await_signal("answer", wait_seconds=60)
        except SignalTimeoutError as error:
            return [error.name, flow.run(step, "late"), flow.await_signal("answer")]

    def hurried(flow: Flow) -> Any:
        try:
            flow.action(step, 1).expires_in(10).run()
        except StepExpiredError as error:
            late = error.actor_name
        return [late, flow.optional_action(step, 2).expires_in(10).run(), flow.run(step, 3)]

    def sleeps(flow: Flow) -> Any:
        flow.run(step, "before")
        flow.sleep(3600)
        flow.sleep_until(datetime.fromtimestamp(1_700_010_000, UTC))
        return flow.run(step, "after")

    kinds: list[Callable[..., Any]] = [
        steps,
        caught,
        undone,
        side_effects,
        tagged,
        raises,
        chosen,
        values,
        optional,
        gated,
        mended,
    ]
    kinds += [approved, tells, side_by_side, nested, grouped]
    kinds += [with_child, with_failing_child, with_children, with_open_child, repaired, patient, impatient, sleeps, hurried]
    for function in kinds:
        bench.workflow(function)


# --- how they came about ---------------------------------------------------------------------------------------------


def finish(workflow: str, *args: Any) -> Scenario:
    """From start to end."""

    def run(bench: Bench, run_id: str) -> None:
        bench.start(workflow, *args, run_id=run_id)
        bench.run()

    return run


SCENARIOS |= {
    "steps": finish("steps", 4, "größe"),
    "no-steps": finish("steps", 0),
    "failure-caught": finish("caught"),
    "rollback": finish("undone"),
    "side-effects": finish("side_effects"),
    "tags": finish("tagged"),
    "workflow-error": finish("raises"),
    "recorded-choice": finish("chosen", "long"),
    "recorded-values": finish("values"),
    "optional-steps": finish("optional"),
    "patched-new-way": finish("gated"),
    "parallel": finish("side_by_side", 3),
    "parallel-of-none": finish("side_by_side", 0),
    "parallel-limited": finish("side_by_side", 5, "fail_fast", -1, 2),
    "parallel-failed-fast": finish("side_by_side", 4, "fail_fast", 1, 2),
    "parallel-failed-late": finish("side_by_side", 4, "wait_all_then_fail", 1),
    "blocks-in-blocks": finish("nested"),
    "group": finish("grouped", "ends"),
    "group-undone": finish("grouped", "fails"),
    "child": finish("with_child"),
    "child-undone": finish("with_child", True),
    "child-failed": finish("with_failing_child", "raised"),
    "child-failure-caught": finish("with_failing_child", "caught"),
    "child-optional": finish("with_failing_child", "optional"),
    "children-side-by-side": finish("with_children"),
    "child-under-way": finish("with_open_child"),
    "retry-parked": finish("repaired"),
    "retry-not-allowed": finish("repaired", 0),
    "retry-optional": finish("repaired", 0, True),
}


def later(bench: Bench, seconds: float) -> None:
    """So much time passes."""
    assert isinstance(bench.store.clock, ManualClock)
    bench.store.clock.advance(seconds)


def at_work(bench: Bench) -> None:
    """Everything that has been sent is done, so that a run stands still where it waits."""
    bench.run()


@scenario
def signals_awaited(bench: Bench, run_id: str) -> None:
    """The first comes before its wait, the second to it, and one is left that nobody asks for."""
    bench.start("approved", "manager", "board", run_id=run_id)
    bench.signal(run_id, "manager", {"yes": True, "größe": 3})
    at_work(bench)
    bench.signal(run_id, "other", None)
    bench.signal(run_id, "board", [1, 2])
    at_work(bench)


@scenario
def signal_awaited_still(bench: Bench, run_id: str) -> None:
    """In flight: parked on a signal, with a deadline, and another one kept."""
    bench.start("approved", "manager", run_id=run_id)
    at_work(bench)
    bench.signal(run_id, "board", "early")


@scenario
def signal_wait_cancelled(bench: Bench, run_id: str) -> None:
    """Ended by an operator while it waited."""
    bench.start("approved", "manager", run_id=run_id)
    at_work(bench)
    bench.cancel(run_id)


@scenario
def signal_sent(bench: Bench, run_id: str) -> None:
    """It signals itself, which is another run like any other."""
    bench.start("tells", run_id, run_id=run_id)
    at_work(bench)


@scenario
def retry_answered(bench: Bench, run_id: str) -> None:
    """In flight: parked, signalled, and about to run again in its row."""
    bench.start("repaired", 3, run_id=run_id)
    at_work(bench)
    bench.signal(run_id, "topped-up")
    bench.deliver(bench.take())


@scenario
def retry_completed(bench: Bench, run_id: str) -> None:
    """Parked, signalled, and done at the second go."""
    bench.start("patient", run_id=run_id)
    at_work(bench)
    bench.signal(run_id, "again")
    at_work(bench)


@scenario
def retry_spent(bench: Bench, run_id: str) -> None:
    """Parked and run again until its budget was spent; then the run has failed."""
    bench.start("repaired", 2, run_id=run_id)
    for _ in range(2):
        at_work(bench)
        bench.signal(run_id, "topped-up")
    at_work(bench)


@scenario
def child_cancelled(bench: Bench, run_id: str) -> None:
    """Somebody has cancelled the child, which fails its parent."""
    bench.start("with_open_child", run_id=run_id)
    at_work(bench)
    row = bench.one("SELECT child_id FROM {children} WHERE run_id = ?", run_id)
    assert row is not None
    bench.cancel(row[0])
    at_work(bench)


@scenario
def child_abandoned(bench: Bench, run_id: str) -> None:
    """The parent was cancelled while the child was under way."""
    bench.start("with_open_child", run_id=run_id)
    at_work(bench)
    bench.cancel(run_id)


@scenario
def signal_timed_out(bench: Bench, run_id: str) -> None:
    """Its answer comes when the time is over: the wait has timed out, and the next one has it."""
    bench.start("impatient", run_id=run_id)
    at_work(bench)
    later(bench, 61)
    bench.signal(run_id, "answer", 42)
    at_work(bench)


@scenario
def timer_under_way(bench: Bench, run_id: str) -> None:
    """In flight: asleep."""
    bench.start("sleeps", run_id=run_id)
    at_work(bench)


@scenario
def timers_elapsed(bench: Bench, run_id: str) -> None:
    """It has slept twice, for a while and until a moment."""
    bench.start("sleeps", run_id=run_id)
    for seconds in (3600, 6400):
        at_work(bench)
        later(bench, seconds)
        timers.fire(bench.engine, run_id, bench.sender)
    at_work(bench)


@scenario
def signal_never_came(bench: Bench, run_id: str) -> None:
    """In flight: the first wait has timed out by itself, and the run waits on."""
    bench.start("impatient", run_id=run_id)
    at_work(bench)
    later(bench, 60)
    timers.fire(bench.engine, run_id, bench.sender)
    at_work(bench)


@scenario
def step_expired(bench: Bench, run_id: str) -> None:
    """Its deadline passed before a worker took it, and the function made the best of it; an optional one says nothing."""
    bench.start("hurried", run_id=run_id)
    for _ in range(2):
        bench.deliver(bench.take())
        bench.sender.queue.clear()  # no worker
        later(bench, 10)
        timers.fire(bench.engine, run_id, bench.sender)
    at_work(bench)


def earlier(bench: Bench, name: str, code: Callable[..., Any]) -> Callable[[], None]:
    """Have ``name`` run ``code``, as an earlier release did, until what is returned is called."""
    now = bench.engine.workflows[name].function
    deploy(bench.engine, name, code)
    return lambda: deploy(bench.engine, name, now)


@scenario
def patched_old_way(bench: Bench, run_id: str) -> None:
    """It had passed the first change when that was deployed, and not the second; both answers are recorded."""
    give = bench.broker.actors["give"]
    release = earlier(bench, "gated", lambda flow: [flow.run(give, "first"), flow.run(give, "second")])
    bench.start("gated", run_id=run_id)
    for _ in range(2):
        bench.deliver(bench.take())
    release()
    bench.run()


@scenario
def patched_call_removed(bench: Bench, run_id: str) -> None:
    """It went the new way when the code still asked; now the code does not ask any more."""

    def asking(flow: Flow) -> list[Any]:
        give = bench.broker.actors["give"]
        done = [flow.run(give, "first")]
        if flow.patched("check-before"):
            done.append(flow.run(give, "checked"))
        return [*done, flow.run(give, "second")]

    release = earlier(bench, "mended", asking)
    bench.start("mended", run_id=run_id)
    for _ in range(2):
        bench.deliver(bench.take())
    release()
    bench.run()


@scenario
def parallel_under_way(bench: Bench, run_id: str) -> None:
    """In flight: one member is done, two are scheduled, one is held back."""
    bench.start("side_by_side", 4, "fail_fast", -1, 2, run_id=run_id)
    for _ in range(2):
        bench.deliver(bench.take())


@scenario
def group_under_way(bench: Bench, run_id: str) -> None:
    """In flight: the group's second place is a block, and is at work."""
    bench.start("grouped", "ends", run_id=run_id)
    for _ in range(3):
        bench.deliver(bench.take())


@scenario
def step_pending(bench: Bench, run_id: str) -> None:
    """In flight: the second step has not been claimed."""
    bench.start("steps", 3, run_id=run_id)
    for _ in range(2):
        bench.deliver(bench.take())


@scenario
def step_between_tries(bench: Bench, run_id: str) -> None:
    """In flight: the step has failed and has tries left."""
    bench.start("caught", run_id=run_id)
    bench.deliver(bench.take())
    bench.deliver(bench.take())


@scenario
def not_driven_yet(bench: Bench, run_id: str) -> None:
    """Sent, and no worker has seen it."""
    bench.start("undone", run_id=run_id)


@scenario
def cancelled(bench: Bench, run_id: str) -> None:
    """Ended by an operator before its second step; nothing is undone."""
    bench.start("undone", run_id=run_id)
    for _ in range(2):
        bench.deliver(bench.take())
    bench.cancel(run_id)


@scenario
def compensated(bench: Bench, run_id: str) -> None:
    """Ended by an operator, and undone."""
    bench.start("undone", run_id=run_id)
    for _ in range(3):
        bench.deliver(bench.take())
    bench.compensate(run_id)
    bench.run()


@scenario
def rolling_back(bench: Bench, run_id: str) -> None:
    """Its rollback has been planned and not begun."""
    bench.start("undone", run_id=run_id)
    for _ in range(3):
        bench.deliver(bench.take())
    bench.compensate(run_id)
