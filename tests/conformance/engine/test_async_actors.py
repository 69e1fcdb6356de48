"""Async actors as steps and compensations, in real workers and in ``run_sync`` (NATIVE-1, NATIVE-4, FENCE-5, SYNC-1)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from dramatiq.middleware import AsyncIO, CurrentMessage, Middleware, default_middleware

from dramatiq_saga import Flow, FlowFailedError, Settings, Step, current_step
from dramatiq_saga.errors import WouldBlockError
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def with_loop() -> list[Middleware]:
    return [*(known() for known in default_middleware), CurrentMessage(), AsyncIO()]


@pytest.fixture(params=["sqlite", "postgresql", "redis", "stub"])
def app(request: pytest.FixtureRequest, applications: Applications) -> Application:
    return applications(request.param, middleware=with_loop())


@pytest.fixture
def lite(applications: Applications) -> Application:
    return applications("sqlite", middleware=with_loop())


def undone_order(app: Application) -> Any:
    """A run with async steps, one of them given its compensation from its result, that fails and is undone."""
    steps: list[Step | None] = []

    @app.actor
    async def charge(n: int) -> dict[str, int]:
        await asyncio.sleep(0)
        steps.append(current_step())
        app.calls.append(("charge", n))
        return {"id": n * 10}

    @app.actor
    async def refund(number: int) -> None:
        await asyncio.sleep(0)
        steps.append(current_step())
        app.calls.append(("refund", number))

    @app.actor
    async def refuse() -> None:
        await asyncio.sleep(0)
        raise ValueError("no such address")

    @app.workflow
    def order(flow: Flow) -> None:
        charged = flow.action(charge, 4).compensate_with(lambda made: refund.message(made["id"])).run()
        assert charged == {"id": 40}
        flow.run(refuse)

    return order, steps


def check(app: Application, handle: Any, steps: list[Step | None]) -> None:
    assert app.calls == [("charge", 4), ("refund", 40)]
    with pytest.raises(FlowFailedError, match="no such address"):
        handle.result()
    step, undo = steps
    assert step is not None and undo is not None
    assert (step.run_id, step.sequence, step.undoes) == (handle.id, 1, None)
    assert undo.undoes is not None and undo.undoes.actor == "charge"
    assert [(one.actor, one.status) for one in handle.actions()] == [("charge", "completed"), ("refuse", "failed")]


def test_async_steps_and_compensations_run_in_a_worker(app: Application) -> None:
    """Their results, their errors and ``current_step()`` are those of any other step."""
    order, steps = undone_order(app)
    handle = app.run(order)
    app.drain()
    check(app, handle, steps)
    assert app.messages() == 0


def test_async_steps_and_compensations_run_in_run_sync(lite: Application) -> None:
    """SYNC-1: without a worker's event loop."""
    order, steps = undone_order(lite)
    check(lite, order.run_sync(), steps)


def test_run_sync_works_from_a_thread_of_async_code(lite: Application) -> None:
    order, steps = undone_order(lite)

    async def main() -> Any:
        return await asyncio.to_thread(order.run_sync)

    check(lite, asyncio.run(main()), steps)


def test_run_sync_runs_on_the_thread_of_a_running_loop_as_well(lite: Application) -> None:
    """It blocks that loop, as any plain call does; it does not wait for it."""
    order, steps = undone_order(lite)

    async def main() -> Any:
        return order.run_sync()

    check(lite, asyncio.run(main()), steps)


def test_a_step_in_a_worker_may_run_a_workflow_with_async_steps(lite: Application) -> None:
    app = lite

    @app.actor
    async def inner_step() -> str:
        await asyncio.sleep(0)
        return "inner"

    @app.workflow
    def inner(flow: Flow) -> str:
        return str(flow.run(inner_step))

    @app.actor
    def plain() -> str:
        return str(inner.run_sync().result())

    @app.actor
    async def in_a_thread() -> str:
        handle = await asyncio.to_thread(inner.run_sync)
        return str(handle.result())

    @app.workflow
    def outer(flow: Flow) -> list[str]:
        return [flow.run(plain), flow.run(in_a_thread)]

    assert app.run(outer).result() == ["inner", "inner"]


def test_an_async_step_is_tried_again(app: Application) -> None:
    """NATIVE-1."""

    @app.actor(max_retries=2)
    async def flaky() -> int:
        step = current_step()
        assert step is not None
        app.calls.append(step.attempt)
        await asyncio.sleep(0)
        if step.attempt < 3:
            raise ConnectionError("not yet")
        return step.attempt

    @app.workflow
    def one(flow: Flow) -> int:
        return int(flow.run(flaky))

    assert app.run(one).result() == 3
    assert app.calls == [1, 2, 3]


def test_a_time_limit_in_an_async_step_is_a_failed_try(app: Application) -> None:
    """NATIVE-1: the coroutine is cancelled, and has ended before the next try begins."""

    @app.actor(time_limit=300, max_retries=1)
    async def slow() -> str:
        app.calls.append("began")
        try:
            if app.calls.count("began") == 1:
                await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            app.calls.append("ended")
        return "in time"

    @app.workflow
    def one(flow: Flow) -> str:
        return str(flow.run(slow))

    app.start(time_limits=True)
    handle = app.run(one)
    assert handle.result() == "in time"
    assert app.calls == ["began", "ended"] * 2
    assert handle.actions()[0].tries == 1
    failed = [event for event in handle.events() if event.type == "action.failed"]
    assert [event.detail for event in failed] == ["dramatiq.middleware.time_limit.TimeLimitExceeded: "]


