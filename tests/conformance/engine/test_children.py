"""CHILD: a child run and its link, what its end brings the parent, and what the parent's end brings the child."""

from __future__ import annotations

import argparse
import re
from contextvars import ContextVar
from typing import Any

import pytest

from dramatiq_saga import (
    Flow,
    FlowCancelledError,
    FlowFailedError,
    Settings,
    current_step,
    get_flow,
)
from dramatiq_saga.cli import runs
from dramatiq_saga.cli.show import lines_of
from dramatiq_saga.errors import (
    CannotSignalTerminalFlowError,
    ChildCancelledError,
    ChildFailedError,
    ConcurrentTransitionError,
    WouldBlockError,
)
from dramatiq_saga.events import ChildCancelled, ChildCompleted, ChildFailed, ChildStarted, listening
from dramatiq_saga.operations import Operator, RefusedError
from dramatiq_saga.settings import Context
from tests.conformance.engine.test_claims_and_fences import Gate
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def child_of(handle: Any, sequence: int = 1) -> Any:
    """A handle on the child run at that sequence."""
    (link,) = [link for link in handle.children() if link.sequence == sequence]
    return get_flow(link.child_id, broker=handle._broker)


def links(handle: Any) -> list[tuple[int, str, str]]:
    return [(link.sequence, link.workflow, link.status) for link in handle.children()]


def untold(app: Application) -> list[Any]:
    """Open links whose child run has ended: there must never be one."""
    return app.sql(
        "SELECT c.run_id, c.sequence FROM {children} c JOIN {flow_runs} f ON f.id = c.child_id "
        "WHERE c.ended_at IS NULL AND c.status <> 'awaiting_retry' AND f.ended_at IS NOT NULL"
    )


# --- completing --------------------------------------------------------------------------------------------------------


def test_a_parent_gets_what_its_child_returned(every_app: Application) -> None:
    """CHILD-1: run and link; the parent waits for nothing of its own meanwhile, and goes on when the child has ended."""
    app = every_app
    pack, bill = app.step("pack", gives=3), app.step("bill")

    @app.workflow
    def shipment(flow: Flow, order: str, *, parcels: int) -> dict[str, Any]:
        return {"order": order, "weight": flow.run(pack, order), "parcels": parcels}

    @app.workflow
    def order(flow: Flow, name: str) -> Any:
        shipped = flow.child(shipment, name, parcels=2).run()
        flow.run(bill, shipped["weight"])
        return shipped

    handle = order.send("A-1")
    app.start()
    assert app.ended(handle) == "completed"
    assert handle.result() == {"order": "A-1", "weight": 3, "parcels": 2}
    assert app.calls == [("pack", "A-1"), ("bill", 3)]
    (link,) = handle.children()
    assert (link.workflow, link.status, link.args, link.kwargs) == ("shipment", "completed", ["A-1"], {"parcels": 2})
    assert link.result == {"order": "A-1", "weight": 3, "parcels": 2}
    child = child_of(handle)
    assert (child.status, child.workflow_name) == ("completed", "shipment")
    assert app.types(child) == ["flow.started", "action.started", "action.completed", "flow.completed"]
    assert app.types(handle) == [
        "flow.started", "child.started", "flow.waiting", "child.completed", "flow.resumed", "action.started", "action.completed",
        "flow.completed",
    ]  # fmt: skip
    app.drain()
    assert app.messages() == 0
    assert untold(app) == []


def test_a_child_takes_what_its_own_workflow_says(app: Application) -> None:
    """CHILD-1, TAG-1: tags, version and deadline from the child's own workflow unless set; queue from it, else the parent's."""

    @app.workflow(tags={"kind": "child"}, version="7", expires_in=60, queue_name=app.queue + "own")
    def with_all(flow: Flow) -> str:
        return f"{flow.version} {flow.tags}"

    @app.workflow(queue_name=None)
    def with_nothing(flow: Flow) -> str:
        return f"{flow.version} {flow.tags}"

    @app.workflow(tags={"kind": "parent"}, version="1", expires_in=1000, priority=3)
    def parent(flow: Flow) -> list[str]:
        return [flow.child(with_all).run(), flow.child(with_nothing).run(), flow.child(with_all).expires_in(30).run()]

    handle = parent.send()
    app.start()
    app.ended(handle)
    assert handle.result() == ["7 {'kind': 'child'}", "None {}", "7 {'kind': 'child'}"]
    rows = app.sql(
        "SELECT queue, version, expires_at - created_at, priority, parent_sequence FROM {flow_runs} WHERE parent_id = ? "
        "ORDER BY parent_sequence",
        handle.id,
    )
    assert rows == [
        (app.queue + "own", "7", 60_000, None, 1), (app.queue, None, None, None, 2), (app.queue + "own", "7", 30_000, None, 3),
    ]  # fmt: skip


