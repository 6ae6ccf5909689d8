"""What the records of a store reach.

A mark lists all records. Of a checkpoint it reads the reference list, if that speaks for just the versions that are there, and of
all others every live record. Other hosts go on meanwhile, so what it finds is not what was there at any one moment.
docs/decisions/0056 says why that does no harm: what the second mark is asked about is named by no new record.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tierfs.errors import CorruptionError, FormatError, NotFoundError, ReadOnlyError, TierfsError
from tierfs.format import keys
from tierfs.format.header import Kind
from tierfs.format.manifest import MANIFEST_BYTES_MAX, TOMBSTONE_BYTES, Manifest, decode_record
from tierfs.format.references import CHECK_BYTES, REFERENCES_BYTES_MAX, ReferenceList, record_check
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.maintenance.pool import Pool
from tierfs.store.store import Store
from tierfs.store.tree.references import is_root, names_of, parents_of, put_references
from tierfs.store.tree.walk import live_records

__all__ = ["Marked", "Unreadable", "is_below", "mark"]

BATCH = 256
ATTEMPTS = 3
# Lists under way at once take no more memory than this; of a larger one it is alone.
LIST_BYTES_AT_ONCE = 64 << 20


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record of which it cannot be told what it reaches.

    Attributes:
        path: Of the file.
        key: Of the record.
        kind: Category of the error.
        problem: In words.
    """

    path: str
    key: str
    kind: str
    problem: str


@dataclass(slots=True)
class Marked:
    """What a mark found.

    Attributes:
        reached: The chunk objects that something needs.
        files: Live records that were read, or that a reference list speaks for.
        by_list: Of those, the ones that a reference list speaks for.
        tombstones: Records of what was deleted.
        unreadable: If there are any, nothing may be condemned or deleted.
        passed_over: Those that a person said to do without.
        stale_lists: Reference lists of directories that are no checkpoints any more.
        made_lists: Reference lists that were missing or stale, and were made again.
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
    """Find out what all records need.

    Args:
        store: The store.
        pool: Sends the requests.
        without: Paths; a record at or below one of them that cannot be read reaches nothing.
        remake: Whether to make reference lists again where they are missing or stale.
        alive: Called again and again.
        progress: Called with what is counted, and how many more there are.

    Raises:
        StoreError: The object tier failed.
    """
    return _Mark(store.without_local_tiers(), pool, without, remake, alive, progress).run()


def is_below(path: str, root: str) -> bool:
    """Whether a path is, or lies below, another."""
    path, root = path.strip("/"), root.strip("/")
    return not root or path == root or path.startswith(f"{root}/")


@dataclass(frozen=True, slots=True)
class _Read:
    """What one record needs: encoded names, laid end to end; and the check of the version that was read."""

    names: bytes
    check: bytes


class _Mark:
    """One mark. Arguments as of `mark`."""

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
        self._checkpoints: set[str] = set()  # directories whose metadata was seen
        self._owners: dict[str, str | None] = {}  # by directory
        self._owned: dict[str, bytearray] = defaultdict(
            bytearray
        )  # checks of live records, by the directory that owns them

    def run(self) -> Marked:
        """Do it."""
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
        """Live records that no reference list can speak for. Of all others the versions are noted."""
        for item in objects_below(self._store.objects, keys.TREE):
            try:
                path = keys.parse_record_key(item.key)
            except FormatError:
                continue  # it belongs to nothing, FORMAT.md says
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
        """The innermost directory at or above this one that has a reference list, or is a checkpoint."""
        if directory not in self._owners:
            if directory in self._checkpoints or keys.references_key(directory) in self._lists:
                owner: str | None = directory
            else:
                owner = self._owner(directory.rpartition("/")[0]) if directory else None
            self._owners[directory] = owner
        return self._owners[directory]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _read_lists(self) -> list[str]:
        """Add what the reference lists say, and return the directories whose records have to be read."""
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
        """What the reference list of a directory says; ``None`` if it does not speak for just the records that are there."""
        store, key = self._store, keys.references_key(directory)
        try:
            data, _ = store.objects.read(key, REFERENCES_BYTES_MAX)
            found = ReferenceList.decode(data, store.where(key))
        except (NotFoundError, CorruptionError, FormatError):
            return None
        owned = self._owned[directory]
        there = b"".join(sorted(bytes(owned[at : at + CHECK_BYTES]) for at in range(0, len(owned), CHECK_BYTES)))
        is_it = (found.path, found.digest_kind, found.records) == (directory, store.descriptor.digest_kind, there)
        return found.names if is_it else None

    def _read_directory(self, directory: str) -> None:
        """Read the records of a directory one by one, and make its list again."""
        checks: list[bytes] = []
        names: set[bytes] = set()
        width = keys.name_bytes(self._store.descriptor.digest_kind)
        is_whole = directory in self._checkpoints

        def own() -> Iterator[tuple[str, ObjectInfo]]:
            nonlocal is_whole
            for path, info in live_records(self._store, directory):
                parents = list(parents_of(path, directory))
                if any(parent in self._owned for parent in parents):
                    continue  # they are read with that
                if is_root(path) and parents:
                    is_whole = False  # it was published since: then the list is to speak for less
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
        """Add what some records need; gives what each needs, ``None`` where it cannot be read or is not there any more."""
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
    """Groups whose sizes add up to no more than a limit; one that is larger is alone."""
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
    """What a record needs; ``None`` if it is not there any more."""
    for attempt in range(ATTEMPTS):
        version = info.version
        try:
            known = store.records.get(info.key)
            if known is not None and known[0] == version and attempt == 0:
                record = known[1]
            else:
                data, read = store.objects.read(info.key, MANIFEST_BYTES_MAX + 1024)
                version = read.version
                record = decode_record(data, path, store.where(info.key))
            check = record_check(info.key, version)
            if not isinstance(record, Manifest) or record.kind is not Kind.FILE:
                return _Read(b"", check)
            if record.digest_kind is not store.descriptor.digest_kind:
                raise FormatError(f"{store.where(info.key)}: {record.digest_kind.label} digests in a store with others")
            return _Read(b"".join(names_of(store, path, record)), check)
        except NotFoundError:
            return None
        except (CorruptionError, FormatError, ReadOnlyError) as error:
            # It may have been replaced meanwhile, and its table collected.
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
