"""The engine's parts in one place: store, clock, settings, journals, the workflows this process knows, the replay cache.

An ``Engine`` holds no state of any run that the database does not hold: dropping it loses nothing. The verbs (claim, fence,
replay, commit, transitions, rollback) are functions in the modules beside this one and take it as their first argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import WriteRefusedError
from ..journal import history
from .lookout import Lookout
from .rows import Outgoing, Snapshot

if TYPE_CHECKING:
    from ..clock import Clock
    from ..journal.anomalies import AnomalyLog
    from ..settings import Settings
    from ..store.database import Store, Tx
    from .liveness import Heart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkflowDefinition:
    """A workflow that this process can replay."""

    name: str
    function: Callable[..., Any]
    queue: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """What the engine has to know of an actor when it schedules one: asked of the host, so nothing here imports it."""

    name: str
    queue: str
    priority: int | None


class Outbox(Protocol):
    """Carries the messages of one write: into its transaction, or out after its commit (DRIVE-3)."""

    #: True where :meth:`stage` puts the messages into the transaction itself.
    joined: bool

    def load(self, messages: list[Outgoing]) -> None:
        """Prepare ``messages``; called before the transaction, in the thread that wants it."""

    def stage(self, tx: Tx) -> None:
        """Write them, and consume the message at hand, inside the transaction; nothing where they travel by another broker."""

    def keep(self, tx: Tx) -> None:
        """Turn the message at hand into the first loaded one, but hold on to it: a crash has it delivered again."""

    def unsure(self) -> None:
        """Called instead of :meth:`delivered` where nobody knows whether the transaction has committed."""

    def delivered(self) -> None:
        """Called once the transaction is known to have committed: wakes consumers, or sends what was only noted."""


class Sender(Protocol):
    """Makes outboxes. One that joins the transaction, one that waits for its commit, or one that runs things inline."""

    #: True where messages are written in the transaction that creates their rows.
    joins: bool
    #: True where a delayed message can carry a moment, so that a run's alarm is one (TIMER-1).
    rings: bool

    def calm(self) -> None:
        """From here on nothing interrupts this thread for the message at hand: what follows must not be cut short."""

    def outbox(self, delivery: Any | None = None) -> Outbox:
        """``delivery`` is the message at hand, which the write consumes; ``None`` where there is none."""
        ...


class Engine:
    """Everything that the verbs need."""

    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        anomalies: AnomalyLog,
        make_flow: Callable[[Any], Any],
        worker_id: str,
        actor_facts: Callable[[str], ActorFacts | None],
    ) -> None:
        self.store = store
        self.settings = settings
        self.anomalies = anomalies
        self.make_flow = make_flow
        self.worker_id = worker_id
        self.actor_facts = actor_facts
        self.workflows: dict[str, WorkflowDefinition] = {}
        self.cache = SnapshotCache()
        self.replay_cost: dict[str, float] = {}
        self.lookout = Lookout()
        self.heart: Heart | None = None  # where this process keeps a heartbeat (RECLAIM-5): see ``liveness.heart_of``
        self.queues: set[str] | None = None  # the queues that this process consumes; None: all

    def drives(self, workflow: str, queue: str) -> bool:
        """Whether this process may drive on the spot a run of that workflow on that queue: it knows one and consumes the other (DRIVE-6)."""
        return workflow in self.workflows and (self.queues is None or queue in self.queues)

    def note_cost(self, run_id: str, seconds: float) -> None:
        """Remember a run whose replay is slow, so that no outcome waits for it (DRIVE-1)."""
        if seconds > 0.02:
            if len(self.replay_cost) > 4096:
                self.replay_cost.clear()
            self.replay_cost[run_id] = seconds
        elif self.replay_cost:
            self.replay_cost.pop(run_id, None)  # it was the machine that was slow, not the run

    def write(self, operation: Callable[[Tx], T], outbox: Outbox) -> T:
        """``store.write``, for an operation that stages ``outbox``."""
        try:
            return self.store.write(operation)
        except WriteRefusedError:
            raise
        except BaseException:
            outbox.unsure()
            raise

    def record(self, tx: Tx, run_id: str, now: int, lines: Sequence[history.Line]) -> None:
        """Write ``lines`` into the run's history, in the transaction of the changes they tell of (EVENT-1)."""
        history.append(tx, run_id, now, lines, self.settings.history)

    @property
    def clock(self) -> Clock:
        return self.store.clock

    def now(self) -> int:
        """The present, in milliseconds (CLOCK-1)."""
        return self.store.clock.now()


class SnapshotCache:
    """The last snapshots this process has made, so that a long run is not decoded afresh at every step.

    Never trusted: a write that rests on one repeats its revision and wake count, and a stale one loses (DRIVE-1). One that is stale by
    the wake count alone saves reading what it holds that is settled (``snapshot.read``).
    """

    def __init__(self, size: int = 512) -> None:
        self._size = size
        self._entries: OrderedDict[str, Snapshot] = OrderedDict()
        self._lock = Lock()

    def get(self, run_id: str) -> Snapshot | None:
        return self._entries.get(run_id)

    def put(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._entries[snapshot.run_id] = snapshot
            self._entries.move_to_end(snapshot.run_id)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def drop(self, run_id: str) -> None:
        with self._lock:
            self._entries.pop(run_id, None)
