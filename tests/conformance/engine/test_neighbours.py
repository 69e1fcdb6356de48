"""Living beside the rest of Dramatiq: other middleware, other messages, other workers (NATIVE-5, DRIVE-3, DRIVE-6, C07, C62)."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, GroupCallbacks, Middleware, default_middleware
from dramatiq.rate_limits.backends import StubBackend as StubRateLimits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from dramatiq.results.errors import ResultMissing, ResultTimeout

from dramatiq_saga import Flow, SagaMiddleware, Settings, current_step, get_flow
from dramatiq_saga.brokers import SQLiteBroker
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def plus(*middleware: Middleware) -> list[Middleware]:
    return [known() for known in default_middleware] + [CurrentMessage(), *middleware]


# --- ordinary messages ------------------------------------------------------------------------------------------------


def count_queries(app: Application) -> list[str]:
    """Everything that is asked of the store from now on, except by a broker's own queue."""
    asked: list[str] = []
    for name in ("write", "read"):
        plain = getattr(app.store, name)

        def call(operation: Any, plain: Any = plain, name: str = name) -> Any:
            asked.append(name)
            return plain(operation)

        setattr(app.store, name, call)
    return asked


@pytest.mark.parametrize("kind", ["redis", "stub"])
def test_an_ordinary_message_costs_no_query(kind: str, applications: Applications) -> None:
    """NATIVE-5: sent, processed, retried, given up and skipped without a look at the store."""
    app = applications(kind)
    good, bad = app.step("good"), app.step("bad", raises=ValueError(), max_retries=1)
    late = app.step("late", max_age=1)
    app.start()
    app.store.prepare()
    asked = count_queries(app)
    late.send_with_options(delay=30)
    for n in range(5):
        good.send(n)
    bad.send()
    app.drain()
    assert sorted(app.calls) == sorted([("good", n) for n in range(5)] + [("bad",), ("bad",)])
    assert asked == []


def test_an_ordinary_message_of_an_actor_that_is_a_step_too_is_plain(app: Application) -> None:
    """NATIVE-5: the wrapper answers only for messages of ours; arguments, retries and current_step() are the message's."""

    @app.actor(max_retries=1)
    def both(value: str) -> str:
        app.calls.append((value, current_step() is not None))
        if value == "fails":
            raise ValueError
        return value

    @app.workflow
    def uses(flow: Flow) -> str:
        return flow.run(both, "step")

    app.start()
    both.send("message")
    both.send("fails")
    assert app.run(uses).result() == "step"
    app.drain()
    assert sorted(app.calls) == [("fails", False), ("fails", False), ("message", False), ("step", True)]


def test_an_actor_called_inside_a_body_is_a_plain_call(app: Application) -> None:
    """ARCHITECTURE "what bites": directly, recursively, and an actor that is a step of the same run."""

    @app.actor
    def helper(n: int) -> int:
        app.calls.append(n)
        step = current_step()
        assert step is not None
        assert step.sequence == 1
        return n if n == 0 else helper(n - 1)  # type: ignore[no-any-return]

    @app.actor
    def outer() -> int:
        return helper(2)  # type: ignore[no-any-return]

    @app.workflow
    def one(flow: Flow) -> int:
        return flow.run(outer)

    handle = app.run(one)
    assert handle.result() == 0
    assert app.calls == [2, 1, 0]
    assert [action.actor for action in handle.actions()] == ["outer"]


def test_two_actors_on_one_function_are_both_wrapped(app: Application) -> None:
    """What bites: a function that carries another actor's mark is claimed and fenced all the same."""

    @app.actor
    def first(n: int) -> int:
        return n + 1

    @functools.wraps(first.fn)
    def again(n: int) -> int:
        app.calls.append(app.sql("SELECT status FROM {action_runs} WHERE actor = 'second'"))
        return int(first.fn(n)) + 10

    second = app.actor(again, actor_name="second")

    @app.workflow
    def both(flow: Flow) -> list[int]:
        return [flow.run(first, 1), flow.run(second, 1)]

    assert app.run(both).result() == [2, 12]
    assert app.calls == [[("running",)]]


def test_messages_sent_by_a_body_are_sent(app: Application) -> None:
    """NATIVE-5: a step may send ordinary messages and start other runs."""
    other = app.step("other")

    @app.workflow
    def second(flow: Flow) -> None:
        flow.run(other, "run")

    @app.actor
    def sends() -> str:
        other.send("message")
        return str(second.send().id)

    @app.workflow
    def first(flow: Flow) -> str:
        return flow.run(sends)

    handle = app.run(first)
    assert app.ended(get_flow(handle.result())) == "completed"
    app.drain()
    assert sorted(app.calls) == [("other", "message"), ("other", "run")]


