"""Putting a stand-in in the place of an application's broker, and the application back.

Actors and workflows are declared on import, on the broker of the application. What binds them to it is ``actor.broker``, the engine
inside its SagaMiddleware, and whoever holds the broker itself; each is turned to the stand-in, noted, and turned back in reverse
order. So the same objects that workers would run are under test, and their file or server is never opened.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

from dramatiq import Actor, Broker

from ..coroutines import plain_function
from ..engine.core import WorkflowDefinition
from ..middleware import SagaMiddleware
from ..step import Delivery, Runner
from ..store.database import Store, open_store
from ..workflow import Workflow, workflows_of
from .stand_in import Post, StandIn, for_tests

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq.middleware import Middleware

    from ..engine.claim import Claim, Job
    from ..engine.core import Engine, Sender
    from ..engine.replay import Replay
    from ..settings import Settings


class Watcher:
    """What a test wants to know of everything that runs; :class:`~dramatiq_saga.testing.SagaTester` is one."""

    def body(self, delivery: Delivery, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function to run for that message."""
        return fn

    def engine_made(self, engine: Engine) -> None:
        """An application is used for the first time."""

    def step_failed(self, job: Job, error: BaseException) -> None:
        """A step or compensation has failed for good, with an error that never came out of its actor."""

    def replay_begins(self, replay: Replay) -> None:
        """A workflow function is about to be run."""


class WatchedRunner(Runner):
    """A worker's runner; it tells what it sees."""

    watcher: Watcher

    def inlined(self, sender: Sender) -> Runner:
        runner = WatchedRunner(self.engine, self.broker, sender, inline=True)
        runner.watcher = self.watcher
        return runner

    def perform(self, delivery: Delivery, fn: Callable[..., Any]) -> Any:
        return super().perform(delivery, self.watcher.body(delivery, fn))

    def refuse(self, job: Job, actor: str, error: BaseException) -> None:
        self.watcher.step_failed(job, error)
        super().refuse(job, actor, error)

    def _settle(self, delivery: Delivery, claim: Claim, text: str, error: BaseException) -> bool:
        self.watcher.step_failed(claim.job, error)
        return super()._settle(delivery, claim, text, error)


