"""CTX-1: what is captured when a run is sent, and where it is restored and undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dramatiq
import pytest
import structlog

from dramatiq_saga import Flow, NotSerializableError, Settings, current_step, get_flow
from dramatiq_saga.codec import TaggedJSONEncoder
from tests.support.application import Application, Applications
from tests.support.waiting import eventually

tenant: ContextVar[str | None] = ContextVar("tenant", default=None)


@contextmanager
def as_tenant(captured: str) -> Iterator[None]:
    token = tenant.set(captured)
    try:
        yield
    finally:
        tenant.reset(token)


def undone_by_a_function(captured: str) -> Callable[[], None]:
    before = tenant.get()
    tenant.set(captured)
    return lambda: tenant.set(before) and None


RESTORES = [as_tenant, undone_by_a_function, tenant.set]


def context(**keys: Any) -> Settings:
    return Settings.from_mapping({"context": keys})


def tenants(restore: Any = as_tenant) -> Settings:
    return context(capture=tenant.get, restore=restore)


def everywhere(app: Application) -> Any:
    """A workflow that notes the tenant in every piece of code, and fails, so that it is undone."""

    @app.actor
    def step(n: int) -> int:
        app.calls.append(("step", tenant.get()))
        return n

    @app.actor
    def undo(n: int) -> None:
        app.calls.append(("undo", tenant.get()))

    @app.actor
    def stranger() -> None:
        app.calls.append(("stranger", tenant.get()))

    @app.actor
    def fail() -> None:
        raise ValueError("no")

    def built(n: int) -> Any:
        app.calls.append(("built", tenant.get()))
        return undo.message(n)

    @app.workflow
    def order(flow: Flow) -> None:
        app.calls.append(("function", tenant.get()))
        flow.side_effect("look", lambda: app.calls.append(("side effect", tenant.get())))
        flow.action(step, 1).compensate_with(built).run()
        flow.run(fail)

    return order, stranger


@pytest.mark.parametrize("restore", RESTORES, ids=["context manager", "function", "token"])
def test_every_piece_of_code_runs_in_its_runs_context_and_the_thread_ends_as_it_began(
    restore: Any, applications: Applications
) -> None:
    """CTX-1: function, side effect, step, a compensation's builder and its body; whatever was there before is there after."""
    app = applications("sqlite", settings=tenants(restore))
    order, stranger = everywhere(app)
    handles = []
    for name in ("red", "blue"):
        token = tenant.set(name)
        handles.append(order.send())
        tenant.reset(token)
    with app.working(threads=1):
        for handle in handles:
            assert app.ended(handle) == "failed"
        app.drain()
        stranger.send()
        app.drain()
    assert app.calls.pop() == ("stranger", None)
    for name in ("red", "blue"):
        assert {what for what, seen in app.calls if seen == name} == {"function", "side effect", "step", "built", "undo"}
    assert {seen for _, seen in app.calls} == {"red", "blue"}


