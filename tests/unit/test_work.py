"""How much work SQLite does, in instructions of its virtual machine: the same work is the same number, whatever the machine is doing.

What is live and what is touched may cost; how long a history is, and how many runs have ended, must not (C49, C56).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from dramatiq_saga import Flow, Settings, query
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.recovery.sweep import sweep
from tests.golden.workflows import declare
from tests.support import past
from tests.support.bench import Bench
from tests.support.plans import Work

EVERYTHING_ON = Settings.from_mapping({"repair.enabled": True, "reclaim.dead_workers.enabled": True})

#: Makes a bench on a file of its own, and counts what is done there.
Make = Callable[[Callable[[Bench], None]], tuple[Bench, Work]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []
    numbers = count()

    def bench(declare: Callable[[Bench], None]) -> tuple[Bench, Work]:
        work = Work(tmp_path / f"{next(numbers)}.db")
        made.append(Bench("", declare, clock=ManualClock(), settings=EVERYTHING_ON, database=work.database))
        return made[-1], work

    yield bench
    for one in made:
        one.close()


def declare_long(bench: Bench) -> None:
    """``steps(n)`` undoes n steps one after another, ``group(n)`` side by side. The others have n rounds in turn: blocks of two steps,
    signals, timers, steps with a recorded value behind each."""
    step = bench.actor(lambda: 1, actor_name="step")
    undo = bench.actor(lambda: None, actor_name="undo")

    def steps(flow: Flow, number: int) -> None:
        for _ in range(number):
            flow.action(step).compensate_with(undo).run()
        raise ValueError("back")

    def group(flow: Flow, number: int) -> None:
        flow.saga(*(flow.action(step).compensate_with(undo) for _ in range(number))).compensate_in_parallel().run()
        raise ValueError("back")

    def blocks(flow: Flow, number: int) -> None:
        for _ in range(number):
            flow.parallel(flow.action(step), flow.action(step)).run()

    def signals(flow: Flow, number: int) -> None:
        for _ in range(number):
            flow.await_signal("paid")

    def timers(flow: Flow, number: int) -> None:
        for _ in range(number):
            flow.sleep(10)

    def values(flow: Flow, number: int) -> None:
        for _ in range(number):
            flow.run(step)
            flow.side_effect("value", lambda: 1)

    for workflow in (steps, group, blocks, signals, timers, values):
        bench.workflow(workflow)


def until(bench: Bench, kind: str) -> None:
    """Deliver messages until the next is one of ``kind``."""
    while bench.messages[0].kind != kind:
        bench.deliver(bench.take())


@pytest.mark.parametrize("workflow", ["steps", "group"])
def test_an_undo_reads_the_same_however_long_its_rollback_is(make: Make, workflow: str) -> None:
    """C49, COMP-1: its claim, its outcome, and the next level, whether the others stand one behind another or side by side."""
    costs = []
    for steps in (6, 60):
        bench, work = make(declare_long)
        run = bench.start(workflow, steps)
        until(bench, "compensation")
        for _ in range(3):
            bench.deliver(bench.take())
        with work.counted() as cost:
            bench.deliver(bench.take())
        costs += cost
        bench.run()
        assert (bench.status(run), bench.undos(run)) == ("failed", [("undo", "completed")] * steps)
    assert costs[0] == costs[1] > 100


def test_a_sweep_does_the_same_work_however_many_runs_have_ended(make: Make) -> None:
    """C56, LOOP-1: monitor and doctor, with every switch on, whether there is anything to do or not."""
    costs: list[list[int]] = []
    for ended in (100, 1000):
        bench, work = make(declare)
        past.ended(bench.store, ended)
        past.at_work(bench.store, 20)
        costs.append([])
        for lost in (0, 2):
            past.lost(bench.store, lost) if lost else None
            with work.counted() as cost:
                assert sweep(bench.engine, bench.sender).as_dict()["repair"]["steps"] == lost
            costs[-1] += cost
    assert costs[0] == costs[1]
    assert min(costs[0]) > 100


def test_a_sweep_looks_at_the_undos_of_a_long_rollback_once_each(make: Make) -> None:
    """C49, DOCTOR-1: whether it is the turn of a level is asked for each of its rows, and answered by an index."""
    costs = []
    for steps in (40, 160):
        bench, work = make(declare_long)
        bench.start("steps", steps)
        until(bench, "compensation")
        bench.deliver(bench.take())
        bench.engine.clock.advance(600)  # type: ignore[attr-defined]
        with work.counted() as cost:
            assert sweep(bench.engine, bench.sender).as_dict()["repair"]["compensations"] == 1
        costs += cost
    assert costs[1] < 4 * costs[0]


@pytest.mark.parametrize("tag", [("stage", "c0001"), ("env", "live")], ids=["rare", "common"])
def test_a_list_by_tag_costs_the_same_however_many_runs_have_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: tuple[str, str]
) -> None:
    """C56: one that few runs carry, as an order's number, and one that all of them carry."""
    monkeypatch.setattr(sys.modules["dramatiq_saga.query"], "FEW", 50)
    costs = []
    for ended in (100, 1000):
        bench, work = make(declare)
        past.ended(bench.store, ended)
        bench.store.write(
            lambda tx: tx.run("INSERT INTO {tags} (run_id, name, value) SELECT id, 'env', 'live' FROM {flow_runs}")
        )
        with work.counted() as cost:
            assert len(list(query(tags=dict([tag]), limit=5, broker=bench.broker))) == (1 if tag[0] == "stage" else 5)
        costs += cost
    assert costs[0] == costs[1] > 20


