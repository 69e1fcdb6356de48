"""A shop whose workers can be told where to die: ``dramatiq tests.processes.kill_app``.

``KILL_APP_DIE_AT`` names a point (see :data:`POINTS`) and, after a colon, the actor that it is about. Whatever process comes
there first sends itself SIGKILL: a marker file sees to it that nobody does so twice. The points are put around functions of
the engine and of the broker from here; the code that is tested knows nothing of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import dramatiq
from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Shutdown

from dramatiq_saga import SagaMiddleware, Settings, current_step, workflow
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.engine.claim import Claim, ClaimAttempt
from dramatiq_saga.step import Runner
from dramatiq_saga.store.database import Store
from tests.support.effects import EffectLog
from tests.support.gates import Gates
from tests.support.locks import chosen

DATABASE = "KILL_APP_DATABASE"
REDIS = "KILL_APP_REDIS"  # the queue is there, and not in the database
PREFIX = "KILL_APP_PREFIX"
RETRY_AFTER = "KILL_APP_RETRY_AFTER"
SETTINGS = "KILL_APP_SETTINGS"  # JSON
DIE_AT = "KILL_APP_DIE_AT"

#: point -> what the process has done when it dies there
POINTS = {
    "reserved": "the message is reserved, and nobody has looked at it",
    "handed over": "the next message's row is reserved for this process, whose workers do not know yet",
    "claimed": "the claim is committed, the body has not begun",
    "in body": "the body is half through",
    "after body": "the body has returned, nothing is recorded",
    "outcome written": "the outcome stands in a transaction that has not been committed",
    "outcome committed": "the outcome is committed, and nothing has come after it",
    "decision written": "what a drive decided stands in a transaction that has not been committed",
    "decision committed": "it is committed, and nothing has come after it",
    "closing written": "the end of a run that its parent has asked for stands in a transaction that has not been committed",
    "closing committed": "it is committed, and nothing has come after it",
    "acknowledging": "everything is done, the message is about to be acknowledged",
    "acknowledged": "the message has been acknowledged",
    "failure recorded": "a failed try is recorded, Dramatiq has not decided what follows",
}

_OUTCOMES = (
    "_settle_with_decision.<locals>.operation",
    "_settle_alone.<locals>.operation",
    "settle.<locals>.operation",
    "settle_member.<locals>.attempt.<locals>.record_member",
)
_DECISIONS = ("_drive_once.<locals>.operation",)
_CLOSINGS = ("_enter.<locals>.operation", "_end_once.<locals>.operation")
_FAILURES = ("fail_try.<locals>.operation",)


# --- dying -----------------------------------------------------------------------------------------------------------


class Killer:
    """Knows the point and the actor, and what this thread is about."""

    def __init__(self, spec: str) -> None:
        self.point, _, self.actor = spec.partition(":")
        assert self.point in POINTS
        self.local = threading.local()

    def here(self, point: str, actor: str | None = None) -> None:
        """Die, if this is the place and nobody has died yet."""
        if point != self.point or (self.actor and (actor or getattr(self.local, "actor", None)) != self.actor):
            return
        try:
            os.close(os.open(f"{os.environ['SAGA_TEST_EFFECTS']}.killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        EffectLog.from_env().record("killed", point=point)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # another thread: SIGKILL is on its way

    def arm(self) -> None:
        """Put the points around what they are about."""
        self._around_claims()
        self._around_writes()
        self._around_queues()

    def _around_claims(self) -> None:
        run, conclude = ClaimAttempt.run, Runner._conclude

        def watched_run(attempt: ClaimAttempt) -> Any:
            found = run(attempt)
            if isinstance(found, Claim):
                self.local.actor = found.actor
                self.here("claimed")
            return found

        def watched_conclude(runner: Runner, delivery: Any, claim: Claim, body: Any) -> None:
            if body.returned:
                self.here("after body")
            conclude(runner, delivery, claim, body)

        ClaimAttempt.run = watched_run  # type: ignore[method-assign]
        Runner._conclude = watched_conclude  # type: ignore[method-assign]

    def _around_writes(self) -> None:
        write = Store.write

        def watched_write(store: Store, operation: Callable[[Any], Any]) -> Any:
            name = operation.__qualname__
            if name in _FAILURES:
                value = write(store, operation)
                self.here("failure recorded")
                return value
            kinds = {"outcome": _OUTCOMES, "decision": _DECISIONS, "closing": _CLOSINGS}
            kind = next((kind for kind, names in kinds.items() if name in names), None)
            if kind is None:
                return write(store, operation)
            actor = getattr(self.local, "actor", None)

            def has_landed(value: Any) -> bool:
                return value is None if name.startswith("_end_once") else _has_landed(value)

            def watched(tx: Any) -> Any:
                value = operation(tx)
                if has_landed(value):
                    self.here(f"{kind} written", actor)
                return value

            value = write(store, watched)
            if has_landed(value):
                self.here(f"{kind} committed")
            return value

        Store.write = watched_write  # type: ignore[method-assign]

    def _around_queues(self) -> None:
        reserve, acknowledge = DatabaseBroker.reserve, DatabaseBroker.acknowledge

        def watched_reserve(broker: DatabaseBroker, queue: str, limit: int) -> Any:
            deliveries = reserve(broker, queue, limit)
            for delivery in deliveries or ():
                self.here("reserved", json.loads(delivery.payload)["actor_name"])
            return deliveries

        taken = DatabaseBroker.taken

        def watched_taken(broker: DatabaseBroker, prepared: Any, *args: Any, **options: Any) -> None:
            self.here("handed over", prepared.message.actor_name)
            taken(broker, prepared, *args, **options)

        DatabaseBroker.taken = watched_taken  # type: ignore[method-assign]

        def watched_acknowledge(broker: DatabaseBroker, proxy: Any) -> None:
            self.here("acknowledging", proxy.actor_name)
            acknowledge(broker, proxy)
            self.here("acknowledged", proxy.actor_name)

        DatabaseBroker.reserve = watched_reserve  # type: ignore[method-assign]
        DatabaseBroker.acknowledge = watched_acknowledge  # type: ignore[method-assign]
        from dramatiq.brokers.redis import _RedisConsumer

        fetch, ack = _RedisConsumer.__next__, _RedisConsumer.ack

        def watched_fetch(consumer: Any) -> Any:
            message = fetch(consumer)
            if message is not None:
                self.here("reserved", message.actor_name)
            return message

        def watched_ack(consumer: Any, message: Any) -> None:
            self.here("acknowledging", message.actor_name)
            ack(consumer, message)
            self.here("acknowledged", message.actor_name)

        _RedisConsumer.__next__ = watched_fetch
        _RedisConsumer.ack = watched_ack


def _has_landed(value: Any) -> bool:
    """Whether a write of the engine's has landed, by what its operation has returned."""
    return bool(getattr(value, "landed", value and value != (False, False)))


