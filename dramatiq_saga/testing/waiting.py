"""What is left to happen in a test: the moments that rows name, and the same in words.

Only reads. Messages know their own due times; what stands here is what the monitor looks for in the rows. Invariant: a moment that
is not in the future is never named, so that a clock that goes from one to the next always moves.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ..step import OPTION, is_ours

if TYPE_CHECKING:
    from ..engine.core import Engine
    from .stand_in import Letter

_LIVE = "ended_at IS NULL AND status <> 'rolling_back'"
_RUN_EXPIRES = f"SELECT MIN(expires_at) FROM {{flow_runs}} WHERE {_LIVE} AND expires_at > ?"
_STEP_EXPIRES = (
    "SELECT MIN(a.expires_at) FROM {action_runs} a JOIN {flow_runs} f ON f.id = a.run_id WHERE a.expires_at > ? AND a.ended_at IS NULL "
    "AND f.ended_at IS NULL AND f.status <> 'rolling_back'"
)
_WAIT_ENDS = "SELECT MIN(due_at) FROM {waits} WHERE status = 'waiting' AND due_at > ?"
_MOMENTS = (_RUN_EXPIRES, _STEP_EXPIRES, _WAIT_ENDS)
_WAITS = "SELECT run_id, sequence, kind, name FROM {waits} WHERE status = 'waiting' ORDER BY run_id, sequence"


def next_due(engine: Engine, now: int) -> int | None:
    """The next moment after ``now`` that a row names: a deadline, or the end of a wait."""
    found = engine.store.read(lambda tx: [tx.one(sql, (now,)) for sql in _MOMENTS])
    moments = [row[0] for row in found if row is not None and row[0] is not None]
    return min(moments) if moments else None


def open_waits(engine: Engine) -> list[str]:
    """What runs wait for that time alone does not bring."""
    rows = engine.store.read(lambda tx: tx.all(_WAITS))
    return [f"run {run_id} waits at {sequence} for {kind} {name or ''}".rstrip() for run_id, sequence, kind, name in rows]


def due_in(letter: Letter, now: int) -> str:
    """A message in words."""
    message = letter.message
    when = "now" if letter.due <= now else f"in {timedelta(milliseconds=letter.due - now)}"
    if not is_ours(message):
        return f"a message to {message.actor_name} {when}"
    facts = message.options[OPTION]
    what = facts["kind"] if "sequence" not in facts else f"{facts['kind']} {facts['sequence']} ({message.actor_name})"
    return f"{what} of run {facts['run']} {when}"
