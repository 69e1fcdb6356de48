"""One application in several releases: ``dramatiq tests.processes.deploy_app``, with the release in ``RECOVERY_APP_RELEASE``.

Its runs park in front of the step ``late``, which has a queue of its own: a worker that does not consume it leaves them there.
"""

from __future__ import annotations

import json
import os
from typing import Any

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import DatabaseBroker
from tests.support.effects import EffectLog
from tests.support.locks import chosen

RELEASE = os.environ.get("RECOVERY_APP_RELEASE", "first")

prefix = os.environ.get("RECOVERY_APP_PREFIX", "saga_")
settings = Settings.from_mapping({"schema.table_prefix": prefix, **json.loads(os.environ.get("RECOVERY_APP_SETTINGS", "{}"))})
broker = DatabaseBroker(os.environ["RECOVERY_APP_DATABASE"], prefix=prefix)
broker.add_middleware(SagaMiddleware(settings=settings, locks=chosen()))
dramatiq.set_broker(broker)


def act(name: str) -> str:
    EffectLog.from_env().record(name, release=RELEASE)
    return f"{name} of {RELEASE}"


@dramatiq.actor(max_retries=0)
def reserve() -> str:
    return act("reserve")


@dramatiq.actor(max_retries=0)
def charge() -> str:
    return act("charge")


@dramatiq.actor(max_retries=0)
def refund() -> str:
    return act("refund")


@dramatiq.actor(max_retries=0, queue_name="late")
def late() -> str:
    return act("late")


@dramatiq.actor(max_retries=0)
def mail() -> str:
    return act("mail")


def first(flow: Flow) -> list[Any]:
    return [flow.action(reserve).compensate_with(refund).run(), flow.run(charge), flow.run(late)]


def edited(flow: Flow) -> list[Any]:
    """Other words, other helpers, another compensation, and more at the end: the same sequence."""
    done = []
    for actor in (reserve, charge, late):
        done.append(flow.run(actor))
    return [*done, flow.run(mail)]


def swapped(flow: Flow) -> list[Any]:
    return [flow.run(charge), flow.action(reserve).compensate_with(refund).run(), flow.run(late)]


def gated(flow: Flow) -> list[Any]:
    """A step before everything else, for runs that have not begun."""
    new_way = flow.patched("mail-first")
    done = [flow.run(mail)] if new_way else []
    return [*done, flow.action(reserve).compensate_with(refund).run(), flow.run(charge), flow.run(late), new_way]


def asks(flow: Flow) -> list[Any]:
    return [flow.run(reserve), flow.await_signal("approved", wait_seconds=14 * 86_400), flow.run(charge)]


def asks_otherwise(flow: Flow) -> list[Any]:
    """Edited: a comment, a helper, a longer wait, a step more at the end."""
    reserved = flow.run(reserve)
    answer = flow.await_signal("approved", wait_seconds=20 * 86_400)
    return [reserved, answer, flow.run(charge), flow.run(mail)]


def mails_before(flow: Flow) -> list[Any]:
    """An edited sequence: a mail is sent before the answer is waited for."""
    return [flow.run(reserve), flow.run(mail), flow.await_signal("approved"), flow.run(charge)]


def naps(flow: Flow) -> list[Any]:
    done = [flow.run(reserve)]
    flow.sleep(14 * 86_400)
    return [*done, flow.run(charge)]


def naps_longer(flow: Flow) -> list[Any]:
    """Edited: the nap of a run that is asleep already stays as long as it was."""
    done = [flow.run(reserve)]
    flow.sleep(400 * 86_400)
    return [*done, flow.run(charge), flow.run(mail)]


nap = workflow(name="nap", version=RELEASE)(naps if RELEASE == "first" else naps_longer)

approval = workflow(name="approval", version=RELEASE)({"first": asks, "swapped": mails_before}.get(RELEASE, asks_otherwise))

function = {"first": first, "edited": edited, "swapped": swapped, "gated": gated, "renamed": first}[RELEASE]
order = workflow(name="orders" if RELEASE == "renamed" else "order", version=RELEASE)(function)
