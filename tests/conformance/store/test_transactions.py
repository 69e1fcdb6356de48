"""What every store promises of write(), submit() and read()."""

from __future__ import annotations

import threading
from typing import Any

import peewee
import pytest

from dramatiq_saga.errors import WriteRefusedError
from dramatiq_saga.store.database import Store, Ticket, Tx
from tests.support.stores import add, count

INSERT = "INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, ?, 0)"


def test_a_write_returns_what_its_operation_returned_once_it_is_committed(store: Store) -> None:
    assert store.write(add()) == 1
    assert count(store) == 1


def test_an_operation_that_raises_leaves_nothing(store: Store) -> None:
    def operation(tx: Tx) -> None:
        add()(tx)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        store.write(operation)
    assert count(store) == 0


def test_a_violated_constraint_passes_through_and_leaves_nothing(store: Store) -> None:
    store.write(lambda tx: tx.run(INSERT, ("a", 1)))

    def operation(tx: Tx) -> None:
        add()(tx)
        tx.run(INSERT, ("a", 2))

    with pytest.raises(peewee.IntegrityError):
        store.write(operation)
    assert count(store) == 0


def test_run_counts_changed_rows(store: Store) -> None:
    def operation(tx: Tx) -> list[int]:
        return [
            tx.run("INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, 1, 0), (?, 2, 0)", ("a", "b")),
            tx.run("UPDATE {rate_limits} SET value = value + 1"),
            tx.run("UPDATE {rate_limits} SET value = 7 WHERE id = ?", ("nobody",)),
            tx.run("DELETE FROM {rate_limits} WHERE value > ?", (2,)),
        ]

    assert store.write(operation) == [2, 2, 0, 1]


def test_rows_come_as_tuples_and_are_read_to_the_end(store: Store) -> None:
    def operation(tx: Tx) -> list[Any]:
        tx.run(INSERT, ("a", 1))
        tx.run(INSERT, ("b", 2))
        return [
            tx.all("SELECT id, value FROM {rate_limits} ORDER BY id"),
            tx.one("SELECT id, value FROM {rate_limits} ORDER BY id"),
            tx.one("SELECT id FROM {rate_limits} WHERE id = 'c'"),
            tx.all("SELECT id FROM {rate_limits} WHERE id = 'c'"),
        ]

    assert store.write(operation) == [[("a", 1), ("b", 2)], ("a", 1), None, []]


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_statement_that_returns_rows_may_be_run_for_its_count(store: Store) -> None:
    """A cursor left half read would hold the lock and make COMMIT fail."""
    store.write(lambda tx: [tx.run(INSERT, (name, 1)) for name in "abc"])
    assert store.write(lambda tx: tx.run("UPDATE {rate_limits} SET value = 2 RETURNING id")) == 3
    assert store.write(add()) == 1


def test_insert_ignore_passes_by_a_row_that_is_there(store: Store) -> None:
    template = "{insert_ignore} {rate_limits} (id, value, expires_at) VALUES (?, ?, 0){or_ignore}"
    assert store.write(lambda tx: [tx.run(template, ("a", 1)), tx.run(template, ("a", 2))]) == [1, 0]
    assert count(store, "a") == 1


def test_row_locks_can_be_asked_for_everywhere(store: Store) -> None:
    store.write(add())
    for lock in ("for_update", "skip_locked"):
        template = f"SELECT value FROM {{rate_limits}} WHERE id = ?{{{lock}}}"
        assert store.write(lambda tx, template=template: tx.one(template, ("n",))) == (1,)  # type: ignore[misc]


def test_values_of_every_kind_come_back_as_they_were(store: Store) -> None:
    """C49: nothing is cut short; ids are compared byte by byte."""
    payload, text = bytes(range(256)) * 4096 * 3, "ümläut \\ ' \" % ? { \N{PILE OF POO} " * 6000
    big = 2**62

    def operation(tx: Tx) -> None:
        tx.run(
            "INSERT INTO {messages} (queue, state, priority, available_at, attempts, actor, message_id, enqueued_at, reason, message)"
            " VALUES (?, 0, 0, ?, 0, 'a', 'm', 0, ?, ?)",
            ("q", big, text, payload),
        )
        for name in ("Run", "run", "rün", "run."):
            tx.run("INSERT INTO {tags} (run_id, name, value) VALUES (?, 'k', NULL)", (name,))

    store.write(operation)
    assert store.read(lambda tx: tx.one("SELECT available_at, reason, message FROM {messages}")) == (big, text, payload)
    assert len(store.read(lambda tx: tx.all("SELECT run_id FROM {tags}"))) == 4
    assert store.read(lambda tx: tx.all("SELECT run_id FROM {tags} WHERE run_id = 'run'")) == [("run",)]
    assert store.read(lambda tx: tx.all("SELECT run_id FROM {tags} ORDER BY run_id"))[0] == ("Run",)


