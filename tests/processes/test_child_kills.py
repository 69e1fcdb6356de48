"""A tree of three levels whose workers are killed: while it completes, and while it is closed from above (CHILD-1, CHILD-3).

``voyage`` waits for ``leg``, which waits for ``harbour``; each has a step before that which is to be undone. Workers die at the points
of ``kill_app.py``; others are started on what they left behind.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.test_kills import (  # noqa: F401  (fixtures)
    Street,
    make_street,
    server_street,
    street,
    wide_street,
)
from tests.support.effects import EffectLog
from tests.support.gates import Gates
from tests.support.waiting import eventually

UNDONE = {"alight": 1, "refund": 1, "unreserve": 1}


def tree(street: Street) -> dict[str, str]:  # noqa: F811
    """Every run there is: its workflow and its status."""
    return dict(street.all("SELECT workflow, status FROM {flow_runs}"))


def half_open(street: Street) -> list[Any]:  # noqa: F811
    """Links that are open at one end only: by construction, there are none."""
    return street.all(
        "SELECT c.run_id, c.sequence, p.status, f.status FROM {children} c JOIN {flow_runs} p ON p.id = c.run_id "
        "JOIN {flow_runs} f ON f.id = c.child_id WHERE c.ended_at IS NULL AND (f.ended_at IS NOT NULL OR p.ended_at IS NOT NULL "
        "OR p.status = 'rolling_back')"
    )


def settled(street: Street) -> bool:  # noqa: F811
    return not street.all("SELECT 1 FROM {flow_runs} WHERE ended_at IS NULL")


def wait_settled(street: Street) -> None:  # noqa: F811
    eventually(lambda: settled(street), 40, because=f"the whole tree ends (it is {tree(street)})")
    assert half_open(street) == []


def killed(street: Street, effects: EffectLog, point: str, order: str = "short") -> str:  # noqa: F811
    """A voyage whose worker died at that point."""
    first = street.worker(die_at=point)
    run: str = street.shop.voyage.send(order).id
    eventually(lambda: effects.count("killed"), because=f"a worker dies at {point!r}")
    first.wait()
    assert half_open(street) == []
    return run


# --- completing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "handed over:leg", "outcome written:board", "outcome committed:board", "outcome written:charge", "outcome committed:charge",
        "outcome written:long", "outcome committed:long", "handed over:voyage", "acknowledging:long",
        pytest.param("decision committed", marks=pytest.mark.claims_alone),  # with locks, the dead worker's is held for longer
    ],
)  # fmt: skip
def test_a_kill_costs_no_child_and_starts_none_twice(street: Street, effects: EffectLog, point: str) -> None:  # noqa: F811
    """CHILD-1, DRIVE-3: run, link and message are one transaction, and so are a child's end and its parent's wake."""
    run = killed(street, effects, point)
    street.worker()
    wait_settled(street)
    assert tree(street) == dict.fromkeys(("voyage", "leg", "harbour"), "completed")
    assert street.all("SELECT result IS NOT NULL FROM {flow_runs} WHERE id = ?", run) in ([(1,)], [(True,)])
    assert street.all("SELECT COUNT(*) FROM {flow_runs}") == [(3,)]
    again = {"long": 2} if point == "outcome written:long" else {}
    again |= {"board": 2} if point == "outcome written:board" else {}
    again |= {"charge": 2} if point == "outcome written:charge" else {}
    assert {name: effects.count(name) for name in ("board", "charge", "reserve", "long", "ship")} == {
        "board": 1, "charge": 1, "reserve": 1, "long": 1, "ship": 1, **again,
    }  # fmt: skip
    eventually(lambda: not street.all("SELECT 1 FROM {messages}"), because="nothing is left in the queue")


@pytest.mark.parametrize("point", ["outcome committed:board", "outcome committed:charge", "outcome committed:long"])
def test_a_kill_between_a_commit_and_its_messages_costs_no_child(
    wide_street: Street,  # noqa: F811
    effects: EffectLog,
    point: str,
) -> None:
    """CHILD-1, DRIVE-3: with the queue in Redis a child's first message, and its parent's wake, are sent by the redelivery of the
    message at hand; repair is off."""
    killed(wide_street, effects, point)
    wide_street.worker()
    wait_settled(wide_street)
    assert tree(wide_street) == dict.fromkeys(("voyage", "leg", "harbour"), "completed")


# --- closing -----------------------------------------------------------------------------------------------------------


def closed(street: Street, effects: EffectLog, gates: Gates, *, point: str | None, how: str) -> None:  # noqa: F811
    """A voyage that is ended from outside while its harbour's step is at work, and whose worker dies while it closes what is below."""
    first = street.worker(die_at=point)
    handle = street.shop.voyage.send("stays")
    gates.wait_reached("long-stays")
    assert getattr(handle, how)("storm")
    assert half_open(street) == []
    if point is not None:
        eventually(lambda: effects.count("killed"), because=f"a worker dies at {point!r}")
        first.wait()
        assert half_open(street) == []
        street.worker()
    wait_settled(street)


