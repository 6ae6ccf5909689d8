"""One checkpoint as its metadata describes it, whoever wrote it: tierfs, or torch's own writers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tierfs.dcp.load.coverage import boxes_in, problem_of
from tierfs.dcp.metadata import BytesPlace, CheckpointNote, decode
from tierfs.dcp.torch_format.metadata import decode_pickle
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from tierfs.format.checkpoint import ROOT
from tierfs.format.keys import inside
from tierfs.store import Store, list_directory, open_entry, stat
from tierfs.store.announced import PENDING

__all__ = ["Checkpoint", "Shard", "metadata_file", "open_announced", "open_checkpoint", "rank_of", "read_checkpoint"]

METADATA_BYTES_MAX = 1 << 30
_PICKLE = b"\x80"
_RANK_FILE = re.compile(r"__([0-9]{1,9})\.metadata")


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor that was saved as a whole.

    Attributes:
        offsets: Where it begins in the tensor, in elements.
        sizes: How many elements of each dimension it has.
        place: Where its bytes are.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: BytesPlace


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, or one rank's part of one. None of its tensors has been read.

    Attributes:
        store: The store that holds it.
        directory: Its path there.
        rank: Whose part it is, where ranks saved on their own.
        metadata: torch's `Metadata`, with a `BytesPlace` for every shard and object.
        note: tierfs's own note; ``None`` where one of torch's writers made it.
        created_ns: When its metadata was written, in nanoseconds since the epoch; 0 where that is not known.
    """

    store: Store
    directory: str
    rank: int | None
    metadata: Any
    note: CheckpointNote | None
    created_ns: int

    @property
    def where(self) -> str:
        """How to name it in errors."""
        return self.store.where(inside(self.directory, metadata_file(self.rank)))

    @property
    def format(self) -> str:
        """Its writer: ``tierfs``, or ``dcp`` for torch's own writers."""
        return "dcp" if self.note is None else "tierfs"

    @property
    def tensors(self) -> dict[str, Any]:
        """Torch's `TensorStorageMetadata` by name, sorted."""
        items = self.metadata.state_dict_metadata.items()
        return {fqn: item for fqn, item in sorted(items) if isinstance(item, TensorStorageMetadata)}

    @property
    def objects(self) -> dict[str, BytesPlace]:
        """Where each value that is no tensor lies, by name, sorted.

        Raises:
            CorruptionError: The metadata does not say where one is.
        """
        items = sorted(self.metadata.state_dict_metadata.items())
        return {fqn: self.object(fqn) for fqn, item in items if not isinstance(item, TensorStorageMetadata)}

    def object(self, fqn: str) -> BytesPlace:
        """Where one of them lies. Raises as `objects` does."""
        return self._place(fqn, MetadataIndex(fqn))

    def shards(self, fqn: str) -> list[Shard]:
        """The shards of a tensor.

        Raises:
            CorruptionError: The metadata does not say where one is.
        """
        return [
            Shard(tuple(chunk.offsets), tuple(chunk.sizes), self._place(fqn, MetadataIndex(fqn, chunk.offsets)))
            for chunk in self.metadata.state_dict_metadata[fqn].chunks
        ]

    def places(self) -> Iterator[tuple[str, BytesPlace]]:
        """The name of every tensor and object with where a shard of it, or it, lies."""
        for fqn in self.tensors:
            for shard in self.shards(fqn):
                yield fqn, shard.place
        yield from self.objects.items()

    @property
    def length(self) -> int:
        """Bytes of all tensors' elements and of all objects."""
        elements: int = sum(
            math.prod(shard.sizes) * item.properties.dtype.itemsize
            for fqn, item in self.tensors.items()
            for shard in self.shards(fqn)
        )
        return elements + sum(place.length for place in self.objects.values())

    def files(self) -> dict[str, int]:
        """How long each file has to be, in bytes: exactly so where tierfs wrote it, else at least."""
        if self.note is not None:
            return dict(self.note.files)
        found: dict[str, int] = {}
        for _, place in self.places():
            found[place.file] = max(found.get(place.file, 0), place.at + place.length)
        return found

    def problem_of(self, fqn: str) -> str:
        """The reason why a tensor's shards do not make up the whole of it, in words; empty for none."""
        item = self.metadata.state_dict_metadata[fqn]
        return problem_of(boxes_in(item), tuple(item.size))

    def check_whole(self, names: Iterable[str] | None = None) -> None:
        """Check that the shards of tensors make up the whole of them, each element once.

        Args:
            names: Which tensors; by default all.

        Raises:
            CorruptionError: Those of one do not.
            InvalidInputError: The same, where other ranks may have saved the rest.
        """
        for fqn in self.tensors if names is None else names:
            if not (problem := self.problem_of(fqn)):
                continue
            if self.rank is not None:
                raise InvalidInputError(
                    f"{self.where}: {fqn!r}: {problem}: rank {self.rank} saved no more of it, on its own; load it with as many "
                    "ranks and use_collectives=False",
                    path=self.directory,
                )
            raise CorruptionError(f"{self.where}: {fqn!r}: {problem}", path=self.directory)

    def _place(self, fqn: str, index: Any) -> BytesPlace:
        place = self.metadata.storage_data.get(index)
        if not isinstance(place, BytesPlace):
            raise CorruptionError(f"{self.where}: does not say where {fqn!r} is", path=self.directory)
        return place


