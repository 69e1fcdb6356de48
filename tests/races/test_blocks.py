"""Members of a parallel block, stopped where they meet: the rows decide, never a counter (PAR-1, PAR-2, PAR-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import signals
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import HistoryMismatchError
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.recovery.sweep import sweep
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench
from tests.support.bench import Background, Bench

servers_only = pytest.mark.parametrize("database_kind", ["postgresql", "mariadb"], indirect=True)
everywhere = pytest.mark.parametrize("database_kind", ["sqlite", "postgresql", "mariadb"], indirect=True)


class Fan:
    """A block of members, and a step after it. ``bodies[number]`` is what a member does; ``shape`` what the block is like."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.bodies: dict[int, Callable[[], Any]] = {}
        self.size = 3
        self.alone = False
        self.retried: set[int] = set()  # members that a signal runs again
        self.shape: Callable[[Any], Any] = lambda block: block

    def declare(self, bench: Bench) -> None:
        def member(number: int) -> Any:
            self.ran.append(number)
            return self.bodies[number]() if number in self.bodies else number

        def undo(number: int) -> None:
            self.ran.append(-number)

        def after(found: list[Any]) -> Any:
            self.ran.append("after")
            return found

        actors = {fn.__name__: bench.actor(fn) for fn in (member, undo, after)}

        def fan(flow: Any) -> Any:
            if self.alone:
                return flow.run(actors["member"], 1)
            members = [
                flow.action(actors["member"], number).compensate_with(actors["undo"], number)
                for number in range(1, self.size + 1)
            ]
            for number in self.retried:
                members[number - 1].retry_on_signal("go")
            return flow.run(actors["after"], self.shape(flow.parallel(*members)).run())

        bench.workflow(fan)


@pytest.fixture
def shop() -> Fan:
    return Fan()


@pytest.fixture
def fan(shop: Fan) -> Fan:
    return shop


def begin(worker: Bench) -> tuple[str, list[Outgoing]]:
    """A run whose block is scheduled: its id, and the messages of those of its members that were sent."""
    run = worker.start("fan")
    assert worker.deliver(worker.take()) is Driven.DECIDED
    sent = worker.messages
    worker.sender.queue.clear()
    return run, sent


def fails(text: str) -> Callable[[], Any]:
    def body() -> Any:
        raise ValueError(text)

    return body


def kinds(worker: Bench) -> list[str]:
    return [message.kind for message in worker.messages]


def wakes(worker: Bench, run: str) -> tuple[int, int]:
    found = worker.one("SELECT wakes, wakes_seen FROM {flow_runs} WHERE id = ?", run)
    assert found is not None
    return found[0], found[1]


# --- the last member -------------------------------------------------------------------------------------------------


@pytest.mark.both_ways
@everywhere
def test_of_two_last_members_exactly_one_drives_the_run(bench: MakeBench, fan: Fan) -> None:
    """PAR-2, DRIVE-7: both have seen the other at work; the second to lock the run's row sees that it is the last."""
    fan.size = 2
    one, other = bench(), bench()
    run, members = begin(one)
    first, second = one.stop("member outcome"), other.stop("member outcome")
    racing = [Background(lambda: one.deliver(members[0])), Background(lambda: other.deliver(members[1]))]
    first.wait_reached()
    second.wait_reached()
    first.go()
    second.go()
    for call in racing:
        call.result()
    assert one.steps(run)[:2] == [("member", "completed")] * 2
    steps = [message for worker in (one, other) for message in worker.messages]
    assert [message.actor for message in steps] == ["after"]
    assert wakes(one, run)[0] == wakes(one, run)[1]


@servers_only
def test_the_second_last_waits_for_the_lock_of_the_last_but_one(bench: MakeBench, fan: Fan) -> None:
    """PAR-2, DRIVE-7: the first has written its outcome and not committed; without the lock neither would see the other."""
    fan.size = 2
    one, other = bench(), bench()
    run, members = begin(one)
    stop = one.stop("member outcome", where="inside", statement="UPDATE {action_runs} SET status = 'completed'")
    first = Background(lambda: one.deliver(members[0]))
    stop.wait_reached()
    second = Background(lambda: other.deliver(members[1]))
    stop.go()
    first.result()
    second.result()
    assert one.steps(run) == [("member", "completed"), ("member", "completed"), ("after", "pending")]
    assert (kinds(one), kinds(other)) == ([], ["step"])


