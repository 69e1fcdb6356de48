"""Group commit on SQLite's writer thread (QUEUE-8), and what its callers are told."""

from __future__ import annotations

import ctypes
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peewee
import pytest

from dramatiq_saga.errors import DatabaseUnusableError, StoreError, WriteRefusedError, WriteUnknownError
from dramatiq_saga.store import writer
from dramatiq_saga.store.database import Store, Ticket, Tx, open_store
from tests.support.processes import Process
from tests.support.stores import Faults, Standstill, add, count, faulty_store, sqlite_error, write_lock_held
from tests.support.threads import writer_threads
from tests.support.waiting import eventually


@pytest.fixture
def store(sqlite_path: Path) -> Iterator[Store]:
    with faulty_store(sqlite_path) as (store, _):
        yield store


@pytest.fixture
def faults(store: Store) -> Faults:
    factory: Any = store.database.connect_params["factory"]
    faults: Faults = factory.faults
    return faults


def submit_together(store: Store, *operations: Callable[[Tx], Any]) -> list[Ticket[Any]]:
    """Submit while the writer stands still, so that all of them wait for one batch."""
    standstill = Standstill(store)
    tickets = [store.submit(operation) for operation in operations]
    standstill.end()
    return tickets


def counted(operation: Callable[[Tx], Any], log: list[str], name: str = "n") -> Callable[[Tx], Any]:
    def run(tx: Tx) -> Any:
        log.append(name)
        return operation(tx)

    return run


def failing(tx: Tx) -> None:
    add("lost")(tx)
    raise ValueError("mine")


def outcome(ticket: Ticket[Any]) -> Any:
    try:
        return ticket.result()
    except Exception as exc:
        return type(exc)


# --- batches ---------------------------------------------------------------------------------------------------------


def test_operations_that_wait_together_share_one_transaction(store: Store, faults: Faults) -> None:
    tickets = submit_together(store, *[add()] * 20)

    assert sorted(ticket.result() for ticket in tickets) == list(range(1, 21))
    assert (faults.count("BEGIN IMMEDIATE"), faults.count("COMMIT")) == (1, 1)


def test_a_batch_is_bounded(store: Store, faults: Faults) -> None:
    tickets = submit_together(store, *[add()] * (writer.MAX_BATCH + 1))

    assert max(ticket.result() for ticket in tickets) == writer.MAX_BATCH + 1
    assert faults.count("BEGIN IMMEDIATE") == 2


def test_an_operation_that_raises_takes_no_other_down(store: Store, faults: Faults) -> None:
    """QUEUE-8: the batch is rolled back whole, and each of its operations runs again in a root of its own."""
    log: list[str] = []
    tickets = submit_together(
        store, counted(add(), log, "a"), counted(failing, log, "x"), counted(add(), log, "b"), counted(add(), log, "c")
    )

    assert [outcome(ticket) for ticket in tickets] == [1, ValueError, 2, 3]
    assert (count(store), count(store, "lost")) == (3, 0)
    assert log == ["a", "x", "a", "x", "b", "c"], "who came after the failure was not even begun"
    assert faults.count("BEGIN IMMEDIATE") == 4


def test_what_an_operation_raises_reaches_its_caller_unchanged(store: Store) -> None:
    store.write(lambda tx: tx.run("INSERT INTO {rate_limits} (id, value, expires_at) VALUES ('a', 1, 0)"))
    with pytest.raises(peewee.IntegrityError) as caught:
        store.write(lambda tx: tx.run("INSERT INTO {rate_limits} (id, value, expires_at) VALUES ('a', 2, 0)"))
    assert isinstance(caught.value.orig, sqlite3.IntegrityError)
    with pytest.raises(KeyboardInterrupt):
        store.write(lambda tx: (_ for _ in ()).throw(KeyboardInterrupt))
    assert store.write(add()) == 1


def test_an_operation_alone_is_never_executed_again(store: Store) -> None:
    """QUEUE-4 counts its statements: whoever was alone in its root is refused at once."""
    log: list[str] = []
    with pytest.raises(ValueError):
        store.write(counted(failing, log))
    assert log == ["n"]


