"""SYNC-1: run_sync runs the same engine in the calling process; rows, errors and refusals are those of a queued run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from dramatiq import Retry
from dramatiq.middleware import SkipMessage

from dramatiq_saga import Flow, FlowFailedError, StepFailedError, current_step, events
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.claim import Claim, ClaimAttempt, Job, give_back
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import SendInsideWorkflowError, WouldBlockError
from dramatiq_saga.middleware import build_message
from tests.support.application import Application, Applications
from tests.support.waiting import DEADLINE, eventually

#: Columns that differ from one run to the next without meaning anything.
OWN = {
    "id", "run_id", "created_at", "started_at", "ended_at", "sent_at", "woken_at", "worker_id", "delivery", "at", "undoes_key",
    "next_try_at", "time_limit_at", "due_at",
}  # fmt: skip


def rows(app: Application, table: str, run_id: str, order: str) -> list[dict[str, Any]]:
    """A table's rows of one run, without what is its own."""
    key = "id" if table == "flow_runs" else "run_id"
    names = [column.column_name for column in getattr(app.store.models, table)._meta.sorted_fields]
    found = app.sql(f"SELECT {', '.join(names)} FROM {{{table}}} WHERE {key} = ? ORDER BY {order}", run_id)
    return [{name: _plain(value, run_id) for name, value in zip(names, row, strict=True) if name not in OWN} for row in found]


def _plain(value: Any, run_id: str) -> Any:
    if isinstance(value, (bytes, memoryview)):
        value = bytes(value).decode()
    if isinstance(value, str):
        value = value.replace(run_id, "RUN")
        if value.startswith('{"type"'):  # an error: its traceback tells the two ways apart
            import json

            error = json.loads(value)
            while error:
                error["traceback"] = ""
                last, error = error, error["cause"]
                assert last
            return json.dumps(json.loads(value)["message"]) + json.loads(value)["type"]
    return value


def good(app: Application) -> Callable[[Flow, str], Any]:
    step, undo = app.step("step", gives={"id": 1}), app.step("undo")
    flaky_calls: list[int] = []

    @app.actor(max_retries=3)
    def flaky() -> str:
        flaky_calls.append(1)
        if len(flaky_calls) % 3:
            raise OSError("not yet")
        return "third"

    def good_one(flow: Flow, word: str) -> Any:
        flow.tag("word", word)
        made = flow.action(step, word).compensate_with(lambda r: undo.message(r["id"])).run()
        dice = flow.side_effect("dice", lambda: 4)
        return [made, dice, flow.run(flaky)]

    return good_one


def bad(app: Application) -> Callable[[Flow, str], Any]:
    step, undo, refuse = (
        app.step("step", gives={"id": 1}),
        app.step("undo"),
        app.step("refuse", raises=ValueError("no"), max_retries=1),
    )

    def bad_one(flow: Flow, word: str) -> Any:
        flow.action(step, 1).compensate_with(undo, 1).on_compensation_failure("continue").run()
        flow.action(step, 2).compensate_with(lambda r: undo.message(r["id"])).run()
        flow.run(refuse)

    return bad_one


def halted(app: Application) -> Callable[[Flow, str], Any]:
    step, undo, refuse = app.step("step"), app.step("undo", raises=KeyError("k")), app.step("refuse", raises=ValueError("no"))

    def halted_one(flow: Flow, word: str) -> Any:
        flow.action(step, 1).compensate_with(undo, 1).run()
        flow.action(step, 2).compensate_with(undo, 2).run()
        flow.run(refuse)

    return halted_one


@pytest.mark.parametrize("make", [good, bad, halted])
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis", "stub"])
def test_the_rows_of_a_run_are_the_same_whoever_runs_it(kind: str, make: Any, applications: Applications) -> None:
    """SYNC-1, idea 5: every table, column by column; the history line by line."""
    app = applications(kind)
    declared = app.workflow(make(app))
    inline = declared.run_sync("w")
    queued = app.run(declared, "w")
    app.drain()
    for table, order in (
        ("flow_runs", "created_at"), ("action_runs", "sequence"), ("compensation_runs", "level, sequence"), ("side_effects", "sequence"),
        ("tags", "name"),
    ):  # fmt: skip
        assert rows(app, table, inline.id, order) == rows(app, table, queued.id, order), table
    assert app.types(inline) == app.types(queued)
    assert [event.detail for event in inline.events()] == [event.detail for event in queued.events()]


