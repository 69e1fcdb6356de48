"""Dramatiq's asynchronous interrupts, kept out of the places where they would do harm (FENCE-5).

``TimeLimit`` and ``ShutdownNotifications`` raise an exception into a worker thread between any two bytecodes. Inside a body that
is their purpose. While a claim or an outcome is written it would turn work that succeeded into a failure, so those parts run
:func:`shielded`: an interrupt that arrives there is caught, the part is carried out (again: each of them can be), and the
interrupt is handed back to the caller, who knows what it means. The database itself is never in an interrupted thread: writes
run in threads of the store's own.

Proven by ``tests/races/test_interrupts.py``, which throws interrupts at every line of these parts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

if TYPE_CHECKING:
    from dramatiq import Broker

T = TypeVar("T")


def disarm(broker: Broker | None) -> None:
    """No interrupt will reach this thread for the message at hand any more, and one that is on its way is taken back."""
    if broker is None:
        return
    ident = threading.get_ident()
    for middleware in broker.middleware:
        if isinstance(middleware, TimeLimit):
            middleware.manager.remove_timeout(ident)
        elif isinstance(middleware, ShutdownNotifications):
            middleware.manager.remove_notification()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)


def shielded(part: Callable[[], T]) -> tuple[T, Interrupt | None]:
    """``part()``'s value, and the last interrupt that arrived meanwhile.

    ``part`` is called again after an interrupt, so it must find what an earlier call of it has done. At most two interrupts
    can arrive per message (a time limit and a shutdown); each level below absorbs one that lands in the other's handler.
    """
    value, outer = _shielded(lambda: _shielded(part))
    return value[0], outer or value[1]


def _shielded(part: Callable[[], T]) -> tuple[T, Interrupt | None]:
    interrupt: Interrupt | None = None
    while True:
        try:
            return part(), interrupt
        except Interrupt as error:
            interrupt = error


class Body:
    """Runs a body once and keeps how it ended, whatever arrives afterwards: a value that was returned stays returned.

    ``broker`` is the one whose interrupts are taken away afterwards; ``None`` in a thread that is not one of its workers.
    """

    def __init__(self, call: Callable[[], object], broker: Broker | None) -> None:
        self._call = call
        self._broker = broker
        self._started = False
        self.returned: list[object] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it; never raises. Afterwards this thread is disarmed."""
        while True:
            try:
                if not self._started:
                    self._started = True
                    try:
                        self.returned.append(self._call())
                    except BaseException as error:
                        self._failed(error)
                disarm(self._broker)
                return
            except Interrupt as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if not self.returned and self.error is None:
            self.error = error
