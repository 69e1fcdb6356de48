"""Committing a decision: everything that one replay leads to, in one transaction (DRIVE-1).

:func:`write` runs inside a transaction and repeats the revision and the wake count that the replay rested on; where either
has moved on it writes nothing and says so. Who else may be here: another drive of the same run, an outcome, a cancel, a
signal. Each of them raises the revision or the wake count in the transaction that records it, so of two that started from
one history exactly one finds it unchanged. Proven by ``tests/races/test_interleavings.py``.

Long because every kind of thing that a decision can create or change is written here, each by one statement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..journal import history
from . import blocks, children, rollback
from .replay import MovedOn
from .retry_on_signal import Stored
from .rows import ChildEntry, Decision, Entry, More, NewStep, Outgoing, Snapshot, StepEntry
from .wakes import THIS_RUN

if TYPE_CHECKING:
    from ..store.database import Tx
    from .children import Family
    from .core import Engine
    from .rows import NewBlock, NewWait, Park, Retry

_ADVANCE = (
    "UPDATE {flow_runs} SET status = ?, revision = revision + 1, wakes_seen = ?, wakes = ?, "
    "started_at = COALESCE(started_at, ?), woken_at = ?, hold_error = NULL, hold_count = 0, hold_until = NULL, "
    "repair_attempts = 0, repair_after = NULL "
    f"WHERE id = ? AND revision = ? AND wakes = ? AND {THIS_RUN} AND ended_at IS NULL AND status <> 'rolling_back'"
)
_END = (
    "UPDATE {flow_runs} SET status = ?, revision = revision + 1, wakes_seen = ?, wakes = ?, "
    "started_at = COALESCE(started_at, ?), ended_at = ?, result = ?, error = ?, woken_at = NULL, hold_error = NULL, "
    f"hold_until = NULL WHERE id = ? AND revision = ? AND wakes = ? AND {THIS_RUN} AND ended_at IS NULL AND status <> 'rolling_back'"
)
_STEP_COLUMNS = (
    "run_id, sequence, actor, queue, priority, options, args, status, given_up, attempts, tries, claims, cycle, optional, "
    "max_claims, reclaim_stale_after_seconds, comp_actor, comp_args, comp_options, comp_from_result, comp_on_self_failure, "
    "comp_policy, comp_parallel, comp_reclaim_stale_after_seconds, expires_at, sent_at, repair_attempts, created_at, "
    "block, position, held_back, fallback, retry_policy, comp_group"
)
_INSERT_STEP = (
    f"INSERT INTO {{action_runs}} ({_STEP_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, 'pending', FALSE, 0, 0, 0, 0, ?, "
    "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_BLOCK = (
    "INSERT INTO {blocks} (run_id, sequence, kind, block, position, size, policy, max_in_flight, created_at, ended_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_WAIT = (
    "INSERT INTO {waits} (run_id, sequence, kind, name, cycle, status, due_at, signal_id, payload, created_at, ended_at) "
    "SELECT ?, ?, ?, ?, 0, ?, ?, s.id, s.payload, ?, ? FROM {flow_runs} f LEFT JOIN {signals} s ON s.id = ? WHERE f.id = ?"
)
_INSERT_MARKER = "INSERT INTO {side_effects} (run_id, sequence, kind, name, value, created_at) VALUES (?, ?, ?, ?, ?, ?)"
_CONSUME = "UPDATE {signals} SET status = 'consumed', ended_at = ? WHERE id = ? AND run_id = ? AND status = 'received'"
# A parked row keeps its error: it says why it is parked.
_PARK_STEP = (
    "UPDATE {action_runs} SET status = 'awaiting_retry', given_up = FALSE, ended_at = NULL WHERE run_id = ? AND sequence = ? "
    "AND status = 'failed' AND given_up = TRUE AND attempts = ? AND cycle = ?"
)
_REOPEN_WAIT = (
    "UPDATE {waits} SET status = 'waiting', name = ?, cycle = ?, due_at = ?, signal_id = NULL, payload = NULL, created_at = ?, "
    "ended_at = NULL WHERE run_id = ? AND sequence = ? AND kind = 'retry' AND status <> 'waiting'"
)
_OPEN_RETRY_WAIT = (
    "INSERT INTO {waits} (run_id, sequence, kind, name, cycle, status, due_at, created_at) "
    "VALUES (?, ?, 'retry', ?, ?, 'waiting', ?, ?)"
)
_RETRY_STEP = (
    "UPDATE {action_runs} SET status = 'pending', given_up = FALSE, cycle = cycle + 1, tries = 0, claims = 0, ended_at = NULL, "
    "started_at = NULL, next_try_at = NULL, reclaim_stale_at = NULL, sent_at = ?, repair_attempts = 0, repair_after = ? WHERE run_id = ? "
    "AND sequence = ? AND cycle = ? AND (status = 'awaiting_retry' OR (status = 'failed' AND given_up = TRUE))"
)
_FAIL_STEP = (
    "UPDATE {action_runs} SET status = ?, given_up = TRUE, retry_policy = ?, ended_at = COALESCE(ended_at, ?) "
    "WHERE run_id = ? AND sequence = ? AND cycle = ? AND (status = 'awaiting_retry' OR (status = 'failed' AND given_up = TRUE))"
)
_CANCEL_MEMBERS = (
    "UPDATE {action_runs} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND block = ? AND ended_at IS NULL "
    "AND status <> 'running'"
)
_CANCEL_CHILDREN = (
    "UPDATE {children} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND block = ? AND status = 'awaiting_retry'"
)
_CANCEL_PARKED = (
    "UPDATE {waits} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND kind = 'retry' AND status = 'waiting' "
    "AND sequence IN (SELECT sequence FROM {%s} WHERE run_id = ? AND block = ? AND status = 'cancelled')"
)
_CANCEL_PARKED_STEPS = _CANCEL_PARKED.replace("%s", "action_runs")
_CANCEL_PARKED_CHILDREN = _CANCEL_PARKED.replace("%s", "children")
_FAIL_BLOCK = "UPDATE {blocks} SET failed_by = ? WHERE run_id = ? AND sequence = ? AND failed_by IS NULL"
_FINISH_BLOCK = "UPDATE {blocks} SET ended_at = ? WHERE run_id = ? AND sequence = ? AND ended_at IS NULL"
_RESOLVE = "UPDATE {action_runs} SET comp_actor = ?, comp_args = ?, comp_options = ? WHERE run_id = ? AND sequence = ? AND comp_args IS NULL"
_TAG_UPDATE = "UPDATE {tags} SET value = ? WHERE run_id = ? AND name = ?"
_TAG_INSERT = "{insert_ignore} {tags} (run_id, name, value) VALUES (?, ?, ?){or_ignore}"
_SETTLE_LIVE = (
    "UPDATE {action_runs} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND "
    "(status IN ('pending', 'running', 'awaiting_retry') OR (status = 'failed' AND given_up = FALSE))"
)
_SETTLE_BLOCKS = "UPDATE {blocks} SET ended_at = ? WHERE run_id = ? AND ended_at IS NULL"
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
    family: Family | None = None,
) -> bool:
    """Write ``decision``; false (and nothing written) where the run is no longer as ``snapshot`` has it.

    ``snapshot`` is the history as the database holds it before this transaction; ``wakes`` is what this same transaction
    raises the wake count by (an outcome written beside it), and counts as seen; ``entries`` is the history with that outcome.
    ``family`` hears of it where the run ends or begins to roll back; its parent is locked by now.

    Raises:
      MovedOn: rows that the decision rests on have changed; nothing of the transaction may stand.
    """
    seen = snapshot.wakes + wakes
    read = (snapshot.run_id, *snapshot.version_read)
    if decision.kind == "suspended":
        status = "waiting" if decision.outside else "running"
        again, woken_at = (1, now) if decision.again else (0, None)
        landed = tx.run(_ADVANCE, (status, seen, seen + again, now, woken_at, *read))
    elif plan is not None and plan.rows:
        landed = rollback.enter(tx, engine, snapshot, plan, now=now, seen=seen, sent_at=sent_at, family=family)
    else:
        status = "completed" if decision.kind == "completed" else "failed"
        landed = tx.run(
            _END,
            (status, seen, seen, now, now, decision.result, decision.error, *read),
        )
    if not landed:
        return False
    if family is not None:
        family.check(tx)
    for step in decision.steps:
        tx.run(_INSERT_STEP, step_row(snapshot.run_id, step, now=now, sent_at=None if step.scope.held_back else sent_at))
    if decision.more is not None:
        _write_more(tx, engine, snapshot, decision.more, now=now, sent_at=sent_at)
    for sequence, spec in decision.resolved:
        params = (spec.actor, spec.args, spec.options, snapshot.run_id, sequence)
        if not tx.run(_RESOLVE, params):
            tx.run(children.RESOLVE, params)
    for name, value in decision.tags.items():
        write_tag(tx, snapshot.run_id, name, value)
    if decision.kind != "suspended" and any(entry.is_live for entry in entries or snapshot.entries):
        settle_live(tx, snapshot.run_id, now=now)
    if family is not None:
        family.close(tx, engine, workflow=snapshot.workflow, now=now, undone=True)
        if plan is None or not plan.rows:
            family.ended(
                tx, engine, decision.kind, workflow=snapshot.workflow, now=now, result=decision.result, error=decision.error
            )
    return True


def _write_more(tx: Tx, engine: Engine, snapshot: Snapshot, more: More, *, now: int, sent_at: int | None) -> None:
    """The rarer parts. A row that is not as the decision found it voids the whole (``MovedOn``): the transaction is rolled back."""
    run_id = snapshot.run_id
    for block in more.blocks:
        _write_block(tx, run_id, block, now)
    for marker in more.markers:
        tx.run(_INSERT_MARKER, (run_id, marker.sequence, marker.kind, marker.name, marker.data, now))
    for wait in more.waits:
        _write_wait(tx, run_id, wait, now)
    for child in more.children:
        children.start(tx, engine, snapshot, child, now=now, sent_at=sent_at)
    for park in more.parks:
        _write_park(tx, run_id, park, now)
    for retry in more.retries:
        _write_retry(tx, engine, snapshot, retry, now=now, sent_at=sent_at)
    for failure in more.failures:
        entry = failure.entry
        if isinstance(entry, ChildEntry):
            landed = children.fail(tx, run_id, failure, now)
        else:
            landed = bool(tx.run(_FAIL_STEP, (failure.status, failure.policy, now, run_id, entry.sequence, entry.cycle)))
        if not landed:
            raise MovedOn
    for number, failed_by in more.cancelled:
        _cancel_members(tx, run_id, number, failed_by=failed_by, now=now)
    for entry in more.released:
        # What is released in one place after a failure or an expiry was counted by this decision, and by no other: it has
        # the revision. An outcome that released the same row meanwhile has raised the wake count, and this one loses.
        tx.run(blocks.RELEASE, (sent_at, blocks.repair_after(engine, now), run_id, entry.sequence))
    for sequence in more.finished:
        tx.run(_FINISH_BLOCK, (now, run_id, sequence))


def _cancel_members(tx: Tx, run_id: str, block: int, *, failed_by: int, now: int) -> None:
    """Members that are not running are cancelled, those between tries and parked ones too; the rest get no further try (PAR-4).

    Who else may be here: a member that is being claimed, or whose try has just failed. Both lock the run's row first, so each is
    either over when this looks at its row, or finds ``failed_by`` when it looks at the block
    (test_a_try_that_fails_while_its_block_fails_is_the_last).
    """
    tx.run(_FAIL_BLOCK, (failed_by, run_id, block))
    tx.run(_CANCEL_MEMBERS, (now, run_id, block))
    tx.run(_CANCEL_CHILDREN, (now, run_id, block))
    tx.run(_CANCEL_PARKED_STEPS, (now, run_id, run_id, block))
    tx.run(_CANCEL_PARKED_CHILDREN, (now, run_id, run_id, block))


def _write_block(tx: Tx, run_id: str, block: NewBlock, now: int) -> None:
    scope = block.scope
    tx.run(
        _INSERT_BLOCK,
        (
            run_id, block.sequence, block.what, scope.block, scope.position, block.size, block.policy, block.max_in_flight, now,
            None if block.size else now,
        ),
    )  # fmt: skip


def _write_wait(tx: Tx, run_id: str, wait: NewWait, now: int) -> None:
    """A wait, with the signal that had arrived before it where there is one (SIG-1)."""
    signal = None if wait.signal is None else wait.signal.id
    status, ended_at = ("waiting", None) if signal is None else ("consumed", now)
    if signal is not None and not tx.run(_CONSUME, (now, signal, run_id)):
        raise MovedOn
    tx.run(_INSERT_WAIT, (run_id, wait.sequence, wait.what, wait.name, status, wait.due_at, now, ended_at, signal, run_id))


def _write_park(tx: Tx, run_id: str, park: Park, now: int) -> None:
    entry = park.entry
    if isinstance(entry, ChildEntry):
        landed = children.park(tx, run_id, park)
    else:
        landed = bool(tx.run(_PARK_STEP, (run_id, entry.sequence, entry.attempts, entry.cycle)))
    if not landed:
        raise MovedOn
    if not tx.run(_REOPEN_WAIT, (park.signal, entry.cycle, park.due_at, now, run_id, entry.sequence)):
        tx.run(_OPEN_RETRY_WAIT, (run_id, entry.sequence, park.signal, entry.cycle, park.due_at, now))


def _write_retry(tx: Tx, engine: Engine, snapshot: Snapshot, retry: Retry, *, now: int, sent_at: int | None) -> None:
    run_id, entry = snapshot.run_id, retry.entry
    if retry.signal is not None and not tx.run(_CONSUME, (now, retry.signal.id, run_id)):
        raise MovedOn
    if isinstance(entry, ChildEntry):
        landed = children.retry(tx, engine, snapshot, retry, now=now, sent_at=sent_at)
    else:
        repair_after = blocks.repair_after(engine, now)
        landed = bool(tx.run(_RETRY_STEP, (sent_at, repair_after, run_id, entry.sequence, entry.cycle)))
    if not landed:
        raise MovedOn


def settle_live(tx: Tx, run_id: str, *, now: int) -> None:
    """What a run still held when it ended, or when its rollback was planned, becomes ``cancelled`` (STATUS-2)."""
    tx.run(_SETTLE_LIVE, (now, run_id))
    tx.run(_SETTLE_WAITS, (now, run_id))
    tx.run(_SETTLE_BLOCKS, (now, run_id))


def write_tag(tx: Tx, run_id: str, name: str, value: str | None) -> None:
    """One value per key, the last write wins (TAG-1)."""
    if not tx.run(_TAG_UPDATE, (value, run_id, name)):
        tx.run(_TAG_INSERT, (run_id, name, value))


def step_row(run_id: str, step: NewStep, *, now: int, sent_at: int | None) -> tuple[Any, ...]:
    """The parameters of a new step's row."""
    spec, scope = step.compensation, step.scope
    return (
        run_id,
        step.sequence,
        step.actor,
        step.queue,
        step.priority,
        json.dumps(step.options) if step.options else None,
        step.args,
        step.optional,
        step.max_claims,
        step.reclaim_stale_after_seconds,
        spec.actor if spec else None,
        spec.args if spec else None,
        spec.options if spec else None,
        step.comp_from_result,
        step.comp_on_self_failure,
        step.comp_policy,
        scope.comp_parallel,
        step.comp_reclaim_stale_after_seconds,
        step.expires_at,
        sent_at,
        now,
        scope.block,
        scope.position,
        scope.held_back,
        step.fallback,
        step.retry,
        scope.comp_group,
    )


