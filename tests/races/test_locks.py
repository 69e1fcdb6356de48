"""Overlap locks, where messages meet: who is put back, who goes on, and what becomes of a lock whose holder is gone (LOCK-1).

Two workers share a Redis and a clock that moves when the test says so. A worker is killed by never letting go of what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis

from dramatiq_saga import Settings, overlaps
from dramatiq_saga.clock import ManualClock
from dramatiq_saga.engine.claim import Claim
from dramatiq_saga.engine.drive import Driven
from dramatiq_saga.engine.rows import Outgoing
from dramatiq_saga.errors import WriteRefusedError
from dramatiq_saga.locks import RedisLocks
from dramatiq_saga.step import Delivery
from tests.races.conftest import MakeBench, Shop
from tests.races.test_interleavings import Doorstep, at_first_step
from tests.races.test_leases import alive, claim, undoing_step
from tests.support.bench import Background, Bench
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)

LEASES = Settings.from_mapping({"reclaim.dead_workers.enabled": True})
WINDOW = Settings.from_mapping({"actions.reclaim.stale_running": {"enabled": True, "after_seconds": 60}})


class Locks(RedisLocks):
    """Counts what it is asked, and does not answer when it is told not to."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.asked: list[str] = []
        self.silent: set[str] = set()

    def _ask(self, script: Any, key: str, *args: Any) -> Any:
        what = "release" if script is self._release else "take"
        self.asked.append(what)
        if what in self.silent:
            raise redis.ConnectionError("away")
        return super()._ask(script, key, *args)


@pytest.fixture
def locks(redis_url: str) -> Locks:
    return Locks(redis_url)


