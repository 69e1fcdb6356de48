"""Transitions of a run: starting, waking, holding, cancelling, asking for a rollback (STATUS).

Each is one conditional write on what its author read; the author learns whether it landed (STATUS-1), and a loss is
journalled as ``transition_lost`` (STATUS-3). A terminal status is never left. Long because every way in which a run can end
that its own function has not decided leads through here, and they share what they settle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..codec import describe_error, digest, storable
from ..errors import (
    ConcurrentTransitionError,
    FlowNotFoundError,
    MessageNotSentError,
    ParentEndedError,
    RunConflictError,
    SagaError,
)
from ..journal import history
from . import alarms, children, notify, rollback, undoing
from .decision import settle_live, write_tag
from .replay import HoldRun, MovedOn, NeedsRecording, Replay, refuse_inside_workflow, replay
from .rows import ChildEntry, Decision, Outgoing, Snapshot, StepEntry
from .snapshot import load
from .wakes import THIS_RUN, WAKE

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Sender

_INSERT = (
    "{insert_ignore} {flow_runs} (id, workflow, version, queue, priority, options, args, args_digest, context, status, rollback, "
    "revision, wakes, wakes_seen, woken_at, hold_count, expires_at, expiry_attempts, sent_at, repair_attempts, created_at, timer_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', 'none', 0, 1, 0, ?, 0, ?, 0, ?, 0, ?, ?){or_ignore}"
)
_UNSENT = "status = 'pending' AND revision = 0 AND sent_at IS NULL"
_EXISTING = f"SELECT workflow, args_digest, {_UNSENT} FROM {{flow_runs}} WHERE id = ?"
_EXISTING_NOW = _EXISTING + "{for_update}"
_UNSTART = f"DELETE FROM {{flow_runs}} WHERE id = ? AND {_UNSENT} AND wakes = 1"
_UNSTART_EVENTS = "DELETE FROM {flow_events} WHERE run_id = ?"
_UNSTART_TAGS = "DELETE FROM {tags} WHERE run_id = ?"
_STATE = "SELECT status, revision, wakes, created_at, workflow FROM {flow_runs} WHERE id = ?{for_update}"
_END = (
    "UPDATE {flow_runs} SET status = ?, error = ?, reason = COALESCE(?, reason), ended_at = ?, revision = revision + 1, "
    f"wakes_seen = wakes, woken_at = NULL, hold_error = NULL, hold_until = NULL WHERE id = ? AND revision = ? AND {THIS_RUN} "
    "AND ended_at IS NULL AND status <> 'rolling_back'"
)
_HOLD = (
    "UPDATE {flow_runs} SET status = CASE WHEN status = 'pending' THEN 'waiting' WHEN status = 'running' THEN 'waiting' ELSE status END, "
    "hold_error = ?, hold_count = hold_count + 1, hold_until = ?, revision = revision + 1 "
    f"WHERE id = ? AND revision = ? AND {THIS_RUN} AND ended_at IS NULL AND status <> 'rolling_back'"
)
# The revision stays: what the drive may still come back with is a decision like any other.
_STALLED = (
    "UPDATE {flow_runs} SET hold_error = ?, hold_count = hold_count + 1, hold_until = ? "
    f"WHERE id = ? AND revision = ? AND {THIS_RUN} AND hold_count = ? AND wakes > wakes_seen AND ended_at IS NULL "
    "AND status <> 'rolling_back'"
)
_FOUND = "SELECT workflow, revision, hold_count, created_at FROM {flow_runs} WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back'"
_FOUND_UNSEEN = f"{_FOUND} AND wakes > wakes_seen"

#: What is noted on the error of a rollback that somebody has asked for and that cannot be planned.
UNPLANNED = "dramatiq-saga: the rollback cannot be planned; nothing was changed"


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that is to be started. ``args`` is the encoded ``[args, kwargs]``."""

    run_id: str
    workflow: str
    version: str | None
    queue: str
    args: bytes
    priority: int | None = None
    options: dict[str, Any] | None = None
    context: bytes | None = None
    tags: dict[str, str | None] | None = None
    expires_at: int | None = None
    delay: int | None = None


