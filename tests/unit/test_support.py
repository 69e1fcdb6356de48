"""The tools that other tests rest on are tested themselves: a helper that cannot fail would hide everything."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga.store.database import open_store
from tests.support import haste, servers
from tests.support.application import Places
from tests.support.effects import EffectLog
from tests.support.gates import Gates
from tests.support.haste import make_haste
from tests.support.processes import Process, WorkerProcess
from tests.support.stores import add, count
from tests.support.waiting import eventually


def test_a_fact_that_never_comes_true_fails_and_says_what_was_last_seen() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.05 s: the list fills \(last seen: \[\]\)"):
        eventually(list, 0.05, because="the list fills")


def test_an_assertion_inside_the_predicate_is_waited_for_and_then_reported() -> None:
    answers = iter([False, False, True])

    def predicate() -> bool:
        assert next(answers), "not yet"
        return True

    assert eventually(predicate)
    with pytest.raises(AssertionError, match="never"):
        eventually(_refuse, 0.02)


def _refuse() -> bool:
    raise AssertionError("never")


def test_effects_of_two_processes_never_share_a_line(effects: EffectLog, python_process: Callable[..., Process]) -> None:
    code = "from tests.support.effects import EffectLog; log = EffectLog.from_env()\n"
    code += "for i in range(300): log.record('tick', number=i, padding='x' * 500)"
    writers = [python_process("-c", code) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert effects.count("tick") == 900
    assert effects.count("tick", number=7) == 3
    assert len({entry["pid"] for entry in effects}) == 3


def test_an_effect_survives_the_kill_of_its_process(effects: EffectLog, python_process: Callable[..., Process]) -> None:
    code = "from tests.support.effects import EffectLog; import signal\n"
    code += "EffectLog.from_env().record('charged', order='42'); signal.pause()"
    process = python_process("-c", code)
    eventually(lambda: effects.count("charged"))
    process.kill()
    assert effects.names() == ["charged"]
    assert process.wait() == -signal.SIGKILL


def test_a_process_stands_at_a_closed_gate(gates: Gates, effects: EffectLog, python_process: Callable[..., Process]) -> None:
    code = "from tests.support.effects import EffectLog; from tests.support.gates import Gates\n"
    code += "Gates.from_env().reach('before'); EffectLog.from_env().record('after')"
    process = python_process("-c", code)
    gates.wait_reached("before")
    assert effects.names() == []
    gates.open("before")
    assert process.wait() == 0
    assert effects.names() == ["after"]


def test_threads_stop_at_gates_too(gates: Gates) -> None:
    passed = threading.Event()

    def walk() -> None:
        gates.reach("door")
        passed.set()

    walker = threading.Thread(target=walk)
    walker.start()
    gates.wait_reached("door")
    assert not passed.is_set()
    gates.open("door")
    walker.join()
    assert passed.is_set()


APP = """
import dramatiq, os, signal
from dramatiq.brokers.stub import StubBroker
from tests.support.effects import EffectLog
dramatiq.set_broker(StubBroker())
EffectLog.from_env().record("booted", parent=os.getppid())
"""


def test_a_killed_worker_takes_its_children_along(
    tmp_path: Path, effects: EffectLog, worker_process: Callable[..., WorkerProcess]
) -> None:
    (tmp_path / "stub_app.py").write_text(APP)
    worker = worker_process("stub_app", processes=2, threads=1, arguments=["--path", str(tmp_path)])
    children = [entry["pid"] for entry in effects if entry["parent"] == worker.pid]
    assert len(children) >= 2
    worker.kill()
    assert not worker.running
    for child in children:
        assert not _alive(child)


def test_a_terminated_worker_ends_in_order(tmp_path: Path, worker_process: Callable[..., WorkerProcess]) -> None:
    (tmp_path / "stub_app.py").write_text(APP)
    worker = worker_process("stub_app", threads=1, arguments=["--path", str(tmp_path)])
    assert worker.terminate() == 0


def test_a_worker_that_cannot_start_is_reported_with_its_output(worker_process: Callable[..., WorkerProcess]) -> None:
    with pytest.raises(RuntimeError, match="no_such_module_anywhere"):
        worker_process("no_such_module_anywhere")


def test_a_missing_server_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAMATIQ_SAGA_TEST_REDIS", "redis://127.0.0.1:1")
    servers._problem.cache_clear()
    try:
        monkeypatch.delenv("CI", raising=False)
        with pytest.raises(pytest.skip.Exception, match="DRAMATIQ_SAGA_TEST_REDIS"):
            servers.require("redis")
        monkeypatch.setenv("CI", "true")
        with pytest.raises(pytest.fail.Exception, match="DRAMATIQ_SAGA_TEST_REDIS"):
            servers.require("redis")
    finally:
        servers._problem.cache_clear()


def test_tables_of_the_prefix_are_dropped_and_no_others(postgres_url: str, mariadb_url: str, table_prefix: str) -> None:
    other = servers.random_name()
    for server, connect in (("postgresql", servers.connect_postgresql), ("mariadb", servers.connect_mariadb)):
        connection = connect()
        try:
            cursor = connection.cursor()
            for name in (f"{table_prefix}runs", f"{table_prefix}events", f"{other}_runs"):
                cursor.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY)")
            servers.drop_tables(server, table_prefix)
            cursor.execute(
                "SELECT table_name FROM information_schema.tables WHERE table_name LIKE %s OR table_name LIKE %s",
                (table_prefix + "%", other + "%"),
            )
            assert [name for (name,) in cursor.fetchall()] == [f"{other}_runs"]
        finally:
            connection.close()
            servers.drop_tables(server, other)


def test_two_claimed_redis_databases_are_two(redis_url: str) -> None:
    second = servers.claim_redis()
    try:
        assert second != redis_url
    finally:
        servers.release_redis(second)


def test_the_virtual_host_takes_messages(rabbitmq_url: str, namespace: str) -> None:
    import pika

    with pika.BlockingConnection(pika.URLParameters(rabbitmq_url)) as connection:
        channel = connection.channel()
        channel.queue_declare(namespace)
        channel.basic_publish("", namespace, b"hello")
        method, _, body = eventually(lambda: _get(channel, namespace))
        channel.basic_ack(method.delivery_tag)
        channel.queue_delete(namespace)
    assert body == b"hello"


def _get(channel: Any, queue: str) -> tuple[Any, Any, bytes] | None:
    method, header, body = channel.basic_get(queue)
    return None if method is None else (method, header, body)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_this_checkout_is_what_is_tested() -> None:
    import dramatiq_saga.errors

    assert Path(dramatiq_saga.errors.__file__).is_relative_to(Path(__file__).resolve().parents[2])
    assert sys.version_info >= (3, 11)


# --- haste -----------------------------------------------------------------------------------------------------------


def test_haste_gives_way_to_what_somebody_has_set(tmp_path: Path) -> None:
    mine = {"PYTEST_DEBUG_TEMPROOT": "/here", "PGOPTIONS": "-c search_path=mine"}
    environment = dict(mine)
    make_haste(environment, tmp_path)
    assert environment == mine


def test_haste_keeps_files_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    monkeypatch.setattr(haste, "ROOM", 0)
    make_haste(environment, tmp_path)
    assert environment == {"PYTEST_DEBUG_TEMPROOT": str(tmp_path), "PGOPTIONS": "-c synchronous_commit=off"}
    small: dict[str, str] = {}
    monkeypatch.setattr(haste, "ROOM", 2**62)
    make_haste(small, tmp_path)
    make_haste(small, tmp_path / "none")
    assert "PYTEST_DEBUG_TEMPROOT" not in small


def test_tables_that_stand_are_empty_again_for_the_next_test(places: Places) -> None:
    for server in ("postgresql", "mariadb"):
        url, prefix = places.server(server)
        store = open_store(url, prefix=prefix)
        store.write(add("left"))
        store.close()
        places.server(server)
        assert count(store, "left") == 0
        store.close()