@pytest.fixture
def _no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given back but by whoever asks for another lock."""
    monkeypatch.setattr(overlaps.Timer, "start", lambda timer: None)


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def held(server: redis.Redis) -> list[str]:
    """The locks that there are."""
    return sorted(key.removeprefix("dramatiq-saga:") for key in server.keys("dramatiq-saga:*"))  # type: ignore[union-attr]


def take_and_die(worker: Bench, message: Any, *, claiming: bool) -> None:
    """What a worker leaves behind that is killed with the lock in its hands, before or after its claim."""
    assert worker.runner.overlaps is not None
    assert worker.runner.overlaps.enter(Delivery(message)) is None
    if claiming:
        assert isinstance(claim(worker, message), Claim)


# --- duplicates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "actor", "row"),
    [(at_first_step, "charge", "action"), (undoing_step, "refund", "compensation")],
    ids=["step", "undo"],
)
def test_a_duplicate_is_put_back_while_another_delivery_is_at_work(
    bench: MakeBench,
    shop: Shop,
    locks: Locks,
    server: redis.Redis,
    begin: Callable[[Bench], tuple[str, Any]],
    actor: str,
    row: str,
) -> None:
    """LOCK-1, PAR-2: it neither runs nor is done nor counted; afterwards it finds the row settled, as without locks."""
    first, second = bench(locks=locks), bench(locks=locks)
    run, message = begin(first)
    message.options["group_completion_callbacks"] = []
    before = shop.count(actor)
    shop.bodies[actor] = door = Doorstep()
    slow = Background(lambda: first.deliver(first.message_again(message)))
    door.wait()
    assert held(server) == [f"{row}:{run}:1"]
    duplicate = second.deliver(message)
    assert (duplicate.state, duplicate.back_in) == ("done", 50)
    assert duplicate.attempt is None
    assert "group_completion_callbacks" not in message.options
    door.succeed("done")
    slow.result()
    assert held(server) == []
    assert second.codes() == []
    assert second.deliver(message).back_in is None
    assert second.codes() == ["claim_lost"]
    assert shop.count(actor) == before + 1
    assert held(server) == []


def test_a_message_comes_again_the_later_the_longer_the_lock_has_been_held(
    bench: MakeBench, locks: Locks, clock: ManualClock
) -> None:
    """LOCK-1: after half that time, from 50 milliseconds to ten seconds; and no later than the row may be claimed (CLAIM-2)."""
    first, second = bench(locks=locks, settings=WINDOW), bench(locks=locks, settings=WINDOW)
    _, message = at_first_step(first)
    take_and_die(first, message, claiming=True)
    found = []
    for seconds in (0, 4, 36, 19, -7200):  # the last: a clock that was set
        clock.advance(seconds)
        found.append(second.deliver(message).back_in)
    assert found == [50, 2_000, 10_000, 1_001, 10_000]


def test_a_holder_that_nobody_knows_is_respected(bench: MakeBench, locks: Locks, server: redis.Redis) -> None:
    """LOCK-1: a token of other code, for example, tells nothing of its worker or its age."""
    worker = bench(locks=locks)
    run, message = at_first_step(worker)
    for token in ("somebody", "a b c d"):
        server.set(f"dramatiq-saga:action:{run}:1", token)
        assert worker.deliver(message).back_in == 50
    assert worker.step(run) == ("pending", 0)


def test_a_step_that_outlives_its_lock_is_kept_by_its_claim(
    bench: MakeBench, shop: Shop, locks: Locks, server: redis.Redis
) -> None:
    """LOCK-1, CLAIM-2: correctness never rests on a lock: the duplicate takes it, and runs nothing all the same."""
    first, second = bench(locks=locks), bench(locks=locks)
    run, message = at_first_step(first)
    shop.bodies["charge"] = door = Doorstep()
    slow = Background(lambda: first.deliver(first.message_again(message)))
    door.wait()
    server.pexpire(f"dramatiq-saga:action:{run}:1", 1)
    eventually(lambda: held(server) == [])
    assert second.deliver(message).back_in is None
    assert second.codes() == ["claim_lost"]
    door.succeed("paid")
    slow.result()
    assert first.codes() == []
    assert first.step(run) == ("completed", 1)


def test_blocking_waits_for_the_lock_before_anything_is_put_back(bench: MakeBench, shop: Shop, locks: Locks) -> None:
    """LOCK-1: ``locks.block_seconds``; a worker that stops does not wait."""
    patient = Settings.from_mapping({"locks.block_seconds": 60})
    first, second = bench(locks=locks), bench(locks=locks, settings=patient)
    _, message = at_first_step(first)
    shop.bodies["charge"] = door = Doorstep()
    slow = Background(lambda: first.deliver(first.message_again(message)))
    door.wait()
    asked = len(locks.asked)
    waiting = Background(lambda: second.deliver(message))
    eventually(lambda: len(locks.asked) > asked + 2)
    assert waiting.running
    door.succeed("paid")
    slow.result()
    assert waiting.result().back_in is None
    assert second.codes() == ["claim_lost"]
    locks.take(f"dramatiq-saga:action:{Delivery(message).run_id}:1", "somebody", ttl_ms=60_000)
    second.runner.stopping.set()
    second.store.write(
        lambda tx: tx.run("UPDATE {action_runs} SET status = 'pending', ended_at = NULL WHERE status = 'completed'")
    )
    assert second.deliver(message).back_in == 50


@pytest.mark.parametrize("refused", ["looking at the row", "putting back"])
def test_a_worker_that_stops_before_it_could_put_a_message_back_does_so_later(
    bench: MakeBench, locks: Locks, server: redis.Redis, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCK-1, FENCE-3, NATIVE-3: the store refuses and the worker stops; the message is not taken for one that was refused."""
    worker = bench(locks=locks)
    run, message = at_first_step(worker)
    server.set(f"dramatiq-saga:action:{run}:1", "somebody")
    worker.runner.stopping.set()
    with monkeypatch.context() as patched:
        if refused == "putting back":
            worker.fail("put back", happened=False, unknown=False)
        else:
            patched.setattr(worker.store, "read", refuse)
        delivery = worker.deliver(message)
    assert delivery.state == "new"
    worker.middleware._before_ack(worker.broker, delivery)
    assert delivery.state == "done"
    assert worker.step(run) == ("pending", 0)


def refuse(operation: Any) -> Any:
    raise WriteRefusedError("the database is busy", "begin")


