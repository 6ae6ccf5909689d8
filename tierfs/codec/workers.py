"""Processes that encode blocks: as many as there are processors, where one interpreter cannot feed more than one and a half.

See docs/decisions/0040-processes-that-encode.md. They share the memory that they work on with this process, and know
nothing of stores. Whatever becomes of them, this process encodes what they do not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierfs import __version__
from tierfs._fork import PerProcess
from tierfs.codec.blocks import Codec, Coding
from tierfs.codec.worker import ANSWER_BYTES_MAX
from tierfs.sharedmemory import shared_memory
from tierfs.threads import start_daemon

__all__ = ["EncodeWorkers", "Job", "Worker", "encode_workers"]

WORKERS_MAX = 16
# So much is encoded before they are started: they take a tenth of a second of a processor each, and 20 MiB.
START_BYTES = 128 << 20
ANSWER_S = 60.0
DEATHS_MAX = 3
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_logger = logging.getLogger("tierfs.codec")


class Job(NamedTuple):
    """Blocks to be encoded together, as `tierfs.codec.encode_blocks` takes them."""

    raws: Sequence[memoryview]
    coding: Coding
    bases: Sequence[memoryview | None]
    outs: Sequence[memoryview]


class EncodeWorkers:
    """What encodes for this process, where it is allowed to. Safe for use by many threads.

    Attributes:
        count: How many there are to be.
    """

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition(threading.Lock())
        self._free: list[Worker] = []
        self._alive = 0
        self._is_started = False
        self._seen_bytes = 0
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"EncodeWorkers({self.status()})"

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Have this process start them in a ``with`` block, when there is enough to do, and share with them what memory it takes from now on."""
        processors = len(os.sched_getaffinity(0))
        self.count = min(processors, WORKERS_MAX) if processors > 1 and _can_share() else 0
        shared_memory().is_on = self.count > 0
        try:
            yield
        finally:
            self._stop()

    def status(self) -> dict[str, int]:
        """How many there are, the blocks they encoded, and how many were lost, or never began; nothing where they are not wanted."""
        with self._changed:
            return {"workers": self._alive, **self._counts} if self.count else {}

    @contextlib.contextmanager
    def lend(self, size: int) -> Iterator[Worker | None]:
        """One of them, for what so many bytes take, in a ``with`` block; waits for it. ``None`` where this process is to do it."""
        worker = self._take(size) if self.count else None
        if worker is None:
            yield None
            return
        try:
            yield worker
        finally:
            self._give(worker)

    def _stop(self) -> None:
        shared_memory().is_on = False
        with self._changed:
            self.count = 0
            self._is_started = False
            self._seen_bytes = 0
            free, self._free = self._free, []
            self._alive -= len(free)
        for worker in free:
            worker.end()

    def _take(self, size: int) -> Worker | None:
        with self._changed:
            self._seen_bytes += size
            starts = not self._is_started and self._seen_bytes >= START_BYTES
            self._is_started |= starts
            if not starts:
                while not self._free and self._alive:
                    self._changed.wait()
                return self._free.pop() if self._free else None
        for _ in range(self.count):
            start_daemon(self._start, name="encoder")
        return None

    def _give(self, worker: Worker) -> None:
        worker.settle()
        with self._changed:
            self._counts["worker_blocks"] += worker.count()
            is_kept = self.count > 0 and worker.failure is None
            if is_kept:
                self._free.append(worker)
            else:
                self._alive -= 1
            self._changed.notify_all()  # they may wait for the last one
        if not is_kept:
            worker.end()
        if worker.failure is not None and self._count_death(worker.failure) < DEATHS_MAX:
            start_daemon(self._start, name="encoder")

    def _start(self) -> None:
        try:
            worker = Worker()
        except Exception as error:  # noqa: BLE001 - whatever it is, this process encodes, and it is counted
            self._count_death(repr(error))
            return
        with self._changed:
            self._alive += 1
        self._give(worker)

    def _count_death(self, why: str) -> int:
        with self._changed:
            self._counts["worker_deaths"] += 1
            deaths = self._counts["worker_deaths"]
        _logger.warning("a process that encodes was lost, and this one does what it did: %s", why)
        return deaths


