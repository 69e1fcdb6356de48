"""Sweeps make progress whatever a workflow function does: one that does not come back, and one that takes its process with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from dramatiq.middleware import Shutdown

from dramatiq_saga import Flow, FlowHandle, workflow
from dramatiq_saga.engine import lookout
from dramatiq_saga.engine.lookout import Call
from dramatiq_saga.recovery import monitor as module
from dramatiq_saga.recovery import patience
from dramatiq_saga.recovery.monitor import MonitorReport, monitor
from dramatiq_saga.recovery.patience import Patience
from tests.support.waiting import eventually
from tests.support.workbench import MakeBench, Workbench


class Stall:
    """Where a workflow function does not come back from, until it is let go."""

    def __init__(self) -> None:
        self.on = threading.Event()
        self.inside = threading.Semaphore(0)
        self.over = threading.Event()

    def __call__(self) -> None:
        if self.on.is_set():
            self.inside.release()
            assert self.over.wait(timeout=60)

    def wait(self, futures: list[Any], timeout: float) -> None:
        """Instead of the clock: patience ends once the function is known to be inside."""
        assert timeout == patience.PATIENCE
        eventually(lambda: futures[0].done() or self.inside.acquire(blocking=False))


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    found = Stall()
    monkeypatch.setattr(patience, "wait", found.wait)
    monkeypatch.setattr(Call, "age", lambda call: lookout.HUNG if call.workflow == "bad" and found.on.is_set() else 0.0)
    yield found
    found.over.set()


@pytest.fixture(params=["joined", "another broker"])
def desk(request: pytest.FixtureRequest, make_bench: MakeBench) -> Workbench:
    return make_bench(joins=request.param == "joined")


def start(desk: Workbench, stall: Stall, name: str, **options: Any) -> list[FlowHandle[Any]]:
    """Three runs, the first the longest due, whose step has completed and whose drive was lost."""

    @workflow(name=name, broker=desk.broker)
    def waits(flow: Flow, traveller: str) -> Any:
        stall()
        flow.action(desk.actors["book_hotel"], traveller).compensate_with(
            lambda made: desk.actors["cancel_hotel"].message(made["by"])
        ).run()
        return flow.await_signal("never")

    found = []
    for _ in range(3):
        run = waits.send_with_options(args=("ada",), **options)
        desk.drive(run)
        desk.write(
            "UPDATE {action_runs} SET status = 'completed', attempts = 1, started_at = 1, ended_at = 1, result = ? WHERE run_id = ?",
            b'{"by":"book_hotel"}', run.id,
        )  # fmt: skip
        desk.engine.cache.drop(run.id)
        desk.advance(1)
        found.append(run)
    desk.lose_messages()
    return found


def hold(desk: Workbench, runs: list[FlowHandle[Any]]) -> None:
    for run in runs:
        desk.write(
            "UPDATE {flow_runs} SET wakes = wakes + 1, woken_at = ?, hold_until = ?, hold_count = 1 WHERE id = ?",
            desk.clock.now(), desk.clock.now() + 60_000, run.id,
        )  # fmt: skip
        desk.advance(1)
    desk.advance(60)


def look(desk: Workbench) -> MonitorReport:
    return monitor(desk.engine, desk.sender)


def counts(desk: Workbench, runs: list[FlowHandle[Any]], column: str) -> list[int]:
    return [desk.run_row(run, column)[0] for run in runs]


def test_a_held_run_whose_function_does_not_come_back_holds_up_no_other(desk: Workbench, stall: Stall) -> None:
    """HISTORY-1, LOOP-1: it is held again, with that as its error; its like are sent to workers, and what is known to work is driven."""
    bad = start(desk, stall, "bad")
    good = start(desk, Stall(), "good")
    hold(desk, [*bad, *good])
    stall.on.set()
    report = look(desk)
    assert (report.held_again, report.sent, report.resumed, report.errors) == (1, 2, 3, 0)
    assert counts(desk, bad, "hold_count") == [2, 1, 1]
    assert counts(desk, good, "hold_count") == [0, 0, 0]
    assert "did not come back within 60 seconds" in str(desk.run_row(bad[0], "hold_error")[0])
    assert desk.asked() == [("drive", None), ("drive", None)]
    assert desk.engine.lookout.busy() == {"bad"}


def test_an_overdue_run_whose_function_does_not_come_back_holds_up_no_other(
    desk: Workbench, stall: Stall, journal: list[dict[str, Any]]
) -> None:
    """EXPIRE-2, LOOP-1: it counts as one that cannot be expired, its like are sent to workers, and the others expire."""
    bad = start(desk, stall, "bad", expires_in=60)
    good = start(desk, Stall(), "good", expires_in=60)
    desk.advance(120)
    stall.on.set()
    report = look(desk)
    assert (report.expiry_failed, report.sent, report.expired_runs, report.errors) == (1, 2, 3, 0)
    assert [run.status for run in bad] == ["running"] * 3
    assert [kind for kind, _ in desk.asked()].count("timer") == 2, "one for each of the other two"
    assert counts(desk, bad, "expiry_attempts") == [1, 0, 0]
    assert [run.status for run in good] == ["rolling_back"] * 3
    (line,) = [line for line in journal if line["event"] == "expiry_failed"]
    assert "WorkflowStalledError" in str(line)

    report = look(desk)
    assert (report.expiry_failed, report.sent, report.skipped) == (0, 0, 0), "each has its message, for a minute"
    desk.advance(60)
    report = look(desk)
    assert (report.expiry_failed, report.sent) == (0, 3)


def test_what_a_stalled_function_comes_back_with_is_a_drive_like_any_other(desk: Workbench, stall: Stall) -> None:
    """DRIVE-1: the thread that was left behind goes on, and its workflow is driven in sweeps again."""
    bad = start(desk, stall, "bad", expires_in=60)
    desk.advance(120)
    stall.on.set()
    look(desk)
    stall.on.clear()
    stall.over.set()
    desk.work_until(lambda: bad[0].status == "expired")
    eventually(lambda: not desk.engine.lookout.calls())
    assert desk.done.count(("cancel_hotel", ("book_hotel",))) >= 1
    desk.advance(60)
    look(desk)
    desk.work_until(lambda: all(run.status == "expired" for run in bad))
    assert desk.done.count(("cancel_hotel", ("book_hotel",))) == 3, "each is undone once"


@pytest.mark.parametrize("overdue", [True, False])
def test_a_sweep_that_is_killed_in_a_workflow_function_leaves_the_others_to_the_next(
    desk: Workbench, monkeypatch: pytest.MonkeyPatch, overdue: bool
) -> None:
    """LOOP-1, EXPIRE-2: the window is moved before the function is called, so the next sweep does not die of the same run."""
    runs = start(desk, Stall(), "deadly", **({"expires_in": 60} if overdue else {}))
    if overdue:
        desk.advance(120)
    else:
        hold(desk, runs)

    survived = 0

    class Killed(BaseException):
        pass

    def killed(self: Patience, name: str, run_id: str, do: Any) -> Any:
        function = desk.engine.workflows[name]
        with monkeypatch.context() as patched:
            patched.setitem(desk.engine.workflows, name, _dying(function, Killed))
            return do()

    monkeypatch.setattr(module.Patience, "call", killed)
    for _ in runs:
        with pytest.raises(Killed):
            look(desk)
    look(desk)  # none is left
    for _ in range(60 if overdue else 0):  # once a minute: they die of it ever less often, and all else has its turn between
        desk.advance(60)
        with suppress(Killed):
            look(desk)
            survived += 1
    assert survived >= (36 if overdue else 0)
    assert [run.status for run in runs] == ["running"] * 3
    monkeypatch.undo()
    desk.advance(3600)
    report = look(desk)
    assert (report.expired_runs, report.resumed) == ((3, 0) if overdue else (0, 3))


def _dying(definition: Any, error: type[BaseException]) -> Any:
    def dies(*_: Any) -> Any:
        raise error

    return type(definition)(
        **{field: getattr(definition, field) for field in definition.__dataclass_fields__} | {"function": dies}
    )


def test_a_thread_of_a_sweep_ends_with_its_pass(desk: Workbench, stall: Stall) -> None:
    """A pass leaves no thread behind, nor a connection of one, unless a function keeps it."""
    hold(desk, start(desk, stall, "good"))
    assert look(desk).resumed == 3
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "saga-sweep-drives"])
    assert desk.engine.lookout.calls() == []


def test_in_a_transaction_of_the_callers_a_sweep_stays_on_its_thread(make_bench: MakeBench, stall: Stall) -> None:
    """HOST-1: another thread would wait for the locks of this one."""
    desk = make_bench()
    hold(desk, start(desk, stall, "good"))
    with desk.engine.store.database.atomic():
        assert look(desk).resumed == 3


@pytest.mark.parametrize("overdue", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Shutdown, GeneratorExit, type("Odd", (BaseException,), {})])
def test_whatever_a_function_raises_the_sweep_goes_on(
    desk: Workbench, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], overdue: bool
) -> None:
    """LOOP-1: nobody has interrupted the sweep; the run is held off, and the next one follows."""
    bad = start(desk, Stall(), "bad", **({"expires_in": 60} if overdue else {}))
    good = start(desk, Stall(), "good", **({"expires_in": 60} if overdue else {}))
    if overdue:
        desk.advance(120)
    else:
        hold(desk, [*bad, *good])
    monkeypatch.setitem(desk.engine.workflows, "bad", _dying(desk.engine.workflows["bad"], error))
    report = look(desk)
    assert report.errors == 0
    assert (report.expiry_failed, report.expired_runs) == (3, 3) if overdue else (report.held_again, report.resumed) == (3, 3)


@pytest.mark.parametrize("overdue", [True, False])
def test_messages_for_what_only_another_process_can_drive_become_ever_fewer(make_bench: MakeBench, overdue: bool) -> None:
    """LOOP-1: sweeps twice a minute for eight hours, and nobody takes the messages."""
    desk = make_bench()
    runs = start(desk, Stall(), "elsewhere", **({"expires_in": 60} if overdue else {}))[:1]
    if not overdue:
        hold(desk, runs)
    del desk.engine.workflows["elsewhere"]
    for _ in range(960):
        desk.advance(30)
        look(desk)
    assert 5 < len(desk.asked()) < 60  # of three runs or one
