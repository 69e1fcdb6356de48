"""The demonstration: a shop on one SQLite file loses two of its workers to SIGKILL, and every order still ends as it must.

It says what it does while it does it, prints what each run went through, and then checks its own promises against what the world
outside remembers. Exit status 0 means that all of them held.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # run by its path from anywhere
    sys.path.insert(0, str(ROOT))

from examples.demo.timeline import Kill, timeline  # noqa: E402
from examples.demo.workers import Worker, stop  # noqa: E402

if TYPE_CHECKING:
    from dramatiq_saga import FlowHandle

T = TypeVar("T")

#: Longest wait for anything, in seconds; only reached when a promise is broken.
PATIENCE = 45.0


class BrokenPromise(Exception):
    """Something did not go as this demonstration says."""


class Demo:
    """The story, in order."""

    def __init__(self, directory: Path) -> None:
        from examples.demo import shop  # after the directory is known: the shop opens its files there

        self.shop = shop
        self.directory = directory
        self.workers: dict[str, Worker] = {}
        self.runs: dict[str, FlowHandle[Any]] = {}
        self.kills: list[Kill] = []

    def run(self) -> None:
        shop = self.shop
        say(f"A shop on one SQLite file ({self.directory / 'shop.db'}): queue and saga state, nothing else to run.")
        say("An order is a saga of three steps: charge_card, reserve_stock, ship_order. The first two can be undone.\n")
        self.start("A")
        self.start("B")

        say("\nThe lamp is ordered. The bank takes the money, and then, before it has answered ...")
        self.order("lamp")
        self.kill_during("lamp", "charge_card", lambda: shop.world.lines("charged", order="lamp"))
        say(
            f"      Step 1 stays 'running' and nobody works on it. Its message comes back after {shop.RETRY_AFTER} s without a sign of life;"
        )
        say(f"      whoever gets it may not run the step yet and puts it back until the claim is {shop.RECLAIM_AFTER} s old.")
        say("      The step then runs again with the same idempotency key, so the bank repeats its answer and moves no money.")

        say("\nMeanwhile four other orders. No van for the vase at first; nobody can deliver the piano.")
        for name in ("book", "tea", "vase", "piano"):
            self.order(name)
        for name in ("book", "tea", "vase", "piano", "lamp"):
            self.finish(name)
        self.quote("lamp", "claim_lost")

        say("\nThe mirror cannot be delivered either. It is being undone, and in the middle of that ...")
        self.order("mirror")
        self.kill_during("mirror", "release_stock", lambda: shop.world.lines("body", actor="release_stock", order="mirror"))
        say("      The plan of a rollback is rows. It goes on where it stopped, and needs no worker to remember it.")
        self.finish("mirror")
        self.quote("mirror", "claim_lost")

    # --- what it does ------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.workers[name] = worker = Worker(name, self.directory)
        say(f"      worker {name} started (process {worker.pid}: python -m dramatiq examples.demo.shop)")

    def order(self, name: str) -> None:
        self.runs[name] = self.shop.checkout.send_with_options(args=(name,), run_id=f"order-{name}")

    def kill_during(self, order: str, actor: str, reached: Callable[[], object]) -> None:
        """Wait until the step is in the middle of its work, and kill the worker that runs it, as a power cut would."""
        self.wait(reached, f"{actor} of the {order} is at work")
        (body,) = self.shop.world.lines("body", actor=actor, order=order)
        victim = self.workers.pop(body["worker"])
        victim.kill()
        self.kills.append(Kill(time.time_ns() // 1_000_000, self.runs[order].id, victim.name))
        say(f"  *** worker {victim.name} (process {victim.pid}) is killed with SIGKILL in the middle of {actor} ***")
        self.start("ABCD"[2 + len(self.kills) - 1])

    def finish(self, order: str) -> None:
        run = self.runs[order]
        self.wait(lambda: run.status.value in ("completed", "failed"), f"the {order} is finished")
        undone = ", then ".join(row.actor for row in run.compensations())
        say(f"      {order}: {run.status}" + (f", undone by {undone}" if undone else ""))

    def quote(self, order: str, word: str) -> None:
        """What the workers' own logs say of an order."""
        for worker in self.workers.values():
            for line in worker.log.read_text(errors="replace").splitlines():
                if word in line and f"run_id={self.runs[order].id} " in line:
                    say(f"      (log of worker {worker.name}: {' '.join(line[line.index(word) :].split())})")

    def wait(self, reached: Callable[[], T], what: str) -> T:
        until = time.monotonic() + PATIENCE
        while not (found := reached()):
            for worker in self.workers.values():
                if not worker.running:
                    raise BrokenPromise(f"worker {worker.name} ended by itself:\n{worker.log.read_text(errors='replace')}")
            if time.monotonic() > until:
                raise BrokenPromise(f"not within {PATIENCE:g} s: {what}")
            time.sleep(0.01)
        return found

    def show(self) -> None:
        say("\nWhat each run went through")
        for run in self.runs.values():
            say(f"\n  {run.id}: {run.status}")
            for line in timeline(run, self.kills):
                say(f"  {line}")

    # --- what it promised --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the rows with what the world outside remembers."""
        world = self.shop.world
        say("\nChecked against what bank, warehouse and carrier remember")

        promise(
            "book, tea, vase and lamp completed; piano and mirror failed and were undone",
            {name: (str(run.status), str(run.rollback)) for name, run in self.runs.items()},
            {
                **dict.fromkeys(("lamp", "book", "tea", "vase"), ("completed", "none")),
                **dict.fromkeys(("piano", "mirror"), ("failed", "done")),
            },
        )
        for name in ("piano", "mirror"):
            bodies = [line["actor"] for line in world.lines("body", order=name)]
            order = list(dict.fromkeys(bodies))
            promise(
                f"{name}: done in order, undone in reverse order",
                order,
                ["charge_card", "reserve_stock", "ship_order", "release_stock", "refund_card"],
            )
        tries: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in world.lines("body"):
            tries.setdefault((line["order"], line["actor"]), []).append(line)
        promise(
            "no step ran again once its outcome was recorded: twice ran only what was killed in the middle, and what failed",
            {key: len(bodies) for key, bodies in tries.items() if len(bodies) > 1},
            {("lamp", "charge_card"): 2, ("vase", "ship_order"): 2, ("mirror", "release_stock"): 2},
        )
        promise(
            "each try of a step had the same idempotency key",
            [key for key, bodies in tries.items() if len({line["key"] for line in bodies}) > 1],
            [],
        )
        promise(
            "the bank charged each card once, although it was asked twice for the lamp",
            (
                sorted(line["order"] for line in world.lines("charged")),
                [line["order"] for line in world.lines("charge_repeated")],
            ),
            (sorted(self.runs), ["lamp"]),
        )
        promise(
            "the bank gave back the money for piano and mirror, once each, and no other",
            (sorted(line["id"] for line in world.lines("refunded")), world.lines("refund_repeated")),
            (["ch-mirror", "ch-piano"], []),
        )


