"""Values and errors between memory and rows (CODEC-1, CODEC-2, CODEC-4).

Values pass through Dramatiq's own encoder, looked up at each call, so a host that sets another one is heard. What it cannot
carry is refused where it enters, with the path to the culprit; finding that path costs only when something is wrong.
Errors become JSON text that names classes instead of pickling them and that always fits its column.

Nothing here is unpickled, and nothing imported by a stored name, unless the host chose an encoder that does (SAFE-1).
Describing an error never raises, whatever the error does.

Long because values, errors and text for people share their limits and their promise never to raise where an outcome is at stake.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import marshal
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import dramatiq
from dramatiq.encoder import JSONEncoder

from .encoder import IMMUTABLE, MARK
from .encoder import TaggedJSONEncoder as TaggedJSONEncoder
from .errors import NotSerializableError, StepFailedError, StepInterruptedError, qualified_name

#: Deepest nesting that is stored. Deeper values would encode in one stack depth and fail to decode in another.
MAX_DEPTH = 200

#: Longest text of :func:`describe_error`, in characters: fits a 64 KB column at four bytes each.
MAX_ERROR_LENGTH = 16_000

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_CONTAINERS = (dict, list, tuple)
_SCALARS = frozenset({str, int, float, bool, type(None), bytes})


# --- values ----------------------------------------------------------------------------------------------------------


def encode(value: Any, path: str) -> bytes:
    """``value`` as it is stored. ``path`` names it in the error.

    :raises NotSerializableError: the encoder cannot carry it, or it holds NaN or an infinity, which are not JSON.
    """
    encoder = dramatiq.get_encoder()
    try:
        return _encode(encoder, value)
    except Exception as e:
        raise _refusal(encoder, value, path, e) from e


def encode_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The arguments of a call, as one stored value ``[args, kwargs]``; the error names ``args[0]`` or ``kwargs['when']``."""
    encoder = dramatiq.get_encoder()
    try:
        return _encode(encoder, [list(args), dict(kwargs)])
    except Exception:
        for index, value in enumerate(args):
            encode(value, f"args[{index}]")
        for name, value in kwargs.items():
            encode(value, f"kwargs[{name!r}]")
        return encode([list(args), dict(kwargs)], "arguments")  # one level deeper than each by itself


def decode(data: bytes) -> Any:
    """The value of stored ``data``: a fresh one at each call, which the caller may change."""
    return dramatiq.get_encoder().decode(data if type(data) is bytes else bytes(data))


def roundtrip(value: Any, path: str) -> tuple[bytes, Any]:
    """What is stored of ``value``, and the form in which a workflow will see it ever after (CODEC-1)."""
    data = encode(value, path)
    return data, decode(data)


def freeze(data: bytes) -> Callable[[], Any]:
    """Decode once; each call of what is returned hands out a value that nobody else holds (CODEC-4).

    Immutable values are handed out as they are, containers are copied; what another encoder than JSON made of containers is
    decoded again each time, because only that encoder knows how to copy it.
    """
    encoder = dramatiq.get_encoder()
    if type(data) is not bytes:
        data = bytes(data)
    value: Any = encoder.decode(data)
    if type(value) in IMMUTABLE:
        return lambda: value
    if type(encoder) is not JSONEncoder and (type(encoder) is not TaggedJSONEncoder or data[:1] == MARK):
        return lambda: encoder.decode(data)
    items = value.values() if type(value) is dict else value
    if all(type(item) in _SCALARS for item in items):
        copy: Callable[[], Any] = value.copy
        return copy
    # measured: a third of what decoding again or copying by hand takes; these bytes never leave this function
    frozen = marshal.dumps(value)
    return lambda: marshal.loads(frozen)


def digest(data: bytes) -> str:
    """64 hexadecimal digits that tell stored values apart; the order in which a dict was filled does not count."""
    mark = MARK if data[:1] == MARK else b""  # a dict that looks like a tag is not one
    with suppress(ValueError, RecursionError):  # not JSON: another encoder's bytes stand for themselves
        data = mark + json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()


def preview(data: bytes, limit: int) -> str:
    """Stored ``data`` as text of at most ``limit`` characters, for the history and for people (SAFE-2)."""
    start = data[: 4 * limit + 4]  # no character takes more bytes
    try:
        text = codecs.utf_8_decode(start, "strict", len(start) == len(data))[0]
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # not text, and no text column would take it
        text = f"<{len(data)} bytes>"
    return _cut(text, limit)


class _TooDeep(ValueError):
    pass


