"""The one mutable point: the record of a path, observed, then replaced if it has not changed.

FORMAT.md, "Changing a record". Every put of a record is conditional on the version, or the absence, that the operation
observed at its start. A random write id in the record tells whether a put took effect whose answer was lost. Nothing
here replaces a record that was not observed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.manifest import MANIFEST_BYTES_MAX, Manifest, Record, Tombstone, decode_record
from tierfs.host.pending.record import Draft, ObservedBase, SlotRef
from tierfs.objects.checksums import put_checked, read_decoded
from tierfs.objects.protocol import CREATE, ObjectInfo, Update, Version
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.host_records import NOT_THERE
from tierfs.threads import transfers

RECORD_BYTES_MAX = MANIFEST_BYTES_MAX + 1024
PUTS_MAX = 8  # of one record, each on a newer version with the same content
NO_BASE = ObservedBase()
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Observed:
    """The content of a path when it was observed.

    Attributes:
        path: The path, relative to the store. The path of a directory's marker ends with ``/``.
        key: Key of the record.
        record: The record, or None if there was none.
        version: Version of the record in the object tier, or None if there was none.
        draft: Write id, if the record is a draft of this host. None if it is in the object tier.
        slots: Slots of the draft's chunks in slabs.
        seen_s: Monotonic seconds right before the object tier was asked. Minus infinity if it was not asked.
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
        """The record, or None if it is absent or a tombstone."""
        return self.record if isinstance(self.record, Manifest) else None

    @property
    def is_tombstone(self) -> bool:
        """Whether the path was deleted, and garbage collection has not removed its record."""
        return isinstance(self.record, Tombstone)

    @property
    def write_id(self) -> bytes | None:
        return None if self.record is None else self.record.write_id


def nothing_at(path: str) -> Observed:
    """Return the observation that a path has no record. Sends no request.

    Raises:
        InvalidInputError: The path is invalid.
    """
    return Observed(path, keys.record_key(path), None, None)


def found_nothing(store: Store, path: str, key: str, seen_ns: int) -> Observed:
    """Return the observation that no record is at a key, where a look found none. Forget the record known there.

    ``seen_ns`` is the time before the look, of `time.time_ns`.
    """
    store.records.forget(key)
    if store.host_records is not None:
        store.host_records.forget(key, seen_ns)
    return Observed(path, key, None, None)


def observe(store: Store, path: str) -> Observed:
    """Return the record of a file: this host's newest draft, or else the record in the object tier.

    Raises:
        InvalidInputError: The path is invalid.
        CorruptionError, FormatError: The record is damaged, or of another version.
        StoreError, ReadOnlyError: The object tier failed.
    """
    return observe_draft(store, path) or _observe(store, path, keys.record_key(path))


def observe_to_read(store: Store, path: str) -> Observed:
    """Return the record of a file as `observe` does, or a newer change that other hosts hold until it is published.

    Such a change counts if it could be published now: it builds on the record, or on another such change.
    """
    there = observe(store, path)
    remote = store.tiers.remote if store.tiers is not None and there.draft is None else None
    held = [] if remote is None else list(remote.drafts(path))
    while (draft := next((each for each in held if _follows(each, there)), None)) is not None:
        held.remove(draft)
        there = Observed(path, there.key, draft.record, None, draft.write_id)
    return there


def _follows(draft: Draft, there: Observed) -> bool:
    base = draft.base
    if base.is_tombstone and there.record is None:
        return True  # garbage collection has removed the tombstone
    if base.write_id is not None:
        return there.write_id == base.write_id
    return there.draft is None and base.version == there.version


def held_at(store: Store, path: str, known: Collection[str]) -> dict[str, Manifest | None]:
    """Return the changes at and below ``path`` that other hosts hold and this host can read. None stands for a removal.

    Paths in ``known`` are left out.
    """
    remote = store.tiers.remote if store.tiers is not None else None
    names = [] if remote is None else [name for name in remote.paths_below(path) if name not in known]
    found = transfers().map(partial(observe_to_read, store), names)
    return {each.path: each.manifest for each in found if each.draft is not None}


def observe_draft(store: Store, path: str) -> Observed | None:
    """Return this host's newest draft of a file, if there is one. Sends no request."""
    pending = store.tiers.drafts.pending(path) if store.tiers is not None else None
    if pending is None:
        return None
    draft = pending.draft
    return Observed(path, keys.record_key(path), draft.record, None, draft.write_id, draft.slots)


