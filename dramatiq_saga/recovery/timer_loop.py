"""The loop in a worker that looks for what is due, where the broker cannot carry it itself (TIMER-1).

With Redis or RabbitMQ a delayed message would sit in a worker's memory, or unacknowledged, until its moment; so none is sent. This loop
looks twice a second, by indexes that hold open deadlines only, and sends a message for each run in which something is due: the worker
that gets it ends it. Any number of workers may loop: one of them takes a run, by a conditional write, for a while. Nothing depends on a
loop but the second: the sweep finds the same rows. It survives whatever goes wrong, and ends with its worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from ..engine import timers
from ..errors import MessageNotSentError
from .background import Background

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender

#: Seconds between two looks; each is somewhat spread, so that workers do not all look at once.
INTERVAL = 0.5

#: Longest pause after errors, in seconds.
LONGEST_PAUSE = 10.0

#: After so many milliseconds a message for what is still due is sent again.
AGAIN_AFTER_MS = 15_000


class TimerLoop(Background):
    """One process's loop."""

    def __init__(self, engine: Engine, sender: Sender, *, interval: float = INTERVAL) -> None:
        super().__init__(engine, thread_name="saga-timers")
        self._sender = sender
        self._interval = interval

    def act(self) -> float:
        """Look once."""
        look(self._engine, self._sender)
        return self._pause(0)

    def failed(self, error: Exception, failures: int) -> float:
        """Look again, ever later."""
        self._log.warning("timers_not_looked_at", error=f"{type(error).__name__}: {error}")
        return self._pause(failures)

    def _pause(self, failures: int) -> float:
        return min(self._interval * 2.0 ** min(failures, 10), LONGEST_PAUSE) * self._spread.uniform(0.8, 1.2)


def look(engine: Engine, sender: Sender) -> int:
    """Send a message for every run of this process's workflows in which something is due; how many.

    Raises StoreError where the store refuses. A broker that takes no messages ends the look: the next one goes on.
    """
    sent = 0
    for run in timers.find_due(engine, unsent=True):  # the runs of other workers are for their loops
        try:
            sent += timers.send(engine, sender, run, again_after=AGAIN_AFTER_MS)
        except MessageNotSentError as error:
            log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
            log.warning("timer_not_sent", run_id=run.run_id, error=str(error))
            break
    return sent
