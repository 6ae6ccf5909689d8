"""Compare a local file with a file in a store chunk by chunk, and clone chunks from the nvme tier."""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
from dataclasses import dataclass

from tierfs import digest
from tierfs.digest import BLOCK_BYTES
from tierfs.format.manifest import Row
from tierfs.host.pending.record import local_name
from tierfs.store import Entry, Store
from tierfs.store.read.reader import expand_rows

# From linux/fs.h.
FICLONE = 0x40049409
FICLONERANGE = 0x4020940D
_CLONE_RANGE = struct.Struct("=qQQQ")
CLONE_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a file in a store.

    Attributes:
        start: Offset in the file, in bytes.
        length: Length in bytes.
        row: Names the chunk; None if its digest is unknown.
        inline: All bytes of a file that lies in its manifest.
    """

    start: int
    length: int
    row: Row | None = None
    inline: bytes | None = None


def pieces_of(store: Store, entry: Entry) -> list[Piece]:
    """List the chunks of a file in order. Raises as `expand_rows` does."""
    manifest = entry.manifest
    if manifest is None:
        return [Piece(0, entry.length)] if entry.length else []
    if manifest.inline is not None:
        return [Piece(0, entry.length, inline=manifest.inline)] if entry.length else []
    rows = expand_rows(store, manifest, entry.path)
    starts = itertools.accumulate((row.raw_length for row in rows), initial=0)
    return [Piece(start, row.raw_length, row) for start, row in zip(starts, rows, strict=False)]


def holds(store: Store, fd: int, piece: Piece) -> bool:
    """Check whether a local file has a chunk's bytes at the chunk's offset."""
    if piece.inline is not None:
        return os.pread(fd, piece.length + 1, 0)[: piece.length] == piece.inline
    if piece.row is None:
        return False
    kind, end = store.descriptor.digest_kind, piece.start + piece.length
    digests = []
    for offset in range(piece.start, end, BLOCK_BYTES):
        block = os.pread(fd, min(BLOCK_BYTES, end - offset), offset)
        if len(block) < min(BLOCK_BYTES, end - offset):
            return False
        digests.append(digest.hash_bytes(kind, block))
    return digest.combine(kind, piece.length, digests) == piece.row.name.digest


def clone_piece(store: Store, piece: Piece, fd: int) -> bool:
    """Clone a chunk from the nvme tier into a local file, on a filesystem that supports it (XFS, Btrfs).

    Returns:
        Whether the file now has the chunk, verified. If not, the chunk's range in the file is undefined.
    """
    if piece.row is None or store.tiers is None or not store.tiers.has_nvme:
        return False
    if piece.start % CLONE_ALIGNMENT:
        return False
    found = store.tiers.nvme.place_of(local_name(store.descriptor.digest_kind, piece.row.name.digest))
    if found is None or found.length != piece.length:
        return False
    whole = piece.length - piece.length % CLONE_ALIGNMENT
    with open(found.path, "rb") as arena:
        request = _CLONE_RANGE.pack(arena.fileno(), found.offset, whole, piece.start)
        try:
            if whole:
                fcntl.ioctl(fd, FICLONERANGE, request)
            rest = os.pread(arena.fileno(), piece.length - whole, found.offset + whole)
        except OSError:
            return False  # different filesystems, or a filesystem that cannot clone
    os.pwrite(fd, rest, piece.start + whole)
    # The nvme tier may have reused the extent for another chunk in the meantime.
    return holds(store, fd, piece)


def clone_file(source: str, fd: int) -> bool:
    """Clone all bytes of a file into an open file. Return whether that succeeded: some filesystems cannot clone."""
    with open(source, "rb") as file:
        try:
            fcntl.ioctl(fd, FICLONE, file.fileno())
        except OSError:
            return False
    return True
