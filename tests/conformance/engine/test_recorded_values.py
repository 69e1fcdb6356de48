"""``flow.now()``, ``uuid4()`` and ``random()``: recorded with the decision that follows from them (SIDE-1, HISTORY-1)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from dramatiq_saga import Flow
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from tests.support.application import Application
from tests.support.bench import Bench

MakeBench = Callable[..., Bench]


@pytest.fixture
def bench_on(database_url: str, table_prefix: str, tables_stand: None, request: pytest.FixtureRequest) -> MakeBench:
    """``bench_on(declare)``: a worker that the test holds in its hands, on each database."""

    def make(declare: Callable[[Bench], None], **options: Any) -> Bench:
        bench = Bench(database_url, declare, prefix=table_prefix, clock=options.pop("clock", None) or ManualClock(), **options)
        request.addfinalizer(bench.close)
        return bench

    return make


class Walks:
    """What each walk of the function was given, and what its steps were called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.steps: list[Any] = []

    def declare(self, bench: Bench) -> None:
        step = bench.actor(lambda *args: self.steps.append(args), actor_name="step")

        def drawn(flow: Flow) -> Any:
            values = (flow.now(), flow.uuid4(), flow.random())
            self.seen.append(values)
            flow.run(step, str(values[1]))
            self.seen[-1] += (flow.now(),)
            flow.run(step, "again")
            return [values[0].isoformat(), str(values[1]), values[2]]

        def before_side_effect(flow: Flow) -> Any:
            number = flow.random()
            self.seen.append((number,))
            return flow.side_effect("rate", lambda: number)

        bench.workflow(drawn)
        bench.workflow(before_side_effect)


def recorded(bench: Bench, run_id: str) -> list[tuple[int, str]]:
    return [
        (row[0], row[1])
        for row in bench.all("SELECT sequence, name FROM {side_effects} WHERE run_id = ? ORDER BY sequence", run_id)
    ]


def test_every_walk_is_given_the_same_values(bench_on: MakeBench) -> None:
    """SIDE-1: the first time too they are the recorded ones; each takes a sequence; a second now() is a later moment."""
    walks = Walks()
    bench = bench_on(walks.declare)
    began = bench.store.clock.now()
    run_id = bench.start("drawn")
    bench.deliver(bench.take())
    assert recorded(bench, run_id) == [(1, "now"), (2, "uuid4"), (3, "random")]
    bench.store.clock.advance(90)  # type: ignore[attr-defined]
    bench.engine.cache.drop(run_id)
    bench.run()
    assert bench.status(run_id) == "completed"
    assert recorded(bench, run_id) == [(1, "now"), (2, "uuid4"), (3, "random"), (5, "now")]
    first, second, third = walks.seen
    assert first == second[:3] == third[:3]
    moment, key, number = first
    assert moment == datetime.fromtimestamp(began / 1000, UTC)
    assert moment.tzinfo is UTC
    assert isinstance(key, UUID)
    assert key.version == 4
    assert 0 <= number < 1
    assert second[3] == third[3] == moment + timedelta(seconds=90)
    assert walks.steps == [(str(key),), ("again",)]
    result = bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run_id)
    assert result is not None
    assert json.loads(bytes(result[0])) == [moment.isoformat(), str(key), number]
    assert bench.events(run_id).count("side_effect.recorded") == 4


@pytest.mark.claims_alone
def test_a_decision_that_loses_draws_anew(bench_on: MakeBench) -> None:
    """DRIVE-1, SIDE-1: what was drawn for it was never recorded, and nothing has followed from it."""
    walks = Walks()
    clock = ManualClock()
    bench, other = bench_on(walks.declare, clock=clock), bench_on(walks.declare, clock=clock)
    run_id = bench.start("drawn")
    bench.overtake("decision", lambda: other.deliver(Outgoing("drive", run_id, "drawn", "default")))
    assert bench.deliver(bench.take()) is Driven.IDLE
    lost, won = walks.seen
    assert lost[1:] != won[1:]
    assert [len(bench.messages), len(other.messages)] == [0, 1]
    other.run()
    assert walks.steps[0] == (str(won[1]),)
    assert {values[1] for values in walks.seen[1:]} == {won[1]}


def test_a_value_in_front_of_a_side_effect_is_recorded_first(bench_on: MakeBench) -> None:
    """SIDE-1, DRIVE-2: a side effect is called once what it may rest on cannot change any more; the run drives itself on."""
    walks = Walks()
    bench = bench_on(walks.declare)
    run_id = bench.start("before_side_effect")
    assert bench.deliver(bench.take()) is Driven.DECIDED
    assert recorded(bench, run_id) == [(1, "random")]
    bench.run()
    assert bench.status(run_id) == "completed"
    assert recorded(bench, run_id) == [(1, "random"), (2, "rate")]
    assert len(walks.seen) == 2
    assert walks.seen[0] == walks.seen[1]
    result = bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run_id)
    assert result is not None
    assert json.loads(bytes(result[0])) == walks.seen[0][0]


def test_the_drive_that_goes_on_from_a_recorded_value_cannot_be_forgotten(bench_on: MakeBench) -> None:
    """DRIVE-2: the decision that records it leaves a wake that nobody has seen, and the message of the drive that sees it."""
    walks = Walks()
    clock = ManualClock()
    bench, other = bench_on(walks.declare, clock=clock), bench_on(walks.declare, clock=clock)
    run_id = bench.start("before_side_effect")
    bench.deliver(bench.take())
    assert bench.one("SELECT status, wakes - wakes_seen FROM {flow_runs} WHERE id = ?", run_id) == ("running", 1)
    [left] = bench.messages
    assert left.kind == "drive"
    assert other.deliver(left) is Driven.DECIDED  # in another process, that has nothing in its cache
    assert other.status(run_id) == "completed"
    assert walks.seen[-1] == walks.seen[0]
    assert bench.deliver(left) is Driven.ENDED


def test_recorded_values_are_the_same_in_every_setting(every_app: Application) -> None:
    """SIDE-1, SYNC-1: with workers, brokers and databases of each kind, and in run_sync."""
    seen: list[Any] = []
    step = every_app.step("step", gives="done")

    @every_app.workflow
    def drawn(flow: Flow) -> Any:
        values = [flow.now().isoformat(), str(flow.uuid4()), flow.random()]
        seen.append(values)
        flow.run(step)
        return values

    for handle in (every_app.run(drawn), drawn.run_sync()):
        assert handle.result() == seen[0]
        assert seen.count(seen[0]) == 2
        del seen[:2]
    assert seen == []
