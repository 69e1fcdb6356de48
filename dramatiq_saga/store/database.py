"""Opening a database; ``write()`` and ``read()``; what waits for a commit.

A :class:`Store` owns the engine's connections to one database and decides where an operation runs: inside the caller's own
transaction, on SQLite's writer thread, or on an engine thread of a server. Invariants: no connection is opened before the
first use; a forked child never uses one of its parent; a callback given to ``after_commit`` runs only after the commit is
known; an exception other than WriteUnknownError means that nothing was written.

It knows no SQL of the engine: a verb's statements stand in the verb's file.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from peewee import Database, DatabaseProxy, SqliteDatabase

from ..clock import Clock, SystemClock
from ..commands import install
from ..errors import DatabaseUnusableError, SchemaVersionError, StoreError
from . import migrations, models
from .clocks import Correction, ServerClock
from .connections import Connector, Readers, file_of, is_memory, new_sqlite, share_pragmas
from .joining import Joining
from .models import TABLES, Models
from .peewee_internals import abandon_transaction, gives_memoryviews, has_driver, keeps_connections_per_thread, leave_to_parent
from .servers import Servers
from .sql import MYSQL, SQLITE, Statements, dialect_of
from .tickets import Ticket, run_callbacks
from .transactions import Quirks, Tx
from .writer import Writer

__all__ = ["Database", "Store", "Ticket", "Tx", "open_store"]

T = TypeVar("T")

_stores: weakref.WeakSet[Store] = weakref.WeakSet()


class Store:
    """The tables of one database under one prefix.

    ``commit_is_proof`` is true where a COMMIT that returned cannot have rolled back (CLAIM-3). ``models`` serve the schema,
    tools and cold paths; inside an operation they are part of its transaction.
    """

    def __init__(
        self, database: Database, *, prefix: str = "saga_", clock: Clock | None = None, auto_create: bool | None = None
    ) -> None:
        self.database = database
        self.dialect = dialect_of(database)
        self.prefix = prefix
        self.models: Models = models.build(database, prefix)
        self.commit_is_proof = self.dialect != MYSQL
        self.auto_create = self.dialect == SQLITE if auto_create is None else auto_create
        self._texts = Statements(self.dialect, prefix, tables=TABLES)
        self._local = threading.local()
        quirks = Quirks(memoryviews=gives_memoryviews(database))
        self._joining = Joining(database, dialect=self.dialect, texts=self._texts, quirks=quirks)
        self._ready = False
        self._memory = False
        self._correction: Correction | None = None
        self._readers: Readers | None = None
        self._engine: Writer | Servers
        if isinstance(database, SqliteDatabase):
            self.clock: Clock = clock or SystemClock()
            connector = Connector(database)
            self._memory = is_memory(database)
            self._readers = Readers(connector, self._texts)
            self._engine = Writer(
                database, connector, texts=self._texts, prepare=self._prepare, moved=self._moved, local=self._local
            )
        else:
            self.clock = clock or ServerClock(self._measure)
            if isinstance(self.clock, ServerClock):
                self._correction = self.clock.correction
            elif isinstance(self.clock, SystemClock):
                self._correction = Correction(self.clock)
            self._engine = Servers(
                database, self._texts, dialect=self.dialect, quirks=quirks, prepare=self._prepare, local=self._local
            )
        _stores.add(self)

    # --- operations --------------------------------------------------------------------------------------------------

    def write(self, operation: Callable[[Tx], T], *, urgent: bool = False) -> T:
        """Run ``operation`` in a write transaction and return what it returned, once that is committed.

        Inside an open transaction of ``database`` it joins that one and nothing is committed yet (HOST-1). An ``urgent`` one says that
        this process lives: on a server it never waits behind others of this process. SQLite has one writer per file, whoever
        writes: nothing can be locked there that it could pass by.

        Raises:
          WriteRefusedError: the database refused; nothing was written, it may be tried again.
          WriteUnknownError: nobody can say whether it was written.
          Exception: what the operation raised, a database error of its own statement included; nothing was written.
        """
        if self.joined():
            return self._join(operation)
        ticket: Ticket[T] = Ticket(operation, urgent=urgent)
        try:
            self._engine.submit(ticket)
            return ticket.result()
        except BaseException:
            ticket.end()  # an interrupt: no write of ours may happen once its caller has gone on
            raise

    def submit(self, operation: Callable[[Tx], T] | Ticket[T]) -> Ticket[T]:
        """Like :meth:`write`, without waiting: for callers that may be interrupted and must learn the outcome all the same.

        Given a ticket that the caller has made, it returns that one: then the caller holds it whenever an interrupt lands.
        """
        ticket: Ticket[T] = operation if isinstance(operation, Ticket) else Ticket(operation)
        if not self.joined():
            self._engine.submit(ticket)
        elif ticket.start():
            try:
                ticket.finish(self._join(ticket.operation))
            except BaseException as exc:
                ticket.fail(exc)
        return ticket

    def read(self, operation: Callable[[Tx], T]) -> T:
        """Run ``operation``, which only reads, against one snapshot. Raises StoreError where the database cannot be reached."""
        if self.joined():
            return self._join(operation)
        if self._readers is None or self._memory:
            ticket: Ticket[T] = Ticket(operation, read=True)
            self._engine.submit(ticket)
            return ticket.result()
        if not self._ready:
            self._control(self._prepare)
        value, callbacks = self._readers.read(operation)
        if callbacks:
            run_callbacks(callbacks)
        return value

    def abandon_host_transaction(self) -> bool:
        """Roll back a transaction of ``database`` that the calling thread has left open; false where there is none.

        For the code that called a step's body: what the body left uncommitted is not its work, and must not be joined (C59).
        """
        return getattr(self._local, "tx", None) is None and abandon_transaction(self.database)

    def is_same_database(self, database: str | Path | Database) -> bool:
        """Whether ``database`` (a path, a URL or a ``Database``) names the database that this store is on."""
        if isinstance(database, DatabaseProxy):
            database = cast("Database", database.obj)
        if isinstance(database, Database):
            return database is self.database
        other = new_sqlite(str(database)) if isinstance(database, Path) else _from_text(database)
        if type(other) is not type(self.database) or is_memory(self.database):
            return False
        if isinstance(other, SqliteDatabase):
            mine, theirs = file_of(self.database), file_of(other)
            return mine is not None and theirs is not None and os.path.realpath(mine) == os.path.realpath(theirs)
        return (other.database, other.connect_params) == (self.database.database, self.database.connect_params)

    def joined(self) -> bool:
        """Whether the calling thread has a transaction of ``database`` open, or is inside an operation: calls would join it."""
        return self.database.in_transaction() and self._joining.is_open()

    def _join(self, operation: Callable[[Tx], T]) -> T:
        outer = getattr(self._local, "tx", None)
        if outer is None:
            if self._memory:
                raise StoreError(
                    "an in-memory database is private to its connection; no host transaction can share it: use a file"
                )
            if not self._ready:
                self._prepare_joined()
        return self._joining.run(operation, outer)

    # --- schema ------------------------------------------------------------------------------------------------------

    def schema_version(self) -> str | None:
        """The version of the tables that are there; None without tables. Creates nothing."""
        path = file_of(self.database) if self.dialect == SQLITE else None
        if path is not None and not os.path.exists(path):
            return None
        return self._control(lambda: migrations.version(self.database, self.prefix))

    def check_schema(self) -> None:
        """Raise SchemaVersionError unless the tables are the ones that this code needs (SAFE-3)."""
        self._expect(self.schema_version())

    def prepare(self) -> None:
        """Open the database and see to the tables now: create them where that is allowed, else check them.

        Raises SchemaVersionError for tables that are missing, older or newer (SAFE-3), DatabaseUnusableError where the
        database cannot be opened.
        """
        if self.joined():
            self._prepare_joined()
        else:
            self._control(self._prepare)

    def migrate(self) -> list[str]:
        """Create the tables or bring them up to date; safe to call from many processes at once, and again.

        Returns the names of the migrations that were applied. Raises SchemaVersionError for tables newer than this code.
        """

        def run() -> list[str]:
            found = migrations.version(self.database, self.prefix)
            if found is not None and found > migrations.latest():
                raise SchemaVersionError(found, migrations.latest(), self.prefix)
            return migrations.migrate(self.database, self.prefix)

        return self._control(run)

    def _expect(self, found: str | None) -> None:
        if found != migrations.latest():
            raise SchemaVersionError(found, migrations.latest(), self.prefix)

    def _prepare(self) -> None:
        """On an engine thread, before its first operation: see to the tables."""
        if self._correction is not None and self._correction.is_due():
            self._correction.measure(self.database.cursor(), self.dialect)
        if self._ready:
            return
        found = migrations.version(self.database, self.prefix)
        if self.auto_create and (found is None or found < migrations.latest()):
            migrations.migrate(self.database, self.prefix)
            found = migrations.version(self.database, self.prefix)
        self._expect(found)
        self._ready = True

    def _prepare_joined(self) -> None:
        """The first use of a store is inside a host transaction.

        On SQLite the host may hold the write lock, so the writer thread could not create the tables: they are created in the
        host's transaction and vanish with it, which is why the store is not ready after it. A server creates its tables
        on a connection of the engine.
        """
        if self.dialect != SQLITE:
            self._control(self._prepare)
            return
        found = migrations.version(self.database, self.prefix)
        if found is None and self.auto_create:
            migrations.migrate(self.database, self.prefix)
            return
        self._expect(found)

    def _control(self, function: Callable[[], T], *, urgent: bool = False) -> T:
        """Run ``function`` on an engine thread, with its connection open and no transaction."""
        if self.joined() and self.dialect == SQLITE:
            return function()
        ticket: Ticket[T] = Ticket(_nothing, control=function, urgent=urgent)
        self._engine.submit(ticket)
        return ticket.result()

    # --- clock, threads, processes -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        """For the clock: have the server asked. An engine thread must not wait for that; it asks before its next operation.

        Urgent where anything is, for whoever beats asks for the time first; elsewhere no second connection is opened for it.
        """
        correction = self._correction
        if correction is not None and getattr(self._local, "tx", None) is None:
            urgent = isinstance(self._engine, Servers) and self._engine.serves_urgent
            self._control(lambda: correction.measure(self.database.cursor(), self.dialect), urgent=urgent)

    def _moved(self) -> None:
        """The file at the path is another one now, or none."""
        self._ready = False
        if self._readers is not None:
            self._readers.close()

    def close_thread(self) -> None:
        """Close the calling thread's own connection of ``database``, if it has one: a thread that ends should not leak it."""
        if not self.database.is_closed() and not self.database.in_transaction():
            self.database.close()

    def close(self) -> None:
        """Finish what is queued and close every connection of the engine. The store opens again at its next use."""
        self._engine.close()
        if self._readers is not None:
            self._readers.close()

    def _abandon(self) -> None:
        """In a forked child: nothing of the parent's is used, or closed, here."""
        leave_to_parent(self.database)
        self._engine.abandon()
        if self._readers is not None:
            self._readers.abandon()


