"""Interrupts at every place where one can land: nothing is lost, nothing is done twice, nothing is spent (FENCE-5, C43, C44).

Dramatiq raises ``TimeLimitExceeded`` and ``Shutdown`` into a worker's thread. Python delivers them when a function begins and
when a call into C returns. Here one message after the other goes through Dramatiq's own code for a worker's thread, and the
interrupt is raised at the first such place, then at the second, and so on: at every place in turn when
``DRAMATIQ_SAGA_TEST_THOROUGH`` is set, at a sample of them otherwise. What follows is worked off as usual, and must come out right.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from linecache import getline
from pathlib import Path
from queue import Empty
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.middleware import Interrupt, Shutdown, ShutdownNotifications, TimeLimit, TimeLimitExceeded
from dramatiq.worker import ConsumerThread, WorkerThread

from dramatiq_saga import SagaMiddleware, Settings, workflow
from dramatiq_saga import interrupts as interrupts_module
from dramatiq_saga import step as step_module
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.clock import ManualClock
from tests.support.locks import VARIABLE, chosen

THOROUGH = bool(os.environ.get("DRAMATIQ_SAGA_TEST_THOROUGH"))

#: Places tried per scenario and kind of interrupt, unless all are.
SAMPLE = 30


class Line:
    """One worker's thread and its queue, worked by hand on a real database: the code is Dramatiq's, and the thread is this one."""

    def __init__(self, make_broker: Callable[[ManualClock], DatabaseBroker], *, settings: Settings | None = None) -> None:
        self.clock = ManualClock()
        self.broker = make_broker(self.clock)
        self.middleware = SagaMiddleware(settings=settings or Settings(), locks=chosen())
        self.broker.add_middleware(self.middleware)
        self.ran: list[str] = []
        self.trouble: set[str] = set()
        self._declare()
        self.store = self.broker.store
        self.store.database.connect()
        worker = dramatiq.Worker(self.broker, worker_threads=1)
        self.broker.emit_before("worker_boot", worker)
        queue = worker.work_queue
        self.consumer = ConsumerThread(
            broker=self.broker, queue_name="default", prefetch=2, work_queue=queue, worker_timeout=10
        )
        self.consumer.consumer = self.broker.consume("default", prefetch=2, timeout=1)
        self.consumer.running = True
        worker.consumers["default"] = self.consumer
        self.thread = WorkerThread(broker=self.broker, consumers=worker.consumers, work_queue=queue, worker_timeout=10)
        self.queue = queue

    def _declare(self) -> None:
        def actor(name: str, **options: Any) -> Any:
            def body(order: str) -> str:
                self.ran.append(name)
                if name in self.trouble:
                    raise ValueError(f"{name} failed")
                return name

            body.__name__ = name
            return dramatiq.actor(body, broker=self.broker, notify_shutdown=True, **{"max_retries": 3, **options})

        charge, refund, ship = actor("charge"), actor("refund"), actor("ship", max_retries=0)

        def checkout(flow: Any, order: str) -> str:
            number = flow.side_effect("number", lambda: 7)
            flow.action(charge, f"{order}/{number}").compensate_with(refund, order).run()
            return str(flow.run(ship, order))

        self.checkout = workflow(broker=self.broker)(checkout)
        self.checkout.actor.options["notify_shutdown"] = True

    def start(self) -> str:
        """A fresh run; what the last one did is forgotten."""
        self.ran.clear()
        self.trouble.clear()
        return str(self.checkout.send("42").id)

    def next(self) -> Any | None:
        """The next message that is due, moving the clock to it; ``None`` when the queue is empty."""
        for _ in range(6):
            try:
                return self.queue.get_nowait().message
            except Empty:
                pass
            self.consumer.consumer._changed = True
            message = next(self.consumer.consumer)  # type: ignore[call-overload]
            if message is not None:
                self.consumer.handle_message(message)
                continue
            row = self.one(
                "SELECT MIN(CASE state WHEN 1 THEN available_at ELSE lease_until END) FROM {messages} WHERE state IN (1, 2)"
            )
            if row[0] is None:
                return None
            self.clock.advance(max(0, row[0] - self.clock.now()) / 1000 + 0.001)
        rows = self.store.read(lambda tx: tx.all("SELECT state, available_at, lease_until, actor, message FROM {messages}"))
        raise AssertionError(f"what is queued does not become due at {self.clock.now()}: {rows}")

    def take(self, kind: str, actor: str | None = None) -> Any:
        """Work off what comes before the next message of that kind, and return it unprocessed."""
        while True:
            message = self.next()
            assert message is not None, f"no {kind} message came"
            if message.options["saga"]["kind"] == kind and actor in (None, message.actor_name):
                return message
            self.process(message)

    def process(self, message: Any) -> None:
        self.thread.process_message(message)

    def work(self) -> None:
        """Work off everything."""
        for _ in range(60):
            message = self.next()
            if message is None:
                return
            self.process(message)
        raise AssertionError("work never ends")

    def one(self, sql: str, *params: object) -> tuple[Any, ...]:
        row = self.store.read(lambda tx: tx.one(sql, params))
        assert row is not None
        return row

    def locks(self) -> list[bytes]:
        """The overlap locks that there are."""
        address = os.environ.get(VARIABLE)
        if not address:
            return []
        with redis.Redis.from_url(address) as client:
            return list(client.keys("dramatiq-saga:*"))  # type: ignore[arg-type]

    @property
    def in_body(self) -> bool:
        """Whether the step's body is running: then an interrupt is meant for it."""
        delivery = self.middleware._local.delivery
        body = delivery.body if delivery is not None else None
        return body is not None and body.started and not body.returned and body.error is None

    def is_armed(self, kind: type[Interrupt]) -> bool:
        """Whether Dramatiq could raise that interrupt in this thread now."""
        ident = threading.get_ident()
        for middleware in self.broker.middleware:
            if kind is TimeLimitExceeded and isinstance(middleware, TimeLimit):
                return middleware.manager.deadlines.get(ident) is not None
            if kind is Shutdown and isinstance(middleware, ShutdownNotifications):
                return ident in middleware.manager.notifications
        return False

    def close(self) -> None:
        self.consumer.consumer.close()
        self.broker.close()
        self.store.database.close()


