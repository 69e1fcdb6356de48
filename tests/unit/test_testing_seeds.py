"""Runs made up by a seed, in a test with a replay after every step (C61).

Whatever a workflow is made of, as long as it asks for the same things again, no replay complains, every run comes to its end without
a wait, and it leaves what the same run leaves without the checks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest

from dramatiq_saga import Flow, FlowHandle, StepFailedError, Workflow, current_step, query, workflow
from dramatiq_saga.errors import ChildError, SignalTimeoutError
from dramatiq_saga.testing import SagaTester

Instruction = list[Any]

LIVE = ["pending", "running", "waiting", "rolling_back"]


# --- made up ---------------------------------------------------------------------------------------------------------


def made_up(dice: random.Random, *, depth: int = 0) -> list[Instruction]:
    """What one run does."""
    return [_instruction(dice, depth) for _ in range(dice.randint(1, 5))] + ([["raise"]] if dice.random() < 0.25 else [])


def _instruction(dice: random.Random, depth: int) -> Instruction:
    kinds = ["step", "step", "optional", "parked", "parallel", "saga", "signal", "sleep", "recorded", "caught", "patched"]
    match dice.choice([*kinds, *([] if depth else ["child", "child"])]):
        case "parallel":
            return [
                "parallel",
                [_member(dice, depth) for _ in range(dice.randint(0, 4))],
                dice.choice([None, 1, 2]),
                dice.random() < 0.5,
            ]
        case "saga":
            return ["saga", [_step(dice) for _ in range(dice.randint(1, 3))], dice.random() < 0.5]
        case "signal":
            return ["signal", dice.choice([None, 60])]
        case "sleep":
            return ["sleep", dice.choice([0, 60, 86_400])]
        case "child":
            return ["child", made_up(dice, depth=depth + 1), dice.choice(["abandon", "cancel", "fail"])]
        case "step":
            return _step(dice)
        case kind:
            return [kind, dice.choice(["fine", "flaky", "broken"])]


def _member(dice: random.Random, depth: int) -> Instruction:
    match dice.choice(["step", "step", "optional", "parked"] + ([] if depth else ["child"])):
        case "step":
            return _step(dice)
        case "child":
            return ["child", made_up(dice, depth=depth + 1), "cancel"]
        case kind:
            return [kind, dice.choice(["fine", "broken"])]


def _step(dice: random.Random) -> Instruction:
    return ["step", dice.choices(["fine", "flaky", "broken"], [8, 3, 1])[0]]


# --- what it is made of ----------------------------------------------------------------------------------------------


def declare() -> Workflow[[list[Instruction]], list[Any]]:
    @dramatiq.actor(max_retries=1, min_backoff=1_000)
    def work(how: str) -> str:
        step = current_step()
        assert step is not None
        if how == "broken" or (how == "flaky" and step.attempt == 1):
            raise ConnectionError(how)
        return f"{how} at {step.sequence}"

    @dramatiq.actor(max_retries=1, min_backoff=1_000)
    def undo(how: str) -> None:
        pass

    def builder(flow: Flow, instruction: Instruction) -> Any:
        kind, how = instruction[:2]
        if kind == "child":
            return flow.child(told, how).close_policy(instruction[2])
        action = flow.action(work, how).compensate_with(undo, how)
        if kind == "parked":
            return action.retry_on_signal("again", max_retries=1)
        return action.continue_on_failure() if kind == "optional" else action

    @workflow
    def told(flow: Flow, instructions: list[Instruction]) -> list[Any]:
        results: list[Any] = []
        for instruction in instructions:
            match instruction:
                case ["raise"]:
                    raise ZeroDivisionError("on purpose")
                case ["parallel", members, most, fail_fast]:
                    block = flow.parallel(*[builder(flow, member) for member in members])
                    block = block if most is None else block.max_in_flight(most)
                    results.append((block.fail_fast() if fail_fast else block.wait_all_then_fail()).run())
                case ["saga", members, at_once]:
                    group = flow.saga(*[builder(flow, member) for member in members])
                    results.append((group.compensate_in_parallel() if at_once else group).run())
                case ["signal", wait]:
                    try:
                        results.append(flow.await_signal("go", wait_seconds=wait))
                    except SignalTimeoutError:
                        results.append("too late")
                case ["sleep", seconds]:
                    flow.sleep(seconds)
                case ["recorded", _]:
                    results += [
                        str(flow.uuid4()),
                        flow.random(),
                        flow.side_effect("own", random.random),
                        flow.now().isoformat(),
                    ]
                case ["patched", how]:
                    if flow.patched("new way"):
                        results.append(flow.action(work, how).continue_on_failure().run())
                case ["caught", how]:
                    try:
                        results.append(flow.run(work, how))
                    except StepFailedError as error:
                        results.append(error.message)
                case ["child", *_]:
                    try:
                        results.append(builder(flow, instruction).run())
                    except ChildError as error:
                        results.append(type(error).__name__)
                case _:
                    results.append(builder(flow, instruction).run())
        return results

    return told


# --- the tests -------------------------------------------------------------------------------------------------------


def run_to_the_end(saga: SagaTester, seed: int) -> list[FlowHandle[Any]]:
    dice = random.Random(seed)
    told = declare()
    runs = [saga.start(told, made_up(dice)) for _ in range(4)]
    for _ in range(60):
        saga.drain()
        live = list(query(status=LIVE))
        if not live:
            break
        for run in live:
            for name in ("go", "again"):
                run.signal_if_running(name, "yes")
        saga.advance(timedelta(hours=6))
    else:
        pytest.fail(f"not all ended: {saga.waiting}")
    return runs


def left_by(run: FlowHandle[Any]) -> Iterator[Any]:
    """What a run leaves, without what chance has a say in."""
    yield run.status, run.rollback
    yield from ((step.sequence, step.actor, step.status, step.attempts) for step in run.actions())
    yield from ((undo.sequence, undo.actor, undo.status) for undo in run.compensations())


@pytest.mark.parametrize("seed", range(20))
def test_no_replay_complains_of_a_sound_workflow_and_none_leaves_a_trace(seed: int) -> None:
    left = []
    for strict in (True, False):
        with SagaTester() as saga:
            if strict:
                saga.replay_every_step()
            left.append([list(left_by(run)) for run in run_to_the_end(saga, seed)])
    assert left[0] == left[1]
