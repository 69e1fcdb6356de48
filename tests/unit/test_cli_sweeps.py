"""``sweep`` and its halves when somebody else is at it, and ``schedule``: what is printed, and how it ends (LOOP-1, C58)."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from dramatiq_saga.errors import WriteRefusedError
from dramatiq_saga.recovery import schedule as schedules
from tests.unit.test_cli import Shop, settings, shop

__all__ = ["shop"]

NOW = "CAST(strftime('%s', 'now') AS INTEGER) * 1000"


def somebody_is_at(shop: Shop, *passes: str) -> None:
    for name in passes:
        shop.sql(
            f"INSERT OR REPLACE INTO saga_passes (name, number, holder, began_at) VALUES (?, 7, 'web-3-4711', {NOW})", name
        )


def test_a_sweep_skips_what_another_process_is_at_and_says_so(shop: Shop) -> None:
    """C58: an operator's command does not do nothing in silence; what was skipped, by whom and since when."""
    shop.start()
    somebody_is_at(shop, "monitor")
    shop.sql("UPDATE saga_flow_runs SET woken_at = 1")
    done = shop("sweep")
    assert done.status == 0
    assert done.out.startswith("sweep: monitor skipped: web-3-4711 is at it since 20")
    assert done.out.endswith("Z; repair: 1 driven (runs)\n")
    somebody_is_at(shop, "monitor", "repair")
    value = shop("sweep", "--json").value
    assert (value["monitor"], value["repair"]) == (None, None)
    assert {name: one["holder"] for name, one in value["skipped"].items()} == {"monitor": "web-3-4711", "repair": "web-3-4711"}


@pytest.mark.parametrize("command", ["monitor", "repair"])
def test_the_halves_of_a_sweep_are_commands(shop: Shop, command: str) -> None:
    run = shop.start()
    quiet = {"monitor": "monitor: no held run was due\n", "repair": "repair: nothing was lost\n"}
    assert shop(command).out == quiet[command]
    shop.sql("DELETE FROM saga_messages")
    shop.sql("UPDATE saga_flow_runs SET woken_at = 1, expires_at = 1")
    value = shop(command, "--json").value
    assert value["skipped"] == {}
    assert (value[command]["expired_runs"] if command == "monitor" else value[command]["runs"]) == 1
    assert (run.status == "expired") is (command == "monitor")
    somebody_is_at(shop, command)
    assert shop(command).out.startswith(
        f"{command}: {command} skipped: web-3-4711 is at it" if command == "monitor" else "repair skipped: "
    )


def test_a_repair_that_is_off_is_refused_and_says_what_waits_for_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCTOR-1: off until enabled; whoever asks for it by name is not answered with nothing."""
    settings(shop, monkeypatch, {"repair.enabled": "off"})
    shop.start()
    shop.sql("UPDATE saga_flow_runs SET woken_at = 1")
    done = shop("repair")
    assert (done.status, done.out) == (1, "")
    assert "repair is off (repair.enabled): unless their messages still come, nothing will pick up 1 not driven" in done.err


@pytest.mark.parametrize("command", ["sweep", "monitor", "repair", "schedule"])
def test_without_the_application_nothing_sweeps(shop: Shop, command: str) -> None:
    """The way out is named."""
    shop("init")
    done = shop.plainly("--database", "shop.db", command)
    assert (done.status, done.out) == (1, "")
    assert f"{command} needs the application" in done.err
    assert "(--app)" in done.err


@pytest.mark.parametrize("command", ["monitor", "repair"])
def test_a_store_that_refuses_ends_it_with_a_clear_line(shop: Shop, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def refuse(*_: Any) -> Any:
        raise WriteRefusedError("the database refused the write: database is locked", sqlite_errorcode=5)

    monkeypatch.setattr(f"dramatiq_saga.operations.{command}_in_turn", refuse)
    done = shop(command)
    assert (done.status, done.err) == (1, "dramatiq-saga: the database refused the write: database is locked\n")


# --- schedule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_schedule_says_its_plan_and_what_it_does_and_a_signal_stops_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    """LOOP-1, C53: the zone is shown; status 0; afterwards signals mean what they meant before."""
    shop.start()
    shop.sql("UPDATE saga_flow_runs SET woken_at = 1")
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    told: list[str] = []
    plain = schedules.Schedule.__init__

    def init(self: Any, *parts: Any, tell: Any) -> None:
        def stop_then(text: str) -> None:
            told.append(text)
            tell(text)
            os.kill(os.getpid(), number)

        plain(self, *parts, tell=stop_then)

    monkeypatch.setattr(schedules.Schedule, "__init__", init)
    done = shop(
        "schedule", "--monitor-seconds", "0.1", "--repair-seconds", "0.1", "--timezone", "Europe/Berlin", "--prune-at", "3:00"
    )
    assert (done.status, done.out) == (0, f"schedule: stopped by {name}\n")
    assert told == ["repair: 1 driven (runs)"]
    plan, swept = done.err.splitlines()
    assert (
        "Z monitor every 0.1 s; repair every 0.1 s; prune of what ended over 90 days ago daily at 03:00 Europe/Berlin" in plan
    )
    assert swept.endswith("Z repair: 1 driven (runs)")
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_schedule_of_the_settings_repairs_and_prunes_only_if_it_is_to(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(shop, monkeypatch, {"repair.enabled": "off", "loop.monitor_seconds": "7"})
    monkeypatch.setattr(schedules.Schedule, "serve", lambda self, stop: "nobody")
    done = shop("schedule", "--prune-at", "never", "--json")
    assert done.value == {"stopped_by": "nobody"}
    assert done.err.endswith("Z monitor every 7 s; repair is off (repair.enabled); no prune\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--monitor-seconds", "0.09"], "is no interval"),
        (["--repair-seconds", "often"], "often"),
        (["--prune-at", "25:00"], "is no time of day"),
        (["--timezone", "Europe/Nowhere"], "is no time zone"),
    ],
)
def test_a_plan_that_cannot_be_is_bad_usage(shop: Shop, arguments: list[str], words: str) -> None:
    done = shop("schedule", *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err


def test_a_schedule_without_apscheduler_names_the_extra(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ["apscheduler", *(name for name in sys.modules if name.startswith("apscheduler."))]:
        monkeypatch.setitem(sys.modules, module, None)
    done = shop("schedule")
    assert (done.status, done.out) == (1, "")
    assert "pip install 'PATH-OF-THE-CHECKOUT[schedule]'" in done.err
    assert "monitor every" not in done.err, "no plan that nobody will carry out"


def test_a_pass_is_in_the_name_of_its_machine_and_process(shop: Shop) -> None:
    """The holder is for people: this machine, this process."""
    shop("sweep")
    (holder,) = {row[0] for row in shop.sql("SELECT holder FROM saga_passes")}
    assert holder.endswith(f"-{os.getpid()}")
