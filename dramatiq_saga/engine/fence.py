"""THE FENCE: what decides, after a body has run, whether its outcome counts (FENCE-1, FENCE-2).

Every outcome is one conditional ``UPDATE`` that repeats the claim's token: the row must still be in the state that the claim
left, with the ``attempts`` that the claim produced and its mark. A worker that lost its row meanwhile changes nothing: its report is
refused, journalled as ``outcome_rejected`` and handed to listeners, and a recorded outcome is never overwritten.

Where the run's function can be replayed here, the outcome, the decision that follows from it, the next messages and the
deletion of the message at hand are one transaction (DRIVE-1, DRIVE-2). Where it cannot (unknown workflow, a history that does
not fit, a side effect to record, a run that has moved on, a slow replay), the outcome commits alone with a wake and a
drive message.

Who else may be here: a straggler, a reclaim's second worker, a cancel, a rollback being planned, another drive. Each either
changes ``status`` or ``attempts`` of the row, or the revision or wake count of the run, and the loser writes nothing. Proven
by ``tests/races/test_interleavings.py`` and the state machine in ``tests/races/test_state_machine.py``. Long because every way in which
a step can end is refused or let through here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..codec import freeze
from ..journal import history
from ..store.trouble import is_trouble
from . import alarms, blocks, drive, notify, rollback, undoing
from . import decision as decisions
from .claim import SAME_RUN, Claim, Job
from .replay import MovedOn, NeedsRecording, Replay, replay, with_outcome
from .rows import Outgoing, StepEntry
from .snapshot import load
from .wakes import LOCK_RUN, THIS_RUN, WAKE

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Sender

#: A replay that took longer than this (seconds) is not carried out between a body's end and its recorded outcome.
SLOW_REPLAY = 0.1

# A straggler may outlive its run: that is pruned, and another one of the same id may have made as many claims by now. The mark is the
# claim's own. test_a_straggler_of_a_pruned_run_does_not_end_a_step_of_its_namesake
_OWN = "run_id = ? AND sequence = ? AND status = 'running' AND attempts = ? AND delivery = ?"
_COMPLETE = (
    "UPDATE {action_runs} SET status = 'completed', result = ?, error = NULL, claims = 0, reclaim_stale_at = NULL, ended_at = ? "
    f"WHERE {_OWN}"
)
# A failure for good. Of an optional step it is no failure of the run (OPT-1), unless its retries on signal come first: whether
# those are over is for a replay to say (RSIG-2).
_FINAL = "CASE WHEN optional = TRUE AND retry_policy IS NULL THEN 'optional_failed' ELSE 'failed' END"
_FAIL = (
    f"UPDATE {{action_runs}} SET status = {_FINAL}, error = ?, given_up = TRUE, tries = tries + 1, claims = 0, "
    f"reclaim_stale_at = NULL, ended_at = ? WHERE {_OWN}"
)
_GIVE_UP = (
    f"UPDATE {{action_runs}} SET status = {_FINAL}, given_up = TRUE, ended_at = ?, next_try_at = NULL "
    "WHERE run_id = ? AND sequence = ? AND status = 'failed' AND given_up = FALSE AND attempts = ? AND delivery = ?"
)
_REFUSE = (
    f"UPDATE {{action_runs}} SET status = {_FINAL}, error = ?, given_up = TRUE, ended_at = ? WHERE run_id = ? AND sequence = ? "
    "AND (status = 'pending' OR (status = 'failed' AND given_up = FALSE)) AND attempts = ? AND cycle = ? "
    f"AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = run_id AND {SAME_RUN})"
)
# A run that was pruned and started again under its id may stand at the same count: when it was created tells them apart.
# test_a_worker_that_remembers_a_pruned_run_does_not_take_its_namesake_for_it
_FRESH = (
    f" AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = ? AND f.revision = ? AND f.wakes = ? AND f.{THIS_RUN} "
    "AND f.ended_at IS NULL AND f.status <> 'rolling_back')"
)
_FAIL_TRY = (
    "UPDATE {%s} SET status = 'failed', error = ?, tries = tries + 1, claims = 0, reclaim_stale_at = NULL, next_try_at = ? "
    "WHERE run_id = ? AND sequence = ? AND status = 'running' AND attempts = ? AND delivery = ?"
)
_FAIL_TRY_STEP = _FAIL_TRY.replace("%s", "action_runs")
# An undo that its level has left behind was given up while it ran (PAR-3): with this failure it has its end.
_FAIL_TRY_COMPENSATION = _FAIL_TRY.replace("%s", "compensation_runs").replace(
    "next_try_at = ?", "next_try_at = ?, ended_at = CASE WHEN given_up = TRUE THEN ? ELSE NULL END"
)
_READ_ROW = (
    "SELECT status, attempts, given_up, result, error, cycle, delivery FROM {action_runs} WHERE run_id = ? AND sequence = ?"
)


_LINES = {
    "completed": history.ACTION_COMPLETED,
    "failed": history.ACTION_FAILED,
    "refused": history.ACTION_FAILED,
    "given_up": history.ACTION_GIVEN_UP,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be recorded of a step: how it ended, and from which state that may be said."""

    kind: str  # completed | failed | given_up | refused
    job: Job
    actor: str
    workflow: str
    queue: str
    attempts: int
    result: bytes | None = None
    error: str | None = None
    known: tuple[int, int, int] | None = None  # the run as it was last seen: ``Snapshot.version_read``; None: long ago
    exception: BaseException | None = None  # for those who listen to a rejection
    block: int | None = None  # the parallel block that the step is a member of, where its claim tells
    delivery: str | None = None  # the claim's mark, where it is one's outcome

    @property
    def status(self) -> str:
        return "completed" if self.kind == "completed" else "failed"


