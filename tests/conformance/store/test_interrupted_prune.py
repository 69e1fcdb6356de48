"""A prune that is cut off anywhere leaves runs that are whole or gone, and an id that is free again belongs to its new run alone (C55)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dramatiq_saga import Flow
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.store import transactions
from dramatiq_saga.store.database import Store
from tests.support import past
from tests.support.bench import Bench
from tests.support.gates import Gates
from tests.support.processes import Process

#: Tables whose rows belong to runs.
OWNED = (
    "action_runs", "compensation_runs", "blocks", "waits", "signals", "children", "side_effects", "tags", "flow_events",
)  # fmt: skip

RUNS = 150

PRUNE = """
import sys
from dramatiq_saga.recovery.prune import prune
from dramatiq_saga.store import transactions
from dramatiq_saga.store.database import open_store
from tests.support.gates import Gates

plain, seen = transactions.SQLiteTx.run, 0

def run(tx, sql, params=()):
    global seen
    changed = plain(tx, sql, params)
    seen += sql.startswith("DELETE")
    if seen == int(sys.argv[2]):
        Gates.from_env().reach("deleting")
    return changed

transactions.SQLiteTx.run = run
prune(open_store(sys.argv[1]), before=2**50)
"""


def facts(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Per run, how many rows of it each table holds; an orphan has no row of its own."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for table, key in [("flow_runs", "id"), *((table, "run_id") for table in OWNED)]:
        sql = f"SELECT {key}, COUNT(*) FROM {{{table}}} GROUP BY {key} ORDER BY {key}"
        for run_id, number in store.read(lambda tx, sql=sql: tx.all(sql)):  # type: ignore[misc]
            found.setdefault(run_id, []).append((table, number))
    return found


class CutOffError(Exception):
    """Takes the place of a kill."""


@contextmanager
def cut_off(at: int) -> Iterator[None]:
    """The transaction that comes to its ``at``-th deletion, counted through all of them, ends there."""
    left = [at]

    def cut(plain: Any) -> Any:
        def run(tx: Any, sql: str, params: Any = ()) -> Any:
            changed = plain(tx, sql, params)
            left[0] -= sql.startswith("DELETE")
            if not left[0]:
                raise CutOffError
            return changed

        return run

    kinds = (transactions.SQLiteTx, transactions.ServerTx)
    patches = [mock.patch.object(kind, "run", cut(kind.run)) for kind in kinds]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def test_a_prune_that_is_cut_off_leaves_runs_that_are_whole_or_gone(database_url: str, open_on: Callable[..., Store]) -> None:
    """C55, PRUNE-1: a hundred times on SQLite, between runs and between tables; the last one goes through."""
    store = open_on(database_url)
    past.ended(store, RUNS)
    left = whole = facts(store)
    assert {table for rows in whole.values() for table, _ in rows} == {"flow_runs", *OWNED}
    chance = random.Random(55)
    for _ in range(100 if store.dialect == "sqlite" else 12):
        with cut_off(chance.randrange(1, 25)), pytest.raises(CutOffError):
            prune(store, before=2**50)
        left = facts(store)
        assert left == {run_id: whole[run_id] for run_id in left}
    assert 0 < len(left) < len(whole) == RUNS
    assert prune(store, before=2**50).pruned == len(left)
    assert facts(store) == {}


def test_a_run_in_the_place_of_one_whose_prune_was_killed_runs_its_own_steps(
    sqlite_path: Path, python_process: Callable[..., Process], gates: Gates
) -> None:
    """C55: killed between two tables of the second run; the next prune ends it, and the ids are free."""
    bench = Bench(f"sqlite:///{sqlite_path}", declare)
    for number in range(3):
        bench.start("weekly", "old", run_id=f"weekly-{number}")
    bench.run()
    before = facts(bench.store)
    process = python_process("-c", PRUNE, str(sqlite_path), str(len(OWNED) + 1 + 4))
    gates.wait_reached("deleting")
    process.kill()
    assert facts(bench.store) == {run_id: before[run_id] for run_id in ("weekly-1", "weekly-2")}
    assert prune(bench.store, before=2**50).pruned == 2

    for number in range(3):
        bench.start("weekly", "new", run_id=f"weekly-{number}")
    bench.run()
    assert bench.all("SELECT DISTINCT status, result FROM {flow_runs}") == [("completed", b'["new","new"]')]
    bench.close()


def test_what_a_worker_remembers_of_a_pruned_run_is_not_taken_for_its_successor(sqlite_path: Path) -> None:
    """C55, DRIVE-1: another worker has ended the first run and begun the second, at the same revision and wake count."""
    url = f"sqlite:///{sqlite_path}"
    clock = ManualClock()
    worker, other = Bench(url, declare, clock=clock), Bench(url, declare, clock=clock)
    worker.start("weekly", "old", run_id="weekly")
    worker.deliver(worker.take())
    other.cancel("weekly")
    assert prune(other.store, before=2**50).pruned == 1
    clock.advance(1)
    other.start("weekly", "new", run_id="weekly")
    other.deliver(other.take())
    worker.sender.queue.clear()
    worker.sender.queue.append(other.take())
    worker.run()
    assert worker.all("SELECT status, result FROM {flow_runs}") == [("completed", b'["new","new"]')]
    worker.close()
    other.close()


def declare(bench: Bench) -> None:
    """``weekly(word)`` has two steps say the word."""
    step = bench.actor(lambda word: word, actor_name="step")

    def weekly(flow: Flow, word: str) -> list[str]:
        return [flow.run(step, word), flow.run(step, word)]

    bench.workflow(weekly)
