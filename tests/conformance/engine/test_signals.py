"""Signals: who takes them, in which order, who is refused, and what a key does; the same in every setting."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowHandle, FlowNotFoundError, Settings, get_flow, query
from dramatiq_saga.errors import (
    CannotSignalFlowError,
    CannotSignalRollingBackFlowError,
    CannotSignalTerminalFlowError,
    MessageNotSentError,
    NotSerializableError,
    SendInsideWorkflowError,
    SignalKeyConflictError,
)
from dramatiq_saga.events import SignalConsumed, SignalReceived, listening, subscribe, unsubscribe
from dramatiq_saga.recovery.sweep import sweep
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def approval(app: Application) -> Any:
    """Waits for one signal and returns its payload."""
    note = app.step("note")

    @app.workflow
    def approve(flow: Flow) -> Any:
        decision = flow.await_signal("decision")
        flow.run(note, decision)
        return decision

    return approve


def waiting(handle: FlowHandle[Any], status: str = "waiting") -> None:
    eventually(lambda: handle.status == status, because=f"run {handle.id} is {status}")


def rows(app: Application, handle: FlowHandle[Any]) -> tuple[Any, ...]:
    """Everything that a signal could leave behind."""
    return (
        app.sql("SELECT COUNT(*) FROM {signals} WHERE run_id = ?", handle.id),
        app.sql("SELECT status, revision, wakes, wakes_seen FROM {flow_runs} WHERE id = ?", handle.id),
        app.sql("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ?", handle.id),
        app.messages(),
    )


# --- SIG-1: kept, and taken in order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first drive", "while it waits"])
def test_a_signal_ends_the_wait_for_it_whenever_it_comes(every_app: Application, when: str) -> None:
    """C32, SIG-1: sent before the run has been driven at all, or long after it was parked; its payload is what the wait gives."""
    app = every_app
    approve = approval(app)
    handle = approve.send()
    if when == "before the first drive":
        handle.signal("decision", {"by": "ann"})
        app.start()
    else:
        app.start()
        waiting(handle)
        handle.signal("decision", {"by": "ann"})
    assert app.ended(handle) == "completed"
    app.drain()
    assert handle.result() == {"by": "ann"}
    assert app.calls == [("note", {"by": "ann"})]
    assert [(s.name, s.payload, s.status) for s in handle.signals()] == [("decision", {"by": "ann"}, "consumed")]
    assert app.sql("SELECT sequence, kind, name, status FROM {waits} WHERE run_id = ?", handle.id) == [
        (1, "signal", "decision", "consumed")
    ]
    received = ["signal.received", "signal.consumed"]
    around = ["flow.started", *received] if when == "before the first drive" else ["flow.started", "flow.waiting", *received]
    assert app.types(handle)[: len(around)] == around
    assert app.types(handle).count("signal.consumed") == 1


def test_a_signal_that_comes_while_a_step_runs_is_kept_until_it_is_asked_for(every_app: Application) -> None:
    """C32, SIG-1: nothing waits yet; the decision that asks for it takes it without suspending."""
    app = every_app
    entered, leave = threading.Event(), threading.Event()

    @app.actor
    def prepare() -> None:
        entered.set()
        assert leave.wait(20)

    @app.workflow
    def late(flow: Flow) -> Any:
        flow.run(prepare)
        return flow.await_signal("go")

    app.start()
    handle = late.send()
    assert entered.wait(20)
    handle.signal("go", 7)
    assert [s.status for s in handle.signals()] == ["received"]
    leave.set()
    assert app.ended(handle) == "completed"
    assert handle.result() == 7
    assert "flow.waiting" not in app.types(handle)
    assert [s.status for s in handle.signals()] == ["consumed"]


@pytest.mark.both_ways
def test_signals_are_taken_in_order_of_arrival_each_by_one_wait(app: Application) -> None:
    """SIG-1: three of one name for three waits, one of another name left alone, a fourth that nobody asks for."""

    @app.workflow
    def collect(flow: Flow) -> list[Any]:
        return [flow.await_signal("item") for _ in range(3)]

    handle = collect.send()
    for number in (1, 2):
        handle.signal("item", number)
    handle.signal("other", "x")
    app.start()
    waiting(handle)
    handle.signal("item", 3)
    with suppress(CannotSignalFlowError):
        handle.signal("item", 4)
    assert app.ended(handle) == "completed"
    assert handle.result() == [1, 2, 3]
    assert [s.status for s in handle.signals()][:4] == ["consumed", "consumed", "received", "consumed"]
    waits = app.sql("SELECT w.sequence, s.payload FROM {waits} w JOIN {signals} s ON s.id = w.signal_id ORDER BY w.sequence")
    assert [(sequence, bytes(payload)) for sequence, payload in waits] == [(1, b"1"), (2, b"2"), (3, b"3")]


def test_a_run_waits_from_the_decision_that_parks_it_until_the_one_that_goes_on(app: Application) -> None:
    """STATUS: waiting is set and taken back by decisions; a signal that nothing waits for costs no drive."""
    approve = approval(app)
    app.start()
    handle = approve.send()
    waiting(handle)
    before = app.sql("SELECT revision FROM {flow_runs} WHERE id = ?", handle.id)
    handle.signal("unasked", 1)
    assert app.messages() == 0
    assert app.sql("SELECT revision FROM {flow_runs} WHERE id = ?", handle.id) == before
    assert app.sql("SELECT wakes - wakes_seen FROM {flow_runs} WHERE id = ?", handle.id) == [(0,)]
    handle.signal("decision", "yes")
    assert app.ended(handle) == "completed"
    words = [word for word in app.types(handle) if word in ("flow.waiting", "flow.resumed", "flow.completed")]
    assert words == ["flow.waiting", "flow.resumed", "flow.completed"]


def test_listeners_hear_of_signals_once_they_are_committed(joined: Application) -> None:
    """EVENT-1, EVENT-2: what was received and what took it, with the rows as they are."""
    app = joined
    approve = approval(app)
    with listening(SignalReceived, SignalConsumed) as heard:
        handle = approve.send()
        handle.signal("decision", "early", key="k-1")
        app.start()
        assert app.ended(handle) == "completed"
        eventually(lambda: len(heard) == 2)
    received, consumed = heard
    assert isinstance(received, SignalReceived)
    assert (received.signal.name, received.signal.payload, received.signal.key) == ("decision", "early", "k-1")
    assert isinstance(consumed, SignalConsumed)
    assert (consumed.sequence, consumed.signal.id, consumed.signal.status) == (1, received.signal.id, "consumed")
    assert {event.workflow_name for event in heard} == {"approve"}


# --- C34: who takes none -----------------------------------------------------------------------------------------------


def ended_run(app: Application, how: str) -> FlowHandle[Any]:
    """A run that has ended, or is on its way back."""
    undo = app.step("undo")
    reserve, refuse = app.step("reserve"), app.step("refuse", raises=ValueError("no"))

    @app.workflow
    def ending(flow: Flow, fails: bool) -> None:
        flow.action(reserve).compensate_with(undo).run()
        if fails:
            flow.run(refuse)

    handle = ending.send(how == "failed")
    if how == "cancelled":
        handle.cancel()
    elif how == "rolling_back":
        app.start()
        app.ended(handle)
        app.stop()
        app.execute(
            "UPDATE {flow_runs} SET status = 'rolling_back', rollback = 'running', ends_as = 'failed', ended_at = NULL WHERE id = ?",
            handle.id,
        )
    else:
        app.start()
        app.ended(handle)
        app.drain()
        app.stop()
    return handle


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled", "rolling_back"])
def test_a_run_that_takes_no_signals_refuses_with_its_status_and_nothing_is_written(joined: Application, how: str) -> None:
    """C34, SIG-1: twice, with a key and without; no row, no wake, no message, no event, and the status stands."""
    app = joined
    handle = ended_run(app, how)
    before = rows(app, handle)
    expected = CannotSignalRollingBackFlowError if how == "rolling_back" else CannotSignalTerminalFlowError
    for key in (None, "k"):
        with pytest.raises(expected, match=how) as caught:
            handle.signal("decision", "late", key=key)
        assert (caught.value.run_id, caught.value.status) == (handle.id, how)
        assert handle.signal_if_running("decision", "late", key=key) is False
    assert rows(app, handle) == before


def test_an_unknown_run_cannot_be_signalled(app: Application) -> None:
    """C34, SIG-1: the answer says that it is not there; signal_if_running() does not hide that."""
    handle: FlowHandle[Any] = FlowHandle("no-such-run", "approve", middleware=app.middleware, broker=app.broker)
    for call in (handle.signal, handle.signal_if_running):
        with pytest.raises(FlowNotFoundError):
            call("decision")
    assert app.sql("SELECT COUNT(*) FROM {signals}") == [(0,)]


@pytest.mark.parametrize(
    ("name", "payload", "key", "error", "words"),
    [
        ("", None, None, ValueError, "a signal's name has between 1 and 191"),
        ("x" * 192, None, None, ValueError, "not 192"),
        (7, None, None, TypeError, "a signal's name is text"),
        ("nul\0", None, None, ValueError, "cannot be stored"),
        ("ok", {"at": object()}, None, NotSerializableError, r"the payload of signal 'ok'\['at'\]"),
        ("ok", float("nan"), None, NotSerializableError, "payload"),
        ("ok", None, "", ValueError, "a signal's key"),
        ("ok", None, 42, TypeError, "a signal's key is text"),
    ],
)
def test_what_cannot_be_stored_is_refused_to_the_sender(
    lite: Application, name: Any, payload: Any, key: Any, error: type[Exception], words: str
) -> None:
    """CODEC-2: clear words, the path to the value, and nothing written."""
    handle = approval(lite).send()
    before = rows(lite, handle)
    with pytest.raises(error, match=words):
        handle.signal(name, payload, key=key)
    assert rows(lite, handle) == before


# --- SIG-3: keys -------------------------------------------------------------------------------------------------------


def test_a_key_counts_once_however_often_the_webhook_is_delivered(every_app: Application) -> None:
    """C35, SIG-3: one delivery three times, in a loop of three waits for the same name; other keys and none count each."""
    app = every_app

    @app.workflow
    def collect(flow: Flow) -> list[Any]:
        return [flow.await_signal("item") for _ in range(3)]

    app.start()
    handle = collect.send()
    waiting(handle)
    for _ in range(3):
        handle.signal("item", "first", key="delivery-1")
    handle.signal("item", "second", key="delivery-2")
    handle.signal("item", "third")
    assert app.ended(handle) == "completed"
    assert handle.result() == ["first", "second", "third"]
    assert [s.key for s in handle.signals()] == ["delivery-1", "delivery-2", None]
    app.drain()
    before = rows(app, handle)
    handle.signal("item", "first", key="delivery-1")  # the answer to the first delivery, although the run has ended
    assert handle.signal_if_running("item", key="delivery-2") is True
    assert rows(app, handle) == before


def test_a_key_is_that_of_one_run_and_of_one_name(lite: Application) -> None:
    """SIG-3: another run takes the same key; another name under it would be lost in silence, and is refused."""
    approve = approval(lite)
    one, two = approve.send(), approve.send()
    one.signal("decision", 1, key="k")
    two.signal("decision", 2, key="k")
    with pytest.raises(SignalKeyConflictError, match="'k' belongs to signal 'decision'"):
        one.signal("payment", 3, key="k")
    assert [s.name for s in one.signals()] == ["decision"]


# --- where it may be sent from -----------------------------------------------------------------------------------------


class Rolled(Exception):
    """Ends a host's transaction."""