def completed(claim: Claim, result: bytes) -> Outcome:
    """The body returned."""
    return Outcome(
        "completed", claim.job, claim.actor, claim.workflow, claim.queue, claim.attempts, result,
        known=claim.known, block=claim.block, delivery=claim.delivery,
    )  # fmt: skip


def failed(claim: Claim, error: str) -> Outcome:
    """The body ended in a way that no further try can mend."""
    return Outcome(
        "failed", claim.job, claim.actor, claim.workflow, claim.queue, claim.attempts, error=error,
        known=claim.known, block=claim.block, delivery=claim.delivery,
    )  # fmt: skip


def given_up(claim: Claim) -> Outcome:
    """Dramatiq will not try again: the failure that the row tells of is the last (NATIVE-2)."""
    return Outcome(
        "given_up",
        claim.job,
        claim.actor,
        claim.workflow,
        claim.queue,
        claim.attempts,
        block=claim.block,
        delivery=claim.delivery,
    )


def settle(engine: Engine, outcome: Outcome, sender: Sender, delivery: object | None) -> bool:
    """Record ``outcome`` and drive the run on; false where the fence refused it (FENCE-1).

    Safe to call again after a ``StoreError``: a write that finds its own attempt and outcome has landed.
    """
    if outcome.block is None:
        return _settle(engine, outcome, sender, delivery)
    return _settle_member(engine, outcome, outcome.block, sender, delivery)


def _settle_member(engine: Engine, outcome: Outcome, block: int, sender: Sender, delivery: object | None) -> bool:
    """A member of a parallel block: alone while others are at work, as any step where it is the last (PAR-2)."""
    job = outcome.job
    lines: list[history.Line] = []

    def write(tx: Tx, now: int) -> bool:
        if not _write_outcome(tx, outcome, now):
            return False
        _set_lines(tx, outcome, lines)
        return True

    member = blocks.Member(job.run_id, block, job.sequence, failed=outcome.kind != "completed", created_at=job.created_at)
    standing = blocks.settle_member(engine, member, sender, delivery=delivery, write=write, lines=lines)
    if standing.landed:
        notify.changes(engine, job.run_id, outcome.workflow, engine.now(), lines)
    else:
        # With the outcomes of the others, of which this one's claim did not know.
        if not _settle(engine, replace(outcome, known=None), sender, delivery):
            return False
    if standing.closed_early:
        engine.anomalies.batch_finished_early(
            row=job.row, run_id=job.run_id, sequence=job.sequence, actor=outcome.actor, block=block
        )
    return True


