"""A workflow's function against what is recorded of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowFailedError
from dramatiq_saga.engine.drive import Driven, drive
from tests.support.application import Application
from tests.support.bench import Background, Bench
from tests.support.deploying import deploy


class Parcels:
    """A workflow of three steps; a run of it is parked after the second, its third message in the test's hands."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def declare(self, bench: Bench) -> None:
        def body(name: str) -> Callable[[], str]:
            def run() -> str:
                self.ran.append(name)
                return name.upper()

            run.__name__ = name
            return run

        self.pack, self.weigh, self.ship, self.wrap, self.undo = (
            bench.actor(body(name)) for name in ("pack", "weigh", "ship", "wrap", "undo")
        )
        bench.workflow(self.parcel)

    def parcel(self, flow: Flow) -> list[str]:
        first = flow.action(self.pack).compensate_with(self.undo).run()
        second = flow.run(self.weigh)
        return [first, second, flow.run(self.ship)]

    def parked(self, bench: Bench) -> str:
        run = bench.start("parcel")
        for _ in range(3):
            bench.deliver(bench.take())
        assert bench.steps(run) == [("pack", "completed"), ("weigh", "completed"), ("ship", "pending")]
        return run


def rename_the_first(p: Parcels, flow: Flow) -> None:
    flow.run(p.wrap)
    flow.run(p.weigh)
    flow.run(p.ship)


def swap_the_first_two(p: Parcels, flow: Flow) -> None:
    flow.run(p.weigh)
    flow.run(p.pack)
    flow.run(p.ship)


def insert_before_the_second(p: Parcels, flow: Flow) -> None:
    flow.run(p.pack)
    flow.run(p.wrap)
    flow.run(p.weigh)
    flow.run(p.ship)


def remove_the_second(p: Parcels, flow: Flow) -> None:
    flow.run(p.pack)
    flow.run(p.ship)


def make_the_second_a_side_effect(p: Parcels, flow: Flow) -> None:
    flow.run(p.pack)
    flow.side_effect("weigh", lambda: p.ran.append("weighed in the workflow"))
    flow.run(p.ship)


def return_after_the_first(p: Parcels, flow: Flow) -> None:
    flow.run(p.pack)


def raise_after_the_first(p: Parcels, flow: Flow) -> None:
    flow.run(p.pack)
    raise ValueError("not any more")


CHANGES = [
    (rename_the_first, 1, "step 'pack'", "step 'wrap'"),
    (swap_the_first_two, 1, "step 'pack'", "step 'weigh'"),
    (insert_before_the_second, 2, "step 'weigh'", "step 'wrap'"),
    (remove_the_second, 2, "step 'weigh'", "step 'ship'"),
    (make_the_second_a_side_effect, 2, "step 'weigh'", "side effect 'weigh'"),
    (return_after_the_first, 2, "step 'weigh'", "nothing more: it returned"),
    (raise_after_the_first, 2, "step 'weigh'", "nothing more: it raised ValueError: not any more"),
]


@pytest.mark.parametrize(("code", "sequence", "recorded", "asked"), CHANGES)
def test_changed_code_holds_a_parked_run_with_a_readable_difference(
    by_hand: Any, code: Any, sequence: int, recorded: str, asked: str
) -> None:
    """C68, HISTORY-1: not failed, nothing rolled back, no wake lost, the outcome kept; it goes on with code that agrees."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    deploy(bench.engine, "parcel", lambda flow: code(parcels, flow))
    bench.deliver(bench.take())
    assert bench.status(run) == "waiting"
    assert bench.steps(run) == [("pack", "completed"), ("weigh", "completed"), ("ship", "completed")]
    text, held, wakes, seen = bench.one("SELECT hold_error, hold_count, wakes, wakes_seen FROM {flow_runs} WHERE id = ?", run)
    error = json.loads(text)
    assert error["type"] == "dramatiq_saga.errors.HistoryMismatchError"
    for word in (f"sequence {sequence}", recorded, asked):
        assert word in error["message"]
    assert wakes > seen
    assert held == 1
    assert bench.events(run)[-1] == "flow.held"
    assert bench.undos(run) == []
    assert parcels.ran == ["pack", "weigh", "ship"]  # nothing again, nothing new, no side effect
    assert drive(bench.engine, run, bench.sender) is Driven.HELD  # still the same code
    deploy(bench.engine, "parcel", parcels.parcel)
    assert drive(bench.engine, run, bench.sender) is Driven.DECIDED
    assert bench.status(run) == "completed"
    assert parcels.ran == ["pack", "weigh", "ship"]
    assert bench.one("SELECT hold_error, hold_count FROM {flow_runs} WHERE id = ?", run) == (None, held + 1)


def test_a_side_effect_that_becomes_a_step_is_noticed_too(by_hand: Any) -> None:
    """C68, HISTORY-1: kind and name are compared at every sequence, side effects' as well."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    names = ["dice", "coin"]

    def throws(flow: Flow) -> Any:
        value = flow.side_effect(names[0], lambda: 4)
        flow.run(parcels.ship)
        return value

    deploy(bench.engine, "parcel", throws)
    run = bench.start("parcel")
    bench.deliver(bench.take())
    names.reverse()
    bench.run()
    [text] = bench.one("SELECT hold_error FROM {flow_runs} WHERE id = ?", run)
    assert "side effect 'dice'" in text
    assert "side effect 'coin'" in text
    names.reverse()
    assert drive(bench.engine, run, bench.sender) is Driven.DECIDED
    assert bench.status(run) == "completed"


