"""Replay: a workflow function walked against its recorded history, giving a decision and nothing else (idea 3).

Pure: no database, no broker, no clock of its own. The one exception is handed in: ``record`` writes a side effect's value
at once (SIDE-1); without it, a side effect that is not recorded ends the replay with :class:`NeedsRecording`. Two replays
of one history give one decision, so two drives of one run at once are harmless.

Ends: *suspended* (something it needs is not settled), *completed*, *failed* (an ``Exception`` left the function, DRIVE-5), or
an error raised here that is nobody's failure: a history that does not fit (HISTORY-1), an author's mistake around ``flow``,
a compensation that cannot be built (COMP-10). Those hold the run; they never fail it.

Long because everything that a function can ask for is matched with its history here, in one place and by one cursor.
"""

from __future__ import annotations

import sys
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..codec import describe_error, encode, freeze
from ..context import Around, restorer
from ..errors import (
    BuilderNotRunError,
    CompensationBuildError,
    HistoryMismatchError,
    NotSerializableError,
    RetryPolicyReentryError,
    SagaError,
    SendInsideWorkflowError,
    SuspensionSwallowedError,
)
from .rows import (
    ALONE,
    PLAIN,
    BlockEntry,
    ChildEntry,
    CompensationSpec,
    Decision,
    Extra,
    Failure,
    Marker,
    More,
    NewBlock,
    NewChild,
    NewStep,
    NewWait,
    Park,
    PatchEntry,
    Retry,
    RetryWait,
    SentSignalEntry,
    SideEffectEntry,
    Snapshot,
    StepEntry,
    WaitEntry,
    block_name,
)

if TYPE_CHECKING:
    from ..settings import Settings
    from .rows import Entry, ReceivedSignal, Scope, SentSignal


class Suspend(BaseException):
    """Unwinds a workflow function that cannot go on yet. Not an error, and not for user code to catch."""


class NeedsRecording(BaseException):
    """The function wants a side effect that is not recorded, in a replay that may not record one."""


class _Abandon(BaseException):
    """Unwinds a workflow function whose side effect could not be recorded. Not an error of its, and not for it to catch."""


class MovedOn(Exception):
    """The run changed while something was to be recorded for it: whatever was found out is void, look again."""


