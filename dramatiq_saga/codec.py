"""Values and errors between memory and rows (CODEC-1, CODEC-2, CODEC-4).

Values pass through Dramatiq's own encoder, looked up at each call, so a host that sets another one is heard. What it cannot
carry is refused where it enters, with the path to the culprit; finding that path costs only when something is wrong.
Errors become JSON text that names classes instead of pickling them and that always fits its column.

Nothing here is unpickled, and nothing imported by a stored name, unless the host chose an encoder that does (SAFE-1).
Describing an error never raises, whatever the error does.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import dramatiq
from dramatiq.encoder import JSONEncoder

from .errors import NotSerializableError, StepFailedError, StepInterruptedError, qualified_name

#: Deepest nesting that is stored. Deeper values would encode in one stack depth and fail to decode in another.
MAX_DEPTH = 200

#: Longest text of :func:`describe_error`, in characters: fits a 64 KB column at four bytes each.
MAX_ERROR_LENGTH = 16_000

#: How much of a message and of a traceback is kept, in characters, and how many causes.
MAX_MESSAGE_LENGTH = 2_000
MAX_TRACEBACK_LENGTH = 6_000
MAX_CAUSES = 3

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
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
        raise


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
    if type(value) in _SCALARS:
        return lambda: value
    if type(encoder) is not JSONEncoder:
        return lambda: encoder.decode(data)
    items = value.values() if type(value) is dict else value
    if all(type(item) in _SCALARS for item in items):
        copy: Callable[[], Any] = value.copy
        return copy
    return lambda: _copy(value)


def digest(data: bytes) -> str:
    """64 hexadecimal digits that tell stored values apart; the order in which a dict was filled does not count."""
    with suppress(ValueError, RecursionError):  # not JSON: another encoder's bytes stand for themselves
        data = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()


def preview(data: bytes, limit: int) -> str:
    """Stored ``data`` as text of at most ``limit`` characters, for the history and for people (SAFE-2)."""
    try:
        text = bytes(data[: 4 * limit + 4]).decode("utf-8", "strict" if len(data) <= 4 * limit + 4 else "ignore")
    except UnicodeDecodeError:
        text = f"<{len(data)} bytes>"
    return text if len(text) <= limit else text[: limit - 1] + "…" if limit > 0 else ""


class _TooDeep(ValueError):
    pass


def _encode(encoder: Any, value: Any) -> bytes:
    if type(encoder) is not JSONEncoder:
        data: bytes = encoder.encode(value)
        if isinstance(encoder, JSONEncoder) and (b"NaN" in data or b"Infinity" in data):
            _refuse_bare_constants(data)
        return data
    # the stock encoder's own bytes, without its bare NaN and without building a json.JSONEncoder per call
    data = _dumps(value).encode("utf-8")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _TooDeep
    return data


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
            if isinstance(item, dict | list | tuple)
        ]
        if not level:
            return False
    return True


def _copy(value: Any) -> Any:
    if type(value) is dict:
        return {key: item if type(item) in _SCALARS else _copy(item) for key, item in value.items()}
    return [item if type(item) in _SCALARS else _copy(item) for item in value]


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

    ``type`` and ``bases`` are qualified names (``builtins.ValueError``), ``message``, ``code`` and ``traceback`` are cut in
    the middle, ``cause`` is the same again, a few levels deep. Never raises.
    """
    try:
        return _fitted(_described(exc, MAX_CAUSES, set()))
    except Exception:
        return '{"type":"unknown","bases":[],"message":"it could not be described","code":null,"traceback":"","cause":null}'


def load_error(text: str) -> dict[str, Any]:
    """What :func:`describe_error` kept, with all its keys. Never raises: text that is not its own becomes the message."""
    error: Any
    try:
        error = json.loads(text)
    except (ValueError, RecursionError):
        error = None
    if not isinstance(error, dict):
        error = {"message": text}
    return {**_EMPTY, **error}


