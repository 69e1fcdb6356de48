"""The testing helpers (C61): a user's workflows run in a test, without a server, a worker or a wait.

The application under test stands on an SQLite file in a folder that does not exist: whoever opened it would fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import dramatiq
import pytest
from dramatiq import Retry, Worker
from dramatiq import broker as dramatiq_broker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, GroupCallbacks, Middleware
from dramatiq.rate_limits.backends.redis import RedisBackend as RedisRateLimits
from dramatiq.results import Results
from dramatiq.results.backends.redis import RedisBackend

from dramatiq_saga import (
    Flow,
    FlowFailedError,
    FlowHandle,
    ResultMissing,
    ResultTimeout,
    SagaError,
    SagaMiddleware,
    Settings,
    StepFailedError,
    current_step,
    get_flow,
    query,
    workflow,
)
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.errors import (
    BuilderNotRunError,
    ChildFailedError,
    HistoryMismatchError,
    SendInsideWorkflowError,
    SignalTimeoutError,
    UnknownActorError,
)
from dramatiq_saga.testing import SagaTester, load_history, record_history, replay_history
from tests.support.pages import ROOT
from tests.support.waiting import eventually

pytest_plugins = ["dramatiq_saga.testing"]

HOUR = 3_600_000  # milliseconds, as in Dramatiq's own options


class CountedLocks:
    """An application's back end for overlap locks."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def take(self, key: str, token: str, *, ttl_ms: int, instead_of: str | None = None) -> str:
        self.asked.append(key)
        return token

    def release(self, key: str, token: str) -> bool:
        self.asked.append(key)
        return True


class Shop:
    """An application as a user would write it, in a class so that each test has a new one."""

    def __init__(self, path: Path) -> None:
        self.broker = SQLiteBroker(path)
        self.broker.add_middleware(AsyncIO())
        self.broker.add_middleware(GroupCallbacks(RedisRateLimits(url="redis://localhost:1")))
        self.broker.add_middleware(CurrentMessage())
        self.locks = CountedLocks()
        self.middleware = SagaMiddleware(settings=Settings.recommended(), locks=self.locks)
        self.broker.add_middleware(self.middleware)
        self.seen: list[str] = []

        @self.actor(max_retries=3, min_backoff=HOUR, max_backoff=3 * HOUR)
        def charge_card(order: str, *, amount: int = 1) -> dict[str, Any]:
            self.seen.append("charged")
            return {"id": f"charge-for-{order}"}

        @self.actor(max_retries=0)
        def refund_card(charge: str) -> None:
            self.seen.append("refunded")

        @self.actor(max_retries=1, throws=ValueError)
        def ship_order(order: str) -> str:
            if order == "nowhere":
                raise ValueError("no such address")
            return "shipped"

        @workflow(broker=self.broker)
        def checkout(flow: Flow, order: str) -> str:
            charge = flow.action(charge_card, order).compensate_with(lambda charge: refund_card.message(charge["id"])).run()
            flow.run(ship_order, order)
            return str(charge["id"])

        self.charge_card, self.refund_card, self.ship_order, self.checkout = charge_card, refund_card, ship_order, checkout

    def actor(self, **options: Any) -> Callable[[Callable[..., Any]], dramatiq.Actor[..., Any]]:
        def declare(fn: Callable[..., Any]) -> dramatiq.Actor[..., Any]:
            return dramatiq.actor(fn, broker=self.broker, **options)  # type: ignore[no-any-return]

        return declare


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    before = dramatiq_broker.global_broker
    shop = Shop(tmp_path / "no such folder" / "shop.db")
    dramatiq.set_broker(shop.broker)
    yield shop
    dramatiq_broker.global_broker = before
    assert not (tmp_path / "no such folder").exists()


# --- what runs -------------------------------------------------------------------------------------------------------


def test_a_run_completes_without_its_database(shop: Shop, saga: SagaTester) -> None:
    run = saga.start(shop.checkout, "1")
    assert run.status == "pending"
    saga.drain()
    assert run.result() == "charge-for-1"
    assert [step.status for step in run.actions()] == ["completed", "completed"]
    assert saga.waiting == []


def test_overlap_locks_are_set_aside(shop: Shop, saga: SagaTester) -> None:
    """LOCK-1: steps, undos and drives, queued and inline; no server is asked."""
    saga.start(shop.checkout, "nowhere")
    saga.drain()
    shop.checkout.run_sync("1")
    assert shop.seen == ["charged", "refunded", "charged"]
    assert shop.locks.asked == []


