"""When a signal may run a failed step or child again: what ``retry_on_signal`` takes (API: ``RetryPolicy``; RSIG-3).

Every mistake shows at the line that makes it. Signal, budget and wait are stored when the step is scheduled; ``only`` and ``when`` are
looked up in the code when it has failed. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .clock import to_ms
from .engine.retry_on_signal import RetryContext, Stored
from .options import short_text
from .store.models import NAME_LENGTH

if TYPE_CHECKING:
    from .settings import Settings

ExceptionClasses = type[BaseException] | Iterable[type[BaseException]]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The arguments of ``retry_on_signal`` as a value, to be shared between steps.

    Parameters:
      signal: the name of the signal that runs the step again.
      max_retries: how many signals may do so, from 0; ``None``: ``actions.retry_on_signal.max_retries``, which is no limit by default.
      wait_seconds: how long a parked step waits for its signal, in seconds or as a ``timedelta``, from 0; ``None``:
        ``monitor.expiration.defaults.signal``, which is for ever by default.
      only: exception classes; failures of others, or of none of their subclasses, do not wait.
      when: asked with a :class:`RetryContext` once per failure; what it answers decides. It must not change any run.

    Raises:
      TypeError, ValueError: a value that cannot be meant, named.
    """

    signal: str
    max_retries: int | None = None
    wait_seconds: float | timedelta | None = None
    only: ExceptionClasses | None = None
    when: Callable[[RetryContext], bool] | None = None

    def __post_init__(self) -> None:
        short_text(self.signal, "the signal of a retry policy", limit=NAME_LENGTH)
        if self.max_retries is not None:
            if type(self.max_retries) is not int:
                raise TypeError(f"max_retries is a number of retries or None, not {self.max_retries!r}")
            if self.max_retries < 0:
                raise ValueError(f"max_retries is at least 0, not {self.max_retries}")
        if self.wait_seconds is not None and to_ms(self.wait_seconds) < 0:
            raise ValueError(f"wait_seconds is at least 0, not {self.wait_seconds!r}")
        if self.only is not None:
            object.__setattr__(self, "only", _classes(self.only))
        if self.when is not None and not callable(self.when):
            raise TypeError(f"when is a function that gets a RetryContext, not {self.when!r}")

    def stored(self, settings: Settings) -> str:
        """What is kept of it with the row, the settings' part filled in."""
        cap = settings.actions.retry_on_signal.max_retries if self.max_retries is None else self.max_retries
        wait = settings.monitor.expiration.defaults.signal if self.wait_seconds is None else self.wait_seconds
        return Stored(self.signal, cap, None if wait is None else to_ms(wait)).text()


def _classes(given: ExceptionClasses) -> tuple[type[BaseException], ...]:
    found: tuple[Any, ...] = (given,) if isinstance(given, type) or not isinstance(given, Iterable) else tuple(given)
    for cls in found:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise TypeError(f"only takes exception classes, not {cls!r}")
    if not found:
        raise ValueError("only names no exception class: leave it out to retry after every failure")
    return found


def policy_of(
    signal_or_policy: str | RetryPolicy,
    *,
    max_retries: int | None,
    wait_seconds: float | timedelta | None,
    only: ExceptionClasses | None,
    when: Callable[[RetryContext], bool] | None,
) -> RetryPolicy:
    """The policy that the arguments of ``retry_on_signal`` mean.

    Raises:
      TypeError: a policy and arguments beside it: which of them counts would be a guess.
    """
    if not isinstance(signal_or_policy, RetryPolicy):
        return RetryPolicy(signal_or_policy, max_retries, wait_seconds, only, when)
    beside = {"max_retries": max_retries, "wait_seconds": wait_seconds, "only": only, "when": when}
    given = [name for name, value in beside.items() if value is not None]
    if given:
        raise TypeError(
            f"retry_on_signal() takes a RetryPolicy or arguments, not both: {', '.join(given)} came beside one; "
            "use dataclasses.replace(policy, ...)"
        )
    return signal_or_policy
