"""Checking that a workflow function asks for the same things again: what ``saga.replay_every_step()`` turns on (C61).

A worker replays a run whenever it has to, from its rows; a function that depends on anything but its arguments and its history
works until then. Here every decision is followed by two replays from rows that are read and decoded anew: one of everything that
is recorded, which must lead nowhere, and one of the history that the decision had rested on, which must lead to the same
decision, arguments included. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..codec import preview
from ..engine.core import SnapshotCache
from ..engine.replay import HoldRun, NeedsRecording, Replay, replay
from ..engine.rows import Decision, Snapshot
from ..engine.snapshot import read
from ..errors import HistoryMismatchError

if TYPE_CHECKING:
    from ..engine.core import Engine

_RUNS = "SELECT id, revision FROM {flow_runs} ORDER BY created_at, id"
_RESULT = "SELECT result FROM {flow_runs} WHERE id = ?"
_STEPS = (
    "SELECT sequence, actor, args, comp_actor, comp_args FROM {action_runs} WHERE run_id = ? AND sequence > ? ORDER BY sequence"
)

#: Entries that are recorded while a replay goes on, and not by the decision that it leads to.
_RECORDED_ON_THE_WAY = ("side effect", "patch")

#: Longest preview of arguments in an error.
_SHOWN = 300


class _NothingKept(SnapshotCache):
    """A cache that forgets: every step is decided on rows, as on a machine that has never seen the run."""

    def get(self, run_id: str) -> Snapshot | None:
        return None

    def put(self, snapshot: Snapshot) -> None:
        pass


class ReplayChecks:
    """The checks of one test, and which revisions of which runs have passed them."""

    def __init__(self) -> None:
        self._passed: dict[tuple[int, str], int] = {}

    def forget_everything(self, engine: Engine) -> None:
        """From now on that engine keeps no history in memory."""
        engine.cache = _NothingKept()

    def of_decision(self, engine: Engine, run_id: str) -> Callable[[], None]:
        """To be called before a message about that run is delivered; what it returns is to be called afterwards.

        Raises (then) HistoryMismatchError, or whatever else the run would be held with.
        """
        return partial(self._check, engine, run_id, _read(engine, run_id))

    def everything(self, engines: Iterable[Engine]) -> None:
        """Check each run that has moved on since it was checked."""
        for engine in engines:
            for run_id, revision in engine.store.read(lambda tx: tx.all(_RUNS)):
                if self._passed.get((id(engine), run_id)) != revision:
                    self._check(engine, run_id, None)

    def _check(self, engine: Engine, run_id: str, before: Snapshot | None) -> None:
        __tracebackhide__ = True
        after = _read(engine, run_id)
        if after is None or after.workflow not in engine.workflows:
            return
        if before is not None and after.revision == before.revision:
            return  # nothing was decided
        _check_what_is_recorded(engine, after)
        if before is not None and after.revision == before.revision + 1:
            _check_the_decision(engine, before, after)
        self._passed[id(engine), run_id] = after.revision


def _read(engine: Engine, run_id: str) -> Snapshot | None:
    return engine.store.read(lambda tx: read(tx, run_id))


def _replayed(engine: Engine, snapshot: Snapshot) -> Decision | None:
    """Where a replay leads that writes nothing; ``None`` where it needs a side effect that is not recorded."""
    __tracebackhide__ = True
    context = Replay(snapshot, now=engine.now(), settings=engine.settings)
    try:
        return replay(engine.workflows[snapshot.workflow].function, context, engine.make_flow)
    except HoldRun as held:
        raise held.error from held.error.__cause__
    except NeedsRecording:
        return None


def _check_what_is_recorded(engine: Engine, snapshot: Snapshot) -> None:
    """All of it, once more: no new request, and a run that has ended ends the same way."""
    __tracebackhide__ = True
    decision = _replayed(engine, snapshot)
    end = len(snapshot.entries) + 1
    if snapshot.status in ("pending", "running", "waiting"):
        if snapshot.wakes == snapshot.wakes_seen and (decision is None or decision.kind != "suspended" or _asks(decision)):
            raise HistoryMismatchError(snapshot.run_id, end, "nothing: the run waits", _asked(decision))
    elif snapshot.status in ("completed", "failed") and not any(_is_cut_off(entry) for entry in snapshot.entries):
        if decision is None or decision.kind != snapshot.status:
            raise HistoryMismatchError(snapshot.run_id, end, f"its end: it {snapshot.status}", _asked(decision))
        row = engine.store.read(lambda tx: tx.one(_RESULT, (snapshot.run_id,)))
        recorded = None if row is None or row[0] is None else bytes(row[0])
        if recorded != decision.result:
            raise HistoryMismatchError(
                snapshot.run_id, end, f"the result {_shown(recorded)}", f"the result {_shown(decision.result)}"
            )


def _check_the_decision(engine: Engine, before: Snapshot, after: Snapshot) -> None:
    """The last decision once more: the same steps, undone the same way, with the same arguments."""
    __tracebackhide__ = True
    cut = len(before.entries)
    while cut < len(after.entries) and after.entries[cut].kind in _RECORDED_ON_THE_WAY:
        cut += 1
    if cut == len(after.entries):
        return
    decision = _replayed(engine, replace(after, entries=list(after.entries[:cut]), status="running", wakes=after.wakes + 1))
    rows = engine.store.read(lambda tx: tx.all(_STEPS, (after.run_id, cut)))
    steps = {step.sequence: step for step in decision.steps} if decision is not None else {}
    for sequence, actor, args, comp_actor, comp_args in rows:
        step = steps.get(sequence)
        if step is None:
            raise HistoryMismatchError(after.run_id, sequence, f"step {actor!r}", _asked(decision))
        for what, name, recorded, asked_name, asked in (
            ("step", actor, args, step.actor, step.args),
            ("compensation", comp_actor, comp_args, *_undo(step)),
        ):
            if (name, _bytes(recorded)) != (asked_name, _bytes(asked)):
                raise HistoryMismatchError(
                    after.run_id,
                    sequence,
                    f"{what} {name!r} with {_shown(recorded)}",
                    f"{what} {asked_name!r} with {_shown(asked)}",
                )


def _undo(step: Any) -> tuple[str | None, bytes | None]:
    spec = step.compensation
    return (None, None) if spec is None else (spec.actor, spec.args)


def _is_cut_off(entry: Any) -> bool:
    """Whether the run ended while this was open: a replay would wait for it."""
    return getattr(entry, "status", None) in ("cancelled", "pending", "running", "waiting", "awaiting_retry")


def _asks(decision: Decision) -> bool:
    """Whether it would create anything."""
    lists = (getattr(decision, one.name) for one in fields(decision) if one.name != "resolved")
    return any(isinstance(value, list) and value for value in lists)


def _asked(decision: Decision | None) -> str:
    if decision is None:
        return "a side effect"
    if decision.steps:
        return f"step {decision.steps[0].actor!r} with {_shown(decision.steps[0].args)}"
    if decision.kind == "suspended":
        return "something else" if _asks(decision) else "nothing more: it waits"
    return f"nothing more: it has {decision.kind}"


def _bytes(data: Any) -> bytes | None:
    return None if data is None else bytes(data)


def _shown(data: Any) -> str:
    return "nothing" if data is None else str(preview(bytes(data), _SHOWN))


__all__ = ["ReplayChecks"]
