"""Steps that may have killed a worker, and who may be at work beside them in a process (RECLAIM-6).

When a process dies, everything that it was at is left without an outcome: what has killed it, if anything has, and its neighbours. All
of them come back at the same moment. Most deaths are nobody's doing (a deployment, the machine, its power), so after the first one all
are taken up together. After the second one they are not: were they, a killer would take the same neighbours down claim after
claim, until they are all given up for its sake. What has been claimed twice without an outcome, or may be claimed no more after this, is
alone among the suspects of its process, and others are put back for a moment, unspent. A neighbour then loses two claims to the killer that
it has died with first, one to any other, and never its last to one that has killed before.

Must never hold back what has not been claimed before.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .step import Delivery

#: When a suspect comes again that found another one at work, in milliseconds.
AGAIN_MS = 2_000


def is_alone(claims: int, limit: int) -> bool:
    """Whether what is claimed for the ``claims``-th time without an outcome, and may be ``limit`` times, has no suspect beside it."""
    return claims > 2 or claims >= limit


class Suspects:
    """The suspects that this process is at: any number of them, or one that is alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[tuple[weakref.ref[Delivery], bool]] = []

    def enter(self, delivery: Delivery, *, alone: bool) -> bool:
        """Whether ``delivery`` may be at work now; it is inside until it is over (an abandoned one, until it is forgotten)."""
        with self._lock:
            others = [(one, by_itself) for one, by_itself in self._inside if _is_at_work(one(), delivery)]
            let_in = not others or not (alone or others[0][1])
            self._inside = [*others, (weakref.ref(delivery), alone)] if let_in else others
            return let_in


def _is_at_work(one: Delivery | None, but: Delivery) -> bool:
    return one is not None and one is not but and one.state in ("new", "claimed")
