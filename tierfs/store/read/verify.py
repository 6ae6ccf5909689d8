"""Read everything back and report damage. Nothing is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from tierfs.buffers import buffers
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.collector import Collector
from tierfs.format.descriptor import Descriptor
from tierfs.format.envelope import ENVELOPE_BYTES_MAX, Envelope, block_count, envelope_bytes
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.lease import Condemned, Lease
from tierfs.format.manifest import Manifest, Row
from tierfs.format.references import ReferenceList
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import ObjectInfo
from tierfs.store.read.fetch import fetch
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.transfers import transfers
from tierfs.store.tree.listing import stat
from tierfs.store.tree.records import read_record

BATCH = 64
OBJECT_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One problem that was found.

    Attributes:
        path: The file concerned, or the key of an object that belongs to no file.
        key: The object that is damaged or missing.
        kind: Category of the error.
        problem: The problem, in words.
    """

    path: str
    key: str
    kind: str
    problem: str


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        files: Number of files whose manifest could be read. Directories and tombstones are read, and not counted.
        chunks: Number of chunk objects read, each once.
        raw_bytes: Decoded bytes that were checked.
        damage: All problems. Empty if there are none.
    """

    files: int = 0
    chunks: int = 0
    raw_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)


def verify(store: Store, path: str = "", *, progress: Callable[[int], object] | None = None) -> VerifyReport:
    """Read and check every byte of a file, of all files below a directory, or of the whole store.

    The object tier's own bytes are read, even if this host has copies.

    Args:
        store: The store.
        path: The file or directory. Empty for the whole store, where stray objects are found, too.
        progress: Called from several threads with the raw bytes of each chunk that was checked.

    Raises:
        NotFoundError: Nothing is at ``path``.
        StoreError, ReadOnlyError: The object tier cannot be listed.
    """
    report = VerifyReport()
    bare = store.without_local_tiers()
    seen: set[ChunkName] = set()
    lock = threading.Lock()

    def check_chunk(job: tuple[str, Row]) -> None:
        where, row = job
        key = keys.chunk_key(row.name)
        try:
            with buffers().lend(row.raw_length) as out:
                fetch(bare, row, [(0, out)], store.where(where))
        except (CorruptionError, FormatError, StoreError) as error:
            with lock:
                report.damage.append(Damage(where, key, error.kind, str(error)))
        with lock:
            report.chunks += 1
            report.raw_bytes += row.raw_length
        if progress is not None:
            progress(row.raw_length)

    jobs: list[tuple[str, Row]] = []
    for where, rows in _files(store, bare, path, report):
        for row in rows:
            if row.name not in seen:
                seen.add(row.name)
                jobs.append((where, row))
        if len(jobs) >= BATCH:
            transfers().map(check_chunk, jobs)
            jobs = []
    transfers().map(check_chunk, jobs)
    _name_others(store, bare, path, report)
    if not path:
        _check_rest(bare, seen, report)
    report.damage.sort(key=lambda damage: (damage.path, damage.key))
    return report


def _files(store: Store, bare: Store, path: str, report: VerifyReport) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Yield path and chunks of every sound record, and report the others. ``bare`` is ``store`` without local tiers."""
    for where, key in _records(store, path, report):
        try:
            record, _, _ = read_record(store, where, key)
            if not isinstance(record, Manifest) or record.kind is not Kind.FILE:
                continue
            report.files += 1
            rows = expand_rows(bare, record, where)
            _check_sizes(rows, record, store.where(key))
        except NotFoundError:
            continue  # deleted since the listing
        except (CorruptionError, FormatError, StoreError) as error:
            report.damage.append(Damage(where, key, error.kind, str(error)))
        else:
            yield where, (*(record.rows if record.indirect else ()), *rows)


def _name_others(store: Store, bare: Store, path: str, report: VerifyReport) -> None:
    """Report a damaged chunk for every file that names it. It was read for the first of these files only.

    The records are read again for this, to avoid keeping in memory which file names which chunk.
    """
    damaged = {damage.key: damage for damage in report.damage if damage.key.startswith(keys.CHUNKS)}
    if not damaged:
        return
    for where, rows in _files(store, bare, path, VerifyReport()):
        for key in dict.fromkeys(keys.chunk_key(row.name) for row in rows):
            found = damaged.get(key)
            if found is not None and found.path != where:
                problem = found.problem.replace(store.where(found.path), store.where(where), 1)
                report.damage.append(replace(found, path=where, problem=problem))


