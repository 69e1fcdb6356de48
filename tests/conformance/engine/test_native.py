"""Dramatiq's own options and ways of ending, as they show on a step (NATIVE-1 … NATIVE-6)."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq import Retry
from dramatiq.middleware import AgeLimit, Callbacks, Middleware, Pipelines, Retries, SkipMessage, TimeLimit, default_middleware

from dramatiq_saga import Flow, Settings, StepFailedError
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import NotSerializableError
from tests.support.application import Application, Applications
from tests.support.waiting import eventually


def only(app: Application, actor: Any, *, name: str = "one", **options: Any) -> Any:
    """A workflow of one step."""

    @app.workflow(name=name)
    def one(flow: Flow) -> Any:
        return flow.action(actor).with_options(**options).run()

    return one


def test_native_retries_show_on_the_row_and_the_run_learns_of_the_last(app: Application) -> None:
    """NATIVE-1, NATIVE-2: failed between tries, given up once Dramatiq gives up, and only then does the run fail."""
    seen: list[Any] = []

    @app.actor(max_retries=2)
    def flaky() -> None:
        seen.append(app.sql("SELECT status, attempts, tries, given_up, error IS NULL FROM {action_runs}")[-1])
        raise ValueError(f"no {len(seen)}")

    handle = app.run(only(app, flaky))
    app.drain()
    assert [(row[0], row[1], row[2], bool(row[3])) for row in seen] == [
        ("running", 1, 0, False), ("running", 2, 1, False), ("running", 3, 2, False),
    ]  # fmt: skip
    step = handle.actions()[0]
    assert (step.status, step.given_up, step.tries, step.attempts) == ("failed", True, 3, 3)
    assert step.error is not None
    assert step.error["message"] == "no 3"
    assert handle.status == "failed"
    assert [event.attempt for event in handle.events() if event.type == "action.failed"] == [1, 2, 3]
    assert app.types(handle).count("action.given_up") == 1
    assert app.messages() == 0


def test_the_next_try_is_noted_on_the_row(app: Application) -> None:
    """NATIVE-6: while Dramatiq waits, the row says when it will try again; the claim takes the note away."""

    @app.actor(max_retries=1)
    def flaky() -> None:
        raise ValueError

    handle = only(app, flaky, min_backoff=60_000, max_backoff=90_000).send()
    app.start()
    step = eventually(lambda: next((a for a in handle.actions() if (a.next_try_at or 0) > app.engine.now() + 20_000), None))
    assert (step.status, step.given_up, step.tries) == ("failed", False, 1)
    assert step.next_try_at is not None
    assert step.next_try_at < app.engine.now() + 95_000
    assert handle.status == "running"


def test_one_try_means_one_call(app: Application) -> None:
    """NATIVE-1: max_retries=0, on the actor or on the message."""
    strict, lenient = app.step("strict", raises=ValueError()), app.step("lenient", raises=ValueError(), max_retries=5)
    assert app.run(only(app, strict)).status == "failed"
    assert app.run(only(app, lenient, name="two", max_retries=0)).status == "failed"
    app.drain()
    assert app.calls == [("strict",), ("lenient",)]


def test_a_message_may_have_more_tries_than_its_actor(app: Application) -> None:
    """API with_options(max_retries, min_backoff, max_backoff)."""
    strict = app.step("strict", raises=ValueError())
    handle = app.run(only(app, strict, max_retries=2, min_backoff=3, max_backoff=5))
    assert handle.actions()[0].tries == 3


def test_throws_gives_up_at_once(app: Application) -> None:
    """NATIVE-2: an expected exception is not tried again."""
    picky = app.step("picky", raises=KeyError("k"), max_retries=5, throws=(KeyError,))
    handle = app.run(only(app, picky))
    step = handle.actions()[0]
    assert (step.given_up, step.tries, app.calls) == (True, 1, [("picky",)])


def test_retry_when_decides(app: Application) -> None:
    """NATIVE-1: the actor's predicate, with the number of tries made before."""
    asked: list[Any] = []

    def retry_when(tries: int, error: BaseException) -> bool:
        asked.append((tries, type(error).__name__))
        return tries < 2

    choosy = app.step("choosy", raises=OSError(), retry_when=retry_when)
    handle = app.run(only(app, choosy))
    assert asked == [(0, "OSError"), (1, "OSError"), (2, "OSError")]
    assert handle.actions()[0].tries == 3