def test_children_of_children_go_twenty_deep(app: Application) -> None:
    """CHILD-1: a tree is rows and messages; nothing recurses."""

    def nest(flow: Flow, depth: int) -> int:
        return 0 if depth == 0 else 1 + flow.child(nested, depth - 1).run()

    nested: Any = app.workflow(name="nested")(nest)
    assert app.run(nested, 20).result() == 20
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(21,)]
    assert nested.run_sync(20).result() == 20


def test_children_run_side_by_side_in_a_block(every_app: Application) -> None:
    """PAR-1: a member may be a child; results come in the order given."""
    app = every_app
    work = app.step("work", gives="step")

    @app.workflow
    def child(flow: Flow, number: int) -> int:
        flow.run(work, number)
        return number

    @app.workflow
    def parent(flow: Flow) -> list[Any]:
        return flow.parallel(flow.child(child, 1), flow.action(work, 2), flow.child(child, 3)).run()

    handle = parent.send()
    app.start()
    assert app.ended(handle) == "completed"
    assert handle.result() == [1, "step", 3]
    assert sorted(app.calls) == [("work", 1), ("work", 2), ("work", 3)]
    assert untold(app) == []


# --- errors --------------------------------------------------------------------------------------------------------------


def test_a_child_that_fails_has_undone_its_work_and_fails_its_parent(every_app: Application) -> None:
    """CHILD-2: ChildFailedError once the child's rollback is done, and not before."""
    app = every_app
    reserve, release, fail = app.step("reserve"), app.step("release"), app.step("fail", raises=ValueError("no stock"))
    order, undo_order = app.step("order"), app.step("undo_order")

    @app.workflow
    def shipment(flow: Flow) -> None:
        flow.action(reserve).compensate_with(release).run()
        flow.run(fail)

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.action(order).compensate_with(undo_order).run()
        flow.child(shipment).run()

    handle = parent.send()
    app.start()
    assert app.ended(handle) == "failed"
    assert app.calls == [("order",), ("reserve",), ("fail",), ("release",), ("undo_order",)]
    assert links(handle) == [(2, "shipment", "failed")]
    with pytest.raises(FlowFailedError, match=r"child shipment .* did not complete: .*no stock"):
        handle.result()
    assert untold(app) == []


@pytest.mark.both_ways
def test_a_workflow_catches_what_becomes_of_its_children(app: Application) -> None:
    """CHILD-2: the error names the child, its run and its cause; continue_on_failure gives None for failed, never for cancelled."""
    gate = Gate()

    @app.workflow
    def failing(flow: Flow) -> None:
        raise LookupError("nothing there")

    @app.actor
    def hang() -> None:
        gate()

    @app.workflow
    def hanging(flow: Flow) -> None:
        flow.run(hang)

    seen: list[Any] = []

    @app.workflow
    def parent(flow: Flow) -> list[Any]:
        got: list[Any] = []
        try:
            flow.child(failing).run()
        except ChildFailedError as error:
            seen.append(error)
            got.append(error.cause["message"] if error.cause else None)
        got.append(flow.child(failing).continue_on_failure().run())
        try:
            flow.child(hanging).continue_on_failure().run()
        except ChildCancelledError as error:
            got.append(str(error.cause["message"]) if error.cause else None)
        return got

    handle = parent.send()
    app.start()
    gate.wait()
    child = child_of(handle, 3)
    assert child.cancel("enough of it")
    gate.leave.release()
    assert app.ended(handle) == "completed"
    assert handle.result() == ["nothing there", None, f"run {child.id} of hanging was cancelled: enough of it"]
    error = seen[0]
    assert (error.workflow_name, error.child_id, error.sequence) == ("failing", handle.children()[0].child_id, 1)
    assert [link.status for link in handle.children()] == ["failed", "failed", "cancelled"]


