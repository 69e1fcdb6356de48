"""A snapshot as a document of plain JSON values, and back: what a history file holds (``docs/reference/histories.md``).

The document is a format of its own and older files have to stay readable: what a later version adds is a key that may be missing,
with the meaning that its absence always had. It holds what a replay sees and, for readers, the arguments that steps and
children were given. Reading one raises whatever is wrong with it as ``KeyError``, ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..codec import decode, encode, freeze, load_error
from ..encoder import MARK
from .rows import (
    PLAIN,
    BlockEntry,
    ChildEntry,
    Entry,
    Extra,
    Parent,
    PatchEntry,
    ReceivedSignal,
    RetryWait,
    SentSignalEntry,
    SideEffectEntry,
    Snapshot,
    StepEntry,
    WaitEntry,
)

Scrub = Callable[[Any], Any]

#: By sequence: the stored arguments of a step or child, and of its compensation.
Arguments = Mapping[int, tuple[Any, Any]]


# --- stored values ---------------------------------------------------------------------------------------------------


class Keeper:
    """Stored values on their way into a document: as JSON where their bytes are JSON, tagged or not, else as base64."""

    def __init__(self, scrub: Scrub | None = None) -> None:
        self._scrub = scrub

    def data(self, data: Any) -> dict[str, Any] | None:
        """Of the bytes that are stored."""
        if data is None:
            return None
        data = bytes(data)
        return self.value(decode(data)) if self._scrub is not None else _kept(data)

    def value(self, value: Any) -> dict[str, Any]:
        """Of a decoded value."""
        return _kept(encode(value if self._scrub is None else self._scrub(value), "a value of the history"))

    def given(self, value: Callable[[], Any] | None) -> dict[str, Any] | None:
        """Of a value as entries have it."""
        return None if value is None else self.value(value())


def _kept(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        for kind in ("json", "tagged"):
            if stored_bytes(kept := {kind: json.loads(data)}) == data:
                return kept
    return {"base64": base64.b64encode(data).decode("ascii")}


def stored_bytes(stored: Any) -> bytes:
    """The bytes of a stored value in a document."""
    match stored:
        case {"json": value}:
            return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        case {"tagged": value}:  # TaggedJSONEncoder's
            return MARK + json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        case {"base64": str(text)}:
            return base64.b64decode(text, validate=True)
    raise ValueError(f"{stored!r} is no stored value: it is an object with 'json', 'tagged' or 'base64'")


def _thaw(stored: Any) -> Callable[[], Any] | None:
    return None if stored is None else freeze(stored_bytes(stored))


def _thawed(stored: Any) -> Callable[[], Any]:
    return freeze(stored_bytes(stored))


def kept_error(text: str | None) -> dict[str, Any] | None:
    """A recorded error without its tracebacks, which name files of somebody's machine."""
    return None if text is None else _without_traceback(load_error(text))


def _without_traceback(error: dict[str, Any]) -> dict[str, Any]:
    cause = error["cause"]
    bare = {key: value for key, value in error.items() if key != "traceback"}
    return {
        **bare,
        "bases": list(error["bases"]),
        "cause": _without_traceback({**load_error("{}"), **cause}) if cause else None,
    }


def _error_text(error: dict[str, Any] | None) -> str | None:
    return None if error is None else json.dumps(_with_traceback(error))


def _with_traceback(error: dict[str, Any]) -> dict[str, Any]:
    cause = error["cause"]
    return {**error, "traceback": "", "cause": None if cause is None else _with_traceback(cause)}


# --- writing ---------------------------------------------------------------------------------------------------------


def to_document(snapshot: Snapshot, keep: Keeper, arguments: Arguments) -> dict[str, Any]:
    """What a document holds of a run."""
    parent = snapshot.parent
    return {
        "run_id": snapshot.run_id,
        "workflow": snapshot.workflow,
        "version": snapshot.version,
        "queue": snapshot.queue,
        "priority": snapshot.priority,
        "status": snapshot.status,
        "rollback": snapshot.rollback,
        "parent": None
        if parent is None
        else {"run_id": parent.run_id, "sequence": parent.sequence, "workflow": parent.workflow},
        "close_request": snapshot.close_request,
        "arguments": keep.value(snapshot.args()),
        "context": keep.data(snapshot.context),
        "tags": snapshot.tags,
        "signals": [{"name": signal.name, "value": keep.value(signal.value())} for signal in snapshot.signals],
        "entries": [_written(entry, keep, *arguments.get(entry.sequence, (None, None))) for entry in snapshot.entries],
    }