def test_a_failure_surfaces_on_the_handle_as_it_does_for_a_queued_run(app: Application) -> None:
    """SYNC-1: result() raises, with the recorded cause; run_sync itself does not."""
    declared = app.workflow(bad(app))
    handle = declared.run_sync("x")
    assert (handle.status, handle.rollback) == ("failed", "done")
    with pytest.raises(FlowFailedError, match="no") as caught:
        handle.result()
    assert caught.value.cause is not None
    assert caught.value.cause["cause"]["type"] == "builtins.ValueError"


@pytest.mark.parametrize("kind", ["sqlite", "stub", "redis"])
def test_no_message_is_sent_and_no_worker_is_needed(kind: str, applications: Applications) -> None:
    """SYNC-1: nothing reaches the broker, in any ending; ordinary messages that bodies send do."""
    app = applications(kind)
    other = app.step("other")

    @app.actor
    def sends() -> None:
        other.send()

    for make in (good, bad):
        app.workflow(make(app) if make is good else bad_of(app)).run_sync("w")
    assert app.messages() == 0

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(sends)

    one.run_sync()
    assert app.messages() == 1


def bad_of(app: Application) -> Callable[[Flow, str], Any]:
    refuse = app.step("refuse2", raises=ValueError("no"), max_retries=1)
    actors = app.broker.actors

    def bad_two(flow: Flow, word: str) -> Any:
        flow.action(actors["step"], 1).compensate_with(actors["undo"], 1).run()
        flow.run(refuse)

    return bad_two


def test_tries_follow_each_other_without_waiting_and_obey_the_actors_rules(applications: Applications) -> None:
    """SYNC-1, NATIVE-1: max_retries, throws, retry_when and Retry decide as Dramatiq's Retries would; no delay is waited for."""
    app = applications("sqlite")
    cases: dict[str, tuple[dict[str, Any], BaseException, int]] = {
        "none": ({"max_retries": 0}, ValueError(), 1),
        "two": ({"max_retries": 2, "min_backoff": 3_600_000}, ValueError(), 3),
        "throws": ({"max_retries": 5, "throws": (KeyError,)}, KeyError(), 1),
        "retry_when": ({"retry_when": lambda tries, error: tries < 3}, ValueError(), 4),
        "retry": ({"max_retries": 1}, Retry("later", delay=3_600_000), 2),
        "skip": ({"max_retries": 4}, SkipMessage("no"), 1),
    }
    for name, (options, error, calls) in cases.items():
        handle = _run(app, f"w_{name}", app.step(name, raises=error, **options))
        assert handle.status == "failed", name
        assert app.calls.count((name,)) == calls, name
        assert handle.actions()[0].tries == (calls if name != "skip" else 1), name


def _run(app: Application, name: str, actor: Any) -> Any:
    @app.workflow(name=name)
    def one(flow: Flow) -> None:
        flow.run(actor)

    return one.run_sync()


def told_to_worker(app: Application, run_id: str, sequence: int) -> None:
    """What a sweep does with a row that nobody has taken: its message to the workers."""
    actor, queue = app.sql("SELECT actor, queue FROM {action_runs} WHERE run_id = ? AND sequence = ?", run_id, sequence)[0]
    app.broker.enqueue(build_message(app.broker, Outgoing("step", run_id, actor, queue, sequence)))


def current_run() -> str:
    step = current_step()
    assert step is not None
    return step.run_id


def claimed(app: Application, run_id: str, sequence: int, *, time_limit_ms: int | None = None) -> Claim:
    """The claim of a worker elsewhere, of which nothing more is heard."""
    claim = ClaimAttempt(app.engine, Job("step", run_id, sequence, 0, 0, "m"), nonce="n", time_limit_ms=time_limit_ms).run()
    assert isinstance(claim, Claim)
    return claim


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_what_a_worker_is_at_is_waited_for(kind: str, applications: Applications, journal: list[Any]) -> None:
    """SYNC-1, DOCTOR-1: a member that waited here for its turn was sent to a worker by a sweep, and is at work there."""
    app = applications(kind)
    entered, leave = threading.Event(), threading.Event()

    @app.actor
    def first() -> int:
        told_to_worker(app, current_run(), 3)
        assert entered.wait(DEADLINE)
        return 1

    @app.actor
    def second() -> int:
        entered.set()
        assert leave.wait(DEADLINE)
        return 2

    last = app.step("last", gives=3)

    @app.workflow
    def block(flow: Flow) -> list[Any]:
        found = flow.parallel(flow.action(first), flow.action(second)).run()
        return [*found, flow.run(last)]

    def open_once_it_is_lost() -> None:
        eventually(lambda: any(line["event"] == "claim_lost" for line in journal))
        leave.set()

    with app.working():
        opening = threading.Thread(target=open_once_it_is_lost)
        opening.start()
        handle = block.run_sync()
        opening.join(DEADLINE)
    assert handle.result() == [1, 2, 3]
    assert app.calls == [("last",)]
    assert [step.attempts for step in handle.actions()] == [1, 1, 1]


