"""The project's jobs: written down once, run in two ways.

``python3 noxfile.py JOB [arguments]`` needs nothing but Python 3.11: it makes ``.venv`` in this checkout, installs the
package with everything that development takes, and runs the job there. Later runs start at once, until ``setup.cfg``
changes. Nothing outside the checkout is touched.

``nox -s JOB [-- arguments]`` runs the same commands in an environment of their own, ``tests`` on every supported Python.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]

#: job -> (what it is for, its commands). Arguments go to the last command; pytest's later options win over earlier ones.
JOBS: dict[str, tuple[str, list[str]]] = {
    "setup": ("nothing but .venv, and which Python is in it", ["python --version"]),
    "demo": ("a shop whose workers are killed in mid-order: watch it recover", ["python -m examples.demo"]),
    "tests": ("the whole suite, with the servers that answer here", ["python -m pytest -n 2 --dist worksteal"]),
    "backends": ("what needs a database or message server; all of them must answer", ["python -m pytest -m servers"]),
    "races": ("races and killed processes", ["python -m pytest tests/races tests/processes"]),
    "typing": ("mypy, strict", ["python -m mypy"]),
    "lint": ("ruff: layout and rules", ["python -m ruff format --check .", "python -m ruff check ."]),
    "docs": (
        "every example, link and command of the documentation",
        ["python -m pytest tests/test_docs.py tests/processes/test_tutorial.py tests/processes/test_examples.py"],
    ),
}

#: What a job's commands find in their environment: here nothing may be skipped for a server that is missing.
ENVIRONMENT: dict[str, dict[str, str]] = {"backends": {"CI": "true"}}


# --- run as a script: the standard library alone ---------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run one job in ``.venv``, which is made or mended first. Returns the exit status of the job."""
    if sys.version_info < (3, 11):
        return fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: run me with a newer python3")
    job, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if job not in JOBS:
        print(f"usage: python3 {Path(__file__).name} JOB [arguments]\n")
        for name, (purpose, _) in JOBS.items():
            print(f"  {name:<10}{purpose}")
        return 0 if job in ("", "-h", "--help") else 2
    if rest[:1] == ["--"]:
        del rest[0]
    try:
        with one_at_a_time():
            set_up()
        return run_job(job, rest)
    except KeyboardInterrupt:
        return 130
    except SetUpError as error:
        return fail(str(error))


def fail(message: str) -> int:
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    return 1


def commands_of(job: str, arguments: Sequence[str]) -> list[list[str]]:
    """The job's commands, the last one with the arguments given."""
    *first, last = (command.split() for command in JOBS[job][1])
    return [*first, [*last, *arguments]]


def run_job(job: str, arguments: Sequence[str]) -> int:
    """The job's commands, one after another, until one fails."""
    environment = {**os.environ, **ENVIRONMENT.get(job, {}), "VIRTUAL_ENV": str(VENV)}
    environment["PATH"] = os.pathsep.join([str(venv_python().parent), environment.get("PATH", os.defpath)])
    environment.pop("PYTHONHOME", None)
    for command in commands_of(job, arguments):
        status = subprocess.run([str(venv_python()), *command[1:]], cwd=ROOT, env=environment, check=False).returncode
        if status != 0:
            return status if status > 0 else 128 - status  # ended by a signal: as a shell says it
    return 0


