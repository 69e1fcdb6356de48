"""Two tenants, one worker thread."""

from __future__ import annotations

from dramatiq import Worker

from dramatiq_saga import FlowFailedError
from examples.tenants.app import as_tenant, broker, sell

runs = {}
for name in ("acme", "globex"):
    with as_tenant(name):
        runs[name] = sell.send("teapot")

try:
    sell.send("kettle")
except LookupError:
    print("without a tenant, no run is started")

worker = Worker(broker, worker_threads=1)
worker.start()
for name, run in runs.items():
    try:
        print(f"{name}: {run.result(wait=30)}")
    except FlowFailedError as error:
        print(f"{name}: {error.cause['message'] if error.cause else error}")
worker.stop()
