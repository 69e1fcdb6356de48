"""The history: every change of a run is one row of ``flow_events``, written in the transaction that makes it (EVENT-1).

The words stand first: a name is what ``flow_events.type`` holds and, where a typed event tells of the same change, what
that event carries as ``type``. Names are stored, so they are never renamed and never reused for something else; new ones may
be added. The writing stands below. Payloads appear as previews, and only where the settings allow it (SAFE-2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ..codec import load_error, preview, storable
from ..errors import in_one_line

if TYPE_CHECKING:
    from ..settings import History
    from ..store.database import Tx

FLOW_STARTED: Final = "flow.started"
FLOW_WAITING: Final = "flow.waiting"
FLOW_RESUMED: Final = "flow.resumed"
FLOW_COMPLETED: Final = "flow.completed"
FLOW_FAILED: Final = "flow.failed"
FLOW_CANCELLED: Final = "flow.cancelled"
FLOW_EXPIRED: Final = "flow.expired"
FLOW_HELD: Final = "flow.held"
FLOW_REDRIVEN: Final = "flow.redriven"
FLOW_CLOSING: Final = "flow.closing"

ACTION_STARTED: Final = "action.started"
ACTION_COMPLETED: Final = "action.completed"
ACTION_FAILED: Final = "action.failed"
ACTION_GIVEN_UP: Final = "action.given_up"
ACTION_RELEASED: Final = "action.released"
ACTION_OPTIONAL_FAILED: Final = "action.optional_failed"
ACTION_EXPIRED: Final = "action.expired"
ACTION_AWAITING_RETRY: Final = "action.awaiting_retry"
ACTION_RETRIED: Final = "action.retried"
ACTION_REDISPATCHED: Final = "action.redispatched"
ACTION_OUTCOME_REJECTED: Final = "action.outcome_rejected"

COMPENSATION_STARTED: Final = "compensation.started"
COMPENSATION_STEP_STARTED: Final = "compensation.step_started"
COMPENSATION_COMPLETED: Final = "compensation.completed"
COMPENSATION_FAILED: Final = "compensation.failed"
COMPENSATION_GIVEN_UP: Final = "compensation.given_up"
COMPENSATION_STEP_RELEASED: Final = "compensation.step_released"
COMPENSATION_REDISPATCHED: Final = "compensation.redispatched"
COMPENSATION_OUTCOME_REJECTED: Final = "compensation.outcome_rejected"
ROLLBACK_FINISHED: Final = "rollback.finished"
ROLLBACK_RESUMED: Final = "rollback.resumed"

CHILD_STARTED: Final = "child.started"
CHILD_COMPLETED: Final = "child.completed"
CHILD_FAILED: Final = "child.failed"
CHILD_EXPIRED: Final = "child.expired"
CHILD_CANCELLED: Final = "child.cancelled"
CHILD_AWAITING_RETRY: Final = "child.awaiting_retry"
CHILD_RETRIED: Final = "child.retried"

SIGNAL_RECEIVED: Final = "signal.received"
SIGNAL_CONSUMED: Final = "signal.consumed"
SIGNAL_TIMED_OUT: Final = "signal.timed_out"
SIDE_EFFECT_RECORDED: Final = "side_effect.recorded"

#: Told by the history only: what an operator reads there and no listener has a class for.
WITHOUT_EVENT: Final = frozenset(
    {
        FLOW_HELD,
        FLOW_REDRIVEN,
        FLOW_CLOSING,
        ACTION_RELEASED,
        COMPENSATION_STEP_RELEASED,
        COMPENSATION_REDISPATCHED,
        ROLLBACK_RESUMED,
    }
)

#: Told to listeners as the event of a failed try, with ``given_up`` set.
GIVEN_UP: Final = frozenset({ACTION_GIVEN_UP, COMPENSATION_GIVEN_UP})

#: Told to listeners only: a refused outcome changes no row and adds no history (FENCE-1).
NOT_RECORDED: Final = frozenset({ACTION_OUTCOME_REJECTED, COMPENSATION_OUTCOME_REJECTED})


class Line(NamedTuple):
    """One change of a run, before it is written."""

    type: str
    sequence: int | None = None
    name: str | None = None
    attempt: int | None = None
    payload: bytes | None = None  # in stored form: previewed when written, unless there is a detail
    error: str | None = None  # as ``codec.describe_error`` made it
    detail: str | None = None
    about: int | None = None  # a signal's id, for those who listen; not stored


@lru_cache(maxsize=64)
def _insert(count: int) -> str:
    row = "(?, ?, ?, ?, ?, ?, ?)"
    return "INSERT INTO {flow_events} (run_id, at, type, sequence, name, attempt, detail) VALUES " + ", ".join([row] * count)


def append(tx: Tx, run_id: str, now: int, lines: Sequence[Line], settings: History) -> None:
    """Write ``lines`` in one statement, in the transaction of the changes they tell of."""
    if not lines:
        return
    params: list[object] = []
    for line in lines:
        params += (run_id, now, line.type, line.sequence, line.name, line.attempt, _detail(line, settings))
    tx.run(_insert(len(lines)), params)


def _detail(line: Line, settings: History) -> str | None:
    if line.payload is not None and line.detail is None:
        return preview(line.payload, settings.max_payload_preview_length) if settings.store_payloads else None
    if line.error is not None:
        error = load_error(line.error)
        if not settings.store_exceptions:
            return str(error["type"].removeprefix("builtins."))
        return storable(in_one_line(error["type"], error["message"]))
    return line.detail
