"""A store with a past: any number of runs that have ended, and some that are live, put there by a few statements.

``ended`` writes rows as an application leaves them: each run of three steps and eight lines of history, some undone, some with a
signal, a child, a block. ``at_work`` adds runs in the middle of something: nothing of them is lost or overdue, so a sweep has nothing
to do, and what it costs is what looking costs. ``lost`` adds runs whose messages are gone. Works on every database.
"""

from __future__ import annotations

from typing import Any

from dramatiq_saga.store import models
from dramatiq_saga.store.database import Store, Tx

#: Milliseconds between the ends of two runs: a million of them take three months.
APART = 8_000

#: A run's history: sequence and word.
LINES = [
    (None, "flow.started"), *((step, word) for step in (1, 2, 3) for word in ("action.started", "action.completed")),
    (None, "flow.completed"),
]  # fmt: skip

_DIGIT = " UNION ALL ".join(f"SELECT {digit} AS d" for digit in range(10))
_STEPS = "(SELECT 1 AS s UNION ALL SELECT 2 UNION ALL SELECT 3) steps"


def ended(store: Store, finished: int, *, workflow: str = "trip", queue: str = "default") -> None:
    """Runs ``done-…``, which ended from an hour before now on backwards."""
    now = store.clock.now()
    insert = _Insert(store, {"workflow": workflow, "queue": queue, "actor": "book_hotel"})
    created = f"{now - 3_600_000} - ({finished} - n.n) * {APART}"
    times = {"created_at": created, "ended_at": f"{created} + 5000"}
    done = insert.text("done-")
    insert(
        "flow_runs", finished, id=done, **times, started_at=created, revision=4, wakes=4, wakes_seen=4, result=b"1",
        rollback=_if(8, "'done'", "'none'"),
        status="CASE n.d0 WHEN 8 THEN 'failed' WHEN 9 THEN 'cancelled' ELSE 'completed' END",
    )  # fmt: skip
    step = {**times, "run_id": done, "started_at": created, "attempts": 1, "result": b"1", "sent_at": created}
    insert(
        "action_runs", finished, f"CROSS JOIN {_STEPS}", sequence="steps.s", status="'completed'", comp_actor="'cancel'", **step
    )
    undo = {
        **times, "run_id": done, "started_at": created, "attempts": 1, "undoes": "'completed'", "undoes_key": "'k'", "policy": "'stop'",
    }  # fmt: skip
    insert("compensation_runs", finished, f"CROSS JOIN {_STEPS} WHERE n.d0 = 8", sequence="steps.s", level="3 - steps.s",
           status="'completed'", sent_at=created, **undo)  # fmt: skip
    lines = " UNION ALL ".join(
        f"SELECT {number} AS o, {'NULL' if sequence is None else sequence} AS s, '{word}' AS w"
        for number, (sequence, word) in enumerate(LINES)
    )
    insert("flow_events", finished, f"CROSS JOIN ({lines}) told", run_id=done, at=created, type="told.w", sequence="told.s",
           name="'book_hotel'")  # fmt: skip
    some = {"run_id": done, "created_at": created}
    insert("waits", finished, "WHERE n.d0 = 1", **some, sequence=4, kind="'signal'", name="'paid'", status="'consumed'", ended_at=created,
           due_at=f"{created} + 9000")  # fmt: skip
    insert("signals", finished, "WHERE n.d0 = 1", run_id=done, name="'paid'", status="'consumed'", received_at=created, payload=b"1",
           dedup_key="'once'")  # fmt: skip
    insert("children", finished, "WHERE n.d0 = 2", **some, sequence=5, child_id=done, status="'completed'", close_policy="'abandon'",
           ended_at=created, block=6)  # fmt: skip
    insert("blocks", finished, "WHERE n.d0 = 3", **some, sequence=6, kind="'parallel'", size=2, ended_at=created)
    insert("side_effects", finished, "WHERE n.d0 = 4", **some, sequence=7, name="'now'", value=b"1")
    insert("tags", finished, run_id=done, name="'stage'", value=insert.text("c", digits=4))
    insert("messages", finished, "WHERE n.d0 = 5 AND n.d1 = 5", state=3, died_at=created, message_id=done, reason="'failed'", message=b"{}",
           available_at=created, enqueued_at=created)  # fmt: skip