def test_other_arguments_are_no_mismatch(by_hand: Any) -> None:
    """HISTORY-1, DRIVE-4: kind, name and shape count; a completed step's result is reused and its actor not called again."""
    ran: list[int] = []

    def declare(bench: Bench) -> None:
        def count(number: int) -> int:
            ran.append(number)
            return number

        step = bench.actor(count)

        def counts(flow: Flow, base: int) -> list[int]:
            return [flow.run(step, offset + base) for offset in offsets]

        bench.workflow(counts)

    offsets = [1, 2, 3]
    bench = by_hand(declare)
    run = bench.start("counts", 10)
    for _ in range(3):
        bench.deliver(bench.take())
    offsets[:2] = [100, 200]
    bench.run()
    assert bench.status(run) == "completed"
    assert ran == [11, 12, 13]
    [result] = bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run)
    assert json.loads(result) == [11, 12, 13]


def test_a_fault_of_the_engine_in_a_drive_holds_the_run_and_fails_nothing(by_hand: Any) -> None:
    """HISTORY-1: treated like a history that does not fit; the step's outcome is kept."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    make_flow = bench.engine.make_flow

    def broken(replay: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    bench.engine.make_flow = broken
    bench.deliver(bench.take())
    assert bench.steps(run)[-1] == ("ship", "completed")
    assert bench.status(run) == "waiting", bench.one("SELECT error FROM {flow_runs} WHERE id = ?", run)
    bench.engine.make_flow = make_flow
    drive(bench.engine, run, bench.sender)
    assert bench.status(run) == "completed"


# --- DRIVE-5 ---------------------------------------------------------------------------------------------------------


def test_an_exception_out_of_the_function_fails_the_run_after_its_rollback(joined: Application) -> None:
    """DRIVE-5, COMP-1: an ordinary error of the workflow's own; the steps before it are undone first."""
    app = joined
    step, undo = app.step("step"), app.step("undo")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        raise KeyError("no such customer")

    handle = app.run(order)
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert app.calls == [("step",), ("undo",)]
    types = app.types(handle)
    assert types.index("compensation.completed") < types.index("flow.failed")
    with pytest.raises(FlowFailedError, match="no such customer") as caught:
        handle.result()
    assert caught.value.cause is not None
    assert caught.value.cause["type"] == "builtins.KeyError"
    assert "order" in caught.value.cause["traceback"]


@pytest.mark.parametrize("value", [object(), float("nan"), {"lock": [lambda: 1]}], ids=["object", "nan", "nested"])
def test_a_return_value_that_cannot_be_stored_fails_the_run_after_its_rollback(lite: Application, value: Any) -> None:
    """C46, C47, DRIVE-5: with that cause, naming the workflow's return value; its steps are undone."""
    step, undo = lite.step("step"), lite.step("undo")

    @lite.workflow
    def order(flow: Flow) -> Any:
        flow.action(step).compensate_with(undo).run()
        return value

    handle = order.run_sync()
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert lite.calls == [("step",), ("undo",)]
    with pytest.raises(FlowFailedError, match=r"the workflow's return value.* cannot be stored") as caught:
        handle.result()
    assert caught.value.cause is not None
    assert caught.value.cause["type"].endswith("NotSerializableError")


