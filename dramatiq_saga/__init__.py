"""dramatiq-saga: durable sagas on Dramatiq workers. The names of the public API, and nothing else."""

from __future__ import annotations

__all__: list[str] = []
