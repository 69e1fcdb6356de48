"""Signals: one transaction that accepts a signal and hands it to the oldest wait for it (SIG-1, SIG-2, SIG-3).

The run's row is locked first, so all signals of a run are accepted one after another, and their ids are the order of arrival. A
signal that no wait is open for is kept; the decision that asks for it takes it from its snapshot. Whether there is a wait or not,
the run's wake count is raised: a decision in the making, which knows nothing of this signal, loses and looks again.

Who else may be here: the timeout of the same wait, a second signal, a drive that is about to commit a wait, the end of the run. A
wait leaves ``waiting`` by one conditional ``UPDATE``, whoever wins; its deadline stands in the condition, so what had run out when
the signal came has timed out, and the signal is kept for the next. Proven by ``tests/races/test_signals.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..codec import encode
from ..errors import (
    CannotSignalRollingBackFlowError,
    CannotSignalTerminalFlowError,
    FlowNotFoundError,
    MessageNotSentError,
    SignalKeyConflictError,
)
from ..journal import history
from . import notify
from .rows import Outgoing
from .wakes import LOCK_RUN, WAKE, WAKE_SEEN

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Outbox, Sender

_RUN = "SELECT workflow, queue, priority FROM {flow_runs} WHERE id = ?"
_LOCK = "SELECT status, wakes > wakes_seen FROM {flow_runs} WHERE id = ?{for_update}"
_BY_KEY = "SELECT name FROM {signals} WHERE run_id = ? AND dedup_key = ?"
_INSERT = "INSERT INTO {signals} (run_id, name, dedup_key, status, received_at, ended_at, payload) VALUES (?, ?, ?, 'received', ?, NULL, ?)"
_OPEN = (
    "SELECT sequence, kind, cycle FROM {waits} WHERE run_id = ? AND status = 'waiting' AND name = ? "
    "ORDER BY created_at, sequence{for_update}"
)
_CONSUME_WAIT = (
    "UPDATE {waits} SET status = 'consumed', signal_id = ?, payload = ?, ended_at = ? "
    "WHERE run_id = ? AND sequence = ? AND cycle = ? AND status = 'waiting' AND (due_at IS NULL OR due_at > ?)"
)
_TIME_OUT_WAIT = (
    "UPDATE {waits} SET status = ?, ended_at = ? WHERE run_id = ? AND sequence = ? AND cycle = ? AND status = 'waiting' "
    "AND due_at <= ?"
)
_CONSUME = "UPDATE {signals} SET status = 'consumed', ended_at = ? WHERE id = ? AND run_id = ? AND status = 'received'"

#: Runs take signals in these statuses.
SIGNALABLE = ("pending", "running", "waiting")

MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal to be delivered. ``payload`` is encoded; ``key`` makes it count once per run (SIG-3)."""

    run_id: str
    name: str
    payload: bytes
    key: str | None = None


@dataclass(slots=True)
class Answer:
    """What became of a signal. ``refused`` is the status that the run takes no signals in, or ``missing``."""

    refused: str | None = None
    repeated: bool = False  # a signal with this key had been accepted before: nothing was changed
    other: str | None = None  # that one's name, where it is another
    drive: bool = False  # something waits for a drive now
    lines: list[history.Line] = field(default_factory=list)


def send(engine: Engine, signal: Signal, sender: Sender) -> None:
    """Deliver a signal to a run, in one transaction: accepted whole, or refused and nothing written (SIG-1).

    With a sender that joins the transaction, a run that has waited for it is driven by a message of the same transaction; with another
    broker the message leaves after the commit. A repeat of an accepted key answers like the first, whatever has become of the run.

    Raises:
      FlowNotFoundError: there is no such run.
      CannotSignalTerminalFlowError, CannotSignalRollingBackFlowError: it takes no signals now.
      SignalKeyConflictError: the key belongs to a signal of another name.
      MessageNotSentError: the signal is accepted, and the broker did not take the message that would have the run driven.
      WriteUnknownError: nobody can say whether it was accepted; with a key, sending it again is safe.
    """
    run = engine.store.read(lambda tx: tx.one(_RUN, (signal.run_id,)))
    if run is None:
        raise FlowNotFoundError(signal.run_id)
    outbox = sender.outbox(None)
    outbox.load([drive_message(signal.run_id, run)])

    def operation(tx: Tx) -> Answer:
        answer = deliver(tx, engine, signal)
        # A repeat may be there because the message of the first did not leave: only another broker can have lost it.
        if answer.drive and not (answer.repeated and outbox.joined):
            outbox.stage(tx)
        tell_after_commit(tx, engine, signal.run_id, str(run[0]), answer)
        return answer

    answer = engine.write(operation, outbox)
    if answer.other is not None and signal.key is not None:
        raise SignalKeyConflictError(signal.run_id, signal.key, answer.other, signal.name)
    if answer.refused is not None:
        raise refusal(signal.run_id, answer.refused)
    if answer.drive and not (answer.repeated and outbox.joined):
        leave(outbox, signal)


