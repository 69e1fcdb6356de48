"""What the rules are tested on: one SQLite file with real workers, or a worker that the test holds in its hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga.clock import ManualClock
from tests.support.application import Application, Applications
from tests.support.bench import Bench


@pytest.fixture
def lite(applications: Applications) -> Application:
    """An application on one SQLite file."""
    return applications("sqlite")


@pytest.fixture(params=["sqlite", "postgresql"])
def joined(request: pytest.FixtureRequest, applications: Applications) -> Application:
    """The same on a file and on a server: for what the rest depends on."""
    return applications(request.param)


@pytest.fixture
def by_hand(sqlite_path: Path) -> Iterator[Callable[..., Bench]]:
    """``by_hand(declare)``: a worker whose messages the test delivers, on an SQLite file."""
    made: list[Bench] = []

    def make(declare: Callable[[Bench], None], **options: Any) -> Bench:
        made.append(Bench(f"sqlite:///{sqlite_path}", declare, clock=ManualClock(), **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
