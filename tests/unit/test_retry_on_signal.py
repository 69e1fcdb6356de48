"""Retry on signal in a replay: what a walk makes of a failure, of a parked step, and of what has been decided (RSIG-1 … RSIG-3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga import Flow, RetryPolicy, Settings
from dramatiq_saga.codec import describe_error, encode, freeze
from dramatiq_saga.engine.replay import Replay, replay
from dramatiq_saga.engine.retry_on_signal import Stored
from dramatiq_saga.engine.rows import Decision, Entry, Extra, ReceivedSignal, RetryWait, Snapshot, StepEntry

NOW = 1_000
Describe = Callable[[Any], Any]


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    broker = StubBroker()
    yield dramatiq.actor(lambda *args: None, broker=broker, actor_name="charge")
    broker.close()


def stored(value: Any) -> Callable[[], Any]:
    return freeze(encode(value, "value"))


def signals(*names: str) -> tuple[ReceivedSignal, ...]:
    return tuple(ReceivedSignal(number, name, stored(None)) for number, name in enumerate(names, 1))


def failed(sequence: int = 1, *, policy: Stored | None = None, wait: RetryWait | None = None, **facts: Any) -> StepEntry:
    """A step that was given up, and of which nothing has been decided."""
    policy = policy or Stored("top-up")
    entry = StepEntry(
        sequence, "charge", "failed", given_up=True, attempts=1, error=describe_error(ValueError("no")),
        extra=Extra(retry=policy.text(), wait=wait),
    )  # fmt: skip
    return changed(entry, **facts)


def parked(status: str, **facts: Any) -> StepEntry:
    return failed(wait=RetryWait(status, None), **{"status": "awaiting_retry", "given_up": False, **facts})


def walk(
    actor: Any, *entries: Entry, describe: Describe | None = None, received: tuple[ReceivedSignal, ...] = (), steps: int = 1
) -> tuple[Decision, Replay]:
    """A function of so many charges, one after another, walked against ``entries``."""

    def function(flow: Flow) -> Any:
        return [(describe or _plainly)(flow.action(actor)).run() for _ in range(steps)]

    snapshot = Snapshot(
        "r", "w", None, "default", None, None, "running", "none", 3, 5, 4, stored([[], {}]), None, 0, list(entries), {},
        signals=received,
    )  # fmt: skip
    context = Replay(snapshot, now=NOW, settings=Settings())
    return replay(function, context, Flow), context


def _plainly(step: Any) -> Any:
    return step.retry_on_signal("top-up")


def test_the_stored_part_of_a_policy_is_written_when_the_step_is_scheduled(actor: Any) -> None:
    """RSIG-3: signal, budget and wait; the settings fill in what is left open."""
    policy = RetryPolicy("top-up", max_retries=2, wait_seconds=1.5, only=ValueError)
    decision, _ = walk(actor, describe=lambda step: step.retry_on_signal(policy))
    assert json.loads(decision.steps[0].retry or "") == {"signal": "top-up", "max_retries": 2, "wait_ms": 1500}
    settings = Settings.from_mapping({"actions.retry_on_signal.max_retries": 4, "monitor.expiration.defaults.signal": 60})
    assert json.loads(RetryPolicy("go").stored(settings)) == {"signal": "go", "max_retries": 4, "wait_ms": 60_000}
    assert json.loads(RetryPolicy("go", 0, 0).stored(settings)) == {"signal": "go", "max_retries": 0, "wait_ms": 0}
    assert Stored.read(Stored("größe", None, None, "spent").text()) == Stored("größe", None, None, "spent")


def test_a_failure_is_parked(actor: Any) -> None:
    """RSIG-1: the decision holds the park, and the run waits for something from outside."""
    decision, context = walk(actor, failed(policy=Stored("top-up", None, 500)))
    assert (decision.kind, decision.outside, decision.steps) == ("suspended", True, [])
    assert decision.more is not None
    [park] = decision.more.parks
    assert (park.signal, park.due_at) == ("top-up", NOW + 500)
    entry = context.changed[1]
    assert isinstance(entry, StepEntry)
    assert (entry.status, entry.given_up, entry.extra.wait) == ("awaiting_retry", False, RetryWait("waiting", NOW + 500))
    again, _ = walk(actor, entry)
    assert (again.kind, again.outside, again.more) == ("suspended", True, None)


def test_a_signal_that_is_there_runs_it_again_at_once(actor: Any) -> None:
    """SIG-1, RSIG-1: the oldest of that name, and it is spent."""
    decision, context = walk(actor, failed(), received=signals("other", "top-up", "top-up"))
    assert (decision.kind, decision.outside) == ("suspended", False)
    assert decision.more is not None
    [retry] = decision.more.retries
    assert retry.signal is not None
    assert (retry.signal.id, decision.more.taken, decision.more.parks) == (2, {2}, [])
    entry = context.changed[1]
    assert isinstance(entry, StepEntry)
    assert (entry.status, entry.cycle, entry.attempts) == ("pending", 1, 1)


@pytest.mark.parametrize("how", ["waiting", "consumed", "timed_out", "cancelled"])
def test_a_parked_step_stands_where_its_wait_stands(actor: Any, how: str) -> None:
    """RSIG-1, RSIG-2: nothing is asked about it again."""

    def never(context: Any) -> bool:
        raise AssertionError("not asked")

    decision, _ = walk(actor, parked(how), describe=lambda step: step.retry_on_signal("top-up", max_retries=0, when=never))
    more = decision.more
    if how == "waiting":
        assert (decision.kind, decision.outside, more) == ("suspended", True, None)
        return
    assert more is not None
    if how == "consumed":
        assert (decision.kind, decision.outside) == ("suspended", False)
        assert [(retry.entry.sequence, retry.signal) for retry in more.retries] == [(1, None)]
        return
    assert decision.kind == "failed"
    [failure] = more.failures
    assert failure.status == "failed"
    assert Stored.read(failure.policy).over == ("timed_out" if how == "timed_out" else "withdrawn")


@pytest.mark.parametrize(
    ("cycle", "cap", "over"), [(0, 0, "spent"), (2, 2, "spent"), (3, 2, "spent"), (1, 2, None), (99, None, None)]
)
def test_the_cycles_of_the_row_are_counted_against_its_budget(
    actor: Any, cycle: int, cap: int | None, over: str | None
) -> None:
    """RSIG-3: whatever the code says about the budget now."""
    entry = failed(policy=Stored("top-up", cap), cycle=cycle)
    decision, _ = walk(actor, entry, describe=lambda step: step.retry_on_signal("top-up", max_retries=1))
    assert decision.more is not None
    if over is None:
        assert len(decision.more.parks) == 1
    else:
        assert [Stored.read(failure.policy).over for failure in decision.more.failures] == [over]


def test_what_was_decided_of_a_failure_is_not_decided_again(actor: Any) -> None:
    """RSIG-3: nor is a signal spent that came afterwards."""
    entry = failed(policy=Stored("top-up", over="refused"))
    decision, _ = walk(actor, entry, received=signals("top-up"))
    assert (decision.kind, decision.more) == ("failed", None)


@pytest.mark.parametrize("fallback", [None, {"owed": 1}])
def test_an_optional_step_gives_its_fallback_once_its_signals_are_over(actor: Any, fallback: Any) -> None:
    """RSIG-2, OPT-1: in the very walk that decides it."""
    entry = failed(policy=Stored("top-up", 0), optional=True)
    if fallback is not None:
        entry = changed(entry, extra=changed(entry.extra, fallback=stored(fallback)))
    decision, context = walk(actor, entry, describe=lambda step: step.retry_on_signal("top-up").continue_on_failure())
    assert (decision.kind, json.loads(decision.result or b"")) == ("completed", [fallback])
    settled = context.changed[1]
    assert isinstance(settled, StepEntry)
    assert settled.status == "optional_failed"


def test_a_step_without_a_stored_policy_fails_whatever_the_code_says_now(actor: Any) -> None:
    """RSIG-3: the row is what was scheduled; a deploy that adds a policy counts for later steps."""
    decision, _ = walk(actor, changed(failed(), extra=Extra()))
    assert (decision.kind, decision.more) == ("failed", None)


def test_a_step_whose_policy_the_code_has_dropped_is_parked_by_its_row(actor: Any) -> None:
    """RSIG-3: only and when are the code's, and there are none."""
    decision, _ = walk(actor, failed(), describe=lambda step: step)
    assert decision.more is not None
    assert len(decision.more.parks) == 1


@given(names=st.lists(st.sampled_from(["top-up", "other"]), max_size=6), cycle=st.integers(0, 4), cap=st.integers(0, 4))
def test_two_walks_of_one_failure_decide_alike_and_spend_at_most_one_signal(
    actor: Any, names: list[str], cycle: int, cap: int
) -> None:
    """DRIVE-1, RSIG-1: so of two drives at once it does not matter which one lands."""
    entry = failed(policy=Stored("top-up", cap), cycle=cycle)
    received = signals(*names)
    first, second = (walk(actor, entry, received=received)[0] for _ in range(2))
    assert first.more is not None
    assert second.more is not None
    for name in ("parks", "taken"):
        assert getattr(first.more, name) == getattr(second.more, name)
    assert [(retry.entry, retry.signal) for retry in first.more.retries] == [
        (retry.entry, retry.signal) for retry in second.more.retries
    ]
    assert [failure.policy for failure in first.more.failures] == [failure.policy for failure in second.more.failures]
    assert len(first.more.taken) == len(first.more.retries) == (1 if cycle < cap and "top-up" in names else 0)
    assert len(first.more.parks) + len(first.more.retries) + len(first.more.failures) == 1
