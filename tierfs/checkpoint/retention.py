"""Decide which checkpoints to keep, by pure functions of the facts about each, for the manager and ``tierfs prune``.

A checkpoint is kept if any rule keeps it. The rules look at full and at light checkpoints apart. Some are kept whatever
the rules say. These are the newest complete checkpoint of each kind at each level, pinned checkpoints, and incomplete or
unreadable ones. An incomplete one may be a save in flight, and a person has to look at an unreadable one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol, cast

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level
from tierfs.units import parse_time


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The facts about one checkpoint.

    Attributes:
        path: The path of its directory.
        step: The training step; ``None`` if unknown.
        created_ns: The time of the save, in nanoseconds since the epoch.
        level: The lowest level that a part of it has reached; ``None`` if a part is missing or unknown.
        is_complete: Whether it can be loaded, as far as is known without reading its shard files.
        is_pinned: Whether its deletion is forbidden.
        metrics: Its recorded numbers by name.
        kind: ``full``, or ``light`` if only an approximate resume is possible from it.
        is_left: Whether the run went back to an earlier step, and does not follow from this one. No rule keeps it.
    """

    path: str
    step: int | None
    created_ns: int
    level: Level | None = Level.OBJECT
    is_complete: bool = True
    is_pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    kind: str = "full"
    is_left: bool = False

    @property
    def order(self) -> tuple[int, int, str]:
        """The sort key: by step, then by time, then by path. Checkpoints of unknown step come first."""
        return (-1 if self.step is None else self.step, self.created_ns, self.path)


class Rule(Protocol):
    """A reason to keep checkpoints."""

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Return the checkpoints to keep.

        Args:
            saved: The complete checkpoints of one kind, the oldest first.
            now_ns: The present time, in nanoseconds since the epoch.
        """

    def __str__(self) -> str:
        """Return the reason in words."""


class KeepPolicy(Protocol):
    """A reason to keep checkpoints, written by a user of `tierfs.train.Manager`. ``str`` of it is the reason."""

    def preserve(self, checkpoints: Sequence[SavedCheckpoint], *, context: Any) -> Sequence[bool]:
        """Return for each checkpoint whether to keep it, in the order given.

        Args:
            checkpoints: The complete checkpoints of one kind, full or light, of the run, the oldest first. The policy is
                called for each kind.
            context: A `tierfs.train.Context`: times and events, as this rank knows them.
        """


def check_policies(policies: Iterable[Any]) -> None:
    """Check that each item is a `Rule` or a `KeepPolicy`.

    Raises:
        InvalidInputError: An item is neither.
    """
    for policy in policies:
        if not hasattr(policy, "preserve") and not hasattr(policy, "select"):
            raise InvalidInputError(f"keep=[{policy!r}]: a keep policy must have preserve(checkpoints, *, context)")


@dataclass(frozen=True, slots=True)
class Latest:
    """Keeps the newest ``count`` checkpoints.

    Raises:
        InvalidInputError: ``count`` is less than 1.
    """

    count: int

    def __post_init__(self) -> None:
        _at_least(self.count, 1, "Latest")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Return the newest ``count`` checkpoints."""
        return saved[-self.count :]

    def __str__(self) -> str:
        return f"one of the latest {self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Keeps the first checkpoint in each interval of ``steps`` steps, of ``minutes`` minutes, or both.

    As a save policy, it saves at each multiple of ``steps``, and when ``minutes`` have passed since the last save.

    Raises:
        InvalidInputError: Neither is given, or one is not positive.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise InvalidInputError("Every(): give steps, minutes or both")
        if self.steps is not None:
            _at_least(self.steps, 1, "Every")
        if self.minutes is not None and not (_is_number(self.minutes) and 0 < self.minutes < math.inf):
            raise InvalidInputError(f"Every(minutes={self.minutes!r}): must be a number above 0")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Return the first checkpoint of each interval."""
        first: dict[tuple[str, int], SavedCheckpoint] = {}
        for each in saved:
            if self.steps is not None and each.step is not None:
                first.setdefault(("steps", each.step // self.steps), each)
            if self.minutes is not None:
                first.setdefault(("minutes", int(each.created_ns // (self.minutes * 60e9))), each)
        return first.values()

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks save at the same steps: see `tierfs.train.SavePolicy`."""
        return self.minutes is None

    def should_save(self, step: int, previous: Sequence[int], *, context: Any) -> bool:
        """Return whether the steps or the minutes are due. ``context`` is a `tierfs.train.Context`."""
        is_due = self.steps is not None and step > 0 and step % self.steps == 0
        return is_due or (self.minutes is not None and context.since_s >= self.minutes * 60)

    def __str__(self) -> str:
        steps = [] if self.steps is None else [f"{self.steps} steps"]
        minutes = [] if self.minutes is None else [f"{self.minutes:g} minutes"]
        return f"the first one in {' or '.join(steps + minutes)}"