@pytest.mark.parametrize("mistake", ["actor", "function", "arguments", "value", "dropped"])
def test_a_child_that_cannot_be_is_refused_where_it_is_asked_for(app: Application, mistake: str) -> None:
    """CHILD-1: a clear error at the line that makes the mistake."""
    plain = app.step("plain")

    @app.workflow
    def child(flow: Flow, number: int) -> None: ...

    def ask(flow: Flow) -> Any:
        call: Any = flow.child
        if mistake == "actor":
            call(plain)
        elif mistake == "function":
            call(lambda flow: None)
        elif mistake == "arguments":
            call(child, 1, 2)
        elif mistake == "value":
            call(child, object())
        else:
            call(child, 1)

    expected = {
        "actor": "a child is a workflow, and plain is a plain actor: run it as a step",
        "function": "a child is a workflow, not function: decorate",
        "arguments": r"child: too many positional arguments; its signature is child\(number: 'int'\)",
        "value": r"child: args\[0\] cannot be stored",
        "dropped": r"flow.child\(child\) was built but never run",
    }[mistake]

    @app.workflow
    def parent(flow: Flow) -> str:
        try:
            ask(flow)
        except TypeError as error:
            return str(error)
        return ""

    if mistake == "dropped":
        handle = parent.send()
        app.start()
        held = eventually(lambda: app.sql("SELECT hold_error FROM {flow_runs} WHERE id = ?", handle.id)[0][0])
        assert "flow.child(child) was built but never run" in held
    else:
        assert re.search(expected, app.run(parent).result())
    assert app.sql("SELECT COUNT(*) FROM {children}") == [(0,)]


def test_a_workflow_of_another_broker_is_no_child(app: Application, applications: Applications) -> None:
    """CHILD-1: its messages could not join the parent's."""
    other = applications("stub")

    @other.workflow(name="foreign")
    def foreign(flow: Flow) -> None: ...

    @app.workflow
    def parent(flow: Flow) -> str:
        try:
            flow.child(foreign)
        except TypeError as error:
            return str(error)
        return ""

    assert "foreign is declared on another broker" in app.run(parent).result()


# --- events --------------------------------------------------------------------------------------------------------------


def test_listeners_hear_of_children_once(app: Application) -> None:
    """EVENT-1: started and ended, told to the parent; the child's own events are its own."""

    @app.workflow
    def good(flow: Flow) -> int:
        return 1

    @app.workflow
    def bad(flow: Flow) -> None:
        raise ValueError("bad")

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.child(good).run()
        flow.child(bad).continue_on_failure().run()

    app.start(threads=1)  # with more of them, one may tell of a child's end before another has told of its start
    with listening(ChildStarted, ChildCompleted, ChildFailed, ChildCancelled) as heard:
        handle = app.run(parent)
        app.drain()
    ours = [(event.type, event.child.sequence) for event in heard if event.run_id == handle.id]
    assert ours == [("child.started", 1), ("child.completed", 1), ("child.started", 2), ("child.failed", 2)]


# --- again, when a signal comes ------------------------------------------------------------------------------------------


def test_a_signal_starts_a_new_child_run_in_the_place_of_the_one_that_failed(every_app: Application) -> None:
    """RSIG-4, RSIG-2: the parent parks, nothing rolls back; the new run has the same arguments and a history of its own."""
    app, broken = every_app, [True]
    order, undo_order = app.step("order"), app.step("undo_order")

    @app.workflow
    def shipment(flow: Flow, name: str) -> str:
        if flow.side_effect("broken", lambda: broken[0]):
            raise LookupError("no such address")
        return name

    @app.workflow
    def parent(flow: Flow) -> str:
        flow.action(order).compensate_with(undo_order).run()
        return flow.child(shipment, "A").retry_on_signal("address-mended", max_retries=1).run()

    handle = parent.send()
    app.start()
    eventually(lambda: [link.status for link in handle.children()] == ["awaiting_retry"])
    first = child_of(handle, 2)
    assert (handle.status, first.status) == ("waiting", "failed")
    broken[0] = False
    handle.signal("address-mended")
    assert app.ended(handle) == "completed"
    assert handle.result() == "A"
    second = child_of(handle, 2)
    assert (first.status, second.status) == ("failed", "completed")
    assert first.id != second.id
    (link,) = handle.children()
    assert (link.sequence, link.cycle, link.status, link.args) == (2, 1, "completed", ["A"])
    words = [word for word in app.types(handle) if word.startswith("child.")]
    assert words == ["child.started", "child.failed", "child.awaiting_retry", "child.retried", "child.completed"]
    assert app.calls == [("order",)]
    assert untold(app) == []


