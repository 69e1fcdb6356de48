"""Values on their way into rows and back, and what a row, an event or a statement may hold of them."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.encoder import JSONEncoder, PickleEncoder

from dramatiq_saga import Flow, FlowCancelledError, FlowFailedError, Settings, StepFailedError, query
from dramatiq_saga.codec import describe_error
from tests.support.application import Application, Applications
from tests.support.bench import Bench


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = [1]
    value.append(value)
    return {"loop": value}


UNSTORABLE = {
    "nan": (lambda: {"a": [{"b": float("nan")}]}, r"\['a'\]\[0\]\['b'\] cannot be stored: nan is not JSON"),
    "infinity": (lambda: [[[float("inf")]]], r"\[0\]\[0\]\[0\] cannot be stored: inf is not JSON"),
    "minus infinity": (lambda: {"x": float("-inf")}, r"\['x'\] cannot be stored: -inf is not JSON"),
    "open file": (lambda: open(__file__), r" cannot be stored: _io\.TextIOWrapper"),  # noqa: SIM115
    "lambda": (lambda: {"f": lambda: 1}, r"\['f'\] cannot be stored: function"),
    "lock": (threading.Lock, r" cannot be stored: _thread\.lock"),
    "itself": (circle, r"\['loop'\]\[1\] cannot be stored: it contains itself"),
    "too deep": (lambda: nested(2000), " cannot be stored: it is nested more than 200 levels deep"),
    "key": (lambda: {(1, 2): 3}, r" cannot be stored: its key \(1, 2\)"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", list(UNSTORABLE))
def test_a_result_that_cannot_be_stored_fails_its_step_once_and_for_all_and_is_undone(lite: Application, what: str) -> None:
    """C46, C47, CODEC-2: final although there are tries left, as work that was done; the error names the step and the path."""
    make, words = UNSTORABLE[what]

    @lite.actor(max_retries=20)
    def charge() -> Any:
        lite.calls.append("charged")
        return make()

    refund = lite.step("refund")

    @lite.workflow
    def order(flow: Flow) -> None:
        flow.action(charge).compensate_with(refund).run()

    handle = order.run_sync()
    assert (handle.status, handle.rollback) == ("failed", "done")
    assert lite.calls == ["charged", ("refund",)]
    [action] = handle.actions()
    assert (action.status, action.given_up, action.result, action.attempts) == ("failed", True, None, 1)
    [undo] = handle.compensations()
    assert undo.undoes == "completed"
    with pytest.raises(
        FlowFailedError, match="charge did its work, but its result cannot be stored: the result of charge" + words
    ):
        handle.result()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "redis"])
def test_nan_never_reaches_a_server(applications: Applications, kind: str) -> None:
    """C46: whose JSON columns would refuse the row after the effect was done; the same failure as on a file."""
    app = applications(kind)
    charge, refund = app.step("charge", gives={"amount": float("nan")}, max_retries=9), app.step("refund")

    @app.workflow
    def order(flow: Flow) -> None:
        flow.action(charge).compensate_with(refund).run()

    handle = app.run(order)
    app.drain()
    assert app.calls == [("charge",), ("refund",)]
    with pytest.raises(FlowFailedError, match=r"the result of charge\['amount'\] cannot be stored"):
        handle.result()


@pytest.mark.parametrize("queued", [False, True], ids=["run_sync", "queued"])
def test_a_step_that_changes_its_arguments_changes_nothing_that_is_stored(lite: Application, queued: bool) -> None:
    """C22, CODEC-4: each try sees the arguments as they were stored; neither the row nor an earlier result changes."""
    seen: list[Any] = []
    first = lite.step("first", gives=[1, 2])

    @lite.actor(max_retries=2)
    def greedy(order: dict[str, Any], numbers: list[int]) -> str:
        seen.append((dict(order), list(numbers)))
        order["id"] = object()
        order.pop("name")
        numbers.append(3)
        if len(seen) < 3:
            raise ValueError("again")
        return "done"

    last = lite.step("last")

    @lite.workflow
    def shop(flow: Flow) -> list[int]:
        numbers = flow.run(first)
        flow.run(greedy, {"id": "o-1", "name": "ann"}, numbers)
        flow.run(last)
        return numbers

    handle = lite.run(shop) if queued else shop.run_sync()
    assert seen == [({"id": "o-1", "name": "ann"}, [1, 2])] * 3
    assert handle.actions()[1].args == [{"id": "o-1", "name": "ann"}, [1, 2]]
    assert handle.result() == [1, 2]


@pytest.mark.parametrize("queued", [False, True], ids=["run_sync", "queued"])
def test_a_workflow_that_changes_a_result_changes_nothing_that_is_recorded(lite: Application, queued: bool) -> None:
    """C22, CODEC-4: every replay begins with the same values, whether or not the last one's are still in a cache."""
    first, second = lite.step("first", gives={"items": [1]}), lite.step("second")
    lengths: list[int] = []

    @lite.workflow
    def shop(flow: Flow) -> Any:
        made = flow.run(first)
        dice = flow.side_effect("dice", lambda: [4])
        lengths.append(len(made["items"]) + len(dice))
        made["items"].append(2)
        dice.append(5)
        flow.run(second, made, dice)
        flow.run(second, made, dice)
        return made

    handle = lite.run(shop) if queued else shop.run_sync()
    assert set(lengths) == {2}
    assert len(lengths) >= 3
    assert lite.calls[1:] == [("second", {"items": [1, 2]}, [4, 5])] * 2
    assert handle.actions()[0].result == {"items": [1]}
    assert handle.result() == {"items": [1, 2]}