def test_an_outcome_that_is_not_the_last_sends_nothing_and_drives_nothing(bench: MakeBench, fan: Fan) -> None:
    """PAR-2, PAR-4: its result is there, the run's revision has not moved, and no wake is left to be seen."""
    worker = bench()
    run, members = begin(worker)
    before = worker.one("SELECT revision FROM {flow_runs} WHERE id = ?", run)
    worker.deliver(members[1])
    assert worker.messages == []
    assert worker.one("SELECT revision FROM {flow_runs} WHERE id = ?", run) == before
    assert wakes(worker, run) == (2, 2)
    assert worker.events(run).count("action.completed") == 1
    worker.deliver(members[0])
    worker.deliver(members[2])
    assert wakes(worker, run) == (4, 4)
    worker.run()
    assert worker.status(run) == "completed"
    assert fan.ran == [2, 1, 3, "after"]


def test_a_callback_of_a_pruned_run_says_nothing_of_a_block_of_its_namesake(
    bench: MakeBench, fan: Fan, clock: ManualClock
) -> None:
    """PAR-2, PRUNE-1: it would be early there, and leave a line in the journal of a block in which all went well."""
    worker = bench()
    run, members = begin(worker)
    late = worker.callback(members[0])
    worker.cancel(run)
    clock.advance(1)
    assert prune(worker.store, before=clock.now()).pruned == 1
    worker.start("fan", run_id=run)
    worker.deliver(worker.take())
    worker.deliver(late)
    worker.run()
    assert worker.status(run) == "completed"
    assert worker.codes() == []


def test_a_decision_in_the_making_loses_to_an_outcome_that_drives_nothing(bench: MakeBench, fan: Fan) -> None:
    """DRIVE-1, PAR-2: it would rest on a history that has grown; the drive that loses looks again."""
    worker, other = bench(), bench()
    run, members = begin(worker)
    worker.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = 1 WHERE id = ?", (run,)))
    other.overtake("decision", lambda: worker.deliver(members[0]))
    drive = Outgoing("drive", run, "fan", "default")
    assert other.deliver(drive) is Driven.DECIDED
    assert other.codes() == ["transition_lost"]
    worker.deliver(members[1])
    worker.deliver(members[2])
    worker.run()
    assert worker.status(run) == "completed"


def test_an_outcome_leaves_a_wake_that_no_drive_has_seen_unseen(bench: MakeBench, fan: Fan) -> None:
    """DRIVE-2, PAR-2: it sees its own wake, never another's."""
    worker = bench()
    run, members = begin(worker)
    worker.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = 1 WHERE id = ?", (run,)))
    worker.deliver(members[0])
    assert wakes(worker, run) == (3, 2)


def test_a_member_whose_commit_is_unknown_is_recorded_once(bench: MakeBench, fan: Fan) -> None:
    """FENCE-1, PAR-2: whether it has happened or not, the outcome is written once and the block is joined once."""
    for happened in (True, False):
        fan.ran.clear()
        worker = bench()
        run, members = begin(worker)
        worker.fail("member outcome", happened=happened)
        for member in members:
            worker.deliver(member)
        worker.run()
        assert worker.status(run) == "completed"
        assert worker.events(run).count("action.completed") == 4
        assert fan.ran == [1, 2, 3, "after"]


# --- duplicates and callbacks ----------------------------------------------------------------------------------------


def test_duplicates_of_members_neither_join_the_block_nor_run_again(bench: MakeBench, fan: Fan) -> None:
    """C16, PAR-2: the first member's message comes three times, the last one's twice."""
    worker = bench()
    run, members = begin(worker)
    first = worker.message(members[0])
    for _ in range(3):
        worker.deliver(first)
    worker.deliver(members[1])
    assert worker.messages == []
    last = worker.message(members[2])
    worker.deliver(last)
    worker.deliver(last)
    assert [message.actor for message in worker.messages] == ["after"]
    worker.run()
    assert fan.ran == [1, 2, 3, "after"]
    assert worker.codes() == ["claim_lost"] * 3
    assert worker.status(run) == "completed"


