"""The barriers of Dramatiq's groups, as blocks use them: whose they are, and where they are kept (PAR-1).

A broker that has no ``GroupCallbacks`` of its host's gets one of ours, in front of SagaMiddleware, when the engine is made: so it
is there before the first group is sent and before a worker takes its first message. Barriers then live in the broker's own Redis,
or else in the store's database. A host's own is used as it is, and is the only one: two would count every member twice.

Nothing here decides anything. A barrier that is lost, late or wrong costs a look at the rows (PAR-2).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import structlog
from dramatiq import Broker
from dramatiq.middleware import GroupCallbacks

from .backends.rate_limits import DatabaseRateLimiterBackend

if TYPE_CHECKING:
    from dramatiq.middleware import Middleware
    from dramatiq.rate_limits import RateLimiterBackend

    from .engine.rows import Group
    from .store.database import Store, Tx

_log = structlog.get_logger("dramatiq_saga")


class OwnGroupCallbacks(GroupCallbacks):
    """The one that SagaMiddleware adds, and takes away again where a host's comes later."""


def ensure_group_callbacks(broker: Broker, ours: Middleware, *, store: Store) -> GroupCallbacks:
    """The ``GroupCallbacks`` of a broker, added before ``ours`` where there is none. Opens nothing, and may be called again."""
    theirs = [one for one in broker.middleware if isinstance(one, GroupCallbacks) and not isinstance(one, OwnGroupCallbacks)]
    mine = [one for one in broker.middleware if isinstance(one, OwnGroupCallbacks)]
    if theirs:
        if mine:
            broker.middleware = [one for one in broker.middleware if not isinstance(one, OwnGroupCallbacks)]
        return theirs[0]
    if mine:
        return mine[0]
    added = OwnGroupCallbacks(_backend(broker, store))
    place = broker.middleware.index(ours) if ours in broker.middleware else len(broker.middleware)
    # A new list, because Dramatiq may be walking along the present one: a hook of ours can be what brought us here.
    broker.middleware = [*broker.middleware[:place], added, *broker.middleware[place:]]
    return added


class BlockBarriers:
    """Makes the barriers of blocks, for a sender.

    ``joined``: they are kept in the store's own database, so one is made in the transaction that sends its group, or not at all.
    Elsewhere one is made right before its group is sent, and a back end that refuses costs the run nothing but the callback.
    """

    def __init__(self, broker: Broker, ours: Middleware, *, store: Store) -> None:
        self._callbacks = ensure_group_callbacks(broker, ours, store=store)
        backend = self._callbacks.rate_limiter_backend
        self._own = backend if isinstance(backend, DatabaseRateLimiterBackend) and backend.store is store else None
        self.joined = self._own is not None

    def make(self, group: Group, tx: Tx | None) -> bool:
        """The barrier of one group; false where its back end would not."""
        ttl = self._callbacks.barrier_ttl
        if tx is not None and self._own is not None:
            return self._own.add_within(tx, group.id, value=group.size, ttl=ttl)
        try:
            return bool(self._callbacks.rate_limiter_backend.add(group.id, group.size, ttl))  # type: ignore[no-untyped-call]
        except Exception as error:
            _log.warning("barrier_not_made", group=group.id, error=f"{type(error).__name__}: {error}")
            return False


def _backend(broker: Broker, store: Store) -> RateLimiterBackend:
    redis_broker = sys.modules.get("dramatiq.brokers.redis")  # loaded where the broker is one; Redis is an extra
    if redis_broker is not None and isinstance(broker, redis_broker.RedisBroker):
        from dramatiq.rate_limits.backends import RedisBackend

        backend: RateLimiterBackend = RedisBackend(client=broker.client)
        return backend
    return DatabaseRateLimiterBackend(store)
