"""What the tests of the model share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of rollbacks halt in a model; nobody needs a line for each."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    yield
    structlog.configure(**before)


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent
