"""The pytest plugin of dramatiq-saga: the fixture ``saga``, and what it knows of a test that fails.

pytest imports this module at every start, in every project where dramatiq-saga is installed. So it stands outside of the package and
imports nothing of it, until a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dramatiq_saga.testing import SagaTester


@pytest.fixture
def saga() -> Iterator[SagaTester]:
    """Workflows and actors run in this process, on a store in memory, under a clock that the test moves."""
    from dramatiq_saga.testing import SagaTester

    with SagaTester() as tester:
        yield tester


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, Any, None]:
    """Below a failed test: what was left to happen when it failed, which is often why."""
    outcome = yield
    report = outcome.get_result()
    tester = getattr(item, "funcargs", {}).get("saga")
    left = getattr(tester, "waiting", None)
    if report.when == "call" and report.failed and left:
        report.sections.append(("saga: what is left", "\n".join(left)))