def _settle(engine: Engine, outcome: Outcome, sender: Sender, delivery: object | None) -> bool:
    """An outcome that a drive has to see."""
    recorded = threading.Event()
    if _drives(engine, outcome):
        try:
            if _settle_with_decision(engine, outcome, sender, delivery, recorded=recorded):
                return True
        except Exception as fault:
            if is_trouble(fault):
                raise
            # It is one of the decision (a history that cannot be read, a value of what follows that the database will not have),
            # never of the outcome, which does not wait for it: the drive will deal with it.
            engine.cache.drop(outcome.job.run_id)
    return _settle_alone(engine, outcome, sender, delivery, recorded=recorded.is_set())


def _settle_with_decision(
    engine: Engine, outcome: Outcome, sender: Sender, delivery: object | None, *, recorded: threading.Event
) -> bool:
    """Outcome and decision in one transaction; false (and nothing written) where that is not possible.

    ``recorded`` is set where the look-out has recorded the outcome meanwhile (:func:`_record`).
    """
    job = outcome.job
    snapshot = engine.cache.get(job.run_id)
    if snapshot is None or snapshot.version_read != outcome.known:
        snapshot = load(engine, job.run_id)
    if snapshot is None or job.sequence > len(snapshot.entries) or snapshot.close_request is not None:
        return False
    entry = snapshot.entries[job.sequence - 1]
    if not isinstance(entry, StepEntry):
        return False
    error = outcome.error if outcome.error is not None else entry.error
    if outcome.kind == "given_up" and outcome.error is None:
        error = engine.store.read(lambda tx: tx.one(_READ_ROW, (job.run_id, job.sequence)) or (None,) * 7)[4]
    value = None if outcome.result is None else freeze(outcome.result)
    completed = outcome.kind == "completed"
    entry = entry.settled(
        status="completed" if completed else entry.final_failure, given_up=not completed, attempts=outcome.attempts, value=value,
        error=None if completed else error,
    )  # fmt: skip
    after = with_outcome(snapshot, entry)
    definition = engine.workflows[outcome.workflow]
    if engine.replay_cost.get(job.run_id, 0.0) > SLOW_REPLAY:
        return False
    context = Replay(after, now=engine.now(), settings=engine.settings)
    outbox = sender.outbox(delivery)
    started = time.perf_counter()
    try:
        record = partial(_record, engine, outcome, sender, recorded)
        with engine.lookout.call(outcome.workflow, job.run_id, snapshot.created_at, record=record):
            decision = replay(definition.function, context, engine.make_flow)
        engine.note_cost(job.run_id, time.perf_counter() - started)
        plan = rollback.draft(engine, after, decision) if decision.kind == "failed" else None
        now = engine.now()
        family = drive.family_of(engine, after, decision, plan)
        outbox.load(drive.messages(engine, snapshot, decision, plan=plan, family=family, now=now))
        ahead = alarms.for_decision(engine, sender, snapshot, decision, now=now)
    except NeedsRecording:
        return False
    if decision.kind == "suspended" and after.is_overdue(now):
        return False  # nothing begins after the run's deadline: the drive ends it (EXPIRE-1)
    lines = [*_lines(outcome, entry.status), *decisions.events(snapshot, decision, plan)]

    def operation(tx: Tx) -> bool:
        if family is not None:
            family.lock(tx)
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (job.run_id,))  # DRIVE-7: the run's row first, then the rest
        if not _write_outcome(tx, outcome, now, fresh=(job.run_id, snapshot.revision, snapshot.wakes, snapshot.created_at)):
            return False
        sent_at = now if outbox.joined else None
        if not decisions.write(
            tx, engine, snapshot, decision, now=now, sent_at=sent_at, wakes=1, plan=plan, entries=after.entries, family=family
        ):  # fmt: skip
            raise MovedOn  # a plan that rests on a step which has moved on since: nothing is written
        engine.record(tx, job.run_id, now, lines)
        for alarm in ahead:
            alarm.stage(tx)
        outbox.stage(tx)
        return True

    if not drive.commit(engine, snapshot, decision, outbox, operation=operation):
        return False
    drive.remember(engine, after, decision, context)
    try:
        for alarm in ahead:
            alarm.delivered()
        outbox.delivered()
    finally:
        notify.changes(engine, job.run_id, outcome.workflow, now, lines)
    return True


