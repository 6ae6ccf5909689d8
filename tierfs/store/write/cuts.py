"""Cut a file into chunks while it is written, so that its unchanged parts make the same chunks again.

A file with a table of tensors (safetensors, ``torch.save``) is cut by that table. The bytes before the tensors have
their own chunks, so tensors do not move when these bytes grow. A large tensor begins a chunk and is cut every 16 MiB.
Small neighbours are packed. All other files are cut every 16 MiB, and so is the rest of a file that stops following its
table.
"""

from __future__ import annotations

import sys
from collections import deque

from tierfs.codec.layout.elements import Span, follow
from tierfs.codec.layout.steps import Item, Steps
from tierfs.digest import CHUNK_BYTES
from tierfs.store.encode.tensors import unknown_layout

LARGE_BYTES = 1 << 20
"""A tensor of this size or more has its own chunks."""
_PIECE_BYTES = 1 << 16


class Cutter:
    """Finds where chunks end in a stream of bytes. The result does not depend on how calls split the stream.

    It buffers only bytes of the file's table.

    Args:
        at_start: Whether the stream begins at the start of the file. If not, it is cut every 16 MiB.
    """

    def __init__(self, *, at_start: bool = True) -> None:
        self._at = 0
        # Spans of the chunk being filled, and of the chunks that ended in the last `ends`.
        self._layout: deque[Span] = deque()
        self._filled = 0  # bytes in the chunk being filled
        self._alone = True  # whether that chunk must not be shared: it holds a header or a large tensor
        self._left = 0  # bytes until the next decision
        self._kept: bytearray | None = None  # the bytes collected for the parser, if it wants them
        self._mark = b""  # end of the wanted bytes; empty if their number is fixed
        self._steps: Steps | None = follow() if at_start else None
        self._ask()

    def ends(self, view: memoryview) -> list[int]:
        """Take the next bytes. Return, in order, how many of them come before each end of a chunk."""
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
        """Return the elements from ``start`` to ``stop``, in order and without gaps.

        The range is a chunk that ended in the last call of `ends`, or the chunk being filled. Call this for one chunk
        after the other.
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
        """Collect wanted bytes and return their number. At the end mark, set ``_left`` to that number."""
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
        """Ask the parser for the next step. Return whether a chunk begins here."""
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
        if request is None:
            return True
        self._kept, self._mark, self._left = bytearray(), request.mark, request.length
        return False