def _written(entry: Entry, keep: Keeper, args: Any, comp_args: Any) -> dict[str, Any]:
    head: dict[str, Any] = {"sequence": entry.sequence, "kind": entry.kind}
    match entry:
        case SideEffectEntry() | SentSignalEntry():
            return {**head, "name": entry.name, "value": keep.value(entry.value())}
        case PatchEntry():
            return {**head, "name": entry.name, "value": entry.value}
        case WaitEntry():
            facts = {"what": entry.what, "name": entry.name, "status": entry.status, "due_at": entry.due_at}
            return {**head, **facts, "value": keep.given(entry.value)}
        case BlockEntry():
            facts = {"what": entry.what, "size": entry.size, "policy": entry.policy, "max_in_flight": entry.max_in_flight}
            facts |= {"failed_by": entry.failed_by, "ended": entry.ended}
            return {**head, **facts, **_place(entry.block, entry.position)}
        case StepEntry():
            head |= {"actor": entry.actor, "status": entry.status, "given_up": entry.given_up, "attempts": entry.attempts}
        case ChildEntry():
            head |= {
                "workflow": entry.workflow,
                "child_id": entry.child_id,
                "status": entry.status,
                "close_policy": entry.close_policy,
            }
    head |= {
        "cycle": entry.cycle, "optional": entry.optional, "arguments": keep.data(args), "result": keep.given(entry.value),
        "error": kept_error(entry.error), "compensation": None,
    }  # fmt: skip
    if entry.comp_actor is not None or entry.comp_from_result:
        head["compensation"] = {
            "actor": entry.comp_actor, "arguments": keep.data(comp_args), "ready": entry.comp_ready,
            "from_result": entry.comp_from_result, "on_self_failure": isinstance(entry, StepEntry) and entry.comp_on_self_failure,
        }  # fmt: skip
    return {**head, **_rare(entry.extra, keep)}


def _place(block: int | None, position: int | None) -> dict[str, Any]:
    return {} if block is None else {"block": block, "position": position}


def _rare(extra: Extra, keep: Keeper) -> dict[str, Any]:
    """What only some steps and children have."""
    found = _place(extra.block, extra.position)
    if extra.held_back:
        found["held_back"] = True
    if extra.fallback is not None:
        found["fallback"] = keep.given(extra.fallback)
    if extra.retry is not None:
        wait = None if extra.wait is None else {"status": extra.wait.status, "due_at": extra.wait.due_at}
        found["retry_on_signal"] = {"policy": json.loads(extra.retry), "wait": wait}
    if extra.comp_group is not None:
        found["group"] = {"sequence": extra.comp_group, "in_parallel": extra.comp_parallel}
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


def from_document(document: Mapping[str, Any]) -> Snapshot:
    """The snapshot that a replay is given."""
    entries = [_read(entry) for entry in document["entries"]]
    if [entry.sequence for entry in entries] != list(range(1, len(entries) + 1)):
        raise ValueError("the sequences of its entries do not go from 1 to their number")
    context, parent = document["context"], document.get("parent")
    return Snapshot(
        document["run_id"], document["workflow"], document["version"], document["queue"], document.get("priority"), None,
        document["status"], document["rollback"], len(entries), len(entries) + 1, len(entries), _thawed(document["arguments"]),
        None if context is None else stored_bytes(context), 0, entries, dict(document["tags"]),
        tuple(
            ReceivedSignal(number, signal["name"], _thawed(signal["value"]))
            for number, signal in enumerate(document.get("signals", ()), start=1)
        ),
        None if parent is None else Parent(parent["run_id"], parent["sequence"], parent["workflow"], document["queue"], None),
        document.get("close_request"),
    )  # fmt: skip


def _read(entry: Mapping[str, Any]) -> Entry:
    sequence = entry["sequence"]
    match entry["kind"]:
        case "side effect":
            return SideEffectEntry(sequence, entry["name"], _thawed(entry["value"]))
        case "sent signal":
            return SentSignalEntry(sequence, entry["name"], _thawed(entry["value"]))
        case "patch":
            return PatchEntry(sequence, entry["name"], entry["value"])
        case "wait":
            return WaitEntry(sequence, entry["what"], entry["name"], entry["status"], entry["due_at"], _thaw(entry["value"]))
        case "block":
            return BlockEntry(
                sequence, entry["what"], entry["size"], entry["policy"], entry["max_in_flight"], entry.get("block"),
                entry.get("position"), entry["failed_by"], entry["ended"],
            )  # fmt: skip
        case "step":
            undo = entry["compensation"] or {}
            return StepEntry(
                sequence, entry["actor"], entry["status"], entry["given_up"], entry["attempts"], entry["cycle"], _thaw(entry["result"]),
                _error_text(entry["error"]), entry["optional"], undo.get("actor"), undo.get("ready", False), undo.get("from_result", False),
                undo.get("on_self_failure", False), _extra(entry),
            )  # fmt: skip
        case "child":
            undo = entry["compensation"] or {}
            return ChildEntry(
                sequence, entry["workflow"], entry["child_id"], entry["status"], entry["close_policy"], entry["cycle"],
                _thaw(entry["result"]), _error_text(entry["error"]), entry["optional"], undo.get("actor"), undo.get("ready", False),
                undo.get("from_result", False), _extra(entry),
            )  # fmt: skip
        case kind:
            raise ValueError(f"an entry of the unknown kind {kind!r}")


def _extra(entry: Mapping[str, Any]) -> Extra:
    retry, group = entry.get("retry_on_signal"), entry.get("group")
    wait = None if retry is None else retry["wait"]
    extra = Extra(
        entry.get("block"), entry.get("position"), entry.get("held_back", False), _thaw(entry.get("fallback")),
        None if retry is None else json.dumps(retry["policy"]), None if wait is None else RetryWait(wait["status"], wait["due_at"]),
        None if group is None else group["sequence"], False if group is None else group["in_parallel"],
    )  # fmt: skip
    return PLAIN if extra == PLAIN else extra
