"""Find the damaged and lost tensors of checkpoints. Nothing is changed, and no code of a pickle is run.

`verify_checkpoint` reads every byte of a checkpoint. `checkpoint_losses` reads none: it is told what cannot be read.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierfs.buffers import buffers
from tierfs.checkpoint.catalog import candidates, step_of
from tierfs.codec.layout.safetensors import HeaderEntry, read_table
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.dcp.load.boxes import Box, BoxReader
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format.checkpoint import metadata_file
from tierfs.format.keys import inside
from tierfs.host.pending.levels import Level
from tierfs.store import Reader, Store, level_of, open_entry, stat
from tierfs.store.read.fetch import bad_parts
from tierfs.store.read.reader import expand_rows
from tierfs.threads import transfers

BATCH = 64


@dataclass(frozen=True, slots=True)
class ShardDamage:
    """A problem of a file of a checkpoint, or of the metadata of a tensor.

    Attributes:
        names: The affected tensors and objects, sorted; empty if only the file itself is affected.
        file: The name of the shard file; empty if the metadata is wrong.
        at: The offset of the damaged bytes in the file.
        length: The number of damaged bytes; 0 if the problem is not about particular bytes.
        tier: The place that was read: ``object``, or ``local`` if the file is not in the object tier yet.
        kind: The category of the error.
        problem: The problem, in words.
    """

    names: tuple[str, ...]
    file: str
    at: int
    length: int
    tier: str
    kind: str
    problem: str


@dataclass(slots=True)
class CheckpointReport:
    """The result of a verification.

    Attributes:
        files: The number of shard files that were read.
        length: The number of bytes that were read of them.
        tensors: The number of tensors in the checkpoint.
        objects: The number of other values in the checkpoint.
        undigested: Files that tierfs did not write. Their bytes have no digests to verify.
        damage: All problems; empty if there are none.
    """

    files: int = 0
    length: int = 0
    tensors: int = 0
    objects: int = 0
    undigested: list[str] = field(default_factory=list)
    damage: list[ShardDamage] = field(default_factory=list)

    def add(self, other: CheckpointReport) -> None:
        """Add the report of another part of the same checkpoint."""
        self.files += other.files
        self.length += other.length
        self.tensors += other.tensors
        self.objects += other.objects
        self.undigested += other.undigested
        self.damage += other.damage


def verify_checkpoint(checkpoint: Checkpoint, *, progress: Callable[[int], object] | None = None) -> CheckpointReport:
    """Check that a checkpoint is complete, and that every byte is as it was written.

    Files in the object tier are read from there, even if this host has local copies. ``progress`` gets the number of
    bytes after each check, from several threads.

    Raises:
        CorruptionError: The metadata lacks the place of a tensor or object.
        StoreError, ReadOnlyError: The object tier failed.
    """
    report = CheckpointReport(tensors=len(checkpoint.tensors), objects=len(checkpoint.objects))
    places: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for fqn, place in checkpoint.places():
        places[place.file].append((fqn, place.at, place.length))
    if checkpoint.rank is None:
        problems = {fqn: checkpoint.problem_of(fqn) for fqn in checkpoint.tensors}
        report.damage += [
            ShardDamage((fqn,), "", 0, 0, "object", CorruptionError.kind, f"{fqn!r}: {problem}")
            for fqn, problem in problems.items()
            if problem
        ]
    for name, length in sorted(checkpoint.files().items()):
        _check_file(checkpoint, name, length, places[name], report, progress)
    if checkpoint.note is None:
        _check_archives(checkpoint, report)
    return report


def _check_file(
    checkpoint: Checkpoint,
    name: str,
    length: int,
    places: Sequence[tuple[str, int, int]],
    report: CheckpointReport,
    progress: Callable[[int], object] | None,
) -> None:
    """Check a file against the length and the places (name, offset, length) that the metadata gives."""
    try:
        reader, borders, tier = _open(checkpoint, name, length, report)
    except (CorruptionError, FormatError) as error:
        names = tuple(sorted({fqn for fqn, _, _ in places}))
        report.damage.append(ShardDamage(names, name, 0, 0, "object", error.kind, str(error)))
        return
    report.files += 1
    found = _read(reader, borders, report, progress)
    for at, count, problem in found:
        names = tuple(sorted({fqn for fqn, begin, size in places if begin < at + count and at < begin + size}))
        report.damage.append(ShardDamage(names, name, at, count, tier, problem.kind, str(problem)))
    if checkpoint.note is not None and not found:
        _check_table(checkpoint, name, reader, tier, report)


def _open(
    checkpoint: Checkpoint, name: str, length: int, report: CheckpointReport
) -> tuple[Reader, Iterable[int], str]:
    """Return a file's reader, where its chunks end, and the tier that is read."""
    store, path = checkpoint.store, inside(checkpoint.directory, name)
    where = store.where(path)
    try:
        level = level_of(store, path)
        entry = stat(store, path)
        is_published = level is Level.OBJECT and entry.manifest is not None
        reader = open_entry(store.without_local_tiers() if is_published else store, entry)
    except NotFoundError as error:
        raise CorruptionError(f"{where} is missing, but the checkpoint's metadata names it", path=path) from error
    if reader.length < length or (checkpoint.note is not None and reader.length != length):
        raise CorruptionError(
            f"{where} has {reader.length} bytes, but the checkpoint's metadata says {length}", path=path
        )
    borders: Iterable[int] = range(CHUNK_BYTES, reader.length + CHUNK_BYTES, CHUNK_BYTES)
    if entry.foreign is not None:
        report.undigested.append(name)
    elif entry.manifest is not None and entry.manifest.inline is None:
        borders = itertools.accumulate(row.raw_length for row in expand_rows(store, entry.manifest, path))
    return reader, borders, "object" if level is Level.OBJECT else "local"


