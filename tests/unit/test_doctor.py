"""The doctor: what it sends again, when, how often, and what it leaves alone (DOCTOR-1, DOCTOR-2, NATIVE-1, NATIVE-3)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from dramatiq_saga import FlowFailedError, FlowHandle, Settings
from dramatiq_saga.codec import describe_error
from dramatiq_saga.engine import fence
from dramatiq_saga.engine.claim import Claim, ClaimAttempt, Job
from dramatiq_saga.engine.drive import drive
from dramatiq_saga.errors import WriteRefusedError
from dramatiq_saga.events import ActionRedispatched, subscribe, unsubscribe
from dramatiq_saga.recovery import doctor
from dramatiq_saga.recovery.doctor import RepairReport, repair
from dramatiq_saga.step import OPTION
from tests.support.workbench import MakeBench, Workbench


def settings(**values: Any) -> Settings:
    return Settings.from_mapping({"repair": {"enabled": True, **values}})


def pending_step(bench: Workbench) -> FlowHandle[Any]:
    """A run whose first step is pending, and whose messages are lost."""
    run = bench.send()
    bench.drive(run)
    bench.lose_messages()
    return run


def failing_once(bench: Workbench, name: str) -> None:
    def body(*_: Any) -> Any:
        del bench.bodies[name]
        raise ValueError("not this time")

    bench.bodies[name] = body


def do_repair(bench: Workbench) -> RepairReport:
    return repair(bench.engine, bench.sender)


# --- R1: steps -------------------------------------------------------------------------------------------------------


def test_a_step_whose_message_is_lost_is_sent_again_once_the_grace_is_over(bench: Workbench) -> None:
    """R1 of DOCTOR-1, counted from created_at."""
    run = pending_step(bench)
    bench.advance(59)
    assert do_repair(bench).repaired == 0
    assert bench.asked() == []
    bench.advance(1)
    assert do_repair(bench).steps == 1
    assert bench.asked() == [("step", 1)]
    bench.work_until(lambda: run.status == "completed")


def test_a_repair_that_came_a_moment_ago_is_not_repeated(bench: Workbench) -> None:
    """DOCTOR-1: the pause between two repairs of a row doubles from 10 to 300 seconds."""
    run = pending_step(bench)
    bench.advance(60)
    sent_at = []
    for second in range(0, 800, 5):
        if do_repair(bench).steps:
            sent_at.append(second)
            bench.lose_messages()
        bench.advance(5)
    assert [later - earlier for earlier, later in pairwise(sent_at)] == [10, 20, 40, 80, 160, 300]
    assert bench.row(run, 1, "repair_attempts") == (7,)


def test_a_row_that_has_spent_its_repairs_is_counted_and_left_until_a_kick(make_bench: MakeBench) -> None:
    """DOCTOR-1: max_attempts per row."""
    bench = make_bench(settings=settings(max_attempts=2))
    run = pending_step(bench)
    for _ in range(5):
        bench.lose_messages()
        bench.advance(500)
        report = do_repair(bench)
    assert (report.repaired, report.spent) == (0, 1)
    assert bench.row(run, 1, "repair_attempts", "status") == (2, "pending")
    run.kick()
    bench.lose_messages()
    bench.advance(500)
    assert do_repair(bench).steps == 1


def test_a_row_whose_turn_has_not_come_in_a_long_queue_is_left_alone(make_bench: MakeBench) -> None:
    """DOCTOR-1: with a database broker a message that waits behind older ones is not lost, and spends no repair."""
    bench = make_bench(joins=True)
    bench.send()  # its drive message is the long queue
    bench.advance(1)
    waits_since = bench.clock.now()
    run = bench.send()
    bench.engine.store.write(lambda tx: tx.run("DELETE FROM {messages} WHERE enqueued_at >= ?", (waits_since,)))
    drive(bench.engine, run.id, bench.sender)
    assert bench.asked() == [("drive", None), ("step", 1)]
    bench.advance(3600)
    assert do_repair(bench).steps == 0
    assert bench.row(run, 1, "repair_attempts") == (0,)
    bench.write("DELETE FROM {messages} WHERE enqueued_at >= ?", waits_since)  # it cannot be told that it is gone
    assert do_repair(bench).steps == 0
    bench.lose_messages()
    assert do_repair(bench).steps == 1


def test_a_repair_that_waits_in_a_long_queue_is_the_last(make_bench: MakeBench) -> None:
    """DOCTOR-1: what has been sent again and waits is not sent once more, however long that takes, and keeps its repairs for a loss."""
    bench = make_bench(joins=True)
    run = pending_step(bench)
    bench.advance(60)
    assert do_repair(bench).steps == 1
    for _ in range(20):
        bench.advance(500)
        assert do_repair(bench).steps == 0
    assert bench.row(run, 1, "repair_attempts") == (1,)
    bench.lose_messages()
    assert do_repair(bench).steps == 1


def test_a_step_that_is_being_worked_on_is_not_sent_again(bench: Workbench) -> None:
    """DOCTOR-1: R1 is about pending rows; a claimed one has a worker."""
    run = bench.send()
    seen: list[RepairReport] = []

    def body(*_: Any) -> str:
        bench.advance(600)
        seen.append(do_repair(bench))
        return "booked"

    bench.bodies["pay"] = body
    bench.work_until(lambda: run.status == "completed")
    assert seen[0].repaired == 0
    assert [name for name, _ in bench.done] == ["book_hotel", "book_flight", "pay"]


def test_a_fresh_message_renews_no_tries(bench: Workbench) -> None:
    """NATIVE-1: the row's attempts, cycle and tries travel with a message that is sent again."""
    run = bench.send()
    failing_once(bench, "pay")
    bench.work_until(lambda: len(run.actions()) == 3 and run.actions()[2].status == "failed")
    bench.lose_messages()
    bench.advance(20 + 60 + 61)
    assert do_repair(bench).steps == 1
    (message,) = bench.messages()
    assert message.options["retries"] == 1
    facts = dict(message.options[OPTION])
    assert facts.pop("created") == bench.engine.store.read(
        lambda tx: tx.one("SELECT created_at FROM {flow_runs} WHERE id = ?", (run.id,))[0]  # type: ignore[index]
    )
    assert facts == {"kind": "step", "run": run.id, "sequence": 3, "attempts": 1}


