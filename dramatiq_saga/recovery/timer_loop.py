"""The loop in a worker that looks for what is due, where the broker cannot carry it itself (TIMER-1).

With Redis or RabbitMQ a delayed message would sit in a worker's memory, or unacknowledged, until its moment; so none is sent. This loop
looks twice a second, by indexes that hold open deadlines only, and sends a message for each run in which something is due: the worker
that gets it ends it. Any number of workers may loop: one of them takes a run, by a conditional write, for a while. Nothing depends on a
loop but the second: the sweep finds the same rows. It survives whatever goes wrong, and ends with its worker.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import structlog

from ..engine import timers
from ..errors import MessageNotSentError

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender

#: Seconds between two looks; each is somewhat spread, so that workers do not all look at once.
INTERVAL = 0.5

#: Longest pause after errors, in seconds.
LONGEST_PAUSE = 10.0

#: After so many milliseconds a message for what is still due is sent again.
AGAIN_AFTER_MS = 15_000


class TimerLoop:
    """One process's loop. :meth:`start` and :meth:`stop` may be called for every worker in it: it runs while there is one."""

    def __init__(self, engine: Engine, sender: Sender, *, interval: float = INTERVAL) -> None:
        self._engine = engine
        self._sender = sender
        self._interval = interval
        self._workers = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
        self._spread = random.Random()

    def start(self) -> None:
        """Begin to loop, for one worker more."""
        with self._lock:
            self._workers += 1
            if self._thread is None:
                self._stopping = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopping,), name="saga-timers", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """One worker less; with the last one the loop ends, and is waited for."""
        with self._lock:
            self._workers = max(0, self._workers - 1)
            if self._workers or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stopping.set()
        thread.join(timeout=10)

    def _run(self, stopping: threading.Event) -> None:
        failures = 0
        try:
            while not stopping.is_set():
                try:
                    look(self._engine, self._sender)
                    failures = 0
                except Exception as error:
                    failures += 1
                    self._log.warning("timers_not_looked_at", error=f"{type(error).__name__}: {error}")
                pause = min(self._interval * 2 ** min(failures, 10), LONGEST_PAUSE)
                stopping.wait(pause * self._spread.uniform(0.8, 1.2))
        finally:
            self._engine.store.close_thread()


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
