"""The doctor: sends again what was lost, off until ``repair.enabled`` (DOCTOR-1).

* R1: a ``pending`` step or compensation that nobody has taken, and one whose next try nobody has taken: the message of either is lost,
  or waits behind too many others, and with a foreign broker the two look the same.
* R2: a run with wakes that no drive has seen, and a rollback that is over and that nobody has ended.
* R3: a ``running`` row past its reclaim deadline, or of a dead worker (RECLAIM-5); the claim decides, the doctor only sends the
  message that asks for it.

Every action repeats in its ``UPDATE`` the state that the listing observed; zero rows means that somebody was first, which is
counted and nothing more (DOCTOR-2). Each row has a budget of ``repair.max_attempts`` and a pause between two of them; what has
spent it waits for a kick. No step is sent under ``rolling_back``; compensations are while their rollback runs. Nothing here
changes a status, with one exception: a step whose budget is spent and whose actor nobody knows fails (NATIVE-3).

Long because finding, counting, listing and treating what is lost all rest on the same few rules, which stand here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from ..codec import describe_error
from ..engine import fence, liveness, undoing
from ..engine.claim import Job
from ..engine.rows import Outgoing
from ..engine.wakes import THIS_RUN
from ..errors import MessageNotSentError, StoreError, UnknownActorError
from ..journal import history
from ..store.models import LIVE
from .rows import COMPENSATION, LEVEL_RUNS, STEP, TABLES, UNDONE_AT, UNENDED, WANTED, Row, read, select, send_again

if TYPE_CHECKING:
    from ..engine.core import Engine, Sender
    from ..settings import Repair, Settings
    from ..store.database import Tx

#: So many messages in a row that the broker did not take end a rule's pass: the broker is down, and each try costs time.
BROKER_IS_DOWN = 3

# The first terms of each are the predicate of an index that holds live rows only.
_LATE_TRY = f"r.{LIVE} AND r.status = 'failed' AND r.given_up = FALSE AND r.next_try_at <= ?"
# What may have killed its worker waits for its turn, and says when its message comes again (RECLAIM-6).
# test_the_doctor_leaves_alone_what_waits_for_its_turn_among_suspects
_COMES_AGAIN = "COALESCE(r.next_try_at, 0) <= ?"
_UNSEEN = f"r.wakes > r.wakes_seen AND r.{LIVE} AND r.woken_at <= ? AND r.hold_until IS NULL"
_IN_BUDGET = "r.repair_attempts < ? AND (r.repair_after IS NULL OR r.repair_after <= ?)"
_SPENT = "r.repair_attempts >= ? AND r.repair_after <= ?"
# Where the queues are rows beside these: nothing that is ready in the row's queue is as old as its message would be, so that one is not
# waiting for its turn. After a repair that is as old as the pause that followed, at most. (Where a step has no priority of its own, its
# actor's is not known here; then messages count that have none.) One look at an index per row.
# test_a_row_whose_turn_has_not_come_in_a_long_queue_is_left_alone
_TURN_HAS_COME = (
    "(SELECT 1 FROM {messages} m WHERE m.queue = r.queue AND m.state = 0 AND m.priority = COALESCE(r.priority, 0) "
    "AND m.enqueued_at <= COALESCE(r.repair_after, r.sent_at, r.created_at) LIMIT 1) IS NULL"
)
_LEFT_ALONE = "COALESCE(r.repair_after, 0) <= ?"

_TAKE = (
    "UPDATE {flow_runs} SET repair_attempts = repair_attempts + 1, repair_after = ?, sent_at = COALESCE(sent_at, ?) "
    f"WHERE id = ? AND revision = ? AND wakes = ? AND {THIS_RUN} AND repair_attempts = ? AND "
)
_TAKE_RUN = f"{_TAKE}wakes > wakes_seen AND {LIVE}"
# No undo of a rollback opens again without a new revision (a resume), so this is all of what was seen.
_TAKE_ROLLBACK = f"{_TAKE}rollback = 'running'"
_RETURN_RUN = (
    "UPDATE {flow_runs} SET repair_attempts = repair_attempts - 1 "
    f"WHERE id = ? AND revision = ? AND {THIS_RUN} AND repair_attempts = ?"
)
_RUN = "SELECT workflow, queue FROM {flow_runs} WHERE id = ?"


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of loss: which rows show it, and since when it counts."""

    name: str
    kind: str
    where: str  # its markers stand for the horizon
    order: str
    reason: str
    grace: bool = True  # the horizon lies repair.grace_seconds back; otherwise it is now
    leases: bool = False  # a rule of RECLAIM-5: its horizons are now, and the lease's

    @property
    def condition(self) -> str:
        """Everything but the budget."""
        return f"{self.where} AND {WANTED[self.kind]}"

    def horizon(self, repair: Repair, now: int, silent: int) -> tuple[int, ...]:
        """The parameters of :attr:`where`. ``silent``: whoever was last heard from then, or before, counts as dead."""
        if self.leases:
            return now, silent
        moment = now - int(repair.grace_seconds * 1000) if self.grace else now
        return (moment,) * self.where.count("?")