def leave(outbox: Outbox, signal: Signal) -> None:
    """Have the messages of a signal that is stored leave."""
    try:
        outbox.delivered()
    except MessageNotSentError as error:
        raise MessageNotSentError(
            f"signal {signal.name!r} is stored for run {signal.run_id}, but the message that has the run driven could not be sent "
            f"({error.__cause__ or error}): repair sends it later, and so does the same signal again with the same key"
        ) from error


def deliver(tx: Tx, engine: Engine, signal: Signal) -> Answer:
    """Accept ``signal`` inside a transaction, if its run takes signals, and hand it to the oldest open wait of that name."""
    run = tx.one(_LOCK, (signal.run_id,))  # DRIVE-7: the run's row first
    if run is None:
        return Answer(MISSING)
    status, unseen = run
    live = status in SIGNALABLE
    if signal.key is not None:
        known = tx.one(_BY_KEY, (signal.run_id, signal.key))
        if known is not None:
            return Answer(repeated=True, other=None if known[0] == signal.name else known[0], drive=bool(live and unseen))
    if not live:
        return Answer(status)
    now = engine.now()
    number = insert(tx, signal, now)
    answer = Answer(lines=[history.Line(history.SIGNAL_RECEIVED, name=signal.name, payload=signal.payload, about=number)])
    # Who else may be here: the timeout of the wait. Whose UPDATE comes first has it: the other one's changes nothing.
    # test_a_signal_that_comes_after_the_deadline_of_its_wait_is_kept_for_the_next
    for sequence, kind, cycle in tx.all(_OPEN, (signal.run_id, signal.name)):
        if time_out(tx, signal.run_id, sequence, cycle=cycle, now=now, kind=kind):
            answer.drive = True
            answer.lines.append(history.Line(history.SIGNAL_TIMED_OUT, sequence=sequence, name=signal.name))
        elif meet(tx, signal, number, sequence=sequence, cycle=cycle, now=now):
            answer.drive = True
            answer.lines.append(history.Line(history.SIGNAL_CONSUMED, sequence=sequence, name=signal.name, about=number))
            break
    if answer.drive:
        tx.run(WAKE, (now, signal.run_id))
    else:
        tx.run(WAKE_SEEN, (signal.run_id,))
    engine.record(tx, signal.run_id, now, answer.lines)
    return answer


def time_out(tx: Tx, run_id: str, sequence: int, *, cycle: int, now: int, kind: str) -> bool:
    """End an open wait whose moment has passed; false where it is open no more, or has time left (SIG-2, TIMER-1)."""
    status = "consumed" if kind == "timer" else "timed_out"
    return bool(tx.run(_TIME_OUT_WAIT, (status, now, run_id, sequence, cycle, now)))


def meet(tx: Tx, signal: Signal, number: int, *, sequence: int, cycle: int, now: int) -> bool:
    """Hand a signal that was just inserted to an open wait; false where that is open no more, or out of time (SIG-2)."""
    if not tx.run(_CONSUME_WAIT, (number, signal.payload, now, signal.run_id, sequence, cycle, now)):
        return False
    tx.run(_CONSUME, (now, number, signal.run_id))
    return True


