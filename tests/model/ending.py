"""How a run ends when everybody is gone: every worker is dead, every message is lost, and a sweep and one new worker are what there is.

The rows are the truth, messages are hints: so from whatever the database may hold, the sweep and a worker bring the run to its end. That
is asked of every state that an exploration comes to. The answer depends on the rows alone, and once it is late enough every moment in
them has passed, so states that differ in nothing else are asked once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.model.facts import read
from tests.model.store import KEPT, Content, Standing
from tests.model.world import TICK, Letter, World

#: So many sweeps have to be enough.
SWEEPS = 12

MOMENTS = {
    "created_at", "woken_at", "sent_at", "hold_until", "expires_at", "expiry_after", "timer_at", "timer_last", "repair_after",
    "reclaim_stale_at", "next_try_at", "time_limit_at", "not_before", "due_at", "closed_early_at",
}  # fmt: skip
COUNTS = {"repair_attempts", "delivery", "revision"}

Choose = Callable[[Standing], str]


def _go_well(standing: Standing) -> str:
    return standing.options[0]


class Ending:
    """Brings runs to their ends, and says so where that cannot be done."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._seen: set[Content] = set()
        self._numbers = itertools.count(1000)  # of deliveries: none is like one that an actor has made
        self._blank = [
            {at for at, column in enumerate(world.store.columns[table]) if column in MOMENTS | COUNTS} for table in KEPT
        ]

    def begin(self, endings: Iterable[str]) -> list[Letter]:
        """Start a run and bring it some way: the messages that are left. Each of ``endings`` is how the next body ends, or an operator."""
        world = self.world
        letters = self._carry_out(world.start)
        for ending in endings:
            if ending in ("compensate", "cancel"):
                letters += self._carry_out(getattr(world, ending))
                continue
            letters = self._until_a_body(letters, ending)
        return letters

    def _until_a_body(self, letters: list[Letter], ending: str) -> list[Letter]:
        begun: list[Standing] = []

        def choose(standing: Standing) -> str:
            begun.append(standing)
            return ending if ending in standing.options else standing.options[-1]

        while not begun:
            letter = next(letter for letter in letters if not letter.due)
            letters = [*(other for other in letters if other is not letter), *self._deliver(letter, choose)]
        return letters

    def wrong(self, content: Content) -> str | None:
        """What is wrong with a state that nothing brings to its end."""
        key = self._key(content)
        if key in self._seen:
            return None
        world = self.world
        world.store.load(content)
        trail = [key]
        try:
            for _ in range(SWEEPS):
                now = read(world.store.content(), world.store.columns)
                if now.is_over:
                    break
                world.clock._now += TICK
                self._drain([*self._carry_out(world.monitor), *self._carry_out(world.doctor)])
                key = self._key(world.store.content())
                if key in self._seen:
                    break
                trail.append(key)
            else:
                return f"after {SWEEPS} sweeps and a worker for all that they sent the run is {now.run['status']}"
        except AssertionError as error:
            return f"once everybody is gone: {error}"
        self._seen.update(trail)
        return None

    def _drain(self, letters: list[Letter]) -> None:
        """Deliver what was sent, and what that sends. What is for later counts as lost, and the next sweep has to find it."""
        for _ in range(200):
            letters = [letter for letter in letters if not letter.due]
            if not letters:
                return
            letters += self._deliver(letters.pop(0))
        raise AssertionError("messages lead to nothing but themselves")

    def _deliver(self, letter: Letter, choose: Choose = _go_well) -> list[Letter]:
        return self._carry_out(lambda: self.world.deliver(letter, next(self._numbers)), choose)

    def _carry_out(self, call: Callable[[], None], choose: Choose = _go_well) -> list[Letter]:
        """What was sent by a call that nothing stops."""
        world = self.world
        world.begin(None)
        world.store.freely(call, choose)
        now = world.clock.now()
        sent = [
            Letter(replace(outgoing, delay=None), 0, now + outgoing.delay if outgoing.delay else 0)
            for outgoing in world.effects.sent
        ]
        return sent + world.effects.back

    def _key(self, content: Content) -> Content:
        return tuple(
            tuple(tuple(value if at not in blank else value is None for at, value in enumerate(row)) for row in rows)
            for blank, rows in zip(self._blank, content, strict=True)
        )
