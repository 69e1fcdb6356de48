"""Timers and deadlines: what is due in one run, in due order (TIMER-1, EXPIRE-1, EXPIRE-2).

:func:`fire` is the one verb: an alarm's message, the loop of a worker, a late claim and the sweep all call it. A wait whose moment has
passed ends (``consumed`` for a timer, ``timed_out`` for a signal); a step that is not settled by its deadline becomes ``expired``, and
its claim is void: the fence refuses what it still reports; a run that has not ended by its own deadline is undone and ends
``expired``. What was due before the run's deadline is seen by the run before that; what was due after it falls with the run.

Who else may be here: the same verb in another process, a signal, an outcome, a claim, a retry, a cancel. The run's row is locked first,
and every write repeats what was read: of two, the second changes nothing. Firing what was fired finds nothing due, so it can be
repeated at will. Proven by ``tests/races/test_timers.py``. Long because finding, ending and watching for what is due rest on one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..codec import describe_error
from ..errors import MessageNotSentError, StepExpiredError
from ..journal import history
from ..store.trouble import is_trouble
from . import alarms, drive, expiry, notify, runs, signals
from .replay import HoldRun
from .snapshot import load
from .wakes import WAKE

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..store.database import Tx
    from .core import Engine, Sender

_RUN = (
    "SELECT workflow, queue, priority, expires_at, expiry_after, expiry_attempts, timer_at, wakes > wakes_seen, "
    "wakes > wakes_seen AND woken_at <= expires_at AND status <> 'pending' FROM {flow_runs} "
    "WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)
_LOCK = _RUN + "{for_update}"
_WAITS = (
    "SELECT sequence, kind, name, cycle, due_at FROM {waits} WHERE run_id = ? AND status = 'waiting' AND due_at <= ? "
    "ORDER BY due_at, sequence"
)
_STEPS = (
    "SELECT sequence, actor, status, attempts, cycle, expires_at FROM {action_runs} "
    "WHERE run_id = ? AND ended_at IS NULL AND expires_at <= ? ORDER BY expires_at, sequence"
)
_NEXT_WAIT = "SELECT MIN(due_at) FROM {waits} WHERE run_id = ? AND status = 'waiting'"
_NEXT_STEP = "SELECT MIN(expires_at) FROM {action_runs} WHERE run_id = ? AND ended_at IS NULL"
_OBSERVED = "run_id = ? AND sequence = ? AND status = ? AND attempts = ? AND cycle = ? AND ended_at IS NULL AND expires_at <= ?"
# Of a step that was at work, what tells how long that may go on is kept: no undo of it may run into it (COMP-9).
_EXPIRE_RUNNING = (
    f"UPDATE {{action_runs}} SET status = 'expired', error = ?, ended_at = ?, next_try_at = NULL, claims = 0 WHERE {_OBSERVED}"
)
_EXPIRE = (
    "UPDATE {action_runs} SET status = 'expired', error = COALESCE(error, ?), ended_at = ?, next_try_at = NULL, claims = 0, "
    f"worker_id = NULL, reclaim_stale_at = NULL, time_limit_at = NULL WHERE {_OBSERVED}"
)
_CLOSE_RETRY_WAIT = (
    "UPDATE {waits} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND sequence = ? AND kind = 'retry' "
    "AND status = 'waiting'"
)
_SET_ALARM = "UPDATE {flow_runs} SET timer_at = ? WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back'"
_TAKE_UP = "UPDATE {flow_runs} SET timer_at = timer_last, timer_last = NULL WHERE id = ? AND timer_last = ?"
_LATER = "SELECT timer_last FROM {flow_runs} WHERE id = ?"
_CLEAR = "UPDATE {flow_runs} SET timer_at = NULL WHERE id = ? AND timer_at = ?"
_OVERDUE = "SELECT 1 FROM {flow_runs} WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back' AND expires_at <= ?"
_EXPIRY = "SELECT workflow, expiry_attempts FROM {flow_runs} WHERE id = ?"
_HOLD_OFF = (
    "UPDATE {flow_runs} SET expiry_after = ? WHERE id = ? AND (expiry_after IS NULL OR expiry_after <= ?) AND expiry_attempts = ? "
    "AND ended_at IS NULL AND status <> 'rolling_back'"
)
_EXPIRY_FAILED = (
    "UPDATE {flow_runs} SET expiry_attempts = expiry_attempts + 1, expiry_after = ? "
    "WHERE id = ? AND expiry_attempts = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)


@dataclass(slots=True)
class Fired:
    """What came due in a run and was ended by this call."""

    waits: int = 0
    steps: int = 0
    runs: int = 0
    failed: int = 0  # the run was overdue and its rollback could not be planned: found as it was, and held off (EXPIRE-2)
    left: int = 0  # it is for a process that knows the run's workflow

    @property
    def any(self) -> bool:
        """Whether anything was."""
        return bool(self.waits or self.steps or self.runs or self.failed)


@dataclass(frozen=True, slots=True)
class _Wait:
    sequence: int
    kind: str
    name: str | None
    cycle: int
    due_at: int


@dataclass(frozen=True, slots=True)
class _Step:
    sequence: int
    actor: str
    status: str
    attempts: int
    cycle: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class _Found:
    """A live run, and what is due in it."""

    run_id: str
    workflow: str
    queue: str
    priority: int | None
    expires_at: int | None
    expiry_attempts: int
    timer_at: int | None
    unseen: bool
    in_time: bool  # what nobody has seen had happened before the run's deadline
    overdue: bool
    waits: tuple[_Wait, ...]
    steps: tuple[_Step, ...]


def fire(
    engine: Engine,
    run_id: str,
    sender: Sender,
    *,
    delivery: object | None = None,
    at: int | None = None,
    here: bool = True,
    sweeping: bool = False,
) -> Fired:
    """End what is due in a run, in due order, have the run driven, and set the next alarm.

    ``delivery`` is the message at hand and ``at`` the moment that it was for. With ``here``, a run whose workflow this process knows is
    driven on the spot; otherwise by a message. ``sweeping``: an overdue run is held off before its function is called, and where it is
    ``left``, the caller sends for it. Where another call of its workflow's function seems to hang in this process, it is ``left``, too, and
    driven by a message.

    Raises StoreError where the store refuses, MessageNotSentError where a message did not leave; calling it again goes on from there.
    """
    fired = Fired()
    ended = driven = False
    ours: int | None = None
    while True:
        now = engine.now()
        found = engine.store.read(lambda tx: _look(tx, run_id, now, ours))  # noqa: B023
        if found is None:
            return fired
        calls = found.workflow in engine.workflows and found.workflow not in engine.lookout.busy()
        knows = calls and engine.drives(found.workflow, found.queue)
        if found.waits or found.steps:
            ended = True
            driven = _end(engine, found, sender, delivery, fired, now=now, here=here and knows) or driven
            continue
        if found.overdue:
            if sweeping and ours is None and calls:
                ours = _hold_off(engine, found, now)
                continue
            if (ended or found.in_time) and not driven and knows:
                driven = True
                _drive(engine, run_id, sender, delivery, fired)  # what had happened before its deadline counts
                continue
            if _expire_run(engine, run_id, sender, delivery, fired, calls=calls):
                continue
        break
    if delivery is not None and found.unseen and not driven and knows:
        _drive(engine, run_id, sender, delivery, fired)  # an earlier delivery has fired, and was lost before its drive
    if fired.left and (sweeping or not ended):
        return fired
    if sender.rings:
        set_alarm(engine, run_id, sender, at=at)
    elif (
        not sender.joins and found.timer_at is not None
    ):  # a message has looked: the next one may be sent as soon as something else is due
        engine.store.write(lambda tx: tx.run(_CLEAR, (run_id, found.timer_at)))
    return fired


def _look(tx: Tx, run_id: str, now: int, ours: int | None = None) -> _Found | None:
    """``ours`` is the window that this call has taken."""
    run = tx.one(_RUN, (run_id,))
    if run is None:
        return None
    workflow, queue, priority, expires_at, expiry_after, expiry_attempts, timer_at, unseen, in_time = run
    off = expiry_after is not None and expiry_after > now and expiry_after != ours
    overdue = expires_at is not None and expires_at <= now and not off
    until = expires_at if overdue else now
    waits = tuple(_Wait(*row) for row in tx.all(_WAITS, (run_id, until)))
    steps = tuple(_Step(*row) for row in tx.all(_STEPS, (run_id, until)))
    return _Found(
        run_id,
        workflow,
        queue,
        priority,
        expires_at,
        expiry_attempts,
        timer_at,
        bool(unseen),
        bool(in_time),
        overdue,
        waits,
        steps,
    )


# --- waits and steps -------------------------------------------------------------------------------------------------


def _end(engine: Engine, found: _Found, sender: Sender, delivery: object | None, fired: Fired, *, now: int, here: bool) -> bool:
    """End what was found due; true where the run was driven here afterwards."""
    run_id = found.run_id
    outbox = sender.outbox(delivery)
    outbox.load([signals.drive_message(run_id, (found.workflow, found.queue, found.priority))])

    def operation(tx: Tx) -> tuple[int, int]:
        if tx.one(_LOCK, (run_id,)) is None:  # DRIVE-7: the run's row first
            return 0, 0
        lines: list[history.Line] = []
        waits = sum(_end_wait(tx, run_id, wait, now, lines) for wait in found.waits)
        steps = sum(_end_step(tx, run_id, step, now, lines) for step in found.steps)
        if waits or steps:
            tx.run(WAKE, (now, run_id))
            engine.record(tx, run_id, now, lines)
            if here:
                outbox.keep(tx)
            else:
                outbox.stage(tx)
            tx.after_commit(lambda: notify.changes(engine, run_id, found.workflow, now, lines))
        return waits, steps

    waits, steps = engine.write(operation, outbox)
    fired.waits += waits
    fired.steps += steps
    if not waits and not steps:
        return False
    if here:
        _drive(engine, run_id, sender, delivery, fired)
    else:
        outbox.delivered()
    return here


def _drive(engine: Engine, run_id: str, sender: Sender, delivery: object | None, fired: Fired) -> None:
    if drive.drive(engine, run_id, sender, delivery) is drive.Driven.EXPIRED:
        fired.runs += 1


def _end_wait(tx: Tx, run_id: str, wait: _Wait, now: int, lines: list[history.Line]) -> bool:
    if not signals.time_out(tx, run_id, wait.sequence, cycle=wait.cycle, now=now, kind=wait.kind):
        return False
    if wait.kind != "timer":
        lines.append(history.Line(history.SIGNAL_TIMED_OUT, sequence=wait.sequence, name=wait.name))
    return True


def _end_step(tx: Tx, run_id: str, step: _Step, now: int, lines: list[history.Line]) -> bool:
    """Expire a step that is as it was found (EXPIRE-1). A claim that is at work on it is void from here on (FENCE-1)."""
    sql = _EXPIRE_RUNNING if step.status == "running" else _EXPIRE
    text = describe_error(StepExpiredError(step.actor, step.sequence))
    # Who else may be here: its outcome, a claim, a retry. Each changes status, attempts or cycle under the run's lock.
    # test_an_outcome_and_the_deadline_of_its_step_have_one_winner
    if not tx.run(sql, (text, now, run_id, step.sequence, step.status, step.attempts, step.cycle, now)):
        return False
    tx.run(_CLOSE_RETRY_WAIT, (now, run_id, step.sequence))
    lines.append(
        history.Line(history.ACTION_EXPIRED, sequence=step.sequence, name=step.actor, attempt=step.attempts or None, error=text)
    )
    return True


# --- the run ---------------------------------------------------------------------------------------------------------


def _hold_off(engine: Engine, found: _Found, now: int) -> int | None:
    """Take an overdue run before its function is called: whatever becomes of this call, the run does not stand in front of others (EXPIRE-2).

    The end of the window; ``None`` where it is not as it was found.
    """
    assert found.expires_at is not None
    until = now + runs.pause(engine, found.expiry_attempts, found.expires_at)
    params = (until, found.run_id, now, found.expiry_attempts)
    # Who else may be here: another sweep, or an alarm that has failed at this. One of them moves the window, the others see it moved.
    # test_a_sweep_that_is_killed_in_a_workflow_function_leaves_the_others_to_the_next
    return until if engine.store.write(lambda tx: tx.run(_HOLD_OFF, params)) else None


def _expire_run(engine: Engine, run_id: str, sender: Sender, delivery: object | None, fired: Fired, *, calls: bool) -> bool:
    """Undo an overdue run, to end as ``expired``; true where it has to be looked at again.

    Where its rollback cannot be planned, the run is left as found and held off (COMP-3, EXPIRE-2).
    """
    try:
        snapshot = load(engine, run_id)
        if snapshot is None or snapshot.status not in signals.SIGNALABLE:
            return True
        if not calls and runs.needs_replay(snapshot):
            fired.left += 1
            return False
        if not expiry.expire(engine, snapshot, sender, delivery):
            return True
    except Exception as fault:
        if is_trouble(fault):
            raise
        fired.failed += expiry_failed(engine, run_id, fault.error if isinstance(fault, HoldRun) else fault)
        return False
    fired.runs += 1
    return True


def hold_off(engine: Engine, run_id: str, error: BaseException, *, created_at: int | None = None) -> tuple[bool, bool]:
    """Hold a run off whose drive does not come back, as one whose drive has failed: overdue, or held. Which of the two was done, if any.

    ``created_at`` tells the run from another one that has its id since.
    """
    found = runs.as_found(engine, run_id)
    if found is None or created_at not in (None, found.created_at):
        return False, False
    if engine.store.read(lambda tx: tx.one(_OVERDUE, (run_id, engine.now()))) is not None:
        return expiry_failed(engine, run_id, error), False
    return False, runs.hold_stalled(engine, found, error)


def expiry_failed(engine: Engine, run_id: str, error: BaseException) -> bool:
    """Hold an overdue run off, for a window that doubles with every failure, without an end; nothing else of it is changed.

    False where it has ended, or somebody else's failure has counted.
    """
    row = engine.store.read(lambda tx: tx.one(_EXPIRY, (run_id,)))
    if row is None:
        return False
    attempts: int = row[1]
    after = engine.now() + runs.pause(engine, attempts)
    # Who else may be here: another sweep that has failed at the same. One of them counts.
    if not engine.store.write(lambda tx: tx.run(_EXPIRY_FAILED, (after, run_id, attempts))):
        return False
    engine.anomalies.expiry_failed(run_id=run_id, workflow=row[0], error=error, expiry_attempts=attempts + 1)
    return True


# --- finding what is due ---------------------------------------------------------------------------------------------

_LIVE = "f.ended_at IS NULL AND f.status <> 'rolling_back'"
_NOT_HELD_OFF = "(f.expiry_after IS NULL OR f.expiry_after <= ?)"
_UNSENT = " AND (f.timer_at IS NULL OR f.timer_at <= ?)"
# The first terms of each are the predicate of an index that holds nothing else. A CROSS JOIN, because SQLite keeps the order of that
# one: it must begin with what is due, however many runs are live.
_DUE = (
    (
        "SELECT f.id, f.workflow, f.queue, f.priority, w.due_at FROM {waits} w CROSS JOIN {flow_runs} f "
        f"WHERE f.id = w.run_id AND w.status = 'waiting' AND w.due_at <= ? AND {_LIVE}%s ORDER BY w.due_at LIMIT ?"
    ),
    (
        "SELECT f.id, f.workflow, f.queue, f.priority, a.expires_at FROM {action_runs} a CROSS JOIN {flow_runs} f "
        f"WHERE f.id = a.run_id AND a.expires_at IS NOT NULL AND a.ended_at IS NULL AND a.expires_at <= ? AND {_LIVE}%s "
        "ORDER BY a.expires_at LIMIT ?"
    ),
    (
        "SELECT f.id, f.workflow, f.queue, f.priority, f.expires_at FROM {flow_runs} f "
        f"WHERE f.expires_at IS NOT NULL AND {_LIVE} AND f.expires_at <= ?%s AND {_NOT_HELD_OFF} ORDER BY f.expires_at LIMIT ?"
    ),
)
_TAKE = (
    "UPDATE {flow_runs} SET timer_at = ? WHERE id = ? AND (timer_at IS NULL OR timer_at <= ?) "
    "AND ended_at IS NULL AND status <> 'rolling_back'"
)


@dataclass(frozen=True, slots=True)
class DueRun:
    """A live run in which something is due since ``due``, as a listing has found it."""

    run_id: str
    workflow: str
    queue: str
    priority: int | None
    due: int


def find_due(engine: Engine, *, unsent: bool = False, without: Collection[str] = ()) -> list[DueRun]:
    """Live runs in which something is due, the longest due first, at most ``monitor.expiration.batch_size`` rows of each kind.

    ``unsent``: only runs that this process drives (DRIVE-6) and that no message of kind "timer" is on its way to. ``without``: workflows
    whose functions it does not call now. An overdue run that is held off is none (EXPIRE-2).
    """
    now, limit = engine.now(), engine.settings.monitor.expiration.batch_size
    gate: tuple[Any, ...] = ()
    narrowed = ""
    if unsent:
        if not engine.workflows:
            return []
        gate = (now, *engine.workflows, *(engine.queues or ()))
        narrowed = f"{_UNSENT} AND f.workflow IN ({_markers(engine.workflows)})"
        if engine.queues:
            narrowed += f" AND f.queue IN ({_markers(engine.queues)})"
    waits, steps, overdue = (sql.replace("%s", narrowed) for sql in _DUE)

    # Runs of workflows that are not known here can be sent to others, and no more: were they listed together, as many of them as the
    # limit would stand in front of those that can be ended. test_overdue_runs_of_unknown_workflows_do_not_stand_in_front_of_known_ones
    # One that a message is on its way to is none of them.
    shares: list[tuple[str, tuple[Any, ...]]] = [(overdue, gate)]
    if not unsent:
        names = tuple(name for name in engine.workflows if name not in without)
        others = f" AND f.workflow NOT IN ({_markers(names)})" if names else ""
        shares = [(_DUE[2].replace("%s", f"{_UNSENT}{others}"), (now, *names))]
        if names:
            shares.append((_DUE[2].replace("%s", f" AND f.workflow IN ({_markers(names)})"), names))

    def look(tx: Tx) -> list[tuple[Any, ...]]:
        found = tx.all(waits, (now, *gate, limit)) + tx.all(steps, (now, *gate, limit))
        return found + [row for sql, params in shares for row in tx.all(sql, (now, *params, now, limit))]

    earliest: dict[str, DueRun] = {}
    for row in sorted(engine.store.read(look), key=lambda row: (row[4], row[0])):
        earliest.setdefault(row[0], DueRun(*row))
    return list(earliest.values())


def _markers(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def send(engine: Engine, sender: Sender, run: DueRun, *, again_after: int) -> bool:
    """Send the message that has a worker look at what is due in ``run``; false where somebody else has, not ``again_after`` ms ago.

    For a broker that the transaction cannot reach: what came due is ended while that message is at hand, so nothing of it is lost with a
    worker (DRIVE-2). And for a run that the caller cannot end.

    Raises MessageNotSentError; then the run is as it was before.
    """
    now = engine.now()
    until = now + again_after
    outbox = sender.outbox(None)
    outbox.load([alarms.message(run.run_id, run.workflow, run.queue, priority=run.priority, at=run.due, now=now)])

    def take(tx: Tx) -> bool:
        # Who else may be here: the loops of other workers with the same listing. One of them moves the moment.
        # test_of_two_loops_one_sends_for_what_is_due
        if not tx.run(_TAKE, (until, run.run_id, now)):
            return False
        outbox.stage(tx)
        return True

    if not engine.write(take, outbox):
        return False
    try:
        outbox.delivered()
    except MessageNotSentError:
        engine.store.write(lambda tx: tx.run(_CLEAR, (run.run_id, until)))
        raise
    return True


# --- the next alarm --------------------------------------------------------------------------------------------------


def next_due(tx: Tx, run_id: str) -> int | None:
    """When something in a live run is due next; a moment that has passed counts, a run that is held off counts from its window's end."""
    run = tx.one(_RUN, (run_id,))
    if run is None:
        return None
    expires_at, expiry_after = run[3], run[4]
    moments = [row[0] for sql in (_NEXT_WAIT, _NEXT_STEP) for row in tx.all(sql, (run_id,)) if row[0] is not None]
    if expires_at is not None:
        moments.append(max(expires_at, expiry_after or 0))
    return min(moments, default=None)


