"""Every state that a scenario can come to, breadth first, and the shortest way to one in which something is wrong.

A state is what the database holds, the moment, where each actor stands, what is in the queue, and what may still go wrong (its
budgets). From each state everything is tried that may happen next: a message is taken, doubled, lost; an actor executes its next
transaction, or is decided about; a worker dies; a sweep or an operator comes by; it becomes later.

What an actor does next depends on the database, the moment and on itself alone, never on the others. So each such step is carried out
once, by the engine's own code, and then looked up: the same step in a thousand states costs one.

Long because what may happen, what comes of it and how that is told rest on one notion of a state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from dramatiq_saga.engine.rows import Outgoing
from tests.model import facts, invariants
from tests.model.ending import Ending
from tests.model.invariants import Claim
from tests.model.store import UNKNOWN, Content, Entry, Standing
from tests.model.world import TICK, Letter, World, without_moments

H = TypeVar("H", bound=Hashable)

#: What may happen a number of times, in this order in a state's budgets.
BUDGETS = (
    "doubled", "lost", "crash", "unknown", "fails", "is shut down", "later", "monitor", "doctor", "cancel", "compensate", "resume", "kick",
)  # fmt: skip
VISITORS = BUDGETS[BUDGETS.index("monitor") :]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workflow, how far its run has come, and what may happen to it."""

    name: str
    declare: Callable[[World], None]
    budgets: dict[str, int]
    #: Bodies that end in time, one after the other, before the model begins: actor and ending.
    before: tuple[str, ...] = ()
    workers: int = 2
    joins: bool = True
    #: Whether an undo whose worker is gone is given to another one (RECLAIM-1); otherwise it waits for a redelivery, or for ever.
    reclaims_undos: bool = True
    #: What may happen beside that when there is time.
    more: dict[str, int] = field(default_factory=dict)

    def thorough(self) -> Scenario:
        """With everything that may happen beside that."""
        return replace(self, budgets={name: self.budgets.get(name, 0) + self.more.get(name, 0) for name in BUDGETS})


class Violation(AssertionError):
    """Something is wrong, and this is how it came to be."""

    def __init__(self, what: str, trace: list[str]) -> None:
        super().__init__(what, trace)
        self.what = what
        self.trace = trace

    def __str__(self) -> str:
        return "\n".join((self.what, "", *(f"{number:3}. {line}" for number, line in enumerate(self.trace, start=1))))


class Actor(NamedTuple):
    """An actor that stands still: what it was called for, and all that it has been answered so far."""

    call: tuple[Any, ...]
    log: tuple[Entry, ...]
    standing: Standing
    hand: Letter | None
    claim: Claim | None

    @property
    def name(self) -> str:
        return f"the worker with {self.call[1].id}/{self.call[2]}" if self.call[0] == "deliver" else _visitor(self.call[0])

    @property
    def is_in_body(self) -> bool:
        return "succeeds" in self.standing.options


class State(NamedTuple):
    """Numbers stand for what was seen before: contents, actors, letters."""

    content: int
    now: int
    actors: tuple[int, ...]
    queue: tuple[int, ...]
    budgets: tuple[int, ...]


class Local(NamedTuple):
    """What one step of one actor leads to."""

    content: int
    actor: int | None
    sent: tuple[Outgoing, ...]
    back: tuple[Letter, ...]
    wrong: str | None


class Move(NamedTuple):
    """One thing that has happened, as a trace tells it."""

    kind: str
    who: int | None = None
    choice: str | None = None


class Numbers(Generic[H]):
    """Things that are equal have one number."""

    def __init__(self) -> None:
        self._numbers: dict[H, int] = {}
        self.things: list[H] = []

    def of(self, thing: H) -> int:
        number = self._numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


@dataclass(slots=True)
class Explored:
    """What there was to be found."""

    states: int = 0
    moves: int = 0
    contents: int = 0
    executed: int = 0
    depth: int = 0
    ended: Counter[str] = field(default_factory=Counter)


