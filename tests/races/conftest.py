"""A small shop on benches: the application that races are run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from tests.support.bench import Bench
from tests.support.threads import writer_threads


class Shop:
    """Actors and workflows, and what their bodies did. A test may replace a body: ``shop.bodies["charge"] = ...``."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, Any]] = []
        self.bodies: dict[str, Callable[..., Any]] = {}

    def count(self, actor: str) -> int:
        return sum(1 for name, _ in self.ran if name == actor)

    def order(self) -> list[str]:
        return [name for name, _ in self.ran]

    def _body(self, name: str) -> Callable[[str], Any]:
        def body(order: str) -> Any:
            self.ran.append((name, order))
            own = self.bodies.get(name)
            return own(order) if own is not None else f"{name} of {order}"

        body.__name__ = name
        return body

    def declare(self, bench: Bench) -> None:
        actors = {}
        for name in ("charge", "refund", "reserve", "unreserve", "ship", "recall"):
            actors[name] = bench.actor(self._body(name))
        charge, refund, reserve, unreserve, ship, recall = actors.values()

        def checkout(flow: Any, order: str) -> str:
            flow.action(charge, order).compensate_with(refund, order).run()
            flow.action(reserve, order).compensate_with(lambda reserved: unreserve.message(reserved)).run()
            return str(flow.action(ship, order).compensate_with(recall, order).run())

        def careful(flow: Any, order: str) -> str:
            """Its step is undone even when nobody knows how it ended."""
            return str(
                flow.action(charge, order)
                .compensate_with(refund, order)
                .compensate_step_on_self_failure()
                .reclaim_stale_after(60)
                .run()
            )

        def lucky(flow: Any, order: str) -> str:
            number = flow.side_effect("number", lambda: self.bodies["number"](order))
            return str(flow.run(ship, f"{order}/{number}"))

        for function in (checkout, careful, lucky):
            bench.workflow(function)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


MakeBench = Callable[..., Bench]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(request: pytest.FixtureRequest, database_kind: str, sqlite_path: Any, tables_stand: None) -> str:
    if database_kind == "sqlite":
        return f"sqlite:///{sqlite_path}"
    return str(request.getfixturevalue("postgres_url" if database_kind == "postgresql" else "mariadb_url"))


@pytest.fixture
def bench(address: str, table_prefix: str, shop: Shop, clock: ManualClock) -> Iterator[MakeBench]:
    """``bench()`` makes one more worker of the shop, on this test's tables and clock."""
    made: list[Bench] = []
    others = writer_threads()

    def make(**options: Any) -> Bench:
        options = {"prefix": table_prefix, "clock": clock, "settings": Settings(), **options}
        made.append(Bench(address, shop.declare, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    leaked = [thread.name for thread in writer_threads() - others]
    assert not leaked, leaked
