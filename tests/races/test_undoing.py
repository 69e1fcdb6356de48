"""Rollbacks whose levels hold several undos, and rollbacks that go on after they had halted: who meets whom there.

The workflow books four things one after another and waits for a fifth. Its second and third step belong to one group, which is
undone side by side: so the levels are 4, then 3 and 2, then 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from dramatiq.middleware import Shutdown

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import undoing
from dramatiq_saga.engine.claim import ClaimAttempt
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import ConcurrentTransitionError, FlowNotFoundError
from dramatiq_saga.recovery.doctor import repair
from dramatiq_saga.recovery.heartbeat import Heartbeat
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench
from tests.races.test_interleavings import blocked
from tests.support.bench import Background, Bench
from tests.support.waiting import eventually

postgresql_only = pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
every_database = pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)

RECLAIM = Settings.from_mapping({"sagas": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 60}}}})


class Trip:
    """What was booked and undone. ``undoing[n]`` replaces the body of the undo of step ``n``."""

    def __init__(self) -> None:
        self.undone: list[int] = []
        self.undoing: dict[int, Callable[[], Any]] = {}
        self.policies: dict[int, str] = {}

    def declare(self, bench: Bench) -> None:
        def book(number: int) -> int:
            return number

        def undo(number: int) -> None:
            self.undone.append(number)
            self.undoing.get(number, lambda: None)()

        booking, cancelling = bench.actor(book), bench.actor(undo)

        def trip(flow: Any) -> None:
            for number in (1, 2, 3, 4):
                builder = flow.action(booking, number).compensate_with(cancelling, number)
                if number in self.policies:
                    builder.on_compensation_failure(self.policies[number])
                builder.run()
            flow.run(booking, 5)

        bench.workflow(trip)


@pytest.fixture
def shop() -> Trip:
    return Trip()


@pytest.fixture
def trip(shop: Trip) -> Trip:
    return shop


class Door:
    """A body that stands until it is told how to end."""

    def __init__(self) -> None:
        self._entered, self._leave = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def __call__(self) -> None:
        self._entered.set()
        assert self._leave.wait(20)
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        assert self._entered.wait(20)

    def open(self, error: BaseException | None = None) -> None:
        self._error = error
        self._leave.set()


def refuse() -> None:
    raise ValueError("they do not answer")


def booked(worker: Bench, *, group: tuple[int, ...] = (2, 3), run_id: str | None = None) -> str:
    """A run with four bookings done and the fifth to come; ``group`` is undone side by side."""
    run = worker.start("trip", run_id=run_id)
    for _ in range(5):
        worker.deliver(worker.take())
    worker.sender.queue.clear()  # the fifth is to be cancelled
    for sequence in group:
        worker.store.write(
            lambda tx, sequence=sequence: tx.run(
                "UPDATE {action_runs} SET comp_group = 100, comp_parallel = TRUE WHERE run_id = ? AND sequence = ?",
                (run, sequence),
            )
        )
    worker.engine.cache.drop(run)  # it does not know of that
    return run


def at_the_group(worker: Bench) -> tuple[str, dict[int, Any]]:
    """A run whose group is being undone: its id, and the messages of that level by sequence."""
    run = booked(worker)
    assert worker.compensate(run)
    worker.deliver(worker.take())
    return run, {outgoing.sequence: worker.message(worker.take()) for outgoing in worker.messages}


def give_up(worker: Bench, message: Any) -> None:
    """The undo fails and Dramatiq has no try left."""
    delivery = worker.deliver(message)
    assert delivery.state == "failed"
    worker.runner.give_up(delivery)


def states(worker: Bench, run: str) -> dict[int, str]:
    return dict(worker.all("SELECT sequence, status FROM {compensation_runs} WHERE run_id = ?", run))


def ended(worker: Bench, run: str) -> tuple[str, str]:
    row = worker.one("SELECT status, rollback FROM {flow_runs} WHERE id = ?", run)
    assert row is not None
    return row[0], row[1]


def rollback_error(worker: Bench, run: str) -> str | None:
    row = worker.one("SELECT rollback_error FROM {flow_runs} WHERE id = ?", run)
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


# --- levels of several rows ------------------------------------------------------------------------------------------


@every_database
def test_a_group_is_one_level_and_the_next_waits_for_all_of_it(bench: MakeBench, trip: Trip) -> None:
    """COMP-5, COMP-1: 4, then 3 and 2 together, then 1; each message is sent once."""
    worker = bench()
    run, level = at_the_group(worker)
    assert sorted(level) == [2, 3]
    assert worker.all("SELECT sequence, level FROM {compensation_runs} WHERE run_id = ? ORDER BY sequence", run) == [
        (1, 2), (2, 1), (3, 1), (4, 0),
    ]  # fmt: skip
    worker.deliver(level[2])
    assert worker.messages == []
    assert worker.undo(run, 1) == ("pending", 0)
    worker.deliver(level[3])
    assert [outgoing.sequence for outgoing in worker.messages] == [1]
    worker.run()
    assert trip.undone == [4, 2, 3, 1]
    assert ended(worker, run) == ("cancelled", "done")


@every_database
def test_two_undos_of_a_level_that_finish_at_once_send_the_next_level_once(bench: MakeBench, trip: Trip) -> None:
    """COMP-1, DRIVE-7: each was last seen by the other as still at work; the second to be recorded goes on, and only that one."""
    first, second = bench(), bench()
    run, level = at_the_group(first)
    stops = [first.stop("undo outcome"), second.stop("undo outcome")]
    finishing = [Background(lambda: first.deliver(level[3])), Background(lambda: second.deliver(level[2]))]
    for stop in stops:
        stop.wait_reached()
    for stop, background in zip(stops, finishing, strict=True):
        stop.go()
        background.result()
    assert first.messages == []
    assert [outgoing.sequence for outgoing in second.messages] == [1]
    second.run()
    assert trip.undone.count(1) == 1
    assert ended(first, run) == ("cancelled", "done")
    assert first.events(run).count("rollback.finished") == 1


@postgresql_only
def test_an_undo_waits_for_the_outcome_of_its_neighbour_and_goes_on_after_it(
    bench: MakeBench, trip: Trip, table_prefix: str
) -> None:
    """DRIVE-7, COMP-1: the neighbour's outcome stands in a transaction that has not committed; without the run's lock each would
    find the other at work, and nobody would go on."""
    first, second = bench(), bench()
    run, level = at_the_group(first)
    door = second.stop("undo outcome")
    late = Background(lambda: second.deliver(level[2]))
    door.wait_reached()
    stop = first.stop("undo outcome", where="inside", statement="UPDATE {compensation_runs}")
    early = Background(lambda: first.deliver(level[3]))
    stop.wait_reached()
    door.go()
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    early.result()
    late.result()
    assert [outgoing.sequence for outgoing in [*first.messages, *second.messages]] == [1]
    first.run()
    second.run()
    assert ended(first, run) == ("cancelled", "done")
    assert trip.undone.count(1) == 1


@postgresql_only
def test_a_resume_waits_for_a_late_outcome_and_finds_it(bench: MakeBench, trip: Trip, table_prefix: str) -> None:
    """COMP-8, FENCE-2, DRIVE-7: the straggler's report stands in a transaction that has not committed when the resume comes."""
    worker, operator = bench(), bench()
    run, level = at_the_group(worker)
    door = trip.undoing[2] = Door()
    slow = Background(lambda: worker.deliver(level[2]))
    door.wait()
    operator.deliver(level[3])
    undoing.level_closed(operator.engine, run, 1, operator.sender)
    stop = worker.stop("undo outcome", where="inside", statement="UPDATE {compensation_runs}")
    door.open()
    stop.wait_reached()
    resuming = Background(lambda: resume(operator, run))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    slow.result()
    assert resuming.result() is True
    assert worker.codes() == []
    operator.run()
    assert states(worker, run) == dict.fromkeys((1, 2, 3, 4), "completed")
    assert trip.undone.count(2) == 1