@contextmanager
def hosting(app: Application) -> Iterator[None]:
    with app.store.database.connection_context(), app.store.database.atomic():
        yield


def test_a_signal_belongs_to_the_hosts_transaction(app: Application) -> None:
    """HOST-1: it vanishes with it, or moves the run once it is committed, and not before."""
    approve = approval(app)
    app.start()
    handle = approve.send()
    waiting(handle)
    with listening(SignalReceived) as heard:
        with suppress(Rolled), hosting(app):
            handle.signal("decision", "lost", key="k")
            raise Rolled
        assert handle.signals() == []
        assert heard == []
        with hosting(app):
            handle.signal("decision", "kept", key="k")
            assert heard == []
            assert handle.status == "waiting"
        assert len(heard) == 1
    assert app.ended(handle) == "completed"
    assert handle.result() == "kept"


def test_a_workflow_function_signals_through_its_flow_only(lite: Application) -> None:
    """SIG-3: a handle's signal would be sent at every replay; the error says what to write, and the run is held."""
    other = approval(lite).send()

    @lite.workflow
    def wrong(flow: Flow) -> None:
        get_flow(other.id).signal("decision", 1)

    lite.start()
    handle = wrong.send()
    eventually(lambda: lite.sql("SELECT hold_error FROM {flow_runs} WHERE id = ?", handle.id)[0][0])
    error = lite.sql("SELECT hold_error FROM {flow_runs} WHERE id = ?", handle.id)[0][0]
    assert SendInsideWorkflowError.__name__ in error
    assert other.signals() == []


