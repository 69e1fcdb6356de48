"""Every error of this package, one class per thing that a caller would do differently.

All derive from :class:`SagaError`; those that a workflow function may catch derive from :class:`FlowError`. Facts are
attributes, the message says what to do next, and every error survives pickling. Nothing here performs I/O or imports
anything of ours. Long, because the errors are many; none of them does anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dramatiq.middleware import MiddlewareError
from dramatiq.results.errors import ResultMissing as _DramatiqResultMissing
from dramatiq.results.errors import ResultTimeout as _DramatiqResultTimeout


class SagaError(Exception):
    """Root of all errors raised by dramatiq-saga."""


# --- names of classes ------------------------------------------------------------------------------------------------


def qualified_name(cls: type) -> str:
    """A class's name as it is stored: ``builtins.ValueError``, ``shop.errors.CardDeclined``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_named(names: Iterable[str], cls_or_name: type[BaseException] | str) -> bool:
    """Whether stored class names include that class.

    A class is compared by its qualified name. A string may be that name or any dotted tail of it: ``"ValueError"``,
    ``"CardDeclined"``, ``"errors.CardDeclined"``, ``"shop.errors.CardDeclined"``.
    """
    if isinstance(cls_or_name, str):
        tail = "." + cls_or_name
        return any(name == cls_or_name or name.endswith(tail) for name in names)
    wanted = qualified_name(cls_or_name)
    return any(name == wanted for name in names)


def in_one_line(name: str, message: str) -> str:
    """A recorded error as people read it: ``ValueError: no``, ``shop.CardDeclined: no money``, ``step 3 (ship) failed: …``."""
    module, _, cls = name.rpartition(".")
    if module == __name__ and cls in ("StepFailedError", "StepInterruptedError"):
        return message  # which says it all
    ours = module == "builtins" or module.partition(".")[0] == __name__.partition(".")[0]
    return f"{cls if ours else name}: {message}"


# --- what a workflow function may catch ------------------------------------------------------------------------------


class FlowError(SagaError):
    """An error that a workflow function may catch and act on."""


class StepFailedError(FlowError):
    """A step has failed for good: its native tries are spent, or it was given up at once.

    ``error_type`` is the qualified name of the original error's class and ``bases`` are those of its whole line of descent,
    so :meth:`is_a` can branch on a cause without the class itself (CODEC-4). ``code`` is the original error's own ``code``
    where that was a plain value. ``cause`` is the recorded cause of the original error, if it had one: a dict with the keys
    ``type, bases, message, code, traceback, cause``.
    """

    def __init__(
        self,
        actor_name: str,
        sequence: int,
        error_type: str,
        message: str,
        traceback: str = "",
        cause: dict[str, Any] | None = None,
        bases: tuple[str, ...] = (),
        code: str | int | float | None = None,
    ) -> None:
        super().__init__(actor_name, sequence, error_type, message, traceback, cause, bases, code)
        self.actor_name = actor_name
        self.sequence = sequence
        self.error_type = error_type
        self.message = message
        self.traceback = traceback
        self.cause = cause
        self.bases = bases
        self.code = code

    def __str__(self) -> str:
        return f"step {self.sequence} ({self.actor_name}) failed: {in_one_line(self.error_type, self.message)}"

    def is_a(self, cls_or_name: type[BaseException] | str) -> bool:
        """Whether the original error was an instance of that class, judged by recorded names.

        A name may be bare (``"ValueError"``) or qualified (``"shop.errors.CardDeclined"``).
        """
        return is_named((self.error_type, *self.bases), cls_or_name)

    def recorded(self) -> dict[str, Any]:
        """The original error as it is recorded."""
        return {
            "type": self.error_type,
            "bases": list(self.bases),
            "message": self.message,
            "code": self.code,
            "traceback": self.traceback,
            "cause": self.cause,
        }