def test_pipelines_of_ordinary_actors_beside_a_saga_are_untouched(app: Application) -> None:
    """NATIVE-5: results flow on to the next message of a pipeline."""

    @app.actor
    def double(n: int) -> int:
        app.calls.append(n)
        return n * 2

    @app.workflow
    def one(flow: Flow) -> int:
        return flow.run(double, 100)

    app.start()
    dramatiq.pipeline([double.message(1), double.message(), double.message()]).run()
    assert app.run(one).result() == 200
    eventually(lambda: sorted(app.calls) == [1, 2, 4, 100])


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_groups_of_ordinary_actors_beside_a_saga_are_untouched(kind: str, applications: Applications) -> None:
    """NATIVE-5: completion callbacks and results of groups."""
    backend = StubBackend()
    app = applications(kind, middleware=plus(GroupCallbacks(StubRateLimits()), Results(backend=backend)))
    member = app.actor(lambda n: n + 1, actor_name="member", store_results=True)
    done = app.step("done")
    step = app.actor(lambda: "kept", actor_name="step")

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(step)

    app.start()
    group = dramatiq.group([member.message(n) for n in range(3)])
    group.add_completion_callback(done.message())
    group.run()
    assert app.run(one).result() == "kept"
    assert sorted(group.get_results(block=True, timeout=10_000)) == [1, 2, 3]
    eventually(lambda: app.calls == [("done",)])


# --- values and warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("results", [False, True], ids=["without Results", "with Results"])
@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_a_returned_value_is_not_reported_as_discarded(
    kind: str, results: bool, applications: Applications, caplog: pytest.LogCaptureFixture
) -> None:
    """NATIVE-5: it is recorded, so nothing was discarded."""
    app = applications(kind, middleware=plus(Results(backend=StubBackend())) if results else plus())
    value = app.actor(lambda: {"a": 1}, actor_name="value")

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(value)

    assert app.run(one).result() == {"a": 1}
    app.drain()
    assert [record.getMessage() for record in caplog.records if "discarded" in record.getMessage()] == []


class Messages(Middleware):
    """Keeps the messages that are enqueued."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
        self.seen.append(message)


@pytest.mark.parametrize("by", ["actor", "broker"])
@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_results_of_steps_are_stored_where_dramatiq_was_asked_to(kind: str, by: str, applications: Applications) -> None:
    """NATIVE-5: store_results on the actor, or on the Results middleware, keeps working."""
    backend, messages = StubBackend(), Messages()
    app = applications(kind, middleware=plus(messages, Results(backend=backend, store_results=by == "broker")))
    options = {"store_results": True} if by == "actor" else {}
    value = app.actor(lambda: {"a": 1}, actor_name="value", **options)

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(value)

    app.run(one)
    app.drain()
    message = next(message for message in messages.seen if message.actor_name == "value")
    assert backend.get_result(message) == {"a": 1}


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_a_skipped_duplicate_does_not_overwrite_a_stored_result(kind: str, applications: Applications) -> None:
    """NATIVE-5: the same message delivered again loses its claim, and stores nothing."""
    backend, messages = StubBackend(), Messages()
    app = applications(kind, middleware=plus(messages, Results(backend=backend)))
    value = app.actor(lambda: "first", actor_name="value", store_results=True)

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(value)

    app.run(one)
    app.drain()
    message = next(message for message in messages.seen if message.actor_name == "value")
    app.broker.enqueue(message.copy())
    app.drain()
    assert backend.get_result(message) == "first"


@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_step_that_is_skipped_stores_no_result(kind: str, applications: Applications) -> None:
    """NATIVE-5, NATIVE-3: Dramatiq would store None for a skipped message."""
    from tests.conformance.engine.test_native import Skips

    backend, messages = StubBackend(), Messages()
    app = applications(kind, middleware=plus(messages, Results(backend=backend), Skips("value")))
    value = app.actor(lambda: "x", actor_name="value", store_results=True)

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(value)

    assert app.run(one).status == "failed"
    app.drain()
    message = next(message for message in messages.seen if message.actor_name == "value")
    with pytest.raises((ResultMissing, ResultTimeout)):
        backend.get_result(message)


class Noting(StubBackend):
    """Notes what is stored in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[Any] = []

    def store_result(self, message: Any, result: Any, ttl: int) -> None:
        self.stored.append(result)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_step_that_is_given_back_stores_no_result_before_it_has_one(kind: str, applications: Applications) -> None:
    """NATIVE-4, NATIVE-5: a shutdown cuts its body off; whoever waits for its result is not told None."""
    from tests.conformance.engine.test_interrupts import spin

    backend = Noting()
    app = applications(kind, middleware=plus(Results(backend=backend)))

    @app.actor(notify_shutdown=True, store_results=True)
    def value() -> str:
        app.calls.append("value")
        if len(app.calls) == 1:
            spin()
        return "the value"

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(value)

    handle = one.send()
    app.start(threads=1)
    eventually(lambda: app.calls)
    app.stop()
    app.start()
    assert app.ended(handle) == "completed"
    app.drain()
    assert app.types(handle).count("action.released") == 1
    assert backend.stored == ["the value"]


