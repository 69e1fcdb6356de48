"""Sweeps on APScheduler: what is scheduled, what a night, a sleep or a set clock does to it, and what a bad pass does not (LOOP-1, C53).

APScheduler's own clock is a variable here, and its jobs run when a test says that it is time: no thread, no sleep.
"""

from __future__ import annotations

import importlib
import itertools
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import structlog.testing
from apscheduler.executors.debug import DebugExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.redis import RedisJobStore
from apscheduler.schedulers.base import BaseScheduler
from redis.connection import parse_url

from dramatiq_saga import Settings
from dramatiq_saga.errors import MiddlewareOrderError, MissingExtraError, StoreError
from dramatiq_saga.recovery import schedule as schedules
from dramatiq_saga.recovery.schedule import Daily, Plan, Schedule
from dramatiq_saga.scheduling import add_jobs
from tests.support.waiting import eventually
from tests.support.workbench import MakeBench, Workbench

BERLIN = ZoneInfo("Europe/Berlin")
REPAIRING = Settings.from_mapping({"repair.enabled": True})

#: Clocks go forward in the night before 28 March 2027, at 01:00 UTC, and back in the one before 31 October.
SPRING, AUTUMN = datetime(2027, 3, 27, 12, tzinfo=UTC), datetime(2027, 10, 30, 12, tzinfo=UTC)


class Still(BaseScheduler):
    """A scheduler that looks what is due when it is told to."""

    def wakeup(self) -> None:
        pass

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)


