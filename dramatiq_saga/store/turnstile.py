"""A queue for the writers of many processes: a lock on a side file, taken around a batch.

SQLite's own waiting has no order: a busy writer sleeps in growing steps and whoever asks at the right moment wins, so under
load some wait for seconds. The kernel hands a file lock on at once, and in turn. It is an optimisation only: SQLite's lock
and busy timeout stay the guard, for foreign writers too, and whoever does not get through here within :data:`PATIENCE` goes
on without. The kernel frees the lock of a process that dies.
"""

from __future__ import annotations

import os
import threading

try:
    import fcntl
except ImportError:  # not POSIX: everybody goes on without
    AVAILABLE = False
else:
    AVAILABLE = True

#: How long to wait for one's turn, seconds. A holder that is stopped must not stop the others.
PATIENCE = 1.0


class Turnstile:
    """The lock of one file, for one thread of this process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._own = self._open()
        self._helper: _Helper | None = None
        self._held = -1

    def enter(self) -> bool:
        """Wait for our turn; False when it did not come, or there is no lock. Call :meth:`leave` only after True."""
        if self._own < 0:
            return False
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._stand_in_line()
        except OSError:  # a file system that cannot lock
            return False
        self._held = self._own
        return True

    def leave(self) -> None:
        """Let the next one through."""
        fcntl.flock(self._held, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the file back."""
        if self._own >= 0:
            os.close(self._own)
            self._own = -1
        if self._helper is not None:
            self._helper.stop()

    def abandon(self) -> None:
        """In a forked child: the lock is the parent's. Closing our copies leaves it locked; keeping them would outlive it."""
        for fd in (self._own, self._helper.fd if self._helper else -1):
            if fd >= 0:
                os.close(fd)
        self._own, self._helper = -1, None

    def _open(self) -> int:
        if not AVAILABLE:
            return -1
        try:
            return os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError:  # a directory that we may not write to
            return -1

    def _stand_in_line(self) -> bool:
        if self._helper is None:
            fd = self._open()
            if fd < 0:
                return False
            self._helper = _Helper(fd)
            self._helper.start()
        if self._helper.wait():
            self._held = self._helper.fd
            return True
        return False


class _Helper(threading.Thread):
    """Stands in line: flock() knows no timeout, so a thread waits in it whom nobody has to wait for."""

    def __init__(self, fd: int) -> None:
        super().__init__(name="dramatiq-saga-turnstile", daemon=True)
        self.fd = fd
        self._state = threading.Condition()
        self._wanted = False
        self._came = False
        self._stopped = False

    def wait(self) -> bool:
        """Ask for the lock; True when it came in time and is the caller's."""
        with self._state:
            self._wanted = True
            self._state.notify_all()
            self._state.wait_for(lambda: self._came, PATIENCE)
            came, self._came, self._wanted = self._came, False, False
            return came

    def stop(self) -> None:
        """End the thread once it is through the line."""
        with self._state:
            self._stopped = True
            self._state.notify_all()

    def run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._stopped or (self._wanted and not self._came))
                if self._stopped:
                    break
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            with self._state:
                if self._wanted:
                    self._came = True
                    self._state.notify_all()
                else:  # it came too late: the writer went on without
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
