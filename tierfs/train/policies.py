"""When to save, and what to keep: pure functions of what is known, that can be combined, and replaced by the user's own."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tierfs.checkpoint.retention import Every, Rule, SavedCheckpoint, parse_time
from tierfs.errors import InvalidInputError

__all__ = [
    "Context",
    "Deadline",
    "KeepPolicy",
    "Preemption",
    "SavePolicy",
    "YoungDaly",
    "as_rules",
    "as_save_policies",
    "deadline_of",
    "young_daly_s",
]

DEADLINES_S = (
    "SLURM_JOB_END_TIME",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Environment variables that say when a job or the machines under it end, in seconds since the epoch."""
MILLISECONDS_FROM = 1e11
"""No deadline in seconds is that late (year 5138); one in milliseconds since 1973 is."""


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that a policy gets beside the steps.

    Attributes:
        now_s: Wall-clock time, in seconds since the epoch.
        since_s: Seconds since the last save was asked for, or since the manager began.
        step_s: How long a step takes, without saves; 0 where that is not known yet.
        blocked_s: How long a save blocks training; 0 where none was made yet.
        save_s: How long a save takes to reach the level that the manager asks for; 0 where none was made yet.
        agree_every: In how many steps the ranks agree again: a wish may have to wait that long.
        is_saving: Whether a save is under way.
        is_preempted: Whether a rank was told by a signal that it will be ended.
    """

    now_s: float
    since_s: float
    step_s: float = 0.0
    blocked_s: float = 0.0
    save_s: float = 0.0
    agree_every: int = 1
    is_saving: bool = False
    is_preempted: bool = False


@runtime_checkable
class SavePolicy(Protocol):
    """One reason to save.

    A policy may also have ``should_stop``, with the same arguments: whether training has to end at this step. Where
    ``is_uniform`` is true its answer follows from ``step`` and ``previous`` alone, so every rank finds the same at the same step
    and no agreement is needed. Otherwise a wish of any rank becomes a save of all, at the next step at which they agree.
    """

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Whether to save at this step.

        Args:
            step: That was made.
            previous: Steps for which a save was asked for, ascending.
            context: What else is known.
        """


class KeepPolicy(Protocol):
    """One reason to keep checkpoints."""

    def preserve(self, checkpoints: Sequence[SavedCheckpoint], *, context: Context) -> Sequence[bool]:
        """For each complete checkpoint, the oldest first, whether to keep it."""


