"""``send``, ``signal``, ``signal-retry``, ``list``, ``cancel``, ``kick``, ``abandon-undo`` and ``resume-rollback``: one run, or all of them.

A cancel says what would stand before anything is changed: where work would, it asks which of the two is meant. Nothing here
decides about a run; it asks ``operations`` and writes down the answer. Long because each of these commands has an answer of its own, in words
and for machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ..clock import to_iso
from ..commands import command
from ..context import NOT_CAPTURED, UNSET
from ..engine.liveness import name_of
from ..operations import Cancelled, Operator, RefusedError, Resumed, RunLine, Undo
from ..report_entries import EntryReport
from ..reports import StepReport
from ..statuses import FlowStatus
from .answer import Answer, cell, cut, duration, error_line, moment, table

_JSON_WORDS: dict[type, str] = {
    list: "an array", dict: "an object", str: "a string", int: "a number", float: "a number", bool: "a flag", type(None): "null",
}  # fmt: skip
_KICKED = {"step": "step", "compensation": "undo of step", "child": "child", "wait": "wait"}
_MARKERS = {"none": "", "running": "undoing", "halted": "undoing halted", "done": "undone"}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's commands."""
    send = commands.add_parser(
        "send", parents=[common], help="start a run", description="Start a run of a workflow; prints its id."
    )
    send.add_argument("workflow", metavar="WORKFLOW", help="the workflow's name")
    send.add_argument("--args", metavar="JSON", default="[]", help="positional arguments, an array: '[\"order-42\"]'")
    send.add_argument("--kwargs", metavar="JSON", default="{}", help="keyword arguments, an object")
    send.add_argument("--run-id", metavar="ID", help="an id of your own: a second run with it is not started")
    send.add_argument("--context", metavar="JSON", help="what travels with the run, in place of what would be captured here")
    send.set_defaults(run=_send)

    listing = commands.add_parser("list", parents=[common], help="the newest runs", description="The newest runs, one a line.")
    listing.add_argument(
        "--status",
        action="append",
        default=[],
        choices=[str(status) for status in FlowStatus],
        help="may be given more than once",
    )
    listing.add_argument("--workflow", metavar="NAME", help="runs of this workflow only")
    listing.add_argument(
        "--tag", action="append", default=[], metavar="KEY=VALUE", type=_tag, help="may be given more than once"
    )
    listing.add_argument("--awaiting-signal", metavar="NAME", help="runs that wait for a signal of that name")
    listing.add_argument(
        "--awaiting-retry-signal", metavar="NAME", help="runs with a failed step that waits for a signal of that name"
    )
    listing.add_argument(
        "--signalable", action="store_true", default=None, help="runs that take signals: neither ended nor rolling back"
    )
    listing.add_argument("--limit", type=positive, default=50, metavar="N", help="how many at most (50)")
    listing.set_defaults(run=_list)

    signal = commands.add_parser(
        "signal", parents=[common], help="signal a run",
        description="Signal a run: what waits for the signal goes on with its payload; one that nothing waits for is kept.",
    )  # fmt: skip
    signal.add_argument("run_id", metavar="RUN")
    signal.add_argument("name", metavar="NAME", help="the signal's name")
    signal.add_argument("--payload", metavar="JSON", default="null", help="what to send along; null by default")
    signal.add_argument("--key", metavar="K", help="the same key counts once per run: a repeat changes nothing")
    signal.set_defaults(run=_signal)

    again = commands.add_parser(
        "signal-retry", parents=[common], help="run again what is parked",
        description="Run again every step and child of a run that has failed and waits for a signal, each by a signal of that name.",
    )  # fmt: skip
    again.add_argument("run_id", metavar="RUN")
    again.set_defaults(run=_signal_retry)

    cancel = commands.add_parser(
        "cancel", parents=[common], help="end a run, undoing its work or leaving it",
        description="End a run. Where it has done work, say what becomes of that: --compensate or --keep.",
    )  # fmt: skip
    cancel.add_argument("run_id", metavar="RUN")
    choice = cancel.add_mutually_exclusive_group()
    choice.add_argument("--compensate", action="store_true", help="undo its completed steps in reverse order, then end it")
    choice.add_argument("--keep", action="store_true", help="end it and leave its work as it is")
    cancel.add_argument("--reason", metavar="TEXT", help="kept with the run")
    cancel.set_defaults(run=_cancel)

    kick = commands.add_parser(
        "kick", parents=[common], help="drive a run again",
        description="Drive a run again, give it and its rows new repairs, and send the messages of what it is parked on.",
    )  # fmt: skip
    kick.add_argument("run_id", metavar="RUN")
    kick.set_defaults(run=_kick)

    abandon = commands.add_parser(
        "abandon-undo", parents=[common], help="go on without an undo whose worker is dead",
        description="Say that nobody is at a running undo any more, where nothing else can know it: the rollback halts or goes on by "
        "the undo's policy, as after one that failed for good. Refused where its message, a reclaim or a lease ends it.",
    )  # fmt: skip
    abandon.add_argument("run_id", metavar="RUN")
    abandon.add_argument("sequence", metavar="STEP", type=positive, help="the number of the step that it undoes")
    abandon.set_defaults(run=_abandon)

    resume = commands.add_parser(
        "resume-rollback", parents=[common], help="go on with a rollback that has halted",
        description="Go on with a rollback that has halted: what is not undone yet is tried again. The run itself keeps its end.",
    )  # fmt: skip
    resume.add_argument("run_id", metavar="RUN")
    resume.set_defaults(run=_resume)