class StepInterruptedError(StepFailedError):
    """A step was claimed as often as allowed and never reported an outcome (RECLAIM-6)."""

    def __init__(
        self,
        actor_name: str,
        sequence: int,
        error_type: str = "dramatiq_saga.errors.StepInterruptedError",
        message: str = "it was claimed as often as allowed and never reported an outcome",
        traceback: str = "",
        cause: dict[str, Any] | None = None,
        bases: tuple[str, ...] = (),
        code: str | int | float | None = None,
    ) -> None:
        super().__init__(actor_name, sequence, error_type, message, traceback, cause, bases or _INTERRUPTED_BASES, code)

    def __str__(self) -> str:
        return f"step {self.sequence} ({self.actor_name}) was interrupted: {self.message}"


class StepExpiredError(FlowError):
    """A step's deadline passed before it was settled (EXPIRE-1)."""

    def __init__(self, actor_name: str, sequence: int) -> None:
        super().__init__(actor_name, sequence)
        self.actor_name = actor_name
        self.sequence = sequence

    def __str__(self) -> str:
        return f"step {self.sequence} ({self.actor_name}) was not settled before its deadline"


class SignalTimeoutError(FlowError):
    """A signal did not come in time."""

    def __init__(self, name: str, sequence: int) -> None:
        super().__init__(name, sequence)
        self.name = name
        self.sequence = sequence

    def __str__(self) -> str:
        return f"signal {self.name!r} did not come in time (wait {self.sequence})"


class ChildError(FlowError):
    """A child workflow did not complete. ``cause`` is the recorded error that ended the child run, if there is one."""

    def __init__(
        self, workflow_name: str, child_id: str, sequence: int, message: str = "", cause: dict[str, Any] | None = None
    ) -> None:
        super().__init__(workflow_name, child_id, sequence, message, cause)
        self.workflow_name = workflow_name
        self.child_id = child_id
        self.sequence = sequence
        self.message = message
        self.cause = cause

    def __str__(self) -> str:
        detail = f": {self.message}" if self.message else ""
        return f"child {self.workflow_name} {self.child_id} (sequence {self.sequence}) did not complete{detail}"


class ChildFailedError(ChildError):
    """A child run failed."""


class ChildExpiredError(ChildError):
    """A child run expired: its deadline passed before it had ended."""

    def __str__(self) -> str:
        detail = f" ({self.message})" if self.message else ""
        return f"child {self.workflow_name} {self.child_id} (sequence {self.sequence}) expired: its deadline passed{detail}"


class ChildCancelledError(ChildError):
    """A child run was cancelled."""


# --- for callers -----------------------------------------------------------------------------------------------------


class FlowNotFoundError(SagaError, LookupError):
    """No run has this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return (
            f"no run has the id {self.run_id!r}: check the id, the database and the table prefix; "
            "one that was started in a transaction is there once that has committed"
        )


class FlowEndedError(SagaError):
    """A run has ended in another way than by completing."""

    def __init__(self, run_id: str, workflow_name: str, cause: dict[str, Any] | None = None, reason: str | None = None) -> None:
        super().__init__(run_id, workflow_name, cause, reason)
        self.run_id = run_id
        self.workflow_name = workflow_name
        self.cause = cause
        self.reason = reason

    _verb = "ended"

    def __str__(self) -> str:
        detail = ""
        if self.cause:
            detail = f": {in_one_line(str(self.cause.get('type')), str(self.cause.get('message')))}"
        elif self.reason:
            detail = f": {self.reason}"
        return f"run {self.run_id} of {self.workflow_name} {self._verb}{detail}"


class FlowFailedError(FlowEndedError):
    """The run failed; ``cause`` is the recorded error."""

    _verb = "failed"


class FlowCancelledError(FlowEndedError):
    """The run was cancelled."""

    _verb = "was cancelled"


class FlowExpiredError(FlowEndedError):
    """The run did not finish before its deadline."""

    _verb = "expired"


class ResultMissing(SagaError, _DramatiqResultMissing):
    """The run has not finished yet, so it has no result."""

    def __init__(self, run_id: str, status: str, *, held: str | None = None) -> None:
        Exception.__init__(self, run_id, status)  # Dramatiq's own takes a message only
        self.run_id = run_id
        self.status = status
        self.held = held
        self.message = str(self)

    def __str__(self) -> str:
        if self.held:
            return f"run {self.run_id} is held: {self.held}; it goes on once that is mended and deployed"
        return f"run {self.run_id} is {self.status} and has no result yet: wait for it with result(wait=seconds)"


class ResultTimeout(SagaError, _DramatiqResultTimeout):
    """The run did not finish within the time given to wait for it."""

    def __init__(self, run_id: str, status: str, *, held: str | None = None) -> None:
        Exception.__init__(self, run_id, status)
        self.run_id = run_id
        self.status = status
        self.held = held
        self.message = str(self)

    def __str__(self) -> str:
        if self.held:
            return f"run {self.run_id} is held: {self.held}; it goes on once that is mended and deployed"
        return f"run {self.run_id} did not finish in the time given, it is {self.status}; it goes on all the same"


class RunConflictError(SagaError):
    """The run id is taken by a run of another workflow, or by one started with other arguments."""

    def __init__(self, run_id: str, detail: str) -> None:
        super().__init__(run_id, detail)
        self.run_id = run_id
        self.detail = detail

    def __str__(self) -> str:
        return f"run id {self.run_id!r} is taken: {self.detail}; use another id, or get_flow() to look at the run that is there"


class CannotSignalFlowError(SagaError):
    """The run takes no signals now; nothing was written (SIG-1)."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(run_id, status)
        self.run_id = run_id
        self.status = status

    def __str__(self) -> str:
        return f"run {self.run_id} is {self.status} and takes no signals; where that is expected, call signal_if_running()"


class CannotSignalTerminalFlowError(CannotSignalFlowError):
    """The run has ended."""


class CannotSignalRollingBackFlowError(CannotSignalFlowError):
    """The run is being undone."""


class NothingAwaitsRetryError(CannotSignalFlowError):
    """``signal_retry()`` on a run of which nothing is parked for a signal now; nothing was written (RSIG-1)."""

    def __str__(self) -> str:
        return (
            f"run {self.run_id} is {self.status}, and no step or child of it waits for a signal to be retried: look at it with show; "
            "a signal that is sent by its name, signal(name), is kept for a failure that comes later"
        )


class SignalKeyConflictError(SagaError, ValueError):
    """A signal's key was given before, to a signal of another name to the same run; nothing was written (SIG-3)."""

    def __init__(self, run_id: str, key: str, known: str, name: str) -> None:
        super().__init__(run_id, key, known, name)
        self.run_id = run_id
        self.key = key
        self.known = known
        self.name = name

    def __str__(self) -> str:
        return (
            f"key {self.key!r} belongs to signal {self.known!r} of run {self.run_id}, so signal {self.name!r} would be lost: "
            "a key names one signal of a run; put the signal's name into it"
        )


class ConcurrentTransitionError(SagaError):
    """The run is somewhere else than the call needs; nothing was written (STATUS-3)."""

    def __init__(self, run_id: str, intended: str, actual: str) -> None:
        super().__init__(run_id, intended, actual)
        self.run_id = run_id
        self.intended = intended
        self.actual = actual

    def __str__(self) -> str:
        return f"run {self.run_id} cannot become {self.intended}: it is {self.actual}, and that stands"


class NotSerializableError(SagaError, TypeError):
    """A value cannot be stored. ``path`` leads to it, for example ``kwargs['when']`` or ``args[0]['items'][3]``."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be stored: {self.detail}; "
            "pass plain JSON values, or set an encoder that carries it (dramatiq.set_encoder; dramatiq_saga.codec.TaggedJSONEncoder is one)"
        )


class UnknownTagError(SagaError, ValueError):
    """A stored value holds a tag that no class is registered for in this process (CODEC-3). ``tag`` is its name."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.tag = tag

    def __str__(self) -> str:
        return (
            f"a stored value is tagged {self.tag!r}, which this process does not know: register the class that it was written "
            "for on the encoder (TaggedJSONEncoder.register) before values are read"
        )


