"""The first schema.

Until the first release it creates what ``models.py`` defines, and ``tests/unit/test_store_schema.py`` compares that,
statement by statement, with the recorded schema of each database, so a change of the models cannot slip in here unseen. The
release freezes it: from then on the recorded statements stand here, and a change of the models comes with ``0002``.
"""

from __future__ import annotations

from peewee import Database

from .. import models


def up(database: Database, prefix: str) -> None:
    """Create every table; what is there already stays."""
    database.create_tables(models.build(database, prefix).all(), safe=True)
