"""What a message does about its overlap lock: takes it, waits, goes on without it, takes it over, gives it back (LOCK-1).

A message takes the lock of its step, its compensation or its run before it claims or drives, and keeps it until it is acknowledged or
rejected. One that finds the lock held is put back for a little while, so a duplicate neither runs nor counts as done. Correctness never
rests on that: whatever a lock says, the claim decides who runs and the fence whose outcome counts. So three things end a lock early:

* nobody is at what it stands for any more: its holder's worker is dead (RECLAIM-5), the row may be claimed again (CLAIM-1), or is settled;
  recovery takes as long as without locks, and the lock is taken over;
* the holder's own message has been delivered again, no claim rests on it, and that is :data:`GONE_MS` ago: either the holder is gone, or
  the claim (CLAIM-1) and a drive's commit (DRIVE-1) decide between the two, as they do without locks;
* the back end does not answer: work goes on without locks, a log line says so, and it is asked again after :data:`PAUSE`. What could
  not be given back is given back then, also by a process that has nothing else to ask.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from typing import TYPE_CHECKING, TypeVar

import structlog

from .engine import liveness

if TYPE_CHECKING:
    from .engine.core import Engine
    from .locks import LockBackend
    from .step import Delivery
    from .store.database import Tx

T = TypeVar("T")

#: How long work goes on without locks before a back end that did not answer is asked again, in seconds.
PAUSE = 5.0

#: The log says so at most this often, in seconds.
SAY_EVERY = 60.0

#: A message that is put back comes again after half the time for which the lock was held by then, within these milliseconds.
SOONEST_MS, LATEST_MS = 50, 10_000

#: How long a message may be at work without a claim before its redelivery no longer believes in it, in milliseconds.
GONE_MS = 5_000

#: The end of what nobody knows the end of.
_OPEN = 2**62

#: How often a message that blocks looks again, in seconds.
LOOK_EVERY = 0.02

_STEP = "SELECT status, given_up, reclaim_stale_at FROM {action_runs} WHERE run_id = ? AND sequence = ?"
_COMPENSATION = _STEP.replace("action_runs", "compensation_runs")


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock of one delivery."""

    key: str
    token: str
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Holder:
    """What a token says of who made it: the worker process, when (engine time, in milliseconds), and for which message."""

    worker: str
    at: int
    message_id: str

    @classmethod
    def of(cls, token: str) -> Holder | None:
        """``None`` for what is no token of ours."""
        try:
            worker, at, _, message_id = token.split(" ", 3)
            return cls(worker, int(at), message_id)
        except ValueError:
            return None


