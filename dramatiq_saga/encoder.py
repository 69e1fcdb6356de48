"""An encoder for ``dramatiq.set_encoder`` that carries more than JSON does (CODEC-3).

What JSON cannot say is written as an object with one key, the tag: ``{"$uuid": "…"}``. A document that holds a tag begins with
a blank, which the stock encoder never writes; every other document is byte for byte the stock encoder's. So what was stored
before the switch is read as it was meant, whatever it looks like, and any JSON tool still reads what is stored after it.

A dict of the user's own that looks like a tag is written with one more ``$`` in front. Nothing is imported by name from data:
a tag finds a function that this process has registered, or :class:`~dramatiq_saga.errors.UnknownTagError` is raised.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from dramatiq import Message
from dramatiq.encoder import Encoder, JSONEncoder

from .errors import UnknownTagError, qualified_name

T = TypeVar("T")

#: What a document that holds a tag begins with. JSON allows it, and the stock encoder never writes it.
MARK = b" "

#: Longest name that a class may be registered under, in characters.
MAX_TAG_LENGTH = 100

#: Values of these classes never change, so one of them may be handed out twice.
IMMUTABLE = frozenset({str, int, float, bool, type(None), bytes, datetime, date, time, timedelta, UUID, Decimal})

_AS_IS: frozenset[type] = frozenset({str, int, float, bool, type(None)})
_TEXT = frozenset({str})
_MESSAGE = frozenset(field.name for field in fields(Message))
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_stock = JSONEncoder()


class TaggedJSONEncoder(Encoder):
    """JSON, and besides: datetime, date, time, timedelta, UUID, Decimal, bytes, tuple, set, frozenset, dicts with any keys.

    They come back equal and of the same class, wherever they stand. A ``datetime`` keeps its ``ZoneInfo`` by the zone's name;
    any other time zone comes back as its offset. An instance of a subclass comes back as the class above, as in JSON, unless
    that subclass is registered. NaN and infinities are refused (CODEC-2), except as ``Decimal``.

    Dramatiq's own messages pass through it as well; one whose arguments are plain JSON is the stock encoder's, byte for byte.
    Safe to share between threads once its classes are registered.
    """

    def __init__(self) -> None:
        self._registered: dict[type, tuple[str, Callable[[Any], Any]]] = {}
        self._readers: dict[str, Callable[[Any], Any]] = dict(_READERS)
        self._ways: dict[type, Callable[[Any], Any]] = {}  # found so far, by exact class
        self._own: dict[type, Callable[[Any], Any]] = {
            **_WRITERS,
            tuple: lambda value: {"$tuple": self._list(value)},
            set: lambda value: {"$set": sorted(self._list(value), key=_dumps)},
            frozenset: lambda value: {"$frozenset": sorted(self._list(value), key=_dumps)},
            list: self._list,
            dict: self._dict,
            **dict.fromkeys(_AS_IS, _as_is),
        }

    def register(self, cls: type[T], name: str, *, to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]) -> None:
        """Carry instances of ``cls``, and of its subclasses where those are not registered themselves.

        Call it before values are read or written, in every process; ``name`` is stored with them, so it has to stay.

        Parameters:
          to_plain: makes of an instance anything that this encoder carries.
          from_plain: makes an equal instance of that.

        Raises:
          ValueError: the class is carried already, or the name is taken or unfit.
        """
        _check(cls, name, to_plain=to_plain, from_plain=from_plain)
        if cls in self._own or cls is object:
            raise ValueError(
                f"{cls.__name__} cannot be registered: " + ("name a class" if cls is object else "it is carried already")
            )
        holder = next((other for other, (taken, _) in self._registered.items() if taken == name), cls)
        if holder is not cls:
            raise ValueError(f"{cls.__name__}: the tag {name!r} is that of {qualified_name(holder)}")
        if cls in self._registered and self._registered[cls][0] != name:
            raise ValueError(f"{cls.__name__} is registered already, as {self._registered[cls][0]!r}")
        tag = f":{name}"  # so that no tag of a later version can be taken for it
        self._registered[cls] = name, to_plain
        self._readers[tag] = from_plain
        self._ways.clear()

    def encode(self, data: Any) -> bytes:
        """``data`` as bytes; equal values give equal bytes, where dicts were filled in the same order.

        Raises:
          TypeError: it holds an instance of a class that is not carried.
          ValueError: it holds NaN or an infinity, or itself.
        """
        if type(data) is dict and data.keys() == _MESSAGE and type(data["args"]) is tuple:
            data = {**data, "args": list(data["args"])}  # Message makes the tuple by itself
        text: str | None
        try:
            text = _dumps(data)
        except TypeError:
            text = None
        if text is None or not _is_plain(data):
            text = MARK.decode() + _dumps(self._plain(data))
        return text.encode()

    def decode(self, data: bytes) -> Any:
        """What was encoded, made anew at each call.

        Raises:
          UnknownTagError: a class that was not registered here.
          DecodeError: not JSON.
          ValueError: what stands behind a tag is not what its class is made of.
        """
        if data[:1] != MARK:
            return _stock.decode(data)
        try:
            return json.loads(data, object_hook=self._revived)
        except (json.JSONDecodeError, UnicodeDecodeError):
            return _stock.decode(data)  # which says so in Dramatiq's way

    # --- writing -----------------------------------------------------------------------------------------------------

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        return value if kind in _AS_IS else (self._ways.get(kind) or self._way(kind))(value)

    def _way(self, kind: type) -> Callable[[Any], Any]:
        """How instances of that class are written; that of the nearest class above it which is carried."""
        for base in kind.__mro__:
            if base in self._registered:
                way: Callable[[Any], Any] = partial(self._tagged, *self._registered[base])
                break
            if base in self._own:
                way = self._own[base]
                break
        else:
            raise TypeError(f"the encoder does not carry {qualified_name(kind)}: register() it with two functions")
        self._ways[kind] = way
        return way

    def _tagged(self, name: str, to_plain: Callable[[Any], Any], value: Any) -> dict[str, Any]:
        return {f"$:{name}": self._plain(to_plain(value))}

    def _list(self, values: Any) -> list[Any]:
        return [self._plain(value) for value in values]

    def _dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        for key in value:
            if type(key) is not str and not (isinstance(key, str) and self._plain(key) is key):
                return {"$dict": [[self._plain(key), self._plain(item)] for key, item in value.items()]}
        plain = {key: self._plain(item) for key, item in value.items()}
        if len(plain) == 1:
            for key in plain:
                if key.startswith("$"):
                    return {f"${str.__str__(key)}": plain[key]}
        return plain

    # --- reading -----------------------------------------------------------------------------------------------------

    def _revived(self, found: dict[str, Any]) -> Any:
        if len(found) != 1:
            return found
        ((key, plain),) = found.items()
        if not key.startswith("$"):
            return found
        if key.startswith("$$"):
            return {key[1:]: plain}
        read = self._readers.get(key[1:])
        if read is None:
            raise UnknownTagError(key[1:].removeprefix(":"))
        try:
            return read(plain)
        except Exception as error:
            raise ValueError(f"a value tagged {key[1:].removeprefix(':')!r} cannot be read: {error}") from error


def _check(cls: object, name: object, *, to_plain: object, from_plain: object) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"register() takes a class, not {cls!r}")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TAG_LENGTH or not name.isprintable():
        raise ValueError(f"{cls.__name__}: a tag is 1 to {MAX_TAG_LENGTH} printable characters, not {name!r}")
    if not callable(to_plain) or not callable(from_plain):
        raise TypeError(f"{cls.__name__}: to_plain and from_plain are functions of one argument")


def _is_plain(value: Any) -> bool:
    """Whether the stock encoder writes a value so that it comes back equal. Only for values that do not hold themselves."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        kind = type(value)
        if kind is dict:
            if not _TEXT.issuperset(map(type, value)):
                return False
            items = value.values()
        elif kind is list:
            items = value
        elif kind in _AS_IS:
            continue
        else:
            return False
        if not _AS_IS.issuperset(map(type, items)):
            open_values += [item for item in items if type(item) not in _AS_IS]
    return True


