"""Who acts in a model: workers with a message in their hands, the monitor, the doctor, an operator. All of it is the engine's own code.

Messages are :class:`Letter` values. Like a queue in the same database: a letter exists if and only if the write that sent it has
committed, a write that uses up the message at hand does so in its own transaction, and what a crashed worker has not used up is
delivered again. A broker that the transaction cannot reach is modelled by the engine's sender for those (:class:`DeferredSender`): there
each letter leaves in a step of its own, after the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Shutdown

from dramatiq_saga import SagaMiddleware, Settings, step, workflow
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.codec import encode_call
from dramatiq_saga.engine import runs, undoing
from dramatiq_saga.engine.claim import Claim
from dramatiq_saga.engine.core import SnapshotCache
from dramatiq_saga.engine.rows import Group, Outgoing
from dramatiq_saga.engine.sender import DeferredSender
from dramatiq_saga.errors import ConcurrentTransitionError, StoreError
from dramatiq_saga.journal.anomalies import AnomalyLog
from dramatiq_saga.middleware import build_message
from dramatiq_saga.recovery.doctor import repair
from dramatiq_saga.recovery.kick import kick
from dramatiq_saga.recovery.monitor import monitor
from dramatiq_saga.step import Delivery, Runner
from tests.model.store import ModelStore

RUN = "run"

#: One moment, in milliseconds, and what is meant by "later": longer than every window that the settings of a model name.
TICK = 1_000_000

SETTINGS = {
    "actions": {"reclaim": {"stale_running": {"enabled": True, "after_seconds": 60}}},
    "reclaim": {"max_claims": 1000},
    "repair": {
        "enabled": True,
        "grace_seconds": 5,
        "max_attempts": 100_000,
        "backoff": {"base_seconds": 1, "max_seconds": 1},
    },
}


def recovering(*, reclaims_undos: bool = True) -> Settings:
    """Everything that recovers by itself, without leases."""
    sagas = {"reclaim": {"stale_running": {"enabled": reclaims_undos, "after_seconds": 60}}}
    return Settings.from_mapping({**SETTINGS, "sagas": sagas})


class BodyFails(Exception):
    """What a body raises that fails."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message: what it says, which of several that say the same it is, and when it is due."""

    says: Outgoing
    number: int = 0
    due: int = 0

    @property
    def id(self) -> str:
        sequence = f" {self.says.sequence}" if self.says.sequence else ""
        return f"{self.says.kind}{sequence}#{self.number}"

    @property
    def is_hint(self) -> bool:
        """A group's callback, which nothing rests on (PAR-2)."""
        return self.says.kind == "callback"


class Hand(MessageProxy):  # type: ignore[misc]
    """The message that a worker has in its hand."""

    settled = False

    @property
    def reservation(self) -> Hand:
        return self


@dataclass(slots=True)
class Effects:
    """What a step of an actor has done beside the database."""

    sent: list[Outgoing]  # messages that are new
    back: list[Letter]  # messages that are in the queue again, the very same ones
    hand: Letter | None  # what a crash would have delivered again