def messages(engine: Engine, snapshot: Snapshot, decision: Decision, now: int) -> list[Outgoing]:
    """The messages that ``decision`` leads to: of what it starts, of what it starts again, and of what will be due."""
    run_id = snapshot.run_id
    groups = blocks.groups(snapshot, decision, now)
    found = [
        Outgoing(
            "step", run_id, step.actor, step.queue, step.sequence, priority=step.priority, options=step.options,
            group=groups.get(step.scope.block) if groups else None, created_at=snapshot.created_at,
        )
        for step in decision.steps
        if not step.scope.held_back
    ]  # fmt: skip
    found += children.messages(decision)
    if decision.more is not None and decision.more.released:
        found += blocks.read_messages(engine, snapshot, decision.more.released)
    if decision.more is not None and decision.more.retries:
        found += _again(engine, snapshot, decision.more.retries)
    if decision.again:
        found.append(Outgoing("drive", run_id, snapshot.workflow, snapshot.queue, priority=snapshot.priority))
    return found


def _again(engine: Engine, snapshot: Snapshot, retries: list[Retry]) -> list[Outgoing]:
    """The messages of steps that run again: their tries are new, and no message of an earlier cycle can claim them (RSIG-1)."""
    steps = [retry.entry for retry in retries if isinstance(retry.entry, StepEntry)]
    found = blocks.read_messages(engine, snapshot, steps)
    return [replace(message, cycle=message.cycle + 1, tries=0) for message in found]


