"""Advice to authors, logged once per actor and process when a row of it is scheduled: settings that work, and surprise.

Advice changes nothing and fails nothing. Each has one name in the log: ``step_keeps_default_retries`` (NATIVE-6),
``reclaim_within_time_limit`` (RECLAIM-7; of a step and of a compensation, once for each window that the actor is given).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import structlog
from dramatiq.middleware import Retries, TimeLimit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dramatiq import Actor

    from .engine.rows import NewStep
    from .settings import Settings

_advised: WeakSet[Any] = WeakSet()
_windows: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def advise(actor: Actor[Any, Any], step: NewStep, settings: Settings) -> None:
    """Say what is worth knowing of ``actor`` as a step; a look-up or two from the second time on."""
    if actor not in _advised:
        _advised.add(actor)
        with suppress(Exception):  # a broken logger must not keep a step from being scheduled
            options = {**actor.options, **(step.options or {})}
            for middleware in actor.broker.middleware:
                if isinstance(middleware, Retries):
                    _about_retries(_log(settings), actor, options, middleware)
    advise_on_reclaim(actor, step.reclaim_stale_after_seconds, settings=settings, options=step.options)


def advise_on_reclaim(
    actor: Actor[Any, Any], after_seconds: int | None, *, settings: Settings, options: Mapping[str, Any] | None = None
) -> None:
    """Say so where a row of ``actor`` may be claimed again while its body may still be at work (RECLAIM-7).

    ``options`` are the message's own; they go before the actor's.
    """
    if after_seconds is None:
        return
    known = _windows.setdefault(actor, set())
    if after_seconds in known:
        return
    known.add(after_seconds)
    with suppress(Exception):
        for middleware in actor.broker.middleware:
            if isinstance(middleware, TimeLimit):
                _about_time_limit(_log(settings), actor, {**actor.options, **(options or {})}, middleware, after_seconds)


def _log(settings: Settings) -> Any:
    return structlog.get_logger(settings.logging.logger or "dramatiq_saga")


def _about_retries(log: Any, actor: Actor[Any, Any], options: dict[str, Any], retries: Retries) -> None:
    if "max_retries" in options or "retry_when" in options or retries.max_retries != 20 or retries.retry_when is not None:
        return
    log.warning(
        "step_keeps_default_retries",
        actor=actor.actor_name,
        meaning="20 tries over about a month come before a rollback would begin: set max_retries on the actor",
    )


def _about_time_limit(log: Any, actor: Actor[Any, Any], options: dict[str, Any], limits: TimeLimit, reclaim_after: int) -> None:
    limit = options.get("time_limit") or limits.time_limit
    if reclaim_after * 1000 > limit:
        return
    log.warning(
        "reclaim_within_time_limit",
        actor=actor.actor_name,
        reclaim_stale_after_seconds=reclaim_after,
        time_limit_ms=limit,
        meaning="a step that is still at work may be claimed by a second worker: lower time_limit, or raise the reclaim window",
    )
