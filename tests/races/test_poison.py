"""What dies with a worker: the step that has killed it, and its neighbours (RECLAIM-6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dramatiq.middleware import Shutdown

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.claim import Claim, ClaimAttempt
from dramatiq_saga.errors import UnknownActorError
from dramatiq_saga.recovery import doctor
from dramatiq_saga.recovery.explain import Posts, why
from dramatiq_saga.reports import StepReport, read_run
from dramatiq_saga.step import OPTION, Delivery
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import Doorstep, at_first_step
from tests.races.test_leases import claim, undoing_step
from tests.support.bench import Background, Bench

WINDOW = Settings.from_mapping(
    {
        "actions.reclaim.stale_running": {"enabled": True, "after_seconds": 60},
        "sagas.reclaim.stale_running": {"enabled": True, "after_seconds": 60},
        "repair": {"enabled": True, "grace_seconds": 60},
    }
)


def claims(worker: Bench, run: str) -> int:
    row = worker.one("SELECT claims FROM {action_runs} WHERE run_id = ? AND sequence = 1", run)
    assert row is not None
    return int(row[0])


def killed(make: MakeBench, clock: ManualClock, *messages: Any, times: int = 2) -> None:
    """Workers that have died, one after the other, while they were at all of this; each has been silent for long enough."""
    for _ in range(times):
        dead = make(settings=WINDOW)
        for message in messages:
            assert isinstance(claim(dead, message), Claim)
        clock.advance(61)


def at_work(worker: Bench, shop: Shop, message: Any, actor: str = "charge") -> tuple[Doorstep, Background]:
    """A worker that is in the middle of this."""
    shop.bodies[actor] = door = Doorstep()
    call = Background(lambda: worker.deliver(message))
    door.wait()
    del shop.bodies[actor]
    return door, call


def reported(worker: Bench, run: str) -> StepReport:
    report = worker.store.read(lambda tx: read_run(tx, run, settings=WINDOW, tries_of=lambda *_: None))
    assert report is not None
    return report.steps[0]


def explained(worker: Bench, run: str) -> tuple[str, str]:
    """What ``why`` says of it first, and about what."""
    posts = Posts(None, False)
    found = worker.store.read(lambda tx: why(tx, run, settings=WINDOW, now=worker.engine.now(), posts=posts))
    assert found is not None
    return found.reasons[0].kind, found.reasons[0].text


def test_after_the_first_death_all_that_a_worker_was_at_runs_again_at_once(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """RECLAIM-6: most deaths are nobody's doing, and steps of ten minutes are not to wait for one another."""
    worker = bench(settings=WINDOW)
    runs = [at_first_step(worker) for _ in range(3)]
    killed(bench, clock, *(message for _, message in runs), times=1)
    inside = [at_work(worker, shop, message) for _, message in runs]
    assert [worker.step(run) for run, _ in runs] == [("running", 2)] * 3
    for door, call in inside:
        door.succeed("charged")
        call.result()
    assert [worker.step(run) for run, _ in runs] == [("completed", 2)] * 3


