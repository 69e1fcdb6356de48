"""Views mirror their tables, and nobody can change a row through one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from peewee import SqliteDatabase

from dramatiq_saga import codec
from dramatiq_saga.store import models
from dramatiq_saga.views import ActionView, ChildView, CompensationView, EventView, SignalView, WaitView

TABLES: list[tuple[type[Any], str]] = [
    (ActionView, "action_runs"),
    (CompensationView, "compensation_runs"),
    (SignalView, "signals"),
    (WaitView, "waits"),
    (ChildView, "children"),
    (EventView, "flow_events"),
]


@pytest.mark.parametrize(("view", "table"), TABLES, ids=[table for _, table in TABLES])
def test_a_view_takes_a_row_in_the_order_of_its_columns(view: Any, table: str) -> None:
    model = getattr(models.build(SqliteDatabase(None), "saga_"), table)
    assert set(view.COLUMNS) <= set(model._meta.columns)

    fields = [field.name for field in dataclasses.fields(view)]
    assert [{"key": "dedup_key"}.get(name, name.removeprefix("stored_")) for name in fields] == list(view.COLUMNS)
    row = tuple(range(len(view.COLUMNS)))
    flags = {field.name for field in dataclasses.fields(view) if field.type == "bool"}
    assert dataclasses.astuple(view(*row)) == tuple(
        bool(n) if name in flags else n for n, name in zip(row, fields, strict=True)
    )


def test_a_flag_is_a_bool_on_databases_that_keep_numbers() -> None:
    """SQLite and MySQL: ``given_up`` reads True and False, not 1 and 0."""
    row = [0] * len(ActionView.COLUMNS)
    assert ActionView(*row).given_up is False
    row[ActionView.COLUMNS.index("given_up")] = 1
    assert ActionView(*row).given_up is True


def test_what_is_encoded_is_decoded_afresh_at_each_look() -> None:
    values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(ActionView)), None)
    view = ActionView(
        **{
            **values,
            "run_id": "run-1",
            "sequence": 3,
            "cycle": 2,
            "stored_args": codec.encode_call([[1]], {"k": {}}),
            "stored_result": codec.encode({"ids": [1]}, "result"),
            "stored_error": codec.describe_error(ValueError("no")),
        }
    )
    view.args[0].clear()
    view.kwargs.clear()
    view.result.clear()
    assert (view.args, view.kwargs, view.result) == ([[1]], {"k": {}}, {"ids": [1]})
    assert view.error is not None and view.error["message"] == "no"
    assert view.idempotency_key == "run-1:3:2"
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.sequence = 4  # type: ignore[misc]
