"""Repair objects that end with a checksum: records, leases, condemned lists, the collector's and scrub records.

Unrepairable objects are copied below ``.tierfs/lost/``, and deleted from their place afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, cast

from tierfs.digest import Buffer
from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.collector import COLLECTOR_BYTES_MAX, Collector
from tierfs.format.header import CHECKSUM_BYTES
from tierfs.format.lease import Condemned, Lease
from tierfs.format.manifest import TOMBSTONE_BYTES, Record, decode_record
from tierfs.format.scrubbed import SCRUB_BYTES_MAX, ScrubRecord
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.protocol import CREATE, ObjectInfo, Update, Version, objects_below
from tierfs.store.leases import LIST_BYTES_MAX
from tierfs.store.maintenance.gc_turn import MARGIN_NS, SECOND_NS, server_now
from tierfs.store.store import Store
from tierfs.store.tree.delete import bury
from tierfs.store.tree.directory import new_marker
from tierfs.store.tree.records import RECORD_BYTES_MAX, Observed, publish, read_record

ALIKE_BYTES_MAX = 32
_WRITE_ID = slice(16, 32)

Note = Callable[[str, str, str], object]
_logger = logging.getLogger("tierfs.repair")


class Mender:
    """Repairs sealed objects of one store.

    Args:
        store: The store, without its local tiers.
        replicas: Other copies of it.
        aside: Keeps objects that cannot be repaired; ``None`` for a dry run.
        mended: Called with a key, the problem, and the source of the right bytes.
        moved: Called with a key, the problem, and the key of the damaged bytes' copy.
        left: Called with a key, the problem, and the reason why nothing is done about it.

    Attributes:
        unwritten: In a dry run, the records that a repair would have put, by path.
    """

    def __init__(
        self, store: Store, replicas: Sequence[Store], aside: Aside | None, *, mended: Note, moved: Note, left: Note
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._aside = aside
        self._mended, self._moved, self._left = mended, moved, left
        self.unwritten: dict[str, Record] = {}

    def record(self, path: str, info: ObjectInfo) -> Record | None:
        """Read a record, and repair it if it is damaged.

        Returns:
            The record; ``None`` if it was deleted or cannot be repaired.

        Raises:
            StoreError, ReadOnlyError, CapacityError: The object tier failed.
        """
        store, key = self._store, info.key
        try:
            found, data, version, wrong = self._read(
                key, RECORD_BYTES_MAX, lambda data, where: decode_record(data, path, where)
            )
        except NotFoundError:
            return None
        except CorruptionError as error:  # no byte of it was read, so it cannot be kept aside
            self._left(key, str(error), "it cannot be quarantined; saving or deleting the file replaces it")
            return None
        if wrong is None:
            return cast("Record", found)
        problem = str(wrong)
        if isinstance(wrong, FormatError):
            self._left(key, problem, "a newer tierfs may have written it")
            return None
        for source, candidate in self._candidates(path, key, data):
            try:
                record = decode_record(candidate, path, store.where(key))
            except (CorruptionError, FormatError):
                continue
            # An error of the object tier ends the repair: a record whose right bytes are known must not be replaced by
            # a tombstone.
            if self._put(key, candidate, version):
                self._mended(key, problem, source)
            if self._aside is None:
                self.unwritten[path] = record
            return record
        try:
            return self._replace(path, key, data, version, problem)
        except (ConflictError, NotFoundError):
            return None  # another process saved it again

    def others(self) -> None:
        """Repair leases, condemned lists, and the collector's and scrub records."""
        for prefix in (keys.LEASES, keys.GC):
            for item in list(objects_below(self._store.objects, prefix)):
                self._other(item.key)
        self._other(keys.SCRUB)

    def _read(
        self, key: str, limit: int, decode: Callable[[bytes, str], Any]
    ) -> tuple[Any, bytes, Version, TierfsError | None]:
        """Return an object decoded, its bytes, its version, and the error if it cannot be decoded."""
        objects = self._store.objects
        try:
            found, info, data = read_decoded(objects, key, limit, decode, self._store.where(key))
        except (CorruptionError, FormatError) as error:
            data, info = objects.read(key, limit)
            return None, data, info.version, error
        return found, data, info.version, None

    def _other(self, key: str) -> None:
        limit, decode, then = _handling(key)
        if decode is None:
            return
        try:
            read_decoded(self._store.objects, key, limit, decode, self._store.where(key))
        except NotFoundError:
            return
        except FormatError as error:
            self._left(key, str(error), "a newer tierfs may have written it")
        except CorruptionError as error:
            self._give_up(key, str(error), then)

    def _give_up(self, key: str, problem: str, then: str) -> None:
        """Leave an unreadable object to gc, or move it aside if it is a condemned list and that is safe.

        All writers wait for an unreadable condemned list to disappear.
        """
        if not keys.is_condemned_key(key) or not self._is_gc_over():
            self._left(key, problem, then)
            return
        self.move(key, problem, LIST_BYTES_MAX)

    def move(self, key: str, problem: str, limit: int) -> None:
        """Move an object of at most ``limit`` bytes aside, unless another process changes it meanwhile.

        Raises:
            StoreError, ReadOnlyError, CapacityError: The object tier failed.
        """
        try:
            self._moved(key, problem, "" if self._aside is None else self._aside.move(key, limit))
        except CorruptionError as error:
            self._left(key, problem, str(error))
        except (NotFoundError, ConflictError):
            return  # another process changed it meanwhile

    def _is_gc_over(self) -> bool:
        """Return whether every gc sent its last request so long ago that it either took effect or never will."""
        store = self._store
        try:
            put_ns = store.objects.head(keys.COLLECTOR).modified_ns
        except NotFoundError:
            return False
        grace_ns = (store.descriptor.grace_s + store.descriptor.lease_s) * SECOND_NS + MARGIN_NS
        now_ns = store.clock.now_ns() if self._aside is None else server_now(store)  # `server_now` puts an object
        return now_ns - put_ns >= grace_ns

    def _candidates(self, path: str, key: str, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield candidates for the undamaged record with their sources, the most certain first."""
        known = None if self._store.host_records is None else self._store.host_records.newest(key)
        if known is not None and _is_alike(data, known[1]):
            yield "this host's copy of the record", known[1]
        for replica in self._replicas:
            with contextlib.suppress(NotFoundError, CorruptionError, FormatError):
                _, _, found = read_record(replica, path, key)
                if _is_alike(data, found):
                    yield replica.url, found

    def _replace(self, path: str, key: str, data: bytes, version: Version, problem: str) -> Record | None:
        """Replace a lost record: a marker by a new marker, any other record by a tombstone. Return the marker."""
        store, observed = self._store, Observed(path, key, None, version)
        marker = new_marker(store, version) if path.endswith("/") else None
        known_by = ""
        if len(data) == TOMBSTONE_BYTES:  # every live record is longer
            marker, known_by = None, "its size"
        elif marker is not None and _is_bare(data, replace(marker, previous="").encode(path)):
            known_by = "its name"
        target = ""
        if self._aside is not None:
            target = self._aside.copy(key, data)
            if marker is not None:
                publish(store, observed, marker)
            else:
                bury(store, observed)
        if known_by:
            self._mended(key, problem, known_by)
        else:
            self._moved(key, problem, target)
        return marker

    def _put(self, key: str, data: bytes, version: Version) -> bool:
        """Replace a damaged object. Return whether it was replaced, or would be in a dry run."""
        if self._aside is None:
            return True
        try:
            put_idempotent(self._store.objects, key, data, mode=Update(version))
        except ConflictError:
            return False
        return True


def _handling(key: str) -> tuple[int, Callable[[Buffer, str], Any] | None, str]:
    """Return the size limit of an object, its decoder, and what happens to it if it cannot be repaired."""
    if key == keys.COLLECTOR:
        return COLLECTOR_BYTES_MAX, Collector.decode, "gc creates it again"
    if key == keys.SCRUB:
        return SCRUB_BYTES_MAX, ScrubRecord.decode, "scrub creates it again"
    if key.startswith(keys.LEASES):
        return 4096, Lease.decode, "gc removes it when the longest lease has run out"
    if keys.is_condemned_key(key):
        return LIST_BYTES_MAX, Condemned.decode, "gc deletes no chunk because of it, and removes it after a grace"
    return 0, None, ""


def _is_bare(damaged: bytes, bare: bytes) -> bool:
    """Return whether a damaged marker had no attributes.

    It had none if there is no JSON between its fixed fields and its checksum, only the replaced version.
    """
    return len(damaged) >= len(bare) and not {*b"{}"} & {*damaged[len(bare) - CHECKSUM_BYTES : -CHECKSUM_BYTES]}


def _is_alike(damaged: bytes, candidate: bytes) -> bool:
    """Return whether a record may be the undamaged one: it has the same write id, or differs in few bytes."""
    if len(damaged) > _WRITE_ID.stop and damaged[_WRITE_ID] == candidate[_WRITE_ID]:
        return True
    if len(damaged) != len(candidate):
        return False
    return sum(a != b for a, b in zip(damaged, candidate, strict=True)) <= ALIKE_BYTES_MAX


class Aside:
    """The place where one repair keeps objects."""

    def __init__(self, store: Store) -> None:
        self._store = store
        moment = datetime.fromtimestamp(store.clock.now_ns() / 1e9, timezone.utc)
        self._prefix = f"{keys.LOST}{moment:%Y%m%dT%H%M%SZ}-{store.random_bytes(4).hex()}/"

    def copy(self, key: str, data: bytes) -> str:
        """Keep the bytes of an object; return the key of the copy."""
        target = self._prefix + key.removeprefix(f"{keys.PRIVATE}/")
        put_idempotent(self._store.objects, target, data, mode=CREATE)
        _logger.warning("%s is kept as %s", self._store.where(key), target)
        return target

    def move(self, key: str, limit: int) -> str:
        """Keep an object's bytes, and delete the object if it has not changed. Return the key of the copy.

        Raises:
            NotFoundError, ConflictError: The object was deleted before it was read, or changed meanwhile.
            CorruptionError: The object is larger than ``limit`` bytes, and stays.
            StoreError, ReadOnlyError, CapacityError: The object tier failed.
        """
        data, info = self._store.objects.read(key, limit)
        target = self.copy(key, data)
        with contextlib.suppress(NotFoundError):  # an earlier try deleted it, and its response was lost
            self._store.objects.delete_version(key, info.version)
        return target
