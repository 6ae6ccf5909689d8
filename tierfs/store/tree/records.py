"""The one mutable point: the record of a path, observed and then replaced on condition that it is still that one.

FORMAT.md, "Changing a record". Every put of a record is conditional on the version, or the absence, that the
operation observed when it was asked for. A random write id in the record settles what happened to a put whose answer
was lost. Nothing here ever replaces a record that was not observed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.manifest import MANIFEST_BYTES_MAX, Manifest, Record, decode_record
from tierfs.host.pending.record import SlotRef
from tierfs.objects.checksums import put_checked
from tierfs.objects.protocol import CREATE, ObjectInfo, Update, Version
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store

__all__ = [
    "Observed",
    "blindly",
    "nothing_at",
    "observe",
    "observe_draft",
    "observe_listed",
    "observe_marker",
    "observe_published",
    "observe_to_replace",
    "observe_to_stage",
    "publish",
    "recall",
]

_READ_MAX = MANIFEST_BYTES_MAX + 1024
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Observed:
    """The content of a path when it was looked at.

    Attributes:
        path: The path, relative to the store; for a directory's marker it ends with ``/``.
        key: Where its record lies.
        record: The record, or ``None`` where there was none.
        version: The record's in the object tier, or ``None`` where there was none.
        draft: Write id of the draft of this host that the record is, or ``None`` where the object tier has it.
        slots: That draft's: where slabs hold its chunks.
        seen_s: Monotonic seconds before the object tier was asked, if it was; what was seen since then counts from there.
    """

    path: str
    key: str
    record: Record | None
    version: Version | None
    draft: bytes | None = None
    slots: tuple[SlotRef | None, ...] = ()
    seen_s: float = field(default=float("-inf"), compare=False)

    @property
    def manifest(self) -> Manifest | None:
        """The record, unless it is absent or a tombstone."""
        return self.record if isinstance(self.record, Manifest) else None

    @property
    def previous(self) -> str:
        """The note of the earlier version in a record that replaces this one."""
        return self.version or ""


def nothing_at(path: str) -> Observed:
    """The content of a path where no record is. Asks nobody.

    Raises:
        InvalidInputError: The path is no good.
    """
    return Observed(path, keys.record_key(path), None, None)


def observe(store: Store, path: str) -> Observed:
    """Look at the record of a file: this host's newest draft of it, else what the object tier has.

    Raises:
        InvalidInputError: The path is no good.
        CorruptionError, FormatError: The record is damaged, or of another version.
        StoreError, ReadOnlyError: The object tier failed.
    """
    return observe_draft(store, path) or _observe(store, path, keys.record_key(path))


def observe_draft(store: Store, path: str) -> Observed | None:
    """This host's newest draft of a file; it needs nobody to be asked."""
    pending = store.tiers.drafts.pending(path) if store.tiers is not None else None
    if pending is None:
        return None
    draft = pending.draft
    return Observed(path, keys.record_key(path), draft.record, None, draft.write_id, draft.slots)


def observe_to_replace(store: Store, path: str) -> Observed:
    """The same for who is about to replace or delete the file whatever it holds.

    A damaged record is then no error but a warning: its file is lost already, and replacing it is what heals the path.
    """
    return observe_draft(store, path) or observe_published(store, path)


def observe_published(store: Store, path: str) -> Observed:
    """The object tier's version, to be replaced."""
    key = keys.record_key(path)
    try:
        return _observe(store, path, key)
    except CorruptionError as error:
        info = store.objects.head(key)
        _logger.warning("a damaged record is being replaced: %s", error)
        return Observed(path, key, None, info.version)


def observe_to_stage(store: Store, path: str) -> Observed:
    """The same for who leaves the change to the flusher, so that it can be made while the object tier is down.

    Then what this process or this host last saw of the path counts. If it is something else by now, the change is
    found out when it is to be published, and kept as a conflict.
    """
    draft = observe_draft(store, path)
    if draft is not None:
        return draft
    try:
        if store.tiers is None:
            return observe_published(store, path)
        return ask_briefly(store, lambda: observe_published(store, path))
    except StoreError as error:
        if not error.transient or store.tiers is None:
            raise
        return blindly(store, path, error)


def blindly(store: Store, path: str, error: StoreError) -> Observed:
    """The base of a write while the object tier cannot be asked; logged and counted. The store has local tiers."""
    assert store.tiers is not None
    store.tiers.counters.fall_back(
        "blind_writes", "the object tier cannot be asked what it holds, writes go on: %s", error
    )
    return last_seen(store, path)


def last_seen(store: Store, path: str) -> Observed:
    """The version of a path that this process, or else this host, saw last in the object tier. Asks nobody."""
    key = keys.record_key(path)
    seen = store.records.get(key)
    if seen is None and store.host_records is not None:
        kept = store.host_records.newest(key)
        seen = None if kept is None else (kept[0], _decode(store, kept[1], path, key))
    return nothing_at(path) if seen is None else Observed(path, key, seen[1], seen[0])


def observe_marker(store: Store, path: str) -> Observed:
    """Look at the marker of a directory. Raises as `observe` does."""
    return _observe(store, f"{path}/", keys.marker_key(path))


