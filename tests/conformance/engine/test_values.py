"""CODEC-1, CODEC-2, CODEC-4 through real workers: what goes in, what comes back, and what is refused where it enters."""

from __future__ import annotations

import io
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.encoder import JSONEncoder, PickleEncoder
from hypothesis import given, settings
from hypothesis import strategies as st

from dramatiq_saga import Flow, FlowFailedError, NotSerializableError, StepFailedError, current_step
from tests.support.application import Application, Applications


def self_referencing() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def deep(levels: int = 2_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Point:
    def __init__(self) -> None:
        self.x = 1


#: name -> (what makes the value, a part of the path that the error names, a part of why)
UNSTORABLE: dict[str, tuple[Any, str, str]] = {
    "an open file": (lambda: {"rows": [1, io.TextIOWrapper(io.BytesIO())]}, "['rows'][1]", "TextIOWrapper"),
    "a lambda": (lambda: [lambda: 1], "[0]", "function"),
    "a lock": (lambda: threading.Lock(), "", "lock"),
    "an object": (lambda: {"at": Point()}, "['at']", "Point"),
    "itself": (self_referencing, "[1]['again']", "contains itself"),
    "2,000 levels": (deep, "", "nested"),
    "NaN": (lambda: {"a": [{"b": math.nan}]}, "['a'][0]['b']", "nan is not JSON"),
    "infinity": (lambda: [1.0, math.inf], "[1]", "inf is not JSON"),
    "minus infinity": (lambda: -math.inf, "", "-inf is not JSON"),
    "a tuple as key": (lambda: {(1, 2): 3}, "", "key"),
}


@pytest.mark.parametrize("what", UNSTORABLE)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_a_result_that_cannot_be_stored_fails_its_step_finally_and_undoes_it(
    kind: str, what: str, applications: Applications
) -> None:
    """C46, C47, CODEC-2: not tried again; succeeded work with an unstorable result: its own compensation runs, as completed."""
    app = applications(kind)
    make, path, why = UNSTORABLE[what]
    first = app.step("first")

    @app.actor
    def undo(word: str) -> None:
        step = current_step()
        assert step is not None
        assert step.undoes is not None
        app.calls.append((word, step.undoes.outcome))

    @app.actor(max_retries=20)
    def works() -> Any:
        app.calls.append("worked")
        return make()

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(first).compensate_with(undo, "first").run()
        flow.action(works).compensate_with(undo, "works").run()

    handle = app.run(two)
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "done")
    step = handle.actions()[1]
    assert (step.status, step.given_up, step.tries) == ("failed", True, 1)
    assert step.error is not None
    assert step.error["type"].endswith("ResultNotSerializableError")
    assert f"the result of works{path}" in step.error["message"]
    assert why in step.error["message"]
    assert app.calls == [("first",), "worked", ("works", "completed"), ("first", "completed")]
    assert app.messages() == 0


@pytest.mark.parametrize("what", UNSTORABLE)
def test_a_return_value_that_cannot_be_stored_fails_the_run(applications: Applications, what: str) -> None:
    """C47, DRIVE-5: after its rollback, with that cause."""
    app = applications("sqlite")
    make, path, why = UNSTORABLE[what]
    step, undo = app.step("step"), app.step("undo")

    @app.workflow
    def one(flow: Flow) -> Any:
        flow.action(step).compensate_with(undo).run()
        return make()

    handle = app.run(one)
    assert handle.rollback == "done"
    with pytest.raises(FlowFailedError, match="return value") as caught:
        handle.result()
    assert caught.value.cause is not None
    assert path in caught.value.cause["message"]
    assert why in caught.value.cause["message"]


@pytest.mark.parametrize("what", UNSTORABLE)
def test_arguments_that_cannot_be_stored_are_refused_to_their_caller(applications: Applications, what: str) -> None:
    """C47, CODEC-2: send, an action, a compensation, a side effect: NotSerializableError there, and nothing half written."""
    app = applications("sqlite")
    make, path, why = UNSTORABLE[what]
    step = app.step("step")

    @app.workflow
    def one(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        told: list[str] = []
        for attempt in (
            lambda: flow.run(step, "fine", make()),
            lambda: flow.action(step).compensate_with(step, make()).run(),
            lambda: flow.side_effect("dice", make),
        ):
            try:
                attempt()
            except NotSerializableError as error:
                told.append(error.path)
        return told

    with pytest.raises(NotSerializableError, match=r"args\[1\]") as caught:
        one.send("fine", make())
    assert path in caught.value.path
    assert why in str(caught.value)
    with pytest.raises(NotSerializableError, match=r"kwargs\['late'\]"):
        one.run_sync(late=make())
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(0,)]
    assert app.messages() == 0
    told = app.run(one).result()
    assert len(told) == 3
    assert told[2].startswith("side effect 'dice'")
    assert all(path in where for where in told)
    assert app.calls == []


