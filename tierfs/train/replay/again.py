"""`StepsAgain`: makes logged steps again after a full checkpoint was restored. Each call is a collective.

The ranks agree on the steps before the first one, and before each one on whether all could read its files. A step is
made by the user's own ``optimizer.step``. Steps stop at the first doubt: a gap, another build of torch, other flags or
parameters. If a digest differs, the state is restored again, up to the last step that was proven.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierfs.checkpoint.replayed import LoggedStep, logged_steps
from tierfs.errors import CorruptionError, FormatError, NotFoundError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.store import Store, level_of
from tierfs.train.agree import World
from tierfs.train.replay.file import LoggedFile, StepFacts
from tierfs.train.replay.parts import REST, Parts, groups_of, kind_of, local, parameters_of
from tierfs.train.replay.recorder import Recorder
from tierfs.train.restore import Restored
from tierfs.train.run import RunDirectory
from tierfs.train.state import as_state

CHAIN = "replay"
"""The name of a checkpoint's chain among the facts of its own description."""
_UNREADABLE = (NotFoundError, CorruptionError, FormatError)
_FLAGS = (bool, str, type(None))
_logger = logging.getLogger("tierfs.train")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that all ranks have, and this rank's file of it."""

    logged: LoggedStep
    file: LoggedFile


