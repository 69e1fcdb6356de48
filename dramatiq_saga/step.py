"""Where an actor's call becomes a step: claim, body, fence, in one wrapper around the call (ARCHITECTURE, "what bites").

Dramatiq swallows what its hooks raise, so a claim or an outcome in a hook could be lost without a trace. The wrapper stands
around the actor's function instead and answers only for the message at hand; an actor that is called directly inside a body
stays a plain call. What never reaches an actor (a message too old, an actor nobody knows, a skip, a message given up after its
last try) is handled by the middleware's hooks with the verbs below.

Nothing is acknowledged before its outcome is durable (FENCE-3): while the store refuses, the outcome is kept here and tried
again, and the acknowledgement waits.

Long because it follows one message from the claim to the last thing that can become of it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from dramatiq.middleware import Interrupt, Retries, Shutdown, SkipMessage, TimeLimit, TimeLimitExceeded
from dramatiq.results import Results

from .codec import decode, describe_error, describe_interrupted, encode
from .context import Around, restorer
from .engine import blocks, children, fence, liveness, runs, timers, undoing
from .engine import drive as drives
from .engine.claim import Claim, ClaimAttempt, Job, Lost, Undoes, give_back
from .engine.lookout import WorkflowStalledError
from .engine.replay import forget_replay
from .engine.rows import Outgoing
from .errors import (
    MessageNotSentError,
    NotSerializableError,
    ResultNotSerializableError,
    StepInterruptedError,
    StepLeftTransactionError,
)
from .interrupts import Body, disarm, shielded
from .overlaps import Overlaps
from .store.trouble import is_trouble
from .suspects import AGAIN_MS, Suspects, is_alone

if TYPE_CHECKING:
    from dramatiq import Broker, Message
    from dramatiq.broker import MessageProxy

    from .engine.core import Engine, Sender
    from .locks import LockBackend
    from .overlaps import Lock
    from .store.database import Tx

T = TypeVar("T")

#: The message option that makes a message one of ours.
OPTION = "saga"

#: Longest hop of a message that is put back on a broker of another kind, in milliseconds (CLAIM-2).
MAX_HOP_MS = 60_000

#: Where a function of a workflow seems to hang in this process, what would call another of it comes again after so many milliseconds.
BUSY_MS = 5_000

# Whether a claim stands, and its run wants it.
_STANDS = (
    "SELECT 1 FROM {%s} r JOIN {flow_runs} f ON f.id = r.run_id "
    "WHERE r.run_id = ? AND r.sequence = ? AND r.status = 'running' AND r.delivery = ? AND %s"
)
_STEP_STANDS = _STANDS % ("action_runs", "f.ended_at IS NULL AND f.status <> 'rolling_back'")
_UNDO_STANDS = _STANDS % ("compensation_runs", "f.rollback = 'running'")
_WAITS = "UPDATE {%s} SET next_try_at = ? WHERE run_id = ? AND sequence = ? AND status = 'pending' AND attempts = ?"
_STEP_WAITS, _UNDO_WAITS = _WAITS % "action_runs", _WAITS % "compensation_runs"
_RUN = "SELECT workflow, queue, priority FROM {flow_runs} WHERE id = ?"
_UNDONE_STEP = "SELECT actor FROM {action_runs} WHERE run_id = ? AND sequence = ?"
_UNDONE_CHILD = "SELECT workflow FROM {children} WHERE run_id = ? AND sequence = ?"


class _Marks:
    """Marks that tell one claim from every other, those of other processes included: a random part per process and a count.

    Without the random part, a restarted container (same process id, same count) could take a dead worker's claim for its own.
    """

    def __init__(self) -> None:
        self._start()
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._boot = os.urandom(6).hex()
        self._numbers = itertools.count()

    def next(self) -> str:
        return f"{self._boot}{next(self._numbers):x}"


_marks = _Marks()
_current: ContextVar[Step | None] = ContextVar("dramatiq_saga_step", default=None)


def current_step() -> Step | None:
    """The step or compensation that is running here; ``None`` outside of one."""
    return _current.get()


@dataclass(frozen=True, slots=True)
class Step:
    """What a body may know of the step that it is (API: ``current_step()``).

    ``attempt`` is the number of this claim. ``idempotency_key`` is stable over tries and reclaims (FENCE-4). In a compensation
    ``undoes`` says what is undone (COMP-7); ``None`` in a step.
    """

    run_id: str
    sequence: int
    attempt: int
    idempotency_key: str
    workflow_name: str
    undoes: Undoes | None
    _engine: Engine
    _delivery: str  # the claim's mark

    @property
    def cancelled(self) -> bool:
        """True once the run no longer wants this, or it has expired or been taken over: for bodies that take long to look at now and
        then. Reads the database."""
        sql = _STEP_STANDS if self.undoes is None else _UNDO_STANDS
        return self._engine.store.read(lambda tx: tx.one(sql, (self.run_id, self.sequence, self._delivery))) is None


def is_ours(message: Message[Any] | MessageProxy) -> bool:
    """Whether a message is one of a run: other messages may carry an option of the same name."""
    facts = message.options.get(OPTION)
    return isinstance(facts, dict) and "run" in facts


class Delivery:
    """One message of ours in this worker, and how far it has come."""

    __slots__ = (
        "__weakref__",
        "actor",
        "around",
        "at",
        "attempt",
        "back_in",
        "body",
        "claim",
        "created",
        "damaged",
        "failure",
        "group",
        "interrupts",
        "job",
        "kind",
        "lapses",
        "level",
        "lock",
        "message",
        "retries",
        "retry_asked",
        "retry_sent",
        "run_id",
        "state",
        "store_results",
        "suspect",
    )  # fmt: skip

    def __init__(self, message: MessageProxy) -> None:
        facts = message.options[OPTION]
        kind, run, sequence = facts.get("kind"), facts.get("run"), facts.get("sequence")
        cycle, attempts = facts.get("cycle", 0), facts.get("attempts", 0)
        self.created: int | None = facts.get("created")  # of the run, where the message says so
        self.message = message
        self.actor = message.actor_name
        self.run_id: str = run
        self.kind: str = kind
        self.at: int | None = facts.get("at") if kind == "timer" else None
        self.job: Job | None = None
        if kind in ("step", "compensation"):
            self.job = Job(kind, run, sequence, cycle, attempts, message.message_id, self.created)
        # A message of ours that says nothing that could be acted on: cut short, or made by other code.
        known = type(sequence) is int if self.job is not None else kind in ("drive", "timer")
        self.group: tuple[int, int, int] | None = None  # of a group's callback: the block, its first and its last member
        self.level: int | None = None  # of a callback of undos: the level of the rollback
        if kind == "callback" and "level" in facts:
            self.level = facts["level"]
            known = type(self.level) is int
        elif kind == "callback":
            self.group = facts.get("block"), facts.get("first"), facts.get("last")
            known = all(type(number) is int for number in self.group)
        known = known and (self.created is None or type(self.created) is int)
        self.damaged = not (known and type(run) is str and type(cycle) is int and type(attempts) is int)
        self.attempt: ClaimAttempt | None = None
        self.claim: Claim | None = None
        # Put back before, for it may have killed a worker (RECLAIM-6): whether it has to be alone; None where it was not.
        self.suspect: bool | None = facts["suspect"] if isinstance(facts.get("suspect"), bool) else None
        self.lapses = 0  # of this process's heartbeat, when the claim was made
        self.lock: Lock | None = None  # taken, or asked for
        self.back_in: int | None = None  # put back, due after so many milliseconds: another message has the lock (LOCK-1)
        self.body: Body | None = None
        self.around = Around()
        self.state = "new"  # new -> claimed -> failed | done; skipped: by another middleware; broken: by a fault of ours
        self.failure: BaseException | None = None
        self.interrupts: list[Interrupt] = []
        self.retries: int = message.options.get("retries", 0)
        self.retry_asked = False
        self.retry_sent = False
        self.store_results: bool | None = message.options.get("store_results")  # what the sender has asked Dramatiq for

    @property
    def is_hint(self) -> bool:
        """Whether it is a group's callback, which nothing rests on (PAR-2)."""
        return self.group is not None or self.level is not None

    @property
    def asks_again(self) -> bool:
        """Whether Dramatiq wants another try: it has begun to enqueue one, or has counted it and not come so far."""
        return self.retry_asked or self.message.options.get("retries", 0) != self.retries