@pytest.mark.parametrize("workflow", ["blocks", "signals", "values"])
def test_what_is_known_of_a_run_is_not_read_again(make: Make, workflow: str) -> None:
    """C49, PAR-4: what comes in turn: a round costs the same, however many there were before it in the run."""
    costs = []
    for rounds in (6, 60):
        bench, work = make(declare_long)
        run = bench.start(workflow, rounds)
        bench.deliver(bench.take())
        for _ in range(rounds - 1):
            ROUNDS[workflow](bench, run)
        assert bench.status(run) in ("running", "waiting")
        with work.counted() as cost:
            ROUNDS[workflow](bench, run)
        costs += cost
        assert bench.status(run) == "completed"
    assert costs[0] == costs[1] > 100


@pytest.mark.parametrize("workflow", ["blocks", "signals", "timers", "values", "steps"])
def test_what_a_run_does_costs_the_same_however_many_others_are_live(make: Make, workflow: str) -> None:
    """C56: others that wait for the same signal, at the same step, under the same heartbeat."""
    costs = []
    for others in (20, 200):
        bench, work = make(declare_long)
        past.at_work(bench.store, others)
        run = bench.start(workflow, 1)
        with work.counted() as cost:
            bench.deliver(bench.take())
            if workflow == "steps":
                bench.run()
            else:
                ROUNDS[workflow](bench, run)
        costs += cost
        assert bench.status(run) == ("failed" if workflow == "steps" else "completed")
    assert costs[0] == costs[1] > 100


def two_steps(bench: Bench, run: str) -> None:
    for _ in range(2):
        bench.deliver(bench.take())


def signal(bench: Bench, run: str) -> None:
    bench.signal(run, "paid")
    bench.deliver(bench.take())


def alarm(bench: Bench, run: str) -> None:
    bench.engine.clock.advance(10)  # type: ignore[attr-defined]
    assert bench.ring() == 1


def one_step(bench: Bench, run: str) -> None:
    until(bench, "step")  # past drives that have nothing left to do
    bench.deliver(bench.take())


#: What one round of each workflow of :func:`declare_long` is.
ROUNDS: dict[str, Callable[[Bench, str], None]] = {"blocks": two_steps, "signals": signal, "timers": alarm, "values": one_step}
