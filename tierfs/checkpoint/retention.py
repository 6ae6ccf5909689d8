"""Decide which checkpoints to keep: pure functions of the facts about each. `tierfs prune` and the training manager use the same ones.

A checkpoint is kept if any rule keeps it. Whatever the rules say, these are kept: the newest complete one at each level, the only
complete one with that, one that is not complete or cannot be read (it may be under way, or a person has to look at it), and one that is
pinned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level

__all__ = [
    "Best",
    "Decision",
    "Every",
    "Geometric",
    "Latest",
    "Rule",
    "SavedCheckpoint",
    "Within",
    "decide",
    "parse_rule",
    "parse_time",
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The facts about one checkpoint.

    Attributes:
        path: Of its directory.
        step: Of the training, if that is known.
        created_ns: When it was saved.
        level: The lowest that a part of it has reached.
        is_complete: Whether it can be loaded, as far as can be told without reading it.
        is_pinned: Whether a person wants it kept.
        metrics: By name.
    """

    path: str
    step: int | None
    created_ns: int
    level: Level | None = Level.OBJECT
    is_complete: bool = True
    is_pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int, str]:
        """Grows from older to newer."""
        return (-1 if self.step is None else self.step, self.created_ns, self.path)


class Rule(Protocol):
    """One reason to keep checkpoints."""

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """Those to keep.

        Args:
            saved: The complete ones, the oldest first.
            now_ns: The time.
        """

    def __str__(self) -> str:
        """The reason in words."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest ``count``."""

    count: int

    def __post_init__(self) -> None:
        """Refuse what keeps nothing."""
        _at_least(self.count, 1, "Latest")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """See `Rule.select`."""
        return saved[-self.count :]

    def __str__(self) -> str:
        return f"one of the latest {self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """The first one in each ``steps`` steps of training, or in each ``minutes`` of time, or both."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.steps is None and self.minutes is None:
            raise InvalidInputError("Every(): say steps or minutes")
        if self.steps is not None:
            _at_least(self.steps, 1, "Every")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise InvalidInputError(f"Every(minutes={self.minutes}): more than 0")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """See `Rule.select`."""
        first: dict[tuple[str, int], SavedCheckpoint] = {}
        for each in saved:
            if self.steps is not None and each.step is not None:
                first.setdefault(("steps", each.step // self.steps), each)
            if self.minutes is not None:
                first.setdefault(("minutes", int(each.created_ns // (self.minutes * 60e9))), each)
        return first.values()

    def __str__(self) -> str:
        steps = [] if self.steps is None else [f"{self.steps} steps"]
        minutes = [] if self.minutes is None else [f"{self.minutes:g} minutes"]
        return f"the first one in {' or '.join(steps + minutes)}"


@dataclass(frozen=True, slots=True)
class Geometric:
    """One at each of the distances 1, ``base``, ``base``² ... steps from the newest: the older, the fewer."""

    base: float = 2.0

    def __post_init__(self) -> None:
        """Refuse what keeps everything, or does not end."""
        if not 1 < self.base < math.inf:
            raise InvalidInputError(f"Geometric({self.base}): the base must be more than 1")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """See `Rule.select`."""
        steps = [each.step for each in saved if each.step is not None]
        oldest: dict[int, SavedCheckpoint] = {}
        for each in saved:
            if each.step is not None:
                distance = max(steps) - each.step
                oldest.setdefault(-1 if distance < 1 else int(math.log(distance, self.base)), each)
        return oldest.values()

    def __str__(self) -> str:
        return f"one at a power of {self.base:g} steps from the newest"


@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` best by a metric that was recorded with them: the least, or with ``mode="max"`` the greatest."""

    count: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _at_least(self.count, 1, "Best")
        if self.mode not in {"min", "max"}:
            raise InvalidInputError(f"Best(mode={self.mode!r}): min or max")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """See `Rule.select`."""
        sign = 1 if self.mode == "min" else -1
        known = [each for each in saved[::-1] if math.isfinite(each.metrics.get(self.metric, math.nan))]
        # Of equal ones the newest.
        return sorted(known, key=lambda each: sign * each.metrics[self.metric])[: self.count]

    def __str__(self) -> str:
        return f"one of the best {self.count} by {self.metric}"


@dataclass(frozen=True, slots=True)
class Within:
    """Those not older than a time: ``"2d"``, ``"6h"``, ``"30m"``."""

    time: str

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        self.seconds  # noqa: B018 - raises

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return parse_time(self.time, "Within")

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        """See `Rule.select`."""
        oldest_ns = now_ns - int(self.seconds * 1e9)
        return [each for each in saved if each.created_ns >= oldest_ns]

    def __str__(self) -> str:
        return f"saved within {self.time}"


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of one checkpoint, with the reason.

    Attributes:
        saved: Which.
        reasons: Why it is kept; empty if it is to go.
    """

    saved: SavedCheckpoint
    reasons: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


def decide(saved: Iterable[SavedCheckpoint], keep: Sequence[Rule], now_ns: int) -> list[Decision]:
    """Decide which of these checkpoints to keep, and why; the oldest first.

    Raises:
        InvalidInputError: There is no rule: that would keep the newest one alone.
    """
    if not keep:
        raise InvalidInputError("name at least one rule of what to keep")
    ordered = sorted(saved, key=lambda each: each.order)
    reasons: dict[str, list[str]] = {each.path: [] for each in ordered}
    complete = [each for each in ordered if each.is_complete]
    for each in ordered:
        if not each.is_complete:
            reasons[each.path].append("not complete: under way, or to be looked at")
        if each.is_pinned:
            reasons[each.path].append("pinned")
    named: set[str] = set()  # of a checkpoint that is the newest at several levels, the highest is said
    for level in (Level.OBJECT, Level.LOCAL, Level.STAGED, Level.NONE):
        reached = [each for each in complete if each.level is not None and each.level >= level]
        # Newest by steps, and by time: a run that was taken back to an earlier step goes on from there.
        newest = {each.path for each in (reached[-1:] + sorted(reached, key=lambda one: one.created_ns)[-1:])}
        for path in newest - named:
            reasons[path].append(f"the newest at {level.label}" if level else "the newest of all")
        named |= newest
    for rule in keep:
        for each in rule.select(complete, now_ns):
            reasons[each.path].append(str(rule))
    return [Decision(each, tuple(reasons[each.path])) for each in ordered]


def parse_rule(text: str) -> Rule:
    """A rule as the command line has it: ``latest:3``, ``every:10000``, ``best:2:val_loss[:max]``, ``within:2d``, ``geometric[:BASE]``.

    Raises:
        InvalidInputError: It is none.
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
        f"--keep {text}: one of latest:N, every:STEPS, best:K:METRIC[:max], within:2d, geometric[:BASE]"
    )


def parse_time(text: str, name: str) -> float:
    """A time in seconds: ``"2d"``, ``"6h"``, ``"30m"``, ``"10s"``, ``"1w"``.

    Args:
        text: The time.
        name: Where it was given, for errors.

    Raises:
        InvalidInputError: It is none.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise InvalidInputError(f"{name}({text!r}): a number with s, m, h, d or w behind it, like 2d")
    return float(match[1]) * _UNITS[match[2]]


def _at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise InvalidInputError(f"{name}({value}): at least {least}")
