"""CODEC-3: what ``TaggedJSONEncoder`` carries, what it leaves alone, and what it refuses."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.encoder import JSONEncoder
from dramatiq.errors import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga import codec
from dramatiq_saga.codec import MAX_DEPTH, TaggedJSONEncoder
from dramatiq_saga.errors import NotSerializableError, UnknownTagError

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = st.sampled_from([UTC, BERLIN, ZoneInfo("America/St_Johns"), timezone(timedelta(hours=-3, minutes=-30, seconds=-7))])
PLAIN_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TAGS = st.sampled_from(["$", "$$", "$uuid", "$datetime", "$tuple", "$$tuple", "$:money", "$dict"])
KEYS = st.text(max_size=4) | TAGS
HASHABLE = st.recursive(
    PLAIN_SCALARS
    | st.datetimes(timezones=st.none() | ZONES)
    | st.dates()
    | st.times(timezones=st.none() | ZONES)
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.binary(max_size=20),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(TAGS, inner, min_size=1, max_size=1)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=12,
)
PLAIN = st.recursive(
    PLAIN_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


@pytest.fixture
def encoder() -> Iterator[TaggedJSONEncoder]:
    before = dramatiq.get_encoder()
    chosen = TaggedJSONEncoder()
    dramatiq.set_encoder(chosen)
    yield chosen
    dramatiq.set_encoder(before)


def shape(value: Any) -> Any:
    """A value with its classes: ``1``, ``1.0`` and ``True`` are equal, and so are a moment's many forms."""
    kind = type(value)
    if kind in (list, tuple):
        return kind, [shape(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted((shape(item) for item in value), key=repr)
    if kind is dict:
        return kind, [(shape(key), shape(item)) for key, item in value.items()]
    if kind in (datetime, time):
        return kind, value.isoformat(), value.fold if value.utcoffset() is None else None, str(getattr(value.tzinfo, "key", ""))
    return kind, repr(value)


# --- what is carried -------------------------------------------------------------------------------------------------


@given(VALUES)
def test_values_come_back_equal_and_of_the_same_classes(value: Any) -> None:
    """CODEC-3: nested in one another, as dict values and keys, in lists, tuples and sets."""
    encoder = TaggedJSONEncoder()
    data = encoder.encode(value)
    assert shape(encoder.decode(data)) == shape(value)
    assert encoder.encode(encoder.decode(data)) == data
    json.loads(data)  # whoever looks from outside reads JSON


@given(PLAIN)
def test_plain_values_are_the_stock_encoders_bytes(value: Any) -> None:
    """CODEC-3: a dict that looks like a tag is as plain as any other."""
    assert TaggedJSONEncoder().encode(value) == JSONEncoder().encode(value)


@given(PLAIN)
def test_what_was_stored_before_the_switch_is_read_as_it_was_meant(value: Any) -> None:
    assert shape(TaggedJSONEncoder().decode(JSONEncoder().encode(value))) == shape(value)


@given(VALUES)
def test_the_form_that_is_seen_first_is_the_one_that_is_seen_ever_after(value: Any) -> None:
    """CODEC-1, CODEC-4: with this encoder a live pass sees what it had, and nobody can change what the next one gets."""
    before = dramatiq.get_encoder()
    dramatiq.set_encoder(TaggedJSONEncoder())
    try:
        data, seen = codec.roundtrip(value, "result")
        hand_out = codec.freeze(data)
        first = hand_out()
        assert shape(seen) == shape(first) == shape(value)
        if isinstance(first, dict | list | set):
            first.clear()
        assert shape(hand_out()) == shape(value)
    finally:
        dramatiq.set_encoder(before)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (datetime(2026, 3, 1, 12, 30), "$datetime"),
        (datetime(2026, 3, 1, 12, 30, 0, 7, tzinfo=UTC), "$datetime"),
        (datetime.max, "$datetime"),
        (date.min, "$date"),
        (time(23, 59, 59, 999999), "$time"),
        (time(8, tzinfo=BERLIN), "$time"),
        (timedelta(days=-1, microseconds=1), "$timedelta"),
        (timedelta.max, "$timedelta"),
        (UUID(int=7), "$uuid"),
        (Decimal("0.10"), "$decimal"),
        (Decimal("-0E+3"), "$decimal"),
        (Decimal("Infinity"), "$decimal"),
        (b"\x00\xff", "$bytes"),
        ((), "$tuple"),
        (set(), "$set"),
        (frozenset({1}), "$frozenset"),
        ({1: "one"}, "$dict"),
        ({"$uuid": (1,)}, "$$uuid"),
    ],
)
def test_each_class_has_its_tag(value: Any, written: str, encoder: TaggedJSONEncoder) -> None:
    data = encoder.encode([value])
    assert list(json.loads(data)[0]) == [written]
    assert shape(encoder.decode(data)) == shape([value])


