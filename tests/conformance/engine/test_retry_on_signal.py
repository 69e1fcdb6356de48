"""Retry on signal: a step that has failed for good waits for a signal and runs again in its row (RSIG-1 … RSIG-3)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dramatiq_saga import (
    Flow,
    FlowNotFoundError,
    RetryContext,
    RetryPolicy,
    Settings,
    StepFailedError,
    current_step,
    events,
    get_flow,
)
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import retry_on_signal, signals, timers
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import CannotSignalTerminalFlowError, ChildFailedError, NothingAwaitsRetryError, WouldBlockError
from dramatiq_saga.workflow import workflows_of
from tests.support.application import Application
from tests.support.bench import Bench
from tests.support.waiting import eventually

Declare = Callable[[Bench], None]
MakeBench = Callable[..., Bench]


class Declined(Exception):
    """The card has no money on it."""


class Overdrawn(Declined):
    """A kind of it."""


class Card:
    """A charge that fails until there is money, and what became of each try."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.keys: list[str] = []
        self.attempts: list[int] = []

    def charge(self) -> str:
        step = current_step()
        assert step is not None
        self.keys.append(step.idempotency_key)
        self.attempts.append(step.attempt)
        if self.failures:
            raise self.failures.pop(0)
        return "charged"


def shop(card: Card, *, describe: Callable[[Any], Any], **options: Any) -> Declare:
    """A workflow of a step that can be undone and a charge, described by ``describe``."""

    def declare(bench: Bench) -> None:
        reserve = bench.actor(lambda: "stock", actor_name="reserve")
        release = bench.actor(lambda: None, actor_name="release")
        charge = bench.actor(card.charge, actor_name="charge", **options)

        def order(flow: Flow) -> Any:
            flow.action(reserve).compensate_with(release).run()
            return describe(flow.action(charge)).run()

        bench.workflow(order, name="order")

    return declare


def waiting(**options: Any) -> Callable[[Any], Any]:
    return lambda step: step.retry_on_signal("top-up", **options)


def signal(bench: Bench, run_id: str, name: str = "top-up") -> None:
    signals.send(bench.engine, signals.Signal(run_id, name, b"null"), bench.sender)


def row(bench: Bench, run_id: str, sequence: int = 2) -> dict[str, Any]:
    names = ("status", "given_up", "attempts", "tries", "claims", "cycle", "ended_at")
    found = bench.one(f"SELECT {', '.join(names)} FROM {{action_runs}} WHERE run_id = ? AND sequence = ?", run_id, sequence)
    assert found is not None
    return dict(zip(names, found, strict=True))


def wait(bench: Bench, run_id: str, sequence: int = 2) -> tuple[Any, ...] | None:
    return bench.one(
        "SELECT kind, name, status, cycle, due_at FROM {waits} WHERE run_id = ? AND sequence = ?", run_id, sequence
    )


@pytest.fixture
def bench_on(database_url: str, table_prefix: str, tables_stand: None, request: pytest.FixtureRequest) -> MakeBench:
    """``bench_on(declare)``: a worker that the test holds in its hands, on each database."""

    def make(declare: Declare, **options: Any) -> Bench:
        bench = Bench(database_url, declare, prefix=table_prefix, clock=ManualClock(), **options)
        request.addfinalizer(bench.close)
        return bench

    return make


@pytest.fixture
def bench_here(sqlite_path: Any, request: pytest.FixtureRequest) -> MakeBench:
    """The same, on a file: for what is decided before the database is asked."""

    def make(declare: Declare, **options: Any) -> Bench:
        bench = Bench(f"sqlite:///{sqlite_path}", declare, clock=ManualClock(), **options)
        request.addfinalizer(bench.close)
        return bench

    return make


def parked(bench: Bench, **options: Any) -> str:
    """A run whose charge is parked."""
    run_id = bench.start("order", **options)
    bench.run()
    assert (bench.status(run_id), row(bench, run_id)["status"]) == ("waiting", "awaiting_retry")
    return run_id


# --- the round trip --------------------------------------------------------------------------------------------------


def test_a_step_that_failed_is_parked_and_the_signal_runs_it_again(bench_on: MakeBench) -> None:
    """RSIG-1, FENCE-4: same row and sequence, tries renewed, attempts goes on, a new key; nothing was rolled back meanwhile."""
    card = Card(Declined("no money"), Declined("still none"))
    bench = bench_on(shop(card, describe=waiting(), max_retries=0))
    run_id = parked(bench)
    assert row(bench, run_id) == {
        "status": "awaiting_retry", "given_up": False, "attempts": 1, "tries": 1, "claims": 0, "cycle": 0, "ended_at": None,
    }  # fmt: skip
    assert wait(bench, run_id) == ("retry", "top-up", "waiting", 0, None)
    assert bench.undos(run_id) == []
    assert bench.messages == []

    signal(bench, run_id)
    [drive] = bench.messages
    assert drive.kind == "drive"
    bench.deliver(bench.take())
    [again] = bench.messages
    assert (again.kind, again.sequence, again.cycle, again.attempts, again.tries) == ("step", 2, 1, 1, 0)
    found = row(bench, run_id)
    assert (found["status"], found["tries"], found["attempts"], found["cycle"]) == ("pending", 0, 1, 1)
    assert bench.status(run_id) == "running"
    bench.run()
    assert row(bench, run_id)["status"] == "awaiting_retry"
    assert wait(bench, run_id) == ("retry", "top-up", "waiting", 1, None)

    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "completed"
    assert (row(bench, run_id)["attempts"], row(bench, run_id)["cycle"]) == (3, 2)
    assert card.attempts == [1, 2, 3]
    assert card.keys == [f"{run_id}:2:0", f"{run_id}:2:1", f"{run_id}:2:2"]
    kinds = [kind for kind in bench.events(run_id) if kind.endswith(("retry", "retried", "given_up"))]
    assert kinds == ["action.given_up", "action.awaiting_retry", "action.retried"] * 2
    assert bench.codes() == []


