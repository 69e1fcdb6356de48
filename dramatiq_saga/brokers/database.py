"""A Dramatiq broker on a database: queues are rows, and messages join the transactions that make them necessary.

Its invariant: a message leaves the table only by the statement that repeats its reservation's whole fence (QUEUE-2), or by
an operator's purge. Delayed messages stay in the table until due (QUEUE-1). It must never open a connection at import or
construction, and never raise Dramatiq's BrokerConnectionError where repeating would not help.

Around it: ``reservations`` is the SQL, ``consumer`` the waiting, ``settlement`` the end of a delivery, ``process`` what one
process holds, ``leases`` keeps long work reserved, ``wake`` notices other processes, ``dead_letters`` is for operators,
``staging`` serves an engine, ``sqlite`` adds the guards.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import peewee
from dramatiq.broker import MessageProxy
from dramatiq.common import q_name
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout, QueueNotFound
from dramatiq.message import Message
from dramatiq.middleware import Interrupt, Middleware, SkipMessage

from ..errors import SettingsError, StoreError
from ..store.database import Store, Ticket, Tx, open_store
from ..store.trouble import is_trouble
from . import dead_letters, reservations, settlement
from .consumer import LOOK_ANYWAY, DatabaseConsumer
from .dead_letters import DeadLetter, QueueStats
from .messages import DatabaseMessageProxy, Prepared
from .process import Deliveries
from .staging import StagingBroker

if TYPE_CHECKING:
    from ..clock import Clock

T = TypeVar("T")

#: Shortest lease, in seconds: it is extended four times while it lasts, and stored in milliseconds.
MIN_RETRY_AFTER = 0.1

#: On database servers an idle consumer doubles its pause up to this many seconds.
MAX_SERVER_PAUSE = 0.25


class DatabaseBroker(StagingBroker):
    """Keeps Dramatiq's queues in a database: SQLite, PostgreSQL, MariaDB or MySQL. Durations are seconds or ``timedelta``.

    Parameters:
      database: A URL, a path to an SQLite file, or a Peewee ``Database``.
      retry_after: Seconds, at least 0.1, after which a message whose worker is not heard from is delivered again. A live worker extends
        its reservations, so this need not exceed the longest actor, only the longest time that one piece of C code keeps
        the interpreter to itself, and the longest lock on an SQLite file.
      poll_interval: Seconds between two looks for what other processes have sent. On database servers an idle consumer's
        pause doubles from here up to a quarter of a second.
      extend_every: Seconds between two extensions of what is held; a quarter of ``retry_after`` unless given.
      middleware: As in :class:`dramatiq.Broker`.
      prefix: Goes before the name of every table.
      clock: Where "now" comes from.

    Raises:
      SettingsError: A setting cannot work; it is named by its key.
    """

    def __init__(
        self,
        database: str | Path | peewee.Database,
        *,
        retry_after: float | timedelta = 60,
        poll_interval: float | timedelta = 0.01,
        extend_every: float | timedelta | None = None,
        middleware: list[Middleware] | None = None,
        prefix: str = "saga_",
        clock: Clock | None = None,
    ) -> None:
        lease = _seconds("retry_after", retry_after, least=MIN_RETRY_AFTER)
        every = lease / 4 if extend_every is None else _seconds("extend_every", extend_every)
        if every * 2 > lease:
            raise SettingsError(
                "extend_every",
                f"{every:g} s is too long for retry_after={lease:g} s, because a lease must outlive two extensions: at most half of it, "
                "or leave it out for a quarter",
            )
        poll_interval = _seconds("poll_interval", poll_interval)
        super().__init__(middleware=middleware)
        self.queues = set(self.queues)
        self.store: Store = open_store(database, prefix=prefix, clock=clock)
        self._check_database()
        self.retry_after = lease
        self.poll_interval = poll_interval
        self.extend_every = every
        self.polls = self.store.dialect != "sqlite"
        self._lease_ms = round(lease * 1000)
        self._hooks = threading.local()  # .proxy: the delivery whose after hooks run in this thread
        self._here = Deliveries(self)

    def _check_database(self) -> None:
        """Refuse a database that this kind of broker cannot serve."""

    @property
    def here(self) -> Deliveries:
        """What belongs to this process alone."""
        if self._here.pid != os.getpid():
            self._here = Deliveries(self)
        return self._here

    def close(self) -> None:
        """Stop the helper threads and close this process's connections. What is still held is left to its lease."""
        self.here.stop()
        self.store.close()

    # --- Dramatiq's signals ------------------------------------------------------------------------------------------

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal == "process_message":
            self._before_processing(args[0])
        elif signal == "ack" and _is_given_back(args[0]):
            return
        elif signal == "worker_boot":
            self.here.worker_boots(args[0])
        elif signal == "worker_shutdown":
            self.here.worker_stops(args[0])
        super().emit_before(signal, *args, **kwargs)
        if signal in ("worker_thread_shutdown", "consumer_thread_shutdown"):
            self.store.close_thread()

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal in ("ack", "skip_message") and _is_given_back(args[0]):
            return
        if signal in ("process_message", "skip_message") and type(args[0]) is DatabaseMessageProxy:
            self._after_processing(signal, args[0], **kwargs)
            return
        if signal == "worker_thread_boot":
            self.here.worker_thread_boots(args[0])
        super().emit_after(signal, *args, **kwargs)
        if signal == "worker_shutdown":
            self.here.worker_stopped()

    def _before_processing(self, proxy: MessageProxy) -> None:
        """A thread is about to run a delivery, unless it has been given back meanwhile. No hook ever hears of that one:
        to middleware, a message that is skipped or acknowledged has been here."""
        if type(proxy) is DatabaseMessageProxy:
            if not proxy.claim_fate() and proxy.thread is None:
                proxy.given_back = True  # or is about to be: its row is no business of this thread
                raise SkipMessage("given back: the worker is shutting down")
            proxy.thread = threading.current_thread()

    def _after_processing(self, signal: str, proxy: DatabaseMessageProxy, **kwargs: Any) -> None:
        """Run the after hooks; what they send is kept for the acknowledgement (see ``settlement``).

        Dramatiq swallows what goes wrong in here and acknowledges all the same. An interrupt (a time limit that ran out a
        moment too late, a shutdown) can cut the hooks short, Retries among them. While an error or a skip is being handled,
        that would first acknowledge the message and then end the worker thread; so the acknowledgement is withheld, the
        message comes back after its lease, and the thread goes on.
        """
        self._hooks.proxy = proxy
        try:
            super().emit_after(signal, proxy, **kwargs)
        except Interrupt as interrupt:
            if signal == "process_message" and kwargs.get("exception") is None:
                raise  # Dramatiq makes it a failure of the message, which Retries sees
            proxy.withheld = f"{type(interrupt).__name__} cut its after hooks short"
        finally:
            self._hooks.proxy = None

    # --- queues ------------------------------------------------------------------------------------------------------

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue; nothing happens when it is declared already. There are no delay queues."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        return set(self.queues)

    def flush(self, queue_name: str) -> None:
        """Delete every message of a queue, delayed and reserved ones too. Dead letters stay (:meth:`purge_dead_letters`)."""
        self.store.write(lambda tx: dead_letters.flush(tx, queue_name))

    def flush_all(self) -> None:
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 20, timeout: int | None = None) -> None:
        """Wait until a queue holds nothing but dead letters: nothing ready, delayed or reserved. For tests.

        Raises:
          QueueJoinTimeout: ``timeout`` milliseconds have passed.
          QueueNotFound: The queue was never declared.
        """
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)  # type: ignore[no-untyped-call]
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        while not self.store.read(lambda tx: reservations.peek(tx, queue_name)).is_empty:
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)  # type: ignore[no-untyped-call]
            time.sleep(interval / 1000)

    # --- sending -----------------------------------------------------------------------------------------------------

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Store a message, to be delivered after ``delay`` milliseconds (or at its ``eta`` option).

        Inside an open transaction of the store's own ``Database`` object it commits or vanishes with that transaction.
        Called by an after hook, it is stored with the acknowledgement of the message at hand. A retry (Dramatiq's Retries
        hands over the delivered message itself, one try further) turns the delivered row into its next try.

        Raises:
          QueueNotFound: The queue was never declared here.
          WriteRefusedError: The database refused; nothing was stored.
          WriteUnknownError: Nobody can say whether it was stored.
        """
        queue = q_name(message.queue_name)
        if queue not in self.queues:
            raise QueueNotFound(queue)  # type: ignore[no-untyped-call]
        prepared = self.prepare(message, delay=delay)
        delivered: object = message  # Retries hands over the proxy
        retried = None
        if isinstance(delivered, DatabaseMessageProxy) and delivered.was_retried and not delivered.settled:
            retried = delivered
        current: DatabaseMessageProxy | None = getattr(self._hooks, "proxy", None)
        if current is not None and not current.settled and not self.store.joined():
            if retried is current:
                current.retry = prepared
            else:
                current.follow_ups = [*(current.follow_ups or ()), prepared]
        elif retried is not None:
            self._retry_now(retried, prepared)
        else:
            self.store.write(lambda tx: self._stage_and_announce(tx, prepared))
        return prepared.message

    def _stage_and_announce(self, tx: Tx, prepared: Prepared) -> None:
        reservations.insert(tx, prepared, now=self.store.clock.now())
        tx.after_commit(lambda: self.announce((prepared,)))

    def _retry_now(self, proxy: DatabaseMessageProxy, prepared: Prepared) -> None:
        """A retry asked for outside the after hooks: one fenced UPDATE at once. If it fails, so does the acknowledgement."""
        try:
            landed = self.store.write(
                lambda tx: reservations.postpone(tx, proxy.reservation, prepared, now=self.store.clock.now())
            )
        except BaseException:
            proxy.withheld = "its retry could not be stored"
            raise
        proxy.settled = True
        self.here.let_go(proxy)
        if landed:
            self.announce((prepared,))
        else:
            settlement.report_lost(self, proxy, "retry")

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> DatabaseConsumer:
        """An iterator over a queue's messages; starts the threads that extend leases and notice other processes.

        Raises:
          QueueNotFound: The queue was never declared.
        """
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)  # type: ignore[no-untyped-call]
        consumer = DatabaseConsumer(self, queue_name, prefetch=prefetch, timeout=timeout)
        self.here.add(consumer)
        return consumer

    def idle_pause(self, fruitless: int) -> float:
        """Seconds that a consumer may wait without looking, after so many looks that found nothing."""
        if not self.polls:
            return LOOK_ANYWAY
        return max(self.poll_interval, min(MAX_SERVER_PAUSE, self.poll_interval * (1 << min(fruitless, 16))))

    def reserve(self, queue: str, limit: int) -> list[reservations.Delivery] | None:
        """Reserve up to ``limit`` messages in one transaction. ``None``: refused, nothing has changed, look again later.

        Raises:
          StoreError: This thread has a transaction of its own open, which would decide about the reservation.
        """
        if self.store.joined():
            raise StoreError("cannot reserve messages inside an open transaction of the same database: end it first")
        clock, lease = self.store.clock, self._lease_ms

        def operation(tx: Tx) -> list[reservations.Delivery]:
            now = clock.now()
            return reservations.reserve(tx, queue, limit, now=now, lease_until=now + lease)

        return self.run_reservation(queue, operation)

    def run_reservation(
        self, queue: str, operation: Callable[[Tx], list[reservations.Delivery]]
    ) -> list[reservations.Delivery] | None:
        """Run a reservation: plain. The SQLite broker's guard stands here (QUEUE-3)."""
        return self.execute(operation)

    def acknowledge(self, proxy: DatabaseMessageProxy) -> None:
        """Delete the row of this delivery, and store what its after hooks have sent, in one transaction (QUEUE-2).

        A reservation that another worker has taken over is reported and left alone. Errors other than a lost connection
        to a server are raised once; the row then stays reserved until its lease lapses.
        """
        settlement.end(self, proxy, reason=None)

    def reject(self, proxy: DatabaseMessageProxy) -> None:
        """Make this delivery's row a dead letter with its reason; otherwise as :meth:`acknowledge`."""
        settlement.end(self, proxy, reason=dead_letters.reason_of(proxy))

    def run_settlement(self, operation: settlement.Settlement) -> bool:
        """Run a settlement: plain. The SQLite broker's guard stands here (QUEUE-4)."""
        return self.execute(operation)

    def execute(self, operation: Callable[[Tx], T]) -> T:
        """Run an operation of the queue's own in a root transaction, whatever the calling thread has open.

        A step that left a transaction open on the same ``Database`` must not take the acknowledgement with it: that
        transaction may never commit. Where a server is out of reach, Dramatiq's own error says so, and makes it wait and
        repeat, which is safe because every statement is fenced; on SQLite there is no connection to lose.
        """
        try:
            if not self.store.joined():
                return self.store.submit(operation).result()
            self.logger.warning("A message has left a transaction open on the broker's database; it is not ended here.")
            tickets: list[Ticket[T]] = []
            thread = threading.Thread(target=lambda: tickets.append(self.store.submit(operation)))
            thread.start()
            thread.join()
            return tickets[0].result()
        except Exception as error:
            if self.store.dialect == "sqlite" or not is_trouble(error):
                raise
            raise ConnectionClosed(str(error)) from error  # type: ignore[no-untyped-call]

    # --- operators ---------------------------------------------------------------------------------------------------

    def queue_stats(self) -> list[QueueStats]:
        """Depth of every queue that has rows: ready, delayed, reserved, dead."""
        return self.store.read(dead_letters.stats)

    def dead_letters(self, queue: str | None = None, *, limit: int = 100) -> list[DeadLetter]:
        """Messages that were given up, newest first."""
        return self.store.read(lambda tx: dead_letters.newest(tx, queue, limit))

    def requeue_dead_letter(self, letter_id: int) -> bool:
        """Send a dead letter again, its tries renewed. False when there is none of this id (any more)."""
        letter = self.store.write(lambda tx: dead_letters.requeue(tx, letter_id, self.store.clock.now()))
        if letter is None:
            return False
        self.here.arrived(letter.queue, None)
        return True

    def purge_dead_letters(self, queue: str | None = None, *, before: int | None = None) -> int:
        """Delete dead letters, those only that died before the moment ``before`` (milliseconds UTC) if given; how many."""
        return self.store.write(lambda tx: dead_letters.purge(tx, queue, before))


def _is_given_back(message: object) -> bool:
    return type(message) is DatabaseMessageProxy and message.given_back


def _seconds(key: str, value: object, *, least: float = 0) -> float:
    """A duration as seconds; refused where it cannot work."""
    given = value
    if isinstance(value, timedelta):
        value = value.total_seconds()
    wanted = f"of at least {least:g}" if least else "above 0"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0 or value < least:
        raise SettingsError(key, f"must be a number of seconds {wanted}, or a timedelta, not {given!r}")
    return value
