"""The nvme tier: chunks and drafts on a local disk. Its one writer is here; readers are in `tierfs.host.nvme.reader`.

The order of every addition: data into the arena, ``fdatasync``, one commit of the index, and only then is the caller told.
The order of every removal: one commit of the index, and only then is the extent free for other data. So a crash leaves what
was committed, and nothing half there.
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

__all__ = ["NvmeTier", "is_needed"]

CHUNK_META_BYTES_MAX = 900


def is_needed(directory: Path) -> bool:
    """Whether somebody may need what lies in a tier that cannot be opened. If not, nothing is lost by doing without."""
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
    """The writer's side. At most one per directory on a host, which the flusher's lock sees to; many threads may use it.

    Args:
        directory: Where arena and index lie; made, for its owner alone, where it is missing.
        budget_bytes: Of the disk, for the arena.
        clock: Says when chunks were used.
        faults: Called before and after every ordered step, with ``"before STEP"`` and ``"after STEP"``. Steps are
            ``arena.create``, ``arena.grow``, ``arena.shrink``, ``arena.write``, ``arena.intents``, ``arena.sync``,
            ``arena.release``, ``index.commit``, ``index.release``, ``index.create``, ``index.rebuild``.

    Raises:
        CapacityError: There is no room for the arena.
        FormatError: Another version of tierfs made what is there.
        InvalidInputError: The budget is too small for anything.
        ReadOnlyError, StoreError: It cannot be read or written.
    """

    def __init__(self, directory: Path, *, budget_bytes: int, clock: Clock, faults: Faults = no_faults) -> None:
        if budget_bytes < BUDGET_BYTES_MIN:
            raise InvalidInputError(
                f"nvme={budget_bytes}: less than {BUDGET_BYTES_MIN} bytes hold nothing: give more, or 0"
            )
        make_private(directory)
        self.directory = directory
        self._durable = is_durable(filesystem_of(directory))
        self._state = NvmeState(directory, budget_bytes, clock=clock, faults=faults)

    def __repr__(self) -> str:
        ledger = self._state.ledger
        return f"NvmeTier({str(self.directory)!r}, used={ledger.used}/{ledger.capacity})"

    def has(self, name: bytes) -> bool:
        """Whether a sound copy is there, committed or written."""
        with self._state.tables:
            return self._state.ledger.has(name)

    def make_room(self, lengths: Mapping[bytes, int]) -> None:
        """Evict clean chunks until these find room, if that is to be had: before the first of many is written.

        Those that are here stay for some time, as if they were written again.

        Args:
            lengths: In bytes, by the chunks' names.

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
        """Put a chunk into the arena. It is durable only after `commit`; nothing is written if it is there already.

        Args:
            name: The chunk's, at most 33 bytes.
            meta: Kept with it, at most 900 bytes.
            data: Borrowed for the call only; page-aligned memory saves a copy.
            keep: Whether a draft will name it: for some time it is not evicted, even if another thread commits first.
            is_sound: Asked once it is written, and before anybody can rely on it: whether ``data`` was the chunk all the
                while. If not it is as if nothing had been written, and a copy that was there before stays.

        Raises:
            CapacityError: There is no room, and nothing that may be evicted.
            StoreError: It could not be written.
        """
        if not 0 < len(name) <= NAME_BYTES_MAX or len(meta) > CHUNK_META_BYTES_MAX:
            raise InvalidInputError(f"a chunk's name of {len(name)} bytes with {len(meta)} bytes of meta")
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
                        raise StoreError(f"{state.arena.path}: a flush failed meanwhile: write again", transient=True)
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
        """Make everything written so far durable, with these drafts and holds: all of it or nothing.

        Args:
            drafts: In the order of closing, at most 200. One whose write id is stored already is not stored again.
            holds: Names needed by others, by holder, added to what the holder has; none is called ``d<number>``.
            elsewhere: Names that the object tier has: if they are not here, the draft does not need them to be.

        Returns:
            The drafts' seqs. When it returns, they survive what the filesystem survives.

        Raises:
            ChunksGoneError: Needed chunks are not here; nothing was committed.
            CapacityError: The disk or the arena is full.
            StoreError: It failed. Nothing of this call counts, and what was committed before is untouched; after a
                failed flush of the arena all chunks that were not committed have to be written again.
        """
        return commit(self._state, drafts, holds or {}, elsewhere)

    def drop_hold(self, *holders: str) -> None:
        """These holders need nothing any more."""
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
        """Everybody who needs something and is no draft."""
        query = "SELECT DISTINCT holder FROM refs WHERE holder NOT GLOB 'd[0-9]*' ORDER BY holder"
        with self._state.index_lock:
            self._state.refresh()
            return [holder for (holder,) in self._state.index.select(query)]

    def forget_drafts(self, *seqs: int) -> None:
        """Forget drafts that were published or discarded; their chunks are clean unless others need them.

        A seq that is not there is passed over. When it returns, a rebuild does not find them either.
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
                        # The next process that opens the tier after a crash finishes this.
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
        """Say that somebody else changed a draft's path first, and with which words: it is kept, and never published."""
        with self._state.index_lock:
            self._state.refresh()
            with self._state.changing("index.commit") as database:
                database.execute("UPDATE drafts SET state = 'conflict', note = ? WHERE seq = ?", [note, seq])

    def drafts(self) -> list[StoredDraft]:
        """All drafts, in the order of closing."""
        with self._state.index_lock:
            self._state.refresh()
            rows = self._state.index.select(f"SELECT {DRAFT_COLUMNS} FROM drafts ORDER BY seq")  # noqa: S608 - columns only
        return [StoredDraft(*row) for row in rows]

    def meta(self, name: bytes) -> bytes | None:
        """The metadata kept with a chunk; None if it is not there."""
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
        """Copy a part of a chunk, committed or written. Not verified: by the chunk's meta the caller does that.

        Returns:
            Whether it was there; if not, ``out`` is undefined.
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
            # If it is still there, its extent was not reused while it was being read.
            found = state.ledger.find(name)
            return found is not None and found.serial == extent.serial

    def quarantine(self, name: bytes) -> None:
        """Never serve this copy again: it is damaged. One that a draft needs is reported; writing it anew heals it."""
        state, ledger = self._state, self._state.ledger
        with state.index_lock:
            state.refresh()
            with state.tables:
                if name in ledger.busy or not ledger.has(name):
                    return  # a new copy is on its way, or there is none
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
        """Drop clean chunks: these, or all.

        Returns:
            Bytes freed. Dirty ones stay.
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
        """Its usage."""
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
        """Close the files. Uncommitted changes are lost, as after a crash."""
        self._state.close()