def test_a_duplicate_is_not_counted_as_a_member_that_has_succeeded(bench: MakeBench, fan: Fan) -> None:
    """C16: Dramatiq counts deliveries that end well; one that ran nothing takes its callbacks off."""
    worker = bench()
    _, members = begin(worker)
    counted, duplicate = worker.message(members[0]), worker.message(members[0])
    worker.deliver(counted)
    worker.deliver(duplicate)
    assert "group_completion_callbacks" in counted.options
    assert "group_completion_callbacks" not in duplicate.options


def test_a_callback_that_comes_early_marks_the_block_and_the_late_worker_tells(bench: MakeBench, fan: Fan) -> None:
    """C17, PAR-2: a lost barrier reads as reached; the block goes on when its last member is settled, once."""
    worker = bench()
    run, members = begin(worker)
    worker.deliver(members[0])
    callback = worker.callback(members[0])
    assert worker.deliver(callback) is None
    assert worker.deliver(callback) is None
    assert worker.one("SELECT closed_early_at IS NOT NULL FROM {blocks} WHERE run_id = ?", run) == (1,)
    assert worker.messages == []
    worker.deliver(members[1])
    worker.deliver(members[2])
    lines = [fields for code, fields in worker.anomalies.lines if code == "batch_finished_early"]
    assert [(line["sequence"], line["block"], line["actor"]) for line in lines] == [(3, 1, "member"), (4, 1, "member")]
    worker.run()
    assert fan.ran == [1, 2, 3, "after"]
    assert worker.status(run) == "completed"


def test_a_callback_after_the_last_member_is_a_second_trigger(bench: MakeBench, fan: Fan) -> None:
    """PAR-1, PAR-2, C16: where the last outcome's drive has not come about, the callback's does; a second one finds nothing."""
    worker, stranger = bench(), bench()
    run, members = begin(worker)
    worker.deliver(members[0])
    worker.deliver(members[1])
    stranger.engine.workflows.clear()  # a worker that does not know the workflow: it can only leave a message
    stranger.deliver(members[2])
    assert kinds(stranger) == ["drive"]
    assert worker.deliver(worker.callback(members[0])) is Driven.DECIDED
    assert worker.deliver(worker.callback(members[0])) is Driven.IDLE
    assert worker.deliver(stranger.take()) is Driven.IDLE
    assert [message.actor for message in worker.messages] == ["after"]
    worker.run()
    assert worker.deliver(worker.callback(members[0])) is Driven.ENDED
    assert fan.ran == [1, 2, 3, "after"]
    assert worker.status(run) == "completed"


def test_a_callback_that_nobody_can_take_holds_nothing(bench: MakeBench, fan: Fan) -> None:
    """PAR-2: a worker on the queue does not know the workflow, or the message is too old. A drive's message would hold the run."""
    worker = bench()
    run, members = begin(worker)
    callback = worker.callback(members[0])
    actor = worker.broker.actors.pop("fan")
    worker.middleware.before_nack(worker.broker, callback)
    worker.broker.actors["fan"] = actor
    assert worker.one("SELECT status, hold_error FROM {flow_runs} WHERE id = ?", run) == ("running", None)
    for member in members:
        worker.deliver(member)
    worker.run()
    assert worker.status(run) == "completed"


@everywhere
def test_a_callback_and_the_last_outcome_at_once(bench: MakeBench, fan: Fan) -> None:
    """PAR-2: the callback looks before the last member is settled, or after; either way the run goes on once."""
    for where in ("before", "after"):
        fan.ran.clear()
        worker, other = bench(), bench()
        run, members = begin(worker)
        worker.deliver(members[0])
        worker.deliver(members[1])
        stop = other.stop("callback", where=where)
        called = Background(lambda other=other, member=members[0]: other.deliver(other.callback(member)))  # type: ignore[misc]
        stop.wait_reached()
        worker.deliver(members[2])
        stop.go()
        called.result()
        worker.run()
        other.run()
        assert fan.ran == [1, 2, 3, "after"]
        assert worker.status(run) == "completed"


