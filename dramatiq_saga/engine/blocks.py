"""Parallel blocks while they run: outcomes of members that need no drive, members held back, callbacks (PAR-1, PAR-2, PAR-4).

The rows decide, never a counter. An outcome after which others of its block are still at work is recorded alone: nothing follows
from it yet, so a block of a thousand steps is driven when it begins and when its last member is settled, and not in between.
Whether it is the last is read from the rows under the run's lock. Such an outcome raises the wake count **and** the count of wakes
seen: every decision in the making loses, and no drive is called for. In its place it lets the next member go that was held back.

A group's callback, a second and independent trigger, is only believed as far as the rows say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..statuses import ParallelFailurePolicy
from .claim import SAME_RUN
from .rows import Group, step_message
from .wakes import LOCK_RUN, WAKE, WAKE_SEEN

if TYPE_CHECKING:
    from ..journal import history
    from ..store.database import Tx
    from .core import Engine, Sender
    from .rows import Decision, Outgoing, Snapshot, StepEntry

#: How many members that are held back an outcome looks at to choose one: several outcomes at once choose different ones.
CHOICE = 16

_BLOCK = "SELECT policy, max_in_flight, failed_by, closed_early_at FROM {blocks} WHERE run_id = ? AND sequence = ?"
_MEMBER = "SELECT optional, retry_policy FROM {action_runs} WHERE run_id = ? AND sequence = ?"

# Members that are scheduled or at work. The first terms are those of an index that holds live members only; no order of its
# columns but this one makes the count of those in flight independent of how many are held back.
_OPEN = "{action_runs} WHERE run_id = ? AND block = ? AND ended_at IS NULL"
_AT_WORK = f"SELECT COUNT(*) FROM {_OPEN} AND held_back = FALSE AND status <> 'awaiting_retry' AND sequence <> ?"
_ANOTHER_AT_WORK = f"SELECT 1 FROM {_OPEN} AND held_back = FALSE AND status <> 'awaiting_retry' AND sequence <> ? LIMIT 1"
_MESSAGE = "sequence, actor, queue, priority, options, cycle, attempts, tries"
_HELD_BACK = f"SELECT {_MESSAGE} FROM {_OPEN} AND held_back = TRUE ORDER BY sequence LIMIT {CHOICE}"
_ONE = f"SELECT {_MESSAGE} FROM {{action_runs}} WHERE run_id = ? AND sequence = ?"
RELEASE = (
    "UPDATE {action_runs} SET held_back = FALSE, sent_at = ?, repair_after = ? WHERE run_id = ? AND sequence = ? "
    "AND held_back = TRUE AND status = 'pending'"
)
# Whether the block that a callback is of has ended; no row where it was another run's of the same id, and pruned.
# test_a_callback_of_a_pruned_run_says_nothing_of_a_block_of_its_namesake
_ENDED = f"SELECT b.ended_at FROM {{blocks}} b JOIN {{flow_runs}} f ON f.id = b.run_id AND {SAME_RUN} WHERE b.run_id = ? AND b.sequence = ?"
_OPEN_IN_GROUP = f"SELECT 1 FROM {_OPEN} AND sequence BETWEEN ? AND ? LIMIT 1"
_OPEN_STEP = f"SELECT 1 FROM {_OPEN} LIMIT 1"
_OPEN_CHILD = "SELECT 1 FROM {children} WHERE run_id = ? AND block = ? AND ended_at IS NULL LIMIT 1"
_OPEN_BLOCK = "SELECT 1 FROM {blocks} WHERE run_id = ? AND block = ? AND ended_at IS NULL LIMIT 1"
_CLOSED_EARLY = (
    "UPDATE {blocks} SET closed_early_at = ? WHERE run_id = ? AND sequence = ? AND closed_early_at IS NULL AND ended_at IS NULL"
)


# --- outcomes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A member whose outcome is to be recorded. ``failed``: it is a failure that no further try can mend."""

    run_id: str
    block: int
    sequence: int
    failed: bool
    created_at: int | None  # of the run


@dataclass(frozen=True, slots=True)
class Standing:
    """What became of an outcome here. Not ``landed``: it goes the ordinary way, with a drive, and nothing was written."""

    landed: bool = False
    closed_early: bool = False
    look_again: bool = False  # with the message of ``next_one`` ready
    next_one: tuple[object, ...] | None = None  # the member that is to be released


def settle_member(
    engine: Engine,
    member: Member,
    sender: Sender,
    *,
    delivery: object | None,
    write: Callable[[Tx, int], bool],
    lines: list[history.Line],
) -> Standing:
    """Record an outcome that no drive has to see, by ``write``, if it is one; what became of it. ``write`` fills in ``lines``.

    Who else may be here: other members' outcomes, a decision, a cancel. All lock the run's row first (DRIVE-7), so of two
    outcomes that are each other's last sibling the second sees the first, and goes the ordinary way
    (test_of_two_last_members_exactly_one_drives_the_run).
    """

    def attempt(next_one: tuple[object, ...] | None) -> Standing:
        outbox = sender.outbox(delivery)
        outbox.load([] if next_one is None else [step_message(member.run_id, next_one, created_at=member.created_at)])
        now = engine.now()

        def record_member(tx: Tx) -> Standing:
            if tx.dialect != "sqlite":
                tx.one(LOCK_RUN, (member.run_id,))
            standing = _look(tx, member, next_one)
            if not standing.landed:
                return standing
            if not write(tx, now):
                return Standing(closed_early=standing.closed_early)
            tx.run(WAKE_SEEN, (member.run_id,))
            if next_one is not None:
                sent_at = now if outbox.joined else None
                tx.run(RELEASE, (sent_at, repair_after(engine, now), member.run_id, next_one[0]))
            engine.record(tx, member.run_id, now, lines)
            outbox.stage(tx)
            return standing

        standing = engine.write(record_member, outbox)
        if standing.landed:
            outbox.delivered()
        return standing

    standing = attempt(None)
    while standing.look_again:
        standing = attempt(standing.next_one)
    return standing


