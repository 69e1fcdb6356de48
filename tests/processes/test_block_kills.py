"""Workers killed in the middle of a parallel block: the join is computed from the rows (C14, C17, PAR-2).

The workers have one thread, so the members of a block run in the order given: ``charge``, ``reserve``, ``board``.
"""

from __future__ import annotations

import pytest

from tests.processes.test_kills import MakeStreet, Street, make_street, street, wide_street
from tests.support.effects import EffectLog
from tests.support.waiting import eventually

__all__ = ["make_street", "street", "wide_street"]

#: point -> how often the member that it is about runs: again only where nothing had been recorded of it
POINTS = {
    "claimed:charge": 1,
    "after body:charge": 2,
    "outcome written:charge": 2,
    "outcome committed:charge": 1,
    "acknowledging:charge": 1,
    "after body:board": 2,
    "outcome written:board": 2,
    "outcome committed:board": 1,
    "decision written": 1,
    "decision committed": 1,
}

WIDE_POINTS = [
    "outcome committed:charge",
    "after body:board",
    "outcome committed:board",
    "decision committed",
]


#: With overlap locks the dead worker's lock on the run or the row keeps its message back for longer than these tests wait.
ALONE = pytest.mark.claims_alone


def killed_once(street: Street, effects: EffectLog, order: str, point: str) -> str:
    """A convoy whose worker died at that point, and which another has brought to its end."""
    first = street.worker(die_at=point, threads=1)
    run: str = street.shop.convoy.send(order).id
    eventually(lambda: effects.count("killed"), because=f"a worker dies at {point!r}")
    first.wait()
    # What the dead worker held is free again before another one takes anything: so the members go on in their order.
    leased = "SELECT COUNT(*) FROM {messages} WHERE state = 2 AND lease_until > ?"
    eventually(lambda: street.all(leased, street.store.clock.now()) == [(0,)], because="the leases of the dead worker run out")
    street.worker(threads=1)
    street.wait_ended(run)
    return run


def check_success(street: Street, effects: EffectLog, run: str, point: str) -> None:
    assert street.status(run) == "completed"
    assert [row[:2] for row in street.steps(run)] == [(name, "completed") for name in ("charge", "reserve", "board", "ship")]
    expected = {"charge": 1, "reserve": 1, "board": 1, "ship": 1} | {point.partition(":")[2] or "ship": POINTS[point]}
    assert {name: effects.count(name) for name in expected} == expected
    done = street.all("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'action.completed'", run)
    assert done == [(4,)]
    assert street.all("SELECT COUNT(*) FROM {flow_runs} WHERE wakes > wakes_seen") == [(0,)]


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=ALONE) if point == "decision committed" else point for point in POINTS]
)
def test_a_kill_around_a_member_neither_loses_the_join_nor_joins_twice(street: Street, effects: EffectLog, point: str) -> None:
    """C14, PAR-2: the last member and an earlier one, between body and outcome, in the transaction, and after it."""
    run = killed_once(street, effects, "book", point)
    check_success(street, effects, run, point)
    eventually(lambda: not street.all("SELECT 1 FROM {messages}"), because="the queue is empty")


@pytest.mark.parametrize("point", WIDE_POINTS)
def test_a_kill_around_a_member_where_queue_and_rows_are_apart(wide_street: Street, effects: EffectLog, point: str) -> None:
    """C14, DRIVE-3: members whose message was never sent are sent by what is redelivered; the barrier in Redis is off by then."""
    run = killed_once(wide_street, effects, "book", point)
    check_success(wide_street, effects, run, point)


@pytest.mark.parametrize(
    "point", [pytest.param("outcome written:ship", marks=ALONE), "outcome committed:ship", "claimed:charge"]
)
def test_a_kill_around_the_failure_of_a_member_rolls_back_once(street: Street, effects: EffectLog, point: str) -> None:
    """C13, C14, PAR-4: what had not begun is cancelled, what was done is undone."""
    run = killed_once(street, effects, "a book to nowhere", point)
    assert street.all("SELECT status, rollback FROM {flow_runs} WHERE id = ?", run) == [("failed", "done")]
    assert [row[:2] for row in street.steps(run)] == [("charge", "completed"), ("ship", "failed"), ("board", "cancelled")]
    assert {name: effects.count(name) for name in ("charge", "ship", "board", "refund", "alight")} == {
        "charge": 1, "ship": 1, "board": 0, "refund": 1, "alight": 0,
    }  # fmt: skip


def test_a_block_that_is_complete_and_was_not_woken_is_found_by_the_sweep(make_street: MakeStreet, street: Street) -> None:
    """C14: every message of the run is gone, its last drive's too."""
    street.set(repair__enabled=True, repair__grace_seconds=0)
    run: str = street.shop.convoy.send("book").id
    worker = street.worker(threads=1)
    street.wait_ended(run)
    worker.terminate()
    worker.wait()
    street.store.write(
        lambda tx: (
            tx.run("DELETE FROM {action_runs} WHERE actor = 'ship'"),
            tx.run(
                "UPDATE {flow_runs} SET status = 'running', ended_at = NULL, result = NULL, wakes = wakes + 1, woken_at = 1 WHERE id = ?",
                (run,),
            ),
            tx.run("DELETE FROM {messages}"),
        )
    )
    street.sweep()
    street.worker(threads=1)
    street.wait_ended(run)
    assert street.status(run) == "completed"
