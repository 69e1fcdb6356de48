"""What an error of a server says about its transaction."""

from __future__ import annotations

from typing import Any

import peewee
import pytest

from dramatiq_saga.store.server_errors import Fate, SilentRollback, answers_commit, fate_of


def postgresql(kind: type[peewee.PeeweeException], state: str | None, attribute: str = "sqlstate") -> BaseException:
    original = Exception("from the driver")
    setattr(original, attribute, state)
    return kind(original, "text")


def mysql(kind: type[peewee.PeeweeException], number: int, state: str | None = None) -> BaseException:
    original: Any = Exception(number, "from the driver")
    original.sqlstate = state
    return kind(original, number, "text")


OPERATIONAL, INTERNAL, INTERFACE = peewee.OperationalError, peewee.InternalError, peewee.InterfaceError

POSTGRESQL = [
    (OPERATIONAL, "40001", Fate.AGAIN),  # serialisation failure
    (OPERATIONAL, "40P01", Fate.AGAIN),  # deadlock
    (OPERATIONAL, "57P01", Fate.LOST),  # terminated by an administrator
    (OPERATIONAL, "08006", Fate.LOST),  # connection failure
    (INTERNAL, "25P03", Fate.LOST),  # idle in transaction for too long
    (OPERATIONAL, None, Fate.LOST),  # the driver found the socket closed
    (INTERFACE, None, Fate.LOST),
    (OPERATIONAL, "53100", Fate.REFUSED),  # disk full
    (OPERATIONAL, "55P03", Fate.REFUSED),  # lock not available
    (OPERATIONAL, "57014", Fate.REFUSED),  # statement timeout
    (INTERNAL, "25006", Fate.REFUSED),  # a standby is read-only
    (INTERNAL, "25P02", Fate.REFUSED),  # an earlier error was swallowed
    (OPERATIONAL, "54000", Fate.OTHER),  # a value too large
    (peewee.IntegrityError, "23505", Fate.OTHER),
    (peewee.ProgrammingError, "42P01", Fate.OTHER),
    (peewee.DataError, "22001", Fate.OTHER),
    (peewee.DataError, None, Fate.OTHER),  # a NUL in a text
]

MYSQL = [
    (OPERATIONAL, 1213, None, Fate.AGAIN),  # deadlock
    (OPERATIONAL, 1205, None, Fate.AGAIN),  # lock wait timeout
    (OPERATIONAL, 2006, None, Fate.LOST),
    (OPERATIONAL, 2013, None, Fate.LOST),
    (OPERATIONAL, 1927, None, Fate.LOST),  # killed
    (OPERATIONAL, 4031, None, Fate.LOST),  # idle for too long
    (INTERFACE, 0, None, Fate.LOST),
    (OPERATIONAL, 1290, None, Fate.REFUSED),  # read-only
    (OPERATIONAL, 1114, None, Fate.REFUSED),  # table full
    (OPERATIONAL, 1040, "08004", Fate.REFUSED),  # too many connections
    (OPERATIONAL, 1049, "42000", Fate.REFUSED),  # no such database
    (OPERATIONAL, 1044, "42000", Fate.REFUSED),  # no access to it
    (OPERATIONAL, 1054, "42S22", Fate.OTHER),  # unknown column
    (OPERATIONAL, 1153, "08S01", Fate.OTHER),  # packet too large
    (OPERATIONAL, 4025, "23000", Fate.OTHER),  # a check constraint
    (OPERATIONAL, 3819, "HY000", Fate.OTHER),
    (peewee.IntegrityError, 1062, "23000", Fate.OTHER),
]


@pytest.mark.parametrize(("kind", "state", "fate"), POSTGRESQL)
def test_postgresql_is_judged_by_its_state(kind: Any, state: str | None, fate: Fate) -> None:
    assert fate_of(postgresql(kind, state), "postgresql") is fate
    assert fate_of(postgresql(kind, state, "pgcode"), "postgresql") is fate, "psycopg2"


@pytest.mark.parametrize(("kind", "number", "state", "fate"), MYSQL)
def test_mysql_is_judged_by_its_number(kind: Any, number: int, state: str | None, fate: Fate) -> None:
    assert fate_of(mysql(kind, number, state), "mysql") is fate


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_an_error_that_is_none_of_the_database_says_nothing(dialect: str) -> None:
    assert fate_of(ValueError(), dialect) is Fate.OTHER
    assert fate_of(peewee.OperationalError("made by Peewee"), dialect) is Fate.OTHER
    assert not answers_commit(ValueError(), dialect)
    assert not answers_commit(peewee.OperationalError("made by Peewee"), dialect)


def test_only_the_servers_own_word_proves_that_commit_rolled_back() -> None:
    """Everything else that COMMIT raises leaves the write unknown."""
    assert answers_commit(SilentRollback(), "postgresql")
    proven = {state: answers_commit(postgresql(kind, state), "postgresql") for kind, state, _ in POSTGRESQL if state}
    assert [state for state, answered in proven.items() if answered] == ["40001", "40P01", "23505"]
    assert not answers_commit(postgresql(OPERATIONAL, None), "postgresql")
    numbers = [number for kind, number, state, _ in MYSQL if answers_commit(mysql(kind, number, state), "mysql")]
    assert numbers == [1213]
