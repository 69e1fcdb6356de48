"""Values that nobody can mean are refused where they are given, with words that name them; none reaches a database."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import dramatiq
import peewee
import pytest
from dramatiq.brokers.stub import StubBroker

from dramatiq_saga import Flow, Settings, get_flow, query
from dramatiq_saga.clock import moment_to_ms, to_ms
from dramatiq_saga.engine.replay import Replay, replay
from dramatiq_saga.engine.rows import Decision, Snapshot
from dramatiq_saga.errors import FlowNotFoundError, ResultTimeout
from dramatiq_saga.options import check_options
from dramatiq_saga.store.trouble import is_trouble
from tests.support.workbench import Workbench


@pytest.fixture
def actor() -> dramatiq.Actor[Any, Any]:
    return dramatiq.actor(lambda *args: None, broker=StubBroker(), actor_name="charge")


def walk(function: Callable[[Flow], Any]) -> Decision:
    run = Snapshot(
        "r", "w", None, "default", None, None, "running", "none", 1, 1, 0, lambda: ([], {}), None, 0, [], {}
    )  # fmt: skip
    return replay(function, Replay(run, now=1_000, settings=Settings()), Flow)


@pytest.mark.parametrize("kind", ["parallel", "saga", "nested"])
def test_a_block_with_a_member_that_is_refused_records_nothing(kind: str, actor: Any) -> None:
    """HISTORY-1, C26: a block is asked for whole or not at all, so a function that goes on all the same replays as it ran."""

    def function(flow: Flow) -> None:
        members: list[Any] = [flow.action(actor, 1), flow.action(actor, 2).on_compensation_failure("stop")]
        if kind == "nested":
            members = [flow.action(actor, 0), flow.parallel(*members)]
        with pytest.raises(TypeError, match="without compensate_with"):
            (flow.saga if kind == "saga" else flow.parallel)(*members).run()
        flow.run(actor, 99)

    decision = walk(function)
    assert [(step.sequence, json.loads(step.args)) for step in decision.steps] == [(1, [[99], {}])]
    assert decision.more is None or not decision.more.blocks


@pytest.mark.parametrize("n", [0, -1, True, 1.5, math.nan, "3", 2**63])
@pytest.mark.parametrize("method", ["max_claims", "max_in_flight"])
def test_a_count_is_an_integer_from_one(method: str, n: Any, actor: Any) -> None:
    def function(flow: Flow) -> None:
        builder: Any = flow.action(actor) if method == "max_claims" else flow.parallel(flow.action(actor))
        with pytest.raises((TypeError, ValueError), match="takes a number of at least 1"):
            getattr(builder, method)(n)

    assert walk(function).kind == "completed"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 2**63, 10**40, -(10**40)])
def test_a_duration_has_an_end(seconds: float) -> None:
    with pytest.raises(ValueError, match="a duration is"):
        to_ms(seconds)


@pytest.mark.parametrize("moment", [None, "2026-01-01", 5])
def test_a_moment_is_a_datetime(moment: Any) -> None:
    with pytest.raises(TypeError, match="aware datetime"):
        moment_to_ms(moment)


@pytest.mark.parametrize(
    ("name", "value"), [("time_limit", 2**63), ("priority", 2**63), ("max_age", 10**40), ("max_retries", 2**63)]
)
def test_an_option_fits_its_column(name: str, value: int) -> None:
    """CLAIM-4: what the claim could not write is refused before there is a message."""
    with pytest.raises(TypeError, match=name):
        check_options({name: value}, "with_options()")
    check_options({"time_limit": math.inf}, "with_options()")


def test_waiting_for_a_result_takes_a_duration(bench: Workbench) -> None:
    run = bench.send()
    with pytest.raises(ValueError, match="finite"):
        run.result(wait=math.nan)
    with pytest.raises(TypeError):
        run.result(wait="3")  # type: ignore[arg-type]
    with pytest.raises(ResultTimeout):
        run.result(wait=timedelta(milliseconds=1))


def test_runs_are_looked_for_by_text(bench: Workbench) -> None:
    """Where the database could not even be asked, there is no such run."""
    with pytest.raises(TypeError, match="a run's id is text"):
        get_flow(5, broker=bench.broker)  # type: ignore[arg-type]
    with pytest.raises(FlowNotFoundError):
        get_flow("a\0b", broker=bench.broker)
    with pytest.raises(TypeError, match="a workflow's name is text"):
        query(workflow=5, broker=bench.broker)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be stored"):
        query(workflow="a\0b", broker=bench.broker)
    with pytest.raises(TypeError, match="tags are a mapping"):
        query(tags="x", broker=bench.broker)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "trouble"), [("42804", False), ("42883", False), ("42P01", True), ("42501", True), ("57P03", True)]
)
def test_a_value_of_a_wrong_kind_is_no_trouble_with_the_database(state: str, trouble: bool) -> None:
    """HISTORY-1, NATIVE-7: waiting for it to pass would keep a worker's thread for ever; a table that is missing may come back."""
    original = type("DriverError", (Exception,), {"sqlstate": state})()
    error = peewee.ProgrammingError("no")
    error.orig = original
    assert is_trouble(error) is trouble
