"""What an error of a database server says about the transaction that met it.

Judged by SQLSTATE and error numbers, never by text. Whether an operation may be run again rests on it, so what is not known
to prove a rollback proves nothing. Nothing here acts.
"""

from __future__ import annotations

from enum import Enum

import peewee

from .sql import POSTGRESQL


class LostTransaction(Exception):
    """COMMIT would not have committed what the operation wrote, though no statement of it had failed (CLAIM-3)."""


class SilentRollback(LostTransaction):
    """PostgreSQL had aborted the transaction: COMMIT would have rolled back, and called that a success."""

    def __str__(self) -> str:
        return "a statement had failed and its error was swallowed, so the server rolled everything back"


class ReplacedTransaction(LostTransaction):
    """The transaction had been ended before COMMIT: whether as a commit or as a rollback, nobody here knows."""

    def __str__(self) -> str:
        return "the transaction had been ended before COMMIT, by something else than the engine"


class Fate(Enum):
    """What became of the transaction, as far as the error alone can tell."""

    #: Rolled back by the server; running it again may succeed: deadlock, serialisation failure, lock wait, no free connection.
    AGAIN = "again"
    #: The connection is gone. Unless COMMIT had been sent, the server rolls back.
    LOST = "lost"
    #: The server's surroundings are at fault, not the operation: disk, memory, shutdown, a read-only standby.
    REFUSED = "refused"
    #: The operation's own: a constraint, a wrong statement, a value too large; or no error of the database at all.
    OTHER = "other"


# Deadlock and serialisation failure.
_PG_AGAIN = frozenset({"40001", "40P01"})
# Connection exceptions, shutdown and crash, session timeouts.
_PG_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
# A limit of the server that the statement or a value of it exceeds.
_PG_TOO_LARGE = "54"
# What the server may answer to COMMIT, having rolled back: deferred constraints, serialisation, triggers.
_PG_ANSWERS_COMMIT = ("23", "40", "P0")

# Lock wait timeout, deadlock.
_MYSQL_DEADLOCK = 1213
_MYSQL_AGAIN = frozenset({1205, _MYSQL_DEADLOCK})
# Client: no connection (0), gone away, lost, lost at a system call. Server: shutdown, killed, idle for too long.
_MYSQL_LOST = frozenset({0, 2006, 2013, 2055, 1053, 1927, 4031})
# The statement's own, which the drivers file under operational errors: unknown column, packet too large, no default value,
# number out of range, check constraint (MySQL, MariaDB).
_MYSQL_OWN = frozenset({1054, 1153, 1364, 1690, 3819, 4025})
_MYSQL_OWN_STATES = ("21", "22", "23", "42")
# Of the connection, with a state of that class: no access to the database, no such database.
_MYSQL_NO_DATABASE = 1049
_MYSQL_CONNECTING = frozenset({1044, _MYSQL_NO_DATABASE})


def fate_of(error: BaseException, dialect: str) -> Fate:
    """What ``error`` says."""
    if isinstance(error, LostTransaction):
        return Fate.REFUSED
    if type(error).__name__ == "MaxConnectionsExceeded":  # of playhouse.pool, which is not imported for this
        return Fate.AGAIN
    original = getattr(error, "orig", None)
    if original is None:
        return Fate.OTHER
    surroundings = isinstance(error, peewee.OperationalError | peewee.InternalError | peewee.InterfaceError)
    if dialect == POSTGRESQL:
        state = sqlstate(error)
        if state is None:  # the driver's own: there was nobody to give a state
            return Fate.LOST if surroundings and not isinstance(error, peewee.InternalError) else Fate.OTHER
        if state in _PG_AGAIN:
            return Fate.AGAIN
        if state.startswith(_PG_LOST):
            return Fate.LOST
        return Fate.REFUSED if surroundings and not state.startswith(_PG_TOO_LARGE) else Fate.OTHER
    number = _number(original)
    if number in _MYSQL_AGAIN:
        return Fate.AGAIN
    if number in _MYSQL_LOST or isinstance(error, peewee.InterfaceError):
        return Fate.LOST
    own = number in _MYSQL_OWN or (sqlstate(error) or "").startswith(_MYSQL_OWN_STATES)
    return Fate.REFUSED if surroundings and (not own or number in _MYSQL_CONNECTING) else Fate.OTHER


def way_out(error: BaseException) -> str:
    """What to do about a connection that was refused with ``error``, where that says it; to stand behind it."""
    missing = sqlstate(error) == "3D000" or _number(getattr(error, "orig", None)) == _MYSQL_NO_DATABASE
    return "; create that database, or correct its name in the address" if missing else ""


def answers_commit(error: BaseException, dialect: str) -> bool:
    """Whether ``error``, raised by COMMIT, is the server's word that it has rolled back."""
    if isinstance(error, SilentRollback):
        return True
    if dialect == POSTGRESQL:
        return (sqlstate(error) or "").startswith(_PG_ANSWERS_COMMIT)
    return _number(getattr(error, "orig", None)) == _MYSQL_DEADLOCK  # a cluster's word that another node was faster


def _number(original: object) -> object:
    arguments = getattr(original, "args", None)
    return getattr(original, "errno", None) or (arguments[0] if arguments else None)


def sqlstate(error: BaseException) -> str | None:
    """The five characters that the server gave with an error of Peewee's; ``None`` where there are none."""
    original = getattr(error, "orig", None)
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
