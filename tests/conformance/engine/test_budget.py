"""What a step costs on one SQLite file: transactions and statements, counted on the writer's own connection.

Nothing here looks at a clock. The numbers are those of one run at a time with a prefetch of one, reservations and
acknowledgements included; they may fall, and a change that lets them grow fails.
"""

from __future__ import annotations

from typing import Any

import dramatiq.worker
import pytest

from dramatiq_saga import Flow, Settings
from tests.support.application import Application, Applications

#: Write transactions per sequential step, from its scheduling to the next one's: its claim, and its outcome with all that follows
#: (ARCHITECTURE: at most 3, aim for 2). Now and then a run queues up again behind others, which costs a reservation.
TRANSACTIONS_PER_STEP = 2.2
#: Statements in them, BEGIN, COMMIT and savepoints aside.
STATEMENTS_PER_STEP = 7.4
#: The same for a step and its undo.
WITH_UNDO = (4.4, 17.8)
#: A run of one step, from the call of send() until nothing is left of it in the queue, the look at the empty queue included.
SMALL_RUN = (6, 16)

#: A child without steps: its start and its end, and now and then a reservation, as for steps.
PER_CHILD = (2.5, 15.0)

BOOKKEEPING = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")


class Cost:
    """What has been executed since :meth:`reset`."""

    def __init__(self, app: Application) -> None:
        self.statements: list[str] = []
        self.reads = 0
        store = app.store
        store.write(lambda tx: store.database.connection().set_trace_callback(self.statements.append))
        plain = store.read

        def read(operation: Any) -> Any:
            self.reads += 1
            return plain(operation)

        store.read = read  # type: ignore[method-assign]

    def reset(self) -> None:
        self.statements.clear()
        self.reads = 0

    @property
    def transactions(self) -> int:
        return sum(1 for statement in self.statements if statement.startswith("COMMIT"))

    @property
    def work(self) -> list[str]:
        return [statement for statement in self.statements if not statement.startswith(BOOKKEEPING)]


def cost_of(app: Application, cost: Cost, declared: Any, steps: int) -> tuple[int, int, int]:
    """Transactions, statements and reads of one whole run."""
    cost.reset()
    handle = declared.send(steps)
    app.ended(handle)
    app.drain()
    waiting = cost.reads  # the test's own looks at the run
    assert handle.status == "completed"
    return cost.transactions, len(cost.work), waiting


@pytest.fixture
def lone(applications: Applications, monkeypatch: pytest.MonkeyPatch) -> Application:
    """A worker with one thread that reserves one message at a time."""
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 1)
    return applications("sqlite")


def test_a_step_costs_two_transactions_and_few_statements(lone: Application) -> None:
    """ARCHITECTURE budget: by the difference between runs of 10 and of 30 steps, so that start and end do not count."""
    step = lone.step("step", gives=1)

    @lone.workflow
    def steps(flow: Flow, number: int) -> int:
        return sum(flow.run(step) for _ in range(number))

    lone.start(threads=1)
    cost = Cost(lone)
    cost_of(lone, cost, steps, 3)
    small, large = cost_of(lone, cost, steps, 10), cost_of(lone, cost, steps, 30)
    per_step = [(there - here) / 20 for here, there in zip(small, large, strict=True)]
    print("transactions and statements per step:", per_step[:2])
    assert per_step[0] <= TRANSACTIONS_PER_STEP, "\n".join(cost.statements[-40:])
    assert per_step[1] <= STATEMENTS_PER_STEP, "\n".join(cost.statements[-40:])


def test_leases_cost_no_statement_per_step(applications: Applications, monkeypatch: pytest.MonkeyPatch) -> None:
    """RECLAIM-5: who lives is asked within the claim's own statement. The beats are an hour apart here, so none is counted."""
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 1)
    leases = {"reclaim.dead_workers": {"enabled": True, "lease_seconds": 4 * 3600}}
    costs = []
    for settings in (Settings(), Settings.from_mapping(leases)):
        app = applications("sqlite", settings=settings)
        step = app.step("step", gives=1)

        @app.workflow
        def steps(flow: Flow, number: int, step: Any = step) -> int:
            return sum(flow.run(step) for _ in range(number))

        app.start(threads=1)
        cost = Cost(app)
        cost_of(app, cost, steps, 3)
        cost_of(app, cost, steps, 10)
        few = [statement for statement in cost.work if "workers" in statement]
        costs.append((len(few), sum("action_runs" in statement for statement in cost.work)))
        assert not [statement for statement in few if not statement.lstrip().startswith("UPDATE")]
    (without, plain), (asked, leased) = costs
    assert (without, asked) == (0, 10)
    assert leased == plain


