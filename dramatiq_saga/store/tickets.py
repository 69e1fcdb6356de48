"""What a caller holds while an engine thread works for it.

A ticket is filled in by exactly one engine thread and read by the caller. It waits on a bare lock: an asynchronous
exception (a time limit, a shutdown) reaches the waiting thread only after the outcome is known, and whoever was interrupted
all the same can still read the ticket, or withdraw it. An outcome is never lost with the exception of its reader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ..errors import WriteRefusedError

if TYPE_CHECKING:
    from .transactions import Tx

T = TypeVar("T")

logger = logging.getLogger("dramatiq_saga")


class Ticket(Generic[T]):
    """The outcome to come of one operation. An ``urgent`` one never waits behind those that are not (``servers.py``)."""

    __slots__ = (
        "_callbacks",
        "_chance",
        "_done",
        "_error",
        "_value",
        "_woken",
        "control",
        "executed",
        "operation",
        "produced",
        "read",
        "urgent",
    )

    def __init__(
        self, operation: Callable[[Tx], T], *, control: Callable[[], T] | None = None, read: bool = False, urgent: bool = False
    ) -> None:
        self.operation = operation
        self.control = control
        self.read = read
        self.urgent = urgent
        self.executed = False
        self.produced: tuple[Any, list[Callable[[], None]] | None] = (None, None)
        # One token, taken by the engine thread to start or by the caller to withdraw: list.pop() is atomic, so exactly
        # one of them gets it (test_withdrawn_operation_is_never_executed).
        self._chance: list[None] = [None]
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] | None = None
        self._woken = Lock()
        self._woken.acquire()

    # --- the caller's side -------------------------------------------------------------------------------------------

    def result(self) -> T:
        """Wait for the outcome and return it, or raise the operation's error; may be called again.

        What the operation registered with ``tx.after_commit`` runs here, once, in the calling thread.
        """
        if not self._done:
            self._woken.acquire()
            self._woken.release()
        if self._callbacks:
            run_callbacks(self._callbacks)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self = None  # type: ignore[assignment]  # no cycle through the traceback: it would keep the caller's locals
        return cast("T", self._value)

    def cancel(self) -> bool:
        """Withdraw the operation. True is proof that it has not been executed and never will be."""
        try:
            self._chance.pop()
        except IndexError:
            return False
        self.fail(WriteRefusedError("the operation was withdrawn before it started", "begin"))
        return True

    def end(self) -> None:
        """Return once nothing will come of it any more: it is done, or it has been withdrawn."""
        if not self._done and not self.cancel():
            self._woken.acquire()
            self._woken.release()

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._done

    # --- the engine thread's side ------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Whether the operation may run: false once the caller has withdrawn it."""
        try:
            self._chance.pop()
        except IndexError:
            return False
        return True

    def finish(self, value: T, callbacks: list[Callable[[], None]] | None = None) -> None:
        """The operation has committed."""
        self._value = value
        self._callbacks = callbacks
        self._done = True
        self._woken.release()

    def fail(self, error: BaseException) -> None:
        """The operation has not committed, or nobody knows."""
        self._error = error
        self._done = True
        self._woken.release()


def run_callbacks(callbacks: list[Callable[[], None]]) -> None:
    """Call and drop each in order. An exception is logged and goes no further (EVENT-2); an interrupt leaves the rest."""
    while callbacks:
        callback = callbacks.pop(0)
        try:
            callback()
        except Exception:
            logger.exception("a callback failed after its transaction had committed; the transaction stands")
