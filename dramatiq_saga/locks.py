"""Overlap locks: back ends that say who is at a row, or at a run, at the moment (LOCK-1).

A lock is one key that holds one token for a while. It saves work and never protects any: claims and fences alone keep a step from
counting twice. So a back end that is away, slow or wrong costs an overlap and nothing else; it raises, and work goes on without it. What
is done about a lock that somebody holds is not decided here (``overlaps.py``).
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

from .commands import install
from .errors import MissingExtraError

if TYPE_CHECKING:
    import redis

#: How long Redis may take to answer, or to be reached, where its address does not say (``?socket_timeout=...``), in seconds.
TIMEOUT = 1.0

# One script, so that nothing can come between the look and the write, and so that who was first is told with the refusal.
_TAKE = """
local holder = redis.call('get', KEYS[1])
if holder and holder ~= ARGV[1] and holder ~= ARGV[3] then return holder end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return ARGV[1]
"""
_RELEASE = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('del', KEYS[1])
"""


class LockBackend(Protocol):
    """What ``SagaMiddleware(locks=...)`` takes (LOCK-1). Both methods may raise anything where they cannot tell, and may be repeated."""

    def take(self, key: str, token: str, *, ttl_ms: int, instead_of: str | None = None) -> str:
        """Who holds ``key`` now: ``token``, where it was free, or was held by the same or by ``instead_of``.

        A lock that was taken ends by itself ``ttl_ms`` milliseconds later.
        """
        ...

    def release(self, key: str, token: str) -> bool:
        """End the lock; false, and nothing has changed, where ``token`` does not hold ``key``, or no longer does."""
        ...


class _Line(threading.local):
    """A thread's own connection. ``busy``: a command was begun and is not known to have ended."""

    client: redis.Redis | None = None
    pid = 0
    busy = False


class RedisLocks:
    """Locks in Redis, for ``SagaMiddleware(locks=...)``: one key each, gone with its release or its TTL (LOCK-1).

    Parameters:
      url_or_client: an address, ``redis://``, ``rediss://`` or ``unix://``; or a ``redis.Redis`` of yours, whose timeouts and retries
        then count. With an address, Redis has a second to answer.

    Each worker thread keeps one connection. Nothing is opened before the first lock is taken.

    Raises:
      TypeError: something else was given: a client of a cluster, or an asynchronous one.
      MissingExtraError: the package ``redis`` is missing.
    """

    def __init__(self, url_or_client: str | redis.Redis) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"RedisLocks needs the package redis: {install('redis')}") from error
        if isinstance(url_or_client, str):
            # A connection that was closed while it was idle is made anew at once; whatever is worse than that is not waited for.
            again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
            url_or_client = redis.Redis.from_url(
                url_or_client, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=again
            )
        if not isinstance(url_or_client, redis.Redis):
            raise TypeError(
                f"RedisLocks takes an address such as 'redis://localhost:6379/0', or a redis.Redis, not {url_or_client!r}"
            )
        self._client = url_or_client
        self._take = self._client.register_script(_TAKE)
        self._release = self._client.register_script(_RELEASE)
        self._line = _Line()

    def take(self, key: str, token: str, *, ttl_ms: int, instead_of: str | None = None) -> str:
        """See :meth:`LockBackend.take`; raises ``redis.RedisError`` where Redis does not answer, or refuses."""
        holder = self._ask(self._take, key, token, ttl_ms, "" if instead_of is None else instead_of)
        return holder.decode() if isinstance(holder, bytes) else str(holder)

    def release(self, key: str, token: str) -> bool:
        """See :meth:`LockBackend.release`; raises ``redis.RedisError`` where Redis does not answer, or refuses."""
        return bool(self._ask(self._release, key, token))

    def _ask(self, script: Any, key: str, *args: str | int) -> Any:
        """Who else may be here: an interrupt, between a command and its answer. On a connection that is shared, somebody else would
        read that answer as theirs; on this one it is hung up before anything else is said.
        test_an_interrupt_leaves_no_answer_for_somebody_else
        """
        line = self._line
        if line.client is not None and (line.busy or line.pid != os.getpid()):
            connection = line.client.connection
            if connection is not None:
                connection.disconnect()  # type: ignore[no-untyped-call]
            line.client = None
        if line.client is None:
            line.client = self._client.client()  # type: ignore[no-untyped-call]
            line.pid = os.getpid()
        line.busy = True
        answer = script(keys=[key], args=args, client=line.client)
        line.busy = False
        return answer


__all__ = ["LockBackend", "RedisLocks"]
