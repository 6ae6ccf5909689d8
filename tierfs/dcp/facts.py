"""The facts about a checkpoint that lists need, read from its metadata by one request, and without torch.

The metadata that torch's own writers made is a pickle of torch's classes: torch is loaded to read that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.dcp.document import (
    DIMENSIONS_MAX,
    Checked,
    CheckpointNote,
    parse,
    parse_as_written,
    read_boxes,
    read_note,
    read_place,
)
from tierfs.dcp.load.coverage import problem_of
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.format.checkpoint import ROOT, metadata_file
from tierfs.format.keys import inside
from tierfs.gc_pause import Uncollected
from tierfs.store import Entry, Store, open_entry, stat
from tierfs.store.announced_saves import PENDING, AnnouncedSaves

METADATA_BYTES_MAX = 1 << 30
_PICKLE = b"\x80"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a checkpoint, or about one rank's part of one.

    Attributes:
        directory: The checkpoint's path in the store.
        rank: The rank whose part this is, if the ranks saved without collectives.
        write_id: The id of the write of its metadata; empty if tierfs did not write the file.
        created_ns: When the metadata was written, in nanoseconds since the epoch; 0 if that is unknown.
        note: tierfs's own note; ``None`` if torch's writers made the checkpoint.
        files: The length of each file in bytes: exact if tierfs wrote the checkpoint, else the minimum.
        length: The number of bytes of all tensors' elements and of all objects.
        tensors: The names of its tensors.
        objects: The names of its other values.
        problem: Why the shards of a tensor do not make up the whole tensor, in words; empty if they do, or if other
            ranks have the rest.
    """

    directory: str
    rank: int | None
    write_id: bytes
    created_ns: int
    note: CheckpointNote | None
    files: dict[str, int]
    length: int
    tensors: frozenset[str]
    objects: frozenset[str]
    problem: str

    @property
    def format(self) -> str:
        """``tierfs``, or ``dcp`` if torch's own writers made the checkpoint."""
        return "dcp" if self.note is None else "tierfs"


def read_facts(store: Store, directory: str, *, rank: int | None = None, path: str = "") -> Facts:
    """Read the facts about a checkpoint.

    ``rank`` selects the part of one rank, if the ranks saved without collectives; ``path`` is that of the metadata, if
    it is not the usual one.

    Raises:
        NotFoundError: The file is not there.
        StoreError: The object tier failed; or torch's writers made the checkpoint, and torch is not installed.
        CorruptionError, FormatError, InvalidInputError, TierfsError: As for `tierfs.dcp.checkpoint.open_checkpoint`.
    """
    path = path or inside(directory, metadata_file(rank))
    entry, data = read_metadata(store, path)
    write_id = b"" if entry.manifest is None else entry.manifest.write_id
    if is_pickle(data):
        try:
            from tierfs.dcp.checkpoint import checkpoint_in  # noqa: PLC0415 - it loads torch
        except ImportError as error:
            raise StoreError(
                f"{store.where(path)} is read with torch: pip install 'tierfs[torch]'", path=path
            ) from error
        made = checkpoint_in(store, directory, rank, path, entry, data)
        problem = ""
        try:
            made.check_whole() if rank is None else None
        except CorruptionError as error:
            problem = str(error)
        names = frozenset(made.tensors), frozenset(made.objects)
        return Facts(directory, rank, write_id, made.created_ns, None, made.files(), made.length, *names, problem)
    where, length, problem = store.where(path), 0, ""
    with Uncollected():
        document = Checked(parse_as_written(data) or parse(data, where), where)
        note = read_note(document)
        for fqn, tensor in document.members("tensors"):
            shape, boxes = tensor.integers("shape", DIMENSIONS_MAX), []
            for _, offsets, sizes, place in read_boxes(tensor, shape, note.files):
                length += place[2]
                boxes.append((offsets, sizes))
            if rank is None and not problem and (found := problem_of(boxes, shape)):
                problem = f"{where}: {fqn!r}: {found}"
        length += sum(read_place(item, note.files)[2] for _, item in document.members("objects"))
    tensors, objects = (frozenset(document.document[name]) for name in ("tensors", "objects"))
    files = dict(note.files)
    return Facts(directory, rank, write_id, note.created_ns, note, files, length, tensors, objects, problem)


def read_announced_facts(store: Store, path: str) -> Facts:
    """Read the facts about a save that was announced by the file at ``path`` and is not published yet.

    Raises:
        NotFoundError: The announcement is gone: the save was published, or superseded.
        CorruptionError, FormatError, InvalidInputError, TierfsError: As for `read_facts`.
    """
    return read_facts(store, path.rpartition(f"{PENDING}/")[0].rstrip("/"), path=path)


def read_metadata(store: Store, path: str) -> tuple[Entry, bytes]:
    """Read the file of a checkpoint's metadata, of any name. Raises as `read_facts` does."""
    where = store.where(path)
    try:
        entry = stat(store, path)
    except NotFoundError:
        # A save of several hosts is announced. If other hosts hold the files that it waits for, it can be read.
        directory, _, name = path.rpartition("/")
        has_peers = store.tiers is not None and store.tiers.remote is not None
        found = AnnouncedSaves(store).readable(directory) if has_peers and name == ROOT else None
        if found is None:
            raise
        entry = Entry(path, is_directory=False, manifest=found.manifest)
    if entry.is_directory:
        raise CorruptionError(f"{where} is a directory, not a checkpoint's metadata: move it away", path=path)
    reader = open_entry(store, entry)
    if reader.length > METADATA_BYTES_MAX:
        raise FormatError(f"{where}: {reader.length} bytes are too many for a checkpoint's metadata", path=path)
    data = bytearray(reader.length)
    reader.read_into(0, memoryview(data))
    return entry, bytes(data)


def is_pickle(data: bytes) -> bool:
    """Return whether metadata is that of torch's own writers."""
    return data.startswith(_PICKLE)