def test_a_step_whose_next_try_is_still_to_come_is_left_to_it(bench: Workbench) -> None:
    """DOCTOR-1, beyond: a row between tries is judged by next_try_at, plus the grace."""
    run = bench.send()
    failing_once(bench, "pay")
    bench.work_until(
        lambda: len(run.actions()) == 3 and run.actions()[2].next_try_at is not None and run.actions()[2].tries == 1
    )
    next_try_at = run.actions()[2].next_try_at
    assert next_try_at is not None
    due_in = (next_try_at - bench.clock.now()) / 1000
    assert due_in > 0
    bench.lose_messages()
    bench.advance(due_in + 59)
    assert do_repair(bench).repaired == 0
    bench.advance(1.001)
    assert do_repair(bench).steps == 1
    bench.work_until(lambda: run.status == "completed")


def test_a_try_that_was_never_asked_for_comes_all_the_same(bench: Workbench) -> None:
    """DOCTOR-1, beyond: the worker died between the recorded failure and Dramatiq's retry, and its message is gone."""
    run = pending_step(bench)
    claim = ClaimAttempt(bench.engine, Job("step", run.id, 1, 0, 0, "message"), nonce="1").run()
    assert isinstance(claim, Claim)
    assert fence.fail_try(bench.engine, claim, describe_error(ValueError("not this time")))
    bench.advance(59)
    assert do_repair(bench).repaired == 0
    bench.advance(1)
    assert do_repair(bench).steps == 1
    bench.work_until(lambda: run.status == "completed")


# --- R1: compensations -----------------------------------------------------------------------------------------------


