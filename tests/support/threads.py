"""Which writer threads there are: tests ask for those that came or stayed, for other tests of the process may have their own."""

from __future__ import annotations

import threading


def writer_threads() -> set[threading.Thread]:
    """The writer threads of this process that are alive now."""
    return {thread for thread in threading.enumerate() if thread.name == "dramatiq-saga-writer"}
