"""When a parallel block or a saga group has ended: its row says so in every ending of the run, and so does ``show`` (PAR-2, STATUS-2).

Every way for a block to end, and every way for the run around it to end, on one SQLite file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowHandle, StepFailedError
from dramatiq_saga.cli.show import lines_of
from dramatiq_saga.operations import Operator
from tests.support.application import Application
from tests.support.waiting import eventually

BLOCKS = ["saga", "parallel", "parallel in saga", "parallel in parallel", "wait all"]


def told(app: Application, handle: FlowHandle[Any]) -> list[tuple[int, str, bool, bool]]:
    """Of each block: its sequence, its status, whether its row has an end, and whether ``show`` says that it still runs."""
    report = Operator.on_broker(app.broker).show_run(handle.id)
    lines = {int(line[:4]): line for line in lines_of(report, report.created_at) if line[:4].strip().isdecimal()}
    return [
        (entry.sequence, entry.status, entry.ended_at is not None, "running since" in lines[entry.sequence])
        for entry in report.entries
        if entry.size is not None
    ]


class Steps:
    """A workflow with one block; ``last`` is its last member."""

    def __init__(self, app: Application, block: str, *, fails: bool = False, stuck: bool = False) -> None:
        undo, one = app.step("undo"), app.step("one")
        last = app.step(
            "last",
            raises=ValueError("sold out") if fails else None,
            queue_name=app.queue + "_nobody" if stuck else app.queue,
        )

        def build(flow: Flow) -> Any:
            first, second = flow.action(one).compensate_with(undo), flow.action(last).compensate_with(undo)
            if block == "saga":
                return flow.saga(first, second)
            if block == "parallel in saga":
                return flow.saga(flow.action(one), flow.parallel(first, second))
            if block == "parallel in parallel":
                return flow.parallel(flow.action(one), flow.parallel(first, second))
            parallel = flow.parallel(first, second)
            return parallel.wait_all_then_fail() if block == "wait all" else parallel

        self.build: Callable[[Flow], Any] = build


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_has_ended_once_the_run_has_gone_past_it(lite: Application, block: str) -> None:
    """PAR-2: in the wait that follows, and when the run has completed."""
    steps = Steps(lite, block)

    @lite.workflow
    def goes_on(flow: Flow) -> None:
        steps.build(flow).run()
        flow.await_signal("go")

    handle = goes_on.send()
    lite.start()
    eventually(lambda: handle.status == "waiting")
    assert {one[1:] for one in told(lite, handle)} == {("ended", True, False)}
    handle.signal("go")
    assert lite.ended(handle) == "completed"
    assert {one[1:] for one in told(lite, handle)} == {("ended", True, False)}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("caught", [True, False], ids=["caught", "fails the run"])
def test_a_block_that_fails_has_ended(lite: Application, block: str, caught: bool) -> None:
    """PAR-4, COMP-1: whether the workflow catches its failure, or fails and is undone."""
    steps = Steps(lite, block, fails=True)

    @lite.workflow
    def fails(flow: Flow) -> None:
        try:
            steps.build(flow).run()
        except StepFailedError:
            if not caught:
                raise
            flow.await_signal("go")

    handle = fails.send()
    lite.start()
    eventually(lambda: handle.status == ("waiting" if caught else "failed"))
    assert {one[2:] for one in told(lite, handle)} == {(True, False)}
    assert all(status in ("ended", "failed") for _, status, _, _ in told(lite, handle))
    if caught:
        handle.signal("go")
        assert lite.ended(handle) == "completed"
        assert {one[2:] for one in told(lite, handle)} == {(True, False)}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ending", ["cancelled", "rolled back", "expired"])
def test_a_block_that_is_open_ends_with_its_run(lite: Application, block: str, ending: str) -> None:
    """STATUS-2, EXPIRE-1: also when the run's rollback begins."""
    steps = Steps(lite, block, stuck=True)

    @lite.workflow(name="open")
    def stays(flow: Flow) -> None:
        steps.build(flow).run()

    start = {"expires_in": 0.5} if ending == "expired" else {}
    handle = stays.send_with_options(**start)
    lite.start(queues={lite.queue})
    if ending != "expired":
        eventually(lambda: [step.actor for step in handle.actions() if step.status == "pending"] == ["last"])
        assert {one[1:] for one in told(lite, handle)} == {("running", False, True)}
        assert handle.cancel() if ending == "cancelled" else handle.compensate()
    assert lite.ended(handle) == ("expired" if ending == "expired" else "cancelled")
    assert {one[1:] for one in told(lite, handle)} == {("ended", True, False)}
