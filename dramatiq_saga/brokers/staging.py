"""Messages that join somebody else's transaction: what a broker offers an engine whose rows live in the same database.

The engine prepares a message before its transaction, stages it inside, and announces it after the commit; neither the rows
nor the message can then exist without the other (DRIVE-3). The queue row of the message at hand can become the next one.
Everything here that ends a reservation is fenced and says whether it landed; nothing here commits, and nothing is announced
that may still be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dramatiq.broker import Broker

from . import outgoing, reservations, settlement
from .messages import Prepared, Reservation
from .process import Deliveries

if TYPE_CHECKING:
    from dramatiq.message import Message

    from ..store.database import Store, Tx

T = TypeVar("T")


class StagingBroker(Broker):
    """The part of :class:`DatabaseBroker` that an engine uses."""

    store: Store
    retry_after: float
    poll_interval: float
    extend_every: float

    @property
    def here(self) -> Deliveries:
        """What belongs to this process alone."""
        raise NotImplementedError

    def execute(self, operation: Callable[[Tx], T]) -> T:
        """Run an operation of the queue's own in a root transaction."""
        raise NotImplementedError

    def prepare(self, message: Message[Any], *, delay: int | None = None) -> Prepared:
        """Encode a message and run the ``before_enqueue`` hooks, in the caller's thread. Nothing is stored yet.

        The queue need not be declared here: a worker consumes what its broker declares, and this one may not know the actors
        of that queue. The hooks see the ``eta`` option of a delayed message, as with Dramatiq's own brokers; the stored form has none,
        because a worker would hold it in memory.
        """
        return outgoing.prepare(self, message, delay=delay)

    def stage(self, tx: Tx, prepared: Prepared, reservation: Reservation | None = None) -> None:
        """Store a prepared message inside ``tx``; :meth:`announce` it once that has committed.

        Given a reservation that is still ours, its row becomes the message and keeps its age (QUEUE-1); the delivery
        that held it is over, and its proxy has to be marked settled. A lost reservation costs nothing: the message gets a
        row of its own.
        """
        now = self.store.clock.now()
        if reservation is None or not reservations.recycle(tx, reservation, prepared, now=now):
            reservations.insert(tx, prepared, now=now)

    def can_take(self, prepared: Prepared) -> bool:
        """Whether this process may deliver that message itself: it is due, a worker here consumes its queue and knows its
        actor, and nobody is passed by for too long (:meth:`DatabaseConsumer.may_hand_over`)."""
        if prepared.due_at is not None or prepared.message.actor_name not in self.actors:
            return False
        thread = self.here.consumer_thread(prepared.queue)
        return thread is not None and thread.consumer.may_hand_over()

    def hand_over(self, tx: Tx, prepared: Prepared, reservation: Reservation) -> Reservation | None:
        """As :meth:`stage` with a reservation, but the row stays reserved for this process, which saves a reservation.

        ``None`` where the reservation was lost: then nothing was changed. :meth:`taken` follows once ``tx`` has committed. The
        prefetch slot is the one that the delivery at hand gives up, and the age is the row's (QUEUE-1).
        """
        return reservations.hand_over(tx, reservation, prepared, now=self.store.clock.now())

    def taken(self, prepared: Prepared, reservation: Reservation, *, lease_until: int) -> None:
        """After the commit: give the message that was handed over to this process's workers.

        Who else may be here: a shutdown that began meanwhile. Then the row goes back to its queue (QUEUE-7). So it does after a
        late interrupt: should it be with the workers already, one of two deliveries will lose its claim.
        """
        thread = self.here.consumer_thread(prepared.queue)
        self.emit_after("enqueue", prepared.message, prepared.delay)
        if thread is None:
            settlement.give_back_row(self, reservation)
            return
        proxy = None
        try:
            proxy = thread.consumer.receive(prepared.message, reservation, lease_until=lease_until)
            thread.handle_message(proxy)
        except BaseException:
            if proxy is not None:
                self.here.let_go(proxy)
            settlement.give_back_row(self, reservation)
            raise

    def untaken(self, reservation: Reservation) -> None:
        """Where nobody knows whether a hand-over was committed: if it was, its row is available again (QUEUE-8)."""
        settlement.give_back_row(self, reservation)

    def retain(self, tx: Tx, prepared: Prepared, reservation: Reservation) -> bool:
        """Turn our reserved row into ``prepared`` and keep it reserved: after a crash it is redelivered as that message."""
        return reservations.retain(tx, reservation, prepared)

    def release(self, tx: Tx, reservation: Reservation, *, delay: int = 0) -> bool:
        """Put our row back, due after ``delay`` milliseconds; this attempt is not counted. False when it was lost."""
        now = self.store.clock.now()
        return reservations.give_back(tx, reservation, due_at=now + delay, now=now)

    def settle(self, tx: Tx, reservation: Reservation) -> bool:
        """Delete our row inside ``tx``: what the acknowledgement would do later. False when it was lost (QUEUE-2)."""
        return reservations.delete(tx, reservation)

    def announce(self, prepared: Sequence[Prepared]) -> None:
        """After the commit: wake this process's consumers and run the ``after_enqueue`` hooks. Other processes notice."""
        for one in prepared:
            self.here.arrived(one.queue, one.due_at)
        for one in prepared:
            self.emit_after("enqueue", one.message, one.delay)
