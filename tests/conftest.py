"""Fixtures of real parts.

A test asks for what it needs: ``database_url`` (run on SQLite, PostgreSQL and MariaDB), ``sqlite_path``, ``postgres_url``,
``mariadb_url``, ``redis_url``, ``rabbitmq_url``; ``table_prefix`` and ``namespace`` for names of its own, ``tables_stand`` for tables that
are there already; ``effects`` and ``gates`` to watch and to stop what happens in other processes; ``worker_process`` and
``python_process`` to start them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import dramatiq.broker
import pytest
import structlog
import structlog.testing
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.support import effects as effect_files
from tests.support import gates as gate_files
from tests.support import locks, servers
from tests.support.application import Application, Applications, Places
from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.haste import make_haste
from tests.support.processes import Process, WorkerProcess

DATABASES = ("sqlite", "postgresql", "mariadb")
SERVER_FIXTURES = {"postgres_url", "mariadb_url", "redis_url", "rabbitmq_url"}

make_haste()

# No wall clock decides over a test; CI repeats itself exactly.
hypothesis_settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=os.environ.get("CI") == "true"
)
hypothesis_settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server, so that ``-m servers`` and ``-m 'not servers'`` need no care by hand."""
    for item in items:
        fixtures = SERVER_FIXTURES & set(getattr(item, "fixturenames", ()))
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if fixtures or set(servers.ADDRESSES) & {value for value in parameters.values() if isinstance(value, str)}:
            item.add_marker(pytest.mark.servers)


# --- names and places ------------------------------------------------------------------------------------------------


@pytest.fixture
def table_prefix(request: pytest.FixtureRequest, places: Places) -> str:
    """A table prefix that no other test uses meanwhile (12 bytes)."""
    return places.prefix if _tables_stand(request) else servers.random_name() + "_"


@pytest.fixture
def tables_stand() -> None:
    """Beside the address of a server: the tables of ``table_prefix`` are there, and empty. Making and dropping them takes longer than
    most tests; those that change the schema need tables of their own."""


def _tables_stand(request: pytest.FixtureRequest) -> bool:
    return "tables_stand" in request.fixturenames


@pytest.fixture
def namespace() -> str:
    """A name of this test's own: for queues, key prefixes and the like."""
    return servers.random_name()


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    """Where this test's database file goes; the file is not there yet."""
    return tmp_path / "saga.db"


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, sqlite_path: Path) -> str:
    """The address of a database, each kind in turn. On servers, use ``table_prefix``: those tables are dropped at the end.

    ``@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)`` narrows it.
    """
    return f"sqlite:///{sqlite_path}" if request.param == "sqlite" else request.getfixturevalue("_server_url")(request.param)


@pytest.fixture
def postgres_url(_server_url: Callable[[str], str]) -> str:
    """PostgreSQL's address; tables that start with ``table_prefix`` are dropped at the end."""
    return _server_url("postgresql")


@pytest.fixture
def mariadb_url(_server_url: Callable[[str], str]) -> str:
    """MariaDB's address; tables that start with ``table_prefix`` are dropped at the end."""
    return _server_url("mariadb")


@pytest.fixture
def _server_url(request: pytest.FixtureRequest, table_prefix: str, places: Places) -> Iterator[Callable[[str], str]]:
    used: list[str] = []

    def url_of(server: str) -> str:
        if _tables_stand(request):
            return places.server(server)[0]
        used.append(server)
        return servers.require(server)

    yield url_of
    for server in used:
        servers.drop_tables(server, table_prefix)


@pytest.fixture
def redis_url() -> Iterator[str]:
    """The address of an empty Redis database that nobody else uses meanwhile."""
    url = servers.claim_redis()
    yield url
    servers.release_redis(url)


@pytest.fixture(scope="session")
def _rabbitmq_vhost() -> Iterator[str]:
    servers.require("rabbitmq")
    url = servers.create_vhost()  # it takes seconds: one for each process that runs tests
    yield url
    servers.delete_vhost(url)


@pytest.fixture
def rabbitmq_url(_rabbitmq_vhost: str, namespace: str) -> Iterator[str]:
    """RabbitMQ's address, in a virtual host that no other process shares. Name queues ``namespace``, or begin them so.

    Queues named ``namespace`` or ``default`` are deleted at the end, others with the virtual host.
    """
    servers.delete_queues(_rabbitmq_vhost, "default")
    yield _rabbitmq_vhost
    servers.delete_queues(_rabbitmq_vhost, "default", namespace)


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def effects(tmp_path: Path) -> EffectLog:
    """What the steps really did; in a worker process of this test: ``EffectLog.from_env()``."""
    return EffectLog(tmp_path / "effects.jsonl")


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    """Named points to stop at; in a process of this test: ``Gates.from_env()``."""
    return Gates(tmp_path / "gates")