def test_a_child_that_a_worker_has_started_is_run_here_where_nobody_else_takes_it(
    applications: Applications, journal: list[Any]
) -> None:
    """SYNC-1, CHILD-1: the worker has recorded the last member, so it has decided what follows: a child on a queue that it does not consume."""
    app = applications("sqlite")
    entered, leave = threading.Event(), threading.Event()

    @app.actor
    def first() -> None:
        told_to_worker(app, current_run(), 3)
        assert entered.wait(DEADLINE)

    @app.actor
    def second() -> None:
        entered.set()
        assert leave.wait(DEADLINE)

    inside = app.step("inside", gives="done")

    @app.workflow(queue_name=f"{app.queue}-far")
    def small(flow: Flow) -> Any:
        return flow.run(inside)

    @app.workflow
    def big(flow: Flow) -> Any:
        flow.parallel(flow.action(first), flow.action(second)).run()
        return flow.child(small).run()

    def open_once_it_is_lost() -> None:
        eventually(lambda: any(line["event"] == "claim_lost" for line in journal))
        leave.set()

    with app.working(queues={app.queue}):
        opening = threading.Thread(target=open_once_it_is_lost)
        opening.start()
        handle = big.run_sync()
        opening.join(DEADLINE)
    assert handle.result() == "done"
    assert app.calls == [("inside",)]


def test_what_a_worker_has_given_back_is_run_here(applications: Applications, journal: list[Any]) -> None:
    """SYNC-1: a worker that stops gives its claim back; the message that it leaves with it may be far away."""
    app = applications("sqlite")

    @app.actor
    def first() -> None:
        claims.append(claimed(app, current_run(), 3, time_limit_ms=600_000))

    claims: list[Claim] = []
    second = app.step("second")

    @app.workflow
    def block(flow: Flow) -> None:
        flow.parallel(flow.action(first), flow.action(second)).run()

    def give_back_once_it_is_lost() -> None:
        eventually(lambda: any(line["event"] == "claim_lost" for line in journal))
        app.store.write(lambda tx: give_back(tx, app.engine, claims[0], now=app.engine.now()))

    giving = threading.Thread(target=give_back_once_it_is_lost)
    giving.start()
    handle = block.run_sync()
    giving.join(DEADLINE)
    assert handle.status == "completed"
    assert app.calls == [("second",)]


@pytest.mark.parametrize(
    ("window", "limit", "ends"), [(60, 600_000, "completed"), (None, 600_000, "blocked"), (None, None, "blocked")]
)
def test_a_worker_that_is_not_heard_of_any_more_is_not_waited_for_for_ever(
    applications: Applications, window: int | None, limit: int | None, ends: str
) -> None:
    """SYNC-1, RECLAIM-1: its step is taken over from its reclaim deadline on; without one, nobody is at it after its time limit."""
    app = applications("sqlite")
    app.store.clock = ManualClock()

    @app.actor
    def first() -> None:
        claimed(app, current_run(), 3, time_limit_ms=limit)

    second = app.step("second")

    @app.workflow
    def block(flow: Flow) -> None:
        member = flow.action(second)
        flow.parallel(flow.action(first), member if window is None else member.reclaim_stale_after(window)).run()

    if ends == "blocked":
        with pytest.raises(WouldBlockError, match=r"step 3 \(second, running\)"):
            block.run_sync()
        assert app.calls == []
    else:
        assert block.run_sync().status == "completed"
        assert app.calls == [("second",)]


