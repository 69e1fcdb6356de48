"""Tracebacks as a test author wants to read them: from the first line of the code under test.

Between a test and a step's body stand a dozen frames of this package and of Dramatiq, the same every time. They are left out where
the code under test has frames of its own; an error that never came there keeps the frame that raised it.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import dramatiq

_OURS = (str(Path(__file__).parents[1]), str(Path(dramatiq.__file__).parent))


def start_at_the_code_under_test(error: BaseException) -> None:
    """Cut off what leads to the code under test."""
    error.__traceback__ = _cut(error.__traceback__)


def _cut(trace: TracebackType | None) -> TracebackType | None:
    last = trace
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            return trace
        last, trace = trace, trace.tb_next
    return last
