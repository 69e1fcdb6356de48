"""CLAIM, FENCE, STATUS and RECLAIM with real workers: stragglers, duplicates, reclaims and operators in between."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dramatiq_saga import Flow, Settings, current_step, events, get_flow
from dramatiq_saga.errors import ConcurrentTransitionError, FlowNotFoundError
from tests.support.application import Application, Applications
from tests.support.waiting import eventually

RECLAIM = Settings.from_mapping({"actions": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 1}}}})


class Gate:
    """A body stands here until it is let through."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)

    def __call__(self) -> None:
        self.arrived.release()
        assert self.leave.acquire(timeout=30)

    def wait(self) -> None:
        assert self.arrived.acquire(timeout=30)


def lines(journal: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in journal if line["event"] == event]


def send_again(app: Application, run_id: str, sequence: int = 1, *, kind: str = "step", **facts: Any) -> None:
    """The message of a row once more, as a redelivery or an eager doctor would bring it."""
    from dramatiq_saga.engine.rows import Outgoing
    from dramatiq_saga.middleware import build_message

    table = "action_runs" if kind == "step" else "compensation_runs"
    actor, queue = app.sql(f"SELECT actor, queue FROM {{{table}}} WHERE run_id = ? AND sequence = ?", run_id, sequence)[0]
    app.broker.enqueue(build_message(app.broker, Outgoing(kind, run_id, actor, queue, sequence, **facts)))


@pytest.mark.claims_alone
def test_a_second_delivery_of_a_running_step_runs_nothing(every_app: Application, journal: list[Any]) -> None:
    """C01, CLAIM-2: it loses, is acknowledged, touches no attempt; one outcome, one next step; ANOM-1's fields."""
    app, gate = every_app, Gate()

    @app.actor
    def held() -> str:
        app.calls.append("held")
        gate()
        return "first"

    after = app.step("after")

    @app.workflow
    def two(flow: Flow) -> str:
        value = flow.run(held)
        flow.run(after)
        return value

    handle = two.send()
    app.start()
    gate.wait()
    send_again(app, handle.id)
    eventually(lambda: lines(journal, "claim_lost"))
    assert handle.actions()[0].attempts == 1
    gate.leave.release()
    assert app.ended(handle) == "completed"
    app.drain()
    assert app.calls == ["held", ("after",)]
    assert app.types(handle).count("action.completed") == 2
    line = lines(journal, "claim_lost")[0]
    assert {name: line[name] for name in ("row", "run_id", "sequence", "actor", "status", "orphaned", "attempts", "run_status")} == {
        "row": "action", "run_id": handle.id, "sequence": 1, "actor": "held", "status": "running", "orphaned": False, "attempts": 1,
        "run_status": "running",
    }  # fmt: skip
    assert app.messages() == 0


def test_three_deliveries_of_a_finished_step_change_nothing(app: Application, journal: list[Any]) -> None:
    """C02, C16, CLAIM-2: the row decides; the same message after the fact finds it completed."""
    step = app.step("step", gives=1)

    @app.workflow
    def two(flow: Flow) -> int:
        return flow.run(step) + flow.run(step)

    handle = app.run(two)
    for _ in range(3):
        send_again(app, handle.id)
    app.drain()
    assert app.calls == [("step",)] * 2
    assert [(a.status, a.attempts) for a in handle.actions()] == [("completed", 1)] * 2
    assert len(lines(journal, "claim_lost")) == 3
    assert app.types(handle).count("flow.completed") == 1


