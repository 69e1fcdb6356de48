"""Typed events and those who listen to them (EVENT-1, EVENT-2).

    @on(ActionFailed)
    def page_someone(event: ActionFailed) -> None: ...

A listener on a class hears that class and its subclasses; one on :class:`Event` hears everything. Listeners run after the
transaction that recorded the event has committed, outside every transaction of the engine, in the process and thread that
recorded it, in the order in which they subscribed. One that raises is logged and goes no further: it never fails a step or
a run. Registration is thread-safe; a listener may cause further events. Nothing here reads or writes a row. Long, because the
events are many; what does something stands at the end.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import structlog
from dramatiq.threading import Interrupt

from .codec import decode
from .journal import history
from .views import ActionView, ChildView, CompensationView, SignalView, WaitView

# --- the events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run. ``at`` is when, in milliseconds since the epoch, UTC."""

    #: The same word as in the history (``flow_events.type``).
    type: ClassVar[str] = ""

    run_id: str
    workflow_name: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowEvent(Event):
    """Something about the run itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStarted(FlowEvent):
    """A run was driven for the first time."""

    type: ClassVar[str] = history.FLOW_STARTED


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowWaiting(FlowEvent):
    """Only something from outside can move the run now; ``reason`` says what."""

    type: ClassVar[str] = history.FLOW_WAITING
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowResumed(FlowEvent):
    """A waiting run goes on."""

    type: ClassVar[str] = history.FLOW_RESUMED
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCompleted(FlowEvent):
    """The workflow function returned."""

    type: ClassVar[str] = history.FLOW_COMPLETED
    stored_result: bytes | None = None

    @property
    def result(self) -> Any:
        """What the workflow function returned, decoded afresh."""
        return None if self.stored_result is None else decode(self.stored_result)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFailed(FlowEvent):
    """The run failed; ``error`` is the recorded cause (``type, bases, message, code, traceback, cause``)."""

    type: ClassVar[str] = history.FLOW_FAILED
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCancelled(FlowEvent):
    """The run was cancelled; ``reason`` is the operator's."""

    type: ClassVar[str] = history.FLOW_CANCELLED
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowExpired(FlowEvent):
    """The run did not finish before its deadline."""

    type: ClassVar[str] = history.FLOW_EXPIRED
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionEvent(Event):
    """Something about a step; ``action`` is its row as it was once the event had been recorded."""

    action: ActionView


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStarted(ActionEvent):
    """A worker claimed the step and runs it."""

    type: ClassVar[str] = history.ACTION_STARTED


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCompleted(ActionEvent):
    """The step's result is recorded."""

    type: ClassVar[str] = history.ACTION_COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFailed(ActionEvent):
    """A try of the step failed; ``action.given_up`` says whether it was the last."""

    type: ClassVar[str] = history.ACTION_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalActionFailed(ActionEvent):
    """An optional step failed for good; the run goes on with its fallback (OPT-1)."""

    type: ClassVar[str] = history.ACTION_OPTIONAL_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionExpired(ActionEvent):
    """The step's deadline passed before it was settled."""

    type: ClassVar[str] = history.ACTION_EXPIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionAwaitingRetry(ActionEvent):
    """The step failed and is parked until ``signal`` comes (RSIG-1)."""

    type: ClassVar[str] = history.ACTION_AWAITING_RETRY
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRetried(ActionEvent):
    """``signal`` came and the parked step runs again."""

    type: ClassVar[str] = history.ACTION_RETRIED
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRedispatched(ActionEvent):
    """The step's message was sent again; ``reason`` says by which rule."""

    type: ClassVar[str] = history.ACTION_REDISPATCHED
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcomeRejected(ActionEvent):
    """A superseded worker's outcome was refused; this is the last copy of it (FENCE-1).

    ``action`` is the row as it was before. ``outcome`` is ``"completed"``, with ``result`` in its stored form, or
    ``"failed"``, with ``exception``.
    """

    type: ClassVar[str] = history.ACTION_OUTCOME_REJECTED
    outcome: str
    stored_result: bytes | None = None
    exception: BaseException | None = None

    @property
    def result(self) -> Any:
        """What the step returned, as it would have been stored."""
        return None if self.stored_result is None else decode(self.stored_result)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackEvent(Event):
    """Something about the undoing of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationStarted(RollbackEvent):
    """A rollback was planned: once per run, before the first compensation. ``steps`` are the sequences to undo."""

    type: ClassVar[str] = history.COMPENSATION_STARTED
    ends_as: str
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationEvent(RollbackEvent):
    """Something about one compensation; ``compensation`` is its row as it was once the event had been recorded."""

    compensation: CompensationView


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationStepStarted(CompensationEvent):
    """A worker claimed the compensation and runs it."""

    type: ClassVar[str] = history.COMPENSATION_STEP_STARTED


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationCompleted(CompensationEvent):
    """The step is undone."""

    type: ClassVar[str] = history.COMPENSATION_COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationFailed(CompensationEvent):
    """A try of the compensation failed; ``compensation.given_up`` says whether it was the last."""

    type: ClassVar[str] = history.COMPENSATION_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationOutcomeRejected(CompensationEvent):
    """A superseded worker's outcome was refused (FENCE-1); fields as in :class:`ActionOutcomeRejected`."""

    type: ClassVar[str] = history.COMPENSATION_OUTCOME_REJECTED
    outcome: str
    stored_result: bytes | None = None
    exception: BaseException | None = None

    @property
    def result(self) -> Any:
        """What the compensation returned, as it would have been stored."""
        return None if self.stored_result is None else decode(self.stored_result)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackFinished(RollbackEvent):
    """The rollback is ``done``, or ``halted`` by a compensation that failed; ``undone`` are the sequences undone (COMP-6)."""

    type: ClassVar[str] = history.ROLLBACK_FINISHED
    rollback: str
    undone: tuple[int, ...] = ()
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEvent(Event):
    """Something about a child run, told to its parent; ``child`` is the link as it was once the event had been recorded."""

    child: ChildView


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStarted(ChildEvent):
    """A child run was started."""

    type: ClassVar[str] = history.CHILD_STARTED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCompleted(ChildEvent):
    """A child run completed."""

    type: ClassVar[str] = history.CHILD_COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFailed(ChildEvent):
    """A child run failed."""

    type: ClassVar[str] = history.CHILD_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExpired(ChildEvent):
    """A child run expired."""

    type: ClassVar[str] = history.CHILD_EXPIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCancelled(ChildEvent):
    """A child run was cancelled, or its parent has ended and waits for it no more (``child.close_policy`` says what becomes of it)."""

    type: ClassVar[str] = history.CHILD_CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAwaitingRetry(ChildEvent):
    """A child run failed and its place is parked until ``signal`` comes (RSIG-4)."""

    type: ClassVar[str] = history.CHILD_AWAITING_RETRY
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRetried(ChildEvent):
    """``signal`` came and a new child run was started in the same place."""

    type: ClassVar[str] = history.CHILD_RETRIED
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalEvent(Event):
    """Something about signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived(SignalEvent):
    """A signal was accepted."""

    type: ClassVar[str] = history.SIGNAL_RECEIVED
    signal: SignalView


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalConsumed(SignalEvent):
    """A wait took a signal."""

    type: ClassVar[str] = history.SIGNAL_CONSUMED
    signal: SignalView
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalTimedOut(SignalEvent):
    """A wait ended without its signal."""

    type: ClassVar[str] = history.SIGNAL_TIMED_OUT
    wait: WaitView


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffectRecorded(Event):
    """A side effect's value was recorded (SIDE-1)."""

    type: ClassVar[str] = history.SIDE_EFFECT_RECORDED
    sequence: int
    name: str
    stored_value: bytes

    @property
    def value(self) -> Any:
        """The recorded value, decoded afresh."""
        return decode(self.stored_value)


