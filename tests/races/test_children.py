"""A parent and its child, stopped where they meet: who comes second finds the link closed, or looks again (CHILD-1, CHILD-3).

As in ``test_interleavings.py``, one worker is stopped at a named point while another does what must happen in between. The walks
at the end let a tree of three levels meet cancels, losses and repairs in any order, and then ask what may never be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import timers
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import ConcurrentTransitionError
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.sweep import sweep
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import blocked, postgresql_only
from tests.support.bench import Background, Bench
from tests.support.waiting import eventually

REPAIR = Settings.from_mapping({"repair.enabled": True})


class Tree(Shop):
    """``order`` charges and waits for a child ``shipment``, which packs and waits for a child ``label``; by the policy in force."""

    policy = "cancel"
    block = False

    def declare(self, bench: Bench) -> None:
        super().declare(bench)
        undo = {name: bench.actor(self._body(f"undo_{name}")) for name in ("charge", "pack", "print")}
        do = {name: bench.actor(self._body(name), actor_name=f"do_{name}") for name in ("charge", "pack", "print", "hand_over")}

        def step(flow: Any, name: str, order: str) -> Any:
            return flow.action(do[name], order).compensate_with(undo[name], order).run()

        def label(flow: Any, order: str) -> str:
            return str(step(flow, "print", order))

        def shipment(flow: Any, order: str) -> str:
            step(flow, "pack", order)
            flow.child(labels, order).close_policy(self.policy).run()
            return str(flow.run(do["hand_over"], order))

        def order(flow: Any, name: str) -> Any:
            step(flow, "charge", name)
            child = flow.child(shipments, name).close_policy(self.policy).compensate_with(undo["pack"], name)
            return flow.parallel(child, flow.child(labels, name)).run() if self.block else child.run()

        labels = bench.workflow(label)
        shipments = bench.workflow(shipment)
        bench.workflow(order)


@pytest.fixture
def shop() -> Tree:
    return Tree()


def link(bench: Bench, run: str, sequence: int = 2) -> tuple[str, str]:
    """The child at that sequence: its run, and the link's status."""
    row = bench.one("SELECT child_id, status FROM {children} WHERE run_id = ? AND sequence = ?", run, sequence)
    assert row is not None
    return row[0], row[1]


def broken(bench: Bench) -> list[Any]:
    """What may never be: an open link of a run that has ended or is rolling back, or whose child run has ended."""
    return bench.all(
        "SELECT c.run_id, c.sequence, c.status, p.status, f.status FROM {children} c JOIN {flow_runs} p ON p.id = c.run_id "
        "JOIN {flow_runs} f ON f.id = c.child_id WHERE c.ended_at IS NULL AND c.status <> 'awaiting_retry' AND "
        "(f.ended_at IS NOT NULL OR p.ended_at IS NOT NULL OR p.status = 'rolling_back')"
    )


def until(bench: Bench, found: Callable[[Outgoing], bool]) -> Outgoing:
    """Deliver messages until one comes that is wanted; that one is taken and not delivered."""
    for _ in range(100):
        message = bench.take()
        if found(message):
            return message
        bench.deliver(message)
    raise AssertionError("no such message came")


def at(bench: Bench, actor: str) -> tuple[str, str, Outgoing]:
    """A new order that has come as far as the message of that actor: its run, its shipment's run, and that message."""
    run = bench.start("order", "42")
    message = until(bench, lambda one: one.actor == actor)
    return run, link(bench, run)[0], message


# --- the end of a child, and that of its parent ------------------------------------------------------------------------


def test_a_cancel_that_meets_the_end_of_a_child_looks_again(bench: MakeBench) -> None:
    """CHILD-1, STATUS-3: it has read an open link; the child completes before it writes."""
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    operator.overtake("cancel", lambda: worker.deliver(message))
    assert operator.cancel(run)
    assert (worker.status(run), worker.status(child)) == ("cancelled", "completed")
    assert link(worker, run) == (child, "completed")
    assert worker.one("SELECT close_request FROM {flow_runs} WHERE id = ?", child) == (None,)
    assert operator.messages == []
    assert broken(worker) == []


@pytest.mark.parametrize("ending", ["cancel", "compensate"])
def test_a_child_that_would_complete_loses_to_its_parents_end(bench: MakeBench, shop: Tree, ending: str) -> None:
    """CHILD-3: its outcome is recorded, its completion is not; the request decides, and the parent never counts it."""
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    worker.overtake("outcome and decision", lambda: getattr(operator, ending)(run))
    worker.deliver(message)
    assert worker.step(child, 3) == ("completed", 1)
    worker.run()
    operator.run()
    assert (worker.status(run), worker.status(child)) == ("cancelled", "cancelled")
    assert link(worker, run) == (child, "cancelled")
    undone = [name for name in shop.order() if name.startswith("undo")]
    assert sorted(undone) == (["undo_charge", "undo_pack"] if ending == "compensate" else [])
    assert "flow.completed" not in worker.events(child)
    assert broken(worker) == []


