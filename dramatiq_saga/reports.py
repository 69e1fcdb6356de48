"""A run as an operator sees it: one read, plain values, nothing that has to be looked up afterwards.

Built for the command line and for a web page alike, so it neither formats nor colours; the one rule that it applies is SAFE-2:
payloads appear as previews, and only where ``history.store_payloads`` allows it. It never writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .clock import to_iso
from .codec import load_error, preview
from .engine.liveness import Lease, as_plain, lease_behind, seen_sql
from .errors import ResultNotSerializableError, qualified_name
from .report_entries import (
    FROM_RESULT,
    EntryReport,
    RetryReport,
    WaitingSignal,
    read_entries,
    read_parked,
    read_signals,
    retry_report,
)
from .views import ActionView, CompensationView, EventView

if TYPE_CHECKING:
    from .settings import Settings
    from .store.database import Tx

_RUN_COLUMNS = (
    "id", "workflow", "version", "queue", "status", "rollback", "ends_as", "args", "context", "result", "error", "rollback_error", "reason",
    "hold_error", "hold_count", "hold_until", "wakes", "wakes_seen", "expires_at", "expiry_attempts", "expiry_after",
    "repair_attempts", "created_at", "started_at", "ended_at", "parent_id", "parent_sequence", "close_request",
)  # fmt: skip
_RUN = f"SELECT {', '.join(_RUN_COLUMNS)} FROM {{flow_runs}} WHERE id = ?"
_SEEN = seen_sql("worker_id")
_STEP_EXTRAS = ("options", "comp_actor", "comp_from_result", "repair_attempts", "retry_policy", _SEEN)
_STEPS = f"SELECT {', '.join((*ActionView.COLUMNS, *_STEP_EXTRAS))} FROM {{action_runs}} WHERE run_id = ? ORDER BY sequence"
_COMPENSATIONS = (
    f"SELECT {', '.join((*CompensationView.COLUMNS, 'options', 'repair_attempts', _SEEN))} FROM {{compensation_runs}} "
    "WHERE run_id = ? ORDER BY level, sequence DESC"
)
_EVENTS = f"SELECT {', '.join(EventView.COLUMNS)} FROM {{flow_events}} WHERE run_id = ? ORDER BY id"
_TAGS = "SELECT name, value FROM {tags} WHERE run_id = ? ORDER BY name"
_UNSTORABLE = qualified_name(ResultNotSerializableError)


@dataclass(frozen=True, slots=True)
class NextTry:
    """The try that comes next: the first is 1. ``of`` is how many there are in all, as far as that is known here.

    ``at`` is when it is due; ``None`` where only a free worker is waited for.
    """

    number: int
    of: int | None
    at: int | None


@dataclass(frozen=True, slots=True)
class CompensationReport:
    """The undoing of a step. ``beside`` names the steps that are undone side by side with it, in one level of the rollback.

    ``lease`` is what stands behind it while it is running under a heartbeat (RECLAIM-5). ``behind``: an earlier level is at work.
    """

    row: CompensationView
    tries_in_all: int | None
    repair_attempts: int
    goes_on: bool = True  # whether its rollback is running
    beside: tuple[int, ...] = ()
    lease: Lease | None = None
    behind: bool = False

    @property
    def next_try(self) -> NextTry | None:
        """See :class:`NextTry`; ``None`` where none is to come."""
        return _next_try(self.row, self.tries_in_all, self.row.not_before) if self.goes_on else None


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step, with what undoes it. ``tries_in_all`` is ``None`` where this process does not know its actor, or it has no end.

    ``lease`` is what stands behind it while it is running under a heartbeat (RECLAIM-5).
    """

    row: ActionView
    tries_in_all: int | None
    repair_attempts: int
    undo: str | None
    compensation: CompensationReport | None
    retry: RetryReport | None = None
    lease: Lease | None = None

    @property
    def was_begun(self) -> bool:
        """See :func:`was_begun`."""
        return was_begun(self.row)

    @property
    def did_its_work(self) -> bool:
        """Whether it has failed only because its result could not be kept: a rollback undoes it (CODEC-2)."""
        return self.row.error is not None and self.row.error["type"] == _UNSTORABLE

    @property
    def next_try(self) -> NextTry | None:
        """See :class:`NextTry`; ``None`` where none is to come (NATIVE-6)."""
        return _next_try(self.row, self.tries_in_all, None)


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run, its steps and their compensations, its tags and, if asked for, its history."""

    id: str
    workflow: str
    version: str | None
    queue: str
    status: str
    rollback: str
    ends_as: str | None
    args: str | None
    context: str | None
    result: str | None
    error: dict[str, Any] | None
    rollback_error: dict[str, Any] | None
    reason: str | None
    hold_error: dict[str, Any] | None
    hold_count: int
    hold_until: int | None
    unseen_wakes: int
    expires_at: int | None
    expiry_attempts: int
    expiry_after: int | None
    repair_attempts: int
    created_at: int
    started_at: int | None
    ended_at: int | None
    parent_id: str | None
    parent_sequence: int | None
    close_request: str | None
    tags: dict[str, str | None]
    steps: list[StepReport]
    entries: list[EntryReport]  # what stands between the steps
    undone_children: dict[int, CompensationReport]  # by the child's sequence
    signals: list[WaitingSignal]
    events: list[EventView] | None
    payload_limit: int | None  # None: payloads are not to be shown

    def payload(self, data: bytes | None) -> str | None:
        """A stored value as it may be shown (SAFE-2)."""
        return None if data is None or self.payload_limit is None else readable(data, self.payload_limit)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines: times are ISO 8601 in UTC, payloads are previews of what is stored."""
        known: dict[str, Any] = {"run_id": self.id} | {
            name: getattr(self, name)
            for name in (
                "workflow", "version", "queue", "status", "rollback", "ends_as", "args", "context", "result", "error", "rollback_error",
                "reason", "hold_error", "hold_count", "unseen_wakes", "expiry_attempts", "repair_attempts", "parent_id",
                "parent_sequence", "close_request", "tags",
            )
        }  # fmt: skip
        for name in ("hold_until", "expires_at", "expiry_after", "created_at", "started_at", "ended_at"):
            known[name] = to_iso(getattr(self, name))
        known["steps"] = [self._step(step) for step in self.steps]
        known["entries"] = [
            entry.as_dict() | {"compensation": self._compensation(self.undone_children.get(entry.sequence))}
            for entry in self.entries
        ]
        known["signals"] = [signal.as_dict() for signal in self.signals]
        if self.events is not None:
            known["events"] = [
                {
                    "at": to_iso(event.at), "type": event.type, "sequence": event.sequence, "name": event.name,
                    "attempt": event.attempt, "detail": event.detail,
                }
                for event in self.events
            ]  # fmt: skip
        return known

    def _step(self, step: StepReport) -> dict[str, Any]:
        row = step.row
        return {
            **_common(row, step),
            "cycle": row.cycle, "idempotency_key": row.idempotency_key, "args": self.payload(row.stored_args),
            "result": self.payload(row.stored_result), "expires_at": to_iso(row.expires_at), "undo": step.undo,
            "block": row.block, "position": row.position, "held_back": row.held_back,
            "retry_on_signal": None if step.retry is None else step.retry.as_dict(),
            "compensation": self._compensation(step.compensation),
        }  # fmt: skip

    def _compensation(self, undo: CompensationReport | None) -> dict[str, Any] | None:
        return None if undo is None else {
            **_common(undo.row, undo),
            "level": undo.row.level, "beside": list(undo.beside), "undoes": undo.row.undoes, "policy": undo.row.policy,
            "not_before": to_iso(undo.row.not_before), "args": self.payload(undo.row.stored_args),
        }  # fmt: skip


