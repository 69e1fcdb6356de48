"""``queues``: how deep they are, the dead letters, and what becomes of those. For database brokers only.

It reads and writes the queue's own table, so a database is enough.
Requeueing renews a message's tries, because an operator asked for it; purging deletes dead letters and nothing else.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..brokers.dead_letters import DeadLetter
from ..clock import to_iso
from ..operations import Operator, run_of
from .answer import Answer, cell, cut, moment, table
from .runs import positive


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declare this module's commands."""
    queues = commands.add_parser(
        "queues", parents=[common], help="queue depths and dead letters of a database broker",
        description="How deep each queue is, and the newest dead letters: messages that were given up.",
    )  # fmt: skip
    queues.add_argument("--limit", type=positive, default=20, metavar="N", help="how many dead letters at most (20)")
    queues.set_defaults(run=_queues)
    actions = queues.add_subparsers(title="what to do with dead letters", dest="action")
    requeue = actions.add_parser("requeue", parents=[common], help="send a dead letter again, its tries renewed")
    requeue.add_argument("message", metavar="MESSAGE", help="its number in the list, or its message id")
    requeue.set_defaults(run=_requeue)
    purge = actions.add_parser("purge", parents=[common], help="delete the dead letters of a queue")
    purge.add_argument("queue", metavar="QUEUE")
    purge.set_defaults(run=_purge)


def _queues(operator: Operator, options: argparse.Namespace) -> Answer:
    stats = operator.queues()
    letters = operator.dead_letters(limit=options.limit)
    depths = [(one.queue, one.ready, one.delayed, one.reserved, one.dead) for one in stats]
    lines = table(("queue", "ready", "delayed", "reserved", "dead"), depths) if stats else ["all queues are empty"]
    if letters:
        rows = [
            (
                letter.id,
                letter.queue,
                letter.actor,
                moment(letter.died_at),
                run_of(letter) or letter.message_id,
                _reason(letter),
            )
            for letter in letters
        ]
        lines += ["", *table(("dead", "queue", "actor", "died", "run or message", "reason"), rows)]
        dead = sum(one.dead for one in stats)
        if dead > len(letters):
            lines.append(f"(the newest {len(letters)} of {dead}; --limit shows more)")
    value = {
        "queues": [
            {"queue": one.queue, "ready": one.ready, "delayed": one.delayed, "reserved": one.reserved, "dead": one.dead}
            for one in stats
        ],
        "dead_letters": [_as_dict(letter) for letter in letters],
    }
    return Answer(value, lines)


def _reason(letter: DeadLetter) -> str:
    return cut(cell(letter.reason.partition("\n")[0]), 100)


def _as_dict(letter: DeadLetter) -> dict[str, Any]:
    return {
        "number": letter.id, "queue": letter.queue, "actor": letter.actor, "message_id": letter.message_id, "run_id": run_of(letter),
        "reason": letter.reason, "deliveries": letter.attempts, "enqueued_at": to_iso(letter.enqueued_at), "died_at": to_iso(letter.died_at),
    }  # fmt: skip


def _requeue(operator: Operator, options: argparse.Namespace) -> Answer:
    letter = operator.requeue(options.message)
    line = f"dead letter {letter.id} ({cell(letter.actor)}) is on queue {cell(letter.queue)} again, its tries renewed"
    return Answer(_as_dict(letter), [line])


def _purge(operator: Operator, options: argparse.Namespace) -> Answer:
    count = operator.purge(options.queue)
    noun = "dead letter" if count == 1 else "dead letters"
    note = None
    if not count and options.queue not in {one.queue for one in operator.queues()}:
        note = f"there is no message in a queue {cell(options.queue)}: `dramatiq-saga queues` lists those that have some"
    value = {"queue": options.queue, "purged": count}
    return Answer(value, [f"{count} {noun} of queue {cell(options.queue)} deleted"], note=note)
