"""Which blocks of a chunk a range needs, and where each of them is decoded to."""

from __future__ import annotations

from tierfs.digest import BLOCK_BYTES

__all__ = ["BlockTargets"]


class BlockTargets:
    """Where each wanted block goes: into the caller's buffer if it is wanted whole, else beside it.

    Args:
        raw_length: Bytes of the chunk.
        start: First byte wanted, counted in the chunk.
        out: Where to; its length says how many. Borrowed until `finish`.
    """

    def __init__(self, raw_length: int, start: int, out: memoryview) -> None:
        self._raw_length = raw_length
        self._start = start
        self._out = out
        self._beside: dict[int, memoryview] = {}
        self.blocks = range(start // BLOCK_BYTES, (start + len(out) - 1) // BLOCK_BYTES + 1)

    def view(self, index: int) -> memoryview:
        """Where block ``index`` goes, exactly its length."""
        begin = index * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self._raw_length)
        if begin >= self._start and end <= self._start + len(self._out):
            return self._out[begin - self._start : end - self._start]
        if index not in self._beside:
            self._beside[index] = memoryview(bytearray(end - begin))
        return self._beside[index]

    def finish(self) -> None:
        """Copy the wanted parts of blocks that were not wanted whole."""
        for index, block in self._beside.items():
            begin = index * BLOCK_BYTES
            low, high = max(begin, self._start), min(begin + len(block), self._start + len(self._out))
            self._out[low - self._start : high - self._start] = block[low - begin : high - begin]
