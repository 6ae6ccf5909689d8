"""Play ``tierfs demo``: one uninterrupted run, and one that is killed in a save, resumed, terminated and resumed.

`tierfs.demo.worker` does the training in its own processes, so this module imports no torch.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import fsspec

from tierfs.demo.ranks import RankGroup
from tierfs.demo.report import CompletedSave, Proof, Report, compare_losses
from tierfs.errors import AlreadyExistsError, CorruptionError, StoreNotFoundError, TierfsError
from tierfs.session import init, open_store, parse_url
from tierfs.store import usage
from tierfs.units import format_bytes

_WORLD_SIZE = 2
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The checked options."""

    steps: int
    every: int
    parameters: int
    timeout_s: float

    @property
    def killed_at(self) -> int:
        """The step whose save is killed: the save after the middle one, and never the first."""
        return (self.steps // self.every // 2 + 1) * self.every

    def terminated_at(self, resumed_from: int) -> int:
        """Return the step at which one rank of the resumed run gets SIGTERM: about half way, where no save is due."""
        step = resumed_from + max(1, (self.steps - resumed_from) // 2)
        if step % self.every:
            return step
        return step + 1 if step + 2 < self.steps else max(resumed_from + 1, step - 1)


@dataclass(slots=True)
class DemoRun:
    """The reports of one run's phases."""

    losses: dict[int, str] = field(default_factory=dict)
    blocked_s: dict[int, float] = field(default_factory=dict)
    training_s: float = 0.0
    parameters: int = 0
    digest: str = ""
    begun_at: int = 0
    stopped_at: int | None = None
    proofs: list[Proof] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Record one event of rank 0."""
        if event["event"] == "start":
            self.parameters = event["parameters"]
            self.begun_at = event["step"]
        elif event["event"] == "proof":
            self.proofs.append(Proof(event["step"], event["proven"], event["replayed"], event["text"]))
            found = "equal to what was saved" if event["proven"] else "NOT equal to what was saved"
            again = f", {event['replayed']} steps replayed" if event["replayed"] else ""
            say(f"  step {event['step']:>4}  the resumed state is {found}, part by part{again}")
        elif event["event"] == "stopped":
            self.stopped_at = event["step"]
        elif event["event"] == "step":
            self.losses[event["step"]] = event["loss"]
            self.training_s += event["seconds"]
        elif event["event"] == "save":
            self.blocked_s[event["step"]] = event["seconds"]
            self.training_s += event["seconds"]
            loss = float.fromhex(self.losses[event["step"]])
            size = format_bytes(event["bytes"])
            blocked_ms = event["seconds"] * 1000
            say(f"  step {event['step']:>4}  loss {loss:.4f}  saves {size}, training blocked for {blocked_ms:.0f} ms")
        elif event["event"] == "done":
            self.digest = event["digest"]


class Demo:
    """The phases of the demo, in order.

    Args:
        url: The demo writes ``straight/`` and ``resumed/`` below it.
        plan: The checked options.
    """

    def __init__(self, url: str, plan: DemoPlan) -> None:
        self._url = url
        self._plan = plan

    def play(self) -> Report:
        """Run all phases, and report their results."""
        try:
            store, path = open_store(parse_url(self._url))
        except StoreNotFoundError:
            store, path = init(self._url), ""
        filesystem, root = fsspec.url_to_fs(self._url)
        for name in ("straight", "resumed"):
            if filesystem.exists(f"{root}/{name}"):
                raise AlreadyExistsError(
                    f"{self._url}/{name} exists, from an earlier demo: remove it or give another --url", path=self._url
                )
        stored = [usage(store, path, shared=False).stored_bytes if filesystem.exists(root) else 0]
        plan = self._plan
        began = time.monotonic()

        say(f"1/4 {plan.steps} steps without interruption, {_WORLD_SIZE} ranks, saving every {plan.every}")
        straight, resumed = DemoRun(), DemoRun()
        self._follow("uninterrupted run", straight, "straight")
        filesystem.wait(root, "object", timeout=plan.timeout_s)
        stored.append(usage(store, path, shared=False).stored_bytes)

        say(f"2/4 the same again, killed in the middle of the save of step {plan.killed_at}")
        self._follow_until_killed(resumed)
        resumed_from = self._newest_complete(filesystem, f"{root}/resumed")
        kept = {step: loss for step, loss in resumed.losses.items() if step <= resumed_from}

        say(f"3/4 resuming from step {resumed_from}; SIGTERM to one rank at step {plan.terminated_at(resumed_from)}")
        resumed.losses = {}
        self._follow("run to be terminated", resumed, "resumed", terminate=plan.terminated_at(resumed_from))
        self._check_begun(resumed, resumed_from)
        stopped_at = resumed.stopped_at
        assert stopped_at is not None, "every rank ended with the exit code for it"
        say(f"  step {stopped_at:>4}  all ranks saved it, and ended with exit code {_TERMINATED}")

        say(f"4/4 resuming from step {stopped_at}")
        self._follow("resumed run", resumed, "resumed")
        self._check_begun(resumed, stopped_at)
        filesystem.wait(root, "object", timeout=plan.timeout_s)
        say(f"done after {time.monotonic() - began:.0f} s")

        # Steps up to the resume point are from the killed process. Later steps are from the resumed processes only.
        resumed.losses.update(kept)
        checkpoints = [
            CompletedSave(
                f"{name}/step_{step}",
                filesystem.du(f"{root}/{name}/step_{step}"),
                blocked_s,
                filesystem.ack(f"{root}/{name}/step_{step}/.metadata"),
            )
            for name, one in (("straight", straight), ("resumed", resumed))
            for step, blocked_s in sorted(one.blocked_s.items())
        ]
        stored.append(usage(store, path, shared=False).stored_bytes)
        return Report(
            url=self._url,
            parameters=straight.parameters,
            killed_at=plan.killed_at,
            resumed_from=resumed_from,
            terminated_at=stopped_at,
            proofs=resumed.proofs,
            rows=compare_losses(straight.losses, resumed.losses, last=plan.steps),
            digests=(straight.digest, resumed.digest),
            checkpoints=checkpoints,
            stored_bytes={"straight": stored[1] - stored[0], "resumed": stored[2] - stored[1]},
            training_s=straight.training_s + resumed.training_s,
        )

    def _check_begun(self, run: DemoRun, expected: int) -> None:
        """Check that a run resumed from the expected checkpoint."""
        if run.begun_at != expected:
            raise CorruptionError(
                f"step {expected} is the newest complete checkpoint, but the run resumed from {run.begun_at}"
            )

    def _ranks(self, phase: str, name: str, *more: str, ends_with: int = 0) -> RankGroup:
        plan = self._plan
        options = {"url": f"{self._url}/{name}", "steps": plan.steps, "every": plan.every, "params": plan.parameters}
        arguments = [part for option, value in options.items() for part in (f"--{option}", str(value))]
        return RankGroup(
            phase, [*arguments, *more], world_size=_WORLD_SIZE, timeout_s=plan.timeout_s, ends_with=ends_with
        )

    def _follow(self, phase: str, told: DemoRun, name: str, *, terminate: int | None = None) -> None:
        """Run one phase to its end, or until SIGTERM at step ``terminate`` ends it."""
        more = () if terminate is None else ("--terminate", str(terminate))
        with self._ranks(phase, name, *more, ends_with=0 if terminate is None else _TERMINATED) as ranks:
            for event in ranks.events():
                told.take(event)

    def _follow_until_killed(self, told: DemoRun) -> None:
        """Run one phase until all its ranks are in the middle of a save, and kill them there."""
        halted: set[int] = set()
        with self._ranks("run to be killed", "resumed", "--halt", str(self._plan.killed_at)) as ranks:
            for event in ranks.events():
                if event["event"] == "mid-save":
                    halted.add(event["rank"])
                    if len(halted) == _WORLD_SIZE:
                        break
                else:
                    told.take(event)
            codes = ranks.kill()
        if codes != [-signal.SIGKILL] * _WORLD_SIZE:
            raise TierfsError(f"SIGKILL did not end every rank in the middle of the save: the exit codes are {codes}")
        say(f"  step {self._plan.killed_at:>4}  SIGKILL to all {_WORLD_SIZE} ranks in the middle of its save")

    def _newest_complete(self, filesystem: fsspec.AbstractFileSystem, directory: str) -> int:
        """Return the newest step with a complete checkpoint, after checking that the killed save is not complete."""
        steps = _complete_steps(filesystem, directory)
        killed_at = self._plan.killed_at
        if killed_at in steps:
            raise CorruptionError(f"the save of step {killed_at} was killed half way, but its .metadata exists")
        if not steps:
            raise CorruptionError(f"there is no complete checkpoint below {directory}", path=directory)
        say(f"  step {killed_at:>4}  its directory has no .metadata; complete: {', '.join(map(str, steps))}")
        return steps[-1]


def _complete_steps(filesystem: fsspec.AbstractFileSystem, directory: str) -> list[int]:
    """Return the steps whose checkpoint has a ``.metadata``, which DCP writes last, in order."""
    names = [str(path).rstrip("/").rpartition("/")[2] for path in filesystem.ls(directory, detail=False)]
    steps = [int(name.removeprefix("step_")) for name in names if name.startswith("step_")]
    return sorted(step for step in steps if filesystem.exists(f"{directory}/step_{step}/.metadata"))


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)
