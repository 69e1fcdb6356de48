"""Loading a run and its history, in one short read transaction (DRIVE-1).

What is loaded is a :class:`~dramatiq_saga.engine.rows.Snapshot`: revision and wake count belong to the very history beside them,
because one snapshot of the database gave both. Nothing here writes, and nothing decides whether the snapshot is still true: the
statements that rest on it do.

What an earlier snapshot of this process knows is not read again: at one revision of a run, only what was not settled yet can have
changed, and what follows it can have come. So a step, a signal or a block costs what it has brought, however long the history before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..codec import decode, freeze
from .rows import (
    PLAIN,
    BlockEntry,
    ChildEntry,
    Entry,
    Extra,
    Parent,
    PatchEntry,
    ReceivedSignal,
    RetryWait,
    SentSignalEntry,
    SideEffectEntry,
    Snapshot,
    StepEntry,
    WaitEntry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..store.database import Tx
    from .core import Engine

_RUN = (
    "SELECT f.workflow, f.version, f.queue, f.priority, f.options, f.status, f.rollback, f.revision, f.wakes, f.wakes_seen, f.args, "
    "f.context, f.hold_count, f.close_request, f.created_at, f.parent_id, f.parent_sequence, p.workflow, p.queue, p.priority, f.expires_at "
    "FROM {flow_runs} f LEFT JOIN {flow_runs} p ON p.id = f.parent_id WHERE f.id = ?"
)
_STEPS = (
    "SELECT sequence, actor, status, given_up, attempts, cycle, result, error, optional, comp_actor, comp_args IS NOT NULL, "
    "comp_from_result, comp_on_self_failure, block, position, held_back, fallback, retry_policy, comp_group, comp_parallel "
    "FROM {action_runs} WHERE run_id = ? AND sequence >= ? ORDER BY sequence"
)
_CHILDREN = (
    "SELECT sequence, workflow, child_id, status, close_policy, cycle, result, error, optional, comp_actor, comp_args IS NOT NULL, "
    "comp_from_result, block, position, retry_policy, comp_group, comp_parallel FROM {children} WHERE run_id = ? AND sequence >= ?"
)
_BLOCKS = (
    "SELECT sequence, kind, size, policy, max_in_flight, block, position, failed_by, ended_at IS NOT NULL "
    "FROM {blocks} WHERE run_id = ? AND sequence >= ?"
)
_WAITS = "SELECT sequence, kind, name, status, due_at, payload FROM {waits} WHERE run_id = ? AND sequence >= ?"
_SIDE_EFFECTS = "SELECT sequence, kind, name, value FROM {side_effects} WHERE run_id = ? AND sequence >= ?"
_SIGNALS = "SELECT id, name, payload FROM {signals} WHERE run_id = ? AND status = 'received' ORDER BY id"
_TAGS = "SELECT name, value FROM {tags} WHERE run_id = ?"


def load(engine: Engine, run_id: str) -> Snapshot | None:
    """The run as the database holds it now; ``None`` where there is no such run."""
    known = engine.cache.get(run_id)
    snapshot = engine.store.read(lambda tx: read(tx, run_id, known=known))
    if snapshot is not None:
        engine.cache.put(snapshot)
    return snapshot


def load_for_drive(engine: Engine, run_id: str) -> Snapshot | None:
    """As :func:`load`, but without its history where a drive does not look at it: the length of a history must not count for those
    who only look (PAR-4), nor for a rollback, whose plan is rows."""
    known = engine.cache.get(run_id)
    snapshot = engine.store.read(lambda tx: read(tx, run_id, known=known, for_drive=True))
    if snapshot is not None and _is_replayed(snapshot.status, snapshot.wakes, snapshot.wakes_seen, snapshot.close_request):
        engine.cache.put(snapshot)
    return snapshot


def _is_replayed(status: str, wakes: int, wakes_seen: int, close_request: str | None) -> bool:
    """Whether a drive would look at the history."""
    return status in ("pending", "running", "waiting") and (wakes != wakes_seen or close_request is not None)


def read(tx: Tx, run_id: str, *, known: Snapshot | None = None, for_drive: bool = False) -> Snapshot | None:
    """As :func:`load`, or :func:`load_for_drive`, inside a transaction that is open already; ``known``: an earlier snapshot, if any."""
    run = tx.one(_RUN, (run_id,))
    if run is None:
        return None
    revision, created_at = run[7], run[14]
    settled = _settled(known) if known is not None and (known.revision, known.created_at) == (revision, created_at) else []
    rest = (run_id, len(settled) + 1)
    entries: dict[int, Entry] = {}
    light = for_drive and not _is_replayed(run[5], run[8], run[9], run[13])
    if revision and not light:  # without a decision there is nothing but side effects
        retry_waits: dict[int, RetryWait] = {}
        for sequence, kind, name, status, due_at, payload in tx.all(_WAITS, rest):
            if kind == "retry":
                retry_waits[sequence] = RetryWait(status, due_at)
            else:
                entries[sequence] = WaitEntry(sequence, kind, name, status, due_at, _value(payload))
        for row in tx.all(_STEPS, rest):
            entries[row[0]] = step_entry(row, retry_waits.get(row[0]))
        for row in tx.all(_BLOCKS, rest):
            entries[row[0]] = BlockEntry(*row[:8], bool(row[8]))  # type: ignore[call-arg]
        for row in tx.all(_CHILDREN, rest):
            entries[row[0]] = child_entry(row, retry_waits.get(row[0]))
    for sequence, kind, name, value in () if light else tx.all(_SIDE_EFFECTS, rest):
        entries[sequence] = _recorded(sequence, kind, name, bytes(value))
    return Snapshot(
        run_id,
        *run[:10],  # type: ignore[call-arg]
        freeze(bytes(run[10])),
        None if run[11] is None else bytes(run[11]),
        run[12],
        [*settled, *(entries[sequence] for sequence in sorted(entries))],
        dict(tx.all(_TAGS, (run_id,))),
        tuple(ReceivedSignal(number, name, freeze(bytes(payload))) for number, name, payload in tx.all(_SIGNALS, (run_id,))),
        None if run[15] is None or run[17] is None else Parent(*run[15:20]),
        run[13],
        run[20],
        created_at,
    )


def _settled(known: Snapshot) -> Sequence[Entry]:
    """The entries up to the first that is live: none of them changes before the run's revision does.

    Who else may be here: outcomes, signals, timers and children's ends, which raise the wake count alone; each changes only an entry
    that is live, or one that nobody here knows yet. Whatever else changes (a block that ends, a failure that is parked, an undo that
    is built) is a decision's or a transition's, and raises the revision. test_what_is_known_of_a_run_is_not_read_again
    """
    for index, entry in enumerate(known.entries):
        if entry.is_live:
            return known.entries[:index]
    return known.entries


def step_entry(row: tuple[Any, ...], wait: RetryWait | None = None) -> StepEntry:
    """A row of ``_STEPS`` as an entry."""
    sequence, actor, status, given_up, attempts, cycle, result, error, optional, comp_actor, ready, from_result, on_failure = (
        row[:13]
    )
    block, position, held_back, fallback, retry, group, parallel = row[13:]
    extra = PLAIN
    if block is not None or fallback is not None or retry is not None or group is not None:
        extra = Extra(block, position, bool(held_back), _value(fallback), retry, wait, group, bool(parallel))
    return StepEntry(
        sequence,
        actor,
        status,
        bool(given_up),
        attempts,
        cycle,
        _value(result),
        error,
        bool(optional),
        comp_actor,
        bool(ready),
        bool(from_result),
        bool(on_failure),
        extra,
    )


def child_entry(row: tuple[Any, ...], wait: RetryWait | None = None) -> ChildEntry:
    """A row of ``_CHILDREN`` as an entry."""
    sequence, workflow, child_id, status, close_policy, cycle, result, error, optional, comp_actor, ready, from_result = row[
        :12
    ]
    block, position, retry, group, parallel = row[12:]
    return ChildEntry(
        sequence, workflow, child_id, status, close_policy, cycle, _value(result), error, bool(optional), comp_actor, bool(ready),
        bool(from_result), Extra(block, position, False, None, retry, wait, group, bool(parallel)),
    )  # fmt: skip


def _recorded(sequence: int, kind: str, name: str, value: bytes) -> Entry:
    if kind == "patch":
        return PatchEntry(sequence, name, bool(decode(value)))
    return (SentSignalEntry if kind == "signal" else SideEffectEntry)(sequence, name, freeze(value))


def _value(data: Any) -> Callable[[], Any] | None:
    return None if data is None else freeze(bytes(data))
