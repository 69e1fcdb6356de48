"""Overlap locks with real workers, on a broker that puts its own row back and on one that is sent a copy (LOCK-1)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.middleware import Middleware
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import StubBackend

from dramatiq_saga import Flow
from dramatiq_saga.step import is_ours
from tests.conformance.engine.test_lost_barriers import closed_early, fan_of, value_of
from tests.conformance.engine.test_parallel import Doors
from tests.support.application import Application, Applications
from tests.support.waiting import DEADLINE, eventually

pytestmark = pytest.mark.parametrize("_overlap_locks", ["redis"], indirect=True)

KINDS = ("sqlite", "redis")


class Deliveries(Middleware):
    """Keeps every message of a run that a worker has been delivered."""

    def __init__(self) -> None:
        self.seen: list[Message[Any]] = []

    def before_process_message(self, broker: Any, message: Any) -> None:
        if is_ours(message):
            self.seen.append(Message.decode(message._message.encode()))

    def of(self, actor: str) -> list[Message[Any]]:
        return [message for message in self.seen if message.actor_name == actor]


@pytest.fixture(params=KINDS)
def app(request: pytest.FixtureRequest, applications: Applications) -> Application:
    return applications(request.param)


@pytest.fixture
def deliveries(app: Application) -> Deliveries:
    made = Deliveries()
    app.broker.middleware.insert(0, made)
    return made


def put_back(journal: list[dict[str, Any]], key: str) -> int:
    return sum(line["event"] == "overlap_put_back" and line["key"].endswith(key) for line in journal)


def test_a_duplicate_does_not_close_a_batch_early(
    app: Application, deliveries: Deliveries, journal: list[dict[str, Any]]
) -> None:
    """LOCK-1, PAR-1, PAR-2: delivered while the first worker holds the lock it is put back, and never counted as a member that is done."""
    doors, after = Doors(app), app.step("after", gives="after")
    fan = fan_of(app, doors, after)
    app.start(threads=5)
    run = fan.send()
    doors.wait_inside(0, 1, 2)
    for message in deliveries.of("member"):
        app.broker.enqueue(message)
    for sequence in (2, 3, 4):
        eventually(lambda sequence=sequence: put_back(journal, f":{run.id}:{sequence}") > 0)  # type: ignore[misc]
    assert value_of(app, run) == 3
    assert not closed_early(app, run)
    for number in range(3):
        doors.open(number)
    app.ended(run)
    assert run.result() == [[0, 10, 20], "after"]
    app.drain()
    assert not closed_early(app, run)
    assert app.calls == [("after",)]
    assert [line["sequence"] for line in journal if line["event"] == "batch_finished_early"] == []
    assert {line["status"] for line in journal if line["event"] == "claim_lost"} == {"completed"}


def test_a_message_of_a_run_waits_for_the_drive_that_is_at_it(
    app: Application, deliveries: Deliveries, journal: list[dict[str, Any]]
) -> None:
    """LOCK-1: the workflow function is in one place at a time, and the second message finds nothing left to do."""
    inside, go, entered = threading.Event(), threading.Event(), []

    @app.workflow
    def slow(flow: Flow) -> str:
        entered.append(1)
        inside.set()
        assert go.wait(DEADLINE)
        return "done"

    app.start(threads=3)
    run = slow.send()
    assert inside.wait(DEADLINE)
    (first,) = deliveries.of("slow")
    app.broker.enqueue(Message(**{**first.asdict(), "message_id": "another"}))
    eventually(lambda: put_back(journal, f"run:{run.id}") > 1)
    go.set()
    app.ended(run)
    app.drain()
    assert entered == [1]
    assert run.result() == "done"
    assert len(deliveries.of("slow")) > 2


def test_what_is_put_back_keeps_what_dramatiq_was_asked_for(
    app: Application, deliveries: Deliveries, journal: list[dict[str, Any]]
) -> None:
    """LOCK-1, NATIVE-5: a duplicate that comes first makes the message itself wait; its options, and a stored result, are as asked."""
    results = StubBackend()
    app.broker.middleware.insert(0, Results(backend=results))
    app.broker.actor_options |= {"store_results", "result_ttl"}
    step = app.step("step", gives="value")

    @app.workflow
    def single(flow: Flow) -> str:
        return str(flow.action(step).with_options(store_results=True).run())

    locks: Any = app.middleware._locks
    run = single.send_with_options(run_id="one")
    key = f"{app.engine.settings.locks.prefix}:action:{run.id}:1"
    locks.take(key, "somebody", ttl_ms=600_000)
    app.start()
    eventually(lambda: put_back(journal, f":{run.id}:1") > 2)
    with pytest.raises(ResultMissing):
        deliveries.of("step")[0].get_result(backend=results)
    locks.release(key, "somebody")
    app.ended(run)
    app.drain()
    assert [message.options.get("store_results") for message in deliveries.of("step")] == [True] * len(deliveries.of("step"))
    assert deliveries.of("step")[-1].get_result(backend=results) == "value"
