"""Clocks of machines that are set, and that are wrong, under real workers (C52, CLOCK-1, RECLAIM-5)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.waiting import eventually
from tests.support.wrong_clock import WrongClock

APP = "tests.processes.timer_app"
ONE_AT_A_TIME = {"dramatiq_queue_prefetch": "1"}  # a worker that stands at a gate holds nothing else
LEASES = {"reclaim__dead_workers__enabled": True, "reclaim__dead_workers__lease_seconds": 2, "repair__enabled": True}


def both_have_beaten_since(field: Field, moment: float) -> None:
    """Both workers that live have renewed their rows since then, by whichever clock they have."""
    beaten = "SELECT COUNT(*) FROM {workers} WHERE seen_at BETWEEN ? AND ?"
    eventually(lambda: field.count(beaten, moment * 1000, moment * 1000 + 60_000) == 2, because="both beat")


def test_a_machines_clock_is_set_two_hours_back_and_then_four_forward(
    make_field: Callable[..., Field], sqlite_path: Path, effects: EffectLog, gates: Gates, tmp_path: Path
) -> None:
    """C52, on one file: a step at work throughout is nobody else's; that of a killed worker is taken over in seconds; sweeps go on; a
    timer comes at its moment by that clock; no duration is negative."""
    clock = WrongClock(tmp_path / "clock")
    field = make_field(f"sqlite:///{sqlite_path}", app=APP)
    field.env.update(clock.env)
    field.settings(**LEASES)
    nap, held = field.send("naps", "nap", 3600, 1), field.send("job", "gate")
    field.worker(threads=1, env=ONE_AT_A_TIME)
    gates.wait_reached("work-gate")
    lost = field.send("job", "gate-lost")
    victim = field.worker(threads=1)
    gates.wait_reached("work-gate-lost")
    victim.kill()
    gates.open("work-gate-lost")

    clock.set(-7200)
    survivor = field.worker(threads=2)
    eventually(lambda: field.done("sweep")["repair"]["reclaims"] == 1, because="a sweep finds that the victim is dead")
    field.wait_ended(lost)
    assert field.step(lost).row.attempts == 2
    assert field.run(nap).status == "waiting"

    for ahead in (0, 7200):
        clock.set(ahead)
        set_at = time.time() + ahead
        field.done("sweep")  # before anybody has beaten: the claim decides
        both_have_beaten_since(field, set_at)
    field.wait_ended(nap)
    assert (field.run(held).status, field.step(held).row.attempts) == ("running", 1)
    gates.open("work-gate")
    field.wait_ended(held)
    assert (field.step(held).row.status, field.step(held).row.attempts) == ("completed", 1)
    assert effects.count("work", name="gate") == 1
    shown = field.command("show", lost, "--events").stdout
    assert "took" in shown
    assert not re.search(r"-\d[\d.]* (ms|s|min|h|d)\b", shown), shown
    assert survivor.running


def test_two_hosts_whose_clocks_are_three_minutes_apart_go_by_the_servers(
    make_field: Callable[..., Field], postgres_url: str, effects: EffectLog, gates: Gates, tmp_path: Path
) -> None:
    """C52, CLOCK-1: 90 seconds ahead and 90 seconds behind, on one PostgreSQL; nobody living is taken for dead, the dead are, and
    timers come when they are due."""
    early, late = WrongClock(tmp_path / "early"), WrongClock(tmp_path / "late")
    early.set(90)
    late.set(-90)
    field = make_field(postgres_url, app=APP)
    field.settings(**LEASES)
    field.set(retry_after=1)
    held = field.send("job", "gate")
    holder = field.worker(threads=1, env={**early.env, **ONE_AT_A_TIME})
    gates.wait_reached("work-gate")
    field.worker(threads=2, env=late.env)
    both_have_beaten_since(field, time.time())
    for host in (early, late):
        field.env.update(host.env)
        swept = field.done("sweep")
        assert (swept["repair"]["reclaims"], swept["never_reclaimed"]) == (0, 0)
        field.wait_ended(field.send("naps", "nap", 0.2, 1))
    assert field.step(held).row.attempts == 1
    holder.kill()
    gates.open("work-gate")
    field.wait_ended(held)
    assert field.step(held).row.attempts == 2