@every_database
def test_two_undos_of_the_last_level_that_finish_at_once_end_the_run_once(bench: MakeBench, trip: Trip) -> None:
    """COMP-1: the run's end is one transition."""
    first, second = bench(), bench()
    run = booked(first, group=(1, 2, 3, 4))
    assert first.compensate(run)
    messages = {outgoing.sequence: first.message(first.take()) for outgoing in first.messages}
    assert sorted(messages) == [1, 2, 3, 4]
    first.deliver(messages[4])
    first.deliver(messages[1])
    stops = [first.stop("undo outcome"), second.stop("undo outcome")]
    finishing = [Background(lambda: first.deliver(messages[3])), Background(lambda: second.deliver(messages[2]))]
    for stop in stops:
        stop.wait_reached()
    for stop, background in zip(stops, finishing, strict=True):
        stop.go()
        background.result()
    assert ended(first, run) == ("cancelled", "done")
    assert first.events(run).count("rollback.finished") == 1
    assert first.events(run).count("flow.cancelled") == 1


@every_database
def test_a_look_at_a_rollback_that_has_moved_on_looks_again(bench: MakeBench, trip: Trip) -> None:
    """COMP-1, DRIVE-3: a drive that saw nothing to send must not note as sent what has become due since, or it never goes out."""
    first, second, sweep = bench(), bench(), bench()
    run, level = at_the_group(first)
    looked = sweep.stop("advance")
    looking = Background(lambda: undoing.advance(sweep.engine, run, sweep.sender, None))
    looked.wait_reached()
    stop = second.stop("undo outcome")
    finishing = Background(lambda: second.deliver(level[2]))
    stop.wait_reached()  # it has seen 3 at work
    first.deliver(level[3])
    dies = second.stop("advance")
    stop.go()
    dies.wait_reached()  # recorded, and the next level is nobody's yet
    looked.go()
    looking.result()
    assert [outgoing.sequence for outgoing in sweep.messages] == [1]
    dies.go()
    finishing.result()
    assert second.messages == []
    sweep.run()
    assert trip.undone.count(1) == 1
    assert ended(sweep, run) == ("cancelled", "done")


@every_database
def test_one_undo_that_fails_halts_the_rollback_once_its_level_has_ended(bench: MakeBench, trip: Trip) -> None:
    """COMP-4: its neighbour is at work already, and is undone; what comes after the level is not."""
    trip.policies = {3: "continue"}
    trip.undoing[2] = refuse
    worker = bench()
    run, level = at_the_group(worker)
    give_up(worker, level[2])
    assert ended(worker, run) == ("rolling_back", "running")
    worker.deliver(level[3])
    assert ended(worker, run) == ("cancelled", "halted")
    assert states(worker, run) == {4: "completed", 3: "completed", 2: "failed", 1: "pending"}
    assert "undo of step 2 (undo): ValueError: they do not answer" in (rollback_error(worker, run) or "")


