"""How a delivery ends: acknowledged, rejected or turned into its own next try, in one transaction with what follows from it.

The invariant: the fenced statement on the row comes first, and when it matches nothing (another worker has taken the
message over), nothing else is written either. What the after hooks sent (the next message of a pipeline, a callback,
a retry) is stored by that same transaction: it cannot be lost while the message is acknowledged, and it cannot be sent
while the message comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import reservations

if TYPE_CHECKING:
    from ..clock import Clock
    from ..store.database import Tx
    from .messages import DatabaseMessageProxy, Prepared


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
            landed = reservations.bury(tx, proxy.reservation, self._reason, now)
        elif proxy.retry is not None:
            landed = reservations.postpone(tx, proxy.reservation, proxy.retry, now)
        else:
            landed = reservations.delete(tx, proxy.reservation)
        if landed:
            for prepared in self._inserts():
                reservations.insert(tx, prepared, now)
        return landed

    def _inserts(self) -> list[Prepared]:
        """New rows. A message that is rejected although a retry was asked for is kept as a dead letter and tried again."""
        new = list(self.proxy.follow_ups or ())
        if self._reason is not None and self.proxy.retry is not None:
            new.append(self.proxy.retry)
        return new

    def sent(self) -> list[Prepared]:
        """Every message that exists now because this has landed."""
        proxy = self.proxy
        return [*(proxy.follow_ups or ()), *((proxy.retry,) if proxy.retry is not None else ())]
