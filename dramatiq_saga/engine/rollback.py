"""Rollback: what is to be undone, and the one transaction that says so (COMP-1 … COMP-5, COMP-9, COMP-10).

:func:`draft` works out, before the transaction, what is to be undone: completed steps with a compensation, in reverse order of
sequence, one level each, except that the members of a group that asks for it share one. :func:`enter` writes every compensation
row and puts the run under ``rolling_back`` in the transaction that also settles its live rows. From then on the plan is rows, and
``undoing.py`` carries it out.

Who else may be here: an outcome that arrives while the plan is drafted (it raises the wake count, so the plan loses and is
drafted again), a claim, a failed try or a claim given back (they change the row that the plan rests on: :func:`holds`), a cancel
(never interrupts a rollback, COMP-9). Proven by ``tests/races/test_interleavings.py`` and ``tests/races/test_undoing.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..codec import describe_error, load_error
from ..errors import CompensationFailedError, SagaError
from . import liveness, notify, undoing
from .claim import idempotency_key
from .replay import HoldRun
from .rows import ChildEntry, CompensationSpec, Outgoing, Snapshot, StepEntry
from .wakes import THIS_RUN

if TYPE_CHECKING:
    from ..store.database import Tx
    from .children import Family
    from .core import Engine
    from .rows import Decision

_UNDOABLE = "run_id = ? AND (comp_actor IS NOT NULL OR comp_from_result = TRUE)"
_STEPS = (
    "SELECT sequence, status, given_up, attempts, cycle, error, comp_actor, comp_args, comp_options, comp_from_result, "
    "comp_on_self_failure, comp_policy, comp_reclaim_stale_after_seconds, comp_group, comp_parallel, reclaim_stale_at, time_limit_at, "
    f"worker_id, {liveness.seen_sql('worker_id')}, claims FROM {{action_runs}} WHERE {_UNDOABLE}"
)
# A child that has not completed undoes itself, or is closed (CHILD-3): there is nothing of it to undo here.
_CHILDREN = (
    "SELECT sequence, status, FALSE, 0, cycle, error, comp_actor, comp_args, comp_options, comp_from_result, FALSE, comp_policy, "
    "comp_reclaim_stale_after_seconds, comp_group, comp_parallel, NULL, NULL, NULL, NULL, 0 "
    f"FROM {{children}} WHERE {_UNDOABLE} AND status = 'completed'"
)
_STEP_STATE = "SELECT status, attempts, worker_id FROM {action_runs} WHERE run_id = ? AND sequence = ?"
_ENTER = (
    "UPDATE {flow_runs} SET status = 'rolling_back', rollback = 'running', ends_as = ?, revision = revision + 1, wakes_seen = ?, "
    "wakes = ?, error = ?, reason = COALESCE(?, reason), woken_at = NULL, hold_error = NULL, hold_until = NULL, "
    "repair_attempts = 0, repair_after = NULL "
    f"WHERE id = ? AND revision = ? AND wakes = ? AND {THIS_RUN} AND ended_at IS NULL AND status <> 'rolling_back'"
)
_INSERT = (
    "INSERT INTO {compensation_runs} (run_id, sequence, level, actor, queue, priority, options, args, undoes, undoes_key, policy, "
    "status, given_up, attempts, tries, claims, not_before, reclaim_stale_after_seconds, sent_at, repair_attempts, created_at, "
    "error, ended_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?, 0, ?, ?, ?)"
)
_RUN = (
    "SELECT status, rollback, ends_as, workflow, error, queue, priority, reason, parent_id, created_at FROM {flow_runs} "
    "WHERE id = ?{for_update}"
)


class ReplanIncompleteError(SagaError):
    """The function ended before it had built the undo of a step that has to be undone; nothing is rolled back (COMP-3)."""

    def __init__(self, sequence: int, actor: str) -> None:
        super().__init__(sequence, actor)
        self.sequence = sequence
        self.actor = actor

    def __str__(self) -> str:
        return (
            f"the compensation of step {self.sequence} ({self.actor}) is built from the step's result, and the function ended "
            "without building it: nothing was rolled back; deploy code that builds it"
        )


@dataclass(slots=True)
class Plan:
    """What a rollback will undo, level by level, before it is written."""

    ends_as: str
    error: str | None
    reason: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Outgoing] = field(default_factory=list)
    # Steps that are unsettled, or whose body may not be over: sequence, status, attempts, worker.
    rests_on: list[tuple[int, str, int, str | None]] = field(default_factory=list)


class _Undoable(NamedTuple):
    """A step or a child that can be undone, as its row stands."""

    sequence: int
    status: str
    given_up: bool
    attempts: int
    cycle: int
    error: str | None
    comp_actor: str | None
    comp_args: bytes | None
    comp_options: str | None
    from_result: bool
    on_self_failure: bool
    policy: str | None
    reclaim: int | None
    group: int | None
    parallel: bool
    stale_at: int | None
    limit_at: int | None
    worker_id: str | None
    seen_at: int | None
    claims: int


def draft(
    engine: Engine, snapshot: Snapshot, decision: Decision | None, *, ends_as: str = "failed", reason: str | None = None
) -> Plan:
    """What is to be undone of the run as ``snapshot`` has it. Runs no business code and writes nothing (COMP-2).

    Raises:
      HoldRun: the undo of a completed step has not been built, so what can be planned is not the whole (COMP-3).
    """
    resolved: dict[int, CompensationSpec] = dict(decision.resolved) if decision else {}
    plan = Plan(ends_as, decision.error if decision else None, reason)
    entries = {
        entry.sequence: entry for entry in snapshot.entries
        if isinstance(entry, StepEntry | ChildEntry) and (entry.comp_actor is not None or entry.comp_from_result)
    }  # fmt: skip
    if not entries:
        return plan
    children = any(isinstance(entry, ChildEntry) for entry in entries.values())
    now = engine.now()
    for row in engine.store.read(lambda tx: _undoable(tx, snapshot.run_id, children=children)):
        entry = entries.get(row.sequence)
        if entry is None:
            continue
        if row.on_self_failure and isinstance(entry, StepEntry):
            if entry.is_live:
                # A claim, or a failed try, changes the row and neither revision nor wakes: it is taken as it stands, and has
                # to stand so still when the plan is written.
                # test_a_plan_loses_to_a_claim_that_lands_while_it_is_made_and_undoes_that_step_too
                entry = replace(entry, status=row.status, given_up=bool(row.given_up), attempts=row.attempts, error=row.error)
                plan.rests_on.append((row.sequence, row.status, row.attempts, row.worker_id))
            else:
                if row.status == "expired":
                    # Its refused report may land meanwhile: test_a_plan_loses_to_a_refused_report_that_lands_while_it_is_made
                    plan.rests_on.append((row.sequence, row.status, row.attempts, row.worker_id))
                entry = replace(entry, attempts=row.attempts)  # a cache may not know of its claims
        if entry.status == "completed" and entry.comp_from_result and row.comp_args is None and row.sequence not in resolved:
            raise HoldRun(ReplanIncompleteError(row.sequence, _name(entry)))
        planned = _planned(engine, snapshot.run_id, entry, row, resolved.get(row.sequence), now)
        if planned is not None:
            planned["level"] = _level(plan.rows, planned["group"])
            plan.rows.append(planned)
    plan.messages = _first(snapshot, plan.rows, now)
    return plan


def _undoable(tx: Tx, run_id: str, *, children: bool) -> list[_Undoable]:
    """What can be undone of a run, the last first."""
    rows = tx.all(_STEPS, (run_id,))
    if children:
        rows += tx.all(_CHILDREN, (run_id,))
    return sorted((_Undoable(*row) for row in rows), key=lambda row: -row.sequence)


def _name(entry: StepEntry | ChildEntry) -> str:
    return entry.actor if isinstance(entry, StepEntry) else entry.workflow


def _level(above: list[dict[str, Any]], group: int | None) -> int:
    """The level of the next row: its own, or that of its group where the group is undone side by side (COMP-5)."""
    if not above:
        return 0
    last: int = above[-1]["level"]
    return last if group is not None and above[-1]["group"] == group else last + 1


def _first(snapshot: Snapshot, rows: list[dict[str, Any]], now: int) -> list[Outgoing]:
    """The messages of the first level that can run, unless an undo that cannot be built stops the rollback before it."""
    for level in range(rows[-1]["level"] + 1 if rows else 0):
        members = [row for row in rows if row["level"] == level]
        pending = [row for row in members if row["status"] == "pending"]
        if pending:
            messages = [_outgoing(snapshot, row, now) for row in pending]
            return undoing.side_by_side(
                messages, level, workflow=snapshot.workflow, queue=snapshot.queue, priority=snapshot.priority, now=now
            )
        if any(row["policy"] == "stop" for row in members):
            break
    return []


def _planned(
    engine: Engine, run_id: str, entry: StepEntry | ChildEntry, row: _Undoable, spec: CompensationSpec | None, now: int
) -> dict[str, Any] | None:
    """One compensation row, or ``None`` where this step is not to be undone."""
    undoes = _undoes(entry, bool(row.on_self_failure), row.claims)
    if undoes is None:
        return None
    actor, args, options_text = row.comp_actor, row.comp_args, row.comp_options
    if spec is not None:
        actor, args, options_text = spec.actor, spec.args, spec.options
    options = json.loads(options_text) if options_text else {}
    broken = None
    if actor is None or args is None:
        broken = describe_error(
            CompensationFailedError(
                f"the compensation of step {row.sequence} ({_name(entry)}) is built from the step's result, and there is none that can be read"
            )
        )
    not_before = None
    if isinstance(entry, StepEntry) and entry.status in ("running", "expired") and row.worker_id is not None:
        # COMP-9: no refund before the charge has reported, gone stale or run out of time. Be that moment past or to come, the undo's claim
        # asks again: here nobody may have been heard from only because the database could not be reached, or a clock was set.
        # test_a_rollback_that_is_planned_where_nobody_is_heard_from_takes_no_living_worker_for_dead
        not_before = liveness.at_work_until(engine, row.worker_id, row.seen_at, row.stale_at, row.limit_at, since=now, now=now)
    return {
        "sequence": row.sequence,
        "actor": actor or "",
        "queue": options.pop("queue_name", None) or _queue_of(engine, actor),
        "priority": options.pop("priority", None),
        "options": options or None,
        "args": bytes(args) if args is not None else b"",
        "undoes": undoes,
        "undoes_key": entry.child_id if isinstance(entry, ChildEntry) else idempotency_key(run_id, row.sequence, row.cycle),
        "policy": row.policy or engine.settings.sagas.default_compensation_failure_policy,
        "status": "failed" if broken else "pending",
        "error": broken,
        "not_before": not_before,
        "reclaim": row.reclaim,
        "group": row.group if row.parallel else None,
    }


def _undoes(entry: StepEntry | ChildEntry, on_self_failure: bool, claims: int) -> str | None:
    """What the step left behind: ``completed``, ``failed``, ``unknown``; ``None`` where nothing is to be undone (COMP-5, COMP-7).

    ``claims`` have not reported. Such a step may have failed all the same, its message refused after its worker's death (NATIVE-3):
    test_a_step_that_is_refused_after_its_worker_has_died_is_undone_as_one_that_may_have_done_its_work
    """
    if entry.status == "completed":
        return "completed"
    if isinstance(entry, ChildEntry):
        return None
    kind = load_error(entry.error)["type"].rsplit(".", 1)[-1] if entry.error else ""
    for_good = entry.status == "optional_failed" or (entry.status == "failed" and entry.given_up)
    if for_good and kind == "ResultNotSerializableError":
        return "completed"  # CODEC-2: the work was done, only its result could not be kept
    if not on_self_failure:
        return None
    between_tries = entry.status == "expired" and kind != "StepExpiredError"
    if entry.status in ("failed", "optional_failed", "awaiting_retry") or between_tries:
        return "unknown" if claims or kind in ("TimeLimitExceeded", "StepInterruptedError") else "failed"
    # It was at work once, and nobody knows how far it came: running, or given back by a worker that stopped in its middle.
    return "unknown" if entry.attempts else None


def _queue_of(engine: Engine, actor: str | None) -> str:
    facts = engine.actor_facts(actor) if actor else None
    return facts.queue if facts else "default"


def _outgoing(snapshot: Snapshot, row: dict[str, Any], now: int) -> Outgoing:
    delay = None if row["not_before"] is None else max(0, row["not_before"] - now)
    return Outgoing(
        "compensation", snapshot.run_id, row["actor"], row["queue"], row["sequence"], priority=row["priority"],
        options=row["options"], delay=delay, created_at=snapshot.created_at,
    )  # fmt: skip


def holds(tx: Tx, run_id: str, plan: Plan) -> bool:
    """Whether the steps that ``plan`` rests on are still as it found them, and will be until this transaction ends.

    No claim, failed try or claim given back can land from here on: each takes the run's lock first (DRIVE-7), and finds the step
    settled afterwards. test_a_step_that_reports_while_its_plan_is_written_is_refused_and_its_undo_goes
    """
    if plan.rests_on:
        tx.one(_RUN, (run_id,))
    return all(tx.one(_STEP_STATE, (run_id, sequence)) == tuple(state) for sequence, *state in plan.rests_on)


def enter(
    tx: Tx, engine: Engine, snapshot: Snapshot, plan: Plan, *, now: int, seen: int, sent_at: int | None, family: Family | None = None
) -> int:  # fmt: skip
    """Put the run under ``rolling_back`` and write every compensation row; 0 (and nothing written) where it has moved on since.

    Where nothing can be undone the run ends at once, and ``family`` hears of it.
    """
    if not holds(tx, snapshot.run_id, plan):
        return 0
    landed = tx.run(_ENTER, (plan.ends_as, seen, seen, plan.error, plan.reason, snapshot.run_id, *snapshot.version_read))
    if landed:
        first = {message.sequence for message in plan.messages}
        for row in plan.rows:
            broken = row["status"] == "failed"
            tx.run(
                _INSERT,
                (
                    snapshot.run_id,
                    row["sequence"],
                    row["level"],
                    row["actor"],
                    row["queue"],
                    row["priority"],
                    json.dumps(row["options"]) if row["options"] else None,
                    row["args"],
                    row["undoes"],
                    row["undoes_key"],
                    row["policy"],
                    row["status"],
                    broken,
                    row["not_before"],
                    row["reclaim"],
                    sent_at if row["sequence"] in first else None,
                    now,
                    row["error"],
                    now if broken else None,
                ),
            )
        if not plan.messages:
            run = tx.one(_RUN, (snapshot.run_id,))
            if run is not None:
                following = undoing.stands(tx, snapshot.run_id, run, now)
                lines = undoing.go_on(tx, engine, snapshot.run_id, run=run, following=following, now=now, family=family)
                engine.record(tx, snapshot.run_id, now, lines)
                tx.after_commit(lambda: notify.changes(engine, snapshot.run_id, snapshot.workflow, now, lines))
    return landed
