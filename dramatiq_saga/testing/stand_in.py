"""The broker that stands in for an application's own while a test runs: Dramatiq's StubBroker, emptied by hand.

It joins the transactions of the store in memory as a database broker does, so rows and messages appear together. A message is
taken through what Dramatiq's worker does with one, in the thread of the test: every hook of the application's middleware, the
actor, then acknowledgement or rejection. Its due time is one of the test's clock. Nothing here reaches a server.

Back-off is deterministic: Dramatiq spreads each delay at random between once and twice its length; here it is its length.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import TYPE_CHECKING, Any

from dramatiq import Message, Retry
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import compute_backoff, dq_name, q_name
from dramatiq.middleware import GroupCallbacks, Middleware, Retries, SkipMessage
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF
from dramatiq.rate_limits.backends import StubBackend as StubRateLimits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend as StubResults

from ..step import is_ours
from .tracebacks import start_at_the_code_under_test

if TYPE_CHECKING:
    from dramatiq import Broker

    from ..clock import ManualClock
    from ..store.database import Store, Tx


@dataclass(order=True, slots=True)
class Letter:
    """A message on its way: when it is due, and in which order it was sent."""

    due: int
    number: int
    broker: StandIn = field(compare=False)
    data: bytes = field(compare=False)

    @property
    def message(self) -> Message[Any]:
        """The message, decoded anew."""
        return Message.decode(self.data)


class Post:
    """What has been sent and not been delivered, by due time. Threads of the code under test may send too."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._letters: list[Letter] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, broker: StandIn, data: bytes, *, delay: float) -> None:
        """Send: due ``delay`` milliseconds from now."""
        with self._lock:
            due = self.clock.now() + max(0, round(delay))
            heapq.heappush(self._letters, Letter(due, next(self._numbers), broker, data))

    def take(self) -> Letter | None:
        """The next letter that is due; ``None`` without one."""
        with self._lock:
            if self._letters and self._letters[0].due <= self.clock.now():
                return heapq.heappop(self._letters)
            return None

    def letters(self) -> list[Letter]:
        """What waits, in the order in which it will be delivered."""
        with self._lock:
            return sorted(self._letters)


@dataclass(slots=True)
class Prepared:
    """A message that is ready to be staged in a transaction."""

    message: Message[Any]
    data: bytes
    delay: int | None


class Delivered(MessageProxy):
    """A message in the hands of the test's thread. ``settled`` once a transaction has consumed it."""

    def __init__(self, letter: Letter) -> None:
        super().__init__(letter.message)
        self.settled = False
        self.reservation = letter