def test_a_failed_run_is_undone_and_its_original_exception_is_the_cause(shop: Shop, saga: SagaTester) -> None:
    """C61: with the traceback into the body, behind the error that the workflow function saw."""
    run = saga.start(shop.checkout, "nowhere")
    saga.drain()
    assert (run.status, run.rollback, shop.seen) == ("failed", "done", ["charged", "refunded"])
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    seen_by_function = failed.value.__cause__
    assert isinstance(seen_by_function, StepFailedError)
    original = seen_by_function.__cause__
    assert isinstance(original, ValueError)
    assert saga.errors == [original]
    frames = [[frame.name for frame in traceback.extract_tb(error.__traceback__)] for error in (seen_by_function, original)]
    assert (frames[0][0], frames[1]) == ("checkout", ["ship_order"])


def test_a_test_that_fails_on_something_else_shows_the_exception_all_the_same(
    shop: Shop, saga: SagaTester, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged as a worker logs it, from the first line of the code under test."""
    saga.replace(shop.refund_card, KeyError("gone"))
    saga.start(shop.checkout, "nowhere")  # that ValueError is expected: the actor `throws` it
    saga.drain()
    (line,) = [record for record in caplog.records if record.exc_info]
    assert line.exc_info is not None
    assert line.exc_info[1] is saga.errors[1]


def test_an_exception_in_the_workflow_function_is_the_cause_itself(shop: Shop, saga: SagaTester) -> None:
    @workflow(broker=shop.broker)
    def confused(flow: Flow) -> None:
        flow.run(shop.ship_order, "1")
        raise ZeroDivisionError("in the function")

    run = saga.start(confused)
    saga.drain()
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert [type(error) for error in saga.errors] == [ZeroDivisionError]
    assert "confused" in [frame.name for frame in traceback.extract_tb(failed.value.__cause__.__traceback__)]


def test_an_error_that_a_workflow_makes_of_a_step_leads_back_to_the_original(shop: Shop, saga: SagaTester) -> None:
    class OrderFailed(Exception):
        pass

    @workflow(broker=shop.broker)
    def wrapping(flow: Flow) -> None:
        try:
            flow.run(shop.ship_order, "nowhere")
        except StepFailedError as error:
            raise OrderFailed("wrapped") from error

    run = saga.start(wrapping)
    saga.drain()
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    wrapped = failed.value.__cause__
    assert isinstance(wrapped, OrderFailed)
    assert wrapped.__cause__ is not None
    assert wrapped.__cause__.__cause__ is saga.errors[0]


def test_a_result_that_cannot_be_stored_shows_as_what_it_is(shop: Shop, saga: SagaTester) -> None:
    saga.replace(shop.ship_order, lambda order: object())
    run = saga.start(shop.checkout, "1")
    saga.drain()
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    assert failed.value.__cause__ is not None
    assert failed.value.__cause__.__cause__ is saga.errors[0]
    assert "cannot be stored" in str(saga.errors[0])


def test_what_a_body_may_ask_for_is_there(shop: Shop, saga: SagaTester) -> None:
    """current_step, CurrentMessage, get_broker, get_flow, query and a message from inside a step."""
    facts: dict[str, Any] = {}

    @shop.actor(max_retries=0)
    def note(text: str) -> None:
        facts["noted"] = text

    def look_around(order: str) -> None:
        step = current_step()
        assert step is not None
        message = CurrentMessage.get_current_message()
        assert message is not None
        facts["key"], facts["actor"], facts["broker"] = step.idempotency_key, message.actor_name, dramatiq.get_broker()
        facts["status"], facts["count"] = get_flow(step.run_id).status, query(workflow="checkout").count()
        note.send("from inside")

    saga.replace(shop.ship_order, look_around)
    run = saga.start(shop.checkout, "1")
    saga.drain()
    assert run.result() == "charge-for-1"
    assert facts == {
        "key": f"{run.id}:2:0", "actor": "ship_order", "broker": saga.broker, "status": "running", "count": 1, "noted": "from inside",
    }  # fmt: skip
    assert isinstance(saga.broker, StubBroker)


def test_code_under_test_sends_by_itself(shop: Shop, saga: SagaTester) -> None:
    """The run's handle is the ordinary one, and so is the application's own broker."""
    run = shop.checkout.send_with_options(args=("7",), run_id="order-7", tags={"order": 7})
    shop.broker.enqueue(shop.refund_card.message("by hand"))
    assert get_flow("order-7", broker=shop.broker).status == "pending"
    saga.drain()
    assert run.result() == "charge-for-7"
    assert [found.id for found in query(tags={"order": 7})] == ["order-7"]
    assert saga.calls(shop.refund_card) == [call("by hand")]


def test_code_under_test_sends_from_a_thread_of_its_own(shop: Shop, saga: SagaTester) -> None:
    handles: list[FlowHandle[str]] = []
    thread = threading.Thread(target=lambda: handles.append(shop.checkout.send("1")))
    thread.start()
    thread.join()
    saga.drain()
    assert handles[0].result() == "charge-for-1"


def test_run_sync_stays_in_memory_and_knows_substitutes(shop: Shop, saga: SagaTester) -> None:
    """SYNC-1."""
    saga.replace(shop.charge_card, lambda order, amount=1: {"id": "free"})
    assert shop.checkout.run_sync("1").result() == "free"
    assert saga.calls(shop.charge_card) == [call("1")]
    with pytest.raises(FlowFailedError) as failed:
        shop.checkout.run_sync("nowhere").result()
    assert failed.value.__cause__ is not None
    assert isinstance(failed.value.__cause__.__cause__, ValueError)


def test_cancel_and_compensate_work_from_outside(shop: Shop, saga: SagaTester) -> None:
    """COMP-1."""
    saga.replace(shop.ship_order, Retry("later", delay=HOUR))
    run = saga.start(shop.checkout, "1")
    saga.drain()
    assert run.compensate("changed my mind")
    saga.drain()
    assert (run.status, run.rollback) == ("cancelled", "done")
    assert saga.calls(shop.refund_card) == [call("charge-for-1")]


@pytest.mark.parametrize("order", ["1", "nowhere"])
def test_rows_and_history_are_those_that_a_worker_leaves(tmp_path: Path, order: str) -> None:
    """What a test shows is what would happen: here with the same application, once in a test and once on a worker."""
    shop = Shop(tmp_path / "shop.db")

    def facts(run: FlowHandle[str]) -> list[Any]:
        steps = [(step.sequence, step.actor, step.status, step.attempts) for step in run.actions()]
        undone = [(undo.sequence, undo.actor, undo.status, undo.attempts) for undo in run.compensations()]
        return [
            run.status,
            run.rollback,
            steps,
            undone,
            [(event.type, event.sequence, event.attempt) for event in run.events()],
        ]

    with SagaTester() as saga:
        run = saga.start(shop.checkout, order)
        saga.drain()
        in_the_test = facts(run)
    worker = Worker(shop.broker, worker_timeout=10, worker_threads=2)
    worker.start()
    try:
        real = shop.checkout.send(order)
        eventually(lambda: real.status in ("completed", "failed"))
    finally:
        worker.stop()
    assert in_the_test == facts(real)
    shop.broker.close()


# --- time ------------------------------------------------------------------------------------------------------------


def test_backoff_follows_the_clock_and_has_no_random_part(shop: Shop, saga: SagaTester) -> None:
    """NATIVE-1: an hour, two, and then the longest; four tries."""
    tried: list[datetime] = []

    def fail(order: str, amount: int = 1) -> None:
        tried.append(saga.now)
        raise ConnectionError("down")

    saga.replace(shop.charge_card, fail)
    run = saga.start(shop.checkout, "1")
    saga.drain()
    assert len(tried) == 1
    assert run.status == "running"
    saga.advance(timedelta(minutes=59))
    assert len(tried) == 1
    saga.advance(timedelta(days=1))
    hours = [(moment - tried[0]) / timedelta(hours=1) for moment in tried]
    assert hours == [0, 1, 3, 6]
    assert run.status == "failed"
    assert [type(error) for error in saga.errors] == [ConnectionError] * 4


def test_a_step_that_succeeds_at_its_third_try(shop: Shop, saga: SagaTester) -> None:
    saga.replace(shop.charge_card, Mock(side_effect=[ConnectionError(), ConnectionError(), {"id": "at last"}]))
    run = saga.start(shop.checkout, "1")
    saga.advance(timedelta(hours=3))
    assert run.result() == "at last"
    assert run.actions()[0].attempts == 3


@pytest.mark.parametrize(
    ("options", "raised", "tries"),
    [
        ({"max_retries": 5, "throws": KeyError}, KeyError("final"), 1),
        ({"retry_when": lambda tries, error: tries < 2}, KeyError("until two"), 3),
        ({"max_retries": 1}, Retry("soon", delay=1), 2),
    ],
)
def test_dramatiq_decides_how_often_a_step_is_tried(
    shop: Shop, saga: SagaTester, options: dict[str, Any], raised: Exception, tries: int
) -> None:
    """NATIVE-2: it is Dramatiq's own Retries that decides."""

    @shop.actor(**options)
    def stubborn() -> None:
        raise raised

    @workflow(broker=shop.broker)
    def once(flow: Flow) -> None:
        flow.run(stubborn)

    run = saga.start(once)
    saga.advance(timedelta(days=1))
    assert (run.status, len(saga.calls(stubborn))) == ("failed", tries)


def test_advance_runs_each_thing_at_its_own_moment_in_the_order_of_time(shop: Shop, saga: SagaTester) -> None:
    done: list[tuple[str, datetime]] = []

    @shop.actor(max_retries=0)
    def note(text: str) -> None:
        done.append((text, saga.now))
        if text == "early":
            note.send_with_options(args=("between",), delay=30_000)

    start = saga.now
    note.send_with_options(args=("late",), delay=60_000)
    note.send_with_options(args=("early",), delay=20_000)
    saga.drain()
    assert done == []
    assert saga.waiting == ["a message to note in 0:00:20", "a message to note in 0:01:00"]
    saga.advance(120)
    assert [(text, (at - start).total_seconds()) for text, at in done] == [("early", 20), ("between", 50), ("late", 60)]
    assert (saga.now - start).total_seconds() == 120


def test_a_delayed_start_waits_for_its_time(shop: Shop, saga: SagaTester) -> None:
    run = shop.checkout.send_with_options(args=("1",), delay=timedelta(days=1))
    saga.drain()
    assert run.status == "pending"
    assert saga.waiting == [f"drive of run {run.id} in 1 day, 0:00:00"]
    saga.advance(timedelta(days=1))
    assert run.status == "completed"


def test_timers_and_deadlines_follow_the_clock(shop: Shop, saga: SagaTester) -> None:
    """TIMER-1, EXPIRE-1: each at its own moment, and the months between cost nothing."""
    moments: list[timedelta] = []
    start = saga.now

    def refund(charge: str) -> None:
        moments.append(saga.now - start)

    @workflow(broker=shop.broker, expires_in=timedelta(days=90))
    def patient(flow: Flow) -> None:
        flow.action(shop.charge_card, "1").compensate_with(shop.refund_card, "1").run()
        flow.sleep(timedelta(days=30))
        with suppress(SignalTimeoutError):
            flow.await_signal("go", wait_seconds=timedelta(days=30))
        moments.append(flow.now() - start)
        flow.await_signal("never")

    saga.replace(shop.refund_card, refund)
    run = saga.start(patient)
    saga.drain()
    assert saga.waiting == [
        f"run {run.id} waits at 2 for a timer due in 30 days, 0:00:00", f"run {run.id} expires in 90 days, 0:00:00",
    ]  # fmt: skip
    saga.advance(timedelta(days=365))
    assert [moment.days for moment in moments] == [60, 90]
    assert (run.status, run.rollback) == ("expired", "done")


def test_a_signal_is_sent_and_drained(shop: Shop, saga: SagaTester) -> None:
    """SIG-1."""

    @workflow(broker=shop.broker)
    def asking(flow: Flow) -> Any:
        return flow.await_signal("answer")

    run = saga.start(asking)
    saga.drain()
    assert saga.waiting == [f"run {run.id} waits at 1 for signal 'answer'"]
    run.signal("answer", {"yes": True})
    saga.drain()
    assert run.result() == {"yes": True}


def test_the_original_exception_is_found_through_children(shop: Shop, saga: SagaTester) -> None:
    """CHILD-1: what failed in the child's step is behind the error that the parent's function saw."""

    @workflow(broker=shop.broker)
    def parent(flow: Flow) -> str:
        return flow.child(shop.checkout, "nowhere").run()

    run = saga.start(parent)
    saga.drain()
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    chain: list[BaseException] = [failed.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert [type(error) for error in chain] == [FlowFailedError, ChildFailedError, StepFailedError, ValueError]
    assert saga.errors == [chain[-1]]


def test_waiting_for_a_result_lets_the_test_s_time_pass_and_no_more_of_it_than_needed(shop: Shop, saga: SagaTester) -> None:
    saga.replace(shop.charge_card, Mock(side_effect=[ConnectionError(), {"id": "second"}]))
    start = saga.now
    assert shop.checkout.send("1").result(wait=timedelta(days=30)) == "second"
    assert saga.now - start == timedelta(hours=1)


def test_a_result_that_does_not_come_says_what_is_left(shop: Shop, saga: SagaTester) -> None:
    run = saga.start(shop.checkout, "1")
    with pytest.raises(ResultMissing) as missing:
        run.result()
    assert missing.value.__notes__ == [f"saga.drain() has not run, or this is left: drive of run {run.id} now"]
    saga.replace(shop.charge_card, ConnectionError)
    with pytest.raises(ResultTimeout) as timeout:
        run.result(wait=60)
    assert timeout.value.__notes__[0].endswith(f"step 1 (charge_card) of run {run.id} in 0:59:00")


def test_the_clock_starts_where_a_test_says() -> None:
    new_year = datetime(2030, 1, 1, tzinfo=UTC)
    with SagaTester(now=new_year) as saga:
        saga.advance(1.5)
        assert saga.now == new_year + timedelta(seconds=1.5)
        with pytest.raises(ValueError, match="only moves forward"):
            saga.advance(-1)


def test_a_workflow_without_an_end_is_told(shop: Shop) -> None:
    @shop.actor(max_retries=0)
    def again() -> None:
        again.send()

    with SagaTester(limit=50) as saga:
        again.send()
        with pytest.raises(SagaError, match=r"50 messages and no end \(51 to again\)"):
            saga.drain()


# --- substitutes -----------------------------------------------------------------------------------------------------


def test_a_substitute_may_name_its_parameters_differently(shop: Shop, saga: SagaTester) -> None:
    @workflow(broker=shop.broker)
    def named(flow: Flow) -> Any:
        return flow.run(shop.charge_card, order="by name", amount=3)

    saga.replace(shop.charge_card, lambda what, **rest: [what, rest])
    run = saga.start(named)
    saga.drain()
    assert run.result() == ["by name", {"amount": 3}]
    assert saga.calls(shop.charge_card) == [call(order="by name", amount=3)]


@pytest.mark.parametrize("error", [KeyError("as an object"), KeyError])
def test_a_compensation_can_be_made_to_fail(shop: Shop, saga: SagaTester, error: Any) -> None:
    """COMP-4."""
    saga.replace(shop.refund_card, error)
    run = saga.start(shop.checkout, "nowhere")
    saga.drain()
    assert (run.status, run.rollback) == ("failed", "halted")
    assert [type(one) for one in saga.errors] == [ValueError, KeyError]


@pytest.mark.parametrize(
    ("substitute", "complaint"),
    [
        (lambda: None, r"the substitute for ship_order\(order: .*str.*\) .*has the signature \(\): too many positional"),
        (lambda order, more: None, r"missing a required argument: 'more'"),
        ("shipped", r"takes a function or an exception, not str: for a fixed result write lambda \*_: 'shipped'"),
    ],
)
def test_a_substitute_that_could_not_be_called_is_refused(
    shop: Shop, saga: SagaTester, substitute: Any, complaint: str
) -> None:
    with pytest.raises(TypeError, match=complaint):
        saga.replace(shop.ship_order, substitute)


def test_what_is_no_actor_is_not_replaced_and_what_is_no_workflow_is_not_started(shop: Shop, saga: SagaTester) -> None:
    wrong: Any = shop.checkout
    with pytest.raises(TypeError, match="checkout is a workflow: replace the actors"):
        saga.replace(wrong, ValueError)
    with pytest.raises(TypeError, match="takes a workflow, not Actor"):
        saga.start(shop.ship_order, "1")  # type: ignore[arg-type]


def test_arguments_are_still_checked_against_the_actor_s_own_signature(shop: Shop, saga: SagaTester) -> None:
    """A test with a lax substitute must not hide a call that the actor would refuse."""

    @workflow(broker=shop.broker)
    def wrong(flow: Flow) -> None:
        flow.run(shop.ship_order, "1", "2")

    saga.replace(shop.ship_order, lambda *anything: None)
    run = saga.start(wrong)
    saga.drain()
    with pytest.raises(FlowFailedError, match="too many positional arguments"):
        run.result()


def test_a_substitute_that_raises_has_a_new_error_for_each_try(shop: Shop, saga: SagaTester) -> None:
    """The object that was given comes first; none carries the tracebacks of the others."""
    down = ConnectionError("down")
    saga.replace(shop.charge_card, down)
    saga.start(shop.checkout, "1")
    saga.advance(timedelta(days=1))
    assert saga.errors[0] is down
    assert len({id(error) for error in saga.errors}) == len(saga.errors) == 4
    assert [len(traceback.extract_tb(error.__traceback__)) for error in saga.errors] == [1] * 4
    assert [error.__notes__[0].rpartition(" ")[2] for error in saga.errors] == ["1", "2", "3", "4"]


# --- ordinary messages -----------------------------------------------------------------------------------------------


def test_an_ordinary_message_that_is_given_up_fails_the_test(shop: Shop, saga: SagaTester) -> None:
    """C61: nothing swallows it, since no handle would show it."""
    shop.ship_order.send("nowhere")
    with pytest.raises(ValueError, match="no such address"):
        saga.drain()


def test_an_actor_of_another_broker_fails_the_test(shop: Shop, saga: SagaTester) -> None:
    """NATIVE-3: a worker would wait for one that knows it."""

    @dramatiq.actor(broker=StubBroker())
    def elsewhere() -> None: ...

    @workflow(broker=shop.broker)
    def lost(flow: Flow) -> None:
        flow.run(elsewhere)

    saga.start(lost)
    with pytest.raises(
        UnknownActorError, match=r"'elsewhere', and no actor .* on the broker of the application \(SQLiteBroker\)"
    ):
        saga.drain()


def test_a_group_and_its_callback(shop: Shop, saga: SagaTester) -> None:
    group = dramatiq.group([shop.refund_card.message("a"), shop.refund_card.message("b")])
    group.add_completion_callback(shop.ship_order.message("1"))
    group.run()
    saga.drain()
    assert saga.calls(shop.refund_card) == [call("a"), call("b")]
    assert saga.calls(shop.ship_order) == [call("1")]


def test_an_interrupt_of_the_test_itself_goes_through(shop: Shop, saga: SagaTester) -> None:
    saga.replace(shop.ship_order, KeyboardInterrupt)
    saga.start(shop.checkout, "1")
    with pytest.raises(KeyboardInterrupt):
        saga.drain()


# --- replays ---------------------------------------------------------------------------------------------------------


def test_a_sound_workflow_passes_every_replay(shop: Shop, saga: SagaTester) -> None:
    saga.replay_every_step()
    good, bad = saga.start(shop.checkout, "1"), saga.start(shop.checkout, "nowhere")
    saga.drain()
    assert (good.status, bad.status, bad.rollback) == ("completed", "failed", "done")


def test_the_checks_are_replays_to_the_function_and_its_logger_is_quiet_in_them(
    shop: Shop, saga: SagaTester, journal: list[Any]
) -> None:
    """API Flow.logger, is_replaying: a line appears once per run, however often a test has it replayed."""
    new = []

    @workflow(broker=shop.broker)
    def talks(flow: Flow) -> str:
        flow.logger.info("begun")
        new.append(("begun", flow.is_replaying))
        flow.run(shop.ship_order, "1")
        flow.logger.info("shipped")
        new.append(("shipped", flow.is_replaying))
        flow.sleep(60)
        flow.logger.info("slept")
        new.append(("slept", flow.is_replaying))
        return "done"

    saga.replay_every_step()
    run = saga.start(talks)
    saga.drain()
    saga.advance(61)
    assert run.result() == "done"
    assert [line["event"] for line in journal if line.get("workflow") == "talks" and "run" in line] == [
        "begun",
        "shipped",
        "slept",
    ]
    assert [name for name, replaying in new if not replaying] == ["begun", "shipped", "slept"]
    assert [name for name, replaying in new if replaying].count("slept") >= 1  # the checks did walk over it


def test_arguments_that_change_from_replay_to_replay_are_found(shop: Shop, saga: SagaTester) -> None:
    """HISTORY-1: a worker would not notice, since what was recorded is what runs."""
    numbers = iter(range(100))

    @workflow(broker=shop.broker)
    def counting(flow: Flow) -> None:
        flow.run(shop.ship_order, f"order {next(numbers)}")

    saga.replay_every_step()
    saga.start(counting)
    with pytest.raises(HistoryMismatchError, match=r"'ship_order' with \[\[\"order 0\"\],\{\}\], the code asks for .*order 2"):
        saga.drain()


def test_steps_that_change_from_replay_to_replay_are_found(shop: Shop, saga: SagaTester) -> None:
    """HISTORY-1: here without being asked to look, because the worker would notice."""
    turns = iter([True, False, True, False])

    @workflow(broker=shop.broker)
    def fickle(flow: Flow) -> None:
        if next(turns):
            flow.run(shop.ship_order, "1")
        flow.run(shop.refund_card, "1")

    run = saga.start(fickle)
    with pytest.raises(HistoryMismatchError) as found:
        saga.drain()
    assert found.value.sequence == 1
    assert found.value.__notes__ == [
        f"dramatiq-saga: run {run.id} of fickle is held with this error; a worker would try again later"
    ]


def test_a_result_that_changes_from_replay_to_replay_is_found(shop: Shop, saga: SagaTester) -> None:
    numbers = iter(range(100))

    @workflow(broker=shop.broker)
    def counting(flow: Flow) -> int:
        return next(numbers)

    saga.replay_every_step()
    saga.start(counting)
    with pytest.raises(HistoryMismatchError, match="recorded is the result 0, the code asks for the result 1"):
        saga.drain()


@pytest.mark.parametrize(
    ("asks", "complaint"),
    [
        (lambda flow, shop, number: flow.sleep(number), "recorded is timer until .*, the code asks for timer until"),
        (
            lambda flow, shop, number: flow.await_signal(f"go {number}"),
            "wait for signal 'go 0', the code asks for wait for signal 'go 1'",
        ),
        (lambda flow, shop, number: flow.child(shop.checkout, f"{number}").run(), r"child 'checkout' with \[\[\"0\"\],\{\}\]"),
        (
            lambda flow, shop, number: flow.parallel(*[flow.action(shop.ship_order, str(n)) for n in range(number + 1)]).run(),
            "recorded is parallel block of 1, the code asks for parallel block of 2",
        ),
        (
            lambda flow, shop, number: flow.action(shop.ship_order, "1").compensate_with(shop.refund_card, f"{number}").run(),
            r"undone by 'refund_card' with \[\[\"0\"\],\{\}\], the code asks for .*\[\[\"2\"\]",
        ),
    ],
    ids=["timer", "signal", "child", "parallel", "compensation"],
)
def test_no_request_may_change_from_replay_to_replay(
    shop: Shop, saga: SagaTester, asks: Callable[..., Any], complaint: str
) -> None:
    """HISTORY-1."""
    numbers = iter(range(100))

    @workflow(broker=shop.broker)
    def counting(flow: Flow) -> None:
        asks(flow, shop, next(numbers))

    saga.replay_every_step()
    saga.start(counting)
    with pytest.raises(HistoryMismatchError, match=complaint):
        saga.drain()


def test_a_side_effect_is_the_cure(shop: Shop, saga: SagaTester) -> None:
    """SIDE-1."""
    numbers = iter(range(100))

    @workflow(broker=shop.broker)
    def counting(flow: Flow) -> int:
        number = flow.side_effect("number", lambda: next(numbers))
        flow.run(shop.ship_order, f"order {number}")
        return number

    saga.replay_every_step()
    run = saga.start(counting)
    saga.drain()
    assert run.result() == 0


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda flow, shop: shop.refund_card.send("1"), SendInsideWorkflowError),
        (lambda flow, shop: flow.action(shop.refund_card, "1") and None, BuilderNotRunError),
    ],
)
def test_a_mistake_that_would_hold_the_run_fails_the_test(
    shop: Shop, saga: SagaTester, mistake: Callable[..., Any], error: type[Exception]
) -> None:
    @workflow(broker=shop.broker)
    def wrong(flow: Flow) -> None:
        mistake(flow, shop)

    saga.start(wrong)
    with pytest.raises(error):
        saga.drain()


