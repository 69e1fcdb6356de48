"""The program: its options, its commands, and how it ends.

Exit status: 0 done, 1 refused or failed (the message says why), 2 bad usage. What is expected to go wrong ends with one message
on stderr and no traceback; a traceback means a defect. Results go to stdout and nothing else does: logs go to stderr, so that
``--json`` can be piped. Stored text is printed with its control characters made visible (C70).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress

import structlog
from dramatiq.errors import DramatiqError

from ..codec import printable_block
from ..errors import SagaError
from ..operations import Operator
from . import explain, queues, runs, schedule, show, sweeps, verify
from .answer import Answer
from .application import open_application

#: Packages whose errors say that a message broker does not answer.
_BROKER_PACKAGES = ("redis", "pika")

_EPILOG = """\
Exit status: 0 done, 1 refused (the message says why), 2 bad usage.
The application is a module as for the `dramatiq` command; its variable may be named too: shop:broker.
"""


#: Options that name a file, which may have any name.
_FILES = ("database", "export")


class UsageError(Exception):
    """The command line itself is wrong: exit status 2."""


class OutputError(Exception):
    """The answer could not be written to where it belongs: exit status 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = make_parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ending:  # argparse has printed the help, or what is wrong
        return ending.code if isinstance(ending.code, int) else 2
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
        )  # fmt: skip
    with suppress(AttributeError, ValueError):  # a terminal that cannot show a character is shown its escape
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with redirect_stdout(sys.stderr):  # what the application prints by itself is not the answer
            answer = _run(options)
        _print(answer.json() if options.json else answer.text())
        if answer.note is not None and not options.json:
            print(answer.note, file=sys.stderr)
        return 0 if answer.done else 1
    except UsageError as error:
        parser.print_usage(sys.stderr)
        return _fail(error, 2)
    except OutputError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except SagaError as error:
        return _fail(error, 1)
    except Exception as error:
        if not _is_the_brokers(error):
            raise
        return _fail(f"the broker does not answer: {type(error).__name__}: {error}", 1)


def _is_the_brokers(error: Exception) -> bool:
    """Whether it says that a message broker cannot be reached; anything else that gets here is a defect."""
    return isinstance(error, (DramatiqError, OSError)) or type(error).__module__.partition(".")[0] in _BROKER_PACKAGES


def _run(options: argparse.Namespace) -> Answer:
    for name, value in vars(options).items():
        if name not in _FILES and not _is_text(value):
            raise UsageError(f"an argument is not UTF-8: {value!r}")
    operator = _operator(options)
    try:
        answer: Answer = options.run(operator, options)
        return answer
    finally:
        operator.close()


def _is_text(value: object) -> bool:
    """Whether it, or each of its parts, can be stored; bytes of a command line that are no UTF-8 have become half surrogate pairs."""
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    return not isinstance(value, str) or value.encode(errors="ignore").decode() == value


def _operator(options: argparse.Namespace) -> Operator:
    app = options.app or (None if options.database else os.environ.get("DRAMATIQ_SAGA_APP"))
    if app and options.database:
        raise UsageError("give --app or --database, not both: an application brings its database along")
    if app:
        return Operator.on_broker(open_application(app))
    if options.database:
        return Operator.on_database(options.database)
    raise UsageError(
        "which application? name its module with --app MODULE (or in DRAMATIQ_SAGA_APP); --database URL is enough to look"
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of everything. The options that every command takes may stand before or after its name."""
    parser = argparse.ArgumentParser(
        prog="dramatiq-saga", description="Look at sagas, and look after them.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=_version())
    _add_common(parser, None)
    common = argparse.ArgumentParser(add_help=False)
    _add_common(common, argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, title="commands", dest="command")
    for module in (sweeps, schedule, runs, show, explain, verify, queues):
        module.add_commands(commands, common)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--app", metavar="MODULE[:BROKER]", default=default, help="the application, as for the dramatiq command"
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        default=default,
        help="instead of --app, for commands that only look: a URL, or an SQLite file",
    )
    parser.add_argument("--json", action="store_true", default=False if default is None else default, help="print for machines")


def _version() -> str:
    try:
        return f"dramatiq-saga {importlib.metadata.version('dramatiq-saga')}"
    except importlib.metadata.PackageNotFoundError:
        return "dramatiq-saga (not installed)"


def _print(text: str) -> None:
    if not text:
        return
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        print(text, flush=True)
    except OSError as error:
        with suppress(OSError, AttributeError):  # Python must not complain about it once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # with which whoever read us has enough
            raise OutputError(
                f"the command was carried out, but its answer cannot be written to standard output: {error}"
            ) from None


def _fail(error: object, status: int) -> int:
    print(f"dramatiq-saga: {printable_block(str(error))}", file=sys.stderr)
    return status