# --- the shop --------------------------------------------------------------------------------------------------------


class Shop:
    """The application on one broker: declared alike in workers and in the test that sends to them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        settings = Settings.from_mapping(
            {"schema.table_prefix": environment[PREFIX], **json.loads(environment.get(SETTINGS, "{}"))}
        )
        self.broker: Broker
        if REDIS in environment:
            self.broker = RedisBroker(url=environment[REDIS], maintenance_chance=1_000_000, heartbeat_timeout=1500)
            self.broker.add_middleware(SagaMiddleware(environment[DATABASE], settings=settings, locks=chosen()))
        else:
            kind = SQLiteBroker if environment[DATABASE].startswith("sqlite") else DatabaseBroker
            self.broker = kind(
                environment[DATABASE], prefix=environment[PREFIX], retry_after=float(environment.get(RETRY_AFTER, "1"))
            )
            self.broker.add_middleware(SagaMiddleware(settings=settings, locks=chosen()))
        self.killer: Killer | None = None
        self._declare()

    def _declare(self) -> None:
        actors = {}
        for name in ("charge", "refund", "reserve", "unreserve", "ship", "board", "alight"):
            retries = 0 if name == "ship" else 3
            actors[name] = dramatiq.actor(
                self._body(name), broker=self.broker, max_retries=retries, min_backoff=50, max_backoff=50
            )
        charge, refund, reserve, unreserve, ship, board, alight = actors.values()

        def checkout(flow: Any, order: str) -> str:
            charged = flow.action(charge, order).compensate_with(refund, order).run()
            flow.action(reserve, order).compensate_with(lambda reserved: unreserve.message(order)).run()
            return f"{charged}, {flow.run(ship, order)}"

        def tour(flow: Any, order: str) -> str:
            """Two of its steps are undone side by side."""
            flow.action(board, order).compensate_with(alight, order).run()
            flow.saga(
                flow.action(charge, order).compensate_with(refund, order),
                flow.action(reserve, order).compensate_with(lambda reserved: unreserve.message(order)),
            ).compensate_in_parallel().run()
            return str(flow.run(ship, order))

        def convoy(flow: Any, order: str) -> str:
            """Three steps side by side, one of which may fail, and one after them."""
            found = flow.parallel(
                flow.action(charge, order).compensate_with(refund, order),
                flow.action(ship if "nowhere" in order else reserve, order),
                flow.action(board, order).compensate_with(alight, order),
            ).run()
            return f"{found}, {flow.run(ship, order)}"

        def single(flow: Any, order: str) -> str:
            return str(flow.run(long, order))

        def harbour(flow: Any, order: str) -> str:
            """The last of three levels: what is to be undone, and a step that stands at a gate."""
            flow.action(reserve, order).compensate_with(unreserve, order).run()
            return str(flow.run(long, order))

        def leg(flow: Any, order: str) -> str:
            flow.action(charge, order).compensate_with(refund, order).run()
            return str(flow.child(self.harbour, order).close_policy("cancel").run())

        def voyage(flow: Any, order: str) -> str:
            flow.action(board, order).compensate_with(alight, order).run()
            there = flow.child(self.leg, order).close_policy("cancel").run()
            return f"{there}, {flow.run(ship, order)}"

        long = dramatiq.actor(self._long, broker=self.broker, actor_name="long", max_retries=0, time_limit=60_000)
        told = dramatiq.actor(
            self._told, broker=self.broker, actor_name="told", max_retries=0, notify_shutdown=True, time_limit=60_000
        )

        def interrupted(flow: Any, order: str) -> str:
            return str(flow.run(told, order))

        pay = dramatiq.actor(self._pay, broker=self.broker, actor_name="pay", max_retries=0)

        def patient(flow: Any, order: str) -> str:
            """Its step fails until somebody has topped up, and waits to be told."""
            return str(flow.action(pay, order).retry_on_signal("top-up").run())

        self.checkout = workflow(broker=self.broker)(checkout)
        self.patient = workflow(broker=self.broker)(patient)
        self.tour = workflow(broker=self.broker)(tour)
        self.convoy = workflow(broker=self.broker)(convoy)
        self.harbour = workflow(broker=self.broker)(harbour)
        self.leg = workflow(broker=self.broker)(leg)
        self.voyage = workflow(broker=self.broker)(voyage)
        self.single = workflow(broker=self.broker)(single)
        self.interrupted = workflow(broker=self.broker)(interrupted)

    def _body(self, name: str) -> Callable[[str], str]:
        def body(order: str) -> str:
            self._begin(name, order)
            if self.killer is not None:
                self.killer.here("in body", name)
            if name == "ship" and "nowhere" in order:
                raise ValueError("no such address")
            EffectLog.from_env().record(f"{name} ended", order=order)
            return f"{name} {order}"

        body.__name__ = name
        return body

    def _pay(self, order: str) -> str:
        self._begin("pay", order)
        if self.killer is not None:
            self.killer.here("in body", "pay")
        if not EffectLog.from_env().count("topped up"):
            raise ValueError("no money")
        return f"paid {order}"

    def _begin(self, name: str, order: str) -> None:
        step = current_step()
        assert step is not None
        EffectLog.from_env().record(name, order=order, attempt=step.attempt, key=step.idempotency_key)

    def _long(self, order: str) -> str:
        self._begin("long", order)
        if not order.startswith("short"):
            Gates.from_env().reach(f"long-{order}")
        thread: Any = threading.current_thread()
        while order.endswith("until-told") and thread.running:
            time.sleep(0.005)
        EffectLog.from_env().record("long ended", order=order)
        return order

    def _told(self, order: str) -> str:
        self._begin("told", order)
        gates = Gates.from_env()
        try:
            (gates.directory / f"told.reached.{os.getpid()}.{order}").touch()
            while not (gates.directory / "told.open").exists():
                time.sleep(0.005)
        except Shutdown:
            EffectLog.from_env().record("told to stop", order=order)
            raise
        EffectLog.from_env().record("told ended", order=order)
        return order


if DATABASE in os.environ:
    shop = Shop(os.environ)
    if os.environ.get(DIE_AT):
        shop.killer = Killer(os.environ[DIE_AT])
        shop.killer.arm()
    dramatiq.set_broker(shop.broker)
