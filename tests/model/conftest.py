"""What the tests of the model share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from dramatiq_saga import step


@pytest.fixture(autouse=True)
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world gives claims marks of its own; the tests that come after it in this process have those of the engine again."""
    monkeypatch.setattr(step, "_marks", step._marks)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of rollbacks halt in a model; nobody needs a line for each."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    yield
    structlog.configure(**before)


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent
