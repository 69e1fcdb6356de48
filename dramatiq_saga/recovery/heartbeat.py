"""A worker process's heartbeat: a row in ``workers`` that says when it was last heard from (RECLAIM-5).

While ``reclaim.dead_workers`` is on, a thread per process renews the row well within the lease, from before its worker takes its
first message until after its last; what the process claims meanwhile carries the row's id. Others take over what a worker was at
once that row is as old as the lease, or gone (``engine/liveness.py``). The thread survives whatever goes wrong. It remembers when it
was silent for so long that others may have judged it, so that a claim that has not begun its body is made again.

An orderly stop deletes the row, unless a claim is still behind it: then the row stays, and the lease runs out. A row belongs to one
process and one start of it: a forked child has none, and a process that starts again takes a new id.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

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

_HERE = "SELECT seen_at FROM {workers} WHERE id = ?"
_ENTER = "INSERT INTO {workers} (id, host, pid, started_at, seen_at) VALUES (?, ?, ?, ?, ?)"
_BEAT = "UPDATE {workers} SET seen_at = ? WHERE id = ?"
_CLAIMS = tuple(
    f"SELECT 1 FROM {{{table}}} r WHERE r.{LIVE} AND r.status = 'running' AND r.worker_id = ? LIMIT 1"
    for table in ("action_runs", "compensation_runs")
)
_LEAVE = "DELETE FROM {workers} WHERE id = ?"
_FORGET = "DELETE FROM {workers} WHERE seen_at <= ?"


class Heartbeat(Background):
    """One process's heartbeat. Raises StoreError at its start where the store refuses the first beat."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, thread_name="saga-heartbeat")
        self.pid = os.getpid()
        self.id = ""
        self.lapses = 0
        self.judges_from = 0
        self._host = socket.gethostname()
        self._lease = liveness.lease_ms(engine.settings)
        self._seen = 0  # the last moment that is known to be in the row
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
        if self._beats % 1000 == 0:
            self.forget()
        self._beats += 1
        return self._pause

    def failed(self, error: Exception, failures: int) -> float:
        """Beat again soon: the lease is running."""
        self._log.warning("heartbeat_failed", error=f"{type(error).__name__}: {error}")
        return min(self._pause, RETRY)

    def end(self) -> None:
        """Delete the row if no claim rests on it."""
        with suppress(StoreError):  # then the row grows old, as a dead worker's does
            self.leave()

    @property
    def _pause(self) -> float:
        return self._lease / 1000 / BEATS * self._spread.uniform(0.8, 1.0)

    def enter(self) -> None:
        """Take a new id and write its row; claims are made under it from here on."""
        self.id = f"{liveness.WATCHED}{self._host[:24]}-{self.pid}-{secrets.token_hex(8)}"
        self._started_at = self._seen = self._engine.now()
        self.beat()
        self._engine.heart = self

    def leave(self) -> bool:
        """Make no more claims under the id, and delete its row; false where a claim is left behind, and so the row."""
        self._engine.heart = None
        mine = self.id

        def operation(tx: Tx) -> bool:
            # Who else may be here: a body that has outlived the worker's patience with it, and may still report. Without the row it
            # would be taken over at once. test_a_row_that_a_claim_rests_on_is_left_to_its_lease
            if any(tx.one(sql, (mine,)) for sql in _CLAIMS):
                return False
            return bool(tx.run(_LEAVE, (mine,)))

        return self._engine.store.write(operation)

    def is_silent(self) -> bool:
        """Whether others may take this process for dead. Earlier than they do by a beat: clocks differ a little (CLOCK-1)."""
        return self._engine.now() - self._seen >= self._lease * (BEATS - 1) // BEATS

    def freshen(self) -> None:
        """Beat at once where it is silent: so a claim is never made under a row that is old already."""
        if self.is_silent():
            self.beat()

    def beat(self) -> None:
        """Say that this process lives. Raises StoreError where the store refuses."""
        with self._beating:
            now = self._engine.now()

            def operation(tx: Tx) -> None:
                if tx.one(_HERE, (self.id,)) is None:  # the first one, or forgotten meanwhile
                    tx.run(_ENTER, (self.id, self._host, self.pid, self._started_at, now))
                else:
                    tx.run(_BEAT, (now, self.id))

            self._engine.store.write(operation)
            # Until the commit, others saw the moment before. test_a_beat_that_commits_late_is_a_lapse
            if self.is_silent():
                self.judges_from = self._engine.now() + self._lease
                self.lapses += 1
            self._seen = now

    def forget(self) -> int:
        """Delete the rows of workers that are long dead; how many."""
        horizon = self._engine.now() - max(FORGOTTEN_MS, 2 * self._lease)
        return self._engine.store.write(lambda tx: tx.run(_FORGET, (horizon,)))