def step_failed(actor_name: str, sequence: int, text: str) -> StepFailedError:
    """The error that a workflow function sees for a step whose row holds ``text``; never needs the original class."""
    error = load_error(text)
    kind = StepInterruptedError if error["type"] == qualified_name(StepInterruptedError) else StepFailedError
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


_EMPTY: dict[str, Any] = {"type": "unknown", "bases": [], "message": "", "code": None, "traceback": "", "cause": None}


def _described(exc: BaseException, causes: int, seen: set[int]) -> dict[str, Any]:
    seen.add(id(exc))
    described: dict[str, Any] = {
        "type": _name_of(type(exc)),
        "bases": [_name_of(base) for base in type(exc).__mro__ if base is not object][:40],
        "message": _cut_middle(message_of(exc), MAX_MESSAGE_LENGTH),
        "code": _code_of(exc),
        "traceback": _cut_middle(_traceback_of(exc), MAX_TRACEBACK_LENGTH),
        "cause": None,
    }
    if isinstance(exc, StepFailedError):
        # the recorded error of the step is the cause of ours; one of our own making has no other
        if isinstance(exc, StepInterruptedError):
            described["message"], described["cause"] = _cut_middle(exc.message, MAX_MESSAGE_LENGTH), exc.cause
        else:
            described["cause"] = exc.recorded()
        return described
    cause = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    if cause is not None and causes > 0 and id(cause) not in seen:
        described["cause"] = _described(cause, causes - 1, seen)
    return described


def _fitted(described: dict[str, Any]) -> str:
    """The text, with tracebacks and then everything else cut further until it fits."""
    for message, trace in ((MAX_MESSAGE_LENGTH, MAX_TRACEBACK_LENGTH), (1_000, 2_000), (500, 800), (200, 200), (60, 0)):
        level, depth = described, 0
        while level is not None:
            level["message"] = _cut_middle(level["message"], message)
            level["traceback"] = _cut_middle(level["traceback"], trace)
            if depth == MAX_CAUSES or not isinstance(level["cause"], dict):
                level["cause"] = None
            level, depth = level["cause"], depth + 1
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":"))
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        if len(text) <= MAX_ERROR_LENGTH:
            return text
    described["bases"], described["cause"] = described["bases"][:5], None
    return json.dumps(described, separators=(",", ":"))[:MAX_ERROR_LENGTH]


def _name_of(cls: type) -> str:
    try:
        return _cut_middle(qualified_name(cls), 191)
    except Exception:
        return "unknown"


def _code_of(exc: BaseException) -> str | int | float | None:
    try:
        code = getattr(exc, "code", None)
        if isinstance(code, str):
            return _cut_middle(str.__str__(code), 191)
        if isinstance(code, int) and abs(code) < 2**63:
            return int(code)
        if isinstance(code, float) and math.isfinite(code):
            return float(code)
    except Exception:
        pass
    return None


def _traceback_of(exc: BaseException) -> str:
    try:
        frames = list(_frames(exc.__traceback__))
        skipped = len(frames) - 60
        if skipped > 0:
            lines = traceback.StackSummary.extract(iter(frames[:20])).format()
            lines.append(f"  [{skipped} more frames]\n")
            lines += traceback.StackSummary.extract(iter(frames[-40:])).format()
        else:
            lines = traceback.StackSummary.extract(iter(frames)).format()
        notes = getattr(exc, "__notes__", None)
        lines += [f"{note}\n" for note in notes] if isinstance(notes, list) else []
        return "".join(lines)
    except Exception:
        return ""


def _frames(tb: TracebackType | None) -> Iterator[tuple[Any, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


# --- text ------------------------------------------------------------------------------------------------------------

# controls, directional overrides, invisible separators and tags, halves of surrogate pairs
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


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
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cut_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``: its beginning and its end."""
    if len(text) <= limit:
        return text
    mark = f" … [{len(text) - limit} characters cut] … "
    head = max(0, (limit - len(mark)) // 2)
    tail = max(0, limit - len(mark) - head)
    return (text[:head] + mark + (text[-tail:] if tail else ""))[:limit]
