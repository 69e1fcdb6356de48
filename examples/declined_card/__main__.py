"""Three orders, one worker, and somebody who tops cards up."""

from __future__ import annotations

import time
from collections.abc import Callable

from dramatiq import Worker

from dramatiq_saga import FlowHandle
from examples.declined_card.app import broker, buy, cards


def wait_until(fact: Callable[[], bool]) -> None:
    while not fact():
        time.sleep(0.01)


def wait_until_parked(run: FlowHandle[str], *, retried: int) -> None:
    """The charge waits for its signal: as a row. No thread, no worker and no message is kept for it."""

    def parked() -> bool:
        steps = run.actions()
        return len(steps) == 2 and (steps[1].status, steps[1].cycle) == ("awaiting_retry", retried)

    wait_until(parked)


worker = Worker(broker, worker_threads=1)
worker.start()

run = buy.send("order-1", "ada", 25)
wait_until_parked(run, retried=0)
cards["ada"] += 20
run.signal("topped-up")  # from a web request, say, that has taken the money
print("order-1:", run.result(wait=30))

run = buy.send("order-2", "bob", 25)
for retried in range(2):
    wait_until_parked(run, retried=retried)
    run.signal_retry()  # for people who do not know what the signal is called
wait_until(lambda: run.status == "failed")
print("order-2:", run.status)

run = buy.send("order-3", "eve", 25)
wait_until(lambda: run.status == "failed")  # nobody waits for a stolen card to be topped up
print("order-3:", run.status)
worker.stop()
