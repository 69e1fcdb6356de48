"""Signals that meet somebody: a decision that parks the run, an outcome, another signal, the end of the run.

As in ``test_interleavings.py``: one worker stands at a named point while another does what must happen in between. On SQLite the
points lie between reading and writing; on PostgreSQL inside transactions too, with real row locks held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.errors import CannotSignalFlowError, CannotSignalTerminalFlowError, SignalTimeoutError
from tests.races.test_interleavings import blocked, postgresql_only
from tests.support.bench import Background, Bench
from tests.support.waiting import eventually

Make = Callable[[], Bench]


def declare(bench: Bench) -> None:
    prepare = bench.actor(lambda: "ready", actor_name="prepare")

    def approve(flow: Any) -> Any:
        return flow.await_signal("decision")

    def late(flow: Any) -> Any:
        return [flow.run(prepare), flow.await_signal("decision")]

    def collect(flow: Any) -> Any:
        return [flow.await_signal("decision"), flow.await_signal("decision")]

    def tell(flow: Any, other: str) -> Any:
        flow.signal_flow(other, "decision", flow.run_id)
        return flow.await_signal("decision")

    def patient(flow: Any) -> Any:
        try:
            return flow.await_signal("decision", wait_seconds=60)
        except SignalTimeoutError:
            return ["late", flow.await_signal("decision")]

    for function in (approve, late, collect, tell, patient):
        bench.workflow(function)


@pytest.fixture
def bench(address: str, table_prefix: str, clock: ManualClock) -> Iterator[Make]:
    """``bench()`` makes one more worker on this test's tables."""
    made: list[Bench] = []

    def make() -> Bench:
        made.append(Bench(address, declare, prefix=table_prefix, clock=clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def result(worker: Bench, run: str) -> Any:
    row = worker.one("SELECT status, result FROM {flow_runs} WHERE id = ?", run)
    assert row is not None
    assert row[0] == "completed", row
    return bytes(row[1]).decode()


def signals(worker: Bench, run: str) -> list[str]:
    return [row[0] for row in worker.all("SELECT status FROM {signals} WHERE run_id = ? ORDER BY id", run)]


def test_a_decision_that_parks_the_run_loses_to_a_signal_that_came_after_it_had_looked(bench: Make) -> None:
    """C32, SIG-2: between the drive's read of what has arrived and its write of the wait."""
    driver, sender = bench(), bench()
    run = driver.start("approve")
    driver.overtake("decision", lambda: sender.signal(run, "decision", "yes"))
    assert driver.deliver(driver.take()) is Driven.DECIDED
    assert result(driver, run) == '"yes"'
    assert signals(driver, run) == ["consumed"]
    assert "flow.waiting" not in driver.events(run)
    assert driver.codes() == ["transition_lost"]


def test_a_signal_that_waits_for_the_decision_to_commit_finds_its_wait(bench: Make) -> None:
    """C32, SIG-2: the signal is about to be written when the run is parked."""
    driver, sender = bench(), bench()
    run = driver.start("approve")
    stop = sender.stop("signal")
    sending = Background(lambda: sender.signal(run, "decision", "yes"))
    stop.wait_reached()
    assert driver.deliver(driver.take()) is Driven.DECIDED
    assert driver.status(run) == "waiting"
    stop.go()
    sending.result()
    sender.run()
    assert result(driver, run) == '"yes"'


@postgresql_only
def test_a_signal_stands_behind_the_decision_that_holds_the_runs_row(bench: Make, table_prefix: str) -> None:
    """SIG-2, DRIVE-7: the decision has raised the revision and not written its wait yet; the signal sees it all the same."""
    driver, sender = bench(), bench()
    run = driver.start("approve")
    stop = driver.stop("decision", where="inside", statement="UPDATE {flow_runs}")
    driving = Background(lambda: driver.deliver(driver.take()))
    stop.wait_reached()
    sending = Background(lambda: sender.signal(run, "decision", "yes"))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert driving.result() is Driven.DECIDED
    sending.result()
    assert signals(driver, run) == ["consumed"]
    sender.run()
    assert result(driver, run) == '"yes"'


@postgresql_only
def test_a_decision_stands_behind_the_signal_that_holds_the_runs_row_and_loses(bench: Make, table_prefix: str) -> None:
    """SIG-2, DRIVE-7: the signal has found no wait and is not committed; the decision finds the wake count raised."""
    driver, sender = bench(), bench()
    run = driver.start("approve")
    stop = sender.stop("signal", where="inside", statement="INSERT INTO {signals}")
    sending = Background(lambda: sender.signal(run, "decision", "yes"))
    stop.wait_reached()
    driving = Background(lambda: driver.deliver(driver.take()))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    sending.result()
    assert driving.result() is Driven.DECIDED
    assert result(driver, run) == '"yes"'


def test_an_outcome_and_its_decision_give_way_to_a_signal_that_came_between(bench: Make) -> None:
    """SIG-2, DRIVE-1: the step's outcome is recorded alone, and the drive that follows finds the signal."""
    driver, sender = bench(), bench()
    run = driver.start("late")
    driver.deliver(driver.take())
    driver.overtake("outcome and decision", lambda: sender.signal(run, "decision", "yes"))
    driver.deliver(driver.take())
    driver.run()
    assert result(driver, run) == '["ready","yes"]'
    assert driver.step(run) == ("completed", 1)


def test_the_second_of_two_signals_for_one_wait_is_kept_for_the_next(bench: Make) -> None:
    """SIG-1: both senders are about to write; each wait takes one."""
    one, two = bench(), bench()
    run = one.start("collect")
    one.run()
    stop = two.stop("signal")
    later = Background(lambda: two.signal(run, "decision", 2))
    stop.wait_reached()
    one.signal(run, "decision", 1)
    stop.go()
    later.result()
    assert signals(one, run) == ["consumed", "received"]
    one.run()
    two.run()
    assert result(one, run) == "[1,2]"


@postgresql_only
def test_two_signals_at_once_are_taken_in_the_order_of_their_ids(bench: Make, table_prefix: str) -> None:
    """SIG-1, DRIVE-7: the second stands at the run's row until the first has committed, so an id tells the order of arrival."""
    one, two = bench(), bench()
    run = one.start("collect")
    one.run()
    stop = one.stop("signal", where="inside", statement="INSERT INTO {signals}")
    first = Background(lambda: one.signal(run, "decision", 1))
    stop.wait_reached()
    second = Background(lambda: two.signal(run, "decision", 2))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    first.result()
    second.result()
    one.run()
    two.run()
    assert result(one, run) == "[1,2]"


def test_two_deliveries_of_one_key_are_one_signal(bench: Make) -> None:
    """C35, SIG-3: both have read, neither has written."""
    one, two = bench(), bench()
    run = one.start("collect")
    one.run()
    stop = two.stop("signal")
    repeat = Background(lambda: two.signal(run, "decision", "once", key="delivery-1"))
    stop.wait_reached()
    one.signal(run, "decision", "once", key="delivery-1")
    stop.go()
    repeat.result()
    assert signals(one, run) == ["consumed"]
    one.run()
    assert two.messages == []
    assert one.status(run) == "waiting"


@pytest.mark.parametrize("end", ["cancel", "completion"])
def test_a_signal_that_comes_after_the_end_is_refused_and_leaves_nothing(bench: Make, end: str) -> None:
    """C34, SIG-1: the sender had found the run live when it began."""
    one, two = bench(), bench()
    run = one.start("approve")
    one.run()
    stop = two.stop("signal")
    late = Background(lambda: two.signal(run, "decision", "late"))
    stop.wait_reached()
    if end == "cancel":
        one.cancel(run)
    else:
        one.signal(run, "decision", "first")
        one.run()
    before = one.one("SELECT status, revision, wakes FROM {flow_runs} WHERE id = ?", run)
    stop.go()
    with pytest.raises(CannotSignalTerminalFlowError):
        late.result()
    assert one.one("SELECT status, revision, wakes FROM {flow_runs} WHERE id = ?", run) == before
    assert signals(one, run) == (["consumed"] if end == "completion" else [])
    assert two.messages == []


def test_a_cancel_that_meets_a_signal_wins_or_comes_after_it_and_the_run_ends_once(bench: Make) -> None:
    """SIG-1, STATUS-2: the signal lands before the cancel's write; the cancel looks at the run as it is and still ends it."""
    one, two = bench(), bench()
    run = one.start("approve")
    one.run()
    one.overtake("cancel", lambda: two.signal(run, "decision", "yes"))
    assert one.cancel(run)
    two.run()
    assert one.status(run) == "cancelled"
    assert one.events(run).count("flow.cancelled") == 1
    assert one.all("SELECT status FROM {waits} WHERE run_id = ?", run) == [("consumed",)]


def test_a_recorded_signal_is_sent_once_by_two_drives_of_one_run(bench: Make) -> None:
    """SIG-3: both drives come to the same sequence; the second finds what the first has recorded, and sends nothing."""
    one, two = bench(), bench()
    target = one.start("collect")
    one.run()
    run = one.start("tell", target)
    message = one.take()
    one.overtake("side effect", lambda: two.deliver(message))
    one.deliver(message)
    assert signals(one, target) == ["consumed"]
    assert one.all("SELECT sequence, kind FROM {side_effects} WHERE run_id = ?", run) == [(1, "signal")]
    assert one.status(run) == "waiting"


def test_a_recorded_signal_is_not_sent_by_a_drive_whose_run_has_ended(bench: Make) -> None:
    """SIG-3, STATUS: a cancelled run signals nobody, although its function was under way."""
    one, two = bench(), bench()
    target = one.start("approve")
    one.run()
    run = one.start("tell", target)
    one.overtake("side effect", lambda: two.cancel(run) and None)
    assert one.deliver(one.take()) is Driven.ENDED
    assert signals(one, target) == []
    assert one.status(target) == "waiting"


@postgresql_only
def test_two_runs_that_signal_each_other_lock_in_one_order(bench: Make, table_prefix: str) -> None:
    """SIG-3, DRIVE-7: one holds both rows, the other stands at its first lock; neither is a deadlock's victim."""
    one, two = bench(), bench()
    first = one.start("tell", "b-run", run_id="a-run")
    two.start("tell", "a-run", run_id="b-run")
    stop = one.stop("side effect", where="inside", statement="{side_effects}")
    ahead = Background(lambda: one.deliver(one.take()))
    stop.wait_reached()
    behind = Background(lambda: two.deliver(two.take()))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    ahead.result()
    behind.result()
    one.run()
    two.run()
    assert result(one, first) == '"b-run"'
    assert result(one, "b-run") == '"a-run"'


def test_a_retried_send_with_a_key_finds_the_signal_whose_commit_nobody_knew(bench: Make) -> None:
    """SIG-3, QUEUE-8: the connection was lost while COMMIT was under way, and it had been carried out."""
    one = bench()
    run = one.start("approve")
    one.run()
    one.fail("signal", happened=True)
    with suppress(Exception):
        one.signal(run, "decision", "yes", key="k")
    with suppress(CannotSignalFlowError):
        one.signal(run, "decision", "yes", key="k")
    assert signals(one, run) == ["consumed"]
    one.run()
    assert result(one, run) == '"yes"'


def test_a_signal_that_comes_after_the_deadline_of_its_wait_is_kept_for_the_next(bench: Make, clock: ManualClock) -> None:
    """SIG-2, C37: nobody had ended the overdue wait yet; it has timed out all the same, as the recorded moments say."""
    one, two = bench(), bench()
    run = one.start("patient")
    one.run()
    stop = two.stop("signal")
    sending = Background(lambda: two.signal(run, "decision", "yes"))
    stop.wait_reached()
    clock.advance(60)
    stop.go()
    sending.result()
    assert one.all("SELECT status FROM {waits} WHERE run_id = ?", run) == [("timed_out",)]
    assert signals(one, run) == ["received"]
    two.run()
    assert result(one, run) == '["late","yes"]'
    assert [word for word in one.events(run) if word.startswith("signal.")] == [
        "signal.received", "signal.timed_out", "signal.consumed",
    ]  # fmt: skip
