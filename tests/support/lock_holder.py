"""``python -m tests.support.lock_holder PATH [EXCLUSIVE]``: hold an SQLite file's write lock until told to let go.

Reaches the gate ``locked`` once it has it; the test opens that gate to have it released.
"""

from __future__ import annotations

import sqlite3
import sys

from tests.support.gates import Gates


def main() -> None:
    path, kind = sys.argv[1], "EXCLUSIVE" if "EXCLUSIVE" in sys.argv[2:] else "IMMEDIATE"
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    connection.execute(f"BEGIN {kind}")
    Gates.from_env().reach("locked")
    connection.execute("ROLLBACK")
    connection.close()


if __name__ == "__main__":
    main()
