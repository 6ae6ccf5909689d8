"""Read one version of a file through the tiers, with read-ahead for sequential readers.

Reads are answered from pieces of memory that are filled and verified as a whole. A piece has 1 MiB, one block, for
random reads, and 4 MiB for sequential reads. Pieces reuse memory, because the first touch of new memory is slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tierfs.buffers import Buffers
from tierfs.digest import BLOCK_BYTES
from tierfs.store import Reader

PIECE_BYTES = 4 * BLOCK_BYTES
# Pieces around the position of a sequential reader. Its requests arrive slightly out of order.
AHEAD_PIECES = 2
PIECES_MAX = 6
FILLERS = 4
# Pieces up to this size do not take a pooled buffer.
SMALL_BYTES = 256 * 1024
piece_buffers = Buffers(PIECE_BYTES, kept=16)
_fillers = ThreadPoolExecutor(FILLERS, thread_name_prefix="tierfs-ahead")


class Views(list[memoryview]):
    """The parts of an answer, in order. Their memory is pinned until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Callable[[], None]] = []

    def hold(self, view: memoryview, release: Callable[[], None]) -> None:
        """Add a part. ``release`` is called when its memory may be reused."""
        self.append(view)
        self._held.append(release)

    def release(self) -> None:
        """Release the memory of all parts. Call it once the answer is sent."""
        for release in self._held:
            release()
        self._held.clear()
        self.clear()


class _ReadPiece:
    """A range of the file in memory. It is pinned while a thread fills it or sends from it."""

    __slots__ = ("_buffer", "_is_dropped", "_lock", "_pins", "begun", "error", "filled", "length", "start", "view")

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self._buffer = piece_buffers.take() if length > SMALL_BYTES else None
        memory = memoryview(bytearray(length)) if self._buffer is None else self._buffer
        self.view = memory[:length]
        self.filled = threading.Event()
        self.begun = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._pins = 0
        self._is_dropped = False

    def fill(self, reader: Reader) -> None:
        """Read the bytes, unless a thread has begun to, or the piece was dropped and is not pinned."""
        with self._lock:
            if self.begun or (self._is_dropped and not self._pins):
                return
            self.begun = True
            self._pins += 1
        try:
            reader.read_into(self.start, self.view)
        except BaseException as error:  # noqa: BLE001 - raised for each reader of the piece
            self.error = error
        finally:
            self.filled.set()
            self.unpin()

    def pin(self) -> None:
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        with self._lock:
            self._pins -= 1
        self._give_back()

    def drop(self) -> None:
        with self._lock:
            self._is_dropped = True
        self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            if self._pins or not self._is_dropped or self._buffer is None:
                return
            buffer, self._buffer = self._buffer, None
        self.view = memoryview(b"")
        piece_buffers.give(buffer)


class ReadAhead:
    """Serves the reads of one open handle from one version. Thread-safe."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._pieces: list[_ReadPiece] = []  # least recently used first
        self._lock = threading.Lock()
        self._next = 0  # where a sequential reader is expected to continue

    def read(self, offset: int, size: int) -> Views:
        """Return up to ``size`` bytes from ``offset``, fewer at the end of the file.

        The caller releases the views. Raises the errors of `Reader.read_into`.
        """
        views = Views()
        end = min(offset + size, self.reader.length)
        try:
            while offset < end:
                piece = self._piece(offset)
                try:
                    piece.fill(self.reader)
                    piece.filled.wait()
                    if piece.error is not None:
                        self._forget(piece)
                        raise piece.error
                except BaseException:
                    piece.unpin()
                    raise
                start = offset - piece.start
                part = piece.view[start : start + end - offset]
                views.hold(part, piece.unpin)
                offset += len(part)
        except BaseException:
            views.release()
            raise
        return views

    def close(self) -> None:
        """Drop all pieces. Their memory is released once they are no longer pinned."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.drop()

    def _piece(self, offset: int) -> _ReadPiece:
        """Return the piece that holds ``offset``, pinned. For a sequential reader, start to fill the next pieces."""
        dropped: list[_ReadPiece] = []
        ahead: list[_ReadPiece] = []
        with self._lock:
            is_sequential = self._next - PIECE_BYTES <= offset <= self._next + PIECE_BYTES
            piece = self._find(offset)
            if piece is None:
                piece = self._add(offset, PIECE_BYTES if is_sequential else BLOCK_BYTES)
            else:
                self._pieces.remove(piece)
                self._pieces.append(piece)
            piece.pin()
            if is_sequential and offset:
                at = piece.start + piece.length
                for _ in range(AHEAD_PIECES):
                    if at >= self.reader.length:
                        break
                    found = self._find(at)
                    if found is None:
                        found = self._add(at, PIECE_BYTES)
                        ahead.append(found)
                    at = found.start + found.length
            self._next = max(self._next, offset) if is_sequential else offset
            while len(self._pieces) > PIECES_MAX:
                dropped.append(self._pieces.pop(0))
        for old in dropped:
            old.drop()
        for new in ahead:
            _fillers.submit(new.fill, self.reader)
        return piece

    def _find(self, offset: int) -> _ReadPiece | None:
        return next((piece for piece in self._pieces if piece.start <= offset < piece.start + piece.length), None)

    def _add(self, offset: int, length: int) -> _ReadPiece:
        start = offset // length * length
        # Begin behind a piece that has these bytes already.
        for piece in self._pieces:
            if piece.start <= start < piece.start + piece.length:
                start = piece.start + piece.length
        piece = _ReadPiece(start, min(start // length * length + length, self.reader.length) - start)
        self._pieces.append(piece)
        return piece

    def _forget(self, piece: _ReadPiece) -> None:
        with self._lock:
            if piece not in self._pieces:
                return
            self._pieces.remove(piece)
        piece.drop()
