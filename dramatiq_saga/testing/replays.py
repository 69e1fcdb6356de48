"""Checking that a workflow function asks for the same things again: what ``saga.replay_every_step()`` turns on (C61).

A worker replays a run whenever it has to, from its rows; a function that depends on anything but its arguments and its history
works until then. Here every decision is followed by two replays from rows that are read and decoded anew: one of everything that
is recorded, which must lead nowhere, and one of the history that the decision had rested on, which must lead to the same
decision, arguments included. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..clock import to_iso
from ..codec import freeze, preview
from ..engine.core import SnapshotCache
from ..engine.rows import Decision, ReceivedSignal, Snapshot, block_name
from ..engine.snapshot import read
from ..engine.verify import walk
from ..errors import HistoryMismatchError

if TYPE_CHECKING:
    from ..engine.core import Engine
    from ..store.database import Tx

_RUNS = "SELECT id, revision, created_at FROM {flow_runs} ORDER BY created_at, id"
_RESULT = "SELECT result FROM {flow_runs} WHERE id = ?"
_AFTER = "WHERE run_id = ? AND sequence > ?"
_STEPS = f"SELECT sequence, actor, args, comp_actor, comp_args FROM {{action_runs}} {_AFTER}"
_CHILDREN = f"SELECT sequence, workflow, args, comp_actor, comp_args FROM {{children}} {_AFTER}"
_BLOCKS = f"SELECT sequence, kind, size FROM {{blocks}} {_AFTER}"
_WAITS = f"SELECT sequence, kind, name, due_at FROM {{waits}} {_AFTER} AND kind <> 'retry'"
_CONSUMED = (
    "SELECT s.id, s.name, s.payload FROM {waits} w JOIN {signals} s ON s.id = w.signal_id "
    "WHERE w.run_id = ? AND w.sequence > ? AND w.kind = 'signal'"
)

#: Entries that hold a value from outside the function.
_RECORDED_ON_THE_WAY = ("side effect", "sent signal", "patch")

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
        self._passed: dict[tuple[int, str], tuple[int, int]] = {}

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
            for run_id, *counts in engine.store.read(lambda tx: tx.all(_RUNS)):
                if self._passed.get((id(engine), run_id)) != tuple(counts):
                    self._check(engine, run_id, None)

    def _check(self, engine: Engine, run_id: str, before: Snapshot | None) -> None:
        __tracebackhide__ = True
        after = _read(engine, run_id)
        if after is None or after.workflow not in engine.workflows:
            return
        if before is not None and before.created_at != after.created_at:
            before = None  # of a run that had the same id, and was pruned
        if before is not None and after.revision == before.revision:
            return  # nothing was decided
        _check_what_is_recorded(engine, after)
        if before is not None and after.revision == before.revision + 1:
            _check_the_decision(engine, before, after)
        self._passed[id(engine), run_id] = (after.revision, after.created_at)


def _read(engine: Engine, run_id: str) -> Snapshot | None:
    return engine.store.read(lambda tx: read(tx, run_id))


def _replayed(engine: Engine, snapshot: Snapshot) -> Decision | None:
    """Where a replay leads that writes nothing; ``None`` where it needs a side effect that is not recorded."""
    __tracebackhide__ = True
    function = engine.workflows[snapshot.workflow].function
    return walk(function, snapshot, engine.make_flow, settings=engine.settings, now=engine.now()).decision


def _check_what_is_recorded(engine: Engine, snapshot: Snapshot) -> None:
    """All of it, once more: no new request, and a run that has ended ends the same way."""
    __tracebackhide__ = True
    decision = _replayed(engine, snapshot)
    end = len(snapshot.entries) + 1
    if snapshot.status in ("pending", "running", "waiting"):
        if snapshot.wakes == snapshot.wakes_seen and (decision is None or decision.kind != "suspended" or requests(decision)):
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
    """The last decision once more: the same requests, with the same arguments."""
    __tracebackhide__ = True
    # What was recorded on the way cannot be asked for once more: a random number would be another. It is part of what is rested on.
    new = range(len(before.entries), len(after.entries))
    cut = max((index + 1 for index in new if after.entries[index].kind in _RECORDED_ON_THE_WAY), default=new.start)
    if cut == len(after.entries):
        return
    # What had arrived by then: what has not been consumed yet, and what this decision has consumed.
    consumed = engine.store.read(lambda tx: tx.all(_CONSUMED, (after.run_id, cut)))
    signals = [*after.signals, *(ReceivedSignal(number, name, freeze(bytes(payload))) for number, name, payload in consumed)]
    rested_on = replace(
        after, entries=list(after.entries[:cut]), status="running", wakes=after.wakes + 1,
        signals=tuple(sorted(signals, key=lambda signal: signal.id)),
    )  # fmt: skip
    decision = _replayed(engine, rested_on)
    recorded = engine.store.read(lambda tx: recorded_requests(tx, after.run_id, cut))
    asked = {} if decision is None else requests(decision)
    for sequence in sorted({*recorded, *asked}):
        if recorded.get(sequence) != asked.get(sequence):
            raise HistoryMismatchError(
                after.run_id, sequence, recorded.get(sequence, "nothing"), asked.get(sequence) or _asked(decision)
            )


def requests(decision: Decision) -> dict[int, str]:
    """What a decision asks for, by sequence, in words that say everything that has to agree."""
    found = {one.sequence: _call("step", one.actor, one.args, *_undo(one)) for one in decision.steps}
    more = decision.more
    if more is not None:
        found |= {one.sequence: _call("child", one.workflow, one.args, *_undo(one)) for one in more.children}
        found |= {one.sequence: _block(one.what, one.size) for one in more.blocks}
        found |= {one.sequence: _wait(one.what, one.name, one.due_at) for one in more.waits}
    return found


def recorded_requests(tx: Tx, run_id: str, after: int) -> dict[int, str]:
    """The same of what is recorded behind a sequence."""
    key = (run_id, after)
    found = {row[0]: _call("step", *row[1:]) for row in tx.all(_STEPS, key)}
    found |= {row[0]: _call("child", *row[1:]) for row in tx.all(_CHILDREN, key)}
    found |= {row[0]: _block(*row[1:]) for row in tx.all(_BLOCKS, key)}
    found |= {row[0]: _wait(*row[1:]) for row in tx.all(_WAITS, key)}
    return found


def _call(what: str, name: str, args: Any, comp_actor: str | None, comp_args: Any) -> str:
    undone = "" if comp_actor is None or comp_args is None else f", undone by {comp_actor!r} with {_text(comp_args)}"
    return f"{what} {name!r} with {_text(args)}{undone}"


def _undo(one: Any) -> tuple[str | None, bytes | None]:
    spec = one.compensation
    return (None, None) if spec is None else (spec.actor, spec.args)


def _block(what: str, size: int) -> str:
    return f"{block_name(what)} of {size}"


def _wait(what: str, name: str | None, due_at: int | None) -> str:
    return ("timer" if what == "timer" else f"wait for signal {name!r}") + (
        "" if due_at is None else f" until {to_iso(due_at)}"
    )


def _is_cut_off(entry: Any) -> bool:
    """Whether the run ended while this was open: a replay would wait for it."""
    return entry.is_live or getattr(entry, "status", None) == "cancelled"


def _asked(decision: Decision | None) -> str:
    if decision is None:
        return "a side effect"
    asked = requests(decision)
    if asked:
        return asked[min(asked)]
    return "nothing more: it waits" if decision.kind == "suspended" else f"nothing more: it has {decision.kind}"


def _text(data: Any) -> str:
    """Arguments, whole: what is compared is what is shown."""
    return "nothing" if data is None else preview(bytes(data), len(data))


def _shown(data: bytes | None) -> str:
    return "nothing" if data is None else preview(data, _SHOWN)


__all__ = ["ReplayChecks"]
