"""What an author gets wrong is said at the line that is wrong, in words that mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from dramatiq_saga import Flow, FlowFailedError, SagaMiddleware, Workflow, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.errors import WouldBlockError


@pytest.fixture
def broker(sqlite_path: Path) -> Iterator[SQLiteBroker]:
    broker = SQLiteBroker(sqlite_path)
    broker.add_middleware(SagaMiddleware())
    yield broker
    broker.close()


@pytest.fixture
def step(broker: SQLiteBroker) -> Any:
    @dramatiq.actor(broker=broker, max_retries=0)
    def charge_card(order: Any) -> Any:
        return order

    return charge_card


def declare(broker: SQLiteBroker, function: Callable[[Flow], Any]) -> Workflow[[], Any]:
    return workflow(name="checkout", broker=broker)(function)


def failure(broker: SQLiteBroker, function: Callable[[Flow], Any]) -> str:
    """How a run of ``function`` fails, as its caller reads it."""
    with pytest.raises(FlowFailedError) as caught:
        declare(broker, function).run_sync().result()
    return str(caught.value)


def test_a_misspelt_option_of_a_step_is_refused(broker: SQLiteBroker, step: Any) -> None:
    """Dramatiq's messages take any option: without this, ``max_retry`` would be carried along and read by nobody."""
    message = failure(broker, lambda flow: flow.action(step, 1).with_options(max_retry=3).run())
    assert "did you mean 'max_retries'?" in message


def test_an_option_that_some_middleware_may_read_is_not(broker: SQLiteBroker, step: Any) -> None:
    run = declare(broker, lambda flow: flow.action(step, 1).with_options(tenant="acme").run()).run_sync()
    assert run.result() == 1


def test_an_argument_that_cannot_be_stored_is_named_by_its_path(broker: SQLiteBroker, step: Any) -> None:
    """CODEC-2."""
    message = failure(broker, lambda flow: flow.run(step, {"when": [datetime.now(UTC)]}))
    assert "charge_card: args[0]['when'][0] cannot be stored" in message


@pytest.mark.parametrize("expires_in", [0, -1, timedelta(seconds=-1)])
def test_a_deadline_that_has_passed_starts_no_run(broker: SQLiteBroker, expires_in: Any) -> None:
    """EXPIRE-1."""
    checkout = declare(broker, lambda flow: None)
    with pytest.raises(ValueError, match="above zero"):
        checkout.send_with_options(expires_in=expires_in)


def test_a_builder_that_was_dropped_is_named_to_the_caller_of_run_sync(broker: SQLiteBroker, step: Any) -> None:
    """HISTORY-1: the run is held, and not advised to be sent."""

    def forgets_to_run(flow: Flow) -> None:
        flow.action(step, 1)

    with pytest.raises(WouldBlockError, match=r"is held: .*call \.run\(\)") as caught:
        declare(broker, forgets_to_run).run_sync()
    assert caught.value.held is not None
    assert caught.value.held["type"].endswith("BuilderNotRunError")
