"""Real workers, really killed: at every point of a step, a drive and a rollback (C01, C04, C20, C28, C44, C65).

A worker sends itself SIGKILL at a named point; another is started on what it left behind. Then every run ends as it must,
nothing that was recorded is done again, and what was not recorded is done again at most once.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga import get_flow
from tests.processes import kill_app
from tests.support.effects import EffectLog
from tests.support.gates import Gates
from tests.support.processes import Process, WorkerProcess
from tests.support.waiting import eventually

ENDED = {"completed", "failed", "cancelled", "expired"}

#: Reclaim after one second, so that nobody has to wait.
RECLAIMS = {
    "actions.reclaim.stale_running.enabled": True,
    "actions.reclaim.stale_running.after_seconds": 1,
    "sagas.reclaim.stale_running.enabled": True,
    "sagas.reclaim.stale_running.after_seconds": 1,
}


class Street:
    """A shop, its workers, and what became of its orders."""

    def __init__(
        self, environment: dict[str, str], start: Callable[..., WorkerProcess], python: Callable[..., Process]
    ) -> None:
        self.environment = environment
        self._start = start
        self._python = python
        self.shop = kill_app.Shop(environment)
        self.store = self.shop.checkout._middleware.engine(self.shop.broker).store
        self.store.migrate()

    def set(self, **settings: Any) -> None:
        """Settings for workers that are started from now on; keys are written with double underscores for dots."""
        known = json.loads(self.environment.get(kill_app.SETTINGS, "{}"))
        known |= {name.replace("__", "."): value for name, value in settings.items()}
        self.environment[kill_app.SETTINGS] = json.dumps(known)

    def worker(self, *, die_at: str | None = None, **options: Any) -> WorkerProcess:
        environment = dict(self.environment)
        if die_at is not None:
            environment[kill_app.DIE_AT] = die_at
        options = {"threads": 2, **options}
        return self._start("tests.processes.kill_app", env=environment, **options)

    def sweep(self) -> None:
        """What cron would run."""
        swept = self._python("-m", "dramatiq_saga.cli", "--app", "tests.processes.kill_app", "sweep", env=self.environment)
        assert swept.wait() == 0, swept.output()

    def resume_rollback(self, run: str) -> None:
        """What an operator would type."""
        done = self._python(
            "-m", "dramatiq_saga.cli", "--app", "tests.processes.kill_app", "resume-rollback", run, env=self.environment
        )
        assert done.wait() == 0, done.output()

    def all(self, sql: str, *params: object) -> list[tuple[Any, ...]]:
        return self.store.read(lambda tx: tx.all(sql, params))

    def status(self, run: str) -> str:
        return str(self.all("SELECT status FROM {flow_runs} WHERE id = ?", run)[0][0])

    def wait_ended(self, *runs: str) -> None:
        for run in runs:
            eventually(lambda run=run: self.status(run) in ENDED, 40, because=f"run {run} ends")  # type: ignore[misc]

    def steps(self, run: str) -> list[tuple[str, str, int]]:
        """Actor, status and tries of every step."""
        return self.all("SELECT actor, status, tries FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run)

    def close(self) -> None:
        self.store.close()
        self.shop.broker.close()


MakeStreet = Callable[..., Street]


@pytest.fixture
def make_street(worker_process: Callable[..., WorkerProcess], python_process: Callable[..., Process]) -> Iterator[MakeStreet]:
    made: list[Street] = []

    def make(database: str, **environment: str) -> Street:
        made.append(Street({kill_app.DATABASE: database, **environment}, worker_process, python_process))
        return made[-1]

    yield make
    for street in made:
        street.close()


@pytest.fixture
def street(make_street: MakeStreet, sqlite_path: Path) -> Street:
    """Rows and queue in one SQLite file."""
    return make_street(f"sqlite:///{sqlite_path}", **{kill_app.PREFIX: "saga_", kill_app.SETTINGS: json.dumps(RECLAIMS)})


@pytest.fixture
def wide_street(postgres_url: str, redis_url: str, table_prefix: str, make_street: MakeStreet) -> Street:
    """Rows in PostgreSQL, queue in Redis. The workers are gone before either is cleaned."""
    return make_street(
        postgres_url,
        **{kill_app.REDIS: redis_url, kill_app.PREFIX: table_prefix, kill_app.SETTINGS: json.dumps(RECLAIMS)},
    )


@pytest.fixture
def server_street(mariadb_url: str, table_prefix: str, make_street: MakeStreet) -> Street:
    """Rows and queue in one MariaDB."""
    return make_street(mariadb_url, **{kill_app.PREFIX: table_prefix, kill_app.SETTINGS: json.dumps(RECLAIMS)})


# --- once at every point ---------------------------------------------------------------------------------------------

#: point -> how often the body at that point runs: again only where nothing had been recorded of it
STEP_POINTS = {
    "reserved:checkout": 1,
    "handed over:reserve": 1,
    "claimed:reserve": 1,
    "in body:reserve": 2,
    "after body:reserve": 2,
    "outcome written:reserve": 2,
    "outcome committed:reserve": 1,
    "decision written": 1,
    "decision committed": 1,
    "acknowledging:reserve": 1,
    "acknowledged:reserve": 1,
}

UNDO_POINTS = {
    "handed over:refund": 1,
    "claimed:refund": 1,
    "in body:refund": 2,
    "after body:refund": 2,
    "outcome written:refund": 2,
    "outcome committed:refund": 1,
    "acknowledging:unreserve": 1,
}

WIDE_POINTS = [
    "claimed:reserve",
    "after body:reserve",
    "outcome committed:reserve",
    "decision committed",
    "acknowledging:reserve",
]
WIDE_UNDO_POINTS = ["in body:refund", "outcome committed:unreserve", "outcome committed:refund"]


def killed_once(street: Street, effects: EffectLog, order: str, point: str, **options: Any) -> str:
    """An order whose worker died at that point, and which another has brought to its end."""
    run = sent_and_killed(street, effects, order, point, **options)
    street.worker(**options)
    street.wait_ended(run)
    return run


def sent_and_killed(street: Street, effects: EffectLog, order: str, point: str, **options: Any) -> str:
    """The same, left as the dead worker has left it. (Dramatiq's supervisor waits for ever for a process that dies at its start.)"""
    first = street.worker(die_at=point, **options)
    run: str = street.shop.checkout.send(order).id
    eventually(lambda: effects.count("killed"), because=f"a worker dies at {point!r}")
    first.wait()
    return run


def check_success(street: Street, effects: EffectLog, run: str, point: str, bodies: int) -> None:
    assert street.status(run) == "completed"
    assert street.steps(run) == [("charge", "completed", 0), ("reserve", "completed", 0), ("ship", "completed", 0)]
    expected = {"charge": 1, "reserve": bodies, "ship": 1}
    assert {name: effects.count(name) for name in expected} == expected, point
    keys = {entry["key"] for entry in effects.entries("reserve")}
    assert len(keys) == 1, "FENCE-4: the idempotency key is the same for both"
    done = street.all("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'action.completed'", run)
    assert done == [(3,)]


def check_rollback(street: Street, effects: EffectLog, run: str, point: str, bodies: int) -> None:
    assert street.all("SELECT status, rollback FROM {flow_runs} WHERE id = ?", run) == [("failed", "done")]
    undone = street.all(
        "SELECT sequence FROM {flow_events} WHERE run_id = ? AND type = 'compensation.completed' ORDER BY id", run
    )
    assert undone == [(2,), (1,)]
    actor = "refund" if "refund" in point else "unreserve"
    expected = {"charge": 1, "reserve": 1, "ship": 1, "unreserve": 1, "refund": 1} | {actor: bodies}
    assert {name: effects.count(name) for name in expected} == expected, point
    first_refund = effects.names().index("refund")
    assert first_refund > effects.names().index("unreserve ended")
    assert street.all("SELECT tries FROM {compensation_runs} WHERE run_id = ?", run) == [(0,), (0,)]


@pytest.mark.parametrize("point", STEP_POINTS)
def test_a_kill_around_a_step_costs_neither_a_step_nor_a_second_outcome(street: Street, effects: EffectLog, point: str) -> None:
    """CLAIM-1, FENCE-1, FENCE-3, DRIVE-1, DRIVE-3, C04."""
    # With one thread: a second could begin what follows, between the commit and the kill at the acknowledgement.
    alone = {"threads": 1} if point.startswith("acknowledg") else {}
    run = killed_once(street, effects, "book", point, **alone)
    check_success(street, effects, run, point, STEP_POINTS[point])
    eventually(
        lambda: not street.all("SELECT 1 FROM {messages}"), because="the queue is empty, and nothing is in the dead letters"
    )


@pytest.mark.parametrize("point", UNDO_POINTS)
def test_a_kill_in_a_rollback_costs_neither_an_undo_nor_a_second_one(street: Street, effects: EffectLog, point: str) -> None:
    """COMP-1, C28: the rest of the rollback runs in its order; no step runs again."""
    # With one thread: a second could begin what follows, between the commit and the kill at the acknowledgement.
    alone = {"threads": 1} if point.startswith("acknowledging") else {}
    run = killed_once(street, effects, "a book to nowhere", point, **alone)
    check_rollback(street, effects, run, point, UNDO_POINTS[point])
    eventually(lambda: street.all("SELECT state, actor FROM {messages}") == [(3, "ship")], because="one dead letter is left")


@pytest.mark.parametrize("point", WIDE_POINTS)
def test_a_kill_around_a_step_costs_nothing_where_queue_and_rows_are_apart(
    wide_street: Street, effects: EffectLog, point: str
) -> None:
    """DRIVE-3, DRIVE-2: what was committed and not sent is sent by the redelivery of what led to it; no doctor is needed."""
    run = killed_once(wide_street, effects, "book", point)
    check_success(wide_street, effects, run, point, STEP_POINTS[point])


@pytest.mark.parametrize("point", WIDE_UNDO_POINTS)
def test_a_kill_in_a_rollback_costs_nothing_where_queue_and_rows_are_apart(
    wide_street: Street, effects: EffectLog, point: str
) -> None:
    """DRIVE-3, COMP-1: a redelivered undo sends the one after it, when its worker could not."""
    run = killed_once(wide_street, effects, "a book to nowhere", point)
    check_rollback(wide_street, effects, run, point, 2 if point.startswith("in body") else 1)


LEVEL_POINTS = [
    "claimed:refund",
    "in body:refund",
    "after body:unreserve",
    "outcome written:refund",
    "outcome committed:unreserve",
    "acknowledging:refund",
]


def killed_in_a_level(street: Street, effects: EffectLog, point: str) -> None:
    """Two undos of one level are at work when their worker dies; another brings both, and what comes after them, to their end."""
    # With one thread at an acknowledgement: a second could begin what follows, between the commit and the kill.
    first = street.worker(die_at=point, threads=1 if point.startswith("acknowledg") else 2)
    run: str = street.shop.tour.send("a tour to nowhere").id
    eventually(lambda: effects.count("killed"), because=f"a worker dies at {point!r}")
    first.wait()
    street.worker()
    street.wait_ended(run)
    assert street.all("SELECT status, rollback, rollback_error FROM {flow_runs} WHERE id = ?", run) == [
        ("failed", "done", None)
    ]
    rows = street.all("SELECT sequence, level, status FROM {compensation_runs} WHERE run_id = ? ORDER BY level, sequence", run)
    assert rows == [(3, 0, "completed"), (4, 0, "completed"), (1, 1, "completed")]
    undone = street.all(
        "SELECT sequence FROM {flow_events} WHERE run_id = ? AND type = 'compensation.completed' ORDER BY id", run
    )
    assert sorted(undone[:2]) == [(3,), (4,)], "each once, and both before the next level"
    assert undone[2:] == [(1,)]
    names = effects.names()
    assert names.count("alight") == 1
    assert names.index("alight") > max(names.index("refund ended"), names.index("unreserve ended"))
    assert {name: names.count(name) for name in ("board", "charge", "reserve", "ship")} == {
        "board": 1, "charge": 1, "reserve": 1, "ship": 1,
    }  # fmt: skip
    assert street.all("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'flow.failed'", run) == [(1,)]


@pytest.mark.parametrize("point", LEVEL_POINTS)
def test_a_kill_in_the_middle_of_a_level_costs_neither_an_undo_nor_a_second_one(
    street: Street, effects: EffectLog, point: str
) -> None:
    """COMP-1, COMP-5, C28: on one SQLite file."""
    killed_in_a_level(street, effects, point)
    eventually(lambda: street.all("SELECT state, actor FROM {messages}") == [(3, "ship")], because="one dead letter is left")


@pytest.mark.parametrize("point", ["in body:refund", "outcome committed:unreserve"])
def test_a_kill_in_the_middle_of_a_level_costs_nothing_where_queue_and_rows_are_apart(
    wide_street: Street, effects: EffectLog, point: str
) -> None:
    """DRIVE-3, COMP-5: what was to follow is sent by a redelivery."""
    killed_in_a_level(wide_street, effects, point)


@pytest.mark.parametrize("point", ["in body:refund", "outcome written:unreserve", "outcome committed:refund"])
def test_a_kill_in_the_middle_of_a_level_costs_nothing_on_a_server(
    server_street: Street, effects: EffectLog, point: str
) -> None:
    """DRIVE-7, COMP-5: on MariaDB."""
    killed_in_a_level(server_street, effects, point)


@pytest.mark.claims_alone
def test_a_rollback_that_halted_for_a_lost_worker_is_resumed(street: Street, effects: EffectLog) -> None:
    """COMP-8, PAR-3, C26: its worker was killed in the middle of a level, and with reclaim off nothing comes back for the undo."""
    street.set(sagas__reclaim__stale_running__enabled=False)
    first = street.worker(die_at="in body:refund")
    run: str = street.shop.tour.send("a tour to nowhere").id
    eventually(lambda: effects.count("killed"), because="a worker dies in an undo")
    first.wait()
    street.worker()
    street.wait_ended(run)
    assert street.all("SELECT status, rollback FROM {flow_runs} WHERE id = ?", run) == [("failed", "halted")]
    assert effects.count("alight") == 0
    street.resume_rollback(run)
    eventually(
        lambda: street.all("SELECT status, rollback FROM {flow_runs} WHERE id = ?", run) == [("failed", "done")],
        because="the rollback has gone on",
    )
    assert effects.count("refund") == 2
    assert effects.count("refund ended") == 1
    assert effects.count("alight") == 1
    assert {entry["key"] for entry in effects.entries("refund")} == {f"{run}:3:undo"}


# --- cases -----------------------------------------------------------------------------------------------------------


def test_a_failure_that_was_the_last_is_not_tried_again_after_a_kill(street: Street, effects: EffectLog) -> None:
    """NATIVE-1, NATIVE-2, C20: the try was recorded, Dramatiq's decision about it was not; none was left."""
    run = killed_once(street, effects, "a book to nowhere", "failure recorded:ship")
    check_rollback(street, effects, run, "refund", 1)
    assert street.steps(run)[2] == ("ship", "failed", 1)


@pytest.mark.claims_alone
def test_a_step_of_a_lost_worker_is_never_run_again_in_silence_with_reclaim_off(street: Street, effects: EffectLog) -> None:
    """C20, CLAIM-2: the redelivery loses its claim and says that the row is orphaned; the step stays ``running``."""
    street.set(actions__reclaim__stale_running__enabled=False)
    run = sent_and_killed(street, effects, "book", "in body:reserve")
    second = street.worker()
    second.wait_for_output("claim_lost")
    assert "orphaned=True" in second.output()
    eventually(lambda: not street.all("SELECT 1 FROM {messages}"), because="the message is acknowledged")
    assert street.steps(run)[1] == ("reserve", "running", 0)
    assert effects.count("reserve") == 1
    assert street.status(run) == "running"


@pytest.mark.claims_alone
def test_an_undo_of_a_lost_worker_halts_the_rollback_with_reclaim_off(street: Street, effects: EffectLog) -> None:
    """PAR-3, COMP-4: the run ends and says what was not undone; nobody waits for ever."""
    street.set(sagas__reclaim__stale_running__enabled=False)
    run = sent_and_killed(street, effects, "a book to nowhere", "in body:unreserve")
    street.worker()
    street.wait_ended(run)
    ((status, rollback, error),) = street.all("SELECT status, rollback, rollback_error FROM {flow_runs} WHERE id = ?", run)
    assert (status, rollback) == ("failed", "halted")
    assert "CompensationUnfinishedError" in error
    assert effects.count("unreserve") == 1
    assert effects.count("refund") == 0


def test_a_crash_in_the_middle_of_a_rollback_resumes_where_it_was(street: Street, effects: EffectLog) -> None:
    """C28: killed in an undo after another was committed; its message comes twice, and the sweep drives the run as well."""
    street.set(repair__enabled=True, repair__grace_seconds=1)
    run = sent_and_killed(street, effects, "a book to nowhere", "in body:refund")
    street.store.write(
        lambda tx: tx.run(
            "INSERT INTO {messages} (queue, state, priority, available_at, attempts, actor, message_id, message, enqueued_at) "
            "SELECT queue, 0, priority, available_at, 0, actor, message_id, message, enqueued_at FROM {messages} WHERE state = 2"
        )
    )
    street.sweep()
    street.worker()
    street.sweep()
    street.wait_ended(run)
    check_rollback(street, effects, run, "refund", 2)
    assert [entry["attempt"] for entry in effects.entries("refund")] == [1, 2]


def test_one_killed_process_of_four_costs_its_steps_time_and_no_try(street: Street, effects: EffectLog, gates: Gates) -> None:
    """C44: eight steps at work in four processes; whoever lost them to the kill runs them again, the others are done."""
    runs = [street.shop.single.send(f"gate-{number}").id for number in range(8)]
    street.environment["dramatiq_queue_prefetch"] = "2"  # so that nobody holds more than it can work on
    workers = street.worker(processes=4, threads=2, arguments=["--worker-shutdown-timeout", "20000"])
    eventually(lambda: effects.count("long") == 8, 40)
    victim = effects.entries("long")[0]["pid"]
    lost = {entry["order"] for entry in effects.entries("long", pid=victim)}
    os.kill(victim, signal.SIGKILL)
    for number in range(8):
        gates.open(f"long-gate-{number}")
    assert workers.wait(40) != 0  # Dramatiq's supervisor takes the others down with it
    street.worker(processes=2)
    street.wait_ended(*runs)
    assert {street.status(run) for run in runs} == {"completed"}
    for entry in effects.entries("long"):
        times = effects.count("long", order=entry["order"])
        assert times == (2 if entry["order"] in lost else 1)
    assert street.all("SELECT DISTINCT tries FROM {action_runs}") == [(0,)]


def test_a_terminated_worker_finishes_what_runs_and_gives_back_what_it_has_not_begun(
    street: Street, effects: EffectLog, gates: Gates
) -> None:
    """QUEUE-7, NATIVE-4: nobody waits for a lease, no try is spent."""
    street.environment[kill_app.RETRY_AFTER] = "300"
    runs = [street.shop.single.send(order).id for order in ("gate-until-told", "short-second", "short-third")]
    worker = street.worker(threads=1)
    gates.wait_reached("long-gate-until-told")
    eventually(lambda: street.all("SELECT COUNT(*) FROM {messages} WHERE state = 2")[0][0] >= 2, because="more is prefetched")
    gates.open("long-gate-until-told")  # it ends once its thread has been told to stop
    assert worker.terminate() == 0
    assert effects.count("long") == 1
    assert street.status(runs[0]) == "completed"
    assert street.all("SELECT COUNT(*) FROM {messages} WHERE state = 2") == [(0,)]
    street.worker(threads=1)
    street.wait_ended(*runs)
    assert effects.count("long") == 3
    assert street.all("SELECT DISTINCT tries, attempts FROM {action_runs}") == [(0, 1)]


def test_steps_that_are_told_of_a_shutdown_are_released_at_once(street: Street, effects: EffectLog, gates: Gates) -> None:
    """NATIVE-4, C44: running to pending, no try spent, the fence moved on; however often one deploys."""
    street.environment[kill_app.RETRY_AFTER] = "300"
    street.set(actions__reclaim__stale_running__enabled=False)
    runs = [street.shop.interrupted.send(f"order-{number}").id for number in range(2)]
    for deployment in (1, 2):
        worker = street.worker(threads=2, arguments=["--worker-shutdown-timeout", "20000"])
        eventually(lambda count=2 * deployment: effects.count("told") == count)  # type: ignore[misc]
        assert worker.terminate() == 0
        assert effects.count("told to stop") == 2 * deployment
        assert street.all("SELECT DISTINCT status, tries, attempts FROM {action_runs}") == [("pending", 0, deployment)]
    gates.open("told")
    street.worker(threads=2)
    street.wait_ended(*runs)
    assert {street.status(run) for run in runs} == {"completed"}
    assert street.all("SELECT DISTINCT tries, attempts FROM {action_runs}") == [(0, 3)]


def test_a_step_that_outlives_the_grace_period_is_reclaimed(street: Street, effects: EffectLog, gates: Gates) -> None:
    """C44: cut off without a word; the row stays ``running`` until its claim is stale."""
    run = street.shop.single.send("gate-slow").id
    worker = street.worker(threads=1, arguments=["--worker-shutdown-timeout", "300"])
    gates.wait_reached("long-gate-slow")
    worker.terminate()
    assert street.steps(run) == [("long", "running", 0)]
    gates.open("long-gate-slow")
    street.worker(threads=1)
    street.wait_ended(run)
    assert effects.count("long") == 2
    assert street.steps(run) == [("long", "completed", 0)]


def test_twelve_worker_processes_start_at_once_on_an_empty_file(
    make_street: MakeStreet, sqlite_path: Path, worker_process: Callable[..., WorkerProcess], effects: EffectLog
) -> None:
    """C65: one of them creates the tables, none crashes, and they work."""
    environment = {kill_app.DATABASE: f"sqlite:///{sqlite_path}", kill_app.PREFIX: "saga_"}
    workers = worker_process("tests.processes.kill_app", processes=12, threads=1, env=environment, ready=False)
    workers.wait_ready(60)
    street = make_street(environment[kill_app.DATABASE], **{kill_app.PREFIX: "saga_"})
    runs = [street.shop.checkout.send(f"book-{number}").id for number in range(12)]
    street.wait_ended(*runs)
    assert {street.status(run) for run in runs} == {"completed"}
    assert {effects.count(name) for name in ("charge", "reserve", "ship")} == {12}
    assert workers.terminate() == 0
    assert "Traceback" not in workers.output()


@pytest.mark.claims_alone
def test_a_redelivery_while_the_first_copy_still_runs_changes_nothing(
    wide_street: Street, effects: EffectLog, gates: Gates
) -> None:
    """C01: the first worker's heart has stopped beating in Redis, though it works; the second copy loses its claim."""
    wide_street.set(actions__reclaim__stale_running__enabled=False)
    run = wide_street.shop.single.send("gate-busy").id
    busy = wide_street.worker(threads=1)
    gates.wait_reached("long-gate-busy")
    for child in effects.entries("long"):
        os.kill(child["pid"], signal.SIGSTOP)  # holds the interpreter, and everything else, as C code can
    other = wide_street.worker(threads=1)
    other.wait_for_output("claim_lost", timeout=30)
    for child in effects.entries("long"):
        os.kill(child["pid"], signal.SIGCONT)
    gates.open("long-gate-busy")
    wide_street.wait_ended(run)
    assert effects.count("long") == 1
    assert wide_street.steps(run) == [("long", "completed", 0)]
    done = wide_street.all("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'action.completed'", run)
    assert done == [(1,)]
    assert busy.running


# --- between a park and its retry -------------------------------------------------------------------------------------

#: point -> how often the body runs in the cycle that the point is in
PARK_POINTS = {"failure recorded:pay": 1, "outcome written:pay": 1, "outcome committed:pay": 1}
RETRY_POINTS = {
    "reserved:patient": 1,
    "decision written": 1,
    "decision committed": 1,
    "claimed:pay": 1,
    "in body:pay": 2,
    "outcome written:pay": 2,
}


def keys(effects: EffectLog, run: str, cycle: int) -> int:
    """How often the body was called in a cycle: each has a key of its own (FENCE-4)."""
    return sum(1 for entry in effects.entries("pay") if entry["key"] == f"{run}:1:{cycle}")


def park_and_retry(street: Street, effects: EffectLog, *, park: str | None = None, retry: str | None = None) -> str:
    """A run whose step is parked and run again by a signal, with a worker killed at one of the two."""

    def parked() -> bool:
        return [status for _, status, _ in street.steps(run)] == ["awaiting_retry"]

    first = street.worker(die_at=park)
    first.wait_ready()
    run: str = street.shop.patient.send("order").id
    if park is not None:
        eventually(lambda: effects.count("killed"), because=f"a worker dies at {park!r}")
        first.wait()
        first = street.worker()
    eventually(parked, 40, because="the step is parked")
    first.terminate()
    assert street.status(run) == "waiting"
    second = None
    if (
        retry is not None
    ):  # up before there is anything to do: Dramatiq's master waits for ever for a worker that dies as it boots
        second = street.worker(die_at=retry)
        second.wait_ready()
    effects.record("topped up")
    get_flow(run, broker=street.shop.broker).signal("top-up")
    if second is not None:
        eventually(lambda: effects.count("killed"), because=f"a worker dies at {retry!r}")
        second.wait()
    street.worker()
    street.wait_ended(run)
    return run


def check_retried(street: Street, effects: EffectLog, run: str, bodies: tuple[int, int]) -> None:
    assert street.status(run) == "completed"
    assert [keys(effects, run, cycle) for cycle in (0, 1)] == list(bodies)
    assert street.all("SELECT status, cycle FROM {action_runs} WHERE run_id = ?", run) == [("completed", 1)]
    assert street.all("SELECT status FROM {waits} WHERE run_id = ?", run) == [("consumed",)]
    assert street.all("SELECT status FROM {signals} WHERE run_id = ?", run) == [("consumed",)]
    told = [kind for (kind,) in street.all("SELECT type FROM {flow_events} WHERE run_id = ? ORDER BY id", run)]
    assert [kind for kind in told if "retr" in kind] == ["action.awaiting_retry", "action.retried"]


@pytest.mark.parametrize("point", PARK_POINTS)
def test_a_worker_killed_while_it_parks_a_step_leaves_it_parked_once(street: Street, effects: EffectLog, point: str) -> None:
    """RSIG-1, FENCE-3: the failure is not forgotten, the body is not called again, and the signal finds one wait."""
    run = park_and_retry(street, effects, park=point)
    check_retried(street, effects, run, (PARK_POINTS[point], 1))


@pytest.mark.parametrize("point", RETRY_POINTS)
def test_a_worker_killed_between_the_signal_and_the_retry_costs_no_cycle(
    street: Street, effects: EffectLog, point: str
) -> None:
    """RSIG-1, DRIVE-2: the signal is spent once, and the step runs again once whoever drives."""
    run = park_and_retry(street, effects, retry=point)
    check_retried(street, effects, run, (1, RETRY_POINTS[point]))


@pytest.mark.parametrize(("park", "retry"), [("outcome committed:pay", None), (None, "decision committed")])
def test_a_worker_killed_around_a_park_on_many_machines(
    wide_street: Street, effects: EffectLog, park: str | None, retry: str | None
) -> None:
    """RSIG-1, DRIVE-3: rows in PostgreSQL, queue in Redis; a message that never left is sent by the redelivery."""
    run = park_and_retry(wide_street, effects, park=park, retry=retry)
    check_retried(wide_street, effects, run, (1, 1))
