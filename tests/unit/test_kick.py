"""The kick: what it sends, what it leaves, what it says (KICK-1, CLAIM-3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog

from dramatiq_saga import FlowHandle, FlowNotFoundError, Settings
from dramatiq_saga.events import ActionRedispatched, subscribe, unsubscribe
from dramatiq_saga.recovery.doctor import repair
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.step import OPTION
from tests.support.workbench import MakeBench, Workbench


def parked(bench: Workbench) -> FlowHandle[Any]:
    """A run whose first step is pending, its messages lost."""
    run = bench.send()
    bench.drive(run)
    bench.lose_messages()
    return run


def claimed(bench: Workbench, *, stale_in: int | None) -> FlowHandle[Any]:
    """A run whose first step is running, on a worker that is gone."""
    run = parked(bench)
    stale_at = None if stale_in is None else bench.clock.now() + stale_in * 1000
    bench.write(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, started_at = ?, worker_id = 'gone', reclaim_stale_at = ? "
        "WHERE run_id = ?", bench.clock.now(), stale_at, run.id,
    )  # fmt: skip
    return run


def failed_once(bench: Workbench, name: str) -> FlowHandle[Any]:
    def body(*_: Any) -> Any:
        bench.bodies.pop(name, None)
        raise ValueError("not this time")

    bench.bodies[name] = body
    run = bench.send()
    bench.work_until(lambda: any(step.actor == name and step.status == "failed" for step in run.actions()))
    bench.lose_messages()
    return run


def test_a_run_that_lost_everything_goes_on(bench: Workbench) -> None:
    """KICK-1."""
    run = parked(bench)
    report = run.kick()
    assert report.driven
    assert [(row.kind, row.sequence, row.actor) for row in report.sent] == [("step", 1, "book_hotel")]
    assert report.left == ()
    assert sorted(kind for kind, _ in bench.asked()) == ["drive", "step"]
    bench.work_until(lambda: run.status == "completed")
    assert [name for name, _ in bench.done] == ["book_hotel", "book_flight", "pay"]


def test_a_step_between_two_tries_is_tried_now_and_no_try_is_renewed(bench: Workbench) -> None:
    """KICK-1, NATIVE-1."""
    run = failed_once(bench, "pay")
    report = run.kick()
    assert [(row.sequence, row.status) for row in report.sent] == [(3, "failed")]
    message = next(message for message in bench.messages() if message.options[OPTION]["kind"] == "step")
    assert (message.options["retries"], message.options[OPTION]["attempts"]) == (1, 1)
    bench.work_until(lambda: run.status == "completed")
    assert run.actions()[2].tries == 1


@pytest.mark.parametrize(("stale_in", "why"), [(None, "reclaim is off"), (60, "has not passed")])
def test_a_running_step_without_a_passed_deadline_is_left_to_its_worker(
    bench: Workbench, stale_in: int | None, why: str
) -> None:
    """KICK-1: it cannot be told apart from one that is worked on."""
    run = claimed(bench, stale_in=stale_in)
    report = run.kick()
    assert report.sent == ()
    (left,) = report.left
    assert (left.sequence, left.status) == (1, "running")
    assert why in str(left.left)
    assert bench.asked() == [("drive", None)]


def test_a_running_step_whose_deadline_has_passed_is_reclaimed(bench: Workbench) -> None:
    """KICK-1, RECLAIM-3."""
    run = claimed(bench, stale_in=60)
    bench.advance(60)
    assert [row.sequence for row in run.kick().sent] == [1]
    bench.work_until(lambda: run.status == "completed")


def test_a_kick_refills_what_the_doctor_has_spent(bench: Workbench) -> None:
    """KICK-1: the budget of the run and of its unfinished rows."""
    run, other = parked(bench), parked(bench)
    bench.write("UPDATE {action_runs} SET repair_attempts = 10, repair_after = 1")
    bench.write("UPDATE {flow_runs} SET repair_attempts = 10, repair_after = 1")
    bench.advance(600)
    assert repair(bench.engine, bench.sender).repaired == 0
    run.kick()
    assert bench.row(run, 1, "repair_attempts", "repair_after") == (0, None)
    assert bench.run_row(run, "repair_attempts", "repair_after") == (0, None)
    assert bench.row(other, 1, "repair_attempts") == (10,)
    assert bench.run_row(other, "repair_attempts") == (10,)
    bench.lose_messages()
    assert repair(bench.engine, bench.sender).steps == 1


def test_a_kick_whose_own_messages_are_lost_is_made_good_by_the_doctor(bench: Workbench) -> None:
    """KICK-1, DRIVE-2: the kick is a wake, and a wake that no drive has seen is the doctor's."""
    run = parked(bench)
    run.kick()
    bench.lose_messages()
    bench.advance(60)
    report = repair(bench.engine, bench.sender)
    assert (report.runs, report.steps) == (1, 1)


