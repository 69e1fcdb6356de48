"""Interrupts at every place around a step that runs in its run's context (CTX-1, FENCE-5): the thread ends as it began."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from dramatiq.middleware import Interrupt, Shutdown, TimeLimitExceeded

from dramatiq_saga import Settings
from dramatiq_saga.brokers import SQLiteBroker
from tests.races.test_interrupts import Line, survive

tenant: ContextVar[str | None] = ContextVar("tenant", default=None)

# One that lands in a finaliser is lost on Python itself, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def line(sqlite_path: Path) -> Iterator[Line]:
    settings = Settings.from_mapping({"context": {"capture": lambda: "red", "restore": tenant.set}})
    made = Line(lambda clock: SQLiteBroker(sqlite_path, clock=clock), settings=settings)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [TimeLimitExceeded, Shutdown])
@pytest.mark.parametrize("lines", [False, True], ids=["calls", "lines"])
@pytest.mark.parametrize("what", ["step", "drive"])
def test_an_interrupt_anywhere_leaves_no_context_behind(line: Line, kind: type[Interrupt], lines: bool, what: str) -> None:
    """CTX-1: before the body, in it, after it, and while the function is walked; the run goes on all the same."""
    run: list[str] = []

    def prepare() -> Any:
        run[:] = [line.start()]
        return line.take("step", "charge") if what == "step" else line.take("drive")

    def check(where: str) -> None:
        assert tenant.get() is None, where
        line.work()
        assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", *run) == ("completed",), where
        assert tenant.get() is None, where

    survive(line, prepare, check, kind, lines=lines)
