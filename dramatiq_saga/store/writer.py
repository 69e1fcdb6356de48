"""SQLite's one writer thread per process: group commit.

All writes of a process are executed by one thread on one connection, as many as wait in one ``BEGIN IMMEDIATE … COMMIT``:
waiting callers share one sync of the disk, and Dramatiq's asynchronous interrupts cannot land in a transaction. The thread
starts with the first write and has no successor in a forked child, which gets a thread and a connection of its own.

Invariants (QUEUE-8): an operation is executed at most twice per call, once in a batch and once more in a root of its own
when that batch was refused and proven to have been rolled back. A batch whose COMMIT failed is unknown as a whole and
nothing of it is retried. What an operation raises reaches its caller only after the rollback is proven; when it is not,
the caller gets WriteUnknownError. So any other exception means that the database is as it was.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any

from peewee import SqliteDatabase

from ..errors import DatabaseUnusableError, StoreError, WriteUnknownError
from .connections import Connector, file_of, same_file
from .peewee_internals import adopt, commit_callbacks, forget, keep_inherited
from .rollback_proof import Outcome, Verdict, run_root
from .sql import Statements
from .sqlite_errors import refusal
from .tickets import Ticket
from .transactions import SQLiteTx
from .turnstile import Turnstile

logger = logging.getLogger("dramatiq_saga")

#: Operations that share one transaction at most.
MAX_BATCH = 64

#: The side file that writers of several processes take turns at, beside the database; it stays empty.
TURNSTILE_SUFFIX = "-turn"

#: How long a fork waits for the writer to be between transactions, seconds: longer than a busy timeout.
FORK_PATIENCE = 15.0

#: How often the writer looks whether its file is still the one at the path, seconds.
FILE_CHECK_INTERVAL = 1.0


class Writer:
    """The way to the writer thread, which it starts when there is something to write.

    ``prepare`` is called on that thread before a batch and sees to the schema; ``moved`` when the file is another one.
    ``local.tx`` is set there to the transaction object, so that a call from inside an operation finds it.
    """

    def __init__(
        self,
        database: SqliteDatabase,
        connector: Connector,
        *,
        texts: Statements,
        prepare: Callable[[], None],
        moved: Callable[[], None],
        local: threading.local,
    ) -> None:
        self.database = database
        self.connector = connector
        self.texts = texts
        self.prepare = prepare
        self.moved = moved
        self.local = local
        self._thread: _WriterThread | None = None
        self._held: _WriterThread | None = None  # kept between transactions while this process forks
        self._lock = Lock()

    def submit(self, ticket: Ticket[Any]) -> None:
        """Put an operation in the queue; the ticket tells the rest."""
        thread = self._thread or self._start()
        thread.queue.put(ticket)
        if thread.closing:
            # Who else is here: close(), which may have told the thread to end before our put. Whatever it left behind
            # goes to its successor, once, whoever of the two finds it. test_write_that_races_close_is_not_lost
            self._rescue(thread)

    def close(self) -> None:
        """Finish what is queued, close the connection, end the thread. The next write starts anew."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.closing = True
            thread.queue.put(None)
            self._rescue(thread)

    def hold(self) -> None:
        """Before a fork: wait until the thread is between transactions.

        SQLite keeps its locks in tables of the process, which a fork copies: a child born while its parent held the write lock
        would find the file locked for ever (test_a_fork_waits_until_the_writer_is_between_transactions).
        """
        thread = self._thread
        if thread is not None and thread is not current_thread() and thread.between_transactions.acquire(timeout=FORK_PATIENCE):
            self._held = thread

    def release(self) -> None:
        """After a fork, in the parent: go on."""
        thread, self._held = self._held, None
        if thread is not None:
            thread.between_transactions.release()

    def abandon(self) -> None:
        """In a forked child: the thread is gone, and its connection is the parent's."""
        if self._thread is not None:
            self._thread.abandon()
        keep_inherited(self._thread)
        self._thread = self._held = None
        self._lock = Lock()

    def _start(self) -> _WriterThread:
        with self._lock:
            if self._thread is None:
                thread = _WriterThread(self)
                thread.start()
                self._thread = thread
            return self._thread

    def _rescue(self, thread: _WriterThread) -> None:
        thread.join()
        while True:
            try:
                ticket = thread.queue.get_nowait()
            except Empty:
                return
            if ticket is not None:
                self.submit(ticket)