def _common(row: ActionView | CompensationView, report: StepReport | CompensationReport) -> dict[str, Any]:
    """What steps and compensations have in common, as plain values."""
    upcoming = report.next_try
    return {
        "sequence": row.sequence, "actor": row.actor, "queue": row.queue, "status": row.status, "given_up": bool(row.given_up),
        "attempts": row.attempts, "tries": row.tries, "tries_in_all": report.tries_in_all,
        "next_try": None if upcoming is None else {"number": upcoming.number, "of": upcoming.of, "at": to_iso(upcoming.at)},
        "worker": row.worker_id, **as_plain(report.lease),
        "reclaim_at": to_iso(row.reclaim_stale_at), "repair_attempts": report.repair_attempts,
        "error": row.error, "created_at": to_iso(row.created_at), "started_at": to_iso(row.started_at), "ended_at": to_iso(row.ended_at),
    }  # fmt: skip


def was_begun(row: ActionView | CompensationView) -> bool:
    """Whether a row is pending again after a claim that has not reported: its body may have begun, and may have done its work."""
    return row.status == "pending" and row.started_at is not None and row.attempts > row.tries


def _next_try(row: ActionView | CompensationView, of: int | None, not_before: int | None) -> NextTry | None:
    if row.status == "pending":
        return NextTry(row.tries + 1, of, not_before)
    if row.status == "failed" and not row.given_up:
        return NextTry(row.tries + 1, of, row.next_try_at)
    return None


