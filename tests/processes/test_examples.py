"""The examples run as they say, from a copy of their folder, so that their databases are new."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Page
from tests.support.processes import WorkerProcess

NAMES = sorted(path.name for path in (ROOT / "examples").iterdir() if (path / "__init__.py").is_file())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "*.db*"))
    return tmp_path


def run(copy: Path, name: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """``python -m examples.NAME``; what it prints."""
    return python(copy, "-m", f"examples.{name}", *arguments, env=env)


def python(copy: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)]), **(env or {})},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    """A new folder needs a test here, or in a module of its own."""
    assert NAMES == [
        "approval",
        "checkout",
        "compensations",
        "declined_card",
        "demo",
        "fan_out",
        "host_transaction",
        "invoices",
        "order_shipment",
        "patched_change",
        "retries",
        "tenants",
        "testing",
        "trip_booking",
        "two_machines",
    ]


def test_the_quickstart_of_the_readme_is_the_checkout_example() -> None:
    (block,) = [block for block in Page(ROOT / "README.md").blocks if block.file_name == "shop.py"]
    assert block.code == (ROOT / "examples" / "checkout" / "shop.py").read_text(encoding="utf-8")


def test_checkout_completes_one_order_and_undoes_the_other(copy: Path) -> None:
    """COMP-1, SYNC-1."""
    output = run(copy, "checkout").splitlines()
    assert "completed: {'charge': 'charge-for-order-42'}" in output
    assert (
        output[-1]
        == "undone, in this order: [('release_stock', 'order-to-nowhere'), ('refund_card', 'charge-for-order-to-nowhere')]"
    )


def test_retries_are_spent_as_each_actor_says(copy: Path) -> None:
    """NATIVE-1."""
    assert run(copy, "retries").splitlines() == [
        "invoice for teapot, on credit, to be fetched (the printer is on fire)",
        "step 1 fetch_price: completed, attempts: 3",
        "step 2 charge_card: failed, attempts: 1",
        "step 3 wait_for_invoice: completed, attempts: 2",
        "step 4 post_invoice: failed, attempts: 2",
    ]


def test_a_declined_card_waits_for_its_top_up_and_a_stolen_one_does_not(copy: Path) -> None:
    """RSIG-1, RSIG-2, RSIG-3, FENCE-4."""
    assert run(copy, "declined_card").splitlines() == [
        "order-1: the teapot is set aside",
        "order-1: charge 25 to ada's card, key :2:0",
        "order-1: charge 25 to ada's card, key :2:1",
        "order-1: shipped",
        "order-1: receipt for order-1",
        "order-2: the teapot is set aside",
        "order-2: charge 25 to bob's card, key :2:0",
        "order-2: charge 25 to bob's card, key :2:1",
        "order-2: charge 25 to bob's card, key :2:2",
        "order-2: the teapot goes back to the shelf",
        "order-2: failed",
        "order-3: the teapot is set aside",
        "order-3: charge 25 to eve's card, key :2:0",
        "order-3: the teapot goes back to the shelf",
        "order-3: failed",
    ]


def test_compensations_run_in_reverse_and_one_that_may_fail_holds_up_nothing(copy: Path) -> None:
    """COMP-1, COMP-4, COMP-5, COMP-7."""
    assert run(copy, "compensations").splitlines() == [
        "asking for a seat as 3:0",
        "releasing the seat asked for as 3:0, which failed",
        "cancelled hotel-Riga with pin 1234",
        "failed, rollback done",
        "undo of step 3 (release_seat): completed",
        "undo of step 2 (call_greeting_back): failed: a postcard cannot be called back",
        "undo of step 1 (cancel_hotel): completed",
    ]


def test_a_trip_is_undone_side_by_side_halts_and_is_resumed(copy: Path) -> None:
    """COMP-4, COMP-5, COMP-6, COMP-8, C26: with real workers."""
    output = run(copy, "trip_booking")
    told = [line for line in output.splitlines() if "rollback_halted" not in line]
    group = [
        "  level 0: undo of step 5 (cancel_theatre): failed: tickets are not taken back",
        "  level 0: undo of step 4 (cancel_booking): completed",
        "  level 0: undo of step 3 (cancel_booking): completed",
    ]
    assert told == [
        "step 6 (take_payment) failed: ValueError: the card is declined",
        "failed, rollback halted",
        *group,
        "  level 1: undo of step 1 (cancel_flight): failed: the airline does not answer",
        "failed, rollback done",
        *group,
        "  level 1: undo of step 1 (cancel_flight): completed",
    ]


def test_albums_are_published_photo_by_photo_or_not_at_all(copy: Path) -> None:
    """PAR-1, PAR-4, C19."""
    lines = run(copy, "fan_out").splitlines()
    assert [line for line in lines if "claim_lost" not in line] == [  # the message of the member that was cancelled
        "holidays: 4 photos",
        "deleting the thumbnail of aunt.jpg",
        "attic: failed, rollback done",
        "  step 1 list_photos: completed",
        "  step 3 make_thumbnail: completed",
        "  step 4 make_thumbnail: failed",
        "  step 5 make_thumbnail: cancelled",
        "empty: 0 photos",
    ]


def test_a_host_transaction_that_rolls_back_leaves_no_run(copy: Path) -> None:
    """HOST-1, C08."""
    assert run(copy, "host_transaction").splitlines() == [
        "refused: we have no unicorns",
        "1 order, 1 run",
        "teapot: shipped",
    ]


def test_invoices_keep_money_as_money_and_dates_as_dates(copy: Path) -> None:
    """CODEC-3, with async steps."""
    assert run(copy, "invoices").splitlines() == [
        "posted: 21.89 USD",
        "reminders: 2026-02-22 2026-03-01",
        "withdrawing the invoice of 0.10 USD",
        "failed",
    ]


def test_each_tenants_run_sees_its_tenant(copy: Path) -> None:
    """CTX-1: in one thread of a worker, steps and undos of both in any order."""
    lines = [line for line in run(copy, "tenants").splitlines() if not line.startswith("20")]  # without log lines
    assert lines[0] == "without a tenant, no run is started"
    assert sorted(lines[1:]) == [
        "[acme] selling teapot",
        "[globex] selling teapot",
        "[globex] teapot was not sold",
        "acme: acme-teapot",
        "globex: step 2 (reserve) failed: LookupError: globex is sold out",
    ]


def test_a_change_finds_orders_in_flight_and_each_goes_its_own_way(copy: Path) -> None:
    """HISTORY-2."""
    assert run(copy, "patched_change").splitlines() == [
        "2 orders in flight, 0 of them do not fit",
        "['charge-for-order-1', 'shipped']",
        "['checked', 'charge-for-order-2', 'shipped']",
        "['checked', 'charge-for-order-3', 'shipped']",
    ]


def test_two_machines_share_redis_and_postgresql(
    copy: Path, postgres_url: str, redis_url: str, table_prefix: str, worker_process: Callable[..., WorkerProcess]
) -> None:
    """DRIVE-3 with a foreign broker: two worker commands, as on two machines."""
    env = {
        "SHOP_REDIS": redis_url,
        "SHOP_DATABASE": postgres_url,
        "DRAMATIQ_SAGA__SCHEMA__TABLE_PREFIX": table_prefix,
    }
    command = ("-m", "dramatiq_saga.cli", "--app", "examples.two_machines.app")
    python(copy, *command, "init", env=env)
    for _ in range(2):
        worker_process("examples.two_machines.app", env=env, cwd=copy, ready=False)
    output = run(copy, "two_machines", "order-42", "order-to-nowhere", env=env).splitlines()
    assert output[0] == "order-42: {'charge': 'charge-for-order-42'}"
    assert output[1].endswith("no such address; undone by ['refund_card']")
    assert python(copy, *command, "sweep", env=env) == "sweep: no held run was due; repair: nothing was lost\n"


def test_order_shipment_undoes_what_its_child_has_done(copy: Path) -> None:
    """CHILD-1, CHILD-2, CHILD-3."""
    assert run(copy, "order_shipment").splitlines() == [
        "order-1: charged",
        "order-1: packed",
        "order-1: completed; its shipment: completed",
        "order-to-nowhere: charged",
        "order-to-nowhere: packed",
        "order-to-nowhere: unpacked",
        "order-to-nowhere: refunded",
        "order-to-nowhere: failed; its shipment: failed",
        "order-unpaid: charged",
        "order-unpaid: packed",
        "parcel of order-unpaid: called back",
        "order-unpaid: refunded",
        "order-unpaid: failed; its shipment: completed",
    ]


def test_a_suite_runs_without_server_or_wait(copy: Path) -> None:
    """C61."""
    output = run(copy, "testing")
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output
    assert not list((copy / "examples" / "testing").glob("*.db*"))


def test_approval(copy: Path) -> None:
    """A signal that comes twice counts once; a refusal undoes; nobody's answer is a deadline that undoes as well."""
    lines = run(copy, "approval").splitlines()
    assert "paid from budget-100, granted by ann" in lines
    assert "refused by bob" in lines
    assert [line for line in lines if line.startswith("released")] == ["released budget-200", "released budget-300"]
    assert [line for line in lines if line.endswith("about 300")] == [
        "asked the team lead about 300", "asked the head of department about 300",
    ]  # fmt: skip
    assert lines[-2:] == ["expired, rollback done", "late answer taken: False"]
