"""ANOM-1: eleven codes, one line each, and never a failure."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dramatiq_saga.journal import anomalies
from dramatiq_saga.journal.anomalies import CODES, AnomalyLog
from dramatiq_saga.settings import LOG_LEVELS, Settings

ROW: dict[str, Any] = {"row": "action", "run_id": "run-1", "sequence": 3, "actor": "charge"}
RUN: dict[str, Any] = {"run_id": "run-1", "workflow": "checkout"}
ERROR = ValueError("no")
THROWN = {"error_type": "builtins.ValueError", "error_message": "no"}

# what each is told with, and which fields its line must have
LINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "claim_lost": (ROW | {"status": "running", "orphaned": True}, ROW | {"status": "running", "orphaned": True}),
    "outcome_rejected": (
        ROW | {"outcome": "failed", "claimed_attempts": 1, "attempts": 2, "status": "running"},
        ROW | {"outcome": "failed", "claimed_attempts": 1, "attempts": 2, "status": "running"},
    ),
    "batch_finished_early": (ROW | {"block": 2}, ROW | {"block": 2}),
    "claim_not_committed": (ROW | {"claimed_attempts": 2, "attempts": 1}, ROW | {"claimed_attempts": 2, "attempts": 1}),
    "expiry_failed": (RUN | {"error": ERROR, "expiry_attempts": 4}, RUN | {"expiry_attempts": 4} | THROWN),
    "write_refused": (ROW | {"site": "park"}, ROW | {"site": "park"}),
    "rejection_undelivered": (
        ROW | {"error": ERROR, "listener": "shop.reconcile"},
        ROW | THROWN | {"listener": "shop.reconcile"},
    ),
    "transition_lost": (
        RUN | {"observed": "running", "intended": "cancelled", "actual": "completed"},
        RUN | {"observed": "running", "intended": "cancelled", "actual": "completed"},
    ),
    "retry_policy_threw": (ROW | {"error": ERROR}, ROW | THROWN),
    "replan_failed": (RUN | {"error": ERROR}, RUN | THROWN),
    "replan_incomplete": (RUN | {"missing": 7}, RUN | {"missing": 7}),
}


class BrokenLogger:
    """Raises at every use."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("disk full")


@pytest.fixture
def fresh_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_there_are_eleven_codes_and_a_method_for_each() -> None:
    constants = {
        value
        for name, value in vars(anomalies).items()
        if name.isupper() and isinstance(value, str) and name != "DEFAULT_LOGGER"
    }
    methods = {name for name, _ in inspect.getmembers(AnomalyLog, inspect.isfunction) if not name.startswith("_")} - {"report"}
    assert len(CODES) == 11
    assert constants == set(CODES) == methods == set(LINES)


@pytest.mark.parametrize("code", CODES)
def test_a_line_carries_the_fields_that_its_reader_needs(code: str) -> None:
    told, expected = LINES[code]
    with capture_logs() as logs:
        getattr(AnomalyLog(), code)(**told)
    assert logs == [{"event": code, "log_level": "info", **expected}]


@pytest.mark.parametrize("code", CODES)
def test_a_field_may_be_added_and_one_without_a_value_is_left_out(code: str) -> None:
    with capture_logs() as logs:
        getattr(AnomalyLog(), code)(**LINES[code][0], tenant="north", nothing=None)
    assert logs == [{"event": code, "log_level": "info", **LINES[code][1], "tenant": "north"}]


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_the_level_is_the_one_that_is_set(level: str) -> None:
    settings = Settings.from_mapping({"logging.anomaly_level": level})
    with capture_logs() as logs:
        AnomalyLog.from_settings(settings.logging).report(anomalies.CLAIM_LOST)
    assert [line["log_level"] for line in logs] == [level]


def test_the_level_none_writes_nothing_and_touches_no_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(structlog, "get_logger", asked.append)
    journal = AnomalyLog.from_settings(Settings.from_mapping({"logging.anomaly_level": None}).logging)
    journal.claim_lost(**LINES["claim_lost"][0])
    assert not journal.is_on and AnomalyLog().is_on
    assert asked == []


@pytest.mark.usefixtures("fresh_structlog")
@pytest.mark.parametrize(("given", "name"), [(None, "dramatiq_saga"), ("shop.anomalies", "shop.anomalies")])
def test_the_logger_is_the_one_that_is_named(given: str | None, name: str, caplog: pytest.LogCaptureFixture) -> None:
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    with caplog.at_level(logging.INFO):
        AnomalyLog("warning", given).report(anomalies.CLAIM_LOST, run_id="run-1")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (name, "WARNING", "claim_lost")
    ]


@pytest.mark.parametrize("broken", [BrokenLogger(), None, lambda: None], ids=["raising", "none", "without levels"])
def test_a_broken_logger_falls_back_and_never_fails_a_message(
    broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(structlog, "get_logger", lambda *args: broken)
    with caplog.at_level(logging.INFO):
        AnomalyLog().report(anomalies.CLAIM_LOST, run_id="run-1")
    assert [record.name for record in caplog.records] == ["dramatiq_saga"]
    assert "claim_lost" in caplog.text and "run-1" in caplog.text


def test_two_broken_loggers_lose_the_line_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_logger(*args: Any) -> Any:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(structlog, "get_logger", no_logger)
        patch.setattr(logging, "getLogger", no_logger)
        AnomalyLog().report(anomalies.CLAIM_LOST, run_id="run-1")


def test_an_unknown_level_is_taken_for_info() -> None:
    with capture_logs() as logs:
        AnomalyLog("loud").report(anomalies.CLAIM_LOST)
    assert [line["log_level"] for line in logs] == ["info"]


def test_an_error_that_cannot_be_told_is_told_by_its_class() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with capture_logs() as logs:
        AnomalyLog().replan_failed(run_id="run-1", workflow="checkout", error=Mute())
    assert logs[0]["error_type"].endswith("Mute") and "RuntimeError" in logs[0]["error_message"]


def test_a_field_that_no_logger_takes_does_not_fail_a_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        AnomalyLog().report(anomalies.CLAIM_LOST, **{"event": "twice"})
    assert "claim_lost" in caplog.text
