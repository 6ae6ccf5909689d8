"""The processes of ``tierfs demo``: start one per rank, follow their events, and always end them.

This module imports no torch. A group of processes never outlives its ``with`` block or this process. Each rank watches
its stdin, and only this process holds the other end.
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

from tierfs.errors import TierfsError

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

    Args:
        name: The phase's name in messages.
        arguments: Arguments of ``tierfs.demo.worker``, the same for all ranks.
        world_size: Number of ranks.
        timeout_s: Maximum duration of the phase.
        ends_with: Expected exit code of every rank.
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