_NEVER_STARTED = Rule(
    "R1", STEP, f"r.{LIVE} AND r.status = 'pending' AND r.held_back = FALSE AND r.created_at <= ? AND {_COMES_AGAIN}", "r.created_at",
    "R1: nobody has taken it",
)  # fmt: skip
_UNDO_NEVER_STARTED = Rule(
    "R1",
    COMPENSATION,
    f"r.{LIVE} AND r.status = 'pending' AND r.created_at <= ? AND COALESCE(r.sent_at, r.created_at) <= ? "
    f"AND COALESCE(r.not_before, 0) <= ? AND {_COMES_AGAIN} AND {LEVEL_RUNS}",
    "r.created_at",
    "R1: nobody has taken it",
)
_STEP_NEVER_RETRIED = Rule("R1", STEP, _LATE_TRY, "r.next_try_at", "R1: nobody has taken its next try")
_UNDO_NEVER_RETRIED = Rule("R1", COMPENSATION, _LATE_TRY, "r.next_try_at", "R1: nobody has taken its next try")
_STEP_STALE = Rule(
    "R3", STEP, f"r.{LIVE} AND r.status = 'running' AND r.reclaim_stale_at <= ?", "r.reclaim_stale_at",
    "R3: its reclaim deadline has passed", grace=False,
)  # fmt: skip
_UNDO_STALE = Rule(
    "R3", COMPENSATION, f"r.{LIVE} AND r.status = 'running' AND r.reclaim_stale_at <= ?", "r.reclaim_stale_at",
    "R3: its reclaim deadline has passed", grace=False,
)  # fmt: skip

_ORPHANED = (
    f"r.{LIVE} AND r.status = 'running' AND (r.reclaim_stale_at IS NULL OR r.reclaim_stale_at > ?) "
    f"AND {liveness.dead_sql('r.worker_id')}"
)
_STEP_ORPHANED = Rule("R3", STEP, _ORPHANED, "r.created_at", "R3: its worker has not been heard from", grace=False, leases=True)
_UNDO_ORPHANED = Rule(
    "R3", COMPENSATION, _ORPHANED, "r.created_at", "R3: its worker has not been heard from", grace=False, leases=True
)

#: R1 and R3; R2 is about runs.
ROW_RULES = (_NEVER_STARTED, _UNDO_NEVER_STARTED, _STEP_NEVER_RETRIED, _UNDO_NEVER_RETRIED, _STEP_STALE, _UNDO_STALE)
LEASE_RULES = (_STEP_ORPHANED, _UNDO_ORPHANED)


@dataclass(slots=True)
class RepairReport:
    """What one pass of the doctor did."""

    steps: int = 0
    compensations: int = 0
    reclaims: int = 0
    runs: int = 0
    unknown_actors: int = 0
    skipped: int = 0
    unsent: int = 0
    errors: int = 0
    spent: int = 0

    @property
    def repaired(self) -> int:
        """Messages that were sent again."""
        return self.steps + self.compensations + self.reclaims + self.runs


@dataclass(frozen=True, slots=True)
class RunRule:
    """One kind of run that R2 drives. The marker of ``where`` stands for the horizon: the grace."""

    where: str
    order: str
    since: str
    take: str
    reason: str


@dataclass(frozen=True, slots=True)
class StuckRun:
    """A run that has to be driven, as R2 has found it."""

    rule: RunRule
    run_id: str
    workflow: str
    queue: str
    priority: int | None
    revision: int
    wakes: int
    created_at: int
    repair_attempts: int