def test_an_undo_that_a_worker_is_at_is_named(applications: Applications) -> None:
    """SYNC-1: nothing says for how long that worker may be at it, so it is not waited for; the rollback goes on without this process."""
    app = applications("sqlite")
    step, undo, refuse = app.step("step"), app.step("undo"), app.step("refuse", raises=ValueError("no"))

    @app.workflow
    def trip(flow: Flow) -> None:
        flow.action(step).compensate_with(undo).run()
        flow.run(refuse)

    def claim(event: events.CompensationStarted) -> None:
        claims.append(ClaimAttempt(app.engine, Job("compensation", event.run_id, 1, 0, 0, "m"), nonce="n").run())

    claims: list[Any] = []
    events.subscribe(claim, events.CompensationStarted)
    try:
        with pytest.raises(WouldBlockError, match=r"the undo of step 1 \(undo, running\)") as caught:
            trip.run_sync()
    finally:
        events.unsubscribe(claim, events.CompensationStarted)
    assert f"get_flow({caught.value.run_id!r}).result(wait=" in str(caught.value)
    assert [type(one) for one in claims] == [Claim]
    assert app.calls == [("step",), ("refuse",)]


@pytest.mark.parametrize("fault", ["builder", "mismatch"])
def test_a_held_run_is_not_waited_for_until_its_deadline(applications: Applications, fault: str) -> None:
    """SYNC-1, HISTORY-1: its code is here as it is, and meets the same each time that it is tried again."""
    app = applications("sqlite")
    clock = app.store.clock = ManualClock()
    step = app.step("step")
    calls: list[int] = []

    def build(result: Any) -> Any:
        raise KeyError("no such room")

    @app.workflow(expires_in=60)
    def trip(flow: Flow) -> None:
        calls.append(1)
        if fault == "builder":
            flow.action(step).compensate_with(build).run()
        elif len(calls) == 1:
            flow.run(step)
        flow.sleep(5)

    before = clock.now()
    with pytest.raises(WouldBlockError, match="is held: ") as caught:
        trip.run_sync()
    error = {"builder": "CompensationBuildError", "mismatch": "HistoryMismatchError"}[fault]
    assert caught.value.held is not None
    assert caught.value.held["type"].endswith(error)
    assert clock.now() == before
    assert app.sql("SELECT status, hold_count, expiry_attempts FROM {flow_runs}") == [("waiting", 1, 0)]


def test_a_run_that_its_deadline_cannot_undo_is_waited_for_until_then_and_no_longer(applications: Applications) -> None:
    """SYNC-1, EXPIRE-2: the window after which that is tried again ends in the same."""
    app = applications("sqlite")
    clock = app.store.clock = ManualClock()
    second = app.step("second")

    @app.actor
    def first() -> None:
        claimed(app, current_run(), 3)

    def build(result: Any) -> Any:
        raise KeyError("no such room")

    @app.workflow(expires_in=60)
    def block(flow: Flow) -> None:
        flow.parallel(flow.action(first).compensate_with(build), flow.action(second)).run()

    before = clock.now()
    with pytest.raises(WouldBlockError, match="could not be planned"):
        block.run_sync()
    assert clock.now() == before + 60_000
    assert app.sql("SELECT hold_error, expiry_attempts FROM {flow_runs}") == [(None, 1)]


def test_a_run_that_nothing_here_can_go_on_with_says_what_it_waits_for(app: Application) -> None:
    """SYNC-1: WouldBlockError; the run stays in the database, and workers may finish it."""

    @app.workflow
    def forgets(flow: Flow) -> None:
        flow.action(app.broker.actors["step"])

    app.step("step")
    with pytest.raises(WouldBlockError, match="BuilderNotRunError") as caught:
        forgets.run_sync()
    assert app.sql("SELECT status FROM {flow_runs} WHERE id = ?", caught.value.run_id) == [("waiting",)]


