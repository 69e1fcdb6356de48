"""Senders: how the messages of a write leave (DRIVE-3). Three of them, one contract (``core.Sender``).

``JoinedSender`` writes them into the transaction that creates their rows, and turns the queue row of the message at hand into
the first of them: neither can exist without the other. ``DeferredSender`` sends after the commit, over a broker that the
transaction cannot reach, and then notes ``sent_at``; what a crash leaves unsent is found by a redelivery, the next drive or
the doctor. ``InlineSender`` keeps them in a list, for a loop in the calling process (SYNC-1).

The engine does not know which one it was given. None of them imports Dramatiq: messages are built, and brokers reached,
through what the middleware hands in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MessageNotSentError
from .rows import Group, Outgoing

if TYPE_CHECKING:
    from ..store.database import Store, Tx


class JoiningBroker(Protocol):
    """What a broker whose queue lives in the store's database offers the engine."""

    store: Store

    def prepare(self, message: Any, *, delay: int | None = None) -> Any: ...
    def stage(self, tx: Tx, prepared: Any, reservation: Any | None = None) -> None: ...
    def can_take(self, prepared: Any) -> bool: ...
    def hand_over(self, tx: Tx, prepared: Any, reservation: Any) -> Any | None: ...
    def taken(self, prepared: Any, reservation: Any, *, lease_until: int) -> None: ...
    def untaken(self, reservation: Any) -> None: ...
    def retain(self, tx: Tx, prepared: Any, reservation: Any) -> bool: ...
    def settle(self, tx: Tx, reservation: Any) -> bool: ...
    def announce(self, prepared: Sequence[Any]) -> None: ...


class Barriers(Protocol):
    """Where the barriers of groups are made (PAR-1). They decide nothing, so one that cannot be made costs no message."""

    #: True where they are rows of the store's database: made in the transaction that sends the group.
    joined: bool

    def make(self, group: Group, tx: Tx | None) -> bool:
        """Make the barrier of a group, inside ``tx`` where they are joined; false where that was not possible."""
        ...


def _groups(messages: Iterable[Outgoing]) -> list[Group]:
    """The groups that messages go out in, each once."""
    return list({message.group.id: message.group for message in messages if message.group is not None}.values())


def _with_barriers(barriers: Barriers | None, messages: list[Outgoing]) -> list[Outgoing]:
    """Make the barriers of what is about to be sent; messages whose barrier could not be made go out by themselves."""
    if barriers is None or barriers.joined:
        return messages
    broken = {group.id for group in _groups(messages) if not barriers.make(group, None)}
    if not broken:
        return messages
    return [
        replace(message, group=None) if message.group is not None and message.group.id in broken else message
        for message in messages
    ]


class JoinedSender:
    """Messages and rows in one transaction."""

    joins = True
    rings = True

    def __init__(
        self,
        broker: JoiningBroker,
        build: Callable[[Outgoing], Any],
        calm: Callable[[], None],
        barriers: Barriers | None = None,
    ) -> None:
        self.broker = broker
        self.build = build
        self.calm = calm
        self.barriers = barriers

    def outbox(self, delivery: Any | None = None) -> JoinedOutbox:
        return JoinedOutbox(self, delivery)


