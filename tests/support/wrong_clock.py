"""A machine whose clock is wrong: processes whose environment names a file go by what that file says, from one question to the next.

What is set is the wall clock alone, as when somebody sets a machine's clock: the monotonic clock and everything that waits go on. The
shim stands in the process that is told so; other processes, and the test itself, keep the right time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq.common

#: Names the file that holds by how many seconds this machine's clock is ahead.
VARIABLE = "SAGA_TEST_CLOCK_AHEAD"


class WrongClock:
    """One machine's clock. ``env`` goes to every process on that machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {VARIABLE: str(path)}
        self.set(0)

    def set(self, seconds: float) -> None:
        """Set it, for everybody at once, to so many seconds ahead of the right time."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self.path)


def install() -> None:
    """Have this process live on the machine that its environment names, if it names one."""
    if VARIABLE not in os.environ:
        return
    path, right, right_ns = Path(os.environ[VARIABLE]), time.time, time.time_ns

    def ahead() -> float:
        return float(path.read_text())

    time.time = lambda: right() + ahead()
    time.time_ns = lambda: right_ns() + round(ahead() * 1_000_000_000)
    dramatiq.common.time = time.time  # type: ignore[attr-defined]