def test_flags_are_true_or_false_everywhere(store: Store) -> None:
    columns = "run_id, sequence, actor, queue, status, attempts, tries, claims, cycle, optional, comp_from_result, "
    columns += "comp_on_self_failure, comp_parallel, held_back, repair_attempts, created_at, args, given_up"
    values = "'r', ?, 'a', 'q', 'pending', 0, 0, 0, 0, ?, FALSE, FALSE, FALSE, FALSE, 0, 0, ?, ?"
    insert = f"INSERT INTO {{action_runs}} ({columns}) VALUES ({values})"

    def operation(tx: Tx) -> None:
        tx.run(insert, (1, False, b"", True))
        tx.run(insert, (2, True, b"", False))

    store.write(operation)
    found = store.read(lambda tx: tx.all("SELECT sequence FROM {action_runs} WHERE given_up = TRUE AND NOT optional"))
    assert found == [(1,)]
    found = store.read(lambda tx: tx.all("SELECT sequence FROM {action_runs} WHERE given_up = ?", (False,)))
    assert found == [(2,)]


def test_callbacks_run_in_the_callers_thread_after_the_commit(store: Store) -> None:
    seen: list[Any] = []

    def operation(tx: Tx) -> None:
        add()(tx)
        tx.after_commit(lambda: seen.append((threading.current_thread(), count(store), store.joined())))

    def failing(tx: Tx) -> None:
        operation(tx)
        raise ValueError

    store.write(operation)
    with pytest.raises(ValueError):
        store.write(failing)
    assert seen == [(threading.current_thread(), 1, False)]


def test_a_ticket_is_read_later_and_again(store: Store) -> None:
    ticket = store.submit(add())
    assert (ticket.result(), ticket.result(), ticket.done) == (1, 1, True)
    failed = store.submit(lambda tx: tx.run(INSERT, ("n", 1)))
    for _ in range(2):
        with pytest.raises(peewee.IntegrityError):
            failed.result()


def test_a_ticket_withdrawn_in_time_is_never_executed(store: Store) -> None:
    ticket: Ticket[int] = Ticket(add())
    assert ticket.cancel()
    store.submit(ticket)
    with pytest.raises(WriteRefusedError):
        ticket.result()
    store.write(add("other"))
    assert count(store) == 0


def test_writes_of_many_threads_are_all_there(store: Store) -> None:
    store.write(add())

    def work() -> None:
        for _ in range(20):
            store.write(add())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(store) == 161


def test_a_read_sees_one_snapshot(store: Store) -> None:
    store.write(add())

    def operation(tx: Tx) -> list[Any]:
        first = tx.one("SELECT value FROM {rate_limits}")
        thread = threading.Thread(target=store.write, args=(add(),))
        thread.start()
        thread.join()
        return [first, tx.one("SELECT value FROM {rate_limits}")]

    assert store.read(operation) == [(1,), (1,)]
    assert count(store) == 2


def test_a_call_from_inside_an_operation_joins_it(store: Store) -> None:
    """HOST-1: it never waits for itself, and is undone with it."""
    seen: list[str] = []

    def inner(tx: Tx) -> int:
        tx.after_commit(lambda: seen.append("inner"))
        return add()(tx)

    def outer(tx: Tx) -> tuple[int, int]:
        result = store.write(inner), store.read(lambda tx: tx.one("SELECT value FROM {rate_limits}"))[0]  # type: ignore[index]
        assert seen == []
        return result

    def undone(tx: Tx) -> int:
        def failing(tx: Tx) -> None:
            inner(tx)
            tx.run(INSERT, ("n", 1))

        with pytest.raises(peewee.IntegrityError):
            store.write(failing)
        return add()(tx)

    assert store.write(outer) == (1, 1)
    assert store.write(undone) == 2
    assert seen == ["inner"]


def test_models_used_inside_an_operation_are_part_of_its_transaction(store: Store) -> None:
    model: Any = store.models.rate_limits

    def operation(tx: Tx) -> None:
        with store.database.atomic():
            model.insert(id="model", value=1, expires_at=0).execute()
        assert tx.one("SELECT value FROM {rate_limits} WHERE id = 'model'") == (1,)
        raise ValueError

    with pytest.raises(ValueError):
        store.write(operation)
    assert count(store, "model") == 0


def test_a_closed_store_opens_again_at_its_next_use(store: Store) -> None:
    store.write(add())
    store.close()
    store.close()
    assert (store.write(add()), count(store)) == (2, 2)


def test_no_host_sees_a_connection_of_the_engine(store: Store) -> None:
    """C59."""
    store.write(add())
    count(store)
    assert store.database.is_closed()
