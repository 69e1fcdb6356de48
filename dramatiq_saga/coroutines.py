"""Async actors as steps and compensations: their coroutine runs on an event loop, and the step waits for its end.

Dramatiq's own way of waiting raises an interrupt whatever the coroutine has done by then, and leaves one that takes long to clean
up running. A step's outcome must not be told before it is one, so here an interrupt cancels the coroutine and waits on: what it
returned stays returned (FENCE-5), and nobody else is given the step while it still runs.

The loop is the one that Dramatiq's ``AsyncIO`` middleware starts in a worker; in ``run_sync`` it is one of that call's own.
Context variables, ``current_step()`` among them, are those of the thread that waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dramatiq.asyncio import get_event_loop_thread
from dramatiq.middleware import AsyncIO, Interrupt, Shutdown

from .errors import MiddlewareOrderError, SagaError

if TYPE_CHECKING:
    from dramatiq import Actor

#: How long a thread that waits does not look up, in seconds: an interrupt is noticed that much later at most.
GLANCE = 0.1

_DRAMATIQS = "dramatiq.asyncio"
_INTERRUPTS = (Interrupt, KeyboardInterrupt)


class _Inline(threading.local):
    loop: _Loop | None = None


_inline = _Inline()


def coroutine_of(fn: Callable[..., Any]) -> Callable[..., Any] | None:
    """The coroutine function that Dramatiq has made ``fn``, an actor's function, of; ``None`` where it is a plain one."""
    if getattr(fn, "__globals__", {}).get("__name__") != _DRAMATIQS:
        return None
    inner = getattr(fn, "__wrapped__", None)
    return inner if inspect.iscoroutinefunction(inner) else None


def plain_function(actor: Actor[Any, Any]) -> Callable[..., Any]:
    """The actor's function as it was declared, without our wrapper around it."""
    fn: Callable[..., Any] = getattr(actor, "__saga_plain__", actor.fn)
    return fn


def body_of(actor: Actor[Any, Any]) -> Callable[..., Any]:
    """What a step of that actor calls: its function, or for an async one a function that runs its coroutine to the end."""
    plain = plain_function(actor)
    coroutine = coroutine_of(plain)
    if coroutine is None:
        return plain

    def body(*args: Any, **kwargs: Any) -> Any:
        return _run(actor, coroutine, args, kwargs)

    return body


def refuse_without_loop(actor: Actor[Any, Any]) -> None:
    """Refuse an async actor that no worker could run.

    Raises:
      MiddlewareOrderError: its broker has no ``AsyncIO`` middleware.
    """
    if coroutine_of(plain_function(actor)) is not None and not any(isinstance(one, AsyncIO) for one in actor.broker.middleware):
        raise MiddlewareOrderError(
            f"{actor.actor_name} is an async actor, and its broker has no AsyncIO middleware to run it: add "
            "broker.add_middleware(dramatiq.middleware.AsyncIO()), before SagaMiddleware"
        )


def _run(actor: Actor[Any, Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_without_loop(actor)
    thread = get_event_loop_thread()
    if thread is None:
        if _inline.loop is None:
            raise SagaError(f"no event loop runs in this process, and {actor.actor_name} is an async actor")
        loop = _inline.loop.started()
    else:
        loop = thread.loop
    if _is_running_here(loop):
        raise SagaError(
            f"{actor.actor_name} cannot be run from inside the event loop that is to run it, which would wait for itself: "
            "in async code, start the run with send(), or call run_sync() through asyncio.to_thread()"
        )
    return _Call(loop, fn, args, kwargs).run()


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class _Call:
    """One coroutine on another thread's loop, from its start to its end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._loop = loop
        self._call = fn, args, kwargs
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self._over = threading.Lock()  # released once it has ended; its waits are one call of C each
        self._over.acquire()
        self._ended = False
        self._cancel = False
        self._returned: list[Any] = []
        self._error: BaseException | None = None
        self._interrupt: BaseException | None = None

    def run(self) -> Any:
        """What the coroutine returns, or what it raises. An interrupt of this thread cancels it, and is raised once it has ended
        by that; one that comes when it has returned changes nothing.

        Who else may be here: whoever interrupts, up to twice (a time limit and a shutdown), between any two lines. Each level
        below absorbs one; all that was asked of the loop may be asked again. test_interrupts_anywhere_lose_no_coroutine
        """
        while True:
            try:
                while True:
                    try:
                        self._wait()
                        if self._returned:
                            return self._returned[0]
                        break
                    except _INTERRUPTS as error:
                        self._interrupted(error)
                break
            except _INTERRUPTS as error:
                self._interrupted(error)
        failure = self._error
        if failure is None or (self._interrupt is not None and isinstance(failure, asyncio.CancelledError)):
            failure = self._interrupt
        self._error = self._interrupt = None  # a traceback refers to this frame, and this object would refer to the traceback
        try:
            assert failure is not None
            raise failure
        finally:
            del failure

    def _interrupted(self, error: BaseException) -> None:
        self._interrupt = error
        self._cancel = True

    def _wait(self) -> None:
        """Return once the coroutine has ended, or the loop has: a worker does not wait for ever."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._go_on)
        while not self._ended and self._loop.is_running():
            self._over.acquire(timeout=GLANCE)
        if not self._ended:
            self._interrupt, self._error = Shutdown(), asyncio.CancelledError()

    def _go_on(self) -> None:
        """In the loop's thread: begin, or cancel what has begun."""
        if self._task is None:
            if self._cancel:  # before it began
                self._error = asyncio.CancelledError()
                self._end()
                return
            self._task = self._loop.create_task(self._body(), context=self._context)
            self._task.add_done_callback(lambda _: self._end())
        elif self._cancel and not self._task.done():
            self._task.cancel()

    async def _body(self) -> None:
        fn, args, kwargs = self._call
        try:
            self._returned.append(await fn(*args, **kwargs))
        except BaseException as error:  # SystemExit too: it would end the loop, and with it every other coroutine
            self._error = error

    def _end(self) -> None:
        if not self._ended:
            if not self._returned and self._error is None:
                self._error = asyncio.CancelledError()  # before its first line
            self._ended = True
            self._over.release()


# --- run_sync --------------------------------------------------------------------------------------------------------


@contextmanager
def inline_loop() -> Iterator[None]:
    """For the length of a ``run_sync``: an event loop for its async steps, made for the first of them."""
    if _inline.loop is not None:  # within another's step
        yield
        return
    loop = _inline.loop = _Loop()
    try:
        yield
    finally:
        _inline.loop = None
        loop.close()


class _Loop:
    """An event loop in a thread of its own, so that the caller may be inside one too."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._runner = asyncio.Runner()
        self._stop: asyncio.Event | None = None

    def started(self) -> asyncio.AbstractEventLoop:
        if self._thread is None:
            ready = threading.Event()
            self._thread = threading.Thread(target=self._serve, args=(ready,), name="dramatiq-saga-inline", daemon=True)
            self._thread.start()
            ready.wait()
        return self._runner.get_loop()

    def _serve(self, ready: threading.Event) -> None:
        async def until_stopped() -> None:
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()

        with self._runner:
            self._runner.run(until_stopped())

    def close(self) -> None:
        if self._thread is not None and self._stop is not None:
            self._runner.get_loop().call_soon_threadsafe(self._stop.set)
            self._thread.join()
