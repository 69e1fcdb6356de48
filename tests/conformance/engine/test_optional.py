"""Optional steps: a failure for good that is none of the run (OPT-1), on every way that leads to one."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import SkipMessage

from dramatiq_saga import Flow, Settings, events
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.codec import TaggedJSONEncoder
from dramatiq_saga.engine.claim import Job
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import MessageTooOldError, NotSerializableError
from tests.support.application import Application
from tests.support.bench import Background, Bench, benches

Declare = Callable[[Bench], None]


def raising(error: BaseException) -> Callable[[], Any]:
    def body() -> Any:
        raise error

    return body


def only(body: Callable[[], Any], **options: Any) -> Declare:
    """A workflow of one optional step, whose fallback it returns."""

    def declare(bench: Bench) -> None:
        letter = bench.actor(body, actor_name="letter", **options)
        refund = bench.actor(lambda: None, actor_name="refund")

        def order(flow: Flow) -> Any:
            return flow.action(letter).compensate_with(refund).fallback_value_on_fail("none sent").run()

        bench.workflow(order, name="order")

    return declare


def went_on(bench: Bench, run_id: str) -> None:
    """The run has completed with the fallback, and the row and the history say how the step has ended."""
    assert bench.status(run_id) == "completed"
    row = bench.one(
        "SELECT status, given_up, ended_at IS NOT NULL FROM {action_runs} WHERE run_id = ? AND sequence = 1", run_id
    )
    assert row is not None
    assert (row[0], bool(row[1]), bool(row[2])) == ("optional_failed", True, True)
    result = bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run_id)
    assert result is not None
    assert bytes(result[0]) == b'"none sent"'
    assert bench.events(run_id).count("action.optional_failed") == 1
    assert bench.codes() == []


@pytest.fixture
def bench_on(database_url: str, table_prefix: str, tables_stand: None, request: pytest.FixtureRequest) -> Callable[..., Bench]:
    """``bench_on(declare)``: a worker that the test holds in its hands, on each database."""

    def make(declare: Declare, **options: Any) -> Bench:
        bench = Bench(database_url, declare, prefix=table_prefix, clock=ManualClock(), **options)
        request.addfinalizer(bench.close)
        return bench

    return make


def test_an_optional_step_whose_tries_are_spent_is_written_so_at_once(bench_on: Callable[..., Bench]) -> None:
    """OPT-1: given up after its last native try; outcome, decision and the run's end are one transaction."""
    bench = bench_on(only(raising(ValueError("no paper"))))
    run_id = bench.start("order")
    bench.run()
    went_on(bench, run_id)
    assert bench.events(run_id)[-4:] == ["action.failed", "action.given_up", "action.optional_failed", "flow.completed"]


def test_an_optional_step_whose_result_cannot_be_stored_goes_on_too(bench_on: Callable[..., Bench]) -> None:
    """OPT-1, CODEC-2: the body ended in a way that no try can mend."""
    bench = bench_on(only(lambda: float("nan")))
    run_id = bench.start("order")
    bench.run()
    went_on(bench, run_id)
    assert bench.events(run_id)[-3:] == ["action.failed", "action.optional_failed", "flow.completed"]


def test_an_optional_step_whose_body_skips_goes_on_too(bench_on: Callable[..., Bench]) -> None:
    """OPT-1, NATIVE-3: SkipMessage out of the body is a failure for good."""
    bench = bench_on(only(raising(SkipMessage("not today"))))
    run_id = bench.start("order")
    bench.run()
    went_on(bench, run_id)


def test_an_optional_step_whose_message_was_refused_goes_on_too(bench_on: Callable[..., Bench]) -> None:
    """OPT-1, NATIVE-3: a message that ended before any claim, for its age for example."""
    bench = bench_on(only(lambda: None))
    run_id = bench.start("order")
    bench.deliver(bench.take())
    bench.take()
    job = Job("step", run_id, 1, 0, 0, "m")
    bench.runner.refuse(job, "letter", MessageTooOldError("older than its age limit"))
    went_on(bench, run_id)


def test_an_optional_step_that_kills_its_workers_goes_on_too(bench_on: Callable[..., Bench]) -> None:
    """OPT-1, RECLAIM-6: claimed as often as allowed without an outcome."""
    settings = Settings.from_mapping({"reclaim.max_claims": 1, "actions.reclaim.stale_running.enabled": True})
    bench = bench_on(only(lambda: None), settings=settings)
    run_id = bench.start("order")
    bench.deliver(bench.take())
    message = bench.message(bench.take())
    stop = bench.stop("outcome and decision")
    dies = Background(lambda: bench.deliver(message))
    stop.wait_reached()
    bench.store.clock.advance(901)  # type: ignore[attr-defined]
    bench.deliver(message)
    went_on(bench, run_id)
    stop.go()
    dies.result()
    assert bench.codes() == ["outcome_rejected"], "what the first claim reports comes too late"
    bench.anomalies.lines.clear()
    went_on(bench, run_id)


