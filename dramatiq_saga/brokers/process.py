"""What one process has to do with the queues: its consumers, the deliveries that it holds, and two helper threads.

Invariant: nothing here crosses a fork. A child starts with an empty one of these; the parent's deliveries, threads and
connections stay the parent's. Nothing is started before the first consumer exists, so a process that only sends has no
helper threads at all.
"""

from __future__ import annotations

import os
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from ..store.connections import file_of
from . import settlement
from .leases import LeaseKeeper
from .wake import Bell, FileWatcher

if TYPE_CHECKING:
    from .consumer import DatabaseConsumer
    from .database import DatabaseBroker
    from .messages import DatabaseMessageProxy


class Deliveries:
    """The consumers of this process and what they hold."""

    def __init__(self, broker: DatabaseBroker) -> None:
        self.pid = os.getpid()
        self._broker = broker
        self._broker = broker
        #: True while every worker of this process is shutting down: nobody would start what is reserved now (QUEUE-7).
        self.draining = False
        self._lock = Lock()
        self._consumers: dict[str, tuple[DatabaseConsumer, ...]] = {}
        self._workers: dict[int, Any] = {}
        self._keeper = LeaseKeeper(broker, retry_after=broker.retry_after, every=broker.extend_every)
        path = file_of(broker.store.database) if broker.store.dialect == "sqlite" else None
        self._bell = None if path is None else Bell(path)
        self._watcher = None
        if path is not None and self._bell is not None:
            self._watcher = FileWatcher(
                path, bell=self._bell, interval=broker.poll_interval, on_change=self.changed, on_replaced=self.replaced
            )

    # --- consumers ---------------------------------------------------------------------------------------------------

    def add(self, consumer: DatabaseConsumer) -> None:
        """A consumer begins; so do the helper threads, if they have not yet."""
        with self._lock:
            self._consumers[consumer.queue] = (*self._consumers.get(consumer.queue, ()), consumer)
        self._keeper.start()
        if self._watcher is not None:
            self._watcher.start()

    def remove(self, consumer: DatabaseConsumer) -> None:
        """A consumer has been closed. What it has handed out is still held."""
        with self._lock:
            others = tuple(other for other in self._consumers.get(consumer.queue, ()) if other is not consumer)
            self._consumers[consumer.queue] = others

    def arrived(self, queue: str, due_at: int | None) -> None:
        """A message was committed by this process: tell its own consumers of that queue, and ring for the others."""
        for consumer in self._consumers.get(queue, ()):
            consumer.message_arrived(due_at)
        if self._bell is not None:
            self._bell.ring()

    def changed(self) -> None:
        """Something was committed by somebody: idle consumers look."""
        for consumers in tuple(self._consumers.values()):
            for consumer in consumers:
                consumer.database_changed()

    def replaced(self) -> None:
        """Another file stands where ours was opened: say so, and go on with the one that is there."""
        self._broker.logger.critical(
            "The SQLite file was deleted or replaced while it was open; what this process wrote since then may be lost. It goes on "
            "with the file that is there now. Stop all workers before moving a database."
        )
        self._broker.store.close()
        self.changed()

    # --- deliveries --------------------------------------------------------------------------------------------------

    def hold(self, proxy: DatabaseMessageProxy) -> None:
        """A delivery is in this process's hands: its lease is extended from now on (QUEUE-6)."""
        self._keeper.hold(proxy)

    def let_go(self, proxy: DatabaseMessageProxy) -> None:
        """It no longer is, whatever became of it: no more extensions, and its prefetch slot is free."""
        self._keeper.let_go(proxy)
        proxy.consumer.forget(proxy)

    # --- workers -----------------------------------------------------------------------------------------------------

    def worker_boots(self, worker: Any) -> None:
        """A worker of this process is about to start."""
        self._workers[id(worker)] = worker
        self.draining = False

    def worker_thread_boots(self, thread: Thread) -> None:
        """One of its threads runs."""
        self._keeper.add_worker_thread(thread)

    def worker_stops(self, worker: Any) -> None:
        """A worker finishes what it runs and starts nothing new.

        What waits in its work queue goes back at once: what it still runs may take minutes, and others are free (QUEUE-7).
        """
        self._workers.pop(id(worker), None)
        if not self._workers:
            self.draining = True
            self.changed()
            settlement.give_back(self._broker, self._keeper.waiting())

    def worker_stopped(self) -> None:
        """It has given back what it had not started."""
        self.draining = False

    def consumer_thread(self, queue: str) -> Any | None:
        """The Dramatiq thread that consumes ``queue`` in this process, if one does so now."""
        for worker in tuple(self._workers.values()):
            thread = worker.consumers.get(queue)
            if thread is not None and thread.running and not thread.paused:
                consumer = thread.consumer
                if consumer is not None and not consumer.closed:
                    return thread
        return None

    def stop(self) -> None:
        """End the helper threads; consumers that wait return. What is still held is left to its lease."""
        self.changed()
        self._keeper.stop()
        if self._watcher is not None:
            self._watcher.stop()