@pytest.fixture
def line(sqlite_path: Path) -> Iterator[Line]:
    made = Line(lambda clock: SQLiteBroker(sqlite_path, clock=clock))
    yield made
    made.close()


@pytest.fixture
def server_line(postgres_url: str, table_prefix: str) -> Iterator[Line]:
    def make(clock: ManualClock) -> DatabaseBroker:
        broker = DatabaseBroker(postgres_url, prefix=table_prefix, clock=clock)
        broker.store.migrate()
        return broker

    made = Line(make)
    yield made
    made.close()


# --- places ----------------------------------------------------------------------------------------------------------


class Places:
    """Counts the places at which an interrupt can land, and raises ``kind`` at the one numbered ``at``."""

    def __init__(self, at: int | None, kind: type[Interrupt], counts: Callable[[Any], bool], *, lines: bool = False) -> None:
        self.at = at
        self.kind = kind
        self.counts = counts
        self.lines = lines
        self.seen = 0
        self.where: str | None = None

    def __enter__(self) -> Places:
        if self.lines:
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_return"):
            self._count(frame, event)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("dramatiq_saga"):
            return None
        # On its way out of a `with`, Python closes the context without a place for an interrupt in between.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self._count(frame, event)
        return self._trace

    def _count(self, frame: Any, event: str) -> None:
        if (frame.f_code.co_filename == __file__ and frame.f_code.co_name == "__exit__") or not self.counts(frame):
            return
        self.seen += 1
        if self.seen == self.at:
            self.where = f"{event} in {frame.f_code.co_qualname}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise self.kind


def is_inside(frame: Any, *functions: Callable[..., Any]) -> bool:
    """Whether one of ``functions`` is on the way to ``frame``."""
    codes = [function.__code__ for function in functions]
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def places_to_try(total: int) -> list[int]:
    """All of them, or a sample that is spread evenly and always the same."""
    if THOROUGH or total <= SAMPLE:
        return list(range(1, total + 1))
    return sorted({1 + round(number * (total - 1) / (SAMPLE - 1)) for number in range(SAMPLE)})


def survive(
    line: Line, prepare: Callable[[], Any], check: Callable[[str], None], kind: type[Interrupt], **options: Any
) -> None:
    """Raise ``kind`` at every place (see the module's head) while the message that ``prepare`` returns is processed."""
    armed = options.pop("counts", None) or (lambda frame: line.is_armed(kind))
    message = prepare()
    with Places(None, kind, armed, **options) as counting:
        line.process(message)
    check("uninterrupted")
    assert counting.seen > 10, "the places are not found any more"
    for place in places_to_try(counting.seen):
        message = prepare()
        with Places(place, kind, armed, **options) as places:
            line.process(message)
        # The connection is usable, and so is the thread.
        assert line.one("SELECT COUNT(*) FROM {flow_runs}")[0] > 0
        check(f"{kind.__name__} at place {place}: {places.where}")
        sys.setprofile(None)


