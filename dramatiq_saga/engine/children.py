"""Children: child runs, the links that tie them to their parents, and what passes between the two (CHILD-1 … CHILD-3).

A child's link is its parent's row of it; :func:`start` writes both runs' rows. Whatever ends a run settles, in the same transaction,
the open link that waits for it, raises its parent's wake count and sends the parent's drive; and it closes by their policy the links
that the run itself holds open. A :class:`Family` is who has to hear of it: read beforehand, because messages are prepared before a
transaction begins, and looked at again inside it. Long because the two ends of a link are read against each other.

Who else may be here: the other end. Parents are locked before children (DRIVE-7), so of a child's end and its parent's the second
finds the link closed, or :class:`MovedOn` tells it that its family has changed. An open link always has a live parent and a live
child. Proven by ``tests/races/test_children.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..codec import describe_error, digest
from ..errors import FlowCancelledError, WriteRefusedError
from ..journal import history
from ..statuses import ChildClosePolicy, FlowStatus
from . import notify
from .alarms import child_deadline
from .replay import MovedOn
from .rows import ChildEntry, Outgoing, Parent
from .wakes import LOCK_RUN, WAKE, WAKE_SEEN

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Sender
    from .rows import Decision, Failure, NewChild, Park, Retry, Snapshot

#: What a parent may ask of a child (``flow_runs.close_request``): to roll back and end ``cancelled`` or ``failed``, or to end
#: ``cancelled`` and leave its work as it is, as the parent was told to.
CANCEL, FAIL, ABORT = "cancel", "fail", "abort"

_LINK = (
    "INSERT INTO {children} (run_id, sequence, child_id, workflow, block, position, status, close_policy, cycle, optional, comp_actor, "
    "comp_args, comp_options, comp_from_result, comp_policy, comp_group, comp_parallel, comp_reclaim_stale_after_seconds, created_at, "
    "options, retry_policy, args) VALUES (?, ?, ?, ?, ?, ?, 'running', ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_RUN = (
    "INSERT INTO {flow_runs} (id, workflow, version, queue, priority, options, args, args_digest, context, status, rollback, "
    "revision, wakes, wakes_seen, woken_at, hold_count, expires_at, expiry_attempts, parent_id, parent_sequence, sent_at, "
    "repair_attempts, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', 'none', 0, 1, 0, ?, 0, ?, 0, ?, ?, ?, 0, ?)"
)
_TAG = "INSERT INTO {tags} (run_id, name, value) VALUES (?, ?, ?)"
_STARTED = "SELECT status FROM {flow_runs} WHERE id = ?"
_PARKED = "SELECT status FROM {children} WHERE run_id = ? AND sequence = ?"

_WAITS_FOR = (
    "SELECT p.id, c.sequence, p.workflow, p.queue, p.priority FROM {children} c JOIN {flow_runs} p ON p.id = c.run_id "
    "WHERE c.child_id = ? AND c.ended_at IS NULL AND c.status = 'running'"
)
_BLOCK_OF = "SELECT block FROM {children} WHERE run_id = ? AND sequence = ?"
_STEP_AT_WORK = (
    "SELECT 1 FROM {action_runs} WHERE run_id = ? AND block = ? AND ended_at IS NULL AND held_back = FALSE "
    "AND status <> 'awaiting_retry' LIMIT 1"
)
_CHILD_AT_WORK = "SELECT 1 FROM {children} WHERE run_id = ? AND block = ? AND ended_at IS NULL AND status = 'running' AND sequence <> ? LIMIT 1"
_OPEN = "SELECT sequence, child_id, workflow, status, close_policy FROM {children} WHERE run_id = ? AND ended_at IS NULL ORDER BY sequence"
_SENT_TO = "SELECT workflow, queue, priority FROM {flow_runs} WHERE id = ?"
_SETTLE = (
    "UPDATE {children} SET status = ?, result = ?, error = ?, ended_at = ? "
    "WHERE run_id = ? AND sequence = ? AND child_id = ? AND status = 'running'"
)
_LET_GO = "UPDATE {children} SET status = 'cancelled', ended_at = ? WHERE run_id = ? AND sequence = ? AND child_id = ? AND ended_at IS NULL"
# A child that is rolling back has given up already, and what it held was closed when that began.
_ASK = (
    "UPDATE {flow_runs} SET close_request = ?, wakes = wakes + 1, woken_at = COALESCE(woken_at, ?) "
    "WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back'"
)
_PARK = (
    "UPDATE {children} SET status = 'awaiting_retry', ended_at = NULL WHERE run_id = ? AND sequence = ? AND status = 'failed' "
    "AND child_id = ? AND cycle = ?"
)
_RETRY = (
    "UPDATE {children} SET status = 'running', child_id = ?, cycle = cycle + 1, options = ?, result = NULL, error = NULL, "
    "ended_at = NULL WHERE run_id = ? AND sequence = ? AND cycle = ? AND (status = 'awaiting_retry' OR status = 'failed')"
)
_ARGS = "SELECT args FROM {children} WHERE run_id = ? AND sequence = ?"
_FAIL = (
    "UPDATE {children} SET status = 'failed', retry_policy = ?, ended_at = COALESCE(ended_at, ?) WHERE run_id = ? AND sequence = ? "
    "AND cycle = ? AND (status = 'awaiting_retry' OR status = 'failed')"
)
RESOLVE = "UPDATE {children} SET comp_actor = ?, comp_args = ?, comp_options = ? WHERE run_id = ? AND sequence = ? AND comp_args IS NULL"
_UNSEEN = "f.wakes > f.wakes_seen AND f.ended_at IS NULL AND f.hold_until IS NULL"
_UNTOLD_CHILDREN = (
    "SELECT f.id, f.workflow, f.queue, f.priority FROM {children} c JOIN {flow_runs} f ON f.id = c.child_id "
    f"WHERE c.run_id = ? AND (f.sent_at IS NULL OR f.close_request IS NOT NULL) AND {_UNSEEN} ORDER BY c.sequence"
)
_UNTOLD_PARENT = (
    "SELECT f.id, f.workflow, f.queue, f.priority FROM {flow_runs} r JOIN {flow_runs} f ON f.id = r.parent_id "
    f"WHERE r.id = ? AND r.ended_at IS NOT NULL AND {_UNSEEN}"
)

_WORDS = {
    "completed": history.CHILD_COMPLETED,
    "failed": history.CHILD_FAILED,
    "expired": history.CHILD_EXPIRED,
    "cancelled": history.CHILD_CANCELLED,
}


# --- starting --------------------------------------------------------------------------------------------------------


def start(tx: Tx, engine: Engine, snapshot: Snapshot, child: NewChild, *, now: int, sent_at: int | None) -> None:
    """Write a child run and its link (CHILD-1), in the transaction of the decision that asks for it: never under a parent that has
    ended or is rolling back, because that decision does not land then."""
    spec, scope = child.compensation, child.scope
    tx.run(
        _LINK,
        (
            snapshot.run_id, child.sequence, child.child_id, child.workflow, scope.block, scope.position, child.close_policy,
            child.optional, spec.actor if spec else None, spec.args if spec else None, spec.options if spec else None,
            child.comp_from_result, child.comp_policy, scope.comp_group, scope.comp_parallel,
            child.comp_reclaim_stale_after_seconds, now, json.dumps(child.start), child.retry, child.args,
        ),
    )  # fmt: skip
    _start_run(tx, engine, snapshot, child.sequence, child_id=child.child_id, workflow=child.workflow, args=child.args,
               how=child.start, now=now, sent_at=sent_at)  # fmt: skip


def _start_run(
    tx: Tx, engine: Engine, parent: Snapshot, sequence: int, *, child_id: str, workflow: str, args: bytes, how: dict[str, Any],
    now: int, sent_at: int | None,
) -> None:  # fmt: skip
    expires_at = child_deadline(how, now)
    options = how.get("options")
    tx.run(
        _RUN,
        (
            child_id, workflow, how.get("version"), how["queue"], how.get("priority"), json.dumps(options) if options else None, args,
            digest(args), parent.context, now, expires_at, parent.run_id, sequence, sent_at, now,
        ),
    )  # fmt: skip
    for name, value in (how.get("tags") or {}).items():
        tx.run(_TAG, (child_id, name, value))
    _tell(tx, engine, child_id, workflow, now, history.Line(history.FLOW_STARTED, name=workflow, payload=args))


def messages(decision: Decision) -> list[Outgoing]:
    """The first messages of the child runs that a decision starts."""
    more = decision.more
    if more is None:
        return []
    found = [_first_message(child.child_id, child.workflow, child.start) for child in more.children]
    for retry in more.retries:
        if retry.child_id is not None and retry.start is not None and isinstance(retry.entry, ChildEntry):
            found.append(_first_message(retry.child_id, retry.entry.workflow, retry.start))
    return found


def _first_message(child_id: str, workflow: str, how: dict[str, Any]) -> Outgoing:
    return Outgoing("drive", child_id, workflow, how["queue"], priority=how.get("priority"), options=how.get("options"))


def check_committed(engine: Engine, snapshot: Snapshot, decision: Decision) -> None:
    """Read back what a decision wrote of children, and raise where it is gone although its transaction has closed (CLAIM-3).

    Raises:
      WriteRefusedError: nothing of the decision was written; the run is driven again.
    """
    more = decision.more
    if more is None:
        return
    started = [(child.sequence, child.child_id, child.workflow) for child in more.children]
    started += [
        (retry.entry.sequence, retry.child_id, retry.entry.workflow) for retry in more.retries
        if retry.child_id is not None and isinstance(retry.entry, ChildEntry)
    ]  # fmt: skip
    parked = [(park.entry.sequence, park.entry.workflow) for park in more.parks if isinstance(park.entry, ChildEntry)]
    if not started and not parked:
        return

    def lost(tx: Tx) -> tuple[int, str] | None:
        for sequence, child_id, workflow in started:
            if tx.one(_STARTED, (child_id,)) is None:
                return sequence, workflow
        for sequence, workflow in parked:
            if (tx.one(_PARKED, (snapshot.run_id, sequence)) or ("failed",))[0] == "failed":
                return sequence, workflow
        return None

    found = engine.store.read(lost)
    if found is not None:
        sequence, workflow = found
        engine.cache.drop(snapshot.run_id)
        engine.anomalies.claim_not_committed(run_id=snapshot.run_id, row="child", sequence=sequence, workflow=workflow)
        raise WriteRefusedError(
            f"the start of child {sequence} ({workflow}) of run {snapshot.run_id} was gone after its transaction had closed",
            "commit",
        )


# --- the family of a run ---------------------------------------------------------------------------------------------


class Open(NamedTuple):
    """An open link, as the parent's row has it."""

    sequence: int
    child_id: str
    workflow: str
    status: str
    policy: str

    @property
    def is_asked(self) -> bool:
        """Whether its child run is asked to end when the parent does."""
        return self.policy != ChildClosePolicy.ABANDON and self.status == "running"


