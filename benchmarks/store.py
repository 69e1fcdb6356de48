"""How fast transactions are, and what they write.

   python -m benchmarks.store threads [--url URL] [--seconds N]
   python -m benchmarks.store processes [--processes N] [--think MS] [--seconds N]
   python -m benchmarks.store pages

``threads`` writes through one store from 1 and from 8 threads, on SQLite under synchronous NORMAL and FULL, beside a bare
``sqlite3`` connection that does the same; with ``--url`` on that server instead. ``processes`` writes from several processes of
8 threads each to one SQLite file, with and without the turnstile. ``pages`` counts the pages that a saga of three steps puts
into the write-ahead log, by page size. Each operation inserts a row and updates another. Figures are of this machine and of
this moment.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peewee

from dramatiq_saga.store import connections, turnstile
from dramatiq_saga.store.database import Store, Tx, open_store

INSERT = "INSERT INTO {flow_events} (run_id, at, type, detail) VALUES (?, 0, 'bench', ?)"
UPDATE = "UPDATE {rate_limits} SET value = value + 1 WHERE id = ?"
ROWS, PAD = 64, "y" * 200


def operation(number: int) -> Callable[[Tx], int]:
    """One small transaction."""

    def run(tx: Tx) -> int:
        tx.run(INSERT, (str(number), PAD))
        return tx.run(UPDATE, (str(number % ROWS),))

    return run


def open_sqlite(path: Path, synchronous: str) -> Store:
    """A store with its tables and the rows to update."""
    store = open_store(peewee.SqliteDatabase(str(path), pragmas={"synchronous": synchronous}))
    fill(store)
    return store


def fill(store: Store) -> None:
    template = "{insert_ignore} {rate_limits} (id, value, expires_at) VALUES (?, 0, 0){or_ignore}"
    store.write(lambda tx: [tx.run(template, (str(number),)) for number in range(ROWS)])


def hammer(store: Store, threads: int, *, seconds: float, think: float = 0.0, seed: int = 0) -> list[float]:
    """The latencies of all writes that ``threads`` threads make in that time, seconds."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    def work(index: int) -> None:
        chance, mine = random.Random(seed * 100 + index), list[float]()
        while (began := time.perf_counter()) < until:
            store.write(operation(chance.randrange(1000)))
            mine.append(time.perf_counter() - began)
            if think:
                time.sleep(chance.uniform(0.5, 1.5) * think)
        latencies.extend(mine)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return latencies


def report(name: str, latencies: list[float], seconds: float) -> None:
    latencies = sorted(latencies)
    p50, p99, p999 = (latencies[min(len(latencies) - 1, round(part * len(latencies)))] * 1000 for part in (0.5, 0.99, 0.999))
    print(
        f"{name:34s} {len(latencies) / seconds:9,.0f} tx/s   p50 {p50:7.2f}  p99 {p99:7.2f}  p99.9 {p999:7.2f}  "
        f"max {latencies[-1] * 1000:8.2f} ms",
        flush=True,
    )


# --- one process -----------------------------------------------------------------------------------------------------


def threads(url: str | None, seconds: float) -> None:
    if url is not None:
        store = open_store(url, prefix="bench_", auto_create=True)
        fill(store)
        for count in (1, 8):
            report(f"{store.dialect}, {count} threads", hammer(store, count, seconds=seconds), seconds)
        store.close()
        return
    for synchronous in ("normal", "full"):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "bench.db")
            store = open_sqlite(path, synchronous)
            report(f"{synchronous}, bare connection", bare(path, synchronous, seconds), seconds)
            for count in (1, 8):
                report(f"{synchronous}, store, {count} threads", hammer(store, count, seconds=seconds), seconds)
            store.close()


def bare(path: Path, synchronous: str, seconds: float) -> list[float]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    insert, update = (text.replace("{", "saga_").replace("}", "") for text in (INSERT, UPDATE))
    latencies: list[float] = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(insert, ("1", PAD))
        connection.execute(update, ("1",))
        connection.execute("COMMIT")
        latencies.append(time.perf_counter() - began)
    connection.close()
    return latencies


# --- several processes -----------------------------------------------------------------------------------------------


def processes(count: int, think: float, seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    for synchronous in ("normal", "full"):
        for turns in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, "bench.db")
                open_sqlite(path, synchronous).close()
                ready, results = context.Barrier(count), context.Queue()
                settings = (path, synchronous, turns, think, seconds, ready, results)
                started = [context.Process(target=one_of_many, args=(*settings, seed)) for seed in range(count)]
                for process in started:
                    process.start()
                latencies = [latency for _ in started for latency in results.get()]
                for process in started:
                    process.join()
                report(f"{synchronous}, {count} x 8, {'in turn' if turns else 'no turnstile'}", latencies, seconds)


def one_of_many(
    path: Path, synchronous: str, turns: bool, think: float, seconds: float, ready: Any, results: Any, seed: int
) -> None:
    turnstile.AVAILABLE = turns
    store = open_sqlite(path, synchronous)
    ready.wait()
    results.put(hammer(store, 8, seconds=seconds, think=think / 1000, seed=seed))
    store.close()


# --- pages -----------------------------------------------------------------------------------------------------------


def pages() -> None:
    import dramatiq

    from dramatiq_saga import SagaMiddleware, workflow
    from dramatiq_saga.brokers import SQLiteBroker

    for size in (1024, 2048, 4096, 8192):
        with tempfile.TemporaryDirectory() as directory, mock.patch.dict(connections.PRAGMAS, {"page_size": size}):
            path = Path(directory, "bench.db")
            broker = SQLiteBroker(path)
            broker.add_middleware(SagaMiddleware())
            dramatiq.set_broker(broker)

            @dramatiq.actor(max_retries=0)
            def step(order: str) -> dict[str, str]:
                return {"id": f"ch_{order}", "note": PAD}

            @workflow(name=f"bench_{size}")
            def saga(flow: Any, order: str) -> None:
                for _ in range(3):
                    flow.action(step, order).compensate_with(step, order).run()

            def run(number: int, saga: Any = saga) -> None:
                for index in range(number):
                    saga.run_sync(f"order-{index}")

            run(200)
            checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)"
            with sqlite3.connect(path) as connection:
                connection.execute(checkpoint)
            connection.close()
            broker.store._control(lambda broker=broker: broker.store.database.execute_sql("PRAGMA wal_autocheckpoint = 0"))
            run(50)
            written = (os.path.getsize(f"{path}-wal") - 32) / (size + 24) / 50
            began = time.perf_counter()
            run(200)
            rate = 200 / (time.perf_counter() - began)
            print(
                f"pages of {size:5d} bytes: {written:6.1f} pages, {written * size / 1024:6.1f} KiB per saga; {rate:5.0f} sagas/s"
            )
            broker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["threads", "processes", "pages"])
    parser.add_argument("--url")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--think", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    chosen = parser.parse_args()
    if chosen.what == "threads":
        threads(chosen.url, chosen.seconds)
    elif chosen.what == "processes":
        processes(chosen.processes, chosen.think, chosen.seconds)
    else:
        pages()


if __name__ == "__main__":
    main()
