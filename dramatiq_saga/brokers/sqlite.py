"""The SQLite broker: the reservation guard (QUEUE-3) and the acknowledgement guard (QUEUE-4).

Both stand on one distinction, which the store's rollback proof makes: a write that was *refused* has demonstrably been
rolled back, whole, on the connection that began it, so it may be tried again; a write that is *unknown* may be durable, so
it never is. The guards react to refusals that are contention and to nothing else. Full or read-only disks, failed commits
and rollbacks, replaced connections and broken constraints keep the handling that Dramatiq gives any error.

* A refused reservation has changed no row and spent no attempt: it is reported once per episode, and the consumer backs
  off and selects again.
* A refused acknowledgement is tried again without running the handler: at most three DELETE statements per message in
  all, new ones admitted within five seconds, each with the connection's own busy timeout, which is never touched.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import SettingsError, WriteRefusedError
from ..store.sqlite_errors import RETRYABLE
from . import reservations
from .database import DatabaseBroker
from .settlement import Settlement

if TYPE_CHECKING:
    from ..store.database import Tx

#: DELETE statements per message, counting those that were rolled back.
MAX_STATEMENTS = 3

#: Seconds from the first attempt within which another may begin; no bound on how long a statement takes.
ADMISSION = 5.0

#: Longest pause between two attempts, in seconds.
MAX_PAUSE = 0.1


class SQLiteBroker(DatabaseBroker):
    """A :class:`DatabaseBroker` on one SQLite file, for all processes of one machine; it takes the same parameters."""

    def _check_database(self) -> None:
        if self.store.dialect != "sqlite":
            raise SettingsError("database", "this is not SQLite: use DatabaseBroker for other databases")
        self._episodes: dict[str, _Episode] = {}

    def run_reservation(
        self, queue: str, operation: Callable[[Tx], list[reservations.Delivery]]
    ) -> list[reservations.Delivery] | None:
        """QUEUE-3: a refusal that is contention has changed nothing; ``None`` says so, and the consumer looks again later."""
        try:
            deliveries = super().run_reservation(queue, operation)
        except WriteRefusedError as refusal:
            if refusal.sqlite_errorcode not in RETRYABLE:
                raise
            self._reservation_refused(queue, refusal)
            return None
        if queue in self._episodes:
            episode = self._episodes.pop(queue)
            self.logger.info(
                "Reservations on queue %r work again after %d refusals in %.1f s.",
                queue,
                episode.refusals,
                time.monotonic() - episode.since,
            )
        return deliveries

    def _reservation_refused(self, queue: str, refusal: WriteRefusedError) -> None:
        episode = self._episodes.get(queue)
        if episode is None:
            episode = self._episodes[queue] = _Episode()
            self.logger.warning(
                "SQLite refused to reserve messages of queue %r: %s. Nothing was changed and no attempt was spent; "
                "backing off and selecting again. Look for whoever holds the database locked.",
                queue,
                refusal,
            )
        episode.refusals += 1

    def run_settlement(self, operation: Settlement) -> bool:
        """QUEUE-4: a refusal that is contention is tried again within its budget; the handler is not involved."""
        attempt = _GuardedAttempt(operation)
        while True:
            try:
                return self.execute(attempt)
            except WriteRefusedError as refusal:
                if refusal.sqlite_errorcode not in RETRYABLE or not attempt.may_go_on():
                    raise
                attempt.refusal = refusal
            except _NotAdmittedError:
                raise attempt.refused() from attempt.refusal
            attempt.pause()


class _Episode:
    """Refusals in a row on one queue; the first is reported, the last is summed up."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.refusals = 0


class _GuardedAttempt:
    """A settlement with a budget. It is checked where the statement is about to run, because a refused batch runs its
    operations a second time without asking (QUEUE-8)."""

    def __init__(self, settlement: Settlement) -> None:
        self._settlement = settlement
        self._began = time.monotonic()
        self._pauses = 0
        self.refusal: WriteRefusedError | None = None

    def __call__(self, tx: Tx) -> bool:
        if self._settlement.proxy.statements and not self.may_go_on():
            raise _NotAdmittedError
        return self._settlement(tx)

    def may_go_on(self) -> bool:
        """Whether another statement may begin now."""
        return self._settlement.proxy.statements < MAX_STATEMENTS and time.monotonic() - self._began < ADMISSION

    def pause(self) -> None:
        self._pauses += 1
        ceiling = min(MAX_PAUSE, 0.005 * 2 ** min(self._pauses, 8))
        time.sleep(random.uniform(ceiling / 2, ceiling))

    def refused(self) -> WriteRefusedError:
        proxy = self._settlement.proxy
        return self.refusal or WriteRefusedError(
            f"message {proxy.message_id} could not be acknowledged within {MAX_STATEMENTS} statements and {ADMISSION} s"
        )


class _NotAdmittedError(Exception):
    """The budget is spent; raised inside the operation, so that the transaction is rolled back and proven to be."""
