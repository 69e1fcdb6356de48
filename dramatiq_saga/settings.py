"""Every dial of the system in one tree of frozen dataclasses.

A :class:`Settings` that exists is usable: each value was checked and brought to its stored form (seconds as numbers, words
as enum members) when it was made, so nothing is looked up, parsed or validated while messages are handled. What is unknown
or cannot work raises :class:`~dramatiq_saga.errors.SettingsError` with the key's full dotted name and the way out.

Defaults stand on the dataclass fields; checks and meanings stand in one table below, from which the reference page is
checked. A section that is made by itself is checked when it becomes part of a ``Settings``. Reads the environment only
when asked to, imports only the hooks that it is told to, and touches nothing else. Long, because each of some fifty keys
has a field, a check and a sentence.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from .errors import SettingsError
from .statuses import ChildClosePolicy, CompensationFailurePolicy, ParallelFailurePolicy

#: What every environment name begins with; the key's path follows in capitals, joined by two underscores.
ENV_PREFIX = "DRAMATIQ_SAGA__"

#: Longest duration that is believed, in seconds: about 31 years.
MAX_SECONDS = 1_000_000_000

#: Longest table prefix, in bytes: leaves room for table and index names on every database.
MAX_PREFIX_BYTES = 24

#: Longest payload preview, in characters: it has to fit a 64 KB text column beside other facts.
MAX_PREVIEW_LENGTH = 10_000

#: The words for ``logging.anomaly_level``.
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StaleRunning:
    """Whether a ``running`` row may be claimed again, and how long after its claim (RECLAIM-1)."""

    enabled: bool = False
    after_seconds: float = 900


@dataclass(frozen=True, slots=True)
class StaleReclaim:
    """Reclaim for one kind of row."""

    stale_running: StaleRunning = StaleRunning()


@dataclass(frozen=True, slots=True)
class RetryOnSignal:
    """Defaults of steps and children that wait for a signal to be tried again (RSIG-3)."""

    max_retries: int | None = None


@dataclass(frozen=True, slots=True)
class Actions:
    """Steps."""

    reclaim: StaleReclaim = StaleReclaim()
    retry_on_signal: RetryOnSignal = RetryOnSignal()


@dataclass(frozen=True, slots=True)
class Sagas:
    """Compensations and rollbacks."""

    reclaim: StaleReclaim = StaleReclaim()
    default_compensation_failure_policy: CompensationFailurePolicy = CompensationFailurePolicy.STOP
    parallel_compensation: bool = False
    compensate_failed_step: bool = False


@dataclass(frozen=True, slots=True)
class DeadWorkers:
    """Leases of worker processes (RECLAIM-5)."""

    enabled: bool = False
    lease_seconds: float = 60


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Reclaim of steps and compensations alike."""

    dead_workers: DeadWorkers = DeadWorkers()
    max_claims: int = 5


@dataclass(frozen=True, slots=True)
class ExpirationDefaults:
    """Implicit deadlines in seconds; ``None``: no deadline unless one is given (EXPIRE-1)."""

    run: float | None = None
    action: float | None = None
    signal: float | None = None


@dataclass(frozen=True, slots=True)
class Backoff:
    """A hold-off that doubles from ``base_seconds`` up to ``max_seconds``."""

    base_seconds: float
    max_seconds: float


@dataclass(frozen=True, slots=True)
class Expiration:
    """What the monitor does about deadlines (EXPIRE-1, EXPIRE-2)."""

    defaults: ExpirationDefaults = ExpirationDefaults()
    batch_size: int = 100
    backoff: Backoff = Backoff(60, 3600)


@dataclass(frozen=True, slots=True)
class Monitor:
    """The sweep that expires what is overdue."""

    expiration: Expiration = Expiration()


@dataclass(frozen=True, slots=True)
class Repair:
    """The doctor (DOCTOR-1)."""

    enabled: bool = False
    redispatch_lost_actions: bool = True
    wake_stuck_flows: bool = True
    redispatch_stale_running_actions: bool = True
    grace_seconds: float = 60
    batch_size: int = 100
    max_attempts: int = 10
    backoff: Backoff = Backoff(10, 300)