def test_a_body_that_changes_its_arguments_gets_them_as_they_were(app: Application) -> None:
    """C22, CODEC-4: not in the next try, not in the recorded input, not in anybody's hooks."""
    import uuid

    @app.actor(max_retries=2)
    def changes(order: dict[str, Any], items: list[int]) -> str:
        app.calls.append((dict(order), list(items)))
        order["id"] = uuid.uuid4()
        order.pop("keep", None)
        items.append(99)
        if len(app.calls) < 3:
            raise ValueError
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        order, items = {"id": "text", "keep": True}, [1, 2]
        value = flow.run(changes, order, items=items)
        order.clear()
        return value

    handle = app.run(one)
    assert handle.result() == "done"
    assert app.calls == [({"id": "text", "keep": True}, [1, 2])] * 3
    step = handle.actions()[0]
    assert (step.args, step.kwargs) == ([{"id": "text", "keep": True}], {"items": [1, 2]})


def test_a_workflow_that_changes_a_result_changes_nothing_recorded(app: Application) -> None:
    """C22, CODEC-4: another step, a later drive and a cache see it as it was recorded."""
    makes = app.actor(lambda: {"rows": [1]}, actor_name="makes")
    takes = app.actor(lambda rows: app.calls.append(rows) or {"seen": rows}, actor_name="takes")

    @app.workflow
    def one(flow: Flow) -> Any:
        made = flow.run(makes)
        before = [list(made["rows"])]
        made["rows"].append(2)
        made["more"] = True
        dice = flow.side_effect("dice", lambda: [6])
        before.append(list(dice))
        dice.append(7)
        taken = flow.run(takes, made["rows"])
        taken["seen"].append(3)
        flow.run(takes, taken["seen"])
        return before

    handle = app.run(one)
    assert handle.result() == [[1], [6]]
    assert app.calls == [[1, 2], [1, 2, 3]]
    assert [action.result for action in handle.actions()] == [{"rows": [1]}, {"seen": [1, 2]}, {"seen": [1, 2, 3]}]


def test_arguments_of_a_run_are_its_own(app: Application) -> None:
    """CODEC-4: a function that changes them finds them as they were at its next drive."""
    step = app.step("step")

    @app.workflow
    def one(flow: Flow, order: dict[str, Any]) -> Any:
        seen = dict(order)
        order["changed"] = True
        flow.run(step)
        return seen

    given: dict[str, Any] = {"id": 1}
    handle = one.send(given)
    given["id"] = 2
    app.start()
    app.ended(handle)
    assert handle.result() == {"id": 1}


def test_a_workflow_takes_the_same_path_live_and_after_a_restart(app: Application) -> None:
    """C50: tuples and integer keys are lists and text from the first moment on, inline and queued."""
    shapes = app.actor(lambda: ((1, 2), {1: "one"}), actor_name="shapes")
    step = app.step("step")

    @app.workflow
    def branches(flow: Flow) -> Any:
        pair, numbers = flow.run(shapes)
        path = [isinstance(pair, tuple), 1 in numbers, "1" in numbers]
        flow.run(step)
        return path

    inline = branches.run_sync()
    handle = branches.send()
    for _ in range(6):  # a new worker, and an empty cache, for every step
        app.start()
        app.drain()
        app.stop()
        app.engine.cache.drop(handle.id)
    assert app.ended(handle) == "completed"
    assert handle.result() == inline.result() == [False, False, True]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", ["sqlite"])
def test_whatever_a_step_returns_is_seen_alike_by_its_first_drive_and_by_every_replay(
    kind: str, applications: Applications
) -> None:
    """C50, CODEC-1: a property: argument, result, side effect and return value of any shape, live and decoded afresh."""
    app = applications(kind)
    echo = app.actor(lambda value: value, actor_name="echo")
    seen: list[Any] = []

    @app.workflow
    def one(flow: Flow, value: Any) -> Any:
        result = flow.run(echo, value)
        effect = flow.side_effect("same", lambda: value)
        seen.append([value, result, effect])
        flow.run(echo, 1)
        return [result, effect]

    @given(json_values)
    @settings(max_examples=40, deadline=None)
    def check(value: Any) -> None:
        seen.clear()
        expected = JSONEncoder().decode(JSONEncoder().encode(value))  # type: ignore[arg-type]
        handle = one.run_sync(value)
        app.engine.cache.drop(handle.id)
        assert all(found == [expected] * 3 for found in seen)
        assert len(seen) >= 2
        assert handle.result() == [expected, expected]
        assert handle.actions()[0].args == [expected]

    check()


