"""Getting a message ready to be stored: hooks, due time, priority, encoding; all in the caller's thread.

Invariant: what is stored never carries an ``eta``. The row says when a message is due; a worker that found the option would
hold the message in its memory. Hooks do see it, as with Dramatiq's own brokers. Nothing here touches the database.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dramatiq.broker import MessageProxy
from dramatiq.common import q_name

from .messages import Prepared

if TYPE_CHECKING:
    from dramatiq.message import Message

    from ..clock import Clock
    from .staging import StagingBroker

#: Milliseconds; a century. A longer delay would not fit the column, and means "never" to everybody alive.
MAX_DELAY = 100 * 366 * 86_400_000


def prepare(broker: StagingBroker, message: Message[Any], *, delay: int | None) -> Prepared:
    """See :meth:`StagingBroker.prepare`."""
    delivered: object = message  # Retries hands over the proxy
    if isinstance(delivered, MessageProxy):
        message = delivered._message
    queue = q_name(message.queue_name)
    due_at = _due_at(message.options, delay, broker.store.clock)
    if due_at is not None:
        message = message.copy(queue_name=queue, options={"eta": due_at})
    elif "eta" in message.options or queue != message.queue_name:
        message = replace(message, queue_name=queue, options=_without_eta(message.options))
    broker.emit_before("enqueue", message, delay)
    stored = replace(message, options=_without_eta(message.options)) if "eta" in message.options else message
    return Prepared(message, queue, stored.encode(), _priority(broker, message), due_at, delay)


def _due_at(options: dict[str, Any], delay: float | None, clock: Clock) -> int | None:
    """When to deliver; ``None`` is at once. Without a delay the message's own options count: ``eta`` in milliseconds, or
    the ``delay`` that compositions leave there."""
    if delay is None:
        eta = options.get("eta")
        if isinstance(eta, int | float):
            return int(eta)
        delay = options.get("delay")
    if not isinstance(delay, int | float) or delay <= 0:
        return None
    return clock.now() + round(min(delay, MAX_DELAY))


def _priority(broker: StagingBroker, message: Message[Any]) -> int:
    """The message's own priority, else its actor's. Lower numbers come first, as everywhere in Dramatiq."""
    priority = message.options.get("priority")
    if isinstance(priority, int):
        return priority
    actor = broker.actors.get(message.actor_name)
    return actor.priority if actor is not None else 0


def _without_eta(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "eta"}