class Overlaps:
    """The overlap locks of one worker process."""

    def __init__(self, backend: LockBackend, engine: Engine, stopping: threading.Event) -> None:
        self._backend = backend
        self._engine = engine
        self._settings = engine.settings.locks
        self._stopping = stopping
        self._away_until = 0.0  # monotonic
        self._say_after = 0.0
        self._owed: deque[Lock] = deque(maxlen=1000)  # taken, and not given back because the back end was away
        self._untimed: list[None] = [None]  # one token: whoever takes it starts the timer that gives back what is owed
        self._log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")

    def enter(self, delivery: Delivery) -> int | None:
        """Take the lock of a message: ``None`` means go on. Otherwise another message is at it, and this one may come again after so
        many milliseconds. May be called again after an interrupt; :meth:`leave` ends it either way. Raises StoreError."""
        if delivery.lock is None:
            if self._is_away:
                return None
            delivery.lock = self._lock_of(delivery)
        lock = delivery.lock
        holder = self._take(lock)
        until = time.monotonic() + self._settings.block_seconds
        while holder not in (None, lock.token) and time.monotonic() < until and not self._stopping.wait(LOOK_EVERY):
            holder = self._take(lock)
        while holder is not None and holder != lock.token:
            delay = self._delay(delivery, holder)
            if delay is not None:
                self._log.debug("overlap_put_back", key=lock.key, holder=holder, again_in=delay / 1000)
                delivery.lock = None
                return delay
            self._log.info("lock_taken_over", key=lock.key, holder=holder)
            holder = self._take(lock, instead_of=holder)
        return None

    def leave(self, delivery: Delivery) -> None:
        """Give back what :meth:`enter` has taken, if it has. May be called again."""
        lock = delivery.lock
        if lock is None:
            return
        if self._ask(lambda: self._backend.release(lock.key, lock.token)) is None:
            self._owe(lock)
        delivery.lock = None

    # --- whose lock, and for how long ----------------------------------------------------------------------------------

    def _lock_of(self, delivery: Delivery) -> Lock:
        settings, job = self._settings, delivery.job
        if job is None:
            key, ttl = f"run:{delivery.run_id}", settings.run_ttl_seconds
        elif job.kind == "step":
            key, ttl = f"action:{job.run_id}:{job.sequence}", settings.action_ttl_seconds
        else:
            key, ttl = f"compensation:{job.run_id}:{job.sequence}", settings.compensation_ttl_seconds
        heart = liveness.heart_of(self._engine)
        worker = self._engine.worker_id if heart is None else heart.id
        token = f"{worker} {self._engine.now()} {secrets.token_hex(6)} {delivery.message.message_id}"
        return Lock(f"{settings.prefix}:{key}", token, max(1, round(ttl * 1000)))

    def _delay(self, delivery: Delivery, token: str) -> int | None:
        """For how long to stay away; ``None`` where nobody is at it any more.

        Who else may be here: the holder, who looked dead and is not. It goes on, and so does this one: the claim lets one of them run,
        or the fence refuses the first one's outcome. test_a_holder_that_was_passed_by_gives_back_nothing_that_is_not_its_own
        """
        engine, holder = self._engine, Holder.of(token)
        now = engine.now()
        until = engine.store.read(lambda tx: self._busy_until(tx, delivery, holder, now=now))
        if until <= now:
            return None
        held = 0 if holder is None else abs(now - holder.at)
        return min(max(held // 2, SOONEST_MS), LATEST_MS, until - now + 1)

    def _busy_until(self, tx: Tx, delivery: Delivery, holder: Holder | None, *, now: int) -> int:
        """The moment up to which somebody may be at it, as far as anybody can tell; 0 where that is over."""
        engine, job, unclaimed = self._engine, delivery.job, _OPEN
        if holder is not None:
            if liveness.is_dead(tx, engine, holder.worker, now=now):
                return 0
            if holder.message_id == delivery.message.message_id:
                unclaimed = holder.at + GONE_MS
        if job is None:
            return unclaimed
        row = tx.one(_STEP if job.kind == "step" else _COMPENSATION, (job.run_id, job.sequence))
        status, given_up, stale_at = row or (None, None, None)
        if status == "running":
            lease = liveness.lease_of(tx, engine, step=job.kind == "step", run_id=job.run_id, sequence=job.sequence)
            return min((moment for moment in (stale_at, lease) if moment is not None), default=_OPEN)
        return unclaimed if status == "pending" or (status == "failed" and not given_up) else 0

    # --- asking the back end -------------------------------------------------------------------------------------------

    def _take(self, lock: Lock, instead_of: str | None = None) -> str | None:
        return self._ask(lambda: self._backend.take(lock.key, lock.token, ttl_ms=lock.ttl_ms, instead_of=instead_of))

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until

    def _ask(self, call: Callable[[], T]) -> T | None:
        """The back end's answer; ``None`` while it is away. What is owed to it is given back first."""
        if self._is_away:
            return None
        try:
            self._pay()
            return call()
        except Exception as error:
            self._note(error)
            return None

    def _pay(self) -> None:
        with suppress(IndexError):  # another thread has paid the last one
            while self._owed:
                lock = self._owed.popleft()
                try:
                    self._backend.release(lock.key, lock.token)
                except BaseException:
                    self._owe(lock)
                    raise

    def _owe(self, lock: Lock) -> None:
        self._owed.append(lock)
        self._pay_later()

    def _pay_later(self) -> None:
        """Have what is owed given back after :data:`PAUSE`, unless that is to happen already.

        Who else may be here: the timer, which ends. It looks at what is owed after it has put the token back, so either it sees a lock
        that is owed meanwhile, or whoever owes it finds the token. A bare token, because an interrupt would leave a lock behind.
        """
        try:
            self._untimed.pop()
        except IndexError:
            return
        timer = Timer(PAUSE, self._pay_now)
        timer.daemon = True
        timer.start()

    def _pay_now(self) -> None:
        self._ask(lambda: None)
        self._untimed.append(None)
        if self._owed:
            self._pay_later()

    def _note(self, error: Exception) -> None:
        now = time.monotonic()
        self._away_until = now + PAUSE
        if now >= self._say_after:
            self._say_after = now + SAY_EVERY
            self._log.warning(
                "locks_unavailable",
                error=f"{type(error).__name__}: {error}",
                meaning="work goes on without overlap locks; claims alone keep it from counting twice",
            )