def _read(
    reader: Reader, borders: Iterable[int], report: CheckpointReport, progress: Callable[[int], object] | None
) -> list[tuple[int, int, TierfsError]]:
    """Read a file, and return the offset, length and error of each unreadable piece, by offset."""
    lock = threading.Lock()
    found: list[tuple[int, int, TierfsError]] = []

    def check(piece: tuple[int, int]) -> None:
        at, count = piece
        try:
            with buffers().lend(count) as out:
                reader.read_into(at, out)
        except ConflictError as error:
            with lock:
                found.append((at, count, error))
        except (CorruptionError, FormatError):
            parts = bad_parts(lambda start, part: reader.read_into(at + start, part), count)
            with lock:
                found.extend((at + start, size, error) for start, size, error in parts)
        with lock:
            report.length += count
        if progress is not None:
            progress(count)

    ends = [0, *(min(border, reader.length) for border in borders)]
    pieces = [(at, end - at) for at, end in itertools.pairwise(ends) if end > at]
    for start in range(0, len(pieces), BATCH):
        transfers().map(check, pieces[start : start + BATCH])
    return sorted(found, key=lambda item: item[0])


def _check_table(checkpoint: Checkpoint, name: str, reader: Reader, tier: str, report: CheckpointReport) -> None:
    """Compare the metadata about the values of a safetensors file with the file's own table."""

    def wrong(names: tuple[str, ...], at: int, length: int, problem: str) -> None:
        report.damage.append(ShardDamage(names, name, at, length, tier, CorruptionError.kind, problem))

    try:
        table, begin = read_table(reader.read_into, reader.length, name)
    except CorruptionError as error:
        wrong((), 0, 0, str(error))
        return
    entries = sorted((entry for entry in table.values() if entry.length), key=lambda entry: entry.at)
    starts = [begin + entry.at for entry in entries]

    def check(fqn: str, item: SavedItem) -> None:
        place = item.place
        if place.file != name or not place.length:
            return
        number = bisect.bisect_right(starts, place.at) - 1
        inner = place.at - starts[number] + place.length if number >= 0 else 0
        problem = _disagreement(item, entries[number] if 0 < inner <= entries[number].length else None)
        if problem:
            at = f" at {list(item.offsets)}" if item.dtype is not None else ""
            wrong((fqn,), place.at, place.length, f"{fqn!r}{at}: {problem}")

    for fqn in checkpoint.tensors:
        for shard in checkpoint.shards(fqn):
            check(fqn, shard)
    for fqn, place in checkpoint.objects.items():
        check(fqn, SavedItem(place))


