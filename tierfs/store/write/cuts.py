"""Where a file is cut into chunks while it is being written, so that what did not change in it makes the same chunks again.

A file that has a table of its own (safetensors, ``torch.save``) is cut by it: what comes before the tensors is in chunks
of its own, so that tensors do not move when it grows; a large tensor begins a chunk and is cut each 16 MiB; small
neighbours are packed. All else is cut each 16 MiB, and so is what comes after something that the table did not promise.
"""

from __future__ import annotations

import sys
from collections import deque

from tierfs.codec.layout.elements import Span, follow
from tierfs.codec.layout.steps import Item, ReadTo, Rest, Steps
from tierfs.digest import CHUNK_BYTES
from tierfs.store.encode.tensors import unknown_layout

__all__ = ["LARGE_BYTES", "Cutter"]

LARGE_BYTES = 1 << 20
"""A tensor from this size on has chunks of its own."""
_PIECE_BYTES = 1 << 16


class Cutter:
    """Says where chunks end in bytes that come one after the other. What it says does not depend on how they are parted.

    It holds no bytes but those of the file's table.

    Args:
        at_start: Whether the first bytes are the file's. If not, all is cut each 16 MiB.
    """

    def __init__(self, *, at_start: bool = True) -> None:
        self._at = 0
        self._layout: deque[Span] = (
            deque()
        )  # of the chunk that the next byte goes into, and of those that ended since `ends`
        self._filled = 0  # of the chunk that the next byte goes into
        self._alone = True  # whether what lies in it is to have no company: a header, a large tensor
        self._left = 0  # bytes that pass before there is something to decide
        self._kept: bytearray | None = None  # of them, where they are wanted
        self._mark = b""  # that they are wanted up to
        self._steps: Steps | None = follow() if at_start else None
        self._ask()

    def ends(self, view: memoryview) -> list[int]:
        """Take the next bytes. Returns how many of them lie before each end of a chunk, in order."""
        while self._layout and self._layout[0].stop <= self._at - self._filled:
            self._layout.popleft()
        ends: list[int] = []
        at = 0
        while at < len(view):
            count = min(self._left, CHUNK_BYTES - self._filled, len(view) - at)
            if self._kept is not None:
                count = self._keep(view[at : at + count])
            at += count
            self._at += count
            self._filled += count
            self._left -= count
            if self._filled == CHUNK_BYTES:
                self._filled = 0
                ends.append(at)
            while not self._left:
                if self._ask() and self._filled:
                    self._filled = 0
                    ends.append(at)
        return ends

    def layout(self, start: int, stop: int) -> list[Span]:
        """The elements of the chunk that ended with the bytes taken last, or has not ended: without gaps, in order.

        Whoever wants to know asks of one chunk after the other.
        """
        found: list[Span] = []
        at = start
        while self._layout and self._layout[0].start < stop:
            span = self._layout[0]
            found += unknown_layout(at, span.start)
            found.append(span)
            at = span.stop
            if at > stop:
                break
            self._layout.popleft()
        return found + unknown_layout(at, stop)

    def _keep(self, view: memoryview) -> int:
        """Keep bytes that are wanted; after those that were wanted, none is left. Returns how many were."""
        assert self._kept is not None
        if not self._mark:
            self._kept += view
            return len(view)
        before = len(self._kept)
        self._kept += view[:_PIECE_BYTES]
        end = self._kept.find(self._mark, max(0, before - len(self._mark) + 1))
        if end < 0:
            return len(self._kept) - before
        del self._kept[end + len(self._mark) :]
        self._left = len(self._kept) - before
        return self._left

    def _ask(self) -> bool:
        """Find out what comes next. Returns whether it begins a chunk."""
        kept, mark = self._kept, self._mark
        self._kept, self._mark, self._left = None, b"", sys.maxsize
        if self._steps is None or (kept is not None and not kept.endswith(mark)):
            return False
        try:
            request = self._steps.send(bytes(kept)) if kept is not None else next(self._steps)
        except StopIteration:
            return False
        if isinstance(request, Item):
            is_large = request.length >= LARGE_BYTES
            begins = is_large or self._alone or self._filled + request.length > CHUNK_BYTES
            self._left, self._alone = request.length, is_large
            if request.length:
                end = self._at + request.length
                self._layout.append(Span(self._at, end, request.element.width, request.name, request.element.kind))
            return begins
        if isinstance(request, Rest):
            return True
        self._kept, self._left = bytearray(), request.length
        self._mark = request.mark if isinstance(request, ReadTo) else b""
        return False
