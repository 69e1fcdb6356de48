"""The protocol, model-checked: no interleaving of the scenarios breaks an invariant, and none leaves a run without an end.

``DRAMATIQ_SAGA_TEST_THOROUGH`` lets more happen in each of them; ``DRAMATIQ_SAGA_TEST_MODEL_DEPTH`` ends an exploration after so many
moves, where it would take too long to the end. How it works, and what it does not cover: docs/explanation/model.md.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.model.explorer import Explorer, Scenario
from tests.model.scenarios import EVERYBODY_TWICE, SCENARIOS

THOROUGH = bool(os.environ.get("DRAMATIQ_SAGA_TEST_THOROUGH"))
DEPTH = int(os.environ.get("DRAMATIQ_SAGA_TEST_MODEL_DEPTH", "0")) or None

#: How the runs of each scenario can end: that the exploration has come to all of it, and to nothing else.
ENDINGS = {
    "one step": {"completed, none", "failed, none"},
    "one step undone": {"completed, none", "failed, none", "cancelled, none"},
    "undone as unknown": {"completed, none", "cancelled, none", "cancelled, done"},
    "deadline": {"completed, none", "cancelled, none", "failed, none"},
    "everybody": {"completed, none", "cancelled, none", "failed, none"},
    "deadline and undo": {"completed, none", "cancelled, done", "failed, done"},
    "halted rollback": {"cancelled, done", "cancelled, halted"},
    "undo left behind": {"cancelled, done", "cancelled, halted"},
    "block": {"completed, none", "running, none", "pending, none"},
    "block that fails": {"completed, none", "failed, none", "failed, done"},
    "foreign broker": {"completed, none"},
    "no answer": {"completed, none", "failed, none", "cancelled, none"},
    "no answer in a rollback": {"cancelled, done", "cancelled, halted"},
    "kicked": {"completed, none"},
}


@pytest.fixture(autouse=True)
def no_search_for_garbage() -> Iterator[None]:
    """Nothing that is explored is garbage, and there is much of it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.timeout(0 if THOROUGH else 300)
@pytest.mark.parametrize(
    "scenario", (*SCENARIOS, EVERYBODY_TWICE) if THOROUGH else SCENARIOS, ids=lambda scenario: scenario.name
)
def test_no_interleaving_breaks_an_invariant_or_leaves_a_run_without_an_end(scenario: Scenario) -> None:
    """STATUS-1, STATUS-2, CLAIM-1, CLAIM-2, FENCE-1, FENCE-2, DRIVE-1, DRIVE-2, COMP-1, COMP-8, COMP-9, DOCTOR-1, DOCTOR-2, EXPIRE-1, NATIVE-7.

    Where a message was lost the run may be at rest before its end: then the sweep brings it there, as it does from every state.
    """
    with closing(Explorer(scenario.thorough() if THOROUGH else scenario)) as explorer:
        found = explorer.explore(depth=DEPTH)
    print(f"{scenario.name}: {found}")
    if not THOROUGH and DEPTH is None:
        assert set(found.ended) == ENDINGS[scenario.name]
