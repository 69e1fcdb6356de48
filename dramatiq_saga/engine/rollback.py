"""Rollback: the plan is rows, and driving it is reading rows (idea 4; COMP-1 … COMP-10).

:func:`draft` works out, before the transaction, what is to be undone: completed steps with a compensation, in reverse order of
sequence, one level each. :func:`enter` writes every compensation row and puts the run under ``rolling_back`` in the
transaction that also settles its live rows. From then on no workflow code is needed: :func:`settle` records a
compensation's outcome behind its fence and, in the same transaction, sends the next level or ends the run.

Who else may be here: an outcome that arrives while the plan is drafted (it raises the wake count, so the plan loses and is
drafted again), a straggler of a step that is being undone (fenced), a second delivery of a compensation (its claim is lost),
a cancel (never interrupts a rollback, COMP-9). Proven by ``tests/races/test_interleavings.py``.

Long because planning an undo and carrying it out are read against each other: what one writes, the other surveys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..codec import describe_error, load_error
from ..errors import CompensationFailedError, CompensationUnfinishedError, SagaError, in_one_line, qualified_name
from ..journal import history
from . import notify
from .claim import Claim, idempotency_key
from .replay import HoldRun
from .rows import CompensationSpec, Outgoing, Snapshot, StepEntry

if TYPE_CHECKING:
    from ..store.database import Tx
    from .claim import Job
    from .core import Engine, Outbox, Sender
    from .rows import Decision

_STEPS = (
    "SELECT sequence, status, given_up, attempts, cycle, error, comp_actor, comp_args, comp_options, comp_on_self_failure, "
    "comp_policy, comp_reclaim_stale_after_seconds, reclaim_stale_at, time_limit_at, comp_from_result FROM {action_runs} "
    "WHERE run_id = ? AND (comp_actor IS NOT NULL OR comp_from_result = TRUE) ORDER BY sequence DESC"
)
_STEP_STATE = "SELECT status, attempts FROM {action_runs} WHERE run_id = ? AND sequence = ?"
_ENTER = (
    "UPDATE {flow_runs} SET status = 'rolling_back', rollback = 'running', ends_as = ?, revision = revision + 1, wakes_seen = ?, "
    "wakes = ?, error = ?, reason = COALESCE(?, reason), woken_at = NULL, hold_error = NULL, hold_until = NULL "
    "WHERE id = ? AND revision = ? AND wakes = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)
_INSERT = (
    "INSERT INTO {compensation_runs} (run_id, sequence, level, actor, queue, priority, options, args, undoes, undoes_key, policy, "
    "status, given_up, attempts, tries, claims, not_before, reclaim_stale_after_seconds, sent_at, repair_attempts, created_at, "
    "error, ended_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?, 0, ?, ?, ?)"
)
_OWN = "run_id = ? AND sequence = ? AND status = 'running' AND attempts = ?"
_COMPLETE = (
    "UPDATE {compensation_runs} SET status = 'completed', error = NULL, claims = 0, reclaim_stale_at = NULL, ended_at = ? "
    f"WHERE {_OWN}"
)
_FAIL = (
    "UPDATE {compensation_runs} SET status = 'failed', error = ?, given_up = TRUE, tries = tries + 1, claims = 0, "
    f"reclaim_stale_at = NULL, ended_at = ? WHERE {_OWN}"
)
_GIVE_UP = (
    "UPDATE {compensation_runs} SET given_up = TRUE, ended_at = ?, next_try_at = NULL "
    "WHERE run_id = ? AND sequence = ? AND status = 'failed' AND given_up = FALSE AND attempts = ?"
)
_REFUSE = (
    "UPDATE {compensation_runs} SET status = 'failed', error = ?, given_up = TRUE, ended_at = ? WHERE run_id = ? AND sequence = ? "
    "AND (status = 'pending' OR (status = 'failed' AND given_up = FALSE)) AND attempts = ?"
)
# A row that is `running` and given up has been left behind by its level (PAR-3); its late outcome still lands.
_LEAVE = (
    "UPDATE {compensation_runs} SET given_up = TRUE, error = ? WHERE run_id = ? AND sequence = ? AND status = 'running' "
    "AND given_up = FALSE AND attempts = ? AND reclaim_stale_at IS NULL"
)
_ROWS = (
    "SELECT sequence, level, actor, queue, priority, options, status, given_up, policy, attempts, tries, error, not_before, sent_at "
    "FROM {compensation_runs} WHERE run_id = ? ORDER BY level, sequence DESC"
)
_RUN_STATE = "SELECT status, rollback, ends_as, workflow, error FROM {flow_runs} WHERE id = ?"
_RUN = _RUN_STATE + "{for_update}"
_END = (
    "UPDATE {flow_runs} SET status = ends_as, rollback = ?, rollback_error = ?, ended_at = ?, revision = revision + 1, "
    "wakes_seen = wakes WHERE id = ? AND status = 'rolling_back' AND rollback = 'running'"
)
_SENT = "UPDATE {compensation_runs} SET sent_at = ? WHERE run_id = ? AND sequence = ? AND status = 'pending'"
_UNFINISHED = qualified_name(CompensationUnfinishedError)
_RELEASE_HELD = (
    "UPDATE {compensation_runs} SET not_before = NULL WHERE run_id = ? AND sequence = ? AND status = 'pending' "
    "AND not_before IS NOT NULL"
)


class ReplanIncompleteError(SagaError):
    """The function ended before it had built the undo of a step that has to be undone; the run is held (COMP-3)."""

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
    rests_on: list[tuple[int, str, int]] = field(default_factory=list)  # unsettled steps: sequence, status, attempts


def draft(
    engine: Engine, snapshot: Snapshot, decision: Decision | None, *, ends_as: str = "failed", reason: str | None = None
) -> Plan:
    """What is to be undone of the run as ``snapshot`` has it. Runs no business code and writes nothing (COMP-2).

    Raises:
      HoldRun: the undo of a completed step has not been built, so what can be planned is not the whole (COMP-3).
    """
    resolved: dict[int, CompensationSpec] = dict(decision.resolved) if decision else {}
    plan = Plan(ends_as, decision.error if decision else None, reason)
    candidates = [
        entry for entry in snapshot.entries
        if isinstance(entry, StepEntry) and (entry.comp_actor is not None or entry.comp_from_result)
    ]  # fmt: skip
    if not candidates:
        return plan
    entries = {entry.sequence: entry for entry in candidates}
    rows = engine.store.read(lambda tx: tx.all(_STEPS, (snapshot.run_id,)))
    now = engine.now()
    for row in rows:
        entry = entries.get(row[0])
        if entry is None:
            continue
        if row[9] and entry.is_live:
            # A claim, or a failed try, changes the row and neither revision nor wakes: it is taken as it stands, and has
            # to stand so still when the plan is written. test_a_plan_loses_to_a_claim_that_lands_while_it_is_made_and_undoes_that_step_too
            entry = replace(entry, status=row[1], given_up=bool(row[2]), attempts=row[3], error=row[5])
            plan.rests_on.append((row[0], row[1], row[3]))
        if entry.status == "completed" and entry.comp_from_result and row[7] is None and row[0] not in resolved:
            engine.anomalies.replan_incomplete(run_id=snapshot.run_id, workflow=snapshot.workflow, missing=row[0])
            raise HoldRun(ReplanIncompleteError(row[0], entry.actor))
        planned = _planned(engine, snapshot.run_id, entry, row, resolved.get(row[0]), now)
        if planned is not None:
            planned["level"] = len(plan.rows)
            plan.rows.append(planned)
    for planned in plan.rows:  # the first level that can run, unless one that cannot be built stops the rollback before it
        if planned["status"] == "pending":
            plan.messages = [_outgoing(snapshot.run_id, planned, now)]
            break
        if planned["policy"] == "stop":
            break
    return plan


def _planned(
    engine: Engine, run_id: str, entry: StepEntry, row: tuple[Any, ...], spec: CompensationSpec | None, now: int
) -> dict[str, Any] | None:
    """One compensation row, or ``None`` where this step is not to be undone."""
    sequence, _, _, _, cycle, _, actor, args, options_text, on_self_failure, policy, reclaim, stale_at, limit_at, _ = row
    undoes = _undoes(entry, bool(on_self_failure))
    if undoes is None:
        return None
    if spec is not None:
        actor, args, options_text = spec.actor, spec.args, spec.options
    options = json.loads(options_text) if options_text else {}
    broken = None
    if actor is None or args is None:
        broken = describe_error(
            CompensationFailedError(
                f"the compensation of step {sequence} ({entry.actor}) is built from the step's result, and there is none that can be read"
            )
        )
    not_before = None
    if entry.status == "running":  # COMP-9: no refund before the charge has reported, gone stale or run out of time
        known = [moment for moment in (stale_at, limit_at) if moment is not None]
        not_before = min(known) if known else now + 600_000
    return {
        "sequence": sequence,
        "actor": actor or "",
        "queue": options.pop("queue_name", None) or _queue_of(engine, actor),
        "priority": options.pop("priority", None),
        "options": options or None,
        "args": bytes(args) if args is not None else b"",
        "undoes": undoes,
        "undoes_key": idempotency_key(run_id, sequence, cycle),
        "policy": policy or engine.settings.sagas.default_compensation_failure_policy,
        "status": "failed" if broken else "pending",
        "error": broken,
        "not_before": not_before,
        "reclaim": reclaim,
    }


def _undoes(entry: StepEntry, on_self_failure: bool) -> str | None:
    """What the step left behind: ``completed``, ``failed``, ``unknown``; ``None`` where nothing is to be undone (COMP-5, COMP-7)."""
    if entry.status == "completed":
        return "completed"
    kind = load_error(entry.error)["type"].rsplit(".", 1)[-1] if entry.error else ""
    if entry.status == "failed" and entry.given_up and kind == "ResultNotSerializableError":
        return "completed"  # CODEC-2: the work was done, only its result could not be kept
    if not on_self_failure:
        return None
    if entry.status == "failed" and entry.given_up:
        return "unknown" if kind in ("TimeLimitExceeded", "StepInterruptedError") else "failed"
    if entry.status == "running" or (entry.status == "expired" and entry.attempts):
        return "unknown"
    if entry.status == "failed":
        return "failed"
    return None


def _queue_of(engine: Engine, actor: str | None) -> str:
    facts = engine.actor_facts(actor) if actor else None
    return facts.queue if facts else "default"


def _outgoing(run_id: str, row: dict[str, Any], now: int | None = None) -> Outgoing:
    delay = None
    if row.get("not_before") is not None and now is not None:
        delay = max(0, row["not_before"] - now)
    return Outgoing(
        "compensation", run_id, row["actor"], row["queue"], row["sequence"], attempts=row.get("attempts", 0), tries=row.get("tries", 0),
        priority=row["priority"], options=row["options"], delay=delay,
    )  # fmt: skip


def holds(tx: Tx, run_id: str, plan: Plan) -> bool:
    """Whether the unsettled steps that ``plan`` rests on are still as it found them, and will be until this transaction ends."""
    if plan.rests_on:
        tx.one(_RUN, (run_id,))  # no claim can land from here on: it takes this lock too (DRIVE-7)
    return all(tx.one(_STEP_STATE, (run_id, sequence)) == (status, attempts) for sequence, status, attempts in plan.rests_on)


def enter(tx: Tx, engine: Engine, snapshot: Snapshot, plan: Plan, *, now: int, seen: int, sent_at: int | None) -> int:
    """Put the run under ``rolling_back`` and write every compensation row; 0 (and nothing written) where it has moved on since."""
    if not holds(tx, snapshot.run_id, plan):
        return 0
    landed = tx.run(
        _ENTER, (plan.ends_as, seen, seen, plan.error, plan.reason, snapshot.run_id, snapshot.revision, snapshot.wakes)
    )
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
                following = _stands(tx, snapshot.run_id, run, now)
                engine.record(tx, snapshot.run_id, now, _go_on(tx, snapshot.run_id, run, following, now))
    return landed


_LINES = {
    "completed": history.COMPENSATION_COMPLETED,
    "failed": history.COMPENSATION_FAILED,
    "refused": history.COMPENSATION_FAILED,
    "given_up": history.COMPENSATION_GIVEN_UP,
    "unfinished": history.COMPENSATION_GIVEN_UP,
}

# --- driving a rollback ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be recorded of a compensation."""

    kind: str  # completed | failed | given_up | refused | unfinished
    job: Job
    actor: str
    attempts: int
    error: str | None = None
    exception: BaseException | None = None


