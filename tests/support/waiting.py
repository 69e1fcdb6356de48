"""Waiting for a fact, with a deadline.

No test sleeps for luck. It names the fact that it waits for; the deadline is generous, because it is only ever reached
by a test that fails.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds. Long enough for a loaded machine, short enough to be told apart from a test that hangs.
DEADLINE = float(os.environ.get("DRAMATIQ_SAGA_TEST_DEADLINE") or 20.0)


def eventually(predicate: Callable[[], T | None], timeout: float = DEADLINE, *, interval: float = 0.01, because: str = "") -> T:
    """The first truthy value that ``predicate`` returns; an ``AssertionError`` when none came in time.

    ``because`` says what was expected; without it the failure shows the predicate's own source. A predicate that raises
    an ``AssertionError`` has not come true yet, and the last one is part of the failure.
    """
    until = time.monotonic() + timeout
    while True:
        cause = None
        value = None
        try:
            value = predicate()
        except AssertionError as error:
            cause = error
        if value:
            return value
        if time.monotonic() >= until:
            what = because or _source(predicate)
            raise AssertionError(f"not within {timeout:g} s: {what} (last seen: {cause or value!r})") from cause
        time.sleep(interval)


def _source(predicate: Callable[[], object]) -> str:
    try:
        return " ".join(inspect.getsource(predicate).split())
    except (OSError, TypeError):
        return repr(predicate)