# --- applications ----------------------------------------------------------------------------------------------------


def test_everything_is_as_it_was_afterwards(shop: Shop) -> None:
    def state() -> list[Any]:
        middleware, actors = shop.middleware, [shop.charge_card, shop.checkout.actor]
        return [
            *(vars(middleware)[name] for name in ("_engine", "_runner", "_broker", "_database")),
            *({name: value for name, value in vars(actor).items() if name != "logger"} for actor in actors),
            shop.checkout.broker, vars(shop.broker).get("enqueue"), FlowHandle.result, dramatiq_broker.global_broker,
        ]  # fmt: skip

    before, threads = state(), threading.active_count()
    with SagaTester() as saga:
        saga.replace(shop.charge_card, ValueError)
        saga.start(shop.checkout, "1")
        saga.drain()
        assert state() != before
    assert state() == before
    assert threading.active_count() == threads
    with pytest.raises(SagaError, match="after the end of its test"):
        saga.drain()


def test_two_tests_do_not_see_each_other_s_runs(shop: Shop) -> None:
    for _ in range(2):
        with SagaTester() as saga:
            assert query().count() == 0
            saga.start(shop.checkout, "1")


def test_a_test_needs_no_application(saga: SagaTester) -> None:
    @dramatiq.actor(max_retries=0)
    def double(number: int) -> int:
        return 2 * number

    @workflow
    def local(flow: Flow, number: int) -> int:
        return flow.run(double, number)

    run = saga.start(local, 21)
    saga.drain()
    assert run.result() == 42


