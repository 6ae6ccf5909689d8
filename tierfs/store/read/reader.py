"""Read any range of a file into the caller's buffer. Blocks are verified one by one."""

from __future__ import annotations

import abc
import bisect
import itertools
from collections.abc import Sequence
from functools import partial

from tierfs.digest import CHUNK_BYTES, foreign_name, local_name
from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError
from tierfs.format.envelope import EXACT_SHARE, WHOLE_SHARE, Part, by_chunk
from tierfs.format.header import Cursor
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, content_digest, decode_rows
from tierfs.host.chunk_sources import ChunkRequest
from tierfs.objects.protocol import ObjectInfo
from tierfs.store.read.fetch import fetch
from tierfs.store.store import Store
from tierfs.store.tree.listing import Entry, stat_to_read
from tierfs.store.tree.records import observe_to_read
from tierfs.threads import processors, transfers

PIECE_BYTES_MAX = CHUNK_BYTES


class Reader(abc.ABC):
    """A file at one version, opened for reading. Safe for use by many threads.

    Attributes:
        starts: The offset of each chunk in the file, then the file's length.
    """

    starts: Sequence[int]

    @property
    def length(self) -> int:
        """Length of the file in bytes."""
        return self.starts[-1]

    def base_offset(self, offset: int) -> int:
        """Return an offset to sort reads by, so that a chunk is read soon after its bases.

        This is the start of the last chunk of this file that the chunk at ``offset`` is encoded against, or else of
        that chunk itself. A caller that reads a whole file in this order finds fetched bases still on this host, even
        if the host can keep few chunks.
        """
        return offset

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``offset``. All must be in the file. Raises as `read_parts` does."""
        self.read_parts([(offset, out)])

    def read_parts(self, parts: Sequence[Part]) -> None:
        """Fill each part. All parts must be in the file. A chunk is fetched once for all its parts.

        Args:
            parts: Offsets in the file, each with the memory to fill, in any order. They may overlap.

        Raises:
            CorruptionError: A byte is missing or cannot be verified. The content of the memory is undefined.
            ConflictError: The file was replaced or deleted since it was opened, and its bytes are gone. For a file that
                tierfs wrote, they stay for a grace.
            StoreError, ReadOnlyError, FormatError: A part cannot be read.
        """
        transfers().map(lambda wanted: self.read_chunk(*wanted), by_chunk(parts, self.starts).items())

    def requests(self) -> Sequence[ChunkRequest]:
        """Return the file's chunks as the tiers know them, in order; none if the record has the file's bytes."""
        return ()

    @abc.abstractmethod
    def read_chunk(self, number: int, parts: Sequence[Part]) -> None:
        """Fill parts of one chunk, by offsets in the chunk. Waits for no other thread of `transfers`."""

    def copy_chunk(self, number: int, out: memoryview) -> Sequence[bytes] | None:
        """Copy a whole chunk from a local tier, for a caller that verifies it itself.

        Returns:
            The digests that the chunk's blocks should have; None if no local tier has it, or the file has no digests.
        """
        return None


def load(store: Store, path: str) -> bytes:
    """Return the content of a whole file. Raises as `open_entry` and `Reader.read_into` do."""
    reader = open_entry(store, stat_to_read(store, path))
    out = bytearray(reader.length)
    reader.read_into(0, memoryview(out))
    return bytes(out)


def open_entry(store: Store, entry: Entry, *, exact: bool = False) -> Reader:
    """Open a file that a listing or `stat` found.

    Args:
        exact: Fetch little more than the requested bytes, because the caller knows all that it wants of the file. By
            default a chunk is fetched whole, and kept on this host, if a good part of it is read.

    Raises:
        NotFoundError: The entry is a directory.
    """
    if entry.manifest is not None and not entry.is_directory:
        return open_manifest(store, entry.path, entry.manifest, exact=exact)
    if entry.foreign is not None:
        return _ForeignReader(store, entry.foreign, exact=exact)
    raise NotFoundError(f"{store.where(entry.path)} is a directory", path=entry.path)


def open_manifest(store: Store, path: str, manifest: Manifest, *, exact: bool = False) -> Reader:
    """Open the version of a file that a manifest describes. For ``exact`` see `open_entry`."""
    if manifest.inline is not None:
        return _InlineReader(manifest.inline)
    return _ChunkReader(store, path, expand_rows(store, manifest, path), exact=exact, opened=manifest)


def open_content(store: Store, path: str, rows: tuple[Row, ...], inline: bytes) -> Reader:
    """Open the content that a writer has so far: its chunks, or its bytes if it has none. ``path`` is for errors."""
    return _ChunkReader(store, path, rows) if rows else _InlineReader(inline)


def expand_rows(store: Store, manifest: Manifest, path: str) -> tuple[Row, ...]:
    """Return every chunk of a file in order. A table that is itself stored in chunks is read.

    Raises:
        CorruptionError: The table is damaged.
        FormatError: The table does not add up to the file.
    """
    if not manifest.indirect:
        return manifest.rows
    where = store.where(path)
    reader = _ChunkReader(store, path, manifest.rows)
    # Grown as the chunks arrive, so that a missing table takes no memory.
    table = bytearray()
    for row in manifest.rows:
        piece = memoryview(bytearray(row.raw_length))
        reader.read_into(len(table), piece)
        table += piece
    rows = decode_rows(Cursor(memoryview(table), where), None, manifest.digest_kind)
    if (
        sum(row.raw_length for row in rows) != manifest.length
        or content_digest(manifest.digest_kind, manifest.length, [row.name.digest for row in rows]) != manifest.digest
    ):
        raise FormatError(f"{where}: its table of chunks does not match the file", path=path)
    return rows


class _InlineReader(Reader):
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.starts = (0, len(content))

    def read_parts(self, parts: Sequence[Part]) -> None:
        self.read_chunk(0, parts)

    def read_chunk(self, number: int, parts: Sequence[Part]) -> None:
        for offset, out in parts:
            out[:] = self._content[offset : offset + len(out)]


class _ForeignReader(Reader):
    """A file that tierfs did not write. It has no digests, so reads are conditional on its version instead.

    The local tiers keep pieces of it under its path and version.
    """

    def __init__(self, store: Store, info: ObjectInfo, *, exact: bool) -> None:
        self._store = store
        self._info = info
        self._share = EXACT_SHARE if exact else WHOLE_SHARE
        # Ends of the pieces that the local tiers keep.
        self.starts = (*range(0, info.size, PIECE_BYTES_MAX), info.size)

    def read_chunk(self, number: int, parts: Sequence[Part]) -> None:
        first, tiers = self.starts[number], self._store.tiers
        if tiers is None:
            self._fetch(first, parts)
            return
        chunk = self._request(number)
        if tiers.sources.read(chunk, parts, is_here=True) is None:
            tiers.cache.read_through(chunk, parts, partial(self._fetch, first), share=self._share)

    def requests(self) -> Sequence[ChunkRequest]:
        return [self._request(number) for number in range(len(self.starts) - 1)]

    def _request(self, number: int) -> ChunkRequest:
        first, end = self.starts[number], self.starts[number + 1]
        return ChunkRequest(foreign_name(self._info.key, str(self._info.version), first), end - first)

    def _fetch(self, first: int, parts: Sequence[Part]) -> Sequence[bytes]:
        """Fetch parts of the piece that begins at ``first``. Returns no digests, because none are known."""
        ranges = [(first + start, out) for start, out in parts]
        try:
            self._store.objects.get(self._info.key, ranges, version=self._info.version)
        except ConflictError as error:
            raise ConflictError(
                f"{self._store.where(self._info.key)} was changed while it was being read: open it again",
                path=self._info.key,
            ) from error
        return ()


class _ChunkReader(Reader):
    def __init__(
        self, store: Store, path: str, rows: tuple[Row, ...], *, exact: bool = False, opened: Manifest | None = None
    ) -> None:
        self._store = store
        self._path = path
        self._opened = opened
        self._exact = exact
        self._where = store.where(path)
        self._rows = rows
        self.starts = [0, *itertools.accumulate(row.raw_length for row in rows)]
        self._places: dict[ChunkName, int] | None = None

    def base_offset(self, offset: int) -> int:
        if self._places is None:
            self._places = {row.name: start for row, start in zip(self._rows, self.starts, strict=False)}
        number = bisect.bisect_right(self.starts, offset, hi=len(self._rows)) - 1
        bases = self._rows[number].bases if self._rows else ()
        return max((self._places[name] for name in bases if name in self._places), default=self.starts[number])

    def read_parts(self, parts: Sequence[Part]) -> None:
        tiers = self._store.tiers

        def fill(wanted: tuple[int, list[Part]]) -> None:
            self.read_chunk(*wanted)

        def fill_near(wanted: tuple[int, list[Part]]) -> None:
            if tiers is None or tiers.sources.read(self._request(wanted[0]), wanted[1], is_here=True) is None:
                fill(wanted)

        near: list[tuple[int, list[Part]]] = []
        far: list[tuple[int, list[Part]]] = []
        for number, wanted in by_chunk(parts, self.starts).items():
            is_near = tiers is not None and tiers.sources.holds(self._request(number).name, "ram")
            (near if is_near else far).append((number, wanted))
        # Reads that wait use many threads. Copies from memory use as many threads as there are processors.
        transfers().map(fill, far)
        processors().share_out(fill_near, near)

    def read_chunk(self, number: int, parts: Sequence[Part]) -> None:
        try:
            fetch(self._store, self._rows[number], parts, self._where, exact=self._exact)
        except CorruptionError as error:
            if self._opened is None:
                raise
            now = observe_to_read(self._store, self._path).manifest
            if now is not None and now.write_id == self._opened.write_id:
                raise
            # Its chunks may have been collected. The file that is there now is another one.
            raise ConflictError(
                f"{self._where} was replaced or deleted since it was opened, and can no longer be read: open it again",
                path=self._path,
            ) from error

    def copy_chunk(self, number: int, out: memoryview) -> Sequence[bytes] | None:
        if self._store.tiers is None:
            return None
        return self._store.tiers.sources.copy(self._request(number), out)

    def requests(self) -> Sequence[ChunkRequest]:
        return [self._request(number) for number in range(len(self._rows))]

    def _request(self, number: int) -> ChunkRequest:
        row = self._rows[number]
        return ChunkRequest(local_name(self._store.descriptor.digest_kind, row.name.digest), row.raw_length, row)