def test_the_payload_of_the_signal_is_not_passed_to_the_actor(bench_here: MakeBench) -> None:
    """RSIG-1: the step runs again with the arguments that it was scheduled with."""
    given: list[Any] = []

    def declare(bench: Bench) -> None:
        def body(amount: int) -> None:
            given.append(amount)
            if len(given) == 1:
                raise Declined

        charge = bench.actor(body, actor_name="charge")
        bench.workflow(lambda flow: flow.action(charge, 5).retry_on_signal("top-up").run(), name="order")

    bench = bench_here(declare)
    run_id = bench.start("order")
    bench.run()
    signals.send(bench.engine, signals.Signal(run_id, "top-up", b'{"amount": 7}'), bench.sender)
    bench.run()
    assert given == [5, 5]
    assert bench.status(run_id) == "completed"


def test_native_tries_come_first_in_every_cycle(bench_on: MakeBench) -> None:
    """RSIG-1, RSIG-2, NATIVE-1: the step is parked once Dramatiq gives it up, and its tries are renewed by the signal."""
    card = Card(*[Declined(str(number)) for number in range(4)])
    bench = bench_on(shop(card, describe=waiting(), max_retries=1))
    run_id = bench.start("order")

    def deliver_all() -> None:
        """Like a worker with one retry: a failed try is followed by another, the second failure is the last."""
        while bench.messages:
            message = bench.message(bench.take())
            delivery = bench.deliver(message)
            if getattr(delivery, "state", "") == "failed":
                assert row(bench, run_id)["status"] == "failed", "between tries it is not parked"
                again = bench.deliver(message)
                assert again.state == "failed"
                bench.runner.give_up(again)

    deliver_all()
    assert row(bench, run_id)["tries"] == 2
    assert row(bench, run_id)["status"] == "awaiting_retry"
    signal(bench, run_id)
    deliver_all()
    assert (row(bench, run_id)["attempts"], row(bench, run_id)["tries"], row(bench, run_id)["cycle"]) == (4, 2, 1)


def test_a_signal_that_came_before_the_park_is_used_up_at_once(bench_on: MakeBench) -> None:
    """RSIG-1, SIG-1: kept while the step was at work; the step is never parked, and the signal is spent."""
    card = Card(Declined("no money"))
    bench = bench_on(shop(card, describe=waiting()))
    run_id = bench.start("order")
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "completed"
    assert wait(bench, run_id) is None
    kinds = bench.events(run_id)
    assert "action.awaiting_retry" not in kinds
    assert [kind for kind in kinds if kind in ("signal.consumed", "action.retried")] == ["signal.consumed", "action.retried"]
    assert bench.one("SELECT status FROM {signals} WHERE run_id = ?", run_id) == ("consumed",)


def test_each_signal_spends_one_cycle(bench_on: MakeBench) -> None:
    """RSIG-1, SIG-1: two signals that came early run it again twice, in their order; the third failure waits."""
    card = Card(Declined("1"), Declined("2"), Declined("3"))
    bench = bench_on(shop(card, describe=waiting()))
    run_id = bench.start("order")
    signal(bench, run_id)
    signal(bench, run_id)
    bench.run()
    assert (row(bench, run_id)["status"], row(bench, run_id)["cycle"]) == ("awaiting_retry", 2)


def test_a_signal_of_another_name_wakes_nothing(bench_here: MakeBench) -> None:
    """SIG-1: it is kept for whoever asks for it."""
    bench = bench_here(shop(Card(Declined()), describe=waiting()))
    run_id = parked(bench)
    signal(bench, run_id, "something-else")
    bench.run()
    assert row(bench, run_id)["status"] == "awaiting_retry"


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_a_spent_budget_is_a_failure(bench_on: MakeBench) -> None:
    """RSIG-2, RSIG-3: once the signals that it may use are used, the next failure fails the run and its work is undone."""
    bench = bench_on(shop(Card(Declined("1"), Declined("2")), describe=waiting(max_retries=1)))
    run_id = parked(bench)
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "failed"
    assert row(bench, run_id)["status"] == "failed"
    assert row(bench, run_id)["given_up"]
    assert bench.undos(run_id) == [("release", "completed")]


def test_a_budget_of_none_at_all_never_parks(bench_here: MakeBench) -> None:
    """RSIG-3: 0 is a number."""
    bench = bench_here(shop(Card(Declined("1")), describe=waiting(max_retries=0)))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    assert wait(bench, run_id) is None


