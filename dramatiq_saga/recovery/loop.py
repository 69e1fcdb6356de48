"""The sweeps inside workers: monitor and repair without cron, while ``loop.enabled`` (LOOP-1).

Every worker process has such a loop. It comes for a pass about once an interval (``loop.monitor_seconds``, ``loop.repair_seconds``),
and with many processes one pass is done per interval all the same: whoever finds that one has begun within it leaves it at one short
read (``recovery/passes.py``). Which process that is changes by chance; one that dies in a pass delays the next by no more than an
interval. Intervals are measured on the monotonic clock. A pass that fails is told, and the next one comes in its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .background import Background
from .sweep import News, monitor_in_turn, repair_in_turn

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from .doctor import RepairReport
    from .monitor import MonitorReport
    from .passes import Skipped

#: Each interval is spread by this part to either side, so that processes do not keep step.
SPREAD = 0.2

Come = Callable[[], "MonitorReport | RepairReport | Skipped"]


class SweepLoop(Background):
    """One process's loop. The first pass comes an interval after its start."""

    def __init__(self, engine: Engine, sender: Sender) -> None:
        super().__init__(engine, thread_name="saga-sweeps")
        loop = engine.settings.loop
        self._passes: list[tuple[float, Come]] = [
            (loop.monitor_seconds, lambda: monitor_in_turn(engine, sender, every=loop.monitor_seconds))
        ]
        if engine.settings.repair.enabled:
            self._passes.append((loop.repair_seconds, lambda: repair_in_turn(engine, sender, every=loop.repair_seconds)))
        self._due: list[float] = []
        self._news = News()

    def begin(self) -> None:
        """Nothing is due yet."""
        self._due = [self._next(every) for every, _ in self._passes]

    def act(self) -> float:
        """Come for what is due."""
        for number, (every, come) in enumerate(self._passes):
            if self._due[number] <= time.monotonic():
                self._due[number] = self._next(every)
                if text := self._news.of(come()):
                    self._log.info("swept", did=text)
        return self._until_due()

    def failed(self, error: Exception, failures: int) -> float:
        """The store refuses, or the pass has a fault; another process, or the next interval, does what this one could not."""
        self._log.warning("sweep_failed", error=f"{type(error).__name__}: {error}")
        return self._until_due()

    def _until_due(self) -> float:
        return max(0.0, min(self._due) - time.monotonic())

    def _next(self, every: float) -> float:
        return time.monotonic() + every * self._spread.uniform(1 - SPREAD, 1 + SPREAD)
