"""What a command answers, for people and for machines; and how times, durations and tables are written.

Text from rows is printed on one line with control characters made visible. Times are UTC and say so; durations are never
negative. JSON is pure ASCII, so no terminal is moved by it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..clock import to_iso
from ..codec import printable
from ..errors import in_one_line


@dataclass(frozen=True, slots=True)
class Answer:
    """``lines`` are printed for people and are safe already; ``value`` is what ``--json`` prints. Not ``done``: exit status 1.

    ``note`` goes to stderr, so that what a shell captures is the answer alone.
    """

    value: Any
    lines: Sequence[str] = field(default_factory=list)
    done: bool = True
    note: str | None = None

    def text(self) -> str:
        """For people."""
        return "\n".join(self.lines)

    def json(self) -> str:
        """For machines: one line, unless somebody is looking."""
        text = json.dumps(self.value, indent=2 if sys.stdout is not None and sys.stdout.isatty() else None, default=str)
        return text.replace("\x7f", "\\u007f")


def cell(value: object) -> str:
    """A stored value in a line or a table."""
    return "" if value is None else printable(str(value))


def cut(text: str, width: int) -> str:
    """At most ``width`` characters of text that is safe already."""
    return text if len(text) <= width else text[: width - 1] + "…"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as they need; numbers to the right."""
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(heads, *texts, strict=True)]
    right = [bool(rows) and all(isinstance(row[n], int) for row in rows) for n in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(cells, widths, right, strict=True)
        ).rstrip()

    return [line(heads), *(line(row) for row in texts)]


def moment(ms: int | None) -> str:
    """A stored time: ``2026-03-01 12:00:00.250Z``."""
    return "" if ms is None else (to_iso(ms) or "").replace("T", " ")


def duration(ms: int) -> str:
    """How long something took: ``12 ms``, ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 1 h``."""
    ms = max(0, ms)
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    for size, unit, smaller_size, smaller in (
        (86_400_000, "d", 3_600_000, "h"),
        (3_600_000, "h", 60_000, "min"),
        (60_000, "min", 1000, "s"),
    ):
        if ms >= size:
            rest = ms % size // smaller_size
            return f"{ms // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError("unreachable")


def times(number: int, one: str, many: str) -> str:
    """``1 try``, ``3 tries``."""
    return f"{number} {one if number == 1 else many}"


def relative(ms: int, now: int) -> str:
    """``in 12.0 s``, or ``3 min ago``."""
    return f"in {duration(ms - now)}" if ms > now else f"{duration(now - ms)} ago"


def error_line(error: dict[str, Any]) -> str:
    """A recorded error in one line."""
    line = in_one_line(str(error.get("type") or "error"), str(error.get("message") or ""))
    return printable(line.removesuffix(": "))
