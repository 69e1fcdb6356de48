"""Runs started, ended and run to their end by a host: inside its transactions, in its process, with brokers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.middleware import Retries

from dramatiq_saga import Flow, FlowFailedError, SagaError, SagaMiddleware, current_step, events, get_flow, query, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.errors import MiddlewareOrderError, WouldBlockError
from tests.support.application import Application
from tests.support.deploying import deploy
from tests.support.waiting import eventually

# --- HOST-1 ----------------------------------------------------------------------------------------------------------


class Rolled(Exception):
    """Ends a host's transaction."""


@contextmanager
def hosting(app: Application) -> Iterator[None]:
    """A host's transaction, on a connection that it closes afterwards."""
    with app.store.database.connection_context(), app.store.database.atomic():
        yield


def greeting(app: Application) -> Any:
    step = app.step("step", gives="done")

    @app.workflow
    def greet(flow: Flow, name: str) -> str:
        return str(flow.run(step, name))

    return greet


def count(app: Application, run_id: str) -> int:
    return int(app.sql("SELECT COUNT(*) FROM {flow_runs} WHERE id = ?", run_id)[0][0])


def test_a_run_started_in_a_transaction_begins_with_its_commit_and_not_before(app: Application) -> None:
    """C08, HOST-1: workers are running; no message is out before the commit, and none is lost with it."""
    greet = greeting(app)
    app.start()
    with hosting(app):
        handle = greet.send("ann")
        assert handle.status == "pending"  # the host sees its own
        assert app.calls == []
        if not app.joined:
            assert app.messages() == 0
    assert app.ended(handle) == "completed"
    assert app.calls == [("step", "ann")]


def test_a_run_started_in_a_transaction_vanishes_with_it(app: Application) -> None:
    """C08, HOST-1: neither row nor message nor event; a later run is none the worse."""
    greet = greeting(app)
    with events.listening(events.FlowStarted) as heard:
        with suppress(Rolled), hosting(app):
            handle = greet.send("bob")
            raise Rolled
        assert count(app, handle.id) == 0
        assert app.messages() == 0
        assert heard == []
        later = app.run(greet, "cid")
        assert [event.run_id for event in heard] == [later.id]
    app.drain()
    assert app.calls == [("step", "cid")]
    assert app.sql("SELECT DISTINCT run_id FROM {flow_events}") == [(later.id,)]


def test_a_savepoint_takes_its_runs_with_it_and_leaves_the_others(app: Application) -> None:
    """C08, HOST-1: two savepoints deep; the inner is rolled back, the outer is kept, and both wait for the outermost commit."""
    greet = greeting(app)
    database = app.store.database
    with hosting(app):
        outer = greet.send("outer")
        with suppress(Rolled), database.atomic():
            lost = greet.send("lost")
            with database.atomic():
                deeper = greet.send("deeper")
            raise Rolled
        with database.atomic(), database.atomic():
            inner = greet.send("inner")
        if not app.joined:
            assert app.messages() == 0
    assert app.messages() == 2
    assert [count(app, handle.id) for handle in (outer, lost, deeper, inner)] == [1, 0, 0, 1]
    app.start()
    assert [app.ended(handle) for handle in (outer, inner)] == ["completed"] * 2
    app.drain()
    assert sorted(app.calls) == [("step", "inner"), ("step", "outer")]


def test_a_cancel_and_a_tag_belong_to_the_hosts_transaction(joined: Application) -> None:
    """HOST-1: both vanish with it, or stand with it."""
    handle = greeting(joined).send("dan")
    with suppress(Rolled), hosting(joined):
        assert handle.cancel() is True
        handle.tag("why", "no stock")
        raise Rolled
    assert (handle.status, handle.tags) == ("pending", {})
    with hosting(joined):
        assert handle.cancel() is True
        handle.tag("why", "no stock")
    assert (handle.status, handle.tags) == ("cancelled", {"why": "no stock"})
    assert joined.types(handle) == ["flow.started", "flow.cancelled"]