class WouldBlockError(SagaError):
    """``run_sync`` met a wait that nothing in this process can end (SYNC-1).

    ``held`` is the recorded error where the run is held for a fault in its code (HISTORY-1): it goes on once that is mended.
    """

    def __init__(self, run_id: str, waiting_for: str, held: dict[str, Any] | None = None) -> None:
        super().__init__(run_id, waiting_for, held)
        self.run_id = run_id
        self.waiting_for = waiting_for
        self.held = held

    def __str__(self) -> str:
        if self.held is not None:
            error = f"{str(self.held.get('type')).rpartition('.')[2]}: {self.held.get('message')}"
            return f"run {self.run_id} is held: {error}"
        return (
            f"run {self.run_id} waits for {self.waiting_for}, which nothing in this process can end; it is stored, and workers go on "
            f"with it: get_flow({self.run_id!r}).result(wait=SECONDS) waits for its end, `dramatiq-saga why` says where it stands"
        )


class SettingsError(SagaError, ValueError):
    """A setting is unknown or impossible. ``key`` is its full name."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(key, detail)
        self.key = key
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.key}: {self.detail}"


class SchemaVersionError(SagaError):
    """The tables are missing, older or newer than this code (SAFE-3). ``found`` is ``None`` where they are missing.

    ``prefix`` is what the names of the tables that were looked for begin with.
    """

    def __init__(self, found: str | None, expected: str, prefix: str) -> None:
        super().__init__(found, expected, prefix)
        self.found = found
        self.expected = expected
        self.prefix = prefix

    def __str__(self) -> str:
        if self.found is None:
            return (
                f"the tables of dramatiq-saga are missing: none begins with {self.prefix!r} (schema.table_prefix, "
                "DRAMATIQ_SAGA__SCHEMA__TABLE_PREFIX); where that is the right prefix, run `dramatiq-saga init`, or set schema.auto_create"
            )
        if _version(self.found) > _version(self.expected):
            return f"the schema is at {self.found}, newer than this code ({self.expected}): upgrade dramatiq-saga here"
        return f"the schema is at {self.found}, this code needs {self.expected}: run `dramatiq-saga init` to migrate it"


def _version(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (0, text)


class MissingExtraError(SagaError, ImportError):
    """A part of the system needs a package that is not installed; the message names the extra that brings it."""


class MiddlewareOrderError(SagaError, MiddlewareError):
    """SagaMiddleware is missing, doubled, or in the wrong place of the broker's list."""


class StoreError(SagaError):
    """The store could not be used, or nobody can say what became of a write.

    ``phase`` is where the transaction stood: ``connect``, ``begin``, ``body`` or ``commit``. ``sqlite_errorcode`` is SQLite's
    extended result code, ``None`` on other databases. ``executed`` tells whether the operation's function was called at
    all, so whether any of its statements may have been tried.
    """

    def __init__(self, detail: str, phase: str = "body", sqlite_errorcode: int | None = None, executed: bool = False) -> None:
        super().__init__(detail, phase, sqlite_errorcode, executed)
        self.detail = detail
        self.phase = phase
        self.sqlite_errorcode = sqlite_errorcode
        self.executed = executed

    def __str__(self) -> str:
        return self.detail


class DatabaseUnusableError(StoreError):
    """The database cannot be opened, is read-only, or is of a kind that cannot serve; nothing was written."""


class WriteRefusedError(StoreError):
    """The database refused the write and the whole transaction is known to have been rolled back: it may be tried again.

    ``__cause__`` is the database's error, where it gave one.
    """


class WriteUnknownError(StoreError):
    """COMMIT or ROLLBACK failed, or the connection was lost: the write may or may not have happened.

    Never retried blindly; the writer settles by its token (QUEUE-8).
    """


class MessageNotSentError(StoreError):
    """The broker would not take a message whose row is committed: it is sent again later (DRIVE-3). ``__cause__`` is its error."""


# --- for authors -----------------------------------------------------------------------------------------------------


