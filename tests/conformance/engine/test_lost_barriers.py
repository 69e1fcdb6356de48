"""Barriers that are lost, expire, fail or are never reached: the rows decide (C13, C16, C17, PAR-1, PAR-2)."""

from __future__ import annotations

from typing import Any

import pytest
from dramatiq.middleware import GroupCallbacks, default_middleware
from dramatiq.rate_limits.backends.stub import StubBackend

from dramatiq_saga import Flow
from tests.conformance.engine.test_native import Skips
from tests.conformance.engine.test_parallel import Doors, statuses
from tests.support.application import Application, Applications
from tests.support.waiting import eventually

#: Where the barrier is: in the queue's own file, in the queue's own server, in Redis, in the store behind RabbitMQ.
KINDS = ("sqlite", "postgresql", "mariadb", "redis", "rabbitmq")


@pytest.fixture(params=KINDS)
def app(request: pytest.FixtureRequest, applications: Applications) -> Application:
    return applications(request.param)


def backend_of(app: Application) -> Any:
    return next(one for one in app.broker.middleware if isinstance(one, GroupCallbacks)).rate_limiter_backend


def lose_barriers(app: Application, run: Any, how: str) -> None:
    """Delete the barriers of a run, or have their time run out."""
    if app.kind == "redis":
        client = backend_of(app).client
        (key,) = client.keys(f"{run.id}/*")
        lost = client.delete(key) if how == "deleted" else client.pexpire(key, 1)
    elif how == "deleted":
        lost = app.execute("DELETE FROM {rate_limits} WHERE id >= ? AND id < ?", f"{run.id}/", f"{run.id}0")
    else:
        lost = app.execute("UPDATE {rate_limits} SET expires_at = 1 WHERE id >= ? AND id < ?", f"{run.id}/", f"{run.id}0")
    assert lost == 1
    eventually(lambda: value_of(app, run) is None)


def value_of(app: Application, run: Any) -> int | None:
    """What a run's one barrier stands at; None once it is gone."""
    if app.kind == "redis":
        client = backend_of(app).client
        values = [client.get(key) for key in client.keys(f"{run.id}/*")]
        return next((int(value) for value in values if value is not None), None)
    rows = app.sql("SELECT value FROM {rate_limits} WHERE id >= ? AND id < ? AND expires_at > 1", f"{run.id}/", f"{run.id}0")
    return rows[0][0] if rows else None


def closed_early(app: Application, run: Any) -> bool:
    return bool(app.sql("SELECT 1 FROM {blocks} WHERE run_id = ? AND closed_early_at IS NOT NULL", run.id))


def fan_of(app: Application, doors: Doors, after: Any) -> Any:
    def fan(flow: Flow) -> Any:
        return [flow.parallel(*doors.members(flow, 3)).run(), flow.run(after)]

    return app.workflow(fan)


@pytest.mark.parametrize("how", ["deleted", "expired"])
def test_a_lost_barrier_reads_as_reached_and_releases_nothing(app: Application, how: str) -> None:
    """C17: the next member that is counted has the callback sent, while another is at work; the block waits for that one."""
    doors, after = Doors(app), app.step("after", gives="after")
    fan = fan_of(app, doors, after)
    app.start(threads=4)
    run = fan.send()
    doors.wait_inside(0, 1, 2)
    assert value_of(app, run) == 3
    doors.open(0)
    eventually(lambda: value_of(app, run) == 2)
    lose_barriers(app, run, how)
    doors.open(1)
    eventually(lambda: closed_early(app, run), because="the callback has come while a member was live")
    assert run.status == "running"
    assert app.calls == []
    doors.open(2)
    app.ended(run)
    assert run.result() == [[0, 10, 20], "after"]
    eventually(lambda: app.messages() == 0)
    assert app.calls == [("after",)]


