"""Commands as they are printed: a shell reads them back as they were meant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dramatiq_saga.cli.program import make_parser
from dramatiq_saga.codec import printable
from dramatiq_saga.commands import command, word

#: Ids that are accepted, names that signals have.
ODD = [
    "order 42",
    "-x; $(touch pwned)",
    "--help",
    "`id`",
    "it's",
    'say "no"',
    "a\\b'c",
    "#1",
    "*",
    "~root",
    "é",
    "\x1b[31m",
    "\u202eevil\u200b",
    "\x9b9",
]


@pytest.mark.parametrize("text", ODD)
def test_a_shell_and_the_program_read_what_was_meant(text: str, tmp_path: Path) -> None:
    printed = command("cancel", text, options="--compensate")
    assert printable(printed) == printed
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    pasted = printed.replace("dramatiq-saga", f'"{sys.executable}" -c "{show}"', 1)
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/bin:/usr/bin"}
    done = subprocess.run(
        ["bash", "-c", pasted], capture_output=True, text=True, env=environment, timeout=60, check=True, cwd=tmp_path
    )
    options = make_parser().parse_args(json.loads(done.stdout))
    assert (options.command, options.run_id, options.compensate) == ("cancel", text, True)


def test_what_needs_no_quotes_has_none() -> None:
    assert command("show", "order-42", options="--all") == "dramatiq-saga show order-42 --all"
    assert command("signal", "order-42", "-paid") == "dramatiq-saga signal -- order-42 -paid"
    assert word("") == "''"


@pytest.mark.parametrize(
    "words", [["signal", "--", "run", "--help"], ["signal", "--", "-x", "go"], ["queues", "purge", "--", "-q"]]
)
def test_words_behind_two_dashes_are_no_options(words: list[str]) -> None:
    options = make_parser().parse_args(words)
    named = [options.queue] if words[0] == "queues" else [options.run_id, options.name]
    assert named == words[words.index("--") + 1 :]