def with_side_effect(bench: Bench) -> None:
    """What follows the step has to be recorded first, so its outcome commits alone (DRIVE-1)."""
    letter = bench.actor(raising(ValueError("no paper")), actor_name="letter")

    def order(flow: Flow) -> Any:
        sent = flow.action(letter).fallback_value_on_fail("none sent").run()
        flow.side_effect("coin", lambda: 1)
        return sent

    bench.workflow(order, name="order")


def test_an_outcome_that_commits_alone_is_written_the_same(bench_on: Callable[..., Bench]) -> None:
    """OPT-1, DRIVE-1: the row, the history and what follows are the same where the decision comes in a transaction of its own."""
    bench = bench_on(with_side_effect)
    run_id = bench.start("order")
    bench.run()
    went_on(bench, run_id)


@pytest.mark.parametrize("declare", [only(raising(ValueError("no paper"))), with_side_effect], ids=["with", "alone"])
def test_an_outcome_whose_commit_nobody_knew_of_is_recognised(bench_on: Callable[..., Bench], declare: Declare) -> None:
    """FENCE-1, OPT-1: the write is tried again and finds its own attempt and outcome; nothing is rejected."""
    bench = bench_on(declare)
    run_id = bench.start("order")
    bench.deliver(bench.take())
    delivery = bench.deliver(bench.take())
    bench.fail("outcome and decision" if declare is not with_side_effect else "outcome", happened=True)
    bench.runner.give_up(delivery)
    bench.run()
    went_on(bench, run_id)


def test_an_optional_step_of_an_unknown_actor_goes_on_too(every_app: Application) -> None:
    """OPT-1, NATIVE-3, C11: at once, with repair off."""
    gone = every_app.step("gone")

    @every_app.workflow
    def order(flow: Flow) -> Any:
        return flow.optional_action(gone).run()

    del every_app.broker.actors["gone"]
    handle = every_app.run(order)
    assert (handle.status, handle.result()) == ("completed", None)
    [step] = handle.actions()
    assert (step.status, step.given_up) == ("optional_failed", True)
    assert step.error is not None
    assert step.error["type"].endswith("UnknownActorError")


def test_a_step_that_fails_with_tries_left_is_tried_again_first(every_app: Application) -> None:
    """RSIG-2, OPT-1: native tries come before the fallback; one that works gives its result."""
    worked: list[int] = []

    @every_app.actor(max_retries=2)
    def letter() -> str:
        worked.append(1)
        if len(worked) < 3:
            raise ValueError
        return "sent"

    @every_app.workflow
    def order(flow: Flow) -> Any:
        return flow.action(letter).fallback_value_on_fail("none sent").run()

    handle = every_app.run(order)
    assert handle.result() == "sent"
    assert (handle.actions()[0].status, len(worked)) == ("completed", 3)


def test_a_step_is_only_optional_while_the_flag_is_up(lite: Application) -> None:
    """API continue_on_failure(flag): what was said last counts."""
    letter = lite.step("letter", raises=ValueError("no paper"))

    @lite.workflow
    def order(flow: Flow) -> Any:
        return flow.optional_action(letter).continue_on_failure(False).run()

    assert order.run_sync().status == "failed"


def test_a_fallback_is_recorded_with_its_step_and_given_as_it_is_stored(lite: Application) -> None:
    """OPT-1, CODEC-1: a replay, and a deploy that changes the line, give the value of the row: decoded, and a fresh copy each time."""
    seen: list[Any] = []
    given: list[Any] = [{"to": (1, 2)}]
    letter, pack = lite.step("letter", raises=ValueError()), lite.step("pack")

    @lite.workflow
    def order(flow: Flow) -> Any:
        value = flow.action(letter).fallback_value_on_fail(given[0]).run()
        seen.append(value)
        value["to"].append(3)
        given[0] = {"changed": "by a deploy"}
        flow.run(pack)
        return value

    assert order.run_sync().result() == {"to": [1, 2, 3]}
    assert len(seen) == 2
    assert seen[1] == {"to": [1, 2, 3]}, "the second walk's copy, after what the function did to it"


def test_a_fallback_goes_through_the_encoder_of_the_host(lite: Application) -> None:
    """CODEC-3, OPT-1: with the tagged encoder it keeps its type."""
    dramatiq.set_encoder(TaggedJSONEncoder())
    letter = lite.step("letter", raises=ValueError())

    @lite.workflow
    def order(flow: Flow) -> Any:
        return flow.action(letter).fallback_value_on_fail(Decimal("1.50")).run()

    assert order.run_sync().result() == Decimal("1.50")


def test_a_fallback_that_cannot_be_stored_is_refused_at_the_line(lite: Application) -> None:
    """OPT-1, CODEC-2: named with the path to the value, before anything is scheduled."""
    letter = lite.step("letter")

    @lite.workflow
    def order(flow: Flow) -> Any:
        with pytest.raises(NotSerializableError, match=r"fallback_value_on_fail\(\)\['x'\] cannot be stored: nan is not JSON"):
            flow.action(letter).fallback_value_on_fail({"x": float("nan")})
        return "refused"

    handle = order.run_sync()
    assert (handle.result(), lite.calls) == ("refused", [])


