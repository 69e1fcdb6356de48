"""A worker's look at what its threads are inside of: it acts where a workflow's function does not come back (``engine/lookout.py``).

An outcome that waits for one is recorded, and the run of a drive is held off; both once per call. The store makes sure that neither is
done twice: the thread that is inside may come back at any moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engine import timers
from ..engine.lookout import HUNG, OUTCOME_WAITS, Call, WorkflowStalledError
from .background import Background

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender

#: Seconds between two looks.
INTERVAL = 1.0


class LookoutLoop(Background):
    """One process's look-out."""

    def __init__(self, engine: Engine, sender: Sender) -> None:
        super().__init__(engine, thread_name="saga-lookout")
        self._sender = sender
        self._recorded: set[Call] = set()
        self._held: set[Call] = set()

    def act(self) -> float:
        """Look once."""
        calls = self._engine.lookout.calls()
        for call in calls:
            age = call.age()
            # Who else may be here: the thread that is inside, which comes back just now and writes the same. One of the two lands, and the
            # other finds it there. test_an_outcome_that_is_recorded_while_its_function_comes_back_lands_once
            if call.record is not None and age >= OUTCOME_WAITS and call not in self._recorded:
                call.record()
                self._recorded.add(call)
            if age >= HUNG and not call.excused and call not in self._held:
                timers.hold_off(
                    self._engine, call.run_id, WorkflowStalledError(call.workflow, HUNG), created_at=call.created_at
                )
                self._held.add(call)
        self._recorded.intersection_update(calls)
        self._held.intersection_update(calls)
        return INTERVAL

    def failed(self, error: Exception, failures: int) -> float:
        """The store refuses, or the broker: look again."""
        self._log.warning("not_held_off", error=f"{type(error).__name__}: {error}")
        return INTERVAL
