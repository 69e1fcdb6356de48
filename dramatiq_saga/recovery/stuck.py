"""Which runs need a human: what ``stuck`` lists (RECLAIM-4, COMP-4, HISTORY-1, DOCTOR-1, EXPIRE-2).

These are halted rollbacks, overdue runs whose rollback cannot be planned, held runs, rows that have spent their repairs, rows that are
running and that nothing will ever reclaim, rows and runs that have been free for an hour and that no worker has come for, or for less where
no message for them exists and none will be sent, and runs of workflows that the application does not declare. Beside them it tells whether
anything sweeps. It only reads, in a transaction of the caller's, from indexes of live rows and of unhappy runs, a bounded number of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..clock import to_iso
from ..codec import load_error
from ..engine import liveness
from ..engine.claim import INLINE
from ..errors import in_one_line
from ..store.models import LIVE
from .doctor import list_left, list_spent
from .explain import Declared, hangs, runs_inline, switched_off
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
_WITHOUT = f" AND (r.delivery IS NULL OR SUBSTR(r.delivery, 1, {len(INLINE)}) <> '{INLINE}')"
# Who rolls back needs no function: the plan is rows.
_UNDECLARED = (
    f"SELECT id, created_at, workflow FROM {{flow_runs}} WHERE {LIVE} AND status <> 'rolling_back' AND workflow NOT IN (%s) "
    "ORDER BY created_at, id LIMIT ?"
)
_UNDECLARED_UNDOS = (
    f"SELECT r.run_id, r.created_at, r.sequence, r.actor FROM {{compensation_runs}} r WHERE r.{LIVE} "
    f"AND {WANTED[COMPENSATION]} AND r.actor NOT IN (%s) "
    "AND EXISTS (SELECT 1 FROM {flow_runs} u WHERE u.id = r.run_id AND u.workflow NOT IN (%s)) ORDER BY r.created_at LIMIT ?"
)
_NAMES = {STEP: "step", COMPENSATION: "undo of step"}
#: Rows of each kind that are looked at for a lost message.
LOOKED_AT = 1000
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


#: What the messages of a database broker ask for: run, kind, sequence. ``None`` where it cannot be known.
Asked = Collection[tuple[str, str, int | None]] | None


def stuck(
    tx: Tx, *, settings: Settings, now: int, limit: int, declared: Declared | None, asked: Callable[[Tx], Asked]
) -> StuckReport:
    """The runs that need a human, at most ``limit``. ``declared`` is ``None`` where the application is not known.

    ``asked`` is called at most once, where something is found that may have lost its message.
    """
    found: dict[str, tuple[str, int | None, str, str]] = {}
    counts: dict[str, int] = {}
    for run_id, kind, since, reason, advice in _find(tx, settings, now, limit + 1, declared, asked):
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
    tx: Tx, settings: Settings, now: int, limit: int, declared: Declared | None, asked: Callable[[Tx], Asked]
) -> Iterator[tuple[str, str, int | None, str, str]]:
    """Run, kind, since, reason and advice, the gravest kinds first."""
    for run_id, at, error in tx.all(_HALTED, (limit,)):
        yield run_id, "halted", at, f"its rollback has halted{_because(error)}", "mend the cause, then resume-rollback"
    for run_id, at, times, error in tx.all(_UNPLANNABLE, (now, limit)):
        reason = f"overdue, and its rollback could not be planned ({times} so far){_because(error)}"
        yield run_id, "overdue", at, reason, f"{_mend(error)}, or cancel --keep"
    for run_id, at, times, error in tx.all(_HELD, (limit,)):
        advice = f"{_mend(error)}{'' if hangs(error) else ' (verify)'}"
        yield run_id, "held", at, f"held ({times} so far){_because(error)}", advice
    for rule, run_id, at, sequence, actor, repairs in list_spent(tx, settings, now=now, limit=limit):
        what = f"step {sequence} {actor}" if sequence is not None else "its drive"
        yield run_id, "repairs_spent", at, f"{what}: {repairs} repairs of {rule} are spent", _TAKE_OVER
    told: set[tuple[str, str, int | None]] = set()  # as free, or as never to be
    for kind in (STEP, COMPENSATION):
        sql = _RUNNING % (TABLES[kind], never_reclaimed_sql(settings, kind))
        for run_id, at, sequence, actor, worker in tx.all(sql, (now - LONG_RUNNING_MS, limit)):
            told.add((run_id, kind, sequence))
            reason = f"{_at_work(kind, sequence, actor, worker)}, and nothing will ever reclaim it"
            yield run_id, "never_reclaimed", at, reason, f"find out what it did, then {_way_out(kind, sequence)}"
    # Whatever the doctor's switches say: an hour of nobody coming means that nobody is there.
    hour = now - LONG_RUNNING_MS
    for one in _free(tx, settings, hour, limit):
        told.add(one.wants)
        long = " has been due for an hour" if one.worker is None else "; free to be taken over for an hour"
        reason = f"{one.row}{long}, and no worker has come for it"
        yield one.run_id, "not_taken_over", one.since, reason, _TAKE_OVER
    yield from _lost(tx, settings, now, limit, asked, told)
    if declared is not None:
        yield from _undeclared(tx, declared, limit)


def _way_out(kind: str, sequence: int | None) -> str:
    return "cancel" if kind == STEP else f"abandon-undo {sequence}"


@dataclass(frozen=True, slots=True)
class _Free:
    """A row or a run that waits for a worker: ``rule`` is the doctor's that is about it, ``worker`` who was at it."""

    rule: str
    kind: str
    run_id: str
    since: int
    sequence: int | None
    row: str
    worker: str | None = None

    @property
    def wants(self) -> tuple[str, str, int | None]:
        """What a message for it would ask for."""
        return self.run_id, self.kind, self.sequence


