"""What makes the suite quick without proving less: nobody waits for a disk, and processes boot from compiled files.

No test cuts the power. A process that is killed loses nothing that it has handed to the kernel or to a server, so whether that has
reached a disk makes no difference to any fact that is asserted. Everything here is set in the environment, which the processes of a test
inherit, and gives way to what somebody has set before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

MEMORY = Path("/dev/shm")

#: Bytes that must be free there. Containers have 64 MB by default, which is too little; what tests that passed have written is removed.
ROOM = 512 * 1024**2


def make_haste(environment: MutableMapping[str, str] = os.environ, memory: Path = MEMORY) -> None:
    """To be called before pytest makes its first temporary folder."""
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ROOM:
        environment.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))
    environment.setdefault("PGOPTIONS", "-c synchronous_commit=off")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process would compile the package anew
