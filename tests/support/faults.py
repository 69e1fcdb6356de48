"""SQLite connections that fail on demand: at a statement, at COMMIT, at ROLLBACK; and one that records what was executed.

Give ``Database(path)`` to a store or a broker and arm its ``faults``: every connection that the engine opens through it is
one of these. A fault says which statement it meets, how often, and whether the statement is executed before it fails.
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peewee

BUSY, IOERR_WRITE, FULL, READONLY, CONSTRAINT = 5, 778, 13, 8, 19

_NAMES = {BUSY: "SQLITE_BUSY", IOERR_WRITE: "SQLITE_IOERR_WRITE", FULL: "SQLITE_FULL", READONLY: "SQLITE_READONLY"}


def driver_error(code: int, text: str = "injected") -> sqlite3.Error:
    """An error as the driver raises it, with its result code."""
    kind = sqlite3.IntegrityError if code == CONSTRAINT else sqlite3.OperationalError
    error = kind(f"{text} ({_NAMES.get(code, code)})")
    error.sqlite_errorcode = code
    error.sqlite_errorname = _NAMES.get(code, "SQLITE_ERROR")
    return error


@dataclass
class Fault:
    """Fails statements that start with ``statement`` and contain ``containing``, ``times`` times."""

    statement: str
    code: int = BUSY
    times: int = 1
    containing: str = ""
    executed: bool = False  # the statement takes effect before it fails

    def meets(self, sql: str) -> bool:
        return self.times > 0 and sql.startswith(self.statement) and self.containing in sql


@dataclass
class Faults:
    """What is armed, and every statement that was executed or refused while recording."""

    armed: list[Fault] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, statement: str, code: int = BUSY, **options: Any) -> None:
        self.armed.append(Fault(statement, code, **options))

    def clear(self) -> None:
        self.armed.clear()
        self.statements.clear()

    def count(self, statement: str) -> int:
        return sum(1 for sql in self.statements if sql.startswith(statement))


class Database(peewee.SqliteDatabase):
    """A Peewee database whose driver connections obey ``faults``."""

    def __init__(self, path: Path | str, **options: Any) -> None:
        self.faults = faults = Faults()

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                with faults.lock:
                    faults.statements.append(sql)
                    fault = next((one for one in faults.armed if one.meets(sql)), None)
                    if fault is not None:
                        fault.times -= 1
                if fault is None:
                    return super().execute(sql, parameters)
                if fault.executed:
                    super().execute(sql, parameters).fetchall()
                raise driver_error(fault.code, sql.split()[0])

        super().__init__(str(path), factory=Connection, **options)
