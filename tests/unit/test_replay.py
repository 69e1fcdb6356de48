"""Replay by itself: a function, a history, a decision; no database, no broker (idea 3, DRIVE-1, HISTORY-1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga import Flow, Settings, StepFailedError
from dramatiq_saga.codec import describe_error, encode, freeze, load_error
from dramatiq_saga.engine.replay import HoldRun, NeedsRecording, Replay, current_replay, replay, with_outcome
from dramatiq_saga.engine.retry_on_signal import Stored
from dramatiq_saga.engine.rows import BlockEntry, Decision, Entry, Extra, SideEffectEntry, Snapshot, StepEntry
from dramatiq_saga.errors import BuilderNotRunError, HistoryMismatchError

NAMES = ("a", "b", "c", "undo")


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    broker = StubBroker()
    yield {name: dramatiq.actor(lambda *args: None, broker=broker, actor_name=name) for name in NAMES}
    broker.close()


def recorded(value: Any) -> Callable[[], Any]:
    return freeze(encode(value, "value"))


def run_of(entries: list[Entry], **columns: Any) -> Snapshot:
    known = Snapshot(
        "r", "w", "v1", "default", None, None, "running", "none", 3, 5, 4, recorded([[], {}]), None, 0, entries, {"tag": "old"}
    )
    return changed(known, **columns)


def done(sequence: int, actor: str, value: Any = None, **facts: Any) -> StepEntry:
    return StepEntry(sequence, actor, "completed", attempts=1, value=recorded(value), **facts)


def walk(function: Callable[[Flow], Any], entries: list[Entry], *, record: Any = None, **columns: Any) -> Decision:
    context = Replay(run_of(entries, **columns), now=1_000, settings=Settings(), record=record)
    return replay(function, context, Flow)


def test_a_function_on_new_ground_is_suspended_with_the_step_that_it_wants(actors: dict[str, Any]) -> None:
    """DRIVE-1: the decision says what to create; nothing is created."""
    decision = walk(lambda flow: flow.run(actors["b"], 1), [])
    assert decision.kind == "suspended"
    (step,) = decision.steps
    assert (step.sequence, step.actor, step.queue, json.loads(step.args)) == (1, "b", "default", [[1], {}])
    assert decision.result is None
    assert decision.error is None


def test_recorded_steps_are_answered_and_the_next_one_is_asked_for(actors: dict[str, Any]) -> None:
    """DRIVE-4: results by sequence; side effects take one as well."""

    def function(flow: Flow) -> Any:
        return [flow.run(actors["a"]), flow.side_effect("dice", lambda: 1 / 0), flow.run(actors["a"]), flow.run(actors["c"])]

    history: list[Entry] = [done(1, "a", 10), SideEffectEntry(2, "dice", recorded(4)), done(3, "a", 30)]
    decision = walk(function, history)
    assert (decision.kind, decision.steps[0].sequence, decision.steps[0].actor) == ("suspended", 4, "c")
    decision = walk(function, [*history, done(4, "c", 40)])
    assert (decision.kind, json.loads(decision.result or b"")) == ("completed", [10, 4, 30, 40])


@pytest.mark.parametrize(
    ("status", "given_up", "ends"),
    [
        ("pending", False, "suspended"),
        ("running", False, "suspended"),
        ("failed", False, "suspended"),
        ("awaiting_retry", False, "suspended"),
        ("failed", True, "failed"),
        ("expired", False, "failed"),
    ],
)
def test_a_step_without_a_result_suspends_or_fails_the_function(
    actors: dict[str, Any], status: str, given_up: bool, ends: str
) -> None:
    """STATUS: a failed row with tries left is still in flight; one that is given up, or has expired, is an error."""
    entry = StepEntry(1, "a", status, given_up, 2, error=describe_error(ValueError("no")))
    decision = walk(lambda flow: flow.run(actors["a"]), [entry])
    assert decision.kind == ends
    assert decision.steps == []
    if ends == "failed":
        assert "step 1 (a)" in (decision.error or "")


def test_a_caught_failure_is_not_the_runs(actors: dict[str, Any]) -> None:
    """DRIVE-5: only what leaves the function fails the run."""

    def function(flow: Flow) -> str:
        try:
            flow.run(actors["a"])
        except StepFailedError as error:
            return error.message
        return ""

    entry = StepEntry(1, "a", "failed", True, error=describe_error(ValueError("no")))
    decision = walk(function, [entry])
    assert (decision.kind, decision.result) == ("completed", b'"no"')


def test_tags_of_a_decision_are_those_that_were_written(actors: dict[str, Any]) -> None:
    """TAG-1: what was there is read, what is written is in the decision."""

    def function(flow: Flow) -> Any:
        flow.tag("stage", 1)
        return dict(flow.tags)

    decision = walk(function, [])
    assert decision.tags == {"stage": "1"}
    assert json.loads(decision.result or b"") == {"tag": "old", "stage": "1"}


def test_the_flow_tells_of_its_run(actors: dict[str, Any]) -> None:
    """API Flow: the properties, and is_replaying step by step."""

    def function(flow: Flow) -> Any:
        seen = [flow.is_replaying]
        flow.run(actors["a"])
        seen.append(flow.is_replaying)
        return [flow.run_id, flow.workflow_name, flow.version, seen]

    assert json.loads(walk(function, [done(1, "a")]).result or b"") == ["r", "w", "v1", [True, False]]


def test_a_compensation_from_a_result_is_resolved_by_the_walk_that_sees_it(actors: dict[str, Any]) -> None:
    """COMP-2: once; a step that has its arguments is not built again."""
    calls: list[Any] = []

    def function(flow: Flow) -> None:
        flow.action(actors["a"]).compensate_with(lambda r: calls.append(r) or actors["undo"].message(r)).run()
        flow.run(actors["b"])

    decision = walk(function, [done(1, "a", 7, comp_from_result=True)])
    ((sequence, spec),) = decision.resolved
    assert (sequence, spec.actor, json.loads(spec.args or b"")) == (1, "undo", [[7], {}])
    assert calls == [7]
    decision = walk(function, [done(1, "a", 7, comp_from_result=True, comp_ready=True, comp_actor="undo")])
    assert decision.resolved == []
    assert calls == [7]


@pytest.mark.parametrize("mistaken", ["undo", "when"])
def test_a_function_inside_a_description_walks_over_nothing_that_is_recorded(actors: dict[str, Any], mistaken: str) -> None:
    """COMP-10, RSIG-3: the next step of the history is not its to take, though it is completed and of that name."""

    def function(flow: Flow) -> None:
        first = flow.action(actors["a"])
        if mistaken == "undo":
            first = first.compensate_with(lambda made: flow.run(actors["b"]))
        else:
            first = first.retry_on_signal("again", when=lambda context: flow.run(actors["b"]))
        flow.parallel(first, flow.action(actors["b"])).run()

    first = done(2, "a", 7, comp_from_result=True)
    if mistaken == "when":
        extra = Extra(1, 0, False, None, Stored("again").text(), None)
        first = StepEntry(2, "a", "failed", True, error=describe_error(ValueError("no")), extra=extra)
    with pytest.raises(HoldRun, match="not the place for using the flow"):
        walk(function, [BlockEntry(1, "parallel", 2, "wait_all_then_fail"), first, done(3, "b", True)])


def test_without_a_recorder_a_new_side_effect_ends_the_walk(actors: dict[str, Any]) -> None:
    """SIDE-1: it is not called where its value could not be kept, whatever the function catches."""
    called: list[int] = []

    def function(flow: Flow) -> Any:
        try:
            return flow.side_effect("dice", lambda: called.append(1))
        except Exception:
            return "caught"

    with pytest.raises(NeedsRecording):
        walk(function, [])
    assert called == []
    assert current_replay() is None


def test_what_a_rival_has_recorded_counts(actors: dict[str, Any]) -> None:
    """SIDE-1: the recorder answers with what stands; the function goes on with that."""
    decision = walk(lambda flow: flow.side_effect("dice", lambda: 1), [], record=lambda sequence, kind, name, data: b"6")
    assert decision.result == b"6"


@pytest.mark.parametrize("swallow", [Exception, BaseException], ids=["except Exception", "except BaseException"])
def test_an_error_of_the_recorder_leaves_the_walk_as_it_is(actors: dict[str, Any], swallow: type[BaseException]) -> None:
    """NATIVE-7: whatever the function makes of it."""
    error = OSError("the store")

    def record(sequence: int, kind: str, name: str, data: bytes) -> bytes:
        raise error

    def function(flow: Flow) -> Any:
        try:
            return flow.side_effect("dice", lambda: 1)
        except swallow:
            try:
                flow.run(actors["a"])
            except swallow:
                pass
            return "made up"

    with pytest.raises(OSError, match="the store") as caught:
        walk(function, [], record=record)
    assert caught.value is error
    assert current_replay() is None


MISFITS: dict[str, tuple[list[Entry], Callable[..., Any], str, str]] = {
    "another actor": ([done(1, "a")], lambda flow, a: flow.run(a["b"]), "step 'a'", "step 'b'"),
    "a side effect": ([done(1, "a")], lambda flow, a: flow.side_effect("x", int), "step 'a'", "side effect 'x'"),
    "a step": ([SideEffectEntry(1, "x", recorded(1))], lambda flow, a: flow.run(a["a"]), "side effect 'x'", "step 'a'"),
    "another key": ([SideEffectEntry(1, "x", recorded(1))], lambda flow, a: flow.side_effect("y", int), "side effect 'x'", "side effect 'y'"),
    "nothing": ([done(1, "a")], lambda flow, a: None, "step 'a'", "nothing more: it returned"),
    "an error": ([done(1, "a")], lambda flow, a: 1 / 0, "step 'a'", "nothing more: it raised ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISFITS)
@pytest.mark.parametrize("caught", [False, True])
def test_a_function_that_asks_for_something_else_holds_its_run(actors: dict[str, Any], what: str, caught: bool) -> None:
    """HISTORY-1: kind and name; the difference is readable, and cannot be caught away."""
    history, ask, was, wants = MISFITS[what]

    def function(flow: Flow) -> Any:
        try:
            return ask(flow, actors)
        except HistoryMismatchError:
            if caught:
                return "caught"
            raise

    with pytest.raises(HoldRun) as held:
        walk(function, history)
    error = held.value.error
    assert isinstance(error, HistoryMismatchError)
    assert (error.run_id, error.sequence, error.recorded) == ("r", 1, was)
    assert error.asked.startswith(wants)


def test_arguments_are_no_part_of_the_comparison(actors: dict[str, Any]) -> None:
    """HISTORY-1: kind, name, block shape; not arguments, which are not even encoded again."""
    assert walk(lambda flow: flow.run(actors["a"], object()), [done(1, "a", 1)]).result == b"1"


programs = st.lists(st.sampled_from(["a", "b", "c", "!x", "!y"]), min_size=1, max_size=8)


@given(programs, st.data())
def test_two_walks_of_one_history_give_one_decision(program: list[str], data: st.DataObject) -> None:
    """DRIVE-1, idea 3: pure; step by step to the end, each walk asks for exactly what stands next."""
    broker = StubBroker()
    known = {name: dramatiq.actor(lambda *args: None, broker=broker, actor_name=name) for name in NAMES}

    def function(flow: Flow) -> list[Any]:
        found: list[Any] = []
        for word in program:
            found.append(flow.side_effect(word, lambda: 0) if word.startswith("!") else flow.run(known[word], *found))
        return found

    history: list[Entry] = []
    expected: list[Any] = []
    for _ in range(len(program) + 1):
        recorder = {"record": lambda sequence, kind, name, data: data}
        first, second = walk(function, list(history), **recorder), walk(function, list(history), **recorder)
        assert first == second
        if first.kind == "completed":
            break
        (step,) = first.steps
        while len(history) + 1 < step.sequence:  # the side effects that it walked over on its way
            history.append(SideEffectEntry(len(history) + 1, program[len(history)], recorded(0)))
            expected.append(0)
        assert step.actor == program[step.sequence - 1]
        value = data.draw(st.integers())
        history.append(done(step.sequence, step.actor, value))
        expected.append(value)
    assert first.kind == "completed"
    assert json.loads(first.result or b"")[: len(expected)] == expected


def test_an_error_that_comes_up_while_builders_are_made_fails_the_run_with_that_error(actors: dict[str, Any]) -> None:
    """DRIVE-5: the builders that it leaves behind were not forgotten, and must not hide it."""

    def function(flow: Flow) -> Any:
        return flow.parallel(*[flow.action(actors["a"], size / (2 - size)) for size in (1, 2)]).run()

    decision = walk(function, [])
    assert (decision.kind, load_error(decision.error or "")["type"]) == ("failed", "builtins.ZeroDivisionError")


def test_a_builder_that_was_forgotten_holds_the_run_whatever_the_function_makes_of_it(actors: dict[str, Any]) -> None:
    """BuilderNotRunError, learnt at the next use of the flow and turned into another error there."""

    def function(flow: Flow) -> Any:
        flow.action(actors["a"])
        try:
            flow.run(actors["b"])
        except Exception:
            raise ValueError("something else") from None

    with pytest.raises(HoldRun) as caught:
        walk(function, [])
    assert isinstance(caught.value.error, BuilderNotRunError)


def test_an_outcome_is_put_into_a_copy_of_the_history(actors: dict[str, Any]) -> None:
    """DRIVE-1: a snapshot is shared between threads and never changed in place; the wake count is raised with the outcome."""
    pending = StepEntry(1, "a", "pending")
    before = run_of([pending])
    after = with_outcome(before, done(1, "a", 5))
    assert before.entries == [pending]
    assert (before.wakes, after.wakes, after.revision, after.wakes_seen) == (5, 6, 3, 4)
    entry = after.entries[0]
    assert isinstance(entry, StepEntry)
    assert entry.value is not None
    assert entry.value() == 5


def test_a_walk_inside_a_walk_is_refused(actors: dict[str, Any]) -> None:
    """API Flow: a run is not driven from inside another's function."""

    def function(flow: Flow) -> Any:
        return walk(lambda inner: 1, [])

    with pytest.raises(HoldRun) as held:
        walk(lambda flow: function(flow), [done(1, "a")])
    assert "driving a run" in str(held.value.error) or isinstance(held.value.error, HistoryMismatchError)
    assert current_replay() is None
