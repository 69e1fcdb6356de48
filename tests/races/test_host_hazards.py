"""Code of the host inside the engine's transactions: what it has made void is not taken for done (CLAIM-3, CLAIM-4).

PostgreSQL answers COMMIT of an aborted transaction with a rollback, and calls that a success; and a hook that ends a transaction
and begins another leaves nothing behind that COMMIT could complain of. ``tests/support/hazards.py`` does either.
"""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga import RetryPolicy
from dramatiq_saga.errors import StoreError
from dramatiq_saga.recovery.kick import kick
from tests.races.conftest import MakeBench, Shop
from tests.support.bench import Bench
from tests.support.hazards import CarelessHost

hazards = pytest.mark.parametrize(
    ("database_kind", "deed"),
    [("postgresql", "swallows"), ("postgresql", "begins anew"), ("mariadb", "begins anew")],
    indirect=["database_kind"],
)
postgresql_only = pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)


class Firm(Shop):
    """The shop, and an order whose child run is started again by a signal."""

    def declare(self, bench: Bench) -> None:
        super().declare(bench)
        pack = bench.actor(self._body("pack"))

        def parcel(flow: Any, order: str) -> str:
            return str(flow.run(pack, order))

        def order(flow: Any, name: str) -> str:
            return str(flow.child(parcels, name).retry_on_signal(RetryPolicy("again")).run())

        parcels = bench.workflow(parcel)
        bench.workflow(order)


@pytest.fixture
def shop() -> Firm:
    return Firm()


@pytest.fixture
def host(database_kind: str, deed: str, address: str) -> CarelessHost:
    return CarelessHost(database_kind, deed)


def lost(worker: Bench) -> list[dict[str, Any]]:
    """What was journalled as not committed, and nothing else was journalled."""
    assert set(worker.codes()) <= {"claim_not_committed"}
    return [fields for code, fields in worker.anomalies.lines if code == "claim_not_committed"]


def at_first_step(worker: Bench) -> tuple[str, Any]:
    run = worker.start("checkout", "42")
    worker.deliver(worker.take())
    return run, worker.message(worker.take())


@hazards
def test_a_claim_that_was_gone_after_its_commit_runs_nothing_and_keeps_its_message(
    bench: MakeBench, shop: Firm, host: CarelessHost
) -> None:
    """CLAIM-3, CLAIM-4: both counts are journalled; the message is put back, and the step runs once, after a claim that holds."""
    worker = bench(database=host.database)
    run, message = at_first_step(worker)
    host.arm("action_runs.* SET status = 'running'", times=2)
    for number in (1, 2):
        delivery = worker.deliver(message)
        assert (shop.ran, delivery.state, worker.step(run)) == ([], "done", ("pending", 0))
        (fields,) = lost(worker)[number - 1 :]
        assert {name: fields[name] for name in ("row", "run_id", "sequence", "actor", "claimed_attempts", "attempts")} == {
            "row": "action", "run_id": run, "sequence": 1, "actor": "charge", "claimed_attempts": 1, "attempts": 0,
        }  # fmt: skip
    assert host.left == 0
    worker.deliver(message)
    assert shop.order() == ["charge"]
    assert worker.step(run) == ("completed", 1)
    assert worker.one("SELECT tries FROM {action_runs} WHERE run_id = ? AND sequence = 1", run) == (0,)


@pytest.mark.parametrize(("database_kind", "deed"), [("postgresql", "swallows")], indirect=["database_kind"])
def test_an_undo_whose_claim_was_gone_after_its_commit_undoes_nothing(bench: MakeBench, shop: Firm, host: CarelessHost) -> None:
    """CLAIM-3: a compensation's claim is no other; the rollback goes on once the claim holds."""
    worker = bench(database=host.database)
    run, message = at_first_step(worker)
    worker.deliver(message)
    assert worker.compensate(run)
    (undo,) = [message for message in worker.sender.queue if message.kind == "compensation"]
    host.arm("compensation_runs.* SET status = 'running'")
    worker.deliver(undo)
    assert shop.order() == ["charge"]
    (fields,) = lost(worker)
    assert (fields["row"], fields["sequence"], fields["actor"]) == ("compensation", 1, "refund")
    assert (fields["claimed_attempts"], fields["attempts"]) == (1, 0)
    worker.run()
    assert shop.order() == ["charge", "refund"]
    assert worker.status(run) == "cancelled"


@pytest.mark.parametrize(("database_kind", "deed"), [("postgresql", "commits")], indirect=["database_kind"])
def test_a_claim_that_a_hook_has_committed_is_found_by_its_mark(bench: MakeBench, shop: Firm, host: CarelessHost) -> None:
    """CLAIM-3: nobody can say what became of the write, so it is read back; the claim is there, and holds."""
    worker = bench(database=host.database)
    run, message = at_first_step(worker)
    host.arm("action_runs.* SET status = 'running'")
    worker.deliver(message)
    assert (host.left, lost(worker), shop.order(), worker.step(run)) == (0, [], ["charge"], ("completed", 1))


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("deed", "alone"), [("swallows", False), ("swallows", True), ("begins anew", False)])
def test_an_outcome_and_its_decision_that_were_gone_after_their_commit_are_written_again(
    bench: MakeBench, shop: Firm, host: CarelessHost, alone: bool
) -> None:
    """CLAIM-3, FENCE-3: the body has run once, its result is recorded, and the next step is there once."""
    worker = bench(database=host.database)
    run, message = at_first_step(worker)
    if alone:
        worker.engine.drives = lambda workflow, queue: False  # type: ignore[method-assign]
    host.arm("action_runs.* SET status = 'completed'")
    worker.deliver(message)
    assert host.left == 0
    assert shop.order() == ["charge"]
    assert worker.step(run) == ("completed", 1)
    assert worker.events(run).count("action.completed") == 1
    worker.engine.drives = lambda workflow, queue: True  # type: ignore[method-assign]
    worker.run()
    assert shop.order() == ["charge", "reserve", "ship"]
    assert worker.status(run) == "completed"


