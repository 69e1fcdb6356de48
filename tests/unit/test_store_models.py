"""The tables: their names, what they refuse, and which index serves which question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peewee
import pytest

from dramatiq_saga.statuses import ActionStatus, ChildStatus, CompensationStatus, FlowStatus
from dramatiq_saga.store import models
from dramatiq_saga.store.database import Store, Tx, open_store

FLOW = {
    "id": "r", "workflow": "w", "queue": "q", "status": "pending", "rollback": "none", "revision": 0, "wakes": 0,
    "wakes_seen": 0, "hold_count": 0, "expiry_attempts": 0, "repair_attempts": 0, "created_at": 1, "args_digest": "", "args": b"",
}  # fmt: skip
ACTION = {
    "run_id": "r", "sequence": 1, "actor": "a", "queue": "q", "status": "pending", "given_up": False, "attempts": 0, "tries": 0,
    "claims": 0, "cycle": 0, "optional": False, "comp_from_result": False, "comp_on_self_failure": False,
    "comp_parallel": False, "held_back": False, "repair_attempts": 0, "created_at": 1, "args": b"",
}  # fmt: skip
MESSAGE = {
    "queue": "q", "state": 0, "priority": 0, "available_at": 0, "attempts": 0, "actor": "a", "message_id": "m",
    "enqueued_at": 0, "message": b"",
}  # fmt: skip


def insert(tx: Tx, table: str, row: dict[str, Any], **changes: Any) -> int:
    row = {**row, **changes}
    return tx.run(f"INSERT INTO {{{table}}} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))


@pytest.fixture
def store(sqlite_path: Path) -> Iterator[Store]:
    store = open_store(sqlite_path)
    yield store
    store.close()


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["saga_", "", "A" * 24, "_x1"])
def test_a_prefix_leads_every_table_and_every_index(prefix: str) -> None:
    database = peewee.SqliteDatabase(":memory:")
    database.connect()
    database.create_tables(models.build(database, prefix).all())
    names = [
        name for (name,) in database.execute_sql("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
    ]
    assert all(name.startswith(prefix) for name in names)
    assert {name.removeprefix(prefix) for name in names} > set(models.TABLES)
    assert max(map(len, names)) <= 63 - (24 - len(prefix)), "PostgreSQL cuts longer names"
    database.close()


@pytest.mark.parametrize("prefix", ["1a", "a-b", "a b", "é", "A" * 25, 'x"; DROP TABLE y; --', "a.b"])
def test_a_prefix_that_some_database_could_not_take_is_refused(prefix: str) -> None:
    """SAFE-2: it is the one thing that is spelled into statements."""
    with pytest.raises(ValueError, match="table_prefix"):
        models.build(peewee.SqliteDatabase(None), prefix)


def test_saving_a_model_is_refused(store: Store) -> None:
    """STATUS-1: it would write the whole row, whatever has happened to it since."""
    model: Any = store.models.flow_runs
    with pytest.raises(TypeError, match="conditional statements only"):
        model(id="r").save()
    with pytest.raises(TypeError, match="conditional statements only"):
        model.create(id="r")


# --- what the database refuses ---------------------------------------------------------------------------------------

IMPOSSIBLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("flow_runs", FLOW, {"status": "nonsense"}),
    ("flow_runs", FLOW, {"rollback": "nonsense"}),
    ("flow_runs", FLOW, {"status": "completed"}),
    ("flow_runs", FLOW, {"ended_at": 1}),
    ("flow_runs", FLOW, {"status": "rolling_back"}),
    ("flow_runs", FLOW, {"wakes_seen": 1}),
    ("action_runs", ACTION, {"status": "nonsense"}),
    ("action_runs", ACTION, {"status": "running"}),
    ("action_runs", ACTION, {"status": "running", "started_at": 1}),
    ("action_runs", ACTION, {"status": "completed", "ended_at": 2}),
    ("action_runs", ACTION, {"status": "completed", "started_at": 1, "attempts": 1}),
    ("action_runs", ACTION, {"status": "cancelled"}),
    ("action_runs", ACTION, {"attempts": -1}),
    ("messages", MESSAGE, {"state": 4}),
    ("messages", MESSAGE, {"state": 2}),
    ("messages", MESSAGE, {"reserved_at": 1, "lease_until": 2}),
    ("messages", MESSAGE, {"state": 3}),
    ("messages", MESSAGE, {"died_at": 1}),
]


@pytest.mark.parametrize(("table", "row", "changes"), IMPOSSIBLE, ids=str)
def test_an_impossible_row_cannot_be_stored(store: Store, table: str, row: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(peewee.IntegrityError):
        store.write(lambda tx: insert(tx, table, row, **changes))


def test_a_sequence_is_used_once_per_run_and_table(store: Store) -> None:
    store.write(lambda tx: insert(tx, "action_runs", ACTION))
    with pytest.raises(peewee.IntegrityError):
        store.write(lambda tx: insert(tx, "action_runs", ACTION))
    store.write(lambda tx: insert(tx, "action_runs", ACTION, run_id="s"))


def test_every_status_of_the_vocabulary_can_be_stored(store: Store) -> None:
    done = {"started_at": 1, "ended_at": 2, "attempts": 1}

    def operation(tx: Tx) -> int:
        stored = 0
        for index, status in enumerate(FlowStatus):
            ended = 2 if status.is_terminal else None
            stored += insert(tx, "flow_runs", FLOW, id=f"r{index}", status=status, ended_at=ended, ends_as="failed")
        for index, step in enumerate(ActionStatus):
            optional = {"optional": True, "given_up": True} if step == ActionStatus.OPTIONAL_FAILED else {}
            stored += insert(tx, "action_runs", ACTION, sequence=index, status=step, **done, **optional)
        for index, compensation in enumerate(CompensationStatus):
            row = {
                **{key: ACTION[key] for key in ("run_id", "actor", "queue", "tries", "claims", "repair_attempts", "created_at", "args")},
                "level": 0, "undoes": "completed", "undoes_key": "", "policy": "stop", "given_up": False,
            }  # fmt: skip
            stored += insert(tx, "compensation_runs", row, sequence=index, status=compensation, **done)
        for index, child in enumerate(ChildStatus):
            row = {
                "run_id": "r", "child_id": "c", "workflow": "w", "close_policy": "abandon", "cycle": 0, "optional": False,
                "comp_from_result": False, "comp_parallel": False, "created_at": 0, "ended_at": 2, "args": b"",
            }  # fmt: skip
            stored += insert(tx, "children", row, sequence=index, status=child)
        return stored

    assert store.write(operation) == len(FlowStatus) + len(ActionStatus) + len(CompensationStatus) + len(ChildStatus)


def test_the_id_of_a_message_is_never_used_again(store: Store) -> None:
    """QUEUE-2: a second acknowledgement of one message cannot meet another message's row."""

    def operation(tx: Tx) -> list[Any]:
        insert(tx, "messages", MESSAGE)
        first = tx.one("SELECT id FROM {messages}")
        tx.run("DELETE FROM {messages}")
        insert(tx, "messages", MESSAGE)
        return [first, tx.one("SELECT id FROM {messages}")]

    first, second = store.write(operation)
    assert first != second


