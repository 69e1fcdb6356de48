"""Declaring and starting workflows (API: ``workflow``, ``Workflow``).

A workflow is registered as an ordinary Dramatiq actor under its own name: a message to it drives one run. So queues,
priorities, dashboards, metrics and dead letters show workflows like any other actor.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

import dramatiq
from dramatiq import Actor, Broker

from .clock import moment_to_ms, to_ms, uuid7
from .codec import encode_call, printable
from .context import UNSET, captured
from .engine import runs
from .engine.core import WorkflowDefinition
from .engine.replay import refuse_inside_workflow
from .errors import NotSerializableError, SagaError
from .flow import Flow, tag_text
from .handle import FlowHandle
from .inline import run_inline
from .middleware import middleware_of
from .options import check_options, short_text
from .store.models import ID_LENGTH, NAME_LENGTH

P = ParamSpec("P")
R = TypeVar("R")

_REFUSED = {
    "max_retries": "a workflow is driven until it ends; its steps have tries",
    "max_age": "a run has a deadline: expires_in",
    "store_results": "the run keeps its result: FlowHandle.result()",
}


#: Longest version, in characters.
VERSION_LENGTH = 64


class Workflow(Generic[P, R]):
    """A declared workflow. Calling it is refused: start a run with :meth:`send`, or :meth:`run_sync` in this process.

    Attributes:
      fn: the decorated function.
      name: the name that runs, actors and the command line know it by.
      actor: the Dramatiq actor that drives its runs.
    """

    def __init__(
        self,
        fn: Callable[Concatenate[Flow, P], R],
        *,
        name: str,
        queue_name: str | None,
        version: str | None,
        expires_in: float | timedelta | None,
        tags: Mapping[str, str | int | None] | None,
        priority: int,
        time_limit: int | None,
        broker: Broker,
        context: Any = UNSET,
    ) -> None:
        self.fn = fn
        self.name = name
        self._own_queue = queue_name
        self.queue_name = queue_name = "default" if queue_name is None else queue_name
        self.version = version
        self.expires_in = expires_in
        self.tags = dict(tags or {})
        self._context = context
        self.broker = broker
        self._priority = priority
        self._middleware = middleware = middleware_of(broker)
        self._signature = _signature(fn, name)
        options: dict[str, Any] = {}
        # A drive that fails for a reason of the engine's own is tried again, always; none is too old, whatever the broker says
        # of other messages.
        for option in ("max_retries", "retry_when", "max_age"):
            if option in broker.actor_options:
                options[option] = None
        if time_limit is not None:
            options["time_limit"] = time_limit
        drive = functools.partial(middleware.drive_from_message, broker, name)
        functools.update_wrapper(drive, fn)
        actor = _WorkflowActor(drive, broker=broker, actor_name=name, queue_name=queue_name, priority=priority, options=options)
        actor.workflow = self
        self.actor: Actor[Any, Any] = actor
        middleware.engine(broker).workflows[name] = WorkflowDefinition(name, fn, queue_name, version)
        functools.update_wrapper(self, fn, updated=())

    def send(self, *args: P.args, **kwargs: P.kwargs) -> FlowHandle[R]:
        """Start a run. With a database broker the run and its first message are one transaction (DRIVE-3).

        Raises:
          TypeError: the arguments do not fit the function's signature.
          NotSerializableError: they, or the context that is captured here, cannot be stored; the error names the path.
        """
        return self.send_with_options(args=args, kwargs=kwargs)

    def send_with_options(
        self,
        *,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str | int | None] | None = None,
        expires_in: float | timedelta | None = None,
        expires_at: datetime | None = None,
        delay: int | timedelta | None = None,
        version: str | None = None,
        context: Any = UNSET,
        **options: Any,
    ) -> FlowHandle[R]:
        """Start a run with more to say about it.

        Parameters:
          run_id: an id of your own, at most 128 characters. If a run with it is there, with the same arguments, nothing is
            started and the handle is one on that run.
          tags: found again by ``query()``; they add to the workflow's own.
          expires_in: deadline of the whole run, in seconds or as a ``timedelta``; ``expires_at`` names the moment instead.
          context: what travels with this run, in place of what would be captured (CTX-1).
          delay: milliseconds (as in Dramatiq) or a ``timedelta`` before the first drive.
          version: recorded on this run instead of the workflow's own (HISTORY-2).
          **options: Dramatiq options for the run's own messages, ``priority`` for example.

        Raises:
          RunConflictError: the id is taken by a run of another workflow, or with other arguments.
        """
        new = self._new_run(
            args, dict(kwargs or {}), run_id, tags, expires_in, expires_at, delay, version, options, context=context
        )
        engine = self._middleware.engine(self.broker)
        runs.start(engine, new, self._middleware.sender(self.broker))
        return FlowHandle(new.run_id, self.name, middleware=self._middleware, broker=self.broker)

    def run_sync(self, *args: P.args, **kwargs: P.kwargs) -> FlowHandle[R]:
        """Run to the end in this process, steps included, through the same rows as a queued run (SYNC-1).

        Tries of a step follow each other without waiting. A step that a worker has taken, because a sweep elsewhere has sent it one, is waited
        for as long as that worker may be at it. What ends the run is on the handle: ``result()`` returns or raises.

        Raises:
          WouldBlockError: the run waits for something that nothing in this process can bring about.
        """
        refuse_inside_workflow(f"running {self.name}")
        new = self._new_run(args, dict(kwargs), None, None, None, None, None, None, {})
        run_inline(self._middleware, self.broker, new)
        return FlowHandle(new.run_id, self.name, middleware=self._middleware, broker=self.broker)

    def _new_run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
        tags: Mapping[str, str | int | None] | None,
        expires_in: float | timedelta | None,
        expires_at: datetime | None,
        delay: int | timedelta | None,
        version: str | None,
        options: dict[str, Any],
        *,
        context: Any = UNSET,
    ) -> runs.NewRun:
        refuse_inside_workflow(f"starting a run of {self.name}")
        self._check_call(args, kwargs)
        for name, why in _REFUSED.items():
            if name in options:
                raise TypeError(f"a run does not take {name!r}: {why}")
        if "queue_name" in options:
            raise TypeError(
                "a run does not take 'queue_name': its messages go to its workflow's queue (workflow(queue_name=...))"
            )
        known = {"priority", *self.broker.actor_options}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, "run_id", "tags", "expires_in", "delay"], n=1, cutoff=0.5)
                raise TypeError(f"a run does not take {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        check_options(options, "a run")
        engine = self._middleware.engine(self.broker)
        now = engine.now()
        if run_id is not None:
            check_id(run_id)
        check_delay(delay)
        if expires_in is not None and expires_at is not None:
            raise TypeError("give expires_in or expires_at, not both")
        deadline = expires_in
        if expires_in is None and expires_at is None:
            default = engine.settings.monitor.expiration.defaults.run
            deadline = default if self.expires_in is None else self.expires_in
        if deadline is not None and to_ms(deadline) <= 0:
            raise ValueError(f"expires_in takes a duration above zero, not {deadline!r}")
        if isinstance(delay, timedelta):
            delay = to_ms(delay)
        priority = options.pop("priority", None)
        return runs.NewRun(
            run_id or uuid7(now),
            self.name,
            _version(version) if version is not None else self.version,
            self.queue_name,
            encode_call(args, kwargs),
            context=captured(self._middleware.settings, self._context, given=context),
            priority=priority if priority is not None else self._priority or None,
            options=options or None,
            tags={name: tag_text(name, value) for name, value in {**self.tags, **(tags or {})}.items()},
            expires_at=moment_to_ms(expires_at) if expires_at else now + to_ms(deadline) if deadline is not None else None,
            delay=delay,
        )

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; its signature is {self.name}{self._signature}") from None

    def _child_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The arguments of a child run, checked and encoded; for ``flow.child()``."""
        self._check_call(args, kwargs)
        try:
            return encode_call(args, kwargs)
        except NotSerializableError as error:
            raise NotSerializableError(f"{self.name}: {error.path}", error.detail) from None

    def _child_start(self) -> dict[str, Any]:
        """How a child run of this workflow is started, where its parent does not say otherwise (CHILD-1); for ``flow.child()``."""
        return {
            "queue": self._own_queue,
            "priority": self._priority or None,
            "version": self.version,
            "expires_in_ms": None if self.expires_in is None else to_ms(self.expires_in),
            "tags": dict(self.tags) or None,
        }

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SagaError(f"{self.name} is a workflow: start it with {self.name}.send(...), or run it here with .run_sync(...)")

    def __repr__(self) -> str:
        return f"Workflow({self.name!r}, queue_name={self.queue_name!r})"


