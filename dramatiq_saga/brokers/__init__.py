"""Dramatiq brokers that keep their queues in the store's database (QUEUE-1 to QUEUE-8).

They serve any Dramatiq application; sagas are not needed. Used together with sagas, messages join the transaction that
makes them necessary.
"""

from .database import DatabaseBroker
from .dead_letters import DeadLetter, QueueStats
from .messages import DatabaseMessageProxy, Prepared, Reservation
from .sqlite import SQLiteBroker

__all__ = ["DatabaseBroker", "DatabaseMessageProxy", "DeadLetter", "Prepared", "QueueStats", "Reservation", "SQLiteBroker"]
