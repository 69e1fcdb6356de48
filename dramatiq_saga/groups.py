"""Blocks of steps as a workflow function builds them: :class:`ParallelBuilder` and :class:`SagaBuilder`.

A block takes a sequence of its own, which records its kind and size (C19), and its members take those that follow, in the order
given. What is done about the rows of a block while they run is ``engine/blocks.py``; here is only what a replay makes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from .builders import ActionBuilder, State, begin, word
from .engine.rows import ALONE, Scope, StepEntry
from .options import count_from_one
from .statuses import CompensationFailurePolicy, ParallelFailurePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .builders import Member
    from .engine.replay import Replay
    from .engine.rows import BlockEntry

T_co = TypeVar("T_co", covariant=True)


class _Block:
    """What both kinds of block have in common: members that were handed over and belong to it from then on."""

    what: str

    def __init__(self, replay: Replay, members: Sequence[Member[Any]]) -> None:
        self._replay = replay
        self._built = True
        self._taken: str | None = None
        for position, member in enumerate(members):
            if not hasattr(member, "_step_into"):
                raise TypeError(
                    f"{self.what}() takes builders, flow.action(...) for example; number {position + 1} is {type(member).__name__}"
                )
            if isinstance(member, SagaBuilder):
                raise TypeError(
                    f"{self.what}() does not take a saga() group: its steps run one after another; give the steps, or parallel() inside saga()"
                )
            if member._taken is not None or any(member is other for other in members[:position]):
                raise TypeError(
                    f"{self.what}(): {member._describe()}, number {position + 1}, was run before or belongs to another block"
                )
        for member in members:
            member._built = True
            member._taken = f"belongs to {self.what}()"
        self._members = list(members)
        self._built = False

    def _ends(self, entry: BlockEntry) -> None:
        """Nothing of the block is open any more."""
        if entry.size and not entry.ended:
            self._replay.finish_block(entry)

    def _make_ready(self) -> None:
        """A block is asked for whole or not at all: what is wrong with a member is found before the first of them is recorded
        (test_a_block_with_a_member_that_is_refused_records_nothing)."""
        for member in self._members:
            member._make_ready()

    def _describe(self) -> str:
        return f"{self.what}() of {len(self._members)}"

    def __del__(self) -> None:
        if not getattr(self, "_built", True):
            self._replay.builder_dropped(self._describe())


class ParallelBuilder(_Block, Generic[T_co]):
    """Steps that run at the same time (PAR-1 ... PAR-4). Every method returns the builder; :meth:`run` comes last."""

    what = "parallel"

    def __init__(self, replay: Replay, members: Sequence[Member[Any]]) -> None:
        self._policy: str | None = None
        self._max_in_flight: int | None = None
        super().__init__(replay, members)

    def fail_fast(self) -> Self:
        """The first hard failure cancels the members that are not running; those that run finish first (PAR-4)."""
        self._policy = ParallelFailurePolicy.FAIL_FAST.value
        return self

    def wait_all_then_fail(self) -> Self:
        """Every member is settled before a failure counts (PAR-4)."""
        self._policy = ParallelFailurePolicy.WAIT_ALL_THEN_FAIL.value
        return self

    def max_in_flight(self, n: int) -> Self:
        """How many members may be waiting for a worker or running at the same time (PAR-1)."""
        try:
            self._max_in_flight = count_from_one(n, "max_in_flight()")
        except (TypeError, ValueError):
            self._built = True
            raise
        return self

    def run(self) -> list[T_co]:
        """The members' results, in the order given, once all of them are there.

        Raises:
          StepFailedError, StepExpiredError, ChildError: of the member whose failure has cancelled the others; where none were
            cancelled, of the first in the order given that failed.
          BuilderReusedError: this builder has been run already.
        """
        replay = begin(self)
        state = self._step_into(ALONE)
        if state is None:
            raise replay.suspend()
        result: list[T_co] = state.conclude(replay)
        return result

    def _step_into(self, scope: Scope) -> State | None:
        replay, size = self._replay, len(self._members)
        if self._max_in_flight is not None:
            self._check_members_can_wait()
        entry = replay.recorded_block(self.what, size)
        if entry is None:
            self._make_ready()
            policy = self._policy or str(replay.settings.parallel.default_failure_policy)
            entry = replay.add_block(self.what, size, policy=policy, max_in_flight=self._max_in_flight, scope=scope)
            limit = size if self._max_in_flight is None else self._max_in_flight
            new = [
                member._step_into(_within(entry, scope, position, held_back=position >= limit))
                for position, member in enumerate(self._members)
            ]
            return (
                None
                if any(state is None for state in new)
                else self._joined(entry, [state for state in new if state is not None])
            )
        found = [member._step_into(_within(entry, scope, position)) for position, member in enumerate(self._members)]
        assert None not in found, "a block is recorded with all of its members"
        return self._joined(entry, [state for state in found if state is not None])

    def _check_members_can_wait(self) -> None:
        for position, member in enumerate(self._members):
            if not isinstance(member, ActionBuilder):
                raise TypeError(
                    f"max_in_flight() holds back steps only, and number {position + 1} of the block is {member._describe()}: "
                    "limit the steps inside it, or split the list and run one block after another"
                )

    def _joined(self, entry: BlockEntry, states: list[State]) -> State:
        """Where the block stands, by where its members stand; the rows decide, never a counter (PAR-2)."""
        live = [state for state in states if state.live]
        failed = [state for state in states if state.error is not None]
        if live and failed and entry.policy == ParallelFailurePolicy.FAIL_FAST:
            self._cancel(entry, live, _sequence(failed[0]))
        elif live and entry.max_in_flight is not None:
            self._release(entry.max_in_flight, live)
        if live:
            return BlockState(entry, states, outside=all(state.outside for state in live), live=True)
        self._ends(entry)
        if failed:
            cause = next((state for state in failed if _sequence(state) == entry.failed_by), failed[0])
            return BlockState(entry, states, error=cause.error)
        values = [state.value for state in states]
        if None in values:  # cancelled without a failure beside it: with the block around it, or by an operator's hand
            return BlockState(entry, states, outside=True, live=False)
        return BlockState(entry, states, value=lambda: [value() for value in values if value is not None])

    def _cancel(self, entry: BlockEntry, live: list[State], failed_by: int) -> None:
        """The first hard failure: what is not running is cancelled, what runs gets no further try; blocks inside as well (PAR-4)."""
        if entry.failed_by is None or any(state.idle for state in live):
            self._replay.cancel_members(entry, failed_by if entry.failed_by is None else entry.failed_by)
        for state in live:
            if isinstance(state, BlockState):
                self._cancel(state.block, [member for member in state.members if member.live], failed_by)

    def _release(self, limit: int, live: list[State]) -> None:
        """Members that are held back take the places of those that have ended in ways that only a drive sees: parked, expired."""
        held = [state.entry for state in live if isinstance(state.entry, StepEntry) and state.entry.extra.held_back]
        if held:
            in_flight = sum(1 for state in live if not state.outside) - len(held)
            for entry in held[: max(0, limit - in_flight)]:
                self._replay.release_member(entry)


class BlockState(State):
    """Where a block stands, and its members."""

    __slots__ = ("block", "members")

    def __init__(self, block: BlockEntry, members: list[State], **standing: Any) -> None:
        super().__init__(None, **standing)
        self.block = block
        self.members = members

    @property
    def idle(self) -> bool:
        return any(member.idle for member in self.members)


class SagaBuilder(_Block, Generic[T_co]):
    """Steps that run one after another and are undone by rules of their own (COMP-4, COMP-5)."""

    what = "saga"

    def __init__(self, replay: Replay, members: Sequence[Member[Any]]) -> None:
        self._comp_policy: str | None = None
        self._parallel: bool | None = None
        self._on_self_failure: bool | None = None
        super().__init__(replay, members)

    def on_compensation_failure(self, policy: CompensationFailurePolicy | str) -> Self:
        """What a failing compensation of the group does to the rest of the rollback; a step's own word comes first (COMP-4)."""
        try:
            self._comp_policy = word(CompensationFailurePolicy, policy, "on_compensation_failure()")
        except ValueError:
            self._built = True
            raise
        return self

    def compensate_in_parallel(self, flag: bool = True) -> Self:
        """Undo the group's steps at the same time, as one level of the rollback (COMP-5)."""
        self._parallel = flag
        return self

    def compensate_step_on_self_failure(self, flag: bool = True) -> Self:
        """Undo also the step of the group that failed, or of which nobody knows how it ended; a step's own word comes first (COMP-5).

        Raises:
          TypeError: a step of the group builds its compensation from its result, which there is none of then (COMP-10).
        """
        self._on_self_failure = flag
        if flag:
            self._check_self_failure(self._members)
        return self

    def _check_self_failure(self, members: Sequence[Member[Any]]) -> None:
        for member in members:
            if isinstance(member, ParallelBuilder):
                self._check_self_failure(member._members)
            elif getattr(member, "_compensation_from", None) is not None and getattr(member, "_on_self_failure", None) is None:
                self._built = True
                raise TypeError(
                    f"saga().compensate_step_on_self_failure(): {member._describe()} builds its compensation from its result, and has none "
                    "when it fails; give it compensate_with(actor, ...), or compensate_step_on_self_failure(False) of its own"
                )

    def run(self) -> list[T_co]:
        """The results of the steps, in the order given.

        Raises:
          StepFailedError, StepExpiredError: of the first step that failed; those after it are not started.
          BuilderReusedError: this builder has been run already.
        """
        replay = begin(self)
        state = self._step_into(ALONE)
        if state is None:
            raise replay.suspend()
        result: list[T_co] = state.conclude(replay)
        return result

    def _step_into(self, scope: Scope) -> State | None:
        replay, size = self._replay, len(self._members)
        entry = replay.recorded_block(self.what, size)
        if entry is None:
            self._make_ready()
            entry = replay.add_block(self.what, size, policy=self._comp_policy, max_in_flight=None, scope=scope)
        parallel = replay.settings.sagas.parallel_compensation if self._parallel is None else self._parallel
        inner = Scope(
            comp_group=entry.sequence,
            comp_parallel=parallel,
            comp_policy=self._comp_policy,
            comp_on_self_failure=self._on_self_failure,
        )
        values: list[Any] = []
        for member in self._members:
            state = member._step_into(inner)
            if state is None:
                return None
            if state.value is None:
                if not state.live:
                    self._ends(entry)
                return state
            values.append(state.value)
        self._ends(entry)
        return State(None, value=lambda: [value() for value in values])


def _sequence(state: State) -> int:
    """The sequence of a member that has failed."""
    if isinstance(state, BlockState):
        return state.block.sequence
    return 0 if state.entry is None else state.entry.sequence


def _within(entry: BlockEntry, scope: Scope, position: int, *, held_back: bool = False) -> Scope:
    return Scope(
        entry.sequence,
        position,
        held_back,
        scope.comp_group,
        scope.comp_parallel,
        scope.comp_policy,
        scope.comp_on_self_failure,
    )
