"""Why a run does not go on, and which runs need a human: every reason, told from the rows (C57, RECLAIM-4, HISTORY-1, COMP-4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dramatiq_saga import Flow, FlowHandle, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.cli.explain import _lines, _stuck_lines
from dramatiq_saga.clock import to_iso
from dramatiq_saga.codec import describe_error
from dramatiq_saga.engine.lookout import WorkflowStalledError
from dramatiq_saga.errors import FlowNotFoundError
from dramatiq_saga.operations import MAX_STUCK, Operator, RefusedError
from dramatiq_saga.recovery.explain import Explanation, Reason
from dramatiq_saga.recovery.stuck import StuckReport
from tests.support.plans import listen, ways
from tests.support.workbench import MakeBench, Workbench

HOUR = 3600
SECOND = 1000


@pytest.fixture
def joined(make_bench: MakeBench) -> Workbench:
    """On a database broker, with repair on."""
    return make_bench()


def operator(bench: Workbench) -> Operator:
    return Operator.on_broker(bench.broker)


def explain(bench: Workbench, run: FlowHandle[Any]) -> Explanation:
    found = operator(bench).why(run.id)
    assert json.dumps(found.as_dict())
    return found


def deciding(bench: Workbench, run: FlowHandle[Any]) -> Reason:
    return explain(bench, run).reasons[0]


def text(bench: Workbench, run: FlowHandle[Any]) -> str:
    return "\n".join(_lines(explain(bench, run), bench.clock.now()))


def list_stuck(bench: Workbench, **options: Any) -> StuckReport:
    return operator(bench).stuck(**options)


def kinds(report: StuckReport) -> list[tuple[str, str]]:
    return [(run.run_id, run.kind) for run in report.runs]


def acts(reason: Reason) -> dict[str, tuple[int | None, bool]]:
    return {act.by: (act.at, act.on) for act in reason.acts}


def scheduled(bench: Workbench) -> FlowHandle[Any]:
    """A run whose first step is pending, and whose message is there."""
    run = bench.send()
    bench.drive(run)
    return run


def reserve(bench: Workbench) -> None:
    """A worker has taken every message that waits, and keeps it."""
    now = bench.clock.now()
    bench.write(
        "UPDATE {messages} SET state = 2, reserved_at = ?, lease_until = ?, attempts = 1 WHERE state <> 3",
        now,
        now + 30 * SECOND,
    )


def claimed(bench: Workbench, *, reclaim_in: int | None = None, worker: str = "host-7", kept: bool = False) -> FlowHandle[Any]:
    """A run whose first step a worker has claimed that is no more, and its message with it; or, ``kept``, one that has it still."""
    run = scheduled(bench)
    if kept:
        reserve(bench)
    else:
        bench.lose_messages()
    bench.write(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, started_at = ?, worker_id = ?, reclaim_stale_at = ? "
        "WHERE run_id = ?",
        bench.clock.now(), worker, None if reclaim_in is None else bench.clock.now() + reclaim_in * SECOND, run.id,
    )  # fmt: skip
    return run


def claimed_under_a_heartbeat(bench: Workbench, *, reclaim_in: int | None = None, kept: bool = False) -> FlowHandle[Any]:
    """The same by a worker that has been heard from at that moment, and then no more."""
    bench.write(
        "INSERT INTO {workers} (id, host, pid, started_at, seen_at) VALUES ('beat:host-7-1f', 'host', 7, ?, ?)",
        bench.clock.now(), bench.clock.now(),
    )  # fmt: skip
    return claimed(bench, worker="beat:host-7-1f", reclaim_in=reclaim_in, kept=kept)


def leases(**more: Any) -> Settings:
    return Settings.from_mapping({"reclaim.dead_workers.enabled": True, **more})


def fail(*_: Any) -> Any:
    raise ValueError("no \x1b[31mmoney\u202e")


def rolling_back(bench: Workbench) -> FlowHandle[Any]:
    """A run with two completed steps, whose undoing has begun."""
    run = bench.send()
    bench.bodies["pay"] = fail
    bench.work_until(lambda: len(run.actions()) == 3 and run.actions()[2].status == "failed")
    bench.lose_messages()
    assert run.compensate()
    return run


def halted(bench: Workbench) -> FlowHandle[Any]:
    """A run whose first undo has failed for good."""
    run = rolling_back(bench)
    bench.bodies["cancel_flight"] = fail
    bench.lose_messages()
    bench.write("UPDATE {compensation_runs} SET tries = 3 WHERE run_id = ?", run.id)
    operator(bench).kick(run.id)
    bench.work_until(lambda: run.rollback == "halted")
    return run


def held(bench: Workbench) -> FlowHandle[Any]:
    """A run whose code does not fit its history."""
    run = scheduled(bench)
    bench.write("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = ? WHERE id = ?", bench.clock.now(), run.id)
    bench.flow_function = lambda flow, traveller: flow.run(bench.actors["pay"], traveller)
    bench.drive(run)
    return run


def start(bench: Workbench, function: Callable[[Flow], Any], **options: Any) -> FlowHandle[Any]:
    """A run of another workflow, driven once."""
    run = workflow(name=function.__name__, broker=bench.broker)(function).send_with_options(**options)
    bench.drive(run)
    return run


# --- what a run waits for --------------------------------------------------------------------------------------------


def test_a_run_that_nobody_has_started_names_its_message_and_its_queue(joined: Workbench) -> None:
    run = joined.send()
    reason = deciding(joined, run)
    assert (reason.kind, reason.lost, reason.stuck) == ("start", False, False)
    assert [(post.kind, post.state, post.queue) for post in reason.messages] == [("drive", "ready", "default")]
    assert acts(reason)["R2"] == (joined.clock.now() + 60 * SECOND, True)
    assert "see that workers of queue default run" in text(joined, run)


def test_a_wake_that_no_drive_has_seen_and_whose_message_is_lost_is_for_r2(joined: Workbench) -> None:
    """R2 of DOCTOR-1: since when, when the doctor acts, and what to do at once."""
    run = joined.send()
    joined.write("UPDATE {flow_runs} SET status = 'running', started_at = created_at WHERE id = ?", run.id)
    joined.lose_messages()
    reason = deciding(joined, run)
    assert (reason.kind, reason.lost, reason.messages) == ("drive", True, ())
    assert "no message for it exists" in reason.text
    assert f"dramatiq-saga kick {run.id}" in text(joined, run)


def test_a_pending_step_names_its_message(joined: Workbench) -> None:
    run = scheduled(joined)
    reason = deciding(joined, run)
    assert (reason.kind, reason.sequence, reason.name, reason.at) == ("step_pending", 1, "book_hotel", joined.clock.now())
    assert [(post.kind, post.sequence, post.state) for post in reason.messages] == [("step", 1, "ready")]
    assert not reason.stuck


@pytest.mark.parametrize("state", [1, 2, 3])
def test_a_message_is_found_in_every_state(joined: Workbench, state: int) -> None:
    run, now = scheduled(joined), joined.clock.now()
    joined.write(
        "UPDATE {messages} SET state = ?, reserved_at = ?, lease_until = ?, died_at = ?, available_at = ?",
        state, now if state == 2 else None, now + 5 if state == 2 else None, now if state == 3 else None, now + 7,
    )  # fmt: skip
    reason = deciding(joined, run)
    word, at = {1: ("delayed", now + 7), 2: ("reserved", now + 5), 3: ("dead", now)}[state]
    assert [(post.state, post.at) for post in reason.messages] == [(word, at)]
    assert reason.lost is (state == 3), "a dead letter comes by itself never"
    assert ("is dead letter" in text(joined, run)) is (state == 3)


def test_another_runs_message_that_names_this_run_is_not_its_own(joined: Workbench) -> None:
    run = scheduled(joined)
    joined.lose_messages()
    joined.actors["pay"].send(run.id)
    assert deciding(joined, run).lost


def test_a_lost_message_is_for_r1_and_the_grace_is_told(joined: Workbench) -> None:
    """R1 of DOCTOR-1; NATIVE-1: what is spent of the budget is told."""
    run = scheduled(joined)
    joined.lose_messages()
    reason = deciding(joined, run)
    assert reason.lost
    assert acts(reason) == {"R1": (joined.clock.now() + 60 * SECOND, True)}
    joined.advance(60)
    joined.sweep()
    joined.lose_messages()
    assert "(1 of 10 repairs spent)" in text(joined, run)


@pytest.mark.parametrize(
    ("settings", "dial"),
    [
        ({}, "repair.enabled"),
        ({"repair.enabled": True, "repair.redispatch_lost_actions": False}, "repair.redispatch_lost_actions"),
    ],
)
def test_a_lost_message_with_the_dial_off_is_stuck_and_names_the_dial(make_bench: MakeBench, settings: Any, dial: str) -> None:
    """DOCTOR-1: off until enabled."""
    bench = make_bench(settings=Settings.from_mapping(settings))
    run = scheduled(bench)
    bench.lose_messages()
    reason = deciding(bench, run)
    assert reason.stuck
    assert f"the doctor is off for it ({dial})" in text(bench, run)
    assert f"kick {run.id}" in reason.advice[0]


def test_a_spent_budget_is_told_and_only_a_kick_helps(joined: Workbench) -> None:
    run = scheduled(joined)
    joined.lose_messages()
    joined.write("UPDATE {action_runs} SET repair_attempts = 10, repair_after = 1 WHERE run_id = ?", run.id)
    joined.advance(HOUR)
    assert deciding(joined, run).stuck
    assert "the doctor has spent its 10 repairs on it" in text(joined, run)
    assert kinds(list_stuck(joined)) == [(run.id, "repairs_spent")]
    operator(joined).kick(run.id)
    assert kinds(list_stuck(joined)) == [(run.id, "not_taken_over")], "until a worker comes"


def test_a_run_whose_drives_are_spent_is_stuck_too(joined: Workbench) -> None:
    run = joined.send()
    joined.lose_messages()
    joined.write("UPDATE {flow_runs} SET repair_attempts = 10, repair_after = 1 WHERE id = ?", run.id)
    joined.advance(HOUR)
    assert deciding(joined, run).stuck
    assert kinds(list_stuck(joined)) == [(run.id, "repairs_spent")]


def test_between_two_tries_the_next_one_is_told_with_its_error(joined: Workbench) -> None:
    """NATIVE-6: which try comes next, and when."""
    run = joined.send()
    joined.bodies["book_hotel"] = fail
    joined.work_until(lambda: bool(run.actions()) and run.actions()[0].next_try_at is not None)
    (due,) = joined.row(run, 1, "next_try_at")
    reason = deciding(joined, run)
    assert (reason.kind, reason.at) == ("step_between_tries", due)
    assert acts(reason)["native retry"] == (due, True)
    assert acts(reason)["R1"] == (due + 60 * SECOND, True)
    assert reason.error is not None
    assert reason.messages[0].state == "delayed"
    assert "\x1b" not in text(joined, run)
    joined.lose_messages()
    assert acts(deciding(joined, run))["native retry"] == (due, False)


def test_a_running_step_is_left_to_its_worker_until_its_deadline(joined: Workbench) -> None:
    """R3 of DOCTOR-1; RECLAIM-1."""
    run, began = claimed(joined, reclaim_in=120), joined.clock.now()
    reason = deciding(joined, run)
    assert (reason.kind, reason.worker, reason.at) == ("step_running", "host-7", began)
    assert acts(reason)["R3"] == (began + 120 * SECOND, True)
    assert "deadline ahead" in reason.text
    assert reason.advice == ()
    joined.advance(121)
    assert "deadline passed" in deciding(joined, run).text
    assert f"kick {run.id}" in deciding(joined, run).advice[0]


def test_a_running_step_without_a_deadline_needs_a_human_after_an_hour(joined: Workbench) -> None:
    """RECLAIM-4."""
    run = claimed(joined, kept=True)
    assert not deciding(joined, run).stuck
    assert deciding(joined, run).advice == ()
    joined.advance(HOUR - 1)
    assert list_stuck(joined).runs == ()
    joined.advance(1)
    reason = deciding(joined, run)
    assert reason.stuck
    assert f"dramatiq-saga cancel {run.id} --compensate, or --keep" in reason.advice[0]
    assert kinds(list_stuck(joined)) == [(run.id, "never_reclaimed")]


# --- a message that certainly does not exist ------------------------------------------------------------------------


def test_a_step_whose_worker_and_message_are_gone_is_told_at_once(make_bench: MakeBench) -> None:
    """RECLAIM-4, CLAIM-2: with everything off, the delivery that comes back is acknowledged as orphaned, and nothing comes for the step."""
    bench = make_bench(settings=Settings())
    run = scheduled(bench)
    (message,) = bench.messages()
    bench.write(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, started_at = ?, worker_id = 'host-7', delivery = ? WHERE run_id = ?",
        bench.clock.now(), f"{message.message_id}/killed", run.id,
    )  # fmt: skip
    assert deciding(bench, run).advice == (), "its message comes back to a worker"
    bench.work_until(lambda: bench.messages() == [])
    reason = deciding(bench, run)
    assert (reason.kind, reason.lost, reason.stuck) == ("step_running", True, True)
    assert "without a reclaim deadline, and no message for it exists" in reason.text
    (advice,) = reason.advice
    assert advice == (
        f"if its worker is gone, find out what it did, then: dramatiq-saga cancel {run.id} --compensate, or --keep"
    )
    bench.advance(60)
    (line,) = list_stuck(bench).runs
    assert (line.run_id, line.kind, line.advice) == (run.id, "never_reclaimed", "look at its worker; if it is gone, cancel")
    assert "step 1 book_hotel is running on host-7; no message for it exists" in line.reason
    assert operator(bench).cancel(run.id).status == "cancelled"


def test_a_long_body_on_a_living_worker_is_nobodys_business(make_bench: MakeBench) -> None:
    """RECLAIM-4: with everything off too. A worker keeps its message until the outcome is recorded."""
    bench = make_bench(settings=Settings())
    run = bench.send()
    seen: list[Any] = []

    def look(*_: Any) -> None:
        bench.write("UPDATE {messages} SET lease_until = lease_until + 600000")  # as a worker does that lives
        bench.advance(300)
        seen.append((list_stuck(bench).runs, deciding(bench, run).lost))

    bench.bodies["book_hotel"] = look
    bench.work_until(lambda: run.status == "completed")
    assert seen == [((), False)]


def test_a_step_that_run_sync_is_at_is_not_called_lost(make_bench: MakeBench) -> None:
    """SYNC-1, RECLAIM-4: a loop in its caller's process has no messages; nor do the steps lack one that it comes to later."""
    bench = make_bench(settings=Settings())
    seen: list[Any] = []

    def look(*_: Any) -> None:
        (found,) = bench.engine.store.read(lambda tx: tx.all("SELECT id FROM {flow_runs}"))
        bench.advance(300)
        why = operator(bench).why(found[0])
        seen.append((list_stuck(bench).runs, any(reason.lost or reason.stuck for reason in why.reasons)))
        (advice,) = next(reason.advice for reason in why.reasons if reason.kind == "step_running")
        assert advice.startswith("if its worker is gone, find out what it did, then: dramatiq-saga cancel")
        assert "run_sync" in (why.messages_note or "")

    def wide(flow: Flow) -> None:
        flow.parallel(*(flow.action(bench.actors["pay"], number) for number in range(2))).run()

    bench.bodies["pay"] = look
    workflow(name="wide", broker=bench.broker)(wide).run_sync()
    assert seen == [((), False)] * 2