def test_the_current_message_is_cleared_after_a_skip(app: Application) -> None:
    """NATIVE-5: Dramatiq leaves a skipped message in place; the next piece of code must not see it."""
    seen: list[Any] = []

    class Looks(Middleware):
        def before_ack(self, broker: Any, message: Any) -> None:
            if message.actor_name == "skipped":
                seen.append(CurrentMessage.get_current_message())

    from tests.conformance.engine.test_native import Skips

    app.broker.middleware.append(Skips("skipped"))
    app.broker.middleware.append(Looks())
    skipped = app.step("skipped")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(skipped)

    app.start(threads=1)
    app.run(one)
    app.drain()
    assert seen == [None]


def test_the_current_message_of_a_step_is_its_message(app: Application) -> None:
    """NATIVE-5: CurrentMessage works inside a step, and carries ids only (C49)."""

    @app.actor
    def looks(big: str) -> list[Any]:
        message = CurrentMessage.get_current_message()
        assert message is not None
        return [message.actor_name, len(message.encode()) < 600]

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(looks, "x" * 100_000)

    assert app.run(one).result() == ["looks", True]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_an_async_actor_is_a_step_like_any_other(kind: str, applications: Applications) -> None:
    """What bites: Dramatiq wraps coroutine functions; the step is known inside the coroutine too."""
    app = applications(kind, middleware=plus(AsyncIO()))

    @app.actor
    async def sleeps(n: int) -> list[Any]:
        await asyncio.sleep(0)
        step = current_step()
        assert step is not None
        return [n + 1, step.sequence]

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(sleeps, 1)

    assert app.run(one).result() == [2, 1]


# --- a broker that fails -----------------------------------------------------------------------------------------------


class Failing(StubBroker):
    """Refuses to enqueue messages of chosen actors, as often as it is told."""

    refuse: dict[str, int]
    refused: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse, self.refused = {}, []

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        if self.refuse.get(message.actor_name, 0) > 0:
            self.refuse[message.actor_name] -= 1
            self.refused.append(message.actor_name)
            raise RuntimeError("the broker is down")
        return super().enqueue(message, delay=delay)


def test_a_next_step_that_could_not_be_sent_is_sent_until_it_is(applications: Applications, journal: list[Any]) -> None:
    """C07, DRIVE-2, DRIVE-3: A's outcome stands, B's dispatch is a stored fact, A's acknowledgement waits; B runs once."""
    app = applications("stub", broker=Failing)
    assert isinstance(app.broker, Failing)
    a, b = app.step("a", gives=1), app.step("b", gives=2)
    unsent: list[Any] = []

    @app.workflow
    def two(flow: Flow) -> int:
        return flow.run(a) + flow.run(b)

    class Watch(Middleware):
        def before_ack(self, broker: Any, message: Any) -> None:
            if message.actor_name == "a":
                unsent.append(app.sql("SELECT sent_at IS NULL FROM {action_runs} WHERE actor = 'b'"))

    app.broker.middleware.append(Watch())
    app.broker.refuse["b"] = 3
    handle = app.run(two)
    app.drain()
    assert app.broker.refused == ["b"] * 3
    assert handle.result() == 3
    assert app.calls == [("a",), ("b",)]
    assert [bool(row[0]) for rows in unsent for row in rows] == [False]
    assert handle.actions()[0].tries == 0
    assert [line for line in journal if line["event"] in ("outcome_rejected", "claim_not_committed")] == []