# --- holders that are gone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [at_first_step, undoing_step], ids=["step", "undo"])
@pytest.mark.parametrize("claiming", [True, False], ids=["in its body", "before its claim"])
def test_a_dead_workers_lock_ends_with_its_lease(
    bench: MakeBench,
    locks: Locks,
    server: redis.Redis,
    clock: ManualClock,
    begin: Callable[[Bench], tuple[str, Any]],
    claiming: bool,
) -> None:
    """LOCK-1, RECLAIM-5: recovery waits for the lease, as without locks, and not for the lock's fifteen minutes."""
    make = partial(bench, locks=locks)
    first, _ = alive(make, LEASES)
    run, message = begin(first)
    take_and_die(first, message, claiming=claiming)
    if not claiming:
        message = first.message_again(message, message_id="a repair's")
    clock.advance(59.999)
    second, _ = alive(make, LEASES)
    assert second.deliver(message).back_in == (2 if claiming else 10_000)
    clock.advance(0.001)
    assert second.deliver(message).back_in is None
    row = second.step(run) if begin is at_first_step else second.undo(run)
    assert row == ("completed", 2 if claiming else 1)
    assert held(server) == []


def test_a_lock_ends_with_the_reclaim_window_of_its_row(
    bench: MakeBench, shop: Shop, locks: Locks, server: redis.Redis, clock: ManualClock
) -> None:
    """LOCK-1, RECLAIM-1: the dials do not hold each other up. The lock is taken over, so the tries that follow find none left."""
    first, second = bench(locks=locks, settings=WINDOW), bench(locks=locks, settings=WINDOW)
    run, message = at_first_step(first)
    take_and_die(first, message, claiming=True)
    clock.advance(60)
    shop.bodies["charge"] = lambda order: 1 // 0
    assert second.deliver(message).state == "failed"
    assert held(server) == []
    del shop.bodies["charge"]
    assert first.deliver(message).back_in is None
    assert first.step(run) == ("completed", 3)


@pytest.mark.parametrize("begin", [at_first_step, undoing_step], ids=["step", "undo"])
@pytest.mark.parametrize("failed", [False, True], ids=["before its claim", "after a failed try"])
def test_a_redelivery_does_not_wait_for_a_holder_without_a_claim(
    bench: MakeBench,
    shop: Shop,
    locks: Locks,
    server: redis.Redis,
    clock: ManualClock,
    begin: Callable[[Bench], tuple[str, Any]],
    failed: bool,
) -> None:
    """LOCK-1, CLAIM-1: leases are off, and nobody can tell that its worker is dead; the claim decides, as without locks."""
    first, second = bench(locks=locks), bench(locks=locks)
    run, message = begin(first)
    if failed:
        first.runner.leave = lambda delivery: None  # type: ignore[method-assign]
        shop.bodies["charge"] = shop.bodies["refund"] = lambda order: 1 // 0
        assert first.deliver(first.message_again(message)).state == "failed"
        shop.bodies.clear()
    else:
        take_and_die(first, message, claiming=False)
    clock.advance(4.999)
    assert second.deliver(message).back_in == 2
    clock.advance(0.001)
    assert second.deliver(message).back_in is None
    row = second.step(run) if begin is at_first_step else second.undo(run)
    assert row == ("completed", 1 + failed)
    assert held(server) == []


def test_a_lock_whose_row_is_settled_holds_nobody_up(bench: MakeBench, shop: Shop, locks: Locks, server: redis.Redis) -> None:
    """LOCK-1, DRIVE-2: killed after its outcome and before anything else; the redelivery drives what is unseen, at once."""
    first, second = bench(locks=locks), bench(locks=locks)
    run, message = at_first_step(first)
    first.runner.leave = lambda delivery: None  # type: ignore[method-assign]
    first.engine.workflows.clear()  # its outcome commits with a wake, and the drive is still to come
    first.deliver(first.message_again(message))
    assert held(server) == [f"action:{run}:1"]
    assert second.deliver(message).back_in is None
    assert second.steps(run) == [("charge", "completed"), ("reserve", "pending")]
    assert held(server) == []