class Runner:
    """Runs what messages ask for: steps and compensations behind their claims, and drives."""

    def __init__(
        self, engine: Engine, broker: Broker, sender: Sender, *, inline: bool = False, locks: LockBackend | None = None
    ) -> None:
        self.inline = inline  # an interrupt in this thread is somebody else's, and not to be taken away
        self.engine = engine
        self.broker = broker
        self.sender = sender
        self.restore = restorer(engine.settings)
        self.stopping = threading.Event()
        self.overlaps = None if locks is None else Overlaps(locks, engine, self.stopping)
        self.suspects = Suspects()
        self.log = structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")

    def inlined(self, sender: Sender) -> Runner:
        """A runner of the same kind for a loop in the calling process (SYNC-1). It takes no locks: it has no queue to put back into."""
        return Runner(self.engine, self.broker, sender, inline=True)

    # --- patience ----------------------------------------------------------------------------------------------------

    def persist(self, part: Callable[[], T]) -> T:
        """``part()``, again and again while the store refuses: a store error spends nothing and loses nothing (NATIVE-7)."""
        delay = 0.05
        while True:
            try:
                return part()
            except Exception as error:
                if self.stopping.is_set() or not is_trouble(error):
                    raise
                self.log.warning("store_unavailable", error=f"{type(error).__name__}: {error}", retry_in=delay)
                self.stopping.wait(delay)
                delay = min(delay * 2, 5.0)

    # --- steps and compensations -------------------------------------------------------------------------------------

    def perform(self, delivery: Delivery, fn: Callable[..., Any]) -> Any:
        """Claim, run, record. Returns what Dramatiq is to see, and raises what Dramatiq is to try again."""
        try:
            shielded(lambda: self._go_on(delivery, fn), delivery.interrupts)
        except Exception as error:
            if not is_trouble(error):
                delivery.state = "broken"
                raise
            if self.inline:
                raise
            # The worker stops before the store is back. What is left is done before the acknowledgement (``finish``); Dramatiq
            # only learns of a failure of the body's own, so that it can say whether there is another try.
            delivery.message.options["store_results"] = False
            body = delivery.body
            if body is None or body.error is None or isinstance(body.error, Shutdown | SkipMessage):
                return None
            raise body.error from None
        if self.inline and delivery.failure is None and delivery.interrupts:
            raise delivery.interrupts[-1]
        if delivery.failure is not None:
            raise delivery.failure
        body = delivery.body
        if body is None or not body.returned:
            # Put back, refused, ended without a value: Dramatiq would store None (NATIVE-5).
            # test_a_step_that_is_given_back_stores_no_result_before_it_has_one
            delivery.message.options["store_results"] = False
            return None
        return body.returned[0] if self._wanted_by_dramatiq(delivery) else None

    def resume(self, delivery: Delivery, interrupt: Interrupt) -> None:
        """Finish what an interrupt has cut short between two shields: a body that has run is recorded, another is given back."""
        delivery.interrupts.append(interrupt)
        shielded(lambda: self._go_on(delivery, None), delivery.interrupts)

    def finish(self, delivery: Delivery) -> None:
        """Do what a stopping worker could not do before: record an outcome, or give back a claim or the message (FENCE-3, CLAIM-4)."""
        shielded(lambda: self._go_on(delivery, None), delivery.interrupts)

    def _go_on(self, delivery: Delivery, fn: Callable[..., Any] | None) -> None:
        """Everything between taking a message and letting go of it. After an interrupt it is entered again and goes on from
        what ``delivery`` says; only a body that was started is never started again (FENCE-5)."""
        job = delivery.job
        assert job is not None
        if delivery.interrupts:
            forget_replay()
        if delivery.state in ("done", "failed"):
            return
        if delivery.attempt is None:
            if delivery.interrupts or delivery.back_in is not None:
                self.put_back(delivery, delivery.back_in or 0)
                return
            if delivery.suspect is not None and not self.suspects.enter(delivery, alone=delivery.suspect):
                self._wait_for_turn(delivery, job)
                return
            if self._is_held_elsewhere(delivery):
                return
            delivery.attempt = ClaimAttempt(
                self.engine, job, nonce=_marks.next(), time_limit_ms=self._time_limit(delivery), inline=self.inline
            )
        claim = delivery.claim
        if claim is None:
            heart = self._heart()
            if heart is not None:  # a claim under a silent heartbeat could be taken over at once (RECLAIM-5)
                self.persist(heart.freshen)
                delivery.lapses = heart.lapses
            found = self.persist(delivery.attempt.run)
            if isinstance(found, Lost):
                self._lost(delivery, found)
                return
            delivery.claim, delivery.state, claim = found, "claimed", found
        limit = claim.max_claims or self.engine.settings.reclaim.max_claims
        if delivery.body is None and claim.claims > limit:
            self.persist(lambda: self._poisoned(delivery, claim))
            return
        if delivery.body is None and claim.claims > 1 and not self.inline:
            alone = is_alone(claim.claims, limit)
            if not self.suspects.enter(delivery, alone=alone):
                # test_a_step_that_kills_its_workers_takes_its_neighbours_down_twice
                facts = delivery.message.options[OPTION]
                delivery.message.options[OPTION] = {**facts, "attempts": claim.attempts, "suspect": alone}
                self._release(delivery, claim, delay=AGAIN_MS)
                return
        body = delivery.body
        if body is None and not delivery.interrupts and fn is not None:
            options = delivery.message.options
            # A try that fails has reported, and is no suspect any more: Dramatiq's next one carries these.
            # test_what_fails_in_the_ordinary_way_is_no_suspect_any_more
            options[OPTION] = {key: value for key, value in options[OPTION].items() if key != "suspect"} | {
                "attempts": claim.attempts
            }
            if claim.tries > options.get("retries", 0):
                # NATIVE-1: tries are counted on the row. A redelivery does not know of one whose worker was lost between the
                # failure and Dramatiq's decision about it. test_a_failure_that_was_the_last_is_not_tried_again_after_a_kill
                if self._are_tries_spent(delivery, claim.tries):
                    self.persist(lambda: self._give_up_at_last(delivery, claim))
                    return
                options["retries"] = delivery.retries = claim.tries
            elif claim.attempts != job.attempts + 1:
                # The row has been claimed, or its rollback resumed, since the message was sent: what it counts is not the row's (COMP-8).
                # test_a_message_from_before_a_resume_takes_no_try_from_the_undo
                options["retries"] = delivery.retries = claim.tries
            step = self.persist(lambda: self._step(claim))
            body = delivery.body = Body(lambda into: self._call(delivery, step, fn, into), None if self.inline else self.broker)
        if body is not None and not body.started and self._may_be_taken_over(delivery, claim):
            # Stalled since the claim (a pause, a slow listener): another worker may have taken the row over, or even be done.
            # Claiming again tells, by the same statement. test_a_worker_that_stalls_between_claim_and_body_claims_again
            delivery.claim = delivery.body = None
            delivery.state = "new"
            self._go_on(delivery, fn)
            return
        if body is None or not (body.started or not delivery.interrupts):
            self._release(delivery, claim)
            return
        outer = _current.get()  # a step's own, where its body runs another workflow to its end
        body.run()
        if not body.returned and body.error is None:  # cut short between its beginning and its call
            body.error = delivery.interrupts[-1]
        _current.set(outer)
        # Nothing interrupts this thread any more. test_an_interrupted_body_leaves_no_context_behind
        delivery.around.leave(body.error, logger=self.engine.settings.logging.logger, run_id=delivery.run_id)
        self._conclude(delivery, claim, body)

    def _heart(self) -> liveness.Heart | None:
        """What claims made here are judged by, if anything."""
        return None if self.inline else liveness.heart_of(self.engine)

    def _may_be_taken_over(self, delivery: Delivery, claim: Claim) -> bool:
        """Whether the claim's reclaim deadline, or this process's lease, has run out since it was made."""
        if claim.stale_at is not None and self.engine.now() >= claim.stale_at:
            return True
        heart = self._heart()
        return heart is not None and (heart.lapses != delivery.lapses or heart.is_silent())

    def _poisoned(self, delivery: Delivery, claim: Claim) -> None:
        """Claimed as often as allowed, and no worker has lived to report: it fails instead of killing one more (RECLAIM-6)."""
        times = f"{claim.claims - 1} time{'' if claim.claims == 2 else 's'}"
        if (claim.max_claims or self.engine.settings.reclaim.max_claims) == 1:
            then = ", and it may be begun only once; nobody knows how far it came"
        else:
            then = "; mend what kills it, or raise max_claims"
        self._interrupted(delivery, claim, f"it was claimed {times} and never reported an outcome{then}")

    def _cut_short(self, delivery: Delivery, claim: Claim, interrupt: BaseException) -> None:
        cause = type(interrupt).__name__
        self._interrupted(delivery, claim, f"{cause} cut it short, and it may be begun only once; nobody knows how far it came")

    def _interrupted(self, delivery: Delivery, claim: Claim, message: str) -> None:
        """It fails for want of an outcome. Its run hears of it from the row; people, here."""
        job = claim.job
        error = StepInterruptedError(claim.actor, job.sequence, message=message)
        if self._settle(delivery, claim, describe_interrupted(error), error):
            self.log.error(
                "step_interrupted", row=job.row, run_id=job.run_id, sequence=job.sequence, actor=claim.actor, error=message
            )

    def _are_tries_spent(self, delivery: Delivery, tries: int) -> bool:
        """Whether Dramatiq's Retries would have given up after that many failures."""
        options, actor = delivery.message.options, self.broker.get_actor(delivery.actor)
        for middleware in self.broker.middleware:
            if isinstance(middleware, Retries) and not self.inline:
                if actor.options.get("retry_when", middleware.retry_when) is not None:
                    return False
                limit = options.get("max_retries", actor.options.get("max_retries", middleware.max_retries))
                return limit is not None and tries > limit
        return False

    def _give_up_at_last(self, delivery: Delivery, claim: Claim) -> None:
        """The claim goes back unused, and the failure that the row tells of is the last (NATIVE-2)."""
        job = replace(claim.job, attempts=claim.attempts)
        table = "{action_runs}" if job.kind == "step" else "{compensation_runs}"
        row = self.engine.store.read(
            lambda tx: tx.one(f"SELECT error FROM {table} WHERE run_id = ? AND sequence = ?", (job.run_id, job.sequence))
        )
        text = row[0] if row is not None else None
        landed = self.engine.store.write(lambda tx: give_back(tx, self.engine, claim, now=self.engine.now()))
        if not landed and job.kind == "step":
            undoing.body_reported(self.engine, claim, self.sender)
        if job.kind == "step":
            outcome = fence.Outcome(
                "refused", job, claim.actor, claim.workflow, claim.queue, claim.attempts, error=text, block=claim.block
            )
            fence.settle(self.engine, outcome, self.sender, delivery.message)
        else:
            undoing.settle(
                self.engine, undoing.Outcome("refused", job, claim.actor, claim.attempts, text), self.sender, delivery.message
            )
        delivery.state = "done"

    def _call(self, delivery: Delivery, step: Step, fn: Callable[..., Any], into: list[object]) -> None:
        claim = delivery.claim
        assert claim is not None
        args, kwargs = decode(claim.args)
        token = _current.set(step)
        try:
            if self.restore is not None and claim.context is not None:
                delivery.around.enter(self.restore, claim.context)
            # Called, and its value kept, from C: an interrupt can come before or after both, not in between.
            into.extend(starmap(partial(fn, **kwargs) if kwargs else fn, (args,)))
        finally:
            _current.reset(token)
        if not into:
            raise RuntimeError(f"{claim.actor} raised StopIteration")

    def _step(self, claim: Claim) -> Step:
        undoes = None
        if claim.undoes is not None:
            outcome, key = claim.undoes
            of = (claim.job.run_id, claim.job.sequence)
            row = self.engine.store.read(lambda tx: tx.one(_UNDONE_STEP, of) or tx.one(_UNDONE_CHILD, of))
            undoes = Undoes(claim.job.sequence, row[0] if row else "", outcome, key)
        return Step(
            claim.job.run_id,
            claim.job.sequence,
            claim.attempts,
            claim.idempotency_key,
            claim.workflow,
            undoes,
            self.engine,
            claim.delivery,
        )

    def _conclude(self, delivery: Delivery, claim: Claim, body: Body) -> None:
        """Record how the body ended."""
        if self.engine.store.abandon_host_transaction():
            error = StepLeftTransactionError(
                f"{claim.actor} returned with a transaction of the store's database still open; it was rolled back"
            )
            error.__cause__ = body.error
            body.returned, body.error = [], error
        if body.returned:
            value = body.returned[0]
            self.persist(lambda: self._succeed(delivery, claim, value))
            return
        failure = body.error
        assert failure is not None
        if isinstance(failure, Shutdown) or (self.inline and not isinstance(failure, Exception | SkipMessage)):
            if (claim.max_claims or self.engine.settings.reclaim.max_claims) == 1:
                # At most once: its body has begun. test_a_body_that_may_begin_once_is_not_begun_again_by_the_next_worker
                self.persist(lambda: self._cut_short(delivery, claim, failure))
            else:
                self._release(delivery, claim, begun=True)
            if self.inline:
                delivery.failure = failure
            return
        text = describe_error(failure)
        if isinstance(failure, SkipMessage) or not self.persist(lambda: fence.fail_try(self.engine, claim, text)):
            self.persist(lambda: self._settle(delivery, claim, text, failure))
            return
        _say_where(failure, claim)
        delivery.failure, delivery.state = failure, "failed"

    def _succeed(self, delivery: Delivery, claim: Claim, value: Any) -> None:
        if claim.job.kind == "compensation":
            # A report that is refused is not one of the level's: a level that was resumed must not end by it (COMP-8, PAR-3).
            # test_a_refused_report_is_not_counted_towards_its_level
            if not undoing.settle(self.engine, undoing.completed(claim), self.sender, delivery.message):
                _count_not(delivery)
            delivery.state = "done"
            return
        try:
            data = encode(value, f"the result of {claim.actor}")
        except NotSerializableError as error:
            self._unstorable(delivery, claim, error)
            return
        try:
            fence.settle(self.engine, fence.completed(claim, data), self.sender, delivery.message)
        except Exception as error:
            if is_trouble(error):
                raise
            # The database will not have this value: too large a packet, for example (CODEC-2).
            self.log.error("result_refused", run_id=claim.job.run_id, sequence=claim.job.sequence, exc_info=error)
            self._unstorable(delivery, claim, error)
            return
        delivery.state = "done"

    def _unstorable(self, delivery: Delivery, claim: Claim, cause: Exception) -> None:
        error = ResultNotSerializableError(f"{claim.actor} did its work, but its result cannot be stored: {cause}")
        error.__cause__ = cause
        self._settle(delivery, claim, describe_error(error), error)

    def _settle(self, delivery: Delivery, claim: Claim, text: str, error: BaseException) -> bool:
        """Record a failure that no further try can mend; false where the fence refused it."""
        if claim.job.kind == "step":
            outcome = replace(fence.failed(claim, text), exception=error)
            landed = fence.settle(self.engine, outcome, self.sender, delivery.message)
        else:
            failed = replace(undoing.failed(claim, text), exception=error)
            landed = undoing.settle(self.engine, failed, self.sender, delivery.message)
            if not landed:
                _count_not(delivery)
        delivery.state = "done"
        return landed

    def _wanted_by_dramatiq(self, delivery: Delivery) -> bool:
        """Whether the value goes on to Dramatiq: it does where something there asked for it (NATIVE-5)."""
        options, actor = delivery.message.options, self.broker.get_actor(delivery.actor)
        for middleware in self.broker.middleware:
            if isinstance(middleware, Results):
                return bool(options.get("store_results", actor.options.get("store_results", middleware.store_results)))
        return False

    def _time_limit(self, delivery: Delivery) -> int | None:
        """The time limit that Dramatiq applies to this message, in milliseconds."""
        for middleware in self.broker.middleware:
            if isinstance(middleware, TimeLimit):
                actor = self.broker.get_actor(delivery.actor)
                limit = delivery.message.options.get("time_limit") or actor.options.get("time_limit", middleware.time_limit)
                # what Dramatiq cannot compare either: it says so itself, and the step runs without
                return int(limit) if isinstance(limit, int | float) and limit != float("inf") else None
        return None

    # --- ways that end without an outcome ----------------------------------------------------------------------------

    def _release(self, delivery: Delivery, claim: Claim, *, delay: int = 0, begun: bool = False) -> None:
        """Give the claim back by its token and the message with it, due after ``delay`` ms: no try spent (NATIVE-4, FENCE-5).

        ``begun``: the body was at work.
        """
        message, broker = cast("Any", delivery.message), cast("Any", self.broker)

        def part() -> None:
            now = self.engine.now()
            # The message that goes back tells of the row as it is now, so that it may still be refused for its age (NATIVE-3).
            joins = self.sender.joins and not message.settled
            again = broker.prepare(_as_asked_for(delivery), delay=delay or None) if joins else None

            def operation(tx: Tx) -> bool:
                landed = give_back(tx, self.engine, claim, now=now, due_at=now + delay if delay else None, begun=begun)
                if again is not None:
                    broker.stage(tx, again, message.reservation)
                return landed

            if not self.engine.store.write(operation) and claim.job.kind == "step":
                undoing.body_reported(self.engine, claim, self.sender)
            if again is not None:
                broker.announce([again])
            self._went_back(delivery, delay)

        self._end_without_outcome(delivery, part)

    def _lost(self, delivery: Delivery, lost: Lost) -> None:
        """Nothing runs. Journal it, put the message back where the row may yet be claimable, drive what is unseen (CLAIM-2)."""
        job, engine = lost.job, self.engine
        self._disarm()
        if lost.status is not None and not lost.uncommitted:
            engine.anomalies.claim_lost(
                row=job.row, run_id=job.run_id, sequence=job.sequence, actor=delivery.actor, status=lost.status,
                orphaned=lost.orphaned, attempts=lost.attempts, run_status=lost.run_status,
            )  # fmt: skip

        def part() -> None:
            if job.kind == "step" and lost.delivery is not None:
                undoing.body_reported(
                    engine, lost, self.sender
                )  # it never began: test_a_body_that_never_begins_keeps_no_undo_waiting
            if lost.overdue:  # nothing begins after its deadline, or its run's; what that means is said at once (EXPIRE-1)
                timers.fire(engine, job.run_id, self.sender)
            if lost.undoing:
                self._go_on_rolling_back(lost)
            elif lost.unseen and lost.run_status in ("pending", "running", "waiting"):
                self.wake(job.run_id)
            elif not self.sender.joins:
                drives.send_unsent(engine, job.run_id, self.sender)
                children.send_unsent(engine, job.run_id, self.sender)
            if lost.retry_at is not None:
                self._send_back(delivery, max(0, lost.retry_at - engine.now()) + 1)

        self._end_without_outcome(delivery, part)

    def _go_on_rolling_back(self, lost: Lost) -> None:
        """A redelivery is a chance to send what a crash has left unsent, and the only one to see that an undo's worker is gone."""
        job = lost.job
        # with a lease behind it, there is a moment to try again
        if job.kind == "compensation" and lost.orphaned and lost.retry_at is None:
            outcome = undoing.unfinished(job, lost.actor or "", lost.attempts or 0)
            undoing.settle(self.engine, outcome, self.sender, None)
        else:
            undoing.advance(self.engine, job.run_id, self.sender, None)
        children.send_unsent(self.engine, job.run_id, self.sender)

    def put_back(self, delivery: Delivery, delay: int = 0) -> None:
        """The message again, as if it had not been delivered: nothing has been claimed or decided."""
        self._end_without_outcome(delivery, lambda: self._send_back(delivery, delay))

    def _wait_for_turn(self, delivery: Delivery, job: Job) -> None:
        """A suspect's message again, before any claim; its row says when, so that R1 does not take it for lost meanwhile (DOCTOR-1).

        Who else may be here: a copy of the message, which has claimed the row since and given it back. The row then has another count, and
        what it says is that copy's. test_the_doctor_leaves_alone_what_waits_for_its_turn_among_suspects
        """
        self._end_without_outcome(delivery, lambda: self._send_back(delivery, AGAIN_MS, waits=job))

    def _send_back(self, delivery: Delivery, delay: int, *, waits: Job | None = None) -> None:
        """With a database broker the message's row goes back, which is a write of its own."""
        message, broker = cast("Any", delivery.message), cast("Any", self.broker)

        def operation(tx: Tx) -> None:
            if waits is not None:
                sql = _STEP_WAITS if waits.kind == "step" else _UNDO_WAITS
                tx.run(sql, (self.engine.now() + delay, waits.run_id, waits.sequence, waits.attempts))
            if self.sender.joins and not message.settled:
                broker.release(tx, message.reservation, delay=delay)

        if self.sender.joins or waits is not None:
            self.engine.store.write(operation)
        self._went_back(delivery, delay)

    def _went_back(self, delivery: Delivery, delay: int) -> None:
        """With a database broker the row is back, and the message at hand settled; with another its copy is sent, and then it is
        acknowledged."""
        if self.sender.joins:
            cast("Any", delivery.message).settled = True
            return
        try:
            self.broker.enqueue(_as_asked_for(delivery), delay=min(delay, MAX_HOP_MS) or None)
        except Exception as error:
            raise MessageNotSentError(f"the message of {delivery.actor} could not be put back: {error}") from error

    def _end_without_outcome(self, delivery: Delivery, part: Callable[[], None]) -> None:
        """Nothing has run here: carry out ``part``, which no interrupt cuts short, and be done with the message."""
        self._disarm()
        self.persist(part)
        _count_not(delivery)
        delivery.state = "done"

    def _is_held_elsewhere(self, delivery: Delivery) -> bool:
        """Take the message's lock; put the message back where another one has it (LOCK-1).

        What follows an outcome under a step's lock takes no second one: it could not be put back, and loses its commit where a
        message drives the run meanwhile (DRIVE-1).
        """
        overlaps = self.overlaps
        if overlaps is None:
            return False
        delivery.back_in = 0  # until more is known: a worker that stops here puts it back (``finish``)
        delivery.back_in = self.persist(lambda: overlaps.enter(delivery))
        if delivery.back_in is None:
            return False
        self.put_back(delivery, delivery.back_in)
        return True

    def leave(self, delivery: Delivery) -> None:
        """The delivery is over: give its lock back."""
        overlaps = self.overlaps
        if overlaps is not None:
            shielded(lambda: overlaps.leave(delivery), delivery.interrupts)

    def _disarm(self) -> None:
        if not self.inline:
            disarm(self.broker)

    # --- drives ------------------------------------------------------------------------------------------------------

    def drive(self, delivery: Delivery) -> None:
        """Drive the run that a message names, or end what is due in it; an interrupt aborts that, and it is done again (FENCE-5)."""

        def part() -> None:
            if delivery.interrupts:
                forget_replay()
                self._drive_cut_short(delivery)
            elif delivery.level is None and delivery.kind != "timer" and delivery.actor in self.engine.lookout.busy():
                self.put_back(delivery, BUSY_MS)
                return
            elif self._is_held_elsewhere(delivery):
                return
            elif delivery.kind == "timer":
                run_id, message = delivery.run_id, delivery.message
                fired = self.persist(lambda: timers.fire(self.engine, run_id, self.sender, delivery=message, at=delivery.at))
                if fired.left:  # what needs no function has ended; the function of its workflow seems to hang here
                    self.put_back(delivery, BUSY_MS)
                    return
            elif delivery.level is not None:
                level = delivery.level
                self.persist(lambda: self._level_closed(delivery, level))
            elif delivery.group is None or self.persist(lambda: self._called_back(delivery)):
                self.persist(lambda: drives.drive(self.engine, delivery.run_id, self.sender, delivery.message))
            delivery.state = "done"

        self.engine.lookout.begin()
        shielded(part, delivery.interrupts)

    def _drive_cut_short(self, delivery: Delivery) -> None:
        """A drive that was interrupted has decided nothing, and is done again. Where its function has taken up the time limit twice running,
        the next one would be cut short as well: then the run is held. test_a_drive_that_its_time_limit_cuts_short_twice_is_held"""
        lookout = self.engine.lookout
        lasted = lookout.lasted()
        limited = any(isinstance(interrupt, TimeLimitExceeded) for interrupt in delivery.interrupts)
        spent = limited and lasted * 2000 >= (self._time_limit(delivery) or 0) and lookout.cut_short(delivery.run_id) > 1
        found = runs.as_found(self.engine, delivery.run_id, unseen=True) if spent else None
        if found is None:
            self.put_back(delivery, BUSY_MS if spent else 1000)
            return
        error = WorkflowStalledError(found.workflow, lasted)
        self.persist(lambda: runs.hold(self.engine, found, error, self.sender, delivery.message))

    def _level_closed(self, delivery: Delivery, level: int) -> None:
        undoing.level_closed(
            self.engine, delivery.run_id, level, self.sender, delivery.message, created_at=delivery.created
        )  # fmt: skip

    def _called_back(self, delivery: Delivery) -> bool:
        assert delivery.group is not None
        block, first, last = delivery.group
        return blocks.called_back(
            self.engine,
            delivery.run_id,
            self.sender,
            block=block,
            first=first,
            last=last,
            created_at=delivery.created,
            delivery=delivery.message,
        )

    def wake(self, run_id: str) -> None:
        """Have a run driven: here where this process can (DRIVE-6), by a message otherwise, or where its workflow's function seems to hang."""
        run = self.engine.store.read(lambda tx: tx.one(_RUN, (run_id,)))
        if run is None:
            return
        workflow, queue, priority = run
        if self.engine.drives(workflow, queue) and workflow not in self.engine.lookout.busy():
            drives.drive(self.engine, run_id, self.sender, None)
            return
        outbox = self.sender.outbox(None)
        outbox.load([Outgoing("drive", run_id, workflow, queue, priority=priority)])
        self.engine.store.write(outbox.stage)
        outbox.delivered()

    def hold(self, delivery: Delivery, error: BaseException) -> None:
        """A drive's message is given up: the run waits with the reason on it, and the monitor drives it again (HISTORY-1).

        Unless it was one too many, and the run has been driven: then nothing waits for it, and no monitor would drive it again.
        """
        self.log.error("drive_message_rejected", run_id=delivery.run_id, workflow=delivery.actor, error=str(error))
        if delivery.kind == "timer":  # what is due is in the rows, and the sweep's
            delivery.state = "done"
            return

        def part() -> None:
            found = runs.as_found(self.engine, delivery.run_id, unseen=True)
            if found is not None:
                runs.hold(self.engine, found, error, self.sender, None)

        self.persist(part)
        delivery.state = "done"

    # --- what the middleware's hooks call ----------------------------------------------------------------------------

    def give_up(self, delivery: Delivery) -> None:
        """Dramatiq will not try again: say so on the row, and drive the run on, before the message is gone (NATIVE-2)."""
        claim = delivery.claim
        assert claim is not None

        def part() -> None:
            if claim.job.kind == "step":
                fence.settle(self.engine, fence.given_up(claim), self.sender, None)
            else:
                undoing.settle(
                    self.engine,
                    undoing.Outcome("given_up", claim.job, claim.actor, claim.attempts, delivery=claim.delivery),
                    self.sender,
                    None,
                )

        shielded(lambda: self.persist(part), delivery.interrupts)
        delivery.state = "done"

    def refuse(self, job: Job, actor: str, error: BaseException) -> None:
        """A message ended before any claim: its row fails with a clear cause, if it is as it was when the message was sent (NATIVE-3)."""
        text = describe_error(error)

        def part() -> None:
            if job.kind == "step":
                run = self.engine.store.read(lambda tx: tx.one(_RUN, (job.run_id,)))
                if run is None:
                    return
                outcome = fence.Outcome("refused", job, actor, run[0], run[1], job.attempts, error=text, exception=error)
                fence.settle(self.engine, outcome, self.sender, None)
            else:
                undoing.settle(
                    self.engine, undoing.Outcome("refused", job, actor, job.attempts, text, error), self.sender, None
                )

        shielded(lambda: self.persist(part), [])


