"""Retry on signal: what failed for good waits for a signal, and runs again in its row when that comes (RSIG-1 … RSIG-4).

The fence writes a failure for good as ``failed``; what comes of it is decided by the replay that sees it first, because ``only`` and
``when`` are code, and it is decided once: the decision parks the row, runs it again for a signal that has come already, or settles the
failure, and writes into the stored policy why its retries are over. A replay that finds any of these asks nobody again.

Signal, budget and wait are those that were stored when the step was scheduled. Who else may be here: the timeout of the same wait (one
conditional ``UPDATE``, one winner), the end of the run (which closes the wait), another decision. Proven by
``tests/conformance/engine/test_retry_on_signal.py`` and ``tests/races/test_retry_on_signal.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..codec import load_error
from ..errors import (
    ChildError,
    FlowError,
    FlowNotFoundError,
    NothingAwaitsRetryError,
    ResultNotSerializableError,
    StepFailedError,
    is_named,
    qualified_name,
)
from ..journal import history
from . import signals
from .rows import BlockEntry, ChildEntry, ReceivedSignal, StepEntry
from .wakes import WAKE

if TYPE_CHECKING:
    from ..store.database import Tx
    from .core import Engine, Sender
    from .replay import Replay

_RUN = "SELECT workflow, queue, priority FROM {flow_runs} WHERE id = ?"
_LOCK = "SELECT status FROM {flow_runs} WHERE id = ?{for_update}"
_OPEN = (
    "SELECT sequence, name, cycle FROM {waits} WHERE run_id = ? AND kind = 'retry' AND status = 'waiting' "
    "AND (due_at IS NULL OR due_at > ?) ORDER BY sequence{for_update}"
)

_DONE_ALREADY = qualified_name(ResultNotSerializableError)

#: Why a row is not run again, as its stored policy says it.
SPENT = "spent"  # its budget is
REFUSED = "refused"  # by ``only`` or ``when``
THREW = "threw"  # ``when`` did, which counts as no
DONE_ALREADY = "done_already"  # its work is done, only the result could not be kept (CODEC-2)
TIMED_OUT = "timed_out"  # no signal came in time
BLOCK_FAILED = "block_failed"  # another member has failed its block, whose members get no further try (PAR-4)
WITHDRAWN = "withdrawn"  # its wait was closed by somebody else


@dataclass(frozen=True, slots=True)
class Stored:
    """The part of a policy that is kept with the row."""

    signal: str
    max_retries: int | None = None
    wait_ms: int | None = None
    over: str | None = None  # why nothing will run it again, once that is so

    @classmethod
    def read(cls, text: str) -> Stored:
        return cls(**json.loads(text))

    def text(self) -> str:
        """As the row holds it."""
        return json.dumps(
            {"signal": self.signal, "max_retries": self.max_retries, "wait_ms": self.wait_ms}
            | ({} if self.over is None else {"over": self.over}),
            ensure_ascii=False,
        )


@dataclass(frozen=True, slots=True)
class RetryContext:
    """What a policy's ``when`` is asked with, once per failure.

    ``actor_name`` is the child's workflow for a child, and ``child_run_id`` the run that failed. ``cycles_spent`` counts the signals
    that have run it again before, out of ``cap`` (``None``: no limit); ``executions`` counts how often it was begun in all, tries
    included. ``failure`` is the error that the workflow would see.
    """

    run_id: str
    workflow_name: str
    actor_name: str
    sequence: int
    signal: str
    cycles_spent: int
    cap: int | None
    executions: int
    failure: FlowError
    child_run_id: str | None = None


class Rule(Protocol):
    """The part of a policy that is code."""

    @property
    def only(self) -> Any: ...  # exception classes, or None
    @property
    def when(self) -> Callable[[RetryContext], Any] | None: ...


def look(
    replay: Replay,
    entry: StepEntry | ChildEntry,
    rule: Rule | None,
    *,
    failure: Callable[[], FlowError],
    again: Callable[[ReceivedSignal | None], StepEntry | ChildEntry] | None = None,
) -> StepEntry | ChildEntry:
    """``entry`` as it stands once its retries on signal have had their say; what this changes is part of the decision (RSIG-2).

    ``failure`` makes the error that the function would see. ``again`` has it run once more, where that takes more than
    ``replay.retry`` knows: a child needs a new run.
    """
    if entry.extra.retry is None:
        return entry
    stored = Stored.read(entry.extra.retry)
    run_again = again or (lambda signal: replay.retry(entry, signal))
    if entry.status == "awaiting_retry":
        wait = entry.extra.wait
        if wait is None or wait.status == "waiting":
            return entry
        if wait.status == "consumed":
            return run_again(None)
        return _over(replay, entry, stored, TIMED_OUT if wait.status == "timed_out" else WITHDRAWN)
    if stored.over is not None or not _failed(entry):
        return entry
    if _block_has_failed(replay, entry):
        return _over(replay, entry, stored, BLOCK_FAILED)
    over, threw = _refusal(replay, entry, stored, rule, failure)
    if over is not None:
        return _over(replay, entry, stored, over, threw=threw)
    signal = replay.take_signal(stored.signal)
    if signal is not None:
        return run_again(signal)
    return replay.park(entry, stored.signal, None if stored.wait_ms is None else replay.now + stored.wait_ms)


def _failed(entry: StepEntry | ChildEntry) -> bool:
    return entry.status == "failed" and (isinstance(entry, ChildEntry) or entry.given_up)


def _block_has_failed(replay: Replay, entry: StepEntry | ChildEntry) -> bool:
    block = None if entry.extra.block is None else replay.entries[entry.extra.block - 1]
    return isinstance(block, BlockEntry) and block.failed_by is not None


def _over(
    replay: Replay, entry: StepEntry | ChildEntry, stored: Stored, over: str, *, threw: Exception | None = None
) -> StepEntry | ChildEntry:
    """The next layers: the fallback of an optional step, or the failure."""
    status = "optional_failed" if entry.optional and isinstance(entry, StepEntry) else "failed"
    return replay.settle_failed(entry, status, policy=replace(stored, over=over).text(), threw=threw)


def _refusal(
    replay: Replay, entry: StepEntry | ChildEntry, stored: Stored, rule: Rule | None, failure: Callable[[], FlowError]
) -> tuple[str | None, Exception | None]:
    """Why it may not wait for its signal, if it may not; with what ``when`` raised."""
    if stored.max_retries is not None and entry.cycle >= stored.max_retries:
        return SPENT, None
    if entry.error is not None and load_error(entry.error)["type"] == _DONE_ALREADY:
        return DONE_ALREADY, None
    only = rule.only if rule is not None else None
    error = failure()
    if only is not None and not any(_is_a(error, cls) for cls in only):
        return REFUSED, None
    when = rule.when if rule is not None else None
    if when is None:
        return None, None
    try:
        with replay.judging(entry):
            wanted = bool(when(_context(replay, entry, stored, error)))
    except Exception as raised:
        if replay.error is not None:
            raise
        return THREW, raised
    if replay.error is not None:
        raise replay.error  # whatever the predicate made of it
    return None if wanted else REFUSED, None


def _is_a(error: FlowError, cls: type[BaseException]) -> bool:
    """By the recorded names of the failure's class and its bases (RSIG-3), or by what the function would see of it.

    A child is judged by what ended it; where that was a step's failure, or a child's, by what was behind that.
    """
    if isinstance(error, cls) or (isinstance(error, StepFailedError) and error.is_a(cls)):
        return True
    cause = error.cause if isinstance(error, ChildError) else None
    while cause is not None:
        names = (cause["type"], *cause["bases"])
        if is_named(names, cls):
            return True
        cause = cause["cause"] if is_named(names, FlowError) else None
    return False


def _context(replay: Replay, entry: StepEntry | ChildEntry, stored: Stored, error: FlowError) -> RetryContext:
    snapshot = replay.snapshot
    if isinstance(entry, ChildEntry):
        name, executions, child_id = entry.workflow, entry.cycle + 1, entry.child_id
    else:
        name, executions, child_id = entry.actor, entry.attempts, None
    return RetryContext(
        snapshot.run_id, snapshot.workflow, name, entry.sequence, stored.signal, entry.cycle, stored.max_retries, executions, error,
        child_id,
    )  # fmt: skip


# --- by an operator's hand -------------------------------------------------------------------------------------------


def answer_all(engine: Engine, run_id: str, sender: Sender) -> int:
    """Signal every step and child of a run that is parked, each with a signal of the name that it waits for; how many there were.

    One transaction: all of them, or none. Another wait for a signal of such a name is left alone.

    Raises:
      FlowNotFoundError: there is no such run.
      CannotSignalTerminalFlowError, CannotSignalRollingBackFlowError: it takes no signals now.
      NothingAwaitsRetryError: nothing is parked.
      MessageNotSentError: they are signalled, and the broker did not take the message that has the run driven.
    """
    run = engine.store.read(lambda tx: tx.one(_RUN, (run_id,)))
    if run is None:
        raise FlowNotFoundError(run_id)
    outbox = sender.outbox(None)
    outbox.load([signals.drive_message(run_id, run)])

    def operation(tx: Tx) -> tuple[str, list[signals.Signal]]:
        locked = tx.one(_LOCK, (run_id,))  # DRIVE-7: the run's row first
        status = str(locked[0]) if locked is not None else signals.MISSING
        if status not in signals.SIGNALABLE:
            return status, []
        now = engine.now()
        answer, sent = signals.Answer(), []
        # Who else may be here: the timeout of such a wait. It changes the same row by its status, and one of the two changes nothing.
        # test_a_signal_and_the_timeout_of_a_parked_step_have_one_winner
        for sequence, name, cycle in tx.all(_OPEN, (run_id, now)):
            signal = signals.Signal(run_id, name, b"null")
            number = signals.insert(tx, signal, now)
            signals.meet(tx, signal, number, sequence=sequence, cycle=cycle, now=now)
            sent.append(signal)
            answer.lines += [
                history.Line(history.SIGNAL_RECEIVED, name=name, payload=signal.payload, about=number),
                history.Line(history.SIGNAL_CONSUMED, sequence=sequence, name=name, about=number),
            ]
        if sent:
            tx.run(WAKE, (now, run_id))
            engine.record(tx, run_id, now, answer.lines)
            outbox.stage(tx)
            signals.tell_after_commit(tx, engine, run_id, str(run[0]), answer)
        return status, sent

    status, sent = engine.write(operation, outbox)
    if not sent:
        raise NothingAwaitsRetryError(run_id, status) if status in signals.SIGNALABLE else signals.refusal(run_id, status)
    signals.leave(outbox, sent[0])
    return len(sent)
