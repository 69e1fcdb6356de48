"""Every acceptance case of the guards names its tests, and the tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CASES = [*(f"R{number}" for number in range(1, 9)), *(f"A{number}" for number in range(1, 9)), *(f"E{n}" for n in range(1, 7))]


def named() -> dict[str, list[str]]:
    text = Path(__file__).with_name("ACCEPTANCE.md").read_text()
    lines = [line.split("|") for line in text.splitlines() if re.match(r"\| [RAE]\d+ \|", line)]
    return {cells[1].strip(): re.findall(r"`(test_\w+)`", cells[3]) for cells in lines}


def test_every_case_names_a_test() -> None:
    assert list(named()) == CASES
    assert [case for case, tests in named().items() if not tests] == []


def test_every_named_test_exists() -> None:
    known = {
        name
        for folder in ("tests/unit", "tests/conformance/broker", "tests/processes")
        for path in (ROOT / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert sorted({test for tests in named().values() for test in tests} - known) == []


def test_the_guards_tests_say_which_case_they_check() -> None:
    for path in sorted((ROOT / "tests/unit").glob("test_guards_*.py")):
        text = path.read_text()
        for name, docstring in re.findall(r'^def (test_\w+)\(.*?\) -> None:\n    """(.*?)"""', text, re.MULTILINE | re.DOTALL):
            assert re.search(r"\b([RAE]\d|QUEUE-\d)\b", docstring), f"{name} in {path.name} names no case"
