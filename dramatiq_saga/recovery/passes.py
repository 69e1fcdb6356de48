"""One pass at a time: of those that come to monitor, repair or prune together, one does it and the others skip it (LOOP-1).

A row per kind of pass in ``passes`` says who began the last one and when, and whether it has ended. It is taken by one conditional
``UPDATE`` that repeats its number. Nothing rests on it: passes that overlap change nothing twice (DOCTOR-2); it only keeps many
processes from doing the same work side by side. So it is never renewed: whoever has died in a pass, or hangs in one, keeps the others
from theirs for :data:`LEASE` at most. Moments of the row that lie as far ahead mean that a clock was set back, and count for nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..clock import to_iso
from ..errors import StoreError
from ..store.models import LIVE

if TYPE_CHECKING:
    from ..engine.core import Engine
    from ..store.database import Tx

T = TypeVar("T")

#: The kinds.
MONITOR, REPAIR, PRUNE = "monitor", "repair", "prune"

#: For so long a pass that has not ended counts as under way, in seconds.
LEASE = 30.0

#: A pass is due once this part of its interval is over since the last one began: those who come for it are never quite on time.
DUE = 0.9

#: Where runs are live and the monitor has begun no pass for so many seconds, nothing sweeps.
UNSWEPT = 600.0

_LAST = "SELECT name, began_at FROM {passes} WHERE name <> 'prune'"
_LIVE_RUN = f"SELECT 1 FROM {{flow_runs}} WHERE {LIVE} LIMIT 1"
_SEEN = "SELECT number, holder, began_at, ended_at FROM {passes} WHERE name = ?"
_FIRST = "{insert_ignore} {passes} (name, number, holder, began_at, ended_at) VALUES (?, 0, '', 0, 0){or_ignore}"
_TAKE = "UPDATE {passes} SET number = number + 1, holder = ?, began_at = ?, ended_at = NULL WHERE name = ? AND number = ?"
_END = "UPDATE {passes} SET ended_at = ? WHERE name = ? AND number = ?"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A pass that was left to somebody else: ``holder`` began it at ``began_at`` (milliseconds UTC), and may have ended it."""

    name: str
    holder: str
    began_at: int
    ended_at: int | None

    def line(self) -> str:
        """The same for people."""
        verb = "is at it since" if self.ended_at is None else "has done it at"
        return f"{self.name} skipped: {self.holder} {verb} {to_iso(self.began_at)}"


@dataclass(frozen=True, slots=True)
class LastPasses:
    """When the monitor and the doctor last began a pass, in milliseconds UTC; ``None``: never, as far as the database knows.

    ``unswept``: runs are live, and no monitor has come for :data:`UNSWEPT`. A pass from beyond a clock that was set back does not count.
    """

    monitor: int | None
    repair: int | None
    unswept: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {"monitor": to_iso(self.monitor), "repair": to_iso(self.repair), "unswept": self.unswept}


def read_last(tx: Tx, now: int) -> LastPasses:
    """The last passes, in a transaction of the caller's."""
    began = dict(tx.all(_LAST))
    monitor = began.get(MONITOR)
    late = monitor is None or abs(now - monitor) > UNSWEPT * 1000
    return LastPasses(monitor, began.get(REPAIR), late and tx.one(_LIVE_RUN) is not None)


def in_turn(engine: Engine, name: str, do: Callable[[], T], *, every: float | None = None) -> T | Skipped:
    """Do a pass, unless another process is at one of its kind; with ``every``, unless one has begun within about so many seconds.

    Raises StoreError where the store refuses, and what ``do`` raises; either way the next one may begin.
    """
    number = _take(engine, name, every)
    if isinstance(number, Skipped):
        return number
    try:
        return do()
    finally:
        with suppress(StoreError):  # then the lease runs out
            engine.store.write(lambda tx: tx.run(_END, (engine.now(), name, number)))


def _take(engine: Engine, name: str, every: float | None) -> int | Skipped:
    """The number of the pass that this call has begun."""
    seen = engine.store.read(lambda tx: tx.one(_SEEN, (name,)))
    now = engine.now()
    if seen is not None and not _is_due(now, every, began_at=seen[2], ended_at=seen[3]):
        return Skipped(name, *seen[1:])
    number = seen[0] if seen is not None else 0
    holder = f"{socket.gethostname()[:100]}-{os.getpid()}"

    def take(tx: Tx) -> bool:
        if seen is None:
            tx.run(_FIRST, (name,))
        # Who else may be here: whoever has seen the same number. One of them changes it, the others find theirs gone.
        # test_of_those_who_come_for_a_pass_together_one_does_it
        return bool(tx.run(_TAKE, (holder, now, name, number)))

    if engine.store.write(take):
        return number + 1
    winner = engine.store.read(lambda tx: tx.one(_SEEN, (name,)))
    assert winner is not None
    return Skipped(name, *winner[1:])


def _is_due(now: int, every: float | None, *, began_at: int, ended_at: int | None) -> bool:
    """Whether a pass may begin. Distances, not differences: a row from beyond a clock that was set back must not stop anybody (C52)."""
    age = abs(now - began_at) / 1000
    if ended_at is None and age < (LEASE if every is None else min(LEASE, every)):
        return False
    return every is None or age >= DUE * every
