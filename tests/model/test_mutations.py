"""The model can fail: with one condition of one statement taken away on purpose, it finds a way to break an invariant.

Each mutation leaves the statement as it is but for one condition, which is made always true. The exploration is the one that the whole
protocol passes, or a smaller one, and stops at the first offence; that is the shortest way there is.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

from dramatiq_saga.engine import blocks, claim, decision, drive, fence, rollback, timers, undoing
from dramatiq_saga.recovery import doctor
from tests.model.explorer import Explorer, Scenario, Violation
from tests.model.scenarios import BY_NAME


@dataclass(frozen=True)
class Mutation:
    """One condition that is taken away, where the model is to look, and what it is to find. It may stand in several statements."""

    what: str
    module: ModuleType
    statement: str
    condition: str
    instead: str
    scenario: str
    finds: str
    budgets: tuple[tuple[str, int], ...] = ()

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for statement in self.statement.split():
            text = getattr(self.module, statement)
            assert self.condition in text
            monkeypatch.setattr(self.module, statement, text.replace(self.condition, self.instead))

    @property
    def where(self) -> Scenario:
        scenario = BY_NAME[self.scenario]
        return replace(scenario, budgets=dict(self.budgets), workers=2) if self.budgets else scenario


MUTATIONS = [
    Mutation(
        "the fence without the claim's token", fence, "_COMPLETE", "AND attempts = ? AND delivery = ?", "AND ? > 0 AND ? <> ''",
        "one step",
        "step 1 was running by claim 2, and claim 1 of step 1 has made it completed",
    ),
    Mutation(
        "the fence without the status", fence, "_COMPLETE", "AND status = 'running'", "", "one step undone",
        "step 1 was cancelled by claim 1, and is completed by claim 1",
    ),
    Mutation(
        "the claim without the status", claim, "_CLAIM_STEP_RETURNING", "status = 'pending'", "TRUE", "one step",
        "step 1 is claimed, and was running",
    ),
    Mutation(
        "the deadline without the status and the claim that it has seen", timers, "_EXPIRE_RUNNING",
        "AND status = ? AND attempts = ? AND cycle = ? AND ended_at IS NULL", "AND ? <> '' AND ? >= 0 AND ? >= 0", "deadline",
        "step 1 was completed by claim 1, and is expired by claim 1",
    ),
    Mutation(
        "the decision without revision and wakes", decision, "_ADVANCE", "AND revision = ? AND wakes = ?",
        "AND ? >= 0 AND ? >= 0",
        "kicked", "the run's wakes went from 4 to 3",
    ),
    Mutation(
        "a rollback that leaves running steps alone", decision, "_SETTLE_LIVE", "'running', ", "", "one step undone",
        "the run is cancelled, and step 1 is running",
    ),
    Mutation(
        "the plan without revision and wakes", rollback, "_ENTER", "AND revision = ? AND wakes = ?", "AND ? >= 0 AND ? >= 0",
        "deadline and undo", "the run's wakes went from 3 to 2",
    ),
    Mutation(
        "the fence of an undo without the claim's token", undoing, "_COMPLETE", "AND attempts = ? AND delivery = ?",
        "AND ? > 0 AND ? <> ''", "halted rollback",
        "undo 2 was running by claim 2, and claim 1 of compensation 2 has made it completed",
        (("doubled", 1), ("later", 1)),
    ),
    Mutation(
        "an undo that any claim of its step lets go", undoing, "_IS_FENCED _BODY_IS_OVER", "AND attempts = ? AND delivery = ?",
        "AND ? > 0 AND ? <> ''", "undone as unknown",
        "the undo of step 1 begins while its body is at work",
        (("doubled", 1), ("later", 1), ("compensate", 1)),
    ),
    Mutation(
        "a block that never sees its last outcome", blocks, "_ANOTHER_AT_WORK", "sequence <> ?", "(TRUE OR ? = 0)", "block that fails",
        "after 12 sweeps and a worker for all that they sent the run is running",
    ),
    Mutation(
        "a doctor that does not see unseen wakes", doctor, "_UNSEEN", "r.wakes > r.wakes_seen", "FALSE", "one step",
        "after 12 sweeps and a worker for all that they sent the run is pending",
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_condition_that_is_taken_away_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLAIM-1, FENCE-1, FENCE-2, DRIVE-1, STATUS-2, EXPIRE-1, COMP-9, PAR-2, DOCTOR-1."""
    mutation.apply(monkeypatch)
    assert explore(mutation.where).what == mutation.finds


def test_a_message_that_is_never_sent_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DRIVE-3: where nothing has been lost, a run does not have to wait for the sweep."""
    monkeypatch.setattr(drive, "messages", lambda *_, **__: [])
    assert explore(BY_NAME["one step"]).what == "nothing is on its way, and the run is running"


def test_what_was_found_is_told_as_the_shortest_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """FENCE-1: somebody who reads it can play it by hand."""
    MUTATIONS[0].apply(monkeypatch)
    told = explore(BY_NAME["one step"]).trace
    assert len(told) == 7
    assert told[2].startswith("a worker is given step 1#0, and will be given it again [step 1: status pending -> running")
    assert told[3:6] == [
        "the worker with step 1#0/0: charge succeeds",
        "it becomes later: every window that was open has passed",
        "a worker is given step 1#0 [step 1: attempts 1 -> 2]",
    ]
    assert told[6].endswith("step 1: status running -> completed]")


def explore(scenario: Scenario) -> Violation:
    """What an exploration finds."""
    with closing(Explorer(scenario)) as explorer, pytest.raises(Violation) as found:
        explorer.explore()
    print(found.value)
    return found.value
