"""Running a workflow in the calling process (SYNC-1): the same engine with another sender.

The loop takes what a write would have sent and runs it at once: drives, steps, compensations. Each step is claimed, run and
fenced as in a worker, so its rows are the same, and a run that is cut off here can be picked up by workers later.

Who else may be here: a worker, to which a sweep elsewhere has sent a row that waits here for its turn (DOCTOR-1). Of the two the claim
chooses one. What the worker has is waited for, as long as it may be at it; what it leaves is run here.
test_what_a_worker_is_at_is_waited_for
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dramatiq import Retry
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Retries

from .clock import ManualClock
from .codec import load_error
from .coroutines import body_of, inline_loop
from .engine import drive as drives
from .engine import liveness, runs, timers
from .engine.sender import InlineSender
from .errors import SagaError, UnknownActorError, WouldBlockError
from .recovery.rows import COLUMNS, COMPENSATION, LEVEL_RUNS, STEP, WANTED, Row
from .step import Delivery
from .store.models import LIVE

if TYPE_CHECKING:
    from dramatiq import Actor, Broker

    from .engine.core import Engine, Sender
    from .engine.rows import Outgoing
    from .middleware import SagaMiddleware
    from .step import Runner
    from .store.database import Tx

_UNENDED = ("pending", "running", "waiting", "rolling_back")
_STATE = "SELECT status, rollback, hold_error FROM {flow_runs} WHERE id = ?"
_WOKEN = (
    "SELECT 1 FROM {flow_runs} WHERE id = ? AND wakes > wakes_seen AND ended_at IS NULL AND status <> 'rolling_back' "
    "AND hold_until IS NULL"
)
_HELD = "SELECT 1 FROM {flow_runs} WHERE id = ? AND hold_until IS NOT NULL AND ended_at IS NULL AND status <> 'rolling_back'"
_WAITING = "SELECT name FROM {waits} WHERE run_id = ? AND status = 'waiting' AND kind = 'signal' ORDER BY sequence"
_OPEN = (
    "SELECT a.sequence, a.actor, a.status, w.name FROM {action_runs} a LEFT JOIN {waits} w ON w.run_id = a.run_id "
    "AND w.sequence = a.sequence AND w.kind = 'retry' AND w.status = 'waiting' "
    "WHERE a.run_id = ? AND a.status IN ('pending', 'running', 'awaiting_retry')"
)
_UNDOS = (
    "SELECT sequence, actor, status FROM {compensation_runs} r WHERE run_id = ? AND ended_at IS NULL AND given_up = FALSE "
    f"AND {LEVEL_RUNS} ORDER BY sequence DESC"
)
_CHILDREN = (
    "SELECT c.sequence, c.workflow, c.child_id, c.status, f.hold_error FROM {children} c JOIN {flow_runs} f ON f.id = c.child_id "
    "WHERE c.run_id = ? AND c.ended_at IS NULL ORDER BY c.sequence"
)
_UNFINISHED = {
    STEP: f"SELECT r.next_try_at, r.time_limit_at, {COLUMNS[STEP]} FROM {{action_runs}} r WHERE r.run_id = ? AND r.{LIVE} "
    f"AND r.status <> 'awaiting_retry' AND r.held_back = FALSE AND {WANTED[STEP]} ORDER BY r.sequence",
    COMPENSATION: f"SELECT r.next_try_at, NULL, {COLUMNS[COMPENSATION]} FROM {{compensation_runs}} r WHERE r.run_id = ? AND r.{LIVE} "
    f"AND {WANTED[COMPENSATION]} AND {LEVEL_RUNS} ORDER BY r.sequence DESC",
}
_LIVE_CHILDREN = "SELECT child_id FROM {children} WHERE run_id = ? AND ended_at IS NULL"

_NO_PLAN = (
    "its rollback, which its deadline asks for and which could not be planned (`expiry_failed` among the anomalies says why)"
)

#: While it waits for a moment, the loop looks so often, in seconds, for what comes from outside.
_LOOK_AGAIN = 0.1


class _InlineMessage(MessageProxy):
    """A message that came from no broker: there is nothing to acknowledge."""

    settled = True
    reservation = None


def run_inline(middleware: SagaMiddleware, broker: Broker, new: runs.NewRun) -> None:
    """Start ``new`` and run it to its end here.

    Raises:
      WouldBlockError: the run is not finished, and nothing in this process can go on with it.
      SagaError: called inside a transaction of the store's database: steps could not commit in it (HOST-1).
    """
    engine = middleware.engine(broker)
    if engine.store.joined():
        raise SagaError(
            "run_sync() inside an open transaction of the store's database: its steps could not commit; call it before or after, "
            "or use send(), which joins the transaction"
        )
    sender = InlineSender()
    if not runs.start(engine, new, sender):
        return
    runner = middleware.runner(broker).inlined(sender)
    loop = _Loop(runner, sender, new.run_id)
    with inline_loop():
        loop.run()
    state = engine.store.read(lambda tx: tx.one(_STATE, (new.run_id,)))
    if state is None or state[0] not in _UNENDED:
        return
    loop.hand_over(middleware.sender(broker))
    if state[2]:
        raise WouldBlockError(new.run_id, "code that fits its history", load_error(state[2]))
    if new.run_id in loop.overdue:
        raise WouldBlockError(new.run_id, _NO_PLAN)
    raise WouldBlockError(
        new.run_id, engine.store.read(lambda tx: ", ".join(_waited_for(tx, new.run_id)) or "something from outside")
    )


class _Loop:
    """Runs what writes would have sent, until nothing is left that this process can do.

    Where only time is left to pass, it passes it: the process waits for the timer, the timeout or the deadline that comes next, and
    looks now and then whether something from outside has come first: a signal, a cancel.
    """

    def __init__(self, runner: Runner, sender: InlineSender, run_id: str) -> None:
        self._runner = runner
        self._sender = sender
        self._run_id = run_id
        self._runs = dict.fromkeys([run_id])  # with its child runs
        self._tried: set[Row] = set()  # rows that were taken up here, as they were then
        self.overdue: set[str] = set()  # runs whose deadline has come and that could not be rolled back (EXPIRE-2)

    def run(self) -> None:
        engine = self._runner.engine
        while True:
            self._work()
            if self._drive_woken():
                continue
            if self._has_other_children():
                continue
            left = engine.store.read(self._left)
            now = engine.now()
            free = [row for row, at in left if at <= now]
            if free:
                self._tried.update(free)
                self._sender.queue.extend(row.message() for row in free)
                continue
            known = engine.store.read(self._moments)
            until = min((at for _, at in left), default=None)
            if until is not None and (not known or until < known[0][0]):
                self._is_time(until)
                continue
            if not known:
                return
            moment, run_id = known[0]
            if self._is_time(moment):
                fired = timers.fire(engine, run_id, self._sender)
                if fired.failed:
                    self.overdue.add(run_id)
                elif not fired.any and timers.is_due(engine, run_id):
                    return  # what is overdue cannot be ended here

    def _moments(self, tx: Tx) -> list[tuple[int, str]]:
        """When something is due that this process can go on from, the next first.

        A run that is held, or whose rollback could not be planned, meets the same code here each time that it is tried again: no moment
        of it is waited for. test_a_held_run_is_not_waited_for_until_its_deadline
        """
        found: list[tuple[int, str]] = []
        for run_id in self._runs:
            moment = timers.next_due(tx, run_id)
            if moment is not None and run_id not in self.overdue and tx.one(_HELD, (run_id,)) is None:
                found.append((moment, run_id))
        return sorted(found)

    def hand_over(self, sender: Sender) -> None:
        """What is left is for workers: what will be due has alarms from now on, where a message can carry them (TIMER-1)."""
        if sender.rings:
            for run_id in self._runs:
                timers.set_alarm(self._runner.engine, run_id, sender, at=None)

    def _work(self) -> None:
        queue = self._sender.queue
        while queue:
            outgoing = queue.popleft()
            self._runs.setdefault(outgoing.run_id)
            if outgoing.kind != "timer":  # the rows name the moments
                run_message(self._runner, outgoing)

    def _drive_woken(self) -> bool:
        """Drive what something from outside has happened to, and nobody here has seen."""
        engine = self._runner.engine
        woken = engine.store.read(lambda tx: [run_id for run_id in self._runs if tx.one(_WOKEN, (run_id,))])
        for run_id in woken:
            drives.drive(engine, run_id, self._sender)
        return bool(woken)

    def _has_ended(self, tx: Tx) -> bool:
        run = tx.one(_STATE, (self._run_id,))
        return run is None or run[0] not in _UNENDED

    def _has_other_children(self) -> bool:
        """Whether there are child runs that a worker has started."""

        def look(tx: Tx) -> set[str]:
            return (
                set() if self._has_ended(tx) else {child for run in self._runs for (child,) in tx.all(_LIVE_CHILDREN, (run,))}
            )

        others = self._runner.engine.store.read(look) - self._runs.keys()
        self._runs |= dict.fromkeys(others)
        return bool(others)

    def _left(self, tx: Tx) -> list[tuple[Row, int]]:
        """What of the run is left to be done, here or elsewhere, and from when on each may be taken up here."""
        if self._has_ended(tx):
            return []
        found: list[tuple[Row, int]] = []
        for run_id in self._runs:
            for kind, sql in _UNFINISHED.items():
                for next_try_at, time_limit_at, *columns in tx.all(sql, (run_id,)):
                    row = Row(kind, *columns)
                    at = _free_at(tx, self._runner.engine, row, next_try_at, time_limit_at)
                    if at is not None and row not in self._tried:
                        found.append((row, at))
        return found

    def _is_time(self, moment: int) -> bool:
        """Wait until ``moment``, or a little: whether it has come. A clock that only moves when it is told to is told so."""
        engine = self._runner.engine
        left = moment - engine.now()
        clock = engine.clock
        if left > 0 and isinstance(clock, ManualClock):
            clock.advance(left / 1000)
        elif left > 0:
            time.sleep(min(left / 1000, _LOOK_AGAIN))
        return engine.now() >= moment


def _free_at(tx: Tx, engine: Engine, row: Row, next_try_at: int | None, time_limit_at: int | None) -> int | None:
    """From when on a row may be taken up here; of one that is running and that nobody may ever take over, until when its worker may be
    at it, and ``None`` after that: nothing says that anybody still is."""
    if row.status == "pending":
        return row.not_before or 0
    if row.status == "failed":
        return next_try_at or 0
    lease = liveness.lease_of(tx, engine, step=row.kind == STEP, run_id=row.run_id, sequence=row.sequence)
    free = min((moment for moment in (row.reclaim_stale_at, lease) if moment is not None), default=None)
    if free is None and time_limit_at is not None and time_limit_at > engine.now():
        return time_limit_at
    return free


def _waited_for(tx: Tx, run_id: str) -> list[str]:
    """What a run waits for, in words, down to what its children wait for."""
    found = [_open(*row) for row in tx.all(_OPEN, (run_id,))]
    found += [f"the undo of step {sequence} ({actor}, {status})" for sequence, actor, status in tx.all(_UNDOS, (run_id,))]
    for sequence, workflow, child_id, status, hold in tx.all(_CHILDREN, (run_id,)):
        if status == "awaiting_retry":
            found.append(f"a signal to start child {sequence} ({workflow}) again")
            continue
        inner = ", ".join(_waited_for(tx, child_id)) or ("code that fits its history" if hold else "something from outside")
        found.append(f"child {sequence} ({workflow}), which waits for {inner}")
    return found + [f"signal {name!r}" for (name,) in tx.all(_WAITING, (run_id,))]


def _open(sequence: int, actor: str, status: str, signal: str | None) -> str:
    return f"step {sequence} ({actor}, {status})" if signal is None else f"signal {signal!r} to retry step {sequence} ({actor})"


def run_message(runner: Runner, outgoing: Outgoing) -> None:
    """Carry out one message here, a step's tries included."""
    from .middleware import build_message

    broker = runner.broker
    delivery = Delivery(_InlineMessage(build_message(broker, outgoing)))
    if outgoing.kind == "drive":
        drives.drive(runner.engine, outgoing.run_id, runner.sender)
        return
    actor = broker.actors.get(outgoing.actor)
    job = delivery.job
    assert job is not None
    if actor is None:
        error = UnknownActorError(
            f"actor {outgoing.actor!r} is not declared in this process: import the module that declares it"
        )
        runner.refuse(job, outgoing.actor, error)
        return
    body = body_of(actor)
    tries = outgoing.tries
    while True:
        try:
            runner.perform(delivery, body)
            return
        except Exception as error:
            if delivery.state != "failed":
                raise
            if not _tries_again(actor, delivery.message.options, tries, error):
                runner.give_up(delivery)
                return
            tries += 1
            delivery = Delivery(delivery.message)


def _tries_again(actor: Actor[Any, Any], options: dict[str, Any], tries: int, error: Exception) -> bool:
    """What Dramatiq's Retries would decide, without its waiting."""
    retries = next((middleware for middleware in actor.broker.middleware if isinstance(middleware, Retries)), None)
    throws = actor.options.get("throws")
    if retries is None or (throws and isinstance(error, throws)):
        return False
    retry_when = actor.options.get("retry_when", retries.retry_when)
    if retry_when is not None:
        return bool(retry_when(tries, error))
    limit = options.get("max_retries", actor.options.get("max_retries", retries.max_retries))
    if limit is None and not isinstance(error, Retry):
        limit = retries.max_retries  # without an end here, a step that always fails would never let its caller go
    return limit is None or tries < limit