@dataclass(slots=True)
class _Next:
    """Where a rollback stands once the rows given to :func:`_survey` are as they are."""

    messages: list[Outgoing] = field(default_factory=list)
    finished: bool = False
    halted: bool = False
    error: str | None = None
    undone: list[int] = field(default_factory=list)

    def sends(self) -> list[int]:
        return [message.sequence for message in self.messages]


def completed(claim: Claim) -> Outcome:
    """The undo's body returned."""
    return Outcome("completed", claim.job, claim.actor, claim.attempts)


def failed(claim: Claim, error: str) -> Outcome:
    """The undo's body ended in a way that no further try can mend."""
    return Outcome("failed", claim.job, claim.actor, claim.attempts, error)


def unfinished(job: Job, actor: str, attempts: int) -> Outcome:
    """The undo's worker is gone, and nothing will ever take the row from it: its level ends without it (PAR-3, COMP-4)."""
    error = CompensationUnfinishedError(f"undo of step {job.sequence} ({actor}) had not finished when its level ended")
    return Outcome("unfinished", job, actor, attempts, describe_error(error))


def settle(engine: Engine, outcome: Outcome, sender: Sender, delivery: object | None) -> bool:
    """Record a compensation's outcome and go on with the rollback in the same transaction; false where the fence refused it."""
    job = outcome.job
    now = engine.now()
    outbox = sender.outbox(delivery)
    expected = engine.store.read(
        lambda tx: _stands(tx, job.run_id, tx.one(_RUN_STATE, (job.run_id,)), now, settled={job.sequence: outcome})
    )
    outbox.load(expected.messages)
    line = history.Line(
        _LINES[outcome.kind], sequence=job.sequence, name=outcome.actor, attempt=outcome.attempts, error=outcome.error
    )

    def operation(tx: Tx) -> tuple[bool, bool, list[history.Line], bool]:
        run = tx.one(_RUN, (job.run_id,))
        if not _write_outcome(tx, outcome, now):
            return False, _already(tx, outcome), [], False
        following = _stands(tx, job.run_id, run, now)
        lines = [line, *_go_on(tx, job.run_id, run, following, now)]
        staged = following.sends() == expected.sends()
        if staged:
            _send(tx, job.run_id, following, outbox, now)
        engine.record(tx, job.run_id, now, lines)
        return True, False, lines, staged

    landed, already, lines, staged = engine.write(operation, outbox)
    if landed:
        if staged:
            outbox.delivered()
        notify.changes(engine, job.run_id, None, now, lines)
        if not staged:
            advance(engine, job.run_id, sender, delivery)
        return True
    if already:
        advance(engine, job.run_id, sender, delivery)
        return True
    notify.compensation_rejected(engine, outcome)
    return False


