"""A server whose connections die under running steps, and how many connections a worker takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import dramatiq
import pytest
from dramatiq import Worker

from dramatiq_saga import Flow, FlowHandle, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.errors import StoreError
from tests.support import servers
from tests.support.waiting import eventually


@pytest.fixture
def broker(postgres_url: str, table_prefix: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.05)
    broker = DatabaseBroker(f"{postgres_url}?application_name={namespace}", prefix=table_prefix)
    broker.add_middleware(SagaMiddleware(settings=Settings(schema={"auto_create": True})))  # type: ignore[arg-type]
    dramatiq.set_broker(broker)
    yield broker
    broker.close()


def ask(sql: str, namespace: str) -> int:
    with servers.connect_postgresql() as connection:
        found = connection.execute(f"SELECT {sql} FROM pg_stat_activity WHERE application_name = %s", (namespace,)).fetchone()
    return int(found[0])


def status_of(handle: FlowHandle[Any]) -> str | None:
    """None where the connection that it is read on was cut too, and once more at the second attempt."""
    with suppress(StoreError):
        return str(handle.status)
    return None


def test_a_run_survives_the_death_of_every_connection_in_each_of_its_steps(broker: Any, namespace: str) -> None:
    """C59, FENCE-3, NATIVE-7: steps and undos run once each, no try is spent, and the run ends as it would have."""
    calls: list[Any] = []

    def cut() -> None:
        ask("count(pg_terminate_backend(pid))", namespace)

    @dramatiq.actor(broker=broker, max_retries=0)
    def step(number: int) -> int:
        calls.append(number)
        cut()
        return number

    @dramatiq.actor(broker=broker, max_retries=0)
    def undo(number: int) -> None:
        calls.append(-number)
        cut()

    @dramatiq.actor(broker=broker, max_retries=0)
    def fail() -> None:
        cut()
        raise ValueError("no")

    @workflow(broker=broker)
    def order(flow: Flow) -> None:
        for number in (1, 2, 3):
            flow.action(step, number).compensate_with(undo, number).run()
        flow.run(fail)

    handle = order.send()
    worker = Worker(broker, worker_threads=2, worker_timeout=20)
    worker.start()
    try:
        eventually(lambda: status_of(handle) == "failed", 30.0)
        broker.join("default", timeout=20_000)
    finally:
        worker.stop()
    assert calls == [1, 2, 3, -3, -2, -1]
    assert handle.rollback == "done"
    assert [(action.status, action.attempts) for action in handle.actions()] == [("completed", 1)] * 3 + [("failed", 1)]
    assert [(row.status, row.attempts) for row in handle.compensations()] == [("completed", 1)] * 3


def test_a_worker_takes_no_more_connections_than_it_has_threads_and_a_few(broker: Any, namespace: str) -> None:
    """C59: many short runs on eight threads leave the number where it was; nothing is opened per step."""
    threads = 8

    @dramatiq.actor(broker=broker, max_retries=0)
    def step() -> None: ...

    @workflow(broker=broker)
    def order(flow: Flow) -> None:
        flow.run(step)
        flow.run(step)

    handles = [order.send() for _ in range(60)]
    worker = Worker(broker, worker_threads=threads, worker_timeout=20)
    worker.start()
    most = 0
    try:
        for handle in handles:
            eventually(lambda handle=handle: handle.status == "completed")
            most = max(most, ask("count(*)", namespace))
        assert 0 < most <= threads + 4
    finally:
        worker.stop()
