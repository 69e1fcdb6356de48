"""The second journal: what the engine ran into and absorbed, told through structlog (ANOM-1).

None of these lines is a failure of a message and none reaches the history; a steady stream of one is what an operator wants
to see. The codes are the vocabulary: past tense, never renamed. Each has one method here, so that its line carries the same
fields wherever it is written.

A broken logger, level or configuration never fails a message: the line falls back to the standard library's logging, and
is dropped when that is broken too.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import structlog

from ..codec import message_of
from ..errors import qualified_name
from ..settings import LOG_LEVELS, Logging

CLAIM_LOST: Final = "claim_lost"
OUTCOME_REJECTED: Final = "outcome_rejected"
BATCH_FINISHED_EARLY: Final = "batch_finished_early"
CLAIM_NOT_COMMITTED: Final = "claim_not_committed"
EXPIRY_FAILED: Final = "expiry_failed"
WRITE_REFUSED: Final = "write_refused"
REJECTION_UNDELIVERED: Final = "rejection_undelivered"
TRANSITION_LOST: Final = "transition_lost"
RETRY_POLICY_THREW: Final = "retry_policy_threw"
REPLAN_FAILED: Final = "replan_failed"
REPLAN_INCOMPLETE: Final = "replan_incomplete"

#: All codes there are.
CODES: Final = (
    CLAIM_LOST,
    OUTCOME_REJECTED,
    BATCH_FINISHED_EARLY,
    CLAIM_NOT_COMMITTED,
    EXPIRY_FAILED,
    WRITE_REFUSED,
    REJECTION_UNDELIVERED,
    TRANSITION_LOST,
    RETRY_POLICY_THREW,
    REPLAN_FAILED,
    REPLAN_INCOMPLETE,
)

#: The logger's name where the settings name none.
DEFAULT_LOGGER: Final = "dramatiq_saga"


class AnomalyLog:
    """Writes anomalies at one level to one logger; ``level=None`` writes nothing and costs one comparison.

    In every method ``row`` is what the row is: ``"action"``, ``"compensation"`` or ``"child"``; it is named by its run and
    sequence together. Further fields may be added by keyword. No method raises.
    """

    __slots__ = ("_level", "_name")

    def __init__(self, level: str | None = "info", logger_name: str | None = None) -> None:
        self._level = level if level is None or level in LOG_LEVELS else "info"
        self._name = logger_name or DEFAULT_LOGGER

    @classmethod
    def from_settings(cls, settings: Logging) -> AnomalyLog:
        return cls(settings.anomaly_level, settings.logger)

    @property
    def is_on(self) -> bool:
        """Whether lines are written: ask before computing costly fields."""
        return self._level is not None

    def claim_lost(
        self, *, row: str, run_id: str, sequence: int, actor: str, status: str | None, orphaned: bool, **fields: object
    ) -> None:
        """A worker found the row owned and ran nothing. ``orphaned``: by an earlier delivery of the same message (CLAIM-2)."""
        self.report(
            CLAIM_LOST, row=row, run_id=run_id, sequence=sequence, actor=actor, status=status, orphaned=orphaned, **fields
        )

    def outcome_rejected(
        self,
        *,
        row: str,
        run_id: str,
        sequence: int,
        actor: str,
        outcome: str,
        claimed_attempts: int,
        attempts: int | None,
        status: str | None,
        **fields: object,
    ) -> None:
        """A worker finished, but the row had changed hands and its outcome was dropped (FENCE-1)."""
        self.report(
            OUTCOME_REJECTED,
            row=row,
            run_id=run_id,
            sequence=sequence,
            actor=actor,
            outcome=outcome,
            claimed_attempts=claimed_attempts,
            attempts=attempts,
            status=status,
            **fields,
        )

    def batch_finished_early(self, *, row: str, run_id: str, sequence: int, actor: str, block: int, **fields: object) -> None:
        """A block's callback came while the row was still live; its worker sends the wake itself (PAR-2)."""
        self.report(BATCH_FINISHED_EARLY, row=row, run_id=run_id, sequence=sequence, actor=actor, block=block, **fields)

    def claim_not_committed(
        self, *, run_id: str, claimed_attempts: int | None = None, attempts: int | None = None, **fields: object
    ) -> None:
        """What a transaction wrote was gone once it had closed (CLAIM-3). For a kick: ``workflow, status, repair_attempts``."""
        self.report(CLAIM_NOT_COMMITTED, run_id=run_id, claimed_attempts=claimed_attempts, attempts=attempts, **fields)

    def expiry_failed(
        self, *, run_id: str, workflow: str, error: BaseException | None, expiry_attempts: int, **fields: object
    ) -> None:
        """An overdue run's rollback could not be planned; the run was left as found and held off (EXPIRE-2)."""
        self.report(EXPIRY_FAILED, run_id=run_id, workflow=workflow, expiry_attempts=expiry_attempts, error=error, **fields)

    def write_refused(self, *, site: str, row: str, run_id: str, sequence: int, actor: str, **fields: object) -> None:
        """A row had moved on, or its run had ended, since it was read; ``site`` names the write (STATUS-4)."""
        self.report(WRITE_REFUSED, site=site, row=row, run_id=run_id, sequence=sequence, actor=actor, **fields)

    def rejection_undelivered(
        self, *, row: str, run_id: str, sequence: int, actor: str, error: BaseException, listener: str, **fields: object
    ) -> None:
        """A listener failed on a rejected outcome, the last copy of which is gone with it (FENCE-1)."""
        self.report(
            REJECTION_UNDELIVERED,
            row=row,
            run_id=run_id,
            sequence=sequence,
            actor=actor,
            listener=listener,
            error=error,
            **fields,
        )

    def transition_lost(
        self, *, run_id: str, workflow: str, observed: str, intended: str, actual: str | None, **fields: object
    ) -> None:
        """Somebody else changed the run first (STATUS-3)."""
        self.report(
            TRANSITION_LOST, run_id=run_id, workflow=workflow, observed=observed, intended=intended, actual=actual, **fields
        )

    def retry_policy_threw(
        self, *, row: str, run_id: str, sequence: int, actor: str, error: BaseException, **fields: object
    ) -> None:
        """A retry policy's predicate raised and counts as false (RSIG-3)."""
        self.report(RETRY_POLICY_THREW, row=row, run_id=run_id, sequence=sequence, actor=actor, error=error, **fields)

    def replan_failed(self, *, run_id: str, workflow: str, error: BaseException | None, **fields: object) -> None:
        """The replay that a failing run's rollback needs raised; nothing was committed (COMP-3)."""
        self.report(REPLAN_FAILED, run_id=run_id, workflow=workflow, error=error, **fields)

    def replan_incomplete(self, *, run_id: str, workflow: str, missing: int, **fields: object) -> None:
        """That replay ended before sequence ``missing``, a completed step known to carry a compensation (COMP-3)."""
        self.report(REPLAN_INCOMPLETE, run_id=run_id, workflow=workflow, missing=missing, **fields)

    def report(self, code: str, **fields: object) -> None:
        """Write one line. An ``error`` becomes its class and message; fields that are ``None`` are left out."""
        level = self._level
        if level is None:
            return
        try:
            known = {name: value for name, value in fields.items() if value is not None}
            error = known.pop("error", None)
            if isinstance(error, BaseException):
                known["error_type"] = qualified_name(type(error))
                known["error_message"] = message_of(error)[:2000]
            getattr(structlog.get_logger(self._name), level)(code, **known)
        except Exception as broken:
            self._fall_back(code, level, fields, broken)

    def _fall_back(self, code: str, level: str, fields: dict[str, object], broken: Exception) -> None:
        with suppress(Exception):
            number = logging.getLevelNamesMapping()[level.upper()]
            logging.getLogger(DEFAULT_LOGGER).log(number, "%s %r (structlog failed: %r)", code, fields, broken)
