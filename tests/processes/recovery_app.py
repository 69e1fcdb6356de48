"""An application for real workers, real sweeps and the real command line: ``dramatiq tests.processes.recovery_app``.

What it stands on is in its environment, so that every process of a test has the same. Its steps tell the effect log what they
did, and stop at gates that a test has closed.
"""

from __future__ import annotations

import json
import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.recovery import doctor
from tests.support import wrong_clock
from tests.support.effects import EffectLog
from tests.support.gates import Gates
from tests.support.locks import chosen

DATABASE = "RECOVERY_APP_DATABASE"
REDIS = "RECOVERY_APP_REDIS"  # the queue is there, and not in the database
PREFIX = "RECOVERY_APP_PREFIX"
RETRY_AFTER = "RECOVERY_APP_RETRY_AFTER"
SETTINGS = "RECOVERY_APP_SETTINGS"  # JSON
WITHOUT = "RECOVERY_APP_WITHOUT"  # an actor that this process does not declare
STOP_AT = "RECOVERY_APP_STOP_AT"  # a gate that this process's sweeps come to once they have a listing

wrong_clock.install()
prefix = os.environ.get(PREFIX, "saga_")
settings = Settings.from_mapping({"schema.table_prefix": prefix, **json.loads(os.environ.get(SETTINGS, "{}"))})
broker: dramatiq.Broker
if REDIS in os.environ:
    broker = RedisBroker(url=os.environ[REDIS])
    broker.add_middleware(SagaMiddleware(os.environ[DATABASE], settings=settings, locks=chosen()))
else:
    broker = DatabaseBroker(os.environ[DATABASE], prefix=prefix, retry_after=float(os.environ.get(RETRY_AFTER, "60")))
    broker.add_middleware(SagaMiddleware(settings=settings, locks=chosen()))
dramatiq.set_broker(broker)


def act(effect: str, name: str) -> str:
    effects = EffectLog.from_env()
    effects.record(effect, name=name)
    if name.startswith("gate"):
        Gates.from_env().reach(f"{effect}-{name}")
    effects.record(f"{effect} ended", name=name)
    return name


@dramatiq.actor(max_retries=0)
def work(name: str) -> str:
    return act("work", name)


@dramatiq.actor(max_retries=0)
def undo(name: str) -> str:
    return act("undo", name)


@dramatiq.actor(max_retries=0, queue_name="late")
def early(name: str) -> str:
    return act("early", name)


if os.environ.get(WITHOUT) != "late":

    @dramatiq.actor(max_retries=0, queue_name="late")
    def late(name: str) -> str:
        return act("late", name)


@workflow
def job(flow: Flow, *names: str, reclaim: float | None = None) -> list[str]:
    done = []
    for name in names:
        step = flow.action(work, name).compensate_with(undo, name)
        if reclaim is not None:
            step = step.reclaim_stale_after(reclaim).reclaim_compensation_stale_after(reclaim)
        done.append(step.run())
    return done


@workflow
def errand(flow: Flow, name: str) -> str:
    flow.action(work, name).compensate_with(undo, name).run()
    return str(flow.run(late, name))


def stop_after_listing() -> None:
    plain = doctor.find

    def find(engine: Any, rule: Any, *, joined: bool) -> Any:
        found = plain(engine, rule, joined=joined)
        if found:
            Gates.from_env().reach(os.environ[STOP_AT])
        return found

    doctor.find = find


if STOP_AT in os.environ:
    stop_after_listing()
