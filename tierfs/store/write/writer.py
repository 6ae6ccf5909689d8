"""Write a file: cut it into chunks, put those while the rest is still being written, publish the manifest last.

FORMAT.md, "Order". Nothing is visible before `Writer.commit`; until then, and after a crash, the path holds what it
held before.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence

from tierfs.digest import CHUNK_BYTES, Buffer
from tierfs.errors import AlreadyExistsError, ConflictError, ReadOnlyError, StoreError
from tierfs.format.header import Kind
from tierfs.format.manifest import (
    INLINE_BYTES_MAX,
    Manifest,
    Row,
    content_digest,
    inline_digest,
)
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import SlotRef
from tierfs.store.read.reader import Reader, expand_rows, open_content, open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.records import nothing_at, observe, observe_to_replace, observe_to_stage, publish
from tierfs.store.write.cuts import Cutter
from tierfs.store.write.preconditions import DurableChunks, ensure_chunks_durable, listed_rows, refuse_foreign
from tierfs.store.write.sink import ObjectSink, SlabSink
from tierfs.store.write.staging import check_stands, follow, is_staged, seal
from tierfs.units import format_bytes

__all__ = ["WriteMode", "Writer", "save"]


class WriteMode(enum.Enum):
    """How a write treats an existing file."""

    OVERWRITE = "wb"
    CREATE = "xb"
    APPEND = "ab"


class _WriterState(enum.Enum):
    """How far a writer has come."""

    OPEN = enum.auto()
    """Bytes may be added."""
    SEALING = enum.auto()
    """Its draft is being sealed, or was, if an interrupt came right after that."""
    CLOSED = enum.auto()
    """No bytes may be added, and as far as the writer knows it published nothing."""
    DONE = enum.auto()
    """The file is published or pending."""


def save(
    store: Store,
    path: str,
    data: Buffer,
    *,
    mode: WriteMode = WriteMode.OVERWRITE,
    metadata: Mapping[str, object] | None = None,
) -> Manifest:
    """Write a whole file. See `Writer` for what may be raised."""
    writer = Writer(store, path, mode=mode, metadata=metadata)
    writer.write(data)
    return writer.commit()


class Writer:
    """One file being written. Not for use by several threads at once.

    Memory is bounded: one chunk being filled and at most four on their way, sixteen in the whole process; or, where the
    file is left to the flusher, the ram tier's budget.

    Args:
        store: The store.
        path: Relative to its root.
        mode: How to treat an existing file. The path is observed now, unless it is new, and the commit is conditional on it.
        metadata: JSON values to keep with the file.
        level: At which level `commit` returns; by default the store's. Below what the object tier gives, the rest is left
            to the flusher.
        staged: Leave it to the flusher at any level.
        is_new: No record is there, because the path was drawn at random or was looked at before. It is not asked for: should there
            be one after all, the commit is a conflict.

    Attributes:
        metadata: As given; may be changed until `commit`.
        is_replacing: Whether a file was there when the path was observed.
        published: The version that `commit` published, or made pending; also if it raised because that did not reach its level in time.

    Raises:
        AlreadyExistsError: `WriteMode.CREATE`, and there is a file.
        ReadOnlyError: The file there was not written by tierfs.
        InvalidInputError: The path is no good.
        StoreError, CorruptionError, FormatError: It could not be observed.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        *,
        mode: WriteMode = WriteMode.OVERWRITE,
        metadata: Mapping[str, object] | None = None,
        level: Level | None = None,
        staged: bool = False,
        is_new: bool = False,
        keep: int | None = None,
    ) -> None:
        self._store = store
        self._mode = mode
        self._level = store.ack if level is None else level
        self._staged = staged or is_staged(store, path, self._level)
        if is_new:
            self._observed = nothing_at(path)
        elif mode is WriteMode.OVERWRITE:
            self._observed = observe_to_stage(store, path) if self._staged else observe_to_replace(store, path)
        else:
            self._observed = observe(store, path)
        self._staged = self._staged or self._observed.draft is not None
        self.metadata = metadata
        self._write_id = store.random_bytes(16)
        # Bytes gather in `_small` until it is clear that they do not fit into the manifest, then in the sink.
        self._small = bytearray()
        self._sink: ObjectSink | SlabSink | None = None
        self._kept: list[Row] = []
        self._kept_slots: list[SlotRef | None] = []
        self.is_replacing = self._observed.manifest is not None
        self._term: int | None = None
        self.published: Manifest | None = None
        self._state = _WriterState.OPEN
        self.length = 0
        old = self._observed.manifest
        if old is not None and mode is WriteMode.CREATE:
            raise AlreadyExistsError(f"{store.where(path)} exists: an exclusive create needs a new name", path=path)
        if old is None and not is_new:
            self._refuse_foreign()
        if old is not None and mode is WriteMode.APPEND:
            self._continue(old, old.length if keep is None else min(keep, old.length))

    def _refuse_foreign(self) -> None:
        try:
            refuse_foreign(self._store, self.path, staged=self._staged)
        except ReadOnlyError as error:
            if self._mode is WriteMode.CREATE:
                raise AlreadyExistsError(str(error), path=self.path) from None
            raise

    @property
    def is_done(self) -> bool:
        """Whether the file is published or pending."""
        return self._state is _WriterState.DONE

    @property
    def path(self) -> str:
        """The path being written, relative to the store."""
        return self._observed.path

    @property
    def replaces(self) -> Manifest | None:
        """The file that was there when the writer was made."""
        return self._observed.manifest

    def adopt(self, rows: Sequence[Row], slots: Sequence[SlotRef | None]) -> None:
        """Have chunks that are in place already for the file's content. Nothing may be written before or after.

        Args:
            rows: In order.
            slots: For each, the slot that holds it for this file; ``None`` for one that is in the object tier. If there is any,
                the writer has to be ``staged``.
        """
        self._kept, self._kept_slots = list(rows), list(slots)
        self.length = sum(row.raw_length for row in rows)

    def write(self, data: Buffer) -> int:
        """Add bytes at the end. They are copied, so ``data`` may change afterwards.

        Raises:
            StoreError, CapacityError, ReadOnlyError: An earlier chunk could not be stored.
        """
        view = memoryview(data).cast("B")
        try:
            self._take(view)
        except BaseException:
            # There is a hole now, so this file is never published.
            self.abort()
            raise
        self.length += len(view)
        return len(view)

    def _take(self, view: memoryview) -> None:
        self._check_open()
        if self._sink is None and len(self._small) + len(view) <= INLINE_BYTES_MAX:
            self._small += view
            return
        sink = self._begin_sink()
        sink.write(view)

    def _check_open(self) -> None:
        if self._state is not _WriterState.OPEN:
            raise StoreError(f"{self._store.where(self.path)}: an earlier write failed: write the file again")

    def read_back(self) -> Reader:
        """Open the bytes written so far, which can be read until `abort` or `commit`. The chunk being filled ends here.

        Raises:
            StoreError, CapacityError, ReadOnlyError: A chunk could not be stored. The file is never published then.
        """
        try:
            rows = self._finish_rows()
        except BaseException:
            self.abort()  # there is a hole now
            raise
        return open_content(self._store, self.path, tuple(rows), bytes(self._small))

    def commit(self) -> Manifest:
        """Wait for the chunks, then publish the file.

        Raises:
            ConflictError: Somebody else changed the path since the writer was made; theirs stands.
            AlreadyExistsError: `WriteMode.CREATE`, and somebody else created it in the meantime.
            StoreError, CapacityError, ReadOnlyError: The object tier failed. The path holds what it held before; only
                after a transient `StoreError` the new file may be there instead.
        """
        self._check_open()
        try:
            rows = self._finish_rows()
            manifest = self._manifest(rows)
            # Asked again: something may have been closed in this directory since, and has to be published before.
            if not self._staged and is_staged(self._store, self.path, self._level):
                # The observed version may be old, and a conflict of a pending file is one for good.
                check_stands(self._store, self._observed)
                self._staged = True
            if self._staged:
                slots = [*self._kept_slots, *(self._sink.slots if isinstance(self._sink, SlabSink) else ())]
                slots += [None] * (len(rows) - len(slots))
                self._state = _WriterState.SEALING
                seal(self._store, self._observed, manifest, slots=slots)
        except BaseException as error:
            self.abort()
            if isinstance(error, ConflictError):
                self._refuse_created()
            raise
        if self._staged:
            self.published, self._state = manifest, _WriterState.DONE
            follow(self._store, manifest, self.path, self._level)
            return manifest
        self._state = _WriterState.CLOSED
        try:
            publish(self._store, self._observed, manifest, term=self._term)
        except ConflictError:
            self._refuse_created()
            raise
        self.published, self._state = manifest, _WriterState.DONE
        return manifest

    def _refuse_created(self) -> None:
        """In a conflict: what it is for who wanted to create a file, if there is one now."""
        if self._mode is WriteMode.CREATE and observe(self._store, self.path).manifest is not None:
            raise AlreadyExistsError(
                f"{self._store.where(self.path)} was created by another writer in the meantime", path=self.path
            ) from None

    def abort(self) -> None:
        """Publish nothing. Chunks already stored are left for garbage collection. May be called twice.

        What `commit` made pending or published stays: the slots are that file's by then.
        """
        if self._state is _WriterState.SEALING and self._store.tiers is not None:
            # An interrupt may have come right after the draft was sealed.
            found = self._store.tiers.drafts.pending(self.path)
            if found is not None and found.draft.write_id == self._write_id:
                self._state = _WriterState.DONE
        if self._state is _WriterState.DONE:
            return
        self._state = _WriterState.CLOSED
        self._small = bytearray()
        if self._sink is not None:
            self._sink.abort()

    def _begin_sink(self) -> ObjectSink | SlabSink:
        """Where chunks go from now on, with what was gathered so far at their start."""
        assert self._state is _WriterState.OPEN
        if self._sink is None:
            tiers = self._store.tiers if self._staged else None
            cutter = Cutter(at_start=not self._kept)
            if tiers is not None and not tiers.ram.holds_chunks:
                tiers.counters.fall_back(
                    "ram_passed_by",
                    "a ram tier of %s cannot hold a whole chunk, so the chunks of files go straight to the object tier: raise "
                    "ram= (TIERFS_RAM) to %s at least",
                    format_bytes(tiers.ram.budget_bytes),
                    format_bytes(tiers.ram.chunks_budget_bytes),
                )
                tiers = None
            if tiers is None:
                old = self._observed.manifest
                unread = {row.name.digest for row in old.rows} if old is not None and not old.indirect else None
                self._sink = ObjectSink(self._store, self.path, cutter, unread)
            else:
                self._store.hand_over(writes=True)
                self._sink = SlabSink(tiers, self._write_id, cutter, timeout_s=self._store.timeout_s)
            self._sink.write(memoryview(self._small))
            self._small = bytearray()
        return self._sink

    def _finish_rows(self) -> list[Row]:
        """Store what is left and return every chunk, or none for a file that fits into its manifest."""
        if self._small and (self._kept or self.length > self._store.descriptor.inline_bytes):
            self._begin_sink()
        return [*self._kept, *(self._sink.finish() if self._sink is not None else [])]

    def _manifest(self, rows: list[Row]) -> Manifest:
        store, old = self._store, self._observed.manifest
        now_ns = store.clock.now_ns()
        kind = store.descriptor.digest_kind
        inline = None if rows else bytes(self._small)
        table, indirect, self._term = (
            DurableChunks(tuple(rows), indirect=False, term=None)
            if self._staged
            else ensure_chunks_durable(store, self.path, rows)
        )
        metadata = self.metadata
        if metadata is None:
            metadata = old.metadata if old is not None and self._mode is WriteMode.APPEND else {}
        return Manifest(
            kind=Kind.FILE,
            write_id=self._write_id,
            length=self.length,
            created_ns=old.created_ns if old is not None else now_ns,
            modified_ns=now_ns,
            digest_kind=kind,
            digest=(
                inline_digest(kind, inline)
                if inline is not None
                else content_digest(kind, self.length, [row.name.digest for row in rows])
            ),
            rows=table,
            inline=inline,
            indirect=indirect,
            previous=self._observed.previous,
            metadata=metadata,
        )

    def _continue(self, old: Manifest, length: int) -> None:
        """Append: keep the full chunks of the first ``length`` bytes, take the last one up again."""
        store = self._store
        rows = list(expand_rows(store, old, self.path)) if self._staged else listed_rows(store, self._observed)
        ends = itertools.accumulate(row.raw_length for row in rows)
        kept = rows[: sum(end <= length for end in ends)]
        if len(kept) == len(rows) and rows and rows[-1].raw_length < CHUNK_BYTES:
            kept = rows[:-1]
        self._kept = list(kept)
        self._kept_slots = list(self._observed.slots[: len(kept)]) or [None] * len(kept)
        self.length = sum(row.raw_length for row in kept)
        tail = bytearray(length - self.length)
        open_manifest(store, self.path, old).read_into(self.length, memoryview(tail))
        self.write(tail)
