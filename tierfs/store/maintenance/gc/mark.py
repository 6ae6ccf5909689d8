"""Find the chunk objects that the records of a store reach.

A mark lists all records. It reads a checkpoint's reference list if that covers exactly the current versions, and
otherwise every live record. Other hosts keep writing meanwhile, so the result is not the state of any single moment.
docs/decisions/0056 says why that is safe: no new record names a chunk that the second mark is asked about.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tierfs.errors import CorruptionError, FormatError, NotFoundError, ReadOnlyError, TierfsError
from tierfs.format import keys
from tierfs.format.header import Kind
from tierfs.format.manifest import TOMBSTONE_BYTES, Manifest
from tierfs.format.references import CHECK_BYTES, REFERENCES_BYTES_MAX, ReferenceList, record_check
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.maintenance.pool import Pool
from tierfs.store.store import Store
from tierfs.store.tree.records import read_record
from tierfs.store.tree.references import is_root, names_of, parents_of, put_references
from tierfs.store.tree.walk import live_records

BATCH = 256
ATTEMPTS = 3
# Reference lists in flight together take at most this much memory; a larger list is read alone.
LIST_BYTES_AT_ONCE = 64 << 20


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An unreadable record: the chunks that it reaches are unknown.

    Attributes:
        path: Path of the file.
        key: Key of the record.
        kind: Category of the error.
        problem: The error in words.
    """

    path: str
    key: str
    kind: str
    problem: str


@dataclass(slots=True)
class Marked:
    """The result of a mark.

    Attributes:
        reached: The chunk objects that a record needs.
        files: Live records that were read, or that a reference list covers.
        by_list: Live records that a reference list covers.
        tombstones: Records of deleted paths.
        unreadable: Unreadable records. If there are any, nothing may be condemned or deleted.
        passed_over: Unreadable records that the user excused.
        stale_lists: Reference lists of directories that are no longer checkpoints.
        made_lists: Reference lists that were missing or stale, and were rebuilt.
    """

    reached: NameSet
    files: int = 0
    by_list: int = 0
    tombstones: list[ObjectInfo] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    passed_over: list[Unreadable] = field(default_factory=list)
    stale_lists: list[ObjectInfo] = field(default_factory=list)
    made_lists: int = 0


def mark(
    store: Store,
    pool: Pool,
    *,
    without: Sequence[str] = (),
    remake: bool = False,
    alive: Callable[[], object] = lambda: None,
    progress: Callable[[str, int], object] = lambda *_: None,
) -> Marked:
    """Find the chunk objects that all records need.

    Args:
        store: The store.
        pool: Sends the requests.
        without: Paths. An unreadable record at or below one of them reaches nothing.
        remake: Whether to rebuild missing or stale reference lists.
        alive: Called regularly.
        progress: Called with the name of a counter and its increase.

    Raises:
        StoreError: The object tier failed.
    """
    return _Mark(store.without_local_tiers(), pool, without, remake, alive, progress).run()


def is_below(path: str, root: str) -> bool:
    """Return whether ``path`` is ``root`` or lies below it."""
    path, root = path.strip("/"), root.strip("/")
    return not root or path == root or path.startswith(f"{root}/")


@dataclass(frozen=True, slots=True)
class _Read:
    """The chunks that one record needs, and the check of the version that was read.

    Attributes:
        names: Encoded names of chunk objects, laid end to end.
        check: See `tierfs.format.references.record_check`.
    """

    names: bytes
    check: bytes


