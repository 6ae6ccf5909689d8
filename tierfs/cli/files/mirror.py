"""A mirrored local directory: its entries, this host's notes about its files, and their chunks.

The notes hold each file's content name and its size, times and inode at that time. A file whose size, times and inode
are unchanged has the same content and is not read again. The notes are in the state directory. Without them, a run
compares the files' bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import xxhash

from tierfs import digest
from tierfs.checked_json import parse_object
from tierfs.cli.files.transfer import walk
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import FormatError
from tierfs.format.manifest import Row
from tierfs.host.filesystems import make_private
from tierfs.host.host import state_directory
from tierfs.store import Entry, Store
from tierfs.store.read.reader import expand_rows

PART_PREFIX = ".tierfs-part-"
"""Name prefix of an incomplete file. The next run finds and completes the file."""
_GONE_OR_IN_USE = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST})  # another process changed it meanwhile


@dataclass(slots=True)
class LocalTree:
    """The entries of a directory, by relative path."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)


def scan(root: str) -> LocalTree:
    """List a directory; an absent one is empty. Links are not followed: they are among ``others``."""
    tree = LocalTree()
    todo = [""]
    while todo:
        inside = todo.pop()
        try:
            entries = list(os.scandir(os.path.join(root, inside)))
        except FileNotFoundError:
            continue
        for entry in entries:
            relative = f"{inside}/{entry.name}" if inside else entry.name
            status = entry.stat(follow_symlinks=False)
            if entry.name.startswith(PART_PREFIX):
                tree.parts.add(relative)
            elif stat.S_ISDIR(status.st_mode):
                tree.directories.add(relative)
                todo.append(relative)
            elif stat.S_ISREG(status.st_mode):
                tree.files[relative] = status
            else:
                tree.others.add(relative)
    return tree


def scan_source(root: str) -> LocalTree:
    """List the files and directories to store. Links are followed. Raises as `walk` does."""
    tree = LocalTree()
    for relative, size in walk(root):
        if size is None:
            tree.directories.add(relative)
        elif not os.path.basename(relative).startswith(PART_PREFIX):
            tree.files[relative] = os.stat(os.path.join(root, relative))
    return tree


def remove_files(root: str, files: Iterable[str]) -> int:
    """Remove files, and return the number removed. A missing file is skipped.

    Raises:
        OSError: A file cannot be removed; the error names it.
    """
    count = 0
    for relative in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(root, relative))
            count += 1
    return count


def remove_directories(root: str, directories: Iterable[str]) -> list[OSError]:
    """Remove directories, but skip missing and non-empty ones. Return all other errors; each names its directory."""
    problems = []
    for relative in sorted(directories, key=len, reverse=True):
        try:
            os.rmdir(os.path.join(root, relative))
        except OSError as error:  # noqa: PERF203 - one failure must not stop the others
            if error.errno not in _GONE_OR_IN_USE:
                problems.append(error)
    return problems


@dataclass(slots=True)
class Synced:
    """The counts of a run.

    Attributes:
        files: Files written.
        unchanged: Files that were up to date.
        deleted: Files deleted.
        read_bytes: Bytes read: by ``sync`` from the files that it stored, by ``materialize`` through the tiers.
        kept_bytes: Bytes that ``materialize`` took from an older or incomplete copy of the file.
    """

    files: int = 0
    unchanged: int = 0
    deleted: int = 0
    read_bytes: int = 0
    kept_bytes: int = 0

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts. Thread-safe."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


def content_of(store: Store, entry: Entry) -> str:
    """Return a name for the content of a file in a store."""
    if entry.manifest is not None:
        return f"{entry.manifest.digest_kind.label}:{entry.manifest.digest.hex()}:{entry.length}"
    assert entry.foreign is not None
    return f"{store.descriptor.uuid}:{entry.path}:{entry.foreign.version}"


class MirrorRecord:
    """The notes about one local directory. Thread-safe.

    One process at a time works on a directory: the constructor waits until another process releases the lock.
    """

    def __init__(self, root: str) -> None:
        folder = state_directory(None) / "mirrors"
        make_private(folder.parent)
        make_private(folder)
        self._path = (
            folder / f"{xxhash.xxh3_128_hexdigest(os.path.realpath(root).encode(errors='surrogateescape'))}.json"
        )
        self._held = open(self._path.with_suffix(".lock"), "wb")  # noqa: SIM115 - held until `close`
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._lock = threading.Lock()
        self._known: dict[str, list[object]] = _read(self._path)

    def knows(self, relative: str, content: str, status: os.stat_result) -> bool:
        """Whether a file with this status is known to have this content."""
        return self._known.get(relative) == [content, *_look(status)]

    def note(self, relative: str, content: str, status: os.stat_result) -> None:
        """Note that a file with this status has this content."""
        with self._lock:
            self._known[relative] = [content, *_look(status)]

    def forget(self, relative: str) -> None:
        """Note that a file was removed."""
        with self._lock:
            self._known.pop(relative, None)

    def close(self) -> None:
        """Write the notes for the next run, and release the lock for the next process."""
        try:
            self._save()
        finally:
            self._held.close()

    def _save(self) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        with self._lock:
            text = json.dumps(self._known)
        try:
            temporary.write_text(text)
            os.replace(temporary, self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def _look(status: os.stat_result) -> list[object]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(path: Path) -> dict[str, list[object]]:
    try:
        return parse_object(path.read_bytes(), str(path))
    except (OSError, FormatError):
        return {}


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
