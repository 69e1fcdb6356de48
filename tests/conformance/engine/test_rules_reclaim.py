"""How long a claim may stay without an outcome: resolved once, when the row is scheduled."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from dramatiq_saga import Flow, Settings
from tests.support.bench import Background, Bench

#: What a step may say, and the window it leads to where the settings say (off, 120 s) and (on, 120 s).
SAID: dict[str, tuple[Any, int | None, int | None]] = {
    "nothing": (lambda b, after, enable: b, None, 120),
    "seconds": (lambda b, after, enable: after(b, 30), 30, 30),
    "on": (lambda b, after, enable: enable(b, True), 120, 120),
    "off": (lambda b, after, enable: enable(b, False), None, None),
    "seconds, then off": (lambda b, after, enable: enable(after(b, 30), False), 30, 30),
    "off, then seconds": (lambda b, after, enable: after(enable(b, False), 30), 30, 30),
    "seconds, then on": (lambda b, after, enable: enable(after(b, 30), True), 30, 30),
}


def of_step(builder: Any, said: str) -> Any:
    return SAID[said][0](builder, lambda b, n: b.reclaim_stale_after(n), lambda b, flag: b.enable_stale_reclaim(flag))


def of_undo(builder: Any, said: str) -> Any:
    return SAID[said][0](
        builder, lambda b, n: b.reclaim_compensation_stale_after(n), lambda b, flag: b.enable_compensation_stale_reclaim(flag)
    )


def settings(steps: bool, undos: bool) -> Settings:
    return Settings.from_mapping(
        {
            "actions.reclaim.stale_running.enabled": steps,
            "actions.reclaim.stale_running.after_seconds": 120,
            "sagas.reclaim.stale_running.enabled": undos,
            "sagas.reclaim.stale_running.after_seconds": 120,
        }
    )


def scheduled(make: Any, steps: bool, undos: bool, step_says: str, undo_says: str, *, late: bool = False) -> tuple[Bench, str]:
    """A run of one claimed and completed step, whose undo waits for its claim."""

    def declare(bench: Bench) -> None:
        def work() -> str:
            return "done"

        def undo() -> None: ...

        def fail() -> None:
            raise ValueError("no")

        step, back, fails = bench.actor(work), bench.actor(undo), bench.actor(fail)

        def order(flow: Flow) -> None:
            builder = flow.action(step).compensate_with((lambda made: back.message()) if late else back)
            of_undo(of_step(builder, step_says), undo_says).run()
            flow.run(fails)

        bench.workflow(order)

    bench = make(declare, settings=settings(steps, undos))
    run = bench.start("order")
    bench.deliver(bench.take())
    return bench, run


@pytest.mark.parametrize("steps", [False, True], ids=["steps off", "steps on"])
@pytest.mark.parametrize("said", list(SAID))
def test_the_window_of_a_step_is_stored_on_its_row_and_counted_from_its_claim(by_hand: Any, steps: bool, said: str) -> None:
    """RECLAIM-2, CLAIM-1: seconds, then on, then off, then the settings; the undo's dial has no say."""
    bench, run = scheduled(by_hand, steps, not steps, said, "nothing")
    expected = SAID[said][1 + steps]
    assert bench.one("SELECT reclaim_stale_after_seconds, reclaim_stale_at FROM {action_runs} WHERE run_id = ?", run) == (
        expected,
        None,
    )
    seen: list[Any] = []
    stop = bench.stop("outcome and decision")
    slow = Background(lambda: bench.deliver(bench.take()))
    stop.wait_reached()
    seen.append(bench.one("SELECT started_at, reclaim_stale_at FROM {action_runs} WHERE run_id = ?", run))
    stop.go()
    slow.result()
    started, stale = seen[0]
    assert stale == (None if expected is None else started + 1000 * expected)
    assert bench.one("SELECT reclaim_stale_at FROM {action_runs} WHERE run_id = ? AND sequence = 1", run) == (None,)


@pytest.mark.parametrize("undos", [False, True], ids=["undos off", "undos on"])
@pytest.mark.parametrize(("said", "late"), [*product(SAID, [False]), ("seconds", True), ("nothing", True)])
def test_the_window_of_an_undo_is_stored_with_the_step_and_carried_to_its_row(
    by_hand: Any, undos: bool, said: str, late: bool
) -> None:
    """RECLAIM-2: the same precedence for compensations, built beforehand or from the result; the step's dial has no say."""
    bench, run = scheduled(by_hand, not undos, undos, "nothing", said, late=late)
    expected = SAID[said][1 + undos]
    assert bench.one("SELECT comp_reclaim_stale_after_seconds FROM {action_runs} WHERE run_id = ?", run) == (expected,)
    bench.deliver(bench.take())
    failed = bench.deliver(bench.take())
    bench.runner.give_up(failed)
    assert bench.status(run) == "rolling_back"
    assert bench.one("SELECT reclaim_stale_after_seconds FROM {compensation_runs} WHERE run_id = ?", run) == (expected,)
    stop = bench.stop("undo outcome")
    slow = Background(lambda: bench.deliver(bench.take()))
    stop.wait_reached()
    started, stale = bench.one("SELECT started_at, reclaim_stale_at FROM {compensation_runs} WHERE run_id = ?", run)  # type: ignore[misc]
    stop.go()
    slow.result()
    assert stale == (None if expected is None else started + 1000 * expected)
    assert bench.status(run) == "failed"


def test_a_change_of_the_settings_leaves_scheduled_rows_alone(by_hand: Any) -> None:
    """RECLAIM-2: resolved once; what is scheduled later follows the new settings."""
    bench, run = scheduled(by_hand, True, True, "nothing", "nothing")
    bench.engine.settings = settings(False, False)
    bench.run()
    windows = bench.all("SELECT reclaim_stale_after_seconds FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run)
    assert windows == [(120,), (None,)]
    assert bench.one("SELECT reclaim_stale_after_seconds FROM {compensation_runs} WHERE run_id = ?", run) == (120,)


def test_a_step_without_an_undo_has_no_window_for_one(by_hand: Any) -> None:
    """RECLAIM-2: nothing is stored for what does not exist."""
    bench, run = scheduled(by_hand, True, True, "nothing", "nothing")
    bench.deliver(bench.take())
    assert bench.one("SELECT comp_reclaim_stale_after_seconds FROM {action_runs} WHERE run_id = ? AND sequence = 2", run) == (
        None,
    )