@dataclass(frozen=True, slots=True)
class Family:
    """Who has to hear of a run that ends, or begins to roll back: the parent that waits for it, and its own open children."""

    run_id: str
    parent: Parent | None = None
    quiet: bool = False  # nothing follows for the parent yet: others of the child's parallel block are at work (PAR-4)
    children: tuple[Open, ...] = ()
    to_children: tuple[Outgoing, ...] = ()

    def messages(self) -> list[Outgoing]:
        """The drives that are asked for; one that turns out to be needless finds nothing to do."""
        parent = self.parent
        if parent is None or self.quiet:
            return list(self.to_children)
        return [Outgoing("drive", parent.run_id, parent.workflow, parent.queue, priority=parent.priority), *self.to_children]

    def lock(self, tx: Tx) -> None:
        """Lock the parent's row. Called before the run's own is locked: parents before children (DRIVE-7)."""
        if self.parent is not None and tx.dialect != "sqlite":
            tx.one(LOCK_RUN, (self.parent.run_id,))

    def ended(
        self, tx: Tx, engine: Engine, status: str, *, workflow: str, now: int, result: bytes | None = None, error: str | None = None,
        reason: str | None = None,
    ) -> None:  # fmt: skip
        """The run has ended: settle the link that waits for it and wake the parent, if it still does.

        Who else may be here: another member of the same block. Both have locked the parent's row, so of two that are each other's
        last sibling the second finds that it is the last (test_two_children_of_a_block_that_end_at_once_are_both_told).

        Raises:
          MovedOn: the parent has to be driven, and no message for that was prepared.
        """
        parent = self.parent
        if parent is None:
            return
        if error is None and status == FlowStatus.CANCELLED:
            error = describe_error(FlowCancelledError(self.run_id, workflow, None, reason))
        if not tx.run(_SETTLE, (status, result, error, now, parent.run_id, parent.sequence, self.run_id)):
            return
        if not self.quiet:
            tx.run(WAKE, (now, parent.run_id))
        elif _is_quiet(tx, parent):
            tx.run(WAKE_SEEN, (parent.run_id,))
        else:
            raise MovedOn
        line = history.Line(_WORDS[status], sequence=parent.sequence, name=workflow, payload=result, error=error)
        _tell(tx, engine, parent.run_id, parent.workflow, now, line)

    def check(self, tx: Tx) -> None:
        """Called once the run's own row is locked, before anything is written about its children.

        Raises:
          MovedOn: the open links are not those that the messages were prepared for.
        """
        if _open(tx, self.run_id) != self.children:
            raise MovedOn

    def close(self, tx: Tx, engine: Engine, *, workflow: str, now: int, undone: bool) -> None:
        """Close the links that the run holds open, each by its policy (CHILD-3). ``undone``: the run's own work is undone as well."""
        for child in self.children:
            if not tx.run(_LET_GO, (now, self.run_id, child.sequence, child.child_id)):
                continue  # the very decision that ends the run has settled it
            if not child.is_asked:
                asked = "not waited for any more"
            else:
                request = FAIL if child.policy == ChildClosePolicy.FAIL else CANCEL if undone else ABORT
                asked = f"asked to end: {request}"
                if tx.run(_ASK, (request, now, child.child_id)):
                    line = history.Line(
                        history.FLOW_CLOSING, name=child.workflow, detail=f"{request}: its parent {self.run_id} has ended"
                    )
                    _tell(tx, engine, child.child_id, child.workflow, now, line)
            line = history.Line(
                history.CHILD_CANCELLED, sequence=child.sequence, name=child.workflow, detail=f"{child.child_id} is {asked}"
            )
            _tell(tx, engine, self.run_id, workflow, now, line)


