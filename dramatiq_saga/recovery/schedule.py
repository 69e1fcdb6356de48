"""Monitor, repair and prune on APScheduler: as the process behind ``dramatiq-saga schedule``, or as jobs of a host's own (LOOP-1).

The only module that imports APScheduler, when it is used. Several schedules at once do no harm: each pass is taken in turn
(``recovery/passes.py``), so one is done per interval however many come for it. A process that slept, or was stopped, does one pass of
each kind when it goes on, not all that it has missed; a pass that fails is told, and the next one comes in its time.

Intervals are elapsed time, in every zone. APScheduler computes them on the wall clock, so :meth:`Schedule.serve` watches that clock
against the monotonic one, and begins them anew where it was set back (C52). Only the time of day of the prune knows a zone (C53).
"""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from datetime import time as time_of_day
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from zoneinfo import ZoneInfo

import structlog

from ..clock import SystemClock, to_iso
from ..commands import install
from ..errors import MissingExtraError
from ..settings import MIN_INTERVAL
from . import passes
from .passes import Skipped
from .prune import horizon, prune
from .sweep import News, monitor_in_turn, repair_in_turn

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..settings import Settings

#: When the daily prune is, unless told otherwise.
PRUNE_AT = "04:15"

#: Runs that a prune deletes before it looks whether it is to stop.
SLICE = 500

