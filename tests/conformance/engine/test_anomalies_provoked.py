"""ANOM-1: every anomaly, provoked by what it tells of: the line that it leaves, and that no message suffers from it.

Each provocation is a few deliveries of real messages, in the order that brings it about. ``PROVOKED`` is complete: a code without a
provocation fails here, and so does a field that ``docs/reference/anomalies.md`` does not name, or names in vain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import timers
from dramatiq_saga.errors import ConcurrentTransitionError
from dramatiq_saga.events import ActionOutcomeRejected, CompensationOutcomeRejected, subscribe, unsubscribe
from dramatiq_saga.journal.anomalies import CODES, AnomalyLog
from dramatiq_saga.recovery.kick import kick
from tests.support.bench import Bench
from tests.support.deploying import deploy
from tests.support.hazards import CarelessHost

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "anomalies.md"
ROW = "row run_id sequence actor"
RUN = "run_id workflow"
THROWN = "error_type error_message"

RECLAIM = Settings.from_mapping({"sagas.reclaim.stale_running.enabled": True, "sagas.reclaim.stale_running.after_seconds": 60})


class Stage:
    """One worker in the test's hands, and an order: charge (undone by refund, which its result is needed for), then ship."""

    def __init__(self, url: str, prefix: str, host: CarelessHost | None) -> None:
        self.bodies: dict[str, Callable[[], Any]] = {}
        self.host = host
        database = None if host is None else host.database
        self.bench = Bench(url, self._declare, prefix=prefix, clock=ManualClock(), settings=RECLAIM, database=database)
        self.bench.engine.anomalies = AnomalyLog()

    def _declare(self, bench: Bench) -> None:
        def body(name: str) -> Callable[[], Any]:
            return lambda: self.bodies.get(name, lambda: name)()

        charge, refund, ship = (bench.actor(body(name), actor_name=name) for name in ("charge", "refund", "ship"))

        def order(flow: Any) -> Any:
            flow.action(charge).compensate_with(lambda made: refund.message()).run()
            return flow.run(ship)

        def both(flow: Any) -> Any:
            return flow.parallel(flow.action(charge), flow.action(ship)).run()

        def patient(flow: Any) -> Any:
            return flow.action(charge).retry_on_signal("again", when=lambda context: self.bodies["when"]()).run()

        def parent(flow: Any) -> Any:
            return flow.child(orders).close_policy("cancel").run()

        orders = bench.workflow(order)
        for function in (both, patient, parent):
            bench.workflow(function)

    def start(self, workflow: str, expires_in: float | None = None) -> str:
        """A run whose first drive has taken place."""
        run = self.bench.start(workflow, expires_in=expires_in)
        self.bench.deliver(self.bench.take())
        return run

    def fails(self) -> Any:
        raise LookupError("no such card")

    @contextmanager
    def nobody_drives(self) -> Iterator[None]:
        """Outcomes are recorded meanwhile, and no drive sees them."""
        drives, self.bench.engine.drives = self.bench.engine.drives, lambda workflow, queue: False  # type: ignore[method-assign]
        yield
        self.bench.engine.drives = drives  # type: ignore[method-assign]

    def other_code(self) -> None:
        """From now on the order's function asks for something else."""
        deploy(self.bench.engine, "order", lambda flow: flow.sleep(1))


Act = Callable[[Stage], tuple[str, str]]


@dataclass(frozen=True)
class Provocation:
    """``act`` gives the run and the status that it is to have afterwards; ``fields`` are those of its line."""

    code: str
    act: Act
    fields: frozenset[str]
    server: str | None = None
    deed: str = "swallows"
    also: tuple[str, ...] = field(default=())  # anomalies that go with it

    @property
    def name(self) -> str:
        return self.act.__name__


PROVOKED: list[Provocation] = []


def provokes(code: str, fields: str, **more: Any) -> Callable[[Act], Act]:
    def keep(act: Act) -> Act:
        PROVOKED.append(Provocation(code, act, frozenset(fields.split()), **more))
        return act

    return keep


# --- races -------------------------------------------------------------------------------------------------------------