@pytest.mark.parametrize("ending", ["cancel", "compensate"])
def test_a_step_that_ends_before_its_runs_request_is_seen_completes_nothing(bench: MakeBench, ending: str) -> None:
    """CHILD-3: the request is committed and no drive has seen it; the last step's outcome finds it on the run."""
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    getattr(operator, ending)(run)
    worker.engine.cache.drop(child)
    worker.deliver(message)
    assert worker.step(child, 3)[0] in ("completed", "cancelled")
    worker.run()
    operator.run()
    assert worker.status(child) == "cancelled"
    assert "flow.completed" not in worker.events(child)


@postgresql_only
def test_the_end_of_a_child_holds_its_parent_until_it_is_told(bench: MakeBench, table_prefix: str) -> None:
    """DRIVE-7: the child's end has locked the parent first; a compensate waits, and finds the child completed."""
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    stop = worker.stop("outcome and decision", where="inside", statement="UPDATE {children}")
    ending = Background(lambda: worker.deliver(message))
    stop.wait_reached()
    closing = Background(lambda: operator.compensate(run))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    ending.result()
    assert closing.result()
    worker.run()
    operator.run()
    assert (worker.status(run), worker.status(child)) == ("cancelled", "completed")
    assert worker.undos(run) == [("undo_pack", "completed"), ("undo_charge", "completed")]
    assert broken(worker) == []


@postgresql_only
@pytest.mark.parametrize("ending", ["cancel", "plan"])
def test_the_end_of_a_parent_holds_it_until_its_children_are_closed(bench: MakeBench, table_prefix: str, ending: str) -> None:
    """DRIVE-7: the child waits for its parent's row before it takes its own, so the two cannot wait for each other."""
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    stop = operator.stop(ending, where="inside", statement="UPDATE {children}")
    closing = Background(lambda: operator.cancel(run) if ending == "cancel" else operator.compensate(run))
    stop.wait_reached()
    late = Background(lambda: worker.deliver(message))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    assert closing.result()
    late.result()
    worker.run()
    operator.run()
    assert (worker.status(child), link(worker, run)) == ("cancelled", (child, "cancelled"))
    assert broken(worker) == []


@postgresql_only
def test_two_children_of_a_block_that_end_at_once_are_both_told(bench: MakeBench, shop: Tree, table_prefix: str) -> None:
    """DRIVE-7, PAR-2: the second waits for the parent's row, and neither wake is lost."""
    shop.block = True
    first, second = bench(), bench()
    run = first.start("order", "43")
    label = until(first, lambda message: message.actor == "label" and message.run_id == link(first, run, 4)[0])
    two = until(first, lambda message: message.actor == "do_hand_over")
    first.deliver(label)
    three = first.take()
    assert three.actor == "do_print"
    stop = first.stop("outcome and decision", where="inside", statement="UPDATE {children}")
    ending = Background(lambda: first.deliver(two))
    stop.wait_reached()
    other = Background(lambda: second.deliver(three))
    eventually(lambda: blocked(table_prefix) == 1)
    stop.go()
    ending.result()
    other.result()
    first.run()
    second.run()
    assert first.status(run) == "completed"
    assert broken(first) == []


def test_a_start_loses_to_the_end_of_its_parent(bench: MakeBench) -> None:
    """CHILD-1: no child starts under a parent that is rolling back; run and link are the decision's, which does not land."""
    worker, operator = bench(), bench()
    run = worker.start("order", "42")
    message = until(worker, lambda one: one.actor == "do_charge")
    worker.overtake("outcome and decision", lambda: operator.compensate(run))
    worker.deliver(message)
    worker.run()
    assert worker.all("SELECT * FROM {children}") == []
    assert worker.all("SELECT id FROM {flow_runs}") == [(run,)]
    assert worker.status(run) == "cancelled"


def test_the_end_of_a_childs_rollback_meets_its_parents_cancel(bench: MakeBench, shop: Tree) -> None:
    """CHILD-1, COMP-9: the child is failing already; it goes on with that, and the parent's cancel looks again."""
    shop.bodies["hand_over"] = lambda order: 1 / 0
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    worker.runner.give_up(worker.deliver(message))
    undo = worker.take()
    assert (undo.kind, undo.run_id) == ("compensation", child)
    operator.overtake("cancel", lambda: worker.deliver(undo))
    assert operator.cancel(run)
    assert (worker.status(run), worker.status(child), link(worker, run)) == ("cancelled", "failed", (child, "failed"))
    assert broken(worker) == []


