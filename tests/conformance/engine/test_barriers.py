"""Whose ``GroupCallbacks`` a broker has once SagaMiddleware is on it, and where its barriers are (PAR-1)."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import GroupCallbacks, default_middleware
from dramatiq.rate_limits.backends import RedisBackend
from dramatiq.rate_limits.backends.stub import StubBackend

from dramatiq_saga import Flow, SagaMiddleware
from dramatiq_saga.backends import DatabaseRateLimiterBackend
from dramatiq_saga.barriers import OwnGroupCallbacks
from dramatiq_saga.errors import MiddlewareOrderError
from dramatiq_saga.middleware import check_order
from tests.support.application import Application, Applications
from tests.support.waiting import eventually

KINDS = ("sqlite", "postgresql", "mariadb", "redis", "rabbitmq", "stub")


def group_callbacks(app: Application) -> list[GroupCallbacks]:
    return [one for one in app.broker.middleware if isinstance(one, GroupCallbacks)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_ordinary_actors_calls_back_without_a_middleware_of_its_hosts(kind: str, applications: Applications) -> None:
    """PAR-1: it is there before a worker takes its first message, once, in front of ours."""
    app = applications(kind)
    member = app.step("member")
    done = app.step("done")
    assert group_callbacks(app) == []
    app.start()
    (added,) = group_callbacks(app)
    expected = RedisBackend if kind == "redis" else DatabaseRateLimiterBackend
    assert type(added.rate_limiter_backend) is expected
    check_order(app.broker, app.middleware)
    group = dramatiq.group([member.message(n) for n in range(3)])
    group.add_completion_callback(done.message())
    group.run()
    eventually(lambda: ("done",) in app.calls)
    assert sorted(app.calls)[1:] == [("member", 0), ("member", 1), ("member", 2)]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_sender_has_it_once_it_has_sent_a_run(kind: str, applications: Applications) -> None:
    """PAR-1: who only sends needs barriers too."""
    app = applications(kind)
    step = app.step("step")

    @app.workflow
    def one(flow: Flow) -> Any:
        return flow.run(step)

    one.send()
    one.send()
    assert [type(added) for added in group_callbacks(app)] == [OwnGroupCallbacks]


def test_a_hosts_own_is_used_as_it_is(applications: Applications) -> None:
    """PAR-1"""
    theirs = GroupCallbacks(StubBackend(), barrier_ttl=5000)
    app = applications("sqlite", middleware=[*(middleware() for middleware in default_middleware), theirs])
    app.start()
    assert group_callbacks(app) == [theirs]


def test_a_hosts_that_comes_later_takes_the_place_of_ours(applications: Applications) -> None:
    """PAR-1: two would count every member twice. In the right place only."""
    app = applications("sqlite")
    assert app.engine is not None
    assert [type(one) for one in group_callbacks(app)] == [OwnGroupCallbacks]
    theirs = GroupCallbacks(StubBackend())
    app.broker.add_middleware(theirs, before=SagaMiddleware)
    app.start()
    assert group_callbacks(app) == [theirs]


def test_a_hosts_that_comes_after_ours_is_refused(applications: Applications) -> None:
    app = applications("sqlite")
    app.broker.add_middleware(GroupCallbacks(StubBackend()))
    with pytest.raises(MiddlewareOrderError, match="GroupCallbacks"):
        check_order(app.broker, app.middleware)
