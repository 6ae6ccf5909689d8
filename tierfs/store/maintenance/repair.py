"""Repair a store from its sound copies, move unrepairable objects aside, and report files that lost data.

Nothing is deleted: an object that is taken from its place is kept below ``.tierfs/lost/``. A chunk with one damaged
block stays, because its other blocks can be read. No record is rewritten for a chunk: a chunk object is healed under
its own name, or it is lost.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.envelope import BaseRange
from tierfs.format.keys import NO_RECIPE, ChunkName
from tierfs.format.manifest import TOMBSTONE_BYTES, Manifest, Row
from tierfs.format.upkeep import REFERENCES_BYTES_MAX, ReferenceList
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.maintenance.examine import OBJECT_BYTES_MAX, examine
from tierfs.store.maintenance.gc.mark import vanished_records
from tierfs.store.maintenance.gc.sweep import PREFIXES
from tierfs.store.maintenance.repair_chunks import Healer
from tierfs.store.maintenance.repair_records import NEWER, FileLoss, Mender, RepairReport
from tierfs.store.maintenance.scrub import read_scrub_record
from tierfs.store.read.fetch import bad_parts, fetch
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.records import RECORD_BYTES_MAX, observe_published
from tierfs.store.tree.references import is_root, write_references
from tierfs.threads import Pool

BATCH = 256
_logger = logging.getLogger("tierfs.repair")


def repair(
    store: Store,
    *,
    replicas: Sequence[Store] = (),
    damaged: Collection[str] = (),
    dry_run: bool = False,
    concurrency: int = 16,
    progress: Callable[[str, int], object] = lambda *_: None,
) -> RepairReport:
    """Repair a store without reading all chunks: `scrub` noted the damaged ones.

    Args:
        store: The store. The repair looks for bytes in its local tiers first.
        replicas: Other stores that may hold the same content.
        damaged: Keys of chunk objects that may be damaged, besides those that `scrub` noted.
        dry_run: Change nothing.
        concurrency: Most requests in flight.
        progress: Called with the name of a counter and its increase.

    Raises:
        StoreError, ReadOnlyError, CapacityError: The object tier failed. Another run does the rest.
    """
    with Pool(concurrency) as pool:
        return _Repair(store, replicas, damaged, dry_run, pool, progress).run()


class _Repair:
    """The state of one repair."""

    def __init__(
        self,
        store: Store,
        replicas: Sequence[Store],
        damaged: Collection[str],
        dry_run: bool,
        pool: Pool,
        progress: Callable[[str, int], object],
    ) -> None:
        self._store = bare = store.without_local_tiers()
        self._damaged = damaged
        self._pool = pool
        self._progress = progress
        self._report = RepairReport(dry_run)
        self._healer = Healer(store, replicas, dry_run=dry_run)
        bare_replicas = [replica.without_local_tiers() for replica in replicas]
        self._mender = Mender(bare, bare_replicas, dry_run, self._report)
        self._needed: dict[ChunkName, Row] = {}  # the lengths are 0 for an object that is only a base
        self._healed: set[ChunkName] = set()
        self._lost: set[ChunkName] = set()
        self._unreadable: dict[ChunkName, list[tuple[int, int]]] = {}  # parts of lost chunks
        self._checkpoints: list[str] = []
        self._tables: set[ChunkName] = set()  # chunks of unreadable tables, which were checked already
        self._is_blind = True  # whether a record that may name any chunk is unread

    def run(self) -> RepairReport:
        self._report.vanished = [each.path or each.key for each in vanished_records(self._store)]
        self._read_records()
        self._report.chunks = len(self._needed)
        self._check_chunks()
        if self._lost:
            self._list_losses()
        self._write_lists()
        return self._report

    # -- records -------------------------------------------------------------------------------------------------------

    def _read_records(self) -> None:
        def read(item: tuple[str, ObjectInfo]) -> tuple[str, Manifest, tuple[Row, ...] | None] | None:
            path, info = item
            record = self._mender.record(path, info)
            return (path, record, self._rows(path, record)) if isinstance(record, Manifest) else None

        for batch in self._listed(moves_strays=True):
            for path, manifest, rows in filter(None, self._pool.map(read, batch)):
                if is_root(path):
                    self._checkpoints.append(path.rpartition("/")[0])
                needed = self._heal_table(path, manifest) if rows is None else rows
                for row in (*(manifest.rows if manifest.indirect else ()), *needed):
                    self._needed[row.name] = row
                    for base in row.bases:
                        self._needed.setdefault(base, Row(base, 0, 0))
            self._report.records += len(batch)
            self._progress("records", len(batch))
        # Records that the mender and `_heal_table` cannot read are in `left`.
        self._is_blind = any(each.key.startswith(keys.TREE) for each in self._report.left)

    def _heal_table(self, path: str, manifest: Manifest) -> tuple[Row, ...]:
        """Heal the chunks of a file's unreadable row table, so that this run can check the chunks in the table."""
        for row in manifest.rows:
            if row.name in self._tables:
                continue
            self._tables.add(row.name)
            found = examine(self._store, row.name, row.stored_length)
            problem = "it is missing" if found is None else found.problem
            if problem:
                self._heal(row, problem)
        rows = self._rows(path, manifest)
        if rows is None:
            is_healed = self._report.dry_run and not any(row.name in self._lost for row in manifest.rows)
            reason = "a run without --dry-run heals it, then checks the chunks" if is_healed else NEWER
            self._report.leave(keys.record_key(path), "its table of chunks cannot be read", reason)
        return rows or ()

    def _listed(self, *, moves_strays: bool = False) -> Iterator[list[tuple[str, ObjectInfo]]]:
        def parsed() -> Iterator[tuple[str, ObjectInfo]]:
            for item in objects_below(self._store.objects, keys.TREE):
                try:
                    path = keys.parse_record_key(item.key)
                except FormatError as error:
                    if moves_strays:
                        self._mender.move(item.key, str(error), RECORD_BYTES_MAX)
                    continue
                yield path, item

        found = parsed()
        while batch := list(itertools.islice(found, BATCH)):
            yield batch

    def _rows(self, path: str, manifest: Manifest) -> tuple[Row, ...] | None:
        """Return the chunks of a file; ``None`` if its table cannot be read."""
        try:
            return expand_rows(self._store, manifest, path)
        except (CorruptionError, FormatError) as error:
            _logger.warning("the table of %s cannot be read: %s", self._store.where(path), error)
            return None

    def _write_lists(self) -> None:
        """Rebuild missing or damaged reference lists. gc replaces stale ones."""
        there = {item.key for item in objects_below(self._store.objects, keys.REFERENCES)}
        for directory in sorted(self._checkpoints):
            if any(keys.is_at_or_below(path, directory) for path in self._report.vanished):
                continue  # a list of what is left would hide the loss from gc
            key = keys.references_key(directory)
            problem = "" if key in there else "it is missing"
            if not problem:
                try:
                    where = self._store.where(key)
                    read_decoded(self._store.objects, key, REFERENCES_BYTES_MAX, ReferenceList.decode, where)
                except (NotFoundError, CorruptionError, FormatError) as error:
                    problem = str(error)
            if problem and (self._report.dry_run or write_references(self._store, directory)):
                self._report.mend(key, problem, "the records of the checkpoint")

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _check_chunks(self) -> None:
        known = {*read_scrub_record(self._store).damaged, *self._damaged}
        needed: dict[str, dict[str, ChunkName]] = defaultdict(dict)
        for name in self._needed:
            needed[name.digest.hex()[:2]][keys.chunk_key(name)] = name

        def listed(prefix: str) -> tuple[str, dict[str, int]]:
            items = objects_below(self._store.objects, f"{keys.CHUNKS}{prefix}/")
            return prefix, {item.key: item.size for item in items}

        encoded: list[tuple[Row, int | None]] = []  # checked after the objects that they are encoded against
        for prefix, there in self._pool.map(listed, PREFIXES):
            for key, name in needed[prefix].items():
                size = there.get(key)
                fits = size is not None and self._needed[name].stored_length in (0, size)
                if name in self._tables or (fits and key not in known):
                    continue
                row = self._with_lengths(name)
                if name.recipe == NO_RECIPE:
                    self._check(row, size)
                else:
                    encoded.append((row, size))
            for key, size in there.items():
                if key not in needed[prefix]:
                    self._look_at_others(key, size, is_known=key in known)
            self._progress("prefixes", 1)
        for row, size in sorted(encoded, key=lambda item: len(item[0].bases)):
            self._check(row, size)

    def _with_lengths(self, name: ChunkName) -> Row:
        """Return the row of a needed object.

        If no file names the object as a chunk, its lengths come from the envelope of an object that is encoded against
        it. They are 0 if no such envelope can be read.
        """
        if self._needed[name].stored_length:
            return self._needed[name]
        for row in self._dependents[name]:
            for base in self._bases_below(row.name, row.stored_length):
                if base.name == name:
                    bases = dict.fromkeys(each.name for each in self._healer.bases_of(name, base.stored_length))
                    return Row(name, base.raw_length, base.stored_length, tuple(bases))
        return self._needed[name]

    @cached_property
    def _dependents(self) -> dict[ChunkName, list[Row]]:
        found = defaultdict(list)
        for row in self._needed.values():
            for base in row.bases:
                found[base].append(row)
        return found

    def _bases_below(self, name: ChunkName, size: int) -> Iterator[BaseRange]:
        for base in self._healer.bases_of(name, size):
            yield base
            yield from self._bases_below(base.name, base.stored_length)

    def _check(self, row: Row, size: int | None) -> None:
        """Check a chunk object that may be damaged, and heal it if it is."""
        if size is None:
            problem = "it is missing"
        elif row.stored_length not in (0, size):
            problem = f"it has {size} bytes, but files state {row.stored_length}"
        elif self._report.dry_run and self._healed.intersection(row.bases):
            reason = "a run without --dry-run heals the base, then checks this"
            self._report.leave(keys.chunk_key(row.name), "its base is damaged", reason)
            return
        else:
            found = examine(self._store, row.name, size)
            problem = "" if found is None else found.problem
        if problem:
            self._heal(replace(row, stored_length=row.stored_length or size or 0), problem)

    def _heal(self, row: Row, problem: str) -> None:
        name, key = row.name, keys.chunk_key(row.name)
        source = self._healer.heal(name, row.stored_length, row.raw_length)
        if source:
            self._healed.add(name)
            self._report.mend(key, problem, source)
            return
        self._lost.add(name)
        try:
            found = examine(self._store, name, self._store.objects.head(key).size)
        except NotFoundError:
            found = None
        if found is None:
            self._report.leave(key, problem, "no source can restore it")
        elif found.raw_length and found.kind != FormatError.kind:
            self._report.leave(key, problem, "its sound blocks can still be read")
        else:
            self._move(key, problem, found.kind)

    def _move(self, key: str, problem: str, kind: str) -> None:
        """Move a chunk object aside, unless a newer tierfs may read it or an unreadable record may name it."""
        if self._is_blind:
            self._report.leave(key, problem, "a record that may name it cannot be read")
        elif kind == FormatError.kind:
            self._report.leave(key, problem, NEWER)
        else:
            self._mender.move(key, problem, OBJECT_BYTES_MAX)

    def _look_at_others(self, key: str, size: int, *, is_known: bool) -> None:
        """Check an object that no file needs: it is garbage, which gc deletes, or no chunk at all."""
        try:
            name = keys.parse_chunk_key(key, self._store.descriptor.digest_kind)
        except FormatError as error:
            self._move(key, str(error), "")
            return
        found = examine(self._store, name, size) if is_known else None
        if found is not None and not found.is_sound:
            self._move(key, found.problem, found.kind)

    # -- losses --------------------------------------------------------------------------------------------------------

    def _list_losses(self) -> None:
        """List the files that need a lost object, or an object that is encoded against one."""
        stranded = {name for name, row in self._needed.items() if self._lost.intersection(row.bases)} - self._lost
        for key in sorted(map(keys.chunk_key, stranded)):
            self._report.leave(key, "its base is lost", "no source can restore the base")
        gone = self._lost | stranded
        for path, manifest, rows in self._manifests():
            table = tuple(keys.chunk_key(row.name) for row in manifest.rows if manifest.indirect and row.name in gone)
            if table:
                self._report.lost.append(FileLoss(path, ((0, manifest.length),), table))
                continue
            starts = itertools.accumulate((row.raw_length for row in rows or ()), initial=0)
            lost = [(start, row) for start, row in zip(starts, rows or (), strict=False) if row.name in gone]
            ranges = tuple((start + at, size) for start, row in lost for at, size in self._bad_parts(row))
            if ranges:
                at_fault = tuple(dict.fromkeys(keys.chunk_key(row.name) for _, row in lost))
                self._report.lost.append(FileLoss(path, ranges, at_fault))

    def _manifests(self) -> Iterator[tuple[str, Manifest, tuple[Row, ...] | None]]:
        for batch in self._listed():
            for path, info in batch:
                if path.endswith("/") or info.size == TOMBSTONE_BYTES:
                    continue
                record = self._mender.unwritten.get(path)
                try:
                    record = record or observe_published(self._store, path).record
                except FormatError:
                    continue
                if isinstance(record, Manifest):
                    yield path, record, self._rows(path, record)

    def _bad_parts(self, row: Row) -> list[tuple[int, int]]:
        """Return offset and length of the parts of a lost chunk that cannot be read."""
        if row.name not in self._unreadable:
            where = self._store.where(keys.chunk_key(row.name))

            def read(at: int, out: memoryview) -> None:
                fetch(self._store, row, [(at, out)], where, exact=True)

            self._unreadable[row.name] = [(at, size) for at, size, _ in bad_parts(read, row.raw_length)]
        return self._unreadable[row.name]
