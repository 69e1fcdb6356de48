"""What must hold: in every state, over every step, and where nothing is on its way any more.

Each function returns what is wrong, in words, or ``None``. They look at rows alone; who has written them is an argument where it
matters. The rules that they are instances of stand in their docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.model.facts import Facts, Row

#: A step or undo that somebody has claimed, as the claim says: step or compensation, sequence, attempts.
Claim = tuple[str, int, int]

SETTLED = frozenset({"completed", "optional_failed", "expired", "cancelled"})
OUTCOMES = frozenset({"completed", "failed", "optional_failed"})

Offences = Iterator[str]


def is_settled(row: Row) -> bool:
    """Nothing will run this again."""
    return row["status"] in SETTLED or (row["status"] == "failed" and bool(row["given_up"]))


# --- in every state --------------------------------------------------------------------------------------------------


def what_has_ended_holds_nothing(now: Facts) -> Offences:
    """STATUS-2: a run that has ended, or is rolled back, holds no step that could still run, no open wait and no open block."""
    if now.is_live:
        return
    for sequence, row in now.steps.items():
        if not is_settled(row):
            yield f"the run is {now.run['status']}, and step {sequence} is {row['status']}"
    for sequence, row in (*now.waits.items(), *now.blocks.items()):
        if row["ended_at"] is None:
            yield f"the run is {now.run['status']}, and what waits at {sequence} is open"


def a_completed_run_has_completed_its_steps(now: Facts) -> Offences:
    """DRIVE-4, DRIVE-5: the function returned, so every step that it waited for has an outcome that it was given."""
    if now.run["status"] == "completed":
        for sequence, row in now.steps.items():
            if row["status"] != "completed":
                yield f"the run has completed, and step {sequence} is {row['status']}"


def what_was_done_is_undone(now: Facts) -> Offences:
    """COMP-1, COMP-4: a rollback's plan has every completed step that can be undone, and is done when each of them was."""
    run = now.run
    given_back = run["status"] in ("failed", "expired", "rolling_back") or run["reason"] == "undo"
    if not given_back or now.is_live:
        return
    for sequence, row in now.steps.items():
        if row["status"] == "completed" and row["comp_actor"] is not None and sequence not in now.undos:
            yield f"the run is {run['status']}, and nothing undoes step {sequence}, which has completed"
    for sequence, row in now.undos.items():
        passed_over = row["given_up"] and row["policy"] == "continue"
        if run["rollback"] == "done" and row["status"] != "completed" and not passed_over:
            yield f"the rollback is done, and the undo of step {sequence} is {row['status']}"


def undos_go_level_by_level(now: Facts) -> Offences:
    """COMP-1: no undo begins before those of later steps are over."""
    for sequence, row in now.undos.items():
        if row["status"] in ("running", "completed"):
            for other, above in now.undos.items():
                if above["level"] < row["level"] and not (above["status"] == "completed" or above["given_up"]):
                    yield f"the undo of step {sequence} is {row['status']} before that of step {other}, which is {above['status']}"


def nothing_is_held(now: Facts) -> Offences:
    """HISTORY-1: the code of a model fits its history, so a run that is held has met a fault of the engine."""
    if now.run["hold_error"] is not None:
        yield f"the run is held: {now.run['hold_error'][:300]}"


def what_nobody_has_seen_can_be_found(now: Facts) -> Offences:
    """DRIVE-2, DOCTOR-1: a wake that no drive has seen says since when, so that R2 finds it."""
    if now.is_live and now.run["wakes"] > now.run["wakes_seen"] and now.run["woken_at"] is None:
        yield "a wake is unseen, and nothing says since when"


STATES: tuple[Callable[[Facts], Offences], ...] = (
    what_has_ended_holds_nothing,
    a_completed_run_has_completed_its_steps,
    what_was_done_is_undone,
    undos_go_level_by_level,
    nothing_is_held,
    what_nobody_has_seen_can_be_found,
)


# --- over every step -------------------------------------------------------------------------------------------------


def an_end_is_an_end(before: Facts, after: Facts, claim: Claim | None, now: int) -> Offences:
    """STATUS-1, COMP-8: a terminal status is never left, a rollback ends as it was to end, and what is counted only grows."""
    old, new = before.run, after.run
    if old["ended_at"] is not None and (new["status"], new["result"], new["error"]) != (
        old["status"],
        old["result"],
        old["error"],
    ):
        yield f"the run had ended as {old['status']}, and is {new['status']}"
    if old["status"] == "rolling_back" and new["status"] not in ("rolling_back", old["ends_as"]):
        yield f"the run was rolling back to end as {old['ends_as']}, and is {new['status']}"
    if old["rollback"] == "done" and new["rollback"] != "done":
        yield f"the rollback was done, and is {new['rollback']}"
    for column in ("revision", "wakes", "wakes_seen"):
        if new[column] < old[column]:
            yield f"the run's {column} went from {old[column]} to {new[column]}"