def test_a_child_that_is_rolling_back_already_is_not_asked_again(bench: MakeBench, shop: Tree) -> None:
    """CHILD-3: it ends as it was to end; its parent has let go of it."""
    shop.bodies["hand_over"] = lambda order: 1 / 0
    worker, operator = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    worker.runner.give_up(worker.deliver(message))
    assert worker.status(child) == "rolling_back"
    assert operator.cancel(run)
    assert link(worker, run) == (child, "cancelled")
    worker.run()
    operator.run()
    assert worker.status(child) == "failed"
    assert worker.one("SELECT close_request, wakes - wakes_seen FROM {flow_runs} WHERE id = ?", child) == (None, 0)
    assert broken(worker) == []


def overdue(bench: Bench, run: str, clock: ManualClock) -> None:
    """Its deadline has just passed."""
    assert bench.store.write(lambda tx: tx.run("UPDATE {flow_runs} SET expires_at = ? WHERE id = ?", (bench.engine.now(), run)))
    clock.advance(1)


def test_a_parent_that_expires_meets_a_child_that_has_just_failed(bench: MakeBench, shop: Tree, clock: ManualClock) -> None:
    """CHILD-1, EXPIRE-1: the child's last undo lands while the parent's rollback is planned; the plan looks again, and asks nobody."""
    shop.bodies["hand_over"] = lambda order: 1 / 0
    worker, monitor = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    worker.runner.give_up(worker.deliver(message))
    undo = worker.take()
    assert (undo.kind, undo.run_id) == ("compensation", child)
    overdue(worker, run, clock)
    monitor.overtake("plan", lambda: worker.deliver(undo))
    timers.fire(monitor.engine, run, monitor.sender)
    assert (worker.status(child), link(worker, run)) == ("failed", (child, "failed"))
    monitor.run()
    worker.run()
    assert worker.status(run) == "expired"
    assert worker.one("SELECT close_request FROM {flow_runs} WHERE id = ?", child) == (None,)
    assert [name for name in shop.order() if name.startswith("undo")] == ["undo_pack", "undo_charge"]
    assert broken(worker) == []


@pytest.mark.parametrize("policy", ["abandon", "cancel", "fail"])
def test_a_child_that_is_failing_meets_the_expiry_of_its_parent(
    bench: MakeBench, shop: Tree, clock: ManualClock, policy: str
) -> None:
    """CHILD-3, EXPIRE-1: the parent was first; the child's failure is on its step's row, and the request says how it ends."""
    shop.policy = policy
    shop.bodies["hand_over"] = lambda order: 1 / 0
    worker, monitor = bench(), bench()
    run, child, message = at(worker, "do_hand_over")
    failed = worker.deliver(message)
    overdue(worker, run, clock)
    worker.overtake("outcome and decision", lambda: timers.fire(monitor.engine, run, monitor.sender))
    worker.runner.give_up(failed)
    worker.run()
    monitor.run()
    assert (worker.status(run), link(worker, run)) == ("expired", (child, "cancelled"))
    assert worker.status(child) == ("cancelled" if policy == "cancel" else "failed")
    assert sorted(name for name in shop.order() if name.startswith("undo")) == ["undo_charge", "undo_pack"]
    assert broken(worker) == []


# --- requests, and what becomes of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["cancel", "compensate"])
@pytest.mark.parametrize("actor", ["shipment", "do_pack", "label", "do_print", "do_hand_over"])
def test_a_request_finds_a_child_wherever_it_is(bench: MakeBench, shop: Tree, actor: str, ending: str) -> None:
    """CHILD-3: not driven yet, at its own step, waiting for a child of its own; the messages of before are worth nothing."""
    worker = bench()
    run = worker.start("order", "42")
    message = until(worker, lambda one: one.actor == actor and one.run_id != run)
    getattr(worker, ending)(run)
    worker.run()
    worker.deliver(message)
    worker.run()
    states = dict(worker.all("SELECT workflow, status FROM {flow_runs}"))
    completed = {"label"} if actor == "do_hand_over" else set()
    assert {name for name, status in states.items() if status != "cancelled"} == completed
    undone = {name for name in shop.order() if name.startswith("undo")}
    done = {f"undo_{name}" for name in shop.order() if not name.startswith("undo")}
    if actor == "do_hand_over":
        done.remove("undo_print")  # of a grandchild that has completed: nothing undoes it
    assert undone == (done if ending == "compensate" else set())
    assert broken(worker) == []


