"""Prune: runs that ended long ago are deleted with everything that belongs to them (PRUNE-1).

Each run in one transaction, which repeats what made it a candidate: a rollback that is resumed meanwhile, or a child that is
still at work under it, keeps it. Candidates are read page by page from the index of ended runs, behind the last one seen, so runs
that have to stay do not stand in front of the others, and stopping in the middle leaves nothing half done. What is gone with a
run: its steps, compensations, waits, signals, links to children, history and tags, and the run id's protection against being
started twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..store.database import Store, Tx

#: Runs that one read lists.
BATCH = 200

# Conditions on a run ``f``: over for good, and no live run under it (an abandoned child outlives its parent).
_GONE = (
    "f.ended_at IS NOT NULL AND f.ended_at <= ? AND f.rollback <> 'running' AND f.rollback <> 'halted' "
    "AND NOT EXISTS (SELECT 1 FROM {flow_runs} c WHERE c.parent_id = f.id AND c.ended_at IS NULL)"
)
_PAGE = (
    f"SELECT f.ended_at, f.id FROM {{flow_runs}} f WHERE {_GONE} AND f.ended_at >= ? AND (f.ended_at > ? OR (f.ended_at = ? AND f.id > ?)) "
    "ORDER BY f.ended_at, f.id LIMIT ?"
)
_COUNT = f"SELECT COUNT(*) FROM {{flow_runs}} f WHERE {_GONE}"
_LOCK = f"SELECT f.id FROM {{flow_runs}} f WHERE f.id = ? AND {_GONE}{{for_update}}"
_DELETE = "DELETE FROM {flow_runs} WHERE id = ?"
_ROWS = tuple(
    f"DELETE FROM {{{table}}} WHERE run_id = ?"
    for table in (
        "action_runs", "compensation_runs", "blocks", "waits", "signals", "children", "side_effects", "tags", "flow_events",
    )
)  # fmt: skip


@dataclass(slots=True)
class PruneReport:
    """What one prune did. ``pruned`` counts runs: deleted ones, or with ``dry_run`` those that would be."""

    before: int
    pruned: int = 0
    skipped: int = 0
    dry_run: bool = False


def horizon(store: Store, days: float) -> int:
    """The moment that lies so many days back, each of exactly 24 hours, whatever clocks do meanwhile (C53)."""
    return store.clock.now() - round(days * 86_400_000)


def prune(store: Store, *, before: int, dry_run: bool = False, limit: int | None = None) -> PruneReport:
    """Delete runs that ended at ``before`` (milliseconds) or earlier, the oldest first; with ``dry_run`` only count them.

    ``limit`` ends it after that many. Safe to repeat, and from many processes at once. Raises StoreError where the store refuses;
    what was deleted until then is gone, and the rest is as it was.
    """
    report = PruneReport(before, dry_run=dry_run)
    if dry_run:
        row = store.read(lambda tx: tx.one(_COUNT, (before,)))
        report.pruned = int(row[0]) if row else 0
        return report
    last: tuple[int, str] = (-1, "")
    while True:
        params = (before, last[0], last[0], last[0], last[1], BATCH)
        page = store.read(lambda tx, params=params: tx.all(_PAGE, params))  # type: ignore[misc]
        for _, run_id in page:
            if limit is not None and report.pruned >= limit:
                return report
            if store.write(lambda tx, run_id=run_id: _delete(tx, run_id, before)):  # type: ignore[misc]
                report.pruned += 1
            else:
                report.skipped += 1
        if len(page) < BATCH:
            return report
        last = (page[-1][0], page[-1][1])


def _delete(tx: Tx, run_id: str, before: int) -> bool:
    """One run, if it still may go.

    Who else may be here: a second prune (the run is gone, or its row locked until it is), an operator who resumes its rollback
    (the lock decides who is first). test_a_rollback_that_is_resumed_keeps_its_run, test_of_two_prunes_one_deletes_a_run
    """
    if tx.one(_LOCK, (run_id, before)) is None:
        return False
    for statement in _ROWS:
        tx.run(statement, (run_id,))
    return tx.run(_DELETE, (run_id,)) > 0
