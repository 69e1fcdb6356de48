"""``dramatiq-saga verify``: what it prints, how it ends, and what ``--export`` writes (API, "Command line"; C67, C68)."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga import FlowHandle
from dramatiq_saga.histories import load_history, replay_history
from dramatiq_saga.middleware import middleware_of
from tests.support.deploying import deploy
from tests.unit.test_cli import Shop, shop

__all__ = ["shop"]


@pytest.fixture
def parked(shop: Shop) -> FlowHandle[Any]:
    """A run whose charge and mail are recorded, with its ship between two tries."""
    return shop.failed_once()


@pytest.fixture
def changed(shop: Shop, parked: FlowHandle[Any]) -> Iterator[Callable[[], None]]:
    """Deploys a checkout that mails first; calling it takes that back."""
    engine = middleware_of(shop.module.broker).engine(shop.module.broker)
    before = engine.workflows["checkout"].function

    def checkout(flow: Any, order: str, express: bool = False) -> Any:
        flow.run(shop.module.mail, order)
        flow.run(shop.module.charge, order)

    deploy(engine, "checkout", checkout)
    yield lambda: deploy(engine, "checkout", before)
    deploy(engine, "checkout", before)


def test_code_that_fits_ends_with_zero(shop: Shop, parked: FlowHandle[Any]) -> None:
    done = shop("verify")
    assert (done.status, done.lines) == (0, ["1 run looked at: it fits"])
    done = shop("verify", "--json")
    assert done.value == {
        "fits": True, "looked_at": 1, "unfit": 0, "held": 0, "held_and_fit": 0, "more": 0, "problems": [],
    }  # fmt: skip


def test_an_empty_shop_fits(shop: Shop) -> None:
    shop("init")
    done = shop("verify")
    assert (done.status, done.lines) == (0, ["no run to verify"])


def test_code_that_does_not_fit_ends_with_one_and_a_readable_difference(
    shop: Shop, parked: FlowHandle[Any], changed: Callable[[], None]
) -> None:
    """C68: in CI, before the deploy; nothing has happened to the run."""
    before = shop.sql("SELECT * FROM saga_flow_runs")
    done = shop("verify")
    assert done.status == 1
    assert done.lines == [
        "1 run looked at: 0 fit, 1 does not",
        "",
        "mismatch: 1 run of checkout, sequence 1",
        "  recorded is step 'charge', the code asks for step 'mail'",
        f"  {parked.id}",
        "",
        "a run that does not fit is held, not failed: it goes on once code that fits is deployed",
    ]
    value = shop("verify", parked.id, "--json").value
    assert value["problems"] == [
        {
            "kind": "mismatch", "fits": False, "workflow": "checkout", "sequence": 1, "recorded": "step 'charge'",
            "asked": "step 'mail'", "reason": "recorded is step 'charge', the code asks for step 'mail'", "runs": 1, "held": 0,
            "run_ids": [parked.id],
        }
    ]  # fmt: skip
    assert shop.sql("SELECT * FROM saga_flow_runs") == before
    changed()
    assert shop("verify").status == 0


def test_runs_that_are_held_are_said_to_be(shop: Shop, parked: FlowHandle[Any], changed: Callable[[], None]) -> None:
    shop.sql("UPDATE saga_flow_runs SET hold_count = 2, hold_until = 1, hold_error = '{}', wakes = wakes + 1, woken_at = 1")
    assert "mismatch: 1 run of checkout, sequence 1 (1 held)" in shop("verify").lines
    changed()
    done = shop("verify")
    assert (done.status, done.lines[1]) == (
        0,
        "held already: 1; 1 of them would go on: a sweep drives it again, a kick at once",
    )


def test_a_workflow_can_be_named(shop: Shop, parked: FlowHandle[Any]) -> None:
    assert shop("verify", "--workflow", "restock").lines == ["no run to verify"]
    assert shop("verify", "--workflow", "checkout").lines == ["1 run looked at: it fits"]
    done = shop("verify", "--workflow", "chekout")
    assert done.status == 1
    assert "did you mean checkout" in done.err


def test_a_workflow_that_is_gone_is_listed_with_its_runs(shop: Shop, parked: FlowHandle[Any]) -> None:
    """C67: also when it is named, although the application knows no such workflow."""
    engine = middleware_of(shop.module.broker).engine(shop.module.broker)
    del engine.workflows["checkout"]
    for arguments in ([], ["--workflow", "checkout"], [parked.id]):
        done = shop("verify", *arguments)
        assert done.status == 1
        assert "unknown workflow: 1 run of checkout" in done.lines
        assert f"  {parked.id}" in done.lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nobody"], "nobody"),
        (["x", "--workflow", "checkout"], "not both"),
        (["x", "--finished"], "not both"),
        (["--export", "x.json"], "name it"),
        (["nobody", "--export", "x.json"], "nobody"),
    ],
)
def test_what_cannot_be_meant_is_refused(shop: Shop, arguments: list[str], says: str) -> None:
    shop("init")
    done = shop("verify", *arguments)
    assert done.status == 1
    assert says in done.err
    assert not (shop.directory / "x.json").exists()


def test_a_database_alone_has_no_code_to_verify(shop: Shop, parked: FlowHandle[Any]) -> None:
    done = shop.plainly("--database", "shop.db", "verify")
    assert done.status == 1
    assert "verify needs the application" in done.err


# --- exporting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [["--app"], ["--database", "shop.db"]])
def test_a_history_is_exported_to_a_file(shop: Shop, parked: FlowHandle[Any], through: list[str]) -> None:
    """The database is enough; the file can be replayed, and the note says what is in it."""
    through = ["--app", shop.name] if through == ["--app"] else through
    done = shop.plainly(*through, "verify", parked.id, "--export", "checkout.json")
    assert done.status == 0, done.err
    assert done.lines == [f"run {parked.id} of checkout: 3 entries written to checkout.json"]
    assert "arguments, results and error messages" in done.err
    path = shop.directory / "checkout.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_history(path).run_id == parked.id
    assert replay_history(shop.module.checkout, path).ends == "suspended"
    assert shop.plainly(*through, "--json", "verify", parked.id, "--export", "b.json").value["entries"] == 3


def test_a_file_that_cannot_be_written_is_told(shop: Shop, parked: FlowHandle[Any], tmp_path: Path) -> None:
    done = shop("verify", parked.id, "--export", "missing/checkout.json")
    assert done.status == 1
    assert "missing/checkout.json cannot be written" in done.err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shop.db", "shop.db belongs to the database itself"),
        ("linked.db", "linked.db belongs to the database itself"),
        ("./shop.db-wal", "shop.db-wal belongs to the database itself"),
        ("notes.txt", "'notes.txt' is there already and is no history: only a history is replaced by one; choose another name"),
        ("", "takes the name of a file, and that is empty"),
        (".", "'.' is there already and is no history"),
    ],
)
def test_an_export_destroys_nothing(shop: Shop, parked: FlowHandle[Any], name: str, says: str) -> None:
    (shop.directory / "linked.db").symlink_to("shop.db")
    (shop.directory / "notes.txt").write_text("keep")
    runs = shop.sql("SELECT * FROM saga_flow_runs")
    for through in (["--app", shop.name], ["--database", "shop.db"]):
        done = shop.plainly(*through, "verify", parked.id, "--export", name)
        assert (done.status, done.out) == (1, "")
        assert says in done.err
    assert shop.sql("SELECT * FROM saga_flow_runs") == runs
    assert (shop.directory / "notes.txt").read_text() == "keep"


def test_stored_text_moves_no_terminal(shop: Shop, parked: FlowHandle[Any]) -> None:
    """C70: names come from rows, and a row may hold anything."""
    shop.sql("UPDATE saga_action_runs SET actor = ? WHERE sequence = 1", "ch\x1b[31marge\u202e")
    done = shop("verify")
    assert done.status == 1
    assert "\x1b" not in done.out
    assert "\u202e" not in done.out
    assert json.loads(shop("verify", "--json").out)["problems"][0]["recorded"] == "step 'ch\\x1b[31marge\\u202e'"
