"""Handles and searches by themselves: paging, ties, equality, waiting (API "FlowHandle", ``query()``)."""

from __future__ import annotations

import sys
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dramatiq_saga import Flow, FlowFailedError, FlowHandle, ResultTimeout, get_flow, query
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


@pytest.fixture
def app(applications: Applications) -> Application:
    return applications("sqlite")


def runs(app: Application, number: int, *, name: str = "w", moment: int | None = None, **columns: Any) -> list[str]:
    """Runs that stand in the table without having been started."""
    made = []
    for n in range(number):
        run_id = f"{name}-{n:04}"
        created = moment if moment is not None else 1_000_000 + n
        app.execute(
            "INSERT INTO {flow_runs} (id, workflow, queue, args, args_digest, status, rollback, revision, wakes, wakes_seen, "
            "hold_count, expiry_attempts, repair_attempts, created_at) VALUES (?, ?, 'q', ?, '', 'pending', 'none', 0, 0, 0, 0, 0, 0, ?)",
            run_id, name, b"[[],{}]", created,
        )  # fmt: skip
        made.append(run_id)
    return made


@pytest.mark.parametrize("moment", [None, 5_000], ids=["one after another", "all in one millisecond"])
@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_paging_neither_loses_nor_repeats_a_run(
    app: Application, monkeypatch: pytest.MonkeyPatch, order: str, moment: int | None
) -> None:
    """API query(): more runs than a page, and ties that fall on its edge."""
    monkeypatch.setattr(sys.modules["dramatiq_saga.query"], "PAGE", 7)
    app.workflow(lambda flow: None, name="w")
    ids = runs(app, 23, moment=moment)
    expected = ids if order == "oldest" else ids[::-1]
    for limit in (None, 1, 6, 7, 8, 14, 23, 99):
        assert [handle.id for handle in query(order=order, limit=limit)] == expected[:limit]


def test_a_search_is_narrowed_without_changing_the_wider_one(app: Application) -> None:
    """API FlowQuery.where(): conditions add up; tags all have to match."""
    app.workflow(lambda flow: None, name="w")
    runs(app, 3)
    handle = get_flow("w-0001")
    handle.tag("a", 1)
    handle.tag("b", 2)
    get_flow("w-0000").tag("a", 1)
    wide = query(tags={"a": 1})
    narrow = wide.where(tags={"b": 2})
    assert (wide.count(), narrow.count()) == (2, 1)
    assert narrow.first() == handle
    assert wide.where(status="completed").count() == 0
    assert wide.where(workflow="other").first() is None


def test_narrowing_keeps_every_condition_that_was_there(app: Application) -> None:
    """API where(): the new beside the old; what excludes each other finds nothing."""
    one, two = (app.workflow(lambda flow: None, name=name) for name in ("one", "two"))
    runs = [
        one.send_with_options(tags={"n": "1"}),
        two.send_with_options(tags={"n": "2"}),
        one.send_with_options(tags={"n": "3"}),
    ]
    runs[0].cancel()
    everything = query(broker=app.broker)
    assert everything.where(status="pending").count() == 2
    assert everything.where(status=["pending", "cancelled"]).where(status=["cancelled", "failed"]).first() == runs[0]
    assert everything.where(status="pending").where(status="cancelled").count() == 0
    assert list(everything.where(workflow=one).where(workflow="two")) == []
    assert everything.where(workflow="one").where(workflow=one).count() == 2
    assert list(everything.where(tags={"n": 1}).where(tags={"n": 2})) == []
    assert everything.where(signalable=True).where(signalable=False).first() is None
    assert len(list(everything.where(limit=1).where(limit=5))) == 1
    moments = [datetime.fromtimestamp(number, UTC) for number in (1, 2, 3)]
    narrow = everything.where(before=moments[2], after=moments[0]).where(before=moments[1]).where(after=moments[1])
    assert (narrow.before, narrow.after) == (2000, 2000)
    assert everything.count() == 3


