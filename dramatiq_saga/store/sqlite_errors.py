"""What an error of SQLite says, and what a caller is told once the rollback is proven.

Judged by SQLite's extended result code, never by text. An error that the database's surroundings have caused (a lock, the
disk, permissions) becomes a StoreError: the same operation may succeed later. An error that the operation has caused (a
constraint, a wrong statement, a value too large) passes through as it is.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ..errors import DatabaseUnusableError, WriteRefusedError

#: Contention: BUSY, LOCKED, BUSY_RECOVERY, LOCKED_SHAREDCACHE, BUSY_SNAPSHOT, BUSY_TIMEOUT. After one of these the same
#: transaction may be run again once its rollback is proven.
RETRYABLE = frozenset({5, 6, 261, 262, 517, 773})

# Primary codes. PERM, READONLY, CORRUPT, CANTOPEN, AUTH, NOTADB: somebody has to mend the file or its permissions.
_UNUSABLE = frozenset({3, 8, 11, 14, 23, 26})
# BUSY, LOCKED, NOMEM, INTERRUPT, IOERR, FULL, PROTOCOL, SCHEMA, NOLFS: the surroundings, and they may change.
_SURROUNDINGS = frozenset({5, 6, 7, 9, 10, 13, 15, 17, 22})


def sqlite_code(error: BaseException | None) -> int | None:
    """The extended result code of the first SQLite error behind an exception."""
    for _ in range(20):
        if error is None:
            return None
        original = error if isinstance(error, sqlite3.Error) else getattr(error, "orig", None)
        if isinstance(original, sqlite3.Error):
            return getattr(original, "sqlite_errorcode", None)
        error = error.__cause__ or error.__context__
    return None


def is_of_the_surroundings(code: int | None) -> bool:
    """Whether the operation is innocent of the error."""
    return code is not None and (code & 0xFF in _SURROUNDINGS or code & 0xFF in _UNUSABLE)


def refusal(error: BaseException | None, path: str, *, phase: str, executed: bool) -> BaseException:
    """What the caller of an operation gets that is proven not to have happened."""
    code = sqlite_code(error)
    if error is not None and (code is None or (phase == "body" and not is_of_the_surroundings(code))):
        return error  # the operation's own, a statement's of it, or a check's of the schema
    if error is not None and code is not None and code & 0xFF in _UNUSABLE:
        refused: BaseException = unusable(error, path, phase=phase, executed=executed)
    else:
        reason = "the writer's connection was not idle" if error is None else error
        refused = WriteRefusedError(f"the database refused the write ({phase}): {reason}", phase, code, executed)
    refused.__cause__ = error
    return refused


def unusable(error: BaseException, path: str, *, phase: str = "connect", executed: bool = False) -> DatabaseUnusableError:
    """The error for a file that cannot serve, with the way out."""
    code = sqlite_code(error)
    parent = Path(path).resolve().parent
    match code & 0xFF if code is not None else None:
        case 14 if _is_missing(parent):
            hint = f"the directory {parent} does not exist: create it"
        case 3 | 14 | 23:
            hint = f"check that it is a file, and that this user may read and write it and the directory {parent}"
        case 26:
            hint = "it is not an SQLite database, or it is encrypted: choose another path"
        case 8:
            hint = f"it is read-only: this user must be able to write the file and the directory {parent}"
        case 11:
            hint = "it is damaged: restore a backup, or see https://sqlite.org/recovery.html"
        case 5 | 6:
            hint = "another process keeps it locked: find it (a backup, an open shell) and let it finish"
        case _:
            hint = "check the disk and the permissions"
    return DatabaseUnusableError(f"cannot use the SQLite file {path}: {error}; {hint}", phase, code, executed)


def _is_missing(folder: Path) -> bool:
    try:
        return not folder.is_dir()
    except PermissionError:  # in a folder that this user may not enter
        return False
