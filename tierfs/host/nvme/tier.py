"""The writer of the nvme tier, which holds chunks and drafts on a local disk. `tierfs.host.nvme.reader` reads it.

Each chunk is a file, and each commit of drafts is a file; the directory is the index. An addition makes the bytes
durable, renames the file to its name, flushes the directory, and only then returns to the caller. A draft's chunks are
durable before the draft appears. A crash therefore leaves exactly what was committed, and perhaps chunks that no draft
names: these are clean.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from tierfs.clock import Clock
from tierfs.errors import InvalidInputError, TierfsError
from tierfs.host.events import Faults, no_faults
from tierfs.host.filesystems import disk_errors, filesystem_of, flush_directory, is_durable, make_private
from tierfs.host.nvme.batch import (
    BatchDraft,
    DraftBatches,
    EncodedDraft,
    StoredDraft,
    encode_batch,
    list_batches,
    load_draft,
)
from tierfs.host.nvme.chunk_file import ChunkPage
from tierfs.host.nvme.chunks import ChunksGoneError, TierChunks
from tierfs.host.nvme.head import (
    BUDGET_BYTES_MIN,
    CHUNKS,
    DRAFTS,
    TIER,
    NvmeUsage,
    TierHead,
    check_old_arena,
    read_head,
    write_head,
)
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.slab.segment import Slot

_logger = logging.getLogger("tierfs.local")


def has_tier(directory: Path) -> bool:
    """Return whether a store's directory has an nvme tier. Raises `FormatError` if it is of an earlier version."""
    check_old_arena(directory)
    return (directory / TIER).exists()


def is_needed(directory: Path) -> bool:
    """Return whether an nvme tier that cannot be opened may hold data that exists nowhere else."""
    tier = directory / TIER
    try:
        return bool(list_batches(tier / DRAFTS)[0])
    except TierfsError:
        return True