# One that lands in a finaliser is lost on Python itself, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KINDS = pytest.mark.parametrize("kind", [TimeLimitExceeded, Shutdown])


# --- a step ----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("lines", [False, True], ids=["calls", "lines"])
def test_an_interrupt_anywhere_around_a_step_costs_neither_outcome_nor_try(
    line: Line, kind: type[Interrupt], lines: bool
) -> None:
    """FENCE-5, NATIVE-4, CLAIM-4, C43, C44: from before the claim until after the outcome, the body itself excepted."""
    survive_around_a_step(line, kind, lines=lines)


@pytest.mark.servers
def test_an_interrupt_around_a_step_on_a_server_leaves_no_lock_behind(server_line: Line) -> None:
    """FENCE-5, C59: the threads that talk to the server are handed work through calls that cannot be cut in two."""
    survive_around_a_step(server_line, TimeLimitExceeded, lines=False)


def survive_around_a_step(line: Line, kind: type[Interrupt], *, lines: bool, within: tuple[str, ...] = ("",)) -> None:
    run: list[str] = []

    def prepare() -> Any:
        run[:] = [line.start()]
        return line.take("step", "charge")

    def check(where: str) -> None:
        first = line.one("SELECT status, tries, attempts FROM {action_runs} WHERE run_id = ? AND sequence = 2", *run)
        assert first[0] in ("completed", "pending"), where
        line.work()
        assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", *run) == ("completed",), where
        assert line.ran == ["charge", "ship"], where
        assert line.one("SELECT tries FROM {action_runs} WHERE run_id = ? AND sequence = 2", *run) == (0,), where
        done = line.one("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'action.completed'", *run)
        assert done == (2,), where
        assert line.one("SELECT COUNT(*) FROM {messages}") == (0,), where
        assert line.locks() == [], where

    def counts(frame: Any) -> bool:
        return line.is_armed(kind) and not line.in_body and frame.f_globals.get("__name__", "").startswith(within)

    survive(line, prepare, check, kind, counts=counts, lines=lines)


@KINDS
def test_an_interrupt_in_a_body_ends_that_try_alone(line: Line, kind: type[Interrupt]) -> None:
    """NATIVE-1, NATIVE-4: a time limit is a failed try, a shutdown gives the step back; the run goes on either way."""
    run: list[str] = []

    def prepare() -> Any:
        run[:] = [line.start()]
        return line.take("step", "charge")

    def check(where: str) -> None:
        interrupted = where != "uninterrupted"
        expected = ("failed", 1) if kind is TimeLimitExceeded else ("pending", 0)
        row = line.one("SELECT status, tries FROM {action_runs} WHERE run_id = ? AND sequence = 2", *run)
        assert row == (expected if interrupted else ("completed", 0)), where
        line.work()
        assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", *run) == ("completed",), where
        assert line.ran.count("charge") <= 1 + interrupted, where
        assert line.ran[-2:] == ["charge", "ship"], where
        assert line.one("SELECT COUNT(*) FROM {messages}") == (0,), where

    def body(order: str) -> str:
        line.ran.append("charge")
        for _ in range(12):
            os.getpid()
        return "charge"

    charge = line.broker.actors["charge"]
    perform = line.middleware.runner(line.broker).perform
    line.middleware.runner(line.broker).perform = (  # type: ignore[method-assign]
        lambda delivery, fn: perform(delivery, body if delivery.actor == charge.actor_name else fn)
    )
    survive(line, prepare, check, kind, counts=lambda frame: line.in_body and frame.f_code is body.__code__)


@KINDS
@pytest.mark.parametrize("last", [False, True], ids=["to be tried again", "given up"])
def test_an_interrupt_around_a_failing_step_costs_no_further_try(line: Line, kind: type[Interrupt], last: bool) -> None:
    """NATIVE-1, NATIVE-2, FENCE-5: the failure is recorded once, and given up once where it is the last."""
    run: list[str] = []
    actor, sequence = ("ship", 3) if last else ("charge", 2)

    def prepare() -> Any:
        run[:] = [line.start()]
        message = line.take("step", actor)
        line.trouble.add(actor)
        return message

    def check(where: str) -> None:
        if not last:
            line.trouble.clear()
        line.work()
        status = line.one("SELECT status FROM {flow_runs} WHERE id = ?", *run)
        row = line.one("SELECT status, tries FROM {action_runs} WHERE run_id = ? AND sequence = ?", *run, sequence)
        if last:
            assert (status, row) == (("failed",), ("failed", 1)), where
            assert line.ran[-2:] == ["ship", "refund"], where
            assert line.ran.count("ship") == 1, where
            given_up = line.one("SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'action.given_up'", *run)
            assert given_up == (1,), where
        else:
            assert status == ("completed",), where
            assert row[0] == "completed", where
            assert row[1] == line.ran.count("charge") - 1, where
        line.store.write(lambda tx: tx.run("DELETE FROM {messages} WHERE state = 3"))
        assert line.one("SELECT COUNT(*) FROM {messages}") == (0,), where

    survive(line, prepare, check, kind, counts=lambda frame: line.is_armed(kind) and not line.in_body)


