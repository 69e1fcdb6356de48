"""Rows whose message may be gone, and sending it again: what the doctor and an operator's kick have in common.

A message is a hint, so sending one again can at worst cost a lost claim. The invariants: a row is touched only while it is
still in the state that was observed (DOCTOR-2), a fresh message carries the row's attempts, cycle and tries, so nobody's tries
are renewed (NATIVE-1), and no row's budget is spent on a message that the broker did not take. Nothing here changes a status.

Who else may be here: a second sweep with the same listing, a kick, the message that was not lost after all. Each changes
``attempts``, ``status`` or ``repair_attempts``, and the later one finds a condition that no longer holds. Proven by
``tests/races/test_sweeps.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine import notify
from ..engine.rows import Outgoing
from ..engine.wakes import LOCK_RUN, THIS_RUN
from ..errors import MessageNotSentError
from ..journal import history

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..store.database import Tx

STEP, COMPENSATION = "step", "compensation"
TABLES = {STEP: "action_runs", COMPENSATION: "compensation_runs"}

#: Whether the run of a row ``r`` still wants it: steps go forward, compensations while their rollback runs and has not gone on without them.
WANTED = {
    STEP: "EXISTS (SELECT 1 FROM {flow_runs} f WHERE f.id = r.run_id AND f.ended_at IS NULL AND f.status <> 'rolling_back')",
    COMPENSATION: "r.given_up = FALSE AND EXISTS (SELECT 1 FROM {flow_runs} f WHERE f.id = r.run_id AND f.rollback = 'running')",
}


# What may be found among rows that have ended is asked for as a value: PostgreSQL would make a join of NOT EXISTS, and read every run's.
# test_no_sweep_and_no_loop_reads_what_has_ended
def _not_stopped(row: str) -> str:
    return (
        f"(SELECT 1 FROM {{compensation_runs}} s WHERE s.run_id = {row}.run_id AND s.level < {row}.level AND s.given_up = TRUE "
        "AND s.policy = 'stop' LIMIT 1) IS NULL"
    )


#: No level before that of the compensation ``r`` is open, and none has stopped the rollback: the level is the one that runs. (A row
#: that is given up without an end was left behind by its level: PAR-3.)
LEVEL_RUNS = (
    "NOT EXISTS (SELECT 1 FROM {compensation_runs} e WHERE e.run_id = r.run_id AND e.level < r.level AND e.ended_at IS NULL "
    f"AND e.given_up = FALSE) AND {_not_stopped('r')}"
)

#: The rollback of the run ``r`` is still to be ended, and nothing of it is left to be done: every undo has ended, or stands behind a
#: level that has stopped it. Its marker is the moment before which the last of them ended.
UNENDED = (
    "r.rollback = 'running' AND NOT EXISTS (SELECT 1 FROM {compensation_runs} e WHERE e.run_id = r.id AND e.ended_at IS NULL "
    f"AND e.given_up = FALSE AND {_not_stopped('e')}) "
    "AND (SELECT 1 FROM {compensation_runs} c WHERE c.run_id = r.id AND c.ended_at > ? LIMIT 1) IS NULL"
)

#: When the last undo of the run ``r`` ended.
UNDONE_AT = "(SELECT MAX(c.ended_at) FROM {compensation_runs} c WHERE c.run_id = r.id)"

_COLUMNS = (
    "r.run_id, r.sequence, r.actor, r.queue, r.priority, r.options, %s, r.attempts, r.tries, r.status, r.repair_attempts, "
    "r.reclaim_stale_at, %s, (SELECT f.created_at FROM {flow_runs} f WHERE f.id = r.run_id)"
)
COLUMNS = {STEP: _COLUMNS % ("r.cycle", "NULL"), COMPENSATION: _COLUMNS % ("0", "r.not_before")}

_TAKE = (
    "UPDATE {{{table}}} SET repair_attempts = repair_attempts + 1, repair_after = ?, sent_at = COALESCE(sent_at, ?) "
    "WHERE run_id = ? AND sequence = ? AND status = ? AND given_up = FALSE AND attempts = ? AND repair_attempts = ?{more}"
)
_TAKE_STEP = _TAKE.format(
    table="action_runs",
    more=" AND cycle = ? AND EXISTS (SELECT 1 FROM {flow_runs} f WHERE f.id = ? AND f.ended_at IS NULL AND f.status <> 'rolling_back' "
    f"AND f.{THIS_RUN})",
)
_TAKE_COMPENSATION = _TAKE.format(
    table="compensation_runs",
    more=f" AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = ? AND f.rollback = 'running' AND f.{THIS_RUN})",
)
_RETURN = (
    "UPDATE {%s} SET repair_attempts = repair_attempts - 1 WHERE run_id = ? AND sequence = ? AND attempts = ? AND repair_attempts = ? "
    f"AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = run_id AND f.{THIS_RUN})"
)
_RETURN_STEP = _RETURN % "action_runs"
_RETURN_COMPENSATION = _RETURN % "compensation_runs"


@dataclass(frozen=True, slots=True)
class Row:
    """A step or a compensation as a sweep or a kick has seen it."""

    kind: str
    run_id: str
    sequence: int
    actor: str
    queue: str
    priority: int | None
    options: str | None
    cycle: int
    attempts: int
    tries: int
    status: str
    repair_attempts: int
    reclaim_stale_at: int | None
    not_before: int | None
    created_at: int  # of its run

    def message(self) -> Outgoing:
        """A fresh message for the row, with everything it has spent so far."""
        return Outgoing(
            self.kind, self.run_id, self.actor, self.queue, self.sequence, self.cycle, self.attempts, self.tries,
            priority=self.priority, options=json.loads(self.options) if self.options else None,
            created_at=self.created_at,
        )  # fmt: skip

    def line(self, reason: str) -> history.Line:
        """What the run's history says of a message sent again."""
        word = history.ACTION_REDISPATCHED if self.kind == STEP else history.COMPENSATION_REDISPATCHED
        return history.Line(word, sequence=self.sequence, name=self.actor, attempt=self.attempts or None, detail=reason)


