"""The tables: columns, indexes and check constraints; nothing here writes.

Invariants that the database itself keeps: a terminal status has its time, an outcome has its claim, counters never fall
below zero, a sequence is used once per run and table. Rows of a run are keyed by ``(run_id, sequence)``, so a history is
one contiguous range. Indexes that the hot statements and the sweeps use hold live rows only (partial where the database
knows partial indexes), so their cost does not grow with finished history.

Models serve the schema, tools and cold paths. Every status is written by conditional SQL in the engine (STATUS-1); calling
``save()`` on an instance would write the whole row and defeat the fence, so the base class refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from peewee import (
    SQL,
    AutoField,
    BigIntegerField,
    BlobField,
    BooleanField,
    CharField,
    Check,
    CompositeKey,
    Database,
    IntegerField,
    Model,
    MySQLDatabase,
    SqliteDatabase,
    TextField,
)

#: Longest prefix that still leaves room for table and index names on every database.
MAX_PREFIX_BYTES = 24

#: Longest run id, queue name, actor name or tag key, in characters.
ID_LENGTH = 128
NAME_LENGTH = 191

_LIVE_FLOW = "status IN ('pending', 'running', 'waiting', 'rolling_back')"
_LIVE_ACTION = "status IN ('pending', 'running', 'failed', 'awaiting_retry')"
_OPEN_ACTION = "status IN ('pending', 'running', 'awaiting_retry')"
_OPEN_COMPENSATION = "status IN ('pending', 'running')"
_BETWEEN_TRIES = "status = 'failed' AND given_up = FALSE"


class PayloadField(BlobField):  # type: ignore[misc]
    """Encoded values: bytes of any length. LONGBLOB on MySQL and MariaDB, whose BLOB ends at 64 KB."""

    field_type = "SAGA_PAYLOAD"


class BinaryCharField(CharField):  # type: ignore[misc]
    """Text compared byte by byte on every database: two ids that differ only in case are two ids."""


@dataclass(frozen=True, slots=True)
class Models:
    """The model classes of one store, bound to its database and prefix."""

    flow_runs: type[Model]
    action_runs: type[Model]
    compensation_runs: type[Model]
    blocks: type[Model]
    waits: type[Model]
    signals: type[Model]
    children: type[Model]
    side_effects: type[Model]
    tags: type[Model]
    flow_events: type[Model]
    workers: type[Model]
    messages: type[Model]
    rate_limits: type[Model]
    results: type[Model]

    def all(self) -> list[type[Model]]:
        """Every model, in an order in which tables can be created."""
        return [getattr(self, name) for name in TABLES]


TABLES = tuple(Models.__dataclass_fields__)


def build(database: Database, prefix: str) -> Models:
    """The models of one store. ``prefix`` goes before every table and index name."""
    if len(prefix.encode()) > MAX_PREFIX_BYTES or not (prefix.replace("_", "a").isalnum() or prefix == "") or prefix[:1].isdigit():
        raise ValueError(
            f"schema.table_prefix {prefix!r} must be letters, digits and underscores, not start with a digit, "
            f"and take at most {MAX_PREFIX_BYTES} bytes"
        )
    mysql = isinstance(database, MySQLDatabase)
    sqlite = isinstance(database, SqliteDatabase)
    payload = "LONGBLOB" if mysql else "BYTEA" if not sqlite else "BLOB"
    database.field_types = {**database.field_types, "SAGA_PAYLOAD": payload} if hasattr(database, "field_types") else {}
    if hasattr(database, "_field_types"):
        database._field_types = {**database._field_types, "SAGA_PAYLOAD": payload}

    def ident(length: int = NAME_LENGTH, **options: Any) -> BinaryCharField:
        return BinaryCharField(max_length=length, collation="utf8mb4_bin" if mysql else None, **options)

    def one_of(column: str, *words: str) -> Check:
        return Check(f"{column} IN ({', '.join(repr(word) for word in words)})")

    class Row(Model):  # type: ignore[misc]
        class Meta:
            pass

        def save(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError("rows are written by conditional statements only (STATUS-1); use update() or insert()")

    Row._meta.database = database

    def meta(name: str, key: CompositeKey | None = None, checks: list[Any] | None = None, **extra: Any) -> type:
        options: dict[str, Any] = {
            "database": database, "table_name": prefix + name, "constraints": checks or [], "legacy_table_names": False,
        }
        if key is not None:
            options["primary_key"] = key
            if sqlite:
                options["without_rowid"] = True
        options.update(extra)
        return type("Meta", (), options)

    by_sequence = CompositeKey("run_id", "sequence")

    class FlowRun(Row):
        id = ident(ID_LENGTH, primary_key=True)
        workflow = ident()
        version = ident(64, null=True)
        queue = ident()
        priority = IntegerField(null=True)
        options = TextField(null=True)  # JSON: Dramatiq options for the run's own messages
        args = PayloadField()
        args_digest = ident(64)
        context = PayloadField(null=True)
        status = ident(16)
        rollback = ident(8, default="none")
        ends_as = ident(16, null=True)  # the terminal status that the rollback in progress leads to
        revision = IntegerField(default=0)
        wakes = IntegerField(default=0)
        wakes_seen = IntegerField(default=0)
        woken_at = BigIntegerField(null=True)
        result = PayloadField(null=True)
        error = TextField(null=True)  # JSON: what ended the run (codec.describe_error)
        rollback_error = TextField(null=True)  # JSON: what halted or marred the rollback, beside the error
        reason = TextField(null=True)  # an operator's words
        hold_error = TextField(null=True)  # JSON: why drives are held off (HISTORY-1, COMP-3, EXPIRE-2)
        hold_count = IntegerField(default=0)
        hold_until = BigIntegerField(null=True)
        expires_at = BigIntegerField(null=True)
        expiry_attempts = IntegerField(default=0)
        parent_id = ident(ID_LENGTH, null=True)
        parent_sequence = IntegerField(null=True)
        close_request = ident(8, null=True)  # CHILD-3: cancel | fail, asked for by the parent
        sent_at = BigIntegerField(null=True)
        repair_attempts = IntegerField(default=0)
        repair_after = BigIntegerField(null=True)
        created_at = BigIntegerField()
        started_at = BigIntegerField(null=True)
        ended_at = BigIntegerField(null=True)
        Meta = meta(
            "flow_runs",
            checks=[
                one_of("status", "pending", "running", "waiting", "rolling_back", "completed", "failed", "cancelled", "expired"),
                one_of("rollback", "none", "running", "halted", "done"),
                Check(f"({_LIVE_FLOW}) = (ended_at IS NULL)"),
                Check("status <> 'rolling_back' OR ends_as IS NOT NULL"),
                Check("wakes_seen <= wakes"),
            ],
        )

    class ActionRun(Row):
        run_id = ident(ID_LENGTH)
        sequence = IntegerField()
        block = IntegerField(null=True)  # sequence of the block that this step belongs to
        position = IntegerField(null=True)  # its place in that block
        actor = ident()
        queue = ident()
        priority = IntegerField(null=True)
        options = TextField(null=True)  # JSON: with_options
        args = PayloadField()  # encoded [args, kwargs]
        status = ident(16)
        given_up = BooleanField(default=False)
        attempts = IntegerField(default=0)  # claims ever made: the fencing token
        tries = IntegerField(default=0)  # native tries spent in this cycle
        claims = IntegerField(default=0)  # claims since the last outcome (RECLAIM-6)
        max_claims = IntegerField(null=True)
        cycle = IntegerField(default=0)
        retry_policy = TextField(null=True)  # JSON: retry on signal
        optional = BooleanField(default=False)
        fallback = PayloadField(null=True)
        result = PayloadField(null=True)
        error = TextField(null=True)  # JSON (codec.describe_error)
        worker_id = ident(64, null=True)
        delivery = ident(64, null=True)  # the message that made the claim: tells an orphan from a rival (CLAIM-2)
        next_try_at = BigIntegerField(null=True)
        time_limit_at = BigIntegerField(null=True)
        reclaim_stale_after_seconds = IntegerField(null=True)
        reclaim_stale_at = BigIntegerField(null=True)
        comp_actor = ident(null=True)
        comp_args = PayloadField(null=True)
        comp_options = TextField(null=True)
        comp_from_result = BooleanField(default=False)  # built from the result: comp_args follow once a drive saw it
        comp_on_self_failure = BooleanField(default=False)
        comp_policy = ident(8, null=True)
        comp_group = IntegerField(null=True)  # sequence of the saga group
        comp_parallel = BooleanField(default=False)
        comp_reclaim_stale_after_seconds = IntegerField(null=True)
        expires_at = BigIntegerField(null=True)
        sent_at = BigIntegerField(null=True)
        repair_attempts = IntegerField(default=0)
        repair_after = BigIntegerField(null=True)
        created_at = BigIntegerField()
        started_at = BigIntegerField(null=True)
        ended_at = BigIntegerField(null=True)
        Meta = meta(
            "action_runs",
            key=by_sequence,
            checks=[
                one_of(
                    "status", "pending", "running", "completed", "failed", "awaiting_retry", "optional_failed", "expired", "cancelled"
                ),
                Check("status <> 'running' OR (started_at IS NOT NULL AND attempts > 0)"),
                Check("status NOT IN ('completed', 'optional_failed', 'expired', 'cancelled') OR ended_at IS NOT NULL"),
                Check("attempts >= 0 AND tries >= 0 AND claims >= 0 AND cycle >= 0"),
            ],
        )

    class CompensationRun(Row):
        run_id = ident(ID_LENGTH)
        sequence = IntegerField()  # of the step that it undoes
        level = IntegerField()  # levels run one after another, from 0
        actor = ident()
        queue = ident()
        priority = IntegerField(null=True)
        options = TextField(null=True)
        args = PayloadField()
        undoes = ident(16)
        undoes_key = ident(NAME_LENGTH)
        policy = ident(8)
        status = ident(16)
        given_up = BooleanField(default=False)
        attempts = IntegerField(default=0)
        tries = IntegerField(default=0)
        claims = IntegerField(default=0)
        error = TextField(null=True)
        worker_id = ident(64, null=True)
        delivery = ident(64, null=True)
        not_before = BigIntegerField(null=True)  # COMP-9: no refund before the charge has reported
        next_try_at = BigIntegerField(null=True)
        reclaim_stale_after_seconds = IntegerField(null=True)
        reclaim_stale_at = BigIntegerField(null=True)
        sent_at = BigIntegerField(null=True)
        repair_attempts = IntegerField(default=0)
        repair_after = BigIntegerField(null=True)
        created_at = BigIntegerField()
        started_at = BigIntegerField(null=True)
        ended_at = BigIntegerField(null=True)
        Meta = meta(
            "compensation_runs",
            key=by_sequence,
            checks=[
                one_of("status", "pending", "running", "completed", "failed"),
                one_of("undoes", "completed", "failed", "unknown"),
                one_of("policy", "stop", "continue"),
                Check("status <> 'running' OR (started_at IS NOT NULL AND attempts > 0)"),
                Check("status <> 'completed' OR ended_at IS NOT NULL"),
                Check("attempts >= 0 AND tries >= 0 AND claims >= 0"),
            ],
        )

    class Block(Row):
        run_id = ident(ID_LENGTH)
        sequence = IntegerField()
        kind = ident(16)  # parallel | saga | level
        size = IntegerField()
        policy = ident(24, null=True)
        max_in_flight = IntegerField(null=True)
        group_id = ident(64, null=True)
        closed_early_at = BigIntegerField(null=True)
        created_at = BigIntegerField()
        ended_at = BigIntegerField(null=True)
        Meta = meta("blocks", key=by_sequence, checks=[Check("size >= 0")])

    class Wait(Row):
        run_id = ident(ID_LENGTH)
        sequence = IntegerField()
        kind = ident(8)  # signal | timer | retry
        name = ident(null=True)
        status = ident(16)
        due_at = BigIntegerField(null=True)
        signal_id = BigIntegerField(null=True)
        payload = PayloadField(null=True)
        created_at = BigIntegerField()
        ended_at = BigIntegerField(null=True)
        Meta = meta(
            "waits",
            key=by_sequence,
            checks=[
                one_of("status", "waiting", "consumed", "timed_out", "cancelled"),
                Check("(status = 'waiting') = (ended_at IS NULL)"),
            ],
        )

    class Signal(Row):
        id = AutoField()
        run_id = ident(ID_LENGTH)
        name = ident()
        dedup_key = ident(null=True)
        payload = PayloadField()
        status = ident(16)
        received_at = BigIntegerField()
        ended_at = BigIntegerField(null=True)
        Meta = meta("signals", checks=[one_of("status", "received", "consumed", "cancelled")])

    class Child(Row):
        run_id = ident(ID_LENGTH)
        sequence = IntegerField()
        child_id = ident(ID_LENGTH)
        workflow = ident()
        block = IntegerField(null=True)
        position = IntegerField(null=True)
        status = ident(16)
        close_policy = ident(8)
        cycle = IntegerField(default=0)
        retry_policy = TextField(null=True)
        optional = BooleanField(default=False)
        args = PayloadField()
        result = PayloadField(null=True)
        error = TextField(null=True)
        comp_actor = ident(null=True)
        comp_args = PayloadField(null=True)
        comp_options = TextField(null=True)
        comp_policy = ident(8, null=True)
        created_at = BigIntegerField()
        ended_at = BigIntegerField(null=True)
        Meta = meta(
            "children",
            key=by_sequence,
            checks=[
                one_of("status", "pending", "running", "awaiting_retry", "completed", "failed", "expired", "cancelled"),
                one_of("close_policy", "abandon", "cancel", "fail"),
            ],
        )

    class SideEffect(Row):
        run_id = ident(ID_LENGTH)
        sequence = IntegerField()
        name = ident()
        value = PayloadField()
        created_at = BigIntegerField()
        Meta = meta("side_effects", key=by_sequence)

    class Tag(Row):
        run_id = ident(ID_LENGTH)
        name = ident()
        value = ident(null=True)
        Meta = meta("tags", key=CompositeKey("run_id", "name"))

    class FlowEvent(Row):
        id = AutoField() if not mysql else _BigAuto()
        run_id = ident(ID_LENGTH)
        at = BigIntegerField()
        type = ident(40)
        sequence = IntegerField(null=True)
        name = ident(null=True)
        attempt = IntegerField(null=True)
        detail = TextField(null=True)
        Meta = meta("flow_events")

    class WorkerRow(Row):
        id = ident(64, primary_key=True)
        host = ident()
        pid = IntegerField()
        started_at = BigIntegerField()
        seen_at = BigIntegerField()
        Meta = meta("workers")

    class QueueMessage(Row):
        id = AutoField() if not sqlite else AutoField(constraints=[SQL("AUTOINCREMENT")])
        queue = ident()
        state = IntegerField(default=0)  # 0 ready, 1 delayed, 2 reserved, 3 dead
        priority = IntegerField(default=0)
        available_at = BigIntegerField()
        reserved_at = BigIntegerField(null=True)
        lease_until = BigIntegerField(null=True)
        attempts = IntegerField(default=0)
        actor = ident()
        message_id = ident(64)
        message = PayloadField()
        enqueued_at = BigIntegerField()  # the age that orders reservations (QUEUE-1)
        died_at = BigIntegerField(null=True)
        reason = TextField(null=True)
        Meta = meta(
            "messages",
            checks=[
                Check("state IN (0, 1, 2, 3)"),
                Check("(state = 2) = (reserved_at IS NOT NULL AND lease_until IS NOT NULL)"),
                Check("(state = 3) = (died_at IS NOT NULL)"),
                Check("attempts >= 0"),
            ],
        )

    class RateLimit(Row):
        id = ident(NAME_LENGTH, primary_key=True)
        value = BigIntegerField()
        expires_at = BigIntegerField()
        Meta = meta("rate_limits")

    class Result(Row):
        id = ident(NAME_LENGTH, primary_key=True)
        value = PayloadField()
        expires_at = BigIntegerField()
        Meta = meta("results")

    def index(model: type[Model], name: str, *columns: str, where: str | None = None, unique: bool = False) -> None:
        # differs because: MySQL and MariaDB have no partial indexes; there the column that the predicate asks for leads the
        # key instead, so that a look-up (or a row lock) still touches live rows only
        names = list(columns)
        for leading in ("status", "state"):
            if mysql and where is not None and leading + " " in where and leading not in names:
                names.insert(0, leading)
        unique_sql = "UNIQUE " if unique else ""
        predicate = f" WHERE {where}" if where and not mysql else ""
        exists = "" if mysql else "IF NOT EXISTS "
        table, columns_sql = prefix + model._meta.table_name[len(prefix):], ", ".join(names)
        model.add_index(SQL(f"CREATE {unique_sql}INDEX {exists}{prefix}{name} ON {table} ({columns_sql}){predicate}"))

    index(FlowRun, "flow_by_status", "status", "created_at")
    index(FlowRun, "flow_unseen", "woken_at", where=f"wakes > wakes_seen AND {_LIVE_FLOW}")
    index(FlowRun, "flow_held", "hold_until", where=f"hold_until IS NOT NULL AND {_LIVE_FLOW}")
    index(FlowRun, "flow_expiry", "expires_at", where=f"expires_at IS NOT NULL AND {_LIVE_FLOW}")
    index(FlowRun, "flow_children", "parent_id", where="parent_id IS NOT NULL")
    index(FlowRun, "flow_ended", "ended_at", where="ended_at IS NOT NULL")
    index(ActionRun, "action_open", "status", "created_at", where=_OPEN_ACTION)
    index(ActionRun, "action_retry", "next_try_at", where=_BETWEEN_TRIES)
    index(ActionRun, "action_expiry", "expires_at", where=f"expires_at IS NOT NULL AND {_LIVE_ACTION}")
    index(CompensationRun, "comp_open", "status", "created_at", where=_OPEN_COMPENSATION)
    index(CompensationRun, "comp_retry", "next_try_at", where=_BETWEEN_TRIES)
    index(Wait, "wait_due", "due_at", where="status = 'waiting'")
    index(Wait, "wait_name", "name", where="status = 'waiting'")
    index(Signal, "signal_inbox", "run_id", "name", "id", where="status = 'received'")
    index(Signal, "signal_key", "run_id", "dedup_key", unique=True)
    index(Child, "child_run", "child_id")
    index(Tag, "tag_value", "name", "value")
    index(FlowEvent, "event_run", "run_id", "id")
    index(QueueMessage, "queue_ready", "queue", "priority", "enqueued_at", "id", where="state = 0")
    index(QueueMessage, "queue_delayed", "queue", "available_at", where="state = 1")
    index(QueueMessage, "queue_leased", "queue", "lease_until", where="state = 2")
    index(QueueMessage, "queue_dead", "died_at", where="state = 3")
    index(RateLimit, "rate_expiry", "expires_at")
    index(Result, "result_expiry", "expires_at")

    return Models(
        FlowRun, ActionRun, CompensationRun, Block, Wait, Signal, Child, SideEffect, Tag, FlowEvent, WorkerRow, QueueMessage,
        RateLimit, Result,
    )


def _BigAuto() -> Any:
    from peewee import BigAutoField

    return BigAutoField()
