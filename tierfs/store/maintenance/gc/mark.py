"""Find the chunk objects that the records of a store reach.

A mark lists all records. It reads a checkpoint's reference list if that covers exactly the current versions, and
otherwise every live record. A deletion leaves a tombstone, so a record that vanished without one was lost: the mark
finds that in reference lists and in the metadata of checkpoints; `RecordLosses` finds the rest. Other hosts keep
writing meanwhile, so the result is not the state of any single moment.
docs/decisions/0056 says why that is safe: no new record names a chunk that the second mark is asked about.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from tierfs.errors import CorruptionError, FormatError, NotFoundError, ReadOnlyError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT, SaveMark, is_part
from tierfs.format.header import Kind
from tierfs.format.keys import inside
from tierfs.format.manifest import TOMBSTONE_BYTES, Manifest
from tierfs.format.upkeep import CHECK_BYTES, REFERENCES_BYTES_MAX, ReferenceList, record_check
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.announced_saves import PENDING, AnnouncedSaves
from tierfs.store.maintenance.examine import Damage
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.maintenance.gc.record_losses import VANISHED, RecordLosses
from tierfs.store.maintenance.gc_turn import SECOND_NS, read_collector
from tierfs.store.store import Store
from tierfs.store.tree.records import observe_listed, read_record
from tierfs.store.tree.references import is_root, names_of, parents_of, put_references, root_list
from tierfs.store.tree.walk import live_path
from tierfs.threads import Pool

BATCH = 256
ATTEMPTS = 3


_Item = TypeVar("_Item")
ListedShard: TypeAlias = tuple[str, ObjectInfo, int]
"""A shard file: its path, its record, and its length in bytes."""


@dataclass(slots=True)
class Marked:
    """The result of a mark.

    Attributes:
        reached: The chunk objects that a record needs.
        files: Live records that were read, or that a reference list covers.
        by_list: Live records that a reference list covers.
        records: Records that were listed, tombstones included.
        tombstones: Records of deleted paths, except those that a checkpoint's metadata names.
        losses: Unreadable and vanished records. If the user did not excuse all, nothing may be condemned or deleted.
        stale_lists: Reference lists of directories that are no longer checkpoints, or that cover other records and
            could not be rebuilt.
        made_lists: Reference lists that were missing or stale, and were rebuilt.
        replaced: Shard files older than their checkpoint that neither it nor an announced save names: path, record,
            and length.
        unfinished: Other shard files that no checkpoint names.
    """

    reached: NameSet
    losses: RecordLosses
    files: int = 0
    by_list: int = 0
    records: int = 0
    tombstones: list[ObjectInfo] = field(default_factory=list)
    stale_lists: list[ObjectInfo] = field(default_factory=list)
    made_lists: int = 0
    replaced: list[ListedShard] = field(default_factory=list)
    unfinished: list[ListedShard] = field(default_factory=list)


def mark(
    store: Store,
    pool: Pool,
    *,
    without: Sequence[str] = (),
    remake: bool = False,
    records_min: int = 0,
    is_old: Callable[[int], bool] = lambda _: True,
    ignored: Container[str] = frozenset(),
    alive: Callable[[], object] = lambda: None,
    progress: Callable[[str, int], object] = lambda *_: None,
) -> Marked:
    """Find the chunk objects that all records need.

    Args:
        store: The store.
        pool: Sends the requests.
        without: Paths. An unreadable or vanished record at or below one of them reaches nothing.
        remake: Whether to rebuild missing or stale reference lists.
        records_min: How many records there are at least, unless some have vanished.
        is_old: Returns whether an object that was put at this time is older than a grace.
        ignored: Paths of files that count as deleted.
        alive: Called regularly.
        progress: Called with the name of a counter and its increase.

    Raises:
        StoreError: The object tier failed.
    """
    return _Mark(
        store.without_local_tiers(), pool, without, remake, records_min, is_old, ignored, alive, progress
    ).run()


def vanished_records(store: Store, *, concurrency: int = 16) -> list[Damage]:
    """Return what shows that records of a store have vanished. Takes the requests of a mark; changes nothing.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    now_ns, grace_ns = store.clock.now_ns(), store.descriptor.grace_s * SECOND_NS
    try:
        records_min = read_collector(store)[0].last.get("records", 0)
    except FormatError:  # verify and repair tell of this record themselves
        records_min = 0
    with Pool(concurrency) as pool:
        found = mark(store, pool, records_min=records_min, is_old=lambda put_ns: now_ns - put_ns > grace_ns)
    return [each for each in found.losses.unexcused if each.kind == VANISHED]


