"""The pytest fixture ``saga``: one :class:`~dramatiq_saga.testing.SagaTester` per test.

An installed dramatiq-saga registers it by the entry point in ``pytest_dramatiq_saga.py``; elsewhere a ``conftest.py`` asks for it
with ``pytest_plugins = ["dramatiq_saga.testing"]``. Without pytest this module offers nothing, and the class works all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .tester import SagaTester

try:
    import pytest
except ModuleNotFoundError:  # pytest is no dependency of a worker
    saga: Any = None
else:

    @pytest.fixture
    def saga() -> Iterator[SagaTester]:
        """Workflows and actors run in this process, on a store in memory, under a clock that the test moves."""
        with SagaTester() as tester:
            yield tester