class _WriterThread(Thread):
    """Executes tickets one batch after the other, on a connection that it opens and closes itself."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(name="dramatiq-saga-writer", daemon=True)
        self.queue: SimpleQueue[Ticket[Any] | None] = SimpleQueue()
        self.closing = False
        self._writer = writer
        self._database = writer.database
        self._connection: sqlite3.Connection | None = None
        self._tx: SQLiteTx
        self._registered: list[Callable[[], None]] = []
        self._batch: list[Ticket[Any]] = []
        self._last = False
        self.between_transactions = Lock()  # held by whoever is in one, and by a fork meanwhile
        self._turnstile: Turnstile | None = None
        self._file: tuple[int, int] | None = None
        self._looked_at = 0.0

    def run(self) -> None:
        while not self._last:
            ticket = self.queue.get()
            if ticket is None:
                break
            try:
                if ticket.control is None:
                    self._serve_batch(ticket)
                else:
                    self._serve_control(ticket)
            except BaseException as exc:  # a fault of ours: whoever waits must not wait for ever
                logger.exception("the writer thread met an unexpected error")
                self._disconnect()
                started = [*self._batch, ticket] if ticket not in self._batch and ticket.start() else self._batch
                for waiting in started:
                    if not waiting.done:
                        waiting.fail(WriteUnknownError(f"the writer thread failed: {exc!r}", "body", None, True))
        self._disconnect()

    def abandon(self) -> None:
        """In a forked child, where this thread does not run: leave the parent's lock alone."""
        if self._turnstile is not None:
            self._turnstile.abandon()

    def _serve_control(self, ticket: Ticket[Any]) -> None:
        assert ticket.control is not None
        try:
            self._connect()
            ticket.finish(ticket.control())
        except BaseException as exc:
            ticket.fail(exc)

    # --- a batch -----------------------------------------------------------------------------------------------------

    def _serve_batch(self, first: Ticket[Any]) -> None:
        batch = self._batch
        batch.clear()
        # Whoever is in the queue now will have waited as long as `first` if BEGIN is refused.
        companions = self.queue.qsize()
        try:
            self._connect()
            self._writer.prepare()
        except BaseException as exc:
            self._refuse_unexecuted(first, companions, Outcome(Verdict.ROLLED_BACK, "begin", None, exc))
            return
        outcome = self._root(lambda: self._execute_batch(first))
        if outcome.verdict is Verdict.COMMITTED:
            for ticket in batch:
                ticket.finish(*ticket.produced)
        elif outcome.phase == "begin":
            # No operation was called, so nothing was written, in whatever state the connection was left.
            if outcome.verdict is not Verdict.ROLLED_BACK:
                self._disconnect()
            self._refuse_unexecuted(first, companions, outcome)
        elif outcome.verdict is Verdict.UNKNOWN:
            self._disconnect()
            for ticket in batch:
                ticket.fail(_unknown(outcome))
        elif len(batch) == 1:
            batch[0].fail(self._refusal(outcome, executed=True))
        else:
            self._serve_singly(batch)

    def _root(self, body: Callable[[], None]) -> Outcome[None]:
        with self.between_transactions:
            turnstile = self._turnstile
            if turnstile is None or not turnstile.enter():
                return run_root(self._database, body)
            try:
                return run_root(self._database, body)
            finally:
                turnstile.leave()

    def _execute_batch(self, ticket: Ticket[Any]) -> None:
        """Inside the root: ``ticket``, and whoever else has come by the time that each operation is through."""
        batch, get = self._batch, self.queue.get_nowait
        while True:
            if ticket.start():
                batch.append(ticket)
                self._execute(ticket)
                if len(batch) == MAX_BATCH:
                    return
            try:
                following = get()
            except Empty:
                return
            if following is None:
                self._last = True
                return
            if following.control is not None:
                self.queue.put(following)  # after what is queued: it is no part of a transaction
                return
            ticket = following

    def _execute(self, ticket: Ticket[Any]) -> None:
        tx, registered = self._tx, self._registered
        tx.callbacks = None
        registered.clear()
        value = ticket.operation(tx)
        if registered:  # with Peewee, not with us: they have to wait for the same commit
            for callback in registered:
                tx.after_commit(callback)
            registered.clear()
        ticket.produced = value, tx.callbacks

    def _serve_singly(self, batch: list[Ticket[Any]]) -> None:
        """After a refused batch: each operation in a root of its own, where proofs and guards apply to it alone."""
        for position, ticket in enumerate(batch):
            try:
                self._connect()
            except BaseException as exc:
                outcome: Outcome[None] = Outcome(Verdict.ROLLED_BACK, "begin", None, exc)
            else:
                outcome = self._root(lambda ticket=ticket: self._execute(ticket))  # type: ignore[misc]
            if outcome.verdict is Verdict.COMMITTED:
                ticket.finish(*ticket.produced)
            elif outcome.phase == "begin":
                if outcome.verdict is not Verdict.ROLLED_BACK:
                    self._disconnect()
                # One has waited out the timeout for all of them: they are refused together. (Each was executed in the
                # batch, whose rollback is proven.) test_rest_of_a_batch_is_refused_with_the_one_that_waited
                for waiting in batch[position:]:
                    waiting.fail(self._refusal(outcome, executed=True))
                return
            elif outcome.verdict is Verdict.ROLLED_BACK:
                ticket.fail(self._refusal(outcome, executed=True))
            else:
                self._disconnect()
                ticket.fail(_unknown(outcome))

    def _refuse_unexecuted(self, first: Ticket[Any], companions: int, outcome: Outcome[Any]) -> None:
        """Refuse ``first`` and those who waited beside it, so that nobody waits out a second timeout in the queue."""
        ticket: Ticket[Any] | None = first
        while ticket is not None:
            if ticket.control is not None:
                self.queue.put(ticket)
            elif ticket.start():
                ticket.fail(self._refusal(outcome, executed=False))
            if companions == 0:
                return
            companions -= 1
            try:
                ticket = self.queue.get_nowait()
            except Empty:
                return
        self._last = True

    def _refusal(self, outcome: Outcome[Any], *, executed: bool) -> BaseException:
        return refusal(outcome.error, str(file_of(self._database)), phase=outcome.phase, executed=executed)

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connection is not None:
            if self._file is not None and time.monotonic() - self._looked_at > FILE_CHECK_INTERVAL:
                self._look_at_file()
            return
        connection = self._writer.connector.open()
        # Peewee keeps connections per thread: this makes ours the one of this thread, so that models and atomic() used
        # inside an operation are part of its transaction.
        adopt(self._database, connection)
        self._registered = commit_callbacks(self._database)
        self._connection = connection
        self._writer.local.tx = self._tx = SQLiteTx(connection, self._writer.texts)
        path = file_of(self._database)
        if path is not None:
            found = os.stat(path)
            self._file = found.st_dev, found.st_ino
            self._turnstile = Turnstile(path + TURNSTILE_SUFFIX)
        self._looked_at = time.monotonic()

    def _look_at_file(self) -> None:
        """A file that was deleted or replaced takes commits without an error, and they are lost: notice, once, loudly."""
        path = file_of(self._database)
        self._looked_at = time.monotonic()
        if path is None or self._file is None:
            return
        if not same_file(path, self._file):
            self._disconnect()
            self._writer.moved()
            raise DatabaseUnusableError(
                f"the SQLite file {path} was deleted or replaced while it was open; what was written since then may be lost. "
                "The next write opens what is there now; stop all workers before moving a database"
            )

    def _disconnect(self) -> None:
        connection, self._connection, self._file = self._connection, None, None
        if self._turnstile is not None:
            self._turnstile.close()
            self._turnstile = None
        if connection is not None:
            forget(self._database)
            try:
                connection.close()
            except sqlite3.Error:
                logger.exception("the writer's connection could not be closed")


def _unknown(outcome: Outcome[Any]) -> StoreError:
    """What a caller gets whose operation may have happened."""
    unknown = WriteUnknownError(
        f"nobody can say whether the write happened ({outcome.phase}): {outcome.error!r}; it is settled by its token, not by "
        "trying again",
        outcome.phase,
        outcome.code,
        True,
    )
    unknown.__cause__ = outcome.error
    return unknown
