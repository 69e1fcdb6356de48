"""The monitor: ends what is overdue, and drives runs again that are held because their code did not fit their history.

What is overdue (EXPIRE-1) is ended by the verbs of ``engine/timers.py``, which alarms and workers use as well: this is the net under
them, for what a lost message or a long downtime has left.

A run is taken by moving its window: one conditional ``UPDATE`` that repeats what was seen, so of two sweeps one drives it, and a run
whose drive kills the process does not stand in front of the others. The window doubles with every failure
(``monitor.expiration.backoff``), without an end. A drive that does not come back is left behind (``patience.py``). Nothing here fails a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from ..engine import drive as drives
from ..engine import runs, timers
from ..engine.lookout import WorkflowStalledError
from ..engine.rows import Outgoing
from ..engine.snapshot import load
from ..engine.wakes import THIS_RUN
from ..errors import MessageNotSentError, StoreError
from ..store.models import LIVE
from .patience import PATIENCE, Patience, WorkflowBrokeOffError

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..store.database import Tx

# The first terms are the predicate of an index that holds held runs only.
_DUE = (
    "SELECT id, workflow, queue, priority, revision, created_at, hold_count, hold_until, woken_at FROM {flow_runs} "
    f"WHERE hold_until IS NOT NULL AND {LIVE} AND status <> 'rolling_back' AND wakes > wakes_seen AND hold_until <= ? "
    "ORDER BY hold_until LIMIT ?"
)
_TAKE = (
    "UPDATE {flow_runs} SET hold_until = ? WHERE id = ? AND revision = ? AND hold_until = ? AND wakes > wakes_seen "
    f"AND {THIS_RUN} AND ended_at IS NULL AND status <> 'rolling_back'"
)


@dataclass(slots=True)
class MonitorReport:
    """What one pass of the monitor did.

    ``expiry_failed``: overdue runs whose rollback could not be planned, or not in time (EXPIRE-2). ``late_ms``: for how long what it ended
    had been due, at most; milliseconds.
    """

    timed_out: int = 0
    expired_steps: int = 0
    expired_runs: int = 0
    expiry_failed: int = 0
    resumed: int = 0
    held_again: int = 0
    sent: int = 0
    skipped: int = 0
    unsent: int = 0
    errors: int = 0
    late_ms: int = 0

    @property
    def driven(self) -> int:
        """Held runs whose window was over and that were driven, here or by a message."""
        return self.resumed + self.held_again + self.sent


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A held run whose window is over, as it was found."""

    run_id: str
    workflow: str
    queue: str
    priority: int | None
    revision: int
    created_at: int
    hold_count: int
    hold_until: int
    woken_at: int | None


def monitor(engine: Engine, sender: Sender, *, patience: float | None = PATIENCE) -> MonitorReport:
    """One pass: what is overdue, then every held run whose window is over; the longest due first, at most
    ``monitor.expiration.batch_size`` of each kind.

    A run of a workflow that this process knows is driven here, another one by a message. For the drive of one run ``patience`` seconds are
    waited; ``None``: all are driven in the calling thread, however long they take. Raises StoreError where the store refuses; whatever
    else goes wrong with a run is counted, and the next one follows.
    """
    report = MonitorReport()
    with Patience(engine, None if engine.store.joined() else patience) as patient:
        for due in timers.find_due(engine, without=engine.lookout.busy()):
            with _counting(engine, report, "overdue_run_failed", due):
                _fire(engine, sender, report, patient, due)
        for run in find_held(engine):
            with _counting(engine, report, "held_run_failed", run):
                _drive(engine, sender, report, patient, run=run)
    return report


@contextmanager
def _counting(engine: Engine, report: MonitorReport, what: str, run: HeldRun | timers.DueRun) -> Iterator[None]:
    """One run that goes wrong is counted, and the next one follows."""
    try:
        yield
    except MessageNotSentError:
        report.unsent += 1  # what was written is rows all the same, and the doctor's (R1, R2)
    except StoreError:
        raise
    except Exception as error:
        report.errors += 1
        log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
        log.error(what, run_id=run.run_id, workflow=run.workflow, exc_info=error)