@pytest.mark.parametrize(
    "point", ["closing written", "closing committed", "outcome committed:refund", "outcome committed:unreserve", None]
)
def test_a_kill_while_a_tree_is_closed_leaves_nothing_of_it_at_work(
    street: Street,  # noqa: F811
    effects: EffectLog,
    gates: Gates,
    point: str | None,
) -> None:
    """CHILD-3: rolled back from the top, every level undone once, whatever dies in between."""
    closed(street, effects, gates, point=point, how="compensate")
    assert tree(street) == dict.fromkeys(("voyage", "leg", "harbour"), "cancelled")
    assert {name: effects.count(f"{name} ended") for name in UNDONE} == UNDONE
    gates.open("long-stays")
    eventually(lambda: not street.all("SELECT 1 FROM {messages} WHERE state <> 3"), because="nothing is left in the queue")
    assert tree(street) == dict.fromkeys(("voyage", "leg", "harbour"), "cancelled")


@pytest.mark.parametrize("point", ["closing written", "closing committed"])
def test_a_kill_while_a_tree_is_cancelled_undoes_nothing(
    street: Street,  # noqa: F811
    effects: EffectLog,
    gates: Gates,
    point: str,
) -> None:
    """CHILD-3: the parent was cancelled without a rollback, and so is all that is under it."""
    closed(street, effects, gates, point=point, how="cancel")
    assert tree(street) == dict.fromkeys(("voyage", "leg", "harbour"), "cancelled")
    assert street.all("SELECT COUNT(*) FROM {compensation_runs}") == [(0,)]


@pytest.mark.parametrize("point", ["closing written", "closing committed", "outcome committed:refund"])
def test_a_kill_while_a_tree_is_closed_over_redis_leaves_nothing_of_it_at_work(
    wide_street: Street,  # noqa: F811
    effects: EffectLog,
    gates: Gates,
    point: str,
) -> None:
    """CHILD-3, DRIVE-3: the requests that were committed and not sent go with the redelivery of the message at hand."""
    closed(wide_street, effects, gates, point=point, how="compensate")
    assert tree(wide_street) == dict.fromkeys(("voyage", "leg", "harbour"), "cancelled")
    assert {name: effects.count(f"{name} ended") for name in UNDONE} == UNDONE


@pytest.mark.parametrize("point", ["closing written", "closing committed"])
def test_a_kill_while_a_tree_is_closed_on_a_server_leaves_nothing_of_it_at_work(
    server_street: Street,  # noqa: F811
    effects: EffectLog,
    gates: Gates,
    point: str,
) -> None:
    """CHILD-3 on MariaDB."""
    closed(server_street, effects, gates, point=point, how="compensate")
    assert tree(server_street) == dict.fromkeys(("voyage", "leg", "harbour"), "cancelled")
    assert {name: effects.count(f"{name} ended") for name in UNDONE} == UNDONE
