"""The demonstration. It arrives with the engine."""

from __future__ import annotations

print("The demonstration arrives with the engine.")
