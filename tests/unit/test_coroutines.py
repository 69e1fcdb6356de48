"""Async actors' coroutines: waited for, cancelled by interrupts, and never left running (FENCE-5)."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import dramatiq
import pytest
from dramatiq.asyncio import EventLoopThread, async_to_sync, get_event_loop_thread, set_event_loop_thread
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, Shutdown, TimeLimitExceeded
from dramatiq.middleware.threading import raise_thread_exception

from dramatiq_saga import coroutines
from dramatiq_saga.coroutines import body_of, coroutine_of, inline_loop
from dramatiq_saga.errors import MiddlewareOrderError, SagaError
from tests.support.bench import Background

word: ContextVar[str] = ContextVar("word", default="")


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    made = StubBroker(middleware=[AsyncIO()])
    yield made
    made.close()


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    """The loop of a worker, as Dramatiq starts it."""
    assert get_event_loop_thread() is None
    thread = EventLoopThread(logging.getLogger("test"))
    thread.start(timeout=5.0)
    set_event_loop_thread(thread)
    yield thread
    thread.stop()
    set_event_loop_thread(None)


def body(broker: StubBroker, fn: Callable[..., Any]) -> Callable[..., Any]:
    return body_of(dramatiq.actor(fn, broker=broker))


def test_a_plain_function_is_left_alone(broker: StubBroker) -> None:
    def plain() -> None: ...

    async def inner() -> None: ...

    @functools.wraps(inner)
    def bridged() -> None:  # somebody else's way of running a coroutine
        ...

    assert body(broker, plain) is plain
    assert body(broker, bridged) is bridged
    assert coroutine_of(async_to_sync(inner)) is inner


def test_a_coroutine_returns_and_raises_as_a_function_would(broker: StubBroker, loop: EventLoopThread) -> None:
    async def half(n: int, *, of: str = "x") -> str:
        await asyncio.sleep(0)
        if n % 2:
            raise ValueError(f"{n} is odd")
        return of * (n // 2)

    run = body(broker, half)
    assert run(4, of="ab") == "abab"
    with pytest.raises(ValueError, match="3 is odd") as raised:
        run(3)
    assert "half" in [frame.name for frame in raised.traceback]
    with pytest.raises(TypeError, match="unexpected keyword"):
        run(4, off="x")


def test_context_variables_are_those_of_the_thread_that_waits(broker: StubBroker, loop: EventLoopThread) -> None:
    """CTX-1."""

    async def look() -> str:
        await asyncio.sleep(0)
        seen = word.get()
        word.set("of the coroutine")
        return seen

    token = word.set("of the step")
    assert body(broker, look)() == "of the step"
    assert word.get() == "of the step"
    word.reset(token)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_nothing_that_a_coroutine_raises_ends_the_loop(error: BaseException, broker: StubBroker, loop: EventLoopThread) -> None:
    async def raising() -> None:
        raise error

    async def after() -> str:
        return "still there"

    with pytest.raises(type(error)):
        body(broker, raising)()
    assert body(broker, after)() == "still there"


class Interrupted:
    """Calls a body in a thread, interrupts it there, and says how it ended."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._target, args=(run,))
        self._thread.start()

    def _target(self, run: Callable[[], Any]) -> None:
        try:
            self.value = run()
        except BaseException as error:
            self.error = error

    def interrupt(self, kind: type[BaseException]) -> None:
        assert self._thread.ident is not None
        raise_thread_exception(self._thread.ident, kind)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Interrupted:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self


@pytest.mark.parametrize("kind", [TimeLimitExceeded, Shutdown])
def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_end(
    kind: type[BaseException], broker: StubBroker, loop: EventLoopThread
) -> None:
    """However long that takes: nobody else may be given a step that still runs."""
    began, cleaning, may_end = threading.Event(), threading.Event(), threading.Event()
    ended: list[str] = []

    async def slow() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cleaning.set()
            while not may_end.is_set():
                await asyncio.sleep(0.001)
            ended.append("clean")

    call = Interrupted(body(broker, slow))
    assert began.wait(20)
    call.interrupt(kind)
    assert cleaning.wait(20)
    assert call.waits and ended == []
    may_end.set()
    assert type(call.join().error) is kind and ended == ["clean"]


def test_a_coroutine_that_returns_all_the_same_has_returned(broker: StubBroker, loop: EventLoopThread) -> None:
    """FENCE-5: as a function that catches the interrupt."""
    began = threading.Event()

    async def stubborn() -> str:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "saved what there was"
        return "never"

    call = Interrupted(body(broker, stubborn))
    assert began.wait(20)
    call.interrupt(TimeLimitExceeded)
    assert call.join().value == "saved what there was"