def is_due(engine: Engine, run_id: str) -> bool:
    """Whether something in a run is due now."""
    now = engine.now()
    found = engine.store.read(lambda tx: _look(tx, run_id, now))
    return found is not None and bool(found.waits or found.steps or found.overdue)


def set_alarm(engine: Engine, run_id: str, sender: Sender, *, at: int | None) -> None:
    """Send the next alarm of a run, where none is on its way that is early enough. ``at``: the moment of the one that has gone off.

    Who else may be here: a decision that creates a deadline. Both hold the run's row while they compare the moments, so the earlier one
    is always on its way. test_a_deadline_that_is_created_while_an_alarm_goes_off_has_its_own
    """
    while not _set_alarm_once(engine, run_id, sender, at):
        pass


def _set_alarm_once(engine: Engine, run_id: str, sender: Sender, at: int | None) -> bool:
    now = engine.now()

    def look(tx: Tx, run: str) -> tuple[Any, int | None, int | None]:
        return tx.one(run, (run_id,)), next_due(tx, run_id), (tx.one(_LATER, (run_id,)) or (None,))[0]

    run, moment, later = engine.store.read(lambda tx: look(tx, _RUN))
    if run is None or not _is_wanted(run[6], moment, now, at):
        return True
    # One that was on its way before the last one is early enough: a loop of short waits under a long deadline sends that once
    # (test_a_loop_of_short_waits_sends_the_alarm_of_its_deadline_once).
    carried = moment is not None and later is not None and now < later <= moment
    outbox = sender.outbox(None)
    if moment is not None and not carried:
        outbox.load([alarms.message(run_id, run[0], run[1], priority=run[2], at=moment, now=now)])

    def operation(tx: Tx) -> bool:
        known, *still = look(tx, _LOCK)
        if known is None:
            return True
        if still != [moment, later] or not _is_wanted(known[6], moment, now, at):
            return False
        if carried:
            tx.run(_TAKE_UP, (run_id, later))
        else:
            tx.run(_SET_ALARM, (moment, run_id))
        if moment is not None and not carried:
            outbox.stage(tx)
        return True

    if not engine.write(operation, outbox):
        return False
    if moment is not None and not carried:
        outbox.delivered()
    return True


def _is_wanted(timer_at: int | None, moment: int | None, now: int, at: int | None) -> bool:
    """Whether the alarm on the run's row has gone off, or is missing."""
    if timer_at is None:
        return moment is not None
    return timer_at <= now or (at is not None and at >= timer_at)
