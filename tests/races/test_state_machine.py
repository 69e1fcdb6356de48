"""Everything that can happen to a run, in any order: what must hold holds all the same.

Two workers with caches of their own share one real SQLite file. Hypothesis decides what happens next: a message is delivered
(again, late, to the other worker), lost, a body succeeds, fails, is interrupted or dies with its worker, stragglers report,
time passes, somebody cancels or rolls back, the sweep comes by, a commit is lost sight of. After every move the rows are
compared with what they were. In the end every worker is gone, the sweep and new workers finish what is left, and every run
has ended. ``DRAMATIQ_SAGA_TEST_THOROUGH`` plays many more and longer games.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Shutdown
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peewee import SqliteDatabase

from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import undoing
from dramatiq_saga.engine.claim import Claim, ClaimAttempt, Lost
from dramatiq_saga.engine.core import SnapshotCache
from dramatiq_saga.engine.retry_on_signal import Stored, answer_all
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import CannotSignalFlowError, ConcurrentTransitionError, StoreError
from dramatiq_saga.interrupts import Body
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.sweep import sweep
from dramatiq_saga.step import Delivery
from tests.model.world import recovering
from tests.support.bench import WRITES, Bench

THOROUGH = bool(os.environ.get("DRAMATIQ_SAGA_TEST_THOROUGH"))

FINAL = {"completed", "failed", "cancelled", "expired"}
SETTLED = {"completed", "optional_failed", "expired", "cancelled"}


def declare(bench: Bench) -> None:
    """Steps of every kind that a rollback has to tell apart."""
    names = ("book", "unbook", "charge", "refund", "notify", "ship", "recall")
    book, unbook, charge, refund, notify, ship, recall = (bench.actor(_body(name)) for name in names)

    def trip(flow: Any, who: str) -> str:
        flow.side_effect("seed", lambda: 7)
        flow.saga(
            flow.action(book, who).compensate_with(unbook, who),
            flow.action(charge, who).compensate_with(lambda charged: refund.message(charged)),
        ).compensate_in_parallel().run()
        flow.run(notify, who)
        return str(flow.action(ship, who).compensate_with(recall, who).compensate_step_on_self_failure().run())

    def convoy(flow: Any, who: str) -> str:
        """Three steps side by side, two at a time; the first failure cancels what has not begun."""
        flow.parallel(
            flow.action(book, who).compensate_with(unbook, who),
            flow.action(charge, who).compensate_with(lambda charged: refund.message(charged)),
            flow.action(notify, who),
        ).max_in_flight(2).run()
        return str(flow.action(ship, who).compensate_with(recall, who).compensate_step_on_self_failure().run())

    def patient(flow: Any, who: str) -> str:
        """Where charging has failed it waits for a signal, twice at most; and so does one of two side by side."""
        flow.action(book, who).compensate_with(unbook, who).run()
        flow.action(charge, who).compensate_with(lambda charged: refund.message(charged)).retry_on_signal(
            "top-up", max_retries=2, wait_seconds=600
        ).run()
        flow.parallel(
            flow.action(notify, who).retry_on_signal("top-up", max_retries=2),
            flow.action(ship, who).compensate_with(recall, who).compensate_step_on_self_failure(),
        ).wait_all_then_fail().run()
        return who

    bench.workflow(trip)
    bench.workflow(convoy)
    bench.workflow(patient)


def _body(name: str) -> Any:
    def body(who: str) -> str:
        raise AssertionError(f"{name} is ended by the machine, never called")

    body.__name__ = name
    return body


class Patience:
    """Stands in for the event that a worker waits on between two tries at the store: no time passes."""

    def is_set(self) -> bool:
        return False

    def wait(self, _: float) -> bool:
        return False


class World:
    """Two workers on one file, which all games share: making one takes longer than playing on it."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.workers = [self._worker(directory / "saga.db") for _ in range(2)]

    def _worker(self, path: Path) -> Bench:
        database = SqliteDatabase(str(path), pragmas={"synchronous": "normal"})
        bench = Bench(str(path), declare, clock=self.clock, settings=recovering(), database=database)
        bench.runner.stopping = Patience()  # type: ignore[assignment]
        bench.engine.note_cost = lambda run_id, seconds: None  # type: ignore[method-assign]  # no game depends on the machine's speed
        return bench

    def begin_anew(self) -> None:
        """As if nothing had ever been played: a game has to come out the same when it is repeated."""
        self.clock._now = 1_700_000_000_000
        tables = (
            "flow_runs",
            "action_runs",
            "compensation_runs",
            "side_effects",
            "flow_events",
            "tags",
            "blocks",
            "waits",
            "signals",
        )
        self.workers[0].store.write(lambda tx: [tx.run(f"DELETE FROM {{{table}}}") for table in tables])
        for worker in self.workers:
            worker._faults.clear()
            worker._overtakings.clear()
            worker.sender.queue.clear()
            worker.anomalies.lines.clear()
            worker.engine.cache = SnapshotCache()


