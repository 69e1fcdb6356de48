"""``init`` and ``sweep``: what is done to a whole database.

A sweep prints one line of counts and ends with status 0 when it ran, whatever it found.
A store that refuses ends it with status 1 and a clear line; nothing is lost by that, because the next sweep goes on from there.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..operations import Operator
from .answer import Answer


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's commands."""
    init = commands.add_parser(
        "init", parents=[common], help="create or migrate the tables",
        description="Create the tables, or bring them up to date. Safe to repeat, and from many processes at once.",
    )  # fmt: skip
    init.set_defaults(run=_init)
    sweep = commands.add_parser(
        "sweep", parents=[common], help="monitor, then repair: what cron runs",
        description="Drive held runs whose window is over, then send again what was lost (if repair is on); prints one line of counts.",
    )  # fmt: skip
    sweep.set_defaults(run=_sweep)


def _init(operator: Operator, options: argparse.Namespace) -> Answer:
    applied = operator.init()
    version = operator.store.schema_version()
    lines = [f"migrated: {', '.join(applied)}" if applied else "nothing to do", f"the tables are at version {version}"]
    return Answer({"applied": applied, "version": version}, [": ".join(lines) if not applied else "; ".join(lines)])


def _sweep(operator: Operator, options: argparse.Namespace) -> Answer:
    report = operator.sweep()
    return Answer(report.as_dict(), [f"sweep: {report.line()}"])
