"""Parallel blocks with real workers, on every kind of broker and store (PAR-1, PAR-2, PAR-4)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.middleware import TimeLimitExceeded
from dramatiq.middleware.threading import raise_thread_exception

from dramatiq_saga import Flow, Settings, StepFailedError
from dramatiq_saga.engine.rows import Group, Outgoing
from dramatiq_saga.middleware import build_message
from tests.support import store_faults as f
from tests.support.application import Application, Applications
from tests.support.store_faults import Faults
from tests.support.waiting import DEADLINE, eventually

KINDS = ("sqlite", "postgresql", "mariadb", "redis", "rabbitmq", "stub")


@pytest.fixture(params=KINDS)
def app(request: pytest.FixtureRequest, applications: Applications) -> Application:
    return applications(request.param)


class Doors:
    """Members that stand in their bodies until their door is opened: for as many threads as there are members."""

    def __init__(self, app: Application, *, compensated: bool = False) -> None:
        self.app = app
        self.inside: set[int] = set()
        self.most = 0
        self.undone: list[int] = []
        self._doors: dict[int, threading.Event] = {}
        self._errors: dict[int, Exception] = {}
        self._lock = threading.Lock()
        self.member = app.actor(self._body, actor_name="member")
        self.undo = app.actor(self.undone.append, actor_name="undo")

    def _door(self, number: int) -> threading.Event:
        with self._lock:
            return self._doors.setdefault(number, threading.Event())

    def _body(self, number: int) -> int:
        with self._lock:
            self.inside.add(number)
            self.most = max(self.most, len(self.inside))
        assert self._door(number).wait(DEADLINE)
        with self._lock:
            self.inside.discard(number)
            error = self._errors.pop(number, None)
        if error is not None:
            raise error
        return number * 10

    def wait_inside(self, *numbers: int) -> None:
        eventually(lambda: self.inside == set(numbers), because=f"{numbers} stand in their bodies, and no others")

    def open(self, number: int, error: Exception | None = None) -> None:
        if error is not None:
            self._errors[number] = error
        self._door(number).set()

    def members(self, flow: Flow, count: int) -> list[Any]:
        return [flow.action(self.member, number).compensate_with(self.undo, number) for number in range(count)]


def statuses(app: Application, run: Any) -> list[str]:
    return [row[0] for row in app.sql("SELECT status FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run.id)]


@pytest.mark.both_ways
def test_results_come_in_the_order_given_whatever_ends_first(app: Application) -> None:
    """PAR-2, PAR-4: members end last first, and the run goes on once, after the last."""
    doors, after = Doors(app), app.step("after", gives="done")

    @app.workflow
    def fan(flow: Flow) -> Any:
        found = flow.parallel(*doors.members(flow, 3)).run()
        return [*found, flow.run(after)]

    app.start(threads=4)
    run = fan.send()
    doors.wait_inside(0, 1, 2)
    assert run.status == "running"
    for number in (2, 1, 0):
        assert app.calls == []
        doors.open(number)
        doors.wait_inside(*range(number))
    app.ended(run)
    assert run.result() == [0, 10, 20, "done"]
    assert app.calls == [("after",)]
    eventually(lambda: app.messages() == 0)  # the callback's too, which is sent after the last outcome
    assert app.sql("SELECT COUNT(*) FROM {blocks} WHERE ended_at IS NULL OR closed_early_at IS NOT NULL") == [(0,)]


def test_the_callback_of_a_block_is_sent_once_and_finds_nothing_to_do(app: Application) -> None:
    """PAR-1, PAR-2: the group's barrier is reached by the last of three, and its callback is a second trigger only."""
    member = app.step("member")
    barriers: list[str] = []

    @app.workflow
    def fan(flow: Flow) -> None:
        flow.parallel(*(flow.action(member, number) for number in range(3))).run()

    backend = next(one for one in app.broker.middleware if type(one).__name__ == "OwnGroupCallbacks").rate_limiter_backend  # type: ignore[attr-defined]
    plain = backend.decr
    backend.decr = lambda key, *rest: barriers.append(key) or plain(key, *rest)
    run = app.run(fan)
    app.drain()
    assert len(barriers) == 3
    assert len(set(barriers)) == 1
    assert run.id in barriers[0]
    assert run.status == "completed"
    assert app.types(run).count("flow.completed") == 1


def test_the_callback_of_a_run_that_was_pruned_is_used_up(app: Application) -> None:
    """PAR-2, PRUNE-1: it has nothing to say, and is delivered once."""
    member = app.step("member")

    @app.workflow
    def fan(flow: Flow) -> None:
        flow.run(member)

    group = Group("a-group", 2, 1, 2, 3, fan.name, app.queue, None)
    (callback,) = build_message(app.broker, Outgoing("step", "a-run", "member", app.queue, 2, group=group)).options[
        "group_completion_callbacks"
    ]
    app.broker.enqueue(Message(**callback))
    app.start()
    eventually(lambda: app.messages() == 0)


