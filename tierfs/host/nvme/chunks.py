"""The chunks of the nvme tier's writer: which files there are, which may be evicted, and how much room is left.

The directory is the index: it is listed once, when the tier is opened, and its names are kept in memory. A chunk that
nobody needs is *clean*. Clean chunks are evicted when room is short, the least recently used first. An evicted file
that has the size of the new one is renamed and overwritten, which is faster than a new file. All others are deleted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tierfs.buffers import PAGE_BYTES
from tierfs.clock import Clock
from tierfs.errors import CapacityError, ConflictError, StoreError
from tierfs.host.events import Faults
from tierfs.host.filesystems import disk_errors, entries_of, flush_directory
from tierfs.host.nvme.chunk_file import ChunkFiles, ChunkPage, file_bytes
from tierfs.host.slab.segment import Slot

FRESH_S = 60.0
"""Seconds for which a chunk is protected from eviction while its draft is not committed."""
TEMPORARY = "new-"


class ChunksGoneError(ConflictError):
    """The tier lacks chunks that a draft needs. The caller writes them again, then commits again.

    Attributes:
        names: The names of the missing chunks.
    """

    def __init__(self, directory: Path, names: Iterable[bytes]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{directory}: {len(self.names)} chunks are missing, {self.names[0].hex()} the first: write them again, "
            "then commit again",
            tier="nvme",
        )


class TierChunks:
    """The chunk files of an nvme tier, for its writer. Thread-safe.

    Args:
        directory: The directory, which exists.
        budget_bytes: The size that all files of the tier together may have.
        clock: Gives the time of use of chunks.
        faults: Called before and after every ordered step.

    Attributes:
        files: Reads the chunks.
        used_bytes: Size of all files of the tier, and of those that are being written.
        needed_bytes: Size of all chunks that a draft needs.
        evicted_bytes: Bytes evicted since the tier was opened.
    """

    def __init__(self, directory: Path, budget_bytes: int, *, clock: Clock, faults: Faults) -> None:
        self.files = ChunkFiles(directory)
        self.used_bytes = self.needed_bytes = 0
        self.evicted_bytes = 0
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._faults = faults
        self._lock = threading.Condition()  # notified when a chunk is no longer being written
        self._numbers = itertools.count()
        self._sizes: dict[bytes, int] = {}
        self._writing: set[bytes] = set()
        self._missing: set[bytes] = set()  # needed, but not there
        self._needs: Counter[bytes] = Counter()  # how many drafts and running commits name a chunk
        self._fresh: dict[bytes, float] = {}  # monotonic time at which a caller last wrote a chunk, or asked for it
        self._oldest: list[tuple[int, bytes]] = []  # a heap of chunks that may be clean, by time of use
        self._queued: set[bytes] = set()  # the names in `_oldest`
        self._unflushed: dict[bytes, int] = {}  # chunks whose names `flush` has not made durable yet
        self._doubtful: set[bytes] = set()  # needed chunks whose names may be lost, because a flush failed
        with disk_errors(directory):
            self._scan()

    def _scan(self) -> None:
        """List the directory, and delete what a crash has left. All names are durable afterwards."""
        for entry in entries_of(self._directory):
            try:
                name, status = name_of(entry.name), entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                continue
            if name is not None and status.st_size > PAGE_BYTES and not status.st_size % PAGE_BYTES:
                self._sizes[name] = status.st_size
                self._queue(name, status.st_mtime_ns)
            elif name is not None or entry.name.startswith(TEMPORARY):
                os.unlink(entry.path)
                self.files.fallbacks["chunk_cut"] += name is not None
        self.used_bytes = sum(self._sizes.values())
        flush_directory(self._directory)

    def __len__(self) -> int:
        return len(self._sizes)

    def has(self, name: bytes) -> bool:
        """Return whether there is a copy of the chunk that is not known to be damaged."""
        return name in self._sizes

    def protect(self, names: Iterable[bytes]) -> None:
        """Protect those of these chunks that the tier has from eviction for `FRESH_S`."""
        now = self._clock.monotonic()
        with self._lock:
            self._fresh.update((name, now) for name in names if name in self._sizes)

    def unprotect(self, names: Iterable[bytes]) -> None:
        """End the protection of these chunks, because a draft that needs them is stored."""
        with self._lock:
            for name in names:
                self._fresh.pop(name, None)

    # -- adding --------------------------------------------------------------------------------------------------------

    def add(self, page: ChunkPage, data: memoryview, *, keep: bool, source: Slot | None) -> None:
        """Write a chunk; see `tierfs.host.nvme.tier.NvmeTier.write`."""
        with self._lock:
            while page.name in self._writing:
                self._lock.wait()
            is_absent = page.name not in self._sizes
            if is_absent:
                self._writing.add(page.name)
        if is_absent:
            try:
                self._add(page, data, source)
            finally:
                with self._lock:
                    self._writing.discard(page.name)
                    self._lock.notify_all()
        if keep:
            self.protect([page.name])

    def _add(self, page: ChunkPage, data: memoryview, source: Slot | None) -> None:
        name, size = page.name, file_bytes(len(data))
        path, temporary = self.files.path(name), self._directory / f"{TEMPORARY}{next(self._numbers)}"
        self.reserve(size, temporary)
        try:
            if not self._write(temporary, page, data, source):
                self._discard(temporary, size)
                return
            self._faults("before chunk.rename")
            with self._lock, disk_errors(path):
                os.rename(temporary, path)
                self._sizes[name] = size
                self.needed_bytes += size if self._needs[name] else 0
                self._missing.discard(name)
                self._unflushed[name] = next(self._numbers)
                self._queue(name, self._clock.now_ns())
        except Exception:
            self._discard(temporary, size)
            raise
        self._faults("after chunk.rename")

    def _write(self, path: Path, page: ChunkPage, data: memoryview, source: Slot | None) -> bool:
        """Write a durable file. Return false if the caller's memory changed meanwhile."""
        self._faults("before chunk.write")
        fd = self.files.write(path, page, data, now_ns=self._clock.now_ns())
        try:
            self._faults("after chunk.write")
            if source is not None and not source.segment.is_still(source):
                return False
            self._faults("before chunk.sync")
            with disk_errors(path):
                os.fdatasync(fd)
            self._faults("after chunk.sync")
            return True
        finally:
            os.close(fd)

    def _discard(self, path: Path, size: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
        self.charge(-size)

    def flush(self) -> None:
        """Make the names of all chunks written so far durable.

        Raises:
            StoreError: The flush failed. Names that are not durable may be lost, and a second flush may not report it.
                So the chunks are dropped, once nothing needs them.
        """
        with self._lock:
            names = dict(self._unflushed)
        if not names:
            return
        self._faults("before chunks.sync")
        try:
            with disk_errors(self._directory):
                flush_directory(self._directory)
        except Exception:
            with self._lock:
                self._doubtful.update(self._unflushed)
                for name in [name for name in self._doubtful if not self._needs[name]]:
                    self._remove(name)
            raise
        self._faults("after chunks.sync")
        with self._lock:
            for name, number in names.items():
                if self._unflushed.get(name) == number:
                    del self._unflushed[name]

    # -- needing -------------------------------------------------------------------------------------------------------

    def need(self, names: Iterable[bytes]) -> list[bytes]:
        """Note that a draft needs each of these chunks, if the tier has all of them. Return those that it lacks."""
        wanted = list(names)
        with self._lock:
            gone = [name for name in wanted if name not in self._sizes]
            if not gone:
                self._count(wanted)
        return gone

    def expect(self, names: Iterable[bytes]) -> None:
        """Note that a stored draft needs each of these chunks, whether or not the tier has them."""
        with self._lock:
            self._count(names)

    def _count(self, names: Iterable[bytes]) -> None:
        for name in names:
            if not self._needs[name]:
                self.needed_bytes += self._sizes.get(name, 0)
                self._missing.update([name] if name not in self._sizes else [])
            self._needs[name] += 1

    def check(self, names: Iterable[bytes]) -> None:
        """Check that the names of these chunks are durable after a flush.

        Raises:
            StoreError: An earlier flush failed, and the name of a chunk may be lost.
        """
        if not self._doubtful.isdisjoint(names):
            raise StoreError(f"{self._directory}: an fsync failed, so a chunk may be lost in a crash", tier="nvme")

    def unneed(self, names: Iterable[bytes]) -> None:
        """Note that a draft no longer needs each of these chunks."""
        with self._lock:
            for name in names:
                self._needs[name] -= 1
                if self._needs[name] <= 0:
                    del self._needs[name]
                    self._missing.discard(name)
                    self.needed_bytes -= self._sizes.get(name, 0)
                    if name in self._doubtful:
                        self._remove(name)
                    elif name in self._sizes:
                        self._queue(name, 0)

    def missing(self) -> set[bytes]:
        """Return the chunks that a draft needs and the tier lacks."""
        with self._lock:
            return set(self._missing)

    def clean_bytes(self) -> int:
        """Return the size of all chunks that nobody needs."""
        with self._lock:
            return sum(self._sizes.values()) - self.needed_bytes

    # -- removing ------------------------------------------------------------------------------------------------------

    def reserve(self, size: int, temporary: Path | None = None) -> None:
        """Reserve room for a file of ``size`` bytes, and evict clean chunks for it if needed.

        Args:
            temporary: The name that an evicted file of the same size gets.

        Raises:
            CapacityError: There is no room, and no chunk can be evicted.
        """
        with self._lock:
            capacity = self._capacity()
            while self.used_bytes + size > capacity:
                victim = self._victim() if size <= capacity else None
                if victim is None:
                    raise CapacityError(
                        f"{self._directory}: no room for {size} bytes: {self.used_bytes} of {capacity} are taken, and "
                        "nothing may be evicted: wait for the flush, or raise nvme= or TIERFS_NVME",
                        tier="nvme",
                    )
                if self._sizes[victim] == size and temporary is not None:
                    self.evicted_bytes += self._remove(victim, temporary)
                    break
                self.evicted_bytes += self._remove(victim)
            self.used_bytes += size

    def shrink(self) -> None:
        """Evict clean chunks until the tier's files fit into the budget, as far as possible."""
        with self._lock:
            while self.used_bytes > self._budget_bytes and (victim := self._victim()) is not None:
                self.evicted_bytes += self._remove(victim)

    def charge(self, size: int) -> None:
        """Count ``size`` more bytes of files that are not chunks, or of reserved room; negative to give them back."""
        with self._lock:
            self.used_bytes += size

    def evict(self, names: Iterable[bytes] | None = None) -> int:
        """Evict the clean chunks among ``names``, or all clean chunks if it is None. Return the bytes freed."""
        now, freed = self._clock.monotonic(), 0
        for name in dict.fromkeys(list(self._sizes) if names is None else names):
            with self._lock:
                if name in self._sizes and not self._needs[name] and not self._is_fresh(name, now):
                    freed += self._remove(name)
        with self._lock:
            self.evicted_bytes += freed
        return freed

    def quarantine(self, name: bytes) -> bool:
        """Delete a damaged copy. Return whether there was one."""
        with self._lock:
            if name not in self._sizes:
                return False
            self._remove(name)
        self.files.fallbacks["quarantined"] += 1
        return True

    def _capacity(self) -> int:
        """Return the bytes that the files may have: the budget, or less if the disk is too full for it."""
        with disk_errors(self._directory):
            disk = os.statvfs(self._directory)
        return min(self._budget_bytes, self.used_bytes + disk.f_bavail * disk.f_frsize)

    def _remove(self, name: bytes, to: Path | None = None) -> int:
        """Delete a chunk's file, or rename it to ``to``. Return its size. The caller holds the lock."""
        path, size = self.files.path(name), self._sizes[name]
        self._faults("before chunk.remove")
        with disk_errors(path), contextlib.suppress(FileNotFoundError):
            if to is None:
                os.unlink(path)
            else:
                os.rename(path, to)
        del self._sizes[name]
        if self._needs[name]:
            self._missing.add(name)
            self.needed_bytes -= size
        self._fresh.pop(name, None)
        self._unflushed.pop(name, None)
        self._doubtful.discard(name)
        self.used_bytes -= size
        self._faults("after chunk.remove")
        return size

    def _victim(self) -> bytes | None:
        """Return the least recently used clean chunk, or None if there is none. The caller holds the lock."""
        victim, fresh, now = None, [], self._clock.monotonic()
        while self._oldest and victim is None:
            used_ns, name = heapq.heappop(self._oldest)
            self._queued.discard(name)
            if name not in self._sizes or self._needs[name]:
                continue  # `unneed` queues it again
            used_later_ns = self._used_ns(name)
            if self._is_fresh(name, now):
                fresh.append((used_ns, name))
            elif used_later_ns > used_ns:
                self._queue(name, used_later_ns)  # a reader has renewed the time
            else:
                victim = name
        for used_ns, name in fresh:
            self._queue(name, used_ns)
        return victim

    def _is_fresh(self, name: bytes, now: float) -> bool:
        return now < self._fresh.get(name, float("-inf")) + FRESH_S

    def _used_ns(self, name: bytes) -> int:
        try:
            return os.stat(self.files.path(name)).st_mtime_ns
        except OSError:
            return 0

    def _queue(self, name: bytes, used_ns: int) -> None:
        if name not in self._queued:
            self._queued.add(name)
            heapq.heappush(self._oldest, (used_ns, name))


def name_of(file: str) -> bytes | None:
    """Return the name of the chunk that a file of this name holds, or None if it holds none."""
    try:
        return bytes.fromhex(file) or None
    except ValueError:
        return None