def test_a_child_whose_retries_are_spent_fails_its_parent(app: Application) -> None:
    """RSIG-2, RSIG-4: the budget is the link's; an optional one gives None then."""

    @app.workflow
    def shipment(flow: Flow) -> None:
        raise LookupError("no such address")

    @app.workflow
    def parent(flow: Flow, optional: bool) -> Any:
        return flow.child(shipment).retry_on_signal("again", max_retries=1).continue_on_failure(optional).run()

    app.start()
    for optional in (False, True):
        handle = parent.send(optional)
        eventually(lambda handle=handle: [link.status for link in handle.children()] == ["awaiting_retry"])
        handle.signal("again")
        assert app.ended(handle) == ("completed" if optional else "failed")
        assert [(link.status, link.cycle) for link in handle.children()] == [("failed", 1)]
        assert app.sql("SELECT COUNT(*) FROM {flow_runs} WHERE parent_id = ?", handle.id) == [(2,)]


@pytest.mark.parametrize("ending", ["cancel", "compensate"])
def test_a_child_that_is_parked_is_given_up_with_its_parent(app: Application, ending: str) -> None:
    """CHILD-3, STATUS-2: there is no run of it to close; the wait for the signal is cancelled too."""

    @app.workflow
    def shipment(flow: Flow) -> None:
        raise LookupError("no such address")

    @app.workflow
    def parent(flow: Flow) -> Any:
        return flow.child(shipment).close_policy("cancel").retry_on_signal("again").run()

    handle = parent.send()
    app.start()
    eventually(lambda: [link.status for link in handle.children()] == ["awaiting_retry"])
    assert getattr(handle, ending)()
    assert app.ended(handle) == "cancelled"
    assert [link.status for link in handle.children()] == ["cancelled"]
    assert app.sql("SELECT status FROM {waits} WHERE run_id = ?", handle.id) == [("cancelled",)]
    assert child_of(handle).status == "failed"


# --- closing -------------------------------------------------------------------------------------------------------------


class Tree:
    """A parent with a step of its own, a child with a step that waits at a gate, and a grandchild before it that has completed."""

    def __init__(self, app: Application, policy: str) -> None:
        self.app = app
        self.gate = Gate()
        order, undo_order = app.step("order"), app.step("undo_order")
        reserve, release = app.step("reserve"), app.step("release")

        @app.actor
        def hang() -> str:
            self.gate()
            return "late"

        def shipment(flow: Flow) -> str:
            flow.action(reserve).compensate_with(release).run()
            return flow.run(hang)

        self.shipment: Any = app.workflow(name="shipment")(shipment)

        def parent(flow: Flow) -> str:
            flow.action(order).compensate_with(undo_order).run()
            return flow.child(self.shipment).close_policy(policy).run()

        self.parent: Any = app.workflow(name="parent")(parent)

    def under_way(self) -> tuple[Any, Any]:
        """The parent and its child, whose step is at work."""
        handle = self.parent.send()
        self.app.start(threads=3)
        self.gate.wait()
        return handle, child_of(handle, 2)


@pytest.mark.parametrize("policy", ["abandon", "cancel", "fail"])
def test_compensating_a_parent_closes_its_child_by_its_policy(every_app: Application, policy: str) -> None:
    """CHILD-3: abandon leaves it alone; cancel and fail roll it back; its late step is fenced."""
    app = every_app
    tree = Tree(app, policy)
    handle, child = tree.under_way()
    assert handle.compensate("no more")
    assert links(handle) == [(2, "shipment", "cancelled")]
    if policy != "abandon":
        assert app.ended(child) == ("cancelled" if policy == "cancel" else "failed")
        assert child.rollback == "done"
    tree.gate.leave.release()
    assert app.ended(handle) == "cancelled"
    app.drain()
    assert app.ended(child) == {"abandon": "completed", "cancel": "cancelled", "fail": "failed"}[policy]
    undone = [call for call in app.calls if call[0] in ("release", "undo_order")]
    assert sorted(undone) == sorted([("undo_order",)] + [("release",)] * (policy != "abandon"))
    if policy == "fail":
        with pytest.raises(FlowFailedError, match=f"its parent {handle.id} has ended"):
            child.result()
    assert untold(app) == []


