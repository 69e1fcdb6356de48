"""Dramatiq options that a step's or a run's messages carry, and names: what Dramatiq and every database can work with.

A message with a value that Dramatiq stumbles over dies before anything of ours sees it, again and again; so values are checked
where a person gives them. Options that this module does not know belong to other middleware, and pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .codec import storable

#: Integers up to this size fit every database's column, and every option of Dramatiq's.
LARGEST = 2**53

#: What Dramatiq takes for the options that it reads from a message: a test, and the words for it.
_OPTION_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_retries": (lambda value: value is None or (_is_integer(value) and value >= 0), "a number of tries from 0, or None"),
    "min_backoff": (lambda value: _is_integer(value) and value >= 0, "milliseconds, as an integer from 0"),
    "max_backoff": (lambda value: _is_integer(value) and value >= 0, "milliseconds, as an integer from 0"),
    "max_age": (lambda value: value is None or (_is_integer(value) and value > 0), "milliseconds, as an integer above 0"),
    "time_limit": (
        lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and (0 < value <= LARGEST or value == math.inf)
        ),
        "milliseconds, as a number above 0",
    ),
    "priority": (lambda value: _is_integer(value), "an integer; lower ones go first"),
    "queue_name": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9._-]*", value) is not None,
        "a queue's name: letters, digits, dots, dashes and underscores, beginning with a letter or an underscore",
    ),
    "notify_shutdown": (lambda value: isinstance(value, bool), "True or False"),
    "store_results": (lambda value: isinstance(value, bool), "True or False"),
}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def count_from_one(value: object, where: str) -> int:
    """``value``, where it is a number of things, at least one.

    :raises TypeError: it is no integer.
    :raises ValueError: it is below one, or too large to be meant.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where} takes a number of at least 1, not {value!r}")
    if not 1 <= value <= 2**31 - 1:
        raise ValueError(f"{where} takes a number of at least 1, not {value}")
    return value


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuse values that Dramatiq would stumble over when the message has left already.

    Raises:
      TypeError: names the option, the value, and what it takes.
    """
    for name, value in options.items():
        known = _OPTION_VALUES.get(name)
        if known is not None and not known[0](value):
            raise TypeError(f"{where} does not take {name}={value!r}: it is {known[1]}")


def short_text(value: object, what: str, *, limit: int) -> str:
    """``value``, where it is text that a column of that many characters takes on every database.

    :raises TypeError: it is no text.
    :raises ValueError: it is empty, too long, or holds NUL or half of a surrogate pair; ``what`` names it.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is text, not {value!r}")
    if not 0 < len(value) <= limit:
        raise ValueError(f"{what} has between 1 and {limit} characters, not {len(value)}")
    if storable(value) != value:
        raise ValueError(f"{what} cannot be stored: {value!r} holds NUL or half of a surrogate pair")
    return value