class StandIn(StubBroker):
    """Stands in for ``stands_in_for``, or for nothing where a test has no application.

    Attributes:
      stands_in_for: the application's broker.
      store: the store in memory whose transactions messages join, once there is one.
    """

    def __init__(self, post: Post, *, stands_in_for: Broker | None, middleware: list[Middleware] | None) -> None:
        self.post = post
        self.store: Store | None = None
        self.stands_in_for = stands_in_for
        self.at_hand: MessageProxy | None = None
        self.drain: Callable[[], None] = _nothing
        self.is_fault: Callable[[BaseException], bool] = _is_none
        super().__init__(middleware)
        if stands_in_for is not None:
            self.actor_options |= stands_in_for.actor_options

    def take_over(self, queue_name: str) -> None:
        """Know a queue that the application has declared on its own broker; its middleware has been told of that one already."""
        name = q_name(queue_name)
        self.queues.setdefault(name, Queue())
        self.queues.setdefault(dq_name(name), Queue())
        self.delay_queues.add(dq_name(name))

    # --- sending -----------------------------------------------------------------------------------------------------

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Send at once, outside of every transaction."""
        prepared = self.prepare(message, delay=self._without_jitter(message, delay))
        self.post.put(self, prepared.data, delay=prepared.delay or 0)
        self.announce([prepared])
        return prepared.message

    def _without_jitter(self, message: Any, delay: int | None) -> int | None:
        """What Retries would have said without its random part, where it is Retries that asks for the message at hand again."""
        at_hand = self.at_hand
        if delay is None or at_hand is None or message.message_id != at_hand.message_id:
            return delay
        error, tries = at_hand._exception, at_hand.options.get("retries", 0)
        retries = next((middleware for middleware in self.middleware if isinstance(middleware, Retries)), None)
        actor = self.actors.get(message.actor_name)
        if not tries or error is None or retries is None or actor is None:
            return delay
        if isinstance(error, Retry) and error.delay is not None:
            return delay
        options = {**actor.options, **at_hand.options}
        factor = options.get("min_backoff", retries.min_backoff)
        longest = min(options.get("max_backoff", retries.max_backoff), DEFAULT_MAX_BACKOFF)
        return compute_backoff(tries - 1, factor=factor, max_backoff=longest, jitter=False)[1]

    # --- what an engine asks of a broker that joins its transactions -------------------------------------------------

    def prepare(self, message: Any, *, delay: int | None = None) -> Prepared:
        """Encode it as a server would be sent it, after the hooks."""
        if isinstance(message, MessageProxy):
            message = message._message
        self.emit_before("enqueue", message, delay)
        return Prepared(message, message.encode(), delay)

    def stage(self, tx: Tx, prepared: Prepared, reservation: Letter | None = None) -> None:
        """Sent once ``tx`` has committed, and only then."""
        tx.after_commit(lambda: self.post.put(self, prepared.data, delay=prepared.delay or 0))

    def can_take(self, prepared: Prepared) -> bool:
        """Everything goes through the post."""
        return False

    def hand_over(self, tx: Tx, prepared: Prepared, reservation: Letter) -> None:
        """Everything goes through the post."""

    def retain(self, tx: Tx, prepared: Prepared, reservation: Letter) -> bool:
        """Nothing is delivered again after a crash here: the message is sent like any other."""
        return False

    def release(self, tx: Tx, reservation: Letter, *, delay: int = 0) -> bool:
        """The message at hand goes back, due after ``delay``."""
        tx.after_commit(lambda: self.post.put(self, reservation.data, delay=delay))
        return True

    def settle(self, tx: Tx, reservation: Letter) -> bool:
        """The message at hand was taken out of the post when it was delivered."""
        return True

    def taken(self, prepared: Prepared, reservation: Letter, *, lease_until: int) -> None:
        """Never called: nothing is handed over."""

    def untaken(self, reservation: Letter) -> None:
        """Never called: nothing is handed over."""

    def announce(self, prepared: Sequence[Prepared]) -> None:
        """The hooks after a message has been sent."""
        for one in prepared:
            self.emit_after("enqueue", one.message, one.delay)

    # --- delivering --------------------------------------------------------------------------------------------------

    def process(self, letter: Letter) -> tuple[Delivered, BaseException | None, bool]:
        """Take one message through what Dramatiq's worker does with it.

        Returns the message, what its actor or a hook raised, and whether the actor was called. Raises what is nobody's failure: an
        error of the engine's own, which a worker would log and try again for ever.
        """
        __tracebackhide__ = True
        message = self.at_hand = Delivered(letter)
        error: BaseException | None = None
        called = False
        try:
            if message.actor_name not in self.actors:
                message.fail()
                self._post_process(message)
                return message, None, False
            self.emit_before("process_message", message)
            result = None
            if not message.failed:
                called = True
                result = self.actors[message.actor_name](*message.args, **message.kwargs)
            self.emit_after("process_message", message, result=result)
        except SkipMessage as skip:
            if message.failed:
                message.stuff_exception(skip)
            self.emit_after("skip_message", message)
        except BaseException as caught:
            error = caught
            if called and is_ours(message) and self.is_fault(caught):
                raise
            start_at_the_code_under_test(caught)
            message.stuff_exception(caught)
            self._log(message, caught)
            self.emit_after("process_message", message, exception=caught)
        finally:
            self.at_hand = None
        self._post_process(message)
        return message, error, called

    def _log(self, message: Delivered, error: BaseException) -> None:
        """As a worker logs it: so a test that fails shows what was raised, whatever it has asserted."""
        throws = message.options.get("throws") or self.actors[message.actor_name].options.get("throws")
        if throws and isinstance(error, throws):
            self.logger.info("Failed to process message %s with expected exception %s.", message, type(error).__name__)
        elif not isinstance(error, Retry):
            self.logger.error("Failed to process message %s with unhandled exception.", message, exc_info=error)

    def _post_process(self, message: Delivered) -> None:
        if message.failed:
            self.emit_before("nack", message)
            self.dead_letters_by_queue[message.queue_name].append(message)
            self.emit_after("nack", message)
        else:
            self.emit_before("ack", message)
            self.emit_after("ack", message)

    def join(self, queue_name: str, *, timeout: int | None = None, fail_fast: bool | None = None) -> None:
        """As with Dramatiq's stub broker, what is due is done afterwards; it is done here, by ``drain()``."""
        self.drain()


def _nothing() -> None:
    pass


def _is_none(_: BaseException) -> bool:
    return False


def for_tests(middleware: Iterable[Middleware], without: tuple[type[Middleware], ...]) -> list[Middleware]:
    """An application's middleware as it can run in a test: what talks to a server has its stub, what serves metrics is left out."""
    kept: list[Middleware] = []
    for one in middleware:
        if isinstance(one, without) or type(one).__module__ == "dramatiq.middleware.prometheus":
            continue
        if isinstance(one, Results):
            one = Results(backend=StubResults(), store_results=one.store_results, result_ttl=one.result_ttl)  # type: ignore[no-untyped-call]
        elif isinstance(one, GroupCallbacks):
            one = GroupCallbacks(StubRateLimits())  # type: ignore[no-untyped-call]
        kept.append(one)
    return kept


__all__ = ["Delivered", "Letter", "Post", "StandIn", "for_tests"]
