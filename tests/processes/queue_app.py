"""Actors on an SQLite broker, for worker processes of the tests: ``dramatiq tests.processes.queue_app``."""

from __future__ import annotations

import ctypes
import os
import sys

import dramatiq

from dramatiq_saga.brokers import SQLiteBroker, wake
from dramatiq_saga.brokers import consumer as consumer_module
from dramatiq_saga.brokers import database as database_module
from tests.support.brokers import middleware
from tests.support.effects import EffectLog
from tests.support.gates import Gates

PATH = "QUEUE_APP_PATH"
RETRY_AFTER = "QUEUE_APP_RETRY_AFTER"
WAKE_BY = "QUEUE_APP_WAKE_BY"  # bell | polling: nothing else wakes the consumers


def make_broker() -> SQLiteBroker:
    only = os.environ.get(WAKE_BY)
    if only is not None:
        consumer_module.LOOK_ANYWAY = database_module.LOOK_ANYWAY = 3600.0
    if only == "polling":
        wake.Bell.listen = lambda self: None  # type: ignore[method-assign]
    return SQLiteBroker(
        os.environ[PATH],
        retry_after=float(os.environ.get(RETRY_AFTER, "60")),
        poll_interval=360.0 if only == "bell" else 0.01,
        middleware=middleware(),
    )


broker = make_broker()
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=0, time_limit=120_000)
def note(name: str) -> None:
    """Done at once."""
    EffectLog.from_env().record("note", name=name)


@dramatiq.actor(max_retries=0, time_limit=120_000)
def stand(name: str) -> None:
    """Stands at the gate of its name."""
    EffectLog.from_env().record("began", name=name)
    Gates.from_env().reach(name)
    EffectLog.from_env().record("ended", name=name)


@dramatiq.actor(max_retries=0, time_limit=120_000)
def hog(seconds: int) -> None:
    """Keeps the interpreter to itself, as a C extension may; the second delivery only stands at a gate."""
    effects = EffectLog.from_env()
    first = effects.count("hog") == 0
    effects.record("hog", first=first)
    if first:
        ctypes.PyDLL(None).sleep(seconds)  # PyDLL: the interpreter lock is not released
    else:
        Gates.from_env().reach("second")
    effects.record("hog ended", first=first)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        note.send(name)