@pytest.mark.parametrize("policy", ["abandon", "cancel", "fail"])
def test_cancelling_a_parent_without_rollback_closes_its_child_by_its_policy(every_app: Application, policy: str) -> None:
    """CHILD-3: cancel is without a rollback then, fail is with one all the same."""
    app = every_app
    tree = Tree(app, policy)
    handle, child = tree.under_way()
    assert handle.cancel("no more")
    assert links(handle) == [(2, "shipment", "cancelled")]
    if policy != "abandon":
        assert app.ended(child) == ("cancelled" if policy == "cancel" else "failed")
    tree.gate.leave.release()
    app.drain()
    assert app.ended(child) == {"abandon": "completed", "cancel": "cancelled", "fail": "failed"}[policy]
    assert ("undo_order",) not in app.calls
    assert (("release",) in app.calls) == (policy == "fail")
    if policy == "cancel":
        with pytest.raises(FlowCancelledError, match=f"its parent {handle.id} has ended"):
            child.result()
    assert untold(app) == []


def test_a_completed_child_is_undone_in_its_parents_order(every_app: Application) -> None:
    """CHILD-3, COMP-1: only by its compensate_with, built from its result or given with arguments; one without is left as it is."""
    app = every_app
    first, undo_first = app.step("first"), app.step("undo_first")
    last, undo_last, fail = app.step("last"), app.step("undo_last"), app.step("fail", raises=ValueError("no"))
    recall, write_off = app.step("recall"), app.step("write_off")

    @app.workflow
    def shipment(flow: Flow, number: int) -> dict[str, int]:
        return {"parcel": number}

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.action(first).compensate_with(undo_first).run()
        flow.child(shipment, 1).compensate_with(lambda shipped: recall.message(shipped["parcel"])).run()
        flow.child(shipment, 2).run()
        flow.child(shipment, 3).compensate_with(write_off, "C").run()
        flow.action(last).compensate_with(undo_last).run()
        flow.run(fail)

    handle = parent.send()
    app.start()
    assert app.ended(handle) == "failed"
    assert [call for call in app.calls if call[0] not in ("first", "last", "fail")] == [
        ("undo_last",), ("write_off", "C"), ("recall", 1), ("undo_first",),
    ]  # fmt: skip
    assert [child_of(handle, sequence).status for sequence in (2, 3, 4)] == ["completed"] * 3
    assert [(undo.sequence, undo.undoes) for undo in handle.compensations()] == [
        (5, "completed"), (4, "completed"), (2, "completed"), (1, "completed"),
    ]  # fmt: skip


def test_the_undo_of_a_child_is_told_that_it_is_wanted(app: Application) -> None:
    """COMP-7, API ``current_step().cancelled``: as the undo of a step is."""
    ship = app.step("ship")

    @app.actor
    def recall() -> None:
        step = current_step()
        assert step is not None
        app.calls.append((step.sequence, step.cancelled))

    @app.workflow
    def shipment(flow: Flow) -> None:
        return None

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.child(shipment).compensate_with(recall).run()
        flow.action(ship).compensate_with(recall).run()
        raise ValueError("no")

    handle = app.run(parent)
    assert app.ended(handle) == "failed"
    assert app.calls[1:] == [(2, False), (1, False)]


def test_a_child_that_has_completed_unseen_is_undone_too(app: Application) -> None:
    """COMP-2, CHILD-3: the drive that would build its compensation has not come; the operator's call rehearses it."""
    recall = app.step("recall")

    @app.workflow(queue_name=app.queue)
    def shipment(flow: Flow) -> int:
        return 7

    later = app.step("later")

    @app.workflow(queue_name=app.queue + "x")
    def parent(flow: Flow) -> None:
        flow.child(shipment).compensate_with(lambda number: recall.message(number)).run()
        flow.run(later)

    handle = parent.send()
    with app.working(queues={app.queue + "x"}):
        eventually(handle.children)
    with app.working(queues={app.queue}):
        app.ended(child_of(handle))
    assert links(handle) == [(1, "shipment", "completed")]
    assert handle.compensate()
    app.start()
    assert app.ended(handle) == "cancelled"
    assert app.calls == [("recall", 7)]


