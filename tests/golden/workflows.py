"""The workflows that the golden histories were recorded of, and how each came about.

A file that is there is never changed: it stands for a run that somebody has in flight. So a workflow here may be given new code
only as far as its files still fit, like any workflow that is in use. For a new construct, add a workflow and a scenario.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dramatiq_saga import Flow, StepFailedError
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
}


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
