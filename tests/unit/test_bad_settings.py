"""Settings and arguments that cannot work: each is refused when it is given, by its full name, with the way out."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from dramatiq_saga import SagaMiddleware, Settings
from dramatiq_saga.brokers import DatabaseBroker, SQLiteBroker
from dramatiq_saga.errors import SettingsError
from dramatiq_saga.operations import Operator, RefusedError
from dramatiq_saga.scheduling import add_jobs
from dramatiq_saga.settings import ENV_PREFIX, Backoff, Expiration, Monitor, Repair, reference

LEAVES = "not a function"


def takes_none() -> None: ...


def takes_one(captured: str) -> None: ...


async def later() -> None: ...


ABOVE_0 = "must be a number of seconds above 0, or a timedelta"
AT_LEAST_0 = "must be a number of seconds of at least 0, or a timedelta"
AT_LEAST_TENTH = "must be a number of seconds of at least 0.1, or a timedelta"
AT_LEAST_1 = "must be a number of seconds of at least 1, or a timedelta"
WHOLE = "must be a whole number of at least 1"
FLAG = "must be True or False"
CAPTURE = "must be None or a function of no arguments"

#: key, a value that cannot work, and what is said of it: every key that takes a number is here with one that is too small
IMPOSSIBLE: list[tuple[str, Any, str]] = [
    ("actions.reclaim.stale_running.after_seconds", -1, AT_LEAST_1),
    ("actions.reclaim.stale_running.after_seconds", 0, AT_LEAST_1),
    ("actions.reclaim.stale_running.after_seconds", 0.4, AT_LEAST_1),
    ("actions.reclaim.stale_running.after_seconds", timedelta(seconds=-1), AT_LEAST_1),
    ("actions.reclaim.stale_running.after_seconds", float("nan"), AT_LEAST_1),
    ("sagas.reclaim.stale_running.after_seconds", 0, AT_LEAST_1),
    ("sagas.reclaim.stale_running.after_seconds", float("inf"), "of at most 1000000000 seconds"),
    ("sagas.reclaim.stale_running.after_seconds", "900", AT_LEAST_1),
    ("sagas.reclaim.stale_running.enabled", 1, FLAG),
    ("sagas.default_compensation_failure_policy", "halt", "must be 'stop' or 'continue'"),
    ("reclaim.dead_workers.lease_seconds", 0, AT_LEAST_1),
    ("reclaim.dead_workers.lease_seconds", 0.9, AT_LEAST_1),
    ("reclaim.max_claims", 0, WHOLE),
    ("reclaim.max_claims", None, WHOLE),
    ("actions.retry_on_signal.max_retries", -1, "must be None or a whole number of at least 0"),
    ("actions.retry_on_signal.max_retries", True, "must be None or a whole number of at least 0"),
    ("monitor.expiration.defaults.run", 0, "must be None or a number of seconds above 0"),
    ("monitor.expiration.defaults.action", -5, "must be None or a number of seconds above 0"),
    ("monitor.expiration.defaults.signal", timedelta(0), "must be None or a number of seconds above 0"),
    ("monitor.expiration.batch_size", 0, WHOLE),
    ("monitor.expiration.backoff.base_seconds", 0, ABOVE_0),
    (
        "monitor.expiration.backoff.base_seconds",
        3601,
        "is above monitor.expiration.backoff.max_seconds, 3600: lower the one or raise",
    ),
    ("monitor.expiration.backoff.max_seconds", -1, ABOVE_0),
    ("repair.grace_seconds", -0.1, AT_LEAST_0),
    ("repair.batch_size", 0, WHOLE),
    ("repair.batch_size", 0.5, WHOLE),
    ("repair.max_attempts", 0, WHOLE),
    ("repair.backoff.base_seconds", 0, ABOVE_0),
    ("repair.backoff.base_seconds", 301, "is above repair.backoff.max_seconds, 300: lower the one or raise the other"),
    ("repair.backoff.max_seconds", 0, ABOVE_0),
    ("loop.monitor_seconds", -30, AT_LEAST_TENTH),
    ("loop.monitor_seconds", timedelta(milliseconds=99), AT_LEAST_TENTH),
    ("loop.repair_seconds", 0.01, AT_LEAST_TENTH),
    ("locks.run_ttl_seconds", 0, ABOVE_0),
    ("locks.action_ttl_seconds", 0, ABOVE_0),
    ("locks.action_ttl_seconds", 10**12, "of at most 1000000000 seconds"),
    ("locks.compensation_ttl_seconds", 0, ABOVE_0),
    ("locks.block_seconds", -1, AT_LEAST_0),
    ("locks.block_seconds", None, AT_LEAST_0),
    ("locks.prefix", "", "must be printable ASCII without spaces"),
    ("locks.prefix", "two words", "must be printable ASCII without spaces"),
    ("parallel.default_failure_policy", None, "must be 'fail_fast' or 'wait_all_then_fail'"),
    ("parallel.default_failure_policy", "wait_all", "did you mean 'wait_all_then_fail'?"),
    ("children.default_close_policy", 3, "must be 'abandon' or 'cancel' or 'fail'"),
    ("prune.retention_days", 0, "must be a number of days above 0"),
    ("history.max_payload_preview_length", -1, "must be a whole number from 0 to 10000"),
    ("history.max_payload_preview_length", 10_001, "must be a whole number from 0 to 10000"),
    ("logging.anomaly_level", "loud", "must be None or 'debug' or 'info'"),
    ("logging.logger", "", "must be None or a logger's name"),
    ("context.capture", "shop:capture", "shop cannot be imported: ModuleNotFoundError"),
    ("context.capture", "shop.capture", CAPTURE),
    ("context.capture", "dramatiq_saga.clock:nothing", "dramatiq_saga.clock has no nothing"),
    ("context.capture", f"{__name__}:LEAVES", CAPTURE),
    ("context.capture", f"{__name__}:takes_one", CAPTURE),
    ("context.capture", later, CAPTURE),
    ("context.restore", 1, "must be None or a function of one argument"),
    ("context.restore", f"{__name__}:takes_none", "must be None or a function of one argument"),
    ("schema.table_prefix", "a" * 25, "at most 24 bytes long"),
    ("schema.table_prefix", "ü_", "must be lower-case letters, digits and underscores"),
    ("schema.table_prefix", "Saga_", "must be lower-case letters, digits and underscores"),
    ("schema.table_prefix", "1_", "not beginning with a digit"),
    ("schema.table_prefix", 'x"; --', "must be lower-case letters, digits and underscores"),
    ("schema.table_prefix", "x_\n", "must be lower-case letters, digits and underscores"),
    ("schema.auto_create", "yes", "must be None or True or False"),
]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    IMPOSSIBLE,
    ids=[f"{key}={getattr(value, '__name__', repr(value))}" for key, value, _ in IMPOSSIBLE],
)
def test_an_impossible_value_is_refused_with_its_full_key(key: str, value: Any, words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_mapping({key: value})
    assert refused.value.key == key
    assert str(refused.value).startswith(key + ": ")
    assert words in str(refused.value)


def test_the_table_above_has_a_bad_value_for_every_key_that_can_have_one() -> None:
    """Flags apart, which the next test covers."""
    flags = {key.key for key in reference() if isinstance(key.default, bool)}
    assert {key.key for key in reference()} - flags == {key for key, _, _ in IMPOSSIBLE} - flags


@pytest.mark.parametrize("key", [key.key for key in reference()])
def test_no_key_takes_just_anything(key: str) -> None:
    with pytest.raises(SettingsError, match="must be") as refused:
        Settings.from_mapping({key: object()})
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("given", "suggestion"),
    [
        ({"repair": {"enabld": True}}, "did you mean repair.enabled?"),
        ({"repiar.enabled": True}, "did you mean repair.enabled?"),
        ({"max_claims": 3}, "did you mean reclaim.max_claims?"),
        ({"lease_seconds": 3}, "did you mean reclaim.dead_workers.lease_seconds?"),
        (
            {"stale_running.after_seconds": 3},
            "did you mean actions.reclaim.stale_running.after_seconds or sagas.reclaim.stale_running.after_seconds?",
        ),
        ({"monitor": {"batch_size": 3}}, "did you mean monitor.expiration.batch_size?"),
        ({"locks.ttl_seconds": 3}, "did you mean locks.run_ttl_seconds?"),
        ({"zzz": 3}, "docs/reference/settings.md lists every key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(given: dict[str, Any], suggestion: str) -> None:
    with pytest.raises(SettingsError, match="no such setting") as refused:
        Settings.from_mapping(given)
    assert suggestion in str(refused.value)
    with pytest.raises(SettingsError, match="no such setting"):
        Settings.recommended(**given)


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"repair": True}, "repair", "is a section"),
        ({"repair.enabled": {"yes": 1}}, "repair.enabled", "True or False"),
        ({"repair": {"batch_size": 3}, "repair.batch_size": 4}, "repair.batch_size", "given twice"),
        ({"repair": Repair}, "repair", "is a section"),
        ({"repair": Monitor()}, "repair", "must be Repair"),
        ({"monitor": {"expiration": Backoff(1, 2)}}, "monitor.expiration", "must be Expiration"),
        ({1: 2}, "settings", "keys are strings"),
        ([("repair.enabled", True)], "settings", "must be a mapping"),
    ],
)
def test_a_misplaced_section_or_value_is_refused(given: Any, key: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        Settings.from_mapping(given)
    assert refused.value.key == key


def test_a_wrong_section_made_by_itself_is_refused_where_it_is_used() -> None:
    with pytest.raises(SettingsError) as refused:
        Settings(monitor=Monitor(expiration=Expiration(backoff=Backoff(60, 30))))
    assert refused.value.key == "monitor.expiration.backoff.base_seconds"
    assert "monitor.expiration.backoff.max_seconds" in str(refused.value)


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("REPAIR__ENABLED", "maybe"),
        ("REPAIR__ENABLED", ""),
        ("REPAIR__BATCH_SIZE", "many"),
        ("REPAIR__BATCH_SIZE", "1.5"),
        ("REPAIR__BATCHSIZE", "10"),
        ("CONTEXT__CAPTURE", "shop:capture"),
        ("CONTEXT__CAPTURE", "os:system('true')"),
        ("CONTEXT__RESTORE", "print"),
        ("LOCKS__RUN_TTL_SECONDS", "nan"),
        ("RECLAIM__DEAD_WORKERS__LEASE_SECONDS", "0.5"),
    ],
)
def test_a_wrong_environment_is_refused_with_key_and_variable(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_env({ENV_PREFIX + name: text})
    assert refused.value.key == name.lower().replace("__", ".")
    assert ENV_PREFIX + name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("DRAMATIQ_SAGA__REPAIR__ENABELD", "did you mean DRAMATIQ_SAGA__REPAIR__ENABLED?"),
        ("DRAMATIQ_SAGA__REPAIR_ENABLED", "did you mean DRAMATIQ_SAGA__REPAIR__ENABLED?"),
        ("DRAMATIQ_SAGA_REPAIR__ENABLED", "did you mean DRAMATIQ_SAGA__REPAIR__ENABLED?"),
        ("DRAMATIQ_SAGA_REPAIR_ENABLED", "did you mean DRAMATIQ_SAGA__REPAIR__ENABLED?"),
        ("DRAMATIQ_SAGA__MAX_CLAIMS", "did you mean DRAMATIQ_SAGA__RECLAIM__MAX_CLAIMS?"),
        ("DRAMATIQ_SAGA__ZZZ", "docs/reference/settings.md lists every key"),
        ("DRAMATIQ_SAGA__", "docs/reference/settings.md lists every key"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_one_that_was_meant(name: str, suggestion: str) -> None:
    """Also where an underscore is missing: a dial that is silently not turned is worse than one that is refused."""
    with pytest.raises(SettingsError, match="no such setting") as refused:
        Settings.from_env({name: "true"})
    assert f"(from the environment: {name}); {suggestion}" in str(refused.value)


def test_other_variables_of_the_environment_are_left_alone() -> None:
    others = {
        "DRAMATIQ_SAGA_APP": "shop",
        "DRAMATIQ_SAGA_TEST_REDIS": "x",
        "DRAMATIQ_SAGAS": "1",
        "dramatiq_queue_prefetch": "2",
    }
    assert Settings.from_env(others) == Settings()


# --- arguments -------------------------------------------------------------------------------------------------------

LONG_EXTENSION = "because a lease must outlive two extensions: at most half of it, or leave it out for a quarter"


@pytest.mark.parametrize("broker", [SQLiteBroker, DatabaseBroker])
@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        ({"retry_after": 0}, "retry_after", "of at least 0.1, or a timedelta"),
        ({"retry_after": -1}, "retry_after", "of at least 0.1"),
        ({"retry_after": 0.05}, "retry_after", "of at least 0.1"),
        ({"retry_after": timedelta(0)}, "retry_after", "of at least 0.1"),
        ({"retry_after": float("inf")}, "retry_after", "must be a number of seconds"),
        ({"retry_after": float("nan")}, "retry_after", "must be a number of seconds"),
        ({"retry_after": "60"}, "retry_after", "must be a number of seconds"),
        ({"retry_after": True}, "retry_after", "must be a number of seconds"),
        ({"retry_after": None}, "retry_after", "must be a number of seconds"),
        ({"poll_interval": 0}, "poll_interval", "above 0"),
        ({"poll_interval": -0.01}, "poll_interval", "above 0"),
        ({"poll_interval": "1"}, "poll_interval", "above 0"),
        ({"extend_every": 0}, "extend_every", "above 0"),
        ({"retry_after": 10, "extend_every": 10}, "extend_every", LONG_EXTENSION),
        ({"retry_after": 10, "extend_every": 6}, "extend_every", "6 s is too long for retry_after=10 s"),
        ({"retry_after": timedelta(seconds=10), "extend_every": timedelta(seconds=6)}, "extend_every", LONG_EXTENSION),
    ],
)
def test_an_argument_of_a_broker_that_cannot_work_is_refused_by_its_name(
    tmp_path: Path, broker: Any, arguments: dict[str, Any], key: str, words: str
) -> None:
    """QUEUE-6: refused at start, before anything is opened."""
    with pytest.raises(SettingsError) as refused:
        broker(tmp_path / "q.db", **arguments)
    assert refused.value.key == key
    assert str(refused.value).startswith(key + ": ")
    assert words in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_brokers_durations_may_be_timedeltas(tmp_path: Path) -> None:
    broker = SQLiteBroker(
        tmp_path / "q.db",
        retry_after=timedelta(minutes=2),
        poll_interval=timedelta(milliseconds=5),
        extend_every=timedelta(seconds=7),
    )
    assert (broker.retry_after, broker.poll_interval, broker.extend_every) == (120, 0.005, 7)


@pytest.mark.parametrize("settings", [{"repair.enabled": True}, "recommended", Repair()])
def test_settings_of_the_middleware_that_are_none_are_refused(settings: Any) -> None:
    with pytest.raises(SettingsError, match=r"^settings: must be a Settings, not .*Settings\.from_mapping"):
        SagaMiddleware(settings=settings)


# --- a sweep without the application ---------------------------------------------------------------------------------


def test_a_sweep_without_the_applications_workflows_is_refused(tmp_path: Path) -> None:
    """NATIVE-3: it could drive nothing, and every actor would be unknown to it; the way out is the module that imports them."""
    broker = SQLiteBroker(tmp_path / "x.db")
    broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
    dramatiq.actor(takes_none, broker=broker)
    operator = Operator.on_broker(broker)
    with pytest.raises(
        RefusedError, match=r"declares no workflow.*name the module that imports the workflows and actors \(--app\)"
    ):
        operator.sweep()
    with pytest.raises(RefusedError, match="declares no workflow"):
        add_jobs(None, broker)
    operator.close()


def test_a_sweep_without_an_application_is_refused(tmp_path: Path) -> None:
    operator = Operator.on_database(tmp_path / "x.db")
    with pytest.raises(RefusedError, match=r"sweep needs the application, not only its database.*\(--app\)"):
        operator.sweep()
    operator.close()
