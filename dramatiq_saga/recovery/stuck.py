"""Which runs need a human: what ``stuck`` lists (RECLAIM-4, COMP-4, HISTORY-1, DOCTOR-1, EXPIRE-2).

These are halted rollbacks, overdue runs whose rollback cannot be planned, held runs, rows that have spent their repairs, rows that are
running and that nothing will ever reclaim, rows and runs that have been free for an hour and that no worker has come for, and
runs of workflows that the application does not declare. Beside them it tells whether anything sweeps. It only reads, in a transaction of
the caller's, from indexes of live rows and of unhappy runs, at most ``limit`` rows of each kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..clock import to_iso
from ..codec import load_error
from ..engine import liveness
from ..errors import in_one_line
from ..store.models import LIVE
from .doctor import list_left, list_spent
from .passes import LastPasses, read_last
from .rows import COMPENSATION, STEP, TABLES, WANTED
from .sweep import LONG_RUNNING, LONG_RUNNING_MS, never_reclaimed_sql

if TYPE_CHECKING:
    from ..settings import Settings
    from ..store.database import Tx

_HALTED = "SELECT id, ended_at, rollback_error FROM {flow_runs} WHERE rollback = 'halted' ORDER BY created_at, id LIMIT ?"
_UNPLANNABLE = (
    f"SELECT id, expires_at, expiry_attempts, hold_error FROM {{flow_runs}} WHERE expires_at IS NOT NULL AND {LIVE} "
    "AND expires_at <= ? AND expiry_attempts > 0 AND status <> 'rolling_back' ORDER BY expires_at LIMIT ?"
)
_HELD = (
    f"SELECT id, woken_at, hold_count, hold_error FROM {{flow_runs}} WHERE hold_until IS NOT NULL AND {LIVE} "
    "AND status <> 'rolling_back' ORDER BY hold_until LIMIT ?"
)
_RUNNING = "SELECT r.run_id, r.started_at, r.sequence, r.actor, r.worker_id FROM {%s} r WHERE %s ORDER BY r.started_at LIMIT ?"
_UNDECLARED = f"SELECT id, created_at, workflow FROM {{flow_runs}} WHERE {LIVE}%s ORDER BY created_at, id LIMIT ?"
_NAMES = {STEP: "step", COMPENSATION: "undo of step"}
_TAKE_OVER = "see that workers run, then kick"
_FACTS = "SELECT workflow, status, rollback FROM {flow_runs} WHERE id = ?"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A run that needs a human. ``kind`` is a word for machines, ``since`` milliseconds UTC; ``also`` counts its further reasons."""

    run_id: str
    workflow: str
    status: str
    rollback: str
    kind: str
    since: int | None
    reason: str
    advice: str
    also: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "run_id": self.run_id, "workflow": self.workflow, "status": self.status, "rollback": self.rollback, "kind": self.kind,
            "since": to_iso(self.since), "reason": self.reason, "advice": self.advice, "also": self.also,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class StuckReport:
    """The runs that need a human, each once, the gravest reasons first. ``more``: there are others that the limit has cut off.

    ``passes``: when something last swept. Where nothing does, an empty list does not mean that all goes on by itself.
    """

    runs: tuple[Stuck, ...]
    more: bool
    passes: LastPasses

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {"runs": [run.as_dict() for run in self.runs], "more": self.more, "last_passes": self.passes.as_dict()}


def stuck(tx: Tx, *, settings: Settings, now: int, limit: int, declared: Collection[str] | None) -> StuckReport:
    """The runs that need a human, at most ``limit``. ``declared``: the application's workflows; ``None`` where they are not known."""
    found: dict[str, tuple[str, int | None, str, str]] = {}
    counts: dict[str, int] = {}
    for run_id, kind, since, reason, advice in _find(tx, settings, now, limit + 1, declared):
        counts[run_id] = counts.get(run_id, 0) + 1
        found.setdefault(run_id, (kind, since, reason, advice))
    runs = []
    for run_id, (kind, since, reason, advice) in list(found.items())[:limit]:
        facts = tx.one(_FACTS, (run_id,))
        if facts is not None:
            workflow, status, rollback = facts
            runs.append(Stuck(run_id, workflow, status, rollback, kind, since, reason, advice, counts[run_id] - 1))
    return StuckReport(tuple(runs), len(found) > limit, read_last(tx, now))


