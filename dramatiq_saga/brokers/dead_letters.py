"""Looking at the queues from outside: depths, the messages of one run, and those that were given up (QUEUE-5).

Dead letters stay in the queue's table until they are requeued or purged. Requeueing is one conditional ``UPDATE``: two
operators who requeue the same one send it once. Nothing here is on a worker's path.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dramatiq.errors import DecodeError
from dramatiq.message import Message

from ..codec import storable
from .reservations import DEAD, DELAYED, READY, RESERVED

if TYPE_CHECKING:
    from ..store.database import Tx
    from .messages import DatabaseMessageProxy

#: Longest reason that is kept, in characters; what is longer loses its middle.
MAX_REASON = 4000

#: Message options that count tries: an operator's requeue renews them.
TRY_OPTIONS = ("retries", "traceback", "requeue_timestamp")

_STATES = {READY: "ready", DELAYED: "delayed", RESERVED: "reserved", DEAD: "dead"}
_STATS = "SELECT queue, state, COUNT(*) FROM {messages} GROUP BY queue, state"
# The state is part of the text: a partial index serves only a statement that repeats its predicate.
_CARRYING = (
    "SELECT m.id, m.queue, m.enqueued_at, m.available_at, m.lease_until, m.died_at, m.message FROM "
    "(SELECT * FROM {{messages}} WHERE state = {state} LIMIT ?) m WHERE {holds} LIMIT ?"
)
_HOLDS = {  # differs because: each has its own function that finds bytes in bytes
    "sqlite": "instr(m.message, ?) > 0",
    "postgresql": "position(CAST(? AS BYTEA) IN m.message) > 0",
    "mysql": "LOCATE(CAST(? AS BINARY), m.message) > 0",
}
_COUNT_STATE = "SELECT COUNT(*) FROM (SELECT 1 FROM {{messages}} WHERE state = {state} LIMIT ?) m"
_WAITING = "SELECT message FROM {{messages}} WHERE state = {state}"
_COLUMNS = "id, queue, actor, message_id, reason, attempts, enqueued_at, died_at, message"
_LIST = f"SELECT {_COLUMNS} FROM {{messages}} WHERE state = 3 ORDER BY died_at DESC, id DESC LIMIT ?"
_LIST_QUEUE = f"SELECT {_COLUMNS} FROM {{messages}} WHERE state = 3 AND queue = ? ORDER BY died_at DESC, id DESC LIMIT ?"
_GET = f"SELECT {_COLUMNS} FROM {{messages}} WHERE state = 3 AND id = ?"
_REQUEUE = (
    "UPDATE {messages} SET state = 0, attempts = 0, available_at = ?, enqueued_at = ?, died_at = NULL, reason = NULL,"
    " message = ? WHERE id = ? AND state = 3 AND died_at = ?"
)
_PURGE = "DELETE FROM {messages} WHERE state = 3 AND died_at < ?"
_PURGE_QUEUE = "DELETE FROM {messages} WHERE state = 3 AND died_at < ? AND queue = ?"
_FLUSH = "DELETE FROM {messages} WHERE queue = ? AND state IN (0, 1, 2)"

_NEVER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up. Times are milliseconds UTC; ``attempts`` counts its deliveries."""

    id: int
    queue: str
    actor: str
    message_id: str
    reason: str
    attempts: int
    enqueued_at: int
    died_at: int
    payload: bytes

    @property
    def message(self) -> Message[Any] | None:
        """The decoded message; ``None`` where it cannot be decoded."""
        try:
            return Message.decode(self.payload)
        except DecodeError:
            return None


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message that was looked for. ``at`` is when it was sent, is due, when its reservation runs out, or when it died.

    ``state`` is ``ready``, ``delayed``, ``reserved`` or ``dead``; ``options`` is ``None`` where it cannot be decoded.
    """

    id: int
    queue: str
    state: str
    at: int
    options: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """How many rows of one queue are in which state."""

    queue: str
    ready: int = 0
    delayed: int = 0
    reserved: int = 0
    dead: int = 0


def stats(tx: Tx) -> list[QueueStats]:
    """One entry per queue that has rows, by name."""
    counts: dict[str, dict[int, int]] = {}
    for queue, state, count in tx.all(_STATS):
        counts.setdefault(queue, {})[state] = count
    return [
        QueueStats(queue, *(states.get(state, 0) for state in (READY, DELAYED, RESERVED, DEAD)))
        for queue, states in sorted(counts.items())
    ]


def newest(tx: Tx, queue: str | None, limit: int) -> list[DeadLetter]:
    """Up to ``limit`` dead letters, the newest first."""
    rows = tx.all(_LIST, (limit,)) if queue is None else tx.all(_LIST_QUEUE, (queue, limit))
    return [_letter(row) for row in rows]


def carrying(tx: Tx, text: str, *, looked_at: int, limit: int) -> tuple[list[FoundMessage], bool]:
    """The messages that carry ``text`` in what is stored of them, at most ``limit`` of each state; and whether every message was looked at.

    At most ``looked_at`` messages of each state are, so that a deep queue does not keep a reader for long.
    """
    needle = json.dumps(text)[1:-1].encode()
    found, complete = [], True
    for state, word in _STATES.items():
        sql = _CARRYING.format(state=state, holds=_HOLDS[tx.dialect])
        for id_, queue, enqueued_at, available_at, lease_until, died_at, payload in tx.all(sql, (looked_at, needle, limit)):
            at = {READY: enqueued_at, DELAYED: available_at, RESERVED: lease_until, DEAD: died_at}[state]
            found.append(FoundMessage(id_, queue, word, at, _options_of(bytes(payload))))
        count = tx.one(_COUNT_STATE.format(state=state), (looked_at,))
        complete = complete and count is not None and count[0] < looked_at
    return found, complete


def waiting(tx: Tx, *, looked_at: int) -> list[dict[str, Any] | None] | None:
    """The options of every message that is no dead letter, ``None`` for one that cannot be decoded; ``None`` for a deep queue.

    That is one with more than ``looked_at`` messages in a state; then none is read.
    """
    states = [state for state in _STATES if state != DEAD]
    for state in states:
        count = tx.one(_COUNT_STATE.format(state=state), (looked_at + 1,))
        if count is None or count[0] > looked_at:
            return None
    return [_options_of(bytes(row[0])) for state in states for row in tx.all(_WAITING.format(state=state))]


def _options_of(payload: bytes) -> dict[str, Any] | None:
    try:
        options: object = Message.decode(payload).options
    except Exception:  # whatever the row holds, and whatever an application's encoder makes of it
        return None
    return options if isinstance(options, dict) else None


def requeue(tx: Tx, letter_id: int, now: int) -> DeadLetter | None:
    """Make a dead letter ready again with its tries renewed; ``None`` when it is not there, or no longer dead."""
    row = tx.one(_GET, (letter_id,))
    if row is None:
        return None
    letter = _letter(row)
    landed = tx.run(_REQUEUE, (now, now, _with_tries_renewed(letter), letter.id, letter.died_at)) == 1
    return letter if landed else None


def purge(tx: Tx, queue: str | None, before: int | None) -> int:
    """Delete dead letters that died before that moment (``None``: all); how many there were."""
    horizon = _NEVER if before is None else before
    return tx.run(_PURGE, (horizon,)) if queue is None else tx.run(_PURGE_QUEUE, (horizon, queue))


def flush(tx: Tx, queue: str) -> int:
    """Delete every message of a queue that is not a dead letter, reserved ones too; how many there were."""
    return tx.run(_FLUSH, (queue,))


def reason_of(proxy: DatabaseMessageProxy) -> str:
    """Why a message is being rejected, for people: the error, then its traceback."""
    error = proxy._exception
    if error is None:
        return "rejected without an error"
    return reason_from(error)


def reason_from(error: BaseException) -> str:
    """The error in one line, then its traceback, cut in the middle."""
    text = f"{type(error).__name__}: {error}"
    if error.__traceback__ is not None:
        text += "\n\n" + "".join(traceback.format_exception(error, limit=30))
    if len(text) > MAX_REASON:
        half = MAX_REASON // 2 - 10
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return storable(text)


def _letter(row: tuple[Any, ...]) -> DeadLetter:
    id_, queue, actor, message_id, reason, attempts, enqueued_at, died_at, payload = row
    return DeadLetter(id_, queue, actor, message_id, reason or "", attempts, enqueued_at, died_at, bytes(payload))


def _with_tries_renewed(letter: DeadLetter) -> bytes:
    message = letter.message
    options: object = None if message is None else message.options  # whatever the row holds
    if message is None or not isinstance(options, dict) or not any(name in options for name in TRY_OPTIONS):
        return letter.payload
    for name in TRY_OPTIONS:
        message.options.pop(name, None)
    return message.encode()
