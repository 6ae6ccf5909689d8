"""The journal of a process: small files that are on the disk before the flusher has taken them to the nvme tier.

One file in the store's directory for each process that saves at level ``local``, written by that process alone, in a ring. An entry is a
draft with its chunks. It is durable before its draft is sealed, so a sealed draft that names its entry has reached ``local``. Whoever
has the draft in a lower tier clears the entry's first bytes, and then the process may use its room again. So an entry that is whole
belongs to a file that is not in the nvme tier yet. It counts only once its slab is gone: see `tierfs.flusher.journals`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierfs import digest
from tierfs._fork import renew_in_children
from tierfs.errors import TierfsError
from tierfs.host.filesystems import flush_directory
from tierfs.host.pending.record import Draft, SlotRef
from tierfs.host.private import entries_of

__all__ = ["FILE_BYTES_MAX", "Journal", "JournalChunk", "JournalEntry", "clear_entry", "journals_in", "read_entries"]

# A larger file is written to the disk once, by the flusher: writing it twice would take longer than the wait.
FILE_BYTES_MAX = 1 << 20
JOURNAL_BYTES = 32 << 20
_SUFFIX = ".journal"
_MAGIC = b"TFSJRNL1"
_CLEARED = bytes(len(_MAGIC))
# Magic, write id, the draft's slot (segment, index, serial), bytes of the draft, number of chunks, bytes of all behind the head.
_HEAD = struct.Struct("<8s16s16sIQIIQ")
_CHUNK = struct.Struct("<II")
_CHECKSUM_BYTES = 16
_ALIGN = 4096
_logger = logging.getLogger("tierfs.local")


class JournalChunk(NamedTuple):
    """A chunk of a file in a journal: its metadata in the local tiers, and its bytes."""

    meta: bytes
    data: memoryview


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A file in a journal.

    Attributes:
        path: The journal's.
        offset: Of the entry, in bytes.
        slot: Where the draft was sealed, or was about to be.
        draft: The draft.
        data: Its bytes.
        chunks: One for each of the draft's names.
    """

    path: Path
    offset: int
    slot: SlotRef
    draft: Draft
    data: bytes
    chunks: tuple[JournalChunk, ...]


@dataclass(slots=True)
class Room:
    """A part of the ring that an entry has, or had until it was cleared."""

    offset: int
    end: int
    is_written: bool = False


class Journal:
    """This process's journal. Safe for use by many threads.

    Args:
        directory: The store's on this host.
        owner: Gives the id of this process.
    """

    def __init__(self, directory: Path, owner: Callable[[], str]) -> None:
        self._directory = directory
        self._owner: Callable[[], str] | None = owner  # None once it is closed
        self._lock = threading.Lock()
        self._start()
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"Journal({str(self._directory)!r}, {len(self._rooms)} entries, usable={self._fd >= 0})"

    def _start(self) -> None:
        self._fd = -1
        self._closing: weakref.finalize[..., Journal] | None = None
        self._flushing = threading.Lock()
        self._written = self._flushed = 0  # entries
        self._is_failed = False
        self._path: Path | None = None
        self._rooms: deque[Room] = deque()
        self._next = 0
        self._is_begun = False

    def reserve(self, length: int, chunks: Sequence[JournalChunk] = ()) -> Room | None:
        """Room for a draft of so many bytes and its chunks; ``None`` where there is none now. The first call makes the file."""
        size = _HEAD.size + _CHECKSUM_BYTES + length
        size += sum(_CHUNK.size + len(chunk.meta) + len(chunk.data) for chunk in chunks)
        size += -size % _ALIGN
        with self._lock:
            if not self._is_begun and self._owner is not None:
                self._is_begun = True
                self._make(self._owner)
            if self._fd < 0 or self._is_failed:
                return None
            while self._rooms and self._is_cleared(self._rooms[0]):
                self._rooms.popleft()
            begin, first = (self._next, self._rooms[0].offset) if self._rooms else (0, JOURNAL_BYTES)
            if self._rooms and begin > first and begin + size > JOURNAL_BYTES:
                begin = 0
            if begin + size > (first if begin <= first else JOURNAL_BYTES):
                return None
            room = Room(begin, begin + size)
            self._rooms.append(room)
            self._next = room.end
            return room

    def _make(self, owner: Callable[[], str]) -> None:
        """Make the file. The lock is held."""
        try:
            path = self._directory / f"{owner()}{_SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, JOURNAL_BYTES)
                os.fsync(fd)
                flush_directory(self._directory)
            except BaseException:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
        except (OSError, TierfsError) as error:
            _logger.warning(
                "small files wait for the flusher to be on the disk, since no journal can be made: %s", error
            )
            return
        self._fd, self._path = fd, path
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False  # at exit a thread may still write there, and the number be another file's

    def name_of(self, room: Room) -> tuple[str, int]:
        """How a draft names its entry: the journal's process, and the offset."""
        assert self._path is not None
        return self._path.stem, room.offset

    def write(self, room: Room, slot: SlotRef, draft: Draft, data: bytes, chunks: Sequence[JournalChunk]) -> None:
        """Write an entry, and flush it; of several threads' entries, those that are written by then together.

        Raises:
            OSError: It failed: the room is given back, unless that fails as well, and nothing more is journaled. The kernel reports
                an error once, and not to whoever wrote what the disk did not keep.
        """
        pieces: list[bytes | memoryview] = [data]
        for chunk in chunks:
            pieces += [_CHUNK.pack(len(chunk.meta), len(chunk.data)), chunk.meta, chunk.data]
        where = (bytes.fromhex(slot.segment), slot.index, slot.serial)
        head = _HEAD.pack(_MAGIC, draft.write_id, *where, len(data), len(chunks), sum(map(len, pieces)))
        checksum = digest.checksum(_salt(*self.name_of(room)), head, *pieces)
        whole = [head, checksum, *pieces]
        try:
            written = os.pwritev(self._fd, whole, room.offset)
            if written != sum(map(len, whole)):
                raise OSError(errno.EIO, "an entry was written in part")
            self._flush()
            room.is_written = True
        except BaseException as error:
            self._is_failed |= isinstance(error, OSError)
            self.give_back(room)
            raise

    def _flush(self) -> None:
        """Have what this thread wrote on the disk."""
        with self._lock:
            self._written += 1
            number = self._written
        with self._flushing:
            if self._is_failed:
                raise OSError(errno.EIO, "an earlier flush failed")
            if self._flushed < number:
                covered = self._written
                try:
                    os.fdatasync(self._fd)
                except OSError:
                    self._is_failed = True
                    raise
                self._flushed = covered

    def give_back(self, room: Room) -> None:
        """Clear an entry whose draft is not sealed after all."""
        assert self._path is not None
        with contextlib.suppress(OSError):  # then its room is never used again
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)  # another thread may have closed the journal meanwhile
            try:
                os.pwrite(fd, _CLEARED, room.offset)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            room.is_written = True

    def close(self) -> None:
        """Write nothing more. The file goes if nobody needs it any more, else with the last of its entries."""
        with self._lock:
            self._owner = None
            fd, self._fd = self._fd, -1
            if fd < 0 or self._path is None:
                return
            if all(room.is_written and os.pread(fd, len(_CLEARED), room.offset) == _CLEARED for room in self._rooms):
                self._path.unlink(missing_ok=True)
            if self._closing is not None:
                self._closing()

    def _is_cleared(self, room: Room) -> bool:
        return room.is_written and os.pread(self._fd, len(_CLEARED), room.offset) == _CLEARED

    def _renew(self) -> None:
        """In a forked child: the file is its parent's."""
        if self._closing is not None:
            self._closing()
        self._lock = threading.Lock()
        self._start()


