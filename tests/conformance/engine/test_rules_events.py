"""Events and anomalies: told once, after the commit, and never to anybody's harm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from dramatiq_saga import Flow, Settings, events, get_flow
from dramatiq_saga.engine import drive as drives
from dramatiq_saga.journal import history
from tests.support.application import Application, Applications
from tests.support.bench import Background, Bench
from tests.support.waiting import DEADLINE


@pytest.fixture
def listen() -> Iterator[Any]:
    """``listen(function, *classes)``, for the length of a test."""
    functions: list[Any] = []

    def subscribe(function: Any, *classes: Any) -> None:
        functions.append(function)
        events.subscribe(function, *classes)

    yield subscribe
    for function in functions:
        events.unsubscribe(function)


# --- EVENT-1 ---------------------------------------------------------------------------------------------------------


def test_every_line_of_the_history_is_told_as_one_typed_event(joined: Application) -> None:
    """EVENT-1: the same words in the same order, with their rows; CompensationStarted once, each undo by itself."""
    app = joined
    step, undo = app.step("step", gives={"id": 7}), app.step("undo")
    tries: list[int] = []

    @app.actor(max_retries=1)
    def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("busy")

    refuse = app.step("refuse", raises=ValueError("no such address"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo, 1).run()
        flow.side_effect("dice", lambda: 4)
        flow.action(flaky).compensate_with(undo, 2).run()
        flow.run(refuse)

    with events.listening(events.Event) as heard:
        handle = order.send()
        app.start(threads=1)  # two threads may tell of two commits in either order
        app.ended(handle)
        app.drain()
    words = [{history.ACTION_GIVEN_UP: history.ACTION_FAILED}.get(event.type, event.type) for event in handle.events()]
    assert [event.type for event in heard] == words
    assert {event.run_id for event in heard} == {handle.id}
    assert {event.workflow_name for event in heard} == {"order"}

    def only(cls: Any) -> list[Any]:
        return [event for event in heard if type(event) is cls]

    assert [event.action.sequence for event in only(events.ActionCompleted)] == [1, 3]
    assert only(events.ActionCompleted)[0].action.result == {"id": 7}
    assert [(event.action.actor, event.action.given_up) for event in only(events.ActionFailed)] == [
        ("flaky", False), ("refuse", False), ("refuse", True),
    ]  # fmt: skip
    [side] = only(events.SideEffectRecorded)
    assert (side.sequence, side.name, side.stored_value) == (2, "dice", b"4")
    [started] = only(events.CompensationStarted)
    assert (started.ends_as, started.steps) == ("failed", (3, 1))
    assert [event.compensation.sequence for event in only(events.CompensationCompleted)] == [3, 1]
    [finished] = only(events.RollbackFinished)
    assert (finished.rollback, finished.undone, finished.error) == ("done", (3, 1), None)
    [failed] = only(events.FlowFailed)
    assert failed.error["cause"]["message"] == "no such address"


def test_a_claim_is_told_before_its_body_runs(joined: Application) -> None:
    """EVENT-1: ActionStarted and CompensationStepStarted, one for each claim, in the order of the history."""
    app = joined
    step, undo, refuse = app.step("step"), app.step("undo"), app.step("refuse", raises=ValueError("no"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(refuse)

    with events.listening(events.ActionStarted, events.CompensationStepStarted) as heard:
        app.start(threads=1)
        handle = app.run(order)
        app.drain()
    expected = [word for word in app.types(handle) if word in ("action.started", "compensation.step_started")]
    assert [event.type for event in heard] == expected == ["action.started", "action.started", "compensation.step_started"]


def test_a_good_run_and_a_cancelled_one_are_told_to_their_end(lite: Application) -> None:
    """EVENT-1: FlowStarted, FlowCompleted with its result, FlowCancelled with its reason."""
    step = lite.step("step")

    @lite.workflow
    def order(flow: Flow) -> dict[str, int]:
        flow.run(step)
        return {"n": 1}

    with events.listening(events.FlowEvent) as heard:
        done = order.run_sync()
        other = order.send()
        other.cancel("sold out")
    assert [(event.run_id, type(event)) for event in heard] == [
        (done.id, events.FlowStarted), (done.id, events.FlowCompleted),
        (other.id, events.FlowStarted), (other.id, events.FlowCancelled),
    ]  # fmt: skip
    assert heard[1].result == {"n": 1}  # type: ignore[attr-defined]
    assert heard[3].reason == "sold out"  # type: ignore[attr-defined]


# --- EVENT-2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_listener_that_raises_at_everything_fails_nothing(
    applications: Applications, journal: list[dict[str, Any]], listen: Any, kind: str
) -> None:
    """EVENT-2: claims, outcomes, side effects, undos and ends of runs are as without it; each error is logged."""
    app = applications(kind)
    step, undo, refuse = app.step("step"), app.step("undo"), app.step("refuse", raises=ValueError("no"))

    def broken(event: events.Event) -> None:
        raise RuntimeError(f"cannot hear {event.type}")

    listen(broken, events.Event)

    @app.workflow
    def bad(flow: Flow) -> None:
        flow.action(step, flow.side_effect("dice", lambda: 4)).compensate_with(undo).run()
        flow.run(refuse)

    @app.workflow
    def good(flow: Flow) -> int:
        flow.run(step, 1)
        return 1

    app.start()
    handles = [bad.send(), good.send()]
    assert [app.ended(handle) for handle in handles] == ["failed", "completed"]
    app.drain()
    assert sorted(app.calls) == [("refuse",), ("step", 1), ("step", 4), ("undo",)]
    assert handles[0].rollback == "done"
    assert all(action.attempts == 1 for handle in handles for action in handle.actions())
    assert app.messages() == 0
    assert len([line for line in journal if "listener" in line]) >= 8


def test_a_listener_hears_after_the_commit_and_may_use_the_store_and_send(joined: Application, listen: Any) -> None:
    """EVENT-2: outside every transaction of the engine: it sees what it hears of, writes, and starts runs of its own."""
    app = joined
    seen: list[Any] = []
    step, refuse = app.step("step"), app.step("refuse", raises=ValueError("no"))

    @app.workflow
    def follow_up(flow: Flow, run_id: str) -> None:
        flow.run(step, run_id)

    @app.workflow
    def order(flow: Flow) -> None:
        flow.side_effect("dice", lambda: 4)
        flow.run(step, "first")
        flow.run(refuse)

    def hears(event: events.Event) -> None:
        if event.workflow_name != "order":
            return
        assert not app.store.joined()
        handle = get_flow(event.run_id)
        handle.tag(event.type, len(seen))
        row = {"action.completed": lambda: handle.actions()[0].status, "flow.failed": lambda: handle.status}.get(event.type)
        seen.append((event.type, row() if row else None, handle.events()[-1].type if row else None))
        if isinstance(event, events.FlowFailed):
            follow_up.send(event.run_id)

    listen(hears, events.FlowEvent, events.ActionCompleted, events.SideEffectRecorded)
    handle = order.send()
    app.start(threads=1)
    app.ended(handle)
    app.drain()
    assert [kind for kind, _, _ in seen] == ["flow.started", "side_effect.recorded", "action.completed", "flow.failed"]
    assert seen[2][1] == "completed"
    assert seen[3][1:] == ("failed", "flow.failed")
    assert set(handle.tags) == {kind for kind, _, _ in seen}
    assert app.calls[-1] == ("step", handle.id)


def test_a_listener_that_takes_its_time_holds_no_lock(lite: Application, listen: Any) -> None:
    """EVENT-2: while it stands still, other runs are started, claimed and finished."""
    begun, go = threading.Event(), threading.Event()
    step = lite.step("step")

    @lite.workflow
    def slow(flow: Flow) -> None:
        flow.run(step, "slow")

    @lite.workflow
    def quick(flow: Flow) -> None:
        flow.run(step, "quick")

    def stands(event: events.ActionCompleted) -> None:
        if event.workflow_name == "slow":
            begun.set()
            assert go.wait(DEADLINE)

    listen(stands, events.ActionCompleted)
    lite.start(threads=2)
    first = slow.send()
    assert begun.wait(DEADLINE)
    try:
        assert lite.ended(quick.send()) == "completed"
    finally:
        go.set()
    assert lite.ended(first) == "completed"


# --- ANOM-1 ----------------------------------------------------------------------------------------------------------


class Slow:
    """A workflow of one step, whose claims the test lets meet."""

    def declare(self, bench: Bench) -> None:
        def charge() -> str:
            return "charged"

        step = bench.actor(charge)

        def order(flow: Flow) -> str:
            return str(flow.action(step).reclaim_stale_after(60).run())

        bench.workflow(order)


@pytest.mark.claims_alone
def test_a_lost_claim_and_a_rejected_outcome_are_journalled_with_their_fields(by_hand: Any, listen: Any) -> None:
    """ANOM-1, CLAIM-2, FENCE-1: both attempt counts, the row's state, and a listener that fails to take the last copy."""
    bench = by_hand(Slow().declare)
    run = bench.start("order")
    bench.deliver(bench.take())
    message = bench.message(bench.take())
    stop = bench.stop("outcome and decision")
    slow = Background(lambda: bench.deliver(message))
    stop.wait_reached()
    row = {"row": "action", "run_id": run, "sequence": 1, "actor": "charge"}

    bench.deliver(message)  # a second delivery of the same message
    [(code, lost)] = bench.anomalies.lines
    assert code == "claim_lost"
    assert {**row, "status": "running", "orphaned": True}.items() <= lost.items()

    bench.engine.clock.advance(61_000)
    before = bench.events(run)

    def refuses(event: events.ActionOutcomeRejected) -> None:
        assert (event.outcome, event.result, event.action.attempts) == ("completed", "charged", 2)
        raise LookupError("no such reconciliation")

    listen(refuses, events.ActionOutcomeRejected)
    bench.deliver(message)  # the reclaim: attempt 2, which completes
    told = bench.events(run)
    assert told == [*before, "action.started", "action.completed", "flow.completed"]
    stop.go()
    slow.result()
    assert bench.events(run) == told  # none of these is history
    (code, rejected), (undelivered_code, undelivered) = bench.anomalies.lines[1:]
    assert code == "outcome_rejected"
    assert {
        **row,
        "outcome": "completed",
        "claimed_attempts": 1,
        "attempts": 2,
        "status": "completed",
    }.items() <= rejected.items()
    assert undelivered_code == "rejection_undelivered"
    assert row.items() <= undelivered.items()
    assert repr(undelivered["error"]) == "LookupError('no such reconciliation')"
    assert "refuses" in str(undelivered["listener"])


