"""Keeping the reservations of a live worker alive (QUEUE-6).

One thread per process extends the lease of every message that is still queued in this process or is run by a thread
that is alive. The invariant: a lease is never extended on behalf of work that nothing will finish. Extension stops when
the thread that runs the message has ended, when its acknowledgement has failed, or when the message has been given
back; then the lease lapses and another worker takes the row. A reservation that turns out to be lost is reported once and
left alone: its late acknowledgement deletes nothing. Extensions never wait behind the process's other writes.
"""

from __future__ import annotations

import os
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from ..store.tickets import Ticket
from . import reservations

if TYPE_CHECKING:
    from ..store.database import Tx
    from .database import DatabaseBroker
    from .messages import DatabaseMessageProxy


class LeaseKeeper:
    """Extends leases every ``every`` seconds to ``retry_after`` seconds from then."""

    def __init__(self, broker: DatabaseBroker, *, retry_after: float, every: float) -> None:
        self._broker = broker
        self._lease_ms = round(retry_after * 1000)
        self._every = every
        self._held: dict[int, DatabaseMessageProxy] = {}
        self._worker_threads: list[Thread] = []
        self._thread: Thread | None = None
        self._lock = Lock()
        self._stop = Event()
        self._failing = False

    def start(self) -> None:
        """Start the thread unless it runs already. It ends with :meth:`stop` or with the process."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._stop = Event()
                self._thread = Thread(target=self._run, args=(self._stop,), name=f"saga-leases-{os.getpid()}", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop extending; what is still held lapses."""
        with self._lock:
            self._stop.set()
            self._thread = None  # it may take a moment to end; the next start() does not wait for that

    def hold(self, proxy: DatabaseMessageProxy) -> None:
        self._held[id(proxy)] = proxy

    def let_go(self, proxy: DatabaseMessageProxy) -> None:
        """Extend this delivery no more. Harmless when it is not held."""
        self._held.pop(id(proxy), None)

    def waiting(self) -> list[DatabaseMessageProxy]:
        """What is held and has not been started."""
        return [proxy for proxy in list(self._held.values()) if proxy.thread is None]

    def add_worker_thread(self, thread: Thread) -> None:
        """A thread that takes messages from the process's work queue: while one is alive, queued messages have a future."""
        self._worker_threads = [known for known in self._worker_threads if known.is_alive()] + [thread]

    def _run(self, stop: Event) -> None:
        wait = self._every
        while not stop.wait(wait):
            wait = self._every if self.extend() else min(1.0, self._every / 4)
        self._broker.store.close_thread()

    def extend(self) -> bool:
        """One round over everything held. False when the database refused it: to be tried again soon, well within the lease."""
        now = self._broker.store.clock.now()
        # what was reserved or extended since the last round need not be written again
        horizon = now + self._lease_ms - round(self._every * 500)
        due = [proxy for proxy in list(self._held.values()) if proxy.lease_until <= horizon and self._has_future(proxy)]
        if not due:
            return True
        due.sort(key=_row_id)  # writers of several rows take them in one order (DRIVE-7)

        def operation(tx: Tx) -> tuple[int, list[bool]]:
            until = self._broker.store.clock.now() + self._lease_ms
            return until, [reservations.extend(tx, proxy.reservation, until) for proxy in due]

        try:
            until, landed = self._broker.store.submit(Ticket(operation, urgent=True)).result()
        except Exception as error:
            if not self._failing:
                self._broker.logger.warning("Could not extend %d leases; trying again: %s", len(due), error)
            self._failing = True
            return False
        self._failing = False
        for proxy, extended in zip(due, landed, strict=True):
            if extended:
                proxy.lease_until = until
            elif proxy.missed and not proxy.settled:
                self.let_go(proxy)
                self._broker.logger.warning(
                    "Lost the reservation of message %s (%s) while it was held here; it is delivered to somebody else.",
                    proxy.message_id,
                    proxy.actor_name,
                )
            else:
                # Who else: another worker, after the lease had lapsed; or our own acknowledgement, which committed between
                # the listing and this write. Either way nothing was changed. The second kind is gone by the next round.
                proxy.missed = True
        return True

    def _has_future(self, proxy: DatabaseMessageProxy) -> bool:
        if proxy.thread is not None:
            alive = proxy.thread.is_alive()
        elif self._worker_threads:
            alive = any(thread.is_alive() for thread in self._worker_threads)
        else:
            alive = not proxy.consumer.closed
        if not alive:
            self.let_go(proxy)
        return alive


def _row_id(proxy: DatabaseMessageProxy) -> int:
    return proxy.reservation.id
