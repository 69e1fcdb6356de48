"""Transitions of a run: starting, waking, holding, cancelling, asking for a rollback (STATUS).

Each is one conditional write on what its author read; the author learns whether it landed (STATUS-1), and a loss is
journalled as ``transition_lost`` (STATUS-3). A terminal status is never left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..codec import describe_error, digest, storable
from ..errors import ConcurrentTransitionError, FlowNotFoundError, MessageNotSentError, RunConflictError, SagaError
from ..journal import history
from . import notify, rollback, undoing
from .decision import settle_live, write_tag
from .replay import HoldRun, NeedsRecording, Replay, refuse_inside_workflow, replay
from .rows import ChildEntry, Decision, Outgoing, Snapshot, StepEntry
from .snapshot import load

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Sender

_INSERT = (
    "{insert_ignore} {flow_runs} (id, workflow, version, queue, priority, options, args, args_digest, context, status, rollback, "
    "revision, wakes, wakes_seen, woken_at, hold_count, expires_at, expiry_attempts, sent_at, repair_attempts, created_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', 'none', 0, 1, 0, ?, 0, ?, 0, ?, 0, ?){or_ignore}"
)
_EXISTING = "SELECT workflow, args_digest FROM {flow_runs} WHERE id = ?"
_UNSTART = "DELETE FROM {flow_runs} WHERE id = ? AND status = 'pending' AND revision = 0 AND sent_at IS NULL"
_UNSTART_EVENTS = "DELETE FROM {flow_events} WHERE run_id = ?"
_UNSTART_TAGS = "DELETE FROM {tags} WHERE run_id = ?"
_STATE = "SELECT status, rollback, revision, wakes, workflow, ends_as FROM {flow_runs} WHERE id = ?{for_update}"
_CANCEL = (
    "UPDATE {flow_runs} SET status = 'cancelled', reason = ?, ended_at = ?, revision = revision + 1, wakes_seen = wakes, "
    "woken_at = NULL, hold_error = NULL, hold_until = NULL WHERE id = ? AND revision = ? "
    "AND ended_at IS NULL AND status <> 'rolling_back'"
)
_HOLD = (
    "UPDATE {flow_runs} SET status = CASE WHEN status = 'pending' THEN 'waiting' WHEN status = 'running' THEN 'waiting' ELSE status END, "
    "hold_error = ?, hold_count = hold_count + 1, hold_until = ?, revision = revision + 1 "
    "WHERE id = ? AND revision = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)
_FOUND = "SELECT workflow, revision, hold_count FROM {flow_runs} WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back'"


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
    commit, and a run whose message could not be sent is taken back before the error is raised (DRIVE-3).

    Raises:
      RunConflictError: the id is taken by another workflow, or by a run with other arguments.
    """
    refuse_inside_workflow(f"starting a run of {run.workflow}")
    outbox = sender.outbox(None)
    outbox.load(
        [Outgoing("drive", run.run_id, run.workflow, run.queue, priority=run.priority, options=run.options, delay=run.delay)]
    )
    now = engine.now()
    fingerprint = digest(run.args)
    lines = [history.Line(history.FLOW_STARTED, name=run.workflow, payload=run.args)]

    def operation(tx: Tx) -> tuple[str, str] | None:
        if not tx.run(
            _INSERT,
            (
                run.run_id,
                run.workflow,
                run.version,
                run.queue,
                run.priority,
                json.dumps(run.options) if run.options else None,
                run.args,
                fingerprint,
                run.context,
                now + (run.delay or 0),
                run.expires_at,
                now if outbox.joined else None,
                now,
            ),
        ):
            return tx.one(_EXISTING, (run.run_id,))
        for name, value in (run.tags or {}).items():
            write_tag(tx, run.run_id, name, value)
        engine.record(tx, run.run_id, now, lines)
        outbox.stage(tx)
        tx.after_commit(lambda: notify.changes(engine, run.run_id, run.workflow, now, lines))
        return None

    existing = engine.store.write(operation)
    if existing is not None:
        workflow, recorded = existing
        if workflow != run.workflow:
            raise RunConflictError(run.run_id, f"it is a run of {workflow}, not of {run.workflow}")
        if recorded != fingerprint:
            raise RunConflictError(run.run_id, f"it is a run of {workflow} with other arguments")
        return False
    try:
        outbox.delivered()
    except Exception as error:

        def take_back(tx: Tx) -> None:
            if tx.run(_UNSTART, (run.run_id,)):
                tx.run(_UNSTART_EVENTS, (run.run_id,))
                tx.run(_UNSTART_TAGS, (run.run_id,))

        engine.store.write(take_back)
        if isinstance(error, MessageNotSentError) and error.__cause__ is not None:
            raise error.__cause__ from None  # the broker's own error is what the caller knows
        raise
    return True


