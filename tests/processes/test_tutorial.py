"""The tutorial, typed in from top to bottom by a machine: every file, every command, and what it says they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pages import NOT_RUN, ROOT, Block, Page
from tests.support.processes import Process
from tests.support.waiting import eventually

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))


class Terminal:
    """Where commands are typed: a directory, and what was started in the background."""

    def __init__(self, directory: Path, python_process: Callable[..., Process]) -> None:
        self.directory = directory
        self.python_process = python_process
        self.background: Process | None = None
        self.output = ""

    def type(self, block: Block) -> None:
        for line in block.code.splitlines():
            command = shlex.split(line)
            if block.info == "background":
                self.background = self.python_process(*arguments(command), cwd=self.directory)
                self.background.wait_for_output("ready for action")
            else:
                self.run(command)

    def run(self, command: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "error", *arguments(command)],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        self.output = done.stdout

    def expect(self, block: Block) -> None:
        """The last command printed exactly this; ``…`` at the end of a line stands for anything."""
        expected = trimmed(block.code)
        printed = trimmed(self.output)
        for number, line in enumerate(expected[: len(printed)]):
            if line.endswith("…") and printed[number].startswith(line[:-1].rstrip()):
                printed[number] = line
        assert printed == expected, block

    def expect_in_background(self, block: Block) -> None:
        """The workers have printed these lines, in this order, among others."""
        lines = block.code.splitlines()
        assert self.background is not None
        background = self.background
        eventually(lambda: [line for line in background.output().splitlines() if line in lines][-len(lines) :] == lines)


def arguments(command: list[str]) -> list[str]:
    """What follows ``python``; other programs are run as the modules that they are."""
    program, *rest = command
    if program == "python":
        return rest
    return ["-m", {"dramatiq": "dramatiq", "dramatiq-saga": "dramatiq_saga.cli"}[program], *rest]


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_tutorial_does_what_it_says(path: Path, tmp_path: Path, python_process: Callable[..., Process]) -> None:
    directory = tmp_path / "empty"
    directory.mkdir()
    terminal = Terminal(directory, python_process)
    done = {"file": 0, "sh": 0, "text": 0}
    for block in Page(path).blocks:
        if block.file_name:
            (directory / block.file_name).write_text(block.code, encoding="utf-8")
            done["file"] += 1
        elif block.language == "sh" and not block.info.startswith(NOT_RUN):
            terminal.type(block)
            done["sh"] += 1
        elif block.language == "text":
            (terminal.expect_in_background if block.info == "workers" else terminal.expect)(block)
            done["text"] += 1
    assert min(done.values()) > 0, done
    assert not re.search(r"^    (?:python|dramatiq)", path.read_text(), re.MULTILINE), (
        "commands belong into sh blocks: those are run"
    )
