"""The files of one checkpoint, opened for reading: ranges of several of them at once.

Threads of `transfers` do not wait for each other, and a reader hands a range of several chunks to them. So a range is cut
at the borders of chunks here, and each piece given to a thread.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.store import Reader, Store, open_entry, stat
from tierfs.store.load import expand_rows
from tierfs.store.transfers import transfers

__all__ = ["FileRange", "ShardFiles", "raise_named"]


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file, and where they are to be put.

    Attributes:
        file: Name in the directory of the checkpoint.
        at: Offset in the file.
        out: Memory to fill. Borrowed until the read ends.
        label: What it is read for, in errors: the tensors' names.
    """

    file: str
    at: int
    out: memoryview
    label: str


@dataclass(frozen=True, slots=True)
class _Open:
    reader: Reader
    borders: Sequence[int]


class ShardFiles:
    """Files of a checkpoint. Each is looked up once. Not for use by several threads at once.

    Args:
        store: Where they are.
        directory: The checkpoint's, relative to the store's root.
        lengths: What the metadata says of their lengths, of those that it names.
    """

    def __init__(self, store: Store, directory: str, lengths: Mapping[str, int]) -> None:
        self._store = store
        self._directory = directory
        self._lengths = lengths
        self._open: dict[str, _Open] = {}

    def __repr__(self) -> str:
        return f"ShardFiles({self._store.where(self._directory)!r}, {len(self._open)} open)"

    def open(self, names: Iterable[str]) -> None:
        """Open files, several at once.

        Raises:
            CorruptionError: One is missing or of another length.
            TierfsError: It failed.
        """
        wanted = sorted(set(names) - set(self._open))
        self._open.update(zip(wanted, transfers().map(self._open_one, wanted), strict=True))

    def reader(self, name: str) -> Reader:
        """One file."""
        self.open([name])
        return self._open[name].reader

    def read(self, ranges: Iterable[FileRange]) -> None:
        """Fill every range, several at once.

        Raises:
            CorruptionError: Stored bytes are wrong or missing; names what was read, the file and the tier.
            TierfsError: It failed; it names the same.
        """
        wanted = list(ranges)
        self.open(item.file for item in wanted)
        transfers().map(self._fill, [piece for item in wanted for piece in self._pieces(item)])

    def where(self, name: str) -> str:
        """How to name a file in an error."""
        return self._store.where(self.path(name))

    def path(self, name: str) -> str:
        """A file's path, relative to the store's root."""
        return f"{self._directory}/{name}" if self._directory else name

    def _open_one(self, name: str) -> _Open:
        try:
            entry = stat(self._store, self.path(name))
            reader = open_entry(self._store, entry, exact=True)
            borders: Sequence[int] = ()
            if entry.foreign is not None:
                borders = range(CHUNK_BYTES, reader.length, CHUNK_BYTES)
            elif entry.manifest is not None and entry.manifest.inline is None:
                rows = expand_rows(self._store, entry.manifest, entry.path)
                borders = list(itertools.accumulate(row.raw_length for row in rows))
        except NotFoundError as error:
            raise CorruptionError(
                f"shard file {self.where(name)} is missing, and the checkpoint's metadata names it: load another "
                "checkpoint, or restore the file",
                path=self.path(name),
                tier=error.tier or "object",
            ) from error
        except TierfsError as error:
            raise_named(error, f"shard file {self.where(name)}")
        stated = self._lengths.get(name, reader.length)
        if reader.length != stated:
            raise CorruptionError(
                f"shard file {self.where(name)} is {reader.length} bytes long, and {stated} by the checkpoint's metadata: "
                "it was replaced; load another checkpoint",
                path=self.path(name),
                tier="object",
            )
        return _Open(reader, borders)

    def _pieces(self, item: FileRange) -> Iterable[FileRange]:
        opened = self._open[item.file]
        end = item.at + len(item.out)
        if end > opened.reader.length:
            raise CorruptionError(
                f"{item.label}: bytes {item.at} to {end} of shard file {self.where(item.file)} are asked for, and it has "
                f"{opened.reader.length}",
                path=self.path(item.file),
            )
        at = item.at
        while at < end:
            index = bisect.bisect_right(opened.borders, at)
            stop = min(end, opened.borders[index]) if index < len(opened.borders) else end
            yield FileRange(item.file, at, item.out[at - item.at : stop - item.at], item.label)
            at = stop

    def _fill(self, piece: FileRange) -> None:
        try:
            self._open[piece.file].reader.read_into(piece.at, piece.out)
        except TierfsError as error:
            raise_named(error, f"{piece.label} in shard file {self.where(piece.file)}")


def raise_named(error: TierfsError, what: str) -> NoReturn:
    """Raise the same kind of error again, with a text that names what it hit, and the tier."""
    tier = error.tier or "object"
    text = f"{what}, {tier} tier: {error}"
    if isinstance(error, StoreError):
        raise StoreError(text, transient=error.transient, path=error.path, tier=tier) from error
    if isinstance(error, InvalidInputError):
        raise error
    raise type(error)(text, path=error.path, tier=tier) from error
