"""Records golden histories: ``python -m tests.golden.record [NAME ...]``.

Writes the files that are missing, and leaves those that are there: a golden history is added, never edited. To make one anew
that no released version has shipped, delete it first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dramatiq_saga.clock import ManualClock
from dramatiq_saga.histories import History, read_history
from tests.golden.workflows import SCENARIOS, declare
from tests.support.bench import Bench

HISTORIES = Path(__file__).with_name("histories")


def record(name: str) -> History:
    """The history of one scenario, made now: on a file of its own, at a time that is always the same."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(f"sqlite:///{directory}/golden.db", declare, clock=ManualClock())
        try:
            SCENARIOS[name](bench, name)
            return read_history(bench.store, name)
        finally:
            bench.close()


def main(names: list[str]) -> None:
    """Record what is missing of ``names``, or of everything."""
    unknown = sorted(set(names) - set(SCENARIOS))
    if unknown:
        sys.exit(f"no scenario is named {', '.join(unknown)}: there are {', '.join(SCENARIOS)}")
    for name in names or SCENARIOS:
        path = HISTORIES / f"{name}.json"
        if not path.exists():
            record(name).write(path).chmod(0o644)
            print(f"recorded {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
