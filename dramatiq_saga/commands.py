"""Commands as they are printed: to be pasted into a shell as they stand.

A run's id, a signal's name or a workflow's may be any text, and may come from a customer: here it becomes one word of a shell, and
never an option. What a terminal would act on is written as an escape that bash, ksh and zsh read.
"""

from __future__ import annotations

import shlex

from .codec import printable


def command(name: str, *words: str, options: str = "") -> str:
    """``dramatiq-saga NAME WORD … OPTIONS``; where a word begins with ``-`` the options come first, and ``--`` before the words."""
    said = [word(one) for one in words]
    parts = [options, "--", *said] if any(one.startswith("-") for one in words) else [*said, options]
    return " ".join(part for part in ("dramatiq-saga", name, *parts) if part)


def install(extra: str) -> str:
    """The command that brings the packages of an extra."""
    return f"pip install 'PATH-OF-THE-CHECKOUT[{extra}]'"


def word(text: str) -> str:
    """``text`` as one word of a shell."""
    if printable(text) == text:
        return shlex.quote(text)
    return "$'" + "".join(_escaped(character) for character in text) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if printable(character) == character:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
