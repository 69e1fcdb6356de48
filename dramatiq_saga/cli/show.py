"""``show``: a run's story, step by step, each with what undoes it, and which try comes next and when (NATIVE-6).

Tells what the rows say and nothing else: no guess stands in for a fact. Times are UTC.
It must never write.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..engine.liveness import name_of
from ..operations import Operator
from ..report_entries import EntryReport, RetryReport
from ..reports import CompensationReport, RunReport, StepReport, was_begun
from .answer import Answer, cell, cut, duration, error_line, moment, relative, table, times

#: Members of a parallel block that are shown one by one; of a larger one, those that have something to say.
SHOWN_MEMBERS = 20

#: Longest payload or message in one line, in characters.
WIDTH = 160

_ROLLBACK = {
    "running": "is being undone",
    "halted": "halted: what follows the failed undo was not undone; `resume-rollback` goes on once its cause is mended",
    "done": "done",
}

#: Why no signal will run a step again.
_OVER = {
    "spent": "the signals that might have run it again are used up",
    "refused": "its retry policy takes no such failure",
    "threw": "its retry policy's predicate raised, which counts as no",
    "done_already": "its work is done, only the result could not be kept",
    "timed_out": "no signal came in time",
    "withdrawn": "its wait was closed",
    "block_failed": "another member has failed its block",
}

_UNDOES = {"failed": "failed", "unknown": "ended in a way that nobody knows"}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's command."""
    show = commands.add_parser(
        "show", parents=[common], help="what happened to a run",
        description="A run, its steps and what undoes them. Times are UTC. --json has the tracebacks too.",
    )  # fmt: skip
    show.add_argument("run_id", metavar="RUN")
    show.add_argument("--events", action="store_true", help="its whole history as well")
    show.add_argument("--all", action="store_true", help="every member of a large parallel block")
    show.set_defaults(run=_show)


