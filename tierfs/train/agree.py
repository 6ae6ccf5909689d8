"""Ranks exchange a few numbers at a step, so that all of them save, stop and fail at the same one."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tierfs.errors import ConflictError

__all__ = ["Agreed", "Agreement", "World"]

SHARE_MAX = 0.001
"""The share of a step's time that agreeing may take."""
APART_S_MAX = 2.0
"""Ranks agree that often at least, whatever it costs: a signal is answered within that time."""
MEASURED = 8
"""The quickest of this many agreements gives their cost: in the others, this rank waited for a late one."""


class World:
    """The ranks of a job, with a gloo group for the training thread and another one for the thread that saves.

    Constructing it is a collective.

    Args:
        timeout_s: How long a rank waits for the others.
    """

    def __init__(self, timeout_s: float) -> None:
        is_there = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if is_there else 0
        self.size: int = dist.get_world_size() if is_there else 1
        self.training: Any = None
        self.saving: Any = None
        if self.size > 1:
            timeout = timedelta(seconds=timeout_s)
            self.training = dist.new_group(backend="gloo", timeout=timeout)
            self.saving = dist.new_group(backend="gloo", timeout=timeout)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size})"

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what one has to."""
        return self.rank == 0

    def begin_greatest(self, values: Sequence[int], group: Any) -> Callable[[], list[int]]:
        """Begin to find the greatest of all ranks' values, number by number. The returned function waits for them."""
        if self.size == 1:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)

        def end() -> list[int]:
            work.wait()
            found: list[int] = tensor.tolist()
            return found

        return end

    def gather(self, value: Any, group: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=group)
        return found

    def from_first(self, value: Any, group: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        found = [value]
        dist.broadcast_object_list(found, src=0, group=group)
        return found[0]

    def close(self) -> None:
        """Take the groups apart."""
        for group in (self.training, self.saving):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.training = self.saving = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """The outcome of an agreement, the same on all ranks.

    Attributes:
        signal: That any rank was sent; 0 for none.
        wish: The greatest that any rank had: 0 for none, 1 for a light save, 2 for a full one.
        stop: Whether any rank's policy wants to end training.
        failures: The most saves in a row that failed, as any rank counts.
        is_old: Whether the newest durable step is too old, as the first rank says.
    """

    signal: int = 0
    wish: int = 0
    stop: bool = False
    failures: int = 0
    is_old: bool = False


class Agreement:
    """Has ranks agree at some of the calls that all of them make: at as many as cost little enough.

    Numbers that are sent at one call are received at the next one, so that nobody waits for them in between.

    Args:
        world: The ranks.
        kind: A number for the place of these calls, by which it is seen that another rank is at another place.
    """

    def __init__(self, world: World, kind: int) -> None:
        self._world = world
        self._kind = kind
        self._costs_s: deque[float] = deque(maxlen=MEASURED)
        self._calls = 0
        self._sent: tuple[int, float, Callable[[], list[int]]] | None = None
        self.every = 1

    def __repr__(self) -> str:
        return f"Agreement(every={self.every})"

    def receive(self) -> Agreed:
        """Return what ranks agreed on at the call before; nothing if they did not. A collective.

        Raises:
            ConflictError: Ranks were not at the same step.
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
                f"ranks are not at the same place: this one was at step {step}, and they were from step {-numbers[7] // 2} to "
                f"{numbers[6] // 2}; every rank has to call step() and check() the same number of times"
            )
        return Agreed(numbers[0], numbers[1], bool(numbers[2]), numbers[3], bool(numbers[4]))

    def send(self, step: int, tell: Callable[[], Agreed], call_s: float, *, now: bool = False) -> None:
        """Tell the other ranks, if it is time for that. A collective.

        Args:
            step: At which this rank is.
            tell: Returns what this rank knows. Called only if it is needed.
            call_s: The time from one of these calls to the next.
            now: Whether all ranks have a reason to agree at this call.
        """
        self._calls += 1
        if not now and self._calls < self.every:
            return
        self._calls = 0
        begun = time.perf_counter()
        mine = tell()
        place = step * 2 + self._kind
        # All are at the same place if the least and the greatest are the same.
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
