"""`StepsAgain`: makes logged steps again after a full checkpoint was restored. Each call is a collective.

The ranks agree on the steps before the first one, and before each one on whether all could read its files. A step is
made by the user's own ``optimizer.step``. Steps stop at the first doubt: a gap, another build of torch, other flags or
parameters. If a digest differs, the state is restored again, up to the last step that was proven.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierfs.checkpoint.notes import LoggedStep
from tierfs.digest import checksum
from tierfs.errors import CorruptionError, FormatError, NotFoundError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.store import level_of
from tierfs.train.optimizers import parameters_of
from tierfs.train.proof import DIFFERENT, SAME, UNKNOWN, PartCheck, Prover, ResumeReport
from tierfs.train.replay.logged_file import LoggedFile, StepFacts
from tierfs.train.replay.parts import REST, Parts, groups_of, kind_of, local
from tierfs.train.replay.recorder import CHAIN, Recorder
from tierfs.train.restore import Restored
from tierfs.train.state import NO_GRADIENTS, as_state
from tierfs.train.values import pack

_UNREADABLE = (NotFoundError, CorruptionError, FormatError)
_FLAGS = (bool, str, type(None))
_logger = logging.getLogger("tierfs.train")


class StepsAgain:
    """Makes the steps again that a run's log has after a restored checkpoint.

    ``state`` is the restored state, as the user passed it, and ``base`` the outcome of the restore. ``load`` restores it
    once more.

    Attributes:
        metrics: The recorded metrics of each step that was made again.
    """

    def __init__(self, recorder: Recorder, base: Restored, state: Any, load: Callable[[], object]) -> None:
        self._policy, self._run, self._world = recorder.policy, recorder.run, recorder.world
        self._recorder = recorder
        self._base = base
        self._load = load
        self._parts = Parts(as_state(state))
        self._policy.check(self._parts.optimizers)
        self._others: dict[str, torch.Tensor] = {}  # the newest of each logged tensor besides gradients
        self._frozen: list[str] = []  # what was frozen after the last step
        self.metrics: list[tuple[int, Mapping[str, float]]] = []

    def make(self, *, until: int | None) -> Restored:
        """Make the steps again up to a step, or all of them, and return the outcome. The log goes on after them.

        Raises:
            NotFoundError: The log does not lead to ``until``. The state is at an earlier step.
        """
        _, run = self._run.open()
        base, gather = self._base, partial(self._world.gather, group=self._world.training)
        own = [one for one in self._recorder.logged() if one.rank == self._world.rank]
        note = self._run.checkpoint(base.step).note
        ids = {f"save:{note.save_id if note is not None else ''}"}
        if base.about is not None and CHAIN in base.about.state:
            ids.add(str(base.about.state[CHAIN]))
        parent = max(ids, key=lambda name: not name.startswith("save:"))
        # The gradients that a save lacks are in the log, whole, where an optimizer used them.
        lasting = [note for note in base.notes if note != NO_GRADIENTS]
        is_whole = all(gather(not lasting and base.kind == "full"))
        self._recorder.is_fresh = False
        steps, stopped, notes = list[LoggedFile](), "", list[str]()
        ahead = [one for one in own if base.step < one.step and (until is None or one.step <= until)]
        if is_whole:
            steps, stopped = self._plan(ahead, ids)
            steps, stopped, notes = self._make_proven(steps, stopped)
        elif ahead:
            stopped = "the checkpoint itself is not restored exactly"
        for each in steps:
            self.metrics += each.facts.metrics.items()
            parent, self._frozen = each.logged.chain, each.facts.frozen
        at = steps[-1].logged.step if steps else base.step
        kept = [each.logged for each in steps]
        if is_whole:
            left = [one for one in own if one not in kept]
            lengths = [(each.logged, each.length) for each in steps]
            self._recorder.restored(at, self._parts.state, parent, lengths, left)
        if until not in {None, at}:
            why = stopped or f"no file of the log ends at step {until}"
            raise NotFoundError(f"{self._run.url}: step {until} cannot be restored: after step {at}: {why}")
        if stopped and self._world.is_first:
            _logger.warning("%s: %d files were made again, up to step %d: %s", self._run.url, len(steps), at, stopped)
        level = min(
            Level.parse(base.level),
            *gather(min((level_of(one.store, one.path(run)) for one in kept), default=Level.OBJECT)),
        )
        everyones = dict.fromkeys(note for told in gather(notes) for note in told)
        notes = [*(lasting if steps else base.notes), *everyones]
        return replace(base, step=at, level=level.label, replayed=len(steps), stopped=stopped, notes=tuple(notes))

    def prove(self, train: Callable[[int], float] | None, *, steps: int, metric: str, tolerance: float) -> ResumeReport:
        """Compare the state with that of a training which makes the same steps from the checkpoint on.

        The checkpoint's state, the losses of the steps and the state after them are compared. The state is left as
        training makes it. For the arguments see `Prover.prove`.
        """
        parts, base = self._parts, self._base
        after, last = self._told(), self.metrics[-1][0]
        self._load()
        prover = Prover(self._run, self._world, base)
        has_step = parts.state.step
        values, _ = parts.state.to_save(base.step, "full")
        checks = prover.compare(values, has_step, parts.state.learning_rates)
        recorded = {at: found[metric] for at, found in self.metrics if metric in found}
        wanted = tuple(takewhile(recorded.__contains__, (at for at, _ in self.metrics)))[:steps] if train else ()
        if train is None or not wanted:
            why = f"no step after {base.step} has a recorded {metric!r}" if train else "no step was to be made"
            return ResumeReport(last, (), (*checks, PartCheck("losses", UNKNOWN, why)))
        checks.append(prover.replay(train, wanted, recorded, tolerance))
        told = self._world.gather(self._told() == after, self._world.training)
        outcome, why = (SAME, "") if all(told) else (DIFFERENT, f"rank {told.index(False)}")
        if wanted[-1] != last:
            outcome, why = UNKNOWN, f"training made {len(wanted)} of {len(self.metrics)} steps: raise steps="
        return ResumeReport(last, wanted, (*checks, PartCheck("steps made again", outcome, why)))

    def _told(self) -> tuple[str, str]:
        """Return digests of this rank's state: of its tensors, and of its random generators and schedules."""
        return self._parts.digest(self._frozen), pack(
            {**self._parts.others()[0], **self._parts.values(has_loaders=False)}
        )

    def _plan(self, own: Sequence[LoggedStep], ids: set[str]) -> tuple[list[LoggedFile], str]:
        """Return the files after the checkpoint that all ranks have, in order, and why they stop; empty if none follows.

        ``own`` are those that this rank may use. ``ids`` names the chain and the save that the state belongs to.
        """
        mine: dict[tuple[str, int, int], LoggedFile] = {}
        told: dict[tuple[str, int, int], tuple[str, str]] = {}
        step, size, build = self._base.step, self._world.size, self._parts.build()
        _, run = self._run.open()
        for one in own:
            if one.ranks != size:
                continue
            key, parent, why = (one.chain, one.after, one.step), "", ""
            try:
                file = mine[key] = LoggedFile(run, one)
                parent = file.facts.parent if file.facts.base == one.after else ""
                why = _doubt(file.facts, build, self._parts)
            except _UNREADABLE as error:
                why = str(error)
            told[key] = parent, why
        everyones = self._world.gather(told, self._world.training)
        others = sorted({one.ranks for one in own if one.ranks != size})
        found: list[LoggedFile] = []
        while True:
            follows = [
                key
                for key in everyones[0]
                if key[1] == step and all(key in each and (key[0] in ids or each[key][0] in ids) for each in everyones)
            ]
            if not follows:
                has_more = any(key[0] in ids and key[1] > step for each in everyones for key in each)
                gap = f"not every rank has the file of the step after {step}" if has_more else ""
                return found, gap or (f"{others[0]} ranks logged them, but {size} restore them" if others else "")
            key = max(follows)
            why = next((each[key][1] for each in everyones if each[key][1]), "")
            if why:
                return found, f"step {key[2]}: {why}"
            ids, step = {key[0]}, key[2]
            found.append(mine[key])

    def _make_proven(self, steps: list[LoggedFile], stopped: str) -> tuple[list[LoggedFile], str, list[str]]:
        """Make the planned steps, or those up to the last proven one. Return them, why they stop, and notes."""
        parts = self._parts
        reasons = [why for optimizer in parts.optimizers if (why := self._policy.reason_against(optimizer))]
        with self._recorder.paused():
            made, proven, why = self._make(steps, is_exact=not reasons)
        if made < 0:
            self._load()
            return self._make_proven(steps[:proven], why)
        steps, stopped = steps[:made], why or stopped
        if not steps:
            return steps, stopped, []
        values = steps[-1].facts.values
        parts.set_others(values, self._others)
        notes = parts.set_values(steps[-1].logged.step, values)
        notes += parts.differences(values, self._others)
        if parts.frozen() != steps[-1].facts.frozen:
            notes.append("other parameters of the optimizers needed a gradient after the step than do now")
        notes += [f"{len(steps)} files of steps were made again only approximately: {reason}" for reason in reasons]
        return steps, stopped, notes

    def _make(self, steps: Sequence[LoggedFile], *, is_exact: bool) -> tuple[int, int, str]:
        """Make steps again.

        Returns:
            How many files were made, -1 if the state has to be restored again; how many of them are proven; and why
            they stop.
        """
        self._others = {}
        parts, proven = self._parts, 0
        with ThreadPoolExecutor(1, thread_name_prefix="tierfs-replay") as ahead:
            reading = deque(ahead.submit(first.tensors) for first in steps[:1])
            for number, each in enumerate(steps):
                tensors, problem = dict[str, torch.Tensor](), ""
                try:
                    tensors = reading.popleft().result()
                except TierfsError as error:
                    problem = str(error)
                reading.extend(ahead.submit(later.tensors) for later in steps[number + 1 : number + 2])
                if problems := self._problems(problem):
                    return number, proven, f"step {each.logged.step}: {problems[0]}"
                for at, event in enumerate(each.facts.events):
                    _step(parts, event, tensors, f"{at}:" if at else "")
                for optimizer, groups in zip(parts.optimizers, each.facts.groups, strict=True):
                    _set_groups(optimizer, groups)
                others = {name: tensor for name, tensor in tensors.items() if name.startswith(REST)}
                self._others |= others
                problem = parts.misfit(others) or (self._difference(each.facts) if is_exact else "")
                if problems := self._problems(problem):
                    return -1, proven, f"step {each.logged.step}: {problems[0]}"
                if each.facts.digest and is_exact:
                    proven = number + 1
        return len(steps), proven, ""

    def _difference(self, facts: StepFacts) -> str:
        """Return in words how the state differs from the one that was logged; empty if nothing shows a difference."""
        parts, (turn, sample) = self._parts, facts.sample
        if checksum(parts.mark(turn)[1]).hex() != sample:
            return "the weights differ from the sample in the log"
        if not facts.digest:
            return ""
        parts.set_others(facts.values, self._others)
        return "" if parts.digest(facts.frozen) == facts.digest else "the state differs from the digest in the log"

    def _problems(self, problem: str) -> list[str]:
        """Return the problems of all ranks; none if no rank has one, which costs little."""
        world = self._world
        if not world.begin_greatest([int(bool(problem))], world.training)()[0]:
            return []
        return [each for each in world.gather(problem, world.training) if each]