class SetUpError(Exception):
    """The environment cannot be made; the message says what mends it."""


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two jobs that start together do not both build ``.venv``: the second one waits."""
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    with open(__file__, "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def set_up() -> None:
    """``.venv`` exists, works, and holds what ``setup.cfg`` asks for. One small file read when that is so already."""
    stamp = VENV / "dramatiq-saga.stamp"
    recipe = hashlib.sha256(str(ROOT).encode())
    for name in ("setup.cfg", "pyproject.toml"):
        recipe.update((ROOT / name).read_bytes())
    wanted = recipe.hexdigest()
    with contextlib.suppress(OSError):
        if stamp.read_text() == wanted and venv_python().exists():
            return
    print(f"Setting up {VENV} (once; a minute or two, needs the network)", flush=True)
    if not venv_works():
        make_venv()
    if stamp.exists():
        stamp.write_text("begun")
    done = install()
    if not done and not stamp.exists():
        make_venv()  # half of a first attempt may stand in the way: once more, from nothing
        done = install()
    if not done:
        raise SetUpError("the packages could not be installed; pip says why above. Mend that and run me again")
    stamp.write_text(wanted)


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def venv_works() -> bool:
    """Whether what stands in ``.venv`` can be built upon: a Python that starts, is new enough, and has pip."""
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)"
    try:
        return subprocess.run([str(venv_python()), "-c", probe], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv() -> None:
    """A new, empty ``.venv`` with pip in it.

    Debian packs ``ensurepip`` apart from Python itself. Without it any other pip serves as well: the system's, or the wheel
    in Debian's archive, unpacked in a temporary folder.
    """
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    shutil.rmtree(VENV, ignore_errors=True)
    python = [sys.executable, "-m"]
    if importlib.util.find_spec("ensurepip"):
        must([*python, "venv", str(VENV)])
        return
    must([*python, "venv", "--without-pip", str(VENV)])
    with tempfile.TemporaryDirectory() as folder:
        pip = [*python, "pip"] if importlib.util.find_spec("pip") else debian_pip(Path(folder))
        must([*pip, "--python", str(venv_python()), "install", "-qq", "pip"])


def debian_pip(folder: Path) -> list[str]:
    """The command that runs Debian's own pip, unpacked in ``folder``; nothing is installed and root is not needed."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    apt += ["-o", f"APT::Sandbox::User={getpass.getuser()}"]
    try:
        must([*apt, "update"])
        must([*apt, "download", "python3-pip-whl"], cwd=folder)
        (archive,) = folder.glob("*.deb")
        must(["dpkg-deb", "--extract", str(archive), str(folder)])
        (wheel,) = folder.glob("usr/share/python-wheels/pip-*.whl")
    except (OSError, ValueError, SetUpError):
        raise SetUpError(
            f"{sys.executable} can make no virtual environment, for it has neither ensurepip nor pip. "
            "On Debian and Ubuntu this mends it:\n\n    apt-get install --yes python3-venv\n"
        ) from None
    return [sys.executable, f"{wheel}/pip"]


def must(command: list[str], *, cwd: Path | None = None) -> None:
    """Run a step of the set-up, or say which one failed."""
    if subprocess.run(command, cwd=cwd or ROOT, check=False).returncode != 0:
        raise SetUpError(f"{VENV} could not be made: {' '.join(command)} failed, see above")


def install() -> bool:
    """Install this checkout, editable, with everything that development takes."""
    command = [str(venv_python()), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PIP_USER", "PIP_TARGET")}
    return subprocess.run([*command, "--editable", ".[dev]"], cwd=ROOT, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# --- loaded by nox ---------------------------------------------------------------------------------------------------

import nox

nox.options.sessions = ["lint", "typing", "tests"]
nox.options.error_on_missing_interpreters = False


def run(session: nox.Session, job: str) -> None:
    """The job's commands, in the session's own environment."""
    session.install("--editable", ".[dev]")
    for command in commands_of(job, session.posargs):
        session.run(*command, env=ENVIRONMENT.get(job, {}))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The whole suite on each supported Python."""
    run(session, "tests")


@nox.session
def backends(session: nox.Session) -> None:
    """What needs a server; nothing is skipped."""
    run(session, "backends")


@nox.session
def races(session: nox.Session) -> None:
    """Races and killed processes."""
    run(session, "races")


@nox.session
def typing(session: nox.Session) -> None:
    """mypy, strict."""
    run(session, "typing")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and layout."""
    run(session, "lint")


@nox.session
def docs(session: nox.Session) -> None:
    """Examples, links and commands in the documentation; warnings are errors."""
    run(session, "docs")


@nox.session
def demo(session: nox.Session) -> None:
    """The demonstration."""
    run(session, "demo")


@nox.session
def build(session: nox.Session) -> None:
    """Source archive and wheel; then the wheel alone, without extras, is installed and imported whole."""
    session.install("build")
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(out), *session.posargs)
    session.install("--force-reinstall", *map(str, out.glob("*.whl")))
    session.chdir(session.create_tmp())
    session.run(
        "python", "-c", "import dramatiq_saga, importlib.resources as r; assert (r.files(dramatiq_saga) / 'py.typed').is_file()"
    )
    session.run("python", "-c", "import dramatiq_saga.testing, importlib.util as u; assert u.find_spec('pytest_dramatiq_saga')")
