"""Read everything back and report damage. Nothing is changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tierfs.buffers import buffers
from tierfs.clock import Pace
from tierfs.errors import CorruptionError, FormatError, NotFoundError, ReadOnlyError, StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.envelope import block_count, envelope_bytes
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.lease import Condemned, Lease
from tierfs.format.manifest import Manifest, Row
from tierfs.format.upkeep import Collector, ReferenceList
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.looks import LOOK_S, within
from tierfs.store.maintenance.examine import Damage, examine, lacks_base
from tierfs.store.read.fetch import fetch
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.listing import stat
from tierfs.store.tree.records import read_record
from tierfs.threads import Pool, transfers

BATCH = 64
OBJECT_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        files: Number of files whose manifest could be read. Directories and tombstones are read, and not counted.
        chunks: Number of chunk objects read, each once.
        raw_bytes: Decoded bytes that were checked.
        damage: All damage. Empty if there is none.
        unread: Objects that could not be read because the object tier failed.
        vanished: What shows that records vanished without a tombstone. Looked for in the whole store only.
    """

    files: int = 0
    chunks: int = 0
    raw_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    vanished: list[Damage] = field(default_factory=list)

    def note(self, *problems: Damage) -> None:
        """Add problems. Objects that the tier did not give are not damaged, as far as anybody knows."""
        for problem in problems:
            is_unread = problem.kind in (StoreError.kind, ReadOnlyError.kind)
            (self.unread if is_unread else self.damage).append(problem)


class _Tier:
    """Tells whether the object tier still answers, so that a silent one is not asked for each of a thousand objects.

    Attributes:
        is_away: Whether it stopped answering.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # one thread looks, the others wait for what it finds
        self.is_away = False

    def failed(self, error: TierfsError) -> None:
        """Check it after an error. The error may concern a single object."""
        with self._lock:
            if not self.is_away and isinstance(error, StoreError) and error.transient:
                try:
                    within(LOOK_S, lambda: self._store.objects.head(keys.DESCRIPTOR))
                except StoreError:
                    self.is_away = True


ChunkJob: TypeAlias = tuple[str, Row]
"""A chunk to check, and the path of a file that names it."""
RunBatch: TypeAlias = Callable[[Sequence[ChunkJob]], "list[Damage]"]


def verify(
    store: Store,
    path: str = "",
    *,
    sample: float = 1.0,
    bandwidth: float | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    run_batch: RunBatch | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> VerifyReport:
    """Read and check every byte of a file, of all files below a directory, or of the whole store.

    The object tier's own bytes are read, even if this host has copies.

    Args:
        path: The file or directory. Empty for the whole store, where stray objects are found, too.
        sample: Share of the chunks to read, drawn at random, over 0 and at most 1. All records are read.
        bandwidth: Bytes of chunks per second at most, for all workers together; None for no limit.
        workers: How many batches of chunks the executor runs at once.
        executor: Runs batches of chunks. By default threads of this process do.
        run_batch: The function that the executor runs, with the result of `verify_chunks`. In another process it has to
            open the store itself.
        progress: Called from several threads with the raw bytes of each chunk that was checked, or of each batch.

    Raises:
        NotFoundError: Nothing is at ``path``.
        StoreError, ReadOnlyError: The object tier cannot be listed.
    """
    report = VerifyReport()
    bare = store.without_local_tiers()
    tier = _Tier(bare)
    seen: set[ChunkName] = set()
    pace = Pace(store.clock, bandwidth)
    draw = random.Random(int.from_bytes(store.random_bytes(8), "little"))

    def is_drawn() -> bool:
        return sample >= 1 or draw.random() < sample

    def batches() -> Iterator[list[ChunkJob]]:
        jobs: list[ChunkJob] = []
        for where, rows in _files(store, bare, path, report, tier):
            for row in rows:
                if row.name not in seen:
                    seen.add(row.name)
                    if is_drawn():
                        jobs.append((where, row))
            if len(jobs) >= BATCH:
                yield jobs
                jobs = []
        yield jobs

    def run(jobs: Sequence[ChunkJob]) -> list[Damage]:
        return verify_chunks(bare, jobs, pace=pace, progress=progress, tier=tier)

    def counted() -> Iterator[list[ChunkJob]]:
        for jobs in batches():
            report.chunks += len(jobs)
            size = sum(row.raw_length for _, row in jobs)
            report.raw_bytes += size
            if executor is not None:
                progress(size)
            yield jobs

    with Pool(workers, executor) as pool:
        for found in pool.map(run_batch or run, counted()):
            report.note(*found)
    report.damage.sort(key=lambda damage: (damage.path, damage.key))
    if tier.is_away:
        return report
    _name_others(store, bare, path, report)
    if not path:
        _check_rest(bare, seen, report, pace, is_drawn)
        from tierfs.store.maintenance.gc.mark import vanished_records  # noqa: PLC0415 - it loads NumPy

        found = vanished_records(bare)
        report.vanished = [Damage(each.path or each.key, each.key, each.kind, each.problem) for each in found]
    report.damage.sort(key=lambda damage: (damage.path, damage.key))
    return report


def verify_chunks(
    store: Store,
    jobs: Sequence[ChunkJob],
    *,
    pace: Pace,
    progress: Callable[[int], object] = lambda _: None,
    tier: _Tier | None = None,
) -> list[Damage]:
    """Read and check chunks of a store without local tiers. Return the problems of those that cannot be read."""
    tier = tier or _Tier(store)

    def check(job: ChunkJob) -> Damage | None:
        where, row = job
        if tier.is_away:
            return Damage(where, keys.chunk_key(row.name), StoreError.kind, "the object tier stopped answering before")
        pace.take(row.stored_length)
        try:
            with buffers().lend(row.raw_length) as out:
                fetch(store, row, [(0, out)], store.where(where))
        except (CorruptionError, FormatError, StoreError, ReadOnlyError) as error:
            tier.failed(error)
            return Damage(where, keys.chunk_key(row.name), error.kind, str(error))
        finally:
            progress(row.raw_length)
        return None

    return [found for found in transfers().map(check, jobs) if found is not None]


def _files(
    store: Store, bare: Store, path: str, report: VerifyReport, tier: _Tier
) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Yield path and chunks of every sound record, and report the others. ``bare`` is ``store`` without local tiers.

    It ends early if the object tier stops answering.
    """
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
        except (CorruptionError, FormatError, StoreError, ReadOnlyError) as error:
            report.note(Damage(where, key, error.kind, str(error)))
            tier.failed(error)
            if tier.is_away:
                return
        else:
            yield where, (*(record.rows if record.indirect else ()), *rows)