def test_undos_of_a_level_that_fail_under_continue_are_passed_over_and_all_named(bench: MakeBench, trip: Trip) -> None:
    """COMP-4, COMP-6, C26: with parallel rollback too."""
    trip.policies = {2: "continue", 3: "continue"}
    trip.undoing = {2: refuse, 3: refuse}
    worker = bench()
    run, level = at_the_group(worker)
    give_up(worker, level[3])
    give_up(worker, level[2])
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")
    error = rollback_error(worker, run) or ""
    assert "undo of step 2" in error
    assert "undo of step 3" in error
    assert trip.undone == [4, 3, 2, 1]


def test_the_doctor_sends_a_lost_undo_of_a_level_again_and_not_its_neighbours(
    bench: MakeBench, trip: Trip, clock: ManualClock
) -> None:
    """DOCTOR-1: R1 covers every row of a level."""
    worker = bench(settings=Settings.from_mapping({"repair": {"enabled": True}}))
    run, level = at_the_group(worker)
    door = trip.undoing[3] = Door()
    working = Background(lambda: worker.deliver(level[3]))
    door.wait()
    clock.advance(120)
    assert repair(worker.engine, worker.sender).compensations == 1
    assert [outgoing.sequence for outgoing in worker.messages] == [2]
    door.open()
    working.result()
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")


def test_an_undo_that_was_left_behind_does_not_hide_later_levels_from_the_doctor(
    bench: MakeBench, trip: Trip, clock: ManualClock
) -> None:
    """DOCTOR-1, KICK-1, PAR-3: its level is over although its row has no end."""
    trip.policies = {2: "continue", 3: "continue"}
    worker = bench(settings=Settings.from_mapping({"repair": {"enabled": True}}))
    run, level = at_the_group(worker)
    job = Delivery(level[2]).job
    assert job is not None
    ClaimAttempt(worker.engine, job, nonce="of a worker that died").run()
    worker.deliver(level[3])
    worker.deliver(level[2])  # delivered again: nothing will ever reclaim it
    assert [outgoing.sequence for outgoing in worker.messages] == [1]
    worker.sender.queue.clear()  # and the next level's message is lost
    clock.advance(120)
    assert repair(worker.engine, worker.sender).compensations == 1
    worker.sender.queue.clear()
    assert [row.sequence for row in kick(worker.engine, run, worker.sender).sent] == [1]
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")


def nobody_looks_again(first: Bench, second: Bench, done: Callable[[], Any], recorded: Callable[[], Any]) -> Callable[[], None]:
    """Two undos of a level end at once, and the worker of the second dies between its outcome and its look at what comes next.

    What is returned lets that worker go on after all, to end the test.
    """
    stop = second.stop("undo outcome")
    finishing = Background(recorded)
    stop.wait_reached()  # it has seen the other one at work
    done()
    dies = second.stop("advance")
    stop.go()
    dies.wait_reached()

    def go_on() -> None:
        dies.go()
        finishing.result()

    return go_on


@pytest.mark.parametrize("resumed", [False, True])
def test_the_doctor_has_a_rollback_ended_that_is_over_and_that_nobody_has_ended(
    bench: MakeBench, trip: Trip, clock: ManualClock, resumed: bool
) -> None:
    """DOCTOR-1, COMP-1, COMP-8: R2, once the grace is over; also of a run that has ended before."""
    settings = Settings.from_mapping({"repair": {"enabled": True}})
    first, second = bench(settings=settings), bench(settings=settings)
    run = booked(first, group=(1, 2, 3, 4))
    first.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET repair_attempts = 10, repair_after = ?", (clock.now(),)))
    assert first.compensate(run)  # and what was spent before does not count
    level = {outgoing.sequence: first.message(first.take()) for outgoing in first.messages}
    first.deliver(level[4])
    first.deliver(level[1])
    if resumed:
        trip.undoing = {2: refuse, 3: refuse}
        give_up(first, level[2])
        give_up(first, level[3])
        assert ended(first, run) == ("cancelled", "halted")
        trip.undoing.clear()
        assert resume(first, run)
        level = {outgoing.sequence: first.message(first.take()) for outgoing in first.messages}
    go_on = nobody_looks_again(first, second, lambda: first.deliver(level[3]), lambda: second.deliver(level[2]))
    assert ended(first, run) == ("cancelled" if resumed else "rolling_back", "running")
    clock.advance(59)
    assert repair(first.engine, first.sender).repaired == 0
    clock.advance(1)
    assert repair(first.engine, first.sender).runs == 1
    assert [(outgoing.kind, outgoing.run_id) for outgoing in first.messages] == [("drive", run)]
    assert repair(first.engine, first.sender).repaired == 0  # DOCTOR-1: a pause before the next
    first.run()
    assert ended(first, run) == ("cancelled", "done")
    go_on()
    assert first.events(run).count("rollback.finished") == 1 + resumed


@every_database
def test_what_is_behind_a_level_that_has_stopped_the_rollback_is_not_sent_where_nobody_has_ended_it(
    bench: MakeBench, trip: Trip, clock: ManualClock
) -> None:
    """DOCTOR-1, KICK-1, COMP-4: its rows are pending and their messages are nowhere, and that is right."""
    settings = Settings.from_mapping({"repair": {"enabled": True}})
    first, second = bench(settings=settings), bench(settings=settings)
    run, level = at_the_group(first)
    trip.undoing[2] = refuse
    go_on = nobody_looks_again(first, second, lambda: first.deliver(level[3]), lambda: give_up(second, level[2]))
    clock.advance(120)
    report = repair(first.engine, first.sender)
    assert (report.compensations, report.runs) == (0, 1)
    assert kick(first.engine, run, first.sender).sent == ()
    first.run()
    assert ended(first, run) == ("cancelled", "halted")
    assert states(first, run) == {4: "completed", 3: "completed", 2: "failed", 1: "pending"}
    go_on()


