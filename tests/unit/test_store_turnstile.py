"""Writers of many processes take turns at a side file; correctness never rests on it."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dramatiq_saga.store import turnstile
from dramatiq_saga.store.database import open_store
from dramatiq_saga.store.turnstile import Turnstile
from tests.support.processes import Process
from tests.support.stores import add
from tests.support.waiting import eventually

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saga.db-turn"


@pytest.fixture
def line(path: Path) -> Iterator[Turnstile]:
    line = Turnstile(str(path))
    yield line
    line.close()


def is_free(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_one_passes_at_a_time(line: Turnstile, path: Path) -> None:
    assert line.enter()
    assert not is_free(path)
    line.leave()
    assert is_free(path)


def test_whoever_waits_passes_when_the_holder_leaves(line: Turnstile, path: Path) -> None:
    other = Turnstile(str(path))
    passed = threading.Event()

    def wait() -> None:
        assert other.enter()
        passed.set()

    assert line.enter()
    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: other._helper is not None)
    assert not passed.is_set()
    line.leave()
    assert passed.wait(20)
    thread.join()
    assert not is_free(path)
    other.leave()
    assert is_free(path)
    other.close()


def test_a_stopped_holder_does_not_stop_the_others(
    line: Turnstile, path: Path, python_process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnstile, "PATIENCE", 0.05)
    holder = python_process("-c", HOLD, str(path))
    holder.wait_for_output("locked")
    holder.send(signal.SIGSTOP)

    assert not line.enter(), "it goes on without"
    assert not line.enter()
    holder.kill()
    eventually(lambda: is_free(path), because="a turn that came too late is passed on")
    assert line.enter()
    line.leave()


def test_the_lock_of_a_killed_process_is_free(line: Turnstile, path: Path, python_process: Callable[..., Process]) -> None:
    holder = python_process("-c", HOLD, str(path))
    holder.wait_for_output("locked")
    holder.kill()
    assert line.enter()
    line.leave()


def test_a_forked_child_keeps_no_lock_of_its_parent(line: Turnstile, path: Path) -> None:
    """A copy of the file kept open in the child would hold the lock after the parent's death."""
    assert line.enter()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        line.abandon()
        os.write(writing, b"abandoned")
        os.close(writing)
        signal.pause()
        os._exit(0)
    assert os.read(reading, 100) == b"abandoned"
    assert not is_free(path), "closing the copy does not unlock it"
    os.close(line._own)
    line._own = -1
    assert is_free(path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("case", ["no directory", "not POSIX"])
def test_without_a_lock_everybody_goes_on(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile, "AVAILABLE", case != "not POSIX")
    line = Turnstile(str(tmp_path / "missing" / "turn" if case == "no directory" else tmp_path / "turn"))
    assert not line.enter()
    line.close()


def test_the_writer_holds_it_while_it_writes_and_only_then(sqlite_path: Path) -> None:
    path = Path(f"{sqlite_path}-turn")
    store = open_store(sqlite_path)
    store.write(add())
    assert is_free(path)
    assert store.write(lambda tx: is_free(path)) is False
    with pytest.raises(ValueError):
        store.write(lambda tx: (_ for _ in ()).throw(ValueError))
    assert is_free(path)
    engine: Any = store._engine
    engine._thread._turnstile.close()  # a closed one is passed by
    assert store.write(add()) == 2
    store.close()