def a_recorded_outcome_stands(before: Facts, after: Facts, claim: Claim | None, now: int) -> Offences:
    """FENCE-2: neither an outcome, nor what came with it, is ever written over; only a resumed rollback tries again what had failed."""
    kept = ("status", "attempts", "result", "error", "given_up")
    for sequence, old in before.steps.items():
        new = after.steps[sequence]
        if is_settled(old) and any(old[column] != new[column] for column in kept):
            yield f"step {sequence} was {old['status']} by claim {old['attempts']}, and is {new['status']} by claim {new['attempts']}"
    resumed = before.run["rollback"] == "halted" and after.run["rollback"] != "halted"
    for sequence, old in before.undos.items():
        new = after.undos[sequence]
        over = old["status"] == "completed" or (old["status"] == "failed" and old["given_up"] and not resumed)
        if over and any(old[column] != new[column] for column in ("status", "attempts", "given_up")):
            yield (
                f"the undo of step {sequence} was {old['status']} by claim {old['attempts']}, "
                f"and is {new['status']} by claim {new['attempts']}"
            )


def a_claim_takes_what_may_be_claimed(before: Facts, after: Facts, claim: Claim | None, now: int) -> Offences:
    """CLAIM-1: no step begins but in a live run, no undo but in a rollback, and nobody is robbed of a claim that is not stale."""
    for name, sequence, old, new in _rows(before, after):
        if new["attempts"] == old["attempts"] or new["status"] != "running":
            continue
        if name == "step" and not before.is_live:
            yield f"step {sequence} begins in a run that is {before.run['status']}"
        if name == "undo" and before.run["rollback"] != "running":
            yield f"the undo of step {sequence} begins while the rollback is {before.run['rollback']}"
        stale = old["reclaim_stale_at"] is not None and old["reclaim_stale_at"] <= now
        free = old["status"] == "pending" or (old["status"] == "failed" and not old["given_up"])
        if not free and not (old["status"] == "running" and stale):
            yield f"{name} {sequence} is claimed, and was {old['status']}"
        if new["attempts"] != old["attempts"] + 1:
            yield f"{name} {sequence} is claimed, and its attempts went from {old['attempts']} to {new['attempts']}"
        if name == "step" and old["expires_at"] is not None and old["expires_at"] <= now:
            yield f"step {sequence} begins after its deadline"


def an_outcome_is_that_of_the_claim(before: Facts, after: Facts, claim: Claim | None, now: int) -> Offences:
    """FENCE-1: what a running row becomes, its own claim has reported, unless its deadline has passed or its run has ended."""
    for name, sequence, old, new in _rows(before, after):
        if old["status"] != "running" or new["status"] == "running":
            continue
        own = claim == ("step" if name == "step" else "compensation", sequence, old["attempts"])
        if new["status"] in (*OUTCOMES, "pending") and not own:
            if name == "undo" and before.run["rollback"] == "halted" and after.run["rollback"] == "running":
                continue  # a resume takes it from whoever had it (COMP-8)
            yield f"{name} {sequence} was running by claim {old['attempts']}, and {_by(claim)} has made it {new['status']}"
        if new["status"] == "expired" and (old["expires_at"] is None or old["expires_at"] > now):
            yield f"step {sequence} has expired before its deadline"
        if new["status"] == "cancelled" and after.is_live:
            yield f"step {sequence} was running, and is cancelled in a live run"


def nothing_begins_in_a_rollback(before: Facts, after: Facts, claim: Claim | None, now: int) -> Offences:
    """STATUS: under ``rolling_back``, and after an end, no step is added."""
    if not before.is_live and len(after.steps) > len(before.steps):
        yield f"a step was added to a run that is {before.run['status']}"


Over = Callable[[Facts, Facts, Claim | None, int], Offences]

STEPS: tuple[Over, ...] = (
    an_end_is_an_end,
    a_recorded_outcome_stands,
    a_claim_takes_what_may_be_claimed,
    an_outcome_is_that_of_the_claim,
    nothing_begins_in_a_rollback,
)


def _rows(before: Facts, after: Facts) -> Iterator[tuple[str, int, Row, Row]]:
    for name, old, new in (("step", before.steps, after.steps), ("undo", before.undos, after.undos)):
        for sequence, row in old.items():
            yield name, sequence, row, new[sequence]


def _by(claim: Claim | None) -> str:
    return "somebody without a claim" if claim is None else f"claim {claim[2]} of {claim[0]} {claim[1]}"


# --- where two things must not happen at once --------------------------------------------------------------------------


def no_undo_runs_into_its_step(before: Facts, after: Facts, bodies: list[Claim], now: int) -> Offences:
    """COMP-9: an undo of a step that nobody knows the end of begins after its body has reported, or its claim has gone stale."""
    for sequence, row in after.undos.items():
        if row["status"] != "running" or before.undos[sequence]["status"] == "running" or row["undoes"] != "unknown":
            continue
        step = after.steps[sequence]
        stale = step["reclaim_stale_at"] is not None and step["reclaim_stale_at"] <= now
        if ("step", sequence, step["attempts"]) in bodies and not stale:
            yield f"the undo of step {sequence} begins while its body is at work"


def first(offences: Any) -> str | None:
    """The first offence of several functions' worth, if there is one."""
    return next(iter(offences), None)
