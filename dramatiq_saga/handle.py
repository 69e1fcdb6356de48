"""A run from outside: :class:`FlowHandle` and :func:`get_flow` (API: "FlowHandle").

A handle holds an id and reads the rest afresh each time; it works in any process that has the broker, worker or not. It never
changes a run by itself: every call that does goes through a verb of the engine, whose conditional write says whether it landed.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import dramatiq

from .clock import to_ms
from .codec import decode, encode, load_error
from .engine import retry_on_signal, runs, undoing
from .engine import signals as signalling
from .engine.decision import write_tag
from .engine.replay import refuse_inside_workflow
from .errors import (
    CannotSignalFlowError,
    FlowCancelledError,
    FlowExpiredError,
    FlowFailedError,
    FlowNotFoundError,
    ResultMissing,
    ResultTimeout,
    in_one_line,
)
from .flow import tag_text
from .options import short_text
from .statuses import FlowStatus, RollbackStatus
from .store.models import NAME_LENGTH
from .views import ActionView, ChildView, CompensationView, EventView, SignalView

if TYPE_CHECKING:
    from dramatiq import Broker

    from .engine.core import Engine
    from .middleware import SagaMiddleware
    from .recovery.kick import KickReport

R = TypeVar("R")

#: Between two looks at an unfinished run, in seconds: the first wait, and the longest.
_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.1

_STATUS = "SELECT status, rollback, workflow FROM {flow_runs} WHERE id = ?"
_RESULT = "SELECT status, result, error, reason, workflow, hold_error FROM {flow_runs} WHERE id = ?"
_TAGS = "SELECT name, value FROM {tags} WHERE run_id = ? ORDER BY name"
_LOCK = "SELECT status FROM {flow_runs} WHERE id = ?{for_update}"
_ACTIONS = f"SELECT {', '.join(ActionView.COLUMNS)} FROM {{action_runs}} WHERE run_id = ? ORDER BY sequence"
_COMPENSATIONS = (
    f"SELECT {', '.join(CompensationView.COLUMNS)} FROM {{compensation_runs}} WHERE run_id = ? ORDER BY level, sequence DESC"
)
_CHILDREN = f"SELECT {', '.join(ChildView.COLUMNS)} FROM {{children}} WHERE run_id = ? ORDER BY sequence"
_SIGNALS = f"SELECT {', '.join(SignalView.COLUMNS)} FROM {{signals}} WHERE run_id = ? ORDER BY id"
_EVENTS = f"SELECT {', '.join(EventView.COLUMNS)} FROM {{flow_events}} WHERE run_id = ? ORDER BY id"


class FlowHandle(Generic[R]):
    """One run, seen from outside.

    Attributes:
      id: the run's id.
      workflow_name: the workflow that it is a run of.
    """

    def __init__(self, run_id: str, workflow_name: str, *, middleware: SagaMiddleware, broker: Broker) -> None:
        self.id = run_id
        self.workflow_name = workflow_name
        self._middleware = middleware
        self._broker = broker

    @property
    def _engine(self) -> Engine:
        return self._middleware.engine(self._broker)

    @property
    def status(self) -> FlowStatus:
        """Where the run is, read afresh. Raises FlowNotFoundError once it has been pruned."""
        return FlowStatus(self._row(_STATUS)[0])

    @property
    def rollback(self) -> RollbackStatus:
        """How far the undoing of the run has come, read afresh."""
        return RollbackStatus(self._row(_STATUS)[1])

    @property
    def tags(self) -> dict[str, str | None]:
        """The run's tags, read afresh (TAG-1)."""
        return dict(self._engine.store.read(lambda tx: tx.all(_TAGS, (self.id,))))

    def result(self, *, wait: float | timedelta | None = None) -> R:
        """What the workflow returned.

        Parameters:
          wait: how long to wait for the run to finish, in seconds or as a ``timedelta``; without it, not at all.

        Raises:
          ResultMissing: the run has not finished (without ``wait``).
          ResultTimeout: the run did not finish in time.
          FlowFailedError, FlowCancelledError, FlowExpiredError: it ended otherwise; ``cause`` is the recorded error.
        """
        seconds = None if wait is None else to_ms(wait) / 1000
        if seconds and self._engine.store.joined():
            runs.refuse_joined(self._engine, "result(wait=...)")
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = _FIRST_WAIT
        while True:
            status, result, error, reason, workflow, hold = self._row(_RESULT)
            if status == FlowStatus.COMPLETED:
                value: R = decode(bytes(result))
                return value
            cause = load_error(error) if error else None
            if status == FlowStatus.FAILED:
                raise FlowFailedError(self.id, workflow, cause, reason)
            if status == FlowStatus.CANCELLED:
                raise FlowCancelledError(self.id, workflow, cause, reason)
            if status == FlowStatus.EXPIRED:
                raise FlowExpiredError(self.id, workflow, cause, reason)
            if deadline is None:
                raise ResultMissing(self.id, status, held=_in_words(hold))
            left = deadline - time.monotonic()
            if left <= 0:
                raise ResultTimeout(self.id, status, held=_in_words(hold))
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_WAIT)

    def signal(self, name: str, payload: Any = None, *, key: str | None = None) -> None:
        """Signal the run: what waits for ``name`` takes it, or whatever asks for it next (SIG-1).

        Signals are taken in the order in which they arrive, each by one wait. Inside a transaction of the store's database the signal
        belongs to that transaction (HOST-1).

        Parameters:
          payload: JSON values, or what the encoder carries.
          key: makes the signal count once per run: another one with the same key answers like the first and changes nothing, even
            when the run has ended meanwhile (SIG-3). Give the id of what you were sent, a webhook's delivery for example.

        Raises:
          FlowNotFoundError: there is no such run.
          CannotSignalTerminalFlowError, CannotSignalRollingBackFlowError: the run takes no signals now; nothing was written.
          SignalKeyConflictError: the key belongs to a signal of another name.
          NotSerializableError: the payload cannot be stored; TypeError, ValueError: the name or the key cannot be.
          MessageNotSentError: it is accepted, but the broker did not take the message that has the run driven.
        """
        refuse_inside_workflow(f"signalling run {self.id} from its handle")
        short_text(name, "a signal's name", limit=NAME_LENGTH)
        if key is not None:
            short_text(key, "a signal's key", limit=NAME_LENGTH)
        data = encode(payload, f"the payload of signal {name!r}")
        signalling.send(self._engine, signalling.Signal(self.id, name, data, key), self._middleware.sender(self._broker))

    def signal_if_running(self, name: str, payload: Any = None, *, key: str | None = None) -> bool:
        """As :meth:`signal`, for a run that may have ended: false where it takes no signals, and then nothing was written."""
        try:
            self.signal(name, payload, key=key)
        except CannotSignalFlowError:
            return False
        return True

    def signal_retry(self) -> int:
        """Run again whatever of the run is parked for a signal, each by a signal of the name it waits for; how many (RSIG-1).

        For people who know that the cause is gone and not what the signal is called. All of them, or none.

        Raises:
          FlowNotFoundError: there is no such run.
          CannotSignalTerminalFlowError, CannotSignalRollingBackFlowError: the run takes no signals now; nothing was written.
          NothingAwaitsRetryError: nothing is parked now; nothing was written.
          MessageNotSentError: they are signalled, but the broker did not take the message that has the run driven.
        """
        refuse_inside_workflow(f"signalling run {self.id} from its handle")
        return retry_on_signal.answer_all(self._engine, self.id, self._middleware.sender(self._broker))

    def cancel(self, reason: str | None = None) -> bool:
        """End the run as ``cancelled`` without undoing anything; false where it already is cancelled or rolling back (COMP-1).

        Raises:
          ConcurrentTransitionError: the run has ended otherwise; the error says how.
        """
        return runs.cancel(self._engine, self.id, self._middleware.sender(self._broker), reason)

    def compensate(self, reason: str | None = None) -> bool:
        """Undo what the run has done, then end it as ``cancelled``; false where it already is cancelled or rolling back (COMP-1).

        Raises:
          ConcurrentTransitionError: the run has ended otherwise.
          SagaError: called inside a transaction of the store's database (HOST-1).
        """
        runs.refuse_joined(self._engine, "compensate()")
        return runs.compensate(self._engine, self.id, self._middleware.sender(self._broker), reason)

    def resume_rollback(self) -> bool:
        """Go on with a rollback that has halted (COMP-8); false where an earlier call has seen to that already.

        Only what is not undone yet is tried, its tries renewed; the run keeps its terminal status and its error, and ``rollback``
        is ``running`` again until it is ``done`` or halts anew.

        Raises:
          ConcurrentTransitionError: no rollback of this run has halted; the error says where it is.
          FlowNotFoundError: there is no such run.
          SagaError: called inside a transaction of the store's database (HOST-1).
        """
        refuse_inside_workflow("resuming a rollback")
        runs.refuse_joined(self._engine, "resume_rollback()")
        return undoing.resume(self._engine, self.id, self._middleware.sender(self._broker))

    def abandon_undo(self, sequence: int) -> bool:
        """End the level of a running undo without it, where nobody is at it any more (PAR-3, COMP-4); false where that was done before.

        ``sequence`` is that of the step that it undoes. For an undo with neither a reclaim window nor a lease behind it, whose worker is
        dead and whose message is lost: nothing else ever ends it. The rollback halts or goes on by the undo's policy, as after a failed
        undo, with a ``CompensationUnfinishedError``; one that has halted tries it again with :meth:`resume_rollback`. Nobody here can know
        whether its worker is dead: look first. Should it be at work after all, its outcome is recorded, until it is resumed.

        Raises:
          ConcurrentTransitionError: no undo of that step is to be abandoned (it is not running, or will be reclaimed); the error says
            what it is.
          FlowNotFoundError: there is no such run.
          SagaError: called inside a transaction of the store's database (HOST-1).
        """
        if isinstance(sequence, bool) or not isinstance(sequence, int):
            raise TypeError(f"a step is named by its number in the run, not by {sequence!r}")
        if not 0 < sequence < 2**31:
            raise ValueError(f"a step's number is from 1 on, as `dramatiq-saga show` has it, not {sequence}")
        refuse_inside_workflow("abandoning an undo")
        runs.refuse_joined(self._engine, "abandon_undo()")
        return undoing.abandon(self._engine, self.id, sequence, self._middleware.sender(self._broker))

    def kick(self) -> KickReport:
        """Drive the run again, refill its repair budget, and send what it is parked on once more (KICK-1)."""
        from .recovery.kick import kick

        refuse_inside_workflow("kicking a run")
        return kick(self._engine, self.id, self._middleware.sender(self._broker))

    def tag(self, key: str, value: str | int | None = None) -> None:
        """Write a tag; the last write of a key wins, integers become strings (TAG-1)."""
        refuse_inside_workflow("tagging a run from its handle")
        text = tag_text(key, value)

        def operation(tx: Any) -> bool:
            if tx.one(_LOCK, (self.id,)) is None:
                return False
            write_tag(tx, self.id, key, text)
            return True

        if not self._engine.store.write(operation):
            raise FlowNotFoundError(self.id)
        self._engine.cache.drop(self.id)

    def actions(self) -> list[ActionView]:
        """The run's steps, oldest first."""
        return [ActionView(*row) for row in self._engine.store.read(lambda tx: tx.all(_ACTIONS, (self.id,)))]

    def compensations(self) -> list[CompensationView]:
        """The run's compensations, in the order in which they run."""
        return [CompensationView(*row) for row in self._engine.store.read(lambda tx: tx.all(_COMPENSATIONS, (self.id,)))]

    def children(self) -> list[ChildView]:
        """The run's child runs as it knows them, oldest first (CHILD-1); ``get_flow(child.child_id)`` is a handle on one."""
        return [ChildView(*row) for row in self._engine.store.read(lambda tx: tx.all(_CHILDREN, (self.id,)))]

    def signals(self) -> list[SignalView]:
        """The signals that the run was sent, in the order in which they arrived."""
        return [SignalView(*row) for row in self._engine.store.read(lambda tx: tx.all(_SIGNALS, (self.id,)))]

    def events(self) -> list[EventView]:
        """The run's history, oldest first (EVENT-1)."""
        return [EventView(*row) for row in self._engine.store.read(lambda tx: tx.all(_EVENTS, (self.id,)))]

    def _row(self, sql: str) -> tuple[Any, ...]:
        row = self._engine.store.read(lambda tx: tx.one(sql, (self.id,)))
        if row is None:
            raise FlowNotFoundError(self.id)
        return row

    def __repr__(self) -> str:
        return f"FlowHandle({self.id!r}, workflow_name={self.workflow_name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlowHandle) and other.id == self.id and other._middleware is self._middleware

    def __hash__(self) -> int:
        return hash(self.id)


def _in_words(error: str | None) -> str | None:
    """A recorded error in one line."""
    if not error:
        return None
    recorded = load_error(error)
    return in_one_line(recorded["type"], recorded["message"])


def get_flow(run_id: str, *, broker: Broker | None = None) -> FlowHandle[Any]:
    """A handle on the run with this id.

    Raises:
      FlowNotFoundError: there is no such run.
    """
    from .middleware import middleware_of

    chosen = broker or dramatiq.get_broker()
    middleware = middleware_of(chosen)
    if not isinstance(run_id, str):
        raise TypeError(f"a run's id is text, not {run_id!r}")
    if "\0" in run_id:  # no run has such an id, and not every database can be asked for it
        raise FlowNotFoundError(run_id)
    row = middleware.engine(chosen).store.read(lambda tx: tx.one(_STATUS, (run_id,)))
    if row is None:
        raise FlowNotFoundError(run_id)
    return FlowHandle(run_id, row[2], middleware=middleware, broker=chosen)