def start(engine: Engine, run: NewRun, sender: Sender) -> bool:
    """Store a run and its first message; false where a run with this id and these arguments is there already.

    With a sender that joins the transaction both exist or neither; with another broker the message is sent after the
    commit, and a run whose message could not be sent is taken back before the error is raised (DRIVE-3), unless somebody else has
    started it or sent it a signal meanwhile. Then it stays; a start that finds a run which has not been sent sends its message as well.

    Who else may be here: another start of the same id, which relies on the run from the moment at which it has found it, and a
    prune, which deletes what was found. test_a_start_that_meets_another_start_keeps_the_run, test_a_start_that_meets_a_prune_starts

    Raises:
      RunConflictError: the id is taken by another workflow, or by a run with other arguments.
    """
    refuse_inside_workflow(f"starting a run of {run.workflow}")
    outbox = sender.outbox(None)
    now = engine.now()
    messages = [
        Outgoing("drive", run.run_id, run.workflow, run.queue, priority=run.priority, options=run.options, delay=run.delay)
    ]
    timer_at = run.expires_at if sender.rings else None
    if timer_at is not None:
        messages.append(alarms.message(run.run_id, run.workflow, run.queue, priority=run.priority, at=timer_at, now=now))
    outbox.load(messages)
    fingerprint = digest(run.args)
    lines = [history.Line(history.FLOW_STARTED, name=run.workflow, payload=run.args)]

    row = (
        run.run_id, run.workflow, run.version, run.queue, run.priority, json.dumps(run.options) if run.options else None, run.args,
        fingerprint, run.context, now + (run.delay or 0), run.expires_at, now if outbox.joined else None, now, timer_at,
    )  # fmt: skip

    def operation(tx: Tx) -> tuple[Any, ...] | None:
        while not tx.run(_INSERT, row):
            existing = tx.one(_EXISTING, (run.run_id,))
            if existing is None or existing[2]:  # pruned, or perhaps about to be taken back
                existing = tx.one(_EXISTING_NOW, (run.run_id,))
            if existing is None:
                continue
            if tuple(existing) == (run.workflow, fingerprint, True):
                tx.run(WAKE, (now, run.run_id))
                outbox.stage(tx)
            return existing
        for name, value in (run.tags or {}).items():
            write_tag(tx, run.run_id, name, value)
        engine.record(tx, run.run_id, now, lines)
        outbox.stage(tx)
        tx.after_commit(lambda: notify.changes(engine, run.run_id, run.workflow, now, lines))
        return None

    existing = engine.store.write(operation)
    if existing is not None:
        workflow, recorded, unsent = existing
        if workflow != run.workflow:
            raise RunConflictError(run.run_id, f"it is a run of {workflow}, not of {run.workflow}")
        if recorded != fingerprint:
            raise RunConflictError(run.run_id, f"it is a run of {workflow} with other arguments")
        if not unsent:
            return False
    try:
        outbox.delivered()
    except Exception as error:
        if existing is None:
            engine.store.write(lambda tx: _take_back(tx, run.run_id))
        if isinstance(error, MessageNotSentError) and error.__cause__ is not None:
            raise error.__cause__ from None  # the broker's own error is what the caller knows
        raise
    return existing is None


def _take_back(tx: Tx, run_id: str) -> None:
    if tx.run(_UNSTART, (run_id,)):
        tx.run(_UNSTART_EVENTS, (run_id,))
        tx.run(_UNSTART_TAGS, (run_id,))


@dataclass(frozen=True, slots=True)
class Found:
    """A live run, read without decoding anything of it: enough to hold it."""

    run_id: str
    workflow: str
    revision: int
    hold_count: int
    created_at: int


def as_found(engine: Engine, run_id: str, *, unseen: bool = False) -> Found | None:
    """The run as it stands; ``None`` where it is not live or, with ``unseen``, where drives have seen all that has happened to it."""
    sql = _FOUND_UNSEEN if unseen else _FOUND
    row = engine.store.read(lambda tx: tx.one(sql, (run_id,)))
    return None if row is None else Found(run_id, *row)


def hold(engine: Engine, snapshot: Snapshot | Found, error: BaseException, sender: Sender, delivery: object | None) -> bool:
    """Keep a run where it is, with ``error`` on it and its wakes unseen, until the monitor drives it again (HISTORY-1).

    The window doubles with every failure, from ``monitor.expiration.backoff.base_seconds`` to ``max_seconds``; no cap on the
    number. Consumes the message at hand. False where the run has moved on meanwhile.
    """
    now = engine.now()
    text = describe_error(error)
    lines = [history.Line(history.FLOW_HELD, name=snapshot.workflow, error=text)]
    outbox = sender.outbox(delivery)
    outbox.load([])

    def operation(tx: Tx) -> bool:
        params = (text, now + pause(engine, snapshot.hold_count), snapshot.run_id, snapshot.revision, snapshot.created_at)
        if not tx.run(_HOLD, params):
            return False
        engine.record(tx, snapshot.run_id, now, lines)
        outbox.stage(tx)
        return True

    engine.cache.drop(snapshot.run_id)
    if not engine.store.write(operation):
        return False
    outbox.delivered()
    notify.held(engine, snapshot, error)
    return True


