"""One queue's consumer: reserves up to the free prefetch, hands out messages, waits without polling the writer.

The invariant: what it has reserved is either handed out, given back, made a dead letter with its reason, or left to its
lease; nothing is kept for its ETA. It never raises for contention, because an exception out of ``__next__`` costs Dramatiq
a pause of three seconds. It decides nothing about how a delivery ends: that is the broker's, since Dramatiq replaces
consumers and acknowledges old messages through new ones.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable
from threading import Event
from typing import TYPE_CHECKING, Any

from dramatiq.broker import Consumer, MessageProxy
from dramatiq.errors import DecodeError
from dramatiq.message import Message

from . import reservations, settlement
from .messages import DatabaseMessageProxy, Reservation

if TYPE_CHECKING:
    from .database import DatabaseBroker

#: Seconds after which a waiting consumer looks at its queue even though nobody has told it to, or for the sake of a single slot.
LOOK_ANYWAY = 1.0

#: Messages in a row that may take a slot without a reservation while there is no room.
MAX_HANDED_OVER = 16

#: Longest pause, in seconds, between two attempts to reserve while the database refuses them.
MAX_BACKOFF = 1.0


class DatabaseConsumer(Consumer):
    """Iterates over the deliveries of one queue; ``None`` when there was none within ``timeout`` milliseconds."""

    def __init__(self, broker: DatabaseBroker, queue: str, *, prefetch: int, timeout: int) -> None:
        self.broker = broker
        self.queue = queue
        self.prefetch = max(1, prefetch)
        self.timeout = timeout / 1000
        self.closed = False
        self.held: dict[int, DatabaseMessageProxy] = {}  # delivered by this consumer and not yet dealt with
        self.least = max(1, self.prefetch // 3)  # free slots worth a reservation
        self._buffer: deque[DatabaseMessageProxy] = deque()
        self._wake = Event()
        self._arrived = True  # a reservation may find something: look at once
        self._changed = True  # something may have changed: peek first
        self._short_of_room = False
        self._next_at: int | None = None  # when the next delayed or leased row becomes available, as far as is known
        self._peeked = self._reserved = time.monotonic()  # when it last looked, and last reserved
        self._misses = 0  # reservations refused in a row
        self._fruitless = 0  # looks that found nothing, in a row
        self._handed_over = 0  # messages that took a slot without a reservation, since the last one

    # --- told by others ----------------------------------------------------------------------------------------------

    def message_arrived(self, due_at: int | None) -> None:
        """A message for this queue was committed in this process."""
        if due_at is None:
            self._arrived = True
            self._wake.set()
        elif self._next_at is None or due_at < self._next_at:
            self._next_at = due_at
            self._wake.set()

    def database_changed(self) -> None:
        """Somebody committed something; it may concern this queue."""
        self._changed = True
        self._wake.set()

    def forget(self, proxy: DatabaseMessageProxy) -> None:
        """A delivery of ours has been dealt with: its prefetch slot is free."""
        self.held.pop(id(proxy), None)
        if self._short_of_room and self._room():
            self._wake.set()

    def may_hand_over(self) -> bool:
        """Whether a message may take the slot of the one before it, past those that wait in the table (QUEUE-1).

        While there is room, nobody is passed by: what waits is reserved too. Without room, only so many in a row may; then
        the slots have to be won by priority and age again, so that endless runs cannot keep out an urgent message.
        """
        if not self._short_of_room:
            return True
        self._handed_over += 1
        return self._handed_over <= MAX_HANDED_OVER

    # --- Dramatiq's side ---------------------------------------------------------------------------------------------

    def __next__(self) -> DatabaseMessageProxy | None:
        try:
            return self._buffer.popleft()
        except IndexError:
            pass
        clock, deadline = self.broker.store.clock, time.monotonic() + self.timeout
        while not self.closed and not self.broker.here.draining:
            # Cleared before looking: whatever arrives from here on sets it again, so no wake-up is lost.
            self._wake.clear()
            self._short_of_room = True
            free = self._room()
            if free:
                self._short_of_room = False
                if self._available():
                    found = self._fill(free)
                    if found is not None:
                        return found
                    if self._misses:
                        self._wake.wait(self._backoff())
                        return None
                wait = self.broker.idle_pause(self._fruitless)
                if self._arrived or self._changed:  # look again, but let others have their turn
                    wait = 0.002
                elif self._next_at is not None:
                    wait = min(wait, (self._next_at - clock.now()) / 1000 + 0.0005)
            else:
                wait = LOOK_ANYWAY
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            if not self._wake.wait(max(0.001, min(wait, remaining))) and self.broker.polls:
                self._changed = True
        if not self.closed:
            self._wake.clear()
            self._wake.wait(min(self.timeout, 0.05))
        return None

    def ack(self, message: MessageProxy) -> None:
        self.broker.acknowledge(_ours(message))

    def nack(self, message: MessageProxy) -> None:
        self.broker.reject(_ours(message))

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        settlement.give_back(self.broker, [_ours(message) for message in messages])

    def close(self) -> None:
        """Stop reserving, and give back what was reserved and never handed out (QUEUE-7). Messages that were handed out
        can still be acknowledged, through any consumer."""
        self.closed = True
        self._wake.set()
        self.broker.here.remove(self)
        unstarted = []
        while self._buffer:
            try:
                unstarted.append(self._buffer.popleft())
            except IndexError:  # the consumer thread took the last one
                break
        settlement.give_back(self.broker, unstarted)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Free slots, if they are worth a reservation: a third of all, or any that there are where bodies take their time."""
        free = self.prefetch - len(self.held)
        return max(0, free) if free >= self.least or time.monotonic() - self._reserved > LOOK_ANYWAY else 0

    def _available(self) -> bool:
        """Whether a reservation is worth taking the database's writer for."""
        if self._arrived:
            self._arrived = False
            return True
        now = self.broker.store.clock.now()
        if self._next_at is not None and self._next_at <= now:
            self._next_at, self._changed = None, True  # ask again what comes next once this has been taken
            return True
        if self._changed or time.monotonic() - self._peeked > LOOK_ANYWAY:
            self._changed = False
            self._peeked = time.monotonic()
            try:
                view = self.broker.store.read(lambda tx: reservations.peek(tx, self.queue))
            except Exception:
                return True  # the reservation will meet the same trouble, and knows what to do about it
            self._next_at = view.next_at
            if view.ready or (view.next_at is not None and view.next_at <= now):
                return True
            self._fruitless += 1
        return False

    def _fill(self, free: int) -> DatabaseMessageProxy | None:
        """Reserve, keep what can be decoded, hand out the first."""
        # _arrived is only ever raised here: a message that arrives meanwhile raises it too, and must not be forgotten.
        try:
            deliveries = self.broker.reserve(self.queue, free)
        except BaseException:
            self._arrived = True  # everything is still to be looked at
            raise
        if deliveries is None:
            self._arrived = True
            self._misses += 1
            return None
        self._misses = self._handed_over = 0
        self._reserved = time.monotonic()
        if deliveries:
            self._fruitless = 0
        if len(deliveries) == free:  # there may be more
            self._arrived = True
        for delivery in deliveries:
            proxy = self._deliver(delivery)
            if proxy is not None:
                self._buffer.append(proxy)
        if self.closed:  # closed while reserving: nobody will ask for these
            self.close()
            return None
        return self._buffer.popleft() if self._buffer else None

    def _deliver(self, delivery: reservations.Delivery) -> DatabaseMessageProxy | None:
        try:
            message = _decode(delivery.payload)
        except Exception as error:
            settlement.bury_undecodable(self.broker, delivery.reservation, error)
            return None
        if message.queue_name != delivery.reservation.queue:
            settlement.reroute(self.broker, delivery.reservation, message.queue_name)
            return None
        return self.receive(message, delivery.reservation, lease_until=delivery.lease_until)

    def receive(self, message: Message[Any], reservation: Reservation, *, lease_until: int) -> DatabaseMessageProxy:
        """A delivery of ours: held, and its lease extended, until it has been dealt with."""
        proxy = DatabaseMessageProxy(message, reservation, consumer=self, lease_until=lease_until)
        self.broker.here.hold(proxy)
        self.held[id(proxy)] = proxy  # last: a slot that an interrupt had taken would never be free again
        return proxy

    def _backoff(self) -> float:
        ceiling = min(MAX_BACKOFF, 0.01 * 2 ** min(self._misses, 10))
        return random.uniform(ceiling / 2, ceiling)


def _ours(message: MessageProxy) -> DatabaseMessageProxy:
    assert isinstance(message, DatabaseMessageProxy)
    return message


def _decode(payload: bytes) -> Message[Any]:
    """The message, or an error that says what is wrong with the row.

    The shape is checked here because Dramatiq takes it for granted in threads that do not survive a surprise.
    """
    message = Message.decode(payload)
    wrong = [
        name
        for name, kind in (("queue_name", str), ("actor_name", str), ("kwargs", dict), ("options", dict), ("message_id", str))
        if not isinstance(getattr(message, name), kind)
    ]
    if wrong:
        raise DecodeError(f"Not a message: wrong type of {', '.join(wrong)}.", payload, None)  # type: ignore[no-untyped-call]
    message.options.pop("eta", None)  # the row says when it is due; the worker would hold it in memory
    return message