# --- what was typed --------------------------------------------------------------------------------------------------


def _tag(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def positive(text: str) -> int:
    """A number that was typed, from 1, and of no more digits than every database counts with."""
    if text.isdecimal() and len(text) > 9:
        raise argparse.ArgumentTypeError(f"{cut(text, 30)!r} is more than 999999999")
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _parsed(option: str, text: str, *, kind: type, example: str) -> Any:
    """The JSON given to an option, or a refusal that shows how it is written."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{option} is not JSON: {error}; write it like {option} '{example}'") from None
    if not isinstance(value, kind):
        raise RefusedError(
            f"{option} takes {_JSON_WORDS[kind]}, not {_JSON_WORDS[type(value)]}: write it like {option} '{example}'"
        )
    return value


# --- the commands ----------------------------------------------------------------------------------------------------


def _send(operator: Operator, options: argparse.Namespace) -> Answer:
    args = _parsed("--args", options.args, kind=list, example='["order-42"]')
    kwargs = _parsed("--kwargs", options.kwargs, kind=dict, example='{"order_id": "order-42"}')
    context = UNSET if options.context is None else _parsed("--context", options.context, kind=object, example='"acme"')
    try:
        sent = operator.send(options.workflow, args=args, kwargs=kwargs, run_id=options.run_id, context=context)
    except (TypeError, ValueError) as error:
        raise RefusedError(str(error)) from error
    except Exception as error:
        if NOT_CAPTURED not in getattr(error, "__notes__", ()):
            raise
        raise RefusedError(
            f"the run's context cannot be captured here ({type(error).__name__}: {error}): give it with --context '\"acme\"'"
        ) from error
    note = None if sent.started else "a run with this id was there already: nothing was started"
    value = {"run_id": sent.run_id, "workflow": sent.workflow, "started": sent.started}
    return Answer(value, [cell(sent.run_id)], note=note)


def _signal(operator: Operator, options: argparse.Namespace) -> Answer:
    payload = _parsed("--payload", options.payload, kind=object, example='{"by": "ann"}')
    try:
        report = operator.signal(options.run_id, options.name, payload=payload, key=options.key)
    except (TypeError, ValueError) as error:
        raise RefusedError(str(error)) from error
    value = {"run_id": report.id, "signal": options.name, "key": options.key, "status": report.status}
    return Answer(value, [f"run {cell(report.id)} has signal {cell(options.name)}; it is {report.status}"])


def _signal_retry(operator: Operator, options: argparse.Namespace) -> Answer:
    parked = operator.signal_retry(options.run_id)
    value = {
        "run_id": options.run_id,
        "retried": [{"kind": one.kind, "sequence": one.sequence, "name": one.name, "signal": one.signal} for one in parked],
    }
    lines = [f"run {cell(options.run_id)}: what was parked runs again"]
    lines += [f"  {one.kind} {one.sequence} ({cell(one.name)}), by signal {cell(one.signal)}" for one in parked]
    return Answer(value, lines)


def _list(operator: Operator, options: argparse.Namespace) -> Answer:
    try:
        runs = operator.list_runs(
            workflow=options.workflow, status=options.status, tags=dict(options.tag), awaiting_signal=options.awaiting_signal,
            awaiting_retry_signal=options.awaiting_retry_signal, signalable=options.signalable, limit=options.limit,
        )  # fmt: skip
    except ValueError as error:
        raise RefusedError(str(error)) from error
    now = operator.store.clock.now()
    if not runs:
        named = options.awaiting_signal or options.awaiting_retry_signal or options.signalable
        narrowed = options.workflow or options.status or options.tag or named
        return Answer([], ["no runs match" if narrowed else "there are no runs"])
    rows = [
        (
            run.id,
            run.workflow,
            _status(run),
            moment(run.created_at),
            duration((run.ended_at or now) - run.created_at),
            _tags(run),
        )
        for run in runs
    ]
    lines = table(("run", "workflow", "status", "created", "took", "tags"), rows)
    if len(runs) == options.limit:
        lines.append(f"(the newest {options.limit}; --limit shows more)")
    return Answer([_as_dict(run) for run in runs], lines)


def _status(run: RunLine) -> str:
    notes = [note for note in (_MARKERS.get(run.rollback, run.rollback), "held" if run.hold_until is not None else "") if note]
    return run.status + (f" ({', '.join(notes)})" if notes and run.status != "rolling_back" else "")


def _tags(run: RunLine) -> str:
    return cut(" ".join(f"{cell(name)}={cell(value)}" for name, value in run.tags.items()), 60)


def _as_dict(run: RunLine) -> dict[str, Any]:
    return {
        "run_id": run.id, "workflow": run.workflow, "status": run.status, "rollback": run.rollback, "created_at": to_iso(run.created_at),
        "started_at": to_iso(run.started_at), "ended_at": to_iso(run.ended_at), "held_until": to_iso(run.hold_until),
        "reason": run.reason, "tags": run.tags,
    }  # fmt: skip


def _cancel(operator: Operator, options: argparse.Namespace) -> Answer:
    if options.compensate:
        return _cancelled(operator.compensate(options.run_id, reason=options.reason), undoes=True)
    if not options.keep:
        report, worked = operator.worked(options.run_id)
        children = [entry for entry in report.entries if entry.kind == "child" and entry.status in ("running", "completed")]
        if (worked or children) and report.status in ("pending", "running", "waiting"):
            listed = "\n".join([*_work(worked), *_child_work(children)])
            raise RefusedError(
                f"run {options.run_id} has done work that would stand:\n{listed}\n"
                "say --compensate to have it undone in reverse order, or --keep to leave it as it is; nothing was changed"
            )
    return _cancelled(operator.cancel(options.run_id, reason=options.reason))


def _work(steps: Sequence[StepReport]) -> list[str]:
    rows = []
    for step in steps:
        if step.row.status == "running":
            note = "is at work: its outcome would be refused"
        elif step.was_begun:
            note = "was at work and has not reported: it may have done its work"
        elif step.undo is None:
            note = "nothing undoes it"
        else:
            note = f"undone by {step.undo}"
        rows.append(("  ", step.row.sequence, step.row.actor, step.row.status, note))
    return table(("", "", "", "", ""), rows)[1:]


def _child_work(children: Sequence[EntryReport]) -> list[str]:
    rows = []
    for child in children:
        note = f"undone by {child.undo}" if child.undo else "nothing undoes it"
        if child.status == "running":
            note = f"run {child.child_id} is under way: close policy {child.policy}"
        rows.append(("  ", child.sequence, child.name, child.status, note))
    return table(("", "", "", "", ""), rows)[1:] if rows else []


def _cancelled(answer: Cancelled, *, undoes: bool = False) -> Answer:
    """``undoes``: whether its work is to be undone, so that a rollback that has halted is a failure."""
    run = cell(answer.run_id)
    if answer.status == "rolling_back":
        before = "" if answer.changed else ", and was before"
        lines = [f"run {run} is rolling back{before}; it will end as {answer.ends_as}"]
    else:
        lines = [f"run {run} is {answer.status}" + ("" if answer.changed else ", and was before")]
    if answer.rollback == "halted":
        lines[0] += "; its rollback halted, and not all of its work is undone"
    if answer.undone:
        lines += ["undone:"]
        lines += [f"  {step.row.sequence}  {cell(step.row.actor)}, by {cell(_undo(step))}" for step in reversed(answer.undone)]
    lines += _left(answer)
    if answer.stands:
        lines += ["this work stands:"]
        lines += [f"  {step.row.sequence}  {cell(step.row.actor)}{_doubt(step)}" for step in answer.stands]
    if answer.children:
        lines += ["its children:"]
        lines += [
            f"  {child.sequence}  {cell(child.name)} (run {cell(child.child_id)}) {fate}" for child, fate in answer.children
        ]
    value = {
        "run_id": answer.run_id, "status": answer.status, "rollback": answer.rollback, "ends_as": answer.ends_as,
        "changed": answer.changed,
        "children": [
            {"sequence": child.sequence, "workflow": child.name, "run_id": child.child_id, "fate": fate} for child, fate in answer.children
        ],
        "stands": [{"sequence": step.row.sequence, "actor": step.row.actor, "status": step.row.status} for step in answer.stands],
        "undone": [{"sequence": step.row.sequence, "actor": step.row.actor, "by": _undo(step)} for step in answer.undone],
        **_left_values(answer),
    }  # fmt: skip
    return Answer(value, lines, done=not (undoes and answer.rollback == "halted"))


def _left(answer: Cancelled | Resumed) -> list[str]:
    """What is to be undone; where the rollback has halted, what is not undone, why, and what goes on with it."""
    halted, lines = answer.rollback == "halted", []
    if answer.left:
        lines += ["not undone:" if halted else "to be undone:"]
        lines += [
            f"  {undo.sequence}  {cell(undo.name)}, by {cell(undo.by)}{_why(undo) if halted else ''}" for undo in answer.left
        ]
    if answer.never:
        lines += ["to be undone by hand, for nothing can build their undo:"]
        lines += [f"  {undo.sequence}  {cell(undo.name)}" for undo in answer.never]
    if halted and answer.left:
        lines += [f"`{command('resume-rollback', answer.run_id)}` goes on with it once the cause is mended"]
    return lines


def _why(undo: Undo) -> str:
    """Why a rollback that has halted has not undone it."""
    if not undo.failed:
        return ": the rollback halted before it was done"
    return ": failed for good" + ("" if undo.error is None else f", {error_line(undo.error)}")


def _left_values(answer: Cancelled | Resumed) -> dict[str, Any]:
    return {
        "left": [{"sequence": undo.sequence, "name": undo.name, "by": undo.by} for undo in answer.left],
        "never": [{"sequence": undo.sequence, "name": undo.name} for undo in answer.never],
    }


def _undo(step: StepReport) -> str | None:
    return step.compensation.row.actor if step.compensation is not None else step.undo


def _doubt(step: StepReport) -> str:
    return "" if step.row.status == "completed" else " (was at work: whatever it has done stands, its outcome will be refused)"


def _kick(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.kick(options.run_id)
    run = f"run {cell(report.run_id)} of {cell(report.workflow)}"
    value = {
        "run_id": report.run_id, "workflow": report.workflow, "status": report.status, "rollback": report.rollback,
        "driven": report.driven, "committed": report.committed,
        "sent": [{"kind": row.kind, "sequence": row.sequence, "actor": row.actor, "status": row.status} for row in report.sent],
        "left": [
            {"kind": row.kind, "sequence": row.sequence, "actor": row.actor, "status": row.status, "why": row.left}
            for row in report.left
        ],
    }  # fmt: skip
    if not report.committed:
        return Answer(
            value,
            [f"{run}: the database took the kick and then lost it; nothing was sent (see claim_not_committed)"],
            done=False,
        )
    if not report.driven:
        said = f"{run} is {report.status}: it has ended, so there is nothing to kick; nothing was done"
        if report.rollback == "halted":
            said += f"; its rollback has halted: `{command('resume-rollback', report.run_id)}` goes on with it once the cause is mended"
        elif report.status != "completed":
            said += f"; its work is begun anew by a new run: {command('send', report.workflow)}"
        return Answer(value, [said])
    parked = " for it and for what it is parked on" if report.rows else "; it is parked on nothing that could be sent again"
    lines = [f"{run} is {report.status}: sent to be driven again, with new repairs{parked}"]
    for row in report.rows:
        what = f"{_KICKED[row.kind]} {row.sequence} ({cell(row.actor)}, {row.status})"
        lines.append(f"  {what}: {'sent again' if row.left is None else f'left alone: {row.left}'}")
    return Answer(value, lines)


def _abandon(operator: Operator, options: argparse.Namespace) -> Answer:
    answer = operator.abandon_undo(options.run_id, options.sequence)
    undo, worker = f"the undo of step {options.sequence}", cell(name_of(answer.worker))
    said = f"run {cell(answer.run_id)}: {undo}, running on {worker}, {'is' if answer.changed else 'was'} abandoned"
    stands = "goes on" if answer.rollback == "running" else f"is {answer.rollback}"
    lines = [f"{said}{'' if answer.changed else ' before'}; its rollback {stands}"]
    again = "" if answer.rollback == "done" else ", until it is tried again"
    lines += [*_left(answer), f"should it be at work after all, its outcome is recorded{again}"]
    value = {
        "run_id": answer.run_id, "sequence": options.sequence, "worker": answer.worker, "status": answer.status,
        "rollback": answer.rollback, "changed": answer.changed, **_left_values(answer),
    }  # fmt: skip
    return Answer(value, lines)


def _resume(operator: Operator, options: argparse.Namespace) -> Answer:
    answer = operator.resume_rollback(options.run_id)
    run = cell(answer.run_id)
    if answer.rollback == "running":
        lines = [
            f"run {run} is {answer.status}, and stays so; its rollback goes on" + ("" if answer.changed else ", and did before")
        ]
    else:
        lines = [f"run {run} is {answer.status}; its rollback is {answer.rollback}"]
    lines += _left(answer)
    value = {
        "run_id": answer.run_id, "status": answer.status, "rollback": answer.rollback, "changed": answer.changed,
        **_left_values(answer),
    }  # fmt: skip
    return Answer(value, lines)
