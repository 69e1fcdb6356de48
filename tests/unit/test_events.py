"""EVENT-1, EVENT-2: who hears what, and what a listener cannot do."""

from __future__ import annotations

import dataclasses
import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from dramatiq.middleware import Shutdown

from dramatiq_saga import codec, events
from dramatiq_saga.events import (
    ActionCompleted,
    ActionEvent,
    ActionFailed,
    ActionOutcomeRejected,
    ActionStarted,
    Event,
    FlowCompleted,
    FlowFailed,
    FlowStarted,
    dispatch,
    has_listeners,
    listening,
    on,
    subscribe,
    unsubscribe,
)
from dramatiq_saga.journal import history
from dramatiq_saga.views import ActionView

NAMES = set(
    re.findall(
        r"\w+",
        """
        FlowStarted FlowWaiting FlowResumed FlowCompleted FlowFailed FlowCancelled FlowExpired
        ActionStarted ActionCompleted ActionFailed OptionalActionFailed ActionExpired ActionAwaitingRetry ActionRetried
        ActionRedispatched ActionOutcomeRejected
        CompensationStarted CompensationStepStarted CompensationCompleted CompensationFailed CompensationOutcomeRejected
        RollbackFinished
        ChildStarted ChildCompleted ChildFailed ChildExpired ChildCancelled ChildAwaitingRetry ChildRetried
        SignalReceived SignalConsumed SignalTimedOut SideEffectRecorded
        """,
    )
)

STARTED = FlowStarted(run_id="run-1", workflow_name="checkout", at=1)
FAILED = FlowFailed(run_id="run-1", workflow_name="checkout", at=2)


def action(**fields: Any) -> ActionView:
    values = dict.fromkeys((field.name for field in dataclasses.fields(ActionView)), None)
    return ActionView(**{**values, "run_id": "run-1", "sequence": 3, "cycle": 0, "stored_args": b"[[1],{}]", **fields})


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    """Each test begins and ends without listeners."""
    for _, listener in list(events._subscribed):
        unsubscribe(listener)
    yield
    for _, listener in list(events._subscribed):
        unsubscribe(listener)


def concrete() -> dict[str, type[Event]]:
    found = inspect.getmembers(events, lambda member: inspect.isclass(member) and issubclass(member, Event))
    return {name: cls for name, cls in found if cls.type}


def test_there_is_one_typed_event_for_each_word_of_the_history() -> None:
    words = {value for name, value in vars(history).items() if name.isupper() and isinstance(value, str)}
    assert set(concrete()) == NAMES
    typed = words - history.WITHOUT_EVENT - history.GIVEN_UP
    assert {cls.type for cls in concrete().values()} == typed and len(typed) == len(NAMES)
    assert words > history.WITHOUT_EVENT | history.GIVEN_UP
    assert words > history.NOT_RECORDED
    assert all(re.fullmatch(r"[a-z_]+\.[a-z_]+", word) and len(word) <= 40 for word in words)


def test_every_event_says_run_workflow_and_time() -> None:
    for cls in concrete().values():
        assert [field.name for field in dataclasses.fields(cls)][:3] == ["run_id", "workflow_name", "at"]
        assert not hasattr(cls, "__dict__") or "__slots__" in vars(cls)


def test_a_listener_hears_its_class_and_no_other() -> None:
    heard: list[Event] = []
    on(FlowStarted)(heard.append)
    assert dispatch(STARTED) == [] and dispatch(FAILED) == []
    assert heard == [STARTED]


def test_a_listener_on_a_base_class_hears_its_subclasses() -> None:
    everything: list[Event] = []
    steps: list[Event] = []
    on(Event)(everything.append)
    on(ActionEvent)(steps.append)
    started = ActionStarted(run_id="run-1", workflow_name="checkout", at=3, action=action())
    for event in (STARTED, started):
        dispatch(event)
    assert (everything, steps) == ([STARTED, started], [started])


def test_a_listener_on_several_classes_hears_each_event_once() -> None:
    heard: list[Event] = []
    on(FlowStarted, Event, FlowFailed)(heard.append)
    on(FlowStarted)(heard.append)  # another bound method of the same list is the same listener
    dispatch(STARTED)
    assert heard == [STARTED]


def test_a_subclass_of_a_hosts_own_is_heard_like_its_base() -> None:
    class Audited(FlowStarted):
        pass

    heard: list[Event] = []
    assert not has_listeners(Audited)
    on(FlowStarted)(heard.append)
    assert has_listeners(Audited)
    dispatch(Audited(run_id="run-1", workflow_name="checkout", at=1))
    assert len(heard) == 1


def test_the_decorator_returns_the_function_it_was_given() -> None:
    def listener(event: FlowStarted) -> None: ...

    assert on(FlowStarted)(listener) is listener


def test_listeners_are_told_in_the_order_in_which_they_subscribed() -> None:
    order: list[str] = []
    subscribe(lambda e: order.append("first"), Event)
    subscribe(lambda e: order.append("second"), FlowStarted)
    subscribe(lambda e: order.append("third"), Event)
    dispatch(STARTED)
    assert order == ["first", "second", "third"]


def test_what_nobody_listens_to_is_known_before_an_event_is_made() -> None:
    assert not has_listeners(FlowStarted)
    subscribe(print, FlowStarted)
    assert has_listeners(FlowStarted) and not has_listeners(FlowFailed)
    assert unsubscribe(print, FlowFailed) is False and has_listeners(FlowStarted)
    assert unsubscribe(print) is True
    assert not has_listeners(FlowStarted) and unsubscribe(print) is False