class Night:
    """A scheduler of a host's, whose own habits would lose passes or repeat them; and the time."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        habits = {"coalesce": False, "misfire_grace_time": 1, "max_instances": 5}
        self.scheduler = Still(timezone=BERLIN, executors={"default": DebugExecutor()}, job_defaults=habits)
        self.scheduler.start()

    def pass_by(self, duration: timedelta, *, step: timedelta = timedelta(seconds=10)) -> None:
        end = self.now + duration
        while self.now < end:
            self.now += step
            self.scheduler._process_jobs()

    def sleep(self, duration: timedelta) -> None:
        """The machine sleeps, or the process is stopped: time goes by, and nobody looks."""
        self.now += duration
        self.scheduler._process_jobs()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[datetime], Night]]:
    made: list[Night] = []

    def make(now: datetime) -> Night:
        made.append(Night(now))
        return made[-1]

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return made[-1].now.astimezone(tz) if made else datetime(2027, 1, 1, tzinfo=UTC)

    for module in ("apscheduler.schedulers.base", "apscheduler.triggers.interval"):
        monkeypatch.setattr(importlib.import_module(module), "datetime", Now)
    yield make
    for night in made:
        night.scheduler.shutdown()


class Watched(Schedule):
    """Notes when its passes come, and does none."""

    def __init__(self, night: Night, plan: Plan) -> None:
        super().__init__(SimpleNamespace(settings=REPAIRING), None, plan)  # type: ignore[arg-type]
        self.came: dict[str, list[datetime]] = {"monitor": [], "repair": [], "prune": []}
        for name, moments in self.came.items():
            setattr(self, name, lambda moments=moments: moments.append(night.now))
        self.add_to(night.scheduler)


def gaps(moments: list[datetime]) -> set[float]:
    return {(later - earlier).total_seconds() for earlier, later in itertools.pairwise(moments)}


# --- what is scheduled -------------------------------------------------------------------------------------------------


def test_a_plan_is_that_of_the_settings_and_says_its_zone() -> None:
    """C53: the zone is explicit, UTC unless another is given, and shown."""
    plan = Plan.make(REPAIRING)
    assert plan.line(1_800_000_000_000) == (
        "monitor every 30 s; repair every 60 s; prune of what ended over 90 days ago daily at 04:15 UTC, "
        "first at 2027-01-16T04:15:00.000Z"
    )
    local = Plan.make(Settings(), monitor_seconds=5, prune_at="23:30", timezone="Europe/Berlin")
    assert local.line(1_800_000_000_000) == (
        "monitor every 5 s; repair is off (repair.enabled); prune of what ended over 90 days ago daily at 23:30 Europe/Berlin, "
        "first at 2027-01-15T22:30:00.000Z"
    )
    assert Plan.make(Settings(), prune_at=None).line(0).endswith("; no prune")
    assert (
        Plan.make(REPAIRING, monitor_seconds=timedelta(minutes=2), repair_seconds=timedelta(milliseconds=100))
        .line(0)
        .startswith("monitor every 120 s; repair every 0.1 s; ")
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"monitor_seconds": 0}, {"monitor_seconds": True}, {"monitor_seconds": "30"}, {"repair_seconds": 0.09},
        {"monitor_seconds": float("nan")}, {"repair_seconds": -1}, {"repair_seconds": 86_401},
        {"prune_at": "24:00"}, {"prune_at": "4"}, {"prune_at": "15 4 * * *"}, {"timezone": "Europe/Nowhere"}, {"timezone": "../x"},
        {"timezone": "Europe"}, {"timezone": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r" is no (interval|time of day|time zone)"):
        Plan.make(REPAIRING, **wrong)


def test_jobs_of_a_hosts_own_scheduler_keep_their_manners_whatever_its_habits_are(
    make_bench: MakeBench, at: Callable[[datetime], Night]
) -> None:
    """LOOP-1: never two at once, late is better than never, many that were missed are one; to add them twice is to add them once."""
    bench, night = make_bench(), at(SPRING)
    for _ in range(2):
        add_jobs(night.scheduler, bench.broker, repair_seconds=90, timezone="Europe/Berlin")
    jobs = {job.id: job for job in night.scheduler.get_jobs()}
    assert sorted(jobs) == ["dramatiq-saga.monitor", "dramatiq-saga.prune", "dramatiq-saga.repair"]
    assert {(job.max_instances, job.coalesce, job.misfire_grace_time) for job in jobs.values()} == {(1, True, None)}
    assert {job.trigger.timezone for job in jobs.values()} == {UTC, BERLIN}
    add_jobs(night.scheduler, bench.broker, prune_at=None, prefix="second")
    assert {job.id for job in night.scheduler.get_jobs()} - set(jobs) == {"second.monitor", "second.repair"}


def test_added_jobs_sweep_and_prune(make_bench: MakeBench, at: Callable[[datetime], Night]) -> None:
    """LOOP-1, PRUNE-1: a lost message is sent again, a run that ended long ago is gone; without repair nobody repairs."""
    bench, night = make_bench(), at(SPRING)
    lost, old = bench.send(), bench.send()
    bench.lose_messages()
    old.cancel()
    bench.advance(91 * 86_400)
    add_jobs(night.scheduler, bench.broker)
    with structlog.testing.capture_logs() as logs:
        night.pass_by(timedelta(minutes=2))
        assert bench.asked() == [("drive", None)]
        night.sleep(timedelta(days=1))
    assert [entry.get("did") for entry in logs] == ["repair: 1 driven (runs)", "prune: 1 deleted"]
    assert bench.engine.store.read(lambda tx: tx.all("SELECT id FROM {flow_runs}")) == [(lost.id,)]
    bench = make_bench(settings=Settings())
    add_jobs(night.scheduler, bench.broker, prefix="off")
    assert night.scheduler.get_job("off.repair") is None


def test_schedulers_of_many_processes_do_one_pass_per_interval(
    make_bench: MakeBench, tmp_path: Path, at: Callable[[datetime], Night]
) -> None:
    """C58: each web process has started one, at another second; a quarter of an hour has thirty passes of the monitor all the same."""
    night = at(SPRING)
    benches = [make_bench(database=tmp_path / "shared.db") for _ in range(4)]
    for number, bench in enumerate(benches):
        bench.engine.store.clock = benches[0].clock
        add_jobs(night.scheduler, bench.broker, prefix=f"process-{number}")
        night.pass_by(timedelta(seconds=7), step=timedelta(seconds=1))
    for _ in range(900):
        benches[0].advance(1)
        night.pass_by(timedelta(seconds=1), step=timedelta(seconds=1))
    counted = dict(benches[0].engine.store.read(lambda tx: tx.all("SELECT name, number FROM {passes}")))
    assert 28 <= counted["monitor"] <= 33
    assert 14 <= counted["repair"] <= 17


@pytest.mark.parametrize("runs", [True, False])
def test_a_job_store_that_pickles_its_jobs_is_told_that_sweeps_belong_to_the_process(
    make_bench: MakeBench, redis_url: str, runs: bool
) -> None:
    """LOOP-1: a pickled sweep would be one without a broker. Beside such a store, one in memory does."""
    keys, broker = f"test-{uuid.uuid4().hex}", make_bench().broker
    pickling = RedisJobStore(jobs_key=keys, run_times_key=f"{keys}-times", **parse_url(redis_url))
    scheduler = Still(jobstores={"default": pickling})
    if runs:
        scheduler.start(paused=True)
    with pytest.raises(
        TypeError, match=r"cannot be kept in a job store that pickles .* add_jobs\(\.\.\., jobstore=\"sweeps\"\)"
    ):
        add_jobs(scheduler, broker)
        scheduler.start(paused=True)
    assert pickling.get_all_jobs() == []
    beside = Still(jobstores={"default": pickling, "sweeps": MemoryJobStore()})
    add_jobs(beside, broker, jobstore="sweeps")
    beside.start(paused=True)
    assert {job.id for job in beside.get_jobs()} == {"dramatiq-saga.monitor", "dramatiq-saga.repair", "dramatiq-saga.prune"}


def test_a_broker_without_sagas_is_told_so(at: Callable[[datetime], Night]) -> None:
    from dramatiq.brokers.stub import StubBroker

    with pytest.raises(MiddlewareOrderError):
        add_jobs(at(SPRING).scheduler, StubBroker())


def test_without_apscheduler_the_way_out_is_named(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("apscheduler")]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'PATH-OF-THE-CHECKOUT\[schedule\]'"):
        add_jobs(None, make_bench().broker)


# --- nights, sleep, clocks that are set --------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [SPRING, AUTUMN], ids=["spring", "autumn"])
def test_intervals_are_elapsed_time_through_both_nights(at: Callable[[datetime], Night], begin: datetime) -> None:
    """C53: no pass is left out or repeated when a zone's clocks change."""
    night = at(begin)
    watched = Watched(night, Plan.make(REPAIRING, timezone="Europe/Berlin"))
    night.pass_by(timedelta(hours=18))
    assert gaps(watched.came["monitor"]) == {30}
    assert gaps(watched.came["repair"]) == {60}