def test_an_actor_that_is_not_declared_here_fails_its_step(applications: Applications) -> None:
    """NATIVE-3, SYNC-1: with the actor's name and the way out."""
    app = applications("sqlite")
    gone = app.step("gone")

    @app.workflow
    def one(flow: Flow) -> None:
        flow.run(gone)

    del app.broker.actors["gone"]
    handle = one.run_sync()
    assert handle.status == "failed"
    error = handle.actions()[0].error
    assert error is not None
    assert "'gone' is not declared in this process" in error["message"]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_run_inside_the_body_of_a_step_knows_its_own_step(kind: str, applications: Applications) -> None:
    """SYNC-1: current_step() is the inner step's inside, and the outer one's again afterwards."""
    app = applications(kind)

    @app.actor
    def who() -> str:
        step = current_step()
        assert step is not None
        return step.run_id

    @app.workflow
    def inner(flow: Flow) -> str:
        return flow.run(who)

    @app.actor
    def outer_body() -> list[Any]:
        before = current_step()
        assert before is not None
        handle = inner.run_sync()
        after = current_step()
        return [handle.result() == handle.id, before == after, before.run_id != handle.id]

    @app.workflow
    def outer(flow: Flow) -> Any:
        return flow.run(outer_body)

    assert app.run(outer).result() == [True, True, True]


def test_interrupting_the_caller_gives_the_step_back(applications: Applications) -> None:
    """SYNC-1: control-C in a body: the claim is given back by its token, the error goes to the caller, the run is not failed."""
    app = applications("sqlite")

    @app.actor(max_retries=3)
    def interrupted() -> str:
        app.calls.append("called")
        if len(app.calls) == 1:
            raise KeyboardInterrupt
        return "later"

    @app.workflow
    def one(flow: Flow) -> str:
        return flow.run(interrupted)

    with pytest.raises(KeyboardInterrupt):
        one.run_sync()
    ((run_id, status),) = app.sql("SELECT id, status FROM {flow_runs}")
    assert status == "running"
    assert app.sql("SELECT status, tries, claims FROM {action_runs}") == [("pending", 0, 0)]
    from dramatiq_saga import get_flow
    from tests.conformance.engine.test_claims_and_fences import send_again

    send_again(app, run_id)
    app.start()
    assert app.ended(get_flow(run_id)) == "completed"


def test_a_step_may_hand_its_values_to_nobody_else(applications: Applications) -> None:
    """CODEC-1, C50: inline too, the workflow sees the decoded form, and never the body's own object."""
    app = applications("sqlite")
    kept: dict[str, Any] = {1: (1, 2)}  # type: ignore[dict-item]

    @app.actor
    def gives() -> Any:
        return kept

    @app.workflow
    def one(flow: Flow) -> Any:
        value = flow.run(gives)
        value["1"].append("changed")
        return [value, flow.run(gives)]

    assert one.run_sync().result() == [{"1": [1, 2, "changed"]}, {"1": [1, 2]}]
    assert kept == {1: (1, 2)}


def test_running_a_workflow_from_inside_a_workflow_is_refused(applications: Applications) -> None:
    """API Flow: it would repeat; a child workflow is the way (or a step that runs it)."""
    app = applications("sqlite")

    @app.workflow
    def inner(flow: Flow) -> int:
        return 1

    @app.workflow
    def outer(flow: Flow) -> int:
        return int(inner.run_sync().result())

    with pytest.raises(WouldBlockError, match="SendInsideWorkflowError"):
        outer.run_sync()
    assert SendInsideWorkflowError.__name__ in app.sql("SELECT hold_error FROM {flow_runs}")[0][0]


def test_events_of_an_inline_run_are_told_in_its_thread(applications: Applications) -> None:
    """EVENT-2: in the process and thread that recorded them."""
    app = applications("sqlite")
    declared = app.workflow(bad(app))
    threads: set[int] = set()

    def note(event: Any) -> None:
        threads.add(threading.get_ident())

    events.subscribe(note, events.Event)
    try:
        declared.run_sync("x")
    finally:
        events.unsubscribe(note)
    assert threads == {threading.get_ident()}


def test_an_inline_run_can_be_cancelled_by_somebody_else_meanwhile(app: Application) -> None:
    """STATUS-2, SYNC-1: the outcome is rejected, nothing follows, and the caller gets the handle of a cancelled run."""
    after = app.step("after")

    @app.actor
    def looks() -> str:
        from dramatiq_saga import get_flow

        step = current_step()
        assert step is not None
        canceller = threading.Thread(target=lambda: get_flow(step.run_id, broker=app.broker).cancel())
        canceller.start()
        canceller.join()
        return "late"

    @app.workflow
    def one(flow: Flow) -> None:
        try:
            flow.run(looks)
        except StepFailedError:
            pass
        flow.run(after)

    handle = one.run_sync()
    assert handle.status == "cancelled"
    assert handle.actions()[0].status == "cancelled"
    assert app.calls == []
    eventually(lambda: app.messages() == 0)
