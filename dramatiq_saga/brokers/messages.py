"""What travels between a queue row and Dramatiq: the fence, the message ready to be stored, and the proxy of a delivery.

The invariant: a delivery is known by its :class:`Reservation` and by nothing else. Everything that ends a delivery is
kept on its proxy or in the database, never in the consumer that handed it out, because Dramatiq replaces consumers and
acknowledges old messages through new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from dramatiq.broker import MessageProxy

if TYPE_CHECKING:
    from dramatiq.message import Message

    from .consumer import DatabaseConsumer


@dataclass(frozen=True, slots=True)
class Reservation:
    """One delivery of one queue row: the fence of everything that ends it (QUEUE-2).

    ``reserved_at`` never moves while the reservation lasts and is never used twice for one row; ``attempt`` counts the
    row's deliveries from 1.
    """

    id: int
    queue: str
    reserved_at: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message that is encoded and has passed the ``before_enqueue`` hooks; :meth:`DatabaseBroker.stage` stores it."""

    message: Message[Any]
    queue: str
    payload: bytes
    priority: int
    due_at: int | None  # None: at once
    delay: int | None  # as given, for the hooks


class DatabaseMessageProxy(MessageProxy):
    """A delivered message.

    ``settled`` is true once the row of this delivery has been dealt with: acknowledging, rejecting or requeueing the
    proxy then changes nothing. An engine that deletes or recycles the row in a transaction of its own sets it.
    """

    def __init__(
        self, message: Message[Any], reservation: Reservation, *, consumer: DatabaseConsumer, lease_until: int
    ) -> None:
        super().__init__(message)
        self.reservation = reservation
        self.settled = False
        self.given_back = False  # never started here; no hook hears of it and no acknowledgement touches its row
        self.consumer = consumer
        self.lease_until = lease_until
        self.thread: Thread | None = None  # runs it, once started
        self._fate: list[None] = [None]
        self.retries: Any = message.options.get("retries", 0)
        self.retry: Prepared | None = None  # asked for by the after hooks: this row, again
        self.follow_ups: list[Prepared] | None = None  # sent by the after hooks: stored with the acknowledgement
        self.withheld: str | None = None  # why the row must not be acknowledged
        self.missed = False  # the last extension found the reservation gone
        self.statements = 0  # acknowledgement statements executed so far (QUEUE-4)

    def claim_fate(self) -> bool:
        """Whoever gets true decides what becomes of a delivery that waits: a thread that runs it, or whoever gives it back.

        Who else may be here: at a shutdown the main thread, giving back what waits in the work queue, and a worker thread
        that has just taken it from there. ``list.pop`` lets exactly one of them through.
        test_a_message_given_back_at_shutdown_is_not_run_by_a_thread_that_got_it
        """
        try:
            self._fate.pop()
        except IndexError:
            return False
        return True

    @property
    def was_retried(self) -> bool:
        """Whether Dramatiq's Retries has counted a try since the delivery: only then is a re-enqueue a retry."""
        options = self._message.options
        return "retries" in options and options["retries"] != self.retries
