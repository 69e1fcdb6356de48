"""``why`` and ``stuck``: what a run waits for and what to do about it, and the runs that need a human.

Both only read, and end with status 0 whatever they find. Text from rows is printed with its control characters made visible; times
are UTC.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..commands import command
from ..operations import MAX_STUCK, Operator
from ..recovery.explain import Act, Explanation, Post, Reason
from ..recovery.passes import LastPasses
from ..recovery.stuck import StuckReport
from .answer import Answer, cell, cut, error_line, moment, relative, table
from .runs import positive

#: Longest line of an error or a reason, in characters.
WIDTH = 160

_UNSWEPT = (
    "nothing sweeps, and runs are live: what is overdue or lost stays so; start workers with loop.enabled, have cron run "
    "`dramatiq-saga sweep`, or run `dramatiq-saga schedule`"
)
_MOMENTS = {"ready": "since", "delayed": "until", "reserved": "held by a worker until", "dead": "since"}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's commands."""
    why = commands.add_parser(
        "why", parents=[common], help="why a run does not go on, and what to do",
        description="What a run waits for, what acts on that next and when, and what you can do. Reads only. Times are UTC.",
    )  # fmt: skip
    why.add_argument("run_id", metavar="RUN")
    why.set_defaults(run=_why)
    stuck = commands.add_parser(
        "stuck", parents=[common], help="the runs that need a human",
        description="Runs that nothing will move by itself, each with its reason: halted rollbacks, held runs, spent repairs, steps that "
        "nothing will reclaim or that no worker has come for in an hour, what has lost its message with the doctor off and, with --app, "
        "workflows that the application does not declare; and when something last swept. Reads only.",
    )  # fmt: skip
    stuck.add_argument("--limit", metavar="N", type=_limit, default=50, help="at most this many (50)")
    stuck.set_defaults(run=_stuck)


def _why(operator: Operator, options: argparse.Namespace) -> Answer:
    found = operator.why(options.run_id)
    lines = list(_lines(found, operator.store.clock.now()))
    if operator.broker is None:
        lines += ["", "dials are told as the environment sets them: the application's own are known with --app"]
    return Answer({**found.as_dict(), "dials": "environment" if operator.broker is None else "application"}, lines)


def _stuck(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.stuck(limit=options.limit)
    return Answer(report.as_dict(), _stuck_lines(report, operator.store.clock.now()))


def _limit(text: str) -> int:
    number = positive(text)
    if number > MAX_STUCK:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_STUCK}")
    return number


def _lines(found: Explanation, now: int) -> Iterator[str]:
    rollback = f", rollback {found.rollback}" if found.rollback != "none" else ""
    yield f"run {cell(found.run_id)} of {cell(found.workflow)} is {found.status}{rollback}"
    for number, reason in enumerate(found.reasons, start=1):
        yield ""
        yield f"{number}. {_where(reason)}{cell(reason.text)}{_at(reason.at, now)}"
        if reason.error is not None:
            yield f"   error: {cut(error_line(reason.error), WIDTH)}"
        for post in reason.messages:
            yield f"   message: {_post(post, now)}"
        for act in reason.acts:
            yield f"   {'next' if act.on else 'not'}: {_act(act, now)}"
        for advice in reason.advice:
            yield f"   do: {cell(advice)}"
    if found.more:
        yield ""
        yield f"and {found.more} more of these; `{command('show', found.run_id, options='--all')}` has them"
    if found.messages_note is not None:
        yield ""
        yield f"messages: {cell(found.messages_note)}"


def _where(reason: Reason) -> str:
    if reason.sequence is None:
        return ""
    if reason.kind in ("block", "signal", "timer"):
        return f"at {reason.sequence}: "
    what = "child" if reason.kind.endswith("child") else "undo of" if reason.kind.startswith("undo") else "step"
    return f"{what} {reason.sequence} {cell(reason.name)}: ".replace(" :", ":")


def _at(ms: int | None, now: int) -> str:
    return "" if ms is None else f" {moment(ms)} ({relative(ms, now)})"


def _act(act: Act, now: int) -> str:
    return f"{act.by}: {cell(act.text)}{_at(act.at, now)}"


def _post(post: Post, now: int) -> str:
    what = f"{post.kind} {post.sequence}" if post.sequence is not None else post.kind
    number = f" (number {post.number})" if post.state == "dead" else ""
    return f"{cell(what)} is {post.state} in queue {cell(post.queue)}{number}, {_MOMENTS[post.state]}{_at(post.at, now)}"


def _stuck_lines(report: StuckReport, now: int) -> list[str]:
    swept = _swept(report.passes, now)
    if not report.runs:
        return swept if report.passes.unswept else ["no run needs a human", *swept]
    rows = [
        (run.run_id, run.workflow, run.status, run.kind, "" if run.since is None else relative(run.since, now),
         run.advice, cut(cell(run.reason), WIDTH) + (f" (and {run.also} more)" if run.also else ""))
        for run in report.runs
    ]  # fmt: skip
    more = ["", "there are more: --limit N"] if report.more else []
    return [
        *table(("run", "workflow", "status", "kind", "since", "do", "reason"), rows),
        *more,
        "",
        "`dramatiq-saga why RUN` says more",
        *swept,
    ]


def _swept(passes: LastPasses, now: int) -> list[str]:
    """When something last swept; and that nothing does, where that is so."""
    monitor, doctor = ("never" if at is None else relative(at, now) for at in (passes.monitor, passes.repair))
    last = f"last passes: monitor {monitor}, doctor {doctor}"
    return [last, _UNSWEPT] if passes.unswept else [last]
