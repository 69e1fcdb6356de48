"""Builders: how one step is described before it is run (API: "Action builder").

Arguments are bound to the actor's signature and encoded when they are given, so a mistake shows at the line that makes it and
not during a rollback. On ground that is recorded already, nothing is bound or encoded again: the row says what was asked for,
and only kind and name have to agree (HISTORY-1).

Long because every sentence that can be said of a step is a method here, with what it guarantees.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from dramatiq import Actor, Broker, Message

from .advice import advise, advise_on_reclaim
from .clock import moment_to_ms, to_ms
from .codec import encode, encode_call, step_failed
from .coroutines import refuse_without_loop
from .engine.replay import Replay
from .engine.retry_on_signal import RetryContext, look
from .engine.rows import ALONE, ChildEntry, CompensationSpec, NewStep, Scope, StepEntry
from .errors import (
    BuilderReusedError,
    CompensationBuildError,
    FlowError,
    MiddlewareOrderError,
    NotSerializableError,
    StepExpiredError,
    StepFailedError,
)
from .options import check_options, count_from_one
from .retry_policy import ExceptionClasses, RetryPolicy, policy_of
from .statuses import CompensationFailurePolicy

if TYPE_CHECKING:
    from .settings import Settings

R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F")
V_co = TypeVar("V_co", covariant=True)
Q = ParamSpec("Q")
M = TypeVar("M", bound=Callable[..., Any])

#: Options that a message cannot carry, or that would mean something else on one.
_REFUSED_OPTIONS = {
    "throws": "an exception class cannot be encoded in a message: declare it on the actor",
    "retry_when": "a function cannot be encoded in a message: declare it on the actor",
    "pipe_target": "a step's follow-up is the next line of the workflow",
    "pipe_ignore": "a step's follow-up is the next line of the workflow",
    "delay": "use a timer in the workflow instead",
    "eta": "use a timer in the workflow instead",
}

MessageBuilder = Callable[[Any], "Message[Any]"]


class AnyActor(Protocol[Q, R_co]):
    """A Dramatiq actor, seen as something that gives an ``R_co`` or less.

    For functions that return ``R | None``: where such a call is an argument, mypy settles ``R`` by what is expected of the result,
    and ``Actor``, which is invariant, would no longer fit.
    """

    @property
    def actor_name(self) -> str: ...
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...


class State:
    """Where a step, a child or a block stands that the function has asked for: settled with a value or an error, or open.

    ``outside`` of an open one: only something from outside can move it. A settled one without value or error was cancelled: a
    member of a block that failed (PAR-4).
    """

    __slots__ = ("entry", "error", "live", "outside", "value")

    def __init__(
        self,
        entry: StepEntry | ChildEntry | None,
        *,
        value: Callable[[], Any] | None = None,
        error: FlowError | None = None,
        outside: bool = False,
        live: bool | None = None,
    ) -> None:
        self.entry = entry
        self.value = value
        self.error = error
        self.outside = outside
        self.live = live if live is not None else value is None and error is None and (entry is None or entry.is_live)

    @property
    def idle(self) -> bool:
        """Whether it is live, and neither running nor about to report: what a failed block cancels (PAR-4)."""
        entry = self.entry
        if not self.live or entry is None:
            return False
        return entry.status == "awaiting_retry" if isinstance(entry, ChildEntry) else entry.status != "running"

    def conclude(self, replay: Replay) -> Any:
        """The value, or the error raised; suspends where it is open."""
        if self.value is not None:
            return self.value()
        if self.error is not None:
            raise self.error
        raise replay.suspend(outside=self.outside)


class Member(Protocol[V_co]):
    """What a block can hold: a builder that has not been run, whose ``run()`` would give a ``V_co``."""

    _built: bool
    _taken: str | None
    _replay: Replay

    def run(self) -> V_co: ...
    def _make_ready(self) -> None: ...
    def _step_into(self, scope: Scope) -> State | None: ...
    def _describe(self) -> str: ...


def _nothing() -> None:
    return None


def begin(builder: Member[Any]) -> Replay:
    """The replay of a builder whose ``run()`` is called, for the first time: it stands for one step, or one block of steps.

    Raises:
      BuilderReusedError: it was run before, or handed over to a block; the run is held, for running it again would be a second step.
    """
    builder._built = True
    replay = builder._replay
    replay.check()
    if builder._taken is not None:
        raise replay.fault(BuilderReusedError(builder._describe(), builder._taken))
    builder._taken = "has been run already"
    return replay


def word(kind: type[StrEnum], value: Any, what: str) -> str:
    """``value``, where it is one of the words of ``kind``; a ValueError lists them."""
    try:
        return kind(value).value
    except ValueError:
        raise ValueError(f"{what} takes {' or '.join(repr(known.value) for known in kind)}, not {value!r}") from None


def describing(method: M) -> M:
    """A method that raises ends its builder: that one was refused, not forgotten (BuilderNotRunError)."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._built = True
            raise

    return cast("M", call)