def test_a_run_sent_in_any_setting_keeps_its_context(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    app.middleware.settings = Settings.from_mapping(
        {"context": {"capture": lambda: {"tenant": "red"}, "restore": lambda c: as_tenant(c["tenant"])}},
        base=app.middleware.settings,
    )
    order, _ = everywhere(app)
    handle = app.run(order)
    app.drain()
    assert handle.status == "failed"
    assert {seen for _, seen in app.calls} == {"red"}


def test_run_sync_runs_in_the_captured_context_and_gives_the_callers_back(applications: Applications) -> None:
    """CTX-1, SYNC-1: also where a body runs another workflow to its end."""
    app = applications("sqlite", settings=tenants())
    seen: list[Any] = []

    @app.actor
    def step() -> None:
        seen.append(("inner", tenant.get()))

    @app.workflow
    def inner(flow: Flow) -> None:
        flow.run(step)

    @app.actor
    def nesting() -> None:
        tenant.set("green")  # of the body's own, undone with it
        inner.run_sync()
        seen.append(("outer", tenant.get()))

    @app.workflow
    def outer(flow: Flow) -> None:
        flow.run(nesting)

    token = tenant.set("red")
    outer.run_sync()
    assert tenant.get() == "red"
    tenant.reset(token)
    assert seen == [("inner", "green"), ("outer", "green")]


def test_a_run_that_is_sent_from_a_step_takes_that_steps_context_along(applications: Applications) -> None:
    app = applications("sqlite", settings=tenants())
    seen: list[Any] = []

    @app.workflow
    def second(flow: Flow) -> None:
        seen.append(tenant.get())

    @app.actor
    def starter() -> str:
        return str(second.send().id)

    @app.workflow
    def first(flow: Flow) -> None:
        flow.run(starter)

    token = tenant.set("red")
    handle = first.send()
    tenant.reset(token)
    with app.working():
        app.ended(handle)
        app.drain()
    assert seen and set(seen) == {"red"}


def test_the_function_can_read_what_was_captured(applications: Applications) -> None:
    """CTX-1: with restoring off too, and as a value of its own each time."""
    app = applications("sqlite", settings=context(capture=lambda: {"tenant": "red", "more": [1]}))
    step = app.step("step")

    @app.workflow
    def order(flow: Flow) -> Any:
        flow.context["more"].append(2)
        flow.run(step)
        return flow.context

    @app.workflow(context=None)
    def plain(flow: Flow) -> Any:
        return [flow.context]

    assert app.run(order).result() == {"tenant": "red", "more": [1]}
    assert app.run(plain).result() == [None]


def test_a_restore_that_raises_in_a_drive_holds_the_run_until_it_works(applications: Applications) -> None:
    """CTX-1, HISTORY-1: nobody's failure; nothing is rolled back, and the step's outcome stands."""
    broken = [False]
    app = applications(
        "sqlite", settings=context(capture=lambda: "red", restore=lambda c: as_tenant(c) if not broken[0] else 1 / 0)
    )

    @app.actor
    def step() -> None:
        app.calls.append("step")
        broken[0] = True

    @app.workflow
    def order(flow: Flow) -> str | None:
        flow.run(step)
        return tenant.get()

    with app.working():
        handle = order.send()
        app.drain()
        assert handle.status == "waiting" and handle.actions()[0].status == "completed"
        (held,) = app.sql("SELECT hold_error FROM {flow_runs} WHERE id = ?", handle.id)
        assert "ZeroDivisionError" in held[0]
        broken[0] = False
        handle.kick()
        assert app.ended(handle) == "completed"
    assert handle.result() == "red" and app.calls == ["step"]


def test_a_restore_that_raises_while_a_rollback_is_planned_raises_to_the_operator(applications: Applications) -> None:
    """COMP-3: the run stays as found."""
    broken = [False]
    app = applications(
        "sqlite", settings=context(capture=lambda: "red", restore=lambda c: as_tenant(c) if not broken[0] else 1 / 0)
    )
    undo = app.step("undo")

    @app.actor
    def step() -> int:
        broken[0] = True
        return 1

    wait = app.step("wait")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(step).compensate_with(lambda n: undo.message(n)).run()
        flow.run(wait)

    with app.working():
        handle = order.send()
        app.drain()
        with pytest.raises(ZeroDivisionError):
            handle.compensate()
        assert handle.status == "waiting"
        broken[0] = False
        assert handle.compensate()
        assert app.ended(handle) == "cancelled"
    assert app.calls == [("undo", 1)]


def test_children_inherit_the_context_whatever_their_own_workflow_says(applications: Applications) -> None:
    """CTX-1, CHILD-3: while they run, and when the parent's end closes them; what captures is not asked."""
    captures: list[int] = []
    app = applications("sqlite", settings=context(capture=lambda: captures.append(1) or tenant.get(), restore=tenant.set))

    @app.actor
    def work(what: str) -> None:
        app.calls.append((what, tenant.get()))

    @app.workflow(context="gold")
    def child(flow: Flow) -> None:
        app.calls.append(("child", tenant.get()))
        flow.action(work, "in the child").compensate_with(work, "undone in the child").run()
        flow.await_signal("go")

    @app.workflow
    def parent(flow: Flow) -> None:
        flow.child(child).close_policy("cancel").run()

    token = tenant.set("red")
    handle = parent.send()
    tenant.reset(token)
    with app.working():
        eventually(lambda: ("in the child", "red") in app.calls, because="the child is at work")
        (link,) = handle.children()
        eventually(lambda: get_flow(link.child_id).status == "waiting", because="the child waits")
        assert handle.compensate()
        assert app.ended(handle) == "cancelled"
        assert app.ended(get_flow(link.child_id)) == "cancelled"
        app.drain()
    assert {what for what, _ in app.calls} == {"child", "in the child", "undone in the child"}
    assert {seen for _, seen in app.calls} == {"red"}
    assert captures == [1]


# --- capturing -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_stored_is_refused_at_the_call_that_sends(applications: Applications) -> None:
    """CODEC-2: nothing is written."""
    app = applications("sqlite", settings=context(capture=lambda: {"lock": [threading.Lock()]}))

    @app.workflow
    def order(flow: Flow) -> None: ...

    with pytest.raises(NotSerializableError) as refused:
        order.send()
    assert refused.value.path == "the run's context['lock'][0]"
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(0,)]