class HoldRun(Exception):
    """Carries the reason why a replay's result may not be used; the run is held (HISTORY-1, COMP-10)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Replaying(threading.local):
    context: Replay | None = None


_replaying = _Replaying()

#: For those who cannot afford a call to :func:`current_replay`.
here = _replaying


def current_replay() -> Replay | None:
    """The replay that this thread is in the middle of, if any."""
    return _replaying.context


def forget_replay() -> None:
    """This thread is in the middle of none, whatever an interrupt may have cut short."""
    _replaying.context = None


def refuse_inside_workflow(what: str, *, actor: str | None = None, instead: str = "") -> None:
    """Raise :class:`SendInsideWorkflowError` when a workflow function is being replayed in this thread.

    ``actor`` is the one that was to be called or sent to, and ``instead`` what to write in its place. While the message of a
    compensation is made there is another place for it, and :class:`CompensationBuildError` names that.
    """
    context = _replaying.context
    if context is not None:
        raise context.refusal(what, actor=actor, instead=instead)


class Replay:
    """One walk through a workflow function. ``flow`` asks it for what stands at the next sequence."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        now: int,
        settings: Settings,
        record: Callable[[int, str, str, bytes | SentSignal], bytes] | None = None,
        looks_only: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self.now = now
        self.settings = settings
        self.entries = snapshot.entries
        self.recorded = len(snapshot.entries)
        self.straight = self.recorded  # up to here Flow.run() may go straight; nowhere once the function must not go on
        self.cursor = 0
        self.record = record
        self.looks_only = looks_only  # no drive: what the function asks for here is not written, so it tells of nothing
        self.steps: list[NewStep] = []
        self.resolved: list[tuple[int, CompensationSpec]] = []
        self.new_entries: list[Entry] = []  # in order of sequence, the steps of this decision included
        self.changed: dict[int, Entry] = {}  # recorded entries that this decision changes
        self.unrecorded = False  # some of the new entries exist only once the decision has been committed
        self.tags: dict[str, str | None] = {}
        self._patches: dict[str, bool] | None = None  # change id -> the way that this run goes there
        self._refused: list[str] = []  # changes that it goes past the old way, which is not recorded yet
        self._more: More | None = None
        self.again = False
        self.suspended = False
        self.outside = False
        self.error: SagaError | None = None
        self.abandoned: Exception | None = None
        self.recording: str | None = None
        self.judged: str | None = None
        self.built: str | None = None  # the compensation whose message is being made
        self.raised: Exception | None = None  # what the function failed with; recorded is only its description
        self.broke_off = False  # it raised before everything that is recorded had been walked over

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
        if self.judged is not None or self.built is not None:
            raise self.refusal("using the flow")
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
        self.straight = 0
        return error

    def builder_dropped(self, what: str) -> None:
        """A builder was thrown away without ``run()``; learnt at the next use of ``flow``, or at the end."""
        if not self.suspended and self.error is None:
            self.error = BuilderNotRunError(what)
            self.straight = 0

    def recorded_step(self, actor: str) -> StepEntry | None:
        """The step recorded at the next sequence, moving past it; ``None`` where the function has reached new ground."""
        cursor = self.cursor
        if cursor >= self.recorded:
            return None
        entry = self.entries[cursor]
        if not isinstance(entry, StepEntry) or entry.actor != actor:
            if self.past_patches():
                return self.recorded_step(actor)
            raise self.mismatch(f"step {actor!r}")
        self.cursor = cursor + 1
        return entry

    def recorded_child(self, workflow: str) -> ChildEntry | None:
        """As :meth:`recorded_step`, for a child run."""
        entry = self._next_recorded()
        if entry is None:
            return None
        if not isinstance(entry, ChildEntry) or entry.workflow != workflow:
            raise self.mismatch(f"child {workflow!r}")
        self.cursor += 1
        return entry

    def recorded_block(self, what: str, size: int) -> BlockEntry | None:
        """As :meth:`recorded_step`, for a parallel block or a saga group of that size (C19)."""
        entry = self._next_recorded()
        if entry is None:
            return None
        if not isinstance(entry, BlockEntry) or entry.what != what or entry.size != size:
            raise self.mismatch(f"{block_name(what)} of {size}")
        self.cursor += 1
        return entry

    def _next_recorded(self) -> Entry | None:
        """What stands at the next sequence, version gates that nobody asks for any more aside; does not move past it."""
        self.past_patches()
        return self.entries[self.cursor] if self.cursor < self.recorded else None

    def past_patches(self) -> bool:
        """Step over version gates that the function no longer asks for; whether there were any."""
        start = self.cursor
        while self.cursor < self.recorded and isinstance(self.entries[self.cursor], PatchEntry):
            self.cursor += 1
        return self.cursor > start

    def on_new_ground(self) -> bool:
        """Whether everything that is recorded has been walked over, version gates that nobody asks for any more aside."""
        self.past_patches()
        return self.cursor >= self.recorded

    def mismatch(self, asked: str) -> SagaError:
        """The history does not fit (HISTORY-1)."""
        entry = self.entries[self.cursor]
        return self.fault(HistoryMismatchError(self.snapshot.run_id, self.cursor + 1, entry.describe(), asked))

    def missed(self) -> int | None:
        """Where the function broke off: the first completed step or child after that which has to be undone."""
        if not self.broke_off:
            return None
        return next((entry.sequence for entry in self.entries[self.cursor :] if _can_be_undone(entry)), None)

    def next_sequence(self) -> int:
        """Take the next sequence for something new."""
        if self._refused:
            self._record_refused()
        self.cursor += 1
        return self.cursor

    @property
    def more(self) -> More:
        """The rarer parts of the decision in the making."""
        if self._more is None:
            self._more = More()
        return self._more

    def add_step(self, step: NewStep) -> None:
        """The function wants this step; it exists once the decision has been committed."""
        self.steps.append(step)
        spec, scope = step.compensation, step.scope
        extra = PLAIN
        if scope is not ALONE or step.fallback is not None or step.retry is not None:
            extra = Extra(
                scope.block, scope.position, scope.held_back, None if step.fallback is None else freeze(step.fallback), step.retry, None,
                scope.comp_group, scope.comp_parallel,
            )  # fmt: skip
        self.new_entries.append(
            StepEntry(
                step.sequence, step.actor, "pending", optional=step.optional, comp_actor=spec.actor if spec else None,
                comp_ready=spec is not None, comp_from_result=step.comp_from_result, comp_on_self_failure=step.comp_on_self_failure,
                extra=extra,
            )
        )  # fmt: skip

    def add_child(self, child: NewChild) -> ChildEntry:
        """The function wants this child run."""
        self.more.children.append(child)
        spec, scope = child.compensation, child.scope
        entry = ChildEntry(
            child.sequence, child.workflow, child.child_id, "running", child.close_policy, optional=child.optional,
            comp_actor=spec.actor if spec else None, comp_ready=spec is not None, comp_from_result=child.comp_from_result,
            extra=Extra(scope.block, scope.position, False, None, child.retry, None, scope.comp_group, scope.comp_parallel),
        )  # fmt: skip
        self.new_entries.append(entry)
        return entry

    def add_block(self, what: str, size: int, *, policy: str | None, max_in_flight: int | None, scope: Scope) -> BlockEntry:
        """The function wants this block; its members follow."""
        sequence = self.next_sequence()
        self.more.blocks.append(NewBlock(sequence, what, size, policy, max_in_flight, scope))
        entry = BlockEntry(sequence, what, size, policy, max_in_flight, scope.block, scope.position)
        self.new_entries.append(entry)
        self.unrecorded = True
        return entry

    def cancel_members(self, block: BlockEntry, failed_by: int) -> None:
        """Members of a block that are not running are not wanted any more (PAR-4). Which those are, the rows decide."""
        self.more.cancelled.append((block.sequence, failed_by))
        self.again = True

    def release_member(self, entry: StepEntry) -> None:
        """A member that was held back may run now (PAR-1)."""
        self.more.released.append(entry)
        self.changed[entry.sequence] = replace(entry, extra=replace(entry.extra, held_back=False))

    def finish_block(self, block: BlockEntry) -> None:
        """Nothing of a block is live any more."""
        self.more.finished.append(block.sequence)
        ended = replace(block, ended=True)
        if block.sequence <= self.recorded:
            self.changed[block.sequence] = ended
        else:
            self.new_entries[block.sequence - self.recorded - 1] = ended

    def wait(self, what: str, name: str | None, due_at: int | None) -> WaitEntry:
        """A wait that has ended: by its signal, or by its time. Suspends where it has not (SIG-1, TIMER-1)."""
        entry = self._next_recorded()
        if entry is not None:
            if not isinstance(entry, WaitEntry) or entry.what != what or entry.name != name:
                raise self.mismatch(WaitEntry(0, what, name, "waiting", None).describe())
            self.cursor += 1
            if entry.is_live or entry.status == "cancelled":  # with its run, which is walked only to be looked at
                raise self.suspend(outside=True)
            return entry
        sequence = self.next_sequence()
        signal = self.take_signal(name) if what == "signal" and name is not None else None
        self.more.waits.append(NewWait(sequence, what, name, due_at, signal))
        if signal is None:
            self.new_entries.append(WaitEntry(sequence, what, name, "waiting", due_at))
            raise self.suspend(outside=True)
        found = WaitEntry(sequence, what, name, "consumed", due_at, signal.value)
        self.new_entries.append(found)
        self.unrecorded = True
        return found

    def take_signal(self, name: str) -> ReceivedSignal | None:
        """The oldest signal of that name that has arrived and that nothing has consumed, this walk included (SIG-1)."""
        taken = self._more.taken if self._more is not None else ()
        for signal in self.snapshot.signals:
            if signal.name == name and signal.id not in taken:
                self.more.taken.add(signal.id)
                return signal
        return None

    def mark(self, kind: str, name: str, make: Callable[[], Any]) -> SideEffectEntry | PatchEntry:
        """A value recorded with the decision, for what has no effects of its own: the time, an id, a version gate."""
        data = encode(make(), name)
        sequence = self.next_sequence()
        self.more.markers.append(Marker(sequence, kind, name, data))
        value = freeze(data)
        entry = PatchEntry(sequence, name, value()) if kind == "patch" else SideEffectEntry(sequence, name, value)
        self.new_entries.append(entry)
        self.unrecorded = True
        return entry

    def recorded_value(self, name: str, make: Callable[[], Any]) -> Any:
        """``make()``'s value, the same in every replay."""
        entry = self._next_recorded()
        if entry is None:
            entry = self.mark("value", name, make)
        elif not isinstance(entry, SideEffectEntry) or entry.name != name:
            raise self.mismatch(f"side effect {name!r}")
        else:
            self.cursor += 1
        assert isinstance(entry, SideEffectEntry)
        return entry.value()

    def patched(self, change_id: str) -> bool:
        """Whether this run goes the new way at that change (HISTORY-2).

        What is recorded of a change counts, wherever it stands. Where nothing is, the run is asked for the first time: on new
        ground it goes the new way, and on recorded ground it went past this point before the change. Either answer is recorded
        with the next thing that the run does, so that nothing can follow from an answer that a later drive would not give.
        """
        if self._patches is None:
            self._patches = {entry.name: entry.value for entry in reversed(self.entries) if isinstance(entry, PatchEntry)}
        known = self._patches.get(change_id)
        if known is None:
            known = self._patches[change_id] = self.on_new_ground()
            if known:
                self.mark("patch", change_id, lambda: True)
            else:
                self._refused.append(change_id)
        return known

    def _record_refused(self) -> None:
        """Changes that this run goes past the old way, put down where it comes to new ground."""
        refused, self._refused = self._refused, []
        for change_id in refused:
            self.mark("patch", change_id, lambda: False)

    # --- steps and children that run again when a signal comes (RSIG-1) ---------------------------------------------

    @contextmanager
    def judging(self, entry: StepEntry | ChildEntry) -> Iterator[None]:
        """A retry policy's predicate is asked meanwhile: it may look, and change nothing (RSIG-3)."""
        self.judged = entry.describe()
        try:
            with self._standing_still():
                yield
        finally:
            self.judged = None

    @contextmanager
    def building(self, what: str) -> Iterator[None]:
        """A compensation's message is made from a result meanwhile: a function that returns it and does nothing else (COMP-10)."""
        self.built = what
        try:
            with self._standing_still():
                yield
        finally:
            self.built = None

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Nothing of what is recorded is walked over meanwhile: ``Flow.run()`` may not go straight past :meth:`check`."""
        straight, self.straight = self.straight, 0
        try:
            yield
        finally:
            if self.error is None:
                self.straight = straight

    def refusal(self, what: str, *, actor: str | None = None, instead: str = "") -> SagaError:
        """The error for an act that a function must not do in a replay; the run is held with it."""
        if self.judged is not None:
            return self.fault(RetryPolicyReentryError(what + instead, self.judged))
        if self.built is not None:
            message = "the message of the actor that undoes it, for example refund" if actor is None else actor
            return self.fault(
                CompensationBuildError(
                    f"{self.built} could not be built: the function given to compensate_with() is not the place for {what}. It only makes "
                    f"the message: return {message}.message(...), and a rollback will send it"
                )
            )
        return self.fault(SendInsideWorkflowError(what + instead))

    def park(self, entry: StepEntry | ChildEntry, signal: str, due_at: int | None) -> StepEntry | ChildEntry:
        """What was given up waits for ``signal``."""
        self.more.parks.append(Park(entry, signal, due_at))
        changed = _with(entry, status="awaiting_retry", given_up=False, wait=RetryWait("waiting", due_at))
        self.changed[entry.sequence] = changed
        return changed

    def retry(
        self,
        entry: StepEntry | ChildEntry,
        signal: ReceivedSignal | None,
        child_id: str | None = None,
        start: dict[str, Any] | None = None,
    ) -> StepEntry | ChildEntry:
        """It runs again, in the same row: a child as a new run, ``child_id``, started as ``start`` says (RSIG-4)."""
        self.more.retries.append(Retry(entry, signal, child_id, start))
        status = "pending" if child_id is None else "running"
        changed = _with(entry, status=status, given_up=False, wait=RetryWait("consumed", None), cycle=entry.cycle + 1)
        if child_id is not None:
            assert isinstance(changed, ChildEntry)
            changed = replace(changed, child_id=child_id)
        self.changed[entry.sequence] = changed
        return changed

    def settle_failed(
        self, entry: StepEntry | ChildEntry, status: str, *, policy: str, threw: Exception | None = None
    ) -> StepEntry | ChildEntry:
        """It will not run again: ``failed`` or ``optional_failed``, for good. ``policy`` says why, and goes into the row."""
        self.more.failures.append(Failure(entry, status, policy, threw))
        changed = _with(entry, status=status, given_up=True, wait=entry.extra.wait, retry=policy)
        self.changed[entry.sequence] = changed
        return changed

    def resolve_compensation(self, sequence: int, spec: CompensationSpec) -> None:
        """A compensation that was to be built from its step's result is known now (COMP-2)."""
        self.resolved.append((sequence, spec))

    def suspend(self, *, outside: bool = False) -> Suspend:
        """The function cannot go on; raise what this returns. ``outside``: no worker has anything to do for it now."""
        self.suspended = True
        self.straight = 0
        self.outside = outside
        return Suspend()

    def side_effect(self, name: str, function: Callable[[], Any]) -> Any:
        """``function()``'s value, recorded once (SIDE-1)."""
        entry = self._next_recorded()
        if entry is not None:
            if not isinstance(entry, SideEffectEntry) or entry.name != name:
                raise self.mismatch(f"side effect {name!r}")
            self.cursor += 1
            return entry.value()
        self._ready_to_record()
        self.recording = name
        try:
            data = encode(function(), f"side effect {name!r}")
        finally:
            self.recording = None
        sequence = self.cursor + 1
        recorded = SideEffectEntry(sequence, name, freeze(self._recorded(sequence, "value", name, data)))
        self.new_entries.append(recorded)
        self.cursor = sequence
        return recorded.value()

    def send_signal(self, name: str, send: Callable[[], SentSignal]) -> Any:
        """What became of a signal to another run, sent once: the transaction that records it carries it out (SIG-3)."""
        entry = self._next_recorded()
        if entry is not None:
            if not isinstance(entry, SentSignalEntry) or entry.name != name:
                raise self.mismatch(f"signal {name!r} to another run")
            self.cursor += 1
            return entry.value()
        self._ready_to_record()
        sequence = self.cursor + 1
        recorded = SentSignalEntry(sequence, name, freeze(self._recorded(sequence, "signal", name, send())))
        self.new_entries.append(recorded)
        self.cursor = sequence
        return recorded.value()

    def _ready_to_record(self) -> None:
        """What stands before it is recorded first: a history has no gaps."""
        if self.record is None:
            raise NeedsRecording
        if self._refused:
            self._record_refused()
        if self.unrecorded:
            self.again = True
            raise self.suspend()

    def _recorded(self, sequence: int, kind: str, name: str, data: bytes | SentSignal) -> bytes:
        assert self.record is not None
        _replaying.context = None  # who listens to what is recorded is not the function, and may send
        try:
            return self.record(sequence, kind, name, data)
        except Exception as error:  # the engine's affair: it must not look like a failure of the function (NATIVE-7)
            self.abandoned = error
            raise _Abandon from error
        finally:
            _replaying.context = self


