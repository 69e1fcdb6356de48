"""Whether the worker behind a ``running`` row still lives (RECLAIM-5): what the claim, the doctor and a kick ask in their statements,
overlap locks of whoever holds one, and a rollback of a step that it has fenced at work (COMP-9).

A worker process that keeps a heartbeat (``recovery/heartbeat.py``) claims under an id that begins with :data:`WATCHED`. Only such
claims are ever judged: those of a process without a heartbeat (``run_sync``, a worker with the setting off) are left to their own
reclaim deadline, as without leases. A watched worker counts as dead once its row in ``workers`` is as old as the lease, or gone.

Who else may be here: the heartbeat itself, an instant after a claim has judged its worker dead. Then both may run the body, and the
fence refuses the first one's outcome: a lease saves waiting, it is not what keeps a step from being recorded twice (FENCE-1).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..clock import to_iso

if TYPE_CHECKING:
    from ..settings import Settings
    from ..store.database import Tx
    from .core import Engine

#: How the id of a worker process begins that keeps a heartbeat row. No host name has a colon.
WATCHED = "beat:"

#: How long an undo waits for a body of which nothing else says how long it may take, in milliseconds.
UNBOUNDED_MS = 600_000

_SEEN = (
    "SELECT r.worker_id, w.seen_at FROM {%s} r LEFT JOIN {workers} w ON w.id = r.worker_id "
    "WHERE r.run_id = ? AND r.sequence = ? AND r.status = 'running'"
)
_ALIVE = "SELECT 1 FROM {workers} WHERE id = ? AND seen_at > ?"
_SEEN_STEP = _SEEN % "action_runs"
_SEEN_COMPENSATION = _SEEN % "compensation_runs"


def watched_sql(column: str) -> str:
    """A row's condition: it was claimed under a heartbeat. ``column`` is the row's ``worker_id``; never NULL."""
    return f"SUBSTR(COALESCE({column}, ''), 1, {len(WATCHED)}) = '{WATCHED}'"


def dead_sql(column: str) -> str:
    """A row's condition: its worker is dead. The marker stands for :func:`horizon`. To be asked of ``running`` rows only."""
    return f"{watched_sql(column)} AND NOT EXISTS (SELECT 1 FROM {{workers}} w WHERE w.id = {column} AND w.seen_at > ?)"


def seen_sql(column: str) -> str:
    """When the worker of a row was last heard from; NULL where its heartbeat row is gone, or never was."""
    return f"(SELECT w.seen_at FROM {{workers}} w WHERE w.id = {column})"


class Heart(Protocol):
    """A process's heartbeat, as the claims of that process know it."""

    #: What claims are made under.
    id: str
    #: The process that it beats in; a fork's claims are not its own.
    pid: int
    #: How often it has been silent for so long that others may have taken this process for dead.
    lapses: int

    @property
    def judges_from(self) -> int:
        """The moment before which this process takes nobody for dead: after a silence of its own, the others may have been cut off too."""
        ...

    def is_silent(self) -> bool:
        """Whether it is silent for that long now."""
        ...

    def freshen(self) -> None:
        """Beat at once where it is silent; raises ``StoreError`` where the store refuses."""
        ...


def is_on(settings: Settings) -> bool:
    """Whether dead workers' rows may be claimed (``reclaim.dead_workers.enabled``)."""
    return settings.reclaim.dead_workers.enabled


def heart_of(engine: Engine) -> Heart | None:
    """This process's heartbeat; ``None`` where it keeps none."""
    heart = engine.heart
    return heart if heart is not None and heart.pid == os.getpid() else None


def lease_ms(settings: Settings) -> int:
    """``reclaim.dead_workers.lease_seconds``, in milliseconds."""
    return int(settings.reclaim.dead_workers.lease_seconds * 1000)


