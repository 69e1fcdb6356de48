"""Telling trouble with a database from a value that it will never take.

A full disk, a file that became read-only, a table locked by a migration: none of it is the fault of the step whose outcome is
being written, and all of it may pass. So whoever records something waits (FENCE-3, NATIVE-7). A value that is too large for
the database is another matter: no waiting mends it, and the step has to fail with that cause (CODEC-2).
"""

from __future__ import annotations

import peewee

from ..errors import DatabaseUnusableError, SchemaVersionError, StoreError
from .server_errors import LostTransaction

# SQLite's TOOBIG; PostgreSQL's class 54, limits of the program; MySQL's "packet too large".
_SQLITE_TOO_BIG, _PG_LIMITS, _MYSQL_PACKET = 18, "54", 1153

# PostgreSQL's words for a value of a kind that its column or operator does not take: no waiting turns it into another.
_PG_WRONG_KIND = frozenset({"42804", "42846", "42883", "42P18", "42601"})


def is_trouble(error: BaseException) -> bool:
    """Whether ``error`` says that the database cannot be used just now, whatever is written: the write may be tried again.

    False for errors about the values of a statement or a constraint, and for errors that are not a database's.
    """
    if isinstance(error, StoreError | DatabaseUnusableError | SchemaVersionError):
        return True
    if not isinstance(error, peewee.PeeweeException) or isinstance(error, peewee.DataError | peewee.IntegrityError):
        return False
    original = getattr(error, "orig", None)
    if getattr(original, "sqlite_errorcode", None) == _SQLITE_TOO_BIG:
        return False
    state = str(getattr(original, "sqlstate", None) or "")
    if state.startswith(_PG_LIMITS) or state in _PG_WRONG_KIND:
        return False
    return not (original is not None and original.args[:1] == (_MYSQL_PACKET,))


def is_lost_commit(error: BaseException) -> bool:
    """Whether ``error`` says that something else than the engine had ended or aborted a write's transaction before its COMMIT (CLAIM-3).

    Then the write is gone, except that a hook which commits may have kept a part of it: who has to know reads it back.
    """
    return isinstance(error, StoreError) and isinstance(error.__cause__, LostTransaction)
