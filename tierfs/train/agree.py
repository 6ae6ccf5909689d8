"""Agreement of ranks: they exchange a few numbers, so that all of them save, stop and fail at the same step.

torch wraps the reason of a failed save or load in a `BaseException`, which few handlers expect: `reason_of` unwraps it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.errors import ConflictError, TierfsError
from tierfs.threads import start_daemon

SHARE_MAX = 0.001
"""The share of a step's time that an agreement may take."""
APART_S_MAX = 2.0
"""Ranks agree at least this often, whatever the cost, so that a signal is answered within this time."""
WAITED_S = 0.25
"""A rank that waits for the others wakes up this often, to handle signals and to note where it waits."""
SILENT_S = 30.0
"""A rank that has waited for this long says once for which ranks it waits."""
LOOKED_S = 0.5
"""Seconds that the search for late ranks may take. The store may be on a rank that is stuck."""
MEASURED = 8
"""The fastest of this many agreements is taken as their cost. In slower ones, this rank waited for a late rank."""


_logger = logging.getLogger("tierfs.train")


class World:
    """The ranks of a job, with one gloo group for the training thread and another one for the thread that saves.

    The constructor is a collective. A rank waits for the others for ``timeout_s`` seconds.

    Attributes:
        while_waiting: Called every `WAITED_S` while the training thread waits, with a function that says for what: see
            `wait_for`. It may end the process.
    """

    def __init__(self, timeout_s: float) -> None:
        is_there = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if is_there else 0
        self.size: int = dist.get_world_size() if is_there else 1
        self.training: Any = None
        self.saving: Any = None
        self.while_waiting: Callable[[Callable[[], str]], None] = lambda _: None
        self._turn = 0
        if self.size > 1:
            timeout = timedelta(seconds=timeout_s)
            self.training = dist.new_group(backend="gloo", timeout=timeout)
            self.saving = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does the work that only one rank may do."""
        return self.rank == 0

    def begin_greatest(self, values: Sequence[int], group: Any) -> Callable[[], list[int]]:
        """Start an all-reduce of the maximum over all ranks, number by number; the returned function waits for it."""
        if self.size == 1:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
        self._turn += 1
        turn = self._turn

        def is_over(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if work.is_completed():
                    raise
                # If others are late, they see that this rank has come to this turn.
                self.training.get_group_store().set(f"tierfs-{self.rank}", str(turn))
                return False
            return True

        def end() -> list[int]:
            self.wait_for(is_over, lambda: self._late(turn))
            found: list[int] = tensor.tolist()
            return found

        return end

    def wait_for(self, is_over: Callable[[float], bool], why: Callable[[], str]) -> None:
        """Wait, on the training thread, for something that another rank may delay.

        Args:
            is_over: Waits for this many seconds at most, and returns whether the wait is over.
            why: Returns in words what has not happened yet.
        """
        begun_s, is_silent = time.monotonic(), True
        while not is_over(WAITED_S):
            self.while_waiting(why)
            if is_silent and time.monotonic() - begun_s >= SILENT_S:
                is_silent = False
                _logger.warning("rank %d has waited for %g s: %s", self.rank, SILENT_S, why())

    def _late(self, turn: int) -> str:
        """Say which ranks have not come to a turn."""
        late: list[str] = []

        def look() -> None:
            store = self.training.get_group_store()
            names = {str(rank): f"tierfs-{rank}" for rank in range(self.size)}
            late.extend(rank for rank, name in names.items() if not store.check([name]) or int(store.get(name)) != turn)

        looking = start_daemon(look, name="late-ranks")
        if looking is not None:
            looking.join(LOOKED_S)
        who = f"rank {', '.join(late)}" if late else "another rank"
        return f"{who} did not come to this step"

    def gather(self, value: Any, group: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=group)
        return found

    def from_first(self, value: Any, group: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        found = [value]
        dist.broadcast_object_list(found, src=0, group=group)
        return found[0]

    def ask_first(self, call: Callable[[], Any], group: Any) -> Any:
        """Return what a function returns on rank 0, on every rank. If it raises a `TierfsError`, all ranks raise it."""
        said: Any = None
        if self.is_first:
            try:
                said = call()
            except TierfsError as error:
                said = error
        said = self.from_first(said, group)
        if isinstance(said, TierfsError):
            raise said
        return said

    def close(self) -> None:
        """Destroy both groups."""
        for group in (self.training, self.saving):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.training = self.saving = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """The outcome of an agreement, the same on all ranks.

    Attributes:
        signal: The number of a signal that a rank received, the greatest if there were several; 0 for none.
        wish: The fullest save that a rank asks for: 0 for none, 1 for a light one, 2 for a full one.
        stop: Whether a policy of any rank ends training.
        failures: How many saves failed in a row, on the rank that counts the most.
        is_old: Whether the newest durable step is too old. Only rank 0 looks.
    """

    signal: int = 0
    wish: int = 0
    stop: bool = False
    failures: int = 0
    is_old: bool = False


class Agreement:
    """Lets the ranks agree at every n-th of the calls that all of them make, so that it costs little.

    Ranks send their numbers at one call and receive the result at the next one. Training goes on in between. ``kind``
    is the place in the training loop that makes these calls: 0 or 1. It detects a rank at the other place.
    """

    def __init__(self, world: World, kind: int) -> None:
        self._world = world
        self._kind = kind
        self._costs_s: deque[float] = deque(maxlen=MEASURED)
        self._calls = 0
        self._sent: tuple[int, float, Callable[[], list[int]]] | None = None
        self.every = 1

    def receive(self) -> Agreed:
        """Return the result of the exchange that the last `send` began; an empty one if it began none. A collective.

        Raises:
            ConflictError: Ranks are not at the same step, or not at the same place.
        """
        if self._sent is None:
            return Agreed()
        (step, sent_s, end), self._sent = self._sent, None
        begun = time.perf_counter()
        numbers = end()
        self._costs_s.append(sent_s + time.perf_counter() - begun)
        self.every = numbers[5]
        if numbers[6] != -numbers[7]:
            raise ConflictError(
                f"ranks are at different places: this rank was at step {step}, the ranks from step "
                f"{-numbers[7] // 2} to {numbers[6] // 2}: every rank must call step() and check() the same number of "
                "times"
            )
        return Agreed(numbers[0], numbers[1], bool(numbers[2]), numbers[3], bool(numbers[4]))

    def send(self, step: int, tell: Callable[[], Agreed], call_s: float, *, now: bool = False) -> None:
        """Send this rank's numbers to the others, if an agreement is due. A collective.

        Args:
            step: The step that this rank is at.
            tell: Returns this rank's opinion. Called only if an agreement is due.
            call_s: Seconds from one of these calls to the next.
            now: Agree at this call in any case. All ranks must pass the same value.
        """
        self._calls += 1
        if not now and self._calls < self.every:
            return
        self._calls = 0
        begun = time.perf_counter()
        mine = tell()
        place = step * 2 + self._kind
        # All ranks are at the same place if the smallest and the greatest number are equal.
        numbers = (
            mine.signal,
            mine.wish,
            int(mine.stop),
            mine.failures,
            int(mine.is_old),
            self._wanted_every(call_s),
            place,
            -place,
        )
        end = self._world.begin_greatest(numbers, self._world.training)
        self._sent = step, time.perf_counter() - begun, end

    def _wanted_every(self, call_s: float) -> int:
        if not self._costs_s or call_s <= 0:
            return 1
        wanted = math.ceil(min(self._costs_s) / (SHARE_MAX * call_s))
        return max(1, min(wanted, int(APART_S_MAX / call_s)))


def reason_of(error: BaseException) -> Exception:
    """Return the failure of a save or load as an `Exception`.

    If all failed ranks report the same `TierfsError`, return it. Otherwise return a `TierfsError` that lists the
    failure of each rank. An interruption also becomes a `TierfsError`. Any other exception is returned unchanged.
    """
    if not isinstance(error, CheckpointException):
        return error if isinstance(error, Exception) else TierfsError(f"interrupted by {error!r}")
    failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
    own = {str(failure): failure for failure in failures.values() if isinstance(failure, TierfsError)}
    if len(own) == 1 and all(isinstance(failure, TierfsError) for failure in failures.values()):
        return next(iter(own.values()))
    listed = "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items())
    found = TierfsError(listed)
    found.__cause__ = error
    return found