@dataclass(frozen=True, slots=True)
class Due:
    """Saves as `Every` says.

    Args:
        every: In steps, minutes, or whichever is due first.
    """

    every: Every

    @property
    def is_uniform(self) -> bool:
        """Whether it counts steps alone."""
        return self.every.minutes is None

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """See `SavePolicy`."""
        steps, minutes = self.every.steps, self.every.minutes
        return (steps is not None and step > 0 and step % steps == 0) or (
            minutes is not None and context.since_s >= minutes * 60
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Saves and stops when a rank gets a signal that says that it will be ended.

    Args:
        signals: Which ones. A manager with this policy handles them, and calls the handlers that were there before.
        grace: How much time there is from the signal to the end.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    grace: str = "30s"
    is_uniform = False

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        self.grace_s  # noqa: B018 - raises

    @property
    def grace_s(self) -> float:
        """The same in seconds."""
        return parse_time(self.grace, "Preemption")

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """See `SavePolicy`."""
        return context.is_preempted

    should_stop = should_save


@dataclass(frozen=True, slots=True)
class Deadline:
    """Saves and stops at the last step that leaves time for that: while what remains is a save and two steps more.

    Args:
        at_s: When the job ends, in seconds since the epoch. By default what Slurm, the owner of a capacity block, or Ray says; where
            nobody does, this policy does nothing.
    """

    at_s: float | None = None
    is_uniform = False

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """See `SavePolicy`."""
        at_s = deadline_of(os.environ) if self.at_s is None else self.at_s
        if at_s is None:
            return False
        remaining_s = at_s - context.now_s
        # Asked again only then, and a step may take longer than it did so far.
        return remaining_s - context.agree_every * context.step_s < context.save_s + 2 * context.step_s

    should_stop = should_save


@dataclass(frozen=True, slots=True, kw_only=True)
class YoungDaly:
    """Saves at the interval that loses the least time, by the measured cost of a save and the time between failures.

    Args:
        mtbf: Mean time between failures of the whole job, like ``"8h"``.
    """

    mtbf: str
    is_uniform = False

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        self.mtbf_s  # noqa: B018 - raises

    @property
    def mtbf_s(self) -> float:
        """The same in seconds."""
        return parse_time(self.mtbf, "YoungDaly")

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """See `SavePolicy`."""
        if context.is_saving:
            return False
        # Before the first save nobody knows its cost: a step's time is a guess of the right order.
        cost_s = context.blocked_s or context.step_s
        # It comes nearest to the interval at the step that lies within half a step of it.
        return context.since_s + context.step_s / 2 >= young_daly_s(cost_s, self.mtbf_s)


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """The interval between saves with the least expected loss: Daly's higher-order estimate of the optimum checkpoint interval (2006).

    Args:
        cost_s: How long a save keeps training from going on.
        mtbf_s: Mean time between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2 * mtbf_s))
    return max(0.0, math.sqrt(2 * cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s)


def deadline_of(environment: Mapping[str, str]) -> float | None:
    """When this job ends, in seconds since the epoch, as far as anybody says: the earliest.

    Raises:
        InvalidInputError: A variable holds no number.
    """
    found = []
    for name in DEADLINES_S:
        text = environment.get(name, "").strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            raise InvalidInputError(f"{name}={text!r} is no time in seconds since the epoch") from None
        found.append(value / 1000 if value >= MILLISECONDS_FROM else value)
    found += _ray_deadline_s()
    return min(found, default=None)


def _ray_deadline_s() -> list[float]:
    """The deadline that Ray Train gives this worker, if it runs it."""
    train: Any = sys.modules.get("ray.train")
    ask = getattr(train, "get_preemption_info", None)
    info = ask() if ask is not None else None
    deadline_ms = getattr(info, "deadline_ms", None)
    return [] if deadline_ms is None else [deadline_ms / 1000]


def as_save_policies(policies: Iterable[Any]) -> list[SavePolicy]:
    """Check the save policies that a user gives.

    Raises:
        InvalidInputError: One is none.
    """
    found: list[SavePolicy] = []
    for policy in policies:
        if isinstance(policy, Every):
            found.append(Due(policy))
        elif isinstance(policy, SavePolicy):
            found.append(policy)
        else:
            raise InvalidInputError(f"save=[{policy!r}]: a policy has should_save(step, previous, *, context)")
    return found


@dataclass(frozen=True, slots=True)
class _Preserving:
    """A rule of retention made of the user's own policy."""

    policy: KeepPolicy
    context: Context

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        kept = self.policy.preserve(saved, context=self.context)
        if len(kept) != len(saved):
            raise InvalidInputError(f"{self.policy!r} was asked for {len(saved)} checkpoints, and spoke of {len(kept)}")
        return [each for each, is_kept in zip(saved, kept, strict=True) if is_kept]

    def __str__(self) -> str:
        return repr(self.policy)


def as_rules(policies: Iterable[Any], context: Context) -> list[Rule]:
    """Turn the keep policies that a user gives into rules of retention.

    Raises:
        InvalidInputError: One is none.
    """
    found: list[Rule] = []
    for policy in policies:
        if hasattr(policy, "preserve"):
            found.append(_Preserving(policy, context))
        elif hasattr(policy, "select"):
            found.append(policy)
        else:
            raise InvalidInputError(f"keep=[{policy!r}]: a policy has preserve(checkpoints, *, context)")
    return found
