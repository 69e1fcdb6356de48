"""What stands in a run's order besides its steps: side effects, version gates, waits, blocks, children, signals that it sent.

One kind of value for all of them, so that whoever shows a run can walk through its sequences without knowing each table. As
``reports.py``, of which this is a part, it formats nothing, never writes, and shows payloads as previews only (SAFE-2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .clock import to_iso
from .codec import decode, load_error
from .engine.retry_on_signal import Stored

if TYPE_CHECKING:
    from .store.database import Tx

_SIDE_EFFECTS = "SELECT sequence, kind, name, value, created_at FROM {side_effects} WHERE run_id = ?"
_WAITS = "SELECT sequence, kind, name, status, due_at, payload, created_at, ended_at FROM {waits} WHERE run_id = ? AND kind <> 'retry'"
_BLOCKS = (
    "SELECT sequence, kind, size, policy, block, position, failed_by, created_at, ended_at, max_in_flight, closed_early_at "
    "FROM {blocks} WHERE run_id = ?"
)
_CHILDREN = (
    "SELECT sequence, workflow, child_id, status, close_policy, block, position, result, error, created_at, ended_at, cycle, "
    "retry_policy, comp_actor, comp_from_result FROM {children} WHERE run_id = ?"
)
_RETRY_WAITS = "SELECT sequence, due_at FROM {waits} WHERE run_id = ? AND kind = 'retry' AND status = 'waiting'"
_SIGNALS = "SELECT name, payload, received_at FROM {signals} WHERE run_id = ? AND status = 'received' ORDER BY id"

#: What a step or a child whose compensation is built from its result is undone by, until that is known.
FROM_RESULT = "a message built from its result"

_RECORDED = {"value": "side effect", "patch": "version gate", "signal": "sent signal"}


@dataclass(frozen=True, slots=True)
class RetryReport:
    """How a step's or child's retries on signal stand: ``spent`` signals of ``cap`` (``None``: no limit) have run it again (RSIG-3).

    ``waiting``: it is parked, until ``due_at`` where there is a deadline. ``over`` says why no signal will run it again.
    """

    signal: str
    spent: int
    cap: int | None
    waiting: bool
    due_at: int | None
    over: str | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "signal": self.signal, "spent": self.spent, "cap": self.cap, "waiting": self.waiting, "due_at": to_iso(self.due_at),
            "over": self.over,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One request of the workflow function that is no step.

    ``kind`` is ``side effect``, ``version gate``, ``sent signal``, ``signal`` (a wait for one), ``timer``, ``parallel``, ``saga`` or
    ``child``. What a kind has no use for is ``None``; ``value`` of a version gate is its answer, ``true`` or ``false``; ``size`` is that
    of a block, ``failed_by`` the member that failed it, ``closed_early_at`` when its barrier was reached while a member was live,
    ``undo`` what undoes a child.
    """

    sequence: int
    kind: str
    name: str | None
    status: str
    created_at: int
    ended_at: int | None = None
    due_at: int | None = None
    value: str | None = None
    child_id: str | None = None
    policy: str | None = None
    size: int | None = None
    failed_by: int | None = None
    block: int | None = None
    position: int | None = None
    error: dict[str, Any] | None = None
    max_in_flight: int | None = None
    closed_early_at: int | None = None
    undo: str | None = None
    retry: RetryReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        known = {name: getattr(self, name) for name in self.__slots__ if name != "retry"}
        known["retry_on_signal"] = None if self.retry is None else self.retry.as_dict()
        return known | {name: to_iso(known[name]) for name in ("created_at", "ended_at", "due_at", "closed_early_at")}


@dataclass(frozen=True, slots=True)
class WaitingSignal:
    """A signal that has come and that nothing has waited for yet."""

    name: str
    payload: str | None
    received_at: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {"name": self.name, "payload": self.payload, "received_at": to_iso(self.received_at)}


def read_entries(tx: Tx, run_id: str, shown: Callable[[bytes | None], str | None]) -> list[EntryReport]:
    """In order of sequence. ``shown`` makes a preview of a stored value, or ``None`` where it is not to be shown."""

    def payload(data: Any) -> str | None:
        return shown(None if data is None else bytes(data))

    parked = read_parked(tx, run_id)
    found = [
        EntryReport(
            sequence,
            _RECORDED.get(kind, kind),
            name,
            "recorded",
            at,
            at,
            value=_way(value) if kind == "patch" else payload(value),
        )
        for sequence, kind, name, value, at in tx.all(_SIDE_EFFECTS, (run_id,))
    ]
    found += [
        EntryReport(sequence, kind, name, status, created_at, ended_at, due_at, payload(value))
        for sequence, kind, name, status, due_at, value, created_at, ended_at in tx.all(_WAITS, (run_id,))
    ]
    found += [
        EntryReport(
            sequence, kind, None, "running" if ended_at is None else "ended" if failed_by is None else "failed", created_at, ended_at,
            policy=policy, size=size, failed_by=failed_by, block=block, position=position, max_in_flight=limit,
            closed_early_at=early,
        )
        for sequence, kind, size, policy, block, position, failed_by, created_at, ended_at, limit, early in tx.all(
            _BLOCKS, (run_id,)
        )
    ]  # fmt: skip
    found += [
        EntryReport(
            sequence, "child", workflow, status, created_at, ended_at, value=payload(result), child_id=child_id, policy=policy,
            block=block, position=position, error=load_error(error) if error else None,
            retry=retry_report(again, sequence, cycle, parked), undo=comp_actor or (FROM_RESULT if from_result else None),
        )
        for (
            sequence, workflow, child_id, status, policy, block, position, result, error, created_at, ended_at, cycle, again, comp_actor,
            from_result,
        ) in tx.all(_CHILDREN, (run_id,))
    ]  # fmt: skip
    return sorted(found, key=lambda entry: entry.sequence)


def _way(value: Any) -> str:
    """What a version gate answered; no payload, so it is always shown."""
    return "true" if decode(bytes(value)) else "false"


def read_parked(tx: Tx, run_id: str) -> dict[int, int | None]:
    """The sequences that wait for a signal to be run again, and until when."""
    return dict(tx.all(_RETRY_WAITS, (run_id,)))


def retry_report(policy: str | None, sequence: int, cycle: int, parked: dict[int, int | None]) -> RetryReport | None:
    """What a stored retry policy and its wait say; ``None`` without one."""
    if policy is None:
        return None
    stored = Stored.read(policy)
    waiting = sequence in parked
    return RetryReport(stored.signal, cycle, stored.max_retries, waiting, parked.get(sequence), stored.over)


def read_signals(tx: Tx, run_id: str, shown: Callable[[bytes | None], str | None]) -> list[WaitingSignal]:
    """Those that nothing has consumed, the oldest first."""
    return [WaitingSignal(name, shown(bytes(payload)), at) for name, payload, at in tx.all(_SIGNALS, (run_id,))]
