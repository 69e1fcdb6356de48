"""What users write, as strict mypy sees it: every ``assert_type`` holds, and every mistake that is marked is one.

Not run: checked with the package by ``mypy`` and by ``tests/unit/test_typing.py``. A mistake that mypy no longer finds is an
unused ``type: ignore``, which strict mode refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, assert_type
from unittest.mock import Mock

import dramatiq

from dramatiq_saga import (
    Flow,
    FlowHandle,
    FlowQuery,
    RetryContext,
    RetryPolicy,
    SagaMiddleware,
    Settings,
    Step,
    Workflow,
    current_step,
    get_flow,
    query,
    workflow,
)
from dramatiq_saga.builders import ActionBuilder
from dramatiq_saga.codec import TaggedJSONEncoder
from dramatiq_saga.locks import LockBackend, RedisLocks
from dramatiq_saga.settings import Context
from dramatiq_saga.testing import History, SagaTester, load_history, record_history, replay_history


@dramatiq.actor(max_retries=3)
def charge(order: str, *, amount: int = 1) -> dict[str, str]:
    return {"id": order * amount}


@dramatiq.actor
def count(order: str) -> int:
    return len(order)


@dramatiq.actor
async def fetch(order: str) -> bytes:
    return order.encode()


@dramatiq.actor(max_retries=1)
async def fetch_with_options(order: str) -> bytes:
    return order.encode()


@dramatiq.actor
def refund(charge_id: str) -> None: ...


@dramatiq.actor
async def release(order: str, count: int) -> None: ...


# --- steps -----------------------------------------------------------------------------------------------------------


def steps(flow: Flow) -> None:
    assert_type(flow.run(charge, "a", amount=2), dict[str, str])
    assert_type(flow.run(fetch, "a"), bytes)
    assert_type(flow.run(fetch_with_options, "a"), bytes)
    assert_type(flow.action(count, "a").run(), int)
    assert_type(flow.action(fetch, "a").run(), bytes)
    assert_type(flow.action(charge, "a"), ActionBuilder[dict[str, str], dict[str, str]])

    flow.run(charge)  # type: ignore[call-arg]
    flow.run(charge, 1)  # type: ignore[arg-type]
    flow.run(charge, "a", amonut=2)  # type: ignore[call-arg]
    flow.action(charge, "a", "b")  # type: ignore[call-arg, arg-type]
    flow.action(fetch, 1)  # type: ignore[arg-type]
    flow.run(len, "a")  # type: ignore[arg-type]
    flow.run(charge.fn, "a")  # type: ignore[arg-type]


def worth_it(context: RetryContext) -> bool:
    return context.cycles_spent < 2


def options_keep_the_type(flow: Flow) -> None:
    built = (
        flow.action(count, "a")
        .compensate_step_on_self_failure()
        .on_compensation_failure("continue")
        .expires_in(timedelta(minutes=1))
        .expires_at(datetime(2026, 1, 1, tzinfo=UTC))
        .reclaim_stale_after(60)
        .enable_stale_reclaim(False)
        .reclaim_compensation_stale_after(60)
        .enable_compensation_stale_reclaim(True)
        .max_claims(1)
        .with_options(queue_name="slow", priority=3)
        .retry_on_signal("paid", max_retries=3, wait_seconds=60, only=(ConnectionError,), when=worth_it)
    )
    assert_type(built.run(), int)
    flow.action(count, "a").retry_on_signal(RetryPolicy("paid", only=ConnectionError)).run()
    flow.action(count, "a").retry_on_signal("paid", when=lambda failure: failure.cycles_spent < 2).run()
    flow.action(count, "a").retry_on_signal("paid", when=lambda failure: failure.nonsense)  # type: ignore[attr-defined]
    flow.action(count, "a").retry_on_signal(3)  # type: ignore[arg-type]
    flow.action(count, "a").expires_in("soon")  # type: ignore[arg-type]


def retried_steps(flow: Flow) -> None:
    assert_type(flow.action(count, "a").retry_on_signal("go", max_retries=1, only=ValueError).run(), int)
    policy = RetryPolicy(
        "go", wait_seconds=timedelta(days=3), only=[ValueError, KeyError], when=lambda context: context.cap is None
    )
    assert_type(flow.optional_action(count, "a").retry_on_signal(policy).run(), int | None)
    assert_type(flow.action(count, "a").retry_on_signal(policy).fallback_value_on_fail("none").run(), int | str)

    flow.action(count, "a").retry_on_signal("go", only=int)  # type: ignore[arg-type]
    flow.action(count, "a").retry_on_signal("go", when=lambda: True)  # type: ignore[arg-type, misc]
    RetryPolicy("go", max_retries="1")  # type: ignore[arg-type]


def optional_steps(flow: Flow) -> None:
    assert_type(flow.optional_action(count, "a").run(), int | None)
    assert_type(flow.action(count, "a").continue_on_failure().run(), int | None)
    assert_type(flow.action(count, "a").continue_on_failure(False).run(), int)
    assert_type(flow.action(count, "a").fallback_value_on_fail("none").run(), int | str)
    assert_type(flow.action(count, "a").fallback_value_on_fail(0).run(), int)
    assert_type(flow.optional_action(count, "a").fallback_value_on_fail(0).run(), int)
    assert_type(flow.action(count, "a").continue_on_failure().max_claims(2).run(), int | None)
    flow.optional_action(count, "a").run() + 1  # type: ignore[operator]
    flow.optional_action(count, 1)  # type: ignore[arg-type]


def compensations(flow: Flow) -> None:
    flow.action(charge, "a").compensate_with(refund, "c-a").run()
    flow.action(charge, "a").compensate_with(refund, charge_id="c-a").run()
    flow.action(charge, "a").compensate_with(release, "a", count=1).run()
    assert_type(flow.action(charge, "a").compensate_with(lambda made: refund.message(made["id"])).run(), dict[str, str])
    assert_type(flow.action(fetch, "a").compensate_with(lambda made: refund.message(made.decode())).run(), bytes)
    # undone only where the step has completed, so what the function gets is the actor's result
    optional = flow.optional_action(count, "a").compensate_with(lambda n: release.message("a", n + 1))
    assert_type(optional.run(), int | None)

    flow.action(charge, "a").compensate_with(refund)  # type: ignore[arg-type]
    flow.action(charge, "a").compensate_with(refund, 1)  # type: ignore[call-overload]
    flow.action(charge, "a").compensate_with(release, "a", counts=1)  # type: ignore[call-arg]
    flow.action(charge, "a").compensate_with(refund.message("c-a"))  # type: ignore[call-overload]
    flow.action(count, "a").compensate_with(lambda n: refund.message(n))  # type: ignore[arg-type]
    flow.action(charge, "a").compensate_with(lambda made: made["id"])  # type: ignore[arg-type, return-value]


# --- blocks ----------------------------------------------------------------------------------------------------------


def blocks(flow: Flow) -> None:
    both = flow.parallel(flow.action(count, "a"), flow.action(fetch, "a"))
    assert_type(both.max_in_flight(1).fail_fast().run(), list[int | bytes])
    three = flow.parallel(flow.action(count, "a"), flow.optional_action(count, "b"), flow.action(charge, "c"))
    assert_type(three.wait_all_then_fail().run(), list[int | dict[str, str] | None])
    assert_type(flow.parallel(*[flow.action(count, word) for word in ("a", "b")]).run(), list[int])
    assert_type(flow.parallel(flow.action(count, "a")).run(), list[int])

    group = flow.saga(flow.action(count, "a").compensate_with(refund, "a"), flow.action(fetch, "a"))
    assert_type(group.compensate_in_parallel().on_compensation_failure("stop").run(), list[int | bytes])
    nested = flow.saga(flow.action(count, "a"), flow.parallel(flow.action(fetch, "a"), flow.action(fetch, "b")))
    assert_type(nested.run(), list[int | list[bytes]])

    flow.parallel(flow.run(count, "a"))  # type: ignore[call-overload]
    flow.parallel(count, fetch)  # type: ignore[call-overload]


# --- the rest of what a function may ask for -------------------------------------------------------------------------


def asked_of_the_flow(flow: Flow) -> None:
    assert_type(flow.side_effect("dice", lambda: 4), int)
    assert_type(flow.now(), datetime)
    assert_type(flow.random(), float)
    assert_type(flow.patched("new-price"), bool)
    assert_type(flow.run_id, str)
    assert_type(flow.version, str | None)
    flow.tag("customer", 42)
    flow.tag("customer", 4.2)  # type: ignore[arg-type]
    flow.sleep("a while")  # type: ignore[arg-type]
    flow.signal_flow("r-1", "paid", {"by": "ann"})
    assert_type(flow.await_signal("paid", wait_seconds=timedelta(days=1)), Any)
    flow.await_signal("paid", wait_second=1)  # type: ignore[call-arg]


# --- workflows and runs ----------------------------------------------------------------------------------------------


@workflow
def checkout(flow: Flow, order: str, *, express: bool = False) -> dict[str, str]:
    return flow.run(charge, order)


@workflow(name="renamed", version="2", expires_in=60, tags={"kind": "slow"}, context=lambda: "acme", priority=1)
def declared_with_options(flow: Flow) -> None: ...


@workflow  # type: ignore[arg-type]
def without_a_flow() -> None: ...


@workflow(nmae="typo")  # type: ignore[call-overload, untyped-decorator]
def misspelt(flow: Flow) -> None: ...


def children(flow: Flow) -> None:
    """CHILD-1, CHILD-2."""
    assert_type(flow.child(checkout, "a", express=True).run(), dict[str, str])
    assert_type(flow.child(checkout, "a").close_policy("cancel").continue_on_failure().run(), dict[str, str] | None)
    assert_type(flow.child(checkout, "a").compensate_with(refund, "a").run(), dict[str, str])
    assert_type(flow.child(checkout, "a").compensate_with(lambda done: refund.message(done["id"])).run(), dict[str, str])
    assert_type(flow.parallel(flow.child(checkout, "a"), flow.action(count, "a")).run(), list[dict[str, str] | int])
    flow.child(checkout)  # type: ignore[call-arg]
    flow.child(checkout, 1)  # type: ignore[arg-type]
    flow.child(count, "a")  # type: ignore[arg-type]
    flow.child(checkout, "a").compensate_with(refund)  # type: ignore[arg-type]


def runs() -> None:
    assert_type(checkout.send("a", express=True), FlowHandle[dict[str, str]])
    assert_type(checkout.send("a").result(), dict[str, str])
    assert_type(checkout.run_sync("a").result(wait=1.5), dict[str, str])
    assert_type(checkout.send_with_options(args=("a",), run_id="r-1", delay=5), FlowHandle[dict[str, str]])
    assert_type(declared_with_options, Workflow[[], None])
    declared_with_options.send().result()
    checkout.send()  # type: ignore[call-arg]
    checkout.send(1)  # type: ignore[arg-type]
    checkout.run_sync("a", expres=True)  # type: ignore[call-arg]
    checkout.send("a").result()["id"].upper()
    checkout.send("a").result().append(1)  # type: ignore[attr-defined]

    handle: FlowHandle[Any] = get_flow("r-1")
    assert_type(handle.cancel("why"), bool)
    assert_type(handle.compensate("why"), bool)
    assert_type(handle.resume_rollback(), bool)
    assert_type(handle.abandon_undo(3), bool)
    assert_type(handle.signal_if_running("paid", {"by": "ann"}, key="k"), bool)
    assert_type(query(workflow="checkout", status="waiting"), FlowQuery)
    assert_type([one.id for one in query(limit=3)], list[str])


def inside_a_step() -> None:
    step = current_step()
    assert_type(step, Step | None)
    step.idempotency_key  # type: ignore[union-attr]


# --- settings and values ---------------------------------------------------------------------------------------------


@dataclass
class Money:
    amount: Decimal


def values() -> None:
    encoder = TaggedJSONEncoder()
    encoder.register(Money, "money", to_plain=lambda money: money.amount, from_plain=lambda plain: Money(plain))
    encoder.register(Money, "money", to_plain=lambda money: money.sum, from_plain=Money)  # type: ignore[attr-defined]
    encoder.register(Money, "money", to_plain=str, from_plain=int)  # type: ignore[arg-type]
    dramatiq.set_encoder(encoder)


def settings() -> None:
    Settings(context=Context(capture=lambda: "acme", restore=lambda captured: None))
    Settings(context=Context(capture=lambda one: one))  # type: ignore[arg-type, misc]
    Settings(contxt=Context())  # type: ignore[call-arg]


# --- testing ---------------------------------------------------------------------------------------------------------


async def another_fetch(order: str) -> bytes:
    return b""


def testing(saga: SagaTester) -> None:
    assert_type(saga.start(checkout, "a"), FlowHandle[dict[str, str]])
    saga.start(checkout, 1)  # type: ignore[arg-type]
    saga.start(checkout)  # type: ignore[call-arg]
    saga.start(charge, "a")  # type: ignore[arg-type]
    saga.replace(charge, lambda order, amount=1: {"id": order})
    saga.replace(charge, lambda order, amount=1: 3)  # type: ignore[arg-type]
    saga.replace(fetch, lambda order: b"")
    saga.replace(fetch, another_fetch)
    saga.replace(refund, Mock())
    saga.replace(charge, ConnectionError)
    saga.replace(charge, ConnectionError("down"))
    saga.replace(charge, {"id": "a"})  # type: ignore[arg-type]
    saga.replace(checkout, ConnectionError)  # type: ignore[arg-type]
    saga.advance(timedelta(days=30))
    saga.advance("a day")  # type: ignore[arg-type]
    assert_type(saga.errors, list[BaseException])


def histories(run: FlowHandle[dict[str, str]]) -> None:
    history = record_history(run, scrub=lambda value: value)
    assert_type(history, History)
    assert_type(history.write("checkout.json"), Path)
    assert_type(load_history(Path("checkout.json")), History)
    assert_type(replay_history(checkout, history).result, dict[str, str] | None)
    assert_type(replay_history(checkout, "checkout.json").asks, tuple[str, ...])
    replay_history(charge, history)  # type: ignore[arg-type]
    record_history(run, lambda value: value)  # type: ignore[call-arg]


class OwnLocks:
    """A back end for overlap locks needs no base class."""

    def take(self, key: str, token: str, *, ttl_ms: int, instead_of: str | None = None) -> str:
        return token

    def release(self, key: str, token: str) -> bool:
        return True


backend: LockBackend = OwnLocks()
SagaMiddleware(locks=RedisLocks("redis://localhost"))
SagaMiddleware(locks=backend)
SagaMiddleware(locks="redis://localhost")  # type: ignore[arg-type]