@dataclass(frozen=True, slots=True)
class _CheckedRecord:
    """The chunks that one record needs, and the check of the version that was read.

    Attributes:
        names: Encoded names of chunk objects, laid end to end.
        check: See `tierfs.format.upkeep.record_check`.
        part_bytes: Length of a shard file; None for any other file.
    """

    names: bytes
    check: bytes
    part_bytes: int | None = None


class _Mark:
    """The state of one mark. The arguments are those of `mark`."""

    def __init__(
        self,
        store: Store,
        pool: Pool,
        without: Sequence[str],
        remake: bool,
        records_min: int,
        is_old: Callable[[int], bool],
        ignored: Container[str],
        alive: Callable[[], object],
        progress: Callable[[str, int], object],
    ) -> None:
        self._store = store
        self._pool = pool
        self._remake = remake
        self._records_min = records_min
        self._ignored = ignored
        self._alive = alive
        self._progress = progress
        self._losses = RecordLosses(store, without, is_old)
        self._found = Marked(NameSet(keys.name_bytes(store.descriptor.digest_kind)), self._losses)
        self._lists = {item.key: item for item in objects_below(store.objects, keys.REFERENCES)}
        self._announced = AnnouncedSaves(store)
        self._checkpoints: set[str] = set()  # directories whose metadata file was seen
        self._covered: dict[str, int] = {}  # number of records in lists that cover more than was listed, by directory
        self._unsettled: set[str] = set()  # keys of lists that cover other records and were not rebuilt
        self._kept_tombstones: set[str] = set()  # keys
        self._unnamed: list[ListedShard] = []  # shard files newer than the checkpoint in their directory
        self._owners: dict[str, str | None] = {}  # see `_owner`, by directory
        self._owned: dict[str, bytearray] = defaultdict(
            bytearray
        )  # checks of live records, by the directory that owns them

    def run(self) -> Marked:
        for batch in _batches(self._unowned(), BATCH):
            self._alive()
            for (path, info), outcome in zip(batch, self._add(batch), strict=True):
                if outcome is not None and outcome.part_bytes is not None:
                    self._found.unfinished.append((path, info, outcome.part_bytes))
            self._progress("records", len(batch))
        left = self._read_lists()
        for directory in left:
            self._alive()
            self._read_directory(directory)
        self._read_lost()
        # A directory that lists its files in any order may list them before the metadata of their checkpoint.
        unfinished = self._found.unfinished
        self._found.unfinished = [part for part in unfinished if part[0].rpartition("/")[0] not in self._checkpoints]
        self._found.unfinished += self._unnamed
        self._settle()
        return self._found

    def _settle(self) -> None:
        """Find the lists and tombstones that may go, and the checkpoints and records that vanished."""
        found = self._found
        kept = {keys.references_key(directory) for directory in self._checkpoints} - self._unsettled
        found.stale_lists = [item for key, item in self._lists.items() if key not in kept]
        explained = {root_list(item.key) for item in found.tombstones} | self._unsettled
        self._losses.check_lists(item for item in found.stale_lists if item.key not in explained)
        self._losses.check_count(found.records, self._records_min)
        found.tombstones = [item for item in found.tombstones if item.key not in self._kept_tombstones]

    def _read_lost(self) -> None:
        """Add the chunks of the sound records that a repair moved aside, until the user deletes them."""
        for item in self._losses.list_records(keys.LOST):
            if item.key.split("/")[3:4] != ["tree"]:
                continue
            outcome = _read_record(self._store, None, item)
            if isinstance(outcome, _CheckedRecord):  # the repair told of all others
                self._found.files += 1
                self._found.reached.add(outcome.names)

    def _unowned(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield the live records that no reference list can cover. Collect the checks of all others in `_owned`."""
        for item in self._losses.list_records():
            try:
                path = keys.parse_record_key(item.key)
            except FormatError:
                continue  # not the key of a record: FORMAT.md says to ignore it
            self._found.records += 1
            if item.size == TOMBSTONE_BYTES:
                self._found.tombstones.append(item)
                continue
            parent = path.rstrip("/") if path.endswith("/") else path.rpartition("/")[0]
            if is_root(path) and parent not in self._checkpoints:
                self._checkpoints.add(parent)
                self._owners.clear()
            owner = self._owner(parent)
            if owner is None:
                yield path, item
            else:
                self._owned[owner] += record_check(item.key, item.version)

    def _owner(self, directory: str) -> str | None:
        """Return the innermost directory at or above this one that is a checkpoint or has a reference list."""
        if directory not in self._owners:
            if directory in self._checkpoints or keys.references_key(directory) in self._lists:
                owner: str | None = directory
            else:
                owner = self._owner(directory.rpartition("/")[0]) if directory else None
            self._owners[directory] = owner
        return self._owners[directory]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _read_lists(self) -> list[str]:
        """Add the names in valid reference lists. Return the directories whose records have to be read."""
        left = [directory for directory in self._owned if keys.references_key(directory) not in self._lists]
        listed = [directory for directory in self._owned if keys.references_key(directory) in self._lists]
        for group in _batches(iter(listed), BATCH):
            self._alive()
            for directory, names in zip(group, self._pool.map(self._listed_names, group), strict=True):
                if names is None:
                    left.append(directory)
                    continue
                count = len(self._owned[directory]) // CHECK_BYTES
                self._found.files += count
                self._found.by_list += count
                self._found.reached.add(names)
            self._progress("reference lists", len(group))
        return left

    def _listed_names(self, directory: str) -> bytes | None:
        """Return the names in a directory's reference list; ``None`` if it does not cover exactly the live records."""
        store, key = self._store, keys.references_key(directory)
        try:
            found, _, _ = read_decoded(store.objects, key, REFERENCES_BYTES_MAX, ReferenceList.decode, store.where(key))
        except (NotFoundError, CorruptionError, FormatError):
            return None
        if (found.path, found.digest_kind) != (directory, store.descriptor.digest_kind):
            return None
        owned = self._owned[directory]
        there = b"".join(sorted(bytes(owned[at : at + CHECK_BYTES]) for at in range(0, len(owned), CHECK_BYTES)))
        if found.records == there:
            return found.names
        if len(found.records) > len(owned):
            self._covered[directory] = len(found.records) // CHECK_BYTES
        return None

    def _count_vanished(self, directory: str) -> int:
        """Return how many records that a directory's list covers have vanished, at least: the others left a record."""
        if directory not in self._covered:
            return 0
        # Listed later than the list was read: a save may have rewritten the list since the first listing.
        found = sum(1 for _ in objects_below(self._store.objects, keys.directory_prefix(directory)))
        return self._covered[directory] - found

    def _read_directory(self, directory: str) -> None:
        """Read the records of a directory one by one, and rebuild its list."""
        checks: list[bytes] = []
        names: set[bytes] = set()
        width = keys.name_bytes(self._store.descriptor.digest_kind)
        is_whole = directory in self._checkpoints
        pending: set[str] = set()
        files: dict[str, ObjectInfo] = {}  # the files in the directory itself, by name
        parts: list[ListedShard] = []

        def own() -> Iterator[tuple[str, ObjectInfo]]:
            nonlocal is_whole
            for info in self._losses.list_records(keys.directory_prefix(directory)):
                if (path := live_path(info)) is None:
                    continue
                parents = list(parents_of(path, directory))
                if any(parent in self._owned for parent in parents):
                    continue  # these records are read with that directory
                if is_root(path) and parents:
                    is_whole = False  # a checkpoint below was published meanwhile: the list must not cover its records
                yield path, info

        for batch in _batches(own(), BATCH):
            for (path, info), outcome in zip(batch, self._add(batch), strict=True):
                parent, _, name = path.rpartition("/")
                if parent == inside(directory, PENDING):
                    pending.add(path)
                if parent == directory:
                    files[name] = info
                if outcome is None:
                    is_whole = False
                    continue
                if parent == directory and outcome.part_bytes is not None:
                    parts.append((path, info, outcome.part_bytes))
                checks.append(outcome.check)
                names.update(outcome.names[at : at + width] for at in range(0, len(outcome.names), width))
            self._progress("records", len(batch))
        if directory not in self._checkpoints:
            return
        is_whole = self._compare(directory, pending, files, parts) and is_whole
        if self._remake and is_whole:
            is_whole = put_references(self._store, directory, checks, names)
            self._found.made_lists += is_whole
        if not is_whole:
            self._unsettled.add(keys.references_key(directory))

    def _compare(
        self, directory: str, pending: set[str], files: dict[str, ObjectInfo], parts: list[ListedShard]
    ) -> bool:
        """Compare a checkpoint's files with those that its metadata and its list name.

        ``pending`` has the paths of its announced saves. Return whether a new list may cover what is there.
        """
        root, gone = inside(directory, ROOT), 0
        saves = [found for _, found in self._announced.find(directory)] if parts else []
        announced = frozenset().union(*map(self._announced.files, saves))  # before the metadata that follows
        is_listed = pending <= {found.path for found in saves}  # else the endpoint may have left out a save
        named = self._named(root, files.get(ROOT))
        unnamed = [part for part in parts if named and part[0].rpartition("/")[2] not in named | announced]
        for part in unnamed:
            # A file older than the metadata is of a save that another one replaced. Others may be of a save under way.
            is_over = is_listed and part[1].modified_ns < files[ROOT].modified_ns
            (self._found.replaced if is_over else self._unnamed).append(part)
        missing = named - files.keys()
        for path in sorted(inside(directory, name) for name in missing):
            key = keys.record_key(path)
            try:
                self._store.objects.head(key)
                self._kept_tombstones.add(key)
            except NotFoundError:
                gone += 1
                self._losses.vanished(path, key, f"{root} names it")
        if (count := self._count_vanished(directory)) <= gone:
            return not missing and not unnamed
        why = f"its reference list covers {count} more records than are left"
        return self._losses.vanished(directory or root, keys.references_key(directory), why) and not missing

    def _named(self, path: str, root: ObjectInfo | None) -> frozenset[str]:
        """Return the names of the files in a checkpoint's metadata; none if no save of tierfs put it there.

        A copy of the metadata may be there without the files that it names, while a directory is being copied.
        """
        if root is None:
            return frozenset()  # removed meanwhile
        try:
            found = observe_listed(self._store, path, root)
            if found.manifest is None or found.version != root.version:
                return frozenset()
            return self._announced.files(found) if SaveMark.of(found.manifest.metadata) else frozenset()
        except (NotFoundError, CorruptionError, FormatError):
            return frozenset()  # replaced meanwhile, or torch's own; `checkpoint ls` shows it if it is damaged

    # -- records -------------------------------------------------------------------------------------------------------

    def _add(self, batch: list[tuple[str, ObjectInfo]]) -> Iterator[_CheckedRecord | None]:
        """Add the chunks that these records need. Yield each record's result; ``None`` if it is unreadable or gone."""
        found = self._found
        outcomes = self._pool.map(lambda item: _read_record(self._store, *item), batch)
        for (path, _), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Damage):
                self._losses.note(outcome)
                yield None
            elif outcome is not None and path not in self._ignored:
                found.files += 1
                found.reached.add(outcome.names)
                yield outcome
            else:
                yield None


