"""Faults thrown into a store at a statement of the test's choice, through its real transactions.

``Faults(store)`` takes the place of the store's ``write``. An operation that comes to a statement matching a rule is aborted
there, so the database really rolls it back, and its caller gets the error that the rule names; or it commits, and its caller
is told that nobody knows. A rule counts how often it was met, and a test asserts that number: a rule that is never met
proves nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dramatiq_saga.errors import WriteRefusedError, WriteUnknownError
from dramatiq_saga.store.database import Store

#: What the verbs do to a row, by the statement that does it.
CLAIM = r"UPDATE \{action_runs\} SET status = 'running'"
COMPLETE = r"UPDATE \{action_runs\} SET status = 'completed'"
FAIL = r"UPDATE \{action_runs\} SET status = 'failed'"
GIVE_UP = r"UPDATE \{action_runs\} SET status = CASE .*END, given_up = TRUE"
RELEASE = r"UPDATE \{action_runs\} SET status = 'pending'"
CLAIM_UNDO = r"UPDATE \{compensation_runs\} SET status = 'running'"
COMPLETE_UNDO = r"UPDATE \{compensation_runs\} SET status = 'completed'"
RECORD_SIDE_EFFECT = r"INTO? \{side_effects\}|\{side_effects\} \("
DECIDE = r"UPDATE \{flow_runs\} SET status = \?"
PLAN_ROLLBACK = r"UPDATE \{flow_runs\} SET status = 'rolling_back'"


class _Abort(Exception):
    """Leaves the operation, so that the store rolls it back."""


class Rule:
    """One fault: where, how often, and what becomes of the write."""

    def __init__(self, statement: str, *, times: int | None, kind: str, error: Callable[[], BaseException], then: Any) -> None:
        self.pattern = re.compile(statement)
        self.left = times
        self.kind = kind
        self.error = error
        self.then = then
        self.met = 0

    def heal(self) -> None:
        """No more of this fault."""
        self.left = 0


class Faults:
    """The faults of one store."""

    def __init__(self, store: Store) -> None:
        self._write = store.write
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        store.write = self.write  # type: ignore[method-assign]

    def refuse(self, statement: str, times: int | None = 1, *, error: Callable[[], BaseException] | None = None,
               then: Callable[[], None] | None = None) -> Rule:  # fmt: skip
        """The next ``times`` writes with such a statement (all, with ``None``) are rolled back and refused; ``then`` is
        called in the caller's thread each time."""
        return self._add(Rule(statement, times=times, kind="refuse", error=error or _refused, then=then))

    def unknown(self, statement: str, times: int = 1, *, landed: bool, then: Callable[[], None] | None = None) -> Rule:
        """The next ``times`` such writes end with nobody knowing; in truth they have landed, or not."""
        return self._add(Rule(statement, times=times, kind="landed" if landed else "refuse", error=_unknown, then=then))

    def pause(self, statement: str, then: Callable[[], None], times: int = 1) -> Rule:
        """``then`` is called in the caller's thread once such a write has committed, before the caller goes on."""
        return self._add(Rule(statement, times=times, kind="after", error=_unknown, then=then))

    def _add(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        return rule

    def write(self, operation: Callable[[Any], Any], **options: Any) -> Any:
        met: list[Rule] = []

        def watched(tx: Any) -> Any:
            met.clear()
            return operation(_Watched(tx, self, met))

        try:
            value = self._write(watched, **options)
        except _Abort:
            rule = met[-1]
            if rule.then is not None:
                rule.then()
            raise rule.error() from None
        for rule in met:
            self._count(rule)
            if rule.then is not None:
                rule.then()
            if rule.kind == "landed":
                raise rule.error()
        return value

    def matching(self, sql: str) -> Rule | None:
        for rule in self._rules:
            if rule.left != 0 and rule.pattern.search(sql):
                return rule
        return None

    def _count(self, rule: Rule) -> None:
        with self._lock:
            rule.met += 1
            if rule.left:
                rule.left -= 1


class _Watched:
    """A transaction that looks at every statement before it is executed."""

    def __init__(self, tx: Any, faults: Faults, met: list[Rule]) -> None:
        self._tx = tx
        self._faults = faults
        self._met = met
        self.dialect = tx.dialect
        self.after_commit = tx.after_commit

    def _look(self, sql: str) -> None:
        rule = self._faults.matching(sql)
        if rule is None:
            return
        self._met.append(rule)
        if rule.kind == "refuse":
            self._faults._count(rule)
            raise _Abort

    def run(self, sql: str, params: Sequence[object] = ()) -> int:
        self._look(sql)
        return int(self._tx.run(sql, params))

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        self._look(sql)
        return list(self._tx.all(sql, params))

    def one(self, sql: str, params: Sequence[object] = ()) -> Any:
        self._look(sql)
        return self._tx.one(sql, params)


def _refused() -> BaseException:
    return WriteRefusedError("refused for the test", "body", 5, True)


def _unknown() -> BaseException:
    return WriteUnknownError("nobody knows, for the test", "commit", None, True)
