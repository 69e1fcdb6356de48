"""The world outside the shop: a bank, a warehouse and a carrier, and what they remember.

All of it is one file to which every process appends lines. It belongs to no database transaction and survives every kill, so it
says what was really done, whatever the shop's own rows say. The bank does what good payment providers do: a request whose
idempotency key it knows gets the first answer again, and no money moves.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class World:
    """What happened outside, as lines of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str, **facts: Any) -> None:
        """One more line."""
        with self._locked() as file:
            self._append(file, what, facts)

    def charge(self, order: str, key: str) -> dict[str, str]:
        """The bank charges a card; asked again with the same key, it repeats its answer and charges nothing."""
        with self._locked() as file:
            known = [line for line in _lines(file) if line["what"] == "charged" and line["key"] == key]
            if known:
                self._append(file, "charge_repeated", {"order": order, "key": key})
                return {"id": known[0]["id"]}
            charge = f"ch-{order}"
            self._append(file, "charged", {"order": order, "key": key, "id": charge})
            return {"id": charge}

    def refund(self, charge: str, key: str) -> None:
        """The bank gives money back, once per key."""
        with self._locked() as file:
            known = any(line["what"] == "refunded" and line["key"] == key for line in _lines(file))
            self._append(file, "refund_repeated" if known else "refunded", {"id": charge, "key": key})

    def lines(self, what: str | None = None, **facts: Any) -> list[dict[str, Any]]:
        """What happened so far, in order, narrowed to one kind and to facts that must be equal."""
        wanted = facts if what is None else {"what": what, **facts}
        with self._locked() as file:
            return [line for line in _lines(file) if all(line.get(name) == value for name, value in wanted.items())]

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, for one process and thread at a time; the lock is the kernel's and dies with its holder."""
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _append(self, file: BinaryIO, what: str, facts: dict[str, Any]) -> None:
        line = {"what": what, **facts, "at": time.time_ns() // 1_000_000, "pid": os.getpid()}
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()


def _lines(file: BinaryIO) -> list[dict[str, Any]]:
    file.seek(0)
    return [json.loads(line) for line in file]