def _encode(encoder: Any, value: Any) -> bytes:
    if type(encoder) is not JSONEncoder:
        data: bytes = encoder.encode(value)
        if isinstance(encoder, JSONEncoder) and (b"NaN" in data or b"Infinity" in data):
            _refuse_bare_constants(data)
        if isinstance(encoder, TaggedJSONEncoder) and _may_be_deep(data) and _is_deeper(json.loads(data), MAX_DEPTH):
            raise _TooDeep
        return data
    # the stock encoder's own bytes, without its bare NaN and without building a json.JSONEncoder per call
    data = _dumps(value).encode("utf-8")
    if _may_be_deep(data) and _is_deeper(value, MAX_DEPTH):
        raise _TooDeep
    return data


def _may_be_deep(data: bytes) -> bool:
    return data.count(b"[") + data.count(b"{") > MAX_DEPTH


def _refuse_bare_constants(data: bytes) -> None:
    """A subclass of the stock encoder may write them; a tagged or quoted one is that encoder's business."""

    def refuse(constant: str) -> None:
        raise ValueError(f"Out of range float values are not JSON compliant: {constant}")

    with suppress(UnicodeDecodeError, json.JSONDecodeError):  # not plain JSON text
        json.loads(data, parse_constant=refuse)


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if type(item) not in _SCALARS and isinstance(item, _CONTAINERS)
        ]
        if not level:
            return False
    return True


def _refusal(encoder: Any, value: Any, path: str, error: Exception) -> NotSerializableError:
    """The error that names the innermost value which cannot be encoded; costs what it costs, but only on failure."""
    whole = NotSerializableError(path, f"it is nested more than {MAX_DEPTH} levels deep")
    too_deep = isinstance(error, _TooDeep | RecursionError)
    seen: set[int] = set()
    while isinstance(value, dict | list | tuple):
        if id(value) in seen:
            return NotSerializableError(_cut(path, 300), "it contains itself")
        seen.add(id(value))
        for step, key, item in _children(value):
            if key is not None and (bad := _error_of(encoder, {key: None})) is not None:
                return NotSerializableError(_cut(path, 300), f"its key {_shown(key)}: {_cut(message_of(bad), 300)}")
            if (bad := _error_of(encoder, item)) is not None:
                path, value, error = path + step, item, bad
                break
        else:
            break
    if too_deep:
        return whole
    if isinstance(value, float):
        return NotSerializableError(_cut(path, 300), f"{value!r} is not JSON")
    name = qualified_name(type(value)).removeprefix("builtins.")
    return NotSerializableError(_cut(path, 300), f"{name}: {_cut(message_of(error), 300)}")


def _children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Of a container: how the path goes on, the key where there is one, and the item."""
    if isinstance(value, dict):
        return ((f"[{_shown(key)}]", key, item) for key, item in value.items())
    return ((f"[{index}]", None, item) for index, item in enumerate(value))


def _shown(key: object) -> str:
    try:
        return _cut(repr(key), 80)
    except Exception:
        return f"<{type(key).__name__}>"


def _error_of(encoder: Any, value: Any) -> Exception | None:
    try:
        _encode(encoder, value)
    except Exception as e:
        return e
    return None


# --- errors ----------------------------------------------------------------------------------------------------------


def describe_error(exc: BaseException) -> str:
    """What is kept of an error, as JSON text of at most :data:`MAX_ERROR_LENGTH` characters.

    ``type`` and ``bases`` are qualified names (``builtins.ValueError``), ``code`` is the error's own ``code`` where that is a
    plain value, ``message`` and ``traceback`` are cut in the middle, ``cause`` is the same again, a few levels deep. Never
    raises, whatever the error's own methods do.
    """
    try:
        return _fitted(_described(exc, _ROUNDS[0].causes, {id(exc)}))
    except Exception:
        return json.dumps({**_NOTHING, "message": "the error could not be described"})


def describe_interrupted(error: StepInterruptedError) -> str:
    """What the row of the step itself keeps of it, as :func:`describe_error` does: without the step's name, which the row has."""
    return _fitted(_described(error, 0, {id(error)}) | {"message": error.message, "cause": None})


def load_error(text: str) -> dict[str, Any]:
    """What :func:`describe_error` kept, with all its keys. Never raises: text that is not its own becomes the message."""
    error: Any = None
    with suppress(ValueError, RecursionError):
        error = json.loads(text)
    if not isinstance(error, dict):
        error = {"message": text}
    known = {key: value for key, value in error.items() if key not in _TYPES or isinstance(value, _TYPES[key])}
    return {**_NOTHING, "bases": [], **known}


def step_failed(actor_name: str, sequence: int, *, text: str) -> StepFailedError:
    """The error that a workflow function sees for a step whose row holds ``text``; never needs the original class."""
    error = load_error(text)
    kind = StepInterruptedError if error["type"] == _INTERRUPTED else StepFailedError
    return kind(
        actor_name,
        sequence,
        error["type"],
        error["message"],
        error["traceback"],
        error["cause"],
        tuple(error["bases"]),
        error["code"],
    )