def test_a_retry_exception_waits_as_long_as_it_says(app: Application) -> None:
    """NATIVE-1: dramatiq.Retry is a failed try with a delay of its own."""

    @app.actor(max_retries=3)
    def later() -> str:
        app.calls.append(app.engine.now())
        if len(app.calls) == 1:
            raise Retry("not yet", delay=120)
        return "done"

    handle = app.run(only(app, later, min_backoff=3_600_000, max_backoff=3_600_000))
    assert handle.result() == "done"
    assert app.calls[1] - app.calls[0] >= 110
    assert handle.actions()[0].tries == 1


def test_on_retry_exhausted_is_told_once(app: Application) -> None:
    """NATIVE-1: Dramatiq's own hook still works; its message is an ordinary one."""

    @app.actor
    def told(message: dict[str, Any], info: dict[str, Any]) -> None:
        app.calls.append((message["actor_name"], info["retries"], info["max_retries"]))

    bad = app.step("bad", raises=ValueError(), max_retries=1, on_retry_exhausted="told")
    app.run(only(app, bad))
    app.drain()
    assert app.calls == [("bad",), ("bad",), ("bad", 1, 1)]


def test_without_retries_a_failure_is_the_last(applications: Applications) -> None:
    """NATIVE-2: nothing on the broker retries, so Dramatiq acknowledges; the row is given up before that."""
    middleware = [known() for known in default_middleware if known is not Retries]
    for kind in ("sqlite", "redis", "stub"):
        app = applications(kind, middleware=list(middleware))
        bad = app.step("bad", raises=ValueError("once"))
        handle = app.run(only(app, bad))
        app.drain()
        step = handle.actions()[0]
        assert (handle.status, step.status, step.given_up, step.tries) == ("failed", "failed", True, 1)
        assert app.calls == [("bad",)]
        assert app.messages() == 0
        app.stop()


class Skips(Middleware):
    """Skips the first messages of an actor, before or behind the middleware that it stands at."""

    def __init__(self, actor: str, *, fail: bool = False, times: int = 1) -> None:
        self.actor, self.fail, self.left = actor, fail, times

    def before_process_message(self, broker: Any, message: Any) -> None:
        if message.actor_name == self.actor and self.left:
            self.left -= 1
            if self.fail:
                message.fail()
            raise SkipMessage("not today")


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("fail", [False, True], ids=["acknowledged", "rejected"])
def test_a_skipped_step_fails_and_is_not_forgotten(app: Application, place: str, fail: bool) -> None:
    """NATIVE-3: a middleware of the host skips the message, wherever it stands; the step fails with that cause."""
    skips = Skips("wanted", fail=fail)
    if place == "before":
        app.broker.middleware.insert(0, skips)
    else:
        app.broker.add_middleware(skips)
    wanted, undo = app.step("wanted"), app.step("undo")
    first = app.step("first")

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(first).compensate_with(undo).run()
        flow.run(wanted)

    handle = app.run(two)
    app.drain()
    assert (handle.status, handle.rollback) == ("failed", "done")
    error = handle.actions()[1].error
    assert error is not None
    assert error["type"].endswith("MessageSkippedError")
    assert app.calls == [("first",), ("undo",)]
    assert handle.actions()[1].attempts == 0


