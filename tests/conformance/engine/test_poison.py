"""A step that kills its workers: it fails instead of killing one more (RECLAIM-6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dramatiq
import pytest
from structlog.testing import capture_logs

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.claim import Claim, ClaimAttempt
from dramatiq_saga.engine.drive import drive
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.engine.sender import InlineSender
from dramatiq_saga.errors import FlowFailedError
from dramatiq_saga.events import ActionStarted, subscribe, unsubscribe
from dramatiq_saga.inline import _InlineMessage, run_message
from dramatiq_saga.middleware import build_message, middleware_of
from dramatiq_saga.step import Delivery, Runner


class Shop:
    """One step that may be claimed a few times, on a clock of our own."""

    def __init__(self, path: Path, *, limit: int | None = None, settings: Settings | None = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.broker = SQLiteBroker(path, clock=self.clock)
        self.broker.add_middleware(SagaMiddleware(settings=settings))
        self.ran: list[str] = []

        @dramatiq.actor(broker=self.broker, max_retries=0)
        def charge() -> None:
            self.ran.append("charge")

        @dramatiq.actor(broker=self.broker, max_retries=0)
        def refund() -> None:
            self.ran.append("refund")

        @workflow(broker=self.broker)
        def checkout(flow: Flow) -> None:
            step = flow.action(charge).compensate_with(refund).compensate_step_on_self_failure().reclaim_stale_after(10)
            (step.max_claims(limit) if limit else step).run()

        self.handle: Any = checkout.send_with_options(**options)
        self.sender = InlineSender()
        self.runner = Runner(middleware_of(self.broker).engine(self.broker), self.broker, self.sender, inline=True)
        drive(self.runner.engine, self.handle.id, self.sender)
        self.message = self.sender.queue.popleft()

    def lose_a_worker(self) -> None:
        """A claim whose worker is never heard of again, and the time after which another may take over."""
        job = Delivery(_InlineMessage(build_message(self.broker, self.message))).job
        assert job is not None
        found = ClaimAttempt(self.runner.engine, job, nonce=str(self.clock.now())).run()
        assert isinstance(found, Claim)
        self.clock.advance(11)

    def deliver(self, message: Outgoing) -> None:
        run_message(self.runner, message)
        while self.sender.queue:
            run_message(self.runner, self.sender.queue.popleft())


def test_a_step_that_may_be_claimed_once_is_not_run_again_and_its_undo_learns_that_nobody_knows(sqlite_path: Path) -> None:
    """RECLAIM-6, C20: declared at most once, a crash ends the step as interrupted; with an undo declared safe it is undone."""
    shop = Shop(sqlite_path, limit=1)
    shop.lose_a_worker()
    with capture_logs() as logs:
        shop.deliver(shop.message)
    (step,) = shop.handle.actions()
    assert (step.status, step.given_up) == ("failed", True)
    assert step.error["type"].endswith("StepInterruptedError")
    once = "it was claimed 1 time and never reported an outcome, and it may be begun only once; nobody knows how far it came"
    assert step.error["message"] == once, "max_claims(1) was meant"
    assert [
        (line["log_level"], line["sequence"], line["actor"], line["error"])
        for line in logs
        if line["event"] == "step_interrupted"
    ] == [("error", 1, "charge", once)]
    with pytest.raises(FlowFailedError, match=r"failed: step 1 \(charge\) was interrupted: it was claimed 1 time") as failed:
        shop.handle.result()
    assert (failed.value.cause or {})["type"].endswith("StepInterruptedError")
    assert shop.ran == ["refund"]
    assert [undo.undoes for undo in shop.handle.compensations()] == ["unknown"]
    assert (shop.handle.status, shop.handle.rollback) == ("failed", "done")


@pytest.mark.parametrize("lost", [1, 2])
def test_claims_below_the_limit_run_the_step(sqlite_path: Path, lost: int) -> None:
    """RECLAIM-6: the settings' limit counts where the step has none, and an outcome starts the count afresh."""
    shop = Shop(sqlite_path, limit=None, settings=Settings.from_mapping({"reclaim.max_claims": 2}))
    for _ in range(lost):
        shop.lose_a_worker()
    shop.deliver(shop.message)
    assert shop.ran == (["charge"] if lost < 2 else ["refund"])
    assert shop.handle.status == ("completed" if lost < 2 else "failed")
    if lost == 2:
        with pytest.raises(
            FlowFailedError, match="2 times and never reported an outcome; mend what kills it, or raise max_claims"
        ):
            shop.handle.result()


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_worker_that_stalls_before_a_body_that_may_be_claimed_once_claims_again(sqlite_path: Path, taken_over: bool) -> None:
    """RECLAIM-6: nobody has died of it. One that comes meanwhile cannot know that, and the body never runs."""
    shop = Shop(sqlite_path, limit=1)

    def stall(event: ActionStarted) -> None:
        if event.action.attempts == 1:
            shop.clock.advance(11)
            if taken_over:
                shop.deliver(shop.message)

    subscribe(stall, ActionStarted)
    try:
        shop.deliver(shop.message)
    finally:
        unsubscribe(stall)
    (step,) = shop.handle.actions()
    assert step.attempts == 2
    assert (step.status, shop.ran) == (("failed", ["refund"]) if taken_over else ("completed", ["charge"]))


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_worker_that_stalls_between_claim_and_body_claims_again(sqlite_path: Path, taken_over: bool) -> None:
    """DRIVE-4, CLAIM-1: a recorded step does not run again because its first worker was asleep before it began."""
    shop = Shop(sqlite_path, limit=None)
    stalled: list[int] = []

    def stall(event: ActionStarted) -> None:
        if not stalled:  # listeners run between the claim and the body
            stalled.append(event.action.attempts)
            shop.clock.advance(11)
            if taken_over:
                shop.deliver(shop.message)

    subscribe(stall, ActionStarted)
    try:
        shop.deliver(shop.message)
    finally:
        unsubscribe(stall)
    assert stalled == [1]
    assert shop.ran == ["charge"]
    (step,) = shop.handle.actions()
    assert (step.status, step.attempts) == ("completed", 2)
    assert shop.handle.status == "completed"


def test_a_worker_that_stalls_until_its_run_is_overdue_does_not_begin_its_step(sqlite_path: Path) -> None:
    """EXPIRE-1, CLAIM-1: past its reclaim deadline as well, so it claims again, which cannot be; its own mark on the row is no claim."""
    shop = Shop(sqlite_path, expires_in=10)

    def stall(event: ActionStarted) -> None:
        shop.clock.advance(11)

    subscribe(stall, ActionStarted)
    try:
        shop.deliver(shop.message)
    finally:
        unsubscribe(stall)
    assert shop.ran == ["refund"]  # of a step that may have run, as far as anybody knows
    assert shop.handle.status == "expired"
