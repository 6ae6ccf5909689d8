"""Lay out the tensors of one rank in its shard file: a safetensors file, cut so that the next step has the same chunks.

Tensors of one dtype are packed together. Within that, tensors of one role (the last part of the name that is not a
number) are adjacent. Tensors below 1 MiB have packs of their own. In these, a role that follows 1 MiB of others begins
a new chunk, unless all its tensors fit into 4 MiB together with the chunk so far. A chunk is a request. So the part of
a matrix on each of many ranks must not be a chunk of its own, and neither must the end of each large tensor.

In memory a pack is one *run*: contiguous, aligned for its dtype, and cut into chunks of 16 MiB. In the file the runs
follow each other without gaps, after the header at the beginning. The layout is the same for each save, so it is cached.

Format: https://github.com/huggingface/safetensors (README, "Format"); docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES
from tierfs.device.accelerator import Accelerator, accelerator_of
from tierfs.digest import CHUNK_BYTES

HEADER_ALIGN = 8
NOTE: Mapping[str, str] = {"format": "pt", "tierfs": "1"}
# Smaller tensors have packs of their own.
SMALL_BYTES = 1 << 20
# Roles share a chunk up to this size. When one role changes, the others are stored again, which costs less than a
# request.
SHARED_BYTES_MAX = 4 << 20
# A run of several tensors has at most so many chunks, and at most 1/RUN_SHARE of all: it needs contiguous memory.
RUN_CHUNKS_MAX = 8
RUN_SHARE = 32
RUNS_OPEN = 4  # the number of latest runs that are searched for room


_Piece: TypeAlias = tuple[str, str, int]
"""Bytes that lie in the file without a gap: a tensor's name, the kind of bytes, and their number, which is not 0."""


def plan_runs(pieces: Sequence[_Piece]) -> list[tuple[list[int], tuple[int, ...]]]:
    """Pack pieces into runs: packs of small pieces first, ordered by kind, then packs of the others.

    Returns:
        For each run, the numbers of its pieces in order, and the lengths of its chunks in bytes.
    """
    small: dict[str, list[int]] = {}
    others: dict[tuple[str, str], list[int]] = {}
    for number in sorted(range(len(pieces)), key=lambda number: pieces[number][0]):
        name, kind, length = pieces[number]
        if length < SMALL_BYTES:
            small.setdefault(kind, []).append(number)
        else:
            others.setdefault((kind, _role(name)), []).append(number)
    roles, sizes = [_role(name) for name, _, _ in pieces], [length for _, _, length in pieces]
    chunks_max = sum(sizes) // (RUN_SHARE * CHUNK_BYTES)
    runs: list[list[int]] = []
    for kind in sorted(small):
        runs += _pack(roles, sizes, sorted(small[kind], key=roles.__getitem__))
    for group in sorted(others):
        runs += _fill(sizes, others[group], min(max(chunks_max, 1), RUN_CHUNKS_MAX))
    return [(run, _chunks(sizes, run)) for run in runs]