def test_steps_and_listeners_may_signal(app: Application) -> None:
    """SIG-1: a body signals another run, and a listener passes that on to a third."""
    approve = approval(app)
    first, second = approve.send(), approve.send()

    @app.actor
    def tell(run_id: str) -> None:
        get_flow(run_id).signal("decision", "from a step")

    @app.workflow
    def telling(flow: Flow, run_id: str) -> None:
        flow.run(tell, run_id)

    def pass_on(event: SignalConsumed) -> None:
        if event.run_id == first.id:
            get_flow(second.id).signal("decision", "from a listener", key="passed on")

    subscribe(pass_on, SignalConsumed)
    try:
        app.start()
        telling.send(first.id)
        assert [app.ended(handle) for handle in (first, second)] == ["completed"] * 2
    finally:
        unsubscribe(pass_on)
    assert (first.result(), second.result()) == ("from a step", "from a listener")


# --- from one run to another -------------------------------------------------------------------------------------------


def test_a_workflow_signals_another_run_once_however_often_it_is_replayed(every_app: Application) -> None:
    """SIG-3: recorded with what became of it; the steps that follow replay the function and send nothing."""
    app = every_app
    approve, step = approval(app), app.step("step")

    @app.workflow
    def tells(flow: Flow, run_id: str) -> str:
        flow.run(step, 1)
        flow.signal_flow(run_id, "decision", {"from": flow.run_id})
        flow.run(step, 2)
        flow.run(step, 3)
        return "told"

    target = approve.send()
    app.start()
    waiting(target)
    teller = app.run(tells, target.id)
    assert app.ended(target) == "completed"
    assert teller.result() == "told"
    assert target.result() == {"from": teller.id}
    assert [s.payload for s in target.signals()] == [{"from": teller.id}]
    assert app.sql("SELECT sequence, kind, name FROM {side_effects} WHERE run_id = ?", teller.id) == [(2, "signal", "decision")]


