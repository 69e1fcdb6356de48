"""Real processes, really killed.

Every process started here leads a session of its own, so that a kill reaches its children too and nothing outlives the
test that started it. Output goes to a file: nobody blocks on a full pipe, and it is there to read after a kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.waiting import DEADLINE, eventually

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A Python process of the test's own: ``python *arguments``, with this checkout importable; ``wrapper`` is the command that runs it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        output: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self.arguments = list(arguments)
        self.output_path = output
        with output.open("wb") as sink:
            self._popen = subprocess.Popen(
                [*wrapper, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd or ROOT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def output(self) -> str:
        """Everything that the process and its children have printed so far."""
        return self.output_path.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the process alone; Dramatiq's master passes SIGTERM on to its workers."""
        self._popen.send_signal(number)

    def terminate(self, timeout: float = DEADLINE) -> int:
        """SIGTERM, then wait: an orderly shutdown."""
        self.send(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILL to the process and all its children at once, as when the machine loses power; returns when they are gone."""
        self._signal_group(signal.SIGKILL)
        self._popen.wait()
        eventually(lambda: not self._group_alive(), because=f"the process group of {self.pid} is gone")

    def wait(self, timeout: float = DEADLINE) -> int:
        """The exit status; an ``AssertionError`` with the output when the process does not end in time."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {timeout:g} s; it printed:\n{self.output()}") from None

    def wait_for_output(self, text: str, times: int = 1, *, timeout: float = DEADLINE) -> None:
        """Returns once the process has printed ``text`` that often; fails at once when it ends before."""

        def printed() -> bool:
            ended = not self.running  # asked first: what was printed just before the end counts
            if self.output().count(text) >= times:
                return True
            if ended:
                raise RuntimeError(f"{self} ended with {self._popen.returncode} before printing {text!r}:\n{self.output()}")
            return False

        try:
            eventually(printed, timeout, because=f"{self} prints {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n{self.output()}") from None

    def close(self) -> None:
        """Leave nothing behind, whatever state things are in."""
        self._signal_group(signal.SIGKILL)
        self._popen.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _group_alive(self) -> bool:
        """Whether anything of the group still runs. Zombies that await their new parent do not count."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = entry.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state not in "ZX":
                    return True
        return False

    def __str__(self) -> str:
        return f"process {self.pid} (python {' '.join(self.arguments)})"


class WorkerProcess(Process):
    """``python -m dramatiq MODULE``: the real command, with one or more real worker processes behind it."""

    def __init__(
        self,
        module: str,
        *,
        output: Path,
        processes: int = 1,
        threads: int = 4,
        queues: Sequence[str] = (),
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        command = ["-m", "dramatiq", module, "--processes", str(processes), "--threads", str(threads), *arguments]
        if queues:
            command += ["--queues", *queues]
        self.processes = processes
        super().__init__(command, output=output, env=env, cwd=cwd, wrapper=wrapper)

    def wait_ready(self, timeout: float = DEADLINE) -> None:
        """Returns once every worker process consumes its queues."""
        self.wait_for_output("Worker process is ready for action.", self.processes, timeout=timeout)