def test_the_settings_say_how_often_where_a_step_does_not(bench_here: MakeBench) -> None:
    """RSIG-3: actions.retry_on_signal.max_retries; the step's own number counts before it."""
    settings = Settings.from_mapping({"actions.retry_on_signal.max_retries": 0})
    bench = bench_here(shop(Card(Declined("1")), describe=waiting()), settings=settings)
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"


def test_the_budget_of_the_row_counts_whatever_the_code_says_later(bench_on: MakeBench) -> None:
    """RSIG-3: budget, wait and signal are read from the row; a deploy changes them for steps that are scheduled after it."""
    said: list[Any] = [waiting(max_retries=1)]
    bench = bench_on(shop(Card(Declined("1"), Declined("2")), describe=lambda step: said[0](step)))
    run_id = parked(bench)
    said[0] = lambda step: step.retry_on_signal("something-else", max_retries=10)
    signal(bench, run_id)
    bench.run()
    assert (bench.status(run_id), row(bench, run_id)["cycle"]) == ("failed", 1)


def test_a_wait_that_times_out_is_a_failure_for_good(bench_on: MakeBench) -> None:
    """RSIG-2: the deadline counts from the park; a signal that comes later changes nothing."""
    bench = bench_on(shop(Card(Declined("1")), describe=waiting(wait_seconds=timedelta(hours=1))))
    run_id = parked(bench)
    found = wait(bench, run_id)
    assert found is not None
    assert found[4] == bench.store.clock.now() + 3_600_000
    bench.store.clock.advance(3_601)  # type: ignore[attr-defined]
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "failed"
    found = wait(bench, run_id)
    assert found is not None
    assert found[2] == "timed_out"
    assert bench.one("SELECT retry_policy FROM {action_runs} WHERE run_id = ? AND sequence = 2", run_id) == (
        '{"signal": "top-up", "max_retries": null, "wait_ms": 3600000, "over": "timed_out"}',
    )


def test_a_park_ends_at_its_time_without_a_signal_or_a_sweep(every_app: Application) -> None:
    """TIMER-1, RSIG-2: an alarm, or the workers' loop, ends the wait; the failure takes its course."""
    reserve, release = every_app.step("reserve"), every_app.step("release")
    charge = every_app.step("charge", raises=Declined("no money"))

    @every_app.workflow
    def order(flow: Flow) -> Any:
        flow.action(reserve).compensate_with(release).run()
        return flow.action(charge).retry_on_signal("top-up", wait_seconds=0.1).run()

    handle = every_app.run(order)
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert every_app.sql("SELECT status FROM {waits} WHERE run_id = ?", handle.id) == [("timed_out",)]
    assert [kind for kind in every_app.types(handle) if kind in ("action.awaiting_retry", "signal.timed_out")] == [
        "action.awaiting_retry",
        "signal.timed_out",
    ]


def test_the_deadline_of_a_step_goes_on_while_it_is_parked(bench_on: MakeBench) -> None:
    """EXPIRE-1, RSIG-2: it expires, its wait is closed with it, and a signal finds nothing."""
    bench = bench_on(shop(Card(Declined("1")), describe=lambda step: waiting()(step).expires_in(60)))
    run_id = parked(bench)
    bench.store.clock.advance(61)  # type: ignore[attr-defined]
    assert timers.fire(bench.engine, run_id, bench.sender).steps == 1
    bench.run()
    assert (bench.status(run_id), row(bench, run_id)["status"]) == ("failed", "expired")
    found = wait(bench, run_id)
    assert found is not None
    assert found[2] == "cancelled"
    error = bench.one("SELECT error FROM {flow_runs} WHERE id = ?", run_id)
    assert error is not None
    assert "StepExpiredError" in error[0]


def test_a_second_park_waits_its_whole_time_again(bench_here: MakeBench) -> None:
    """RSIG-2: the wait is counted from each park."""
    bench = bench_here(shop(Card(Declined("1"), Declined("2")), describe=waiting(wait_seconds=60)))
    run_id = parked(bench)
    bench.store.clock.advance(59)  # type: ignore[attr-defined]
    signal(bench, run_id)
    bench.run()
    found = wait(bench, run_id)
    assert found is not None
    assert found[4] == bench.store.clock.now() + 60_000


def test_an_optional_step_falls_back_when_its_signals_are_over(bench_on: MakeBench) -> None:
    """RSIG-2, OPT-1: the fallback comes after the retries on signal, and only then is the row optional_failed."""
    bench = bench_on(
        shop(
            Card(Declined("1"), Declined("2")),
            describe=lambda step: waiting(max_retries=1)(step).fallback_value_on_fail("owed"),
        )
    )
    run_id = parked(bench)
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "completed"
    assert row(bench, run_id)["status"] == "optional_failed"
    assert bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run_id) == (b'"owed"',)
    assert bench.events(run_id).count("action.optional_failed") == 1


@pytest.mark.parametrize("how", ["cancel", "compensate"])
def test_a_run_that_ends_takes_what_is_parked_with_it(bench_on: MakeBench, how: str) -> None:
    """RSIG-2, STATUS-2: the step and its wait are cancelled; a signal is refused."""
    bench = bench_on(shop(Card(Declined("1")), describe=waiting()))
    run_id = parked(bench)
    assert getattr(bench, how)(run_id)
    bench.run()
    assert (bench.status(run_id), row(bench, run_id)["status"]) == ("cancelled", "cancelled")
    found = wait(bench, run_id)
    assert found is not None
    assert found[2] == "cancelled"
    assert bench.undos(run_id) == ([("release", "completed")] if how == "compensate" else [])


