"""Run it here, with a worker in this process: granted, refused, and forgotten."""

from __future__ import annotations

from dramatiq import Worker

from dramatiq_saga import FlowExpiredError, FlowFailedError
from examples.approval.app import broker, expense

worker = Worker(broker, worker_threads=2)
worker.start()
try:
    granted = expense.send(100, 60)
    granted.signal("answer", {"granted": True, "by": "ann"}, key="mail-1")
    granted.signal_if_running("answer", {"granted": True, "by": "ann"}, key="mail-1")  # the mail came twice
    print(granted.result(wait=30))

    refused = expense.send(200, 60)
    refused.signal("answer", {"granted": False, "by": "bob"})
    try:
        refused.result(wait=30)
    except FlowFailedError as error:
        print(error.cause["message"] if error.cause else error)

    forgotten = expense.send_with_options(args=(300, 0.2), expires_in=3)
    try:
        forgotten.result(wait=30)
    except FlowExpiredError:
        print(f"{forgotten.status}, rollback {forgotten.rollback}")
    print("late answer taken:", forgotten.signal_if_running("answer", {"granted": True, "by": "cid"}))
finally:
    worker.stop()
