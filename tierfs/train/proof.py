"""Proof of resume: compare a restored state with the record of its save, and replay steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from tierfs.train.agree import World
from tierfs.train.restore import Restored
from tierfs.train.run import RunDirectory
from tierfs.train.state import DictState, TrainState
from tierfs.train.values import digests_of, first_difference, without_digest

SAME, DIFFERENT, UNKNOWN = "same", "different", "not recorded"
HISTORY_STEPS = 256
"""Each save records the metrics of this many steps up to it, for a proof of resume."""
REPLAY_STEPS, REPLAY_SAVES = 32, 8
"""It also records those of this many steps after each of this many full saves before it, from which a proof replays."""
_OWN_PARTS = {"rng": "random generators", "loader": "data loader"}
_ORDER = ("step", "learning rate", "model", "optimizer", "scheduler", "scaler", "random generators", "data loader")


@dataclass(frozen=True, slots=True)
class PartCheck:
    """The outcome of the comparison of one part.

    Attributes:
        part: ``restore``, ``step``, ``learning rate``, a part of the state such as ``model``, or ``losses``.
        outcome: ``same``, ``different``, or ``not recorded`` for a part that could not be compared.
        detail: The first difference, or the reason why the part could not be compared; empty for ``same``.
    """

    part: str
    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.outcome}{f': {self.detail}' if self.detail else ''}"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The result of `Manager.verify_resume`, the same on every rank. ``str()`` formats it for people.

    Attributes:
        step: The restored step.
        replayed: The steps that were made again to compare their losses.
        checks: One comparison for each part. A part comes after the parts that it follows from.
    """

    step: int
    replayed: tuple[int, ...]
    checks: tuple[PartCheck, ...]

    def left_at(self, before: Restored, after: Restored | None) -> ResumeReport:
        """Return the report, given the restore that it is about and the one after it, which must be the same."""
        if after is not None and (after.step, after.notes) == (before.step, before.notes):
            return self
        why = "nothing" if after is None else f"step {after.step}: {'; '.join((after.stopped, *after.notes))}"
        return replace(self, checks=(*self.checks, PartCheck("restore", DIFFERENT, f"the state is now that of {why}")))

    @property
    def first_difference(self) -> PartCheck | None:
        """The first part that differs; ``None`` if none does."""
        return next((check for check in self.checks if check.outcome == DIFFERENT), None)

    @property
    def is_proven(self) -> bool:
        """Whether every part was compared and is the same, and replayed steps have the recorded losses."""
        return bool(self.replayed) and all(check.outcome == SAME for check in self.checks)

    def __str__(self) -> str:
        head = f"step {self.step}: {'PROVEN' if self.is_proven else 'NOT PROVEN'}"
        replayed = f", {len(self.replayed)} steps were replayed"
        return "\n".join([head + replayed, *(f"  {check}" for check in self.checks)])


