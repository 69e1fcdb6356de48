"""Timers, timeouts and deadlines, enforced without a sweep by real workers; and by sweeps alone where no worker was there."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest

from dramatiq_saga import (
    Flow,
    FlowExpiredError,
    FlowHandle,
    Settings,
    SignalTimeoutError,
    StepExpiredError,
    StepFailedError,
    current_step,
)
from dramatiq_saga.errors import ChildExpiredError, WouldBlockError
from dramatiq_saga.events import ActionExpired, ActionOutcomeRejected, FlowExpired, SignalTimedOut, listening
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.sweep import sweep
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def waiting(handle: FlowHandle[Any]) -> None:
    eventually(lambda: handle.status == "waiting", because=f"run {handle.id} is waiting")


def swept(app: Application) -> Any:
    return sweep(app.engine, app.middleware.sender(app.broker)).monitor


def let_pass(app: Application, seconds: int) -> None:
    """As if so much time had passed while nobody was there: every moment that rows and messages name is that much earlier."""
    ms = seconds * 1000
    app.execute("UPDATE {waits} SET due_at = due_at - ?, created_at = created_at - ?", ms, ms)
    app.execute("UPDATE {action_runs} SET expires_at = expires_at - ?, created_at = created_at - ?", ms, ms)
    app.execute(
        "UPDATE {flow_runs} SET expires_at = expires_at - ?, timer_at = timer_at - ?, timer_last = timer_last - ?, "
        "woken_at = woken_at - ?, created_at = created_at - ?",
        ms, ms, ms, ms, ms,
    )  # fmt: skip
    if app.joined:
        app.execute("UPDATE {messages} SET available_at = available_at - ?", ms)


# --- TIMER-1: workers do it, without a sweep ---------------------------------------------------------------------------


def test_sleeps_and_timeouts_end_by_themselves(every_app: Application) -> None:
    """TIMER-1, SIG-2: no sweep runs; a timer, then a timeout, and a second timer right after the first."""
    app = every_app
    step = app.step("step")

    @app.workflow
    def patient(flow: Flow) -> str:
        flow.sleep(0.3)
        flow.run(step, "slept")
        flow.sleep(timedelta(milliseconds=300))
        try:
            flow.await_signal("never", wait_seconds=0.3)
        except SignalTimeoutError as error:
            flow.run(step, error.name)
        flow.sleep_until(flow.now() + timedelta(seconds=0.2))
        return "done"

    with listening(SignalTimedOut) as heard:
        handle = app.run(patient)
        assert handle.result() == "done"
    app.drain()
    assert app.calls == [("step", "slept"), ("step", "never")]
    assert [(event.wait.name, event.wait.status) for event in heard] == [("never", "timed_out")]
    waits = app.sql("SELECT kind, status, ended_at >= due_at FROM {waits} WHERE run_id = ? ORDER BY sequence", handle.id)
    assert [(kind, status, bool(late)) for kind, status, late in waits] == [
        ("timer", "consumed", True), ("timer", "consumed", True), ("signal", "timed_out", True), ("timer", "consumed", True),
    ]  # fmt: skip


def test_a_signal_in_time_leaves_nothing_for_the_timeout_to_do(every_app: Application) -> None:
    """SIG-2, C31: the alarm of a wait that has ended comes due and changes nothing; nor does one of a run that has ended."""
    app = every_app

    @app.workflow
    def quick(flow: Flow) -> Any:
        value = flow.await_signal("go", wait_seconds=0.6)
        flow.sleep(0.8)
        return value

    app.start()
    handle, cancelled = quick.send(), quick.send()
    waiting(handle)
    handle.signal("go", 1)
    waiting(cancelled)
    cancelled.cancel("not needed")
    assert app.ended(handle) == "completed"
    app.drain()
    assert handle.result() == 1
    assert cancelled.status == "cancelled"
    assert "signal.timed_out" not in app.types(handle) + app.types(cancelled)
    assert app.types(cancelled)[-1] == "flow.cancelled"


def test_a_step_that_is_not_settled_by_its_deadline_expires_and_its_late_report_is_refused(every_app: Application) -> None:
    """EXPIRE-1, FENCE-1: the workflow sees StepExpiredError at the moment, while the body is still at work; and the body can tell."""
    app = every_app
    entered, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    @app.actor
    def slow() -> str:
        me = current_step()
        assert me is not None
        seen.append(me.cancelled)
        entered.set()
        assert leave.wait(20)
        seen.append(me.cancelled)
        return "too late"

    @app.workflow
    def hurry(flow: Flow) -> str:
        try:
            return flow.action(slow).expires_in(0.5).run()
        except StepExpiredError as error:
            return f"{error.actor_name} expired at {error.sequence}"

    with listening(ActionExpired, ActionOutcomeRejected) as heard:
        app.start()
        handle = hurry.send()
        assert entered.wait(20)
        assert app.ended(handle) == "completed"
        leave.set()
        eventually(lambda: len(heard) == 2)
    assert handle.result() == "slow expired at 1"
    assert [type(event).__name__ for event in heard] == ["ActionExpired", "ActionOutcomeRejected"]
    (step,) = handle.actions()
    assert (step.status, step.attempts, step.result) == ("expired", 1, None)
    assert seen == [False, True]


@pytest.mark.both_ways
def test_an_optional_step_that_expires_gives_its_fallback(app: Application) -> None:
    """EXPIRE-1, OPT-1: nobody takes the step before its deadline; the run goes on."""

    other = app.queue + "_elsewhere"
    nobody = app.step("nobody", queue_name=other)

    @app.workflow
    def lenient(flow: Flow) -> list[Any]:
        first = flow.action(nobody).expires_in(0.3).fallback_value_on_fail("none").run()
        second = flow.optional_action(nobody).expires_in(0.3).run()
        return [first, second]

    app.start(queues={app.queue})
    handle = lenient.send()
    assert app.ended(handle) == "completed"
    assert handle.result() == ["none", None]
    assert [step.status for step in handle.actions()] == ["expired"] * 2
    assert app.calls == []


def test_a_run_that_has_not_ended_by_its_deadline_is_undone_and_expires(every_app: Application) -> None:
    """EXPIRE-1, COMP-1: a step that has completed is undone, its result known to no drive of the workflow but the replay of the plan."""
    app = every_app
    undo = app.step("undo")
    reserve = app.step("reserve", gives={"id": 7})

    @app.workflow(expires_in=0.6)
    def slow(flow: Flow) -> None:
        flow.action(reserve).compensate_with(lambda made: undo.message(made["id"])).run()
        flow.await_signal("never")

    with listening(FlowExpired) as heard:
        handle = app.run(slow)
        eventually(lambda: heard)
    app.drain()
    assert (handle.status, handle.rollback) == ("expired", "done")
    assert app.calls == [("reserve",), ("undo", 7)]
    with pytest.raises(FlowExpiredError, match=r"expired: its deadline \(20\d\d-"):
        handle.result()
    # on a busy machine the deadline may pass before the wait has begun, and then it does not
    assert app.sql("SELECT status FROM {waits} WHERE run_id = ?", handle.id) in ([("cancelled",)], [])
    assert app.types(handle)[-2:] == ["rollback.finished", "flow.expired"]


def test_a_run_whose_deadline_passes_before_anybody_drives_it_expires(app: Application) -> None:
    """EXPIRE-1: still pending, nothing to undo; and a run in time is left alone."""
    step = app.step("step")

    @app.workflow
    def slow(flow: Flow) -> str:
        flow.run(step)
        return "done"

    late = slow.send_with_options(delay=60_000, expires_in=0.2)
    app.start()
    assert app.ended(late) == "expired"
    assert app.calls == []
    quick = slow.send_with_options(expires_in=60)
    assert app.ended(quick) == "completed"
    assert app.types(late) == ["flow.started", "flow.expired"]


def test_implicit_deadlines_come_from_the_settings(applications: Applications) -> None:
    """EXPIRE-1: a wait, a step and a run that say nothing; what they say themselves counts more."""
    settings = Settings.from_mapping({"monitor.expiration.defaults": {"run": 3.0, "action": 0.3, "signal": 0.2}})
    app = applications("sqlite", settings=settings)
    nobody = app.step("nobody", queue_name=app.queue + "_elsewhere")

    @app.workflow
    def implicit(flow: Flow) -> list[str]:
        said = []
        try:
            flow.await_signal("never")
        except SignalTimeoutError:
            said.append("signal")
        try:
            flow.run(nobody)
        except StepExpiredError:
            said.append("step")
        flow.await_signal(",".join(said), wait_seconds=60)
        return said

    app.start(queues={app.queue})
    handle = implicit.send()
    assert app.ended(handle) == "expired"
    assert app.sql("SELECT name FROM {waits} WHERE run_id = ? ORDER BY sequence", handle.id) == [("never",), ("signal,step",)]
    longer = implicit.send_with_options(expires_in=60)
    eventually(lambda: len(app.sql("SELECT 1 FROM {waits} WHERE run_id = ?", longer.id)) == 2)
    assert longer.status == "waiting"


def test_a_loop_of_short_waits_sends_the_alarm_of_its_deadline_once(joined: Application) -> None:
    """TIMER-1: a reminder every so often, under a deadline of weeks: no message per round stays in the queue."""
    app, remind = joined, joined.step("remind")

    @app.workflow(expires_in=timedelta(days=60))
    def invoice(flow: Flow) -> None:
        for number in range(5):
            try:
                flow.await_signal("paid", wait_seconds=0.1)
            except SignalTimeoutError:
                flow.run(remind, number)

    handle = app.run(invoice)
    assert handle.status == "completed"
    assert app.calls == [("remind", number) for number in range(5)]
    eventually(lambda: app.sql("SELECT COUNT(*) FROM {messages} WHERE state <> 3") == [(1,)])


def test_members_that_share_a_deadline_cost_one_alarm(joined: Application) -> None:
    """TIMER-1: forty steps with a deadline and a run with one: the queue holds one message of kind timer for each moment that counts."""
    app = joined
    nobody = app.step("nobody", queue_name=app.queue + "_elsewhere")

    @app.workflow
    def wide(flow: Flow) -> int:
        builders = [flow.action(nobody, number).expires_in(30).continue_on_failure() for number in range(40)]
        return len(flow.parallel(*builders).run())

    handle = wide.send_with_options(expires_in=60)

    def alarms() -> int:
        return len(app.sql("SELECT 1 FROM {messages} WHERE state = 1 AND actor = 'wide'"))

    assert alarms() == 1
    with app.working(queues={app.queue}):
        eventually(lambda: len(handle.actions()) == 40)
    assert alarms() == 2


# --- after a downtime, and the sweep -----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["the workers", "a sweep"])
def test_what_fell_due_while_nobody_was_there_fires_once_each_in_due_order(app: Application, who: str) -> None:
    """C37: 40 timers, 10 timeouts and 5 run deadlines, some of them of one run."""
    undo, reserve = app.step("undo"), app.step("reserve")
    step = app.step("step")

    @app.workflow
    def sleeper(flow: Flow, number: int) -> str:
        flow.sleep(100)
        flow.run(step, number)
        return "woke"

    @app.workflow
    def waiter(flow: Flow) -> str:
        try:
            flow.await_signal("never", wait_seconds=100)
        except SignalTimeoutError:
            return "timed out"
        return "signalled"

    @app.workflow
    def doomed(flow: Flow) -> None:
        flow.action(reserve).compensate_with(undo).run()
        flow.sleep(100)
        flow.await_signal("never")

    @app.workflow
    def lucky(flow: Flow) -> str:
        flow.sleep(100)  # due before the run's own deadline, so it has completed before that
        return "in time"

    runs = [sleeper.send(number) for number in range(40)] + [waiter.send() for _ in range(10)]
    dooms = [doomed.send_with_options(expires_in=200) for _ in range(4)]
    saved = lucky.send_with_options(expires_in=200)
    with app.working(threads=4):
        eventually(lambda: app.sql("SELECT COUNT(*) FROM {waits}") == [(55,)])
    let_pass(app, 10_000)
    if who == "a sweep":
        report = swept(app)
        assert (report.timed_out, report.expired_runs, report.errors) == (55, 4, 0)
    app.start(threads=4)
    assert [app.ended(handle) for handle in runs] == ["completed"] * 50
    assert [app.ended(handle) for handle in dooms] == ["expired"] * 4
    assert app.ended(saved) == "completed"
    app.drain()
    assert sorted(call[1] for call in app.calls if call[0] == "step") == list(range(40))
    assert app.calls.count(("undo",)) == 4
    for handle in dooms:  # the timer was due before the run's deadline; the wait after it is not begun
        assert app.sql("SELECT status FROM {waits} WHERE run_id = ?", handle.id) == [("consumed",)]
    for handle in [*runs, *dooms, saved]:
        words = app.types(handle)
        assert words.count("signal.timed_out") == (handle.workflow_name == "waiter")
        assert sum(word in ("flow.completed", "flow.expired") for word in words) == 1


def test_a_sweep_alone_ends_what_is_overdue(every_app: Application) -> None:
    """EXPIRE-1: the same verbs; alarms and loops lost, no worker there. A second sweep finds nothing."""
    app = every_app
    step = app.step("step", queue_name=app.queue + "_elsewhere")

    @app.workflow
    def waits(flow: Flow) -> None:
        flow.sleep(100)
        flow.await_signal("never")

    @app.workflow
    def steps(flow: Flow) -> None:
        flow.optional_action(step).expires_in(100).run()
        flow.await_signal("never")

    @app.workflow
    def runs(flow: Flow) -> None:
        flow.await_signal("never")

    handles = [waits.send(), steps.send(), runs.send_with_options(expires_in=100)]
    with app.working(queues={app.queue}):
        eventually(lambda: app.sql("SELECT COUNT(*) FROM {waits}") == [(2,)])
        eventually(lambda: len(handles[1].actions()) == 1)
    let_pass(app, 10_000)
    if app.joined:
        app.execute("DELETE FROM {messages}")
    report, again = swept(app), swept(app)
    assert (report.timed_out, report.expired_steps, report.expired_runs, report.errors) == (1, 1, 1, 0)
    assert (again.timed_out, again.expired_steps, again.expired_runs, again.errors) == (0, 0, 0, 0)
    assert handles[2].status == "expired"
    with app.working(queues={app.queue}):
        eventually(lambda: app.sql("SELECT COUNT(*) FROM {waits} WHERE status = 'waiting'") == [(2,)])
    assert [handle.status for handle in handles] == ["waiting", "waiting", "expired"]


def test_an_expired_run_stays_expired_when_it_is_kicked(lite: Application) -> None:
    """C38: terminal stays terminal; the kick says so, and an operator starts a new run, which has a new deadline."""

    @lite.workflow(expires_in=0.1)
    def slow(flow: Flow) -> None:
        flow.await_signal("never")

    handle = lite.run(slow)
    report = kick(lite.engine, handle.id, lite.middleware.sender(lite.broker))
    assert (report.driven, report.status) == (False, "expired")
    assert handle.status == "expired"


@pytest.mark.parametrize("deadline", ["the step's", "the run's"])
def test_a_try_that_could_not_begin_before_the_deadline_fails_at_once(app: Application, deadline: str) -> None:
    """C38: with its own error, and without waiting for the moment; the message of that try finds nothing to do."""
    flaky = app.step("flaky", raises=ConnectionError("no route"), max_retries=5, min_backoff=300_000, max_backoff=300_000)

    @app.workflow
    def hopeless(flow: Flow) -> None:
        action = flow.action(flaky)
        (action.expires_in(120) if deadline == "the step's" else action).run()

    app.start()
    handle = hopeless.send_with_options(expires_in=None if deadline == "the step's" else 120)
    assert app.ended(handle) == "failed"
    (step,) = handle.actions()
    assert (step.status, step.given_up, step.tries) == ("failed", True, 1)
    error = handle.actions()[0].error
    assert error is not None
    assert error["message"] == "no route"
    assert StepFailedError.__name__ in app.sql("SELECT error FROM {flow_runs} WHERE id = ?", handle.id)[0][0]


# --- SYNC-1 ------------------------------------------------------------------------------------------------------------


def test_run_sync_waits_for_what_time_alone_ends(app: Application) -> None:
    """SYNC-1, TIMER-1: timers and timeouts pass in the calling process; deadlines too."""
    step = app.step("step")

    @app.workflow
    def patient(flow: Flow) -> str:
        flow.sleep(0.05)
        flow.run(step)
        try:
            flow.await_signal("never", wait_seconds=0.05)
        except SignalTimeoutError:
            return "timed out"
        return "signalled"

    @app.workflow(expires_in=0.1)
    def doomed(flow: Flow) -> None:
        flow.await_signal("never")

    assert patient.run_sync().result() == "timed out"
    assert app.calls == [("step",)]
    assert doomed.run_sync().status == "expired"


def test_run_sync_says_at_once_what_nothing_here_can_end(app: Application) -> None:
    """SYNC-1: a signal without a timeout; the error names it, and the run is there to be signalled and driven by workers."""

    @app.workflow
    def stuck(flow: Flow) -> Any:
        return flow.await_signal("decision")

    with pytest.raises(WouldBlockError, match="waits for signal 'decision'") as caught:
        stuck.run_sync()
    handle: FlowHandle[Any] = FlowHandle(caught.value.run_id, "stuck", middleware=app.middleware, broker=app.broker)
    handle.signal("decision", 5)
    app.start()
    assert app.ended(handle) == "completed"
    assert handle.result() == 5


def test_run_sync_takes_a_signal_that_one_of_its_own_steps_sends(app: Application) -> None:
    """SYNC-1, SIG-1: the step signals the run that it is a step of; kept, and taken by the wait that follows."""

    @app.actor
    def decide() -> None:
        me = current_step()
        assert me is not None
        FlowHandle(me.run_id, me.workflow_name, middleware=app.middleware, broker=app.broker).signal("decision", "mine")

    @app.workflow
    def own(flow: Flow) -> Any:
        flow.run(decide)
        return flow.await_signal("decision")

    assert own.run_sync().result() == "mine"


# --- children and blocks -----------------------------------------------------------------------------------------------


def test_a_child_runs_deadline_ends_it_and_its_parent_goes_on(every_app: Application) -> None:
    """EXPIRE-1, CHILD-2: the child's own alarm, or loop; its work is undone, and the parent sees ChildExpiredError."""
    app = every_app
    undo, reserve = app.step("undo"), app.step("reserve")

    @app.workflow
    def slow(flow: Flow) -> None:
        flow.action(reserve).compensate_with(undo).run()
        flow.await_signal("never")

    @app.workflow
    def parent(flow: Flow) -> str:
        try:
            flow.child(slow).expires_in(0.8).run()
        except ChildExpiredError as error:
            return str(error)
        return "ended"

    handle = app.run(parent)
    app.drain()
    (child,) = handle.children()
    assert str(handle.result()).startswith(f"child slow {child.child_id} (sequence 1) expired: its deadline passed")
    assert child.status == "expired"
    assert app.sql("SELECT status, rollback FROM {flow_runs} WHERE id = ?", child.child_id) == [("expired", "done")]
    assert app.calls == [("reserve",), ("undo",)]


