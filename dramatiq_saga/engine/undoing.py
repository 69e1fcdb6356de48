"""Undoing: carrying out a rollback whose plan is rows (idea 4; COMP-1, COMP-4, COMP-8, PAR-3).

No workflow code is needed here. :func:`settle` records a compensation's outcome behind its fence and, in the same transaction,
sends the next level or ends the run; :func:`advance` looks at the rows and does what they ask for, for a drive, a repair or an
operator; :func:`level_closed` is what a level's callback calls; :func:`abandon` ends a level for an operator; :func:`resume` sets a
halted rollback going again.

Who else may be here: the other members of a level, which finish at the same moment (all of them lock the run's row first, so
exactly one finds the level ended), a second delivery (its claim is lost), a straggler of a claim that is no more (fenced by
``attempts``), a second operator (``rollback`` is ``halted`` for one of them only). Proven by ``tests/races/test_undoing.py`` and
``tests/races/test_interleavings.py``.

Long because every way in which a compensation can end leads to the same question: what does the rollback do next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..clock import to_iso
from ..codec import describe_error, load_error
from ..errors import (
    CompensationFailedError,
    CompensationUnfinishedError,
    ConcurrentTransitionError,
    FlowNotFoundError,
    in_one_line,
    qualified_name,
)
from ..journal import history
from . import children, liveness, notify
from .claim import SAME_RUN, Claim, Job, Lost
from .rows import Group, Outgoing
from .wakes import LOCK_RUN

if TYPE_CHECKING:
    from ..store.database import Tx
    from .children import Family
    from .core import Engine, Outbox, Sender
    from .fence import Outcome as StepOutcome

_OWN = "run_id = ? AND sequence = ? AND status = 'running' AND attempts = ? AND delivery = ?"
_COMPLETE = (
    "UPDATE {compensation_runs} SET status = 'completed', given_up = FALSE, error = NULL, claims = 0, reclaim_stale_at = NULL, "
    f"ended_at = ? WHERE {_OWN}"
)
_FAIL = (
    "UPDATE {compensation_runs} SET status = 'failed', error = ?, given_up = TRUE, tries = tries + 1, claims = 0, "
    f"reclaim_stale_at = NULL, ended_at = ? WHERE {_OWN}"
)
_GIVE_UP = (
    "UPDATE {compensation_runs} SET given_up = TRUE, ended_at = ?, next_try_at = NULL "
    "WHERE run_id = ? AND sequence = ? AND status = 'failed' AND given_up = FALSE AND attempts = ? AND delivery = ?"
)
_REFUSE = (
    "UPDATE {compensation_runs} SET status = 'failed', error = ?, given_up = TRUE, ended_at = ? WHERE run_id = ? AND sequence = ? "
    "AND (status = 'pending' OR (status = 'failed' AND given_up = FALSE)) AND attempts = ? "
    f"AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = run_id AND {SAME_RUN})"
)
# A row that is `running` and given up has been left behind by its level (PAR-3); its late outcome still lands.
_LEAVE = (
    "UPDATE {compensation_runs} SET given_up = TRUE, error = ? WHERE run_id = ? AND sequence = ? AND status = 'running' "
    "AND given_up = FALSE AND attempts = ? AND reclaim_stale_at IS NULL"
)
_STATE = "SELECT status, attempts, given_up, delivery FROM {compensation_runs} WHERE run_id = ? AND sequence = ?"
_COLUMNS = (
    "r.sequence, r.level, r.actor, r.queue, r.priority, r.options, r.status, r.given_up, r.policy, r.attempts, r.tries, r.error, "
    "r.not_before, r.sent_at, r.reclaim_stale_at, r.worker_id"
)
_ROWS = f"SELECT {_COLUMNS} FROM {{compensation_runs}} r WHERE r.run_id = ? ORDER BY r.level, r.sequence DESC"
_ONE = f"SELECT {_COLUMNS} FROM {{compensation_runs}} r WHERE r.run_id = ? AND r.sequence = ?"
# test_a_callback_of_a_pruned_run_ends_no_level_of_its_namesake
_AT_WORK = (
    f"SELECT {_COLUMNS} FROM {{compensation_runs}} r WHERE r.run_id = ? AND r.level = ? AND r.ended_at IS NULL AND r.status = 'running' "
    f"AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = r.run_id AND {SAME_RUN})"
)
# The level that is open, whether an earlier one has stopped the rollback, and those rows of it that wait for a worker (NULLs where none
# does). Each part is answered by an index, so an undo costs the same however long its rollback is (C49).
# test_an_undo_reads_the_same_however_long_its_rollback_is, test_where_a_rollback_stands_is_what_all_of_its_rows_say
_OPEN = (
    f"SELECT l.level, l.stopped, {_COLUMNS} FROM ("
    "SELECT o.level, EXISTS (SELECT 1 FROM {compensation_runs} s WHERE s.run_id = ? AND s.level < o.level AND s.given_up = TRUE "
    "AND s.policy = 'stop' AND s.sequence <> ?) AS stopped FROM {compensation_runs} o WHERE o.run_id = ? AND o.ended_at IS NULL "
    "AND o.given_up = FALSE AND o.sequence <> ? ORDER BY o.level LIMIT 1) l "
    "LEFT JOIN {compensation_runs} r ON r.run_id = ? AND r.level = l.level AND r.ended_at IS NULL AND r.given_up = FALSE "
    "AND r.status = 'pending' AND r.sequence <> ?%s ORDER BY r.sequence DESC"
)
_OPEN_ALL, _OPEN_UNSENT = _OPEN.replace("%s", ""), _OPEN.replace("%s", " AND r.sent_at IS NULL")
_POLICY = "SELECT policy FROM {compensation_runs} WHERE run_id = ? AND sequence = ? AND level < ?"
_RUN_STATE = "SELECT status, rollback, ends_as, workflow, error, queue, priority, reason, parent_id, created_at FROM {flow_runs} WHERE id = ?"
_RUN = _RUN_STATE + "{for_update}"
_END = (
    "UPDATE {flow_runs} SET status = ends_as, rollback = ?, rollback_error = ?, ended_at = ?, revision = revision + 1, "
    "wakes_seen = wakes WHERE id = ? AND status = 'rolling_back' AND rollback = 'running'"
)
# A run whose rollback was resumed has ended before, and stays what it is (COMP-8).
_END_RESUMED = (
    "UPDATE {flow_runs} SET rollback = ?, rollback_error = ?, revision = revision + 1 "
    "WHERE id = ? AND ended_at IS NOT NULL AND rollback = 'running'"
)
_RESUME = (
    "UPDATE {flow_runs} SET rollback = 'running', rollback_error = NULL, revision = revision + 1, repair_attempts = 0, "
    "repair_after = NULL WHERE id = ? AND ended_at IS NOT NULL AND rollback = 'halted'"
)
_RENEW = (
    "UPDATE {compensation_runs} SET status = 'pending', given_up = FALSE, attempts = attempts + 1, tries = 0, claims = 0, "
    "worker_id = NULL, delivery = NULL, next_try_at = NULL, reclaim_stale_at = NULL, started_at = NULL, ended_at = NULL, "
    "sent_at = NULL, repair_attempts = 0, repair_after = NULL WHERE run_id = ? AND actor <> '' "
    "AND (status = 'failed' OR status = 'running' OR (status = 'pending' AND given_up = TRUE))"
)
_REFILL = "UPDATE {compensation_runs} SET sent_at = NULL, repair_attempts = 0, repair_after = NULL WHERE run_id = ? AND status = 'pending'"
_PASS_OVER = "UPDATE {compensation_runs} SET policy = 'continue' WHERE run_id = ? AND actor = '' AND status = 'failed'"
_SENT = "UPDATE {compensation_runs} SET sent_at = ? WHERE run_id = ? AND sequence = ? AND status = 'pending'"
# The last claim of a step that was settled over its head, and that is undone all the same; until its body is over, its worker stands there.
_FENCED = (
    "run_id = ? AND sequence = ? AND status IN ('cancelled', 'expired') AND comp_on_self_failure = TRUE AND worker_id IS NOT NULL "
    "AND attempts = ? AND delivery = ?"
)
_IS_FENCED = f"SELECT 1 FROM {{action_runs}} WHERE {_FENCED}"
_BODY_IS_OVER = f"UPDATE {{action_runs}} SET worker_id = NULL WHERE {_FENCED}"
_RELEASE_HELD = (
    "UPDATE {compensation_runs} SET not_before = NULL WHERE run_id = ? AND sequence = ? AND status = 'pending' "
    "AND not_before IS NOT NULL"
)
_UNFINISHED = qualified_name(CompensationUnfinishedError)

_LINES = {
    "completed": history.COMPENSATION_COMPLETED,
    "failed": history.COMPENSATION_FAILED,
    "refused": history.COMPENSATION_FAILED,
    "given_up": history.COMPENSATION_GIVEN_UP,
    "unfinished": history.COMPENSATION_GIVEN_UP,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be recorded of a compensation."""

    kind: str  # completed | failed | given_up | refused | unfinished
    job: Job
    actor: str
    attempts: int
    error: str | None = None
    exception: BaseException | None = None
    delivery: str | None = None  # the claim's mark, where it is one's outcome