@dataclass(frozen=True, slots=True)
class Found:
    """A live run, read without decoding anything of it: enough to hold it."""

    run_id: str
    workflow: str
    revision: int
    hold_count: int


def as_found(engine: Engine, run_id: str) -> Found | None:
    """The run as it stands; ``None`` where it is not live."""
    row = engine.store.read(lambda tx: tx.one(_FOUND, (run_id,)))
    return None if row is None else Found(run_id, *row)


def hold(engine: Engine, snapshot: Snapshot | Found, error: BaseException, sender: Sender, delivery: object | None) -> bool:
    """Keep a run where it is, with ``error`` on it and its wakes unseen, until the monitor drives it again (HISTORY-1).

    The window doubles with every failure, from ``monitor.expiration.backoff.base_seconds`` to ``max_seconds``; no cap on the
    number. Consumes the message at hand. False where the run has moved on meanwhile.
    """
    backoff = engine.settings.monitor.expiration.backoff
    window = min(backoff.base_seconds * 2 ** min(snapshot.hold_count, 30), backoff.max_seconds)
    now = engine.now()
    text = describe_error(error)
    lines = [history.Line(history.FLOW_HELD, name=snapshot.workflow, error=text)]
    outbox = sender.outbox(delivery)
    outbox.load([])

    def operation(tx: Tx) -> bool:
        if not tx.run(_HOLD, (text, now + int(window * 1000), snapshot.run_id, snapshot.revision)):
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


def cancel(engine: Engine, run_id: str, reason: str | None = None) -> bool:
    """End a live run as ``cancelled`` without undoing anything (COMP-1); false where it already is cancelled or rolling back.

    Raises:
      FlowNotFoundError: there is no such run.
      ConcurrentTransitionError: the run has ended otherwise.
    """
    refuse_inside_workflow("cancelling a run")
    found = _end_cancelled(engine, run_id, None if reason is None else storable(reason))
    if found is None:
        return True
    if found[0] == "missing":
        raise FlowNotFoundError(run_id)
    return _already_going(engine, run_id, "cancelled", found[0], found[1])