def _salt(owner: str, offset: int) -> bytes:
    return f"{owner} {offset}".encode()


def journals_in(directory: Path) -> list[tuple[str, Path]]:
    """The journals of a store's directory, each with the id of its process."""
    names = [entry.name for entry in entries_of(directory) if entry.name.endswith(_SUFFIX)]
    return [(name.removesuffix(_SUFFIX), directory / name) for name in sorted(names)]


def read_entries(path: Path) -> Iterator[JournalEntry]:
    """The whole entries of a journal, none of which was cleared. Who writes there meanwhile may add some that are not seen.

    Raises:
        OSError: It cannot be read.
    """
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:  # a flusher was faster
        return
    at = 0
    while at + _HEAD.size <= len(content):
        entry, end = _decode(path, content, at)
        if entry is not None:
            yield entry
        at = end + -end % _ALIGN


def _decode(path: Path, content: memoryview, at: int) -> tuple[JournalEntry | None, int]:
    """The entry at an offset, if one is whole there, and where to look next."""
    head = content[at : at + _HEAD.size]
    magic, write_id, segment, index, serial, draft_bytes, count, length = _HEAD.unpack(head)
    begin = at + _HEAD.size + _CHECKSUM_BYTES
    if magic != _MAGIC or begin + length > len(content) or draft_bytes > length:
        return None, at + _ALIGN
    body = content[begin : begin + length]
    if digest.checksum(_salt(path.stem, at), head, body) != content[begin - _CHECKSUM_BYTES : begin]:
        return None, at + _ALIGN
    data = bytes(body[:draft_bytes])
    try:
        draft = Draft.decode(data, f"{path} at {at}")
    except TierfsError as error:
        _logger.error("an entry of a journal cannot be read: %s", error)  # noqa: TRY400 - says it all
        return None, begin + length
    chunks, place = [], draft_bytes
    for _ in range(count):
        meta_bytes, data_bytes = _CHUNK.unpack_from(body, place)
        place += _CHUNK.size
        chunks.append(JournalChunk(bytes(body[place : place + meta_bytes]), body[place + meta_bytes :][:data_bytes]))
        place += meta_bytes + data_bytes
    assert draft.write_id == write_id
    slot = SlotRef(segment.hex(), index, serial)
    return JournalEntry(path, at, slot, draft, data, tuple(chunks)), begin + length


def clear_entry(fd: int, offset: int, write_id: bytes) -> bool:
    """Clear the entry of a draft in an open journal. It is not flushed.

    Returns:
        Whether the entry was there: its process may use its room for another one once it was cleared.

    Raises:
        OSError: It failed.
    """
    head = os.pread(fd, _HEAD.size, offset)
    if len(head) < _HEAD.size or head[:8] != _MAGIC or head[8:24] != write_id:
        return False
    os.pwrite(fd, _CLEARED, offset)
    return True
