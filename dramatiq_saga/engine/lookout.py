"""Who is inside a workflow's function, and since when: such a function is the application's, and nothing makes it come back.

Every call of one is entered here while it lasts. What follows from one that lasts is done by a thread that looks every second
(``recovery/lookout_loop.py``), by the workers and by the sweeps:

* an outcome that waits for its decision is recorded by itself (:data:`OUTCOME_WAITS`): no work that is done is lost to what follows it;
* the run of a drive is held off (:data:`HUNG`), so that nobody sends another thread after this one;
* what would call the same workflow's functions in this process meanwhile goes back to its queue (:meth:`Lookout.busy`): one that hangs
  costs a process one thread, and not all of them.

Nothing rests on it. A call that comes back late commits what it has found, or loses, like any other (DRIVE-1).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

#: For so long an outcome waits for the decision that follows it, in seconds.
OUTCOME_WAITS = 5.0

#: From then on a call does not count as slow but as hanging, in seconds.
HUNG = 60.0


class WorkflowStalledError(Exception):
    """A workflow's function, or something that it waits for, has not come back; what the run's row and the journal are told."""

    def __init__(self, workflow: str, seconds: float) -> None:
        super().__init__(
            f"the code of workflow {workflow} did not come back within {seconds:.3g} seconds: let its function do nothing but ask for "
            "steps, and put a timeout on what it waits for outside of them"
        )


@dataclass(eq=False, slots=True)
class Call:
    """One call of a workflow's function. ``record``: what is to be done once an outcome has waited long enough for it."""

    workflow: str
    run_id: str
    created_at: int | None  # of the run
    record: Callable[[], None] | None = None
    excused: bool = False  # somebody else sees to its run
    began: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)

    def age(self) -> float:
        """For how long it lasts, in seconds."""
        return time.monotonic() - self.began


class Lookout:
    """The calls of one process."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._cut_short: dict[str, int] = {}
        self._here = threading.local()

    @contextmanager
    def call(
        self, workflow: str, run_id: str, created_at: int | None, *, record: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """While this lasts, the calling thread is inside a function of ``workflow``."""
        call = Call(workflow, run_id, created_at, record, getattr(self._here, "excused", False))
        self._calls[id(call)] = call
        try:
            yield
            if self._cut_short:
                self._cut_short.pop(run_id, None)
        finally:
            del self._calls[id(call)]
            self._here.lasted = call.age()

    def cut_short(self, run_id: str) -> int:
        """A time limit has ended the last call for a run: how many in succession, as far as this process knows."""
        if len(self._cut_short) > 4096:
            self._cut_short.clear()
        times = self._cut_short[run_id] = self._cut_short.get(run_id, 0) + 1
        return times

    def begin(self) -> None:
        """The calling thread has been inside of nothing yet."""
        self._here.lasted = 0.0

    def lasted(self) -> float:
        """For how long its last call since then has lasted, in seconds."""
        return getattr(self._here, "lasted", 0.0)

    def excuse_this_thread(self) -> None:
        """What the calling thread calls is held off by somebody who waits for it."""
        self._here.excused = True

    def calls(self) -> list[Call]:
        """Those that last."""
        return list(self._calls.values())

    def busy(self) -> set[str]:
        """The workflows of which a call of another thread's lasts for longer than an outcome waits."""
        if not self._calls:
            return set()
        here = threading.get_ident()
        return {call.workflow for call in self.calls() if call.thread != here and call.age() >= OUTCOME_WAITS}
