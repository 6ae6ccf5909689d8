"""What the host's processes have of the ram budget, as the files in its folders of segments say.

Every segment, of whatever process and store, is there with its size from before it has memory: so the sum of the sizes, less
what was given back of them, is what is taken, and who looks and makes a file under the host's lock cannot take more than
there is. A process that waits for room says so with a file ``<id>.want``, so that those who have more than their share give
some back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tierfs.errors import TierfsError
from tierfs.host.host import Host
from tierfs.host.private import NO_ROOM, entries_of, make_private
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import SECTOR_BYTES, FileName, OldSegmentError

__all__ = ["LOCK", "SegmentFile", "Shares"]

LOCK = "ram"
"""What the host's lock on the folders goes by."""

# Of the disk that the state directory is on, segments leave the smaller of these free: one part in so many, and so many bytes.
DISK_SPARED = 16
DISK_SPARED_BYTES_MAX = 1 << 30

_WANT = re.compile(r"([0-9a-f]{16})\.want")
_logger = logging.getLogger("tierfs.local")


class SegmentFile(NamedTuple):
    """A file that counts against the budget.

    Attributes:
        name: What its name says.
        path: Where it is.
        size: Bytes that are taken, table included, or will be.
        missing: How many of them have no memory yet.
    """

    name: FileName
    path: Path
    size: int
    missing: int


class Shares:
    """The host's folders of segments. Safe for use by many threads.

    Args:
        host: Whose.

    Attributes:
        directory: The first of them, in shared memory where there is one.
        folders: All, in the order in which they are tried.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.folders = host.folders
        self.directory = self.folders[0]
        make_private(self.directory)
        self._lock = threading.Lock()
        self._wanting = 0

    def __repr__(self) -> str:
        return f"Shares({str(self.directory)!r})"

    def files(self) -> list[SegmentFile]:
        """All that count, in the order of their names."""
        found = []
        for name, entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                holes = max(status.st_size - status.st_blocks * SECTOR_BYTES, 0)
                size = status.st_size - (holes if name.suffix == "slab" else 0)
                found.append(SegmentFile(name, Path(entry.path), size, holes if name.suffix == "slab.new" else 0))
        return found

    def paths(self) -> list[tuple[FileName, Path]]:
        """The names of all that count, and where they are."""
        return [(name, Path(entry.path)) for name, entry in self._entries()]

    def stamps(self) -> list[int]:
        """When each folder was changed last, in nanoseconds; 0 of one that is not there."""
        return [_changed_ns(folder) for folder in self.folders]

    def free_bytes(self, folder: Path, files: Iterable[SegmentFile]) -> int:
        """What the filesystem of one of the folders has for segments, less what was promised to others."""
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize - sum(file.missing for file in files if file.path.parent == folder)
        if folder != self._host.fallback:
            return free
        # The disk of the state directory has other uses, the nvme tier's index for one.
        return free - min(status.f_blocks * status.f_frsize // DISK_SPARED, DISK_SPARED_BYTES_MAX)

    def sweep(self) -> None:
        """Remove what the dead left that nobody can use. Under the host's lock."""
        for file in self.files():
            if file.name.suffix == "slab.new" and not self._host.is_alive(file.name.owner):
                file.path.unlink(missing_ok=True)
        for entry in entries_of(self.directory):
            match = _WANT.fullmatch(entry.name)
            if match and not self._host.is_alive(match[1]):
                os.unlink(entry.path)

    def orphans(self) -> list[Segment]:
        """The segments, of any store, whose owner is dead and in which nothing is dirty. Under the host's lock.

        Of those in which something is, the rest is given back. Those that an earlier run of the kernel left are removed: memory
        does not outlive that, though a file may.
        """
        found = []
        for file in self.files():
            if file.name.suffix != "slab":
                continue
            try:
                segment = Segment.attach(file.path)
            except OldSegmentError:
                if not self._host.is_alive(file.name.owner):
                    file.path.unlink(missing_ok=True)
                continue
            except (TierfsError, OSError, MemoryError) as error:
                # What cannot be read may be another version's, and dirty: it stays, and is in the way.
                _logger.debug("%s is left alone: %s", file.path, error)
                continue
            if self._host.is_alive(segment.owner):
                segment.close()
            elif segment.is_dirty():
                segment.shed()
                segment.close()
            else:
                found.append(segment)
        return found

    def others_wanting(self) -> dict[str, int]:
        """The live processes, without this one, that wait for room; with the budget that each has for all, in bytes."""
        found = {}
        for entry in entries_of(self.directory):
            match = _WANT.fullmatch(entry.name)
            if match and self._is_other(match[1]):
                with contextlib.suppress(FileNotFoundError):  # it has its room
                    found[match[1]] = entry.stat().st_size or sys.maxsize  # or has not said it yet
        return found

    def others_having(self) -> set[str]:
        """The live processes, without this one, that made segments."""
        return {file.name.owner for file in self.files() if self._is_other(file.name.owner)}

    @contextlib.contextmanager
    def wanting(self, budget_bytes: int) -> Iterator[None]:
        """Tell the other processes that this one waits for room, where all of them together may take so much."""
        path = self.directory / f"{self._host.owner()}.want"
        with self._lock:
            self._wanting += 1
            try:
                path.touch(mode=0o600)
                os.truncate(path, budget_bytes)  # its length says it: a byte in it would need room
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                # What is waited for comes from what is flushed, too.
                _logger.warning("the other processes cannot be told that this one waits for room: %s", error)
        try:
            yield
        finally:
            with self._lock:
                self._wanting -= 1
                if not self._wanting:
                    path.unlink(missing_ok=True)

    def _entries(self) -> list[tuple[FileName, os.DirEntry[str]]]:
        entries = [entry for folder in self.folders for entry in entries_of(folder)]
        named = [(FileName.parse(entry.name), entry) for entry in entries]
        return sorted(((name, entry) for name, entry in named if name is not None), key=lambda found: found[1].name)

    def _is_other(self, owner: str) -> bool:
        return owner != self._host.owner() and self._host.is_alive(owner)


def _changed_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
