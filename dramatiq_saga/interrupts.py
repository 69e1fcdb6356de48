"""Dramatiq's asynchronous interrupts, kept out of the places where they would do harm (FENCE-5).

``TimeLimit`` and ``ShutdownNotifications`` raise an exception into a worker thread between any two bytecodes. Inside a body that
is their purpose. While a claim or an outcome is written it would turn work that succeeded into a failure, so those parts run
:func:`shielded`: an interrupt that arrives there is caught and noted, and the part is carried out again: each of them finds
what it has done already. The database itself is never in an interrupted thread: writes
run in threads of the store's own.

Proven by ``tests/races/test_interrupts.py``, which throws interrupts at every line of these parts.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

if TYPE_CHECKING:
    from dramatiq import Broker

T = TypeVar("T")


class _Drained(BaseException):
    """Takes the place of an interrupt that is on its way, and is caught at once."""


def disarm(broker: Broker | None) -> None:
    """No interrupt will reach this thread for the message at hand any more, and one that is on its way is taken back.

    A time limit that had not run out is simply removed. Only where one had, or a shutdown notice was asked for, may an interrupt
    be on its way; it is replaced by one of ours, which is waited for. (Taking it back with a null exception would leave the
    interpreter looking for it at every call of every thread.)
    """
    if broker is None:
        return
    ident = threading.get_ident()
    on_its_way = False
    for middleware in broker.middleware:
        if isinstance(middleware, TimeLimit):
            deadlines = getattr(middleware.manager, "deadlines", {})
            on_its_way = on_its_way or (ident in deadlines and deadlines[ident] is None)
            middleware.manager.remove_timeout(ident)  # type: ignore[no-untyped-call]
        elif isinstance(middleware, ShutdownNotifications):
            on_its_way = on_its_way or ident in getattr(middleware.manager, "notifications", ())
            middleware.manager.remove_notification()
    if on_its_way:
        _drain(ident)


def _drain(ident: int) -> None:
    """Who else may be here: the thread that raises interrupts, between noting that it will and doing it. An interrupt that it
    raises after this one is absorbed by the shield around the caller."""
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Drained))
        while True:
            time.sleep(0)
    except _Drained:
        return


def shielded(part: Callable[[], T], arrived: list[Interrupt]) -> T:
    """``part()``'s value; what has interrupted it meanwhile is appended to ``arrived``.

    ``part`` is called again after an interrupt, so it must find what an earlier call of it has done. At most two interrupts
    can arrive per message (a time limit and a shutdown); each level below absorbs one that lands in the other's handler.
    """
    return _shielded(lambda: _shielded(part, arrived), arrived)


def _shielded(part: Callable[[], T], arrived: list[Interrupt]) -> T:
    while True:
        try:
            return part()
        except Interrupt as error:
            arrived.append(error)


class Body:
    """Runs a body once and keeps how it ended, whatever arrives afterwards: a value that was returned stays returned.

    ``broker`` is the one whose interrupts are taken away afterwards; ``None`` in a thread that is not one of its workers.
    """

    def __init__(self, call: Callable[[list[object]], None], broker: Broker | None) -> None:
        self._call = call
        self._broker = broker
        self.started = False
        self.returned: list[object] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it, unless that has been done. Afterwards this thread is disarmed.

        ``call`` appends what the body returned to the list that it is given, so that no interrupt can come between the two.
        """
        while True:
            try:
                if not self.started:
                    self.started = True
                    try:
                        self._call(self.returned)
                    except BaseException as error:
                        if not self.returned:
                            self.error = error
                disarm(self._broker)
                return
            except Interrupt as error:
                if not self.returned and self.error is None:
                    self.error = error