def test_a_first_message_that_could_not_be_sent_takes_its_run_back(applications: Applications) -> None:
    """C07, DRIVE-3: the caller gets the broker's error; neither run nor tags nor history are left, and the id is free."""
    app = applications("stub", broker=Failing)
    assert isinstance(app.broker, Failing)

    @app.workflow
    def one(flow: Flow) -> int:
        return 1

    app.broker.refuse["one"] = 1
    with pytest.raises(RuntimeError, match="broker is down"):
        one.send_with_options(run_id="order-1", tags={"x": 1})
    for table in ("flow_runs", "flow_events", "tags"):
        assert app.sql(f"SELECT COUNT(*) FROM {{{table}}}") == [(0,)]
    handle = one.send_with_options(run_id="order-1")
    app.start()
    assert app.ended(handle) == "completed"


@pytest.mark.parametrize("meanwhile", ["another start", "another start that fails", "a signal"])
def test_a_start_that_meets_another_start_keeps_the_run(
    applications: Applications, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """DRIVE-3, SIG-1: what somebody else relies on by now is not taken back, and the other start has sent its own message."""
    app = applications("stub", broker=Failing)
    assert isinstance(app.broker, Failing)
    broker, plain = app.broker, app.broker.enqueue

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.await_signal("go")

    def met(message: Any, *, delay: int | None = None) -> Any:
        monkeypatch.setattr(broker, "enqueue", plain)
        if meanwhile == "a signal":
            get_flow("order-1", broker=broker).signal("go", 1)
        elif meanwhile == "another start":
            one.send_with_options(run_id="order-1").signal("go", 1)
        else:
            broker.refuse["one"] = 1
            with pytest.raises(RuntimeError, match="broker is down"):
                one.send_with_options(run_id="order-1")
        raise RuntimeError("the broker is down")

    monkeypatch.setattr(broker, "enqueue", met)
    with pytest.raises(RuntimeError, match="broker is down"):
        one.send_with_options(run_id="order-1")
    if meanwhile != "another start":
        assert app.sql("SELECT id, status FROM {flow_runs}") == [("order-1", "pending")]
        one.send_with_options(run_id="order-1").signal("go", 1, key="late")
    app.start()
    assert app.ended(get_flow("order-1", broker=broker)) == "completed"


def test_a_retry_that_dramatiq_could_not_send_is_sent_by_us(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C07: Dramatiq swallows the error and acknowledges; the step's next try exists all the same, and is no extra one."""
    monkeypatch.setattr("dramatiq_saga.middleware.RETRY_AGAIN_MS", 10)
    app = applications("stub", broker=Failing)
    assert isinstance(app.broker, Failing)
    broker = app.broker

    @app.actor(max_retries=2)
    def flaky() -> str:
        app.calls.append("flaky")
        if len(app.calls) == 1:
            broker.refuse["flaky"] = 3
            raise ValueError
        return "done"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(flaky)

    handle = app.run(one)
    app.drain()
    assert handle.result() == "done"
    assert app.calls == ["flaky"] * 2
    assert broker.refused == ["flaky"] * 3
    assert (handle.actions()[0].tries, handle.actions()[0].attempts) == (1, 2)


def test_a_next_compensation_that_could_not_be_sent_is_sent_until_it_is(applications: Applications) -> None:
    """C07, C28: the level that is next is a stored fact; nothing is undone twice and nothing stays undone."""
    app = applications("stub", broker=Failing)
    assert isinstance(app.broker, Failing)
    a, undo_a, undo_b = app.step("a"), app.step("undo_a"), app.step("undo_b")
    refuse = app.step("refuse", raises=ValueError())

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(a, 1).compensate_with(undo_a).run()
        flow.action(a, 2).compensate_with(undo_b).run()
        flow.run(refuse)

    app.broker.refuse.update(undo_a=2, undo_b=2)
    handle = app.run(two)
    app.drain()
    assert app.broker.refused == ["undo_b", "undo_b", "undo_a", "undo_a"]
    assert app.calls[-2:] == [("undo_b",), ("undo_a",)]
    assert (handle.status, handle.rollback) == ("failed", "done")


def test_a_message_that_could_not_be_put_back_is_put_back_until_it_is(applications: Applications) -> None:
    """NATIVE-4, C07: a shutdown meets a broker that is down; the released step's message is not lost."""
    from tests.conformance.engine.test_interrupts import spin

    app = applications("stub", broker=Failing)
    assert isinstance(app.broker, Failing)
    broker = app.broker

    @app.actor(notify_shutdown=True)
    def long() -> None:
        app.calls.append("long")
        broker.refuse["long"] = 1
        spin()

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(long)

    handle = one.send()
    app.start(threads=1)
    eventually(lambda: app.calls)
    dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS, before = 0.02, dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS
    try:
        app.stop()
    finally:
        dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS = before
    assert broker.refused == ["long"]
    assert handle.actions()[0].status == "pending"
    assert app.messages() >= 1


# --- workers that know a part ------------------------------------------------------------------------------------------


def partial_application(app: Application, applications: Applications) -> Application:
    """Another process's view of the same application: same store, same broker, its own declarations."""
    from dramatiq.brokers.redis import RedisBroker

    from dramatiq_saga.brokers import DatabaseBroker

    middleware = [known() for known in default_middleware]
    if app.kind == "redis":
        broker: Any = RedisBroker(
            url=app.broker.client.connection_pool.connection_kwargs and applications._redis[-1], middleware=middleware
        )
        ours = SagaMiddleware(app.middleware._database, settings=app.middleware.settings)
    else:
        kind = SQLiteBroker if app.kind == "sqlite" else DatabaseBroker
        broker = kind(app.store.database.database if app.kind == "sqlite" else applications._places.server("postgresql")[0],
                      middleware=middleware, prefix=app.store.prefix)  # fmt: skip
        ours = SagaMiddleware(settings=app.middleware.settings)
    other = Application(app.kind, broker, ours, queue=app.queue)
    applications._made.append(other)
    dramatiq.set_broker(app.broker)
    return other


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_worker_that_knows_only_steps_leaves_the_workflow_to_others(kind: str, applications: Applications) -> None:
    """DRIVE-6, DRIVE-2: it records outcomes, sends drive messages to the workflow's queue, and does not consume that queue."""
    app = applications(kind)
    steps = partial_application(app, applications)
    calls: list[Any] = []
    flows = app.queue + "flows"

    def work(n: int) -> int:
        calls.append((n, threading.current_thread()))
        return n + 1

    theirs = steps.actor(work, actor_name="work")
    ours = app.actor(work, actor_name="work")
    assert theirs.queue_name == ours.queue_name

    @app.workflow(queue_name=flows)
    def counts(flow: Flow) -> int:
        return flow.run(ours, flow.run(ours, 0))

    handle = counts.send()
    worker = steps.start()
    app.start(queues={flows})
    assert app.ended(handle) == "completed"
    assert handle.result() == 2
    assert [n for n, _ in calls] == [0, 1]
    assert flows not in worker.consumers
    assert all(thread in worker.workers for _, thread in calls)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_rollback_needs_no_worker_that_knows_the_workflow(kind: str, applications: Applications) -> None:
    """COMP-1, idea 4: the plan is rows; workers that know the compensations alone finish it."""
    app = applications(kind)
    steps = partial_application(app, applications)
    undo, step = app.step("undo", queue_name=app.queue + "u"), app.step("step")
    refuse = app.step("refuse", raises=ValueError())
    done: list[Any] = []
    steps.actor(lambda n: done.append(n), actor_name="undo", queue_name=app.queue + "u")

    @app.workflow
    def three(flow: Flow) -> None:
        for n in range(3):
            flow.action(step, n).compensate_with(undo, n).run()
        flow.run(refuse)

    handle = three.send()
    app.start(queues={app.queue})
    eventually(lambda: handle.status == "rolling_back")
    app.stop()
    steps.start(queues={app.queue + "u"})
    assert app.ended(handle) == "failed"
    assert done == [2, 1, 0]
    assert handle.rollback == "done"


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_database_broker_on_another_database_than_the_store_is_one_of_another_kind(
    kind: str, applications: Applications, tmp_path: Any
) -> None:
    """DRIVE-3: rows here, messages there; retries are counted once although that broker stores them with the acknowledgement."""
    app = applications("sqlite")
    other = SQLiteBroker(tmp_path / "queue.db", middleware=[known() for known in default_middleware])
    apart = Application("apart", other, SagaMiddleware(app.store.database, settings=Settings()), queue=app.queue)
    applications._made.append(apart)
    a, flaky = apart.step("a", gives=1), None
    assert flaky is None

    @apart.actor(max_retries=2)
    def tries() -> str:
        apart.calls.append("tries")
        if apart.calls.count("tries") < 3:
            raise ValueError
        return "third"

    @apart.workflow
    def two(flow: Flow) -> list[Any]:
        return [flow.run(a), flow.run(tries)]

    apart.start()
    handle = two.send()
    assert apart.ended(handle) == "completed"
    assert handle.result() == [1, "third"]
    assert apart.calls == [("a",), "tries", "tries", "tries"]
    assert (handle.actions()[1].tries, handle.actions()[1].attempts) == (2, 3)
    assert [row[0] for row in app.sql("SELECT sent_at IS NOT NULL FROM {action_runs}")] == [1, 1]