def test_an_error_on_the_way_out_is_that_of_the_body(broker: StubBroker, loop: EventLoopThread) -> None:
    began = threading.Event()

    async def clumsy() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("while cleaning up")

    call = Interrupted(body(broker, clumsy))
    assert began.wait(20)
    call.interrupt(TimeLimitExceeded)
    assert str(call.join().error) == "while cleaning up"


def test_a_second_interrupt_cancels_again(broker: StubBroker, loop: EventLoopThread) -> None:
    """A time limit, and a shutdown while the coroutine cleans up; what is raised is the last of them."""
    began, cleaning = threading.Event(), threading.Event()

    async def slow() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cleaning.set()
            await asyncio.sleep(60)

    call = Interrupted(body(broker, slow))
    assert began.wait(20)
    call.interrupt(TimeLimitExceeded)
    assert cleaning.wait(20)
    call.interrupt(Shutdown)
    assert type(call.join().error) is Shutdown


def test_a_loop_that_stops_before_the_coroutine_has_ended_gives_the_step_back(broker: StubBroker) -> None:
    """A worker does not wait for ever: what is left of the coroutine never runs again (NATIVE-4)."""
    began = threading.Event()
    thread = EventLoopThread(logging.getLogger("test"))
    thread.start(timeout=5.0)
    set_event_loop_thread(thread)
    try:

        async def endless() -> None:
            began.set()
            await asyncio.Event().wait()

        call = Interrupted(body(broker, endless))
        assert began.wait(20)
        for task in asyncio.all_tasks(thread.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        thread.stop()
        assert type(call.join().error) is Shutdown
        assert type(Interrupted(body_of(broker.actors["endless"])).join().error) is Shutdown  # and none is begun
    finally:
        set_event_loop_thread(None)


class Places:
    """Raises ``kind`` at the line numbered ``at`` of what this thread runs of ``coroutines.py``."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.at, self.kind, self.seen = at, kind, 0

    def __enter__(self) -> Places:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != coroutines.__file__ or frame.f_code.co_name in ("__init__", "_run", "body"):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise self.kind
        return self._trace


def test_interrupts_anywhere_lose_no_coroutine(broker: StubBroker, loop: EventLoopThread) -> None:
    """FENCE-5: wherever one lands, the call ends after the coroutine, and with its value where it returned one."""
    log: list[str] = []

    async def work() -> str:
        log.append("began")
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            log.append("returned")
            return "value"
        finally:
            log.append("over")

    run, outcomes = body(broker, work), set()

    def everywhere() -> int:
        at = 0
        while True:
            at += 1
            log.clear()
            places = Places(at, Shutdown)
            try:
                with places:
                    assert run() == "value"
                outcome = "returned"
            except Shutdown:
                outcome = "interrupted"
            sys.settrace(None)
            assert log.count("began") == log.count("over") <= 1, (at, log)
            assert (outcome == "returned") == ("returned" in log), (at, log)
            if places.seen < at:
                return at
            outcomes.add(outcome)

    # In a thread of its own: what is interrupted within an "except" leaves its exception behind in the thread.
    at = Background(everywhere).result()
    assert at > 10 and outcomes == {"returned", "interrupted"}


# --- without a worker's loop -----------------------------------------------------------------------------------------


def test_run_sync_has_a_loop_of_its_own_for_all_its_steps(broker: StubBroker) -> None:
    async def where() -> tuple[int, str]:
        return id(asyncio.get_running_loop()), threading.current_thread().name

    run = body(broker, where)
    with inline_loop():
        first, second = run(), run()
        with inline_loop():  # a step that runs another workflow
            assert run() == first
        assert run() == first == second
    with pytest.raises(SagaError, match="no event loop runs in this process"):
        run()
    assert first[1] not in [thread.name for thread in threading.enumerate()]


def test_a_background_task_of_a_coroutine_ends_with_run_sync(broker: StubBroker) -> None:
    ended: list[str] = []
    tasks: list[Any] = []

    async def leaving_something_behind() -> None:
        async def background() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("background")

        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0)

    with inline_loop():
        body(broker, leaving_something_behind)()
        assert ended == []
    assert ended == ["background"]


def test_the_loop_cannot_wait_for_itself(broker: StubBroker, loop: EventLoopThread) -> None:
    async def inner() -> None: ...

    run = body(broker, inner)

    async def outer() -> None:
        run()

    with pytest.raises(SagaError, match=r"wait for itself.*send"):
        body(broker, outer)()


def test_an_async_actor_without_the_middleware_is_refused_with_the_line_that_mends_it() -> None:
    broker = StubBroker(middleware=[])

    async def inner() -> None: ...

    with pytest.raises(MiddlewareOrderError, match=r"inner is an async actor.*AsyncIO\(\)"):
        body(broker, inner)()
    broker.close()
