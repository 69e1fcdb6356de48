"""One sweep: the monitor, then the doctor if it is on; what cron runs, and any number of them at once (LOOP-1).

A sweep reads live rows only, each pass at most a batch, so its cost does not grow with history
(test_a_sweep_does_the_same_work_however_many_runs_have_ended). It ends for nothing but a store
that refuses (StoreError). Where repair is off it changes nothing and says how much is waiting for it; either way it counts the
``running`` rows that nothing will ever reclaim (RECLAIM-4). A pass that another process is at is skipped, and the report says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine import liveness
from ..store.models import LIVE
from . import doctor, passes
from .monitor import MonitorReport, monitor
from .passes import Skipped
from .rows import COMPENSATION, STEP, TABLES, WANTED

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..settings import Settings
    from ..store.database import Tx

#: A row that has been running for longer than this many milliseconds, and has no reclaim deadline, is counted (RECLAIM-4).
LONG_RUNNING_MS = 3_600_000

#: Of a row ``r``; its marker is the moment before which it was begun. The first term is the predicate of the indexes of live rows.
LONG_RUNNING = f"r.{LIVE} AND r.status = 'running' AND r.started_at <= ?"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did, and what it leaves.

    ``repair`` is ``None`` where it is off; ``unrepaired`` then holds what each of its rules would have treated.
    ``never_reclaimed`` counts the rows of RECLAIM-4. A pass that was somebody else's is :class:`~dramatiq_saga.recovery.passes.Skipped`.
    """

    monitor: MonitorReport | Skipped
    repair: doctor.RepairReport | Skipped | None
    unrepaired: dict[str, int] = field(default_factory=dict)
    never_reclaimed: int = 0

    def line(self) -> str:
        """The sweep in one line, for people and for the log of cron."""
        parts = [line(self.monitor), line(self.repair) if self.repair is not None else repair_is_off(self.unrepaired)]
        if self.never_reclaimed:
            parts.append(f"{_count(self.never_reclaimed, 'row')} running for over an hour that nothing will ever reclaim")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for machines (:func:`as_dict`)."""
        return {
            **as_dict(monitor=self.monitor, repair=self.repair),
            "unrepaired": self.unrepaired,
            "never_reclaimed": self.never_reclaimed,
        }


def sweep(engine: Engine, sender: Sender) -> SweepReport:
    """Monitor, then repair if it is enabled. Raises StoreError where the store refuses; cron's next sweep goes on from there."""
    monitored = monitor_in_turn(engine, sender)
    repaired = repair_in_turn(engine, sender) if engine.settings.repair.enabled else None
    left = doctor.candidates(engine) if repaired is None else {}
    return SweepReport(monitored, repaired, left, never_reclaimed(engine))


def monitor_in_turn(engine: Engine, sender: Sender, *, every: float | None = None) -> MonitorReport | Skipped:
    """One pass of the monitor, unless it is somebody else's (:func:`~dramatiq_saga.recovery.passes.in_turn`)."""
    return passes.in_turn(engine, passes.MONITOR, lambda: monitor(engine, sender), every=every)


def repair_in_turn(engine: Engine, sender: Sender, *, every: float | None = None) -> doctor.RepairReport | Skipped:
    """One pass of the doctor, unless it is somebody else's; whether it is enabled is the caller's business."""
    return passes.in_turn(engine, passes.REPAIR, lambda: doctor.repair(engine, sender), every=every)


def never_reclaimed_sql(settings: Settings, kind: str) -> str:
    """A row's condition: running for longer than an hour, with no reclaim deadline and no lease behind it (RECLAIM-4).

    Its marker stands for the moment an hour ago.
    """
    unleased = f" AND NOT ({liveness.watched_sql('r.worker_id')})" if liveness.is_on(settings) else ""
    return f"{LONG_RUNNING} AND r.reclaim_stale_at IS NULL{unleased} AND {WANTED[kind]}"