@dataclass(frozen=True, slots=True)
class Loop:
    """Sweeps inside workers (LOOP-1)."""

    enabled: bool = False
    monitor_seconds: float = 30
    repair_seconds: float = 60


@dataclass(frozen=True, slots=True)
class Locks:
    """Overlap locks (LOCK-1); without a lock backend they mean nothing."""

    run_ttl_seconds: float = 900
    action_ttl_seconds: float = 900
    compensation_ttl_seconds: float = 900
    block_seconds: float = 0
    prefix: str = "dramatiq-saga"


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel blocks (PAR-4)."""

    default_failure_policy: ParallelFailurePolicy = ParallelFailurePolicy.FAIL_FAST


@dataclass(frozen=True, slots=True)
class Children:
    """Child workflows (CHILD-3)."""

    default_close_policy: ChildClosePolicy = ChildClosePolicy.ABANDON


@dataclass(frozen=True, slots=True)
class Prune:
    """Deletion of ended runs (PRUNE-1)."""

    retention_days: float = 90


@dataclass(frozen=True, slots=True)
class History:
    """What the history keeps (SAFE-2)."""

    store_payloads: bool = True
    store_exceptions: bool = True
    max_payload_preview_length: int = 2000


@dataclass(frozen=True, slots=True)
class Logging:
    """The anomaly journal (ANOM-1)."""

    anomaly_level: str | None = "info"
    logger: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What travels with a run: tenant, correlation id, trace context (CTX-1).

    ``capture()`` gives anything that the encoder carries. ``restore(captured)`` gives a context manager, which is entered around
    the piece of code, or a function without arguments that undoes it, or the token of ``ContextVar.set()``, or ``None``.
    In a mapping and in the environment either may be named, as ``"package.module:function"``.
    """

    auto: bool = False
    capture: Callable[[], Any] | None = None
    restore: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables."""

    table_prefix: str = "saga_"
    auto_create: bool | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Durations are seconds; a ``timedelta`` is taken too and stored as seconds.

    A section may be given as its dataclass, which replaces the defaults of that section, or as a mapping of what differs
    from them.

    :raises SettingsError: a key is unknown, or a value or combination of values cannot work.
    """

    actions: Actions = Actions()
    sagas: Sagas = Sagas()
    reclaim: Reclaim = Reclaim()
    monitor: Monitor = Monitor()
    repair: Repair = Repair()
    loop: Loop = Loop()
    locks: Locks = Locks()
    parallel: Parallel = Parallel()
    children: Children = Children()
    prune: Prune = Prune()
    history: History = History()
    logging: Logging = Logging()
    context: Context = Context()
    schema: Schema = Schema()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(getattr(self, field.name), field.default, field.name))
        _check_backoff(self.monitor.expiration.backoff, "monitor.expiration.backoff")
        _check_backoff(self.repair.backoff, "repair.backoff")
        if self.context.auto and (self.context.capture is not None or self.context.restore is not None):
            raise SettingsError(
                "context.auto", "is for runs without hooks of your own: drop it, or context.capture and context.restore"
            )

    @classmethod
    def recommended(cls, **overrides: Any) -> Settings:
        """The defaults with both reclaims, dead-worker leases, repair and the loop in workers on: what is lost or stuck comes right by itself.

        ``overrides`` are as in :meth:`from_mapping`.
        """
        return cls.from_mapping(overrides, base=_RECOMMENDED)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, base: Settings | None = None) -> Settings:
        """``base`` (the defaults unless given) with ``values`` on top: nested mappings, dotted keys, or both mixed.

        A section given as its dataclass replaces that section whole.
        """
        if not isinstance(values, Mapping):
            raise SettingsError("settings", f"must be a mapping of keys to values, not {_shown(values)}")
        return _with(base if base is not None else cls(), _flat(values), "")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, base: Settings | None = None) -> Settings:
        """``base`` (the defaults unless given) with every ``DRAMATIQ_SAGA__…`` variable of ``environ`` on top.

        ``true/false``, ``yes/no``, ``on/off`` and ``1/0`` are flags; ``none``, or nothing at all, is ``None`` where that is
        possible. A variable that begins so and names no key is refused, and so is one that begins with a section's name after a
        single underscore.
        """
        flat: dict[str, Any] = {}
        for name, text in sorted((os.environ if environ is None else environ).items()):
            if name.startswith(ENV_PREFIX):
                key = _key_of(name, ENV_PREFIX)
                rule = _RULES.get(key)
                if rule is None:
                    raise _unknown(key, variable=name)
                try:
                    flat[key] = rule.check(rule.parse(text))
                except ValueError as e:
                    raise SettingsError(key, f"{e} (from the environment: {name})") from None
            elif name.startswith(_NEARLY):  # an underscore is missing, and nobody would notice
                raise _unknown(_key_of(name, ENV_PREFIX[:-1]), variable=name)
        return cls.from_mapping(flat, base=base)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every key with the value in force here, in the order of the reference page."""
        for key in _RULES:
            yield key, _at(self, key)


class SettingKey(NamedTuple):
    """One line of the reference page."""

    key: str
    default: Any
    env: str
    meaning: str


def reference() -> Iterator[SettingKey]:
    """Every key there is, with its default, its environment name and its meaning."""
    defaults = Settings()
    for key, rule in _RULES.items():
        yield SettingKey(key, _at(defaults, key), _variable(key), rule.meaning)


# --- checks: each returns the value as it is stored, or raises ValueError with the rest of the sentence --------------


@dataclass(frozen=True, slots=True)
class _Rule:
    meaning: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _nullable(rule: _Rule, *, word: str = "None") -> _Rule:
    def check(value: Any) -> Any:
        if value is None:
            return None
        try:
            return rule.check(value)
        except ValueError as e:
            raise ValueError(str(e).replace("must be ", f"must be {word} or ", 1)) from None

    def parse(text: str) -> Any:
        return None if text.strip().lower() in ("", "none", "null") else rule.parse(text)

    return _Rule(rule.meaning, check, parse)


def _flag(meaning: str) -> _Rule:
    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be True or False, not {_shown(value)}")
        return value

    def parse(text: str) -> bool:
        word = text.strip().lower()
        if word in ("true", "yes", "on", "1"):
            return True
        if word in ("false", "no", "off", "0"):
            return False
        raise ValueError(f"must be true or false, not {_shown(text)}")

    return _Rule(meaning, check, parse)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"must be a number, not {_shown(text)}") from None


def _duration(meaning: str, *, least: int | None = None, unit: str = "seconds") -> _Rule:
    unit_seconds = {"seconds": 1, "days": 86_400}[unit]
    wanted = f"a number of {unit} {'above 0' if least is None else f'of at least {least}'}, or a timedelta"

    def check(value: Any) -> int | float:
        given = value
        if isinstance(value, timedelta):
            value = value.total_seconds() / unit_seconds
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value > 0 if least is None else value >= least)
        ):  # nor NaN
            raise ValueError(f"must be {wanted}, not {_shown(given)}")
        if value * unit_seconds > MAX_SECONDS:
            raise ValueError(f"must be {wanted}, of at most {MAX_SECONDS // unit_seconds} {unit}, not {_shown(given)}")
        return int(value) if value == int(value) else value

    return _Rule(meaning, check, _number)


def _count(meaning: str, least: int, most: int = 2**31 - 1) -> _Rule:
    wanted = f"a whole number from {least} to {most}" if most < 2**31 - 1 else f"a whole number of at least {least}"

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be {wanted}, not {_shown(value)}")
        return value

    return _Rule(meaning, check, _number)


def _word(meaning: str, words: type[StrEnum] | tuple[str, ...]) -> _Rule:
    known: dict[str, Any] = {str(word): word for word in words}

    def check(value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in known:
            return known[value.strip().lower()]
        near = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"must be {' or '.join(map(repr, known))}, not {_shown(value)}{hint}")

    return _Rule(meaning, check, str)


def _text(meaning: str, pattern: str, wanted: str, max_bytes: int = 191) -> _Rule:
    matches = re.compile(pattern).fullmatch

    def check(value: Any) -> str:
        if not isinstance(value, str) or not matches(value) or len(value.encode()) > max_bytes:
            raise ValueError(f"must be {wanted}, at most {max_bytes} bytes long, not {_shown(value)}")
        return value

    return _Rule(meaning, check, str)


def _hook(meaning: str, *, takes: int) -> _Rule:
    wanted = f"a function of {('no arguments', 'one argument')[takes]}, or where it is: 'package.module:function'"

    def check(value: Any) -> Any:
        given = value
        if isinstance(value, str):
            value = _imported(value, wanted)
        if not callable(value) or inspect.iscoroutinefunction(value) or not _can_take(value, takes):
            raise ValueError(f"must be {wanted}, not {_shown(given)}" + (f" ({_shown(value)})" if value is not given else ""))
        return value

    return _Rule(meaning, check, str)


def _imported(text: str, wanted: str) -> Any:
    """What ``package.module:name`` says: the host's own word, from its code or its environment, never from a row (SAFE-1)."""
    module, _, name = text.strip().partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not re.fullmatch(r"\w+(\.\w+)*", name):
        raise ValueError(f"must be {wanted}, not {_shown(text)}")
    try:
        found: Any = importlib.import_module(module)
    except Exception as e:
        raise ValueError(f"names {_shown(text)}, and {module} cannot be imported: {type(e).__name__}: {e}") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"names {_shown(text)}, and {module} has no {name}; where that module is the one that makes the settings, "
                "keep the hooks in one of their own"
            )
        found = getattr(found, part)
    return found


