"""Driving a run: load, replay, commit, and look again when somebody was first (DRIVE-1, DRIVE-2).

A drive owns nothing and is trusted by nobody: any number of them may run at once, one commit lands, and each of the others
writes nothing and looks again. It ends when no wake is unseen, when the run is held, or when it has ended. The message that
led here is consumed by the write that made it unnecessary.
"""

from __future__ import annotations

import time
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..errors import StoreError
from ..journal import history
from ..store.trouble import is_lost_commit, is_trouble
from . import alarms, children, expiry, notify, rollback, runs, signals, undoing
from . import decision as decisions
from .replay import HoldRun, MovedOn, NeedsRecording, Replay, replay
from .rows import ChildEntry, Decision, Failure, Snapshot, StepEntry, step_message
from .snapshot import load_for_drive
from .wakes import THIS_RUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.database import Tx
    from .core import Engine, Outbox, Sender
    from .rows import Outgoing, SentSignal

_RECORD = (
    "{insert_ignore} {side_effects} (run_id, sequence, kind, name, value, created_at) "
    f"SELECT ?, ?, ?, ?, ?, ? FROM {{flow_runs}} WHERE id = ? AND revision = ? AND {THIS_RUN} AND ended_at IS NULL "
    "AND status <> 'rolling_back'{or_ignore}"
)
_RERECORD = "UPDATE {side_effects} SET value = ? WHERE run_id = ? AND sequence = ?"
_RECORDED = "SELECT name, value, kind FROM {side_effects} WHERE run_id = ? AND sequence = ?"
_UNSENT = (
    "SELECT sequence, actor, queue, priority, options, cycle, attempts, tries, "
    "(SELECT f.created_at FROM {flow_runs} f WHERE f.id = run_id) FROM {action_runs} WHERE run_id = ? AND status = 'pending' "
    "AND sent_at IS NULL AND held_back = FALSE ORDER BY sequence"
)


class Driven(Enum):
    """How a drive ended."""

    MISSING = "missing"
    ENDED = "ended"
    IDLE = "idle"
    DECIDED = "decided"
    HELD = "held"
    ROLLING_BACK = "rolling_back"
    EXPIRED = "expired"


def drive(engine: Engine, run_id: str, sender: Sender, delivery: object | None = None) -> Driven:
    """Bring one run as far as its history allows.

    ``StoreError`` passes through: nothing was decided, and the message at hand is still ours. An asynchronous interrupt
    passes through as well; the drive is uncommitted then (FENCE-5).
    """
    while True:
        try:
            snapshot = load_for_drive(engine, run_id)
        except Exception as fault:  # what is recorded cannot be read: by another encoder, for example (HISTORY-1)
            found = None if is_trouble(fault) else runs.as_found(engine, run_id)
            if found is None:
                raise
            if runs.hold(engine, found, fault, sender, delivery):
                return Driven.HELD
            continue
        if snapshot is None:
            return Driven.MISSING
        if snapshot.rollback == "running":
            _calm(sender, delivery)
            undoing.advance(engine, run_id, sender, delivery)
            children.send_unsent(engine, run_id, sender)
            return Driven.ROLLING_BACK
        if snapshot.status not in ("pending", "running", "waiting"):
            children.send_unsent(engine, run_id, sender)
            return Driven.ENDED
        if snapshot.close_request is not None:
            closed = _close(engine, snapshot, sender, delivery)
            if closed is not None:
                return closed
            continue
        if snapshot.wakes == snapshot.wakes_seen:
            send_unsent(engine, run_id, sender)
            children.send_unsent(engine, run_id, sender)
            return Driven.IDLE
        outcome = _drive_once(engine, snapshot, sender, delivery)
        if outcome is not None:
            return outcome


def _drive_once(engine: Engine, snapshot: Snapshot, sender: Sender, delivery: object | None) -> Driven | None:
    """One replay and one try at committing it; ``None`` where the run has moved on."""
    function = engine.workflows[snapshot.workflow].function
    overdue = snapshot.is_overdue(engine.now())
    record = None if overdue else _Recorder(engine, snapshot, sender)
    context = Replay(snapshot, now=engine.now(), settings=engine.settings, record=record)
    outbox = sender.outbox(delivery)
    started = time.perf_counter()
    try:
        with engine.lookout.call(snapshot.workflow, snapshot.run_id, snapshot.created_at):
            decision = _decide(engine, function, context, overdue=overdue)
        engine.note_cost(snapshot.run_id, time.perf_counter() - started)
        _calm(sender, delivery)
        if decision is None:
            return Driven.EXPIRED if expiry.expire(engine, snapshot, sender, delivery) else None
        plan = rollback.draft(engine, snapshot, decision) if decision.kind == "failed" else None
        now = engine.now()
        family = family_of(engine, snapshot, decision, plan)
        outbox.load(messages(engine, snapshot, decision, plan=plan, family=family, now=now))
        ahead = alarms.for_decision(engine, sender, snapshot, decision, now=now)
        lines = decisions.events(snapshot, decision, plan)

        def operation(tx: Tx) -> bool:
            sent_at = now if outbox.joined else None
            if family is not None:
                family.lock(tx)
            if not decisions.write(tx, engine, snapshot, decision, now=now, sent_at=sent_at, plan=plan, family=family):
                return False
            engine.record(tx, snapshot.run_id, now, lines)
            for alarm in ahead:
                alarm.stage(tx)
            outbox.stage(tx)
            return True

        landed = commit(engine, snapshot, decision, outbox, operation=operation)
    except MovedOn:
        return None
    except Exception as fault:  # of the engine, or a history that does not fit: nobody's failure (HISTORY-1)
        if is_trouble(fault):
            raise
        error = fault.error if isinstance(fault, HoldRun) else fault
        _tell_of_no_plan(engine, snapshot, context, error)
        _calm(sender, delivery)
        return Driven.HELD if runs.hold(engine, snapshot, error, sender, delivery) else None
    if not landed:
        engine.anomalies.transition_lost(
            run_id=snapshot.run_id,
            workflow=snapshot.workflow,
            observed=snapshot.status,
            intended=decision.kind,
            actual="moved on",
        )
        return None
    remember(engine, snapshot, decision, context)
    try:
        for alarm in ahead:
            alarm.delivered()
        outbox.delivered()
    finally:
        notify.changes(engine, snapshot.run_id, snapshot.workflow, now, lines)
    return Driven.DECIDED


