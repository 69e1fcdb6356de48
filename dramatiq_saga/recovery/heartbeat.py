"""A worker process's heartbeat: a row in ``workers`` that says when it was last heard from (RECLAIM-5).

While ``reclaim.dead_workers`` is on, a thread per process renews the row well within the lease, from before its worker takes its
first message until after its last; what the process claims meanwhile carries the row's id. Others take over what a worker was at
once that row is as old as the lease, or gone (``engine/liveness.py``). The thread survives whatever goes wrong. It remembers when it
was silent for so long that others may have judged it, so that a claim that has not begun its body is made again.

A machine's clock may be set while workers run (CLOCK-1). Forward, everybody looks silent: who notices that of itself beats, and
takes nobody for dead for one lease. Back, a dead worker's row lies in the future: the next beat of another brings it to the present.

An orderly stop deletes the row, unless a claim is still behind it: then the row stays, and the lease runs out. A row belongs to one
process and one start of it: a forked child has none, and a process that starts again takes a new id.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from ..clock import SystemClock
from ..engine import liveness
from ..errors import StoreError
from ..store.models import LIVE

if TYPE_CHECKING:
    from ..engine.core import Engine
    from ..store.database import Tx

#: Beats per lease, at least.
BEATS = 4

#: Longest pause after an error, in seconds.
RETRY = 1.0

#: Rows of workers that have been silent for this many milliseconds are deleted; gone or silent, they count as dead.
FORGOTTEN_MS = 86_400_000

_HERE = "SELECT seen_at FROM {workers} WHERE id = ?{for_update}"  # another one may be forgetting it
_ENTER = "INSERT INTO {workers} (id, host, pid, started_at, seen_at) VALUES (?, ?, ?, ?, ?)"
_BEAT = "UPDATE {workers} SET seen_at = ? WHERE id = ?"
_AHEAD = "SELECT id FROM {workers} WHERE seen_at > ? ORDER BY id"
_CLAIMS = tuple(
    f"SELECT 1 FROM {{{table}}} r WHERE r.{LIVE} AND r.status = 'running' AND r.worker_id = ? LIMIT 1"
    for table in ("action_runs", "compensation_runs")
)
_LEAVE = "DELETE FROM {workers} WHERE id = ?"
_FORGET = "DELETE FROM {workers} WHERE seen_at <= ?"


class Heartbeat:
    """One process's heartbeat. :meth:`start` and :meth:`stop` may be called for every worker in it: it beats while there is one."""

    def __init__(self, engine: Engine, *, monotonic: Callable[[], int] | None = None) -> None:
        self.pid = os.getpid()
        self.id = ""
        self.lapses = 0
        self._engine = engine
        self._host = socket.gethostname()
        self._lease = liveness.lease_ms(engine.settings)
        # Milliseconds on a clock that nobody sets; a clock of the host's own is taken at its word.
        self._monotonic = monotonic or (_uptime if isinstance(engine.clock, SystemClock) else engine.clock.now)
        self._seen = 0  # the last moment that is known to be in the row
        self._beaten = 0  # the same, on the clock that nobody sets
        self._judges = 0  # on that clock: when others may be judged again
        self._started_at = 0
        self._workers = 0
        self._lock = threading.Lock()
        self._beating = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")

    def start(self) -> None:
        """Beat once, then go on in a thread, for one worker more. Raises StoreError where the store refuses the first beat."""
        with self._lock:
            if self._thread is None:
                self.enter()
                self._stopping = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopping,), name="saga-heartbeat", daemon=True)
                self._thread.start()
            self._workers += 1

    def stop(self) -> None:
        """One worker less; with the last one the thread ends and is waited for, and the row is deleted if no claim rests on it."""
        with self._lock:
            self._workers = max(0, self._workers - 1)
            if self._workers or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stopping.set()
        thread.join(timeout=10)
        with suppress(StoreError):  # then the row grows old, as a dead worker's does
            self.leave()

    def enter(self) -> None:
        """Take a new id and write its row; claims are made under it from here on.

        Others are given the time for one beat before they are judged: nobody knows here whether the database could be reached until now.
        """
        self.id = f"{liveness.WATCHED}{self._host[:24]}-{self.pid}-{secrets.token_hex(8)}"
        self._started_at = self._seen = self._engine.now()
        self._beaten = self._monotonic()
        self.beat()
        self._judges = max(self._judges, self._beaten + self._lease // BEATS)
        self._engine.heart = self

    def leave(self) -> bool:
        """Make no more claims under the id, and delete its row; false where a claim is left behind, and so the row, and in a fork."""
        if self.pid != os.getpid():
            return False
        self._engine.heart = None
        mine = self.id

        def operation(tx: Tx) -> bool:
            # Who else may be here: a body that has outlived the worker's patience with it, and may still report. Without the row it
            # would be taken over at once. test_a_row_that_a_claim_rests_on_is_left_to_its_lease
            if any(tx.one(sql, (mine,)) for sql in _CLAIMS):
                return False
            return bool(tx.run(_LEAVE, (mine,)))

        return self._engine.store.write(operation)

    @property
    def judges_from(self) -> int:
        """The moment before which this process takes nobody for dead; 0 where it is over."""
        left = self._judges - self._monotonic()
        return self._engine.now() + left if left > 0 else 0

    def is_silent(self) -> bool:
        """Whether others may take this process for dead. Earlier than they do by a beat: clocks differ a little (CLOCK-1).

        By whichever clock has gone further: one may have been set back, the other stands still while a machine is suspended.
        """
        silence = max(self._engine.now() - self._seen, self._monotonic() - self._beaten)
        return silence >= self._lease * (BEATS - 1) // BEATS

    def freshen(self) -> None:
        """Beat at once where it is silent: so a claim is never made under a row that is old already."""
        if self.is_silent():
            self.beat()

    def beat(self) -> None:
        """Say that this process lives. Raises StoreError where the store refuses."""
        with self._beating:
            now, beaten = self._engine.now(), self._monotonic()

            def operation(tx: Tx) -> bool:
                known = tx.one(_HERE, (self.id,)) is not None
                if known:
                    tx.run(_BEAT, (now, self.id))
                else:  # the first one, or somebody has deleted it
                    tx.run(_ENTER, (self.id, self._host, self.pid, self._started_at, now))
                # The clock was set back (C52). Whoever lives beats by it, and has done so before a lease is over.
                # test_a_dead_workers_row_that_a_clock_set_back_has_put_into_the_future_grows_old_all_the_same
                for (other,) in tx.all(_AHEAD, (now + self._lease,)):
                    tx.run(_BEAT, (now, other))
                return known

            known = self._engine.store.write(operation)
            if not known and self._engine.heart is self:  # until now, whatever was claimed under it was anybody's
                self.lapses += 1
            # Until the commit, others saw the moment before. test_a_beat_that_commits_late_is_a_lapse
            if self.is_silent():
                self._judges = self._monotonic() + self._lease
                self.lapses += 1
            self._seen, self._beaten = now, beaten

    def forget(self) -> int:
        """Delete the rows of workers that are long dead; how many. None while this process takes nobody for dead."""
        if self.judges_from or self.is_silent():
            return 0
        horizon = self._engine.now() - max(FORGOTTEN_MS, 2 * self._lease)
        return self._engine.store.write(lambda tx: tx.run(_FORGET, (horizon,)))

    def _run(self, stopping: threading.Event) -> None:
        pause, beats = self._lease / 1000 / BEATS, 0
        spread = random.Random()
        try:
            while not stopping.is_set():
                failed = False
                try:
                    if beats:
                        self.beat()
                    if beats % 1000 == 2 * BEATS:  # so long after a start, whoever lives has beaten
                        self.forget()
                    beats += 1
                except Exception as error:
                    failed = True
                    self._log.warning("heartbeat_failed", error=f"{type(error).__name__}: {error}")
                stopping.wait((min(pause, RETRY) if failed else pause) * spread.uniform(0.8, 1.0))
        finally:
            self._engine.store.close_thread()


def _uptime() -> int:
    return time.monotonic_ns() // 1_000_000
