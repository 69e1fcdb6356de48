"""Chaos: sagas made up by a seed, workers killed and paused at random, messages doubled and dropped, files locked.

:func:`make_up` invents what runs do; :class:`Chaos` does to them what a bad day does; ``invariants.py`` says what must hold all the
same. The same seed makes up the same runs and the same misfortunes; how they fall together
is up to the machine, so a seed that fails is a lead, and what it leads to becomes a test by interleaving.

Leases are on and shorter than most pauses: a worker that is stopped and goes on is one of two that work on the same row, and only
the fence tells their outcomes apart. Every other seed has reclaim windows as well.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from dramatiq import Message
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from dramatiq_saga import FlowHandle, SagaError, query
from dramatiq_saga.brokers import DatabaseBroker
from dramatiq_saga.errors import StoreError
from dramatiq_saga.operations import Operator
from dramatiq_saga.store.database import Store
from tests.processes import chaos_app
from tests.support.effects import VARIABLE, EffectLog
from tests.support.processes import WorkerProcess
from tests.support.waiting import DEADLINE, eventually

Instruction = list[Any]
Body = tuple[str, int, str, int]  # run, sequence, what, attempt
T = TypeVar("T")

#: Short windows, so that a bad day takes seconds. A paused worker outlives its lease on purpose.
SETTINGS: dict[str, Any] = {
    "reclaim.dead_workers.enabled": True,
    "reclaim.dead_workers.lease_seconds": 1,
    "reclaim.max_claims": 50,
    "repair.enabled": True,
    "repair.grace_seconds": 1,
    "repair.max_attempts": 1000,
    "repair.backoff.base_seconds": 1,
    "repair.backoff.max_seconds": 1,
    "monitor.expiration.backoff.base_seconds": 1,
    "monitor.expiration.backoff.max_seconds": 1,
}

#: Of every other seed. A paused worker outlives its reclaim deadline too.
WINDOWS: dict[str, Any] = {
    "actions.reclaim.stale_running.enabled": True,
    "actions.reclaim.stale_running.after_seconds": 2,
    "sagas.reclaim.stale_running.enabled": True,
    "sagas.reclaim.stale_running.after_seconds": 2,
}

#: What a run may be told to do, and how often.
INSTRUCTIONS = {
    "undone": 6, "optional": 1, "parked": 1, "parallel": 2, "saga": 1, "signal": 1, "sleep": 1, "recorded": 1, "caught": 1, "timeout": 1,
    "child": 2,
}  # fmt: skip

#: What may go wrong, and how often.
MISFORTUNES = {
    "kill": 3, "pause": 4, "double": 4, "drop": 4, "lock": 1, "forget": 1, "cancel": 1, "compensate": 1, "signal": 4,
    "sweep": 3, "term": 1,
}  # fmt: skip


def every_kind_first(dice: random.Random, weights: dict[str, int]) -> Iterator[str]:
    """Each kind once, in any order; after that as the weights have it."""
    kinds = list(weights)
    dice.shuffle(kinds)
    yield from kinds
    while True:
        yield dice.choices(list(weights), list(weights.values()))[0]


# --- runs ------------------------------------------------------------------------------------------------------------


def make_up(dice: random.Random, *, depth: int = 0, first: str | None = None) -> list[Instruction]:
    """What one run does."""
    instructions = [_instruction(dice, depth, first)]
    instructions += [_instruction(dice, depth) for _ in range(dice.randint(0, 4))]
    if dice.random() < 0.25:
        instructions.append(["raise"])
    return instructions


def _instruction(dice: random.Random, depth: int, kind: str | None = None) -> Instruction:
    weights = {name: weight for name, weight in INSTRUCTIONS.items() if depth == 0 or name != "child"}
    match kind or dice.choices(list(weights), list(weights.values()))[0]:
        case "parallel":
            members = [_member(dice, depth) for _ in range(dice.randint(0, 6))]
            return ["parallel", members, dice.choice([None, None, 1, 2]), dice.choice(["fail_fast", "wait_all_then_fail"])]
        case "saga":
            return ["saga", [_step(dice) for _ in range(dice.randint(1, 3))], dice.random() < 0.7]
        case "signal":
            return ["signal", dice.choice("ab"), None]
        case "timeout":
            return ["signal", dice.choice("ab"), round(dice.uniform(0.1, 1.0), 2)]
        case "sleep":
            return ["sleep", round(dice.uniform(0.0, 1.0), 2)]
        case "recorded":
            return ["recorded"]
        case "caught":
            return ["caught", ["undone", "broken", "fine"]]
        case "child":
            return ["child", make_up(dice, depth=depth + 1), dice.choice(["abandon", "cancel", "fail"])]
        case "optional":
            return ["optional", dice.choice(["fine", "broken"])]
        case "parked":
            return ["parked", dice.randint(0, 2)]
    return _step(dice)


def _member(dice: random.Random, depth: int) -> Instruction:
    roll = dice.random()
    if roll < 0.1 and depth == 0:
        return ["child", make_up(dice, depth=depth + 1), "cancel"]
    if roll < 0.2:
        return ["optional", dice.choice(["fine", "broken"])]
    if roll < 0.25:
        return ["parked", dice.randint(0, 1)]
    return _step(dice)


def _step(dice: random.Random) -> Instruction:
    how = dice.choices(["fine", "slow", "flaky", "broken"], [8, 6, 3, 1])[0]
    return ["undone", how, dice.choices(["fine", "flaky"], [4, 1])[0]]


# --- a bad day -------------------------------------------------------------------------------------------------------


class Chaos:
    """One application on one database, and what happens to it."""

    def __init__(
        self,
        seed: int,
        environment: dict[str, str],
        *,
        start_worker: Callable[..., WorkerProcess],
        workers: int = 2,
        lock: Callable[[float], None] | None = None,
    ) -> None:
        self.dice = random.Random(seed)
        self.effects = EffectLog(environment[VARIABLE])
        self.happened: Counter[str] = Counter()
        settings = {**SETTINGS, **(WINDOWS if self.dice.random() < 0.5 else {})}
        self.environment = {**environment, chaos_app.SETTINGS: json.dumps(settings), chaos_app.RETRY_AFTER: "1"}
        self.broker = chaos_app.connect(self.environment)
        self.told = chaos_app.declare(self.broker)
        self.operator = Operator.on_broker(self.broker)
        self.operator.init()
        self.store: Store = self.operator.store
        self._start_worker = start_worker
        self._lock = lock
        misfortunes = {kind: weight for kind, weight in MISFORTUNES.items() if kind != "lock" or lock is not None}
        self._misfortunes = every_kind_first(self.dice, misfortunes)
        self._instructions = every_kind_first(self.dice, INSTRUCTIONS)
        self.workers = [self._worker() for _ in range(workers)]
        self.paused: set[int] = set()  # process groups
        self.watching: list[threading.Thread] = []  # that read the effects, so they end with the day
        self.runs: list[FlowHandle[Any]] = []

    def _worker(self) -> WorkerProcess:
        return self._start_worker("tests.processes.chaos_app", env=self.environment, threads=3)

    def send(self, count: int) -> None:
        for _ in range(count):
            self._start(make_up(self.dice, first=next(self._instructions)))

    def _start(self, instructions: list[Instruction]) -> None:
        self.runs.append(self._patiently(lambda: self.told.send(instructions)))

    def misfortune(self) -> None:
        """One thing that goes wrong."""
        kind = next(self._misfortunes)
        if self._patiently(lambda: self._happen(kind)):
            self.happened[kind] += 1

    def _patiently(self, action: Callable[[], T]) -> T:
        """A worker that was stopped in the middle of a write keeps the whole file locked until it goes on."""
        try:
            return action()
        except StoreError:
            self._resume()
            return action()

    def _happen(self, kind: str) -> bool:
        """False where there was nothing to be done harm to."""
        match kind:
            case "kill":
                self._replace(self.dice.randrange(len(self.workers)), lambda worker: worker.kill())
            case "term":
                self._replace(self.dice.randrange(len(self.workers)), lambda worker: worker.send(signal.SIGTERM))
            case "pause":
                return self._pause(self.dice.uniform(2.0, 6.0))
            case "double" | "drop":
                return self._lose_or_double(kind)
            case "forget":  # as if somebody had tidied up
                return bool(self.store.write(lambda tx: tx.run("DELETE FROM {workers}")))
            case "lock":
                assert self._lock is not None
                self._lock(self.dice.uniform(0.1, 2.5))
            case "cancel":
                with suppress(SagaError):
                    return self.dice.choice(self.runs).cancel("a bad day")
                return False
            case "compensate":
                with suppress(SagaError):
                    return self.dice.choice(self.runs).compensate("a bad day")
                return False
            case "signal":
                self.answer(self.dice.choice(self.runs))
            case "sweep":
                self.operator.sweep()
        return True

    def _pause(self, seconds: float) -> bool:
        """Stop a worker in the middle of a body. It goes on as soon as another has begun that body again, or after a while: it may
        hold locks that everybody waits for."""
        if self.paused:
            return False
        self._start([["undone", "slow", "fine"]])
        try:
            index, bodies = eventually(self._busy, 3)
        except AssertionError:  # everybody waits for something else
            return False
        group = self.workers[index].pid
        self.paused.add(group)
        os.killpg(group, signal.SIGSTOP)

        def go_on() -> None:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)
            self.paused.discard(group)

        def watch() -> None:  # may itself wait for a lock of the one that is stopped
            with suppress(AssertionError, StoreError):
                eventually(lambda: group not in self.paused or self._begun_again(bodies), 1)
            with suppress(AssertionError, StoreError):
                self.operator.sweep()  # not every broker takes a message from a worker that is only stopped
                eventually(lambda: group not in self.paused or self._begun_again(bodies), seconds)
            self.store.close_thread()
            if isinstance(self.broker, RabbitmqBroker):
                del self.broker.connection
            go_on()

        at_the_latest = threading.Timer(seconds, go_on)
        at_the_latest.daemon = True
        at_the_latest.start()
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        self.watching.append(watching)
        return True

    def _busy(self) -> tuple[int, set[Body]] | None:
        """A worker that is in the middle of bodies, and which."""
        running: dict[Body, int] = {}
        for entry in self.effects.entries()[-40:]:
            body = (entry["run"], entry["sequence"], entry["effect"].split()[0], entry["attempt"])
            running[body] = entry["pid"] if " " not in entry["effect"] else 0
        for index, worker in enumerate(self.workers):
            bodies = {body for body, pid in running.items() if pid and _is_in(pid, worker)}
            if bodies:
                return index, bodies
        return None

    def _begun_again(self, bodies: set[Body]) -> bool:
        return any(
            entry["attempt"] > attempt
            for run, sequence, effect, attempt in bodies
            for entry in self.effects.entries(effect, run=run, sequence=sequence)
        )

    def _replace(self, index: int, end: Callable[[WorkerProcess], None]) -> None:
        if self.workers[index].pid in self.paused:
            self._resume()
        end(self.workers[index])
        self.workers[index] = self._worker()

    def _resume(self) -> None:
        for group in list(self.paused):
            os.killpg(group, signal.SIGCONT)
        self.paused.clear()

    def _lose_or_double(self, kind: str) -> bool:
        """Do that to a message that waits; with a database also to one that somebody holds."""
        if isinstance(self.broker, DatabaseBroker):
            state = "state <> 3" if kind == "double" else "state < 2"
            numbers = [row[0] for row in self.store.read(lambda tx: tx.all(f"SELECT id FROM {{messages}} WHERE {state}"))]
            if not numbers:
                return False
            statement = (
                "INSERT INTO {messages} (queue, state, priority, available_at, attempts, actor, message_id, enqueued_at, message) "
                "SELECT queue, 0, priority, available_at, 0, actor, message_id, enqueued_at, message FROM {messages} WHERE id = ?"
            )
            if kind == "drop":
                statement = "DELETE FROM {messages} WHERE id = ? AND state < 2"
            chosen = self.dice.choice(numbers)
            return bool(self.store.write(lambda tx: tx.run(statement, (chosen,))))
        try:
            message = eventually(self._take, 0.5)
        except AssertionError:  # everything is in somebody's hands
            return False
        for _ in range(2 if kind == "double" else 0):
            self.broker.enqueue(message)
        return True

    def _take(self) -> Message[Any] | None:
        """A message out of the queue of another broker."""
        if isinstance(self.broker, RedisBroker):
            client, key = self.broker.client, f"{self.broker.namespace}:default"
            number = client.lpop(key)
            body = None if number is None else client.hget(f"{key}.msgs", number)
            client.hdel(f"{key}.msgs", number or b"")
        else:
            channel: Any = self.broker.channel  # type: ignore[attr-defined]
            _, _, body = channel.basic_get("default", auto_ack=True)
        return None if body is None else Message.decode(body)

    def answer(self, run: FlowHandle[Any]) -> None:
        """Send a run the signals that it waits for."""
        names = self.store.read(
            lambda tx: tx.all(
                "SELECT name FROM {waits} WHERE run_id = ? AND status = 'waiting' AND name IS NOT NULL", (run.id,)
            )
        )
        for (name,) in names:
            with suppress(SagaError):
                run.signal(name, {"answer": name})

    def settle(self) -> None:
        """The bad day is over: every run comes to its end."""

        def ended() -> bool:
            self.operator.sweep()
            live = list(query(status=["pending", "running", "waiting"], broker=self.broker))
            for run in live:
                self.answer(run)
            return not live and not self._rolling_back()

        try:
            eventually(ended, DEADLINE * 4 * max(1, len(self.runs) / 40), interval=0.2, because="every run ends")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.stuck()}") from None

    def stuck(self) -> str:
        """What is known of the runs that have not ended."""
        runs = self._read(
            "SELECT id, status, rollback, revision, wakes, wakes_seen, hold_error, parent_id, close_request, args FROM {flow_runs} "
            "WHERE ended_at IS NULL OR rollback = 'running'"
        )
        told = []
        for run in runs[:5]:
            told.append(f"run {run}")
            for table in ("action_runs", "compensation_runs", "children", "waits", "blocks"):
                told += [f"  {table}: {row[1:24]}" for row in self._read(f"SELECT * FROM {{{table}}} WHERE run_id = ?", run[0])]
            for row in self._read(
                "SELECT id, queue, state, actor, available_at, reserved_at, lease_until, attempts, message FROM {messages}"
            ):
                if run[0].encode() in bytes(row[-1]):
                    told.append(f"  message: {row[:-1]} {bytes(row[-1])[:300]!r}")
        return "\n".join(told)

    def _read(self, sql: str, *params: object) -> list[Any]:
        return self.store.read(lambda tx: tx.all(sql, params))

    def _rolling_back(self) -> int:
        row = self.store.read(lambda tx: tx.one("SELECT COUNT(*) FROM {flow_runs} WHERE rollback = 'running'"))
        return int(row[0]) if row else 0

    def close(self) -> None:
        self._resume()
        for watching in self.watching:
            watching.join(timeout=30)
        for worker in self.workers:
            worker.kill()


def _is_in(pid: int, worker: WorkerProcess) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == worker.pid
    return False