def run_rules() -> tuple[RunRule, ...]:
    """R2. A held run is the monitor's."""
    return (
        RunRule(_UNSEEN, "r.woken_at", "r.woken_at", _TAKE_RUN, "R2: no drive had seen what happened to it"),
        # its last undo was recorded alone, and whoever was to look again has died (undoing.settle)
        RunRule(UNENDED, "r.created_at", UNDONE_AT, _TAKE_ROLLBACK, "R2: its rollback was over, and nobody had ended it"),
    )


def row_rules(settings: Settings) -> tuple[Rule, ...]:
    """R1 and R3, as far as the settings have them."""
    return ROW_RULES + LEASE_RULES if liveness.is_on(settings) else ROW_RULES


def repair(engine: Engine, sender: Sender) -> RepairReport:
    """One pass of R1, R2 and R3, each as far as its switch and ``repair.batch_size`` go, the oldest first.

    A row that cannot be treated is counted, logged and passed by. Raises StoreError where the store refuses.
    """
    report = RepairReport()
    settings = engine.settings.repair
    for rule in row_rules(engine.settings):
        if switched_on(settings, rule.name):
            _each(engine, report, find(engine, rule, joined=sender.joins), partial(_treat, engine, sender, report, rule))
    if settings.wake_stuck_flows:
        _each(engine, report, find_stuck(engine), partial(_wake, engine, sender, report))
    if settings.redispatch_lost_actions:
        _each(engine, report, _unknown(engine), partial(_refuse, engine, sender, report))
    report.spent = sum(spent(engine).values())
    return report


def switched_on(settings: Repair, name: str) -> bool:
    """Whether a rule's own switch is on; ``repair.enabled`` is the caller's business."""
    return settings.redispatch_lost_actions if name == "R1" else settings.redispatch_stale_running_actions


def _each(engine: Engine, report: RepairReport, found: list[Any], treat: Callable[[Any], None]) -> None:
    """Treat what was found, one by one; a bad one is passed by, a broker that is down ends it."""
    refused = 0
    for one in found:
        try:
            treat(one)
            refused = 0
        except MessageNotSentError as error:
            report.unsent += 1
            refused += 1
            _log(engine).warning(
                "repair_not_sent", run_id=one.run_id, sequence=getattr(one, "sequence", None), error=str(error)
            )
            if refused == BROKER_IS_DOWN:
                return
        except StoreError:
            raise
        except Exception as error:
            report.errors += 1
            _log(engine).error("repair_failed", run_id=one.run_id, sequence=getattr(one, "sequence", None), exc_info=error)


# --- R1 and R3 -------------------------------------------------------------------------------------------------------


def find(engine: Engine, rule: Rule, *, joined: bool) -> list[Row]:
    """The rows that a rule would treat now, the oldest first, at most ``repair.batch_size``. ``joined``: messages are rows of the store."""
    repair, now = engine.settings.repair, engine.now()
    where = f"{rule.condition} AND {_IN_BUDGET}" + (f" AND {_TURN_HAS_COME}" if joined else "")
    sql = select(rule.kind, where, order=rule.order, limit=" LIMIT ?")
    params = (*rule.horizon(repair, now, liveness.horizon(engine, now)), repair.max_attempts, now, repair.batch_size)
    return engine.store.read(lambda tx: read(tx, rule.kind, sql=sql, params=params))


def _treat(engine: Engine, sender: Sender, report: RepairReport, rule: Rule, row: Row) -> None:
    again = " again" if row.status == "pending" and row.attempts else ""
    after = _pause(engine, row.repair_attempts)
    if not send_again(engine, sender, row=row, reason=f"{rule.reason}{again}", repair_after=after):
        report.skipped += 1
    elif rule.name == "R3":
        report.reclaims += 1
    elif row.kind == STEP:
        report.steps += 1
    else:
        report.compensations += 1


def _pause(engine: Engine, spent_so_far: int) -> int:
    """The moment before which nobody repairs this again."""
    backoff = engine.settings.repair.backoff
    return engine.now() + int(min(backoff.base_seconds * 2 ** min(spent_so_far, 30), backoff.max_seconds) * 1000)


# --- R2 --------------------------------------------------------------------------------------------------------------