def test_work_whose_result_cannot_be_stored_is_not_done_again(bench_here: MakeBench) -> None:
    """CODEC-2, RSIG-2: it was done; another cycle, with another key, would do it twice."""

    def declare(bench: Bench) -> None:
        charge = bench.actor(lambda: float("nan"), actor_name="charge")
        refund = bench.actor(lambda: None, actor_name="refund")
        bench.workflow(lambda flow: flow.action(charge).compensate_with(refund).retry_on_signal("top-up").run(), name="order")

    bench = bench_here(declare)
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    assert bench.undos(run_id) == [("refund", "completed")]


def test_a_failure_that_the_workflow_catches_is_settled_once(bench_on: MakeBench) -> None:
    """RSIG-2: a run that goes on after the failure finds it settled; nothing is parked or asked again."""
    asked: list[RetryContext] = []

    def when(context: RetryContext) -> bool:
        asked.append(context)
        return False

    def declare(bench: Bench) -> None:
        charge = bench.actor(Card(Declined("no money")).charge, actor_name="charge")
        bill = bench.actor(lambda: "billed", actor_name="bill")

        def order(flow: Flow) -> Any:
            try:
                return flow.action(charge).retry_on_signal("top-up", when=when).run()
            except StepFailedError:
                return flow.run(bill)

        bench.workflow(order, name="order")

    bench = bench_on(declare)
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "completed"
    assert bench.steps(run_id) == [("charge", "failed"), ("bill", "completed")]
    assert len(asked) == 1


# --- only and when ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "only", "waits"),
    [
        (Declined("x"), [Declined], True),
        (Overdrawn("x"), Declined, True),
        (Declined("x"), (Overdrawn,), False),
        (ValueError("x"), [KeyError, Declined], False),
        (ValueError("x"), [KeyError, ValueError], True),
        (ValueError("x"), Exception, True),
    ],
)
def test_only_names_the_failures_that_wait(bench_here: MakeBench, error: Exception, only: Any, waits: bool) -> None:
    """RSIG-3: by the recorded names of the class and its bases; subclasses count."""
    bench = bench_here(shop(Card(error), describe=waiting(only=only)))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == ("waiting" if waits else "failed")


def test_when_is_asked_once_per_failure_with_what_is_known(bench_on: MakeBench) -> None:
    """RSIG-3: and its answer is recorded with the park: drives of a parked run do not ask again."""
    asked: list[RetryContext] = []

    def when(context: RetryContext) -> bool:
        asked.append(context)
        return context.cycles_spent < 1

    bench = bench_on(shop(Card(Overdrawn("a"), Declined("b")), describe=waiting(max_retries=5, when=when)))
    run_id = parked(bench)
    for _ in range(2):
        bench.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1 WHERE id = ?", (run_id,)))
        bench.deliver(Outgoing("drive", run_id, "order", "default"))
    assert len(asked) == 1
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "failed"
    first, second = asked
    assert (first.run_id, first.workflow_name, first.actor_name, first.sequence) == (run_id, "order", "charge", 2)
    assert (first.signal, first.cap, first.child_run_id) == ("top-up", 5, None)
    assert [(context.cycles_spent, context.executions) for context in asked] == [(0, 1), (1, 2)]
    assert isinstance(first.failure, StepFailedError)
    assert first.failure.is_a(Declined)
    assert first.failure.message == "a"
    assert isinstance(second.failure, StepFailedError)
    assert not second.failure.is_a(Overdrawn)


def test_only_is_looked_at_before_when(bench_here: MakeBench) -> None:
    """RSIG-3: when decides the rest."""

    def never(context: RetryContext) -> bool:
        raise AssertionError("not asked")

    bench = bench_here(shop(Card(ValueError("x")), describe=waiting(only=Declined, when=never)))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    assert bench.codes() == []


def test_a_predicate_that_raises_counts_as_no_and_is_journalled(bench_on: MakeBench) -> None:
    """RSIG-3, ANOM-1: retry_policy_threw with the throw's class and message; the failure takes its course."""

    def breaks(context: RetryContext) -> bool:
        raise LookupError("no such account")

    bench = bench_on(shop(Card(Declined("x")), describe=waiting(when=breaks)))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    [(code, fields)] = bench.anomalies.lines
    assert code == "retry_policy_threw"
    assert (fields["row"], fields["run_id"], fields["sequence"], fields["actor"]) == ("action", run_id, 2, "charge")
    assert repr(fields["error"]) == "LookupError('no such account')"


def workflow_of(bench: Bench) -> Any:
    return workflows_of(bench.broker)["order"]


