"""Running workflows in a test: :class:`SagaTester`, the class behind the fixture ``saga`` (C61).

One test, one thread, no waiting: messages are delivered by :meth:`SagaTester.drain`, in the order of their due times under a clock
that only :meth:`SagaTester.advance` moves. Claims, fences, replays and decisions are those of production, on a SQLite database in
memory; the application's own broker and store are not opened. What goes wrong is kept as the exception that was raised, with its
traceback, and not only as the text that rows hold.

Long because it is the one class whose methods a test author reads.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar
from unittest import mock

import dramatiq
from dramatiq import Actor, Broker
from dramatiq import broker as dramatiq_broker
from dramatiq.asyncio import EventLoopThread, async_to_sync, get_event_loop_thread, set_event_loop_thread
from dramatiq.logging import get_logger
from dramatiq.middleware import AsyncIO, Interrupt, Middleware

from ..clock import ManualClock, SystemClock, moment_to_ms, to_ms
from ..coroutines import coroutine_of, plain_function
from ..engine import notify
from ..errors import ChildError, FlowEndedError, FlowError, ResultMissing, ResultTimeout, SagaError, UnknownActorError
from ..handle import FlowHandle
from ..middleware import made, middleware_of
from ..recovery.monitor import monitor
from ..step import OPTION, Delivery, is_ours
from ..workflow import Workflow
from .replays import ReplayChecks
from .stand_in import Letter, Post, StandIn
from .takeover import Takeover, Watcher
from .tracebacks import start_at_the_code_under_test
from .waiting import due_in, open_waits, tells_of_itself

if TYPE_CHECKING:
    from types import TracebackType

    from ..engine.claim import Job
    from ..engine.core import Engine
    from ..engine.replay import Replay

P = ParamSpec("P")
R = TypeVar("R")

#: What an actor can be made to do: a function that gives what the actor gives, a coroutine function, or an exception.
Substitute: TypeAlias = Callable[..., R] | Callable[..., Awaitable[R]] | BaseException | type[BaseException]

#: So many messages at one moment, or in one call, look like a workflow that never ends.
LIMIT = 10_000

_active: SagaTester | None = None


class SagaTester(Watcher):
    """Runs what an application has declared, inside of a test.

    Use it through the fixture ``saga``, or as a context manager. While it is active, every broker of this process that has a
    SagaMiddleware, and Dramatiq's global one, has a stand-in: what is sent reaches no server and no file.

    Parameters:
      now: where the clock stands at first; the present by default.
      without: classes of the application's middleware that are to be left out.
      limit: so many messages at one moment, or in one call of :meth:`advance`, are taken for a workflow that never ends.
    """

    def __init__(self, *, now: datetime | None = None, without: tuple[type[Middleware], ...] = (), limit: int = LIMIT) -> None:
        self._errors: list[BaseException] = []
        self._replays: deque[Replay] = deque()
        self._clock = ManualClock(SystemClock().now() if now is None else moment_to_ms(now))
        self._post = Post(self._clock)
        self._without = without
        self._limit = limit
        self._takeovers: list[Takeover] = []
        self._calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._originals: dict[tuple[str, str, int], BaseException] = {}
        self._functions: dict[str, Exception] = {}
        self._held: list[tuple[str, str, BaseException]] = []
        self._checks: ReplayChecks | None = None
        self._lock = threading.RLock()
        self._busy = False
        self._undo = ExitStack()
        self._log = get_logger(__name__)  # type: ignore[no-untyped-call]

    def __enter__(self) -> SagaTester:
        global _active
        if _active is not None:
            raise SagaError("a SagaTester is active already: a test has one; use the `saga` that is there")
        _active = self
        try:
            self._watch()
            self._look_around()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    # --- what a test says --------------------------------------------------------------------------------------------

    def start(self, workflow: Workflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> FlowHandle[R]:
        """Start a run, as ``workflow.send(...)`` does; :meth:`drain` runs it.

        Raises what ``send`` raises.
        """
        if not isinstance(workflow, Workflow):
            raise TypeError(
                f"saga.start() takes a workflow, not {type(workflow).__name__}: decorate the function with @workflow"
            )
        self._look_around()
        return workflow.send(*args, **kwargs)

    def drain(self) -> None:
        """Run everything that is due, and what that leads to, until all that is left waits for time or for the outside.

        Failed steps and failed runs are results, and stay on their handles. What would stop a worker or pass unseen is raised:

        Raises:
          HistoryMismatchError: a workflow function did not ask for what it had asked for before; and whatever else would hold a
            run: the original error.
          SagaError: ``limit`` messages were not enough.
          UnknownActorError: an actor is not declared on the broker of the workflow; a worker would go on without it, or wait.
          Exception: the error of an ordinary message, no step of a run, that Dramatiq has given up.
        """
        __tracebackhide__ = True
        with self._running("drain()"):
            self._run(until=self._clock.now())

    def advance(self, duration: float | timedelta) -> None:
        """Let time pass, in seconds or as a ``timedelta``: what comes due meanwhile runs at its own moment, in the order of time.

        Raises what :meth:`drain` raises.
        """
        __tracebackhide__ = True
        span = to_ms(duration)
        if span < 0:
            raise ValueError(f"time only moves forward: advance({duration!r})")
        with self._running("advance()"):
            self._run(until=self._clock.now() + span)

    def replace(self, actor: Actor[..., R], substitute: Substitute[R]) -> None:
        """For the rest of the test ``actor`` does something else: what a function does, or raise an exception.

        The actor keeps its name, its queue and its options, tries included. Steps, compensations, ordinary messages and direct calls
        get the substitute. It is given the arguments in the order of the actor's parameters, so it may name them differently.
        Give a ``unittest.mock.Mock`` to script what happens from try to try: ``Mock(side_effect=[ConnectionError(), "ok"])``.

        Raises:
          TypeError: the function could not be called the way that the actor is.
        """
        given: object = actor
        if isinstance(given, Workflow):
            raise TypeError(f"{given.name} is a workflow: replace the actors that its steps call")
        if not isinstance(given, Actor):
            raise TypeError(f"saga.replace() takes an actor, not {type(actor).__name__}")
        body = _substitute(actor, substitute)
        self._look_around()
        self._takeover_of(actor).replace(actor, body)

    def calls(self, actor: Actor[Any, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The calls of an actor by messages so far, every try counted, as ``(args, kwargs)``; ``unittest.mock.call`` compares with them."""
        return list(self._calls.get(actor.actor_name, ()))

    def replay_every_step(self) -> None:
        """For the rest of the test every decision is checked by replaying its run from what is stored, decoded afresh.

        Nothing is remembered between two steps, as if each ran on another machine; after each, the function has to ask for the
        same steps with the same arguments once more, and a run that has ended has to end the same way. What differs is raised
        by :meth:`drain` as HistoryMismatchError.
        """
        if self._checks is None:
            self._checks = ReplayChecks()
            for takeover in self._opened():
                self._checks.forget_everything(takeover.engine)

    @property
    def now(self) -> datetime:
        """What the clock says, in UTC."""
        return datetime.fromtimestamp(self._clock.now() / 1000, UTC)

    @property
    def errors(self) -> list[BaseException]:
        """Every exception that left a step, a compensation, an actor or a workflow function, oldest first: the objects themselves."""
        self._note_functions()
        return list(self._errors)

    @property
    def waiting(self) -> list[str]:
        """What is left to happen, in words: for the message of an assertion, or for a look around while a test is written."""
        letters = [due_in(letter, self._clock.now()) for letter in self._post.letters() if tells_of_itself(letter)]
        return letters + [line for takeover in self._opened() for line in open_waits(takeover.engine)]

    @property
    def broker(self) -> Broker:
        """The stand-in that ``dramatiq.get_broker()`` returns."""
        return dramatiq.get_broker()

    # --- running -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        with self._lock:
            if _active is not self:
                raise SagaError(f"{what} after the end of its test")
            if self._busy:
                raise SagaError(f"{what} from inside a step or a workflow function: call it from the test")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _run(self, *, until: int, enough: Callable[[], bool] | None = None) -> None:
        """Deliver what is due, moment by moment, up to ``until``; stop where that is ``enough``."""
        __tracebackhide__ = True
        tally: Counter[str] = Counter()
        while True:
            if self._run_due(tally, enough):
                return
            moment = self._next_moment()
            if moment is None or moment > until:
                break
            self._clock.advance(timedelta(milliseconds=moment - self._clock.now()))
        self._clock.advance(timedelta(milliseconds=max(0, until - self._clock.now())))
        if self._checks is not None:
            self._checks.everything(takeover.engine for takeover in self._opened())

    def _run_due(self, tally: Counter[str], enough: Callable[[], bool] | None) -> bool:
        __tracebackhide__ = True
        while True:
            self._look_around()
            if enough is not None and enough():
                return True
            for takeover in self._opened():
                monitor(takeover.engine, takeover.sender, patience=None)
                self._raise_held()
            letter = self._post.take()
            if letter is None:
                return False
            tally[letter.message.actor_name] += 1
            if tally.total() > self._limit:
                most = ", ".join(f"{count} to {name}" for name, count in tally.most_common(5))
                raise SagaError(
                    f"{self._limit} messages and no end ({most}): a workflow that never ends, or SagaTester(limit=...) is too low"
                )
            self._deliver(letter)

    def _next_moment(self) -> int | None:
        """When something will come due: timers and deadlines are messages too (TIMER-1)."""
        first = self._post.letters()[:1]
        return max(self._clock.now(), first[0].due) if first else None

    def _deliver(self, letter: Letter) -> None:
        __tracebackhide__ = True
        broker, message = letter.broker, letter.message
        actor = broker.actors.get(message.actor_name)
        if actor is not None and coroutine_of(plain_function(actor)) is not None:
            self._start_event_loop(broker)
        facts = message.options[OPTION] if is_ours(message) else None
        check = None
        if self._checks is not None and facts is not None:
            check = self._checks.of_decision(middleware_of(broker).engine(broker), facts["run"])
        delivered, error, called = broker.process(letter)
        if called and facts is None:
            self._calls.setdefault(message.actor_name, []).append((message.args, message.kwargs))
        if error is not None:
            if facts is None:
                self._errors.append(error)
            if not isinstance(error, Exception | Interrupt):
                raise error
        self._note_functions()
        if actor is None:
            raise UnknownActorError(
                f"a message to {message.actor_name!r}, and no actor of that name is declared on the broker of {_application(broker)}"
            )
        if facts is None and delivered.failed:
            raise error or SagaError(f"the message to {message.actor_name} was rejected before it ran")
        self._raise_held()
        if check is not None:
            check()

    def _start_event_loop(self, broker: Broker) -> None:
        """For async actors, where a worker would have one."""
        if get_event_loop_thread() is None and any(isinstance(one, AsyncIO) for one in broker.middleware):
            thread = EventLoopThread(self._log, 0.01)
            thread.start(timeout=10)
            set_event_loop_thread(thread)
            self._undo.callback(set_event_loop_thread, None)
            self._undo.callback(thread.stop)

    def _raise_held(self) -> None:
        __tracebackhide__ = True
        if self._held:
            run_id, workflow, error = self._held.pop(0)
            error.add_note(f"dramatiq-saga: run {run_id} of {workflow} is held with this error; a worker would try again later")
            raise error

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        original = FlowHandle.result

        @wraps(original)
        def result(handle: FlowHandle[Any], *, wait: float | timedelta | None = None) -> Any:
            __tracebackhide__ = True
            return self._result(handle, original, wait)

        def held(engine: Any, snapshot: Any, error: BaseException) -> None:
            told(engine, snapshot, error)
            self._held.append((snapshot.run_id, snapshot.workflow, error))

        told = notify.held
        self._undo.enter_context(mock.patch.object(FlowHandle, "result", result))
        self._undo.enter_context(mock.patch.object(notify, "held", held))

    def _result(self, handle: FlowHandle[Any], original: Callable[..., Any], wait: float | timedelta | None) -> Any:
        """``FlowHandle.result`` while a test runs: its ``wait`` is the test's time, and its errors have the originals for causes."""
        __tracebackhide__ = True
        if wait is not None and not self._busy:
            with self._running("result()"):
                self._run(until=self._clock.now() + to_ms(wait), enough=lambda: handle.status in _ENDED)
        try:
            return original(handle)
        except ResultMissing as missing:
            error = missing if wait is None else ResultTimeout(missing.run_id, missing.status, held=missing.held)
            left = self.waiting
            error.add_note("saga.drain() has not run, or this is left: " + ("; ".join(left) if left else "nothing"))
            raise error from None
        except FlowEndedError as ended:
            cause = self._cause(handle.id)
            if cause is None:
                raise
            raise ended from cause

    def _cause(self, run_id: str) -> BaseException | None:
        """The exception that the workflow function ended with; those of steps behind it have their originals for causes."""
        self._note_functions()
        error: BaseException | None = self._functions.get(run_id)
        seen: set[int] = set()
        link = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            start_at_the_code_under_test(link)
            if isinstance(link, FlowError) and link.__cause__ is None:
                link.__cause__ = self._origin(run_id, link)
            link = link.__cause__ or link.__context__
        return error

    def _origin(self, run_id: str, error: FlowError) -> BaseException | None:
        if isinstance(error, ChildError):
            return self._cause(error.child_id)
        return self._originals.get((run_id, "step", getattr(error, "sequence", 0)))

    def body(self, delivery: Delivery, fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def watched(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._calls.setdefault(delivery.actor, []).append((args, kwargs))
            try:
                return fn(*args, **kwargs)
            except BaseException as error:
                if delivery.job is not None:
                    self.step_failed(delivery.job, error)
                raise

        return watched

    def engine_made(self, engine: Engine) -> None:
        if self._checks is not None:
            self._checks.forget_everything(engine)

    def step_failed(self, job: Job, error: BaseException) -> None:
        self._originals[job.run_id, job.kind, job.sequence] = error
        if not any(error is known for known in self._errors[-2:]):  # told twice, or the same object raised at every try
            self._errors.append(error)

    def replay_begins(self, replay: Replay) -> None:
        self._replays.append(replay)

    def _note_functions(self) -> None:
        """Look at what replays have ended with since the last look."""
        while self._replays:
            replay = self._replays.popleft()
            error, run_id = replay.raised, replay.snapshot.run_id
            if error is None:
                continue
            before = self._functions.get(run_id)
            self._functions[run_id] = error
            # A replay that is repeated raises it once more, as another object.
            if not isinstance(error, FlowError) and (type(before), str(before)) != (type(error), str(error)):
                start_at_the_code_under_test(error)
                self._errors.append(error)
                self._log.error("The workflow function of run %s raised.", run_id, exc_info=error)

    # --- the applications --------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Put stand-ins in the place of brokers that have none yet: an application may be imported in the middle of a test."""
        with self._lock:
            taken = {id(takeover.middleware) for takeover in self._takeovers}
            for middleware in list(made):
                broker = middleware.broker
                if broker is not None and id(middleware) not in taken and middleware in broker.middleware:
                    self._take_over(broker)
            for takeover in self._takeovers:
                takeover.look_around()
            current = dramatiq_broker.global_broker
            if not any(takeover.stand_in is current for takeover in self._takeovers):
                known = next((takeover for takeover in self._takeovers if takeover.original is current), None)
                dramatiq.set_broker((known or self._take_over(current)).stand_in)

    def _take_over(self, broker: Broker | None) -> Takeover:
        takeover = Takeover(broker, post=self._post, watcher=self, without=self._without)
        takeover.stand_in.drain = self.drain
        self._takeovers.append(takeover)
        return takeover

    def _takeover_of(self, actor: Actor[Any, Any]) -> Takeover:
        for takeover in self._takeovers:
            if takeover.stand_in is actor.broker:
                return takeover
        return self._take_over(actor.broker)

    def _opened(self) -> list[Takeover]:
        return [takeover for takeover in self._takeovers if takeover.is_open]

    def _close(self) -> None:
        global _active
        _active = None
        self._undo.close()
        current = dramatiq_broker.global_broker
        for takeover in reversed(self._takeovers):
            if takeover.stand_in is current:
                dramatiq_broker.global_broker = takeover.original
            takeover.undo()


def _application(broker: StandIn) -> str:
    original = broker.stands_in_for
    return "this test" if original is None else f"the application ({type(original).__name__})"


def _substitute(actor: Actor[Any, Any], substitute: Any) -> Callable[..., Any]:
    """What an actor does instead, with the signature that it has."""
    if isinstance(substitute, BaseException) or (isinstance(substitute, type) and issubclass(substitute, BaseException)):
        return _dressed(actor, _raising(substitute))
    if not callable(substitute):
        raise TypeError(
            f"saga.replace({actor.actor_name}, ...) takes a function or an exception, not {type(substitute).__name__}: "
            f"for a fixed result write lambda *_: {substitute!r}"
        )
    signature = inspect.signature(actor.fn)
    _check_calls(actor.actor_name, signature, substitute)
    if inspect.iscoroutinefunction(substitute):

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            return await substitute(*bound.args, **bound.kwargs)

        return _dressed(actor, async_to_sync(call_async))

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return substitute(*bound.args, **bound.kwargs)

    return _dressed(actor, call)


def _raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Raises it: the very object first, and then copies, so that each try has an error with a traceback of its own."""
    left = [error]

    def fail(*_: Any, **__: Any) -> Any:
        raise left.pop() if left else _another(error)

    return fail


def _another(error: BaseException | type[BaseException]) -> BaseException | type[BaseException]:
    if isinstance(error, type):
        return error
    try:
        return copy(error)
    except Exception:  # a class that cannot be made anew from its arguments
        return error.with_traceback(None)


def _dressed(actor: Actor[Any, Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with the name and the signature of the actor's function."""
    plain = plain_function(actor)
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(call, name, getattr(plain, name, None))
    call.__signature__ = inspect.signature(actor.fn)  # type: ignore[attr-defined]
    return call


def _check_calls(name: str, signature: inspect.Signature, substitute: Callable[..., Any]) -> None:
    """The shortest and the longest call that the actor takes have to fit."""
    try:
        theirs = inspect.signature(substitute)
    except (TypeError, ValueError):
        return  # Python cannot tell
    parameters = signature.parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    keywords = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    for shortest in (True, False):
        args = [None for one in named if not shortest or one.default is one.empty]
        kwargs = {one.name: None for one in keywords if not shortest or one.default is one.empty}
        try:
            theirs.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"the substitute for {name}{signature} has the signature {theirs}: {error}") from None


_ENDED = ("completed", "failed", "cancelled", "expired")

__all__ = ["SagaTester"]