def _look(tx: Tx, member: Member, next_one: tuple[object, ...] | None) -> Standing:
    """Whether an outcome leaves others of its block at work, so that nothing follows from it yet."""
    row = tx.one(_BLOCK, (member.run_id, member.block))
    if row is None:
        return Standing()
    policy, limit, failed_by, closed_early_at = row
    early = closed_early_at is not None
    if member.failed and failed_by is None and _is_hard(tx, member, policy):
        return Standing(closed_early=early)
    members = (member.run_id, member.block)
    if limit is None:
        return Standing(tx.one(_ANOTHER_AT_WORK, (*members, member.sequence)) is not None, early)
    in_flight = int((tx.one(_AT_WORK, (*members, member.sequence)) or (0,))[0])
    held_back = tx.all(_HELD_BACK, members) if in_flight < limit else []
    if next_one is None and not held_back:
        return Standing(in_flight > 0, early)
    if next_one is not None and any(row[0] == next_one[0] for row in held_back):
        return Standing(True, early)
    # Another outcome has let that one go, or there is a place now: once more, with another message or with none.
    return Standing(look_again=True, next_one=held_back[member.sequence % len(held_back)] if held_back else None)


def _is_hard(tx: Tx, member: Member, policy: str) -> bool:
    """Whether a drive has to see a failure while others are at work: the first of a block that does not wait, and one that may be
    parked for a signal. A block that waits, and an optional member, go on."""
    row = tx.one(_MEMBER, (member.run_id, member.sequence))
    optional, retry_policy = row or (False, None)
    return retry_policy is not None or (not optional and policy != ParallelFailurePolicy.WAIT_ALL_THEN_FAIL)


def gets_no_further_try(tx: Tx, run_id: str, block: int) -> bool:
    """Whether a member of that block has failed it: a try that fails now is the last (PAR-4). The run's row has to be locked."""
    row = tx.one(_BLOCK, (run_id, block))
    return row is not None and row[2] is not None


def repair_after(engine: Engine, now: int) -> int:
    """From when on the doctor may think that the message of a member released now is lost: its row may be old (DOCTOR-1)."""
    return now + int(engine.settings.repair.grace_seconds * 1000)


# --- messages --------------------------------------------------------------------------------------------------------


def groups(snapshot: Snapshot, decision: Decision, now: int) -> dict[int | None, Group]:
    """The groups that a decision's steps go out in, by block. One message is no group: its own outcome tells all."""
    if decision.more is None or not decision.more.blocks:
        return {}
    found: dict[int | None, Group] = {}
    for block in decision.more.blocks:
        members = [step.sequence for step in decision.steps if step.scope.block == block.sequence and not step.scope.held_back]
        if len(members) > 1:
            found[block.sequence] = Group(
                f"{snapshot.run_id}/{block.sequence}/{now:x}", len(members), block.sequence, members[0], members[-1],
                snapshot.workflow, snapshot.queue, snapshot.priority,
            )  # fmt: skip
    return found


def read_messages(engine: Engine, snapshot: Snapshot, entries: Iterable[StepEntry]) -> list[Outgoing]:
    """The messages of steps whose rows are there already."""
    run_id = snapshot.run_id

    def read(tx: Tx) -> list[Outgoing]:
        rows = [tx.one(_ONE, (run_id, entry.sequence)) for entry in entries]
        return [step_message(run_id, row, created_at=snapshot.created_at) for row in rows if row is not None]

    return engine.store.read(read)


# --- callbacks -------------------------------------------------------------------------------------------------------


def called_back(
    engine: Engine, run_id: str, sender: Sender, *, block: int, first: int, last: int, created_at: int | None, delivery: object | None
) -> bool:  # fmt: skip
    """A group's callback has come: whether the run is to be driven now. Otherwise the message at hand is used up.

    Early, while a member of the group is live, it marks the block, and the worker that finishes later tells (PAR-2). With nothing
    live in the block it raises the wake, unless a decision has seen the block's end already.
    """
    outbox = sender.outbox(delivery)
    outbox.load([])
    now = engine.now()

    def operation(tx: Tx) -> bool:
        if tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (run_id,))
        row = tx.one(_ENDED, (created_at, run_id, block))
        if row is None:
            outbox.stage(tx)
            return False
        if row[0] is not None:
            return True
        if tx.one(_OPEN_IN_GROUP, (run_id, block, first, last)) is not None:
            tx.run(_CLOSED_EARLY, (now, run_id, block))
            outbox.stage(tx)
            return False
        if all(tx.one(sql, (run_id, block)) is None for sql in (_OPEN_STEP, _OPEN_CHILD, _OPEN_BLOCK)):
            tx.run(WAKE, (now, run_id))
        return True

    if engine.write(operation, outbox):
        return True
    outbox.delivered()
    return False