def test_a_held_run_is_driven_at_once_by_a_kick(bench: Workbench) -> None:
    """KICK-1, HISTORY-1: after the deploy that mends it nobody has to wait for its window."""
    fitting = bench.flow_function
    run = parked(bench)
    bench.write("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = 1 WHERE id = ?", run.id)
    bench.flow_function = lambda flow, _: flow.run(bench.actors["pay"])
    bench.drive(run)
    assert bench.run_row(run, "hold_count") == (1,)
    bench.flow_function = fitting
    run.kick()
    bench.work_until(lambda: run.status == "completed")
    assert bench.run_row(run, "hold_error", "hold_until") == (None, None)


def test_the_undo_that_a_rollback_is_parked_on_is_sent_again(bench: Workbench) -> None:
    """KICK-1: of the level that runs, and of no other."""
    run = failed_once(bench, "pay")
    run.compensate()
    bench.lose_messages()
    report = run.kick()
    assert (report.status, report.rollback) == ("rolling_back", "running")
    assert [(row.kind, row.sequence, row.actor) for row in report.rows] == [("compensation", 2, "cancel_flight")]
    bench.work_until(lambda: run.status == "cancelled")
    assert [name for name, _ in bench.done][-2:] == ["cancel_flight", "cancel_hotel"]


def test_a_run_that_has_ended_is_left_as_it_is(bench: Workbench) -> None:
    """KICK-1: the report says so."""
    run = bench.send()
    bench.work_until(lambda: run.status == "completed")
    before = bench.run_row(run, "revision", "wakes"), len(run.events())
    report = run.kick()
    assert (report.driven, report.status, report.rows) == (False, "completed", ())
    assert (bench.run_row(run, "revision", "wakes"), len(run.events())) == before
    assert bench.asked() == []


def test_what_a_run_waits_for_is_in_the_report(bench: Workbench) -> None:
    """KICK-1: nothing is sent for a signal or a moment, and the report says what ends it."""

    def waits(flow: Any, traveller: str) -> Any:
        if traveller == "ada":
            return flow.await_signal("papers", wait_seconds=60)
        return flow.sleep(60) if traveller == "bob" else flow.await_signal("papers")

    bench.flow_function = waits
    runs = [bench.send(*who) for who in (("ada",), ("bob",), ("cyd",))]
    for run in runs:
        bench.drive(run)

    def told() -> list[tuple[str, int, str, str, str]]:
        return [
            (row.kind, row.sequence, row.actor, row.status, (row.left or "").partition("20")[0])
            for run in runs
            for row in run.kick().rows
        ]

    assert told() == [
        ("wait", 1, "papers", "waiting", "it ends with that signal or, at the latest, at "),
        ("wait", 1, "timer", "waiting", "it ends at "),
        ("wait", 1, "papers", "waiting", "it ends with that signal"),
    ]
    bench.advance(60)
    assert [why for *_, why in told()] == ["it has been due since ", "it has been due since ", "it ends with that signal"]


def test_a_run_that_is_not_there_is_said_to_be_missing(bench: Workbench) -> None:
    with pytest.raises(FlowNotFoundError):
        kick(bench.engine, "nobody", bench.sender)