class _Row(NamedTuple):
    """A compensation, as far as the question of what comes next goes."""

    sequence: int
    level: int
    actor: str
    queue: str
    priority: int | None
    options: str | None
    status: str
    given_up: bool
    policy: str
    attempts: int
    tries: int
    error: str | None
    not_before: int | None
    sent_at: int | None
    reclaim_stale_at: int | None
    worker_id: str | None

    def left_alone(self, engine: Engine) -> bool:
        """At work, as far as anybody knows, and nothing will ever take it from its worker: no deadline, no lease (RECLAIM-5)."""
        leased = liveness.is_on(engine.settings) and liveness.is_watched(self.worker_id)
        return self.status == "running" and not self.given_up and self.reclaim_stale_at is None and not leased

    def settled(self, outcome: Outcome) -> _Row:
        if outcome.kind == "completed":
            return self._replace(status="completed", given_up=False)
        return self._replace(status="failed", given_up=True, error=outcome.error or self.error)

    def renewed(self) -> _Row:
        """The row once its rollback has been resumed (what ``_RENEW``, ``_REFILL`` and ``_PASS_OVER`` make of it)."""
        if self.status == "completed":
            return self
        if not self.actor:
            return self._replace(policy="continue")
        spent = self.status != "pending" or self.given_up
        return self._replace(
            status="pending", given_up=False, attempts=self.attempts + spent, tries=0 if spent else self.tries,
            sent_at=None, reclaim_stale_at=None,
        )  # fmt: skip

    def message(self, run_id: str, now: int, *, created_at: int) -> Outgoing:
        delay = None if self.not_before is None else max(0, self.not_before - now)
        return Outgoing(
            "compensation", run_id, self.actor, self.queue, self.sequence, attempts=self.attempts, tries=self.tries,
            priority=self.priority, options=json.loads(self.options) if self.options else None, delay=delay, created_at=created_at,
        )  # fmt: skip