def horizon(engine: Engine, now: int) -> int:
    """Whoever was last seen then, or before, counts as dead.

    Once a database can be reached again, nobody has been heard from: a process that was cut off gives the others one lease to come
    back. test_a_worker_that_was_cut_off_itself_takes_nobody_for_dead_yet
    """
    heart = heart_of(engine)
    blind = heart is not None and (now < heart.judges_from or heart.is_silent())
    return -1 if blind else now - lease_ms(engine.settings)


def is_watched(worker_id: str | None) -> bool:
    """Whether a claim under this id is ever judged by its worker's heartbeat."""
    return worker_id is not None and worker_id.startswith(WATCHED)


def name_of(worker_id: str | None) -> str:
    """A worker as people are told of it: its host, its process and its start."""
    return worker_id.removeprefix(WATCHED) if worker_id else "unknown"


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease behind a ``running`` row, as an onlooker sees it: another worker may claim the row from ``ends_at`` on.

    ``seen_at``: when its worker was last heard from; ``None`` where its heartbeat row is gone (it has then been silent for a day).
    """

    seen_at: int | None
    ends_at: int

    def is_over(self, now: int) -> bool:
        """Whether its worker counts as dead."""
        return self.ends_at <= now


def lease_behind(settings: Settings, worker_id: str | None, seen_at: int | None) -> Lease | None:
    """The lease behind a row with this worker and this :func:`seen_sql`; ``None`` where there is none."""
    if not is_on(settings) or not is_watched(worker_id):
        return None
    return Lease(seen_at, 0 if seen_at is None else seen_at + lease_ms(settings))


def at_work_until(
    engine: Engine,
    worker_id: str | None,
    seen_at: int | None,
    stale_at: int | None,
    limit_at: int | None,
    *,
    since: int,
    now: int,
) -> int:
    """Until when the body of a fenced step may be at work, as far as is known ``now``: a moment in the past where it is over (COMP-9).

    It may be until its reclaim deadline or its time limit, whichever comes first, and only while its worker is heard from (``seen_at``,
    :func:`seen_sql`), where leases are on; that is then to be asked again. Where none of the three is known, for ten minutes from ``since``.
    """
    known = min((moment for moment in (stale_at, limit_at) if moment is not None), default=None)
    if is_on(engine.settings) and is_watched(worker_id):
        until = since if seen_at is None else seen_at + lease_ms(engine.settings)
        if seen_at is not None and seen_at > horizon(engine, now):
            heart = heart_of(engine)
            # one that cannot be judged yet is soon asked about again
            until = max(until, 0 if heart is None else heart.judges_from, now + 1_000)
        return until if known is None else min(known, until)
    return since + UNBOUNDED_MS if known is None else known


def as_plain(lease: Lease | None) -> dict[str, str | None]:
    """A lease as plain values for machines, where there is one and where there is none."""
    seen_at, ends_at = (None, None) if lease is None else (lease.seen_at, lease.ends_at or None)
    return {"worker_seen_at": to_iso(seen_at), "lease_ends_at": to_iso(ends_at)}


def is_dead(tx: Tx, engine: Engine, worker_id: str, *, now: int) -> bool:
    """Whether that worker process kept a heartbeat and has not been heard from for the lease; false where leases are off."""
    if not (is_on(engine.settings) and is_watched(worker_id)):
        return False
    return tx.one(_ALIVE, (worker_id, horizon(engine, now))) is None


def lease_of(tx: Tx, engine: Engine, *, step: bool, run_id: str, sequence: int) -> int | None:
    """The moment at which the lease behind a ``running`` row ends if its worker is not heard from again.

    ``None`` where there is no lease behind it; 0 where the heartbeat row has vanished.
    """
    if not is_on(engine.settings):
        return None
    row = tx.one(_SEEN_STEP if step else _SEEN_COMPENSATION, (run_id, sequence))
    if row is None or not is_watched(row[0]):
        return None
    heart = heart_of(engine)
    return 0 if row[1] is None else max(int(row[1]) + lease_ms(engine.settings), 0 if heart is None else heart.judges_from)