def read_run(
    tx: Tx, run_id: str, *, settings: Settings, tries_of: Callable[[str, dict[str, Any]], int | None], events: bool = False
) -> RunReport | None:
    """A run's report from one snapshot; ``None`` where there is no such run.

    ``tries_of`` tells how many tries an actor has in all, given the options that its message carries.
    """
    run = tx.one(_RUN, (run_id,))
    if run is None:
        return None
    facts = dict(zip(_RUN_COLUMNS, run, strict=True))
    limit = settings.history.max_payload_preview_length if settings.history.store_payloads else None

    def shown(data: bytes | None) -> str | None:
        return None if data is None or limit is None else readable(data, limit)

    def lease(row: ActionView | CompensationView, seen_at: int | None) -> Lease | None:
        return lease_behind(settings, row.worker_id, seen_at) if row.status == "running" else None

    for name in ("args", "context", "result"):
        facts[name] = shown(None if facts[name] is None else bytes(facts[name]))
    for name in ("error", "rollback_error", "hold_error"):
        facts[name] = load_error(facts[name]) if facts[name] else None
    facts["unseen_wakes"] = facts.pop("wakes") - facts.pop("wakes_seen")

    undone: dict[int, CompensationReport] = {}
    levels: dict[int, list[int]] = {}
    for row in tx.all(_COMPENSATIONS, (run_id,)):
        *columns, options, repairs, seen_at = row
        view = CompensationView(*_plain(columns))
        levels.setdefault(view.level, []).insert(0, view.sequence)
        undone[view.sequence] = CompensationReport(
            view, tries_of(view.actor, _options(options)), repairs, facts["rollback"] == "running", lease=lease(view, seen_at)
        )
    at_work = min(
        (undo.row.level for undo in undone.values() if undo.row.ended_at is None and not undo.row.given_up), default=None
    )
    for sequence, undo in undone.items():
        beside = tuple(other for other in levels[undo.row.level] if other != sequence)
        behind = at_work is not None and undo.row.level > at_work
        undone[sequence] = replace(undo, beside=beside, behind=behind)
    entries = read_entries(tx, run_id, shown)
    steps = []
    parked = read_parked(tx, run_id)
    for row in tx.all(_STEPS, (run_id,)):
        *columns, options, comp_actor, from_result, repairs, policy, seen_at = row
        step = ActionView(*_plain(columns))
        undo_by = comp_actor or (FROM_RESULT if from_result else None)
        retry = retry_report(policy, step.sequence, step.cycle, parked)
        steps.append(
            StepReport(
                step, tries_of(step.actor, _options(options)), repairs, undo_by, undone.get(step.sequence), retry, lease(step, seen_at)
            )
        )  # fmt: skip
    return RunReport(
        **facts, undone_children={entry.sequence: undone[entry.sequence] for entry in entries if entry.sequence in undone},
        tags=dict(tx.all(_TAGS, (run_id,))), steps=steps, payload_limit=limit,
        entries=entries, signals=read_signals(tx, run_id, shown),
        events=[EventView(*row) for row in tx.all(_EVENTS, (run_id,))] if events else None,
    )  # fmt: skip


def readable(data: bytes, limit: int) -> str:
    """A preview for people: JSON with its letters as letters, where the encoder has written escapes."""
    if len(data) <= 8 * limit:
        with suppress(ValueError, RecursionError):
            data = json.dumps(json.loads(data), ensure_ascii=False, separators=(",", ":")).encode()
    return preview(data, limit)


def _plain(columns: list[Any]) -> list[Any]:
    """Drivers give payloads as ``memoryview`` or ``bytearray`` now and then."""
    return [bytes(value) if isinstance(value, (memoryview, bytearray)) else value for value in columns]


def _options(text: str | None) -> dict[str, Any]:
    return json.loads(text) if text else {}