ACTS: dict[str, Callable[[Bench, str], Any]] = {
    "signals a run": lambda bench, run_id: get_flow(run_id, broker=bench.broker).signal("top-up"),
    "cancels a run": lambda bench, run_id: get_flow(run_id, broker=bench.broker).cancel(),
    "rolls a run back": lambda bench, run_id: get_flow(run_id, broker=bench.broker).compensate(),
    "kicks a run": lambda bench, run_id: get_flow(run_id, broker=bench.broker).kick(),
    "tags a run": lambda bench, run_id: get_flow(run_id, broker=bench.broker).tag("a", "b"),
    "retries a run": lambda bench, run_id: get_flow(run_id, broker=bench.broker).signal_retry(),
    "starts a run": lambda bench, run_id: workflow_of(bench).send(),
    "runs a run": lambda bench, run_id: workflow_of(bench).run_sync(),
    "sends a message": lambda bench, run_id: bench.broker.actors["charge"].send(),
    "calls a step": lambda bench, run_id: bench.broker.actors["charge"](),
}


@pytest.mark.parametrize("swallows", [True, False], ids=["swallowed", "raised"])
@pytest.mark.parametrize("act", ["uses the flow", *ACTS])
def test_a_predicate_that_tries_to_change_a_run_holds_its_own(bench_here: MakeBench, act: str, swallows: bool) -> None:
    """RSIG-3: RetryPolicyReentryError; the run is held with it and nothing is half done. It goes on once the code is mended."""
    flows: list[Flow] = []
    mended: list[bool] = []

    def when(context: RetryContext) -> bool:
        if mended:
            return True
        try:
            flows[-1].run(bench.broker.actors["charge"]) if act == "uses the flow" else ACTS[act](bench, context.run_id)
        except BaseException:
            if not swallows:
                raise
        return True

    def declare(bench: Bench) -> None:
        charge = bench.actor(Card(Declined("x")).charge, actor_name="charge")

        def order(flow: Flow) -> Any:
            flows.append(flow)
            return flow.action(charge).retry_on_signal("top-up", when=when).run()

        bench.workflow(order, name="order")

    bench = bench_here(declare)
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "waiting"
    found = bench.one("SELECT hold_error FROM {flow_runs} WHERE id = ?", run_id)
    assert found is not None
    assert "RetryPolicyReentryError" in found[0]
    assert "retry policy of step 'charge'" in found[0]
    step = row(bench, run_id, 1)
    assert (step["status"], bool(step["given_up"])) == ("failed", True)
    assert wait(bench, run_id, 1) is None
    assert bench.all("SELECT id FROM {flow_runs}") == [(run_id,)]
    assert bench.all("SELECT id FROM {signals}") == []
    mended.append(True)
    bench.deliver(Outgoing("drive", run_id, "order", "default"))
    assert row(bench, run_id, 1)["status"] == "awaiting_retry"