class _Mark:
    """The state of one mark. The arguments are those of `mark`."""

    def __init__(
        self,
        store: Store,
        pool: Pool,
        without: Sequence[str],
        remake: bool,
        alive: Callable[[], object],
        progress: Callable[[str, int], object],
    ) -> None:
        self._store = store
        self._pool = pool
        self._without = without
        self._remake = remake
        self._alive = alive
        self._progress = progress
        self._found = Marked(NameSet(keys.name_bytes(store.descriptor.digest_kind)))
        self._lists = {item.key: item for item in objects_below(store.objects, keys.REFERENCES)}
        self._checkpoints: set[str] = set()  # directories whose metadata file was seen
        self._owners: dict[str, str | None] = {}  # see `_owner`, by directory
        self._owned: dict[str, bytearray] = defaultdict(
            bytearray
        )  # checks of live records, by the directory that owns them

    def run(self) -> Marked:
        for batch in _batches(self._unowned(), BATCH):
            self._alive()
            for _ in self._add(batch):
                pass
            self._progress("records", len(batch))
        left = self._read_lists()
        for directory in left:
            self._alive()
            self._read_directory(directory)
        kept = {keys.references_key(directory) for directory in self._checkpoints}
        self._found.stale_lists = [item for key, item in self._lists.items() if key not in kept]
        return self._found

    def _unowned(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield the live records that no reference list can cover. Collect the checks of all others in `_owned`."""
        for item in objects_below(self._store.objects, keys.TREE):
            try:
                path = keys.parse_record_key(item.key)
            except FormatError:
                continue  # not the key of a record: FORMAT.md says to ignore it
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
        sizes = {directory: self._lists[keys.references_key(directory)].size for directory in listed}
        for group in _by_size(sorted(listed, key=sizes.__getitem__), sizes, LIST_BYTES_AT_ONCE):
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
        owned = self._owned[directory]
        there = b"".join(sorted(bytes(owned[at : at + CHECK_BYTES]) for at in range(0, len(owned), CHECK_BYTES)))
        is_it = (found.path, found.digest_kind, found.records) == (directory, store.descriptor.digest_kind, there)
        return found.names if is_it else None

    def _read_directory(self, directory: str) -> None:
        """Read the records of a directory one by one, and rebuild its list."""
        checks: list[bytes] = []
        names: set[bytes] = set()
        width = keys.name_bytes(self._store.descriptor.digest_kind)
        is_whole = directory in self._checkpoints

        def own() -> Iterator[tuple[str, ObjectInfo]]:
            nonlocal is_whole
            for path, info in live_records(self._store, directory):
                parents = list(parents_of(path, directory))
                if any(parent in self._owned for parent in parents):
                    continue  # these records are read with that directory
                if is_root(path) and parents:
                    is_whole = False  # a checkpoint below was published meanwhile: the list must not cover its records
                yield path, info

        for batch in _batches(own(), BATCH):
            for outcome in self._add(batch):
                if outcome is None:
                    is_whole = False
                    continue
                checks.append(outcome.check)
                names.update(outcome.names[at : at + width] for at in range(0, len(outcome.names), width))
            self._progress("records", len(batch))
        if self._remake and is_whole:
            self._found.made_lists += put_references(self._store, directory, checks, names)

    # -- records -------------------------------------------------------------------------------------------------------

    def _add(self, batch: list[tuple[str, ObjectInfo]]) -> Iterator[_Read | None]:
        """Add the chunks that these records need. Yield each record's result; ``None`` if it is unreadable or gone."""
        found = self._found
        for outcome in self._pool.map(lambda item: _read_record(self._store, *item), batch):
            if isinstance(outcome, Unreadable):
                excused = any(is_below(outcome.path, root) for root in self._without)
                (found.passed_over if excused else found.unreadable).append(outcome)
                yield None
            elif outcome is not None:
                found.files += 1
                found.reached.add(outcome.names)
                yield outcome
            else:
                yield None


def _batches(items: Iterator[tuple[str, ObjectInfo]], size: int) -> Iterator[list[tuple[str, ObjectInfo]]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _by_size(ordered: Iterable[str], sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Yield groups whose total size is at most ``limit``; a larger item is a group of its own."""
    group: list[str] = []
    total = 0
    for name in ordered:
        if group and (total + sizes[name] > limit or len(group) >= BATCH):
            yield group
            group, total = [], 0
        group.append(name)
        total += sizes[name]
    if group:
        yield group


def _read_record(store: Store, path: str, info: ObjectInfo) -> _Read | Unreadable | None:
    """Read the names of the chunks that a record needs; ``None`` if the record is gone."""
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
                return _Read(b"", check)
            return _Read(b"".join(names_of(store, path, record)), check)
        except NotFoundError:
            return None
        except (CorruptionError, FormatError, ReadOnlyError) as error:
            # The record may have been replaced meanwhile, and the chunks of its table collected.
            if attempt + 1 < ATTEMPTS and _was_replaced(store, info.key, version):
                continue
            return _unreadable(path, info.key, error)
    raise AssertionError("every attempt returns")


def _was_replaced(store: Store, key: str, version: str) -> bool:
    try:
        return store.objects.head(key).version != version
    except NotFoundError:
        return True


def _unreadable(path: str, key: str, error: TierfsError) -> Unreadable:
    return Unreadable(path, key, error.kind, str(error))
