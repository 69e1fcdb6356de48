"""Run it here: the last booking fails, and everything is undone, the last one first."""

from __future__ import annotations

from examples.compensations.app import journey

run = journey.run_sync("Riga")
print(f"{run.status}, rollback {run.rollback}")
for undo in run.compensations():
    print(f"undo of step {undo.sequence} ({undo.actor}): {undo.status}" + (f": {undo.error['message']}" if undo.error else ""))
