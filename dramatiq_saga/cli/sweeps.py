"""``init``, ``monitor``, ``repair``, ``sweep`` and ``prune``: what is done to a whole database.

A sweep prints one line of counts and ends with status 0 when it ran, whatever it found.
A store that refuses ends it with status 1 and a clear line; nothing is lost by that, because the next sweep goes on from there.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ..clock import moment_to_ms
from ..operations import Operator
from ..recovery.sweep import as_dict, line
from .answer import Answer, moment, times
from .runs import positive


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's commands."""
    init = commands.add_parser(
        "init", parents=[common], help="create or migrate the tables",
        description="Create the tables, or bring them up to date. Safe to repeat, and from many processes at once.",
    )  # fmt: skip
    init.set_defaults(run=_init)
    sweep = commands.add_parser(
        "sweep", parents=[common], help="monitor, then repair: what cron runs",
        description="End what is overdue and drive held runs whose window is over, then send again what was lost (if repair is on); "
        "prints one line of counts. What another process is doing just now is skipped, and the line says so.",
    )  # fmt: skip
    sweep.set_defaults(run=_sweep)
    monitor = commands.add_parser(
        "monitor", parents=[common], help="the first half of a sweep: end what is overdue",
        description="End what is overdue, and drive held runs whose window is over; prints one line of counts.",
    )  # fmt: skip
    monitor.set_defaults(run=_monitor)
    repair = commands.add_parser(
        "repair", parents=[common], help="the second half of a sweep: send again what was lost",
        description="Send again what was lost; prints one line of counts. Refused where repair is off (repair.enabled).",
    )  # fmt: skip
    repair.set_defaults(run=_repair)
    prune = commands.add_parser(
        "prune", parents=[common], help="delete runs that ended long ago",
        description="Delete runs that ended longer ago than prune.retention_days (90), with everything that belongs to them. "
        "Runs stay whose rollback is at work or halted, and those that have a child at work.",
    )  # fmt: skip
    when = prune.add_mutually_exclusive_group()
    when.add_argument("--days", metavar="N", type=_days, help="instead of prune.retention_days")
    when.add_argument(
        "--before", metavar="TIME", type=_time, help="those that ended before this: 2026-03-01, or 2026-03-01T12:00Z"
    )
    prune.add_argument("--limit", metavar="N", type=positive, help="at most this many")
    prune.add_argument("--dry-run", action="store_true", help="only count them")
    prune.set_defaults(run=_prune)


def _init(operator: Operator, options: argparse.Namespace) -> Answer:
    applied = operator.init()
    version = operator.store.schema_version()
    lines = [f"migrated: {', '.join(applied)}" if applied else "nothing to do", f"the tables are at version {version}"]
    return Answer({"applied": applied, "version": version}, [": ".join(lines) if not applied else "; ".join(lines)])


def _sweep(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.sweep()
    return Answer(report.as_dict(), [f"sweep: {report.line()}"])


def _monitor(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.monitor()
    return Answer(as_dict(monitor=report), [f"monitor: {line(report)}"])


def _repair(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.repair()
    return Answer(as_dict(repair=report), [line(report)])


def _days(text: str) -> float:
    with suppress(ValueError):
        days = float(text)
        if 0 <= days < 100_000:
            return days
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from 0, such as 30 or 0.5")


def _time(text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-03-01, or 2026-03-01T12:00Z") from None
    return moment_to_ms(found if found.tzinfo is not None else found.replace(tzinfo=UTC))


def _prune(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.prune(days=options.days, before=options.before, limit=options.limit, dry_run=options.dry_run)
    runs = times(report.pruned, "run", "runs")
    line = f"{runs} would be deleted" if report.dry_run else f"{runs} deleted"
    skipped = f"; {report.skipped} skipped: changed meanwhile" if report.skipped else ""
    value = {"before": report.before, "pruned": report.pruned, "skipped": report.skipped, "dry_run": report.dry_run}
    return Answer(value, [f"prune: {line} that ended until {moment(report.before)}{skipped}"])
