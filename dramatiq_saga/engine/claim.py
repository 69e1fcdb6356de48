"""THE CLAIM: what decides, before a body runs, that this delivery and no other may run it (CLAIM-1 … CLAIM-4).

One conditional ``UPDATE`` moves a row from what may be claimed to ``running`` and raises ``attempts``, the fencing token that
the outcome will have to repeat (``fence.py``). Zero rows changed means that somebody else was first, that the run no longer
wants the step, or that the message belongs to an earlier retry cycle: nothing runs.

Who else may be here: a second delivery of the same message, a reclaim, a cancel, a rollback being planned. They all change
the row or the run in one statement too; of two, the second finds a condition that no longer holds. Proven by
``tests/races/test_interleavings.py`` and ``tests/processes/test_kills.py``. Long because the conditions of steps and of undos, with leases and
without, on every database, have to be read side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import StoreError
from ..journal import history
from ..store.trouble import is_lost_commit
from . import liveness, notify
from .wakes import LOCK_RUN

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine

#: When a message is tried again whose claim did not survive its commit, in milliseconds.
RETRY_UNCOMMITTED_MS = 1_000

#: How the mark of a claim begins that was made without a message, by a loop in its caller's process (SYNC-1).
INLINE = "inline/"

#: A message outlives its run where that is pruned before it comes, and then its id may be another run's: which one the message is of is
#: told by when the run was created. A message that does not say so is taken at its word.
#: test_a_message_of_a_pruned_run_runs_nothing_of_its_namesake
SAME_RUN = "f.created_at + 0 = COALESCE(?, f.created_at)"  # + 0: the run is found by its id, and by no index of moments

_CLAIMABLE = (
    "(status = 'pending' OR (status = 'failed' AND given_up = FALSE) OR (status = 'running' AND reclaim_stale_at <= ?))"
)
# Where leases are on (RECLAIM-5), a text of its own; who is alive is asked of a row that is running, and of no other.
_CLAIMABLE_LEASED = (
    "(status = 'pending' OR (status = 'failed' AND given_up = FALSE) OR (status = 'running' AND (reclaim_stale_at <= ? "
    f"OR ({liveness.dead_sql('worker_id')}))))"
)
# A row that still has this attempt's own mark is claimed again by a worker that has stalled before its body: that has killed nobody, and
# does not count (RECLAIM-6). test_a_worker_that_stalls_before_a_body_that_may_be_claimed_once_claims_again
_SET = (
    "status = 'running', attempts = attempts + 1, claims = CASE WHEN delivery = ? THEN claims ELSE claims + 1 END, started_at = ?, "
    "worker_id = ?, delivery = ?, next_try_at = NULL, reclaim_stale_at = ? + 1000 * reclaim_stale_after_seconds"
)
_CLAIM_STEP = (
    f"UPDATE {{action_runs}} SET {_SET}, time_limit_at = ? WHERE run_id = ? AND sequence = ? AND cycle = ? AND {_CLAIMABLE} "
    "AND (expires_at IS NULL OR expires_at > ?) "
    "AND EXISTS (SELECT 1 FROM {flow_runs} f WHERE f.id = ? AND f.ended_at IS NULL AND f.status <> 'rolling_back' "
    f"AND (f.expires_at IS NULL OR f.expires_at > ?) AND {SAME_RUN})"
)
# An undo that its level has left behind is not begun again before its rollback is resumed, whatever became of its worker (PAR-3, COMP-8).
# test_an_undo_that_was_abandoned_and_is_given_back_is_not_begun_again_beside_the_next_level
_CLAIM_COMPENSATION = (
    f"UPDATE {{compensation_runs}} SET {_SET} WHERE run_id = ? AND sequence = ? AND {_CLAIMABLE} AND given_up = FALSE "
    "AND (not_before IS NULL OR not_before <= ?) "
    f"AND EXISTS (SELECT 1 FROM {{flow_runs}} f WHERE f.id = ? AND f.rollback = 'running' AND {SAME_RUN})"
)
_STEP_COLUMNS = (
    "a.actor, a.args, a.attempts, a.tries, a.cycle, a.claims, a.max_claims, a.status, a.reclaim_stale_at, a.delivery, "
    "f.workflow, f.queue, f.revision, f.wakes, f.wakes_seen, f.status, f.context, f.expires_at, a.expires_at, a.block, f.created_at"
)
_READ_STEP = f"SELECT {_STEP_COLUMNS} FROM {{action_runs}} a JOIN {{flow_runs}} f ON f.id = a.run_id WHERE a.run_id = ? AND a.sequence = ?"
# differs because: MySQL and MariaDB have no UPDATE .. RETURNING; there the row is read by a statement of its own
_CLAIM_STEP_RETURNING = _CLAIM_STEP + (
    " RETURNING actor, args, attempts, tries, cycle, claims, max_claims, status, reclaim_stale_at, delivery, "
    + ", ".join(
        f"(SELECT f.{column} FROM {{flow_runs}} f WHERE f.id = run_id)"
        for column in ("workflow", "queue", "revision", "wakes", "wakes_seen", "status", "context", "expires_at")
    )
    + ", expires_at, block, (SELECT f.created_at FROM {flow_runs} f WHERE f.id = run_id)"
)
_COMPENSATION_COLUMNS = (
    "c.actor, c.args, c.attempts, c.tries, 0, c.claims, NULL, c.status, c.reclaim_stale_at, c.delivery, "
    "f.workflow, f.queue, f.revision, f.wakes, f.wakes_seen, f.status, f.context, c.undoes, c.undoes_key, c.not_before, f.rollback, "
    "c.given_up, f.created_at"
)
_READ_COMPENSATION = (
    f"SELECT {_COMPENSATION_COLUMNS} FROM {{compensation_runs}} c JOIN {{flow_runs}} f ON f.id = c.run_id "
    "WHERE c.run_id = ? AND c.sequence = ?"
)
_EARLIER = "e.ended_at IS NULL AND e.given_up = FALSE"
# COMP-1: a message of an earlier attempt may still come after a resume, and must not be ahead of an earlier level.
# test_a_message_that_comes_out_of_turn_undoes_nothing
_CLAIM_COMPENSATION_IN_TURN = _CLAIM_COMPENSATION + (
    " AND NOT EXISTS (SELECT 1 FROM {compensation_runs} e WHERE e.run_id = {compensation_runs}.run_id "
    f"AND e.level < {{compensation_runs}}.level AND {_EARLIER})"
)
# COMP-9: the step that an undo undoes was at work when its rollback was planned, and has not reported since.
_BODY = (
    f"SELECT a.worker_id, {liveness.seen_sql('a.worker_id')}, a.reclaim_stale_at, a.time_limit_at, c.created_at "
    "FROM {compensation_runs} c JOIN {action_runs} a ON a.run_id = c.run_id AND a.sequence = c.sequence "
    "WHERE c.run_id = ? AND c.sequence = ? AND a.status IN ('cancelled', 'expired')"
)
_BEGIN = "UPDATE {compensation_runs} SET not_before = NULL WHERE run_id = ? AND sequence = ?"
_HOLD = (
    "UPDATE {compensation_runs} SET status = 'pending', attempts = attempts - 1, claims = claims - 1, started_at = NULL, "
    "worker_id = NULL, delivery = NULL, reclaim_stale_at = NULL, not_before = ? "
    "WHERE run_id = ? AND sequence = ? AND status = 'running' AND delivery = ?"
)
# differs because: MySQL and MariaDB do not let an UPDATE look at its own table; under the run's lock a look before it is as good
_OUT_OF_TURN = (
    "SELECT 1 FROM {compensation_runs} e JOIN {compensation_runs} r ON r.run_id = e.run_id AND e.level < r.level "
    f"WHERE r.run_id = ? AND r.sequence = ? AND {_EARLIER} LIMIT 1"
)

_LEASED = {
    sql: sql.replace(_CLAIMABLE, _CLAIMABLE_LEASED)
    for sql in (_CLAIM_STEP, _CLAIM_STEP_RETURNING, _CLAIM_COMPENSATION, _CLAIM_COMPENSATION_IN_TURN)
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a message asks for: a step or a compensation, and in which state it was sent."""

    kind: str  # step | compensation
    run_id: str
    sequence: int
    cycle: int
    attempts: int
    message_id: str
    created_at: int | None = None  # of its run, where the message says so (``SAME_RUN``)

    @property
    def row(self) -> str:
        """What kind of row it is, as the anomaly journal names it."""
        return "action" if self.kind == "step" else "compensation"