@pytest.mark.parametrize("what", ["missing", "completed", "rolling_back"])
def test_a_target_that_takes_no_signals_is_an_error_that_the_workflow_can_catch(joined: Application, what: str) -> None:
    """SIG-3, C34: recorded, so that a replay finds the same although the target has changed meanwhile."""
    app = joined
    target = "no-such-run" if what == "missing" else ended_run(app, what).id
    step = app.step("step")
    expected = {
        "missing": FlowNotFoundError, "completed": CannotSignalTerminalFlowError, "rolling_back": CannotSignalRollingBackFlowError,
    }[what]  # fmt: skip

    @app.workflow
    def tells(flow: Flow) -> str:
        try:
            flow.signal_flow(target, "decision")
        except expected as error:
            flow.run(step, str(error))
            flow.run(step, "again")
            return type(error).__name__
        return "accepted"

    app.calls.clear()
    handle = app.run(tells)
    assert handle.result() == expected.__name__
    assert target in app.calls[0][1]
    assert app.sql("SELECT COUNT(*) FROM {signals}") == [(0,)]


def test_a_run_may_signal_itself(app: Application) -> None:
    """SIG-3: the decision in the making loses to it, looks again, and goes on; the signal is there once."""

    @app.workflow
    def reminds(flow: Flow) -> Any:
        flow.signal_flow(flow.run_id, "note", "to self")
        return flow.await_signal("note")

    handle = app.run(reminds)
    assert handle.result() == "to self"
    assert [(s.name, s.status) for s in handle.signals()] == [("note", "consumed")]


def test_two_runs_that_signal_each_other_both_get_through(every_app: Application) -> None:
    """SIG-3, DRIVE-7: twelve pairs at once; each locks both runs in one order."""
    app = every_app

    @app.workflow
    def talk(flow: Flow, other: str, first: bool) -> list[Any]:
        heard = []
        for number in range(3):
            flow.signal_flow(other, "word", f"{number} from {'first' if first else 'second'}")
            heard.append(flow.await_signal("word"))
        return heard

    pairs = []
    for number in range(12):
        names = (f"b-{number}", f"a-{number}")
        pairs.append(tuple(talk.send_with_options(args=(names[1 - at], at == 0), run_id=names[at]) for at in (0, 1)))
    app.start(threads=4)
    for first, second in pairs:
        assert [app.ended(handle) for handle in (first, second)] == ["completed"] * 2
        assert first.result() == [f"{number} from second" for number in range(3)]
        assert second.result() == [f"{number} from first" for number in range(3)]


