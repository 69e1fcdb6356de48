"""The house keeps its own rules: who may import whom, how long a module is, which words belong.

The rules are in ``tests/support/house.py``. Each is run on the package, and on a small tree made to break it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import house

ROOT = Path(__file__).resolve().parents[1]

DOC = '"""One.\n\nTwo.\nThree.\n"""\n'

#: rule -> files that break it, one set per way to break it
BROKEN: dict[house.Rule, list[dict[str, str]]] = {
    house.every_module_has_a_room: [{"attic/__init__.py": ""}, {"helpers.py": ""}, {"store/models.py": ""}],
    house.imports_go_downward_only: [
        {"store/database.py": "from dramatiq_saga.engine.claim import claim", "engine/claim.py": ""},
        {"engine/claim.py": "from ..middleware import SagaMiddleware", "middleware.py": ""},
        {"engine/claim.py": "def f():\n    from dramatiq_saga import flow", "flow.py": ""},
        {"errors.py": "import dramatiq_saga.store.database", "store/database.py": ""},
        {"brokers/sqlite.py": "from dramatiq_saga import Flow"},
    ],
    house.no_import_leads_back: [
        {"engine/a.py": "from . import b", "engine/b.py": "from .c import x", "engine/c.py": "import dramatiq_saga.engine.a"},
        {"store/__init__.py": "from .database import Store", "store/database.py": "from dramatiq_saga.store import Store"},
    ],
    house.packages_from_elsewhere_stay_in_their_rooms: [
        {"engine/claim.py": "import peewee"},
        {"engine/claim.py": "from dramatiq.results.errors import ResultMissing"},
        {"errors.py": "from dramatiq import Message"},
        {"recovery/loop.py": "from apscheduler.schedulers.background import BackgroundScheduler"},
        {"codec.py": "import pickle"},
        {"operations.py": "def f():\n    import flask"},
    ],
    house.front_door_only_reexports: [
        {"__init__.py": "def helper(): ..."},
        {"__init__.py": "from .flow import Flow\n__all__ = []"},
    ],
    house.modules_say_what_they_own: [
        {"flow.py": "x = 1"},
        {"flow.py": '"""Short."""'},
        {"flow.py": '"""' + "Long.\n" * 13 + '"""'},
    ],
    house.long_modules_say_why: [{"flow.py": DOC + "x = 1\n" * 400}],
    house.models_are_never_saved: [{"engine/claim.py": "def f(row):\n    row.save()"}],
    house.now_comes_from_the_clock: [
        {"engine/claim.py": "import time\nx = time.time()"},
        {"engine/claim.py": "from time import time_ns"},
        {"engine/claim.py": "import datetime\nx = datetime.datetime.now(datetime.UTC)"},
        {"engine/claim.py": "from datetime import datetime\nx = datetime.utcnow()"},
    ],
    house.only_the_command_line_prints: [{"operations.py": "print('hello')"}],
    house.arguments_after_the_second_are_named: [
        {"events.py": "def on(a, b, c): ..."},
        {"flow.py": "class Flow:\n    def f(self, a, b, c=None): ...", "__init__.py": "from .flow import Flow"},
        {"brokers/a.py": "class B:\n    def __init__(self, a, b, c): ...", "brokers/__init__.py": "from .a import B"},
        {"brokers/a.py": "class B:\n    def f(self, tx, a, b, c): ...", "brokers/__init__.py": "from .a import B"},
    ],
    house.named_tests_exist: [{"flow.py": "# proved by test_that_nobody_wrote"}],
    house.public_names_are_documented: [{"flow.py": "def run(): ..."}, {"flow.py": "class Flow: ..."}],
    house.texts_name_no_rules: [
        {"flow.py": "def f(n):\n    'A rule (PAR-3).'\n    raise ValueError(f'{n} is too late (EXPIRE-2)')"}
    ],
}

FLOW = """
from dramatiq import Actor

class Flow:
    'A flow.'
    def action(self, actor, /, *args, **kwargs): ...
    def put(self, tx, a, b, *, c): ...

