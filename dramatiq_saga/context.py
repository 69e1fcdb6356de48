"""What travels with a run: tenant, correlation id, trace context (CTX-1).

Captured when a run is sent, stored on its row, and restored around every piece of user code: the workflow function in a drive,
a step's body, a compensation's. Always undone afterwards, in the thread that it was restored in, before anything is recorded.
A hook that fails is an error and never skipped: the call that sends the run raises it, a step's try fails with it, a drive
holds the run. Only an error while *undoing* is logged and goes no further, for the work has been done by then.

Nothing is captured or restored unless the settings or the workflow say so; a run that took nothing along has nothing restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Token
from typing import TYPE_CHECKING, Any

import structlog

from .codec import decode, encode
from .errors import NotSerializableError

if TYPE_CHECKING:
    from .settings import Settings

#: Stands for "not said": ``None`` is a context like any other.
UNSET: Any = object()

_WHERE = "the run's context"


def captured(settings: Settings, own: Any = UNSET) -> bytes | None:
    """What a run that is sent now takes along, as it is stored; ``None`` where nothing travels.

    ``own`` is the workflow's: a function without arguments, or a value. It stands in for what the settings say. Whatever the
    hook raises is the caller's, and so is what cannot be stored.

    Raises:
      NotSerializableError: the encoder cannot carry it; the error names the path (CODEC-2).
    """
    context = settings.context
    if own is not UNSET:
        return encode(own() if callable(own) else own, _WHERE)
    if context.capture is not None:
        return encode(context.capture(), _WHERE)
    if context.auto:
        bound = _storable(structlog.contextvars.get_contextvars())
        return encode(bound, _WHERE) if bound else None
    return None


def restorer(settings: Settings) -> Callable[[Any], Any] | None:
    """What restores a captured context in this process; ``None`` where restoring is off."""
    context = settings.context
    return context.restore if context.restore is not None or not context.auto else _restore_structlog


class Around:
    """One piece of user code in its run's context: :meth:`enter` before it, :meth:`leave` after it, however it ended."""

    __slots__ = ("_undo",)

    def __init__(self) -> None:
        self._undo: Callable[[BaseException | None], object] | None = None

    def enter(self, restore: Callable[[Any], Any], data: bytes) -> None:
        """Restore what was stored as ``data``. Whatever the hook raises is raised here.

        Raises:
          TypeError: the hook returned something that does not say how it is undone.
        """
        self._undo = _undo_of(restore(decode(data)))

    def leave(self, error: BaseException | None, *, logger: str | None, run_id: str) -> None:
        """Undo it; nothing where it never was restored. ``error`` is what the piece ended with, for context managers to see.

        Doing it again does no harm: an interrupt may have cut it short. An error of the undoing is logged as
        ``context_not_undone``.
        """
        undo = self._undo
        if undo is None:
            return
        try:
            undo(error)
        except Exception as fault:
            log = structlog.get_logger(logger or "dramatiq_saga")
            log.error("context_not_undone", run_id=run_id, exc_info=fault)
        self._undo = None


def _undo_of(returned: Any) -> Callable[[BaseException | None], object] | None:
    """How what a ``restore`` hook has returned is undone; a context manager is entered here."""
    if returned is None:
        return None
    if isinstance(returned, Token):
        return lambda _: returned.var.reset(returned)
    kind = type(returned)
    if hasattr(kind, "__enter__") and hasattr(kind, "__exit__"):  # before callables: contextlib makes one of both
        returned.__enter__()
        return lambda error: returned.__exit__(None if error is None else type(error), error, error and error.__traceback__)
    if callable(returned):
        return lambda _: returned()
    hint = ": decorate it with contextlib.contextmanager" if hasattr(kind, "send") else ""
    raise TypeError(
        f"context.restore returned {kind.__name__}, which does not say how it is undone{hint}; return a context manager, "
        "a function without arguments, the token of ContextVar.set(), or None"
    )


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
