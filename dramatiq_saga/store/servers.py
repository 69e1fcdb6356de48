"""PostgreSQL, MySQL and MariaDB: a few engine threads with connections of their own.

Transactions of the engine run on these threads and never on the caller's, so that Dramatiq's asynchronous interrupts
cannot land inside a driver, and a transaction that a step opens on the same ``Database`` object never mixes with the
engine's (C59). At most :data:`MAX_THREADS` threads exist per process and store, and :data:`URGENT_THREADS` that serve what
must not wait behind the others; so at most as many connections.

Invariants: an operation is run again only when it is certain that its last run has not committed, which on a server is so
until COMMIT has been sent. A connection found dead is replaced once before giving up. A COMMIT that is reported as a success
has committed the very transaction that the operation ran in, whatever a host's hooks did to it: on PostgreSQL a cursor that
lives as long as the transaction proves that, in the round trips that BEGIN and COMMIT take anyway (CLAIM-3).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import peewee
from peewee import Database

from ..errors import StoreError, WriteRefusedError, WriteUnknownError
from .peewee_internals import commit_callbacks, destroy, driver_errors, is_in_transaction, is_pooled, keep_inherited
from .server_errors import Fate, ReplacedTransaction, SilentRollback, answers_commit, fate_of, sqlstate, way_out
from .sql import MYSQL, POSTGRESQL, Statements
from .tickets import Ticket
from .transactions import Quirks, ServerTx

logger = logging.getLogger("dramatiq_saga")

#: Engine threads, and so connections, per process and store.
MAX_THREADS = 8

#: As many more, for urgent tickets alone: the heartbeat and the extension of leases say that this process lives, also while all the
#: others wait for a row that somebody keeps locked. One each: the rows of one do not hold up the other.
URGENT_THREADS = 2

#: Attempts at one operation that meets deadlocks or serialisation failures, and for how long new ones are started, seconds.
MAX_ATTEMPTS = 8
RETRY_WINDOW = 10.0

#: A write that stands still between two statements for so many seconds is ended by the server (not by MySQL's): its process is stopped,
#: its machine suspended or cut off, and whoever comes to the rows that it has locked, every sweep included, would wait as long as that.
#: A process that goes on finds its connection lost, and begins the write again.
STANDSTILL = 30

# The cursor belongs to the transaction and ends with it, so closing it fails where COMMIT would not commit what was written:
# in a transaction that a failed statement has aborted, and in another one than the one begun here. It reads nothing.
_PG_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_PG_WRITE = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '%ds'; "
    "DECLARE saga_transaction CURSOR FOR SELECT 1"
)
_PG_COMMIT = "CLOSE saga_transaction; COMMIT"
# differs because: MySQL has no such limit; to it, what stands between the marks is a comment.
_MYSQL_STANDSTILL = "SET SESSION sql_warnings = @@sql_warnings /*M!100306 , SESSION idle_write_transaction_timeout = %d */"
_PG_ABORTED, _PG_NO_SUCH_CURSOR = "25P02", "34000"


class Servers:
    """The way to the engine threads, which it starts as they are needed.

    ``prepare`` is called on an engine thread before an operation and sees to the schema and the clock. ``local.tx`` is set
    there to the transaction object, so that a call from inside an operation finds it.
    """

    def __init__(
        self,
        database: Database,
        texts: Statements,
        *,
        dialect: str,
        quirks: Quirks,
        prepare: Callable[[], None],
        local: threading.local,
    ) -> None:
        self.database = database
        self.dialect = dialect
        self.quirks = quirks
        self.texts = texts
        self.prepare = prepare
        self.local = local
        self.pooled = is_pooled(database)
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._lane, self._urgent = _Lane(MAX_THREADS), _Lane(URGENT_THREADS)

    def submit(self, ticket: Ticket[Any]) -> None:
        """Put an operation in the queue; the ticket tells the rest."""
        with self._lock:
            lane = self._urgent if ticket.urgent else self._lane
            lane.queue.put(ticket)
            if not lane.take_idle() and len(lane.threads) < lane.limit:
                thread = _ServerThread(self, lane)
                thread.start()
                lane.threads.append(thread)

    @property
    def serves_urgent(self) -> bool:
        """Whether an urgent ticket has come: this is a worker process, which says that it lives."""
        return bool(self._urgent.threads)

    def close(self) -> None:
        """Finish what is queued, close the connections, end the threads. The next operation starts anew."""
        with self._lock:
            lanes = self._lane, self._urgent
            self._lane, self._urgent = _Lane(MAX_THREADS), _Lane(URGENT_THREADS)
            for lane in lanes:
                for _ in lane.threads:
                    lane.queue.put(None)
        for lane in lanes:
            for thread in lane.threads:
                thread.join()

    def abandon(self) -> None:
        """In a forked child: the threads are gone, and their connections are the parent's."""
        keep_inherited((self._lane, self._urgent))
        self._renew()


