"""Parallel blocks in one process, and what builders say of them (PAR-1, PAR-4, SYNC-1, C19)."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga import Flow, FlowFailedError, Settings, workflow
from dramatiq_saga.errors import WouldBlockError
from dramatiq_saga.recovery.kick import kick
from tests.support.workbench import MakeBench, Workbench


def declare(bench: Workbench, function: Any) -> Any:
    return workflow(broker=bench.broker)(function)


def members(bench: Workbench, flow: Flow, count: int) -> list[Any]:
    hotel, cancel = bench.actors["book_hotel"], bench.actors["cancel_hotel"]
    return [flow.action(hotel, number).compensate_with(cancel, number) for number in range(count)]


# --- run_sync --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1, 2, 9])
def test_a_block_runs_to_its_end_in_the_calling_process(bench: Workbench, limit: int | None) -> None:
    """SYNC-1, PAR-1: the same rows, and members that are held back have their turn."""
    bench.bodies["book_hotel"] = lambda number: number * 2

    def fan(flow: Flow) -> list[int]:
        block = flow.parallel(*members(bench, flow, 5))
        return (block if limit is None else block.max_in_flight(limit)).run()

    run = declare(bench, fan).run_sync()
    assert run.result() == [0, 2, 4, 6, 8]
    assert [step.position for step in run.actions()] == [0, 1, 2, 3, 4]
    assert {step.block for step in run.actions()} == {1}


def test_a_failing_block_is_undone_in_the_calling_process(bench: Workbench) -> None:
    """SYNC-1, PAR-4: what has not begun is cancelled; an empty block needs nothing."""

    def book(number: int) -> int:
        if number == 1:
            raise ValueError("full")
        return number

    bench.bodies["book_hotel"] = book

    def fan(flow: Flow, count: int) -> list[int]:
        return flow.parallel(*members(bench, flow, count)).run()

    declared = declare(bench, fan)
    assert declared.run_sync(0).result() == []
    run = declared.run_sync(4)
    assert [step.status for step in run.actions()] == ["completed", "failed", "cancelled", "cancelled"]
    assert [done for done in bench.done if done[0] == "cancel_hotel"] == [("cancel_hotel", (0,))]
    with pytest.raises(FlowFailedError, match="full"):
        run.result()


def test_the_settings_say_what_a_block_without_a_word_of_its_own_does(make_bench: MakeBench) -> None:
    """PAR-4: ``parallel.default_failure_policy``; it is stored with the block."""
    bench = make_bench(settings=Settings.from_mapping({"parallel.default_failure_policy": "wait_all_then_fail"}))
    bench.bodies["book_hotel"] = lambda number: 1 // number

    def fan(flow: Flow) -> list[int]:
        return flow.parallel(*members(bench, flow, 3)).run()

    def fast(flow: Flow) -> list[int]:
        return flow.parallel(*members(bench, flow, 3)).fail_fast().run()

    assert [step.status for step in declare(bench, fan).run_sync().actions()] == ["failed", "completed", "completed"]
    assert [step.status for step in declare(bench, fast).run_sync().actions()] == ["failed", "cancelled", "cancelled"]


def test_optional_members_do_not_fail_their_block(bench: Workbench) -> None:
    """OPT-1, PAR-4: the fallback stands in the member's place, and nobody is cancelled."""
    bench.bodies["book_hotel"] = lambda number: 10 // number

    def fan(flow: Flow) -> list[Any]:
        first, second, third = members(bench, flow, 3)
        return flow.parallel(first.fallback_value_on_fail("none"), second, third.continue_on_failure()).run()

    run = declare(bench, fan).run_sync()
    assert run.result() == ["none", 10, 5]
    assert [step.status for step in run.actions()] == ["optional_failed", "completed", "completed"]


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_and_groups_end_with_their_last_member(bench: Workbench, fails: bool) -> None:
    """PAR-2, COMP-5: whichever way they end, one inside the other too; ``show`` tells of it."""
    bench.bodies["pay"] = lambda: 1 // (0 if fails else 1)

    def nested(flow: Flow) -> None:
        flow.saga(flow.parallel(*members(bench, flow, 2)), flow.action(bench.actors["pay"])).run()
        flow.side_effect("after", lambda: None)

    run = declare(bench, nested).run_sync()
    assert run.status == ("failed" if fails else "completed")
    ended = bench.engine.store.read(lambda tx: tx.all("SELECT kind, ended_at IS NOT NULL FROM {blocks} ORDER BY sequence"))
    assert [(kind, bool(done)) for kind, done in ended] == [("saga", True), ("parallel", True)]


# --- what is said of a block -----------------------------------------------------------------------------------------


def test_members_that_are_no_steps_cannot_be_held_back(bench: Workbench) -> None:
    """PAR-1: a block inside a limited block is refused, with the way out."""

    def fan(flow: Flow) -> Any:
        return flow.parallel(*members(bench, flow, 1), flow.parallel(*members(bench, flow, 2))).max_in_flight(1).run()

    run = declare(bench, fan).run_sync()
    with pytest.raises(FlowFailedError, match=r"number 2 of the block is parallel\(\) of 2: limit the steps inside it"):
        run.result()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(bench: Workbench, limit: int) -> None:
    def fan(flow: Flow) -> Any:
        return flow.parallel(*members(bench, flow, 1)).max_in_flight(limit).run()

    with pytest.raises(FlowFailedError, match="at least 1"):
        declare(bench, fan).run_sync().result()


def test_a_block_that_is_never_run_is_named(bench: Workbench) -> None:
    """API: BuilderNotRunError."""

    def fan(flow: Flow) -> None:
        flow.parallel(*members(bench, flow, 2))

    with pytest.raises(WouldBlockError, match=r"parallel\(\) of 2"):
        declare(bench, fan).run_sync()


# --- recovery --------------------------------------------------------------------------------------------------------


def test_members_that_are_held_back_are_no_business_of_doctor_and_kick(make_bench: MakeBench) -> None:
    """PAR-1, DOCTOR-1, KICK-1: they have no message, and nothing of them is lost; the one in flight is sent again."""
    for joins in (True, False):
        bench = make_bench(joins=joins)

        def fan(flow: Flow, bench: Workbench = bench) -> Any:
            return flow.parallel(*members(bench, flow, 4)).max_in_flight(1).run()

        run = declare(bench, fan).send()
        bench.drive(run)
        bench.lose_messages()
        bench.advance(3600)
        report = bench.sweep()
        assert report.repair.steps == 1
        kicked = kick(bench.engine, run.id, bench.sender)
        assert [row.sequence for row in kicked.rows] == [2]
        bench.work_until(lambda run=run: run.status == "completed")
        assert len([done for done in bench.done if done[0] == "book_hotel"]) == 4