def test_a_callback_of_a_run_that_is_gone_or_of_no_block_does_nothing(bench: MakeBench, fan: Fan) -> None:
    """C17"""
    worker = bench()
    run, members = begin(worker)
    callback = worker.callback(members[0])
    callback.options["saga"]["block"] = 77
    assert worker.deliver(callback) is None
    callback.options["saga"] |= {"block": 1, "run": "nobody"}
    assert worker.deliver(callback) is None
    assert worker.status(run) == "running"
    callback.options["saga"]["first"] = "one"
    assert Delivery(callback).damaged


# --- failures --------------------------------------------------------------------------------------------------------


def test_members_between_tries_are_cancelled_and_their_next_try_runs_nothing(bench: MakeBench, fan: Fan) -> None:
    """PAR-4, C13: the message of the next try comes all the same, and loses its claim."""
    worker = bench()
    run, members = begin(worker)
    fan.bodies = {1: fails("again"), 2: fails("for good")}
    trying = worker.message(members[0])
    assert worker.deliver(trying).state == "failed"
    assert worker.step(run, 2) == ("failed", 1)
    worker.runner.give_up(worker.deliver(members[1]))
    assert worker.steps(run) == [("member", "cancelled"), ("member", "failed"), ("member", "cancelled")]
    worker.deliver(trying)
    worker.deliver(members[2])
    assert fan.ran == [1, 2]
    worker.run()
    assert worker.status(run) == "failed"


@everywhere
def test_a_try_that_fails_while_its_block_fails_is_the_last(bench: MakeBench, fan: Fan) -> None:
    """PAR-4: the member runs when the others are cancelled; its try fails afterwards, and no other follows. The error that is
    told is that of the member that failed the block."""
    worker, other = bench(), bench()
    run, members = begin(worker)
    fan.bodies = {1: fails("too late"), 2: fails("the cause")}
    stop = other.stop("failed try")
    trying = Background(lambda: other.deliver(members[0]))
    stop.wait_reached()
    worker.runner.give_up(worker.deliver(members[1]))
    assert worker.steps(run) == [("member", "running"), ("member", "failed"), ("member", "cancelled")]
    assert worker.deliver(worker.take()) is Driven.DECIDED
    stop.go()
    assert trying.result().state == "done"
    assert worker.steps(run)[0] == ("member", "failed")
    worker.run()
    other.run()
    assert worker.status(run) == "failed"
    error = worker.one("SELECT error FROM {flow_runs} WHERE id = ?", run)
    assert error is not None
    assert "the cause" in error[0]


@servers_only
def test_a_failing_try_waits_for_the_decision_that_fails_its_block(bench: MakeBench, fan: Fan) -> None:
    """PAR-4, DRIVE-7: the decision has looked at the member's row, which runs, and has not committed yet."""
    worker, other = bench(), bench()
    run, members = begin(worker)
    fan.bodies = {1: fails("too late"), 2: fails("the cause")}
    before = other.stop("failed try")
    trying = Background(lambda: other.deliver(members[0]))
    before.wait_reached()
    failing = worker.deliver(members[1])
    stop = worker.stop("outcome and decision", where="inside", statement="SET status = 'cancelled'")
    deciding = Background(lambda: worker.runner.give_up(failing))
    stop.wait_reached()
    before.go()
    stop.go()
    deciding.result()
    assert trying.result().state == "done"
    assert worker.steps(run) == [("member", "failed"), ("member", "failed"), ("member", "cancelled")]
    worker.run()
    other.run()
    assert worker.status(run) == "failed"