class JoinedOutbox:
    """The messages of one write, on their way into its transaction.

    The queue row of the message at hand becomes the first of them. Where this process would be delivered that one anyway, the row
    stays reserved for it and goes straight to its workers, which saves a reservation per step.
    """

    joined = True

    def __init__(self, sender: JoinedSender, delivery: Any | None) -> None:
        self._broker = sender.broker
        self._build = sender.build
        self._delivery = delivery
        self._reservation = None if delivery is None or delivery.settled else delivery.reservation
        self._prepared: list[Any] = []
        self._takes_first = False
        self._taken: Any | None = None
        self._kept = False
        self._waits_for_host = False
        self._barriers = sender.barriers
        self._groups: list[Group] = []

    def load(self, messages: list[Outgoing]) -> None:
        broker, build = self._broker, self._build
        self._waits_for_host = broker.store.joined()
        messages = _with_barriers(self._barriers, messages)
        if self._barriers is not None and self._barriers.joined:
            self._groups = _groups(messages)
        self._prepared = [broker.prepare(build(message), delay=message.delay) for message in messages]
        self._takes_first = bool(messages) and self._reservation is not None and broker.can_take(self._prepared[0])

    def stage(self, tx: Tx) -> None:
        broker, reservation = self._broker, self._reservation
        self._kept, self._taken = False, None
        if not self._prepared:
            if reservation is not None:
                broker.settle(tx, reservation)
            return
        for group in self._groups:
            self._barriers.make(group, tx)  # type: ignore[union-attr]
        first = self._prepared[0]
        if self._takes_first:
            self._taken = broker.hand_over(tx, first, reservation)
        if self._taken is None:
            broker.stage(tx, first, reservation)
        for prepared in self._prepared[1:]:
            broker.stage(tx, prepared)
        if self._waits_for_host:
            everything = self._prepared
            tx.after_commit(lambda: broker.announce(everything))

    def keep(self, tx: Tx) -> None:
        if self._reservation is None or not self._broker.retain(tx, self._prepared[0], self._reservation):
            self.stage(tx)
        else:
            self._kept = True

    def unsure(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            self._broker.untaken(taken)

    def delivered(self) -> None:
        if self._kept:
            return
        broker, delivery = self._broker, self._delivery
        if self._reservation is not None and delivery is not None:
            delivery.settled = True
        prepared, taken = self._prepared, self._taken
        if taken is not None:
            self._taken = None
            broker.taken(prepared[0], taken, lease_until=delivery.lease_until)  # type: ignore[union-attr]
            prepared = prepared[1:]
        if prepared and not self._waits_for_host:
            broker.announce(prepared)


_SENT_STEP = "UPDATE {action_runs} SET sent_at = ? WHERE run_id = ? AND sequence = ? AND sent_at IS NULL"
_SENT_COMPENSATION = "UPDATE {compensation_runs} SET sent_at = ? WHERE run_id = ? AND sequence = ? AND sent_at IS NULL"
_SENT_RUN = "UPDATE {flow_runs} SET sent_at = ? WHERE id = ? AND sent_at IS NULL"


class DeferredSender:
    """Messages after the commit, by a broker that the transaction cannot reach."""

    joins = False
    rings = False

    def __init__(
        self,
        store: Store,
        enqueue: Callable[[Any, int | None], None],
        *,
        build: Callable[[Outgoing], Any],
        calm: Callable[[], None],
        barriers: Barriers | None = None,
    ) -> None:
        self.barriers = barriers
        self.store = store
        self.enqueue = enqueue
        self.build = build
        self.calm = calm

    def outbox(self, delivery: Any | None = None) -> DeferredOutbox:
        return DeferredOutbox(self)


class DeferredOutbox:
    """The messages of one write, waiting for its commit."""

    joined = False

    def __init__(self, sender: DeferredSender) -> None:
        self._sender = sender
        self._messages: list[Outgoing] = []
        self._sent = 0
        self._waits_for_host = False

    def load(self, messages: list[Outgoing]) -> None:
        self._messages = list(messages)
        self._waits_for_host = self._sender.store.joined()

    def stage(self, tx: Tx) -> None:
        barriers = self._sender.barriers
        if barriers is not None and barriers.joined:
            for group in _groups(self._messages):
                barriers.make(group, tx)
        if self._waits_for_host:
            tx.after_commit(self._send)

    def keep(self, tx: Tx) -> None:
        self.stage(tx)

    def unsure(self) -> None:
        pass

    def delivered(self) -> None:
        if not self._waits_for_host:
            self._send()

    def _send(self) -> None:
        """Send what has not been sent; after an error, another call goes on where this one stopped.

        Raises:
          MessageNotSentError: the rows are committed, and some of their messages are not on their way.
        """
        sender = self._sender
        if self._sent == 0:
            self._messages = _with_barriers(sender.barriers, self._messages)
        messages = self._messages
        while self._sent < len(messages):
            message = messages[self._sent]
            try:
                sender.enqueue(sender.build(message), message.delay)
            except Exception as error:
                raise MessageNotSentError(
                    f"the message of {message.actor} for run {message.run_id} could not be sent: {type(error).__name__}: {error}"
                ) from error
            self._sent += 1
        if messages:
            now = sender.store.clock.now()
            sender.store.write(lambda tx: self._note(tx, now))

    def _note(self, tx: Tx, now: int) -> None:
        for message in self._messages:
            if message.kind == "step":
                tx.run(_SENT_STEP, (now, message.run_id, message.sequence))
            elif message.kind == "compensation":
                tx.run(_SENT_COMPENSATION, (now, message.run_id, message.sequence))
            else:
                tx.run(_SENT_RUN, (now, message.run_id))


class InlineSender:
    """Messages for a loop in this process: :attr:`queue` holds what is to be run next (SYNC-1)."""

    joins = True
    rings = False  # its loop waits by itself

    def __init__(self) -> None:
        self.queue: deque[Outgoing] = deque()

    def calm(self) -> None:
        """Whoever runs a loop in this thread is not to be shut out."""

    def outbox(self, delivery: Any | None = None) -> InlineOutbox:
        return InlineOutbox(self)


class InlineOutbox:
    """The messages of one write, for the loop that wrote it."""

    joined = True

    def __init__(self, sender: InlineSender) -> None:
        self._sender = sender
        self._messages: list[Outgoing] = []

    def load(self, messages: list[Outgoing]) -> None:
        self._messages = messages

    def stage(self, tx: Tx) -> None:
        pass

    def keep(self, tx: Tx) -> None:
        pass

    def unsure(self) -> None:
        self.delivered()  # a message about a row that is not there finds nothing to claim

    def delivered(self) -> None:
        self._sender.queue.extend(self._messages)
        self._messages = []
