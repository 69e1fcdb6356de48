"""Replay: a workflow function walked against its recorded history, giving a decision and nothing else (idea 3).

Pure: no database, no broker, no clock of its own. The one exception is handed in: ``record`` writes a side effect's value
at once (SIDE-1); without it, a side effect that is not recorded ends the replay with :class:`NeedsRecording`. Two replays
of one history give one decision, so two drives of one run at once are harmless.

Ends: *suspended* (something it needs is not settled), *completed*, *failed* (an ``Exception`` left the function, DRIVE-5), or
an error raised here that is nobody's failure: a history that does not fit (HISTORY-1), an author's mistake around ``flow``,
a compensation that cannot be built (COMP-10). Those hold the run; they never fail it.
"""

from __future__ import annotations

import sys
import threading
from asyncio import CancelledError
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..codec import describe_error, encode, freeze
from ..errors import (
    BuilderNotRunError,
    HistoryMismatchError,
    NotSerializableError,
    SagaError,
    SendInsideWorkflowError,
    SuspensionSwallowedError,
)
from .rows import CompensationSpec, Decision, NewStep, SideEffectEntry, Snapshot, StepEntry

if TYPE_CHECKING:
    from ..settings import Settings
    from .rows import Entry


class Suspend(BaseException):
    """Unwinds a workflow function that cannot go on yet. Not an error, and not for user code to catch."""


class NeedsRecording(BaseException):
    """The function wants a side effect that is not recorded, in a replay that may not record one."""


class _Abandon(BaseException):
    """Unwinds a workflow function whose side effect could not be recorded. Not an error of its, and not for it to catch."""


class HoldRun(Exception):
    """Carries the reason why a replay's result may not be used; the run is held (HISTORY-1, COMP-10)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Replaying(threading.local):
    context: Replay | None = None


_replaying = _Replaying()


def current_replay() -> Replay | None:
    """The replay that this thread is in the middle of, if any."""
    return _replaying.context


def forget_replay() -> None:
    """This thread is in the middle of none, whatever an interrupt may have cut short."""
    _replaying.context = None


def refuse_inside_workflow(what: str) -> None:
    """Raise :class:`SendInsideWorkflowError` when a workflow function is being replayed in this thread."""
    context = _replaying.context
    if context is not None:
        raise context.fault(SendInsideWorkflowError(what))


class Replay:
    """One walk through a workflow function. ``flow`` asks it for what stands at the next sequence."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        now: int,
        settings: Settings,
        record: Callable[[int, str, bytes], bytes] | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.now = now
        self.settings = settings
        self.entries = snapshot.entries
        self.recorded = len(snapshot.entries)
        self.cursor = 0
        self.record = record
        self.steps: list[NewStep] = []
        self.resolved: list[tuple[int, CompensationSpec]] = []
        self.new_entries: list[Entry] = []
        self.tags: dict[str, str | None] = {}
        self.suspended = False
        self.outside = False
        self.error: SagaError | None = None
        self.abandoned: Exception | None = None
        self.recording: str | None = None

    # --- asked by flow -----------------------------------------------------------------------------------------------

    @property
    def is_replaying(self) -> bool:
        """True while the function walks over what is recorded and settled."""
        return self.cursor < self.recorded

    def check(self) -> None:
        """Called by every use of ``flow``: the function must not go on after its suspension was swallowed."""
        if self.abandoned is not None:
            raise _Abandon
        if self.error is not None:
            raise self.error
        if self.suspended:
            if isinstance(sys.exc_info()[1], Suspend):
                raise Suspend  # a finally block on the way out: nothing in it takes effect
            raise self.fault(SuspensionSwallowedError())
        if self.recording is not None:
            raise self.fault(
                SagaError(
                    f"the function of side effect {self.recording!r} used the flow: ask the flow before, and hand the function what it needs"
                )
            )

    def fault(self, error: SagaError) -> SagaError:
        """Note an author's mistake: whatever the function does with the error now, the run is held with it."""
        if self.error is None:
            self.error = error
        return error

    def builder_dropped(self, what: str) -> None:
        """A builder was thrown away without ``run()``; learnt at the next use of ``flow``, or at the end."""
        if not self.suspended and self.error is None:
            self.error = BuilderNotRunError(what)

    def recorded_step(self, actor: str) -> StepEntry | None:
        """The step recorded at the next sequence, moving past it; ``None`` where the function has reached new ground."""
        cursor = self.cursor
        if cursor >= self.recorded:
            return None
        entry = self.entries[cursor]
        if not isinstance(entry, StepEntry) or entry.actor != actor:
            raise self.mismatch(f"step {actor!r}")
        self.cursor = cursor + 1
        return entry

    def mismatch(self, asked: str) -> SagaError:
        """The history does not fit (HISTORY-1)."""
        entry = self.entries[self.cursor]
        return self.fault(HistoryMismatchError(self.snapshot.run_id, self.cursor + 1, entry.describe(), asked))

    def next_sequence(self) -> int:
        """Take the next sequence for something new."""
        self.cursor += 1
        return self.cursor

    def add_step(self, step: NewStep) -> None:
        """The function wants this step; it exists once the decision has been committed."""
        self.steps.append(step)

    def resolve_compensation(self, sequence: int, spec: CompensationSpec) -> None:
        """A compensation that was to be built from its step's result is known now (COMP-2)."""
        self.resolved.append((sequence, spec))

    def suspend(self) -> Suspend:
        """The function cannot go on; raise what this returns."""
        self.suspended = True
        return Suspend()

    def side_effect(self, name: str, function: Callable[[], Any]) -> Any:
        """``function()``'s value, recorded once (SIDE-1)."""
        if self.cursor < self.recorded:
            entry = self.entries[self.cursor]
            if not isinstance(entry, SideEffectEntry) or entry.name != name:
                raise self.mismatch(f"side effect {name!r}")
            self.cursor += 1
            return entry.value()
        if self.record is None:
            raise NeedsRecording
        sequence = self.cursor + 1
        self.recording = name
        try:
            data = encode(function(), f"side effect {name!r}")
        finally:
            self.recording = None
        _replaying.context = None  # who listens to what is recorded is not the function, and may send
        try:
            data = self.record(sequence, name, data)
        except Exception as error:  # the engine's affair: it must not look like a failure of the function (NATIVE-7)
            self.abandoned = error
            raise _Abandon from error
        finally:
            _replaying.context = self
        entry = SideEffectEntry(sequence, name, freeze(data))
        self.new_entries.append(entry)
        self.cursor = sequence
        return entry.value()


