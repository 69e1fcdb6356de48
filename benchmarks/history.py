"""What a history costs: the same looks and writes beside a few runs that have ended, and beside a million of them.

    python -m benchmarks.history [--runs N] [--live N] [--url URL] [--times N]

Makes a store with 1,000 ended runs and one with N (a million, unless said otherwise), each with 1,000 live ones of which nothing is lost,
by default on SQLite files; with ``--url`` on that server, under prefixes of its own. Then it measures on both, best and median of some
times, wall clock, and the processor time of this process (which for a server is the client's share alone):

* sweep: monitor and doctor, all switches and leases on; then one that finds 100 lost messages; and the look of a worker's timer loop
* a run: starting, its first drive, one step from its claim to its outcome and the decision behind it; reserving and acknowledging
* looking: pages of the list, how many runs there are by status, what is stuck, what would be pruned; and pruning 100 runs

What only reads live rows costs the same in both columns. Figures are of this machine and of this moment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dramatiq

from dramatiq_saga import Flow, Settings, query
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.recovery import timer_loop
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.recovery.stuck import stuck
from dramatiq_saga.recovery.sweep import sweep
from dramatiq_saga.statuses import FLOW_LIVE, FlowStatus
from tests.support import past
from tests.support.bench import Bench

Figures = tuple[float, float, float]  # milliseconds: best, median, of the processor

SETTINGS: dict[str, Any] = {"repair.enabled": True, "reclaim.dead_workers.enabled": True}


def declare(bench: Bench) -> None:
    step = bench.actor(lambda number: number, actor_name="book_hotel")

    def trip(flow: Flow, count: int) -> list[int]:
        return [flow.run(step, number) for number in range(count)]

    bench.workflow(trip)


class Store:
    """A bench on a store with a past, and a queue beside it."""

    def __init__(self, url: str, prefix: str, *, ended: int, live: int) -> None:
        self.bench = Bench(
            url, declare, prefix=prefix, settings=Settings.from_mapping({**SETTINGS, "schema.table_prefix": prefix})
        )
        self.ended = ended
        began = time.perf_counter()
        past.ended(self.bench.store, ended)
        past.at_work(self.bench.store, live)
        past.analyze(self.bench.store)
        print(f"{ended:>9,} ended and {live:,} live runs made in {time.perf_counter() - began:.0f} s", flush=True)
        self.broker = DatabaseBroker(self.bench.store.database, prefix=prefix)
        dramatiq.actor(lambda: None, actor_name="nothing", broker=self.broker)

    def drop(self) -> None:
        store = self.bench.store
        store.database.drop_tables(store.models.all())
        store.database.execute_sql(f"DROP TABLE {store.prefix}schema_migrations")
        store.database.close()

    # --- what is measured --------------------------------------------------------------------------------------------

    def everything(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        bench, engine, sender = self.bench, self.bench.engine, self.bench.sender
        yield "sweep, nothing lost", lambda: sweep(engine, sender)
        yield "sweep, 100 messages lost", self.sweep_of_lost
        yield "look of a timer loop", lambda: timer_loop.look(engine, sender)
        yield "start of a run", lambda: bench.start("trip", 2)
        yield "first drive", self.next("drive")
        yield "step: claim, outcome, decision", self.next("step")
        yield "queue: reserve, acknowledge", self.reserve
        newest = query(broker=bench.broker, limit=50)
        deep = datetime.fromtimestamp((engine.now() - 3_600_000 - min(25_000, self.ended // 2) * past.APART) / 1000, UTC)
        yield "list: page 1", lambda: list(newest)
        yield "list: page 500", lambda: list(newest.where(before=deep))
        yield "list: failed, page 1", lambda: list(newest.where(status="failed"))
        yield "list: live, page 1", lambda: list(newest.where(status=list(FLOW_LIVE)))
        yield "list: by tag, page 1", lambda: list(newest.where(tags={"stage": "c0001"}))
        yield "count: live, by status", lambda: [query(broker=bench.broker, status=word).count() for word in FLOW_LIVE]
        yield "count: all, by status", lambda: [query(broker=bench.broker, status=word).count() for word in FlowStatus]
        yield "stuck", lambda: bench.store.read(
            lambda tx: stuck(tx, settings=engine.settings, now=engine.now(), limit=20, declared=None)
        )  # fmt: skip
        before = engine.now() - 3_600_000 - (self.ended - 100) * past.APART
        yield "prune --dry-run of 100 runs", lambda: prune(bench.store, before=before, dry_run=True)
        yield "prune of 100 runs", lambda: prune(bench.store, before=before)

    def sweep_of_lost(self) -> None:
        assert sweep(self.bench.engine, self.bench.sender).as_dict()["repair"]["steps"] == 100

    def next(self, kind: str) -> Callable[[], Any]:
        def deliver() -> None:
            message = next(message for message in self.bench.sender.queue if message.kind == kind)
            self.bench.sender.queue.remove(message)
            self.bench.deliver(message)

        return deliver

    def reserve(self) -> None:
        message = next(self.consumer)
        assert message is not None
        self.consumer.ack(message)

    @contextmanager
    def ready(self, name: str, times: int) -> Iterator[int]:
        """What a measure needs, put there beforehand; how often it is taken."""
        bench = self.bench
        if name == "sweep, 100 messages lost":
            past.lost(bench.store, 100)
            yield 1
            bench.store.write(lambda tx: [tx.run(f"DELETE FROM {{{t}}} WHERE {k} LIKE ?", ("lost-%",)) for t, k in LOST])
        elif name == "first drive":
            bench.sender.queue.clear()
            for _ in range(times):
                bench.start("trip", 2)
            yield times
        elif name.startswith("queue"):
            self.consumer = self.broker.consume("default", prefetch=1, timeout=10)
            for _ in range(times):
                self.broker.enqueue(self.broker.get_actor("nothing").message())
            yield times
            self.consumer.close()
        else:
            yield 1 if name == "prune of 100 runs" else times

    def measure(self, times: int) -> Iterator[tuple[str, Figures]]:
        for name, look in self.everything():
            with self.ready(name, times) as often:
                walls, used = [], time.process_time()
                for _ in range(often):
                    began = time.perf_counter()
                    look()
                    walls.append(1000 * (time.perf_counter() - began))
                yield name, (min(walls), statistics.median(walls), 1000 * (time.process_time() - used) / often)


LOST = (("action_runs", "run_id"), ("flow_runs", "id"), ("flow_events", "run_id"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=1_000)
    parser.add_argument("--url")
    parser.add_argument("--times", type=int, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        stores = [
            Store(chosen.url or f"sqlite:///{Path(directory, f'{name}.db')}", f"bench{os.getpid()}_{name}_", ended=ended, live=chosen.live)
            for name, ended in (("few", 1_000), ("many", chosen.runs))
        ]  # fmt: skip
        try:
            print(
                f"{'milliseconds: best, median, processor':38s} {'beside ' + format(1_000, ','):>28s} {f'beside {chosen.runs:,}':>28s}"
            )
            for (name, few), (_, many) in zip(*(store.measure(chosen.times) for store in stores), strict=True):
                print(
                    f"{name:38s}" + "".join(" {:>10.2f} {:>8.2f} {:>8.2f}".format(*found) for found in (few, many)), flush=True
                )
        finally:
            for store in stores:
                if chosen.url:
                    store.drop()
                store.broker.close()
                store.bench.close()


if __name__ == "__main__":
    main()