def test_a_failed_commit_leaves_the_whole_batch_unknown_and_runs_nothing_again(store: Store, faults: Faults) -> None:
    log: list[str] = []
    factory: Any = store.database.connect_params["factory"]
    opened = factory.opened
    faults.before("COMMIT", sqlite_error(5))
    tickets = submit_together(store, *[counted(add(), log)] * 5)

    for ticket in tickets:
        with pytest.raises(WriteUnknownError) as caught:
            ticket.result()
        assert (caught.value.phase, caught.value.sqlite_errorcode, caught.value.executed) == ("commit", 5, True)
        assert isinstance(caught.value.__cause__, peewee.OperationalError)
    assert len(log) == 5
    assert faults.count("BEGIN IMMEDIATE") == 1
    assert store.write(add()) == 1
    assert factory.opened == opened + 1, "the writer works on, on a connection that nothing has happened to"


def test_a_rollback_that_cannot_be_proven_makes_the_batch_unknown(store: Store, faults: Faults) -> None:
    log: list[str] = []
    faults.before("ROLLBACK TO", sqlite_error(10))
    tickets = submit_together(store, counted(add(), log), counted(failing, log))

    assert [outcome(ticket) for ticket in tickets] == [WriteUnknownError, WriteUnknownError]
    assert len(log) == 2
    assert store.write(add()) == 1


def test_an_operation_whose_own_root_is_unknown_does_not_touch_the_others(store: Store, faults: Faults) -> None:
    faults.before("COMMIT", sqlite_error(5))
    tickets = submit_together(store, add(), add(), failing)

    assert [outcome(ticket) for ticket in tickets] == [WriteUnknownError, 1, ValueError]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_operations_that_waited_out_the_timeout_together_are_refused_together(
    sqlite_path: Path, python_process: Callable[..., Process]
) -> None:
    """QUEUE-3: nobody in the queue waits for a second timeout; nothing was executed and everything may be tried again."""
    with faulty_store(sqlite_path, timeout=0.2) as (store, faults):
        log: list[str] = []
        with write_lock_held(python_process, sqlite_path):
            tickets = submit_together(store, *[counted(add(), log)] * (writer.MAX_BATCH * 2))
            for ticket in tickets:
                with pytest.raises(WriteRefusedError) as caught:
                    ticket.result()
                assert (caught.value.phase, caught.value.sqlite_errorcode, caught.value.executed) == ("begin", 5, False)
                assert isinstance(caught.value.__cause__, peewee.OperationalError)
        assert faults.count("BEGIN IMMEDIATE") == 1
        assert log == []
        assert store.write(add()) == 1


def test_rest_of_a_batch_is_refused_with_the_one_that_waited(store: Store, faults: Faults) -> None:
    """The lock was lost between the batch and the roots of its operations: it is waited for once."""
    log: list[str] = []
    faults.before("BEGIN IMMEDIATE", sqlite_error(5), skip=2)
    tickets = submit_together(store, *[counted(add(), log)] * 4, counted(failing, log))

    assert outcome(tickets[0]) == 1
    for ticket in tickets[1:]:
        with pytest.raises(WriteRefusedError) as caught:
            ticket.result()
        assert (caught.value.phase, caught.value.executed) == ("begin", True)
    assert faults.count("BEGIN IMMEDIATE") == 3
    assert (count(store), len(log)) == (1, 6)


def test_a_statement_refused_for_contention_is_a_refusal_with_its_code(store: Store, faults: Faults) -> None:
    faults.before("UPDATE", sqlite_error(517))
    with pytest.raises(WriteRefusedError) as caught:
        store.write(add())
    assert (caught.value.phase, caught.value.sqlite_errorcode, caught.value.executed) == ("body", 517, True)


@pytest.mark.parametrize("code", [13, 778, 7], ids=["disk full", "write error", "no memory"])
def test_a_failing_disk_is_a_refusal_not_the_operations_fault(store: Store, faults: Faults, code: int) -> None:
    """The step's outcome is kept and tried again (FENCE-3) instead of being taken for a value that cannot be stored."""
    faults.before("UPDATE", sqlite_error(code))
    with pytest.raises(WriteRefusedError) as caught:
        store.write(add())
    assert caught.value.sqlite_errorcode == code


def test_a_file_that_became_read_only_is_told_with_the_way_out(store: Store, faults: Faults, sqlite_path: Path) -> None:
    faults.before("UPDATE", sqlite_error(8, "attempt to write a readonly database"))
    with pytest.raises(DatabaseUnusableError, match="read-only") as caught:
        store.write(add())
    assert str(sqlite_path) in str(caught.value)