def _can_be_undone(entry: Entry) -> bool:
    if not isinstance(entry, StepEntry | ChildEntry) or entry.status != "completed":
        return False
    return entry.comp_actor is not None or entry.comp_from_result


def _with(
    entry: StepEntry | ChildEntry, *, status: str, given_up: bool, wait: RetryWait | None, cycle: int | None = None,
    retry: str | None = None,
) -> StepEntry | ChildEntry:  # fmt: skip
    """A step or child after a change to its row."""
    extra = replace(entry.extra, wait=wait, retry=retry or entry.extra.retry)
    changes: dict[str, Any] = {"status": status, "extra": extra}
    if isinstance(entry, StepEntry):
        changes["given_up"] = given_up
    if cycle is not None:
        changes["cycle"] = cycle
    return replace(entry, **changes)


def replay(function: Callable[..., Any], context: Replay, make_flow: Callable[[Replay], Any]) -> Decision:
    """Walk ``function`` against ``context``'s snapshot.

    Raises :class:`HoldRun` where the walk's result must not be used, and lets :class:`NeedsRecording`, asynchronous
    interrupts and what kept a side effect from being recorded through; in none of these cases does a decision exist.
    """
    if _replaying.context is not None:
        raise SendInsideWorkflowError("driving a run")
    args, kwargs = context.snapshot.args()
    travelling = context.snapshot.context
    restore = None if travelling is None else restorer(context.settings)
    if restore is None or travelling is None:
        return _walked(function, context, make_flow, args, kwargs)
    around = Around()
    leave = partial(around.leave, None, logger=context.settings.logging.logger, run_id=context.snapshot.run_id)
    try:
        try:
            _enter(around, restore, travelling)
            return _walked(function, context, make_flow, args, kwargs)
        finally:
            leave()
    finally:
        leave()  # once more, for an interrupt may have cut the first short; else it does nothing


