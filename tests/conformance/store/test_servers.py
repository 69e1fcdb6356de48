"""What can go wrong between an operation and a database server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import peewee
import pytest
from playhouse.db_url import connect

from dramatiq_saga.errors import StoreError, WriteRefusedError, WriteUnknownError
from dramatiq_saga.store import clocks, servers
from dramatiq_saga.store.database import Store, Tx
from dramatiq_saga.store.trouble import is_lost_commit
from tests.support.bench import Background
from tests.support.servers import connect_mariadb, connect_postgresql
from tests.support.stores import add, all_waiting, count
from tests.support.waiting import eventually

both_servers = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
mariadb_only = pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)

WHO = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}


def session(tx: Tx) -> int:
    """The server's number for the connection at hand."""
    row = tx.one(WHO[tx.dialect])
    assert row is not None
    return int(row[0])


@pytest.fixture
def kill(store: Store) -> Iterator[Callable[[int], None]]:
    """Ends a session on the server, as an administrator does; returns once it is gone."""
    if store.dialect == "postgresql":
        connection = connect_postgresql()

        def kill(number: int) -> None:
            connection.execute("SELECT pg_terminate_backend(%s)", (number,))
            eventually(
                lambda: not connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (number,)).fetchall(),
                because="the session has ended",
            )
    else:
        connection = connect_mariadb()

        def kill(number: int) -> None:
            with connection.cursor() as cursor:
                cursor.execute(f"KILL {number}")
                eventually(
                    lambda: cursor.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", (number,)) == 0,
                    because="the session has ended",
                )

    yield kill
    connection.close()


# --- lost connections ------------------------------------------------------------------------------------------------


@both_servers
def test_a_connection_killed_while_idle_is_replaced_before_anybody_notices(store: Store, kill: Callable[[int], None]) -> None:
    """C59: wait_timeout, a restart of the server, an administrator."""
    log: list[int] = []

    def operation(tx: Tx) -> int:
        log.append(1)
        return add()(tx)

    store.write(add("warm"))
    for _ in range(3):
        kill(store.read(session))
        assert store.write(operation) == len(log)
    kill(store.read(session))
    assert count(store) == 3
    assert len(log) == 3


@both_servers
def test_a_connection_killed_in_the_middle_is_replaced_once_and_the_work_done_once(
    store: Store, kill: Callable[[int], None]
) -> None:
    """COMMIT has not been sent, so nothing of the first run happened."""
    log: list[int] = []

    def operation(tx: Tx) -> int:
        add()(tx)
        log.append(session(tx))
        if len(log) == 1:
            kill(log[0])
        return add()(tx)

    assert store.write(operation) == 2
    assert count(store) == 2
    assert len(set(log)) == 2