def advance(engine: Engine, run_id: str, sender: Sender, delivery: object | None) -> None:
    """Look at a rollback's rows and send what is next, or end it: for a drive, a repair, an operator. Harmless when repeated."""
    while not _advance_once(engine, run_id, sender, delivery):
        pass


def _advance_once(engine: Engine, run_id: str, sender: Sender, delivery: object | None) -> bool:
    """One look; false (and nothing written) where the rows have changed between looking and writing."""
    now = engine.now()
    outbox = sender.outbox(delivery)
    expected = engine.store.read(lambda tx: _stands(tx, run_id, tx.one(_RUN_STATE, (run_id,)), now, unsent_only=True))
    outbox.load(expected.messages)

    def operation(tx: Tx) -> list[history.Line] | None:
        run = tx.one(_RUN, (run_id,))
        following = _stands(tx, run_id, run, now, unsent_only=True)
        if following.sends() != expected.sends():
            return None
        lines = _go_on(tx, run_id, run, following, now)
        engine.record(tx, run_id, now, lines)
        _send(tx, run_id, following, outbox, now)
        return lines

    lines = engine.write(operation, outbox)
    if lines is None:
        return False
    outbox.delivered()
    notify.changes(engine, run_id, None, now, lines)
    return True


def _send(tx: Tx, run_id: str, following: _Next, outbox: Outbox, now: int) -> None:
    """Put the loaded messages into the transaction and consume the one at hand."""
    if outbox.joined:
        for message in following.messages:
            tx.run(_SENT, (now, run_id, message.sequence))
    outbox.stage(tx)