def test_the_history_says_that_somebody_kicked(bench: Workbench) -> None:
    """EVENT-1."""
    run = parked(bench)
    run.kick()
    assert [(event.type, event.detail) for event in run.events()][-2:] == [
        ("flow.redriven", "kicked"), ("action.redispatched", "kicked"),
    ]  # fmt: skip


def test_a_kick_that_lost_to_a_drive_looks_again(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """STATUS-1: the write repeats the revision and wakes that were read."""
    bench = make_bench(settings=Settings())
    run = parked(bench)
    plain = bench.engine.store.write
    calls = []

    def write(operation: Callable[[Any], Any]) -> Any:
        calls.append(operation)
        if len(calls) == 1:
            plain(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = 1 WHERE id = ?", (run.id,)))
        return plain(operation)

    monkeypatch.setattr(bench.engine.store, "write", write)
    assert run.kick().driven
    assert len(calls) == 2
    assert bench.run_row(run, "wakes") == (3,)


def test_a_kick_that_the_database_lost_sends_nothing_and_says_so(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLAIM-3: where COMMIT can silently roll back, the refill is read back; claim_not_committed is journalled."""
    bench = make_bench(joins=False)
    run = parked(bench)
    bench.write("UPDATE {flow_runs} SET repair_attempts = 7 WHERE id = ?", run.id)
    plain = bench.engine.store.write

    def silently_rolled_back(operation: Callable[[Any], Any]) -> Any:
        answers = []

        def through(tx: Any) -> None:
            answers.append(operation(tx))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            plain(through)
        return answers[0]

    monkeypatch.setattr(bench.engine.store, "commit_is_proof", False)
    monkeypatch.setattr(bench.engine.store, "write", silently_rolled_back)
    with structlog.testing.capture_logs() as logs:
        report = run.kick()
    assert (report.committed, report.driven, report.sent) == (False, False, ())
    assert bench.asked() == []
    (line,) = [line for line in logs if line["event"] == "claim_not_committed"]
    assert (line["run_id"], line["workflow"], line["status"], line["repair_attempts"]) == (run.id, "trip", "running", 7)


def test_a_kick_inside_a_host_transaction_commits_or_vanishes_with_it(make_bench: MakeBench) -> None:
    """HOST-1, EVENT-2: rows, messages and what listeners hear."""
    bench = make_bench()
    run = parked(bench)
    heard: list[str] = []

    def listener(event: ActionRedispatched) -> None:
        heard.append(event.reason)

    subscribe(listener, ActionRedispatched)
    database = bench.engine.store.database
    try:
        with database.atomic() as transaction:
            assert run.kick().driven
            transaction.rollback()
        assert (bench.asked(), heard, bench.run_row(run, "wakes")) == ([], [], (1,))
        with database.atomic():
            assert run.kick().driven
            assert heard == []
        assert heard == ["kicked"]
        assert len(bench.asked()) == 2
    finally:
        unsubscribe(listener, ActionRedispatched)
        database.close()


def test_a_step_that_waits_for_a_signal_is_left_to_it(bench: Workbench) -> None:
    """KICK-1, RSIG-1: a kick spends no cycle; the run is driven, and says why the step is sent nothing. The doctor leaves it alone too."""

    def fails(*_: Any) -> Any:
        raise ValueError("declined")

    bench.bodies["pay"] = fails
    bench.flow_function = lambda flow, _: (
        flow.action(bench.actors["pay"], 1).with_options(max_retries=0).retry_on_signal("go").run()
    )
    run = bench.send()
    bench.work_until(lambda: run.status == "waiting")
    report = run.kick()
    assert [(row.status, row.left) for row in report.left] == [("awaiting_retry", "it waits for a signal to be tried again")]
    assert report.sent == ()
    bench.work_until(lambda: not bench.messages())
    bench.advance(10_000)
    swept = bench.sweep()
    assert swept.repair is not None
    assert swept.repair.repaired == 0
    assert bench.row(run, 1, "status", "cycle", "attempts") == ("awaiting_retry", 0, 1)
    del bench.bodies["pay"]
    run.signal("go")
    bench.work_until(lambda: run.status == "completed")
