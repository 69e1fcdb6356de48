"""An application that nothing but sweeps run on, and one process of a storm of them: see ``test_sweep_processes.py``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import dramatiq
from apscheduler.schedulers.background import BackgroundScheduler

from dramatiq_saga import Settings
from dramatiq_saga.cli import main
from dramatiq_saga.clock import SystemClock
from dramatiq_saga.recovery.schedule import Plan, Schedule
from tests.support.gates import Gates
from tests.support.workbench import Workbench

DATABASE, PREFIX = "SWEEP_STORM_DATABASE", "SWEEP_STORM_PREFIX"

#: What was repaired is not repaired again while a storm lasts.
SETTINGS = {"repair.enabled": True, "repair.backoff.base_seconds": 3600, "repair.backoff.max_seconds": 3600}


def waits(flow: Any, traveller: str) -> Any:
    return flow.await_signal("go", wait_seconds=1)


def make(database: str, prefix: str) -> Workbench:
    bench = Workbench(database, prefix=prefix, settings=Settings.from_mapping(SETTINGS))
    bench.engine.store.clock = SystemClock()  # type: ignore[assignment]
    return bench


if DATABASE in os.environ:
    bench = make(os.environ[DATABASE], os.environ[PREFIX])
    dramatiq.set_broker(bench.broker)


def storm(way: str, rounds: int) -> None:
    """Sweep once each round, as soon as its gate opens: by the command, or as the jobs of a scheduler do."""
    scheduler = BackgroundScheduler()
    scheduler.start(paused=True)
    always_due = replace(Plan.make(bench.engine.settings), monitor_seconds=0.001, repair_seconds=0.001)
    Schedule(bench.engine, bench.sender, always_due).add_to(scheduler)
    jobs = [scheduler.get_job(f"dramatiq-saga.{name}").func for name in ("monitor", "repair")]
    for number in range(rounds):
        Gates.from_env().reach(f"round-{number}")
        if way == "command":
            assert main(["--app", __name__, "sweep"]) == 0
        else:
            for job in jobs:
                job()
        print(f"round {number} is over", flush=True)
    scheduler.shutdown()