@pytest.mark.parametrize("what", ["run_sync", "compensate"])
def test_what_cannot_be_part_of_a_transaction_is_refused_in_it(joined: Application, what: str) -> None:
    """HOST-1, SYNC-1: with words about when to call it; nothing is written, and the host's transaction goes on."""
    greet = greeting(joined)
    handle = greet.send("eve")
    with hosting(joined):
        other = greet.send("fay")
        with pytest.raises(SagaError, match=r"inside an open transaction of the store's database.*call it before or after"):
            greet.run_sync("gus") if what == "run_sync" else handle.compensate()
    assert handle.status == "pending"
    assert count(joined, other.id) == 1
    assert {found.id for found in query(workflow="greet")} == {handle.id, other.id}
    assert joined.calls == []


@pytest.mark.parametrize("how", ["atomic", "by hand"])
def test_a_step_that_leaves_its_transaction_open_fails_and_takes_nothing_of_ours_with_it(joined: Application, how: str) -> None:
    """C59, HOST-1: what the body wrote is rolled back, the failure is recorded with that cause, the thread goes on working."""
    app = joined
    step = app.step("step", gives="fine")

    @app.actor
    def careless() -> None:
        if how == "atomic":
            app.store.database.atomic().__enter__()
        else:
            app.store.database.execute_sql("BEGIN")
        app.store.database.execute_sql(f"DELETE FROM {app.store.prefix}tags")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(step)
        flow.run(careless)

    @app.workflow
    def tidy(flow: Flow) -> str:
        return str(flow.run(step))

    app.start(threads=1)
    handle = order.send_with_options(tags={"kept": "yes"})
    assert app.ended(handle) == "failed"
    assert handle.tags == {"kept": "yes"}
    error = handle.actions()[1].error
    assert error is not None
    assert error["type"].endswith("StepLeftTransactionError")
    assert "careless returned with a transaction" in error["message"]
    assert app.run(tidy).result() == "fine"


# --- SYNC-1 ----------------------------------------------------------------------------------------------------------


def rows(app: Application, handle: Any) -> dict[str, Any]:
    """All that a run has left behind, but for ids, times and who did it."""
    own = {"id", "run_id", "at", "worker_id", "delivery", "undoes_key", "priority", "next_try_at"}

    def plain(table: str, key: str, order: str) -> list[dict[str, Any]]:
        with app.store.database.connection_context():
            cursor = app.store.database.execute_sql(
                f"SELECT * FROM {app.store.prefix}{table} WHERE {key} = '{handle.id}' ORDER BY {order}"
            )
            names = [column[0] for column in cursor.description]
            found = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        return [
            {name: value for name, value in row.items() if name not in own and not name.endswith(("_at", "error", "detail"))}
            for row in found
        ]

    return {
        "run": plain("flow_runs", "id", "id"),
        "steps": plain("action_runs", "run_id", "sequence"),
        "undos": plain("compensation_runs", "run_id", "level"),
        "side effects": plain("side_effects", "run_id", "sequence"),
        "tags": plain("tags", "run_id", "name"),
        "history": plain("flow_events", "run_id", "id"),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_in_the_calling_process_leaves_the_same_rows_as_a_queued_one(lite: Application, fails: bool) -> None:
    """SYNC-1: steps, tries, undos, side effects, tags and history; and the same error to its caller."""
    step, undo = lite.step("step", gives={"id": 7}), lite.step("undo")
    tries: list[int] = []

    @lite.actor(max_retries=3)
    def flaky() -> str:
        tries.append(1)
        if len(tries) % 2:
            raise OSError("busy")
        return "at last"

    refuse = lite.step("refuse", raises=ValueError("no such address"))

    @lite.workflow
    def order(flow: Flow) -> Any:
        made = flow.action(step).compensate_with(lambda made: undo.message(made["id"])).run()
        flow.tag("dice", flow.side_effect("dice", lambda: 4))
        answer = flow.run(flaky)
        if fails:
            flow.run(refuse)
        return [made, answer]

    queued = lite.run(order)
    lite.drain()
    lite.stop()
    here = order.run_sync()
    assert rows(lite, here) == rows(lite, queued)
    assert here.status == queued.status == ("failed" if fails else "completed")
    if fails:
        told = []
        for handle in (here, queued):
            with pytest.raises(FlowFailedError) as caught:
                handle.result()
            assert caught.value.cause is not None
            told.append((str(caught.value).replace(handle.id, "ID"), caught.value.cause["cause"]["type"]))
        assert told[0] == told[1]
    else:
        assert here.result() == queued.result() == [{"id": 7}, "at last"]
    assert lite.messages() == 0


def test_a_run_that_nothing_here_can_end_does_not_hang_its_caller(lite: Application) -> None:
    """SYNC-1, HISTORY-1: WouldBlockError names the run and what it waits for; the run is there, and goes on once it can."""
    step, undo = lite.step("step"), lite.step("undo")

    @lite.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda made: made["id"]).run()

    with pytest.raises(WouldBlockError, match="could not be built") as caught:
        order.run_sync()
    handle = get_flow(caught.value.run_id)
    assert handle.status == "waiting"

    def mended(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda made: undo.message(made)).run()

    deploy(lite.engine, "order", mended)
    handle.kick()
    lite.start()
    assert lite.ended(handle) == "completed"
    assert lite.calls == [("step",)]


