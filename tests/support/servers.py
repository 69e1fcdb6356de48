"""The servers that tests talk to: where they are, whether they answer, and how to leave them clean.

A server that is missing skips the tests that need it; with ``CI=true`` it fails them, so that nothing is passed over
where it counts. Each address can be set by an environment variable.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

#: name -> (environment variable, default address)
ADDRESSES = {
    "postgresql": ("DRAMATIQ_SAGA_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/test"),
    "mariadb": ("DRAMATIQ_SAGA_TEST_MARIADB", "mysql://root@127.0.0.1:3306/test"),
    "redis": ("DRAMATIQ_SAGA_TEST_REDIS", "redis://127.0.0.1:6379"),
    "rabbitmq": ("DRAMATIQ_SAGA_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672"),
}

#: Seconds after which a claimed Redis database may be taken from tests that never gave it back.
REDIS_CLAIM = 1800


def address(server: str) -> str:
    """Where a server is looked for."""
    variable, default = ADDRESSES[server]
    return os.environ.get(variable) or default


def require(server: str) -> str:
    """The server's address, once it has answered in this session; otherwise the test is skipped, or fails in CI."""
    problem = _problem(server)
    if problem is None:
        return address(server)
    message = f"{server} does not answer at {address(server)} (set {ADDRESSES[server][0]}): {problem}"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@functools.cache
def _problem(server: str) -> str | None:
    try:
        _PROBES[server]()
    except Exception as error:  # whatever the driver raises: it is told, not handled
        return f"{type(error).__name__}: {error}"
    return None


def random_name() -> str:
    """A short name that no other test uses: letters and digits, fit for tables, queues and keys."""
    return "t" + secrets.token_hex(5)


# --- databases -------------------------------------------------------------------------------------------------------


def connect_postgresql() -> Any:
    import psycopg

    return psycopg.connect(address("postgresql"), autocommit=True, connect_timeout=5)


def connect_mariadb() -> Any:
    import pymysql

    parts = urlsplit(address("mariadb"))
    return pymysql.connect(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 3306,
        user=parts.username or "root",
        password=parts.password or "",
        database=parts.path.strip("/"),
        autocommit=True,
        connect_timeout=5,
    )


def drop_tables(server: str, prefix: str) -> None:
    """Drop every table whose name starts with ``prefix``.

    A connection of the test that was left in a transaction holds a lock on them: that is a finding, so it fails here after
    a few seconds instead of hanging.
    """
    pattern = prefix.replace("_", r"\_") + "%"
    if server == "postgresql":
        with connect_postgresql() as connection:
            connection.execute("SET lock_timeout = '8s'")
            found = connection.execute(
                "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables WHERE tablename LIKE %s", (pattern,)
            ).fetchall()
            if found:
                connection.execute("DROP TABLE " + ", ".join(name for (name,) in found) + " CASCADE")
    else:
        connection = connect_mariadb()
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION lock_wait_timeout = 8, FOREIGN_KEY_CHECKS = 0")
                cursor.execute(
                    "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name LIKE %s",
                    (pattern,),
                )
                found = cursor.fetchall()
                if found:
                    cursor.execute("DROP TABLE " + ", ".join(f"`{name}`" for (name,) in found))
        finally:
            connection.close()


def empty_tables(server: str, tables: Iterable[str]) -> None:
    """Delete every row of these tables. What a test has left locked is a finding here too."""
    deletes = [f"DELETE FROM {table}" for table in tables]
    if server == "postgresql":
        with connect_postgresql() as connection:
            connection.execute("; ".join(["SET lock_timeout = '8s'", *deletes]))
    else:
        connection = connect_mariadb()
        try:
            with connection.cursor() as cursor:
                for statement in ("SET SESSION innodb_lock_wait_timeout = 8", "BEGIN", *deletes, "COMMIT"):
                    cursor.execute(statement)
        finally:
            connection.close()


# --- Redis -----------------------------------------------------------------------------------------------------------