@pytest.mark.both_ways
def test_a_member_that_completes_after_its_block_has_failed_is_undone(bench: MakeBench, fan: Fan) -> None:
    """PAR-4, COMP-5: it was running, so it finishes, and then it has to be undone."""
    worker, other = bench(), bench()
    run, members = begin(worker)
    fan.bodies = {2: fails("no")}
    stop = other.stop("member outcome")
    late = Background(lambda: other.deliver(members[2]))
    stop.wait_reached()
    worker.runner.give_up(worker.deliver(members[1]))
    worker.run()
    assert worker.status(run) == "running"
    stop.go()
    late.result()
    worker.run()
    other.run()
    assert worker.status(run) == "failed"
    assert worker.steps(run) == [("member", "cancelled"), ("member", "failed"), ("member", "completed")]
    assert fan.ran == [3, 2, -3]


def test_failures_after_the_first_drive_nothing_until_the_last(bench: MakeBench, fan: Fan) -> None:
    """PAR-4: with everything that was not running cancelled, what still fails changes nothing but its own row."""
    fan.size = 4
    worker, others = bench(), [bench() for _ in range(3)]
    run, members = begin(worker)
    fan.bodies = {number: fails(f"no {number}") for number in range(1, 5)}
    stops = [other.stop("failed try") for other in others]
    running = [
        Background(lambda other=other, member=member: other.deliver(member))  # type: ignore[misc]
        for other, member in zip(others, members[1:], strict=True)
    ]
    for stop in stops:
        stop.wait_reached()
    worker.runner.give_up(worker.deliver(members[0]))
    worker.run()
    revision = worker.one("SELECT revision FROM {flow_runs} WHERE id = ?", run)
    for position in range(2):
        stops[position].go()
        running[position].result()
        assert worker.one("SELECT revision FROM {flow_runs} WHERE id = ?", run) == revision
        assert others[position].messages == []
    stops[2].go()
    running[2].result()
    others[2].run()
    assert worker.status(run) == "failed"


def test_a_block_that_waits_is_driven_once_however_many_members_fail(bench: MakeBench, fan: Fan) -> None:
    """PAR-4: wait_all_then_fail."""
    fan.shape = lambda block: block.wait_all_then_fail()
    worker = bench()
    run, members = begin(worker)
    fan.bodies = {1: fails("one"), 2: fails("two")}
    for member in members[:2]:
        worker.runner.give_up(worker.deliver(member))
        assert worker.messages == []
    worker.deliver(members[2])
    worker.run()
    assert worker.status(run) == "failed"
    assert fan.ran == [1, 2, 3, -3]


def test_a_cancelled_run_cancels_its_members_and_ends_its_block(bench: MakeBench, fan: Fan) -> None:
    """STATUS-2: members held back too."""
    fan.shape = lambda block: block.max_in_flight(1)
    worker = bench()
    run, members = begin(worker)
    assert len(members) == 1
    worker.cancel(run)
    assert worker.steps(run) == [("member", "cancelled")] * 3
    assert worker.all("SELECT sequence FROM {blocks} WHERE ended_at IS NULL") == []
    worker.deliver(members[0])
    assert fan.ran == []


def test_the_callback_of_a_first_batch_is_not_early_for_those_let_go_later(bench: MakeBench, fan: Fan) -> None:
    """PAR-1, PAR-2: a group is what was sent together; members that are let go one by one have no callback."""
    fan.size, fan.shape = 4, lambda block: block.max_in_flight(2)
    worker = bench()
    run, members = begin(worker)
    assert [message.group and (message.group.size, message.group.first, message.group.last) for message in members] == [
        (2, 2, 3)
    ] * 2
    for member in members:
        worker.deliver(member)
    assert [(message.sequence, message.group) for message in worker.messages] == [(4, None), (5, None)]
    assert worker.deliver(worker.callback(members[0])) is Driven.IDLE
    assert worker.one("SELECT closed_early_at, ended_at FROM {blocks} WHERE run_id = ?", run) == (None, None)
    worker.run()
    assert worker.status(run) == "completed"
    assert "batch_finished_early" not in worker.codes()


# --- members that wait for a signal ----------------------------------------------------------------------------------


def give_up(worker: Bench, message: Any) -> None:
    worker.runner.give_up(worker.deliver(message))


def waits(worker: Bench, run: str) -> list[tuple[Any, ...]]:
    return worker.all("SELECT sequence, status FROM {waits} WHERE run_id = ? ORDER BY sequence", run)