def _observe(store: Store, path: str, key: str) -> Observed:
    seen_s = store.clock.monotonic()
    try:
        if store.records.get(key) is not None:
            return replace(observe_listed(store, path, store.objects.head(key)), seen_s=seen_s)
        return replace(_read(store, path, key), seen_s=seen_s)
    except NotFoundError:
        return Observed(path, key, None, None)


def observe_listed(store: Store, path: str, info: ObjectInfo) -> Observed:
    """The same where a listing or HEAD has told the version already: no GET for a version seen before."""
    known = store.records.get(info.key)
    if known is not None and known[0] == info.version:
        return Observed(path, info.key, known[1], info.version)
    return _read(store, path, info.key)


def recall(store: Store, listed: Sequence[tuple[str, ObjectInfo]]) -> list[Record | None]:
    """What other processes of this host have seen of these paths in just these versions, in order; ``None`` where nobody has."""
    kept = {} if store.host_records is None or not listed else store.host_records.find(info for _, info in listed)
    found: list[Record | None] = []
    for path, info in listed:
        record, data = None, kept.get(info.key)
        if data is not None:
            try:
                record = _decode(store, data, path, info.key)
            except (CorruptionError, FormatError) as error:
                _logger.warning("a record kept on this host is damaged and fetched anew: %s", error)
            else:
                store.records.remember(info.key, info.version, record, len(data))
        found.append(record)
    return found


def publish(store: Store, observed: Observed, record: Record, *, term: int | None = None) -> Observed:
    """Replace what was observed in the object tier by ``record``, if it is there still.

    Args:
        store: The store.
        observed: The replaced version.
        record: The new one.
        term: The lease in which its chunks were known to be in the store; ``None`` for a record without any.

    Returns:
        The path as it is now.

    Raises:
        ConflictError: Somebody else changed the path since; theirs stands.
        StoreError: The object tier failed. If it is transient, the record may or may not have been replaced. Or the lease ran
            out: nothing was changed then; or the put took so long that chunks were collected meanwhile.
        CapacityError, ReadOnlyError: Nothing was changed.
    """
    assert observed.draft is None, "a draft is replaced by a draft"
    data = [record.encode(observed.path)]
    mode = CREATE if observed.version is None else Update(observed.version)
    if term is not None and not store.lease_cache.is_valid(term):
        raise StoreError(
            f"{store.where(observed.path)}: this process stood still for longer than its lease lasts "
            f"({store.descriptor.lease_s} s): nothing was published; try again",
            transient=True,
            path=observed.path,
            tier="object",
        )
    try:
        version = put_checked(store.objects, observed.key, data, mode=mode).version
    except (AlreadyExistsError, ConflictError) as error:
        found = _find_own(store, observed, record)
        if found is None:
            raise ConflictError(
                f"{store.where(observed.path)} was changed by another writer in the meantime: theirs stands, "
                "this change was not made, or was replaced already; reload and try again",
                path=observed.path,
            ) from error
    except StoreError as error:
        found = _find_own(store, observed, record) if error.transient else None
        if found is None:
            raise
    else:
        _remember(store, observed.key, version, record, data[0])
        found = Observed(observed.path, observed.key, record, version)
    if term is not None and found.manifest is not None and store.lease_cache.is_too_late():
        _check_chunks(store, observed.path, found.manifest)
    return found


def _check_chunks(store: Store, path: str, manifest: Manifest) -> None:
    """After a put that took longer than a grace: whether garbage collection has left what the record names."""
    try:
        for name in dict.fromkeys(name for row in manifest.rows for name in (row.name, *row.bases)):
            store.objects.head(keys.chunk_key(name))
    except NotFoundError as error:
        raise StoreError(
            f"{store.where(path)} was published more than a grace ({store.descriptor.grace_s} s) after its chunks were "
            f"looked up, and one was collected meanwhile: write the file again: {error}",
            path=path,
            tier="object",
        ) from error


def _find_own(store: Store, observed: Observed, record: Record) -> Observed | None:
    """The record that stands there now, if our own put made it. A damaged one is somebody else's.

    The replaced version does not count: repair keeps the write id of a record that names other chunks with the same bytes.
    So the record that is found may differ from ours, too.
    """
    try:
        current = _read(store, observed.path, observed.key)
    except (NotFoundError, CorruptionError):
        return None
    if current.version == observed.version or current.record is None or current.record.write_id != record.write_id:
        return None
    return current


def _read(store: Store, path: str, key: str) -> Observed:
    data, info = store.objects.read(key, _READ_MAX)
    record = _decode(store, data, path, key)
    _remember(store, key, info.version, record, data)
    return Observed(path, key, record, info.version)


def _decode(store: Store, data: bytes, path: str, key: str) -> Record:
    where = store.where(key)
    record = decode_record(data, path, where)
    if isinstance(record, Manifest) and record.digest_kind is not store.descriptor.digest_kind:
        raise FormatError(f"{where}: {record.digest_kind.label} digests in a store with others", path=path)
    return record


def _remember(store: Store, key: str, version: Version, record: Record, data: bytes) -> None:
    store.records.remember(key, version, record, len(data))
    if store.host_records is not None:
        store.host_records.add(key, version, data)
