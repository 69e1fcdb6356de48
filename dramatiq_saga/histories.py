"""Recorded histories as files: kept beside a project's tests, and replayed against its code (C68; API: "Testing helpers").

A history file holds what a replay needs to know of one run, as JSON in a format with a version of its own, which every later
version of this package reads. It is made from a run that really happened, on any store; replaying one needs neither database
nor worker, and changes nothing. It says what ``dramatiq-saga verify`` would say of that run.

**A history holds arguments, results and error messages as they are**: a file that is checked in makes them public to everybody
who can read the repository. Record runs of test data, or give ``scrub`` a function that replaces what must not be seen.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import dramatiq

from .clock import to_iso
from .codec import decode, load_error, message_of
from .engine.documents import Keeper, Scrub, from_document, kept_error, stored_bytes, to_document
from .engine.snapshot import read
from .engine.verify import walk
from .errors import FlowNotFoundError, HistoryFormatError, in_one_line, qualified_name
from .flow import Flow

if TYPE_CHECKING:
    from .engine.rows import Snapshot
    from .handle import FlowHandle
    from .store.database import Store, Tx
    from .workflow import Workflow

R_co = TypeVar("R_co", covariant=True)

#: What a file calls itself, and the version of the format that is written. Every version up to this one is read.
FORMAT, FORMAT_VERSION = "dramatiq_saga.history", 1

_RUN = "SELECT result, error FROM {flow_runs} WHERE id = ?"
_STEP_ARGS = "SELECT sequence, args, comp_args FROM {action_runs} WHERE run_id = ?"
_CHILD_ARGS = "SELECT sequence, args, comp_args FROM {children} WHERE run_id = ?"


@dataclass(frozen=True)
class History:
    """What is recorded of one run. Made by :func:`record_history` or :func:`load_history`."""

    document: dict[str, Any]

    @property
    def run_id(self) -> str:
        """The run that this was recorded of."""
        return str(self.document["run_id"])

    @property
    def workflow(self) -> str:
        """The name of its workflow."""
        return str(self.document["workflow"])

    @property
    def version(self) -> str | None:
        """The version that the run was started with."""
        version: str | None = self.document["version"]
        return version

    @property
    def status(self) -> str:
        """Where the run was when it was recorded."""
        return str(self.document["status"])

    @property
    def result(self) -> Any:
        """What the run returned; ``None`` where it had not completed."""
        stored = self.document["result"]
        return None if stored is None else decode(stored_bytes(stored))

    def to_json(self) -> str:
        """The text of a file."""
        text = json.dumps(self.document, indent=2, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can carry and UTF-8 cannot
            text = json.dumps(self.document, indent=2)
        return text + "\n"

    def write(self, path: str | Path) -> Path:
        """Write a file that its owner alone may read, whole or not at all; a history that is there is replaced, and nothing else is.

        A symbolic link is followed, so what it names is written and the link stays.

        Raises:
          FileExistsError: what is there is no history, or no regular file: a database, a device, a folder. It is left as it is.
          OSError: the file cannot be written.
        """
        chosen = Path(path)
        target = Path(os.path.realpath(chosen))
        if not _may_be_replaced(target):
            raise FileExistsError(f"{str(path)!r} is there already and is no history: only a history is replaced by one")
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(self.to_json())
            Path(name).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
        return chosen


def _may_be_replaced(path: Path) -> bool:
    """Whether there is nothing, or a history of any version: what else is there may be all that somebody has."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(kind):
        return False
    with path.open("rb") as file:
        if file.read(1) != b"{":  # a database may be larger than the memory
            return False
        file.seek(0)
        try:
            document = json.loads(file.read())
        except (ValueError, RecursionError):
            return False
    return isinstance(document, dict) and document.get("format") == FORMAT


@dataclass(frozen=True)
class ReplayedHistory(Generic[R_co]):
    """How a function walked through a history that fits it.

    Attributes:
      ends: ``completed``, ``failed``, ``suspended``, or ``side effect`` where it wants one that is not recorded.
      result: what it returned, in stored form, where it completed.
      error: why it failed, in one line.
      asks: what it asks for beyond what is recorded, for example ``("step 'ship'",)``.
    """

    ends: str
    result: R_co | None = None
    error: str | None = None
    asks: tuple[str, ...] = ()


