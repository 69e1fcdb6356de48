"""A worker process's heartbeat: a row in ``workers`` that says when it was last heard from (RECLAIM-5).

While ``reclaim.dead_workers`` is on, a thread per process renews the row well within the lease, from before its worker takes its
first message until after its last; what the process claims meanwhile carries the row's id. It never waits behind the process's
other writes, which may be waiting for a run that somebody keeps locked. Others take over what a worker was at
once that row is as old as the lease, or gone (``engine/liveness.py``). The thread survives whatever goes wrong. It remembers when it
was silent for so long that others may have judged it, so that a claim that has not begun its body is made again.

A machine's clock may be set while workers run (CLOCK-1). Forward, everybody looks silent: who notices that of itself beats, and
takes nobody for dead for one lease. Back, a dead worker's row lies in the future: the next beat of another brings it to the present.

An orderly stop deletes the row, unless a claim is still behind it: then the row stays, and the lease runs out. A row belongs to one
process and one start of it: a forked child has none, and a process that starts again takes a new id.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..clock import SystemClock
from ..engine import liveness
from ..errors import StoreError
from ..store.models import LIVE
from .background import Background

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
# COMP-9: a body that a rollback has fenced, and that has not reported.
_FENCED = (
    "SELECT 1 FROM {compensation_runs} r JOIN {action_runs} a ON a.run_id = r.run_id AND a.sequence = r.sequence "
    f"WHERE r.{LIVE} AND r.status = 'pending' AND r.not_before IS NOT NULL AND a.status IN ('cancelled', 'expired') "
    "AND a.worker_id = ? LIMIT 1"
)
_LEAVE = "DELETE FROM {workers} WHERE id = ?"
_FORGET = "DELETE FROM {workers} WHERE seen_at <= ?"


class Heartbeat(Background):
    """One process's heartbeat. Raises StoreError at its start where the store refuses the first beat."""

    def __init__(self, engine: Engine, *, monotonic: Callable[[], int] | None = None) -> None:
        super().__init__(engine, thread_name="saga-heartbeat")
        self.pid = os.getpid()
        self.id = ""
        self.lapses = 0
        self._host = socket.gethostname()
        self._lease = liveness.lease_ms(engine.settings)
        # Milliseconds on a clock that nobody sets; a clock of the host's own is taken at its word.
        self._monotonic = monotonic or (_uptime if isinstance(engine.clock, SystemClock) else engine.clock.now)
        self._seen = 0  # the last moment that is known to be in the row
        self._beaten = 0  # the same, on the clock that nobody sets
        self._judges = 0  # on that clock: when others may be judged again
        self._started_at = 0
        self._beats = 0
        self._beating = threading.Lock()

    def begin(self) -> None:
        """Beat once, before there is a thread."""
        self.enter()
        self._beats = 0

    def act(self) -> float:
        """Beat, and now and then delete what dead workers have left."""
        if self._beats:
            self.beat()
        if self._beats % 1000 == 2 * BEATS:  # so long after a start, whoever lives has beaten
            self.forget()
        self._beats += 1
        return self._pause

    def failed(self, error: Exception, failures: int) -> float:
        """Beat again soon: the lease is running. Said of the first failure, the second, the fourth, the eighth, …"""
        if failures & (failures - 1) == 0:
            self._log.warning("heartbeat_failed", failures=failures, error=f"{type(error).__name__}: {error}")
        return min(self._pause, RETRY)

    def end(self) -> None:
        """Delete the row if no claim rests on it."""
        with suppress(StoreError):  # then the row grows old, as a dead worker's does
            self.leave()

    @property
    def _pause(self) -> float:
        return self._lease / 1000 / BEATS * self._spread.uniform(0.8, 1.0)

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
            if any(tx.one(sql, (mine,)) for sql in (*_CLAIMS, _FENCED)):
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

            known = self._engine.store.write(operation, urgent=True)
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
        return self._engine.store.write(lambda tx: tx.run(_FORGET, (horizon,)), urgent=True)


def _uptime() -> int:
    return time.monotonic_ns() // 1_000_000
