"""The house rules as functions: each takes a package and yields its offences, one line of text each.

Everything is read from source, nothing is imported; so a rule can be shown to bite on a small tree made for it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "dramatiq_saga"

#: room -> the rooms that it may import besides itself. Read from the top: each line only knows what stands above it.
#: A room is a folder or the modules named in MODULES; imports between modules of one room are fine as long as they end.
ROOMS: dict[str, str] = {
    "foundation": "",
    "store": "foundation",
    "journal": "foundation store",
    "events": "foundation store journal",
    "locks": "foundation journal",
    "brokers": "foundation store journal events",
    "backends": "foundation store journal",
    "engine": "foundation store journal events",
    "recovery": "foundation store journal events engine",
    "flow": "foundation store journal events engine",
    "dramatiq": "foundation store journal events locks brokers backends engine recovery flow",
    "operations": "foundation store journal events locks brokers engine recovery flow dramatiq",
    "testing": "foundation store journal events locks brokers backends engine recovery flow dramatiq operations",
    "cli": "foundation store journal events locks brokers engine recovery flow dramatiq operations",
    "front": "foundation store journal events locks brokers engine recovery flow dramatiq operations",
}

#: The rooms that are not folders.
MODULES = {
    "foundation": "errors statuses settings clock codec commands encoder context views",
    "events": "events",
    "locks": "locks",
    "flow": "flow builders child_builder groups advice options coroutines retry_policy",
    "dramatiq": "workflow handle histories query step middleware inline interrupts barriers overlaps suspects",
    "operations": "operations reports report_entries scheduling",
}

#: package from elsewhere -> where it may be imported (rooms, or files). What is not listed may be imported anywhere.
OUTSIDE: dict[str, str] = {
    "peewee": "store brokers backends",
    "playhouse": "store brokers backends",
    "sqlite3": "store brokers backends",
    "psycopg": "store",
    "pymysql": "store",
    "redis": "locks.py",
    "pika": "",
    "apscheduler": "recovery/schedule.py",
    "dramatiq": "codec.py encoder.py brokers backends flow dramatiq operations testing cli",
    "dramatiq.results.errors": "errors.py",
    "dramatiq.middleware": "errors.py",  # only what derives from its MiddlewareError gets out of a hook
    "dramatiq.threading": "events",  # its interrupts are no errors of a listener
    "argparse": "cli",
    "pickle": "",
    "flask": "",
    "django": "",
    "fastapi": "",
    "starlette": "",
    "aiohttp": "",
}

#: Methods whose arguments Dramatiq has fixed, and the one of ours that users call with three.
FIXED_SIGNATURES = re.compile(r"(before|after)_\w+|add|incr|decr|incr_and_sum|consume|enqueue|requeue|join|signal_flow")

#: Modules whose functions users call by the module's name.
CALLED_BY_USERS = {"codec.py", "events.py", "operations.py", "histories.py", "scheduling.py"}

#: The machine's clock is read in the first; the second compares it with the server's.
CLOCKS = {"clock.py", "store/clocks.py"}

LONG, DOCSTRING_LINES = 400, (3, 12)


@dataclass(frozen=True)
class Edge:
    line: int
    target: str
    for_types: bool  # under ``if TYPE_CHECKING``: it does not happen when the program runs


class Module:
    """One file of the package."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path.relative_to(root)
        self.inside = self.path.relative_to(PACKAGE).as_posix()
        parts = self.path.with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, str(path))
        self.docstring = ast.get_docstring(self.tree) or ""

    @property
    def room(self) -> str:
        return room_of(self.name)

    def at(self, line: int, message: str) -> str:
        return f"{self.path}:{line}: {message}"


class Package:
    """The package's modules, and who imports whom."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = [Module(path, root) for path in sorted((root / PACKAGE).rglob("*.py"))]
        self.by_name = {module.name: module for module in self.modules}

    def imports(self, module: Module) -> Iterator[Edge]:
        """Every import, wherever it stands: inside functions and ``if TYPE_CHECKING`` too."""
        yield from dict.fromkeys(self._imports(module))

    def _imports(self, module: Module) -> Iterator[Edge]:
        guards = [
            node for node in ast.walk(module.tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ]
        guarded = {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Edge(node.lineno, alias.name, node in guarded)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = module.name.split(".")[: None if module.is_package else -1]
                    base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield Edge(node.lineno, full if full in self.by_name else base, node in guarded)

    def ours(self, module: Module) -> Iterator[Edge]:
        for edge in self.imports(module):
            if edge.target.split(".")[0] == PACKAGE:
                yield edge


def room_of(name: str) -> str:
    """The room of one of our modules, by its dotted name."""
    parts = name.split(".")
    if len(parts) == 1:
        return "front"
    for room, modules in MODULES.items():
        if parts[1] in modules.split():
            return room
    return parts[1]


def calls(module: Module) -> Iterator[tuple[int, str]]:
    """Every call, as written: ``(line, "time.time")``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


