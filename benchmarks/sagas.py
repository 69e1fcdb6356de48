"""How fast sagas are on one SQLite file: a table of throughput, latency, cost per step, and a peer beside it.

    python -m benchmarks.sagas [--runs N] [--peer] [--only throughput,length,block,latency,statements]

* throughput: N three-step runs, stored beforehand, drained by one worker process with 8 threads
* length: one run of 50, 200 and 500 steps, milliseconds per step
* block: one parallel block of 100 and of 1,000 members, milliseconds per member
* latency: one three-step run at a time on an idle worker, started in its process and from another one
* statements: write transactions and statements of one step, counted on the writer's connection

``--peer`` adds DBOS Transact on SQLite in the same run, at the same journal mode and ``synchronous``, where it is installed
(``pip install dbos``): 8 threads start three-step workflows in process, which spares it the queue that ours goes through.
Each figure comes from a process of its own. Figures are of this machine and of this moment.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dramatiq
import peewee
from dramatiq import Worker

from dramatiq_saga import Flow, SagaMiddleware, Workflow, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.events import FlowCompleted, subscribe

THREADS = 8
LEVELS = ("NORMAL", "FULL")

_LIVE = "SELECT COUNT(*) FROM {flow_runs} WHERE ended_at IS NULL"


class Bench:
    """A broker, a three-step workflow and a long one, on one file."""

    def __init__(self, path: str, synchronous: str, factory: type[sqlite3.Connection] | None = None) -> None:
        options: dict[str, Any] = {"factory": factory} if factory else {}
        self.broker = SQLiteBroker(peewee.SqliteDatabase(path, pragmas={"synchronous": synchronous}, **options))
        self.broker.add_middleware(SagaMiddleware())
        dramatiq.set_broker(self.broker)

        @dramatiq.actor(max_retries=3, broker=self.broker)
        def work(order: str, number: int) -> dict[str, int]:
            return {"number": number}

        @workflow(broker=self.broker)
        def three(flow: Flow, order: str) -> str:
            for number in range(3):
                flow.run(work, order, number)
            return order

        @workflow(broker=self.broker)
        def many(flow: Flow, count: int) -> int:
            for number in range(count):
                flow.run(work, "long", number)
            return count

        @workflow(broker=self.broker)
        def side_by_side(flow: Flow, count: int) -> int:
            return len(flow.parallel(*(flow.action(work, "block", number) for number in range(count))).run())

        self.side_by_side: Workflow[[int], int] = side_by_side
        self.three: Workflow[[str], str] = three
        self.many: Workflow[[int], int] = many

    def worker(self) -> Worker:
        worker = Worker(self.broker, worker_threads=THREADS)
        worker.start()
        return worker

    def drained(self) -> bool:
        row = self.broker.store.read(lambda tx: tx.one(_LIVE))
        return row is None or row[0] == 0


def throughput(synchronous: str, runs: int) -> dict[str, float]:
    """Runs and steps per second of one worker process."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(str(Path(directory, "sagas.db")), synchronous)
        began = time.perf_counter()
        for number in range(runs):
            bench.three.send(str(number))
        sent = time.perf_counter() - began
        began, cpu = time.perf_counter(), time.process_time()
        worker = bench.worker()
        while not bench.drained():
            time.sleep(0.02)
        took, used = time.perf_counter() - began, time.process_time() - cpu
        worker.stop()
        return {"sent/s": runs / sent, "runs/s": runs / took, "steps/s": 3 * runs / took, "cpu ms/run": 1000 * used / runs}


def length(synchronous: str, _runs: int) -> dict[str, float]:
    """Milliseconds per step of long runs: the best of three of each length."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(str(Path(directory, "sagas.db")), synchronous)
        worker = bench.worker()
        bench.many.send(20).result(wait=60)
        found: dict[str, float] = {}
        for steps in (50, 200, 500):
            times = []
            for _ in range(3):
                began = time.perf_counter()
                bench.many.send(steps).result(wait=120)
                times.append(1000 * (time.perf_counter() - began) / steps)
            found[f"ms/step of {steps}"] = min(times)
        worker.stop()
        found["500 against 50"] = found["ms/step of 500"] / found["ms/step of 50"]
        return found


def block(synchronous: str, _runs: int) -> dict[str, float]:
    """Milliseconds per member of parallel blocks: the best of three of each size."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(str(Path(directory, "sagas.db")), synchronous)
        worker = bench.worker()
        bench.side_by_side.send(20).result(wait=60)
        found: dict[str, float] = {}
        for members in (100, 1000):
            times = []
            for _ in range(3):
                began = time.perf_counter()
                bench.side_by_side.send(members).result(wait=120)
                times.append(1000 * (time.perf_counter() - began) / members)
            found[f"ms/member of {members}"] = min(times)
        worker.stop()
        found["1000 against 100"] = found["ms/member of 1000"] / found["ms/member of 100"]
        return found


