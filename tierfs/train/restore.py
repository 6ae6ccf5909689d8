"""Find and load the newest step that every rank can load. Damaged steps are marked and passed over."""

from __future__ import annotations

import fnmatch
import logging
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadPlan

from tierfs.checkpoint.notes import ABOUT, Lines
from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, TierfsError
from tierfs.train.agree import World, reason_of
from tierfs.train.position import address_of
from tierfs.train.run import OWN, About, RunDirectory
from tierfs.train.state import DictState, TrainState, Wanted, as_state
from tierfs.train.values import digest_of, digests_of, has_digest, leaves

_PASSED_OVER = (CorruptionError, FormatError, NotFoundError)
"""Errors of the checkpoint itself. With any other error, an older checkpoint would not help."""
_OWN, _ALL = ("full", "light"), ("full", "light", "foreign")
ACCEPTED = {"full": (("full",), _OWN, _ALL), "any": (_OWN, _ALL)}
"""The kinds of checkpoints that a restore accepts, if it finds nothing more each time: see `RunDirectory.kind_of`."""
WHY = {
    "light": "it is a light checkpoint",
    "foreign": "no training manager saved it",
    "left": "the run went back to an earlier step and left it behind",
}
"""The reasons not to accept a complete checkpoint, by kind."""
NONE = -1
TIERS = ("ram", "nvme", "peer", "object")
"""The nearest first."""
_NAMES = reprlib.Repr()
_NAMES.maxstring = 200  # a note names a few values, each in full
_logger = logging.getLogger("tierfs.train")


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of a restore.

    Attributes:
        step: The restored training step. Training goes on with the next one.
        kind: ``full``, or ``light`` for a state without optimizer and data loader.
        level: The lowest level that a part of the checkpoint has reached, as this host sees it.
        tier: The farthest tier that any rank read chunks from: ``ram``, ``nvme``, ``peer`` or ``object``.
        passed_over: Newer steps that were not loaded, each with the reason, the newest first.
        notes: The parts that are restored only approximately or not at all, in words; empty for an exact restore.
        not_loaded: The names of saved values that were not loaded: ``only`` leaves them out, or the state has no place
            for them. A value of the state that was not saved is an error.
        about: The checkpoint's own description; ``None`` if no manager saved it.
        not_compared: The names of loaded values that were not compared with their digests: the largest ones of a state of
            over `COMPARED_BYTES` a rank, or all of them with ``verify=False``.
        replayed: The number of files of logged steps that were made again after the checkpoint: see `Replay`.
        stopped: Why no more logged steps were made again; empty if there were no more.
        created_ns: The time of the save, in nanoseconds since the epoch; 0 if unknown.
    """

    step: int
    kind: str
    level: str
    tier: str
    passed_over: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    not_loaded: tuple[str, ...] = ()
    about: About | None = field(default=None, repr=False)
    not_compared: tuple[str, ...] = field(default=(), repr=False)
    replayed: int = 0
    stopped: str = ""
    created_ns: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the state is restored exactly, so that training goes on as if it had never stopped.

        It follows from a comparison: see ``verify`` of `Manager.restore`.
        """
        return not self.notes


COMPARED_BYTES = 16 << 30
"""A restore compares this many bytes of a rank's state, the smallest values first. Digests take about 0.1 s a GB."""
OTHER = "are not what was saved"
UNKNOWN = "have types that cannot be compared with what was saved"
NEW = "were not saved"
UNSAVED = "are in no checkpoint, and were others at the save"
LEFT_OUT = "are in no checkpoint: the state_dict() of their module leaves them out"
LOST = "are in the checkpoint, and did not come into the state"
WHY_DIFFERENT = (OTHER, LOST, UNKNOWN, NEW, UNSAVED, LEFT_OUT)
"""The outcomes of a comparison that make a restore inexact."""


@dataclass(slots=True)
class _Compared:
    """The comparison of one rank's state: what to note, the names that differ in each way, those not compared."""

    notes: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    differ: dict[str, list[str]] = field(default_factory=lambda: {why: [] for why in WHY_DIFFERENT})


def _by_rank(record: Mapping[str, Any], name: str) -> list[Mapping[str, str]]:
    """Return what a record has of each rank under a name; empty if it has nothing valid."""
    found = record.get(name)
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []


class _Planner(TierLoadPlanner):
    """Loads the values whose names match a pattern, and leaves the rest of the state unchanged."""

    def __init__(self, only: Sequence[str]) -> None:
        super().__init__()
        self._only = only
        self.not_loaded = self.converted = frozenset[str]()

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata
        wanted = {name: item for name, item in saved.items() if self.is_wanted(name) and name != ABOUT}
        self.not_loaded = frozenset(wanted.keys() - self.state_dict.keys())
        both = ((name, item, self.state_dict.get(name)) for name, item in wanted.items())
        self.converted = frozenset(
            name
            for name, item, value in both
            if isinstance(value, torch.Tensor) and hasattr(item, "properties") and value.dtype != item.properties.dtype
        )
        if not self._only:
            return super().create_local_plan()
        flat: dict[str, Any] = {name: value for name, value in self.state_dict.items() if self.is_wanted(name)}
        return create_default_local_load_plan(flat, self.metadata, strict=True)

    def is_wanted(self, name: str) -> bool:
        return not self._only or any(fnmatch.fnmatchcase(name, pattern) for pattern in self._only)


class Restorer:
    """Loads steps of a run. Each call is a collective.

    Attributes:
        record: What the save of the last loaded step recorded about its state; empty without a record.
    """

    def __init__(self, run: RunDirectory, options: Mapping[str, Any], world: World) -> None:
        self._run = run
        self._options = options
        self._world = world
        self.record: Mapping[str, Any] = {}

    def restore(
        self, state: Any, *, step: int | None, only: Sequence[str], kind: str, on_corrupt: str, verify: bool = False
    ) -> Restored | None:
        """Load the newest step that every rank can load, or the given step, in place. See `Manager.restore`.

        ``kind`` is a key of `ACCEPTED`, for a restore without ``step``. ``only`` has shell patterns of names; empty
        loads everything. ``on_corrupt`` is ``previous``, which passes over a step that cannot be loaded, or ``raise``.

        Returns:
            The outcome; ``None`` if there is no complete checkpoint.

        Raises:
            NotFoundError: The given step was never saved, or was removed.
            CorruptionError: No complete step can be loaded, or the given one is incomplete or damaged. The state may
                hold parts of a checkpoint.
            InvalidInputError: The state is invalid, or no saved value matches ``only``.
            Exception: Loading failed for a reason that another step would not avoid.
        """
        passed_over: dict[int, str] = {}
        parts, world = as_state(state), self._world
        lines = world.ask_first(self._run.lines, world.training) if step is None else None
        for accepted in ACCEPTED[kind]:
            if accepted is _ALL and not {*passed_over.values()} <= {*WHY.values()}:
                break  # a damaged checkpoint of the run must not make it go on from another one's
            bound: int | None = None
            while True:
                found, problem = self._newest(bound, accepted, lines, passed_over) if step is None else self._that(step)
                if found == NONE:
                    break
                if not problem:
                    try:
                        return self._load(found, parts, only, passed_over, verify=verify)
                    except CheckpointException as error:
                        failures = [failure for failure, _ in error.failures.values()]
                        if not all(isinstance(failure, _PASSED_OVER) for failure in failures):
                            raise reason_of(error) from error
                        problem = str(failures[0])
                        if self._world.is_first:
                            self._mark(found, problem)
                if step is not None or on_corrupt == "raise":
                    raise CorruptionError(f"{self._run.url_of(found)} cannot be loaded: {problem}")
                _logger.error("%s is skipped: %s", self._run.url_of(found), problem)
                passed_over[found] = problem
                bound = found - 1
        if passed_over:
            raise self._nothing(passed_over)
        return None

    def _newest(
        self, bound: int | None, accepted: Collection[str], lines: Lines | None, passed_over: dict[int, str]
    ) -> tuple[int, str]:
        """Return the newest step up to a bound that every rank finds complete, or `NONE`, and an empty problem.

        The newer steps go to ``passed_over``, each with its problem, and so do steps of a kind that is not accepted.
        """
        world = self._world
        while True:
            skipped: dict[int, str] = {}
            mine = next(self._accepted(bound, accepted, lines, skipped), NONE)
            told = world.gather((mine, skipped), world.training)
            for _, others in told:
                for step, problem in others.items():
                    if step not in passed_over and problem not in WHY.values():
                        _logger.error("%s is skipped: %s", self._run.url_of(step), problem)
                    passed_over.setdefault(step, problem)
            # One rank may not see the newest step of another rank. All go down until they find a common step.
            found, newest = min(step for step, _ in told), max(step for step, _ in told)
            if newest != found:
                passed_over.setdefault(newest, "not every rank finds it complete")
            if found == NONE:
                return NONE, ""
            problems = [text for text in world.gather(self._problem_of(found), world.training) if text]
            if not problems:
                return found, ""
            passed_over.setdefault(found, problems[0])
            bound = found - 1

    def _kind_of(self, step: int, lines: Lines | None) -> str:
        """Return the kind of a checkpoint, or why that cannot be read."""
        try:
            return self._run.kind_of(step, lines)
        except _PASSED_OVER as error:
            return str(error)

    def _that(self, step: int) -> tuple[int, str]:
        problem = self._problem_of(step)
        told = self._world.gather((problem, not problem or self._run.was_saved(step)), self._world.training)
        if not any(was_saved for _, was_saved in told):
            raise NotFoundError(f"{self._run.url_of(step)} does not exist: `tierfs checkpoint ls` shows what does")
        problems = [text for text, _ in told if text]
        return step, problems[0] if problems else ""

    def _accepted(
        self, bound: int | None, accepted: Collection[str], lines: Lines | None, skipped: dict[int, str]
    ) -> Iterator[int]:
        """Yield the accepted steps that this rank finds complete, newest first; add other published ones to ``skipped``."""
        for step in reversed(self._run.candidates()):
            if bound is not None and step > bound:
                continue
            problem = self._problem_of(step)
            # The second time, because it may have been published after the first one.
            if problem and self._run.was_saved(step) and (problem := self._problem_of(step)):
                skipped[step] = problem
            if not problem and (kind := self._kind_of(step, lines)) in accepted:
                yield step
            elif not problem:
                skipped[step] = WHY.get(kind, kind)

    def _problem_of(self, step: int) -> str:
        try:
            return self._run.problem_of(step, to_load=True)
        except _PASSED_OVER as error:
            return str(error)

    def _load(
        self,
        step: int,
        parts: TrainState | DictState,
        only: Sequence[str],
        passed_over: Mapping[int, str],
        *,
        verify: bool,
    ) -> Restored:
        run, world = self._run, self._world
        about, names = self._description(step)
        kind = about.kind if about is not None else "full"
        planner = _Planner(only)
        names = [name for name in names if name != ABOUT]
        matching = [name for name in names if planner.is_wanted(name)]
        if only and not matching:
            raise InvalidInputError(f"{run.url_of(step)} has no value that matches only={list(only)}")
        wanted = Wanted(kind, about, names, matching)
        values = parts.to_load(wanted)
        before = self._read_bytes()
        dcp.load(
            values,
            storage_reader=TierReader(run.url_of(step), **self._options),
            planner=planner,
            process_group=world.training,
            no_dist=world.size == 1,
        )
        notes = parts.loaded(values, wanted)
        read = {tier for tier, count in self._read_bytes().items() if count > before[tier]}
        self.record = {}
        try:
            self.record = run.record_of(step) or {}
            compared = self._compared(parts, kind, wanted, planner) if verify else _Compared(not_compared=matching)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            compared = _Compared([f"the state of rank {world.rank} cannot be compared with the saved one: {error}"])
        told = world.gather((read, planner.not_loaded, planner.converted, compared), world.training)
        tiers = set().union(*(each for each, *_ in told))
        converted = sorted(set().union(*(each for _, _, each, _ in told)))
        left_out = sorted(set(names) - set(matching))
        # Values of single ranks, and of the manager, have no place on others.
        nowhere = sorted(
            name for name in frozenset.intersection(*(each for _, each, _, _ in told)) if not name.startswith(OWN)
        )
        for found, why in (
            (left_out, f"do not match only={list(only)}, and are not loaded"),
            (nowhere, "have no place in the state, and are not loaded"),
            (converted, "have another dtype than in the state, and are converted"),
        ):
            if found:
                notes.append(f"{len(found)} saved values {why}: {_NAMES.repr(found)}")
        notes += dict.fromkeys(note for *_, each in told for note in each.notes)
        for why in WHY_DIFFERENT:
            if found := sorted(
                {f"{name} of rank {rank}" for rank, (*_, each) in enumerate(told) for name in each.differ[why]}
            ):
                notes.append(f"{len(found)} values {why}: {_NAMES.repr(found)}")
        standing = run.standing(step)
        level = standing.level.label if standing.level is not None else "none"
        skipped = tuple(sorted(((each, why) for each, why in passed_over.items() if each > step), reverse=True))
        if world.is_first:
            if kind == "light":
                _logger.warning("%s is a light checkpoint: %s", self._run.url_of(step), "; ".join(notes))
            for other in ("left", "foreign"):
                if steps := [each for each, why in skipped if why == WHY[other]]:
                    _logger.warning("%s: passed over: %s: %s", self._run.url, WHY[other], reprlib.repr(steps))
        # A small state is stored inside the records, which are read from the object tier once they are published.
        nearest = "object" if level == "object" else "ram"
        tier = next((each for each in reversed(TIERS) if each in tiers), nearest)
        unseen = sorted(set().union(*(each.not_compared for *_, each in told)))
        made = step, kind, level, tier, skipped, tuple(notes), (*left_out, *nowhere), about, tuple(unseen)
        return Restored(*made, created_ns=standing.created_ns)

    def _compared(self, parts: TrainState | DictState, kind: str, wanted: Wanted, planner: _Planner) -> _Compared:
        """Compare the state, as it is now, with the digests that its save recorded."""
        ranks, unsaved = (_by_rank(self.record, name) for name in ("ranks", "unsaved"))
        rank = self._world.rank
        if not ranks:
            return _Compared(["the save recorded no digests, so nothing shows whether the state is the saved one"])
        if len(ranks) != self._world.size:
            return _Compared([f"{len(ranks)} ranks saved it, and {self._world.size} restored it: nothing was compared"])
        live = dict(leaves(parts.values(kind)))

        def digests_at(name: str) -> set[str]:
            """Return the digest that this rank recorded; if another rank saved the value for it, those of the others."""
            return {each[name] for each in ([ranks[rank]] if name in ranks[rank] else ranks) if name in each}

        own = parts.held.buffers.addresses()

        found = _Compared()
        loaded = [name for name in live if wanted.is_loaded(name) and name not in planner.converted]
        left = COMPARED_BYTES
        for name in sorted(loaded, key=lambda name: getattr(live[name], "nbytes", 0)):
            value = live[name]
            left -= getattr(value, "nbytes", 0)
            if not has_digest(value):
                found.differ[UNKNOWN].append(name)
            elif left < 0:
                found.not_compared.append(name)
            elif name not in ranks[rank] and isinstance(value, torch.Tensor) and address_of(value) in own:
                continue  # another rank saved its own; this rank's is among its own values
            elif digest_of(value) not in (saved := digests_at(name)):
                found.differ[OTHER if saved else UNKNOWN].append(name)
        known = live.keys() | planner.not_loaded
        found.differ[LOST] += [name for name in ranks[rank] if wanted.is_loaded(name) and name not in known]
        if wanted.has_all():
            found.differ[NEW] += [name for name in live if name not in wanted.names]
            found.differ[LEFT_OUT] += parts.held.buffers.left_out()
            then, now = unsaved[rank] if len(unsaved) == len(ranks) else {}, digests_of(parts.unsaved())
            found.differ[UNSAVED] += [name for name in {**then, **now} if now.get(name) != then.get(name)]
        return found

    def _read_bytes(self) -> Mapping[str, int]:
        """Return the bytes of chunks that this process has read so far, by tier."""
        tiers = self._run.open()[0].tiers
        return {tier: tiers.counters[f"{tier}_read_bytes"] if tiers is not None else 0 for tier in TIERS}

    def _description(self, step: int) -> tuple[About | None, Sequence[str]]:
        """Read a checkpoint's own description and the names of its values on every rank. If one rank fails, all raise."""
        about: About | None = None
        names: Sequence[str] = ()
        failure: Exception | None = None
        try:
            checkpoint = self._run.checkpoint(step)
            about = self._run.about(checkpoint)
            names = tuple(checkpoint.metadata.state_dict_metadata)
        except TierfsError as error:
            failure = error
        failures = self._world.gather(failure, self._world.training)
        found = {rank: (error, None) for rank, error in enumerate(failures) if error is not None}
        if found:
            raise CheckpointException("read", found)
        return about, names

    def _mark(self, step: int, problem: str) -> None:
        try:
            self._run.mark_damaged(step, problem)
        except TierfsError as error:
            _logger.warning("%s could not be marked as damaged: %s", self._run.url_of(step), error)

    def _nothing(self, passed_over: Mapping[int, str]) -> CorruptionError:
        listed = "; ".join(f"step {step}: {why}" for step, why in sorted(passed_over.items()))
        return CorruptionError(
            f"{self._run.url}: checkpoints exist, but none can be loaded: {listed}; `tierfs checkpoint verify` "
            "says more, and `tierfs repair` may help. Training does not start from scratch by itself"
        )