@pytest.mark.parametrize(
    ("begin", "zone", "prune_at", "moments"),
    [
        (SPRING, "UTC", "02:30", ["03-28 02:30", "03-29 02:30"]),
        (AUTUMN, "UTC", "02:30", ["10-31 02:30", "11-01 02:30"]),
        (SPRING, "Europe/Berlin", "04:15", ["03-28 02:15", "03-29 02:15"]),
        (AUTUMN, "Europe/Berlin", "04:15", ["10-31 03:15", "11-01 03:15"]),
        (SPRING, "Europe/Berlin", "02:30", ["03-28 01:30", "03-29 00:30"]),  # 03:30 by the clock: that night has no 02:30
        (AUTUMN, "Europe/Berlin", "02:30", ["10-31 00:30", "11-01 01:30"]),  # the first of two
        (SPRING, "Europe/Berlin", "00:30", ["03-27 23:30", "03-28 22:30"]),  # the day after a night that is an hour short
        # clocks that go forward, and back, at midnight
        (datetime(2026, 9, 5, 12, tzinfo=UTC), "America/Santiago", "00:30", ["09-06 04:30", "09-07 03:30"]),
        (datetime(2027, 4, 3, 12, tzinfo=UTC), "America/Santiago", "23:30", ["04-04 02:30", "04-05 03:30"]),
        # a time that is put off beyond midnight: at 23:00 it is 00:00
        (datetime(2026, 3, 28, 12, tzinfo=UTC), "America/Scoresbysund", "23:30", ["03-29 01:30", "03-30 00:30"]),
    ],
)  # fmt: skip
def test_the_prune_of_a_night_in_which_clocks_change(
    at: Callable[[datetime], Night], begin: datetime, zone: str, prune_at: str, moments: list[str]
) -> None:
    """C53: the rule that is documented: UTC knows no such night; elsewhere a time that is left out comes as much later, of one that
    there is twice the first counts, and no day goes without."""
    night = at(begin)
    watched = Watched(night, Plan.make(REPAIRING, prune_at=prune_at, timezone=zone))
    night.pass_by(timedelta(hours=44), step=timedelta(minutes=5))
    assert [f"{moment:%m-%d %H:%M}" for moment in watched.came["prune"]] == moments


