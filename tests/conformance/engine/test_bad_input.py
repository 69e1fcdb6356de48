"""What users get wrong: each is a clear error that names the thing and the way out, and nothing is lost or half written."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    CurrentMessage,
    GroupCallbacks,
    Pipelines,
    Retries,
    ShutdownNotifications,
    TimeLimit,
    default_middleware,
)
from dramatiq.rate_limits.backends import StubBackend as StubRateLimits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from dramatiq_saga import Flow, FlowHandle, SagaMiddleware, Settings, get_flow, query, workflow
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.errors import (
    DatabaseUnusableError,
    MiddlewareOrderError,
    NotSerializableError,
    SagaError,
    SchemaVersionError,
    SettingsError,
)
from dramatiq_saga.operations import Operator
from dramatiq_saga.store.database import open_store
from tests.support.application import Application, Applications
from tests.support.processes import ROOT


def nothing(flow: Flow) -> None: ...


def counts(app: Application) -> list[int]:
    return [app.sql(f"SELECT COUNT(*) FROM {{{table}}}")[0][0] for table in ("flow_runs", "flow_events", "tags", "action_runs")]


# --- the middleware ----------------------------------------------------------------------------------------------------


def test_a_workflow_on_a_broker_without_the_middleware_is_refused_where_it_is_declared() -> None:
    """C62: the error says which call is missing."""
    broker = StubBroker()
    with pytest.raises(MiddlewareOrderError, match=r"add_middleware\(SagaMiddleware"):
        workflow(broker=broker)(nothing)
    assert "nothing" not in broker.actors


def test_a_workflow_declared_before_the_middleware_is_told_the_order(tmp_path: Path) -> None:
    """C62: declared first, added later: the error comes at the declaration, not at the first send."""
    broker = SQLiteBroker(tmp_path / "x.db")
    dramatiq.set_broker(broker)
    with pytest.raises(MiddlewareOrderError, match="before workflows are declared"):
        workflow(nothing)
    broker.add_middleware(SagaMiddleware())
    assert workflow(nothing).name == "nothing"


def test_actors_declared_before_the_middleware_are_steps_all_the_same(applications: Applications, tmp_path: Path) -> None:
    """C62: adding the middleware wraps what is there."""
    broker = SQLiteBroker(tmp_path / "x.db")
    early = dramatiq.actor(lambda: "early", broker=broker, actor_name="early", max_retries=0)
    app = Application("sqlite", broker, SagaMiddleware(), queue="default")
    applications._made.append(app)

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(early)

    assert app.run(one).result() == "early"


def test_two_middlewares_are_refused(tmp_path: Path) -> None:
    """C62: at the declaration, and at the worker's start."""
    broker = SQLiteBroker(tmp_path / "x.db")
    broker.add_middleware(SagaMiddleware())
    broker.add_middleware(SagaMiddleware())
    with pytest.raises(MiddlewareOrderError, match="2 SagaMiddlewares: add exactly one"):
        workflow(broker=broker)(nothing)
    with pytest.raises(MiddlewareOrderError, match="exactly one"):
        Worker(broker).start()


@pytest.mark.parametrize(
    "late",
    [
        AgeLimit(), TimeLimit(), ShutdownNotifications(), Callbacks(), Pipelines(), Retries(), CurrentMessage(),
        Results(backend=StubBackend()), GroupCallbacks(StubRateLimits()),
    ],
    ids=lambda known: type(known).__name__,
)  # fmt: skip
def test_a_middleware_in_the_wrong_place_is_refused_at_the_workers_start(tmp_path: Path, late: Any) -> None:
    """What bites: named, with the line that mends it; and that line does mend it."""
    broker = SQLiteBroker(tmp_path / "x.db", middleware=[known() for known in default_middleware if known is not type(late)])
    ours = SagaMiddleware()
    broker.add_middleware(ours)
    broker.add_middleware(late)
    with pytest.raises(MiddlewareOrderError) as caught:
        Worker(broker).start()
    message = str(caught.value)
    name = type(late).__name__
    assert f"stands before {name}" in message
    assert f"after={name})" in message
    broker.middleware.remove(ours)
    broker.add_middleware(ours, after=type(late))
    worker = Worker(broker, worker_threads=1, worker_timeout=10)
    worker.start()
    worker.stop()


