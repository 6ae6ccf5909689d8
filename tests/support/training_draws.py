"""Draws of the manager's features, so that each pair of values meets in one run, and the run that checks a draw."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.flipping import flip_shard
from support.pairs import pairs
from support.training_lives import Life, Lives
from support.waiting import HANG_S
from tierfs.dcp.address import Address
from tierfs.store.maintenance.gc.report import GcOptions
from tierfs.store.maintenance.gc.run import collect
from tierfs.train import Best, Every, Latest, Manager, Preemption, YoungDaly

ENDINGS = {
    "kill": [signal.SIGKILL],
    "terminate": [signal.SIGTERM],
    "usr1 and terminate": [signal.SIGUSR1, signal.SIGTERM],
}
FACTORS: dict[str, dict[str, Any]] = {
    "save": {
        "steps": [Every(steps=4), Preemption()],
        "minutes": [Every(minutes=0.004), Every(steps=5), Preemption()],
        "young-daly": [YoungDaly(mtbf="3s"), Every(steps=5), Preemption()],
    },
    "light": {"none": [], "steps": [Every(steps=2)]},
    "keep": {
        "all": [],
        "latest": [Latest(2)],
        "tiers": {"object": [Latest(2)], "ram": [Latest(1)]},
        "best": [Best(1, "loss"), Latest(1)],
    },
    "ack": dict.fromkeys(("staged", "local", "object")),
    "on_corrupt": dict.fromkeys(("previous", "raise")),
    "loader": dict.fromkeys(("none", "stateful", "distributed", "workers")),
    "ranks": dict.fromkeys((1, 2)),
    "ending": dict.fromkeys(("finished", "rollback", "damaged", *ENDINGS)),
    "bucket": dict.fromkeys(("well", "slow", "away")),
}
FIRST, MORE, LAST = 14, 5, 80
"""The steps of the first life, those that each later one adds, and those that a draw never reaches."""
TERMINATED = 128 + signal.SIGTERM
ENDED_WITH = {"kill": -signal.SIGKILL, "terminate": TERMINATED, "usr1 and terminate": TERMINATED}


def covering(seed: int) -> list[dict[str, Any]]:
    """Return draws, one value of each factor, so that each pair of values is in one of them."""
    return pairs({name: list(values) for name, values in FACTORS.items()}, seed)


class Draw:
    """One run of a draw: a life that ends as drawn, and two lives that go on from it.

    Args:
        lives: Starts the lives.
        directory: An empty directory.
        draw: The values.
        root: The URL of a store.
        options: Options of the manager for that store.
    """

    def __init__(self, lives: Lives, directory: Path, draw: dict[str, Any], root: str, options: dict[str, Any]) -> None:
        self.lives, self.directory, self.draw = lives, directory, draw
        self.url, self.options = f"{root}/run", options
        self.is_exact = True

    def start(self, name: str, steps: int, host: str = "here", **settings: Any) -> Life:
        given = {name: FACTORS[name][self.draw[name]] for name in ("save", "light", "keep")}
        given |= {name: self.draw[name] for name in ("ack", "on_corrupt")}
        given |= self.of_host(host)
        settings = {"manager": given, "loader": self.draw["loader"], "steps": steps, "pause_s": 0.01, **settings}
        return self.lives.start(self.draw["ranks"], self.directory, name, self.url, settings)

    def of_host(self, host: str) -> dict[str, Any]:
        if host == "elsewhere":
            return {"ram": "0", "nvme": "0", **self.options}
        return {"ram": "32MiB", "nvme": "0", "state_dir": f"{self.directory}/{host}", **self.options}

    def manager(self, host: str = "here") -> Manager:
        return Manager(self.url, save=(), **self.of_host(host))

    def full(self, host: str = "here") -> list[int]:
        """Return the steps with a complete full checkpoint, as a host sees them."""
        with self.manager(host) as run:
            return [each.step for each in run.checkpoints if each.is_complete and each.kind == "full"]

    def check(self, expected: list[dict[int, str]], trouble: Callable[[Draw], threading.Thread | None]) -> None:
        """Run the draw, and check its invariants.

        Args:
            expected: The losses of an uninterrupted run, by rank and step.
            trouble: Makes the bucket slow or takes it away for a while. Called while the first life runs. It may return
                a thread that ends when the bucket is back.
        """
        ending, size = self.draw["ending"], self.draw["ranks"]
        signals = ENDINGS.get(ending, [])
        first = self.start("first", 10_000 if signals else FIRST)
        first.wait_for_step(1)
        back = trouble(self)
        if signals:
            first.wait_for_step(random.Random(str(self.draw)).randrange(6, FIRST))
        for number in signals:
            first.signal(number)
            time.sleep(0.02)
        assert first.codes() == [ENDED_WITH.get(ending, 0)] * size, first.errors()
        if back is not None:
            back.join()
        made = max(first.losses()[0]) + 1
        newest, host, restore = self.saved_in(first, expected), "here", None
        if ENDED_WITH.get(ending) == TERMINATED:
            assert newest == made - 1
        if ending == "rollback" and len(self.full()) > 1:
            newest = restore = self.full()[-2]
        if ending == "damaged":
            host = "there"  # this host has no sound copy
            self.wait_until(lambda: self.full(host) == self.full())  # what was pruned is gone there, too
            flip_shard(f"{self.url}/step_{newest}", **self.options)
            newest = max((step for step in self.full(host) if step != newest), default=None)
            if self.draw["on_corrupt"] == "raise" or newest is None:
                refused = self.start("refused", made, host)
                assert refused.codes() == [1] * size
                assert "CorruptionError" in refused.errors()
                return
        # The restart after a life that went back may undo that.
        for name in ("second", "third")[: 1 if ending in {"finished", *ENDINGS} else 2]:
            made += MORE
            life = self.start(name, made, host, restore=restore)
            assert life.codes() == [0] * size, life.errors()
            self.went_on_from(newest, life)
            newest, restore = self.saved_in(life, expected, host), None
        self.check_retention(life, host)

    def saved_in(self, life: Life, expected: list[dict[int, str]], host: str = "here") -> int | None:
        """Check the losses and saves of a life that has ended. Return the newest full step."""
        for facts, losses, right in zip(life.facts(), life.losses(), expected, strict=True):
            assert not self.is_exact or losses == {step: right[step] for step in losses}
            assert facts[-1].get("errors", []) == []
        newest, facts = max(self.full(host), default=None), life.facts()[0]
        if "ended" in facts[-1]:  # a life that was killed may have unfinished saves
            assert newest == max(
                fact["saved"] for fact in facts if fact.get("saved") is not None and fact["kind"] == "full"
            )
        return newest

    def went_on_from(self, newest: int | None, life: Life) -> None:
        """Check that a life went on exactly from a step. Without a full step, it says that it is not exact."""
        for facts in life.facts():
            restored = next((fact for fact in facts if "restored" in fact), None)
            if newest is not None:
                assert (restored["restored"], restored["kind"]) == (newest, "full")
                assert restored["is_exact"] is self.is_exact or restored["is_exact"]
            elif restored is not None:
                assert (restored["kind"], restored["is_exact"]) == ("light", False)
                self.is_exact = False

    def check_retention(self, life: Life, host: str) -> None:
        """Check that the steps which a policy keeps are there, and no others; and that gc misses nothing."""
        facts = life.facts()[0]
        restored = {fact["restored"] for fact in facts if "restored" in fact}
        saved = [fact["saved"] for fact in facts if "saved" in fact and fact["kind"] == "full"]
        count = {"latest": 2, "tiers": 2, "best": 1}.get(self.draw["keep"])
        there = self.full(host)
        assert set(there) >= restored | set(saved[-count:] if count else saved)
        if count:  # and the best one, the restored one, and the newest one in the object tier
            assert len(there) <= count + 3, there
        self.wait_until(lambda: saved[-1] in self.full("elsewhere"))
        store = Address.of(self.url, self.of_host("elsewhere")).open()[0]
        report = collect(store, GcOptions(dry_run=True))
        assert (report.missing, list(report.unreadable)) == (0, [])

    @staticmethod
    def wait_until(is_true: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + HANG_S
        while not is_true():
            assert time.monotonic() < ends_s
            time.sleep(0.1)
