"""Advice to authors, logged once per actor and process when it is first used as a step: settings that work, and surprise.

Advice changes nothing and fails nothing. Each has one name in the log: ``step_keeps_default_retries`` (NATIVE-6),
``reclaim_within_time_limit`` (RECLAIM-7).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import structlog
from dramatiq.middleware import Retries, TimeLimit

if TYPE_CHECKING:
    from dramatiq import Actor

    from .engine.rows import NewStep
    from .settings import Settings

_advised: WeakSet[Any] = WeakSet()


def advise(actor: Actor[Any, Any], step: NewStep, settings: Settings) -> None:
    """Say what is worth knowing of ``actor`` as a step; one look-up from the second time on."""
    if actor in _advised:
        return
    _advised.add(actor)
    with suppress(Exception):  # a broken logger must not keep a step from being scheduled
        log = structlog.get_logger(settings.logging.logger or "dramatiq_saga")
        options = {**actor.options, **(step.options or {})}
        for middleware in actor.broker.middleware:
            if isinstance(middleware, Retries):
                _about_retries(log, actor, options, middleware)
            elif isinstance(middleware, TimeLimit):
                _about_time_limit(log, actor, options, middleware, step.reclaim_stale_after_seconds)


def _about_retries(log: Any, actor: Actor[Any, Any], options: dict[str, Any], retries: Retries) -> None:
    if "max_retries" in options or "retry_when" in options or retries.max_retries != 20 or retries.retry_when is not None:
        return
    log.warning(
        "step_keeps_default_retries",
        actor=actor.actor_name,
        meaning="20 tries over about a month come before a rollback would begin: set max_retries on the actor",
    )


def _about_time_limit(
    log: Any, actor: Actor[Any, Any], options: dict[str, Any], limits: TimeLimit, reclaim_after: int | None
) -> None:
    limit = options.get("time_limit") or limits.time_limit
    if reclaim_after is None or reclaim_after * 1000 > limit:
        return
    log.warning(
        "reclaim_within_time_limit",
        actor=actor.actor_name,
        reclaim_stale_after_seconds=reclaim_after,
        time_limit_ms=limit,
        meaning="a step that is still at work may be claimed by a second worker: lower time_limit, or raise the reclaim window",
    )