def metadata_file(rank: int | None = None) -> str:
    """Name of the file that says what is in a checkpoint; of one rank's alone where no collectives were used."""
    return ROOT if rank is None else f"__{rank}{ROOT}"


def rank_of(name: str) -> int | None:
    """The rank whose own metadata a file of this name is; ``None`` for any other name."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def open_checkpoint(store: Store, directory: str, *, rank: int | None = None) -> Checkpoint:
    """Read the metadata of a checkpoint.

    Args:
        store: The store that holds it.
        directory: Its path there.
        rank: Whose part is meant, where ranks saved on their own.

    Raises:
        NotFoundError: No checkpoint is there.
        CorruptionError, FormatError: Its metadata is damaged, or of another version.
        InvalidInputError: Its metadata is a pickle with more in it than torch's; nothing of it was run. Or ranks saved on
            their own, and none was named.
        TierfsError: It failed.
    """
    path = inside(directory, metadata_file(rank))
    try:
        return read_checkpoint(store, path, directory, rank)
    except NotFoundError as error:
        raise _missing(store, directory, rank) from error


def open_announced(store: Store, path: str) -> Checkpoint:
    """Read the metadata of a save that has been announced, and is not published yet.

    Args:
        store: The store that holds it.
        path: The announcing file's.

    Raises:
        NotFoundError: It is not there any more: it was published, or superseded.
        CorruptionError, FormatError, InvalidInputError, TierfsError: As for `open_checkpoint`.
    """
    return read_checkpoint(store, path, path.rpartition(f"{PENDING}/")[0].rstrip("/"), None)


def read_checkpoint(store: Store, path: str, directory: str, rank: int | None) -> Checkpoint:
    """The same from a file of any name. Raises as `open_checkpoint` does."""
    where = store.where(path)
    entry = stat(store, path)
    if entry.is_directory:
        raise CorruptionError(f"{where}: is a directory, and no checkpoint's metadata: move it away", path=path)
    reader = open_entry(store, entry)
    if reader.length > METADATA_BYTES_MAX:
        raise FormatError(f"{where}: {reader.length} bytes are too many for a checkpoint's metadata", path=path)
    data = bytearray(reader.length)
    reader.read_into(0, memoryview(data))
    if data.startswith(_PICKLE):
        modified_ns = (
            entry.manifest.modified_ns if entry.manifest else entry.foreign.modified_ns if entry.foreign else 0
        )
        return Checkpoint(store, directory, rank, decode_pickle(bytes(data), where), None, modified_ns)
    metadata, note = decode(bytes(data), where)
    return Checkpoint(store, directory, rank, metadata, note, note.created_ns)


def _missing(store: Store, directory: str, rank: int | None) -> InvalidInputError | NotFoundError:
    try:
        names = [entry.path.rpartition("/")[2] for entry in list_directory(store, directory, detail=False)]
    except NotFoundError:
        names = []
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
        f"no checkpoint is at {store.where(directory)}: {metadata_file(rank)} is not there; a save that has not come to its "
        "end has none, and `tierfs checkpoint ls` shows what is there",
        path=directory,
    )