# --- finding who waits -------------------------------------------------------------------------------------------------


def test_runs_are_found_by_the_signal_that_they_wait_for_and_by_whether_they_take_any(joined: Application) -> None:
    """C35, TAG-1: by tag, every run that can still be signalled, in whichever status, and an ambiguous tag shows as two."""
    app = joined
    approve = approval(app)
    fresh = approve.send_with_options(tags={"order": 1})
    app.start()
    waits = approve.send_with_options(tags={"order": 2})
    ends = approve.send_with_options(tags={"order": 2})
    for handle in (waits, ends, fresh):
        waiting(handle)
    ends.signal("decision", "done")
    app.ended(ends)
    app.stop()
    unseen = approve.send_with_options(tags={"order": 1})
    assert {handle.id for handle in query(awaiting_signal="decision")} == {fresh.id, waits.id}
    assert list(query(awaiting_signal="another")) == []
    assert {handle.id for handle in query(tags={"order": 1}, signalable=True)} == {fresh.id, unseen.id}
    assert [handle.id for handle in query(tags={"order": 2}, signalable=True, limit=2)] == [waits.id]
    assert [handle.id for handle in query(tags={"order": 2}).where(signalable=False)] == [ends.id]
    assert query(signalable=True).count() == 3
    with pytest.raises(TypeError, match="signalable is True or False"):
        query(signalable="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a signal's name"):
        query(awaiting_signal=3)  # type: ignore[arg-type]


# --- what can go wrong -------------------------------------------------------------------------------------------------


def test_a_signal_whose_drive_message_does_not_leave_is_stored_and_repaired(applications: Applications) -> None:
    """DRIVE-3, DOCTOR-1: the sender is told; the wake is durable, and R2 has the run driven. So does the same key again."""
    app = applications("stub", settings=Settings.from_mapping({"repair.enabled": True, "repair.grace_seconds": 0.001}))
    approve = approval(app)
    app.start()
    handles = [approve.send() for _ in range(2)]
    for handle in handles:
        waiting(handle)
    app.drain()
    enqueue = app.broker.enqueue

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the broker is down")

    app.broker.enqueue = refuse  # type: ignore[method-assign]
    for handle in handles:
        with pytest.raises(MessageNotSentError, match=r"'decision' is stored .*the broker is down"):
            handle.signal("decision", "yes", key="k")
        assert [s.status for s in handle.signals()] == ["consumed"]
    app.broker.enqueue = enqueue  # type: ignore[method-assign]
    handles[0].signal("decision", "yes", key="k")
    assert app.ended(handles[0]) == "completed"
    assert handles[1].status == "waiting"
    eventually(lambda: sweep(app.engine, app.middleware.sender(app.broker)).repair.runs == 1)  # type: ignore[union-attr]
    assert app.ended(handles[1]) == "completed"
    assert [len(handle.signals()) for handle in handles] == [1, 1]


def test_in_two_hundred_rounds_no_signal_is_lost_and_none_counts_twice(joined: Application) -> None:
    """C32: two workers; the signal comes before, while and after the run is parked, as the round's dice say."""
    app = joined
    dice = random.Random(32)
    step = app.step("step")

    @app.workflow
    def round_of(flow: Flow, steps: int) -> Any:
        for number in range(steps):
            flow.run(step, number)
        return flow.await_signal("go")

    app.start(threads=2)
    app.start(threads=2)
    for start in range(0, 200, 20):
        handles = [round_of.send(dice.randrange(3)) for _ in range(20)]
        senders = []
        for number, handle in enumerate(handles):

            def send(handle: FlowHandle[Any] = handle, number: int = start + number, late: bool = dice.random() < 0.3) -> None:
                if late:
                    waiting(handle)
                handle.signal("go", number)

            senders.append(threading.Thread(target=send))
        dice.shuffle(senders)
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        assert [app.ended(handle) for handle in handles] == ["completed"] * 20
        assert [handle.result() for handle in handles] == list(range(start, start + 20))
    assert app.sql("SELECT status, COUNT(*) FROM {signals} GROUP BY status") == [("consumed", 200)]
    assert app.sql("SELECT status, COUNT(*) FROM {waits} GROUP BY status") == [("consumed", 200)]
