"""Dramatiq's rate limiters, barriers and results, kept in a database (API)."""

from __future__ import annotations

from .rate_limits import DatabaseRateLimiterBackend
from .results import DatabaseResultBackend

__all__ = ["DatabaseRateLimiterBackend", "DatabaseResultBackend"]