_world: list[World] = []


@pytest.fixture(scope="module", autouse=True)
def world() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        _world.append(World(Path(directory)))
        yield
        for bench in _world.pop().workers:
            bench.close()


class Runs(RuleBasedStateMachine):
    """What may happen, and what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.workers = _world[0].clock, _world[0].workers
        self.runs: list[str] = []
        self.letters: list[MessageProxy] = []  # on their way
        self.working: list[tuple[Bench, Delivery, Claim]] = []  # bodies that have begun and not reported
        self.callbacks: list[MessageProxy] = []  # what Dramatiq would send once it has counted a group's members
        self.failed: list[tuple[Bench, Delivery]] = []  # failures that Dramatiq has not decided about
        self.seen: dict[tuple[str, str, int], tuple[Any, ...]] = {}  # rows that may not change any more
        self.revisions: dict[str, int] = {}
        self.marks = itertools.count()
        _world[0].begin_anew()

    # --- tools -------------------------------------------------------------------------------------------------------

    def worker(self, number: int) -> Bench:
        return self.workers[number % len(self.workers)]

    def collect(self) -> None:
        """What has been sent is on its way now."""
        for worker in self.workers:
            while worker.sender.queue:
                outgoing = worker.sender.queue.popleft()
                self.letters.append(worker.message(outgoing))
                if outgoing.group is not None:
                    self.callbacks.append(worker.callback(outgoing))

    def send(self, letter: MessageProxy) -> None:
        self.letters.append(letter)

    def claim(self, worker: Bench, letter: MessageProxy) -> None:
        """A worker takes a step's or an undo's message; the body begins where the claim is won."""
        delivery = Delivery(letter)
        job = delivery.job
        assert job is not None
        delivery.attempt = ClaimAttempt(worker.engine, job, nonce=str(next(self.marks)))
        found = worker.runner.persist(delivery.attempt.run)
        if isinstance(found, Lost):
            worker.runner._lost(delivery, found)
            if found.retry_at is not None:
                self.send(letter)
            return
        kind = "step" if job.kind == "step" else "undo"
        assert (kind, job.run_id, job.sequence) not in self.seen, f"a body of a settled {kind} was about to run again"
        delivery.claim, delivery.state = found, "claimed"
        letter.options["saga"] = {**letter.options["saga"], "attempts": found.attempts}
        self.working.append((worker, delivery, found))

    def end(self, entry: tuple[Bench, Delivery, Claim], ending: Any) -> Delivery:
        """The body returns, or raises what it is given."""
        worker, delivery, claim = entry
        body = delivery.body = Body(lambda into: None, None)
        body.started = True
        if isinstance(ending, BaseException):
            body.error = ending
        else:
            body.returned.append(ending)
        worker.runner._conclude(delivery, claim, body)
        if delivery.state == "failed":
            self.failed.append((worker, delivery))
        return delivery

    def pick(self, items: list[Any], number: int) -> Any:
        return items[number % len(items)]

    # --- what may happen ---------------------------------------------------------------------------------------------

    number = st.integers(0, 11)

    @initialize(
        number=number, progress=st.integers(0, 4), ends=st.booleans(), halts=st.booleans(),
        parks=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def a_run_has_come_some_way(self, number: int, progress: int, ends: bool, halts: bool, parks: bool) -> None:
        """So that the middle of a run, of a rollback and of a retry is not reached only by luck."""
        if parks:
            self.a_step_is_parked(number)
            return
        self.somebody_starts_a_run(number)
        for _ in range(1 + progress):
            self.things_go_well(number, 0)
        if ends and progress:
            self.somebody_ends_a_run(number, 0, True)
            for _ in range(4 if halts else 0):
                self.an_undo_is_given_up(number)

    def an_undo_is_given_up(self, number: int) -> None:
        if self.letters:
            self.a_message_is_delivered(number, 0, False)
        if self.working:
            self.a_body_fails(0)
        if self.failed:
            self.dramatiq_gives_up(0)

    def a_step_is_parked(self, number: int) -> None:
        self.runs.append(self.worker(number).start("patient", "Ada", run_id="run 1"))
        self.collect()
        for _ in range(2):
            self.things_go_well(number, 0)
        self.a_message_is_delivered(number, 0, number % 3 == 0)
        self.a_body_fails(0)
        self.dramatiq_gives_up(0)
        assert self.workers[0].step("run 1", 2) == ("awaiting_retry", 1)

    @precondition(lambda self: len(self.runs) < 2)
    @rule(number=number)
    def somebody_starts_a_run(self, number: int) -> None:
        workflow = ("trip", "convoy", "patient")[number // 2 % 3]
        self.runs.append(self.worker(number).start(workflow, "Ada", run_id=f"run {len(self.runs) + 1}"))
        self.collect()

    @precondition(lambda self: self.letters)
    @rule(number=number, which=number)
    def things_go_well(self, number: int, which: int) -> None:
        """A message is delivered, and where a body begins it succeeds at once."""
        if self.letters:
            bodies = len(self.working)
            self.a_message_is_delivered(number, which, False)
            if len(self.working) > bodies:
                self.a_body_succeeds(bodies)

    @precondition(lambda self: self.letters)
    @rule(number=number, which=number, again=st.sampled_from([False, False, True]))
    def a_message_is_delivered(self, number: int, which: int, again: bool) -> None:
        """``again``: and will be delivered once more."""
        worker, letter = self.worker(number), self.pick(self.letters, which)
        if not again:
            self.letters.remove(letter)
        if letter.options["saga"]["kind"] in ("drive", "callback"):
            worker.runner.drive(Delivery(letter))
        else:
            self.claim(worker, letter)
        self.collect()

    @precondition(lambda self: self.callbacks)
    @rule(which=number)
    def a_group_calls_back(self, which: int) -> None:
        """Early, late, or again: the count is not believed."""
        self.send(self.pick(self.callbacks, which))

    @precondition(lambda self: self.letters)
    @rule(which=number)
    def a_message_is_lost(self, which: int) -> None:
        self.letters.remove(self.pick(self.letters, which))

    @precondition(lambda self: self.working)
    @rule(which=number)
    def a_body_succeeds(self, which: int) -> None:
        entry = self.pick(self.working, which)
        self.working.remove(entry)
        self.end(entry, f"{entry[2].actor} {entry[2].attempts}")
        self.collect()

    @precondition(lambda self: self.working)
    @rule(which=number)
    def a_body_fails(self, which: int) -> None:
        entry = self.pick(self.working, which)
        self.working.remove(entry)
        self.end(entry, ValueError(f"{entry[2].actor} {entry[2].attempts}"))
        self.collect()

    @precondition(lambda self: self.working)
    @rule(which=number)
    def a_shutdown_interrupts_a_body(self, which: int) -> None:
        entry = self.pick(self.working, which)
        self.working.remove(entry)
        self.end(entry, Shutdown())
        self.send(entry[1].message)
        self.collect()

    @precondition(lambda self: self.working)
    @rule(number=number, which=number, reports=st.booleans())
    def a_claim_goes_stale_and_is_taken_over(self, number: int, which: int, reports: bool) -> None:
        """The first worker has only been slow: its report may come any time. ``reports``: the second one's comes at once."""
        _, delivery, _ = self.pick(self.working, which)
        bodies = len(self.working)
        self.clock.advance(61)
        self.claim(self.worker(number), delivery.message)
        if reports and len(self.working) > bodies:
            self.a_body_succeeds(bodies)
        self.collect()

    @precondition(lambda self: self.runs)
    @rule(
        number=number,
        which=number,
        write=st.sampled_from(
            [
                *(
                    "claim",
                    "outcome and decision",
                    "outcome",
                    "decision",
                    "side effect",
                    "plan",
                    "cancel",
                    "undo outcome",
                    "advance",
                ),
                *("member outcome", "failed try", "callback", "resume"),
            ]
        ),
        by=st.sampled_from(["a message", "a message", "a body", "an operator"]),
    )
    def the_next_write_of_a_kind_is_overtaken(self, number: int, which: int, write: str, by: str) -> None:
        """Between its reading and its writing, the other worker gets something done."""
        worker, other = self.worker(number), number + 1

        def overtake() -> None:
            if by == "a message":
                self.things_go_well(other, which)
            elif by == "an operator":
                self.somebody_ends_a_run(other, which, True)
            elif self.working:
                self.a_body_succeeds(which)

        if not worker._overtakings:
            worker.overtake(write, overtake)

    @precondition(lambda self: self.working)
    @rule(which=number, redelivered=st.booleans())
    def a_worker_dies_in_a_body(self, which: int, redelivered: bool) -> None:
        entry = self.pick(self.working, which)
        self.working.remove(entry)
        if redelivered:
            self.send(entry[1].message)

    @precondition(lambda self: self.failed)
    @rule(which=number)
    def dramatiq_tries_again(self, which: int) -> None:
        entry = self.pick(self.failed, which)
        self.failed.remove(entry)
        self.send(entry[1].message)

    @precondition(lambda self: self.failed)
    @rule(which=number)
    def dramatiq_gives_up(self, which: int) -> None:
        worker, delivery = entry = self.pick(self.failed, which)
        self.failed.remove(entry)
        worker.runner.give_up(delivery)
        self.collect()

    @rule(seconds=st.sampled_from([1, 10, 61, 700]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.runs and self.working)
    @rule(number=number, which=number, rolls_back=st.sampled_from([True, True, True, False]))
    def somebody_ends_a_run(self, number: int, which: int, rolls_back: bool) -> None:
        worker, run = self.worker(number), self.pick(self.runs, which)
        try:
            worker.compensate(run) if rolls_back else worker.cancel(run)
        except (ConcurrentTransitionError, StoreError):
            pass
        self.collect()

    @precondition(lambda self: self.runs)
    @rule(number=number, which=number)
    def somebody_resumes_a_rollback(self, number: int, which: int) -> None:
        """Only what has halted; then what had failed may be tried again."""
        worker, run = self.worker(number), self.pick(self.runs, which)
        before = worker.events(run).count("rollback.resumed")
        try:
            undoing.resume(worker.engine, run, worker.sender)
        except (ConcurrentTransitionError, StoreError):
            pass
        if worker.events(run).count("rollback.resumed") > before:
            for key in [key for key, row in self.seen.items() if key[:2] == ("undo", run) and row[0] == "failed"]:
                del self.seen[key]
        self.collect()

    @precondition(lambda self: self.runs)
    @rule(number=number, which=number)
    def somebody_kicks_a_run(self, number: int, which: int) -> None:
        worker = self.worker(number)
        try:
            kick(worker.engine, self.pick(self.runs, which), worker.sender)
        except StoreError:
            pass
        self.collect()

    @precondition(lambda self: self.runs)
    @rule(number=number, which=number, by_name=st.booleans())
    def somebody_signals_a_run(self, number: int, which: int, by_name: bool) -> None:
        """Whether or not anything waits for it."""
        worker, run = self.worker(number), self.pick(self.runs, which)
        try:
            worker.signal(run, "top-up") if by_name else answer_all(worker.engine, run, worker.sender)
        except (CannotSignalFlowError, StoreError):
            pass
        self.collect()

    @rule(number=number)
    def the_sweep_comes_by(self, number: int) -> None:
        worker = self.worker(number)
        try:
            sweep(worker.engine, worker.sender)
        except StoreError:
            pass
        self.collect()

    @precondition(lambda self: self.runs)
    @rule(number=number, which=number)
    def something_else_wakes_a_run(self, number: int, which: int) -> None:
        run, worker = self.pick(self.runs, which), self.worker(number)
        row = worker.one("SELECT workflow, queue, status FROM {flow_runs} WHERE id = ?", run)
        if row is not None and row[2] in ("pending", "running", "waiting"):
            worker.store.write(
                lambda tx: tx.run(
                    "UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = COALESCE(woken_at, ?) WHERE id = ?",
                    (self.clock.now(), run),
                )
            )
            self.send(worker.message(Outgoing("drive", run, row[0], row[1])))

    @rule(number=number, write=st.sampled_from(sorted(WRITES)), happened=st.booleans(), unknown=st.booleans())
    def the_next_write_of_a_kind_goes_wrong(self, number: int, write: str, happened: bool, unknown: bool) -> None:
        """Nobody learns whether it happened, or it is refused."""
        worker = self.worker(number)
        if write != "start" and not worker._faults:
            worker.fail(write, happened=happened and unknown, unknown=unknown)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_that_is_settled_changes(self) -> None:
        """FENCE-2, STATUS-1, DRIVE-4: neither a recorded outcome, nor its result, nor a terminal status is ever written over."""
        for run in self.runs:
            rows = self.workers[0].all(
                "SELECT sequence, status, given_up, retry_policy, attempts, result, error FROM {action_runs} WHERE run_id = ?",
                run,
            )
            for sequence, status, given_up, policy, *rest in rows:
                # a failure that may be retried by a signal is only settled once it says that it will not be (RSIG-2)
                over = policy is None or Stored.read(policy).over is not None
                if status in SETTLED or (status == "failed" and given_up and over):
                    self._fixed(("step", run, sequence), (status, *rest))
            rows = self.workers[0].all(
                "SELECT sequence, status, given_up, attempts FROM {compensation_runs} WHERE run_id = ?", run
            )
            for sequence, status, given_up, *rest in rows:
                if status == "completed" or (status == "failed" and given_up):
                    self._fixed(("undo", run, sequence), (status, *rest))

    def _fixed(self, key: tuple[str, str, int], row: tuple[Any, ...]) -> None:
        assert self.seen.setdefault(key, row) == row, f"{key} was {self.seen[key]} and is {row}"

    @invariant()
    def what_is_parked_has_its_wait_and_each_signal_is_spent_once(self) -> None:
        """RSIG-1, RSIG-3, SIG-2: an open wait belongs to a parked step, a cycle to a signal, and the budget is kept."""
        worker = self.workers[0]
        for run in self.runs:
            waits = dict(worker.all("SELECT sequence, status FROM {waits} WHERE run_id = ?", run))
            steps = worker.all("SELECT sequence, status, cycle FROM {action_runs} WHERE run_id = ?", run)
            told = worker.all("SELECT sequence FROM {flow_events} WHERE run_id = ? AND type = 'action.retried'", run)
            unspent = 0
            for sequence, status, cycle in steps:
                assert cycle == told.count((sequence,)) <= 2
                assert (waits.get(sequence) == "waiting") <= (status == "awaiting_retry")
                if status == "awaiting_retry":
                    assert waits[sequence] in ("waiting", "consumed", "timed_out")
                    unspent += waits[sequence] == "consumed"
            consumed = worker.all("SELECT id FROM {signals} WHERE run_id = ? AND status = 'consumed'", run)
            cycles = sum(cycle for _, _, cycle in steps) + unspent
            # of a run that has ended, a signal may have been taken that nothing came of any more
            assert len(consumed) >= cycles if worker.status(run) in {*FINAL, "rolling_back"} else len(consumed) == cycles

    @invariant()
    def runs_only_move_forward(self) -> None:
        """STATUS-1, DRIVE-1: the revision grows, no wake is seen before it happened, an end is an end."""
        for run in self.runs:
            row = self.workers[0].one(
                "SELECT status, revision, wakes, wakes_seen, ended_at, result, rollback FROM {flow_runs} WHERE id = ?", run
            )
            assert row is not None
            status, revision, wakes, wakes_seen, ended_at, result, rollback = row
            assert wakes_seen <= wakes
            assert revision >= self.revisions.get(run, 0)
            self.revisions[run] = revision
            if status in FINAL:
                self._fixed(("run", run, 0), (status, ended_at, result))
            if rollback == "done":
                self._fixed(("rollback", run, 0), (rollback,))

    @invariant()
    def every_claim_has_at_most_one_outcome(self) -> None:
        """FENCE-1: one recorded ending per attempt, one recorded success per row, none of a claim that has been superseded."""
        for run in self.runs:
            ends: dict[tuple[str, int, int], int] = {}
            done: dict[tuple[str, int], int] = {}
            latest: dict[tuple[str, int], int] = {}
            for kind, sequence, attempt in self.workers[0].all(
                "SELECT type, sequence, attempt FROM {flow_events} WHERE run_id = ? AND attempt IS NOT NULL ORDER BY id", run
            ):
                family, _, word = kind.partition(".")
                if word in ("started", "step_started"):
                    latest[family, sequence] = attempt
                if word in ("completed", "failed", "released", "step_released"):
                    assert attempt == latest[family, sequence], f"{kind} of {sequence} by claim {attempt}"
                    ends[family, sequence, attempt] = ends.get((family, sequence, attempt), 0) + 1
                if word == "completed":
                    done[family, sequence] = done.get((family, sequence), 0) + 1
            assert all(count == 1 for count in ends.values()), ends
            assert all(count == 1 for count in done.values()), done

    # --- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Every worker dies, every message is lost; a sweep and fresh workers bring every run to its end."""
        self.working.clear()
        self.failed.clear()
        self.letters.clear()
        for worker in self.workers:
            worker._faults.clear()
            worker._overtakings.clear()
        worker = self.workers[0]
        for _ in range(25):
            if all(worker.status(run) in FINAL and self._rollback(run) != "running" for run in self.runs):
                break
            self.clock.advance(700)
            sweep(worker.engine, worker.sender)
            self.collect()
            for number in range(len(self.runs)):  # of what is parked, nobody but a person knows
                self.somebody_signals_a_run(0, number, True)
            for _ in range(200):
                if not self.letters:
                    break
                self.a_message_is_delivered(0, 0, False)
                while self.working:
                    self.a_body_succeeds(0)
            assert not self.letters, "messages that lead to nothing but themselves"
        for run in self.runs:
            assert worker.status(run) in FINAL, (
                f"{run} waits for ever: {worker.status(run)} {worker.steps(run)} {worker.undos(run)}"
            )
            assert self._rollback(run) != "running", f"{run} is never undone: {worker.undos(run)}"
        self.nothing_that_is_settled_changes()
        self.runs_only_move_forward()
        self.every_claim_has_at_most_one_outcome()
        for run in self.runs:
            self._check_rollback(worker, run)

    def _rollback(self, run: str) -> str:
        row = self.workers[0].one("SELECT rollback FROM {flow_runs} WHERE id = ?", run)
        assert row is not None
        return str(row[0])

    def _check_rollback(self, worker: Bench, run: str) -> None:
        """COMP-1, COMP-5, COMP-8: after a finished rollback everything that had to be undone was, once, level by level."""
        row = worker.one("SELECT status, rollback, result FROM {flow_runs} WHERE id = ?", run)
        assert row is not None
        status, rollback, result = row
        undone = [
            sequence
            for (sequence,) in worker.all(
                "SELECT sequence FROM {flow_events} WHERE run_id = ? AND type = 'compensation.completed' ORDER BY id", run
            )
        ]
        levels = dict(worker.all("SELECT sequence, level FROM {compensation_runs} WHERE run_id = ?", run))
        assert [levels[sequence] for sequence in undone] == sorted(levels[sequence] for sequence in undone)
        assert len(set(undone)) == len(undone)
        assert {levels.get(3), levels.get(4)} != {0, 1}, "the group is one level"
        steps = worker.all(
            "SELECT sequence, actor, status, attempts FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run
        )
        due = [sequence for sequence, actor, state, _ in steps if state == "completed" and actor != "notify"]
        if rollback == "done":
            missing = set(due) - set(undone)
            failed = {
                row[0]
                for row in worker.all("SELECT sequence FROM {compensation_runs} WHERE run_id = ? AND status = 'failed'", run)
            }
            assert missing <= failed
            extra = set(undone) - set(due)
            assert all(actor == "ship" and attempts for sequence, actor, _, attempts in steps if sequence in extra)
        if rollback == "none":
            assert undone == []
        if status == "completed":
            assert [state for _, _, state, _ in steps] == ["completed"] * 4
            assert result is not None


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=2000 if THOROUGH else 300,
    stateful_step_count=60 if THOROUGH else 50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
