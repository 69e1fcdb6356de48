"""One clock for many machines: the database server's (CLOCK-1).

Leases and deadlines are written by one machine and judged by another, so a process corrects its clock by the offset between
it and the server's. The offset is measured when a connection is opened, and at the first question before that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ..clock import SystemClock
from .sql import POSTGRESQL

logger = logging.getLogger("dramatiq_saga")

#: Questions per measurement; the one that was answered fastest counts.
SAMPLES = 3

_QUESTIONS = {
    POSTGRESQL: "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "mysql": "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
}


def measure_offset(cursor: Any, dialect: str) -> int:
    """The server's clock minus this machine's, milliseconds, give or take half a round trip."""
    best: tuple[int, int] | None = None
    for _ in range(SAMPLES):
        asked = time.time_ns()
        cursor.execute(_QUESTIONS[dialect])
        ((answer,),) = cursor.fetchall()
        answered = time.time_ns()
        sample = (answered - asked, int(answer) - (asked + answered) // 2_000_000)
        best = sample if best is None else min(best, sample)
    assert best is not None
    return best[1]


class ServerClock(SystemClock):
    """The machine's clock, corrected by the server's from the first question on."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure: Callable[[], int] | None = measure
        self._offset_ms = 0

    @property
    def offset_ms(self) -> int:  # type: ignore[override]
        """The correction in use, milliseconds."""
        return self._offset_ms

    @offset_ms.setter
    def offset_ms(self, value: int) -> None:
        self._offset_ms = value
        self._measure = None

    def now(self) -> int:
        measure = self._measure
        if measure is not None:
            try:
                self.offset_ms = measure()
            except Exception:  # unreachable: the operation that the time is for will say so
                logger.warning("the database server's clock could not be read; this machine's is used", exc_info=True)
        return time.time_ns() // 1_000_000 + self._offset_ms