def _tell(tx: Tx, engine: Engine, run_id: str, workflow: str, now: int, line: history.Line) -> None:
    """One change of a run that is not the one at hand, or that listeners hear of by itself."""
    engine.record(tx, run_id, now, [line])
    tx.after_commit(lambda: notify.changes(engine, run_id, workflow, now, [line]))


def family(engine: Engine, snapshot: Snapshot, *, ends: bool, completes: bool = False) -> Family | None:
    """The family of a run that is about to end (``ends``) or to be rolled back; ``None`` where nobody has to hear of it.

    ``snapshot`` is what the write rests on: where it holds no open link, there is none.
    """
    waits_for = ends and snapshot.parent is not None
    has_children = any(isinstance(entry, ChildEntry) and entry.is_live for entry in snapshot.entries)
    if not waits_for and not has_children:
        return None
    return engine.store.read(lambda tx: read(tx, snapshot.run_id, ends=waits_for, completes=completes))


def _is_quiet(tx: Tx, parent: Parent) -> bool:
    """Whether a child that completes leaves others of its parallel block at work; whether it does, the rows decide (PAR-2)."""
    row = tx.one(_BLOCK_OF, (parent.run_id, parent.sequence))
    if row is None or row[0] is None:
        return False
    members = (parent.run_id, row[0])
    return tx.one(_STEP_AT_WORK, members) is not None or tx.one(_CHILD_AT_WORK, (*members, parent.sequence)) is not None