# --- what is refused at the line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        (("",), {}, ValueError, "the signal of a retry policy has between 1 and 191 characters"),
        ((3,), {}, TypeError, "the signal of a retry policy is text, not 3"),
        (("s",), {"max_retries": -1}, ValueError, "max_retries is at least 0, not -1"),
        (("s",), {"max_retries": True}, TypeError, "max_retries is a number of retries or None, not True"),
        (("s",), {"max_retries": 1.5}, TypeError, "max_retries is a number of retries or None, not 1.5"),
        (("s",), {"wait_seconds": -0.1}, ValueError, "wait_seconds is at least 0, not -0.1"),
        (("s",), {"wait_seconds": "1"}, TypeError, "a duration is a number of seconds or a timedelta, not '1'"),
        (("s",), {"wait_seconds": float("inf")}, ValueError, "a finite number of seconds"),
        (("s",), {"only": "ValueError"}, TypeError, "only takes exception classes, not 'V'"),
        (("s",), {"only": [ValueError, int]}, TypeError, "only takes exception classes, not <class 'int'>"),
        (("s",), {"only": 7}, TypeError, "only takes exception classes, not 7"),
        (("s",), {"only": ()}, ValueError, "only names no exception class"),
        (("s",), {"when": 1}, TypeError, "when is a function that gets a RetryContext, not 1"),
        ((RetryPolicy("s"),), {"max_retries": 1, "only": ValueError}, TypeError, "not both: max_retries, only came beside one"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_line(
    bench_here: MakeBench, arguments: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """RSIG-3: named, with the value, before anything is scheduled."""
    seen: list[BaseException] = []

    def describe(step: Any) -> Any:
        try:
            return step.retry_on_signal(*arguments, **options)
        except Exception as error:
            seen.append(error)
            raise

    bench = bench_here(shop(Card(), describe=describe))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    assert isinstance(seen[0], kind)
    assert words in str(seen[0])
    assert bench.steps(run_id) == [("reserve", "completed")]


def test_a_policy_bundles_the_arguments(bench_here: MakeBench) -> None:
    """RSIG-3: one value for several steps."""
    policy = RetryPolicy("top-up", max_retries=1, wait_seconds=5, only=Declined)
    assert policy.only == (Declined,)
    bench = bench_here(shop(Card(Declined("1"), Declined("2")), describe=lambda step: step.retry_on_signal(policy)))
    run_id = parked(bench)
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "failed"


# --- signal_retry ----------------------------------------------------------------------------------------------------


def answer_all(bench: Bench, run_id: str) -> int:
    """What ``FlowHandle.signal_retry`` calls, with the messages in the test's hands."""
    return retry_on_signal.answer_all(bench.engine, run_id, bench.sender)


def two_parked(bench: Bench) -> None:
    """Two charges, each with a signal of its own."""
    first = bench.actor(Card(Declined("1")).charge, actor_name="first")
    second = bench.actor(Card(Declined("2")).charge, actor_name="second")

    def order(flow: Flow) -> Any:
        flow.action(first).retry_on_signal("top-up").run()
        flow.action(second).retry_on_signal("new-card").run()

    bench.workflow(order, name="order")


def test_signal_retry_answers_what_is_parked(bench_on: MakeBench) -> None:
    """RSIG-1, API signal_retry: whatever the signal is called; the history tells of it as of any signal."""
    bench = bench_on(two_parked)
    run_id = bench.start("order")
    bench.run()
    assert answer_all(bench, run_id) == 1
    bench.run()
    assert bench.steps(run_id) == [("first", "completed"), ("second", "awaiting_retry")]
    assert answer_all(bench, run_id) == 1
    bench.run()
    assert bench.status(run_id) == "completed"
    handle = get_flow(run_id, broker=bench.broker)
    assert [signal.name for signal in handle.signals()] == ["top-up", "new-card"]
    assert {signal.status for signal in handle.signals()} == {"consumed"}
    told = [kind for kind in bench.events(run_id) if kind.startswith("signal.")]
    assert told == ["signal.received", "signal.consumed"] * 2


def test_signal_retry_is_refused_where_nothing_is_parked(bench_on: MakeBench) -> None:
    """RSIG-1, SIG-1: with what the run is, and nothing is written."""
    bench = bench_on(two_parked)
    with pytest.raises(FlowNotFoundError):
        answer_all(bench, "no-such-run")
    run_id = bench.start("order")
    with pytest.raises(
        NothingAwaitsRetryError, match=f"run {run_id} is pending, and no step or child of it waits for a signal"
    ):
        answer_all(bench, run_id)
    bench.run()
    bench.cancel(run_id)
    with pytest.raises(CannotSignalTerminalFlowError):
        answer_all(bench, run_id)
    assert get_flow(run_id, broker=bench.broker).signals() == []


def test_signal_retry_leaves_a_wait_that_is_over_to_its_timeout(bench_on: MakeBench) -> None:
    """SIG-2: what has run out is not answered any more, though nobody has said so yet."""
    bench = bench_on(shop(Card(Declined("1")), describe=waiting(wait_seconds=10)))
    run_id = parked(bench)
    bench.store.clock.advance(10)  # type: ignore[attr-defined]
    with pytest.raises(NothingAwaitsRetryError):
        answer_all(bench, run_id)


# --- in every setting ------------------------------------------------------------------------------------------------


def test_a_parked_step_goes_on_with_real_workers(every_app: Application) -> None:
    """RSIG-1, NATIVE-1, EVENT-1: tries with Dramatiq's backoff, a park, a signal, tries again; listeners hear of each."""
    failures = [Declined(str(number)) for number in range(3)]
    heard: list[tuple[str, str]] = []

    @every_app.actor(max_retries=1)
    def charge() -> str:
        if failures:
            raise failures.pop(0)
        return "charged"

    @every_app.workflow
    def order(flow: Flow) -> Any:
        return flow.action(charge).retry_on_signal("top-up").run()

    def hear(event: Any) -> None:
        heard.append((type(event).__name__, event.signal))

    events.subscribe(hear, events.ActionAwaitingRetry, events.ActionRetried)
    try:
        handle = order.send()
        every_app.start()
        eventually(lambda: handle.actions() and handle.actions()[0].status == "awaiting_retry")
        every_app.drain()
        assert (handle.status, every_app.messages()) == ("waiting", 0)
        assert handle.signal_retry() == 1
        assert every_app.ended(handle) == "completed"
    finally:
        events.unsubscribe(hear)
    [step] = handle.actions()
    assert (step.status, step.attempts, step.tries, step.cycle) == ("completed", 4, 1, 1)
    assert heard == [("ActionAwaitingRetry", "top-up"), ("ActionRetried", "top-up")]
    every_app.drain()
    assert every_app.messages() == 0


def test_run_sync_says_which_signal_it_would_have_to_wait_for(app: Application) -> None:
    """SYNC-1, RSIG-1: at once, instead of hanging; the run is there, and goes on when the signal comes."""
    charge = app.step("charge", raises=Declined("no money"))

    @app.workflow
    def order(flow: Flow) -> Any:
        return flow.action(charge).retry_on_signal("top-up", max_retries=1).run()

    with pytest.raises(WouldBlockError, match=r"signal 'top-up' to retry step 1 \(charge\)") as caught:
        order.run_sync()
    handle = get_flow(caught.value.run_id, broker=app.broker)
    assert handle.status == "waiting"
    handle.signal("top-up")
    app.start()
    assert app.ended(handle) == "failed"
    assert len(app.calls) == 2


def test_a_listener_hears_of_a_signal_that_was_there_before_the_park(lite: Application) -> None:
    """EVENT-1, SIG-1: SignalConsumed with its payload, then ActionRetried."""
    heard: list[Any] = []
    failures = [Declined("1")]

    @lite.actor
    def charge() -> None:
        if failures:
            handle.signal("top-up", {"amount": 3})
            raise failures.pop()

    @lite.workflow
    def order(flow: Flow) -> Any:
        return flow.action(charge).retry_on_signal("top-up").run()

    def hear(event: Any) -> None:
        heard.append((event.type, getattr(event.signal, "payload", event.signal)))

    events.subscribe(hear, events.SignalConsumed, events.ActionRetried)
    try:
        handle = order.send()
        lite.start()
        assert lite.ended(handle) == "completed"
    finally:
        events.unsubscribe(hear)
    assert heard == [("signal.consumed", {"amount": 3}), ("action.retried", "top-up")]


# --- in parallel blocks and groups ------------------------------------------------------------------------------------


def block(*members: tuple[str, Card, str | None], wait_all: bool = False) -> Declare:
    """A parallel block of charges: name, card, and the signal that one waits for."""

    def declare(bench: Bench) -> None:
        actors = {name: bench.actor(card.charge, actor_name=name) for name, card, _ in members}
        refund = bench.actor(lambda: None, actor_name="refund")

        def order(flow: Flow) -> Any:
            steps: list[Any] = []
            for name, _, waits_for in members:
                step: Any = flow.action(actors[name]).compensate_with(refund)
                steps.append(step if waits_for is None else step.retry_on_signal(waits_for))
            together = flow.parallel(*steps)
            return (together.wait_all_then_fail() if wait_all else together.fail_fast()).run()

        bench.workflow(order, name="order")

    return declare


def test_a_member_of_a_block_is_parked_while_the_others_go_on(bench_on: MakeBench) -> None:
    """PAR-4, RSIG-1: the run waits outside once only parked members are left; results come in the order of declaration."""
    bench = bench_on(block(("first", Card(Declined("x")), "top-up"), ("second", Card(), None), ("third", Card(), None)))
    run_id = bench.start("order")
    bench.run()
    assert bench.steps(run_id) == [("first", "awaiting_retry"), ("second", "completed"), ("third", "completed")]
    assert bench.status(run_id) == "waiting"
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "completed"
    assert bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run_id) == (b'["charged","charged","charged"]',)


def test_members_that_wait_for_one_signal_take_one_each(bench_on: MakeBench) -> None:
    """RSIG-1, SIG-1: the one that was parked first runs first; signal_retry runs all of them."""
    cards = [Card(Declined("x")) for _ in range(3)]
    bench = bench_on(block(*((f"card-{number}", card, "top-up") for number, card in enumerate(cards))))
    run_id = bench.start("order")
    bench.run()
    signal(bench, run_id)
    bench.run()
    assert [status for _, status in bench.steps(run_id)] == ["completed", "awaiting_retry", "awaiting_retry"]
    assert answer_all(bench, run_id) == 2
    bench.run()
    assert bench.status(run_id) == "completed"


def test_a_block_that_fails_fast_cancels_what_is_parked(bench_on: MakeBench) -> None:
    """PAR-4, RSIG-2: with its wait, so that no signal is lost in it."""
    bench = bench_on(block(("first", Card(Declined("x")), "top-up"), ("second", Card(ValueError("y")), None)))
    run_id = bench.start("order")
    bench.deliver(bench.take())
    bench.runner.give_up(bench.deliver(bench.take()))
    assert bench.steps(run_id) == [("first", "awaiting_retry"), ("second", "pending")]
    bench.run()
    assert bench.status(run_id) == "failed"
    assert bench.steps(run_id) == [("first", "cancelled"), ("second", "failed")]
    assert bench.all("SELECT status FROM {waits} WHERE run_id = ?", run_id) == [("cancelled",)]


def test_a_block_that_waits_for_all_waits_for_what_is_parked(bench_on: MakeBench) -> None:
    """PAR-4: every member settles first, by its signal too; then the failure counts and what was done is undone."""
    bench = bench_on(block(("first", Card(Declined("x")), "top-up"), ("second", Card(ValueError("y")), None), wait_all=True))
    run_id = bench.start("order")
    bench.run()
    assert bench.steps(run_id) == [("first", "awaiting_retry"), ("second", "failed")]
    assert bench.status(run_id) == "waiting"
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "failed"
    assert bench.steps(run_id) == [("first", "completed"), ("second", "failed")]
    assert bench.undos(run_id) == [("refund", "completed")]


def test_a_parked_member_gives_its_place_to_one_that_is_held_back(bench_on: MakeBench) -> None:
    """PAR-1, RSIG-1: max_in_flight counts what is at work; one that waits for weeks holds nobody up."""

    def declare(bench: Bench) -> None:
        actors = [
            bench.actor(card.charge, actor_name=f"card-{n}") for n, card in enumerate((Card(Declined("x")), Card(), Card()))
        ]

        def order(flow: Flow) -> Any:
            return flow.parallel(*(flow.action(actor).retry_on_signal("top-up") for actor in actors)).max_in_flight(1).run()

        bench.workflow(order, name="order")

    bench = bench_on(declare)
    run_id = bench.start("order")
    bench.run()
    assert [status for _, status in bench.steps(run_id)] == ["awaiting_retry", "completed", "completed"]
    signal(bench, run_id)
    bench.run()
    assert bench.status(run_id) == "completed"


def test_a_member_of_a_saga_group_is_parked_like_any_step(bench_on: MakeBench) -> None:
    """RSIG-1, COMP-5: the group goes on behind it once the signal has come."""

    def declare(bench: Bench) -> None:
        first = bench.actor(Card(Declined("x")).charge, actor_name="first")
        second = bench.actor(Card().charge, actor_name="second")

        def order(flow: Flow) -> Any:
            return flow.saga(flow.action(first).retry_on_signal("top-up"), flow.action(second)).run()

        bench.workflow(order, name="order")

    bench = bench_on(declare)
    run_id = bench.start("order")
    bench.run()
    assert bench.steps(run_id) == [("first", "awaiting_retry")]
    signal(bench, run_id)
    bench.run()
    assert (bench.status(run_id), bench.steps(run_id)) == ("completed", [("first", "completed"), ("second", "completed")])


def test_a_run_that_fails_beside_a_step_that_has_just_been_parked_leaves_nothing_open(bench_on: MakeBench) -> None:
    """STATUS-2, PAR-4: one walk finds both given up; it parks the one and, for the other, cancels it again."""

    def declare(bench: Bench) -> None:
        first = bench.actor(Card(Declined("x")).charge, actor_name="first")
        second = bench.actor(Card(ValueError("y")).charge, actor_name="second")

        def order(flow: Flow) -> Any:
            # Both have been given up when this walk comes to them: the first is parked, the second ends the run.
            return flow.parallel(flow.action(first).retry_on_signal("top-up"), flow.action(second)).run()

        bench.workflow(order, name="order")

    bench = bench_on(declare)
    run_id = bench.start("order")
    bench.deliver(bench.take())
    deliveries = [bench.deliver(bench.take()), bench.deliver(bench.take())]
    now = bench.engine.now()
    for delivery in deliveries:  # as after two outcomes that were recorded alone
        bench.store.write(
            lambda tx, delivery=delivery: tx.run(
                "UPDATE {action_runs} SET given_up = TRUE, ended_at = ? WHERE run_id = ? AND sequence = ?",
                (now, run_id, delivery.job.sequence),
            )
        )
    bench.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET wakes = wakes + 1 WHERE id = ?", (run_id,)))
    bench.deliver(Outgoing("drive", run_id, "order", "default"))
    bench.run()
    assert bench.status(run_id) == "failed"
    assert bench.steps(run_id) == [("first", "cancelled"), ("second", "failed")]
    assert bench.all("SELECT status FROM {waits} WHERE run_id = ?", run_id) == [("cancelled",)]
    assert bench.one("SELECT 1 FROM {action_runs} WHERE run_id = ? AND ended_at IS NULL", run_id) is None


# --- children ---------------------------------------------------------------------------------------------------------


def fleet(card: Card, **options: Any) -> Declare:
    """A parent whose child fails as the card says."""

    def declare(bench: Bench) -> None:
        charge = bench.actor(card.charge, actor_name="charge")

        def payment(flow: Flow) -> Any:
            return flow.run(charge)

        paying = bench.workflow(payment)

        def order(flow: Flow) -> Any:
            return flow.child(paying).retry_on_signal("top-up", **options).run()

        bench.workflow(order)

    return declare


def link(bench: Bench, run_id: str) -> tuple[Any, ...]:
    row = bench.one("SELECT status, cycle, child_id FROM {children} WHERE run_id = ? AND sequence = 1", run_id)
    assert row is not None
    return row


@pytest.mark.parametrize(
    ("only", "waits"), [(Declined, True), (StepFailedError, True), (ChildFailedError, True), (KeyError, False)]
)
def test_a_child_is_judged_by_what_was_behind_its_failure(bench_on: MakeBench, only: Any, waits: bool) -> None:
    """RSIG-4, RSIG-3: the error of the step that failed in it counts, by its recorded names."""
    bench = bench_on(fleet(Card(Overdrawn("x")), only=only))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == ("waiting" if waits else "failed")
    assert link(bench, run_id)[0] == ("awaiting_retry" if waits else "failed")


def test_when_is_told_which_child_failed(bench_on: MakeBench) -> None:
    """RSIG-4: its run, its workflow, and how often it was started; the signal starts another run in its place."""
    asked: list[RetryContext] = []

    def when(context: RetryContext) -> bool:
        asked.append(context)
        return True

    bench = bench_on(fleet(Card(Declined("a"), Declined("b")), max_retries=1, when=when))
    run_id = bench.start("order")
    bench.run()
    _, _, first = link(bench, run_id)
    assert answer_all(bench, run_id) == 1
    bench.run()
    status, cycle, second = link(bench, run_id)
    assert (status, cycle, bench.status(run_id)) == ("failed", 1, "failed")
    assert first != second
    [context] = asked  # the second failure had no budget left to ask about
    assert (context.actor_name, context.child_run_id, context.executions, context.cycles_spent) == ("payment", first, 1, 0)
    assert isinstance(context.failure, ChildFailedError)
    assert context.failure.child_id == first


def test_a_predicate_of_a_child_that_raises_is_journalled_as_the_childs(bench_here: MakeBench) -> None:
    """RSIG-3, RSIG-4, ANOM-1."""

    def breaks(context: RetryContext) -> bool:
        raise LookupError("no such account")

    bench = bench_here(fleet(Card(Declined("x")), when=breaks))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    [(_, fields)] = [line for line in bench.anomalies.lines if line[0] == "retry_policy_threw"]
    assert (fields["row"], fields["sequence"], fields["actor"]) == ("child", 1, "payment")