def _enter(around: Around, restore: Callable[[Any], Any], travelling: bytes) -> None:
    try:
        around.enter(restore, travelling)
    except Exception as error:  # CTX-1: the function does not run without its context
        raise HoldRun(error) from error


def _walked(
    function: Callable[..., Any], context: Replay, make_flow: Callable[[Replay], Any], args: list[Any], kwargs: dict[str, Any]
) -> Decision:
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
        if context.error is not None and not _is_beside(error, context.error):
            raise HoldRun(context.error) from error
        if context.suspended:
            raise HoldRun(SuspensionSwallowedError()) from error
        context.past_patches()
        if context.cursor < context.recorded:
            asked = f"nothing more: it raised {type(error).__name__}: {error}"
            context.broke_off = True
            raise HoldRun(_shortfall(context, asked)) from error
        context.raised = error
        return _decision(context, "failed", error=describe_error(error))
    if context.error is not None:
        raise HoldRun(context.error)
    if context.suspended:
        raise HoldRun(SuspensionSwallowedError())
    context.past_patches()
    if context.cursor < context.recorded:
        raise HoldRun(_shortfall(context, "nothing more: it returned"))
    if getattr(value, "_replay", None) is context:
        if not hasattr(value, "_describe"):
            raise HoldRun(SagaError("the workflow function returned its flow: return what its steps gave"))
        if value._taken is not None:
            raise HoldRun(
                SagaError(f"the workflow function returned the builder flow.{value._describe()}: return what run() gave")
            )
        raise HoldRun(BuilderNotRunError(value._describe(), returned=True))
    try:
        result = encode(value, "the workflow's return value")
    except NotSerializableError as error:
        context.raised = error
        return _decision(context, "failed", error=describe_error(error))
    return _decision(context, "completed", result=result)


