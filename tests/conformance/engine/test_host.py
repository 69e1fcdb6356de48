"""HOST-1, C08, C59: calls inside the host's own transaction, and transactions that bodies leave behind."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import peewee
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import default_middleware

from dramatiq_saga import Flow, SagaMiddleware, Settings, StepFailedError, get_flow
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.errors import SagaError, WouldBlockError
from tests.support import servers
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


class Host:
    """An application whose business rows live on the very ``Database`` object that the store uses."""

    def __init__(self, kind: str, applications: Applications, tmp_path: Any) -> None:
        self.kind = kind
        middleware = [known() for known in default_middleware]
        if kind in ("sqlite", "stub"):
            path = applications._places.sqlite(tmp_path / "host.db")
            self.db: Any = peewee.SqliteDatabase(str(path))
            prefix = "saga_"
        else:
            server = "mariadb" if kind == "mariadb" else "postgresql"
            url, prefix = applications._places.server(server)
            from playhouse.db_url import connect

            self.db = connect(url)
        settings = Settings.from_mapping({"schema": {"table_prefix": prefix}})
        if kind in ("stub", "redis"):
            if kind == "redis":
                applications._redis.append(servers.claim_redis())
            broker: Any = (
                StubBroker(middleware=middleware)
                if kind == "stub"
                else RedisBroker(url=applications._redis[-1], middleware=middleware)
            )
            ours = SagaMiddleware(self.db, settings=settings)
        else:
            broker = (SQLiteBroker if kind == "sqlite" else DatabaseBroker)(self.db, prefix=prefix, middleware=middleware)
            ours = SagaMiddleware(settings=settings)
        self.app = Application(kind, broker, ours, queue=servers.random_name())
        applications._made.append(self.app)
        self.table = servers.random_name()
        self.db.connect(reuse_if_open=True)
        self.db.execute_sql(f"CREATE TABLE {self.table} (id INTEGER PRIMARY KEY)")

    def insert(self, number: int) -> None:
        self.db.execute_sql(f"INSERT INTO {self.table} VALUES ({number})")

    def rows(self) -> list[int]:
        return [row[0] for row in self.db.execute_sql(f"SELECT id FROM {self.table} ORDER BY id").fetchall()]

    def close(self) -> None:
        if not self.db.is_closed():
            self.db.execute_sql(f"DROP TABLE {self.table}")
            self.db.close()


@pytest.fixture(params=["sqlite", "postgresql", "redis", "stub", "mariadb"])
def host(request: pytest.FixtureRequest, applications: Applications, tmp_path: Any) -> Any:
    made = Host(request.param, applications, tmp_path)
    yield made
    made.app.stop()
    made.close()


def quick(app: Application) -> Any:
    step = app.step("step", gives=1)

    @app.workflow
    def one(flow: Flow, n: int = 0) -> int:
        return flow.run(step, n)

    return one


def elsewhere(app: Application, question: Any) -> Any:
    """What another connection sees."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(question()))
    thread.start()
    thread.join()
    return found[0]


def test_a_start_commits_with_its_host_and_nothing_is_sent_before(host: Host) -> None:
    """C08: a business row and a run in one transaction, with workers running; no worker sees an id that it cannot load."""
    app, one = host.app, quick(host.app)
    app.start()
    with host.db.atomic():
        host.insert(1)
        handle = one.send()
        assert handle.status == "pending"
        assert elsewhere(app, lambda: app.sql("SELECT COUNT(*) FROM {flow_runs}")) == [(0,)]
        if not app.joined:
            assert app.messages() == 0
        assert app.calls == []
    assert app.ended(handle) == "completed"
    assert host.rows() == [1]
    app.drain()
    assert app.calls == [("step", 0)]


def test_a_start_vanishes_with_its_host(host: Host) -> None:
    """C08: raised before the commit; neither run nor message nor history."""
    app, one = host.app, quick(host.app)
    app.start()

    def fails() -> None:
        with host.db.atomic():
            host.insert(1)
            one.send_with_options(tags={"a": 1})
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    app.drain()
    assert host.rows() == []
    for table in ("flow_runs", "flow_events", "tags"):
        assert app.sql(f"SELECT COUNT(*) FROM {{{table}}}") == [(0,)]
    assert app.messages() == 0
    assert app.calls == []


@pytest.mark.parametrize("host", ["postgresql", "redis"], indirect=True)
def test_a_start_whose_host_was_rolled_back_by_its_commit_sends_nothing(host: Host) -> None:
    """HOST-1: PostgreSQL answers COMMIT with a rollback, since a statement has failed, and no error; the run never was."""
    app, one = host.app, quick(host.app)
    kept = one.send_with_options(delay=3_600_000)
    before = app.messages()
    with host.db.atomic():
        host.insert(1)
        lost = one.send()
        assert kept.cancel() is True
        with suppress(peewee.PeeweeException):
            host.db.execute_sql("SELECT * FROM no_such_table_anywhere")
    assert host.rows() == []
    assert app.messages() == before
    assert app.sql("SELECT COUNT(*) FROM {flow_runs} WHERE id = ?", lost.id) == [(0,)]
    assert kept.status == "pending"


def test_a_start_two_savepoints_deep_waits_for_the_outermost_commit(host: Host) -> None:
    """C08: and one whose savepoint is rolled back vanishes alone."""
    app, one = host.app, quick(host.app)
    app.start()
    with host.db.atomic():
        with host.db.atomic():
            with host.db.atomic():
                kept = one.send(1)
            with host.db.atomic() as savepoint:
                lost = one.send(2)
                savepoint.rollback()
        assert app.calls == []
        if not app.joined:
            assert app.messages() == 0
    assert app.ended(kept) == "completed"
    app.drain()
    assert app.calls == [("step", 1)]
    assert app.sql("SELECT COUNT(*) FROM {flow_runs} WHERE id = ?", lost.id) == [(0,)]