class _Made:
    def __init__(self, a, b, c): ...
"""

#: What looks like an offence and is none.
SOUND = {
    "__init__.py": '"""Front door."""\nfrom .flow import Flow\n\n__all__ = ["Flow"]\n',
    "clock.py": DOC + "import time\nx = time.time_ns()",
    "errors.py": DOC + "from dramatiq.results.errors import ResultMissing",
    "codec.py": DOC + "from dramatiq import get_encoder\nfrom .errors import SagaError",
    "store/__init__.py": "",
    "store/database.py": DOC + "import peewee\nfrom .writer import Writer",
    "store/writer.py": DOC
    + "import time\nfrom typing import TYPE_CHECKING\nfrom ..errors import StoreError\nx = time.monotonic()\n"
    + "if TYPE_CHECKING:\n    from .database import Store",
    "engine/__init__.py": "",
    "engine/claim.py": DOC + "from dramatiq_saga.store.database import Store\n# see test_house\ndef _f(): ...",
    "recovery/__init__.py": "",
    "recovery/schedule.py": DOC + "def _f():\n    import apscheduler.schedulers.blocking",
    "flow.py": DOC + FLOW,
    "cli/__init__.py": "",
    "cli/main.py": DOC + "import argparse\nprint('hello')",
    "store/models.py": DOC.replace("Three.", "Long because it holds every table.") + "x = 1\n" * 400,
}


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: house.Rule) -> None:
    assert list(rule(house.Package(ROOT))) == []


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        pytest.param(rule, files, id=f"{rule.__name__}-{number}")
        for rule in house.RULES
        for number, files in enumerate(BROKEN.get(rule, [{}]))
    ],
)
def test_a_tree_that_breaks_the_rule_is_told(tmp_path: Path, rule: house.Rule, files: dict[str, str]) -> None:
    assert list(rule(tree(tmp_path, files)))


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_is_left_in_peace(tmp_path: Path, rule: house.Rule) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_house.py").touch()
    assert list(rule(tree(tmp_path, SOUND))) == []


def tree(root: Path, files: dict[str, str]) -> house.Package:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / house.PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.Package(root)


# --- words -----------------------------------------------------------------------------------------------------------


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_holds_words_that_do_not_belong() -> None:
    offences: list[str] = []
    for path in tracked_files():
        text = path.read_bytes().decode(errors="ignore")
        offences += house.words_that_do_not_belong(str(path.relative_to(ROOT)), text)
    assert offences == []


@pytest.mark.parametrize("text", ["# TO~DO: later", "cd /ho~me/ada/shop", "see py~pi.org", "blank ~\n"])
def test_words_that_do_not_belong_are_told(text: str) -> None:
    """They stand here with a tilde in them, because this file is read too."""
    assert list(house.words_that_do_not_belong("file", text.replace("~", "")))
    assert list(house.words_that_do_not_belong("file", text)) == []


@pytest.mark.parametrize("text", ["cd /srv/shop", "docs/work/flow.md", "https://example.org/home/page", "method"])
def test_other_words_are_left_in_peace(text: str) -> None:
    assert list(house.words_that_do_not_belong("file", text)) == []


# --- the package as installed ----------------------------------------------------------------------------------------

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, threading

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"redis", "pika", "psycopg", "psycopg2", "pymysql", "MySQLdb", "apscheduler"}:
            raise ModuleNotFoundError(f"{name} is an extra and was not asked for", name=name)

sys.meta_path.insert(0, Refuse())
import dramatiq_saga
for module in pkgutil.walk_packages(dramatiq_saga.__path__, "dramatiq_saga."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert threading.active_count() == 1, threading.enumerate()
"""


def test_every_module_imports_without_extras_threads_or_warnings() -> None:
    """Extras are asked for when they are used. Workers fork: no thread may run before that."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_EVERYTHING], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_all_tests_are_collected() -> None:
    """A file under ``tests/`` that defines tests has a name that pytest looks for."""
    lost = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if "\ndef test_" in path.read_text() and not path.name.startswith("test_")
    ]
    assert lost == []