def _is_beside(error: BaseException, fault: SagaError) -> bool:
    """Whether the function's own error is why a builder was not run: it came up while that was still being described."""
    known: BaseException | None = error
    while known is not None:
        if known is fault:
            return False
        known = known.__context__
    return isinstance(fault, BuilderNotRunError)


def _shortfall(context: Replay, asked: str) -> HistoryMismatchError:
    entry = context.entries[context.cursor]
    return HistoryMismatchError(context.snapshot.run_id, context.cursor + 1, entry.describe(), asked)


def _decision(context: Replay, kind: str, *, result: bytes | None = None, error: str | None = None) -> Decision:
    return Decision(
        kind, context.steps, context.resolved, context.tags, result, error, context.outside, context._more,
        context.again and kind == "suspended",
    )  # fmt: skip


def with_outcome(snapshot: Snapshot, entry: StepEntry) -> Snapshot:
    """``snapshot`` as it will stand once the outcome in ``entry`` has been recorded and has raised the wake count."""
    entries = list(snapshot.entries)
    entries[entry.sequence - 1] = entry
    return snapshot.moved(
        status=snapshot.status, revision=snapshot.revision, wakes=snapshot.wakes + 1, wakes_seen=snapshot.wakes_seen,
        hold_count=snapshot.hold_count, entries=entries, tags=snapshot.tags, signals=snapshot.signals,
    )  # fmt: skip