def test_unsubscribing_from_one_class_keeps_the_others() -> None:
    subscribe(print, FlowStarted, FlowFailed)
    assert unsubscribe(print, FlowStarted)
    assert not has_listeners(FlowStarted) and has_listeners(FlowFailed)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_a_listener_that_raises_is_logged_and_goes_no_further(error: BaseException) -> None:
    """EVENT-2."""
    heard: list[Event] = []

    def broken(event: FlowStarted) -> None:
        raise error

    subscribe(broken, FlowStarted)
    subscribe(heard.append, FlowStarted)
    with structlog.testing.capture_logs() as logs:
        failures = dispatch(STARTED)

    assert failures == [(broken, error)]
    assert heard == [STARTED]
    assert [(line["event"], line["log_level"], line["type"], line["run_id"]) for line in logs] == [
        ("listener_failed", "error", "flow.started", "run-1")
    ]
    assert logs[0]["exc_info"] is error and "broken" in logs[0]["listener"]


def test_a_broken_logger_cannot_do_what_a_broken_listener_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_logger(*args: Any) -> Any:
        raise OSError("disk full")

    def broken(event: FlowStarted) -> None:
        raise ValueError

    monkeypatch.setattr(structlog, "get_logger", no_logger)
    subscribe(broken, FlowStarted)
    assert [listener for listener, _ in dispatch(STARTED)] == [broken]


@pytest.mark.parametrize("interrupt", [Shutdown(), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_interrupt_waits_until_every_listener_was_told(interrupt: BaseException) -> None:
    """A time limit or a shutdown is thrown into the thread, not raised by the listener: it must not be swallowed."""
    heard: list[Event] = []

    def interrupted(event: FlowStarted) -> None:
        raise interrupt

    subscribe(interrupted, FlowStarted)
    subscribe(heard.append, FlowStarted)
    with pytest.raises(type(interrupt)):
        dispatch(STARTED)
    assert heard == [STARTED]


def test_a_listener_may_cause_events_and_change_who_listens() -> None:
    heard: list[Event] = []

    def chain(event: FlowStarted) -> None:
        unsubscribe(chain)
        subscribe(heard.append, FlowFailed)
        dispatch(FAILED)

    subscribe(chain, FlowStarted)
    dispatch(STARTED)
    dispatch(STARTED)
    assert heard == [FAILED]


@pytest.mark.parametrize("classes", [(), (str,), (STARTED,), ("FlowStarted",)])
def test_only_event_classes_can_be_listened_to(classes: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="event classes"):
        on(*classes)(print)


def test_a_coroutine_function_cannot_listen() -> None:
    async def nobody_awaits_me(event: Event) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        on(Event)(nobody_awaits_me)


def test_a_test_can_listen_for_the_length_of_a_block() -> None:
    with listening(FlowStarted, FlowFailed) as heard, listening(Event) as everything:
        dispatch(STARTED)
        dispatch(FAILED)
        with pytest.raises(ZeroDivisionError), listening(FlowStarted):
            raise ZeroDivisionError
    dispatch(STARTED)
    assert heard == everything == [STARTED, FAILED]
    assert not events._subscribed


def test_a_listener_that_leaves_while_it_is_looked_up_is_not_heard_again() -> None:
    heard: list[Event] = []
    leaver = threading.Thread(target=unsubscribe, args=(heard.append,))

    class Pausing(type):
        """Asked in the middle of the look-up, lets the leaver begin there; he can only wait for his turn."""

        def __subclasscheck__(cls, subclass: type) -> bool:
            if leaver.ident is None:
                leaver.start()
                leaver.join(0.05)
            return type.__subclasscheck__(cls, subclass)

    class Other(Event, metaclass=Pausing):
        pass

    subscribe(heard.append, FlowStarted)
    subscribe(print, Other)
    has_listeners(FlowStarted)
    leaver.join()
    dispatch(STARTED)
    assert heard == []


def test_registrations_of_many_threads_are_all_kept() -> None:
    counts = [0] * 8
    barrier = threading.Barrier(9)

    def listener_of(index: int) -> Any:
        def listener(event: Event) -> None:
            counts[index] += 1

        return listener

    def register(index: int) -> None:
        barrier.wait()
        for _ in range(200):
            passing = listener_of(index)
            subscribe(passing, FlowFailed)
            unsubscribe(passing)
        subscribe(listener_of(index), FlowStarted)

    threads = [threading.Thread(target=register, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    barrier.wait()
    for _ in range(500):
        dispatch(FAILED)
        has_listeners(FlowStarted)
    for thread in threads:
        thread.join()

    counts[:] = [0] * 8
    dispatch(FAILED)
    assert counts == [0] * 8 and not has_listeners(FlowFailed)
    dispatch(STARTED)
    assert counts == [1] * 8


def test_no_listener_can_change_what_the_next_one_sees() -> None:
    """CODEC-4."""
    event = ActionOutcomeRejected(
        run_id="run-1",
        workflow_name="checkout",
        at=1,
        action=action(),
        outcome="completed",
        stored_result=codec.encode({"ids": [1]}, "result"),
    )
    event.result["ids"].clear()
    event.action.args.clear()
    assert event.result == {"ids": [1]} and event.action.args == [1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.outcome = "failed"  # type: ignore[misc]


def test_an_event_without_a_result_has_none() -> None:
    assert FlowCompleted(run_id="run-1", workflow_name="checkout", at=1).result is None
    assert ActionCompleted(run_id="run-1", workflow_name="checkout", at=1, action=action()).action.result is None
    assert ActionFailed(run_id="run-1", workflow_name="checkout", at=1, action=action()).action.error is None