def test_a_step_that_kills_its_workers_takes_its_neighbours_down_twice(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """RECLAIM-6: of those that two dead processes have left, another process is at one at a time; who waits its turn spends nothing."""
    worker = bench(settings=WINDOW)
    killer, of_killer = at_first_step(worker)
    neighbour, of_neighbour = at_first_step(worker)
    killed(bench, clock, of_killer, of_neighbour)
    door, call = at_work(worker, shop, of_killer)
    worker.deliver(of_neighbour)
    assert (worker.step(neighbour), claims(worker, neighbour)) == (("pending", 3), 2)
    assert of_neighbour.options[OPTION]["suspect"] is True
    for _ in range(10):  # it comes again and again, and is put back before it claims
        worker.deliver(worker.message_again(of_neighbour))
    assert (worker.step(neighbour), claims(worker, neighbour)) == (("pending", 3), 2)
    assert shop.count("charge") == 1

    elsewhere = bench(settings=WINDOW)
    elsewhere.deliver(elsewhere.message_again(of_neighbour))
    assert elsewhere.step(neighbour) == ("completed", 4)

    door.succeed("charged after all")
    call.result()
    assert worker.step(killer) == ("completed", 3)


@pytest.mark.parametrize("first", ["alone", "not alone"])
def test_what_has_died_twice_has_nothing_beside_it_that_has_died_once(
    bench: MakeBench, shop: Shop, clock: ManualClock, first: str
) -> None:
    """RECLAIM-6: whichever of the two is at work, the other one waits for it; what has never been claimed waits for neither."""
    worker = bench(settings=WINDOW)
    once, twice, fresh = (at_first_step(worker) for _ in range(3))
    killed(bench, clock, twice[1], times=1)
    killed(bench, clock, once[1], twice[1], times=1)
    inside, outside = (twice, once) if first == "alone" else (once, twice)
    door, call = at_work(worker, shop, inside[1])
    worker.deliver(outside[1])
    assert worker.step(outside[0])[0] == "pending"
    worker.deliver(worker.message_again(outside[1]))
    assert worker.step(outside[0])[0] == "pending"
    worker.deliver(fresh[1])
    assert worker.step(fresh[0]) == ("completed", 1)
    door.succeed("charged")
    call.result()
    worker.deliver(worker.message_again(outside[1]))
    assert worker.step(outside[0])[0] == "completed"


def test_what_may_be_claimed_no_more_has_nothing_beside_it_that_has_died_before(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """RECLAIM-6: a step that may be claimed twice does not fail because it was beside a killer both times."""
    worker = bench(settings=WINDOW)
    _, of_killer = at_first_step(worker)
    neighbour, of_neighbour = at_first_step(worker)
    killed(bench, clock, of_killer, of_neighbour, times=1)
    worker.store.write(lambda tx: tx.run("UPDATE {action_runs} SET max_claims = 2 WHERE run_id = ?", (neighbour,)))
    door, call = at_work(worker, shop, of_killer)
    worker.deliver(of_neighbour)
    assert (worker.step(neighbour), claims(worker, neighbour)) == (("pending", 2), 1)
    door.succeed("charged")
    call.result()


def test_a_suspect_waits_for_no_longer_than_the_other_one_is_at_work(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-6: whichever way that ends; what has never been claimed before does not wait at all."""
    worker = bench(settings=WINDOW)
    runs = [at_first_step(worker) for _ in range(3)]
    killed(bench, clock, runs[0][1], runs[1][1])
    door, call = at_work(worker, shop, runs[0][1])
    worker.deliver(runs[2][1])
    assert worker.step(runs[2][0]) == ("completed", 1)
    worker.deliver(runs[1][1])
    assert worker.step(runs[1][0]) == ("pending", 3)
    door.fail(ValueError("it has not killed anybody"))
    call.result()
    worker.deliver(worker.message_again(runs[1][1]))
    assert worker.step(runs[1][0]) == ("completed", 4)


def test_a_body_that_may_begin_once_is_not_begun_again_by_the_next_worker(bench: MakeBench, shop: Shop) -> None:
    """RECLAIM-6, C20: a deployment that interrupts it (``notify_shutdown``) ends it, where another step's claim is given back."""
    worker = bench(settings=Settings.from_mapping({"reclaim.max_claims": 1}))
    run, message = at_first_step(worker)
    shop.bodies["charge"] = door = Doorstep()
    call = Background(lambda: worker.deliver(message))
    door.wait()
    door.fail(Shutdown())
    call.result()
    assert worker.step(run) == ("failed", 1)
    worker.deliver(worker.message_again(message))
    assert shop.count("charge") == 1
    assert worker.status(run) == "failed"


# --- what is said of it, and done about it, while it waits -----------------------------------------------------------


@pytest.mark.parametrize("joins", [True, False], ids=["queue in the store", "queue elsewhere"])
@pytest.mark.parametrize(("begin", "actor"), [(at_first_step, "charge"), (undoing_step, "refund")], ids=["step", "undo"])
def test_the_doctor_leaves_alone_what_waits_for_its_turn_among_suspects(
    bench: MakeBench, shop: Shop, clock: ManualClock, begin: Callable[[Bench], tuple[str, Any]], actor: str, joins: bool
) -> None:
    """RECLAIM-6, DOCTOR-1: its message is not lost; once it is, R1 sends another one after the grace."""
    worker = bench(settings=WINDOW)
    worker.sender.joins = joins
    (_, of_killer), (run, of_neighbour) = begin(worker), begin(worker)
    worker.sender.queue.clear()
    killed(bench, clock, of_killer, of_neighbour)
    door, call = at_work(worker, shop, of_killer, actor)
    worker.deliver(of_neighbour)
    table = "action_runs" if actor == "charge" else "compensation_runs"
    for _ in range(100):
        clock.advance(2)
        report = doctor.repair(worker.engine, worker.sender)
        assert (report.steps, report.compensations) == (0, 0)
        worker.deliver(worker.message_again(of_neighbour))
    assert worker.one(f"SELECT status, repair_attempts FROM {{{table}}} WHERE run_id = ?", run) == ("pending", 0)

    clock.advance(61)  # from here on, nobody sees its message any more
    assert doctor.repair(worker.engine, worker.sender).repaired <= 1  # R3, which sends the other one's
    clock.advance(1)
    report = doctor.repair(worker.engine, worker.sender)
    assert report.steps + report.compensations == 1
    details = worker.all("SELECT detail FROM {flow_events} WHERE run_id = ? AND detail IS NOT NULL", run)
    assert details[-1] == ("R1: nobody has taken it again",)
    door.succeed(None)
    call.result()


def test_of_a_suspect_that_waits_it_is_said_that_it_may_have_done_its_work(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """RECLAIM-6, C57: not that nobody has taken it."""
    worker = bench(settings=WINDOW)
    (_, of_killer), (run, of_neighbour) = at_first_step(worker), at_first_step(worker)
    killed(bench, clock, of_killer, of_neighbour)
    door, call = at_work(worker, shop, of_killer)
    assert not reported(worker, run).was_begun
    worker.deliver(of_neighbour)
    assert reported(worker, run).was_begun
    assert reported(worker, run).next_try is not None
    kind, text = explained(worker, run)
    assert kind == "step_suspect"
    assert text.startswith("it was claimed 2 times and never reported: its worker is gone")
    door.succeed("charged")
    call.result()


def test_a_step_that_was_interrupted_is_told_from_one_whose_body_has_never_begun(bench: MakeBench, shop: Shop) -> None:
    """NATIVE-4, C57: both were claimed and given back; the one may have done its work, the other has not."""
    worker = bench(settings=WINDOW)
    (begun, of_begun), (never, of_never) = at_first_step(worker), at_first_step(worker)
    door, call = at_work(worker, shop, of_begun)
    door.fail(Shutdown())
    call.result()
    stopped = Delivery(of_never)
    assert stopped.job is not None
    stopped.attempt = ClaimAttempt(worker.engine, stopped.job, nonce="stopped")
    found = stopped.attempt.run()
    assert isinstance(found, Claim)
    stopped.claim, stopped.state = found, "claimed"
    worker.runner.finish(stopped)
    assert worker.step(begun) == worker.step(never) == ("pending", 1)
    assert [reported(worker, run).was_begun for run in (begun, never)] == [True, False]
    assert explained(worker, begun) == (
        "step_pending", "it was given back, and may have done its work (claim 1); no worker has taken it again, since",
    )  # fmt: skip
    assert explained(worker, never) == ("step_pending", "no worker has taken it, since")


def waiting_among_suspects(make: MakeBench, shop: Shop, clock: ManualClock) -> tuple[Bench, str, Any]:
    """A run whose step was at work when its workers died, and waits for its turn: its worker, its id, the step's message."""
    worker = make(settings=WINDOW)
    (_, of_killer), (run, message) = at_first_step(worker, "careful"), at_first_step(worker, "careful")
    killed(make, clock, of_killer, message)
    door, call = at_work(worker, shop, of_killer)
    worker.deliver(message)
    door.succeed("charged")
    call.result()
    worker.sender.queue.clear()
    assert worker.step(run) == ("pending", 3)
    return worker, run, message


def undone_as(worker: Bench, run: str) -> str:
    worker.run()
    row = worker.one("SELECT undoes, status FROM {compensation_runs} WHERE run_id = ?", run)
    assert row is not None
    assert row[1] == "completed"
    return str(row[0])


def test_a_run_that_is_compensated_undoes_a_step_that_waits_among_suspects(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """COMP-7: nobody knows what it has done."""
    worker, run, message = waiting_among_suspects(bench, shop, clock)
    assert worker.compensate(run)
    worker.deliver(worker.message_again(message))
    assert undone_as(worker, run) == "unknown"
    assert shop.count("charge") == 1


def test_a_step_that_is_refused_after_its_worker_has_died_is_undone_as_one_that_may_have_done_its_work(
    bench: MakeBench, shop: Shop, clock: ManualClock
) -> None:
    """COMP-7, NATIVE-3: its message is refused unclaimed, and yet its body had begun."""
    worker, run, message = waiting_among_suspects(bench, shop, clock)
    job = Delivery(worker.message_again(message)).job
    assert job is not None
    worker.runner.refuse(job, "charge", UnknownActorError("no worker knows it"))
    assert worker.step(run) == ("failed", 3)
    assert undone_as(worker, run) == "unknown"