def promise(words: str, found: object, expected: object) -> None:
    """Say that something holds, or stop because it does not."""
    if found != expected:
        raise BrokenPromise(f"{words}\n  expected: {expected!r}\n  found:    {found!r}")
    say(f"  ok  {words}")


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def directory(keep: bool) -> Iterator[Path]:
    """A new directory inside the checkout; removed at the end, kept where something went wrong."""
    parent = ROOT / "build"
    parent.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    try:
        yield path
    except BaseException as error:
        keep = keep or not isinstance(error, KeyboardInterrupt | BrokenPipeError)
        raise
    finally:
        if keep:
            print(
                f"\nDatabase and logs are kept in {path}\nLook at a run with: {look(path / 'shop.db')} --events",
                file=sys.stderr,
            )
        else:
            shutil.rmtree(path, ignore_errors=True)


def look(database: Path) -> str:
    """The command that shows a run, as it can be typed without the environment's programs on the path."""
    return shlex.join([sys.executable, "-m", "dramatiq_saga.cli", "--database", str(database), "show", "order-mirror"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the database and the workers' logs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupted)
    started = time.monotonic()
    try:
        with directory(options.keep) as path:
            os.environ["SAGA_DEMO_DIRECTORY"] = str(path)
            demo = Demo(path)
            try:
                demo.run()
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave half of them running
                stop(demo.workers.values())
            demo.show()
            demo.check()
            demo.shop.broker.close()
    except BrokenPromise as broken:
        print(f"\nBROKEN PROMISE: {broken}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; all workers are stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on: piped into head, for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    say(f"\nEverything went as promised, in {time.monotonic() - started:.0f} s.")
    if not options.keep:
        say(f"With --keep the database stays, to be looked at with {look(Path('DIRECTORY', 'shop.db'))}")
    return 0


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