@provokes("claim_lost", f"{ROW} status orphaned attempts run_status")
def a_message_comes_twice(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    message = stage.bench.message(stage.bench.take())
    stage.bench.deliver(message)
    stage.bench.deliver(message)
    stage.bench.run()
    return run, "completed"


@provokes("outcome_rejected", f"{ROW} outcome claimed_attempts attempts status result")
def a_step_completes_after_a_cancel(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    stage.bodies["charge"] = lambda: stage.bench.cancel(run)
    stage.bench.run()
    return run, "cancelled"


@provokes("outcome_rejected", f"{ROW} outcome claimed_attempts attempts status {THROWN}")
def a_step_fails_for_good_after_a_reclaim(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    message = stage.bench.take()

    def body() -> Any:
        del stage.bodies["charge"]
        stage.bench.store.write(lambda tx: tx.run("UPDATE {action_runs} SET reclaim_stale_at = 1 WHERE run_id = ?", (run,)))
        stage.bench.deliver(message)  # another worker has taken the row over, and is done
        raise LookupError("no such card")

    stage.bodies["charge"] = body
    stage.bench.deliver(message)
    stage.bench.run()
    return run, "completed"


@provokes("outcome_rejected", f"{ROW} outcome claimed_attempts attempts status")
def an_undo_ends_after_a_reclaim(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    stage.bench.deliver(stage.bench.take())
    assert stage.bench.compensate(run)
    (undo,) = [message for message in stage.bench.sender.queue if message.kind == "compensation"]

    def body() -> None:
        del stage.bodies["refund"]
        stage.bench.engine.clock.advance(61)
        stage.bench.deliver(undo)

    stage.bodies["refund"] = body
    stage.bench.deliver(undo)
    return run, "cancelled"


@provokes("rejection_undelivered", f"{ROW} listener {THROWN}", also=("outcome_rejected",))
def a_listener_fails_on_a_rejected_outcome(stage: Stage) -> tuple[str, str]:
    def refuses(event: ActionOutcomeRejected) -> None:
        assert (event.outcome, event.result, event.action.status) == ("completed", True, "cancelled")
        raise LookupError("no such inbox")

    subscribe(refuses, ActionOutcomeRejected)
    try:
        return a_step_completes_after_a_cancel(stage)
    finally:
        unsubscribe(refuses)


@provokes("rejection_undelivered", f"{ROW} listener {THROWN}", also=("outcome_rejected",))
def a_listener_fails_on_a_rejected_undo(stage: Stage) -> tuple[str, str]:
    def refuses(event: CompensationOutcomeRejected) -> None:
        assert (event.outcome, event.compensation.attempts, event.compensation.status) == ("completed", 2, "completed")
        raise LookupError("no such inbox")

    subscribe(refuses, CompensationOutcomeRejected)
    try:
        return an_undo_ends_after_a_reclaim(stage)
    finally:
        unsubscribe(refuses)


@provokes("batch_finished_early", f"{ROW} block")
def a_barrier_is_reached_too_early(stage: Stage) -> tuple[str, str]:
    run = stage.start("both")
    first, second = stage.bench.take(), stage.bench.take()
    stage.bench.deliver(first)
    stage.bench.deliver(stage.bench.callback(first))
    stage.bench.deliver(second)
    stage.bench.run()
    return run, "completed"


@provokes("write_refused", f"site {ROW}")
def a_step_is_given_up_after_a_cancel(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    stage.bodies["charge"] = stage.fails
    delivery = stage.bench.deliver(stage.bench.take())
    assert stage.bench.cancel(run)
    stage.bench.runner.give_up(delivery)
    return run, "cancelled"


@provokes("transition_lost", f"{RUN} observed intended actual")
def an_operator_cancels_what_has_completed(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    stage.bench.run()
    with pytest.raises(ConcurrentTransitionError):
        stage.bench.cancel(run)
    return run, "completed"


@provokes("transition_lost", f"{RUN} observed intended actual")
def a_drive_meets_a_cancel(stage: Stage) -> tuple[str, str]:
    run = stage.bench.start("both")
    stage.bench.overtake("decision", lambda: stage.bench.cancel(run))
    stage.bench.deliver(stage.bench.take())
    return run, "cancelled"


# --- code --------------------------------------------------------------------------------------------------------------


@provokes("retry_policy_threw", f"{ROW} {THROWN}")
def a_retry_policy_raises(stage: Stage) -> tuple[str, str]:
    run = stage.start("patient")
    stage.bodies.update(charge=stage.fails, when=stage.fails)
    stage.bench.run()
    return run, "failed"


@provokes("expiry_failed", f"{RUN} expiry_attempts {THROWN}")
def an_overdue_run_does_not_fit_its_code(stage: Stage) -> tuple[str, str]:
    run = stage.start("order", expires_in=60)
    with stage.nobody_drives():
        stage.bench.deliver(stage.bench.take())
        stage.other_code()
        stage.bench.engine.clock.advance(60)
        assert timers.fire(stage.bench.engine, run, stage.bench.sender).failed == 1
    return run, "running"


@provokes("replan_failed", f"{RUN} {THROWN}")
def a_failing_run_does_not_fit_its_code(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    stage.bodies["ship"] = stage.fails
    stage.bench.deliver(stage.bench.take())
    stage.other_code()
    stage.bench.run()
    return run, "waiting"


@provokes("replan_failed", f"{RUN} {THROWN}")
def a_closed_child_does_not_fit_its_code(stage: Stage) -> tuple[str, str]:
    run = stage.start("parent")
    drive = stage.bench.take()
    stage.bench.deliver(drive)
    with stage.nobody_drives():
        stage.bench.deliver(stage.bench.take())
    stage.bench.take()  # the drive that this outcome was to be seen by is lost
    stage.other_code()
    assert stage.bench.compensate(run)
    stage.bench.run()
    return drive.run_id, "waiting"


@provokes("replan_incomplete", f"{RUN} missing")
def a_failing_run_ends_before_a_step_that_has_to_be_undone(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    stage.bodies["ship"] = stage.fails
    stage.bench.deliver(stage.bench.take())
    deploy(stage.bench.engine, "order", lambda flow: stage.fails())
    stage.bench.run()
    return run, "waiting"


@provokes("replan_incomplete", f"{RUN} missing")
def an_operators_rollback_misses_a_step_that_has_to_be_undone(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    with stage.nobody_drives():
        stage.bench.deliver(stage.bench.take())
    ship, charge = stage.bench.broker.actors["ship"], stage.bench.broker.actors["charge"]
    deploy(stage.bench.engine, "order", lambda flow: [flow.run(charge), flow.run(ship)])
    with pytest.raises(ConcurrentTransitionError):
        stage.bench.compensate(run)
    return run, "running"


# --- hosts -------------------------------------------------------------------------------------------------------------


@provokes("claim_not_committed", f"{ROW} claimed_attempts attempts", server="postgresql")
def a_hook_voids_a_claim(stage: Stage) -> tuple[str, str]:
    run = stage.start("order")
    message = stage.bench.message(stage.bench.take())
    assert stage.host is not None
    stage.host.arm("action_runs.* SET status = 'running'")
    stage.bench.deliver(message)
    stage.bench.deliver(message)  # it was put back
    stage.bench.run()
    return run, "completed"


@provokes("claim_not_committed", "row run_id sequence workflow", server="postgresql", deed="begins anew")
def a_hook_voids_the_start_of_a_child(stage: Stage) -> tuple[str, str]:
    assert stage.host is not None
    run = stage.bench.start("parent")
    stage.host.arm("^INSERT INTO .*children")
    message = stage.bench.message(stage.bench.take())
    stage.bench.runner.persist(lambda: stage.bench.deliver(message))
    stage.bench.run()
    return run, "completed"


@provokes("claim_not_committed", f"{RUN} status repair_attempts", server="postgresql")
def a_hook_voids_a_kick(stage: Stage) -> tuple[str, str]:
    assert stage.host is not None
    run = stage.start("order")
    stage.host.arm("SET repair_attempts = 0, repair_after = NULL, wakes")
    assert not kick(stage.bench.engine, run, stage.bench.sender).committed
    stage.bench.run()
    return run, "completed"


# --- what is the same for all --------------------------------------------------------------------------------------------


@pytest.fixture
def make_stage(
    request: pytest.FixtureRequest, sqlite_path: Path, table_prefix: str
) -> Iterator[Callable[[Provocation], Stage]]:
    made: list[Stage] = []

    def make(provocation: Provocation) -> Stage:
        server = provocation.server
        host = None if server is None else CarelessHost(server, provocation.deed)
        url = f"sqlite:///{sqlite_path}" if server is None else request.getfixturevalue("postgres_url")
        made.append(Stage(url, table_prefix, host))
        return made[-1]

    yield make
    for stage in made:
        stage.bench.close()


def test_every_code_is_provoked() -> None:
    assert {provocation.code for provocation in PROVOKED} == set(CODES)


@pytest.mark.parametrize("provocation", PROVOKED, ids=lambda provocation: provocation.name)
def test_an_anomaly_leaves_its_line_and_nothing_in_the_history(
    make_stage: Callable[[Provocation], Stage], provocation: Provocation
) -> None:
    """ANOM-1: at the level that is set, with these fields and no others, about this run; and the run is as it should be."""
    stage = make_stage(provocation)
    with capture_logs() as lines:
        run, status = provocation.act(stage)
    told = [line for line in lines if line["event"] in CODES]
    assert {line["event"] for line in told} == {provocation.code, *provocation.also}
    for line in told:
        if line["event"] == provocation.code:
            assert set(line) - {"event", "log_level"} == provocation.fields
            assert (line["run_id"], line["log_level"]) == (run, "info")
    assert stage.bench.status(run) == status
    assert not set(CODES) & {row[0] for row in stage.bench.all("SELECT type FROM {flow_events}")}


@pytest.mark.parametrize(
    "provocation", [one for one in PROVOKED if one.server is None], ids=lambda provocation: provocation.name
)
def test_a_broken_logger_fails_no_message(
    make_stage: Callable[[Provocation], Stage],
    provocation: Provocation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ANOM-1: it is told through the standard library's logging instead, and everything else is as before."""

    def broken(*names: Any) -> Any:
        raise OSError("disk full")

    stage = make_stage(provocation)
    monkeypatch.setattr(structlog, "get_logger", broken)
    with caplog.at_level("INFO"):
        run, status = provocation.act(stage)
    told = {record.getMessage().partition(" ")[0] for record in caplog.records}
    assert told & set(CODES) == {provocation.code, *provocation.also}
    assert stage.bench.status(run) == status


def test_the_reference_names_the_fields_of_every_anomaly() -> None:
    """ANOM-1: those that were seen above, and no others."""
    page = PAGE.read_text(encoding="utf-8")
    named = {
        code: set(re.findall(r"`(\w+)`", fields))
        for code, fields in re.findall(r"^### `(\w+)`\n.*?^Fields: (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    }
    seen: dict[str, set[str]] = {}
    for provocation in PROVOKED:
        seen.setdefault(provocation.code, set()).update(provocation.fields)
    assert named == seen