@dataclass(slots=True)
class Next:
    """Where a rollback stands: what is to be sent, or how it ends."""

    messages: list[Outgoing] = field(default_factory=list)
    finished: bool = False
    halted: bool = False
    error: str | None = None
    undone: list[int] = field(default_factory=list)

    def asks(self) -> tuple[bool, list[tuple[int, int, int | None]]]:
        """Whether the run is to end, and the messages by what they would claim."""
        return self.finished, [(message.sequence, message.attempts, message.created_at) for message in self.messages]


def completed(claim: Claim) -> Outcome:
    """The undo's body returned."""
    return Outcome("completed", claim.job, claim.actor, claim.attempts, delivery=claim.delivery)


def failed(claim: Claim, error: str) -> Outcome:
    """The undo's body ended in a way that no further try can mend."""
    return Outcome("failed", claim.job, claim.actor, claim.attempts, error, delivery=claim.delivery)


def unfinished(job: Job, actor: str, attempts: int) -> Outcome:
    """The undo's worker is gone, and nothing will ever take the row from it: its level ends without it (PAR-3, COMP-4)."""
    error = CompensationUnfinishedError(f"undo of step {job.sequence} ({actor}) had not finished when its level ended")
    return Outcome("unfinished", job, actor, attempts, describe_error(error))


