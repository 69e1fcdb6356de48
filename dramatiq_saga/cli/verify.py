"""``verify``: do the runs that are under way fit the code that is about to be deployed?

Replays what is recorded against the application's code and changes nothing. Exit status 0: everything fits; 1: something would
be held, or is and stays so. ``--export`` writes a run's history to a file, for tests; it holds the run's arguments and results.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..engine.verify import Problem, VerifyReport
from ..operations import Operator, RefusedError
from ..store.connections import file_of
from ..store.sql import SQLITE
from .answer import Answer, cell, cut

#: Longest message in one line, and the most runs that are named for one finding, in a text for people.
WIDTH, NAMED = 300, 5


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's command."""
    verify = commands.add_parser(
        "verify", parents=[common], help="whether runs fit the application's code",
        description="Replay what is recorded of live runs against the application's code. Runs no step, calls no side effect, "
        "changes nothing. Exit status 0: everything fits; 1: something would not.",
    )  # fmt: skip
    verify.add_argument("run_id", metavar="RUN", nargs="?", help="this run only, live or not")
    verify.add_argument("--workflow", metavar="NAME", help="runs of this workflow only")
    verify.add_argument("--finished", action="store_true", help="runs that have ended as well")
    verify.add_argument(
        "--export",
        metavar="FILE",
        help="write the history of RUN to a file, its arguments and results included, and verify nothing; "
        "replaces a history that is there, and nothing else",
    )
    verify.set_defaults(run=_verify)


def _verify(operator: Operator, options: argparse.Namespace) -> Answer:
    if options.run_id is not None and (options.workflow or options.finished):
        raise RefusedError("name one run, or say which runs with --workflow and --finished; not both")
    if options.export is not None:
        return _export(operator, options)
    report = operator.verify(options.run_id, workflow=options.workflow, finished=options.finished)
    return Answer(_as_dict(report), _lines(report), done=report.fits)


def _export(operator: Operator, options: argparse.Namespace) -> Answer:
    if options.run_id is None:
        raise RefusedError("--export writes the history of one run: name it")
    if not options.export:
        raise RefusedError("--export takes the name of a file, and that is empty: write it like --export checkout.json")
    if _belongs_to(operator, options.export):
        raise RefusedError(f"{options.export} belongs to the database itself: choose another name")
    history = operator.export(options.run_id)
    try:
        path = history.write(options.export)
    except FileExistsError as error:
        raise RefusedError(f"{error}; choose another name, or remove it first") from None
    except OSError as error:
        raise RefusedError(f"{options.export} cannot be written: {error}") from None
    entries = len(history.document["entries"])
    value = {"run_id": history.run_id, "workflow": history.workflow, "file": str(path), "entries": entries}
    return Answer(
        value,
        [f"run {cell(history.run_id)} of {cell(history.workflow)}: {entries} entries written to {cell(path)}"],
        note="it holds the run's arguments, results and error messages as they are: look before you check it in",
    )


def _belongs_to(operator: Operator, path: str) -> bool:
    """Whether it is the file of an SQLite database, or one of those that stand beside it (``-wal``, ``-turn``), there or not."""
    store = operator.store
    database = file_of(store.database) if store.dialect == SQLITE else None
    if database is None:
        return False
    target, own = os.path.realpath(path), os.path.realpath(database)
    return target == own or target.startswith(f"{own}-")


def _lines(report: VerifyReport) -> list[str]:
    fit = report.looked_at - report.unfit
    if not report.looked_at:
        return ["no run to verify"]
    runs = f"{report.looked_at} {'run' if report.looked_at == 1 else 'runs'} looked at"
    if report.fits:
        lines = [f"{runs}: {'it fits' if report.looked_at == 1 else 'all fit'}"]
    else:
        lines = [f"{runs}: {fit} {'fits' if fit == 1 else 'fit'}, {report.unfit} {'does' if report.unfit == 1 else 'do'} not"]
    if report.held:
        waits = "a sweep drives it again" if report.held_and_fit == 1 else "a sweep drives them again"
        goes = f"; {report.held_and_fit} of them would go on: {waits}, a kick at once" if report.held_and_fit else ""
        lines.append(f"held already: {report.held}{goes}")
    for problem in report.problems:
        lines += ["", *_problem(problem)]
    if report.more:
        lines += ["", f"and {report.more} findings more that are not listed"]
    if any(problem.finding.kind == "mismatch" for problem in report.problems):
        lines += ["", "a run that does not fit is held, not failed: it goes on once code that fits is deployed"]
    return lines


def _problem(problem: Problem) -> list[str]:
    finding = problem.finding
    many = f"{problem.runs} {'run' if problem.runs == 1 else 'runs'}"
    where = f", sequence {finding.sequence}" if finding.sequence is not None else ""
    held = f" ({problem.held} held)" if problem.held else ""
    named = ", ".join(cell(run_id) for run_id in problem.run_ids[:NAMED])
    more = f" and {problem.runs - NAMED} more" if problem.runs > NAMED else ""
    return [
        f"{finding.kind}: {many} of {cell(finding.workflow)}{where}{held}",
        f"  {cut(cell(finding.reason), WIDTH)}",
        f"  {named}{more}",
    ]


def _as_dict(report: VerifyReport) -> dict[str, Any]:
    return {
        "fits": report.fits, "looked_at": report.looked_at, "unfit": report.unfit, "held": report.held,
        "held_and_fit": report.held_and_fit, "more": report.more,
        "problems": [
            {
                "kind": problem.finding.kind, "fits": problem.finding.fits, "workflow": problem.finding.workflow,
                "sequence": problem.finding.sequence, "recorded": problem.finding.recorded, "asked": problem.finding.asked,
                "reason": problem.finding.reason, "runs": problem.runs, "held": problem.held, "run_ids": problem.run_ids,
            }
            for problem in report.problems
        ],
    }  # fmt: skip
