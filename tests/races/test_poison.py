"""What dies with a worker: the step that has killed it, and its neighbours (RECLAIM-6)."""

from __future__ import annotations

from dramatiq.middleware import Shutdown

from dramatiq_saga import Settings
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.claim import Claim
from dramatiq_saga.step import OPTION
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import Doorstep, at_first_step
from tests.races.test_leases import claim
from tests.support.bench import Background, Bench

WINDOW = Settings.from_mapping({"actions.reclaim.stale_running": {"enabled": True, "after_seconds": 60}})


def claims(worker: Bench, run: str) -> int:
    row = worker.store.read(lambda tx: tx.one("SELECT claims FROM {action_runs} WHERE run_id = ? AND sequence = 1", (run,)))
    assert row is not None
    return int(row[0])


def test_a_step_that_kills_its_workers_takes_its_neighbours_down_once(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-6: of those that a dead process has left, another process is at one at a time; who waits its turn spends nothing."""
    dead, worker = bench(settings=WINDOW), bench(settings=WINDOW)
    killer, of_killer = at_first_step(dead)
    neighbour, of_neighbour = at_first_step(dead)
    for message in (of_killer, of_neighbour):
        assert isinstance(claim(dead, message), Claim)
    clock.advance(61)
    shop.bodies["charge"] = door = Doorstep()
    at_work = Background(lambda: worker.deliver(of_killer))
    door.wait()
    worker.deliver(of_neighbour)
    assert (worker.step(neighbour), claims(worker, neighbour)) == (("pending", 2), 1)
    assert of_neighbour.options[OPTION]["suspect"] is True
    for _ in range(10):  # it comes again and again, and is put back before it claims
        worker.deliver(worker.message_again(of_neighbour))
    assert (worker.step(neighbour), claims(worker, neighbour)) == (("pending", 2), 1)
    assert shop.count("charge") == 1

    del shop.bodies["charge"]
    elsewhere = bench(settings=WINDOW)
    elsewhere.deliver(elsewhere.message_again(of_neighbour))
    assert elsewhere.step(neighbour) == ("completed", 3)

    door.succeed("charged after all")
    at_work.result()
    assert worker.step(killer) == ("completed", 2)


def test_a_suspect_waits_for_no_longer_than_the_other_one_is_at_work(bench: MakeBench, shop: Shop, clock: ManualClock) -> None:
    """RECLAIM-6: whichever way that ends; what has never been claimed before does not wait at all."""
    worker = bench(settings=WINDOW)
    runs = [at_first_step(worker) for _ in range(3)]
    for _, message in runs[:2]:
        assert isinstance(claim(worker, message), Claim)
    clock.advance(61)
    shop.bodies["charge"] = door = Doorstep()
    at_work = Background(lambda: worker.deliver(runs[0][1]))
    door.wait()
    del shop.bodies["charge"]
    worker.deliver(runs[2][1])
    assert worker.step(runs[2][0]) == ("completed", 1)
    worker.deliver(runs[1][1])
    assert worker.step(runs[1][0]) == ("pending", 2)
    door.fail(ValueError("it has not killed anybody"))
    at_work.result()
    worker.deliver(worker.message_again(runs[1][1]))
    assert worker.step(runs[1][0]) == ("completed", 3)


def test_a_body_that_may_begin_once_is_not_begun_again_by_the_next_worker(bench: MakeBench, shop: Shop) -> None:
    """RECLAIM-6, C20: a deployment that interrupts it (``notify_shutdown``) ends it, where another step's claim is given back."""
    worker = bench(settings=Settings.from_mapping({"reclaim.max_claims": 1}))
    run, message = at_first_step(worker)
    shop.bodies["charge"] = door = Doorstep()
    at_work = Background(lambda: worker.deliver(message))
    door.wait()
    door.fail(Shutdown())
    at_work.result()
    assert worker.step(run) == ("failed", 1)
    worker.deliver(worker.message_again(message))
    assert shop.count("charge") == 1
    assert worker.status(run) == "failed"
