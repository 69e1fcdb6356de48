"""Noticing, within about ``poll_interval``, that another process has committed something to the SQLite file.

One thread per process asks its own read-only connection for ``PRAGMA data_version``, which costs a few microseconds and
takes no lock that a writer would wait for. It knows nothing about messages: on a change the idle consumers look for
themselves. Noticing is a matter of latency only; a consumer looks once a second in any case, so nothing rests on this thread.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..store.database import Store


class FileWatcher:
    """Calls ``on_change`` after commits to the SQLite file at ``path`` by any other connection."""

    def __init__(self, path: str, *, interval: float, on_change: Callable[[], None]) -> None:
        self._path = path
        self._interval = interval
        self._on_change = on_change
        self._lock = Lock()
        self._thread: Thread | None = None
        self._stopped = True

    def start(self) -> None:
        """Start the thread unless it runs already."""
        with self._lock:
            if self._stopped or self._thread is None or not self._thread.is_alive():
                self._stopped = False
                self._thread = Thread(target=self._run, name=f"saga-watcher-{os.getpid()}", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: its connection must be closed before the file may be moved or deleted."""
        with self._lock:
            self._stopped = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=1.0)

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        seen: int | None = None
        while not self._stopped:
            time.sleep(self._interval)
            try:
                if connection is None:
                    connection = sqlite3.connect(f"{Path(self._path).absolute().as_uri()}?mode=ro", uri=True, timeout=0)
                version = connection.execute("PRAGMA data_version").fetchone()[0]
            except sqlite3.Error:
                # busy with an exclusive lock, or not there yet: the consumers' own look once a second still stands
                version = None
                time.sleep(min(1.0, self._interval * 10))
            if version != seen:
                seen = version
                self._on_change()
        if connection is not None:
            connection.close()


def sqlite_file(store: Store) -> str | None:
    """The file of an SQLite store; ``None`` for memory and for servers."""
    if store.dialect != "sqlite":
        return None
    name = str(store.database.database)
    if not name or ":memory:" in name or "mode=memory" in name:
        return None
    return name.removeprefix("file:").partition("?")[0] if name.startswith("file:") else name
