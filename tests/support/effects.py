"""What really happened, as seen by the steps themselves.

A step writes one line per effect to a file that any process may append to. A killed worker takes nothing back: the line
was handed to the operating system before the step went on. So a test compares what the rows say with what was done.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Workers started by the tests find their log here.
VARIABLE = "SAGA_TEST_EFFECTS"


class EffectLog:
    """An append-only log of effects, shared by every process of a test."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.touch()

    @classmethod
    def from_env(cls) -> EffectLog:
        """The log of the test that started this process."""
        return cls(os.environ[VARIABLE])

    def record(self, effect: str, **facts: Any) -> None:
        """Append one effect. One ``write`` on a file opened for appending: lines of different processes never mix."""
        entry = {"effect": effect, **facts, "pid": os.getpid(), "thread": threading.get_ident(), "at": time.monotonic_ns()}
        line = json.dumps(entry, default=str).encode() + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            written = os.write(handle, line)
        finally:
            os.close(handle)
        if written != len(line):
            raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes")

    def entries(self, effect: str | None = None, **facts: Any) -> list[dict[str, Any]]:
        """The effects in the order in which they were written, narrowed to a name and to facts that must be equal."""
        wanted = facts if effect is None else {"effect": effect, **facts}
        return [entry for entry in self if all(entry.get(key) == value for key, value in wanted.items())]

    def count(self, effect: str | None = None, **facts: Any) -> int:
        return len(self.entries(effect, **facts))

    def names(self) -> list[str]:
        """Only the names, in order: what most tests compare."""
        return [entry["effect"] for entry in self]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        text = self.path.read_text()
        complete = text[: text.rfind("\n") + 1]
        return (json.loads(line) for line in complete.splitlines())