# --- levels that end without a member ---------------------------------------------------------------------------------


@every_database
def test_a_callback_that_meets_a_running_undo_ends_its_level(bench: MakeBench, trip: Trip) -> None:
    """PAR-3, COMP-4: a lost worker and a slow one look the same; the slow one's outcome is recorded all the same."""
    worker, other = bench(), bench()
    run, level = at_the_group(worker)
    door = trip.undoing[2] = Door()
    slow = Background(lambda: worker.deliver(level[2]))
    door.wait()
    other.deliver(level[3])
    undoing.level_closed(other.engine, run, 1, other.sender)
    assert ended(other, run) == ("cancelled", "halted")
    error = rollback_error(other, run) or ""
    assert "CompensationUnfinishedError" in error
    assert "undo of step 2 (undo) had not finished when its level ended" in error
    assert error.count("undo of step 2 (undo)") == 1, "it does not repeat itself"
    door.open()
    slow.result()
    assert states(worker, run) == {4: "completed", 3: "completed", 2: "completed", 1: "pending"}
    assert ended(other, run) == ("cancelled", "halted")


@every_database
def test_the_undos_of_a_level_go_out_as_a_group_whose_callback_is_a_second_trigger(bench: MakeBench, trip: Trip) -> None:
    """PAR-1, PAR-3, C16: a level of one is no group; a callback in its time changes nothing, and one of a level that is over neither."""
    worker = bench()
    run = booked(worker)
    assert worker.compensate(run)
    alone = worker.take()
    assert alone.group is None
    worker.deliver(alone)
    members = [worker.take(), worker.take()]
    assert {member.group for member in members} == {members[0].group}
    assert members[0].group is not None
    assert (members[0].group.size, members[0].group.level) == (2, 1)
    callback = worker.callback(members[0])
    for member in members:
        worker.deliver(member)
    for _ in range(2):
        assert worker.deliver(callback) is None
    assert [outgoing.sequence for outgoing in worker.messages] == [1]
    worker.run()
    worker.deliver(callback)
    assert ended(worker, run) == ("cancelled", "done")
    assert trip.undone == [4, 3, 2, 1]


@every_database
def test_a_callback_of_a_pruned_run_ends_no_level_of_its_namesake(bench: MakeBench, trip: Trip, clock: ManualClock) -> None:
    """PAR-3, PRUNE-1: what is running there is at work for another run of the same id."""
    worker = bench()
    run = booked(worker)
    assert worker.compensate(run)
    worker.deliver(worker.take())
    late = worker.callback(worker.messages[0])
    worker.run()
    clock.advance(1)
    assert prune(worker.store, before=clock.now()).pruned == 1
    assert booked(worker, run_id=run) == run
    assert worker.compensate(run)
    worker.deliver(worker.take())
    trip.undoing[3] = door = Door()
    at_work = Background(lambda: worker.deliver(worker.take()))
    door.wait()
    worker.deliver(late)
    row = worker.one("SELECT status, given_up FROM {compensation_runs} WHERE run_id = ? AND sequence = 3", run)
    assert row == ("running", False)
    door.open()
    at_work.result()
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")


def test_a_callback_sends_what_a_crash_has_left_unsent(bench: MakeBench, trip: Trip) -> None:
    """PAR-1, COMP-1: the outcome of the last undo is recorded, and its worker is gone before the next level is sent."""
    first, second = bench(), bench()
    run = booked(first)
    assert first.compensate(run)
    first.deliver(first.take())
    members = [first.take(), first.take()]
    stop, dies = second.stop("undo outcome"), second.stop("advance")
    finishing = Background(lambda: second.deliver(members[1]))
    stop.wait_reached()
    first.deliver(members[0])
    stop.go()
    dies.wait_reached()
    first.deliver(first.callback(members[0]))
    assert [outgoing.sequence for outgoing in first.messages] == [1]
    dies.go()
    finishing.result()
    assert second.messages == []


@every_database
def test_a_callback_and_the_last_undo_of_a_level_at_once(bench: MakeBench, trip: Trip) -> None:
    """PAR-3, COMP-4: it finds the undo at work and ends the level; the report that comes meanwhile is recorded, once."""
    worker, other = bench(), bench()
    run = booked(worker)
    assert worker.compensate(run)
    worker.deliver(worker.take())
    members = [worker.take(), worker.take()]
    worker.deliver(members[0])
    door = trip.undoing[members[1].sequence] = Door()
    slow = Background(lambda: worker.deliver(members[1]))
    door.wait()
    stop = other.stop("undo outcome")  # of the undo that is to be left behind
    closing = Background(lambda: other.deliver(other.callback(members[0])))
    stop.wait_reached()
    door.open()
    slow.result()
    stop.go()
    closing.result()
    assert states(worker, run)[members[1].sequence] == "completed"
    assert ended(worker, run) == ("rolling_back", "running")
    assert len(worker.messages) + len(other.messages) == 1
    worker.run()
    other.run()
    assert ended(worker, run) == ("cancelled", "done")
    assert trip.undone == [4, 3, 2, 1]


def test_a_refused_report_is_not_counted_towards_its_level(bench: MakeBench, trip: Trip) -> None:
    """COMP-8, PAR-3: Dramatiq would send the callback of a group that was given up long ago, and end the level that was resumed."""
    worker, other = bench(), bench()
    run = booked(worker)
    assert worker.compensate(run)
    worker.deliver(worker.take())
    members = {outgoing.sequence: outgoing for outgoing in (worker.take(), worker.take())}
    slow = trip.undoing[2] = Door()
    straggling = worker.message(members[2])
    straggler = Background(lambda: worker.deliver(straggling))
    slow.wait()
    counted = other.message(members[3])
    other.deliver(counted)
    other.deliver(other.callback(members[3]))
    assert ended(other, run) == ("cancelled", "halted")
    assert resume(other, run)
    slow.open()
    straggler.result()
    assert worker.codes() == ["outcome_rejected"]
    assert "group_completion_callbacks" in counted.options
    assert "group_completion_callbacks" not in straggling.options


def test_a_callback_that_comes_early_keeps_a_level_open_that_has_work_to_come(bench: MakeBench, trip: Trip) -> None:
    """PAR-3, PAR-2: nothing of the level is at work, so the counter is simply wrong; the rows decide."""
    worker = bench()
    run, level = at_the_group(worker)
    worker.deliver(level[3])
    undoing.level_closed(worker.engine, run, 1, worker.sender)
    undoing.level_closed(worker.engine, run, 7, worker.sender)
    assert ended(worker, run) == ("rolling_back", "running")
    worker.deliver(level[2])
    undoing.level_closed(worker.engine, run, 1, worker.sender)
    assert [outgoing.sequence for outgoing in worker.messages] == [1]
    worker.run()
    undoing.level_closed(worker.engine, run, 1, worker.sender)
    assert ended(worker, run) == ("cancelled", "done")
    assert trip.undone == [4, 3, 2, 1]


@pytest.mark.parametrize("way", ["a deadline", "leases"])
def test_a_callback_leaves_an_undo_that_will_be_reclaimed_to_its_reclaim(
    bench: MakeBench, trip: Trip, clock: ManualClock, way: str
) -> None:
    """PAR-3, RECLAIM-3, RECLAIM-5: the level goes on for as long as somebody may come back for the row."""
    leases = Settings.from_mapping({"reclaim": {"dead_workers": {"enabled": True}}})
    worker = bench(settings=RECLAIM if way == "a deadline" else leases)
    if way == "leases":
        Heartbeat(worker.engine).enter()
    run, level = at_the_group(worker)
    job = Delivery(level[2]).job
    assert job is not None
    ClaimAttempt(worker.engine, job, nonce="of a worker that died").run()
    worker.deliver(level[3])
    undoing.level_closed(worker.engine, run, 1, worker.sender)
    assert ended(worker, run) == ("rolling_back", "running")
    clock.advance(61)
    if way == "leases":
        Heartbeat(worker.engine).enter()
        clock.advance(16)  # a worker that has just started gives the others the time for a beat
    worker.deliver(level[2])
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")


def test_a_failure_of_an_undo_that_was_left_behind_is_recorded_and_final(bench: MakeBench, trip: Trip) -> None:
    """PAR-3, FENCE-1: its level did not wait for it, and it gets no other try; the row says what became of it."""
    worker = bench()
    run, level = at_the_group(worker)
    door = trip.undoing[2] = Door()
    slow = Background(lambda: worker.deliver(level[2]))
    door.wait()
    worker.deliver(level[3])
    undoing.level_closed(worker.engine, run, 1, worker.sender)
    door.open(ValueError("they do not answer"))
    delivery = slow.result()
    row = worker.one(
        "SELECT status, given_up, ended_at IS NULL FROM {compensation_runs} WHERE run_id = ? AND sequence = 2", run
    )
    assert row is not None
    assert (row[0], bool(row[1]), bool(row[2])) == ("failed", True, False)
    worker.runner.give_up(delivery)
    worker.deliver(level[2])
    assert trip.undone == [4, 2, 3]
    assert ended(worker, run) == ("cancelled", "halted")


def abandon(worker: Bench, run: str, sequence: int) -> bool:
    return undoing.abandon(worker.engine, run, sequence, worker.sender)


@every_database
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_an_undo_whose_worker_and_message_are_gone_is_ended_by_an_operator(bench: MakeBench, trip: Trip, policy: str) -> None:
    """PAR-3, COMP-4, COMP-8, KICK-1: nothing else ever does, with every dial off; a kick leaves it, and names what ends it."""
    trip.policies[4] = policy
    worker = bench()
    run = booked(worker)
    assert worker.compensate(run)
    job = Delivery(worker.message(worker.take())).job
    assert job is not None
    ClaimAttempt(worker.engine, job, nonce="of a worker that died").run()
    (left,) = kick(worker.engine, run, worker.sender).left
    assert (left.sequence, f"dramatiq-saga abandon-undo {run} 4" in (left.left or "")) == (4, True)
    worker.sender.queue.clear()
    assert abandon(worker, run, 4)
    assert abandon(worker, run, 4) is False
    assert "CompensationUnfinishedError" in str(
        worker.one("SELECT error FROM {compensation_runs} WHERE run_id = ? AND sequence = 4", run)
    )
    if policy == "stop":
        assert ended(worker, run) == ("cancelled", "halted")
        assert resume(worker, run)
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")
    assert trip.undone == ([4, 3, 2, 1] if policy == "stop" else [3, 2, 1])
    assert worker.events(run).count("compensation.given_up") == 1


@every_database
def test_an_undo_that_was_abandoned_at_work_is_still_recorded(bench: MakeBench, trip: Trip) -> None:
    """PAR-3, FENCE-1: the operator was wrong. A resume then has nothing of it to do."""
    worker, operator = bench(), bench()
    run = booked(worker)
    assert worker.compensate(run)
    door = trip.undoing[4] = Door()
    slow = Background(lambda: worker.deliver(worker.take()))
    door.wait()
    assert abandon(operator, run, 4)
    assert ended(operator, run) == ("cancelled", "halted")
    door.open()
    slow.result()
    assert states(worker, run)[4] == "completed"
    assert ended(operator, run) == ("cancelled", "halted")
    assert resume(operator, run)
    operator.run()
    assert trip.undone == [4, 3, 2, 1]
    assert ended(operator, run) == ("cancelled", "done")