def _end_cancelled(
    engine: Engine, run_id: str, reason: str | None, *, seen: Snapshot | None = None, plan: rollback.Plan | None = None
) -> tuple[str, str] | None:
    """``None`` once it has ended; else where it was found. Given ``seen`` and ``plan``, only a run that they still fit is ended."""
    now = engine.now()

    def operation(tx: Tx) -> tuple[str, str] | None:
        state = tx.one(_STATE, (run_id,))
        if state is None:
            return "missing", ""
        status, _, revision, wakes, workflow, _ = state
        if seen is not None and (revision, wakes) != (seen.revision, seen.wakes):
            return status, workflow
        if plan is not None and not rollback.holds(tx, run_id, plan):
            return status, workflow
        if not tx.run(_CANCEL, (reason, now, run_id, revision)):
            return status, workflow
        settle_live(tx, run_id, now=now)
        lines = [history.Line(history.FLOW_CANCELLED, name=workflow, detail=reason)]
        engine.record(tx, run_id, now, lines)
        tx.after_commit(lambda: notify.changes(engine, run_id, workflow, now, lines))
        return None

    engine.cache.drop(run_id)
    return engine.store.write(operation)


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
    reason = None if reason is None else storable(reason)
    while True:
        snapshot = load(engine, run_id)
        if snapshot is None:
            raise FlowNotFoundError(run_id)
        if snapshot.status not in ("pending", "running", "waiting"):
            if snapshot.rollback == "running" and not sender.joins:
                undoing.advance(engine, run_id, sender, None)  # an earlier call may have failed to send the first undo
            return _already_going(engine, run_id, "rolling_back", snapshot.status, snapshot.workflow)
        decision = _seen(engine, snapshot)
        plan = rollback.draft(engine, snapshot, decision, ends_as="cancelled", reason=reason)
        plan.error = None
        if not plan.rows:
            # Who else may be here: the outcome of a step that would have to be undone. Then the run is not as it was
            # planned for, and is looked at again. test_a_compensate_that_found_nothing_to_undo_loses_to_an_outcome
            if _end_cancelled(engine, run_id, reason, seen=snapshot, plan=plan) is None:
                return True
        elif _enter(engine, snapshot, plan, sender):
            return True
        engine.anomalies.transition_lost(
            run_id=run_id, workflow=snapshot.workflow, observed=snapshot.status, intended="rolling_back", actual="moved on"
        )


def _seen(engine: Engine, snapshot: Snapshot) -> Decision | None:
    """What a replay finds out about compensations that no drive has seen yet; nothing of it is committed (COMP-2, COMP-3)."""
    unseen = {
        entry.sequence for entry in snapshot.entries
        if isinstance(entry, StepEntry | ChildEntry) and entry.status == "completed" and entry.comp_from_result and not entry.comp_ready
    }  # fmt: skip
    if not unseen:
        return None
    definition = engine.workflows.get(snapshot.workflow)
    if definition is None:
        raise ConcurrentTransitionError(
            snapshot.run_id, "rolling_back",
            f"{snapshot.status}, and the compensation of a step that has just completed is built by workflow {snapshot.workflow!r}, "
            "which this process does not know: load the application's module (--app) and try again",
        )  # fmt: skip
    context = Replay(snapshot, now=engine.now(), settings=engine.settings)
    try:
        decision = replay(definition.function, context, engine.make_flow)
    except HoldRun as hold_run:
        raise hold_run.error from None
    except NeedsRecording:
        decision = Decision("suspended", resolved=context.resolved)
    if decision.kind == "completed":
        raise ConcurrentTransitionError(snapshot.run_id, "rolling_back", "about to complete")
    missed = unseen - {sequence for sequence, _ in decision.resolved}
    if missed:
        engine.anomalies.replan_incomplete(run_id=snapshot.run_id, workflow=snapshot.workflow, missing=min(missed))
        raise ConcurrentTransitionError(
            snapshot.run_id,
            "rolling_back",
            f"{snapshot.status}, and its replay ended before step {min(missed)}, which has to be undone",
        )
    return decision


def _enter(engine: Engine, snapshot: Snapshot, plan: rollback.Plan, sender: Sender) -> bool:
    """Write a plan that no decision goes with."""
    outbox = sender.outbox(None)
    outbox.load(plan.messages)
    now = engine.now()
    lines = [history.Line(history.COMPENSATION_STARTED, name=snapshot.workflow, detail=plan.reason)]

    def operation(tx: Tx) -> bool:
        if tx.dialect != "sqlite":
            tx.one(_STATE, (snapshot.run_id,))
        if not rollback.enter(tx, engine, snapshot, plan, now=now, seen=snapshot.wakes, sent_at=now if outbox.joined else None):
            return False
        settle_live(tx, snapshot.run_id, now=now)
        engine.record(tx, snapshot.run_id, now, lines)
        outbox.stage(tx)
        return True

    engine.cache.drop(snapshot.run_id)
    if not engine.store.write(operation):
        return False
    outbox.delivered()
    notify.changes(engine, snapshot.run_id, snapshot.workflow, now, lines)
    return True
