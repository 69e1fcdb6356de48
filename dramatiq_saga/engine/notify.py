"""Telling listeners, after the commit and outside every transaction (EVENT-2).

A line of the history becomes a typed event only where somebody listens to its class; otherwise it costs one look-up. The
row that an event shows is read afresh, so a listener sees what the commit left, or something later. Nothing here may fail a
step or a run: what goes wrong is logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from .. import events
from ..codec import load_error, preview
from ..journal import history
from ..views import ActionView, ChildView, CompensationView, SignalView, WaitView

if TYPE_CHECKING:
    from .core import Engine
    from .fence import Outcome
    from .rows import Snapshot
    from .runs import Found
    from .undoing import Outcome as CompensationOutcome

_BY_TYPE: dict[str, type[events.Event]] = {
    cls.type: cls
    for cls in vars(events).values()
    if isinstance(cls, type) and issubclass(cls, events.Event) and cls.type and cls.type not in history.NOT_RECORDED
}
_BY_TYPE[history.ACTION_GIVEN_UP] = events.ActionFailed
_BY_TYPE[history.COMPENSATION_GIVEN_UP] = events.CompensationFailed

_ACTION = f"SELECT {', '.join(ActionView.COLUMNS)} FROM {{action_runs}} WHERE run_id = ? AND sequence = ?"
_COMPENSATION = f"SELECT {', '.join(CompensationView.COLUMNS)} FROM {{compensation_runs}} WHERE run_id = ? AND sequence = ?"
_CHILD = f"SELECT {', '.join(ChildView.COLUMNS)} FROM {{children}} WHERE run_id = ? AND sequence = ?"
_SIGNAL = f"SELECT {', '.join(SignalView.COLUMNS)} FROM {{signals}} WHERE run_id = ? AND id = ?"
_WAIT = f"SELECT {', '.join(WaitView.COLUMNS)} FROM {{waits}} WHERE run_id = ? AND sequence = ?"
_RUN = "SELECT workflow, ends_as, result, error, rollback, rollback_error, reason FROM {flow_runs} WHERE id = ?"
_UNDONE = "SELECT sequence, status FROM {compensation_runs} WHERE run_id = ? ORDER BY level, sequence DESC"


def changes(engine: Engine, run_id: str, workflow: str | None, now: int, lines: Sequence[history.Line]) -> None:
    """Tell listeners of what ``lines`` recorded."""
    for line in lines:
        if line.type == history.ROLLBACK_FINISHED and (line.detail or "").startswith("halted"):
            say(engine, "rollback_halted", run_id=run_id, detail=line.detail)
        cls = _BY_TYPE.get(line.type)
        if cls is not None and events.has_listeners(cls):
            try:
                event = _event(engine, cls, run_id, workflow, now, line)
            except Exception as error:
                _log(run_id, line.type, error)
                continue
            if event is not None:
                events.dispatch(event)


def _event(
    engine: Engine, cls: type[events.Event], run_id: str, workflow: str | None, now: int, line: history.Line
) -> events.Event | None:
    """The typed event of one line; ``None`` where its row is gone already."""
    run = engine.store.read(lambda tx: tx.one(_RUN, (run_id,)))
    if run is None:
        return None
    base: dict[str, Any] = {"run_id": run_id, "workflow_name": workflow or run[0], "at": now}
    if issubclass(cls, events.ActionEvent):
        action = _action(engine, run_id, line.sequence or 0)
        if cls is events.ActionRedispatched:
            base["reason"] = line.detail
        elif cls in (events.ActionAwaitingRetry, events.ActionRetried):
            base["signal"] = line.detail
        return None if action is None else cls(**base, action=action)
    if issubclass(cls, events.CompensationEvent):
        compensation = _compensation(engine, run_id, line.sequence or 0)
        return None if compensation is None else cls(**base, compensation=compensation)
    if issubclass(cls, events.ChildEvent):
        child = _child(engine, run_id, line.sequence or 0)
        if cls in (events.ChildAwaitingRetry, events.ChildRetried):
            base["signal"] = line.detail or ""
        return None if child is None else cls(**base, child=child)
    if cls is events.FlowCompleted:
        return cls(**base, stored_result=None if run[2] is None else bytes(run[2]))
    if cls in (events.FlowFailed, events.FlowExpired):
        return cls(**base, error=load_error(run[3]) if run[3] else None)
    if cls is events.FlowCancelled:
        return cls(**base, reason=run[6])
    if cls in (events.FlowWaiting, events.FlowResumed):
        return cls(**base, reason=line.detail)
    if cls is events.CompensationStarted:
        rows = engine.store.read(lambda tx: tx.all(_UNDONE, (run_id,)))
        return cls(**base, ends_as=run[1] or "", steps=tuple(row[0] for row in rows))
    if cls is events.RollbackFinished:
        rows = engine.store.read(lambda tx: tx.all(_UNDONE, (run_id,)))
        undone = tuple(row[0] for row in rows if row[1] == "completed")
        return cls(**base, rollback=run[4], undone=undone, error=load_error(run[5]) if run[5] else None)
    if cls is events.SideEffectRecorded:
        return cls(**base, sequence=line.sequence or 0, name=line.name or "", stored_value=line.payload or b"")
    if issubclass(cls, events.SignalEvent):
        return _signal_event(engine, cls, base, line)
    return cls(**base)


def _signal_event(
    engine: Engine, cls: type[events.SignalEvent], base: dict[str, Any], line: history.Line
) -> events.SignalEvent | None:
    run_id, sequence = base["run_id"], line.sequence or 0
    wait = None
    if cls is not events.SignalReceived:
        found = engine.store.read(lambda tx: tx.one(_WAIT, (run_id, sequence)))
        wait = None if found is None else WaitView(*found)
    if cls is events.SignalTimedOut:
        return None if wait is None else events.SignalTimedOut(**base, wait=wait)
    number = line.about if line.about is not None or wait is None else wait.signal_id
    row = engine.store.read(lambda tx: tx.one(_SIGNAL, (run_id, number)))
    if row is None:
        return None
    if cls is events.SignalReceived:
        return events.SignalReceived(**base, signal=SignalView(*row))
    return events.SignalConsumed(**base, signal=SignalView(*row), sequence=sequence)


def _action(engine: Engine, run_id: str, sequence: int) -> ActionView | None:
    row = engine.store.read(lambda tx: tx.one(_ACTION, (run_id, sequence)))
    return None if row is None else ActionView(*row)


def _child(engine: Engine, run_id: str, sequence: int) -> ChildView | None:
    row = engine.store.read(lambda tx: tx.one(_CHILD, (run_id, sequence)))
    return None if row is None else ChildView(*row)


def _compensation(engine: Engine, run_id: str, sequence: int) -> CompensationView | None:
    row = engine.store.read(lambda tx: tx.one(_COMPENSATION, (run_id, sequence)))
    return None if row is None else CompensationView(*row)


def step_rejected(engine: Engine, outcome: Outcome) -> None:
    """A superseded worker's outcome was refused: journal it, and hand listeners the last copy of it (FENCE-1)."""
    job = outcome.job
    action = _action(engine, job.run_id, job.sequence)
    facts: dict[str, Any] = {"row": "action", "run_id": job.run_id, "sequence": job.sequence, "actor": outcome.actor}
    engine.anomalies.outcome_rejected(
        **facts, outcome=outcome.status, claimed_attempts=outcome.attempts,
        attempts=None if action is None else action.attempts, status=None if action is None else action.status,
        result=_preview(engine, outcome.result), error=outcome.exception,
    )  # fmt: skip
    if action is not None and events.has_listeners(events.ActionOutcomeRejected):
        event = events.ActionOutcomeRejected(
            run_id=job.run_id, workflow_name=outcome.workflow, at=engine.now(), action=action, outcome=outcome.status,
            stored_result=outcome.result, exception=outcome.exception,
        )  # fmt: skip
        _deliver(engine, event, facts)


