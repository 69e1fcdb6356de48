"""The tables: columns, indexes and check constraints; nothing here writes.

Invariants that the database itself keeps: a terminal status has its time, an outcome has its claim, counters never fall
below zero, a sequence is used once per run and table. Rows of a run are keyed by ``(run_id, sequence)``, so a history is
one contiguous range. Indexes that hot statements and sweeps use hold live rows only (where the database knows partial
indexes), so their cost does not grow with finished history, and no index holds a column that changes at every step.

Models serve the schema, tools and cold paths. Every status is written by conditional SQL in the engine (STATUS-1); calling
``save()`` on an instance would write the whole row and defeat the fence, so the base class refuses it.

Long because it is the one page that lists every column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from peewee import (
    SQL,
    BigAutoField,
    BigIntegerField,
    BlobField,
    BooleanField,
    CharField,
    Check,
    CompositeKey,
    Database,
    Field,
    IntegerField,
    Model,
    TextField,
)

from ..statuses import (
    FLOW_LIVE,
    FLOW_TERMINAL,
    ActionStatus,
    ChildClosePolicy,
    ChildStatus,
    CompensationFailurePolicy,
    CompensationStatus,
    FlowStatus,
    RollbackStatus,
)
from .sql import MYSQL, POSTGRESQL, SQLITE, dialect_of

#: Longest prefix that still leaves room for table and index names on every database.
MAX_PREFIX_BYTES = 24

#: Longest run id, queue name, actor name or tag key, in characters.
ID_LENGTH = 128
NAME_LENGTH = 191

#: What the partial indexes say of their rows. SQLite uses such an index only for a statement that repeats the text.
#: A row is live until it has its end: one column, which nothing but the end itself writes, so no other write touches the
#: index. (A list of statuses would make SQLite build a temporary table per statement and rewrite the entry at every step.)
LIVE = "ended_at IS NULL"
UNHAPPY_FLOW = "(status = 'failed' OR status = 'cancelled' OR status = 'expired')"


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
    passes: type[Model]
    messages: type[Model]
    rate_limits: type[Model]
    results: type[Model]

    def all(self) -> list[type[Model]]:
        """Every model, in an order in which tables can be created."""
        return [getattr(self, name) for name in TABLES]


TABLES = tuple(Models.__dataclass_fields__)


class Row(Model):
    """Base of all models."""

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it writes every column, whatever has happened to the row since it was read."""
        raise TypeError("rows are written by conditional statements only; use update() or insert()")


class _LongText(TextField):
    """differs because: TEXT ends at 64 KB on MySQL and MariaDB."""

    field_type = "LONGTEXT"


class _LongBlob(BlobField):
    """differs because: BLOB ends at 64 KB on MySQL and MariaDB."""

    field_type = "LONGBLOB"


@dataclass(frozen=True, slots=True)
class Index:
    """An index: its columns, which rows it holds, and what leads it where there are no partial indexes."""

    name: str
    columns: tuple[str, ...]
    where: str | None = None
    unique: bool = False
    leading: str | None = None


def index(name: str, *columns: str, where: str | None = None, unique: bool = False, leading: str | None = None) -> Index:
    """An :class:`Index`; ``where`` makes it partial."""
    return Index(name, columns, where, unique, leading)


def one_of(column: str, *words: str) -> str:
    """A check constraint's text."""
    # comparisons, because SQLite builds a temporary table for a list of more than two
    return f"({' OR '.join(f'{column} = {str(word)!r}' for word in words)})"


def narrowed(statuses: Iterable[str]) -> str | None:
    """The text that lets a search for runs of these statuses use a partial index; None where there is none for them."""
    wanted = frozenset(statuses)
    for text, covered in ((LIVE, set(FlowStatus) - FLOW_TERMINAL), (UNHAPPY_FLOW, FLOW_TERMINAL - {FlowStatus.COMPLETED})):
        if wanted and wanted <= covered:
            return text
    return None


def check_prefix(prefix: str) -> None:
    """Refuse a table prefix that some database could not take."""
    if len(prefix.encode()) > MAX_PREFIX_BYTES or not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", prefix):
        raise ValueError(
            f"schema.table_prefix {prefix!r} must be letters, digits and underscores, not start with a digit, "
            f"and take at most {MAX_PREFIX_BYTES} bytes"
        )


