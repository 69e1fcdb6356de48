"""The scenarios: small enough that everything which can happen in them does."""

from __future__ import annotations

from typing import Any

from tests.model.explorer import Scenario
from tests.model.world import World


def one_step(world: World) -> None:
    charge, refund = world.actor("charge"), world.actor("refund")

    def checkout(flow: Any) -> None:
        flow.action(charge).compensate_with(refund).run()

    world.workflow(checkout)


def two_steps(world: World) -> None:
    charge, refund, ship, recall = (world.actor(name) for name in ("charge", "refund", "ship", "recall"))

    def checkout(flow: Any) -> None:
        flow.action(charge).compensate_with(refund).run()
        flow.action(ship).compensate_with(recall).expires_in(500).run()

    world.workflow(checkout)


def hurried(world: World) -> None:
    """Its first step has a deadline, and another one follows."""
    charge, refund, ship = (world.actor(name) for name in ("charge", "refund", "ship"))

    def checkout(flow: Any) -> None:
        flow.action(charge).compensate_with(refund).expires_in(500).run()
        flow.run(ship)

    world.workflow(checkout)


def hurried_alone(world: World) -> None:
    """Its only step has a deadline."""
    charge, refund = world.actor("charge"), world.actor("refund")

    def checkout(flow: Any) -> None:
        flow.action(charge).compensate_with(refund).expires_in(500).run()

    world.workflow(checkout)


def three_steps(world: World) -> None:
    charge, refund, ship, recall, tell = (world.actor(name) for name in ("charge", "refund", "ship", "recall", "tell"))

    def checkout(flow: Any) -> None:
        flow.action(charge).compensate_with(refund).run()
        flow.action(ship).compensate_with(recall).run()
        flow.run(tell)

    world.workflow(checkout)


def careful(world: World) -> None:
    """Its step is undone even when nobody knows how it ended."""
    charge, refund = world.actor("charge"), world.actor("refund")

    def checkout(flow: Any) -> None:
        flow.action(charge).compensate_with(refund).compensate_step_on_self_failure().run()

    world.workflow(checkout)


def side_by_side(world: World) -> None:
    charge, refund, ship, recall = (world.actor(name) for name in ("charge", "refund", "ship", "recall"))

    def checkout(flow: Any) -> None:
        flow.parallel(flow.action(charge).compensate_with(refund), flow.action(ship).compensate_with(recall)).run()

    world.workflow(checkout)


#: What is explored with every run of the suite. With ``DRAMATIQ_SAGA_TEST_THOROUGH`` each has ``more`` added to its budgets.
SCENARIOS = (
    Scenario("one step", one_step, {"doubled": 1, "crash": 1, "fails": 1, "later": 1}, more={"compensate": 1}),
    Scenario("one step undone", one_step, {"crash": 1, "fails": 1, "later": 1, "compensate": 1}, more={"lost": 1, "doctor": 1}),
    Scenario("undone as unknown", careful, {"crash": 1, "later": 1, "compensate": 1}, more={"fails": 1, "doubled": 1}),
    Scenario(
        "deadline", hurried, {"crash": 1, "later": 1, "monitor": 1, "cancel": 1}, workers=1,
        more={"fails": 1, "doubled": 1},
    ),
    Scenario("everybody", hurried_alone, {"later": 1, "monitor": 1, "doctor": 1, "cancel": 1}, workers=1, more={"crash": 1}),
    Scenario(
        "deadline and undo", two_steps, {"later": 1, "monitor": 1, "compensate": 1}, before=("succeeds",), workers=1,
        more={"crash": 1, "fails": 1},
    ),
    Scenario(
        "halted rollback", three_steps, {"crash": 1, "fails": 1, "later": 1, "resume": 1}, workers=1,
        before=("succeeds", "succeeds", "compensate"), more={"kick": 1},
    ),
    Scenario(
        "undo left behind", three_steps, {"doubled": 1, "resume": 1}, reclaims_undos=False,
        before=("succeeds", "succeeds", "compensate"), more={"crash": 1},
    ),
    Scenario("block", side_by_side, {"lost": 1, "later": 1, "doctor": 1}, workers=1, more={"fails": 1}),
    Scenario("block that fails", side_by_side, {"fails": 1}, more={"crash": 1, "later": 1}),
    Scenario("foreign broker", one_step, {"crash": 1, "later": 1, "doctor": 1}, workers=1, joins=False, more={"compensate": 1}),
    Scenario("no answer", one_step, {"unknown": 1, "crash": 1, "fails": 1, "compensate": 1}, more={"doubled": 1, "later": 1}),
    Scenario(
        "no answer in a rollback", three_steps, {"unknown": 2, "crash": 1, "fails": 1, "later": 1}, workers=1,
        before=("succeeds", "succeeds", "compensate"), more={"doubled": 1},
    ),
    Scenario("kicked", two_steps, {"kick": 1, "is shut down": 1}, before=("succeeds",), more={"doubled": 1}),
)  # fmt: skip

#: Five minutes and six gigabytes: with ``DRAMATIQ_SAGA_TEST_THOROUGH`` only.
EVERYBODY_TWICE = Scenario("everybody, two workers", hurried_alone, {"later": 1, "monitor": 1, "doctor": 1, "cancel": 1})

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