def _as_asked_for(delivery: Delivery) -> Message[Any]:
    """The message that goes back for the one at hand, which Dramatiq may have been told meanwhile to store nothing for."""
    copy: Message[Any] = delivery.message.copy(options={"store_results": delivery.store_results})
    if delivery.store_results is None:
        del copy.options["store_results"]
    copy.options.pop("eta", None)
    return copy


def _count_not(delivery: Delivery) -> None:
    """Keep Dramatiq from counting this delivery as a member that has succeeded: nothing ran here (PAR-2). The count is not believed
    anyway, but one that is right spares the run a callback that comes early."""
    delivery.message.options.pop("group_completion_callbacks", None)


def _say_where(failure: BaseException, claim: Claim) -> None:
    """Add run and step to what Dramatiq logs of a failure: its line names the actor alone, for our messages carry no arguments.

    An error object that is raised again and again keeps the last of these notes, not all of them.
    """
    job = claim.job
    mark = "dramatiq-saga: "
    with suppress(Exception):  # an exception class may refuse new attributes
        notes = [note for note in getattr(failure, "__notes__", ()) if not str(note).startswith(mark)]
        failure.__notes__ = [
            *notes,
            f"{mark}{job.kind} {job.sequence} of run {job.run_id} ({claim.workflow}), claim {claim.attempts}",
        ]
