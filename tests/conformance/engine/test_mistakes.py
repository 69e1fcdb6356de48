"""What newcomers get wrong: each mistake is answered where it is made, with the way out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from dramatiq_saga import Flow, FlowFailedError, ResultMissing, SagaError, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.errors import WouldBlockError


class Shop:
    def __init__(self, path: Path) -> None:
        self.broker = SQLiteBroker(path)
        self.broker.add_middleware(SagaMiddleware())
        self.calls: list[str] = []

        @dramatiq.actor(broker=self.broker, max_retries=0)
        def charge(order: str) -> str:
            self.calls.append(order)
            return order

        self.charge = charge

    def workflow(self, function: Any) -> Any:
        return workflow(broker=self.broker)(function)


@pytest.fixture
def shop(sqlite_path: Path) -> Any:
    one = Shop(sqlite_path)
    yield one
    one.broker.close()


def test_an_actor_called_inside_a_workflow_is_refused_and_never_runs(shop: Shop) -> None:
    """A plain call would run at every replay; it is answered like a send (SendInsideWorkflowError), and the run is held."""

    def order(flow: Flow) -> str:
        return shop.charge("o-1")

    with pytest.raises(WouldBlockError, match=r"flow\.run\(charge, \.\.\.\)"):
        shop.workflow(order).run_sync()
    assert shop.calls == []


def test_an_actor_called_inside_a_step_is_a_plain_call(shop: Shop) -> None:
    """The wrapper answers only for the message at hand."""

    @dramatiq.actor(broker=shop.broker, max_retries=0)
    def twice() -> str:
        return shop.charge("inner")

    def order(flow: Flow) -> str:
        return flow.run(twice)

    assert shop.workflow(order).run_sync().result() == "inner"
    assert shop.calls == ["inner"]


def test_a_builder_that_is_returned_instead_of_run_holds_the_run(shop: Shop) -> None:
    """BuilderNotRunError, and result() says that the run is held instead of advising to wait."""

    def order(flow: Flow) -> Any:
        return flow.action(shop.charge, "o-1")

    declared = shop.workflow(order)
    with pytest.raises(
        WouldBlockError, match=r"the workflow function returned flow\.action\(charge\), which was never run: call \.run"
    ):
        declared.run_sync()
    (run,) = __import__("dramatiq_saga").query(broker=shop.broker)
    with pytest.raises(ResultMissing, match="is held: BuilderNotRunError"):
        run.result()


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda flow, charge: flow, "returned its flow"),
        (
            lambda flow, charge: (lambda one: (one.run(), one)[1])(flow.action(charge, "o-1")),
            r"returned the builder flow\.action\(charge\): return what run\(\) gave",
        ),
    ],
)
def test_what_belongs_to_a_run_cannot_be_its_result(shop: Shop, returns: Any, words: str) -> None:
    """The run is held and told what to return."""
    with pytest.raises(WouldBlockError, match=words):
        shop.workflow(lambda flow: returns(flow, shop.charge)).run_sync()


TWICE: dict[str, Any] = {
    "action": lambda flow, step, child: (flow.action(step, "o"),) * 2,
    "parallel": lambda flow, step, child: (flow.parallel(flow.action(step, "o")),) * 2,
    "saga": lambda flow, step, child: (flow.saga(flow.action(step, "o")),) * 2,
    "child": lambda flow, step, child: (flow.child(child),) * 2,
    "member of a block": lambda flow, step, child: (lambda one: (flow.parallel(one), one))(flow.action(step, "o")),
}


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("kind", list(TWICE))
def test_a_builder_that_is_run_twice_makes_one_step(shop: Shop, kind: str, caught: bool) -> None:
    """BuilderReusedError: ``b.run(); b.run()`` charged twice. The run is held, what was done stands, and mended code goes on with it."""

    @workflow(broker=shop.broker)
    def part(flow: Flow) -> str:
        return flow.run(shop.charge, "o")

    def order(flow: Flow) -> Any:
        first, second = TWICE[kind](flow, shop.charge, part)
        first.run()
        try:
            return second.run()
        except Exception:
            if not caught:
                raise
        return None

    declared = shop.workflow(order)
    with pytest.raises(WouldBlockError, match="a builder is for one step; keep what run") as refused:
        declared.run_sync()
    held = refused.value.held
    assert held is not None
    assert held["type"] == "dramatiq_saga.errors.BuilderReusedError"
    assert ("belongs to parallel()" if kind == "member of a block" else "has been run already") in held["message"]
    assert shop.calls == ["o"]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            lambda flow, one: one.on_compensation_failure("halt"),
            r"on_compensation_failure\(\) takes 'stop' or 'continue', not 'halt'",
        ),
        (lambda flow, one: flow.saga(one).on_compensation_failure(None), r"takes 'stop' or 'continue', not None"),
        (lambda flow, one: flow.child(one).on_compensation_failure("Stop"), r"takes 'stop' or 'continue', not 'Stop'"),
        (
            lambda flow, one: flow.child(one).close_policy("kill"),
            r"close_policy\(\) takes 'abandon' or 'cancel' or 'fail', not 'kill'",
        ),
    ],
)
def test_a_policy_that_there_is_not_is_answered_with_those_that_there_are(shop: Shop, says: Any, words: str) -> None:
    """COMP-4, CHILD-3."""
    part = workflow(broker=shop.broker, name="part")(lambda flow: None)

    def order(flow: Flow) -> None:
        one = part if "child" in says.__code__.co_names else flow.action(shop.charge, "o")
        says(flow, one).run()

    with pytest.raises(FlowFailedError, match=words):
        shop.workflow(order).run_sync().result()
    assert shop.calls == []


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda shop: workflow(broker=shop.broker)(shop.charge), "charge is an actor, and a workflow is a plain function"),
        (lambda shop: workflow(broker=shop.broker, name="x")(shop.charge), "decorate it with @workflow alone"),
        (
            lambda shop: workflow(broker=shop.broker)(workflow(broker=shop.broker, name="x")(lambda flow: 1)),
            "x is a workflow already",
        ),
        (lambda shop: workflow(broker=shop.broker)(functools.partial(pay, amount=1)), r"give it one, workflow\(name=\.\.\.\)"),
        (lambda shop: workflow("checkout"), "decorates a function, not 'checkout'"),
    ],
)
def test_what_is_no_function_is_no_workflow(shop: Shop, declare: Any, words: str) -> None:
    """``@workflow`` above ``@dramatiq.actor`` was an AttributeError."""
    with pytest.raises(TypeError, match=words):
        declare(shop)


def pay(flow: Flow, *, amount: int) -> int:
    return amount


def test_a_callable_that_is_given_a_name_is_a_workflow(shop: Shop) -> None:
    """workflow(name=...)."""
    assert workflow(broker=shop.broker, name="pay")(functools.partial(pay, amount=3)).run_sync().result() == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_retries": "many"}, "a number of tries"),
        ({"max_retries": -1}, "a number of tries"),
        ({"min_backoff": "x"}, "milliseconds"),
        ({"max_age": 0}, "above 0"),
        ({"time_limit": "5s"}, "milliseconds, as a number above 0"),
        ({"priority": "x"}, "an integer"),
        ({"queue_name": 5}, "a queue's name"),
    ],
)
def test_option_values_that_dramatiq_would_stumble_over_are_refused_where_they_are_given(
    shop: Shop, options: dict[str, Any], words: str
) -> None:
    """A message with such an option would die before its claim, again and again."""
    seen: list[str] = []

    def order(flow: Flow) -> None:
        try:
            flow.action(shop.charge, "o").with_options(**options)
        except TypeError as error:
            seen.append(str(error))
            raise

    run = shop.workflow(order).run_sync()
    assert run.status == "failed"
    assert words in seen[0]
    assert next(iter(options)) in seen[0]


def test_options_of_a_run_are_checked_too(shop: Shop) -> None:
    """send_with_options() takes what a message can carry, ids that a command line can, and says what was meant."""

    def order(flow: Flow) -> None: ...

    declared = shop.workflow(order)
    for options, words in (
        ({"prio": 3}, "did you mean 'priority'"),
        ({"priority": "x"}, "an integer"),
        ({"queue_name": "foo"}, "its workflow's queue"),
        ({"delay": -1}, "from 0"),
        ({"delay": "5"}, "milliseconds"),
        ({"tags": {"a": [1]}}, "takes text, an integer or None"),
    ):
        with pytest.raises(TypeError, match=words):
            declared.send_with_options(**options)
    with pytest.raises(ValueError, match="control characters"):
        declared.send_with_options(run_id="a\nb")
    assert shop.broker.queue_stats() == []


def test_declarations_that_cannot_work_are_refused(shop: Shop) -> None:
    """Generator functions, a message where an actor belongs, settings by position."""

    def generator(flow: Flow) -> Any:
        yield 1

    with pytest.raises(TypeError, match="generator function"):
        shop.workflow(generator)
    with pytest.raises(TypeError, match="settings=Settings"):
        SagaMiddleware(Settings())  # type: ignore[arg-type]

    seen: list[str] = []

    def order(flow: Flow) -> None:
        try:
            flow.action(shop.charge, "o").compensate_with(shop.charge.message("o"))
        except TypeError as error:
            seen.append(str(error))
            raise

    shop.workflow(order).run_sync()
    assert "lambda result" in seen[0]


def test_waiting_for_a_result_inside_a_host_transaction_is_refused(shop: Shop) -> None:
    """HOST-1: the run cannot start before the transaction ends, so the wait could only run out."""

    def order(flow: Flow) -> None: ...

    declared = shop.workflow(order)
    shop.broker.queue_stats()
    with shop.broker.store.database.atomic("IMMEDIATE"):
        run = declared.send()
        with pytest.raises(SagaError, match="inside an open transaction"):
            run.result(wait=1)
