"""Committing a decision: everything that one replay leads to, in one transaction (DRIVE-1).

:func:`write` runs inside a transaction and repeats the revision and the wake count that the replay rested on; where either
has moved on it writes nothing and says so. Who else may be here: another drive of the same run, an outcome, a cancel, a
signal. Each of them raises the revision or the wake count in the transaction that records it, so of two that started from
one history exactly one finds it unchanged. Proven by ``tests/races/test_interleavings.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..journal import history
from . import rollback
from .rows import Decision, Entry, NewStep, Outgoing, Snapshot

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine

_ADVANCE = (
    "UPDATE {flow_runs} SET status = ?, revision = revision + 1, wakes_seen = ?, wakes = ?, "
    "started_at = COALESCE(started_at, ?), woken_at = NULL, hold_error = NULL, hold_count = 0, hold_until = NULL, "
    "repair_attempts = 0, repair_after = NULL "
    "WHERE id = ? AND revision = ? AND wakes = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)
_END = (
    "UPDATE {flow_runs} SET status = ?, revision = revision + 1, wakes_seen = ?, wakes = ?, "
    "started_at = COALESCE(started_at, ?), ended_at = ?, result = ?, error = ?, woken_at = NULL, hold_error = NULL, "
    "hold_until = NULL WHERE id = ? AND revision = ? AND wakes = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)
_STEP_COLUMNS = (
    "run_id, sequence, actor, queue, priority, options, args, status, given_up, attempts, tries, claims, cycle, optional, "
    "max_claims, reclaim_stale_after_seconds, comp_actor, comp_args, comp_options, comp_from_result, comp_on_self_failure, "
    "comp_policy, comp_parallel, comp_reclaim_stale_after_seconds, expires_at, sent_at, repair_attempts, created_at"
)
_INSERT_STEP = (
    f"INSERT INTO {{action_runs}} ({_STEP_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, 'pending', FALSE, 0, 0, 0, 0, FALSE, "
    "?, ?, ?, ?, ?, ?, ?, ?, FALSE, ?, ?, ?, 0, ?)"
)
_RESOLVE = "UPDATE {action_runs} SET comp_actor = ?, comp_args = ?, comp_options = ? WHERE run_id = ? AND sequence = ? AND comp_args IS NULL"
_TAG_UPDATE = "UPDATE {tags} SET value = ? WHERE run_id = ? AND name = ?"
_TAG_INSERT = "{insert_ignore} {tags} (run_id, name, value) VALUES (?, ?, ?){or_ignore}"
_SETTLE_LIVE = (
    "UPDATE {action_runs} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND "
    "(status IN ('pending', 'running', 'awaiting_retry') OR (status = 'failed' AND given_up = FALSE))"
)
_SETTLE_WAITS = "UPDATE {waits} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND status = 'waiting'"


def write(
    tx: Tx,
    engine: Engine,
    snapshot: Snapshot,
    decision: Decision,
    *,
    now: int,
    sent_at: int | None,
    wakes: int = 0,
    plan: rollback.Plan | None = None,
    entries: Sequence[Entry] | None = None,
) -> bool:
    """Write ``decision``; false (and nothing written) where the run is no longer as ``snapshot`` has it.

    ``snapshot`` is the history as the database holds it before this transaction; ``wakes`` is what this same transaction
    raises the wake count by (an outcome written beside it), and counts as seen; ``entries`` is the history with that outcome.
    """
    seen = snapshot.wakes + wakes
    if decision.kind == "suspended":
        status = "waiting" if decision.outside else "running"
        landed = tx.run(_ADVANCE, (status, seen, seen, now, snapshot.run_id, snapshot.revision, snapshot.wakes))
    elif plan is not None and plan.rows:
        landed = rollback.enter(tx, engine, snapshot, plan, now=now, seen=seen, sent_at=sent_at)
    else:
        status = "completed" if decision.kind == "completed" else "failed"
        landed = tx.run(
            _END,
            (status, seen, seen, now, now, decision.result, decision.error, snapshot.run_id, snapshot.revision, snapshot.wakes),
        )
    if not landed:
        return False
    for step in decision.steps:
        tx.run(_INSERT_STEP, step_row(snapshot.run_id, step, now=now, sent_at=sent_at))
    for sequence, spec in decision.resolved:
        tx.run(_RESOLVE, (spec.actor, spec.args, spec.options, snapshot.run_id, sequence))
    for name, value in decision.tags.items():
        write_tag(tx, snapshot.run_id, name, value)
    if decision.kind != "suspended" and any(rollback.is_live(entry) for entry in entries or snapshot.entries):
        settle_live(tx, snapshot.run_id, now=now)
    return True


def settle_live(tx: Tx, run_id: str, *, now: int) -> None:
    """What a run still held when it ended, or when its rollback was planned, becomes ``cancelled`` (STATUS-2)."""
    tx.run(_SETTLE_LIVE, (now, run_id))
    tx.run(_SETTLE_WAITS, (now, run_id))


def write_tag(tx: Tx, run_id: str, name: str, value: str | None) -> None:
    """One value per key, the last write wins (TAG-1)."""
    if not tx.run(_TAG_UPDATE, (value, run_id, name)):
        tx.run(_TAG_INSERT, (run_id, name, value))


def step_row(run_id: str, step: NewStep, *, now: int, sent_at: int | None) -> tuple[Any, ...]:
    """The parameters of a new step's row."""
    spec = step.compensation
    return (
        run_id,
        step.sequence,
        step.actor,
        step.queue,
        step.priority,
        json.dumps(step.options) if step.options else None,
        step.args,
        step.max_claims,
        step.reclaim_stale_after_seconds,
        spec.actor if spec else None,
        spec.args if spec else None,
        spec.options if spec else None,
        step.comp_from_result,
        step.comp_on_self_failure,
        step.comp_policy,
        step.comp_reclaim_stale_after_seconds,
        step.expires_at,
        sent_at,
        now,
    )


def messages(snapshot: Snapshot, decision: Decision) -> list[Outgoing]:
    """The messages of the steps that ``decision`` creates."""
    return [
        Outgoing("step", snapshot.run_id, step.actor, step.queue, step.sequence, priority=step.priority, options=step.options)
        for step in decision.steps
    ]


def events(snapshot: Snapshot, decision: Decision, plan: rollback.Plan | None) -> list[history.Line]:
    """What the run's history says of ``decision``."""
    lines: list[history.Line] = []
    if decision.kind == "suspended":
        if decision.outside and snapshot.status != "waiting":
            lines.append(history.Line(history.FLOW_WAITING, name=snapshot.workflow))
        elif not decision.outside and snapshot.status == "waiting":
            lines.append(history.Line(history.FLOW_RESUMED, name=snapshot.workflow))
    elif decision.kind == "completed":
        lines.append(history.Line(history.FLOW_COMPLETED, name=snapshot.workflow, payload=decision.result))
    elif plan is not None and plan.rows:
        lines.append(history.Line(history.COMPENSATION_STARTED, name=snapshot.workflow, error=decision.error))
    else:
        lines.append(history.Line(history.FLOW_FAILED, name=snapshot.workflow, error=decision.error))
    return lines
