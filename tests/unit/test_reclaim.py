"""When a running row may be claimed again: resolved once, when it is scheduled, and stored on it (RECLAIM-1, RECLAIM-2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dramatiq_saga import Settings
from tests.support.workbench import MakeBench, Workbench

Describe = Callable[[Any], Any]


def reclaim(*, actions: bool = False, sagas: bool = False, after: int = 900) -> Settings:
    """Settings that turn reclaim on, for steps and for compensations apart."""
    return Settings.from_mapping(
        {
            "actions.reclaim.stale_running": {"enabled": actions, "after_seconds": after},
            "sagas.reclaim.stale_running": {"enabled": sagas, "after_seconds": after + 1},
        }
    )


def windows(bench: Workbench, describe: Describe) -> tuple[Any, Any]:
    """The windows that a step so described is stored with: its own, and that of its compensation."""

    def trip(flow: Any, traveller: str) -> Any:
        step = flow.action(bench.actors["book_hotel"], traveller).compensate_with(bench.actors["cancel_hotel"], traveller)
        return describe(step).run()

    bench.flow_function = trip
    run = bench.send("ada")
    bench.drive(run)
    own, undo = bench.row(run, 1, "reclaim_stale_after_seconds", "comp_reclaim_stale_after_seconds")
    return own, undo


@pytest.mark.parametrize(
    ("describe", "settings", "expected"),
    [
        (lambda step: step, reclaim(), (None, None)),
        (lambda step: step, reclaim(actions=True), (900, None)),
        (lambda step: step, reclaim(sagas=True), (None, 901)),
        (lambda step: step.reclaim_stale_after(5), reclaim(), (5, None)),
        (lambda step: step.reclaim_stale_after(5), reclaim(actions=True, sagas=True), (5, 901)),
        (lambda step: step.enable_stale_reclaim(True), reclaim(), (900, None)),
        (lambda step: step.enable_stale_reclaim(False), reclaim(actions=True, sagas=True), (None, 901)),
        (lambda step: step.enable_stale_reclaim(False).reclaim_stale_after(5), reclaim(), (5, None)),
        (lambda step: step.reclaim_stale_after(5).enable_stale_reclaim(False), reclaim(actions=True), (5, None)),
        (lambda step: step.reclaim_compensation_stale_after(7), reclaim(), (None, 7)),
        (lambda step: step.enable_compensation_stale_reclaim(True), reclaim(), (None, 901)),
        (lambda step: step.enable_compensation_stale_reclaim(False), reclaim(actions=True, sagas=True), (900, None)),
    ],
)
def test_explicit_seconds_come_before_on_and_off_and_those_before_the_settings(
    make_bench: MakeBench, describe: Describe, settings: Settings, expected: tuple[int | None, int | None]
) -> None:
    """RECLAIM-2; steps and compensations are switched apart (RECLAIM-1)."""
    assert windows(make_bench(settings=settings), describe) == expected


def test_what_was_stored_counts_and_not_what_the_settings_say_later(make_bench: MakeBench) -> None:
    """RECLAIM-2: resolved once; the claim derives the deadline from the row (CLAIM-1)."""
    bench = make_bench(settings=reclaim(actions=True, after=50))
    run = bench.send()
    bench.drive(run)
    bench.engine.settings = reclaim()
    deadlines = []

    def body(*_: Any) -> None:
        deadlines.append(bench.row(run, 1, "reclaim_stale_at")[0] - bench.clock.now())

    bench.bodies["book_hotel"] = body
    run.kick()
    bench.work_until(lambda: run.status == "completed")
    assert deadlines == [50_000]


def test_an_undo_takes_its_window_from_its_step(make_bench: MakeBench) -> None:
    """RECLAIM-2: the compensation's window is stored with the step, and with its own row once it is planned."""
    bench = make_bench(settings=reclaim(sagas=True, after=30))
    bench.bodies["book_flight"] = lambda *_: 1 / 0
    run = bench.send()
    bench.work_until(lambda: len(run.actions()) == 2 and run.actions()[1].status == "failed")
    run.compensate()
    assert bench.row(run, 1, "reclaim_stale_after_seconds", table="compensation_runs") == (31,)