def test_a_message_of_an_earlier_cycle_cannot_claim(app: Application, journal: list[Any]) -> None:
    """CLAIM-1: only a message of the row's present retry cycle."""
    gate = Gate()

    @app.actor(max_retries=1)
    def flaky() -> str:
        app.calls.append("flaky")
        gate()
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.action(flaky).with_options(queue_name=app.queue + "x").run()

    app.broker.declare_queue(app.queue + "x")
    handle = one.send()
    app.start(queues={app.queue})
    eventually(lambda: handle.actions())
    app.execute("UPDATE {action_runs} SET cycle = 1 WHERE run_id = ?", handle.id)
    app.start(queues={app.queue + "x"})
    eventually(lambda: lines(journal, "claim_lost"))
    app.drain()
    assert app.calls == []
    assert handle.actions()[0].status == "pending"
    send_again(app, handle.id, cycle=1)
    gate.wait()
    gate.leave.release()
    assert app.ended(handle) == "completed"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis", "stub"])
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_straggler_cannot_touch_what_the_reclaiming_worker_records(
    kind: str, ending: str, applications: Applications, journal: list[Any]
) -> None:
    """FENCE-1, FENCE-2, RECLAIM-3: the put-back message reclaims the stale row; the late report is refused, told and lost."""
    app, gates = applications(kind, settings=RECLAIM), [Gate(), Gate()]

    @app.actor(max_retries=5)
    def slow() -> str:
        number = len(app.calls)
        step = current_step()
        assert step is not None
        app.calls.append((step.attempt, step.idempotency_key))
        gates[number]()
        if number == 0 and ending == "raises":
            raise ValueError("late")
        return f"worker {number}"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(slow)

    with events.listening(events.ActionOutcomeRejected) as heard:
        handle = one.send()
        app.start(threads=2)
        gates[0].wait()
        send_again(app, handle.id)  # it is put back until the row is stale
        gates[1].wait()
        gates[1].leave.release()
        assert app.ended(handle) == "completed"
        before = app.types(handle)
        gates[0].leave.release()
        eventually(lambda: lines(journal, "outcome_rejected"))
        app.drain()
    assert handle.result() == "worker 1"
    assert app.calls == [(1, f"{handle.id}:1:0"), (2, f"{handle.id}:1:0")]
    step = handle.actions()[0]
    assert (step.status, step.result, step.attempts, step.tries) == ("completed", "worker 1", 2, 0)
    assert app.types(handle) == before
    line = lines(journal, "outcome_rejected")[0]
    assert {name: line.get(name) for name in ("row", "sequence", "actor", "outcome", "claimed_attempts", "attempts", "status")} == {
        "row": "action", "sequence": 1, "actor": "slow", "outcome": "completed" if ending == "returns" else "failed",
        "claimed_attempts": 1, "attempts": 2, "status": "completed",
    }  # fmt: skip
    (event,) = heard
    if ending == "returns":
        assert (event.outcome, event.result, event.exception) == ("completed", "worker 0", None)
    else:
        assert (event.outcome, str(event.exception)) == ("failed", "late")
    assert event.action.result == "worker 1"
    assert app.messages() == 0


def test_with_reclaim_off_a_running_row_is_left_alone_and_called_orphaned(app: Application, journal: list[Any]) -> None:
    """RECLAIM-1, CLAIM-2: the worker of an earlier delivery of this same message is gone; nothing runs, the journal says so."""
    step = app.step("step")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).with_options(queue_name=app.queue + "x").run()

    app.broker.declare_queue(app.queue + "x")
    handle = one.send()
    app.start(queues={app.queue})
    eventually(lambda: handle.actions())
    app.stop()
    from dramatiq_saga.engine.rows import Outgoing
    from dramatiq_saga.middleware import build_message

    message = build_message(app.broker, Outgoing("step", handle.id, "step", app.queue + "x", 1))
    app.execute(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, started_at = 1, delivery = ? WHERE run_id = ?",
        f"{message.message_id}/x", handle.id,
    )  # fmt: skip
    app.broker.flush(app.queue + "x")
    app.broker.enqueue(message)
    app.start()
    eventually(lambda: lines(journal, "claim_lost"))
    app.drain()
    assert app.calls == []
    assert lines(journal, "claim_lost")[0]["orphaned"] is True
    assert handle.actions()[0].status == "running"
    assert app.messages() == 0


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_listener_that_fails_on_a_rejection_is_journalled(kind: str, applications: Applications, journal: list[Any]) -> None:
    """FENCE-1, ANOM-1: rejection_undelivered carries class, message and the listener's name; nothing else suffers."""
    app, gate = applications(kind), Gate()

    @app.actor
    def held() -> None:
        gate()

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(held)

    def broken(event: Any) -> None:
        raise LookupError("no such inbox")

    events.subscribe(broken, events.ActionOutcomeRejected)
    try:
        handle = one.send()
        app.start()
        gate.wait()
        assert handle.cancel() is True
        gate.leave.release()
        eventually(lambda: lines(journal, "rejection_undelivered"))
        app.drain()
    finally:
        events.unsubscribe(broken)
    line = lines(journal, "rejection_undelivered")[0]
    assert (line["error_type"], line["error_message"]) == ("builtins.LookupError", "no such inbox")
    assert "broken" in line["listener"]
    assert (line["run_id"], line["sequence"], line["actor"]) == (handle.id, 1, "held")
    assert handle.status == "cancelled"


