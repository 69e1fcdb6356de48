"""What a workflow function sees: :class:`Flow` (API: "Flow").

Every call that the engine has to remember takes the next sequence of the run; where that sequence is recorded, the recorded
answer is given, and otherwise the function is suspended until there is one. So the function may be run from its beginning any
number of times, and its effects happen once. Nothing here reads a clock, a database or a broker: it all comes from the replay
that the flow was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .builders import ActionBuilder
from .engine.replay import Replay, current_replay
from .errors import SagaError
from .options import short_text
from .store.models import NAME_LENGTH

if TYPE_CHECKING:
    import structlog
    from dramatiq import Actor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def tag_text(key: object, value: object) -> str | None:
    """A tag's value as it is stored (TAG-1).

    Raises:
      TypeError: the key is not text, or the value neither text, an integer nor None.
      ValueError: one of them does not fit its column.
    """
    short_text(key, "a tag's key", limit=NAME_LENGTH)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise TypeError(f"tag {key!r} takes text, an integer or None, not {value!r}: make it text yourself")
    if value is None or value == "":
        return value
    return short_text(str(value), f"the value of tag {key!r}", limit=NAME_LENGTH)


class Flow:
    """The argument that a workflow function receives. It belongs to one replay, in one thread, and dies with it."""

    __slots__ = ("_replay",)

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def run(self, actor: Actor[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of one step; shorthand for ``action(actor, ...).run()``.

        Raises:
          StepFailedError: the step has failed for good.
          StepExpiredError: its deadline passed.
        """
        replay = self._replay
        # The way that a long history takes on every drive: recorded, completed, nothing left to build.
        if replay.cursor < replay.recorded and not replay.suspended and replay.error is None:
            entry = replay.entries[replay.cursor]
            if entry.kind == "step" and entry.status == "completed" and entry.actor == actor.actor_name:  # type: ignore[union-attr]
                replay.cursor += 1
                return entry.value()  # type: ignore[no-any-return, misc]
        return ActionBuilder(self._use(), actor, args, kwargs).run()

    def action(self, actor: Actor[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ActionBuilder[R]:
        """A builder for one step: say how it is undone and treated, then ``run()`` it.

        Raises:
          TypeError: the arguments do not fit the actor's signature.
          NotSerializableError: they cannot be stored (CODEC-2); the error names the path.
        """
        return ActionBuilder(self._use(), actor, args, kwargs)

    def side_effect(self, key: str, fn: Callable[[], T]) -> T:
        """``fn()``'s value, recorded once and reused by every replay (SIDE-1).

        For values that differ from one call to the next: a random choice, a look at the outside. ``fn`` may be called again
        if the process dies before the value is recorded; work that must not repeat belongs in a step. The value is given in
        its stored form.

        Raises:
          NotSerializableError: the value cannot be stored.
          TypeError, ValueError: the key cannot be.
        """
        replay = self._use()
        if not replay.is_replaying:
            short_text(key, "the key of a side effect", limit=NAME_LENGTH)
        value: T = replay.side_effect(key, fn)
        return value

    def tag(self, key: str, value: str | int | None = None) -> None:
        """Write a tag of this run; the last write of a key wins (TAG-1)."""
        replay = self._use()
        replay.tags[key] = tag_text(key, value)

    @property
    def tags(self) -> Mapping[str, str | None]:
        """The run's tags, as they were when this drive began, with what the function has written since."""
        replay = self._use()
        return {**replay.snapshot.tags, **replay.tags}

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._replay.snapshot.run_id

    @property
    def workflow_name(self) -> str:
        """The workflow's name."""
        return self._replay.snapshot.workflow

    @property
    def version(self) -> str | None:
        """The version that the workflow declared when this run was started (HISTORY-2)."""
        return self._replay.snapshot.version

    @property
    def is_replaying(self) -> bool:
        """True while the function walks over what it has asked for before."""
        return self._replay.is_replaying

    @property
    def logger(self) -> structlog.stdlib.BoundLogger:
        """A structlog logger that stays quiet while replaying, so that a line is logged once per run and not once per drive."""
        import structlog

        bound = structlog.get_logger("dramatiq_saga.workflow").bind(run=self.run_id, workflow=self.workflow_name)
        return structlog.wrap_logger(bound, processors=[self._drop_while_replaying])  # type: ignore[no-any-return]

    def _drop_while_replaying(self, _logger: Any, method: str, event: Any) -> Any:
        if self._replay.is_replaying:
            raise structlog_drop()
        return event

    def _use(self) -> Replay:
        """The replay, once it is certain that the function may still use it."""
        replay = self._replay
        if current_replay() is not replay:
            raise SagaError(
                f"the flow of run {replay.snapshot.run_id} was used outside its workflow function, or from another thread: "
                "a flow belongs to one drive; keep it inside the function and use steps for work elsewhere"
            )
        replay.check()
        return replay


def structlog_drop() -> BaseException:
    """structlog's way of saying that a line is not to be written."""
    import structlog

    return structlog.DropEvent()
