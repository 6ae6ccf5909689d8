"""One checkpoint as its metadata describes it, written by tierfs or by torch's own writers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.facts import is_pickle, read_metadata
from tierfs.dcp.load.coverage import boxes_in, problem_of
from tierfs.dcp.metadata import decode
from tierfs.dcp.torch_format.metadata import decode_pickle
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError
from tierfs.format.checkpoint import metadata_file, rank_of
from tierfs.format.keys import inside
from tierfs.store import Entry, Store, list_directory


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, or one rank's part of one. None of its tensors has been read.

    Attributes:
        store: The store that holds the checkpoint.
        directory: The checkpoint's path in the store.
        rank: The rank whose part this is, if the ranks saved without collectives.
        metadata: torch's `Metadata`, with a `BytesPlace` for every shard and object.
        note: tierfs's own note; ``None`` if torch's writers made the checkpoint.
        created_ns: When the metadata was written, in nanoseconds since the epoch; 0 if that is unknown.
    """

    store: Store
    directory: str
    rank: int | None
    metadata: Any
    note: CheckpointNote | None
    created_ns: int

    @property
    def where(self) -> str:
        """The name of its metadata in errors."""
        return self.store.where(inside(self.directory, metadata_file(self.rank)))

    @property
    def format(self) -> str:
        """``tierfs``, or ``dcp`` if torch's own writers made the checkpoint."""
        return "dcp" if self.note is None else "tierfs"

    @property
    def tensors(self) -> dict[str, Any]:
        """Torch's `TensorStorageMetadata` by name, sorted."""
        items = self.metadata.state_dict_metadata.items()
        return {fqn: item for fqn, item in sorted(items) if isinstance(item, TensorStorageMetadata)}

    @property
    def objects(self) -> dict[str, BytesPlace]:
        """Where each object lies, by name, sorted.

        Raises:
            CorruptionError: The metadata does not say where an object is.
        """
        items = sorted(self.metadata.state_dict_metadata.items())
        return {fqn: self.object(fqn) for fqn, item in items if not isinstance(item, TensorStorageMetadata)}

    def object(self, fqn: str) -> BytesPlace:
        """Return where one object lies. Raises as `objects` does."""
        return self._place(fqn, MetadataIndex(fqn))

    def shards(self, fqn: str) -> list[SavedItem]:
        """Return the shards of a tensor. Raises `CorruptionError` if the metadata does not say where a shard is."""
        item = self.metadata.state_dict_metadata[fqn]
        return [
            SavedItem(
                self._place(fqn, MetadataIndex(fqn, chunk.offsets)),
                item.properties.dtype,
                tuple(chunk.sizes),
                tuple(chunk.offsets),
            )
            for chunk in item.chunks
        ]

    def places(self) -> Iterator[tuple[str, BytesPlace]]:
        """Yield the name and place of every shard of every tensor, and of every object."""
        for fqn in self.tensors:
            for shard in self.shards(fqn):
                yield fqn, shard.place
        yield from self.objects.items()

    @property
    def length(self) -> int:
        """The number of bytes of all tensors' elements and of all objects."""
        elements: int = sum(
            math.prod(shard.sizes) * item.properties.dtype.itemsize
            for fqn, item in self.tensors.items()
            for shard in self.shards(fqn)
        )
        return elements + sum(place.length for place in self.objects.values())

    def files(self) -> dict[str, int]:
        """Return the length of each file in bytes: exact if tierfs wrote the checkpoint, else the minimum."""
        if self.note is not None:
            return dict(self.note.files)
        found: dict[str, int] = {}
        for _, place in self.places():
            found[place.file] = max(found.get(place.file, 0), place.at + place.length)
        return found

    def problem_of(self, fqn: str) -> str:
        """Return why a tensor's shards do not make up the whole tensor, in words; empty if they do."""
        item = self.metadata.state_dict_metadata[fqn]
        return problem_of(boxes_in(item), tuple(item.size))

    def check_whole(self, names: Iterable[str] | None = None) -> None:
        """Check that the shards of tensors make up the whole tensors, each element once.

        Raises:
            CorruptionError: The shards of a tensor do not.
            InvalidInputError: The same, but other ranks may have saved the missing shards.
        """
        for fqn in self.tensors if names is None else names:
            if not (problem := self.problem_of(fqn)):
                continue
            if self.rank is not None:
                raise InvalidInputError(
                    f"{self.where}: {fqn!r}: {problem}: rank {self.rank} saved only its own part; load with as many "
                    "ranks as saved and use_collectives=False",
                    path=self.directory,
                )
            raise CorruptionError(f"{self.where}: {fqn!r}: {problem}", path=self.directory)

    def _place(self, fqn: str, index: Any) -> BytesPlace:
        place = self.metadata.storage_data.get(index)
        if not isinstance(place, BytesPlace):
            raise CorruptionError(f"{self.where}: the metadata does not say where {fqn!r} is", path=self.directory)
        return place


def open_checkpoint(store: Store, directory: str, *, rank: int | None = None) -> Checkpoint:
    """Read the metadata of a checkpoint.

    ``rank`` selects the part of one rank, if the ranks saved without collectives.

    Raises:
        NotFoundError: No checkpoint is there.
        CorruptionError, FormatError: The metadata is damaged, or of an unsupported version.
        InvalidInputError: The metadata is a pickle that holds more than torch's metadata; nothing of it was run. Or the
            ranks saved without collectives, and ``rank`` is ``None``.
        TierfsError: The read failed.
    """
    path = inside(directory, metadata_file(rank))
    try:
        return read_checkpoint(store, path, directory, rank)
    except NotFoundError as error:
        raise _missing(store, directory, rank) from error


def read_checkpoint(store: Store, path: str, directory: str, rank: int | None) -> Checkpoint:
    """Read the metadata of a checkpoint from a file of any name. Raises as `open_checkpoint` does."""
    entry, data = read_metadata(store, path)
    return checkpoint_in(store, directory, rank, path, entry, data)


def checkpoint_in(store: Store, directory: str, rank: int | None, path: str, entry: Entry, data: bytes) -> Checkpoint:
    """Return the checkpoint that the metadata in ``data`` describes. Raises as `open_checkpoint` does."""
    where = store.where(path)
    if is_pickle(data):
        modified_ns = (
            entry.manifest.modified_ns if entry.manifest else entry.foreign.modified_ns if entry.foreign else 0
        )
        return Checkpoint(store, directory, rank, decode_pickle(data, where), None, modified_ns)
    metadata, note = decode(data, where)
    return Checkpoint(store, directory, rank, metadata, note, note.created_ns)


def _missing(store: Store, directory: str, rank: int | None) -> InvalidInputError | NotFoundError:
    try:
        names = [entry.path.rpartition("/")[2] for entry in list_directory(store, directory, detail=False)]
    except NotFoundError:
        return NotFoundError(
            f"no checkpoint is at {store.where(directory)}: the path does not exist, check it", path=directory
        )
    ranks = sorted(found for found in map(rank_of, names) if found is not None)
    listed = ", ".join(map(str, ranks))
    if ranks and rank is None:
        return InvalidInputError(
            f"{store.where(directory)}: its ranks saved on their own: choose one with --rank: {listed}", path=directory
        )
    if ranks:
        return NotFoundError(
            f"{store.where(directory)}: rank {rank} saved nothing there, but {listed} did", path=directory
        )
    return NotFoundError(
        f"no checkpoint is at {store.where(directory)}: {metadata_file(rank)} does not exist; an unfinished save has "
        f"none; see `tierfs checkpoint ls {shlex.quote(store.where(directory))}`",
        path=directory,
    )
