"""Every action of an operator, once: what the command line calls, and what a web page would call.

An :class:`Operator` stands on an application's broker, or on a database alone, which is enough to look. Its methods return
reports or raise; they print nothing and decide nothing that the engine does not decide. What cannot be done is refused with
:class:`RefusedError` or an error of the engine's, whose text says why and what would help.

Long because every action is a method of one class, and most of each is the promise that stands above it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from dramatiq.middleware import Retries

from .brokers import dead_letters
from .brokers.database import DatabaseBroker
from .brokers.dead_letters import DeadLetter, QueueStats
from .clock import to_iso
from .commands import command
from .context import UNSET
from .engine.runs import UNPLANNED
from .engine.verify import VerifyReport, summarise, verify_run, verify_runs
from .errors import (
    CannotSignalRollingBackFlowError,
    CannotSignalTerminalFlowError,
    ConcurrentTransitionError,
    FlowNotFoundError,
    SagaError,
)
from .handle import FlowHandle
from .histories import History, read_history
from .middleware import middleware_of
from .query import FlowQuery, read_conditions
from .recovery.doctor import RepairReport, candidates
from .recovery.explain import Declared, Explanation, Post, Posts, why
from .recovery.kick import KickReport, kick
from .recovery.monitor import MonitorReport
from .recovery.passes import Skipped
from .recovery.prune import PruneReport, horizon, prune
from .recovery.schedule import PRUNE_AT, Plan, Schedule, require_apscheduler
from .recovery.stuck import Asked, StuckReport, stuck
from .recovery.sweep import SweepReport, monitor_in_turn, repair_in_turn, repair_is_off, sweep
from .report_entries import EntryReport
from .reports import RunReport, StepReport, read_run
from .settings import Settings
from .statuses import ChildClosePolicy, FlowStatus
from .step import OPTION
from .store.connections import file_of
from .store.database import Store, open_store
from .store.sql import SQLITE
from .workflow import workflows_of

if TYPE_CHECKING:
    from datetime import timedelta

    from dramatiq import Broker

    from .engine.core import Engine, Sender
    from .store.database import Tx

_LISTED = ("workflow", "status", "rollback", "started_at", "ended_at", "hold_until", "reason")
_EXISTS = "SELECT 1 FROM {flow_runs} WHERE id = ?"
_OF_WORKFLOW = "SELECT 1 FROM {flow_runs} WHERE workflow = ? LIMIT 1"
_BY_MESSAGE = "SELECT id FROM {messages} WHERE state = 3 AND message_id = ?"


#: Most runs that ``stuck`` lists, and most messages of each state that ``why`` looks through.
MAX_STUCK, MESSAGES_LOOKED_AT = 1000, 20_000

#: Other limits, and what a prune may be asked for: an age in days; a moment, in milliseconds, is in a year of four digits.
MAX_LIMIT, MAX_DAYS, MAX_MOMENT = 2**31 - 1, 100_000, 253_402_300_800_000


class RefusedError(SagaError):
    """What an operator asked for was not done; the text says why, and what would help. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in a list. Times are milliseconds UTC; ``hold_until`` is set where the run is held (HISTORY-1)."""

    id: str
    created_at: int
    workflow: str
    status: str
    rollback: str
    started_at: int | None
    ended_at: int | None
    hold_until: int | None
    reason: str | None
    tags: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Parked:
    """A step or child that waited for a signal to be run again (RSIG-1). ``kind`` is ``step`` or ``child``."""

    kind: str
    sequence: int
    name: str
    signal: str


@dataclass(frozen=True, slots=True)
class Undo:
    """A step, or a child's workflow, that is not undone; ``by`` is ``None`` where its undo cannot be built.

    ``failed``: its undo was tried and has failed for good, with ``error``; otherwise its turn has not come.
    """

    sequence: int
    name: str
    by: str | None
    failed: bool = False
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer to a cancel.

    ``changed`` is false where the run already was cancelled or rolling back. ``stands`` is the work that is left as it is,
    that of steps that were running, or had been, included; ``undone`` are the steps that have been undone. ``left`` and ``never`` are what the
    rollback has still to undo, or, where ``rollback`` is ``halted``, what it has not undone, children included: see
    :class:`Resumed`. ``children`` are those that had completed or were open before it, each with what becomes of it, in words (CHILD-3).
    ``ends_as`` is the end that a rollback leads to, which may have begun as a failure: ``None`` where there was none.
    """

    run_id: str
    status: str
    rollback: str
    changed: bool
    stands: tuple[StepReport, ...] = ()
    undone: tuple[StepReport, ...] = ()
    left: tuple[Undo, ...] = ()
    never: tuple[Undo, ...] = ()
    children: tuple[tuple[EntryReport, str], ...] = ()
    ends_as: str | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The answer to a resumed rollback, or to an abandoned undo.

    ``changed`` is false where it was going on already, or the undo was abandoned before. ``left`` is what is still to be undone, ``never``
    what can never be: its undo needs a result that could not be kept. ``worker`` is what an abandoned undo was running on.
    """

    run_id: str
    status: str
    rollback: str
    changed: bool
    left: tuple[Undo, ...] = ()
    never: tuple[Undo, ...] = ()
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A run that was started, or found: ``started`` is false where a run with this id was there already."""

    run_id: str
    workflow: str
    started: bool


