"""The demonstration is what README's first command runs: it has to work wherever somebody tries it, and to leave nothing behind.

It runs from a copy of the checkout whose path has spaces, started from another directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.waiting import eventually

PROMISES = 7


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "a checkout with spaces"
    for name in ("dramatiq_saga", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def start(checkout: Path) -> subprocess.Popen[str]:
    """The demonstration by its path, from elsewhere. Its output is a pipe, as in ``… | less``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-W", "error::DeprecationWarning:dramatiq_saga", str(checkout / "examples" / "demo")],
        cwd=checkout.parent,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # not ignored, as in a script's background
    )


def processes_of(checkout: Path) -> list[int]:
    """Every live process that was started with this checkout's demonstration in its environment."""
    mark = f"SAGA_DEMO_DIRECTORY={checkout}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def until(process: subprocess.Popen[str], text: str) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if text in line:
            return
    raise AssertionError(f"the demonstration ended without saying {text!r}")


def test_two_killed_workers_lose_no_order_and_undo_nothing_twice(checkout: Path) -> None:
    """C20, C28, CLAIM-2, FENCE-4: every promise of the demonstration holds, by the effects that it has counted itself."""
    process = start(checkout)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert output.count("\n  ok  ") == PROMISES, output
    assert output.count("killed with SIGKILL") == 4, output  # told twice when they happen and twice in the timelines
    assert processes_of(checkout) == []
    assert list((checkout / "build").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_demonstration_takes_its_workers_along(checkout: Path, number: int) -> None:
    """Ctrl-C in the middle, with a worker that has just been killed and its successor still booting."""
    process = start(checkout)
    lines = list(until(process, "worker C started"))
    assert len(processes_of(checkout)) >= 2
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(lines) + rest
    assert processes_of(checkout) == []
    assert list((checkout / "build").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_workers_do_not_outlive_a_demonstration_that_is_killed(checkout: Path) -> None:
    process = start(checkout)
    list(until(process, "worker C started"))
    assert processes_of(checkout)
    process.kill()
    process.wait()
    eventually(lambda: processes_of(checkout) == [], because="the workers are gone")
    assert process.stdout is not None
    process.stdout.close()