def hold_stalled(engine: Engine, found: Found, error: BaseException) -> bool:
    """The same for a run whose drive has not come back; false where it has, or the run has been held meanwhile.

    The drive may yet come back, and lands then unless another has been faster.
    test_what_a_stalled_function_comes_back_with_is_a_drive_like_any_other
    """
    now, text = engine.now(), describe_error(error)
    lines = [history.Line(history.FLOW_HELD, name=found.workflow, error=text)]

    def operation(tx: Tx) -> bool:
        until = now + pause(engine, found.hold_count)
        if not tx.run(_STALLED, (text, until, found.run_id, found.revision, found.created_at, found.hold_count)):
            return False
        engine.record(tx, found.run_id, now, lines)
        return True

    if not engine.store.write(operation):
        return False
    notify.held(engine, found, error)
    return True


def pause(engine: Engine, failures: int, since: int | None = None) -> int:
    """For how long a run is left alone, in milliseconds: it doubles with every failure. Of a try whose failure nobody may live to count, it
    grows with the time ``since`` when the run waits: half of that, and so half as many tries with each doubling.
    """
    backoff = engine.settings.monitor.expiration.backoff
    waited = 0.0 if since is None else (engine.now() - since) / 2000
    return int(min(max(backoff.base_seconds * 2 ** min(failures, 30), waited), backoff.max_seconds) * 1000)


def cancel(engine: Engine, run_id: str, sender: Sender, reason: str | None = None) -> bool:
    """End a live run as ``cancelled`` without undoing anything (COMP-1); false where it already is cancelled or rolling back.

    Raises:
      FlowNotFoundError: there is no such run.
      ConcurrentTransitionError: the run has ended otherwise.
    """
    refuse_inside_workflow("cancelling a run")
    reason = _reason(reason)
    found = end(engine, run_id, "cancelled", sender=sender, reason=reason, undone=False)
    if found is None:
        return True
    if found[0] == "missing":
        raise FlowNotFoundError(run_id)
    children.send_unsent(engine, run_id, sender)  # an earlier call may have failed to send what closes its children
    return _already_going(engine, run_id, "cancelled", found[0], found[1])


def _reason(reason: object) -> str | None:
    if reason is not None and not isinstance(reason, str):
        raise TypeError(f"a reason is text, not {reason!r}")
    return None if reason is None else storable(reason)


def end(
    engine: Engine,
    run_id: str,
    status: str,
    *,
    sender: Sender,
    delivery: object | None = None,
    error: str | None = None,
    reason: str | None = None,
    undone: bool = True,
    seen: Snapshot | None = None,
    plan: rollback.Plan | None = None,
) -> tuple[str, str] | None:
    """End a live run as ``cancelled``, ``failed`` or ``expired``, with nothing of its own to undo.

    ``None`` once it has ended; else where it was found. Given ``seen`` and ``plan``, only a run that they still fit is ended.
    ``undone`` is for its children: whether those that are closed with it are rolled back (CHILD-3).
    """
    while True:
        try:
            return _end_once(
                engine, run_id, status, sender=sender, delivery=delivery, error=error, reason=reason, undone=undone, seen=seen, plan=plan
            )  # fmt: skip
        except MovedOn:
            continue  # a child has ended meanwhile. test_a_cancel_that_meets_the_end_of_a_child_looks_again


def _end_once(
    engine: Engine, run_id: str, status: str, *, sender: Sender, delivery: object | None, error: str | None, reason: str | None,
    undone: bool, seen: Snapshot | None, plan: rollback.Plan | None,
) -> tuple[str, str] | None:  # fmt: skip
    now = engine.now()
    family = children.family_of(engine, run_id)
    outbox = sender.outbox(delivery)
    outbox.load(family.messages())

    def operation(tx: Tx) -> tuple[str, str] | None:
        family.lock(tx)
        state = tx.one(_STATE, (run_id,))
        if state is None:
            return "missing", ""
        found, revision, wakes, created_at, workflow = state
        if seen is not None and (revision, wakes, created_at) != seen.version_read:
            return found, workflow
        if plan is not None and not rollback.holds(tx, run_id, plan):
            return found, workflow
        if not tx.run(_END, (status, error, reason, now, run_id, revision, created_at)):
            return found, workflow
        family.check(tx)
        settle_live(tx, run_id, now=now)
        lines = [history.Line(f"flow.{status}", name=workflow, error=error, detail=reason)]
        engine.record(tx, run_id, now, lines)
        family.close(tx, engine, workflow=workflow, now=now, undone=undone)
        family.ended(tx, engine, status, workflow=workflow, now=now, error=error, reason=reason)
        outbox.stage(tx)
        tx.after_commit(lambda: notify.changes(engine, run_id, workflow, now, lines))
        return None

    engine.cache.drop(run_id)
    found = engine.write(operation, outbox)
    if found is None:
        outbox.delivered()
    return found