class StepsAgain:
    """Makes the steps again that a run's log has after a checkpoint.

    Attributes:
        metrics: The recorded metrics of each step that was made again.
    """

    def __init__(self, recorder: Recorder, run: RunDirectory, world: World) -> None:
        self._policy = recorder.policy
        self._run = run
        self._world = world
        self._recorder = recorder
        self._rest: dict[str, torch.Tensor] = {}  # the newest of each logged tensor besides gradients
        self.metrics: list[tuple[int, Mapping[str, float]]] = []

    def after(self, found: Restored, state: Any, load: Callable[[], object], *, is_newest: bool) -> Restored:
        """Make the logged steps after a restored full checkpoint again.

        Args:
            found: The outcome of the restore.
            state: The restored state, as the user passed it.
            load: Restores the checkpoint once more.
            is_newest: Whether to make steps again. Otherwise training goes on from the checkpoint.

        Returns:
            The outcome with the last step that was made again.
        """
        parts = Parts(as_state(state))
        self._policy.check(parts.optimizers)
        store, run = self._run.open()
        own = [one for one in logged_steps(store, run) if one.rank == self._world.rank]
        roots = {f"save:{self._save_id(found.step)}"}
        if found.about is not None and CHAIN in found.about.state:
            roots.add(str(found.about.state[CHAIN]))
        steps, stopped = list[_Planned](), ""
        if is_newest and found.is_exact and found.kind == "full":
            steps, stopped = self._plan(store, run, own, found.step, roots, parts)
        elif is_newest and any(one.step > found.step for one in own):
            stopped = "the checkpoint itself is not restored exactly"
        steps, stopped, notes = self._make_proven(steps, stopped, parts, load)
        for each in steps:
            self.metrics += each.file.facts.metrics.items()
        at = steps[-1].logged.step if steps else found.step
        kept = [(each.logged.step, each.logged.path(run), each.file.length) for each in steps]
        paths = {path for _, path, _ in kept}
        left = [path for one in own if (path := one.path(run)) not in paths]
        parent = steps[-1].logged.chain if steps else max(roots, key=lambda name: not name.startswith("save:"))
        if found.is_exact and found.kind == "full":
            self._recorder.restored(at, parts.state, parent, kept, left)
        if stopped and self._world.is_first:
            _logger.warning("%s: %d steps were made again, up to step %d: %s", self._run.url, len(steps), at, stopped)
        levels = [level_of(store, path) for path in paths]
        level = min(
            Level.parse(found.level), *self._world.gather(min(levels, default=Level.OBJECT), self._world.training)
        )
        told = self._world.gather(tuple(notes), self._world.training)
        everyones = tuple(dict.fromkeys(note for each in told for note in each))
        return replace(
            found, step=at, level=level.label, replayed=len(steps), stopped=stopped, notes=(*found.notes, *everyones)
        )

    def _save_id(self, step: int) -> str:
        note = self._run.checkpoint(step).note
        return note.save_id if note is not None else ""

    def _plan(
        self, store: Store, run: str, own: Sequence[LoggedStep], step: int, ids: set[str], parts: Parts
    ) -> tuple[list[_Planned], str]:
        """Return the steps after one that all ranks have, in order, and why they stop; empty if no file follows.

        ``ids`` names the chain and the save that the state belongs to.
        """
        mine: dict[LoggedStep, _Planned] = {}
        told: dict[tuple[str, int, int], tuple[str, str]] = {}
        size, build = self._world.size, parts.build()
        for one in own:
            if one.step <= step or one.ranks != size:
                continue
            key, parent, why = (one.chain, one.after, one.step), "", ""
            try:
                file = LoggedFile(store, one.path(run))
                mine[one] = _Planned(one, file)
                parent = file.facts.parent if file.facts.base == one.after else ""
                why = _doubt(file.facts, build, parts)
            except _UNREADABLE as error:
                why = str(error)
            told[key] = parent, why
        everyones = self._world.gather(told, self._world.training)
        others = sorted({one.ranks for one in own if one.step > step and one.ranks != size})
        found: list[_Planned] = []
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
            chain, after, step = key
            ids = {chain}
            found.append(mine[LoggedStep(chain, after, step, self._world.rank, size)])

    def _make_proven(
        self, steps: list[_Planned], stopped: str, parts: Parts, load: Callable[[], object]
    ) -> tuple[list[_Planned], str, list[str]]:
        """Make the planned steps, or those up to the last proven one. Return them, why they stop, and notes."""
        reasons = [why for optimizer in parts.optimizers if (why := self._policy.reason_against(optimizer))]
        while True:
            with self._recorder.paused():
                made, proven, why = self._make(steps, parts, is_exact=not reasons)
            if why:
                stopped = why
            if made >= 0:
                break
            load()
            steps = steps[:proven]
        steps = steps[:made]
        notes = self._finish(steps, parts)
        if steps:
            notes += [f"{len(steps)} steps were made again only approximately: {reason}" for reason in reasons]
        return steps, stopped, notes

    def _make(self, steps: Sequence[_Planned], parts: Parts, *, is_exact: bool) -> tuple[int, int, str]:
        """Make steps again.

        Returns:
            How many were made, -1 if the state has to be restored again; how many of them are proven; and why they
            stop.
        """
        self._rest = {}
        proven = 0
        with ThreadPoolExecutor(1, thread_name_prefix="tierfs-replay") as ahead:
            reading = ahead.submit(steps[0].file.tensors) if steps else None
            for number, each in enumerate(steps):
                assert reading is not None
                tensors, problem = self._read(reading)
                reading = ahead.submit(steps[number + 1].file.tensors) if number + 1 < len(steps) else None
                if problems := self._problems(problem):
                    return number, proven, f"step {each.logged.step}: {problems[0]}"
                facts = each.file.facts
                for at, event in enumerate(facts.events):
                    _step(parts, event, tensors, f"{at}:" if at else "")
                for optimizer, groups in zip(parts.optimizers, facts.groups, strict=True):
                    _set_groups(optimizer, groups)
                self._rest |= {name: tensor for name, tensor in tensors.items() if name.startswith(REST)}
                if facts.digest and is_exact:
                    parts.set_tensors(facts.values, self._rest)
                    differs = "" if parts.digest() == facts.digest else "the state differs from the digest in the log"
                    if problems := self._problems(differs):
                        return -1, proven, f"step {each.logged.step}: {problems[0]}"
                    proven = number + 1
        return len(steps), proven, ""

    @staticmethod
    def _read(reading: Future[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], str]:
        try:
            return reading.result(), ""
        except TierfsError as error:
            return {}, str(error)

    def _problems(self, problem: str) -> list[str]:
        """Return the problems of all ranks; none if no rank has one, which costs little."""
        world = self._world
        if not world.begin_greatest([int(bool(problem))], world.training)()[0]:
            return []
        return [each for each in world.gather(problem, world.training) if each]

    def _finish(self, steps: Sequence[_Planned], parts: Parts) -> list[str]:
        """Set everything besides the parameters and optimizers as it was after the last of these steps."""
        if not steps:
            return []
        facts = steps[-1].file.facts
        parts.set_tensors(facts.values, self._rest)
        return parts.set_values(steps[-1].logged.step, facts.values)


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
    logged = tensors.get(f"{prefix}{name}")
    if logged is None:  # this rank's part has no elements
        found = torch.zeros_like(own)
    elif name in event["strides"]:
        found = torch.empty_strided(logged.shape, event["strides"][name], dtype=logged.dtype, device=own.device)
        found.copy_(logged)
    else:
        found = logged.to(own.device)
    if not isinstance(parameter, DTensor):
        return found
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        found, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
