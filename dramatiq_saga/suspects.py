"""Steps that may have killed a worker run one at a time in a process (RECLAIM-6).

When a process dies, everything that it was at is left without an outcome: the step that has killed it, and its neighbours. All of them come
back at the same moment, and were they taken up together, the killer would take the same neighbours down again, claim after claim, until
they are all given up for its sake. So what has been claimed before without an outcome is a suspect, and a process has one suspect
at a time: another one is put back for a moment, unspent. A neighbour then loses one claim to a killer, and is past it.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .step import Delivery

#: When a suspect comes again that found another one at work, in milliseconds.
AGAIN_MS = 2_000


class Suspects:
    """The one suspect that this process is at, if any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: weakref.ref[Delivery] | None = None

    def enter(self, delivery: Delivery) -> bool:
        """Whether ``delivery`` is the one; it remains so until it is over (an abandoned one, until it is forgotten)."""
        with self._lock:
            inside = self._inside() if self._inside is not None else None
            if inside is not None and inside is not delivery and inside.state in ("new", "claimed"):
                return False
            self._inside = weakref.ref(delivery)
            return True