def test_a_skipped_drive_is_delivered_again(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRIVE-2: a wake that nobody has seen keeps something behind it."""
    monkeypatch.setattr("dramatiq_saga.middleware.SKIPPED_DRIVE_MS", 30)
    app.broker.middleware.insert(0, Skips("one", times=2))
    assert app.run(only(app, app.step("step", gives=1))).result() == 1


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_a_message_that_is_too_old_fails_its_step(kind: str, applications: Applications) -> None:
    """NATIVE-3: AgeLimit refuses it; the step fails with that cause, without a call, and the run is undone."""
    app = applications(kind)
    old, first, undo = app.step("old", max_age=40), app.step("first"), app.step("undo")

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(first).compensate_with(undo).run()
        flow.action(old).with_options(queue_name=app.queue + "x").run()

    app.broker.declare_queue(app.queue + "x")
    handle = two.send()
    app.start(queues={app.queue})
    sent = "SELECT sent_at FROM {action_runs} WHERE run_id = ? AND actor = 'old' AND sent_at IS NOT NULL"
    ((sent_at,),) = eventually(lambda: app.sql(sent, handle.id))  # its message is not younger than that
    eventually(lambda: app.engine.now() - sent_at > 60)
    app.start(queues={app.queue + "x"})
    assert app.ended(handle) == "failed"
    error = handle.actions()[1].error
    assert error is not None
    assert error["type"].endswith("MessageTooOldError")
    assert "age limit" in error["message"]
    assert app.calls == [("first",), ("undo",)]


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_an_age_limit_for_everybody_leaves_runs_alone(kind: str, applications: Applications) -> None:
    """DRIVE-2: the broker's own AgeLimit never makes a run be forgotten, however long its message has waited."""
    middleware = [AgeLimit(max_age=30), TimeLimit(), Callbacks(), Pipelines(), Retries()]
    app = applications(kind, middleware=middleware)

    @app.workflow
    def waits(flow: Flow) -> int:
        return 7

    handle = waits.send()
    started = app.engine.now()
    eventually(lambda: app.engine.now() - started > 60)
    app.start()
    assert app.ended(handle) == "completed"


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
def test_a_retry_rule_for_everybody_leaves_drives_alone(kind: str, applications: Applications) -> None:
    """NATIVE-7: the broker's own retry_when never makes a drive be given up."""
    from tests.support import store_faults as faults

    middleware = [AgeLimit(), TimeLimit(), Callbacks(), Pipelines(), Retries(retry_when=lambda tries, error: False)]
    app = applications(kind, middleware=middleware)

    @app.workflow
    def one(flow: Flow) -> int:
        return 7

    broken = faults.Faults(app.store).refuse(faults.DECIDE, 1, error=lambda: RuntimeError("a fault nobody has thought of"))
    handle = one.send()
    app.start()
    eventually(lambda: broken.met)
    app.drain()
    assert handle.status == "waiting"
    held = app.sql("SELECT hold_error FROM {flow_runs}")[0][0]
    assert "nobody has thought of" in held


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis", "stub"])
def test_an_actor_that_no_worker_knows_fails_its_step_at_once(kind: str, applications: Applications) -> None:
    """NATIVE-3, C11: repair off; the step fails with the actor's name in the error and the run is undone."""
    app = applications(kind)
    first, undo, gone = app.step("first"), app.step("undo"), app.step("gone")

    @app.workflow
    def two(flow: Flow) -> None:
        flow.action(first).compensate_with(undo).run()
        flow.run(gone)

    del app.broker.actors["gone"]
    handle = app.run(two)
    assert (handle.status, handle.rollback) == ("failed", "done")
    error = handle.actions()[1].error
    assert error is not None
    assert error["type"].endswith("UnknownActorError")
    assert "'gone'" in error["message"]
    assert app.calls == [("first",), ("undo",)]


def test_an_actor_that_no_worker_knows_yet_is_waited_for_with_repair_on(applications: Applications, journal: list[Any]) -> None:
    """NATIVE-3, C11: a worker that knows it may come; the row stays pending for the doctor, and the log names the actor."""
    app = applications("sqlite", settings=Settings.from_mapping({"repair": {"enabled": True}}))
    gone = app.step("gone")
    one = only(app, gone)
    del app.broker.actors["gone"]
    handle = one.send()
    app.start()
    eventually(lambda: [line for line in journal if line["event"] == "actor_unknown"])
    app.drain()
    assert handle.status == "running"
    assert handle.actions()[0].status == "pending"
    line = next(line for line in journal if line["event"] == "actor_unknown")
    assert (line["run_id"], line["sequence"], line["actor"]) == (handle.id, 1, "gone")


def test_a_run_whose_workflow_a_worker_does_not_know_is_held_and_not_lost(app: Application) -> None:
    """HISTORY-1, C11: its drive message ends up with the wrong worker; the run waits with the reason on it."""
    one = only(app, app.step("step"))
    known = app.broker.actors.pop("one")
    handle = one.send()
    app.start()
    eventually(lambda: handle.status == "waiting")
    app.drain()
    run = app.sql("SELECT hold_error, hold_until, wakes, wakes_seen FROM {flow_runs} WHERE id = ?", handle.id)[0]
    assert "UnknownActorError" in run[0]
    assert run[1] is not None
    assert run[2] > run[3]
    app.broker.actors["one"] = known
    app.middleware.runner(app.broker).wake(handle.id)
    assert app.ended(handle) == "completed"


def test_a_drive_message_too_many_that_a_worker_cannot_use_holds_no_run(app: Application, journal: list[Any]) -> None:
    """HISTORY-1, C11: the run has been driven and waits for its signal; a second copy of the message finds a worker of other code."""

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.await_signal("go")

    handle = one.send()
    app.start()
    eventually(lambda: handle.status == "waiting")
    app.stop()
    known = app.broker.actors.pop("one")
    outbox = app.middleware.sender(app.broker).outbox(None)
    outbox.load([Outgoing("drive", handle.id, "one", one.queue_name)])
    app.store.write(outbox.stage)
    outbox.delivered()
    app.start()
    eventually(lambda: [line for line in journal if line["event"] == "drive_message_rejected"])
    app.drain()
    assert app.sql("SELECT status, hold_error, hold_until, hold_count FROM {flow_runs}") == [("waiting", None, None, 0)]
    app.stop()
    app.broker.actors["one"] = known
    handle.signal("go", 1)
    app.start()
    assert app.ended(handle) == "completed"


def test_a_middleware_that_raises_before_the_body_spends_tries_of_the_message_and_fails_the_step_at_last(
    app: Application,
) -> None:
    """NATIVE-3: an error that Dramatiq lets through before the actor is called; its own cause is on the row, not a guess."""

    class Broken(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if message.actor_name == "step":
                app.calls.append("refused")
                raise RefusedByHostError("the host's licence has run out")

    app.broker.add_middleware(Broken())
    handle = app.run(only(app, app.step("step", max_retries=1)))
    assert handle.status == "failed"
    error = handle.actions()[0].error
    assert error is not None
    assert error["message"] == "the host's licence has run out"
    assert app.calls == ["refused", "refused"]
    assert handle.actions()[0].attempts == 0


class RefusedByHostError(dramatiq.middleware.MiddlewareError):
    pass


def test_a_body_that_skips_itself_fails_its_step(app: Application) -> None:
    """NATIVE-3: SkipMessage out of the body is no success; nothing is tried again."""

    @app.actor(max_retries=3)
    def skips() -> None:
        app.calls.append("skips")
        raise SkipMessage("nothing to do")

    handle = app.run(only(app, skips))
    assert handle.status == "failed"
    error = handle.actions()[0].error
    assert error is not None
    assert error["message"] == "nothing to do"
    assert app.calls == ["skips"]


@pytest.mark.parametrize("exit_error", [SystemExit(3), GeneratorExit()], ids=["SystemExit", "GeneratorExit"])
def test_a_body_that_leaves_by_no_exception_is_a_failed_try(app: Application, exit_error: BaseException) -> None:
    """NATIVE-1: sys.exit() in a body ends neither the worker nor the step's story."""
    leaves = app.step("leaves", raises=exit_error, max_retries=1)
    worker = app.start(threads=1)
    threads = list(worker.workers)
    handle = app.run(only(app, leaves))
    assert handle.status == "failed"
    assert handle.actions()[0].tries == 2
    assert [thread for thread in threads if not thread.is_alive()] == []


@pytest.mark.parametrize("name", ["throws", "retry_when", "pipe_target", "pipe_ignore", "delay", "eta"])
def test_options_that_a_message_cannot_carry_are_refused_where_they_are_given(applications: Applications, name: str) -> None:
    """API with_options(): the error names the option and where it belongs; the run fails with it, and nothing half is left."""
    app = applications("sqlite")
    step = app.step("step")

    @app.workflow
    def wrong(flow: Flow) -> None:
        flow.action(step).with_options(**{name: (ValueError,)}).run()

    handle = app.run(wrong)
    assert handle.status == "failed"
    error = app.sql("SELECT error FROM {flow_runs}")[0][0]
    assert name in error
    assert handle.actions() == []


def test_options_that_cannot_be_encoded_are_refused_where_they_are_given(applications: Applications) -> None:
    """CODEC-2: naming the place."""
    app = applications("sqlite")
    step = app.step("step")

    @app.workflow
    def wrong(flow: Flow) -> str:
        try:
            flow.action(step).with_options(labels={1, 2}).run()
        except NotSerializableError as error:
            return str(error)
        return ""

    assert "with_options()" in app.run(wrong).result()


def test_priority_of_a_step_orders_the_queue(applications: Applications) -> None:
    """API with_options(priority=…): on a database broker a more urgent step goes first."""
    app = applications("sqlite")
    step = app.step("step")

    @app.workflow
    def one(flow: Flow, name: str, priority: int) -> None:
        flow.action(step, name).with_options(priority=priority, queue_name=app.queue + "x").run()

    app.broker.declare_queue(app.queue + "x")
    handles = [one.send(name, priority) for name, priority in (("late", 10), ("soon", -5), ("middle", 3))]
    app.start(queues={app.queue})
    eventually(lambda: all(handle.actions() for handle in handles))
    app.start(threads=1, queues={app.queue + "x"})
    for handle in handles:
        app.ended(handle)
    assert [name for _, name in app.calls] == ["soon", "middle", "late"]


def test_a_step_without_a_retry_limit_of_its_own_is_warned_about_once(applications: Applications, journal: list[Any]) -> None:
    """NATIVE-6: once per actor; not where somebody has said how often."""
    app = applications("sqlite")

    @dramatiq.actor(queue_name=app.queue)
    def default() -> None: ...

    said = app.step("said")

    @app.workflow
    def several(flow: Flow) -> None:
        flow.run(default)
        flow.run(default)
        flow.run(said)
        flow.action(default).with_options(max_retries=2).run()

    app.run(several)
    app.run(several)
    lines = [line for line in journal if line["event"] == "step_keeps_default_retries"]
    assert [line["actor"] for line in lines] == ["default"]


def test_the_original_class_is_not_needed_to_tell_errors_apart(app: Application) -> None:
    """CODEC-4: names of the class and its bases are recorded."""
    made = type("CardDeclined", (PermissionError,), {"__module__": "a.module.that.is.nowhere", "code": "E42"})
    picky = app.step("picky", raises=made("limit"))

    @app.workflow
    def branch(flow: Flow) -> list[Any]:
        try:
            flow.run(picky)
        except StepFailedError as error:
            return [error.is_a("CardDeclined"), error.is_a(OSError), error.is_a(ValueError), error.code, error.message]
        return []

    assert app.run(branch).result() == [True, True, False, "E42", "limit"]
