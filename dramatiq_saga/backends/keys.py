"""Keys with a time to live: what both back ends share.

A key whose time has run out counts as absent from that moment, whoever may have deleted it or not: every statement that reads
or changes a row says so itself. What has expired is deleted in passing by writes that add rows, a few rows at a time, so a
write's cost does not depend on how much has expired. Nothing here is trusted by the engine: rows of runs decide (PAR-2).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..store.database import Database, Store, Tx, open_store

if TYPE_CHECKING:
    from ..clock import Clock

#: Expired rows that a write deletes at most. More than one, so that a backlog shrinks.
PURGED_AT_ONCE = 4

#: Longest key that is stored as it is, in characters; the column takes a few more.
LONGEST_KEY = 180

#: What goes before a digest that stands for a key.
DIGEST_MARK = "sha256:"

#: Seconds between two looks of a caller that waits, at first and at most.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.25


def store_of(database: str | Path | Database | Store, *, prefix: str, clock: Clock | None) -> Store:
    """The store that a back end works on; one that it is given is shared, and closed by whoever made it."""
    if isinstance(database, Store):
        return database
    return open_store(database, prefix=prefix, clock=clock)


def row_id(key: str) -> str:
    """The id of a key's row: the key itself, or a digest of one that some database could not keep apart from others.

    Those are long ones, ones with characters that cannot be printed (PostgreSQL takes no NUL, no database half a surrogate), and
    ones that end in a blank, which MySQL and MariaDB ignore when they compare.
    """
    if len(key) <= LONGEST_KEY and key.isprintable() and not key.endswith(" ") and not key.startswith(DIGEST_MARK):
        return key
    return DIGEST_MARK + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def purge(tx: Tx, table: str, now: int) -> None:
    """Delete up to :data:`PURGED_AT_ONCE` expired rows of ``{rate_limits}`` or ``{results}``, the oldest first.

    Who else may be here: another process that is deleting or renewing one of them. On a server its row lock makes it skipped; on
    SQLite there is one writer. Each deletion repeats that the row has expired, so a renewed one is never deleted
    (test_a_key_that_is_renewed_is_not_deleted_in_passing).
    """
    expired = tx.all(
        f"SELECT id FROM {table} WHERE expires_at <= ? ORDER BY expires_at LIMIT {PURGED_AT_ONCE}{{skip_locked}}", (now,)
    )
    for (one,) in expired:
        tx.run(f"DELETE FROM {table} WHERE id = ? AND expires_at <= ?", (one, now))


def next_pause(pause: float) -> float:
    """How long to wait before the look after the next one, seconds."""
    return min(LONGEST_PAUSE, pause * 2)