def test_a_capture_that_raises_is_the_callers_error(applications: Applications) -> None:
    """CTX-1: an error, never skipped."""
    unset: ContextVar[str] = ContextVar("unset")
    app = applications("sqlite", settings=context(capture=unset.get))

    @app.workflow
    def order(flow: Flow) -> None: ...

    with pytest.raises(LookupError) as raised:
        order.send()
    assert "captures a run's context" in raised.value.__notes__[0]
    with pytest.raises(LookupError):
        order.run_sync()
    assert app.sql("SELECT COUNT(*) FROM {flow_runs}") == [(0,)]


@pytest.mark.parametrize("own", ["gold", lambda: "gold"], ids=["value", "function"])
def test_a_workflows_own_context_stands_in_for_the_settings(own: Any, applications: Applications) -> None:
    app = applications("sqlite", settings=tenants())
    seen: list[Any] = []

    @app.workflow(context=own)
    def order(flow: Flow) -> None:
        seen.append(tenant.get())

    @app.workflow(context=None)
    def plain(flow: Flow) -> None:
        seen.append(tenant.get())

    token = tenant.set("red")
    handle = order.send()
    tenant.reset(token)
    with app.working():
        app.ended(handle)
    assert seen == ["gold"]
    plain.run_sync()
    assert seen == ["gold", None]


def test_the_call_that_sends_may_give_the_context_itself(applications: Applications) -> None:
    """In place of the workflow's own and of what would be captured, which is not asked."""
    app = applications("sqlite", settings=context(capture=lambda: 1 / 0, restore=tenant.set))

    @app.workflow
    def order(flow: Flow) -> Any:
        return [flow.context, tenant.get()]

    @app.workflow(context="gold")
    def gold(flow: Flow) -> Any:
        return [flow.context, tenant.get()]

    with app.working():
        for declared in (order, gold):
            handle = declared.send_with_options(context="red")
            app.ended(handle)
            assert handle.result() == ["red", "red"]
        nothing = order.send_with_options(context=None)
        app.ended(nothing)
        assert nothing.result() == [None, None]


def test_a_run_that_took_nothing_along_has_nothing_restored(applications: Applications) -> None:
    """It was sent before the hooks were there, or by a process without them."""
    calls: list[Any] = []
    app = applications("sqlite", settings=context(restore=calls.append))
    step = app.step("step")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(step)

    app.run(order)
    assert calls == [] and app.sql("SELECT context FROM {flow_runs}") == [(None,)]


def test_a_context_is_stored_by_the_encoder(applications: Applications) -> None:
    dramatiq.set_encoder(TaggedJSONEncoder())
    seen: list[Any] = []
    app = applications("sqlite", settings=context(capture=lambda: ("red", {1, 2}), restore=seen.append))
    step = app.step("step")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(step)

    app.run(order)
    assert seen and all(one == ("red", {1, 2}) for one in seen)


# --- hooks that fail -------------------------------------------------------------------------------------------------


def failing_in_steps(times: int) -> Callable[[Any], Any]:
    left = [times]

    def restore(captured: Any) -> Any:
        if current_step() is not None and left[0]:
            left[0] -= 1
            raise LookupError(f"no tenant {captured}")
        return as_tenant(captured)

    return restore


def test_a_restore_that_raises_is_a_failed_try_of_the_step(applications: Applications) -> None:
    """CTX-1, NATIVE-1: the body does not run without its context; Dramatiq tries again."""
    app = applications("sqlite", settings=context(capture=lambda: "red", restore=failing_in_steps(2)))
    step = app.step("step", max_retries=2)

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(step)

    handle = app.run(order)
    assert handle.status == "completed" and handle.actions()[0].attempts == 3
    assert app.calls == [("step",)]


def test_a_restore_that_never_works_fails_the_step_with_its_error(applications: Applications) -> None:
    app = applications("sqlite", settings=context(capture=lambda: "red", restore=failing_in_steps(9)))
    step = app.step("step")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(step)

    handle = app.run(order)
    assert handle.status == "failed" and app.calls == []
    assert "no tenant red" in str(handle.actions()[0].error)


