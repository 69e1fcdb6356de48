"""One clock for many machines: the database server's (CLOCK-1).

Leases and deadlines are written by one machine and judged by another, so a process corrects its clock by the offset between
it and the server's. The offset is measured at the first question or the first connection, whichever comes first, again
every ten minutes, and at once when this machine's clock was set. What was measured is never blocked on: an operation under
way goes on with the offset it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ..clock import SystemClock
from .peewee_internals import driver_errors
from .sql import MYSQL, POSTGRESQL

logger = logging.getLogger("dramatiq_saga")

#: Questions per measurement; the one that was answered fastest counts.
SAMPLES = 3

#: Between two measurements, and after one that failed; seconds.
REFRESH_AFTER = 600
RETRY_AFTER = 10

#: How far this machine's clock and its monotonic clock may drift apart before the clock counts as set; seconds.
TOLERANCE = 1.0

#: This machine's clock, as it is.
_machine = SystemClock()

_QUESTIONS = {
    POSTGRESQL: "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    MYSQL: "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
}


def measure_offset(cursor: Any, dialect: str) -> int:
    """The server's clock minus this machine's, milliseconds, give or take half a round trip."""
    best: tuple[int, int] | None = None
    for _ in range(SAMPLES):
        asked, started = _machine.now(), time.monotonic_ns()
        with driver_errors:
            cursor.execute(_QUESTIONS[dialect])
            ((answer,),) = cursor.fetchall()
        took = time.monotonic_ns() - started
        sample = took, int(answer) - (asked + took // 2_000_000)
        best = sample if best is None else min(best, sample)
    assert best is not None
    return best[1]


class Correction:
    """Keeps the ``offset_ms`` of a clock right."""

    def __init__(self, clock: SystemClock) -> None:
        self._clock = clock
        self._due_at = 0.0  # monotonic
        self._gap = 0.0  # this machine's clock minus the monotonic one, as of the last measurement

    def is_due(self) -> bool:
        """Whether it is time to measure: a look at two clocks."""
        monotonic = time.monotonic()
        return monotonic >= self._due_at or abs(_machine.now() / 1000 - monotonic - self._gap) > TOLERANCE

    def measure(self, cursor: Any, dialect: str) -> None:
        """Ask the server, now."""
        self._clock.offset_ms = measure_offset(cursor, dialect)
        self._next(REFRESH_AFTER)

    def postpone(self) -> None:
        """The server could not be asked."""
        self._next(RETRY_AFTER)

    def _next(self, after: float) -> None:
        monotonic = time.monotonic()
        self._due_at, self._gap = monotonic + after, _machine.now() / 1000 - monotonic


class ServerClock(SystemClock):
    """The machine's clock, corrected by the server's from the first question on.

    ``measure`` is called when the correction is due; it returns at once where the caller must not wait.
    """

    def __init__(self, measure: Callable[[], None]) -> None:
        super().__init__()
        self.correction = Correction(self)
        self._measure = measure

    def now(self) -> int:
        if self.correction.is_due():
            try:
                self._measure()
            except Exception:  # unreachable: the operation that the time is for will say so
                self.correction.postpone()
                logger.warning("the database server's clock could not be read; this machine's is used", exc_info=True)
        return super().now()