def open_store(
    database: str | Path | Database, *, prefix: str = "saga_", clock: Clock | None = None, auto_create: bool | None = None
) -> Store:
    """A store on a path, a URL (``sqlite:///…``, ``postgresql://…``, ``mysql://…``) or a Peewee ``Database``.

    Opens nothing yet. ``auto_create`` creates and migrates the tables at the first use; by default on SQLite only.
    """
    if isinstance(database, DatabaseProxy):
        if database.obj is None:
            raise DatabaseUnusableError(
                "the DatabaseProxy has no database yet: call its initialize() before the store is opened"
            )
        database = cast("Database", database.obj)
    if isinstance(database, Path):
        database = new_sqlite(str(database))
    elif isinstance(database, str):
        database = _from_text(database)
    elif isinstance(database, SqliteDatabase):
        share_pragmas(database)
    elif not isinstance(database, Database):
        raise TypeError(f"a path, a URL or a peewee.Database, not {type(database).__name__}")
    if not keeps_connections_per_thread(database):
        raise DatabaseUnusableError(
            f"{type(database).__name__} shares one connection among threads or tasks (thread_safe=False, or an asyncio class): "
            "pass a plain peewee Database"
        )
    if not has_driver(database):
        raise DatabaseUnusableError(
            f"the driver for {type(database).__name__} is not installed: {install('postgres')}, or [mysql]"
        )
    return Store(database, prefix=prefix, clock=clock, auto_create=auto_create)


def _from_text(text: str) -> Database:
    scheme, separator, _ = text.partition("://")
    if not separator or text == ":memory:" or scheme == "file":
        return new_sqlite(text)
    from playhouse import db_url

    if scheme == "sqlite":
        options = db_url.parse(text)
        return new_sqlite(str(options.pop("database")), **options)
    try:
        return cast("Database", db_url.connect(text, unquote_password=True, unquote_user=True))
    except (RuntimeError, ValueError) as exc:
        raise DatabaseUnusableError(
            f"{exc} Use a path, sqlite:///path, postgresql://user@host/name or mysql://user@host/name"
        ) from exc


def _nothing(_tx: Tx) -> Any:
    return None


def _before_fork() -> None:
    for store in list(_stores):
        if isinstance(store._engine, Writer):
            store._engine.hold()


def _after_fork_in_parent() -> None:
    for store in list(_stores):
        if isinstance(store._engine, Writer):
            store._engine.release()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