def test_a_parked_member_is_cancelled_with_its_wait_when_its_block_fails(bench: MakeBench, fan: Fan) -> None:
    """PAR-4, RSIG-2: a signal that comes later finds nobody waiting for it."""
    worker = bench()
    fan.retried, fan.bodies = {1}, {1: fails("later"), 2: fails("for good")}
    run, members = begin(worker)
    give_up(worker, members[0])
    assert worker.steps(run)[0] == ("member", "awaiting_retry")
    assert worker.status(run) == "running"
    give_up(worker, members[1])
    assert worker.steps(run) == [("member", "cancelled"), ("member", "failed"), ("member", "cancelled")]
    assert waits(worker, run) == [(2, "cancelled")]
    worker.run()
    assert worker.status(run) == "failed"


def test_a_member_that_fails_after_its_block_is_not_parked(bench: MakeBench, fan: Fan) -> None:
    """PAR-4, RSIG-2: it ran when the others were cancelled; no further try means no signal either."""
    worker, other = bench(), bench()
    fan.retried, fan.bodies = {1}, {1: fails("too late"), 2: fails("for good")}
    run, members = begin(worker)
    stop = other.stop("failed try")
    trying = Background(lambda: other.deliver(members[0]))
    stop.wait_reached()
    give_up(worker, members[1])
    worker.run()
    stop.go()
    trying.result()
    other.run()
    assert worker.status(run) == "failed"
    assert worker.steps(run)[0] == ("member", "failed")
    assert waits(worker, run) == []


def test_a_block_waits_for_its_parked_member_alone_and_goes_on_with_its_signal(bench: MakeBench, fan: Fan) -> None:
    """RSIG-1, PAR-2: the run is waiting once nothing but the parked member is open, and the signal runs that member again."""
    worker = bench()
    fan.retried, fan.bodies = {1}, {1: fails("once")}
    run, members = begin(worker)
    give_up(worker, members[0])
    worker.deliver(members[1])
    assert worker.status(run) == "running"
    worker.deliver(members[2])
    assert worker.status(run) == "waiting"
    assert worker.messages == []
    del fan.bodies[1]
    signals.send(worker.engine, signals.Signal(run, "go", b"null"), worker.sender)
    worker.run()
    assert worker.status(run) == "completed"
    assert fan.ran == [1, 2, 3, 1, "after"]


def test_a_parked_member_leaves_its_place_to_one_that_is_held_back(bench: MakeBench, fan: Fan) -> None:
    """PAR-1, RSIG-1: it is neither waiting for a worker nor running."""
    worker = bench()
    fan.retried, fan.bodies, fan.shape = {1}, {1: fails("once")}, lambda block: block.max_in_flight(1)
    run, members = begin(worker)
    give_up(worker, members[0])
    assert [message.sequence for message in worker.messages] == [3]
    worker.deliver(worker.take())
    assert [message.sequence for message in worker.messages] == [4]
    worker.run()
    assert worker.status(run) == "waiting"
    del fan.bodies[1]
    signals.send(worker.engine, signals.Signal(run, "go", b"null"), worker.sender)
    worker.run()
    assert worker.status(run) == "completed"


# --- members that are held back --------------------------------------------------------------------------------------


@everywhere
def test_two_outcomes_at_once_let_two_different_members_go(bench: MakeBench, fan: Fan) -> None:
    """PAR-1: both have chosen before either has committed; the one whose choice is gone chooses again."""
    fan.size, fan.shape = 8, lambda block: block.max_in_flight(2)
    one, other = bench(), bench()
    run, members = begin(one)
    assert [message.sequence for message in members] == [2, 3]
    racing = []
    for worker, member in zip((one, other), members, strict=True):
        looking = worker.stop("member outcome", where="after")  # its look, which has chosen
        racing.append((Background(lambda worker=worker, member=member: worker.deliver(member)), looking))  # type: ignore[misc]
    for _, looking in racing:
        looking.wait_reached()
    for call, looking in racing:
        looking.go()
        call.result()
    released = [message.sequence for worker in (one, other) for message in worker.messages]
    assert len(set(released)) == 2
    assert one.all("SELECT sequence FROM {action_runs} WHERE run_id = ? AND held_back = ? ORDER BY sequence", run, False) == [
        (sequence,) for sequence in sorted([2, 3, *released])
    ]


