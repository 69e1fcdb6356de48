"""The words of the history: one name for each thing that can happen to a run (EVENT-1).

A name is what ``flow_events.type`` holds and what the typed event of :mod:`dramatiq_saga.events` carries as ``type``.
Names are stored, so they are never renamed and never reused for something else; new ones may be added.
"""

from __future__ import annotations

from typing import Final

FLOW_STARTED: Final = "flow.started"
FLOW_WAITING: Final = "flow.waiting"
FLOW_RESUMED: Final = "flow.resumed"
FLOW_COMPLETED: Final = "flow.completed"
FLOW_FAILED: Final = "flow.failed"
FLOW_CANCELLED: Final = "flow.cancelled"
FLOW_EXPIRED: Final = "flow.expired"

ACTION_STARTED: Final = "action.started"
ACTION_COMPLETED: Final = "action.completed"
ACTION_FAILED: Final = "action.failed"
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
COMPENSATION_OUTCOME_REJECTED: Final = "compensation.outcome_rejected"
ROLLBACK_FINISHED: Final = "rollback.finished"

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

#: Told to listeners only: a refused outcome changes no row and adds no history (FENCE-1).
NOT_RECORDED: Final = frozenset({ACTION_OUTCOME_REJECTED, COMPENSATION_OUTCOME_REJECTED})