def find_stuck(engine: Engine) -> list[StuckRun]:
    """The runs that R2 would drive now, the oldest first, at most ``repair.batch_size`` of each kind."""
    repair, now = engine.settings.repair, engine.now()
    sql = (
        "SELECT r.id, r.workflow, r.queue, r.priority, r.revision, r.wakes, r.created_at, r.repair_attempts FROM {flow_runs} r "
        f"WHERE %s AND {_IN_BUDGET} ORDER BY %s LIMIT ?"
    )
    params = (now - int(repair.grace_seconds * 1000), repair.max_attempts, now, repair.batch_size)

    def look(tx: Tx) -> list[StuckRun]:
        return [StuckRun(rule, *row) for rule in run_rules() for row in tx.all(sql % (rule.where, rule.order), params)]

    return engine.store.read(look)


def _wake(engine: Engine, sender: Sender, report: RepairReport, run: StuckRun) -> None:
    """Send a drive message for a run, where it is as it was seen."""
    outbox = sender.outbox(None)
    outbox.load([Outgoing("drive", run.run_id, run.workflow, run.queue, priority=run.priority)])
    now, after = engine.now(), _pause(engine, run.repair_attempts)
    lines = [history.Line(history.FLOW_REDRIVEN, name=run.workflow, detail=run.rule.reason)]

    def take(tx: Tx) -> bool:
        sent_at = now if outbox.joined else None
        if not tx.run(
            run.rule.take, (after, sent_at, run.run_id, run.revision, run.wakes, run.created_at, run.repair_attempts)
        ):
            return False
        if outbox.joined:
            engine.record(tx, run.run_id, now, lines)
        outbox.stage(tx)
        return True

    if not engine.store.write(take):
        report.skipped += 1
        return
    try:
        outbox.delivered()
    except MessageNotSentError:
        engine.store.write(lambda tx: tx.run(_RETURN_RUN, (run.run_id, run.revision, run.created_at, run.repair_attempts + 1)))
        raise
    if not outbox.joined:
        engine.store.write(lambda tx: engine.record(tx, run.run_id, now, lines))
    report.runs += 1


# --- what is beyond repair -------------------------------------------------------------------------------------------


def candidates(engine: Engine) -> dict[str, int]:
    """How much each rule would treat if it were on: ``{"R1": …, "R2": …, "R3": …}``; for a sweep without repair."""
    return dict(_count(engine, " AND (r.repair_after IS NULL OR r.repair_after <= ?)", engine.now()))


def spent(engine: Engine) -> dict[str, int]:
    """How much has spent its repairs and is still as lost as before, by rule: only a kick moves it now."""
    return dict(_count(engine, f" AND {_SPENT}", engine.settings.repair.max_attempts, engine.now()))


def list_spent(tx: Tx, settings: Settings, *, now: int, limit: int) -> Iterator[tuple[str, str, int, int | None, str, int]]:
    """What has spent its repairs, one by one: rule, run, since when, sequence (``None``: the run itself), actor, repairs.

    At most ``limit`` of each rule.
    """
    repair, silent = settings.repair, now - liveness.lease_ms(settings)
    rules = {rule: rule.horizon(repair, now, silent) for rule in row_rules(settings)}
    woken = now - int(repair.grace_seconds * 1000)
    for rule, *row in _list(tx, rules, woken, _SPENT, repair.max_attempts, now, limit):
        yield "R2" if rule is None else rule.name, *row


def list_left(tx: Tx, *, horizon: int, limit: int) -> Iterator[tuple[str | None, str, int, int | None, str]]:
    """What R1 and R2 are about since ``horizon`` or longer, with them on or off, and was not sent again since.

    Kind (``None``: the run itself), run, since when, sequence, actor; at most ``limit`` of each rule.
    """
    rules = {rule: (horizon,) * rule.where.count("?") for rule in ROW_RULES if rule.name == "R1"}
    for rule, *row, _ in _list(tx, rules, horizon, _LEFT_ALONE, horizon, limit):
        yield rule and rule.kind, *row