def test_other_middleware_may_stand_behind(tmp_path: Path) -> None:
    """What bites: only those whose after hooks act on a result or a failure are refused."""
    broker = SQLiteBroker(tmp_path / "x.db")
    broker.add_middleware(SagaMiddleware())
    broker.add_middleware(dramatiq.middleware.Middleware())
    worker = Worker(broker, worker_threads=1, worker_timeout=10)
    worker.start()
    worker.stop()


def test_one_middleware_on_two_brokers_is_refused(tmp_path: Path) -> None:
    """C62: it holds one store and one sender."""
    ours = SagaMiddleware(str(tmp_path / "x.db"))
    first, second = StubBroker(), StubBroker()
    first.add_middleware(ours)
    second.add_middleware(ours)
    workflow(broker=first)(nothing)
    with pytest.raises(MiddlewareOrderError, match="make one for each"):
        workflow(broker=second)(nothing)
    with pytest.raises(MiddlewareOrderError, match="make one for each"):
        Worker(second).start()


def test_two_brokers_with_a_middleware_each_stay_apart(applications: Applications) -> None:
    """C62: runs, steps and queries of one are nothing to the other."""
    one, two = applications("sqlite"), applications("sqlite")
    for app in (one, two):
        app.workflow(name=f"w{len(app.broker.actors)}")(lambda flow: 1)
    first = one.broker.actors["w0"]
    assert first.broker is one.broker
    handle = one.workflow(name="here")(lambda flow: 1).send()
    with pytest.raises(SagaError):
        get_flow(handle.id, broker=two.broker)
    assert query(broker=two.broker).count() == 0
    assert query(broker=one.broker).count() == 1
    two.start()
    one.start()
    assert one.ended(handle) == "completed"


def test_a_middleware_without_a_database_needs_a_database_broker() -> None:
    """C62: the error names the broker, and what to write."""
    broker = StubBroker()
    broker.add_middleware(SagaMiddleware())
    with pytest.raises(MiddlewareOrderError, match=r'StubBroker has none: name one, for example SagaMiddleware\("postgresql'):
        workflow(broker=broker)(nothing)


def test_a_message_to_a_workflows_actor_is_refused(applications: Applications) -> None:
    """API workflow: its actor's own send starts nothing; calling it neither."""
    app = applications("sqlite")
    declared = app.workflow(nothing)
    with pytest.raises(SagaError, match=r"start a run with Workflow.send"):
        declared.actor.send()
    with pytest.raises(SagaError, match=r"start it with nothing.send"):
        declared()
    assert counts(app) == [0, 0, 0, 0]


def test_a_forged_message_to_a_workflow_runs_nothing(app: Application) -> None:
    """API workflow: a message that was not made here names what to do, and goes Dramatiq's way of failing."""
    declared = app.workflow(nothing)
    app.broker.enqueue(dramatiq.Message(app.queue, "nothing", (), {}, {"max_retries": 0}))
    app.start()
    app.drain()
    assert declared.name == "nothing"
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(0,)]


