"""Leases of worker processes: who takes over from whom, and when (RECLAIM-5).

Benches keep a heartbeat that beats when the test says so, on a clock that moves when the test says so; a worker is dead once nobody
beats for it. The lease is a minute long.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import liveness, undoing
from dramatiq_saga.engine.claim import Claim, ClaimAttempt, Lost
from dramatiq_saga.errors import StoreError
from dramatiq_saga.events import ActionStarted, subscribe, unsubscribe
from dramatiq_saga.recovery import doctor
from dramatiq_saga.recovery.heartbeat import FORGOTTEN_MS, Heartbeat
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.sweep import LONG_RUNNING_MS, never_reclaimed
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import Doorstep, at_first_step, blocked
from tests.support.bench import Background, Bench
from tests.support.stores import all_waiting
from tests.support.waiting import eventually

on_one_machine = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
every_database = pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)

LEASES = Settings.from_mapping({"reclaim.dead_workers.enabled": True, "repair.enabled": True})


def alive(
    make: MakeBench, settings: Settings = LEASES, *, uptime: ManualClock | None = None, new: bool = False, **options: Any
) -> tuple[Bench, Heartbeat]:
    """A worker that has just been heard from, and has been here for long enough to judge the others, unless it is ``new``.

    Where clocks are set, ``uptime`` is the one that nobody sets.
    """
    worker = make(settings=settings, **options)
    heart = Heartbeat(worker.engine, monotonic=None if uptime is None else uptime.now)
    heart.enter()
    if not new:
        heart._judges = 0
    return worker, heart


def claim(worker: Bench, message: Any) -> Claim | Lost:
    """What a delivery finds that claims this, and does nothing more; each is another one."""
    job = Delivery(message).job
    assert job is not None
    return ClaimAttempt(worker.engine, job, nonce=secrets.token_hex(4)).run()


def claimed(worker: Bench) -> tuple[str, Any]:
    """A run whose first step this worker is at: its id, and the message of the step."""
    run, message = at_first_step(worker)
    assert isinstance(claim(worker, message), Claim)
    return run, message


def free_at(worker: Bench, message: Any) -> int | None:
    """The moment for which a delivery that loses its claim is put back (CLAIM-2)."""
    lost = claim(worker, message)
    assert isinstance(lost, Lost)
    return lost.retry_at


def undoing_step(worker: Bench) -> tuple[str, Any]:
    """A run whose only finished step is being undone: its id, and the message of the undo."""
    run, message = at_first_step(worker)
    worker.deliver(message)
    worker.sender.queue.clear()
    worker.compensate(run)
    return run, worker.message(worker.take())


def workers(worker: Bench) -> list[str]:
    return [row[0] for row in worker.all("SELECT id FROM {workers}")]


# --- the claim -------------------------------------------------------------------------------------------------------


@every_database
@pytest.mark.parametrize("begin", [at_first_step, undoing_step], ids=["step", "undo"])
def test_a_row_is_claimable_once_its_worker_has_been_silent_for_the_lease(
    bench: MakeBench, shop: Shop, clock: ManualClock, begin: Callable[[Bench], tuple[str, Any]]
) -> None:
    """RECLAIM-5, CLAIM-2: not before; whoever loses until then is told the earliest moment at which it may be."""
    first, _ = alive(bench)
    second, heart = alive(bench)
    _, message = begin(first)
    before = len(shop.ran)
    assert isinstance(claim(first, message), Claim)
    clock.advance(30)
    heart.beat()
    clock.advance(29.999)
    assert free_at(second, message) == clock.now() + 1
    clock.advance(0.001)
    assert second.deliver(message).state == "done"
    assert len(shop.ran) == before + 1


@pytest.mark.parametrize("begin", [at_first_step, undoing_step], ids=["step", "undo"])
def test_a_body_whose_row_was_taken_over_is_told_that_nobody_wants_it_any_more(
    bench: MakeBench, clock: ManualClock, begin: Callable[[Bench], tuple[str, Any]]
) -> None:
    """API, ``current_step().cancelled``."""
    first, _ = alive(bench)
    _, message = begin(first)
    mine = claim(first, message)
    assert isinstance(mine, Claim)
    step = first.runner._step(mine)
    assert not step.cancelled
    clock.advance(60)
    second, _ = alive(bench)
    assert isinstance(claim(second, message), Claim)
    assert step.cancelled


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
def test_a_heart_beats_while_all_writers_of_its_process_wait_for_a_locked_run(bench: MakeBench) -> None:
    """RECLAIM-5: a host's long transaction that has signalled a run, say; its worker would be taken for dead in the middle of a step."""
    worker, heart = alive(bench, clock=None)
    other, _ = alive(bench, clock=None)
    seen = "SELECT seen_at FROM {workers} WHERE id = ?"
    before = other.one(seen, heart.id)
    assert before is not None
    with all_waiting(worker.store, other.store):
        worker.store.clock.correction._due_at = 0  # type: ignore[attr-defined]  # a beat may have to ask for the time first
        eventually(lambda: worker.engine.now() > before[0])
        Background(heart.beat).result()
        Background(heart.forget).result()
        assert other.one(seen, heart.id) == (heart._seen,)
        assert heart._seen > before[0]
        assert heart.lapses == 0


