"""`LoggedFile`: a file of the log: what one rank's optimizers got at a few steps, and the other values after them.

It is a safetensors file. Its tensors are the gradients, named as their parameters, and the tensors that changed, whose
names begin with `REST`. The entry `FACTS` has the rest as JSON: see `StepFacts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierfs.checkpoint.notes import LoggedStep
from tierfs.codec.layout.safetensors import read_table
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.shard_writer import commit_shard
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES, in_torch, tensor_in
from tierfs.errors import FormatError, InvalidInputError
from tierfs.store import open_entry, stat_to_read
from tierfs.train.optimizers import parameters_of
from tierfs.train.replay.parts import REST, local
from tierfs.train.values import pack, unpack


def gradients_of(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str
) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
    """Return the tensors of an optimizer's gradients by name, and their forms for `StepFacts.events`.

    ``names`` are those of the parameters by ``id``, and ``prefix`` begins the names of the tensors.

    Raises:
        InvalidInputError: A gradient is sparse in another form than COO, or placed unlike its parameter.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    none, sparse, strides = [], {}, {}
    for each in parameters_of(optimizer):
        name = names[id(each)]
        if each.grad is None:
            none.append(name)
            continue
        _check_gradient(name, each, each.grad)
        gradient = local(each.grad)
        if gradient.layout is torch.sparse_coo:
            sparse[name] = [list(gradient.shape), gradient.is_coalesced()]
            pair = gradient._indices(), gradient._values()
            tensors += zip((f"{prefix}{name}:indices", f"{prefix}{name}:values"), pair, strict=True)
            continue
        if not gradient.is_contiguous():
            strides[name] = list(gradient.stride())
        tensors.append((f"{prefix}{name}", gradient))
    return tensors, {"none": none, "sparse": sparse, "strides": strides}


def _check_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if isinstance(gradient, DTensor) and gradient.placements != getattr(parameter, "placements", None):
        raise InvalidInputError(
            f"Replay: the gradient of {name} is placed as {gradient.placements}, unlike its parameter: redistribute it first"
        )
    if gradient.layout not in {torch.strided, torch.sparse_coo} or gradient.dtype not in SAFETENSORS_NAMES:
        raise InvalidInputError(
            f"Replay: the gradient of {name} cannot be logged: its layout is {gradient.layout}, its dtype {gradient.dtype}"
        )


FACTS = "tierfs.replay"
VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The content of a file beside its tensors.

    Attributes:
        parent: The chain, or the save, that had the state at the step that the file's chain follows.
        base: The step that the file's chain follows.
        rank: The rank whose file has the gradients: this one, or one of the same host that has the same gradients.
        build: The facts about this program and machine on which the bits of an update depend.
        structure: The names of the parameters of each group of each optimizer.
        events: The calls of ``optimizer.step``, in order: the optimizer's number and class, its numbers before the call,
            and for each parameter the form of its gradient.
        groups: The numbers of each group of each optimizer after the step.
        values: See `Parts.others` and `Parts.values`.
        frozen: See `Parts.frozen`.
        digest: See `Parts.digest`, of the state after the step; empty unless the step is to be proven.
        sample: The turn of a sample of the weights after the step, and its checksum: see `Parts.mark`.
        metrics: The metrics of each training step in the file.
    """

    parent: str
    base: int
    rank: int
    build: Mapping[str, Any]
    structure: list[list[list[str]]]
    events: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    values: dict[str, Any]
    frozen: list[str]
    digest: str
    sample: tuple[int, str]
    metrics: dict[int, dict[str, float]]

    def forms(self) -> list[Any]:
        """Return which gradients the optimizers got, and in which form."""
        names = ("optimizer", "none", "sparse", "strides")
        return [self.structure, *([event[name] for name in names] for event in self.events)]


def commit_log(file: ShardFile, path: str, facts: StepFacts) -> int:
    """Publish a file of the log, which holds its tensors already, on this host. Return its length in bytes.

    Raises `CapacityError` if there is no room, and as `Writer.commit` does.
    """
    text = pack({"version": VERSION, **{name: getattr(facts, name) for name in facts.__slots__}}).encode()
    file.add_objects([(FACTS, memoryview(text))])
    file.wait_filled()
    places = [(run, entry) for run in file.runs for entry in run.entries]
    return commit_shard(file, path, places, is_log=True)[0]


class LoggedFile:
    """A file of the log, opened for reading.

    Attributes:
        logged: Its name.
        facts: Its content beside the tensors.
        length: Of the file, in bytes.

    Raises:
        NotFoundError, CorruptionError, FormatError: It cannot be read, or a newer tierfs wrote it.
    """

    def __init__(self, run: str, logged: LoggedStep) -> None:
        self.logged = logged
        self._other = partial(LoggedFile, run)
        store, path = logged.store, logged.path(run)
        self._reader = open_entry(store, stat_to_read(store, path))
        self._where, self.length = store.where(path), self._reader.length
        self._table, self._begin = read_table(self._reader.read_into, self.length, self._where)
        if FACTS not in self._table:
            raise FormatError(f"{self._where} is not a file of a log: it lacks {FACTS}")
        entry = self._table.pop(FACTS)
        data = bytearray(entry.length)
        self._reader.read_into(self._begin + entry.at, memoryview(data))
        found = unpack(data.decode(), self._where)
        if found.pop("version", None) != VERSION:
            raise FormatError(f"{self._where} has another version than {VERSION}")
        self.facts = StepFacts(**found)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the tensors, by name. Raises as the constructor does."""
        data = {name: bytearray(entry.length) for name, entry in self._table.items()}
        parts = [(self._begin + self._table[name].at, memoryview(each)) for name, each in data.items()]
        self._reader.read_parts(parts)
        found = {}
        for name, entry in self._table.items():
            kind = in_torch(entry.dtype, entry.shape)
            if kind is None:
                raise FormatError(f"{self._where}: {name} has a dtype that torch lacks: {entry.dtype}")
            found[name] = tensor_in(data[name], *kind)
        if self.facts.rank != self.logged.rank:
            other = self._other(replace(self.logged, rank=self.facts.rank))
            if other.facts.forms() != self.facts.forms():
                raise FormatError(f"{other._where} has other gradients than {self._where} refers to")
            found |= {name: each for name, each in other.tensors().items() if not name.startswith(REST)}
        return found
