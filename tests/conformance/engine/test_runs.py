"""Runs that go well, and how they look from outside: the same in every setting."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dramatiq_saga import (
    Flow,
    FlowFailedError,
    FlowNotFoundError,
    ResultMissing,
    ResultTimeout,
    RunConflictError,
    StepFailedError,
    current_step,
    get_flow,
    query,
)
from tests.support.application import Application


def test_a_run_goes_through_its_steps_in_order_and_keeps_their_results(every_app: Application) -> None:
    """DRIVE-4, CODEC-1: each step once, in order, its result handed on; nothing is left in the broker."""
    app = every_app

    @app.actor
    def add(a: int, b: int) -> int:
        app.calls.append((a, b))
        return a + b

    @app.workflow
    def count(flow: Flow, start: int, *, times: int) -> dict[str, int]:
        total = start
        for _ in range(times):
            total = flow.run(add, total, 1)
        return {"total": total}

    handle = app.run(count, 10, times=4)
    app.drain()
    assert handle.result() == {"total": 14}
    assert app.calls == [(10, 1), (11, 1), (12, 1), (13, 1)]
    assert [(a.sequence, a.actor, a.status, a.result, a.attempts) for a in handle.actions()] == [
        (n, "add", "completed", 10 + n, 1) for n in (1, 2, 3, 4)
    ]
    assert handle.status == "completed"
    assert handle.rollback == "none"
    assert app.messages() == 0


@pytest.mark.both_ways
def test_a_failed_run_undoes_its_completed_steps_in_reverse_and_keeps_the_cause(every_app: Application) -> None:
    """COMP-1, COMP-6, DRIVE-5: reverse order, compensations given or built from the result, the original error on the run."""
    app = every_app
    undo = app.step("undo")

    @app.actor
    def reserve(what: str) -> dict[str, str]:
        app.calls.append(("reserve", what))
        return {"id": f"r-{what}"}

    refuse = app.step("refuse", raises=ValueError("no such address"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(reserve, "a").compensate_with(undo, "a").run()
        flow.action(reserve, "b").compensate_with(lambda made: undo.message(made["id"])).run()
        flow.run(reserve, "c")
        flow.run(refuse)

    handle = app.run(order)
    app.drain()
    assert handle.status == "failed"
    assert handle.rollback == "done"
    assert app.calls == [
        ("reserve", "a"), ("reserve", "b"), ("reserve", "c"), ("refuse",), ("undo", "r-b"), ("undo", "a"),
    ]  # fmt: skip
    assert [(c.sequence, c.status, c.undoes, c.level) for c in handle.compensations()] == [
        (2, "completed", "completed", 0),
        (1, "completed", "completed", 1),
    ]
    with pytest.raises(FlowFailedError, match="no such address") as caught:
        handle.result()
    assert caught.value.cause is not None
    assert caught.value.cause["cause"]["type"] == "builtins.ValueError"
    assert app.messages() == 0


@pytest.mark.both_ways
def test_a_workflow_may_catch_a_failed_step_and_go_on(app: Application) -> None:
    """DRIVE-5, CODEC-4: the error is a FlowError with the original's names; a run that goes on is not undone."""
    refuse = app.step("refuse", raises=KeyError("k"))
    other = app.step("other", gives="other way")
    undo = app.step("undo")

    @app.workflow
    def careful(flow: Flow) -> list[object]:
        flow.action(other).compensate_with(undo).run()
        try:
            flow.run(refuse)
        except StepFailedError as error:
            return [error.actor_name, error.sequence, error.is_a(LookupError), error.is_a("KeyError"), flow.run(other)]
        return []

    assert app.run(careful).result() == ["refuse", 2, True, True, "other way"]
    assert ("undo",) not in app.calls


def test_a_workflow_without_steps_completes_with_its_first_drive(app: Application) -> None:
    """DRIVE-1: a decision may end the run at once."""

    @app.workflow
    def nothing(flow: Flow, value: int) -> int:
        return value * 2

    handle = app.run(nothing, 21)
    assert handle.result() == 42
    assert app.types(handle) == ["flow.started", "flow.completed"]


