"""The command line: ``dramatiq-saga`` (see docs/reference/command-line.md)."""

from .program import main

__all__ = ["main"]
