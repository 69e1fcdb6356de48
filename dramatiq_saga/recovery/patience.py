"""How long a sweep waits for the application's code: a workflow function that does not come back must not hold up the other runs.

A pass calls what may run such code on a thread of its own. A call that takes longer than :data:`PATIENCE` is left behind on that thread,
a daemon, and the pass goes on with another; nothing rests on who drives, so what it may still commit one day lands or loses like any
other drive (DRIVE-1). While it is left behind, this process calls no function of that workflow in a sweep again: one thread a workflow is
lost at most, and its runs are for workers, whose messages have time limits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ..engine.core import Engine

T = TypeVar("T")

#: How long one run's call may take, in seconds.
PATIENCE = 60.0

Job = tuple[Callable[[], object], "Future[object]"]


class WorkflowStalledError(Exception):
    """A workflow's function, or something that it waits for, has not come back to a sweep; what the run's row and the journal are told."""

    def __init__(self, workflow: str, seconds: float) -> None:
        super().__init__(
            f"the code of workflow {workflow} did not come back within {seconds:g} seconds of a sweep: let its function do nothing but "
            "ask for steps, and put a timeout on what it waits for outside of them"
        )


_left: WeakKeyDictionary[Engine, dict[str, threading.Thread]] = WeakKeyDictionary()


def stalled(engine: Engine) -> set[str]:
    """The workflows in whose code a thread that a sweep of this process has left behind still is."""
    return {workflow for workflow, thread in list(_left.get(engine, {}).items()) if thread.is_alive()}


class Patience:
    """One pass's calls, one at a time. Without ``seconds`` they are made in the calling thread, however long they take."""

    def __init__(self, engine: Engine, seconds: float | None) -> None:
        self._engine = engine
        self._seconds = seconds
        self._jobs: SimpleQueue[Job | None] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._let_go()

    def call(self, workflow: str, do: Callable[[], T]) -> T:
        """What ``do`` returns or raises. Raises WorkflowStalledError where it takes too long; it may go on nevertheless."""
        if self._seconds is None:
            return do()
        future: Future[object] = Future()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._engine, self._jobs), name="saga-sweep-drives", daemon=True
            )
            self._thread.start()
        self._jobs.put((lambda: copy_context().run(do), future))
        wait([future], timeout=self._seconds)
        if not future.done():
            assert self._thread is not None
            _left.setdefault(self._engine, {})[workflow] = self._thread
            self._let_go()
            raise WorkflowStalledError(workflow, self._seconds)
        return future.result()  # type: ignore[return-value]

    def _let_go(self) -> None:
        """The thread ends as soon as it is back."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = self._thread = None


def _work(engine: Engine, jobs: SimpleQueue[Job | None]) -> None:
    try:
        while (job := jobs.get()) is not None:
            do, future = job
            try:
                future.set_result(do())
            except BaseException as error:
                future.set_exception(error)
            del job, do, future
    finally:
        engine.store.close_thread()
