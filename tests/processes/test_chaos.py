"""A bad day: sagas of every kind on workers that are killed, paused and restarted at random (idea 1, idea 2, FENCE-2, RECLAIM-5, C63).

Short here. Longer, with a seed of your own (the seed is printed; one that fails leads to a test by interleaving), also with the queue
in PostgreSQL:

    CHAOS_RUNS=500 CHAOS_MISFORTUNES=400 CHAOS_SEED=7 python -m pytest tests/processes/test_chaos.py -n 0 -s
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import chaos_app
from tests.support.chaos import Chaos
from tests.support.effects import VARIABLE, EffectLog
from tests.support.invariants import fought_over, violations
from tests.support.processes import WorkerProcess

RUNS = int(os.environ.get("CHAOS_RUNS", "16"))
MISFORTUNES = int(os.environ.get("CHAOS_MISFORTUNES", "12"))
KINDS = ["sqlite", "redis", "rabbitmq", *(["postgresql"] if "CHAOS_RUNS" in os.environ else [])]
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


def holds_the_file(path: Path) -> Callable[[float], None]:
    """Lock an SQLite file for a while, as a backup or a person with a shell does."""

    def hold(seconds: float) -> None:
        connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    return hold


@pytest.mark.timeout(max(120, RUNS * 4))
@pytest.mark.parametrize("kind", KINDS)
def test_no_misfortune_loses_work_does_recorded_work_twice_or_overwrites_an_outcome(
    kind: str,
    request: pytest.FixtureRequest,
    sqlite_path: Path,
    table_prefix: str,
    effects: EffectLog,
    worker_process: Callable[..., WorkerProcess],
) -> None:
    """Every invariant of the property list, against what the bodies themselves have told."""
    seed = SEED
    print(f"CHAOS_SEED={seed} kind={kind}")
    url = f"sqlite:///{sqlite_path}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    environment: dict[str, Any] = {chaos_app.DATABASE: url, chaos_app.PREFIX: table_prefix, VARIABLE: str(effects.path)}
    if kind in ("redis", "rabbitmq"):
        environment[chaos_app.REDIS if kind == "redis" else chaos_app.RABBITMQ] = request.getfixturevalue(f"{kind}_url")
    chaos = Chaos(
        seed, environment, start_worker=worker_process, lock=holds_the_file(sqlite_path) if kind == "sqlite" else None
    )
    try:
        chaos.send(RUNS // 2)
        for _ in range(MISFORTUNES):
            chaos.misfortune()
            chaos.send(max(1, RUNS // 2 // MISFORTUNES))
            time.sleep(chaos.dice.uniform(0.0, 0.3))  # what goes wrong is spread over time; nothing is expected of it
        chaos.settle()
    finally:
        chaos.close()
    print(f"{len(chaos.runs)} runs, {dict(chaos.happened)}, worked on twice at once: {fought_over(effects)}")
    broken = violations(chaos.store, effects)
    assert not broken, f"CHAOS_SEED={seed}:\n" + "\n".join(broken)