class NvmeTier:
    """The single writer of an nvme tier. The flusher's lock ensures one per directory. Thread-safe.

    Args:
        directory: The store's directory. The tier is a directory in it, created with mode 0700 if missing.
        budget_bytes: The most disk space to use. The tier uses less if the disk has less.
        clock: Gives the time of use of chunks.
        faults: Called before and after every ordered step, with ``"before STEP"`` and ``"after STEP"``. Steps are
            ``tier.make``, ``tier.scan``, ``chunk.write``, ``chunk.sync``, ``chunk.rename``, ``chunk.remove``,
            ``chunks.sync``, ``batch.write``, ``batch.rename``, ``batch.sync``, ``batch.finish``, ``conflict.write``,
            ``conflict.rename``, ``conflict.sync``, ``head.change``.

    Raises:
        CapacityError: The disk has no room for the directory.
        FormatError: Another version of tierfs made the existing files.
        InvalidInputError: The budget is less than `BUDGET_BYTES_MIN`.
        ReadOnlyError, StoreError: The files cannot be read or written.
    """

    def __init__(self, directory: Path, *, budget_bytes: int, clock: Clock, faults: Faults = no_faults) -> None:
        if budget_bytes < BUDGET_BYTES_MIN:
            raise InvalidInputError(f"nvme={budget_bytes} is too small: give at least {BUDGET_BYTES_MIN} bytes, or 0")
        make_private(directory)
        check_old_arena(directory)
        self.directory = directory
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._faults = faults
        self._is_durable = is_durable(filesystem_of(directory))
        self._lock = threading.Lock()  # held while drafts change
        self._numbers = itertools.count()
        tier = directory / TIER
        self._drafts_directory = tier / DRAFTS
        faults("before tier.make")
        with disk_errors(tier):
            for each in (tier, tier / CHUNKS, self._drafts_directory):
                make_private(each)
            flush_directory(tier)
            flush_directory(directory)
        faults("after tier.make")
        known = read_head(tier)
        # Readers may know a number of the lost head, so the new one begins far above.
        self._changes = clock.now_ns() if known is None else known.changes
        faults("before tier.scan")
        self._chunks = TierChunks(tier / CHUNKS, budget_bytes, clock=clock, faults=faults)
        self.fallbacks: Counter[str] = Counter()
        self._batches = DraftBatches(tier / DRAFTS, faults=faults, fallbacks=self.fallbacks)
        self._has_lost = any(draft.place < 0 for draft in self._batches.drafts.values())
        self._write_ids = {draft.write_id: seq for seq, draft in self._batches.drafts.items()}
        for draft in self._batches.drafts.values():
            self._chunks.expect(draft.names)
        self._chunks.charge(self._batches.used_bytes)
        self._chunks.shrink()
        faults("after tier.scan")
        self._report_damaged()
        self._change()

    def holds(self, name: bytes) -> bool:
        """Return whether the tier has a copy of the chunk that is not known to be damaged."""
        return self._chunks.has(name)

    def protect(self, names: Iterable[bytes]) -> None:
        """Protect those of these chunks that the tier has from eviction for some time, as if they were written again."""
        self._chunks.protect(names)

    def write(
        self,
        name: bytes,
        meta: bytes,
        data: memoryview,
        *,
        keep: bool = True,
        source: Slot | None = None,
    ) -> None:
        """Write a chunk, unless the tier has it already. It is clean until a draft needs it.

        Its bytes are durable when this method returns. Its name is durable after the next `commit` of drafts.

        Args:
            name: The chunk's name, 1 to 33 bytes.
            meta: Metadata stored with the chunk, at most 900 bytes.
            data: Borrowed for the call only. Page-aligned memory saves a copy.
            keep: Whether a draft will name the chunk. If so, the chunk is protected from eviction for some time.
            source: The slot that ``data`` lies in. If it was reused by the end of the write, the write is undone, and
                an earlier copy stays.

        Raises:
            CapacityError: There is no room, and no chunk can be evicted.
            InvalidInputError: The name or the metadata has an invalid length.
            StoreError: The chunk could not be written.
        """
        self._chunks.add(ChunkPage(name, meta, len(data)), data, keep=keep, source=source)

    def commit(self, drafts: Sequence[EncodedDraft], *, elsewhere: Collection[bytes] = ()) -> list[int]:
        """Store drafts durably and atomically.

        Args:
            drafts: In closing order. A draft whose write id is stored already is not stored again. Without drafts, only
                the names of all chunks written so far become durable.
            elsewhere: Names of chunks that the object tier has. The drafts do not need them in this tier.

        Returns:
            The drafts' seqs. The drafts now survive every crash that the filesystem survives.

        Raises:
            ChunksGoneError: The tier lacks chunks that the drafts need. Nothing was stored.
            CapacityError: The disk or the tier is full. Nothing was stored.
            StoreError: Nothing was stored. If the flush of the chunks' names failed, they have to be written again.
        """
        with self._lock:
            seqs = self._write_ids
            fresh = {draft.write_id: draft for draft in drafts if draft.write_id not in seqs}
            away = {name for name in elsewhere if not self.holds(name)}
            self._store(
                [
                    each._replace(names=tuple(name for name in dict.fromkeys(each.names) if name not in away))
                    for each in fresh.values()
                ]
            )
            self._change()
            return [seqs[draft.write_id] for draft in drafts]

    def _store(self, new: Sequence[EncodedDraft]) -> None:
        names = [name for draft in new for name in draft.names]
        self._need(names)
        first_seq = self._batches.last_seq + 1
        data = encode_batch(new, first_seq, self._clock.now_ns())
        try:
            if not new:
                self._chunks.flush()
                return
            self._chunks.reserve(len(data))
            try:
                with self._batches.adding(data, len(new)):
                    self._chunks.flush()
                    self._chunks.check(names)
            except Exception:
                self._chunks.charge(-len(data))
                raise
        except Exception:
            self._chunks.unneed(names)
            raise
        self._chunks.unprotect(names)
        self._write_ids.update((draft.write_id, seq) for seq, draft in enumerate(new, first_seq))

    def _need(self, names: Sequence[bytes]) -> None:
        gone = self._chunks.need(names)
        if gone:
            raise ChunksGoneError(self.directory, sorted(set(gone)))

    def forget_drafts(self, *seqs: int) -> None:
        """Remove drafts that were published or discarded, durably. Their chunks become clean unless others need them.

        Unknown seqs are ignored.
        """
        with self._lock:
            before = self._batches.used_bytes
            try:
                done = self._batches.finish(seqs)
            finally:
                self._chunks.charge(self._batches.used_bytes - before)
            for draft in done:
                self._write_ids.pop(draft.write_id, None)
                self._chunks.unneed(draft.names)
            self._change()

    def keep_as_conflict(self, seq: int, note: str) -> None:
        """Mark a draft as a conflict, with a note for the user. The draft is kept and never published."""
        with self._lock:
            if seq in self._batches.drafts:
                self._batches.keep_as_conflict(seq, note)
            self._change()

    def drafts(self) -> list[StoredDraft]:
        """Return all drafts, in closing order."""
        with self._lock:
            missing = self._chunks.missing()
            found = [self._load(draft, missing) for draft in self._batches.drafts.values()]
        return [draft for draft in found if draft is not None]

    def _load(self, draft: BatchDraft, missing: Collection[bytes]) -> StoredDraft | None:
        lacks = sum(name in missing for name in draft.names) if missing else 0
        is_conflict = draft.seq in self._batches.conflicts
        return load_draft(self._drafts_directory, draft, is_conflict=is_conflict, missing=lacks)

    def _change(self) -> None:
        """Tell readers that drafts may have changed. Callers do this before they return."""
        self._changes += 1
        self._faults("before head.change")
        chunks = self._chunks
        dirty = self._batches.used_bytes + chunks.needed_bytes
        numbers = (self._changes, chunks.used_bytes, dirty, len(chunks), self._damaged())
        write_head(self.directory / TIER, TierHead(self._budget_bytes, *numbers))
        self._faults("after head.change")

    def pin(self, name: bytes) -> list[bytes]:
        """Keep a chunk until `unpin`, which the caller guarantees. Return the name in a list, empty without a copy."""
        return [] if self._chunks.need([name]) else [name]

    def unpin(self, names: Iterable[bytes]) -> None:
        self._chunks.unneed(names)
        with self._lock:
            self._change()

    def _damaged(self) -> int:
        missing = self._chunks.missing()
        if not missing and not self._has_lost:
            return 0
        return sum(each.place < 0 or not missing.isdisjoint(each.names) for each in self._batches.drafts.values())

    # -- chunks --------------------------------------------------------------------------------------------------------

    def read(self, name: bytes, start: int, out: memoryview) -> bytes | None:
        """Copy a part of a chunk. The caller verifies the bytes with the returned metadata.

        Returns:
            The metadata, or None if the tier does not have the chunk. Then ``out`` is undefined.

        Raises:
            CorruptionError: The chunk's file is damaged.
            StoreError: The file cannot be read.
        """
        page = self._chunks.files.read(name, start, out, now_ns=self._clock.now_ns()) if self.holds(name) else None
        return None if page is None else page.meta

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield names and lengths of the chunks: see `NvmeReader.chunks`."""
        return NvmeReader(self.directory).chunks()

    def quarantine(self, name: bytes, length: int = 0) -> None:
        """Delete a damaged copy, of whatever length. If a draft needs it, log the draft. Writing the chunk again heals the draft."""
        with self._lock:
            if self._chunks.quarantine(name):
                self._report_damaged(name)
                self._change()

    def _report_damaged(self, name: bytes | None = None) -> None:
        """Log the drafts that are damaged, or those that need one chunk, which is missing."""
        missing = self._chunks.missing() if name is None else {name}
        for draft in self._batches.drafts.values():
            if draft.place < 0 or not missing.isdisjoint(draft.names):
                self.fallbacks["drafts_damaged"] += 1
                why = "its file is damaged" if draft.place < 0 else "a chunk is missing or damaged"
                what = draft.path or f"{self._drafts_directory / draft.file}: a file"
                _logger.error("%s was saved on this host and is no longer complete: %s", what, why)

    def evict(self, names: Iterable[bytes] | None = None) -> int:
        """Evict the clean chunks among ``names``, or all clean chunks if it is None.

        Returns:
            Bytes of disk space that were freed.
        """
        freed = self._chunks.evict(names)
        with self._lock:
            self._change()
        return freed

    def usage(self) -> NvmeUsage:
        with self._lock:
            conflicts, chunks = len(self._batches.conflicts), len(self._chunks)
            used = self._chunks.used_bytes
            clean = self._chunks.clean_bytes()
            counts = (
                chunks,
                len(self._batches.drafts) - conflicts,
                conflicts,
                self._damaged(),
                self._chunks.evicted_bytes,
            )
        fallbacks = dict(self.fallbacks + self._chunks.files.fallbacks)
        return NvmeUsage(self._budget_bytes, used, used - clean, clean, *counts, self._is_durable, fallbacks)