def test_run_sync_runs_children_inline(lite: Application) -> None:
    """SYNC-1: children too, in the calling process, with the same rows; a tree that fails is undone there as well."""
    app = lite
    work, undo = app.step("work", gives=1), app.step("undo")

    @app.workflow
    def child(flow: Flow, fails: bool) -> int:
        got = flow.action(work, "child").compensate_with(undo, "child").run()
        if fails:
            raise ValueError("no")
        return got

    @app.workflow
    def parent(flow: Flow, fails: bool) -> int:
        flow.action(work, "parent").compensate_with(undo, "parent").run()
        return flow.child(child, fails).run()

    assert parent.run_sync(False).result() == 1
    app.calls.clear()
    handle = parent.run_sync(True)
    assert handle.status == "failed"
    assert app.calls == [("work", "parent"), ("work", "child"), ("undo", "child"), ("undo", "parent")]
    assert app.messages() == 0


def test_the_default_policy_comes_from_the_settings(applications: Applications) -> None:
    """CHILD-3: ``children.default_close_policy``."""
    app = applications("sqlite", settings=Settings.from_mapping({"children.default_close_policy": "cancel"}))

    @app.workflow
    def child(flow: Flow) -> None: ...

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.child(child).run()

    assert app.run(parent).children()[0].close_policy == "cancel"


def test_members_that_end_while_others_are_at_work_cost_no_drive(app: Application) -> None:
    """PAR-4: a block of children is driven when it begins and when it is finished, however many they are."""
    drives: list[int] = []

    @app.workflow
    def child(flow: Flow, number: int) -> int:
        return number

    @app.workflow
    def parent(flow: Flow) -> list[int]:
        drives.append(1)
        return flow.parallel(*[flow.child(child, number) for number in range(20)]).run()

    handle = app.run(parent)
    assert handle.result() == list(range(20))
    assert len(drives) == 2
    app.drain()
    assert app.messages() == 0
    assert untold(app) == []


def test_a_run_that_blocks_names_what_its_child_waits_for(lite: Application) -> None:
    """SYNC-1: down to the child that waits."""

    @lite.workflow
    def child(flow: Flow) -> None:
        flow.await_signal("go")

    @lite.workflow
    def parent(flow: Flow) -> None:
        flow.child(child).run()

    with pytest.raises(WouldBlockError, match=r"child 1 \(child\), which waits for "):
        parent.run_sync()


def test_what_is_said_to_a_family_that_has_ended_is_answered_and_changes_nothing(every_app: Application) -> None:
    """C34: signals to a child and a parent that have completed, cancels too; no wake of the parent, nothing stored."""
    app = every_app

    @app.workflow
    def child(flow: Flow) -> int:
        return 1

    @app.workflow
    def parent(flow: Flow) -> int:
        return flow.child(child).run()

    handle = app.run(parent)
    app.drain()
    before = app.sql("SELECT id, wakes, revision, status FROM {flow_runs} ORDER BY id")
    for run in (child_of(handle), handle):
        for _ in range(2):
            with pytest.raises(CannotSignalTerminalFlowError):
                run.signal("late")
            assert run.signal_if_running("late") is False
        with pytest.raises(ConcurrentTransitionError):
            run.cancel()
    app.drain()
    assert app.sql("SELECT id, wakes, revision, status FROM {flow_runs} ORDER BY id") == before
    assert app.sql("SELECT COUNT(*) FROM {signals}") == [(0,)]
    assert app.types(handle).count("child.completed") == 1
    assert app.messages() == 0


def test_a_child_inherits_its_parents_context(applications: Applications) -> None:
    """CHILD-1, CTX-1: restored around the child's function and its steps, and around what closes it."""
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
    settings = Settings(context=Context(capture=tenant.get, restore=tenant.set))
    app = applications("sqlite", settings=settings)
    seen: list[tuple[str, str]] = []

    @app.actor
    def work() -> str:
        seen.append(("step", tenant.get()))
        return "done"

    @app.actor
    def undo(what: str) -> None:
        seen.append(("undo", tenant.get()))

    def message(result: str) -> Any:
        seen.append(("close", tenant.get()))
        return undo.message(result)

    @app.workflow
    def child(flow: Flow) -> str:
        seen.append(("child", f"{flow.context} {tenant.get()}"))
        flow.action(work).compensate_with(message).run()
        return str(flow.await_signal("never"))

    @app.workflow
    def parent(flow: Flow) -> str:
        return flow.child(child).close_policy("cancel").run()

    token = tenant.set("acme")
    handle = parent.send()
    tenant.reset(token)
    app.start(threads=1)
    eventually(lambda: any(run.status == "waiting" for run in map(child_of, [handle] if handle.children() else [])))
    assert handle.compensate()
    app.ended(child_of(handle))
    assert {what for what, _ in seen} == {"child", "step", "close", "undo"}
    assert {value for _, value in seen} == {"acme", "acme acme"}