def _list(tx: Tx, rules: dict[Rule, tuple[int, ...]], woken: int, budget: str, *params: int) -> Iterator[Any]:
    for rule, horizon in rules.items():
        sql = (
            f"SELECT r.run_id, {rule.order}, r.sequence, r.actor, r.repair_attempts FROM {{{TABLES[rule.kind]}}} r "
            f"WHERE {rule.condition} AND {budget} ORDER BY {rule.order} LIMIT ?"
        )
        yield from ((rule, *row) for row in tx.all(sql, (*horizon, *params)))
    for run_rule in run_rules():
        sql = (
            f"SELECT r.id, {run_rule.since}, NULL, r.workflow, r.repair_attempts FROM {{flow_runs}} r "
            f"WHERE {run_rule.where} AND {budget} ORDER BY {run_rule.order} LIMIT ?"
        )
        yield from ((None, *row) for row in tx.all(sql, (woken, *params)))


def _count(engine: Engine, budget: str, *params: int) -> Iterator[tuple[str, int]]:
    repair, now = engine.settings.repair, engine.now()
    statements = [
        (
            rule.name,
            f"SELECT COUNT(*) FROM {{{TABLES[rule.kind]}}} r WHERE {rule.condition}{budget}",
            rule.horizon(repair, now, liveness.horizon(engine, now)),
        )
        for rule in row_rules(engine.settings)
    ]
    horizon = (now - int(repair.grace_seconds * 1000),)
    statements += [
        ("R2", f"SELECT COUNT(*) FROM {{flow_runs}} r WHERE {run_rule.where}{budget}", horizon) for run_rule in run_rules()
    ]
    counts = {"R1": 0, "R2": 0, "R3": 0}

    def count(tx: Tx) -> dict[str, int]:
        found = dict(counts)
        for name, sql, horizon in statements:
            row = tx.one(sql, (*horizon, *params))
            found[name] += row[0] if row else 0
        return found

    yield from engine.store.read(count).items()


def _unknown(engine: Engine) -> list[Row]:
    """Pending rows whose repairs are spent and whose actor nobody knows, as far as that is certain (NATIVE-3).

    Certain: this process declares the run's workflow and not the actor. Asked by actor first, so that rows of known actors,
    of which there may be any number, cannot stand in front of these.
    """
    repair, now = engine.settings.repair, engine.now()
    known = tuple(engine.workflows)
    found: list[Row] = []
    if not known:
        return found
    markers = ", ".join("?" * len(known))
    of_known = f"EXISTS (SELECT 1 FROM {{flow_runs}} w WHERE w.id = r.run_id AND w.workflow IN ({markers}))"
    for rule in (_NEVER_STARTED, _UNDO_NEVER_STARTED):
        params = (*rule.horizon(repair, now, liveness.horizon(engine, now)), repair.max_attempts, now, *known)
        where = f"{rule.condition} AND {_SPENT} AND {of_known}"
        actors = f"SELECT DISTINCT r.actor FROM {{{TABLES[rule.kind]}}} r WHERE {where}"
        rows = select(rule.kind, f"{where} AND r.actor = ?", order=rule.order, limit=" LIMIT ?")

        def look(tx: Tx, kind: str = rule.kind, first: tuple[str, Any] = (actors, params), second: str = rows) -> list[Row]:
            unknown = [actor for (actor,) in tx.all(*first) if engine.actor_facts(actor) is None]
            return [
                row for actor in unknown for row in read(tx, kind, sql=second, params=(*first[1], actor, repair.batch_size))
            ]  # fmt: skip

        found += engine.store.read(look)
    return found


def _refuse(engine: Engine, sender: Sender, report: RepairReport, row: Row) -> None:
    """Fail a row whose actor nobody knows."""
    run = engine.store.read(lambda tx: tx.one(_RUN, (row.run_id,)))
    if run is None:
        return
    error = UnknownActorError(
        f"no worker knows actor {row.actor!r}: its message was sent {row.repair_attempts + 1} times to queue {row.queue!r}; "
        "deploy the module that declares it, then start the run again"
    )
    job = Job(row.kind, row.run_id, row.sequence, row.cycle, row.attempts, "", row.created_at)
    text = describe_error(error)
    if row.kind == STEP:
        outcome = fence.Outcome("refused", job, row.actor, run[0], run[1], row.attempts, error=text, exception=error)
        landed = fence.settle(engine, outcome, sender, None)
    else:
        landed = undoing.settle(engine, undoing.Outcome("refused", job, row.actor, row.attempts, text, error), sender, None)
    if landed:
        report.unknown_actors += 1
    else:
        report.skipped += 1


def _log(engine: Engine) -> Any:
    return structlog.get_logger(engine.settings.logging.logger or "dramatiq_saga")
