"""Why a run does not go on: what ``why`` tells (C57).

:func:`why` reads from a run's rows what it waits for, says which of the engine's dials acts on that next, and when, and what an
operator can do; the deciding reason comes first. It only reads, in a transaction of the caller's, a bounded number of the run's live
rows, and no payload. A dial is told as the settings that are handed in have it.

Names from rows are in the texts as they are stored, so whoever prints them makes control characters visible. A text that ends in a moment
has it beside it (``at``), because only a reader knows "now".

Long because each state that a run may be in has its words here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..clock import to_iso
from ..codec import load_error
from ..commands import command
from ..engine import liveness
from ..engine.claim import INLINE
from ..engine.retry_on_signal import Stored
from ..errors import is_named
from .rows import UNDONE_AT, UNENDED
from .sweep import LONG_RUNNING_MS

if TYPE_CHECKING:
    from ..settings import Repair, Settings
    from ..store.database import Tx

#: Rows of one kind that are told one by one; of more, how many there are.
TOLD = 20

_RUN_COLUMNS = (
    "id", "workflow", "queue", "status", "rollback", "ends_as", "wakes", "wakes_seen", "woken_at", "hold_count", "hold_until",
    "hold_error", "expires_at", "expiry_attempts", "expiry_after", "parent_id", "close_request", "repair_attempts", "repair_after",
    "created_at", "ended_at", "error", "rollback_error",
)  # fmt: skip
_RUN = f"SELECT {', '.join(_RUN_COLUMNS)} FROM {{flow_runs}} WHERE id = ?"
_ROW = (
    "sequence, actor, queue, status, attempts, tries, worker_id, next_try_at, reclaim_stale_at, repair_attempts, repair_after, created_at, "
    f"started_at, error, {liveness.seen_sql('worker_id')}, claims, "
)
_STEPS = (
    f"SELECT {_ROW}expires_at, cycle, retry_policy FROM {{action_runs}} "
    "WHERE run_id = ? AND ended_at IS NULL AND held_back = FALSE ORDER BY sequence LIMIT ?"
)
_COUNT_STEPS = "SELECT COUNT(*) FROM {action_runs} WHERE run_id = ? AND ended_at IS NULL AND held_back = FALSE"
_UNDOS = (
    f"SELECT {_ROW}not_before, sent_at, level, policy FROM {{compensation_runs}} "
    "WHERE run_id = ? AND ended_at IS NULL AND given_up = FALSE ORDER BY level, sequence DESC LIMIT ?"
)
_LEVELS = (
    "SELECT level, COUNT(*) FROM {compensation_runs} WHERE run_id = ? AND ended_at IS NULL AND given_up = FALSE "
    "GROUP BY level ORDER BY level"
)
_UNENDED = f"SELECT {UNDONE_AT} FROM {{flow_runs}} r WHERE r.id = ? AND {UNENDED}"
_BODY = f"SELECT worker_id, {liveness.seen_sql('worker_id')} FROM {{action_runs}} WHERE run_id = ? AND sequence = ?"
_FAILED_UNDOS = (
    "SELECT sequence, actor, level, error FROM {compensation_runs} WHERE run_id = ? AND status = 'failed' AND given_up = TRUE "
    "ORDER BY level, sequence DESC LIMIT ?"
)
_INLINE = tuple(
    f"SELECT 1 FROM {{{table}}} WHERE run_id = ? AND ended_at IS NULL AND status = 'running' "
    f"AND SUBSTR(delivery, 1, {len(INLINE)}) = '{INLINE}' LIMIT 1"
    for table in ("action_runs", "compensation_runs")
)
_WAITS = "SELECT sequence, kind, name, due_at, created_at FROM {waits} WHERE run_id = ? AND status = 'waiting' ORDER BY sequence LIMIT ?"
_CHILDREN = (
    "SELECT c.sequence, c.workflow, c.child_id, c.status, c.created_at, c.cycle, c.retry_policy, f.status, f.hold_until "
    "FROM {children} c LEFT JOIN {flow_runs} f ON f.id = c.child_id WHERE c.run_id = ? AND c.ended_at IS NULL ORDER BY c.sequence LIMIT ?"
)
_BLOCKS = (
    "SELECT sequence, kind, size, created_at FROM {blocks} WHERE run_id = ? AND ended_at IS NULL ORDER BY sequence LIMIT ?"
)
_HELD_BACK = (
    "SELECT block, COUNT(*) FROM {action_runs} WHERE run_id = ? AND ended_at IS NULL AND held_back = TRUE GROUP BY block"
)
_OPEN_MEMBERS = tuple(
    f"SELECT block, COUNT(*) FROM {{{table}}} WHERE run_id = ? AND block IS NOT NULL AND ended_at IS NULL GROUP BY block"
    for table in ("action_runs", "children", "blocks")
)


@dataclass(frozen=True, slots=True)
class Post:
    """A message of a run, as a database broker keeps it. ``state`` is ``ready``, ``delayed``, ``reserved`` or ``dead``.

    ``at`` is when it was sent, is due, when its reservation runs out, or when it died. ``kind`` is what it asks for.
    """

    kind: str
    sequence: int | None
    state: str
    queue: str
    at: int
    number: int


@dataclass(frozen=True, slots=True)
class Posts:
    """What can be known of a run's messages.

    ``found`` is ``None`` where they cannot be seen from here. ``certain``: what is not in ``found`` does not exist. ``note`` says why
    not, where that is so.
    """

    found: tuple[Post, ...] | None
    certain: bool
    note: str | None = None

    def of(self, kind: str, sequence: int | None) -> tuple[Post, ...]:
        """Those that ask for one thing."""
        return tuple(post for post in self.found or () if (post.kind, post.sequence) == (kind, sequence))


@dataclass(frozen=True, slots=True)
class Act:
    """What would act next: ``by`` names the dial, ``on`` is false where it will not act. ``at``: when; ``None``: not known."""

    by: str
    text: str
    at: int | None = None
    on: bool = True


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that a run waits for.

    ``kind`` is a word for machines. ``lost`` says that its message does not exist any more, ``stuck`` that no dial will act on it.
    ``lease`` is what keeps others from a running row for as long as its worker is heard from (RECLAIM-5).
    """

    kind: str
    text: str
    at: int | None = None
    sequence: int | None = None
    name: str | None = None
    worker: str | None = None
    lease: liveness.Lease | None = None
    error: dict[str, Any] | None = None
    child_id: str | None = None
    messages: tuple[Post, ...] = ()
    lost: bool = False
    acts: tuple[Act, ...] = ()
    advice: tuple[str, ...] = ()
    rank: int = field(default=3, compare=False)

    @property
    def stuck(self) -> bool:
        """Whether something has to be done by hand."""
        return bool(self.acts) and not any(act.on for act in self.acts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        error = self.error and {"type": self.error.get("type"), "message": self.error.get("message")}
        return {
            "kind": self.kind, "text": self.text, "at": to_iso(self.at), "sequence": self.sequence, "name": self.name,
            "worker": self.worker, **liveness.as_plain(self.lease), "child_id": self.child_id, "error": error, "stuck": self.stuck,
            "lost": self.lost,
            "messages": [
                {"kind": one.kind, "sequence": one.sequence, "state": one.state, "queue": one.queue, "at": to_iso(one.at), "id": one.number}
                for one in self.messages
            ],
            "next": [{"by": act.by, "text": act.text, "at": to_iso(act.at), "on": act.on} for act in self.acts],
            "advice": list(self.advice),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run does not go on: at least one reason, the deciding one first.

    ``messages_note`` says what cannot be known of its messages. ``more`` counts what is not told one by one.
    """

    run_id: str
    workflow: str
    status: str
    rollback: str
    reasons: tuple[Reason, ...]
    messages_note: str | None
    more: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "run_id": self.run_id, "workflow": self.workflow, "status": self.status, "rollback": self.rollback,
            "reasons": [reason.as_dict() for reason in self.reasons], "messages": self.messages_note, "more": self.more,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Declared:
    """The workflows and actors that the application declares."""

    workflows: Collection[str]
    actors: Collection[str]


def why(
    tx: Tx, run_id: str, *, settings: Settings, now: int, posts: Posts, declared: Declared | None = None
) -> Explanation | None:
    """Why a run does not go on, from one snapshot; ``None`` where there is no such run. ``now`` is in milliseconds.

    ``declared`` is ``None`` where the application is not known.
    """
    row = tx.one(_RUN, (run_id,))
    if row is None:
        return None
    run = dict(zip(_RUN_COLUMNS, row, strict=True))
    inline = runs_inline(tx, run_id)
    if inline:
        posts = replace(posts, certain=False, note="its caller's process is at it (run_sync), which has none and needs none")
    asking = _Asking(tx, run, settings, now, posts)
    asking.inline = inline
    asking.declared = declared
    if run["rollback"] == "running":
        reasons = list(asking.rolling_back())
    elif run["ended_at"] is not None:
        reasons = list(asking.ended())
    else:
        reasons = list(asking.live())
    # What nothing will move decides before what moves by itself, and what acts first before what acts later.
    reasons.sort(key=lambda reason: (reason.rank, not reason.stuck, not reason.lost, reason.sequence or 0))
    return Explanation(run_id, run["workflow"], run["status"], run["rollback"], tuple(reasons), posts.note, asking.more)


def runs_inline(tx: Tx, run_id: str) -> bool:
    """Whether a loop in its caller's process is at a step or an undo of the run: it has no messages, so none is missing (SYNC-1).

    test_a_step_that_run_sync_is_at_is_not_called_lost
    """
    return any(tx.one(sql, (run_id,)) is not None for sql in _INLINE)


class _Asking:
    """One run that is asked about."""

    def __init__(self, tx: Tx, run: dict[str, Any], settings: Settings, now: int, posts: Posts) -> None:
        self.tx, self.run, self.settings, self.now, self.posts = tx, run, settings, now, posts
        self.id: str = run["id"]
        self.more = 0
        self.declared: Declared | None = None
        self.inline = False

    def _all(self, sql: str) -> list[Any]:
        return list(self.tx.all(sql, (self.id, TOLD) if "LIMIT" in sql else (self.id,)))

    # --- over --------------------------------------------------------------------------------------------------------

    def ended(self) -> Iterator[Reason]:
        run = self.run
        if run["rollback"] != "halted":
            undone = {"done": ", its rollback is done", "none": ""}.get(run["rollback"], "")
            yield Reason(
                "ended", f"it has ended as {run['status']}{undone}: nothing is waited for, since", run["ended_at"],
                error=_error(run["error"]), rank=0,
            )  # fmt: skip
            return
        yield Reason(
            "halted", f"it is {run['status']}, and its rollback has halted: what follows the failed undo was not undone, since",
            run["ended_at"], error=_error(run["rollback_error"]), rank=0,
            acts=(Act("nothing", "a halted rollback never goes on by itself", on=False),),
            advice=(f"mend the cause, then: {command('resume-rollback', self.id)}",),
        )  # fmt: skip
        for sequence, actor, level, error in self._all(_FAILED_UNDOS):
            yield Reason(
                "undo_failed", f"the undo at level {level} has failed for good", sequence=sequence, name=actor or None,
                error=_error(error), rank=1,
            )  # fmt: skip
        left = sum(count for _, count in self._all(_LEVELS))
        if left:
            yield Reason("undos_follow", f"{_count(left, 'undo')} behind it {'was' if left == 1 else 'were'} not begun", rank=4)

    # --- rolling back ------------------------------------------------------------------------------------------------

    def rolling_back(self) -> Iterator[Reason]:
        run = self.run
        ends = f"to end as {run['ends_as']}" if run["ended_at"] is None else "resumed after it had halted"
        unended = self.tx.one(_UNENDED, (self.id, self.now))
        levels = self._all(_LEVELS)
        if unended is not None or not levels:
            yield self._unended(ends, (unended and unended[0]) or run["created_at"])
            return
        level, open_here = levels[0]
        told = [row for row in self._all(_UNDOS) if row[18] == level]
        for row in told:
            *common, not_before, sent_at, _, policy = row
            then = "goes on" if policy == "continue" else "halts"
            reason = self._row("undo", common, since=max(common[11], sent_at or 0), not_before=not_before)
            yield replace(reason, text=f"level {level}, the rollback {then} if it fails for good; {reason.text}")
        self.more += open_here - len(told)
        behind = sum(count for _, count in levels[1:])
        later = f"{_count(behind, 'undo')} of later levels {_follow(behind)}" if behind else "no level follows"
        yield Reason("rolling_back", f"it is rolled back ({ends}): level {level} is at work, {later}", rank=4)

    def _unended(self, ends: str, since: int) -> Reason:
        """Any message of the run has the rollback looked at again; where there is none, the doctor."""
        run = self.run
        posts = tuple(post for post in self.posts.found or () if post.kind != "timer")
        lost = self._lost(posts)
        return Reason(
            "rolling_back",
            f"it is rolled back ({ends}); nothing is left to be undone, and the end of the rollback is not recorded"
            f"{_LOST if lost else ''}, since",
            since, messages=posts, lost=lost, rank=2,
            acts=(*self._comes(posts), self._doctor("R2", since, run["repair_attempts"], run["repair_after"])),
            advice=self._deliver(posts, run["queue"], lost=lost),
        )  # fmt: skip

    # --- under way ---------------------------------------------------------------------------------------------------

    def live(self) -> Iterator[Reason]:
        run, found = self.run, False
        for reason in (*self._run_itself(), *self._rows()):
            found = found or reason.kind != "deadline"
            yield reason
        if not found:
            yield Reason(
                "nothing", "nothing is recorded that it waits for: a worker is about to record what follows, or has died before that",
                messages=self.posts.of("drive", None), rank=2, acts=(Act("drive", "the delivery that is at work, or comes again"),),
                advice=(f"if it stays so: {self._kick()}",),
            )  # fmt: skip
        if run["expires_at"] is not None and not run["expiry_attempts"] and run["expires_at"] > self.now:
            yield Reason("deadline", "its own deadline: it is undone and ends as expired at", run["expires_at"], rank=5,
                         acts=(self._due("the run's deadline", run["expires_at"]),))  # fmt: skip

    def _run_itself(self) -> Iterator[Reason]:
        run = self.run
        expires_at, attempts = run["expires_at"], run["expiry_attempts"]
        if expires_at is not None and expires_at <= self.now:
            if attempts:
                act = Act("monitor", "its rollback is tried again, in the first sweep after", run["expiry_after"])
                yield Reason(
                    "overdue", f"it is overdue, and its rollback could not be planned {_times(attempts)}, since", expires_at,
                    error=_error(run["hold_error"]), acts=(act,), rank=0,
                    advice=(_mend(run["hold_error"]), f"or end it, undoing nothing: {command('cancel', self.id, options='--keep')}"),
                )  # fmt: skip
            else:
                yield Reason("overdue", "it is overdue and is to be undone, since", expires_at, rank=0,
                             acts=(self._due("the run's deadline", expires_at),))  # fmt: skip
        if run["hold_until"] is not None or run["hold_error"] is not None:
            unseen = run["wakes"] > run["wakes_seen"] and run["hold_until"] is not None
            yield Reason(
                "held", f"it is held ({_times(run['hold_count'])}): its code and its history do not fit, or a drive met a fault"
                + ("; not driven again before" if run["hold_until"] is not None else ""),
                run["hold_until"], error=_error(run["hold_error"]), rank=0,
                acts=(Act("monitor", "a sweep drives it again; the first one after" if unseen else "nothing drives it by itself",
                          run["hold_until"] if unseen else None, on=unseen),),
                advice=(_mend(run["hold_error"]), f"then, not to wait for the window: {self._kick()}"),
            )  # fmt: skip
        elif run["wakes"] > run["wakes_seen"]:
            yield self._undriven()
        if self.declared is not None and run["workflow"] not in self.declared.workflows:
            yield Reason(
                "undeclared", f"its workflow {run['workflow']} is not declared by the application: no worker of it can drive the run",
                rank=1, advice=("deploy the module that declares it",),
            )  # fmt: skip
        if run["close_request"] is not None:
            yield Reason(
                "close_request", f"its parent {run['parent_id']} has ended and asks it to end ({run['close_request']}); a drive does that",
                rank=1,
            )  # fmt: skip

    def _undriven(self) -> Reason:
        run = self.run
        posts = self.posts.of("drive", None) + self.posts.of("timer", None)
        since = run["woken_at"] or run["created_at"]
        new = run["status"] == "pending"
        text = "no worker has started it" if new else "no drive has seen what has happened to it"
        act = self._doctor("R2", since, run["repair_attempts"], run["repair_after"])
        drive = self.posts.of("drive", None)
        lost = self._lost([post for post in self.posts.found or () if post.kind != "timer"])
        return Reason(
            "start" if new else "drive", f"{text}{_LOST if lost else ''}, since", since, messages=drive or posts, lost=lost, rank=2,
            acts=(*self._comes(drive), act),
            advice=self._deliver(drive, run["queue"], lost=lost),
        )  # fmt: skip

    def _rows(self) -> Iterator[Reason]:
        """Steps, waits, children and blocks that are open."""
        waits = self._all(_WAITS)
        parked = {sequence: (name, due_at, since) for sequence, kind, name, due_at, since in waits if kind == "retry"}
        steps = self._all(_STEPS)
        for row in steps:
            *common, expires_at, cycle, policy = row
            if common[3] == "awaiting_retry":
                yield self._parked(
                    "parked_step", common[0], common[1], cycle, policy, parked.get(common[0]), _error(common[13])
                )
                continue
            reason = self._row("step", common, since=common[11], not_before=None)
            if expires_at is not None:
                reason = replace(reason, acts=(*reason.acts, self._due("the step's deadline", expires_at)))
            yield reason
        for sequence, kind, name, due_at, since in waits:
            if kind != "retry":
                yield self._wait(sequence, kind, name, due_at, since)
        children = self._all(_CHILDREN)
        for sequence, workflow, child_id, status, since, cycle, policy, child_status, child_held in children:
            if status == "awaiting_retry":
                yield self._parked("parked_child", sequence, workflow, cycle, policy, parked.get(sequence), None)
            else:
                stands = "held" if child_held is not None else child_status or "not there any more"
                yield Reason(
                    "child", f"child run {child_id} is {stands}; waited for since", since, sequence, workflow, child_id=child_id,
                    advice=(f"ask there: {command('why', child_id)}",) if child_status else (self._kick(),),
                )  # fmt: skip
        if len(steps) == TOLD:
            count = self.tx.one(_COUNT_STEPS, (self.id,))
            self.more += (count[0] if count else 0) - len(steps)
        yield from self._blocks()

    def _blocks(self) -> Iterator[Reason]:
        blocks = self._all(_BLOCKS)
        if not blocks:
            return
        members: dict[int, int] = {}
        for sql in _OPEN_MEMBERS:
            for block, count in self._all(sql):
                members[block] = members.get(block, 0) + count
        held_back = dict(self._all(_HELD_BACK))
        for sequence, kind, size, since in blocks:
            waiting = held_back.get(sequence)
            turn = f", {waiting} of them held back until another member has ended" if waiting else ""
            yield Reason(
                "block",
                f"{kind} block with {members.get(sequence, 0)} of {size} members open{turn}, since",
                since,
                sequence,
                kind,
                rank=4,
            )

    def _wait(self, sequence: int, kind: str, name: str | None, due_at: int | None, since: int) -> Reason:
        acts = () if due_at is None else (self._due("the wait's deadline" if kind == "signal" else "the timer", due_at),)
        until = "until" if due_at is not None else "without a deadline, since"
        if kind == "timer":
            return Reason(
                "timer",
                f"it sleeps {until}",
                due_at or since,
                sequence,
                "timer",
                acts=acts,
                messages=self.posts.of("timer", None),
            )
        advice = (f"if the signal is not coming by itself: {command('signal', self.id, name or '')}",)
        return Reason(
            "signal", f"it waits for signal {name} {until}", due_at or since, sequence, name, acts=acts, advice=advice
        )

    def _parked(
        self, kind: str, sequence: int, name: str, cycle: int, policy: str | None, wait: tuple[Any, ...] | None,
        error: dict[str, Any] | None,
    ) -> Reason:  # fmt: skip
        stored = Stored.read(policy) if policy is not None else None
        signal, due_at, since = wait or (stored.signal if stored else None, None, None)
        cap = stored.max_retries if stored is not None else None
        used = f"{cycle} of {cap}" if cap is not None else f"{cycle}, without a limit,"
        until = "; waits until" if due_at is not None else "; without a deadline, since"
        acts = () if due_at is None else (self._due("the wait's deadline: it has then failed for good", due_at),)
        return Reason(
            kind, f"it has failed for good and is parked for signal {signal} ({used} used){until}", due_at or since, sequence, name,
            error=error, acts=acts,
            advice=(f"mend the cause, then: {command('signal', self.id, signal or '')}, or {command('signal-retry', self.id)}",),
        )  # fmt: skip

    # --- a step, or an undo ------------------------------------------------------------------------------------------

    def _row(self, what: str, row: Sequence[Any], *, since: int, not_before: int | None) -> Reason:
        (sequence, actor, queue, status, attempts, tries, worker, next_try_at, reclaim_at, repairs, repair_after, _, started_at,
         error, seen_at, claims) = row  # fmt: skip
        posts = self.posts.of("compensation" if what == "undo" else "step", sequence)
        lost = self._lost(posts)
        unknown = ""
        if self.declared is not None and actor not in self.declared.actors:
            unknown = f", and the application declares no actor {actor}"
        known: dict[str, Any] = {"sequence": sequence, "name": actor, "error": _error(error), "messages": posts}
        if status == "running":
            known |= {"worker": worker, "lease": liveness.lease_behind(self.settings, worker, seen_at)}
            held = f"running on worker {liveness.name_of(worker)} (claim {attempts}, try {tries + 1})"
            if known["lease"] is None and reclaim_at is None:
                return self._never_reclaimed(what, held, known, started_at)
            return self._running(what, queue, known, held, started_at, reclaim_at, repairs, repair_after)
        if status == "failed":
            retry = Act("native retry", f"try {tries + 1}, as its actor's retries say, at", next_try_at, on=not lost)
            doctor = self._doctor("R1", next_try_at or since, repairs, repair_after)
            return Reason(
                f"{what}_between_tries", f"between tries: {_times(tries, 'try', 'tries')} failed{_LOST if lost else ''}; the next is due at",
                next_try_at, lost=lost, acts=(retry, doctor), advice=self._deliver(posts, queue, lost=lost), **known,
            )  # fmt: skip
        if not_before is not None and not_before > self.now:
            return Reason(
                f"{what}_not_before", "the step that it undoes may still be at work; not before", not_before,
                acts=(*self._held(sequence), *self._comes(posts), self._doctor("R1", not_before, repairs, repair_after)), **known,
            )  # fmt: skip
        ready = any(post.state == "ready" for post in posts)
        unless = "older messages wait in its queue" if ready else ""
        doctor = self._doctor("R1", max(since, not_before or 0, next_try_at or 0), repairs, repair_after, unless=unless)
        kind, text, at = f"{what}_pending", "no worker has taken it", since
        begun = started_at is not None and attempts > tries
        if begun and next_try_at is not None:
            kind, at = f"{what}_suspect", next_try_at
            text = (
                f"it was claimed {_times(claims)} and never reported: its worker is gone, and may have died of it; it waits for its turn among "
                "such steps"
            )
        elif begun:
            text = f"it was given back, and may have done its work (claim {attempts}); no worker has taken it again"
            at = started_at
        when = "; its message comes again at" if kind.endswith("_suspect") else ", since"
        return Reason(
            kind, f"{text}{_LOST if lost else ''}{unknown}{when}", at, lost=lost,
            acts=(*self._comes(posts), doctor), advice=self._deliver(posts, queue, lost=lost), **known,
        )  # fmt: skip

    def _held(self, sequence: int) -> tuple[Act, ...]:
        """What an undo waits for besides its moment: a worker that is heard from moves that on."""
        body = self.tx.one(_BODY, (self.id, sequence))
        lease = None if body is None else liveness.lease_behind(self.settings, *body)
        if body is None or lease is None:
            return ()
        worker = liveness.name_of(body[0])
        return (Act("lease", f"worker {worker} is at that step: heard from, it may move the moment on; last", lease.seen_at),)

    def _running(
        self, what: str, queue: str, known: dict[str, Any], held: str, started_at: int, reclaim_at: int | None,
        repairs: int, repair_after: int | None,
    ) -> Reason:  # fmt: skip
        lease: liveness.Lease | None = known["lease"]
        posts: tuple[Post, ...] = known["messages"]
        lost = self._lost(posts)
        comes = "when its message is delivered" if not lost else "once a message is sent for it (there is none)"
        takes = f"another worker may take it, {comes},"
        acts, free = [], [] if reclaim_at is None else [reclaim_at]  # free: from when on it is free, whatever its worker does
        stands = f"reclaim deadline {'passed' if reclaim_at is not None and reclaim_at <= self.now else 'ahead'}"
        if lease is not None and lease.is_over(self.now):
            stands = "whose lease is over"
            free.append(lease.ends_at)
            when = "since" if lease.ends_at else "now"
            acts.append(Act("lease", f"its worker is silent: {takes} {when}", lease.ends_at or None, on=not lost))
        elif lease is not None:
            stands = "whose lease holds"
            acts += [
                Act("worker", "it records the outcome when the body returns; last heard from", lease.seen_at),
                Act("lease", f"unless its worker is heard from before that, {takes} from", lease.ends_at, on=not lost),
            ]
        if reclaim_at is not None:
            acts.append(Act("reclaim", f"{takes} from", reclaim_at, on=not lost))
        passed = any(moment <= self.now for moment in free)
        since, unless = min(free, default=0), ""
        if lease is not None and (not free or lease.ends_at < since):
            since, unless = lease.ends_at, "its worker is heard from"
        doctor = self._doctor("R3", since, repairs, repair_after, unless=unless)
        advice = self._deliver(posts, queue, lost=lost) if passed else ()
        if passed and not advice and not doctor.on:
            advice = (f"its worker keeps its message for as long as it lives; not to wait for it: {self._kick()}",)
        return Reason(
            f"{what}_running", f"{held}, {stands}, since", started_at, lost=passed and lost, acts=(*acts, doctor), advice=advice, **known
        )  # fmt: skip

    def _never_reclaimed(self, what: str, held: str, known: dict[str, Any], started_at: int) -> Reason:
        """A row that nothing takes from its worker (RECLAIM-4).

        A living worker keeps its message, so one without a message is mostly dead. It may have been cut off from the queue as well, when a
        clock was set or its machine slept.
        """
        long = self.now - started_at >= LONG_RUNNING_MS
        posts: tuple[Post, ...] = known["messages"]
        kept = any(post.state != "dead" for post in posts)
        lost = self._lost(posts)
        unknown = not (kept or lost or self.inline)
        gone = f"if its worker is gone,{' and its message lost,' if unknown else ''}"
        if what == "undo" and kept:
            advice = "if its worker is gone, let its message come back to a worker: that ends its level"
        elif what == "undo":
            advice = f"{gone} find out what it did, then: {command('abandon-undo', self.id, str(known['sequence']))}"
        else:
            advice = f"{gone} find out what it did, then: {command('cancel', self.id, options='--compensate')}, or --keep"
        act = Act("reclaim", "it is off for this row: nothing will ever take it from its worker", on=False)
        report = [Act("worker", "its worker records the outcome when the body returns")]
        if lost:
            report = [Act("worker", "one that lives keeps its message, so this one is mostly dead: look at it", on=False)]
        elif what == "undo" and not self.inline:
            report.append(
                Act("message", "its message, if it is delivered again, ends its level without it, as if it had failed for good")
            )
        unleased = Act("lease", "it was claimed under a heartbeat, and leases are off (reclaim.dead_workers.enabled)", on=False)
        off = (unleased, act) if liveness.is_watched(known["worker"]) else (act,)
        return Reason(
            f"{what}_running", f"{held}, without a reclaim deadline{_LOST if lost else ''}, since", started_at, lost=lost,
            acts=off if long else (*report, *off), advice=() if kept and not long else (advice,), **known,
        )  # fmt: skip

    # --- what acts next ----------------------------------------------------------------------------------------------

    def _lost(self, posts: Sequence[Post]) -> bool:
        """Whether it is certain that no message will come (a dead letter comes by itself never)."""
        return self.posts.certain and not any(post.state != "dead" for post in posts)

    def _comes(self, posts: Sequence[Post]) -> tuple[Act, ...]:
        """What the message that exists does; without sight of it, that it may exist."""
        alive = [post for post in posts if post.state != "dead"]
        if alive:
            return (Act("message", "a worker of its queue takes its message"),)
        return () if self.posts.certain else (Act("message", "its message, if there still is one"),)

    def _deliver(self, posts: Sequence[Post], queue: str, *, lost: bool) -> tuple[str, ...]:
        dead = [post for post in posts if post.state == "dead"]
        if any(post.state == "ready" for post in posts):
            return (f"see that workers of queue {queue} run, and have a thread free",)
        if lost or dead:
            return (
                f"not to wait for the doctor, or where it is off: {self._kick()}",
                *(f"its message is dead letter {post.number}: dramatiq-saga queues" for post in dead[:1]),
            )
        return () if self.posts.certain else (f"if its message is lost: {self._kick()}",)

    def _kick(self) -> str:
        return command("kick", self.id)

    def _due(self, what: str, at: int) -> Act:
        """A deadline: workers look at it, with a sweep as the net under them."""
        if at <= self.now:
            return Act("deadline", f"{what} has passed: a worker, or the next sweep (monitor), ends it; due since", at)
        return Act("deadline", f"{what}: a worker, or the first sweep (monitor) after it, ends it at", at)

    def _doctor(self, rule: str, since: int, repairs: int, repair_after: int | None, *, unless: str = "") -> Act:
        repair = self.settings.repair
        if repairs >= repair.max_attempts:
            return Act(
                rule, f"the doctor has spent its {_count(repairs, 'repair')} on it: only a kick sends it again", on=False
            )
        unknown = self.declared is None and not repair.enabled
        off = switched_off(rule, repair) if repair.enabled or unknown else "repair.enabled"
        if off is not None:
            return Act(rule, f"the doctor is off for it ({off})", on=False)
        grace = 0 if rule == "R3" else int(repair.grace_seconds * 1000)
        spent = f" ({repairs} of {repair.max_attempts} repairs spent)" if repairs else ""
        at = max(since + grace, repair_after or 0)
        when = "in the next sweep; due since" if at <= self.now else "in the first sweep after"
        who = "the doctor, if the application has it on (repair.enabled, not known without --app)," if unknown else "the doctor"
        return Act(rule, f"{unless and f'unless {unless}, '}{who} sends its message again{spent}, {when}", at)


_LOST = ", and no message for it exists"


def switched_off(rule: str, repair: Repair) -> str | None:
    """The dial that keeps a rule from acting."""
    name = {"R1": "redispatch_lost_actions", "R2": "wake_stuck_flows", "R3": "redispatch_stale_running_actions"}[rule]
    return None if getattr(repair, name) else f"repair.{name}"


def hangs(error: str | None) -> bool:
    """Whether a recorded error says that a workflow's function did not come back: a replay of one's own would not either."""
    return error is not None and is_named((str(load_error(error).get("type")),), "WorkflowStalledError")


def _mend(error: str | None) -> str:
    """What a run needs whose drive, or whose plan, has failed."""
    if hangs(error):
        return "find out what its function waits for (py-spy dump shows where it stands), and deploy code that does not"
    return "deploy code that fits its history (dramatiq-saga verify says what would not fit)"


def _error(text: str | None) -> dict[str, Any] | None:
    return load_error(text) if text else None


def _times(number: int, one: str = "time", many: str = "times") -> str:
    return f"{number} {one if number == 1 else many}"


def _count(number: int, noun: str) -> str:
    return _times(number, noun, f"{noun}s")


def _follow(number: int) -> str:
    return "follows" if number == 1 else "follow"