# --- listeners -------------------------------------------------------------------------------------------------------

E = TypeVar("E", bound=Event)
F = TypeVar("F", bound=Callable[..., object])
Listener = Callable[[Any], object]

_lock = threading.Lock()
_subscribed: list[tuple[type[Event], Listener]] = []
_heard_by: dict[type[Event], tuple[Listener, ...]] = {}  # filled per class at first use, emptied by every registration


def on(*classes: type[Event]) -> Callable[[F], F]:
    """Decorator: the function hears these classes and their subclasses.

    :raises TypeError: no class, something else than an event class, or a coroutine function, which nobody would await.
    """

    def decorate(listener: F) -> F:
        subscribe(listener, *classes)
        return listener

    return decorate


def subscribe(listener: Listener, *classes: type[Event]) -> None:
    """What :func:`on` does, as a call. Subscribing twice to one class counts once."""
    if not classes or not all(map(_is_event_class, classes)):
        raise TypeError(f"listen to event classes of dramatiq_saga.events, not {classes!r}: @on(ActionFailed)")
    if not _is_plain_function(listener):
        raise TypeError(f"{listener!r} cannot listen: a listener is a plain function that takes the event")
    with _lock:
        _subscribed.extend((cls, listener) for cls in dict.fromkeys(classes) if (cls, listener) not in _subscribed)
        _heard_by.clear()