class _Lane:
    """A queue, the threads that serve it, at most ``limit``, and how many of them wait at it.

    Queue and count are moved by single calls into C: an interrupt that lands in a caller cannot leave a lock behind, as it could in
    one of Python's own semaphores. test_an_interrupt_around_a_step_on_a_server_leaves_no_lock_behind
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.threads: list[_ServerThread] = []
        self.queue: SimpleQueue[Ticket[Any] | None] = SimpleQueue()
        self.idle: deque[None] = deque()  # a token for each thread that waits

    def take_idle(self) -> bool:
        """Whether a thread waits, which is then spoken for."""
        try:
            self.idle.pop()
        except IndexError:
            return False
        return True


class _ServerThread(Thread):
    """Executes tickets one after the other on its own connection of the Database."""

    def __init__(self, servers: Servers, lane: _Lane) -> None:
        super().__init__(name="dramatiq-saga-store", daemon=True)
        self._servers = servers
        self._lane = lane
        self._database = servers.database
        self._postgresql = servers.dialect == POSTGRESQL
        self._cursor: Any = None  # the thread is connected while there is one
        self._tx: ServerTx

    def run(self) -> None:
        queue, idle = self._lane.queue, self._lane.idle
        while True:
            try:
                ticket = queue.get_nowait()
            except Empty:
                idle.append(None)
                ticket = queue.get()
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
            del ticket  # an idle thread keeps nothing alive
        self._disconnect()

    def _serve(self, ticket: Ticket[Any]) -> None:
        """Run one operation to its end: committed, refused, or unknown."""
        give_up_at = time.monotonic() + RETRY_WINDOW
        attempt, replaced = 1, False
        while True:
            phase = "connect"
            value = callbacks = None
            try:
                self._connect()
                if ticket.control is not None:
                    phase = "body"
                    ticket.finish(ticket.control())
                    return
                self._servers.prepare()
                phase = "begin"
                self._begin(ticket)
                phase, ticket.executed = "body", True
                value, callbacks = self._execute(ticket)
                phase = "commit"
                self._commit(ticket)
            except BaseException as exc:
                error = exc
            else:
                ticket.finish(value, callbacks)
                return

            fate = fate_of(error, self._servers.dialect)
            if phase == "commit" and not answers_commit(error, self._servers.dialect):
                self._disconnect()
                if ticket.read:
                    ticket.finish(value, callbacks)  # it had read everything
                else:
                    ticket.fail(_told(WriteUnknownError, "nobody can say whether the write happened", phase, error, ticket))
                return
            self._roll_back(fate)
            if fate is Fate.LOST and not replaced:
                replaced = True  # COMMIT was not sent, so nothing of it happened
            elif fate is Fate.AGAIN and attempt < MAX_ATTEMPTS and time.monotonic() < give_up_at:
                time.sleep(random.uniform(0.2, 1.0) * min(0.005 * 2**attempt, 0.25))
                attempt += 1
            else:
                ticket.fail(self._refusal(ticket, phase, fate, error))
                return

    def _refusal(self, ticket: Ticket[Any], phase: str, fate: Fate, error: BaseException) -> BaseException:
        """The error for an operation that is certain not to have happened."""
        if fate is Fate.OTHER:
            return error  # the operation's own, a statement's of it, or a check's of the schema
        asked = "the connection" if phase == "connect" else "the read" if ticket.read else "the write"
        return _told(StoreError if ticket.read else WriteRefusedError, f"the database refused {asked}", phase, error, ticket)

    # --- one transaction ---------------------------------------------------------------------------------------------

    def _begin(self, ticket: Ticket[Any]) -> None:
        execute = self._cursor.execute
        with driver_errors:
            if self._postgresql:
                execute(_PG_READ if ticket.read else _PG_WRITE % STANDSTILL)
            elif ticket.read:
                execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                execute("START TRANSACTION READ ONLY")
            else:
                if self._servers.pooled:
                    execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                execute("START TRANSACTION")
        self._database.push_transaction(self)  # atomic() inside the operation becomes a savepoint

    def _execute(self, ticket: Ticket[Any]) -> tuple[Any, list[Callable[[], None]] | None]:
        tx, registered = self._tx, commit_callbacks(self._database)
        tx.callbacks = None
        registered.clear()
        value = ticket.operation(tx)
        if registered:  # with Peewee, not with us: they have to wait for the same commit
            for callback in registered:
                tx.after_commit(callback)
            registered.clear()
        return value, tx.callbacks

    def _commit(self, ticket: Ticket[Any]) -> None:
        cursor = self._cursor
        if self._postgresql and not ticket.read:
            try:
                with driver_errors:
                    cursor.execute(_PG_COMMIT)
            except peewee.DatabaseError as error:
                # Who else may have been here: code of the host around the driver. test_swallowed_error_is_refused_at_commit,
                # test_a_transaction_that_a_hook_has_replaced_is_unknown
                state = sqlstate(error)
                if state == _PG_ABORTED:
                    raise SilentRollback from error
                if state == _PG_NO_SUCH_CURSOR:
                    raise ReplacedTransaction from error
                raise
        else:
            if not self._postgresql and is_in_transaction(self._database) is False:
                # The server ended it behind our back (a swallowed deadlock, DDL), and what followed was committed singly.
                raise ReplacedTransaction
            with driver_errors:
                cursor.execute("COMMIT")
        self._database.pop_transaction()

    def _roll_back(self, fate: Fate) -> None:
        """End the failed transaction, or the connection with it: either undoes everything, for COMMIT was not sent."""
        if self._cursor is None:
            self._disconnect()  # it was not even ready
            return
        if fate is not Fate.LOST:
            try:
                self._cursor.execute("ROLLBACK")
                if self._database.top_transaction() is self:
                    self._database.pop_transaction()
                if not self._database.transaction_depth():
                    return
            except BaseException:
                logger.debug("ROLLBACK failed; the connection is dropped", exc_info=True)
        self._disconnect()

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._cursor is not None:
            return
        self._database.connect(reuse_if_open=True)
        cursor = self._database.cursor()
        if self._servers.dialect == MYSQL and not self._servers.pooled:
            with driver_errors:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
                cursor.execute(_MYSQL_STANDSTILL % STANDSTILL)
                # Never cut a value short in silence, whatever the server's default is.
                cursor.execute("SET SESSION sql_mode = CONCAT(@@SESSION.sql_mode, ',STRICT_TRANS_TABLES')")
        quirks = self._servers.quirks
        if self._servers.dialect == MYSQL and quirks.largest is None:
            with driver_errors:
                cursor.execute("SELECT @@max_allowed_packet")
                ((quirks.largest,),) = cursor.fetchall()
        self._tx = ServerTx(cursor, self._servers.texts, dialect=self._servers.dialect, quirks=quirks)
        self._servers.local.tx = self._tx
        self._cursor = cursor

    def _hand_back(self) -> None:
        """To a pool, after each operation: its connections are everybody's."""
        if self._cursor is not None:
            self._cursor = None
            self._database.close()

    def _disconnect(self) -> None:
        self._cursor = None
        try:
            destroy(self._database)
        except Exception:
            logger.debug("a dead connection could not be closed", exc_info=True)


def _told(kind: type[StoreError], what: str, phase: str, error: BaseException, ticket: Ticket[Any]) -> StoreError:
    hint = way_out(error) if phase == "connect" else ""
    told = kind(f"{what} ({phase}): {error}{hint}", phase, None, ticket.executed)
    told.__cause__ = error
    return told
