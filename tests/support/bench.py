"""Workers that a test holds in its hands: the real engine on a real database, message by message.

A :class:`Bench` is one worker process's share of an application: its own store (so its own connections, and on SQLite its own
writer thread), engine, replay cache and runner, on tables that several of them share. Nothing runs by itself: messages
that a write would send are collected, and the test delivers them: in any order, twice, or never. What a bench writes can be
stopped at named points (:meth:`Bench.stop`) or made to fail there (:meth:`Bench.fail`), so that two of them meet exactly
where the test wants it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.message import Message

from dramatiq_saga import SagaMiddleware, Settings, workflow
from dramatiq_saga.clock import Clock, uuid7
from dramatiq_saga.codec import encode, encode_call
from dramatiq_saga.coroutines import body_of
from dramatiq_saga.engine import drive as drives
from dramatiq_saga.engine import runs, signals, timers
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import WriteRefusedError, WriteUnknownError
from dramatiq_saga.journal.anomalies import AnomalyLog
from dramatiq_saga.locks import LockBackend
from dramatiq_saga.middleware import build_message
from dramatiq_saga.step import Delivery, Runner
from dramatiq_saga.store.database import Store, open_store
from tests.support.locks import chosen
from tests.support.waiting import DEADLINE

T = TypeVar("T")

#: The engine's writes by the names that tests know them by: what the name of the operation's function ends with.
WRITES = {
    "claim": "ClaimAttempt._write",
    "outcome and decision": "_settle_with_decision.<locals>.operation",
    "outcome": "_settle_alone.<locals>.operation",
    "member outcome": "settle_member.<locals>.attempt.<locals>.record_member",
    "callback": "called_back.<locals>.operation",
    "failed try": "fail_try.<locals>.operation",
    "decision": "_drive_once.<locals>.operation",
    "side effect": "_Recorder.__call__.<locals>.operation",
    "hold": "hold.<locals>.operation",
    "cancel": "_end_once.<locals>.operation",
    "plan": "_enter.<locals>.operation",
    "undo outcome": "settle.<locals>.operation",
    "resume": "_resume_once.<locals>.operation",
    "advance": "_advance_once.<locals>.operation",
    "release": "_release.<locals>.part.<locals>.operation",
    "signal retry": "answer_all.<locals>.operation",
    "start": "start.<locals>.operation",
    "signal": "send.<locals>.operation",
    "timers": "_end.<locals>.operation",
    "beat": "Heartbeat.beat.<locals>.operation",
    "put back": "Runner._send_back.<locals>.operation",
    "body reported": "body_reported.<locals>.operation",
    "alarm": "_set_alarm_once.<locals>.operation",
    "kick": "_kick.<locals>.operation",
    "repair": "send_again.<locals>.take",
    "repair of a run": "_wake.<locals>.take",
    "held run": "_drive.<locals>.take",
}


class ByHand(MessageProxy):
    """A message that the test delivers: there is nothing to acknowledge."""

    settled = True
    reservation = None


class HandSender:
    """Collects what writes send. Like a queue in the same database: a message exists if and only if its write has committed."""

    joins = True
    rings = True

    def __init__(self) -> None:
        self.queue: deque[Outgoing] = deque()
        self.alarms: deque[Outgoing] = deque()

    def calm(self) -> None:
        pass

    def outbox(self, delivery: Any | None = None) -> HandOutbox:
        return HandOutbox(self)


class HandOutbox:
    """The messages of one write."""

    joined = True

    def __init__(self, sender: HandSender) -> None:
        self._sender = sender
        self._messages: list[Outgoing] = []

    def load(self, messages: list[Outgoing]) -> None:
        unmarked = [one for one in messages if one.kind in ("step", "compensation") and one.created_at is None]
        assert not unmarked, "messages that do not say which run they are of (CLAIM-1)"
        self._messages = messages

    def stage(self, tx: Any) -> None:
        tx.after_commit(self._send)

    def _send(self) -> None:
        self._sender.queue.extend(message for message in self._messages if message.kind != "timer")
        self._sender.alarms.extend(message for message in self._messages if message.kind == "timer")

    keep = stage

    def unsure(self) -> None:
        pass  # what was staged is sent if and only if its write has committed

    def delivered(self) -> None:
        pass


class Stop:
    """A named point that one write comes to: it stands there until :meth:`go`."""

    def __init__(self, write: str, where: str, statement: str | None) -> None:
        self.write = write
        self.where = where
        self.statement = statement
        self._reached = threading.Event()
        self._open = threading.Event()

    def wait_reached(self) -> None:
        assert self._reached.wait(DEADLINE), f"no write came to {self.where} {self.write!r}"

    def go(self) -> None:
        self._open.set()

    def stand(self) -> None:
        self._reached.set()
        assert self._open.wait(DEADLINE), f"nobody opened the stop {self.where} {self.write!r}"


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the call did not return in time"
        if self._error is not None:
            raise self._error
        return self._value


class Anomalies(AnomalyLog):
    """The second journal, kept in memory."""

    def __init__(self) -> None:
        super().__init__("info")
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def report(self, code: str, **fields: object) -> None:
        self.lines.append((code, fields))


class Bench:
    """One worker's share of an application, on the database at ``url``.

    ``declare(bench)`` declares actors (``bench.actor``) and workflows (``bench.workflow``) on the bench's own broker.
    """

    def __init__(
        self,
        url: str,
        declare: Callable[[Bench], None],
        *,
        prefix: str = "saga_",
        settings: Settings | None = None,
        clock: Clock | None = None,
        database: Any = None,
        locks: LockBackend | None = None,
    ) -> None:
        locks = locks or chosen()
        self.broker = StubBroker()
        self.store: Store = open_store(database or url, prefix=prefix, clock=clock, auto_create=True)
        self.broker.store = self.store  # type: ignore[attr-defined]
        self.middleware = SagaMiddleware(settings=settings, locks=locks)
        self.broker.add_middleware(self.middleware)
        self.sender = HandSender()
        declare(self)
        self.engine = self.middleware.engine(self.broker)
        self.runner = Runner(self.engine, self.broker, self.sender, locks=locks)
        self.middleware._runner = self.runner
        self.engine.anomalies = self.anomalies = Anomalies()
        self.engine.note_cost = lambda run_id, seconds: None  # type: ignore[method-assign]  # no wall clock decides what is written
        self._stops: list[Stop] = []
        self._faults: list[_Fault] = []
        self._overtakings: list[tuple[str, Callable[[], None]]] = []
        self._write = self.store.write
        self.store.write = self._watched_write  # type: ignore[method-assign]
        self.store.prepare()

    # --- declaring ---------------------------------------------------------------------------------------------------

    def actor(self, fn: Callable[..., Any], **options: Any) -> dramatiq.Actor[Any, Any]:
        options = {"max_retries": 3, "actor_name": fn.__name__, **options}
        return dramatiq.actor(fn, broker=self.broker, **options)

    def workflow(self, fn: Callable[..., Any], **options: Any) -> Any:
        return workflow(broker=self.broker, **options)(fn)

    # --- running -----------------------------------------------------------------------------------------------------

    def start(self, name: str, *args: Any, run_id: str | None = None, expires_in: float | None = None) -> str:
        """Start a run; its first message is the next one in :attr:`messages`."""
        now = self.engine.now()
        expires_at = None if expires_in is None else now + int(expires_in * 1000)
        new = runs.NewRun(run_id or uuid7(now), name, None, "default", encode_call(args, {}), expires_at=expires_at)
        runs.start(self.engine, new, self.sender)
        return new.run_id

    @property
    def messages(self) -> list[Outgoing]:
        """What this bench's writes have sent and nobody has taken yet."""
        return list(self.sender.queue)

    @property
    def alarms(self) -> list[int]:
        """The moments for which alarms are on their way, in the order in which they were sent."""
        return [message.at for message in self.sender.alarms if message.at is not None]

    def ring(self) -> int:
        """Deliver the alarms that are due, as a queue in the same database would; how many."""
        due = [message for message in self.sender.alarms if message.at is not None and message.at <= self.engine.now()]
        for message in due:
            self.sender.alarms.remove(message)
            self.deliver(message)
        return len(due)

    def take(self) -> Outgoing:
        """The oldest message that nobody has taken."""
        return self.sender.queue.popleft()

    def message(self, outgoing: Outgoing) -> MessageProxy:
        """``outgoing`` as Dramatiq's message, for one delivery or several of the very same message."""
        return ByHand(build_message(self.broker, outgoing))

    def message_again(self, message: MessageProxy, **changes: Any) -> MessageProxy:
        """The very same message once more, for another delivery of it while the first goes on."""
        return ByHand(message._message.copy(**changes))

    def callback(self, member: Outgoing) -> MessageProxy:
        """What Dramatiq sends once it has counted every member of the group that ``member`` goes out with."""
        (callback,) = build_message(self.broker, member).options["group_completion_callbacks"]
        return ByHand(Message(**callback))

    def deliver(self, what: Outgoing | MessageProxy) -> Any:
        """Deliver one message, as a worker's thread would: a drive's ending, or the :class:`Delivery` of a step or an undo.

        With overlap locks, one that is put back is in nobody's hands; its :class:`Delivery` is returned, and ``back_in`` says so.
        """
        if isinstance(what, Outgoing):
            what = self.message(what)
        delivery = Delivery(what)
        try:
            return self._deliver(delivery, what)
        finally:
            self.runner.leave(delivery)

    def _deliver(self, delivery: Delivery, what: MessageProxy) -> Any:
        if delivery.job is None and self.runner._is_held_elsewhere(delivery):
            return delivery
        if delivery.kind == "timer":
            return timers.fire(self.engine, delivery.run_id, self.sender, delivery=what, at=delivery.at)
        if delivery.job is None:
            if delivery.level is not None:
                return self.runner._level_closed(delivery, delivery.level)
            if delivery.group is not None and not self.runner._called_back(delivery):
                return None
            return drives.drive(self.engine, delivery.run_id, self.sender)
        actor = self.broker.actors[delivery.actor]
        try:
            self.runner.perform(delivery, body_of(actor))
        except Exception:
            if delivery.state != "failed":
                raise
        return delivery

    def run(self, limit: int = 200) -> None:
        """Deliver everything there is, and what that sends, first come, first served. A failed try is given up at once."""
        for _ in range(limit):
            if not self.sender.queue:
                return
            delivery = self.deliver(self.take())
            if isinstance(delivery, Delivery) and delivery.state == "failed":
                self.runner.give_up(delivery)
        raise AssertionError(f"still not finished after {limit} messages")

    def cancel(self, run_id: str) -> bool:
        return runs.cancel(self.engine, run_id, self.sender)

    def compensate(self, run_id: str) -> bool:
        return runs.compensate(self.engine, run_id, self.sender)

    def signal(self, run_id: str, name: str, payload: Any = None, key: str | None = None) -> None:
        signals.send(self.engine, signals.Signal(run_id, name, encode(payload, "payload"), key), self.sender)

    # --- what the rows say -------------------------------------------------------------------------------------------

    def one(self, sql: str, *params: object) -> tuple[Any, ...] | None:
        return self.store.read(lambda tx: tx.one(sql, params))

    def all(self, sql: str, *params: object) -> list[tuple[Any, ...]]:
        return self.store.read(lambda tx: tx.all(sql, params))

    def status(self, run_id: str) -> str:
        row = self.one("SELECT status FROM {flow_runs} WHERE id = ?", run_id)
        assert row is not None
        return str(row[0])

    def step(self, run_id: str, sequence: int = 1) -> tuple[str, int]:
        """Status and attempts of a step."""
        row = self.one("SELECT status, attempts FROM {action_runs} WHERE run_id = ? AND sequence = ?", run_id, sequence)
        assert row is not None
        return row[0], row[1]

    def undo(self, run_id: str, sequence: int = 1) -> tuple[str, int]:
        """Status and attempts of a compensation."""
        row = self.one("SELECT status, attempts FROM {compensation_runs} WHERE run_id = ? AND sequence = ?", run_id, sequence)
        assert row is not None
        return row[0], row[1]

    def steps(self, run_id: str) -> list[tuple[str, str]]:
        """Actor and status of every step, in order."""
        return self.all("SELECT actor, status FROM {action_runs} WHERE run_id = ? ORDER BY sequence", run_id)  # type: ignore[return-value]

    def undos(self, run_id: str) -> list[tuple[str, str]]:
        """Actor and status of every compensation, in the order in which they run."""
        return self.all("SELECT actor, status FROM {compensation_runs} WHERE run_id = ? ORDER BY level", run_id)  # type: ignore[return-value]

    def events(self, run_id: str) -> list[str]:
        """The run's history: the kinds of its lines, in order."""
        return [row[0] for row in self.all("SELECT type FROM {flow_events} WHERE run_id = ? ORDER BY id", run_id)]

    def codes(self) -> list[str]:
        """The anomalies that this bench's engine has journalled."""
        return [code for code, _ in self.anomalies.lines]

    # --- stopping and failing ----------------------------------------------------------------------------------------

    def stop(self, write: str, *, where: str = "before", statement: str | None = None) -> Stop:
        """Have the next such write stand: ``before`` it begins, ``after`` it has committed, or ``inside`` its transaction,
        once it has executed ``statement`` (part of a template's text) and holds the locks that come with it."""
        assert write in WRITES
        assert where in ("before", "inside", "after")
        assert (statement is None) == (where != "inside")
        stop = Stop(write, where, statement)
        self._stops.append(stop)
        return stop

    def overtake(self, write: str, call: Callable[[], None]) -> None:
        """Have ``call`` carried out before the next such write begins, after everything that it rests on was read."""
        assert write in WRITES
        self._overtakings.append((write, call))

    def fail(self, write: str, *, happened: bool, unknown: bool = True, times: int = 1) -> None:
        """Have the next such write answered with an error: as unknown, whether or not it did happen, or as refused."""
        assert write in WRITES
        assert unknown or not happened
        self._faults.append(_Fault(write, happened, unknown, times))

    def _watched_write(self, operation: Callable[[Any], T], *, urgent: bool = False) -> T:
        stops = [stop for stop in self._stops if _is(operation, stop.write)]
        stop = stops[0] if stops else None
        if stop is not None:
            self._stops.remove(stop)
            if stop.where == "before":
                stop.stand()
            elif stop.where == "inside":
                operation = _standing(operation, stop)
        overtaking = next((entry for entry in self._overtakings if _is(operation, entry[0])), None)
        if overtaking is not None:
            self._overtakings.remove(overtaking)
            overtaking[1]()
        fault = next((fault for fault in self._faults if _is(operation, fault.write)), None)
        if fault is None:
            value = self._write(operation, urgent=urgent)
        else:
            value = self._failing_write(operation, fault)
        if stop is not None and stop.where == "after":
            stop.stand()
        return value

    def _failing_write(self, operation: Callable[[Any], T], fault: _Fault) -> T:
        fault.times -= 1
        if not fault.times:
            self._faults.remove(fault)
        if fault.happened:
            self._write(operation)
        if fault.unknown:
            raise WriteUnknownError("the connection was lost while COMMIT was under way", "commit", None, True)
        raise WriteRefusedError("the database is busy", "begin")

    def close(self) -> None:
        self.store.close()
        self.broker.close()


