"""Verifying: do recorded histories fit the code of this process? The replay of a drive, without anything that a drive does.

A history is read in one short read transaction, the function is walked against it, and what came of that is told; nothing is
written, sent, cached or recorded, and no side effect is called. A walk that needs a side effect which is not recorded has
fitted so far, and ends there (HISTORY-1, C68). Runs are read page by page behind the last one seen, one history in memory at a
time, so a million runs cost time and no memory. Who else may be here: workers, which change runs meanwhile. A run is judged as
one moment had it, and what is said of it is advice: nothing rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..codec import load_error, message_of
from ..errors import HistoryMismatchError, SagaError, in_one_line
from ..statuses import FLOW_TERMINAL
from ..store.models import LIVE
from ..store.trouble import is_trouble
from .replay import HoldRun, NeedsRecording, Replay, replay
from .rows import ChildEntry, Decision, Snapshot, StepEntry
from .snapshot import read

if TYPE_CHECKING:
    from ..settings import Settings
    from .core import Engine

#: Runs that one read lists.
BATCH = 200

_HEAD = "id, workflow, version, status, hold_count, created_at"
_ONE = f"SELECT {_HEAD} FROM {{flow_runs}} WHERE id = ?"
_PAGE = (
    f"SELECT {_HEAD} FROM {{flow_runs}} WHERE %s AND created_at <= ? "
    "AND (created_at > ? OR (created_at = ? AND id > ?)) ORDER BY created_at, id LIMIT ?"
)
_UNDOS = (
    "SELECT c.sequence, c.actor, a.actor FROM {compensation_runs} c LEFT JOIN {action_runs} a ON a.run_id = c.run_id "
    f"AND a.sequence = c.sequence WHERE c.run_id = ? AND c.{LIVE} ORDER BY c.sequence"
)

#: A run's function is not walked any more once its rollback has begun: there the rows decide alone.
_NOT_DRIVEN = "rolling_back"


@dataclass(frozen=True, slots=True)
class Finding:
    """What does not fit, the same for every run that it is true of.

    ``kind`` is one of

    * ``mismatch``: the code asks for something else than what is recorded at ``sequence``;
    * ``unknown workflow``: this application declares no workflow of that name, so it can resume none of its runs;
    * ``unknown actor``: a step that is open, or what a completed one would be undone by, is no actor of this application;
    * ``unreadable``: what is recorded cannot be decoded, by another encoder for example;
    * ``refused``: the function did something that holds a run (an author's mistake around ``flow``, COMP-10);
    * ``fails``: it fits, and the next drive will fail the run. The one kind that is a warning.
    """

    kind: str
    workflow: str
    reason: str
    sequence: int | None = None
    recorded: str | None = None
    asked: str | None = None

    @property
    def fits(self) -> bool:
        """Whether a run that this is true of goes on all the same."""
        return self.kind == "fails"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one run's history.

    ``ends`` says how the walk ended, as far as it came: ``suspended``, ``completed``, ``failed``, or ``side effect`` where it
    stopped before one that is not recorded. ``held`` is how often the run has been held up to now (0: it is not).
    """

    run_id: str
    workflow: str
    version: str | None
    status: str
    held: int
    ends: str | None
    findings: tuple[Finding, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the next drive can use the history."""
        return all(finding.fits for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk that has used its history: how it ended, and the decision that a drive would commit.

    ``decision`` is ``None`` where a side effect that is not recorded stopped the walk.
    """

    ends: str
    decision: Decision | None
    context: Replay


def walk(
    function: Callable[..., Any], snapshot: Snapshot, make_flow: Callable[[Any], Any], *, settings: Settings, now: int
) -> Walk:
    """``function`` walked against ``snapshot`` and nothing else.

    Raises what a drive would hold the run for: :class:`HistoryMismatchError`, or the author's mistake.
    """
    context = Replay(snapshot, now=now, settings=settings, looks_only=True)
    try:
        decision = replay(function, context, make_flow)
    except HoldRun as hold:
        raise hold.error from hold.error.__cause__
    except NeedsRecording:
        return Walk("side effect", None, context)
    return Walk(decision.kind, decision, context)


def verify_run(engine: Engine, run_id: str) -> Verdict | None:
    """The verdict on one run, whatever its status; ``None`` where there is no such run."""
    row = engine.store.read(lambda tx: tx.one(_ONE, (run_id,)))
    return None if row is None else _judge(engine, row)


def verify_runs(engine: Engine, *, workflow: str | None = None, finished: bool = False) -> Iterator[Verdict]:
    """Verdicts on every live run that is there now, the oldest first; with ``finished``, on those that have ended as well.

    Runs that are held are among them. Of one that is rolling back the function is not walked any more (COMP-2): only the actors
    of its undos are looked for.
    Runs that end meanwhile are left out, or seen as they were.
    """
    which = "1 = 1" if finished else LIVE
    narrowed = [] if workflow is None else [workflow]
    sql = _PAGE % (which + (" AND workflow = ?" if narrowed else ""))
    until = engine.now()  # runs that start meanwhile are new ground, and would keep this going for ever
    last: tuple[int, str] = (-1, "")
    while True:
        params = (*narrowed, until, last[0], last[0], last[1], BATCH)
        rows = engine.store.read(lambda tx, params=params: tx.all(sql, params))  # type: ignore[misc]
        for row in rows:
            verdict = _judge(engine, row)
            if verdict is not None:
                yield verdict
        if len(rows) < BATCH:
            return
        last = (rows[-1][5], rows[-1][0])


def _judge(engine: Engine, row: tuple[Any, ...]) -> Verdict | None:
    """The verdict on a listed run; ``None`` where it is gone by now."""
    run_id, workflow, version, status, hold_count, _ = row

    def verdict(ends: str | None, *findings: Finding) -> Verdict:
        held = 0 if status in FLOW_TERMINAL else hold_count
        return Verdict(run_id, workflow, version, status, held, ends, findings)

    if status == _NOT_DRIVEN:
        return verdict(None, *_rolling_back(engine, run_id, workflow))
    definition = engine.workflows.get(workflow)
    if definition is None:
        reason = (
            f"the application declares no workflow named {workflow!r}: import the module that does, or cancel the run; a workflow "
            "that was renamed has to keep its old name (workflow(name=...)) while runs of it are live"
        )
        return verdict(None, Finding("unknown workflow", workflow, reason))
    try:
        snapshot = engine.store.read(lambda tx: read(tx, run_id))
    except Exception as error:
        if is_trouble(error):
            raise
        reason = f"what is recorded cannot be read: {type(error).__name__}: {message_of(error)}"
        return verdict(None, Finding("unreadable", workflow, reason))
    if snapshot is None:
        return None
    unknown = _unknown_actors(engine, snapshot)
    try:
        walked = walk(definition.function, snapshot, engine.make_flow, settings=engine.settings, now=engine.now())
    except HistoryMismatchError as error:
        reason = f"recorded is {error.recorded}, the code asks for {error.asked}"
        finding = Finding("mismatch", workflow, reason, error.sequence, error.recorded, error.asked)
        return verdict(None, finding, *unknown)
    except Exception as error:
        if is_trouble(error):
            raise
        reason = message_of(error) if isinstance(error, SagaError) else f"{type(error).__name__}: {message_of(error)}"
        return verdict(None, Finding("refused", workflow, reason), *unknown)
    if walked.ends == "failed" and status not in FLOW_TERMINAL:
        assert walked.decision is not None
        unknown.append(Finding("fails", workflow, _in_words(walked.decision)))
    return verdict(walked.ends, *unknown)


def _unknown_actors(engine: Engine, snapshot: Snapshot) -> list[Finding]:
    """Rows of a live run that wait for an actor which nobody declares: their messages would be given up (NATIVE-3)."""
    if snapshot.status in FLOW_TERMINAL:
        return []
    found = []
    for entry in snapshot.entries:
        if not isinstance(entry, StepEntry | ChildEntry):
            continue
        if isinstance(entry, StepEntry) and entry.is_live and engine.actor_facts(entry.actor) is None:
            reason = f"step {entry.sequence} is {entry.status}, and the application declares no actor {entry.actor!r} to run it"
            found.append(Finding("unknown actor", snapshot.workflow, reason, entry.sequence, entry.describe()))
        undo = entry.comp_actor
        if undo is not None and (entry.is_live or entry.status == "completed") and engine.actor_facts(undo) is None:
            found.append(_unknown_undo(snapshot.workflow, entry.sequence, entry.describe(), undo))
    return found


def _unknown_undo(workflow: str, sequence: int, what: str, undo: str) -> Finding:
    reason = (
        f"{what}, sequence {sequence}, is to be undone by {undo!r}, and the application declares no such actor: keep it while such "
        "runs are live"
    )
    return Finding("unknown actor", workflow, reason, sequence, what)


def _rolling_back(engine: Engine, run_id: str, workflow: str) -> list[Finding]:
    """Of a run whose rollback has begun its function is not asked any more; only the actors of its undos have to be there."""
    rows = engine.store.read(lambda tx: tx.all(_UNDOS, (run_id,)))
    return [
        _unknown_undo(workflow, sequence, f"step {actor!r}" if actor is not None else "a child", undo)
        for sequence, undo, actor in rows
        if engine.actor_facts(undo) is None
    ]


def _in_words(decision: Decision) -> str:
    """Why the next drive would fail the run."""
    error = load_error(decision.error or "")
    return f"the next drive fails the run: {in_one_line(error['type'], error['message'])}"


# --- many verdicts in few words --------------------------------------------------------------------------------------

#: Distinct findings that a report keeps, and runs that it names for each; the rest are counted.
MOST_FINDINGS, MOST_NAMED = 200, 20


@dataclass(slots=True)
class Problem:
    """One finding and the runs that it is true of: how many, how many of them are held, and the first ones by name."""

    finding: Finding
    runs: int = 0
    held: int = 0
    run_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class VerifyReport:
    """What a pass over many runs has found. ``more`` counts findings beyond those that are kept."""

    looked_at: int = 0
    unfit: int = 0
    held: int = 0
    held_and_fit: int = 0
    more: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether every run that was looked at goes on with this code."""
        return self.unfit == 0


def summarise(verdicts: Iterable[Verdict]) -> VerifyReport:
    """``verdicts`` as a report whose size does not depend on how many there are."""
    report = VerifyReport()
    known: dict[Finding, Problem] = {}
    for verdict in verdicts:
        report.looked_at += 1
        report.unfit += not verdict.fits
        report.held += verdict.held > 0
        report.held_and_fit += verdict.held > 0 and verdict.fits
        for finding in verdict.findings:
            problem = known.get(finding)
            if problem is None and len(known) == MOST_FINDINGS:
                report.more += 1
                continue
            if problem is None:
                problem = known[finding] = Problem(finding)
            problem.runs += 1
            problem.held += verdict.held > 0
            if len(problem.run_ids) < MOST_NAMED:
                problem.run_ids.append(verdict.run_id)
    report.problems = sorted(known.values(), key=lambda problem: (problem.finding.fits, -problem.runs))
    return report