# --- the rules -------------------------------------------------------------------------------------------------------


def every_module_has_a_room(package: Package) -> Iterator[str]:
    for folder in sorted({module.path.parent for module in package.modules}):
        if not (package.root / folder / "__init__.py").is_file():
            yield f"{folder}: without __init__.py it would not be installed"
    for module in package.modules:
        if module.room not in ROOMS:
            yield module.at(1, f"{module.room!r} is no room of this house: name it in tests/support/house.py")


def imports_go_downward_only(package: Package) -> Iterator[str]:
    for module in package.modules:
        allowed = {module.room, *ROOMS.get(module.room, "").split()}
        for edge in package.ours(module):
            target = room_of(edge.target)
            if target not in allowed:
                yield module.at(edge.line, f"{module.room} must not import {edge.target} ({target})")


def no_import_leads_back(package: Package) -> Iterator[str]:
    """Types of one room may refer to each other; running code may not."""
    graph = {module.name: [edge.target for edge in package.ours(module) if not edge.for_types] for module in package.modules}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> Iterator[str]:
        if name in trail:
            yield "a circle of imports: " + " -> ".join([*trail[trail.index(name) :], name])
        elif name not in done:
            for target in graph.get(name, []):
                yield from visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        yield from visit(name, ())


def packages_from_elsewhere_stay_in_their_rooms(package: Package) -> Iterator[str]:
    for module in package.modules:
        for edge in package.imports(module):
            known = next((name for name in _prefixes(edge.target) if name in OUTSIDE), None)
            if known is None:
                continue
            allowed = {place for name in _prefixes(edge.target) for place in OUTSIDE.get(name, "").split()}
            if module.room not in allowed and module.inside not in allowed:
                yield module.at(edge.line, f"{edge.target} belongs in {' '.join(sorted(allowed)) or 'no module'}")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def front_door_only_reexports(package: Package) -> Iterator[str]:
    front = package.by_name.get(PACKAGE)
    if front is None:
        return  # told by every_module_has_a_room
    imported: set[str] = set()
    offered: set[str] = set()
    for node in front.tree.body:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                pass
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.ImportFrom():
                imported |= {alias.asname or alias.name for alias in node.names}
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names))
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.List(elts=names) | ast.Tuple(elts=names))
            ):
                offered |= {name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)}
            case _:
                yield front.at(node.lineno, f"the front door only re-exports: {ast.unparse(node).splitlines()[0]}")
    for name in sorted(imported ^ offered):
        yield front.at(1, f"{name}: imported but not in __all__, or the other way round")


def modules_say_what_they_own(package: Package) -> Iterator[str]:
    low, high = DOCSTRING_LINES
    for module in package.modules:
        lines = len([line for line in module.docstring.splitlines() if line.strip()])
        if module.is_package and not module.tree.body:
            continue
        if lines < (1 if module.is_package else low) or lines > high:
            yield module.at(1, f"a module docstring takes {low} to {high} lines, this one has {lines}")


def long_modules_say_why(package: Package) -> Iterator[str]:
    for module in package.modules:
        length = len(module.text.splitlines())
        if length > LONG and not re.search(r"\bLong,? because\b", module.docstring):
            yield module.at(1, f"{length} lines: split it, or say in its docstring why ('Long because ...')")


def models_are_never_saved(package: Package) -> Iterator[str]:
    for module in package.modules:
        for line, call in calls(module):
            if call.endswith(".save"):
                yield module.at(line, f"{call}() writes the whole row and defeats the fence: use a conditional UPDATE")


