"""The monitor: drives runs again that are held because their code did not fit their history (HISTORY-1).

A held run is taken by moving its window: one conditional ``UPDATE`` that repeats what was seen, so of two sweeps one drives it,
and a run whose drive kills the process does not stand in front of the others. The window doubles with every failure
(``monitor.expiration.backoff``), without an end. Nothing here fails a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from ..engine import drive as drives
from ..engine import runs
from ..engine.rows import Outgoing
from ..engine.snapshot import load
from ..errors import MessageNotSentError, StoreError
from ..store.models import LIVE

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..store.database import Tx

# The first terms are the predicate of an index that holds held runs only.
_DUE = (
    "SELECT id, workflow, queue, priority, revision, hold_count, hold_until FROM {flow_runs} "
    f"WHERE hold_until IS NOT NULL AND {LIVE} AND status <> 'rolling_back' AND wakes > wakes_seen AND hold_until <= ? "
    "ORDER BY hold_until LIMIT ?"
)
_TAKE = (
    "UPDATE {flow_runs} SET hold_until = ? WHERE id = ? AND revision = ? AND hold_until = ? AND wakes > wakes_seen "
    "AND ended_at IS NULL AND status <> 'rolling_back'"
)


@dataclass(slots=True)
class MonitorReport:
    """What one pass of the monitor did."""

    resumed: int = 0
    held_again: int = 0
    sent: int = 0
    skipped: int = 0
    unsent: int = 0
    errors: int = 0

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
    hold_count: int
    hold_until: int


def monitor(engine: Engine, sender: Sender) -> MonitorReport:
    """One pass: every held run whose window is over, the longest due first, at most ``monitor.expiration.batch_size``.

    A run of a workflow that this process knows is driven here, another one by a message. Raises StoreError where the store
    refuses; whatever else goes wrong with a run is counted, and the next one follows.
    """
    report = MonitorReport()
    for run in find_held(engine):
        try:
            _drive(engine, sender, report, run=run)
        except MessageNotSentError:
            report.unsent += 1  # what a drive has scheduled is a row all the same, and the doctor's (R1)
        except StoreError:
            raise
        except Exception as error:
            report.errors += 1
            log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
            log.error("held_run_failed", run_id=run.run_id, workflow=run.workflow, exc_info=error)
    return report


def find_held(engine: Engine) -> list[HeldRun]:
    """The held runs that are due."""
    params = (engine.now(), engine.settings.monitor.expiration.batch_size)
    return engine.store.read(lambda tx: [HeldRun(*row) for row in tx.all(_DUE, params)])


def _drive(engine: Engine, sender: Sender, report: MonitorReport, *, run: HeldRun) -> None:
    backoff = engine.settings.monitor.expiration.backoff
    window = min(backoff.base_seconds * 2 ** min(run.hold_count, 30), backoff.max_seconds)
    until = engine.now() + int(window * 1000)
    here = engine.drives(run.workflow, run.queue)
    outbox = sender.outbox(None)
    outbox.load([] if here else [Outgoing("drive", run.run_id, run.workflow, run.queue, priority=run.priority)])

    def take(tx: Tx) -> bool:
        if not tx.run(_TAKE, (until, run.run_id, run.revision, run.hold_until)):
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
    elif _drive_here(engine, sender, run) is drives.Driven.HELD:
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
        undecided = snapshot is not None and snapshot.revision == run.revision
        if snapshot is None or not undecided or not runs.hold(engine, snapshot, error, sender, None):
            raise
        return drives.Driven.HELD
