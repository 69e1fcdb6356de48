"""A thread that a worker process keeps beside its work: the life that the heartbeat, the look for timers and the sweeps share.

It runs while the process has a worker, however many those are, and acts again and again with pauses between, measured on the monotonic
clock. Whatever an act raises is told and outlived: the thread ends with the last worker, and never before. It is a daemon: an act
that hangs does not keep its process.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from ..engine.core import Engine

#: How long the end of an act that is under way is waited for, in seconds.
PATIENCE = 10.0


class Background:
    """One process's thread of a kind. :meth:`start` and :meth:`stop` are called for every worker in the process; again does no harm."""

    def __init__(self, engine: Engine, *, thread_name: str) -> None:
        self._engine = engine
        self._thread_name = thread_name
        self._workers: set[object] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
        self._spread = random.Random()

    # --- what a kind says of itself ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called before the thread is started; what it raises keeps it from being started."""

    def act(self) -> float:
        """Act once; the pause until the next act, in seconds."""
        raise NotImplementedError

    def failed(self, error: Exception, failures: int) -> float:
        """Tell of an act that has failed, the ``failures``-th one running; the pause until the next, in seconds."""
        raise NotImplementedError

    def end(self) -> None:
        """Called after the thread has ended, or was left behind in an act."""

    # --- its life ------------------------------------------------------------------------------------------------------

    def start(self, worker: object) -> None:
        """Begin to act, for this worker too. Raises what :meth:`begin` raises."""
        with self._lock:
            if self._thread is None:
                self.begin()
                self._stopping = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopping,), name=self._thread_name, daemon=True)
                self._thread.start()
            self._workers.add(worker)

    def stop(self, worker: object) -> None:
        """Not for this worker any more; with the last one the thread ends, and is waited for.

        Who else may be here: a worker that starts. It waits until this is over, or :meth:`end` would put an end to what it has begun.
        test_a_worker_that_starts_while_the_last_one_stops_keeps_its_heartbeat
        """
        with self._lock:
            self._workers.discard(worker)
            if self._workers or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stopping.set()
            thread.join(timeout=PATIENCE)
            self.end()

    def _run(self, stopping: threading.Event) -> None:
        failures = 0
        try:
            while not stopping.is_set():
                try:
                    pause = self.act()
                    failures = 0
                except Exception as error:
                    failures += 1
                    pause = self.failed(error, failures)
                stopping.wait(pause)
        finally:
            self._engine.store.close_thread()
