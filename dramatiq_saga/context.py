"""What travels with a run: tenant, correlation id, trace context (CTX-1).

Captured when a run is sent, stored on its row, and restored around every piece of user code: the workflow function in a drive,
a step's body, a compensation's. Always undone afterwards, in the thread that it was restored in, before anything is recorded.
A hook that fails is an error and never skipped: the call that sends the run raises it, a step's try fails with it, a drive
holds the run. Only an error while *undoing* is logged and goes no further, for the work has been done by then.

Nothing is captured or restored unless the settings or the workflow say so; a run that took nothing along has nothing restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import Token
from typing import TYPE_CHECKING, Any

import structlog

from .codec import decode, encode
from .errors import NotSerializableError

if TYPE_CHECKING:
    from .settings import Settings

#: Stands for "not said": ``None`` is a context like any other.
UNSET: Any = object()

#: A note on what a capturing function has raised.
NOT_CAPTURED = "dramatiq-saga: raised by the function that captures a run's context, so no run was started"

_WHERE = "the run's context"


def captured(settings: Settings, own: Any = UNSET, *, given: Any = UNSET) -> bytes | None:
    """What a run that is sent now takes along, as it is stored; ``None`` where nothing travels.

    ``given`` by the call that sends it comes first, then the workflow's ``own`` (a function without arguments, or a value), then
    what the settings say. Whatever a hook raises is the caller's, and so is what cannot be stored.

    Raises:
      NotSerializableError: the encoder cannot carry it; the error names the path (CODEC-2).
    """
    context = settings.context
    if given is not UNSET:
        return encode(given, _WHERE)
    if own is not UNSET:
        return encode(_called(own) if callable(own) else own, _WHERE)
    if context.capture is not None:
        return encode(_called(context.capture), _WHERE)
    if context.auto:
        bound = _storable(structlog.contextvars.get_contextvars())
        return encode(bound, _WHERE) if bound else None
    return None


def _called(capture: Callable[[], Any]) -> Any:
    try:
        return capture()
    except Exception as error:
        with suppress(Exception):  # an exception class may refuse new attributes
            error.add_note(NOT_CAPTURED)
        raise


def restorer(settings: Settings) -> Callable[[Any], Any] | None:
    """What restores a captured context in this process; ``None`` where restoring is off."""
    context = settings.context
    return context.restore if context.restore is not None or not context.auto else _restore_structlog


class Around:
    """One piece of user code in its run's context: :meth:`enter` before it, :meth:`leave` after it, however it ended."""

    __slots__ = ("_entered", "_returned")

    def __init__(self) -> None:
        self._returned: list[Any] = []  # what the hook returned
        self._entered: list[Any] = []  # something, once that is a context manager and was entered

    def enter(self, restore: Callable[[Any], Any], data: bytes) -> None:
        """Restore what was stored as ``data``. Whatever the hook raises is raised here.

        Who else may be here: a time limit or a shutdown, which interrupt between any two lines. What was restored has to be known
        by then, so the hook is called, and its word kept, by one call from C. test_an_interrupt_anywhere_leaves_no_context_behind

        Raises:
          TypeError: the hook returned something that does not say how it is undone.
        """
        self._returned.extend(map(restore, (decode(data),)))
        if not self._returned:
            raise RuntimeError("context.restore raised StopIteration")
        (returned,) = self._returned
        if _is_manager(returned):
            self._entered.extend(map(type(returned).__enter__, (returned,)))
        elif not (returned is None or isinstance(returned, Token) or callable(returned)):
            self._returned.clear()
            hint = ": decorate it with contextlib.contextmanager" if hasattr(returned, "send") else ""
            raise TypeError(
                f"context.restore returned {type(returned).__name__}, which does not say how it is undone{hint}; return a context "
                "manager, a function without arguments, the token of ContextVar.set(), or None"
            )

    def leave(self, error: BaseException | None, *, logger: str | None, run_id: str) -> None:
        """Undo it; nothing where it never was restored. ``error`` is what the piece ended with, for context managers to see.

        Doing it again does no harm: an interrupt may have cut it short. An error of the undoing is logged as
        ``context_not_undone``.
        """
        if not self._returned:
            return
        (returned,) = self._returned
        try:
            if _is_manager(returned):
                if self._entered:
                    kind = None if error is None else type(error)
                    type(returned).__exit__(returned, kind, error, None if error is None else error.__traceback__)
            elif isinstance(returned, Token):
                with suppress(RuntimeError):  # it has been reset already, and an interrupt came right after that
                    returned.var.reset(returned)
            elif returned is not None:
                returned()
        except Exception as fault:
            structlog.get_logger(logger or "dramatiq_saga").error("context_not_undone", run_id=run_id, exc_info=fault)
        self._returned.clear()
        self._entered.clear()


def _is_manager(returned: Any) -> bool:
    """Asked first: contextlib makes its managers callable too."""
    kind = type(returned)
    return not isinstance(returned, Token) and hasattr(kind, "__enter__") and hasattr(kind, "__exit__")


# --- context.auto ----------------------------------------------------------------------------------------------------


def _storable(bound: Mapping[str, Any]) -> dict[str, Any]:
    """structlog's variables, each as the encoder carries it, or else as text: they are for log lines, and must not fail a call."""
    storable: dict[str, Any] = {}
    for name, value in bound.items():
        try:
            encode(value, name)
        except NotSerializableError:
            value = repr(value)
        storable[name] = value
    return storable


def _restore_structlog(bound: dict[str, Any]) -> Callable[[], None]:
    tokens = structlog.contextvars.bind_contextvars(**bound)
    return lambda: structlog.contextvars.reset_contextvars(**tokens)