def test_the_history_tells_every_change_once(every_app: Application) -> None:
    """EVENT-1: one line per change, in order."""
    app = every_app
    a, undo = app.step("a"), app.step("undo")
    refuse = app.step("refuse", raises=RuntimeError("no"))

    @app.workflow
    def told(flow: Flow) -> None:
        flow.action(a).compensate_with(undo).run()
        flow.side_effect("dice", lambda: 4)
        flow.run(refuse)

    handle = app.run(told)
    app.drain()
    assert app.types(handle) == [
        "flow.started",
        "action.started", "action.completed",
        "side_effect.recorded",
        "action.started", "action.failed", "action.given_up",
        "compensation.started",
        "compensation.step_started", "compensation.completed",
        "rollback.finished",
        "flow.failed",
    ]  # fmt: skip
    events = handle.events()
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert events[-2].detail == "done; undone: 1"


def test_a_step_knows_itself(app: Application) -> None:
    """FENCE-4, API current_step(): ids, attempt and key inside a step; nothing outside of one."""

    @app.actor
    def who() -> list[object]:
        step = current_step()
        assert step is not None
        return [step.run_id, step.sequence, step.attempt, step.idempotency_key, step.workflow_name, step.undoes, step.cancelled]

    @app.workflow
    def asks(flow: Flow) -> list[object]:
        assert current_step() is None
        return flow.run(who)

    handle = app.run(asks)
    assert handle.result() == [handle.id, 1, 1, f"{handle.id}:1:0", "asks", None, False]
    assert current_step() is None


def test_a_compensation_knows_what_it_undoes(app: Application) -> None:
    """COMP-7, FENCE-4: sequence, actor, outcome and the key of the attempt that is undone; a key of its own."""

    @app.actor
    def undo() -> None:
        step = current_step()
        assert step is not None
        undoes = step.undoes
        assert undoes is not None
        app.calls.append((undoes.sequence, undoes.actor, undoes.outcome, undoes.idempotency_key, step.idempotency_key))

    first = app.step("first")
    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(first)
        flow.action(first).compensate_with(undo).run()
        flow.run(refuse)

    handle = app.run(order)
    assert app.calls[-1] == (2, "first", "completed", f"{handle.id}:2:0", f"{handle.id}:2:undo")


def test_a_result_that_is_not_there_yet_is_missing_and_times_out(app: Application) -> None:
    """API FlowHandle.result(): nobody works, so there is nothing; both errors are Dramatiq's kind as well."""
    import dramatiq.results.errors as of_dramatiq

    @app.workflow
    def never(flow: Flow) -> None: ...

    handle = never.send()
    with pytest.raises(ResultMissing) as missing:
        handle.result()
    with pytest.raises(ResultTimeout) as timeout:
        handle.result(wait=timedelta(milliseconds=20))
    assert isinstance(missing.value, of_dramatiq.ResultMissing)
    assert isinstance(timeout.value, of_dramatiq.ResultTimeout)
    assert handle.status == "pending"


def test_a_run_id_that_is_taken_starts_nothing(every_app: Application) -> None:
    """API send_with_options(run_id=…): same call, same run; another workflow or other arguments are a conflict."""
    app = every_app
    a = app.step("a")

    @app.workflow
    def one(flow: Flow, n: int, *, mapping: dict[str, int]) -> None:
        flow.run(a, n)

    @app.workflow
    def two(flow: Flow, n: int, *, mapping: dict[str, int]) -> None:
        flow.run(a, n)

    first = one.send_with_options(args=(1,), kwargs={"mapping": {"x": 1, "y": 2}}, run_id=f"order {app.queue}")
    again = one.send_with_options(args=(1,), kwargs={"mapping": {"y": 2, "x": 1}}, run_id=first.id)
    assert again == first
    with pytest.raises(RunConflictError, match="other arguments"):
        one.send_with_options(args=(2,), kwargs={"mapping": {"x": 1, "y": 2}}, run_id=first.id)
    with pytest.raises(RunConflictError, match="run of one, not of two"):
        two.send_with_options(args=(1,), kwargs={"mapping": {"x": 1, "y": 2}}, run_id=first.id)
    assert app.messages() == 1
    app.start()
    app.ended(first)
    app.drain()
    assert app.calls == [("a", 1)]
    assert one.send_with_options(args=(1,), kwargs={"mapping": {"x": 1, "y": 2}}, run_id=first.id).status == "completed"
    assert app.types(first).count("flow.started") == 1