@every_database
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_an_undo_that_was_abandoned_and_is_given_back_is_not_begun_again_beside_the_next_level(
    bench: MakeBench, trip: Trip, clock: ManualClock, policy: str
) -> None:
    """PAR-3, COMP-1, COMP-8, NATIVE-4: its worker lives after all and is shut down; neither its message nor a kick, nor the doctor begins
    it again. A resume does."""
    trip.policies[4] = policy
    worker = bench(settings=Settings.from_mapping({"repair": {"enabled": True}}))
    run = booked(worker)
    assert worker.compensate(run)
    message = worker.message(worker.take())
    door = trip.undoing[4] = Door()
    slow = Background(lambda: worker.deliver(message))
    door.wait()
    assert abandon(worker, run, 4)
    assert 4 not in [row.sequence for row in kick(worker.engine, run, worker.sender).rows]
    door.open(Shutdown())
    slow.result()
    trip.undoing.clear()
    assert worker.one("SELECT status, given_up FROM {compensation_runs} WHERE run_id = ? AND sequence = 4", run) == (
        "pending",
        1,
    )
    worker.deliver(worker.message_again(message))
    assert trip.undone == [4]
    assert 4 not in [row.sequence for row in kick(worker.engine, run, worker.sender).rows]
    clock.advance(3600)
    repair(worker.engine, worker.sender)
    worker.run()
    if policy == "continue":
        assert ended(worker, run) == ("cancelled", "done")
        assert trip.undone == [4, 3, 2, 1]
        return
    assert ended(worker, run) == ("cancelled", "halted")
    assert trip.undone == [4]
    assert resume(worker, run)
    worker.run()
    assert trip.undone == [4, 4, 3, 2, 1]
    assert ended(worker, run) == ("cancelled", "done")


@pytest.mark.parametrize(
    ("database_kind", "how"),
    [("sqlite", "commit unknown"), ("postgresql", "commit unknown"), ("mariadb", "commit unknown"), ("mariadb", "read back")],
    indirect=["database_kind"],
)
def test_an_undo_that_was_abandoned_before_its_body_began_does_not_begin(bench: MakeBench, trip: Trip, how: str) -> None:
    """PAR-3, COMP-1: its claim has landed, and its worker does not know it yet; when it looks again the rollback has gone on."""
    trip.policies[4] = "continue"
    worker, operator = bench(), bench()
    run = booked(worker)
    assert worker.compensate(run)
    message = worker.message(worker.take())
    if how == "commit unknown":
        worker.fail("claim", happened=True)
        worker.overtake("claim", lambda: worker.overtake("claim", lambda: abandon(operator, run, 4)))
    stop = None if how == "commit unknown" else worker.stop("claim", where="after")
    claiming = Background(lambda: worker.deliver(message))
    if stop is not None:
        stop.wait_reached()
        assert abandon(operator, run, 4)
        stop.go()
    claiming.result()
    assert trip.undone == []
    operator.run()
    worker.run()
    assert trip.undone == [3, 2, 1]
    assert ended(worker, run) == ("cancelled", "done")


@every_database
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_an_outcome_that_lands_first_is_not_abandoned(bench: MakeBench, trip: Trip, fails: bool) -> None:
    """PAR-3, STATUS-1: it lands between the operator's look and write; the operator changes nothing and is told what it is."""
    worker, operator = bench(), bench()
    run = booked(worker)
    assert worker.compensate(run)
    door = trip.undoing[4] = Door()
    slow = Background(lambda: worker.deliver(worker.take()))
    door.wait()
    stop = operator.stop("undo outcome")
    late = Background(lambda: abandon(operator, run, 4))
    stop.wait_reached()
    door.open(ValueError("they do not answer") if fails else None)
    slow.result()
    stop.go()
    with pytest.raises(ConcurrentTransitionError, match=f"undo of step 4 is {'failed' if fails else 'completed'}"):
        late.result()
    assert ended(worker, run) == ("rolling_back", "running")
    assert worker.one("SELECT given_up FROM {compensation_runs} WHERE run_id = ? AND sequence = 4", run) == (0,)
    assert "compensation.given_up" not in worker.events(run)


@every_database
def test_of_two_that_abandon_an_undo_one_does_it(bench: MakeBench, trip: Trip) -> None:
    """STATUS-1: both have found it at work; the second is told that it was done before."""
    first, second = bench(), bench()
    run = booked(first)
    assert first.compensate(run)
    job = Delivery(first.message(first.take())).job
    assert job is not None
    ClaimAttempt(first.engine, job, nonce="of a worker that died").run()
    stop = second.stop("undo outcome")
    late = Background(lambda: abandon(second, run, 4))
    stop.wait_reached()
    assert abandon(first, run, 4)
    stop.go()
    assert late.result() is False
    assert first.events(run).count("compensation.given_up") == 1