def _can_take(function: Callable[..., Any], arguments: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Python cannot tell
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


# --- the table -------------------------------------------------------------------------------------------------------

_PRINTABLE = r"[!-~]+"

_RULES: dict[str, _Rule] = {
    "actions.reclaim.stale_running.enabled": _flag(
        "a step that is still `running` this long after its claim may be claimed again; per step: `enable_stale_reclaim`"
    ),
    "actions.reclaim.stale_running.after_seconds": _duration(
        "how long after its claim, in seconds; set it above the longest time a step may take; per step: `reclaim_stale_after`",
        least=1,
    ),
    "actions.retry_on_signal.max_retries": _nullable(
        _count("how often a signal may run a parked step or child again, where it does not say; `None`: no limit", 0)
    ),
    "sagas.reclaim.stale_running.enabled": _flag(
        "a compensation that is still `running` this long after its claim may be claimed again; per step: "
        "`enable_compensation_stale_reclaim`"
    ),
    "sagas.reclaim.stale_running.after_seconds": _duration(
        "how long after its claim, in seconds; per step: `reclaim_compensation_stale_after`",
        least=1,
    ),
    "sagas.default_compensation_failure_policy": _word(
        "what a compensation that failed does to the rest of a rollback: `stop` halts it, `continue` goes on",
        CompensationFailurePolicy,
    ),
    "sagas.parallel_compensation": _flag("undo the steps of a saga group side by side instead of one after another"),
    "sagas.compensate_failed_step": _flag("also undo the step whose failure began the rollback"),
    "reclaim.dead_workers.enabled": _flag(
        "a row that is `running` on a worker process which has not been heard from may be claimed again"
    ),
    "reclaim.dead_workers.lease_seconds": _duration(
        "how long a worker may be silent before it counts as dead, in seconds, at least 1", least=1
    ),
    "reclaim.max_claims": _count("a row claimed this often without an outcome fails as interrupted; per step: `max_claims`", 1),
    "monitor.expiration.defaults.run": _nullable(
        _duration("deadline of a run that has none of its own, in seconds after its start")
    ),
    "monitor.expiration.defaults.action": _nullable(
        _duration("deadline of a step that has none of its own, in seconds after it was scheduled")
    ),
    "monitor.expiration.defaults.signal": _nullable(
        _duration("longest wait for a signal where the wait does not say, in seconds")
    ),
    "monitor.expiration.batch_size": _count("how many overdue rows of a kind one sweep takes on", 1),
    "monitor.expiration.backoff.base_seconds": _duration(
        "first hold-off of a run that could not be expired or driven, in seconds; doubles with each failure"
    ),
    "monitor.expiration.backoff.max_seconds": _duration("longest hold-off, in seconds"),
    "repair.enabled": _flag("let sweeps repair: send again what was lost, wake what is stuck"),
    "repair.redispatch_lost_actions": _flag("rule R1: send a row again that nobody has taken"),
    "repair.wake_stuck_flows": _flag("rule R2: drive a run whose wake nobody has seen"),
    "repair.redispatch_stale_running_actions": _flag("rule R3: send a `running` row again whose reclaim deadline has passed"),
    "repair.grace_seconds": _duration("how old something must be before it counts as lost, in seconds", least=0),
    "repair.batch_size": _count("how many rows of a kind one sweep repairs", 1),
    "repair.max_attempts": _count("how often one row is repaired before it is left to an operator", 1),
    "repair.backoff.base_seconds": _duration("first pause between two repairs of one row, in seconds; doubles"),
    "repair.backoff.max_seconds": _duration("longest pause between two repairs of one row, in seconds"),
    "loop.enabled": _flag("monitor and repair inside worker processes, so that no cron is needed"),
    "loop.monitor_seconds": _duration(
        "how often workers, or `schedule`, monitor: one pass per interval, however many they are, in seconds"
    ),
    "loop.repair_seconds": _duration("how often workers, or `schedule`, repair, in seconds; only where `repair.enabled`"),
    "locks.run_ttl_seconds": _duration("when a lock on a run that was never released gives way, in seconds"),
    "locks.action_ttl_seconds": _duration("the same for a step"),
    "locks.compensation_ttl_seconds": _duration("the same for a compensation"),
    "locks.block_seconds": _duration("how long a message waits for a held lock before it is put back, in seconds", least=0),
    "locks.prefix": _text("what the keys of locks begin with", _PRINTABLE, "printable ASCII without spaces"),
    "parallel.default_failure_policy": _word(
        "when a parallel block reports a failure: `fail_fast` at the first one, `wait_all_then_fail` once all have settled",
        ParallelFailurePolicy,
    ),
    "children.default_close_policy": _word(
        "what becomes of an open child when its parent ends: `abandon`, `cancel` or `fail`", ChildClosePolicy
    ),
    "prune.retention_days": _duration("runs that ended longer ago than this are pruned, in days", unit="days"),
    "history.store_payloads": _flag("events carry previews of arguments, results and payloads"),
    "history.store_exceptions": _flag("events carry messages and tracebacks of exceptions"),
    "history.max_payload_preview_length": _count("where a preview is cut, in characters", 0, MAX_PREVIEW_LENGTH),
    "logging.anomaly_level": _nullable(_word("level of the anomaly journal; `None`: off", LOG_LEVELS)),
    "logging.logger": _nullable(
        _text("name of the anomaly journal's logger; `None`: `dramatiq_saga`", _PRINTABLE, "a logger's name")
    ),
    "context.auto": _flag("without hooks of your own: carry structlog's context variables with every run"),
    "context.capture": _nullable(
        _hook("called without arguments when a run is sent; returns what shall travel with it", takes=0)
    ),
    "context.restore": _nullable(
        _hook(
            "called with what was captured around every piece of your code; returns how that is undone: a context manager, a "
            "function, the token of `ContextVar.set()`, or `None`",
            takes=1,
        )
    ),
    "schema.table_prefix": _text(
        "what the names of all tables begin with",
        r"([a-z_][a-z0-9_]*)?",
        "lower-case letters, digits and underscores, not beginning with a digit",
        MAX_PREFIX_BYTES,
    ),
    "schema.auto_create": _nullable(
        _flag("create and migrate the tables at first use; `None`: on SQLite only"),
    ),
}


#: How a variable begins that was meant to be one of these; none of another purpose does.
_NEARLY = tuple({f"{ENV_PREFIX[:-1]}{key.partition('.')[0].upper()}_" for key in _RULES})


# --- trees -----------------------------------------------------------------------------------------------------------


def _at(settings: Settings, key: str) -> Any:
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``values`` as dotted keys; a section given as its dataclass stays one value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise SettingsError(path or "settings", f"keys are strings, not {_shown(name)}")
        key = f"{path}.{name}" if path else name
        if isinstance(value, Mapping) and _is_section(key):
            inner = _flat(value, key)
        elif key in _RULES or (_is_section(key) and dataclasses.is_dataclass(value) and not isinstance(value, type)):
            inner = {key: value}
        elif _is_section(key):
            inside = ", ".join(known for known in _RULES if known.startswith(key + "."))
            raise SettingsError(key, f"is a section, not a value: set {inside}")
        else:
            raise _unknown(key)
        for inner_key, inner_value in inner.items():
            if inner_key in flat:
                raise SettingsError(inner_key, "is given twice: keep one of the two")
            flat[inner_key] = inner_value
    return flat


def _is_section(key: str) -> bool:
    return any(known.startswith(key + ".") for known in _RULES)


def _key_of(variable: str, prefix: str) -> str:
    return variable.removeprefix(prefix).lower().replace("__", ".")


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def _unknown(key: str, *, variable: str | None = None) -> SettingsError:
    """The refusal of a key, or of a variable, with the ones that it resembles."""
    last = key.rsplit(".", 1)[-1]
    near = [known for known in _RULES if known.endswith(f".{key}")]
    near = near or difflib.get_close_matches(key, _RULES, n=1, cutoff=0.6)
    near = (near or [known for known in _RULES if known.rsplit(".", 1)[-1] == last])[:3]
    hint = "docs/reference/settings.md lists every key"
    if near:
        hint = f"did you mean {' or '.join(_variable(name) if variable else name for name in near)}?"
    origin = f" (from the environment: {variable})" if variable else ""
    return SettingsError(key, f"there is no such setting{origin}; {hint}")


def _with(section: T, flat: Mapping[str, Any], path: str) -> T:
    """``section`` with the values of ``flat`` that belong to it."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        key = f"{path}.{field.name}" if path else field.name
        value = flat.get(key, getattr(section, field.name))
        if any(name.startswith(key + ".") for name in flat):
            value = _with(value, flat, key)
        if value is not getattr(section, field.name):
            changes[field.name] = value
    return dataclasses.replace(section, **changes) if changes else section  # type: ignore[type-var]


def _checked(section: T, default: T, path: str) -> T:
    """``section`` with every value in its stored form."""
    if isinstance(section, Mapping):
        section = _with(default, _flat(section, path), path)
    if type(section) is not type(default):
        raise SettingsError(path, f"must be {type(default).__name__} or a mapping, not {_shown(section)}")
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        key, value = f"{path}.{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(getattr(default, field.name)):
            stored = _checked(value, getattr(default, field.name), key)
        else:
            try:
                stored = _RULES[key].check(value)
            except ValueError as e:
                raise SettingsError(key, str(e)) from None
        if stored is not value:
            changes[field.name] = stored
    return dataclasses.replace(section, **changes) if changes else section  # type: ignore[type-var]


def _check_backoff(backoff: Backoff, path: str) -> None:
    if backoff.base_seconds > backoff.max_seconds:
        raise SettingsError(
            f"{path}.base_seconds",
            f"{backoff.base_seconds} is above {path}.max_seconds, {backoff.max_seconds}: lower the one or raise the other",
        )


_RECOMMENDED = Settings(
    actions=Actions(reclaim=StaleReclaim(StaleRunning(enabled=True))),
    sagas=Sagas(reclaim=StaleReclaim(StaleRunning(enabled=True))),
    reclaim=Reclaim(dead_workers=DeadWorkers(enabled=True)),
    repair=Repair(enabled=True),
    loop=Loop(enabled=True),
)
