"""How a delivery ends: acknowledged, rejected, turned into its own next try, or given back.

Invariant: the fenced statement on the row comes first, and when it matches nothing, because another worker has taken the
message over, nothing else is written either. What the after hooks sent (the next message of a pipeline, a callback, a
retry) is stored by the very transaction that acknowledges: it cannot be lost while the message is gone, and it is not
sent while the message comes back. Nothing here runs a handler again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dramatiq.errors import BrokerConnectionError
from dramatiq.middleware import Interrupt

from ..errors import StoreError
from . import dead_letters, reservations

if TYPE_CHECKING:
    from ..clock import Clock
    from ..store.database import Tx
    from .database import DatabaseBroker
    from .messages import DatabaseMessageProxy, Prepared, Reservation
    from .staging import StagingBroker


class Settlement:
    """The operation that ends one delivery. It can run again; it counts its own statements on the proxy (QUEUE-4)."""

    __slots__ = ("_clock", "_reason", "proxy")

    def __init__(self, proxy: DatabaseMessageProxy, *, reason: str | None, clock: Clock) -> None:
        self.proxy = proxy
        self._reason = reason
        self._clock = clock

    def __call__(self, tx: Tx) -> bool:
        """Whether the delivery was still ours, and has ended as asked."""
        proxy = self.proxy
        proxy.statements += 1
        if self._reason is None and proxy.retry is None and not proxy.follow_ups:
            return reservations.delete(tx, proxy.reservation)
        now = self._clock.now()
        if self._reason is not None:
            landed = reservations.bury(tx, proxy.reservation, self._reason, now=now)
        elif proxy.retry is not None:
            landed = reservations.postpone(tx, proxy.reservation, proxy.retry, now=now)
        else:
            landed = reservations.delete(tx, proxy.reservation)
        if landed:
            for prepared in self._new_rows():
                reservations.insert(tx, prepared, now=now)
        return landed

    def _new_rows(self) -> list[Prepared]:
        """A message that is rejected although a retry was asked for is kept as a dead letter and tried again."""
        rows = list(self.proxy.follow_ups or ())
        if self._reason is not None and self.proxy.retry is not None:
            rows.append(self.proxy.retry)
        return rows

    def sent(self) -> list[Prepared]:
        """Every message that exists now because this has landed."""
        proxy = self.proxy
        return [*(proxy.follow_ups or ()), *((proxy.retry,) if proxy.retry is not None else ())]


def end(broker: DatabaseBroker, proxy: DatabaseMessageProxy, *, reason: str | None) -> None:
    """Acknowledge a delivery, or reject it for a reason; see :meth:`DatabaseBroker.acknowledge`."""
    interrupted = False
    while True:
        try:
            _end(broker, proxy, reason, interrupted)
            return
        except Interrupt as interrupt:
            # A time limit or a shutdown notice that was raised a moment too late: it lands here although the work is done.
            # Let through, it would end the worker thread for good. The statements are fenced, so going through them again
            # changes nothing that has changed already. test_an_interrupt_while_acknowledging_costs_no_thread
            broker.logger.info("%s ignored while message %s was settled.", type(interrupt).__name__, proxy.message_id)
            interrupted = True


def _end(broker: DatabaseBroker, proxy: DatabaseMessageProxy, reason: str | None, interrupted: bool) -> None:
    if proxy.settled or proxy.given_back:
        broker.here.let_go(proxy)
        return
    if proxy.withheld is not None:
        broker.here.let_go(proxy)
        raise StoreError(f"message {proxy.message_id} is not acknowledged: {proxy.withheld}; it comes back after its lease")
    settlement = Settlement(proxy, reason=reason, clock=broker.store.clock)
    repeated = interrupted or proxy.statements > 0
    try:
        landed = broker.run_settlement(settlement)
    except BrokerConnectionError:
        raise  # Dramatiq repeats it every few seconds; the lease goes on being extended meanwhile
    except Exception:
        broker.here.let_go(proxy)  # QUEUE-6: extension stops when the acknowledgement has failed
        raise
    proxy.settled = True
    broker.here.let_go(proxy)
    if landed or repeated:
        sent = settlement.sent()
        if sent:
            broker.announce(sent)
    else:
        report_lost(broker, proxy, "acknowledgement" if reason is None else "rejection")


def give_back(broker: StagingBroker, proxies: Iterable[DatabaseMessageProxy]) -> None:
    """Make messages that were never started available again, their attempts not counted (QUEUE-7).

    Never raises, because an error here would abort Dramatiq's shutdown: what cannot be given back comes back after its
    lease.
    """
    unstarted = sorted(
        (proxy for proxy in proxies if not proxy.settled and proxy.claim_fate()), key=lambda proxy: proxy.reservation.id
    )
    if not unstarted:
        return

    def operation(tx: Tx) -> None:
        now = broker.store.clock.now()
        for proxy in unstarted:
            reservations.give_back(tx, proxy.reservation, due_at=None, now=now)

    _attempt(broker, operation, f"give back {len(unstarted)} messages")
    for proxy in unstarted:
        proxy.settled = proxy.given_back = True
        broker.here.let_go(proxy)
    for queue in {proxy.reservation.queue for proxy in unstarted}:
        broker.here.arrived(queue, None)


def give_back_row(broker: StagingBroker, reservation: Reservation) -> None:
    """As :func:`give_back`, for a row that no delivery was made of yet."""
    now = broker.store.clock.now()
    _attempt(broker, lambda tx: reservations.give_back(tx, reservation, due_at=None, now=now), "give back a message")
    broker.here.arrived(reservation.queue, None)


def bury_undecodable(broker: DatabaseBroker, reservation: Reservation, error: Exception) -> None:
    """A row that is no message goes to the dead letters on its own, with its reason; others are not affected (QUEUE-5)."""
    broker.logger.error("Row %d of queue %r is not a message: %s", reservation.id, reservation.queue, error)
    reason = dead_letters.reason_from(error)
    _attempt(broker, lambda tx: reservations.bury(tx, reservation, reason, now=broker.store.clock.now()), "bury a row")


def reroute(broker: DatabaseBroker, reservation: Reservation, queue: str) -> None:
    """A row whose message belongs to another queue (see :meth:`DatabaseBroker.retain`) is sent on."""
    _attempt(broker, lambda tx: reservations.reroute(tx, reservation, queue, now=broker.store.clock.now()), "send a row on")
    broker.here.arrived(queue, None)


def report_lost(broker: DatabaseBroker, proxy: DatabaseMessageProxy, what: str) -> None:
    """Say that somebody else has this message now."""
    # Who else may be here: a worker that reserved the row after our lease had lapsed, or an operator who flushed the queue.
    # Our fence matches nothing, so neither that reservation nor its outcome was touched.
    # test_the_acknowledgement_of_a_lost_reservation_deletes_nothing
    broker.logger.warning(
        "The %s of message %s (%s) came too late: its reservation had lapsed. Nothing was changed.",
        what,
        proxy.message_id,
        proxy.actor_name,
    )


def _attempt(broker: StagingBroker, operation: Callable[[Tx], Any], what: str) -> None:
    try:
        broker.execute(operation)
    except Exception:
        broker.logger.warning("Could not %s; the lease will lapse.", what, exc_info=True)