def observe_to_replace(store: Store, path: str) -> Observed:
    """Observe a file that the caller replaces or deletes whatever its content is. Raises as `observe` does.

    A damaged record is logged and is no error: its file is lost already, and replacing the record heals the
    path.
    """
    return observe_draft(store, path) or observe_published(store, path)


def observe_published(store: Store, path: str) -> Observed:
    """Observe the record in the object tier, to replace it. A damaged record is logged and is no error."""
    key = keys.record_key(path)
    try:
        return _observe(store, path, key)
    except CorruptionError as error:
        info = store.objects.head(key)
        _logger.warning("a damaged record is being replaced: %s", error)
        return Observed(path, key, None, info.version)


def observe_to_stage(store: Store, path: str) -> Observed:
    """Observe a file whose change the caller leaves to the flusher, even while the object tier is unreachable.

    The version that this process or this host saw last then counts. If the path has changed since, the flusher finds
    out when it publishes, and keeps the change as a conflict.
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
    """Return the last seen version as the base of a write, because the object tier does not answer.

    This is logged and counted. The store must have local tiers.
    """
    assert store.tiers is not None
    store.tiers.counters.fall_back(
        "blind_writes",
        "the object tier does not answer; writes continue from the state that this host saw last: %s",
        error,
    )
    return last_seen(store, path)


def last_seen(store: Store, path: str) -> Observed:
    """Return the version in the object tier that a process of this host saw last. Sends no request."""
    key = keys.record_key(path)
    seen: tuple[Version, Record | None] | None = store.records.get(key)
    kept = None if store.host_records is None else store.host_records.newest(key)
    # Another process, such as the flusher, may have seen a later version than this one.
    if kept is not None and (seen is None or seen[0] != kept[0]):
        seen = None if kept[0] == NOT_THERE else (kept[0], _decode(store, kept[1], path, key) if kept[1] else None)
    return nothing_at(path) if seen is None else Observed(path, key, seen[1], seen[0])


def was_directory(store: Store, path: str) -> bool:
    """Return whether this host has seen a live record below ``path``. Sends no request."""
    if store.host_records is None:
        return False
    kept = store.host_records.below(keys.directory_prefix(path))
    return any(
        not data or isinstance(_decode(store, data, keys.parse_record_key(key), key), Manifest)
        for key, data in kept.items()
    )


def observe_marker(store: Store, path: str) -> Observed:
    """Observe the marker of a directory. Raises as `observe` does."""
    return _observe(store, f"{path}/", keys.marker_key(path))


def _observe(store: Store, path: str, key: str) -> Observed:
    seen_s, seen_ns = store.clock.monotonic(), time.time_ns()
    try:
        is_known = store.records.get(key) is not None
        found = observe_listed(store, path, store.objects.head(key)) if is_known else _read(store, path, key)
    except NotFoundError:
        return found_nothing(store, path, key, seen_ns)
    if store.host_records is not None:
        store.host_records.share(key)
    return replace(found, seen_s=seen_s)


def observe_listed(store: Store, path: str, info: ObjectInfo) -> Observed:
    """Observe a record whose version a listing or HEAD has returned. A version that was seen before costs no GET."""
    known = store.records.get(info.key)
    if known is not None and known[0] == info.version:
        return Observed(path, info.key, known[1], info.version)
    return _read(store, path, info.key)


def recall(store: Store, listed: Sequence[tuple[str, ObjectInfo]]) -> list[Record | None]:
    """Return the records that this host has seen of these paths in exactly these versions, in order, from its file.

    The entry is None for a version that the host has not seen.
    """
    kept = {} if store.host_records is None or not listed else store.host_records.find(info for _, info in listed)
    found: list[Record | None] = []
    for path, info in listed:
        record, data = None, kept.get(info.key)
        if data is not None:
            try:
                record = _decode(store, data, path, info.key)
            except (CorruptionError, FormatError) as error:
                _logger.warning("a record kept on this host is damaged and is fetched again: %s", error)
            else:
                store.records.remember(info.key, info.version, record, len(data))
        found.append(record)
    return found


def publish(
    store: Store, observed: Observed, record: Record, *, term: int | None = None, base: ObservedBase = NO_BASE
) -> Observed:
    """Replace the observed record in the object tier by ``record``, if it has not changed. Return the new state.

    A record with the same write id has not changed: ``tierfs gc --reencode`` gave other names to its chunks. Nor has a
    tombstone that garbage collection has removed: the path still has no file.

    Args:
        observed: The version that the record replaces.
        record: The record to put. Its field for the version that it replaces is filled in here.
        term: The lease in which the record's chunks were known to be in the store. None for a record without chunks.
        base: What a draft notes of the observed record. Needed only if ``observed`` has no record.

    Raises:
        ConflictError: Another writer changed the path since. That version stands.
        StoreError: The object tier failed. If the error is transient, the record may or may not be replaced. Also
            raised if the lease ran out, when nothing was changed, and if the put took so long that chunks were
            collected meanwhile.
        CapacityError, ReadOnlyError: Nothing was changed.
    """
    assert observed.draft is None, "a draft is replaced by a draft"
    if observed.record is not None:
        base = ObservedBase(None, observed.record.write_id, observed.is_tombstone)
    for attempt in range(PUTS_MAX):
        new = record.replacing(observed.version or "")
        data = new.encode(observed.path)
        if term is not None and not store.lease_cache.is_valid(term):
            raise StoreError(
                f"{store.where(observed.path)}: this process was paused for longer than its lease lasts "
                f"({store.descriptor.lease_s} s): nothing was published; try again",
                transient=True,
                path=observed.path,
                tier="object",
            )
        store.before_change()
        try:
            mode = CREATE if observed.version is None else Update(observed.version)
            version = put_checked(store.objects, observed.key, [data], mode=mode).version
        except (AlreadyExistsError, ConflictError) as error:
            found = _current(store, observed)
            if _is_put(found, observed, record):
                break
            is_same = base.is_tombstone if found.version is None else found.write_id == base.write_id is not None
            if not is_same or attempt + 1 == PUTS_MAX:
                raise ConflictError(
                    f"{store.where(observed.path)} was changed by another writer in the meantime: their version is kept; "
                    "this change was not made, or was already replaced; reload and try again",
                    path=observed.path,
                ) from error
            observed = found
        except StoreError as error:
            store.lease_cache.keep()
            if not error.transient or not _is_put(found := _current(store, observed), observed, record):
                raise
            break
        else:
            _remember(store, observed.key, version, new, data)
            found = Observed(observed.path, observed.key, new, version)
            break
    if term is not None and found.manifest is not None and store.lease_cache.is_too_late():
        _check_chunks(store, observed.path, found.manifest)
    return found


def _check_chunks(store: Store, path: str, manifest: Manifest) -> None:
    """Check, after a put that took longer than a grace, that no chunk of the record was collected."""
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


def _current(store: Store, observed: Observed) -> Observed:
    """Return what the object tier has at an observed path now. A damaged record counts as another writer's."""
    seen_ns = time.time_ns()
    try:
        return _read(store, observed.path, observed.key)
    except NotFoundError:
        return found_nothing(store, observed.path, observed.key, seen_ns)
    except CorruptionError:
        return replace(observed, record=None)


