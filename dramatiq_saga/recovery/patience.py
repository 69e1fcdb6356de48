"""How long a sweep waits for the application's code: a workflow function that does not come back must not hold up the other runs.

A pass calls what may run such code on a thread of its own. A call that takes longer than :data:`PATIENCE` is left behind on that thread,
a daemon, and the pass goes on with another; nothing rests on who drives, so what it may still commit one day lands or loses like any
other drive (DRIVE-1). While it is left behind, this process calls no function of that workflow in a sweep again (``engine/lookout.py``): one
thread a workflow is lost at most, and its runs are for workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ..engine.lookout import HUNG, WorkflowStalledError

if TYPE_CHECKING:
    from ..engine.core import Engine

T = TypeVar("T")

#: How long one run's call may take, in seconds.
PATIENCE = HUNG

Job = tuple[Callable[[], object], "Future[object]"]


class WorkflowBrokeOffError(Exception):
    """A workflow's function has raised what is no error, and would end whoever has called it."""


class Patience:
    """One pass's calls, one at a time. Without ``seconds`` they are made in the calling thread, however long they take."""

    def __init__(self, engine: Engine, seconds: float | None) -> None:
        self._engine = engine
        self._seconds = seconds
        self._jobs: SimpleQueue[Job | None] | None = None

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._let_go()

    def call(self, workflow: str, run_id: str, do: Callable[[], T]) -> T:
        """What ``do`` returns or raises. Raises WorkflowStalledError where it takes too long; it may go on nevertheless."""
        if self._seconds is None:
            return do()
        future: Future[object] = Future()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._engine, self._jobs), name="saga-sweep-drives", daemon=True).start()
        self._jobs.put((partial(copy_context().run, self._watched, workflow, run_id, do), future))
        wait([future], timeout=self._seconds)
        if not future.done():
            self._let_go()
            raise WorkflowStalledError(workflow, self._seconds)
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            # KeyboardInterrupt, for one: nobody has interrupted the sweep, it is the function's own.
            raise WorkflowBrokeOffError(f"the code of workflow {workflow} raised {type(error).__name__}: {error}") from error
        return future.result()  # type: ignore[return-value]

    def _watched(self, workflow: str, run_id: str, do: Callable[[], T]) -> T:
        lookout = self._engine.lookout
        lookout.excuse_this_thread()
        with lookout.call(workflow, run_id, None):
            return do()

    def _let_go(self) -> None:
        """The thread ends as soon as it is back."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


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