def _stands(
    tx: Tx,
    run_id: str,
    run: tuple[Any, ...] | None,
    now: int,
    *,
    settled: dict[int, Outcome] | None = None,
    unsent_only: bool = False,
) -> _Next:
    """Where the rollback stands now; nothing is to be done where none is running."""
    if run is None or run[1] != "running":
        return _Next()
    return _survey(run_id, tx.all(_ROWS, (run_id,)), settled=settled or {}, now=now, unsent_only=unsent_only)


def _survey(
    run_id: str, rows: list[tuple[Any, ...]], *, settled: dict[int, Outcome], now: int, unsent_only: bool = False
) -> _Next:
    """Where the rollback stands: the messages of the level that is to run, or how it ends."""
    undone: list[int] = []
    failures: list[tuple[int, str, str | None]] = []
    levels: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        levels.setdefault(row[1], []).append(row)
    for level in sorted(levels):
        stop = False
        waiting: list[Outgoing] = []
        open_rows = False
        for row in levels[level]:
            (
                sequence,
                _,
                actor,
                queue,
                priority,
                options,
                status,
                given_up,
                policy,
                attempts,
                tries,
                error,
                not_before,
                sent_at,
            ) = row
            outcome = settled.get(sequence)
            if outcome is not None:
                status, given_up = ("completed", False) if outcome.kind == "completed" else ("failed", True)
                error = outcome.error or error
            if status == "completed":
                undone.append(sequence)
            elif given_up:
                failures.append((sequence, actor, error))
                stop = stop or policy == "stop"
            else:
                open_rows = True
                if status == "pending" and not (unsent_only and sent_at is not None):
                    waiting.append(
                        _outgoing(
                            run_id,
                            {
                                "actor": actor, "queue": queue, "sequence": sequence, "attempts": attempts, "tries": tries,
                                "priority": priority, "options": json.loads(options) if options else None, "not_before": not_before,
                            },
                            now,
                        )
                    )  # fmt: skip
        if open_rows:
            return _Next(waiting, undone=undone)
        if stop:
            return _Next([], True, True, _failure(failures), undone)
    return _Next([], True, False, _failure(failures), undone)


