"""One workflow that does whatever it is told: ``dramatiq tests.processes.chaos_app``, for workers that are killed at random.

A run's argument is a list of instructions, so that a seed can make up any process. Every body tells the effect log when it
begins and when it ends, with its attempt and its idempotency key: what the rows say is compared with that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from dramatiq_saga import Flow, SagaMiddleware, Settings, Workflow, current_step, workflow
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.errors import FlowError
from tests.support.effects import EffectLog
from tests.support.locks import chosen

DATABASE = "CHAOS_APP_DATABASE"
REDIS = "CHAOS_APP_REDIS"
RABBITMQ = "CHAOS_APP_RABBITMQ"
PREFIX = "CHAOS_APP_PREFIX"
RETRY_AFTER = "CHAOS_APP_RETRY_AFTER"
SETTINGS = "CHAOS_APP_SETTINGS"  # JSON

Instruction = list[Any]


def note(effect: str, **facts: Any) -> dict[str, Any]:
    step = current_step()
    assert step is not None
    told = {"run": step.run_id, "sequence": step.sequence, "attempt": step.attempt, "key": step.idempotency_key}
    EffectLog.from_env().record(effect, **told, **facts)
    return told


def declare(broker: dramatiq.Broker) -> Workflow[[list[Instruction]], list[Any]]:
    """The workflow and its actors, on a broker."""

    @dramatiq.actor(broker=broker, max_retries=2, min_backoff=10, max_backoff=50)
    def work(how: str, succeeds_in: int = 0) -> dict[str, Any]:
        """``how``: fine, slow, flaky (its first claim fails), broken (always fails), parked (fails until that signal cycle)."""
        told = note("work")
        cycle = int(str(told["key"]).rsplit(":", 1)[1])
        if how == "slow":
            time.sleep(0.3)
        if how == "broken" or (how == "flaky" and told["attempt"] == 1) or (how == "parked" and cycle < succeeds_in):
            note("work failed")
            raise ValueError(how)
        return note("work ended")

    @dramatiq.actor(broker=broker, max_retries=3, min_backoff=10, max_backoff=50)
    def undo(how: str) -> None:
        step = current_step()
        assert step is not None and step.undoes is not None
        note("undo", undoes=step.undoes.sequence)
        if how == "flaky" and step.attempt == 1:
            raise ValueError("the undo is flaky")
        note("undo ended", undoes=step.undoes.sequence)

    def builder(flow: Flow, what: Instruction) -> Any:
        match what:
            case ["step", str(how)]:
                return flow.action(work, how)
            case ["undone", str(how), str(undone)]:
                return flow.action(work, how).compensate_with(undo, undone)
            case ["optional", str(how)]:
                return flow.action(work, how).fallback_value_on_fail("fallback")
            case ["parked", int(cycles)]:
                return (
                    flow.action(work, "parked", cycles)
                    .compensate_with(undo, "fine")
                    .retry_on_signal("again", max_retries=cycles + 1)
                )
            case ["parallel", list(members), limit, str(policy)]:
                block = flow.parallel(*[builder(flow, member) for member in members])
                if limit is not None:
                    block = block.max_in_flight(limit)
                return block.fail_fast() if policy == "fail_fast" else block.wait_all_then_fail()
            case ["saga", list(members), bool(parallel)]:
                group = flow.saga(*[builder(flow, member) for member in members])
                return group.compensate_in_parallel(parallel)
            case ["child", list(instructions), str(policy)]:
                return flow.child(told, instructions).close_policy(policy)
        raise AssertionError(f"no such instruction: {what!r}")

    @workflow(broker=broker)
    def told(flow: Flow, instructions: list[Instruction]) -> list[Any]:
        done: list[Any] = []
        for instruction in instructions:
            match instruction:
                case ["signal", str(name), None]:
                    done.append(flow.await_signal(name))
                case ["signal", str(name), float(seconds) | int(seconds)]:
                    try:
                        done.append(flow.await_signal(name, wait_seconds=seconds))
                    except FlowError as error:
                        done.append(type(error).__name__)
                case ["sleep", float(seconds)]:
                    flow.sleep(seconds)
                case ["recorded"]:
                    done += [str(flow.now()), str(flow.uuid4()), flow.side_effect("pid", os.getpid)]
                case ["caught", what]:
                    try:
                        done.append(builder(flow, what).run())
                    except FlowError as error:
                        done.append(type(error).__name__)
                case ["raise"]:
                    raise RuntimeError("told to")
                case _:
                    done.append(builder(flow, instruction).run())
        return done

    return told


def connect(environment: Mapping[str, str]) -> dramatiq.Broker:
    """The broker that an environment describes."""
    prefix = environment.get(PREFIX, "saga_")
    settings = Settings.from_mapping({"schema.table_prefix": prefix, **json.loads(environment.get(SETTINGS, "{}"))})
    if REDIS in environment or RABBITMQ in environment:
        # What a killed worker had taken is another's two seconds later, as after "retry_after" above.
        elsewhere: dramatiq.Broker = (
            RedisBroker(url=environment[REDIS], heartbeat_timeout=2000, maintenance_chance=100_000)
            if REDIS in environment
            else RabbitmqBroker(url=environment[RABBITMQ])
        )
        elsewhere.add_middleware(SagaMiddleware(environment[DATABASE], settings=settings, locks=chosen()))
        return elsewhere
    broker = DatabaseBroker(environment[DATABASE], prefix=prefix, retry_after=float(environment.get(RETRY_AFTER, "60")))
    broker.add_middleware(SagaMiddleware(settings=settings, locks=chosen()))
    return broker


if DATABASE in os.environ:
    dramatiq.set_broker(connect(os.environ))
    declare(dramatiq.get_broker())