def compensation_rejected(engine: Engine, outcome: CompensationOutcome) -> None:
    """As :func:`step_rejected`, for a compensation."""
    job = outcome.job
    row = _compensation(engine, job.run_id, job.sequence)
    facts: dict[str, Any] = {"row": "compensation", "run_id": job.run_id, "sequence": job.sequence, "actor": outcome.actor}
    status = "completed" if outcome.kind == "completed" else "failed"
    engine.anomalies.outcome_rejected(
        **facts, outcome=status, claimed_attempts=outcome.attempts,
        attempts=None if row is None else row.attempts, status=None if row is None else row.status, error=outcome.exception,
    )  # fmt: skip
    if row is not None and events.has_listeners(events.CompensationOutcomeRejected):
        run = engine.store.read(lambda tx: tx.one(_RUN, (job.run_id,)))
        event = events.CompensationOutcomeRejected(
            run_id=job.run_id, workflow_name=run[0] if run else "", at=engine.now(), compensation=row, outcome=status,
            exception=outcome.exception,
        )  # fmt: skip
        _deliver(engine, event, facts)


def _preview(engine: Engine, data: bytes | None) -> str | None:
    """What a refused report carried, where payloads may be shown: for many the log line is its last copy (SAFE-2)."""
    settings = engine.settings.history
    return preview(data, settings.max_payload_preview_length) if data is not None and settings.store_payloads else None


def say(engine: Engine, what: str, **facts: Any) -> None:
    """A line in the ordinary log: something that an operator should hear of, and that nothing has been lost by."""
    with suppress(Exception):
        structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga").error(what, **facts)


def _deliver(engine: Engine, event: events.Event, facts: dict[str, Any]) -> None:
    for listener, error in events.dispatch(event):
        engine.anomalies.rejection_undelivered(**facts, error=error, listener=events.name_of(listener))


def held(engine: Engine, snapshot: Snapshot | Found, error: BaseException) -> None:
    """Log why a run is held; the row and the history say it too (HISTORY-1)."""
    with suppress(Exception):
        structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga").warning(
            "flow_held", run_id=snapshot.run_id, workflow=snapshot.workflow, error=f"{type(error).__name__}: {error}"
        )


def _log(run_id: str, kind: str, error: Exception) -> None:
    with suppress(Exception):
        structlog.get_logger("dramatiq_saga").error("event_lost", run_id=run_id, type=kind, exc_info=error)