def test_a_wrong_statement_is_the_operations_fault(store: Store) -> None:
    with pytest.raises(peewee.OperationalError, match="no such table"):
        store.write(lambda tx: tx.run("DELETE FROM nowhere"))


# --- withdrawing, interrupts -----------------------------------------------------------------------------------------


def test_withdrawn_operation_is_never_executed(store: Store) -> None:
    log: list[str] = []
    standstill = Standstill(store)
    kept, withdrawn = store.submit(counted(add(), log, "kept")), store.submit(counted(add(), log, "withdrawn"))
    assert withdrawn.cancel()
    assert not withdrawn.cancel()
    standstill.end()

    assert kept.result() == 1
    assert not kept.cancel(), "it is too late, so there is no proof"
    with pytest.raises(WriteRefusedError) as caught:
        withdrawn.result()
    assert not caught.value.executed
    assert log == ["kept"]


class _Interrupt(BaseException):
    pass


def interrupt(thread: threading.Thread) -> None:
    """Throw an exception at a thread, the way Dramatiq's time limit does."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupt))


def test_an_interrupted_waiter_can_still_read_its_outcome(store: Store) -> None:
    """FENCE-5: the interrupt surfaces once the outcome is known; the transaction never notices."""
    seen: list[Any] = []
    inside = threading.Event()
    ticket: Ticket[int] = Ticket(add())

    def wait() -> None:
        try:
            inside.set()
            store.submit(ticket).result()
            seen.append("not interrupted")
        except _Interrupt:
            seen.append(ticket.result())

    standstill = Standstill(store)
    thread = threading.Thread(target=wait)
    thread.start()
    assert inside.wait(20)
    interrupt(thread)
    standstill.end()
    thread.join(20)

    assert seen == [1]
    assert count(store) == 1


def test_interrupts_thrown_at_writing_threads_poison_nothing(store: Store) -> None:
    """Interrupted at any point, a caller either withdraws its operation or learns what became of it."""
    known, withdrawn, unsent = 0, 0, 0

    def work(ready: threading.Event, outcomes: list[str]) -> None:
        ticket: Ticket[int] | None = None
        try:
            ready.set()
            while True:
                ticket = Ticket(add())
                store.submit(ticket).result()
                outcomes.append("committed")
                ticket = None
        except _Interrupt:
            if ticket is not None:
                outcomes.append("withdrawn" if ticket.cancel() else str(ticket.result()))

    for _ in range(30):
        ready, outcomes = threading.Event(), list[str]()
        thread = threading.Thread(target=work, args=(ready, outcomes))
        thread.start()
        ready.wait()
        eventually(lambda outcomes=outcomes: outcomes, because="it has written once")  # type: ignore[misc]
        interrupt(thread)
        thread.join(20)
        assert not thread.is_alive()
        withdrawn += outcomes.count("withdrawn")
        known += len(outcomes) - outcomes.count("withdrawn")

    assert unsent == 0
    # A row more than is known: an outcome was read and the interrupt came before it was noted.
    assert known <= count(store) <= known + 30
    assert store.write(add("after")) == 1


# --- after the commit ------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_callers_thread_once_the_commit_is_known(store: Store) -> None:
    seen: list[Any] = []

    def operation(tx: Tx) -> int:
        tx.after_commit(lambda: seen.append((threading.current_thread(), count(store), store.joined())))
        return add()(tx)

    assert store.write(operation) == 1
    assert seen == [(threading.current_thread(), 1, False)]

    ticket = store.submit(operation)
    eventually(lambda: ticket.done)
    assert len(seen) == 1, "not before the outcome is read"
    ticket.result()
    ticket.result()
    assert len(seen) == 2, "once"


def test_callbacks_are_those_of_the_run_that_committed(store: Store) -> None:
    seen: list[str] = []

    def operation(tx: Tx) -> None:
        tx.after_commit(lambda: seen.append("called"))
        add()(tx)

    tickets = submit_together(store, operation, failing)
    assert [outcome(ticket) for ticket in tickets] == [None, ValueError]
    assert seen == ["called"]


def test_no_callback_runs_for_what_was_not_committed(store: Store, faults: Faults) -> None:
    seen: list[str] = []

    def raising(tx: Tx) -> None:
        tx.after_commit(lambda: seen.append("called"))
        raise ValueError

    def unknown(tx: Tx) -> None:
        tx.after_commit(lambda: seen.append("called"))

    with pytest.raises(ValueError):
        store.write(raising)
    faults.before("COMMIT", sqlite_error(5))
    with pytest.raises(WriteUnknownError):
        store.write(unknown)
    store.write(add())
    assert seen == []


def test_a_callback_that_fails_is_logged_and_the_next_one_runs(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """EVENT-2."""
    seen: list[str] = []

    def operation(tx: Tx) -> str:
        tx.after_commit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        tx.after_commit(lambda: seen.append("called"))
        return "value"

    with caplog.at_level(logging.ERROR, "dramatiq_saga"):
        assert store.write(operation) == "value"
    assert seen == ["called"]
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_write(store: Store) -> None:
    store.write(lambda tx: tx.after_commit(lambda: store.write(add())))
    assert count(store) == 1


def test_what_waits_with_peewee_for_the_commit_is_not_lost(store: Store) -> None:
    seen: list[int] = []

    def operation(tx: Tx) -> int:
        store.database.after_commit(lambda: seen.append(count(store)))
        return add()(tx)

    def raising(tx: Tx) -> None:
        store.database.after_commit(lambda: seen.append(-1))
        raise ValueError

    with pytest.raises(ValueError):
        store.write(raising)
    store.write(operation)
    assert seen == [1]


# --- from inside an operation ----------------------------------------------------------------------------------------


def test_a_call_from_inside_an_operation_joins_it_and_never_waits_for_itself(store: Store) -> None:
    """HOST-1."""
    seen: list[str] = []

    def inner(tx: Tx) -> int:
        tx.after_commit(lambda: seen.append("inner"))
        return add()(tx)

    def outer(tx: Tx) -> tuple[int, int, int]:
        assert store.joined()
        first = store.write(inner)
        second = store.submit(inner).result()
        assert seen == []
        return first, second, store.read(add())

    assert store.write(outer) == (1, 2, 3)
    assert seen == ["inner", "inner"]
    with pytest.raises(ValueError):
        store.write(lambda tx: (store.write(inner), failing(tx)))
    assert (count(store), len(seen)) == (3, 2)


def test_a_nested_operation_that_fails_leaves_no_trace_in_the_outer_one(store: Store) -> None:
    seen: list[str] = []

    def nested(tx: Tx) -> None:
        tx.after_commit(lambda: seen.append("nested"))
        failing(tx)

    def outer(tx: Tx) -> int:
        tx.after_commit(lambda: seen.append("outer"))
        with pytest.raises(ValueError):
            store.write(nested)
        return add()(tx)

    assert store.write(outer) == 1
    assert (count(store, "lost"), seen) == (0, ["outer"])


def test_models_used_inside_an_operation_are_part_of_its_transaction(store: Store) -> None:
    model: Any = store.models.rate_limits

    def operation(tx: Tx) -> None:
        model.insert(id="model", value=1, expires_at=0).execute()
        assert tx.one("SELECT value FROM {rate_limits} WHERE id = 'model'") == (1,)
        raise ValueError

    with pytest.raises(ValueError):
        store.write(operation)
    assert count(store, "model") == 0


# --- the thread and its file -----------------------------------------------------------------------------------------


def test_no_host_ever_sees_a_connection_of_the_engine(store: Store) -> None:
    """C59."""
    store.write(add())
    count(store)
    assert store.database.is_closed()


def test_closing_finishes_what_is_queued_and_the_next_write_opens_again(store: Store) -> None:
    others = writer_threads()
    standstill = Standstill(store)
    ticket = store.submit(add())
    closing = threading.Thread(target=store.close)
    closing.start()
    standstill.end()
    closing.join()

    assert ticket.result() == 1
    assert writer_threads() <= others
    assert store.write(add()) == 2


def test_write_that_races_close_is_not_lost(store: Store) -> None:
    stop, written, problems = threading.Event(), [0, 0, 0, 0], list[BaseException]()

    def work(index: int) -> None:
        try:
            while not stop.is_set():
                store.write(add())
                written[index] += 1
        except BaseException as exc:
            problems.append(exc)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(written))]
    for thread in threads:
        thread.start()
    for _ in range(50):
        store.close()
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "it waits for an operation that nobody has"
    assert problems == []
    assert count(store) == sum(written)


class Preempted:
    """A queue at which a submitting thread is held up until the store has been closed."""

    def __init__(self, queue: Any, meanwhile: Callable[[], None]) -> None:
        self._queue, self._meanwhile = queue, meanwhile

    def put(self, ticket: Any) -> None:
        if ticket is not None:
            self._meanwhile()
        self._queue.put(ticket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def test_a_write_that_arrives_behind_the_end_of_the_queue_is_handed_on(store: Store) -> None:
    """The race of the test before this one, at its narrowest point."""
    engine: Any = store._engine
    store.write(add())
    engine._thread.queue = Preempted(engine._thread.queue, store.close)
    assert store.write(add()) == 2


def test_a_question_about_the_schema_that_close_overtakes_is_still_answered(store: Store) -> None:
    standstill = Standstill(store)
    ticket = store.submit(add())
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(store.schema_version()))
    asking.start()
    engine: Any = store._engine
    eventually(lambda: engine._thread.queue.qsize() == 2, because="the question waits behind the write")
    closing = threading.Thread(target=store.close)
    closing.start()
    eventually(lambda: engine._thread is None)
    standstill.end()
    for thread in (asking, closing):
        thread.join(20)
    assert (ticket.result(), answers) == (1, ["0001"])


def test_a_fault_of_the_writer_itself_leaves_nobody_waiting(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = store._engine
    monkeypatch.setattr(engine._thread, "_root", lambda body: 1 / 0)
    with pytest.raises(WriteUnknownError):
        store.write(add())
    monkeypatch.undo()
    assert store.write(add()) == 1


def test_a_file_that_was_deleted_is_noticed_instead_of_taking_lost_writes(
    store: Store, sqlite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FILE_CHECK_INTERVAL", -1)
    store.write(add())
    count(store)
    for suffix in ("", "-wal", "-shm"):
        Path(str(sqlite_path) + suffix).unlink(missing_ok=True)

    with pytest.raises(DatabaseUnusableError, match="deleted or replaced"):
        store.write(add())
    assert store.write(add()) == 1, "the tables are created anew"
    assert count(store) == 1, "and readers follow"


# --- forks -----------------------------------------------------------------------------------------------------------


def in_child(function: Callable[[], Any]) -> None:
    """Run ``function`` in a forked child; fails with what it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "ok"
        try:
            function()
        except BaseException as exc:
            text = repr(exc)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    assert told == "ok"


