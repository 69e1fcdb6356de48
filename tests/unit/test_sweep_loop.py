"""The sweeps inside workers: when a process comes for a pass, what it says, and what it outlives (LOOP-1)."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from dramatiq_saga import Settings
from dramatiq_saga.errors import StoreError
from dramatiq_saga.recovery import loop as loops
from dramatiq_saga.recovery.loop import SweepLoop
from tests.support.waiting import eventually
from tests.support.workbench import MakeBench, Workbench

#: Processes are spread by chance, and here always by the same.
SEEDS = itertools.count(1)

LOOPING = {"repair.enabled": True, "loop.enabled": True}


def looping(make_bench: MakeBench, *, monitor: float = 30, repair: float = 60, **options: Any) -> Workbench:
    values = {**LOOPING, "loop.monitor_seconds": monitor, "loop.repair_seconds": repair, **options.pop("settings", {})}
    return make_bench(settings=Settings.from_mapping(values), **options)


def passes(bench: Workbench) -> dict[str, int]:
    """How many passes of each kind there were, whoever did them."""
    return dict(bench.engine.store.read(lambda tx: tx.all("SELECT name, number FROM {passes}")))


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "saga-sweeps"]


class Monotonic:
    """The time of processes whose loops a test turns by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(loops, "time", SimpleNamespace(monotonic=lambda: self.now))

    def run(self, *workers: tuple[Workbench, SweepLoop], seconds: int, wall: float = 1.0) -> None:
        """Let that much time go by, in which everybody's wall clock goes ``wall`` times as fast."""
        for _, loop in workers:
            if not loop._due:
                loop.begin()
        for _ in range(seconds):
            self.now += 1
            workers[0][0].advance(wall)
            for _, loop in workers:
                assert loop.act() >= 0


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> Monotonic:
    return Monotonic(monkeypatch)


def process(make_bench: MakeBench, path: Path, first: Workbench | None = None, **options: Any) -> tuple[Workbench, SweepLoop]:
    bench = looping(make_bench, database=path, **options)
    if first is not None:
        bench.engine.store.clock = first.clock
    loop = SweepLoop(bench.engine, bench.sender)
    loop._spread.seed(next(SEEDS))
    return bench, loop


def test_many_processes_do_one_pass_per_interval(make_bench: MakeBench, tmp_path: Path, monotonic: Monotonic) -> None:
    """LOOP-1: whichever of them comes first; in ten minutes some twenty, and not a hundred."""
    first = process(make_bench, tmp_path / "shared.db")
    others = [process(make_bench, tmp_path / "shared.db", first[0]) for _ in range(4)]
    monotonic.run(first, *others, seconds=600)
    done = passes(first[0])
    assert 16 <= done["monitor"] <= 22
    assert 8 <= done["repair"] <= 11


def test_one_process_by_itself_does_a_pass_every_interval(make_bench: MakeBench, tmp_path: Path, monotonic: Monotonic) -> None:
    """LOOP-1: and none before the first interval is over."""
    alone = process(make_bench, tmp_path / "alone.db")
    monotonic.run(alone, seconds=23)
    assert passes(alone[0]) == {}
    monotonic.run(alone, seconds=600)
    done = passes(alone[0])
    assert 14 <= done["monitor"] <= 26
    assert 7 <= done["repair"] <= 13


@pytest.mark.parametrize("step", [-7200, 7200])
def test_a_clock_that_is_set_stops_no_loop(make_bench: MakeBench, tmp_path: Path, monotonic: Monotonic, step: float) -> None:
    """C52: intervals inside a process are monotonic; a wall clock that jumps two hours delays no pass by more than an interval."""
    alone = process(make_bench, tmp_path / "alone.db")
    monotonic.run(alone, seconds=120)
    before = passes(alone[0])["monitor"]
    alone[0].advance(step)
    monotonic.run(alone, seconds=37)
    assert passes(alone[0])["monitor"] > before


