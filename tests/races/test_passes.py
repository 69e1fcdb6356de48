"""One pass at a time: who does it, who skips it, and what becomes of one whose process dies (LOOP-1, C58).

Benches stand for processes; they share their tables, and a clock that moves when the test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dramatiq_saga.clock import ManualClock
from dramatiq_saga.errors import StoreError
from dramatiq_saga.recovery.passes import LEASE, MONITOR, REPAIR, Skipped, in_turn
from tests.races.conftest import MakeBench
from tests.support.bench import Bench

on_sqlite = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
every_database = pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)


def come(worker: Bench, do: Callable[[], Any] = lambda: "done", *, every: float | None = None, name: str = MONITOR) -> Any:
    return in_turn(worker.engine, name, do, every=every)


def begun(worker: Bench) -> int:
    """How many passes of the monitor there were."""
    (row,) = worker.all("SELECT number FROM {passes} WHERE name = 'monitor'")
    return int(row[0])


@every_database
@pytest.mark.parametrize("earlier", [0, 1], ids=["the first ever", "a later one"])
def test_of_those_who_come_for_a_pass_together_one_does_it(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    """C58: both have seen that nobody is at it; the loser does nothing, and says who won."""
    first, second = bench(), bench()
    for _ in range(earlier):
        come(first)
    plain = first.store.write

    def beaten(operation: Any) -> Any:
        monkeypatch.setattr(first.store, "write", plain)
        assert come(second) == "done"
        return plain(operation)

    monkeypatch.setattr(first.store, "write", beaten)
    lost = come(first, lambda: pytest.fail("both have done it"))
    assert isinstance(lost, Skipped)
    assert lost.holder.rpartition("-")[2].isdecimal()
    assert lost.ended_at is not None
    assert begun(first) == earlier + 1


@on_sqlite
def test_a_pass_that_is_under_way_is_left_to_whoever_is_at_it(bench: MakeBench) -> None:
    """C58, LOOP-1: also by a command that would do one at any time; another kind of pass is nobody's hindrance."""
    first, second = bench(), bench()
    seen: list[Any] = []
    come(first, lambda: seen.extend([come(second), come(second, every=3600), come(second, name=REPAIR)]))
    assert [isinstance(one, Skipped) for one in seen] == [True, True, False]
    assert seen[0].line().startswith(f"monitor skipped: {seen[0].holder} is at it since 2023-")
    assert come(second) == "done"


@on_sqlite
def test_a_pass_is_due_once_its_interval_is_over_whoever_did_the_last_one(bench: MakeBench, clock: ManualClock) -> None:
    """LOOP-1: N processes that come once an interval do one pass per interval, not N."""
    workers = [bench() for _ in range(3)]
    for _ in range(4):
        reports = [come(worker, every=30) for worker in workers for _ in range(2)]
        assert reports.count("done") == 1
        clock.advance(26)
        assert isinstance(come(workers[1], every=30), Skipped)
        assert "has done it at" in come(workers[1], every=30).line()
        clock.advance(1)
    assert begun(workers[0]) == 4


class Died(BaseException):
    """What a process does not survive."""


def die(worker: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a pass, and never end it."""

    def gone() -> None:
        monkeypatch.setattr(worker.store, "write", refuse)
        raise Died

    with pytest.raises(Died):
        come(worker, gone)
    assert worker.all("SELECT ended_at FROM {passes}") == [(None,)]


def refuse(*_: Any) -> Any:
    raise StoreError("the database is away")


@on_sqlite
@pytest.mark.parametrize(("every", "waits"), [(30, 30), (5, 5), (None, LEASE), (600, 600)])
def test_a_worker_that_dies_in_a_pass_delays_the_next_by_an_interval_at_most(
    bench: MakeBench, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, every: float | None, waits: float
) -> None:
    """LOOP-1: and a command by the lease."""
    first, second = bench(), bench()
    die(first, monkeypatch)
    clock.advance(0.85 * waits)
    assert isinstance(come(second, every=every), Skipped)
    clock.advance(0.15 * waits)
    assert come(second, every=every) == "done"


@on_sqlite
@pytest.mark.parametrize("every", [30, None])
def test_a_clock_that_was_set_back_stops_no_pass(
    bench: MakeBench, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, every: float | None
) -> None:
    """C52: the row is two hours ahead, of a pass that has ended or of one whose process has died."""
    first, second = bench(), bench()
    come(first, every=every)
    clock.advance(-7200)
    assert come(second, every=every) == "done"
    die(first, monkeypatch) if every is None else None
    clock.advance(-7200)
    assert come(second, every=every) == "done"


@on_sqlite
def test_whoever_outlives_its_lease_does_not_end_the_pass_of_the_next(bench: MakeBench, clock: ManualClock) -> None:
    """The token: a pass that hung for longer than the lease goes on beside the next one, and its end is its own."""
    slow, second, third = bench(), bench(), bench()
    hangs, go_on = threading.Event(), threading.Event()
    seen: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(come, slow, lambda: (hangs.set(), go_on.wait(20)))
        assert hangs.wait(20)
        clock.advance(LEASE)

        def next_pass() -> None:
            go_on.set()
            ended.result()
            seen.append(come(third))

        come(second, next_pass)
    assert isinstance(seen[0], Skipped)
    assert seen[0].ended_at is None


@on_sqlite
def test_a_pass_that_raises_makes_way_for_the_next(bench: MakeBench) -> None:
    first, second = bench(), bench()
    with pytest.raises(StoreError):
        come(first, refuse)
    assert come(second) == "done"


@on_sqlite
def test_a_pass_whose_end_cannot_be_written_is_done_all_the_same(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did is done and told; the others wait for the lease."""
    first, second = bench(), bench()

    def work() -> str:
        monkeypatch.setattr(first.store, "write", refuse)
        return "done"

    assert come(first, work) == "done"
    assert isinstance(come(second), Skipped)