@hazards
def test_a_child_whose_start_was_gone_after_its_commit_is_started_again(bench: MakeBench, host: CarelessHost) -> None:
    """CLAIM-3: the start is read back; the parent has one child, and goes on."""
    worker = bench(database=host.database)
    run = worker.start("order", "42")
    host.arm("^INSERT INTO .*children")
    message = worker.message(worker.take())
    worker.runner.persist(lambda: worker.deliver(message))
    assert host.left == 0
    (fields,) = lost(worker)
    assert {name: fields[name] for name in ("row", "run_id", "sequence", "workflow")} == {
        "row": "child", "run_id": run, "sequence": 1, "workflow": "parcel",
    }  # fmt: skip
    worker.run()
    assert worker.status(run) == "completed"
    assert worker.one("SELECT COUNT(*) FROM {flow_runs} WHERE parent_id = ?", run) == (1,)


@pytest.mark.parametrize(("database_kind", "deed"), [("postgresql", "swallows")], indirect=["database_kind"])
def test_a_child_whose_park_was_gone_after_its_commit_is_parked_again(bench: MakeBench, shop: Firm, host: CarelessHost) -> None:
    """CLAIM-3, RSIG-4: the child has failed, and its place is kept for the signal all the same."""
    worker = bench(database=host.database)
    run = worker.start("order", "42")

    def fails(order: str) -> Any:
        raise LookupError("no box")

    shop.bodies["pack"] = fails
    host.arm("^UPDATE .*children.* SET status = 'awaiting_retry'")
    for _ in range(20):
        if not worker.sender.queue:
            break
        message = worker.message(worker.take())
        delivery = worker.runner.persist(lambda: worker.deliver(message))
        if getattr(delivery, "state", None) == "failed":
            worker.runner.give_up(delivery)
    assert host.left == 0
    (fields,) = lost(worker)
    assert (fields["row"], fields["sequence"], fields["workflow"]) == ("child", 1, "parcel")
    assert worker.one("SELECT status FROM {children} WHERE run_id = ?", run) == ("awaiting_retry",)
    del shop.bodies["pack"]
    worker.signal(run, "again")
    worker.run()
    assert worker.status(run) == "completed"


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize("deed", ["swallows", "begins anew"])
def test_a_kick_that_was_gone_after_its_commit_sends_nothing_and_says_so(bench: MakeBench, host: CarelessHost) -> None:
    """CLAIM-3, KICK-1: the report and the journal say it; the next kick does what this one did not."""
    worker = bench(database=host.database)
    run, _ = at_first_step(worker)
    worker.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET repair_attempts = 7 WHERE id = ?", (run,)))
    host.arm("SET repair_attempts = 0, repair_after = NULL, wakes")
    report = kick(worker.engine, run, worker.sender)
    assert (host.left, report.committed, report.driven, report.rows) == (0, False, False, ())
    assert list(worker.sender.queue) == []
    assert worker.anomalies.lines == [
        ("claim_not_committed", {
            "run_id": run, "workflow": "checkout", "status": "running", "repair_attempts": 7, "claimed_attempts": None, "attempts": None,
        }),
    ]  # fmt: skip
    again = kick(worker.engine, run, worker.sender)
    assert (again.committed, again.driven, [row.sequence for row in again.sent]) == (True, True, [1])
    assert worker.one("SELECT repair_attempts FROM {flow_runs} WHERE id = ?", run) == (0,)
    assert len(worker.sender.queue) == 2


@postgresql_only
@pytest.mark.parametrize("deed", ["swallows"])
def test_a_start_and_a_signal_that_were_gone_after_their_commit_are_errors_to_their_caller(
    bench: MakeBench, host: CarelessHost
) -> None:
    """CLAIM-3, SIG-1: nothing was written, nothing is sent, and whoever called is told, so can call again."""
    worker = bench(database=host.database)
    host.arm("^INSERT INTO .*flow_runs")
    with pytest.raises(StoreError, match="swallowed"):
        worker.start("checkout", "42")
    assert worker.one("SELECT COUNT(*) FROM {flow_runs}") == (0,)
    run = worker.start("checkout", "42")
    host.arm("^INSERT INTO .*signals")
    with pytest.raises(StoreError, match="swallowed"):
        worker.signal(run, "go")
    assert worker.one("SELECT COUNT(*) FROM {signals}") == (0,)
    assert [message.kind for message in worker.sender.queue] == ["drive"]
