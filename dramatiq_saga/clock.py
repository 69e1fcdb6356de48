"""The one place where "now" is made (CLOCK-1).

Every stored time is an integer: milliseconds since the epoch, UTC, as in Dramatiq's own messages. Code that needs the
time is handed a clock; nothing else in this package asks the operating system for a wall-clock time. Intervals inside
one process are measured on the monotonic clock and never stored.
"""

from __future__ import annotations

import math
import os
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class Clock(Protocol):
    """Tells the time; the engine takes it as an argument so that tests can move it."""

    def now(self) -> int:
        """Milliseconds since the epoch, UTC."""
        ...


class SystemClock:
    """The machine's clock plus a correction.

    ``offset_ms`` is what has to be added to this machine's clock to get the server's; a store on a database server sets
    it, so that leases written by different machines are compared on one clock.
    """

    def __init__(self) -> None:
        self.offset_ms = 0

    def now(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


class ManualClock:
    """A clock that moves only when told to: for tests."""

    def __init__(self, start: int = 1_700_000_000_000) -> None:
        self._now = start

    def now(self) -> int:
        return self._now

    def advance(self, duration: float | timedelta) -> None:
        """Move by ``duration`` (seconds or a ``timedelta``); backwards too, as clocks of machines do."""
        self._now += to_ms(duration)


def to_ms(duration: float | timedelta) -> int:
    """A duration of ours (seconds, or a ``timedelta``) in milliseconds.

    :raises TypeError: it is neither.
    :raises ValueError: it is NaN, infinite, or longer than a ``timedelta`` can be.
    """
    if isinstance(duration, timedelta):
        return round(duration.total_seconds() * 1000)
    if isinstance(duration, bool) or not isinstance(duration, (int, float)):
        raise TypeError(f"a duration is a number of seconds or a timedelta, not {duration!r}")
    if not isinstance(duration, int) and not math.isfinite(duration):
        raise ValueError(f"a duration is a finite number of seconds, not {duration!r}")
    if abs(duration) > timedelta.max.total_seconds():
        raise ValueError(f"a duration is at most {timedelta.max.days} days, not {duration!r} seconds")
    return round(duration * 1000)


def moment_to_ms(moment: datetime) -> int:
    """An aware ``datetime`` as stored time; a naive one is refused, because it names no moment.

    :raises TypeError: it is no ``datetime``.
    :raises ValueError: it has no time zone.
    """
    if not isinstance(moment, datetime):
        raise TypeError(f"a moment is an aware datetime, not {moment!r}")
    if moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone: pass an aware datetime, for example datetime.now(timezone.utc)")
    return (moment - _EPOCH) // _MILLISECOND


def to_iso(ms: int | None) -> str | None:
    """A stored time for people: ISO 8601, UTC, milliseconds; ``None`` stays ``None``."""
    if ms is None:
        return None
    return (_EPOCH + ms * _MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def uuid7(now_ms: int) -> str:
    """A version 7 UUID (RFC 9562): sorts by the time it was made, so new rows land beside each other."""
    random = int.from_bytes(os.urandom(10), "big")
    value = (now_ms & ((1 << 48) - 1)) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