def test_a_run_that_its_caller_interrupts_can_be_picked_up_by_workers(lite: Application) -> None:
    """SYNC-1, NATIVE-4: Ctrl-C reaches the caller, the step is given back with no try spent, nothing is lost."""

    @lite.actor
    def slow() -> str:
        lite.calls.append("slow")
        if len(lite.calls) == 1:
            raise KeyboardInterrupt
        return "done"

    @lite.workflow
    def order(flow: Flow) -> str:
        return str(flow.run(slow))

    with pytest.raises(KeyboardInterrupt):
        order.run_sync()
    handle = query(workflow=order).first()
    assert handle is not None
    [action] = handle.actions()
    assert (action.status, action.tries, action.claims) == ("pending", 0, 0)
    handle.kick()
    lite.start()
    assert lite.ended(handle) == "completed"
    assert handle.result() == "done"


@pytest.mark.parametrize("outer_sync", [False, True])
def test_a_step_may_run_another_workflow_to_its_end(lite: Application, outer_sync: bool) -> None:
    """SYNC-1: inside an actor's body; current_step() is the outer step again afterwards."""
    told: list[Any] = []

    @lite.actor
    def leaf() -> str:
        step = current_step()
        assert step is not None
        told.append(step.workflow_name)
        return "leaf"

    @lite.workflow
    def inner(flow: Flow) -> str:
        return str(flow.run(leaf))

    @lite.actor
    def outer_step() -> str:
        before = current_step()
        value: str = inner.run_sync().result()
        assert current_step() is before
        assert before is not None
        told.append(before.workflow_name)
        return value

    @lite.workflow
    def outer(flow: Flow) -> str:
        return str(flow.run(outer_step))

    handle = outer.run_sync() if outer_sync else lite.run(outer)
    assert handle.result() == "leaf"
    assert told == ["inner", "outer"]
    assert current_step() is None


# --- C62: producers and brokers --------------------------------------------------------------------------------------


@pytest.fixture
def make_broker(tmp_path: Any) -> Iterator[Any]:
    made: list[SQLiteBroker] = []

    def make(*, saga: bool = True) -> SQLiteBroker:
        broker = SQLiteBroker(tmp_path / f"shop-{len(made)}.db")
        made.append(broker)
        if saga:
            broker.add_middleware(SagaMiddleware())
        return broker

    yield make
    for broker in made:
        broker.close()


def test_a_process_that_never_boots_a_worker_can_do_everything_but_work(python_process: Any, sqlite_path: Any) -> None:
    """C62: a plain script declares, sends, tags, looks, cancels and runs here; its runs are there for workers."""
    script = f"""
import dramatiq
from dramatiq_saga import SagaMiddleware, get_flow, query, workflow
from dramatiq_saga.brokers import SQLiteBroker

@dramatiq.actor(broker=(broker := SQLiteBroker({str(sqlite_path)!r})), max_retries=0)
def early(n):
    return n + 1  # declared before the middleware is added

broker.add_middleware(SagaMiddleware())
dramatiq.set_broker(broker)

@workflow
def shop(flow, n):
    return flow.run(early, n)

kept, ended = shop.send(1), shop.send(2)
kept.tag("who", 5)
assert ended.cancel("not wanted")
assert [found.id for found in query(tags={{"who": 5}})] == [kept.id]
assert get_flow(ended.id).status == "cancelled"
assert shop.run_sync(3).result() == 4
print("sent", kept.id)
"""
    process = python_process("-c", script)
    assert process.wait() == 0, process.output()
    run_id = process.output().split("sent ")[1].split()[0]
    broker = SQLiteBroker(sqlite_path)
    broker.add_middleware(SagaMiddleware())

    @dramatiq.actor(broker=broker, max_retries=0)
    def early(n: int) -> int:
        return n + 1

    @workflow(broker=broker)
    def shop(flow: Flow, n: int) -> int:
        return flow.run(early, n)

    worker = Worker(broker, worker_threads=1, worker_timeout=20)
    worker.start()
    try:
        assert get_flow(run_id, broker=broker).result(wait=20) == 2
    finally:
        worker.stop()
        broker.close()