def settle(engine: Engine, outcome: Outcome, sender: Sender, delivery: object | None) -> bool:
    """Record a compensation's outcome and go on with the rollback in the same transaction; false where the fence refused it.

    Who else may be here: the outcome of another member of the level. What comes next is read again under the run's lock; where it
    is not what was expected, the outcome is recorded alone, the message at hand is kept, and :func:`advance` looks again. A
    worker that dies in between leaves that message to be delivered again.
    test_two_undos_of_a_level_that_finish_at_once_send_the_next_level_once
    """
    job = outcome.job
    now = engine.now()
    outbox = sender.outbox(delivery)
    expected, family = engine.store.read(lambda tx: _expected(tx, job.run_id, now, settled=outcome))
    outbox.load([*expected.messages, *family.messages()])
    line = history.Line(
        _LINES[outcome.kind], sequence=job.sequence, name=outcome.actor, attempt=outcome.attempts, error=outcome.error
    )

    def operation(tx: Tx) -> tuple[bool, bool, list[history.Line], bool]:
        family.lock(tx)
        run = tx.one(_RUN, (job.run_id,))
        if not _write_outcome(tx, outcome, now):
            return False, _already(tx, outcome), [], False
        following = stands(tx, job.run_id, run, now, unsent_only=True)
        lines = [line]
        staged = following.asks() == expected.asks()
        if staged:
            lines += go_on(tx, engine, job.run_id, run=run, following=following, now=now, family=family)
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
    if already or outcome.kind == "unfinished":  # whatever that row is now, somebody else has seen to it
        advance(engine, job.run_id, sender, delivery)
        return already
    notify.compensation_rejected(engine, outcome)
    return False


def advance(engine: Engine, run_id: str, sender: Sender, delivery: object | None) -> None:
    """Look at a rollback's rows and send what is next, or end it: for a drive, a repair, an operator. Harmless when repeated."""
    while not _advance_once(engine, run_id, sender, delivery):
        pass


def _advance_once(engine: Engine, run_id: str, sender: Sender, delivery: object | None) -> bool:
    """One look; false (and nothing written) where the rows have changed between looking and writing.

    Otherwise the rows of a level that has begun meanwhile would be marked as sent, and nobody would have sent them.
    test_a_look_at_a_rollback_that_has_moved_on_looks_again
    """
    now = engine.now()
    outbox = sender.outbox(delivery)
    expected, family = engine.store.read(lambda tx: _expected(tx, run_id, now))
    outbox.load([*expected.messages, *family.messages()])

    def operation(tx: Tx) -> list[history.Line] | None:
        family.lock(tx)
        run = tx.one(_RUN, (run_id,))
        following = stands(tx, run_id, run, now, unsent_only=True)
        if following.asks() != expected.asks():
            return None
        lines = go_on(tx, engine, run_id, run=run, following=following, now=now, family=family)
        engine.record(tx, run_id, now, lines)
        _send(tx, run_id, following, outbox, now)
        return lines

    lines = engine.write(operation, outbox)
    if lines is None:
        return False
    outbox.delivered()
    notify.changes(engine, run_id, None, now, lines)
    return True


