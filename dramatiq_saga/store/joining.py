"""Host transactions: running inside one, and learning how it ended (HOST-1).

A call made while the calling thread has a transaction of the store's own ``Database`` open runs right there, in a savepoint:
it commits or vanishes with its host. Invariant: a callback runs after the host's outermost commit, and only if neither the
transaction nor any savepoint around the write was rolled back. Peewee forgets its callbacks when a transaction rolls back,
but not when a savepoint does, so this module listens for savepoints from the first callback on. Nor does Peewee notice that
PostgreSQL has answered COMMIT with a rollback, since a statement of the host's had failed: there, the server is asked.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import peewee
from peewee import Database

from ..errors import StoreError, WriteRefusedError
from .peewee_internals import is_in_transaction, is_manual
from .sql import POSTGRESQL, SQLITE, Statements
from .sqlite_errors import RETRYABLE, sqlite_code
from .tickets import run_callbacks
from .transactions import Quirks, ServerTx, SQLiteTx, Tx

logger = logging.getLogger("dramatiq_saga")

T = TypeVar("T")

_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|RELEASE(?:\s+SAVEPOINT)?|ROLLBACK\s+TO(?:\s+SAVEPOINT)?)\s+(.+?)\s*;?\s*$", re.IGNORECASE
)

_numbers = itertools.count(1)


class Joining:
    """Runs operations inside the calling thread's own transaction of one Database."""

    def __init__(self, database: Database, *, dialect: str, texts: Statements, quirks: Quirks) -> None:
        self._database = database
        self._dialect = dialect
        self._texts = texts
        self._quirks = quirks
        self._local = threading.local()
        self._listening = False

    def is_open(self) -> bool:
        """Whether the calling thread really is inside a transaction, not only on Peewee's books.

        Between the two COMMITs of ``transaction.commit()`` in the middle of a block, Peewee still counts one.
        """
        if not self._database.in_transaction():
            return False
        return is_in_transaction(self._database) is not False

    def run(self, operation: Callable[[Tx], T], outer: SQLiteTx | ServerTx | None) -> T:
        """Run ``operation`` in a savepoint of the open transaction; ``outer`` is the engine's, when it is one."""
        if is_manual(self._database):
            raise StoreError("inside manual_commit() nobody can tell when the transaction commits: use atomic()")
        tx = self._host_tx() if outer is None else outer
        collected, tx.callbacks = tx.callbacks, None
        name = f"saga_{next(_numbers)}"
        try:
            self._database.execute_sql(f"SAVEPOINT {name}")
            try:
                value = operation(tx)
            except BaseException as exc:
                self._undo(name, exc)
                raise
            self._database.execute_sql(f"RELEASE SAVEPOINT {name}")
            registered: list[Callable[[], None]] | None = tx.callbacks
        finally:
            tx.callbacks = collected
        if registered and outer is None:
            self._after_host_commit(registered)
        elif outer is not None:
            for callback in registered or []:
                outer.after_commit(callback)
        return value

    def _host_tx(self) -> SQLiteTx | ServerTx:
        if self._dialect == SQLITE:
            return SQLiteTx(self._database.connection(), self._texts)
        return ServerTx(self._database.cursor(), self._texts, dialect=self._dialect, quirks=self._quirks)

    def _undo(self, name: str, error: BaseException) -> None:
        """Roll back to the savepoint; raises the refusal that a contended SQLite write deserves."""
        try:
            self._database.execute_sql(f"ROLLBACK TO SAVEPOINT {name}")
            self._database.execute_sql(f"RELEASE SAVEPOINT {name}")
        except (peewee.PeeweeException, AttributeError):
            return  # the whole transaction is gone, and `error` is why: its owner has to see that
        code = sqlite_code(error)
        if code in RETRYABLE:
            raise WriteRefusedError(
                f"the host transaction could not write: {error}; begin it with atomic('IMMEDIATE') and run it again as a whole",
                "body",
                code,
                True,
            ) from error

    # --- callbacks ---------------------------------------------------------------------------------------------------

    def _after_host_commit(self, callbacks: list[Callable[[], None]]) -> None:
        if not self._listening:
            self._database.query_hooks.append(self._heard)
            self._listening = True
        log = self._log()
        if not _any_waits(log):
            log.clear()  # what an earlier transaction left behind
        waiting = _Waiting(callbacks, self._proof())
        log.append(weakref.ref(waiting))
        self._database.after_commit(waiting.fire)  # the only strong reference: a rollback drops it

    def _proof(self) -> Callable[[], bool] | None:
        """Tells, once the host's transaction has closed, whether it has committed; ``None`` where a COMMIT that returned has."""
        if self._dialect != POSTGRESQL:
            return None
        ((number,),) = self._database.execute_sql("SELECT txid_current()").fetchall()

        def has_committed() -> bool:
            try:
                ((status,),) = self._database.execute_sql("SELECT txid_status(%s)", (number,)).fetchall()
            except peewee.PeeweeException:
                return True  # COMMIT did return; a message about a run that is not there finds nothing to do
            return bool(status == "committed")

        return has_committed

    def _heard(self, event: Any) -> None:
        """After each statement of a host on this Database: follow the savepoints that are opened around callbacks."""
        log = self._log()
        if not log or event.exception is not None:
            return
        if not _any_waits(log):
            log.clear()  # the transaction has ended since
            return
        match = _SAVEPOINT.match(event.sql)
        if match is None:
            return
        verb, name = match.group(1).upper(), match.group(2)
        if verb == "SAVEPOINT":
            log.append(name)
            return
        # A name that is not in the log was opened before the first callback, so it encloses all of them.
        position = len(log) - 1 - log[::-1].index(name) if name in log else -1
        if verb.startswith("ROLLBACK"):
            for entry in log[position + 1 :]:
                waiting = entry() if isinstance(entry, weakref.ref) else None
                if waiting is not None:
                    waiting.callbacks = []
            del log[position + 1 :]
        elif position >= 0:
            log[position:] = [entry for entry in log[position:] if isinstance(entry, weakref.ref)]

    def _log(self) -> list[Any]:
        try:
            log: list[Any] = self._local.log
        except AttributeError:
            log = self._local.log = []
        return log


def _any_waits(log: list[Any]) -> bool:
    return any(isinstance(entry, weakref.ref) and entry() is not None for entry in log)


class _Waiting:
    """Callbacks of one write that wait for the commit of a host transaction."""

    __slots__ = ("__weakref__", "_proof", "callbacks")

    def __init__(self, callbacks: list[Callable[[], None]], proof: Callable[[], bool] | None) -> None:
        self.callbacks = callbacks
        self._proof = proof

    def fire(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        if not callbacks:
            return
        if self._proof is not None and not self._proof():
            # test_a_host_whose_commit_was_a_rollback_has_nothing_sent
            logger.error(
                "a host's transaction was rolled back by COMMIT, for a statement in it had failed: what was started in it is gone"
            )
            return
        run_callbacks(callbacks)
