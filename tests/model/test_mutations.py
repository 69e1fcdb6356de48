"""The model can fail: with one condition of one statement taken away on purpose, it finds a way to break an invariant.

Each mutation leaves the statement as it is but for one condition, which is made always true. The exploration is the one that the whole
protocol passes, or a smaller one, and stops at the first offence; that is the shortest way there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

from dramatiq_saga.engine import blocks, claim, decision, fence, rollback, timers, undoing
from dramatiq_saga.recovery import doctor
from tests.model.explorer import Explorer, Scenario, Violation
from tests.model.scenarios import BY_NAME


@dataclass(frozen=True)
class Mutation:
    """One condition that is taken away, where the model is to look, and what it is to find."""

    what: str
    module: ModuleType
    statement: str
    condition: str
    instead: str
    scenario: str
    finds: str
    budgets: tuple[tuple[str, int], ...] = ()

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = getattr(self.module, self.statement)
        assert self.condition in text
        monkeypatch.setattr(self.module, self.statement, text.replace(self.condition, self.instead))

    @property
    def where(self) -> Scenario:
        scenario = BY_NAME[self.scenario]
        return replace(scenario, budgets=dict(self.budgets), workers=2) if self.budgets else scenario


MUTATIONS = [
    Mutation(
        "the fence without the claim's token", fence, "_COMPLETE", "AND attempts = ?", "AND ? > 0", "one step",
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
        "AND status = ? AND attempts = ? AND cycle = ? AND ended_at IS NULL", "AND ? <> '' AND ? >= 0 AND ? >= 0", "deadline", "?",
    ),
    Mutation(
        "the decision without revision and wakes", decision, "_ADVANCE", "AND revision = ? AND wakes = ?", "AND ? >= 0 AND ? >= 0",
        "kicked", "?",
    ),
    Mutation(
        "a rollback that leaves running steps alone", decision, "_SETTLE_LIVE", "'running', ", "", "one step undone",
        "the run is cancelled, and step 1 is running",
    ),
    Mutation(
        "the plan without revision and wakes", rollback, "_ENTER", "AND revision = ? AND wakes = ?", "AND ? >= 0 AND ? >= 0",
        "deadline and undo", "?",
    ),
    Mutation(
        "the fence of an undo without the claim's token", undoing, "_COMPLETE", "AND attempts = ?", "AND ? > 0", "halted rollback", "?",
        (("doubled", 1), ("later", 1)),
    ),
    Mutation(
        "an undo that does not wait for its step", claim, "_CLAIM_COMPENSATION_IN_TURN", "not_before <= ?", "? > 0",
        "undone as unknown", "?",
    ),
    Mutation(
        "a block that never sees its last outcome", blocks, "_ANOTHER_AT_WORK", "sequence <> ?", "(TRUE OR ? = 0)", "block that fails", "?",
    ),
    Mutation(
        "a doctor that does not see unseen wakes", doctor, "_UNSEEN", "r.wakes > r.wakes_seen", "FALSE", "one step", "?",
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_condition_that_is_taken_away_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLAIM-1, FENCE-1, FENCE-2, DRIVE-1, STATUS-2, EXPIRE-1, COMP-1, COMP-8."""
    mutation.apply(monkeypatch)
    with pytest.raises(Violation) as found:
        Explorer(mutation.where).explore()
    print(found.value)
    assert found.value.what == mutation.finds