def events(snapshot: Snapshot, decision: Decision, plan: rollback.Plan | None) -> list[history.Line]:
    """What the run's history says of ``decision``."""
    lines: list[history.Line] = []
    if decision.more is not None:
        lines += _more_events(decision.more)
    if decision.kind == "suspended":
        if decision.outside and snapshot.status != "waiting":
            lines.append(history.Line(history.FLOW_WAITING, name=snapshot.workflow, detail=_waits_for(decision.more)))
        elif not decision.outside and snapshot.status == "waiting":
            lines.append(history.Line(history.FLOW_RESUMED, name=snapshot.workflow))
    elif decision.kind == "completed":
        lines.append(history.Line(history.FLOW_COMPLETED, name=snapshot.workflow, payload=decision.result))
    elif plan is not None and plan.rows:
        lines.append(history.Line(history.COMPENSATION_STARTED, name=snapshot.workflow, error=decision.error))
    else:
        lines.append(history.Line(history.FLOW_FAILED, name=snapshot.workflow, error=decision.error))
    return lines


def _waits_for(more: More | None) -> str | None:
    """What a run waits for once ``more`` is written, in words; ``None`` where it has waited for it before."""
    if more is None:
        return None
    waits = [wait for wait in more.waits if wait.signal is None]
    words = ["a timer" if wait.name is None else f"signal {wait.name!r}" for wait in waits]
    words += [f"signal {park.signal!r} to retry step {park.entry.sequence}" for park in more.parks]
    return ", ".join(words) or None


