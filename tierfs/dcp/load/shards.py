"""The files of one checkpoint, opened for reading: ranges of several files at once.

Threads of `transfers` never wait for each other, and a reader would pass parts of several chunks to them. So this
module cuts ranges where chunks end, and gives all parts of one chunk to one thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.format.envelope import Part, by_chunk
from tierfs.store import Reader, Store, open_entry, stat
from tierfs.threads import transfers

LABELS_MAX = 3


class FileRange(NamedTuple):
    """Bytes of a file, and the memory to read them into.

    Attributes:
        file: Name in the directory of the checkpoint.
        at: Offset in the file.
        out: Memory to fill, a memoryview or, for `GpuChunks`, a tensor. Borrowed until the read ends.
        label: Its purpose, for errors: a tensor's name.
    """

    file: str
    at: int
    out: Any
    label: str


class ShardFiles:
    """Files of a checkpoint. Each is looked up once. Not for use by several threads at once.

    ``lengths`` are those that the metadata says, for the files that it names.
    """

    def __init__(self, store: Store, directory: str, lengths: Mapping[str, int]) -> None:
        self._store = store
        self._directory = directory
        self._lengths = lengths
        self._open: dict[str, Reader] = {}
        self._undigested: set[str] = set()

    def open(self, names: Iterable[str]) -> None:
        """Open files concurrently.

        Raises:
            CorruptionError: A file is missing or of another length.
            TierfsError: A file could not be opened.
        """
        wanted = sorted(set(names) - set(self._open))
        self._open.update(zip(wanted, transfers().map(self._open_one, wanted), strict=True))

    def reader(self, name: str) -> Reader:
        """Return the reader of one file."""
        if name not in self._open:
            self.open([name])
        return self._open[name]

    def read(self, ranges: Iterable[FileRange]) -> None:
        """Fill every range, concurrently. Each chunk is fetched once, however many ranges need it.

        Raises:
            CorruptionError: Stored bytes are wrong or missing. The message names the tensor, the file and the tier.
            TierfsError: The read failed. The message names the same.
        """
        wanted = list(ranges)
        self.open(item.file for item in wanted)
        items: dict[str, list[FileRange]] = {}
        for item in wanted:
            self.check(item.file, item.at, len(item.out), item.label)
            items.setdefault(item.file, []).append(item)
        chunks = [
            (file, number, parts)
            for file, found in items.items()
            for number, parts in by_chunk(((item.at, item.out) for item in found), self._open[file].starts).items()
        ]

        def fill(chunk: tuple[str, int, list[Part]]) -> None:
            file, number, parts = chunk
            reader = self._open[file]
            try:
                reader.read_chunk(number, parts)
            except TierfsError as error:
                labels = _labels(items[file], reader.starts[number], reader.starts[number + 1], error)
                raise_named(error, f"{labels} in shard file {self.where(file)}")

        transfers().map(fill, chunks)

    @property
    def has_copies(self) -> bool:
        """Whether `copy_chunk` may find chunks, with digests that a GPU can compute."""
        return self._store.tiers is not None and self._store.descriptor.digest_kind is DigestKind.XXH3_128

    def copy_chunk(self, name: str, number: int, out: memoryview) -> Sequence[bytes] | None:
        """Copy a whole chunk of a file from a local tier. For many threads, once the file is open. See `Reader`."""
        return self._open[name].copy_chunk(number, out)

    def cut(self, name: str, at: int, out: torch.Tensor) -> Iterator[tuple[int, int, list[tuple[int, torch.Tensor]]]]:
        """Cut bytes of a file where its chunks end. Yields a chunk's number and length, and the bytes by offset in it.

        Raises as `reader` does.
        """
        starts = self.reader(name).starts
        for number, parts in by_chunk([(at, out)], starts).items():
            yield number, starts[number + 1] - starts[number], parts

    def fall_back(self, what: str, text: str, *arguments: object) -> None:
        """Count a fallback of the local tiers, and log the first one of its kind."""
        if self._store.tiers is not None:
            self._store.tiers.counters.fall_back(what, text, *arguments)

    def check(self, name: str, at: int, length: int, label: str) -> None:
        """Check that a range lies in its file.

        Raises:
            CorruptionError: It does not, or the file is missing or of another length.
            TierfsError: The file could not be opened.
        """
        whole = self.reader(name).length
        if at + length > whole:
            raise CorruptionError(
                f"{label}: needs bytes {at} to {at + length} of shard file {self.where(name)}, which has only {whole}",
                path=self.path(name),
            )

    def has_digests(self, name: str) -> bool:
        """Return whether tierfs wrote a file, so that its digests verify each read. Raises as `reader` does."""
        self.open([name])
        return name not in self._undigested

    def is_cut(self, name: str, at: int) -> bool:
        """Return whether a chunk of a file ends at an offset. Raises as `reader` does."""
        starts = self.reader(name).starts
        return starts[bisect.bisect_left(starts, at, hi=len(starts) - 1)] == at

    def order(self, name: str, at: int) -> tuple[str, int, int]:
        """Return a sort key for reads.

        A chunk that is stored as a difference comes beside its base. Raises as `reader` does.
        """
        return name, self.reader(name).base_offset(at), at

    def where(self, name: str) -> str:
        """Return the name of a file in errors."""
        return self._store.where(self.path(name))

    def path(self, name: str) -> str:
        """Return a file's path, relative to the store's root."""
        return f"{self._directory}/{name}" if self._directory else name

    def _open_one(self, name: str) -> Reader:
        try:
            entry = stat(self._store, self.path(name))
            reader = open_entry(self._store, entry, exact=True)
        except NotFoundError as error:
            raise CorruptionError(
                f"shard file {self.where(name)} is missing, but the checkpoint's metadata names it: load another "
                "checkpoint, or restore the file",
                path=self.path(name),
                tier=error.tier or "object",
            ) from error
        except TierfsError as error:
            raise_named(error, f"shard file {self.where(name)}")
        stated = self._lengths.get(name, reader.length)
        if reader.length != stated:
            raise CorruptionError(
                f"shard file {self.where(name)} has {reader.length} bytes, but the checkpoint's metadata says "
                f"{stated}: it was replaced; load another checkpoint",
                path=self.path(name),
                tier="object",
            )
        if entry.foreign is not None:
            self._undigested.add(name)
        return reader


def _labels(items: Iterable[FileRange], start: int, end: int, error: TierfsError) -> str:
    """Return the labels of the reads from the chunk between two offsets: from its damaged block, if that is known."""
    here = [item for item in items if item.at < end and item.at + len(item.out) > start]
    if isinstance(error, CorruptionError) and error.block is not None:
        begin = start + error.block * BLOCK_BYTES
        # The damaged block may hold no requested part, if the whole chunk was fetched for some of its parts.
        here = [item for item in here if item.at < begin + BLOCK_BYTES and item.at + len(item.out) > begin] or here
    labels = list(dict.fromkeys(item.label for item in here))
    more = f" and {len(labels) - LABELS_MAX} more" if len(labels) > LABELS_MAX else ""
    return f"{', '.join(labels[:LABELS_MAX])}{more}"


def raise_named(error: TierfsError, what: str) -> NoReturn:
    """Raise the same kind of error again, with a text that names the affected item and the tier."""
    tier = error.tier or "object"
    text = f"{what}, {tier} tier: {error}"
    if isinstance(error, StoreError):
        raise StoreError(text, transient=error.transient, path=error.path, tier=tier) from error
    if isinstance(error, InvalidInputError):
        raise error
    raise type(error)(text, path=error.path, tier=tier) from error
