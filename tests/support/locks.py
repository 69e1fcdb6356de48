"""Overlap locks for tests that pass with them and without (LOCK-1).

With ``DRAMATIQ_SAGA_TEST_LOCKS=redis`` every application, bench and worker process of the tests takes locks, except where a test is about
what they keep apart (``claims_alone``). A test that is marked ``both_ways`` runs once more with them in any case. During a test with locks
the variable holds the address of a Redis database of its own, which the processes of the test inherit.
"""

from __future__ import annotations

import os

from dramatiq_saga.locks import RedisLocks

VARIABLE = "DRAMATIQ_SAGA_TEST_LOCKS"


def chosen() -> RedisLocks | None:
    """The locks of this test; ``None`` where it runs without, and for what is made before a test begins."""
    address = os.environ.get(VARIABLE, "")
    return RedisLocks(address) if "://" in address else None
