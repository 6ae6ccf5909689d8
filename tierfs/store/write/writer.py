"""Write a file: cut it into chunks, put the chunks while more bytes arrive, and publish the manifest last.

FORMAT.md, "Order". Nothing is visible before `Writer.commit`. Until then, and after a crash, the path keeps its old
content.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence

from tierfs.digest import CHUNK_BYTES, Buffer
from tierfs.errors import AlreadyExistsError, ConflictError, ReadOnlyError, StoreError
from tierfs.format.header import Kind
from tierfs.format.manifest import INLINE_BYTES_MAX, Manifest, Row, content_digest, inline_digest
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import SlotRef
from tierfs.store.encode.pipeline import Pressure
from tierfs.store.read.reader import Reader, expand_rows, open_content, open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.records import nothing_at, observe, observe_to_replace, observe_to_stage, publish
from tierfs.store.write.sink import Cutter, ObjectSink, SlabSink
from tierfs.store.write.staging import (
    check_stands,
    ensure_chunks_durable,
    follow,
    is_staged,
    listed_rows,
    refuse_foreign,
    seal,
)


class WriteMode(enum.Enum):
    """How a write treats an existing file."""

    OVERWRITE = "wb"
    CREATE = "xb"
    APPEND = "ab"


class _WriterState(enum.Enum):
    """The progress of a writer."""

    OPEN = enum.auto()
    """The caller may add bytes."""
    SEALING = enum.auto()
    """The draft is being sealed. After an interrupt it may be sealed already."""
    CLOSED = enum.auto()
    """The caller may add no bytes. As far as the writer knows, it published nothing."""
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
    """Write a whole file. Raises as `Writer` and its methods do."""
    writer = Writer(store, path, mode=mode, metadata=metadata)
    writer.write(data)
    return writer.commit()


class Writer:
    """One file being written. Not for use by several threads at once.

    Memory is bounded. One chunk is being filled and at most four are in flight, sixteen in the whole process.
    If the file is left to the flusher, the ram tier's budget is the bound.

    Args:
        path: Relative to the store's root.
        mode: How to treat an existing file. The path is observed now, unless it is new. The commit is conditional on
            that version.
        metadata: JSON values to keep with the file.
        level: The level at which `commit` returns. By default the store's. Below `object`, the flusher does the rest.
        staged: Leave the file to the flusher at any level.
        is_new: The path has no record, because it was drawn at random or was observed before. It is not observed again.
            If it has a record after all, the commit is a conflict.
        keep: In `WriteMode.APPEND`, how many bytes of the existing file to keep. By default all.

    Attributes:
        metadata: As given. May be changed until `commit`.
        published: The version that `commit` published or made pending. Also set if `commit` raised because that version
            did not reach its level in time.

    Raises:
        AlreadyExistsError: `WriteMode.CREATE`, and there is a file.
        ReadOnlyError: tierfs did not write the file at the path.
        InvalidInputError: The path is invalid.
        StoreError, CorruptionError, FormatError: The path could not be observed.
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
        elif self._staged and mode is not WriteMode.APPEND:
            self._observed = observe_to_stage(store, path)
        elif mode is WriteMode.OVERWRITE:
            self._observed = observe_to_replace(store, path)
        else:
            self._observed = observe(store, path)
        self._staged = self._staged or self._observed.draft is not None
        self.metadata = metadata
        self._write_id = store.new_write_id()
        # Bytes gather in `_small` until it is clear that they do not fit into the manifest, then in the sink.
        self._small = bytearray()
        self._sink: ObjectSink | SlabSink | None = None
        self._kept: list[Row] = []
        self._kept_slots: list[SlotRef | None] = []
        self._term: int | None = None
        self.published: Manifest | None = None
        self._state = _WriterState.OPEN
        self.length = 0
        old = self._observed.manifest
        is_damaged = self._observed.record is None and self._observed.version is not None
        if mode is WriteMode.CREATE and (old is not None or is_damaged):
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
    def is_staged(self) -> bool:
        """Whether the file is left to the flusher."""
        return self._staged

    @property
    def path(self) -> str:
        """The path being written, relative to the store's root."""
        return self._observed.path

    @property
    def replaces(self) -> Manifest | None:
        """The file at the path when the writer was created."""
        return self._observed.manifest

    def adopt(self, rows: Sequence[Row], slots: Sequence[SlotRef | None]) -> None:
        """Use stored or sealed chunks as the file's content. No bytes may be written before or after.

        Args:
            slots: For each chunk, the slot that holds it for this file, or None if it is in the object tier.
                The writer must be ``staged`` if there is any slot.
        """
        self._kept, self._kept_slots = list(rows), list(slots)
        self.length = sum(row.raw_length for row in rows)

    def write(self, data: Buffer) -> int:
        """Append bytes. They are copied, so the caller may reuse ``data``. Return their number.

        Raises:
            StoreError, CapacityError, ReadOnlyError: An earlier chunk could not be stored.
        """
        view = memoryview(data).cast("B")
        try:
            self._take(view)
        except BaseException:
            # The content has a hole now, so this file must never be published.
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
        """Open the bytes written so far for reading, until `abort` or `commit`. Ends the chunk being filled.

        Raises:
            StoreError, CapacityError, ReadOnlyError: A chunk could not be stored. The file is then never published.
        """
        try:
            rows = self._finish_rows()
        except BaseException:
            self.abort()  # the content has a hole now
            raise
        return open_content(self._store, self.path, tuple(rows), bytes(self._small))

    def commit(self) -> Manifest:
        """Wait for the chunks, then publish the file, or leave it to the flusher and wait for the level.

        Raises:
            ConflictError: Another writer changed the path after the writer was created. That version stands.
            AlreadyExistsError: `WriteMode.CREATE`, and another writer created the file in the meantime.
            TimeoutError: The flusher did not reach the level in time. The file is pending.
            StoreError, CapacityError, ReadOnlyError: The object tier or the ram tier failed. Unless `is_done` is set,
                the path keeps its old content. Only after a transient `StoreError` it may hold the new file instead.
        """
        self._check_open()
        try:
            rows = self._finish_rows()
            manifest = self._manifest(rows)
            # Check again: another file of this directory may be pending since, which must be published first.
            if not self._staged and is_staged(self._store, self.path, self._level):
                # The observed version may be outdated, and a conflict of a pending file is permanent.
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
        """Turn a conflict into `AlreadyExistsError`, if the mode is CREATE and a file exists now."""
        if self._mode is WriteMode.CREATE and observe(self._store, self.path).manifest is not None:
            raise AlreadyExistsError(
                f"{self._store.where(self.path)} was created by another writer in the meantime", path=self.path
            ) from None

    def abort(self) -> None:
        """Publish nothing. Chunks already stored are left for garbage collection. May be called twice.

        A file that `commit` published or made pending stays, and so do its slots.
        """
        if self._state is _WriterState.SEALING and self._store.tiers is not None:
            # An interrupt may have arrived right after the draft was sealed.
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
        """Return the sink. Create it first if needed, and write the bytes collected so far into it."""
        assert self._state is _WriterState.OPEN
        if self._sink is None:
            tiers = self._store.tiers if self._staged else None
            cutter = Cutter(at_start=not self._kept)
            if tiers is None:
                old = self._observed.manifest
                unread = {row.name.digest for row in old.rows} if old is not None and not old.indirect else None
                waits: Pressure = "caller" if self._level is Level.OBJECT else "none"
                self._sink = ObjectSink(self._store, self.path, cutter, unread, pressure=waits)
            else:
                self._store.hand_over(writes=True)
                self._sink = SlabSink(tiers, cutter, timeout_s=self._store.timeout_s)
            self._sink.write(memoryview(self._small))
            self._small = bytearray()
        return self._sink

    def _finish_rows(self) -> list[Row]:
        """Store the last chunk and return every chunk, or none for a file that fits into its manifest."""
        if self._small and (self._kept or self.length > self._store.descriptor.inline_bytes):
            self._begin_sink()
        return [*self._kept, *(self._sink.finish() if self._sink is not None else [])]

    def _manifest(self, rows: list[Row]) -> Manifest:
        store, old = self._store, self._observed.manifest
        now_ns = store.clock.now_ns()
        kind = store.descriptor.digest_kind
        inline = None if rows else bytes(self._small)
        table, indirect, self._term = (
            (tuple(rows), False, None) if self._staged else ensure_chunks_durable(store, self.path, rows)
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
            metadata=metadata,
        )

    def _continue(self, old: Manifest, length: int) -> None:
        """Append: keep chunks that end within ``length``, except a short last one, and rewrite the bytes after them."""
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