class _WorkflowActor(Actor[Any, Any]):
    """The actor behind a workflow; its own ``send`` would start nothing, so it is refused."""

    __saga_workflow__ = True
    workflow: Workflow[Any, Any]

    def send_with_options(self, **_: Any) -> Any:
        raise SagaError(f"{self.actor_name} is a workflow: start a run with Workflow.send(), not with its actor's")


def check_delay(delay: Any) -> None:
    """Refuse a delay that is no time to wait."""
    wait = to_ms(delay) if isinstance(delay, timedelta) else 0 if delay is None else delay
    if isinstance(wait, bool) or not isinstance(wait, int) or not 0 <= wait <= to_ms(timedelta.max):
        raise TypeError(f"delay is whole milliseconds or a timedelta, from 0 to {timedelta.max.days} days; not {delay!r}")


def check_id(run_id: object) -> None:
    """Refuse an id that no column or no command line could carry."""
    if (
        not isinstance(run_id, str)
        or not 0 < len(run_id) <= ID_LENGTH
        or printable(run_id) != run_id
        or run_id != run_id.strip()
    ):
        raise ValueError(
            f"run_id {run_id!r} must be text of 1 to {ID_LENGTH} printable characters, without spaces at its ends or control characters"
        )


def _version(version: str | None) -> str | None:
    return None if version is None else short_text(version, "a version", limit=VERSION_LENGTH)