def test_two_brokers_in_one_process_keep_their_runs_apart(make_broker: Any) -> None:
    """C62: each with its own middleware and file."""
    handles = []
    for number in (1, 2):
        broker = make_broker()

        def body(mine: int = number) -> int:
            return mine

        step = dramatiq.actor(body, actor_name="step", broker=broker, max_retries=0)

        def shop(flow: Flow, step: Any = step) -> int:
            return int(flow.run(step))

        handles.append((broker, workflow(name="shop", broker=broker)(shop).run_sync()))
    for number, (broker, handle) in enumerate(handles, 1):
        assert handle.result() == number
        assert [found.id for found in query(broker=broker)] == [handle.id]


def test_one_middleware_on_two_brokers_is_refused(make_broker: Any) -> None:
    """C62: at the second broker's first use, saying what to do."""
    middleware = SagaMiddleware()
    first, second = make_broker(saga=False), make_broker(saga=False)
    for broker in (first, second):
        broker.add_middleware(middleware)
    workflow(name="shop", broker=first)(lambda flow: None)
    with pytest.raises(MiddlewareOrderError, match="cannot serve two brokers: make one for each"):
        workflow(name="shop", broker=second)(lambda flow: None)


def test_a_workflow_declared_without_the_middleware_is_refused_there(make_broker: Any) -> None:
    """C62: also where two are added; the error names the broker and the line that mends it, and declares nothing."""
    broker = make_broker(saga=False)
    with pytest.raises(
        MiddlewareOrderError, match=r"SQLiteBroker has no SagaMiddleware: call broker\.add_middleware\(SagaMiddleware"
    ):
        workflow(name="shop", broker=broker)(lambda flow: None)
    assert "shop" not in broker.actors
    broker.add_middleware(SagaMiddleware())
    broker.add_middleware(SagaMiddleware())
    with pytest.raises(MiddlewareOrderError, match="has 2 SagaMiddlewares: add exactly one"):
        workflow(name="shop", broker=broker)(lambda flow: None)
    with pytest.raises(MiddlewareOrderError, match="has 2 SagaMiddlewares: add exactly one"):
        get_flow("x", broker=broker)
    assert "shop" not in broker.actors


def test_a_worker_with_the_middleware_in_the_wrong_place_does_not_start(tmp_path: Any) -> None:
    """C62: before Retries, Dramatiq would act on a result that is not recorded yet; the error names both and the mending line."""
    broker = SQLiteBroker(tmp_path / "shop.db", middleware=[])
    broker.add_middleware(SagaMiddleware())
    broker.add_middleware(Retries())
    worker = Worker(broker, worker_threads=1)
    try:
        with pytest.raises(MiddlewareOrderError, match=r"stands before Retries, .*add it last, or with .*after=Retries\)"):
            worker.start()
    finally:
        broker.close()


def test_an_actor_declared_before_the_middleware_is_a_step_like_any_other(make_broker: Any) -> None:
    """C62: options of steps do not depend on the order of imports."""
    broker = make_broker(saga=False)
    seen: list[Any] = []

    @dramatiq.actor(broker=broker, max_retries=0)
    def early() -> None:
        seen.append(current_step())

    broker.add_middleware(SagaMiddleware())
    shop = workflow(name="shop", broker=broker)(lambda flow: flow.action(early).with_options(max_retries=0).max_claims(1).run())
    handle = shop.send()
    worker = Worker(broker, worker_threads=1, worker_timeout=20)
    worker.start()
    try:
        eventually(lambda: handle.status == "completed")
    finally:
        worker.stop()
    assert [step.run_id for step in seen] == [handle.id]