def _failure(failures: list[tuple[int, str, str | None]]) -> str | None:
    if not failures:
        return None
    parts = []
    for sequence, actor, error in failures:
        cause = load_error(error) if error else {"type": "unknown", "message": ""}
        parts.append(f"undo of step {sequence} ({actor}): {in_one_line(cause['type'], cause['message'])}")
    unfinished_only = all(error and load_error(error)["type"] == _UNFINISHED for _, _, error in failures)
    return describe_error((CompensationUnfinishedError if unfinished_only else CompensationFailedError)("; ".join(parts)))


def _go_on(tx: Tx, run_id: str, run: tuple[Any, ...] | None, following: _Next, now: int) -> list[history.Line]:
    """End the run where its rollback has come to an end."""
    if not following.finished or run is None:
        return []
    _, _, ends_as, workflow, error = run
    rollback = "halted" if following.halted else "done"
    if not tx.run(_END, (rollback, following.error, now, run_id)):
        return []
    undone = ", ".join(str(sequence) for sequence in following.undone) or "nothing"
    return [
        history.Line("rollback.finished", name=workflow, detail=f"{rollback}; undone: {undone}"),
        history.Line(f"flow.{ends_as}", name=workflow, error=error),
    ]


def _write_outcome(tx: Tx, outcome: Outcome, now: int) -> bool:
    key = (outcome.job.run_id, outcome.job.sequence)
    if outcome.kind == "completed":
        return bool(tx.run(_COMPLETE, (now, *key, outcome.attempts)))
    if outcome.kind == "failed":
        return bool(tx.run(_FAIL, (outcome.error, now, *key, outcome.attempts)))
    if outcome.kind == "given_up":
        return bool(tx.run(_GIVE_UP, (now, *key, outcome.attempts)))
    if outcome.kind == "unfinished":
        return bool(tx.run(_LEAVE, (outcome.error, *key, outcome.attempts)))
    return bool(tx.run(_REFUSE, (outcome.error, now, *key, outcome.attempts)))


def _already(tx: Tx, outcome: Outcome) -> bool:
    if outcome.kind == "unfinished":
        return True  # whatever it is now, somebody else has seen to it
    row = tx.one(
        "SELECT status, attempts, given_up FROM {compensation_runs} WHERE run_id = ? AND sequence = ?",
        (outcome.job.run_id, outcome.job.sequence),
    )
    if row is None or row[1] != outcome.attempts:
        return False
    return bool(
        row[0] == ("completed" if outcome.kind == "completed" else "failed") and (outcome.kind == "completed" or row[2])
    )


def body_reported(engine: Engine, run_id: str, sequence: int, sender: Sender) -> None:
    """A fenced step's body has ended: an undo that was held back until then may go (COMP-9)."""

    def operation(tx: Tx) -> bool:
        return bool(tx.run(_RELEASE_HELD, (run_id, sequence)))

    if engine.store.read(lambda tx: tx.one(_HELD, (run_id, sequence))) and engine.store.write(operation):
        resend(engine, run_id, sequence, sender)


_HELD = "SELECT 1 FROM {compensation_runs} WHERE run_id = ? AND sequence = ? AND status = 'pending' AND not_before IS NOT NULL"


def resend(engine: Engine, run_id: str, sequence: int, sender: Sender) -> bool:
    """Send a pending compensation's message again, where its level is the one that runs."""
    now = engine.now()
    level = engine.store.read(lambda tx: _stands(tx, run_id, tx.one(_RUN_STATE, (run_id,)), now))
    wanted = [message for message in level.messages if message.sequence == sequence]
    if not wanted:
        return False
    outbox = sender.outbox(None)
    outbox.load(wanted)

    def operation(tx: Tx) -> None:
        tx.run(_SENT, (now if outbox.joined else None, run_id, sequence))
        outbox.stage(tx)

    engine.store.write(operation)
    outbox.delivered()
    return True