def test_where_repair_is_off_a_loop_monitors_only(make_bench: MakeBench, tmp_path: Path, monotonic: Monotonic) -> None:
    """DOCTOR-1: off until enabled."""
    alone = process(make_bench, tmp_path / "alone.db", settings={"repair.enabled": False})
    monotonic.run(alone, seconds=200)
    assert passes(alone[0]).keys() == {"monitor"}


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "deferred"])
def test_workers_with_a_loop_make_good_what_was_lost(make_bench: MakeBench, joins: bool) -> None:
    """LOOP-1: a message is gone, there is no cron, and the run completes."""
    bench = looping(make_bench, monitor=0.1, repair=0.1, joins=joins)
    run = bench.send()
    bench.drive(run)
    bench.lose_messages()
    bench.advance(60)
    bench.work_until(lambda: run.status == "completed")
    assert loop_threads() == []


def test_a_worker_without_a_loop_does_not_sweep(make_bench: MakeBench) -> None:
    """loop.enabled is off by default."""
    bench = make_bench(settings=Settings.from_mapping({"repair.enabled": True, "loop.monitor_seconds": 0.1}))
    with bench.working():
        assert loop_threads() == []
    assert passes(bench) == {}


def test_a_held_run_of_a_queue_that_the_worker_does_not_consume_is_left_to_one_that_does(
    make_bench: MakeBench, tmp_path: Path, monotonic: Monotonic
) -> None:
    """DRIVE-6: a worker of other queues sends a message, and replays nothing."""
    bench, loop = process(make_bench, tmp_path / "queues.db")
    run = bench.send()
    bench.lose_messages()
    bench.write("UPDATE {flow_runs} SET hold_until = 1 WHERE id = ?", run.id)
    bench.engine.queues = {"another"}
    monotonic.run((bench, loop), seconds=37)
    assert bench.asked() == [("drive", None)]
    assert bench.run_row(run, "wakes > wakes_seen") == (1,)
    bench.engine.queues = {"default"}
    bench.write("UPDATE {flow_runs} SET hold_until = 1 WHERE id = ?", run.id)
    monotonic.run((bench, loop), seconds=37)
    assert bench.run_row(run, "wakes > wakes_seen") == (0,)


def test_a_loop_outlives_what_goes_wrong_and_ends_with_the_last_worker(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOOP-1, C41: a store that is away, a fault in a pass; two workers of one process share a loop."""
    bench = looping(make_bench, monitor=0.1, repair=0.1)
    came = threading.Semaphore(0)
    errors: list[Exception] = [StoreError("the server is away"), ZeroDivisionError("a fault")]

    def come(*_: Any, **__: Any) -> Any:
        came.release()
        raise errors[0]

    monkeypatch.setattr(loops, "monitor_in_turn", come)
    loop = SweepLoop(bench.engine, bench.sender)
    loop.start("one")
    loop.start("another")
    for _ in range(3):
        assert came.acquire(timeout=20)
    errors.reverse()
    loop.stop("another")
    loop.stop("another")
    for _ in range(3):
        assert came.acquire(timeout=20)
    eventually(lambda: passes(bench).get("repair"), because="a monitor that fails does not keep the doctor from its pass")
    loop.stop("one")
    assert loop_threads() == []


def test_a_loop_says_what_it_did_once_and_nothing_about_a_quiet_pass(
    make_bench: MakeBench, tmp_path: Path, monotonic: Monotonic
) -> None:
    """A row that is out of repairs is found at every pass, and told at the first."""
    alone = process(make_bench, tmp_path / "alone.db", settings={"repair.max_attempts": 1})
    bench = alone[0]
    with structlog.testing.capture_logs() as logs:
        monotonic.run(alone, seconds=100)
        assert logs == []
        run = bench.send()
        bench.drive(run)
        for _ in range(8):
            bench.lose_messages()
            monotonic.run(alone, seconds=75)
    assert [(entry["event"], entry["did"]) for entry in logs] == [
        ("swept", "repair: 1 sent again (steps)"),
        ("swept", "repair: 1 out of repairs: kick them"),
    ]