def test_tags_keep_one_value_per_key_and_find_their_runs(every_app: Application) -> None:
    """TAG-1: from the declaration, from send, from the function, from a handle; the last write wins, integers are text."""
    app = every_app
    a = app.step("a")

    @app.workflow(tags={"kind": "order", "shop": "north"})
    def tagged(flow: Flow) -> dict[str, str | None]:
        flow.tag("stage", "begun")
        flow.run(a)
        flow.tag("stage", 2)
        return dict(flow.tags)

    handle = tagged.send_with_options(tags={"shop": "south", "customer": 7, "flag": None})
    handle.tag("late", "x")
    other = tagged.send()
    app.start()
    app.ended(handle)
    app.ended(other)
    expected = {"kind": "order", "shop": "south", "customer": "7", "flag": None, "late": "x", "stage": "2"}
    assert handle.tags == expected
    assert handle.result() == expected
    assert [found.id for found in query(tags={"customer": 7})] == [handle.id]
    assert [found.id for found in query(tags={"flag": None})] == [handle.id]
    assert {found.id for found in query(tags={"kind": "order"})} == {handle.id, other.id}
    assert query(workflow=tagged, tags={"kind": "order", "shop": "north"}).first() == other
    assert query(workflow="tagged").where(tags={"late": "x"}).count() == 1
    handle.tag("late")
    assert handle.tags["late"] is None


def test_a_query_narrows_orders_and_counts(app: Application) -> None:
    """API query(): by workflow, status, time; newest first unless told otherwise; limit and paging lose nothing."""
    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def good(flow: Flow) -> None: ...

    @app.workflow
    def bad(flow: Flow) -> None:
        flow.run(refuse)

    handles = [good.send() for _ in range(5)]
    failed = bad.send()
    app.start()
    for handle in [*handles, failed]:
        app.ended(handle)
    made = dict(app.sql("SELECT id, created_at FROM {flow_runs}"))
    oldest = sorted((handle.id for handle in handles), key=lambda run_id: (made[run_id], run_id))
    assert [found.id for found in query(workflow=good, order="oldest")] == oldest
    assert [found.id for found in query(workflow=good)] == oldest[::-1]
    assert [found.id for found in query(workflow=good, limit=2)] == oldest[:2:-1]
    assert query(workflow=good, limit=2).count() == 5
    assert [found.id for found in query(status="failed")] == [failed.id]
    assert query(status=["failed", "completed"]).count() == 6
    assert query(before=datetime(2020, 1, 1, tzinfo=UTC)).first() is None
    assert query(after=datetime(2020, 1, 1, tzinfo=UTC)).count() == 6
    assert query(workflow="nobody").first() is None


def test_a_handle_is_found_again_by_its_id(app: Application) -> None:
    """API get_flow(): a handle on the run, or FlowNotFoundError."""

    @app.workflow
    def found(flow: Flow) -> int:
        return 1

    handle = app.run(found)
    again = get_flow(handle.id)
    assert again == handle
    assert again.workflow_name == "found"
    assert again.result() == 1
    with pytest.raises(FlowNotFoundError, match="no run has the id 'nowhere'"):
        get_flow("nowhere")


def test_a_delayed_run_waits_for_its_delay(app: Application) -> None:
    """API send_with_options(delay=…): the first drive's message is a delayed one."""

    @app.workflow
    def later(flow: Flow) -> None: ...

    handle = later.send_with_options(delay=timedelta(days=30))
    soon = later.send_with_options(delay=30)
    app.start()
    app.ended(soon)
    assert handle.status == "pending"
    assert handle.cancel() is True
    assert handle.status == "cancelled"


def test_a_step_on_another_queue_runs_there(app: Application) -> None:
    """API with_options(queue_name=…), DRIVE-6: the worker of that queue runs it; the run goes on from there."""
    here, there = app.step("here"), app.step("there", queue_name=app.queue + "b")

    @app.workflow
    def travels(flow: Flow) -> None:
        flow.run(here)
        flow.run(there)
        flow.action(here).with_options(queue_name=app.queue + "c").run()
        flow.run(here)

    app.broker.declare_queue(app.queue + "c")
    handle = travels.send()
    app.start(queues={app.queue})
    app.start(queues={app.queue + "b", app.queue + "c"})
    assert app.ended(handle) == "completed"
    assert [action.queue for action in handle.actions()] == [app.queue, app.queue + "b", app.queue + "c", app.queue]
    assert [call[0] for call in app.calls] == ["here", "there", "here", "here"]