def test_starting_and_ending_a_run_costs_a_handful_of_transactions(lone: Application) -> None:
    """ARCHITECTURE budget: a run of one step, from send to the end, with nothing left behind."""
    step = lone.step("step", gives=1)

    @lone.workflow
    def steps(flow: Flow, number: int) -> int:
        return sum(flow.run(step) for _ in range(number))

    lone.start(threads=1)
    cost = Cost(lone)
    cost_of(lone, cost, steps, 1)
    transactions, statements, _ = cost_of(lone, cost, steps, 1)
    print("a run of one step:", transactions, statements)
    assert transactions <= SMALL_RUN[0], "\n".join(cost.statements)
    assert statements <= SMALL_RUN[1], "\n".join(cost.statements)


def test_an_undo_costs_no_more_than_a_step(lone: Application) -> None:
    """ARCHITECTURE budget: by the difference between rollbacks of 5 and of 15 undos."""
    step, undo = lone.step("step"), lone.step("undo")

    @lone.workflow
    def steps(flow: Flow, number: int) -> None:
        for _ in range(number):
            flow.action(step).compensate_with(undo).run()
        raise ValueError("back")

    lone.start(threads=1)
    cost = Cost(lone)
    costs = []
    for number in (5, 15):
        cost.reset()
        handle = steps.send(number)
        lone.ended(handle)
        lone.drain()
        costs.append((cost.transactions, len(cost.work)))
    per_step = [(there - here) / 10 for here, there in zip(*costs, strict=True)]
    print("transactions and statements per step and its undo:", per_step)
    assert per_step[0] <= WITH_UNDO[0], "\n".join(cost.statements[-40:])
    assert per_step[1] <= WITH_UNDO[1], "\n".join(cost.statements[-40:])


def test_a_step_reads_nothing_that_its_process_has_just_written(lone: Application) -> None:
    """DRIVE-1: the snapshot of the run is kept and checked by its revision, so no step asks for the history again."""
    step = lone.step("step", gives=1)

    @lone.workflow
    def steps(flow: Flow, number: int) -> int:
        return sum(flow.run(step) for _ in range(number))

    lone.start(threads=1)
    cost = Cost(lone)
    loads: list[str] = []
    plain = lone.store.read

    def read(operation: Any) -> Any:
        loads.append(operation.__qualname__)
        return plain(operation)

    lone.store.read = read  # type: ignore[method-assign]
    lone.ended(steps.send(20))
    engine = [name for name in loads if "FlowHandle" not in name and "peek" not in name and "consumer" not in name.lower()]
    assert len(engine) <= 2, engine
    assert cost.reads >= len(engine)


def test_a_child_costs_two_transactions(lone: Application) -> None:
    """ARCHITECTURE budget: by the difference between 10 and 30 children without steps, one after another: the parent's decision that
    starts a child, and the child's own, which ends it and wakes the parent; nothing more."""

    @lone.workflow
    def child(flow: Flow, number: int) -> int:
        return number

    @lone.workflow
    def steps(flow: Flow, number: int) -> int:
        return sum(flow.child(child, one).run() for one in range(number))

    lone.start(threads=1)
    cost = Cost(lone)
    cost_of(lone, cost, steps, 2)
    small, large = cost_of(lone, cost, steps, 10), cost_of(lone, cost, steps, 30)
    per_child = [(there - here) / 20 for here, there in zip(small, large, strict=True)]
    print("transactions and statements per child:", per_child[:2])
    assert per_child[0] <= PER_CHILD[0], "\n".join(cost.statements[-60:])
    assert per_child[1] <= PER_CHILD[1], "\n".join(cost.statements[-60:])
