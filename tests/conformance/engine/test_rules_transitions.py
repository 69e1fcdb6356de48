"""Statuses: who may change them, and what the loser learns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowCancelledError, FlowNotFoundError, FlowStatus, get_flow
from dramatiq_saga.engine import fence, runs
from dramatiq_saga.engine.claim import Claim, ClaimAttempt
from dramatiq_saga.engine.drive import Driven, drive
from dramatiq_saga.errors import ConcurrentTransitionError
from dramatiq_saga.step import Delivery
from tests.support.application import Application
from tests.support.bench import Background, Bench


def order(bench: Bench) -> None:
    """A workflow of one step that can be undone and one that cannot."""

    def charge() -> str:
        return "charged"

    def refund() -> None: ...

    def ship() -> None: ...

    def broken() -> None:
        raise ValueError("no")

    first, undo, last, fails = bench.actor(charge), bench.actor(refund), bench.actor(ship), bench.actor(broken)

    def order(flow: Flow) -> str:
        charged = flow.action(first).compensate_with(undo).run()
        flow.run(last)
        return str(charged)

    def doomed(flow: Flow) -> None:
        flow.run(fails)

    bench.workflow(order)
    bench.workflow(doomed)


ENDINGS: dict[str, Callable[[Bench], str]] = {}


def ending(fn: Callable[[Bench], str]) -> Callable[[Bench], str]:
    ENDINGS[fn.__name__] = fn
    return fn


@ending
def completed(bench: Bench) -> str:
    run = bench.start("order")
    bench.run()
    return run


@ending
def failed(bench: Bench) -> str:
    run = bench.start("doomed")
    bench.run()
    return run


@ending
def cancelled(bench: Bench) -> str:
    run = bench.start("order")
    bench.deliver(bench.take())
    bench.cancel(run)
    return run


def row_of(bench: Bench, run: str) -> Any:
    return bench.one("SELECT * FROM {flow_runs} WHERE id = ?", run)


@pytest.mark.parametrize("status", list(ENDINGS))
def test_a_terminal_status_is_never_left(by_hand: Any, status: str) -> None:
    """STATUS-1, STATUS-3: cancel, compensate, a hold, a drive and a message of its own change nothing of a run that has ended."""
    bench = by_hand(order)
    run = ENDINGS[status](bench)
    assert bench.status(run) == status
    bench.sender.queue.clear()
    before, history = row_of(bench, run), bench.events(run)
    for call in (bench.cancel, bench.compensate):
        if status == "cancelled":
            assert call(run) is False
        else:
            with pytest.raises(ConcurrentTransitionError, match=f"it is {status}, and that stands"):
                call(run)
    assert runs.as_found(bench.engine, run) is None
    revision, created_at = bench.one("SELECT revision, created_at FROM {flow_runs} WHERE id = ?", run)
    found = runs.Found(run, "order", revision, 0, created_at)
    assert runs.hold(bench.engine, found, ValueError("late"), bench.sender, None) is False
    assert drive(bench.engine, run, bench.sender) is Driven.ENDED
    assert row_of(bench, run) == before
    assert bench.events(run) == history
    lost = [fields for code, fields in bench.anomalies.lines if code == "transition_lost"]
    told = {"run_id": run, "workflow": "doomed" if status == "failed" else "order", "observed": "live", "actual": status}
    assert lost == [{**told, "intended": "cancelled"}, {**told, "intended": "rolling_back"}]


def test_the_second_cancel_says_that_it_was_one_already(joined: Application) -> None:
    """STATUS-3, COMP-9: true, then false, then false; the first reason and the one line of history stay."""

    @joined.workflow
    def waits(flow: Flow) -> None: ...

    handle = waits.send()
    assert handle.cancel("first") is True
    assert handle.cancel("second") is False
    assert handle.compensate("third") is False
    with pytest.raises(FlowCancelledError, match="first"):
        handle.result()
    assert joined.types(handle) == ["flow.started", "flow.cancelled"]


def test_a_run_that_does_not_exist_is_named_and_nothing_is_written(lite: Application) -> None:
    """STATUS-3: a wrong id is no race."""

    @lite.workflow
    def waits(flow: Flow) -> None: ...

    handle = waits.send()
    lite.execute("DELETE FROM {flow_runs} WHERE id = ?", handle.id)
    for call in (handle.cancel, handle.compensate, lambda: handle.status, handle.result, lambda: get_flow(handle.id)):
        with pytest.raises(FlowNotFoundError, match=handle.id):
            call()
    with pytest.raises(FlowNotFoundError, match=handle.id):
        handle.tag("k", "v")
    assert lite.sql("SELECT * FROM {tags} WHERE run_id = ?", handle.id) == []


def test_a_drive_that_loses_journals_it_and_looks_again(by_hand: Any) -> None:
    """STATUS-3, ANOM-1: transition_lost says what was observed, intended and found; the engine goes on."""
    bench = by_hand(order)
    run = bench.start("order")
    message = bench.message(bench.take())
    stop = bench.stop("decision")
    slow = Background(lambda: bench.deliver(message))
    stop.wait_reached()
    assert drive(bench.engine, run, bench.sender) is Driven.DECIDED
    stop.go()
    assert slow.result() is Driven.IDLE
    [(code, fields)] = bench.anomalies.lines
    assert code == "transition_lost"
    assert fields == {"run_id": run, "workflow": "order", "observed": "pending", "intended": "suspended", "actual": "moved on"}
    assert len(bench.messages) == 1
    assert bench.steps(run) == [("charge", "pending")]


# --- STATUS-2 --------------------------------------------------------------------------------------------------------


def test_a_step_between_two_tries_is_cancelled_with_its_run_and_never_tried_again(lite: Application) -> None:
    """STATUS-2, CLAIM-1: `failed` with tries left is live; the try that Dramatiq has scheduled finds nothing to claim."""

    @lite.actor(max_retries=5, min_backoff=200, max_backoff=200)
    def flaky() -> None:
        lite.calls.append("tried")
        tried.set()
        raise OSError("busy")

    @lite.workflow
    def waits(flow: Flow) -> None:
        flow.run(flaky)

    tried = threading.Event()
    handle = waits.send()
    lite.start()
    assert tried.wait(20)
    assert handle.cancel() is True
    lite.drain()
    assert lite.calls == ["tried"]
    [action] = handle.actions()
    assert (action.status, action.given_up) == ("cancelled", False)
    assert handle.status == "cancelled"


# --- STATUS-4 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["given_up", "refused"])
@pytest.mark.parametrize("how", ["cancelled", "reclaimed"])
def test_a_write_to_a_step_that_has_moved_on_is_refused_with_its_site(by_hand: Any, site: str, how: str) -> None:
    """STATUS-4, NATIVE-2, NATIVE-3: giving up, or refusing a message, counts only for the row as that message left it."""
    bench = by_hand(order)
    run = bench.start("doomed")
    bench.deliver(bench.take())
    message = bench.message(bench.take())
    if site == "given_up":
        delivery = bench.deliver(message)
        assert delivery.state == "failed"
    else:
        delivery = Delivery(message)
    if how == "cancelled":
        bench.cancel(run)
    else:  # somebody else holds the row by now
        assert delivery.job is not None
        assert isinstance(ClaimAttempt(bench.engine, delivery.job, nonce="other").run(), Claim)
    before = bench.all("SELECT * FROM {action_runs} WHERE run_id = ?", run)
    history, status = bench.events(run), bench.status(run)
    if site == "given_up":
        bench.runner.give_up(delivery)
    else:
        bench.runner.refuse(delivery.job, "broken", ValueError("too old"))
    assert bench.all("SELECT * FROM {action_runs} WHERE run_id = ?", run) == before
    assert bench.events(run) == history
    assert bench.status(run) == status
    assert bench.anomalies.lines == [
        ("write_refused", {"site": site, "row": "action", "run_id": run, "sequence": 1, "actor": "broken"})
    ]


def test_a_failed_try_of_a_step_that_has_moved_on_changes_nothing(by_hand: Any) -> None:
    """STATUS-4, FENCE-1: the body fails after its run was cancelled; its report is rejected and no try is spent."""
    bench = by_hand(order)
    run = bench.start("doomed")
    bench.deliver(bench.take())
    message = bench.message(bench.take())
    stop = bench.stop("failed try")
    failing = Background(lambda: bench.deliver(message))
    stop.wait_reached()
    bench.cancel(run)
    stop.go()
    assert failing.result().state == "done"  # nothing for Dramatiq to try again
    assert bench.all("SELECT status, tries, error FROM {action_runs} WHERE run_id = ?", run) == [("cancelled", 0, None)]
    assert bench.codes() == ["outcome_rejected"]


def test_a_note_of_the_next_try_is_lost_on_a_step_that_has_moved_on(by_hand: Any) -> None:
    """STATUS-1, STATUS-4: the note repeats the claim that it is about."""
    bench = by_hand(order)
    bench.start("doomed")
    bench.deliver(bench.take())
    delivery = bench.deliver(bench.take())
    job = delivery.job
    fence.note_next_try(bench.engine, replace(delivery.claim, delivery="another"), 66)
    assert bench.one("SELECT next_try_at FROM {action_runs} WHERE run_id = ?", job.run_id) != (66,)
    fence.note_next_try(bench.engine, delivery.claim, 77)
    assert bench.one("SELECT next_try_at FROM {action_runs} WHERE run_id = ?", job.run_id) == (77,)


# --- C29 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cancel", "compensate"])
@pytest.mark.parametrize("first", ["outcome", "operator"])
def test_a_cancel_at_the_moment_the_last_outcome_commits_gets_a_definite_answer(by_hand: Any, call: str, first: str) -> None:
    """C29, STATUS-1: accepted, or refused with the status; one terminal transition, never cancelled with a result."""
    bench = by_hand(order)
    run = bench.start("order")
    bench.deliver(bench.take())
    bench.deliver(bench.take())
    last = bench.message(bench.take())
    operate = getattr(bench, call)
    if first == "outcome":
        stop = bench.stop("cancel" if call == "cancel" else "plan")
        slow = Background(lambda: operate(run))
        stop.wait_reached()
        bench.deliver(last)
        stop.go()
        with pytest.raises(ConcurrentTransitionError, match="it is completed"):
            slow.result()
        assert bench.status(run) == "completed"
    else:
        stop = bench.stop("outcome and decision")
        slow = Background(lambda: bench.deliver(last))
        stop.wait_reached()
        assert operate(run) is True
        stop.go()
        slow.result()
        bench.run()
        assert bench.status(run) == "cancelled"
    [result] = bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run)
    assert (result is not None) == (first == "outcome")
    ends = [kind for kind in bench.events(run) if kind in ("flow.completed", "flow.failed", "flow.cancelled")]
    assert ends == ["flow.completed" if first == "outcome" else "flow.cancelled"]
    undone = first == "operator" and call == "compensate"
    assert bench.undos(run) == ([("refund", "completed")] if undone else [])


def test_cancels_that_race_with_completions_agree_with_what_stands(joined: Application) -> None:
    """C29: real workers, a dozen rounds; the answer and the row say the same, and the history has one end."""
    app = joined
    step = app.step("step", gives=1)

    @app.workflow
    def short(flow: Flow) -> int:
        return flow.run(step)

    app.start(threads=2)
    for _ in range(12):
        handle = short.send()
        answer: Any
        try:
            answer = handle.cancel()
        except ConcurrentTransitionError as error:
            answer = error.actual
        status = app.ended(handle)
        assert (answer, status) in [(True, "cancelled"), ("completed", "completed")]
        ends = [kind for kind in app.types(handle) if kind in ("flow.completed", "flow.cancelled")]
        assert ends == [f"flow.{status}"]
        if status == FlowStatus.CANCELLED:
            with pytest.raises(FlowCancelledError):
                handle.result()
        else:
            assert handle.result() == 1