@pytest.mark.parametrize("what", ["drive", "step", "undo"])
def test_with_the_doctor_off_what_has_lost_its_message_is_listed_after_the_grace(make_bench: MakeBench, what: str) -> None:
    """DOCTOR-1: nothing else sends it again. With the doctor on, it is the doctor's."""
    bench = make_bench(settings=Settings())
    if what == "undo":
        run = rolling_back(bench)
    else:
        run = bench.send() if what == "drive" else scheduled(bench)
    bench.advance(60)
    assert list_stuck(bench).runs == (), "its message is there"
    bench.lose_messages()
    (line,) = list_stuck(bench).runs
    assert (line.run_id, line.kind, line.advice) == (run.id, "lost", "kick")
    row = {"drive": "its drive", "step": "step 1 book_hotel", "undo": "undo of step 2 cancel_flight"}[what]
    assert line.reason.startswith(f"{row}: no message for it exists")
    store = bench.engine.store
    assert Operator(store, settings=Settings()).stuck().runs == (), (
        "without the application nobody knows its queues, nor its dials"
    )
    on = Settings.from_mapping({"repair.enabled": True})
    assert Operator(store, settings=on, broker=bench.broker).stuck().runs == ()
    operator(bench).kick(run.id)
    assert list_stuck(bench).runs == ()
    bench.lose_messages()
    bench.advance(HOUR)
    assert kinds(list_stuck(bench)) == [(run.id, "not_taken_over")], "each once"