def later_failure(body: Callable[[], Any], *, self_failure: bool) -> Declare:
    """An optional step with an undo, and a step after it that fails."""

    def declare(bench: Bench) -> None:
        letter = bench.actor(body, actor_name="letter")
        recall = bench.actor(lambda: None, actor_name="recall")
        pay = bench.actor(raising(ValueError("declined")), actor_name="pay")

        def order(flow: Flow) -> None:
            flow.optional_action(letter).compensate_with(recall).compensate_step_on_self_failure(self_failure).run()
            flow.run(pay)

        bench.workflow(order, name="order")

    return declare


@pytest.mark.parametrize("self_failure", [True, False])
def test_an_optional_step_that_failed_is_undone_only_where_it_says_so(
    bench_on: Callable[..., Bench], self_failure: bool
) -> None:
    """COMP-5, OPT-1: compensate_step_on_self_failure counts for a step whose failure the run survived, once the run fails later."""
    bench = bench_on(later_failure(raising(ValueError("no paper")), self_failure=self_failure))
    run_id = bench.start("order")
    bench.run()
    assert bench.status(run_id) == "failed"
    assert bench.steps(run_id) == [("letter", "optional_failed"), ("pay", "failed")]
    undone = bench.all("SELECT actor, undoes, status FROM {compensation_runs} WHERE run_id = ?", run_id)
    assert undone == ([("recall", "failed", "completed")] if self_failure else [])


def test_an_optional_step_whose_result_cannot_be_stored_is_undone_as_done(bench_on: Callable[..., Bench]) -> None:
    """CODEC-2, OPT-1: the work was done, though the run went on without its result; a later rollback undoes it."""
    bench = bench_on(later_failure(lambda: float("nan"), self_failure=False))
    run_id = bench.start("order")
    bench.run()
    assert bench.steps(run_id) == [("letter", "optional_failed"), ("pay", "failed")]
    undone = bench.all("SELECT actor, undoes, status FROM {compensation_runs} WHERE run_id = ?", run_id)
    assert undone == [("recall", "completed", "completed")]


def test_listeners_hear_of_an_optional_failure(lite: Application) -> None:
    """EVENT-1, OPT-1: the failed try first, then that the run goes on without the step."""
    heard: list[Any] = []

    def hear(event: events.ActionEvent) -> None:
        heard.append((type(event).__name__, event.action.status))

    letter = lite.step("letter", raises=ValueError("no paper"))

    @lite.workflow
    def order(flow: Flow) -> Any:
        return flow.optional_action(letter).run()

    events.subscribe(hear, events.ActionEvent)
    try:
        order.run_sync()
    finally:
        events.unsubscribe(hear)
    assert [name for name, _ in heard] == ["ActionStarted", "ActionFailed", "ActionFailed", "OptionalActionFailed"]
    assert heard[-1][1] == "optional_failed"


def test_two_workers_on_one_file_agree_on_an_optional_failure(sqlite_path: Any) -> None:
    """OPT-1, DRIVE-1: a second process that drives the run sees the same fallback."""
    url = f"sqlite:///{sqlite_path}"
    declare = only(raising(ValueError("no paper")))
    with benches(Bench(url, declare), Bench(url, declare)) as (one, other):
        run_id = one.start("order")
        one.deliver(one.take())
        delivery = one.deliver(one.take())
        one.overtake("outcome and decision", lambda: other.deliver(Outgoing("drive", run_id, "order", "default")))
        one.runner.give_up(delivery)
        went_on(other, run_id)


@pytest.mark.parametrize("order_of_messages", [(0, 1), (1, 0)], ids=["first", "last"])
def test_an_optional_member_of_a_block_fails_nobody(bench_on: Callable[..., Bench], order_of_messages: tuple[int, int]) -> None:
    """OPT-1, PAR-4: no hard failure, so nothing is cancelled; whether it is the block's last or reports while others are at work."""

    def declare(bench: Bench) -> None:
        letter = bench.actor(raising(ValueError("no paper")), actor_name="letter")
        pack = bench.actor(lambda: "packed", actor_name="pack")

        def order(flow: Flow) -> Any:
            return flow.parallel(flow.optional_action(letter), flow.action(pack)).fail_fast().run()

        bench.workflow(order, name="order")

    bench = bench_on(declare)
    run_id = bench.start("order")
    bench.deliver(bench.take())
    messages = [bench.take(), bench.take()]
    for number in order_of_messages:
        delivery = bench.deliver(messages[number])
        if delivery.state == "failed":
            bench.runner.give_up(delivery)
    bench.run()
    assert (bench.status(run_id), bench.steps(run_id)) == ("completed", [("letter", "optional_failed"), ("pack", "completed")])
    assert bench.one("SELECT result FROM {flow_runs} WHERE id = ?", run_id) == (b'[null,"packed"]',)
    told = [kind for kind in bench.events(run_id) if kind in ("action.given_up", "action.optional_failed")]
    assert told == ["action.given_up", "action.optional_failed"]
