"""Settings of the property tests: a busy machine must not fail them, so nothing about them is timed. And test benches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.workbench import MakeBench, Workbench

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    """``make_bench(joins=True, settings=None, …)``: an application on a bench of its own (see ``tests/support/workbench.py``)."""
    made: list[Workbench] = []

    def make(**options: Any) -> Workbench:
        made.append(Workbench(options.pop("database", tmp_path / f"bench-{len(made)}.db"), **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture(params=[True, False], ids=["joined", "deferred"])
def bench(request: pytest.FixtureRequest, make_bench: MakeBench) -> Workbench:
    """On a database broker, and on a broker that the transaction cannot reach."""
    return make_bench(joins=request.param)
