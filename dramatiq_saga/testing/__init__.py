"""Testing workflows without a server, without a worker and without waiting (C61): see docs/how-to/testing.md.

PYTEST_DONT_REWRITE: no assertions stand here, and pytest would warn where this is imported before it is named as a plugin.
"""

from ..histories import History, ReplayedHistory, load_history, record_history, replay_history
from .fixture import saga
from .tester import SagaTester

__all__ = ["History", "ReplayedHistory", "SagaTester", "load_history", "record_history", "replay_history", "saga"]