def test_every_application_of_the_process_is_kept_from_its_database(shop: Shop, tmp_path: Path, saga: SagaTester) -> None:
    other = Shop(tmp_path / "no such folder" / "other.db")
    run = shop.checkout.send("1")
    saga.drain()
    second = saga.start(other.checkout, "2")
    saga.drain()
    assert (run.result(), second.result()) == ("charge-for-1", "charge-for-2")
    assert query().count() == 1
    assert other.seen == ["charged"]


def test_an_application_without_sagas_is_kept_from_its_server() -> None:
    before = dramatiq_broker.global_broker
    broker = StubBroker()
    dramatiq.set_broker(broker)
    try:
        done: list[str] = []

        @dramatiq.actor(max_retries=0)
        def note(text: str) -> None:
            done.append(text)

        as_declared = dict(vars(note))
        with SagaTester() as saga:
            note.send("1")
            assert broker.queues["default"].empty()

            @workflow
            def local(flow: Flow) -> None:
                flow.run(note, "2")

            saga.start(local)
            saga.drain()
            assert done == ["1", "2"]
        assert (vars(note), dramatiq.get_broker()) == (as_declared, broker)
    finally:
        dramatiq_broker.global_broker = before


def test_a_module_that_is_imported_in_the_middle_of_a_test_belongs_to_the_application(shop: Shop) -> None:
    code = """
import dramatiq
from dramatiq_saga import workflow

@dramatiq.actor(max_retries=0)
def wrap_up(order):
    return f"wrapped {order}"

@workflow
def gift(flow, order):
    return flow.run(wrap_up, order)
"""
    names: dict[str, Any] = {"__name__": "late"}
    results = []
    for number in range(2):
        with SagaTester() as saga:
            if not number:
                exec(code, names)
            run = saga.start(names["gift"], "1")
            saga.drain()
            results.append(run.result())
        assert names["wrap_up"].broker is names["gift"].broker is shop.broker
        assert {"wrap_up", "gift"} <= shop.broker.actors.keys()
    assert results == ["wrapped 1"] * 2


