"""When the server is asked for the time (CLOCK-1); that it is, the conformance tests show."""

from __future__ import annotations

from typing import Any

import pytest

from dramatiq_saga.clock import SystemClock
from dramatiq_saga.store import clocks
from dramatiq_saga.store.clocks import Correction, ServerClock, measure_offset


class Machine:
    """Both clocks of a machine, moved by hand."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1_700_000_000_000, 5_000.0

    def now(self) -> int:
        return self.wall

    def run(self, seconds: float) -> None:
        self.wall += round(seconds * 1000)
        self.monotonic += seconds


class Server:
    """A cursor whose server answers so much later, and with so much on its clock."""

    def __init__(self, machine: Machine, ahead_ms: int, *delays: float) -> None:
        self.machine, self.ahead, self.delays, self.asked = machine, ahead_ms, list(delays), 0
        self.answer = 0

    def execute(self, sql: str) -> None:
        self.asked += 1
        delay = self.delays.pop(0) if self.delays else 0.0
        self.machine.run(delay / 2)
        self.answer = self.machine.wall + self.ahead
        self.machine.run(delay / 2)

    def fetchall(self) -> list[tuple[int]]:
        return [(self.answer,)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clocks, "_machine", machine)
    monkeypatch.setattr(clocks.time, "monotonic", lambda: machine.monotonic)
    monkeypatch.setattr(clocks.time, "monotonic_ns", lambda: round(machine.monotonic * 1e9))
    return machine


def test_half_the_round_trip_is_taken_off(machine: Machine) -> None:
    assert measure_offset(Server(machine, 90_000, 0.4, 0.4, 0.4), "postgresql") == pytest.approx(90_000, abs=1)


def test_the_fastest_answer_counts(machine: Machine) -> None:
    class Lopsided(Server):
        def execute(self, sql: str) -> None:
            slow = self.asked != 1
            super().execute(sql)
            self.machine.run(4 if slow else 0)

    assert measure_offset(Lopsided(machine, 500), "mysql") == pytest.approx(500, abs=1)


def test_it_is_asked_at_first_then_now_and_then_and_at_once_when_the_clock_was_set(machine: Machine) -> None:
    """C52."""
    clock = SystemClock()
    correction, server = Correction(clock), Server(machine, 250)
    assert correction.is_due()
    correction.measure(server, "postgresql")
    assert clock.offset_ms == 250
    machine.run(clocks.REFRESH_AFTER - 1)
    assert not correction.is_due()
    machine.run(1)
    assert correction.is_due()
    correction.measure(server, "postgresql")
    for step in (7_200_000, -7_200_000):
        machine.wall += step
        assert correction.is_due()
        server.ahead -= step
        correction.measure(server, "postgresql")
        assert clock.offset_ms == server.ahead
        assert not correction.is_due()


def test_a_server_that_cannot_be_asked_is_not_asked_again_at_every_question(machine: Machine) -> None:
    asked: list[int] = []

    def measure() -> None:
        asked.append(1)
        raise OSError("unreachable")

    clock: Any = ServerClock(measure)
    before = clock.now()
    assert clock.now() >= before
    assert len(asked) == 1
    machine.run(clocks.RETRY_AFTER)
    clock.now()
    assert len(asked) == 2


def test_the_correction_is_part_of_the_time(machine: Machine) -> None:
    clock = ServerClock(lambda: clock.correction.measure(Server(machine, 3_600_000), "postgresql"))
    assert clock.now() - SystemClock().now() == pytest.approx(3_600_000, abs=2_000)