def refuse_joined(engine: Engine, what: str) -> None:
    """Refuse a call that cannot be part of the host's transaction (HOST-1)."""
    if engine.store.joined():
        raise SagaError(
            f"{what} inside an open transaction of the store's database: what it needs from workers cannot happen before that commits; "
            "call it before or after"
        )


def _already_going(engine: Engine, run_id: str, intended: str, status: str, workflow: str) -> bool:
    engine.anomalies.transition_lost(run_id=run_id, workflow=workflow, observed="live", intended=intended, actual=status)
    if status in ("cancelled", "rolling_back"):
        return False
    raise ConcurrentTransitionError(run_id, intended, status)


def compensate(engine: Engine, run_id: str, sender: Sender, reason: str | None = None) -> bool:
    """Undo what a live run has done, then end it as ``cancelled`` (COMP-1); false where it already is cancelled or rolling back.

    A replay is needed only where a step has completed whose compensation is built from its result and no drive has seen it
    yet (COMP-2); its error is raised, and the run stays as found (COMP-3).
    """
    refuse_inside_workflow("rolling back a run")
    reason = _reason(reason)
    while True:
        snapshot = load(engine, run_id)
        if snapshot is None:
            raise FlowNotFoundError(run_id)
        if snapshot.status not in ("pending", "running", "waiting"):
            if snapshot.rollback == "running" and not sender.joins:
                undoing.advance(engine, run_id, sender, None)  # an earlier call may have failed to send the first undo
            return _already_going(engine, run_id, "rolling_back", snapshot.status, snapshot.workflow)
        if undo(engine, snapshot, _seen(engine, snapshot), sender=sender, ends_as="cancelled", reason=reason):
            return True
        engine.anomalies.transition_lost(
            run_id=run_id, workflow=snapshot.workflow, observed=snapshot.status, intended="rolling_back", actual="moved on"
        )


def undo(
    engine: Engine,
    snapshot: Snapshot,
    decision: Decision | None,
    *,
    sender: Sender,
    ends_as: str,
    delivery: object | None = None,
    error: str | None = None,
    reason: str | None = None,
) -> bool:
    """Begin the rollback of a live run that has to end as ``ends_as``, or end it at once where there is nothing to undo.

    ``decision`` is what a replay has found out about compensations that no drive has seen (:func:`rehearse`). False, and nothing
    written, where the run is no longer as ``snapshot`` has it.
    """
    plan = rollback.draft(engine, snapshot, decision, ends_as=ends_as, reason=reason)
    plan.error = error
    if plan.rows:
        try:
            return _enter(engine, snapshot, plan, sender=sender, delivery=delivery)
        except MovedOn:
            return False
    # Who else may be here: the outcome of a step that would have to be undone. Then the run is not as it was planned for, and is
    # looked at again. test_a_compensate_that_found_nothing_to_undo_loses_to_an_outcome
    found = end(
        engine, snapshot.run_id, ends_as, sender=sender, delivery=delivery, error=error, reason=reason, seen=snapshot, plan=plan
    )  # fmt: skip
    return found is None


def close(engine: Engine, snapshot: Snapshot, sender: Sender, delivery: object | None) -> bool:
    """End a child as its parent has asked for when it ended itself (CHILD-3). False where the run has moved on.

    What its function would do next does not matter any more, not even that it would complete.

    Raises:
      HoldRun: its rollback cannot be planned (COMP-3).
    """
    reason = f"its parent {snapshot.parent.run_id if snapshot.parent else ''} has ended"
    if snapshot.close_request == children.ABORT:
        found = end(
            engine, snapshot.run_id, "cancelled", sender=sender, delivery=delivery, reason=reason, undone=False, seen=snapshot
        )  # fmt: skip
        return found is None
    failing = snapshot.close_request == children.FAIL
    error = describe_error(ParentEndedError(reason)) if failing else None
    decision, missed = rehearse(engine, snapshot)
    if missed is not None:
        raise HoldRun(rollback.ReplanIncompleteError(missed, snapshot.entries[missed - 1].describe()))
    return undo(
        engine, snapshot, decision, sender=sender, delivery=delivery, ends_as="failed" if failing else "cancelled", error=error,
        reason=None if failing else reason,
    )  # fmt: skip