def test_a_decimal_keeps_its_zeros_and_may_be_no_number(encoder: TaggedJSONEncoder) -> None:
    seen = encoder.decode(encoder.encode([Decimal("1.50"), Decimal("NaN"), Decimal("sNaN")]))
    assert [str(one) for one in seen] == ["1.50", "NaN", "sNaN"]


@pytest.mark.parametrize("fold", [0, 1])
def test_the_hour_that_comes_twice_stays_the_one_that_it_was(fold: int, encoder: TaggedJSONEncoder) -> None:
    for value in (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=fold), datetime(2026, 10, 25, 2, 30, fold=fold)):
        seen = encoder.decode(encoder.encode(value))
        assert (seen, seen.fold, seen.utcoffset(), seen.tzinfo) == (value, fold, value.utcoffset(), value.tzinfo)


def test_a_named_zone_stays_a_zone_so_that_days_can_be_added(encoder: TaggedJSONEncoder) -> None:
    seen = encoder.decode(encoder.encode(datetime(2026, 3, 28, 9, tzinfo=BERLIN)))
    assert (seen + timedelta(days=1)).utcoffset() == timedelta(hours=2)  # over the night in which summer time begins


def test_a_zone_whose_rules_have_changed_keeps_the_moment(encoder: TaggedJSONEncoder) -> None:
    seen = encoder.decode(b' {"$datetime":"2026-03-28T09:00:00+05:00[Europe/Berlin]"}')
    assert seen == datetime(2026, 3, 28, 4, tzinfo=UTC) and seen.tzinfo is BERLIN


class Summer(tzinfo):
    def utcoffset(self, dt: datetime | None) -> timedelta:
        return timedelta(hours=2)

    def dst(self, dt: datetime | None) -> timedelta:
        return timedelta(hours=1)

    def tzname(self, dt: datetime | None) -> str:
        return "summer"


def test_any_other_zone_comes_back_as_its_offset(encoder: TaggedJSONEncoder) -> None:
    value = datetime(2026, 7, 1, 9, tzinfo=Summer())
    seen = encoder.decode(encoder.encode(value))
    assert seen == value and seen.tzinfo == timezone(timedelta(hours=2))


def test_equal_sets_are_equal_bytes(encoder: TaggedJSONEncoder) -> None:
    """A run that is sent again under its id has the same arguments, whatever order a set had in that process."""
    words = [f"w{n}" for n in range(40)]
    forward, backward = set(), set()
    for word in words:
        forward.add(word)
    for word in reversed(words):
        backward.add(word)
    assert encoder.encode(forward) == encoder.encode(backward)
    assert encoder.encode({1, "1", (1,), None, 2.5})  # what Python could not sort


Point = namedtuple("Point", "x y")


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


def test_an_instance_of_a_subclass_comes_back_as_the_class_that_is_carried(encoder: TaggedJSONEncoder) -> None:
    class Stamp(datetime):
        pass

    value = [Point(1, 2), OrderedDict(a=1), defaultdict(list, {2: [3]}), Colour.RED, Size.BIG, Stamp(2026, 1, 1)]
    seen = encoder.decode(encoder.encode(value))
    assert seen == value
    assert [type(one) for one in seen] == [tuple, dict, dict, str, int, datetime]


# --- classes of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str


@dataclass(frozen=True)
class Basket:
    owner: UUID
    prices: tuple[Money, ...]


def register_money(encoder: TaggedJSONEncoder) -> None:
    encoder.register(
        Money, "money", to_plain=lambda money: (money.amount, money.currency), from_plain=lambda plain: Money(*plain)
    )


def test_a_registered_class_is_carried_and_may_hold_others(encoder: TaggedJSONEncoder) -> None:
    register_money(encoder)
    encoder.register(
        Basket, "shop.basket", to_plain=lambda one: {"owner": one.owner, "prices": one.prices}, from_plain=lambda p: Basket(**p)
    )
    value = {"baskets": {Basket(UUID(int=1), (Money(Decimal("9.90"), "EUR"), Money(Decimal(1), "EUR")))}}
    assert encoder.decode(encoder.encode(value)) == value


