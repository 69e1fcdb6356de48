"""CODEC-3 where it counts: values of many types through rows, messages, replays and rollbacks, in every setting."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import dramatiq
import pytest
from dramatiq.encoder import JSONEncoder

from dramatiq_saga import Flow, NotSerializableError, RunConflictError
from dramatiq_saga.codec import TaggedJSONEncoder
from tests.support.application import Application


@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str


def tagged() -> TaggedJSONEncoder:
    encoder = TaggedJSONEncoder()
    encoder.register(Money, "money", to_plain=lambda m: (m.amount, m.currency), from_plain=lambda plain: Money(*plain))
    return encoder


DUE = datetime(2026, 3, 1, 9, tzinfo=UTC)
ORDER = UUID(int=42)
PRICE = Money(Decimal("19.90"), "EUR")


def test_a_run_sees_the_very_values_that_it_was_given(every_app: Application) -> None:
    """CODEC-1, CODEC-3: arguments, results, side effects, compensations built from results, ordinary messages."""
    app = every_app
    dramatiq.set_encoder(tagged())
    seen: list[Any] = []

    @app.actor
    def charge(order: UUID, price: Money, *, due: datetime) -> dict[Any, Any]:
        app.calls.append(("charge", order, price, due))
        return {"paid": price, "due": {due, due + timedelta(days=1)}, 7: (b"\x00", None), "$uuid": "no tag"}

    @app.actor
    def refund(paid: Money, due: frozenset[datetime]) -> None:
        app.calls.append(("refund", paid, due))

    ship = app.step("ship", raises=ValueError("no"))
    plain = app.step("plain")

    @app.workflow
    def invoice(flow: Flow, order: UUID, *, price: Money) -> None:
        rate = flow.side_effect("rate", lambda: (Decimal("1.10"), {"when": DUE.date()}))
        receipt = (
            flow.action(charge, order, price, due=DUE)
            .compensate_with(lambda r: refund.message(r["paid"], frozenset(r["due"])))
            .run()
        )
        seen.append((rate, receipt))
        flow.run(ship)

    handle = app.run(invoice, ORDER, price=PRICE)
    plain.send((ORDER, {PRICE}))
    app.drain()
    receipt = {"paid": PRICE, "due": {DUE, DUE + timedelta(days=1)}, 7: (b"\x00", None), "$uuid": "no tag"}
    assert seen and all(one == ((Decimal("1.10"), {"when": DUE.date()}), receipt) for one in seen)
    assert app.calls[:3] == [
        ("charge", ORDER, PRICE, DUE),
        ("ship",),
        ("refund", PRICE, frozenset({DUE, DUE + timedelta(days=1)})),
    ]
    assert app.calls[3:] == [("plain", (ORDER, {PRICE}))]
    assert handle.actions()[0].result == receipt and handle.actions()[0].args == [ORDER, PRICE]
    assert handle.compensations()[0].args == [PRICE, frozenset({DUE, DUE + timedelta(days=1)})]


def test_a_run_that_was_stored_before_the_switch_goes_on_after_it(lite: Application) -> None:
    """Rows and messages of the stock encoder, with a dict in them that looks like a tag."""
    app = lite
    given = {"$uuid": "a dict of the user's"}
    step = app.step("step", gives=given)

    @app.workflow
    def flow_of_two(flow: Flow, value: Any) -> list[Any]:
        return [value, flow.run(step, value), flow.run(step, ORDER if use_more_types else 1)]

    use_more_types = False
    dramatiq.set_encoder(JSONEncoder())
    handle = flow_of_two.send(given)
    use_more_types = True
    dramatiq.set_encoder(tagged())
    with app.working():
        assert app.ended(handle) == "completed"
    assert handle.result() == [given, given, given]
    assert app.calls == [("step", given), ("step", ORDER)]


def test_a_sent_again_run_is_known_by_its_values(lite: Application) -> None:
    dramatiq.set_encoder(tagged())

    @lite.workflow
    def idle(flow: Flow, value: Any) -> None: ...

    first = idle.send_with_options(args=({"a", "b", "c"},), run_id="r1")
    assert idle.send_with_options(args=({"c", "b", "a"},), run_id="r1").id == first.id
    with pytest.raises(RunConflictError):
        idle.send_with_options(args=(["a", "b", "c"],), run_id="r1")


def test_a_class_that_the_worker_has_not_registered_holds_the_run_until_one_has(lite: Application) -> None:
    """CODEC-3, HISTORY-1: nobody's failure, so nothing is rolled back."""
    app = lite

    @app.workflow
    def pay(flow: Flow, price: Money) -> str:
        return str(price.amount)

    dramatiq.set_encoder(tagged())
    handle = pay.send(PRICE)
    dramatiq.set_encoder(TaggedJSONEncoder())
    with app.working():
        app.drain()
    (hold,) = app.sql("SELECT status, hold_error FROM {flow_runs} WHERE id = ?", handle.id)
    assert hold[0] not in ("failed", "completed") and "UnknownTagError" in hold[1] and "'money'" in hold[1]
    dramatiq.set_encoder(tagged())
    with app.working():
        handle.kick()
        assert app.ended(handle) == "completed"
    assert handle.result() == "19.90"


def test_what_is_not_carried_is_refused_at_the_call_with_its_path(lite: Application) -> None:
    """CODEC-2."""
    dramatiq.set_encoder(TaggedJSONEncoder())

    @lite.workflow
    def pay(flow: Flow, price: Any) -> None: ...

    with pytest.raises(NotSerializableError) as refused:
        pay.send({"prices": (1, PRICE)})
    assert refused.value.path == "args[0]['prices'][1]" and "register" in str(refused.value)
    assert lite.sql("SELECT COUNT(*) FROM {flow_runs}") == [(0,)]