def _drives(engine: Engine, outcome: Outcome) -> bool:
    """Whether the run is to be driven here: where another thread is in the workflow's function for long, it may be one that hangs."""
    return engine.drives(outcome.workflow, outcome.queue) and outcome.workflow not in engine.lookout.busy()


def _record(engine: Engine, outcome: Outcome, sender: Sender, recorded: threading.Event) -> None:
    """Record an outcome whose decision does not come. The message at hand is left to whoever is at it, and is done with once that is back.

    That one also tells what the fence has refused, once; ``recorded`` tells it that nothing was, whatever has become of the row since.
    test_an_outcome_does_not_wait_for_a_function_that_hangs, test_a_refused_outcome_whose_function_hangs_is_told_once,
    test_an_outcome_that_was_recorded_is_not_refused_later
    """
    _settle_alone(engine, outcome, sender, None, here=False, landing=recorded)


def _settle_alone(
    engine: Engine, outcome: Outcome, sender: Sender, delivery: object | None, *,
    here: bool | None = None, landing: threading.Event | None = None, recorded: bool = False,
) -> bool:  # fmt: skip
    """The outcome, its wake and a drive message; then, where this process can, the drive itself (DRIVE-2, DRIVE-6)."""
    job = outcome.job
    outbox = sender.outbox(delivery)
    outbox.load([Outgoing("drive", job.run_id, outcome.workflow, outcome.queue)])
    here = _drives(engine, outcome) if here is None else here
    now = engine.now()
    lines: list[history.Line] = []

    def operation(tx: Tx) -> tuple[bool, bool]:
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (job.run_id,))
        if not _write_outcome(tx, outcome, now):
            already = recorded or _already(tx, outcome)
            if already and not here and landing is None:
                outbox.stage(tx)  # the message at hand becomes the drive's all the same
            return False, already
        tx.run(WAKE, (now, job.run_id))
        _set_lines(tx, outcome, lines)
        engine.record(tx, job.run_id, now, lines)
        if here:
            outbox.keep(tx)
        else:
            outbox.stage(tx)
        return True, False

    landed, already = engine.write(operation, outbox)
    if landing is not None and (landed or already):
        landing.set()
    if not landed and (landing is not None or not already):
        if landing is None:
            _rejected(engine, outcome, sender)
        return already
    if landed:
        notify.changes(engine, job.run_id, outcome.workflow, now, lines)
    if here:
        drive.drive(engine, job.run_id, sender, delivery)
    else:
        outbox.delivered()
    return True


def _write_outcome(tx: Tx, outcome: Outcome, now: int, *, fresh: tuple[str, int, int, int] | None = None) -> bool:
    """The conditional ``UPDATE`` of the fence, with the freshness of the run's history where a decision rests on it."""
    job = outcome.job
    key = (job.run_id, job.sequence)
    params: tuple[object, ...]
    if outcome.kind == "completed":
        sql, params = _COMPLETE, (outcome.result, now, *key, outcome.attempts, outcome.delivery)
    elif outcome.kind == "failed":
        sql, params = _FAIL, (outcome.error, now, *key, outcome.attempts, outcome.delivery)
    elif outcome.kind == "given_up":
        sql, params = _GIVE_UP, (now, *key, outcome.attempts, outcome.delivery)
    else:
        sql, params = _REFUSE, (outcome.error, now, *key, outcome.attempts, job.cycle, job.created_at)
    if fresh is None:
        return bool(tx.run(sql, params))
    return bool(tx.run(sql + _FRESH, (*params, *fresh)))


def _already(tx: Tx, outcome: Outcome) -> bool:
    """Whether this very outcome stands on the row: an earlier try at writing it did land (FENCE-1).

    The token says it: only the claim that it belongs to ends with it. What is stored is not compared, since an error that is
    described again, after an interrupt, may read a little differently.
    """
    row = tx.one(_READ_ROW, (outcome.job.run_id, outcome.job.sequence))
    if row is None:
        return False
    status, attempts, given_up = row[:3]
    if attempts != outcome.attempts or outcome.delivery not in (None, row[6]):
        return False
    if outcome.kind == "completed":
        return bool(status == "completed")
    # Given up; or the decision beside it has parked the row since, or has had it run again (RSIG-1).
    for_good = bool(given_up) and status in ("failed", "optional_failed")
    return for_good or status == "awaiting_retry" or bool(row[5] > outcome.job.cycle)