@dataclass(frozen=True, slots=True)
class Undoes:
    """What a compensation undoes (COMP-7)."""

    sequence: int
    actor: str
    outcome: str  # completed | failed | unknown
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A row that is ours until ``attempts`` changes. ``known`` is the run as the claim saw it: ``Snapshot.version_read``.

    ``delivery`` is this claim's mark on the row, which a row of the same place in another run of the same id does not have.
    """

    job: Job
    delivery: str
    actor: str
    args: bytes
    attempts: int
    tries: int
    cycle: int
    workflow: str
    queue: str
    known: tuple[int, int, int]
    context: bytes | None
    idempotency_key: str
    undoes: tuple[str, str] | None = None  # outcome, key
    claims: int = 1  # since the last outcome, this one included
    max_claims: int | None = None  # the step's own limit
    stale_at: int | None = None  # when another worker may take the row over
    deadline: int | None = None  # of the step, or of its run: no try can begin after it
    block: int | None = None  # the parallel block that the step is a member of


@dataclass(frozen=True, slots=True)
class Lost:
    """The claim did not land; nothing may run. ``retry_at`` is when the row may be claimed after all (CLAIM-2)."""

    job: Job
    actor: str | None
    status: str | None
    run_status: str | None
    attempts: int | None
    retry_at: int | None
    orphaned: bool
    unseen: bool
    undoing: bool  # a rollback of the run is going on
    overdue: bool = False  # the deadline of the step, or of its run, has passed
    uncommitted: bool = False  # to no rival, but to its own commit
    delivery: str | None = None  # the row's mark, where it is this attempt's own: its claim had landed, and is no more


class ClaimAttempt:
    """One claim, safe to carry out again: after an unknown commit, or an interrupt while waiting, it finds its own mark.

    ``delivery`` is written with the claim and names this attempt alone, so a rerun that finds it on a running row knows that
    the claim landed, and never takes a second one. It is looked for under the locks of the claim itself: a commit that nobody
    knows about may still be on its way (test_a_claim_whose_commit_is_unknown_is_found_by_its_mark). A claim made ``inline`` is
    never judged by a heartbeat (RECLAIM-5).
    """

    def __init__(self, engine: Engine, job: Job, *, nonce: str, time_limit_ms: int | None = None, inline: bool = False) -> None:
        self.engine = engine
        self.job = job
        self.delivery = (f"{INLINE}{nonce}" if inline else f"{job.message_id}/{nonce}")[:64]
        self.time_limit_ms = time_limit_ms
        self.inline = inline
        self._lease: int | None = None  # when the lease behind a row ends that another worker holds
        self._at = 0
        self._found: tuple[tuple[Any, ...] | None, bool] = (None, False)  # by the last run of the write, committed or not
        self._told = False

    def run(self) -> Claim | Lost:
        """Claim the row. Raises ``StoreError`` when the store refuses: then nothing is claimed and nothing is spent (CLAIM-4)."""
        engine, job = self.engine, self.job
        certain = engine.store.commit_is_proof
        try:
            row, landed = engine.store.write(self._write)
        except StoreError as error:
            if not is_lost_commit(error):
                raise
            (row, landed), certain = self._found, False
        if row is None or not (landed or self._is_ours(row)):
            return self._lost(row)
        claim = self._claimed(row)
        if not certain:
            row = engine.store.read(self._read)
            if row is None or row[9] != self.delivery or row[2] != claim.attempts:
                engine.anomalies.claim_not_committed(
                    row=job.row, run_id=job.run_id, sequence=job.sequence, actor=claim.actor,
                    claimed_attempts=claim.attempts, attempts=None if row is None else row[2],
                )  # fmt: skip
                return self._not_committed(row)
            if not self._stands(row):  # it was committed, and somebody has ended the row since: a cancel, an expiry
                return self._lost(row)
        if not self._told:  # an interrupt out of a listener has this called again
            self._told = True
            notify.changes(engine, job.run_id, claim.workflow, self._at, [self._line(claim.actor, claim.attempts)])
        return claim

    def _line(self, actor: str, attempts: int) -> history.Line:
        kind = history.ACTION_STARTED if self.job.kind == "step" else history.COMPENSATION_STEP_STARTED
        return history.Line(kind, sequence=self.job.sequence, name=actor, attempt=attempts)

    def _is_ours(self, row: tuple[Any, ...]) -> bool:
        """Whether an earlier run of this attempt has claimed the row. Not past the row's reclaim deadline: what cannot be claimed then
        is not wanted any more. test_a_worker_that_stalls_until_its_run_is_overdue_does_not_begin_its_step
        """
        return bool(row[9] == self.delivery and self._stands(row) and (row[8] is None or row[8] > self._at))

    def _stands(self, row: tuple[Any, ...]) -> bool:
        """Whether the row is at work, and nobody has given it up: test_an_undo_that_was_abandoned_before_its_body_began_does_not_begin."""
        return row[7] == "running" and not (self.job.kind == "compensation" and row[21])

    def _read(self, tx: Tx) -> tuple[Any, ...] | None:
        sql = _READ_STEP if self.job.kind == "step" else _READ_COMPENSATION
        return tx.one(sql, (self.job.run_id, self.job.sequence))

    def _write(self, tx: Tx) -> tuple[tuple[Any, ...] | None, bool]:
        engine, job = self.engine, self.job
        self._at = now = engine.now()
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (job.run_id,))  # DRIVE-7: the run's row first
        heart = None if self.inline else liveness.heart_of(engine)
        marks = (self.delivery, now, engine.worker_id if heart is None else heart.id, self.delivery, now)
        leases = liveness.is_on(engine.settings)
        until = (now, liveness.horizon(engine, now)) if leases else (now,)
        self._lease = None
        params: tuple[object, ...]
        row: tuple[Any, ...] | None = None
        if job.kind == "step":
            limit = None if self.time_limit_ms is None else now + self.time_limit_ms
            params = (*marks, limit, job.run_id, job.sequence, job.cycle, *until, now, job.run_id, now, job.created_at)
            if tx.dialect == "mysql":
                landed = tx.run(_LEASED[_CLAIM_STEP] if leases else _CLAIM_STEP, params)
            else:
                row = tx.one(_LEASED[_CLAIM_STEP_RETURNING] if leases else _CLAIM_STEP_RETURNING, params)
                landed = row is not None
        else:
            params = (*marks, job.run_id, job.sequence, *until, now, job.run_id, job.created_at)
            if tx.dialect != "mysql":
                landed = tx.run(_LEASED[_CLAIM_COMPENSATION_IN_TURN] if leases else _CLAIM_COMPENSATION_IN_TURN, params)
            elif tx.one(_OUT_OF_TURN, (job.run_id, job.sequence)):
                landed = 0
            else:
                landed = tx.run(_LEASED[_CLAIM_COMPENSATION] if leases else _CLAIM_COMPENSATION, params)
        row = row or self._read(tx)
        if landed and row is not None and job.kind == "compensation" and row[19] is not None and self._is_held(tx, now):
            row, landed = self._read(tx), 0
        if landed and row is not None:
            engine.record(tx, job.run_id, now, [self._line(row[0], row[2])])
        elif leases and row is not None and row[7] == "running":
            self._lease = liveness.lease_of(tx, engine, step=job.kind == "step", run_id=job.run_id, sequence=job.sequence)
        self._found = row, bool(landed)
        return self._found

    def _is_held(self, tx: Tx, now: int) -> bool:
        """Whether the body of the step that this undo undoes may still be at work; then the claim is taken back, as if it had not been made.

        The moment that was set for it has come, and the step's worker may have been heard from since. Who else may be here: the body, which
        reports just now. It waits for this row, finds it as it was, lets the undo go and sends its message.
        test_a_body_that_reports_while_its_undo_is_held_back_lets_it_go
        """
        key = (self.job.run_id, self.job.sequence)
        body = tx.one(_BODY, key)
        until = now if body is None else liveness.at_work_until(self.engine, *body[:4], since=body[4], now=now)
        if until <= now:
            tx.run(_BEGIN, key)  # whatever it is claimed for again, it is not held back again
            return False
        tx.run(_HOLD, (until, *key, self.delivery))
        return True

    def _claimed(self, row: tuple[Any, ...]) -> Claim:
        job = self.job
        undoes = deadline = block = None
        created_at = row[-1]
        if job.kind == "step":
            block = row[19]
            deadline = _deadline(row)
            key = idempotency_key(job.run_id, job.sequence, row[4])
        else:
            key = f"{job.run_id}:{job.sequence}:undo"
            undoes = (row[17], row[18])
        return Claim(
            replace(job, created_at=created_at), self.delivery, row[0], bytes(row[1]), row[2], row[3], row[4], row[10], row[11],
            (row[12], row[13], created_at), None if row[16] is None else bytes(row[16]), key, undoes, row[5], row[6], row[8], deadline, block,
        )  # fmt: skip

    def _lost(self, row: tuple[Any, ...] | None) -> Lost:
        job = self.job
        if row is None:
            return Lost(job, None, None, None, None, None, False, False, False)
        status, stale_at, delivery = row[7], row[8], row[9]
        retry_at = self._free_at(row, stale_at) if status == "running" else None
        if job.kind == "compensation" and status == "pending" and row[19] is not None:
            retry_at = row[19]
        if (job.kind == "step" and row[4] != job.cycle) or job.created_at not in (None, row[-1]):
            retry_at = None
        orphaned = status == "running" and (delivery or "").partition("/")[0] == job.message_id
        rolls_back = row[15] == "rolling_back" or (job.kind == "compensation" and row[20] == "running")  # or resumed (COMP-8)
        overdue = False
        if job.kind == "step":
            deadline = _deadline(row)
            overdue = deadline is not None and deadline <= self._at
            if overdue:
                retry_at = None  # whatever ends it now, nothing of it begins: the message has nothing left to do
        return Lost(
            job, row[0], status, row[15], row[2], retry_at, orphaned, row[13] > row[14], rolls_back, overdue,
            delivery=delivery if delivery == self.delivery else None,
        )  # fmt: skip

    def _free_at(self, row: tuple[Any, ...], stale_at: int | None) -> int | None:
        """The earliest moment at which the row's worker may lose it: its reclaim deadline, or the end of its worker's lease."""
        lease = self._lease
        if lease is None:
            return stale_at
        wanted = row[15] in ("pending", "running", "waiting") if self.job.kind == "step" else row[20] == "running"
        if not wanted:
            return stale_at
        if lease <= self._at:  # over already: not ours for another reason, which may pass
            lease = self._at + RETRY_UNCOMMITTED_MS
        return lease if stale_at is None else min(stale_at, lease)

    def _not_committed(self, row: tuple[Any, ...] | None) -> Lost:
        """The claim is gone, and nobody else may hold the row: its message must not be gone with it (CLAIM-4)."""
        lost = replace(self._lost(row), uncommitted=True)
        again = self.engine.now() + RETRY_UNCOMMITTED_MS
        if lost.retry_at is not None:
            return replace(lost, retry_at=max(lost.retry_at, again))
        return replace(lost, retry_at=again) if lost.status in ("pending", "failed") else lost


def _deadline(row: tuple[Any, ...]) -> int | None:
    """The earlier deadline of a step's row: its own, or its run's."""
    return min((moment for moment in row[17:19] if moment is not None), default=None)


def idempotency_key(run_id: str, sequence: int, cycle: int) -> str:
    """Stable over tries and reclaims, new per signal-retry cycle (FENCE-4)."""
    return f"{run_id}:{sequence}:{cycle}"


# A pending row that has a start may have been at work: this claim's body has begun, or an earlier claim was made.
_GIVE_BACK = (
    "UPDATE {%s} SET status = 'pending', started_at = CASE WHEN attempts > ? THEN started_at ELSE NULL END, worker_id = NULL, "
    "reclaim_stale_at = NULL, next_try_at = ?, claims = claims - 1 "
    "WHERE run_id = ? AND sequence = ? AND status = 'running' AND attempts = ? AND delivery = ?"
)
_GIVE_BACK_STEP = _GIVE_BACK.replace("%s", "action_runs")
_GIVE_BACK_COMPENSATION = _GIVE_BACK.replace("%s", "compensation_runs")


def give_back(
    tx: Tx, engine: Engine, claim: Claim, *, now: int, due_at: int | None = None, begun: bool = False
) -> bool:  # fmt: skip
    """Undo a claim by its token: ``pending`` again, no try spent (NATIVE-4, FENCE-5). False where it is ours no more.

    ``begun``: the body was at work, and the row keeps its start, as it does where an earlier claim may have begun it. ``due_at``: when its
    message comes again, where that is put off; until then, and for a grace, nobody takes that for lost (DOCTOR-1).
    """
    sql = _GIVE_BACK_STEP if claim.job.kind == "step" else _GIVE_BACK_COMPENSATION
    if tx.dialect != "sqlite":
        tx.one(LOCK_RUN, (claim.job.run_id,))  # DRIVE-7: a plan that is being written finds the step as it was, or as it is now
    key = (claim.job.run_id, claim.job.sequence, claim.attempts, claim.delivery)
    if not tx.run(sql, (0 if begun else 1, due_at, *key)):
        return False
    kind = history.ACTION_RELEASED if claim.job.kind == "step" else history.COMPENSATION_STEP_RELEASED
    engine.record(
        tx, claim.job.run_id, now, [history.Line(kind, sequence=claim.job.sequence, name=claim.actor, attempt=claim.attempts)]
    )
    return True