def test_without_a_lease_or_a_window_a_lock_ends_with_its_ttl(bench: MakeBench, locks: Locks, server: redis.Redis) -> None:
    """LOCK-1: nobody can tell that its worker is dead; the setting says how long it is believed."""
    first, second = (bench(locks=locks, settings=Settings.from_mapping({"locks.action_ttl_seconds": 7})) for _ in range(2))
    run, message = at_first_step(first)
    take_and_die(first, message, claiming=False)
    left: Any = server.pttl(f"dramatiq-saga:action:{run}:1")
    assert 0 < left <= 7_000
    assert second.deliver(message).back_in == 50
    server.pexpire(f"dramatiq-saga:action:{run}:1", 1)
    eventually(lambda: held(server) == [])
    assert second.deliver(message).back_in is None
    assert second.step(run) == ("completed", 1)


def test_a_holder_that_was_passed_by_gives_back_nothing_that_is_not_its_own(
    bench: MakeBench, shop: Shop, locks: Locks, server: redis.Redis, clock: ManualClock
) -> None:
    """LOCK-1, FENCE-1: it only looked dead; its outcome is refused, and the lock stays with the one that has taken over."""
    make = partial(bench, locks=locks)
    first, _ = alive(make, LEASES)
    run, message = at_first_step(first)
    shop.bodies["charge"] = stalled = Doorstep()
    slow = Background(lambda: first.deliver(first.message_again(message)))
    stalled.wait()
    clock.advance(60)
    second, heart = alive(make, LEASES)
    shop.bodies["charge"] = door = Doorstep()
    other = Background(lambda: second.deliver(message))
    door.wait()
    stalled.succeed("of the first")
    slow.result()
    assert first.codes() == ["outcome_rejected"]
    token: Any = server.get(f"dramatiq-saga:action:{run}:1")
    assert token.startswith(heart.id)
    door.succeed("of the second")
    other.result()
    assert held(server) == []


# --- runs ------------------------------------------------------------------------------------------------------------


def messages_of_a_run(worker: Bench, run: str) -> list[Any]:
    """Of every kind that drives, ends what is due, or is a group's callback."""
    kinds = [Outgoing(kind, run, "checkout", "default", at=worker.engine.now()) for kind in ("timer", "drive")]
    found = [worker.message(outgoing) for outgoing in kinds]
    for facts in ({"block": 1, "first": 2, "last": 3}, {"level": 1}):
        callback = worker.message(Outgoing("drive", run, "checkout", "default"))
        callback.options["saga"] = {"kind": "callback", "run": run, **facts}
        found.append(callback)
    return found


def test_a_run_is_driven_by_one_message_at_a_time(bench: MakeBench, locks: Locks, server: redis.Redis) -> None:
    """LOCK-1: drives, alarms and callbacks of it are put back meanwhile; its steps have locks of their own."""
    first, second = bench(locks=locks), bench(locks=locks)
    run = first.start("checkout", "42")
    stop = first.stop("decision")
    slow = Background(lambda: first.deliver(first.take()))
    stop.wait_reached()
    assert held(server) == [f"run:{run}"]
    for message in messages_of_a_run(second, run):
        assert second.deliver(message).back_in == 50, message
    stop.go()
    assert slow.result() is Driven.DECIDED
    assert held(server) == []
    assert second.deliver(messages_of_a_run(second, run)[1]) is Driven.IDLE


def test_a_killed_drive_holds_its_run_until_it_is_delivered_again_or_its_lease_ends(
    bench: MakeBench, locks: Locks, server: redis.Redis, clock: ManualClock
) -> None:
    """LOCK-1, DRIVE-1, RECLAIM-5: the same message passes after a moment, another one when its worker is known to be dead."""
    first, _ = alive(partial(bench, locks=locks), LEASES)
    second = bench(locks=locks, settings=LEASES)
    run = first.start("checkout", "42")
    message = first.message(first.take())
    take_and_die(first, message, claiming=False)
    another = second.message(Outgoing("drive", run, "checkout", "default"))
    assert second.deliver(message).back_in == 50
    clock.advance(4.9)
    assert second.deliver(message).back_in == 101
    clock.advance(0.1)
    assert second.deliver(another).back_in == 2_500
    assert second.deliver(message) is Driven.DECIDED
    assert held(server) == []
    take_and_die(first, message, claiming=False)
    clock.advance(60)
    assert second.deliver(another) is Driven.IDLE