class BrokenLogger:
    def __getattr__(self, name: str) -> Any:
        raise OSError("disk full")


@pytest.mark.parametrize("how", ["logger", "level", "off"])
def test_a_broken_logger_or_level_never_fails_a_message(
    applications: Applications, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """ANOM-1: a late outcome is refused, the anomaly cannot be written, and the worker goes on with the next run."""
    begun, go = threading.Event(), threading.Event()
    app = applications("sqlite", settings=Settings(logging={"anomaly_level": None} if how == "off" else {}))  # type: ignore[arg-type]
    if how == "level":
        app.engine.anomalies._level = "shout"
    step = app.step("step")

    @app.actor
    def slow() -> None:
        begun.set()
        assert go.wait(DEADLINE)

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(slow)

    @app.workflow
    def later(flow: Flow) -> None:
        flow.run(step)

    handle = order.send()
    app.start(threads=1)
    assert begun.wait(DEADLINE)
    assert handle.cancel() is True
    if how == "logger":
        monkeypatch.setattr(structlog, "get_logger", lambda *args, **kwargs: BrokenLogger())
    go.set()
    assert app.ended(later.send()) == "completed"
    assert handle.actions()[0].status == "cancelled"
    app.drain()
    assert app.messages() == 0


def test_a_run_that_was_driven_in_vain_is_no_anomaly(by_hand: Any) -> None:
    """ANOM-1: a drive with nothing to see is ordinary; the journal stays empty on a good run."""
    bench = by_hand(Slow().declare)
    run = bench.start("order")
    for _ in range(2):
        bench.deliver(bench.take())
    assert drives.drive(bench.engine, run, bench.sender) is drives.Driven.ENDED
    assert bench.codes() == []