def family_of(engine: Engine, run_id: str, *, ends: bool = True) -> Family:
    """As :func:`family`, for a run of which nothing is known."""
    return engine.store.read(lambda tx: read(tx, run_id, ends=ends))


def _open(tx: Tx, run_id: str) -> tuple[Open, ...]:
    return tuple(Open(*row) for row in tx.all(_OPEN, (run_id,)))


def read(tx: Tx, run_id: str, *, ends: bool = True, completes: bool = False) -> Family:
    """As :func:`family_of`, inside a transaction that is open already."""
    row = tx.one(_WAITS_FOR, (run_id,)) if ends else None
    parent = None if row is None else Parent(*row)
    children = _open(tx, run_id)
    sent_to = [(child.child_id, tx.one(_SENT_TO, (child.child_id,))) for child in children if child.is_asked]
    return Family(
        run_id,
        parent,
        completes and parent is not None and _is_quiet(tx, parent),
        children,
        tuple(Outgoing("drive", child_id, row[0], row[1], priority=row[2]) for child_id, row in sent_to if row is not None),
    )


def send_unsent(engine: Engine, run_id: str, sender: Sender) -> int:
    """Send the drives of a run's parent and children that were committed and whose messages never went out (DRIVE-3)."""
    if sender.joins:
        return 0

    def untold(tx: Tx) -> list[tuple[Any, ...]]:
        return [*tx.all(_UNTOLD_PARENT, (run_id,)), *tx.all(_UNTOLD_CHILDREN, (run_id,))]

    rows = engine.store.read(untold)
    if rows:
        outbox = sender.outbox(None)
        outbox.load([Outgoing("drive", row[0], row[1], row[2], priority=row[3]) for row in rows])
        outbox.delivered()
    return len(rows)


