"""PostgreSQL, MySQL and MariaDB: a few engine threads with connections of their own.

Transactions of the engine run on these threads and never on the caller's, so that Dramatiq's asynchronous interrupts
cannot land inside a driver, and a transaction that a step opens on the same ``Database`` object never mixes with the
engine's (C59). At most :data:`MAX_THREADS` threads exist per process, so at most as many connections.

Invariants: an operation is run again only when it is certain that its last run has not committed, which on a server is so
until COMMIT has been sent. A connection found dead is replaced once before giving up. COMMIT of a transaction that the
server has aborted is reported as a refusal, never as a success.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import peewee
from peewee import Database

from ..errors import DatabaseUnusableError, StoreError, WriteRefusedError, WriteUnknownError
from .connections import keep_inherited
from .sql import MYSQL, POSTGRESQL, Statements
from .tickets import Ticket
from .transactions import ServerTx

logger = logging.getLogger("dramatiq_saga")

#: Engine threads, and so connections, per process and store.
MAX_THREADS = 8

#: Attempts at one operation that meets deadlocks or serialisation failures, and for how long new ones are started, seconds.
MAX_ATTEMPTS = 8
RETRY_WINDOW = 10.0

_PG_ROLLED_BACK = ("40001", "40P01")
_PG_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
# Deferred constraints and triggers: errors that the server itself gives as the answer to COMMIT, having rolled back.
_PG_REFUSES_COMMIT = ("23", "40", "P0")
_MYSQL_ROLLED_BACK = (1205, 1213)
_MYSQL_IN_TRANSACTION = 1
_MYSQL_LOST = (0, 1053, 1927, 2006, 2013, 2055, 4031)


class Servers:
    """The way to the engine threads."""

    def __init__(
        self,
        database: Database,
        dialect: str,
        texts: Statements,
        *,
        prepare: Callable[[], None],
        local: threading.local,
        connected: Callable[[Any], None],
    ) -> None:
        from playhouse.pool import PooledDatabase

        self.database = database
        self.dialect = dialect
        self.texts = texts
        self.prepare = prepare
        self.local = local
        self.connected = connected
        self.pooled = isinstance(database, PooledDatabase)
        self._reset()

    def _reset(self) -> None:
        self.queue: SimpleQueue[Ticket[Any] | None] = SimpleQueue()
        self.idle = Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[_ServerThread] = []

    def submit(self, ticket: Ticket[Any], *, read: bool = False) -> None:
        """Put an operation in the queue; the ticket tells the rest."""
        ticket.read = read
        with self._lock:
            if not self.idle.acquire(blocking=False) and len(self._threads) < MAX_THREADS:
                thread = _ServerThread(self)
                self._threads.append(thread)
                thread.start()
            self.queue.put(ticket)

    def close(self) -> None:
        """Finish what is queued, close the connections, end the threads. The next operation starts anew."""
        with self._lock:
            threads, self._threads = self._threads, []
            for _ in threads:
                self.queue.put(None)
            self.queue = SimpleQueue()
            self.idle = Semaphore(0)
        for thread in threads:
            thread.join()

    def abandon(self) -> None:
        """In a forked child: the threads are gone, and their connections are the parent's."""
        keep_inherited(self._threads)
        self._reset()