def test_shutdown_in_an_async_step_releases_it_and_spends_no_try(app: Application) -> None:
    """NATIVE-4, C44: also where the coroutine takes longer to clean up than Dramatiq's own patience of a second would be."""
    if app.kind == "stub":
        pytest.skip("StubBroker forgets what a stopping worker has prefetched")

    @app.actor(notify_shutdown=True)
    async def long() -> str:
        app.calls.append("began")
        try:
            if app.calls.count("began") == 1:
                await asyncio.sleep(60)
        finally:
            app.calls.append("ended")
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        return str(flow.run(long))

    app.start()
    handle = one.send()
    eventually(lambda: app.calls, because="the step has begun")
    app.stop()
    assert app.calls == ["began", "ended"]
    (row,) = handle.actions()
    assert (row.status, row.tries) == ("pending", 0)
    app.start()
    app.ended(handle)
    assert handle.result() == "done"


def test_async_steps_run_side_by_side_with_plain_ones(lite: Application) -> None:
    """Each occupies its worker thread while it runs; the loop is shared."""
    app = lite
    together = threading.Barrier(3)

    @app.actor
    async def waits() -> None:
        await asyncio.to_thread(together.wait, 20)

    @app.actor
    def plain() -> None:
        together.wait(20)

    @app.workflow
    def one(flow: Flow, actor: str) -> None:
        flow.run({"waits": waits, "plain": plain}[actor])

    app.start(threads=3)
    handles = [one.send(name) for name in ("waits", "plain", "waits")]
    assert [app.ended(handle) for handle in handles] == ["completed"] * 3


def test_context_is_restored_inside_the_coroutine(applications: Applications) -> None:
    """CTX-1: what a hook binds in context variables holds in the coroutine."""
    import structlog

    app = applications("sqlite", middleware=with_loop(), settings=Settings.from_mapping({"context.auto": True}))

    @app.actor
    async def look() -> None:
        await asyncio.sleep(0)
        app.calls.append(structlog.contextvars.get_contextvars())

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(look)

    with structlog.contextvars.bound_contextvars(request="r-1"):
        handle = one.send()
    with app.working():
        app.ended(handle)
    assert app.calls == [{"request": "r-1"}]


def test_a_message_that_is_no_step_is_dramatiqs_affair(lite: Application) -> None:
    """NATIVE-5."""
    app = lite

    @app.actor
    async def plain(n: int) -> None:
        await asyncio.sleep(0)
        app.calls.append((n, current_step()))

    with app.working():
        plain.send(1)
        app.drain()
    assert app.calls == [(1, None)]


def test_an_async_step_may_look_whether_it_is_still_wanted(app: Application) -> None:
    """API ``current_step().cancelled``: from the loop's thread, and from one beside it."""
    begun, cancelled = threading.Event(), threading.Event()

    @app.actor
    async def step() -> None:
        here = current_step()
        assert here is not None
        app.calls.append(here.cancelled)
        begun.set()
        await asyncio.to_thread(cancelled.wait, 20)
        app.calls.append(await asyncio.to_thread(lambda: here.cancelled))

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(step)

    with app.working():
        handle = one.send()
        assert begun.wait(20)
        assert handle.cancel()
        cancelled.set()
        eventually(lambda: len(app.calls) == 2, because="the step has looked again")
        app.drain()
    assert app.calls == [False, True]


def test_a_step_that_sends_messages_from_its_coroutine_sends_them(lite: Application) -> None:
    app = lite
    note = app.step("note")

    @app.actor
    async def sender() -> None:
        await asyncio.sleep(0)
        note.send(7)

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(sender)

    app.run(one)
    app.drain()
    assert app.calls == [("note", 7)]


# --- mistakes --------------------------------------------------------------------------------------------------------


async def coroutine(flow: Flow) -> None: ...


async def generator(flow: Flow) -> Any:
    yield 1


class AsyncCallable:
    __name__ = "async_callable"

    async def __call__(self, flow: Flow) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [(coroutine, "coroutine function"), (generator, "generator function"), (AsyncCallable(), "coroutine function")],
    ids=["coroutine", "generator", "callable"],
)
def test_a_workflow_function_is_never_async(function: Any, words: str, lite: Application) -> None:
    """API: refused where it is declared."""
    with pytest.raises(TypeError, match=words):
        lite.workflow(function)
    assert function.__name__ not in lite.broker.actors


def test_an_async_step_without_the_middleware_holds_the_run_with_the_line_that_mends_it(
    applications: Applications,
) -> None:
    """A deploy mends it, so nothing is rolled back and no step is spent."""
    app = applications("sqlite")
    plain = app.step("plain")

    @app.actor
    async def step() -> None: ...

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(plain)
        flow.run(step)

    @app.workflow
    def undone(flow: Flow) -> None:
        flow.action(plain).compensate_with(step).run()

    with app.working():
        for declared, steps in ((one, 1), (undone, 0)):
            handle = declared.send()
            app.drain()
            (held,) = app.sql("SELECT hold_error FROM {flow_runs} WHERE id = ?", handle.id)
            assert "step is an async actor" in held[0] and "AsyncIO()" in held[0]
            assert handle.status == "waiting" and len(handle.actions()) == steps
    with pytest.raises(WouldBlockError, match="AsyncIO"):
        one.run_sync()