# --- run again when a signal comes (RSIG-4) --------------------------------------------------------------------------


def park(tx: Tx, run_id: str, park: Park) -> bool:
    """Keep the place of a child that has failed for a signal; false where its link has moved on."""
    entry = park.entry
    assert isinstance(entry, ChildEntry)
    return bool(tx.run(_PARK, (run_id, entry.sequence, entry.child_id, entry.cycle)))


def retry(tx: Tx, engine: Engine, snapshot: Snapshot, retry: Retry, *, now: int, sent_at: int | None) -> bool:
    """Start a new child run in the place of the one that failed; false where its link has moved on."""
    entry = retry.entry
    assert isinstance(entry, ChildEntry)
    assert retry.child_id is not None
    assert retry.start is not None
    row = tx.one(_ARGS, (snapshot.run_id, entry.sequence))
    if row is None or not tx.run(
        _RETRY, (retry.child_id, json.dumps(retry.start), snapshot.run_id, entry.sequence, entry.cycle)
    ):
        return False
    _start_run(tx, engine, snapshot, entry.sequence, child_id=retry.child_id, workflow=entry.workflow, args=bytes(row[0]),
               how=retry.start, now=now, sent_at=sent_at)  # fmt: skip
    return True


def fail(tx: Tx, run_id: str, failure: Failure, now: int) -> bool:
    """No signal starts it again; false where its link has moved on."""
    entry = failure.entry
    assert isinstance(entry, ChildEntry)
    return bool(tx.run(_FAIL, (failure.policy, now, run_id, entry.sequence, entry.cycle)))
