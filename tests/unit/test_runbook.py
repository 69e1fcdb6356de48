"""What ``docs/operations/runbook.md`` and ``recovery.md`` promise, where no other test does: everything at once, and what is rare."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from dramatiq_saga import Flow, FlowHandle, Settings, current_step, workflow
from dramatiq_saga.errors import StoreError
from dramatiq_saga.store.peewee_internals import pragmas_of, set_pragmas
from tests.support.waiting import eventually
from tests.support.workbench import MakeBench, Workbench

LEASES = Settings.from_mapping({"reclaim.dead_workers.enabled": True, "repair.enabled": True})


def at_work_on_a_dead_worker(bench: Workbench, run: FlowHandle[Any]) -> None:
    """The run's first step was claimed under a heartbeat that is no more."""
    bench.write(
        "UPDATE {action_runs} SET status = 'running', attempts = 1, claims = 1, started_at = ?, worker_id = 'beat:gone' "
        "WHERE run_id = ? AND sequence = 1",
        bench.clock.now(), run.id,
    )  # fmt: skip


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "deferred"])
def test_a_flushed_broker_costs_time_and_no_run(make_bench: MakeBench, joins: bool) -> None:
    """R1, R2 and R3 of DOCTOR-1, RECLAIM-5: whatever stood in the queues is made good by one sweep, steps and undos alike."""
    bench = make_bench(joins=joins, settings=LEASES)
    refuse = {"between-tries": True, "undone": True}

    def once(traveller: str) -> None:
        if refuse.pop(traveller, False):
            raise ConnectionError("not now")

    bench.bodies["book_hotel"] = bench.bodies["pay"] = once
    undone, retried = bench.send("undone"), bench.send("between-tries")
    refuse["undone"] = False
    bench.work_until(lambda: undone.status == "completed" and retried.actions() and retried.actions()[0].next_try_at)
    bench.write("UPDATE {flow_runs} SET status = 'running', ended_at = NULL, result = NULL WHERE id = ?", undone.id)
    assert undone.compensate()
    new, pending, dead = bench.send("new"), bench.send("pending"), bench.send("dead")
    for run in (pending, dead):
        bench.drive(run)
    at_work_on_a_dead_worker(bench, dead)
    bench.done.clear()
    bench.lose_messages()
    bench.advance(20 + 60)
    report = bench.sweep().repair
    assert report is not None
    assert (report.steps, report.compensations, report.runs, report.reclaims) == (2, 1, 1, 1)
    runs = (new, pending, retried, dead)
    bench.work_until(lambda: undone.rollback == "done" and all(run.status == "completed" for run in runs))
    told = [name for name, _ in bench.done]
    assert [told.count(name) for name in ("book_hotel", "book_flight", "pay")] == [4, 4, 4]
    assert (told.count("cancel_flight"), told.count("cancel_hotel")) == (1, 1)


def test_a_full_disk_loses_no_outcome_and_repeats_no_body(make_bench: MakeBench) -> None:
    """FENCE-3, NATIVE-7: the outcome is kept until there is room; what is refused meanwhile has left nothing behind."""
    bench = make_bench()
    size = 300_000

    database: Any = bench.engine.store.database

    def limit(pages: int) -> None:
        """For connections that are opened from now on, and for the one that writes."""
        kept = [(name, value) for name, value in pragmas_of(database) if name != "max_page_count"]
        set_pragmas(database, [*kept, ("max_page_count", pages)])
        bench.engine.store.write(lambda tx: tx.one(f"PRAGMA max_page_count = {pages}"))

    def fill(*_: Any) -> str:
        limit(1)  # that is: not one page more than there are
        return "x" * size

    bench.bodies["book_hotel"] = fill
    run = bench.send()
    with capture_logs() as logs, bench.working():
        eventually(lambda: any(line["event"] == "store_unavailable" for line in logs), because="the outcome is refused")
        with pytest.raises(StoreError, match="full"):
            bench.send("x" * size)
        assert bench.row(run, 1, "status", "attempts", "result") == ("running", 1, None)
        limit(1_000_000)
        eventually(lambda: run.status == "completed")
    assert [name for name, _ in bench.done] == ["book_hotel", "book_flight", "pay"]
    assert bench.row(run, 1, "status", "attempts", "tries") == ("completed", 1, 0)
    assert bench.engine.store.read(lambda tx: tx.one("SELECT COUNT(*) FROM {flow_runs}")) == (1,)
    assert bench.engine.store.read(lambda tx: tx.one("PRAGMA integrity_check")) == ("ok",)


def test_a_step_that_may_be_claimed_once_is_never_run_again_and_its_undo_knows_that_nobody_knows(make_bench: MakeBench) -> None:
    """RECLAIM-5, RECLAIM-6, COMP-7: at most once, without a run that waits for ever."""
    bench = make_bench(settings=LEASES)
    told: list[str] = []
    bench.bodies["cancel_hotel"] = lambda *_: told.append(current_step().undoes.outcome)  # type: ignore[union-attr]

    def once(flow: Flow) -> None:
        hotel = flow.action(bench.actors["book_hotel"], "ada").compensate_with(bench.actors["cancel_hotel"], "ada")
        hotel.max_claims(1).compensate_step_on_self_failure().run()

    run = workflow(name="once", broker=bench.broker)(once).send()
    bench.drive(run)
    at_work_on_a_dead_worker(bench, run)
    bench.sweep()
    bench.work_until(lambda: run.rollback == "done")
    assert [name for name, _ in bench.done] == ["cancel_hotel"]
    assert told == ["unknown"]
    (step,) = run.actions()
    assert (step.status, step.attempts) == ("failed", 2)
    assert step.error is not None
    assert step.error["type"].endswith("StepInterruptedError")