@pytest.mark.parametrize("option", ["text", 5, None, {}, {"kind": "novel"}])
def test_somebody_elses_option_of_our_name_is_theirs(applications: Applications, option: Any) -> None:
    """NATIVE-5: such a message is an ordinary one."""
    app = applications("sqlite")
    actor = app.step("actor")
    app.start(threads=1)
    app.broker.enqueue(actor.message("theirs").copy(options={"saga": option}))
    app.drain()
    assert app.calls == [("actor", "theirs")]


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "step", "run": "r"},
        {"kind": "what", "run": "r", "sequence": 1},
        {"kind": "step", "run": 5, "sequence": 1},
        {"kind": "compensation", "run": "r", "sequence": "1"},
        {"kind": "step", "run": "r", "sequence": 1, "attempts": None},
    ],
)
def test_a_damaged_message_of_ours_is_rejected_and_its_actor_never_runs_unclaimed(
    applications: Applications, facts: dict[str, Any]
) -> None:
    """CLAIM-1: without a row to claim nothing runs; the message is kept among the dead ones, and the worker lives on."""
    app = applications("stub")
    actor = app.step("actor")
    worker = app.start(threads=1)
    app.broker.enqueue(actor.message().copy(options={"saga": facts}))
    actor.send("after")
    app.drain()
    assert app.calls == [("actor", "after")]
    assert isinstance(app.broker, StubBroker)
    assert [letter.options["saga"] for letter in app.broker.dead_letters] == [facts]
    assert all(thread.is_alive() for thread in worker.workers)


# --- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"unknown": 2}), ((1,), {"a": 2})])
def test_arguments_that_do_not_fit_a_workflow_are_refused_to_the_sender(
    applications: Applications, args: Any, kwargs: Any
) -> None:
    """API Workflow.send: a TypeError with the signature; nothing written."""
    app = applications("sqlite")

    @app.workflow
    def one(flow: Flow, a: int, b: int = 0) -> None: ...

    for call in (one.send, one.run_sync, lambda *a, **k: one.send_with_options(args=a, kwargs=k)):
        with pytest.raises(TypeError, match=r"one: .*one\(a: 'int', b: 'int' = 0\)"):
            call(*args, **kwargs)
    assert counts(app) == [0, 0, 0, 0]


@pytest.mark.parametrize("which", ["step", "compensation"])
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_arguments_that_do_not_fit_an_actor_are_a_type_error_where_they_are_given(
    kind: str, which: str, applications: Applications
) -> None:
    """API Action builder: not a surprise in the step, or during a rollback."""
    app = applications(kind)

    @app.actor
    def refund(charge: str, *, why: str) -> None: ...

    step = app.step("step")

    @app.workflow
    def one(flow: Flow) -> str:
        try:
            if which == "step":
                flow.run(refund, "c")
            else:
                flow.action(step).compensate_with(refund).run()
        except TypeError as error:
            return str(error)
        return ""

    message = app.run(one).result()
    assert message.startswith("refund: missing a required")
    assert "its signature is refund(charge" in message
    assert app.calls == []


@pytest.mark.parametrize("actor", ["name", len, None, 5])
def test_a_step_that_is_no_actor_is_refused(applications: Applications, actor: Any) -> None:
    """API Flow.action: the error says what a step is."""
    app = applications("sqlite")

    @app.workflow
    def one(flow: Flow) -> str:
        try:
            flow.run(actor)
        except TypeError as error:
            return str(error)
        return ""

    assert "decorate the function with @dramatiq.actor" in app.run(one).result()


