"""Every error survives pickling with its facts, and says what to do next."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
from dramatiq.results.errors import ResultMissing as DramatiqResultMissing
from dramatiq.results.errors import ResultTimeout as DramatiqResultTimeout

from dramatiq_saga import errors
from dramatiq_saga.errors import FlowError, SagaError, StepFailedError, StepInterruptedError, is_named, qualified_name

CAUSE: dict[str, Any] = {
    "type": "builtins.ValueError",
    "bases": [],
    "message": "no",
    "code": None,
    "traceback": "",
    "cause": None,
}

EXAMPLES: list[SagaError] = [
    errors.SagaError("plain"),
    errors.FlowError("plain"),
    StepFailedError("charge", 3, "shop.Declined", "no money", "trace", CAUSE, ("shop.Declined", "builtins.Exception"), "E17"),
    StepInterruptedError("charge", 3),
    errors.StepExpiredError("charge", 3),
    errors.SignalTimeoutError("paid", 4),
    errors.ChildError("ship", "run-2", 5, "why", CAUSE),
    errors.ChildFailedError("ship", "run-2", 5, "why", CAUSE),
    errors.ChildExpiredError("ship", "run-2", 5),
    errors.ChildCancelledError("ship", "run-2", 5),
    errors.FlowNotFoundError("run-1"),
    errors.FlowEndedError("run-1", "checkout"),
    errors.FlowFailedError("run-1", "checkout", CAUSE),
    errors.FlowCancelledError("run-1", "checkout", None, "by request"),
    errors.FlowExpiredError("run-1", "checkout"),
    errors.ResultMissing("run-1", "waiting"),
    errors.ResultTimeout("run-1", "running"),
    errors.RunConflictError("run-1", "it belongs to another workflow"),
    errors.CannotSignalFlowError("run-1", "completed"),
    errors.CannotSignalTerminalFlowError("run-1", "completed"),
    errors.CannotSignalRollingBackFlowError("run-1", "rolling_back"),
    errors.SignalKeyConflictError("run-1", "k-1", "paid", "refunded"),
    errors.NothingAwaitsRetryError("run-1", "waiting"),
    errors.ConcurrentTransitionError("run-1", "cancelled", "completed"),
    errors.NotSerializableError("args[0]", "set"),
    errors.UnknownTagError("money"),
    errors.WouldBlockError("run-1", "the signal 'paid'"),
    errors.WouldBlockError("run-1", "code that fits its history", CAUSE),
    errors.SettingsError("repair.enabled", "must be True or False, not 1"),
    errors.SchemaVersionError(None, "3", "saga_"),
    errors.SchemaVersionError("2", "3", "saga_"),
    errors.SchemaVersionError("10", "9", "saga_"),
    errors.MissingExtraError("plain"),
    errors.MiddlewareOrderError("plain"),
    errors.DatabaseUnusableError("plain"),
    errors.StoreError("plain"),
    errors.WriteRefusedError("busy", sqlite_errorcode=517),
    errors.WriteUnknownError("plain"),
    errors.MessageNotSentError("plain"),
    errors.HistoryMismatchError("run-1", 2, "step charge", "step refund"),
    errors.HistoryFormatError("a.json", "it is empty"),
    errors.SuspensionSwallowedError(),
    errors.SendInsideWorkflowError("charge.send()"),
    errors.BuilderNotRunError("action(charge)"),
    errors.BuilderNotRunError("action(charge)", returned=True),
    errors.BuilderReusedError("action(charge)", "has been run already"),
    errors.CompensationBuildError("plain"),
    errors.RetryPolicyReentryError("sending a message", "step 3 (charge)"),
    errors.ResultNotSerializableError("plain"),
    errors.StepLeftTransactionError("plain"),
    errors.MessageTooOldError("plain"),
    errors.MessageNotSentError("plain"),
    errors.MessageSkippedError("plain"),
    errors.UnknownActorError("plain"),
    errors.ParentEndedError("plain"),
    errors.CompensationFailedError("plain"),
    errors.CompensationUnfinishedError("plain"),
]


class CardDeclined(ValueError):
    class Expired(KeyError):
        pass


def declared() -> list[type[SagaError]]:
    return [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, SagaError)]


def test_every_error_class_has_an_example_here() -> None:
    assert {type(error) for error in EXAMPLES} == set(declared())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_comes_back_from_pickle_as_it_was(error: SagaError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert (back.args, vars(back), str(back), repr(back)) == (error.args, vars(error), str(error), repr(error))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_the_facts_are_attributes(error: Any) -> None:
    if not inspect.isfunction(type(error).__init__):
        return  # nothing but a text
    names = [
        name for name in inspect.signature(type(error)).parameters if name not in ("args", "kwargs", "message", "traceback")
    ]
    assert all(hasattr(error, name) for name in names)


def test_a_child_that_expired_is_told_with_its_deadline() -> None:
    """CHILD-2."""
    assert str(errors.ChildExpiredError("ship", "run-2", 5)) == "child ship run-2 (sequence 5) expired: its deadline passed"
    assert str(errors.ChildExpiredError("ship", "run-2", 5, "why")).endswith("expired: its deadline passed (why)")


def test_the_branches_hold_what_callers_catch() -> None:
    caught_in_workflows = {cls for cls in declared() if issubclass(cls, FlowError)}
    assert caught_in_workflows == {
        FlowError,
        StepFailedError,
        StepInterruptedError,
        errors.StepExpiredError,
        errors.SignalTimeoutError,
        errors.ChildError,
        errors.ChildFailedError,
        errors.ChildExpiredError,
        errors.ChildCancelledError,
    }
    assert issubclass(errors.ResultMissing, DramatiqResultMissing)
    assert issubclass(errors.ResultTimeout, DramatiqResultTimeout)
    assert issubclass(errors.NotSerializableError, TypeError)
    assert issubclass(errors.SettingsError, ValueError)
    assert issubclass(errors.FlowNotFoundError, LookupError)


def test_names_are_matched_bare_qualified_or_by_class() -> None:
    """CODEC-4: branching on a cause never needs the class, and a subclass counts as its base."""
    names = [qualified_name(cls) for cls in CardDeclined.Expired.__mro__ if cls is not object]
    nested = qualified_name(CardDeclined.Expired)

    for same in ("Expired", "CardDeclined.Expired", nested, "KeyError", "builtins.KeyError", "LookupError", "Exception"):
        assert is_named(names, same), same
    for cls in (CardDeclined.Expired, KeyError, LookupError, Exception, BaseException):
        assert is_named(names, cls), cls

    for other in ("CardDeclined", "xpired", "Error", "ValueError", "other.Expired", "builtins", "", "."):
        assert not is_named(names, other), other
    for unrelated in (CardDeclined, ValueError, OSError):
        assert not is_named(names, unrelated), unrelated


def test_a_namesake_from_another_module_is_not_that_class() -> None:
    assert not is_named(["shop.errors.ValueError", "builtins.Exception"], ValueError)
    assert is_named(["shop.errors.ValueError", "builtins.Exception"], "ValueError")


def test_is_a_also_looks_at_the_type_where_no_bases_were_kept() -> None:
    error = StepFailedError("charge", 1, "builtins.ValueError", "no")
    assert error.is_a(ValueError) and error.is_a("ValueError") and not error.is_a(Exception)


def test_an_interrupted_step_is_a_failed_step_by_class_and_by_name() -> None:
    error = StepInterruptedError("charge", 1)
    assert error.is_a(StepInterruptedError) and error.is_a(StepFailedError) and error.is_a("StepFailedError")
    assert "interrupted" in str(error)


def test_messages_show_builtin_classes_as_python_does() -> None:
    assert str(StepFailedError("charge", 3, "builtins.ValueError", "no")) == "step 3 (charge) failed: ValueError: no"
    assert str(errors.FlowFailedError("run-1", "checkout", CAUSE)) == "run run-1 of checkout failed: ValueError: no"


def test_a_run_that_failed_by_a_step_names_the_step_and_not_our_class() -> None:
    step = StepFailedError("charge", 3, "builtins.ValueError", "no")
    cause = {**CAUSE, "type": qualified_name(StepFailedError), "message": str(step)}
    assert str(errors.FlowFailedError("run-1", "checkout", cause)) == f"run run-1 of checkout failed: {step}"


def test_a_newer_schema_and_an_older_one_ask_for_different_things() -> None:
    assert "upgrade dramatiq-saga" in str(errors.SchemaVersionError("10", "9", "saga_"))
    assert "dramatiq-saga init" in str(errors.SchemaVersionError("9", "10", "saga_"))
    assert "none begins with 'saga_'" in str(errors.SchemaVersionError(None, "10", "saga_"))
