"""The SQL of the queue: one conditional statement per change of a row, each told apart by its fence.

Every function runs inside somebody's transaction and says whether it landed. A row goes

    ready -> reserved -> deleted | dead | ready or delayed again
    delayed -> ready once due; reserved -> ready once its lease has lapsed

and whatever ends a reservation repeats the whole fence (id, queue, reservation time, attempt) in its ``WHERE``. The
reservation time stays on the row afterwards and the next one is always later, so a fence is never used twice: not when
an attempt was given back, not when the clock went backwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .messages import Prepared, Reservation

if TYPE_CHECKING:
    from ..store.database import Tx

READY, DELAYED, RESERVED, DEAD = 0, 1, 2, 3

#: How many due and how many lapsed rows one reservation makes available: bounds the work inside the write lock.
SWEEP_LIMIT = 64

_FENCE = " WHERE id = ? AND queue = ? AND reserved_at = ? AND attempts = ? AND state = 2"

_INSERT = (
    "INSERT INTO {messages} (queue, state, priority, available_at, attempts, actor, message_id, message, enqueued_at)"
    " VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)"
)
_DELETE = "DELETE FROM {messages}" + _FENCE
_BURY = "UPDATE {messages} SET state = 3, lease_until = NULL, died_at = ?, reason = ?" + _FENCE
_GIVE_BACK = "UPDATE {messages} SET state = ?, available_at = ?, lease_until = NULL, attempts = attempts - 1" + _FENCE
_POSTPONE = "UPDATE {messages} SET state = ?, available_at = ?, lease_until = NULL, priority = ?, message = ?" + _FENCE
_RECYCLE = (
    "UPDATE {messages} SET queue = ?, state = ?, priority = ?, available_at = ?, lease_until = NULL, attempts = 0,"
    " actor = ?, message_id = ?, message = ?" + _FENCE
)
_HAND_OVER = (
    "UPDATE {messages} SET queue = ?, priority = ?, available_at = ?, reserved_at = ?, attempts = 1, actor = ?, message_id = ?,"
    " message = ?" + _FENCE
)
_RETAIN = "UPDATE {messages} SET priority = ?, actor = ?, message_id = ?, message = ?" + _FENCE
_REROUTE = "UPDATE {messages} SET queue = ?, state = 0, available_at = ?, lease_until = NULL, attempts = attempts - 1" + _FENCE
_EXTEND = "UPDATE {messages} SET lease_until = ?" + _FENCE

# A due row and a lapsed one become ready before anything is picked, so that they compete by priority and age alone: a
# pick among the first few due rows could pass by an urgent one behind them for ever.
_SWEEP = f" LIMIT {SWEEP_LIMIT}"
_DUE_IDS = "SELECT id FROM {messages} WHERE queue = ? AND state = 1 AND available_at <= ? ORDER BY available_at" + _SWEEP
_LAPSED_IDS = "SELECT id FROM {messages} WHERE queue = ? AND state = 2 AND lease_until <= ? ORDER BY lease_until" + _SWEEP
_READY_IDS = "SELECT id FROM {messages} WHERE queue = ? AND state = 0 ORDER BY priority, enqueued_at, id LIMIT ?"
_MAKE_READY = "UPDATE {messages} SET state = 0, lease_until = NULL WHERE id "
_RESERVE = (
    "UPDATE {messages} SET state = 2, reserved_at = GREATEST(?, COALESCE(reserved_at, 0) + 1), lease_until = ?,"
    " attempts = attempts + 1 WHERE id "
)
_RESERVED_COLUMNS = "priority, enqueued_at, id, reserved_at, attempts, message"

_PROMOTE_SQLITE = _MAKE_READY + f"IN (SELECT id FROM ({_DUE_IDS}) UNION ALL SELECT id FROM ({_LAPSED_IDS}))"
_RESERVE_SQLITE = _RESERVE.replace("GREATEST", "MAX") + f"IN ({_READY_IDS}) RETURNING {_RESERVED_COLUMNS}"

# differs because: PostgreSQL has row locks. Rows that somebody else is looking at are passed by; ARRAY() makes the pick run
# exactly once, where a plain IN could run it again and lock more rows than asked for.
_PROMOTE_POSTGRES = (
    _MAKE_READY + f"= ANY(ARRAY(SELECT id FROM ({_DUE_IDS} FOR UPDATE SKIP LOCKED) AS due"
    f" UNION ALL SELECT id FROM ({_LAPSED_IDS} FOR UPDATE SKIP LOCKED) AS lapsed))"
)
_RESERVE_POSTGRES = _RESERVE + f"= ANY(ARRAY({_READY_IDS} FOR UPDATE SKIP LOCKED)) RETURNING {_RESERVED_COLUMNS}"

# differs because: MySQL and MariaDB have no UPDATE .. RETURNING and no LIMIT inside IN. The rows are locked by a SELECT and
# then updated by id.
_LOCK_DUE = _DUE_IDS + " FOR UPDATE SKIP LOCKED"
_LOCK_LAPSED = _LAPSED_IDS + " FOR UPDATE SKIP LOCKED"
_LOCK_READY = (
    "SELECT priority, enqueued_at, id, reserved_at, attempts, message FROM {messages} WHERE queue = ? AND state = 0"
    " ORDER BY priority, enqueued_at, id LIMIT ? FOR UPDATE SKIP LOCKED"
)

_PEEK = (
    "SELECT (SELECT id FROM {messages} WHERE queue = ? AND state = 0 LIMIT 1),"
    " (SELECT MIN(available_at) FROM {messages} WHERE queue = ? AND state = 1),"
    " (SELECT MIN(lease_until) FROM {messages} WHERE queue = ? AND state = 2)"
)


class Delivery(NamedTuple):
    """A row that has just been reserved."""

    reservation: Reservation
    payload: bytes
    lease_until: int


class Peek(NamedTuple):
    """What a queue holds, as far as a consumer has to know."""

    ready: bool
    due_at: int | None
    lapses_at: int | None

    @property
    def is_empty(self) -> bool:
        return not self.ready and self.due_at is None and self.lapses_at is None

    @property
    def next_at(self) -> int | None:
        """When the next row that is not ready becomes available, as things stand."""
        if self.due_at is None or self.lapses_at is None:
            return self.lapses_at if self.due_at is None else self.due_at
        return min(self.due_at, self.lapses_at)


def _fence(reservation: Reservation) -> tuple[object, ...]:
    return (reservation.id, reservation.queue, reservation.reserved_at, reservation.attempt)


def _when(due_at: int | None, now: int) -> tuple[int, int]:
    """State and time for a row that may be delivered from ``due_at`` on."""
    return (READY, now) if due_at is None or due_at <= now else (DELAYED, due_at)


def insert(tx: Tx, prepared: Prepared, *, now: int) -> None:
    """A new row. Message ids may repeat: a retried message keeps its own, and one message may be sent twice."""
    message = prepared.message
    state, available_at = _when(prepared.due_at, now)
    tx.run(
        _INSERT,
        (prepared.queue, state, prepared.priority, available_at, message.actor_name, message.message_id, prepared.payload, now),
    )


def reserve(tx: Tx, queue: str, limit: int, *, now: int, lease_until: int) -> list[Delivery]:
    """Up to ``limit`` available rows, most urgent first, then oldest, then lowest id (QUEUE-1).

    Each gets this reservation's time, a lease and one attempt more, in one statement that requires it to be ready. Rows
    that are due, and rows whose lease has lapsed, are made ready first (at most :data:`SWEEP_LIMIT` of each).
    """
    if tx.dialect == "mysql":
        rows = _reserve_mysql(tx, queue, limit, now, lease_until)
    else:
        promote, pick = (_PROMOTE_SQLITE, _RESERVE_SQLITE) if tx.dialect == "sqlite" else (_PROMOTE_POSTGRES, _RESERVE_POSTGRES)
        tx.run(promote, (queue, now, queue, now))
        rows = tx.all(pick, (now, lease_until, queue, limit))
    rows.sort(key=_by_urgency)  # RETURNING promises no order
    return [
        Delivery(Reservation(id_, queue, reserved_at, attempt), bytes(payload), lease_until)
        for _, _, id_, reserved_at, attempt, payload in rows
    ]


def _by_urgency(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[:3]


def _reserve_mysql(tx: Tx, queue: str, limit: int, now: int, lease_until: int) -> list[tuple[Any, ...]]:
    for lock in (_LOCK_DUE, _LOCK_LAPSED):
        ids = [row[0] for row in tx.all(lock, (queue, now))]
        if ids:
            tx.run(_MAKE_READY + _in(len(ids)), ids)
    rows = []
    for priority, enqueued_at, id_, reserved_at, attempts, payload in tx.all(_LOCK_READY, (queue, limit)):
        at = max(now, (reserved_at or 0) + 1)
        rows.append((priority, enqueued_at, id_, at, attempts + 1, payload))
    if rows:
        tx.run(_RESERVE + _in(len(rows)), (now, lease_until, *(row[2] for row in rows)))
    return rows


def _in(count: int) -> str:
    """``IN (?, ?, ...)`` with room for ``count`` values; ``count`` is bounded by the prefetch and the sweep limit."""
    return "IN (" + ", ".join("?" * count) + ")"


def delete(tx: Tx, reservation: Reservation) -> bool:
    """Acknowledge: the row of this very reservation is gone, or nothing has changed (QUEUE-2)."""
    return tx.run(_DELETE, _fence(reservation)) == 1


def bury(tx: Tx, reservation: Reservation, reason: str, *, now: int) -> bool:
    """Reject: our row becomes a dead letter with its reason (QUEUE-5)."""
    return tx.run(_BURY, (now, reason, *_fence(reservation))) == 1


def give_back(tx: Tx, reservation: Reservation, *, due_at: int | None, now: int) -> bool:
    """Our row is available again from ``due_at`` on, and this attempt was none (QUEUE-7)."""
    return tx.run(_GIVE_BACK, (*_when(due_at, now), *_fence(reservation))) == 1


def postpone(tx: Tx, reservation: Reservation, prepared: Prepared, *, now: int) -> bool:
    """A retry: our row becomes its own next try, in one statement, so that the two can neither both exist nor both vanish."""
    return tx.run(_POSTPONE, (*_when(prepared.due_at, now), prepared.priority, prepared.payload, *_fence(reservation))) == 1


def recycle(tx: Tx, reservation: Reservation, prepared: Prepared, *, now: int) -> bool:
    """Our row becomes another message and keeps its age, so that a run that goes on does not queue up again (QUEUE-1)."""
    state, available_at = _when(prepared.due_at, now)
    message = prepared.message
    values = (prepared.queue, state, prepared.priority, available_at, message.actor_name, message.message_id, prepared.payload)
    return tx.run(_RECYCLE, (*values, *_fence(reservation))) == 1


def reroute(tx: Tx, reservation: Reservation, queue: str, *, now: int) -> bool:
    """Our row moves to the queue that its message names; this attempt was none."""
    return tx.run(_REROUTE, (queue, now, *_fence(reservation))) == 1


def retain(tx: Tx, reservation: Reservation, prepared: Prepared) -> bool:
    """Our row becomes another message and stays reserved by us: after a crash it is redelivered as that message.

    It keeps its place, and so the fence, in our queue even where the message names another; whoever reserves it after a
    crash sends it on (:func:`reroute`).
    """
    message = prepared.message
    return (
        tx.run(_RETAIN, (prepared.priority, message.actor_name, message.message_id, prepared.payload, *_fence(reservation)))
        == 1
    )


def hand_over(tx: Tx, reservation: Reservation, prepared: Prepared, *, now: int) -> Reservation | None:
    """Our row becomes another message that is delivered here at once: a new reservation of the same row, or ``None``.

    The lease goes on, so no index changes; the reservation time is a later one, so the old fence matches nothing any more.
    """
    message = prepared.message
    reserved_at = max(now, reservation.reserved_at + 1)
    values = (prepared.queue, prepared.priority, now, reserved_at, message.actor_name, message.message_id, prepared.payload)
    if tx.run(_HAND_OVER, (*values, *_fence(reservation))) != 1:
        return None
    return Reservation(reservation.id, prepared.queue, reserved_at, 1)


def extend(tx: Tx, reservation: Reservation, lease_until: int) -> bool:
    """Our lease ends later (QUEUE-6); the reservation time does not move."""
    return tx.run(_EXTEND, (lease_until, *_fence(reservation))) == 1


def peek(tx: Tx, queue: str) -> Peek:
    """Whether a reservation would find something, now or when: one statement, three index look-ups."""
    row = tx.one(_PEEK, (queue, queue, queue))
    assert row is not None
    return Peek(row[0] is not None, row[1], row[2])
