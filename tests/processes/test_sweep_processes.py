"""Sweeps without cron, in real processes: in workers, on a schedule, and many at the same moment (LOOP-1, C58)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import sweep_storm
from tests.support.field import Field
from tests.support.gates import Gates
from tests.support.processes import Process
from tests.support.waiting import eventually

#: Few, because many processes share few processors; a hundred rounds of six were run when this was written.
ROUNDS = int(os.environ.get("SWEEP_STORM_ROUNDS", "4"))
PROCESSES = int(os.environ.get("SWEEP_STORM_PROCESSES", "3"))


def lose_everything(field: Field) -> None:
    field.sql("DELETE FROM {messages}")


def passes(field: Field, kind: str) -> int:
    return field.count("SELECT number FROM {passes} WHERE name = ?", kind)


def test_workers_with_a_loop_make_good_what_a_queue_has_lost(field: Field) -> None:
    """LOOP-1: two processes, no cron; one of them is killed, and the other goes on."""
    field.settings(
        repair__enabled=True, repair__grace_seconds=0, loop__enabled=True, loop__monitor_seconds=0.2, loop__repair_seconds=0.2
    )
    run = field.send("job", "step")
    lose_everything(field)
    workers = [field.worker(threads=1) for _ in range(2)]
    field.wait_ended(run)
    workers[0].kill()
    before = passes(field, "monitor")
    eventually(lambda: passes(field, "monitor") > before + 1)
    assert workers[1].terminate() == 0
    assert field.count("SELECT COUNT(*) FROM {passes} WHERE ended_at IS NULL AND name = 'monitor'") == 0


def test_a_schedule_goes_on_after_a_sleep_and_stops_in_order(field: Field) -> None:
    """LOOP-1, C53: it says its zone; SIGSTOP is what a machine's sleep looks like to it; SIGTERM ends it with status 0."""
    field.settings(repair__enabled=True, repair__grace_seconds=0)
    schedule = field.start("schedule", "--monitor-seconds", "0.1", "--repair-seconds", "0.1", "--timezone", "Europe/Berlin")
    schedule.wait_for_output(
        " monitor every 0.1 s; repair every 0.1 s; prune of what ended over 90 days ago daily at 04:15 Europe/Berlin"
    )
    eventually(lambda: passes(field, "monitor") > 1)
    schedule.send(signal.SIGSTOP)  # it may hold the file's lock: nothing is written until it goes on
    now = field.operator.store.clock.now()
    eventually(lambda: field.operator.store.clock.now() > now + 1500, because="fifteen passes have been missed")
    schedule.send(signal.SIGCONT)
    field.send("job", "step")
    lose_everything(field)
    schedule.wait_for_output("Z repair: 1 driven (runs)")
    assert schedule.terminate() == 0
    assert schedule.output().endswith("schedule: stopped by SIGTERM\n")
    assert field.count("SELECT COUNT(*) FROM {passes} WHERE ended_at IS NULL") == 0


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_schedule_outlives_its_connections(database_url: str, make_field: Callable[..., Field]) -> None:
    """LOOP-1, C41, C59: every connection of the process is cut by the server; a pass may fail, the next ones do not."""
    field = make_field(database_url)
    schedule = field.start("schedule", "--monitor-seconds", "0.1", "--prune-at", "never")
    for _ in range(3):
        before = passes(field, "monitor")
        eventually(lambda: passes(field, "monitor") > before + 1)
        field.count(
            "SELECT COUNT(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database() "
            "AND query LIKE ?",
            f"%{field.env['RECOVERY_APP_PREFIX']}passes%",
        )
    before = passes(field, "monitor")
    eventually(lambda: passes(field, "monitor") > before + 1)
    assert schedule.terminate() == 0


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_sweeps_of_many_processes_at_the_same_moment_do_everything_once(
    database_url: str, table_prefix: str, gates: Gates, python_process: Callable[..., Process]
) -> None:
    """C58: by command and by scheduler; no timer fires twice, nothing expires twice, no message is sent again twice."""
    bench = sweep_storm.make(database_url, table_prefix)
    env = {sweep_storm.DATABASE: database_url, sweep_storm.PREFIX: table_prefix, "SAGA_TEST_GATES": str(gates.directory)}
    code = "from tests.processes.sweep_storm import storm; storm({way!r}, {rounds})"
    ways = [("command", "scheduler")[number % 2] for number in range(PROCESSES)]
    storms = [python_process("-c", code.format(way=way, rounds=ROUNDS), env=env) for way in ways]
    try:
        for number in range(ROUNDS):
            gates.wait_reached(f"round-{number}", times=PROCESSES)
            runs = prepare(bench)
            gates.open(f"round-{number}")
            for storm in storms:
                storm.wait_for_output(f"round {number} is over")
            assert [events(bench, runs, kind) for kind in runs] == [{"action.redispatched": 3}, {"flow.redriven": 3}, *EXPIRED]
    finally:
        bench.close()


#: What the history tells of two runs whose wait has timed out, and of two that are overdue.
EXPIRED = [{"signal.timed_out": 2}, {"flow.expired": 2}]


def prepare(bench: Any) -> dict[str, list[Any]]:
    """Something for each rule: steps and runs whose messages are lost, waits and runs that are overdue."""
    driven = [bench.send() for _ in range(3)]
    plain, bench.flow_function = bench.flow_function, sweep_storm.waits
    waiting, overdue = [bench.send() for _ in range(2)], [bench.send(expires_in=3600) for _ in range(2)]
    for run in waiting + overdue:
        bench.drive(run)
    bench.flow_function = plain
    for run in driven:
        bench.drive(run)
    unseen = [bench.send() for _ in range(3)]
    bench.lose_messages()
    for run in driven:
        bench.write("UPDATE {action_runs} SET created_at = 1 WHERE run_id = ?", run.id)
    for run in unseen:
        bench.write("UPDATE {flow_runs} SET woken_at = 1 WHERE id = ?", run.id)
    for run in waiting:
        bench.write("UPDATE {waits} SET due_at = 1 WHERE run_id = ?", run.id)
    for run in overdue:
        bench.write("UPDATE {flow_runs} SET expires_at = 1 WHERE id = ?", run.id)
    return {"driven": driven, "unseen": unseen, "waiting": waiting, "overdue": overdue}


def events(bench: Any, runs: dict[str, list[Any]], kind: str) -> dict[str, int]:
    """How often which sweep has told of something in these runs."""
    told = [event.type for run in runs[kind] for event in run.events()]
    words = ("action.redispatched", "flow.redriven", "signal.timed_out", "flow.expired")
    return {word: told.count(word) for word in words if word in told}
