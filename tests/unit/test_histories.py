"""Recorded histories as files: written, read, replayed (C68, CODEC-1, SAFE-2)."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import dramatiq
import pytest
from dramatiq.encoder import Encoder, JSONEncoder

from dramatiq_saga import Flow, FlowHandle, get_flow
from dramatiq_saga.codec import TaggedJSONEncoder
from dramatiq_saga.engine.snapshot import load
from dramatiq_saga.errors import FlowNotFoundError, HistoryFormatError, HistoryMismatchError
from dramatiq_saga.histories import (
    FORMAT_VERSION,
    History,
    load_history,
    parse_history,
    record_history,
    replay_history,
    snapshot_of,
)
from tests.support.application import Application, Applications


class Tour:
    """A workflow with everything that a history can hold, and changes of it."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self.hotel = app.step("hotel", gives={"room": 7, "größe": "groß"})
        self.flight = app.step("flight", raises=ValueError("no seats"))
        self.pay, self.undo = app.step("pay", gives=None), app.step("undo")
        self.variant = "as recorded"
        self.thrown = 0

        @app.workflow(version="2026-03", tags={"team": "tours"})
        def tour(flow: Flow, traveller: str, nights: int = 1) -> Any:
            if self.variant == "swapped":
                flow.run(self.pay)
            hotel = flow.action(self.hotel, traveller).compensate_with(lambda made: self.undo.message(made["room"])).run()
            luck = flow.side_effect("dice", self.throw)
            try:
                flow.run(self.flight, nights)
            except Exception as error:
                if self.variant == "fails":
                    raise
                luck = str(error)
            flow.run(self.pay)
            if self.variant == "asks for more":
                flow.run(self.pay)
            if self.variant == "wants luck":
                flow.side_effect("more", self.throw)
            return [hotel, luck]

        self.workflow = tour

    def throw(self) -> float:
        self.thrown += 1
        return 0.1 + 0.2


@pytest.fixture
def tour(applications: Applications) -> Tour:
    return Tour(applications("sqlite"))


@pytest.fixture
def run(tour: Tour) -> FlowHandle[Any]:
    return tour.workflow.run_sync("ada", nights=3)


def as_seen(snapshot: Any) -> Any:
    """What a replay sees of a snapshot, with its values opened."""
    entries = [
        {
            name: (getattr(entry, name)() if callable(getattr(entry, name)) and name == "value" else getattr(entry, name))
            for name in entry.__slots__
            if name != "error"
        }
        for entry in snapshot.entries
    ]
    return snapshot.args(), snapshot.workflow, snapshot.version, snapshot.status, snapshot.tags, entries


def test_a_history_is_what_a_replay_sees_of_the_run(tour: Tour, run: FlowHandle[Any], tmp_path: Path) -> None:
    """CODEC-1: through a file and back, every value and every flag is the one in the database."""
    path = record_history(run).write(tmp_path / "tour.json")
    history = load_history(path)
    recorded = load(tour.app.engine, run.id)
    assert as_seen(snapshot_of(history, "tour")) == as_seen(recorded)
    assert (history.run_id, history.workflow, history.version, history.status) == (run.id, "tour", "2026-03", "completed")
    assert history.result == run.result()
    assert history.to_json() == path.read_text(encoding="utf-8")


def test_a_history_replays_without_running_anything(tour: Tour, run: FlowHandle[Any]) -> None:
    """DRIVE-4, SIDE-1: recorded answers to everything; no step runs, no side effect is called."""
    calls, thrown = list(tour.app.calls), tour.thrown
    replayed = replay_history(tour.workflow, record_history(run))
    assert (replayed.ends, replayed.result, replayed.error, replayed.asks) == ("completed", run.result(), None, ())
    assert (tour.app.calls, tour.thrown) == (calls, thrown)


@pytest.mark.parametrize(
    ("variant", "ends", "asks"), [("asks for more", "suspended", ("step 'pay'",)), ("wants luck", "side effect", ())]
)
def test_code_that_asks_for_more_fits(tour: Tour, run: FlowHandle[Any], variant: str, ends: str, asks: tuple[str, ...]) -> None:
    """HISTORY-1: what comes after everything recorded is new ground."""
    tour.variant = variant
    replayed = replay_history(tour.workflow, record_history(run))
    assert (replayed.ends, replayed.asks, replayed.result) == (ends, asks, None)