def at_work(store: Store, count: int, *, workflow: str = "trip", queue: str = "default") -> None:
    """Runs ``live-…``. By the last digit: 0-2 at work (with a deadline for reclaim, without, under a heartbeat), 3-4 with a step that
    has just been sent, 5 waits for a signal, 6 sleeps, 7 is undone, 8 is between two tries, 9 is held."""
    now = store.clock.now()
    insert = _Insert(store, {"workflow": workflow, "queue": queue, "actor": "book_hotel"})
    run, created = insert.text("live-"), f"{now - 600_000} - n.n * 100"
    insert(
        "flow_runs", count, id=run, created_at=created, started_at=created, revision=3, wakes=_if(9, "4", "3"), wakes_seen=3,
        status="CASE n.d0 WHEN 5 THEN 'waiting' WHEN 6 THEN 'waiting' WHEN 7 THEN 'rolling_back' ELSE 'running' END",
        rollback=_if(7, "'running'", "'none'"), ends_as=_if(7, "'failed'", "NULL"), woken_at=_if(9, created, "NULL"),
        hold_until=_if(9, str(now + 900_000), "NULL"), expires_at=f"CASE WHEN n.d0 IN (0, 5, 6, 8) THEN {now + 900_000} ELSE NULL END",
    )  # fmt: skip
    insert("action_runs", count, run_id=run, sequence=1, status="'completed'", created_at=created, started_at=created, ended_at=created,
           attempts=1, result=b"1", comp_actor="'cancel_hotel'", comp_args=b"1")  # fmt: skip
    insert(
        "action_runs", count, "WHERE n.d0 IN (0, 1, 2, 3, 4, 8)", run_id=run, sequence=2, attempts=1, started_at=created,
        status="CASE WHEN n.d0 < 3 THEN 'running' WHEN n.d0 = 8 THEN 'failed' ELSE 'pending' END",
        created_at=f"CASE WHEN n.d0 IN (3, 4) THEN {now - 5_000} ELSE {created} END",
        reclaim_stale_at=_if(0, str(now + 900_000), "NULL"), next_try_at=_if(8, str(now + 60_000), "NULL"),
        worker_id=_if(2, "'beat:here'", "NULL"), expires_at=_if(0, str(now + 600_000), "NULL"),
    )  # fmt: skip
    insert("waits", count, "WHERE n.d0 IN (5, 6)", run_id=run, sequence=2, kind=_if(5, "'signal'", "'timer'"), status="'waiting'",
           name=_if(5, "'paid'", "NULL"), due_at=str(now + 600_000), created_at=created)  # fmt: skip
    insert(
        "compensation_runs", count, f"CROSS JOIN {_STEPS} WHERE n.d0 = 7", run_id=run, sequence="steps.s", level="3 - steps.s",
        status="CASE steps.s WHEN 3 THEN 'running' ELSE 'pending' END", attempts=1, started_at=created, created_at=created,
        undoes="'completed'", undoes_key="'k'", policy="'stop'", reclaim_stale_at=str(now + 900_000),
    )  # fmt: skip
    insert.one("workers", id="'beat:here'", host="'h'", pid=1, started_at=now, seen_at=now)


def lost(store: Store, count: int, *, workflow: str = "trip", queue: str = "default") -> None:
    """Runs ``lost-…``: a step of each is pending, and its message is gone."""
    then = store.clock.now() - 600_000
    insert = _Insert(store, {"workflow": workflow, "queue": queue, "actor": "book_hotel"})
    run = insert.text("lost-")
    insert("flow_runs", count, id=run, status="'running'", created_at=then, revision=1, wakes=1, wakes_seen=1)
    insert("action_runs", count, run_id=run, sequence=1, status="'pending'", created_at=then, sent_at=then)


def analyze(store: Store) -> None:
    """Let the database learn how many rows there are, as it does by itself in the field."""
    word = "ANALYZE TABLE" if store.dialect == "mysql" else "ANALYZE"
    for table in models.TABLES:
        store.write(lambda tx, table=table: tx.run(f"{word} {{{table}}}"))  # type: ignore[misc]


def _if(digit: int, then: str, otherwise: str) -> str:
    return f"CASE n.d0 WHEN {digit} THEN {then} ELSE {otherwise} END"


class _Insert:
    """``insert(table, count, rest of FROM, column=expression, …)``: one row per number ``n.n``, whose last digits are ``n.d0``, ``n.d1``."""

    def __init__(self, store: Store, words: dict[str, str]) -> None:
        self._store = store
        self._words = {name: f"'{word}'" for name, word in words.items()}

    def text(self, before: str, *, digits: int = 12) -> str:
        """The number as text of a fixed length, or its last digits."""
        padded = f"SUBSTR('{'0' * digits}' || n.n, -{digits})"
        if self._store.dialect == "sqlite":
            return f"'{before}' || {padded}"
        number = "CAST(n.n AS CHAR(12))"
        return f"CONCAT('{before}', RIGHT(CONCAT('{'0' * digits}', TRIM({number})), {digits}))"

    def __call__(self, table: str, count: int, more: str = "", /, **given: Any) -> None:
        places = max(2, len(str(count - 1)))
        number = " + ".join(f"{10**place} * x{place}.d" for place in range(places))
        joined = " CROSS JOIN ".join(f"({_DIGIT}) x{place}" for place in reversed(range(places)))
        limit = f"WHERE {number} < {count}"
        self._run(table, f" FROM (SELECT {number} AS n, x0.d AS d0, x1.d AS d1 FROM {joined} {limit}) n {more}", given)

    def one(self, table: str, **given: Any) -> None:
        self._run(table, "", given)

    def _run(self, table: str, source: str, given: dict[str, Any]) -> None:
        model = getattr(self._store.models, table)
        row = {**{name: word for name, word in self._words.items() if name in model._meta.fields}, **given}
        for name, column in model._meta.fields.items():
            if name not in row and not column.null and type(column).__name__ != "BigAutoField":
                row[name] = column.default if column.default is not None else b"1" if "Blob" in type(column).__name__ else ""
        texts = [_literal(value) for value in row.values()]
        params = [value for value in row.values() if isinstance(value, bytes)]
        sql = f"INSERT INTO {{{table}}} ({', '.join(row)}) SELECT {', '.join(texts)}{source}"

        def operation(tx: Tx) -> None:
            tx.run(sql, params)

        self._store.write(operation)


def _literal(value: Any) -> str:
    """A default of a column, a payload, or an expression as it stands."""
    if isinstance(value, bytes):
        return "?"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    return repr(value) if value == "" or value in ("none", "value") else str(value)
