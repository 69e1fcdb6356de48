"""The words that rows may hold (SEMANTICS: STATUS), as string enums.

This module owns the vocabulary and nothing else: which words exist, and which of them are final. It performs no I/O and
imports nothing of ours. Rows store the plain strings; comparing an enum member with a stored string works, because every
member is a ``str``.
"""

from __future__ import annotations

from enum import StrEnum


class FlowStatus(StrEnum):
    """Where a run is. The last four are terminal and never left."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    ROLLING_BACK = "rolling_back"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        """True once nothing will change this status again."""
        return self in FLOW_TERMINAL


class RollbackStatus(StrEnum):
    """How far the undoing of a run has come; independent of the run's own status."""

    NONE = "none"
    RUNNING = "running"
    HALTED = "halted"
    DONE = "done"


class ActionStatus(StrEnum):
    """Where a step is. ``failed`` is also what a row shows between two native tries (see ``given_up``)."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    AWAITING_RETRY = "awaiting_retry"
    OPTIONAL_FAILED = "optional_failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class CompensationStatus(StrEnum):
    """Where an undo is."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class SignalStatus(StrEnum):
    """Where a signal, or a wait for one, is."""

    WAITING = "waiting"
    RECEIVED = "received"
    CONSUMED = "consumed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class ChildStatus(StrEnum):
    """What a parent knows of a child run."""

    PENDING = "pending"
    RUNNING = "running"
    AWAITING_RETRY = "awaiting_retry"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class CompensationFailurePolicy(StrEnum):
    """What a compensation that fails does to the rest of the rollback (COMP-4)."""

    STOP = "stop"
    CONTINUE = "continue"


class ParallelFailurePolicy(StrEnum):
    """When a parallel block reports a failure (PAR-4)."""

    FAIL_FAST = "fail_fast"
    WAIT_ALL_THEN_FAIL = "wait_all_then_fail"


class ChildClosePolicy(StrEnum):
    """What becomes of an open child when its parent ends (CHILD-3)."""

    ABANDON = "abandon"
    CANCEL = "cancel"
    FAIL = "fail"


#: Statuses of a run that never change again.
FLOW_TERMINAL = frozenset({FlowStatus.COMPLETED, FlowStatus.FAILED, FlowStatus.CANCELLED, FlowStatus.EXPIRED})

#: Statuses in which a run goes forward: steps may start and signals are accepted.
FLOW_LIVE = frozenset({FlowStatus.PENDING, FlowStatus.RUNNING, FlowStatus.WAITING})