@pytest.mark.parametrize("zone", ["America/Santiago", "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia"])
def test_each_day_of_a_year_has_one_prune(zone: str) -> None:
    """C53: at every time of the day, in zones whose clocks change at midnight, by half an hour, or once by a whole day."""
    begin = datetime(2011, 1, 1, tzinfo=UTC)
    for minutes in range(0, 24 * 60, 30):
        daily, moments = Daily(time_of_day(*divmod(minutes, 60)), ZoneInfo(zone)), [begin]
        while moments[-1] < begin + timedelta(days=400):
            moments.append(daily.get_next_fire_time(moments[-1], moments[-1]).astimezone(UTC))
        assert {round(gap / 3600) for gap in gaps(moments[1:])} <= {23, 24, 25}


def test_a_workflow_that_is_started_at_a_nominal_time_is_started_once_in_a_doubled_hour(
    make_bench: MakeBench, at: Callable[[datetime], Night]
) -> None:
    """C53: the run id is made of the schedule's name and the time by the clock, as the documentation has it."""
    bench, night = make_bench(), at(AUTUMN)
    started = []

    def start() -> None:
        started.append(bench.send(run_id=f"nightly-{night.now.astimezone(BERLIN):%Y-%m-%dT%H:%M}").id)

    night.scheduler.add_job(start, "cron", hour=2, minute=30, timezone=BERLIN)
    night.pass_by(timedelta(hours=20), step=timedelta(minutes=5))
    assert started == ["nightly-2027-10-31T02:30"] * 2
    assert bench.engine.store.read(lambda tx: tx.all("SELECT COUNT(*) FROM {flow_runs}")) == [(1,)]


def test_retention_is_days_of_24_hours_whatever_a_night_does(make_bench: MakeBench) -> None:
    """C53, PRUNE-1: a run is kept for exactly so many times 86400 seconds."""
    bench = make_bench()
    run = bench.send()
    run.cancel()
    bench.advance(90 * 86_400 - 0.001)
    watched = Schedule(bench.engine, bench.sender, Plan.make(REPAIRING, timezone="Europe/Berlin"), tell=[].append)
    watched.prune()
    assert run.status == "cancelled"
    bench.advance(0.001)
    watched.prune()
    assert bench.engine.store.read(lambda tx: tx.all("SELECT id FROM {flow_runs}")) == []


def test_a_process_that_slept_does_one_pass_of_each_kind_when_it_wakes(at: Callable[[datetime], Night]) -> None:
    """LOOP-1: nine hundred were missed; then it goes on as before."""
    night = at(SPRING)
    watched = Watched(night, Plan.make(REPAIRING, timezone="Europe/Berlin"))
    night.sleep(timedelta(hours=60))
    assert {name: len(moments) for name, moments in watched.came.items()} == {"monitor": 1, "repair": 1, "prune": 1}
    night.pass_by(timedelta(minutes=10))
    assert len(watched.came["monitor"]) == 21


def test_a_clock_that_was_set_back_delays_a_pass_by_an_interval_at_most(at: Callable[[datetime], Night]) -> None:
    """C52: as soon as it is noticed, the intervals begin anew; APScheduler by itself would be silent for those two hours."""
    night = at(SPRING)
    watched = Watched(night, Plan.make(REPAIRING))
    night.pass_by(timedelta(minutes=5))
    night.now -= timedelta(hours=2)
    before = len(watched.came["monitor"])
    night.pass_by(timedelta(minutes=5))
    assert len(watched.came["monitor"]) == before
    watched.add_to(night.scheduler)
    night.pass_by(timedelta(minutes=5))
    assert len(watched.came["monitor"]) == before + 10


