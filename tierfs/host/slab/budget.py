"""What the host's processes have of the ram budget, as the files in its folders of segments say.

Every segment, of whatever process and store, is there with its size from before it has memory: so the sum of the sizes, less
what was given back of them, is what is taken, and who looks and makes a file under the host's lock cannot take more than
there is. A process that waits for room marks the segments of those who have more than their share, so that they give these back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tierfs.errors import TierfsError
from tierfs.host.host import Host
from tierfs.host.private import entries_of, make_private
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import SECTOR_BYTES, FileName, OldSegmentError

__all__ = ["LOCK", "RamBudget", "SegmentFile"]

LOCK = "ram"
"""What the host's lock on the folders goes by."""

# Of the disk that the state directory is on, segments leave the smaller of these free: one part in so many, and so many bytes.
DISK_SPARED = 16
DISK_SPARED_BYTES_MAX = 1 << 30

# A process that took and sealed nothing for so long has no use for its share while others wait.
IDLE_S = 2.0
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


class RamBudget:
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

    def __repr__(self) -> str:
        return f"RamBudget({str(self.directory)!r})"

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

    def orphans(self) -> list[Segment]:
        """The segments, of any store, whose owner is dead and in which nothing is dirty. Under the host's lock.

        Of those in which something is, the rest is given back.
        """
        found = []
        for segment in self._segments():
            if self._host.is_alive(segment.owner):
                segment.close()
            elif segment.is_dirty():
                segment.shed()
                segment.close()
            else:
                found.append(segment)
        return found

    def claim(self, budget_bytes: int, now_s: float) -> None:
        """Have the other live processes give back what they have beyond their share of so many bytes. Under the host's lock.

        Their owners put nothing more into those segments, and remove them once nothing in them is needed. A process that
        took and sealed nothing for some seconds has no share.
        """
        others: dict[str, list[Segment]] = {}
        for segment in self._segments():
            if segment.owner != self._host.owner() and self._host.is_alive(segment.owner):
                others.setdefault(segment.owner, []).append(segment)
        for segments in others.values():
            is_idle = all(segment.is_idle(now_s - IDLE_S) for segment in segments)
            share = 0 if is_idle else budget_bytes // (len(others) + 1)
            # What can still be written into comes first.
            segments.sort(key=lambda segment: (segment.retired, segment.memory_bytes))
            for segment, bytes_ in zip(
                segments, itertools.accumulate(one.memory_bytes for one in segments), strict=True
            ):
                if bytes_ > share:
                    segment.claim()

    def _segments(self) -> Iterator[Segment]:
        """All that can be opened, of any store. Under the host's lock.

        Those that an earlier run of the kernel left are removed: memory does not outlive that, though a file may.
        """
        for file in self.files():
            if file.name.suffix != "slab":
                continue
            try:
                yield Segment.attach(file.path)
            except OldSegmentError:
                if not self._host.is_alive(file.name.owner):
                    file.path.unlink(missing_ok=True)
            except (TierfsError, OSError, MemoryError) as error:
                # What cannot be read may be another version's, and dirty: it stays, and is in the way.
                _logger.debug("%s is left alone: %s", file.path, error)

    def _entries(self) -> list[tuple[FileName, os.DirEntry[str]]]:
        entries = [entry for folder in self.folders for entry in entries_of(folder)]
        named = [(FileName.parse(entry.name), entry) for entry in entries]
        return sorted(((name, entry) for name, entry in named if name is not None), key=lambda found: found[1].name)


def _changed_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