def test_a_child_that_is_held_is_closed_all_the_same(bench: MakeBench, shop: Tree) -> None:
    """CHILD-3, HISTORY-1: its code does not fit; nothing needs it for what has to be undone."""
    worker = bench()
    run, child, message = at(worker, "do_hand_over")
    real = worker.engine.workflows["shipment"]
    worker.engine.workflows["shipment"] = type(real)("shipment", lambda flow, order: flow.sleep(1), real.queue)
    worker.deliver(message)
    assert worker.one("SELECT hold_count FROM {flow_runs} WHERE id = ?", child) == (1,)
    assert worker.compensate(run)
    worker.run()
    assert (worker.status(run), worker.status(child)) == ("cancelled", "cancelled")
    assert sorted(name for name in shop.order() if name.startswith("undo")) == ["undo_charge", "undo_pack"]
    assert broken(worker) == []


def test_a_request_whose_rollback_cannot_be_planned_holds_the_child(bench: MakeBench, shop: Tree, clock: ManualClock) -> None:
    """COMP-3, CHILD-3: replan_failed; nothing is half undone, and the monitor tries again until code comes that fits."""
    worker = bench()
    parent, (child, message) = _with_unseen_result(worker)
    mended = worker.engine.workflows["checkout_child"]
    worker.engine.workflows["checkout_child"] = type(mended)("checkout_child", lambda flow, order: None, mended.queue)
    assert worker.compensate(parent)
    worker.deliver(message)
    worker.run()
    assert worker.codes().count("replan_failed") >= 1
    assert worker.status(child) == "waiting"
    worker.engine.workflows["checkout_child"] = mended
    clock.advance(100_000)
    sweep(worker.engine, worker.sender)
    worker.run()
    assert worker.status(child) == "cancelled"
    assert "undo_pack" in shop.order()
    assert broken(worker) == []


def _with_unseen_result(worker: Bench) -> tuple[str, tuple[str, Outgoing]]:
    """A parent whose child has a completed step that its undo is to be built from, and no drive has seen it."""
    do_pack, undo_pack = worker.broker.actors["do_pack"], worker.broker.actors["undo_pack"]

    def checkout_child(flow: Any, order: str) -> None:
        flow.action(do_pack, order).compensate_with(lambda packed: undo_pack.message(packed)).run()
        flow.sleep(60)

    def checkout_parent(flow: Any, order: str) -> None:
        flow.child(children, order).close_policy("cancel").run()

    children = worker.workflow(checkout_child)
    worker.workflow(checkout_parent)
    run = worker.start("checkout_parent", "42")
    step = until(worker, lambda one: one.actor == "do_pack")
    drives, worker.engine.drives = worker.engine.drives, lambda workflow, queue: False  # type: ignore[method-assign]
    worker.deliver(step)
    worker.engine.drives = drives  # type: ignore[method-assign]
    return run, (step.run_id, worker.take())


def test_a_drive_that_brings_a_request_and_is_lost_is_sent_again(bench: MakeBench, shop: Tree, clock: ManualClock) -> None:
    """DOCTOR-1 R2, CHILD-3: the wake is on the child, whatever becomes of the message."""
    worker = bench(settings=REPAIR)
    run, child, _ = at(worker, "do_hand_over")
    assert worker.compensate(run)
    worker.sender.queue.clear()
    clock.advance(61_000)
    sweep(worker.engine, worker.sender)
    worker.run()
    assert (worker.status(run), worker.status(child)) == ("cancelled", "cancelled")
    assert {"undo_charge", "undo_pack"} <= set(shop.order())


def test_the_drive_of_a_parent_that_is_lost_is_sent_again(bench: MakeBench, clock: ManualClock) -> None:
    """DRIVE-2, DOCTOR-1 R2: the child's end has left the wake on the parent."""
    worker = bench(settings=REPAIR)
    run, child, message = at(worker, "do_hand_over")
    worker.deliver(message)
    assert worker.status(child) == "completed"
    worker.sender.queue.clear()
    clock.advance(61_000)
    sweep(worker.engine, worker.sender)
    worker.run()
    assert worker.status(run) == "completed"