@pytest.fixture
def _processes(tmp_path: Path, effects: EffectLog, gates: Gates) -> Iterator[Callable[..., Any]]:
    started: list[Process] = []

    def start(kind: Callable[..., Process], what: Any, env: dict[str, str] | None = None, **options: Any) -> Process:
        shared = {effect_files.VARIABLE: str(effects.path), gate_files.VARIABLE: str(gates.directory)}
        output = tmp_path / f"process-{len(started)}.log"
        process = kind(what, output=output, env={**shared, **(env or {})}, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()
        print(f"\n--- {process} ---\n{process.output()}")  # pytest shows it when the test has failed


@pytest.fixture
def worker_process(_processes: Callable[..., Any]) -> Callable[..., WorkerProcess]:
    """``worker_process(module, *, processes=1, threads=4, queues=(), arguments=(), env=None, ready=True)``.

    Starts the real ``dramatiq`` command on an importable module and, unless ``ready=False``, waits until it consumes.
    """

    def start(module: str, *, ready: bool = True, **options: Any) -> WorkerProcess:
        worker: WorkerProcess = _processes(WorkerProcess, module, **options)
        if ready:
            worker.wait_ready()
        return worker

    return start


@pytest.fixture
def python_process(_processes: Callable[..., Any]) -> Callable[..., Process]:
    """``python_process("-m", "some.module", "argument", env=None)``: any other Python process."""

    def start(*arguments: str, **options: Any) -> Process:
        process: Process = _processes(Process, arguments, **options)
        return process

    return start


@pytest.fixture
def make_field(
    table_prefix: str, effects: EffectLog, gates: Gates, worker_process: Callable[..., Any], python_process: Callable[..., Any]
) -> Iterator[Callable[..., Field]]:
    """``make_field(database, redis=None)``: an application with real workers and the real command line (``support/field.py``)."""
    made: list[Field] = []

    def make(database: str, **options: str) -> Field:
        shared = {effect_files.VARIABLE: str(effects.path), gate_files.VARIABLE: str(gates.directory)}
        processes = {"worker_process": worker_process, "python_process": python_process}
        made.append(Field(database, prefix=table_prefix, shared=shared, **processes, **options))
        return made[-1]

    yield make
    for one in made:
        one.operator.close()


@pytest.fixture
def field(make_field: Callable[..., Field], sqlite_path: Path) -> Field:
    """That application on an SQLite file."""
    return make_field(f"sqlite:///{sqlite_path}")


# --- overlap locks ---------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is marked ``both_ways`` runs without overlap locks and with them."""
    if metafunc.definition.get_closest_marker("both_ways") is not None:
        metafunc.parametrize("_overlap_locks", ["", "redis"], ids=["no locks", "locks"], indirect=True)


@pytest.fixture(autouse=True)
def _overlap_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks for everything in the test that can take them, where it is to run with them (``support/locks.py``)."""
    if request.node.get_closest_marker("claims_alone") is not None:
        monkeypatch.delenv(locks.VARIABLE, raising=False)
    elif getattr(request, "param", ""):
        monkeypatch.setenv(locks.VARIABLE, request.param)
    if not os.environ.get(locks.VARIABLE):
        yield
        return
    url = servers.claim_redis()
    monkeypatch.setenv(locks.VARIABLE, url)
    yield
    servers.release_redis(url)


# --- what is global is put back --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _globals_restored() -> Iterator[None]:
    """Dramatiq's broker and encoder and structlog's configuration end as they began."""
    broker, encoder = dramatiq.broker.global_broker, dramatiq.get_encoder()
    yield
    left = dramatiq.broker.global_broker
    dramatiq.broker.global_broker = broker
    dramatiq.set_encoder(encoder)
    structlog.reset_defaults()
    if left is not None and left is not broker:
        left.close()


# --- applications with workers in this process ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    places = Places(tmp_path_factory.mktemp("places"))
    yield places
    places.close()


@pytest.fixture
def applications(places: Places, _globals_restored: None, tmp_path: Path) -> Iterator[Applications]:
    """``applications("sqlite")``: an application of a kind (see ``tests/support/application.py``), closed at the end."""
    factory = Applications(places, tmp_path)
    yield factory
    factory.close()


@pytest.fixture(params=["sqlite", "postgresql", "redis", "stub"])
def app(request: pytest.FixtureRequest, applications: Applications) -> Application:
    """The same application in each setting."""
    return applications(request.param)


@pytest.fixture(params=["sqlite", "postgresql", "redis", "stub", "mariadb"])
def every_app(request: pytest.FixtureRequest, applications: Applications) -> Application:
    """As ``app``, on MariaDB too: for what everything else rests on."""
    return applications(request.param)


@pytest.fixture
def journal() -> Iterator[list[dict[str, Any]]]:
    """Every structlog line that is written while the test runs: anomalies and the package's own log."""
    with structlog.testing.capture_logs() as lines:
        yield lines