def _is_event_class(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, Event)


def _is_plain_function(listener: object) -> bool:
    return callable(listener) and not inspect.iscoroutinefunction(listener)


def unsubscribe(listener: Listener, *classes: type[Event]) -> bool:
    """Stop listening to ``classes`` (to everything, without any). False if there was nothing to stop."""
    with _lock:
        kept = [(cls, known) for cls, known in _subscribed if known != listener or (classes and cls not in classes)]
        changed = len(kept) != len(_subscribed)
        _subscribed[:] = kept
        _heard_by.clear()
    return changed


@contextmanager
def listening(*classes: type[E]) -> Iterator[list[E]]:
    """For tests: collects the events of ``classes`` (:class:`Event` for all of them) while the block runs."""
    heard: list[E] = []

    def collect(event: E) -> None:
        heard.append(event)

    subscribe(collect, *classes)
    try:
        yield heard
    finally:
        unsubscribe(collect)


def has_listeners(cls: type[Event]) -> bool:
    """Whether making and dispatching such an event would reach anybody: one look-up."""
    listeners = _heard_by.get(cls)
    return bool(_resolve(cls) if listeners is None else listeners)


def dispatch(event: Event) -> list[tuple[Listener, BaseException]]:
    """Tell all listeners; returns those that raised, each with its error, which has been logged.

    An interrupt that Dramatiq throws into this thread meanwhile is not the listener's doing: all listeners are told first,
    then it is raised.
    """
    cls = type(event)
    listeners = _heard_by.get(cls)
    if listeners is None:
        listeners = _resolve(cls)
    failures: list[tuple[Listener, BaseException]] = []
    interrupt: BaseException | None = None
    for listener in listeners:
        try:
            listener(event)
        except (Interrupt, KeyboardInterrupt) as e:
            interrupt = e
        except BaseException as e:
            failures.append((listener, e))
            _log(listener, event, e)
    if interrupt is not None:
        raise interrupt
    return failures


def name_of(listener: Listener) -> str:
    """A listener's name for logs."""
    return f"{getattr(listener, '__module__', '?')}.{getattr(listener, '__qualname__', type(listener).__qualname__)}"


def _resolve(cls: type[Event]) -> tuple[Listener, ...]:
    with _lock:
        listeners = tuple(dict.fromkeys(listener for wanted, listener in _subscribed if issubclass(cls, wanted)))
        _heard_by[cls] = listeners
    return listeners


def _log(listener: Listener, event: Event, error: BaseException) -> None:
    with suppress(Exception):  # a broken logger must not do what a broken listener may not
        structlog.get_logger("dramatiq_saga").error(
            "listener_failed",
            listener=name_of(listener),
            type=event.type,
            run_id=event.run_id,
            workflow=event.workflow_name,
            exc_info=error,
        )