def _disagreement(item: SavedItem, entry: HeaderEntry | None) -> str:
    """Return why bytes in an entry of a shard file's table cannot be a saved item; empty if they can."""
    if entry is None:
        return f"bytes {item.place.at} to {item.place.at + item.place.length} are not in any tensor of the shard file"
    known = "U8" if item.dtype is None else SAFETENSORS_NAMES.get(item.dtype, "U8")
    if entry.dtype not in {known, "U8"}:
        return f"the metadata says {item.dtype or 'an object'}, but the shard file's own table says {entry.dtype}"
    is_whole = item.dtype is not None and entry.length == item.place.length
    if is_whole and entry.dtype == SAFETENSORS_NAMES.get(item.dtype) and entry.shape != item.sizes:
        return f"the metadata says {list(item.sizes)}, but the shard file's own table says {list(entry.shape)}"
    return ""


def _check_archives(checkpoint: Checkpoint, report: CheckpointReport) -> None:
    """Load each value that torch's own writers stored: its archive has a structure, and may have checksums."""
    damaged = {name for damage in report.damage for name in damage.names}
    reader = BoxReader(checkpoint)

    def check(fqn: str, place: BytesPlace, read: Callable[[], object]) -> None:
        error = _error_of(read)
        if error is not None:
            report.damage.append(
                ShardDamage((fqn,), place.file, place.at, place.length, "object", error.kind, str(error))
            )

    for fqn, item in checkpoint.tensors.items():
        for shard in checkpoint.shards(fqn) if fqn not in damaged else ():
            box = Box(fqn, item.properties.dtype, shard.offsets, shard.sizes)
            check(fqn, shard.place, partial(reader.read, [box]))
    for fqn, place in checkpoint.objects.items():
        if fqn not in damaged:
            check(fqn, place, partial(reader.object, fqn))


def _error_of(read: Callable[[], object]) -> TierfsError | None:
    """Call ``read``, and return its error, if any. A `StoreError` is raised."""
    try:
        read()
    except StoreError:
        raise
    except TierfsError as error:
        return error
    return None


Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CheckpointLoss:
    """The losses of a checkpoint.

    Attributes:
        path: The path of its directory.
        step: The training step, if the directory's name contains it.
        files: The names of the lost or damaged files in the directory.
        names: The tensors and objects that cannot be loaded, sorted.
        is_whole: Whether nothing of it can be loaded, because its metadata is lost.
    """

    path: str
    step: int | None
    files: tuple[str, ...]
    names: tuple[str, ...]
    is_whole: bool = False


def checkpoint_losses(store: Store, lost: Mapping[str, Ranges], gone: Collection[str]) -> list[CheckpointLoss]:
    """Return the losses of each checkpoint that lost something.

    Args:
        store: The store.
        lost: Paths of files with unreadable parts, each with the offset and length of these parts in bytes.
        gone: Paths of files that are lost as a whole.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    found = []
    for path in gone:
        directory, _, name = path.rpartition("/")
        if name == metadata_file():
            found.append(CheckpointLoss(directory, step_of(directory), (name,), (), is_whole=True))
    for candidate in candidates(store, ""):
        for rank in candidate.ranks:
            loss = _loss(store, candidate.directory, rank, lost, gone)
            if loss is not None:
                found.append(loss)
    return found


def _loss(
    store: Store, directory: str, rank: int | None, lost: Mapping[str, Ranges], gone: Collection[str]
) -> CheckpointLoss | None:
    step, metadata = step_of(directory), metadata_file(rank)
    if inside(directory, metadata) in lost:
        return CheckpointLoss(directory, step, (metadata,), (), is_whole=True)
    try:
        checkpoint = open_checkpoint(store, directory, rank=rank)
    except (CorruptionError, FormatError, NotFoundError):
        return None  # not a checkpoint, or already listed because of its metadata
    missing: dict[str, Ranges] = {}
    for name in checkpoint.files():
        path = inside(directory, name)
        if path in gone:
            missing[name] = ((0, 1 << 62),)
        elif path in lost:
            missing[name] = lost[path]
    if not missing:
        return None
    names = {
        fqn
        for fqn, place in checkpoint.places()
        for begin, length in missing.get(place.file, ())
        if begin < place.at + place.length and place.at < begin + length
    }
    return CheckpointLoss(directory, step, tuple(sorted(missing)), tuple(sorted(names)))
