"""Run it here: everything is cancelled but the flight; then the airline answers again."""

from __future__ import annotations

import time

from dramatiq import Worker

from dramatiq_saga import FlowFailedError, FlowHandle
from examples.trip_booking.app import broker, closed, trip


def tell(run: FlowHandle[list[str]]) -> None:
    print(f"{run.status}, rollback {run.rollback}")
    for undo in run.compensations():
        error = f": {undo.error['message']}" if undo.error else ""
        print(f"  level {undo.level}: undo of step {undo.sequence} ({undo.actor}): {undo.status}{error}")


worker = Worker(broker, worker_threads=4)
worker.start()
run = trip.send("Lisbon")
try:
    run.result(wait=60)
except FlowFailedError as error:
    print(error.cause["message"] if error.cause else error)
tell(run)

closed.clear()
run.resume_rollback()  # or: dramatiq-saga --app examples.trip_booking.app resume-rollback RUN
while run.rollback == "running":
    time.sleep(0.05)
tell(run)
worker.stop()
