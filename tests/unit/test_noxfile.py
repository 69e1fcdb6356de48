"""The one file that everybody starts with sets up what it needs: once, again when that changes, and anew when it is broken."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def original() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checkout:
    """A checkout of its own, where making an environment and installing into it are counted instead of done."""

    def __init__(self, noxfile: ModuleType, root: Path) -> None:
        self.noxfile, self.root = noxfile, root
        self.done: list[str] = []
        self.install_succeeds = [True]
        self.works = False
        for name in ("setup.cfg", "pyproject.toml"):
            (root / name).write_text(name)

    def make_venv(self) -> None:
        self.done.append("make")
        self.noxfile.venv_python().parent.mkdir(parents=True, exist_ok=True)
        self.noxfile.venv_python().touch()
        self.works = True

    def install(self) -> bool:
        self.done.append("install")
        return self.install_succeeds.pop(0) if len(self.install_succeeds) > 1 else self.install_succeeds[0]

    def set_up(self) -> list[str]:
        """What setting up has done this time."""
        self.done.clear()
        self.noxfile.set_up()
        return list(self.done)


@pytest.fixture
def checkout(original: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    root = tmp_path / "a path with spaces"
    root.mkdir()
    place = Checkout(original, root)
    monkeypatch.setattr(original, "ROOT", root)
    monkeypatch.setattr(original, "VENV", root / ".venv")
    monkeypatch.setattr(original, "make_venv", place.make_venv)
    monkeypatch.setattr(original, "install", place.install)
    monkeypatch.setattr(original, "venv_works", lambda: place.works)
    return place


def test_the_second_time_there_is_nothing_to_do(checkout: Checkout) -> None:
    assert checkout.set_up() == ["make", "install"]
    assert checkout.set_up() == []


@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml"])
def test_changed_requirements_are_installed_into_the_environment_that_is_there(checkout: Checkout, name: str) -> None:
    checkout.set_up()
    (checkout.root / name).write_text("changed")
    assert checkout.set_up() == ["install"]
    assert checkout.set_up() == []


def test_a_set_up_that_was_interrupted_is_taken_up_again(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkout.noxfile, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkout.noxfile.set_up()
    assert checkout.set_up() == ["install"]


def test_an_environment_that_does_not_work_is_made_anew(checkout: Checkout) -> None:
    checkout.set_up()
    checkout.noxfile.venv_python().unlink()
    checkout.works = False
    assert checkout.set_up() == ["make", "install"]


def test_what_cannot_be_installed_over_leftovers_is_tried_from_nothing(checkout: Checkout) -> None:
    checkout.works = True
    checkout.install_succeeds = [False, True]
    assert checkout.set_up() == ["install", "make", "install"]


def test_what_worked_once_is_not_thrown_away_for_a_network_that_is_down(checkout: Checkout) -> None:
    checkout.set_up()
    (checkout.root / "setup.cfg").write_text("changed")
    checkout.install_succeeds = [False]
    with pytest.raises(checkout.noxfile.SetUpError):
        checkout.set_up()
    assert checkout.done == ["install"]
    (checkout.root / "setup.cfg").write_text("setup.cfg")
    checkout.install_succeeds = [True]
    assert checkout.set_up() == ["install"]  # who knows how far the failed attempt came


def test_a_set_up_that_fails_is_not_taken_for_done(checkout: Checkout) -> None:
    checkout.install_succeeds = [False]
    with pytest.raises(checkout.noxfile.SetUpError, match="pip says why"):
        checkout.set_up()
    checkout.install_succeeds = [True]
    assert checkout.set_up() == ["install"]


def test_a_python_that_cannot_make_environments_is_told_the_one_line_that_mends_it(
    original: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(original, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(original.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(original.SetUpError, match="apt-get install --yes python3-venv"):
        original.make_venv()


def test_a_broken_interpreter_is_recognised(original: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "VENV", tmp_path / ".venv")
    assert not original.venv_works()
    original.venv_python().parent.mkdir(parents=True)
    original.venv_python().symlink_to(tmp_path / "gone")
    assert not original.venv_works()
    original.venv_python().unlink()
    original.venv_python().symlink_to("/bin/false")
    assert not original.venv_works()


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["no-such-job"], 2)])
def test_without_a_job_the_jobs_are_listed(arguments: list[str], status: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(ROOT / "noxfile.py"), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert "  tests " in done.stdout


def test_arguments_go_to_the_last_command_and_the_first_failure_ends_the_job(
    original: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:]); sys.exit(len(sys.argv) - 1)")
    monkeypatch.setattr(original, "venv_python", lambda: Path(sys.executable))
    monkeypatch.setattr(original, "ROOT", tmp_path)
    monkeypatch.setattr(original, "JOBS", {"job": ("", ["python show.py", "python show.py"])})
    assert original.run_job("job", ["-k", "a b"]) == 2
    assert original.run_job("job", []) == 0
    monkeypatch.setattr(original, "JOBS", {"job": ("", ["python show.py fails", "python show.py"])})
    assert original.run_job("job", []) == 1
    assert capfd.readouterr().out.splitlines() == ["[]", "['-k', 'a b']", "[]", "[]", "['fails']"]


def test_every_job_is_a_session_of_nox_too(original: ModuleType) -> None:
    for job in original.JOBS.keys() - {"setup"}:
        session = getattr(original, job)
        assert inspect.signature(inspect.unwrap(session.func if hasattr(session, "func") else session)).parameters
