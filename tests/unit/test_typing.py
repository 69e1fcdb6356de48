"""What users write has precise types: ``tests/typing/`` and a project of somebody else's, under strict mypy.

``tests/typing/surface.py`` says what every call gives and marks what is a mistake. Here it is checked as ``mypy`` checks it, and
it is shown that it would not pass with other types.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT

# Without a cache, the first look at the package takes its time.
pytestmark = pytest.mark.timeout(400)

SURFACE = ROOT / "tests" / "typing" / "surface.py"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for this file's runs, so that only the first is slow."""
    return tmp_path_factory.mktemp("mypy")


def mypy(cache: Path, *arguments: str | Path, cwd: Path = ROOT) -> list[str]:
    """The errors, one a line, without notes and the summary."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", cache, "--no-error-summary", *arguments],
        cwd=cwd,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ": note:" not in line]


def project(directory: Path) -> Path:
    """A directory where the package is somebody else's: read for its types, and not itself looked over."""
    (directory / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-dramatiq_saga.*]\nfollow_imports = silent\n")
    return directory


def test_every_type_that_the_surface_promises_holds(cache: Path) -> None:
    """API, "Types": and every mistake that is marked there is found; a mark without one is an error in strict mode."""
    assert mypy(cache, "--config-file", "setup.cfg", "tests/typing") == []


def test_the_surface_would_not_pass_with_other_types(cache: Path, tmp_path: Path) -> None:
    """Each promise turned into a wrong one, and each mistake left unmarked, is an error."""
    text = SURFACE.read_text()
    tree = ast.parse(text)  # without comments, so without marks
    promises = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_type"]
    for promise in promises:
        promise.args[1] = ast.Name("complex", ast.Load())
    mistakes = len(re.findall(r"# type: ignore\[", text))
    (tmp_path / "wrong.py").write_text(ast.unparse(tree))
    lines = {line.split(":")[1] for line in mypy(cache, "wrong.py", cwd=project(tmp_path))}
    assert len(promises) > 30 and mistakes > 30
    assert len(lines) == len(promises) + mistakes


PROJECT = """
import dramatiq
from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker("shop.db")
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3)
def charge_card(order_id: str) -> dict[str, str]:
    return {"id": order_id}


@dramatiq.actor(max_retries=3)
def refund_card(charge_id: str) -> None: ...


@workflow
def checkout(flow: Flow, order_id: str) -> dict[str, str]:
    charge = flow.action(charge_card, order_id).compensate_with(lambda charge: refund_card.message(charge["id"])).run()
    return {"charge": charge["id"]}


print(checkout.send("order-42").result()["charge"])
checkout.send(42)
"""


def test_a_project_of_somebody_elses_sees_the_types(cache: Path, tmp_path: Path) -> None:
    """The package says that it has types (``py.typed``): the quickstart of the API, in another directory, strictly."""
    assert (ROOT / "dramatiq_saga" / "py.typed").is_file()
    (tmp_path / "shop.py").write_text(PROJECT)
    assert mypy(cache, "shop.py", cwd=project(tmp_path)) == [
        'shop.py:27: error: Argument 1 to "send" of "Workflow" has incompatible type "int"; expected "str"  [arg-type]'
    ]
