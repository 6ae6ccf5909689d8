"""What the records of a store reach.

A mark reads a listing of all records and every live one in it. Other hosts go on meanwhile, so what it finds is not what was there at
any one moment. docs/decisions/0056 says why that does no harm: what the second mark is asked about is named by no new record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tierfs.errors import CorruptionError, FormatError, NotFoundError, ReadOnlyError, TierfsError
from tierfs.format import keys
from tierfs.format.header import Kind
from tierfs.format.manifest import MANIFEST_BYTES_MAX, TOMBSTONE_BYTES, Manifest, decode_record
from tierfs.objects.protocol import ObjectInfo
from tierfs.store.maintenance.names import NameSet, encode_names
from tierfs.store.maintenance.pool import Pool
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store

__all__ = ["Marked", "Unreadable", "is_below", "mark"]

BATCH = 256
ATTEMPTS = 3


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
        files: Live records that were read.
        tombstones: Records of what was deleted.
        unreadable: If there are any, nothing may be condemned or deleted.
        passed_over: Those that a person said to do without.
    """

    reached: NameSet
    files: int = 0
    tombstones: list[ObjectInfo] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    passed_over: list[Unreadable] = field(default_factory=list)


def mark(
    store: Store,
    pool: Pool,
    *,
    without: Sequence[str] = (),
    alive: Callable[[], object] = lambda: None,
    progress: Callable[[str, int], object] = lambda *_: None,
) -> Marked:
    """Read all records.

    Args:
        store: The store.
        pool: Sends the requests.
        without: Paths; a record at or below one of them that cannot be read reaches nothing.
        alive: Called again and again.
        progress: Called with what is counted, and how many more there are.

    Raises:
        StoreError: The object tier failed.
    """
    bare = store.without_local_tiers()
    found = Marked(NameSet(store.descriptor.digest_kind.size + 12))
    live = _live(store, found)
    while batch := list(itertools.islice(live, BATCH)):
        alive()
        for outcome in pool.map(lambda item: _names(bare, *item), batch):
            if isinstance(outcome, Unreadable):
                excused = any(is_below(outcome.path, root) for root in without)
                (found.passed_over if excused else found.unreadable).append(outcome)
            elif outcome is not None:
                found.files += 1
                found.reached.add(outcome)
        progress("records", len(batch))
    return found


def is_below(path: str, root: str) -> bool:
    """Whether a path is, or lies below, another."""
    path, root = path.strip("/"), root.strip("/")
    return not root or path == root or path.startswith(f"{root}/")


def _live(store: Store, found: Marked) -> Iterator[tuple[str, ObjectInfo]]:
    for item in store.objects.list(keys.TREE):
        if not isinstance(item, ObjectInfo):
            continue
        try:
            path = keys.parse_record_key(item.key)
        except FormatError:
            continue  # it belongs to nothing, FORMAT.md says
        if item.size == TOMBSTONE_BYTES:
            found.tombstones.append(item)
        else:
            yield path, item


def _names(store: Store, path: str, info: ObjectInfo) -> bytes | Unreadable | None:
    """The chunk objects that a record needs; ``None`` if it is not there any more."""
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
            if not isinstance(record, Manifest) or record.kind is not Kind.FILE:
                return b""
            if record.digest_kind is not store.descriptor.digest_kind:
                raise FormatError(f"{store.where(info.key)}: {record.digest_kind.label} digests in a store with others")
            rows = (*(record.rows if record.indirect else ()), *expand_rows(store, record, path))
            return encode_names(name for row in rows for name in (row.name, *row.bases))
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