# --- indexes ---------------------------------------------------------------------------------------------------------

LIVE, UNHAPPY = models.LIVE, models.UNHAPPY_FLOW
QUESTIONS = [
    ("SELECT id FROM {messages} WHERE queue = ? AND state = 0 ORDER BY priority, enqueued_at, id LIMIT ?", "queue_ready"),
    ("SELECT id FROM {messages} WHERE queue = ? AND state = 1 AND available_at <= ? ORDER BY available_at", "queue_delayed"),
    ("SELECT id FROM {messages} WHERE queue = ? AND state = 2 AND lease_until <= ? ORDER BY lease_until", "queue_leased"),
    ("SELECT id FROM {messages} WHERE state = 3 ORDER BY died_at DESC, id DESC LIMIT ?", "queue_dead"),
    (f"SELECT id FROM {{flow_runs}} WHERE wakes > wakes_seen AND {LIVE} AND woken_at < ? ORDER BY woken_at", "flow_unseen"),
    (f"SELECT id FROM {{flow_runs}} WHERE hold_until IS NOT NULL AND {LIVE} AND hold_until < ?", "flow_held"),
    (f"SELECT id FROM {{flow_runs}} WHERE expires_at < ? AND {LIVE} ORDER BY expires_at LIMIT ?", "flow_expiry"),
    ("SELECT id FROM {flow_runs} WHERE ended_at < ? LIMIT ?", "flow_ended"),
    ("SELECT id FROM {flow_runs} WHERE rollback = 'halted' ORDER BY created_at, id LIMIT ?", "flow_halted"),
    ("SELECT id FROM {flow_runs} WHERE rollback = 'running' ORDER BY created_at LIMIT ?", "flow_undoing"),
    ("SELECT id FROM {flow_runs} WHERE parent_id = ?", "flow_children"),
    ("SELECT id FROM {flow_runs} WHERE created_at < ? ORDER BY created_at DESC, id DESC LIMIT ?", "flow_created"),
    (f"SELECT id FROM {{flow_runs}} WHERE status = ? AND {LIVE} ORDER BY created_at DESC, id DESC LIMIT ?", "flow_live"),
    (f"SELECT id FROM {{flow_runs}} WHERE status = ? AND {UNHAPPY} ORDER BY created_at, id LIMIT ?", "flow_unhappy"),
    (f"SELECT run_id FROM {{action_runs}} WHERE {models.LIVE} AND created_at < ?", "action_live"),
    (f"SELECT run_id FROM {{action_runs}} WHERE expires_at < ? AND {models.LIVE}", "action_expiry"),
    (f"SELECT run_id FROM {{compensation_runs}} WHERE {models.LIVE} AND created_at < ?", "comp_live"),
    (f"SELECT level FROM {{compensation_runs}} WHERE run_id = ? AND {models.LIVE} ORDER BY level LIMIT 1", "comp_open"),
    ("SELECT 1 FROM {compensation_runs} WHERE run_id = ? AND level < ? AND given_up = TRUE AND policy = 'stop'", "comp_stopped"),
    ("SELECT run_id FROM {waits} WHERE status = 'waiting' AND due_at <= ? ORDER BY due_at", "wait_due"),
    ("SELECT sequence FROM {waits} WHERE run_id = ? AND status = 'waiting' AND name = ?", "wait_name"),
    ("SELECT id FROM {signals} WHERE run_id = ? AND name = ? AND status = 'received' ORDER BY id", "signal_run"),
    ("SELECT id FROM {signals} WHERE run_id = ? AND dedup_key = ?", "signal_key"),
    ("SELECT run_id FROM {children} WHERE child_id = ?", "child_run"),
    (f"SELECT 1 FROM {{children}} WHERE run_id = ? AND block = ? AND {models.LIVE}", "child_open"),
    (f"SELECT 1 FROM {{action_runs}} WHERE run_id = ? AND block IS NOT NULL AND block = ? AND {models.LIVE}", "action_block"),
    ("SELECT id, name FROM {signals} WHERE run_id = ? AND status = 'received' ORDER BY id", "signal_open"),
    ("SELECT run_id FROM {tags} WHERE name = ? AND value = ?", "tag_value"),
    ("SELECT id FROM {flow_events} WHERE run_id = ? ORDER BY id", "event_run"),
    ("SELECT id FROM {results} WHERE expires_at < ?", "result_expiry"),
    ("SELECT id FROM {rate_limits} WHERE expires_at < ?", "rate_expiry"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "index"), QUESTIONS, ids=[index for _, index in QUESTIONS])
def test_each_question_is_answered_by_its_index_without_sorting(store: Store, question: str, index: str) -> None:
    """C56: no hot statement scans a table or sorts; partial indexes hold live rows only."""
    parameters = ("x",) * question.count("?")
    plan = [row[3] for row in store.read(lambda tx: tx.all("EXPLAIN QUERY PLAN " + question, parameters))]
    assert any(f"saga_{index}" in step for step in plan), plan
    assert not any("TEMP B-TREE" in step for step in plan), plan


def test_a_search_by_status_names_the_index_that_serves_it() -> None:
    """SQLite uses a partial index only for a statement that repeats its predicate."""
    assert models.narrowed(["running", FlowStatus.ROLLING_BACK]) == LIVE
    assert models.narrowed(["failed", "expired"]) == UNHAPPY
    assert [models.narrowed(statuses) for statuses in ([], ["completed"], ["running", "failed"])] == [None, None, None]


def test_every_index_answers_a_question(store: Store) -> None:
    """One that answers none costs every write."""
    found = store.read(lambda tx: tx.all("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"))
    assert {name.removeprefix("saga_") for (name,) in found} == {index for _, index in QUESTIONS}