@every_database
def test_a_worker_that_is_heard_from_keeps_its_row(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-5: for as long as it beats, however long its step takes; no deadline of the row's own is needed."""
    first, heart = alive(bench)
    second, other = alive(bench)
    run, message = claimed(first)
    for _ in range(5):
        clock.advance(40)
        heart.beat()
        other.beat()
        assert free_at(second, message) == clock.now() + 60_000
    assert first.step(run) == ("running", 1)
    assert shop.ran == []


def test_a_row_of_a_worker_whose_heartbeat_row_has_vanished_is_claimable_at_once(bench: MakeBench, shop: Shop) -> None:
    """RECLAIM-5: a vanished heartbeat row counts as not heard from."""
    first, heart = alive(bench)
    second, _ = alive(bench)
    run, message = claimed(first)
    first.store.write(lambda tx: tx.run("DELETE FROM {workers} WHERE id = ?", (heart.id,)))
    second.deliver(message)
    assert first.step(run) == ("completed", 2)


@pytest.mark.parametrize("way", ["no heartbeat", "inline", "a forked child"])
def test_a_claim_without_a_heartbeat_of_its_own_is_never_judged(
    bench: MakeBench, shop: Shop, clock: ManualClock, way: str
) -> None:
    """RECLAIM-5, SYNC-1: run_sync, a worker with the setting off and a fork keep none, and so nobody can say that they are dead."""
    first = bench(settings=LEASES)
    if way != "no heartbeat":
        Heartbeat(first.engine).enter()
    if way == "a forked child":
        assert first.engine.heart is not None
        first.engine.heart.pid = os.getppid()
    run, message = at_first_step(first)
    job = Delivery(message).job
    assert job is not None
    assert isinstance(ClaimAttempt(first.engine, job, nonce="here", inline=way == "inline").run(), Claim)
    clock.advance(1_000_000)
    second, _ = alive(bench)
    assert free_at(second, message) is None
    assert doctor.repair(second.engine, second.sender).repaired == 0
    assert never_reclaimed(second.engine) == 1
    assert first.step(run) == ("running", 1)


def test_with_the_setting_off_a_dead_workers_row_is_left_alone(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-1, RECLAIM-5: off by default, also for what was claimed while it was on."""
    first, _ = alive(bench)
    second = bench(settings=Settings.from_mapping({"repair.enabled": True}))
    run, message = claimed(first)
    clock.advance(1_000_000)
    assert free_at(second, message) is None
    assert doctor.repair(second.engine, second.sender).repaired == 0
    assert second.step(run) == ("running", 1)


def test_a_deadline_that_comes_before_the_end_of_the_lease_counts(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-1, RECLAIM-5: each dial for itself; the earlier moment is the one to come back at."""
    settings = Settings.from_mapping(
        {"actions": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 10}}}}, base=LEASES
    )
    first, heart = alive(bench, settings)
    second, _ = alive(bench, settings)
    _, message = claimed(first)
    clock.advance(1)
    heart.beat()
    assert free_at(second, message) == clock.now() + 9_000