def test_a_failure_between_tries_does_not_come_back_after_a_cancel(app: Application, journal: list[Any]) -> None:
    """C31, STATUS-2: the next try of a cancelled run finds nothing to claim."""

    @app.actor(max_retries=3)
    def flaky() -> None:
        app.calls.append("flaky")
        raise ValueError

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(flaky)

    def cancel(event: events.ActionFailed) -> None:  # the try is recorded, and Dramatiq has not asked for another yet
        assert get_flow(event.run_id, broker=app.broker).cancel("changed my mind") is True

    events.subscribe(cancel, events.ActionFailed)
    try:
        handle = one.send()
        app.start()
        assert app.ended(handle) == "cancelled"
        app.drain()
    finally:
        events.unsubscribe(cancel)
    assert app.calls == ["flaky"]
    step = handle.actions()[0]
    assert (step.status, step.given_up) == ("cancelled", False)
    assert len(lines(journal, "claim_lost")) == 1
    assert handle.events()[-1].detail == "changed my mind"


def test_a_give_up_that_comes_after_a_cancel_is_refused(applications: Applications, journal: list[Any]) -> None:
    """NATIVE-2, STATUS-4: cancelled between the failed try and its end; write_refused names the site."""
    from tests.support import store_faults as f

    app = applications("stub")
    bad = app.step("bad", raises=ValueError())

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(bad)

    handles: list[Any] = []
    f.Faults(app.store).pause(f.FAIL, lambda: handles[0].cancel())
    handles.append(one.send())
    app.start()
    assert app.ended(handles[0]) == "cancelled"
    eventually(lambda: lines(journal, "write_refused"))
    app.drain()
    line = lines(journal, "write_refused")[0]
    assert (line["site"], line["row"], line["run_id"], line["sequence"], line["actor"]) == (
        "given_up", "action", handles[0].id, 1, "bad",
    )  # fmt: skip
    assert handles[0].actions()[0].status == "cancelled"
    assert handles[0].status == "cancelled"


# --- transitions -------------------------------------------------------------------------------------------------------


def test_cancel_gives_a_definite_answer(app: Application, journal: list[Any]) -> None:
    """C29, STATUS-3: true, false once it already is, an error that says where it is when it has ended otherwise."""
    step = app.step("step")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(step)

    first = one.send()
    assert first.cancel("stop") is True
    assert first.cancel() is False
    assert first.compensate() is False
    assert app.types(first) == ["flow.started", "flow.cancelled"]
    second = app.run(one)
    for act, intended in ((second.cancel, "cancelled"), (second.compensate, "rolling_back")):
        with pytest.raises(ConcurrentTransitionError) as caught:
            act()
        assert (caught.value.run_id, caught.value.intended, caught.value.actual) == (second.id, intended, "completed")
    assert second.status == "completed"
    lost = lines(journal, "transition_lost")
    assert [(line["intended"], line["actual"]) for line in lost] == [
        ("cancelled", "cancelled"), ("rolling_back", "cancelled"), ("cancelled", "completed"), ("rolling_back", "completed"),
    ]  # fmt: skip
    assert all({"run_id", "workflow", "observed"} <= set(line) for line in lost)
    app.drain()
    assert app.calls == [("step",)]


def test_nothing_can_be_done_to_a_run_that_is_not_there(app: Application) -> None:
    """STATUS-3: every call on a handle of a run that was pruned says so."""

    @app.workflow
    def one(flow: Flow) -> None: ...

    handle = one.send()
    for table in ("flow_runs", "flow_events"):
        app.execute(f"DELETE FROM {{{table}}}")
    for act in (handle.cancel, handle.compensate, handle.result, lambda: handle.status, lambda: handle.tag("x", 1)):
        with pytest.raises(FlowNotFoundError, match=handle.id):
            act()
    app.start()
    app.drain()
    assert app.messages() == 0