@pytest.mark.parametrize("way", ["a deadline", "leases"])
def test_an_undo_that_will_be_reclaimed_is_not_abandoned(bench: MakeBench, trip: Trip, way: str) -> None:
    """PAR-3, RECLAIM-3, RECLAIM-5: whoever comes back for it decides; nor is what is not running, or not there."""
    leases = Settings.from_mapping({"reclaim": {"dead_workers": {"enabled": True}}})
    worker = bench(settings=RECLAIM if way == "a deadline" else leases)
    if way == "leases":
        Heartbeat(worker.engine).enter()
    run = booked(worker)
    assert worker.compensate(run)
    job = Delivery(worker.message(worker.take())).job
    assert job is not None
    ClaimAttempt(worker.engine, job, nonce="of a worker that died").run()
    for sequence, words in ((4, "will be taken from its worker"), (3, "undo of step 3 is pending"), (9, "no undo of step 9")):
        with pytest.raises(ConcurrentTransitionError, match=words):
            abandon(worker, run, sequence)
    with pytest.raises(FlowNotFoundError):
        abandon(worker, "nobody", 4)
    assert ended(worker, run) == ("rolling_back", "running")
    assert worker.undo(run, 4) == ("running", 1)


# --- COMP-8: resuming --------------------------------------------------------------------------------------------------


def halted(worker: Bench, trip: Trip) -> str:
    """A run whose rollback has halted at step 2, while that of its neighbour went through."""
    trip.undoing[2] = refuse
    run, level = at_the_group(worker)
    worker.deliver(level[3])
    give_up(worker, level[2])
    assert ended(worker, run) == ("cancelled", "halted")
    return run


def resume(worker: Bench, run: str) -> bool:
    return undoing.resume(worker.engine, run, worker.sender)


@every_database
def test_a_resumed_rollback_undoes_what_is_not_undone_and_nothing_else(bench: MakeBench, trip: Trip) -> None:
    """COMP-8, COMP-6, C26: the run keeps its end; tries are renewed, attempts go on counting."""
    worker = bench()
    run = halted(worker, trip)
    before = worker.one("SELECT status, ended_at, reason, error FROM {flow_runs} WHERE id = ?", run)
    del trip.undoing[2]
    assert resume(worker, run)
    assert ended(worker, run) == ("cancelled", "running")
    assert rollback_error(worker, run) is None
    assert worker.undo(run, 2) == ("pending", 2)
    assert worker.one("SELECT tries, claims FROM {compensation_runs} WHERE run_id = ? AND sequence = 2", run) == (0, 0)
    assert [(outgoing.sequence, outgoing.attempts, outgoing.tries) for outgoing in worker.messages] == [(2, 2, 0)]
    worker.run()
    assert trip.undone == [4, 3, 2, 2, 1]
    assert ended(worker, run) == ("cancelled", "done")
    assert rollback_error(worker, run) is None
    assert worker.one("SELECT status, ended_at, reason, error FROM {flow_runs} WHERE id = ?", run) == before
    kinds = worker.events(run)
    assert kinds.count("rollback.resumed") == 1
    assert kinds.count("rollback.finished") == 2
    assert kinds.count("flow.cancelled") == 1


@pytest.mark.parametrize("spent", [1, 3])
def test_a_message_from_before_a_resume_takes_no_try_from_the_undo(bench: MakeBench, trip: Trip, spent: int) -> None:
    """COMP-8, NATIVE-1: Dramatiq's retry of the old attempt comes before the new message, and brings the tries that were spent then."""
    worker = bench()
    run = halted(worker, trip)
    assert resume(worker, run)
    old = worker.message(replace(worker.take(), attempts=1, tries=spent))
    delivery = worker.deliver(old)
    assert delivery.state == "failed"
    assert (worker.undo(run, 2), delivery.message.options.get("retries", 0)) == (("failed", 3), 0)
    assert not delivery.asks_again
    del trip.undoing[2]
    worker.deliver(old)
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")


def test_a_resumed_rollback_that_halts_again_can_be_resumed_again(bench: MakeBench, trip: Trip) -> None:
    """COMP-8: its error is that of the last time."""
    worker = bench()
    run = halted(worker, trip)

    def refuse_otherwise() -> None:
        raise OSError("no line")

    trip.undoing[2] = refuse_otherwise
    assert resume(worker, run)
    worker.run()
    assert ended(worker, run) == ("cancelled", "halted")
    assert "OSError: no line" in (rollback_error(worker, run) or "")
    assert "they do not answer" not in (rollback_error(worker, run) or "")
    del trip.undoing[2]
    assert resume(worker, run)
    worker.run()
    assert ended(worker, run) == ("cancelled", "done")
    assert worker.undo(run, 2) == ("completed", 5)
    assert trip.undone == [4, 3, 2, 2, 2, 1]


@every_database
def test_of_two_that_resume_a_rollback_one_does_it(bench: MakeBench, trip: Trip) -> None:
    """COMP-8, STATUS-1: both have found it halted; the second is told that it goes on already."""
    first, second = bench(), bench()
    run = halted(first, trip)
    del trip.undoing[2]
    stop = second.stop("resume")
    late = Background(lambda: resume(second, run))
    stop.wait_reached()
    assert resume(first, run)
    stop.go()
    assert late.result() is False
    assert second.messages == []
    assert first.undo(run, 2) == ("pending", 2)
    assert resume(first, run) is False
    first.run()
    assert trip.undone == [4, 3, 2, 2, 1]
    assert first.events(run).count("rollback.resumed") == 1