class World:
    """One process with everything in it. Any number of actors take turns in it, and none of them leaves anything behind."""

    def __init__(self, declare: Callable[[World], None], *, joins: bool = True, reclaims_undos: bool = True) -> None:
        self.clock = ManualClock(0)
        self.store = ModelStore(self.clock)
        self.broker = StubBroker(middleware=[dramatiq.middleware.Retries()])
        middleware = SagaMiddleware("sqlite:///:memory:", settings=recovering(reclaims_undos=reclaims_undos))
        self.broker.add_middleware(middleware)
        declare(self)
        self.engine = middleware.engine(self.broker)
        self.engine.store = self.store  # type: ignore[assignment]
        self.engine.anomalies = Silent("info")
        self.engine.worker_id = "worker"
        self.engine.note_cost = lambda run_id, seconds: None  # type: ignore[method-assign]  # no wall clock decides what is written
        self.engine.record = lambda tx, run_id, now, lines: None  # type: ignore[method-assign]
        self.sender: Any = ModelSender(self)
        if not joins:
            self.sender = DeferredSender(self.store, self.enqueue, build=lambda outgoing: outgoing, calm=_nothing)  # type: ignore[arg-type]
        for name in ("release", "prepare", "stage", "announce"):
            setattr(self.broker, name, getattr(self, f"_{name}"))
        if not joins:
            self.broker.enqueue = self._enqueue_copy
        self.runner = Runner(self.engine, self.broker, self.sender)
        self.runner.stopping = Patience()  # type: ignore[assignment]
        self.runner.suspects.enter = lambda delivery, *, alone: True  # type: ignore[method-assign]  # it is about other runs
        self.effects = Effects([], [], None)
        self.delivery: Delivery | None = None

    def close(self) -> None:
        self.store.close()

    # --- declaring ---------------------------------------------------------------------------------------------------

    def actor(self, name: str) -> Any:
        def body() -> str:
            """How it ends is not its own to decide."""
            ending = self.store.choose(name, "succeeds", "fails", "is shut down")
            if ending == "fails":
                raise BodyFails(name)
            if ending == "is shut down":
                raise Shutdown
            return name

        return dramatiq.actor(body, broker=self.broker, actor_name=name, max_retries=None)

    def workflow(self, function: Callable[..., Any], *, expires_at: int | None = None) -> None:
        workflow(broker=self.broker)(function)
        self.workflow_name, self.expires_at = function.__name__, expires_at

    # --- actors ------------------------------------------------------------------------------------------------------

    def begin(self, hand: Letter | None) -> None:
        """Nothing is left of the actor that was here before."""
        self.engine.cache = SnapshotCache()
        self.effects = Effects([], [], hand)
        self.delivery = None

    @property
    def claim(self) -> tuple[str, int, int] | None:
        """The claim that the actor at hand holds, as far as it knows: step or compensation, sequence, attempts."""
        found: Claim | None = None if self.delivery is None else self.delivery.claim
        return None if found is None else (found.job.kind, found.job.sequence, found.attempts)

    def start(self) -> None:
        new = runs.NewRun(RUN, self.workflow_name, None, "default", encode_call((), {}), expires_at=self.expires_at)
        runs.start(self.engine, new, self.sender)

    def deliver(self, letter: Letter, delivery_number: int) -> None:
        """A worker has been given a message: what its thread does until it lets go of it."""
        step._marks = _Mark(delivery_number)  # type: ignore[assignment]
        delivery = self.delivery = Delivery(Hand(self._message(letter)))
        if delivery.job is None:
            self.runner.drive(delivery)
            return
        actor = self.broker.actors[delivery.actor]
        try:
            self.runner.perform(delivery, actor.fn)
        except BodyFails:
            assert delivery.state == "failed"
        if delivery.state != "failed":
            return
        if self.store.choose("Dramatiq", "tries again", "gives up") == "gives up":
            self.runner.give_up(delivery)
        elif self.store.live:
            assert delivery.claim is not None
            says = replace(letter.says, attempts=delivery.claim.attempts, tries=letter.says.tries + 1)
            self.effects.back.append(replace(letter, says=says, due=0))

    def monitor(self) -> None:
        with _a_refusal_is_an_answer():
            assert not monitor(self.engine, self.sender, patience=None).errors

    def doctor(self) -> None:
        with _a_refusal_is_an_answer():
            assert not repair(self.engine, self.sender).errors

    def cancel(self) -> None:
        with _a_refusal_is_an_answer():
            runs.cancel(self.engine, RUN, self.sender, reason="cancel")

    def compensate(self) -> None:
        with _a_refusal_is_an_answer():
            runs.compensate(self.engine, RUN, self.sender, reason="undo")

    def resume(self) -> None:
        with _a_refusal_is_an_answer():
            undoing.resume(self.engine, RUN, self.sender)

    def kick(self) -> None:
        with _a_refusal_is_an_answer():
            kick(self.engine, RUN, self.sender)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _message(self, letter: Letter) -> Any:
        if letter.is_hint:
            assert letter.says.group is not None
            (callback,) = build_message(self.broker, replace(letter.says, kind="step")).options["group_completion_callbacks"]
            return dramatiq.Message(**callback)
        message = build_message(self.broker, letter.says)
        return message.copy(message_id=letter.id)

    def enqueue(self, outgoing: Outgoing, delay: int | None) -> None:
        """A broker that the transaction cannot reach takes a message, or the worker is gone before."""
        if self.store.step("the broker takes the message"):
            self.effects.sent.append(replace(outgoing, delay=delay))

    def _enqueue_copy(self, message: Any, *, delay: int | None = None) -> Any:
        """A message that is put back on such a broker."""
        if self.store.step("the broker takes the message"):
            self._back(delay or 0)
        return message

    def _release(self, tx: Any, reservation: Hand, *, delay: int) -> None:
        tx.take_part(lambda: self.put_back(delay))

    def _prepare(self, message: Any, *, delay: int | None = None) -> Any:
        assert not delay, "nobody is a suspect here"
        return message

    def _stage(self, tx: Any, message: Any, reservation: Hand) -> None:
        tx.take_part(lambda: self.put_back(0))

    def _announce(self, messages: Any) -> None:
        pass

    def put_back(self, delay: int) -> None:
        """The message at hand is in the queue again, and no crash can have it delivered once more."""
        self._back(delay)
        self.effects.hand = None

    def _back(self, delay: int) -> None:
        hand = self.effects.hand
        if hand is not None:
            self.effects.back.append(replace(hand, due=self.clock.now() + delay if delay else 0))