def _set_lines(tx: Tx, outcome: Outcome, lines: list[history.Line]) -> None:
    """What the history says of an outcome that has just been written; which status a failure led to, the row knows."""
    row = None if outcome.kind == "completed" else tx.one(_READ_ROW, (outcome.job.run_id, outcome.job.sequence))
    lines[:] = _lines(outcome, "" if row is None else row[0])


def _lines(outcome: Outcome, status: str) -> list[history.Line]:
    """What the history says of an outcome that has put the row into ``status``."""
    sequence, actor, attempts = outcome.job.sequence, outcome.actor, outcome.attempts
    lines = [
        history.Line(
            _LINES[outcome.kind], sequence=sequence, name=actor, attempt=attempts, payload=outcome.result, error=outcome.error
        )
    ]
    if status == "optional_failed":
        lines.append(history.Line(history.ACTION_OPTIONAL_FAILED, sequence=sequence, name=actor, attempt=attempts))
    return lines


def _rejected(engine: Engine, outcome: Outcome, sender: Sender) -> None:
    """Journal a refused report, hand it to listeners, and let an undo that waited for it go (COMP-9)."""
    if outcome.kind in ("completed", "failed"):
        notify.step_rejected(engine, outcome)
        undoing.body_reported(engine, outcome, sender)
    else:
        engine.anomalies.write_refused(
            site=outcome.kind, row="action", run_id=outcome.job.run_id, sequence=outcome.job.sequence, actor=outcome.actor,
        )  # fmt: skip


def fail_try(engine: Engine, claim: Claim, error: str) -> bool:
    """A body failed and Dramatiq may try again: ``failed``, not given up (NATIVE-1). False where the fence refused it, and where
    there is no further try because the step's block has failed (PAR-4).

    ``next_try_at`` is now until Dramatiq has said when: a row whose try was never asked for (its worker died just then) can be
    told from one that waits for its moment (DOCTOR-1).
    """
    job = claim.job
    now = engine.now()
    sql = _FAIL_TRY_STEP if job.kind == "step" else _FAIL_TRY_COMPENSATION
    kind = history.ACTION_FAILED if job.kind == "step" else history.COMPENSATION_FAILED
    lines = [history.Line(kind, sequence=job.sequence, name=claim.actor, attempt=claim.attempts, error=error)]
    table = "{action_runs}" if job.kind == "step" else "{compensation_runs}"

    def operation(tx: Tx) -> tuple[bool, bool]:
        # Who else may be here: a rollback's plan that found the step at work. The run's row first (DRIVE-7), so the plan either sees
        # this failure and is drafted again, or has settled the step, and this report is refused.
        # test_a_plan_loses_to_a_failed_try_that_lands_while_it_is_written
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (job.run_id,))
        if claim.block is not None and blocks.gets_no_further_try(tx, job.run_id, claim.block):
            return False, False
        moments = (now,) if job.kind == "step" else (now, now)
        if tx.run(sql, (error, *moments, job.run_id, job.sequence, claim.attempts, claim.delivery)):
            engine.record(tx, job.run_id, now, lines)
            return True, False
        row = tx.one(f"SELECT status, delivery FROM {table} WHERE run_id = ? AND sequence = ?", (job.run_id, job.sequence))
        return False, row == ("failed", claim.delivery)

    landed, already = engine.store.write(operation)
    if landed:
        notify.changes(engine, job.run_id, claim.workflow, now, lines)
    return landed or already


_NEXT_TRY = "UPDATE {%s} SET next_try_at = ? WHERE run_id = ? AND sequence = ? AND status = 'failed' AND given_up = FALSE AND delivery = ?"


def note_next_try(engine: Engine, claim: Claim, at: int) -> None:
    """Note when Dramatiq will try again, for people to read (NATIVE-6); losing the note loses nothing."""
    job = claim.job
    sql = _NEXT_TRY.replace("%s", "action_runs" if job.kind == "step" else "compensation_runs")
    engine.store.write(lambda tx: tx.run(sql, (at, job.run_id, job.sequence, claim.delivery)))


__all__ = ["Outcome", "completed", "fail_try", "failed", "given_up", "note_next_try", "settle"]
