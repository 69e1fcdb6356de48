"""Saga groups: steps that run one after another and are undone by rules of their own (COMP-4, COMP-5, COMP-10, C26)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowFailedError, Settings, current_step
from dramatiq_saga.cli.show import lines_of
from dramatiq_saga.errors import StepFailedError
from dramatiq_saga.operations import Operator
from tests.conformance.engine.test_history import hold_error
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def undos(handle: Any) -> list[tuple[int, int, str, str]]:
    """Sequence, level, status, and what of the step is undone."""
    return [(undo.sequence, undo.level, undo.status, undo.undoes) for undo in handle.compensations()]


def sagas(**values: Any) -> Settings:
    return Settings.from_mapping({"sagas": values})


class Side:
    """An undo that ends only once all the others of its level have begun: they are really undone side by side."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def meet(self) -> None:
        self._barrier.wait(20)


# --- running a group -------------------------------------------------------------------------------------------------


def test_a_group_runs_its_steps_one_after_another_and_gives_their_results_in_order(app: Application) -> None:
    """API: ``saga(*builders).run()``; the workflow goes on with a list."""
    one, two, three = (app.step(name, gives=name) for name in ("one", "two", "three"))

    @app.workflow
    def trip(flow: Flow) -> list[str]:
        return list(flow.saga(flow.action(one), flow.action(two), flow.action(three)).run())

    handle = app.run(trip)
    assert handle.result() == ["one", "two", "three"]
    assert app.calls == [("one",), ("two",), ("three",)]
    assert [step.sequence for step in handle.actions()] == [2, 3, 4]


def test_a_step_of_a_group_that_fails_keeps_those_after_it_from_starting(lite: Application) -> None:
    """DRIVE-5: its error is the group's, and a workflow may catch it."""
    fine, bad, never = lite.step("fine"), lite.step("bad", raises=ValueError("sold out")), lite.step("never")

    @lite.workflow
    def trip(flow: Flow) -> str:
        try:
            flow.saga(flow.action(fine), flow.action(bad), flow.action(never)).run()
        except StepFailedError as error:
            return error.message
        return "all of it"

    assert lite.run(trip).result() == "sold out"
    assert lite.calls == [("fine",), ("bad",)]


def test_an_empty_group_is_done_at_once(lite: Application) -> None:
    @lite.workflow
    def trip(flow: Flow) -> list[Any]:
        return list(flow.saga().run())

    assert lite.run(trip).result() == []


def test_an_optional_step_of_a_group_that_fails_gives_its_fallback(lite: Application) -> None:
    """OPT-1: and with the group's word it is undone all the same, since nobody knows what it has left behind (COMP-5)."""
    fine, bad, undo = lite.step("fine", gives=1), lite.step("bad", raises=ValueError("no")), lite.step("undo")

    @lite.workflow
    def trip(flow: Flow) -> None:
        found = (
            flow.saga(
                flow.action(bad).compensate_with(undo, "bad").fallback_value_on_fail("nothing"),
                flow.action(fine).compensate_with(undo, "fine"),
            )
            .compensate_step_on_self_failure()
            .run()
        )
        lite.calls.append(found)
        flow.run(bad)

    handle = lite.run(trip)
    lite.drain()
    assert ["nothing", 1] in lite.calls
    assert undos(handle) == [(3, 0, "completed", "completed"), (2, 1, "completed", "failed")]


# --- COMP-5: undone side by side -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
def test_a_group_is_one_level_where_it_says_so(app: Application, parallel: bool) -> None:
    """COMP-5, COMP-1: with two undos that wait for each other; what stands before the group is undone after all of it."""
    side = Side(2 if parallel else 1)
    step, bad = app.step("step"), app.step("bad", raises=ValueError("no cars left"))
    first = app.step("undo_first")

    @app.actor(actor_name="undo")
    def undo(number: int) -> None:
        side.meet()
        app.calls.append(("undo", number))

    @app.workflow
    def trip(flow: Flow) -> None:
        flow.action(step).compensate_with(first).run()
        group = flow.saga(flow.action(step).compensate_with(undo, 1), flow.action(step).compensate_with(undo, 2))
        (group.compensate_in_parallel() if parallel else group).run()
        flow.run(bad)

    handle = app.run(trip)
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "done")
    expected = [(4, 0), (3, 0), (1, 1)] if parallel else [(4, 0), (3, 1), (1, 2)]
    assert undos(handle) == [(sequence, level, "completed", "completed") for sequence, level in expected]
    undone = [call for call in app.calls if call[0].startswith("undo")]
    assert undone[-1] == ("undo_first",)
    assert sorted(undone[:-1]) == [("undo", 1), ("undo", 2)]
    if not parallel:
        assert undone[:-1] == [("undo", 2), ("undo", 1)]
    eventually(lambda: app.messages() == 0, because="the callback of the level is used up too")