def _is_put(found: Observed, observed: Observed, record: Record) -> bool:
    """Return whether our own put of a record, whose answer is unknown, took effect."""
    return found.write_id == record.write_id and found.version != observed.version


def read_record(store: Store, path: str | None, key: str) -> tuple[Record, ObjectInfo, bytes]:
    """Read the record of a path, or of a directory's marker, past all caches. It is not kept. None is any path.

    Raises:
        NotFoundError, CorruptionError, FormatError, StoreError, ReadOnlyError: As `read_decoded`.
    """
    return read_decoded(
        store.objects, key, RECORD_BYTES_MAX, lambda data, _: _decode(store, data, path, key), path or key
    )


def _read(store: Store, path: str, key: str) -> Observed:
    seen_ns = time.time_ns()
    record, info, data = read_record(store, path, key)
    _remember(store, key, info.version, record, data, seen_ns)
    return Observed(path, key, record, info.version)


def _decode(store: Store, data: bytes, path: str | None, key: str) -> Record:
    where = store.where(key)
    record = decode_record(data, path, where)
    if isinstance(record, Manifest) and record.digest_kind is not store.descriptor.digest_kind:
        raise FormatError(
            f"{where}: the record has {record.digest_kind.label} digests, unlike the store", path=path or key
        )
    return record


def _remember(
    store: Store, key: str, version: Version, record: Record, data: bytes, seen_ns: int | None = None
) -> None:
    store.records.remember(key, version, record, len(data))
    if store.host_records is not None:
        store.host_records.add(key, version, data, seen_ns)