def test_cancelling_and_tagging_join_the_host(host: Host) -> None:
    """HOST-1: they commit or vanish with it."""
    app, one = host.app, quick(host.app)
    handle = one.send_with_options(delay=3_600_000)

    def fails() -> None:
        with host.db.atomic():
            assert handle.cancel() is True
            handle.tag("why", "x")
            assert handle.status == "cancelled"
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (handle.status, handle.tags) == ("pending", {})
    with host.db.atomic():
        assert handle.cancel() is True
        handle.tag("why", "x")
        assert elsewhere(app, lambda: handle.status) == "pending"
    assert (handle.status, handle.tags) == ("cancelled", {"why": "x"})


def test_what_cannot_be_part_of_a_transaction_is_refused_in_one(host: Host) -> None:
    """HOST-1, SYNC-1: compensate() and run_sync(); the host's transaction is still usable."""
    one = quick(host.app)
    handle = one.send_with_options(delay=3_600_000)
    with host.db.atomic():
        host.insert(1)
        with pytest.raises(SagaError, match="call it before or after"):
            handle.compensate()
        with pytest.raises(SagaError, match="call it before or after"):
            one.run_sync()
        host.insert(2)
    assert host.rows() == [1, 2]
    assert handle.status == "pending"
    assert host.app.calls == []


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_transaction_that_a_body_leaves_open_takes_neither_the_engines_records_nor_itself_along(
    host: Host, ending: str
) -> None:
    """C59: it is rolled back, the step fails with a cause that says so, and the next step on that thread is not affected."""
    app = host.app

    @app.actor
    def leaves() -> str:
        host.db.connect(reuse_if_open=True)
        host.db.atomic().__enter__()
        host.insert(7)
        app.calls.append("left")
        if ending == "raises":
            raise ValueError("in the middle")
        return "done"

    @app.actor
    def clean() -> str:
        host.db.connect(reuse_if_open=True)
        app.calls.append(("in a transaction", host.db.in_transaction()))
        with host.db.atomic():
            host.insert(8)
        return "clean"

    @app.workflow
    def two(flow: Flow) -> Any:
        try:
            flow.run(leaves)
        except StepFailedError as error:
            return [error.error_type.rsplit(".", 1)[-1], (error.cause or {}).get("type"), flow.run(clean)]
        return None

    app.start(threads=1)
    handle = app.run(two)
    name, cause, value = handle.result()
    assert name == "StepLeftTransactionError"
    assert cause == ("builtins.ValueError" if ending == "raises" else None)
    assert value == "clean"
    assert app.calls == ["left", ("in a transaction", False)]
    assert host.rows() == [8]
    app.drain()
    assert app.messages() == 0


def test_a_body_may_use_the_same_database_object(host: Host) -> None:
    """C59: its own transactions commit and roll back by themselves; a run started in one is its."""
    app = host.app
    inner_step = app.step("inner_step")

    @app.workflow
    def inner(flow: Flow) -> None:
        flow.run(inner_step)

    @app.actor(max_retries=1)
    def uses() -> str:
        host.db.connect(reuse_if_open=True)
        app.calls.append("uses")
        with host.db.atomic():
            host.insert(app.calls.count("uses"))
            handle = inner.send()
            if app.calls.count("uses") == 1:
                raise ValueError("first time")
        return str(handle.id)

    @app.workflow
    def outer(flow: Flow) -> str:
        return flow.run(uses)

    handle = app.run(outer)
    assert app.ended(get_flow(handle.result())) == "completed"
    app.drain()
    assert host.rows() == [2]
    assert app.calls == ["uses", "uses", ("inner_step",)]
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(2,)]


def test_a_run_inside_the_body_of_a_step_goes_through(host: Host) -> None:
    """SYNC-1: run_sync() in an actor's body, outside of any transaction."""
    app, one = host.app, quick(host.app)

    @app.actor
    def runs() -> int:
        value: int = one.run_sync(5).result()
        return value + 1

    @app.workflow
    def outer(flow: Flow) -> int:
        return flow.run(runs)

    assert app.run(outer).result() == 2
    assert app.calls == [("step", 5)]


def test_a_server_connection_lost_by_the_host_is_not_the_engines(applications: Applications, tmp_path: Any) -> None:
    """C59: the host's own connection is killed between two steps; the engine's are others, and the run goes on."""
    host = Host("postgresql", applications, tmp_path)
    app = host.app
    pid = host.db.execute_sql("SELECT pg_backend_pid()").fetchone()[0]
    step = app.step("step", gives=1)

    @app.workflow
    def two(flow: Flow) -> int:
        return flow.run(step) + flow.run(step)

    handle = two.send()
    with servers.connect_postgresql() as connection:
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    app.start()
    assert app.ended(handle) == "completed"
    app.stop()
    host.db.close()
    host.db.connect()
    host.close()


def test_run_sync_would_block_is_told_in_words(host: Host) -> None:
    """SYNC-1: a held run is left in the database for others."""

    @host.app.workflow
    def forgets(flow: Flow) -> None:
        flow.action(host.app.step("forgotten"))

    with pytest.raises(WouldBlockError, match="BuilderNotRunError"):
        forgets.run_sync()
    eventually(lambda: host.app.sql("SELECT status FROM {flow_runs}") == [("waiting",)])