@dataclass(frozen=True, slots=True)
class Geometric:
    """Keeps one checkpoint in each range of distances from the newest one, in steps: fewer of the older ones.

    The ranges begin at 1, ``base``, ``base``², and so on. The oldest checkpoint in each of them is kept.

    Raises:
        InvalidInputError: ``base`` is not a finite number above 1.
    """

    base: float = 2.0

    def __post_init__(self) -> None:
        if not (_is_number(self.base) and 1 < self.base < math.inf):
            raise InvalidInputError(f"Geometric({self.base!r}): the base must be a number above 1")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Return the newest checkpoint, and the oldest one in each range of distances."""
        steps = [each.step for each in saved if each.step is not None]
        oldest: dict[int, SavedCheckpoint] = {}
        for each in saved:
            if each.step is not None:
                oldest.setdefault(self._range_of(max(steps) - each.step), each)
        return oldest.values()

    def _range_of(self, distance: int) -> int:
        if distance < 1:
            return -1
        number = int(math.log(distance, self.base))
        # The logarithm of a power of the base may be just below the whole number.
        return number + 1 if self.base ** (number + 1) <= distance else number

    def __str__(self) -> str:
        return f"one at a power of {self.base:g} steps from the newest"


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the ``count`` checkpoints with the best recorded value of a metric.

    With ``mode="min"``, the smallest values are the best; with ``mode="max"``, the greatest. Checkpoints without a
    finite value do not count.

    Raises:
        InvalidInputError: ``count`` or ``mode`` is invalid, or ``metric`` is empty.
    """

    count: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        _at_least(self.count, 1, "Best")
        if not self.metric or not isinstance(self.metric, str):
            raise InvalidInputError(f"Best({self.count}, {self.metric!r}): the metric must be a name")
        if self.mode not in {"min", "max"}:
            raise InvalidInputError(f"Best(mode={self.mode!r}): must be min or max")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Return the best ``count`` checkpoints. Among equal values, the newest wins."""
        sign = 1 if self.mode == "min" else -1
        known = [each for each in saved[::-1] if math.isfinite(each.metrics.get(self.metric, math.nan))]
        return sorted(known, key=lambda each: sign * each.metrics[self.metric])[: self.count]

    def __str__(self) -> str:
        return f"one of the best {self.count} by {self.metric}"


@dataclass(frozen=True, slots=True)
class Within:
    """Keeps the checkpoints that are not older than a time, such as ``"2d"``, ``"6h"`` or ``"30m"``.

    Raises:
        InvalidInputError: ``time`` is invalid.
    """

    time: str

    def __post_init__(self) -> None:
        self.seconds  # noqa: B018 - raises if it is invalid

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return parse_time(self.time, "Within")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Return the checkpoints that were saved within the time before ``now_ns``."""
        oldest_ns = now_ns - int(self.seconds * 1e9)
        return [each for each in saved if each.created_ns >= oldest_ns]

    def __str__(self) -> str:
        return f"saved within {self.time}"