def _check_sizes(rows: Iterable[Row], manifest: Manifest, where: str) -> None:
    for row in rows:
        # The row also names the bases of its bases, so the number of bases in the envelope is not known here.
        least = envelope_bytes(manifest.digest_kind, block_count(row.raw_length), min(len(row.bases), 1))
        if row.stored_length <= least:
            raise FormatError(f"{where}: a chunk of {row.stored_length} bytes cannot hold {row.raw_length}", path=where)


def _records(store: Store, path: str, report: VerifyReport) -> Iterator[tuple[str, str]]:
    """Yield path and key of every record at or below ``path``, including tombstones. Report invalid keys."""
    found = not path
    if path:
        try:
            store.objects.head(keys.record_key(path))
        except NotFoundError:
            pass
        else:
            found = True
            yield path, keys.record_key(path)
    prefix = keys.directory_prefix(path)
    for item in store.objects.list(prefix):
        if not isinstance(item, ObjectInfo):
            continue
        found = True
        try:
            where = keys.parse_record_key(item.key)
        except FormatError as error:
            report.damage.append(Damage(item.key, item.key, error.kind, f"{store.where(item.key)}: {error}"))
            continue
        yield where, item.key
    if not found:
        stat(store, path)  # raises NotFoundError, unless it is a file that tierfs did not write


def _check_rest(store: Store, seen: set[ChunkName], report: VerifyReport) -> None:
    """Check the objects that belong to no file.

    These are the descriptor, leases, condemned and reference lists, chunks that no file names, and stray objects.
    """

    def check(key: str) -> None:
        try:
            _check_object(store, key, seen)
        except NotFoundError:
            return  # deleted since the listing
        except TierfsError as error:
            report.damage.append(Damage(key, key, error.kind, f"{store.where(key)}: {error}"))

    prefixes = (keys.CHUNKS, keys.LEASES, keys.GC, keys.REFERENCES)
    listed = [item.key for prefix in prefixes for item in store.objects.list(prefix) if isinstance(item, ObjectInfo)]
    transfers().map(check, [keys.DESCRIPTOR, *listed])


def _check_object(store: Store, key: str, seen: set[ChunkName]) -> None:
    """Read and check one object that is not a record.

    Raises:
        CorruptionError, FormatError, StoreError, ReadOnlyError: The object is damaged, is stray, or cannot be read.
    """
    kind = store.descriptor.digest_kind
    if key.startswith(keys.CHUNKS):
        name = keys.parse_chunk_key(key, kind)
        if name not in seen:
            limit = CHUNK_BYTES + ENVELOPE_BYTES_MAX
            envelope, info, _ = read_decoded(store.objects, key, limit, _envelope, key)
            row = Row(name, envelope.raw_length, info.size)
            with buffers().lend(envelope.raw_length) as out:
                fetch(store, row, [(0, out)], store.where(key))
    else:
        read_decoded(store.objects, key, OBJECT_BYTES_MAX, _check_content, key)


def _envelope(data: bytes, where: str) -> Envelope:
    return Envelope.decode(data, where, stored_length=len(data))


def _check_content(data: bytes, key: str) -> None:
    if key == keys.DESCRIPTOR:
        Descriptor.decode(data, key)
    elif key.startswith(keys.LEASES):
        if keys.lease_key(Lease.decode(data, key).holder) != key:
            raise FormatError(f"{key} is the lease of another holder", path=key)
    elif key == keys.COLLECTOR:
        Collector.decode(data, key)
    elif key.startswith(keys.REFERENCES):
        if keys.references_key(ReferenceList.decode(data, key).path) != key:
            raise FormatError(f"{key} is the reference list of another directory", path=key)
    elif keys.is_condemned_key(key) and keys.condemned_key(Condemned.decode(data, key).epoch) != key:
        raise FormatError(f"{key} is the condemned list of another epoch", path=key)
