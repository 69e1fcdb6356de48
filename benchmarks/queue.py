"""How fast the queue is: no-op actors through a real Worker, the latency of an idle worker, and what idling costs.

    python -m benchmarks.queue throughput [--broker KIND] [--messages N] [--processes N]
    python -m benchmarks.queue latency [--messages N]
    python -m benchmarks.queue idle [--seconds N]

KIND is sqlite-full (the default), sqlite-normal, postgresql, mariadb, redis or stub.
``throughput`` first sends every message, then starts the workers and waits until the queue is empty; both rates are printed.
``latency`` starts a worker in another process and measures the time from just before ``send()`` to the actor's first line.
``idle`` reports the processor time that an idle worker process uses. Figures are of this machine and of this moment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq import Worker

THREADS = 8


def make_broker(kind: str, directory: str) -> Any:
    """A broker of that kind; the SQLite ones in ``directory``."""
    if kind.startswith("sqlite"):
        import peewee

        from dramatiq_saga.brokers import SQLiteBroker

        synchronous = kind.partition("-")[2] or "full"
        return SQLiteBroker(peewee.SqliteDatabase(str(Path(directory, "queue.db")), pragmas={"synchronous": synchronous}))
    if kind == "redis":
        from dramatiq.brokers.redis import RedisBroker

        return RedisBroker(url=os.environ.get("BENCH_REDIS", "redis://127.0.0.1:6379/15"), namespace=f"bench{os.getppid()}")
    if kind == "stub":
        from dramatiq.brokers.stub import StubBroker

        return StubBroker()
    from dramatiq_saga.brokers import DatabaseBroker

    url = {"postgresql": "postgresql://root@127.0.0.1:5432/test", "mariadb": "mysql://root@127.0.0.1:3306/test"}[kind]
    broker = DatabaseBroker(os.environ.get("BENCH_DATABASE", url), prefix="bench_")
    broker.store.migrate()
    return broker


def declare(broker: Any, report: str | None = None) -> Any:
    """A no-op actor; with ``report``, one that appends when it was sent and when it ran."""
    dramatiq.set_broker(broker)
    if report is None:

        @dramatiq.actor(broker=broker, max_retries=0)
        def work(number: int) -> None:
            pass

        return work
    handle = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @dramatiq.actor(broker=broker, max_retries=0, actor_name="work")
    def timed(sent: int) -> None:
        os.write(handle, f"{time.monotonic_ns() - sent}\n".encode())

    return timed


def throughput(kind: str, messages: int, processes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        broker = make_broker(kind, directory)
        work = declare(broker)
        broker.flush_all()
        started = time.monotonic()
        for number in range(messages):
            work.send(number)
        sent = time.monotonic() - started
        workers = []
        started = time.monotonic()
        if processes == 1:
            worker = Worker(broker, worker_threads=THREADS)
            worker.start()
        else:
            command = [sys.executable, "-m", "benchmarks.queue", "worker", "--broker", kind, "--directory", directory]
            workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
        broker.join("default", timeout=600_000)
        took = time.monotonic() - started
        if processes == 1:
            worker.stop()
        for process in workers:
            process.terminate()
            process.wait()
        broker.close()
    print(
        json.dumps({"broker": kind, "processes": processes, "sent/s": round(messages / sent), "done/s": round(messages / took)})
    )


def run_worker(kind: str, directory: str, report: str | None) -> None:
    """A worker process: until SIGTERM."""
    import signal

    broker = make_broker(kind, directory)
    declare(broker, report)
    worker = Worker(broker, worker_threads=THREADS)
    worker.start()
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})
    worker.stop()
    broker.close()


def start_worker(kind: str, directory: str, report: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.queue",
        "worker",
        "--broker",
        kind,
        "--directory",
        directory,
        "--report",
        report,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def latency(kind: str, messages: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = os.path.join(directory, "report")
        broker = make_broker(kind, directory)
        work = declare(broker)
        broker.flush_all()
        process = start_worker(kind, directory, report)
        time.sleep(0.5)
        for number in range(messages):
            work.send(time.monotonic_ns())
            time.sleep(0.05 + number % 10 * 0.0031)
        broker.join("default", timeout=10_000)
        process.terminate()
        process.wait()
        broker.close()
        times = sorted(int(line) / 1e6 for line in Path(report).read_text().split())
    print(
        json.dumps(
            {
                "broker": kind,
                "messages": len(times),
                "p50 ms": round(statistics.median(times), 2),
                "p90 ms": round(times[len(times) * 9 // 10], 2),
                "max ms": round(times[-1], 2),
            }
        )
    )


def idle(kind: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        broker = make_broker(kind, directory)
        declare(broker)
        broker.flush_all()
        process = start_worker(kind, directory, os.path.join(directory, "report"))
        time.sleep(2)
        before = cpu_seconds(process.pid)
        time.sleep(seconds)
        used = cpu_seconds(process.pid) - before
        process.terminate()
        process.wait()
        broker.close()
    print(json.dumps({"broker": kind, "idle cpu %": round(100 * used / seconds, 2)}))


def cpu_seconds(pid: int) -> float:
    """Processor time used so far by a process and its threads."""
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    threads = [Path(f"/proc/{pid}/task", name, "schedstat") for name in os.listdir(f"/proc/{pid}/task")]
    return max(int(fields[0]), sum(int(path.read_text().split()[0]) for path in threads)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "latency", "idle", "worker"])
    parser.add_argument("--broker", default="sqlite-full")
    parser.add_argument("--messages", type=int, default=None)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--directory", default="")
    parser.add_argument("--report", default=None)
    arguments = parser.parse_args()
    if arguments.what == "throughput":
        throughput(arguments.broker, arguments.messages or 10_000, arguments.processes)
    elif arguments.what == "latency":
        latency(arguments.broker, arguments.messages or 100)
    elif arguments.what == "idle":
        idle(arguments.broker, arguments.seconds)
    else:
        run_worker(arguments.broker, arguments.directory, arguments.report)


if __name__ == "__main__":
    main()