def test_show_tells_of_both_ends(lite: Application) -> None:
    """CHILD-1: a run's children, and a child's parent."""

    @lite.workflow
    def child(flow: Flow) -> int:
        return 1

    @lite.workflow
    def parent(flow: Flow) -> int:
        return flow.child(child).run()

    handle = lite.run(parent)
    operator = Operator.on_broker(lite.broker)
    now = lite.store.clock.now()
    of_parent = "\n".join(lines_of(operator.show_run(handle.id), now))
    assert f"run {handle.children()[0].child_id}" in of_parent
    of_child = "\n".join(lines_of(operator.show_run(handle.children()[0].child_id), now))
    assert f"child of   {handle.id}, at its sequence 1" in of_child


@pytest.mark.parametrize("commits", [True, False])
def test_a_cancel_in_a_hosts_transaction_closes_children_with_it(lite: Application, commits: bool) -> None:
    """HOST-1, CHILD-3: the requests and their messages are part of the host's transaction, and vanish with it."""
    tree = Tree(lite, "cancel")
    handle, child = tree.under_way()
    with lite.store.database.atomic() as transaction:
        assert handle.cancel("in a host's transaction")
        if not commits:
            transaction.rollback()
    if commits:
        assert lite.ended(child) == "cancelled"
    tree.gate.leave.release()
    assert lite.ended(handle) == ("cancelled" if commits else "completed")
    lite.drain()
    assert lite.ended(child) == ("cancelled" if commits else "completed")
    assert links(handle) == [(2, "shipment", "cancelled" if commits else "completed")]
    assert untold(lite) == []


@pytest.mark.parametrize("policy", ["fail_fast", "wait_all_then_fail"])
def test_a_block_waits_for_children_that_are_under_way_and_undoes_those_that_complete(
    every_app: Application, policy: str
) -> None:
    """PAR-4, CHILD-3: a running child is not closed by the failure of another; what it did is undone by its compensate_with."""
    app, gate = every_app, Gate()
    recall = app.step("recall")

    @app.actor
    def hang() -> str:
        gate()
        return "parcel"

    @app.workflow
    def slow(flow: Flow) -> str:
        return flow.run(hang)

    @app.workflow
    def failing(flow: Flow) -> None:
        raise ValueError("no stock")

    @app.workflow
    def parent(flow: Flow) -> Any:
        first = flow.child(slow).compensate_with(lambda parcel: recall.message(parcel))
        block = flow.parallel(first, flow.child(failing))
        return (block.fail_fast() if policy == "fail_fast" else block.wait_all_then_fail()).run()

    handle = parent.send()
    app.start(threads=3)
    gate.wait()
    eventually(lambda: links(handle)[1][2] == "failed")
    assert child_of(handle, 2).status in ("running", "waiting")
    gate.leave.release()
    assert app.ended(handle) == "failed"
    with pytest.raises(FlowFailedError, match=r"child failing .* did not complete: ValueError: no stock"):
        handle.result()
    assert app.calls == [("recall", "parcel")]
    assert untold(app) == []


def test_a_group_of_children_is_undone_side_by_side(app: Application) -> None:
    """COMP-5, CHILD-3: members of a saga group may be children; their undos share a level."""
    recall, fail = app.step("recall"), app.step("fail", raises=ValueError("no"))

    @app.workflow
    def child(flow: Flow, number: int) -> int:
        return number

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.saga(
            flow.child(child, 1).compensate_with(lambda number: recall.message(number)),
            flow.child(child, 2).compensate_with(recall, 2),
        ).compensate_in_parallel().run()
        flow.run(fail)

    handle = app.run(parent)
    assert handle.status == "failed"
    assert sorted(app.calls[1:]) == [("recall", 1), ("recall", 2)]
    assert {undo.level for undo in handle.compensations()} == {0}