def now_comes_from_the_clock(package: Package) -> Iterator[str]:
    forbidden = re.compile(r"(^|\.)(time\.time(_ns)?|(datetime|date)\.(now|utcnow|today))$")
    for module in package.modules:
        if module.inside in CLOCKS:
            continue
        for line, call in calls(module):
            if forbidden.search(call):
                yield module.at(line, f"{call}(): take a clock as an argument (clock.py)")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                for alias in node.names:
                    if alias.name in ("time", "time_ns"):
                        yield module.at(node.lineno, f"time.{alias.name}: take a clock as an argument (clock.py)")


def only_the_command_line_prints(package: Package) -> Iterator[str]:
    for module in package.modules:
        for line, call in calls(module):
            if call == "print" and module.room != "cli":
                yield module.at(line, "print() belongs to the command line: log, or return it")


def arguments_after_the_second_are_named(package: Package) -> Iterator[str]:
    """In what users call: whatever a front door offers, and the modules that are named in documentation."""
    offered = {
        alias.name
        for module in package.modules
        if module.is_package
        for node in module.tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for module in package.modules:
        for owner, function in _functions(module):
            public = (owner or function).name
            if public.startswith("_") or (public not in offered and module.inside not in CALLED_BY_USERS):
                continue
            name = function.name
            if any(ast.unparse(one) == "overload" for one in function.decorator_list):
                continue  # a view of the function below it, which is looked at
            if (name.startswith("_") and name != "__init__") or FIXED_SIGNATURES.fullmatch(name) or public.endswith("Error"):
                continue
            arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            if owner is not None and not any(ast.unparse(one) == "staticmethod" for one in function.decorator_list):
                del arguments[0]
            if len(arguments) - (arguments[:1] == ["tx"]) > 2:
                where = f"{owner.name}.{name}" if owner is not None else name
                yield module.at(function.lineno, f"{where}({', '.join(arguments)}): put a * after the second")


def _functions(module: Module) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Module-level functions and methods; functions inside functions are nobody else's business."""
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node, member


def named_tests_exist(package: Package) -> Iterator[str]:
    """A comment on a race names the test that proves it; a test that was renamed must not leave it behind."""
    known = _test_names(package.root)
    for module in package.modules:
        for number, line in enumerate(module.text.splitlines(), start=1):
            for name in re.findall(r"\btest_[a-z0-9_]+\b", line):
                if name not in known:
                    yield module.at(number, f"no test is named {name}")


@functools.cache
def _test_names(root: Path) -> frozenset[str]:
    names: set[str] = set()
    for path in (root / "tests").rglob("*.py"):
        names.add(path.stem)
        names.update(re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset(names)


def public_names_are_documented(package: Package) -> Iterator[str]:
    for module in package.modules:
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            if ast.get_docstring(node) is None:
                yield module.at(node.lineno, f"{node.name} has no docstring")


def texts_name_no_rules(package: Package) -> Iterator[str]:
    """The names of rules are for readers of the source: whoever is told something by a command or an error has never seen them."""
    for module in package.modules:
        documents = {
            id(node.body[0].value)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                for name in re.findall(r"\b(?!UTF)[A-Z]{2,}-[0-9]{1,2}\b", node.value):
                    yield module.at(node.lineno, f"{name} in a text that is told: a rule's name belongs in a docstring")


Rule = Callable[[Package], Iterator[str]]

RULES: list[Rule] = [
    every_module_has_a_room,
    imports_go_downward_only,
    no_import_leads_back,
    packages_from_elsewhere_stay_in_their_rooms,
    front_door_only_reexports,
    modules_say_what_they_own,
    long_modules_say_why,
    models_are_never_saved,
    now_comes_from_the_clock,
    only_the_command_line_prints,
    arguments_after_the_second_are_named,
    named_tests_exist,
    public_names_are_documented,
    texts_name_no_rules,
]


# --- the words in all tracked files ----------------------------------------------------------------------------------

WORDS: dict[str, str] = {
    r"\b(?:TOD[O]|FIXM[E]|XX[X])\b": "finish it, or say what is missing in a sentence",
    r"(?<![\w./:~-])/(?:home|work|Users|root|mnt)/\w": "a path of somebody's machine",
    r"\b(?:pypi|pythonhosted|npmjs)\.(?:org|com|io)\b": "the host of a package registry",
    r"[ \t]+$": "blanks at the end of the line",
}


def words_that_do_not_belong(name: str, text: str) -> Iterator[str]:
    for pattern, reason in WORDS.items():
        for found in re.finditer(pattern, text, re.MULTILINE):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{name}:{line}: {found.group()!r}: {reason}"