def test_a_forked_child_uses_neither_the_thread_nor_a_connection_of_its_parent(store: Store, faults: Faults) -> None:
    store.write(add())
    count(store)
    factory: Any = store.database.connect_params["factory"]
    opened = factory.opened

    def child() -> None:
        assert not any(thread.name == "dramatiq-saga-writer" for thread in threading.enumerate())
        assert count(store) == 1
        assert store.write(add()) == 2
        assert factory.opened == opened + 2, "a writer and a reader of its own"
        store.close()

    in_child(child)
    assert store.write(add()) == 3
    assert factory.opened == opened


def test_a_fork_waits_until_the_writer_is_between_transactions(store: Store) -> None:
    """A child born while its parent holds SQLite's write lock would find the file locked for ever: locks are copied with it."""
    store.write(add())
    inside, go_on = threading.Event(), threading.Event()

    def slow(tx: Tx) -> int:
        inside.set()
        assert go_on.wait(20)
        return add()(tx)

    ticket = store.submit(slow)
    assert inside.wait(20)
    threading.Timer(0.2, go_on.set).start()

    def child() -> None:
        assert store.write(add()) == 3
        store.close()

    in_child(child)
    assert ticket.result() == 2
    assert store.write(add()) == 4


def test_a_fork_inside_a_host_transaction_leaves_it_to_the_parent(store: Store) -> None:
    """The child would commit the parent's transaction, and the parent's commit would be lost."""
    with store.database.atomic("IMMEDIATE"):
        store.write(add())

        def child() -> None:
            assert store.database.is_closed()
            assert not store.joined()
            assert count(store) == 0, "not committed yet"

        in_child(child)
    assert count(store) == 1


def test_a_fork_while_a_lock_of_the_engine_is_held_does_not_hang_the_child(store: Store) -> None:
    store.write(add())
    engine: Any = store._engine
    database: Any = store.database
    with engine._lock, database._lock:
        in_child(lambda: store.write(add()))
    assert count(store) == 2


# --- in memory -------------------------------------------------------------------------------------------------------


def test_a_database_in_memory_is_read_on_the_writer_thread() -> None:
    store = open_store(":memory:")
    assert store.write(add()) == 1
    assert count(store) == 1
    with store.database.atomic(), pytest.raises(StoreError, match="in-memory"):
        store.write(add())
    store.close()
    store.close_thread()