BAD_CALLS: dict[str, Any] = {
    "compensate_with(5)": lambda b, undo: b.compensate_with(5),
    "compensate_with(callable, arg)": lambda b, undo: b.compensate_with(lambda r: undo.message(), 1),
    "on_compensation_failure": lambda b, undo: b.on_compensation_failure("perhaps"),
    "expires_in(0)": lambda b, undo: b.expires_in(0),
    "expires_in(text)": lambda b, undo: b.expires_in("5"),
    "expires_at(naive)": lambda b, undo: b.expires_at(datetime(2030, 1, 1)),
    "reclaim_stale_after(0)": lambda b, undo: b.reclaim_stale_after(0),
    "reclaim_compensation_stale_after(nan)": lambda b, undo: b.reclaim_compensation_stale_after(float("nan")),
    "max_claims(0)": lambda b, undo: b.max_claims(0),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_builder_refuses_what_cannot_work_where_it_is_said(applications: Applications, call: str) -> None:
    """API Action builder: a TypeError or ValueError that the function may catch; it does not count as forgotten."""
    app = applications("sqlite")
    step, undo = app.step("step", gives=1), app.step("undo")

    @app.workflow
    def one(flow: Flow) -> Any:
        try:
            BAD_CALLS[call](flow.action(step), undo).run()
        except (TypeError, ValueError) as error:
            return [str(error), flow.run(step)]
        return None

    message, value = app.run(one).result()
    assert message
    assert value == 1


LONG = "x" * 1000

BAD_STARTS: dict[str, dict[str, Any]] = {
    "empty run_id": {"run_id": ""},
    "long run_id": {"run_id": LONG},
    "run_id with NUL": {"run_id": "a\x00b"},
    "run_id with half a pair": {"run_id": "a\ud800"},
    "run_id with a space at the end": {"run_id": "order "},
    "run_id that is no text": {"run_id": 5},
    "both deadlines": {"expires_in": 5, "expires_at": datetime(2040, 1, 1, tzinfo=UTC)},
    "naive deadline": {"expires_at": datetime(2040, 1, 1)},
    "deadline that is no time": {"expires_in": "5"},
    "deadline in the past": {"expires_in": timedelta(seconds=-1)},
    "long version": {"version": LONG},
    "max_retries": {"max_retries": 3},
    "max_age": {"max_age": 3},
    "store_results": {"store_results": True},
    "an option that cannot be encoded": {"labels": {1, 2}},
    "a queue_name": {"queue_name": "elsewhere"},
    "long tag": {"tags": {LONG: 1}},
    "long tag value": {"tags": {"a": LONG}},
    "tag with NUL": {"tags": {"a\x00": 1}},
    "tag value with NUL": {"tags": {"a": "\x00"}},
    "tag value of another kind": {"tags": {"a": 1.5}},
    "tag that is no text": {"tags": {5: "a"}},
    "delay of another kind": {"delay": "soon"},
    "negative delay": {"delay": -5},
    "endless delay": {"delay": 10**30},
    "deadline beyond all numbers": {"expires_in": 10**400},
}


@pytest.mark.parametrize("what", BAD_STARTS)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis", "mariadb"])
def test_a_start_that_cannot_work_is_refused_alike_on_every_database(kind: str, what: str, applications: Applications) -> None:
    """API send_with_options: TypeError or ValueError to the caller, with the culprit's name; nothing half written or sent."""
    app = applications(kind)
    declared = app.workflow(nothing)
    with pytest.raises((TypeError, ValueError)) as caught:
        declared.send_with_options(**BAD_STARTS[what])
    assert len(str(caught.value)) > 20
    assert counts(app) == [0, 0, 0, 0]
    assert app.messages() == 0


@pytest.mark.parametrize("run_id", ["x", "Order-1", "é 漢 🎉", "a/b?c=d&e", "x" * 128])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_run_ids_are_compared_byte_by_byte(kind: str, run_id: str, applications: Applications) -> None:
    """API send_with_options(run_id=…): what differs in case, or in accents, differs, on every database."""
    app = applications(kind)
    declared = app.workflow(nothing)
    first = declared.send_with_options(run_id=run_id)
    assert declared.send_with_options(run_id=run_id) == first
    others = {run_id.swapcase(), run_id.replace("é", "e"), run_id[:-1].strip()} - {run_id, ""}
    for other in others:
        assert declared.send_with_options(run_id=other).id == other
    assert counts(app)[0] == 1 + len(others)


BAD_IN_FUNCTION: dict[str, Any] = {
    "a long tag": lambda flow: flow.tag(LONG, 1),
    "a tag with NUL": lambda flow: flow.tag("a", "\x00"),
    "a tag value of another kind": lambda flow: flow.tag("a", 1.5),
    "a long key of a side effect": lambda flow: flow.side_effect(LONG, lambda: 1),
    "a key of a side effect with NUL": lambda flow: flow.side_effect("\x00", lambda: 1),
    "a side effect that is no function": lambda flow: flow.side_effect("a", 5),
}


@pytest.mark.parametrize("what", BAD_IN_FUNCTION)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_what_the_function_says_is_checked_where_it_is_said(kind: str, what: str, applications: Applications) -> None:
    """API Flow: a TypeError or ValueError there, alike on every database; never a decision that no database will take."""
    app = applications(kind)

    @app.workflow
    def one(flow: Flow) -> str:
        try:
            BAD_IN_FUNCTION[what](flow)
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return "accepted"

    assert app.run(one).result() in ("TypeError", "ValueError")


@pytest.mark.parametrize(("key", "value"), [(LONG, 1), ("a", LONG), ("a", "\x00"), ("a", 1.5), (5, "a")])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_tag_from_a_handle_is_checked_alike(kind: str, key: Any, value: Any, applications: Applications) -> None:
    """TAG-1: the same rules from outside."""
    app = applications(kind)
    handle = app.workflow(nothing).send()
    with pytest.raises((TypeError, ValueError)):
        handle.tag(key, value)
    assert handle.tags == {}


DECLARATIONS: dict[str, Any] = {
    "no flow": lambda: (lambda: None, {}),
    "keyword-only flow": lambda: (_keyword_only, {}),
    "a coroutine": lambda: (_coroutine, {}),
    "max_retries": lambda: (nothing, {"max_retries": 3}),
    "max_age": lambda: (nothing, {"max_age": 3}),
    "store_results": lambda: (nothing, {"store_results": True}),
    "a misspelt option": lambda: (nothing, {"que_name": "x"}),
    "a long name": lambda: (nothing, {"name": LONG}),
    "an empty name": lambda: (nothing, {"name": ""}),
    "a name with NUL": lambda: (nothing, {"name": "a\x00"}),
    "a long version": lambda: (nothing, {"version": LONG}),
    "a strange queue name": lambda: (nothing, {"queue_name": "a b"}),
    "a tag that cannot be stored": lambda: (nothing, {"tags": {"a": 1.5}}),
}


def _keyword_only(*, flow: Any) -> None: ...


async def _coroutine(flow: Any) -> None: ...


@pytest.mark.parametrize("what", DECLARATIONS)
def test_a_declaration_that_cannot_work_is_refused_at_once(applications: Applications, what: str) -> None:
    """API workflow: a TypeError or ValueError at the decorator, and no actor is left behind."""
    app = applications("sqlite")
    function, options = DECLARATIONS[what]()
    with pytest.raises((TypeError, ValueError)):
        app.workflow(function, **options)
    assert app.broker.actors == {}
    assert app.engine.workflows == {}


@pytest.mark.parametrize(
    "conditions", [{"order": "random"}, {"limit": 0}, {"status": "lost"}, {"before": datetime(2030, 1, 1)}]
)
def test_a_query_that_cannot_work_is_refused_when_it_is_made(applications: Applications, conditions: dict[str, Any]) -> None:
    """API query(): a ValueError that names the choices."""
    applications("sqlite").workflow(nothing)
    with pytest.raises(ValueError):
        query(**conditions)


# --- databases ---------------------------------------------------------------------------------------------------------


def refuses_to_start(database: Any, match: str, *, kind: type[BaseException] = SagaError, broker: Any = None) -> None:
    """A worker on ``database`` does not start, and says why."""
    made = broker or StubBroker(middleware=[known() for known in default_middleware])
    made.add_middleware(SagaMiddleware(database))
    with pytest.raises(kind, match=match):
        Worker(made, worker_threads=1, worker_timeout=10).start()
    made.close()


def test_a_database_in_a_folder_that_is_not_there_is_named_at_the_workers_start(tmp_path: Path) -> None:
    """Bad input, C40: the path, and what to do."""
    refuses_to_start(str(tmp_path / "nowhere" / "x.db"), "nowhere")


def test_a_file_that_is_no_database_is_named_at_the_workers_start(tmp_path: Path) -> None:
    """Bad input: its bytes are left alone."""
    path = tmp_path / "notes.txt"
    path.write_text("These are my notes, and they are longer than a hundred bytes. " * 20)
    before = path.read_bytes()
    refuses_to_start(str(path), "notes.txt")
    assert path.read_bytes() == before


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_is_no_file_for_a_database(device: str, tmp_path: Path) -> None:
    """Bad input: it would take everything, and keep nothing."""
    refuses_to_start(device, f"cannot use {device} as an SQLite file: it is a device or a pipe; name a file")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refuses_to_start(str(pipe), "it is a device or a pipe")


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_database_that_a_server_does_not_have_is_named_at_the_workers_start(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Bad input: as a refused connection, with what the server says."""
    url = request.getfixturevalue("postgres_url" if kind == "postgresql" else "mariadb_url")
    address = urlsplit(url)
    says = "create that database, or correct its name in the address" if kind == "mariadb" else "does not exist"
    refuses_to_start(
        urlunsplit(address._replace(path="/no_such_shop")), f"the database refused the connection.*no_such_shop.*{says}"
    )


ABSURD: dict[str, Callable[[Operator, FlowHandle[Any]], object]] = {
    "reason of a cancel": lambda operator, run: run.cancel([]),  # type: ignore[arg-type]
    "reason of a rollback": lambda operator, run: run.compensate(b"no"),  # type: ignore[arg-type]
    "step that is no number": lambda operator, run: run.abandon_undo([]),  # type: ignore[arg-type]
    "step beyond all numbers": lambda operator, run: run.abandon_undo(2**63),
    "step that is yes": lambda operator, run: run.abandon_undo(True),
    "endless days": lambda operator, run: operator.prune(days=float("inf")),
    "days that are no number": lambda operator, run: operator.prune(days=float("nan")),
    "days to come": lambda operator, run: operator.prune(days=-1),
    "days in words": lambda operator, run: operator.prune(days="90"),  # type: ignore[arg-type]
    "moment beyond all calendars": lambda operator, run: operator.prune(before=10**30),
    "moment that is yes": lambda operator, run: operator.prune(before=True),
    "prune of a part": lambda operator, run: operator.prune(limit=1.5, dry_run=True),  # type: ignore[arg-type]
    "stuck runs of a part": lambda operator, run: operator.stuck(limit=1.5),  # type: ignore[arg-type]
    "no dead letters": lambda operator, run: operator.dead_letters(limit=-1),
    "dead letters in words": lambda operator, run: operator.dead_letters(limit="x"),  # type: ignore[arg-type]
    "dead letters beyond all numbers": lambda operator, run: operator.dead_letters(limit=10**30),
}


@pytest.mark.parametrize("what", ABSURD)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_an_operators_call_that_cannot_work_is_refused_alike_on_every_database(
    kind: str, what: str, applications: Applications
) -> None:
    """API: TypeError or ValueError with the culprit's name, and nothing is done."""
    app = applications(kind)
    run = app.workflow(nothing).send()
    with pytest.raises((TypeError, ValueError), match=r"reason|step|days|before|limit") as caught:
        ABSURD[what](Operator.on_broker(app.broker), run)
    assert type(caught.value) in (TypeError, ValueError)
    assert run.status == "pending"


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can look into: pytest keeps its own to itself."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("what", "says"),
    [("a file", "read-only"), ("a folder", "may read and write it"), ("a folder out of reach", "may read and write it")],
)
def test_a_read_only_database_is_named_at_the_workers_start(tmp_path: Path, public_folder: Path, what: str, says: str) -> None:
    """C40: with the path; a process that may not write says so before the first message."""
    folder = public_folder / "shop"
    folder.mkdir()
    path = folder / "x.db"
    if what == "a file":
        store = open_store(path)
        store.prepare()
        store.close()
    if what == "a folder out of reach":
        public_folder.chmod(0o700)
    code = (
        "import os, sys\n"
        "from dramatiq import Worker\n"
        "from dramatiq.brokers.stub import StubBroker\n"
        "from dramatiq_saga import SagaMiddleware\n"
        "from dramatiq_saga.store.database import open_store\n"
        "open_store(sys.argv[2]).prepare()\n"  # everything is imported before rights are given up
        "os.setgid(65534); os.setuid(65534)\n"
        "broker = StubBroker(); broker.add_middleware(SagaMiddleware(sys.argv[1]))\n"
        "try:\n    Worker(broker).start()\nexcept Exception as error:\n    print(type(error).__name__, error); os._exit(7)\n"
        "os._exit(0)\n"
    )
    if os.getuid() != 0:
        pytest.skip("needs to become another user")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "other.db")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert done.stdout.startswith("BootRefusedError")
    assert "x.db" in done.stdout
    assert says in done.stdout


