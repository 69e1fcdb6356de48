"""Code of a host that runs on the engine's own connections, and does there what it should not (CLAIM-3).

A host's driver class, its tracing, its connection class: whatever stands around the driver runs inside the engine's transactions.
:class:`CarelessHost` is such a host. Once armed it acts at the COMMIT of the next transaction in which a statement was executed
that the test names, and says nothing of it.
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any

from playhouse import db_url

from tests.support import servers

#: What such code does, by the statements that it executes. The first fails, and nobody hears of it.
DEEDS = {
    "swallows": ("SELECT * FROM no_such_table_anywhere",),
    "rolls back": ("ROLLBACK",),
    "begins anew": ("ROLLBACK", "BEGIN"),
    "commits": ("COMMIT", "BEGIN"),
}


class CarelessHost:
    """A host whose ``database`` the engine is given."""

    def __init__(self, server: str, deed: str) -> None:
        self.deeds = DEEDS[deed]
        self.left = 0
        self._pattern = re.compile("")
        self._marked: set[int] = set()  # connections whose transaction has executed such a statement
        self._lock = threading.Lock()
        self._plain, hooked = (_psycopg if server == "postgresql" else _pymysql)(self._before)
        self.database = db_url.connect(servers.address(server), **hooked)

    def arm(self, statement: str, times: int = 1) -> None:
        """Act in the next ``times`` transactions that execute a statement which this pattern is found in."""
        with self._lock:
            self._pattern, self.left = re.compile(statement), times

    def _before(self, connection: Any, query: str) -> None:
        with self._lock:
            key = id(connection)
            if query.startswith(("BEGIN", "START TRANSACTION")):
                self._marked.discard(key)
            if self.left and self._pattern.search(query):
                self._marked.add(key)
            if key not in self._marked or not query.endswith("COMMIT"):
                return
            self._marked.discard(key)
            self.left -= 1
        for statement in self.deeds:
            with suppress(Exception):
                self._plain(connection).execute(statement)


def _psycopg(before: Any) -> Any:
    import psycopg

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, *args: Any, **options: Any) -> Any:
            before(self.connection, str(query))
            return super().execute(query, *args, **options)

    return psycopg.ClientCursor, {"cursor_factory": Cursor}


def _pymysql(before: Any) -> Any:
    from pymysql.cursors import Cursor as Plain

    class Cursor(Plain):
        def execute(self, query: Any, args: Any = None) -> Any:
            before(self.connection, str(query))
            return super().execute(query, args)

    return Plain, {"cursorclass": Cursor}