@dataclass(slots=True)
class Decision:
    """The decision about one checkpoint.

    Attributes:
        saved: The checkpoint.
        reasons: The reasons to keep it, in words; empty if it may be removed.
        removed: Whether it was removed.
        problem: The reason why it could not be removed; empty if there is none.
    """

    saved: SavedCheckpoint
    reasons: tuple[str, ...]
    removed: bool = False
    problem: str = ""

    @property
    def is_kept(self) -> bool:
        return bool(self.reasons)


def decide(
    saved: Iterable[SavedCheckpoint], keep: Sequence[Rule | KeepPolicy], now_ns: int, context: Any = None
) -> list[Decision]:
    """Decide which checkpoints to keep, and why. Return the decisions for the oldest checkpoint first.

    Raises:
        InvalidInputError: There is no rule, which would keep the newest checkpoint alone; or a policy's answer is
            invalid.
    """
    if not keep:
        raise InvalidInputError("name at least one rule of what to keep")
    ordered = sorted(saved, key=lambda each: each.order)
    reasons: dict[str, list[str]] = {each.path: [] for each in ordered}
    for each in ordered:
        if not each.is_complete:
            reasons[each.path].append("not complete: being saved, failed or damaged")
        if each.is_pinned:
            reasons[each.path].append("pinned")
    for kind in sorted({each.kind for each in ordered}):
        complete = [each for each in ordered if each.is_complete and each.kind == kind and not each.is_left]
        for path, reason in _newest(complete).items():
            reasons[path].append(reason)
        for rule in keep:
            for each in _kept_by(rule, complete, now_ns, context):
                reasons[each.path].append(str(rule))
    return [Decision(each, tuple(reasons[each.path])) for each in ordered]


def _kept_by(
    rule: Rule | KeepPolicy, saved: Sequence[SavedCheckpoint], now_ns: int, context: Any
) -> Iterable[SavedCheckpoint]:
    preserve = getattr(rule, "preserve", None)
    if preserve is None:
        return cast("Rule", rule).select(saved, now_ns)
    kept = preserve(saved, context=context)
    if len(kept) != len(saved):
        raise InvalidInputError(f"{rule!r} got {len(saved)} checkpoints, but returned {len(kept)} answers")
    return [each for each, is_kept in zip(saved, kept, strict=True) if is_kept]


def _newest(complete: Sequence[SavedCheckpoint]) -> dict[str, str]:
    """Return the paths of the newest checkpoints at each level, each with the reason for the highest one."""
    named: dict[str, str] = {}
    for level in sorted(Level, reverse=True):
        reached = [each for each in complete if each.level is not None and each.level >= level]
        # The newest by step, and the newest by time: a run that was set back to an earlier step saves lower steps.
        for each in reached[-1:] + sorted(reached, key=lambda one: one.created_ns)[-1:]:
            named.setdefault(each.path, f"the newest at {level.label}" if level else "the newest of all")
    return named


def parse_rule(text: str) -> Rule:
    """Parse a rule of the command line.

    It is ``latest:3``, ``every:10000``, ``best:2:val_loss[:max]``, ``within:2d`` or ``geometric[:BASE]``.

    Raises:
        InvalidInputError: The text is not a rule.
    """
    name, *values = text.split(":")
    try:
        match name, values:
            case "latest", [count]:
                return Latest(int(count))
            case "every", [steps]:
                return Every(steps=int(steps))
            case "best", [count, metric]:
                return Best(int(count), metric)
            case "best", [count, metric, mode]:
                return Best(int(count), metric, mode)
            case "within", [time]:
                return Within(time)
            case "geometric", []:
                return Geometric()
            case "geometric", [base]:
                return Geometric(float(base))
    except InvalidInputError:
        raise
    except ValueError:
        pass
    raise InvalidInputError(
        f"--keep {text}: must be one of latest:N, every:STEPS, best:K:METRIC[:max], within:2d, geometric[:BASE]"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _at_least(value: int, least: int, name: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InvalidInputError(f"{name}({value!r}): must be a whole number of at least {least}")