def rehearse(engine: Engine, snapshot: Snapshot) -> tuple[Decision | None, int | None]:
    """What a replay finds out about compensations that no drive has seen yet; nothing of it is committed (COMP-2, COMP-3).

    And the first sequence that has to be undone and that the replay ended before.

    Raises:
      HoldRun: the replay's result must not be used.
      KeyError: this process does not know the workflow.
    """
    unseen = _unseen(snapshot)
    if not unseen:
        return None, None
    context = Replay(snapshot, now=engine.now(), settings=engine.settings, looks_only=True)
    try:
        with engine.lookout.call(snapshot.workflow, snapshot.run_id, snapshot.created_at):
            decision = replay(engine.workflows[snapshot.workflow].function, context, engine.make_flow)
    except NeedsRecording:
        decision = Decision("suspended", resolved=context.resolved)
    return decision, min(unseen - {sequence for sequence, _ in decision.resolved}, default=None)


def needs_replay(snapshot: Snapshot) -> bool:
    """Whether a rollback of the run can only be planned with a replay: a compensation is still to be built from a result (COMP-2)."""
    return bool(_unseen(snapshot))


def _unseen(snapshot: Snapshot) -> set[int]:
    """What has completed and whose compensation is still to be built from its result."""
    return {
        entry.sequence for entry in snapshot.entries
        if isinstance(entry, StepEntry | ChildEntry) and entry.status == "completed" and entry.comp_from_result and not entry.comp_ready
    }  # fmt: skip


def _seen(engine: Engine, snapshot: Snapshot) -> Decision | None:
    """As :func:`rehearse`, for an operator's call: what goes wrong is raised, and the run stays as found."""
    if not _unseen(snapshot):
        return None
    if snapshot.workflow not in engine.workflows:
        raise ConcurrentTransitionError(
            snapshot.run_id, "rolling_back",
            f"{snapshot.status}, and the compensation of a step that has just completed is built by workflow {snapshot.workflow!r}, "
            "which this process does not know: load the application's module (--app) and try again",
        )  # fmt: skip
    try:
        decision, missed = rehearse(engine, snapshot)
    except HoldRun as hold_run:
        hold_run.error.add_note(UNPLANNED)
        raise hold_run.error from None
    if decision is not None and decision.kind == "completed":
        raise ConcurrentTransitionError(snapshot.run_id, "rolling_back", "about to complete")
    if missed is not None:
        engine.anomalies.replan_incomplete(run_id=snapshot.run_id, workflow=snapshot.workflow, missing=missed)
        error = ConcurrentTransitionError(
            snapshot.run_id,
            "rolling_back",
            f"{snapshot.status}, and its replay ended before step {missed}, which has to be undone",
        )
        error.add_note(UNPLANNED)
        raise error
    return decision


def _enter(engine: Engine, snapshot: Snapshot, plan: rollback.Plan, *, sender: Sender, delivery: object | None = None) -> bool:
    """Write a plan that no decision goes with."""
    family = children.family(engine, snapshot, ends=not plan.messages)
    outbox = sender.outbox(delivery)
    outbox.load(plan.messages if family is None else [*plan.messages, *family.messages()])
    now = engine.now()
    lines = [history.Line(history.COMPENSATION_STARTED, name=snapshot.workflow, detail=plan.reason)]

    def operation(tx: Tx) -> bool:
        if family is not None:
            family.lock(tx)
        if tx.dialect != "sqlite":
            tx.one(_STATE, (snapshot.run_id,))
        sent_at = now if outbox.joined else None
        if not rollback.enter(tx, engine, snapshot, plan, now=now, seen=snapshot.wakes, sent_at=sent_at, family=family):
            return False
        if family is not None:
            family.check(tx)
            family.close(tx, engine, workflow=snapshot.workflow, now=now, undone=True)
        settle_live(tx, snapshot.run_id, now=now)
        engine.record(tx, snapshot.run_id, now, lines)
        outbox.stage(tx)
        return True

    engine.cache.drop(snapshot.run_id)
    if not engine.write(operation, outbox):
        return False
    outbox.delivered()
    notify.changes(engine, snapshot.run_id, snapshot.workflow, now, lines)
    return True
