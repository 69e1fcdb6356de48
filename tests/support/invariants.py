"""What holds after a bad day, whatever has gone wrong: the rows against what the bodies themselves have told the effect log.

:func:`violations` names every promise that was broken. :func:`fought_over` says how often there was something to break.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from dramatiq_saga.statuses import FLOW_TERMINAL
from dramatiq_saga.store.database import Store
from tests.support.effects import EffectLog


def fought_over(effects: EffectLog) -> int:
    """How many steps and undos two live workers have worked on at once: what only fences tell apart."""
    begun: dict[tuple[str, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    ends = {(e["run"], e["sequence"], e["effect"].split()[0], e["attempt"]): e["at"] for e in effects if " " in e["effect"]}
    for e in effects:
        if " " not in e["effect"]:
            key = (e["run"], e["sequence"], e["effect"])
            begun[key].append((e["attempt"], e["at"], ends.get((*key, e["attempt"]), 0)))
    return sum(any(one[2] > other[1] for one, other in itertools.pairwise(sorted(claims))) for claims in begun.values())


def violations(store: Store, effects: EffectLog) -> list[str]:
    """Every promise that was broken, in words. Run it when nothing is running any more."""
    return list(_violations(store, effects))


def _violations(store: Store, effects: EffectLog) -> Iterator[str]:
    told: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in effects:
        told[entry["run"], entry["sequence"], entry["effect"]].append(entry)
    runs = {
        row[0]: row
        for row in store.read(lambda tx: tx.all("SELECT id, status, rollback, parent_id, wakes, wakes_seen FROM {flow_runs}"))
    }
    for run_id, status, rollback, *_ in runs.values():
        if status not in FLOW_TERMINAL or rollback == "running":
            yield f"{run_id} has not ended: {status}, rollback {rollback}"
    yield from _histories(store)
    steps = store.read(
        lambda tx: tx.all(
            "SELECT run_id, sequence, status, attempts, cycle, result, given_up, ended_at FROM {action_runs} ORDER BY run_id, sequence"
        )
    )
    for run_id, sequence, status, attempts, cycle, result, given_up, ended_at in steps:
        where = f"{run_id} step {sequence}"
        started, ended = told[run_id, sequence, "work"], told[run_id, sequence, "work ended"]
        if ended_at is None:
            yield f"{where} was left {status}"
        claims = [entry["attempt"] for entry in started]
        if len(claims) != len(set(claims)):
            yield f"{where}: one claim ran two bodies: {claims}"
        if claims and max(claims) > attempts:
            yield f"{where}: claim {max(claims)} ran, and the row knows of {attempts}"
        if status == "completed":
            recorded = json.loads(bytes(result))
            if recorded["attempt"] != attempts:
                yield f"{where}: the result is of claim {recorded['attempt']}, the row of claim {attempts}"
            if not any(entry["attempt"] == attempts and entry["key"] == f"{run_id}:{sequence}:{cycle}" for entry in ended):
                yield f"{where} is recorded as completed, and its body never ended"
        elif status in ("failed", "optional_failed") and not given_up:
            yield f"{where} was left between two tries"
    yield from _rollbacks(store, told, {(row[0], row[1]): row[2] for row in steps}, runs)
    yield from _the_rest(store, runs)


def _histories(store: Store) -> Iterator[str]:
    """One outcome per claim that won, one end per run."""
    counted = store.read(
        lambda tx: tx.all(
            "SELECT run_id, type, sequence, attempt, COUNT(*) FROM {flow_events} GROUP BY run_id, type, sequence, attempt"
        )
    )
    ends: dict[str, list[str]] = defaultdict(list)
    for run_id, word, sequence, attempt, count in counted:
        if word in ("action.completed", "compensation.completed", "action.started", "compensation.step_started") and count > 1:
            yield f"{run_id}: {word} {sequence} of claim {attempt} is recorded {count} times"
        if word in ("flow.completed", "flow.failed", "flow.cancelled", "flow.expired"):
            ends[run_id] += [word] * count
        if word == "compensation.started" and count > 1:
            yield f"{run_id}: rolled back {count} times"
    for run_id, words in ends.items():
        if len(words) > 1:
            yield f"{run_id} ended {len(words)} times: {words}"
    for word in ("action.completed", "compensation.completed", "signal.consumed", "child.started"):
        twice = store.read(
            lambda tx, word=word: tx.all(  # type: ignore[misc]
                "SELECT e.run_id, e.sequence, COUNT(*) FROM {flow_events} e LEFT JOIN {action_runs} a ON a.run_id = e.run_id "
                "AND a.sequence = e.sequence WHERE e.type = ? AND COALESCE(a.cycle, 0) = 0 "  # a parked step is signalled each time
                "GROUP BY e.run_id, e.sequence HAVING COUNT(*) > 1",
                (word,),
            )
        )
        for run_id, sequence, count in twice:
            yield f"{run_id}: {word} {sequence} is recorded {count} times"
    after_the_end = store.read(
        lambda tx: tx.all(
            "SELECT e.run_id, e.type, e.sequence FROM {flow_events} e JOIN {flow_events} f ON f.run_id = e.run_id AND f.id < e.id "
            "WHERE f.type IN ('flow.completed', 'flow.failed', 'flow.cancelled', 'flow.expired') AND e.type IN "
            "('action.started', 'action.completed', 'action.failed', 'signal.consumed', 'child.started', 'side_effect.recorded')"
        )
    )
    for run_id, word, sequence in after_the_end:
        yield f"{run_id}: {word} {sequence} after its end"


def _rollbacks(
    store: Store,
    told: dict[tuple[str, int, str], list[dict[str, Any]]],
    steps: dict[tuple[str, int], str],
    runs: dict[str, Any],
) -> Iterator[str]:
    """Every completed step of a run that was rolled back is undone; level after level, none before the one above has ended."""
    undone = store.read(
        lambda tx: tx.all(
            "SELECT run_id, sequence, level, status, attempts, undoes FROM {compensation_runs} ORDER BY run_id, level"
        )
    )
    rows = {(row[0], row[1]): row for row in undone}
    with_undo = store.read(lambda tx: tx.all("SELECT run_id, sequence FROM {action_runs} WHERE comp_actor IS NOT NULL"))
    for run_id, sequence in with_undo:
        _, status, rollback, *_ = runs[run_id]
        if rollback == "done" and steps[run_id, sequence] == "completed" and (run_id, sequence) not in rows:
            yield f"{run_id} step {sequence} completed, the rollback is done, and nobody undid it"
        if status == "completed" and (run_id, sequence) in rows:
            yield f"{run_id} completed, and step {sequence} was undone"
    levels: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for run_id, sequence, level, status, attempts, _ in undone:
        levels[run_id][level].append(sequence)
        ended = told[run_id, sequence, "undo ended"]
        if told[run_id, sequence, "undo"] and steps[run_id, sequence] != "completed":
            yield f"{run_id}: step {sequence} was undone, and it is {steps[run_id, sequence]}"
        if status == "completed" and not any(entry["attempt"] == attempts for entry in ended):
            yield f"{run_id}: the undo of step {sequence} is recorded, and its body never ended"
        if runs[run_id][2] == "done" and status != "completed":
            yield f"{run_id}: the rollback is done, and the undo of step {sequence} is {status}"
    for run_id, by_level in levels.items():
        order = sorted(by_level)
        for above, below in itertools.pairwise(order):
            last = [
                max((entry["at"] for entry in told[run_id, sequence, "undo ended"]), default=0) for sequence in by_level[above]
            ]
            first = [entry["at"] for sequence in by_level[below] for entry in told[run_id, sequence, "undo"]]
            recorded = [
                min((entry["at"] for entry in told[run_id, sequence, "undo ended"]), default=0) for sequence in by_level[above]
            ]
            if first and last and min(first) < max(recorded):
                yield f"{run_id}: an undo of level {below} began before level {above} had ended"


def _the_rest(store: Store, runs: dict[str, Any]) -> Iterator[str]:
    for table in ("waits", "children", "compensation_runs"):
        for run_id, sequence, status in store.read(
            lambda tx, table=table: tx.all(f"SELECT run_id, sequence, status FROM {{{table}}} WHERE ended_at IS NULL")  # type: ignore[misc]
        ):
            if table != "compensation_runs" or runs[run_id][2] == "done":
                yield f"{run_id}: {table} {sequence} was left {status}"
    used = store.read(
        lambda tx: tx.all(
            "SELECT signal_id, COUNT(*) FROM {waits} WHERE signal_id IS NOT NULL GROUP BY signal_id HAVING COUNT(*) > 1"
        )
    )
    for number, count in used:
        yield f"signal {number} answered {count} waits"
    for run_id, sequence, child_id, status, policy in store.read(
        lambda tx: tx.all("SELECT run_id, sequence, child_id, status, close_policy FROM {children}")
    ):
        if child_id not in runs:
            yield f"{run_id}: child {sequence} was never started"
            continue
        ended = runs[child_id][1]
        if status in ("completed", "failed", "expired") and status != ended:
            yield f"{run_id}: child {sequence} is {status} to its parent, and ended {ended}"
        if status == "cancelled" and policy != "abandon" and ended == "completed" and runs[run_id][1] != "completed":
            yield f"{run_id}: child {sequence} was to be closed by its parent, and completed"
