"""Read access to the nvme tier for any process: open a chunk by its name, read it, check that the name still leads to it.

Readers take no lock, pin nothing, and do not communicate with the writer.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from tierfs.buffers import PAGE_BYTES
from tierfs.clock import Clock, SystemClock
from tierfs.errors import CorruptionError, TierfsError
from tierfs.host.filesystems import entries_of, filesystem_of, is_durable
from tierfs.host.nvme.batch import BatchDraft, StoredDraft, done_in, list_batches, load_draft, read_batch
from tierfs.host.nvme.chunk_file import ChunkFiles
from tierfs.host.nvme.chunks import name_of
from tierfs.host.nvme.head import CHUNKS, DRAFTS, TIER, NvmeUsage, TierHead, read_head

_UNKNOWN = ""
"""The path of a damaged batch, which may hold drafts of any path."""
_logger = logging.getLogger("tierfs.local")


class NvmeReader:
    """Reads chunks and drafts. Thread-safe.

    Look-ups of chunks treat a tier that is missing or cannot be read as empty. Each such case is counted, and logged
    once per reason. Treating drafts like that could return an old file, so look-ups of drafts raise an error.
    They first apply the changes since the previous one.

    Args:
        directory: The store's directory. The tier need not exist.
        clock: Gives the time of use of chunks.

    Attributes:
        fallbacks: Counts of fallbacks, by reason.
    """

    def __init__(self, directory: Path, *, clock: Clock | None = None) -> None:
        self.directory = directory
        self._clock = clock or SystemClock()
        self._files = ChunkFiles(directory / TIER / CHUNKS)
        self.fallbacks = self._files.fallbacks
        self._drafts = directory / TIER / DRAFTS
        self._lock = threading.Lock()
        self._seen: int | None = None  # the number of changes that are applied
        self._batches: dict[str, list[BatchDraft]] = {}  # by file name, all drafts
        self._left: dict[str, set[int]] = {}  # by file name, the places of drafts that are not done
        self._conflicts: set[int] = set()
        self._by_path: dict[str, dict[int, BatchDraft]] = {}  # by path, then by seq
        self._paths: list[str] = []  # sorted

    def holds(self, name: bytes) -> bool:
        """Return whether the tier seems to have a chunk."""
        return self._files.holds(name)

    def read(self, name: bytes, start: int, out: memoryview) -> bytes | None:
        """Copy a part of a chunk. The caller verifies the bytes with the returned metadata.

        Args:
            start: Offset of the part in the chunk.
            out: Filled completely; undefined if None is returned. Page-aligned memory saves a copy.

        Returns:
            The chunk's metadata, or None if the tier does not have the chunk, or the writer evicted it meanwhile.

        Raises:
            CorruptionError: The chunk's file is damaged, or has less than the part.
        """
        try:
            page = self._files.read(name, start, out, now_ns=self._clock.now_ns())
        except CorruptionError:
            raise
        except TierfsError as error:
            self._note("unreadable", error)
            return None
        return None if page is None else page.meta

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield names and lengths of the chunks, sorted by name.

        The length of a damaged file is what its size says, so that a reader finds the damage.
        """
        try:
            files = entries_of(self._files.directory)
        except TierfsError as error:
            self._note("unreadable", error)
            return
        for name in sorted(name for file in files if (name := name_of(file.name)) is not None):
            try:
                page = self._files.page(name)
                if page is not None:
                    yield name, page.length
            except CorruptionError:  # noqa: PERF203 - of one file
                yield name, max(0, os.stat(self._files.path(name)).st_size - PAGE_BYTES)
            except TierfsError as error:
                self._note("unreadable", error)

    def draft(self, path: str) -> StoredDraft | None:
        """Return the newest pending or damaged draft of a file. If it is damaged, do not show an older file instead.

        Raises:
            FormatError: Another version of tierfs wrote the drafts.
            StoreError: The drafts cannot be read now.
        """
        with self._lock:
            while True:
                self._refresh()
                found = {**self._by_path.get(path, {}), **self._by_path.get(_UNKNOWN, {})}
                seqs = found.keys() - self._conflicts
                if not seqs:
                    return None
                stored = self._load(found[max(seqs)])
                if stored is not None:
                    return stored
                self._seen = None  # the draft was done in the meantime

    def drafts_below(self, prefix: str, *, conflicts: bool = False) -> list[StoredDraft]:
        """Return the pending and damaged drafts at or below the path ``prefix``, sorted by seq.

        Args:
            prefix: Has no trailing slash. Empty for all drafts.
            conflicts: Whether to return drafts that are kept because of a conflict, too.

        Raises:
            FormatError: Another version of tierfs wrote the drafts.
            StoreError: The drafts cannot be read now.
        """
        with self._lock:
            self._refresh()
            found = [draft for path in self._paths_below(prefix) for draft in self._by_path[path].values()]
            found = [each for each in found if conflicts or each.seq not in self._conflicts]
            stored = [self._load(draft) for draft in sorted(found, key=lambda each: each.seq)]
        return [draft for draft in stored if draft is not None]

    def usage(self) -> NvmeUsage:
        """Return the usage as of the last change. ``evicted_bytes`` is 0: only the writer knows it."""
        durable = is_durable(filesystem_of(self.directory))
        try:
            head, drafts = read_head(self.directory / TIER), self._all_drafts()
        except TierfsError as error:
            self._note("unreadable", error)
            head, drafts = None, []
        head = head or TierHead(0, 0, 0, 0, 0, 0)
        conflicts = sum(is_conflict for _, is_conflict in drafts)
        clean = max(0, head.used_bytes - head.dirty_bytes)
        counts = (head.chunks, len(drafts) - conflicts, conflicts, head.damaged, 0)
        sizes = (head.budget_bytes, head.used_bytes, head.dirty_bytes, clean)
        return NvmeUsage(*sizes, *counts, durable, dict(self.fallbacks))

    def _note(self, reason: str, error: Exception) -> None:
        if not self.fallbacks[reason]:
            _logger.warning("%s: the nvme tier is not read: %s", self.directory, error)
        self.fallbacks[reason] += 1

    def _all_drafts(self) -> list[tuple[BatchDraft, bool]]:
        """Return all drafts, and whether each is kept as a conflict."""
        with self._lock:
            self._refresh()
            return [(draft, seq in self._conflicts) for some in self._by_path.values() for seq, draft in some.items()]

    def _load(self, draft: BatchDraft) -> StoredDraft | None:
        return load_draft(self._drafts, draft, is_conflict=draft.seq in self._conflicts)

    def _paths_below(self, prefix: str) -> list[str]:
        if not prefix:
            return self._paths
        inside = f"{prefix}/"
        first = bisect.bisect_left(self._paths, inside)
        names = itertools.takewhile(lambda name: name.startswith(inside), itertools.islice(self._paths, first, None))
        return [each for each in (_UNKNOWN, prefix) if each in self._by_path] + list(names)

    def _refresh(self) -> None:
        """Apply all changes. The caller holds the lock."""
        head = read_head(self._drafts.parent)
        if head is not None and head.changes == self._seen:
            return
        if head is None and not self._batches and not os.path.exists(self._drafts):
            return  # there is no tier
        self._seen = None  # in case of an error
        files, self._conflicts = list_batches(self._drafts)
        for file in self._batches.keys() - files.keys():
            self._remove(file, set(self._left[file]))
            del self._batches[file], self._left[file]
        for file in files:
            self._apply(file)
        self._seen = None if head is None else head.changes

    def _apply(self, file: str) -> None:
        """Read a batch that is new, or the states of a known one."""
        known = self._batches.get(file)
        drafts = read_batch(self._drafts, file, self.fallbacks) if known is None else known
        if known is not None and len(drafts) == 1:
            return  # a draft that is alone in its batch ends with the file
        if not drafts:
            return  # all are done since the directory was listed
        done = done_in(self._drafts, file, len(drafts)) if drafts[0].place >= 0 else set()
        if done is None:
            return
        if known is None:
            self._batches[file], self._left[file] = drafts, set(range(len(drafts)))
            for draft in drafts:
                if draft.path not in self._by_path:
                    self._by_path[draft.path] = {}
                    bisect.insort(self._paths, draft.path)
                self._by_path[draft.path][draft.seq] = draft
        self._remove(file, done & self._left[file])

    def _remove(self, file: str, places: set[int]) -> None:
        self._left[file] -= places
        for place in places:
            draft = self._batches[file][place]
            del self._by_path[draft.path][draft.seq]
            if not self._by_path[draft.path]:
                del self._by_path[draft.path]
                del self._paths[bisect.bisect_left(self._paths, draft.path)]