def replay(function: Callable[..., Any], context: Replay, make_flow: Callable[[Replay], Any]) -> Decision:
    """Walk ``function`` against ``context``'s snapshot.

    Raises :class:`HoldRun` where the walk's result must not be used, and lets :class:`NeedsRecording`, asynchronous
    interrupts and what kept a side effect from being recorded through; in none of these cases does a decision exist.
    """
    if _replaying.context is not None:
        raise SendInsideWorkflowError("driving a run")
    args, kwargs = context.snapshot.args()
    try:
        return _walk(function, context, make_flow, args, kwargs)
    finally:
        if context.abandoned is not None:  # whatever the function made of it
            raise context.abandoned


def _walk(
    function: Callable[..., Any], context: Replay, make_flow: Callable[[Replay], Any], args: list[Any], kwargs: dict[str, Any]
) -> Decision:
    try:
        try:
            _replaying.context = context
            value = function(make_flow(context), *args, **kwargs)
        finally:
            _replaying.context = None
    except Suspend:
        if context.error is not None:
            raise HoldRun(context.error) from None
        return _decision(context, "suspended")
    except SystemExit as error:
        raise HoldRun(context.error or SagaError(f"the workflow function called sys.exit({error.code!r})")) from error
    except (GeneratorExit, CancelledError) as error:
        raise HoldRun(context.error or SagaError(f"the workflow function ended with {type(error).__name__}")) from error
    except Exception as error:
        if context.error is not None:
            raise HoldRun(context.error) from error
        if context.suspended:
            raise HoldRun(SuspensionSwallowedError()) from error
        if context.cursor < context.recorded:
            asked = f"nothing more: it raised {type(error).__name__}: {error}"
            raise HoldRun(_shortfall(context, asked)) from error
        return _decision(context, "failed", error=describe_error(error))
    if context.error is not None:
        raise HoldRun(context.error)
    if context.suspended:
        raise HoldRun(SuspensionSwallowedError())
    if context.cursor < context.recorded:
        raise HoldRun(_shortfall(context, "nothing more: it returned"))
    if getattr(value, "_replay", None) is context:
        raise HoldRun(BuilderNotRunError(f"{type(value).__name__} that was returned"))
    try:
        result = encode(value, "the workflow's return value")
    except NotSerializableError as error:
        return _decision(context, "failed", error=describe_error(error))
    return _decision(context, "completed", result=result)


def _shortfall(context: Replay, asked: str) -> HistoryMismatchError:
    entry = context.entries[context.cursor]
    return HistoryMismatchError(context.snapshot.run_id, context.cursor + 1, entry.describe(), asked)


def _decision(context: Replay, kind: str, *, result: bytes | None = None, error: str | None = None) -> Decision:
    return Decision(kind, context.steps, context.resolved, context.tags, result, error, context.outside)


def with_outcome(snapshot: Snapshot, entry: StepEntry) -> Snapshot:
    """``snapshot`` as it will stand once the outcome in ``entry`` has been recorded and has raised the wake count."""
    entries = list(snapshot.entries)
    entries[entry.sequence - 1] = entry
    return snapshot.moved(
        status=snapshot.status, revision=snapshot.revision, wakes=snapshot.wakes + 1, wakes_seen=snapshot.wakes_seen,
        hold_count=snapshot.hold_count, entries=entries, tags=snapshot.tags,
    )  # fmt: skip
