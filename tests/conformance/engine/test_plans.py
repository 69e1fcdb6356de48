"""No statement of the engine costs more, the more runs have ended (C56).

The statements are those that a database really executes while everything that there is happens once: every scenario of the golden
histories, sweeps, loops, an operator's calls, a queue. So one that is new cannot be forgotten here. Each database is asked how it finds
the rows of each, on a store of some thousands of runs that have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dramatiq_saga import Flow, Settings
from dramatiq_saga.brokers import dead_letters
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.recovery import doctor, timer_loop
from dramatiq_saga.recovery.explain import Declared
from dramatiq_saga.recovery.heartbeat import Heartbeat
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.recovery.stuck import stuck
from dramatiq_saga.recovery.sweep import sweep
from dramatiq_saga.store.database import Store
from tests.golden.workflows import SCENARIOS, declare
from tests.support import past
from tests.support.application import Applications
from tests.support.bench import Bench
from tests.support.plans import listen, ways

FINISHED, LIVE = 2_000, 40

EVERYTHING_ON = Settings.from_mapping({"repair.enabled": True, "reclaim.dead_workers.enabled": True})


@contextmanager
def answered_without_the_past(store: Store, *, at_least: int, besides: tuple[str, ...] = ()) -> Iterator[None]:
    """Whatever is executed meanwhile finds its rows without those of runs that have ended; ``besides``: indexes that may hold them."""
    with listen() as heard:
        yield
    if store.dialect == "sqlite":  # a file may never be analyzed; servers do it by themselves
        check(store, heard, besides)
    past.analyze(store)
    check(store, heard, besides)
    assert len(heard) >= at_least, "\n".join(heard)


def check(store: Store, heard: dict[str, tuple[Any, ...]], besides: tuple[str, ...]) -> None:
    offences = [
        f"{way.text}\n    of {sql}"
        for sql, params in heard.items()
        for way in ways(store, sql, params)
        if way.reads_what_has_ended and way.index not in besides
    ]
    assert offences == [], "\n".join(offences)


@pytest.fixture
def bench(database_url: str, table_prefix: str) -> Iterator[Bench]:
    """The golden workflows on a store with a past."""
    bench = Bench(database_url, declare, prefix=table_prefix, clock=ManualClock(), settings=prefixed(table_prefix))
    past.ended(bench.store, FINISHED)
    yield bench
    bench.close()


def prefixed(prefix: str, *, base: Settings = EVERYTHING_ON) -> Settings:
    return Settings.from_mapping({"schema.table_prefix": prefix}, base=base)


def asked(tx: Any) -> set[Any]:
    """The queues are read, and hold no message of a run."""
    assert dead_letters.waiting(tx, looked_at=1000) is not None
    return set()


def test_nothing_that_a_run_does_reads_what_has_ended(bench: Bench) -> None:
    """C56: starting, driving, claiming, outcomes, rollbacks, signals, timers, children, cancelling: every golden scenario."""
    with answered_without_the_past(bench.store, at_least=100):
        for name, scenario in SCENARIOS.items():
            scenario(bench, name)


def test_no_sweep_and_no_loop_reads_what_has_ended(bench: Bench) -> None:
    """C56, LOOP-1, RECLAIM-5: the monitor, every rule of the doctor and what it counts, workers' loops, heartbeats; a kick; what is stuck."""
    engine, sender = bench.engine, bench.sender
    past.at_work(bench.store, LIVE)
    past.lost(bench.store, 3)
    with answered_without_the_past(bench.store, at_least=40):
        for _ in range(2):
            sweep(engine, sender)
            doctor.candidates(engine)
            timer_loop.look(engine, sender)
            bench.engine.clock.advance(3600)  # type: ignore[attr-defined]  # everything is overdue, and has been lost
        kick(engine, "live-000000000000", sender)
        everything_off = prefixed(engine.settings.schema.table_prefix, base=Settings())
        for settings in (engine.settings, everything_off):
            engine.store.read(
                lambda tx, settings=settings: stuck(  # type: ignore[misc]
                    tx, settings=settings, now=engine.now(), limit=20, declared=Declared(["trip"], ["book"]), asked=asked
                )
            )
        heart = Heartbeat(engine)
        heart.enter()
        heart.beat()
        heart.leave()
        heart.forget()


def test_prune_reads_ended_runs_in_order_and_each_of_their_rows_by_its_run(bench: Bench) -> None:
    """PRUNE-1, C56: what is still too young to go costs nothing."""
    before = bench.engine.now() - 3_600_000 - (FINISHED - 3) * past.APART
    with answered_without_the_past(bench.store, at_least=12, besides=("flow_ended",)):
        assert prune(bench.store, before=before, dry_run=True).pruned == 3
        assert prune(bench.store, before=before).pruned == 3


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb", "stub"])
def test_no_queue_reads_what_has_ended(kind: str, applications: Applications) -> None:
    """C56, QUEUE-1, DRIVE-3: reserving, acknowledging, retrying and waiting, beside dead letters and runs that have ended; and what is
    noted of messages that another broker carries."""
    app = applications(kind)
    past.ended(app.store, FINISHED)
    tries: list[int] = []

    def body(number: int) -> int:
        tries.append(number)
        if len(tries) == 1:
            raise ValueError("once")
        return number

    step = app.actor(body, actor_name="step", max_retries=1)

    @app.workflow
    def few(flow: Flow) -> Any:
        flow.sleep(0.01)
        return flow.run(step, 1), flow.parallel(flow.action(step, 2), flow.action(step, 3)).run()

    with answered_without_the_past(app.store, at_least=30, besides=("rate_expiry",)):
        app.run(few)
        app.drain()
        app.stop()
        sweep(app.engine, app.middleware.sender(app.broker))