class Operator:
    """An operator's actions on one application, or on one database.

    Use :meth:`on_broker` or :meth:`on_database`. Every method but ``init`` raises SchemaVersionError where the tables are missing
    or of another version, and StoreError or DatabaseUnusableError where the database does not answer.
    """

    def __init__(self, store: Store, *, settings: Settings, broker: Broker | None = None) -> None:
        self.store = store
        self.settings = settings
        self.broker = broker

    @classmethod
    def on_broker(cls, broker: Broker) -> Operator:
        """On an application's broker: everything is possible.

        Raises:
          MiddlewareOrderError: the broker has no SagaMiddleware, or more than one.
        """
        middleware = middleware_of(broker)
        return cls(middleware.engine(broker).store, settings=middleware.settings, broker=broker)

    @classmethod
    def on_database(cls, database: str | Path, *, settings: Settings | None = None) -> Operator:
        """On a database alone: looking is possible, and seeing to tables and dead letters. Creates nothing by itself.

        ``settings`` are those of the environment unless given; what counts is the table prefix, and which payloads may be shown. Leases are
        then taken to be on: they concern what was claimed under a heartbeat alone, and only an application that has them on claims so.
        """
        chosen = settings or Settings.from_mapping({"reclaim.dead_workers.enabled": True}, base=Settings.from_env())
        return cls(open_store(database, prefix=chosen.schema.table_prefix, auto_create=False), settings=chosen)

    def close(self) -> None:
        """Close what was opened."""
        if self.broker is not None:
            self.broker.close()
        self.store.close()

    # --- looking -----------------------------------------------------------------------------------------------------

    def list_runs(
        self,
        *,
        workflow: str | None = None,
        status: Iterable[str] = (),
        tags: Mapping[str, str] | None = None,
        awaiting_signal: str | None = None,
        awaiting_retry_signal: str | None = None,
        signalable: bool | None = None,
        limit: int = 50,
    ) -> list[RunLine]:
        """The newest runs, narrowed as by :func:`~dramatiq_saga.query`. Raises ValueError for what cannot be meant."""
        self._require_tables()
        conditions = read_conditions(
            workflow=workflow, status=list(status) or None, tags=tags or None, awaiting_signal=awaiting_signal,
            awaiting_retry_signal=awaiting_retry_signal, signalable=signalable, limit=limit,
        )  # fmt: skip
        rows = list(FlowQuery(cast("Broker", self.broker), **conditions).rows(self.store, _LISTED))
        found = self.store.read(lambda tx: _tags_of(tx, [row[0] for row in rows]))
        return [RunLine(*(*row, found.get(row[0], {}))) for row in rows]

    def show_run(self, run_id: str, *, events: bool = False) -> RunReport:
        """One run, whole. Raises FlowNotFoundError."""
        self._require_tables()
        report = self.store.read(
            lambda tx: read_run(tx, run_id, settings=self.settings, tries_of=self._tries_of, events=events)
        )
        if report is None:
            raise FlowNotFoundError(run_id)
        return report

    def why(self, run_id: str) -> Explanation:
        """Why a run does not go on: what it waits for, what acts on that next, and what can be done (C57). Changes nothing.

        Of its messages it knows what a database broker keeps; those of another broker cannot be seen. Raises FlowNotFoundError.
        """
        self._require_tables()
        queue = self._queue_store()
        elsewhere = None if queue is None or queue is self.store else self._posts(queue, run_id)

        declared = self._declared()

        def look(tx: Tx) -> Explanation | None:
            posts = elsewhere or (self._unseen() if queue is None else self._posts_in(tx, run_id))
            now = self.store.clock.now()
            return why(tx, run_id, settings=self.settings, now=now, posts=posts, declared=declared)

        found = self.store.read(look)
        if found is None:
            raise FlowNotFoundError(run_id)
        return found

    def stuck(self, *, limit: int = 50) -> StuckReport:
        """The runs that need a human, each once, at most ``limit``. Changes nothing.

        Runs of workflows that are not declared are among them where the application is known. Raises ValueError for a bad limit.
        """
        _check_limit(limit, MAX_STUCK)
        self._require_tables()
        queue = self._queue_store()
        apart = queue is not None and queue is not self.store
        elsewhere: Asked = None
        if queue is not None and apart:  # before the rows are read
            queue.prepare()
            elsewhere = queue.read(self._asked)
        now, declared = self.store.clock.now(), self._declared()

        def asked(tx: Tx) -> Asked:
            return elsewhere if apart else self._asked(tx)

        return self.store.read(
            lambda tx: stuck(tx, settings=self.settings, now=now, limit=limit, declared=declared, asked=asked)
        )

    def verify(self, run_id: str | None = None, *, workflow: str | None = None, finished: bool = False) -> VerifyReport:
        """Whether recorded histories fit the application's code: of one run, or of every live one. Changes nothing (HISTORY-1).

        ``finished``: runs that have ended as well, which nothing drives any more, but whose histories show what code has to fit.

        Raises:
          FlowNotFoundError: there is no such run.
          RefusedError: there never was a run of such a workflow, and the application declares none.
        """
        engine, _ = self._engine("verify")
        if run_id is not None:
            verdict = verify_run(engine, run_id)
            if verdict is None:
                raise FlowNotFoundError(run_id)
            return summarise([verdict])
        if workflow is not None and workflow not in engine.workflows:
            if self.store.read(lambda tx: tx.one(_OF_WORKFLOW, (workflow,))) is None:
                raise RefusedError(_unknown_workflow(workflow, engine.workflows))
        return summarise(verify_runs(engine, workflow=workflow, finished=finished))

    def export(self, run_id: str) -> History:
        """What is recorded of a run, as a history that can be kept as a file. It holds its arguments and results.

        Raises FlowNotFoundError.
        """
        self._require_tables()
        return read_history(self.store, run_id)

    # --- a run -------------------------------------------------------------------------------------------------------

    def send(
        self,
        workflow: str,
        *,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        run_id: str | None = None,
        context: Any = UNSET,
    ) -> Sent:
        """Start a run of a workflow that the application declares; ``context`` as in ``Workflow.send_with_options``.

        Raises:
          RefusedError: it declares no such workflow.
          TypeError: the arguments do not fit; NotSerializableError: they cannot be stored.
          RunConflictError: the id is taken by another run.
        """
        declared = workflows_of(self._application("send"))
        if workflow not in declared:
            raise RefusedError(_unknown_workflow(workflow, declared))
        self._require_tables()
        there = run_id is not None and self.store.read(lambda tx: tx.one(_EXISTS, (run_id,))) is not None
        handle = declared[workflow].send_with_options(
            args=tuple(args or ()), kwargs=kwargs or {}, run_id=run_id, context=context
        )
        return Sent(handle.id, workflow, not there)

    def worked(self, run_id: str) -> tuple[RunReport, list[StepReport]]:
        """A run, and its steps that have done their work, are at it or may have been: what a cancel would leave standing."""
        report = self.show_run(run_id)
        worked = [
            step for step in report.steps
            if step.row.status in ("completed", "running") or step.was_begun or step.did_its_work
        ]  # fmt: skip
        return report, worked

    def cancel(self, run_id: str, *, reason: str | None = None) -> Cancelled:
        """End a run and leave its work as it is.

        Raises:
          RefusedError: it is rolling back, which a cancel never interrupts (COMP-9).
          ConcurrentTransitionError: it has ended otherwise.
        """
        handle = self._handle(run_id, "cancel")
        before, worked = self.worked(run_id)
        answer = self._answer(run_id, before, worked, changed=handle.cancel(reason), undoes=False)
        if not answer.changed and answer.status == FlowStatus.ROLLING_BACK:
            raise RefusedError(
                f"run {run_id} is rolling back, and a cancel never interrupts a rollback: its work is being undone"
            )
        return answer

    def compensate(self, run_id: str, *, reason: str | None = None) -> Cancelled:
        """Undo what a run has done, then end it.

        Raises:
          RefusedError: it was cancelled before without that, or it has ended and its rollback halted: that is resumed instead. Or the rollback
            cannot be planned, because its code does not fit its history for example (COMP-3).
          ConcurrentTransitionError: it has ended otherwise.
        """
        handle = self._handle(run_id, "cancel")
        before, worked = self.worked(run_id)
        try:
            changed = handle.compensate(reason)
        except Exception as error:
            if UNPLANNED in getattr(error, "__notes__", ()):
                text = str(error) if isinstance(error, SagaError) else f"{type(error).__name__}: {error}"
                raise RefusedError(
                    f"{text}; its rollback cannot be planned, and nothing was changed: deploy code that fits its history, or end it without "
                    f"undoing anything: `{command('cancel', run_id, options='--keep')}`"
                ) from error
            if not isinstance(error, ConcurrentTransitionError) or self.show_run(run_id).rollback != "halted":
                raise
            raise RefusedError(
                f"run {run_id} is {error.actual}, and its rollback has halted: not all of its work is undone; once the cause is mended, "
                f"`{command('resume-rollback', run_id)}` goes on with it"
            ) from None
        answer = self._answer(run_id, before, worked, changed=changed, undoes=True)
        if not answer.changed and answer.rollback == "none" and any(step.undo for step in answer.stands):
            raise RefusedError(
                f"run {run_id} was cancelled before without undoing anything, and a run that has ended is never rolled back: "
                f"see `{command('show', run_id)}`, and undo by hand what has to be undone"
            )
        return answer

    def _answer(
        self, run_id: str, found: RunReport, worked: list[StepReport], *, changed: bool, undoes: bool
    ) -> Cancelled:  # fmt: skip
        """What a cancel has led to. ``found`` and ``worked`` are from before it: what was running then, or had been, is cancelled now,
        whatever it has done."""
        report = self.show_run(run_id)
        before = {step.row.sequence for step in worked}
        stands = [
            step for step in report.steps
            if step.compensation is None and (step.row.status == "completed" or step.row.sequence in before)
        ]  # fmt: skip
        undone = [
            step for step in report.steps if step.compensation is not None and step.compensation.row.status == "completed"
        ]
        left, never = _not_undone(report)
        children = [
            (child, _fate(child, report, undoes=undoes)) for child in found.entries
            if child.kind == "child" and child.status in ("running", "completed")
        ]  # fmt: skip
        return Cancelled(
            run_id,
            report.status,
            report.rollback,
            changed,
            tuple(stands),
            tuple(undone),
            left,
            never,
            tuple(children),
            report.ends_as,
        )

    def signal(self, run_id: str, name: str, *, payload: Any = None, key: str | None = None) -> RunReport:
        """Signal a run; the run as it is afterwards.

        Raises RefusedError where the run takes none (SIG-1), and whatever else :meth:`FlowHandle.signal` raises.
        """
        with _refusing_signals():
            self._handle(run_id, "signal").signal(name, payload, key=key)
        return self.show_run(run_id)

    def signal_retry(self, run_id: str) -> list[Parked]:
        """Run again what of a run is parked for a signal; what was parked, as it was.

        Raises RefusedError where the run takes no signals, and whatever else :meth:`FlowHandle.signal_retry` raises.
        """
        handle = self._handle(run_id, "signal-retry")
        report = self.show_run(run_id)
        parked = [
            Parked("step", step.row.sequence, step.row.actor, step.retry.signal)
            for step in report.steps
            if step.retry is not None and step.retry.waiting
        ]
        parked += [
            Parked(entry.kind, entry.sequence, entry.name or "", entry.retry.signal)
            for entry in report.entries
            if entry.retry is not None and entry.retry.waiting
        ]
        with _refusing_signals():
            handle.signal_retry()
        return sorted(parked, key=lambda one: one.sequence)

    def kick(self, run_id: str) -> KickReport:
        """Drive a run again and send what it is parked on once more (KICK-1). Raises FlowNotFoundError."""
        engine, sender = self._engine("kick")
        return kick(engine, run_id, sender)

    def resume_rollback(self, run_id: str) -> Resumed:
        """Go on with a rollback that has halted, once its cause is mended (COMP-8).

        Raises:
          RefusedError: nothing of it has halted; the text says where it is.
          FlowNotFoundError: there is no such run.
        """
        handle = self._handle(run_id, "resume-rollback")
        try:
            changed = handle.resume_rollback()
        except ConcurrentTransitionError as error:
            raise RefusedError(
                f"run {run_id} is {error.actual}: only a rollback that has halted is resumed, and a run that has ended is never "
                f"restarted; `{command('why', run_id)}` says what it waits for"
            ) from None
        report = self.show_run(run_id)
        left, never = _not_undone(report)
        return Resumed(run_id, report.status, report.rollback, changed, left, never)

    def abandon_undo(self, run_id: str, sequence: int) -> Resumed:
        """End the level of a running undo without it, where nobody is at it any more (PAR-3, COMP-4).

        Raises:
          RefusedError: it is not running, or something else is to come for it: its message, as a database broker keeps it, a reclaim, a lease.
          FlowNotFoundError: there is no such run.
        """
        handle = self._handle(run_id, "abandon-undo")
        queue = self._queue_store()
        posts = () if queue is None else self._posts(queue, run_id).of("compensation", sequence)
        for post in () if self._is_run_again(run_id, sequence) else posts:
            if post.state != "dead":
                held = f"reserved by a worker until {to_iso(post.at)}" if post.state == "reserved" else f"there ({post.state})"
                raise RefusedError(
                    f"the undo of step {sequence} is not lost: its message is {held}; a living worker that is at it keeps it, "
                    "and if that one dies the message comes back and ends the undo's level; "
                    f"`{command('why', run_id)}` says what the run waits for"
                )
        try:
            changed = handle.abandon_undo(sequence)
        except ConcurrentTransitionError as error:
            raise RefusedError(
                f"run {run_id} is {error.actual}: only an undo that is running, and that nothing will ever reclaim, is abandoned; "
                f"`{command('why', run_id)}` says what the run waits for"
            ) from None
        report = self.show_run(run_id)
        worker = next((undo.worker_id for undo in handle.compensations() if undo.sequence == sequence), None)
        return Resumed(run_id, report.status, report.rollback, changed, *_not_undone(report), worker)

    def _is_run_again(self, run_id: str, sequence: int) -> bool:
        """Whether the undo of a step is running, with a reclaim window or a lease behind it: that is what is said of it, then."""
        report = self.show_run(run_id)
        undos = {step.row.sequence: step.compensation for step in report.steps} | report.undone_children
        undo = undos.get(sequence)
        return (
            undo is not None
            and undo.row.status == "running"
            and (undo.lease is not None or undo.row.reclaim_stale_at is not None)
        )

    # --- all runs ----------------------------------------------------------------------------------------------------

    def sweep(self) -> SweepReport:
        """One sweep: monitor, then repair where it is enabled. A pass that another process is at is skipped, and the report says so.

        Raises RefusedError, as do the other passes, where the application declares no workflow: it could drive nothing, and would call its
        actors unknown.
        """
        return sweep(*self._sweeper("sweep"))

    def monitor(self) -> MonitorReport | Skipped:
        """One pass of the monitor; skipped where another process is at one."""
        return monitor_in_turn(*self._sweeper("monitor"))

    def repair(self) -> RepairReport | Skipped:
        """One pass of the doctor; skipped where another process is at one.

        Raises RefusedError where ``repair.enabled`` is off; the text says how much is waiting for it.
        """
        engine, sender = self._sweeper("repair")
        if not engine.settings.repair.enabled:
            raise RefusedError(
                f"{repair_is_off(candidates(engine))}; turn it on in the application's settings, or kick single runs"
            )
        return repair_in_turn(engine, sender)

    def schedule(
        self,
        *,
        stop: SimpleQueue[str],
        tell: Callable[[str], None],
        monitor_seconds: float | timedelta | None = None,
        repair_seconds: float | timedelta | None = None,
        prune_at: str | None = PRUNE_AT,
        timezone: str = "UTC",
    ) -> str:
        """Monitor, repair and prune again and again, until something is put into ``stop``, which is returned (LOOP-1).

        ``tell`` is given the plan, and a line of each pass that has something to say. The rest, what is raised included, is as for
        :func:`dramatiq_saga.scheduling.add_jobs`.
        """
        engine, sender = self._sweeper("schedule")
        require_apscheduler()
        plan = Plan.make(
            engine.settings,
            monitor_seconds=monitor_seconds,
            repair_seconds=repair_seconds,
            prune_at=prune_at,
            timezone=timezone,
        )
        tell(plan.line(engine.now()))
        return Schedule(engine, sender, plan, tell=tell).serve(stop)

    def _sweeper(self, action: str) -> tuple[Engine, Sender]:
        engine, sender = self._engine(action)
        require_workflows(engine)
        return engine, sender

    def prune(
        self, *, days: float | None = None, before: int | None = None, limit: int | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Delete runs that ended more than ``days`` ago, or until ``before`` (milliseconds) (PRUNE-1).

        ``days`` is ``prune.retention_days`` where neither is given; ``dry_run`` only counts. Raises RefusedError for a moment to come: up to
        it everything that ends would go; ValueError for what is no age, moment or number.
        """
        _check_prune(days, before)
        if limit is not None:
            _check_limit(limit, MAX_LIMIT)
        self._require_tables()
        if before is None:
            age = self.settings.prune.retention_days if days is None else days
            before = horizon(self.store, age)
        elif before > (now := self.store.clock.now()):
            raise RefusedError(
                f"{to_iso(before)} is still to come (it is {to_iso(now)} now): every run that has ended would be deleted; if that is meant, "
                "say --days 0"
            )
        return prune(self.store, before=before, dry_run=dry_run, limit=limit)

    def init(self) -> list[str]:
        """Create or migrate the tables; the names of what was applied. Safe to repeat, and from many processes at once."""
        applied = self.store.migrate()
        queue = self._queue_store()
        if queue is not None and queue is not self.store:
            applied += queue.migrate()
        return applied

    # --- queues ------------------------------------------------------------------------------------------------------

    def queues(self) -> list[QueueStats]:
        """How deep each queue of a database broker is. Raises RefusedError where queues live elsewhere."""
        return self._queues().read(dead_letters.stats)

    def dead_letters(self, queue: str | None = None, *, limit: int = 100) -> list[DeadLetter]:
        """Messages that were given up, the newest first; at most ``limit``, from 1."""
        _check_limit(limit, MAX_LIMIT)
        return self._queues().read(lambda tx: dead_letters.newest(tx, queue, limit))

    def requeue(self, message: str) -> DeadLetter:
        """Send a dead letter again, its tries renewed; named by its number or by its message id.

        Raises:
          RefusedError: there is no such dead letter, or the message id names several.
        """
        store = self._queues()
        number = int(message) if message.isdecimal() and len(message) < 19 else self._number_of(store, message)
        letter = store.write(lambda tx: dead_letters.requeue(tx, number, store.clock.now()))
        if letter is None:
            raise RefusedError(f"there is no dead letter {message!r}: `dramatiq-saga queues` lists those that there are")
        return letter

    def purge(self, queue: str) -> int:
        """Delete the dead letters of a queue; how many there were. Live messages stay."""
        return self._queues().write(lambda tx: dead_letters.purge(tx, queue, None))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _require_tables(self) -> None:
        if self.broker is None:
            _refuse_to_create(self.store)
        self.store.prepare()

    def _application(self, action: str) -> Broker:
        if self.broker is None:
            raise RefusedError(
                f"{action} needs the application, not only its database: name the module that sets its broker (--app)"
            )
        return self.broker

    def _engine(self, action: str) -> tuple[Engine, Sender]:
        broker = self._application(action)
        self._require_tables()
        middleware = middleware_of(broker)
        return middleware.engine(broker), middleware.sender(broker)

    def _handle(self, run_id: str, action: str) -> FlowHandle[Any]:
        broker = self._application(action)
        return FlowHandle(run_id, self.show_run(run_id).workflow, middleware=middleware_of(broker), broker=broker)

    def _declared(self) -> Declared | None:
        return None if self.broker is None else Declared(workflows_of(self.broker), self.broker.actors)

    def _queue_store(self) -> Store | None:
        if self.broker is None:
            return self.store
        return self.broker.store if isinstance(self.broker, DatabaseBroker) else None

    def _queues(self) -> Store:
        store = self._queue_store()
        if store is None:
            raise RefusedError(f"the queues are kept by {type(self.broker).__name__}, not by the database: use its own tools")
        if self.broker is None:
            _refuse_to_create(store)
        store.prepare()
        return store

    def _unseen(self) -> Posts:
        return Posts(
            None, False, f"its messages are kept by {type(self.broker).__name__}: from here nobody can see whether they exist"
        )

    def _posts(self, store: Store, run_id: str) -> Posts:
        store.prepare()
        return store.read(lambda tx: self._posts_in(tx, run_id))

    def _posts_in(self, tx: Tx, run_id: str) -> Posts:
        """The messages of a run that a database broker keeps."""
        found, complete = dead_letters.carrying(tx, run_id, looked_at=MESSAGES_LOOKED_AT, limit=100)
        posts, unread = [], False
        for one in found:
            facts = (one.options or {}).get(OPTION)
            unread = unread or one.options is None
            if isinstance(facts, dict) and facts.get("run") == run_id:
                sequence = facts.get("sequence")
                posts.append(
                    Post(
                        str(facts.get("kind")),
                        sequence if isinstance(sequence, int) else None,
                        one.state,
                        one.queue,
                        one.at,
                        one.id,
                    )
                )
        note = None
        if not complete:
            note = f"more than {MESSAGES_LOOKED_AT} messages wait: not all of them were looked at"
        elif unread:
            note = "a message that carries its id cannot be decoded here"
        elif self.broker is None and not posts:
            note = "this database keeps no message of it; whether its broker keeps its queues here, only the application knows (--app)"
        return Posts(tuple(posts), note is None, note)

    def _asked(self, tx: Tx) -> Asked:
        """What the messages of a database broker ask for, dead letters aside; ``None`` where not all of them can be known."""
        if not isinstance(self.broker, DatabaseBroker):
            return None
        found = dead_letters.waiting(tx, looked_at=MESSAGES_LOOKED_AT)
        if found is None or None in found:
            return None
        facts = [options.get(OPTION) for options in found if options is not None]
        return {
            (one["run"], str(one.get("kind")), one.get("sequence"))
            for one in facts if isinstance(one, dict) and isinstance(one.get("run"), str) and not isinstance(one.get("sequence"), dict | list)
        }  # fmt: skip

    def _number_of(self, store: Store, message_id: str) -> int:
        found = [row[0] for row in store.read(lambda tx: tx.all(_BY_MESSAGE, (message_id,)))]
        if len(found) > 1:
            numbers = ", ".join(str(number) for number in sorted(found))
            raise RefusedError(
                f"{len(found)} dead letters carry the message id {message_id}: name one by its number ({numbers})"
            )
        return found[0] if found else -1

    def _tries_of(self, actor_name: str, options: dict[str, Any]) -> int | None:
        """How many tries an actor has in all; ``None`` where that has no end, or is not known here."""
        actor = self.broker.actors.get(actor_name) if self.broker is not None else None
        if self.broker is None or actor is None:
            limit = options.get("max_retries")
            return limit + 1 if isinstance(limit, int) else None
        retries = next((one for one in self.broker.middleware if isinstance(one, Retries)), None)
        if retries is None:
            return 1
        if actor.options.get("retry_when", retries.retry_when) is not None:
            return None
        limit = options.get("max_retries", actor.options.get("max_retries", retries.max_retries))
        return limit + 1 if isinstance(limit, int) else None


def _not_undone(report: RunReport) -> tuple[tuple[Undo, ...], tuple[Undo, ...]]:
    """What a rollback has planned and not undone, in the order of its levels: what can be undone, and what nothing can build an undo of."""
    names = {step.row.sequence: step.row.actor for step in report.steps}
    names |= {entry.sequence: entry.name or entry.kind for entry in report.entries}
    undos = [step.compensation for step in report.steps if step.compensation] + list(report.undone_children.values())
    left = [
        Undo(
            undo.row.sequence, names[undo.row.sequence], undo.row.actor or None, undo.row.status == "failed" and bool(undo.row.given_up),
            undo.row.error,
        )
        for undo in sorted(undos, key=lambda undo: (undo.row.level, -undo.row.sequence))
        # what a rollback has gone on without is tried again where it halts after all, and by nobody otherwise (COMP-4)
        if undo.row.status != "completed" and (report.rollback == "halted" or not (undo.row.given_up and undo.row.actor))
    ]  # fmt: skip
    return tuple(undo for undo in left if undo.by), tuple(undo for undo in left if not undo.by)


def _fate(child: EntryReport, report: RunReport, *, undoes: bool) -> str:
    """What becomes of a child of a run that was cancelled or is rolled back, as ``report`` has it (CHILD-3)."""
    if child.status == "completed":
        undo = report.undone_children.get(child.sequence)
        if undo is None:
            return "had completed: its work stands"
        if undo.row.status == "completed":
            return f"had completed: undone by {undo.row.actor}"
        by = f" by {undo.row.actor}" if undo.row.actor else ""
        return f"had completed: {'to be undone' if report.rollback == 'running' else 'not undone'}{by}"
    if child.policy == ChildClosePolicy.ABANDON:
        return "goes on by itself"
    if child.policy == ChildClosePolicy.FAIL:
        return "is rolled back, and ends as failed"
    return "is rolled back, and ends as cancelled" if undoes else "ends as cancelled, its work stands"


def run_of(letter: DeadLetter) -> str | None:
    """The run that a dead letter belongs to, where it is one of ours."""
    message = letter.message
    facts = message.options.get(OPTION) if message is not None else None
    run = facts.get("run") if isinstance(facts, dict) else None
    return run if isinstance(run, str) else None


def require_workflows(engine: Engine) -> None:
    """Raise RefusedError where the application declares no workflow: a sweep could drive nothing, and would call its actors unknown."""
    if not engine.workflows:
        raise RefusedError(
            "the application declares no workflow, so a sweep could drive nothing: name the module that imports the workflows and "
            "actors (--app), the one that `dramatiq` is started with"
        )


@contextmanager
def _refusing_signals() -> Iterator[None]:
    """The refusal of a signal in an operator's words: the error's own are for whoever calls the handle."""
    try:
        yield
    except (CannotSignalTerminalFlowError, CannotSignalRollingBackFlowError) as error:
        raise RefusedError(
            f"run {error.run_id} is {error.status} and takes no signals; nothing was written: "
            f"`{command('show', error.run_id)}` tells what has become of it"
        ) from error


def _check_limit(limit: object, most: int) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit is a whole number, not {limit!r}")
    if not 0 < limit <= most:
        raise ValueError(f"limit must be from 1 to {most}, not {limit}")


def _check_prune(days: object, before: object) -> None:
    """Refuse what is no age or no moment."""
    if days is not None and (isinstance(days, bool) or not isinstance(days, int | float)):
        raise TypeError(f"days is a number, not {days!r}")
    if days is not None and not 0 <= days < MAX_DAYS:
        raise ValueError(f"days must be from 0 to {MAX_DAYS}, such as 30 or 0.5, not {days!r}")
    if before is not None and (isinstance(before, bool) or not isinstance(before, int)):
        raise TypeError(f"before is a moment in whole milliseconds since 1970, not {before!r}")
    if before is not None and not 0 <= before < MAX_MOMENT:
        raise ValueError(f"before is a moment in milliseconds since 1970, below {MAX_MOMENT}, not {before}")


def _refuse_to_create(store: Store) -> None:
    """Looking at a database creates nothing: on SQLite, opening a missing file would."""
    path = file_of(store.database) if store.dialect == SQLITE else None
    if path is not None and not Path(path).exists():
        raise RefusedError(f"there is no file {path}: check the address of the database, or create it with `init`")


def _tags_of(tx: Tx, run_ids: list[str]) -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = {}
    for start in range(0, len(run_ids), 100):
        part = run_ids[start : start + 100]
        markers = ", ".join("?" * len(part))
        for run_id, name, value in tx.all(
            f"SELECT run_id, name, value FROM {{tags}} WHERE run_id IN ({markers}) ORDER BY name", part
        ):
            found.setdefault(run_id, {})[name] = value
    return found


def _unknown_workflow(name: str, declared: Mapping[str, Any]) -> str:
    if not declared:
        return f"no workflow named {name!r}: the application declares none; does its module (--app) import those that do?"
    close = difflib.get_close_matches(name, declared, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it declares {', '.join(sorted(declared))}"
    return f"no workflow named {name!r} is declared by the application: {hint}"


__all__ = ["Cancelled", "Operator", "RefusedError", "Resumed", "RunLine", "Sent", "run_of"]
