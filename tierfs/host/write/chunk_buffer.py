"""A chunk that is being written into a slab: filled without the GIL, then described by its digests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.format.envelope import STORE, Block, Envelope
from tierfs.host.events import Faults, no_faults
from tierfs.host.slab.segment import Slot


class ChunkBuffer:
    """A chunk in a slab that is being filled, with the slot's writable memory. Not thread-safe."""

    def __init__(self, slot: Slot, view: memoryview, kind: DigestKind, faults: Faults = no_faults) -> None:
        self.slot = slot
        self._fault = faults
        self.filled = 0
        self._target = np.frombuffer(view, dtype=np.uint8)
        self.view = view
        self._kind = kind
        self._digests: list[bytes] = []

    @property
    def room(self) -> int:
        """Bytes that still fit."""
        return len(self.view) - self.filled

    def append(self, data: memoryview) -> int:
        """Copy as much of ``data`` as fits, without the GIL, and return the bytes copied."""
        count = min(self.room, len(data))
        source = np.frombuffer(data[:count], dtype=np.uint8)
        self._fault("before chunk.copy")
        np.copyto(self._target[self.filled : self.filled + count], source)
        self._fault("after chunk.copy")
        self.filled += count
        return count

    def fill(self, data: memoryview, digests: Sequence[bytes] = ()) -> None:
        """Copy all the content of the chunk.

        Unless the digests are given, each block is hashed right after its copy, while it is in the processor's cache.

        Args:
            data: All bytes of the chunk.
            digests: Digests of its blocks. If they are wrong, the chunk is damaged, and a read detects that.
        """
        source = np.frombuffer(data, dtype=np.uint8)
        self._fault("before chunk.copy")
        if digests:
            np.copyto(self._target[: len(data)], source)
            self._digests = list(digests)
        else:
            for at in range(0, len(data), BLOCK_BYTES):
                block = source[at : at + BLOCK_BYTES]
                np.copyto(self._target[at : at + len(block)], block)
                self._digests.append(digest.hash_bytes(self._kind, self.view[at : at + len(block)]))
        self._fault("after chunk.copy")
        self.filled = len(data)

    def accept(self) -> None:
        """Accept bytes that the caller wrote into all of the slot's memory, and hash them."""
        self.filled = len(self.view)
        self._digests, _ = digest.digests_of(self._kind, self.view)

    def envelope(self) -> Envelope:
        """Return the envelope with the chunk's digests. Call it once the chunk is complete."""
        pieces = [self.view[at : min(at + BLOCK_BYTES, self.filled)] for at in range(0, self.filled, BLOCK_BYTES)]
        digests = self._digests or [digest.hash_bytes(self._kind, piece) for piece in pieces]
        blocks = tuple(Block(block, STORE, len(piece)) for block, piece in zip(digests, pieces, strict=True))
        return Envelope(self._kind, digest.combine(self._kind, self.filled, digests), self.filled, blocks)
