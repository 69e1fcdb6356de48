"""Brokers on a server whose connections die under them (QUEUE-5, C59)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest

from dramatiq_saga.brokers import DatabaseBroker
from tests.support import servers
from tests.support.brokers import middleware, working
from tests.support.waiting import eventually


@pytest.fixture
def broker(postgres_url: str, table_prefix: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.05)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.05)
    # a reservation whose COMMIT was cut off is nobody's until its lease has lapsed: that has to come within the tests' patience
    broker = DatabaseBroker(
        f"{postgres_url}?application_name={namespace}", prefix=table_prefix, middleware=middleware(), retry_after=4
    )
    broker.store.migrate()
    dramatiq.set_broker(broker)
    yield broker
    broker.close()


def cut_all(namespace: str) -> int:
    """End every connection of this test's broker, as a restart of the server would."""
    with servers.connect_postgresql() as connection:
        found = connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s", (namespace,)
        ).fetchone()
    return int(found[0])


def test_a_message_is_acknowledged_although_every_connection_died_while_it_ran(broker: Any, namespace: str) -> None:
    """The acknowledgement finds new connections, and finds its row by the fence; the actor runs once."""
    runs: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=0)
    def work(number: int) -> None:
        runs.append(number)
        if number % 5 == 0:
            eventually(lambda: cut_all(namespace) >= 1)

    for number in range(20):
        work.send(number)
    with working(broker, threads=2):
        eventually(lambda: sorted(set(runs)) == list(range(20)), timeout=60)
        broker.join("default", timeout=60_000)
    assert sorted(runs) == list(range(20))
    assert broker.dead_letters() == []


def test_an_idle_worker_goes_on_after_the_server_has_been_away(broker: Any, namespace: str) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def note(number: int) -> None:
        seen.append(number)

    with working(broker, threads=2):
        for number in range(3):
            eventually(lambda: cut_all(namespace) >= 1)
            note.send(number)
            eventually(lambda number=number: number in seen)
    assert seen == [0, 1, 2]
