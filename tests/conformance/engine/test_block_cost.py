"""What a parallel block costs: it grows with its members, not with their square (PAR-4, C49).

Statements are counted on the writer's own connection of one SQLite file; nothing here looks at a clock.
"""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga import Flow
from tests.conformance.engine.test_budget import Cost
from tests.support.application import Application, Applications

#: Write transactions per member, its barrier's count included: claim, outcome, count, and its share of a reservation.
TRANSACTIONS_PER_MEMBER = 3.4
#: Statements in them, the insertion of row and message included.
STATEMENTS_PER_MEMBER = 14.0
#: The same for a member that was held back: choosing it takes a second look.
WHEN_HELD_BACK = (3.5, 16.0)


def cost_of(app: Application, cost: Cost, declared: Any, *args: Any) -> tuple[int, int]:
    cost.reset()
    handle = declared.send(*args)
    assert app.ended(handle, 120) == "completed"
    app.drain(120)
    assert app.sql("SELECT revision FROM {flow_runs} WHERE id = ?", handle.id) == [(2,)]  # two decisions, whatever the size
    return cost.transactions, len(cost.work)


@pytest.mark.claims_alone
@pytest.mark.parametrize("limit", [None, 5])
def test_a_thousand_members_cost_ten_times_what_a_hundred_cost(applications: Applications, limit: int | None) -> None:
    """PAR-4: linear work; the block is driven when it begins and when its last member is settled."""
    app = applications("sqlite")
    member = app.step("member", gives=1)

    @app.workflow
    def fan(flow: Flow, count: int) -> int:
        block = flow.parallel(*(flow.action(member, number) for number in range(count)))
        return sum((block if limit is None else block.max_in_flight(limit)).run())

    app.start(threads=1)
    cost = Cost(app)
    cost_of(app, cost, fan, 10)
    small, large = cost_of(app, cost, fan, 100), cost_of(app, cost, fan, 1000)
    per_member = [(there - here) / 900 for here, there in zip(small, large, strict=True)]
    print("transactions and statements per member:", per_member)
    most = (TRANSACTIONS_PER_MEMBER, STATEMENTS_PER_MEMBER) if limit is None else WHEN_HELD_BACK
    assert per_member[0] <= most[0], "\n".join(cost.statements[-60:])
    assert per_member[1] <= most[1], "\n".join(cost.statements[-60:])
    for here, there in zip(small, large, strict=True):
        assert there <= 10.5 * here, (small, large)
    assert len(app.calls) == 1110


def test_a_block_sends_one_message_per_member(applications: Applications) -> None:
    """PAR-1, PAR-4: and one callback; they hold ids, and every statement that looks for members uses an index."""
    app = applications("sqlite")
    member = app.step("member", gives=1)
    payload = "x" * 5000

    @app.workflow
    def fan(flow: Flow) -> int:
        return sum(flow.parallel(*(flow.action(member, number, payload) for number in range(50))).run())

    cost = Cost(app)
    app.start(threads=1)
    run = fan.send()
    app.ended(run)
    app.drain()
    stored = [statement for statement in cost.work if "saga_messages" in statement and statement.startswith("INSERT")]
    # one drive, whose row becomes the first member, and the callback
    assert len(stored) == 51
    assert max(map(len, stored)) < 3000
    assert run.result() == 50


@pytest.mark.parametrize(
    ("question", "index"),
    [
        ("_ANOTHER_AT_WORK", "action_block"),
        ("_AT_WORK", "action_block"),
        ("_HELD_BACK", "action_block"),
        ("_OPEN_STEP", "action_block"),
        ("_OPEN_CHILD", "child_open"),
    ],
)
def test_each_look_at_a_block_is_answered_by_an_index(lite: Application, question: str, index: str) -> None:
    """PAR-4, C56: no look at one member's siblings scans the run."""
    from dramatiq_saga.engine import blocks

    sql = getattr(blocks, question)
    plan = [row[3] for row in lite.sql("EXPLAIN QUERY PLAN " + sql, *("1",) * sql.count("?"))]
    assert any(f"saga_{index}" in step for step in plan), plan
    assert not any("TEMP B-TREE" in step for step in plan), plan


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb", "redis"])
def test_two_thousand_members_in_one_block(kind: str, applications: Applications) -> None:
    """C49: more rows than fit a list of parameters anywhere."""
    app = applications(kind)
    double = app.actor(lambda n: 2 * n, actor_name="double")

    @app.workflow
    def fan(flow: Flow) -> Any:
        return flow.parallel(*(flow.action(double, number) for number in range(2000))).run()

    app.start(threads=8)
    run = fan.send()
    assert app.ended(run, 120) == "completed"
    assert run.result() == [2 * number for number in range(2000)]
    assert app.sql("SELECT revision FROM {flow_runs} WHERE id = ?", run.id)[0][0] <= 3


def test_a_block_of_children_is_driven_when_it_begins_and_when_the_last_has_ended(applications: Applications) -> None:
    """PAR-1, PAR-4, CHILD-1: linear as well; a child's end that leaves others open is recorded and seen at once."""
    app = applications("sqlite")

    @app.workflow
    def small(flow: Flow, number: int) -> int:
        return number

    @app.workflow
    def fan(flow: Flow, count: int) -> int:
        return sum(flow.parallel(*(flow.child(small, number) for number in range(count))).run())

    app.start(threads=1)
    cost = Cost(app)
    cost_of(app, cost, fan, 10)
    few, many = cost_of(app, cost, fan, 30), cost_of(app, cost, fan, 150)
    # How many writes share a transaction is up to the moment; by itself each child takes the few that test_budget allows it.
    transactions, statements = ((there - here) / 120 for here, there in zip(few, many, strict=True))
    print("transactions and statements per child:", transactions, statements)
    assert transactions <= 2.5, (few, many)
    assert many[1] <= 5.25 * few[1], (few, many)