def test_the_first_failure_cancels_what_is_not_running_and_what_runs_finishes(app: Application) -> None:
    """PAR-4, C13: fail_fast; one that completes later is undone with the rest, in reverse order."""
    doors = Doors(app)

    @app.workflow
    def fan(flow: Flow) -> Any:
        return flow.parallel(*doors.members(flow, 6)).run()

    app.start(threads=3)
    run = fan.send()
    eventually(lambda: len(doors.inside) == 3)
    first = min(doors.inside)
    doors.open(first)
    eventually(lambda: len(doors.inside) == 3 and first not in doors.inside)
    failing, running, late = sorted(doors.inside)
    doors.open(failing, ValueError("no"))
    eventually(lambda: statuses(app, run).count("cancelled") == 2)
    assert run.status == "running"
    doors.open(running)
    doors.open(late)
    assert app.ended(run) == "failed"
    assert sorted(statuses(app, run)) == ["cancelled"] * 2 + ["completed"] * 3 + ["failed"]
    assert doors.undone == sorted([first, running, late], reverse=True)
    assert not doors.inside


def test_a_block_that_waits_settles_every_member_before_it_fails(app: Application) -> None:
    """PAR-4, C13: wait_all_then_fail; the error is that of the first in the order given."""
    doors = Doors(app)

    @app.workflow
    def fan(flow: Flow) -> Any:
        return flow.parallel(*doors.members(flow, 4)).wait_all_then_fail().run()

    app.start(threads=2)
    run = fan.send()
    for number in range(4):
        doors.open(number, ValueError(f"no {number}") if number in (1, 2) else None)
    assert app.ended(run) == "failed"
    assert statuses(app, run) == ["completed", "failed", "failed", "completed"]
    assert doors.undone == [3, 0]
    with pytest.raises(Exception, match="no 1"):
        run.result()


def test_an_empty_block_is_an_empty_list_and_sends_nothing(app: Application) -> None:
    """PAR-4, C19: the run goes on in the same drive; empty blocks inside a block too."""
    after = app.step("after", gives=1)

    @app.workflow
    def fan(flow: Flow, nothing: list[int]) -> Any:
        found = flow.parallel(*(flow.action(after, n) for n in nothing)).run()
        nested = flow.parallel(flow.parallel(), flow.parallel(flow.parallel())).run()
        return [found, nested]

    run = app.run(fan, [])
    assert run.result() == [[], [[], [[]]]]
    assert app.calls == []
    assert app.types(run) == ["flow.started", "flow.completed"]
    assert app.sql("SELECT COUNT(*) FROM {blocks} WHERE ended_at IS NULL") == [(0,)]


def test_no_more_members_are_in_flight_than_allowed(app: Application) -> None:
    """PAR-1: the others are held back without a message, and each that ends lets the next one go."""
    doors = Doors(app)

    @app.workflow
    def fan(flow: Flow) -> Any:
        return flow.parallel(*doors.members(flow, 7)).max_in_flight(2).run()

    app.start(threads=4)
    run = fan.send()
    eventually(lambda: len(doors.inside) == 2)
    sent = app.sql("SELECT COUNT(*) FROM {action_runs} WHERE run_id = ? AND sent_at IS NULL AND held_back = ?", run.id, True)
    assert sent == [(5,)]
    while doors.inside:
        doors.open(min(doors.inside))
        left = 7 - len([one for one in doors._doors.values() if one.is_set()])
        eventually(lambda left=left: len(doors.inside) == min(2, left))  # type: ignore[misc]
    app.ended(run)
    assert run.result() == [number * 10 for number in range(7)]
    assert doors.most == 2