class _Mark:
    """The mark of a delivery's claim: a model has to give the same one again."""

    def __init__(self, number: int) -> None:
        self._number = number

    def next(self) -> str:
        return str(self._number)


class ModelSender:
    """Makes outboxes of a queue in the same database (DRIVE-3)."""

    joins = True
    rings = True

    def __init__(self, world: World) -> None:
        self.world = world

    def calm(self) -> None:
        pass

    def outbox(self, delivery: Any | None = None) -> ModelOutbox:
        return ModelOutbox(self.world, None if delivery is None or delivery.settled else delivery)


class ModelOutbox:
    """The messages of one write; what it does to the message at hand is part of it."""

    joined = True

    def __init__(self, world: World, delivery: Any | None) -> None:
        self._world = world
        self._delivery = delivery
        self._messages: list[Outgoing] = []
        self._kept = False

    def load(self, messages: list[Outgoing]) -> None:
        self._messages = messages

    def stage(self, tx: Any) -> None:
        self._kept = False
        tx.take_part(self._send)

    def _send(self) -> None:
        effects = self._world.effects
        effects.sent += self._messages
        if self._delivery is not None:
            effects.hand = None

    def keep(self, tx: Any) -> None:
        if self._delivery is None:
            self.stage(tx)
            return
        self._kept = True
        tx.take_part(self._turn)

    def _turn(self) -> None:
        """The message at hand has become the first of those that were loaded."""
        effects = self._world.effects
        if effects.hand is not None:
            effects.hand = Letter(self._messages[0])

    def unsure(self) -> None:
        pass

    def delivered(self) -> None:
        if self._delivery is not None and not self._kept:
            self._delivery.settled = True


class Patience:
    """Stands in for the event that a worker waits on between two tries at the store: others act meanwhile."""

    def is_set(self) -> bool:
        return False

    def wait(self, _: float) -> bool:
        return False


class Silent(AnomalyLog):
    """What the engine has absorbed is none of a model's business."""

    def report(self, code: str, **fields: object) -> None:
        pass


class _a_refusal_is_an_answer:
    """Somebody is told that the run is elsewhere by now, or that nobody knows whether it was written; and lets it be."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, ConcurrentTransitionError | StoreError)


def _nothing() -> None:
    pass


def without_moments(group: Group | None) -> Group | None:
    """A group's id holds the moment at which it was sent, and nothing reads it."""
    return None if group is None else replace(group, id="group")
