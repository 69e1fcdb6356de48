"""RabbitMQ in front of a store: the essentials, and what is particular to a broker that declares what it sends to."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.middleware import default_middleware

from dramatiq_saga import Flow, SagaMiddleware
from tests.conformance.engine.test_interrupts import spin
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


@pytest.fixture(params=["rabbitmq"])
def rabbit(request: pytest.FixtureRequest, applications: Applications) -> Application:
    return applications(request.param)


def test_a_run_goes_through_its_steps_and_undoes_them(rabbit: Application) -> None:
    """DRIVE-3, COMP-1: with native retries and an undo built from a result."""
    app = rabbit
    undo, refuse = app.step("undo"), app.step("refuse", raises=ValueError("no"), max_retries=1)

    @app.actor(max_retries=2)
    def flaky(n: int) -> int:
        app.calls.append(("flaky", n))
        if app.calls.count(("flaky", n)) == 1:
            raise OSError
        return n * 10

    @app.workflow
    def order(flow: Flow, fails: bool) -> list[int]:
        found = [flow.action(flaky, n).compensate_with(lambda r: undo.message(r)).run() for n in (1, 2)]
        if fails:
            flow.run(refuse)
        return found

    good = app.run(order, False)
    assert good.result() == [10, 20]
    app.calls.clear()
    bad = app.run(order, True)
    assert (bad.status, bad.rollback) == ("failed", "done")
    assert [call for call in app.calls if call[0] == "undo"] == [("undo", 20), ("undo", 10)]
    assert bad.actions()[2].tries == 2
    assert [row[0] for row in app.sql("SELECT sent_at IS NOT NULL FROM {action_runs}")] == [1] * 5
    eventually(lambda: app.messages() == 0)


def test_a_worker_that_knows_only_steps_does_not_consume_the_workflows_queue(
    rabbit: Application, applications: Applications
) -> None:
    """DRIVE-6: RabbitmqBroker declares what it sends to, and a worker consumes what its broker declares; not so here."""
    app, flows, calls = rabbit, rabbit.queue + "flows", list[Any]()
    broker = RabbitmqBroker(
        url=applications._places.rabbitmq(), middleware=[known() for known in default_middleware], confirm_delivery=True
    )
    steps = Application("rabbitmq", broker, SagaMiddleware(app.store.database), queue=app.queue)
    applications._made.append(steps)
    dramatiq.set_broker(app.broker)
    steps.actor(lambda n: calls.append(n) or n + 1, actor_name="work")
    ours = app.actor(lambda n: n + 1, actor_name="work")

    @app.workflow(queue_name=flows)
    def counts(flow: Flow) -> int:
        return flow.run(ours, flow.run(ours, 0))

    handle = counts.send()
    worker = steps.start()
    app.start(queues={flows})
    assert app.ended(handle) == "completed"
    assert handle.result() == 2
    assert calls == [0, 1]
    assert flows not in worker.consumers


def test_a_step_that_is_cut_off_by_a_shutdown_goes_back_and_runs_again(rabbit: Application) -> None:
    """NATIVE-4: a copy is sent before the original is acknowledged."""
    app = rabbit

    @app.actor(notify_shutdown=True)
    def long() -> str:
        app.calls.append("long")
        if len(app.calls) == 1:
            spin()
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(long)

    handle = one.send()
    app.start(threads=1)
    eventually(lambda: app.calls)
    app.stop()
    assert handle.actions()[0].tries == 0
    app.start()
    assert app.ended(handle) == "completed"
    assert app.calls == ["long", "long"]
    assert handle.actions()[0].attempts == 2