def test_runs_are_found_by_the_signal_that_a_step_of_theirs_is_parked_for(app: Application) -> None:
    """RSIG-1, API awaiting_retry_signal: every one of them, by name; a wait of another kind is none."""
    charge = app.step("charge", raises=ValueError("declined"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(charge).retry_on_signal("top-up").run()

    @app.workflow
    def approve(flow: Flow) -> None:
        flow.await_signal("top-up")

    app.start()
    parked, waits = order.send(), approve.send()
    eventually(lambda: parked.status == "waiting" and waits.status == "waiting")
    assert list(query(awaiting_retry_signal="top-up", broker=app.broker)) == [parked]
    assert list(query(awaiting_signal="top-up", broker=app.broker)) == [waits]
    assert query(awaiting_retry_signal="another", broker=app.broker).count() == 0
    assert query(awaiting_retry_signal="top-up", broker=app.broker).where(awaiting_signal="top-up").count() == 0
    parked.cancel()
    assert query(awaiting_retry_signal="top-up", broker=app.broker).first() is None
    with pytest.raises(TypeError, match="a signal's name is text"):
        query(awaiting_retry_signal=3, broker=app.broker)  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", ["awaiting_signal", "awaiting_retry_signal"])
def test_a_search_for_who_waits_does_not_look_at_finished_runs(applications: Applications, condition: str) -> None:
    """C56: open waits by their name, live runs by theirs; what has ended costs nothing."""
    app = applications("sqlite")
    where, parameters = query(broker=app.broker, **{condition: "top-up"})._where()
    plan = [row[3] for row in app.sql(f"EXPLAIN QUERY PLAN SELECT r.id FROM {{flow_runs}} r WHERE {where}", *parameters)]
    assert any("saga_wait_name" in step for step in plan), plan
    assert not any(step == "SCAN r" for step in plan), plan


def test_moments_bound_a_search(app: Application) -> None:
    """API query(before, after): after is included, before is not; naive moments are refused."""
    app.workflow(lambda flow: None, name="w")
    runs(app, 5)
    start = datetime(1970, 1, 1, 0, 16, 40, tzinfo=UTC)  # 1,000,000 ms
    third = start + timedelta(milliseconds=2)
    assert [handle.id for handle in query(after=third, order="oldest")] == ["w-0002", "w-0003", "w-0004"]
    assert [handle.id for handle in query(before=third, order="oldest")] == ["w-0000", "w-0001"]
    with pytest.raises(ValueError, match="time zone"):
        query(after=third.replace(tzinfo=None))


def test_handles_are_equal_when_they_stand_for_one_run(app: Application) -> None:
    """API FlowHandle: in sets and comparisons."""
    app.workflow(lambda flow: None, name="w")
    runs(app, 2)
    one, again, other = get_flow("w-0000"), get_flow("w-0000"), get_flow("w-0001")
    assert one == again
    assert one != other
    assert one != "w-0000"
    assert len({one, again, other}) == 2
    assert repr(one) == "FlowHandle('w-0000', workflow_name='w')"


def test_waiting_ends_with_the_run(app: Application) -> None:
    """API FlowHandle.result(wait=…): the result as soon as it is there, the error as soon as there is one."""
    gate = threading.Event()

    @app.actor
    def held() -> str:
        assert gate.wait(20)
        return "done"

    @app.workflow
    def good(flow: Flow) -> str:
        return flow.run(held)

    @app.workflow
    def bad(flow: Flow) -> None:
        raise ValueError("no")

    handle: FlowHandle[str] = good.send()
    app.start()
    with pytest.raises(ResultTimeout):
        handle.result(wait=0.01)
    gate.set()
    assert handle.result(wait=timedelta(seconds=20)) == "done"
    assert handle.result() == "done"
    with pytest.raises(FlowFailedError, match="no"):
        bad.send().result(wait=20)


def test_a_result_is_given_out_afresh(app: Application) -> None:
    """CODEC-4: what one caller changes, another does not see."""

    @app.workflow
    def one(flow: Flow) -> dict[str, list[int]]:
        return {"a": [1]}

    handle = one.run_sync()
    handle.result()["a"].append(2)
    assert handle.result() == {"a": [1]}


def test_views_are_decoded_when_they_are_asked_for(app: Application) -> None:
    """API FlowHandle: rows oldest first, with values, errors and keys."""
    step, bad, undo = app.step("step", gives=[1]), app.step("bad", raises=ValueError("no")), app.step("undo")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.action(step, 1).compensate_with(undo, "x", 2).run()
        flow.run(bad)

    handle = one.run_sync()
    first, second = handle.actions()
    assert (first.args, first.kwargs, first.result, first.error) == ([1], {}, [1], None)
    assert first.idempotency_key == f"{handle.id}:1:0"
    assert second.error is not None
    assert second.error["message"] == "no"
    (undone,) = handle.compensations()
    assert (undone.args, undone.undoes, undone.undoes_key) == (["x", 2], "completed", first.idempotency_key)
    assert [event.id for event in handle.events()] == sorted(event.id for event in handle.events())