def _show(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.show_run(options.run_id, events=options.events)
    return Answer(report.as_dict(), list(lines_of(report, operator.store.clock.now(), everything=options.all)))


def lines_of(report: RunReport, now: int, *, everything: bool = False) -> Iterator[str]:
    """The whole page; of large blocks only those members that have something to say, unless ``everything`` is asked for."""
    blocks = Blocks(report)
    for name, text in _head(report, now):
        yield f"{name:<10} {text}"
    lines: dict[int, tuple[str, str, list[str]]] = {  # by sequence: what it is, where it stands, what else there is to say
        entry.sequence: (
            blocks.indented(entry.block, _title(entry)),
            _entry(entry, now) + blocks.counts(entry),
            [*_entry_details(report, entry, now), *([] if everything else blocks.left_out(entry))],
        )
        for entry in report.entries
    }
    for step in report.steps:
        if everything or not blocks.leaves_out(step):
            title = blocks.indented(step.row.block, cell(step.row.actor))
            lines[step.row.sequence] = title, _standing(step, now), list(_details(report, step, now))
    if lines:
        yield ""
    width = max((len(title) for title, _, _ in lines.values()), default=0)
    for sequence, (title, standing, details) in sorted(lines.items()):
        yield f"{sequence:>4}  {title:<{width}}  {standing}"
        yield from (f"      {line}" for line in details)
    if report.events is not None:
        yield ""
        yield from _events(report)


class Blocks:
    """The blocks of a run, and how their members stand."""

    def __init__(self, report: RunReport) -> None:
        self._around = {entry.sequence: entry.block for entry in report.entries if entry.size is not None}
        self._large = {
            entry.sequence for entry in report.entries if entry.kind == "parallel" and (entry.size or 0) > SHOWN_MEMBERS
        }
        self._members: dict[int, list[StepReport]] = {}
        for step in report.steps:
            if step.row.block is not None:
                self._members.setdefault(step.row.block, []).append(step)

    def indented(self, block: int | None, title: str) -> str:
        """What stands in a block stands under it."""
        while block is not None:
            block, title = self._around.get(block), f"  {title}"
        return title

    def counts(self, entry: EntryReport) -> str:
        """How many of a block's steps stand where."""
        words = [_word(step) for step in self._members.get(entry.sequence, ()) if entry.kind == "parallel"]
        told = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
        return f": {told}" if told else ""

    def leaves_out(self, step: StepReport) -> bool:
        """Whether a member of a large block has nothing to say that the count does not say: done, cancelled, or waiting for its turn."""
        row = step.row
        quiet = row.status in ("completed", "cancelled") or (row.status == "pending" and not row.tries and not step.was_begun)
        return row.block in self._large and quiet and (step.compensation is None or step.compensation.row.status == "completed")

    def left_out(self, entry: EntryReport) -> list[str]:
        """What is said of the members that are not shown."""
        number = sum(1 for step in self._members.get(entry.sequence, ()) if self.leaves_out(step))
        return [
            f"{times(number, 'member is', 'members are')} not shown: completed, cancelled or not begun (--all shows them)"
        ] * bool(number)


def _word(step: StepReport) -> str:
    row = step.row
    if row.status == "pending" and row.held_back:
        return "held back"
    return "between tries" if row.status == "failed" and not row.given_up else row.status.replace("_", " ")


def _head(report: RunReport, now: int) -> Iterator[tuple[str, str]]:
    yield "run", cell(report.id)
    yield "workflow", cell(report.workflow) + (f" (version {cell(report.version)})" if report.version else "")
    yield "status", report.status + (f", to end as {report.ends_as}" if report.status == "rolling_back" else "")
    if report.parent_id is not None:
        asked = ""
        if report.close_request is not None and report.ended_at is None:
            asked = f", which has ended and asks it to end ({cell(report.close_request)})"
        yield "child of", f"{cell(report.parent_id)}, at its sequence {report.parent_sequence}{asked}"
    yield "created", f"{moment(report.created_at)} ({relative(report.created_at, now)})"
    if report.ended_at is not None:
        yield "ended", f"{moment(report.ended_at)} (took {duration(report.ended_at - report.created_at)})"
    if report.expires_at is not None:
        yield "deadline", f"{moment(report.expires_at)} ({relative(report.expires_at, now)})"
        if report.expiry_attempts and report.expiry_after is not None and report.ended_at is None:
            again = f"{moment(report.expiry_after)} ({relative(report.expiry_after, now)})"
            yield (
                "",
                f"its rollback could not be planned {times(report.expiry_attempts, 'time', 'times')}; it is tried again at {again}",
            )
    if report.tags:
        yield (
            "tags",
            " ".join(f"{cell(name)}={cell(value)}" if value is not None else cell(name) for name, value in report.tags.items()),
        )
    if report.args is not None:
        yield "arguments", cut(cell(report.args), WIDTH)
    if report.context is not None:
        yield "context", cut(cell(report.context), WIDTH)
    if report.result is not None:
        yield "result", cut(cell(report.result), WIDTH)
    if report.reason:
        yield "reason", cut(cell(report.reason), WIDTH)
    if report.error is not None:
        yield "error", error_line(report.error)
    if report.rollback != "none":
        yield "rollback", _ROLLBACK.get(report.rollback, report.rollback)
    if report.rollback_error is not None:
        yield "", error_line(report.rollback_error)
    if report.hold_error is not None:
        yield "held", error_line(report.hold_error)
        due = (
            f"{moment(report.hold_until)} ({relative(report.hold_until, now)})"
            if report.hold_until is not None
            else "by a kick"
        )
        yield "", f"held {times(report.hold_count, 'time', 'times')}; a sweep drives it again at {due}"
    elif report.unseen_wakes and report.ended_at is None:
        new = report.status == "pending"
        yield (
            "waits for",
            "a worker to start it" if new else "a worker to drive it: something has happened that no drive has seen",
        )
    for signal in report.signals:
        payload = "" if signal.payload in (None, "null") else f" {cut(cell(signal.payload), WIDTH)}"
        yield "signal", f"{cell(signal.name)}{payload} came at {moment(signal.received_at)}; nothing has waited for it yet"
    if report.repair_attempts:
        yield "repairs", f"sent to be driven again {times(report.repair_attempts, 'time', 'times')} by the doctor"


def _title(entry: EntryReport) -> str:
    """What a request is that is no step."""
    if entry.kind in ("parallel", "saga"):
        return f"{entry.kind} of {entry.size}"
    name = "" if entry.name is None else f" {cell(entry.name)}"
    return {"signal": f"wait for signal{name}", "timer": "timer"}.get(entry.kind, f"{entry.kind}{name}")


def _entry(entry: EntryReport, now: int) -> str:
    """Where it stands, in one line."""
    if entry.kind == "version gate":
        return (
            "passed: this run goes the new way"
            if entry.value == "true"
            else "passed before the change: this run goes the old way"
        )
    if entry.status == "recorded":
        return f"recorded at {moment(entry.created_at)}"
    if entry.retry is not None and entry.retry.waiting:
        return f"{entry.status.replace('_', ' ')}: {_parked(entry.retry, now)}"
    if entry.status == "waiting":
        until = "" if entry.due_at is None else f" until {moment(entry.due_at)} ({relative(entry.due_at, now)})"
        return f"waits{until}"
    status = {"consumed": "came", "timed_out": "timed out" if entry.kind == "signal" else "is over"}.get(
        entry.status, entry.status
    )
    if entry.ended_at is None:
        return f"{status.replace('_', ' ')} since {moment(entry.created_at)}"
    return f"{status.replace('_', ' ')} at {moment(entry.ended_at)}"


def _entry_details(report: RunReport, entry: EntryReport, now: int) -> Iterator[str]:
    if entry.child_id is not None:
        yield f"run {cell(entry.child_id)}"
    if entry.error is not None:
        yield error_line(entry.error)
    yield from _retries(entry.retry)
    if entry.max_in_flight is not None:
        yield f"at most {entry.max_in_flight} at a time"
    if entry.failed_by is not None:
        yield f"failed by {entry.failed_by}"
    if entry.closed_early_at is not None:
        yield f"its barrier was reached early, at {moment(entry.closed_early_at)}; the rows decided"
    if entry.value is not None and entry.value != "null" and entry.kind != "version gate":
        yield f"value {cut(cell(entry.value), WIDTH)}"
    undo = report.undone_children.get(entry.sequence)
    yield from _undo(report, undo, now=now, by=entry.undo, completed=entry.status == "completed")


def _standing(report: StepReport | CompensationReport, now: int) -> str:
    """Where a step or an undo is, in one line."""
    row, of = report.row, report.tries_in_all
    if isinstance(report, StepReport) and report.retry is not None and report.retry.waiting:
        return f"{row.status.replace('_', ' ')}: {_parked(report.retry, now)}"
    upcoming = report.next_try
    status = row.status.replace("_", " ")
    if upcoming is not None and row.status == "failed":
        when = f" at {moment(upcoming.at)} ({relative(upcoming.at, now)})" if upcoming.at is not None else ""
        return f"{status}: {times(row.tries, 'try', 'tries')} so far; next is {_try(upcoming.number, of)}{when}"
    if isinstance(report, StepReport) and report.row.held_back and row.status == "pending":
        return "held back: its turn comes when another member of its block has ended"
    if upcoming is not None and isinstance(report, CompensationReport) and report.behind:
        return f"{status}: its turn comes when the undos before it have ended"
    if upcoming is not None:
        held = upcoming.at is not None and upcoming.at > now
        when = (
            f"not before {moment(upcoming.at)} ({relative(upcoming.at or 0, now)})" if held else "as soon as a worker takes it"
        )
        again = f"; sent again {times(report.repair_attempts, 'time', 'times')} by the doctor" if report.repair_attempts else ""
        if was_begun(row):
            again += f"; it was claimed before (claim {row.attempts}), and may have done its work"
            when = "when its turn comes among what has died before" if row.next_try_at is not None else when
        return f"{status}: next is {_try(upcoming.number, of)}, {when}{again}"
    if row.status == "running" and row.given_up:
        return f"{status} since {moment(row.started_at or 0)}, and left behind: its level ended without it; a late report is still recorded"
    if row.status == "running" and row.started_at is not None:
        return f"{status}: {_try(row.tries + 1, of)} since {moment(row.started_at)} ({duration(now - row.started_at)}), {_reclaim(report, now)}"
    if row.status == "failed":
        return f"{status} for good after {times(row.tries, 'try', 'tries')}{_ended(row)}"
    if row.status == "optional_failed":
        return f"failed for good after {times(row.tries, 'try', 'tries')}{_ended(row)}; it is optional, so the run went on"
    if row.status == "completed":
        extra = f" after {times(row.tries, 'failed try', 'failed tries')}" if row.tries else ""
        return f"{status}{extra}{_ended(row)}"
    if row.status == "pending":
        return "not undone: the rollback was halted before it came to this"
    doubt = ", and may have been at work" if row.attempts > row.tries else ""
    return f"{status}{_ended(row)}{doubt}"


def _retries(retry: RetryReport | None) -> Iterator[str]:
    """What its retries on signal have come to."""
    if retry is not None and retry.over is not None:
        yield f"not run again by signal {cell(retry.signal)}: {_OVER.get(retry.over, retry.over)}"
    elif retry is not None and retry.spent and not retry.waiting:
        yield f"run again by signal {cell(retry.signal)} {times(retry.spent, 'time', 'times')}"


def _parked(retry: RetryReport, now: int) -> str:
    used = f"{retry.spent} of {retry.cap}" if retry.cap is not None else str(retry.spent)
    until = "" if retry.due_at is None else f" until {moment(retry.due_at)} ({relative(retry.due_at, now)})"
    return f"waits for signal {cell(retry.signal)}{until}; {used} used so far"


def _beside(compensation: CompensationReport) -> str:
    """Which undos share its level (COMP-5)."""
    others = compensation.beside
    if not others:
        return ""
    return f", side by side with that of {'step' if len(others) == 1 else 'steps'} {', '.join(map(str, others))}"


def _try(number: int, of: int | None) -> str:
    return f"try {number}" + (f" of {of}" if of is not None else "")


def _ended(row: Any) -> str:
    if row.ended_at is None:
        return ""
    took = (
        f", took {duration(row.ended_at - row.started_at)}" if row.started_at is not None and row.status != "cancelled" else ""
    )
    return f" at {moment(row.ended_at)}{took}"


def _reclaim(report: StepReport | CompensationReport, now: int) -> str:
    """When another worker may claim it: by its own deadline, and by the silence of its worker."""
    stale_at, lease = report.row.reclaim_stale_at, report.lease
    moments = []
    if lease is not None and lease.is_over(now):
        moments.append(f"{f'since {moment(lease.ends_at)}' if lease.ends_at else 'now'}, because its worker is silent")
    elif lease is not None:
        moments.append(f"at {moment(lease.ends_at)} ({relative(lease.ends_at, now)}) unless its worker is heard from")
    if stale_at is not None:
        moments.append(f"since {moment(stale_at)}" if stale_at <= now else f"at {moment(stale_at)} ({relative(stale_at, now)})")
    if not moments:
        return "and nothing will ever reclaim it (reclaim is off for it)"
    return f"may be claimed again {', or '.join(moments)}"


def _worker(report: StepReport | CompensationReport, now: int) -> Iterator[str]:
    """Who is at it, and when that was last heard from."""
    row = report.row
    if row.status == "running" and row.worker_id:
        seen_at = None if report.lease is None else report.lease.seen_at
        heard = "" if seen_at is None else f", last heard from {moment(seen_at)} ({relative(seen_at, now)})"
        yield f"worker {cell(name_of(row.worker_id))}, claim {row.attempts}{heard}"


def _details(report: RunReport, step: StepReport, now: int) -> Iterator[str]:
    row = step.row
    if row.error is not None and row.status != "completed":
        yield error_line(row.error)
    yield from _retries(step.retry)
    yield from _worker(step, now)
    result = report.payload(row.stored_result)
    if result is not None and result != "null":
        yield f"result {cut(cell(result), WIDTH)}"
    yield from _undo(report, step.compensation, now=now, by=step.undo, completed=row.status == "completed")


def _undo(
    report: RunReport, compensation: CompensationReport | None, *, now: int, by: str | None, completed: bool
) -> Iterator[str]:
    """What undoes a step or a child, or would."""
    if compensation is not None:
        undo = "" if compensation.row.undoes == "completed" else f" (of a step that had {_UNDOES[compensation.row.undoes]})"
        what = f"undo by {cell(compensation.row.actor)}" if compensation.row.actor else "undo that cannot be built"
        yield f"{what}{undo}{_beside(compensation)}: {_standing(compensation, now)}"
        if compensation.row.error is not None and compensation.row.status != "completed":
            yield f"  {error_line(compensation.row.error)}"
        yield from (f"  {line}" for line in _worker(compensation, now))
    elif by is not None and report.ended_at is None:
        yield f"would be undone by {cell(by)}"
    elif by is not None and completed and report.status != "completed":
        yield f"not undone: {cell(by)} was never sent"


def _events(report: RunReport) -> list[str]:
    rows = [
        (moment(event.at), event.type, event.sequence if event.sequence is not None else "", cell(event.name),
         event.attempt if event.attempt is not None else "", cut(cell(event.detail), WIDTH))
        for event in report.events or []
    ]  # fmt: skip
    return table(("at", "event", "step", "name", "claim", "detail"), rows)