def test_a_barrier_that_cannot_be_counted_parks_nothing(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """C17: its back end raises once, so the count is off for good and the callback never comes."""
    doors, after = Doors(app), app.step("after", gives="after")
    fan = fan_of(app, doors, after)
    app.start(threads=4)
    run = fan.send()
    doors.wait_inside(0, 1, 2)
    backend, raised = backend_of(app), []
    plain = backend.decr

    def decr(*args: Any, **kwargs: Any) -> Any:
        if not raised:
            raised.append(args)
            raise ConnectionError("the back end is away")
        return plain(*args, **kwargs)

    monkeypatch.setattr(backend, "decr", decr)
    for number in range(3):
        doors.open(number)
    app.ended(run)
    assert run.result() == [[0, 10, 20], "after"]
    eventually(lambda: value_of(app, run) == 1, because="two of three are counted, which is after their outcome")
    eventually(lambda: app.messages() == 0)
    assert len(raised) == 1
    assert not closed_early(app, run)


def test_a_callback_that_never_comes_because_a_member_failed(app: Application) -> None:
    """C13: Dramatiq counts successes only. An optional member's failure leaves the barrier above its end, and the run goes on."""
    doors, after = Doors(app), app.step("after", gives="after")

    @app.workflow
    def fan(flow: Flow) -> Any:
        members = [member.fallback_value_on_fail(-1) for member in doors.members(flow, 3)]
        return [flow.parallel(*members).run(), flow.run(after)]

    app.start(threads=4)
    run = fan.send()
    doors.wait_inside(0, 1, 2)
    doors.open(1, ValueError("no"))
    eventually(lambda: statuses(app, run)[1] == "optional_failed")
    doors.open(0)
    doors.open(2)
    app.ended(run)
    assert run.result() == [[0, -1, 20], "after"]
    eventually(lambda: value_of(app, run) == 1, because="two of three are counted, which is after their outcome")


class NoBarriers(StubBackend):
    """A back end that is away."""

    def add(self, key: str, value: int, ttl: int) -> bool:
        raise ConnectionError("the back end is away")


class Counting(StubBackend):
    """A host's own back end, which notes the barriers that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int, int]] = []

    def add(self, key: str, value: int, ttl: int) -> bool:
        self.made.append((key, value, ttl))
        return bool(super().add(key, value, ttl))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_barrier_that_cannot_be_made_costs_the_callback_alone(kind: str, applications: Applications) -> None:
    """C17, PAR-1: the block is sent all the same, each message by itself."""
    app = applications(kind, middleware=[*(known() for known in default_middleware), GroupCallbacks(NoBarriers())])
    doors, after = Doors(app), app.step("after", gives="after")
    for number in range(3):
        doors.open(number)
    assert app.run(fan_of(app, doors, after)).result() == [[0, 10, 20], "after"]


@pytest.mark.parametrize("kind", ["sqlite", "stub"])
def test_a_hosts_own_barriers_are_used_with_their_time_to_live(kind: str, applications: Applications) -> None:
    """PAR-1: one barrier for the block, none for a message by itself."""
    backend = Counting()
    app = applications(kind, middleware=[*(known() for known in default_middleware), GroupCallbacks(backend, barrier_ttl=5000)])
    doors, after = Doors(app), app.step("after", gives="after")
    for number in range(3):
        doors.open(number)
    run = app.run(fan_of(app, doors, after))
    assert run.result() == [[0, 10, 20], "after"]
    ((key, size, ttl),) = backend.made
    assert key.startswith(f"{run.id}/1/")
    assert (size, ttl) == (3, 5000)


def test_a_barrier_in_the_stores_database_is_made_with_the_block_or_not_at_all(applications: Applications) -> None:
    """PAR-1, DRIVE-3: in one transaction with the rows and the messages of its members."""
    app = applications("sqlite")
    member = app.step("member")

    @app.workflow
    def fan(flow: Flow) -> None:
        flow.parallel(flow.action(member, 1), flow.action(member, 2)).run()

    written: list[list[str]] = []
    plain = app.store.write

    def write(operation: Any) -> Any:
        def watched(tx: Any) -> Any:
            statements: list[str] = []
            run = tx.run

            class Watching:
                def __getattr__(self, name: str) -> Any:
                    return getattr(tx, name)

                def run(self, sql: str, params: Any = ()) -> int:
                    statements.append(sql)
                    return int(run(sql, params))

            value = operation(Watching())
            written.append(statements)
            return value

        return plain(watched)

    app.store.write = write  # type: ignore[method-assign]
    run = app.run(fan)
    assert run.status == "completed"
    (decision,) = [statements for statements in written if any("INSERT INTO {blocks}" in sql for sql in statements)]
    assert sum("INSERT INTO {rate_limits}" in sql for sql in decision) == 1
    assert sum("INSERT INTO {action_runs}" in sql for sql in decision) == 2


@pytest.mark.parametrize("kind", ["sqlite", "redis", "stub"])
@pytest.mark.parametrize("optional", [False, True], ids=["hard", "optional"])
def test_every_way_in_which_a_member_can_end_counts_towards_the_join(
    kind: str, optional: bool, applications: Applications
) -> None:
    """C13, NATIVE-3: a success, tries that are spent, a skip, a message too old, an actor that no worker knows. Dramatiq counts the
    success alone."""
    app = applications(kind)
    app.broker.middleware.insert(0, Skips("skipped"))
    ways = {
        "succeeds": app.step("succeeds", gives="fine"),
        "fails": app.step("fails", raises=ValueError("no"), max_retries=1),
        "skipped": app.step("skipped"),
        "too_old": app.step("too_old", max_age=40),
        "unknown": app.step("unknown"),
    }
    after, late = app.step("after", gives="after"), app.queue + "x"

    @app.workflow
    def fan(flow: Flow) -> Any:
        members = [flow.action(actor).with_options(queue_name=late) for actor in ways.values()]
        if optional:
            members = [member.continue_on_failure() for member in members]
        return [flow.parallel(*members).wait_all_then_fail().run(), flow.run(after)]

    app.broker.declare_queue(late)
    run = fan.send()
    app.start(queues={app.queue})
    row = eventually(lambda: next(iter(run.actions()), None))
    eventually(lambda: app.engine.now() - row.created_at > 60)
    del app.broker.actors["unknown"]
    app.start(queues={late})
    assert app.ended(run) == ("completed" if optional else "failed")
    bad = "optional_failed" if optional else "failed"
    assert statuses(app, run)[:5] == ["completed", bad, bad, bad, bad]
    errors = [(step.error or {}).get("type", "").rpartition(".")[2] for step in run.actions()[:5]]
    assert errors == ["", "ValueError", "MessageSkippedError", "MessageTooOldError", "UnknownActorError"]
    if optional:
        assert run.result() == [["fine", None, None, None, None], "after"]