def claim_redis() -> str:
    """The address of an empty Redis database that belongs to the caller until :func:`release_redis`.

    Databases that hold anything but a lapsed claim of ours are left alone.
    """
    import redis

    until = time.monotonic() + 60
    while True:
        for number in range(1, 16):
            url = f"{require('redis').rstrip('/')}/{number}"
            with redis.Redis.from_url(url) as client:
                try:
                    ours = client.exists("dramatiq-saga-tests")
                except redis.ResponseError:  # the server has fewer databases
                    break
                if not ours and client.dbsize():
                    continue
                if client.set("dramatiq-saga-tests:claimed", os.getpid(), nx=True, ex=REDIS_CLAIM):
                    flush_redis(client)
                    return url
        if time.monotonic() > until:
            pytest.fail("no empty Redis database among 1 to 15: flush one, or wait for other test runs", pytrace=False)
        time.sleep(0.1)


def flush_redis(client: Any) -> None:
    """Empty a database that is claimed. The claim stays: without it others would take the database for a free one, and flush it."""
    with client.pipeline(transaction=True) as pipeline:
        pipeline.flushdb()
        pipeline.set("dramatiq-saga-tests", "this database may be flushed")
        pipeline.set("dramatiq-saga-tests:claimed", os.getpid(), ex=REDIS_CLAIM)
        pipeline.execute()


def release_redis(url: str) -> None:
    """Empty it, but for the mark that it may be flushed: a worker that dies late can write to it once more."""
    import redis

    with redis.Redis.from_url(url) as client, client.pipeline(transaction=True) as pipeline:
        pipeline.flushdb()
        pipeline.set("dramatiq-saga-tests", "this database may be flushed")
        pipeline.execute()


# --- RabbitMQ --------------------------------------------------------------------------------------------------------


def create_vhost() -> str:
    """The address of a new virtual host, where ``rabbitmqctl`` may make one; otherwise that of the default one."""
    base = address("rabbitmq").rstrip("/")
    user = urlsplit(base).username or "guest"
    name = random_name()
    if not _rabbitmqctl("add_vhost", name):
        return base
    _rabbitmqctl("set_permissions", "-p", name, user, ".*", ".*", ".*")
    parts = urlsplit(base)
    return urlunsplit((parts.scheme, parts.netloc, f"/{name}", "", ""))


def delete_queues(url: str, *names: str) -> None:
    """Delete Dramatiq's queues of these names, with their delayed messages and dead letters."""
    import pika

    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for name in names:
            for queue in (name, f"{name}.DQ", f"{name}.XQ"):
                channel.queue_delete(queue)


def delete_vhost(url: str) -> None:
    name = urlsplit(url).path.strip("/")
    if name:
        _rabbitmqctl("delete_vhost", name)


def _rabbitmqctl(*arguments: str) -> bool:
    if shutil.which("rabbitmqctl") is None or urlsplit(address("rabbitmq")).hostname not in ("127.0.0.1", "localhost", "::1"):
        return False
    done = subprocess.run(["rabbitmqctl", "-q", *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    return done.returncode == 0


# --- does it answer? -------------------------------------------------------------------------------------------------


def _ask_postgresql() -> None:
    connect_postgresql().close()


def _ask_mariadb() -> None:
    connect_mariadb().close()


def _ask_redis() -> None:
    import redis

    with redis.Redis.from_url(address("redis"), socket_connect_timeout=5) as client:
        client.ping()


def _ask_rabbitmq() -> None:
    import pika

    pika.BlockingConnection(pika.URLParameters(address("rabbitmq") + "/%2F")).close()


_PROBES = {"postgresql": _ask_postgresql, "mariadb": _ask_mariadb, "redis": _ask_redis, "rabbitmq": _ask_rabbitmq}


def main(patience: float = 60.0) -> int:
    """``python -m tests.support.servers``: wait until every server lets the tests in; say which one does not, and why."""
    until = time.monotonic() + patience
    refused = 0
    for name in ADDRESSES:
        while (problem := _problem.__wrapped__(name)) and time.monotonic() < until:
            time.sleep(0.2)
        print(f"{name} at {address(name)}: {problem or 'lets the tests in'}")
        refused += problem is not None
    return min(refused, 1)


if __name__ == "__main__":
    raise SystemExit(main())
