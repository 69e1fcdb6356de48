"""Finding runs (API: ``query()``).

A query is a value: narrowing one makes another, and nothing is read before it is iterated over or counted. Rows are read page
by page behind the last one seen, so a long list costs the same on every page. It never locks and never writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import dramatiq

from .clock import moment_to_ms
from .handle import FlowHandle
from .middleware import middleware_of
from .options import short_text
from .statuses import FlowStatus
from .store.models import LIVE, NAME_LENGTH, narrowed

if TYPE_CHECKING:
    from dramatiq import Broker

    from .store.database import Store, Tx

#: Rows that one read fetches while a query is iterated over.
PAGE = 200

#: Their first terms are the predicates of indexes that hold live runs, or open waits, only.
_AWAITING = (
    f"r.{LIVE} AND r.id IN (SELECT w.run_id FROM {{waits}} w WHERE w.status = 'waiting' AND w.name = ? AND w.kind = '%s')"
)
_AWAITING_SIGNAL, _AWAITING_RETRY = _AWAITING % "signal", _AWAITING % "retry"
_SIGNALABLE = f"r.{LIVE} AND r.status <> 'rolling_back'"
_NOT_SIGNALABLE = "(r.ended_at IS NOT NULL OR r.status = 'rolling_back')"

#: A tag that no more runs than this carry leads to them; one that more carry is looked up for each run of the list. Either way the
#: first page costs little, however many runs there are: test_a_list_by_tag_costs_the_same_however_many_runs_have_ended
FEW = 1000
_TAGGED = "SELECT t.run_id FROM {tags} t WHERE t.name = ? AND "
_CARRIED = "SELECT COUNT(*) FROM (SELECT 1 FROM {tags} t WHERE t.name = ? AND %s LIMIT ?) found"

_ORDERS = {
    "newest": "created_at DESC, id DESC",
    "oldest": "created_at, id",
}


@dataclass(frozen=True)
class FlowQuery:
    """A search for runs. Iterating reads page by page, so a run that ends meanwhile may be seen as it was before."""

    _broker: Broker
    workflow: str | None = None
    status: tuple[str, ...] = ()
    tags: tuple[tuple[str, str | None], ...] = ()
    before: int | None = None
    after: int | None = None
    order: str = "newest"
    limit: int | None = None
    awaiting_signal: tuple[str, ...] = ()
    awaiting_retry_signal: tuple[str, ...] = ()
    signalable: bool | None = None
    _nothing: bool = False  # two of the conditions exclude each other

    def where(self, **conditions: Any) -> FlowQuery:
        """This search, narrowed: the same conditions as :func:`query` takes, beside those that are there. ``order`` is replaced."""
        known = read_conditions(**conditions)
        for name in ("tags", "awaiting_signal", "awaiting_retry_signal"):
            if name in known:
                known[name] = getattr(self, name) + known[name]
        for name in ("workflow", "signalable"):
            if name in known and getattr(self, name) not in (None, known[name]):
                known["_nothing"] = True
        for name, nearer in (("before", min), ("after", max), ("limit", min)):
            mine = getattr(self, name)
            if name in known and mine is not None:
                known[name] = nearer(mine, known[name])
        if "status" in known and self.status:
            known["status"] = tuple(word for word in self.status if word in known["status"])
            known["_nothing"] = known.get("_nothing", False) or not known["status"]
        return replace(self, **known)

    def __iter__(self) -> Iterator[FlowHandle[Any]]:
        middleware = middleware_of(self._broker)
        for run_id, _, workflow in self.rows(middleware.engine(self._broker).store, ("workflow",)):
            yield FlowHandle(run_id, workflow, middleware=middleware, broker=self._broker)

    def rows(self, store: Store, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """The runs found, as rows: id, created_at, then ``columns`` of ``flow_runs``."""
        wanted = ", ".join(f"r.{column}" for column in ("id", "created_at", *columns))
        descending = self.order == "newest"
        rare = self._rare_tags(store)
        last: tuple[int, str] | None = None
        left = self.limit
        while left is None or left > 0:
            where, params = self._where(rare)
            if last is not None:
                sign = "<" if descending else ">"
                where += f" AND (r.created_at {sign} ? OR (r.created_at = ? AND r.id {sign} ?))"
                params += [last[0], last[0], last[1]]
            size = PAGE if left is None else min(PAGE, left)
            order = ", ".join("r." + part for part in _ORDERS[self.order].split(", "))
            sql = f"SELECT {wanted} FROM {{flow_runs}} r WHERE {where} ORDER BY {order} LIMIT {size}"
            rows = store.read(lambda tx, sql=sql, params=params: tx.all(sql, params))  # type: ignore[misc]
            yield from rows
            if len(rows) < size:
                return
            last = (rows[-1][1], rows[-1][0])
            left = None if left is None else left - len(rows)

    def first(self) -> FlowHandle[Any] | None:
        """The first run found, in the query's order; ``None`` without one."""
        return next(iter(replace(self, limit=1)), None)

    def count(self) -> int:
        """How many runs there are, ``limit`` aside. Reads each that it counts: live ones quickly, what has ended as long as that takes."""
        store = middleware_of(self._broker).engine(self._broker).store
        where, params = self._where(self._rare_tags(store))
        row = store.read(lambda tx: tx.one(f"SELECT COUNT(*) FROM {{flow_runs}} r WHERE {where}", params))
        return int(row[0]) if row else 0

    def _rare_tags(self, store: Store) -> set[tuple[str, str | None]]:
        """Those of the tags that only few runs carry."""

        def count(tx: Tx, name: str, value: str | None) -> int:
            row = tx.one(_CARRIED.replace("%s", _value(value)), (name, *_given(value), FEW + 1))
            return int(row[0]) if row else 0

        return store.read(lambda tx: {tag for tag in self.tags if count(tx, *tag) <= FEW}) if self.tags else set()

    def _where(self, rare: Collection[tuple[str, str | None]] = ()) -> tuple[str, list[Any]]:
        clauses: list[str] = ["1 = 0" if self._nothing else "1 = 1"]
        params: list[Any] = []
        if self.workflow is not None:
            clauses.append("r.workflow = ?")
            params.append(self.workflow)
        if self.status:
            clauses.append(f"r.status IN ({', '.join('?' * len(self.status))})")
            index = narrowed(self.status)
            if index is not None:  # what the index of such runs says of them: the list then costs as much as it shows
                clauses.append(index)
            params.extend(self.status)
        for name, value in self.tags:
            tagged = _TAGGED + _value(value)
            clauses.append(f"r.id IN ({tagged})" if (name, value) in rare else f"EXISTS ({tagged} AND t.run_id = r.id)")
            params += [name, *_given(value)]
        if self.before is not None:
            clauses.append("r.created_at < ?")
            params.append(self.before)
        if self.after is not None:
            clauses.append("r.created_at >= ?")
            params.append(self.after)
        for clause, names in ((_AWAITING_SIGNAL, self.awaiting_signal), (_AWAITING_RETRY, self.awaiting_retry_signal)):
            clauses += [clause] * len(names)
            params += names
        if self.signalable is not None:
            clauses.append(_SIGNALABLE if self.signalable else _NOT_SIGNALABLE)
        return " AND ".join(clauses), params


