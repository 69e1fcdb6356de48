"""A process that is killed in the middle of a write."""

from __future__ import annotations

from collections.abc import Callable

from dramatiq_saga.store.database import Store
from tests.support.processes import Process
from tests.support.stores import add, count
from tests.support.waiting import eventually

WRITE_AND_STAND = """
import sys, time
from dramatiq_saga.store.database import open_store
from tests.support.stores import add

store = open_store(sys.argv[1], prefix=sys.argv[2])
store.write(add("done"))

def operation(tx):
    add()(tx)
    print("inside", flush=True)
    time.sleep(600)

store.write(operation)
"""


def test_a_write_whose_process_is_killed_leaves_nothing_and_locks_nothing(
    store: Store, database_url: str, table_prefix: str, python_process: Callable[..., Process]
) -> None:
    process = python_process("-c", WRITE_AND_STAND, database_url, table_prefix)
    process.wait_for_output("inside")
    process.kill()

    assert (count(store), count(store, "done")) == (0, 1)
    assert eventually(lambda: store.write(add()), because="the lock died with its process") == 1