class History:
    """The metrics of this rank's steps that each save records."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Mapping[str, Any]]] = []
        self._saves: deque[int] = deque(maxlen=REPLAY_SAVES)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a step."""
        self._steps.append((step, metrics))
        if len(self._steps) > 2 * (HISTORY_STEPS + REPLAY_SAVES * REPLAY_STEPS):
            self._steps = self.recorded()

    def saved(self, step: int) -> None:
        """Note a full save."""
        self._saves.append(step)

    def resume(self, step: int, metrics: list[tuple[int, dict[str, float]]]) -> None:
        """Go on from a restored step and the metrics that its save recorded."""
        self._saves.append(step)
        self._steps = list(metrics)

    def recorded(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the metrics of the last steps, and those of the first steps after each full save."""
        last = len(self._steps) - HISTORY_STEPS
        return [
            (step, metrics)
            for at, (step, metrics) in enumerate(self._steps)
            if at >= last or any(0 < step - saved <= REPLAY_STEPS for saved in self._saves)
        ]


class Prover:
    """Compares the states of the ranks with the record of the restored step's save. Each call is a collective."""

    def __init__(self, run: RunDirectory, world: World, restored: Restored) -> None:
        self._run = run
        self._world = world
        self._restored = restored
        self._record: Mapping[str, Any] = run.record_of(restored.step) or {}

    def prove(
        self,
        state: TrainState | DictState,
        train: Callable[[int], float] | None,
        load: Callable[[int], object],
        *,
        steps: int,
        metric: str,
        tolerance: float,
    ) -> ResumeReport:
        """Compare the restored state, then replay at most ``steps`` steps. At the end, the restored step is loaded again.

        ``train`` makes a step, and returns its loss; ``None`` skips the replay. ``load`` loads a step into the state.
        ``metric`` is the name of the loss. ``tolerance`` is as for `replay`.
        """
        restored = self._restored
        has_step = state.step  # `to_save` sets it
        values, _ = state.to_save(restored.step, restored.kind)
        checks = self.compare(values, has_step, state.learning_rates)
        if train is None:
            checks.append(PartCheck("losses", UNKNOWN, "no step was to be replayed"))
            return ResumeReport(restored.step, (), tuple(checks))
        begin, replayed, recorded = self.plan(metric, steps)
        if replayed:
            load(begin)
            checks.append(self.replay(train, replayed, recorded, tolerance))
            load(restored.step)
        else:
            why = f"no earlier checkpoint is followed by steps with a recorded {metric!r}"
            checks.append(PartCheck("losses", UNKNOWN, why))
        return ResumeReport(restored.step, replayed, tuple(checks))

    def compare(
        self, state: Mapping[str, Any], step: int | None, learning_rates: Sequence[float] | None
    ) -> list[PartCheck]:
        """Compare the restored state, part by part.

        What the state does not tell is ``None``.
        """
        expected, about = self._restored.step, self._restored.about
        rates = None if learning_rates is None else list(learning_rates)
        mine = (digests_of(state), without_digest(state), step, rates, self._restored.notes)
        all_told = self._world.gather(mine, self._world.training)
        checks = [
            PartCheck("restore", DIFFERENT, note) for note in dict.fromkeys(n for *_, notes in all_told for n in notes)
        ]
        checks += _equal("step", expected, [each for _, _, each, _, _ in all_told])
        if about is not None and "lr" in about.state:
            checks += _equal("learning rate", about.state["lr"], [each for _, _, _, each, _ in all_told])
        for name in sorted({name for _, names, *_ in all_told for name in names}):
            checks.append(PartCheck(_part_of(name), UNKNOWN, f"{name!r} has a type that cannot be compared"))
        saved: Sequence[Mapping[str, str]] = self._record.get("ranks") or []
        told: list[dict[str, str]] = [each for each, *_ in all_told]
        if len(saved) != len(told):
            why = f"{len(saved)} ranks saved it, but {len(told)} restored it" if saved else "the save has no record"
            return [*checks, PartCheck("model", UNKNOWN, why)]
        for part in sorted({_part_of(name) for each in saved for name in each}, key=_place):
            then = [_of_part(each, part) for each in saved]
            # Ignore values that a rank has but did not save because another rank did.
            names = {name for each in then for name in each}
            now = [{name: digest for name, digest in _of_part(each, part).items() if name in names} for each in told]
            difference = first_difference(then, now)
            checks.append(PartCheck(part, DIFFERENT if difference else SAME, difference))
        return checks

    def plan(self, metric: str, count: int) -> tuple[int, tuple[int, ...], dict[int, float]]:
        """Choose the checkpoint to replay from and the steps to replay.

        Returns:
            The checkpoint's step, the steps to replay, and the recorded losses by step. The first is -1 and the others
            are empty if no replay is possible, because a rank has no recorded losses.
        """
        step = self._restored.step
        recorded = {at: values[metric] for at, values in history_in(self._record, self._world.rank) if metric in values}
        begin, steps = -1, tuple[int, ...]()
        for earlier, found in self._run.complete():
            if earlier >= step or found.kind == "light":
                continue
            wanted = range(earlier + 1, min(earlier + count, step) + 1)
            steps = tuple(takewhile(recorded.__contains__, wanted))
            if steps and self._fits(earlier):
                begin = earlier
                break
            steps = ()
            if earlier < min(recorded, default=step) - 1:
                break
        # Ranks may see different checkpoints, so rank 0 chooses. All ranks need the losses.
        begin, steps = self._world.from_first((begin, steps), self._world.training)
        is_known = all(self._world.gather(all(at in recorded for at in steps), self._world.training))
        return (begin, steps, recorded) if is_known else (-1, (), {})

    def _fits(self, step: int) -> bool:
        """Return whether as many ranks saved a checkpoint as there are now. Others cannot restore it exactly."""
        about = self._run.about(self._run.checkpoint(step))
        return about is None or about.world_size == self._world.size

    def replay(
        self, train: Callable[[int], float], steps: Sequence[int], recorded: Mapping[int, float], tolerance: float
    ) -> PartCheck:
        """Make steps again, and compare their losses with the recorded ones.

        ``tolerance`` is the relative difference that two losses may have; 0 compares bit for bit.
        """
        problem = ""
        for step in steps:
            loss = float(train(step))  # make every step, even after a difference: the other ranks make it, too
            expected = recorded[step]
            if tolerance:
                is_same = math.isclose(loss, expected, rel_tol=tolerance, abs_tol=0.0)
            else:
                is_same = loss.hex() == expected.hex()
            if not is_same and not problem:
                where = f"step {step} on rank {self._world.rank}"
                problem = f"{where}: {loss!r} ({loss.hex()}), but {expected!r} ({expected.hex()}) was recorded"
        found = [each for each in self._world.gather(problem, self._world.training) if each]
        return PartCheck("losses", DIFFERENT if found else SAME, found[0] if found else "")


def history_in(record: Mapping[str, Any] | None, rank: int) -> list[tuple[int, dict[str, float]]]:
    """Return the metrics that a rank recorded at the steps up to a save, the oldest first."""
    try:
        return [
            (int(step), {name: float.fromhex(value) for name, value in values.items()})
            for step, values in (record or {})["history"][rank]
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        return []  # nothing was recorded, or nothing valid


def encode_history(history: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, dict[str, str]]]:
    """Encode the metrics of steps for a record, as hexadecimal floats, which lose no bit."""
    return [(step, {name: float(value).hex() for name, value in values.items()}) for step, values in history]


def _equal(part: str, expected: Any, found: Sequence[Any]) -> list[PartCheck]:
    """Compare what each rank found, ``None`` for unknown. Return a check unless all are unknown."""
    known = {rank: each for rank, each in enumerate(found) if each is not None}
    differ = [f"{each}, not {expected}, on rank {rank}" for rank, each in known.items() if each != expected]
    return [PartCheck(part, DIFFERENT if differ else SAME, "; ".join(differ))] if known else []


def _part_of(name: str) -> str:
    first, _, rest = name.partition(".")
    rest = rest.removeprefix("tierfs.")
    return _OWN_PARTS.get(rest, rest or first) if first.startswith("rank_") else first


def _of_part(digests: Mapping[str, str], part: str) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if _part_of(name) == part}


def _place(part: str) -> tuple[int, str]:
    return (_ORDER.index(part) if part in _ORDER else len(_ORDER), part)