class RetriedOnSignal:
    """What a step and a child have in common: a signal may run them again once they have failed for good."""

    __slots__ = ("_retry",)

    _retry: RetryPolicy | None

    @describing
    def retry_on_signal(
        self,
        signal_or_policy: str | RetryPolicy,
        *,
        max_retries: int | None = None,
        wait_seconds: float | timedelta | None = None,
        only: ExceptionClasses | None = None,
        when: Callable[[RetryContext], bool] | None = None,
    ) -> Self:
        """Wait for a signal where this has failed for good, and run it again when the signal comes (RSIG-1).

        The arguments are those of a :class:`~dramatiq_saga.RetryPolicy`, which may be given instead of them. What the row was scheduled
        with counts for signal, budget and wait; ``only`` and ``when`` are those of the code.

        Raises:
          TypeError, ValueError: an argument that cannot be meant, or one beside a policy.
        """
        self._retry = policy_of(signal_or_policy, max_retries=max_retries, wait_seconds=wait_seconds, only=only, when=when)
        return self


class ActionBuilder(RetriedOnSignal, Generic[R_co, V_co]):
    """One step, described. Every method returns the builder; :meth:`run` comes last.

    ``R`` is what the actor returns, ``V`` what ``run()`` gives: the same, or what stands in for the result of an optional step.
    """

    __slots__ = (
        "_actor",
        "_args",
        "_built",
        "_comp_reclaim",
        "_compensation",
        "_compensation_call",
        "_compensation_from",
        "_encoded",
        "_expires_at",
        "_fallback",
        "_max_claims",
        "_on_failure",
        "_on_self_failure",
        "_optional",
        "_options",
        "_reclaim",
        "_replay",
        "_taken",
    )  # fmt: skip

    def __init__(self, replay: Replay, actor: Actor[Any, R_co], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(actor, Actor):
            raise TypeError(
                f"a step is a Dramatiq actor, not {type(actor).__name__}: decorate the function with @dramatiq.actor"
            )
        self._replay = replay
        self._actor = actor
        self._args = args
        self._built = True  # until it can be: one that could not even be made was not forgotten
        self._taken: str | None = None
        self._encoded: bytes | None = None
        self._compensation: CompensationSpec | None = None
        self._compensation_call: tuple[Actor[Any, Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._compensation_from: MessageBuilder | None = None
        self._on_failure: str | None = None
        self._on_self_failure: bool | None = None
        self._options: dict[str, Any] = {}
        self._max_claims: int | None = None
        self._expires_at: int | None = None
        self._optional = False
        self._fallback: bytes | None = None
        self._retry = None
        self._reclaim = _AS_CONFIGURED
        self._comp_reclaim = _UNDO_AS_CONFIGURED
        if not replay.is_replaying:
            self._check_loop(actor)
            self._encoded = bind(actor, args, kwargs)
        else:
            self._args = (args, kwargs)
        self._built = False

    @overload
    def compensate_with(self, actor: Actor[Q, Any], /, *args: Q.args, **kwargs: Q.kwargs) -> Self: ...

    @overload
    def compensate_with(self, builder: Callable[[R_co], Message[Any]], /) -> Self: ...

    @describing
    def compensate_with(self, actor_or_builder: Actor[Any, Any] | MessageBuilder, /, *args: Any, **kwargs: Any) -> Self:
        """How this step is undone: an actor with its arguments, or a callable that makes the message from the step's result.

        The callable runs in a replay, after the step has completed. It makes the message and nothing else: no ``flow`` in it, no
        sending, no effects of its own. One that raises holds the run (COMP-10).

        Raises:
          TypeError: the arguments do not fit the actor's signature.
        """
        if isinstance(actor_or_builder, Actor):
            self._compensation_call = (actor_or_builder, args, kwargs)
            if not self._replay.is_replaying:
                self._check_loop(actor_or_builder)
                self._compensation = compensation(actor_or_builder, args, kwargs)
            else:
                self._compensation = CompensationSpec(actor_or_builder.actor_name, None)
            self._compensation_from = None
        else:
            check_message_builder(actor_or_builder, args, kwargs)
            self._compensation, self._compensation_from = None, actor_or_builder
        self._check_self_failure()
        return self

    @describing
    def compensate_step_on_self_failure(self, flag: bool = True) -> Self:
        """Undo this step also when it is the one that failed, or when nobody knows how it ended (COMP-5, COMP-9)."""
        self._on_self_failure = flag
        self._check_self_failure()
        return self

    @describing
    def on_compensation_failure(self, policy: CompensationFailurePolicy | str) -> Self:
        """What a failing compensation of this step does to the rest of the rollback: ``stop`` or ``continue`` (COMP-4)."""
        self._on_failure = word(CompensationFailurePolicy, policy, "on_compensation_failure()")
        return self

    @overload
    def continue_on_failure(self, flag: Literal[True] = True) -> ActionBuilder[R_co, V_co | None]: ...

    @overload
    def continue_on_failure(self, flag: Literal[False]) -> ActionBuilder[R_co, R_co]: ...

    @overload
    def continue_on_failure(self, flag: bool) -> ActionBuilder[R_co, V_co | None]: ...

    @describing
    def continue_on_failure(self, flag: bool = True) -> ActionBuilder[R_co, Any]:
        """A failure of this step does not fail the run: ``run()`` gives ``None``, or the fallback value (OPT-1)."""
        self._optional = flag
        return self

    @describing
    def fallback_value_on_fail(self, value: F) -> ActionBuilder[R_co, R_co | F]:
        """What ``run()`` gives where this step has failed; implies :meth:`continue_on_failure` (OPT-1).

        Raises:
          NotSerializableError: the value cannot be stored.
        """
        self._optional = True
        self._fallback = encode(value, "fallback_value_on_fail()")
        return cast("ActionBuilder[R_co, R_co | F]", self)

    @describing
    def expires_in(self, duration: float | timedelta) -> Self:
        """A deadline for this step, counted from the moment it is scheduled (EXPIRE-1)."""
        if to_ms(duration) <= 0:
            raise ValueError(f"expires_in() takes a duration above zero, not {duration!r}")
        self._expires_at = self._replay.now + to_ms(duration)
        return self

    @describing
    def expires_at(self, moment: datetime) -> Self:
        """A deadline for this step, as an aware ``datetime`` (EXPIRE-1)."""
        self._expires_at = moment_to_ms(moment)
        return self

    @describing
    def reclaim_stale_after(self, seconds: float | timedelta) -> Self:
        """How long a claim of this step may stay without an outcome before it may be claimed again; turns reclaim on (RECLAIM-2)."""
        self._reclaim = self._reclaim.after(seconds)
        return self

    @describing
    def enable_stale_reclaim(self, flag: bool) -> Self:
        """Turn reclaim on for this step (with the configured window) or off, whatever the settings say (RECLAIM-2)."""
        self._reclaim = self._reclaim.switched(flag)
        return self

    @describing
    def reclaim_compensation_stale_after(self, seconds: float | timedelta) -> Self:
        """As :meth:`reclaim_stale_after`, for this step's compensation."""
        self._comp_reclaim = self._comp_reclaim.after(seconds)
        return self

    @describing
    def enable_compensation_stale_reclaim(self, flag: bool) -> Self:
        """As :meth:`enable_stale_reclaim`, for this step's compensation."""
        self._comp_reclaim = self._comp_reclaim.switched(flag)
        return self

    @describing
    def max_claims(self, n: int) -> Self:
        """How often this step may be claimed without reporting an outcome; 1 means at most once (RECLAIM-6)."""
        self._max_claims = count_from_one(n, "max_claims()")
        return self

    @describing
    def with_options(self, **options: Any) -> Self:
        """Dramatiq options for this step's messages: ``queue_name, priority, max_retries, min_backoff, time_limit, …``.

        Raises:
          TypeError: an option that a message cannot carry, or the misspelt name of one.
          NotSerializableError: a value that cannot be stored.
        """
        for name in options:
            if name in _REFUSED_OPTIONS:
                raise TypeError(f"with_options() does not take {name!r}: {_REFUSED_OPTIONS[name]}")
            self._check_spelling(name)
        check_options(options, "with_options()")
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise NotSerializableError("with_options()", str(error)) from None
        self._options.update(options)
        return self

    def _check_loop(self, actor: Actor[Any, Any]) -> None:
        """No worker could run it: an author's mistake, mended by a deploy, so the run is held."""
        try:
            refuse_without_loop(actor)
        except MiddlewareOrderError as error:
            raise self._replay.fault(error) from None

    def _check_spelling(self, name: str) -> None:
        """Middleware may read options that it has not announced, so only what looks like an announced one is refused."""
        known = {"queue_name", "priority", *self._actor.broker.actor_options}
        if name not in known and (near := difflib.get_close_matches(name, known, n=1, cutoff=0.8)):
            raise TypeError(f"with_options() does not know {name!r}: did you mean {near[0]!r}?")

    def run(self) -> V_co:
        """The step's result, once it has one; until then the function is suspended.

        Raises:
          TypeError: something was said about a compensation, and the step has none.
          StepFailedError: the step has failed for good.
          StepExpiredError: its deadline passed.
          BuilderReusedError: this builder has been run already.
        """
        replay = begin(self)
        entry = replay.recorded_step(self._actor.actor_name)
        if entry is None:
            replay.add_step(self._new_step(ALONE))
            raise replay.suspend()
        if entry.status == "completed" and (entry.comp_ready or not entry.comp_from_result):
            return entry.value()  # type: ignore[no-any-return, misc]
        return cast("V_co", self._state(entry).conclude(replay))

    def _step_into(self, scope: Scope) -> State | None:
        """As a member of a block: walk past this step; where it stands, or ``None`` where it has only been asked for now."""
        replay = self._replay
        entry = replay.recorded_step(self._actor.actor_name)
        if entry is None:
            replay.add_step(self._new_step(scope))
            return None
        return self._state(entry)

    def _state(self, entry: StepEntry) -> State:
        """Where a recorded step stands: native tries, retry on signal, optional fallback, failure (RSIG-2)."""
        if entry.extra.retry is not None:
            found = look(self._replay, entry, self._retry, failure=lambda: _failure(entry))
            assert isinstance(found, StepEntry)
            entry = found
        if entry.status == "completed":
            if entry.comp_from_result and not entry.comp_ready:
                self._resolve(entry)
            return State(entry, value=entry.value)
        if entry.status == "optional_failed":
            return State(entry, value=entry.extra.fallback or _nothing)
        if entry.status == "failed" and entry.given_up:
            return State(entry, error=_failure(entry))
        if entry.status == "expired":
            if entry.optional:
                return State(entry, value=entry.extra.fallback or _nothing)
            return State(entry, error=StepExpiredError(entry.actor, entry.sequence))
        return State(entry, outside=entry.status == "awaiting_retry")

    def _make_ready(self) -> None:
        """Everything that can still be wrong with what was said, before anything of it is asked for."""
        self._check_undo()
        if self._encoded is None:
            args, kwargs = self._args
            self._encoded = bind(self._actor, args, kwargs)
        if self._compensation is not None and self._compensation.args is None and self._compensation_call is not None:
            comp_actor, comp_args, comp_kwargs = self._compensation_call  # built before the step ahead of it was run
            self._compensation = compensation(comp_actor, comp_args, comp_kwargs)

    def _new_step(self, scope: Scope) -> NewStep:
        replay, actor = self._replay, self._actor
        self._make_ready()
        assert self._encoded is not None
        options = dict(self._options)
        queue = options.pop("queue_name", None) or actor.queue_name
        priority = options.pop("priority", None)
        sequence = replay.next_sequence()
        settings = replay.settings
        step = NewStep(
            sequence, actor.actor_name, queue, priority, options or None, self._encoded,
            max_claims=self._max_claims,
            reclaim_stale_after_seconds=self._reclaim.resolve(settings, "actions"),
            compensation=self._compensation,
            comp_from_result=self._compensation_from is not None,
            comp_on_self_failure=self._undone_on_self_failure(scope, settings),
            comp_policy=self._on_failure or scope.comp_policy,
            comp_reclaim_stale_after_seconds=self._comp_reclaim.resolve(settings, "sagas") if self._has_compensation else None,
            expires_at=self._deadline(),
            optional=self._optional,
            fallback=self._fallback,
            retry=None if self._retry is None else self._retry.stored(settings),
            scope=scope,
        )  # fmt: skip
        advise(actor, step, settings)
        if self._compensation_call is not None:
            advise_on_reclaim(self._compensation_call[0], step.comp_reclaim_stale_after_seconds, settings=settings)
        return step

    def _deadline(self) -> int | None:
        """The step's own deadline, or the configured one, counted from now (EXPIRE-1)."""
        default = self._replay.settings.monitor.expiration.defaults.action
        if self._expires_at is not None or default is None:
            return self._expires_at
        return self._replay.now + to_ms(default)

    @property
    def _has_compensation(self) -> bool:
        return self._compensation is not None or self._compensation_from is not None

    def _undone_on_self_failure(self, scope: Scope, settings: Settings) -> bool:
        """The step's own word, then its group's, then the settings' (COMP-4). What is built from a result needs one (COMP-10)."""
        if self._on_self_failure is not None:
            return self._on_self_failure
        wanted = scope.comp_on_self_failure
        return (settings.sagas.compensate_failed_step if wanted is None else wanted) and self._compensation is not None

    def _check_undo(self) -> None:
        """What is said about an undo that there is not was meant for something (C26)."""
        if self._has_compensation:
            return
        said = {
            "on_compensation_failure": self._on_failure is not None,
            "compensate_step_on_self_failure": bool(self._on_self_failure),
            self._comp_reclaim.name: self._comp_reclaim.seconds is not None or bool(self._comp_reclaim.enabled),
        }
        for name in (name for name, was_said in said.items() if was_said):
            raise TypeError(
                f"{self._describe()}: {name}() without compensate_with(): this step has no compensation that it could be about"
            )

    def _check_self_failure(self) -> None:
        if self._compensation_from is not None and self._on_self_failure:
            raise TypeError(
                "compensate_step_on_self_failure() needs a compensation whose arguments are known beforehand: a step that failed has "
                "no result to build one from; use compensate_with(actor, ...)"
            )

    def _resolve(self, entry: StepEntry) -> None:
        """Build the compensation from the step's result, the first time a drive sees it completed (COMP-2, COMP-10)."""
        if self._compensation_from is not None:
            assert entry.value is not None
            resolve(
                self._replay, self._compensation_from, entry.value(), broker=self._actor.broker, sequence=entry.sequence,
                where=f"the compensation of step {entry.sequence} ({entry.actor})", reclaim=self._comp_reclaim,
            )  # fmt: skip

    def _describe(self) -> str:
        return f"action({self._actor.actor_name})"

    def __del__(self) -> None:
        if not getattr(self, "_built", True):
            self._replay.builder_dropped(self._describe())


class Reclaim:
    """The reclaim window of a row, by the precedence of RECLAIM-2: seconds, then on, then off, then the settings. Immutable."""

    __slots__ = ("enabled", "name", "seconds")

    def __init__(self, name: str, seconds: int | None = None, enabled: bool | None = None) -> None:
        self.name = name
        self.seconds = seconds
        self.enabled = enabled

    def after(self, duration: float | timedelta) -> Reclaim:
        seconds = to_ms(duration) / 1000
        if seconds < 1:
            raise ValueError(f"{self.name}() takes at least one second, not {duration!r}")
        return Reclaim(self.name, round(seconds), self.enabled)

    def switched(self, enabled: bool) -> Reclaim:
        return Reclaim(self.name, self.seconds, enabled)

    def resolve(self, settings: Settings, family: str) -> int | None:
        configured = getattr(settings, family).reclaim.stale_running
        if self.seconds is not None:
            return self.seconds
        enabled = configured.enabled if self.enabled is None else self.enabled
        return round(configured.after_seconds) if enabled else None


_AS_CONFIGURED = Reclaim("reclaim_stale_after")
_UNDO_AS_CONFIGURED = Reclaim("reclaim_compensation_stale_after")


def check_message_builder(builder: object, args: tuple[Any, ...], kwargs: dict[str, Any], *, of: str = "step") -> None:
    """Refuse what ``compensate_with()`` cannot make a message of."""
    if args or kwargs:
        raise TypeError(f"compensate_with() takes arguments with an actor; a callable gets the {of}'s result and nothing else")
    if isinstance(builder, Message):
        raise TypeError(
            "compensate_with() takes the actor and its arguments, compensate_with(refund, 3), or a function that makes the "
            f"message from the {of}'s result, compensate_with(lambda result: refund.message(result)); not a message"
        )
    if not callable(builder):
        raise TypeError(f"compensate_with() takes an actor or a callable that returns a message, not {type(builder).__name__}")


def resolve(
    replay: Replay, builder: MessageBuilder, value: Any, *, broker: Broker, sequence: int, where: str, reclaim: Reclaim
) -> None:  # fmt: skip
    """Build a compensation from a result, the first time a drive sees it (COMP-2); what goes wrong holds the run (COMP-10)."""
    try:
        with replay.building(where):
            message = builder(value)
    except Exception as error:
        message = None
        if replay.error is None:
            fault = CompensationBuildError(f"{where} could not be built: {type(error).__name__}: {error}")
            fault.__cause__ = error
            raise replay.fault(fault) from error
    if replay.error is not None:  # it did what is not its place, which says more than what became of that
        raise replay.error
    if not isinstance(message, Message):
        raise replay.fault(
            CompensationBuildError(
                f"{where} was built as {type(message).__name__}: return a message, for example refund.message(...)"
            )
        )
    try:
        actor = broker.get_actor(message.actor_name)
        options = {**message.options, "queue_name": message.queue_name}
        spec = compensation(actor, message.args, message.kwargs, options)
        advise_on_reclaim(actor, reclaim.resolve(replay.settings, "sagas"), settings=replay.settings, options=options)
    except Exception as error:
        raise replay.fault(CompensationBuildError(f"{where} cannot be sent: {error}")) from error
    replay.resolve_compensation(sequence, spec)


def _failure(entry: StepEntry) -> StepFailedError:
    return step_failed(entry.actor, entry.sequence, text=entry.error or "")


def compensation(
    actor: Actor[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any] | None = None
) -> CompensationSpec:
    """A compensation with its arguments bound and encoded, and the queue that its messages go to."""
    given = {"queue_name": actor.queue_name, **(options or {})}
    try:
        text = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NotSerializableError(f"the options of {actor.actor_name}'s message", str(error)) from None
    return CompensationSpec(actor.actor_name, bind(actor, args, kwargs), text)


def bind(actor: Actor[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """``[args, kwargs]`` encoded, after checking that the actor can be called with them."""
    signature, fits = _calls_of(actor.fn)
    if not fits(len(args), tuple(kwargs)):
        assert signature is not None
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{actor.actor_name}: {error}; its signature is {actor.actor_name}{signature}") from None
    try:
        return encode_call(args, kwargs)
    except NotSerializableError as error:
        raise NotSerializableError(f"{actor.actor_name}: {error.path}", error.detail) from None


#: How functions are called. Held weakly: an application that is gone is not kept by what was known of its actors.
_calls: WeakKeyDictionary[Callable[..., Any], tuple[inspect.Signature | None, Callable[..., bool]]] = WeakKeyDictionary()


def _calls_of(fn: Callable[..., Any]) -> tuple[inspect.Signature | None, Callable[[int, tuple[str, ...]], bool]]:
    """The signature of an actor's function, ``None`` where Python cannot tell, and whether a call of a shape binds to it."""
    known = _calls.get(fn)
    if known is None:
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):
            signature = None
        known = _calls[fn] = signature, lru_cache(maxsize=64)(partial(_fits, signature))
    return known


def _fits(signature: inspect.Signature | None, positional: int, keywords: tuple[str, ...]) -> bool:
    """Whether a call of that shape binds; which values it carries makes no difference."""
    if signature is None:
        return True
    try:
        signature.bind(*(None,) * positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
