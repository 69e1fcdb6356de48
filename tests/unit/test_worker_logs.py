"""What a worker's own log says of a step that failed: Dramatiq writes it, and knows the actor's name alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import dramatiq
import pytest
from dramatiq import Worker

from dramatiq_saga import Flow, SagaMiddleware, StepFailedError, workflow
from dramatiq_saga.brokers import SQLiteBroker


@pytest.fixture
def broker(sqlite_path: Path) -> Iterator[SQLiteBroker]:
    broker = SQLiteBroker(sqlite_path)
    broker.add_middleware(SagaMiddleware())
    yield broker
    broker.close()


def test_the_traceback_of_a_failed_step_names_its_run(broker: SQLiteBroker, caplog: pytest.LogCaptureFixture) -> None:
    """One error object for every failure, as some libraries have it: it keeps the last note only."""
    refusal = LookupError("no such address")

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1)
    def ship(order: str) -> None:
        raise refusal

    @workflow(broker=broker)
    def checkout(flow: Flow, order: str) -> None:
        with suppress(StepFailedError):
            flow.run(ship, order)

    worker = Worker(broker, worker_threads=1)
    with caplog.at_level(logging.ERROR, logger="dramatiq"):
        worker.start()
        try:
            run = checkout.send("order-1")
            run.result(wait=30)
        finally:
            worker.stop()
    for attempt in (1, 2):
        assert f"dramatiq-saga: step 1 of run {run.id} (checkout), claim {attempt}\n" in caplog.text + "\n"
    assert refusal.__notes__ == [f"dramatiq-saga: step 1 of run {run.id} (checkout), claim 2"]
