"""EVENT-1, EVENT-2: typed events, told after the commit, outside every transaction; a listener cannot do harm."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest

from dramatiq_saga import Flow, events
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def test_every_change_is_told_once_with_its_facts(every_app: Application) -> None:
    """EVENT-1: the events of a failing run, in the order of its history."""
    app = every_app
    step, undo = app.step("step", gives={"id": 7}), app.step("undo")
    refuse = app.step("refuse", raises=ValueError("no"), max_retries=1)

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.side_effect("dice", lambda: 4)
        flow.run(refuse)

    with events.listening(events.Event) as heard:
        handle = app.run(order)
        app.drain()
    told = [type(event).__name__ for event in heard]
    assert sorted(told) == sorted([
        "FlowStarted",
        "ActionStarted", "ActionCompleted",
        "SideEffectRecorded",
        "ActionStarted", "ActionFailed", "ActionStarted", "ActionFailed", "ActionFailed",
        "CompensationStarted", "CompensationStepStarted", "CompensationCompleted", "RollbackFinished",
        "FlowFailed",
    ])  # fmt: skip
    assert all((event.run_id, event.workflow_name) == (handle.id, "order") for event in heard)
    of: dict[str, list[Any]] = {}
    for event in heard:
        of.setdefault(type(event).__name__, []).append(event)
    assert of["ActionCompleted"][0].action.result == {"id": 7}
    assert of["SideEffectRecorded"][0].value == 4
    assert [event.action.given_up for event in of["ActionFailed"]][-1] is True
    assert of["CompensationStarted"][0].steps == (1,)
    assert of["CompensationStarted"][0].ends_as == "failed"
    assert of["RollbackFinished"][0].undone == (1,)
    assert of["RollbackFinished"][0].rollback == "done"
    assert of["FlowFailed"][0].error["cause"]["message"] == "no"
    assert [event.action.attempts for event in of["ActionStarted"]] == [1, 1, 2]
    assert of["CompensationStepStarted"][0].compensation.status in ("running", "completed")


def test_the_end_of_a_run_is_told_with_its_result_or_reason(app: Application) -> None:
    """EVENT-1: FlowCompleted carries the result, FlowCancelled the operator's words."""

    @app.workflow
    def quick(flow: Flow) -> list[int]:
        return [1]

    with events.listening(events.FlowCompleted, events.FlowCancelled) as heard:
        cancelled = quick.send_with_options(delay=60_000)
        cancelled.cancel("not today")
        completed = app.run(quick)
        eventually(lambda: len(heard) == 2)
    assert isinstance(heard[0], events.FlowCancelled)
    assert (heard[0].run_id, heard[0].reason) == (cancelled.id, "not today")
    assert isinstance(heard[1], events.FlowCompleted)
    assert (heard[1].run_id, heard[1].result) == (completed.id, [1])


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1), KeyError()], ids=["ValueError", "SystemExit", "KeyError"])
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_listener_that_raises_fails_neither_step_nor_run(kind: str, error: BaseException, applications: Applications) -> None:
    """EVENT-2: whatever it raises, at every event there is."""
    app = applications(kind)
    step, undo = app.step("step"), app.step("undo")
    refuse = app.step("refuse", raises=ValueError("the real cause"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.side_effect("dice", lambda: 4)
        flow.run(refuse)

    def broken(event: Any) -> None:
        app.calls.append(type(event).__name__)
        raise error

    events.subscribe(broken, events.Event)
    try:
        handle = app.run(order)
        app.drain()
    finally:
        events.unsubscribe(broken)
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert app.calls.count(("step",)) == app.calls.count(("undo",)) == 1
    failed = app.sql("SELECT error FROM {flow_runs}")[0][0]
    assert "the real cause" in failed
    assert "FlowFailed" in app.calls


def test_a_listener_sees_what_is_committed_and_is_in_no_transaction(app: Application) -> None:
    """EVENT-2: outside every transaction of the engine, after the commit."""
    step = app.step("step", gives=3)
    seen: list[Any] = []

    @app.workflow
    def one(flow: Flow) -> int:
        return flow.run(step)

    def looks(event: Any) -> None:
        rows = app.sql("SELECT status FROM {action_runs} WHERE run_id = ?", event.run_id)
        seen.append((type(event).__name__, app.store.joined(), rows))

    events.subscribe(looks, events.ActionCompleted, events.ActionStarted)
    try:
        app.run(one)
        app.drain()
    finally:
        events.unsubscribe(looks)
    assert ("ActionCompleted", False, [("completed",)]) in seen
    assert [entry[:2] for entry in seen if entry[0] == "ActionStarted"] == [("ActionStarted", False)]


@pytest.mark.parametrize("event", [events.FlowStarted, events.ActionCompleted, events.SideEffectRecorded, events.FlowCompleted])
@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_listener_may_send_messages_and_start_runs(kind: str, event: type[events.Event], applications: Applications) -> None:
    """EVENT-2: it is not the workflow function, even where that is being walked at the moment."""
    app = applications(kind)
    told, step = app.step("told"), app.step("step")

    @app.workflow
    def other(flow: Flow) -> None: ...

    @app.workflow
    def one(flow: Flow) -> int:
        flow.run(step)
        return flow.side_effect("dice", lambda: 4)

    def sends(happened: Any) -> None:
        if happened.workflow_name == "one":
            told.send(type(happened).__name__)
            other.send()

    events.subscribe(sends, event)
    try:
        handle = app.run(one)
        app.drain()
    finally:
        events.unsubscribe(sends)
    assert handle.result() == 4
    eventually(lambda: ("told", event.__name__) in app.calls)
    others = "SELECT COUNT(*) FROM {flow_runs} WHERE workflow = 'other' AND status = 'completed'"
    eventually(lambda: app.sql(others) == [(1,)])


def test_history_and_events_carry_no_payload_when_that_is_off(applications: Applications) -> None:
    """SAFE-2: neither arguments nor results nor error texts of a step reach the history."""
    from dramatiq_saga import Settings

    off = Settings.from_mapping({"history": {"store_payloads": False, "store_exceptions": False}})
    app = applications("sqlite", settings=off)
    step = app.step("step", gives="secret-result")
    refuse = app.step("refuse", raises=ValueError("secret-error"))

    @app.workflow
    def one(flow: Flow, word: str) -> None:
        flow.run(step, word)
        flow.side_effect("dice", lambda: "secret-dice")
        flow.run(refuse)

    handle = app.run(one, "secret-argument")
    details = " ".join(event.detail or "" for event in handle.events())
    assert "secret" not in details
    assert "ValueError" in details


def test_previews_are_cut(applications: Applications) -> None:
    """SAFE-2: at history.max_payload_preview_length."""
    from dramatiq_saga import Settings

    app = applications("sqlite", settings=Settings.from_mapping({"history": {"max_payload_preview_length": 20}}))
    step = app.step("step", gives="y" * 1000)

    @app.workflow
    def one(flow: Flow, word: str) -> str:
        return flow.run(step, word)

    handle = app.run(one, "x" * 1000)
    assert max(len(event.detail or "") for event in handle.events()) <= 20


@pytest.mark.parametrize(
    "text",
    ["nul \x00 inside", "half a pair \ud800", "line\nbreak \x1b[31m", "\u202eright to left", "é 漢 🎉", "x" * 20_000],
    ids=["nul", "half a pair", "control", "direction", "unicode", "long"],
)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_any_text_of_an_error_is_recorded(kind: str, text: str, applications: Applications) -> None:
    """CODEC-4, SAFE-2: what an exception says never keeps its failure from being written, on any database."""
    app = applications(kind)
    bad = app.step("bad", raises=ValueError(text), max_retries=1)
    undo = app.step("undo", raises=KeyError(text))
    step = app.step("step")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(bad)

    handle = app.run(one)
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "halted")
    action = handle.actions()[1]
    assert action.tries == 2
    assert action.error is not None
    assert action.error["type"] == "builtins.ValueError"
    if len(text) < 100 and "\ud800" not in text:
        assert action.error["message"] == text
    assert app.types(handle).count("action.failed") == 2


@pytest.mark.parametrize("text", ["nul \x00 inside", "half a pair \ud800", "é 漢 🎉"], ids=["nul", "half a pair", "unicode"])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_any_reason_of_an_operator_is_recorded(kind: str, text: str, applications: Applications) -> None:
    """SAFE-2: a reason that was pasted from somewhere does not keep a run from being cancelled."""
    app = applications(kind)

    @app.workflow
    def one(flow: Flow) -> None: ...

    handle = one.send_with_options(delay=60_000)
    assert handle.cancel(text) is True
    assert handle.status == "cancelled"
    assert handle.events()[-1].type == "flow.cancelled"


def test_dramatiq_is_used_by_nothing_else_meanwhile() -> None:
    """The fixtures leave no global broker of an earlier test behind."""
    assert dramatiq.broker.global_broker is None
