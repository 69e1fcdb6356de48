"""Runs that wait for time, for real workers: ``dramatiq tests.processes.timer_app``. What it stands on is ``recovery_app``'s affair."""

from __future__ import annotations

from typing import Any

import dramatiq

from dramatiq_saga import Flow, SignalTimeoutError, workflow
from tests.processes.recovery_app import act, broker
from tests.support.gates import Gates

dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=0)
def note(name: str) -> str:
    return act("note", name)


@dramatiq.actor(max_retries=0)
def unnote(name: str) -> str:
    return act("unnote", name)


@workflow
def naps(flow: Flow, name: str, seconds: float, times: int) -> int:
    for number in range(times):
        flow.sleep(seconds)
        flow.run(note, f"{name} {number}")
    return times


@workflow
def patient(flow: Flow, name: str, seconds: float) -> Any:
    try:
        return flow.await_signal("go", wait_seconds=seconds)
    except SignalTimeoutError:
        Gates.from_env().reach(f"timed-out-{name}")
        flow.run(note, name)
        return "timed out"


@workflow(expires_in=3600)
def doomed(flow: Flow, name: str) -> None:
    flow.action(note, name).compensate_with(unnote, name).run()
    flow.await_signal("go")