def latency(synchronous: str, runs: int) -> dict[str, float]:
    """From ``send()`` to the completion of three steps on an idle worker, median and 99th percentile, milliseconds."""
    runs = min(runs, 200)
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "sagas.db"))
        bench = Bench(path, synchronous)
        ended: dict[str, float] = {}
        subscribe(lambda event: ended.__setitem__(event.run_id, time.perf_counter()), FlowCompleted)
        worker = bench.worker()
        bench.three.send("warm").result(wait=60)
        here, elsewhere = [], []
        for number in range(runs):
            began = time.perf_counter()
            run = bench.three.send(str(number))
            while run.id not in ended:
                time.sleep(0.0002)
            here.append(1000 * (ended[run.id] - began))
            time.sleep(0.005)
        code = f"from benchmarks.sagas import start_some; start_some({path!r}, {synchronous!r}, {runs})"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            for line in other.stdout:
                run_id, began_at = json.loads(line)
                while run_id not in ended:
                    time.sleep(0.0002)
                elsewhere.append(1000 * (ended[run_id] - began_at))
        worker.stop()
    return {
        "p50 in process": statistics.median(here),
        "p99 in process": sorted(here)[int(len(here) * 0.99) - 1],
        "p50 from another": statistics.median(elsewhere),
        "p99 from another": sorted(elsewhere)[int(len(elsewhere) * 0.99) - 1],
    }


def start_some(path: str, synchronous: str, runs: int) -> None:
    """In a process of its own: start runs one at a time. (``perf_counter`` is one clock for all processes on Linux.)"""
    bench = Bench(path, synchronous)
    bench.drained()
    for number in range(runs):
        began = time.perf_counter()
        run = bench.three.send(f"other-{number}")
        print(json.dumps([run.id, began]), flush=True)
        time.sleep(0.03)


def statements(synchronous: str, _runs: int) -> dict[str, float]:
    """What one step of a long run costs on the writer's connection, the first and the last steps left out."""
    counted: Counter[str] = Counter()

    class Counting(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            counted[sql.split(None, 1)[0].upper()] += 1
            return super().execute(sql, *args)

    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(str(Path(directory, "sagas.db")), synchronous, Counting)
        worker = bench.worker()
        bench.many.send(3).result(wait=60)
        results = []
        for steps in (20, 120):
            counted.clear()
            bench.many.send(steps).result(wait=60)
            results.append(Counter(counted))
        worker.stop()
    long, short = results[1], results[0]
    overhead = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE", "PRAGMA")
    return {
        "transactions/step": (long["COMMIT"] - short["COMMIT"]) / 100,
        "statements/step": (
            sum(n for k, n in long.items() if k not in overhead) - sum(n for k, n in short.items() if k not in overhead)
        )
        / 100,
    }


def peer(synchronous: str, runs: int) -> dict[str, float]:
    """The same three steps in DBOS Transact, 8 threads in process."""
    from dbos import DBOS  # type: ignore[import-not-found, unused-ignore]
    from sqlalchemy import event  # type: ignore[import-not-found, unused-ignore]
    from sqlalchemy.engine import Engine  # type: ignore[import-not-found, unused-ignore]

    if synchronous in LEVELS:

        @event.listens_for(Engine, "connect")  # type: ignore[untyped-decorator, unused-ignore]
        def _pragmas(connection: Any, _record: Any) -> None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {synchronous}")

    with tempfile.TemporaryDirectory() as directory:
        DBOS(
            config={
                "name": "bench",
                "system_database_url": f"sqlite:///{directory}/dbos.db",
                "run_admin_server": False,
                "log_level": "ERROR",
            }
        )

        @DBOS.step()  # type: ignore[untyped-decorator, unused-ignore]
        def work(order: str, number: int) -> dict[str, int]:
            return {"number": number}

        @DBOS.workflow()  # type: ignore[untyped-decorator, unused-ignore]
        def three(order: str) -> str:
            for number in range(3):
                work(order, number)
            return order

        DBOS.launch()
        began, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(three, map(str, range(runs))))
        took, used = time.perf_counter() - began, time.process_time() - cpu
        times = []
        for number in range(60):
            began = time.perf_counter()
            three(f"one-{number}")
            times.append(1000 * (time.perf_counter() - began))
        DBOS.destroy()
    return {
        "runs/s": runs / took, "steps/s": 3 * runs / took, "cpu ms/run": 1000 * used / runs, "p50 in process": statistics.median(times),
    }  # fmt: skip


MEASURES = {
    "throughput": throughput,
    "length": length,
    "block": block,
    "latency": latency,
    "statements": statements,
    "peer": peer,
}


def _in_a_process(measure: str, synchronous: str, runs: int) -> dict[str, float] | str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sagas", "--measure", measure, "--synchronous", synchronous, "--runs", str(runs)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--only", default="throughput,length,block,latency,statements")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--synchronous", default="NORMAL", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(MEASURES[chosen.measure](chosen.synchronous, chosen.runs)))
        return
    for measure in chosen.only.split(","):
        for synchronous in LEVELS if measure != "statements" else LEVELS[1:]:
            _show(measure, synchronous, _in_a_process(measure, synchronous, chosen.runs))
    if chosen.peer:
        for synchronous in (*LEVELS, "its own default"):
            _show("DBOS", synchronous, _in_a_process("peer", synchronous, min(chosen.runs, 1000)))


def _show(measure: str, synchronous: str, found: dict[str, float] | str) -> None:
    cells = found if isinstance(found, str) else "   ".join(f"{name} {value:,.2f}" for name, value in found.items())
    print(f"{measure:<12} {synchronous:<16} {cells}", flush=True)


if __name__ == "__main__":
    main()