def test_a_dead_workers_row_that_the_run_no_longer_wants_is_not_waited_for(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """CLAIM-2: its message is not put back again and again for a run that goes backwards."""
    first, _ = alive(bench)
    run, message = claimed(first)
    clock.advance(61)
    second, _ = alive(bench)
    second.store.write(
        lambda tx: tx.run(
            "UPDATE {flow_runs} SET status = 'rolling_back', rollback = 'running', ends_as = 'failed' WHERE id = ?", (run,)
        )
    )
    assert free_at(second, message) is None


def test_taking_over_counts_as_a_claim(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-6: a step that kills its workers ends, whatever says that they are dead."""
    settings = Settings.from_mapping({"reclaim.max_claims": 2}, base=LEASES)
    first, _ = alive(bench, settings)
    run, message = at_first_step(first)
    for _ in range(2):
        assert isinstance(claim(first, message), Claim)
        clock.advance(61)
        first, _ = alive(bench, settings)
    first.deliver(message)
    assert first.step(run) == ("failed", 3)
    assert shop.ran == []


# --- a worker that only looked dead ----------------------------------------------------------------------------------


@every_database
def test_a_worker_that_stalls_in_its_body_is_fenced(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-5, FENCE-1: another one has taken over; what the first brings is refused, and its heartbeat changes nothing."""
    first, heart = alive(bench)
    run, message = at_first_step(first)
    door = Doorstep()
    shop.bodies["charge"] = door
    slow = Background(lambda: first.deliver(message))
    door.wait()
    clock.advance(60)
    second, _ = alive(bench)
    shop.bodies["charge"] = lambda order: "of the second"
    second.deliver(message)
    heart.beat()
    door.succeed("of the first")
    slow.result()
    assert first.step(run) == ("completed", 2)
    assert first.codes() == ["outcome_rejected"]
    assert shop.count("charge") == 2
    assert heart.lapses == 1


@pytest.mark.parametrize("beaten", [False, True], ids=["still silent", "has beaten again"])
@pytest.mark.parametrize("taken_over", [False, True])
def test_a_worker_that_stalls_beyond_its_lease_before_the_body_claims_again(
    bench: MakeBench, shop: Shop, clock: ManualClock, beaten: bool, taken_over: bool
) -> None:
    """RECLAIM-5, CLAIM-1: a body does not begin on a claim that another worker may have taken over meanwhile."""
    first, heart = alive(bench)
    run, message = at_first_step(first)
    stalled: list[int] = []

    def stall(event: ActionStarted) -> None:
        if not stalled:  # listeners run between the claim and the body
            stalled.append(event.action.attempts)
            clock.advance(61)
            if taken_over:
                alive(bench)[0].deliver(message)
            if beaten:
                heart.beat()

    subscribe(stall, ActionStarted)
    try:
        first.deliver(message)
    finally:
        unsubscribe(stall)
    assert shop.order() == ["charge"]
    assert first.step(run) == ("completed", 2 if taken_over else 1)
    assert heart.lapses == 1


@on_one_machine
def test_a_worker_whose_row_has_vanished_before_the_body_claims_again(bench: MakeBench, shop: Shop) -> None:
    """RECLAIM-5, C10: the row was deleted, another worker took the step over, and the first one has beaten since."""
    first, heart = alive(bench)
    second, _ = alive(bench)
    run, message = at_first_step(first)
    vanished: list[int] = []

    def vanish(event: ActionStarted) -> None:
        if not vanished:
            vanished.append(event.action.attempts)
            first.store.write(lambda tx: tx.run("DELETE FROM {workers} WHERE id = ?", (heart.id,)))
            second.deliver(message)
            heart.beat()

    subscribe(vanish, ActionStarted)
    try:
        first.deliver(message)
    finally:
        unsubscribe(vanish)
    assert shop.order() == ["charge"]
    assert first.step(run) == ("completed", 2)


def test_a_worker_that_has_been_silent_beats_before_it_claims(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-5: a claim under an old row could be taken over the moment it is made."""
    first, heart = alive(bench)
    second, _ = alive(bench)
    _, message = at_first_step(first)
    clock.advance(3600)
    door = Doorstep()
    shop.bodies["charge"] = door
    slow = Background(lambda: first.deliver(message))
    door.wait()
    assert isinstance(claim(second, message), Lost)
    door.succeed("paid")
    slow.result()
    assert heart.lapses == 1


@every_database
def test_a_worker_that_was_cut_off_itself_takes_nobody_for_dead_yet(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-5: a database that could not be reached for longer than the lease has not killed the workers; who is back first gives
    the others one lease, and then judges them."""
    first, _ = alive(bench)
    second, heart = alive(bench)
    run, message = claimed(first)
    clock.advance(3600)
    heart.beat()
    assert free_at(second, message) == clock.now() + 60_000
    assert doctor.repair(second.engine, second.sender).reclaims == 0
    for _ in range(2):
        clock.advance(30)
        heart.beat()
    second.deliver(message)
    assert first.step(run) == ("completed", 2)


@on_one_machine
def test_a_worker_that_has_just_started_gives_the_others_time_for_a_beat(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """RECLAIM-5: after an outage of the database, a new worker may be back before those that have lived through it."""
    first, heart = alive(bench)
    run, message = claimed(first)
    clock.advance(3600)
    second, other = alive(bench, new=True)
    assert free_at(second, message) == clock.now() + 15_000
    clock.advance(14)
    heart.beat()
    clock.advance(1)
    other.beat()
    assert isinstance(claim(second, message), Lost)
    for _ in range(2):
        clock.advance(30)
        other.beat()
    second.deliver(message)
    assert first.step(run) == ("completed", 2)


def test_a_beat_that_commits_late_is_a_lapse(bench: MakeBench, clock: ManualClock) -> None:
    """RECLAIM-5: until it had committed, others saw the moment before."""
    worker, heart = alive(bench)
    clock.advance(20)
    worker.overtake("beat", lambda: clock.advance(45))
    heart.beat()
    assert heart.lapses == 1
    assert worker.one("SELECT seen_at FROM {workers}") == (clock.now() - 45_000,)


# --- the machine's clock is set --------------------------------------------------------------------------------------


class Time:
    """A machine's two clocks."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.uptime = clock, ManualClock(0)

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.uptime.advance(seconds)


@on_one_machine
def test_a_dead_workers_row_that_a_clock_set_back_has_put_into_the_future_grows_old_all_the_same(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """C52, RECLAIM-5: two hours back; its step is taken over one lease after the next beat of another worker, not in two hours."""
    time = Time(clock)
    first, _ = alive(bench, uptime=time.uptime)
    second, heart = alive(bench, uptime=time.uptime)
    run, message = claimed(first)
    clock.advance(-7200)
    time.passes(15)
    heart.beat()
    assert free_at(second, message) == clock.now() + 60_000
    for _ in range(2):
        time.passes(30)
        heart.beat()
    second.deliver(message)
    assert first.step(run) == ("completed", 2)
    assert (heart.lapses, shop.count("charge")) == (0, 1)


@on_one_machine
@pytest.mark.parametrize("back", [False, True], ids=["forward", "forward and back"])
def test_a_clock_set_forward_takes_no_step_from_a_living_worker(
    bench: MakeBench, shop: Shop, clock: ManualClock, back: bool
) -> None:
    """C52, RECLAIM-5: whoever beats first has not heard from the others for two hours, and waits one lease, by the clock that nobody
    sets; then a worker that has died meanwhile is taken for dead."""
    time = Time(clock)
    first, heart = alive(bench, uptime=time.uptime)
    second, other = alive(bench, uptime=time.uptime)
    run, message = claimed(first)
    clock.advance(7200)
    assert isinstance(claim(second, message), Lost)  # the clock was set between its look at the heartbeat and its claim
    other.freshen()
    assert free_at(second, message) == clock.now() + 60_000
    heart.beat()
    if back:
        clock.advance(-7200)
        time.passes(15)
        other.beat()
    assert isinstance(claim(second, message), Lost)
    for _ in range(2):
        time.passes(30)
        other.beat()
    second.deliver(message)
    assert first.step(run) == ("completed", 2)
    assert (heart.lapses, other.lapses) == (1, 1)


@on_one_machine
def test_a_worker_that_stalls_while_the_clock_is_set_back_knows_of_it(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """C52, RECLAIM-5: its row says that it was seen in two hours, and was brought to the present by another, a lease ago."""
    time = Time(clock)
    first, heart = alive(bench, uptime=time.uptime)
    run, message = at_first_step(first)
    stalled: list[int] = []

    def stall(event: ActionStarted) -> None:
        if not stalled:
            stalled.append(event.action.attempts)
            clock.advance(-7200)
            _, other = alive(bench, uptime=time.uptime)
            for _ in range(2):
                time.passes(31)
                other.beat()
            bench_of_other = bench(settings=LEASES)
            bench_of_other.deliver(message)

    subscribe(stall, ActionStarted)
    try:
        first.deliver(message)
    finally:
        unsubscribe(stall)
    assert shop.order() == ["charge"]
    assert first.step(run) == ("completed", 2)
    assert heart.lapses == 1


# --- the heartbeat's row ---------------------------------------------------------------------------------------------


@every_database
def test_an_orderly_stop_deletes_its_own_row(bench: MakeBench, clock: ManualClock) -> None:
    """RECLAIM-5: and what is claimed afterwards is not claimed under it."""
    worker, heart = alive(bench)
    other, staying = alive(bench)
    assert heart.leave()
    assert workers(worker) == [staying.id]
    run, _ = claimed(worker)
    assert other.one("SELECT worker_id FROM {action_runs} WHERE run_id = ?", run) == (worker.engine.worker_id,)


@pytest.mark.parametrize("begin", [at_first_step, undoing_step], ids=["step", "undo"])
def test_a_row_that_a_claim_rests_on_is_left_to_its_lease(
    bench: MakeBench, shop: Shop, clock: ManualClock, begin: Callable[[Bench], tuple[str, Any]]
) -> None:
    """RECLAIM-5: a body that has outlived the worker's patience may still report."""
    worker, heart = alive(bench)
    _, message = begin(worker)
    assert isinstance(claim(worker, message), Claim)
    assert not heart.leave()
    assert workers(worker) == [heart.id]
    assert isinstance(claim(worker, message), Lost)


@on_one_machine
def test_a_fork_that_stops_a_worker_leaves_the_heartbeat_of_its_parent(bench: MakeBench) -> None:
    """RECLAIM-5: it has inherited the object, and not the thread that beats."""
    worker, heart = alive(bench)
    heart.pid = os.getppid()
    assert not heart.leave()
    assert workers(worker) == [heart.id]


def test_a_heartbeat_row_that_is_gone_comes_back_with_the_next_beat(bench: MakeBench) -> None:
    worker, heart = alive(bench)
    worker.store.write(lambda tx: tx.run("DELETE FROM {workers}"))
    heart.beat()
    assert workers(worker) == [heart.id]


def test_the_rows_of_dead_workers_are_forgotten_after_a_day(bench: MakeBench, clock: ManualClock) -> None:
    worker, _ = alive(bench)
    clock.advance(FORGOTTEN_MS / 1000 - 1)
    _, heart = alive(bench)
    assert heart.forget() == 0
    clock.advance(1)
    assert heart.forget() == 1
    assert workers(worker) == [heart.id]


@on_one_machine
def test_a_worker_that_was_silent_for_a_day_forgets_nobody_yet(bench: MakeBench, clock: ManualClock) -> None:
    """RECLAIM-5: a machine that was suspended; the row of one that lives, gone, would give its steps away at once."""
    worker, heart = alive(bench)
    _, other = alive(bench)
    clock.advance(2 * FORGOTTEN_MS / 1000)
    assert heart.forget() == 0
    heart.beat()
    assert heart.forget() == 0
    other.beat()
    for _ in range(2):
        clock.advance(30)
        heart.beat()
    assert heart.forget() == 0
    assert sorted(workers(worker)) == sorted([heart.id, other.id])


def test_every_start_has_an_id_of_its_own(bench: MakeBench) -> None:
    """RECLAIM-5: a restarted container has the host and the process id of the one that died in it."""
    worker, heart = alive(bench)
    first = heart.id
    heart.leave()
    heart.enter()
    assert heart.id != first
    assert len(heart.id) <= 64
    assert liveness.is_watched(heart.id)
    assert not liveness.is_watched(worker.engine.worker_id)


def test_a_heartbeat_survives_a_store_that_refuses(bench: MakeBench) -> None:
    worker = bench(settings=Settings.from_mapping({"reclaim.dead_workers.lease_seconds": 1}, base=LEASES))
    heart = Heartbeat(worker.engine)
    worker.fail("beat", happened=False, unknown=False)
    with pytest.raises(StoreError):
        heart.start("a worker")
    assert worker.engine.heart is None
    heart.start("a worker")
    try:
        worker.fail("beat", happened=False, unknown=False)
        reached = worker.stop("beat")
        reached.wait_reached()
        reached.go()
        again = worker.stop("beat")
        again.wait_reached()
        again.go()
    finally:
        heart.stop("a worker")
    assert workers(worker) == []


def test_a_worker_that_starts_while_the_last_one_stops_keeps_its_heartbeat(bench: MakeBench) -> None:
    """RECLAIM-5: in one process; without it, whatever that worker claims is left to its own reclaim deadline."""
    worker, leaving, go = bench(settings=LEASES), threading.Event(), threading.Event()

    class Slow(Heartbeat):
        def end(self) -> None:
            leaving.set()
            assert go.wait(20)
            super().end()

    heart = Slow(worker.engine)
    heart.start("the last")
    stopping = Background(lambda: heart.stop("the last"))
    assert leaving.wait(20)
    starting = Background(lambda: heart.start("a worker"))
    eventually(lambda: heart._lock.locked() or not starting.running, because="the start waits, or is over")
    go.set()
    stopping.result()
    starting.result()
    try:
        assert worker.engine.heart is heart
        assert workers(worker) == [heart.id]
    finally:
        heart.stop("a worker")


def test_a_long_outage_is_told_ever_more_rarely(bench: MakeBench) -> None:
    heart = Heartbeat(bench().engine)
    with capture_logs() as said:
        for failures in range(1, 101):
            assert heart.failed(OSError("away"), failures) <= 1
    assert [line["failures"] for line in said] == [1, 2, 4, 8, 16, 32, 64]


# --- the doctor, a kick, what is counted -----------------------------------------------------------------------------


@every_database
@pytest.mark.parametrize("begin", [at_first_step, undoing_step], ids=["step", "undo"])
def test_the_doctor_sends_a_dead_workers_row_again(
    bench: MakeBench, shop: Shop, clock: ManualClock, begin: Callable[[Bench], tuple[str, Any]]
) -> None:
    """R3 of DOCTOR-1, RECLAIM-5: its message is lost as well, and the claim decides."""
    first, _ = alive(bench)
    run, message = begin(first)
    before = len(shop.ran)
    assert isinstance(claim(first, message), Claim)
    clock.advance(59)
    assert doctor.repair(first.engine, first.sender).reclaims == 0
    clock.advance(1)
    second, _ = alive(bench)
    assert doctor.candidates(second.engine)["R3"] == 1
    assert doctor.repair(second.engine, second.sender).reclaims == 1
    assert len(second.messages) == 1
    second.run()
    assert len(shop.ran) > before
    assert first.status(run) in ("completed", "cancelled")


def test_a_row_past_both_its_deadline_and_its_lease_is_counted_once(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """R3 of DOCTOR-1."""
    settings = Settings.from_mapping(
        {"actions": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 10}}}}, base=LEASES
    )
    first, _ = alive(bench, settings)
    claimed(first)
    clock.advance(61)
    assert doctor.candidates(first.engine)["R3"] == 1
    assert doctor.repair(first.engine, first.sender).reclaims == 1


def test_a_kick_sends_a_dead_workers_row_and_leaves_a_living_ones(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """KICK-1, RECLAIM-5."""
    first, _ = alive(bench)
    run, _ = claimed(first)
    (left,) = kick(first.engine, run, first.sender).left
    assert left.left == "it is running, and its worker has been heard from within the lease"
    clock.advance(60)
    second, _ = alive(bench)
    second.sender.queue.clear()
    assert [row.sequence for row in kick(second.engine, run, second.sender).sent] == [1]
    second.run()
    assert second.status(run) == "completed"


def test_a_row_with_a_lease_behind_it_is_not_counted_as_never_reclaimed(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """RECLAIM-4, RECLAIM-5: its worker's death is enough for it to come back."""
    first, _ = alive(bench)
    claimed(first)
    clock.advance(LONG_RUNNING_MS / 1000)
    assert never_reclaimed(first.engine) == 0
    assert never_reclaimed(bench().engine) == 1


def test_a_callback_ends_an_undo_that_no_lease_stands_behind(bench: MakeBench, shop: Shop) -> None:
    """PAR-3, COMP-4: leases are on, and the undo was claimed by a process that keeps no heartbeat."""
    worker = bench(settings=LEASES)
    run, message = undoing_step(worker)
    assert isinstance(claim(worker, message), Claim)
    (level,) = worker.one("SELECT level FROM {compensation_runs} WHERE run_id = ?", run) or ()
    undoing.level_closed(worker.engine, run, level, worker.sender)
    assert worker.one("SELECT rollback FROM {flow_runs} WHERE id = ?", run) == ("halted",)


# --- the undo of a step that was at work (COMP-9) ----------------------------------------------------------------------


def fenced(worker: Bench, *, window: int | None = None) -> tuple[str, Any]:
    """A run whose first step says nothing of how long it may take, or only its ``window``: its id, and the step's message."""
    run, message = at_first_step(worker, "careful")
    worker.store.write(
        lambda tx: tx.run("UPDATE {action_runs} SET reclaim_stale_after_seconds = ? WHERE run_id = ?", (window, run))
    )
    worker.broker.actors["charge"].options["time_limit"] = float("inf")
    return run, message


@every_database
def test_an_undo_waits_for_as_long_as_the_worker_of_its_step_is_heard_from(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """COMP-9, RECLAIM-5: no refund before the charge, however long that takes; its report lets the undo go at once."""
    worker, heart = alive(bench)
    operator, other = alive(bench)
    body = shop.bodies["charge"] = Doorstep()
    run, message = fenced(worker)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    assert operator.compensate(run)
    refund = operator.message(operator.take())
    for _ in range(30):
        clock.advance(40)
        heart.beat()
        other.beat()
        lost = claim(operator, refund)
        assert isinstance(lost, Lost)
        assert (lost.status, lost.attempts) == ("pending", 0)
        assert clock.now() < (lost.retry_at or 0) <= clock.now() + 60_000
    body.succeed("charged")
    working.result()
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.undo(run) == ("completed", 1)
    assert operator.status(run) == "cancelled"
    assert operator.events(run).count("compensation.step_started") == 1


@every_database
@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_undo_goes_once_the_worker_of_its_step_is_dead(
    bench: MakeBench, shop: Shop, clock: ManualClock, when: str, window: int | None
) -> None:
    """COMP-9, RECLAIM-5: when its lease is over, before the rollback is planned or after that; the longer window is not waited for."""
    worker, heart = alive(bench)
    operator, other = alive(bench)
    run, message = fenced(worker, window=window)
    assert isinstance(claim(worker, message), Claim)
    if when == "before":
        clock.advance(60)
        other._judges = 0
        other.beat()
        other._judges = 0
        assert operator.compensate(run)
        operator.run()
    else:
        assert operator.compensate(run)
        refund = operator.message(operator.take())
        clock.advance(50)
        heart.beat()  # its last
        other.beat()
        clock.advance(10)
        lost = claim(operator, refund)
        assert isinstance(lost, Lost)
        assert lost.retry_at == clock.now() + 50_000
        clock.advance(49.999)
        other.beat()
        other._judges = 0
        assert isinstance(claim(operator, refund), Lost)
        clock.advance(0.001)
        operator.deliver(refund)
    assert shop.order() == ["refund"]
    assert operator.status(run) == "cancelled"


@pytest.mark.parametrize("why", ["cut off", "clock set forward"])
def test_a_rollback_that_is_planned_where_nobody_is_heard_from_takes_no_living_worker_for_dead(
    bench: MakeBench, shop: Shop, clock: ManualClock, why: str
) -> None:
    """COMP-9, RECLAIM-5, C52: an operator, who keeps no heartbeat, finds the charge's row old; the refund's claim knows better, and waits."""
    time = Time(clock)
    worker, heart = alive(bench, uptime=time.uptime)
    second, _ = alive(bench, uptime=time.uptime)
    operator = bench(settings=LEASES)
    body = shop.bodies["charge"] = Doorstep()
    run, message = fenced(worker)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    if why == "cut off":
        time.passes(61)
    else:
        clock.advance(3600)
    assert operator.compensate(run)
    refund = second.message(operator.take())
    assert second.deliver(refund).claim is None
    assert second.undo(run) == ("pending", 0)
    heart.beat()
    body.succeed("charged")
    working.result()
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.status(run) == "cancelled"


def test_an_undo_does_not_wait_longer_than_the_window_of_its_step(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """COMP-9, RECLAIM-5: a claim that has gone stale holds nobody, be its worker heard from or not."""
    worker, heart = alive(bench)
    run, message = fenced(worker, window=90)
    assert isinstance(claim(worker, message), Claim)
    assert worker.compensate(run)
    refund = worker.message(worker.take())
    for seconds in (60, 29.999):
        clock.advance(seconds)
        heart.beat()
        heart._judges = 0
        lost = claim(worker, refund)
        assert isinstance(lost, Lost)
        assert lost.retry_at == clock.now() + (30_000 if seconds == 60 else 1)
    clock.advance(0.001)
    worker.deliver(refund)
    assert shop.order() == ["refund"]


@pytest.mark.parametrize("leases", ["off", "turned off"])
def test_without_a_lease_an_undo_waits_ten_minutes_for_a_body_that_says_nothing(
    bench: MakeBench, shop: Shop, clock: ManualClock, leases: str
) -> None:
    """COMP-9: from when its rollback was planned; that is also what holds where leases were on then."""
    worker = bench() if leases == "off" else alive(bench)[0]
    run, message = fenced(worker)
    assert isinstance(claim(worker, message), Claim)
    assert worker.compensate(run)
    refund, later = worker.message(worker.take()), bench()
    ends = clock.now() + 600_000
    for seconds in (60, 539.999):
        clock.advance(seconds)
        lost = claim(later, refund)
        assert isinstance(lost, Lost)
        assert lost.retry_at == ends
    clock.advance(0.001)
    later.deliver(refund)
    assert shop.order() == ["refund"]


@every_database
@pytest.mark.parametrize("first", ["the claim", "the report"])
def test_a_body_that_reports_while_its_undo_is_held_back_lets_it_go(
    bench: MakeBench, shop: Shop, clock: ManualClock, first: str
) -> None:
    """COMP-9: both have found the undo waiting, the one for the worker, the other for the body; whichever writes first, it goes once."""
    worker, heart = alive(bench)
    operator, other = alive(bench)
    body = shop.bodies["charge"] = Doorstep()
    run, message = fenced(worker)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    assert operator.compensate(run)
    refund = operator.message(operator.take())
    clock.advance(59)
    heart.beat()
    other.beat()
    clock.advance(1)
    stop = worker.stop("body reported") if first == "the claim" else operator.stop("claim")
    early = None if first == "the claim" else Background(lambda: operator.deliver(refund))
    if early is not None:
        stop.wait_reached()
    body.succeed("charged")
    if early is None:
        stop.wait_reached()
        operator.deliver(refund)
        assert operator.undo(run) == ("pending", 0)
        stop.go()
        working.result()
    else:
        working.result()
        stop.go()
        early.result()
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.undo(run) == ("completed", 1)
    assert operator.status(run) == "cancelled"


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
def test_a_report_waits_for_a_claim_that_is_taken_back(
    bench: MakeBench, shop: Shop, clock: ManualClock, table_prefix: str
) -> None:
    """COMP-9, DRIVE-7: nobody sees the undo running in between; the report finds it waiting, and lets it go."""
    worker, heart = alive(bench)
    operator, other = alive(bench)
    body = shop.bodies["charge"] = Doorstep()
    run, message = fenced(worker)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    assert operator.compensate(run)
    refund = operator.message(operator.take())
    clock.advance(59)
    heart.beat()
    other.beat()
    clock.advance(1)
    release = worker.stop("body reported")
    stop = operator.stop("claim", where="inside", statement="SELECT a.worker_id")
    body.succeed("charged")
    release.wait_reached()
    early = Background(lambda: operator.deliver(refund))
    stop.wait_reached()
    assert worker.undo(run) == ("pending", 0)
    release.go()
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    early.result()
    working.result()
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert operator.undo(run) == ("completed", 1)
    assert operator.status(run) == "cancelled"


@every_database
def test_a_body_that_never_begins_keeps_no_undo_waiting(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """COMP-9, CLAIM-2: its worker stalls between claim and body, the run is rolled back, and the worker finds its claim lost."""
    worker, _ = alive(bench)
    operator, other = alive(bench)
    run, message = fenced(worker)

    def stall(event: ActionStarted) -> None:
        assert operator.compensate(run)
        assert operator.undo(run) == ("pending", 0)
        clock.advance(50)
        other.beat()

    subscribe(stall, ActionStarted)
    try:
        worker.deliver(message)
    finally:
        unsubscribe(stall)
    assert worker.codes() == ["claim_lost"]
    worker.run()
    assert shop.order() == ["refund"]
    assert worker.status(run) == "cancelled"


@every_database
def test_a_claim_of_another_delivery_that_is_lost_lets_no_undo_go(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """COMP-9: the body that the undo waits for is that of the claim that has landed, and it is at work."""
    worker, _ = alive(bench)
    operator, _ = alive(bench)
    body = shop.bodies["charge"] = Doorstep()
    run, message = fenced(worker)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    assert operator.compensate(run)
    refund = operator.message(operator.take())
    operator.deliver(operator.message_again(message))
    operator.deliver(refund)
    assert operator.codes() == ["claim_lost", "claim_lost"]
    assert operator.undo(run) == ("pending", 0)
    body.succeed("charged")
    working.result()
    worker.run()
    assert shop.order() == ["charge", "refund"]


@pytest.mark.parametrize("database_kind", ["mariadb"], indirect=True)
def test_a_claim_that_is_settled_before_it_is_read_back_keeps_no_undo_waiting(bench: MakeBench, shop: Shop) -> None:
    """COMP-9, CLAIM-3: it was committed, and the run rolled back before the worker had looked again; its body never begins."""
    worker, operator = bench(), bench()
    run, message = fenced(worker)
    stop = worker.stop("claim", where="after")
    claiming = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    assert operator.compensate(run)
    assert isinstance(claim(operator, operator.message(operator.take())), Lost)
    stop.go()
    claiming.result()
    assert worker.codes() == ["claim_lost"]
    worker.run()
    assert shop.order() == ["refund"]
    assert worker.status(run) == "cancelled"


def test_a_worker_that_stops_with_a_fenced_body_leaves_its_row(bench: MakeBench, shop: Shop) -> None:
    """COMP-9, RECLAIM-5: the body may still report; with the row gone its undo would begin at once."""
    worker, heart = alive(bench)
    body = shop.bodies["charge"] = Doorstep()
    run, message = fenced(worker)
    working = Background(lambda: worker.deliver(message))
    body.wait()
    assert worker.compensate(run)
    assert not heart.leave()
    assert workers(worker) == [heart.id]
    body.succeed("charged")
    working.result()
    assert heart.leave()