def test_members_that_expire_let_the_others_go(app: Application) -> None:
    """EXPIRE-1, PAR-1: two places in a block of four; what sits in them expires, and the rest runs."""
    elsewhere = app.queue + "_elsewhere"
    nobody, step = app.step("nobody", queue_name=elsewhere), app.step("step", gives="ran")

    @app.workflow
    def narrow(flow: Flow) -> list[Any]:
        stuck = [flow.action(nobody).expires_in(0.4).fallback_value_on_fail("late") for _ in range(2)]
        return flow.parallel(*stuck, flow.action(step), flow.action(step)).max_in_flight(2).run()

    app.start(queues={app.queue})
    handle = narrow.send()
    assert app.ended(handle) == "completed"
    assert handle.result() == ["late", "late", "ran", "ran"]


# --- on RabbitMQ, and two hundred rounds --------------------------------------------------------------------------------


def test_rabbitmq_in_front_of_a_database_carries_signals_timers_and_deadlines(applications: Applications) -> None:
    """TIMER-1, SIG-1, EXPIRE-1: nothing long waits in a queue or unacknowledged; the workers' loop sends what is due."""
    app = applications("rabbitmq")
    step = app.step("step")

    @app.workflow
    def mixed(flow: Flow) -> Any:
        flow.sleep(0.3)
        flow.run(step)
        return flow.await_signal("go", wait_seconds=60)

    @app.workflow(expires_in=0.5)
    def doomed(flow: Flow) -> None:
        flow.await_signal("never")

    app.start()
    handle, doom = mixed.send(), doomed.send()
    eventually(lambda: app.sql("SELECT 1 FROM {waits} WHERE run_id = ? AND name = 'go'", handle.id))
    assert app.messages() == 0 or doom.status != "expired"
    handle.signal("go", "now")
    assert app.ended(handle) == "completed"
    assert handle.result() == "now"
    assert app.ended(doom) == "expired"


