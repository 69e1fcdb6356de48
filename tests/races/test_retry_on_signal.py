"""Parked steps that meet somebody: the timeout of their wait, a cancel, a second drive, a message or a worker of an earlier cycle.

As in ``test_interleavings.py``: one worker stands at a named point while another does what must happen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import retry_on_signal, timers
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.reports import read_run
from tests.support.bench import Background, Bench

Make = Callable[..., Bench]


class Bank:
    """Says what it is told to, in turn; what is left unsaid is a yes."""

    def __init__(self) -> None:
        self.answers: list[Callable[[], Any]] = []
        self.asked = 0

    def charge(self) -> Any:
        self.asked += 1
        return self.answers.pop(0)() if self.answers else "charged"

    def declare(self, bench: Bench) -> None:
        charge = bench.actor(self.charge, actor_name="charge")

        def order(flow: Any) -> Any:
            return flow.action(charge).reclaim_stale_after(60).retry_on_signal("top-up", wait_seconds=600).run()

        bench.workflow(order)


def declined() -> Any:
    raise ValueError("no money")


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def bench(address: str, table_prefix: str, clock: ManualClock, bank: Bank) -> Iterator[Make]:
    """``bench()`` makes one more worker on this test's tables."""
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(address, bank.declare, prefix=table_prefix, clock=clock, settings=Settings(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def parked(worker: Bench, bank: Bank) -> str:
    bank.answers.append(declined)
    run_id = worker.start("order")
    worker.run()
    assert worker.step(run_id) == ("awaiting_retry", 1)
    return run_id


def wait(worker: Bench, run_id: str) -> str | None:
    row = worker.one("SELECT status FROM {waits} WHERE run_id = ? AND sequence = 1 AND kind = 'retry'", run_id)
    return None if row is None else str(row[0])


def cycle(worker: Bench, run_id: str) -> int:
    row = worker.one("SELECT cycle FROM {action_runs} WHERE run_id = ? AND sequence = 1", run_id)
    assert row is not None
    return int(row[0])


def time_out(worker: Bench, run_id: str) -> bool:
    """What ends the wait once its time is over; whether it was this call that did. The drive is left to a message."""
    return bool(timers.fire(worker.engine, run_id, worker.sender, here=False).waits)


def test_a_parked_step_that_a_signal_runs_again_does_not_count_as_one_that_has_not_reported(bench: Make, bank: Bank) -> None:
    """RSIG-1: its failure is known, and nothing of its new cycle has begun: what a worker has given back in its middle looks otherwise."""
    worker = bench()
    run_id = parked(worker, bank)
    worker.signal(run_id, "top-up")
    assert worker.deliver(worker.take()) is Driven.DECIDED
    assert worker.step(run_id) == ("pending", 1)
    report = worker.store.read(lambda tx: read_run(tx, run_id, settings=Settings(), tries_of=lambda *_: None))
    assert report is not None
    assert not report.steps[0].was_begun


@pytest.mark.parametrize("how", ["signal", "signal_retry"])
@pytest.mark.parametrize("winner", ["signal", "timeout"])
def test_a_signal_and_the_timeout_of_a_parked_step_have_one_winner(
    bench: Make, bank: Bank, clock: ManualClock, winner: str, how: str
) -> None:
    """RSIG-2, SIG-2: either the step runs again and the timeout changes nothing, or it has failed for good and the signal wakes nothing."""
    worker, other = bench(), bench()
    run_id = parked(worker, bank)

    def send() -> Any:
        if how == "signal":
            return other.signal(run_id, "top-up")
        return retry_on_signal.answer_all(other.engine, run_id, other.sender)

    if winner == "signal":
        clock.advance(599)
        send()
        clock.advance(2)
        assert not time_out(worker, run_id)
        other.run()
        assert (worker.status(run_id), worker.step(run_id), cycle(worker, run_id)) == ("completed", ("completed", 2), 1)
        assert wait(worker, run_id) == "consumed"
        return
    clock.advance(599)
    stop = other.stop("signal" if how == "signal" else "signal retry")
    sending = Background(send)
    stop.wait_reached()
    clock.advance(2)
    assert time_out(worker, run_id)
    stop.go()
    if how == "signal":
        sending.result()
    else:
        with pytest.raises(retry_on_signal.NothingAwaitsRetryError):
            sending.result()
    worker.run()
    assert (worker.status(run_id), worker.step(run_id), cycle(worker, run_id)) == ("failed", ("failed", 1), 0)
    assert wait(worker, run_id) == "timed_out"
    assert bank.asked == 1


def test_a_signal_that_comes_while_the_step_is_being_parked_runs_it_again(bench: Make, bank: Bank) -> None:
    """SIG-2, RSIG-1: between the look at what has arrived and the park; the decision loses, and the next one finds the signal."""
    worker, other = bench(), bench()
    bank.answers.append(declined)
    run_id = worker.start("order")
    worker.deliver(worker.take())
    delivery = worker.deliver(worker.take())
    worker.overtake("outcome and decision", lambda: other.signal(run_id, "top-up"))
    worker.runner.give_up(delivery)
    worker.run()
    assert (worker.status(run_id), worker.step(run_id), cycle(worker, run_id)) == ("completed", ("completed", 2), 1)
    assert wait(worker, run_id) is None
    assert worker.all("SELECT status FROM {signals}") == [("consumed",)]


@pytest.mark.claims_alone
def test_a_message_of_an_earlier_cycle_cannot_claim(bench: Make, bank: Bank) -> None:
    """RSIG-1, CLAIM-1: a redelivery of what ran before the park; while the step is parked, pending again, and running again."""
    worker, other = bench(), bench()
    bank.answers += [declined, declined]
    run_id = worker.start("order")
    worker.deliver(worker.take())
    old = worker.message(worker.take())
    worker.runner.give_up(worker.deliver(old))
    for status in ("awaiting_retry", "pending"):
        assert worker.step(run_id) == (status, 1)
        assert other.deliver(old).claim is None
        assert worker.step(run_id) == (status, 1)
        if status == "awaiting_retry":
            other.signal(run_id, "top-up")
            other.deliver(other.take())
    message = other.take()
    stop = worker.stop("failed try")
    running = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    assert worker.step(run_id) == ("running", 2)
    assert other.deliver(old).claim is None
    stop.go()
    worker.runner.give_up(running.result())
    assert (worker.step(run_id), cycle(worker, run_id)) == (("awaiting_retry", 2), 1)
    assert bank.asked == 2
    assert other.codes() == ["claim_lost"] * 3


def test_a_straggler_of_an_earlier_cycle_cannot_flip_a_step_that_waits_to_run_again(
    bench: Make, bank: Bank, clock: ManualClock
) -> None:
    """FENCE-1, RSIG-1: a worker that stalled, was taken over, and reports success after the park and the signal."""
    slow, worker = bench(), bench()
    bank.answers += [lambda: "charged by the first", declined]
    run_id = slow.start("order")
    slow.deliver(slow.take())
    message = slow.take()
    stop = slow.stop("outcome and decision")
    straggler = Background(lambda: slow.deliver(message))
    stop.wait_reached()
    clock.advance(61)
    worker.runner.give_up(worker.deliver(message))
    assert worker.step(run_id) == ("awaiting_retry", 2)
    worker.signal(run_id, "top-up")
    worker.deliver(worker.take())
    assert (worker.step(run_id), cycle(worker, run_id)) == (("pending", 2), 1)
    stop.go()
    straggler.result()
    assert slow.codes() == ["outcome_rejected"]
    assert worker.step(run_id) == ("pending", 2)
    worker.run()
    assert (worker.status(run_id), worker.step(run_id)) == ("completed", ("completed", 3))


def test_a_cancel_that_lands_first_is_not_undone_by_a_retry(bench: Make, bank: Bank) -> None:
    """RSIG-2, STATUS-2: the signal has come, and the drive that would run the step again stands before its write."""
    worker, other = bench(), bench()
    run_id = parked(worker, bank)
    other.signal(run_id, "top-up")
    worker.overtake("decision", lambda: other.cancel(run_id))
    assert worker.deliver(other.take()) is Driven.ENDED
    assert (worker.status(run_id), worker.step(run_id), cycle(worker, run_id)) == ("cancelled", ("cancelled", 1), 0)
    assert worker.messages == []


def test_a_cancel_that_lands_before_the_park_leaves_no_open_wait(bench: Make, bank: Bank) -> None:
    """RSIG-2, STATUS-2: the step is cancelled with its run; the failure that is reported then is refused."""
    worker, other = bench(), bench()
    bank.answers.append(declined)
    run_id = worker.start("order")
    worker.deliver(worker.take())
    delivery = worker.deliver(worker.take())
    worker.overtake("outcome and decision", lambda: other.cancel(run_id))
    worker.runner.give_up(delivery)
    assert (worker.status(run_id), worker.step(run_id)) == ("cancelled", ("cancelled", 1))
    assert wait(worker, run_id) is None
    assert worker.messages == []


@pytest.mark.claims_alone
def test_two_drives_that_see_one_signal_run_the_step_again_once(bench: Make, bank: Bank) -> None:
    """DRIVE-1, RSIG-1: one decision lands; the other looks again and finds nothing to do."""
    worker, other = bench(), bench()
    run_id = parked(worker, bank)
    worker.signal(run_id, "top-up")
    stop = worker.stop("decision")
    first = Background(lambda: worker.deliver(worker.take()))
    stop.wait_reached()
    assert other.deliver(Outgoing("drive", run_id, "order", "default")) is Driven.DECIDED
    stop.go()
    assert first.result() is Driven.IDLE
    assert (len(other.messages), worker.messages) == (1, [])
    assert cycle(worker, run_id) == 1
    other.run()
    assert (worker.status(run_id), bank.asked) == ("completed", 2)


@pytest.mark.parametrize("signalled", [False, True], ids=["parked", "retried at once"])
@pytest.mark.parametrize("happened", [True, False], ids=["had happened", "had not"])
def test_a_park_whose_commit_nobody_knew_of_is_recognised(bench: Make, bank: Bank, signalled: bool, happened: bool) -> None:
    """FENCE-1, RSIG-1: outcome and park, or outcome and retry, are one transaction; written again, it finds its own."""
    worker = bench()
    bank.answers.append(declined)
    run_id = worker.start("order")
    if signalled:
        worker.signal(run_id, "top-up")
    worker.deliver(worker.take())
    delivery = worker.deliver(worker.take())
    worker.fail("outcome and decision", happened=happened)
    worker.runner.give_up(delivery)
    assert worker.step(run_id) == ("pending" if signalled else "awaiting_retry", 1)
    assert worker.events(run_id).count("action.given_up") == 1
    assert worker.codes() == []
    if not signalled:
        assert wait(worker, run_id) == "waiting"
        worker.signal(run_id, "top-up")
    worker.run()
    assert (worker.status(run_id), worker.step(run_id), bank.asked) == ("completed", ("completed", 2), 2)


def test_a_drive_that_was_lost_between_the_signal_and_the_retry_is_made_up_for(bench: Make, bank: Bank) -> None:
    """DRIVE-2: the signal is stored and its wake unseen, so whoever drives next runs the step again."""
    worker, other = bench(), bench()
    run_id = parked(worker, bank)
    worker.signal(run_id, "top-up")
    worker.take()  # and its process dies
    assert other.deliver(Outgoing("drive", run_id, "order", "default")) is Driven.DECIDED
    assert (worker.step(run_id), cycle(worker, run_id)) == (("pending", 1), 1)
    other.run()
    assert worker.status(run_id) == "completed"


def test_a_retry_whose_message_was_lost_is_sent_again_after_the_grace(bench: Make, bank: Bank, clock: ManualClock) -> None:
    """DOCTOR-1, RSIG-1: counted from the retry; the row itself is old."""
    from dramatiq_saga.recovery.doctor import repair

    worker = bench()
    clock.advance(1)
    run_id = parked(worker, bank)
    clock.advance(500)
    worker.signal(run_id, "top-up")
    worker.deliver(worker.take())
    worker.take()  # lost
    clock.advance(59)
    assert repair(worker.engine, worker.sender).steps == 0
    clock.advance(2)
    assert repair(worker.engine, worker.sender).steps == 1
    [again] = worker.messages
    assert (again.cycle, again.tries, again.attempts) == (1, 0, 1)
    worker.run()
    assert worker.status(run_id) == "completed"