# --- the process -------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workbench]]:
    """``serving(monitor_seconds=…)`` serves a plan in a thread, until the end of the test at the latest."""
    stop: queue.SimpleQueue[str] = queue.SimpleQueue()
    threads: list[threading.Thread] = []
    reasons: list[str] = []

    def serve(**options: Any) -> Workbench:
        bench = make_bench()
        plan = Plan.make(REPAIRING, **{"monitor_seconds": 0.1, "repair_seconds": 0.1, **options})
        schedule = Schedule(bench.engine, bench.sender, plan)
        threads.append(threading.Thread(target=lambda: reasons.append(schedule.serve(stop))))
        threads[0].start()
        return bench

    yield serve
    stop.put("enough")
    threads[0].join(20)
    assert reasons == ["enough"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("APScheduler", "ThreadPoolExecutor"))]


def test_bad_passes_end_nothing(serving: Callable[..., Workbench], monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOP-1, C41: a store that is away, a connection that drops, a fault; the doctor comes all the same, and the monitor comes again."""
    came = threading.Semaphore(0)
    errors = [StoreError("the server is away"), ConnectionError("dropped"), ZeroDivisionError("a fault")]

    def come(*_: Any, **__: Any) -> Any:
        came.release()
        raise errors[came._value % 3]

    monkeypatch.setattr(schedules, "monitor_in_turn", come)
    counted = "SELECT number FROM {passes} WHERE name = 'repair'"
    with structlog.testing.capture_logs() as logs:
        bench = serving()
        for _ in range(4):
            assert came.acquire(timeout=20)
        eventually(lambda: bench.engine.store.read(lambda tx: tx.one(counted)))
        eventually(lambda: {entry["error"].partition(":")[0] for entry in logs} == {type(error).__name__ for error in errors})
    assert {entry["event"] for entry in logs} == {"sweep_failed"}


@pytest.mark.parametrize("fails", [False, True])
def test_no_pass_leaves_a_connection_behind(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """C59: a scheduler's threads come and go, and a connection that idles for an interval may be a dead one."""
    bench = make_bench()
    closed: list[str] = []
    monkeypatch.setattr(bench.engine.store, "close_thread", lambda: closed.append(threading.current_thread().name))
    if fails:
        monkeypatch.setattr(schedules, "monitor_in_turn", lambda *_, **__: 1 / 0)
    Schedule(bench.engine, bench.sender, Plan.make(REPAIRING)).monitor()
    assert closed == [threading.current_thread().name]


def test_the_process_notices_a_clock_that_was_set_back_and_no_other(
    serving: Callable[..., Workbench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C52: forward, which a sleep looks like, needs nothing."""
    offset, looks = [0], threading.Semaphore(0)
    plain, added = Schedule.add_to, threading.Semaphore(0)

    class Clock:
        def now(self) -> int:
            looks.release()
            return int(schedules.time.monotonic() * 1000) + offset[0]

    def add_to(self: Schedule, scheduler: Any) -> None:
        plain(self, scheduler)
        added.release()

    monkeypatch.setattr(schedules, "SystemClock", Clock)
    monkeypatch.setattr(schedules, "LOOK", 0.01)
    monkeypatch.setattr(Schedule, "add_to", add_to)
    serving(monitor_seconds=3600, repair_seconds=3600)
    assert added.acquire(timeout=20)
    for step, noticed in ((0, False), (7_200_000, False), (-7_200_000, True), (500, False), (-900, False)):
        offset[0] += step
        while looks.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looks.acquire(timeout=20)
        assert added.acquire(blocking=False) is noticed
    assert not added.acquire(blocking=False)


def test_a_prune_under_way_ends_with_the_process_and_not_with_the_last_old_run(
    serving: Callable[..., Workbench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orderly stop does not wait for a million runs: a prune looks between slices."""
    slices = threading.Semaphore(0)

    def endless(*_: Any, limit: int, **__: Any) -> Any:
        slices.release()
        return SimpleNamespace(pruned=limit)

    monkeypatch.setattr(schedules, "prune", endless)
    monkeypatch.setattr(Schedule, "monitor", Schedule.prune)
    serving()
    for _ in range(3):
        assert slices.acquire(timeout=20)