def insert(tx: Tx, signal: Signal, now: int) -> int:
    """Keep a signal as received; its id."""
    params = (signal.run_id, signal.name, signal.key, now, signal.payload)
    if tx.dialect == "mysql":  # differs because: MySQL has no INSERT .. RETURNING
        tx.run(_INSERT, params)
        row = tx.one("SELECT LAST_INSERT_ID()")
    else:
        row = tx.one(_INSERT + " RETURNING id", params)
    assert row is not None
    return int(row[0])


def tell_after_commit(tx: Tx, engine: Engine, run_id: str, workflow: str, answer: Answer) -> None:
    """Have listeners hear of it once it is committed: the host's commit, where it has joined one (EVENT-2)."""
    if answer.lines:
        now, lines = engine.now(), answer.lines
        tx.after_commit(lambda: notify.changes(engine, run_id, workflow, now, lines))


def drive_message(run_id: str, run: tuple[Any, ...]) -> Outgoing:
    """What has a run driven: ``run`` is its workflow, queue and priority."""
    workflow, queue, priority = run
    return Outgoing("drive", run_id, workflow, queue, priority=priority)


def refusal(run_id: str, status: str) -> Exception:
    """The error for a signal that was not accepted."""
    if status == MISSING:
        return FlowNotFoundError(run_id)
    if status == "rolling_back":
        return CannotSignalRollingBackFlowError(run_id, status)
    return CannotSignalTerminalFlowError(run_id, status)


# --- from one run to another (SIG-3) ---------------------------------------------------------------------------------

_PARENT = "SELECT parent_id FROM {flow_runs} WHERE id = ?"


class FromRun:
    """A signal that a workflow function sends: the transaction that records it in the sender's history carries it out.

    So it is sent once, however often the function is replayed, and what became of it is what every replay finds: a target that is
    unknown or takes no signals is recorded too, and raised in the function.
    """

    def __init__(self, engine: Engine, run_id: str, signal: Signal, *, sender: Sender) -> None:
        self.engine = engine
        self.run_id = run_id
        self.signal = signal
        self._run = engine.store.read(lambda tx: tx.one(_RUN, (signal.run_id,)))
        self._outbox = sender.outbox(None)
        if self._run is not None:
            self._outbox.load([drive_message(signal.run_id, self._run)])
        self._order = self._locks()
        self._staged = False

    def _locks(self) -> tuple[str, ...]:
        """Both runs in the order in which everybody locks them: parents before children, strangers by their ids (DRIVE-7)."""
        mine, target = self.run_id, self.signal.run_id
        if mine == target:
            return (mine,)
        parent = self.engine.store.read(lambda tx: tx.one(_PARENT, (mine,)))
        other = self.engine.store.read(lambda tx: tx.one(_PARENT, (target,)))
        if parent is not None and parent[0] == target:
            return (target, mine)
        if other is not None and other[0] == mine:
            return (mine, target)
        return tuple(sorted((mine, target)))

    def lock(self, tx: Tx) -> None:
        """Before anything else in the transaction. Of two runs that signal each other, one waits for the other at its first lock."""
        if tx.dialect != "sqlite":
            for run_id in self._order:
                tx.one(LOCK_RUN, (run_id,))

    def deliver(self, tx: Tx) -> bytes:
        """Carry it out; the value to be recorded."""
        self._staged = False
        if self._run is None:
            return encode(MISSING, "the answer to a signal")
        answer = deliver(tx, self.engine, self.signal)
        if answer.drive:
            self._outbox.stage(tx)
            self._staged = True
        tell_after_commit(tx, self.engine, self.signal.run_id, str(self._run[0]), answer)
        return encode(answer.refused, "the answer to a signal")

    def delivered(self) -> None:
        """The transaction has committed. A message that does not leave is the doctor's (R2): the target's wake is stored."""
        if self._staged:
            try:
                self._outbox.delivered()
            except MessageNotSentError as error:
                notify.say(self.engine, "signal_not_driven", run_id=self.signal.run_id, sent_by=self.run_id, error=str(error))


def raise_refusal(run_id: str, answer: Any) -> None:
    """Raise what a recorded answer says; nothing where the signal was accepted."""
    if answer is not None:
        raise refusal(run_id, answer)


__all__ = ["SIGNALABLE", "Answer", "FromRun", "Signal", "deliver", "raise_refusal", "refusal", "send", "time_out"]
