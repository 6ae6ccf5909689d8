"""Write a file: cut it into chunks, put those while the rest is still being written, publish the manifest last.

FORMAT.md, "Order". Nothing is visible before `Writer.commit`; until then, and after a crash, the path holds what it
held before.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from tierfs.digest import CHUNK_BYTES, Buffer
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, ReadOnlyError, StoreError
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import (
    INLINE_BYTES_MAX,
    ROW_EXTRA_BYTES,
    Manifest,
    Row,
    content_digest,
    encode_rows,
    inline_digest,
)
from tierfs.store.chunks import rescue, store_chunk
from tierfs.store.load import expand_rows, open_manifest
from tierfs.store.records import observe, observe_to_replace, publish
from tierfs.store.store import Store
from tierfs.store.transfers import transfers

__all__ = ["WriteMode", "Writer", "learn_rows", "refuse_foreign", "save", "settle"]

IN_FLIGHT_MAX = 4
SETTLE_ATTEMPTS_MAX = 4
DIRECT_ROW_BYTES_MAX = 8 << 20


class WriteMode(enum.Enum):
    """What a write does with what is there."""

    OVERWRITE = "wb"
    CREATE = "xb"
    APPEND = "ab"


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

    Memory is bounded: one chunk being filled and at most four on their way, sixteen in the whole process.

    Args:
        store: The store.
        path: Relative to its root.
        mode: What to do with what is there. The path is observed now, and the commit is conditional on it.
        metadata: JSON values to keep with the file.

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
    ) -> None:
        self._store = store
        self._mode = mode
        self._observed = observe_to_replace(store, path) if mode is WriteMode.OVERWRITE else observe(store, path)
        self._metadata = metadata
        self._rows: list[Row] = []
        self._under_way: deque[Future[Row]] = deque()
        # Bytes gather in `_small` until it is clear that they do not fit into the manifest, then in `_chunk`.
        self._small = bytearray()
        self._chunk: bytearray | None = None
        self._filled = 0
        self._done = False
        self.length = 0
        old = self._observed.manifest
        if old is not None and mode is WriteMode.CREATE:
            raise AlreadyExistsError(f"{store.where(path)} exists: an exclusive create needs a new name", path=path)
        if old is None:
            self._refuse_foreign()
        if old is not None and mode is WriteMode.APPEND:
            self._continue(old)

    def _refuse_foreign(self) -> None:
        try:
            refuse_foreign(self._store, self.path)
        except ReadOnlyError as error:
            if self._mode is WriteMode.CREATE:
                raise AlreadyExistsError(str(error), path=self.path) from None
            raise

    @property
    def path(self) -> str:
        """The path being written, relative to the store."""
        return self._observed.path

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
        if self._done:
            raise StoreError(f"{self._store.where(self.path)}: an earlier write failed: write the file again")
        at = 0
        while at < len(view):
            if self._chunk is None and len(self._small) + len(view) - at <= INLINE_BYTES_MAX:
                self._small += view[at:]
                break
            chunk = self._chunk if self._chunk is not None else self._begin_chunk()
            count = min(CHUNK_BYTES - self._filled, len(view) - at)
            chunk[self._filled : self._filled + count] = view[at : at + count]
            self._filled += count
            at += count
            if self._filled == CHUNK_BYTES:
                self._send_chunk()

    def commit(self) -> Manifest:
        """Wait for the chunks, then publish the file.

        Raises:
            ConflictError: Somebody else changed the path since the writer was made; theirs stands.
            AlreadyExistsError: `WriteMode.CREATE`, and somebody else created it in the meantime.
            StoreError, CapacityError, ReadOnlyError: The object tier failed. The path holds what it held before; only
                after a transient `StoreError` the new file may be there instead.
        """
        if self._done:
            raise StoreError(f"{self._store.where(self.path)}: an earlier write failed: write the file again")
        try:
            rows = self._finish_rows()
            manifest = self._manifest(rows)
        except BaseException:
            self.abort()
            raise
        self._done = True
        try:
            publish(self._store, self._observed, manifest)
        except ConflictError:
            if self._mode is WriteMode.CREATE and observe(self._store, self.path).manifest is not None:
                raise AlreadyExistsError(
                    f"{self._store.where(self.path)} was created by somebody else in the meantime", path=self.path
                ) from None
            raise
        return manifest

    def abort(self) -> None:
        """Publish nothing. Chunks already stored are left for garbage collection. May be called twice."""
        self._done = True
        for future in self._under_way:
            future.cancel()
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancelled():
                future.exception()
        self._free_chunk()

    def _begin_chunk(self) -> bytearray:
        """Move on to a buffer of a whole chunk's size, with what was gathered so far at its start."""
        assert not self._done
        self._chunk = transfers().take_buffer()
        self._filled = len(self._small)
        self._chunk[: self._filled] = self._small
        self._small = bytearray()
        return self._chunk

    def _free_chunk(self) -> None:
        if self._chunk is not None:
            transfers().give_buffer(self._chunk)
            self._chunk = None
        self._small = bytearray()

    def _send_chunk(self) -> None:
        assert self._chunk is not None
        while len(self._under_way) >= IN_FLIGHT_MAX:
            self._rows.append(self._under_way.popleft().result())
        buffer, filled = self._chunk, self._filled
        self._chunk, self._filled = None, 0

        def store_it(buffer: bytearray) -> Row:
            try:
                return store_chunk(self._store, memoryview(buffer)[:filled])
            finally:
                transfers().give_buffer(buffer)

        self._under_way.append(transfers().send(store_it, buffer))

    def _finish_rows(self) -> list[Row]:
        """Store what is left and return every chunk, or none for a file that fits into its manifest."""
        if self._small and (self._rows or self.length > self._store.descriptor.inline_bytes):
            self._begin_chunk()
        if self._chunk is not None and self._filled:
            self._send_chunk()
        while self._under_way:
            self._rows.append(self._under_way.popleft().result())
        return self._rows

    def _manifest(self, rows: list[Row]) -> Manifest:
        store, old = self._store, self._observed.manifest
        now_ns = store.clock.now_ns()
        kind = store.descriptor.digest_kind
        inline = None if rows else bytes(self._small)
        table, indirect = settle(store, self.path, rows)
        metadata = self._metadata
        if metadata is None:
            metadata = old.metadata if old is not None and self._mode is WriteMode.APPEND else {}
        return Manifest(
            kind=Kind.FILE,
            write_id=store.random_bytes(16),
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

    def _continue(self, old: Manifest) -> None:
        """Append: keep the full chunks, take the last one up again."""
        store = self._store
        rows = learn_rows(store, old, self.path)
        kept = rows[:-1] if rows and rows[-1].raw_length < CHUNK_BYTES else rows
        self._rows = list(kept)
        self.length = sum(row.raw_length for row in kept)
        tail = bytearray(old.length - self.length)
        open_manifest(store, self.path, old).read_into(self.length, memoryview(tail))
        self.write(tail)


def learn_rows(store: Store, manifest: Manifest, path: str) -> list[Row]:
    """The chunks of a manifest that was just observed, noted as present because it names them."""
    term = store.presence.ensure() if manifest.rows else 0
    rows = list(expand_rows(store, manifest, path))
    store.presence.learn(term, rows)
    return rows


def settle(store: Store, path: str, rows: Sequence[Row]) -> tuple[tuple[Row, ...], bool]:
    """What a writer does right before it publishes: make sure that every chunk it will name is there to stay.

    Returns:
        The manifest's own table, and whether it is an indirect one.

    Raises:
        StoreError: A chunk is gone for good, or the object tier is too slow to tell within a lease.
    """
    settled = list(rows)
    checked: dict[ChunkName, int] = {}  # in which term each one was looked up here
    for _ in range(SETTLE_ATTEMPTS_MAX):
        table, indirect = _fold_rows(store, settled)
        if not settled:
            return table, indirect
        term = store.presence.ensure()
        named = [*table, *settled] if indirect else settled
        doubtful = [row for row in store.presence.doubtful(named) if checked.get(row.name) != term]
        if not doubtful:
            return table, indirect
        saved = {}
        for row in doubtful:
            saved[row.name] = rescue(store, row, store.where(path))
            checked[saved[row.name].name] = store.presence.ensure()
        settled = [saved.get(row.name, row) for row in settled]
    raise StoreError(
        f"{store.where(path)}: looking its chunks up takes longer than a lease lasts "
        f"({store.descriptor.lease_s} s): the object tier is too slow; nothing was published",
        transient=True,
        path=path,
        tier="object",
    )


def refuse_foreign(store: Store, path: str) -> None:
    """Check that nobody else's object lies at ``path``.

    Raises:
        ReadOnlyError: One does.
    """
    try:
        store.objects.head(path)
    except NotFoundError:
        return
    raise ReadOnlyError(
        f"{store.where(path)} was not written by tierfs and can only be read: choose another name, or remove it with the "
        "tool that wrote it",
        path=path,
    )


def _fold_rows(store: Store, rows: list[Row]) -> tuple[tuple[Row, ...], bool]:
    """The manifest's own table: the chunks, or where they are too many for one object, the chunks of that table."""
    if len(rows) * (store.descriptor.digest_kind.size + ROW_EXTRA_BYTES) <= DIRECT_ROW_BYTES_MAX:
        return tuple(rows), False
    table = memoryview(encode_rows(tuple(rows)))
    pieces = [table[at : at + CHUNK_BYTES] for at in range(0, len(table), CHUNK_BYTES)]
    return tuple(store_chunk(store, piece) for piece in pieces), True
