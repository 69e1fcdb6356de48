"""What a workflow function sees: :class:`Flow` (API: "Flow").

Every call that the engine has to remember takes the next sequence of the run; where that sequence is recorded, the recorded
answer is given, and otherwise the function is suspended until there is one. So the function may be run from its beginning any
number of times, and its effects happen once. Nothing here reads a clock, a database or a broker: it all comes from the replay
that the flow was made for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload
from uuid import UUID, uuid4

from .builders import ActionBuilder
from .child_builder import ChildBuilder, ChildWorkflow
from .clock import moment_to_ms, to_ms
from .codec import decode, encode
from .engine.replay import Replay, current_replay, here
from .engine.rows import SentSignal
from .engine.signals import raise_refusal
from .errors import SagaError, SignalTimeoutError
from .groups import ParallelBuilder, SagaBuilder
from .options import short_text
from .store.models import ID_LENGTH, NAME_LENGTH

if TYPE_CHECKING:
    import structlog
    from dramatiq import Actor

    from .builders import AnyActor, Member

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")


def tag_text(key: object, value: object) -> str | None:
    """A tag's value as it is stored (TAG-1).

    Raises:
      TypeError: the key is not text, or the value neither text, an integer nor None.
      ValueError: one of them does not fit its column.
    """
    short_text(key, "a tag's key", limit=NAME_LENGTH)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise TypeError(f"tag {key!r} takes text, an integer or None, not {value!r}: make it text yourself")
    if value is None or value == "":
        return value
    return short_text(str(value), f"the value of tag {key!r}", limit=NAME_LENGTH)


class Flow:
    """The argument that a workflow function receives. It belongs to one replay, in one thread, and dies with it."""

    __slots__ = ("_replay", "_workflows")

    def __init__(self, replay: Replay, *, workflows: Mapping[str, Any] | None = None) -> None:
        self._replay = replay
        self._workflows = workflows

    def run(self, actor: Actor[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of one step; shorthand for ``action(actor, ...).run()``.

        Raises:
          StepFailedError: the step has failed for good.
          StepExpiredError: its deadline passed.
        """
        replay = self._replay
        # The way that a long history takes on every drive: recorded, completed, nothing left to build.
        if replay.cursor < replay.straight and here.context is replay:
            entry = replay.entries[replay.cursor]
            if entry.kind == "step" and entry.status == "completed" and entry.actor == actor.actor_name:  # type: ignore[union-attr]
                replay.cursor += 1
                return entry.value()  # type: ignore[no-any-return, union-attr, misc, operator]
        return ActionBuilder(self._use(), actor, args, kwargs).run()

    def action(self, actor: Actor[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ActionBuilder[R, R]:
        """A builder for one step: say how it is undone and treated, then ``run()`` it.

        Raises:
          TypeError: the arguments do not fit the actor's signature.
          NotSerializableError: they cannot be stored (CODEC-2); the error names the path.
        """
        return ActionBuilder(self._use(), actor, args, kwargs)

    def side_effect(self, key: str, fn: Callable[[], T]) -> T:
        """``fn()``'s value, recorded once and reused by every replay (SIDE-1).

        For values that differ from one call to the next: a random choice, a look at the outside. ``fn`` may be called again
        if the process dies before the value is recorded; work that must not repeat belongs in a step. The value is given in
        its stored form.

        Raises:
          NotSerializableError: the value cannot be stored.
          TypeError, ValueError: the key cannot be.
        """
        replay = self._use()
        if replay.on_new_ground():
            short_text(key, "the key of a side effect", limit=NAME_LENGTH)
        value: T = replay.side_effect(key, fn)
        return value

    def optional_action(self, actor: AnyActor[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ActionBuilder[R, R | None]:
        """As :meth:`action`, for a step whose failure does not fail the run; shorthand for ``.continue_on_failure()`` (OPT-1)."""
        return ActionBuilder(self._use(), cast("Actor[Any, R]", actor), args, kwargs).continue_on_failure()

    @overload
    def parallel(self, a: Member[A], b: Member[B], /) -> ParallelBuilder[A | B]: ...

    @overload
    def parallel(self, a: Member[A], b: Member[B], c: Member[C], /) -> ParallelBuilder[A | B | C]: ...

    @overload
    def parallel(self, a: Member[A], b: Member[B], c: Member[C], d: Member[D], /) -> ParallelBuilder[A | B | C | D]: ...

    @overload
    def parallel(
        self, a: Member[A], b: Member[B], c: Member[C], d: Member[D], e: Member[E], /
    ) -> ParallelBuilder[A | B | C | D | E]: ...

    @overload
    def parallel(self, *builders: Member[T]) -> ParallelBuilder[T]: ...

    def parallel(self, *builders: Member[Any]) -> ParallelBuilder[Any]:
        """A builder for steps that run at the same time; ``run()`` gives their results in the order given (PAR-1)."""
        return ParallelBuilder(self._use(), builders)

    @overload
    def saga(self, a: Member[A], b: Member[B], /) -> SagaBuilder[A | B]: ...

    @overload
    def saga(self, a: Member[A], b: Member[B], c: Member[C], /) -> SagaBuilder[A | B | C]: ...

    @overload
    def saga(self, a: Member[A], b: Member[B], c: Member[C], d: Member[D], /) -> SagaBuilder[A | B | C | D]: ...

    @overload
    def saga(
        self, a: Member[A], b: Member[B], c: Member[C], d: Member[D], e: Member[E], /
    ) -> SagaBuilder[A | B | C | D | E]: ...

    @overload
    def saga(self, *builders: Member[T]) -> SagaBuilder[T]: ...

    def saga(self, *builders: Member[Any]) -> SagaBuilder[Any]:
        """A builder for steps that run one after another and are undone by rules of their own (COMP-4, COMP-5)."""
        return SagaBuilder(self._use(), builders)

    def child(self, workflow: ChildWorkflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ChildBuilder[R, R]:
        """A builder for a child: a run of another workflow, which this one waits for (CHILD-1).

        Raises:
          TypeError: the arguments do not fit the workflow's signature, or it is declared on another broker.
          NotSerializableError: they cannot be stored (CODEC-2); the error names the path.
        """
        return ChildBuilder(self._use(), workflow, args, kwargs, known=self._workflows)

    def await_signal(self, name: str, *, wait_seconds: float | timedelta | None = None) -> Any:
        """The payload of the next signal of that name: of one that has come already, or else of the first that comes (SIG-1).

        Parameters:
          wait_seconds: how long to wait, in seconds or as a ``timedelta``; for ever without it and without a default in
            ``monitor.expiration.defaults.signal``.

        Raises:
          SignalTimeoutError: none came in time.
        """
        replay = self._use()
        due_at = None
        if replay.on_new_ground():
            short_text(name, "a signal's name", limit=NAME_LENGTH)
            wait = replay.settings.monitor.expiration.defaults.signal if wait_seconds is None else wait_seconds
            due_at = None if wait is None else replay.now + _duration(wait, "wait_seconds")
        entry = replay.wait("signal", name, due_at)
        if entry.status == "timed_out":
            raise SignalTimeoutError(name, entry.sequence)
        assert entry.value is not None
        return entry.value()

    def signal_flow(self, run_id: str, name: str, payload: Any = None) -> None:
        """Signal another run, once, whatever becomes of this drive: recorded with what became of it (SIG-3).

        Raises:
          FlowNotFoundError: there was no such run.
          CannotSignalTerminalFlowError, CannotSignalRollingBackFlowError: it took no signals.
          NotSerializableError: the payload cannot be stored; TypeError, ValueError: the name or the id cannot be.
        """
        replay = self._use()

        def make() -> SentSignal:
            short_text(run_id, "a run's id", limit=ID_LENGTH)
            short_text(name, "a signal's name", limit=NAME_LENGTH)
            return SentSignal(run_id, name, encode(payload, f"the payload of signal {name!r}"))

        raise_refusal(run_id, replay.send_signal(name, make))

    def sleep(self, duration: float | timedelta) -> None:
        """Go on after ``duration``, in seconds or as a ``timedelta``: a row, not a thread that waits (TIMER-1)."""
        replay = self._use()
        replay.wait("timer", None, replay.now + _duration(duration, "sleep()") if replay.on_new_ground() else None)

    def sleep_until(self, moment: datetime) -> None:
        """Go on at ``moment``, an aware ``datetime``; at once where it has passed (TIMER-1)."""
        replay = self._use()
        replay.wait("timer", None, moment_to_ms(moment) if replay.on_new_ground() else None)

    def now(self) -> datetime:
        """The present, recorded: the same moment in every replay of the run. Aware, in UTC."""
        replay = self._use()
        return datetime.fromtimestamp(replay.recorded_value("now", lambda: replay.now) / 1000, UTC)

    def uuid4(self) -> UUID:
        """A random UUID, recorded: the same in every replay of the run."""
        return UUID(self._use().recorded_value("uuid4", lambda: str(uuid4())))

    def random(self) -> float:
        """A random number from 0 up to 1, recorded: the same in every replay of the run."""
        value: float = self._use().recorded_value("random", lambda: (int.from_bytes(os.urandom(7), "big") >> 3) / 2**53)
        return value

    def patched(self, change_id: str) -> bool:
        """Whether this run takes the new way at a change of the workflow (HISTORY-2).

        True for runs that had not passed this point when the change was deployed, and for new ones; false for those that had.
        What it was for a run it stays, wherever the run asks again. A call may be removed once every run that was started before
        the change has ended.

        Raises:
          TypeError, ValueError: ``change_id`` is not short text.
        """
        replay = self._use()
        short_text(change_id, "a change's id", limit=NAME_LENGTH)
        return replay.patched(change_id)

    def tag(self, key: str, value: str | int | None = None) -> None:
        """Write a tag of this run; the last write of a key wins (TAG-1)."""
        replay = self._use()
        replay.tags[key] = tag_text(key, value)

    @property
    def tags(self) -> Mapping[str, str | None]:
        """The run's tags, as they were when this drive began, with what the function has written since."""
        replay = self._use()
        return {**replay.snapshot.tags, **replay.tags}

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._replay.snapshot.run_id

    @property
    def workflow_name(self) -> str:
        """The workflow's name."""
        return self._replay.snapshot.workflow

    @property
    def version(self) -> str | None:
        """The version that the workflow declared when this run was started (HISTORY-2)."""
        return self._replay.snapshot.version

    @property
    def context(self) -> Any:
        """What was captured when the run was sent, whether or not it is restored (CTX-1); ``None`` where nothing was."""
        travelling = self._replay.snapshot.context
        return None if travelling is None else decode(travelling)

    @property
    def is_replaying(self) -> bool:
        """True while the function walks over what it has asked for before, and throughout a walk of which nothing is written."""
        return self._replay.is_replaying or self._replay.looks_only

    @property
    def logger(self) -> structlog.stdlib.BoundLogger:
        """A structlog logger that is quiet while :attr:`is_replaying`: a line is logged once per run and not once per drive."""
        import structlog

        bound = structlog.get_logger("dramatiq_saga.workflow").bind(run=self.run_id, workflow=self.workflow_name)
        return structlog.wrap_logger(bound, processors=[self._drop_while_replaying])  # type: ignore[no-any-return]

    def _drop_while_replaying(self, _logger: Any, method: str, event: Any) -> Any:
        if self.is_replaying:
            raise structlog_drop()
        return event

    def _use(self) -> Replay:
        """The replay, once it is certain that the function may still use it."""
        replay = self._replay
        if current_replay() is not replay:
            raise SagaError(
                f"the flow of run {replay.snapshot.run_id} was used outside its workflow function, or from another thread: "
                "a flow belongs to one drive; keep it inside the function and use steps for work elsewhere"
            )
        replay.check()
        return replay


def _duration(duration: float | timedelta, what: str) -> int:
    milliseconds = to_ms(duration)
    if milliseconds < 0:
        raise ValueError(f"{what} takes a duration from zero, not {duration!r}")
    return milliseconds


def structlog_drop() -> BaseException:
    """structlog's way of saying that a line is not to be written."""
    import structlog

    return structlog.DropEvent()
