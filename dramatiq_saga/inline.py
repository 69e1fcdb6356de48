"""Running a workflow in the calling process (SYNC-1): the same engine with another sender.

The loop takes what a write would have sent and runs it at once: drives, steps, compensations. Each step is claimed, run and
fenced as in a worker, so its rows are the same, and a run that is cut off here can be picked up by workers later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dramatiq import Retry
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Retries

from .codec import load_error
from .coroutines import body_of, inline_loop
from .engine import drive as drives
from .engine import runs
from .engine.sender import InlineSender
from .errors import SagaError, UnknownActorError, WouldBlockError
from .step import Delivery

if TYPE_CHECKING:
    from dramatiq import Actor, Broker

    from .engine.rows import Outgoing
    from .middleware import SagaMiddleware
    from .step import Runner

_STATE = "SELECT status, rollback, hold_error FROM {flow_runs} WHERE id = ?"
_OPEN = (
    "SELECT a.sequence, a.actor, a.status, w.name FROM {action_runs} a LEFT JOIN {waits} w ON w.run_id = a.run_id "
    "AND w.sequence = a.sequence AND w.kind = 'retry' AND w.status = 'waiting' "
    "WHERE a.run_id = ? AND a.status IN ('pending', 'running', 'awaiting_retry')"
)


class _InlineMessage(MessageProxy):
    """A message that came from no broker: there is nothing to acknowledge."""

    settled = True
    reservation = None


def run_inline(middleware: SagaMiddleware, broker: Broker, new: runs.NewRun) -> None:
    """Start ``new`` and run it to its end here.

    Raises:
      WouldBlockError: the run is not finished, and nothing in this process can go on with it.
      SagaError: called inside a transaction of the store's database: steps could not commit in it (HOST-1).
    """
    engine = middleware.engine(broker)
    if engine.store.joined():
        raise SagaError(
            "run_sync() inside an open transaction of the store's database: its steps could not commit; call it before or after, "
            "or use send(), which joins the transaction"
        )
    sender = InlineSender()
    if not runs.start(engine, new, sender):
        return
    runner = middleware.runner(broker).inlined(sender)
    with inline_loop():
        while sender.queue:
            run_message(runner, sender.queue.popleft())
    state = engine.store.read(lambda tx: tx.one(_STATE, (new.run_id,)))
    if state is None or (state[0] not in ("pending", "running", "waiting", "rolling_back")):
        return
    if state[2]:
        raise WouldBlockError(new.run_id, "code that fits its history", load_error(state[2]))
    waiting = engine.store.read(lambda tx: tx.all(_OPEN, (new.run_id,)))
    what = ", ".join(_open(*row) for row in waiting) or "something from outside"
    raise WouldBlockError(new.run_id, what)


def _open(sequence: int, actor: str, status: str, signal: str | None) -> str:
    return f"step {sequence} ({actor}, {status})" if signal is None else f"signal {signal!r} to retry step {sequence} ({actor})"


def run_message(runner: Runner, outgoing: Outgoing) -> None:
    """Carry out one message here, a step's tries included."""
    from .middleware import build_message

    broker = runner.broker
    delivery = Delivery(_InlineMessage(build_message(broker, outgoing)))
    if outgoing.kind == "drive":
        drives.drive(runner.engine, outgoing.run_id, runner.sender)
        return
    actor = broker.actors.get(outgoing.actor)
    job = delivery.job
    assert job is not None
    if actor is None:
        error = UnknownActorError(
            f"actor {outgoing.actor!r} is not declared in this process: import the module that declares it"
        )
        runner.refuse(job, outgoing.actor, error)
        return
    body = body_of(actor)
    tries = outgoing.tries
    while True:
        try:
            runner.perform(delivery, body)
            return
        except Exception as error:
            if delivery.state != "failed":
                raise
            if not _tries_again(actor, delivery.message.options, tries, error):
                runner.give_up(delivery)
                return
            tries += 1
            delivery = Delivery(delivery.message)


def _tries_again(actor: Actor[Any, Any], options: dict[str, Any], tries: int, error: Exception) -> bool:
    """What Dramatiq's Retries would decide, without its waiting."""
    retries = next((middleware for middleware in actor.broker.middleware if isinstance(middleware, Retries)), None)
    throws = actor.options.get("throws")
    if retries is None or (throws and isinstance(error, throws)):
        return False
    retry_when = actor.options.get("retry_when", retries.retry_when)
    if retry_when is not None:
        return bool(retry_when(tries, error))
    limit = options.get("max_retries", actor.options.get("max_retries", retries.max_retries))
    if limit is None and not isinstance(error, Retry):
        limit = retries.max_retries  # without an end here, a step that always fails would never let its caller go
    return limit is None or tries < limit
