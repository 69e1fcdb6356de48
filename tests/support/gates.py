"""Stopping a process or a thread at a named point, and letting it go on.

Races are tested by interleaving, not by luck. The code under test reaches a gate and stands there; the test sees that it
has arrived, does what must happen in between, and opens the gate. Files carry the news, so it works across processes,
and a killed process needs no cleaning up.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.waiting import DEADLINE, eventually

#: Workers started by the tests find their gates here.
VARIABLE = "SAGA_TEST_GATES"


class Gates:
    """Named gates in one directory. Closed until opened; a gate stays open."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    @classmethod
    def from_env(cls) -> Gates:
        """The gates of the test that started this process."""
        return cls(os.environ[VARIABLE])

    def reach(self, name: str, timeout: float = 60.0) -> None:
        """Called by the code that is to be stopped: says that it is here, and stands until the gate is open."""
        (self.directory / f"{name}.reached.{os.getpid()}").touch()
        eventually((self.directory / f"{name}.open").exists, timeout, interval=0.002, because=f"gate {name!r} opens")

    def wait_reached(self, name: str, times: int = 1, *, timeout: float = DEADLINE) -> None:
        """Called by the test: returns once that many processes have come to the gate."""
        eventually(lambda: self.reached(name) >= times, timeout, because=f"{times} process(es) reach gate {name!r}")

    def reached(self, name: str) -> int:
        """How many processes have come to the gate so far."""
        return sum(1 for _ in self.directory.glob(f"{name}.reached.*"))

    def open(self, name: str) -> None:
        (self.directory / f"{name}.open").touch()
