"""HISTORY-2: ``flow.patched``, a change of a workflow that has runs in flight; and the version that a run was started with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga import Flow
from dramatiq_saga.codec import encode, freeze
from dramatiq_saga.engine.drive import Driven, drive
from dramatiq_saga.engine.replay import Replay, replay
from dramatiq_saga.engine.rows import Decision, Entry, PatchEntry, Snapshot, StepEntry
from dramatiq_saga.engine.verify import verify_run
from dramatiq_saga.settings import Settings
from tests.support.application import Application, Applications
from tests.support.bench import Bench
from tests.support.deploying import deploy
from tests.support.waiting import eventually

Code = Callable[[Flow], Any]


class Office:
    """A workflow whose code is deployed anew again and again. ``said`` is what ``patched`` has answered, in every walk."""

    def __init__(self, by_hand: Any, code: Callable[[Office, Flow], Any]) -> None:
        self.said: list[tuple[str, bool]] = []
        self.bench: Bench = by_hand(lambda bench: self.declare(bench, code))

    def declare(self, bench: Bench, code: Callable[[Office, Flow], Any]) -> None:
        def old(number: int = 0) -> str:
            return f"old {number}"

        def new(number: int = 0) -> str:
            return f"new {number}"

        def wait() -> str:
            return "waited"

        self.old, self.new, self.wait = bench.actor(old), bench.actor(new), bench.actor(wait)
        bench.workflow(lambda flow: code(self, flow), name="work")

    def deploy(self, code: Callable[[Office, Flow], Any]) -> None:
        deploy(self.bench.engine, "work", lambda flow: code(self, flow))

    def ask(self, flow: Flow, change_id: str) -> bool:
        answer = flow.patched(change_id)
        self.said.append((change_id, answer))
        return answer

    def start(self, messages: int = 0) -> str:
        """A run, after so many messages were delivered: a drive and one for each step that is done."""
        run = self.bench.start("work")
        self.deliver(messages)
        return run

    def deliver(self, messages: int) -> None:
        for _ in range(messages):
            self.bench.deliver(self.bench.take())

    def result(self, run: str) -> Any:
        self.bench.run()
        assert self.bench.status(run) == "completed", self.bench.one(
            "SELECT hold_error, error FROM {flow_runs} WHERE id = ?", run
        )
        row = self.bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run)
        assert row is not None
        return json.loads(row[0])

    def markers(self, run: str) -> list[tuple[int, str, bool]]:
        rows = self.bench.all(
            "SELECT sequence, name, value FROM {side_effects} WHERE run_id = ? AND kind = 'patch' ORDER BY sequence", run
        )
        return [(sequence, name, json.loads(bytes(value))) for sequence, name, value in rows]


def before(office: Office, flow: Flow) -> list[str]:
    return [flow.run(office.wait), flow.run(office.old), flow.run(office.wait)]


def changed(office: Office, flow: Flow) -> list[str]:
    first = flow.run(office.wait)
    second = flow.run(office.new) if office.ask(flow, "new-way") else flow.run(office.old)
    return [first, second, flow.run(office.wait)]


def mended(office: Office, flow: Flow) -> list[str]:
    """The change once no run of the old way is left: the call is gone."""
    return [flow.run(office.wait), flow.run(office.new), flow.run(office.wait)]


OLD, NEW = ["waited", "old 0", "waited"], ["waited", "new 0", "waited"]


# --- which way a run goes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("messages", "goes"), [(0, NEW), (1, NEW), (2, OLD), (3, OLD)])
def test_a_run_goes_the_new_way_unless_it_has_passed_the_point(by_hand: Any, messages: int, goes: list[str]) -> None:
    """HISTORY-2: sent and not driven, parked before the point, parked right behind it, and further."""
    office = Office(by_hand, before)
    run = office.start(messages)
    office.deploy(changed)
    assert office.result(run) == goes
    assert set(office.said) == {("new-way", goes == NEW)}
    assert office.result(office.start()) == NEW


def test_the_answer_is_recorded_once_with_what_follows_from_it(by_hand: Any) -> None:
    """HISTORY-2: one entry for each change, in the transaction of the decision that rests on it, however often it is asked for."""

    def often(office: Office, flow: Flow) -> list[str]:
        assert [flow.patched("a") for _ in range(3)] == [True] * 3
        flow.run(office.wait)
        return [flow.run(office.new), str(flow.patched("a")), str(flow.patched("b"))]

    office = Office(by_hand, often)
    run = office.start(1)
    assert office.markers(run) == [(1, "a", True)]
    assert office.result(run) == ["new 0", "True", "True"]
    assert office.markers(run) == [(1, "a", True), (4, "b", True)]
    assert office.bench.events(run).count("side_effect.recorded") == 2


def test_a_decision_that_loses_records_no_answer(by_hand: Any) -> None:
    """DRIVE-1: of a drive with old code and one with new code that meet, one commits; the other looks again and agrees with it."""

    def at_once(office: Office, flow: Flow) -> str:
        return flow.run(office.old)

    def gated(office: Office, flow: Flow) -> str:
        return flow.run(office.new if office.ask(flow, "new-way") else office.old)

    def old_code_is_first() -> None:
        office.deploy(at_once)
        assert drive(office.bench.engine, run, office.bench.sender) is Driven.DECIDED
        office.deploy(gated)

    office = Office(by_hand, gated)
    run = office.start()
    office.bench.overtake("decision", old_code_is_first)
    office.deliver(1)
    assert office.said == [("new-way", True)]  # what the walk that lost had thought
    assert office.markers(run) == []
    assert office.bench.steps(run) == [("old", "pending")]
    assert office.result(run) == "old 0"
    assert office.said[-1] == ("new-way", False)


# --- what it was it stays --------------------------------------------------------------------------------------------


def test_an_answer_on_recorded_ground_holds_on_new_ground(by_hand: Any) -> None:
    """HISTORY-2: asked first where the run has passed and again where it has not been: the old way, for the rest of its life."""

    def twice(office: Office, flow: Flow) -> list[str]:
        first = flow.run(office.new) if office.ask(flow, "a") else flow.run(office.old)
        second = flow.run(office.wait)
        return [first, second, flow.run(office.new if office.ask(flow, "a") else office.old)]

    office = Office(by_hand, lambda office, flow: [flow.run(office.old), flow.run(office.wait), flow.run(office.old)])
    run = office.start(1)
    office.deploy(twice)
    assert office.result(run) == ["old 0", "waited", "old 0"]
    assert {answer for _, answer in office.said} == {False}


def test_an_old_way_is_recorded_where_the_run_comes_to_new_ground(by_hand: Any) -> None:
    """HISTORY-2: so it stays the old way although the place that was asked first is gone from the code."""

    def asks(office: Office, flow: Flow) -> Any:
        office.ask(flow, "a")
        flow.run(office.old)
        flow.run(office.wait)
        return flow.run(office.old)

    def asks_later(office: Office, flow: Flow) -> Any:
        flow.run(office.old)
        flow.run(office.wait)
        flow.run(office.old)
        return flow.run(office.new if office.ask(flow, "a") else office.old)

    office = Office(by_hand, lambda office, flow: [flow.run(office.old), flow.run(office.wait)])
    run = office.start(2)
    office.deploy(asks)
    office.deliver(1)
    assert office.markers(run) == [(3, "a", False)]  # in front of the third step
    office.deploy(asks_later)
    assert office.result(run) == "old 0"
    assert office.said[-1] == ("a", False)


def test_an_old_way_is_recorded_before_a_side_effect_that_follows_from_it(by_hand: Any) -> None:
    """HISTORY-2, SIDE-1: a side effect is recorded at once, and a history has no gaps."""

    def asks(office: Office, flow: Flow) -> Any:
        way = office.ask(flow, "a")
        flow.run(office.old)
        return [way, flow.side_effect("dice", lambda: 4)]

    office = Office(by_hand, lambda office, flow: flow.run(office.old))
    run = office.start(1)
    office.deploy(asks)
    assert office.result(run) == [False, 4]
    assert office.markers(run) == [(2, "a", False)]
    assert office.bench.all("SELECT sequence, kind FROM {side_effects} WHERE run_id = ? ORDER BY sequence", run) == [
        (2, "patch"),
        (3, "value"),
    ]


# --- removing a call -------------------------------------------------------------------------------------------------


def test_a_call_can_be_removed_once_every_old_run_has_ended(by_hand: Any) -> None:
    """HISTORY-2: runs of the new way have the answer in their history, and the code that no longer asks steps over it."""
    office = Office(by_hand, changed)
    runs = [office.start(messages) for messages in (0, 1, 2, 3)]
    office.deploy(mended)
    for run in runs:
        verdict = verify_run(office.bench.engine, run)
        assert verdict is not None
        assert verdict.fits
        assert office.result(run) == NEW


def test_removed_too_early_an_old_run_is_held_and_the_call_back_resumes_it(by_hand: Any) -> None:
    """HISTORY-1, C68: what the old way has recorded does not fit the mended code; nothing is lost by it."""
    office = Office(by_hand, before)
    run = office.start(2)
    office.deploy(mended)
    verdict = verify_run(office.bench.engine, run)
    assert verdict is not None
    (finding,) = verdict.findings
    assert (finding.sequence, finding.recorded, finding.asked) == (2, "step 'old'", "step 'new'")
    office.deliver(1)
    assert office.bench.status(run) == "waiting"
    office.deploy(changed)
    assert drive(office.bench.engine, run, office.bench.sender) is Driven.DECIDED
    assert office.result(run) == OLD


NEXT: dict[str, Callable[[Office, Flow], Any]] = {
    "a step": lambda office, flow: flow.run(office.old),
    "a built step": lambda office, flow: flow.action(office.old, 1).compensate_with(office.wait).run(),
    "a side effect": lambda office, flow: flow.side_effect("x" * 10, lambda: 1),
    "the time": lambda office, flow: str(flow.now()),
    "a parallel block": lambda office, flow: flow.parallel(flow.action(office.old), flow.action(office.new)).run(),
    "a saga": lambda office, flow: flow.saga(flow.action(office.old), flow.action(office.new)).run(),
    "another change": lambda office, flow: flow.patched("another"),
    "its end": lambda office, flow: None,
}


@pytest.mark.parametrize("what", NEXT)
@pytest.mark.parametrize("parked", ["before it", "behind it"])
def test_an_answer_that_nobody_asks_for_is_stepped_over_in_front_of_anything(by_hand: Any, what: str, parked: str) -> None:
    """HISTORY-2: whatever stands behind it, recorded or new."""

    def with_call(office: Office, flow: Flow) -> Any:
        flow.patched("a")
        flow.run(office.wait)
        flow.patched("b")
        if parked == "before it":
            flow.side_effect("park", lambda: 0)  # which leaves the answer as the last thing that is recorded before it
        return [NEXT[what](office, flow), flow.run(office.wait)]

    def without(office: Office, flow: Flow) -> Any:
        flow.run(office.wait)
        if parked == "before it":
            flow.side_effect("park", lambda: 0)
        return [NEXT[what](office, flow), flow.run(office.wait)]

    office = Office(by_hand, with_call)
    run = office.start(2)
    office.deploy(without)
    assert office.result(run)[1] == "waited"


@pytest.mark.parametrize("how", ["sleep", "sleep_until", "await_signal"])
def test_behind_an_answer_that_nobody_asks_for_a_wait_has_its_time(by_hand: Any, how: str) -> None:
    """TIMER-1: a wait on new ground is due when it says, although something recorded stands between."""

    def with_call(office: Office, flow: Flow) -> None:
        flow.patched("a")
        flow.side_effect("stop", lambda: 1 / 0)

    def without(office: Office, flow: Flow) -> None:
        if how == "sleep":
            flow.sleep(60)
        elif how == "sleep_until":
            flow.sleep_until(flow_moment)
        else:
            flow.await_signal("go", wait_seconds=60)

    office = Office(by_hand, with_call)
    now = office.bench.engine.now()
    flow_moment = datetime.fromtimestamp(now / 1000, UTC) + timedelta(seconds=60)
    run = office.start(1)  # the answer is committed before the side effect is called, which fails the run's next walk
    assert office.markers(run) == [(1, "a", True)]
    office.deploy(without)
    office.bench.run()
    assert office.bench.all("SELECT sequence, due_at FROM {waits} WHERE run_id = ?", run) == [(2, now + 60_000)]


def test_behind_an_answer_that_nobody_asks_for_a_step_has_its_arguments_and_its_undo(by_hand: Any) -> None:
    """COMP-2, HISTORY-2: what is put off while replaying is made up for where the new ground begins only behind the answer."""

    def with_call(office: Office, flow: Flow) -> None:
        flow.patched("a")
        flow.side_effect("stop", lambda: 1 / 0)

    def without(office: Office, flow: Flow) -> None:
        flow.action(office.old, 1).compensate_with(office.new, 2).run()

    office = Office(by_hand, with_call)
    run = office.start(1)
    office.deploy(without)
    office.deliver(1)
    assert office.bench.all("SELECT sequence, args, comp_actor, comp_args FROM {action_runs} WHERE run_id = ?", run) == [
        (2, b"[[1],{}]", "new", b"[[2],{}]")
    ]


def test_two_changes_may_be_asked_for_in_another_order_or_one_of_them_alone(by_hand: Any) -> None:
    """HISTORY-2: what is recorded of a change is found wherever it stands."""

    def asks(*ids: str) -> Callable[[Office, Flow], Any]:
        def code(office: Office, flow: Flow) -> Any:
            answers = {change_id: flow.patched(change_id) for change_id in ids}
            flow.run(office.wait)
            return answers

        return code

    office = Office(by_hand, asks("a", "b", "c"))
    for ids in (["a", "b", "c"], ["c", "a", "b"], ["b"], ["c", "b", "a"], ["a", "c"]):
        office.deploy(asks("a", "b", "c"))
        run = office.start(1)
        office.deploy(asks(*ids))
        assert office.result(run) == dict.fromkeys(ids, True)
        assert len(office.markers(run)) == 3


# --- loops and blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", range(6))
def test_in_a_loop_a_run_goes_one_way_in_every_round(by_hand: Any, messages: int) -> None:
    """HISTORY-2: a run in its second round when the code changed goes the old way to the end."""

    def rounds(office: Office, flow: Flow) -> list[str]:
        return [flow.run(office.old, number) for number in range(4)]

    def patched_rounds(office: Office, flow: Flow) -> list[str]:
        return [flow.run(office.new if office.ask(flow, "rounds") else office.old, number) for number in range(4)]

    office = Office(by_hand, rounds)
    run = office.start(messages)
    office.deploy(patched_rounds)
    if messages == 5:
        assert office.result(run) == [f"old {number}" for number in range(4)]
        return
    way = "old" if messages else "new"
    assert office.result(run) == [f"{way} {number}" for number in range(4)]


def test_a_change_of_its_own_for_each_round_lets_later_rounds_go_the_new_way(by_hand: Any) -> None:
    """HISTORY-2: ids are text, so a loop that never ends can be changed while it runs."""

    def patched_rounds(office: Office, flow: Flow) -> list[str]:
        return [flow.run(office.new if flow.patched(f"rounds-{number}") else office.old, number) for number in range(4)]

    office = Office(by_hand, lambda office, flow: [flow.run(office.old, number) for number in range(4)])
    run = office.start(2)
    office.deploy(patched_rounds)
    assert office.result(run) == ["old 0", "old 1", "new 2", "new 3"]


@pytest.mark.parametrize("kind", ["parallel", "saga"])
@pytest.mark.parametrize("started", [True, False])
def test_the_width_of_a_block_can_be_changed(by_hand: Any, kind: str, started: bool) -> None:
    """HISTORY-2, C19: a block that is recorded keeps its members, one that is not has the new ones."""

    def block(office: Office, flow: Flow, members: int) -> Any:
        flow.run(office.wait)
        actors = [office.old] * members
        return len(getattr(flow, kind)(*(flow.action(actor, 1) for actor in actors)).run())

    office = Office(by_hand, lambda office, flow: block(office, flow, 2))
    run = office.start(2 if started else 1)
    office.deploy(lambda office, flow: block(office, flow, 3))
    verdict = verify_run(office.bench.engine, run)
    assert verdict is not None
    assert verdict.fits is not started

    def gated(office: Office, flow: Flow) -> Any:
        flow.run(office.wait)
        members = 3 if flow.patched("wider") else 2
        return len(getattr(flow, kind)(*(flow.action(office.old, 1) for _ in range(members))).run())

    office.deploy(gated)
    assert office.result(run) == (2 if started else 3)


def test_an_old_way_is_recorded_inside_a_group_that_is_under_way(by_hand: Any) -> None:
    """HISTORY-2, COMP-5: the steps of a group are scheduled one by one, so the answer comes to stand between two of them."""

    def group(office: Office, flow: Flow) -> Any:
        members = [flow.action(office.old, number) for number in range(2)]
        wide = flow.parallel(*(flow.action(office.old, number) for number in range(2, 4)))
        return flow.saga(*members, wide).run()

    def gated(office: Office, flow: Flow) -> Any:
        return [office.ask(flow, "a"), group(office, flow), office.ask(flow, "a")]

    office = Office(by_hand, group)
    run = office.start(1)
    office.deploy(gated)
    assert office.result(run) == [False, ["old 0", "old 1", ["old 2", "old 3"]], False]
    assert office.markers(run) == [(3, "a", False)]
    assert office.bench.all("SELECT sequence FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run) == [
        (2,),
        (4,),
        (6,),
        (7,),
    ]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_it_is_refused_inside_the_function_of_a_side_effect(by_hand: Any) -> None:
    """HISTORY-2, SIDE-1: the run is held with an error that says what to do."""
    office = Office(by_hand, lambda office, flow: flow.side_effect("dice", lambda: flow.patched("a")))
    run = office.start(1)
    row = office.bench.one("SELECT status, hold_error FROM {flow_runs} WHERE id = ?", run)
    assert row is not None
    assert row[0] == "waiting"
    assert "side effect 'dice' used the flow: ask the flow before" in row[1]


@pytest.mark.parametrize("change_id", ["", "x" * 500, 7, None, True])
def test_an_id_is_short_text(by_hand: Any, change_id: Any) -> None:
    """HISTORY-2: refused with an error that names it, on new ground and on recorded ground alike."""
    caught: list[Exception] = []

    def code(office: Office, flow: Flow) -> None:
        flow.run(office.wait)
        try:
            flow.patched(change_id)
        except (TypeError, ValueError) as error:
            caught.append(error)
        flow.run(office.wait)

    office = Office(by_hand, code)
    office.result(office.start())
    assert len(caught) == 2
    assert all("a change's id" in str(error) for error in caught)


# --- any change of any workflow --------------------------------------------------------------------------------------

ACTORS = ("a", "b", "c", "d", "old", "new")


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    broker = StubBroker()
    yield {name: dramatiq.actor(lambda *args: None, broker=broker, actor_name=name) for name in ACTORS}
    broker.close()


def snapshot(entries: list[Entry]) -> Snapshot:
    args = freeze(encode([[], {}], "arguments"))
    return Snapshot("r", "w", None, "default", None, None, "running", "none", 1, 2, 1, args, None, 0, entries, {})


def walked(code: Code, entries: list[Entry]) -> tuple[Decision, list[Entry]]:
    """One drive: its decision, and the history that it leaves, with its steps completed."""
    context = Replay(snapshot(entries), now=1, settings=Settings())
    decision = replay(code, context, Flow)
    done = freeze(encode(None, "result"))
    added = [
        StepEntry(entry.sequence, entry.actor, "completed", attempts=1, value=done) if isinstance(entry, StepEntry) else entry
        for entry in context.new_entries
    ]
    assert [entry.sequence for entry in [*entries, *added]] == list(range(1, len(entries) + len(added) + 1))
    return decision, [*entries, *added]


#: A workflow as a list of places: a step, or a place where a change was made (its id).
PLACES = st.lists(st.sampled_from(["a", "b", "c", "d", "1", "2", "3"]), min_size=1, max_size=10)


@given(places=PLACES, releases=st.lists(st.sets(st.sampled_from(["1", "2", "3"])), min_size=1, max_size=5), data=st.data())
def test_no_run_is_held_by_changes_that_are_gated_and_each_answer_stays(
    actors: dict[str, Any], places: list[str], releases: list[set[str]], data: st.DataObject
) -> None:
    """HISTORY-2: releases add gates one after another, in any places and at any moment of a run; nothing ever fails to fit."""
    answers: dict[str, set[bool]] = {}
    known: set[str] = set()
    entries: list[Entry] = []

    def code_of(gates: set[str]) -> Code:
        def code(flow: Flow) -> None:
            for place in places:
                if place in ("a", "b", "c", "d"):
                    flow.run(actors[place])
                elif place in gates:
                    answer = flow.patched(place)
                    answers.setdefault(place, set()).add(answer)
                    flow.run(actors["new"] if answer else actors["old"])
                else:
                    flow.run(actors["old"])

        return code

    for release in releases:
        known |= release
        for _ in range(data.draw(st.integers(0, 4))):
            decision, entries = walked(code_of(known), entries)
            if decision.kind != "suspended":
                break
    while True:
        decision, entries = walked(code_of(known), entries)
        if decision.kind != "suspended":
            break
    assert decision.kind == "completed"
    assert all(len(given) == 1 for given in answers.values()), answers
    recorded = {entry.name: entry.value for entry in entries if isinstance(entry, PatchEntry)}
    assert all(answers[name] == {value} for name, value in recorded.items())


# --- on every store, and the version ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb", "redis"])
def test_old_runs_and_new_ones_side_by_side(kind: str, applications: Applications) -> None:
    """HISTORY-2: with real workers, messages and stores; the version is that of the code that started the run."""
    app = applications(kind)
    old, new, last = app.step("old", gives="old"), app.step("new", gives="new"), app.step("last", queue_name=app.queue + "x")

    @app.workflow(version="1")
    def order(flow: Flow) -> Any:
        done = flow.run(old)
        flow.run(last)
        return [done, flow.version]

    def release(flow: Flow) -> Any:
        done = flow.run(new if flow.patched("new") else old)
        flow.run(last)
        return [done, flow.version, flow.patched("new")]

    first = order.send()
    app.start(queues={app.queue})
    eventually(lambda: len(first.actions()) == 2, because="the first run is parked")
    app.stop()
    deploy(app.engine, "order", release)
    second = order.send_with_options(version="2")
    app.start()
    assert app.ended(first) == app.ended(second) == "completed"
    assert first.result() == ["old", "1", False]
    assert second.result() == ["new", "2", True]


def test_a_run_keeps_the_version_that_it_was_started_with(lite: Application) -> None:
    """HISTORY-2: a later release declares another version; the run, and what looks at it, has its own."""

    @lite.workflow(version="1")
    def order(flow: Flow) -> Any:
        return flow.version

    first, second = order.send_with_options(version="beta"), order.send()
    order.version = "2"
    third = order.send()
    with lite.working():
        for run in (first, second, third):
            lite.ended(run)
    assert [run.result() for run in (first, second, third)] == ["beta", "1", "2"]
    with pytest.raises(TypeError, match="a version"):
        order.send_with_options(version=2)
    with pytest.raises(ValueError, match="a version"):
        order.send_with_options(version="x" * 65)
