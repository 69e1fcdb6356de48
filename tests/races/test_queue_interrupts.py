"""Dramatiq's asynchronous interrupts against the end of a delivery (C43).

``TimeLimit`` and ``ShutdownNotifications`` raise an exception in a worker thread between any two bytecodes. Inside the
broker's own part of an acknowledgement it is absorbed. What lies outside is Dramatiq's: an interrupt that lands in the few
instructions between its after hooks and the consumer's ``ack``, or in somebody's ``before_ack`` hook, still ends the thread;
the message then comes back, because a lease is not extended for a thread that has ended.
"""

from __future__ import annotations

import threading
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, Retries, Shutdown, TimeLimitExceeded
from dramatiq.threading import raise_thread_exception

from dramatiq_saga.brokers import SQLiteBroker, reservations
from dramatiq_saga.clock import ManualClock
from tests.support.brokers import middleware, recording, row, rows, take, working
from tests.support.waiting import eventually

READY, DELAYED, RESERVED = 0, 1, 2


@pytest.fixture
def broker(tmp_path: Any) -> Any:
    broker = SQLiteBroker(tmp_path / "queue.db", middleware=middleware())
    dramatiq.set_broker(broker)
    yield broker
    broker.close()


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
@pytest.mark.parametrize("when", ["before the statement", "after the statement"])
def test_an_interrupt_while_acknowledging_costs_no_thread(
    broker: Any, interrupt: type[BaseException], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C43: the message is acknowledged once, its thread runs the next one, and nothing is reported as lost."""
    actor, seen = recording(broker)
    real, thrown = reservations.delete, []

    def interrupted(tx: Any, reservation: Any) -> bool:
        """On the writer thread, while the worker thread waits for its ticket."""
        landed = real(tx, reservation) if when == "after the statement" else None
        if not thrown:
            (worker_thread,) = worker.workers
            thrown.append(interrupt)
            raise_thread_exception(worker_thread.ident, interrupt)
        return real(tx, reservation) if landed is None else landed

    monkeypatch.setattr(reservations, "delete", interrupted)
    with working(broker, threads=1) as worker:
        for number in range(3):
            actor.send(number)
        eventually(lambda: seen == [0, 1, 2])
        broker.join("default", timeout=10_000)
        assert worker.workers[0].is_alive()
        assert thrown == [interrupt]
    assert rows(broker) == []


def test_an_interrupt_in_the_after_hooks_of_a_failure_loses_neither_message_nor_thread(broker: Any) -> None:
    """C43: Dramatiq would acknowledge a message whose retry was never queued, and then lose the thread."""
    cut = threading.Event()

    class Cutting(Middleware):
        """Stands before Retries in the order of after hooks, as an appended middleware does."""

        def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
            if exception is not None and not cut.is_set():
                cut.set()
                raise TimeLimitExceeded

    broker.add_middleware(Cutting())
    tries: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=3, min_backoff=1, max_backoff=1)
    def fail_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("boom")

    actor, seen = recording(broker)
    fail_once.send()
    with working(broker, threads=1) as worker:
        eventually(cut.is_set)
        actor.send("next")
        eventually(lambda: seen == ["next"])
        assert worker.workers[0].is_alive()
        eventually(lambda: len(rows(broker)) == 1)  # the other one is acknowledged after its body
        assert [one["state"] for one in rows(broker)] == [RESERVED]
        broker.store.write(lambda tx: tx.run("UPDATE {messages} SET lease_until = 0"))
        broker.join("default", timeout=10_000)
    assert len(tries) == 2


def test_an_interrupt_in_the_after_hooks_of_a_success_is_dramatiqs_to_handle(tmp_path: Any) -> None:
    """There it becomes a failure, which Retries sees: nothing is lost."""
    clock = ManualClock()
    broker = SQLiteBroker(tmp_path / "queue.db", middleware=[Retries(min_backoff=1000, max_backoff=1000)], clock=clock)

    class Cutting(Middleware):
        def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
            raise TimeLimitExceeded

    actor, _ = recording(broker)
    broker.add_middleware(Cutting())
    actor.send("x")
    consumer = broker.consume("default", timeout=20)
    proxy = take(consumer)
    broker.emit_before("process_message", proxy)
    with pytest.raises(TimeLimitExceeded):
        broker.emit_after("process_message", proxy, result=None)
    broker.middleware.pop()
    broker.emit_after("process_message", proxy, exception=TimeLimitExceeded())
    consumer.ack(proxy)
    assert row(broker)["state"] == DELAYED
    broker.close()