def _doubt(facts: StepFacts, build: Mapping[str, Any], parts: Parts) -> str:
    """Return why a file's steps may not come out the same here; empty if nothing speaks against it."""
    for name in facts.build.keys() | build.keys():
        if facts.build.get(name) != build.get(name):
            return f"{name} was {facts.build.get(name)}, and is {build.get(name)}"
    if facts.structure != parts.structure():
        return "the optimizers have other groups or parameters"
    for event in facts.events:
        optimizer = parts.optimizers[event["optimizer"]]
        if event["kind"] != kind_of(optimizer):
            return f"the optimizer was a {event['kind']}, and is a {kind_of(optimizer)}"
        for then, now in zip(event["groups"], groups_of(optimizer), strict=True):
            for name in then.keys() | now.keys():
                if _flag(then.get(name)) != _flag(now.get(name)):
                    return f"{name} of the optimizer was {then.get(name)!r}, and is {now.get(name)!r}"
    return ""


def _flag(value: Any) -> Any:
    """Return a flag of an optimizer as it is, and for a number only whether it is a tensor: numbers are set."""
    return value if isinstance(value, _FLAGS) else isinstance(value, torch.Tensor)


def _set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for name, value in numbers.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _step(parts: Parts, event: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Make one logged call of ``optimizer.step`` again. Gradients are none afterwards."""
    optimizer = parts.optimizers[event["optimizer"]]
    _set_groups(optimizer, event["groups"])
    parameters = list(parameters_of(optimizer))
    none = set(event["none"])
    for each in parameters:
        name = parts.names[id(each)]
        each.grad = None if name in none else _gradient(each, name, prefix, event, tensors)
    try:
        for name, value in event["amp"].items():
            setattr(optimizer, name, value.to(local(parameters[0]).device))
        optimizer.step()
    finally:
        for name in event["amp"]:
            delattr(optimizer, name)
        for each in parameters:
            each.grad = None


def _gradient(
    parameter: torch.Tensor, name: str, prefix: str, event: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    own = local(parameter)
    if name in event["sparse"]:
        shape, is_coalesced = event["sparse"][name]
        indices, values = tensors.get(f"{prefix}{name}:indices"), tensors.get(f"{prefix}{name}:values")
        if indices is None or values is None:  # without elements
            return torch.sparse_coo_tensor(shape, dtype=own.dtype, device=own.device)
        return torch.sparse_coo_tensor(
            indices, values, shape, device=own.device, is_coalesced=is_coalesced, check_invariants=True
        )
    if not own.numel():
        found = torch.zeros_like(own)
    elif name in event["strides"]:
        logged = tensors[f"{prefix}{name}"]
        found = torch.empty_strided(logged.shape, event["strides"][name], dtype=logged.dtype, device=own.device)
        found.copy_(logged)
    else:
        found = tensors[f"{prefix}{name}"].to(own.device)
    if not isinstance(parameter, DTensor):
        return found
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        found, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
