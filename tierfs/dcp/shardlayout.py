"""How the tensors of one rank lie in its shard file: a safetensors file, cut into chunks so that the next step lines up.

A large tensor begins a chunk of its own and lies in chunks of 16 MiB, so that one that did not change is not stored again,
whatever happened to those before it. Others of one dtype are packed, those of one role (the last part of their names that is no
number) side by side; a role that comes behind 1 MiB of others begins a chunk, and tensors below 1 MiB have packs of their own. A
chunk is a request, so a matrix that many ranks share must not be one on each of them. In memory a pack or a large tensor is one
*run*: side by side, aligned for its dtype. In the file the runs follow each other without gaps, behind the header that the format
has at its front.

Format: https://github.com/huggingface/safetensors (README, "Format"); docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierfs.codec.safetensors import METADATA_NAME, Entry
from tierfs.digest import CHUNK_BYTES

__all__ = ["Piece", "RunPlan", "cut", "header", "plan_runs"]

HEADER_ALIGN = 8
# What is larger than this has chunks of its own: of others two go into one. What is below the other has packs of its own.
LARGE_BYTES = CHUNK_BYTES // 2
SMALL_BYTES = 1 << 20


class Piece(NamedTuple):
    """Bytes that are to lie in the file without a gap: a tensor, a part of one, or an object.

    Attributes:
        name: Of the tensor it belongs to.
        kind: What it is packed with: the name of its dtype.
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
        lengths: Of its chunks, in bytes.
    """

    pieces: tuple[int, ...]
    lengths: tuple[int, ...]


def plan_runs(pieces: Sequence[Piece]) -> list[RunPlan]:
    """Cut pieces into runs: packs first, of small ones and of others, then each large one, all in the order of names."""
    packs: dict[tuple[bool, str], list[int]] = {}
    large: list[int] = []
    for number in sorted(range(len(pieces)), key=lambda number: pieces[number].name):
        piece = pieces[number]
        if piece.length > LARGE_BYTES:
            large.append(number)
        else:
            packs.setdefault((piece.length >= SMALL_BYTES, piece.kind), []).append(number)
    runs = []
    for pack in sorted(packs):
        runs += _pack(pieces, sorted(packs[pack], key=lambda number: _role(pieces[number])))
    return [*runs, *(RunPlan((number,), cut(pieces[number].length)) for number in large)]


def _role(piece: Piece) -> str:
    return next((part for part in reversed(piece.name.split(".")) if not part.isdecimal()), "")


def _pack(pieces: Sequence[Piece], numbers: Iterable[int]) -> list[RunPlan]:
    runs: list[RunPlan] = []
    pack: list[int] = []
    length = 0
    for number in numbers:
        is_other = length >= SMALL_BYTES and _role(pieces[number]) != _role(pieces[pack[-1]])
        if is_other or length + pieces[number].length > CHUNK_BYTES:
            runs.append(RunPlan(tuple(pack), (length,)))
            pack, length = [], 0
        pack.append(number)
        length += pieces[number].length
    return [*runs, RunPlan(tuple(pack), (length,))]


def cut(length: int) -> tuple[int, ...]:
    """Lengths of the chunks of so many bytes."""
    whole, rest = divmod(length, CHUNK_BYTES)
    return (CHUNK_BYTES,) * whole + ((rest,) if rest else ())


def header(entries: Iterable[Entry], note: Mapping[str, str]) -> bytes:
    """The beginning of the file: the header's length (u64, little-endian), then the header, padded with spaces.

    Args:
        entries: In any order; together they cover everything behind the header, without a gap.
        note: Strings kept beside them.
    """
    table: dict[str, object] = {METADATA_NAME: dict(note)} if note else {}
    for entry in sorted(entries, key=lambda entry: (entry.at, entry.length)):
        offsets = [entry.at, entry.at + entry.length]
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text
