"""The pytest plugin of dramatiq-saga: the fixture ``saga``.

pytest imports this module at every start, in every project where dramatiq-saga is installed. So it stands outside of the package and
imports nothing of it, until a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dramatiq_saga.testing import SagaTester


@pytest.fixture
def saga() -> Iterator[SagaTester]:
    """Workflows and actors run in this process, on a store in memory, under a clock that the test moves."""
    from dramatiq_saga.testing import SagaTester

    with SagaTester() as tester:
        yield tester
