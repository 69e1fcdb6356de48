"""Dramatiq's result back end on a database: what ``store_results=True`` keeps, and ``message.get_result()`` reads.

One row per message, written by one statement that replaces what was there. A result whose time has run out is missing.
It serves ordinary Dramatiq actors; results of saga steps are kept with their runs and need none of this.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dramatiq.results import ResultBackend, ResultMissing, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT, Missing

from ..errors import StoreError
from ..store.database import Database, Store, Tx
from ..store.sql import MYSQL
from .keys import SHORTEST_PAUSE, next_pause, purge, row_id, store_of

if TYPE_CHECKING:
    from dramatiq import Encoder, Message

    from ..clock import Clock

_TABLE = "{results}"

_STORE = (
    "INSERT INTO {results} (id, value, expires_at) VALUES (?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at"
)
# differs because: MySQL and MariaDB spell it so
_STORE_MYSQL = (
    "INSERT INTO {results} (id, value, expires_at) VALUES (?, ?, ?) "
    "ON DUPLICATE KEY UPDATE value = VALUES(value), expires_at = VALUES(expires_at)"
)

_GET = "SELECT value FROM {results} WHERE id = ? AND expires_at > ?"


class DatabaseResultBackend(ResultBackend):
    """Keeps results of actors in SQLite, PostgreSQL, MariaDB or MySQL.

    Parameters:
      database: A URL, a path to an SQLite file, a Peewee ``Database``, or the store of a database broker (``broker.store``),
        which is the one to give where there is one: its connections are shared.
      prefix: Goes before the name of the table, where ``database`` is not a store.
      clock: Where "now" comes from, where ``database`` is not a store.
      namespace, encoder, use_namespace_prefix_keys: As in Dramatiq's own back ends.

    A result that is stored inside an open transaction of the store's own ``Database`` object commits or vanishes with it.
    Expired rows are deleted in passing.

    .. versionadded:: 0.1
    """

    def __init__(
        self,
        database: str | Path | Database | Store,
        *,
        prefix: str = "saga_",
        clock: Clock | None = None,
        namespace: str = "dramatiq-results",
        encoder: Encoder | None = None,
        use_namespace_prefix_keys: bool = False,
    ) -> None:
        super().__init__(namespace=namespace, encoder=encoder, use_namespace_prefix_keys=use_namespace_prefix_keys)
        self.store = store_of(database, prefix=prefix, clock=clock)

    def get_result(self, message: Message[Any], *, block: bool = False, timeout: int | None = None) -> Any:
        """A message's result. While it blocks, it looks again after at most a quarter of a second.

        Parameters:
          block: Whether to wait for a result that is not there yet.
          timeout: How long to wait at most, in milliseconds; 10,000 unless given.

        Raises:
          ResultMissing: There is none, and ``block`` is false.
          ResultTimeout: There was none in time.
          ResultFailure: The actor failed.
          StoreError: The database cannot be reached; or the call would wait inside an open transaction of the same database,
            which could never see the result arrive.
        """
        if block and self.store.joined():
            raise StoreError("cannot wait for a result inside an open transaction of the same database: end it first")
        key = self.build_message_key(message)
        deadline = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000
        pause = SHORTEST_PAUSE
        while True:
            found = self._get(key)
            if found is not Missing:
                return self.unwrap_result(found)  # type: ignore[no-untyped-call]
            if not block:
                raise ResultMissing(message)  # type: ignore[no-untyped-call]
            left = deadline - time.monotonic()
            if left <= 0:
                raise ResultTimeout(message)  # type: ignore[no-untyped-call]
            time.sleep(min(pause, left))
            pause = next_pause(pause)

    def _get(self, message_key: str) -> Any:
        row = self.store.read(lambda tx: tx.one(_GET, (row_id(message_key), self.store.clock.now())))
        return Missing if row is None else self.encoder.decode(bytes(row[0]))

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        data = self.encoder.encode(result)

        def operation(tx: Tx) -> None:
            now = self.store.clock.now()
            tx.run(_STORE_MYSQL if tx.dialect == MYSQL else _STORE, (row_id(message_key), data, now + ttl))
            purge(tx, _TABLE, now)

        self.store.write(operation)
