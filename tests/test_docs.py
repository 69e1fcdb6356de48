"""The documentation is true: its examples run, its links lead somewhere, its commands exist, its map is complete."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import pytest

import dramatiq_saga
from dramatiq_saga import Flow, FlowHandle, FlowQuery, Step, Workflow, errors, events, statuses
from dramatiq_saga.builders import ActionBuilder
from dramatiq_saga.journal import anomalies, history
from dramatiq_saga.testing.takeover import Watcher
from dramatiq_saga.testing.tester import SagaTester
from tests.support.pages import NOT_RUN, ROOT, Page, all_pages
from tests.support.processes import WorkerProcess

PAGES = {str(page.name): page for page in all_pages()}
WITH_EXAMPLES = [name for name, page in PAGES.items() if any(block.runs for block in page.blocks)]
MAP = ROOT / "docs" / "map.md"

# Until these parts are there, what is said about them cannot be checked.
CLI_PRESENT = importlib.util.find_spec("dramatiq_saga.cli") is not None
ENGINE_PRESENT = importlib.util.find_spec("dramatiq_saga.workflow") is not None


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_the_page_run(name: str, tmp_path: Path) -> None:
    if not ENGINE_PRESENT:
        pytest.skip("the engine is not there yet")
    done = python("-m", "tests.support.pages", str(ROOT / name), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^[1-9]\d* examples ran$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_examples_that_do_not_run_compile_and_say_why(name: str) -> None:
    offences = []
    for block in PAGES[name].blocks:
        if block.language in ("py", "python3", "pycon"):
            offences.append(f"{block}: write the language as python")
        if block.language != "python":
            continue
        if block.info and not re.fullmatch(rf"{NOT_RUN}\s+\S.{{8,}}", block.info):
            offences.append(f"{block}: after python comes nothing, or '{NOT_RUN} REASON', not {block.info!r}")
        try:
            block.compile()
        except SyntaxError as error:
            offences.append(f"{name}:{error.lineno}: {error.msg}")
    assert offences == []


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert list(PAGES[name].broken_links()) == []


def test_every_page_is_reached_from_the_index() -> None:
    """A page that nothing links to is a page that nobody finds."""
    start = ROOT / "README.md"
    seen, waiting = {start}, [start]
    while waiting:
        page = Page(waiting.pop())
        for _, target in page.links:
            linked = (page.path.parent / target.partition("#")[0]).resolve()
            pages = sorted(linked.glob("*.md")) if linked.is_dir() else [linked]
            for path in pages:
                if path.suffix == ".md" and path.is_relative_to(ROOT) and path.exists() and path not in seen:
                    seen.add(path)
                    waiting.append(path)
    assert sorted(str(page.name) for page in PAGES.values() if page.path not in seen) == []


# --- the command line ------------------------------------------------------------------------------------------------


def documented_commands() -> dict[str, set[str]]:
    """command -> where it is documented. Only code counts: blocks, indented lines, and words between backquotes."""
    found: dict[str, set[str]] = {}
    for page in PAGES.values():
        if page.name.name in ("CHANGELOG.md", "UPGRADING.md"):
            continue  # they speak of other versions
        code = "\n".join(block.code for block in page.blocks if block.language != "python")
        for _, line in page.prose:
            code += "\n" + (line if line.startswith("    ") else "\n".join(re.findall(r"`([^`]+)`", line)))
        for name in re.findall(r"\bdramatiq-saga(?: +--(?:app|database)[ =]\S+| +--json)* +([a-z][a-z-]+)\b", code):
            found.setdefault(name, set()).add(str(page.name))
    return found


@functools.cache
def help_of(*command: str) -> str:
    program = "import sys; from dramatiq_saga.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python("-c", program, *command, "--help")
    assert done.returncode == 0, f"dramatiq-saga {' '.join(command)} --help: {done.stderr}"
    return done.stdout


@pytest.mark.skipif(not CLI_PRESENT, reason="the command line is not there yet")
def test_every_command_named_in_the_documentation_exists() -> None:
    unknown = {name: sorted(places) for name, places in documented_commands().items() if name not in actual_commands()}
    assert unknown == {}


@pytest.mark.skipif(not CLI_PRESENT, reason="the command line is not there yet")
def test_every_command_and_option_is_documented() -> None:
    """The reference page names each command, and each long option that its help shows."""
    reference = ROOT / "docs" / "reference" / "command-line.md"
    text = reference.read_text(encoding="utf-8")
    missing = []
    for command in actual_commands():
        for word in [f"`{command}", *re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_of(command))]:
            if word != "--help" and word not in text:
                missing.append(f"{command}: {word.strip('`')}")
    assert sorted(set(missing)) == []


def actual_commands() -> list[str]:
    """The commands, as the program's own help lists them: ``{init,send,…}``."""
    listed = re.search(r"\{([a-z][a-z,-]+)\}", help_of())
    assert listed, help_of()
    return listed.group(1).split(",")


