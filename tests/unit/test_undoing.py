"""Where a rollback stands is read from the level that is open; it is what all of its rows say (COMP-1, COMP-4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dramatiq_saga.engine import undoing
from dramatiq_saga.engine.claim import Job
from dramatiq_saga.store.database import Store, Tx, open_store

#: status, given up, sent: every state that a compensation's row can be in.
STATES = [
    ("pending", False, False), ("pending", False, True), ("running", False, True), ("running", True, True), ("failed", False, True),
    ("failed", True, True), ("completed", False, True),
]  # fmt: skip

ROWS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(STATES), st.sampled_from(["stop", "stop", "continue"])), min_size=1, max_size=7
)
OUTCOMES = st.none() | st.tuples(st.integers(0, 6), st.sampled_from(["completed", "failed", "unfinished"]))
RUN = ("rolling_back", "running", "failed", "w", None, "q", None, None, None, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "rows.db")
    store.prepare()
    yield store
    store.close()


def put(tx: Tx, rows: list[tuple[bool, tuple[str, bool, bool], str]]) -> None:
    tx.run("DELETE FROM {compensation_runs}")
    level = 0
    for number, (together, (status, given_up, sent), policy) in enumerate(rows):
        level += bool(number) and not together
        ended = 2 if status == "completed" or (status == "failed" and given_up) else None
        row: dict[str, Any] = {
            "run_id": "r", "sequence": len(rows) - number, "level": level, "actor": "a", "queue": "q", "undoes": "completed",
            "undoes_key": "k", "policy": policy, "status": status, "given_up": given_up, "attempts": 1, "tries": 0, "claims": 0,
            "sent_at": 1 if sent else None, "repair_attempts": 0, "created_at": 1, "started_at": 1, "ended_at": ended, "args": b"",
        }  # fmt: skip
        tx.run(
            f"INSERT INTO {{compensation_runs}} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values())
        )


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, outcome=OUTCOMES, unsent_only=st.booleans())
def test_where_a_rollback_stands_is_what_all_of_its_rows_say(
    store: Store, rows: list[Any], outcome: tuple[int, str] | None, unsent_only: bool
) -> None:
    """COMP-1, COMP-4, PAR-3: the same messages, or the same end, as if every row was looked at, whatever is about to be recorded."""
    settled = None
    if outcome is not None:
        settled = undoing.Outcome(outcome[1], Job("compensation", "r", outcome[0] % len(rows) + 1, 0, 1, ""), "a", 1)

    def look(tx: Tx) -> tuple[undoing.Next, undoing.Next]:
        put(tx, rows)
        found = undoing._rows(tx, "r")
        if settled is not None:
            found = [row.settled(settled) if row.sequence == settled.job.sequence else row for row in found]
        whole = undoing._survey("r", RUN, found, 5, unsent_only=unsent_only)
        return undoing.stands(tx, "r", RUN, 5, unsent_only=unsent_only, settled=settled), whole

    stands, whole = store.write(look)
    assert stands == whole
