"""The host's ram budget, and how much of it the files in the host's folders of segments take.

The file of a segment exists with its full size before it has memory, whatever process and store it belongs to. So the
taken budget is the sum of the sizes, less the memory that was released. A process that sums and creates a file under
the host's lock cannot exceed the budget. Segments of files that do not fit into the budget lie in a folder on the disk
of the state directory, which is bounded by that disk alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tierfs.errors import TierfsError
from tierfs.host.filesystems import entries_of, make_private
from tierfs.host.host import Host
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import SECTOR_BYTES, FileName, OldSegmentError

LOCK = "ram"
"""Name of the host's lock on the folders."""

ASKED_FILE = "ram.asked"
"""File in the state directory that was modified when a process last waited for room."""

# Segments leave the smaller of these free on the disk of the state directory: a sixteenth, or 1 GiB.
DISK_SPARED = 16
DISK_SPARED_BYTES_MAX = 1 << 30

# A process that waits asks for room several times a second, and the others look each second.
ASKED_S = 2.0

TRANSIT_BYTES = 128 << 20
"""The ram budget while the ram tier is off: chunks only pass through shared memory."""
_logger = logging.getLogger("tierfs.local")


class SegmentFile(NamedTuple):
    """A file of a segment.

    Attributes:
        name: Its parsed name.
        path: Its path.
        size: Bytes that it occupies, table included.
        missing: Bytes that have no memory yet; 0 unless the memory is being reserved.
    """

    name: FileName
    path: Path
    size: int
    missing: int


class RamBudget:
    """The host's folders of segments. Thread-safe.

    Attributes:
        directory: The first folder; in shared memory if possible.
        folders: The folders that count against the budget, in the order in which they are tried.
        overflow: The folder for files that do not fit into the budget.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._asked = host.directory / ASKED_FILE
        self._own_ns = 0  # when this object last asked for room
        self.folders = host.folders
        self.overflow = host.overflow
        self.directory = self.folders[0]
        make_private(self.directory)

    def files(self) -> list[SegmentFile]:
        """Return the files that count against the budget, sorted by name."""
        return self._sized(self._entries(self.folders))

    def overflow_files(self) -> list[SegmentFile]:
        """Return the files of segments that do not fit into the budget, sorted by name."""
        return self._sized(self._entries([self.overflow]))

    def _sized(self, entries: Iterable[tuple[FileName, os.DirEntry[str]]]) -> list[SegmentFile]:
        found = []
        for name, entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                holes = max(status.st_size - status.st_blocks * SECTOR_BYTES, 0)
                size = status.st_size - (holes if name.suffix == "slab" else 0)
                found.append(SegmentFile(name, Path(entry.path), size, holes if name.suffix == "slab.new" else 0))
        return found

    def paths(self) -> list[tuple[FileName, Path]]:
        """Return the names and paths of all files, sorted by name."""
        return [(name, Path(entry.path)) for name, entry in self._entries([*self.folders, self.overflow])]

    def stamps(self) -> list[int]:
        """Return when each folder last changed, in nanoseconds; 0 for a missing folder."""
        return [_changed_ns(folder) for folder in (*self.folders, self.overflow)]

    def free_bytes(self, folder: Path, files: Iterable[SegmentFile]) -> int:
        """Return the bytes that a folder's filesystem has left for segments, less the memory that is being reserved."""
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize - sum(file.missing for file in files if file.path.parent == folder)
        if folder not in {self._host.fallback, self.overflow}:
            return free
        # The state directory's disk has other uses, such as the index of the nvme tier.
        return free - min(status.f_blocks * status.f_frsize // DISK_SPARED, DISK_SPARED_BYTES_MAX)

    def orphans(self) -> list[Segment]:
        """Return the segments, of any store, whose owner is dead and that hold no dirty data.

        Release the other memory of dead owners: shed their other segments, remove their unfinished files, and the
        segments of earlier boots, whose content is lost even if their file is on a disk. Call it under the host's lock.
        """
        found = []
        for file in [*self.files(), *self.overflow_files()]:
            is_alive = self._host.is_alive(file.name.owner)
            if file.name.suffix == "slab.new":
                if not is_alive:
                    file.path.unlink(missing_ok=True)
                continue
            try:
                segment = Segment.attach(file.path)
            except OldSegmentError:
                if not is_alive:
                    file.path.unlink(missing_ok=True)
                continue
            except (TierfsError, OSError, MemoryError) as error:
                # An unreadable segment may be a dirty one of another version: it stays, and counts against the budget.
                _logger.debug("%s cannot be opened, and is left as it is: %s", file.path, error)
                continue
            # A process that lives may have released it, or taken it over.
            if self._host.is_alive(segment.owner):
                segment.close()
            elif segment.is_dirty():
                segment.shed()
                segment.close()
            else:
                found.append(segment)
        return found

    def claim(self, store: str, least_bytes: int) -> Path | None:
        """Let this process take over a segment of a store whose owner is dead, and return its path.

        Only a segment with all its memory, with room for so many bytes in one piece, and without dirty data is taken
        over. Call it under the host's lock.
        """
        for file in self.files():
            if file.name.suffix != "slab" or file.name.store != store[:8] or self._host.is_alive(file.name.owner):
                continue
            try:
                segment = Segment.attach(file.path)
                is_free = segment.store == store and not self._host.is_alive(segment.owner) and not segment.is_dirty()
                if is_free and segment.data_bytes >= least_bytes and file.size >= segment.size:
                    segment.claim(self._host.owner())
                    return file.path
                segment.close()
            except (TierfsError, OSError, MemoryError) as error:
                _logger.debug("%s is not taken over: %s", file.path, error)
        return None

    def ask_for_room(self) -> None:
        """Ask the other processes of the host to give memory back. A process that waits for room repeats this."""
        with contextlib.suppress(OSError):  # its disk became read-only: the process waits for the flusher alone
            self._asked.touch(mode=0o600)
            self._own_ns = os.stat(self._asked).st_mtime_ns

    def is_room_asked_for(self) -> bool:
        """Return whether a user of another `RamBudget` waits for room, or did within the last two seconds."""
        try:
            status = os.stat(self._asked)
        except FileNotFoundError:
            return False
        return status.st_mtime_ns != self._own_ns and time.time() - status.st_mtime < ASKED_S

    @staticmethod
    def _entries(folders: Iterable[Path]) -> list[tuple[FileName, os.DirEntry[str]]]:
        entries = [entry for folder in folders for entry in entries_of(folder)]
        named = [(FileName.parse(entry.name), entry) for entry in entries]
        return sorted(((name, entry) for name, entry in named if name is not None), key=lambda found: found[1].name)


def _changed_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