# --- what the code offers is on its page -----------------------------------------------------------------------------


def test_the_reference_names_every_error() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    names = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.SagaError)]
    assert [name for name in names if not name.startswith("_") and f"`{name}`" not in text] == []


def test_the_reference_names_every_status() -> None:
    text = (ROOT / "docs" / "reference" / "statuses.md").read_text(encoding="utf-8")
    enums = [value for value in vars(statuses).values() if isinstance(value, type) and issubclass(value, StrEnum)]
    words = [word for enum in enums if enum is not StrEnum for word in (enum.__name__, *enum)]
    assert len(words) > 20
    assert [str(word) for word in words if f"`{word}`" not in text] == []


def words_of(page: str) -> set[str]:
    """Every name between backquotes on a page, without its arguments."""
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))


def test_the_reference_names_what_a_user_imports_and_calls() -> None:
    names = {*dramatiq_saga.__all__, *dir(events)} & {*dramatiq_saga.__all__, "on", "subscribe", "unsubscribe", "listening"}
    for cls in (Flow, ActionBuilder, FlowHandle, Workflow, Step, FlowQuery):
        own = {name for base in cls.__mro__[:-1] for name in vars(base)} | set(getattr(cls, "__annotations__", ()))
        names |= {
            name for name in own if not name.startswith("_") and name not in ("broker", "expires_in", "queue_name", "rows")
        }
    assert len(names) > 60
    assert sorted(names - words_of("api.md")) == []


def test_the_reference_names_every_testing_helper() -> None:
    parameters = inspect.signature(SagaTester).parameters
    names = {name for name in vars(SagaTester) if not name.startswith("_")} - set(vars(Watcher)) | {"errors", *parameters}
    assert {"start", "drain", "advance", "replace", "replay_every_step"} < names
    assert sorted(names - words_of("testing.md")) == []


def test_the_reference_names_every_event_and_every_word_of_the_history() -> None:
    text = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    words = [word for name, word in vars(history).items() if name.isupper() and isinstance(word, str)]
    assert [word for word in words if f"`{word}`" not in text] == []
    recorded = re.findall(r"`([a-z_]+\.[a-z_]+)`", text.partition("## Words that nothing")[0])
    classes = {cls.type: name for name, cls in vars(events).items() if getattr(cls, "type", "") and isinstance(cls, type)}
    assert [name for word, name in classes.items() if word in recorded and f"`{name}`" not in text] == []


def test_the_reference_names_every_anomaly_and_every_other_log_line() -> None:
    """A line is ``log.warning("its_name", …)`` in the source; the name is what people search for."""
    text = (ROOT / "docs" / "reference" / "anomalies.md").read_text(encoding="utf-8")
    line = re.compile(r"\.(?:debug|info|warning|error|critical)\(\s*\"([a-z_]+)\"")
    said = {name for path in (ROOT / "dramatiq_saga").rglob("*.py") for name in line.findall(path.read_text(encoding="utf-8"))}
    assert len(said) > 8
    assert [name for name in sorted({*anomalies.CODES, *said}) if f"`{name}`" not in text] == []


#: A statement that changes how a row of these tables stands.
WRITES_STATUS = re.compile(
    r"(UPDATE \{((flow|action|compensation)_runs|children)\} SET |INSERT INTO \{((flow|action|compensation)_runs|children)\}"
    r"|\{insert_ignore\} \{flow_runs\})"
    r"(?:(?! WHERE ).)*\b(status|given_up)\b"
)