def test_failures_of_a_limited_block_let_the_next_ones_go_too(app: Application) -> None:
    """PAR-1, PAR-4: held-back members are cancelled by the first failure, or take the place of a failed one."""
    fails = app.actor(lambda n: 1 // (n % 2), actor_name="fails")

    @app.workflow
    def fan(flow: Flow, wait: bool) -> Any:
        block = flow.parallel(*(flow.action(fails, number) for number in range(6))).max_in_flight(1)
        return (block.wait_all_then_fail() if wait else block.fail_fast()).run()

    fast, patient = app.run(fan, False), app.run(fan, True)
    assert statuses(app, fast) == ["failed"] + ["cancelled"] * 5
    assert statuses(app, patient) == ["failed", "completed"] * 3


def test_members_that_fail_without_failing_the_run(app: Application) -> None:
    """PAR-4: a failed block can be caught, and the run goes on."""
    fails = app.step("fails", raises=ValueError("no"))
    after = app.step("after", gives="after all")

    @app.workflow
    def fan(flow: Flow) -> Any:
        try:
            return flow.parallel(flow.action(fails), flow.action(fails)).run()
        except StepFailedError as error:
            return [error.message, flow.run(after)]

    assert app.run(fan).result() == ["no", "after all"]


def test_blocks_inside_blocks_give_lists_inside_lists(app: Application) -> None:
    """PAR-4, C19: each block is joined by itself, the outer one by its blocks."""
    double = app.actor(lambda n: 2 * n, actor_name="double")

    @app.workflow
    def fan(flow: Flow) -> Any:
        def inner(*numbers: int) -> Any:
            return flow.parallel(*(flow.action(double, number) for number in numbers))

        return flow.parallel(inner(1, 2), flow.action(double, 3), inner(), inner(4, 5, 6)).run()

    assert app.run(fan).result() == [[2, 4], 6, [], [8, 10, 12]]


def test_one_block_after_another(app: Application) -> None:
    """C19: sizes that come from results; the callback of the first block does not disturb the second."""
    double = app.actor(lambda n: 2 * n, actor_name="double")
    numbers = app.actor(lambda: [1, 2, 3], actor_name="numbers")

    @app.workflow
    def fan(flow: Flow) -> Any:
        found = flow.run(numbers)
        for _ in range(3):
            found = flow.parallel(*(flow.action(double, number) for number in found)).run()
        return found

    assert app.run(fan).result() == [8, 16, 24]
    assert Settings().parallel.default_failure_policy == "fail_fast"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
@pytest.mark.parametrize("trouble", ["interrupted", "refused", "unknown"])
def test_outcomes_that_meet_trouble_are_recorded_once_and_join_the_block(
    kind: str, trouble: str, applications: Applications
) -> None:
    """C14, FENCE-3, FENCE-5: every member's outcome, the last one's too, is hit by a time limit in the middle of its write, by a
    store that refuses it, or by a commit that nobody knows about."""
    app = applications(kind)
    member, after = app.step("member", gives=1), app.step("after", gives="after")

    @app.workflow
    def fan(flow: Flow) -> Any:
        return [sum(flow.parallel(*(flow.action(member, number) for number in range(4))).run()), flow.run(after)]

    faults = Faults(app.store)
    if trouble == "interrupted":
        hit = faults.pause(f.COMPLETE, lambda: raise_thread_exception(threading.get_ident(), TimeLimitExceeded), times=4)
    elif trouble == "refused":
        hit = faults.refuse(f.COMPLETE, times=4)
    else:
        hit = faults.unknown(f.COMPLETE, times=4, landed=True)
    app.start(threads=1)
    run = app.run(fan)
    assert hit.met == 4
    assert run.result() == [4, "after"]
    assert sorted(app.calls) == [("after",), ("member", 0), ("member", 1), ("member", 2), ("member", 3)]
    assert app.types(run).count("action.completed") == 5
    eventually(lambda: app.messages() == 0)


@pytest.mark.parametrize("ends", ["step last", "child last"])
def test_steps_and_children_side_by_side(app: Application, ends: str) -> None:
    """PAR-1, PAR-2, CHILD-1: a member that is a child is settled when its link is; the run waits once only the child is open."""
    doors, inner = Doors(app), app.step("inner", gives="inner")
    gate = app.actor(lambda: doors._body(9), actor_name="gate")

    @app.workflow
    def nested(flow: Flow) -> list[Any]:
        return [flow.run(gate), flow.run(inner)]

    @app.workflow
    def fan(flow: Flow) -> Any:
        first, second = doors.members(flow, 2)
        return flow.parallel(first, flow.child(nested), second).run()

    app.start(threads=4)
    run = fan.send()
    doors.wait_inside(0, 1, 9)
    doors.open(0)
    if ends == "step last":
        doors.open(9)
        doors.wait_inside(1)
        eventually(lambda: app.sql("SELECT status FROM {children} WHERE run_id = ?", run.id) == [("completed",)])
        assert run.status == "running"
        doors.open(1)
    else:
        doors.open(1)
        eventually(lambda: run.status == "waiting", because="nothing but the child is open")
        doors.open(9)
    app.ended(run)
    assert run.result() == [0, [90, "inner"], 10]


def test_a_child_that_fails_its_block_cancels_what_has_not_begun(app: Application) -> None:
    """PAR-4, CHILD-2: members that run finish and are undone; the children among them too, by their own rules."""
    doors = Doors(app)
    fails = app.step("fails", raises=ValueError("no"))

    @app.workflow
    def broken(flow: Flow) -> None:
        flow.run(fails)

    @app.workflow
    def fan(flow: Flow) -> Any:
        return flow.parallel(*doors.members(flow, 1), flow.child(broken), flow.child(broken).continue_on_failure()).run()

    app.start(threads=2)
    run = fan.send()
    eventually(lambda: app.sql("SELECT failed_by FROM {blocks} WHERE run_id = ?", run.id) == [(3,)])
    doors.open(0)
    assert app.ended(run) == "failed"
    assert doors.undone in ([0], [])  # undone if it had begun, cancelled if it had not
    assert statuses(app, run) == (["completed"] if doors.undone else ["cancelled"])
