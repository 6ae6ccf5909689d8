"""How the tensors of one rank lie in its shard file: a safetensors file, cut into chunks so that the next step lines up.

Tensors of one dtype are packed, those of one role (the last part of their names that is no number) side by side; those below 1 MiB
have packs of their own, in which a role that comes behind 1 MiB of others begins a chunk, unless all of them together take no more than
4 MiB. A chunk is a request, so a matrix that many ranks share must not be one on each of them, nor the end of each large one. In memory
a pack is one *run*: side by side, aligned for its dtype, and cut into chunks of 16 MiB. In the file the runs follow each other without
gaps, behind the header that the format has at its front.

Format: https://github.com/huggingface/safetensors (README, "Format"); docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.digest import CHUNK_BYTES

__all__ = ["PlannedPiece", "RunPlan", "cut", "header", "plan_runs"]

HEADER_ALIGN = 8
NOTE: Mapping[str, str] = {"format": "pt", "tierfs": "1"}
# Smaller tensors have packs of their own.
SMALL_BYTES = 1 << 20
# Roles that take no more than this together share a chunk: what one of them takes along when it changes is less than a request is worth.
SHARED_BYTES_MAX = 4 << 20
# The longest run of several tensors, in chunks; and no more than such a part of all, for which there has to be memory in one piece.
RUN_CHUNKS_MAX = 8
RUN_SHARE = 32
RUNS_OPEN = 4  # among which a place is looked for


class PlannedPiece(NamedTuple):
    """Bytes that are to lie in the file without a gap: a tensor, a part of one, or an object.

    Attributes:
        name: Its tensor's.
        kind: It is packed with others of this kind: the name of its dtype.
        length: In bytes; not 0.
    """

    name: str
    kind: str
    length: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run.

    Attributes:
        pieces: Which ones are in it, by their numbers, in order.
        lengths: Its chunks', in bytes.
    """

    pieces: tuple[int, ...]
    lengths: tuple[int, ...]


def plan_runs(pieces: Sequence[PlannedPiece]) -> list[RunPlan]:
    """Cut pieces into runs: packs of small ones first, in the order of their names, then those of others."""
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
    """Put pieces, in order, into runs of as few chunks as can be found, and of those into the shortest runs."""
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
    """Put each piece into the first of the last few runs that has room: beside what its name is like, as what is frozen is.

    What is longer than a run begins a longer one, of whole chunks.
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
    """Lengths of the chunks of so many bytes."""
    whole, rest = divmod(length, CHUNK_BYTES)
    return (CHUNK_BYTES,) * whole + ((rest,) if rest else ())


def header(entries: Iterable[HeaderEntry], note: Mapping[str, str] = NOTE) -> bytes:
    """The beginning of the file: the header's length (u64, little-endian), then the header, padded with spaces.

    Args:
        entries: In any order; together they cover everything behind the header, without a gap.
        note: Strings kept beside them; by default a shard file's.
    """
    table: dict[str, object] = {METADATA_NAME: dict(note)}
    for entry in sorted(entries, key=lambda entry: (entry.at, entry.length)):
        offsets = [entry.at, entry.at + entry.length]
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text
