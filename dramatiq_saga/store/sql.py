"""Statement templates: one text per statement, rendered once per store for its database.

Owns the differences in spelling: table prefixes, parameter markers, row locks and "insert unless it is there". A template
names tables as ``{flow_runs}`` and parameters as ``?``; what else it may name is in :data:`WORDS`. Values never enter a
template: they are parameters (SAFE-2). Rendering is a dictionary look-up after the first use of a template.

Where a database needs another statement, not another spelling, the caller branches on ``tx.dialect``. PostgreSQL cannot
guess the type of a parameter that stands alone: write ``CAST(? AS BIGINT) IS NULL`` there. Booleans are ``TRUE`` and
``FALSE``, or parameters that are ``bool``.
"""

from __future__ import annotations

import re

from peewee import Database, MySQLDatabase, PostgresqlDatabase, SqliteDatabase

SQLITE = "sqlite"
POSTGRESQL = "postgresql"
MYSQL = "mysql"

#: What a template may name beside tables, by dialect.
WORDS: dict[str, dict[str, str]] = {
    # differs because: SQLite has one writer, which every write transaction is from its start, so no row needs a lock
    SQLITE: {"for_update": "", "skip_locked": "", "insert_ignore": "INSERT OR IGNORE INTO", "or_ignore": ""},
    POSTGRESQL: {
        "for_update": " FOR UPDATE",
        "skip_locked": " FOR UPDATE SKIP LOCKED",
        "insert_ignore": "INSERT INTO",
        "or_ignore": " ON CONFLICT DO NOTHING",
    },
    MYSQL: {
        "for_update": " FOR UPDATE",
        "skip_locked": " FOR UPDATE SKIP LOCKED",
        "insert_ignore": "INSERT IGNORE INTO",
        "or_ignore": "",
    },
}

#: Rendered statements kept per store; a program that builds more texts than this at run time renders some of them again.
CACHE_LIMIT = 2048

_NAME = re.compile(r"\{(\w+)\}")


def dialect_of(database: Database) -> str:
    """``sqlite``, ``postgresql`` or ``mysql`` (MariaDB too)."""
    if isinstance(database, SqliteDatabase):
        return SQLITE
    if isinstance(database, PostgresqlDatabase):
        return POSTGRESQL
    if isinstance(database, MySQLDatabase):
        return MYSQL
    raise TypeError(f"{type(database).__name__} is neither SQLite, PostgreSQL, MySQL nor MariaDB")


class Statements(dict[str, str]):
    """Rendered texts by template. ``statements[template]`` is all that a hot path does."""

    def __init__(self, dialect: str, prefix: str, *, tables: tuple[str, ...]) -> None:
        super().__init__()
        self._words = {**WORDS[dialect], **{table: prefix + table for table in tables}}
        self._marker = "?" if dialect == SQLITE else "%s"

    def __missing__(self, template: str) -> str:
        if "%" in template:
            raise ValueError(f"a template holds no literal %: {template!r}")
        text = _NAME.sub(self._word, template).replace("?", self._marker)
        if "{" in text:
            raise ValueError(f"a template holds no literal brace: {template!r}")
        if len(self) >= CACHE_LIMIT:
            self.clear()
        self[template] = text
        return text

    def _word(self, match: re.Match[str]) -> str:
        try:
            return self._words[match.group(1)]
        except KeyError:
            raise ValueError(f"{match.group(0)} is neither a table nor a known word") from None