def message_of(exc: BaseException) -> str:
    """``str(exc)``, or a word about why there is none. Never raises."""
    try:
        return str(exc)
    except Exception as e:
        return f"<its message could not be made: {type(e).__name__}>"


class _Round(NamedTuple):
    message: int
    traceback: int
    bases: int
    causes: int


#: How much is kept: the first of these that fits. The last always does.
_ROUNDS = (
    _Round(2000, 6000, 40, 3),
    _Round(1000, 2000, 40, 3),
    _Round(500, 800, 20, 3),
    _Round(200, 200, 10, 1),
    _Round(60, 0, 5, 0),
)
_NOTHING: dict[str, Any] = {"type": "unknown", "bases": (), "message": "", "code": None, "traceback": "", "cause": None}
_TYPES = {"type": str, "bases": list, "message": str, "traceback": str, "cause": dict}
_INTERRUPTED = qualified_name(StepInterruptedError)
_MAX_NAME_LENGTH = 191


def _described(exc: BaseException, causes: int, seen: set[int]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": qualified_name(type(exc)),
        "bases": [qualified_name(base) for base in type(exc).__mro__ if base is not object],
        "message": message_of(exc),
        "code": _code_of(exc),
        "traceback": _traceback_of(exc),
        "cause": None,
    }
    if isinstance(exc, StepFailedError):
        return described | {"cause": exc.recorded()}  # the step's own error is what matters, not the frames of its replay
    cause = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    if cause is not None and causes > 0 and id(cause) not in seen:
        described["cause"] = _described(cause, causes - 1, seen | {id(cause)})
    return described


def _fitted(described: dict[str, Any]) -> str:
    for kept in _ROUNDS:
        text = json.dumps(_shortened(described, kept, kept.causes), ensure_ascii=False, separators=(",", ":"))
        if len(text) <= MAX_ERROR_LENGTH:
            break
    return text


def _shortened(error: dict[str, Any], kept: _Round, causes: int) -> dict[str, Any]:
    cause, code = error["cause"], error["code"]
    return {
        "type": _cut_middle(error["type"], _MAX_NAME_LENGTH),
        "bases": [_cut_middle(name, _MAX_NAME_LENGTH) for name in error["bases"][: kept.bases]],
        "message": _cut_middle(error["message"], kept.message),
        "code": _cut_middle(code, _MAX_NAME_LENGTH) if isinstance(code, str) else code,
        "traceback": _cut_middle(error["traceback"], kept.traceback),
        "cause": _shortened(cause, kept, causes - 1) if cause is not None and causes > 0 else None,
    }


def _code_of(exc: BaseException) -> str | int | float | None:
    with suppress(Exception):
        code = getattr(exc, "code", None)
        if isinstance(code, str):
            return str.__str__(code)
        if isinstance(code, int) and abs(code) < 2**63:
            return int(code)
        if isinstance(code, float) and math.isfinite(code):
            return float(code)
    return None


def _traceback_of(exc: BaseException) -> str:
    """The frames, newest last, and the notes; of a deep stack the two ends."""
    lines: list[str] = []
    with suppress(Exception):
        frames = list(traceback.walk_tb(exc.__traceback__))
        if len(frames) > 60:
            lines += traceback.StackSummary.extract(iter(frames[:20])).format()
            lines.append(f"  [{len(frames) - 60} more frames]\n")
            frames = frames[-40:]
        lines += traceback.StackSummary.extract(iter(frames)).format()
        lines += [f"{note}\n" for note in getattr(exc, "__notes__", ())]
    return "".join(lines)


# --- text ------------------------------------------------------------------------------------------------------------

# controls, directional overrides, invisible separators and tags, halves of surrogate pairs
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def storable(text: str) -> str:
    """``text`` as every database's text column takes it: NUL and halves of surrogate pairs become visible escapes."""
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return text


def printable(text: str) -> str:
    """``text`` on one line, safe for a terminal: control characters and directional overrides become visible escapes."""
    return _UNPRINTABLE.sub(_escaped, text)


def printable_block(text: str) -> str:
    """As :func:`printable`, but lines stay lines and tabs stay tabs: for tracebacks."""
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in "\n\t" else _escaped(match), text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else (text[: limit - 1] + "…")[:limit]


def _cut_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``, its beginning and its end; halves of surrogate pairs become escapes."""
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= limit:
        return text
    mark = f" … [{len(text) - limit} characters cut] … "
    room = max(0, limit - len(mark))
    tail = room // 2
    return (text[: room - tail] + mark + text[len(text) - tail :])[:limit]
