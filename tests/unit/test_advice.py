"""Advice is given once per actor, only where it is due, and never at a run's expense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dramatiq
import pytest
from structlog.testing import capture_logs

from dramatiq_saga import Flow, FlowStatus, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker


@pytest.fixture
def broker(sqlite_path: Path) -> Iterator[SQLiteBroker]:
    broker = SQLiteBroker(sqlite_path)
    broker.add_middleware(SagaMiddleware(settings=Settings.from_mapping({"actions.reclaim.stale_running.enabled": True})))
    yield broker
    broker.close()


def advice_on(
    broker: SQLiteBroker, options: dict[str, Any], step_options: dict[str, Any] | None = None, runs: int = 1
) -> list[str]:
    @dramatiq.actor(broker=broker, **options)
    def charge_card() -> None: ...

    @workflow(broker=broker)
    def checkout(flow: Flow) -> None:
        flow.action(charge_card).with_options(**(step_options or {})).run()

    with capture_logs() as lines:
        for _ in range(runs):
            assert checkout.run_sync().status is FlowStatus.COMPLETED
    return [line["event"] for line in lines]


def test_a_step_with_the_default_retries_is_warned_about_once(broker: SQLiteBroker) -> None:
    """NATIVE-6."""
    assert advice_on(broker, {}, runs=3) == ["step_keeps_default_retries"]


@pytest.mark.parametrize("options", [{"max_retries": 20}, {"max_retries": None}, {"retry_when": lambda *_: False}])
def test_a_step_whose_actor_says_how_often_is_not(broker: SQLiteBroker, options: dict[str, Any]) -> None:
    """NATIVE-6: twenty is fine where somebody has written it."""
    assert advice_on(broker, options) == []


def test_a_step_that_says_how_often_itself_is_not(broker: SQLiteBroker) -> None:
    """NATIVE-6."""
    assert advice_on(broker, {}, {"max_retries": 2}) == []


def test_a_reclaim_window_within_the_time_limit_is_warned_about(broker: SQLiteBroker) -> None:
    """RECLAIM-7: 900 seconds, and a limit of as much."""
    assert advice_on(broker, {"max_retries": 1, "time_limit": 900_000}) == ["reclaim_within_time_limit"]


def test_a_reclaim_window_above_the_time_limit_is_not(broker: SQLiteBroker) -> None:
    """RECLAIM-7: Dramatiq's default limit of ten minutes lies below the default window of fifteen."""
    assert advice_on(broker, {"max_retries": 1}) == []


def reclaim_advice(broker: SQLiteBroker, describe: Callable[..., Any], runs: int = 2) -> list[tuple[str, int, int]]:
    """Who was warned about, with which window and limit, while a step (or a child) described so ran; its undo is ``undo``."""

    @dramatiq.actor(broker=broker, max_retries=0, time_limit=90_000)
    def charge() -> str:
        return "charged"

    @dramatiq.actor(broker=broker, max_retries=0, time_limit=120_000)
    def undo() -> None: ...

    @workflow(broker=broker)
    def inner(flow: Flow) -> str:
        return "done"

    @workflow(broker=broker)
    def outer(flow: Flow) -> None:
        describe(flow, charge, undo, inner)

    with capture_logs() as lines:
        for _ in range(runs):
            assert outer.run_sync().status is FlowStatus.COMPLETED
    return [(line["actor"], line["reclaim_stale_after_seconds"], line["time_limit_ms"]) for line in lines]


def test_each_window_of_an_actor_is_warned_about_once(broker: SQLiteBroker) -> None:
    """RECLAIM-7, RECLAIM-2: when a row is scheduled with it; not only the first that the actor was ever given."""

    def two(flow: Flow, charge: Any, undo: Any, inner: Any) -> None:
        for seconds in (900, 90, 91, 30):
            flow.action(charge).reclaim_stale_after(seconds).run()
        flow.action(charge).enable_stale_reclaim(False).run()

    assert reclaim_advice(broker, two) == [("charge", 90, 90_000), ("charge", 30, 90_000)]


@pytest.mark.parametrize(
    "describe",
    [
        lambda flow, charge, undo, inner: flow.action(charge).compensate_with(undo).reclaim_compensation_stale_after(120).run(),
        lambda flow, charge, undo, inner: (
            flow.action(charge).compensate_with(lambda made: undo.message()).reclaim_compensation_stale_after(120).run()
        ),
    ],
)
def test_a_compensations_window_within_its_time_limit_is_warned_about(broker: SQLiteBroker, describe: Any) -> None:
    """RECLAIM-7, RECLAIM-1: compensations have a window of their own."""
    assert reclaim_advice(broker, describe) == [("undo", 120, 120_000)]


@pytest.mark.parametrize(
    "describe",
    [
        lambda flow, charge, undo, inner: flow.child(inner).compensate_with(undo).run(),
        lambda flow, charge, undo, inner: flow.child(inner).compensate_with(lambda made: undo.message()).run(),
    ],
)
def test_so_is_that_of_a_childs_compensation(sqlite_path: Path, describe: Any) -> None:
    """RECLAIM-7: it has the configured one."""
    settings = {"sagas.reclaim.stale_running.enabled": True, "sagas.reclaim.stale_running.after_seconds": 60}
    broker = SQLiteBroker(sqlite_path)
    broker.add_middleware(SagaMiddleware(settings=Settings.from_mapping(settings)))
    try:
        assert reclaim_advice(broker, describe) == [("undo", 60, 120_000)]
    finally:
        broker.close()


def test_a_broken_logger_fails_no_run(broker: SQLiteBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Callable[..., Any]:
        raise RuntimeError("no logs today")

    @dramatiq.actor(broker=broker)
    def charge_card() -> None: ...

    @workflow(broker=broker)
    def checkout(flow: Flow) -> None:
        flow.run(charge_card)

    monkeypatch.setattr("dramatiq_saga.advice.structlog", SimpleNamespace(get_logger=broken))
    assert checkout.run_sync().status is FlowStatus.COMPLETED