@pytest.mark.parametrize(
    ("setting", "own", "expected"), [(True, None, 1), (True, False, 2), (False, True, 1), (False, None, 2)]
)
def test_the_groups_own_word_about_parallel_undo_counts_before_the_settings(
    applications: Applications, setting: bool, own: bool | None, expected: int
) -> None:
    """COMP-5: ``sagas.parallel_compensation`` is what a group does that does not say; steps outside of groups are not touched."""
    app = applications("sqlite", settings=sagas(parallel_compensation=setting))
    step, undo, bad = app.step("step"), app.step("undo"), app.step("bad", raises=ValueError("no"))

    @app.workflow
    def trip(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.action(step).compensate_with(undo).run()
        group = flow.saga(flow.action(step).compensate_with(undo), flow.action(step).compensate_with(undo))
        (group if own is None else group.compensate_in_parallel(own)).run()
        flow.run(bad)

    handle = trip.run_sync()
    levels = [undo.level for undo in handle.compensations()]
    assert len(set(levels[:2])) == expected
    assert len(set(levels[2:])) == 2
    assert handle.rollback == "done"


def test_two_groups_are_two_levels(lite: Application) -> None:
    """COMP-5: side by side within a group, one group after the other."""
    step, undo, bad = lite.step("step"), lite.step("undo"), lite.step("bad", raises=ValueError("no"))

    @lite.workflow
    def trip(flow: Flow) -> None:
        for _ in range(2):
            flow.saga(
                flow.action(step).compensate_with(undo), flow.action(step), flow.action(step).compensate_with(undo)
            ).compensate_in_parallel().run()
        flow.run(bad)

    handle = lite.run(trip)
    lite.drain()
    assert [(sequence, level) for sequence, level, *_ in undos(handle)] == [(8, 0), (6, 0), (4, 1), (2, 1)]


def test_a_parallel_block_in_a_group_belongs_to_it(lite: Application) -> None:
    """COMP-5: its members are undone like any others, here all in the one level of the group."""
    step, undo, bad = lite.step("step", gives=1), lite.step("undo"), lite.step("bad", raises=ValueError("no"))

    @lite.workflow
    def trip(flow: Flow) -> None:
        lite.calls.append(
            flow.saga(
                flow.action(step).compensate_with(undo),
                flow.parallel(flow.action(step).compensate_with(undo), flow.action(step).compensate_with(undo)),
            )
            .compensate_in_parallel()
            .run()
        )
        flow.run(bad)

    handle = lite.run(trip)
    lite.drain()
    assert [1, [1, 1]] in lite.calls
    assert undos(handle) == [(sequence, 0, "completed", "completed") for sequence in (5, 4, 2)]


def test_a_child_of_a_group_is_undone_in_its_level_and_its_undo_is_told_the_childs_run(app: Application) -> None:
    """COMP-5, COMP-7, CHILD-3: a completed child is undone like a step; what identifies it is its run."""
    side = Side(2)
    step, bad = app.step("step"), app.step("bad", raises=ValueError("no"))

    @app.actor(actor_name="undo")
    def undo() -> None:
        side.meet()
        step = current_step()
        assert step is not None
        assert step.undoes is not None
        app.calls.append(("undo", step.undoes.sequence, step.undoes.actor, step.undoes.outcome, step.undoes.idempotency_key))

    @app.workflow
    def shipment(flow: Flow) -> str:
        flow.run(step)
        return "parcel"

    @app.workflow
    def trip(flow: Flow) -> None:
        flow.saga(
            flow.action(step).compensate_with(undo), flow.child(shipment).compensate_with(lambda parcel: undo.message())
        ).compensate_in_parallel().run()
        flow.run(bad)

    handle = app.run(trip)
    assert undos(handle) == [(3, 0, "completed", "completed"), (2, 0, "completed", "completed")]
    (child,) = handle.children()
    assert sorted(call[1:] for call in app.calls if call[0] == "undo") == [
        (2, "step", "completed", f"{handle.id}:2:0"), (3, "shipment", "completed", child.child_id),
    ]  # fmt: skip
    shown = "\n".join(lines_of(Operator.on_broker(app.broker).show_run(handle.id), app.engine.now()))
    assert shown.count("undo by undo, side by side with that of step ") == 2


def test_show_tells_which_undos_share_a_level(lite: Application) -> None:
    """COMP-5, COMP-6: beside the steps that they undo; for machines as well."""
    step, undo, bad = lite.step("step"), lite.step("undo"), lite.step("bad", raises=ValueError("no"))

    @lite.workflow
    def trip(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.saga(*(flow.action(step).compensate_with(undo) for _ in range(3))).compensate_in_parallel().run()
        flow.run(bad)

    handle = lite.run(trip)
    lite.drain()
    report = Operator.on_broker(lite.broker).show_run(handle.id)
    shown = "\n".join(lines_of(report, lite.engine.now()))
    assert "      undo by undo, side by side with that of steps 4, 5: completed at " in shown
    assert shown.count("side by side") == 3
    compensations = [step["compensation"] for step in report.as_dict()["steps"][:4]]
    assert [(one["level"], one["beside"]) for one in compensations] == [(1, []), (0, [4, 5]), (0, [3, 5]), (0, [3, 4])]


# --- COMP-4, COMP-5: whose word counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "group", "step", "expected"),
    [
        ("stop", None, None, "halted"),
        ("continue", None, None, "done"),
        ("continue", "stop", None, "halted"),
        ("stop", "continue", None, "done"),
        ("continue", "continue", "stop", "halted"),
        ("stop", "stop", "continue", "done"),
    ],
)
def test_a_failing_undo_asks_its_step_then_its_group_then_the_settings(
    applications: Applications, setting: str, group: str | None, step: str | None, expected: str
) -> None:
    """COMP-4: step > group > settings."""
    app = applications("sqlite", settings=sagas(default_compensation_failure_policy=setting))
    work, undo = app.step("work"), app.step("undo")
    broken, bad = app.step("broken", raises=OSError("no line")), app.step("bad", raises=ValueError("no"))

    @app.workflow
    def trip(flow: Flow) -> None:
        member = flow.action(work).compensate_with(broken)
        if step is not None:
            member = member.on_compensation_failure(step)
        of = flow.saga(flow.action(work).compensate_with(undo), member)
        (of if group is None else of.on_compensation_failure(group)).run()
        flow.run(bad)

    handle = trip.run_sync()
    assert (handle.status, handle.rollback) == ("failed", expected)
    assert app.calls.count(("undo",)) == (expected == "done")


@pytest.mark.parametrize(
    ("setting", "group", "step", "expected"),
    [
        (False, None, None, False),
        (True, None, None, True),
        (True, False, None, False),
        (False, True, None, True),
        (True, True, False, False),
        (False, False, True, True),
    ],
)
def test_a_step_that_failed_is_undone_if_it_or_its_group_or_the_settings_say_so(
    applications: Applications, setting: bool, group: bool | None, step: bool | None, expected: bool
) -> None:
    """COMP-5: the same order; ``sagas.compensate_failed_step`` comes last."""
    app = applications("sqlite", settings=sagas(compensate_failed_step=setting))
    undo, bad = app.step("undo"), app.step("bad", raises=ValueError("no"))

    @app.workflow
    def trip(flow: Flow) -> None:
        member = flow.action(bad).compensate_with(undo)
        if step is not None:
            member = member.compensate_step_on_self_failure(step)
        of = flow.saga(member)
        (of if group is None else of.compensate_step_on_self_failure(group)).run()

    handle = trip.run_sync()
    assert undos(handle) == ([(2, 0, "completed", "failed")] if expected else [])
    with pytest.raises(FlowFailedError, match="no"):
        handle.result()


def test_a_step_that_failed_shares_the_level_of_its_group(app: Application) -> None:
    """COMP-5: both words of the group together."""
    side = Side(2)
    step, bad = app.step("step"), app.step("bad", raises=ValueError("no"))

    @app.actor(actor_name="undo")
    def undo(number: int) -> None:
        side.meet()

    @app.workflow
    def trip(flow: Flow) -> None:
        flow.saga(
            flow.action(step).compensate_with(undo, 1), flow.action(bad).compensate_with(undo, 2)
        ).compensate_in_parallel().compensate_step_on_self_failure().run()

    handle = app.run(trip)
    assert undos(handle) == [(3, 0, "completed", "failed"), (2, 0, "completed", "completed")]


# --- what cannot be meant --------------------------------------------------------------------------------------------


def refused(app: Application, build: Any) -> str:
    """What a workflow that builds its group so fails with; nothing of it runs."""

    @app.workflow(name=f"refused_{len(app.engine.workflows)}")
    def trip(flow: Flow) -> None:
        build(flow)

    handle = trip.run_sync()
    assert (handle.status, app.calls) == ("failed", [])
    error = app.sql("SELECT error FROM {flow_runs} WHERE id = ?", handle.id)[0][0]
    assert "TypeError" in error or "ValueError" in error
    return str(error)


def test_a_group_that_undoes_its_failed_step_refuses_an_undo_built_from_a_result(lite: Application) -> None:
    """COMP-10, C26: there would be no result; a step that says no for itself is taken."""
    step, undo = lite.step("step"), lite.step("undo")

    def build(flow: Flow) -> None:
        flow.saga(
            flow.action(step).compensate_with(lambda made: undo.message(made)), flow.action(step).compensate_with(undo)
        ).compensate_step_on_self_failure().run()

    assert "builds its compensation from its result, and has none when it fails" in refused(lite, build)

    def inside(flow: Flow) -> None:
        flow.saga(
            flow.parallel(flow.action(step).compensate_with(lambda made: undo.message(made)))
        ).compensate_step_on_self_failure().run()

    assert "builds its compensation from its result" in refused(lite, inside)

    @lite.workflow
    def fine(flow: Flow) -> None:
        own = flow.action(step).compensate_with(lambda made: undo.message(made)).compensate_step_on_self_failure(False)
        flow.saga(own).compensate_step_on_self_failure().run()

    assert fine.run_sync().status == "completed"


@pytest.mark.parametrize(
    ("say", "name"),
    [
        (lambda b: b.on_compensation_failure("continue"), "on_compensation_failure"),
        (lambda b: b.compensate_step_on_self_failure(), "compensate_step_on_self_failure"),
        (lambda b: b.reclaim_compensation_stale_after(60), "reclaim_compensation_stale_after"),
    ],
)
def test_a_word_about_an_undo_that_there_is_not_is_refused(lite: Application, say: Any, name: str) -> None:
    """C26: option pairs without a meaning are refused where they are declared."""
    step = lite.step("step")
    assert f"{name}() without compensate_with()" in refused(lite, lambda flow: say(flow.action(step)).run())


@pytest.mark.parametrize("inside", ["saga", "parallel"])
def test_a_group_is_no_member_of_a_block(lite: Application, inside: str) -> None:
    """API: its steps run one after another; the error says what to write instead."""
    step = lite.step("step")
    error = refused(lite, lambda flow: getattr(flow, inside)(flow.saga(flow.action(step))).run())
    assert "does not take a saga() group" in error


def test_members_are_builders_and_belong_to_one_group(lite: Application) -> None:
    step = lite.step("step")
    assert "takes builders" in refused(lite, lambda flow: flow.saga(step).run())

    def twice(flow: Flow) -> None:
        member = flow.action(step)
        flow.saga(member, member).run()

    assert "belongs to another block" in refused(lite, twice)
    assert "perhaps" in refused(lite, lambda flow: flow.saga(flow.action(step)).on_compensation_failure("perhaps").run())


def test_a_group_that_is_not_run_is_told(lite: Application) -> None:
    """BuilderNotRunError: the run is held, not failed."""
    step = lite.step("step")

    @lite.workflow
    def trip(flow: Flow) -> None:
        flow.saga(flow.action(step)).compensate_in_parallel()

    handle = trip.send()
    with lite.working():
        error = hold_error(lite, handle)
    assert error["type"].endswith("BuilderNotRunError")
    assert "flow.saga() of 1 was built but never run" in error["message"]


def test_a_group_of_another_size_does_not_fit_a_history(lite: Application) -> None:
    """HISTORY-1, C19: the run is held, with both sizes named."""
    step, later = lite.step("step"), lite.step("later", queue_name=lite.queue + "x")
    size = [2]

    @lite.workflow
    def trip(flow: Flow) -> None:
        flow.saga(*(flow.action(step) for _ in range(size[0]))).run()
        flow.run(later)

    handle = trip.send()
    with lite.working(queues={lite.queue}):
        eventually(lambda: len(handle.actions()) == 3, because="the group is done")
    size[0] = 3  # a deploy
    with lite.working():
        error = hold_error(lite, handle)
    assert error["type"].endswith("HistoryMismatchError")
    assert "saga group of 2" in error["message"]
    assert "saga group of 3" in error["message"]