def _batches(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _read_record(store: Store, path: str | None, info: ObjectInfo) -> _CheckedRecord | Damage | None:
    """Read the names of the chunks that a record needs; ``None`` if the record is gone.

    ``path`` is None for a record that a repair moved aside: it may be of any path.
    """
    named = info.key if path is None else path
    for attempt in range(ATTEMPTS):
        version = info.version
        try:
            known = store.records.get(info.key)
            if known is not None and known[0] == version and attempt == 0:
                record = known[1]
            else:
                record, read, _ = read_record(store, path, info.key)
                version = read.version
            check = record_check(info.key, version)
            if not isinstance(record, Manifest) or record.kind is not Kind.FILE:
                return _CheckedRecord(b"", check)
            part_bytes = record.length if is_part(record.metadata) else None
            return _CheckedRecord(b"".join(names_of(store, named, record)), check, part_bytes)
        except NotFoundError:
            return None
        except (CorruptionError, FormatError, ReadOnlyError) as error:
            # The record may have been replaced meanwhile, and the chunks of its table collected.
            if attempt + 1 < ATTEMPTS and _was_replaced(store, info.key, version):
                continue
            return Damage(named, info.key, error.kind, str(error))
    raise AssertionError("every attempt returns")


def _was_replaced(store: Store, key: str, version: str) -> bool:
    try:
        return store.objects.head(key).version != version
    except NotFoundError:
        return True