def test_code_that_does_not_fit_is_told_where(tour: Tour, run: FlowHandle[Any]) -> None:
    """C68: raised, so that a test fails with the difference in its last line."""
    history = record_history(run)
    tour.variant = "swapped"
    with pytest.raises(HistoryMismatchError, match="recorded is step 'hotel', the code asks for step 'pay'") as caught:
        replay_history(tour.workflow, history)
    assert caught.value.sequence == 1
    tour.variant = "fails"
    with pytest.raises(HistoryMismatchError, match="nothing more: it raised StepFailedError"):
        replay_history(tour.workflow, history)


def test_a_run_in_flight_is_recorded_as_far_as_it_has_come(applications: Applications) -> None:
    """A history need not be finished: the next drive of such a run is what is replayed."""
    tour = Tour(applications("sqlite"))
    run = tour.workflow.send("ada")
    history = record_history(run)
    assert history.result is None
    assert replay_history(tour.workflow, history).asks == ("step 'hotel'",)


def test_a_run_that_failed_keeps_its_failure(tour: Tour) -> None:
    """CODEC-4: class names, messages and causes are kept; tracebacks, which name files, are not."""
    tour.variant = "fails"
    run = tour.workflow.run_sync("ada")
    history = record_history(run)
    replayed = replay_history(tour.workflow, history)
    assert (replayed.ends, replayed.error) == ("failed", "step 3 (flight) failed: ValueError: no seats")
    text = history.to_json()
    assert "no seats" in text
    assert "Traceback" not in text
    assert __file__ not in text


# --- what is in a file -----------------------------------------------------------------------------------------------


def test_a_file_is_its_owners_and_is_replaced_whole(tour: Tour, run: FlowHandle[Any], tmp_path: Path) -> None:
    """SAFE-2: it holds arguments and results."""
    path = tmp_path / "tour.json"
    path.write_text('{"format": "dramatiq_saga.history", "format_version": 99}')  # of a later version of this package
    path.chmod(0o644)
    record_history(run).write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text(encoding="utf-8"))["entries"][0]["arguments"] == {"json": [["ada"], {}]}
    assert list(tmp_path.glob(".tour*")) == []
    with pytest.raises(FileNotFoundError):
        record_history(run).write(tmp_path / "missing" / "tour.json")


@pytest.mark.parametrize(
    "what", ["", "keep", "{", "[1]", '{"format": "other"}', "SQLite format 3\0", b"{\xff", "{" * 9 + '"a":' * 9_000]
)
def test_what_is_no_history_is_not_replaced(tour: Tour, run: FlowHandle[Any], tmp_path: Path, what: str | bytes) -> None:
    """Whatever a hasty command names is still there afterwards: a database, an empty lock file."""
    path = tmp_path / "kept"
    path.write_bytes(what.encode() if isinstance(what, str) else what)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="kept' is there already and is no history"):
        record_history(run).write(path)
    assert path.read_bytes() == before
    assert sorted(one.name for one in tmp_path.glob("*kept*")) == ["kept"]


def test_a_link_is_followed_and_what_is_no_file_is_not_replaced(tour: Tour, run: FlowHandle[Any], tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    for _ in range(2):  # to a file that is not there, and to a history
        assert record_history(run).write(link) == link
        assert link.is_symlink()
        assert load_history(target).run_id == run.id
    os.mkfifo(tmp_path / "pipe")
    link.unlink()
    link.symlink_to("link.json")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FileExistsError):
            record_history(run).write(other)
    with pytest.raises(OSError, match="symbolic link"):
        record_history(run).write(link)


def test_values_can_be_scrubbed_before_they_are_kept(tour: Tour, run: FlowHandle[Any]) -> None:
    """Arguments, results and side effects pass through it; what it gives is what is kept and replayed."""

    def scrub(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("ada", "somebody"))

    history = record_history(run, scrub=scrub)
    assert "ada" not in history.to_json()
    assert "somebody" in history.to_json()
    assert replay_history(tour.workflow, history).ends == "completed"


class Backwards(Encoder):
    """An encoder whose bytes are no JSON, and no text."""

    def encode(self, data: Any) -> bytes:
        return b"\xff" + json.dumps(data, default=str).encode()[::-1]

    def decode(self, data: bytes) -> Any:
        return json.loads(bytes(data)[:0:-1])


@pytest.fixture
def backwards() -> Iterator[None]:
    before = dramatiq.get_encoder()
    dramatiq.set_encoder(Backwards())
    yield
    dramatiq.set_encoder(before)


