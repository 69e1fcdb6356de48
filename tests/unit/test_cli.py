"""The command line, command by command: what it prints, what it refuses, and how it ends (API, "Command line")."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Worker

from dramatiq_saga import FlowHandle, get_flow
from dramatiq_saga.cli import main
from dramatiq_saga.cli.answer import Answer, duration, moment, relative, table
from dramatiq_saga.errors import WriteRefusedError
from tests.support.processes import ROOT
from tests.support.servers import random_name
from tests.support.waiting import eventually

SHOP = """
import os
import dramatiq
from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

settings = Settings.from_env(base=Settings.from_mapping({"repair": {"enabled": True, "grace_seconds": 1}}))
broker = SQLiteBroker("shop.db")
broker.add_middleware(SagaMiddleware(settings=settings))
dramatiq.set_broker(broker)
plan = {}  # actor name -> what it does

def do(name, *args):
    return plan[name](*args) if name in plan else {"by": name}

@dramatiq.actor(max_retries=3, min_backoff=600_000, max_backoff=600_000)
def charge(order): return do("charge", order)

@dramatiq.actor(max_retries=0)
def refund(order): return do("refund", order)

@dramatiq.actor(max_retries=0)
def mail(order): return do("mail", order)

@dramatiq.actor(max_retries=3, min_backoff=600_000, max_backoff=600_000)
def ship(order): return do("ship", order)

@workflow(tags={"team": "shop"})
def checkout(flow: Flow, order: str, express: bool = False):
    flow.action(charge, order).compensate_with(refund, order).run()
    flow.run(mail, order)
    flow.run(ship, order)
    return {"order": order}

@workflow
def restock(flow: Flow): flow.run(mail, "all")

@workflow
def newsletter(flow: Flow):
    flow.action(mail, "all").retry_on_signal("paper", max_retries=1, wait_seconds=3600).run()

@workflow
def lenient(flow: Flow):
    flow.optional_action(charge, "a").compensate_with(refund, "a").run()
    flow.sleep(3600)

@workflow
def campaign(flow: Flow):
    flow.child(newsletter).retry_on_signal("ink").run()

@workflow
def varied(flow: Flow):
    flow.side_effect("rate", lambda: {"EUR": 1.5})
    flow.patched("new-price")
    flow.parallel(flow.action(mail, "a"), flow.action(mail, "b")).run()
    flow.sleep(3600)

revisions = {"asks": True}

@workflow
def versed(flow: Flow):
    flow.run(mail, "a")
    if revisions["asks"]: flow.patched("terms")
    flow.await_signal("go")
    flow.run(mail, "b")

@workflow
def withdrawal(flow: Flow):
    for item in ("a", "b", "c"):
        flow.action(charge, item).compensate_with(refund, item).run()
    flow.sleep(3600)

@workflow
def wide(flow: Flow, count: int):
    flow.parallel(*(flow.action(ship, number) for number in range(count))).max_in_flight(2).run()
"""


@dataclass
class Output:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def value(self) -> Any:
        return json.loads(self.out)


class Shop:
    """The application, and the program run on it."""

    def __init__(self, name: str, directory: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.name = name
        self.directory = directory
        self._capture = capture

    def __call__(self, *arguments: str) -> Output:
        """The program with ``--app``."""
        return self.plainly("--app", self.name, *arguments)

    def plainly(self, *arguments: str) -> Output:
        """The program with these arguments and no others."""
        self._capture.readouterr()
        status = main(arguments)
        captured = self._capture.readouterr()
        assert "Traceback" not in captured.err
        return Output(status, captured.out, captured.err)

    def write(self, code: str, name: str | None = None) -> str:
        """A module beside the application; its name."""
        name = name or random_name()
        (self.directory / f"{name}.py").write_text(code, encoding="utf-8")
        return name

    @property
    def module(self) -> Any:
        return sys.modules[self.name]

    def start(self, order: str = "order-42", *more: str) -> FlowHandle[Any]:
        """Start a run as an operator would."""
        sent = self("send", "checkout", "--args", json.dumps([order]), *more)
        assert sent.status == 0, sent.err
        return get_flow(sent.out.strip(), broker=self.module.broker)

    def plan(self, **bodies: Callable[..., Any]) -> None:
        self.module.plan.update(bodies)

    def work_until(self, fact: Callable[[], Any]) -> None:
        worker = Worker(self.module.broker, worker_timeout=10, worker_threads=1)
        worker.start()
        try:
            eventually(fact)
        finally:
            worker.stop()

    def failed_once(self) -> FlowHandle[Any]:
        """A run whose third step has failed once and waits for its next try."""
        run = self.start()
        self.plan(ship=fail)
        self.work_until(
            lambda: len(run.actions()) == 3 and run.actions()[2].next_try_at and run.actions()[2].status == "failed"
        )
        return run

    def sql(self, text: str, *parameters: Any) -> list[Any]:
        """Rows read or changed behind everybody's back."""
        connection = sqlite3.connect(self.directory / "shop.db")
        try:
            with connection:
                return connection.execute(text, parameters).fetchall()
        finally:
            connection.close()


