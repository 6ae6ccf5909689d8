"""Find the blocks of a chunk that its wanted parts need, and the memory that each block is decoded into."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from tierfs.digest import BLOCK_BYTES

# The share of a chunk that a read has to want for the whole chunk to be fetched. EXACT_SHARE is for callers that know
# they want nothing else of the chunk: they get at most 10 % more bytes than wanted, besides the rest of partly wanted
# blocks. ANY_SHARE is for callers that will soon want the rest: the whole chunk is fetched at once.
WHOLE_SHARE = 0.25
EXACT_SHARE = 1 / 1.1
ANY_SHARE = 0.0

Part: TypeAlias = tuple[int, memoryview]
"""The offset of wanted bytes in a chunk or a file, and the writable memory that they fill."""


def by_chunk(parts: Iterable[tuple[int, Any]], starts: Sequence[int]) -> dict[int, list[tuple[int, Any]]]:
    """Cut parts of a file where its chunks end.

    Args:
        parts: Offsets in the file, each with its memory: a memoryview of bytes, or a tensor of them. In any order; all
            within the file. Empty parts are left out.
        starts: The offset of each chunk, and the file's length.

    Returns:
        The wanted parts of each chunk by its index, with offsets in the chunk.
    """
    found: dict[int, list[tuple[int, Any]]] = {}
    for offset, out in parts:
        at, end = offset, offset + len(out)
        index = bisect.bisect_right(starts, at) - 1
        if at < end <= starts[index + 1]:  # nearly all parts, if there are many small ones
            found.setdefault(index, []).append((at - starts[index], out))
            continue
        while at < end:
            stop = min(end, starts[index + 1])
            found.setdefault(index, []).append((at - starts[index], out[at - offset : stop - offset]))
            at = stop
            index += 1
    return found


def block_runs(parts: Iterable[Part]) -> list[range]:
    """Return the blocks that parts of a chunk lie in, without duplicates, in order. Adjacent blocks form one range."""
    return runs_of(sorted({index for part in parts for index in _blocks(part)}))


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Group ascending numbers into ranges."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _blocks(part: Part) -> range:
    start, out = part
    return range(start // BLOCK_BYTES, (start + len(out) - 1) // BLOCK_BYTES + 1) if len(out) else range(0)


class BlockTargets:
    """Chooses the memory for each needed block: a caller's buffer if a part wants the whole block, else lent memory.

    Args:
        raw_length: Bytes of the chunk.
        parts: The wanted parts of it, in any order; may overlap. Borrowed until `finish`.
        lend: Returns memory of a length in bytes, which stays valid until `finish`.

    Attributes:
        blocks: Indexes of the needed blocks, in order.
    """

    def __init__(self, raw_length: int, parts: Iterable[Part], lend: Callable[[int], memoryview]) -> None:
        self._takers: dict[int, list[Part]] = {}
        for part in parts:
            for index in _blocks(part):
                self._takers.setdefault(index, []).append(part)
        self.blocks = sorted(self._takers)
        self._views: dict[int, memoryview] = {}
        beside: dict[int, int] = {}
        for index in self.blocks:
            begin, end = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, raw_length)
            takers = self._takers[index]
            for number, (start, out) in enumerate(takers):
                if start <= begin and end <= start + len(out):
                    self._views[index] = out[begin - start : end - start]
                    del takers[number]
                    break
            else:
                beside[index] = end - begin
        if beside:
            memory = lend(sum(beside.values()))
            for index, length in beside.items():
                self._views[index], memory = memory[:length], memory[length:]

    def __contains__(self, index: object) -> bool:
        return index in self._views

    def view(self, index: int) -> memoryview:
        """Return the memory for block ``index``, exactly its length."""
        return self._views[index]

    def finish(self) -> None:
        """Copy each block to the other parts that want some or all of it."""
        for index, takers in self._takers.items():
            begin, block = index * BLOCK_BYTES, self._views[index]
            end = begin + len(block)
            for start, out in takers:
                low, high = max(begin, start), min(end, start + len(out))
                out[low - start : high - start] = block[low - begin : high - begin]
