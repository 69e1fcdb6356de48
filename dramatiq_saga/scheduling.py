"""Sweeps on a scheduler of the application's own: what a program with an APScheduler adds to it (LOOP-1).

The public face of ``recovery/schedule.py``, for those who run a scheduler anyway. Nothing here starts or stops one, and any number of
processes may do the same: one pass is done per interval all the same. A process that only schedules is ``dramatiq-saga schedule``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .middleware import middleware_of
from .operations import require_workflows
from .recovery.schedule import PRUNE_AT, Plan, Schedule

if TYPE_CHECKING:
    from datetime import timedelta

    from dramatiq import Broker


def add_jobs(
    scheduler: Any,
    broker: Broker,
    *,
    monitor_seconds: float | timedelta | None = None,
    repair_seconds: float | timedelta | None = None,
    prune_at: str | None = PRUNE_AT,
    timezone: str = "UTC",
    jobstore: str = "default",
    prefix: str = "dramatiq-saga",
) -> None:
    """Add the sweeps of the application on ``broker`` to an APScheduler 3 of any kind (LOOP-1).

    Parameters:
      monitor_seconds: the interval of the monitor, seconds from 0.1 to a day or a ``timedelta``; ``loop.monitor_seconds`` unless given.
      repair_seconds: the interval of the doctor, ``loop.repair_seconds`` unless given; there is none where ``repair.enabled`` is off.
      prune_at: the time of day, as ``"04:15"``, at which runs are deleted that ended more than ``prune.retention_days`` ago;
        ``None`` for never.
      timezone: the zone of that time. Intervals are elapsed time, in every zone.
      jobstore: where the jobs are kept, which has to be in memory: they belong to this process, and each start of it adds them.
      prefix: what their ids begin with; jobs of the same ids are replaced.

    The application's workflows have to be declared in this process, as in a worker. A pass that another process is at, or has
    done within the interval, is left to that; one that fails is logged and ends nothing.

    Raises:
      RefusedError: the application declares no workflow, so a sweep could drive nothing.
      ValueError: an interval, a time or a zone that cannot be.
      MissingExtraError: there is no APScheduler 3.11 or later 3.x.
      MiddlewareOrderError: the broker has no SagaMiddleware.
      TypeError: the job store pickles its jobs; raised by the scheduler's ``start()`` where that comes later.
    """
    middleware = middleware_of(broker)
    engine = middleware.engine(broker)
    require_workflows(engine)
    plan = Plan.make(
        engine.settings, monitor_seconds=monitor_seconds, repair_seconds=repair_seconds, prune_at=prune_at, timezone=timezone
    )
    Schedule(engine, middleware.sender(broker), plan).add_to(scheduler, jobstore=jobstore, prefix=prefix)


__all__ = ["add_jobs"]