def fail(*_: Any) -> Any:
    raise ValueError("no \x1b[31mtruck\u202e")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRAMATIQ_SAGA_APP", raising=False)
    made = Shop(random_name(), tmp_path, capsys)
    made.write(SHOP, made.name)
    path, modules = list(sys.path), set(sys.modules)
    yield made
    if made.name in sys.modules:  # the program has loaded it: what its broker keeps beside it would go on
        made.module.broker.close()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def settings(shop: Shop, monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    for key, value in values.items():
        monkeypatch.setenv("DRAMATIQ_SAGA__" + key.upper().replace(".", "__"), value)


# --- finding the application -----------------------------------------------------------------------------------------


def test_without_an_application_or_a_database_it_asks_for_one(shop: Shop) -> None:
    done = shop.plainly("list")
    assert done.status == 2
    assert "--app MODULE" in done.err
    assert "--database URL" in done.err


def test_the_environment_names_the_application(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAMATIQ_SAGA_APP", shop.name)
    assert shop.plainly("list").out == "there are no runs\n"


def test_a_database_is_chosen_before_the_application_of_the_environment(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAMATIQ_SAGA_APP", "nothing_of_this_name")
    assert shop("init").status == 0
    assert shop.plainly("--database", "shop.db", "list").status == 0


def test_application_and_database_together_are_refused(shop: Shop) -> None:
    assert shop("--database", "shop.db", "list").status == 2


def test_common_options_may_stand_before_or_after_the_command(shop: Shop) -> None:
    run = shop.start()
    before = shop.plainly("--app", shop.name, "--json", "show", run.id).value
    after = shop.plainly("show", run.id, "--json", "--app", shop.name).value
    assert before == after


def test_a_module_that_is_not_there_is_named_with_where_it_was_looked_for(shop: Shop) -> None:
    done = shop.plainly("--app", "no_such_shop", "list")
    assert done.status == 1
    assert "no_such_shop" in done.err
    assert str(shop.directory) in done.err


def test_a_module_named_like_its_file_is_told_how_it_is_named(shop: Shop) -> None:
    done = shop.plainly("--app", f"{shop.name}.py", "list")
    assert done.status == 1
    assert f"--app {shop.name}\n" in done.err


def test_what_the_application_prints_is_not_the_answer(shop: Shop) -> None:
    """A shell that captures the answer gets nothing else, whatever the application's modules and workflows print."""
    name = shop.write("print('loading the shop')\n" + SHOP)
    done = shop.plainly("--app", name, "send", "restock", "--json")
    assert done.value["started"] is True
    assert "loading the shop" in done.err


def test_a_module_that_breaks_is_named_with_its_line(shop: Shop) -> None:
    name = shop.write("import os\nraise KeyError('SHOP_URL')\n")
    done = shop.plainly("--app", name, "list")
    assert done.status == 1
    assert "KeyError: 'SHOP_URL'" in done.err
    assert f"{name}.py, line 2" in done.err


class Without:
    """As if a package were not installed."""

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] == self.missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_module_whose_own_import_is_missing_is_told_from_a_missing_module(shop: Shop) -> None:
    name = shop.write("import not_installed_here\n")
    done = shop.plainly("--app", name, "list")
    assert done.status == 1
    assert f"module '{name}' cannot be imported: No module named 'not_installed_here'" in done.err
    assert "extra" not in done.err


@pytest.mark.parametrize(
    ("missing", "module", "extra"),
    [("redis", "dramatiq.brokers.redis", "redis"), ("pika", "dramatiq.brokers.rabbitmq", "rabbitmq")],
)
def test_a_brokers_package_that_is_missing_names_the_extra(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, missing: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Without(missing), *sys.meta_path])
    done = shop.plainly("--app", shop.write(f"import {module}\n"), "list")
    assert done.status == 1
    assert f"No module named '{missing}'" in done.err
    assert f"pip install 'PATH-OF-THE-CHECKOUT[{extra}]'" in done.err


def test_a_module_without_a_broker_does_not_get_one_made_up(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dramatiq itself would fall back to RabbitMQ on this machine."""
    monkeypatch.setattr("dramatiq.broker.global_broker", None)
    name = shop.write("x = 1\n")
    done = shop.plainly("--app", name, "list")
    assert (done.status, done.out) == (1, "")
    assert "dramatiq.set_broker(broker)" in done.err


TWO = """
from dramatiq.brokers.stub import StubBroker
from dramatiq_saga import SagaMiddleware
from dramatiq_saga.brokers import SQLiteBroker
one, two, plain = SQLiteBroker("one.db"), SQLiteBroker("two.db"), StubBroker()
one.add_middleware(SagaMiddleware())
two.add_middleware(SagaMiddleware())
def make():
    import dramatiq
    dramatiq.set_broker(two)
"""


def test_a_module_with_several_brokers_asks_which_one(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq.broker.global_broker", None)
    name = shop.write(TWO)
    done = shop.plainly("--app", name, "list")
    assert done.status == 1
    assert f"--app {name}:one or --app {name}:two" in done.err
    assert "plain" not in done.err
    assert shop.plainly("--app", f"{name}:one", "list").status == 0
    assert shop.plainly("--app", f"{name}:make", "list").status == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("three", "has no 'three'"),
        ("TWO", "has no"),
        ("plain", "SagaMiddleware"),
        ("__name__", "no broker but str"),
        ("SagaMiddleware", "is a class, no broker and no function that sets one; or name the broker"),
        ("act", "is an actor, no broker"),
        ("breaks", "breaks() has failed: ZeroDivisionError: division by zero ("),
        ("leaves", "leaves() has failed: SystemExit: 3"),
    ],
)
def test_a_name_that_is_no_broker_for_sagas_is_refused(shop: Shop, path: str, words: str) -> None:
    calls = (
        "import dramatiq, sys\nact = dramatiq.actor(lambda: None, actor_name='act', broker=one)\n"
        "def breaks(): 1 / 0\ndef leaves(): sys.exit(3)\n"
    )
    done = shop.plainly("--app", f"{shop.write(TWO + calls)}:{path}", "list")
    assert (done.status, done.out) == (1, "")
    assert words in done.err


def test_a_global_broker_without_the_middleware_points_to_the_one_that_has_it(shop: Shop) -> None:
    name = shop.write(TWO + "import dramatiq\ndramatiq.set_broker(plain)\n")
    done = shop.plainly("--app", name, "list")
    assert done.status == 1
    assert "StubBroker) has no SagaMiddleware" in done.err
    assert f"--app {name}:one or --app {name}:two" in done.err


# --- a database alone ------------------------------------------------------------------------------------------------


def test_a_database_is_enough_to_look(shop: Shop) -> None:
    run = shop.start()
    database = f"sqlite:///{shop.directory}/shop.db"
    for command in (["list"], ["show", run.id, "--events"], ["queues"], ["stuck"]):
        done = shop.plainly("--database", database, *command)
        assert (done.status, done.err) == (0, "")
        assert done.out == shop(*command).out or command[0] in ("show", "list")  # those tell how long ago
    assert run.id in shop.plainly("--database", database, "list").out


def test_tables_that_are_not_there_are_told_with_the_prefix_that_was_looked_for(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFE-3: mostly it is the prefix that is missing, and not the tables."""
    shop("init")
    monkeypatch.setenv("DRAMATIQ_SAGA__SCHEMA__TABLE_PREFIX", "other_")
    done = shop.plainly("--database", "shop.db", "stuck")
    assert done.status == 1
    assert "none begins with 'other_' (schema.table_prefix, DRAMATIQ_SAGA__SCHEMA__TABLE_PREFIX)" in done.err


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_database_that_cannot_be_reached_refuses_the_connection_and_no_write(shop: Shop, scheme: str) -> None:
    """A command that only looks has written nothing."""
    done = shop.plainly("--database", f"{scheme}://nobody@127.0.0.1:1/shop", "stuck")
    assert done.status == 1
    assert "the database refused the connection (connect)" in done.err


@pytest.mark.parametrize(
    "command",
    [
        ["kick", "x"],
        ["send", "checkout"],
        ["sweep"],
        ["cancel", "x", "--keep"],
        ["resume-rollback", "x"],
        ["abandon-undo", "x", "1"],
    ],
)
def test_a_database_is_not_enough_to_act(shop: Shop, command: list[str]) -> None:
    shop("init")
    done = shop.plainly("--database", "shop.db", *command)
    assert done.status == 1
    assert "needs the application" in done.err
    assert "--app" in done.err


@pytest.mark.parametrize("command", [["list"], ["show", "x"], ["queues"]])
def test_looking_at_a_file_that_is_not_there_does_not_create_it(shop: Shop, command: list[str]) -> None:
    done = shop.plainly("--database", "shpo.db", *command)
    assert done.status == 1
    assert f"there is no file {shop.directory / 'shpo.db'}:" in done.err
    assert not (shop.directory / "shpo.db").exists()


def test_a_database_without_tables_is_told_and_init_mends_it(shop: Shop) -> None:
    sqlite3.connect("empty.db").close()
    done = shop.plainly("--database", "empty.db", "list")
    assert done.status == 1
    assert "`dramatiq-saga init`" in done.err
    assert shop.plainly("--database", "empty.db", "init").out.startswith("migrated: 0001")
    assert shop.plainly("--database", "empty.db", "list").out == "there are no runs\n"


def test_the_environment_tells_the_table_prefix_of_a_database(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(shop, monkeypatch, {"schema.table_prefix": "other_"})
    assert shop.plainly("--database", "new.db", "init", "--json").value["version"] == "0001"
    connection = sqlite3.connect("new.db")
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    connection.close()
    assert "other_flow_runs" in names
    assert not any(name.startswith("saga_") for name in names)


@pytest.mark.parametrize("url", ["redis://localhost/0", "mysql://nowhere", "no/such/directory/x.db"])
def test_an_address_that_cannot_be_is_refused_without_a_traceback(shop: Shop, url: str) -> None:
    done = shop.plainly("--database", url, "init")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("dramatiq-saga: ")


# --- init and sweep --------------------------------------------------------------------------------------------------


def test_init_is_safe_to_repeat(shop: Shop) -> None:
    assert shop("init").out == "migrated: 0001_initial; the tables are at version 0001\n"
    assert shop("init").out == "nothing to do: the tables are at version 0001\n"
    assert shop("init", "--json").value == {"applied": [], "version": "0001"}


def test_a_sweep_prints_one_line_of_counts(shop: Shop) -> None:
    run = shop.start()
    assert shop("sweep").out == "sweep: no held run was due; repair: nothing was lost\n"
    shop.sql("DELETE FROM saga_messages")
    shop.sql("UPDATE saga_flow_runs SET woken_at = woken_at - 60000")
    assert shop("sweep").out == "sweep: no held run was due; repair: 1 driven (runs)\n"
    shop.work_until(lambda: run.status == "completed")


def test_a_sweep_without_repair_says_so(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCTOR-1: a sweep says when repair is off, and counts what nothing will pick up; exit 0, whatever it found."""
    settings(shop, monkeypatch, {"repair.enabled": "off"})
    shop.start()
    shop.sql("UPDATE saga_flow_runs SET woken_at = 1")
    done = shop("sweep")
    assert done.status == 0
    assert done.out == (
        "sweep: no held run was due; repair is off (repair.enabled): unless their messages still come, nothing will pick up 1 not driven\n"
    )
    assert shop("sweep", "--json").value["unrepaired"] == {"R1": 0, "R2": 1, "R3": 0}


def test_a_store_that_refuses_ends_a_sweep_with_a_clear_line(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.start()

    def refuse(*_: Any) -> Any:
        raise WriteRefusedError("the database refused the write: database is locked", sqlite_errorcode=5)

    monkeypatch.setattr("dramatiq_saga.operations.sweep", refuse)
    done = shop("sweep")
    assert (done.status, done.out) == (1, "")
    assert done.err == "dramatiq-saga: the database refused the write: database is locked\n"


# --- send ------------------------------------------------------------------------------------------------------------


def test_send_prints_the_id_and_nothing_else(shop: Shop) -> None:
    done = shop("send", "checkout", "--args", '["order-42"]', "--kwargs", '{"express": true}')
    assert (done.status, done.err) == (0, "")
    (run_id,) = done.lines
    assert shop("show", run_id, "--json").value["args"] == '[["order-42"],{"express":true}]'


def test_a_second_run_with_an_id_is_not_started_and_the_note_goes_to_stderr(shop: Shop) -> None:
    first, second = (shop("send", "checkout", "--args", '["a"]', "--run-id", "mine") for _ in range(2))
    assert (first.out, first.err) == ("mine\n", "")
    assert (second.status, second.out) == (0, "mine\n")
    assert "nothing was started" in second.err
    other = shop("send", "checkout", "--args", '["b"]', "--run-id", "mine")
    assert other.status == 1
    assert "is taken" in other.err
    assert shop("send", "checkout", "--args", '["a"]', "--run-id", "mine", "--json").value == {
        "run_id": "mine", "workflow": "checkout", "started": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--args", "order-42"], "--args is not JSON"),
        (["--args", '{"order": 1}'], "--args takes an array, not an object"),
        (["--args", '"order-42"'], "--args takes an array, not a string"),
        (["--kwargs", "[1]"], "--kwargs takes an object, not an array"),
        (["--args", "null"], "not null"),
        (["--args", "[1, 2, 3]"], "its signature is checkout(order: str"),
        ([], "missing a required argument: 'order'"),
        (["--args", '["a"]', "--kwargs", '{"colour": 1}'], "colour"),
        (["--args", '["a"]', "--run-id", "x" * 200], "128"),
        (["--args", "[NaN]"], "cannot be stored"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_how_they_are_written(shop: Shop, arguments: list[str], words: str) -> None:
    done = shop("send", "checkout", *arguments)
    assert (done.status, done.out) == (1, "")
    assert words in done.err


def test_signal_tells_a_run_and_is_refused_where_it_takes_none(shop: Shop) -> None:
    """SIG-1, SIG-3: a payload in JSON, a key that counts once, and words for a run that has ended, an unknown one, and what is no JSON."""
    run = shop.start()
    for _ in range(2):
        told = shop("signal", run.id, "paid", "--payload", '{"by": "ann"}', "--key", "d-1")
        assert (told.status, told.out) == (0, f"run {run.id} has signal paid; it is pending\n")
    assert [(signal.name, signal.payload, signal.key) for signal in run.signals()] == [("paid", {"by": "ann"}, "d-1")]
    assert shop("signal", run.id, "paid", "--json").value == {
        "run_id": run.id, "signal": "paid", "key": None, "status": "pending",
    }  # fmt: skip
    assert run.signals()[1].payload is None
    for arguments, words in [
        ((run.id, "paid", "--payload", "ann"), "--payload is not JSON"),
        ((run.id, "other", "--key", "d-1"), "key 'd-1' belongs to signal 'paid'"),
        ((run.id, ""), "a signal's name has between 1 and 191"),
        (("no-such-run", "paid"), "no run has the id"),
    ]:
        refused = shop("signal", *arguments)
        assert refused.status == 1
        assert words in refused.err
    run.cancel()
    for command in (["signal", run.id, "paid"], ["signal-retry", run.id]):
        refused = shop(*command)
        assert refused.status == 1
        assert "is cancelled and takes no signals" in refused.err
        assert f"`dramatiq-saga show {run.id}`" in refused.err, "a command, not a call of Python"
        assert "signal_if_running" not in refused.err
    assert len(run.signals()) == 2


def test_an_unknown_workflow_is_answered_with_those_that_are_meant(shop: Shop) -> None:
    assert "did you mean checkout?" in shop("send", "chekout").err
    assert "it declares campaign, checkout, lenient, newsletter, restock, varied" in shop("send", "xyz").err
    assert shop("send", "charge").status == 1  # an actor is no workflow
    name = shop.write("from dramatiq_saga.brokers import SQLiteBroker\nfrom dramatiq_saga import SagaMiddleware\n"
                      "b = SQLiteBroker('shop.db')\nb.add_middleware(SagaMiddleware())\n")  # fmt: skip
    assert "declares none" in shop.plainly("--app", f"{name}:b", "send", "checkout").err


# --- list ------------------------------------------------------------------------------------------------------------


def test_list_shows_the_newest_first_and_narrows(shop: Shop) -> None:
    one, two = shop.start("one"), shop.start("two")
    assert shop("send", "restock").status == 0
    two.tag("customer", 42)
    assert [line.split()[1] for line in shop("list").lines] == ["workflow", "restock", "checkout", "checkout"]
    assert [run["run_id"] for run in shop("list", "--workflow", "checkout", "--json").value] == [two.id, one.id]
    assert [run["run_id"] for run in shop("list", "--tag", "customer=42", "--tag", "team=shop", "--json").value] == [two.id]
    assert shop("list", "--tag", "customer=43").out == "no runs match\n"
    assert shop("list", "--status", "failed").out == "no runs match\n"
    one.cancel("by hand")
    (cancelled,) = shop("list", "--status", "cancelled", "--status", "failed", "--json").value
    assert (cancelled["run_id"], cancelled["reason"], cancelled["tags"]) == (one.id, "by hand", {"team": "shop"})
    assert cancelled["ended_at"].endswith("Z")


def test_a_list_that_is_cut_says_so(shop: Shop) -> None:
    for _ in range(3):
        shop.start()
    done = shop("list", "--limit", "2")
    assert len(done.lines) == 4
    assert done.lines[-1] == "(the newest 2; --limit shows more)"
    assert "(" not in shop("list", "--limit", "4").out


@pytest.mark.parametrize(
    "arguments", [["--status", "nope"], ["--limit", "0"], ["--limit", "x"], ["--tag", "novalue"], ["extra"]]
)
def test_bad_usage_ends_with_2(shop: Shop, arguments: list[str]) -> None:
    done = shop("list", *arguments)
    assert (done.status, done.out) == (2, "")
    assert "usage: " in done.err


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["show"], ["cancel", "x", "--keep", "--compensate"], ["queues", "frob"]]
)
def test_what_is_no_command_ends_with_2(shop: Shop, arguments: list[str]) -> None:
    assert shop(*arguments).status == 2


def test_send_gives_a_context_where_none_can_be_captured(shop: Shop) -> None:
    """CTX-1: refused with the way out, not sent without."""
    name = shop.write(
        SHOP.replace("base=Settings.from_mapping({", 'base=Settings.from_mapping({"context.capture": lambda: plan["tenant"], ')
    )
    refused = shop.plainly("--app", name, "send", "checkout", "--args", '["x"]')
    assert (refused.status, refused.out) == (1, "")
    assert "context cannot be captured here (KeyError: 'tenant'): give it with --context" in refused.err
    sent = shop.plainly("--app", name, "send", "checkout", "--args", '["x"]', "--context", '{"tenant": 7}')
    assert sent.status == 0, sent.err
    assert shop.sql("SELECT context FROM saga_flow_runs") == [(b'{"tenant":7}',)]
    assert 'context    {"tenant":7}' in shop("show", sent.out.strip()).lines
    assert shop.plainly("--app", name, "send", "checkout", "--args", '["x"]', "--context", "acme").status == 1


# --- show ------------------------------------------------------------------------------------------------------------


def test_show_says_which_try_is_next_and_when(shop: Shop) -> None:
    """NATIVE-6."""
    run = shop.failed_once()
    step = run.actions()[2]
    assert step.next_try_at is not None
    shown = shop("show", run.id).out
    assert f"   3  ship    failed: 1 try so far; next is try 2 of 4 at {moment(step.next_try_at)} (in " in shown
    value = shop("show", run.id, "--json").value["steps"][2]
    assert value["next_try"] == {"number": 2, "of": 4, "at": moment(step.next_try_at).replace(" ", "T")}
    assert "test_cli.py" in value["error"]["traceback"]
    # a database alone does not know the actor's tries, and does not guess
    assert "next is try 2 at" in shop.plainly("--database", "shop.db", "show", run.id).out


def test_show_tells_a_run_that_waits_for_its_first_drive(shop: Shop) -> None:
    run = shop.start()
    assert "waits for  a worker to start it" in shop("show", run.id).out


def test_show_tells_a_pending_and_a_running_step(shop: Shop) -> None:
    run = shop.failed_once()
    shop.sql("UPDATE saga_action_runs SET status = 'pending', repair_attempts = 2 WHERE sequence = 3")
    assert (
        "pending: next is try 2 of 4, as soon as a worker takes it; sent again 2 times by the doctor"
        in shop("show", run.id).out
    )
    shop.sql("UPDATE saga_action_runs SET status = 'running', worker_id = 'w-1', attempts = 2 WHERE sequence = 3")
    running = shop("show", run.id).out
    assert "running: try 2 of 4 since " in running
    assert "and nothing will ever reclaim it (reclaim is off for it)" in running
    assert "worker w-1, claim 2" in running
    shop.sql("UPDATE saga_action_runs SET reclaim_stale_at = 9999999999999 WHERE sequence = 3")
    assert "may be claimed again at 2286-11-20 17:46:39.999Z (in " in shop("show", run.id).out
    shop.sql("UPDATE saga_action_runs SET reclaim_stale_at = 1 WHERE sequence = 3")
    assert "may be claimed again since 1970-01-01 00:00:00.001Z" in shop("show", run.id).out


def test_show_says_of_an_undo_of_a_later_level_that_its_turn_has_not_come(shop: Shop) -> None:
    """COMP-1: no worker can take it yet."""
    run_id = shop("send", "withdrawal").out.strip()
    run = get_flow(run_id, broker=shop.module.broker)
    shop.work_until(lambda: run.status == "waiting")
    shop("cancel", run_id, "--compensate")
    undos = [line.strip() for line in shop("show", run_id).lines if "undo by refund" in line]
    behind = "undo by refund: pending: its turn comes when the undos before it have ended"
    assert undos == [behind, behind, "undo by refund: pending: next is try 1 of 1, as soon as a worker takes it"]
    shop.work_until(lambda: run.status == "cancelled")
    assert "its turn comes" not in shop("show", run_id).out


def test_show_tells_who_is_at_a_step_and_when_that_was_heard_from(shop: Shop) -> None:
    """RECLAIM-5: in the future, so that the worker lives however slow the machine is. The application has leases off."""
    run = shop.failed_once()
    shop.sql("UPDATE saga_action_runs SET status = 'running', worker_id = 'beat:w-1', attempts = 2 WHERE sequence = 3")
    shop.sql("INSERT INTO saga_workers (id, host, pid, started_at, seen_at) VALUES ('beat:w-1', 'w', 1, 1, 9999999900000)")
    assert "and nothing will ever reclaim it" in shop("show", run.id).out
    shown = shop.plainly("--database", "shop.db", "show", run.id)
    assert "worker w-1, claim 2, last heard from 2286-11-20 17:45:00.000Z (in " in shown.out
    assert "may be claimed again at 2286-11-20 17:46:00.000Z (in " in shown.out
    assert " unless its worker is heard from\n" in shown.out
    value = shop.plainly("--database", "shop.db", "--json", "show", run.id).value["steps"][2]
    assert (value["worker_seen_at"], value["lease_ends_at"]) == ("2286-11-20T17:45:00.000Z", "2286-11-20T17:46:00.000Z")
    shop.sql("UPDATE saga_workers SET seen_at = 1")
    assert (
        "may be claimed again since 1970-01-01 00:01:00.001Z, because its worker is silent"
        in shop.plainly("--database", "shop.db", "show", run.id).out
    )
    shop.sql("DELETE FROM saga_workers")
    assert "may be claimed again now, because its worker is silent" in shop.plainly("--database", "shop.db", "show", run.id).out


def test_show_tells_a_rollback_beside_the_steps_that_it_undoes(shop: Shop) -> None:
    shop.start()
    shop.plan(mail=fail)
    run = shop.start()
    shop.work_until(lambda: run.status == "failed")
    shown = shop("show", run.id).out
    assert "status     failed" in shown
    assert "error      step 2 (mail) failed: ValueError: no " in shown
    assert "rollback   done" in shown
    assert "      undo by refund: completed at " in shown
    assert "   2  mail    failed for good after 1 try at " in shown
    assert shop("list", "--status", "failed").lines[1].split()[2:4] == ["failed", "(undone)"]


def test_show_tells_a_halted_rollback_and_what_was_not_undone(shop: Shop) -> None:
    run = shop.start()
    shop.plan(mail=fail, refund=fail)
    shop.work_until(lambda: run.status == "failed")
    shown = shop("show", run.id).out
    assert "rollback   halted: what follows the failed undo was not undone" in shown
    assert "undo by refund: failed for good after 1 try" in shown
    assert "(undoing halted)" in shop("list").out


def test_show_tells_what_stands_between_the_steps(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the function asked for, in its order; payloads as previews (SAFE-2)."""
    run = get_flow(shop("send", "varied").out.strip(), broker=shop.module.broker)
    shop.work_until(lambda: run.status == "waiting")
    shop.sql(
        "INSERT INTO saga_signals (run_id, name, status, received_at, payload) VALUES (?, 'paid', 'received', 0, CAST('[7]' AS BLOB))",
        run.id,
    )
    shown = shop("show", run.id)
    begin = shown.lines.index("")
    titles = [re.split(" {2,}", line[4:].strip())[0] for line in shown.lines[begin + 1 :] if line[:4].strip()]
    assert titles == ["side effect rate", "version gate new-price", "parallel of 2", "mail", "mail", "timer"]
    assert '      value {"EUR":1.5}' in shown.lines
    assert "passed: this run goes the new way" in shown.out
    assert "signal     paid [7] came at 1970-01-01 00:00:00.000Z; nothing has waited for it yet" in shown.lines
    timer = shown.lines[-1]
    assert timer.startswith("   6  timer") and "waits until " in timer and timer.endswith("s)")
    value = shop("show", run.id, "--json").value
    assert [(entry["sequence"], entry["kind"], entry["status"]) for entry in value["entries"]] == [
        (1, "side effect", "recorded"),
        (2, "version gate", "recorded"),
        (3, "parallel", "ended"),
        (6, "timer", "waiting"),
    ]
    assert value["signals"] == [{"name": "paid", "payload": "[7]", "received_at": "1970-01-01T00:00:00.000Z"}]
    settings(shop, monkeypatch, {"history.store_payloads": "off"})
    hidden = shop.plainly("--database", "shop.db", "show", run.id)
    assert "EUR" not in hidden.out and "[7]" not in hidden.out and "side effect rate" in hidden.out


def test_show_tells_which_way_a_run_goes_at_a_version_gate(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """HISTORY-2: the recorded answer, in the text, in JSON and in the history; it is no payload, so SAFE-2 hides none of it."""
    settings(shop, monkeypatch, {"history.store_payloads": "off"})
    old = get_flow(shop("send", "versed").out.strip(), broker=shop.module.broker)
    shop.module.revisions["asks"] = False  # the code before the change
    shop.work_until(lambda: old.status == "waiting")
    shop.module.revisions["asks"] = True
    new = get_flow(shop("send", "versed").out.strip(), broker=shop.module.broker)
    old.signal("go")
    shop.work_until(lambda: new.status == "waiting" and old.status == "completed")
    for run, answer, line in (
        (new, "true", "passed: this run goes the new way"),
        (old, "false", "passed before the change: this run goes the old way"),
    ):
        shown = shop("show", run.id, "--events")
        assert re.search(rf"^ +[0-9]+  version gate terms +{line}$", shown.out, re.MULTILINE)
        assert re.search(rf"side_effect\.recorded +[0-9]+ +terms +patched: {answer}$", shown.out, re.MULTILINE)
        assert not any(line.startswith("      value") for line in shown.lines)
        value = shop("show", run.id, "--events", "--json").value
        assert [entry["value"] for entry in value["entries"] if entry["kind"] == "version gate"] == [answer]
        assert [event["detail"] for event in value["events"] if event["name"] == "terms"] == [f"patched: {answer}"]


def test_show_tells_how_the_members_of_a_block_stand(shop: Shop) -> None:
    """PAR-1: members stand under their block; of a large one only those that have something to say, unless all are asked for."""
    runs = [get_flow(shop("send", "wide", "--args", f"[{count}]").out.strip(), broker=shop.module.broker) for count in (3, 30)]
    shop.plan(ship=fail)
    shop.work_until(lambda: all([step.status for step in run.actions()].count("failed") == 2 for run in runs))
    small, large = (shop("show", run.id) for run in runs)
    assert any(re.match("   1  parallel of 3  running since .*: 2 between tries, 1 held back$", line) for line in small.lines)
    assert "      at most 2 at a time" in small.lines
    assert "   4    ship         held back: its turn comes when another member of its block has ended" in small.lines
    assert "      28 members are not shown: completed, cancelled or not begun (--all shows them)" in large.lines
    assert sum("  ship  " in line for line in large.lines) == 2
    assert sum("  ship  " in line for line in shop("show", runs[1].id, "--all").lines) == 30
    members = shop("show", runs[0].id, "--json").value["steps"]
    assert [(step["block"], step["position"], step["held_back"]) for step in members] == [
        (1, 0, False),
        (1, 1, False),
        (1, 2, True),
    ]


def test_show_tells_what_holds_a_run(shop: Shop) -> None:
    """HISTORY-1."""
    run = shop.failed_once()
    error = json.dumps({"type": "dramatiq_saga.errors.HistoryMismatchError", "bases": [], "message": "does not fit"})
    shop.sql(
        "UPDATE saga_flow_runs SET status = 'waiting', hold_error = ?, hold_count = 3, hold_until = 9999999999999, wakes = 9",
        error,
    )
    shown = shop("show", run.id).out
    assert "held       HistoryMismatchError: does not fit" in shown
    assert "held 3 times; a sweep drives it again at 2286-11-20 17:46:39.999Z" in shown
    assert "waiting (held)" in shop("list").out


def test_stored_text_cannot_move_the_terminal(shop: Shop) -> None:
    """C70: control characters and directional overrides become visible, in every command and in JSON."""
    run = shop.failed_once()
    run.tag("note\x07", "a\x1b]0;title\x07b\u202ec")
    assert run.cancel("evil \x1b[2J reason\r\n")
    shop.sql("UPDATE saga_messages SET state = 3, died_at = 1, lease_until = NULL, reason = ?", "bad \x1b[31m reason")
    outputs = [
        shop(*command) for command in
        (["show", run.id, "--events"], ["list"], ["queues"], ["show", run.id, "--json"], ["list", "--json"], ["queues", "--json"])
    ]  # fmt: skip
    for output in outputs:
        assert output.status == 0
        assert not any((ord(character) < 32 and character != "\n") or 127 <= ord(character) < 160 for character in output.out)
        assert "\u202e" not in output.out
    assert r"no \x1b[31mtruck\u202e" in outputs[0].out
    assert r"evil \x1b[2J reason\x0d\x0a" in outputs[0].out
    assert outputs[3].value["tags"]["note\x07"] == "a\x1b]0;title\x07b\u202ec"  # nothing is lost to machines


def test_a_run_id_from_the_command_line_cannot_move_the_terminal_either(shop: Shop) -> None:
    done = shop("show", "\x1b[31mred")
    assert done.status == 1
    assert "\x1b" not in done.err


def test_events_are_shown_when_asked_for(shop: Shop) -> None:
    run = shop.failed_once()
    assert "action.started" not in shop("show", run.id).out
    lines = shop("show", run.id, "--events").lines
    head = next(n for n, line in enumerate(lines) if line.startswith("at "))
    assert [line.split()[2] for line in lines[head + 1 :]] == [event.type for event in run.events()]
    assert [event["type"] for event in shop("show", run.id, "--events", "--json").value["events"]] == [
        event.type for event in run.events()
    ]


def test_payloads_are_not_shown_where_they_are_not_to_be_stored_in_the_history(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFE-2."""
    settings(shop, monkeypatch, {"history.store_payloads": "off"})
    run = shop.start("secret-order")
    shop.work_until(lambda: run.status == "completed")
    for output in (
        shop("show", run.id, "--events"),
        shop("show", run.id, "--json"),
        shop.plainly("--database", "shop.db", "show", run.id),
    ):
        assert "secret-order" not in output.out


def test_long_payloads_are_cut(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAFE-2: at history.max_payload_preview_length."""
    settings(shop, monkeypatch, {"history.max_payload_preview_length": "40"})
    run = shop.start("x" * 500)
    assert len(shop("show", run.id, "--json").value["args"]) == 40


def test_a_run_that_is_not_there_is_said_to_be_missing(shop: Shop) -> None:
    for command in (["show"], ["kick"], ["cancel"], ["cancel", "--keep"], ["cancel", "--compensate"], ["resume-rollback"]):
        done = shop(*command, "nobody")
        assert (done.status, done.out) == (1, "")
        assert "no run has the id 'nobody'" in done.err
    done = shop("abandon-undo", "nobody", "1")
    assert (done.status, done.out) == (1, "")
    assert "no run has the id 'nobody'" in done.err


# --- why and stuck ---------------------------------------------------------------------------------------------------


def test_why_says_what_is_waited_for_what_acts_next_and_what_to_do(shop: Shop) -> None:
    """C57; C70: what a step has raised moves no terminal."""
    run = shop.failed_once()
    done = shop("why", run.id)
    assert (done.status, done.err) == (0, "")
    assert done.lines[0].startswith(f"run {run.id} of checkout is ")
    assert done.lines[2].startswith("1. step 3 ship: between tries: 1 try failed; the next is due at ")
    assert done.lines[3] == "   error: ValueError: no \\x1b[31mtruck\\u202e"
    assert "message: step 3 is delayed in queue default" in done.out
    assert "next: native retry: try 2, as its actor's retries say, at" in done.out
    assert "next: R1: the doctor sends its message again, in the first sweep after" in done.out


def test_why_is_a_value_for_machines_and_needs_no_application(shop: Shop) -> None:
    run = shop.start()
    alone = shop.plainly("--database", "shop.db", "--json", "why", run.id)
    known = shop("--json", "why", run.id)
    assert (alone.status, alone.value["dials"], known.value["dials"]) == (0, "environment", "application")
    (reason,) = known.value["reasons"]
    assert (reason["kind"], reason["stuck"], reason["messages"][0]["state"]) == ("start", False, "ready")
    assert [act["by"] for act in reason["next"]] == ["message", "R2"]
    assert "with --app" in shop.plainly("--database", "shop.db", "why", run.id).out


def test_why_of_a_run_that_is_not_there_is_refused(shop: Shop) -> None:
    shop("init")
    done = shop("why", "nobody")
    assert (done.status, done.out) == (1, "")
    assert "nobody" in done.err


def test_stuck_lists_the_runs_that_need_a_human_and_ends_with_0(shop: Shop) -> None:
    """RECLAIM-4: a step that nothing will ever reclaim, in one line; exit status 0 whatever is found."""
    assert shop("init").status == 0
    assert shop("stuck").lines == ["no run needs a human", "last passes: monitor never, doctor never"]
    run = shop.failed_once()
    shop.sql(
        "UPDATE saga_action_runs SET status = 'running', started_at = 1, worker_id = 'host' || char(27) WHERE sequence = 3",
    )
    done = shop("stuck")
    assert done.status == 0
    assert done.lines[1].split()[:4] == [run.id, "checkout", "running", "never_reclaimed"]
    assert done.lines[1].endswith("step 3 ship is running on host\\x1b, and nothing will ever reclaim it")
    value = shop("--json", "stuck", "--limit", "1").value
    assert [(one["run_id"], one["kind"]) for one in value["runs"]] == [(run.id, "never_reclaimed")]
    assert value["more"] is False
    for limit, words in (("0", "not a number of at least 1"), ("x", "not a number of at least 1"), ("1001", "more than 1000")):
        refused = shop("stuck", "--limit", limit)
        assert refused.status == 2
        assert words in refused.err


# --- cancel ----------------------------------------------------------------------------------------------------------


def test_cancel_asks_what_becomes_of_the_work(shop: Shop) -> None:
    """API: it says what would stand; one of the two is required when work would."""
    run = shop.failed_once()
    done = shop("cancel", run.id)
    assert (done.status, done.out) == (1, "")
    assert "has done work that would stand" in done.err
    assert "1  charge  completed  undone by refund" in done.err
    assert "2  mail    completed  nothing undoes it" in done.err
    assert "--compensate" in done.err
    assert "--keep" in done.err
    assert run.status == "running"


def test_cancel_needs_no_choice_where_no_work_would_stand(shop: Shop) -> None:
    run = shop.start()
    assert shop("cancel", run.id, "--reason", "a mistake").out == f"run {run.id} is cancelled\n"
    assert "reason     a mistake" in shop("show", run.id).out
    again = shop("cancel", run.id)
    assert (again.status, again.out) == (0, f"run {run.id} is cancelled, and was before\n")  # COMP-9: twice is harmless


def test_cancel_keep_leaves_the_work_and_says_so(shop: Shop) -> None:
    run = shop.failed_once()
    done = shop("cancel", run.id, "--keep")
    assert done.lines == [f"run {run.id} is cancelled", "this work stands:", "  1  charge", "  2  mail"]
    assert (run.status, run.rollback) == ("cancelled", "none")
    assert "not undone: refund was never sent" in shop("show", run.id).out
    late = shop("cancel", run.id, "--compensate")
    assert late.status == 1
    assert "cancelled before without undoing anything" in late.err


def test_cancel_compensate_says_what_is_undone_and_what_stands(shop: Shop) -> None:
    run = shop.failed_once()
    done = shop("cancel", run.id, "--compensate", "--json")
    assert (done.value["status"], done.value["changed"]) == ("rolling_back", True)
    assert done.value["left"] == [{"sequence": 1, "name": "charge", "by": "refund"}]
    assert (done.value["undone"], done.value["never"]) == ([], [])
    assert [step["sequence"] for step in done.value["stands"]] == [2]
    again = shop("cancel", run.id, "--compensate")
    assert again.lines[0] == f"run {run.id} is rolling back, and was before; it will end as cancelled"
    assert again.lines[1:3] == ["to be undone:", "  1  charge, by refund"]
    refused = shop("cancel", run.id, "--keep")
    assert refused.status == 1
    assert "a cancel never interrupts a rollback" in refused.err
    shop.work_until(lambda: run.status == "cancelled")
    done = shop("cancel", run.id, "--compensate")
    assert done.lines[:3] == [f"run {run.id} is cancelled, and was before", "undone:", "  1  charge, by refund"]
    assert (done.status, "to be undone:" in done.lines) == (0, False)


def test_cancel_of_a_run_whose_rollback_halted_says_what_is_not_undone(shop: Shop) -> None:
    """COMP-8, COMP-9: what has been undone, what has not and why, and what goes on with it; work that is to be undone and is not is
    no success."""
    run_id = shop("send", "withdrawal").out.strip()
    run = get_flow(run_id, broker=shop.module.broker)
    shop.work_until(lambda: run.status == "waiting")
    shop.plan(refund=lambda order: fail() if order == "b" else None)
    assert shop("cancel", run_id, "--compensate").lines[1:] == [
        "to be undone:", "  3  charge, by refund", "  2  charge, by refund", "  1  charge, by refund",
    ]  # fmt: skip
    shop.work_until(lambda: run.status == "cancelled")
    done = shop("cancel", run_id, "--compensate")
    assert done.lines == [
        f"run {run_id} is cancelled, and was before; its rollback halted, and not all of its work is undone",
        "undone:",
        "  3  charge, by refund",
        "not undone:",
        r"  2  charge, by refund: failed for good, ValueError: no \x1b[31mtruck\u202e",
        "  1  charge, by refund: the rollback halted before it was done",
        f"`dramatiq-saga resume-rollback {run_id}` goes on with it once the cause is mended",
    ]
    assert done.status == 1
    value = shop("cancel", run_id, "--compensate", "--json").value
    assert (value["rollback"], [step["sequence"] for step in value["undone"]]) == ("halted", [3])
    assert [undo["sequence"] for undo in value["left"]] == [2, 1]
    assert shop("cancel", run_id).status == 0  # to end it is all that was asked for
    shop.plan(refund=lambda order: None)
    assert shop("resume-rollback", run_id).lines[1:] == ["to be undone:", "  2  charge, by refund", "  1  charge, by refund"]
    assert "to be undone:" in shop("cancel", run_id, "--compensate").lines
    shop.work_until(lambda: run.rollback == "done")
    done = shop("cancel", run_id, "--compensate")
    assert (done.status, done.lines[1:]) == (
        0, ["undone:", "  3  charge, by refund", "  2  charge, by refund", "  1  charge, by refund"],
    )  # fmt: skip


def test_a_rollback_that_has_begun_as_a_failure_ends_as_one(shop: Shop) -> None:
    """COMP-2, COMP-9: a cancel does not change to what end it leads, and does not say so."""
    run = shop.start()
    shop.plan(mail=fail)
    shop.work_until(lambda: run.status == "rolling_back" or shop.sql("SELECT 1 FROM saga_compensation_runs"))
    shop.sql("UPDATE saga_flow_runs SET status = 'rolling_back', rollback = 'running', ends_as = 'expired', ended_at = NULL")
    done = shop("cancel", run.id, "--compensate")
    assert done.lines[0] == f"run {run.id} is rolling back, and was before; it will end as expired"
    assert shop("cancel", run.id, "--compensate", "--json").value["ends_as"] == "expired"


def halted(shop: Shop) -> FlowHandle[Any]:
    """A run that failed, and one of whose undos did."""
    run = shop.start()
    shop.plan(mail=fail, refund=fail)
    shop.work_until(lambda: run.rollback == "halted")
    return run


def test_a_halted_rollback_is_sent_on_by_nothing_but_a_resume(shop: Shop) -> None:
    """COMP-8: never by a second run of the same work, of which a part stands; a kick and a cancel name the way out."""
    run = halted(shop)
    way_out = f"`dramatiq-saga resume-rollback {run.id}` goes on with it"
    kicked = shop("kick", run.id)
    assert (kicked.status, "dramatiq-saga send" in kicked.out, way_out in kicked.out) == (0, False, True)
    refused = shop("cancel", run.id, "--compensate")
    assert (refused.status, refused.out) == (1, "")
    assert "is failed, and its rollback has halted: not all of its work is undone" in refused.err
    assert way_out in refused.err


def test_a_step_that_is_at_work_counts_as_work(shop: Shop) -> None:
    run = shop.failed_once()
    shop.sql("UPDATE saga_action_runs SET status = 'running', attempts = 2 WHERE sequence = 3")
    assert "3  ship    running    is at work: its outcome would be refused" in shop("cancel", run.id).err
    done = shop("cancel", run.id, "--keep")
    assert "  3  ship (was at work: whatever it has done stands, its outcome will be refused)" in done.lines
    assert "cancelled at " in shop("show", run.id).out


def test_a_step_that_was_at_work_and_has_not_reported_counts_as_work(shop: Shop) -> None:
    """RECLAIM-6, NATIVE-4: its worker has died, or was stopped; it is pending again, and may have done its work all the same."""
    run = shop.start()
    shop.plan(ship=fail)
    shop.work_until(lambda: len(run.actions()) == 3 and run.actions()[2].tries)
    shop.sql("UPDATE saga_action_runs SET status = 'pending', attempts = 2, tries = 0, claims = 1 WHERE sequence = 3")
    refused = shop("cancel", run.id)
    assert (refused.status, run.status) == (1, "running")
    assert "3  ship    pending    was at work and has not reported: it may have done its work" in refused.err
    assert "; it was claimed before (claim 2), and may have done its work" in shop("show", run.id).out
    assert "pending: next is try 1 of 4, when its turn comes among what has died before" in shop("show", run.id).out
    shop.sql("UPDATE saga_action_runs SET next_try_at = NULL WHERE sequence = 3")
    assert "pending: next is try 1 of 4, as soon as a worker takes it; it was claimed before" in shop("show", run.id).out
    done = shop("cancel", run.id, "--keep")
    assert "  3  ship (was at work: whatever it has done stands, its outcome will be refused)" in done.lines


def test_a_run_that_ended_otherwise_cannot_be_cancelled(shop: Shop) -> None:
    """STATUS-3, C29: a definite answer, with where the run is."""
    run = shop.start()
    shop.work_until(lambda: run.status == "completed")
    for option in ("--keep", "--compensate"):
        done = shop("cancel", run.id, option)
        assert done.status == 1
        assert "it is completed" in done.err


# --- kick and resume-rollback ----------------------------------------------------------------------------------------


def test_kick_says_what_it_did(shop: Shop) -> None:
    """KICK-1."""
    run = shop.failed_once()
    done = shop("kick", run.id)
    assert done.lines == [
        f"run {run.id} of checkout is running: sent to be driven again, with new repairs for it and for what it is parked on",
        "  step 3 (ship, failed): sent again",
    ]
    shop.sql("UPDATE saga_action_runs SET status = 'running' WHERE sequence = 3")
    left = shop("kick", run.id)
    assert "  step 3 (ship, running): left alone: it is running, and nothing says when its worker may be given up" in left.out
    assert f"where nobody is at it any more: dramatiq-saga cancel {run.id} --compensate, or --keep" in left.out
    value = shop("kick", run.id, "--json").value
    assert (value["driven"], value["sent"], value["left"][0]["sequence"]) == (True, [], 3)


def test_kick_of_a_run_that_is_parked_on_nothing_says_that(shop: Shop) -> None:
    """KICK-1."""
    run = shop.start()
    assert shop("kick", run.id).lines == [
        f"run {run.id} of checkout is pending: sent to be driven again, with new repairs; it is parked on nothing that could be sent again"
    ]


def test_kick_says_what_a_run_waits_for_that_nothing_is_sent_for(shop: Shop) -> None:
    """KICK-1: a child run, a signal, a moment."""
    run_id = shop("send", "campaign").out.strip()
    run = get_flow(run_id, broker=shop.module.broker)
    shop.plan(mail=fail)
    shop.work_until(lambda: run.children())
    [child] = run.children()
    shop.work_until(lambda: get_flow(child.child_id, broker=shop.module.broker).status == "waiting")
    done = shop("kick", run.id)
    assert done.lines[1].startswith("  child 1 (newsletter, running): left alone: it is a run of its own")
    napping = shop("send", "lenient").out.strip()
    shop.work_until(lambda: get_flow(napping, broker=shop.module.broker).status == "waiting")
    done = shop("kick", napping)
    assert done.lines[1].startswith("  wait 2 (timer, waiting): left alone: it ends at 20")


def test_kick_of_a_run_that_has_ended_does_nothing_and_says_so(shop: Shop) -> None:
    run = shop.start()
    run.cancel()
    done = shop("kick", run.id)
    assert done.status == 0
    said = f"run {run.id} of checkout is cancelled: it has ended, so there is nothing to kick; nothing was done; its work is begun anew by"
    assert done.lines == [f"{said} a new run: dramatiq-saga send checkout"]


def test_an_expired_run_stays_expired_and_a_new_one_has_a_deadline_of_its_own(shop: Shop) -> None:
    """C38, STATUS-1: a kick does not wake it, and says what does its work; the new run is not expired by the old one's deadline."""
    assert shop("sweep").status == 0
    send = shop.module.checkout.send_with_options
    run = send(args=("order-1",), expires_in=0.001)
    eventually(lambda: shop("sweep").status == 0 and run.status == "expired")
    assert "a new run: dramatiq-saga send checkout" in shop("kick", run.id).out
    again = send(args=("order-1",), expires_in=3600)
    assert shop("sweep").status == 0
    assert (run.status, again.status) == ("expired", "pending")
    old, new = (shop.sql("SELECT expires_at FROM saga_flow_runs WHERE id = ?", one.id)[0][0] for one in (run, again))
    assert new > old + 3_599_000


def test_resume_rollback_goes_on_with_what_has_halted(shop: Shop) -> None:
    """C26, COMP-8: from the command line, once the cause is mended; a second call says that it goes on already."""
    run = shop.start()
    shop.plan(mail=fail, refund=fail)
    shop.work_until(lambda: run.rollback == "halted")
    assert "rollback   halted: what follows the failed undo was not undone" in shop("show", run.id).out
    shop.plan(refund=lambda order: None)
    done = shop("resume-rollback", run.id)
    assert (done.status, done.lines) == (
        0, [f"run {run.id} is failed, and stays so; its rollback goes on", "to be undone:", "  1  charge, by refund"],
    )  # fmt: skip
    assert "rollback   is being undone" in shop("show", run.id).out
    again = shop("resume-rollback", run.id, "--json")
    assert (again.status, again.value["changed"], again.value["rollback"]) == (0, False, "running")
    assert again.value["left"] == [{"sequence": 1, "name": "charge", "by": "refund"}]
    assert "its rollback goes on, and did before" in shop("resume-rollback", run.id).out
    shop.work_until(lambda: run.rollback == "done")
    assert run.status == "failed"
    refused = shop("resume-rollback", run.id)
    assert (refused.status, refused.out) == (1, "")
    assert "is failed, and its rollback is done: only a rollback that has halted is resumed" in refused.err


def test_resume_rollback_of_a_run_that_has_none_is_refused(shop: Shop) -> None:
    """COMP-8: a workflow that has ended is never restarted, and one that goes on is not undone by this."""
    run = shop.start()
    done = shop("resume-rollback", run.id)
    assert (done.status, done.out) == (1, "")
    assert "is pending, and was never rolled back" in done.err
    assert run.status == "pending"


def test_resume_rollback_of_one_that_is_under_way_is_refused(shop: Shop) -> None:
    """COMP-8: nothing of it has halted; `why` says what it waits for."""
    run = shop.failed_once()
    assert shop("cancel", run.id, "--compensate").status == 0
    done = shop("resume-rollback", run.id)
    assert (done.status, done.out) == (1, "")
    assert "is rolling back, and nothing of that has halted: only a rollback that has halted is resumed" in done.err
    assert f"`dramatiq-saga why {run.id}` says" in done.err


def test_an_undo_that_nobody_is_at_any_more_is_abandoned_and_tried_again(shop: Shop) -> None:
    """PAR-3, COMP-4, COMP-8: `stuck` and `why` name the command; its answer says what it was running on and how to go on."""
    run = shop.failed_once()
    assert shop("cancel", run.id, "--compensate").status == 0
    shop.sql(
        "UPDATE saga_compensation_runs SET status = 'running', attempts = 1, started_at = 1, worker_id = 'host-7' WHERE sequence = 1"
    )
    refused = shop("abandon-undo", run.id, "1")
    assert (refused.status, refused.out) == (1, "")
    assert "the undo of step 1 is not lost: its message is there (ready)" in refused.err
    shop.sql("UPDATE saga_messages SET state = 2, reserved_at = 1, lease_until = 9999999999999")
    refused = shop("abandon-undo", run.id, "1")
    assert "its message is reserved by a worker until 2286-11-20" in refused.err
    shop.sql("DELETE FROM saga_messages")
    assert "find out what it did, then abandon-undo 1" in shop("stuck").out
    assert f"find out what it did, then: dramatiq-saga abandon-undo {run.id} 1" in shop("why", run.id).out
    done = shop("abandon-undo", run.id, "1")
    assert (done.status, done.lines) == (
        0,
        [
            f"run {run.id}: the undo of step 1, running on host-7, is abandoned; its rollback is halted",
            "not undone:", "  1  charge, by refund: the rollback halted before it was done",
            f"`dramatiq-saga resume-rollback {run.id}` goes on with it once the cause is mended",
            "should it be at work after all, its outcome is recorded, until it is tried again",
        ],
    )  # fmt: skip
    again = shop("abandon-undo", run.id, "1", "--json")
    assert (again.value["changed"], again.value["rollback"], again.value["worker"]) == (False, "halted", "host-7")
    assert "is abandoned before" not in shop("abandon-undo", run.id, "1").out
    assert shop("resume-rollback", run.id).status == 0
    refused = shop("abandon-undo", run.id, "1")
    assert "the undo of step 1 is not lost: its message is there (ready)" in refused.err
    shop.work_until(lambda: run.rollback == "done")
    refused = shop("abandon-undo", run.id, "1")
    assert "is cancelled, and the undo of step 1 is completed: only an undo that is running" in refused.err


def test_an_undo_that_its_rollback_has_gone_on_without_is_not_said_to_be_undone_yet(shop: Shop) -> None:
    """COMP-4: it was abandoned under `continue`, and was the last; nothing tries it again."""
    run = shop.failed_once()
    assert shop("cancel", run.id, "--compensate").status == 0
    shop.sql("DELETE FROM saga_messages")
    shop.sql(
        "UPDATE saga_compensation_runs SET status = 'running', attempts = 1, started_at = 1, worker_id = 'host-7', policy = 'continue'"
    )
    done = shop("abandon-undo", run.id, "1")
    assert done.lines == [
        f"run {run.id}: the undo of step 1, running on host-7, is abandoned; its rollback is done",
        "should it be at work after all, its outcome is recorded",
    ]
    assert shop("abandon-undo", run.id, "1", "--json").value["left"] == []


def test_what_is_advised_can_be_pasted_whatever_a_run_is_called(shop: Shop) -> None:
    """An id may come from a customer: it is one word of a shell, and no option."""
    assert shop("send", "checkout", "--args", '["a"]', "--run-id=-x; $(touch pwned)").status == 0
    assert shop("cancel", "--", "-x; $(touch pwned)").status == 0
    shop.sql("UPDATE saga_flow_runs SET rollback = 'halted'")
    assert "`dramatiq-saga resume-rollback -- '-x; $(touch pwned)'`" in shop("kick", "--", "-x; $(touch pwned)").out
    assert "dramatiq-saga resume-rollback -- '-x; $(touch pwned)'" in shop("why", "--", "-x; $(touch pwned)").out


# --- queues ----------------------------------------------------------------------------------------------------------


def dead(shop: Shop) -> FlowHandle[Any]:
    """A run that failed: its step's message is a dead letter."""
    run = shop.start()
    shop.plan(mail=fail)
    shop.work_until(lambda: run.status == "failed" and shop.sql("SELECT id FROM saga_messages WHERE state = 3"))
    return run


def test_queues_shows_depths_and_dead_letters(shop: Shop) -> None:
    assert shop("queues").out == "all queues are empty\n"
    run = dead(shop)
    shop.start()
    lines = shop("queues").lines
    assert lines[0].split() == ["queue", "ready", "delayed", "reserved", "dead"]
    assert lines[1].split() == ["default", "1", "0", "0", "1"]
    assert run.id in lines[4]
    assert "ValueError: no" in lines[4]
    value = shop("queues", "--json").value
    assert value["queues"] == [{"queue": "default", "ready": 1, "delayed": 0, "reserved": 0, "dead": 1}]
    assert value["dead_letters"][0]["run_id"] == run.id


def test_a_dead_letter_is_requeued_by_number_or_message_id(shop: Shop) -> None:
    dead(shop)
    ((number, message_id),) = shop.sql("SELECT id, message_id FROM saga_messages WHERE state = 3")
    assert (
        shop("queues", "requeue", str(number)).out
        == f"dead letter {number} (mail) is on queue default again, its tries renewed\n"
    )
    assert shop("queues", "requeue", str(number)).status == 1
    shop.sql("UPDATE saga_messages SET state = 3, died_at = 1")
    assert shop("queues", "requeue", message_id, "--json").value["number"] == number
    done = shop("queues", "requeue", "no-such-message")
    assert done.status == 1
    assert "there is no dead letter 'no-such-message'" in done.err


def test_a_message_id_that_several_dead_letters_carry_names_none(shop: Shop) -> None:
    dead(shop)
    others = ", ".join(column for column in columns(shop) if column != "id")
    shop.sql(f"INSERT INTO saga_messages (id, {others}) SELECT id + 1000, {others} FROM saga_messages")
    message_id = shop.sql("SELECT message_id FROM saga_messages LIMIT 1")[0][0]
    done = shop("queues", "requeue", message_id)
    assert done.status == 1
    assert "2 dead letters carry the message id" in done.err


def columns(shop: Shop) -> list[str]:
    return [row[1] for row in shop.sql("PRAGMA table_info(saga_messages)")]


def test_purge_deletes_dead_letters_and_nothing_else(shop: Shop) -> None:
    dead(shop)
    shop.start()
    unknown = shop("queues", "purge", "other")
    assert (unknown.status, unknown.out) == (0, "0 dead letters of queue other deleted\n")
    assert "there is no message in a queue other" in unknown.err
    for count in ("1 dead letter", "0 dead letters"):
        done = shop("queues", "purge", "default")
        assert (done.out, done.err) == (f"{count} of queue default deleted\n", "")
    assert shop.sql("SELECT state FROM saga_messages") == [(0,)]


def test_the_queues_of_another_broker_are_not_shown_as_empty(shop: Shop) -> None:
    """QUEUE-5: a host's own broker is never replaced, and not mistaken for an empty one."""
    name = shop.write(
        "from dramatiq.brokers.stub import StubBroker\nfrom dramatiq_saga import SagaMiddleware\n"
        "b = StubBroker()\nb.add_middleware(SagaMiddleware('shop.db'))\n"
    )
    done = shop.plainly("--app", f"{name}:b", "queues")
    assert done.status == 1
    assert "the queues are kept by StubBroker" in done.err


# --- the program itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        ("| true", 0, ""),
        (
            "> /dev/full",
            1,
            "was carried out, but its answer cannot be written to standard output: [Errno 28] No space left on device",
        ),
        (">&-", 1, "was carried out, but its answer cannot be written to standard output: it is closed"),
    ],
)
def test_an_answer_that_nobody_takes(shop: Shop, output: str, status: int, words: str) -> None:
    """A reader that has enough is no error; an answer that is lost is one, and never the broker's."""
    shop.start()
    command = f'set -o pipefail; "{sys.executable}" -m dramatiq_saga.cli --database shop.db list --json {output}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, words in done.stderr, done.stderr.count("\n")) == (status, True, status), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "\udcff"], ["why", "\udcff"], ["list", "--workflow", "\udcff"], ["list", "--tag", "a=\udcff"], ["queues", "purge", "\udcff"],
        ["list", "--awaiting-signal", "\udcff"], ["kick", "\udcff"], ["cancel", "x", "--reason", "\udcff"], ["verify", "--workflow", "\udcff"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_arguments_that_are_no_text_are_bad_usage(shop: Shop, arguments: list[str]) -> None:
    """What a shell hands over as bytes that are no UTF-8; nothing that is stored has such a name."""
    shop("init")
    done = shop(*arguments)
    assert (done.status, done.out) == (2, "")
    assert "an argument is not UTF-8: " in done.err
    assert "\\udcff" in done.err


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("0", "at least 1"),
        ("-5", "at least 1"),
        ("00", "at least 1"),
        ("9" * 23, "more than 999999999"),
        ("9" * 5000, "more than"),
    ],
    ids=["0", "-5", "00", "23 digits", "5000 digits"],
)
@pytest.mark.parametrize("command", ["queues", "list"])
def test_a_number_that_cannot_be_is_bad_usage(shop: Shop, command: str, limit: str, words: str) -> None:
    done = shop(command, f"--limit={limit}")
    assert (done.status, done.out) == (2, "")
    assert words in done.err


def test_a_defect_is_not_dressed_up_as_a_refusal(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("dramatiq_saga.operations.Operator.list_runs", defect)
    with pytest.raises(ZeroDivisionError):
        shop("list")


def test_a_broker_that_does_not_answer_is_told_without_a_traceback(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("no route")

    monkeypatch.setattr("dramatiq_saga.operations.Operator.kick", down)
    done = shop("kick", "x")
    assert (done.status, done.err) == (1, "dramatiq-saga: the broker does not answer: ConnectionRefusedError: no route\n")


def test_a_terminal_that_cannot_show_a_character_is_shown_its_escape(shop: Shop) -> None:
    run = shop.start("é" * 300)
    command = [sys.executable, "-m", "dramatiq_saga.cli", "--database", "shop.db", "show", run.id]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout


def test_the_version_is_printed(shop: Shop) -> None:
    done = shop.plainly("--version")
    assert done.status == 0
    assert done.out.startswith("dramatiq-saga ")


# --- how things are written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0 ms"), (0, "0 ms"), (999, "999 ms"), (1000, "1.0 s"), (59_940, "59.9 s"), (60_000, "1 min"), (200_000, "3 min 20 s"),
        (3_600_000, "1 h"), (7_500_000, "2 h 5 min"), (86_400_000, "1 d"), (349_200_000, "4 d 1 h"),
    ],
)  # fmt: skip
def test_durations_are_written_for_people_and_never_negative(ms: int, text: str) -> None:
    """C52."""
    assert duration(ms) == text


def test_moments_are_written_in_utc_and_say_so() -> None:
    assert moment(1_772_366_400_250) == "2026-03-01 12:00:00.250Z"
    assert moment(None) == ""
    assert relative(10_000, 4_000) == "in 6.0 s"
    assert relative(4_000, 10_000) == "6.0 s ago"


def test_tables_align_and_numbers_stand_on_the_right() -> None:
    assert table(("a", "count"), [("xyz", 5), ("é\x1b", 1000)]) == ["a      count", "xyz        5", "é\\x1b   1000"]


def test_json_is_ascii_that_no_terminal_acts_on() -> None:
    text = Answer({"a": "\x1b\x7f\x9b\u202e"}).json()
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == {"a": "\x1b\x7f\x9b\u202e"}


def test_a_cancel_names_work_whose_result_could_not_be_kept(shop: Shop) -> None:
    """CODEC-2, OPT-1: the run went on without the result of an optional step, and the work of it stands all the same."""
    run_id = shop("send", "lenient").out.strip()
    run = get_flow(run_id, broker=shop.module.broker)
    shop.plan(charge=lambda *_: float("nan"))
    shop.work_until(lambda: run.status == "waiting")
    assert [step.status for step in run.actions()] == ["optional_failed"]
    asked = shop("cancel", run_id)
    assert asked.status == 1
    assert "charge" in asked.out + asked.err
    assert shop("cancel", run_id, "--compensate").status == 0
    shop.work_until(lambda: run.status == "cancelled")
    assert [undo.actor for undo in run.compensations()] == ["refund"]


# --- what is parked --------------------------------------------------------------------------------------------------


def parked(shop: Shop) -> FlowHandle[Any]:
    """A run whose step has failed and waits for a signal."""
    run_id = shop("send", "newsletter").out.strip()
    run = get_flow(run_id, broker=shop.module.broker)
    shop.plan(mail=fail)
    shop.work_until(lambda: run.status == "waiting")
    return run


def test_show_says_which_signal_a_parked_step_waits_for_and_what_it_has_spent(shop: Shop) -> None:
    """RSIG-1, RSIG-3: the signal, the deadline, the budget; and later why no signal runs it again."""
    run = parked(shop)
    shown = shop("show", run.id).out
    assert re.search(r"mail +awaiting retry: waits for signal paper until \S+ \S+Z \(in .+\); 0 of 1 used so far", shown)
    assert r"ValueError: no \x1b[31mtruck\u202e" in shown
    [step] = shop("show", run.id, "--json").value["steps"]
    known = {"signal": "paper", "spent": 0, "cap": 1, "waiting": True, "over": None}
    assert known.items() <= step["retry_on_signal"].items()
    assert step["retry_on_signal"]["due_at"] is not None

    assert shop("signal", run.id, "paper").status == 0
    shop.work_until(lambda: run.status == "failed")
    shown = shop("show", run.id, "--events").out
    assert "failed for good after 1 try" in shown
    assert "not run again by signal paper: the signals that might have run it again are used up" in shown
    assert re.search(r"action.awaiting_retry +1 +mail +1? +paper", shown)
    assert shop("show", run.id, "--json").value["steps"][0]["retry_on_signal"]["over"] == "spent"


def test_list_finds_runs_by_the_signal_that_they_wait_for(shop: Shop) -> None:
    """RSIG-1, API query(awaiting_signal, awaiting_retry_signal, signalable)."""
    run = parked(shop)
    other = shop.start()
    assert [line["run_id"] for line in shop("list", "--awaiting-retry-signal", "paper", "--json").value] == [run.id]
    assert shop("list", "--awaiting-retry-signal", "ink").out == "no runs match\n"
    assert shop("list", "--awaiting-signal", "paper").out == "no runs match\n"
    assert {line["run_id"] for line in shop("list", "--signalable", "--json").value} == {run.id, other.id}
    run.cancel()
    assert [line["run_id"] for line in shop("list", "--signalable", "--json").value] == [other.id]
    refused = shop("list", "--awaiting-signal", "")
    assert refused.status == 1
    assert "a signal's name has between 1 and 191 characters" in refused.err


def test_signal_retry_runs_again_what_is_parked_and_says_what(shop: Shop) -> None:
    """RSIG-1: without the signal's name; refused, with the reason, where nothing is parked."""
    run = parked(shop)
    done = shop("signal-retry", run.id)
    assert done.lines == [f"run {run.id}: what was parked runs again", "  step 1 (mail), by signal paper"]
    again = shop("signal-retry", run.id)
    assert again.status == 1
    assert "no step or child of it waits for a signal to be retried" in again.err
    shop.plan(mail=lambda *_: "sent")
    shop.work_until(lambda: run.status == "completed")
    assert "run again by signal paper 1 time" in shop("show", run.id).out
    assert shop("signal-retry", run.id).status == 1
    assert shop("signal-retry", "no-such-run").status == 1


def test_a_parked_child_is_shown_and_run_again_too(shop: Shop) -> None:
    """RSIG-4: its link waits, not the child, which has failed."""
    run_id = shop("send", "campaign").out.strip()
    run = get_flow(run_id, broker=shop.module.broker)
    shop.plan(mail=fail)

    def waits() -> bool:
        return [child.status for child in run.children()] == ["awaiting_retry"]

    shop.work_until(lambda: run.children())
    [child] = run.children()
    shop.work_until(lambda: get_flow(child.child_id, broker=shop.module.broker).status == "waiting")
    assert shop("signal", child.child_id, "paper").status == 0  # its budget is one
    shop.work_until(waits)
    shown = shop("show", run_id).out
    assert re.search(r"child newsletter +awaiting retry: waits for signal ink; 0 used so far", shown)
    done = shop("signal-retry", run_id, "--json").value
    assert done["retried"] == [{"kind": "child", "sequence": 1, "name": "newsletter", "signal": "ink"}]
    shop.plan(mail=lambda *_: "sent")
    shop.work_until(lambda: run.status == "completed")
    assert "run again by signal ink 1 time" in shop("show", run_id).out


# --- prune -----------------------------------------------------------------------------------------------------------


def test_prune_counts_on_request_and_deletes_what_ended_long_ago(shop: Shop) -> None:
    """PRUNE-1: the age from the settings, or from the command line."""
    old, young = shop.start(), shop.start("order-43")
    for run in (old, young):
        run.cancel()
    shop.sql("UPDATE saga_flow_runs SET ended_at = ended_at - ? WHERE id = ?", 91 * 86_400_000, old.id)
    assert shop("prune", "--dry-run").out.startswith("prune: 1 run would be deleted that ended until 2")
    assert shop("prune").out.startswith("prune: 1 run deleted")
    assert shop("show", old.id).status == 1
    assert shop("show", young.id).status == 0
    refused = shop("prune", "--before", "2999-01-01")
    assert (refused.status, refused.out) == (1, "")
    assert "2999-01-01T00:00:00.000Z is still to come" in refused.err
    assert shop("prune", "--before", "2001-03-01T12:00+02:00", "--json").value == {
        "before": "2001-03-01T10:00:00.000Z", "pruned": 0, "skipped": 0, "dry_run": False,
    }  # fmt: skip
    assert shop("prune", "--days", "0", "--json").value["pruned"] == 1
    assert shop("prune", "--days", "0").out.startswith("prune: 0 runs deleted")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--days", "-1"], "not a number of days from 0, such as 30"), (["--days", "x"], "not a number of days from 0, such as 30"),
        (["--before", "soon"], "'soon' is not a time such as 2026-03-01, or 2026-03-01T12:00Z"),
        (["--before", "9999-12-31T23:59-23:59"], "is not a time such as"), (["--before", "0001-01-01T00:00+23:59"], "is not a time such as"),
        (["--limit", "0"], "not a number of at least 1"),
        (["--limit", "x"], "'x' is not a number of at least 1"), (["--days", "1", "--before", "2026-01-01"], "not allowed with"),
    ],
)  # fmt: skip
def test_a_prune_that_cannot_be_meant_ends_with_2(shop: Shop, arguments: list[str], words: str) -> None:
    done = shop("prune", *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err, "the format that is expected, not the name of a function"
