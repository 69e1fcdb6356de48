"""``python -m tests.processes.queue_storm PATH ROUNDS``: eight processes race for one message, round after round (C04).

In every other round the winner is killed right after its reservation has committed; then the lease is ended by hand, and one
more process has to get the message. Prints one line of JSON per round: who reserved, who executed, what is left.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable

import dramatiq

from dramatiq_saga.brokers import SQLiteBroker

RACERS = 8


def broker_of_this_process(path: str) -> SQLiteBroker:
    broker = SQLiteBroker(path, middleware=[])
    broker.declare_queue("default")
    return broker


def forked(function: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def send(path: str) -> None:
    message = dramatiq.Message(queue_name="default", actor_name="a", args=(), kwargs={}, options={})
    broker_of_this_process(path).enqueue(message)


def race(path: str, *, start: int, report: int, die: bool) -> None:
    broker = broker_of_this_process(path)
    consumer = broker.consume("default", prefetch=1, timeout=50)
    broker.store.read(lambda tx: None)  # open the file before the start
    os.read(start, 1)  # end of file: the parent has let go
    proxy = next(consumer)
    if proxy is None:
        return
    os.write(report, b"r%d " % proxy.reservation.attempt)
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(report, b"e%d " % proxy.reservation.attempt)
    consumer.ack(proxy)


def run_round(path: str, *, racers: int, die: bool) -> list[str]:
    start, go = os.pipe()
    heard, report = os.pipe()

    def racer() -> None:
        os.close(go)
        race(path, start=start, report=report, die=die)

    pids = [forked(racer) for _ in range(racers)]
    os.close(start)
    os.close(report)
    os.close(go)
    for pid in pids:
        os.waitpid(pid, 0)
    with os.fdopen(heard) as lines:
        return lines.read().split()


def main() -> None:
    path, rounds = sys.argv[1], int(sys.argv[2])
    for number in range(rounds):
        os.waitpid(forked(lambda: send(path)), 0)
        die = number % 2 == 1
        told = run_round(path, racers=RACERS, die=die)
        if die:
            with sqlite3.connect(path, timeout=5) as connection:
                connection.execute("UPDATE saga_messages SET lease_until = 0 WHERE state = 2")
            connection.close()
            told += run_round(path, racers=1, die=False)
        with sqlite3.connect(path, timeout=5) as connection:
            (left,) = connection.execute("SELECT COUNT(*) FROM saga_messages").fetchone()
        connection.close()
        print(json.dumps({"round": number, "killed": die, "told": told, "left": left}), flush=True)


if __name__ == "__main__":
    main()