#: Seconds between two looks at the clock, and how far it may fall behind the monotonic one meanwhile.
LOOK, TOLERANCE = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is scheduled: intervals in seconds, a time of day in a zone. ``None``: not at all."""

    monitor_seconds: float
    repair_seconds: float | None
    prune_at: time_of_day | None
    zone: tzinfo
    retention_days: float

    @classmethod
    def make(
        cls,
        settings: Settings,
        *,
        monitor_seconds: float | timedelta | None = None,
        repair_seconds: float | timedelta | None = None,
        prune_at: str | None = PRUNE_AT,
        timezone: str = "UTC",
    ) -> Plan:
        """What the settings say (``loop.monitor_seconds``, ``loop.repair_seconds``), with what is given on top.

        Repair is not scheduled where ``repair.enabled`` is off. Raises ValueError for an interval, a time or a zone that cannot be.
        """
        monitored = _interval(settings.loop.monitor_seconds if monitor_seconds is None else monitor_seconds)
        repaired = _interval(settings.loop.repair_seconds if repair_seconds is None else repair_seconds)
        return cls(
            monitored,
            repaired if settings.repair.enabled else None,
            None if prune_at is None else _time_of_day(prune_at),
            _zone(timezone),
            settings.prune.retention_days,
        )

    def line(self, now: int) -> str:
        """The plan for people, as of ``now`` (milliseconds)."""
        repair = "repair is off (repair.enabled)" if self.repair_seconds is None else f"repair every {self.repair_seconds:g} s"
        prune = "no prune"
        if self.prune_at is not None:
            daily = Daily(self.prune_at, self.zone)
            first = daily.get_next_fire_time(None, datetime.fromtimestamp(now / 1000, UTC))
            prune = f"prune of what ended over {self.retention_days:g} days ago {daily}, first at {to_iso(round(first.timestamp() * 1000))}"
        return f"monitor every {self.monitor_seconds:g} s; {repair}; {prune}"


@dataclass(frozen=True)
class Daily:
    """The trigger of the prune: once a day, at a time by the clock of a zone, whatever that clock does (C53).

    A time that a night leaves out comes as much later by the clock; of one that a night has twice, the first counts. APScheduler's own
    trigger for this leaves days out: after a night that is an hour short, a whole one for a time before 01:00.
    """

    at: time_of_day
    timezone: tzinfo

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        """The first moment after ``previous``; from ``now`` on where there was none before, or the clock was set back behind it."""
        since = now.astimezone(UTC)
        if previous is not None and previous <= now:
            since = previous.astimezone(UTC) + timedelta(microseconds=1)
        day = since.astimezone(self.timezone).date() - timedelta(days=1)  # whose time may have been put off beyond its midnight
        while (moment := datetime.combine(day, self.at, self.timezone).astimezone(UTC)) < since:
            day += timedelta(days=1)
        return moment.astimezone(self.timezone)

    def __str__(self) -> str:
        return f"daily at {self.at:%H:%M} {self.timezone}"


class Schedule:
    """A plan, and the passes that it asks for. ``tell`` is given a line of each pass that has something to say."""

    def __init__(self, engine: Engine, sender: Sender, plan: Plan, *, tell: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._sender = sender
        self._plan = plan
        self._log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
        self._tell = tell or (lambda text: self._log.info("swept", did=text))
        self._news = News()
        self._stopping = Event()

    def add_to(self, scheduler: Any, *, jobstore: str = "default", prefix: str = "dramatiq-saga") -> None:
        """Add the jobs to an APScheduler, whatever its own defaults are; those of the same prefix that are there begin anew.

        Raises MissingExtraError where there is no APScheduler that is new enough, TypeError for a job store that is not in memory:
        at once where the scheduler runs, and otherwise when it starts.
        """
        plan, interval = self._plan, _apscheduler().IntervalTrigger
        jobs: dict[str, tuple[Any, Callable[[], None]]] = {
            passes.MONITOR: (interval(seconds=plan.monitor_seconds, timezone=UTC), self.monitor)
        }
        if plan.repair_seconds is not None:
            jobs[passes.REPAIR] = (interval(seconds=plan.repair_seconds, timezone=UTC), self.repair)
        if plan.prune_at is not None:
            jobs[passes.PRUNE] = (Daily(plan.prune_at, plan.zone), self.prune)
        for name, (trigger, job) in jobs.items():
            scheduler.add_job(
                job, trigger, id=f"{prefix}.{name}", name=f"{prefix} {name}", jobstore=jobstore, replace_existing=True,
                max_instances=1, coalesce=True, misfire_grace_time=None,
            )  # fmt: skip

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the sweeps cannot be kept in a job store that pickles its jobs: they belong to the broker of this process. "
            'Keep them in memory, scheduler.add_jobstore("memory", "sweeps") and add_jobs(..., jobstore="sweeps"): '
            "each start of the program adds them"
        )

    def serve(self, stop: queue.SimpleQueue[str]) -> str:
        """Run the plan in this process until something is put into ``stop``, and return that once the passes under way have ended."""
        scheduler = _apscheduler().BackgroundScheduler(timezone=UTC)
        self.add_to(scheduler)
        scheduler.start()
        try:
            return self._wait(scheduler, stop)
        finally:
            self._stopping.set()
            scheduler.remove_all_jobs()
            scheduler.shutdown()

    def _wait(self, scheduler: Any, stop: queue.SimpleQueue[str]) -> str:
        machine = SystemClock()
        ahead = machine.now() / 1000 - time.monotonic()
        while True:
            try:
                return stop.get(timeout=LOOK)
            except queue.Empty:
                before, ahead = ahead, machine.now() / 1000 - time.monotonic()
                if ahead < before - TOLERANCE:  # what was due in a minute would be due in a minute and as much more
                    self.add_to(scheduler)

    # --- the passes ----------------------------------------------------------------------------------------------------

    def monitor(self) -> None:
        """One pass of the monitor, in turn."""
        every = self._plan.monitor_seconds
        self._pass(lambda: self._news.of(monitor_in_turn(self._engine, self._sender, every=every)))

    def repair(self) -> None:
        """One pass of the doctor, in turn."""
        every = self._plan.repair_seconds
        self._pass(lambda: self._news.of(repair_in_turn(self._engine, self._sender, every=every)))

    def prune(self) -> None:
        """Delete what is old enough, in turn."""
        self._pass(self._prune)

    def _prune(self) -> str | None:
        store = self._engine.store
        before = horizon(store, self._plan.retention_days)

        def delete() -> int:
            pruned = 0
            while not self._stopping.is_set():
                slice_ = prune(store, before=before, limit=SLICE).pruned
                pruned += slice_
                if slice_ < SLICE:
                    break
            return pruned

        pruned = passes.in_turn(self._engine, passes.PRUNE, delete)
        return f"prune: {pruned} deleted" if pruned and not isinstance(pruned, Skipped) else None

    def _pass(self, do: Callable[[], str | None]) -> None:
        try:
            if text := do():
                self._tell(text)
        except Exception as error:
            self._log.warning("sweep_failed", error=f"{type(error).__name__}: {error}")
        finally:
            self._engine.store.close_thread()


def _interval(given: float | timedelta) -> float:
    seconds: Any = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not MIN_INTERVAL <= seconds <= 86_400:
        raise ValueError(f"{given!r} is no interval: a number of seconds from {MIN_INTERVAL} to 86400 (a day), or a timedelta")
    return seconds


def _time_of_day(text: str) -> time_of_day:
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is no time of day: write it as {PRUNE_AT}")
    return time_of_day(int(found[1]), int(found[2]))


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone that this machine knows: write one such as Europe/Berlin, or UTC") from None


class _APScheduler(NamedTuple):
    """What is used of it."""

    BackgroundScheduler: Any
    IntervalTrigger: Any


def require_apscheduler() -> None:
    """Raise MissingExtraError where there is no APScheduler that is new enough."""
    _apscheduler()


def _apscheduler() -> _APScheduler:
    try:
        from apscheduler.schedulers.background import BackgroundScheduler
        from apscheduler.triggers.base import BaseTrigger
        from apscheduler.triggers.interval import IntervalTrigger
    except ImportError as error:
        raise MissingExtraError(
            f"schedules need APScheduler 3.11 or a later 3.x ({error}): {install('schedule')}; "
            "cron with `dramatiq-saga sweep` does without, and so does loop.enabled"
        ) from error
    BaseTrigger.register(Daily)  # this module can be imported without it
    return _APScheduler(BackgroundScheduler, IntervalTrigger)
