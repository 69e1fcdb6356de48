"""The kick: an operator has one run driven again, and its messages sent once more, whatever the doctor has spent (KICK-1).

One transaction refills the budgets of the run and of its unfinished rows, raises the run's wake count and writes, or notes, the
messages; so the kick itself cannot be lost: what it asked for and what did not go out is the doctor's again. It never makes a
``running`` row claimable: without a passed reclaim deadline, or a dead worker (RECLAIM-5), that row is left to its worker, and the
report says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..clock import to_iso
from ..commands import command
from ..engine import liveness, notify
from ..engine.rows import Outgoing
from ..engine.wakes import THIS_RUN
from ..errors import FlowNotFoundError, StoreError
from ..journal import history
from ..store.trouble import is_lost_commit
from .rows import COMPENSATION, LEVEL_RUNS, STEP, WANTED, Row, read, select

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..store.database import Tx

_RUN = (
    "SELECT workflow, queue, priority, status, rollback, revision, wakes, created_at FROM {flow_runs} WHERE id = ?{for_update}"
)
_REFILL_RUN = (
    "UPDATE {flow_runs} SET repair_attempts = 0, repair_after = NULL, wakes = wakes + 1, woken_at = COALESCE(woken_at, ?) "
    f"WHERE id = ? AND revision = ? AND wakes = ? AND {THIS_RUN} AND ended_at IS NULL AND status <> 'rolling_back'"
)
_REFILL_ROLLBACK = (
    "UPDATE {flow_runs} SET repair_attempts = 0, repair_after = NULL, revision = revision + 1 "
    f"WHERE id = ? AND revision = ? AND {THIS_RUN} AND rollback = 'running'"
)
_UNFINISHED = "r.ended_at IS NULL"
_ROWS = {
    STEP: select(STEP, f"r.run_id = ? AND {_UNFINISHED} AND r.held_back = FALSE AND {WANTED[STEP]}", order="r.sequence"),
    COMPENSATION: select(
        COMPENSATION, f"r.run_id = ? AND {_UNFINISHED} AND {WANTED[COMPENSATION]} AND {LEVEL_RUNS}", order="r.sequence DESC"
    ),
}
_CHILDREN = (
    "SELECT c.sequence, c.workflow, c.status, f.id, f.queue, f.priority, f.wakes > f.wakes_seen, f.status, f.hold_until "
    "FROM {children} c JOIN {flow_runs} f ON f.id = c.child_id WHERE c.run_id = ? AND c.ended_at IS NULL ORDER BY c.sequence"
)
_WAITS = "SELECT sequence, kind, name, due_at FROM {waits} WHERE run_id = ? AND status = 'waiting' AND kind <> 'retry' ORDER BY sequence"
_REFILL = "UPDATE {%s} SET repair_attempts = 0, repair_after = NULL WHERE run_id = ? AND ended_at IS NULL"
_REFILL_STEPS = _REFILL % "action_runs"
_REFILL_COMPENSATIONS = _REFILL % "compensation_runs"
_READ_BACK = "SELECT status, revision, wakes, created_at, repair_attempts FROM {flow_runs} WHERE id = ?"


@dataclass(frozen=True, slots=True)
class KickedRow:
    """What a kicked run is parked on: a ``step``, ``compensation``, ``child`` or ``wait`` (for a signal, or a ``timer``).

    ``left`` says why it was sent no message, ``None`` where it was.
    """

    kind: str
    sequence: int
    actor: str
    status: str
    left: str | None = None


@dataclass(frozen=True, slots=True)
class KickReport:
    """What a kick did, exactly.

    ``driven``: a drive message was sent. ``rows``: what the run is parked on. ``committed`` is false where the database took
    the refill and then lost it (CLAIM-3): nothing was sent, and the anomaly journal says ``claim_not_committed``.
    """

    run_id: str
    workflow: str
    status: str
    rollback: str
    driven: bool
    rows: tuple[KickedRow, ...] = ()
    committed: bool = True

    @property
    def sent(self) -> tuple[KickedRow, ...]:
        """The rows that were sent a message."""
        return tuple(row for row in self.rows if row.left is None)

    @property
    def left(self) -> tuple[KickedRow, ...]:
        """The rows that were not."""
        return tuple(row for row in self.rows if row.left is not None)


def kick(engine: Engine, run_id: str, sender: Sender) -> KickReport:
    """Drive a run again, refill its repair budget and that of its unfinished rows, and send what it is parked on (KICK-1).

    A run that has ended is left as it is, and the report says so.

    Raises:
      FlowNotFoundError: there is no such run.
    """
    while True:
        found = engine.store.read(lambda tx: _look(tx, run_id))
        if found is None:
            raise FlowNotFoundError(run_id)
        run, rows, children, waits = found
        workflow, _, _, status, rollback = run[:5]
        if status not in ("pending", "running", "waiting") and rollback != "running":
            return KickReport(run_id, workflow, status, rollback, driven=False)
        now = engine.now()
        leases = _leases(engine, rows)
        parked = [(row, _left(row, now, leases.get((row.kind, row.sequence)))) for row in rows]
        waited_for = [(child, _left_child(child)) for child in children]
        report = KickReport(
            run_id, workflow, status, rollback, driven=True,
            rows=(
                *(KickedRow(row.kind, row.sequence, row.actor, row.status, left) for row, left in parked),
                *(KickedRow("child", child.sequence, child.workflow, child.status, left) for child, left in waited_for),
                *(KickedRow("wait", wait.sequence, wait.name or wait.kind, "waiting", _left_wait(wait, now)) for wait in waits),
            ),
        )  # fmt: skip
        sent_to = [child for child, left in waited_for if left is None]
        landed = _kick(engine, sender, report, run=run, rows=[row for row, left in parked if left is None], children=sent_to)
        if landed is not None:
            return landed


class _Child(NamedTuple):
    """A child run that a run waits for."""

    sequence: int
    workflow: str
    status: str
    run_id: str
    queue: str
    priority: int | None
    unseen: bool
    run_status: str
    hold_until: int | None


class _Wait(NamedTuple):
    """A signal or a moment that a run waits for."""

    sequence: int
    kind: str
    name: str | None
    due_at: int | None


def _look(tx: Tx, run_id: str) -> tuple[tuple[Any, ...], list[Row], list[_Child], list[_Wait]] | None:
    run = tx.one(_RUN.replace("{for_update}", ""), (run_id,))
    if run is None:
        return None
    rows = [row for kind in (STEP, COMPENSATION) for row in read(tx, kind, sql=_ROWS[kind], params=(run_id,))]
    children = [_Child(*row) for row in tx.all(_CHILDREN, (run_id,))]
    return run, rows, children, [_Wait(*row) for row in tx.all(_WAITS, (run_id,))]


def _left_wait(wait: _Wait, now: int) -> str:
    """Nothing is sent for a wait; what ends it."""
    if wait.due_at is not None and wait.due_at <= now:
        return f"it has been due since {to_iso(wait.due_at)}: its alarm, or a sweep, ends it"
    until = "" if wait.due_at is None else f" {'at' if wait.kind == 'timer' else 'or, at the latest, at'} {to_iso(wait.due_at)}"
    return f"it ends{until}" if wait.kind == "timer" else f"it ends with that signal{until}"


def _left_child(child: _Child) -> str | None:
    """Why this child run is sent no drive."""
    if child.status == "awaiting_retry":
        return "it waits for a signal to be started again"
    if child.hold_until is not None:
        return f"it is held: see run {child.run_id}, and kick that"
    if not child.unseen and child.run_status != "rolling_back":
        return "it is a run of its own, and nothing has happened to it that no drive has seen: kick that run"
    return None


def _leases(engine: Engine, rows: list[Row]) -> dict[tuple[str, int], int]:
    """The moments at which the leases behind those of the rows end that are running under one (RECLAIM-5)."""
    running = [row for row in rows if row.status == "running"]
    if not running or not liveness.is_on(engine.settings):
        return {}

    def look(tx: Tx) -> dict[tuple[str, int], int]:
        found = {
            (row.kind, row.sequence): liveness.lease_of(
                tx, engine, step=row.kind == STEP, run_id=row.run_id, sequence=row.sequence
            )
            for row in running
        }
        return {key: moment for key, moment in found.items() if moment is not None}

    return engine.store.read(look)


def _left(row: Row, now: int, lease: int | None) -> str | None:
    """Why this row is sent nothing; ``lease`` is when the lease behind it ends."""
    if row.status == "running" and lease is not None:
        if lease > now and (row.reclaim_stale_at is None or row.reclaim_stale_at > now):
            return "it is running, and its worker has been heard from within the lease"
    elif row.status == "running":
        if row.reclaim_stale_at is None:
            left = "it is running, and nothing says when its worker may be given up (reclaim is off for it)"
            if row.kind == STEP:
                way_out = f"{command('cancel', row.run_id, options='--compensate')}, or --keep"
            else:
                way_out = command("abandon-undo", row.run_id, str(row.sequence))
            return f"{left}; where nobody is at it any more: {way_out}"
        if row.reclaim_stale_at > now:
            return "it is running, and its reclaim deadline has not passed"
    if row.status == "pending" and row.not_before is not None and row.not_before > now:
        return "the step that it undoes may still be at work; its message is due when that cannot be any more"
    if row.status == "awaiting_retry":
        return "it waits for a signal to be tried again"
    return None


def _kick(
    engine: Engine, sender: Sender, report: KickReport, *, run: tuple[Any, ...], rows: list[Row], children: list[_Child]
) -> KickReport | None:
    """Write it and send it; ``None`` where the run has moved on since it was read: look again.

    A row may have moved on alone, claimed by a message that was not lost: ours then loses its claim and changes nothing.
    """
    workflow, queue, priority, _, rollback, revision, wakes, created_at = run
    run_id, now, read = report.run_id, engine.now(), (revision, wakes, created_at)
    outbox = sender.outbox(None)
    drives = [Outgoing("drive", child.run_id, child.workflow, child.queue, priority=child.priority) for child in children]
    outbox.load([Outgoing("drive", run_id, workflow, queue, priority=priority), *(row.message() for row in rows), *drives])
    lines = [history.Line(history.FLOW_REDRIVEN, name=workflow, detail="kicked"), *(row.line("kicked") for row in rows)]

    joined = engine.store.joined()  # a host's transaction: listeners hear of it once that has committed (EVENT-2)

    def tell() -> None:
        notify.changes(engine, run_id, workflow, now, lines)

    def operation(tx: Tx) -> bool:
        if tx.dialect != "sqlite":
            tx.one(_RUN, (run_id,))  # DRIVE-7: the run's row first
        if rollback == "running":
            landed = tx.run(_REFILL_ROLLBACK, (run_id, revision, created_at))
        else:
            landed = tx.run(_REFILL_RUN, (now, run_id, *read))
        if not landed:
            return False
        tx.run(_REFILL_STEPS, (run_id,))
        tx.run(_REFILL_COMPENSATIONS, (run_id,))
        engine.record(tx, run_id, now, lines)
        outbox.stage(tx)
        if joined:
            tx.after_commit(tell)
        return True

    engine.cache.drop(run_id)
    lost = replace(report, driven=False, rows=(), committed=False)
    try:
        if not engine.store.write(operation):
            return None
    except StoreError as error:
        if not is_lost_commit(error):
            raise
        return None if _is_there(engine, report, read) else lost
    if not engine.store.commit_is_proof and not _is_there(engine, report, read):
        return lost
    outbox.delivered()
    if not joined:
        tell()
    return report


def _is_there(engine: Engine, report: KickReport, read: tuple[int, int, int]) -> bool:
    """Whether the refill, or something that has happened to the run since, is there after its transaction has closed (CLAIM-3)."""
    row = engine.store.read(lambda tx: tx.one(_READ_BACK, (report.run_id,)))
    if row is not None and row[1:4] != read:
        return True
    engine.anomalies.claim_not_committed(
        run_id=report.run_id, workflow=report.workflow, status=None if row is None else row[0],
        repair_attempts=None if row is None else row[4],
    )  # fmt: skip
    return False
