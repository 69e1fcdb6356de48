"""What an error of a database server says about the transaction that met it.

Judged by SQLSTATE and error numbers, never by text. Nothing here acts.
"""

from __future__ import annotations

from enum import Enum

import peewee

from .sql import POSTGRESQL


class SilentRollback(Exception):
    """PostgreSQL answered COMMIT with a rollback."""


class Fate(Enum):
    """What became of the transaction, as far as the error alone can tell."""

    #: Rolled back by the server; running it again may succeed: deadlock, serialisation failure, lock wait, no free connection.
    AGAIN = "again"
    #: Rolled back by the server, as its answer to COMMIT.
    REFUSED = "refused"
    #: The connection is gone. Unless COMMIT had been sent, the server rolls back.
    LOST = "lost"
    #: Nothing.
    OTHER = "other"

    @property
    def proves_rollback(self) -> bool:
        """Whether the transaction is known to be gone even though COMMIT had been sent."""
        return self in (Fate.AGAIN, Fate.REFUSED)


# Deadlock and serialisation failure.
_PG_AGAIN = frozenset({"40001", "40P01"})
# Connection exceptions, shutdown and crash, session timeouts.
_PG_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
# Constraints and triggers that are checked at COMMIT.
_PG_REFUSES_COMMIT = ("23", "40", "P0")

# Lock wait timeout, deadlock.
_MYSQL_AGAIN = frozenset({1205, 1213})
# The statement is larger than max_allowed_packet.
_MYSQL_TOO_LARGE = frozenset({1153})
# Client: no connection (0), gone away, lost, lost at a system call. Server: shutdown, killed, idle for too long.
_MYSQL_LOST = frozenset({0, 2006, 2013, 2055, 1053, 1927, 4031})


def is_trouble(error: BaseException) -> bool:
    """Whether an error of the driver's is about the database (not reached, full, read-only, changed, forbidden) rather than about
    the values of a statement: then the same statement may succeed later."""
    if not isinstance(error, peewee.DatabaseError | peewee.InterfaceError):
        return False
    if isinstance(error, peewee.DataError | peewee.IntegrityError):
        return False
    original = getattr(error, "orig", None)
    return not (original is not None and original.args and original.args[0] in _MYSQL_TOO_LARGE)


def fate_of(error: BaseException, dialect: str, *, committing: bool) -> Fate:
    """What ``error`` says; ``committing`` when it was raised by COMMIT."""
    if isinstance(error, SilentRollback):
        return Fate.REFUSED
    if type(error).__name__ == "MaxConnectionsExceeded":  # of playhouse.pool, which is not imported for this
        return Fate.AGAIN
    original = getattr(error, "orig", None)
    if original is None:
        return Fate.OTHER
    unspecific = isinstance(error, peewee.OperationalError | peewee.InterfaceError)
    if dialect == POSTGRESQL:
        state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
        if state is None:
            return Fate.LOST if unspecific else Fate.OTHER  # the driver's own: there was nobody to give a state
        if state in _PG_AGAIN:
            return Fate.AGAIN
        if state.startswith(_PG_LOST):
            return Fate.LOST
        return Fate.REFUSED if committing and state.startswith(_PG_REFUSES_COMMIT) else Fate.OTHER
    number = getattr(original, "errno", None) or (original.args[0] if original.args else None)
    if number in _MYSQL_AGAIN:
        return Fate.AGAIN
    if number in _MYSQL_LOST or isinstance(error, peewee.InterfaceError):
        return Fate.LOST
    return Fate.OTHER