def test_the_nearest_registered_class_counts_and_an_enum_may_be_one(encoder: TaggedJSONEncoder) -> None:
    encoder.register(Path, "path", to_plain=str, from_plain=Path)  # its instances are of a class below it
    encoder.register(Colour, "colour", to_plain=lambda colour: colour.value, from_plain=Colour)
    value: list[Any] = [Path("/srv/shop"), Colour.RED, {Colour.RED: Path("a")}]
    seen = encoder.decode(encoder.encode(value))
    assert seen == value and type(seen[1]) is Colour and type(next(iter(seen[2]))) is Colour
    with pytest.raises(TypeError, match="PurePosixPath"):
        encoder.encode(PurePosixPath("a"))


def test_a_class_that_is_registered_later_is_carried_from_then_on(encoder: TaggedJSONEncoder) -> None:
    assert encoder.decode(encoder.encode(Point(1, 2))) == (1, 2)
    encoder.register(Point, "point", to_plain=tuple, from_plain=lambda plain: Point(*plain))
    assert type(encoder.decode(encoder.encode(Point(1, 2)))) is Point


def test_a_users_dict_that_looks_like_a_tag_comes_back_unharmed(encoder: TaggedJSONEncoder) -> None:
    """CODEC-3: also beside real tags, where it has to be told from them."""
    register_money(encoder)
    looks = [{"$uuid": "no uuid"}, {"$$uuid": 1}, {"$": None}, {"$:money": [1]}, {"$unheard": {"$of": 1}}, {"$a": 1, "$b": 2}]
    for value in (looks, [*looks, UUID(int=3)], {"$tuple": (1, {"$set": {2}})}):
        assert shape(encoder.decode(encoder.encode(value))) == shape(value)


def test_a_dict_that_looks_like_a_tag_is_another_value_than_the_tag(encoder: TaggedJSONEncoder) -> None:
    """The digest by which a run id's arguments are compared tells the two apart."""
    value = UUID(int=3)
    assert codec.digest(encoder.encode([value])) != codec.digest(encoder.encode([{"$uuid": str(value)}]))


@pytest.mark.parametrize(
    ("cls", "name", "words"),
    [
        (UUID, "id", "carried already"),
        (dict, "d", "carried already"),
        (object, "o", "name a class"),
        (Colour, "money", "is that of .*Money"),
        (Money, "cash", "registered already, as 'money'"),
        (Colour, "", "1 to 100 printable"),
        (Colour, "a\n", "1 to 100 printable"),
        (Colour, "x" * 101, "1 to 100 printable"),
    ],
)
def test_what_cannot_be_registered_is_refused(cls: type, name: str, words: str, encoder: TaggedJSONEncoder) -> None:
    register_money(encoder)
    with pytest.raises(ValueError, match=words):
        encoder.register(cls, name, to_plain=str, from_plain=str)


def test_registering_takes_a_class_and_two_functions(encoder: TaggedJSONEncoder) -> None:
    with pytest.raises(TypeError, match="takes a class"):
        encoder.register("Money", "money", to_plain=str, from_plain=str)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="are functions"):
        encoder.register(Money, "money", to_plain=str, from_plain=None)  # type: ignore[arg-type]


def test_registering_a_class_again_replaces_its_functions(encoder: TaggedJSONEncoder) -> None:
    register_money(encoder)
    stored = encoder.encode(Money(Decimal(1), "EUR"))
    encoder.register(Money, "money", to_plain=str, from_plain=lambda plain: Money(plain[0] + 1, plain[1]))
    assert encoder.decode(stored) == Money(Decimal(2), "EUR")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({"when": [datetime.min, threading.Lock()]}, "result['when'][1]", "lock"),
        ([(1, (date.min, math.nan))], "result[0][1][1]", "nan is not JSON"),
        ({UUID(int=1): -math.inf}, "result[UUID('00000000-0000-0000-0000-000000000001')]", "not JSON"),
        ({"a": {math.nan, (1,)}}, "result['a']", "not JSON"),
        ({"m": (Money(Decimal(1), "EUR"),)}, "result['m'][0]", "register"),
        ({"a": Enum("Odd", "ONE")["ONE"]}, "result['a']", "register"),  # type: ignore[index]
        ({"a": bytearray(b"x")}, "result['a']", "bytearray"),
        ({Money(Decimal(1), "EUR"): 1}, "result", "its key Money"),
        ((time(8, tzinfo=type("Odd", (tzinfo,), {"utcoffset": lambda self, dt: None})()),), "result[0]", "zone"),
    ],
)
def test_what_is_not_carried_is_refused_with_the_path_to_it(
    value: Any, path: str, words: str, encoder: TaggedJSONEncoder
) -> None:
    """CODEC-2, with this encoder."""
    with pytest.raises(NotSerializableError, match=words) as refused:
        codec.encode(value, "result")
    assert refused.value.path == path


