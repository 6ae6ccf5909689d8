"""The writer of the nvme tier, which holds chunks and drafts on a local disk. `tierfs.host.nvme.reader` reads it.

An addition writes data to the arena, calls ``fdatasync``, commits the index once, and only then returns to the caller.
A removal commits the index first, and only then frees the extent for other data. A crash therefore leaves exactly the
committed state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tierfs.clock import Clock
from tierfs.errors import InvalidInputError, StoreError, TierfsError
from tierfs.host.filesystems import filesystem_of, is_durable
from tierfs.host.ground import Faults, no_faults
from tierfs.host.nvme.arena.extent_page import NAME_BYTES_MAX, ExtentKind, ExtentPage
from tierfs.host.nvme.commit import EncodedDraft, commit, unref
from tierfs.host.nvme.index.index import INSERT_RELEASE, IndexReader
from tierfs.host.nvme.ledger import Written
from tierfs.host.nvme.state import NvmeState
from tierfs.host.nvme.stored import (
    ARENA_FILE,
    BUDGET_BYTES_MIN,
    DRAFT_COLUMNS,
    INDEX_FILE,
    NvmeUsage,
    StoredDraft,
)
from tierfs.host.private import make_private

CHUNK_META_BYTES_MAX = 900


def is_needed(directory: Path) -> bool:
    """Whether an nvme tier that cannot be opened may hold data that exists nowhere else."""
    if not (directory / ARENA_FILE).exists():
        return False
    index = IndexReader(directory / INDEX_FILE, busy_s=0)
    try:
        found = index.select("SELECT 1 FROM drafts UNION SELECT 1 FROM refs")
    except TierfsError:
        return True
    finally:
        index.close()
    return found is None or bool(found[1])


class NvmeTier:
    """The single writer of an nvme tier. The flusher's lock ensures one per directory. Thread-safe.

    Args:
        directory: Holds the arena and the index. Created with mode 0700 if missing.
        budget_bytes: Disk space for the arena.
        clock: Gives the time of use of chunks.
        faults: Called before and after every ordered step, with ``"before STEP"`` and ``"after STEP"``. Steps are
            ``arena.create``, ``arena.grow``, ``arena.shrink``, ``arena.write``, ``arena.intents``, ``arena.sync``,
            ``arena.release``, ``index.commit``, ``index.release``, ``index.create``, ``index.aside``,
            ``index.rebuild``.

    Raises:
        CapacityError: The disk has no room for the arena.
        FormatError: Another version of tierfs made the existing files.
        InvalidInputError: The budget is less than `BUDGET_BYTES_MIN`.
        ReadOnlyError, StoreError: The files cannot be read or written.
    """

    def __init__(self, directory: Path, *, budget_bytes: int, clock: Clock, faults: Faults = no_faults) -> None:
        if budget_bytes < BUDGET_BYTES_MIN:
            raise InvalidInputError(f"nvme={budget_bytes} is too small: give at least {BUDGET_BYTES_MIN} bytes, or 0")
        make_private(directory)
        self.directory = directory
        self._durable = is_durable(filesystem_of(directory))
        self._state = NvmeState(directory, budget_bytes, clock=clock, faults=faults)

    def __repr__(self) -> str:
        ledger = self._state.ledger
        return f"NvmeTier({str(self.directory)!r}, used={ledger.used}/{ledger.capacity})"

    def has(self, name: bytes) -> bool:
        """Return whether the tier has a copy of the chunk, committed or written, that is not known to be damaged."""
        with self._state.tables:
            return self._state.ledger.has(name)

    def make_room(self, lengths: Mapping[bytes, int]) -> None:
        """Evict clean chunks until these chunks fit, as far as possible. Call it before writing the first of many.

        Chunks of ``lengths`` that the tier already has are protected from eviction for some time, as if they were
        written again.

        Args:
            lengths: The chunks' lengths in bytes, by name.

        Raises:
            StoreError: The index could not be changed.
        """
        self._state.make_room(lengths)

    def write(
        self,
        name: bytes,
        meta: bytes,
        data: memoryview,
        *,
        keep: bool = True,
        is_sound: Callable[[], bool] = lambda: True,
    ) -> None:
        """Write a chunk to the arena, unless the tier has it already. The chunk is durable only after `commit`.

        Args:
            name: The chunk's name, 1 to 33 bytes.
            meta: Metadata stored with the chunk, at most 900 bytes.
            data: Borrowed for the call only. Page-aligned memory saves a copy.
            keep: Whether a draft will name the chunk. If so, the chunk is protected from eviction for some time, even
                if another thread commits first.
            is_sound: Called after the write and before the chunk becomes visible. Returns whether ``data`` held the
                chunk during the whole write. If not, the write is undone, and an earlier copy stays.

        Raises:
            CapacityError: There is no room, and no chunk can be evicted.
            InvalidInputError: The name or the metadata has an invalid length.
            StoreError: The chunk could not be written.
        """
        if not 0 < len(name) <= NAME_BYTES_MAX or len(meta) > CHUNK_META_BYTES_MAX:
            raise InvalidInputError(f"a chunk's name of {len(name)} bytes or metadata of {len(meta)} bytes is invalid")
        state, ledger = self._state, self._state.ledger
        with state.tables:
            while name in ledger.busy:
                state.tables.wait()
            if ledger.has(name):
                if keep:
                    ledger.fresh[name] = state.clock.monotonic()
                return
            ledger.busy.add(name)
            flushes_failed = state.flushes_failed
        try:
            extent = state.take(len(data))
            try:
                lengths = (extent.serial, extent.offset, len(data))
                state.arena.write(ExtentPage(ExtentKind.CHUNK, state.arena.epoch, *lengths, name, meta), data)
                sound = is_sound()
                if not sound:
                    state.release(extent, name)
                with state.tables:
                    if not sound:
                        ledger.give(extent)
                        return
                    if flushes_failed != state.flushes_failed:
                        raise StoreError(
                            f"{state.arena.path}: an fsync failed meanwhile: write the chunk again", transient=True
                        )
                    ledger.written[name] = Written(extent, meta)
                    if keep:
                        ledger.fresh[name] = state.clock.monotonic()
            except BaseException:
                with state.tables:
                    ledger.give(extent)
                raise
        finally:
            with state.tables:
                ledger.busy.discard(name)
                state.tables.notify_all()

    def commit(
        self,
        *,
        drafts: Sequence[EncodedDraft] = (),
        holds: Mapping[str, Sequence[bytes]] | None = None,
        elsewhere: Collection[bytes] = (),
    ) -> list[int]:
        """Commit all chunks written so far, with these drafts and holds, durably and atomically.

        Args:
            drafts: In closing order, at most 200. A draft whose write id is stored already is not stored again.
            holds: Names of chunks to hold, by holder, in addition to the holder's present ones. A holder's name must
                not have the form ``d<number>``, which means a draft.
            elsewhere: Names of chunks that the object tier has. The drafts do not need them in this tier.

        Returns:
            The drafts' seqs. The drafts now survive every crash that the filesystem survives.

        Raises:
            ChunksGoneError: The tier lacks chunks that the drafts or holds need. Nothing was committed.
            CapacityError: The disk or the arena is full. Nothing was committed.
            InvalidInputError: There are more than 200 drafts.
            StoreError: The commit failed. It has no effect, and earlier commits are untouched. If flushing the arena
                failed, the caller has to write all uncommitted chunks again.
        """
        return commit(self._state, drafts, holds or {}, elsewhere)

    def drop_hold(self, *holders: str) -> None:
        """Release all chunks that these holders hold."""
        state = self._state
        with state.index_lock:
            state.refresh()
            names: list[bytes] = []
            with state.changing("index.release") as database:
                for holder in holders:
                    names += unref(database, holder)
            with state.tables:
                state.ledger.unneed(names)

    def holders(self) -> list[str]:
        """Return all holders of chunks except drafts."""
        query = "SELECT DISTINCT holder FROM refs WHERE holder NOT GLOB 'd[0-9]*' ORDER BY holder"
        with self._state.index_lock:
            self._state.refresh()
            return [holder for (holder,) in self._state.index.select(query)]

    def forget_drafts(self, *seqs: int) -> None:
        """Remove drafts that were published or discarded. Their chunks become clean unless others need them.

        Unknown seqs are ignored. After the return, a rebuild of the index does not find the drafts either.
        """
        state, ledger = self._state, self._state.ledger
        with state.index_lock:
            state.refresh()
            with state.tables:
                gone = {seq: ledger.drafts[seq] for seq in seqs if seq in ledger.drafts}
            names: list[bytes] = []
            paths: list[str] = []
            with state.changing("index.release") as database:
                for seq, draft in gone.items():
                    paths += [path for (path,) in database.execute("SELECT path FROM drafts WHERE seq = ?", [seq])]
                    database.execute("DELETE FROM drafts WHERE seq = ?", [seq])
                    if draft.extent.size:
                        # After a crash, the next process that opens the tier finishes this release.
                        database.execute(INSERT_RELEASE, [draft.extent.serial, draft.extent.offset])
                    names += unref(database, f"d{seq}")
            state.paths.add(paths, -1)
            for draft in gone.values():
                if state.release(draft.extent, draft.write_id):
                    state.released.append(draft.extent.serial)
            with state.tables:
                ledger.unneed(names)
                for seq, draft in gone.items():
                    del ledger.drafts[seq]
                    ledger.give(draft.extent)

    def keep_as_conflict(self, seq: int, note: str) -> None:
        """Mark a draft as a conflict, with a note for the user. The draft is kept and never published."""
        with self._state.index_lock:
            self._state.refresh()
            with self._state.changing("index.commit") as database:
                database.execute("UPDATE drafts SET state = 'conflict', note = ? WHERE seq = ?", [note, seq])

    def drafts(self) -> list[StoredDraft]:
        """Return all drafts, in closing order."""
        with self._state.index_lock:
            self._state.refresh()
            rows = self._state.index.select(f"SELECT {DRAFT_COLUMNS} FROM drafts ORDER BY seq")  # noqa: S608 - columns only
        return [StoredDraft(*row) for row in rows]

    def meta(self, name: bytes) -> bytes | None:
        """Return the metadata stored with a chunk, or None if the tier does not have the chunk."""
        state = self._state
        with state.tables:
            written = state.ledger.written.get(name)
        if written is not None:
            return written.meta
        with state.index_lock:
            state.refresh()
            rows = state.index.select("SELECT meta FROM chunks WHERE name = ? AND bad = 0", [name])
        return bytes(rows[0][0]) if rows else None

    def read_into(self, name: bytes, start: int, out: memoryview) -> bool:
        """Copy a part of a chunk, committed or written. The caller verifies the bytes with the chunk's metadata.

        Returns:
            Whether the tier had the part. If not, ``out`` is undefined.
        """
        state = self._state
        with state.tables:
            extent = state.ledger.find(name)
        if extent is None or start + len(out) > extent.length:
            return False
        page = state.arena.read_into(extent.offset, start, out)
        if page is None or (page.epoch, page.serial, page.name) != (state.arena.epoch, extent.serial, name):
            return False
        state.used.touch(extent.offset, state.now_s())
        with state.tables:
            # If the chunk still has this extent, the extent was not reused during the read.
            found = state.ledger.find(name)
            return found is not None and found.serial == extent.serial

    def quarantine(self, name: bytes) -> None:
        """Stop serving a damaged copy. If a draft needs it, mark and log the draft.

        Writing the chunk again heals the draft.
        """
        state, ledger = self._state, self._state.ledger
        with state.index_lock:
            state.refresh()
            with state.tables:
                if name in ledger.busy or not ledger.has(name):
                    return  # another thread is writing or evicting the chunk, or there is no copy
                written = ledger.written.pop(name, None)
                needed = ledger.needs[name] > 0
            if written is not None:
                state.release(written.extent, name)
                with state.tables:
                    ledger.give(written.extent)
            elif needed:
                state.mark_bad([name], "a chunk is damaged")
            else:
                state.evict([name], release=True)
        state.fallbacks["quarantined"] += 1

    def evict(self, names: Iterable[bytes] | None = None) -> int:
        """Evict the clean chunks among ``names``, or all clean chunks if it is None.

        Returns:
            Bytes of the arena that were freed.
        """
        state, ledger = self._state, self._state.ledger
        with state.index_lock:
            state.refresh()
            with state.tables:
                wanted = dict.fromkeys(ledger.chunks if names is None else names)
                now = state.clock.monotonic()
                clean = [name for name in wanted if name in ledger.chunks and ledger.is_clean(name, now)]
            return state.evict(clean) if clean else 0

    def usage(self) -> NvmeUsage:
        state, ledger = self._state, self._state.ledger
        with state.index_lock:
            state.refresh()
            states = dict(state.index.select("SELECT state, COUNT(*) FROM drafts GROUP BY state"))
        with state.tables:
            used, dirty, chunks = ledger.used, ledger.dirty_bytes(), len(ledger.chunks)
        pending, conflicts, damaged = (states.get(name, 0) for name in ("pending", "conflict", "damaged"))
        counts = (chunks, pending + damaged, conflicts, damaged, state.evicted_bytes)
        fallbacks = dict(state.fallbacks + state.arena.fallbacks)
        return NvmeUsage(state.budget_bytes, used, dirty, used - dirty, *counts, self._durable, fallbacks)

    def close(self) -> None:
        """Close the files. Uncommitted changes are lost, as in a crash."""
        self._state.close()
