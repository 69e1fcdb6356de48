"""CODEC-1, CODEC-2, CODEC-4, SAFE-1, SAFE-2: what is stored, refused, handed out and shown."""

from __future__ import annotations

import json
import math
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.encoder import Encoder, JSONEncoder, PickleEncoder
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga import codec
from dramatiq_saga.codec import (
    MAX_DEPTH,
    MAX_ERROR_LENGTH,
    decode,
    describe_error,
    describe_interrupted,
    digest,
    encode,
    encode_call,
    freeze,
    load_error,
    preview,
    printable,
    printable_block,
    roundtrip,
    step_failed,
)
from dramatiq_saga.errors import NotSerializableError, StepFailedError, StepInterruptedError, in_one_line

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
LOOSE = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner, max_size=4)
    ),
    max_leaves=20,
)


class UUIDEncoder(JSONEncoder):
    """A host's encoder of the usual kind: JSON, and one type more. It writes bare NaN, as the stock one does."""

    def encode(self, data: Any) -> bytes:
        return json.dumps(data, default=lambda value: {"$uuid": str(value)}).encode()

    def decode(self, data: bytes) -> Any:
        return json.loads(data, object_hook=lambda d: uuid.UUID(d["$uuid"]) if "$uuid" in d else d)


class TaggedFloats(JSONEncoder):
    """A host's encoder that carries NaN in valid JSON."""

    def encode(self, data: Any) -> bytes:
        return json.dumps({"NaN": True} if isinstance(data, float) and math.isnan(data) else data).encode()

    def decode(self, data: bytes) -> Any:
        value = json.loads(data)
        return math.nan if value == {"NaN": True} else value


@pytest.fixture
def use_encoder() -> Iterator[Callable[[Encoder], None]]:
    before = dramatiq.get_encoder()
    yield dramatiq.set_encoder
    dramatiq.set_encoder(before)


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


# --- values ----------------------------------------------------------------------------------------------------------


@given(LOOSE)
def test_the_form_that_is_seen_first_is_the_one_that_is_seen_ever_after(value: Any) -> None:
    """CODEC-1, C50: tuples and integer keys change their form at once, not at the first replay."""
    data, seen = roundtrip(value, "result")
    assert data == encode(value, "result")
    assert seen == decode(data) == freeze(data)() == freeze(data)()
    assert encode(seen, "result") == encode(decode(encode(seen, "result")), "result")


@given(LOOSE)
def test_stored_bytes_are_those_of_dramatiqs_own_encoder(value: Any) -> None:
    assert encode(value, "result") == JSONEncoder().encode(value)


@given(JSON)
def test_json_values_come_back_equal(value: Any) -> None:
    assert roundtrip(value, "result")[1] == value


@given(JSON)
def test_nobody_who_changes_a_handed_out_value_changes_what_the_next_one_gets(value: Any) -> None:
    """CODEC-4, C22."""
    hand_out = freeze(encode(value, "result"))
    first, second = hand_out(), hand_out()
    assert not {id(part) for part in containers(first)} & {id(part) for part in containers(second)}

    for part in list(containers(first)):
        part.clear()
    assert hand_out() == second == value


def test_immutable_values_are_handed_out_without_a_copy() -> None:
    hand_out = freeze(encode("x" * 100, "result"))
    assert hand_out() is hand_out()


def test_a_custom_encoders_containers_are_decoded_again_each_time(use_encoder: Callable[[Encoder], None]) -> None:
    use_encoder(PickleEncoder())
    value = {"ids": {1, 2}, "when": (1, 2)}
    hand_out = freeze(encode(value, "result"))
    use_encoder(JSONEncoder())  # a cache that was filled before still holds what it held

    first = hand_out()
    first["ids"].add(3)
    assert hand_out() == value and type(hand_out()["when"]) is tuple