def _free(tx: Tx, settings: Settings, horizon: int, limit: int) -> Iterator[_Free]:
    """What has been free since ``horizon``, or longer.

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
            yield _Free("R3", kind, run_id, at, sequence, _at_work(kind, sequence, actor, worker), worker or "")
    for what, run_id, at, sequence, actor in list_left(tx, horizon=horizon, limit=limit):
        if what is None:
            yield _Free("R2", "drive", run_id, at, None, "its drive")
        else:
            yield _Free("R1", what, run_id, at, sequence, f"{_NAMES[what]} {sequence} {actor}")


def _lost(
    tx: Tx,
    settings: Settings,
    now: int,
    limit: int,
    asked: Callable[[Tx], Asked],
    told: Collection[tuple[str, str, int | None]],
) -> Iterator[tuple[str, str, int, str, str]]:
    """What else has been without a message for the grace, and will not be sent one. ``told``: what is listed as free, or never to be.

    Who else may be here: a worker that has taken a message, and keeps it until its outcome is recorded, in one transaction where the
    queues are kept beside the rows. Where they are kept elsewhere they were read before the rows, which were then in their state for as
    long as the grace. A caller's process that is at its own run has no messages, and needs none (SYNC-1).
    test_a_step_that_run_sync_is_at_is_not_called_lost
    """
    repair, since = settings.repair, now - int(settings.repair.grace_seconds * 1000)
    running = [
        (kind, *row)
        for kind in (STEP, COMPENSATION)
        for row in tx.all(_RUNNING % (TABLES[kind], never_reclaimed_sql(settings, kind) + _WITHOUT), (since, LOOKED_AT))
        if (row[0], kind, row[2]) not in told
    ]
    free = [
        one for one in _free(tx, settings, since, LOOKED_AT)
        if one.wants not in told and (not repair.enabled or switched_off(one.rule, repair) is not None)
    ]  # fmt: skip
    messages = asked(tx) if running or free else None
    if messages is None:
        return
    asking = {run_id for run_id, kind, _ in messages if kind != "timer"}
    for kind, run_id, at, sequence, actor, worker in running:
        if (run_id, kind, sequence) not in messages:
            reason = f"{_at_work(kind, sequence, actor, worker)}; no message for it exists, nothing will ever reclaim it"
            yield run_id, "never_reclaimed", at, reason, f"look at its worker; if it is gone, {_way_out(kind, sequence)}"
    free = [one for one in free if (one.run_id not in asking if one.kind == "drive" else one.wants not in messages)]
    for one in free[:limit]:
        if not runs_inline(tx, one.run_id):
            reason = f"{one.row}: no message for it exists, and the doctor, who would send one, is off ({one.rule})"
            yield one.run_id, "lost", one.since, reason, "kick"


def _undeclared(tx: Tx, declared: Declared, limit: int) -> Iterator[tuple[str, str, int, str, str]]:
    """Runs that no worker of the application can drive, and undos that none can run."""
    workflows, actors = sorted(declared.workflows) or [""], sorted(declared.actors) or [""]
    names, undoing = (", ".join("?" * len(found)) for found in (workflows, actors))
    for run_id, at, workflow in tx.all(_UNDECLARED % names, (*workflows, limit)):
        reason = f"workflow {workflow} is not declared by the application"
        yield run_id, "undeclared", at, reason, "deploy its module, or cancel"
    for run_id, at, sequence, actor in tx.all(_UNDECLARED_UNDOS % (undoing, names), (*actors, *workflows, limit)):
        reason = f"undo of step {sequence} is {actor}'s, which the application does not declare"
        yield run_id, "undeclared", at, reason, "deploy its module"


def _mend(error: str | None) -> str:
    return "find out what its function waits for" if hangs(error) else "deploy code that fits its history"


def _at_work(kind: str, sequence: int, actor: str, worker: str | None) -> str:
    return f"{_NAMES[kind]} {sequence} {actor} is running on {liveness.name_of(worker)}"


def _because(text: str | None) -> str:
    if not text:
        return ""
    error = load_error(text)
    return f": {in_one_line(str(error.get('type') or 'error'), str(error.get('message') or ''))}".removesuffix(": ")