def _expected(tx: Tx, run_id: str, now: int, *, settled: Outcome | None = None) -> tuple[Next, Family]:
    """Where the rollback will stand, and who has to hear of it where it ends: the parent of a child (CHILD-1)."""
    run = tx.one(_RUN_STATE, (run_id,))
    following = stands(tx, run_id, run, now, unsent_only=True, settled=settled)
    ends = run is not None and following.finished and run[8] is not None and run[0] == "rolling_back"
    return following, children.read(tx, run_id) if ends else children.Family(run_id)


def _send(tx: Tx, run_id: str, following: Next, outbox: Outbox, now: int) -> None:
    """Put the loaded messages into the transaction and consume the one at hand."""
    if outbox.joined:
        for message in following.messages:
            tx.run(_SENT, (now, run_id, message.sequence))
    outbox.stage(tx)


def level_closed(
    engine: Engine, run_id: str, level: int, sender: Sender, delivery: object | None = None, *, created_at: int | None = None
) -> None:
    """A level's callback has come: whatever of it is still ``running`` and can never be reclaimed ends there (PAR-3, COMP-4).

    From here a worker that has died and one that is slow look the same, so the outcome of the slow one is still recorded on its own
    row when it comes. Rows that a reclaim will come back for, and rows between two tries, keep their level open.
    test_a_callback_that_meets_a_running_undo_ends_its_level
    """
    for found in engine.store.read(lambda tx: tx.all(_AT_WORK, (run_id, level, created_at))):
        row = _Row(*found)
        if row.left_alone(engine):
            job = Job("compensation", run_id, row.sequence, 0, row.attempts, "")
            settle(engine, unfinished(job, row.actor, row.attempts), sender, None)
    advance(engine, run_id, sender, delivery)


def abandon(engine: Engine, run_id: str, sequence: int, sender: Sender) -> bool:
    """End the level of a running undo without it: somebody has looked, and nobody is at it (PAR-3, COMP-4); false where that was done before.

    Only an undo that nothing will ever take from its worker: whatever else is running, a reclaim comes back for. Who else may be here: the
    undo itself, which may be at work after all. An outcome that lands first stands, and is told by the error; one that comes later is
    recorded by its fence. test_an_outcome_that_lands_first_is_not_abandoned, test_an_undo_that_was_abandoned_at_work_is_still_recorded

    Raises:
      FlowNotFoundError: there is no such run.
      ConcurrentTransitionError: no undo of that step is to be abandoned; the error says what it is.
    """
    while True:
        run, found = engine.store.read(lambda tx: (tx.one(_RUN_STATE, (run_id,)), tx.one(_ONE, (run_id, sequence))))
        if run is None:
            raise FlowNotFoundError(run_id)
        row = None if found is None else _Row(*found)
        if row is not None and row.status == "running" and row.given_up:
            advance(engine, run_id, sender, None)  # an earlier call may have failed to send the next undo
            return False
        if row is None or run[1] != "running" or not row.left_alone(engine):
            raise ConcurrentTransitionError(run_id, f"rid of the undo of step {sequence}", _at(engine, run, row, sequence))
        job = Job("compensation", run_id, sequence, 0, row.attempts, "")
        if settle(engine, unfinished(job, row.actor, row.attempts), sender, None):
            return True


def _at(engine: Engine, run: tuple[Any, ...], row: _Row | None, sequence: int) -> str:
    """Why the undo of a step is not one to be abandoned."""
    if row is None:
        return f"{run[0]}, and no undo of step {sequence} is planned"
    if row.status == "running":
        frees = [] if row.reclaim_stale_at is None else [f"from {to_iso(row.reclaim_stale_at)} on (its reclaim window)"]
        if liveness.is_on(engine.settings) and liveness.is_watched(row.worker_id):
            lease = engine.settings.reclaim.dead_workers.lease_seconds
            frees.append(f"once its worker has not been heard from for {lease:g} seconds (its lease)")
        return f"{run[0]}, and the undo of step {sequence} will be taken from its worker and run again, {', or '.join(frees)}"
    return f"{run[0]}, and the undo of step {sequence} is {row.status}"


# --- what comes next -------------------------------------------------------------------------------------------------


