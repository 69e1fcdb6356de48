"""The documentation as data: pages, their code blocks, headings and links; and a runner for one page's examples.

``python -m tests.support.pages PAGE`` runs a page's examples in the current directory: blocks in order, sharing their
names. A block that starts with a comment such as ``# shop.py`` becomes that file and is imported; ``# test_shop.py`` is run by
pytest. Tracebacks name the page and its line.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: After "python": why a block is compiled and not run.
NOT_RUN = "no-run:"


@dataclass(frozen=True)
class Block:
    """A fenced block of code. ``line`` is that of its first line of code; ``indent`` what a list has put before it."""

    page: Path
    line: int
    language: str
    info: str
    code: str

    @property
    def file_name(self) -> str | None:
        """The file that the block stands for, if its first line says so."""
        found = re.match(r"#\s*([\w./-]+\.py)\b", self.code)
        return found.group(1) if found else None

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.info.startswith(NOT_RUN)

    def compile(self) -> Any:
        """The code, whose line numbers are those of the page."""
        return compile("\n" * (self.line - 1) + self.code, str(self.page), "exec", dont_inherit=True)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Page:
    """One Markdown file."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.path = path
        self.name = path.relative_to(root)
        self.lines = path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def blocks(self) -> list[Block]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        start = None
        fence = indent = language = info = ""
        for number, line in enumerate(self.lines, start=1):
            if start is None:
                opened = re.match(r"^(\s*)(`{3,}|~{3,})\s*(\S*)\s*(.*)$", line)
                if opened:
                    indent, fence, language, info = opened.groups()
                    start = number
            elif line.strip() == fence:
                code = [text.removeprefix(indent) for text in self.lines[start : number - 1]]
                yield Block(self.name, start + 1, language, info, "\n".join(code) + "\n")
                start = None
        if start is not None:
            raise ValueError(f"{self.name}:{start}: this block is never closed")

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """The lines outside of blocks, with their numbers; indented code is prose too."""
        inside = {n for block in self.blocks for n in range(block.line - 1, block.line + block.code.count("\n") + 1)}
        return [(number, line) for number, line in enumerate(self.lines, start=1) if number not in inside]

    @cached_property
    def anchors(self) -> set[str]:
        """What ``#…`` may point to: the headings, as GitHub names them."""
        names: set[str] = set()
        for _, line in self.prose:
            heading = re.match(r"^#{1,6}\s+(.*?)\s*#*$", line)
            if heading:
                base = slug(heading.group(1))
                name, count = base, 0
                while name in names:
                    count += 1
                    name = f"{base}-{count}"
                names.add(name)
            names.update(re.findall(r'<a (?:id|name)="([^"]+)"', line))
        return names

    @property
    def links(self) -> Iterator[tuple[int, str]]:
        for number, line in self.prose:
            text = re.sub(r"`[^`]*`", lambda code: " " * len(code.group()), line)
            for target in re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", text):
                yield number, target
            for target in re.findall(r"^\s*\[[^\]]+\]:\s*(\S+)", text):
                yield number, target

    def broken_links(self) -> Iterator[str]:
        """Links to files that are not there, and to headings that nobody wrote. The network is not asked."""
        for number, target in self.links:
            if re.match(r"^[a-z][a-z+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (self.path.parent / name).resolve() if name else self.path
            if not path.exists():
                yield f"{self.name}:{number}: {target}: no such file"
            elif anchor and path.suffix == ".md" and anchor not in Page(path, path.parent).anchors:
                yield f"{self.name}:{number}: {target}: no such heading"


def slug(heading: str) -> str:
    """A heading as GitHub writes it in a link."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def all_pages(root: Path = ROOT) -> list[Page]:
    """README and what else lies beside it, then everything under ``docs/``."""
    return [Page(path, root) for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]]


def run(page: Page) -> int:
    """Run a page's examples here and now; returns how many there were."""
    names: dict[str, Any] = {"__name__": f"page_{page.path.stem.replace('-', '_')}"}
    sys.path.insert(0, str(Path.cwd()))
    blocks = [block for block in page.blocks if block.runs]
    for block in blocks:
        if block.file_name is None:
            exec(block.compile(), names)
            continue
        file = Path(block.file_name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.code, encoding="utf-8")
        importlib.invalidate_caches()
        if file.name.startswith("test_"):
            run_tests(file)
            continue
        module = importlib.import_module(".".join(file.with_suffix("").parts))
        names[module.__name__] = module
        names.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
    return len(blocks)


def run_tests(file: Path) -> None:
    """A block that is a file of tests is run by pytest, as its readers will run it."""
    import pytest

    status = pytest.main(["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "pytest_dramatiq_saga", str(file)])
    if status:
        raise AssertionError(f"the tests in {file} failed: {status!r}")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    print(f"{run(Page(target, target.parent))} examples ran")
