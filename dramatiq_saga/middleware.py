"""The Dramatiq middleware: where messages of ours are recognised, and everything that never reaches an actor (API).

Its hooks do little: one notes the message at hand for the wrapper around the actor's call (``step.py``), the others catch the
ways in which a message can end without that call. Messages that are not ours pass through untouched: no query, one look at
their options (NATIVE-5).

Dramatiq swallows what hooks raise, unless it is a ``MiddlewareError``; so nothing that could lose work is left to an exception
here: verbs that record something wait for the store instead (FENCE-3).

Long because every hook that Dramatiq has is a way for a message to end, and they are read against each other.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import socket
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog
from dramatiq import Actor, Broker, Message
from dramatiq.common import current_millis
from dramatiq.errors import BrokerConnectionError, QueueNotFound
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    CurrentMessage,
    GroupCallbacks,
    Interrupt,
    Middleware,
    MiddlewareError,
    Pipelines,
    Retries,
    ShutdownNotifications,
    SkipMessage,
    TimeLimit,
)
from dramatiq.middleware.threading import is_gevent_active
from dramatiq.results import Results

from .barriers import BlockBarriers, ensure_group_callbacks
from .brokers.database import DatabaseBroker
from .coroutines import body_of
from .engine.core import ActorFacts, Engine
from .engine.replay import refuse_inside_workflow
from .engine.rows import Group, Outgoing
from .engine.sender import DeferredSender, JoinedSender
from .errors import (
    MessageNotSentError,
    MessageSkippedError,
    MessageTooOldError,
    MiddlewareOrderError,
    SagaError,
    SettingsError,
    UnknownActorError,
)
from .flow import Flow
from .interrupts import disarm
from .journal.anomalies import AnomalyLog
from .recovery.heartbeat import Heartbeat
from .recovery.lookout_loop import LookoutLoop
from .recovery.loop import SweepLoop
from .recovery.timer_loop import TimerLoop
from .settings import Settings
from .step import OPTION, Delivery, Runner, is_ours
from .store.database import Database, Store, open_store
from .store.trouble import is_trouble

if TYPE_CHECKING:
    from dramatiq import Worker
    from dramatiq.broker import MessageProxy
    from dramatiq.worker import ConsumerThread, WorkerThread

    from .engine.core import Sender
    from .locks import LockBackend

#: Delay of a next try that Dramatiq could not send and we send in its place, in milliseconds.
RETRY_AGAIN_MS = 15_000

#: After how many milliseconds a drive's message that another middleware has skipped is delivered again.
SKIPPED_DRIVE_MS = 15_000

#: What has to stand before SagaMiddleware in the broker's list: their after hooks then come after ours.
_BEFORE_OURS = (
    AgeLimit,
    TimeLimit,
    ShutdownNotifications,
    Callbacks,
    Pipelines,
    GroupCallbacks,
    Retries,
    CurrentMessage,
    Results,
)


class WithheldError(MiddlewareError, BrokerConnectionError):
    """Keeps Dramatiq from acknowledging a message whose outcome the store would not take before the worker stopped (FENCE-3)."""


#: Every middleware of this process: a test puts stand-ins in the place of their brokers.
made: weakref.WeakSet[SagaMiddleware] = weakref.WeakSet()


class _Local(threading.local):
    delivery: Delivery | None = None  # the message at hand in this thread
    pending: Delivery | None = None  # the same, until the actor's call has taken it


class SagaMiddleware(Middleware):
    """Makes actors on this broker usable as saga steps.

    Parameters:
      database: a URL, a Peewee ``Database``, or ``None`` for a database broker's own. Given the broker's own database, rows and
        messages share a transaction as well.
      settings: a :class:`~dramatiq_saga.Settings`; the defaults are careful (reclaim and repair off),
        ``Settings.recommended()`` recovers by itself.
      locks: overlap locks, for example :class:`~dramatiq_saga.locks.RedisLocks`: a message that finds another one at its step, its
        compensation or its run is put back (LOCK-1). Correctness does not need them; none by default.

    Add it last: ``broker.add_middleware(SagaMiddleware(...))``, before workflows are declared. Where the broker has no
    ``GroupCallbacks`` by the time that it is first used, one is added in front of it, on the broker's Redis or on the store's
    database.
    """

    def __init__(
        self,
        database: str | Path | Database | None = None,
        *,
        settings: Settings | None = None,
        locks: LockBackend | None = None,
    ) -> None:
        if locks is not None and not (callable(getattr(locks, "take", None)) and callable(getattr(locks, "release", None))):
            raise TypeError(
                f"SagaMiddleware() takes locks as a back end, locks=RedisLocks('redis://localhost:6379/0'), not {locks!r}"
            )
        if isinstance(database, Settings):
            raise TypeError("SagaMiddleware() takes its settings by name: SagaMiddleware(settings=Settings.recommended())")
        if settings is not None and not isinstance(settings, Settings):
            raise SettingsError(
                "settings", f"must be a Settings, not {type(settings).__name__}: Settings.from_mapping() takes a mapping"
            )
        self.settings = settings or Settings()
        self._database = database
        self._locks = locks
        self._local = _Local()
        self._lock = threading.RLock()
        self._broker: Broker | None = None
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self._timers: TimerLoop | None = None
        self._heartbeat: Heartbeat | None = None
        self._sweeps: SweepLoop | None = None
        self._lookout: LookoutLoop | None = None
        self._workers: set[Worker] = set()  # that have begun to boot and not to stop
        self.worker_id = f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(8)}"
        self.log = structlog.get_logger(self.settings.logging.logger or "dramatiq_saga")
        made.add(self)

    @property
    def broker(self) -> Broker | None:
        """The broker that it serves, once that is known."""
        return self._broker

    # --- parts, made at first use ------------------------------------------------------------------------------------

    def engine(self, broker: Broker) -> Engine:
        """The engine of this middleware on ``broker``; opens nothing by itself."""
        if self._engine is None:
            with self._lock:
                if self._engine is None:
                    self._engine = self._make_engine(broker)
        elif self._broker is not broker and getattr(self._broker, "stands_in_for", None) is not broker:  # see testing/
            raise MiddlewareOrderError("one SagaMiddleware cannot serve two brokers: make one for each")
        return self._engine

    def _make_engine(self, broker: Broker) -> Engine:
        self._broker = broker
        own = getattr(broker, "store", None)
        store: Store
        if self._database is None:
            if not isinstance(own, Store):
                raise MiddlewareOrderError(
                    f"SagaMiddleware() without a database uses that of a database broker, and {type(broker).__name__} has none: "
                    'name one, for example SagaMiddleware("postgresql://localhost/shop")'
                )
            store = self._adopt(own)
        elif isinstance(own, Store) and own.is_same_database(self._database):
            store = self._adopt(own)
        else:
            store = open_store(
                self._database, prefix=self.settings.schema.table_prefix, auto_create=self.settings.schema.auto_create
            )
        ensure_group_callbacks(broker, self, store=store)
        engine = Engine(
            store=store,
            settings=self.settings,
            anomalies=AnomalyLog.from_settings(self.settings.logging),
            make_flow=cast("Any", Flow),
            worker_id=self.worker_id,
            actor_facts=functools.partial(_facts, broker),
        )
        engine.make_flow = functools.partial(Flow, workflows=engine.workflows)
        return engine

    def _adopt(self, store: Store) -> Store:
        """The broker's own store, on which the settings about tables count as well."""
        schema = self.settings.schema
        if schema.table_prefix not in (store.prefix, Settings().schema.table_prefix):
            raise SettingsError(
                "schema.table_prefix",
                f"{schema.table_prefix!r} is not the prefix of the broker's tables, {store.prefix!r}: "
                f"give the broker prefix={schema.table_prefix!r} as well",
            )
        if schema.auto_create is not None:
            store.auto_create = schema.auto_create
        return store

    def runner(self, broker: Broker) -> Runner:
        """What runs messages on ``broker``."""
        engine = self.engine(broker)
        if self._runner is None:
            with self._lock:
                if self._runner is None:
                    self._runner = Runner(engine, broker, self.sender(broker), locks=self._locks)
        return self._runner

    def sender(self, broker: Broker) -> Sender:
        """How messages leave: in the transaction with a database broker on the store's database, after it otherwise (DRIVE-3)."""
        engine = self.engine(broker)
        if getattr(broker, "store", None) is engine.store:
            return JoinedSender(
                cast("Any", broker),
                functools.partial(build_message, broker),
                functools.partial(disarm, broker),
                BlockBarriers(broker, self, store=engine.store),
            )
        return DeferredSender(
            engine.store,
            functools.partial(_enqueue, broker),
            build=functools.partial(build_message, broker),
            calm=functools.partial(disarm, broker),
            barriers=BlockBarriers(broker, self, store=engine.store),
        )

    # --- declaring ---------------------------------------------------------------------------------------------------

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        """Put the wrapper around the actor's function: it answers only for the message at hand."""
        self._broker = self._broker or broker
        # The mark is the actor's: a function may be shared by two, or carry another's attributes (functools.wraps).
        if getattr(actor, "__saga_wrapped__", None) is self or getattr(actor, "__saga_workflow__", False):
            return
        plain = actor.fn
        actor.__saga_plain__ = plain  # type: ignore[attr-defined]
        body = body_of(actor)
        local = self._local

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            delivery = local.pending
            if delivery is None or delivery.actor != actor.actor_name:
                name = actor.actor_name
                refuse_inside_workflow(f"calling actor {name}", actor=name, instead=f" (write flow.run({name}, ...))")
                return plain(*args, **kwargs)
            local.pending = None
            return self.runner(broker).perform(delivery, body)

        actor.fn = call
        actor.__saga_wrapped__ = self  # type: ignore[attr-defined]

    def drive_from_message(self, broker: Broker, workflow: str) -> None:
        """What a workflow's actor does when a message calls it."""
        delivery = self._local.pending
        if delivery is None or delivery.job is not None or delivery.actor != workflow:
            raise SagaError(
                f"a message to workflow {workflow!r} that was not sent by dramatiq-saga: start a run with {workflow}.send(...), "
                "not with the actor's own send()"
            )
        self._local.pending = None
        self.runner(broker).drive(delivery)

    # --- booting -----------------------------------------------------------------------------------------------------

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Refuse to start where the order of middleware, the schema or the database could lose work (SAFE-3)."""
        try:
            check_order(broker, self)
            if is_gevent_active():  # type: ignore[no-untyped-call]
                raise MiddlewareOrderError(
                    "dramatiq-saga does not run under gevent: its writes need real threads; start `dramatiq`, not `dramatiq-gevent`"
                )
            self.engine(broker).store.prepare()
            self._start_heartbeat(broker, worker)
        except SagaError as error:
            if isinstance(error, MiddlewareError):
                raise
            raise BootRefusedError(str(error)) from error
        engine = self.engine(broker)
        ensure_group_callbacks(broker, self, store=engine.store)
        engine.queues = set(worker.consumer_whitelist) if worker.consumer_whitelist else None
        runner = self.runner(broker)
        with self._lock:
            self._workers.add(worker)
            runner.stopping.clear()
        if not runner.sender.joins and not self.settings.repair.enabled:
            self.log.warning(
                "repair_is_off",
                meaning="with this broker, a message that is lost after its row was committed waits for a redelivery: turn repair on "
                "(Settings.recommended(), which has workers sweep as well)",
            )

    def _start_heartbeat(self, broker: Broker, worker: Worker) -> None:
        """Before the first message is taken, so that every claim has a heartbeat behind it (RECLAIM-5)."""
        if not self.settings.reclaim.dead_workers.enabled:
            return
        with self._lock:
            if self._heartbeat is None or self._heartbeat.pid != os.getpid():
                self._heartbeat = Heartbeat(self.engine(broker))
        self._heartbeat.start(worker)

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Where messages cannot carry what will be due, look for it from here (TIMER-1); sweep, if workers are to (LOOP-1)."""
        runner = self.runner(broker)
        with self._lock:
            if self._timers is None and not runner.sender.joins:
                self._timers = TimerLoop(runner.engine, runner.sender)
            if self._sweeps is None and self.settings.loop.enabled:
                self._sweeps = SweepLoop(runner.engine, runner.sender)
            if self._lookout is None:
                self._lookout = LookoutLoop(runner.engine, runner.sender)
        for thread in (self._timers, self._sweeps, self._lookout):
            if thread is not None:
                thread.start(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """With the last worker of the process its patience ends; others may go on here, and wait out what the store refuses (NATIVE-7)."""
        for thread in (self._timers, self._sweeps):
            if thread is not None:
                thread.stop(worker)
        with self._lock:
            self._workers.discard(worker)
            if self._runner is not None and not self._workers:
                self._runner.stopping.set()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Its threads have ended, or been left behind: no claim is made any more (RECLAIM-5)."""
        if self._lookout is not None:
            self._lookout.stop(worker)
        if self._heartbeat is not None:
            self._heartbeat.stop(worker)

    def before_worker_thread_shutdown(self, broker: Broker, thread: WorkerThread) -> None:
        self._close_thread()

    def before_consumer_thread_shutdown(self, broker: Broker, thread: ConsumerThread) -> None:
        self._close_thread()

    def _close_thread(self) -> None:
        if self._engine is not None:
            self._engine.store.close_thread()

    # --- a message's life --------------------------------------------------------------------------------------------

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """No message leaves from inside a workflow function; note when Dramatiq asks for another try."""
        refuse_inside_workflow(f"sending a message to {message.actor_name}", actor=message.actor_name)
        delivery = self._local.delivery
        if delivery is not None and message.message_id == delivery.message.message_id and is_ours(message):
            delivery.retry_asked = True
            if delivery.state == "failed" and delivery.claim is not None:
                self._note_next_try(broker, delivery, delay or 0)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        delivery = self._local.delivery
        if delivery is not None and delivery.retry_asked and message.message_id == delivery.message.message_id:
            delivery.retry_sent = True

    def _note_next_try(self, broker: Broker, delivery: Delivery, delay: int) -> None:
        from .engine import fence

        claim = delivery.claim
        engine = self.engine(broker)
        if claim is not None:
            at = engine.now() + delay
            try:
                fence.note_next_try(engine, claim, at)
                if claim.deadline is not None and at >= claim.deadline:
                    self.runner(broker).give_up(delivery)  # a try that could not begin in time fails at once (C38)
            except Exception as error:
                self.log.info("next_try_not_noted", run_id=delivery.run_id, error=str(error))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        local = self._local
        if not is_ours(message):
            if local.delivery is not None:
                local.delivery = local.pending = None
            return
        delivery = local.delivery = local.pending = Delivery(message)
        if message.failed:
            local.pending = None
        elif delivery.damaged:
            local.pending = None
            message.fail()
            raise SkipMessage(f"a message of dramatiq-saga that names no row: {message.options[OPTION]!r}")

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        interrupt = _interrupt_behind(exception)
        if interrupt is None or not is_ours(message):
            return
        # An interrupt has escaped the wrapper, or has cut the way to it short. It is no failure of the step.
        local = self._local
        if local.delivery is None or local.delivery.message is not message:
            local.delivery = Delivery(message)
        delivery, local.pending = local.delivery, None
        if delivery.job is not None and delivery.state in ("new", "claimed"):
            self.runner(broker).resume(delivery, interrupt)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        if is_ours(message):
            CurrentMessage._MESSAGE.set(None)  # NATIVE-5: Dramatiq leaves the skipped message there
            message.options["store_results"] = False
            local = self._local
            if local.delivery is None or local.delivery.message is not message:
                local.delivery = Delivery(message)  # skipped before it came to us
            local.pending = None
            local.delivery.state = "skipped"

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        """What would be forgotten with this acknowledgement is recorded first."""
        delivery = self._local.delivery
        if delivery is not None and delivery.message is message:
            if not delivery.damaged:
                self._withholding(lambda: self._before_ack(broker, delivery))
            self._let_go(broker)

    def _before_ack(self, broker: Broker, delivery: Delivery) -> None:
        runner = self.runner(broker)
        if self._unrecorded(delivery):
            runner.finish(delivery)
        if delivery.state == "done" or delivery.retry_sent:
            return
        if self._was_cut_short(broker, delivery):
            runner.put_back(delivery)
        elif delivery.asks_again:
            self._retry_again(broker, delivery)
        elif delivery.state == "failed":  # nothing on this broker retries
            runner.give_up(delivery)
        elif delivery.job is None:
            self.log.warning(
                "drive_message_skipped", run_id=delivery.run_id, workflow=delivery.actor, again_in=SKIPPED_DRIVE_MS / 1000
            )
            runner.put_back(delivery, SKIPPED_DRIVE_MS)
        elif delivery.state in ("new", "skipped"):
            runner.refuse(delivery.job, delivery.actor, self._reason(broker, delivery))

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Dramatiq gives the message up: the row learns of it first (NATIVE-2, NATIVE-3)."""
        if not is_ours(message):
            return
        delivery = self._local.delivery
        if delivery is None or delivery.message is not message:
            delivery = Delivery(message)
        if not delivery.damaged:
            self._withholding(lambda: self._before_nack(broker, delivery))
        self._let_go(broker)

    def _before_nack(self, broker: Broker, delivery: Delivery) -> None:
        runner, job = self.runner(broker), delivery.job
        if self._unrecorded(delivery):
            runner.finish(delivery)
        if self._was_cut_short(broker, delivery):
            runner.put_back(delivery)
        elif job is None:
            if not delivery.is_hint:
                runner.hold(delivery, self._reason(broker, delivery))
        elif delivery.state == "failed":
            runner.give_up(delivery)
        elif delivery.state in ("new", "skipped"):
            if delivery.actor not in broker.actors and self.settings.repair.enabled:
                self.log.error("actor_unknown", run_id=delivery.run_id, sequence=job.sequence, actor=delivery.actor)
                return  # NATIVE-3: a worker that knows it may come; the doctor tries again
            runner.refuse(job, delivery.actor, self._reason(broker, delivery))

    def _was_cut_short(self, broker: Broker, delivery: Delivery) -> bool:
        """Whether an interrupt kept the message from the wrapper, or a failed one from Dramatiq's decision about another try."""
        message = delivery.message
        if delivery.state == "new":
            return _interrupt_behind(message._exception) is not None
        undecided = delivery.state == "failed" and not message.failed and not delivery.asks_again
        return undecided and any(isinstance(middleware, Retries) for middleware in broker.middleware)

    def _reason(self, broker: Broker, delivery: Delivery) -> BaseException:
        """Why a message ends that was never run (NATIVE-3)."""
        actor, raised = delivery.actor, delivery.message._exception
        if actor not in broker.actors:
            what = "actor" if delivery.job is not None else "workflow"
            return UnknownActorError(
                f"no worker on queue {delivery.message.queue_name!r} knows {what} {actor!r}: deploy the module that declares it"
            )
        if raised is not None and not isinstance(raised, SkipMessage):
            return raised  # a middleware of the broker would not let it through
        if not delivery.message.failed:
            return MessageSkippedError(f"a middleware of the broker skipped the message of {actor}")
        kind = MessageTooOldError if self._is_too_old(broker, delivery) else MessageSkippedError
        return kind(f"the message of {actor} was refused before it ran: {raised or 'a middleware of the broker failed it'}")

    def _is_too_old(self, broker: Broker, delivery: Delivery) -> bool:
        message, actor = delivery.message, broker.actors[delivery.actor]
        for middleware in broker.middleware:
            if isinstance(middleware, AgeLimit):
                limit: int | None = message.options.get("max_age") or actor.options.get("max_age", middleware.max_age)
                return bool(limit) and current_millis() - message.message_timestamp >= (limit or 0)
        return False

    def _let_go(self, broker: Broker) -> None:
        """The delivery at hand is over. Until then Dramatiq may come again for it, when its end was withheld."""
        delivery = self._local.delivery
        if delivery is not None and delivery.lock is not None:
            self.runner(broker).leave(delivery)
        self._local.delivery = self._local.pending = None

    def _unrecorded(self, delivery: Delivery) -> bool:
        """Whether its claim, its outcome or its return is not known to be durable: the worker was stopped while the store refused."""
        begun = delivery.attempt is not None or delivery.back_in is not None
        return delivery.state == "claimed" or (delivery.state == "new" and delivery.job is not None and begun)

    def _withholding(self, part: Any) -> None:
        """Run ``part``; while it cannot be done, the message of a stopping worker is not acknowledged (FENCE-3).

        Dramatiq comes back to it every few seconds until it is done, or until the process ends and the message is redelivered.
        """
        try:
            part()
        except Exception as error:
            if not is_trouble(error):
                raise
            raise WithheldError(f"the outcome could not be recorded: {error}") from error  # type: ignore[no-untyped-call]

    def _retry_again(self, broker: Broker, delivery: Delivery) -> None:
        """Dramatiq could not put the next try on the queue, and would acknowledge this one: send it ourselves (C07).

        A database broker does without: it stores the next try with the acknowledgement, or withholds that.
        """
        if isinstance(broker, DatabaseBroker):
            return

        def part() -> None:
            try:
                broker.enqueue(delivery.message.copy(), delay=RETRY_AGAIN_MS)
            except Exception as error:
                raise MessageNotSentError(f"the next try of {delivery.actor} could not be sent: {error}") from error

        self.runner(broker).persist(part)


def _interrupt_behind(exception: BaseException | None) -> Interrupt | None:
    """The interrupt that an exception is, or that it hides: Dramatiq's call of an actor has a ``finally`` that can fail."""
    while exception is not None and not isinstance(exception, Interrupt):
        exception = exception.__context__
    return exception


class BootRefusedError(SagaError, MiddlewareError):
    """A worker was not started; the message says why and what mends it."""


def middleware_of(broker: Broker) -> SagaMiddleware:
    """The broker's SagaMiddleware.

    Raises:
      MiddlewareOrderError: there is none, or more than one.
    """
    found = [middleware for middleware in broker.middleware if isinstance(middleware, SagaMiddleware)]
    if not found:
        raise MiddlewareOrderError(
            f"{type(broker).__name__} has no SagaMiddleware: call broker.add_middleware(SagaMiddleware(...)) "
            "and dramatiq.set_broker(broker) before workflows are declared"
        )
    if len(found) > 1:
        raise MiddlewareOrderError(f"{type(broker).__name__} has {len(found)} SagaMiddlewares: add exactly one")
    return found[0]


def check_order(broker: Broker, ours: SagaMiddleware) -> None:
    """Refuse an order in which Dramatiq would act on a result before it is recorded.

    Raises:
      MiddlewareOrderError: names what stands in the wrong place and the line that mends it.
    """
    middleware_of(broker)
    place = broker.middleware.index(ours)
    late = [type(other).__name__ for other in broker.middleware[place + 1 :] if isinstance(other, _BEFORE_OURS)]
    if late:
        raise MiddlewareOrderError(
            f"SagaMiddleware stands before {', '.join(late)}, whose after hooks would run before an outcome is recorded: "
            f"add it last, or with broker.add_middleware(SagaMiddleware(...), after={late[-1]})"
        )


def build_message(broker: Broker, outgoing: Outgoing) -> Message[Any]:
    """The Dramatiq message of one row: it carries ids, never payloads (C49)."""
    facts: dict[str, Any] = {"kind": outgoing.kind, "run": outgoing.run_id}
    options: dict[str, Any] = dict(outgoing.options) if outgoing.options else {}
    if outgoing.at is not None:
        facts["at"] = outgoing.at
    group = outgoing.group
    if group is not None:
        options["group_completion_uuid"] = group.id
        options["group_completion_callbacks"] = [_callback(outgoing, group)]
    if outgoing.kind not in ("drive", "timer"):
        facts["sequence"] = outgoing.sequence
        if outgoing.cycle:
            facts["cycle"] = outgoing.cycle
        if outgoing.attempts:
            facts["attempts"] = outgoing.attempts
        if outgoing.created_at is not None:
            facts["created"] = outgoing.created_at
        if outgoing.tries:
            options["retries"] = outgoing.tries
    if outgoing.priority is not None:
        options["priority"] = outgoing.priority
    options[OPTION] = facts
    return Message(
        queue_name=outgoing.queue, actor_name=outgoing.actor, args=(), kwargs={}, options=options, message_id=_message_id()
    )


def _callback(member: Outgoing, group: Group) -> dict[str, Any]:
    """The message that Dramatiq sends once every member of a group has succeeded, as it keeps it (PAR-1)."""
    facts: dict[str, Any] = {"kind": "callback", "run": member.run_id}
    if member.created_at is not None:
        facts["created"] = member.created_at
    if group.level is not None:
        facts["level"] = group.level
    else:
        facts |= {"block": group.block, "first": group.first, "last": group.last}
    options: dict[str, Any] = {OPTION: facts}
    if group.priority is not None:
        options["priority"] = group.priority
    message: Message[Any] = Message(
        queue_name=group.queue, actor_name=group.workflow, args=(), kwargs={}, options=options, message_id=_message_id()
    )
    return dict(message.asdict())


#: A generator of our own, so that an application's random.seed() has no say in message ids; each process has its own state.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def _message_id() -> str:
    """A random id in the shape of Dramatiq's own, without asking the operating system for each."""
    text = f"{_random.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _enqueue(broker: Broker, message: Message[Any], delay: int | None) -> None:
    """Send to a queue that no actor here may be on, without declaring it where that can be helped: a worker consumes every queue
    that its broker declares, and this one may not know the actors there."""
    pending = getattr(broker, "queues_pending", None)
    if pending is not None and message.queue_name not in broker.queues:  # RabbitMQ: made on the server by the enqueue
        broker.queues.add(message.queue_name)
        pending.add(message.queue_name)
    try:
        broker.enqueue(message, delay=delay or None)
    except QueueNotFound:
        broker.declare_queue(message.queue_name)
        broker.enqueue(message, delay=delay or None)


def _facts(broker: Broker, name: str) -> ActorFacts | None:
    actor = broker.actors.get(name)
    return None if actor is None else ActorFacts(name, actor.queue_name, actor.priority)


__all__ = ["BootRefusedError", "SagaMiddleware", "WithheldError", "build_message", "check_order", "middleware_of"]