@both_servers
def test_a_write_that_stands_still_gives_its_rows_back_and_is_done_once(
    database_url: str, open_on: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOOP-1: a machine that is suspended in the middle of a transaction holds up nobody for longer than that; it does its work again."""
    monkeypatch.setattr(servers, "STANDSTILL", 1)
    suspended, other = open_on(database_url), open_on(database_url)
    suspended.write(add(amount=0))
    goes_on, locked, log = threading.Event(), threading.Event(), []

    def operation(tx: Tx) -> int:
        log.append(add(amount=10)(tx))
        if len(log) == 1:
            locked.set()
            assert goes_on.wait(60)
        return add()(tx)

    ticket = suspended.submit(operation)
    assert locked.wait(20)
    assert other.write(add()) == 1
    goes_on.set()
    assert ticket.result() == 12
    assert log == [10, 11]


@both_servers
def test_a_second_loss_is_a_refusal(store: Store, kill: Callable[[int], None]) -> None:
    log: list[int] = []

    def operation(tx: Tx) -> int:
        log.append(session(tx))
        kill(log[-1])
        return add()(tx)

    with pytest.raises(WriteRefusedError) as caught:
        store.write(operation)
    assert (caught.value.phase, caught.value.executed, len(log)) == ("body", True, 2)
    with pytest.raises(StoreError) as read:
        store.read(operation)
    assert not isinstance(read.value, WriteRefusedError)
    assert count(store) == 0


@both_servers
def test_a_connection_lost_during_commit_leaves_the_write_unknown(store: Store, kill: Callable[[int], None]) -> None:
    log: list[int] = []

    def operation(tx: Tx) -> None:
        add()(tx)
        log.append(session(tx))
        kill(log[-1])

    with pytest.raises(WriteUnknownError) as caught:
        store.write(operation)
    assert (caught.value.phase, len(log)) == ("commit", 1), "nothing is retried blindly"
    assert store.write(add("after")) == 1


@both_servers
def test_a_read_that_had_read_everything_does_not_need_its_commit(store: Store, kill: Callable[[int], None]) -> None:
    def operation(tx: Tx) -> int:
        kill(session(tx))
        return 42

    assert store.read(operation) == 42


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_server_out_of_reach_is_a_refusal_with_nothing_executed(scheme: str, open_on: Callable[..., Store]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # bound, and nobody listens
        store = open_on(f"{scheme}://root@127.0.0.1:{port}/test")
        with pytest.raises(WriteRefusedError) as caught:
            store.write(add())
        assert (caught.value.phase, caught.value.executed) == ("connect", False)
        with pytest.raises(StoreError):
            count(store)
        before = store.clock.now()
        assert store.clock.now() >= before, "time goes on all the same"


@both_servers
def test_the_number_of_connections_is_bounded_however_many_threads_write(store: Store) -> None:
    """C59."""
    sessions: set[int] = set()

    def operation(tx: Tx) -> int:
        sessions.add(session(tx))
        return add()(tx)

    store.write(operation)

    def work() -> None:
        for _ in range(5):
            store.write(operation)
            sessions.add(store.read(session))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(store) == 161
    assert len(sessions) <= servers.MAX_THREADS


@both_servers
def test_what_is_urgent_never_waits_behind_writers_that_wait_for_a_row(
    store: Store, database_url: str, open_on: Callable[..., Store]
) -> None:
    """RECLAIM-5, QUEUE-6: nor does one urgent write behind another, nor the question for the time; two connections more serve all that."""
    sessions: list[int] = []
    store.clock.correction._due_at = 0  # type: ignore[attr-defined]
    store.clock.now()
    assert not store._engine.serves_urgent, "a process that does not beat needs none of them"  # type: ignore[union-attr]

    def urgent(name: str) -> Background:
        return Background(lambda: store.write(lambda tx: [sessions.append(session(tx)), add(name)(tx)], urgent=True))

    with all_waiting(store, open_on(database_url)):
        urgent("beat").result()
        waiting = urgent("locked")
        eventually(lambda: len(sessions) == 2)
        store.clock.correction._due_at = 0  # type: ignore[attr-defined]
        Background(store.clock.now).result()
        assert not store.clock.correction.is_due()  # type: ignore[attr-defined]
        for _ in range(3):
            urgent("beat").result()
        assert waiting.running
    waiting.result()
    assert count(store, "beat") == 4
    assert len(set(sessions)) == servers.URGENT_THREADS


# --- conflicts -------------------------------------------------------------------------------------------------------


def deadlock(store: Store) -> tuple[list[Any], list[str]]:
    """Two writes that lock two rows in opposite order, the first time that each runs."""
    store.write(lambda tx: [add("a")(tx), add("b")(tx)])
    meeting = threading.Barrier(2)
    runs: list[str] = []
    results: list[Any] = []

    def operation(first: str, second: str) -> Callable[[Tx], None]:
        def run(tx: Tx) -> None:
            runs.append(first)
            add(first)(tx)
            if runs.count(first) == 1:
                meeting.wait(20)
            add(second)(tx)

        return run

    def write(first: str, second: str) -> None:
        try:
            results.append(store.write(operation(first, second)))
        except BaseException as exc:
            results.append(exc)

    threads = [threading.Thread(target=write, args=order) for order in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, runs


@both_servers
def test_the_loser_of_a_deadlock_is_run_again(store: Store) -> None:
    """DRIVE-7."""
    results, runs = deadlock(store)
    assert results == [None, None]
    assert len(runs) >= 3  # on a busy machine the two may meet once more
    assert (count(store, "a"), count(store, "b")) == (3, 3)


@both_servers
def test_the_loser_of_a_deadlock_is_refused_when_its_attempts_are_spent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_ATTEMPTS", 1)
    results, runs = deadlock(store)
    (refused,) = (result for result in results if result is not None)
    assert isinstance(refused, WriteRefusedError)
    assert (refused.phase, refused.executed, len(runs)) == ("body", True, 2)
    assert (count(store, "a"), count(store, "b")) == (2, 2)


@postgresql_only
def test_swallowed_error_is_refused_at_commit(store: Store) -> None:
    """CLAIM-3: PostgreSQL answers COMMIT of an aborted transaction with a rollback, and no error."""
    seen: list[int] = []

    def operation(tx: Tx) -> str:
        tx.after_commit(lambda: seen.append(1))
        add()(tx)
        with pytest.raises(peewee.ProgrammingError):
            tx.run("DELETE FROM nowhere")
        return "done"

    with pytest.raises(WriteRefusedError, match="swallowed") as caught:
        store.write(operation)
    assert caught.value.phase == "commit"
    assert is_lost_commit(caught.value)
    assert (count(store), seen) == (0, [])


@postgresql_only
@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
@pytest.mark.parametrize("anew", [True, False])
def test_a_transaction_that_a_hook_has_replaced_is_unknown(store: Store, end: str, anew: bool) -> None:
    """CLAIM-3: COMMIT would succeed, and what was written before is gone, or was committed by somebody else."""

    def operation(tx: Tx) -> None:
        add("a")(tx)
        tx.run(end)
        if anew:
            tx.run("BEGIN")
            add("b")(tx)

    with pytest.raises(WriteUnknownError, match="ended before COMMIT") as caught:
        store.write(operation)
    assert is_lost_commit(caught.value)
    assert (count(store, "a"), count(store, "b")) == (1 if end == "COMMIT" else 0, 0)


@mariadb_only
def test_a_transaction_that_ended_inside_its_operation_is_unknown(store: Store) -> None:
    """A swallowed deadlock or a DDL statement ends it, and what follows is committed statement by statement."""

    def operation(tx: Tx) -> None:
        add()(tx)
        tx.run("ROLLBACK")
        add()(tx)

    with pytest.raises(WriteUnknownError):
        store.write(operation)
    assert count(store) == 1


@mariadb_only
def test_a_violated_check_is_the_operations_fault(store: Store) -> None:
    with pytest.raises((peewee.IntegrityError, peewee.OperationalError), match="CONSTRAINT"):
        store.write(
            lambda tx: tx.run(
                "INSERT INTO {blocks} (run_id, sequence, kind, size, created_at) VALUES ('r', 1, 'parallel', -1, 0)"
            )
        )


@both_servers
def test_a_value_too_long_for_its_column_is_refused_not_cut(store: Store) -> None:
    """C49, in MySQL's lenient mode too."""
    with pytest.raises(peewee.DataError):
        store.write(lambda tx: tx.run("INSERT INTO {tags} (run_id, name) VALUES (?, 'k')", ("x" * 200,)))
    assert store.read(lambda tx: tx.all("SELECT run_id FROM {tags}")) == []


@mariadb_only
def test_a_value_larger_than_the_servers_packet_is_the_operations_fault(store: Store) -> None:
    """C49: the server would drop the connection, which looks like an outage that never ends."""
    limit = store.read(lambda tx: tx.one("SELECT @@max_allowed_packet"))
    assert limit is not None
    insert = "INSERT INTO {results} (id, expires_at, value) VALUES (?, 0, ?)"
    for value in (b"x" * (limit[0] // 2), "'" * (limit[0] // 2), "ä" * (limit[0] // 2)):
        with pytest.raises(peewee.DataError, match="max_allowed_packet"):
            store.write(lambda tx, value=value: tx.run(insert, ("large", value)))  # type: ignore[misc]
    room = limit[0] - 5000
    for value in (b"x" * (room // 2), "x" * room, "'" * (room // 2), "ä" * (room // 2)):
        key = f"{value[0]!r} {len(value)}"
        assert store.write(lambda tx, value=value, key=key: tx.run(insert, (key, value))) == 1  # type: ignore[misc]


@both_servers
def test_reads_cannot_write(store: Store) -> None:
    with pytest.raises((StoreError, peewee.PeeweeException)):
        store.read(add())
    assert count(store) == 0


# --- pools -----------------------------------------------------------------------------------------------------------


@both_servers
def test_a_pool_gets_its_connections_back_after_each_operation(
    database_url: str, open_on: Callable[..., Store], store: Store, kill: Callable[[int], None]
) -> None:
    scheme, rest = database_url.split("://")
    database: Any = connect(f"{scheme}+pool://{rest}", max_connections=2, timeout=10)
    pooled = open_on(database)
    number = pooled.write(session)
    assert pooled.write(add()) == 1
    assert database._in_use == {}
    kill(number)
    assert pooled.write(add()) == 2
    with pooled.database.atomic():
        pooled.write(add())
    pooled.close_thread()
    with pytest.raises(ValueError):
        pooled.write(lambda tx: (_ for _ in ()).throw(ValueError))
    threads = [threading.Thread(target=pooled.write, args=(add(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(store) == 11
    assert database._in_use == {}
    level = {"postgresql": "SHOW transaction_isolation", "mysql": "SELECT @@SESSION.tx_isolation"}[store.dialect]
    with database.connection_context():
        shown = database.execute_sql(level).fetchone()[0].lower().replace("-", " ")
    assert shown == {"postgresql": "read committed", "mysql": "repeatable read"}[store.dialect], "as the host has it"
    database.close_all()


@both_servers
def test_an_exhausted_pool_is_a_refusal(database_url: str, open_on: Callable[..., Store], store: Store) -> None:
    scheme, rest = database_url.split("://")
    database: Any = connect(f"{scheme}+pool://{rest}", max_connections=1)
    pooled = open_on(database)
    with database.connection_context():
        with pytest.raises(WriteRefusedError) as caught:
            pooled.write(add())
        assert (caught.value.phase, caught.value.executed) == ("connect", False)
    assert pooled.write(add()) == 1
    database.close_all()


# --- the clock -------------------------------------------------------------------------------------------------------


class Skewed:
    """This machine's clock, wrong by so much."""

    def __init__(self) -> None:
        self.right, self.by = clocks.SystemClock(), 0

    def now(self) -> int:
        return self.right.now() + self.by


@both_servers
def test_a_machine_whose_clock_is_wrong_goes_by_the_servers(
    database_url: str, open_on: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLOCK-1, C52: asked before the first connection; and again at once when this machine's clock was set."""
    machine = Skewed()
    monkeypatch.setattr(clocks, "_machine", machine)
    monkeypatch.setattr(
        clocks.SystemClock, "now", lambda self: machine.now() + self.offset_ms if self is not machine.right else real(self)
    )
    for by in (0, 90_000, -7_200_000):
        machine.by = by
        store = open_on(database_url)
        assert abs(store.clock.now() - machine.right.now()) < 5_000
        machine.by = by + 3_600_000
        assert abs(store.clock.now() - machine.right.now()) < 5_000
        machine.by = by - 3_600_000
        store.write(add())
        assert abs(store.clock.now() - machine.right.now()) < 5_000


real = clocks.SystemClock.now


@both_servers
def test_a_clock_that_the_host_gives_is_corrected_if_it_is_the_machines_and_left_alone_otherwise(
    database_url: str, open_on: Callable[..., Store]
) -> None:
    machine, manual = clocks.SystemClock(), Manual()
    machine.offset_ms = 10**9
    open_on(database_url, clock=machine).write(add())
    assert abs(machine.offset_ms) < 5_000
    store = open_on(database_url, clock=manual)
    store.write(add())
    assert store.clock.now() == 42


class Manual:
    def now(self) -> int:
        return 42


@both_servers
def test_the_time_can_be_asked_for_inside_an_operation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine thread may be at work and none is left to ask the server: it must not be waited for."""
    monkeypatch.setattr(clocks.Correction, "is_due", lambda self: True)
    ready = threading.Barrier(servers.MAX_THREADS)
    times: list[int] = []

    def operation(tx: Tx) -> None:
        ready.wait(20)
        times.append(store.clock.now())

    threads = [threading.Thread(target=store.write, args=(operation,)) for _ in range(servers.MAX_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(times) == servers.MAX_THREADS
