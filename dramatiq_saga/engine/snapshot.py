"""Loading a run and its history, in one short read transaction (DRIVE-1).

What is loaded is a :class:`~dramatiq_saga.engine.rows.Snapshot`: revision and wake count belong to the very history beside them,
because one snapshot of the database gave both. Nothing here writes, and nothing decides whether the snapshot is still true: the
statements that rest on it do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..codec import freeze
from .rows import Entry, SideEffectEntry, Snapshot, StepEntry

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine

_RUN = (
    "SELECT workflow, version, queue, priority, options, status, rollback, revision, wakes, wakes_seen, args, context, hold_count "
    "FROM {flow_runs} WHERE id = ?"
)
_STEPS = (
    "SELECT sequence, actor, status, given_up, attempts, cycle, result, error, optional, comp_actor, comp_args IS NOT NULL, "
    "comp_from_result, comp_on_self_failure FROM {action_runs} WHERE run_id = ? ORDER BY sequence"
)
_SIDE_EFFECTS = "SELECT sequence, name, value FROM {side_effects} WHERE run_id = ?"
_TAGS = "SELECT name, value FROM {tags} WHERE run_id = ?"


def load(engine: Engine, run_id: str) -> Snapshot | None:
    """The run as the database holds it now; ``None`` where there is no such run."""
    snapshot = engine.store.read(lambda tx: read(tx, run_id))
    if snapshot is not None:
        engine.cache.put(snapshot)
    return snapshot


def read(tx: Tx, run_id: str) -> Snapshot | None:
    """As :func:`load`, inside a transaction that is open already."""
    run = tx.one(_RUN, (run_id,))
    if run is None:
        return None
    entries: dict[int, Entry] = {}
    if run[7]:  # without a decision there are no steps
        for row in tx.all(_STEPS, (run_id,)):
            entries[row[0]] = step_entry(row)
    for sequence, name, value in tx.all(_SIDE_EFFECTS, (run_id,)):
        entries[sequence] = SideEffectEntry(sequence, name, freeze(bytes(value)))
    tags = dict(tx.all(_TAGS, (run_id,)))
    return Snapshot(
        run_id,
        *run[:10],  # type: ignore[call-arg]
        freeze(bytes(run[10])),
        None if run[11] is None else bytes(run[11]),
        run[12],
        [entries[sequence] for sequence in sorted(entries)],
        tags,
    )


def step_entry(row: tuple[Any, ...]) -> StepEntry:
    """A row of ``_STEPS`` as an entry."""
    sequence, actor, status, given_up, attempts, cycle, result, error, optional, comp_actor, ready, from_result, on_failure = (
        row
    )
    return StepEntry(
        sequence,
        actor,
        status,
        bool(given_up),
        attempts,
        cycle,
        None if result is None else freeze(bytes(result)),
        error,
        bool(optional),
        comp_actor,
        bool(ready),
        bool(from_result),
        bool(on_failure),
    )
