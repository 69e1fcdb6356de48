"""``python -m tests.processes.queue_fork``: use a broker, fork, and use it in the child; exit status 0 when all is well."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import dramatiq

from tests.processes.queue_app import broker
from tests.support.brokers import take, take_all


def message(value: str) -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name="default", actor_name="note", args=(value,), kwargs={}, options={})


def in_child() -> None:
    assert broker.here.pid == os.getpid()
    broker.enqueue(message("from the child"))
    consumer = broker.consume("default", prefetch=2, timeout=500)
    proxy = take(consumer)
    assert proxy.args == ("from the child",)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("saga-leases")], "it has a keeper of its own"
    consumer.ack(proxy)
    broker.close()


def main() -> None:
    broker.enqueue(message("the parent's"))
    consumer = broker.consume("default", prefetch=2, timeout=500)
    held = take(consumer)
    warnings.simplefilter("ignore", DeprecationWarning)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            in_child()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child failed: {status}"
    assert take_all(consumer) == []
    consumer.ack(held)
    broker.close()


if __name__ == "__main__":
    main()
