"""``schedule``: monitor, repair and prune in one process that stays, in place of cron.

What it says while it runs goes to stderr, a line at a time: its plan, then each pass that has something to say. SIGTERM and SIGINT
stop it in order: the pass under way ends first, and the exit status is 0. A second signal stops it at once.
"""

from __future__ import annotations

import argparse
import signal
from queue import SimpleQueue
from types import FrameType
from typing import Any

from ..codec import printable
from ..commands import install
from ..operations import Operator
from ..recovery.schedule import PRUNE_AT, Plan
from ..settings import Settings
from .answer import Answer, moment

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's commands."""
    schedule = commands.add_parser(
        "schedule", parents=[common], help="monitor, repair and prune in a process that stays",
        description="Monitor, repair (if it is on) and prune again and again, until SIGTERM or Ctrl-C. Any number of such processes may "
        "run: one pass is done per interval. Needs APScheduler: " + install("schedule"),
    )  # fmt: skip
    schedule.add_argument(
        "--monitor-seconds", metavar="N", type=_checked("monitor_seconds", float), help="instead of loop.monitor_seconds (30)"
    )
    schedule.add_argument(
        "--repair-seconds", metavar="N", type=_checked("repair_seconds", float), help="instead of loop.repair_seconds (60)"
    )
    schedule.add_argument(
        "--prune-at", metavar="HH:MM", type=_prune_at, default=PRUNE_AT,
        help=f"when to prune, every day; never: not at all; unless given, {PRUNE_AT}",
    )  # fmt: skip
    schedule.add_argument(
        "--timezone", metavar="ZONE", type=_checked("timezone", str), default="UTC",
        help="the zone of that time, such as Europe/Berlin; unless given, UTC",
    )  # fmt: skip
    schedule.set_defaults(run=_schedule)


def _checked(name: str, read: Any) -> Any:
    def check(text: str) -> Any:
        try:
            value = read(text)
            Plan.make(Settings(), **{name: value})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return check


def _prune_at(text: str) -> Any:
    return None if text == "never" else _checked("prune_at", str)(text)


def _schedule(operator: Operator, options: argparse.Namespace) -> Answer:
    stop: SimpleQueue[str] = SimpleQueue()  # its put() may interrupt anything, its own get() too

    def ask(number: int, frame: FrameType | None) -> None:
        stop.put(signal.Signals(number).name)
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_DFL)

    def tell(text: str) -> None:
        print(f"{moment(operator.store.clock.now())} {printable(text)}", flush=True)

    before = {one: signal.signal(one, ask) for one in _SIGNALS}
    try:
        reason = operator.schedule(
            stop=stop, tell=tell, monitor_seconds=options.monitor_seconds, repair_seconds=options.repair_seconds,
            prune_at=options.prune_at, timezone=options.timezone,
        )  # fmt: skip
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return Answer({"stopped_by": reason}, [f"schedule: stopped by {reason}"])
