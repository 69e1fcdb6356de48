"""Async steps in real worker processes: Dramatiq's own event loop, its own time limits, a real SIGTERM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga import FlowFailedError, FlowHandle
from dramatiq_saga.statuses import FLOW_TERMINAL
from tests.support.effects import EffectLog
from tests.support.waiting import eventually

APP = "tests.processes.async_app"
PATH = "ASYNC_APP_PATH"


@pytest.fixture
def shop(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The application's module, in this process too, which runs no worker."""
    monkeypatch.setenv(PATH, str(sqlite_path))
    sys.modules.pop(APP, None)
    module = importlib.import_module(APP)
    yield module
    module.broker.close()


def ended(handle: FlowHandle[Any]) -> FlowHandle[Any]:
    eventually(lambda: handle.status in FLOW_TERMINAL, because=f"run {handle.id} ends")
    return handle


def test_async_steps_are_run_limited_tried_again_and_undone(
    shop: Any, worker_process: Callable[..., Any], effects: EffectLog
) -> None:
    """NATIVE-1: a time limit cancels the coroutine; COMP-1: an async compensation knows what it undoes."""
    worker = worker_process(APP)
    good, bad = shop.checkout.send("a"), shop.lost.send("b")
    assert ended(good).result() == "there"
    assert [(one.actor, one.status, one.tries) for one in good.actions()] == [
        ("charge", "completed", 0),
        ("deliver", "completed", 1),
    ]
    with pytest.raises(FlowFailedError, match="no such address: b"):
        ended(bad).result()
    assert effects.entries("refund", charge="c-b", undoes="charge") and effects.count("refund") == 1
    assert effects.count("deliver") == effects.count("delivered") == 2
    assert worker.terminate() == 0


def test_sigterm_gives_an_async_step_back_once_its_coroutine_has_ended(
    shop: Any, worker_process: Callable[..., Any], effects: EffectLog
) -> None:
    """NATIVE-4, C44: no try is spent, and the next worker runs it again."""
    first = worker_process(APP)
    handle = shop.slow.send("a")
    eventually(lambda: effects.count("rest"), because="the step has begun")
    assert first.terminate() == 0
    assert effects.names() == ["rest", "rested"]
    (row,) = handle.actions()
    assert (row.status, row.tries) == ("pending", 0)
    worker_process(APP)
    assert ended(handle).result() == "rested"
    assert effects.names() == ["rest", "rested"] * 2