def _name_others(store: Store, bare: Store, path: str, report: VerifyReport) -> None:
    """Report a damaged chunk for every file that names it. It was read for the first of these files only.

    The records are read again for this, to avoid keeping in memory which file names which chunk.
    """
    damaged = {damage.key: damage for damage in report.damage if damage.key.startswith(keys.CHUNKS)}
    if not damaged:
        return
    for where, rows in _files(store, bare, path, VerifyReport(), _Tier(bare)):
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


def _check_rest(
    store: Store, seen: set[ChunkName], report: VerifyReport, pace: Pace, is_drawn: Callable[[], bool]
) -> None:
    """Check the objects that belong to no file.

    These are the descriptor, leases, condemned and reference lists, chunks that no file names, and stray objects.
    """

    def check(item: tuple[str, int]) -> None:
        key, size = item
        try:
            if not key.startswith(keys.CHUNKS):
                read_decoded(store.objects, key, OBJECT_BYTES_MAX, _check_content, key)
                return
            name = keys.parse_chunk_key(key, store.descriptor.digest_kind)
            if name in seen or not is_drawn():
                return
            pace.take(size)
            found = examine(store, name, size)
            if found is not None and not found.is_sound and not lacks_base(store, name, size):
                report.note(Damage(key, key, found.kind, found.problem))
        except NotFoundError:
            return  # deleted since the listing
        except TierfsError as error:
            report.note(Damage(key, key, error.kind, f"{store.where(key)}: {error}"))

    prefixes = (keys.CHUNKS, keys.LEASES, keys.GC, keys.REFERENCES)
    listed = [(item.key, item.size) for prefix in prefixes for item in objects_below(store.objects, prefix)]
    transfers().map(check, [(keys.DESCRIPTOR, 0), *listed])


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