@KINDS
def test_an_interrupt_around_an_undo_costs_neither_outcome_nor_try(line: Line, kind: type[Interrupt]) -> None:
    """COMP-1, FENCE-5."""
    run: list[str] = []

    def prepare() -> Any:
        run[:] = [line.start()]
        line.take("step", "charge")
        line.trouble.add("ship")
        line.process(line.pending)
        return line.take("compensation")

    # the message that `take` returned is still to be processed
    take = line.take

    def keep(kind_: str, actor: str | None = None) -> Any:
        line.pending = take(kind_, actor)  # type: ignore[attr-defined]
        return line.pending  # type: ignore[attr-defined]

    line.take = keep  # type: ignore[method-assign]

    def check(where: str) -> None:
        line.work()
        assert line.one("SELECT status, rollback FROM {flow_runs} WHERE id = ?", *run) == ("failed", "done"), where
        assert line.ran == ["charge", "ship", "refund"], where
        assert line.one("SELECT status, tries FROM {compensation_runs} WHERE run_id = ?", *run) == ("completed", 0), where
        line.store.write(lambda tx: tx.run("DELETE FROM {messages} WHERE state = 3"))
        assert line.one("SELECT COUNT(*) FROM {messages}") == (0,), where

    survive(line, prepare, check, kind, counts=lambda frame: line.is_armed(kind) and not line.in_body)


@KINDS
@pytest.mark.parametrize("lines", [False, True], ids=["calls", "lines"])
def test_an_interrupt_anywhere_in_a_drive_aborts_it_and_the_run_is_driven_again(
    line: Line, kind: type[Interrupt], lines: bool
) -> None:
    """FENCE-5, DRIVE-2: the side effect's value is recorded once, and the first step is scheduled once."""
    survive_in_a_drive(line, kind, lines=lines)


def survive_in_a_drive(line: Line, kind: type[Interrupt], *, lines: bool, within: tuple[str, ...] = ("",)) -> None:
    run: list[str] = []

    def prepare() -> Any:
        run[:] = [line.start()]
        return line.take("drive")

    def check(where: str) -> None:
        line.work()
        assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", *run) == ("completed",), where
        assert line.ran == ["charge", "ship"], where
        events = "SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = ?"
        assert line.one(events, *run, "side_effect.recorded") == (1,), where
        assert line.one(events, *run, "action.completed") == (2,), where
        assert line.one("SELECT COUNT(*) FROM {messages}") == (0,), where
        assert line.locks() == [], where

    def counts(frame: Any) -> bool:
        return line.is_armed(kind) and frame.f_globals.get("__name__", "").startswith(within)

    survive(line, prepare, check, kind, counts=counts, lines=lines)


@KINDS
@pytest.mark.parametrize("around", [survive_around_a_step, survive_in_a_drive], ids=["a step", "a drive"])
@pytest.mark.parametrize("_overlap_locks", ["redis"], indirect=True)
def test_an_interrupt_costs_nothing_and_leaves_no_lock_behind(line: Line, kind: type[Interrupt], around: Any) -> None:
    """LOCK-1, FENCE-5: between taking an overlap lock and giving it back, and while Redis is asked."""
    around(line, kind, lines=True, within=("dramatiq_saga.overlaps", "dramatiq_saga.locks"))