def _check_function(function: object) -> None:
    """Refuse what is no function of a flow, before its attributes are looked at."""
    if isinstance(function, Actor):
        raise TypeError(
            f"{function.actor_name} is an actor, and a workflow is a plain function: decorate it with @workflow alone, which makes the "
            "actor that drives it; or leave it an actor, and run it as a step of a workflow"
        )
    if isinstance(function, Workflow):
        raise TypeError(f"{function.name} is a workflow already: decorate its function with @workflow once")
    if not callable(function):
        raise TypeError(f"@workflow decorates a function, not {function!r}; what is said of it has a name, workflow(name=...)")


def _signature(fn: Callable[..., Any], name: str) -> inspect.Signature:
    """The signature without its first parameter, the flow."""
    called = type(fn).__call__  # of an object that is no function
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called):
        raise TypeError(
            f"workflow {name} is a coroutine function: a workflow is a plain function; its steps may be async actors"
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"workflow {name} is a generator function: a workflow is a plain function that asks for its steps with flow.run()"
        )
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise TypeError(f"workflow {name} must take the flow as its first argument: def {name}(flow, ...)")
    return signature.replace(parameters=parameters[1:], return_annotation=inspect.Signature.empty)


@overload
def workflow(fn: Callable[Concatenate[Flow, P], R], /) -> Workflow[P, R]: ...


@overload
def workflow(
    *,
    name: str | None = None,
    queue_name: str | None = None,
    version: str | None = None,
    expires_in: float | timedelta | None = None,
    tags: Mapping[str, str | int | None] | None = None,
    context: Any = ...,
    priority: int = 0,
    time_limit: int | None = None,
    broker: Broker | None = None,
) -> Callable[[Callable[Concatenate[Flow, P], R]], Workflow[P, R]]: ...


def workflow(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    queue_name: str | None = None,
    version: str | None = None,
    expires_in: float | timedelta | None = None,
    tags: Mapping[str, str | int | None] | None = None,
    context: Any = UNSET,
    priority: int = 0,
    time_limit: int | None = None,
    broker: Broker | None = None,
    **refused: Any,
) -> Any:
    """Declare a workflow: a function of a :class:`~dramatiq_saga.Flow` and its own arguments.

    Parameters:
      name: the function's name by default; stored with every run, so it has to stay.
      queue_name: where its drives are queued: ``default``, or for a child run the queue of its parent, where none is named.
      version: recorded on each run and readable in the function (HISTORY-2).
      expires_in: deadline of a run, in seconds or as a ``timedelta``.
      tags: written on every run.
      context: what travels with every run that is sent, in place of what ``settings.context.capture`` gives: a function without
        arguments, called at each sending, or a value (CTX-1). Child runs take their parent's instead.
      priority: as an actor's.
      time_limit: of one drive, in milliseconds, as an actor's.
      broker: the global one by default.

    Raises:
      MiddlewareOrderError: the broker has no SagaMiddleware, or more than one.
      TypeError: an option that a workflow has no use for, or something else than a function that has a name or is given one.
    """
    for option in refused:
        if option in _REFUSED:
            raise TypeError(f"a workflow does not take {option!r}: {_REFUSED[option]}")
        raise TypeError(f"a workflow does not take {option!r}")

    def declare(function: Callable[..., Any]) -> Workflow[Any, Any]:
        _check_function(function)
        own = getattr(function, "__name__", None)
        if name is None and own is None:
            raise TypeError(f"{function!r} has no name that its runs could be kept under: give it one, workflow(name=...)")
        chosen = short_text(own if name is None else name, "a workflow's name", limit=NAME_LENGTH)
        limit = {} if time_limit is None else {"time_limit": time_limit}
        check_options(
            {"queue_name": "default" if queue_name is None else queue_name, "priority": priority, **limit}, f"workflow {chosen}"
        )
        return Workflow(
            function,
            name=chosen,
            queue_name=queue_name,
            version=_version(version),
            expires_in=expires_in,
            tags={key: tag_text(key, value) for key, value in (tags or {}).items()},
            context=context,
            priority=priority,
            time_limit=time_limit,
            broker=broker or dramatiq.get_broker(),
        )

    return declare if fn is None else declare(fn)


def workflows_of(broker: Broker) -> dict[str, Workflow[Any, Any]]:
    """The workflows that are declared on a broker in this process, by name."""
    return {name: actor.workflow for name, actor in broker.actors.items() if isinstance(actor, _WorkflowActor)}


__all__ = ["Workflow", "workflow", "workflows_of"]
