"""What is left to happen in a test, in words.

Only reads. What will happen by itself is a message with a due time, deadlines and timers included (TIMER-1); what runs wait for that
somebody has to bring about stands in the rows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ..step import OPTION, is_ours

if TYPE_CHECKING:
    from ..engine.core import Engine
    from .stand_in import Letter

_DEADLINES = (
    "SELECT id, expires_at FROM {flow_runs} WHERE ended_at IS NULL AND status <> 'rolling_back' AND expires_at IS NOT NULL "
    "ORDER BY expires_at, id"
)
_WAITS = "SELECT run_id, sequence, kind, name, due_at FROM {waits} WHERE status = 'waiting' ORDER BY run_id, sequence"

_NAMES = {"signal": "signal", "timer": "a timer", "retry": "the retry signal"}


def open_waits(engine: Engine) -> list[str]:
    """What runs wait for, and when their time is up."""
    now = engine.now()
    waits = [
        f"run {run_id} waits at {sequence} for {_NAMES[kind]}{'' if name is None else f' {name!r}'}{_until(kind, due_at, now)}"
        for run_id, sequence, kind, name, due_at in engine.store.read(lambda tx: tx.all(_WAITS))
    ]
    deadlines = engine.store.read(lambda tx: tx.all(_DEADLINES))
    return waits + [f"run {run_id} expires {_when(expires_at, now)}" for run_id, expires_at in deadlines]


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
