"""Policies that decide when to save. Users can combine them and write their own."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tierfs.errors import InvalidInputError
from tierfs.units import parse_time

DEADLINES_S = (
    "SLURM_JOB_END_TIME",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Environment variables that hold the time when a job or its machines end, in seconds since the epoch."""
MILLISECONDS_FROM = 1e11
"""A deadline from here on is in milliseconds: in seconds, this is the year 5138; in milliseconds, 1973."""


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that a policy gets in addition to the steps.

    Attributes:
        now_s: Wall-clock time, in seconds since the epoch.
        since_s: Seconds since the last save was requested, or since the manager began or restored a step.
        step_s: Mean seconds of a training step, without saves; 0 until known.
        blocked_s: Seconds for which a save blocks training; 0 before the first save of the run.
        save_s: Seconds until a save reaches the level that the manager asks for; 0 before the first save of the run.
        agree_every: Steps that may pass until the ranks act on a policy's answer.
        is_saving: Whether a save is in flight.
        is_preempted: Whether this rank got a signal that `Preemption` handles.
        lost_share: The share of the time since the last full save that a failure costs: less than 1 with `Replay`.
    """

    now_s: float
    since_s: float
    step_s: float = 0.0
    blocked_s: float = 0.0
    save_s: float = 0.0
    agree_every: int = 1
    is_saving: bool = False
    is_preempted: bool = False
    lost_share: float = 1.0


@runtime_checkable
class SavePolicy(Protocol):
    """A reason to save.

    A policy may also have ``should_stop`` with the same arguments, which returns whether training has to end at this
    step. A policy may set ``is_uniform = True`` if its answer follows from ``step`` and ``previous`` alone. All ranks
    then get the same answer and save at this very step, without an agreement. Otherwise one rank's request becomes a
    save of all ranks at the next step at which they agree.
    """

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Return whether to save at this step.

        Args:
            step: The step that was made.
            previous: Steps for which this manager has requested a save, ascending.
            context: Times and events, as this rank knows them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Saves and stops training when a rank gets a signal that announces its end.

    Args:
        signals: The signals. The manager handles them until it is closed, and also calls the previous handlers.
        grace: The time from the signal to the end of the process, such as ``"30s"`` or ``"2m"``.

    Raises:
        InvalidInputError: ``grace`` is not a time.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    grace: str = "30s"
    is_uniform = False

    def __post_init__(self) -> None:
        self.grace_s  # noqa: B018 - raises if it is invalid

    @property
    def grace_s(self) -> float:
        """The grace period in seconds."""
        return parse_time(self.grace, "Preemption")

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Return whether this rank got one of the signals."""
        return context.is_preempted

    should_stop = should_save


@dataclass(frozen=True, slots=True)
class Deadline:
    """Saves and stops training at the last step that leaves time for a save and two more steps.

    Args:
        at_s: The end of the job, in seconds since the epoch. ``None`` takes the earliest deadline that Slurm or a
            capacity block announces. Without any, this policy does nothing.
    """

    at_s: float | None = None
    is_uniform = False

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Return whether the next agreement of the ranks would leave too little time.

        Raises:
            InvalidInputError: A deadline in the environment is not a number.
        """
        at_s = deadline_of(os.environ) if self.at_s is None else self.at_s
        if at_s is None:
            return False
        remaining_s = at_s - context.now_s
        # The next chance is `agree_every` steps away. Two steps of margin: a step may take longer than the mean.
        return remaining_s - context.agree_every * context.step_s < context.save_s + 2 * context.step_s

    should_stop = should_save


@dataclass(frozen=True, slots=True, kw_only=True)
class YoungDaly:
    """Saves at Daly's optimum interval, from the measured cost of a save and the mean time between failures.

    Args:
        mtbf: Mean time between failures of the whole job, such as ``"8h"``.

    Raises:
        InvalidInputError: ``mtbf`` is not a time.
    """

    mtbf: str
    is_uniform = False

    def __post_init__(self) -> None:
        self.mtbf_s  # noqa: B018 - raises if it is invalid

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures in seconds."""
        return parse_time(self.mtbf, "YoungDaly")

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Return whether the interval has passed, to the nearest step, and no save is in flight."""
        if context.is_saving:
            return False
        # Before the first save its cost is unknown: the time of a step is a guess of the right order.
        cost_s = context.blocked_s or context.step_s
        # The step nearest to the end of the interval is at most half a step away from it.
        return context.since_s + context.step_s / 2 >= young_daly_s(cost_s, self.mtbf_s / context.lost_share)


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval between saves, in seconds, with the least expected loss of time.

    This is Daly's "A higher order estimate of the optimum checkpoint interval" (2006).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2 * mtbf_s))
    return max(0.0, math.sqrt(2 * cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s)


def deadline_of(environment: Mapping[str, str]) -> float | None:
    """Return the earliest deadline of this job, in seconds since the epoch; ``None`` if none is announced.

    Raises:
        InvalidInputError: The value of a variable in `DEADLINES_S` is not a number.
    """
    found = []
    for name in DEADLINES_S:
        text = environment.get(name, "").strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            raise InvalidInputError(f"{name}={text!r} is not a time in seconds since the epoch") from None
        found.append(value / 1000 if value >= MILLISECONDS_FROM else value)
    return min(found, default=None)


def listed(policies: Iterable[Any], name: str) -> list[Any]:
    """Return the value of the named argument as a list. Raises `InvalidInputError` if it is none."""
    if not isinstance(policies, Iterable) or isinstance(policies, (str, Mapping)):
        raise InvalidInputError(f"{name}={policies!r}: give a list of policies")
    return list(policies)


def as_save_policies(policies: Iterable[Any], name: str = "save") -> list[SavePolicy]:
    """Check the save policies that a user gave as an argument.

    Raises:
        InvalidInputError: The value is not a list, or an item is not a save policy.
    """
    found: list[SavePolicy] = []
    for policy in listed(policies, name):
        if not isinstance(policy, SavePolicy):
            raise InvalidInputError(
                f"{name}=[{policy!r}]: a save policy must have should_save(step, previous, *, context)"
            )
        found.append(policy)
    return found