# --- other encoders ----------------------------------------------------------------------------------------------------


def test_an_encoder_that_carries_more_types_is_used_everywhere(app: Application) -> None:
    """CODEC-1: Dramatiq's own encoder, whichever is set; the stock PickleEncoder keeps tuples, sets and classes."""
    dramatiq.set_encoder(PickleEncoder())
    step = app.actor(lambda value: {"got": value, "set": {1, 2}}, actor_name="step")
    undo = app.actor(lambda value: app.calls.append(value), actor_name="undo")
    refuse = app.step("refuse", raises=ValueError("so that it is undone"))

    @app.workflow
    def one(flow: Flow, value: Any) -> Any:
        result = flow.action(step, value).compensate_with(lambda r: undo.message(r["got"])).run()
        result["set"].add(3)
        dice = flow.side_effect("dice", lambda: (1, frozenset({2})))
        try:
            flow.run(refuse)
        except StepFailedError:
            return [value, flow.run(step, dice)]
        return None

    assert app.run(one, (1, {2})).result() == [(1, {2}), {"got": (1, frozenset({2})), "set": {1, 2}}]

    @app.workflow
    def two(flow: Flow, value: Any) -> None:
        flow.action(step, value).compensate_with(lambda r: undo.message(r["got"])).run()
        flow.run(refuse)

    assert app.run(two, ("t", 1)).rollback == "done"
    assert app.calls[-1] == ("t", 1)


def test_what_another_encoder_cannot_carry_is_refused_where_it_enters(applications: Applications) -> None:
    """CODEC-2: with any encoder; the step fails finally, the run is not stuck."""
    app = applications("sqlite")
    dramatiq.set_encoder(PickleEncoder())

    @app.workflow
    def one(flow: Flow, value: Any) -> None: ...

    with pytest.raises(NotSerializableError, match=r"args\[0\]"):
        one.send(lambda: 1)
    locks = app.actor(lambda: threading.Lock(), actor_name="locks", max_retries=5)

    @app.workflow
    def two(flow: Flow) -> None:
        flow.run(locks)

    handle = app.run(two)
    step = handle.actions()[0]
    assert step.error is not None
    assert step.error["type"].endswith("ResultNotSerializableError")
    assert step.tries == 1


class Exploding:
    """Would do harm to whoever unpickles it."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/dramatiq-saga-must-not-exist"),))


def test_nothing_is_unpickled_unless_the_host_has_chosen_that(applications: Applications) -> None:
    """SAFE-1: a row that holds a pickle is text that cannot be read; the run is held."""
    from tests.conformance.engine.test_history import hold_error
    from tests.support.waiting import eventually

    app = applications("sqlite")
    first, second = app.step("first", gives=1), app.step("second", queue_name=app.queue + "x")

    @app.workflow
    def two(flow: Flow) -> None:
        flow.run(first)
        flow.run(second)

    handle = two.send()
    app.start(queues={app.queue})
    eventually(lambda: len(handle.actions()) == 2)
    app.stop()
    app.execute("UPDATE {action_runs} SET result = ? WHERE sequence = 1", pickle.dumps(Exploding()))
    app.engine.cache.drop(handle.id)
    app.start()
    hold_error(app, handle)
    assert not Path("/tmp/dramatiq-saga-must-not-exist").exists()


@pytest.mark.parametrize(
    "text", ["'; DROP TABLE saga_flow_runs; --", '"); --', "%s %d ? {flow_runs} {{x}}", "é 漢 🎉 \x00 \x1b[2J", "\\'"]
)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_values_are_parameters_whatever_they_say(kind: str, text: str, applications: Applications) -> None:
    """SAFE-2: in arguments, results, errors, run ids, tags, reasons."""
    app = applications(kind)
    echo = app.actor(lambda value: value, actor_name="echo")
    fails = app.actor(lambda value: (_ for _ in ()).throw(ValueError(value)), actor_name="fails")
    name = text.replace("\x00", "").strip()

    @app.workflow
    def one(flow: Flow, value: str) -> Any:
        flow.tag("t", name)
        try:
            flow.run(fails, value)
        except StepFailedError as error:
            return [flow.run(echo, value), error.message, flow.side_effect(name[:100], lambda: value)]
        return None

    handle = one.send_with_options(args=(text,), run_id=name, tags={name: name})
    app.start()
    app.ended(handle)
    assert handle.result() == [text, text, text]
    assert handle.tags == {"t": name, name: name}
    assert one.send_with_options(args=(text,), run_id=name) == handle
    other = one.send_with_options(args=(text,), delay=60_000)
    assert other.cancel(text) is True
