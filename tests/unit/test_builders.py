"""Builders by themselves: what a described step becomes, and what is refused on the way (API "Action builder")."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_saga import Flow, Settings
from dramatiq_saga.builders import ActionBuilder, bind
from dramatiq_saga.engine.replay import HoldRun, Replay, replay
from dramatiq_saga.engine.rows import NewStep, Snapshot
from dramatiq_saga.errors import NotSerializableError
from tests.unit.test_replay import recorded, run_of


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    made = StubBroker()
    yield made
    made.close()


@pytest.fixture
def charge(broker: StubBroker) -> Any:
    @dramatiq.actor(broker=broker, queue_name="money", priority=7, max_retries=3)
    def charge(order: str, amount: int = 1, *, currency: str = "EUR") -> None: ...

    return charge


@pytest.fixture
def refund(broker: StubBroker) -> Any:
    @dramatiq.actor(broker=broker, queue_name="money_back", max_retries=3)
    def refund(order: str) -> None: ...

    return refund


def described(
    actor: Any, describe: Callable[[ActionBuilder[Any]], Any], *args: Any, settings: Settings | None = None
) -> NewStep:
    """What a step that is described so becomes."""
    snapshot: Snapshot = run_of([])
    context = Replay(snapshot, now=1_000_000, settings=settings or Settings())

    def function(flow: Flow) -> Any:
        return describe(flow.action(actor, *args)).run()

    decision = replay(function, context, Flow)
    assert decision.kind == "suspended", decision.error
    (step,) = decision.steps
    return step


def test_a_step_takes_its_place_from_its_actor(charge: Any) -> None:
    """API: queue of the actor; no options, no compensation, no deadline unless asked for."""
    step = described(charge, lambda builder: builder, "o-1")
    assert (step.actor, step.queue, step.options, step.priority) == ("charge", "money", None, None)
    assert json.loads(step.args) == [["o-1"], {}]
    assert step.compensation is None
    assert (step.comp_from_result, step.comp_on_self_failure, step.comp_policy) == (False, False, None)
    assert (step.expires_at, step.max_claims, step.reclaim_stale_after_seconds) == (None, None, None)


def test_options_go_where_they_belong(charge: Any) -> None:
    """API with_options(): queue and priority are the row's, the rest is the message's; later ones win."""
    step = described(
        charge,
        lambda b: b.with_options(queue_name="vip", priority=-3, max_retries=1).with_options(max_retries=2, min_backoff=5),
        "o",
    )
    assert (step.queue, step.priority, step.options) == ("vip", -3, {"max_retries": 2, "min_backoff": 5})


def test_a_compensation_is_bound_and_encoded_with_its_queue(charge: Any, refund: Any) -> None:
    """COMP-2: given with its arguments, it is on the row from the beginning; the last one said counts."""
    step = described(charge, lambda b: b.compensate_with(lambda r: refund.message(r)).compensate_with(refund, "o-1"), "o")
    assert step.compensation is not None
    assert step.compensation.actor == "refund"
    assert json.loads(step.compensation.args or b"") == [["o-1"], {}]
    assert json.loads(step.compensation.options or "") == {"queue_name": "money_back"}
    assert step.comp_from_result is False
    step = described(charge, lambda b: b.compensate_with(refund, "o-1").compensate_with(lambda r: refund.message(r)), "o")
    assert step.compensation is None
    assert step.comp_from_result is True


def test_durations_and_moments_become_stored_times(charge: Any) -> None:
    """EXPIRE-1, RECLAIM-2: seconds or timedelta, aware moments; milliseconds on the row."""
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    assert described(charge, lambda b: b.expires_in(2.5), "o").expires_at == 1_002_500
    assert described(charge, lambda b: b.expires_in(timedelta(minutes=1)), "o").expires_at == 1_060_000
    assert described(charge, lambda b: b.expires_at(moment), "o").expires_at == int(moment.timestamp() * 1000)
    step = described(charge, lambda b: b.reclaim_stale_after(timedelta(minutes=2)).max_claims(1), "o")
    assert (step.reclaim_stale_after_seconds, step.max_claims) == (120, 1)


def test_a_window_for_an_undo_needs_an_undo(charge: Any, refund: Any) -> None:
    """RECLAIM-2: without a compensation there is nothing to reclaim."""
    on = Settings.from_mapping({"sagas": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 60}}}})
    assert described(charge, lambda b: b, "o", settings=on).comp_reclaim_stale_after_seconds is None
    with_undo = described(charge, lambda b: b.compensate_with(refund, "o"), "o", settings=on)
    assert with_undo.comp_reclaim_stale_after_seconds == 60


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ((), {}, "missing a required argument: 'order'"),
        (("a", 1, 2), {}, "too many positional arguments"),
        (("a",), {"colour": "red"}, "unexpected keyword argument 'colour'"),
        (("a",), {"order": "b"}, "multiple values for argument 'order'"),
    ],
)
def test_arguments_are_bound_with_the_signature_in_the_error(charge: Any, args: Any, kwargs: Any, complaint: str) -> None:
    """API Action builder: what is wrong, and what the actor takes."""
    with pytest.raises(TypeError) as caught:
        bind(charge, args, kwargs)
    assert complaint in str(caught.value)
    assert "its signature is charge(order: 'str', amount: 'int' = 1, *, currency: 'str' = 'EUR')" in str(caught.value)


def test_an_argument_that_cannot_be_stored_is_named_with_its_actor(charge: Any) -> None:
    """CODEC-2: the path leads to it."""
    with pytest.raises(NotSerializableError) as caught:
        bind(charge, ("o",), {"currency": {"set": {1}}})
    assert "currency" in caught.value.path
    assert "['set']" in caught.value.path


def test_an_actor_whose_signature_python_cannot_tell_is_not_judged(broker: StubBroker) -> None:
    """API Action builder: a builtin, for example."""
    actor = dramatiq.actor(max, broker=broker, actor_name="largest")
    assert json.loads(bind(actor, (1, 2), {})) == [[1, 2], {}]


def test_what_is_known_of_an_actor_does_not_keep_it() -> None:
    """C61: a suite makes an application for each test; each is gone with its test."""
    broker = StubBroker()
    actor = dramatiq.actor(lambda order: order, broker=broker, actor_name="mortal")
    bind(actor, ("o",), {})
    gone = weakref.ref(actor.fn)
    del actor, broker
    gc.collect()
    assert gone() is None


def test_the_wrapper_of_a_decorator_is_seen_through(broker: StubBroker) -> None:
    """API Action builder: functools.wraps keeps the signature that counts."""
    import functools

    def noisy(fn: Any) -> Any:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return call

    @noisy
    def plain(a: int) -> None: ...

    actor = dramatiq.actor(plain, broker=broker)
    with pytest.raises(TypeError, match="plain: too many positional"):
        bind(actor, (1, 2), {})


def test_a_builder_that_is_dropped_is_told_and_one_that_was_refused_is_not(charge: Any, refund: Any) -> None:
    """BuilderNotRunError: only forgotten ones, wherever they were forgotten."""

    def forgets(flow: Flow) -> None:
        flow.action(charge, "o")

    def is_refused(flow: Flow) -> str:
        for wrong in (
            lambda: flow.action(charge),
            lambda: flow.action(charge, "o").max_claims(0),
            lambda: flow.action(charge, "o").with_options(throws=ValueError),
            lambda: flow.action(charge, "o").compensate_with(refund),
        ):
            with pytest.raises((TypeError, ValueError)):
                wrong()
        return "fine"

    with pytest.raises(HoldRun, match=r"flow\.action\(charge\) was built but never run"):
        replay(forgets, Replay(run_of([]), now=1, settings=Settings()), Flow)
    assert replay(is_refused, Replay(run_of([]), now=1, settings=Settings()), Flow).result == recorded_bytes("fine")


def recorded_bytes(value: Any) -> bytes:
    assert recorded(value)() == value
    return json.dumps(value).encode()
