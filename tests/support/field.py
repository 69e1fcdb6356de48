"""One application in the field: what a test needs to start its workers, type its commands and read its rows.

The application is ``tests/processes/recovery_app.py``, or another that reads the same variables. Commands are typed into the
real program, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from dramatiq_saga import Settings
from dramatiq_saga.operations import Operator
from dramatiq_saga.reports import RunReport, StepReport
from tests.support.processes import ROOT, Process, WorkerProcess
from tests.support.waiting import DEADLINE, eventually

APP = "tests.processes.recovery_app"
VARIABLE = "RECOVERY_APP_"


class Field:
    """``env`` is what every process of the application finds in its environment."""

    def __init__(
        self,
        database: str,
        *,
        prefix: str,
        shared: dict[str, str],
        worker_process: Callable[..., WorkerProcess],
        python_process: Callable[..., Process],
        redis: str | None = None,
        app: str = APP,
    ) -> None:
        self.app = app
        self.env = {**shared, f"{VARIABLE}DATABASE": database, f"{VARIABLE}PREFIX": prefix}
        if redis is not None:
            self.env[f"{VARIABLE}REDIS"] = redis
        self._worker_process = worker_process
        self._python_process = python_process
        self.operator = Operator.on_database(database, settings=Settings.from_mapping({"schema.table_prefix": prefix}))
        self.operator.init()

    def settings(self, **values: Any) -> None:
        """Settings of every process that is started from now on; keys with ``__`` for dots."""
        self.env[f"{VARIABLE}SETTINGS"] = json.dumps({key.replace("__", "."): value for key, value in values.items()})

    def set(self, **variables: Any) -> None:
        """``retry_after``, ``without``, …: of every process that is started from now on."""
        self.env.update({VARIABLE + name.upper(): str(value) for name, value in variables.items()})

    def worker(self, **options: Any) -> WorkerProcess:
        env = {**self.env, **options.pop("env", {})}
        return self._worker_process(self.app, env=env, **options)

    def command(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Type a command and wait for its end."""
        return subprocess.run(
            [sys.executable, "-m", "dramatiq_saga.cli", "--app", self.app, *arguments],
            cwd=ROOT,
            env={**os.environ, **self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def done(self, *arguments: str) -> Any:
        """What a command that must succeed prints with ``--json``."""
        finished = self.command(*arguments, "--json")
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    def start(self, *arguments: str, **variables: str) -> Process:
        """Type a command and do not wait for it."""
        env = {**self.env, **{VARIABLE + name.upper(): value for name, value in variables.items()}}
        return self._python_process("-m", "dramatiq_saga.cli", "--app", self.app, *arguments, env=env)

    def send(self, workflow: str, *args: Any, **kwargs: Any) -> str:
        """Start a run; its id."""
        sent = self.done("send", workflow, "--args", json.dumps(args), "--kwargs", json.dumps(kwargs))
        return str(sent["run_id"])

    def send_many(self, count: int, workflow: str, *args: Any, **kwargs: Any) -> list[str]:
        """Start several runs alike, from one process; their ids."""
        code = f"from {self.app} import {workflow} as w\nfor _ in range({count}): print(w.send(*{args!r}, **{kwargs!r}).id)"
        env = {**os.environ, **self.env}
        sent = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True
        )
        return sent.stdout.split()

    def signal(self, run_id: str, name: str, payload: Any = None) -> None:
        """Signal a run, from a process that is no worker."""
        code = f"from dramatiq_saga import get_flow\nimport {self.app}\nget_flow({run_id!r}).signal({name!r}, {payload!r})"
        env = {**os.environ, **self.env}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)

    def run(self, run_id: str) -> RunReport:
        return self.operator.show_run(run_id, events=True)

    def step(self, run_id: str, sequence: int = 1) -> StepReport:
        return self.run(run_id).steps[sequence - 1]

    def wait_ended(self, run_id: str, status: str = "completed", *, timeout: float = DEADLINE) -> None:
        eventually(
            lambda: self.run(run_id).ended_at is not None,
            timeout,
            because=f"run {run_id} ends (it is {self.run(run_id).status})",
        )
        assert self.run(run_id).status == status, self.run(run_id).error

    def sql(self, text: str, *parameters: Any) -> int:
        """Change rows behind everybody's back."""
        return self.operator.store.write(lambda tx: tx.run(text, parameters))

    def count(self, text: str, *parameters: Any) -> int:
        row = self.operator.store.read(lambda tx: tx.one(text, parameters))
        return int(row[0]) if row else 0