class Explorer:
    """One scenario, explored as far as its budgets go, or ``depth`` moves deep."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.declare, joins=scenario.joins, reclaims_undos=scenario.reclaims_undos)
        self.contents: Numbers[Content] = Numbers()
        self.actors: Numbers[Actor] = Numbers()
        self.letters: Numbers[Letter] = Numbers()
        self.found = Explored()
        self._facts: list[facts.Facts] = []
        self._deliveries: list[frozenset[str]] = []
        self._locals: dict[tuple[int, int, int | tuple[Any, ...], str | None], Local] = {}
        self._parents: dict[State, tuple[State, Move] | None] = {}
        self._ending = Ending(self.world)

    def close(self) -> None:
        self.world.close()

    def explore(self, *, depth: int | None = None) -> Explored:
        """Visit every state. Raises Violation at the first one, in the order of their depth, where something is wrong."""
        frontier = deque([self._first()])
        level = 0
        while frontier and (depth is None or level < depth):
            level += 1
            for _ in range(len(frontier)):
                state = frontier.popleft()
                for following in self._visit(state):
                    frontier.append(following)
        self.found.states = len(self._parents)
        self.found.contents = len(self.contents.things)
        self.found.executed = len(self._locals)
        self.found.depth = level
        return self.found

    # --- states ------------------------------------------------------------------------------------------------------

    def _first(self) -> State:
        letters = self._ending.begin(self.scenario.before)
        content, now = self._content_number(), self.world.clock.now()
        queue: tuple[int, ...] = ()
        for letter in letters:
            queue = self._with_letter(queue, letter)
        wrong = self._ending.wrong(self.contents.things[content])
        if wrong is not None:
            raise Violation(wrong, [])
        state = State(content, now, (), queue, tuple(self.scenario.budgets.get(name, 0) for name in BUDGETS))
        self._parents[state] = None
        return state

    def _visit(self, state: State) -> Iterator[State]:
        """The states that have not been seen before and follow from this one."""
        if not state.actors and not any(map(self._is_awaited, state.queue)):
            self._at_rest(state)
        for move, following, wrong in self._moves(state):
            self.found.moves += 1
            if wrong is not None:
                raise Violation(wrong, [*self._trace(state), self._tell(state, move, following)])
            if following not in self._parents:
                self._parents[following] = (state, move)
                yield following

    def _at_rest(self, state: State) -> None:
        """Nothing is on its way. Unless a message was lost, the run has been brought to its end by messages alone (DRIVE-2, CLAIM-2)."""
        now = self._facts[state.content]
        self.found.ended[f"{now.run['status']}, {now.run['rollback']}"] += 1
        if self._spared(state) and not now.is_over:
            raise Violation(f"nothing is on its way, and the run is {now.run['status']}", self._trace(state))

    def _is_awaited(self, number: int) -> bool:
        """Whether a run may have to wait for this message: not for a callback, nor for the alarm of a deadline."""
        return self.letters.things[number].says.kind not in ("callback", "timer")

    def _spared(self, state: State) -> bool:
        """Whether no message can have been lost."""
        losing = ("lost",) if self.scenario.joins else ("lost", "crash")
        return all(self._left(state, name) == self.scenario.budgets.get(name, 0) for name in losing)

    @staticmethod
    def _left(state: State, name: str) -> int:
        return state.budgets[BUDGETS.index(name)]

    # --- moves -------------------------------------------------------------------------------------------------------

    def _moves(self, state: State) -> Iterator[tuple[Move, State, str | None]]:
        actors = self.actors.things
        for who in dict.fromkeys(state.actors):
            yield from self._go_on(state, who)
            if self._left(state, "crash"):
                yield Move("crash", who), self._crash(state, who), None
        is_free = sum(actors[who].call[0] == "deliver" for who in state.actors) < self.scenario.workers
        for number in dict.fromkeys(state.queue):
            letter = self.letters.things[number]
            if letter.due <= state.now and is_free:
                yield from self._take(state, number, "take")
                if self._left(state, "doubled") and not letter.is_hint:
                    yield from self._take(_spend(state, "doubled"), number, "doubled")
            if self._left(state, "lost") or letter.is_hint:
                spent = state if letter.is_hint else _spend(state, "lost")
                yield Move("lost", number), spent._replace(queue=_without(state.queue, number)), None
        for name in VISITORS:
            if self._left(state, name):
                yield from self._step(_spend(state, name), Move(name), (name,), hand=None)
        if self._left(state, "later"):
            yield Move("later"), _spend(state, "later")._replace(now=state.now + TICK), None

    def _take(self, state: State, number: int, kind: str) -> Iterator[tuple[Move, State, str | None]]:
        """A worker is given a message; ``doubled``: the queue still has it."""
        letter = self.letters.things[number]
        if kind == "take":
            state = state._replace(queue=_without(state.queue, number))
        delivery = 0
        if letter.says.kind in ("step", "compensation"):
            used = self._deliveries[state.content] | {
                f"{actor.call[1].id}/{actor.call[2]}"
                for actor in map(self.actors.things.__getitem__, state.actors)
                if actor.call[0] == "deliver"
            }
            while f"{letter.id}/{delivery}" in used:
                delivery += 1
        call = ("deliver", letter, delivery)
        yield from self._step(state, Move(kind, number), call, hand=letter)
        if letter.says.kind in ("step", "compensation") and self._left(state, UNKNOWN):
            yield from self._step(_spend(state, UNKNOWN), Move(kind, number, UNKNOWN), call, choice=UNKNOWN, hand=letter)

    def _go_on(self, state: State, who: int) -> Iterator[tuple[Move, State, str | None]]:
        actor = self.actors.things[who]
        rest = state._replace(actors=_without(state.actors, who))
        if not actor.standing.options:
            yield from self._step(rest, Move("go on", who), who)
        if actor.standing.writes and self._left(state, UNKNOWN):
            yield from self._step(_spend(rest, UNKNOWN), Move("go on", who, UNKNOWN), who, choice=UNKNOWN)
        for option in actor.standing.options:
            if option in BUDGETS:
                if self._left(state, option):
                    yield from self._step(_spend(rest, option), Move("go on", who, option), who, choice=option)
            else:
                yield from self._step(rest, Move("go on", who, option), who, choice=option)

    def _crash(self, state: State, who: int) -> State:
        """A process dies between two of its transactions. What it had not used up is delivered again."""
        actor = self.actors.things[who]
        state = _spend(state, "crash")._replace(actors=_without(state.actors, who))
        return state if actor.hand is None else state._replace(queue=self._with_letter(state.queue, actor.hand))

    def _step(
        self, state: State, move: Move, what: int | tuple[Any, ...], *, choice: str | None = None, hand: Letter | None = None
    ) -> Iterator[tuple[Move, State, str | None]]:
        """One step of an actor that is no part of ``state`` while it acts."""
        key = (state.content, state.now, what, choice)
        local = self._locals.get(key)
        if local is None:
            local = self._locals[key] = self._execute(*key, hand=hand)
        queue = state.queue
        for letter in local.back:
            queue = self._with_letter(queue, letter)
        for outgoing in local.sent:
            queue = self._with_letter(queue, self._letter(outgoing, state, local.content, queue))
            if outgoing.group is not None and outgoing.sequence == outgoing.group.first:
                queue = self._with_letter(queue, Letter(_callback(outgoing)))
        actors = state.actors if local.actor is None else tuple(sorted((*state.actors, local.actor)))
        following = state._replace(content=local.content, actors=actors, queue=queue)
        yield move, following, local.wrong or self._collision(state, following)

    def _execute(
        self, content: int, now: int, what: int | tuple[Any, ...], choice: str | None, *, hand: Letter | None
    ) -> Local:
        """Have an actor take one step, by the engine's own code."""
        world, store = self.world, self.world.store
        if isinstance(what, int):
            call, log, _, hand, claim = self.actors.things[what]
        else:
            call, log, claim = what, (), None
        store.load(self.contents.things[content])
        world.begin(hand)
        try:
            entries, standing = store.play(lambda: getattr(world, call[0])(*call[1:]), log, now=now, choice=choice)
        except Exception as error:
            return Local(content, None, (), (), f"{call[0]} raised {type(error).__name__}: {error}")
        effects = world.effects
        actor = None
        if standing is not None:
            actor = self.actors.of(Actor(call, (*log, *entries), standing, effects.hand, world.claim))
        after = self._content_number()
        return Local(after, actor, tuple(effects.sent), tuple(effects.back), self._wrong(content, after, claim, now))

    def _letter(self, outgoing: Outgoing, state: State, content: int, queue: tuple[int, ...]) -> Letter:
        """A new message, with a number that no other one that says the same has."""
        due = state.now + outgoing.delay if outgoing.delay else 0
        says = Outgoing(
            outgoing.kind, outgoing.run_id, outgoing.actor, outgoing.queue, outgoing.sequence, outgoing.cycle, outgoing.attempts,
            outgoing.tries, at=outgoing.at, group=without_moments(outgoing.group),
        )  # fmt: skip
        letter = Letter(says, 0, due)
        if outgoing.kind not in ("step", "compensation"):
            return letter
        used = {self.letters.things[number].id for number in queue}
        used |= {actor.call[1].id for actor in map(self.actors.things.__getitem__, state.actors) if actor.call[0] == "deliver"}
        used |= {delivery.partition("/")[0] for delivery in self._deliveries[content]}
        number = 0
        while letter.id in used:
            number += 1
            letter = Letter(says, number, due)
        return letter

    def _with_letter(self, queue: tuple[int, ...], letter: Letter) -> tuple[int, ...]:
        return tuple(sorted((*queue, self.letters.of(letter))))

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _content_number(self) -> int:
        """The number of what the database holds; whatever is new is looked at once."""
        store = self.world.store
        number = self.contents.of(store.content())
        store._loaded = self.contents.things[number]
        if number == len(self._facts):
            self._facts.append(facts.read(self.contents.things[number], store.columns))
            rows = (*self._facts[-1].steps.values(), *self._facts[-1].undos.values())
            self._deliveries.append(frozenset(row["delivery"] for row in rows if row["delivery"]))
        return number

    def _wrong(self, content: int, after: int, claim: Claim | None, now: int) -> str | None:
        if after == content:
            return None
        old, new = self._facts[content], self._facts[after]
        over = (offence for check in invariants.STEPS for offence in check(old, new, claim, now))
        state = (offence for check in invariants.STATES for offence in check(new))
        offence = invariants.first(over) or invariants.first(state)
        if offence is None and self.scenario.reclaims_undos:
            return self._ending.wrong(self.contents.things[after])
        return offence

    def _collision(self, state: State, following: State) -> str | None:
        """What is wrong because of where the others stand."""
        if following.content == state.content or not self._facts[following.content].undos:
            return None
        bodies = [actor.claim for actor in map(self.actors.things.__getitem__, state.actors) if actor.is_in_body]
        found = invariants.no_undo_runs_into_its_step(
            self._facts[state.content], self._facts[following.content], [claim for claim in bodies if claim], state.now
        )
        return invariants.first(found)

    # --- telling -----------------------------------------------------------------------------------------------------

    def _trace(self, state: State) -> list[str]:
        lines: list[str] = []
        while True:
            parent = self._parents[state]
            if parent is None:
                return lines[::-1]
            lines.append(self._tell(parent[0], parent[1], state))
            state = parent[0]

    def _tell(self, state: State, move: Move, following: State) -> str:
        """One move in one line: who did what, and what came of it."""
        if move.kind == "later":
            return "it becomes later: every window that was open has passed"
        if move.kind in ("lost", "take", "doubled"):
            letter = self.letters.things[move.who or 0]
            if move.kind == "lost":
                return f"the message {letter.id} is lost"
            again = ", and will be given it again" if move.kind == "doubled" else ""
            who, did = f"a worker is given {letter.id}{again}", _unanswered(move)
        elif move.kind in VISITORS:
            who, did = f"{_visitor(move.kind)} begins", ""
        else:
            actor = self.actors.things[move.who or 0]
            if move.kind == "crash":
                return f"{actor.name} dies before {_short(actor.standing.name)}; what it has in its hand is delivered again"
            who = actor.name
            did = f": {_short(actor.standing.name)}"
            did += _unanswered(move) if move.choice in (None, UNKNOWN) else f" {move.choice}"
        changed = facts.changes(self._facts[state.content], self._facts[following.content])
        new = Counter(following.queue) - Counter(state.queue)
        sent = ", ".join(self.letters.things[number].id for number in new.elements()) if move.kind != "doubled" else ""
        return f"{who}{did}{changed and f' [{changed}]'}{sent and f' (sent: {sent})'}"


def _visitor(name: str) -> str:
    return f"the {name}" if name in ("monitor", "doctor") else f"the operator's {name}"


def _unanswered(move: Move) -> str:
    return ", and is told that nobody knows" if move.choice == UNKNOWN else ""


def _short(name: str) -> str:
    """An operation by its verb."""
    return name.replace(".<locals>", "").removesuffix(".operation").removesuffix(".<lambda>")


def _callback(says: Outgoing) -> Outgoing:
    group = says.group
    assert group is not None
    return Outgoing("callback", says.run_id, group.workflow, group.queue, group=without_moments(group))


def _spend(state: State, name: str) -> State:
    at = BUDGETS.index(name)
    budgets = state.budgets
    return state._replace(budgets=(*budgets[:at], budgets[at] - 1, *budgets[at + 1 :]))


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    at = numbers.index(number)
    return numbers[:at] + numbers[at + 1 :]