def never_reclaimed(engine: Engine) -> int:
    """How many rows nothing will ever reclaim: they wait for a human (RECLAIM-4)."""
    horizon = engine.now() - LONG_RUNNING_MS
    statements = [
        f"SELECT COUNT(*) FROM {{{TABLES[kind]}}} r WHERE {never_reclaimed_sql(engine.settings, kind)}"
        for kind in (STEP, COMPENSATION)
    ]

    def count(tx: Tx) -> int:
        return sum(row[0] for sql in statements for row in tx.all(sql, (horizon,)))

    return engine.store.read(count)


def line(report: MonitorReport | doctor.RepairReport | Skipped) -> str:
    """One pass in one line, for people."""
    if isinstance(report, Skipped):
        return report.line()
    return _monitored(report) if isinstance(report, MonitorReport) else _repaired(report)


def as_dict(**reports: MonitorReport | doctor.RepairReport | Skipped | None) -> dict[str, Any]:
    """Passes as plain values: ``None`` for one that is off or was skipped; the latter are told under ``skipped``."""
    return {
        **{name: None if one is None or isinstance(one, Skipped) else asdict(one) for name, one in reports.items()},
        "skipped": {name: asdict(one) for name, one in reports.items() if isinstance(one, Skipped)},
    }


class News:
    """What is worth a line of each pass of a process that sweeps again and again: what it changed, what it leaves to a human.

    A pass that would repeat the line of the one before it is quiet.
    """

    def __init__(self) -> None:
        self._said: dict[type, str] = {}

    def of(self, report: MonitorReport | doctor.RepairReport | Skipped) -> str | None:
        """The line, if there is one."""
        if isinstance(report, Skipped):
            return None
        counts = {name: count for name, count in asdict(report).items() if name != "skipped"}
        text = line(report) if any(counts.values()) else ""
        repeated = text == self._said.get(type(report))
        self._said[type(report)] = text
        return None if repeated or not text else text


def repair_is_off(unrepaired: dict[str, int]) -> str:
    """What is said instead of a repair: ``unrepaired`` counts what each rule would have treated."""
    waiting = [
        f"{unrepaired[name]} {what}"
        for name, what in (("R1", "waiting to run"), ("R2", "not driven"), ("R3", "past the reclaim deadline"))
        if unrepaired.get(name)
    ]
    left = f"unless their messages still come, nothing will pick up {', '.join(waiting)}" if waiting else "nothing seems lost"
    return f"repair is off (repair.enabled): {left}"


def _monitored(report: MonitorReport) -> str:
    overdue = _parts(
        (report.timed_out, "timed out (waits)"), (report.expired_steps, "expired (steps)"), (report.expired_runs, "expired (runs)"),
        (report.expiry_failed, "could not be expired (runs, see expiry_failed)"),
    )  # fmt: skip
    late = f", up to {_count(report.late_ms // 1000, 'second')} late" if report.late_ms >= 1000 else ""
    held = _held(report)
    return f"overdue: {overdue}{late}; {held}" if overdue else held


def _held(report: MonitorReport) -> str:
    parts = _parts(
        (report.resumed, "resumed"), (report.held_again, "held again"), (report.sent, "sent to a worker"),
        (report.skipped, "skipped"), (report.unsent, "not taken by the broker"), (report.errors, "failed (see the log)"),
    )  # fmt: skip
    return f"held runs: {parts}" if parts else "no held run was due"


def _repaired(report: doctor.RepairReport) -> str:
    parts = _parts(
        (report.steps, "sent again (steps)"), (report.compensations, "sent again (compensations)"), (report.runs, "driven (runs)"),
        (report.reclaims, "sent to be reclaimed"), (report.unknown_actors, "failed for an unknown actor"),
        (report.skipped, "skipped"), (report.unsent, "not taken by the broker"), (report.errors, "failed (see the log)"),
        (report.spent, "out of repairs: kick them"),
    )  # fmt: skip
    return f"repair: {parts or 'nothing was lost'}"


def _parts(*counts: tuple[int, str]) -> str:
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
