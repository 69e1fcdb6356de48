"""HISTORY-1, C68: whatever is recorded, whatever else is asked for there, the difference is noticed and told in words.

Every kind of thing that a function can ask for, against every other, at every place of a block: by replay alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.codec import encode, freeze
from dramatiq_saga.engine.replay import Replay, replay
from dramatiq_saga.engine.rows import (
    BlockEntry,
    ChildEntry,
    Entry,
    Extra,
    SentSignalEntry,
    SideEffectEntry,
    Snapshot,
    StepEntry,
    WaitEntry,
)
from dramatiq_saga.engine.verify import walk
from dramatiq_saga.errors import HistoryMismatchError

Ask = Callable[[Flow, dict[str, Any]], Any]

#: How a mismatch names it, and how a function asks for it.
ASKED: dict[str, Ask] = {
    "step 'a'": lambda flow, actors: flow.run(actors["a"]),
    "step 'b'": lambda flow, actors: flow.action(actors["b"]).compensate_with(actors["a"]).run(),
    "side effect 'dice'": lambda flow, actors: flow.side_effect("dice", lambda: 1 / 0),
    "side effect 'coin'": lambda flow, actors: flow.side_effect("coin", lambda: 1 / 0),
    "side effect 'now'": lambda flow, actors: flow.now(),
    "side effect 'uuid4'": lambda flow, actors: flow.uuid4(),
    "side effect 'random'": lambda flow, actors: flow.random(),
    "wait for signal 'go'": lambda flow, actors: flow.await_signal("go"),
    "wait for signal 'stop'": lambda flow, actors: flow.await_signal("stop", wait_seconds=1),
    "signal 'go' to another run": lambda flow, actors: flow.signal_flow("other", "go"),
    "signal 'stop' to another run": lambda flow, actors: flow.signal_flow("other", "stop", 1),
    "child 'inner'": lambda flow, actors: flow.child(actors["inner"]).run(),
    "child 'other'": lambda flow, actors: flow.child(actors["other"], 1).continue_on_failure().run(),
    "timer": lambda flow, actors: flow.sleep(5),
    "parallel block of 2": lambda flow, actors: flow.parallel(flow.action(actors["a"]), flow.action(actors["b"])).run(),
    "parallel block of 1": lambda flow, actors: flow.parallel(flow.action(actors["a"])).run(),
    "parallel block of 0": lambda flow, actors: flow.parallel().run(),
    "saga group of 2": lambda flow, actors: flow.saga(flow.action(actors["a"]), flow.action(actors["b"])).run(),
    "saga group of 1": lambda flow, actors: flow.saga(flow.action(actors["a"])).run(),
}


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    broker = StubBroker()
    broker.add_middleware(SagaMiddleware(tmp_path_factory.mktemp("unused") / "unused.db"))
    made: dict[str, Any] = {
        name: dramatiq.actor(lambda *args: None, broker=broker, actor_name=name) for name in ("a", "b", "c")
    }
    for name in ("inner", "other"):
        made[name] = workflow(name=name, broker=broker)(lambda flow, *args: None)
    yield made
    broker.close()


def snapshot(entries: list[Entry]) -> Snapshot:
    args = freeze(encode([[], {}], "arguments"))
    return Snapshot("r", "w", None, "default", None, None, "running", "none", 1, 2, 1, args, None, 0, entries, {})


def recorded(what: str, actors: dict[str, Any]) -> list[Entry]:
    """The history that a function leaves which asks for that and nothing else."""
    if what.startswith("side effect"):
        name = what.split("'")[1]
        known = {"now": 0, "uuid4": "c1e7e1b0-0000-4000-8000-000000000000", "random": 0.5}
        return [SideEffectEntry(1, name, freeze(encode(known.get(name, 4), name)))]
    if what.startswith("signal '"):
        return [SentSignalEntry(1, what.split("'")[1], freeze(encode(None, "what became of it")))]
    context = Replay(snapshot([]), now=1, settings=Settings())
    replay(lambda flow: ASKED[what](flow, actors), context, Flow)
    return list(context.new_entries)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("there", ASKED)
def test_what_is_recorded_fits_itself_and_nothing_else(actors: dict[str, Any], there: str, asked: str) -> None:
    """HISTORY-1: kind, name and shape, at the same sequence."""
    entries = recorded(there, actors)
    assert entries[0].describe() == there
    known = snapshot(entries)

    def function(flow: Flow) -> None:
        ASKED[asked](flow, actors)

    if asked == there:
        assert walk(function, known, Flow, settings=Settings(), now=1).context.new_entries == []
        return
    with pytest.raises(HistoryMismatchError) as caught:
        walk(function, known, Flow, settings=Settings(), now=1)
    assert (caught.value.sequence, caught.value.recorded, caught.value.asked) == (1, there, asked)
    assert f"at sequence 1: recorded is {there}, the code asks for {asked}" in str(caught.value)


MEMBERS: dict[str, tuple[Callable[[Flow, dict[str, Any]], Any], int, str, str]] = {
    "another actor at its second place": (
        lambda flow, actors: flow.parallel(flow.action(actors["a"]), flow.action(actors["c"])).run(), 3, "step 'b'", "step 'c'",
    ),
    "its members swapped": (
        lambda flow, actors: flow.parallel(flow.action(actors["b"]), flow.action(actors["a"])).run(), 2, "step 'a'", "step 'b'",
    ),
    "a block in its place": (
        lambda flow, actors: flow.parallel(flow.parallel(flow.action(actors["a"])), flow.action(actors["b"])).run(),
        2, "step 'a'", "parallel block of 1",
    ),
    "a saga group of the same": (
        lambda flow, actors: flow.saga(flow.action(actors["a"]), flow.action(actors["b"])).run(),
        1, "parallel block of 2", "saga group of 2",
    ),
    "its members one after another": (
        lambda flow, actors: [flow.run(actors["a"]), flow.run(actors["b"])], 1, "parallel block of 2", "step 'a'",
    ),
    "a child in the place of a step": (
        lambda flow, actors: flow.parallel(flow.action(actors["a"]), flow.child(actors["inner"])).run(), 3, "step 'b'", "child 'inner'",
    ),
    "nothing": (lambda flow, actors: None, 1, "parallel block of 2", "nothing more: it returned"),
}  # fmt: skip


@pytest.mark.parametrize("change", MEMBERS)
def test_a_change_inside_a_block_is_noticed(actors: dict[str, Any], change: str) -> None:
    """C68, C19: the width of a block, its members and their order."""
    code, sequence, there, asked = MEMBERS[change]
    done = freeze(encode(1, "result"))
    entries: list[Entry] = [
        BlockEntry(1, "parallel", 2, "fail_fast"),
        StepEntry(2, "a", "completed", attempts=1, value=done, extra=Extra(1, 0)),
        StepEntry(3, "b", "running", attempts=1, extra=Extra(1, 1)),
    ]
    with pytest.raises(HistoryMismatchError) as caught:
        walk(lambda flow: code(flow, actors), snapshot(entries), Flow, settings=Settings(), now=1)
    assert (caught.value.sequence, caught.value.recorded, caught.value.asked) == (sequence, there, asked)


@pytest.mark.parametrize("last", ["a live step", "a wait", "a completed step", "a side effect"])
@pytest.mark.parametrize("end", ["returned", "raised"])
def test_an_end_before_everything_recorded_is_a_mismatch(actors: dict[str, Any], last: str, end: str) -> None:
    """HISTORY-1: whatever the kind of what is left over; the function neither completes nor fails by it."""
    value = freeze(encode(1, "value"))
    left: dict[str, Entry] = {
        "a live step": StepEntry(1, "a", "pending"),
        "a wait": WaitEntry(1, "signal", "go", "waiting", None),
        "a completed step": StepEntry(1, "a", "completed", attempts=1, value=value),
        "a side effect": SideEffectEntry(1, "dice", value),
    }

    def function(flow: Flow) -> None:
        if end == "raised":
            raise KeyError("x")

    with pytest.raises(HistoryMismatchError, match=f"nothing more: it {end}") as caught:
        walk(function, snapshot([left[last]]), Flow, settings=Settings(), now=1)
    assert caught.value.recorded == left[last].describe()


# --- whether a run that is held is failing -----------------------------------------------------------------------------


def child(number: int, status: str, **facts: Any) -> ChildEntry:
    return ChildEntry(number, "inner", "c", status, "abandon", **facts)


@pytest.mark.parametrize(
    ("entries", "failing"),
    [
        ([], False),
        ([StepEntry(1, "a", "completed")], False),
        ([StepEntry(1, "a", "failed")], False),  # between two tries
        ([StepEntry(1, "a", "failed", given_up=True)], True),
        ([StepEntry(1, "a", "optional_failed", given_up=True, optional=True)], False),
        ([StepEntry(1, "a", "expired")], True),
        ([StepEntry(1, "a", "expired", optional=True)], False),
        ([StepEntry(1, "a", "failed", given_up=True), StepEntry(2, "b", "running")], False),  # it was caught
        ([StepEntry(1, "a", "failed", given_up=True), WaitEntry(2, "signal", "go", "consumed", None)], False),
        ([child(1, "failed")], True),
        ([child(1, "failed", optional=True)], False),
        ([child(1, "cancelled", optional=True)], True),  # always raised
        ([child(1, "completed")], False),
        (
            [
                BlockEntry(1, "parallel", 2),
                StepEntry(2, "a", "failed", given_up=True, extra=Extra(1, 0)),
                child(3, "completed", extra=Extra(1, 1)),
            ],
            True,
        ),
        (
            [
                StepEntry(1, "a", "failed", given_up=True),
                BlockEntry(2, "parallel", 1),
                StepEntry(3, "a", "completed", extra=Extra(2, 0)),
            ],
            False,
        ),
    ],
)
def test_a_run_is_failing_when_the_last_thing_it_asked_for_has_failed_for_good(entries: list[Entry], failing: bool) -> None:
    """COMP-3, CHILD-2, OPT-1: then a replay that comes to nothing keeps a rollback waiting."""
    assert snapshot(entries).is_failing() is failing