# --- too late, and twice ---------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_that_arrives_after_the_body_was_disarmed_changes_nothing(
    line: Line, kind: type[Interrupt], fails: bool
) -> None:
    """FENCE-5: Dramatiq's timer had already decided to raise it when the thread was disarmed."""
    run: list[str] = []
    disarmed = [False]

    def prepare() -> Any:
        run[:] = [line.start()]
        message = line.take("step", "charge")
        if fails:
            line.trouble.add("charge")
        disarmed[0] = False
        return message

    def counts(frame: Any) -> bool:
        if frame.f_code is interrupts_module.disarm.__code__:
            disarmed[0] = True
            return False
        if frame.f_globals["__name__"] in ("queue", "threading"):
            return False  # Python's own queue is left locked by an interrupt between two of its lines: nobody can mend that
        return disarmed[0] and is_inside(frame, step_module.Runner._conclude)

    def check(where: str) -> None:
        line.trouble.clear()
        line.work()
        assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", *run) == ("completed",), where
        assert line.ran == (["charge", "charge", "ship"] if fails else ["charge", "ship"]), where
        assert line.one("SELECT tries FROM {action_runs} WHERE run_id = ? AND sequence = 2", *run) == (int(fails),), where

    survive(line, prepare, check, kind, counts=counts)


def test_a_second_interrupt_that_lands_in_the_handling_of_the_first_changes_nothing(line: Line) -> None:
    """FENCE-5: a time limit and a shutdown within a few lines of each other."""
    run = line.start()
    message = line.take("step", "charge")
    with Places(None, TimeLimitExceeded, lambda frame: line.is_armed(TimeLimitExceeded) and not line.in_body) as counting:
        line.process(message)
    line.work()
    places = places_to_try(counting.seen)
    for number, place in enumerate(places if THOROUGH else places[::3]):
        for gap in range(1, 40, 1 if THOROUGH else 7):
            run = line.start()
            message = line.take("step", "charge")
            first = Places(place, TimeLimitExceeded, lambda frame: line.is_armed(TimeLimitExceeded) and not line.in_body)
            second = Places(
                gap + number % 7,
                Shutdown,
                lambda frame: (
                    first.where is not None
                    and line.is_armed(Shutdown)
                    and not line.in_body
                    and is_inside(frame, step_module.Runner.perform, step_module.Runner.resume)
                ),
                lines=True,
            )
            with first, second:
                line.process(message)
            where = f"{first.where}, then {second.where}"
            line.work()
            assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", run) == ("completed",), where
            assert line.ran == ["charge", "ship"], where
            assert line.one("SELECT tries FROM {action_runs} WHERE run_id = ? AND sequence = 2", run) == (0,), where


# --- the real thing --------------------------------------------------------------------------------------------------


def test_a_storm_of_real_interrupts_loses_nothing(line: Line) -> None:
    """FENCE-5: raised by another thread, whenever Dramatiq could raise them, at moments that nobody chose."""
    rounds = 600 if THOROUGH else 160
    line.broker.actors["ship"].options["max_retries"] = 3  # a time limit in its body is a failed try
    random_ = random.Random(20)
    ident = threading.get_ident()
    go, over, stop, thrown = threading.Event(), threading.Event(), threading.Event(), [0]
    delay, took = [0.0], 0.002

    def storm() -> None:
        while True:
            go.wait()
            go.clear()
            if stop.is_set():
                return
            if not stop.wait(delay[0]) and line.in_storm and line.is_armed_for(ident):  # type: ignore[attr-defined]
                kind = random_.choice([TimeLimitExceeded, Shutdown])
                thrown[0] += 1
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
            over.set()

    def is_armed_for(thread: int) -> bool:
        limits = next(m for m in line.broker.middleware if isinstance(m, TimeLimit))
        return limits.manager.deadlines.get(thread) is not None

    line.is_armed_for = is_armed_for  # type: ignore[attr-defined]
    line.in_storm = False  # type: ignore[attr-defined]
    thrower = threading.Thread(target=storm)
    thrower.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        for _ in range(rounds):
            run = line.start()
            while True:
                message = line.next()
                if message is None:
                    break
                delay[0] = random_.uniform(0, took)  # somewhere in a message that takes about as long as the last one
                line.in_storm = True  # type: ignore[attr-defined]
                go.set()
                began = time.perf_counter()
                line.process(message)
                took = time.perf_counter() - began
                line.in_storm = False  # type: ignore[attr-defined]
                assert over.wait(
                    20
                )  # a late one would be the second of the next message, and may land in Dramatiq's own handling of the first
                over.clear()
            assert line.one("SELECT status FROM {flow_runs} WHERE id = ?", run) == ("completed",)
            done = "SELECT COUNT(*) FROM {flow_events} WHERE run_id = ? AND type = 'action.completed'"
            assert line.one(done, run) == (2,)
            assert line.one("SELECT COUNT(*) FROM {messages}") == (0,)
            assert line.locks() == []
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        go.set()
        thrower.join()
    assert thrown[0] > rounds // 8
