"""What a state of the database says, in words: rows by name, what has changed between two states, and how a trace reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.model.store import KEPT, Content

Row = dict[str, Any]

#: What a reader of a trace wants to know of a row.
TOLD = {
    "flow_runs": ("status", "rollback", "revision", "wakes", "wakes_seen", "hold_count", "expiry_attempts"),
    "action_runs": ("status", "attempts", "given_up", "tries", "held_back"),
    "compensation_runs": ("status", "attempts", "given_up", "tries", "not_before"),
    "blocks": ("failed_by", "closed_early_at", "ended_at"),
    "waits": ("status",),
}
NAMES = {"flow_runs": "run", "action_runs": "step", "compensation_runs": "undo", "blocks": "block", "waits": "wait"}


@dataclass(frozen=True, slots=True)
class Facts:
    """The rows of one state."""

    run: Row
    steps: dict[int, Row]
    undos: dict[int, Row]
    blocks: dict[int, Row]
    waits: dict[int, Row]

    @property
    def is_live(self) -> bool:
        """Whether the run may still go forward."""
        return self.run["ended_at"] is None and self.run["status"] != "rolling_back"

    @property
    def is_over(self) -> bool:
        """Whether nothing of the run is left to be done, unless an operator says so."""
        return self.run["ended_at"] is not None and self.run["rollback"] != "running"

    def rows(self) -> dict[tuple[str, int], Row]:
        """Every row by its name and sequence."""
        found = {("run", 0): self.run}
        for name, rows in (("step", self.steps), ("undo", self.undos), ("block", self.blocks), ("wait", self.waits)):
            found |= {(name, sequence): row for sequence, row in rows.items()}
        return found


def read(content: Content, columns: dict[str, tuple[str, ...]]) -> Facts:
    """``content`` as rows that can be asked by name."""
    tables = [[dict(zip(columns[table], row, strict=True)) for row in rows] for table, rows in zip(KEPT, content, strict=True)]
    runs, *others = tables
    (run,) = runs
    return Facts(run, *({row["sequence"]: row for row in rows} for rows in others))


def changes(before: Facts, after: Facts) -> str:
    """What a reader wants to know of the difference."""
    told = dict(zip(NAMES.values(), TOLD.values(), strict=True))
    old, new = before.rows(), after.rows()
    parts = []
    for key, row in new.items():
        name = key[0] if key[0] == "run" else f"{key[0]} {key[1]}"
        was = old.get(key)
        if was is None:
            parts.append(f"{name} is new: {row.get('status', 'open')}")
            continue
        moved = [
            f"{column} {_short(was[column])} -> {_short(row[column])}" for column in told[key[0]] if was[column] != row[column]
        ]
        if moved:
            parts.append(f"{name}: {', '.join(moved)}")
    return "; ".join(parts)


def _short(value: Any) -> str:
    return "none" if value is None else str(value)