def _rows(tx: Tx, run_id: str) -> list[_Row]:
    return [_Row(*row) for row in tx.all(_ROWS, (run_id,))]


def stands(
    tx: Tx,
    run_id: str,
    run: tuple[Any, ...] | None,
    now: int,
    *,
    unsent_only: bool = False,
    settled: Outcome | None = None,
) -> Next:
    """Where the rollback stands now, or will once ``settled`` is recorded; nothing is to be done where none is running.

    While it goes on, only the level that is open is looked at; all rows are read once, when it ends.
    """
    if run is None or run[1] != "running":
        return Next()
    besides = -1 if settled is None else settled.job.sequence
    found = tx.all(_OPEN_UNSENT if unsent_only else _OPEN_ALL, (run_id, besides) * 3)
    if not found or found[0][1] or (settled is not None and _stops(tx, settled, before=found[0][0])):
        rows = _rows(tx, run_id)
        if settled is not None:
            rows = [row.settled(settled) if row.sequence == settled.job.sequence else row for row in rows]
        return _survey(run_id, run, rows, now, unsent_only=unsent_only)
    return _level(run_id, run, [_Row(*row[2:]) for row in found if row[2] is not None], now)


def _stops(tx: Tx, outcome: Outcome, *, before: int) -> bool:
    """Whether ``outcome`` gives up an undo of a level before that one under ``stop``: the rollback ends with it (COMP-4)."""
    if outcome.kind == "completed":
        return False
    return tx.one(_POLICY, (outcome.job.run_id, outcome.job.sequence, before)) == ("stop",)


def _level(run_id: str, run: tuple[Any, ...], waiting: Sequence[_Row], now: int) -> Next:
    """The level that is open, and those of its rows that are to be sent."""
    if not waiting:
        return Next()
    messages = [row.message(run_id, now, created_at=run[9]) for row in waiting]
    return Next(side_by_side(messages, waiting[0].level, workflow=run[3], queue=run[5], priority=run[6], now=now))


def _survey(run_id: str, run: tuple[Any, ...], rows: Sequence[_Row], now: int, *, unsent_only: bool = False) -> Next:
    """The messages of the level that is to run, or how the rollback ends.

    A level is over when each of its rows has been undone or given up; one that was given up under ``stop`` halts the rollback
    then, and not before: its neighbours are at work already.
    """
    undone: list[int] = []
    failures: list[_Row] = []
    levels: dict[int, list[_Row]] = {}
    for row in rows:
        levels.setdefault(row.level, []).append(row)
    for level in sorted(levels):
        members = levels[level]
        undone += [row.sequence for row in members if row.status == "completed"]
        given_up = [row for row in members if row.status != "completed" and row.given_up]
        failures += given_up
        open_rows = [row for row in members if row.status != "completed" and not row.given_up]
        if open_rows:
            waiting = [row for row in open_rows if row.status == "pending" and not (unsent_only and row.sent_at is not None)]
            return _level(run_id, run, waiting, now)
        if any(row.policy == "stop" for row in given_up):
            return Next([], True, True, _failure(failures), undone)
    return Next([], True, False, _failure(failures), undone)


def side_by_side(
    messages: list[Outgoing], level: int, *, workflow: str, queue: str, priority: int | None, now: int
) -> list[Outgoing]:
    """The messages of one level as a group, whose callback is a second trigger (PAR-3). One message is no group."""
    if len(messages) < 2:
        return messages
    run_id, sequences = messages[0].run_id, [message.sequence for message in messages]
    group = Group(
        f"{run_id}/undo-{level}/{now:x}", len(messages), 0, min(sequences), max(sequences), workflow, queue, priority, level
    )  # fmt: skip
    return [replace(message, group=group) for message in messages]