# --- SIDE-1 ----------------------------------------------------------------------------------------------------------


def test_a_side_effect_is_recorded_before_what_follows_from_it_and_never_made_again(joined: Application) -> None:
    """SIDE-1: five drives, one call; the step that gets the value gets the one that is recorded."""
    app = joined
    thrown: list[int] = []
    step = app.step("step")

    def throw() -> int:
        thrown.append(len(thrown) + 1)
        return thrown[-1]

    @app.workflow
    def game(flow: Flow) -> int:
        dice = flow.side_effect("dice", throw)
        for _ in range(3):
            flow.run(step, dice)
        return dice

    handle = app.run(game)
    assert thrown == [1]
    assert app.calls == [("step", 1)] * 3
    assert handle.result() == 1
    types = app.types(handle)
    assert types.index("side_effect.recorded") < types.index("action.started")


def test_a_side_effect_stands_although_the_drive_that_made_it_did_not_decide(by_hand: Any) -> None:
    """SIDE-1: the process dies after it was recorded; the next drive takes the value that is there."""
    calls: list[int] = []

    def declare(bench: Bench) -> None:
        def echo(value: int) -> int:
            return value

        step = bench.actor(echo)

        def game(flow: Flow) -> int:
            return flow.run(step, flow.side_effect("dice", lambda: calls.append(1) or len(calls)))

        bench.workflow(game)

    bench = by_hand(declare)
    run = bench.start("game")
    bench.fail("decision", happened=False)
    message = bench.message(bench.take())
    with pytest.raises(Exception, match="COMMIT"):
        bench.deliver(message)
    assert bench.all("SELECT sequence, name FROM {side_effects} WHERE run_id = ?", run) == [(1, "dice")]
    bench.deliver(message)
    bench.run()
    assert calls == [1]
    assert bench.status(run) == "completed"


def test_no_side_effect_is_made_for_a_run_that_is_rolling_back(by_hand: Any) -> None:
    """SIDE-1: a drive of a run under rollback does not walk the function at all."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    run = parcels.parked(bench)
    bench.compensate(run)
    called: list[str] = []

    def later(flow: Flow) -> None:
        called.append("replayed")
        flow.side_effect("late", lambda: called.append("made"))

    deploy(bench.engine, "parcel", later)
    assert drive(bench.engine, run, bench.sender) is Driven.ROLLING_BACK
    bench.run()
    assert called == []
    assert bench.status(run) == "cancelled"


def test_a_side_effect_whose_value_cannot_be_stored_is_the_functions_own_error(lite: Application) -> None:
    """SIDE-1, CODEC-2: the error names the side effect; caught or not, nothing is recorded of it."""

    @lite.workflow
    def game(flow: Flow) -> None:
        flow.side_effect("dice", lambda: {"faces": [object()]})

    handle = game.run_sync()
    with pytest.raises(FlowFailedError, match=r"side effect 'dice'\['faces'\]\[0\] cannot be stored"):
        handle.result()
    assert "side_effect.recorded" not in lite.types(handle)


def test_a_run_whose_replay_was_slow_once_is_not_slow_for_ever(by_hand: Any) -> None:
    """DRIVE-1: no outcome waits for a slow replay; once one was quick, outcome and decision are one write again."""
    parcels = Parcels()
    bench = by_hand(parcels.declare)
    del bench.engine.note_cost  # what it really costs
    run = bench.start("parcel")
    bench.deliver(bench.take())
    bench.engine.note_cost(run, 5.0)
    alone = bench.stop("outcome")
    slow = Background(lambda: bench.deliver(bench.take()))
    alone.wait_reached()
    alone.go()
    slow.result()  # its own drive was quick
    assert bench.engine.replay_cost.get(run, 0.0) < 5.0
    together = bench.stop("outcome and decision")
    [message] = [message for message in bench.messages if message.kind == "step"]
    quick = Background(lambda: bench.deliver(message))
    together.wait_reached()
    together.go()
    quick.result()
    bench.sender.queue.remove(message)
    bench.run()
    assert bench.status(run) == "completed"