def _value(value: str | None) -> str:
    return "t.value IS NULL" if value is None else "t.value = ?"


def _given(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)


def query(
    *,
    workflow: Any = None,
    status: FlowStatus | str | Iterable[FlowStatus | str] | None = None,
    tags: Mapping[str, str | int | None] | None = None,
    awaiting_signal: str | None = None,
    awaiting_retry_signal: str | None = None,
    signalable: bool | None = None,
    before: datetime | None = None,
    after: datetime | None = None,
    order: str | None = None,
    limit: int | None = None,
    broker: Broker | None = None,
) -> FlowQuery:
    """A search for runs; iterate over it, or ask for ``first()`` or ``count()``.

    Parameters:
      workflow: a :class:`~dramatiq_saga.Workflow` or its name.
      status: one status or several.
      tags: every one of them has to be there with that value.
      awaiting_signal: waits for a signal of that name now.
      awaiting_retry_signal: a step or child of it is parked and waits for a signal of that name to be run again (RSIG-1).
      signalable: true: takes signals, so it has not ended and is not rolling back; false: takes none any more.
      before, after: when the run was started, as aware ``datetime`` objects.
      order: ``"newest"`` (default) or ``"oldest"`` first.
      limit: how many at most.
      broker: the global one by default.
    """
    conditions = read_conditions(
        workflow=workflow,
        status=status,
        tags=tags,
        awaiting_signal=awaiting_signal,
        awaiting_retry_signal=awaiting_retry_signal,
        signalable=signalable,
        before=before,
        after=after,
        order=order,
        limit=limit,
    )
    return FlowQuery(broker or dramatiq.get_broker(), **conditions)


def read_conditions(
    *,
    workflow: Any = None,
    status: Any = None,
    tags: Mapping[str, Any] | None = None,
    awaiting_signal: str | None = None,
    awaiting_retry_signal: str | None = None,
    signalable: bool | None = None,
    before: datetime | None = None,
    after: datetime | None = None,
    order: str | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """The arguments of :func:`query` as fields of a :class:`FlowQuery`. Raises ValueError for one that cannot be meant."""
    given: dict[str, Any] = {}
    if workflow is not None:
        name = workflow if isinstance(workflow, str) else getattr(workflow, "name", None)
        given["workflow"] = short_text(name if name is not None else workflow, "a workflow's name", limit=NAME_LENGTH)
    if status is not None:
        words = [status] if isinstance(status, str) else list(status)
        wrong = [word for word in words if word not in set(FlowStatus)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a status of a run: they are {', '.join(FlowStatus)}")
        given["status"] = tuple(FlowStatus(word).value for word in words)
    if tags is not None:
        if not isinstance(tags, Mapping):
            raise TypeError(f"tags are a mapping of names to values, not {tags!r}")
        given["tags"] = tuple((name, None if value is None else str(value)) for name, value in tags.items())
    if awaiting_signal is not None:
        given["awaiting_signal"] = (short_text(awaiting_signal, "a signal's name", limit=NAME_LENGTH),)
    if awaiting_retry_signal is not None:
        given["awaiting_retry_signal"] = (short_text(awaiting_retry_signal, "a signal's name", limit=NAME_LENGTH),)
    if signalable is not None:
        if not isinstance(signalable, bool):
            raise TypeError(f"signalable is True or False, not {signalable!r}")
        given["signalable"] = signalable
    if before is not None:
        given["before"] = moment_to_ms(before)
    if after is not None:
        given["after"] = moment_to_ms(after)
    if order is not None:
        if order not in _ORDERS:
            raise ValueError(f"order is one of {', '.join(_ORDERS)}, not {order!r}")
        given["order"] = order
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit is at least 1, not {limit}")
        given["limit"] = limit
    return given