def _decide(engine: Engine, function: Callable[..., Any], context: Replay, *, overdue: bool) -> Decision | None:
    """What the run's function leads to; ``None`` where its deadline has passed and it would go on: then that is its end (EXPIRE-1).

    What had happened before counts, so a function that can only return or raise now does so. One that was never called is not.
    """
    if not overdue:
        return replay(function, context, engine.make_flow)
    if context.snapshot.status == "pending":
        return None
    try:
        decision = replay(function, context, engine.make_flow)
    except NeedsRecording:
        return None
    return None if decision.kind == "suspended" else decision


def _close(engine: Engine, snapshot: Snapshot, sender: Sender, delivery: object | None) -> Driven | None:
    """Do what the run's parent has asked for when it ended (CHILD-3); ``None`` where the run has moved on: look again.

    Where its rollback cannot be planned, the run is held and tried again by the monitor (COMP-3).
    """
    try:
        done = runs.close(engine, snapshot, sender, delivery)
    except Exception as fault:
        if is_trouble(fault):
            raise
        error = fault.error if isinstance(fault, HoldRun) else fault
        missing = error.sequence if isinstance(error, rollback.ReplanIncompleteError) else None
        _no_plan(engine, snapshot, error, missing=missing)
        _calm(sender, delivery)
        return Driven.HELD if runs.hold(engine, snapshot, error, sender, delivery) else None
    return Driven.DECIDED if done else None


def _tell_of_no_plan(engine: Engine, snapshot: Snapshot, context: Replay, error: BaseException) -> None:
    """Journal that a run which is failing has to be held: its rollback is due and cannot be planned (COMP-3).

    It is failing where its function has raised, and where a step or a child that has failed for good is the last thing recorded.
    """
    missing = error.sequence if isinstance(error, rollback.ReplanIncompleteError) else context.missed()
    if missing is not None or context.broke_off or snapshot.is_failing():
        _no_plan(engine, snapshot, error, missing=missing)


def _no_plan(engine: Engine, snapshot: Snapshot, error: BaseException, *, missing: int | None) -> None:
    if missing is not None:
        engine.anomalies.replan_incomplete(run_id=snapshot.run_id, workflow=snapshot.workflow, missing=missing)
    else:
        engine.anomalies.replan_failed(run_id=snapshot.run_id, workflow=snapshot.workflow, error=error)


def family_of(engine: Engine, snapshot: Snapshot, decision: Decision, plan: rollback.Plan | None) -> children.Family | None:
    """Who has to hear of what ``decision`` does to the run beside itself: nobody, while it goes on."""
    if decision.kind == "suspended":
        return None
    return children.family(engine, snapshot, ends=plan is None or not plan.messages, completes=decision.kind == "completed")


def messages(
    engine: Engine, snapshot: Snapshot, decision: Decision, *, plan: rollback.Plan | None, family: children.Family | None, now: int
) -> list[Outgoing]:  # fmt: skip
    """Every message that a decision leads to."""
    found = decisions.messages(engine, snapshot, decision, now) if plan is None else plan.messages
    return found if family is None else [*found, *family.messages()]


def commit(
    engine: Engine, snapshot: Snapshot, decision: Decision, outbox: Outbox, *, operation: Callable[[Tx], bool]
) -> bool:  # fmt: skip
    """Carry out the write of a decision, and make sure of the children that it starts or parks, where COMMIT does not (CLAIM-3)."""
    try:
        landed = engine.write(operation, outbox)
    except StoreError as error:
        if is_lost_commit(error):
            children.check_committed(engine, snapshot, decision)
        raise
    if landed and not engine.store.commit_is_proof:
        try:
            children.check_committed(engine, snapshot, decision)
        except BaseException:
            outbox.unsure()
            raise
    return landed


