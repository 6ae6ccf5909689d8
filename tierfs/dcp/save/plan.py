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
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES
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


class PlannedPiece(NamedTuple):
    """Bytes that lie in the file without a gap: a tensor, a part of one, or an object.

    Attributes:
        name: The tensor's name.
        kind: The name of its dtype. Pieces of one kind are packed together.
        length: In bytes; not 0.
    """

    name: str
    kind: str
    length: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run.

    Attributes:
        pieces: The numbers of its pieces, in order.
        lengths: The lengths of its chunks, in bytes.
    """

    pieces: tuple[int, ...]
    lengths: tuple[int, ...]


def plan_runs(pieces: Sequence[PlannedPiece]) -> list[RunPlan]:
    """Pack pieces into runs: packs of small pieces first, ordered by kind, then packs of the others."""
    small: dict[str, list[int]] = {}
    others: dict[tuple[str, str], list[int]] = {}
    for number in sorted(range(len(pieces)), key=lambda number: pieces[number].name):
        piece = pieces[number]
        if piece.length < SMALL_BYTES:
            small.setdefault(piece.kind, []).append(number)
        else:
            others.setdefault((piece.kind, _role(piece)), []).append(number)
    chunks_max = sum(piece.length for piece in pieces) // (RUN_SHARE * CHUNK_BYTES)
    runs = []
    for kind in sorted(small):
        runs += _pack(pieces, sorted(small[kind], key=lambda number: _role(pieces[number])))
    for group in sorted(others):
        runs += _fill(pieces, others[group], min(max(chunks_max, 1), RUN_CHUNKS_MAX))
    return runs


def _role(piece: PlannedPiece) -> str:
    return next((part for part in reversed(piece.name.split(".")) if not part.isdecimal()), "")


def _pack(pieces: Sequence[PlannedPiece], numbers: Sequence[int]) -> list[RunPlan]:
    totals: Counter[str] = Counter()
    for number in numbers:
        totals[_role(pieces[number])] += pieces[number].length
    runs: list[RunPlan] = []
    pack: list[int] = []
    length = 0
    for number in numbers:
        role = _role(pieces[number])
        is_other = length >= SMALL_BYTES and role != _role(pieces[pack[-1]])
        begins = is_other and length + totals[role] > SHARED_BYTES_MAX
        if begins or length + pieces[number].length > CHUNK_BYTES:
            runs.append(RunPlan(tuple(pack), (length,)))
            pack, length = [], 0
        pack.append(number)
        length += pieces[number].length
    return [*runs, RunPlan(tuple(pack), (length,))]


def _fill(pieces: Sequence[PlannedPiece], numbers: Sequence[int], chunks_max: int) -> list[RunPlan]:
    """Put pieces, in order, into runs with the fewest chunks, and among these into the shortest runs."""
    least = len(cut(sum(pieces[number].length for number in numbers)))
    found: list[RunPlan] = []
    fewest = 0
    for chunks in range(1, chunks_max + 1):
        runs = _first_fit(pieces, numbers, chunks * CHUNK_BYTES)
        count = sum(len(run.lengths) for run in runs)
        if not found or count < fewest:
            found, fewest = runs, count
        if fewest == least:
            break
    return found


def _first_fit(pieces: Sequence[PlannedPiece], numbers: Iterable[int], length: int) -> list[RunPlan]:
    """Put each piece into the first of the last few runs that has room. So it lies beside pieces of similar names.

    Frozen tensors have similar names, and so share runs. A piece that is longer than a run begins a longer run, of
    whole chunks.
    """
    runs: list[list[int]] = []
    room: list[int] = []
    for number in numbers:
        needed = pieces[number].length
        for run in range(max(len(runs) - RUNS_OPEN, 0), len(runs)):
            if needed <= room[run]:
                break
        else:
            run = len(runs)
            runs.append([])
            room.append(max(CHUNK_BYTES * len(cut(needed)), length))
        runs[run].append(number)
        room[run] -= needed
    return [RunPlan(tuple(run), cut(sum(pieces[number].length for number in run))) for run in runs]


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
    """The layout of all tensors.

    Attributes:
        runs: For the tensors that have elements.
        names: The names of these tensors; no two are the same.
        length: Of all runs, in bytes.
        empty: The numbers of the tensors without elements, with their dtypes and shapes.
    """

    runs: tuple[TensorRun, ...]
    names: frozenset[str]
    length: int
    empty: tuple[tuple[int, torch.dtype, torch.Size], ...]


def plan_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> TensorPlan:
    """Lay out named tensors: see `plan_tensors`."""
    return plan_tensors(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors]))


@functools.lru_cache(maxsize=4)
def plan_tensors(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> TensorPlan:
    """Lay out tensors.

    Args:
        tensors: Name, dtype and shape of each. Names that repeat get a number at their end in the header.
    """
    full = [number for number, (_, _, shape) in enumerate(tensors) if shape.numel()]
    sizes = [(shape.numel(), dtype.itemsize) for _, dtype, shape in map(tensors.__getitem__, full)]
    pieces = [
        PlannedPiece(tensors[number][0], str(tensors[number][1]), count * width)
        for number, (count, width) in zip(full, sizes, strict=True)
    ]
    names = {METADATA_NAME}
    runs = []
    for plan in plan_runs(pieces):
        numbers = tuple(full[piece] for piece in plan.pieces)
        entries: list[HeaderEntry] = []
        at = 0
        for piece, number in zip(plan.pieces, numbers, strict=True):
            name, dtype, shape = tensors[number]
            length = pieces[piece].length
            entries.append(HeaderEntry(unique(name, names), *described(dtype, shape, length), at, length))
            at += length
        shapes = tuple(tensors[number][2] for number in numbers)
        runs.append(
            TensorRun(
                tensors[numbers[0]][1],
                np.array(numbers, np.int64),
                None if all(len(shape) == 1 for shape in shapes) else shapes,
                tuple(sizes[piece][0] for piece in plan.pieces),
                tuple(entries),
                plan.lengths,
                np.array([entry.at for entry in entries], np.uint64),
                np.array([entry.length for entry in entries], np.uint64),
                max(entry.length for entry in entries),
            )
        )
    total = sum(piece.length for piece in pieces)
    empty = tuple((at, dtype, shape) for at, (_, dtype, shape) in enumerate(tensors) if not shape.numel())
    return TensorPlan(tuple(runs), frozenset(names - {METADATA_NAME}), total, empty)


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
