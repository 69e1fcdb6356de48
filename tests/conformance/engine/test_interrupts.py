"""TimeLimit and Shutdown, landing in the body, in the wait for a claim, in the outcome, in a drive."""

from __future__ import annotations

import threading
import time

import pytest
from dramatiq.middleware import Shutdown, TimeLimitExceeded
from dramatiq.middleware.threading import raise_thread_exception

from dramatiq_saga import Flow, FlowFailedError, current_step
from tests.support import store_faults as f
from tests.support.application import Application, Applications
from tests.support.store_faults import Faults
from tests.support.waiting import eventually


def spin(seconds: float = 20.0) -> None:
    """Work that an interrupt can reach: it comes back to the interpreter all the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)
    raise AssertionError("nothing interrupted this")


def test_a_time_limit_in_the_body_is_a_failed_try(app: Application) -> None:
    """NATIVE-1: the interrupt fails that try like an exception would; the next one completes the step."""

    @app.actor(time_limit=30, max_retries=1)
    def slow() -> str:
        app.calls.append("slow")
        if len(app.calls) == 1:
            spin()
        return "in time"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(slow)

    app.start(time_limits=True)
    handle = app.run(one)
    assert handle.result() == "in time"
    assert app.calls == ["slow", "slow"]
    step = handle.actions()[0]
    assert step.tries == 1  # attempts may be more: a limit that ran out before the body began gave the claim back
    failed = [event for event in handle.events() if event.type == "action.failed"]
    assert [event.detail for event in failed] == ["dramatiq.middleware.time_limit.TimeLimitExceeded: "]


def test_a_time_limit_of_the_step_alone_is_kept(applications: Applications) -> None:
    """API with_options(time_limit=…): the message carries it; the row knows until when a worker may be at it."""
    app = applications("sqlite")

    @app.actor
    def slow() -> None:
        app.calls.append(app.sql("SELECT time_limit_at - started_at FROM {action_runs}")[0][0])
        spin()

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(slow).with_options(time_limit=40).run()

    app.start(time_limits=True)
    with pytest.raises(FlowFailedError, match="TimeLimitExceeded"):
        app.run(one).result()
    assert app.calls == [40]


def test_shutdown_in_the_body_releases_the_step_and_spends_no_try(app: Application) -> None:
    """NATIVE-4, C44: pending again, no try spent, the message back in its queue; the next worker runs it."""
    if app.kind == "stub":
        pytest.skip("StubBroker forgets what a stopping worker has prefetched")

    @app.actor(notify_shutdown=True)
    def long() -> str:
        app.calls.append("long")
        if len(app.calls) == 1:
            spin()
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(long)

    handle = one.send()
    app.start(threads=1)
    eventually(lambda: app.calls)
    app.stop()
    step = handle.actions()[0]
    if step.status != "completed":  # the thread that stops may just have had the time to take it up again
        assert (step.status, step.tries, step.claims, step.attempts) == ("pending", 0, 0, 1)
        assert app.types(handle)[-1] == "action.released"
        assert app.messages() >= 1
    app.start()
    assert app.ended(handle) == "completed"
    step = handle.actions()[0]
    assert (step.tries, step.attempts) == (0, 2)
    assert app.calls == ["long", "long"]
    assert app.types(handle).count("action.released") == 1
    app.drain()
    assert app.messages() == 0


def test_shutdown_in_a_compensation_releases_it(applications: Applications) -> None:
    """NATIVE-4: an undo that a deployment cuts off is undone by the next worker, once recorded."""
    app = applications("sqlite")

    @app.actor(notify_shutdown=True)
    def undo() -> None:
        app.calls.append("undo")
        if app.calls.count("undo") == 1:
            spin()

    step, refuse = app.actor(lambda: None, actor_name="step"), app.step("refuse", raises=ValueError())

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(refuse)

    handle = one.send()
    app.start()
    eventually(lambda: "undo" in app.calls)
    app.stop()
    app.start()
    assert app.ended(handle) == "failed"
    row = handle.compensations()[0]
    assert (row.status, row.tries, row.attempts) == ("completed", 0, 2)
    assert app.types(handle).count("compensation.step_released") == 1
    assert handle.rollback == "done"


def test_a_released_step_whose_message_is_then_too_old_fails_and_is_not_forgotten(applications: Applications) -> None:
    """NATIVE-3, NATIVE-4: the message that goes back is one of the row as it is now."""
    app = applications("sqlite")

    @app.actor(notify_shutdown=True, max_age=400)
    def long() -> None:
        app.calls.append("long")
        spin()

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(long)

    handle = one.send()
    app.start()
    eventually(lambda: app.calls)
    app.stop()
    assert handle.actions()[0].status == "pending"
    eventually(lambda: app.engine.now() - handle.actions()[0].created_at > 450)
    app.start()
    assert app.ended(handle) == "failed"
    error = handle.actions()[0].error
    assert error is not None
    assert error["type"].endswith("MessageTooOldError")
    assert app.calls == ["long"]


@pytest.mark.parametrize("interrupt", [TimeLimitExceeded, Shutdown])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_an_interrupt_during_the_claim_gives_the_claim_back(
    kind: str, interrupt: type[BaseException], applications: Applications
) -> None:
    """FENCE-5: raised after the claim's result is known, and the claim given back by its token; nothing ran, nothing is lost."""
    app = applications(kind)
    step = app.step("step", gives="done")

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(step)

    handle = one.send()
    claimed = Faults(app.store).pause(f.CLAIM, lambda: raise_thread_exception(threading.get_ident(), interrupt))
    app.start()
    assert app.ended(handle) == "completed"
    app.drain()
    assert claimed.met == 1
    assert app.calls == [("step",)]
    row = handle.actions()[0]
    assert (row.tries, row.attempts, row.result) == (0, 2, "done")
    assert app.types(handle) == [
        "flow.started",
        "action.started",
        "action.released",
        "action.started",
        "action.completed",
        "flow.completed",
    ]
    assert app.messages() == 0


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "stub"])
def test_a_slow_outcome_outlasts_the_time_limit_and_the_success_is_recorded_once(kind: str, applications: Applications) -> None:
    """C43, FENCE-5: a limit of 60 ms, an outcome that takes four times as long, one thread; then ten more steps."""
    app = applications(kind)

    @app.actor(time_limit=60, max_retries=3)
    def quick() -> str:
        app.calls.append("quick")
        return "kept"

    plain = app.step("plain", gives=1)

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(quick)

    @app.workflow
    def ten(flow: Flow) -> int:
        return sum(flow.run(plain, n) for n in range(10))

    slow = Faults(app.store).pause(f.COMPLETE, lambda: time.sleep(0.25))
    worker = app.start(threads=1, time_limits=True)
    threads = list(worker.workers)
    handle = app.run(one)
    app.drain()
    assert slow.met == 1
    assert handle.result() == "kept"
    assert app.calls == ["quick"]
    assert app.types(handle).count("action.completed") == 1
    assert app.types(handle).count("action.failed") == 0
    assert app.run(ten).result() == 10
    assert [thread for thread in threads if not thread.is_alive()] == []


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_slow_outcome_of_a_failing_body_outlasts_the_time_limit(kind: str, applications: Applications) -> None:
    """C43: the failure is recorded once, the thread lives, and ten more steps run on it."""
    app = applications(kind)

    @app.actor(time_limit=60)
    def bad() -> None:
        app.calls.append("bad")
        raise ValueError("business")

    plain = app.step("plain", gives=1)

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(bad)

    @app.workflow
    def ten(flow: Flow) -> int:
        return sum(flow.run(plain, n) for n in range(10))

    faults = Faults(app.store)
    slow = faults.pause(f.FAIL, lambda: time.sleep(0.25))
    given_up = faults.pause(f.GIVE_UP, lambda: time.sleep(0.25))
    worker = app.start(threads=1, time_limits=True)
    threads = list(worker.workers)
    handle = app.run(one)
    app.drain()
    assert (slow.met, given_up.met) == (1, 1)
    assert handle.status == "failed"
    error = handle.actions()[0].error
    assert error is not None
    assert error["type"] == "builtins.ValueError"
    assert app.calls == ["bad"]
    assert app.types(handle).count("action.failed") == 1
    assert app.run(ten).result() == 10
    assert [thread for thread in threads if not thread.is_alive()] == []


