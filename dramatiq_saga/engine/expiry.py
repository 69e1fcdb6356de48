"""The end of a run whose deadline has passed (EXPIRE-1): it is undone, and ends as ``expired``.

:func:`expire` is the one way to that end: ``timers.py`` calls it at the moment, and a drive that comes later and would have the run go
on. The plan is made as for an operator's rollback. Where it cannot be made nothing is written; what follows from that is the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..clock import to_iso
from . import runs
from .replay import HoldRun
from .rollback import ReplanIncompleteError

if TYPE_CHECKING:
    from .core import Engine, Sender
    from .rows import Decision, Snapshot


class ExpiryRefusedError(Exception):
    """An overdue run whose rollback cannot be planned now; what the anomaly journal is told (EXPIRE-2)."""


def expire(engine: Engine, snapshot: Snapshot, sender: Sender, delivery: object | None) -> bool:
    """Undo an overdue run, to end as ``expired``; false, and journalled as ``transition_lost``, where it has moved on: look again.

    Raises:
      HoldRun, ExpiryRefusedError: its rollback cannot be planned (COMP-3); nothing was written.
    """
    assert snapshot.expires_at is not None
    decision = _rehearsed(engine, snapshot)
    reason = f"its deadline ({to_iso(snapshot.expires_at)}) has passed"
    if runs.undo(engine, snapshot, decision, sender=sender, ends_as="expired", delivery=delivery, reason=reason):
        return True
    engine.anomalies.transition_lost(
        run_id=snapshot.run_id, workflow=snapshot.workflow, observed=snapshot.status, intended="expired", actual="moved on"
    )
    return False


def _rehearsed(engine: Engine, snapshot: Snapshot) -> Decision | None:
    decision, missed = runs.rehearse(engine, snapshot)
    if decision is not None and decision.kind == "completed":
        raise ExpiryRefusedError("the workflow function would complete now: the next drive decides that")
    if missed is not None:
        engine.anomalies.replan_incomplete(run_id=snapshot.run_id, workflow=snapshot.workflow, missing=missed)
        raise HoldRun(ReplanIncompleteError(missed, snapshot.entries[missed - 1].describe()))
    return decision
