"""Play ``tierfs demo``: one uninterrupted run, and one that is killed in a save, resumed, terminated and resumed.

`tierfs.demo.worker` does the training in its own processes, so this module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from tierfs.demo.report import CompletedSave, Proof, Report, compare_losses
from tierfs.errors import AlreadyExistsError, CorruptionError, StoreNotFoundError, TierfsError
from tierfs.session import init, open_store, parse_url
from tierfs.store import usage
from tierfs.units import format_bytes

_POLL_S = 0.2
_GRACE_S = 2.0  # time for the other ranks to report the same failure
_KILL_S_MAX = 30.0  # only a process that is stuck in the kernel needs this long
_READ_SIZE = 2**16
_TAIL_LINES = 15
_TAIL_SIZE = 16 * 1024


@dataclass(slots=True)
class _Rank:
    """One process, and the part of its last line that has arrived."""

    number: int
    process: subprocess.Popen[bytes]
    partial: bytearray = field(default_factory=bytearray)


class RankGroup:
    """The ranks of one phase, as a context manager. On exit, it kills all ranks that still run.

    Each rank watches its stdin, and only this process holds the other end: the ranks never outlive this process. All
    get the same arguments of ``tierfs.demo.worker``, and have to end with the exit code ``ends_with`` within
    ``timeout_s``.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], *, world_size: int, timeout_s: float, ends_with: int = 0
    ) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._ends_with = ends_with
        self._deadline = 0.0
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._directory = tempfile.TemporaryDirectory(prefix="tierfs-demo-ranks-")

    def __enter__(self) -> RankGroup:
        self._deadline = time.monotonic() + self._timeout_s
        try:
            for number in range(self._world_size):
                self._ranks.append(self._start(number))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events from all ranks as they arrive, until every rank has ended with the expected exit code.

        Raises:
            TierfsError: A rank failed, or the phase timed out. The message ends with the last lines of stderr.
        """
        while True:
            ready = self._selector.select(_POLL_S)
            for key, _ in ready:
                yield from self._read(key.data)
            codes = [rank.process.poll() for rank in self._ranks]
            if any(code not in (None, self._ends_with) for code in codes):
                raise self._failure()
            if not ready and all(code == self._ends_with for code in codes):
                return
            if time.monotonic() > self._deadline:
                self.kill()
                raise TierfsError(
                    f"the {self.name} did not end within {self._timeout_s:g} s: raise --timeout, or give the demo "
                    f"less to do with --steps and --params{self._tails(self._ranks)}"
                )

    def kill(self) -> list[int]:
        """SIGKILL every rank's process group. Return the exit codes: ``-9`` for a rank that was still running."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        return [rank.process.wait(_KILL_S_MAX) for rank in self._ranks]

    def _start(self, number: int) -> _Rank:
        environment = os.environ | {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        # The ranks meet in a file. A port that is free now may be taken before rank 0 binds it.
        meeting = ["--rendezvous", os.path.join(self._directory.name, "rendezvous"), "--timeout", str(self._timeout_s)]
        command = [sys.executable, "-m", "tierfs.demo.worker", *self._arguments, *meeting]
        with self._log(number).open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, with arguments that were checked
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert process.stdout is not None
        rank = _Rank(number, process)
        self._selector.register(process.stdout, selectors.EVENT_READ, rank)
        return rank

    def _read(self, rank: _Rank) -> Iterator[dict[str, Any]]:
        """Yield the events of all complete lines."""
        assert rank.process.stdout is not None
        received = os.read(rank.process.stdout.fileno(), _READ_SIZE)
        if not received:
            self._selector.unregister(rank.process.stdout)
            return
        *lines, rest = (rank.partial + received).split(b"\n")
        rank.partial = rest
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            yield event

    def _failure(self) -> TierfsError:
        """Return the error that names the failed ranks, after a short time for the other ranks to fail too."""
        moment = time.monotonic() + _GRACE_S
        while time.monotonic() < moment and any(rank.process.poll() is None for rank in self._ranks):
            time.sleep(0.05)
        failed = [rank for rank in self._ranks if rank.process.poll() not in (None, self._ends_with)]
        self.kill()
        named = ", ".join(f"rank {rank.number} with {_ending(rank.process.returncode)}" for rank in failed)
        return TierfsError(f"the {self.name} failed: {named}{self._tails(failed)}")

    def _log(self, number: int) -> Path:
        """Return the path of a rank's stderr."""
        return Path(self._directory.name, f"rank-{number}.stderr")

    def _tails(self, ranks: Sequence[_Rank]) -> str:
        """Return the last lines of each rank's stderr, to append to a message."""
        tails = [(rank.number, _tail(self._log(rank.number))) for rank in ranks]
        return "".join(f"\n--- rank {number}, stderr:\n{tail}" for number, tail in tails if tail)

    def _close(self) -> None:
        self.kill()
        self._selector.close()
        for rank in self._ranks:
            for stream in (rank.process.stdin, rank.process.stdout):
                if stream is not None:
                    stream.close()
        self._directory.cleanup()


def _tail(log: Path) -> str:
    """Return the last lines of a file, indented."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_SIZE))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


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
    """The phases of the demo, in order. It writes ``straight/`` and ``resumed/`` below the URL."""

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