@pytest.mark.claims_alone
@every_database
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_straggler_of_the_old_attempt_cannot_touch_an_undo_that_was_resumed(
    bench: MakeBench, trip: Trip, fails: bool
) -> None:
    """COMP-8, FENCE-1: its level had left it behind; its report comes after the resume and is refused."""
    worker, other = bench(), bench()
    run, level = at_the_group(worker)
    slow, again = Door(), Door()
    doors = iter([slow, again])
    trip.undoing[2] = lambda: next(doors)()
    straggler = Background(lambda: worker.deliver(level[2]))
    slow.wait()
    other.deliver(level[3])
    undoing.level_closed(other.engine, run, 1, other.sender)
    assert resume(other, run)
    assert other.undo(run, 2) == ("pending", 2)
    successor = Background(lambda: other.deliver(other.take()))
    again.wait()
    slow.open(ValueError("too late") if fails else None)
    straggler.result()
    assert worker.codes() == ["outcome_rejected"]
    assert other.undo(run, 2) == ("running", 3)
    assert ended(other, run) == ("cancelled", "running")
    again.open()
    successor.result()
    other.run()
    assert states(other, run) == dict.fromkeys((1, 2, 3, 4), "completed")
    assert ended(other, run) == ("cancelled", "done")
    assert trip.undone.count(1) == 1


@every_database
def test_a_late_outcome_is_not_undone_by_a_resume(bench: MakeBench, trip: Trip) -> None:
    """COMP-8, FENCE-2: it lands while the resume is on its way; the resume looks again, and what has been undone stays undone."""
    worker, operator = bench(), bench()
    run, level = at_the_group(worker)
    door = trip.undoing[2] = Door()
    slow = Background(lambda: worker.deliver(level[2]))
    door.wait()
    operator.deliver(level[3])
    undoing.level_closed(operator.engine, run, 1, operator.sender)
    stop = operator.stop("resume")
    resuming = Background(lambda: resume(operator, run))
    stop.wait_reached()
    door.open()
    slow.result()
    stop.go()
    assert resuming.result() is True
    assert operator.codes() == ["transition_lost"]
    assert [outgoing.sequence for outgoing in operator.messages] == [1]
    operator.run()
    assert trip.undone == [4, 2, 3, 1]
    assert ended(operator, run) == ("cancelled", "done")


@pytest.mark.claims_alone
def test_a_resume_that_finds_nothing_left_to_undo_ends_the_rollback(bench: MakeBench, trip: Trip) -> None:
    """COMP-8: the undo that had not finished has finished since."""
    worker = bench()
    run = booked(worker, group=())
    assert worker.compensate(run)
    for _ in range(3):
        worker.deliver(worker.take())
    last = worker.message(worker.take())
    door = trip.undoing[1] = Door()
    slow = Background(lambda: worker.deliver(last))
    door.wait()
    worker.deliver(last)
    assert ended(worker, run) == ("cancelled", "halted")
    door.open()
    slow.result()
    assert resume(worker, run)
    assert ended(worker, run) == ("cancelled", "done")
    assert rollback_error(worker, run) is None
    assert worker.messages == []


def test_only_a_halted_rollback_is_resumed(bench: MakeBench, trip: Trip) -> None:
    """COMP-8: a workflow that has ended is never restarted, and a rollback that is over stays over."""
    worker = bench()
    run = booked(worker)
    with pytest.raises(ConcurrentTransitionError, match="it is running, and was never rolled back"):
        resume(worker, run)
    assert worker.compensate(run)
    with pytest.raises(ConcurrentTransitionError, match="it is rolling back, and nothing of that has halted"):
        resume(worker, run)
    worker.run()
    with pytest.raises(ConcurrentTransitionError, match="it is cancelled, and its rollback is done"):
        resume(worker, run)
    assert trip.undone == [4, 3, 2, 1]


def test_a_rollback_that_passed_a_failure_over_is_not_resumed_and_says_why(bench: MakeBench, trip: Trip) -> None:
    """COMP-8, COMP-4."""
    trip.policies = dict.fromkeys((1, 2, 3, 4), "continue")
    trip.undoing[2] = refuse
    worker = bench()
    run = booked(worker)
    assert worker.compensate(run)
    worker.run()
    with pytest.raises(ConcurrentTransitionError, match="what undoes step 2 failed, and was passed over as its policy says"):
        resume(worker, run)


@pytest.mark.claims_alone
def test_an_undo_whose_worker_is_gone_ends_its_level_in_a_resumed_rollback_too(bench: MakeBench, trip: Trip) -> None:
    """COMP-8, PAR-3, CLAIM-2: the run has ended long ago; a lost claim still looks at its rollback."""
    first, second = bench(), bench()
    run = halted(first, trip)
    del trip.undoing[2]
    assert resume(first, run)
    again = first.message(first.take())
    stop = first.stop("undo outcome")
    dying = Background(lambda: first.deliver(again))
    stop.wait_reached()
    second.deliver(again)  # claimed, and nothing will ever reclaim it: its level ends
    assert ended(second, run) == ("cancelled", "halted")
    assert "CompensationUnfinishedError" in (rollback_error(second, run) or "")
    stop.go()
    dying.result()
    assert second.undo(run, 2) == ("completed", 3)


@every_database
def test_a_message_that_comes_out_of_turn_undoes_nothing(bench: MakeBench, trip: Trip) -> None:
    """COMP-1, CLAIM-1: what was passed over at first is tried again by a resume, and a late message of the row that had halted
    the rollback does not overtake it."""
    trip.policies = {4: "continue", 3: "continue"}
    trip.undoing = {4: refuse, 2: refuse}
    worker = bench()
    run = booked(worker, group=())
    assert worker.compensate(run)
    worker.run()
    assert ended(worker, run) == ("cancelled", "halted")
    assert trip.undone == [4, 3, 2]
    trip.undoing.clear()
    assert resume(worker, run)
    late = Outgoing("compensation", run, "undo", "default", 2, attempts=1)
    worker.deliver(late)
    assert trip.undone == [4, 3, 2]
    assert worker.codes() == ["claim_lost"]
    worker.run()
    assert trip.undone == [4, 3, 2, 4, 2, 1]
    assert ended(worker, run) == ("cancelled", "done")