def rolling_back(bench: Workbench) -> FlowHandle[Any]:
    """A run with two completed steps that is being undone; its messages are lost."""
    run = bench.send()

    def stop(*_: Any) -> None:
        raise ValueError("no money")

    bench.bodies["pay"] = stop
    bench.work_until(lambda: len(run.actions()) == 3 and run.actions()[2].status == "failed")
    bench.lose_messages()
    assert run.compensate()
    assert bench.asked() == [("compensation", 2)]
    bench.lose_messages()
    return run


def test_an_undo_whose_message_is_lost_is_sent_again_and_the_rollback_finishes(bench: Workbench) -> None:
    """R1 of DOCTOR-1 for compensations; only of the level that runs."""
    run = rolling_back(bench)
    bench.advance(59)
    assert do_repair(bench).repaired == 0
    bench.advance(1)
    report = do_repair(bench)
    assert (report.compensations, report.steps) == (1, 0)
    assert bench.asked() == [("compensation", 2)]
    bench.work_until(lambda: run.status == "cancelled")
    assert [name for name, _ in bench.done][-2:] == ["cancel_flight", "cancel_hotel"]


def test_no_step_is_sent_while_a_run_rolls_back(bench: Workbench) -> None:
    """DOCTOR-1: under rolling_back no step is sent, whatever its row looks like."""
    run = rolling_back(bench)
    bench.write("UPDATE {action_runs} SET status = 'pending', ended_at = NULL WHERE run_id = ? AND sequence = 3", run.id)
    bench.advance(600)
    assert do_repair(bench).steps == 0
    assert bench.asked() == [("compensation", 2)]


def test_an_undo_of_a_later_level_waits_for_its_turn(bench: Workbench) -> None:
    """COMP-1: levels run one after another, also when the doctor sends."""
    run = rolling_back(bench)
    for _ in range(3):
        bench.advance(600)
        do_repair(bench)
    assert set(bench.asked()) == {("compensation", 2)}
    assert bench.row(run, 1, "repair_attempts", table="compensation_runs") == (0,)


def test_an_undo_whose_next_try_never_came_is_sent_again_with_its_tries(bench: Workbench) -> None:
    """DOCTOR-1, beyond, and NATIVE-1."""
    run = rolling_back(bench)
    failing_once(bench, "cancel_flight")
    bench.advance(60)
    do_repair(bench)
    bench.work_until(lambda: run.compensations()[0].status == "failed")
    bench.lose_messages()
    bench.advance(120)
    assert do_repair(bench).compensations == 1
    (message,) = bench.messages()
    assert (message.actor_name, message.options["retries"]) == ("cancel_flight", 1)
    bench.work_until(lambda: run.status == "cancelled")


def test_an_undo_that_waits_for_its_step_to_end_is_not_sent_early(bench: Workbench) -> None:
    """COMP-9: no refund before the charge has reported, nor by the doctor."""
    run = rolling_back(bench)
    bench.write(
        "UPDATE {compensation_runs} SET not_before = ? WHERE run_id = ? AND sequence = 2", bench.clock.now() + 900_000, run.id
    )
    bench.advance(899)
    assert do_repair(bench).repaired == 0
    bench.advance(61)
    assert do_repair(bench).compensations == 1


# --- R2 --------------------------------------------------------------------------------------------------------------


def test_a_new_run_that_nobody_has_driven_is_driven(bench: Workbench) -> None:
    """R2 of DOCTOR-1: a new run has one wake."""
    run = bench.send()
    assert bench.lose_messages() == 1
    bench.advance(59)
    assert do_repair(bench).runs == 0
    bench.advance(1)
    assert do_repair(bench).runs == 1
    assert bench.asked() == [("drive", None)]
    bench.work_until(lambda: run.status == "completed")
    assert bench.run_row(run, "repair_attempts") == (0,)


def test_a_run_that_is_to_begin_later_is_not_taken_for_a_lost_one(bench: Workbench) -> None:
    """R2 of DOCTOR-1: a delay counts from when the run is to begin."""
    bench.send(delay=600_000)
    bench.advance(600)
    assert do_repair(bench).runs == 0
    bench.advance(60)
    assert do_repair(bench).runs == 1