def _find(
    tx: Tx, settings: Settings, now: int, limit: int, declared: Collection[str] | None
) -> Iterator[tuple[str, str, int | None, str, str]]:
    """Run, kind, since, reason and advice, the gravest kinds first."""
    for run_id, at, error in tx.all(_HALTED, (limit,)):
        yield run_id, "halted", at, f"its rollback has halted{_because(error)}", "mend the cause, then resume-rollback"
    for run_id, at, times, error in tx.all(_UNPLANNABLE, (now, limit)):
        reason = f"overdue, and its rollback could not be planned ({times} so far){_because(error)}"
        yield run_id, "overdue", at, reason, "deploy code that fits its history, or cancel"
    for run_id, at, times, error in tx.all(_HELD, (limit,)):
        yield run_id, "held", at, f"held ({times} so far){_because(error)}", "deploy code that fits its history (verify)"
    for rule, run_id, at, sequence, actor, repairs in list_spent(tx, settings, now=now, limit=limit):
        what = f"step {sequence} {actor}" if sequence is not None else "its drive"
        yield run_id, "repairs_spent", at, f"{what}: {repairs} repairs of {rule} are spent", "kick"
    for kind in (STEP, COMPENSATION):
        sql = _RUNNING % (TABLES[kind], never_reclaimed_sql(settings, kind))
        for run_id, at, sequence, actor, worker in tx.all(sql, (now - LONG_RUNNING_MS, limit)):
            reason = f"{_at_work(kind, sequence, actor, worker)}, and nothing will ever reclaim it"
            advice = f"find out what it did, then {'cancel' if kind == STEP else f'abandon-undo {sequence}'}"
            yield run_id, "never_reclaimed", at, reason, advice
    yield from _not_taken_over(tx, settings, now - LONG_RUNNING_MS, limit)
    if declared is not None:
        names = sorted(declared)
        sql = _UNDECLARED % (" AND workflow <> ?" * len(names))
        for run_id, at, workflow in tx.all(sql, (*names, limit)):
            yield (
                run_id,
                "undeclared",
                at,
                f"workflow {workflow} is not declared by the application",
                "deploy its module, or cancel",
            )


def _not_taken_over(tx: Tx, settings: Settings, horizon: int, limit: int) -> Iterator[tuple[str, str, int, str, str]]:
    """What has been free for an hour, whatever the doctor's switches say: an hour of nobody coming means that nobody is there.

    Rows are free by their reclaim deadline or their worker's silence, or since their message was due; runs since their wake, or
    since the last undo of a rollback that nobody has ended.
    """
    free, params = "r.reclaim_stale_at <= ?", [horizon, horizon]
    if liveness.is_on(settings):
        free += f" OR ({liveness.dead_sql('r.worker_id')})"
        params.append(horizon - liveness.lease_ms(settings))
    for kind in (STEP, COMPENSATION):
        sql = _RUNNING % (TABLES[kind], f"{LONG_RUNNING} AND ({free}) AND {WANTED[kind]}")
        for run_id, at, sequence, actor, worker in tx.all(sql, (*params, limit)):
            reason = (
                f"{_at_work(kind, sequence, actor, worker)}; free to be taken over for an hour, and no worker has come for it"
            )
            yield run_id, "not_taken_over", at, reason, _TAKE_OVER
    for what, run_id, at, sequence, actor in list_left(tx, horizon=horizon, limit=limit):
        row = "its drive" if what is None else f"{_NAMES[what]} {sequence} {actor}"
        yield run_id, "not_taken_over", at, f"{row} has been due for an hour, and no worker has come for it", _TAKE_OVER


def _at_work(kind: str, sequence: int, actor: str, worker: str | None) -> str:
    return f"{_NAMES[kind]} {sequence} {actor} is running on {liveness.name_of(worker)}"


def _because(text: str | None) -> str:
    if not text:
        return ""
    error = load_error(text)
    return f": {in_one_line(str(error.get('type') or 'error'), str(error.get('message') or ''))}".removesuffix(": ")