@pytest.mark.parametrize("command", ["--keep", "--compensate"])
def test_the_command_line_says_what_becomes_of_children(lite: Application, command: str) -> None:
    """CHILD-3: cancel names each child and its fate, and asks before it closes one."""
    recall = lite.step("recall")

    @lite.workflow
    def quick(flow: Flow) -> int:
        return 7

    @lite.workflow
    def slow(flow: Flow) -> None:
        flow.await_signal("never")

    @lite.workflow
    def parent(flow: Flow) -> None:
        flow.child(quick).compensate_with(recall, 7).run()
        flow.parallel(*[flow.child(slow).close_policy(policy) for policy in ("abandon", "cancel", "fail")]).run()

    handle = parent.send()
    lite.start()
    eventually(lambda: len(handle.children()) == 4)
    operator = Operator.on_broker(lite.broker)
    parser = argparse.ArgumentParser()
    common = argparse.ArgumentParser(add_help=False)
    runs.add_commands(parser.add_subparsers(), common)
    options = parser.parse_args(["cancel", handle.id])
    with pytest.raises(RefusedError, match=r"run \S+ is under way: close policy fail"):
        options.run(operator, options)
    lite.stop()
    options = parser.parse_args(["cancel", handle.id, command])
    lines = options.run(operator, options).lines
    found = lines[lines.index("its children:") + 1 :]
    undone = command == "--compensate"
    assert [line.partition(") ")[2] for line in found] == [
        "had completed: to be undone by recall" if undone else "had completed: its work stands",
        "goes on by itself",
        "is rolled back, and ends as cancelled" if undone else "ends as cancelled, its work stands",
        "is rolled back, and ends as failed",
    ]
    lite.start()
    eventually(lambda: [child_of(handle, sequence).status for sequence in (4, 5)] == ["cancelled", "failed"])
    assert child_of(handle, 3).status == "waiting"
    if undone:
        eventually(lambda: handle.rollback == "done")
        lines = options.run(operator, options).lines
        assert (
            next(line.partition(") ")[2] for line in lines[lines.index("its children:") + 1 :])
            == "had completed: undone by recall"
        )


def test_a_cancel_goes_down_to_the_last_of_twenty_levels_and_stops_at_an_abandoned_one(applications: Applications) -> None:
    """CHILD-3: each level closes the next by its own policy; below one that was abandoned everything goes on."""
    app = applications("sqlite")

    def nest(flow: Flow, depth: int, abandoned: int) -> str:
        if depth == 0:
            return str(flow.await_signal("go"))
        policy = "abandon" if depth == abandoned else "cancel"
        return flow.child(nested, depth - 1, abandoned).close_policy(policy).run()

    nested: Any = app.workflow(name="nested")(nest)
    handles = [nested.send(20, 0), nested.send(20, 5)]
    app.start()
    eventually(lambda: app.sql("SELECT COUNT(*) FROM {waits} WHERE status = 'waiting'") == [(2,)])
    for handle in handles:
        assert handle.cancel()
    eventually(lambda: app.sql("SELECT COUNT(*) FROM {flow_runs} WHERE status = 'waiting'") == [(5,)])
    app.drain()
    assert app.sql("SELECT status, COUNT(*) FROM {flow_runs} GROUP BY status ORDER BY status") == [
        ("cancelled", 37),
        ("waiting", 5),
    ]
    (left,) = app.sql("SELECT run_id FROM {waits} WHERE status = 'waiting'")
    get_flow(left[0], broker=app.broker).signal("go", "at last")
    eventually(lambda: app.sql("SELECT COUNT(*) FROM {flow_runs} WHERE status = 'completed'") == [(5,)])
    assert untold(app) == []


@pytest.mark.parametrize("ending", ["complete", "compensate"])
def test_a_tree_over_rabbitmq(applications: Applications, ending: str) -> None:
    """CHILD-1, CHILD-3, DRIVE-3: messages that leave after the commit, on a broker of another kind."""
    app = applications("rabbitmq")
    tree = Tree(app, "cancel")
    handle, child = tree.under_way()
    if ending == "compensate":
        assert handle.compensate()
        assert app.ended(child) == "cancelled"
    tree.gate.leave.release()
    assert app.ended(handle) == ("completed" if ending == "complete" else "cancelled")
    assert app.ended(child) == ("completed" if ending == "complete" else "cancelled")
    undone = [call for call in app.calls if call[0] in ("release", "undo_order")]
    assert sorted(undone) == ([] if ending == "complete" else [("release",), ("undo_order",)])
    assert untold(app) == []