def test_an_outcome_whose_drive_is_lost_is_followed_up(bench: Workbench) -> None:
    """R2 of DOCTOR-1: the wake that an outcome raised is unseen until a drive commits."""
    run = bench.send()
    bench.work_until(lambda: run.status == "completed")
    run = bench.send()
    bench.drive(run)
    bench.lose_messages()
    bench.write(
        "UPDATE {action_runs} SET status = 'completed', result = args, ended_at = ?, started_at = ?, attempts = 1 WHERE run_id = ?",
        1, 1, run.id,
    )  # fmt: skip
    bench.write("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = ? WHERE id = ?", bench.clock.now(), run.id)
    bench.advance(60)
    assert do_repair(bench).runs == 1
    bench.work_until(lambda: run.status == "completed")


def test_a_held_run_is_left_to_the_monitor(bench: Workbench) -> None:
    """DOCTOR-1 and HISTORY-1: R2 would drive it at every sweep, whatever its hold-off."""
    run = bench.send()
    bench.write("UPDATE {flow_runs} SET hold_until = ? WHERE id = ?", bench.clock.now() + 3_600_000, run.id)
    bench.advance(600)
    assert do_repair(bench).runs == 0


# --- R3 --------------------------------------------------------------------------------------------------------------


def abandoned(bench: Workbench, *, reclaim_after: int | None) -> FlowHandle[Any]:
    """A run whose first step was claimed by a worker that is no more."""
    run = pending_step(bench)
    stale_at = None if reclaim_after is None else bench.clock.now() + reclaim_after * 1000
    bench.write(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, claims = 1, started_at = ?, worker_id = 'gone', "
        "reclaim_stale_after_seconds = ?, reclaim_stale_at = ? WHERE run_id = ?",
        bench.clock.now(), reclaim_after, stale_at, run.id,
    )  # fmt: skip
    return run


def test_a_dead_workers_step_is_reclaimed_once_its_deadline_has_passed(bench: Workbench) -> None:
    """R3 of DOCTOR-1."""
    run = abandoned(bench, reclaim_after=120)
    bench.advance(119)
    assert do_repair(bench).repaired == 0
    bench.advance(1)
    assert do_repair(bench).reclaims == 1
    bench.work_until(lambda: run.status == "completed")
    assert bench.row(run, 1, "attempts", "status") == (2, "completed")


def test_a_dead_workers_step_without_a_deadline_is_never_touched(bench: Workbench) -> None:
    """RECLAIM-1: off by default; the doctor reads the deadline and invents none."""
    run = abandoned(bench, reclaim_after=None)
    bench.advance(1_000_000)
    assert do_repair(bench).repaired == 0
    assert bench.row(run, 1, "status", "repair_attempts") == ("running", 0)


def test_a_dead_workers_undo_is_reclaimed(bench: Workbench) -> None:
    """R3 of DOCTOR-1, beyond: compensations too."""
    run = rolling_back(bench)
    bench.write(
        "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = 1, reclaim_stale_at = ? "
        "WHERE run_id = ? AND sequence = 2", bench.clock.now() + 1000, run.id,
    )  # fmt: skip
    assert do_repair(bench).repaired == 0
    bench.advance(1)
    assert do_repair(bench).reclaims == 1
    bench.work_until(lambda: run.status == "cancelled")


# --- switches and bounds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("redispatch_lost_actions", (0, 1, 1)),
        ("wake_stuck_flows", (1, 0, 1)),
        ("redispatch_stale_running_actions", (1, 1, 0)),
    ],
)
def test_each_rule_has_its_switch(make_bench: MakeBench, switch: str, expected: tuple[int, int, int]) -> None:
    """DOCTOR-1."""
    bench = make_bench(settings=settings(**{switch: False}))
    abandoned(bench, reclaim_after=1)
    pending_step(bench)
    bench.send()
    bench.lose_messages()
    bench.advance(60)
    report = do_repair(bench)
    assert (report.steps, report.runs, report.reclaims) == expected