class _Fault:
    def __init__(self, write: str, happened: bool, unknown: bool, times: int) -> None:
        self.write = write
        self.happened = happened
        self.unknown = unknown
        self.times = times


def _is(operation: Callable[..., Any], write: str) -> bool:
    return bool(operation.__qualname__ == WRITES[write])


def _standing(operation: Callable[[Any], T], stop: Stop) -> Callable[[Any], T]:
    """``operation``, which stands still after the statement that ``stop`` names."""

    def stand(tx: Any) -> T:
        return operation(_StandingTx(tx, stop))

    return stand


class _StandingTx:
    def __init__(self, tx: Any, stop: Stop) -> None:
        self._tx = tx
        self._stop: Stop | None = stop
        self.dialect = tx.dialect

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tx, name)
        if name not in ("run", "one", "all"):
            return method

        def execute(sql: str, params: Any = ()) -> Any:
            value = method(sql, params)
            if self._stop is not None and self._stop.statement is not None and self._stop.statement in sql:
                stop, self._stop = self._stop, None
                stop.stand()
            return value

        return execute


@contextmanager
def benches(*made: Bench) -> Iterator[tuple[Bench, ...]]:
    """Close them afterwards, whatever happened."""
    try:
        yield made
    finally:
        for bench in made:
            bench.close()