@pytest.mark.parametrize(
    ("returned", "words"),
    [(3, "context.restore returned int"), ((n for n in ()), "decorate it with contextlib.contextmanager")],
    ids=["number", "generator"],
)
def test_a_restore_that_does_not_say_how_it_is_undone_is_an_error(
    returned: Any, words: str, applications: Applications
) -> None:
    app = applications(
        "sqlite", settings=context(capture=lambda: "red", restore=lambda c: returned if current_step() else None)
    )
    step = app.step("step")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(step)

    handle = app.run(order)
    assert handle.status == "failed" and app.calls == []
    assert words in str(handle.actions()[0].error)


def test_an_error_while_undoing_changes_no_outcome_and_is_logged(
    applications: Applications, journal: list[dict[str, Any]]
) -> None:
    def restore(captured: Any) -> Callable[[], None]:
        def undo() -> None:
            raise RuntimeError("stuck")

        return undo

    app = applications("sqlite", settings=context(capture=lambda: "red", restore=restore))
    good, bad = app.step("good", gives=1), app.step("bad", raises=ValueError("its own"))

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(good)
        flow.run(bad)

    handle = app.run(order)
    assert [(a.status, a.attempts) for a in handle.actions()] == [("completed", 1), ("failed", 1)]
    assert "its own" in str(handle.actions()[1].error)
    lines = [line for line in journal if line["event"] == "context_not_undone"]
    assert {line["run_id"] for line in lines} == {handle.id} and {line["log_level"] for line in lines} == {"error"}


def test_a_context_manager_sees_how_a_body_ended_and_cannot_hide_it(applications: Applications) -> None:
    seen: list[Any] = []

    class Watch:
        def __enter__(self) -> None: ...

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            if in_step:
                seen.append((kind, str(error), trace is not None))
            return True

    in_step: list[int] = []
    app = applications("sqlite", settings=context(capture=lambda: "red", restore=lambda c: Watch()))

    @app.actor
    def step(fails: bool) -> None:
        in_step.append(1)
        if fails:
            raise ValueError("no")

    @app.workflow
    def order(flow: Flow, fails: bool) -> None:
        in_step.clear()
        flow.run(step, fails)

    assert app.run(order, False).status == "completed"
    assert app.run(order, True).status == "failed"
    assert (ValueError, "no", True) in seen and (None, "None", False) in seen


def test_an_interrupted_body_leaves_no_context_behind(applications: Applications) -> None:
    """CTX-1, FENCE-5: a time limit in the middle of a body; the same thread's next message has no tenant."""
    app = applications("sqlite", settings=tenants())
    started = threading.Event()

    @app.actor(time_limit=50)
    def slow() -> None:
        started.set()
        while True:
            threading.Event().wait(0.01)

    stranger = app.actor(lambda: app.calls.append(tenant.get()), actor_name="stranger")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.run(slow)

    token = tenant.set("red")
    handle = order.send()
    tenant.reset(token)
    with app.working(threads=1, time_limits=True):
        assert app.ended(handle) == "failed"
        stranger.send()
        app.drain()
    assert started.is_set() and app.calls == [None]
    assert "TimeLimitExceeded" in str(handle.actions()[0].error)


# --- context.auto ----------------------------------------------------------------------------------------------------


def test_automatic_context_carries_structlogs_variables(applications: Applications) -> None:
    """CTX-1, ``context.auto``: what the encoder does not carry travels as text, for it is meant for log lines."""
    app = applications("sqlite", settings=context(auto=True))
    seen: list[Any] = []

    def look() -> None:
        seen.append(structlog.contextvars.get_contextvars())

    step = app.actor(look, actor_name="step")
    stranger = app.actor(look, actor_name="stranger")

    @app.workflow
    def order(flow: Flow) -> None:
        look()
        flow.run(step)

    with structlog.contextvars.bound_contextvars(request="r-1", odd={1}):
        handle = order.send()
    with app.working(threads=1):
        app.ended(handle)
        app.drain()
        assert seen and all(one == {"request": "r-1", "odd": "{1}"} for one in seen)
        seen.clear()
        stranger.send()
        app.drain()
        eventually(lambda: seen, because="the stranger has run")
    assert seen == [{}]


def test_automatic_context_stores_nothing_where_nothing_is_bound(applications: Applications) -> None:
    app = applications("sqlite", settings=context(auto=True))

    @app.workflow
    def order(flow: Flow) -> None: ...

    order.send()
    assert app.sql("SELECT context FROM {flow_runs}") == [(None,)]