@pytest.mark.parametrize("url", ["nonsense://x/y", "postgresql://nobody@127.0.0.1:1/none", "mysql://nobody@127.0.0.1:1/none"])
def test_a_server_that_is_not_there_is_named_at_the_workers_start(url: str) -> None:
    """Bad input: a worker that cannot reach its store does not start."""
    made = StubBroker(middleware=[known() for known in default_middleware])
    made.add_middleware(SagaMiddleware(url))
    with pytest.raises(SagaError):
        Worker(made, worker_threads=1, worker_timeout=10).start()


@pytest.mark.parametrize(("version", "says"), [("9999", "newer than this code"), ("0000", "dramatiq-saga init")])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_schema_of_another_version_is_refused_at_the_workers_start_and_by_a_sender(
    kind: str, version: str, says: str, applications: Applications
) -> None:
    """SAFE-3, C64: with the command that mends it; no message is taken, none is written."""
    app = applications(kind)
    declared = app.workflow(nothing)
    table = f"{app.store.prefix}schema_migrations"
    found = app.sql(f"SELECT name, applied_at FROM {table}")
    app.execute(f"UPDATE {table} SET name = ?", f"{version}_other")
    try:
        off = Settings.from_mapping({"schema": {"auto_create": False, "table_prefix": app.store.prefix}})
        broker = (SQLiteBroker if kind == "sqlite" else DatabaseBroker)(app.store.database, prefix=app.store.prefix)
        broker.add_middleware(SagaMiddleware(settings=off))
        other = workflow(broker=broker)(nothing)
        with pytest.raises(SagaError, match=says):
            other.send()
        with pytest.raises(SagaError, match=says):
            Worker(broker, worker_threads=1, worker_timeout=10).start()
        broker.close()
    finally:
        app.execute(f"UPDATE {table} SET name = ?", found[0][0])
    assert declared.send().status == "pending"
    assert counts(app)[0] == 1


