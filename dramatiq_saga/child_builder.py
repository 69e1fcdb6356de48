"""A child workflow as a workflow function builds it: :class:`ChildBuilder` (API: ``flow.child``).

Like a step's, its arguments are bound to the child's signature and encoded when they are given, and on ground that is recorded
already neither happens again. How the child run is started is settled here, from its own workflow's declaration, and stored with
the link; starting and ending it is ``engine/children.py``.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload

from dramatiq import Actor, Message

from .advice import advise_on_reclaim
from .builders import (
    MessageBuilder,
    Reclaim,
    RetriedOnSignal,
    State,
    begin,
    check_message_builder,
    compensation,
    describing,
    resolve,
    word,
)
from .clock import moment_to_ms, to_ms, uuid7
from .codec import load_error
from .engine.retry_on_signal import look
from .engine.rows import ALONE, ChildEntry, CompensationSpec, NewChild, ReceivedSignal, Scope, StepEntry
from .errors import ChildCancelledError, ChildError, ChildExpiredError, ChildFailedError, in_one_line
from .statuses import ChildClosePolicy, CompensationFailurePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dramatiq import Broker

    from .engine.replay import Replay

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)

_ERRORS: dict[str, type[ChildError]] = {
    "failed": ChildFailedError,
    "expired": ChildExpiredError,
    "cancelled": ChildCancelledError,
}


class Started(Protocol[R_co]):
    """A run, as far as its result goes."""

    def result(self, *, wait: float | timedelta | None = None) -> R_co: ...


class ChildWorkflow(Protocol[P, R_co]):
    """What ``@workflow`` returns, as far as a parent needs it."""

    @property
    def name(self) -> str: ...
    @property
    def broker(self) -> Broker: ...
    def send(self, *args: P.args, **kwargs: P.kwargs) -> Started[R_co]: ...
    def _child_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes: ...
    def _child_start(self) -> dict[str, Any]: ...


def _nothing() -> None:
    return None


_RECLAIM = Reclaim("")  # of a child's compensation: as it is configured


class ChildBuilder(RetriedOnSignal, Generic[R_co, V_co]):
    """One child run, described. Every method returns the builder; :meth:`run` comes last.

    ``R`` is what the child returns, ``V`` what ``run()`` gives: the same, or ``None`` as well.
    """

    __slots__ = (
        "_args", "_built", "_close_policy", "_comp_call", "_comp_from", "_comp_policy", "_compensation", "_encoded", "_expires_at",
        "_expires_in", "_kwargs", "_optional", "_replay", "_taken", "_workflow",
    )  # fmt: skip

    def __init__(
        self,
        replay: Replay,
        workflow: ChildWorkflow[Any, R_co],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self._replay = replay
        self._built = True  # until it can be: one that could not even be made was not forgotten
        self._taken: str | None = None
        _check(workflow, known)
        self._workflow = workflow
        self._args = args
        self._kwargs = kwargs
        self._encoded: bytes | None = None
        self._close_policy: str | None = None
        self._expires_at: int | None = None
        self._expires_in: int | None = None
        self._optional = False
        self._retry = None
        self._compensation: CompensationSpec | None = None
        self._comp_call: tuple[Actor[Any, Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._comp_from: MessageBuilder | None = None
        self._comp_policy: str | None = None
        if not replay.is_replaying:
            self._encoded = workflow._child_args(args, kwargs)
        self._built = False

    @describing
    def close_policy(self, policy: ChildClosePolicy | str) -> Self:
        """What becomes of the child if it has not ended when this run does, or begins to roll back (CHILD-3).

        ``abandon``: it goes on by itself. ``cancel``: it is rolled back and ends ``cancelled``; without a rollback where this run is
        cancelled without one. ``fail``: it is rolled back and ends ``failed``. The default is ``children.default_close_policy``.
        """
        self._close_policy = word(ChildClosePolicy, policy, "close_policy()")
        return self

    @describing
    def expires_in(self, duration: float | timedelta) -> Self:
        """A deadline for the child run, counted from its start; in place of its workflow's own (CHILD-1, EXPIRE-1)."""
        if to_ms(duration) <= 0:
            raise ValueError(f"expires_in() takes a duration above zero, not {duration!r}")
        self._expires_in, self._expires_at = to_ms(duration), None
        return self

    @describing
    def expires_at(self, moment: datetime) -> Self:
        """A deadline for the child run, as an aware ``datetime``; in place of its workflow's own (CHILD-1, EXPIRE-1)."""
        self._expires_in, self._expires_at = None, moment_to_ms(moment)
        return self

    @overload
    def compensate_with(self, actor: Actor[Q, Any], /, *args: Q.args, **kwargs: Q.kwargs) -> Self: ...

    @overload
    def compensate_with(self, builder: Callable[[R_co], Message[Any]], /) -> Self: ...

    @describing
    def compensate_with(self, actor_or_builder: Actor[Any, Any] | MessageBuilder, /, *args: Any, **kwargs: Any) -> Self:
        """How a child that has completed is undone when this run rolls back: an actor with its arguments, or a callable that makes
        the message from the child's result (CHILD-3). Without it, what a completed child has done stands.

        The callable runs in a replay, after the child has completed. It makes the message and nothing else: no ``flow`` in it, no
        sending, no effects of its own. One that raises holds the run (COMP-10).

        Raises:
          TypeError: the arguments do not fit the actor's signature.
        """
        if isinstance(actor_or_builder, Actor):
            self._comp_call = (actor_or_builder, args, kwargs)
            self._comp_from = None
            self._compensation = None if self._replay.is_replaying else compensation(actor_or_builder, args, kwargs)
        else:
            check_message_builder(actor_or_builder, args, kwargs, of="child")
            self._compensation, self._comp_call, self._comp_from = None, None, actor_or_builder
        return self

    @describing
    def on_compensation_failure(self, policy: CompensationFailurePolicy | str) -> Self:
        """What a failing compensation of this child does to the rest of the rollback: ``stop`` or ``continue`` (COMP-4)."""
        self._comp_policy = word(CompensationFailurePolicy, policy, "on_compensation_failure()")
        return self

    @overload
    def continue_on_failure(self, flag: Literal[True] = True) -> ChildBuilder[R_co, V_co | None]: ...

    @overload
    def continue_on_failure(self, flag: Literal[False]) -> ChildBuilder[R_co, R_co]: ...

    @overload
    def continue_on_failure(self, flag: bool) -> ChildBuilder[R_co, V_co | None]: ...

    @describing
    def continue_on_failure(self, flag: bool = True) -> ChildBuilder[R_co, Any]:
        """A child that fails or expires does not fail this run: ``run()`` gives ``None``. One that is cancelled still raises (CHILD-2)."""
        self._optional = flag
        return self

    def run(self) -> V_co:
        """What the child returned, once it has ended; until then the function is suspended.

        Raises:
          ChildFailedError: the child failed; it has undone what it had done.
          ChildExpiredError: its deadline passed.
          ChildCancelledError: somebody cancelled it.
          BuilderReusedError: this builder has been run already.
        """
        replay = begin(self)
        return cast("V_co", self._step_into(ALONE).conclude(replay))

    def _step_into(self, scope: Scope) -> State:
        """Walk past this child: where it stands, or where it will once this decision has been committed."""
        replay = self._replay
        entry = replay.recorded_child(self._workflow.name)
        if entry is None:
            entry = replay.add_child(self._new_child(scope))
        return self._state(entry)

    def _state(self, entry: ChildEntry) -> State:
        if entry.extra.retry is not None:
            found = look(
                self._replay, entry, self._retry, failure=lambda: _error(entry), again=lambda signal: self._again(entry, signal)
            )
            assert isinstance(found, ChildEntry)
            entry = found
        if entry.status == "completed":
            if entry.comp_from_result and not entry.comp_ready and self._comp_from is not None:
                assert entry.value is not None
                where = f"the compensation of child {entry.sequence} ({entry.workflow})"
                broker = self._workflow.broker
                resolve(
                    self._replay, self._comp_from, entry.value(), broker=broker, sequence=entry.sequence, where=where, reclaim=_RECLAIM
                )  # fmt: skip
            return State(entry, value=entry.value)
        if entry.is_live:
            return State(entry, outside=True)
        if entry.optional and entry.status != "cancelled":
            return State(entry, value=_nothing)
        if entry.error is None and entry.status == "cancelled":
            return State(entry, outside=True)  # given up by its block, or by the end of this run: nobody waits for it
        return State(entry, error=_error(entry))

    def _again(self, entry: ChildEntry, signal: ReceivedSignal | None) -> StepEntry | ChildEntry:
        """A new run in the place of the one that failed (RSIG-4)."""
        replay = self._replay
        return replay.retry(entry, signal, uuid7(replay.now), self._start())

    def _start(self) -> dict[str, Any]:
        """How a run of it is started (CHILD-1)."""
        replay = self._replay
        default = replay.settings.monitor.expiration.defaults.run
        start = self._workflow._child_start()
        start["queue"] = start.get("queue") or replay.snapshot.queue
        if self._expires_in is not None or self._expires_at is not None:
            start["expires_in_ms"], start["expires_at"] = self._expires_in, self._expires_at
        elif start.get("expires_in_ms") is None and default is not None:
            start["expires_in_ms"] = to_ms(default)
        return {name: value for name, value in start.items() if value is not None}

    def _make_ready(self) -> None:
        """Everything that can still be wrong with what was said, before anything of it is asked for."""
        if self._encoded is None:
            self._encoded = self._workflow._child_args(self._args, self._kwargs)
        if self._compensation is None and self._comp_call is not None:
            self._compensation = compensation(*self._comp_call)  # built before the step ahead of it was run

    def _new_child(self, scope: Scope) -> NewChild:
        replay, workflow = self._replay, self._workflow
        settings = replay.settings
        self._make_ready()
        assert self._encoded is not None
        undone = self._compensation is not None or self._comp_from is not None
        reclaim = _RECLAIM.resolve(settings, "sagas") if undone else None
        if self._comp_call is not None:
            advise_on_reclaim(self._comp_call[0], reclaim, settings=settings)
        return NewChild(
            replay.next_sequence(), uuid7(replay.now), workflow.name, self._encoded,
            self._start(),
            self._close_policy or str(settings.children.default_close_policy),
            optional=self._optional,
            retry=None if self._retry is None else self._retry.stored(settings),
            compensation=self._compensation,
            comp_from_result=self._comp_from is not None,
            comp_policy=self._comp_policy or scope.comp_policy,
            comp_reclaim_stale_after_seconds=reclaim,
            scope=scope,
        )  # fmt: skip

    def _describe(self) -> str:
        return f"child({self._workflow.name})"

    def __del__(self) -> None:
        if not getattr(self, "_built", True):
            self._replay.builder_dropped(self._describe())


def _error(entry: ChildEntry) -> ChildError:
    """What the function sees of a child that did not complete; needs no class of the child's."""
    cause = None if entry.error is None else load_error(entry.error)
    message = "" if cause is None else in_one_line(cause["type"], cause["message"])
    return _ERRORS[entry.status](entry.workflow, entry.child_id, entry.sequence, message, cause)


def _check(workflow: Any, known: Mapping[str, Any] | None) -> None:
    """Refuse what is no workflow of this application."""
    if isinstance(workflow, Actor):
        raise TypeError(
            f"a child is a workflow, and {workflow.actor_name} is a plain actor: run it as a step, flow.run({workflow.actor_name}, ...)"
        )
    if not hasattr(workflow, "_child_start"):
        raise TypeError(
            f"a child is a workflow, not {type(workflow).__name__}: decorate its function with @workflow and hand over what that gives"
        )
    definition = known.get(workflow.name) if known is not None else None
    if known is not None and (definition is None or definition.function is not workflow.fn):
        raise TypeError(
            f"workflow {workflow.name} is declared on another broker than the one that drives this run: a child has the same broker"
        )
