"""Worker processes: the real ``dramatiq`` command, started as a service manager would, killed as a power cut would.

Each leads a process group of its own, so a kill takes its children with it. Nothing outlives the demonstration: what is left
is stopped at the end, and where the demonstration itself is killed, the kernel tells its workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Worker:
    """One ``dramatiq`` command with one worker process behind it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.log = directory / f"worker-{name}.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dramatiq", "examples.demo.shop", "--processes", "1", "--threads", "4"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SAGA_DEMO_WORKER": name, "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
                cwd=directory,
                start_new_session=True,
                preexec_fn=_die_with_parent if _libc else None,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to all of it at once: nothing gets to say goodbye."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def ask_to_stop(self) -> None:
        """SIGTERM, as a deploy sends it: Dramatiq passes it on to its worker process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def await_end(self, seconds: float) -> None:
        """Wait until it has gone; what has not by then is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def stop(workers: Iterable[Worker]) -> None:
    """All of them are gone when this returns."""
    stopping = list(workers)
    for worker in stopping:
        worker.ask_to_stop()
    for worker in stopping:
        worker.await_end(10)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _die_with_parent() -> None:
    """In the child, before it becomes ``dramatiq``: ask for SIGTERM when the demonstration dies, even of SIGKILL."""
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
