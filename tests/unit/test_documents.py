"""Documents hold all that a replay sees: every kind of entry, with every combination of what it may carry (CODEC-1, C68)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga.codec import describe_error, encode, freeze
from dramatiq_saga.engine.documents import Keeper, from_document, to_document
from dramatiq_saga.engine.rows import (
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

names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)
moments = st.none() | st.integers(0, 2**53)
numbers = st.integers(0, 1000)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
).map(lambda value: freeze(encode(value, "value")))
maybe = st.none() | values
errors = st.none() | names.map(lambda text: describe_error(RuntimeError(text)))
flags = st.booleans()
retry_waits = st.none() | st.builds(RetryWait, st.sampled_from(["waiting", "consumed", "timed_out", "cancelled"]), moments)


@st.composite
def extras(draw: Any) -> Extra:
    block, position = draw(st.just((None, None)) | st.tuples(numbers, numbers))
    policy = draw(st.none() | st.builds(lambda name: json.dumps({"signal": name, "max_retries": None}), names))
    group, parallel = draw(st.just((None, False)) | st.tuples(numbers, flags))
    wait = draw(retry_waits) if policy is not None else None
    return Extra(block, position, block is not None and draw(flags), draw(maybe), policy, wait, group, parallel)


@st.composite
def undos(draw: Any) -> tuple[str | None, bool, bool]:
    """Actor, whether it is ready, whether it is built from the result."""
    kind = draw(st.sampled_from(["none", "known", "from result", "resolved"]))
    name = draw(names) if kind in ("known", "resolved") else None
    return name, kind in ("known", "resolved"), kind in ("from result", "resolved")


@st.composite
def entry(draw: Any, sequence: int) -> Entry:
    kind = draw(st.sampled_from([cls.kind for cls in get_args(Entry)]))
    undo = draw(undos())
    has_undo = undo[0] is not None or undo[2]
    match kind:
        case "step":
            return StepEntry(
                sequence, draw(names), draw(names), draw(flags), draw(numbers), draw(numbers), draw(maybe), draw(errors), draw(flags),
                *undo, has_undo and draw(flags), draw(extras()),
            )  # fmt: skip
        case "child":
            return ChildEntry(
                sequence, draw(names), draw(names), draw(names), draw(names), draw(numbers), draw(maybe), draw(errors), draw(flags),
                *undo, draw(extras()),
            )  # fmt: skip
        case "block":
            block, position = draw(st.just((None, None)) | st.tuples(numbers, numbers))
            what = draw(st.sampled_from(["parallel", "saga"]))
            return BlockEntry(
                sequence, what, draw(numbers), draw(st.none() | names), draw(st.none() | numbers), block, position,
                draw(st.none() | numbers), draw(flags),
            )  # fmt: skip
        case "wait":
            what = draw(st.sampled_from(["signal", "timer"]))
            return WaitEntry(sequence, what, draw(st.none() | names), draw(names), draw(moments), draw(maybe))
        case "patch":
            return PatchEntry(sequence, draw(names), draw(flags))
        case "sent signal":
            return SentSignalEntry(sequence, draw(names), draw(values))
        case _:
            return SideEffectEntry(sequence, draw(names), draw(values))


@st.composite
def snapshots(draw: Any) -> Snapshot:
    entries = [draw(entry(sequence)) for sequence in range(1, draw(st.integers(0, 6)) + 1)]
    context = draw(st.none() | values.map(lambda value: encode(value(), "context")))
    signals = tuple(ReceivedSignal(number, draw(names), draw(values)) for number in range(1, draw(st.integers(0, 3)) + 1))
    parent = draw(st.none() | st.builds(Parent, names, numbers, names, st.just("default"), st.none()))
    return Snapshot(
        draw(names), draw(names), draw(st.none() | names), "default", draw(st.none() | numbers), None, draw(names), draw(names),
        len(entries), len(entries) + 1, len(entries), draw(values), context, 0, entries,
        draw(st.dictionaries(names, st.none() | names, max_size=3)), signals, parent, draw(st.none() | names),
    )  # fmt: skip


def opened(thing: Any) -> Any:
    """Anything of a snapshot as something that can be compared: its values opened, its errors without tracebacks."""
    if isinstance(thing, (list, tuple)):
        return [opened(part) for part in thing]
    if hasattr(thing, "__dataclass_fields__"):
        found = {field.name: opened(getattr(thing, field.name)) for field in fields(thing)}
        if found.get("error"):
            found["error"] = {**json.loads(found["error"]), "traceback": ""}
        return type(thing).__name__, found
    return repr(thing()) if callable(thing) else thing


@given(snapshots())
def test_a_snapshot_comes_back_from_its_document(snapshot: Snapshot) -> None:
    """Through JSON text, as through a file."""
    document = json.loads(json.dumps(to_document(snapshot, Keeper(), {})))
    assert opened(from_document(document)) == opened(snapshot)


def test_every_kind_of_entry_is_known() -> None:
    """A new kind needs its keys in a document, and a golden history."""
    assert {cls.kind for cls in get_args(Entry)} == {"step", "child", "block", "wait", "side effect", "sent signal", "patch"}


FIELDS = {
    StepEntry: "sequence actor status given_up attempts cycle value error optional comp_actor comp_ready comp_from_result "
    "comp_on_self_failure extra",
    ChildEntry: "sequence workflow child_id status close_policy cycle value error optional comp_actor comp_ready comp_from_result extra",
    BlockEntry: "sequence what size policy max_in_flight block position failed_by ended",
    WaitEntry: "sequence what name status due_at value",
    SideEffectEntry: "sequence name value",
    SentSignalEntry: "sequence name value",
    PatchEntry: "sequence name value",
    Extra: "block position held_back fallback retry wait comp_group comp_parallel",
    RetryWait: "status due_at",
    ReceivedSignal: "id name value",
    Parent: "run_id sequence workflow queue priority",
}


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_every_field_of_an_entry_has_its_key(cls: Any) -> None:
    """A new field has to be put into ``engine/documents.py`` and into what is drawn above, or a history would lose it."""
    assert [field.name for field in fields(cls)] == FIELDS[cls].split()


#: What was not there in the first files, and what its absence means.
LATER = ("priority", "parent", "signals", "close_request")


def test_what_a_file_of_an_earlier_release_lacks_is_as_it_was_then() -> None:
    """Golden histories are added and never edited, so a key may be missing for ever."""
    plain = Snapshot("r", "w", None, "q", None, None, "running", "none", 1, 2, 1, freeze(b"[[],{}]"), None, 0, [], {})
    document = to_document(replace(plain, entries=[StepEntry(1, "a", "pending")]), Keeper(), {})
    for key in LATER:
        del document[key]
    found = from_document(document)
    assert (found.priority, found.parent, found.signals, found.close_request) == (None, None, (), None)
    step = found.entries[0]
    assert isinstance(step, StepEntry)
    assert step.extra is PLAIN


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(kind="miracle"),
        lambda entry: entry.update(sequence=2),
        lambda entry: entry.pop("actor"),
        lambda entry: entry.update(result={"yaml": "1"}),
        lambda entry: entry.update(result={"base64": "not base64"}),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    plain = Snapshot("r", "w", None, "q", None, None, "running", "none", 1, 2, 1, freeze(b"[[],{}]"), None, 0, [], {})
    document = to_document(replace(plain, entries=[StepEntry(1, "a", "pending")]), Keeper(), {})
    change(document["entries"][0])
    with pytest.raises((KeyError, ValueError, TypeError)):
        from_document(document)