class Worker:
    """One of the processes, for one thread at a time. What it is given it does in order.

    Attributes:
        failure: Why it is not to be used any more.

    Raises:
        OSError, ValueError: It does not begin as it should.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._known: set[int] = set()
        self._numbers = itertools.count()
        self._begun: deque[int] = deque()
        self._blocks = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-m", "tierfs.codec.worker", str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd="/"
            )
        self._socket.settimeout(ANSWER_S)
        try:
            if self._receive() != {"version": __version__}:
                raise ValueError("it is of another version")
        except BaseException:
            self.end()
            raise

    def __repr__(self) -> str:
        return f"Worker(pid={self._process.pid}, failure={self.failure!r})"

    def begin(self, job: Job) -> bool:
        """Have it encode blocks; False where it cannot. Then, and when `finish` says so, they are the caller's to encode."""
        given = [base for base in job.bases if base is not None]
        if len(given) not in (0, len(job.bases)):
            return False
        places = [[shared_memory().find(view) for view in views] for views in (job.raws, given, job.outs)]
        if self.failure is not None or not all(place is not None for field in places for place in field):
            return False
        descriptors = shared_memory().descriptors()
        used = {place.region for field in places for place in field if place is not None}
        new, gone = sorted(used - self._known), sorted(self._known - descriptors.keys())
        raws, bases, outs = places
        number = next(self._numbers)
        packet = {
            "number": number,
            "codec": int(job.coding.codec),
            "width": job.coding.width,
            "new": new,
            "gone": gone,
            "raws": raws,
            "bases": bases,
            "outs": outs,
        }
        self._begun.append(number)
        try:
            socket.send_fds(self._socket, [json.dumps(packet).encode()], [descriptors[number] for number in new])
        except OSError as error:
            self._fail(error)
            return False
        except BaseException as error:
            self._fail(error)
            raise
        self._known = self._known - set(gone) | used
        return True

    def finish(self) -> list[tuple[Codec, int]] | None:
        """What came of the first job that was begun and is not finished; ``None`` if nothing did."""
        if self.failure is not None:
            return None
        try:
            answer = self._receive()
            if answer.get("number") != self._begun.popleft():
                raise ValueError("it answers something else")
        except (OSError, ValueError) as error:
            self._fail(error)
            return None
        except BaseException as error:
            self._fail(error)
            raise
        self._blocks += len(answer["found"])
        return [(Codec(codec), length) for codec, length in answer["found"]]

    def settle(self) -> None:
        """See to it that it writes to nobody's memory any more: somebody gave up in between. Otherwise it is ended."""
        while self._begun and self.failure is None:
            with contextlib.suppress(Exception):  # it has failed then, which is counted
                self.finish()

    def count(self) -> int:
        """Blocks that it encoded since it was last asked for that."""
        count, self._blocks = self._blocks, 0
        return count

    def end(self) -> None:
        """End it, whatever it does: nothing is written to what it shares after that."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        packet = self._socket.recv(ANSWER_BYTES_MAX)
        if not packet:
            raise ValueError("it ended")
        answer: dict[str, Any] = json.loads(packet)
        return answer

    def _fail(self, error: BaseException) -> None:
        self.failure = str(error) or repr(error)
        self.end()


def _can_share() -> bool:
    """Whether there is memory to share; not where the kernel promises no more than there is: there it would be missed only when it is touched."""
    with contextlib.suppress(OSError):
        if _OVERCOMMIT.read_text().strip() == "2":
            return False
    return shared_memory().allocate(mmap.PAGESIZE) is not None


encode_workers = PerProcess(EncodeWorkers)
"""This process's `EncodeWorkers`."""