def test_a_pass_is_bounded_and_takes_the_oldest_first(make_bench: MakeBench) -> None:
    """DOCTOR-1: batch_size."""
    bench = make_bench(settings=settings(batch_size=2))
    runs = []
    for _ in range(3):
        run = bench.send()
        bench.drive(run)
        runs.append(run)
        bench.advance(1)
    bench.lose_messages()
    bench.advance(60)
    assert do_repair(bench).steps == 2
    assert [message.options[OPTION]["run"] for message in bench.messages()] == [runs[0].id, runs[1].id]
    assert do_repair(bench).steps == 1
    assert do_repair(bench).steps == 0


def test_a_row_that_cannot_be_sent_does_not_keep_the_others(bench: Workbench) -> None:
    """LOOP-1: one bad row never ends a sweep."""
    runs = [pending_step(bench) for _ in range(3)]
    bench.write("UPDATE {action_runs} SET options = 'not json' WHERE run_id = ?", runs[0].id)
    bench.advance(60)
    report = do_repair(bench)
    assert (report.steps, report.errors) == (2, 1)


def test_a_store_that_refuses_ends_the_pass(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOP-1: the next sweep goes on from there."""
    bench = make_bench()
    pending_step(bench)
    bench.advance(60)

    def refuse(_: Any) -> Any:
        raise WriteRefusedError("database is locked", sqlite_errorcode=5)

    with monkeypatch.context() as patched:
        patched.setattr(bench.engine.store, "write", refuse)
        with pytest.raises(WriteRefusedError):
            do_repair(bench)
    assert do_repair(bench).steps == 1


# --- a broker that is down -------------------------------------------------------------------------------------------


def test_repairs_are_not_spent_on_a_broker_that_is_down(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCTOR-1, C07: what the broker did not take has cost the row nothing, and the history does not say that it was sent."""
    bench = make_bench(joins=False)
    runs = [pending_step(bench) for _ in range(5)]
    unstarted = bench.send()
    bench.lose_messages()
    bench.advance(60)
    calls = []

    def down(message: Any, *, delay: int | None = None) -> Any:
        calls.append(message)
        raise ConnectionError("no route to the broker")

    with monkeypatch.context() as patched:
        patched.setattr(bench.broker, "enqueue", down)
        report = do_repair(bench)
    assert (report.repaired, report.unsent, len(calls)) == (0, 4, 4)  # three steps and the pass ends; then one run
    assert [bench.row(run, 1, "repair_attempts") for run in runs] == [(0,)] * 5
    assert bench.run_row(unstarted, "repair_attempts") == (0,)
    assert all("redispatched" not in event.type for run in runs for event in run.events())
    bench.advance(10)
    assert do_repair(bench).repaired == 6


def test_messages_that_a_broker_refuses_now_and_then_do_not_end_a_pass(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOOP-1: only refusals in a row say that the broker is down."""
    bench = make_bench(joins=False)
    for _ in range(8):
        pending_step(bench)
    bench.advance(60)
    plain = bench.broker.enqueue
    calls = []

    def every_other(message: Any, *, delay: int | None = None) -> Any:
        calls.append(message)
        if len(calls) % 2:
            raise ConnectionError("not now")
        return plain(message, delay=delay)

    monkeypatch.setattr(bench.broker, "enqueue", every_other)
    report = do_repair(bench)
    assert (report.steps, report.unsent) == (4, 4)


# --- DOCTOR-2 --------------------------------------------------------------------------------------------------------


def test_a_stale_listing_repairs_nothing(bench: Workbench) -> None:
    """DOCTOR-2, C05: two sweeps with one listing; what the first has set going, the second leaves alone and counts."""
    step, stale, stuck = pending_step(bench), abandoned(bench, reclaim_after=1), bench.send()
    bench.lose_messages()
    bench.advance(60)
    listed = [(rule, row) for rule in doctor.ROW_RULES for row in doctor.find(bench.engine, rule, joined=bench.joins)]
    stuck_runs = doctor.find_stuck(bench.engine)
    assert (len(listed), len(stuck_runs)) == (2, 1)
    assert do_repair(bench).repaired == 3
    late = RepairReport()
    for rule, row in listed:
        doctor._treat(bench.engine, bench.sender, late, rule, row)
    doctor._wake(bench.engine, bench.sender, late, stuck_runs[0])
    assert (late.repaired, late.skipped) == (0, 3)
    bench.work_until(lambda: {step.status, stale.status, stuck.status} == {"completed"})
    again = RepairReport()
    for rule, row in listed:
        doctor._treat(bench.engine, bench.sender, again, rule, row)
    doctor._wake(bench.engine, bench.sender, again, stuck_runs[0])
    assert (again.repaired, again.skipped) == (0, 3)
    assert {step.status, stale.status, stuck.status} == {"completed"}


# --- NATIVE-3: an actor that nobody knows ----------------------------------------------------------------------------


def forget_actor(bench: Workbench, name: str) -> None:
    del bench.broker.actors[name]


def spend_repairs(bench: Workbench) -> list[RepairReport]:
    reports = []
    for _ in range(4):
        bench.advance(500)
        reports.append(do_repair(bench))
        bench.lose_messages()
    return reports


def test_a_step_of_an_actor_that_nobody_knows_fails_once_its_repairs_are_spent(make_bench: MakeBench) -> None:
    """NATIVE-3, C11: not silently pending for ever, and not before a worker that knows it had its chances."""
    bench = make_bench(settings=settings(max_attempts=2))
    run = pending_step(bench)
    forget_actor(bench, "book_hotel")
    reports = spend_repairs(bench)
    assert [(report.steps, report.unknown_actors) for report in reports] == [(1, 0), (1, 0), (0, 1), (0, 0)]
    with pytest.raises(FlowFailedError) as caught:
        run.result()
    assert caught.value.cause is not None
    assert "StepFailedError" in caught.value.cause["type"]
    error = run.actions()[0].error
    assert error is not None
    assert error["type"].endswith("UnknownActorError")
    assert "book_hotel" in error["message"]


def test_a_process_that_does_not_know_the_workflow_declares_no_actor_unknown(make_bench: MakeBench) -> None:
    """NATIVE-3: only if it is certain; a sweep of another application must not fail anybody's steps."""
    bench = make_bench(settings=settings(max_attempts=2))
    run = pending_step(bench)
    forget_actor(bench, "book_hotel")
    bench.engine.workflows["another"] = bench.engine.workflows.pop("trip")
    reports = spend_repairs(bench)
    assert [report.unknown_actors for report in reports] == [0, 0, 0, 0]
    assert reports[-1].spent == 1
    assert run.actions()[0].status == "pending"


def test_steps_of_known_actors_do_not_stand_in_front_of_unknown_ones(make_bench: MakeBench) -> None:
    """NATIVE-3: a batch full of rows that wait for a worker hides nothing behind it."""
    bench = make_bench(settings=settings(max_attempts=1, batch_size=3))
    known = [pending_step(bench) for _ in range(3)]
    bench.advance(1)
    lost = pending_step(bench)
    bench.write("UPDATE {action_runs} SET actor = 'gone' WHERE run_id = ?", lost.id)
    for _ in range(3):
        bench.advance(500)
        do_repair(bench)
    assert lost.actions()[0].status == "failed"
    assert {run.actions()[0].status for run in known} == {"pending"}


def test_an_undo_of_an_actor_that_nobody_knows_halts_the_rollback_with_its_cause(make_bench: MakeBench) -> None:
    """NATIVE-3 for compensations: a rollback that can never go on says so."""
    bench = make_bench(settings=settings(max_attempts=2))
    run = rolling_back(bench)
    forget_actor(bench, "cancel_flight")
    spend_repairs(bench)
    assert (run.status, run.rollback) == ("cancelled", "halted")
    undo = run.compensations()[0]
    assert undo.error is not None
    assert undo.error["type"].endswith("UnknownActorError")


# --- what is told ----------------------------------------------------------------------------------------------------


def test_history_and_listeners_learn_of_a_message_sent_again(bench: Workbench) -> None:
    """EVENT-1: action.redispatched, with the rule that sent it."""
    heard: list[ActionRedispatched] = []

    def listener(event: ActionRedispatched) -> None:
        heard.append(event)

    subscribe(listener, ActionRedispatched)
    try:
        run = pending_step(bench)
        bench.advance(60)
        do_repair(bench)
    finally:
        unsubscribe(listener, ActionRedispatched)
    assert [(event.action.sequence, event.reason) for event in heard] == [(1, "R1: nobody has taken it")]
    assert [(event.type, event.sequence, event.detail) for event in run.events()][-1] == (
        "action.redispatched", 1, "R1: nobody has taken it",
    )  # fmt: skip


# --- on every database -----------------------------------------------------------------------------------------------


def test_every_rule_works_on_every_database(database_url: str, table_prefix: str, make_bench: MakeBench) -> None:
    """DOCTOR-1: R1, R2, R3, the monitor, a kick and an unknown actor; each server has its own idea of SQL."""
    bench = make_bench(database=database_url, prefix=table_prefix, settings=settings(max_attempts=2))
    undone, retried = rolling_back(bench), bench.send()
    failing_once(bench, "book_hotel")
    bench.work_until(lambda: bool(retried.actions()) and retried.actions()[0].status == "failed")
    lost, stale, stuck = pending_step(bench), abandoned(bench, reclaim_after=1), bench.send()
    bench.lose_messages()
    bench.advance(120)
    repair_of = bench.sweep().repair
    assert repair_of is not None
    assert (repair_of.steps, repair_of.compensations, repair_of.runs, repair_of.reclaims) == (2, 1, 1, 1)
    assert (repair_of.skipped, repair_of.errors) == (0, 0)
    bench.bodies.clear()
    bench.work_until(
        lambda: {run.status for run in (lost, stale, stuck, retried)} == {"completed"} and undone.status == "cancelled"
    )
    kicked = pending_step(bench)
    assert [row.sequence for row in kicked.kick().sent] == [1]
    unknown = pending_step(bench)
    forget_actor(bench, "book_hotel")
    reports = spend_repairs(bench)
    assert sum(report.unknown_actors for report in reports) == 2
    assert {kicked.status, unknown.status} == {"failed"}
    assert doctor.candidates(bench.engine) == {"R1": 0, "R2": 0, "R3": 0}


def test_a_retry_by_the_doctor_sees_the_arguments_as_they_were_sent(make_bench: MakeBench) -> None:
    """C22: a body that changes its own arguments changes nothing of what is recorded, nor of the next try."""
    bench = make_bench()
    seen: list[Any] = []

    def body(order: dict[str, Any]) -> Any:
        seen.append(dict(order))
        order["id"] = object()
        del order["lines"]
        if len(seen) == 1:
            raise ValueError("not this time")
        return "booked"

    bench.bodies["pay"] = body

    def trip(flow: Any, traveller: str) -> Any:
        return flow.run(bench.actors["pay"], {"id": "7", "lines": [1]})

    bench.flow_function = trip
    run = bench.send("ada")
    bench.work_until(lambda: bool(run.actions()) and run.actions()[0].status == "failed")
    bench.lose_messages()
    bench.advance(120)
    assert do_repair(bench).steps == 1
    bench.work_until(lambda: run.status == "completed")
    assert seen == [{"id": "7", "lines": [1]}] * 2
    assert run.actions()[0].args == [{"id": "7", "lines": [1]}]


def test_what_fails_in_the_ordinary_way_is_no_suspect_any_more(make_bench: MakeBench) -> None:
    """RECLAIM-6: alone is what was claimed without an outcome; a try that has failed has one, and the next waits for nobody."""
    bench = make_bench()
    run = bench.send()
    drive(bench.engine, run.id, bench.sender)
    ((number, data),) = bench.engine.store.read(
        lambda tx: tx.all("SELECT id, message FROM {messages} WHERE actor = 'book_hotel'")
    )
    marked = bytes(data).replace(b'"kind":"step"', b'"kind":"step","suspect":true')
    assert bench.write("UPDATE {messages} SET message = ? WHERE id = ?", marked, number)
    failing_once(bench, "book_hotel")
    bench.work_until(lambda: run.actions()[0].status == "failed")
    (message,) = [message for message in bench.messages() if message.actor_name == "book_hotel"]
    assert "suspect" not in message.options[OPTION]