class HistoryMismatchError(SagaError):
    """The workflow function asked for something else than what is recorded at a sequence (HISTORY-1)."""

    def __init__(self, run_id: str, sequence: int, recorded: str, asked: str) -> None:
        super().__init__(run_id, sequence, recorded, asked)
        self.run_id = run_id
        self.sequence = sequence
        self.recorded = recorded
        self.asked = asked

    def __str__(self) -> str:
        return (
            f"run {self.run_id} does not fit its workflow's code at sequence {self.sequence}: recorded is {self.recorded}, "
            f"the code asks for {self.asked}. The run is held, not failed: deploy code that agrees with what is recorded"
        )


class HistoryFormatError(SagaError, ValueError):
    """A file that was to hold a recorded history does not, or holds one that this version cannot read."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(name, detail)
        self.name = name
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.name} is no history that can be replayed: {self.detail}"


class SuspensionSwallowedError(SagaError):
    """A bare ``except:`` (or ``except BaseException``) around a step swallowed the suspension and the function went on."""

    def __init__(self) -> None:
        super().__init__(
            "the workflow function swallowed its suspension and went on: a bare `except:` or `except BaseException` stands "
            "around a step; catch Exception instead, or re-raise"
        )

    def __reduce__(self) -> Any:
        return (type(self), ())


class SendInsideWorkflowError(SagaError, MiddlewareError):
    """A workflow function sent a message, started a run or signalled one by another way than ``flow``."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} inside a workflow function would repeat at every replay; use flow, or do it inside a step"


class BuilderNotRunError(SagaError):
    """A builder was dropped without ``run()``, so its step never existed."""

    def __init__(self, what: str, returned: bool = False) -> None:
        super().__init__(what, returned)
        self.what = what
        self.returned = returned

    def __str__(self) -> str:
        if self.returned:
            return f"the workflow function returned flow.{self.what}, which was never run: call .run() on it and return what that gives"
        return f"flow.{self.what} was built but never run: call .run() on it, or pass it to a block"


class BuilderReusedError(SagaError):
    """A builder was run a second time, or had been given to a block: it stands for one step, and this would have been another."""

    def __init__(self, what: str, taken: str) -> None:
        super().__init__(what, taken)
        self.what = what
        self.taken = taken

    def __str__(self) -> str:
        return f"flow.{self.what} {self.taken}: a builder is for one step; keep what run() gave, or make another builder for another step"


class CompensationBuildError(SagaError, MiddlewareError):
    """A ``compensate_with`` function raised, did something else, or returned something else than a message (COMP-10)."""


class RetryPolicyReentryError(SagaError, MiddlewareError):
    """A retry policy's predicate tried to change a run; the run is held until the code is mended (RSIG-3)."""

    def __init__(self, what: str, asked_about: str) -> None:
        super().__init__(what, asked_about)
        self.what = what
        self.asked_about = asked_about

    def __str__(self) -> str:
        return (
            f"when() of the retry policy of {self.asked_about} is not the place for {self.what}: it says whether a failure may be "
            "retried, from its RetryContext alone; nothing was changed"
        )


# --- recorded on rows ------------------------------------------------------------------------------------------------


class ResultNotSerializableError(SagaError):
    """A step did its work but returned what cannot be stored (CODEC-2)."""


class StepLeftTransactionError(SagaError):
    """A step returned with a transaction of the store's own Database still open; it was rolled back and the step failed."""


class MessageTooOldError(SagaError):
    """A step's message was refused for its age (``max_age``) before it could run (NATIVE-3)."""


class MessageSkippedError(SagaError):
    """A middleware of the broker skipped a step's message before it could run (NATIVE-3)."""


class UnknownActorError(SagaError):
    """No worker knows the step's actor (NATIVE-3)."""


class ParentEndedError(SagaError):
    """A child run was closed by its parent's end, under the close policy ``fail`` (CHILD-3)."""


class CompensationFailedError(SagaError):
    """A compensation failed for good (COMP-4)."""


class CompensationUnfinishedError(SagaError):
    """A compensation had not finished when its level ended (COMP-4, PAR-3)."""


_INTERRUPTED_BASES = tuple(qualified_name(cls) for cls in StepInterruptedError.__mro__ if cls is not object)