def _calm(sender: Sender, delivery: object | None) -> None:
    """The function has been walked through. What is left is short, and an interrupt in the middle of handing messages on could
    leave one in nobody's hands. Without a message at hand, the thread is not ours to calm."""
    if delivery is not None:
        sender.calm()


def remember(engine: Engine, snapshot: Snapshot, decision: Decision, context: Replay) -> None:
    """Keep the run as it stands now that ``decision`` has landed, so that the next step needs no reading (DRIVE-1)."""
    if decision.more is not None:
        for failure in decision.more.failures:
            _journal(engine, snapshot.run_id, failure)
    if decision.more is not None and decision.more.cancelled:
        engine.cache.drop(snapshot.run_id)  # which members were cancelled, only the rows can tell
    else:
        engine.cache.put(advanced(snapshot, decision, context))


def _journal(engine: Engine, run_id: str, failure: Failure) -> None:
    """A retry policy whose predicate raised has said no, and that is now recorded (RSIG-3)."""
    entry = failure.entry
    if failure.threw is not None:
        row, name = ("action", entry.actor) if isinstance(entry, StepEntry) else ("child", entry.workflow)
        engine.anomalies.retry_policy_threw(row=row, run_id=run_id, sequence=entry.sequence, actor=name, error=failure.threw)


def advanced(snapshot: Snapshot, decision: Decision, context: Replay) -> Snapshot:
    """``snapshot`` with what ``decision`` has added and changed."""
    entries = list(snapshot.entries)
    for sequence, changed in context.changed.items():
        entries[sequence - 1] = changed
    for sequence, spec in decision.resolved:
        entry = entries[sequence - 1]
        if isinstance(entry, StepEntry | ChildEntry):
            entries[sequence - 1] = replace(entry, comp_actor=spec.actor, comp_ready=True)
    entries.extend(context.new_entries)
    status = {"suspended": "waiting" if decision.outside else "running"}.get(decision.kind, decision.kind)
    taken = decision.more.taken if decision.more is not None else ()
    signals = tuple(signal for signal in snapshot.signals if signal.id not in taken) if taken else snapshot.signals
    return snapshot.moved(
        status=status, revision=snapshot.revision + 1, wakes=snapshot.wakes + decision.again, wakes_seen=snapshot.wakes, hold_count=0,
        entries=entries, tags={**snapshot.tags, **decision.tags} if decision.tags else snapshot.tags, signals=signals,
    )  # fmt: skip


class _Recorder:
    """Writes a side effect's value, or sends a signal, while the replay that asked for it goes on (SIDE-1, SIG-3)."""

    def __init__(self, engine: Engine, snapshot: Snapshot, sender: Sender) -> None:
        self.engine = engine
        self.snapshot = snapshot
        self.sender = sender

    def __call__(self, sequence: int, kind: str, name: str, data: bytes | SentSignal) -> bytes:
        """The value that is recorded: ours, or that of another drive that was first.

        ``data`` is the value, or a signal that the same transaction delivers: what became of it is the value then (SIG-3).

        Who else may be here: a second drive of the run, at the same sequence. The primary key lets one insert land; both go
        on with what is recorded, and only one of their decisions commits.
        """
        engine, snapshot = self.engine, self.snapshot
        now = engine.now()
        lines: list[history.Line] = []
        value = b""
        sending = None
        if isinstance(data, bytes):
            value = data
        else:
            signal = signals.Signal(data.run_id, data.name, data.payload)
            sending = signals.FromRun(engine, snapshot.run_id, signal, sender=self.sender)

        def operation(tx: Tx) -> tuple[bool, bytes | None]:
            lines.clear()
            recorded = value
            if sending is not None:
                sending.lock(tx)
            params = (
                snapshot.run_id, sequence, kind, name, value, now, snapshot.run_id, snapshot.revision, snapshot.created_at,
            )  # fmt: skip
            if tx.run(_RECORD, params):
                if sending is not None:
                    recorded = sending.deliver(tx)
                    tx.run(_RERECORD, (recorded, snapshot.run_id, sequence))
                lines.append(history.Line(history.SIDE_EFFECT_RECORDED, sequence=sequence, name=name, payload=recorded))
                engine.record(tx, snapshot.run_id, now, lines)
                return True, recorded
            row = tx.one(_RECORDED, (snapshot.run_id, sequence))
            return False, None if row is None or row[0] != name or row[2] != kind else bytes(row[1])

        landed, recorded = engine.store.write(operation)
        if recorded is None:
            raise MovedOn
        if landed:
            if sending is not None:
                sending.delivered()
            notify.changes(engine, snapshot.run_id, snapshot.workflow, now, lines)
        return recorded


def send_unsent(engine: Engine, run_id: str, sender: Sender) -> int:
    """Send the messages of steps whose row was committed and whose message never went out (DRIVE-3)."""
    if sender.joins:
        return 0
    rows = engine.store.read(lambda tx: tx.all(_UNSENT, (run_id,)))
    if not rows:
        return 0
    outbox = sender.outbox(None)
    outbox.load([step_message(run_id, row[:-1], created_at=row[-1]) for row in rows])
    outbox.delivered()
    return len(rows)
