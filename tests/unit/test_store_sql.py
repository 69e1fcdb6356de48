"""Statement templates."""

from __future__ import annotations

import peewee
import pytest

from dramatiq_saga.store import sql
from dramatiq_saga.store.sql import MYSQL, POSTGRESQL, SQLITE, Statements, dialect_of

TEMPLATE = "{insert_ignore} {tags} (run_id) SELECT id FROM {flow_runs} WHERE id = ?{skip_locked}{or_ignore}"


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (SQLITE, "INSERT OR IGNORE INTO x_tags (run_id) SELECT id FROM x_flow_runs WHERE id = ?"),
        (
            POSTGRESQL,
            "INSERT INTO x_tags (run_id) SELECT id FROM x_flow_runs WHERE id = %s FOR UPDATE SKIP LOCKED ON CONFLICT DO NOTHING",
        ),
        (MYSQL, "INSERT IGNORE INTO x_tags (run_id) SELECT id FROM x_flow_runs WHERE id = %s FOR UPDATE SKIP LOCKED"),
    ],
)
def test_a_template_is_spelled_for_its_database(dialect: str, text: str) -> None:
    assert Statements(dialect, "x_", tables=("tags", "flow_runs"))[TEMPLATE] == text


def test_row_locks_are_spelled_where_rows_can_be_locked() -> None:
    texts = {dialect: Statements(dialect, "", tables=())["SELECT 1{for_update}"] for dialect in (SQLITE, POSTGRESQL, MYSQL)}
    assert texts == {SQLITE: "SELECT 1", POSTGRESQL: "SELECT 1 FOR UPDATE", MYSQL: "SELECT 1 FOR UPDATE"}


def test_a_template_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    statements = Statements(SQLITE, "x_", tables=("tags",))
    assert statements["SELECT 1 FROM {tags}"] is statements["SELECT 1 FROM {tags}"]
    monkeypatch.setattr(sql, "CACHE_LIMIT", 3)
    for number in range(10):
        statements[f"SELECT {number}"]
    assert len(statements) <= 3, "texts made at run time do not pile up"


@pytest.mark.parametrize("template", ["SELECT 1 FROM {nowhere}", "SELECT 5 % 2", "SELECT '{'", "SELECT LIKE '%'"])
def test_what_a_template_cannot_hold_is_refused(template: str) -> None:
    """SAFE-2: a value spelled into a statement would meet the driver's own markers."""
    with pytest.raises(ValueError):
        Statements(SQLITE, "x_", tables=("tags",))[template]


def test_the_dialect_of_a_database() -> None:
    kinds = [peewee.SqliteDatabase(None), peewee.PostgresqlDatabase(None), peewee.MySQLDatabase(None)]
    assert [dialect_of(kind) for kind in kinds] == [SQLITE, POSTGRESQL, MYSQL]
    with pytest.raises(TypeError):
        dialect_of(peewee.Database(None))