def record_history(run: FlowHandle[Any], *, scrub: Scrub | None = None) -> History:
    """What is recorded of a run up to now. The run is only read, and may go on.

    Parameters:
      scrub: called with every stored value (arguments as ``[args, kwargs]``, results, side effects), gives the one that is kept
        instead. It must keep what the workflow function decides by. Error messages are kept as they are, tracebacks never.

    Raises:
      FlowNotFoundError: there is no such run.
    """
    return read_history(run._engine.store, run.id, scrub=scrub)


def read_history(store: Store, run_id: str, *, scrub: Scrub | None = None) -> History:
    """As :func:`record_history`, from a store that holds the run."""
    now = store.clock.now()

    def operation(tx: Tx) -> tuple[Snapshot, Any, list[Any]] | None:
        snapshot = read(tx, run_id)
        return (
            None
            if snapshot is None
            else (
                snapshot,
                tx.one(_RUN, (run_id,)),
                [*tx.all(_STEP_ARGS, (run_id,)), *tx.all(_CHILD_ARGS, (run_id,))],
            )
        )

    found = store.read(operation)
    if found is None:
        raise FlowNotFoundError(run_id)
    snapshot, (result, error), rows = found
    keep = Keeper(scrub)
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "encoder": qualified_name(type(dramatiq.get_encoder())),
        "recorded_at": to_iso(now),
        "recorded_at_ms": now,
        **to_document(snapshot, keep, {sequence: (args, comp_args) for sequence, args, comp_args in rows}),
        "result": keep.data(result),
        "error": kept_error(error),
    }
    return History(document)


def load_history(path: str | Path) -> History:
    """The history in a file.

    Raises:
      HistoryFormatError: it is no history, or one of a later version of this package.
      OSError: it cannot be read.
    """
    return parse_history(Path(path).read_text(encoding="utf-8"), str(path))


def parse_history(text: str, name: str) -> History:
    """As :func:`load_history`, from the text of a file; ``name`` is what errors call it."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise HistoryFormatError(name, f"it is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise HistoryFormatError(name, f"it does not say that it is a {FORMAT!r}")
    version = document.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise HistoryFormatError(name, f"its format_version is {version!r}")
    if version > FORMAT_VERSION:
        raise HistoryFormatError(
            name, f"its format has version {version}, and this package reads up to {FORMAT_VERSION}: update it"
        )
    history = History(document)
    snapshot_of(history, name)  # what cannot be replayed is told here, where the file is named
    return history


def replay_history(workflow: Workflow[Any, R_co], history: History | str | Path) -> ReplayedHistory[R_co]:
    """Walk the workflow's function against ``history`` (or the file of that name), as the next drive of that run would.

    Nothing is committed, no step is run, no side effect called.

    Raises:
      HistoryMismatchError: it does not fit: the difference is in the message, and in ``sequence, recorded, asked``.
      HistoryFormatError: the file is no history.
      ValueError: it was recorded of another workflow.
      SagaError: the function made a mistake for which a run is held.
    """
    chosen = history if isinstance(history, History) else load_history(history)
    if chosen.workflow != workflow.name:
        raise ValueError(
            f"the history was recorded of workflow {chosen.workflow!r}, not of {workflow.name!r}: runs find their code by that name"
        )
    snapshot = snapshot_of(chosen, chosen.run_id)
    settings = workflow._middleware.settings
    walked = walk(workflow.fn, snapshot, Flow, settings=settings, now=chosen.document["recorded_at_ms"])
    decision = walked.decision
    if decision is None:
        return ReplayedHistory(walked.ends)
    error = load_error(decision.error) if decision.error else None
    return ReplayedHistory(
        walked.ends,
        None if decision.result is None else decode(decision.result),
        None if error is None else in_one_line(error["type"], error["message"]),
        tuple(entry.describe() for entry in walked.context.new_entries),
    )


def snapshot_of(history: History, name: str) -> Snapshot:
    """What a replay is given. ``name`` is what errors call the history."""
    document = history.document
    try:
        return from_document(document)
    except KeyError as error:
        raise HistoryFormatError(name, f"{error} is missing in it") from None
    except Exception as error:  # an encoder may raise what it likes
        detail = f"{type(error).__name__}: {message_of(error)[:300]}"
        raise HistoryFormatError(name, f"{detail} (it was recorded with {document.get('encoder')})") from error