def sizes_of(state: Any) -> tuple[int, int]:
    """Return about how many bytes the tensors of a state will take on this rank, and how many the longest run.

    An optimizer counts with the moments that it makes in its first step.

    Args:
        state: Tensors, modules and optimizers, and dicts, lists and tuples of them. Other objects count if they have
            ``load_state_dict``, with the modules and optimizers that are their attributes. A tensor counts once.
    """
    sizes: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    found = [state]
    while found:
        each = found.pop()
        if isinstance(each, torch.Tensor):
            sizes[id(each), 0] = _bytes_of(each)
        elif isinstance(each, ShardedTensor):
            found += [shard.tensor for shard in each.local_shards()]
        elif isinstance(each, torch.nn.Module):
            found += [*each.parameters(), *each.buffers()]
        elif isinstance(each, torch.optim.Optimizer):
            found += each.state.values()
            moments = _moments(each)
            fresh = [one for group in each.param_groups for one in group["params"] if one.requires_grad]
            sizes |= {(id(one), at): _bytes_of(one) for one in fresh if one not in each.state for at in moments}
        elif isinstance(each, (Mapping, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            found += each.values() if isinstance(each, Mapping) else each
        elif hasattr(each, "load_state_dict"):
            parts = itertools.chain(*(one if type(one) is list else [one] for one in vars(each).values()))
            found += [one for one in parts if isinstance(one, (torch.nn.Module, torch.optim.Optimizer))]
    size = sum(sizes.values())
    return size, max(*sizes.values(), min(size // RUN_SHARE // CHUNK_BYTES, RUN_CHUNKS_MAX) * CHUNK_BYTES, 0)


def _bytes_of(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.nbytes if local.layout is torch.strided else 0


def _moments(optimizer: torch.optim.Optimizer) -> range:
    """Return a range as long as the tensors that an optimizer makes for a parameter, by what its class takes."""
    taken = optimizer.defaults
    moments = len(taken.get("betas", ())) + bool(taken.get("amsgrad")) or int(bool(taken.get("momentum", True)))
    return range(1, 1 + moments)


def _role(name: str) -> str:
    return next((part for part in reversed(name.split(".")) if not part.isdecimal()), "")


def _chunks(sizes: Sequence[int], run: Iterable[int]) -> tuple[int, ...]:
    return cut(sum(sizes[number] for number in run))


def _pack(roles: Sequence[str], sizes: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    totals: Counter[str] = Counter()
    for number in numbers:
        totals[roles[number]] += sizes[number]
    runs: list[list[int]] = []
    pack: list[int] = []
    length = 0
    for number in numbers:
        is_other = length >= SMALL_BYTES and roles[number] != roles[pack[-1]]
        begins = is_other and length + totals[roles[number]] > SHARED_BYTES_MAX
        if begins or length + sizes[number] > CHUNK_BYTES:
            runs.append(pack)
            pack, length = [], 0
        pack.append(number)
        length += sizes[number]
    return [*runs, pack]


def _fill(sizes: Sequence[int], numbers: Sequence[int], chunks_max: int) -> list[list[int]]:
    """Put pieces, in order, into runs with the fewest chunks, and among these into the shortest runs."""
    least = len(_chunks(sizes, numbers))
    found: list[list[int]] = []
    fewest = 0
    for chunks in range(1, chunks_max + 1):
        runs = _first_fit(sizes, numbers, chunks * CHUNK_BYTES)
        count = sum(len(_chunks(sizes, run)) for run in runs)
        if not found or count < fewest:
            found, fewest = runs, count
        if fewest == least:
            break
    return found


def _first_fit(sizes: Sequence[int], numbers: Iterable[int], length: int) -> list[list[int]]:
    """Put each piece into the first of the last few runs that has room. So it lies beside pieces of similar names.

    Frozen tensors have similar names, and so share runs. A piece that is longer than a run begins a longer run, of
    whole chunks.
    """
    runs: list[list[int]] = []
    room: list[int] = []
    for number in numbers:
        needed = sizes[number]
        for run in range(max(len(runs) - RUNS_OPEN, 0), len(runs)):
            if needed <= room[run]:
                break
        else:
            run = len(runs)
            runs.append([])
            room.append(max(CHUNK_BYTES * len(cut(needed)), length))
        runs[run].append(number)
        room[run] -= needed
    return runs


def cut(length: int) -> tuple[int, ...]:
    """Return the lengths of the chunks for ``length`` bytes."""
    whole, rest = divmod(length, CHUNK_BYTES)
    return (CHUNK_BYTES,) * whole + ((rest,) if rest else ())


def header(entries: Iterable[HeaderEntry], note: Mapping[str, str] = NOTE) -> bytes:
    """Return the beginning of the file: the header's length (u64, little-endian), then the header, padded with spaces.

    Args:
        entries: In any order. Together they cover everything after the header, without a gap.
        note: Strings kept beside the entries; by default those of a shard file.
    """
    table: dict[str, object] = {METADATA_NAME: dict(note)}
    for entry in sorted(entries, key=lambda entry: (entry.at, entry.length)):
        offsets = [entry.at, entry.at + entry.length]
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True, eq=False)
class TensorRun:
    """A run of tensors of one dtype.

    Attributes:
        dtype: Of all its tensors.
        numbers: int64 [tensors]: the numbers of its tensors, in order.
        shapes: The shape of each tensor; ``None`` if all have one dimension.
        counts: The number of elements of each tensor.
        entries: The header's entry of each tensor.
        lengths: The lengths of the run's chunks, in bytes.
        offsets: uint64 [tensors]: where each tensor lies in the run, in bytes.
        sizes: uint64 [tensors]: the bytes of each tensor.
        longest: Bytes of the longest of them.
    """

    dtype: torch.dtype
    numbers: np.ndarray[Any, Any]
    shapes: tuple[torch.Size, ...] | None
    counts: tuple[int, ...]
    entries: tuple[HeaderEntry, ...]
    lengths: tuple[int, ...]
    offsets: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    longest: int

    def views(self, memory: Any) -> list[torch.Tensor]:
        """Return the tensors as views of the run's memory, each with a storage of its own."""
        views = [
            torch.frombuffer(memory, dtype=self.dtype, count=count, offset=entry.at)
            for count, entry in zip(self.counts, self.entries, strict=True)
        ]
        if self.shapes is not None:
            for view, shape in zip(views, self.shapes, strict=True):
                view.resize_(shape)
        return views

    def copies(self, begin: int, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the copies that fill the run: uint64 [copies, 3], each a target, a source and a length.

        Args:
            begin: The address of the run.
            addresses: uint64: of each tensor of the plan. Tensors at address 0 are left out.
        """
        sources = addresses[self.numbers]
        found = np.stack((self.offsets + np.uint64(begin), sources, self.sizes), axis=1)
        return found if sources.all() else found[sources != 0]


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """The layout of the tensors in host memory, or of those on one GPU.

    Attributes:
        accelerator: The GPU; ``None`` for host memory.
        runs: For the tensors that have elements.
        names: The names of these tensors; no two are the same.
        empty: The numbers of the tensors without elements, with their dtypes and shapes.
    """

    accelerator: Accelerator | None
    runs: tuple[TensorRun, ...]
    names: frozenset[str]
    empty: tuple[tuple[int, torch.dtype, torch.Size], ...]


_Tensor: TypeAlias = tuple[int, str, torch.dtype, torch.Size]
"""A tensor's number, name, dtype and shape."""


def plan_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[TensorPlan]:
    """Lay out named tensors: a plan for those in host memory, and one for each GPU.

    Names that repeat get a number at their end in the header.
    """
    places: dict[int, tuple[Accelerator | None, list[_Tensor]]] = {id(None): (None, [])}
    for number, (name, tensor) in enumerate(tensors):
        accelerator = accelerator_of(tensor) if tensor.numel() else None
        theirs = places.setdefault(id(accelerator), (accelerator, []))[1]
        theirs.append((number, name, tensor.dtype, tensor.shape))
    return [_planned(accelerator, tuple(theirs)) for accelerator, theirs in places.values() if theirs]


@functools.lru_cache(maxsize=4)
def _planned(accelerator: Accelerator | None, tensors: tuple[_Tensor, ...]) -> TensorPlan:
    full = [(each, each[3].numel(), each[2].itemsize) for each in tensors if each[3].numel()]
    names = {METADATA_NAME}
    runs = []
    for pieces, lengths in plan_runs([(name, str(dtype), count * width) for (_, name, dtype, _), count, width in full]):
        entries: list[HeaderEntry] = []
        at = 0
        for (_, name, dtype, shape), count, width in map(full.__getitem__, pieces):
            length = count * width
            entries.append(HeaderEntry(unique(name, names), *described(dtype, shape, length), at, length))
            at += length
        shapes = tuple(full[piece][0][3] for piece in pieces)
        runs.append(
            TensorRun(
                full[pieces[0]][0][2],
                np.array([full[piece][0][0] for piece in pieces], np.int64),
                None if all(len(shape) == 1 for shape in shapes) else shapes,
                tuple(full[piece][1] for piece in pieces),
                tuple(entries),
                lengths,
                np.array([entry.at for entry in entries], np.uint64),
                np.array([entry.length for entry in entries], np.uint64),
                max(entry.length for entry in entries),
            )
        )
    empty = tuple((number, dtype, shape) for number, _, dtype, shape in tensors if not shape.numel())
    return TensorPlan(accelerator, tuple(runs), frozenset(names - {METADATA_NAME}), empty)


def described(dtype: torch.dtype, shape: Iterable[int], length: int) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of a tensor for the header.

    A dtype that the format does not have is described as bytes.
    """
    known = SAFETENSORS_NAMES.get(dtype)
    return (known, tuple(shape)) if known else ("U8", (length,))


def unique(name: str, names: set[str]) -> str:
    """Return ``name``, with a number at its end if it is in ``names`` already, and add the result to ``names``."""
    found, number = name, 1
    while found in names:
        found, number = f"{name}#{number}", number + 1
    names.add(found)
    return found