class Takeover:
    """One application (or none) with a stand-in in the place of its broker, until :meth:`undo`."""

    def __init__(
        self, original: Broker | None, *, post: Post, watcher: Watcher, without: tuple[type[Middleware], ...] = (),
        settings: Settings | None = None,
    ) -> None:  # fmt: skip
        self.original = original
        self._undo = ExitStack()
        self._watcher = watcher
        found = [one for one in original.middleware if isinstance(one, SagaMiddleware)] if original is not None else []
        self._declares_workflows = bool(found)
        self.middleware = found[0] if found else SagaMiddleware(settings=settings)
        kept = None if original is None else for_tests(original.middleware, without)
        engine = self.middleware._engine
        self._declared = {} if engine is None else dict(engine.workflows)
        for name in ("_engine", "_runner", "_broker", "_database"):  # made anew at their first use, on the stand-in
            self._set(self.middleware, name, None)
        self._set(self.middleware, "_make_engine", self._make_engine)
        self._set(self.middleware, "runner", self._runner)
        self.stand_in = StandIn(post, stands_in_for=original, middleware=kept)
        self.stand_in.is_fault = self._is_fault
        for actor in original.actors.values() if original is not None else ():
            self._take(actor)
        if not found:
            self.stand_in.add_middleware(self.middleware)  # wraps the actors, until they are given back
        if original is not None:
            for workflow in workflows_of(original).values():
                self._set(workflow, "broker", self.stand_in)
            self._set(original, "enqueue", self.stand_in.enqueue)

    @property
    def engine(self) -> Engine:
        """The engine that works on the store in memory."""
        return self.middleware.engine(self.stand_in)

    @property
    def sender(self) -> Sender:
        """How messages leave: with the transaction, into the post."""
        return self.middleware.sender(self.stand_in)

    @property
    def is_open(self) -> bool:
        """Whether anything has been stored."""
        store = self.stand_in.store
        return store is not None and store._ready

    def look_around(self) -> None:
        """Take what has been declared on the application's own broker since."""
        for name, actor in list(self.original.actors.items()) if self.original is not None else ():
            if name not in self.stand_in.actors:
                self._take(actor)
                if hasattr(actor, "workflow"):
                    self._set(actor.workflow, "broker", self.stand_in)

    def undo(self) -> None:
        """The application is as it was. What a module has declared for good meanwhile, on being imported, is declared there too."""
        newcomers = [actor for name, actor in self.stand_in.actors.items() if self._is_new(name, actor)]
        self._undo.close()
        for actor in newcomers:
            self._hand_over(actor)

    # --- turning, and turning back -----------------------------------------------------------------------------------

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._keep(owner, name)
        setattr(owner, name, value)

    def _keep(self, owner: Any, name: str) -> None:
        """Whatever becomes of it, it will be as it is now."""
        own = vars(owner)
        self._undo.callback(own.__setitem__, name, own[name]) if name in own else self._undo.callback(own.pop, name, None)

    def _take(self, actor: Actor[Any, Any]) -> None:
        for name in ("fn", "__saga_wrapped__", "__saga_plain__"):
            self._keep(actor, name)
        self._set(actor, "broker", self.stand_in)
        self.stand_in.take_over(actor.queue_name)
        self.stand_in.actors[actor.actor_name] = actor

    def _make_engine(self, broker: Broker) -> Engine:
        """An application that a test leaves alone has none made, and costs it next to nothing."""
        stand_in, middleware = self.stand_in, self.middleware
        store = stand_in.store = _open_memory(middleware.settings.schema.table_prefix)
        store.clock = stand_in.post.clock
        self._undo.callback(_close_memory, store)
        engine = SagaMiddleware._make_engine(middleware, stand_in)
        store.auto_create = True  # whatever the settings say of the application's own database
        engine.workflows.update(self._declared)
        engine.make_flow = partial(self._make_flow, engine.make_flow)
        self._watcher.engine_made(engine)
        return engine

    def _make_flow(self, make_flow: Callable[[Any], Any], replay: Replay) -> Any:
        self._watcher.replay_begins(replay)
        return make_flow(replay)

    def _runner(self, broker: Broker) -> Runner:
        middleware = self.middleware
        engine = middleware.engine(broker)
        if middleware._runner is None:
            # Without the application's overlap locks: here one message is delivered at a time (LOCK-1).
            runner = WatchedRunner(engine, self.stand_in, middleware.sender(self.stand_in))
            runner.watcher = self._watcher
            middleware._runner = runner
        return middleware._runner

    def _is_fault(self, error: BaseException) -> bool:
        """Whether what came out of a step's wrapper or a drive is no failure of the step's body."""
        delivery = self.middleware._local.delivery
        return delivery is None or delivery.state not in ("failed", "done")

    def replace(self, actor: Actor[Any, Any], body: Callable[..., Any]) -> None:
        """``body`` in the place of the actor's function, until :meth:`undo`."""
        actor.fn = body
        actor.__saga_wrapped__ = None  # type: ignore[attr-defined]
        self.middleware.after_declare_actor(self.stand_in, actor)

    def _is_new(self, name: str, actor: Actor[Any, Any]) -> bool:
        """Whether it was declared by a module, and not by a test function for itself."""
        if self.original is None or name in self.original.actors or "<locals>" in actor.fn.__qualname__:
            return False
        return self._declares_workflows or not hasattr(actor, "workflow")

    def _hand_over(self, actor: Actor[Any, Any]) -> None:
        broker: Any = self.original
        workflow: Workflow[Any, Any] | None = getattr(actor, "workflow", None)
        actor.broker = broker
        if workflow is None:
            actor.fn = plain_function(actor)
            actor.__saga_wrapped__ = None  # type: ignore[attr-defined]
        else:
            workflow.broker = broker
            drive = partial(self.middleware.drive_from_message, broker, workflow.name)
            actor.fn = update_wrapper(drive, workflow.fn)
            definition = WorkflowDefinition(workflow.name, workflow.fn, workflow.queue_name, workflow.version)
            self.middleware.engine(broker).workflows[workflow.name] = definition
        broker.declare_actor(actor)


#: Stores of earlier tests, closed and empty: most of what a store costs is building its models.
_spare: dict[str, Store] = {}


def _open_memory(prefix: str) -> Store:
    return _spare.pop(prefix, None) or open_store(":memory:", prefix=prefix)


def _close_memory(store: Store) -> None:
    """Its thread ends, and what it held is gone."""
    store.close()
    store._ready = False
    _spare[store.prefix] = store


__all__ = ["Takeover", "Watcher"]