@pytest.mark.parametrize("restarts", [False, True], ids=["in one process", "cache lost after each message"])
def test_a_workflow_sees_the_stored_form_the_first_time_too(by_hand: Any, restarts: bool) -> None:
    """C50, CODEC-1: tuples are lists and keys are text, live and replayed, so both walks take one path."""
    paths: list[str] = []

    def declare(bench: Bench) -> None:
        def pair() -> Any:
            return {1: ("a", "b")}

        def take(value: Any) -> None: ...

        step, last = bench.actor(pair), bench.actor(take)

        def shop(flow: Flow, given: Any) -> Any:
            made = flow.run(step)
            effect = flow.side_effect("pair", lambda: (1, 2))
            paths.append("/".join(type(value).__name__ for value in (made.get("1"), made.get(1), effect, given)))
            flow.run(last, made)
            flow.run(last, effect)
            return made

        bench.workflow(shop)

    bench = by_hand(declare)
    run = bench.start("shop", (7, 8))
    while bench.messages:
        bench.deliver(bench.take())
        if restarts:
            bench.engine.cache.drop(run)
    assert bench.status(run) == "completed"
    assert set(paths) == {"list/NoneType/list/list"}


def test_values_pass_through_the_encoder_that_the_host_has_set(lite: Application) -> None:
    """CODEC-1, SAFE-1: Dramatiq's own encoder for arguments, results and side effects; a host that sets pickle gets pickle."""
    dramatiq.set_encoder(PickleEncoder())
    step = lite.step("step", gives={(1, 2): {3}})

    @lite.workflow
    def shop(flow: Flow, value: Any) -> Any:
        assert flow.side_effect("set", lambda: {9}) == {9}
        return flow.run(step, value)

    handle = shop.run_sync({"x": (1, 2)})
    assert handle.result() == {(1, 2): {3}}
    assert lite.calls == [("step", {"x": (1, 2)})]
    [(args,)] = lite.sql("SELECT args FROM {flow_runs}")
    assert pickle.loads(args) == [[{"x": (1, 2)}], {}]


def test_stored_values_are_the_encoders_own_bytes(joined: Application) -> None:
    """CODEC-1: whoever reads the tables needs Dramatiq's encoder and nothing else."""
    value = {"text": "ä \U0001f600 \u2028", "numbers": [1, 2.5, -0.0, 10**30], "none": None}
    step = joined.step("step", gives=value)

    @joined.workflow
    def shop(flow: Flow, given: Any) -> Any:
        return flow.run(step, given)

    handle = joined.run(shop, value)
    assert handle.result() == value
    for sql in ("SELECT result FROM {flow_runs}", "SELECT result FROM {action_runs}"):
        assert JSONEncoder().decode(bytes(joined.sql(sql)[0][0])) == value
    assert JSONEncoder().decode(bytes(joined.sql("SELECT args FROM {action_runs}")[0][0])) == [[value], {}]


# --- SAFE-1 ----------------------------------------------------------------------------------------------------------


