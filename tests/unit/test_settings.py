"""The settings tree: its defaults, and its two other ways in. What it refuses: ``test_bad_settings.py``."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_saga.errors import SettingsError
from dramatiq_saga.settings import (
    ENV_PREFIX,
    LOG_LEVELS,
    Backoff,
    Context,
    Repair,
    SettingKey,
    Settings,
    reference,
)
from dramatiq_saga.statuses import ChildClosePolicy, CompensationFailurePolicy, ParallelFailurePolicy

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"

DEFAULTS: dict[str, Any] = {
    "actions.reclaim.stale_running.enabled": False,
    "actions.reclaim.stale_running.after_seconds": 900,
    "actions.retry_on_signal.max_retries": None,
    "sagas.reclaim.stale_running.enabled": False,
    "sagas.reclaim.stale_running.after_seconds": 900,
    "sagas.default_compensation_failure_policy": "stop",
    "sagas.parallel_compensation": False,
    "sagas.compensate_failed_step": False,
    "reclaim.dead_workers.enabled": False,
    "reclaim.dead_workers.lease_seconds": 60,
    "reclaim.max_claims": 5,
    "monitor.expiration.defaults.run": None,
    "monitor.expiration.defaults.action": None,
    "monitor.expiration.defaults.signal": None,
    "monitor.expiration.batch_size": 100,
    "monitor.expiration.backoff.base_seconds": 60,
    "monitor.expiration.backoff.max_seconds": 3600,
    "repair.enabled": False,
    "repair.redispatch_lost_actions": True,
    "repair.wake_stuck_flows": True,
    "repair.redispatch_stale_running_actions": True,
    "repair.grace_seconds": 60,
    "repair.batch_size": 100,
    "repair.max_attempts": 10,
    "repair.backoff.base_seconds": 10,
    "repair.backoff.max_seconds": 300,
    "loop.enabled": False,
    "loop.monitor_seconds": 30,
    "loop.repair_seconds": 60,
    "locks.run_ttl_seconds": 900,
    "locks.action_ttl_seconds": 900,
    "locks.compensation_ttl_seconds": 900,
    "locks.block_seconds": 0,
    "locks.prefix": "dramatiq-saga",
    "parallel.default_failure_policy": "fail_fast",
    "children.default_close_policy": "abandon",
    "prune.retention_days": 90,
    "history.store_payloads": True,
    "history.store_exceptions": True,
    "history.max_payload_preview_length": 2000,
    "logging.anomaly_level": "info",
    "logging.logger": None,
    "context.auto": False,
    "context.capture": None,
    "context.restore": None,
    "schema.table_prefix": "saga_",
    "schema.auto_create": None,
}

FLAG = st.booleans()
SECONDS = st.one_of(st.integers(1, 10**6), st.floats(0.001, 10**6))
WINDOW = st.one_of(st.integers(1, 10**6), st.floats(1, 10**6))
INTERVAL = st.one_of(st.integers(1, 10**6), st.floats(0.1, 10**6))

VALUES: dict[str, st.SearchStrategy[Any]] = {
    key: FLAG
    if isinstance(default, bool)
    else st.none() | FLAG
    if key == "schema.auto_create"
    else st.none() | SECONDS
    if key.startswith("monitor.expiration.defaults.")
    else SECONDS
    for key, default in DEFAULTS.items()
    if not key.startswith(("context.capture", "context.restore"))
} | {
    "actions.retry_on_signal.max_retries": st.none() | st.integers(0, 1000),
    "sagas.default_compensation_failure_policy": st.sampled_from(CompensationFailurePolicy),
    "parallel.default_failure_policy": st.sampled_from(ParallelFailurePolicy),
    "children.default_close_policy": st.sampled_from(ChildClosePolicy),
    "actions.reclaim.stale_running.after_seconds": WINDOW,
    "sagas.reclaim.stale_running.after_seconds": WINDOW,
    "reclaim.dead_workers.lease_seconds": WINDOW,
    "reclaim.max_claims": st.integers(1, 1000),
    "monitor.expiration.batch_size": st.integers(1, 1000),
    "monitor.expiration.backoff.base_seconds": st.integers(1, 50),
    "monitor.expiration.backoff.max_seconds": st.integers(3600, 7200),
    "repair.batch_size": st.integers(1, 1000),
    "repair.max_attempts": st.integers(1, 1000),
    "repair.backoff.base_seconds": st.integers(1, 50),
    "repair.backoff.max_seconds": st.integers(300, 7200),
    "loop.monitor_seconds": INTERVAL,
    "loop.repair_seconds": INTERVAL,
    "locks.prefix": st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30),
    "prune.retention_days": st.integers(1, 1000),
    "history.max_payload_preview_length": st.integers(0, 10_000),
    "logging.anomaly_level": st.none() | st.sampled_from(LOG_LEVELS),
    "logging.logger": st.none() | st.sampled_from(["shop.anomalies", "x"]),
    "schema.table_prefix": st.from_regex(r"\A[a-z_][a-z0-9_]{0,23}\Z") | st.just(""),
}


def leaves(section: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        key, value = f"{path}{field.name}", getattr(section, field.name)
        found |= leaves(value, key + ".") if dataclasses.is_dataclass(value) else {key: value}
    return found


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def test_the_defaults_are_the_documented_ones() -> None:
    assert leaves(Settings()) == DEFAULTS
    assert dict(Settings().items()) == DEFAULTS


def test_recommended_turns_on_both_reclaims_leases_repair_and_the_loop_and_nothing_else() -> None:
    changed = {key for key, value in Settings.recommended().items() if value != DEFAULTS[key]}
    assert changed == {
        "actions.reclaim.stale_running.enabled",
        "sagas.reclaim.stale_running.enabled",
        "reclaim.dead_workers.enabled",
        "repair.enabled",
        "loop.enabled",
    }


def test_recommended_keeps_what_an_override_does_not_name() -> None:
    settings = Settings.recommended(repair={"batch_size": 5}, **{"schema.table_prefix": "x_"})
    assert (settings.repair.enabled, settings.repair.batch_size, settings.schema.table_prefix) == (True, 5, "x_")


def test_a_section_given_as_its_dataclass_replaces_that_section() -> None:
    settings = Settings.recommended(repair=Repair(batch_size=5))
    assert settings.repair == Repair(batch_size=5)
    assert settings.reclaim.dead_workers.enabled


def test_settings_take_a_mapping_for_a_section_at_any_level() -> None:
    by_mapping = Settings(repair={"backoff": {"base_seconds": 20}})  # type: ignore[arg-type]
    assert by_mapping == Settings(repair=Repair(backoff=Backoff(20, 300)))
    assert by_mapping == Settings(repair=Repair(backoff={"base_seconds": 20}))  # type: ignore[arg-type]


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_nested_and_dotted_mappings_and_the_environment_agree(values: dict[str, Any]) -> None:
    dotted = Settings.from_mapping(values)
    environ = {ENV_PREFIX + key.upper().replace(".", "__"): str(value) for key, value in values.items()}
    environ |= {"PATH": "/bin", "DRAMATIQ_SAGA_APP": "shop"}

    assert Settings.from_mapping(nested(values)) == dotted
    assert Settings.from_env(environ) == dotted
    assert dict(dotted.items()) == DEFAULTS | values


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_every_accepted_tree_is_stable_under_being_given_back(values: dict[str, Any]) -> None:
    settings = Settings.from_mapping(values)
    assert Settings.from_mapping(dict(settings.items())) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert hash(settings) == hash(Settings.from_mapping(values))


def test_durations_may_be_timedeltas_and_are_stored_as_numbers() -> None:
    settings = Settings.from_mapping(
        {
            "repair.grace_seconds": timedelta(minutes=2),
            "loop.monitor_seconds": timedelta(milliseconds=2500),
            "prune.retention_days": timedelta(hours=36),
        }
    )
    assert settings.repair.grace_seconds == 120 and type(settings.repair.grace_seconds) is int
    assert settings.loop.monitor_seconds == 2.5
    assert settings.prune.retention_days == 1.5


def test_policies_are_stored_as_enum_members() -> None:
    settings = Settings.from_mapping({"children.default_close_policy": "Cancel"})
    assert settings.children.default_close_policy is ChildClosePolicy.CANCEL


def test_hooks_are_kept_as_they_are() -> None:
    settings = Settings(context=Context(capture=dict, restore=print))
    assert settings.context.capture is dict and settings.context.restore is print


def takes_none() -> str:
    return "captured"


def takes_one(captured: str) -> None: ...


class Hooks:
    capture = staticmethod(takes_none)


def test_hooks_may_be_named_and_are_found_at_once() -> None:
    """CTX-1: a hook that cannot be called is an error when the settings are made, not when a message comes."""
    named = {"capture": f"{__name__}:takes_none", "restore": f"{__name__}:takes_one"}
    prefix = f"{ENV_PREFIX}CONTEXT__"
    environment = {prefix + "CAPTURE": f" {__name__}:Hooks.capture ", prefix + "RESTORE": named["restore"]}
    for settings in (Settings.from_mapping({"context": named}), Settings.from_env(environment)):
        assert settings.context.capture is not None and settings.context.restore is not None
        assert settings.context.capture() == "captured" and settings.context.restore("captured") is None


def test_a_hook_in_a_module_that_is_still_being_imported_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_made.py").write_text(
        "from dramatiq_saga import Settings\n"
        "settings = Settings.from_mapping({'context.capture': 'half_made:capture'})\n"
        "def capture(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match=r"context\.capture: names 'half_made:capture'.*in one of their own"):
        importlib.import_module("half_made")


def test_automatic_context_and_hooks_of_ones_own_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"context\.auto: is for runs without hooks"):
        Settings.from_mapping({"context": {"auto": True, "restore": print}})


@pytest.mark.parametrize("text", ["true", "True", "YES", "on", "1", " true "])
def test_the_environment_knows_the_usual_words_for_true(text: str) -> None:
    assert Settings.from_env({"DRAMATIQ_SAGA__REPAIR__ENABLED": text}).repair.enabled


@pytest.mark.parametrize("text", ["none", "NULL", ""])
def test_the_environment_can_say_none(text: str) -> None:
    assert Settings.from_env({"DRAMATIQ_SAGA__LOGGING__ANOMALY_LEVEL": text}).logging.anomaly_level is None


def test_the_environment_goes_on_top_of_a_base() -> None:
    settings = Settings.from_env({"DRAMATIQ_SAGA__REPAIR__BATCH_SIZE": "7"}, base=Settings.recommended())
    assert (settings.repair.enabled, settings.repair.batch_size) == (True, 7)


def test_the_process_environment_is_read_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAMATIQ_SAGA__REPAIR__ENABLED", "true")
    assert not Settings().repair.enabled
    assert Settings.from_env().repair.enabled


def test_a_settings_object_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().repair.enabled = True  # type: ignore[misc]


def shown(value: Any) -> str:
    return f"`{str(value) if isinstance(value, StrEnum) else value!r}`"


def table(keys: list[SettingKey]) -> str:
    lines = ["| key | default | environment | meaning |", "|---|---|---|---|"]
    for key, default, env, meaning in keys:
        lines.append(f"| `{key}` | {shown(default)} | {f'`{env}`' if env else 'only in code'} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_the_reference_page_and_the_code_agree() -> None:
    """Run this file as a script to write the table anew."""
    assert [key.key for key in reference()] == list(DEFAULTS)
    before, rest = PAGE.read_text().split("<!-- table -->\n")[:2]
    assert before and rest.split("<!-- end of table -->")[0] == table(list(reference()))


if __name__ == "__main__":
    start, _, end = PAGE.read_text().partition("<!-- table -->\n")
    PAGE.write_text(
        f"{start}<!-- table -->\n{table(list(reference()))}<!-- end of table -->{end.partition('<!-- end of table -->')[2]}"
    )
    sys.exit(0)
