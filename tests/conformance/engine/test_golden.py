"""Golden histories: runs that were recorded once are replayed by every later version (C68, DRIVE-4, HISTORY-1).

A failure here means that an upgrade would hold, or change the course of, runs that somebody has in flight. Do not edit the
file; mend the code. See ``docs/reference/histories.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.verify import walk
from dramatiq_saga.errors import HistoryMismatchError
from dramatiq_saga.flow import Flow
from dramatiq_saga.histories import History, load_history, replay_history, snapshot_of
from tests.golden.record import HISTORIES, record
from tests.golden.workflows import SCENARIOS, declare
from tests.support.bench import Bench

#: What is random in a history of random values.
VARYING = {"arguments", "result", "value"}
GENERATED_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FILES = sorted(HISTORIES.glob("*.json"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The workflows as they are now, on a database that no run is in."""
    made = Bench(f"sqlite:///{tmp_path_factory.mktemp('golden')}/golden.db", declare, clock=ManualClock())
    yield made
    made.close()


def workflow_of(bench: Bench, history: History) -> Any:
    return bench.broker.actors[history.workflow].workflow  # type: ignore[attr-defined]


@pytest.fixture(params=FILES, ids=[path.stem for path in FILES])
def history(request: pytest.FixtureRequest) -> History:
    return load_history(request.param)


def test_every_scenario_has_its_file() -> None:
    assert {path.stem for path in FILES} == set(SCENARIOS)


def test_a_recorded_run_ends_as_it_did(bench: Bench, history: History) -> None:
    """DRIVE-4: the same result or the same error from the same history; a run in flight asks for nothing new."""
    document = history.document
    replayed = replay_history(workflow_of(bench, history), history)
    match history.status:
        case "completed":
            assert (replayed.ends, replayed.result) == ("completed", history.result)
        case "failed":
            assert replayed.ends == "failed"
            assert document["error"]["message"] in (replayed.error or "")
        case "pending":
            assert document["entries"] == []
            assert replayed.ends == "suspended"
        case _:
            assert (replayed.ends, replayed.asks) == ("suspended", ())


def test_every_stretch_of_a_history_leads_to_what_was_recorded_next(bench: Bench, history: History) -> None:
    """DRIVE-1: driven at any earlier moment, this version asks for what the recorded one did: kinds, names, arguments, undos."""
    snapshot = snapshot_of(history, "golden")
    entries = history.document["entries"]
    for length, recorded in enumerate(entries):
        if recorded.get("block") is not None or recorded["kind"] == "patch":
            continue  # members come with their block; an answer about a change need not be asked for any more
        if any(entry["kind"] == "patch" and not entry["value"] for entry in entries[length:]):
            continue  # up to there it was driven by the code before the change
        before = replace(snapshot, entries=list(snapshot.entries[:length]), status="running", rollback="none", signals=())
        walked = walk(bench.engine.workflows[history.workflow].function, before, Flow, settings=Settings(), now=1)
        if walked.decision is None:
            assert recorded["kind"] in ("side effect", "sent signal")
            continue
        asked = walked.context.new_entries
        assert [entry.describe() for entry in asked] == [
            entry.describe() for entry in snapshot.entries[length : length + len(asked)]
        ]
        assert asked[0].sequence == length + 1
        for step in walked.decision.steps:
            stored = entries[step.sequence - 1]
            if stored["arguments"] != {"json": json.loads(step.args)}:
                assert history.run_id == "recorded-values"  # which are others in every run
            undo = stored["compensation"]
            assert (undo is None) == (step.compensation is None and not step.comp_from_result)
            if step.compensation is not None:
                assert undo["actor"] == step.compensation.actor


def test_a_history_with_other_code_is_noticed(bench: Bench, history: History) -> None:
    """C68: no golden history fits a function that asks for something else first."""
    snapshot = snapshot_of(history, "golden")
    wanted = "refuse" if snapshot.entries and snapshot.entries[0].describe() == "step 'undo'" else "undo"

    def other(flow: Flow, *args: Any) -> None:
        flow.run(bench.broker.actors[wanted])

    if not snapshot.entries:
        assert walk(other, snapshot, Flow, settings=Settings(), now=1).ends == "suspended"  # new ground fits anything
        return
    with pytest.raises(HistoryMismatchError, match=f"the code asks for step {wanted!r}"):
        walk(other, snapshot, Flow, settings=Settings(), now=1)


def test_a_file_is_written_as_it_was_read(history: History) -> None:
    """The format: what is read of a file is all that is in it."""
    (path,) = [path for path in FILES if path.stem == history.run_id]
    assert history.to_json() == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_script_records_what_the_files_hold(name: str, tmp_path: Path) -> None:
    """A new file can be made like the old ones; what this version adds to the format aside, nothing has changed in them."""
    made, there = (
        json.loads(GENERATED_ID.sub("an id", text))
        for text in (record(name).to_json(), (HISTORIES / f"{name}.json").read_text(encoding="utf-8"))
    )
    assert {key: made[key] for key in there if key not in ("entries", "format_version")} == {
        key: there[key] for key in there if key not in ("entries", "format_version")
    }
    assert len(made["entries"]) == len(there["entries"])
    for new, old in zip(made["entries"], there["entries"], strict=True):
        mine = VARYING if name == "recorded-values" else set()
        assert {key: new[key] for key in old if key not in mine} == {key: old[key] for key in old if key not in mine}
