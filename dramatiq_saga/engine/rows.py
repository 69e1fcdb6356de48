"""What the engine reads and what it is about to write, as plain values.

A :class:`Snapshot` is a run as one read transaction saw it: the run's row and everything its function has asked for so
far, by sequence. It is never changed in place; a drive that adds to it makes a new one. So it can be cached per process and
shared between threads: ``revision`` and ``wakes`` say whether it is still what the database holds, and every write that
rests on it repeats both in its ``WHERE`` (DRIVE-1).

Long because what one replay can lead to stands in one place, read (entries) and to be written (a decision) side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# --- what is recorded ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryWait:
    """The wait of a step or child that is parked, or was (RSIG-1)."""

    status: str  # waiting | consumed | timed_out | cancelled
    due_at: int | None


@dataclass(frozen=True, slots=True)
class Extra:
    """What only some steps and children have: their block, their group, and what happens when they fail."""

    block: int | None = None
    position: int | None = None
    held_back: bool = False
    fallback: Callable[[], Any] | None = None
    retry: str | None = None  # JSON: the stored part of a retry policy
    wait: RetryWait | None = None
    comp_group: int | None = None
    comp_parallel: bool = False


PLAIN = Extra()


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step as recorded. ``value`` hands out a fresh copy of its decoded result (CODEC-4)."""

    sequence: int
    actor: str
    status: str
    given_up: bool = False
    attempts: int = 0
    cycle: int = 0
    value: Callable[[], Any] | None = None
    error: str | None = None
    optional: bool = False
    comp_actor: str | None = None
    comp_ready: bool = False
    comp_from_result: bool = False
    comp_on_self_failure: bool = False
    extra: Extra = PLAIN
    kind = "step"

    def describe(self) -> str:
        return f"step {self.actor!r}"

    @property
    def is_live(self) -> bool:
        """Whether something may still happen to it."""
        return self.status in ("pending", "running", "awaiting_retry") or (self.status == "failed" and not self.given_up)

    @property
    def has_failed(self) -> bool:
        """Whether its caller sees a failure that nothing can change any more."""
        return not self.optional and (self.status == "expired" or (self.status == "failed" and self.given_up))

    @property
    def final_failure(self) -> str:
        """What the fence makes of its status where it has failed for good (OPT-1)."""
        return "optional_failed" if self.optional and self.extra.retry is None else "failed"

    def settled(
        self, *, status: str, given_up: bool, attempts: int, value: Callable[[], Any] | None, error: str | None
    ) -> StepEntry:
        """This step with an outcome. (``dataclasses.replace`` would be most of a replay's cost.)"""
        return StepEntry(
            self.sequence, self.actor, status, given_up, attempts, self.cycle, value, error, self.optional, self.comp_actor,
            self.comp_ready, self.comp_from_result, self.comp_on_self_failure, self.extra,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SideEffectEntry:
    """A side effect's recorded value (SIDE-1)."""

    sequence: int
    name: str
    value: Callable[[], Any]
    kind = "side effect"
    is_live = False

    def describe(self) -> str:
        return f"side effect {self.name!r}"


@dataclass(frozen=True, slots=True)
class SentSignalEntry:
    """A signal that the function has sent to another run; ``value`` tells what became of it (SIG-3)."""

    sequence: int
    name: str
    value: Callable[[], Any]
    kind = "sent signal"
    is_live = False

    def describe(self) -> str:
        return f"signal {self.name!r} to another run"


@dataclass(frozen=True, slots=True)
class PatchEntry:
    """A change of the workflow, and whether the run goes the new way there (HISTORY-2)."""

    sequence: int
    name: str
    value: bool
    kind = "patch"
    is_live = False

    def describe(self) -> str:
        return f"patched({self.name!r})"


@dataclass(frozen=True, slots=True)
class WaitEntry:
    """A wait for a signal, or a timer; ``status`` is ``waiting, consumed, timed_out`` or ``cancelled``."""

    sequence: int
    what: str  # signal | timer
    name: str | None
    status: str
    due_at: int | None
    value: Callable[[], Any] | None = None
    kind = "wait"

    def describe(self) -> str:
        return "timer" if self.what == "timer" else f"wait for signal {self.name!r}"

    @property
    def is_live(self) -> bool:
        return self.status == "waiting"


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A parallel block or a saga group; its members take the sequences that follow."""

    sequence: int
    what: str  # parallel | saga
    size: int
    policy: str | None = None
    max_in_flight: int | None = None
    block: int | None = None
    position: int | None = None
    failed_by: int | None = None  # the member whose failure has cancelled those that were not running (PAR-4)
    ended: bool = False
    kind = "block"
    is_live = False  # its members are

    def describe(self) -> str:
        return f"{block_name(self.what)} of {self.size}"


@dataclass(frozen=True, slots=True)
class ChildEntry:
    """A child run, as its parent knows it (CHILD-1)."""

    sequence: int
    workflow: str
    child_id: str
    status: str
    close_policy: str
    cycle: int = 0
    value: Callable[[], Any] | None = None
    error: str | None = None
    optional: bool = False
    comp_actor: str | None = None
    comp_ready: bool = False
    comp_from_result: bool = False
    extra: Extra = PLAIN
    kind = "child"

    def describe(self) -> str:
        return f"child {self.workflow!r}"

    @property
    def is_live(self) -> bool:
        return self.status in ("pending", "running", "awaiting_retry")

    @property
    def has_failed(self) -> bool:
        """As a step's (CHILD-2)."""
        return self.status == "cancelled" or (self.status in ("failed", "expired") and not self.optional)


Entry = StepEntry | SideEffectEntry | SentSignalEntry | PatchEntry | WaitEntry | BlockEntry | ChildEntry


def block_name(what: str) -> str:
    """How a block is called in messages."""
    return "parallel block" if what == "parallel" else "saga group"


@dataclass(frozen=True, slots=True)
class ReceivedSignal:
    """A signal that has arrived and that nothing has consumed yet."""

    id: int
    name: str
    value: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Parent:
    """The run that has started this one, and how it is driven."""

    run_id: str
    sequence: int
    workflow: str
    queue: str
    priority: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One run as one read transaction saw it. ``entries[n]`` is what was asked for at sequence ``n + 1``."""

    run_id: str
    workflow: str
    version: str | None
    queue: str
    priority: int | None
    options: str | None
    status: str
    rollback: str
    revision: int
    wakes: int
    wakes_seen: int
    args: Callable[[], Any]
    context: bytes | None
    hold_count: int
    entries: tuple[Entry, ...] | list[Entry]
    tags: dict[str, str | None]
    signals: tuple[ReceivedSignal, ...] = ()
    parent: Parent | None = None
    close_request: str | None = None
    expires_at: int | None = None
    created_at: int = 0  # tells it from a run of the same id that was there before, and was pruned (C55)

    @property
    def version_read(self) -> tuple[int, int, int]:
        """What a claim has to have seen of the run for this to be still true of it."""
        return self.revision, self.wakes, self.created_at

    def is_overdue(self, now: int) -> bool:
        """Whether the run's deadline has passed: nothing of it may begin any more (EXPIRE-1)."""
        return self.expires_at is not None and self.expires_at <= now

    def is_failing(self) -> bool:
        """Whether the last thing that the run has asked for, or a member of its block, has failed for good: unless its function catches
        that, the run fails."""
        last = self.entries[-1] if self.entries else None
        if not isinstance(last, StepEntry | ChildEntry):
            return False
        if last.extra.block is None:
            return last.has_failed
        members = (entry for entry in self.entries if isinstance(entry, StepEntry | ChildEntry))
        return any(entry.has_failed for entry in members if entry.extra.block == last.extra.block)

    def moved(
        self, *, status: str, revision: int, wakes: int, wakes_seen: int, hold_count: int, entries: list[Entry],
        tags: dict[str, str | None], signals: tuple[ReceivedSignal, ...] = (),
    ) -> Snapshot:  # fmt: skip
        """The run as it stands after a write. (``dataclasses.replace`` would be most of a replay's cost.)"""
        return Snapshot(
            self.run_id, self.workflow, self.version, self.queue, self.priority, self.options, status, self.rollback, revision,
            wakes, wakes_seen, self.args, self.context, hold_count, entries, tags, signals, self.parent, self.close_request,
            self.expires_at, self.created_at,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that the function sends to another run; ``payload`` is encoded (SIG-3)."""

    run_id: str
    name: str
    payload: bytes


# --- what is to be written -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompensationSpec:
    """How a step is undone: the actor, and its encoded arguments once they are known."""

    actor: str
    args: bytes | None
    options: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a step, a child or a block stands: in which block, in which group, and what those say for it."""

    block: int | None = None
    position: int | None = None
    held_back: bool = False
    comp_group: int | None = None
    comp_parallel: bool = False
    comp_policy: str | None = None
    comp_on_self_failure: bool | None = None


ALONE = Scope()


@dataclass(slots=True)
class NewStep:
    """A step that the function has asked for and the database does not hold yet."""

    sequence: int
    actor: str
    queue: str
    priority: int | None
    options: dict[str, Any] | None
    args: bytes
    max_claims: int | None = None
    reclaim_stale_after_seconds: int | None = None
    compensation: CompensationSpec | None = None
    comp_from_result: bool = False
    comp_on_self_failure: bool = False
    comp_policy: str | None = None
    comp_reclaim_stale_after_seconds: int | None = None
    expires_at: int | None = None
    optional: bool = False
    fallback: bytes | None = None
    retry: str | None = None
    scope: Scope = ALONE


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A parallel block or saga group that the function has asked for; its members are rows of their own."""

    sequence: int
    what: str
    size: int
    policy: str | None = None
    max_in_flight: int | None = None
    scope: Scope = ALONE


@dataclass(frozen=True, slots=True)
class NewWait:
    """A wait that begins with this decision, or that ends with it: for a signal that had arrived before (SIG-1)."""

    sequence: int
    what: str  # signal | timer
    name: str | None
    due_at: int | None
    signal: ReceivedSignal | None = None


@dataclass(frozen=True, slots=True)
class NewChild:
    """A child run that the function has asked for. Run and link are written together (CHILD-1)."""

    sequence: int
    child_id: str
    workflow: str
    args: bytes
    start: dict[str, Any]  # queue, priority, version, expires_in_ms, expires_at, tags: how a run of it is started
    close_policy: str
    optional: bool = False
    retry: str | None = None
    compensation: CompensationSpec | None = None
    comp_from_result: bool = False
    comp_policy: str | None = None
    comp_reclaim_stale_after_seconds: int | None = None
    scope: Scope = ALONE


@dataclass(frozen=True, slots=True)
class Marker:
    """A value that is recorded with the decision: nothing outside the run can have followed from it before."""

    sequence: int
    kind: str  # value | patch
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Park:
    """A step or child that was given up waits for a signal (RSIG-1)."""

    entry: StepEntry | ChildEntry
    signal: str
    due_at: int | None


@dataclass(frozen=True, slots=True)
class Retry:
    """A step or child runs again in its row: its signal has come, to its wait or before it was parked (RSIG-1)."""

    entry: StepEntry | ChildEntry
    signal: ReceivedSignal | None  # consumed by this decision; None where its wait was answered
    child_id: str | None = None  # the child run that is started now (RSIG-4), and how
    start: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A step or child whose retries on signal are over is settled: ``failed`` or ``optional_failed`` (RSIG-2)."""

    entry: StepEntry | ChildEntry
    status: str
    policy: str  # as it is stored from now on: it says why
    threw: Exception | None = None  # what its predicate raised, for the journal


@dataclass(frozen=True, slots=True)
class Group:
    """Messages of one block, or of one level of a rollback, that go out together: what Dramatiq knows as a group (PAR-1, PAR-3).

    ``first`` and ``last`` are sequences of the members; ``workflow``, ``queue`` and ``priority`` say where the callback goes.
    ``level`` is set for a level, which has no ``block``.
    """

    id: str
    size: int
    block: int
    first: int
    last: int
    workflow: str
    queue: str
    priority: int | None
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that is to be sent: which row it is about, and how it travels."""

    kind: str  # drive | step | compensation | timer | callback
    run_id: str
    actor: str
    queue: str
    sequence: int = 0
    cycle: int = 0
    attempts: int = 0
    tries: int = 0
    priority: int | None = None
    options: dict[str, Any] | None = None
    delay: int | None = None
    at: int | None = None  # of a timer: the moment that it is for
    group: Group | None = None  # what it goes out with
    created_at: int | None = None  # of a step or compensation: when its run was created, which tells it from a namesake


def step_message(run_id: str, row: tuple[object, ...], *, created_at: int | None) -> Outgoing:
    """The message of a step's row: (sequence, actor, queue, priority, options, cycle, attempts, tries), and its run's ``created_at``."""
    sequence, actor, queue, priority, options, cycle, attempts, tries = row
    return Outgoing(
        "step", run_id, str(actor), str(queue), int(sequence), int(cycle), int(attempts), int(tries),  # type: ignore[call-overload]
        priority=priority, options=json.loads(str(options)) if options else None, created_at=created_at,  # type: ignore[arg-type]
    )  # fmt: skip


@dataclass(slots=True)
class Decision:
    """What one replay leads to. Nothing of it exists until ``decision.write`` has landed."""

    kind: str  # suspended | completed | failed
    steps: list[NewStep] = field(default_factory=list)
    resolved: list[tuple[int, CompensationSpec]] = field(default_factory=list)
    tags: dict[str, str | None] = field(default_factory=dict)
    result: bytes | None = None
    error: str | None = None
    outside: bool = False  # only something from outside can move the run
    more: More | None = None  # what most decisions do not have
    again: bool = False  # the function could go on, once this much is recorded: drive again


@dataclass(slots=True)
class More:
    """The rarer parts of a decision."""

    blocks: list[NewBlock] = field(default_factory=list)
    waits: list[NewWait] = field(default_factory=list)
    children: list[NewChild] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)
    parks: list[Park] = field(default_factory=list)
    retries: list[Retry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)  # blocks that a member has failed, and which member (PAR-4)
    released: list[StepEntry] = field(default_factory=list)  # members that were held back and may run now (PAR-1)
    finished: list[int] = field(default_factory=list)  # blocks of which nothing is live any more
    taken: set[int] = field(default_factory=set)  # ids of received signals that are consumed
