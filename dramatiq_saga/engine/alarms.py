"""Alarms: with a broker that joins the transaction, what will be due in a run is carried by a delayed message (TIMER-1).

A message of kind "timer" says "look at what is due in this run" and nothing else. A run has at most one that counts: its row holds
the moment of it (``timer_at``). The invariant: while the run is live, ``timer_at`` is not later than any of its deadlines and waits,
and a message that is due then is on its way. Whoever creates a deadline calls :func:`for_decision` or :func:`for_run` and stages the
alarm in the same transaction; where an earlier one stands already, nothing is sent. When it has gone off, ``timers.py`` sets the next. One that
an earlier one came before stays on its way: its moment is kept (``timer_last``), and it is not sent a second time.

So a thousand members of a block that share a deadline cost one message, and a step with a deadline that is long done costs none.
With a broker of another kind there are no alarms: a loop in the workers looks for what is due (``recovery/timer_loop.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rows import ChildEntry, Outgoing

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Sender
    from .rows import Decision, More, Snapshot

# The run's row is locked by whoever stages an alarm: no other can be set between the look and the write.
# (MySQL assigns from left to right: the old moment is read before it is overwritten.)
_SET = (
    "UPDATE {flow_runs} SET timer_last = CASE WHEN timer_at > COALESCE(timer_last, 0) THEN timer_at ELSE timer_last END, timer_at = ? "
    "WHERE id = ? AND (timer_at IS NULL OR timer_at > ?)"
)
_DEADLINES = "SELECT sequence, expires_at FROM {action_runs} WHERE run_id = ? AND expires_at IS NOT NULL"


class Alarm:
    """The message that is due at ``at``, on its way into a transaction that creates a deadline."""

    def __init__(self, sender: Sender, message: Outgoing, at: int) -> None:
        self.run_id = message.run_id
        self.at = at
        self._outbox = sender.outbox(None)
        self._outbox.load([message])
        self._staged = False

    def stage(self, tx: Tx) -> None:
        """Send it with the transaction, unless an earlier one is on its way."""
        self._staged = bool(tx.run(_SET, (self.at, self.run_id, self.at)))
        if self._staged:
            self._outbox.stage(tx)

    def delivered(self) -> None:
        """The transaction has committed."""
        if self._staged:
            self._outbox.delivered()


def message(run_id: str, workflow: str, queue: str, *, priority: int | None, at: int, now: int) -> Outgoing:
    """A message of kind "timer", due at ``at``."""
    return Outgoing("timer", run_id, workflow, queue, priority=priority, delay=max(0, at - now), at=at)


def for_run(
    sender: Sender, run_id: str, workflow: str, queue: str, *, priority: int | None, at: int | None, now: int
) -> Alarm | None:
    """The alarm for a deadline of a run; ``None`` where there is none, or no message can carry it."""
    if at is None or not sender.rings:
        return None
    return Alarm(sender, message(run_id, workflow, queue, priority=priority, at=at, now=now), at)


def for_decision(engine: Engine, sender: Sender, snapshot: Snapshot, decision: Decision, *, now: int) -> list[Alarm]:
    """The alarms for what ``decision`` creates: one for the run's earliest new deadline, and one for each child run with a deadline."""
    if not sender.rings or decision.kind != "suspended":
        return []
    moments = [step.expires_at for step in decision.steps if step.expires_at is not None]
    more = decision.more
    if more is not None:
        moments += [wait.due_at for wait in more.waits if wait.due_at is not None and wait.signal is None]
        moments += [park.due_at for park in more.parks if park.due_at is not None]
        if more.parks or more.retries:  # rows that had ended are open again, with the deadline that they had
            again = {park.entry.sequence for park in more.parks} | {retry.entry.sequence for retry in more.retries}
            rows = engine.store.read(lambda tx: tx.all(_DEADLINES, (snapshot.run_id,)))
            moments += [expires_at for sequence, expires_at in rows if sequence in again]
    at = min(moments, default=None)
    alarm = for_run(sender, snapshot.run_id, snapshot.workflow, snapshot.queue, priority=snapshot.priority, at=at, now=now)
    found = [] if alarm is None else [alarm]
    if more is not None and (more.children or more.retries):
        found += _for_children(sender, more, now)
    return found


def _for_children(sender: Sender, more: More, now: int) -> list[Alarm]:
    starts = [(child.child_id, child.workflow, child.start) for child in more.children]
    starts += [
        (retry.child_id, retry.entry.workflow, retry.start) for retry in more.retries
        if retry.child_id is not None and retry.start is not None and isinstance(retry.entry, ChildEntry)
    ]  # fmt: skip
    alarms = [
        for_run(
            sender, child_id, workflow, start["queue"], priority=start.get("priority"), at=child_deadline(start, now), now=now
        )
        for child_id, workflow, start in starts
    ]
    return [alarm for alarm in alarms if alarm is not None]


def child_deadline(start: dict[str, Any], now: int) -> int | None:
    """The deadline of a child run that is started ``now``, by what its parent has recorded of its start."""
    at: int | None = start.get("expires_at")
    if at is None and start.get("expires_in_ms") is not None:
        return now + int(start["expires_in_ms"])
    return at