def test_middleware_of_the_application_is_used_and_can_be_left_out(shop: Shop) -> None:
    heard: list[str] = []

    class Listening(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            heard.append(message.actor_name)

    shop.broker.add_middleware(Listening(), before=CurrentMessage)
    for without in ((), (Listening,)):
        heard.clear()
        with SagaTester(without=without) as saga:
            saga.start(shop.checkout, "1")
            saga.drain()
        assert heard == ([] if without else ["checkout", "charge_card", "ship_order"])


def test_results_of_ordinary_actors_need_no_server(shop: Shop) -> None:
    shop.broker.add_middleware(Results(backend=RedisBackend(url="redis://localhost:1")), before=CurrentMessage)

    @shop.actor(store_results=True)
    def answer() -> int:
        return 42

    with SagaTester() as saga:
        message = answer.send()
        saga.drain()
        assert message.get_result() == 42


@pytest.mark.parametrize("substituted", [False, True])
def test_async_actors_run(shop: Shop, saga: SagaTester, substituted: bool) -> None:
    @dramatiq.actor(max_retries=0, broker=shop.broker)
    async def fetch(number: int) -> int:
        return number + 1

    async def substitute(number: int) -> int:
        return number + 1

    @workflow(broker=shop.broker)
    def fetching(flow: Flow) -> int:
        return flow.run(fetch, 1)

    if substituted:
        saga.replace(fetch, substitute)
    run = saga.start(fetching)
    saga.drain()
    assert run.result() == 2


def test_one_test_has_one_tester(saga: SagaTester) -> None:
    with pytest.raises(SagaError, match="active already"), SagaTester():
        pass
    assert dramatiq.get_broker() is saga.broker


def test_a_step_does_not_drain(shop: Shop, saga: SagaTester) -> None:
    saga.replace(shop.ship_order, lambda order: saga.drain())
    run = saga.start(shop.checkout, "1")
    saga.advance(60)
    with pytest.raises(FlowFailedError, match=r"drain\(\) from inside a step"):
        run.result()


# --- pytest ----------------------------------------------------------------------------------------------------------

SUITE = """
import dramatiq
import pytest
from dramatiq_saga import workflow

@pytest.fixture
def started(saga):
    @dramatiq.actor(max_retries=0)
    def step():
        return 1

    @workflow
    def flow(flow):
        return flow.run(step)

    return saga.start(flow)

@pytest.mark.parametrize("number", range(4))
def test_it(saga, started, number):
    saga.drain()
    assert started.result() == 1
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with what an installation leaves of the package's metadata, beside a folder of tests."""
    metadata = tmp_path / "site" / "dramatiq_saga-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dramatiq-saga\nVersion: 0\n")
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options"]["py_modules"].split() == ["pytest_dramatiq_saga"]
    (metadata / "entry_points.txt").write_text(f"[pytest11]{setup['options.entry_points']['pytest11']}\n")
    (tmp_path / "suite").mkdir()
    return tmp_path


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_the_fixture_is_there_once_the_package_is_installed(installed: Path, workers: list[str]) -> None:
    """Inside other fixtures, and with pytest-xdist."""
    (installed / "suite" / "test_it.py").write_text(SUITE)
    done = pytest_in(installed, *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


FAILS = """
import dramatiq
from dramatiq_saga import workflow

def test_it(saga):
    @dramatiq.actor(max_retries=1, min_backoff=3_600_000)
    def step():
        raise OSError("down")

    @workflow
    def flow(flow):
        return flow.run(step)

    run = saga.start(flow)
    saga.drain()
    assert run.status == "completed"
"""


def test_a_test_that_fails_shows_what_was_left_and_what_was_raised(installed: Path) -> None:
    (installed / "suite" / "test_it.py").write_text(FAILS)
    done = pytest_in(installed)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"- saga: what is left -+\nstep 1 \(step\) of run \S+ in 1:00:00\n", done.stdout), done.stdout
    assert 'raise OSError("down")' in done.stdout