def _fire(engine: Engine, sender: Sender, report: MonitorReport, patient: Patience, due: timers.DueRun) -> None:
    """End what is due in a run. With a broker that the transaction cannot reach it is driven here: no message can be lost then."""
    here = not sender.joins
    try:
        fired = patient.call(
            due.workflow, due.run_id, lambda: timers.fire(engine, due.run_id, sender, here=here, sweeping=True)
        )
    except (WorkflowStalledError, WorkflowBrokeOffError) as error:
        _stalled(engine, report, due.run_id, error)
        return
    report.timed_out += fired.waits
    report.expired_steps += fired.steps
    report.expired_runs += fired.runs
    report.expiry_failed += fired.failed
    if fired.waits or fired.steps or fired.runs:
        report.late_ms = max(report.late_ms, engine.now() - due.due)
    if fired.left:  # its rollback has to be planned where its workflow is known
        if timers.send(engine, sender, due, again_after=runs.pause(engine, 0, due.due)):
            report.sent += 1
        else:
            report.skipped += 1
    elif not fired.any:
        report.skipped += 1


def _stalled(engine: Engine, report: MonitorReport, run_id: str, error: Exception) -> None:
    expiry_failed, held = timers.hold_off(engine, run_id, error)
    report.expiry_failed += expiry_failed
    report.held_again += held


def find_held(engine: Engine) -> list[HeldRun]:
    """The held runs that are due."""
    params = (engine.now(), engine.settings.monitor.expiration.batch_size)
    return engine.store.read(lambda tx: [HeldRun(*row) for row in tx.all(_DUE, params)])


def _drive(engine: Engine, sender: Sender, report: MonitorReport, patient: Patience, *, run: HeldRun) -> None:
    here = engine.drives(run.workflow, run.queue) and run.workflow not in engine.lookout.busy()
    # Whoever gets the message may not be able to drive the run either, and says nothing then: the pauses grow with its age.
    until = engine.now() + runs.pause(engine, run.hold_count, None if here else run.woken_at)
    outbox = sender.outbox(None)
    outbox.load([] if here else [Outgoing("drive", run.run_id, run.workflow, run.queue, priority=run.priority)])

    def take(tx: Tx) -> bool:
        if not tx.run(_TAKE, (until, run.run_id, run.revision, run.hold_until, run.created_at)):
            return False
        outbox.stage(tx)
        return True

    # Who else may be here: another sweep with the same listing, an outcome that has driven the run meanwhile. Both have changed
    # the window or the revision. test_of_two_sweeps_one_drives_a_held_run
    if not engine.store.write(take):
        report.skipped += 1
        return
    outbox.delivered()
    if not here:
        report.sent += 1
        return
    try:
        driven = patient.call(run.workflow, run.run_id, lambda: _drive_here(engine, sender, run))
    except (WorkflowStalledError, WorkflowBrokeOffError) as error:
        _stalled(engine, report, run.run_id, error)
        return
    if driven is drives.Driven.HELD:
        report.held_again += 1
    else:
        report.resumed += 1


def _drive_here(engine: Engine, sender: Sender, run: HeldRun) -> drives.Driven:
    """Drive the run in this process; a fault of the engine's own holds it like a mismatch (HISTORY-1)."""
    try:
        return drives.drive(engine, run.run_id, sender, None)
    except StoreError:
        raise
    except Exception as error:
        snapshot = load(engine, run.run_id)
        undecided = snapshot is not None and (snapshot.revision, snapshot.created_at) == (run.revision, run.created_at)
        if snapshot is None or not undecided or not runs.hold(engine, snapshot, error, sender, None):
            raise
        return drives.Driven.HELD