def test_tables_that_are_missing_are_told_with_the_command(tmp_path: Path, postgres_url: str, table_prefix: str) -> None:
    """SAFE-3: servers are not created unasked."""
    settings = Settings.from_mapping({"schema": {"table_prefix": table_prefix}})
    broker = StubBroker(middleware=[known() for known in default_middleware])
    broker.add_middleware(SagaMiddleware(postgres_url, settings=settings))
    declared = workflow(broker=broker)(nothing)
    with pytest.raises(SchemaVersionError, match="dramatiq-saga init"):
        declared.send()
    with pytest.raises(SagaError, match="dramatiq-saga init"):
        Worker(broker).start()
    broker.close()


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    """SettingsError: the full name of the key."""
    with pytest.raises(SettingsError, match=r"actions\.reclaim\.stale_running\.after_seconds"):
        Settings.from_mapping({"actions": {"reclaim": {"stale_running": {"after_seconds": -1}}}})


def test_values_that_the_database_will_not_have_are_no_half_run(applications: Applications) -> None:
    """CODEC-2: a number that no column holds is part of a payload, so it is fine; options are checked where they are given."""
    app = applications("sqlite")
    step = app.step("step", gives=2**70)

    @app.workflow
    def one(flow: Flow, n: int) -> int:
        return flow.run(step, n)

    assert app.run(one, 2**80).result() == 2**70
    with pytest.raises((NotSerializableError, TypeError, ValueError)):
        one.send_with_options(args=(1,), priority="high")
    assert isinstance(DatabaseUnusableError("x"), SagaError)