def test_nothing_is_imported_or_unpickled_for_a_stored_name(
    by_hand: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFE-1, CODEC-4: a forged error row names a module that could be imported; it is only compared as text."""
    (tmp_path / "forged_module.py").write_text("class Forged(Exception): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    told: list[bool] = []

    def declare(bench: Bench) -> None:
        def fails() -> None:
            raise ValueError("no")

        step = bench.actor(fails)

        def shop(flow: Flow) -> None:
            try:
                flow.run(step)
            except StepFailedError as error:
                told.append(error.is_a("forged_module.Forged"))

        bench.workflow(shop)

    bench = by_hand(declare)
    run = bench.start("shop")
    bench.deliver(bench.take())
    delivery = bench.deliver(bench.take())
    forged = type("Forged", (Exception,), {"__module__": "forged_module"})
    text = describe_error(forged("boo"))
    bench.store.write(lambda tx: tx.run("UPDATE {action_runs} SET error = ? WHERE run_id = ?", (text, run)))
    bench.runner.give_up(delivery)
    bench.run()
    assert bench.status(run) == "completed"
    assert told == [True]
    assert "forged_module" not in sys.modules


# --- SAFE-2 ----------------------------------------------------------------------------------------------------------


def a_run_with(app: Application, secret: str) -> Any:
    """A failed run in which ``secret`` is an argument, a result, a side effect and part of an error's message."""
    step, undo = app.step("step", gives={"secret": secret}), app.step("undo")
    fails = app.step("fails", raises=ValueError(f"refused {secret}"))

    @app.workflow
    def shop(flow: Flow, given: str) -> None:
        flow.action(step, given).compensate_with(undo, given).run()
        flow.side_effect("dice", lambda: secret)
        flow.run(fails)

    return shop.run_sync(secret)


@pytest.mark.parametrize("payloads", [True, False])
@pytest.mark.parametrize("exceptions", [True, False])
def test_the_history_holds_payloads_and_messages_only_where_the_settings_say_so(
    applications: Applications, payloads: bool, exceptions: bool
) -> None:
    """SAFE-2: each switch by itself; the kind of error is always told."""
    history = {"store_payloads": payloads, "store_exceptions": exceptions}
    app = applications("sqlite", settings=Settings(history=history))  # type: ignore[arg-type]
    handle = a_run_with(app, "4111-1111")
    holding = {event.type for event in handle.events() if "4111-1111" in (event.detail or "")}
    expected = set()
    if payloads:
        expected |= {"flow.started", "action.completed", "side_effect.recorded"}
    if exceptions:
        expected |= {"action.failed", "compensation.started", "flow.failed"}
    assert holding == expected
    [failed] = [event for event in handle.events() if event.type == "action.failed"]
    assert (failed.detail or "").startswith("ValueError")


def test_previews_are_cut_at_the_length_that_is_set(applications: Applications) -> None:
    """SAFE-2: in the history only; the values themselves are whole."""
    settings = Settings(history={"max_payload_preview_length": 12})  # type: ignore[arg-type]
    app = applications("sqlite", settings=settings)
    handle = a_run_with(app, "x" * 500)
    details = [
        event.detail for event in handle.events() if event.type in ("flow.started", "action.completed", "side_effect.recorded")
    ]
    assert [len(detail or "") for detail in details] == [12, 12, 12]
    assert all((detail or "").endswith("…") for detail in details)
    assert handle.actions()[0].result == {"secret": "x" * 500}
    assert handle.actions()[0].args == ["x" * 500]


def test_quotes_and_placeholders_in_names_and_values_are_only_text(every_app: Application) -> None:
    """SAFE-2: every value is a parameter, on every database: ids, names, tags, keys, arguments, results, reasons."""
    app = every_app
    nasty = "'; DROP TABLE saga_flow_runs; -- \" ` % %s ? :x {flow_runs} \\ ä"
    step, undo = app.step(nasty, gives=nasty), app.step(f"undo {nasty}")

    def function(flow: Flow, given: str) -> str:
        made = flow.action(step, given).compensate_with(undo, given).run()
        flow.tag(nasty, nasty)
        assert flow.side_effect(nasty, lambda: nasty) == nasty
        raise ValueError(nasty + made)

    shop = app.workflow(function, name=f"shop {nasty}")
    handle = shop.send_with_options(args=(nasty,), run_id=nasty)
    other = shop.send(nasty)
    assert other.cancel(nasty) is True
    with pytest.raises(FlowCancelledError, match=re.escape(nasty)):
        other.result()
    app.start()
    assert app.ended(handle) == "failed"
    app.drain()
    assert app.calls == [(nasty, nasty), (f"undo {nasty}", nasty)]
    assert handle.tags == {nasty: nasty}
    assert [found.id for found in query(workflow=shop, tags={nasty: nasty}, status="failed")] == [nasty]
    assert handle.actions()[0].result == nasty
    with pytest.raises(FlowFailedError) as caught:
        handle.result()
    assert caught.value.cause is not None
    assert caught.value.cause["message"] == nasty * 2
