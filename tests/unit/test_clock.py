"""CLOCK-1: whole milliseconds, UTC, from one place."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga.clock import ManualClock, SystemClock, moment_to_ms, to_iso, to_ms, uuid7

MS = st.integers(-(10**12), 10**14)


def test_the_system_clock_tells_whole_milliseconds_and_adds_its_correction() -> None:
    clock = SystemClock()
    before = time.time_ns() // 1_000_000
    now = clock.now()
    after = time.time_ns() // 1_000_000
    assert type(now) is int and before <= now <= after

    clock.offset_ms = -7_200_000
    assert clock.now() < before


def test_a_manual_clock_moves_only_when_told_to() -> None:
    clock = ManualClock(1000)
    assert clock.now() == clock.now() == 1000
    clock.advance(1.5)
    clock.advance(timedelta(milliseconds=1))
    assert clock.now() == 2501
    clock.advance(-2)
    assert clock.now() == 501


@given(MS)
def test_a_stored_time_survives_being_shown(ms: int) -> None:
    shown = to_iso(ms)
    assert shown is not None and shown.endswith("Z")
    assert moment_to_ms(datetime.fromisoformat(shown)) == ms


ZONES = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(timedelta(hours=-9))])


@given(st.datetimes(datetime(1960, 1, 1), datetime(2200, 1, 1), timezones=ZONES), ZONES)
def test_a_moment_is_the_same_in_every_zone(moment: datetime, zone: timezone) -> None:
    assert moment_to_ms(moment) == moment_to_ms(moment.astimezone(zone))


def test_a_moment_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="aware datetime"):
        moment_to_ms(datetime(2030, 1, 1))


def test_nothing_is_shown_for_no_time() -> None:
    assert to_iso(None) is None
    assert to_iso(0) == "1970-01-01T00:00:00.000Z"


@pytest.mark.parametrize(
    ("duration", "ms"), [(0, 0), (1, 1000), (0.0015, 2), (timedelta(days=1), 86_400_000), (timedelta(microseconds=400), 0)]
)
def test_durations_are_seconds_or_timedeltas(duration: float | timedelta, ms: int) -> None:
    assert to_ms(duration) == ms


@pytest.mark.parametrize("wrong", ["5", None, True, float("nan"), float("inf"), 1e30, 10**400])
def test_what_is_no_duration_is_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match="seconds"):
        to_ms(wrong)  # type: ignore[arg-type]


@given(st.integers(0, 2**48 - 1))
def test_ids_are_version_seven_uuids_that_carry_their_time(ms: int) -> None:
    text = uuid7(ms)
    parsed = UUID(text)
    assert str(parsed) == text
    assert (parsed.version, parsed.variant) == (7, "specified in RFC 4122")
    assert parsed.int >> 80 == ms


def test_a_later_id_sorts_after_an_earlier_one_and_none_repeats() -> None:
    ids = [uuid7(1_700_000_000_000 + i) for i in range(1000)]
    assert ids == sorted(ids)
    assert len({uuid7(5) for _ in range(1000)}) == 1000