def test_what_refers_to_itself_is_refused(encoder: TaggedJSONEncoder) -> None:
    ring: list[Any] = [UUID(int=1)]
    ring.append({"again": (ring,)})
    with pytest.raises(NotSerializableError, match="contains itself"):
        codec.encode(ring, "result")
    encoder.register(Point, "point", to_plain=lambda point: point, from_plain=lambda plain: plain)
    with pytest.raises(NotSerializableError, match="levels deep"):
        codec.encode(Point(1, 2), "result")


def test_what_could_be_written_but_not_read_again_is_refused(encoder: TaggedJSONEncoder) -> None:
    """A tuple takes two levels of the JSON that is stored."""
    value: Any = 1
    for _ in range(MAX_DEPTH // 2):
        value = (value,)
    assert codec.roundtrip(value, "result")[1] == value
    with pytest.raises(NotSerializableError, match="levels deep"):
        codec.encode([value], "result")
    assert codec.roundtrip([(1,)] * MAX_DEPTH, "result")[1]


def test_an_unknown_tag_is_a_clear_error(encoder: TaggedJSONEncoder) -> None:
    """CODEC-3: and so is a class that only the process which wrote it had registered."""
    other = TaggedJSONEncoder()
    register_money(other)
    stored = other.encode({"price": Money(Decimal(1), "EUR")})
    with pytest.raises(UnknownTagError, match=r"'money'.*register") as refused:
        codec.decode(stored)
    assert refused.value.tag == "money"
    with pytest.raises(UnknownTagError, match=r"'os\.system'"):
        codec.decode(b' {"$os.system":"true"}')  # SAFE-1: a name in data is looked up, never imported
    register_money(encoder)
    assert codec.decode(stored) == {"price": Money(Decimal(1), "EUR")}


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b' {"$uuid":"x"}', ValueError, "tagged 'uuid' cannot be read"),
        (b' {"$bytes":"*"}', ValueError, "tagged 'bytes' cannot be read"),
        (b' {"$datetime":"2026-03-28T09:00:00+05:00[Europe/Nowhere]"}', ValueError, "Europe/Nowhere"),
        (b' {"$datetime":"2026-03-28T09:00:00+05:00[../../etc/passwd]"}', ValueError, "cannot be read"),
        (b' {"$set":[[]]}', ValueError, "tagged 'set' cannot be read"),
        (b" {", DecodeError, "failed to decode"),
        (b" \xff", DecodeError, "failed to decode"),
        (b"{", DecodeError, "failed to decode"),
    ],
)
def test_damaged_data_is_a_clear_error(data: bytes, error: type[Exception], words: str, encoder: TaggedJSONEncoder) -> None:
    with pytest.raises(error, match=words):
        codec.decode(data)


# --- Dramatiq's own messages -----------------------------------------------------------------------------------------


def message(*args: Any, **options: Any) -> Message[Any]:
    return Message("default", "act", args, {}, options)


@given(st.lists(VALUES, max_size=3).map(tuple))
def test_dramatiqs_messages_carry_the_same_values(args: tuple[Any, ...]) -> None:
    before = dramatiq.get_encoder()
    dramatiq.set_encoder(TaggedJSONEncoder())
    try:
        sent = message(*args)
        seen = Message.decode(sent.encode())
    finally:
        dramatiq.set_encoder(before)
    assert shape(seen.args) == shape(args) and seen.message_id == sent.message_id


def test_a_message_with_plain_arguments_is_read_by_workers_with_the_stock_encoder(encoder: TaggedJSONEncoder) -> None:
    sent = message(1, {"a": [None]})
    dramatiq.set_encoder(JSONEncoder())
    try:
        assert sent.encode() == encoder.encode(sent.asdict())
    finally:
        dramatiq.set_encoder(encoder)


def test_a_pipelines_messages_stay_messages(encoder: TaggedJSONEncoder) -> None:
    sent = message(UUID(int=1), pipe_target=message((1, 2)).asdict())
    target = Message(**Message.decode(sent.encode()).options["pipe_target"])
    assert target.args == ((1, 2),) and type(target.args[0]) is tuple


def test_a_message_of_an_unknown_class_is_dramatiqs_decode_error(encoder: TaggedJSONEncoder) -> None:
    other = TaggedJSONEncoder()
    register_money(other)
    data = other.encode(message(Money(Decimal(1), "EUR")).asdict())
    with pytest.raises(DecodeError) as refused:
        Message.decode(data)
    assert isinstance(refused.value.__cause__, UnknownTagError)
