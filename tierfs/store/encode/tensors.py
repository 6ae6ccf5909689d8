"""Map the chunks of a file to the tensors that they hold, and its name to the name that all its saves share."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tierfs.codec import Span, spans
from tierfs.digest import BLOCK_BYTES
from tierfs.format.manifest import Row

TensorPlace: TypeAlias = tuple[str, int, int]
"""A chunk's position, whatever the file's layout: the tensor in which it begins, the offset there, and its length."""
_DIGITS = re.compile(r"\d+")
_COUNTER = re.compile(r"((?:step|epoch|iter|iteration|checkpoint|ckpt)[^0-9a-z]*)\d+", re.IGNORECASE)
_RANDOM = re.compile(r"(?<![0-9a-f])[0-9a-f]{8,}(?![0-9a-f])")  # an id that differs in every save


class ChunkPart(NamedTuple):
    """A part of a chunk of the same file.

    Attributes:
        chunk: The chunk's index in the file.
        offset: Where the part begins in the chunk's bytes.
        length: Bytes of the part.
    """

    chunk: int
    offset: int
    length: int


class Tensor(NamedTuple):
    """The elements that a block holds, or that most of it holds.

    Attributes:
        name: The key under which the encoder remembers its choice; empty to remember nothing.
        kind: ``"float"``, ``"integer"`` or ``"bytes"``.
        width: Bytes of an element.
    """

    name: str = ""
    kind: str = "bytes"
    width: int = 1


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """Facts about a chunk besides its bytes.

    Attributes:
        tensors: The tensor of each block; shorter or empty where that is not known.
        save: How many saves of the file came before this one. Tells how old a remembered choice is.
        base: The chunk at the same place in the keyframe, of the same length.
        sources: The parts that the chunk may be derived from; twice its length in all.
        unread: Digests of the replaced file's chunks that have to be read back: see `tierfs.store.chunks.store_chunk`.
            All chunks of a file share one set.
    """

    tensors: tuple[Tensor, ...] = ()
    save: int = 0
    base: Row | None = None
    sources: tuple[ChunkPart, ...] = ()
    unread: set[bytes] | None = field(default=None, compare=False)


NO_CONTEXT = ChunkContext()
"""The context of a chunk about which nothing is known."""


def layout_of(read: Callable[[int, memoryview], None], length: int) -> list[Span]:
    """Return the tensors of a file in order; one span of unknown bytes if `tierfs.codec.spans` finds no table."""
    return spans(read, length) or unknown_layout(0, length)


def unknown_layout(start: int, stop: int) -> list[Span]:
    """Return the layout of bytes without a known structure."""
    return [Span(start, stop, 1, "", "bytes")] if start < stop else []


def places(
    layout: Sequence[Span], lengths: Iterable[int], group: str, *, start: int = 0
) -> Iterator[tuple[TensorPlace, tuple[Tensor, ...]]]:
    """Yield the place of each chunk, and for each of its blocks the tensor that fills most of it.

    Bytes outside any named tensor give an empty `Tensor`, for which no choice is remembered.

    Args:
        layout: The file's spans, without gaps from the beginning of the first chunk to the end of the last one.
        lengths: The chunks' lengths in bytes.
        group: The name that all saves of the file share: see `group_of`.
        start: The offset of the first chunk in the file.
    """
    starts = [span.start for span in layout]
    for length in lengths:
        stop = start + length
        inside = layout[bisect.bisect_right(starts, start) - 1 : bisect.bisect_left(starts, stop)]
        most, at = [], 0
        for begin in range(start, stop, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, stop)
            while inside[at].stop <= begin:
                at += 1
            block = itertools.takewhile(lambda span, end=end: span.start < end, inside[at:])  # type: ignore[misc]
            most.append(max(block, key=lambda span: min(end, span.stop) - max(begin, span.start)))
        tensors = tuple(
            Tensor(f"{group}:{span.name}:{span.kind}{span.width}", span.kind, span.width) if span.name else Tensor()
            for span in most
        )
        yield (inside[0].name, start - inside[0].start, length), tensors
        start = stop


def numbered(parts: Sequence[str]) -> list[int]:
    """Return the indexes of the path components that count the saves.

    These are the components that say so, like ``step_20``. Without any, they are the directories that are a number,
    else the last directory with a number in it, else the file's name. Other numbers in the name of a file that is new
    with every save mean something else, such as its rank.
    """
    directories = parts[:-1]
    counting = [at for at, part in enumerate(parts) if _COUNTER.search(part)]
    counting = counting or [at for at, part in enumerate(directories) if part.isdecimal()]
    counting = counting or [at for at, part in enumerate(directories) if _DIGITS.search(part)][-1:]
    if not counting and _DIGITS.search(parts[-1]) and not _RANDOM.search(parts[-1]):
        return [len(parts) - 1]
    return counting


def numbers(name: str) -> tuple[int, ...]:
    """Return all numbers in a name, in order."""
    return tuple(int(number) for number in _DIGITS.findall(name))


def last_number(name: str) -> str:
    return str(_DIGITS.findall(name)[-1])


def group_of(path: str) -> str:
    """Return the name that all saves of a file share: the path with its counters and random ids masked."""
    parts = path.split("/")
    for at in numbered(parts):
        masked, found = _COUNTER.subn(r"\1#", parts[at])
        parts[at] = masked if found else _DIGITS.sub("#", parts[at])
    return _RANDOM.sub("*", "/".join(parts))
