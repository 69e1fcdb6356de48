"""C67, C68: runs that are under way while workers of one release are replaced by those of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.effects import EffectLog
from tests.support.field import Field
from tests.support.waiting import eventually

DEFAULT = ["default"]


@pytest.fixture
def shop(make_field: Callable[..., Field], database_url: str) -> Field:
    """The application in its releases, on each database in turn."""
    return make_field(database_url, app="tests.processes.deploy_app")


def parked(shop: Field) -> str:
    """A run of the first release that has come as far as its step ``late``; all workers have stopped."""
    run = shop.send("order")
    worker = shop.worker(threads=1, queues=DEFAULT)
    eventually(lambda: len(shop.run(run).steps) == 3, because="the run is parked")
    worker.terminate()
    return run


def deployed(shop: Field, release: str) -> None:
    """Everything that is started from now on has that release."""
    shop.set(release=release)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_run_goes_on_under_code_that_asks_for_the_same(shop: Field, effects: EffectLog) -> None:
    """C67: the recorded sequence counts, not the text of the function; what follows is done by the new release."""
    run = parked(shop)
    deployed(shop, "edited")
    assert shop.done("verify")["fits"]
    shop.worker(threads=1)
    shop.wait_ended(run)
    report = shop.run(run)
    assert report.version == "first"
    assert json.loads(report.result or "") == ["reserve of first", "charge of first", "late of edited", "mail of edited"]
    assert effects.names() == ["reserve", "charge", "late", "mail"]


@pytest.mark.parametrize(("database_url", "by"), [("sqlite", "kick"), ("postgresql", "sweep")], indirect=["database_url"])
def test_a_run_that_does_not_fit_is_told_before_is_held_after_and_goes_on_with_code_that_does(
    shop: Field, effects: EffectLog, by: str
) -> None:
    """C68: verified, deployed all the same, held with its outcome kept, taken back: by an operator at once, or by itself."""
    shop.settings(monitor__expiration__backoff__base_seconds=1, monitor__expiration__backoff__max_seconds=1)
    run = parked(shop)
    deployed(shop, "swapped")
    told = shop.command("verify")
    assert told.returncode == 1
    assert "sequence 1" in told.stdout
    assert "recorded is step 'reserve', the code asks for step 'charge'" in told.stdout
    assert run in told.stdout
    worker = shop.worker(threads=1)
    eventually(lambda: shop.run(run).hold_error is not None, because="the run is held")
    worker.terminate()
    report = shop.run(run)
    assert (report.status, report.rollback, report.steps[2].row.status) == ("waiting", "none", "completed")
    assert json.loads(shop.command("verify", "--json").stdout)["held"] == 1

    deployed(shop, "first")
    verified = shop.done("verify")
    assert (verified["fits"], verified["held_and_fit"]) == (True, 1)
    if by == "kick":
        shop.done("kick", run)
        shop.worker(threads=1)
    else:
        eventually(lambda: shop.done("sweep")["monitor"]["resumed"] == 1, interval=0.2)
    shop.wait_ended(run)
    assert effects.names() == ["reserve", "charge", "late"]
    assert shop.run(run).hold_error is None


@pytest.mark.parametrize(("database_url", "release"), [("mariadb", "edited"), ("sqlite", "swapped")], indirect=["database_url"])
def test_runs_parked_on_signals_are_resumed_by_the_workers_of_another_release(
    shop: Field, effects: EffectLog, release: str
) -> None:
    """C67: an answer that comes after the deploy is read: at once where the sequence is the same, else once it is again."""
    shop.settings(monitor__expiration__backoff__base_seconds=1, monitor__expiration__backoff__max_seconds=1)
    runs = shop.send_many(3, "approval")
    worker = shop.worker(threads=1)
    eventually(lambda: {shop.run(run).status for run in runs} == {"waiting"}, because="all of them are parked")
    worker.terminate()
    deployed(shop, release)
    fits = release == "edited"
    assert (shop.command("verify").returncode == 0) is fits
    worker = shop.worker(threads=1)
    for run in runs:
        shop.signal(run, "approved", "by the board")
    if not fits:
        eventually(lambda: all(shop.run(run).hold_error for run in runs), because="all of them are held")
        assert {shop.run(run).status for run in runs} == {"waiting"}
        worker.terminate()
        deployed(shop, "first")
        shop.worker(threads=1)
        eventually(lambda: shop.done("sweep") and not any(shop.run(run).hold_error for run in runs), interval=0.2)
    for run in runs:
        shop.wait_ended(run)
        ends = ["by the board", f"charge of {'edited' if fits else 'first'}", *(["mail of edited"] if fits else [])]
        assert json.loads(shop.run(run).result or "") == ["reserve of first", *ends]
    assert effects.count("charge") == 3


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_run_that_sleeps_wakes_up_under_another_release(shop: Field, effects: EffectLog) -> None:
    """C67, TIMER-1: asleep for 14 days when the code changes; it wakes when it was to, and goes on with the new code."""
    run = shop.send("nap")
    worker = shop.worker(threads=1)
    eventually(lambda: shop.run(run).status == "waiting", because="it is asleep")
    worker.terminate()
    deployed(shop, "edited")
    assert shop.done("verify")["fits"]
    due = shop.count("SELECT due_at FROM {waits} WHERE run_id = ?", run)
    now = shop.operator.store.clock.now()
    assert 13 * 86_400_000 < due - now <= 14 * 86_400_000
    shop.sql("UPDATE {waits} SET due_at = ? WHERE run_id = ?", now, run)  # 14 days later
    shop.worker(threads=1)
    eventually(lambda: shop.done("sweep") and shop.run(run).ended_at, interval=0.2)
    assert json.loads(shop.run(run).result or "") == ["reserve of first", "charge of edited", "mail of edited"]
    assert effects.names() == ["reserve", "charge", "mail"]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_while_workers_of_two_releases_run_every_run_goes_one_way(shop: Field, effects: EffectLog) -> None:
    """HISTORY-2: a gated change, deployed to one worker after the other; what an old one comes upon it holds, and nothing is lost."""
    shop.settings(monitor__expiration__backoff__base_seconds=1, monitor__expiration__backoff__max_seconds=1)
    runs = [parked(shop), *shop.send_many(10, "order")]
    old = shop.worker(threads=2)
    deployed(shop, "gated")
    new = shop.worker(threads=2)
    runs += shop.send_many(10, "order")
    old.terminate()
    runs.append(shop.send("order"))  # which no old one can have met
    eventually(lambda: shop.done("sweep") and all(shop.run(run).ended_at for run in runs), interval=0.2)
    assert new.running
    ways = [json.loads(shop.run(run).result or "") for run in runs]
    assert {shop.run(run).status for run in runs} == {"completed"}
    assert ways[0][-1] is not True  # it was parked behind the change when that was deployed
    for way in ways:
        assert way[0].startswith("mail") is (way[-1] is True)
    for step in ("reserve", "charge", "late"):
        assert effects.count(step) == len(runs)
    assert effects.count("mail") == sum(way[-1] is True for way in ways) > 0
    assert shop.done("verify")["looked_at"] == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_runs_that_nobody_can_resume_are_listed_and_resumed_once_somebody_can(shop: Field, effects: EffectLog) -> None:
    """C67: a renamed workflow strands its runs; verify says so, and why; with the name back they go on by themselves."""
    shop.settings(monitor__expiration__backoff__base_seconds=1, monitor__expiration__backoff__max_seconds=1)
    run = parked(shop)
    deployed(shop, "renamed")
    told: Any = json.loads(shop.command("verify", "--json").stdout)
    (problem,) = told["problems"]
    assert (problem["kind"], problem["workflow"], problem["run_ids"]) == ("unknown workflow", "order", [run])
    worker = shop.worker(threads=1)
    eventually(lambda: shop.run(run).hold_error is not None, because="the run is held")
    worker.terminate()
    report = shop.run(run)
    assert (report.status, report.steps[2].row.status) == ("waiting", "completed")
    assert "knows workflow 'order'" in (report.hold_error or {})["message"]
    assert json.loads(shop.command("verify", "--json").stdout)["problems"][0]["held"] == 1

    deployed(shop, "first")
    eventually(lambda: shop.done("sweep")["monitor"]["resumed"] == 1, interval=0.2)
    shop.wait_ended(run)
    assert effects.names() == ["reserve", "charge", "late"]
