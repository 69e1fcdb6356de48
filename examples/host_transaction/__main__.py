"""One order that commits, one that does not; then a worker."""

from __future__ import annotations

from dramatiq import Worker

from dramatiq_saga import query
from examples.host_transaction.app import Order, broker, database, place_order

database.create_tables([Order])
run = place_order("teapot")
try:
    place_order("unicorn")
except LookupError as error:
    print(f"refused: {error}")
print(f"{Order.select().count()} order, {query().count()} run")

worker = Worker(broker, worker_threads=2)
worker.start()
try:
    run.result(wait=30)
finally:
    worker.stop()
    broker.close()
print(f"{Order.get().item}: {Order.get().status}")
database.close()