def test_the_encoder_is_the_one_set_at_the_time_of_the_call(use_encoder: Callable[[Encoder], None]) -> None:
    value = [uuid.UUID(int=7)]
    with pytest.raises(NotSerializableError, match="UUID"):
        encode(value, "args[0]")
    use_encoder(UUIDEncoder())
    assert roundtrip(value, "args[0]")[1] == value
    assert freeze(encode(value, "args[0]"))() == value


@pytest.mark.parametrize("constant", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoder", [JSONEncoder(), UUIDEncoder()], ids=["stock", "subclass"])
def test_nan_is_refused_however_deep(constant: float, encoder: Encoder, use_encoder: Callable[[Encoder], None]) -> None:
    """CODEC-2, C46."""
    use_encoder(encoder)
    with pytest.raises(NotSerializableError, match="not JSON") as refused:
        encode({"rows": [1, {"rate": constant}]}, "result")
    assert refused.value.path == "result['rows'][1]['rate']"


def test_text_that_only_says_nan_is_no_nan(use_encoder: Callable[[Encoder], None]) -> None:
    for encoder in (JSONEncoder(), UUIDEncoder()):
        use_encoder(encoder)
        assert roundtrip(["NaN", "-Infinity"], "result")[1] == ["NaN", "-Infinity"]


@pytest.mark.parametrize("encoder", [PickleEncoder(), TaggedFloats()], ids=["pickle", "tagged"])
def test_an_encoder_that_carries_nan_may(encoder: Encoder, use_encoder: Callable[[Encoder], None]) -> None:
    use_encoder(encoder)
    assert math.isnan(roundtrip(math.nan, "result")[1])


def test_a_pickling_host_may_store_what_refers_to_itself(use_encoder: Callable[[Encoder], None]) -> None:
    use_encoder(PickleEncoder())
    ring: list[Any] = []
    ring.append(ring)
    seen = roundtrip(ring, "result")[1]
    assert seen[0] is seen


LOCK = threading.Lock()
RING: list[Any] = [1]
RING.append({"again": RING})


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (LOCK, "result", "lock"),
        ([1, {"f": len}], "result[1]['f']", "builtin_function_or_method"),
        ((1, (2, {3})), "result[1][1]", "set"),
        ({"a": {"b": b"raw"}}, "result['a']['b']", "bytes"),
        ({"a": {(1, 2): 3}}, "result['a']", "its key (1, 2)"),
        ({"a": {math.nan: 3}}, "result['a']", "its key nan"),
        (RING, "result[1]['again']", "contains itself"),
        (nest(2000), "result", f"more than {MAX_DEPTH} levels"),
        ([1, 10**5000], "result[1]", "int"),
        ({"k" * 500: LOCK}, "result['" + "k" * 78 + "…]", "lock"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_with_the_path_to_it(value: Any, path: str, words: str) -> None:
    """CODEC-2, C47."""
    with pytest.raises(NotSerializableError) as refused:
        encode(value, "result")
    assert (refused.value.path, words in refused.value.detail) == (path, True), refused.value
    assert refused.value.__cause__ is not None


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file, pytest.raises(NotSerializableError, match=r"args\[0\].*TextIOWrapper"):
        encode_call([file], {})


def test_a_call_is_stored_as_its_two_kinds_of_arguments() -> None:
    assert decode(encode_call((1, "a"), {"when": None})) == [[1, "a"], {"when": None}]


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ([1, {2}], {}, "args[1]"),
        ([], {"when": [LOCK]}, "kwargs['when'][0]"),
        ([nest(MAX_DEPTH)], {}, "arguments"),
    ],
)
def test_an_argument_that_cannot_be_stored_is_named(args: list[Any], kwargs: dict[str, Any], path: str) -> None:
    with pytest.raises(NotSerializableError) as refused:
        encode_call(args, kwargs)
    assert refused.value.path == path