def build(database: Database, prefix: str) -> Models:
    """The models of one store. ``prefix`` goes before every table and index name."""
    check_prefix(prefix)
    dialect = dialect_of(database)
    # Text compared byte by byte on every database: two ids that differ only in case are two ids, in one order everywhere.
    # (MySQL and MariaDB still take two for one that differ only in spaces at the end.)
    collation = {SQLITE: None, POSTGRESQL: '"C"', MYSQL: "utf8mb4_bin"}[dialect]

    def ident(length: int = NAME_LENGTH, **options: Any) -> Field:
        return CharField(max_length=length, collation=collation, **options)

    def integer(**options: Any) -> Field:
        return IntegerField(**options)

    def ms(**options: Any) -> Field:  # a time: milliseconds since the epoch, UTC
        return BigIntegerField(**options)

    def flag() -> Field:
        return BooleanField(default=False)

    def text(**options: Any) -> Field:
        return _LongText(**options) if dialect == MYSQL else TextField(**options)

    def payload(**options: Any) -> Field:  # an encoded value: bytes of any length
        return _LongBlob(**options) if dialect == MYSQL else BlobField(**options)

    def table(
        name: str, /, *, checks: Sequence[str] = (), indexes: Sequence[Index] = (), key: Sequence[str] = (), **columns: Field
    ) -> type[Model]:
        constraints: list[Any] = [Check(text) for text in checks]
        if dialect == MYSQL:
            # differs because: MySQL and MariaDB commit each statement of a schema by itself. Created together with its
            # table, an index cannot be missing after an interrupted migration.
            constraints += [SQL(f"{'UNIQUE ' * one.unique}INDEX {prefix}{one.name} ({_mysql_columns(one)})") for one in indexes]
        meta: dict[str, Any] = {
            "database": database,
            "table_name": prefix + name,
            "constraints": constraints,
            "legacy_table_names": False,
        }
        if key:
            meta["primary_key"] = CompositeKey(*key)
            # One tree instead of a table and the index of its key; but only where rows are small: beyond a quarter of a
            # page such a tree keeps the rest of a row on pages of its own.
            meta["without_rowid"] = dialect == SQLITE and not any(isinstance(column, BlobField) for column in columns.values())
        model = cast("type[Model]", type(name, (Row,), {"__doc__": None, **columns, "Meta": type("Meta", (), meta)}))
        for one in indexes if dialect != MYSQL else ():
            model.add_index(
                SQL(
                    f"CREATE {'UNIQUE ' * one.unique}INDEX IF NOT EXISTS {prefix}{one.name} ON {prefix}{name} "
                    f"({', '.join(one.columns)})" + (f" WHERE {one.where}" if one.where else "")
                )
            )
        return model

    by_sequence = ("run_id", "sequence")

    flow_runs = table(
        "flow_runs",
        id=ident(ID_LENGTH, primary_key=True),
        workflow=ident(),
        version=ident(64, null=True),
        queue=ident(),
        priority=integer(null=True),
        status=ident(16),
        rollback=ident(8, default="none"),
        ends_as=ident(16, null=True),  # the terminal status that the rollback in progress leads to
        revision=integer(default=0),
        wakes=integer(default=0),
        wakes_seen=integer(default=0),
        woken_at=ms(null=True),
        hold_count=integer(default=0),
        hold_until=ms(null=True),
        expires_at=ms(null=True),
        expiry_attempts=integer(default=0),
        expiry_after=ms(null=True),  # EXPIRE-2: not tried again before
        timer_at=ms(null=True),  # TIMER-1: when the delayed message is due that looks at what is due
        timer_last=ms(null=True),  # when a later one is due that is on its way as well: an earlier one came before it
        parent_id=ident(ID_LENGTH, null=True),
        parent_sequence=integer(null=True),
        close_request=ident(8, null=True),  # CHILD-3: cancel | fail, asked for by the parent
        sent_at=ms(null=True),
        repair_attempts=integer(default=0),
        repair_after=ms(null=True),
        created_at=ms(),
        started_at=ms(null=True),
        ended_at=ms(null=True),
        args_digest=ident(64),
        options=text(null=True),  # JSON: Dramatiq options for the run's own messages
        reason=text(null=True),  # an operator's words
        error=text(null=True),  # JSON: what ended the run (codec.describe_error)
        rollback_error=text(null=True),  # JSON: what halted or marred the rollback, beside the error
        hold_error=text(null=True),  # JSON: why drives are held off (HISTORY-1, COMP-3, EXPIRE-2)
        args=payload(),
        context=payload(null=True),
        result=payload(null=True),
        checks=[
            (
                f"(ended_at IS NULL AND {one_of('status', *sorted(FLOW_LIVE), FlowStatus.ROLLING_BACK)}) OR "
                f"(ended_at IS NOT NULL AND {one_of('status', *sorted(FLOW_TERMINAL))})"
            ),
            one_of("rollback", *RollbackStatus),
            "status <> 'rolling_back' OR ends_as IS NOT NULL",
            "wakes_seen <= wakes",
        ],
        indexes=[
            index("flow_created", "created_at", "id"),
            # No index leads with the status of all rows: SQLite would prefer it to the partial ones.
            index("flow_live", "created_at", "id", where=LIVE, leading="ended_at"),
            index("flow_unhappy", "created_at", "id", where=UNHAPPY_FLOW, leading="status"),
            index("flow_unseen", "woken_at", where=f"wakes > wakes_seen AND {LIVE}", leading="ended_at"),
            index("flow_held", "hold_until", where=f"hold_until IS NOT NULL AND {LIVE}", leading="ended_at"),
            index("flow_expiry", "expires_at", where=f"expires_at IS NOT NULL AND {LIVE}", leading="ended_at"),
            index("flow_halted", "created_at", "id", where="rollback = 'halted'", leading="rollback"),
            index("flow_undoing", "created_at", where="rollback = 'running'", leading="rollback"),
            index("flow_children", "parent_id", where="parent_id IS NOT NULL"),
            index("flow_ended", "ended_at", where="ended_at IS NOT NULL"),
        ],
    )

    action_runs = table(
        "action_runs",
        key=by_sequence,
        run_id=ident(ID_LENGTH),
        sequence=integer(),
        block=integer(null=True),  # sequence of the block that this step belongs to
        position=integer(null=True),  # its place in that block
        held_back=flag(),  # its block has as many members in flight as it may have (PAR-1)
        actor=ident(),
        queue=ident(),
        priority=integer(null=True),
        status=ident(16),
        given_up=flag(),
        attempts=integer(default=0),  # claims ever made: the fencing token
        tries=integer(default=0),  # native tries spent in this cycle
        claims=integer(default=0),  # claims since the last outcome (RECLAIM-6)
        max_claims=integer(null=True),
        cycle=integer(default=0),
        optional=flag(),
        worker_id=ident(64, null=True),
        delivery=ident(64, null=True),  # the message that made the claim, if any: tells an orphan from a rival (CLAIM-2)
        next_try_at=ms(null=True),
        time_limit_at=ms(null=True),
        reclaim_stale_after_seconds=integer(null=True),
        reclaim_stale_at=ms(null=True),
        comp_actor=ident(null=True),
        comp_from_result=flag(),  # built from the result: comp_args follow once a drive saw it
        comp_on_self_failure=flag(),
        comp_policy=ident(8, null=True),
        comp_group=integer(null=True),  # sequence of the saga group
        comp_parallel=flag(),
        comp_reclaim_stale_after_seconds=integer(null=True),
        expires_at=ms(null=True),
        sent_at=ms(null=True),
        repair_attempts=integer(default=0),
        repair_after=ms(null=True),
        created_at=ms(),
        started_at=ms(null=True),
        ended_at=ms(null=True),
        options=text(null=True),  # JSON: with_options
        retry_policy=text(null=True),  # JSON: retry on signal
        comp_options=text(null=True),
        error=text(null=True),  # JSON (codec.describe_error)
        args=payload(),  # encoded [args, kwargs]
        comp_args=payload(null=True),
        fallback=payload(null=True),
        result=payload(null=True),
        checks=[
            one_of("status", *ActionStatus),
            "status NOT IN ('running', 'completed') OR (started_at IS NOT NULL AND attempts > 0)",
            # live, and so in the indexes of live rows, is what has no end yet
            (
                "ended_at IS NOT NULL OR status = 'pending' OR status = 'running' OR status = 'awaiting_retry' "
                "OR (status = 'failed' AND given_up = FALSE)"
            ),
            "status <> 'optional_failed' OR (optional = TRUE AND given_up = TRUE)",
            "attempts >= 0 AND tries >= 0 AND claims >= 0 AND cycle >= 0",
        ],
        indexes=[
            index("action_live", "created_at", where=LIVE, leading="ended_at"),
            index("action_expiry", "expires_at", where=f"expires_at IS NOT NULL AND {LIVE}", leading="ended_at"),
            index(
                "action_block",
                "run_id",
                "block",
                "held_back",
                "sequence",
                where=f"block IS NOT NULL AND {LIVE}",
                leading="ended_at",
            ),
        ],
    )

    compensation_runs = table(
        "compensation_runs",
        key=by_sequence,
        run_id=ident(ID_LENGTH),
        sequence=integer(),  # of the step that it undoes
        level=integer(),  # levels run one after another, from 0
        actor=ident(),
        queue=ident(),
        priority=integer(null=True),
        undoes=ident(16),
        undoes_key=ident(),
        policy=ident(8),
        status=ident(16),
        given_up=flag(),
        attempts=integer(default=0),
        tries=integer(default=0),
        claims=integer(default=0),
        worker_id=ident(64, null=True),
        delivery=ident(64, null=True),
        not_before=ms(null=True),  # COMP-9: no refund before the charge has reported
        next_try_at=ms(null=True),
        reclaim_stale_after_seconds=integer(null=True),
        reclaim_stale_at=ms(null=True),
        sent_at=ms(null=True),
        repair_attempts=integer(default=0),
        repair_after=ms(null=True),
        created_at=ms(),
        started_at=ms(null=True),
        ended_at=ms(null=True),
        options=text(null=True),
        error=text(null=True),
        args=payload(),
        checks=[
            one_of("status", *CompensationStatus),
            one_of("undoes", "completed", "failed", "unknown"),
            one_of("policy", *CompensationFailurePolicy),
            "status NOT IN ('running', 'completed') OR (started_at IS NOT NULL AND attempts > 0)",
            ("ended_at IS NOT NULL OR status = 'pending' OR status = 'running' OR (status = 'failed' AND given_up = FALSE)"),
            "attempts >= 0 AND tries >= 0 AND claims >= 0",
        ],
        indexes=[
            index("comp_live", "created_at", where=LIVE, leading="ended_at"),
            index("comp_open", "run_id", "level", "sent_at", where=LIVE, leading="ended_at"),
            index("comp_stopped", "run_id", "level", where="given_up = TRUE AND policy = 'stop'", leading="given_up"),
        ],
    )

    blocks = table(
        "blocks",
        key=by_sequence,
        run_id=ident(ID_LENGTH),
        sequence=integer(),
        kind=ident(16),  # parallel | saga
        block=integer(null=True),  # sequence of the block that it is a member of
        position=integer(null=True),
        size=integer(),
        policy=ident(24, null=True),
        max_in_flight=integer(null=True),
        closed_early_at=ms(null=True),  # its barrier was reached while a member was live (PAR-2)
        failed_by=integer(null=True),  # sequence of the member whose failure lets the others have no further try (PAR-4)
        created_at=ms(),
        ended_at=ms(null=True),
        checks=["size >= 0"],
    )

    waits = table(
        "waits",
        key=by_sequence,
        run_id=ident(ID_LENGTH),
        sequence=integer(),
        kind=ident(8),  # signal | timer | retry: of the parked step or child at this sequence
        name=ident(null=True),
        cycle=integer(default=0),  # how often it was opened before: a retry wait is opened again (RSIG-1)
        status=ident(16),
        due_at=ms(null=True),
        signal_id=BigIntegerField(null=True),
        created_at=ms(),
        ended_at=ms(null=True),
        payload=payload(null=True),
        checks=[one_of("status", "waiting", "consumed", "timed_out", "cancelled"), "(status = 'waiting') = (ended_at IS NULL)"],
        indexes=[
            index("wait_due", "due_at", where="status = 'waiting'", leading="status"),
            index("wait_name", "name", "run_id", where="status = 'waiting'", leading="status"),
        ],
    )

    signals = table(
        "signals",
        id=BigAutoField(),
        run_id=ident(ID_LENGTH),
        name=ident(),
        dedup_key=ident(null=True),
        status=ident(16),
        received_at=ms(),
        ended_at=ms(null=True),
        payload=payload(),
        checks=[one_of("status", "received", "consumed", "cancelled")],
        indexes=[
            index("signal_run", "run_id", "name", "id"),
            index("signal_key", "run_id", "dedup_key", where="dedup_key IS NOT NULL", unique=True),
            index("signal_open", "run_id", "id", where="status = 'received'", leading="status"),
        ],
    )

    children = table(
        "children",
        key=by_sequence,
        run_id=ident(ID_LENGTH),
        sequence=integer(),
        child_id=ident(ID_LENGTH),
        workflow=ident(),
        block=integer(null=True),
        position=integer(null=True),
        status=ident(16),
        close_policy=ident(8),
        cycle=integer(default=0),  # child runs that were started here before this one (RSIG-4)
        optional=flag(),
        comp_actor=ident(null=True),
        comp_from_result=flag(),
        comp_policy=ident(8, null=True),
        comp_group=integer(null=True),
        comp_parallel=flag(),
        comp_reclaim_stale_after_seconds=integer(null=True),
        created_at=ms(),
        ended_at=ms(null=True),
        options=text(null=True),  # JSON: how a run of it is started, again after a retry
        retry_policy=text(null=True),
        comp_options=text(null=True),
        error=text(null=True),
        args=payload(),
        comp_args=payload(null=True),
        result=payload(null=True),
        checks=[
            one_of("status", *ChildStatus),
            one_of("close_policy", *ChildClosePolicy),
            ("ended_at IS NOT NULL OR status = 'pending' OR status = 'running' OR status = 'awaiting_retry'"),
        ],
        indexes=[
            index("child_run", "child_id"),
            index("child_open", "run_id", "block", where=LIVE, leading="ended_at"),
        ],
    )

    side_effects = table(
        "side_effects",
        key=by_sequence,
        run_id=ident(ID_LENGTH),
        sequence=integer(),
        kind=ident(
            8, default="value"
        ),  # value | patch: a version gate that was passed (HISTORY-2) | signal: sent to another run
        name=ident(),
        created_at=ms(),
        value=payload(),
        checks=[one_of("kind", "value", "patch", "signal")],
    )

    tags = table(
        "tags",
        key=("run_id", "name"),
        run_id=ident(ID_LENGTH),
        name=ident(),
        value=ident(null=True),
        indexes=[index("tag_value", "name", "value")],
    )

    flow_events = table(
        "flow_events",
        id=BigAutoField(),
        run_id=ident(ID_LENGTH),
        at=ms(),
        type=ident(40),
        sequence=integer(null=True),
        name=ident(null=True),
        attempt=integer(null=True),
        detail=text(null=True),
        indexes=[index("event_run", "run_id", "id")],
    )

    workers = table("workers", id=ident(64, primary_key=True), host=ident(), pid=integer(), started_at=ms(), seen_at=ms())

    passes = table(
        "passes",
        name=ident(16, primary_key=True),  # monitor, repair, prune
        number=integer(),  # passes ever begun: the token
        holder=ident(),  # whose the last one was: for people
        began_at=ms(),
        ended_at=ms(null=True),
    )

    messages = table(
        "messages",
        # A row's id is never used again: a second acknowledgement of one message cannot meet another message's row.
        id=BigAutoField(constraints=[SQL("AUTOINCREMENT")] if dialect == SQLITE else None),
        queue=ident(),
        state=integer(default=0),  # 0 ready, 1 delayed, 2 reserved, 3 dead
        priority=integer(default=0),
        available_at=ms(),
        reserved_at=ms(null=True),
        lease_until=ms(null=True),
        attempts=integer(default=0),
        actor=ident(),
        message_id=ident(64),
        enqueued_at=ms(),  # the age that orders reservations (QUEUE-1)
        died_at=ms(null=True),
        reason=text(null=True),
        message=payload(),
        checks=[
            "state IN (0, 1, 2, 3)",
            "(state = 2) = (reserved_at IS NOT NULL AND lease_until IS NOT NULL)",
            "(state = 3) = (died_at IS NOT NULL)",
            "attempts >= 0",
        ],
        indexes=[
            index("queue_ready", "queue", "priority", "enqueued_at", "id", where="state = 0", leading="state"),
            index("queue_delayed", "queue", "available_at", where="state = 1", leading="state"),
            index("queue_leased", "queue", "lease_until", where="state = 2", leading="state"),
            index("queue_dead", "died_at", where="state = 3", leading="state"),
        ],
    )

    rate_limits = table(
        "rate_limits",
        id=ident(primary_key=True),
        value=BigIntegerField(),
        expires_at=ms(),
        indexes=[index("rate_expiry", "expires_at")],
    )

    results = table(
        "results",
        id=ident(primary_key=True),
        expires_at=ms(),
        value=payload(),
        indexes=[index("result_expiry", "expires_at")],
    )

    return Models(
        flow_runs,
        action_runs,
        compensation_runs,
        blocks,
        waits,
        signals,
        children,
        side_effects,
        tags,
        flow_events,
        workers,
        passes,
        messages,
        rate_limits,
        results,
    )


def _mysql_columns(one: Index) -> str:
    # differs because: there are no partial indexes; the column that the predicate names leads, where it says so
    columns = one.columns if one.leading is None else (one.leading, *one.columns)
    return ", ".join(columns)
