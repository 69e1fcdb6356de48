"""A small shop on benches: the application that races are run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine import snapshot
from dramatiq_saga.engine.rows import Snapshot
from dramatiq_saga.store.database import Tx
from tests.support.bench import Bench
from tests.support.threads import writer_threads


@pytest.fixture(autouse=True)
def _what_is_known_is_what_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DRIVE-1: whatever is not read again, because a process knows it, is as the rows have it, in every race there is."""
    plain = snapshot.read
    differences = []

    def read(tx: Tx, run_id: str, *, known: Snapshot | None = None, for_drive: bool = False) -> Snapshot | None:
        found = plain(tx, run_id, known=known, for_drive=for_drive)
        if known is not None and found is not None:
            whole = plain(tx, run_id, for_drive=for_drive)
            if whole is None or told(found) != told(whole):
                differences.append(difference(told(found), told(whole)))
        return found

    monkeypatch.setattr(snapshot, "read", read)
    yield
    assert {str(x): 0 for x in differences} == {}


def difference(found: Any, whole: Any) -> Any:
    """Where the two differ, and how."""
    if isinstance(found, dict) and isinstance(whole, dict):
        return {name: difference(found[name], whole[name]) for name in found if found[name] != whole[name]}
    if isinstance(found, list) and isinstance(whole, list) and len(found) == len(whole):
        return [difference(*pair) for pair in zip(found, whole, strict=True) if pair[0] != pair[1]]
    return found, whole


def told(value: Any) -> Any:
    """A snapshot, or a part of it, as values that can be compared."""
    if is_dataclass(value):
        return {one.name: told(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list | tuple):
        return [told(one) for one in value]
    return value() if callable(value) else value


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

        def polite(flow: Any, order: str) -> str:
            return f"thanks for {order}"

        for function in (checkout, careful, lucky, polite):
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
