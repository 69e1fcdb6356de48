"""What a message costs on SQLite: how many statements, and by which index. Nothing here looks at a clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from dramatiq_saga.brokers import dead_letters, reservations
from tests.support.brokers import take, take_all
from tests.unit.guards import Guarded


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with Guarded(tmp_path / "queue.db") as guarded:
        yield guarded


def on_messages(guarded: Guarded) -> list[str]:
    """First words of the statements that touched the queue since the last look."""
    found = [sql.split()[0] for sql in guarded.faults.statements if "saga_messages" in sql]
    guarded.faults.clear()
    return found


def transactions(guarded: Guarded) -> int:
    return sum(1 for sql in guarded.faults.statements if sql == "COMMIT")


def test_a_message_costs_one_insert_two_updates_and_one_delete(guarded: Guarded) -> None:
    message = dramatiq.Message(queue_name="default", actor_name="a", args=(), kwargs={}, options={})
    guarded.broker.enqueue(message)
    assert on_messages(guarded) == ["INSERT"]
    consumer = guarded.consumer()
    proxy = take(consumer)
    assert on_messages(guarded) == ["UPDATE", "UPDATE"]
    consumer.ack(proxy)
    assert on_messages(guarded) == ["DELETE"]


def test_a_batch_costs_as_many_statements_as_one_message(guarded: Guarded) -> None:
    for number in range(16):
        guarded.send(number)
    guarded.faults.clear()
    assert len(take_all(guarded.consumer(16))) == 16
    assert [word for word in on_messages(guarded) if word != "SELECT"] == ["UPDATE", "UPDATE"]


def test_a_retry_costs_one_statement_in_place_of_the_delete(guarded: Guarded) -> None:
    actor: Any = dramatiq.actor(lambda: None, broker=guarded.broker, actor_name="record")
    assert actor
    consumer, proxy = guarded.delivered()
    guarded.broker.emit_before("process_message", proxy)
    guarded.broker.emit_after("process_message", proxy, exception=ValueError("boom"))
    assert on_messages(guarded) == []
    consumer.ack(proxy)
    assert on_messages(guarded) == ["UPDATE"]


def test_a_follow_up_shares_the_transaction_of_the_acknowledgement(guarded: Guarded) -> None:
    step: Any = dramatiq.actor(lambda *args: None, broker=guarded.broker, actor_name="record")
    dramatiq.pipeline([step.message(1), step.message(2)]).run()
    consumer = guarded.consumer()
    proxy = take(consumer)
    guarded.faults.clear()
    guarded.broker.emit_before("process_message", proxy)
    guarded.broker.emit_after("process_message", proxy, result=None)
    consumer.ack(proxy)
    assert transactions(guarded) == 1
    assert on_messages(guarded) == ["DELETE", "INSERT"]


HOT = {
    "due and lapsed rows": (reservations._PROMOTE_SQLITE, 4, {"queue_delayed", "queue_leased"}),
    "the pick": (reservations._RESERVE_SQLITE, 4, {"queue_ready"}),
    "the look": (reservations._PEEK, 3, {"queue_ready", "queue_delayed", "queue_leased"}),
    "acknowledgement": (reservations._DELETE, 4, set()),
    "rejection": (reservations._BURY, 6, set()),
    "retry": (reservations._POSTPONE, 8, set()),
    "extension": (reservations._EXTEND, 5, set()),
    "dead letters": (dead_letters._LIST, 1, {"queue_dead"}),
}


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_finds_its_rows_by_index_whatever_is_waiting(guarded: Guarded, name: str) -> None:
    """No scan and no sort: the cost of a reservation does not depend on how many messages wait, are delayed or are dead."""
    template, parameters, indexes = HOT[name]
    plan = guarded.broker.store.read(lambda tx: tx.all("EXPLAIN QUERY PLAN " + template, [1] * parameters))
    steps = [row[3] for row in plan]
    assert not [step for step in steps if "SCAN saga_messages" in step and "USING" not in step], steps
    assert not [step for step in steps if "TEMP B-TREE" in step and "queue_dead" not in str(steps)], steps
    used = {word.removeprefix("saga_") for step in steps for word in step.split() if word.startswith("saga_queue")}
    assert used == indexes, steps
