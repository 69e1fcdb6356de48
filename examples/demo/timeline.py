"""A run's history for people: one line for each thing that happened, with the kills put in where they struck."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from dramatiq_saga import FlowHandle

#: What the words of the history mean; what is not here is shown as it is.
WORDS = {
    "action.started": "began",
    "action.completed": "completed",
    "action.failed": "failed",
    "action.given_up": "given up",
    "compensation.step_started": "began",
    "compensation.completed": "undone",
    "compensation.failed": "failed",
    "compensation.given_up": "given up",
    "compensation.started": "rollback begins",
    "rollback.finished": "rollback ends",
    "flow.started": "run started",
    "flow.completed": "run completed",
    "flow.failed": "run failed",
}


class Kill(NamedTuple):
    """When a worker was killed, and in the middle of what."""

    at: int
    run_id: str
    worker: str


def timeline(handle: FlowHandle[Any], kills: Iterable[Kill] = ()) -> Iterator[str]:
    """The lines of one run: seconds since its start, what, and how."""
    events = handle.events()
    lines = [(event.at, _words(event)) for event in events]
    lines += [(kill.at, f"*** worker {kill.worker} killed with SIGKILL ***") for kill in kills if kill.run_id == handle.id]
    start = events[0].at
    for at, text in sorted(lines, key=lambda line: line[0]):
        yield f"{(at - start) / 1000:8.3f} s  {text}"


def _words(event: Any) -> str:
    word = WORDS.get(event.type, event.type)
    detail = ""
    if event.detail and event.type != "flow.started":
        detail = f"  {event.detail}"
    if event.sequence is None:
        return f"{word}{detail}"
    attempt = f"  (attempt {event.attempt})" if event.attempt and event.attempt > 1 and word == "began" else ""
    return f"   {event.sequence} {event.name:<14} {word}{attempt}{detail}"
