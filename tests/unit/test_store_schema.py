"""The recorded schema of each database: what the migrations create changes only on purpose.

After a change that is meant: ``python -m tests.unit.test_store_schema``, and look at the difference.
"""

from __future__ import annotations

from pathlib import Path

import peewee
import pytest

from dramatiq_saga.store import models

DATABASES = {"sqlite": peewee.SqliteDatabase, "postgresql": peewee.PostgresqlDatabase, "mysql": peewee.MySQLDatabase}
RECORDED = Path(__file__).with_name("schema")


def statements(name: str) -> str:
    """What creates the tables, one statement a line, one column a line."""
    database = DATABASES[name]("unused")
    lines = []
    for model in models.build(database, "saga_").all():
        manager = model._schema
        for context in [manager._create_table(safe=True), *manager._create_indexes(safe=False)]:
            text, values = context.query()
            assert not values
            lines.append(text.replace(", CHECK", ",\n    CHECK").replace(', "', ',\n    "').replace(", `", ",\n    `"))
    return ";\n".join(lines) + ";\n"


@pytest.mark.parametrize("name", DATABASES)
def test_what_the_first_migration_creates_is_what_is_recorded(name: str) -> None:
    assert statements(name) == (RECORDED / f"0001_{name}.sql").read_text()


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name in DATABASES:
        (RECORDED / f"0001_{name}.sql").write_text(statements(name))
