"""Which blocks of a chunk are needed for parts of it, and where each of them is decoded to."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from tierfs.digest import BLOCK_BYTES

__all__ = ["ANY_SHARE", "EXACT_SHARE", "WHOLE_SHARE", "BlockTargets", "Part", "block_runs", "by_chunk", "runs_of"]

# The part of a chunk from which on all of it is fetched. Reading less than a quarter is no reason to. Whoever knows that nothing else
# is wanted of it gets what it asks for, but for this much, and the block that its range shares with others. Whoever knows that
# the rest is about to be wanted has all of it come at once.
WHOLE_SHARE = 0.25
EXACT_SHARE = 1 / 1.1
ANY_SHARE = 0.0

Part: TypeAlias = tuple[int, memoryview]
"""The offset in a chunk, or in a file, of bytes that are wanted, and the writable memory that they are to fill."""


def by_chunk(parts: Iterable[Part], starts: Sequence[int]) -> dict[int, list[Part]]:
    """Cut parts of a file where its chunks end.

    Args:
        parts: In any order; all in the file. Those without length are left out.
        starts: The offset of each chunk, and the file's length.

    Returns:
        By the number of a chunk, what is wanted of it, by its offset in the chunk.
    """
    found: dict[int, list[Part]] = {}
    for offset, out in parts:
        at, end = offset, offset + len(out)
        index = bisect.bisect_right(starts, at) - 1
        if at < end <= starts[index + 1]:  # nearly all of many small ones
            found.setdefault(index, []).append((at - starts[index], out))
            continue
        while at < end:
            stop = min(end, starts[index + 1])
            found.setdefault(index, []).append((at - starts[index], out[at - offset : stop - offset]))
            at = stop
            index += 1
    return found


def block_runs(parts: Iterable[Part]) -> list[range]:
    """The blocks that parts of a chunk lie in, each once, in order: those side by side are one range."""
    return runs_of(sorted({index for part in parts for index in _blocks(part)}))


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Numbers in ascending order as ranges."""
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
    """Where each needed block goes: into a caller's buffer where one wants all of it, else beside them.

    Args:
        raw_length: Bytes of the chunk.
        parts: The wanted parts of it, in any order; may overlap. Borrowed until `finish`.
        lend: Gives memory that is good until `finish`, by its length in bytes.

    Attributes:
        blocks: The needed ones, in order.
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
        """Where block ``index`` goes, exactly its length."""
        return self._views[index]

    def finish(self) -> None:
        """Copy to those who want a part of a block, or the same as another one."""
        for index, takers in self._takers.items():
            begin, block = index * BLOCK_BYTES, self._views[index]
            end = begin + len(block)
            for start, out in takers:
                low, high = max(begin, start), min(end, start + len(out))
                out[low - start : high - start] = block[low - begin : high - begin]