def test_the_tables_of_statuses_show_every_statement_that_writes_one() -> None:
    """STATUS-1: no status changes in a way that the page does not tell of."""
    text = (ROOT / "docs" / "reference" / "statuses.md").read_text(encoding="utf-8")
    found = set()
    for module in pkgutil.walk_packages(dramatiq_saga.__path__, "dramatiq_saga."):
        if ".migrations." not in module.name and not module.name.endswith(".__main__"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, str) and WRITES_STATUS.match(value):
                    found.add(f"{module.name.rpartition('.')[2]}.{name}")
    assert len(found) > 20
    assert found == set(re.findall(r"`(\w+\._[A-Z_]+)`", text))


JOB = re.compile(r"python3 noxfile\.py +([a-z]+)")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_every_job_that_is_named_exists(name: str) -> None:
    named = JOB.findall((ROOT / name).read_text(encoding="utf-8"))
    assert named
    listed = python("noxfile.py").stdout
    assert [job for job in named if not re.search(rf"^  {job} ", listed, re.MULTILINE)] == []


# --- the quickstart, for real ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not ENGINE_PRESENT, reason="the engine is not there yet")
def test_the_quickstart_completes_on_real_workers(tmp_path: Path, worker_process: Callable[..., WorkerProcess]) -> None:
    (block,) = [block for block in PAGES["README.md"].blocks if block.file_name == "shop.py"]
    (tmp_path / "shop.py").write_text(block.code, encoding="utf-8")
    worker_process("shop", processes=2, arguments=["--path", str(tmp_path)], cwd=tmp_path)
    done = python("-c", "import shop; print(shop.checkout.send('order-42').result(wait=30))", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "{'charge': 'charge-for-order-42'}\n"), done.stderr


# --- the map ---------------------------------------------------------------------------------------------------------


def test_the_map_shows_every_module() -> None:
    text = MAP.read_text(encoding="utf-8")
    missing = []
    for path in sorted((ROOT / "dramatiq_saga").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if path.name != "__init__.py" and f"`{name}`" not in text:
            first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0].rstrip(".")
            missing.append(f"| `{name}` | {first[:1].lower()}{first[1:]} | |")
    assert not missing, "add to docs/map.md:\n" + "\n".join(missing)


def test_everything_on_the_map_is_there() -> None:
    names = re.findall(r"`([\w./-]+\.(?:py|cfg|toml|md)|[\w./-]+/)`", MAP.read_text(encoding="utf-8"))
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_map_shows_nothing_twice() -> None:
    rows = re.findall(r"^\| `([\w./-]+)` \|", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 100
    assert [name for name in set(rows) if rows.count(name) > 1] == []


# --- the readers of pages can fail -----------------------------------------------------------------------------------

BROKEN_PAGE = """# Two words

See [there](other.md), [here](#two-words), [nowhere](missing.md), [no heading](other.md#absent) and `[not](a-link.md)`.

```python
# made.py
VALUE = 41
```

```python
assert made.VALUE + 1 == 42
raise RuntimeError("on purpose")
```
"""


def test_broken_links_are_told_and_sound_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Present\n")
    (tmp_path / "page.md").write_text(BROKEN_PAGE)
    broken = list(Page(tmp_path / "page.md", tmp_path).broken_links())
    assert [line.split(": ")[1] for line in broken] == ["missing.md", "other.md#absent"]


def test_an_example_that_fails_names_its_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(BROKEN_PAGE)
    done = python("-m", "tests.support.pages", str(page), cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r'page.md", line 12', done.stderr), done.stderr
    assert "on purpose" in done.stderr


def test_examples_of_a_page_share_their_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(BROKEN_PAGE.replace("raise", "# raise"))
    done = python("-m", "tests.support.pages", str(page), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2 examples ran\n")


def test_commands_are_found_where_the_documentation_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Use `dramatiq-saga --app shop show RUN`; dramatiq-saga is fine.\n\n    dramatiq-saga sweep\n")
    monkeypatch.setattr(sys.modules[__name__], "PAGES", {"page.md": Page(page, tmp_path)})
    assert documented_commands() == {"show": {"page.md"}, "sweep": {"page.md"}}


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python on this checkout; warnings are errors there too."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
