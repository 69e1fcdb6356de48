"""What rows look like from outside: frozen views for events and handles.

A view is a copy of a row as it was when it was read: it reads nothing by itself and changing it is impossible. Fields keep
the columns' names; times are milliseconds since the epoch, UTC. What is stored encoded is kept as ``stored_…`` and decoded
when the property is read, afresh each time, so nobody can change what another listener sees.

``COLUMNS`` of each view lists the columns in the order of its fields: ``ActionView(*row)`` on a row selected that way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .codec import decode, load_error


def _value(data: bytes | None) -> Any:
    return None if data is None else decode(data)


def _as_flags(view: object, *names: str) -> None:
    """SQLite and MySQL keep flags as numbers."""
    for name in names:
        object.__setattr__(view, name, bool(getattr(view, name)))


def _error(text: str | None) -> dict[str, Any] | None:
    return None if text is None else load_error(text)


@dataclass(frozen=True, slots=True)
class ActionView:
    """A step."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "run_id", "sequence", "actor", "queue", "status", "given_up", "attempts", "tries", "claims", "cycle", "optional",
        "block", "position", "args", "result", "error", "worker_id", "next_try_at", "reclaim_stale_at", "expires_at",
        "created_at", "started_at", "ended_at", "held_back",
    )  # fmt: skip

    run_id: str
    sequence: int
    actor: str
    queue: str
    status: str
    given_up: bool
    attempts: int
    tries: int
    claims: int
    cycle: int
    optional: bool
    block: int | None
    position: int | None
    stored_args: bytes
    stored_result: bytes | None
    stored_error: str | None
    worker_id: str | None
    next_try_at: int | None
    reclaim_stale_at: int | None
    expires_at: int | None
    created_at: int
    started_at: int | None
    ended_at: int | None
    held_back: bool = False  # its block has as many members in flight as it may have

    def __post_init__(self) -> None:
        _as_flags(self, "given_up", "optional", "held_back")

    @property
    def idempotency_key(self) -> str:
        """The key that this step hands to other systems; stable over tries, new per signal-retry cycle (FENCE-4)."""
        return f"{self.run_id}:{self.sequence}:{self.cycle}"

    @property
    def args(self) -> list[Any]:
        """Positional arguments."""
        return _value(self.stored_args)[0]  # type: ignore[no-any-return]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments."""
        return _value(self.stored_args)[1]  # type: ignore[no-any-return]

    @property
    def result(self) -> Any:
        """What the step returned; ``None`` without a result."""
        return _value(self.stored_result)

    @property
    def error(self) -> dict[str, Any] | None:
        """The recorded error: ``type, bases, message, code, traceback, cause``."""
        return _error(self.stored_error)


@dataclass(frozen=True, slots=True)
class CompensationView:
    """The undoing of a step; ``sequence`` is that step's, ``undoes`` how it had ended."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "run_id", "sequence", "level", "actor", "queue", "undoes", "undoes_key", "policy", "status", "given_up", "attempts",
        "tries", "claims", "args", "error", "worker_id", "not_before", "next_try_at", "reclaim_stale_at", "created_at",
        "started_at", "ended_at",
    )  # fmt: skip

    run_id: str
    sequence: int
    level: int
    actor: str
    queue: str
    undoes: str
    undoes_key: str
    policy: str
    status: str
    given_up: bool
    attempts: int
    tries: int
    claims: int
    stored_args: bytes
    stored_error: str | None
    worker_id: str | None
    not_before: int | None
    next_try_at: int | None
    reclaim_stale_at: int | None
    created_at: int
    started_at: int | None
    ended_at: int | None

    def __post_init__(self) -> None:
        _as_flags(self, "given_up")

    @property
    def args(self) -> list[Any]:
        """Positional arguments."""
        return _value(self.stored_args)[0]  # type: ignore[no-any-return]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments."""
        return _value(self.stored_args)[1]  # type: ignore[no-any-return]

    @property
    def error(self) -> dict[str, Any] | None:
        """The recorded error: ``type, bases, message, code, traceback, cause``."""
        return _error(self.stored_error)


@dataclass(frozen=True, slots=True)
class SignalView:
    """A signal that a run was sent."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("id", "run_id", "name", "dedup_key", "payload", "status", "received_at", "ended_at")

    id: int
    run_id: str
    name: str
    key: str | None
    stored_payload: bytes
    status: str
    received_at: int
    ended_at: int | None

    @property
    def payload(self) -> Any:
        """What was sent along."""
        return _value(self.stored_payload)


@dataclass(frozen=True, slots=True)
class WaitView:
    """A wait of a run: for a signal, a moment, or a retry; ``kind`` is ``signal``, ``timer`` or ``retry``."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "run_id", "sequence", "kind", "name", "status", "due_at", "signal_id", "payload", "created_at", "ended_at",
    )  # fmt: skip

    run_id: str
    sequence: int
    kind: str
    name: str | None
    status: str
    due_at: int | None
    signal_id: int | None
    stored_payload: bytes | None
    created_at: int
    ended_at: int | None

    @property
    def payload(self) -> Any:
        """What ended the wait brought along; ``None`` without one."""
        return _value(self.stored_payload)


@dataclass(frozen=True, slots=True)
class ChildView:
    """What a parent run knows of a child run; ``run_id`` is the parent's."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "run_id", "sequence", "child_id", "workflow", "block", "position", "status", "close_policy", "cycle", "optional",
        "args", "result", "error", "created_at", "ended_at",
    )  # fmt: skip

    run_id: str
    sequence: int
    child_id: str
    workflow: str
    block: int | None
    position: int | None
    status: str
    close_policy: str
    cycle: int
    optional: bool
    stored_args: bytes
    stored_result: bytes | None
    stored_error: str | None
    created_at: int
    ended_at: int | None

    def __post_init__(self) -> None:
        _as_flags(self, "optional")

    @property
    def args(self) -> list[Any]:
        """Positional arguments."""
        return _value(self.stored_args)[0]  # type: ignore[no-any-return]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments."""
        return _value(self.stored_args)[1]  # type: ignore[no-any-return]

    @property
    def result(self) -> Any:
        """What the child returned; ``None`` without a result."""
        return _value(self.stored_result)

    @property
    def error(self) -> dict[str, Any] | None:
        """The recorded error: ``type, bases, message, code, traceback, cause``."""
        return _error(self.stored_error)


@dataclass(frozen=True, slots=True)
class EventView:
    """One row of a run's history; ``type`` is a word of :mod:`dramatiq_saga.journal.history`."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("id", "run_id", "at", "type", "sequence", "name", "attempt", "detail")

    id: int
    run_id: str
    at: int
    type: str
    sequence: int | None
    name: str | None
    attempt: int | None
    detail: str | None
