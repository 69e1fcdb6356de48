"""What the engine reads and what it is about to write, as plain values.

A :class:`Snapshot` is a run as one read transaction saw it: the run's row and everything its function has asked for so
far, by sequence. It is never changed in place; a drive that adds to it makes a new one. So it can be cached per process and
shared between threads: ``revision`` and ``wakes`` say whether it is still what the database holds, and every write that
rests on it repeats both in its ``WHERE`` (DRIVE-1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step as recorded. ``value`` hands out a fresh copy of its decoded result (CODEC-4)."""

    sequence: int
    actor: str
    status: str
    given_up: bool = False
    attempts: int = 0
    cycle: int = 0
    value: Callable[[], Any] | None = None
    error: str | None = None
    optional: bool = False
    comp_actor: str | None = None
    comp_ready: bool = False
    comp_from_result: bool = False
    comp_on_self_failure: bool = False
    kind = "step"

    def describe(self) -> str:
        return f"step {self.actor!r}"

    def settled(
        self, *, status: str, given_up: bool, attempts: int, value: Callable[[], Any] | None, error: str | None
    ) -> StepEntry:
        """This step with an outcome. (``dataclasses.replace`` would be most of a replay's cost.)"""
        return StepEntry(
            self.sequence, self.actor, status, given_up, attempts, self.cycle, value, error, self.optional, self.comp_actor,
            self.comp_ready, self.comp_from_result, self.comp_on_self_failure,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SideEffectEntry:
    """A side effect's recorded value (SIDE-1)."""

    sequence: int
    name: str
    value: Callable[[], Any]
    kind = "side effect"

    def describe(self) -> str:
        return f"side effect {self.name!r}"


Entry = StepEntry | SideEffectEntry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One run as one read transaction saw it. ``entries[n]`` is what was asked for at sequence ``n + 1``."""

    run_id: str
    workflow: str
    version: str | None
    queue: str
    priority: int | None
    options: str | None
    status: str
    rollback: str
    revision: int
    wakes: int
    wakes_seen: int
    args: Callable[[], Any]
    context: bytes | None
    hold_count: int
    entries: tuple[Entry, ...] | list[Entry]
    tags: dict[str, str | None]

    def moved(
        self, *, status: str, revision: int, wakes: int, wakes_seen: int, hold_count: int, entries: list[Entry],
        tags: dict[str, str | None],
    ) -> Snapshot:  # fmt: skip
        """The run as it stands after a write. (``dataclasses.replace`` would be most of a replay's cost.)"""
        return Snapshot(
            self.run_id, self.workflow, self.version, self.queue, self.priority, self.options, status, self.rollback, revision,
            wakes, wakes_seen, self.args, self.context, hold_count, entries, tags,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompensationSpec:
    """How a step is undone: the actor, and its encoded arguments once they are known."""

    actor: str
    args: bytes | None
    options: str | None = None


@dataclass(slots=True)
class NewStep:
    """A step that the function has asked for and the database does not hold yet."""

    sequence: int
    actor: str
    queue: str
    priority: int | None
    options: dict[str, Any] | None
    args: bytes
    max_claims: int | None = None
    reclaim_stale_after_seconds: int | None = None
    compensation: CompensationSpec | None = None
    comp_from_result: bool = False
    comp_on_self_failure: bool = False
    comp_policy: str | None = None
    comp_reclaim_stale_after_seconds: int | None = None
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that is to be sent: which row it is about, and how it travels."""

    kind: str  # drive | step | compensation
    run_id: str
    actor: str
    queue: str
    sequence: int = 0
    cycle: int = 0
    attempts: int = 0
    tries: int = 0
    priority: int | None = None
    options: dict[str, Any] | None = None
    delay: int | None = None


@dataclass(slots=True)
class Decision:
    """What one replay leads to. Nothing of it exists until ``decision.commit`` has landed."""

    kind: str  # suspended | completed | failed
    steps: list[NewStep] = field(default_factory=list)
    resolved: list[tuple[int, CompensationSpec]] = field(default_factory=list)
    tags: dict[str, str | None] = field(default_factory=dict)
    result: bytes | None = None
    error: str | None = None
    outside: bool = False  # only something from outside can move the run