def _failure(failures: Sequence[_Row]) -> str | None:
    if not failures:
        return None
    parts, unfinished_only = [], True
    for row in failures:
        cause = load_error(row.error) if row.error else {"type": "unknown", "message": ""}
        unfinished = cause["type"] == _UNFINISHED  # which names the undo itself
        unfinished_only = unfinished_only and unfinished
        said = in_one_line(cause["type"], cause["message"])
        parts.append(cause["message"] if unfinished else f"undo of step {row.sequence} ({row.actor}): {said}")
    return describe_error((CompensationUnfinishedError if unfinished_only else CompensationFailedError)("; ".join(parts)))


def go_on(
    tx: Tx, engine: Engine, run_id: str, *, run: tuple[Any, ...] | None, following: Next, now: int, family: Family | None
) -> list[history.Line]:
    """End the run where its rollback has come to an end; a run that has ended before keeps its end (COMP-8)."""
    if not following.finished or run is None:
        return []
    status, _, ends_as, workflow, error, _, _, reason, *_ = run
    rollback = "halted" if following.halted else "done"
    undone = ", ".join(str(sequence) for sequence in following.undone) or "nothing"
    finished = history.Line(history.ROLLBACK_FINISHED, name=workflow, detail=f"{rollback}; undone: {undone}")
    if status != "rolling_back":
        return [finished] if tx.run(_END_RESUMED, (rollback, following.error, run_id)) else []
    if not tx.run(_END, (rollback, following.error, now, run_id)):
        return []
    if family is not None:
        family.ended(tx, engine, ends_as, workflow=workflow, now=now, error=error, reason=reason)
    return [finished, history.Line(f"flow.{ends_as}", name=workflow, error=error)]


# --- one outcome -----------------------------------------------------------------------------------------------------


def _write_outcome(tx: Tx, outcome: Outcome, now: int) -> bool:
    key = (outcome.job.run_id, outcome.job.sequence)
    if outcome.kind == "completed":
        return bool(tx.run(_COMPLETE, (now, *key, outcome.attempts, outcome.delivery)))
    if outcome.kind == "failed":
        return bool(tx.run(_FAIL, (outcome.error, now, *key, outcome.attempts, outcome.delivery)))
    if outcome.kind == "given_up":
        return bool(tx.run(_GIVE_UP, (now, *key, outcome.attempts, outcome.delivery)))
    if outcome.kind == "unfinished":
        return bool(tx.run(_LEAVE, (outcome.error, *key, outcome.attempts)))
    return bool(tx.run(_REFUSE, (outcome.error, now, *key, outcome.attempts, outcome.job.created_at)))


def _already(tx: Tx, outcome: Outcome) -> bool:
    """Whether this very outcome stands on the row: an earlier try at writing it did land (FENCE-1)."""
    if outcome.kind == "unfinished":
        return False
    row = tx.one(_STATE, (outcome.job.run_id, outcome.job.sequence))
    if row is None or row[1] != outcome.attempts or outcome.delivery not in (None, row[3]):
        return False
    return bool(
        row[0] == ("completed" if outcome.kind == "completed" else "failed") and (outcome.kind == "completed" or row[2])
    )


# --- sending again ---------------------------------------------------------------------------------------------------


def body_reported(engine: Engine, claim: Claim | StepOutcome | Lost, sender: Sender) -> None:
    """The body of a step that has expired, or that a rollback has fenced, has ended, or will never begin: no undo waits for it (COMP-9).

    Only the step's last claim counts: while one that was reclaimed reports, its successor may still be at work.
    test_an_undo_does_not_take_the_report_of_an_earlier_claim_for_that_of_the_last

    Who else may be here: a rollback being planned, which has found the body at work. The run's row first (DRIVE-7), so that plan finds
    the body over and is drafted again, or its undo is let go here.
    test_a_plan_loses_to_a_refused_report_that_lands_while_it_is_made
    """
    run_id, sequence = key = claim.job.run_id, claim.job.sequence
    mark = (*key, claim.attempts, claim.delivery)

    def operation(tx: Tx) -> bool:
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (run_id,))
        return bool(tx.run(_BODY_IS_OVER, mark) and tx.run(_RELEASE_HELD, key))

    if engine.store.read(lambda tx: tx.one(_IS_FENCED, mark)) and engine.store.write(operation):
        resend(engine, run_id, sequence, sender)


