"""Dramatiq's rate-limiter back end on a database: concurrency, bucket and window limiters, and barriers.

One row per key. Every change of a row is one conditional statement, so two processes never both take the last place. Behaves
like Dramatiq's Redis back end: an absent key counts as zero, a change renews its time to live, a refused one changes nothing.

The engine's blocks use it for their barriers where the broker is not Redis, and never believe it (PAR-2).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dramatiq.rate_limits import RateLimiterBackend

from ..errors import StoreError
from ..store.database import Database, Store, Tx
from ..store.sql import MYSQL, SQLITE
from .keys import SHORTEST_PAUSE, next_pause, purge, row_id, store_of

if TYPE_CHECKING:
    from ..clock import Clock

_TABLE = "{rate_limits}"

# differs because: MySQL and MariaDB have no condition on an upsert. There the row is made first, expired; that takes its lock, and
# the conditional UPDATE that follows decides about what nobody else can change meanwhile.
_PLACE = "INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, 0, 0) ON DUPLICATE KEY UPDATE id = id"

_ADD = (
    "INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at "
    "WHERE {rate_limits}.expires_at <= ?"
)
_ADD_MYSQL = "UPDATE {rate_limits} SET value = ?, expires_at = ? WHERE id = ? AND expires_at <= ?"

#: What a row counts for: nothing once it has expired.
_LIVE = "CASE WHEN {rate_limits}.expires_at > ? THEN {rate_limits}.value ELSE 0 END"

_CHANGE = (
    "INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, ?, ?) "
    f"ON CONFLICT (id) DO UPDATE SET value = {_LIVE} + ?, expires_at = excluded.expires_at "
    f"WHERE {_LIVE} + ? BETWEEN ? AND ?"
)
_CHANGE_MYSQL = f"UPDATE {{rate_limits}} SET value = {_LIVE} + ?, expires_at = ? WHERE id = ? AND {_LIVE} + ? BETWEEN ? AND ?"
_CHANGE_LIVE = (
    "UPDATE {rate_limits} SET value = value + ?, expires_at = ? WHERE id = ? AND expires_at > ? AND value + ? BETWEEN ? AND ?"
)

_PUT = (
    "INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at"
)
_PUT_MYSQL = (
    "INSERT INTO {rate_limits} (id, value, expires_at) VALUES (?, ?, ?) "
    "ON DUPLICATE KEY UPDATE value = VALUES(value), expires_at = VALUES(expires_at)"
)

_IS_THERE = "SELECT 1 FROM {rate_limits} WHERE id = ? AND expires_at > ?"

#: How many keys one statement of a sum names: texts are kept per length, so there are only these few.
_SUMMED_AT_ONCE = (8, 64, 512)

_LOWEST, _HIGHEST = -(2**62), 2**62


class DatabaseRateLimiterBackend(RateLimiterBackend):
    """Keeps rate limits and barriers in SQLite, PostgreSQL, MariaDB or MySQL.

    Parameters:
      database: A URL, a path to an SQLite file, a Peewee ``Database``, or the store of a database broker (``broker.store``),
        which is the one to give where there is one: its connections are shared.
      prefix: Goes before the name of the table, where ``database`` is not a store.
      clock: Where "now" comes from, where ``database`` is not a store.

    A call inside an open transaction of the store's own ``Database`` object joins it: it counts once that transaction commits,
    and vanishes with it. Expired rows are deleted in passing.

    Raises, from every call: ``StoreError`` where the database cannot be reached or refuses.

    .. versionadded:: 0.1
    """

    def __init__(self, database: str | Path | Database | Store, *, prefix: str = "saga_", clock: Clock | None = None) -> None:
        self.store = store_of(database, prefix=prefix, clock=clock)
        self._published = threading.Condition()

    def add(self, key: str, value: int, ttl: int) -> bool:
        """Add a key that is not there; ``ttl`` is in milliseconds. Returns whether it was added."""
        return self.store.write(lambda tx: self.add_within(tx, key, value=value, ttl=ttl))

    def add_within(self, tx: Tx, key: str, *, value: int, ttl: int) -> bool:
        """As :meth:`add`, inside a transaction of this store."""
        ident, now = row_id(key), self.store.clock.now()
        if tx.dialect == MYSQL:
            tx.run(_PLACE, (ident,))
            added = tx.run(_ADD_MYSQL, (value, now + ttl, ident, now))
        else:
            added = tx.run(_ADD, (ident, value, now + ttl, now))
        if added:
            purge(tx, _TABLE, now)
        return added > 0

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        """Add ``amount`` unless that makes more than ``maximum``. Returns whether it was done."""
        return self.store.write(lambda tx: self._change(tx, row_id(key), amount, _LOWEST, maximum, ttl))

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        """Take ``amount`` away unless that leaves less than ``minimum``. Returns whether it was done."""
        return self.store.write(lambda tx: self._change(tx, row_id(key), -amount, minimum, _HIGHEST, ttl))

    def incr_and_sum(self, key: str, keys: Callable[[], Iterable[str]], amount: int, maximum: int, ttl: int) -> bool:
        """Add ``amount`` to a key unless that makes it, or the sum over ``keys()``, more than ``maximum``.

        Who else may be here: somebody who adds to another key of the same sum. On SQLite there is one writer; on servers both
        first take one lock for what stands before the keys' last ``@``, which is the limiter's own key, and hold it
        until they commit (test_a_window_never_takes_in_more_than_its_limit).
        """
        ident = row_id(key)
        anchor = row_id(f"sum over {key.rpartition('@')[0]}\0")

        def operation(tx: Tx) -> bool:
            if tx.dialect != SQLITE:
                _put(tx, anchor, 0, self.store.clock.now() + ttl)
            now = self.store.clock.now()
            if amount + _sum(tx, [row_id(one) for one in keys()], now) > maximum:
                return False
            return self._change(tx, ident, amount, _LOWEST, maximum, ttl)

        return self.store.write(operation)

    def _change(self, tx: Tx, ident: str, delta: int, lowest: int, highest: int, ttl: int) -> bool:
        now = self.store.clock.now()
        until = now + ttl
        if not lowest <= delta <= highest:  # not for an absent key: this one has to be there
            return tx.run(_CHANGE_LIVE, (delta, until, ident, now, delta, lowest, highest)) > 0
        if tx.dialect == MYSQL:
            tx.run(_PLACE, (ident,))
            changed = tx.run(_CHANGE_MYSQL, (now, delta, until, ident, now, delta, lowest, highest))
        else:
            changed = tx.run(_CHANGE, (ident, delta, until, now, delta, now, delta, lowest, highest))
        if changed:
            purge(tx, _TABLE, now)
        return changed > 0

    def wait(self, key: str, timeout: int | None) -> bool:
        """Wait until somebody has called :meth:`wait_notify` for this key, at most ``timeout`` milliseconds; ``None``: without end.

        Returns whether it has happened. What other processes publish is noticed within a quarter of a second; a
        notification stays for its time to live, for everyone who waits.

        Raises:
          StoreError: The calling thread has a transaction of the database open, which could never see it happen.
        """
        if self.store.joined():
            raise StoreError("cannot wait inside an open transaction of the same database: end it first")
        ident = row_id(key)
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        pause = SHORTEST_PAUSE
        while True:
            with self._published:  # entered before the look, so that a call between look and wait is not missed
                if self.store.read(lambda tx: tx.one(_IS_THERE, (ident, self.store.clock.now()))) is not None:
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._published.wait(pause if left is None else min(pause, left))
            pause = next_pause(pause)

    def wait_notify(self, key: str, ttl: int) -> None:
        """Let everyone go on who waits for this key, and who comes within ``ttl`` milliseconds."""

        def operation(tx: Tx) -> None:
            now = self.store.clock.now()
            _put(tx, row_id(key), 1, now + ttl)
            purge(tx, _TABLE, now)
            tx.after_commit(self._publish)

        self.store.write(operation)

    def _publish(self) -> None:
        with self._published:
            self._published.notify_all()


def _put(tx: Tx, ident: str, value: int, until: int) -> None:
    tx.run(_PUT_MYSQL if tx.dialect == MYSQL else _PUT, (ident, value, until))


def _sum(tx: Tx, idents: list[str], now: int) -> int:
    """What these keys come to, in statements of a few lengths: a short list is filled up with its last key, which counts once."""
    total = 0
    idents = list(dict.fromkeys(idents))
    while idents:
        size = next((size for size in _SUMMED_AT_ONCE if size >= len(idents)), _SUMMED_AT_ONCE[-1])
        part, idents = idents[:size], idents[size:]
        part += part[-1:] * (size - len(part))
        row = tx.one(
            f"SELECT SUM(value) FROM {{rate_limits}} WHERE expires_at > ? AND id IN ({', '.join('?' * size)})", (now, *part)
        )
        total += int(row[0] or 0) if row is not None else 0
    return total