def select(kind: str, where: str, *, order: str = "", limit: str = "") -> str:
    """The statement that lists rows of one kind."""
    return f"SELECT {COLUMNS[kind]} FROM {{{TABLES[kind]}}} r WHERE {where}{order and f' ORDER BY {order}'}{limit}"


def read(tx: Tx, kind: str, *, sql: str, params: tuple[object, ...]) -> list[Row]:
    """The rows that a statement of :func:`select` finds."""
    return [Row(kind, *row) for row in tx.all(sql, params)]


def send_again(engine: Engine, sender: Sender, *, row: Row, reason: str, repair_after: int) -> bool:
    """Send a row's message once more and spend one of its repairs; false where the row is no longer as ``row`` has it.

    Raises:
      MessageNotSentError: a broker outside the transaction did not take the message; the repair is not spent.
      StoreError: nothing was sent, or it was sent and only the note of it is missing.
    """
    outbox = sender.outbox(None)
    outbox.load([row.message()])
    now = engine.now()
    lines = [row.line(reason)]

    def take(tx: Tx) -> bool:
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (row.run_id,))  # DRIVE-7: the run's row first
        if not _take(tx, row, repair_after=repair_after, sent_at=now if outbox.joined else None):
            return False
        if outbox.joined:
            engine.record(tx, row.run_id, now, lines)
        outbox.stage(tx)
        return True

    if not engine.store.write(take):
        return False
    try:
        outbox.delivered()
    except MessageNotSentError:
        engine.store.write(lambda tx: _give_back(tx, row))
        raise
    if not outbox.joined:  # told once it is true
        engine.store.write(lambda tx: engine.record(tx, row.run_id, now, lines))
    notify.changes(engine, row.run_id, None, now, lines)
    return True


def _take(tx: Tx, row: Row, *, repair_after: int, sent_at: int | None) -> int:
    params: tuple[Any, ...] = (
        repair_after, sent_at, row.run_id, row.sequence, row.status, row.attempts, row.repair_attempts,
    )  # fmt: skip
    if row.kind == STEP:
        return tx.run(_TAKE_STEP, (*params, row.cycle, row.run_id, row.created_at))
    return tx.run(_TAKE_COMPENSATION, (*params, row.run_id, row.created_at))


def _give_back(tx: Tx, row: Row) -> int:
    sql = _RETURN_STEP if row.kind == STEP else _RETURN_COMPENSATION
    return tx.run(sql, (row.run_id, row.sequence, row.attempts, row.repair_attempts + 1, row.created_at))
