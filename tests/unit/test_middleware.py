"""The middleware's small parts: its messages, what it recognises, where it stands (API, NATIVE-5, C49)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries

from dramatiq_saga import SagaMiddleware
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import MiddlewareOrderError
from dramatiq_saga.middleware import _enqueue, build_message, check_order, middleware_of
from dramatiq_saga.step import Delivery, is_ours


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    made = StubBroker()
    yield made
    made.close()


def test_a_message_names_its_row_and_nothing_else(broker: StubBroker) -> None:
    """C49: ids only; counters where they are not zero; the options of the step; tries as Dramatiq counts them."""
    message = build_message(broker, Outgoing("step", "run-1", "charge", "money", 3))
    assert (message.queue_name, message.actor_name, message.args, message.kwargs) == ("money", "charge", (), {})
    assert message.options == {"saga": {"kind": "step", "run": "run-1", "sequence": 3}}
    full = build_message(
        broker, Outgoing("step", "r", "charge", "money", 3, 2, 5, 4, priority=-1, options={"max_retries": 9}, delay=5)
    )
    assert full.options == {
        "max_retries": 9, "retries": 4, "priority": -1,
        "saga": {"kind": "step", "run": "r", "sequence": 3, "cycle": 2, "attempts": 5},
    }  # fmt: skip
    drive = build_message(broker, Outgoing("drive", "r", "w", "default"))
    assert drive.options == {"saga": {"kind": "drive", "run": "r"}}


def test_options_of_a_row_are_not_shared_with_its_messages(broker: StubBroker) -> None:
    """CODEC-4: Retries writes into a message's options."""
    options: dict[str, Any] = {"max_retries": 1}
    outgoing = Outgoing("step", "r", "a", "q", 1, options=options)
    build_message(broker, outgoing).options["retries"] = 7
    assert options == {"max_retries": 1}
    assert build_message(broker, outgoing).options == {"max_retries": 1, "saga": {"kind": "step", "run": "r", "sequence": 1}}


def test_message_ids_are_each_their_own_and_shaped_like_dramatiqs(broker: StubBroker) -> None:
    """CLAIM-2: an orphan is known by the id of its message."""
    import random

    random.seed(4)
    ids = {build_message(broker, Outgoing("drive", "r", "w", "q")).message_id for _ in range(1000)}
    random.seed(4)
    ids |= {build_message(broker, Outgoing("drive", "r", "w", "q")).message_id for _ in range(1000)}
    assert len(ids) == 2000
    assert {tuple(len(part) for part in known.split("-")) for known in ids} == {(8, 4, 4, 4, 12)}


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, False),
        ({"saga": None}, False),
        ({"saga": "a long story"}, False),
        ({"saga": {"kind": "novel"}}, False),
        ({"saga": {"kind": "drive", "run": "r"}}, True),
        ({"saga": {"run": "r"}}, True),
    ],
)
def test_a_message_is_ours_by_what_its_option_says(options: dict[str, Any], ours: bool) -> None:
    """NATIVE-5: the name of an option alone proves nothing."""
    assert is_ours(Message("q", "a", (), {}, options)) is ours


@pytest.mark.parametrize(
    ("facts", "damaged"),
    [
        ({"kind": "drive", "run": "r"}, False),
        ({"kind": "step", "run": "r", "sequence": 1}, False),
        ({"kind": "compensation", "run": "r", "sequence": 1, "attempts": 2}, False),
        ({"run": "r"}, True),
        ({"kind": "step", "run": "r"}, True),
        ({"kind": "step", "run": "r", "sequence": True}, True),
        ({"kind": "step", "run": None, "sequence": 1}, True),
        ({"kind": "step", "run": "r", "sequence": 1, "cycle": "0"}, True),
        ({"kind": "other", "run": "r", "sequence": 1}, True),
    ],
)
def test_a_message_of_ours_that_names_no_row_is_damaged(facts: dict[str, Any], damaged: bool) -> None:
    """CLAIM-1: without a row there is nothing to claim."""
    delivery = Delivery(Message("q", "a", (), {}, {"saga": facts}))  # type: ignore[arg-type]
    assert delivery.damaged is damaged
    assert (delivery.job is None) == (facts.get("kind") not in ("step", "compensation"))


def test_whether_dramatiq_asks_for_another_try_is_seen_in_two_ways() -> None:
    """C07: it has begun to enqueue one, or it has counted one and not come so far."""
    message: Any = Message("q", "a", (), {}, {"saga": {"kind": "step", "run": "r", "sequence": 1}, "retries": 2})
    delivery = Delivery(message)
    assert delivery.asks_again is False
    message.options["retries"] = 3
    assert delivery.asks_again is True
    other = Delivery(Message("q", "a", (), {}, {"saga": {"kind": "step", "run": "r", "sequence": 1}}))  # type: ignore[arg-type]
    other.retry_asked = True
    assert other.asks_again is True


class Unroutable(StubBroker):
    """Knows its queues as RabbitMQ's broker does: some have still to be made on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.queues_pending: set[str] = set()


def test_sending_to_a_queue_of_others_declares_it_only_where_that_is_needed(broker: StubBroker) -> None:
    """DRIVE-6: a worker consumes what its broker declares."""
    declared: list[str] = []

    class Watch(dramatiq.middleware.Middleware):
        def after_declare_queue(self, broker: Any, queue_name: str) -> None:
            declared.append(queue_name)

    broker.add_middleware(Watch())
    _enqueue(broker, Message("elsewhere", "a", (), {}, {}), None)
    assert declared == ["elsewhere"]  # StubBroker knows no other way
    assert broker.queues["elsewhere"].qsize() == 1

    class Redis(StubBroker):
        def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
            sent.append((message.queue_name, delay))

    sent: list[Any] = []
    other = Redis()
    other.add_middleware(Watch())
    _enqueue(other, Message("elsewhere", "a", (), {}, {}), 5)
    assert sent == [("elsewhere", 5)]
    assert declared == ["elsewhere"]


def test_the_middleware_of_a_broker_is_found_or_its_absence_told(broker: StubBroker, tmp_path: Any) -> None:
    """MiddlewareOrderError: none, or more than one."""
    with pytest.raises(MiddlewareOrderError, match="has no SagaMiddleware"):
        middleware_of(broker)
    ours = SagaMiddleware(tmp_path / "x.db")
    broker.add_middleware(ours)
    assert middleware_of(broker) is ours
    check_order(broker, ours)
    broker.middleware.remove(ours)
    broker.middleware.insert(0, ours)
    with pytest.raises(MiddlewareOrderError, match="AgeLimit"):
        check_order(broker, ours)


def test_a_broker_without_default_middleware_is_in_order(tmp_path: Any) -> None:
    """What bites: nothing has to be there; what is there has to stand before."""
    broker = StubBroker(middleware=[])
    ours = SagaMiddleware(tmp_path / "x.db")
    broker.add_middleware(ours)
    check_order(broker, ours)
    broker.add_middleware(Retries(), before=SagaMiddleware)
    check_order(broker, ours)
    broker.close()


def test_nothing_is_opened_by_adding_and_declaring(tmp_path: Any) -> None:
    """What bites: workers fork; no connection at import."""
    from dramatiq_saga import workflow

    path = tmp_path / "x.db"
    broker = StubBroker()
    broker.add_middleware(SagaMiddleware(path))
    dramatiq.actor(lambda: None, broker=broker, actor_name="a")
    workflow(broker=broker, name="w")(lambda flow: None)
    assert not path.exists()
    broker.close()