class _ServerThread(Thread):
    """Executes tickets one after the other on its thread's connection of the Database."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(name="dramatiq-saga-store", daemon=True)
        self._servers = servers
        self._database = servers.database
        self._queue = servers.queue
        self._idle = servers.idle
        self._connection: Any = None
        self._cursor: Any = None
        self._tx: ServerTx

    def run(self) -> None:
        while True:
            try:
                ticket = self._queue.get_nowait()
            except Empty:
                self._idle.release()
                ticket = self._queue.get()
            if ticket is None:
                break
            if ticket.start():
                try:
                    self._serve(ticket)
                except BaseException as exc:  # a fault of ours: whoever waits must not wait for ever
                    logger.exception("an engine thread met an unexpected error")
                    self._disconnect()
                    if not ticket.done:
                        ticket.fail(WriteUnknownError(f"the engine thread failed: {exc!r}", "body", None, True))
                if self._servers.pooled:
                    self._hand_back()
            ticket = None  # type: ignore[assignment]  # an idle thread keeps nothing alive
        self._disconnect()

    def _serve(self, ticket: Ticket[Any]) -> None:
        """Run one operation to its end: committed, refused, or unknown."""
        deadline = time.monotonic() + RETRY_WINDOW
        attempt, replaced = 1, False
        while True:
            phase, kept = "connect", self._connection is not None
            try:
                self._connect()
                if ticket.control is not None:
                    ticket.finish(ticket.control())
                    return
                self._servers.prepare()
                phase = "begin"
                self._begin(ticket.read)
                phase, ticket.executed = "body", True
                self._tx.callbacks = None
                value = ticket.operation(self._tx)
                callbacks = self._tx.callbacks
                phase = "commit"
                self._commit()
            except BaseException as exc:
                error = exc
            else:
                ticket.finish(value, callbacks)
                return

            fate = self._fate(error, phase)
            if phase == "commit" and ticket.read:
                self._disconnect()
                ticket.finish(value, callbacks)  # everything had been read
                return
            if phase == "commit" and fate not in ("rolled back", "aborted"):
                self._disconnect()
                ticket.fail(_told(WriteUnknownError, "nobody can say whether the write happened", phase, error, executed=True))
                return
            if phase != "connect":
                self._roll_back(lost=fate == "lost")
            if fate == "lost" and not replaced and (kept or phase != "connect"):
                replaced = True  # nothing was committed: COMMIT has not been sent
                continue
            if fate == "rolled back" and attempt < MAX_ATTEMPTS and time.monotonic() < deadline:
                time.sleep(random.uniform(0.2, 1.0) * min(0.005 * 2**attempt, 0.25))
                attempt += 1
                continue
            ticket.fail(self._verdict(ticket, phase, fate, error))
            return

    def _verdict(self, ticket: Ticket[Any], phase: str, fate: str, error: BaseException) -> BaseException:
        """The error for an operation that is certain not to have happened."""
        if phase == "connect" and isinstance(error, peewee.ImproperlyConfigured):
            unusable = DatabaseUnusableError(f"{error} Install the driver: dramatiq-saga[postgres] or dramatiq-saga[mysql]")
            unusable.__cause__ = error
            return unusable
        if (phase == "body" and fate == "other") or isinstance(error, peewee.IntegrityError):
            return error  # raised by the operation, or by a statement of its own
        if phase == "connect" and not isinstance(error, peewee.PeeweeException | OSError):
            return error
        kind = StoreError if ticket.read else WriteRefusedError
        return _told(kind, f"the database refused the {'read' if ticket.read else 'write'}", phase, error, executed=ticket.executed)

    # --- one transaction ---------------------------------------------------------------------------------------------

    def _begin(self, read: bool) -> None:
        execute = self._cursor.execute
        with peewee.__exception_wrapper__:
            if self._servers.dialect == POSTGRESQL:
                execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" if read else "BEGIN ISOLATION LEVEL READ COMMITTED")
            elif read:
                execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                execute("START TRANSACTION READ ONLY")
            else:
                if self._servers.pooled:
                    execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                execute("START TRANSACTION")
        self._database.push_transaction(self)

    def _commit(self) -> None:
        cursor = self._cursor
        with peewee.__exception_wrapper__:
            if self._servers.dialect == POSTGRESQL:
                cursor.execute("COMMIT")
                # COMMIT of an aborted transaction succeeds as a ROLLBACK; only its tag tells.
                if cursor.statusmessage != "COMMIT":
                    raise _Aborted("a statement had failed and its error was swallowed, so the server rolled the transaction back")
            else:
                status = getattr(self._connection, "server_status", None)
                if isinstance(status, int) and not status & _MYSQL_IN_TRANSACTION:
                    # It ended the transaction behind our back (a swallowed deadlock, DDL): what followed was autocommitted.
                    raise RuntimeError("the transaction had ended before COMMIT")
                cursor.execute("COMMIT")
        self._database.pop_transaction()

    def _roll_back(self, *, lost: bool) -> None:
        """End the failed transaction, or the connection with it: either undoes everything, for COMMIT was not sent."""
        if not lost:
            try:
                self._cursor.execute("ROLLBACK")
                if self._database.top_transaction() is self:
                    self._database.pop_transaction()
                if not self._database.transaction_depth():
                    return
            except BaseException:
                logger.debug("ROLLBACK failed; the connection is dropped", exc_info=True)
        self._disconnect()

    def _fate(self, error: BaseException, phase: str) -> str:
        """What an error says of the transaction.

        ``rolled back``: it is gone and may be run again. ``aborted``: it is gone, COMMIT was answered with a refusal.
        ``lost``: the connection is. ``other``: nothing in itself.
        """
        if isinstance(error, _Aborted):
            return "aborted"
        if type(error).__name__ == "MaxConnectionsExceeded":
            return "rolled back"
        original = getattr(error, "orig", None)
        if original is None:
            return "other"
        if self._servers.dialect == POSTGRESQL:
            state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
            if state in _PG_ROLLED_BACK:
                return "rolled back"
            if state is not None:
                if state.startswith(_PG_LOST):
                    return "lost"
                return "aborted" if phase == "commit" and state.startswith(_PG_REFUSES_COMMIT) else "other"
            return "lost" if isinstance(error, peewee.OperationalError | peewee.InterfaceError) else "other"
        code = original.args[0] if original.args else None
        if code in _MYSQL_ROLLED_BACK:
            return "rolled back"
        return "lost" if code in _MYSQL_LOST or isinstance(error, peewee.InterfaceError) else "other"

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connection is not None:
            return
        self._database.connect(reuse_if_open=True)
        connection = self._database.connection()
        self._cursor = connection.cursor()
        self._servers.local.tx = self._tx = ServerTx(self._cursor, self._servers.dialect, self._servers.texts)
        if self._servers.dialect == MYSQL and not self._servers.pooled:
            with peewee.__exception_wrapper__:
                self._cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
                # Never cut a value short in silence, whatever the server's default is.
                self._cursor.execute("SET SESSION sql_mode = CONCAT(@@SESSION.sql_mode, ',STRICT_TRANS_TABLES')")
        self._servers.connected(self._cursor)
        self._connection = connection

    def _hand_back(self) -> None:
        """To a pool, after each operation: its connections are everybody's."""
        if self._connection is not None:
            self._connection = self._cursor = None
            self._database.close()

    def _disconnect(self) -> None:
        self._connection = self._cursor = None
        if self._database.is_closed():
            return
        connection = self._database.connection()
        try:
            if self._servers.pooled:
                self._database._close(connection, close_conn=True)
            else:
                connection.close()
        except Exception:
            logger.debug("a dead connection could not be closed", exc_info=True)
        self._database._state.reset()  # dispose() would empty a whole pool


class _Aborted(Exception):
    """The server had thrown the transaction away before COMMIT."""


def _told(kind: type[StoreError], what: str, phase: str, error: BaseException, *, executed: bool) -> StoreError:
    told = kind(f"{what} ({phase}): {error}", phase, None, executed)
    told.__cause__ = error
    return told