def test_a_drive_that_is_interrupted_is_made_again(app: Application) -> None:
    """FENCE-5: a time limit in the workflow function aborts the drive uncommitted; the run is driven again and not failed."""
    step = app.step("step", gives="done")

    @app.workflow(time_limit=30)
    def dawdles(flow: Flow) -> str:
        app.calls.append("drive")
        if app.calls.count("drive") == 1:
            spin()
        return flow.run(step)

    app.start(time_limits=True)
    handle = app.run(dawdles)
    assert handle.result() == "done"
    assert app.types(handle) == ["flow.started", "action.started", "action.completed", "flow.completed"]


def test_an_interrupt_that_the_body_catches_is_the_bodys_own_business(applications: Applications) -> None:
    """NATIVE-1: a body may clean up and return; then it has succeeded."""
    app = applications("sqlite")

    @app.actor(time_limit=30)
    def cleans() -> str:
        try:
            spin()
        except TimeLimitExceeded:
            return "partial"
        return "never"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(cleans)

    app.start(time_limits=True)
    assert app.run(one).result() == "partial"


def test_a_body_can_see_that_its_run_no_longer_wants_it(app: Application) -> None:
    """C31, API Step.cancelled: a running step polls; its late result is rejected."""
    gate = threading.Event()

    @app.actor
    def watches() -> str:
        step = current_step()
        assert step is not None
        assert not step.cancelled
        gate.set()
        eventually(lambda: step.cancelled)
        return "too late"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(watches)

    handle = one.send()
    app.start()
    assert gate.wait(20)
    assert handle.cancel("enough") is True
    app.drain()
    assert handle.status == "cancelled"
    step = handle.actions()[0]
    assert (step.status, step.result) == ("cancelled", None)