def test_a_suite_that_does_not_use_the_fixture_imports_nothing(installed: Path) -> None:
    (installed / "suite" / "test_it.py").write_text(
        "import sys\ndef test_it(request):\n    assert 'pytest_dramatiq_saga' in sys.modules\n"
        "    assert not {'dramatiq', 'dramatiq_saga', 'peewee', 'structlog'} & set(sys.modules)\n"
    )
    done = pytest_in(installed)
    assert done.returncode == 0, done.stdout + done.stderr


def pytest_in(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *arguments, "."]
    environment = {"PYTHONPATH": os.pathsep.join([str(installed / "site"), str(ROOT)]), "PATH": os.environ["PATH"]}
    return subprocess.run(
        command, cwd=installed / "suite", env=environment, capture_output=True, text=True, timeout=100, check=False
    )


# --- histories -------------------------------------------------------------------------------------------------------


def test_a_history_is_recorded_of_a_run_that_never_left_the_test(shop: Shop, saga: SagaTester, tmp_path: Path) -> None:
    """C68: the file is replayed later, against the code as it is then, without the fixture."""
    run = saga.start(shop.checkout, "1")
    saga.drain()
    path = record_history(run).write(tmp_path / "checkout.json")
    replayed = replay_history(shop.checkout, load_history(path))
    assert (replayed.ends, replayed.result) == ("completed", "charge-for-1")