def _as_is(value: Any) -> Any:
    return value


# --- the classes that are carried ------------------------------------------------------------------------------------


def _datetime_text(value: datetime) -> str:
    """ISO 8601, and in brackets what that cannot say: a zone's name (as in RFC 9557), or that a naive time is the later of two."""
    text = datetime.isoformat(value)
    if value.utcoffset() is None:
        return f"{text}[fold]" if value.fold else text
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
    return f"{text}[{zone}]" if zone else text


def _datetime(text: str) -> datetime:
    text, _, extra = text.partition("[")
    value = datetime.fromisoformat(text)
    if not extra:
        return value
    if extra == "fold]":
        return value.replace(fold=1)
    zone = ZoneInfo(extra[:-1])
    for fold in (0, 1):  # the same time by the clock on the wall, with the offset that it had
        candidate = value.replace(tzinfo=zone, fold=fold)
        if candidate.utcoffset() == value.utcoffset():
            return candidate
    return value.astimezone(zone)  # the zone's rules are others here: the moment stays


def _time_text(value: time) -> str:
    text, offset = time.isoformat(value), value.utcoffset()
    extra = "fold" if value.fold and offset is None else ""
    if value.tzinfo is not None and offset is None:
        zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
        if zone is None:
            raise ValueError("a time whose zone has neither an offset nor a name is not carried")
        extra = f"{zone}!{extra}"
    return f"{text}[{extra}]" if extra else text


def _time(text: str) -> time:
    text, _, extra = text.partition("[")
    value = time.fromisoformat(text)
    zone, named, fold = extra.rstrip("]").rpartition("!")
    return value.replace(tzinfo=ZoneInfo(zone) if named else value.tzinfo, fold=int(fold == "fold"))


_WRITERS: dict[type, Callable[[Any], Any]] = {
    datetime: lambda value: {"$datetime": _datetime_text(value)},
    date: lambda value: {"$date": date.isoformat(value)},
    time: lambda value: {"$time": _time_text(value)},
    timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    UUID: lambda value: {"$uuid": str(value)},
    Decimal: lambda value: {"$decimal": Decimal.__str__(value)},
    bytes: lambda value: {"$bytes": b64encode(value).decode("ascii")},
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "datetime": _datetime,
    "date": date.fromisoformat,
    "time": _time,
    "timedelta": lambda plain: timedelta(*plain),
    "uuid": UUID,
    "decimal": Decimal,
    "bytes": lambda plain: b64decode(plain, validate=True),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}