def resend(engine: Engine, run_id: str, sequence: int, sender: Sender) -> bool:
    """Send a pending compensation's message again, where its level is the one that runs."""
    now = engine.now()
    level = engine.store.read(lambda tx: stands(tx, run_id, tx.one(_RUN_STATE, (run_id,)), now))
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


# --- resuming --------------------------------------------------------------------------------------------------------


def resume(engine: Engine, run_id: str, sender: Sender) -> bool:
    """Set a halted rollback going again (COMP-8); false where an earlier call has done so already.

    What was not undone is tried again, with ``attempts + 1`` and its tries renewed, so that a straggler of the old attempt is
    fenced; what was undone stays undone. An undo that can never be built, because the result that it needs could not be kept, is
    passed over: it stays ``failed`` and stands in the rollback's error. The run keeps its terminal status and its error.

    Raises:
      FlowNotFoundError: there is no such run.
      ConcurrentTransitionError: no rollback of it has halted; the error says where it is.
    """
    while True:
        run, rows = engine.store.read(lambda tx: (tx.one(_RUN_STATE, (run_id,)), _rows(tx, run_id)))
        if run is None:
            raise FlowNotFoundError(run_id)
        status, rollback, _, workflow = run[:4]
        if rollback == "running" and status != "rolling_back":
            advance(engine, run_id, sender, None)  # an earlier call may have failed to send the first undo
            return False
        if rollback != "halted":
            raise ConcurrentTransitionError(run_id, "rolling back again", _where(status, rollback, rows))
        if _resume_once(engine, run_id, sender, run=run, renewed=[row.renewed() for row in rows]):
            return True
        engine.anomalies.transition_lost(
            run_id=run_id, workflow=workflow, observed="halted", intended="rolling back again", actual="moved on"
        )


def _where(status: str, rollback: str, rows: Sequence[_Row]) -> str:
    if rollback == "running":
        return "rolling back, and nothing of that has halted"
    if rollback == "none":
        return f"{status}, and was never rolled back"
    given_up = ", ".join(str(row.sequence) for row in rows if row.given_up)
    if given_up:
        return f"{status}, and its rollback is over: what undoes step {given_up} failed, and was passed over as its policy says"
    return f"{status}, and its rollback is done"


def _resume_once(engine: Engine, run_id: str, sender: Sender, *, run: tuple[Any, ...], renewed: list[_Row]) -> bool:
    """One try; false (and nothing written) where the rows are no longer as they were read.

    Who else may be here: another operator, who finds ``rollback`` no longer ``halted``; a late outcome of an undo that its level
    had left behind, after which there is less to be done. test_a_late_outcome_is_not_undone_by_a_resume
    """
    now = engine.now()
    outbox = sender.outbox(None)
    expected = _survey(run_id, run, renewed, now, unsent_only=True)
    outbox.load(expected.messages)
    todo = ", ".join(str(row.sequence) for row in renewed if row.status == "pending") or "nothing"

    def operation(tx: Tx) -> list[history.Line] | None:
        found = tx.one(_RUN, (run_id,))
        if found is None or [row.renewed() for row in _rows(tx, run_id)] != renewed or not tx.run(_RESUME, (run_id,)):
            return None
        tx.run(_RENEW, (run_id,))
        tx.run(_REFILL, (run_id,))
        tx.run(_PASS_OVER, (run_id,))
        lines = [history.Line(history.ROLLBACK_RESUMED, name=run[3], detail=f"to be undone: {todo}")]
        lines += go_on(tx, engine, run_id, run=found, following=expected, now=now, family=None)
        engine.record(tx, run_id, now, lines)
        _send(tx, run_id, expected, outbox, now)
        return lines

    engine.cache.drop(run_id)
    lines = engine.write(operation, outbox)
    if lines is None:
        return False
    outbox.delivered()
    notify.changes(engine, run_id, None, now, lines)
    return True
