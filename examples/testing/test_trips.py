"""Everything that can become of a trip."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import Mock, call

import pytest

from dramatiq_saga import FlowFailedError, FlowHandle, StepFailedError
from dramatiq_saga.errors import SignalTimeoutError
from dramatiq_saga.testing import SagaTester
from examples.testing.trips import (
    CardDeclined,
    ask_how_it_was,
    book_flight,
    cancel_flight,
    cancel_hotel,
    charge_card,
    refund_card,
    trip,
    write_invoice,
)


@pytest.fixture(autouse=True)
def bank(saga: SagaTester) -> None:
    saga.replay_every_step()
    saga.replace(charge_card, lambda traveller: f"charge for {traveller}")
    saga.replace(refund_card, lambda charge: None)


@pytest.fixture
def approved(saga: SagaTester) -> FlowHandle[str]:
    """A trip that somebody has approved."""
    run = saga.start(trip, "ada")
    saga.drain()
    run.signal("approved", "grace")
    return run


def test_a_trip_ends_after_a_month(saga: SagaTester, approved: FlowHandle[str]) -> None:
    start = saga.now
    saga.drain()
    assert (approved.status, saga.calls(ask_how_it_was)) == ("waiting", [])
    saga.advance(timedelta(days=29))
    assert saga.calls(ask_how_it_was) == []
    saga.advance(timedelta(days=1))
    assert saga.calls(ask_how_it_was) == [call("ada")]
    assert approved.result() == "ada: room for ada, seat for ada (approved by grace)"
    assert saga.now - start == timedelta(days=30)


def test_whoever_waits_for_a_trip_waits_no_longer_than_needed(saga: SagaTester, approved: FlowHandle[str]) -> None:
    start = saga.now
    assert "approved by grace" in approved.result(wait=timedelta(days=365))
    assert saga.now - start == timedelta(days=30)


def test_a_bank_that_does_not_answer_is_asked_after_one_hour_and_after_two_more(saga: SagaTester) -> None:
    saga.replace(charge_card, Mock(side_effect=[ConnectionError(), ConnectionError(), "late charge"]))
    run = saga.start(trip, "ada")
    saga.advance(timedelta(hours=2, minutes=59))
    assert (run.status, len(saga.calls(charge_card))) == ("running", 2)
    saga.advance(timedelta(minutes=1))
    assert (run.status, len(saga.calls(charge_card))) == ("waiting", 3)


def test_a_declined_card_is_final(saga: SagaTester) -> None:
    declined = CardDeclined("no money")
    saga.replace(charge_card, declined)
    run = saga.start(trip, "ada")
    saga.drain()
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    assert isinstance(failed.value.__cause__, StepFailedError)
    assert failed.value.__cause__.__cause__ is declined
    assert saga.calls(refund_card) == []


def test_what_was_done_is_undone_when_there_is_no_seat(saga: SagaTester, approved: FlowHandle[str]) -> None:
    saga.replace(book_flight, ValueError("fully booked"))
    saga.drain()
    assert (approved.status, approved.rollback) == ("failed", "done")
    assert saga.calls(cancel_hotel) == [call("ada")]
    assert saga.calls(cancel_flight) == []
    assert saga.calls(refund_card) == [call("charge for ada")]


def test_an_invoice_that_cannot_be_written_fails_the_child_and_the_trip(saga: SagaTester, approved: FlowHandle[str]) -> None:
    saga.replace(write_invoice, OSError("no paper"))
    saga.advance(timedelta(hours=1))
    with pytest.raises(FlowFailedError) as failed:
        approved.result()
    of_the_child = failed.value.__cause__
    assert of_the_child is not None
    of_the_step = of_the_child.__cause__
    assert isinstance(of_the_step, StepFailedError)
    assert isinstance(of_the_step.__cause__, OSError)
    assert saga.calls(cancel_flight) == [call("ada")]


def test_a_trip_that_nobody_approves_is_called_off_after_a_week(saga: SagaTester) -> None:
    run = saga.start(trip, "ada")
    saga.advance(timedelta(days=7))
    with pytest.raises(FlowFailedError) as failed:
        run.result()
    assert isinstance(failed.value.__cause__, SignalTimeoutError)
    assert saga.calls(refund_card) == [call("charge for ada")]
