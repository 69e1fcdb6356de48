"""Noticing soon that another process has committed something to the SQLite file.

Two ways, both a matter of latency only, since consumers look once a second in any case and polling never stops:

* the bell, on Linux: an empty file beside the database. Whoever has committed a message opens and closes it, which changes
  nothing on the disk; whoever waits is told by the kernel (inotify). No list of processes, nothing left behind by a crash.
* polling ``PRAGMA data_version`` on a read-only connection of its own, every ``poll_interval``, and ten times less often
  where the bell works, for writers that do not ring. It takes no lock that a writer would wait for.

One thread per process does both. It knows nothing about messages: the idle consumers look for themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread

#: With a bell, polling is this many times slower.
RELAXED = 10

#: How often the watcher looks whether the file is still the one that it has opened, seconds.
FILE_CHECK_INTERVAL = 1.0

#: Seconds between two wake-ups at least, in a storm of messages: one reason to look, not thousands.
BREATH = 0.005

_IN_CLOSE_NOWRITE, _IN_IGNORED, _IN_NONBLOCK, _IN_CLOEXEC = 0x10, 0x8000, 0o4000, 0o2000000


class Bell:
    """A file that is rung by opening and closing it."""

    def __init__(self, database_path: str) -> None:
        self.path = database_path + "-bell"

    def ring(self) -> None:
        """Wake the waiting consumers of every process. Never raises: nothing rests on it."""
        with contextlib.suppress(OSError):  # not there: nobody has ever waited here, so nobody does now
            os.close(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))

    def listen(self) -> int | None:
        """A descriptor that becomes readable when the bell is rung; ``None`` where the system cannot do that."""
        if sys.platform != "linux":
            return None
        try:
            os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            libc = ctypes.CDLL(None, use_errno=True)
            handle = int(libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
            if handle < 0:
                return None
            if libc.inotify_add_watch(handle, os.fsencode(self.path), _IN_CLOSE_NOWRITE) < 0:
                os.close(handle)
                return None
        except (OSError, AttributeError):
            return None
        return handle


class FileWatcher:
    """Calls ``on_change`` after commits to the SQLite file at ``path`` by any other connection, and ``on_replaced`` once another
    file stands there: whoever has opened the old one would look into it for ever."""

    def __init__(
        self,
        path: str,
        *,
        bell: Bell,
        interval: float,
        on_change: Callable[[], None],
        on_replaced: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._bell = bell
        self._interval = interval
        self._on_change = on_change
        self._on_replaced = on_replaced or on_change
        self._lock = Lock()
        self._thread: Thread | None = None
        self._stop = Event()

    def start(self) -> None:
        """Start the thread unless it runs already. When this returns, the bell is heard."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._stop = Event()
                arguments = (self._stop, self._bell.listen())
                self._thread = Thread(target=self._run, args=arguments, name=f"saga-watcher-{os.getpid()}", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: its connection must be closed before the file may be moved or deleted."""
        with self._lock:
            self._stop.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._bell.ring()
            thread.join(timeout=1.0)

    def _run(self, stop: Event, handle: int | None) -> None:
        version = _DataVersion(self._path)
        seen = None
        file, looked_at = _identity(self._path), time.monotonic()
        while not stop.is_set():
            file = file or _identity(self._path)  # the one that the first of us to open it has made
            if time.monotonic() - looked_at > FILE_CHECK_INTERVAL:
                looked_at, found = time.monotonic(), _identity(self._path)
                if file is not None and found is not None and found != file:
                    version.close()
                    version = _DataVersion(self._path)
                    self._on_replaced()
                file = found or file
            if handle is None:
                stop.wait(self._interval)
            elif select.select([handle], [], [], self._interval * RELAXED)[0]:
                heard = _drain(handle)
                if not heard:  # the file was deleted: listen to its successor
                    os.close(handle)
                    handle = self._bell.listen()
                self._on_change()
                time.sleep(BREATH)
                continue
            current = version.get()
            if current != seen:
                seen = current
                self._on_change()
        version.close()
        if handle is not None:
            os.close(handle)


def _drain(handle: int) -> bool:
    """Take what has happened; whether the file that is watched is still there."""
    with contextlib.suppress(BlockingIOError):
        while True:
            events = os.read(handle, 4096)
            # one event of a watched file: descriptor, mask, cookie and a name of length zero, four bytes each
            for offset in range(0, len(events), 16):
                if int.from_bytes(events[offset + 4 : offset + 8], sys.byteorder) & _IN_IGNORED:
                    return False
    return True


def _identity(path: str) -> tuple[int, int] | None:
    """Which file stands at ``path``; ``None`` while there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class _DataVersion:
    """SQLite's counter of commits by others, on a connection that does nothing else."""

    def __init__(self, path: str) -> None:
        self._uri = f"{Path(path).absolute().as_uri()}?mode=ro"
        self._connection: sqlite3.Connection | None = None

    def get(self) -> int | None:
        """The present number; ``None``, after a pause, while the file is locked exclusively or not there yet."""
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._uri, uri=True, timeout=0)
            number: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
            return number
        except sqlite3.Error:
            time.sleep(0.1)
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