def test_a_terminal_run_is_left_by_nothing(app: Application) -> None:
    """FENCE-2, STATUS: late drives, steps and transitions leave every column as it is."""
    step = app.step("step", gives=1)

    @app.workflow
    def one(flow: Flow) -> int:
        return flow.run(step)

    handle = app.run(one)
    app.drain()
    before = app.sql("SELECT * FROM {flow_runs}"), app.sql("SELECT * FROM {action_runs}"), app.types(handle)
    send_again(app, handle.id)
    app.middleware.runner(app.broker).wake(handle.id)
    from dramatiq_saga.engine.rows import Outgoing
    from dramatiq_saga.middleware import build_message

    app.broker.enqueue(build_message(app.broker, Outgoing("drive", handle.id, "one", app.queue)))
    app.drain()
    assert (app.sql("SELECT * FROM {flow_runs}"), app.sql("SELECT * FROM {action_runs}"), app.types(handle)) == before


# --- reclaim -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enabled", "after", "seconds", "flag", "expected"),
    [
        (False, 900, None, None, None),
        (True, 700, None, None, 700),
        (False, 700, None, True, 700),
        (True, 700, None, False, None),
        (False, 700, 30, None, 30),
        (True, 700, 30, None, 30),
        (True, 700, 30, False, 30),
        (False, 700, 30, True, 30),
    ],
)
def test_the_reclaim_window_of_a_row_follows_the_precedence(
    applications: Applications, enabled: bool, after: int, seconds: int | None, flag: bool | None, expected: int | None
) -> None:
    """RECLAIM-2: seconds, then on, then off, then the settings; for a step and its compensation, each by itself."""
    family = {"reclaim": {"stale_running": {"enabled": enabled, "after_seconds": after}}}
    app = applications("sqlite", settings=Settings.from_mapping({"actions": family, "sagas": family}))
    step, undo, plain = app.step("step"), app.step("undo"), app.step("plain")

    @app.workflow
    def two(flow: Flow) -> None:
        builder = flow.action(step).compensate_with(undo)
        if flag is not None:
            builder = builder.enable_stale_reclaim(flag).enable_compensation_stale_reclaim(flag)
        if seconds is not None:
            builder = builder.reclaim_stale_after(seconds).reclaim_compensation_stale_after(seconds)
        builder.run()
        flow.run(plain)

    app.run(two)
    rows = app.sql("SELECT reclaim_stale_after_seconds, comp_reclaim_stale_after_seconds FROM {action_runs} ORDER BY sequence")
    assert rows == [(expected, expected), (after if enabled else None, None)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_a_claim_derives_the_deadline_from_the_window_and_its_end_takes_it_away(kind: str, applications: Applications) -> None:
    """CLAIM-1, RECLAIM-1: reclaim_stale_at is the claim's moment plus the window; a settled row has none."""
    app = applications(kind)

    @app.actor
    def looks() -> list[Any]:
        return list(app.sql("SELECT reclaim_stale_at - started_at, worker_id, attempts, claims FROM {action_runs}")[0])

    @app.workflow
    def one(flow: Flow) -> list[Any]:
        return flow.action(looks).reclaim_stale_after(42).run()

    handle = app.run(one)
    assert handle.result() == [42_000, app.middleware.worker_id, 1, 1]
    row = app.sql("SELECT reclaim_stale_at, claims FROM {action_runs}")[0]
    assert row == (None, 0)


def test_a_stale_compensation_is_reclaimed_and_its_straggler_refused(applications: Applications, journal: list[Any]) -> None:
    """FENCE-1, RECLAIM-1: compensations carry the same counter and the same fence; CompensationOutcomeRejected tells of it."""
    app, gates = applications("redis"), [Gate(), Gate()]

    @app.actor
    def undo() -> None:
        number = sum(1 for call in app.calls if call == "undo")
        app.calls.append("undo")
        gates[number]()

    step, refuse = app.step("step"), app.step("refuse", raises=ValueError())

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).reclaim_compensation_stale_after(1).run()
        flow.run(refuse)

    with events.listening(events.CompensationOutcomeRejected) as heard:
        handle = one.send()
        app.start(threads=2)
        gates[0].wait()
        send_again(app, handle.id, kind="compensation")
        gates[1].wait()
        gates[1].leave.release()
        assert app.ended(handle) == "failed"
        gates[0].leave.release()
        eventually(lambda: lines(journal, "outcome_rejected"))
        app.drain()
    row = handle.compensations()[0]
    assert (row.status, row.attempts) == ("completed", 2)
    assert app.types(handle).count("compensation.completed") == 1
    assert [(event.outcome, event.compensation.sequence) for event in heard] == [("completed", 1)]
    line = lines(journal, "outcome_rejected")[0]
    assert (line["row"], line["claimed_attempts"], line["attempts"]) == ("compensation", 1, 2)