def test_one_that_chooses_what_another_has_let_go_chooses_again(bench: MakeBench, fan: Fan) -> None:
    """PAR-1: nothing is sent twice, and no place stays empty."""
    fan.size, fan.shape = 5, lambda block: block.max_in_flight(2)
    one, other = bench(), bench()
    run, members = begin(one)
    chosen = one.stop("member outcome", where="after")
    slow = Background(lambda: one.deliver(members[0]))
    chosen.wait_reached()
    other.store.write(
        lambda tx: tx.run(
            "UPDATE {action_runs} SET status = 'cancelled', ended_at = 1 WHERE run_id = ? AND sequence = 6", (run,)
        )
    )  # what the first has chosen is gone
    other.store.write(
        lambda tx: tx.run(
            "UPDATE {action_runs} SET status = 'cancelled', ended_at = 1 WHERE run_id = ? AND sequence = 4", (run,)
        )
    )
    chosen.go()
    slow.result()
    assert [message.sequence for message in one.messages] == [5]


def test_a_member_that_a_drive_alone_sees_end_makes_room_too(bench: MakeBench, fan: Fan) -> None:
    """PAR-1: an expiry, for example, which no worker reports."""
    fan.size, fan.shape = 5, lambda block: block.wait_all_then_fail().max_in_flight(2)
    worker = bench()
    run, members = begin(worker)
    worker.store.write(
        lambda tx: (
            tx.run("UPDATE {action_runs} SET status = 'expired', ended_at = 1 WHERE run_id = ? AND sequence = 2", (run,)),
            tx.run("UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = 1 WHERE id = ?", (run,)),
        )
    )
    assert worker.deliver(Outgoing("drive", run, "fan", "default")) is Driven.DECIDED
    assert [message.sequence for message in worker.messages] == [4]
    worker.deliver(worker.take())
    assert [message.sequence for message in worker.messages] == [5]
    worker.deliver(members[1])
    worker.run()
    assert worker.status(run) == "failed"
    assert sorted(fan.ran) == [-5, -4, -3, -2, 2, 3, 4, 5]


def test_a_member_that_was_let_go_is_not_taken_for_lost_at_once(bench: MakeBench, fan: Fan, clock: ManualClock) -> None:
    """DOCTOR-1, PAR-1: its row is as old as its block; what counts is when it was let go."""
    fan.shape = lambda block: block.max_in_flight(1)
    worker = bench(settings=Settings.from_mapping({"repair.enabled": True, "repair.grace_seconds": 60}))
    _, members = begin(worker)
    clock.advance(3600)
    worker.deliver(members[0])
    assert [message.sequence for message in worker.messages] == [3]
    clock.advance(59)
    assert sweep(worker.engine, worker.sender).repair.steps == 0
    clock.advance(1)
    assert sweep(worker.engine, worker.sender).repair.steps == 1
    assert [message.sequence for message in worker.messages] == [3, 3]


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["longer", "shorter", "a step"])
def test_a_block_that_has_changed_holds_the_run_and_is_named(bench: MakeBench, fan: Fan, change: str) -> None:
    """C19, HISTORY-1: its size is part of the history; the run waits for code that agrees, and then goes on."""
    worker = bench()
    run, members = begin(worker)
    for member in members[:2]:
        worker.deliver(member)
    if change == "a step":
        fan.alone = True
    else:
        fan.size = 4 if change == "longer" else 2
    worker.deliver(members[2])
    held = worker.one("SELECT status, hold_error FROM {flow_runs} WHERE id = ?", run)
    assert held is not None
    assert held[0] == "waiting"
    assert HistoryMismatchError.__name__ in held[1]
    assert "parallel block of 3" in held[1]
    assert worker.steps(run) == [("member", "completed")] * 3
    fan.size, fan.alone = 3, False
    assert worker.deliver(Outgoing("drive", run, "fan", "default")) is Driven.DECIDED
    worker.run()
    assert fan.ran == [1, 2, 3, "after"]