def test_a_kick_of_a_parent_reaches_the_child_that_it_is_parked_on(bench: MakeBench) -> None:
    """KICK-1: a child run that has a wake which no drive has seen is sent its drive."""
    worker = bench()
    run = worker.start("order", "42")
    until(worker, lambda one: one.actor == "shipment")
    report = kick(worker.engine, run, worker.sender)
    assert [(row.kind, row.sequence, row.actor, row.left) for row in report.rows] == [("child", 2, "shipment", None)]
    worker.run()
    assert worker.status(run) == "completed"
    run = worker.start("order", "43")
    until(worker, lambda one: one.actor == "do_pack")
    (row,) = kick(worker.engine, run, worker.sender).rows
    assert row.left == "it is a run of its own, and nothing has happened to it that no drive has seen: kick that run"


def test_a_decision_whose_answer_is_unknown_starts_its_child_once(bench: MakeBench) -> None:
    """CHILD-1, QUEUE-8: whether or not the commit happened, there is one child."""
    for happened in (True, False):
        worker = bench()
        run = worker.start("order", "42")
        message = until(worker, lambda one: one.actor == "do_charge")
        worker.fail("outcome and decision", happened=happened)
        worker.deliver(message)
        worker.deliver(message)
        worker.run()
        assert worker.status(run) == "completed"
        assert worker.one("SELECT COUNT(*) FROM {flow_runs} WHERE parent_id = ?", run) == (1,)


# --- any order ---------------------------------------------------------------------------------------------------------


def walk(worker: Bench, clock: ManualClock, chance: random.Random) -> Iterator[None]:
    """One order, its messages delivered in any order, some lost, some twice, and an operator's word at some moment."""
    worker.start("order", "42")
    moment = chance.randrange(40)
    for turn in range(400):
        if turn == moment:
            with suppress(ConcurrentTransitionError):  # the run had ended
                chance.choice([worker.cancel, worker.compensate])(_any_run(worker, chance))
        queue = worker.sender.queue
        if not queue:
            clock.advance(400_000)
            sweep(worker.engine, worker.sender)
            if not queue and turn > moment:
                break
            continue
        queue.rotate(-chance.randrange(len(queue)))
        message = worker.take()
        if chance.random() < 0.15:
            continue  # lost
        if chance.random() < 0.1:
            queue.append(message)  # delivered again later
        try:
            delivery = worker.deliver(message)
        except ZeroDivisionError:
            continue
        if getattr(delivery, "state", None) == "failed":
            worker.runner.give_up(delivery)
        yield


def _any_run(worker: Bench, chance: random.Random) -> str:
    live = worker.all("SELECT id FROM {flow_runs} WHERE ended_at IS NULL AND status <> 'rolling_back' ORDER BY created_at, id")
    return str(chance.choice(live)[0]) if live else str(worker.all("SELECT id FROM {flow_runs} ORDER BY created_at, id")[0][0])


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_events_leaves_a_tree_half_closed(bench: MakeBench, shop: Tree, clock: ManualClock, seed: int) -> None:
    """CHILD-3, DRIVE-2: after every write no link is open at one end only; once all is quiet nothing of a cancelled tree is live, and
    what was to be undone is undone once."""
    chance = random.Random(seed)
    shop.policy = chance.choice(["cancel", "fail"])
    shop.block = chance.random() < 0.5
    if chance.random() < 0.3:
        shop.bodies[chance.choice(["pack", "print", "hand_over"])] = lambda order: 1 / 0
    worker = bench(settings=Settings.from_mapping({"repair.enabled": True, "repair.max_attempts": 1000}))
    for _ in walk(worker, clock, chance):
        assert broken(worker) == []
    ended = worker.all("SELECT workflow, status, rollback FROM {flow_runs}")
    assert [row for row in ended if row[1] in ("pending", "running", "waiting", "rolling_back")] == []
    assert {row[2] for row in ended} <= {"none", "done"}
    undone = [name for name in shop.order() if name.startswith("undo")]
    planned = worker.one("SELECT COUNT(*) FROM {compensation_runs}")
    assert planned == (len(undone),)
    assert worker.all("SELECT id FROM {flow_runs} WHERE wakes > wakes_seen") == []


def test_a_drive_of_a_run_that_has_ended_changes_nothing(bench: MakeBench) -> None:
    """C34: late messages of a child that has ended tell its parent nothing a second time."""
    worker = bench()
    run, child, message = at(worker, "do_hand_over")
    worker.deliver(message)
    worker.run()
    before = worker.one("SELECT wakes, revision FROM {flow_runs} WHERE id = ?", run)
    assert worker.deliver(Outgoing("drive", child, "shipment", "default")) is Driven.ENDED
    worker.deliver(message)
    worker.run()
    assert worker.one("SELECT wakes, revision FROM {flow_runs} WHERE id = ?", run) == before
    assert worker.events(run).count("child.completed") == 1