def test_values_of_another_encoder_are_kept_as_their_bytes(backwards: None, tour: Tour, tmp_path: Path) -> None:
    """CODEC-1: what is no JSON is kept in base64; without that encoder the file says what it was recorded with."""
    run = tour.workflow.run_sync("ada", nights=3)
    path = record_history(run).write(tmp_path / "tour.json")
    assert '"base64"' in path.read_text(encoding="utf-8")
    assert replay_history(tour.workflow, path).result == run.result()
    dramatiq.set_encoder(JSONEncoder())
    with pytest.raises(HistoryFormatError, match=r"recorded with .*Backwards"):
        load_history(path)


def test_tagged_values_stay_readable_in_the_file(applications: Applications, tmp_path: Path) -> None:
    """CODEC-3: tags and all, and a dict that only looks like one."""
    dramatiq.set_encoder(TaggedJSONEncoder())
    app = applications("sqlite")
    value = {"at": datetime(2026, 3, 1, tzinfo=UTC), "ids": {UUID(int=1)}, "odd": {"$uuid": "no tag"}}
    step, plain = app.step("step", gives=value), app.step("plain", gives={"$uuid": "no tag"})

    @app.workflow
    def order(flow: Flow) -> Any:
        return [flow.run(step), flow.run(plain)]

    path = record_history(order.run_sync()).write(tmp_path / "order.json")
    text = path.read_text(encoding="utf-8")
    assert '"$datetime": "2026-03-01T00:00:00+00:00"' in text and '"$$uuid"' in text and "base64" not in text
    assert replay_history(order, path).result == [value, {"$uuid": "no tag"}]


@pytest.mark.parametrize("value", ["\ud800", "\u0000", 10**30, 1e-7, -0.0, {"": [None, True]}, "é\u202e"])
def test_any_value_that_can_be_stored_comes_back(applications: Applications, tmp_path: Path, value: Any) -> None:
    """CODEC-1: half a surrogate pair included."""
    app = applications("sqlite")
    step = app.step("step", gives=value)

    @app.workflow
    def order(flow: Flow) -> Any:
        return flow.run(step)

    history = load_history(record_history(order.run_sync()).write(tmp_path / "order.json"))
    assert repr(replay_history(order, history).result) == repr(value)


# --- what is refused -------------------------------------------------------------------------------------------------


def broken(history: History, **changes: Any) -> str:
    return json.dumps({**history.document, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "something"}, "does not say that it is"),
        ({"format_version": FORMAT_VERSION + 1}, "this package reads up to"),
        ({"format_version": "1"}, "format_version is '1'"),
        ({"format_version": 0}, "format_version is 0"),
        ({"entries": [{"sequence": 1, "kind": "miracle"}]}, "unknown kind 'miracle'"),
        ({"entries": [{"sequence": 2, "kind": "side effect", "name": "x", "value": {"json": 1}}]}, "from 1 to their number"),
        ({"entries": [{"sequence": 1, "kind": "side effect", "name": "x", "value": 1}]}, "is no stored value"),
        ({"entries": [{"sequence": 1, "kind": "side effect"}]}, "is missing in it"),
        ({"entries": [1]}, "recorded with"),
        ({"entries": None}, "recorded with"),
        ({"arguments": {"base64": "?"}}, "recorded with"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_by_name(
    tour: Tour, run: FlowHandle[Any], changes: dict[str, Any], says: str
) -> None:
    """C68: when it is loaded, not as a mismatch of the code later."""
    with pytest.raises(HistoryFormatError, match=says) as caught:
        parse_history(broken(record_history(run), **changes), "tour.json")
    assert str(caught.value).startswith("tour.json is no history")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": 1}'])
def test_what_is_no_history_at_all_is_refused(text: str) -> None:
    with pytest.raises(HistoryFormatError):
        parse_history(text, "x")


def test_a_history_of_another_workflow_is_refused(tour: Tour, run: FlowHandle[Any]) -> None:
    """Runs find their code by the workflow's name, so a renamed one fits nothing."""

    @tour.app.workflow
    def other(flow: Flow) -> None: ...

    with pytest.raises(ValueError, match="recorded of workflow 'tour', not of 'other'"):
        replay_history(other, record_history(run))


def test_a_run_that_is_gone_has_no_history(tour: Tour, run: FlowHandle[Any]) -> None:
    handle = get_flow(run.id, broker=tour.app.broker)
    tour.app.execute("DELETE FROM {flow_runs}")
    with pytest.raises(FlowNotFoundError):
        record_history(handle)