def test_of_a_queue_that_cannot_be_read_whole_nothing_is_called_lost(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(settings=Settings())
    run = scheduled(bench)
    bench.lose_messages()
    bench.advance(60)
    assert kinds(list_stuck(bench)) == [(run.id, "lost")]
    monkeypatch.setattr("dramatiq_saga.operations.MESSAGES_LOOKED_AT", 1)
    bench.actors["pay"].send()
    assert kinds(list_stuck(bench)) == [(run.id, "lost")], "it is not deep yet"
    bench.actors["pay"].send()
    assert list_stuck(bench).runs == ()
    bench.lose_messages()
    bench.actors["pay"].send()
    bench.write("UPDATE {messages} SET message = ?", b"no message")
    assert list_stuck(bench).runs == ()


def test_a_body_past_its_window_on_a_worker_that_lives_needs_a_kick_with_the_doctor_off(make_bench: MakeBench) -> None:
    """RECLAIM-3: its message comes back only when its worker dies; R3 would not wait for that."""
    bench = make_bench(settings=Settings())
    run = claimed(bench, reclaim_in=60, kept=True)
    assert deciding(bench, run).advice == ()
    bench.advance(61)
    (advice,) = deciding(bench, run).advice
    assert advice == f"its worker keeps its message for as long as it lives; not to wait for it: dramatiq-saga kick {run.id}"
    bench.middleware.settings = Settings.from_mapping({"repair.enabled": True})
    assert deciding(bench, run).advice == ()


# --- a lease behind it (RECLAIM-5) -----------------------------------------------------------------------------------


def test_a_step_on_a_living_worker_names_it_and_says_when_it_was_heard_from(make_bench: MakeBench) -> None:
    """RECLAIM-5: who holds it, when that was last heard from, when the lease ends, and what acts if it falls silent."""
    bench = make_bench(settings=leases(**{"repair.enabled": True}))
    run, began = claimed_under_a_heartbeat(bench), bench.clock.now()
    bench.advance(59)
    reason = deciding(bench, run)
    assert (reason.kind, reason.worker, reason.lost, reason.stuck) == ("step_running", "beat:host-7-1f", False, False)
    assert reason.text == "running on worker host-7-1f (claim 1, try 1), whose lease holds, since"
    ends = began + 60 * SECOND
    assert acts(reason) == {"worker": (began, True), "lease": (ends, False), "R3": (ends, True)}
    assert [act.text.startswith("unless its worker is heard from") for act in reason.acts] == [False, True, True]
    assert reason.advice == ()
    plain = reason.as_dict()
    assert (plain["worker_seen_at"], plain["lease_ends_at"]) == (to_iso(began), to_iso(ends))


def test_a_step_on_a_dead_worker_says_what_takes_it_over(make_bench: MakeBench) -> None:
    """RECLAIM-5: the doctor, where its message is lost; the message, where there is one."""
    bench = make_bench(settings=leases(**{"repair.enabled": True}))
    run, ends = claimed_under_a_heartbeat(bench), bench.clock.now() + 60 * SECOND
    bench.advance(60)
    reason = deciding(bench, run)
    assert "whose lease is over" in reason.text
    assert (reason.lost, reason.stuck, acts(reason)) == (True, False, {"lease": (ends, False), "R3": (ends, True)})
    assert f"kick {run.id}" in reason.advice[0]
    bench.sweep()
    reason = deciding(bench, run)
    assert (reason.lost, acts(reason)["lease"]) == (False, (ends, True))
    assert "see that workers of queue default run" in reason.advice[0]
    assert list_stuck(bench).runs == ()


def test_an_undo_on_a_living_worker_is_told_alike(make_bench: MakeBench) -> None:
    """RECLAIM-5 for compensations."""
    bench = make_bench(settings=leases(**{"repair.enabled": True}))
    run, ends = rolling_back(bench), bench.clock.now() + 60 * SECOND
    claimed_under_a_heartbeat(bench)
    bench.write(
        "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = ?, worker_id = 'beat:host-7-1f' "
        "WHERE run_id = ? AND sequence = 2",
        bench.clock.now(), run.id,
    )  # fmt: skip
    reason = deciding(bench, run)
    assert (reason.kind, reason.lease and reason.lease.ends_at) == ("undo_running", ends)
    assert "whose lease holds" in reason.text
    undo = operator(bench).show_run(run.id).steps[1].compensation
    assert undo is not None
    assert undo.lease == reason.lease
    bench.advance(60)
    assert "whose lease is over" in deciding(bench, run).text


def test_a_worker_whose_heartbeat_row_is_gone_counts_as_dead(make_bench: MakeBench) -> None:
    """RECLAIM-5."""
    bench = make_bench(settings=leases())
    run = claimed(bench, worker="beat:gone")
    reason = deciding(bench, run)
    assert acts(reason)["lease"] == (None, False)
    assert "may take it, once a message is sent for it (there is none), now" in text(bench, run)
    assert reason.as_dict()["lease_ends_at"] is None


def test_a_reclaim_deadline_counts_beside_the_lease(make_bench: MakeBench) -> None:
    """RECLAIM-1, RECLAIM-5: each dial for itself; a passed deadline frees the row of a worker that is heard from."""
    bench = make_bench(settings=leases(**{"repair.enabled": True}))
    run, began = claimed_under_a_heartbeat(bench, reclaim_in=30), bench.clock.now()
    assert acts(deciding(bench, run)) == {
        "worker": (began, True), "lease": (began + 60 * SECOND, False), "reclaim": (began + 30 * SECOND, False),
        "R3": (began + 30 * SECOND, True),
    }  # fmt: skip
    assert deciding(bench, run).advice == ()
    later = claimed(bench, worker="beat:host-7-1f", reclaim_in=HOUR)
    assert acts(deciding(bench, later))["R3"] == (began + 60 * SECOND, True)
    assert deciding(bench, later).acts[-1].text.startswith("unless its worker is heard from")
    bench.advance(30)
    assert deciding(bench, run).lost
    assert f"kick {run.id}" in deciding(bench, run).advice[0]


def test_a_row_under_a_lease_is_stuck_only_where_nothing_comes_for_it(make_bench: MakeBench) -> None:
    """RECLAIM-4, RECLAIM-5: a step of many hours on a living worker needs nobody; a dead one's does after an hour, also with R3 on."""
    bench = make_bench(settings=leases())
    repairing = Settings.from_mapping({"repair.enabled": True}, base=leases())
    run = claimed_under_a_heartbeat(bench, kept=True)
    bench.advance(HOUR)
    bench.write("UPDATE {workers} SET seen_at = ?", bench.clock.now())
    bench.advance(HOUR + 59)
    assert list_stuck(bench).runs == ()
    bench.advance(1)
    (found,) = list_stuck(bench).runs
    assert (found.run_id, found.kind, found.advice) == (run.id, "not_taken_over", "see that workers run, then kick")
    assert "step 1 book_hotel is running on host-7-1f; free to be taken over for an hour" in found.reason
    bench.lose_messages()
    assert deciding(bench, run).stuck
    assert kinds(Operator(bench.engine.store, settings=repairing).stuck()) == [(run.id, "not_taken_over")]


def test_a_passed_deadline_that_nothing_comes_for_is_stuck_too(make_bench: MakeBench) -> None:
    """RECLAIM-3, RECLAIM-4: with the doctor off, an hour after the deadline."""
    bench = make_bench(settings=Settings())
    run = claimed(bench, reclaim_in=60, kept=True)
    bench.advance(HOUR + 59)
    assert list_stuck(bench).runs == ()
    bench.advance(1)
    assert kinds(list_stuck(bench)) == [(run.id, "not_taken_over")]


def test_what_is_due_for_an_hour_and_nobody_comes_for_is_stuck(joined: Workbench) -> None:
    """DOCTOR-1: with R1 and R2 on too, for they act in sweeps only. What has been sent again within the hour is the doctor's."""
    undone = rolling_back(joined)
    pending, late, undriven, treated = scheduled(joined), scheduled(joined), joined.send(), scheduled(joined)
    now = joined.clock.now()
    joined.write("UPDATE {action_runs} SET status = 'failed', next_try_at = ? WHERE run_id = ?", now + 60 * SECOND, late.id)
    joined.write("UPDATE {action_runs} SET repair_after = ? WHERE run_id = ?", now + 60 * SECOND, treated.id)
    joined.advance(HOUR - 1)
    assert kinds(list_stuck(joined)) == []
    joined.advance(1)
    assert kinds(list_stuck(joined)) == [(run.id, "not_taken_over") for run in (pending, undone, undriven)]
    joined.advance(60)
    due = " has been due for an hour, and no worker has come for it"
    assert {run.run_id: run.reason for run in list_stuck(joined).runs} == {
        undone.id: f"undo of step 2 cancel_flight{due}", undriven.id: f"its drive{due}",
        **dict.fromkeys((pending.id, late.id, treated.id), f"step 1 book_hotel{due}"),
    }  # fmt: skip


def test_a_claim_under_a_heartbeat_is_never_reclaimed_with_leases_off(joined: Workbench, tmp_path: Path) -> None:
    """RECLAIM-4, RECLAIM-5: and the dial is named. Without the application leases are taken to be on, because its worker has them on."""
    run = claimed_under_a_heartbeat(joined)
    joined.advance(HOUR)
    assert deciding(joined, run).stuck
    assert "leases are off (reclaim.dead_workers.enabled)" in text(joined, run)
    assert kinds(list_stuck(joined)) == [(run.id, "never_reclaimed")]
    alone = Operator.on_database(tmp_path / "bench-0.db")
    try:
        assert "whose lease is over" in alone.why(run.id).reasons[0].text
    finally:
        alone.close()


def test_a_wait_for_a_signal_is_told_with_and_without_a_deadline(joined: Workbench) -> None:
    def patient(flow: Flow) -> Any:
        return flow.await_signal("go")

    def impatient(flow: Flow) -> Any:
        return flow.await_signal("go", wait_seconds=300)

    reason = deciding(joined, start(joined, patient))
    assert (reason.kind, reason.name, reason.acts) == ("signal", "go", ())
    assert "without a deadline" in reason.text
    run = start(joined, impatient)
    reason = deciding(joined, run)
    assert acts(reason)["deadline"] == (joined.clock.now() + 300 * SECOND, True)
    assert f"dramatiq-saga signal {run.id} go" in reason.advice[0]
    joined.advance(600)
    assert "has passed" in deciding(joined, run).acts[0].text


def test_a_timer_is_told_with_its_moment(joined: Workbench) -> None:
    def sleeping(flow: Flow) -> Any:
        flow.sleep(300)

    run = start(joined, sleeping)
    reason = deciding(joined, run)
    assert (reason.kind, reason.at) == ("timer", joined.clock.now() + 300 * SECOND)
    assert [(post.kind, post.state) for post in reason.messages] == [("timer", "delayed")]


def test_a_parked_step_names_its_signal_and_what_is_left_of_its_budget(joined: Workbench) -> None:
    """RSIG-3."""
    once = joined.declare("once", max_retries=0)
    joined.bodies["once"] = fail

    def parking(flow: Flow) -> Any:
        flow.action(once).retry_on_signal("paper", max_retries=2, wait_seconds=HOUR).run()

    run = start(joined, parking)
    joined.work_until(lambda: bool(run.actions()) and run.actions()[0].status == "awaiting_retry")
    reason = deciding(joined, run)
    assert (reason.kind, reason.sequence, reason.name) == ("parked_step", 1, "once")
    assert "signal paper (0 of 2 used)" in reason.text
    assert f"dramatiq-saga signal-retry {run.id}" in reason.advice[0]
    assert acts(reason)["deadline"][1]


def test_a_child_is_named_with_its_status(joined: Workbench) -> None:
    def below(flow: Flow) -> Any:
        flow.await_signal("go")

    child = workflow(name="below", broker=joined.broker)(below)

    def above(flow: Flow) -> Any:
        flow.child(child).run()

    run = start(joined, above)
    reason = deciding(joined, run)
    assert (reason.kind, reason.name) == ("child", "below")
    assert "is pending" in reason.text
    assert f"dramatiq-saga why {reason.child_id}" in reason.advice[0]


def test_a_block_counts_its_open_members_and_those_that_are_held_back(joined: Workbench) -> None:
    """PAR-1."""

    def wide(flow: Flow) -> Any:
        flow.parallel(*(flow.action(joined.actors["pay"], number) for number in range(50))).max_in_flight(30).run()

    run = start(joined, wide)
    found = explain(joined, run)
    assert found.reasons[-1].kind == "block"
    assert "50 of 50 members open, 20 of them held back" in found.reasons[-1].text
    assert [reason.kind for reason in found.reasons[:-1]] == ["step_pending"] * 20
    assert found.more == 10


def test_a_step_and_a_run_with_deadlines_tell_them(joined: Workbench) -> None:
    def dated(flow: Flow) -> Any:
        flow.action(joined.actors["pay"], "ada").expires_in(60).run()

    run = start(joined, dated, expires_in=120)
    found, now = explain(joined, run), joined.clock.now()
    assert acts(found.reasons[0])["deadline"] == (now + 60 * SECOND, True)
    assert (found.reasons[-1].kind, found.reasons[-1].at) == ("deadline", now + 120 * SECOND)
    joined.advance(121)
    assert deciding(joined, run).kind == "overdue"


def test_an_overdue_run_whose_rollback_cannot_be_planned_says_so(joined: Workbench) -> None:
    """EXPIRE-2."""
    run = scheduled(joined)
    now = joined.clock.now()
    joined.write(
        "UPDATE {flow_runs} SET expires_at = ?, expiry_attempts = 2, expiry_after = ? WHERE id = ?",
        now,
        now + 9 * SECOND,
        run.id,
    )
    reason = deciding(joined, run)
    assert (reason.kind, acts(reason)) == ("overdue", {"monitor": (now + 9 * SECOND, True)})
    assert "2 times" in reason.text
    assert f"or end it, undoing nothing: dramatiq-saga cancel {run.id} --keep" in reason.advice[1]
    (line,) = list_stuck(joined).runs
    assert (line.kind, line.advice) == ("overdue", "deploy code that fits its history, or cancel --keep")


def test_a_cancel_that_would_undo_what_does_not_fit_says_that_nothing_was_changed_and_what_ends_the_run(
    joined: Workbench,
) -> None:
    """COMP-3."""

    def trip(flow: Flow, traveller: str) -> Any:
        made = flow.action(joined.actors["book_hotel"], traveller)
        made.compensate_with(lambda one: joined.actors["cancel_hotel"].message(one["by"])).run()
        flow.run(joined.actors["pay"], traveller)

    joined.flow_function = trip
    run = scheduled(joined)
    joined.write(
        "UPDATE {action_runs} SET status = 'completed', attempts = 1, started_at = 1, ended_at = 1, result = ? WHERE run_id = ?",
        b'{"by":"book_hotel"}', run.id,
    )  # fmt: skip
    joined.engine.cache.drop(run.id)
    joined.flow_function = lambda flow, traveller: flow.run(joined.actors["pay"], traveller)
    with pytest.raises(RefusedError) as refused:
        operator(joined).compensate(run.id)
    assert "does not fit its workflow's code at sequence 1" in str(refused.value)
    assert "nothing was changed" in str(refused.value)
    assert f"`dramatiq-saga cancel {run.id} --keep`" in str(refused.value)
    assert (run.status, run.rollback) == ("running", "none")
    assert operator(joined).cancel(run.id).status == "cancelled"


@pytest.mark.parametrize("overdue", [False, True])
def test_a_function_that_hangs_is_not_to_be_replayed_by_hand(joined: Workbench, overdue: bool) -> None:
    """HISTORY-1, EXPIRE-2: `verify` would hang as well. Its error comes bare, as others do."""
    run, now = scheduled(joined), joined.clock.now()
    error = describe_error(WorkflowStalledError("trip", 60))
    joined.write(
        "UPDATE {flow_runs} SET hold_error = ?, hold_count = 1, hold_until = ?, expires_at = ?, expiry_attempts = ?, wakes = wakes + 1 "
        "WHERE id = ?", error, now + 9 * SECOND, now if overdue else None, int(overdue), run.id,
    )  # fmt: skip
    reason = deciding(joined, run)
    assert "verify" not in "".join(reason.advice)
    assert "find out what its function waits for" in reason.advice[0]
    line = list_stuck(joined).runs[0]
    assert line.kind == ("overdue" if overdue else "held")
    assert line.advice == f"find out what its function waits for{', or cancel --keep' if overdue else ''}"
    assert ": WorkflowStalledError: the code of workflow trip did not come back" in line.reason


def test_a_held_run_tells_its_error_its_window_and_the_way_out(joined: Workbench) -> None:
    """HISTORY-1; the step that is pending beside it comes second."""
    run = held(joined)
    (until,) = joined.run_row(run, "hold_until")
    found = explain(joined, run)
    assert [reason.kind for reason in found.reasons] == ["held", "step_pending"]
    assert found.reasons[0].at == until
    assert acts(found.reasons[0]) == {"monitor": (until, True)}
    assert "verify" in found.reasons[0].advice[0]
    assert "HistoryMismatchError: run" in text(joined, run)
    assert kinds(list_stuck(joined)) == [(run.id, "held")]


def test_a_parents_wish_is_told(joined: Workbench) -> None:
    """CHILD-3."""
    run = scheduled(joined)
    joined.write("UPDATE {flow_runs} SET close_request = 'cancel', parent_id = 'above' WHERE id = ?", run.id)
    assert [reason.kind for reason in explain(joined, run).reasons] == ["close_request", "step_pending"]


def test_a_run_with_nothing_to_wait_for_says_that(joined: Workbench) -> None:
    run = joined.send()
    joined.write("UPDATE {flow_runs} SET status = 'running', wakes_seen = wakes WHERE id = ?", run.id)
    assert deciding(joined, run).kind == "nothing"


# --- undoing ---------------------------------------------------------------------------------------------------------


def test_a_rollback_tells_its_level_its_undo_and_what_follows(joined: Workbench) -> None:
    run = rolling_back(joined)
    found = explain(joined, run)
    assert [(reason.kind, reason.sequence, reason.name) for reason in found.reasons] == [
        ("undo_pending", 2, "cancel_flight"),
        ("rolling_back", None, None),
    ]
    assert "to end as cancelled" in found.reasons[1].text
    assert "1 undo of later levels follows" in found.reasons[1].text
    assert "level 0" in found.reasons[0].text
    assert found.reasons[0].messages[0].kind == "compensation"
    joined.lose_messages()
    assert deciding(joined, run).lost


def test_an_undo_that_has_to_wait_for_the_charge_says_until_when(joined: Workbench) -> None:
    """COMP-9."""
    run, later = rolling_back(joined), joined.clock.now() + HOUR * SECOND
    joined.write("UPDATE {compensation_runs} SET not_before = ? WHERE run_id = ? AND sequence = 2", later, run.id)
    reason = deciding(joined, run)
    assert (reason.kind, reason.at) == ("undo_not_before", later)
    assert acts(reason)["R1"] == (later + 60 * SECOND, True)


def test_an_undo_that_waits_for_a_leased_step_names_the_worker(make_bench: MakeBench) -> None:
    """COMP-9, RECLAIM-5: for as long as that is heard from, the moment may move on."""
    bench = make_bench(settings=leases())
    run, began = rolling_back(bench), bench.clock.now()
    claimed_under_a_heartbeat(bench)
    bench.write("UPDATE {compensation_runs} SET not_before = ? WHERE run_id = ? AND sequence = 2", began + 60 * SECOND, run.id)
    bench.write("UPDATE {action_runs} SET worker_id = 'host-7' WHERE run_id = ? AND sequence = 2", run.id)
    assert "lease" not in acts(deciding(bench, run))
    bench.write("UPDATE {action_runs} SET worker_id = 'beat:host-7-1f' WHERE run_id = ? AND sequence = 2", run.id)
    reason = deciding(bench, run)
    assert (reason.kind, acts(reason)["lease"]) == ("undo_not_before", (began, True))
    assert "worker host-7-1f is at that step" in text(bench, run)


def test_a_running_undo_without_a_deadline_needs_a_human_after_an_hour(joined: Workbench) -> None:
    """RECLAIM-4."""
    run = rolling_back(joined)
    joined.write(
        "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = ? WHERE run_id = ? AND sequence = 2",
        joined.clock.now(), run.id,
    )  # fmt: skip
    joined.advance(HOUR)
    assert deciding(joined, run).stuck
    assert kinds(list_stuck(joined)) == [(run.id, "never_reclaimed")]


def test_a_running_undo_without_a_deadline_says_what_its_message_does_and_what_to_do_without_one(joined: Workbench) -> None:
    """PAR-3: delivered again it ends the undo's level; where it does not exist, only a person does, whatever the hour."""
    run = rolling_back(joined)
    joined.write(
        "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = ? WHERE run_id = ? AND sequence = 2",
        joined.clock.now(), run.id,
    )  # fmt: skip
    reason = deciding(joined, run)
    assert (acts(reason)["message"], reason.lost, reason.advice) == ((None, True), False, ())
    assert "its message, if it is delivered again, ends its level without it" in text(joined, run)
    joined.advance(HOUR)
    assert "let its message come back to a worker" in deciding(joined, run).advice[0]
    joined.lose_messages()
    reason = deciding(joined, run)
    assert (reason.lost, reason.stuck) == (True, True)
    assert reason.advice[0].endswith(f"find out what it did, then: dramatiq-saga abandon-undo {run.id} 2")
    (line,) = list_stuck(joined).runs
    assert line.advice == "find out what it did, then abandon-undo 2"
    assert operator(joined).abandon_undo(run.id, 2).rollback == "halted"
    assert kinds(list_stuck(joined)) == [(run.id, "halted")]


def test_a_running_undo_whose_message_is_gone_names_the_command_at_once(joined: Workbench) -> None:
    """PAR-3: a living worker keeps its message."""
    run = rolling_back(joined)
    joined.write(
        "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = ? WHERE run_id = ? AND sequence = 2",
        joined.clock.now(), run.id,
    )  # fmt: skip
    joined.lose_messages()
    reason = deciding(joined, run)
    assert (reason.lost, "message" in acts(reason)) == (True, False)
    assert f"abandon-undo {run.id} 2" in reason.advice[0]


@pytest.mark.parametrize("what", ["step", "undo"])
def test_where_messages_cannot_be_seen_a_running_row_names_the_way_out_at_once(make_bench: MakeBench, what: str) -> None:
    """PAR-3, RECLAIM-4: with Redis or RabbitMQ nobody can know whether its message exists."""
    bench = make_bench(joins=False, settings=Settings())
    table, sequence = ("action_runs", 1) if what == "step" else ("compensation_runs", 2)
    run = scheduled(bench) if what == "step" else rolling_back(bench)
    bench.write(
        f"UPDATE {{{table}}} SET status = 'running', attempts = 1, started_at = ? WHERE run_id = ? AND sequence = ?",
        bench.clock.now(), run.id, sequence,
    )  # fmt: skip
    reason = deciding(bench, run)
    assert (reason.kind, reason.lost, reason.stuck) == (f"{what}_running", False, False)
    way_out = f"cancel {run.id} --compensate, or --keep" if what == "step" else f"abandon-undo {run.id} 2"
    assert reason.advice == (
        f"if its worker is gone, and its message lost, find out what it did, then: dramatiq-saga {way_out}",
    )
    bench.advance(60)
    assert list_stuck(bench).runs == ()


@pytest.mark.parametrize("behind", ["reclaim window", "lease"])
def test_an_undo_that_is_run_again_is_not_abandoned_and_the_refusal_says_when(make_bench: MakeBench, behind: str) -> None:
    """PAR-3, RECLAIM-1, RECLAIM-5: the message that is there does not end its level, then."""
    bench = make_bench(settings=leases())
    run, until = rolling_back(bench), bench.clock.now() + 60 * SECOND
    bench.write(
        "UPDATE {compensation_runs} SET status = 'running', attempts = 1, started_at = ?, worker_id = ?, reclaim_stale_at = ? "
        "WHERE run_id = ? AND sequence = 2",
        bench.clock.now(), "beat:host-7-1f" if behind == "lease" else "host-7", until if behind != "lease" else None, run.id,
    )  # fmt: skip
    reserve(bench)
    with pytest.raises(RefusedError) as refused:
        operator(bench).abandon_undo(run.id, 2)
    assert "the undo of step 2 will be taken from its worker and run again, " in str(refused.value)
    moment = "once its worker has not been heard from for 60 seconds (its lease)"
    assert (moment if behind == "lease" else f"from {to_iso(until)} on (its reclaim window)") in str(refused.value)
    assert "ends the undo's level" not in str(refused.value)


def undone(bench: Workbench, *, sequence: int | None = None, status: str = "completed") -> FlowHandle[Any]:
    """A run whose undos have ended (but that of the first step, given ``sequence``), and whose rollback nobody has ended."""
    run = rolling_back(bench)
    where = "" if sequence is None else f" WHERE sequence = {sequence}"
    bench.write(
        "UPDATE {compensation_runs} SET status = ?, given_up = ?, attempts = 1, started_at = 1, ended_at = ?" + where,
        status, status == "failed", bench.clock.now(),
    )  # fmt: skip
    return run


def test_a_rollback_whose_end_is_not_recorded_is_the_doctors(joined: Workbench) -> None:
    """DOCTOR-1: R2, where no message of the run is left."""
    run = undone(joined)
    at = joined.clock.now()
    reason = deciding(joined, run)
    assert (reason.kind, reason.at, reason.lost, [act.by for act in reason.acts]) == (
        "rolling_back",
        at,
        False,
        ["message", "R2"],
    )
    joined.lose_messages()
    reason = deciding(joined, run)
    assert (reason.kind, reason.lost, reason.stuck) == ("rolling_back", True, False)
    assert acts(reason) == {"R2": (at + 60 * SECOND, True)}
    assert f"kick {run.id}" in reason.advice[0]
    for _ in range(30):
        joined.advance(600)
        joined.sweep()
        joined.lose_messages()
    assert deciding(joined, run).stuck
    assert kinds(list_stuck(joined)) == [(run.id, "repairs_spent")]
    assert operator(joined).kick(run.id).driven
    joined.work_until(lambda: run.status == "cancelled")
    assert (run.rollback, list_stuck(joined).runs) == ("done", ())


def test_a_rollback_whose_end_is_not_recorded_needs_a_human_where_the_doctor_is_off(make_bench: MakeBench) -> None:
    """DOCTOR-1: and a level that has stopped it is not said to be at work."""
    bench = make_bench(settings=Settings())
    run = undone(bench, sequence=2, status="failed")
    bench.lose_messages()
    reason = deciding(bench, run)
    assert (reason.kind, reason.stuck) == ("rolling_back", True)
    assert "nothing is left to be undone" in reason.text
    assert list_stuck(bench).runs == ()
    bench.advance(HOUR - 1)
    assert kinds(list_stuck(bench)) == [(run.id, "lost")]
    bench.advance(1)
    assert kinds(list_stuck(bench)) == [(run.id, "not_taken_over")]


def test_a_halted_rollback_names_the_failed_undo_and_how_to_go_on(joined: Workbench) -> None:
    """COMP-4, COMP-8."""
    run = halted(joined)
    found = explain(joined, run)
    assert [reason.kind for reason in found.reasons] == ["halted", "undo_failed", "undos_follow"]
    assert found.reasons[0].stuck
    assert f"dramatiq-saga resume-rollback {run.id}" in found.reasons[0].advice[0]
    assert (found.reasons[1].sequence, found.reasons[1].name) == (2, "cancel_flight")
    assert kinds(list_stuck(joined)) == [(run.id, "halted")]
    page = text(joined, run) + "\n".join(_stuck_lines(list_stuck(joined), joined.clock.now()))
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_a_run_that_has_ended_waits_for_nothing(joined: Workbench) -> None:
    run = joined.send()
    joined.work_until(lambda: run.status == "completed")
    found = explain(joined, run)
    assert [(reason.kind, reason.stuck) for reason in found.reasons] == [("ended", False)]
    assert "has ended as completed" in text(joined, run)


# --- what can be known -----------------------------------------------------------------------------------------------


def test_another_brokers_messages_cannot_be_seen_and_nothing_is_called_lost(make_bench: MakeBench) -> None:
    bench = make_bench(joins=False)
    run = scheduled(bench)
    bench.lose_messages()
    found = explain(bench, run)
    assert not found.reasons[0].lost
    assert found.messages_note is not None
    assert "StubBroker" in found.messages_note
    assert f"if its message is lost: dramatiq-saga kick {run.id}" in text(bench, run)


def test_without_the_application_a_missing_message_is_not_called_lost(joined: Workbench) -> None:
    """Its broker may keep its queues elsewhere; a message that is found is told."""
    run = scheduled(joined)
    alone = Operator(joined.engine.store, settings=joined.settings)
    assert alone.why(run.id).reasons[0].messages
    joined.lose_messages()
    found = alone.why(run.id)
    assert not found.reasons[0].lost
    assert "--app" in (found.messages_note or "")


def test_of_a_deep_queue_only_a_part_is_looked_at(joined: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq_saga.operations.MESSAGES_LOOKED_AT", 1)
    first, second = joined.send(), joined.send()
    found = explain(joined, second)
    assert not found.reasons[0].lost
    assert "more than 1 messages wait" in (found.messages_note or "")
    assert explain(joined, first).reasons[0].messages


def test_an_unknown_run_is_refused(joined: Workbench) -> None:
    with pytest.raises(FlowNotFoundError):
        operator(joined).why("nobody")


def test_nothing_is_written(joined: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """STATUS-1 has nothing to guard here: neither opens a write, and each is one read."""
    run, reads = held(joined), []
    plain = joined.engine.store.read
    monkeypatch.setattr(joined.engine.store, "write", None)
    monkeypatch.setattr(joined.engine.store, "read", lambda operation: (reads.append(1), plain(operation))[1])
    explain(joined, run)
    assert len(reads) == 1
    list_stuck(joined)
    assert len(reads) == 2


def test_no_payload_is_told(joined: Workbench) -> None:
    """SAFE-2."""
    run = joined.send("a-secret-name")
    joined.drive(run)
    assert "a-secret-name" not in json.dumps(explain(joined, run).as_dict())


def test_a_workflow_or_an_actor_that_is_not_declared_is_told(joined: Workbench) -> None:
    """NATIVE-3: no worker of this application can go on with it."""
    run = scheduled(joined)
    joined.write("UPDATE {action_runs} SET actor = 'gone' WHERE run_id = ?", run.id)
    assert "the application declares no actor gone" in deciding(joined, run).text
    joined.write("UPDATE {flow_runs} SET workflow = 'gone' WHERE id = ?", run.id)
    assert [reason.kind for reason in explain(joined, run).reasons] == ["undeclared", "step_pending"]


# --- the list --------------------------------------------------------------------------------------------------------


def test_runs_of_workflows_that_are_not_declared_are_listed_where_the_application_is_known(joined: Workbench) -> None:
    run = scheduled(joined)
    scheduled(joined)
    joined.write("UPDATE {flow_runs} SET workflow = 'gone' WHERE id = ?", run.id)
    assert kinds(list_stuck(joined)) == [(run.id, "undeclared")]
    assert Operator(joined.engine.store, settings=joined.settings).stuck().runs == ()


def test_what_is_rolled_back_needs_no_workflow_only_the_actors_of_its_undos(joined: Workbench) -> None:
    """COMP-1: its plan is rows."""
    run = rolling_back(joined)
    joined.write("UPDATE {flow_runs} SET workflow = 'gone' WHERE id = ?", run.id)
    assert list_stuck(joined).runs == ()
    joined.write("UPDATE {compensation_runs} SET actor = 'lost_too' WHERE run_id = ? AND sequence = 1", run.id)
    (line,) = list_stuck(joined).runs
    assert (line.run_id, line.kind, line.advice) == (run.id, "undeclared", "deploy its module")
    assert line.reason == "undo of step 1 is lost_too's, which the application does not declare"
    joined.write("UPDATE {compensation_runs} SET actor = 'cancel_hotel' WHERE run_id = ? AND sequence = 1", run.id)
    joined.work_until(lambda: run.status == "cancelled")
    assert [name for name, _ in joined.done[-2:]] == ["cancel_flight", "cancel_hotel"]


def test_a_stale_drive_of_a_workflow_that_nobody_declares_is_told_as_one_of_a_workflow(joined: Workbench) -> None:
    """NATIVE-3 is about actors."""
    run = joined.send()
    joined.write(
        "UPDATE {messages} SET actor = 'gone', message = ?",
        joined.messages()[0].copy().copy(actor_name="gone").encode(),
    )
    with capture_logs() as logs:
        joined.work_until(lambda: joined.run_row(run, "hold_error")[0])
    (line,) = [line for line in logs if line["event"] == "drive_message_rejected"]
    assert "no worker on queue 'default' knows workflow 'gone'" in line["error"]


def test_a_run_is_listed_once_with_its_gravest_reason(joined: Workbench) -> None:
    run = held(joined)
    joined.write("UPDATE {flow_runs} SET workflow = 'gone' WHERE id = ?", run.id)
    assert [(one.kind, one.also) for one in list_stuck(joined).runs] == [("held", 1)]


def test_the_list_is_bounded_and_says_that_there_is_more(joined: Workbench) -> None:
    for _ in range(3):
        claimed(joined)
    joined.advance(HOUR)
    assert (len(list_stuck(joined, limit=2).runs), list_stuck(joined, limit=2).more) == (2, True)
    assert (len(list_stuck(joined, limit=3).runs), list_stuck(joined, limit=3).more) == (3, False)
    for limit in (0, MAX_STUCK + 1):
        with pytest.raises(ValueError, match="limit must be from 1"):
            list_stuck(joined, limit=limit)


def test_a_healthy_application_has_an_empty_list(joined: Workbench) -> None:
    run = joined.send()
    joined.work_until(lambda: run.status == "completed")
    scheduled(joined)
    joined.sweep()
    joined.advance(5)
    lines = _stuck_lines(list_stuck(joined), joined.clock.now())
    assert lines == ["no run needs a human", "last passes: monitor 5.0 s ago, doctor 5.0 s ago"]


def test_where_nothing_sweeps_an_empty_list_does_not_say_that_nobody_is_needed(joined: Workbench) -> None:
    """LOOP-1: no monitor for ten minutes, or ever, where runs are live; where none is, there is nothing to sweep."""

    def lines() -> list[str]:
        return _stuck_lines(list_stuck(joined), joined.clock.now())

    assert lines() == ["no run needs a human", "last passes: monitor never, doctor never"]
    run = joined.send()
    last, warning = lines()
    assert last == "last passes: monitor never, doctor never"
    assert warning.startswith("nothing sweeps")
    assert "loop.enabled" in warning
    joined.sweep()
    swept_at = joined.clock.now()
    joined.advance(600)
    assert lines()[0] == "no run needs a human"
    joined.advance(1)
    assert lines() == ["last passes: monitor 10 min 1 s ago, doctor 10 min 1 s ago", warning]
    assert list_stuck(joined).as_dict()["last_passes"] == {
        "monitor": to_iso(swept_at), "repair": to_iso(swept_at), "unswept": True,
    }  # fmt: skip
    joined.advance(HOUR)
    assert lines()[1].startswith(run.id)
    assert lines()[-1] == warning


def test_without_the_application_nobody_knows_whether_the_doctor_is_on(joined: Workbench) -> None:
    """DOCTOR-1: it is not called off; where the environment has it on, it is told as usual."""
    run = scheduled(joined)
    store = joined.engine.store
    reason = Operator(store, settings=Settings()).why(run.id).reasons[0]
    assert (
        "if the application has it on (repair.enabled, not known without --app), sends its message again"
        in reason.acts[-1].text
    )
    assert (reason.acts[-1].on, reason.stuck) == (True, False)
    known = Operator(store, settings=Settings.from_mapping({"repair.enabled": True})).why(run.id).reasons[0]
    assert known.acts[-1].text.startswith("unless older messages wait in its queue, the doctor sends its message again")


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_only_live_rows_halted_runs_and_one_runs_rows_are_read(joined: Workbench) -> None:
    """C43, C56: neither costs more for the history behind it; of dead letters, a part of fixed size is looked at."""
    runs = [rolling_back(joined), scheduled(joined), held(joined)]
    with listen() as heard:
        for run in runs:
            explain(joined, run)
        list_stuck(joined)
        Operator(joined.engine.store, settings=leases()).stuck()  # with the doctor off it asks for more
    assert len(heard) > 15
    found = [(sql, way) for sql, params in heard.items() for way in ways(joined.engine.store, sql, params)]
    assert [(sql, way.text) for sql, way in found if way.reads_what_has_ended and way.index != "queue_dead"] == []


# --- on every database -----------------------------------------------------------------------------------------------


def test_every_statement_works_on_every_database(database_url: str, table_prefix: str, make_bench: MakeBench) -> None:
    """C57: each server has its own idea of SQL, and of finding bytes in bytes."""
    bench = make_bench(database=database_url, prefix=table_prefix)
    undone = rolling_back(bench)
    assert deciding(bench, undone).messages[0].state == "ready"
    bench.work_until(lambda: undone.rollback == "done")  # or the next worker is about it when its messages are lost
    fallen = halted(bench)
    assert deciding(bench, fallen).kind == "halted"
    never = claimed(bench)
    bench.advance(HOUR)
    assert deciding(bench, never).stuck
    stiff = held(bench)
    assert deciding(bench, stiff).kind == "held"
    assert set(kinds(list_stuck(bench))) == {(fallen.id, "halted"), (stiff.id, "held"), (never.id, "never_reclaimed")}
    silent = claimed_under_a_heartbeat(bench)
    bench.advance(2 * HOUR)
    alone = Operator(bench.engine.store, settings=leases())
    assert (silent.id, "not_taken_over") in kinds(alone.stuck())
    assert alone.why(silent.id).reasons[0].lease is not None
    assert alone.show_run(silent.id).steps[0].lease is not None


def test_messages_are_looked_for_in_the_brokers_own_database(tmp_path: Path) -> None:
    """Where the queues are kept in another database than the runs."""
    broker = DatabaseBroker(tmp_path / "queues.db")
    middleware = SagaMiddleware(tmp_path / "runs.db")
    broker.add_middleware(middleware)

    @workflow(broker=broker)
    def idle(flow: Flow) -> None:
        pass

    try:
        run = idle.send()
        reason = Operator.on_broker(broker).why(run.id).reasons[0]
        assert [(post.kind, post.state) for post in reason.messages] == [("drive", "ready")]
        assert not reason.lost
        store = middleware.engine(broker).store
        store.write(lambda tx: tx.run("UPDATE {flow_runs} SET woken_at = woken_at - 120000"))
        assert Operator.on_broker(broker).stuck().runs == ()
        broker.flush("default")
        assert Operator.on_broker(broker).why(run.id).reasons[0].lost
        assert [line.kind for line in Operator.on_broker(broker).stuck().runs] == ["lost"]
    finally:
        middleware.engine(broker).store.close()
        broker.close()