# --- costs, and no locks ---------------------------------------------------------------------------------------------


def test_a_message_costs_two_round_trips(bench: MakeBench, shop: Shop, locks: Locks, server: redis.Redis) -> None:
    """LOCK-1: taken and given back; what is driven on the spot after an outcome takes no lock of its own, and neither does run_sync."""
    worker, plain = bench(locks=locks), bench(locks=locks)
    reads: list[str] = []
    read = worker.store.read
    run = worker.start("checkout", "42")
    worker.store.read = lambda operation: (reads.append(operation.__qualname__), read(operation))[1]  # type: ignore[method-assign]
    worker.run()
    assert worker.status(run) == "completed"
    assert locks.asked == ["take", "release"] * 4  # a drive and three steps
    assert not [name for name in reads if "Overlaps" in name]
    plain.broker.actors["checkout"].workflow.run_sync("42")  # type: ignore[attr-defined]
    assert len(locks.asked) == 8
    assert held(server) == []


@pytest.mark.usefixtures("_no_timer")
def test_work_goes_on_while_redis_is_away(
    bench: MakeBench,
    shop: Shop,
    locks: Locks,
    server: redis.Redis,
    journal: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LOCK-1: it is said once a minute, and Redis is left alone for a while; afterwards it is asked again."""
    locks.silent = {"take", "release"}
    worker = bench(locks=locks)
    run = worker.start("checkout", "42")
    worker.run()
    assert worker.status(run) == "completed"
    assert locks.asked == ["take"]
    said = [line for line in journal if line["event"] == "locks_unavailable"]
    assert [(line["log_level"], line["error"]) for line in said] == [("warning", "ConnectionError: away")]
    monkeypatch.setattr(overlaps, "PAUSE", 0)
    assert worker.runner.overlaps is not None
    worker.runner.overlaps._away_until = 0
    worker.start("checkout", "again")
    worker.run()
    assert len(locks.asked) > 4
    assert len([line for line in journal if line["event"] == "locks_unavailable"]) == 1
    locks.silent, locks.asked = set(), []
    run = worker.start("checkout", "43")
    worker.run()
    assert locks.asked == ["release"] * 5 + ["take", "release"] * 4  # what may have been taken unseen is given back first
    assert held(server) == []


@pytest.mark.usefixtures("_no_timer")
def test_a_lock_that_could_not_be_given_back_is_given_back_with_the_next_that_is_asked_for(
    bench: MakeBench, locks: Locks, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCK-1: a server that was away for a moment has kept it, and would hold up the row's next message until its TTL."""
    monkeypatch.setattr(overlaps, "PAUSE", 0)
    worker = bench(locks=locks)
    run, message = at_first_step(worker)
    locks.silent = {"release"}
    worker.deliver(message)
    assert held(server) == [f"action:{run}:1"]
    locks.silent = set()
    worker.deliver(worker.take())
    assert held(server) == []


def test_a_lock_that_could_not_be_given_back_is_given_back_by_an_idle_worker(
    bench: MakeBench, locks: Locks, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCK-1: nothing else comes to the worker that owes it, and Redis stays away for several looks; each debt has its own end."""
    monkeypatch.setattr(overlaps, "PAUSE", 0.01)
    worker = bench(locks=locks)
    for _ in range(2):
        run, message = at_first_step(worker)
        locks.asked, locks.silent = [], {"release"}
        worker.deliver(message)
        assert held(server) == [f"action:{run}:1"]
        eventually(lambda: locks.asked.count("release") > 3)
        assert held(server) == [f"action:{run}:1"]
        locks.silent = set()
        eventually(lambda: held(server) == [])
        assert worker.runner.overlaps is not None
        eventually(lambda: worker.runner.overlaps._untimed == [None], because="nothing is owed, and no timer is left")
        worker.sender.queue.clear()
