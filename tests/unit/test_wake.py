"""The bell and the watcher: how a process notices what another one has committed to the SQLite file."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from pathlib import Path

import pytest

from dramatiq_saga.brokers import wake
from dramatiq_saga.brokers.wake import Bell, FileWatcher
from tests.support.waiting import eventually

linux = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


class Heard:
    """Counts changes."""

    def __init__(self) -> None:
        self.times = 0
        self.again = threading.Event()

    def __call__(self) -> None:
        self.times += 1
        self.again.set()

    def wait(self) -> None:
        assert self.again.wait(20), "nothing was heard"

    def forget(self) -> None:
        self.again.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "queue.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = wal")
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    return path


def watcher(path: Path, heard: Heard, interval: float) -> FileWatcher:
    return FileWatcher(str(path), bell=Bell(str(path)), interval=interval, on_change=heard)


@linux
def test_a_rung_bell_is_heard_without_any_polling(path: Path) -> None:
    heard = Heard()
    watching = watcher(path, heard, 3600)
    watching.start()
    for _ in range(3):
        heard.forget()
        Bell(str(path)).ring()
        heard.wait()
    watching.stop()


@linux
def test_a_bell_that_was_deleted_is_hung_up_again(path: Path) -> None:
    heard = Heard()
    watching = watcher(path, heard, 3600)
    watching.start()
    bell = Bell(str(path))
    os.unlink(bell.path)
    heard.wait()
    eventually(lambda: os.path.exists(bell.path))
    heard.forget()

    def ring() -> bool:
        bell.ring()
        return heard.again.wait(0.05)

    eventually(ring)
    watching.stop()


def test_ringing_changes_nothing_on_the_disk(path: Path) -> None:
    bell = Bell(str(path))
    bell.ring()  # nobody has ever listened: no file, no error
    assert not os.path.exists(bell.path)
    Path(bell.path).touch()
    before = os.stat(bell.path)
    bell.ring()
    after = os.stat(bell.path)
    assert (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == (0, before.st_mtime_ns, before.st_ctime_ns)


@pytest.mark.parametrize("listens", [True, False], ids=["with a bell", "without"])
def test_a_commit_of_somebody_who_does_not_ring_is_noticed_by_polling(
    path: Path, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listens:
        monkeypatch.setattr(Bell, "listen", lambda self: None)
    heard = Heard()
    watching = watcher(path, heard, 0.005)
    watching.start()
    heard.wait()  # the first look
    connection = sqlite3.connect(path)
    for _ in range(3):
        heard.forget()
        connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()
        heard.wait()
    connection.close()
    watching.stop()


def test_an_idle_file_is_no_news(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bell, "listen", lambda self: None)
    looked = []
    real = wake._DataVersion.get
    monkeypatch.setattr(wake._DataVersion, "get", lambda self: looked.append(1) or real(self))
    heard = Heard()
    watching = watcher(path, heard, 0.001)
    watching.start()
    eventually(lambda: len(looked) > 50)
    assert heard.times == 1
    watching.stop()


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bell, "listen", lambda self: None)
    heard = Heard()
    watching = watcher(tmp_path / "later.db", heard, 0.001)
    watching.start()
    connection = sqlite3.connect(tmp_path / "later.db")
    connection.execute("CREATE TABLE t (x)")
    connection.commit()
    heard.wait()
    connection.close()
    watching.stop()


def test_a_watcher_stops_and_starts_again(path: Path) -> None:
    heard = Heard()
    watching = watcher(path, heard, 0.005)
    for _ in range(3):
        heard.forget()
        watching.start()
        watching.start()
        heard.wait()
        watching.stop()
    watching.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("saga-watcher")]