def test_in_two_hundred_rounds_the_payload_or_the_timeout_wins_and_the_history_agrees(joined: Application) -> None:
    """C32, SIG-2: signals aimed at the very moment of the timeout, by two workers and four senders; never both, never neither."""
    app = joined
    dice = random.Random(32)
    step = app.step("step")

    @app.workflow
    def close(flow: Flow) -> Any:
        try:
            value = flow.await_signal("go", wait_seconds=0.5)
        except SignalTimeoutError:
            value = "timed out"
        flow.run(step, value)
        return value

    app.start(threads=2)
    app.start(threads=2)
    seen = []
    for _ in range(4):
        handles = [close.send() for _ in range(50)]
        moments = [dice.randrange(-20, 60) for _ in handles]

        def send(part: int, handles: list[FlowHandle[Any]] = handles, moments: list[int] = moments) -> None:
            for handle, offset in list(zip(handles, moments, strict=True))[part::4]:
                due = eventually(
                    lambda handle=handle: app.sql("SELECT due_at FROM {waits} WHERE run_id = ?", handle.id)  # type: ignore[misc]
                )[0][0]
                eventually(lambda due=due, offset=offset: app.engine.now() >= due + offset, interval=0.001)  # type: ignore[misc]
                handle.signal_if_running("go", "payload")

        senders = [threading.Thread(target=send, args=(part,)) for part in range(4)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        for handle in handles:
            assert app.ended(handle) == "completed"
            seen.append((handle, handle.result()))
    for handle, value in seen:
        ((status,),) = app.sql("SELECT status FROM {waits} WHERE run_id = ?", handle.id)
        words = [word for word in app.types(handle) if word in ("signal.consumed", "signal.timed_out")]
        assert (status, words) == {
            "payload": ("consumed", ["signal.consumed"]), "timed out": ("timed_out", ["signal.timed_out"]),
        }[value]  # fmt: skip
        assert [signal.status for signal in handle.signals()] in (["consumed"] if value == "payload" else ["received"], [])
    assert len(app.calls) == 200


def test_a_run_that_run_sync_leaves_to_workers_has_its_alarm(joined: Application) -> None:
    """SYNC-1, TIMER-1: a step that nobody here can run has a deadline; the workers that take over are told of the moment."""
    app = joined
    step = app.step("step")

    @app.workflow
    def left(flow: Flow) -> str:
        flow.action(step).expires_in(60).run()
        flow.await_signal("go")
        try:
            flow.await_signal("never", wait_seconds=0.2)
        except SignalTimeoutError:
            return "timed out"
        return "signalled"

    with pytest.raises(WouldBlockError) as caught:
        left.run_sync()
    run_id = caught.value.run_id
    assert app.sql("SELECT timer_at FROM {flow_runs} WHERE id = ?", run_id) == [(None,)]
    handle: FlowHandle[Any] = FlowHandle(run_id, "left", middleware=app.middleware, broker=app.broker)
    handle.signal("go")
    app.start()
    assert app.ended(handle) == "completed"
    assert handle.result() == "timed out"