def _more_events(more: More) -> list[history.Line]:
    lines = [
        history.Line(
            history.SIDE_EFFECT_RECORDED, sequence=marker.sequence, name=marker.name, payload=marker.data,
            detail=f"patched: {marker.data.decode()}" if marker.kind == "patch" else None,
        )
        for marker in more.markers
    ]  # fmt: skip
    lines += [
        history.Line(history.SIGNAL_CONSUMED, sequence=wait.sequence, name=wait.name)
        for wait in more.waits
        if wait.signal is not None
    ]
    lines += [history.Line(history.CHILD_STARTED, sequence=child.sequence, name=child.workflow) for child in more.children]
    for park in more.parks:
        word = history.ACTION_AWAITING_RETRY if isinstance(park.entry, StepEntry) else history.CHILD_AWAITING_RETRY
        lines.append(history.Line(word, sequence=park.entry.sequence, name=_name(park.entry), detail=park.signal))
    for retry in more.retries:
        entry, signal = retry.entry, retry.signal
        if signal is not None:
            lines.append(history.Line(history.SIGNAL_CONSUMED, sequence=entry.sequence, name=signal.name, about=signal.id))
        word = history.ACTION_RETRIED if isinstance(entry, StepEntry) else history.CHILD_RETRIED
        name = Stored.read(entry.extra.retry).signal if entry.extra.retry is not None else None
        lines.append(history.Line(word, sequence=entry.sequence, name=_name(entry), detail=name))
    lines += [
        history.Line(history.ACTION_OPTIONAL_FAILED, sequence=failure.entry.sequence, name=_name(failure.entry))
        for failure in more.failures
        if failure.status == "optional_failed"
    ]
    return lines


def _name(entry: StepEntry | ChildEntry) -> str:
    return entry.actor if isinstance(entry, StepEntry) else entry.workflow
