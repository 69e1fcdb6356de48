"""An SQLite file that is replaced under an idle worker (restored from a backup, say)."""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq

from dramatiq_saga.brokers import SQLiteBroker
from tests.support.brokers import middleware, working
from tests.support.waiting import eventually


def test_an_idle_worker_goes_on_with_the_file_that_is_there(sqlite_path: Path, tmp_path: Path) -> None:
    """It would look into the deleted file for ever: an idle worker writes nothing, so no write would notice."""
    seen: list[str] = []
    broker = SQLiteBroker(sqlite_path, middleware=middleware())
    dramatiq.set_broker(broker)

    @dramatiq.actor(broker=broker)
    def note(word: str) -> None:
        seen.append(word)

    backup = tmp_path / "backup.db"
    other = SQLiteBroker(backup, middleware=middleware())
    other.declare_queue("default")
    with working(broker, threads=1):
        note.send("before")
        broker.join("default", timeout=20_000)  # idle: its last acknowledgement is written
        assert seen == ["before"]
        other.enqueue(note.message("from the backup"))
        other.close()
        for name in (Path(f"{sqlite_path}-wal"), Path(f"{sqlite_path}-shm")):
            name.unlink(missing_ok=True)
        os.replace(backup, sqlite_path)
        eventually(lambda: seen == ["before", "from the backup"])
    broker.close()
