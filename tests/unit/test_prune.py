"""Runs that ended long ago go with everything that belongs to them, and nothing else goes (PRUNE-1)."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga import FlowHandle
from dramatiq_saga.recovery.prune import PruneReport, prune
from dramatiq_saga.store.models import TABLES
from tests.support.workbench import Workbench

DAY = 86_400

LEFT_OUT = object()
ROWS: dict[str, dict[str, Any]] = {
    "blocks": {"sequence": 7, "kind": "parallel", "size": 0},
    "waits": {"sequence": 8, "kind": "timer", "cycle": 0, "status": "consumed"},
    "signals": {"name": "x", "status": "consumed", "received_at": 1, "payload": b"1", "created_at": LEFT_OUT},
    "side_effects": {"sequence": 9, "kind": "value", "name": "x", "value": b"1", "ended_at": LEFT_OUT},
    "children": {
        "sequence": 10, "child_id": "gone", "workflow": "w", "status": "completed", "close_policy": "abandon", "cycle": 0,
        "optional": False, "comp_from_result": False, "comp_parallel": False, "args": b"1",
    },
    "compensation_runs": {
        "sequence": 1, "level": 0, "actor": "a", "queue": "q", "undoes": "completed", "undoes_key": "k", "policy": "stop",
        "status": "completed", "given_up": False, "attempts": 1, "tries": 0, "claims": 0, "started_at": 1, "repair_attempts": 0, "args": b"1",
    },
}  # fmt: skip


def finished(bench: Workbench, **options: Any) -> FlowHandle[Any]:
    """A run that has ended, with a row in every table that belongs to runs."""
    run = bench.send(**options)
    bench.drive(run)
    assert run.cancel()
    bench.lose_messages()
    for table, row in ROWS.items():
        columns = {"run_id": run.id, "created_at": 1, "ended_at": 2, **row}
        columns = {name: value for name, value in columns.items() if value is not LEFT_OUT}
        bench.write(
            f"INSERT INTO {{{table}}} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", *columns.values()
        )
    run.tag("left", "behind")
    return run


def rows_of(bench: Workbench, run: FlowHandle[Any]) -> dict[str, int]:
    """How many rows each table holds of a run."""
    found = {}
    for table in TABLES:
        key = {"flow_runs": "id"}.get(table, "run_id")
        if table not in ("workers", "passes", "messages", "rate_limits", "results"):
            sql = f"SELECT COUNT(*) FROM {{{table}}} WHERE {key} = ?"
            row = bench.engine.store.read(lambda tx, sql=sql: tx.one(sql, (run.id,)))  # type: ignore[misc]
            found[table] = row[0] if row else 0
    return found


def pruned(bench: Workbench, *, days: float = 90, **options: Any) -> PruneReport:
    return prune(bench.engine.store, before=bench.clock.now() - round(days * DAY * 1000), **options)


def test_a_run_goes_with_every_row_that_belongs_to_it(bench: Workbench) -> None:
    run = finished(bench)
    assert all(rows_of(bench, run).values()), rows_of(bench, run)
    bench.advance(30 * DAY)
    younger = finished(bench)
    bench.advance(60 * DAY)
    assert pruned(bench).pruned == 1
    assert not any(rows_of(bench, run).values())
    assert all(rows_of(bench, younger).values())


def test_a_dry_run_counts_and_deletes_nothing(bench: Workbench) -> None:
    run = finished(bench)
    bench.advance(91 * DAY)
    assert pruned(bench, dry_run=True) == PruneReport(bench.clock.now() - 90 * DAY * 1000, 1, 0, True)
    assert all(rows_of(bench, run).values())


@pytest.mark.parametrize("rollback", ["running", "halted"])
def test_a_run_whose_rollback_is_not_over_stays(bench: Workbench, rollback: str) -> None:
    """PRUNE-1: an operator may still resume it."""
    run = finished(bench)
    bench.write("UPDATE {flow_runs} SET rollback = ? WHERE id = ?", rollback, run.id)
    bench.advance(91 * DAY)
    assert pruned(bench).pruned == 0
    assert all(rows_of(bench, run).values())


def test_a_run_with_a_child_at_work_stays_until_that_has_ended(bench: Workbench) -> None:
    """PRUNE-1: an abandoned child outlives its parent, and shows whose it was."""
    parent, child = finished(bench), bench.send()
    bench.write("UPDATE {flow_runs} SET parent_id = ?, parent_sequence = 10 WHERE id = ?", parent.id, child.id)
    bench.advance(91 * DAY)
    assert pruned(bench).pruned == 0
    child.cancel()
    assert pruned(bench).pruned == 1
    assert not any(rows_of(bench, parent).values())


def test_live_runs_stay_however_old_they_are(bench: Workbench) -> None:
    run = bench.send()
    bench.advance(1000 * DAY)
    assert pruned(bench, days=0).pruned == 0
    assert run.status == "pending"


def test_runs_that_have_to_stay_do_not_stand_in_front_of_others(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRUNE-1: page by page behind the last one seen."""
    monkeypatch.setattr("dramatiq_saga.recovery.prune.BATCH", 2)
    runs = []
    for _ in range(7):
        runs.append(finished(bench))
        bench.advance(1)
    for run in runs[:3]:
        bench.write("UPDATE {flow_runs} SET rollback = 'halted' WHERE id = ?", run.id)
    bench.advance(91 * DAY)
    assert pruned(bench).pruned == 4
    assert [any(rows_of(bench, run).values()) for run in runs] == [True] * 3 + [False] * 4


def test_a_limit_ends_it_with_the_oldest_gone(bench: Workbench) -> None:
    first = finished(bench)
    bench.advance(1)
    second = finished(bench)
    bench.advance(91 * DAY)
    assert pruned(bench, limit=1).pruned == 1
    assert not any(rows_of(bench, first).values())
    assert any(rows_of(bench, second).values())


def test_a_rollback_that_is_resumed_keeps_its_run(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRUNE-1, STATUS-1: between the listing and the deletion an operator was first; the deletion repeats its conditions."""
    run = finished(bench)
    bench.advance(91 * DAY)
    store = bench.engine.store
    plain = store.write

    def write(operation: Any) -> Any:
        plain(lambda tx: tx.run("UPDATE {flow_runs} SET rollback = 'running' WHERE id = ?", (run.id,)))
        return plain(operation)

    monkeypatch.setattr(store, "write", write)
    report = pruned(bench)
    assert (report.pruned, report.skipped) == (0, 1)
    assert all(rows_of(bench, run).values())


def test_of_two_prunes_one_deletes_a_run(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRUNE-1: several at once do no harm."""
    finished(bench)
    bench.advance(91 * DAY)
    store = bench.engine.store
    plain = store.write
    inner: list[PruneReport] = []

    def write(operation: Any) -> Any:
        monkeypatch.setattr(store, "write", plain)
        inner.append(pruned(bench))
        return plain(operation)

    monkeypatch.setattr(store, "write", write)
    outer = pruned(bench)
    assert (inner[0].pruned, outer.pruned, outer.skipped) == (1, 0, 1)
