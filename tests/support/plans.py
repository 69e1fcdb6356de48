"""What statements cost, without a clock: the work that SQLite does for them, and the way that each database takes to its rows.

``Work`` counts the instructions of SQLite's virtual machine: two runs of the same code that differ by one row read differ in it.
``listen`` notes every statement that the engine executes, in any thread, whatever the database. ``ways`` asks that database how it
finds the rows of one, and ``reads_what_has_ended`` whether a way costs more, the more runs have ended (C56).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import peewee

from dramatiq_saga.store import transactions
from dramatiq_saga.store.database import Store, Tx

#: Tables that hold nothing of runs that have ended.
NO_HISTORY = {"workers", "passes", "schema_migrations"}

#: More rows than this are more than one run has, or than are live, in a test.
FEW = 300

#: The partial indexes of what is live.
LIVE = {
    name
    for name, where in re.findall(
        r"INDEX IF NOT EXISTS saga_(\w+) ON .* WHERE (.*);",
        Path(__file__).parents[1].joinpath("unit/schema/0001_sqlite.sql").read_text(),
    )
    if "ended_at IS NULL" in where
    or re.fullmatch(r"status = '(waiting|received)'|rollback = '(halted|running)'|state = [012]", where)
}


class Work:
    """Counts what every connection of one SQLite file does. ``database`` is what an application is opened on."""

    def __init__(self, path: Path) -> None:
        self.instructions = 0
        work = self

        class Counted(sqlite3.Connection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.set_progress_handler(work._count, 1)

        self.database = peewee.SqliteDatabase(str(path), factory=Counted, pragmas={"synchronous": "off"})

    def _count(self) -> None:
        self.instructions += 1

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """``with work.counted() as cost:`` … ``cost[0]`` is what the block has cost, once it is over."""
        cost: list[int] = []
        before = self.instructions
        yield cost
        cost.append(self.instructions - before)


# --- which statements ------------------------------------------------------------------------------------------------


@contextmanager
def listen() -> Iterator[dict[str, tuple[Any, ...]]]:
    """Every template that any store executes meanwhile, with the parameters it had first."""
    heard: dict[str, tuple[Any, ...]] = {}

    def hear(plain: Any) -> Any:
        def execute(tx: Any, sql: str, params: Any = ()) -> Any:
            heard.setdefault(sql, tuple(params))
            return plain(tx, sql, params)

        return execute

    kinds = (transactions.SQLiteTx, transactions.ServerTx)
    patches = [mock.patch.object(kind, name, hear(getattr(kind, name))) for kind in kinds for name in ("run", "all", "one")]
    for patch in patches:
        patch.start()
    try:
        yield heard
    finally:
        for patch in patches:
            patch.stop()


# --- which way -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One table of one statement: the index that leads to its rows (``None``: none does), what it is asked for, and, where the
    database says it, how many rows it expects."""

    table: str
    index: str | None
    asked: str
    text: str
    rows: int | None = None

    @property
    def reads_what_has_ended(self) -> bool:
        """Whether it is neither an index of what is live nor the look-up of one run, by what leads the index."""
        if self.table in NO_HISTORY:
            return False
        if self.index is None:
            return True
        if self.rows is not None:  # differs because: there are no partial indexes; what is read of one, the statistics tell
            return self.rows > FEW
        return self.index not in LIVE and re.match(r"\(*(\w+\.)?\w*id(\)::text)? ?= ?", self.asked) is None


def ways(store: Store, sql: str, params: tuple[Any, ...]) -> list[Way]:
    """How the database finds the rows of a statement."""
    read = {"sqlite": _sqlite, "postgresql": _postgresql, "mysql": _mysql}[store.dialect]
    return list(read(store, sql, params))


def _sqlite(store: Store, sql: str, params: tuple[Any, ...]) -> Iterator[Way]:
    plan = [row[3] for row in store.read(lambda tx: tx.all("EXPLAIN QUERY PLAN " + sql, params))]
    tables = _tables(sql)
    made = {match[1] for step in plan if (match := re.match(r"(?:MATERIALIZE|CO-ROUTINE) (\S+)", step))}
    for step in plan:
        match = re.match(r"(SCAN|SEARCH) (\S+)(?: USING (.*))?$", step.removesuffix(" LEFT-JOIN"))
        if match is None or match[2] in made or match[2].startswith(("(", "CONSTANT")):
            continue
        name, using = match[2], match[3] or ""
        table = tables.get(name) or name.removeprefix(store.prefix)
        found = re.match(r"(?:(?:COVERING )?INDEX (\S+)|(?:INTEGER )?PRIMARY KEY)(?: \((.*)\))?", using)
        index = None if found is None else (found[1] or "PRIMARY").removeprefix(store.prefix)
        yield Way(table, index, (found[2] or "") if found else "", step)


def _tables(sql: str) -> dict[str, str]:
    """alias -> table, of a template."""
    words = {"WHERE", "SET", "ORDER", "CROSS", "JOIN", "LEFT", "LIMIT", "SELECT"}
    return {alias: table for table, alias in re.findall(r"\{(\w+)\} (\w+)", sql) if alias not in words}


def _postgresql(store: Store, sql: str, params: tuple[Any, ...]) -> Iterator[Way]:
    def explain(tx: Tx) -> Any:
        # A table of two pages is read faster whole than by an index. Switched off, a scan is left where there is no other way.
        tx.run("SET LOCAL enable_seqscan = off")
        return tx.one("EXPLAIN (FORMAT JSON) " + sql, params)

    (plan,) = store.read(explain)
    waiting: list[tuple[dict[str, Any], str]] = [(plan[0]["Plan"], "")]
    while waiting:
        node, above = waiting.pop()
        table = (node.get("Relation Name") or above).removeprefix(store.prefix)
        kind = node["Node Type"]
        if kind == "Seq Scan":
            yield Way(table, None, "", f"{kind} on {table}: {node.get('Filter')}")
        elif kind in ("Index Scan", "Index Only Scan", "Bitmap Index Scan"):
            asked = node.get("Index Cond", "")
            yield Way(table, node["Index Name"].removeprefix(store.prefix), asked, f"{kind} {node['Index Name']}: {asked}")
        waiting += [(below, node.get("Relation Name", "")) for below in node.get("Plans", ())]


def _mysql(store: Store, sql: str, params: tuple[Any, ...]) -> Iterator[Way]:
    tables = _tables(sql)
    for row in store.write(lambda tx: tx.all("EXPLAIN " + sql, params)):  # it is no read where it is one of a write
        _, what, name, kind, _, key, _, ref, rows, extra = row
        if what == "INSERT" or name is None or name.startswith("<") or kind in (None, "const", "system"):
            continue
        table = tables.get(name) or name.removeprefix(store.prefix)
        index = None if kind == "ALL" or key is None else key.removeprefix(store.prefix)
        expected = int(str(rows or 0).split()[0])  # "17 (3%)" where a second index filters what the first one finds
        asked = "" if kind in ("ALL", "index") else f"{kind} {ref}"
        yield Way(table, index, asked, f"{table}: {kind} {key} ({ref}), {rows} rows, {extra}", expected)
