"""Run it here and say how often each step was tried."""

from __future__ import annotations

from examples.retries.app import sell

run = sell.run_sync("teapot")
print(run.result())
for step in run.actions():
    print(f"step {step.sequence} {step.actor}: {step.status}, attempts: {step.attempts}")