def test_nesting_is_limited_by_a_number_and_not_by_the_stack_at_hand() -> None:
    """What one stack depth can encode, a worker deeper in its stack must be able to decode."""
    assert roundtrip(nest(MAX_DEPTH), "result")[1] == nest(MAX_DEPTH)
    with pytest.raises(NotSerializableError):
        encode(nest(MAX_DEPTH + 1), "result")
    with pytest.raises(NotSerializableError):
        encode([{"wide": [[]] * 1000}, {"deep": nest(MAX_DEPTH - 1)}], "result")

    wide: list[Any] = [{"a": [], "b": {}}] * 1000
    assert roundtrip(wide, "result")[1] == wide


def test_enums_and_subclasses_of_plain_types_are_stored_plainly_at_any_size() -> None:
    class Colour(StrEnum):
        RED = "red"

    class Record(dict[str, Any]):
        pass

    value = [Record(colour=Colour.RED, flag=True) for _ in range(MAX_DEPTH + 1)]
    assert roundtrip(value, "result")[1] == [{"colour": "red", "flag": True}] * (MAX_DEPTH + 1)


@given(st.dictionaries(st.text(), JSON, min_size=2, max_size=5))
def test_the_order_in_which_a_dict_was_filled_does_not_change_its_digest(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    assert digest(encode(value, "args")) == digest(encode(turned, "args"))


@given(JSON, JSON)
def test_digests_tell_different_values_apart(one: Any, other: Any) -> None:
    same = encode(one, "args") == encode(other, "args")
    assert len(digest(encode(one, "args"))) == 64
    assert same or one == other or digest(encode(one, "args")) != digest(encode(other, "args"))


def test_a_digest_needs_no_json() -> None:
    assert digest(pickle.dumps({1})) != digest(pickle.dumps({2}))


@given(st.binary(max_size=200) | st.text().map(str.encode), st.integers(0, 60))
def test_a_preview_never_exceeds_its_limit(data: bytes, limit: int) -> None:
    """SAFE-2."""
    shown = preview(data, limit)
    assert len(shown) <= limit
    shown.encode()


def test_a_preview_shows_the_beginning_and_says_that_it_is_cut() -> None:
    assert preview(b'{"a":1}', 7) == '{"a":1}'
    assert preview(b'{"a":1}', 6) == '{"a":…'
    assert preview("ääää".encode(), 3) == "ää…"
    assert preview(b"\x80\x05", 20) == "<2 bytes>"
    pickled = pickle.dumps("x" * 10**6)
    assert preview(pickled, 40) == f"<{len(pickled)} bytes>"


def test_a_database_may_hand_over_another_kind_of_bytes() -> None:
    data = encode({"a": [1]}, "result")
    for kind in (memoryview, bytearray):
        assert decode(kind(data)) == freeze(kind(data))() == {"a": [1]}  # type: ignore[arg-type]
        assert preview(kind(data), 100) == data.decode()  # type: ignore[arg-type]


# --- errors ----------------------------------------------------------------------------------------------------------


class Declined(ValueError):
    code = "insufficient_funds"


class Hostile(Exception):
    """Everything about it raises."""

    @property
    def code(self) -> Any:
        raise RuntimeError("no")

    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def raised(exc: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise exc from cause
    except BaseException as e:
        return e


def test_an_error_is_kept_by_names_and_texts() -> None:
    """CODEC-4."""
    error = load_error(describe_error(raised(Declined("no money"), raised(KeyError("card")))))
    assert error["type"] == f"{__name__}.Declined"
    assert error["bases"] == [f"{__name__}.Declined", *(f"builtins.{n}" for n in ("ValueError", "Exception", "BaseException"))]
    assert (error["message"], error["code"]) == ("no money", "insufficient_funds")
    assert "in raised" in error["traceback"] and "raise exc from cause" in error["traceback"]
    assert error["cause"]["type"] == "builtins.KeyError"
    assert error["cause"]["cause"] is None


def test_an_implicit_cause_is_kept_and_a_suppressed_one_is_not() -> None:
    def failing(suppress: bool) -> BaseException:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                if suppress:
                    raise ValueError("second") from None
                raise ValueError("second")  # noqa: B904
        except ValueError as e:
            return e

    assert load_error(describe_error(failing(False)))["cause"]["message"] == "'first'"
    assert load_error(describe_error(failing(True)))["cause"] is None


def test_a_long_or_circular_chain_of_causes_ends() -> None:
    chain: BaseException | None = None
    for i in range(50):
        chain = raised(ValueError(i), chain)
    assert chain is not None
    error, depth = load_error(describe_error(chain)), 0
    while error["cause"]:
        error, depth = error["cause"], depth + 1
    assert depth == 3

    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert load_error(describe_error(one))["cause"]["cause"] is None


def test_an_error_that_raises_at_every_question_is_described_all_the_same() -> None:
    error = load_error(describe_error(raised(Hostile())))
    assert error["type"].endswith("Hostile")
    assert "RuntimeError" in error["message"]
    assert error["code"] is None


def test_half_a_surrogate_pair_in_a_message_becomes_text_that_a_column_takes() -> None:
    error = load_error(describe_error(ValueError("file \udce4.txt")))
    assert error["message"] == "file \\udce4.txt"
    assert error["type"] == "builtins.ValueError"


def test_notes_are_kept_with_the_traceback() -> None:
    exc = ValueError("x")
    exc.add_note("while charging order 42")
    assert "while charging order 42" in load_error(describe_error(exc))["traceback"]


def test_a_deep_stack_keeps_both_ends() -> None:
    def dive(n: int) -> None:
        if n == 0:
            raise ValueError("bottom")
        dive(n - 1)

    with pytest.raises(ValueError) as caught:
        dive(300)
    trace = load_error(describe_error(caught.value))["traceback"]
    assert "in test_a_deep_stack_keeps_both_ends" in trace
    assert 'raise ValueError("bottom")' in trace
    assert len(trace) <= 6000


def test_a_long_message_keeps_both_ends() -> None:
    message = load_error(describe_error(ValueError("begin" + "x" * 10**6 + "end")))["message"]
    assert message.startswith("begin") and message.endswith("end") and "characters cut" in message
    assert len(message) <= 2000


@pytest.mark.parametrize(
    ("code", "kept"),
    [(17, 17), ("E17", "E17"), (1.5, 1.5), (math.nan, None), (10**30, None), (object(), None), (["x"], None), (None, None)],
)
def test_a_code_is_kept_where_it_is_a_plain_value(code: Any, kept: Any) -> None:
    exc = ValueError("x")
    exc.code = code  # type: ignore[attr-defined]
    assert load_error(describe_error(exc))["code"] == kept


NASTY = st.text(st.characters(codec=None) | st.sampled_from('\x00\x1b"\\\ud800\U0001f600é'), max_size=40)


@given(name=NASTY, message=NASTY, code=NASTY, repeat=st.integers(1, 2000), causes=st.integers(0, 5), bases=st.integers(0, 60))
def test_a_description_always_fits_its_column_and_always_loads(
    name: str, message: str, code: str, repeat: int, causes: int, bases: int
) -> None:
    """C49: 64 KB of text at four bytes a character, whatever the error holds."""
    kind: type[BaseException] = Exception
    for _ in range(bases):
        kind = type("E", (kind,), {"__qualname__": (name * repeat)[:5000], "__module__": (name * repeat)[:5000]})
    exc: BaseException = kind(message * repeat)
    exc.code = code * repeat  # type: ignore[attr-defined]
    for _ in range(causes):
        exc = raised(kind(message * repeat), exc)

    text = describe_error(exc)
    assert len(text) <= MAX_ERROR_LENGTH
    assert len(text.encode()) < 65_536
    error = load_error(text)
    assert error["type"] != "unknown"
    assert error.keys() == {"type", "bases", "message", "code", "traceback", "cause"}
    step_failed("charge", 1, text=text).message.encode()


def test_the_worst_description_still_says_who_and_what() -> None:
    worst = "\x01" * 10_000
    kind: type[BaseException] = Exception
    for _ in range(60):
        kind = type("E", (kind,), {"__qualname__": worst, "__module__": worst})
    text = describe_error(raised(kind(worst), kind(worst)))
    assert len(text) <= MAX_ERROR_LENGTH
    assert load_error(text)["type"].startswith("\x01")


@pytest.mark.parametrize(
    "text", ["", "not json", "[1]", "null", '"x"', "{}", "[" * 5000, '{"bases":null,"message":1,"type":[],"traceback":null}']
)
def test_text_of_any_other_origin_loads_too(text: str) -> None:
    error = load_error(text)
    assert error.keys() == {"type", "bases", "message", "code", "traceback", "cause"}
    assert not step_failed("charge", 1, text=text).is_a(ValueError)


def test_a_failed_step_is_told_from_its_row_without_its_class() -> None:
    """CODEC-4, SAFE-1."""
    text = describe_error(raised(Declined("no money"), raised(KeyError("card"))))
    error = step_failed("charge", 3, text=text)
    assert (error.actor_name, error.sequence, error.message, error.code) == ("charge", 3, "no money", "insufficient_funds")
    assert error.is_a(Declined) and error.is_a(ValueError) and error.is_a("Declined")
    assert not error.is_a(KeyError)
    assert error.cause is not None and error.cause["message"] == "'card'"
    assert pickle.loads(pickle.dumps(error)).recorded() == error.recorded() == load_error(text)


def test_a_run_that_fails_of_a_step_records_the_steps_own_error_as_the_cause() -> None:
    step = step_failed("charge", 3, text=describe_error(raised(Declined("no money"), raised(KeyError("card")))))
    error = load_error(describe_error(raised(step)))
    assert error["type"] == "dramatiq_saga.errors.StepFailedError"
    assert error["cause"]["type"].endswith(".Declined")
    assert error["cause"]["cause"]["type"] == "builtins.KeyError"


def test_an_interrupted_step_stays_one_through_its_row() -> None:
    """RECLAIM-6."""
    error = step_failed("charge", 3, text=describe_interrupted(StepInterruptedError("charge", 3, message="claimed 5 times")))
    assert type(error) is StepInterruptedError
    assert error.message == "claimed 5 times"
    assert error.is_a(StepInterruptedError) and error.is_a(StepFailedError)


def test_a_run_that_an_interrupted_step_ends_names_the_step() -> None:
    """RECLAIM-6: the row of the step itself has its name; the run's has not."""
    recorded = load_error(describe_error(StepInterruptedError("charge", 3, message="claimed 5 times")))
    assert in_one_line(recorded["type"], recorded["message"]) == "step 3 (charge) was interrupted: claimed 5 times"
    assert recorded["cause"]["message"] == "claimed 5 times"


def test_nothing_is_imported_for_a_stored_name() -> None:
    """SAFE-1: the names of a row are words."""
    text = json.dumps({"type": "antigravity.Error", "bases": ["antigravity.Error"], "message": "x"})
    error = step_failed("charge", 1, text=text)
    assert type(error) is StepFailedError and error.is_a("antigravity.Error")


# --- text ------------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec=None)))
def test_what_is_printed_can_neither_move_the_cursor_nor_turn_the_line(text: str) -> None:
    """C70."""
    shown = printable(text)
    assert not any(
        ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069" for c in shown
    )
    shown.encode()
    assert printable(shown) == shown


def test_controls_become_visible_and_other_text_stays() -> None:
    assert printable("a\x1b[31mb\nc\u202e") == "a\\x1b[31mb\\x0ac\\u202e"
    assert printable("naïve 日本 👍🏽 <b>") == "naïve 日本 👍🏽 <b>"
    assert printable_block("a\x1b\n\tb") == "a\\x1b\n\tb"


@given(st.text(st.characters(codec=None), max_size=300), st.integers(0, 100))
def test_cutting_never_exceeds_the_limit(text: str, limit: int) -> None:
    shown = codec._cut_middle(text, limit)
    assert len(shown) <= limit
    shown.encode()
