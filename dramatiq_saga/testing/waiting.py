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
_WAITS = "SELECT run_id, sequence, kind, name, due_at FROM {waits} WHERE status = 'waiting' ORDER BY run_id, sequence"

_NAMES = {"signal": "signal", "timer": "a timer", "retry": "the retry signal"}


def next_due(engine: Engine, now: int) -> int | None:
    """The next moment after ``now`` that a row names: a deadline, or the end of a wait."""
    found = engine.store.read(lambda tx: [tx.one(sql, (now,)) for sql in _MOMENTS])
    moments = [row[0] for row in found if row is not None and row[0] is not None]
    return min(moments) if moments else None


def open_waits(engine: Engine) -> list[str]:
    """What runs wait for."""
    now = engine.now()
    return [
        f"run {run_id} waits at {sequence} for {_NAMES[kind]}{'' if name is None else f' {name!r}'}{_until(kind, due_at, now)}"
        for run_id, sequence, kind, name, due_at in engine.store.read(lambda tx: tx.all(_WAITS))
    ]


def _until(kind: str, due_at: int | None, now: int) -> str:
    if due_at is None:
        return ""
    return f" due {_when(due_at, now)}" if kind == "timer" else f", given up {_when(due_at, now)}"


def _when(due: int, now: int) -> str:
    return "now" if due <= now else f"in {timedelta(milliseconds=due - now)}"


def tells_of_itself(letter: Letter) -> bool:
    """Whether it is a message that only says to look at the rows, which are told of by themselves."""
    message = letter.message
    return not (is_ours(message) and message.options[OPTION]["kind"] == "timer")


def due_in(letter: Letter, now: int) -> str:
    """A message in words."""
    message = letter.message
    when = _when(letter.due, now)
    if not is_ours(message):
        return f"a message to {message.actor_name} {when}"
    facts = message.options[OPTION]
    what = facts["kind"] if "sequence" not in facts else f"{facts['kind']} {facts['sequence']} ({message.actor_name})"
    return f"{what} of run {facts['run']} {when}"
