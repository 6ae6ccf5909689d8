"""Repair the records of paths, and keep aside the objects that cannot be repaired.

An object that is moved aside is copied below ``.tierfs/lost/``, and deleted from its place afterwards. gc and scrub
replace their own damaged objects: leases, condemned lists, the collector's and scrub records.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.header import CHECKSUM_BYTES, HEADER_BYTES
from tierfs.format.manifest import TOMBSTONE_BYTES, Record, decode_record
from tierfs.objects.checksums import put_idempotent, twice
from tierfs.objects.protocol import CREATE, ObjectInfo, Update, Version
from tierfs.store.store import Store
from tierfs.store.tree.directory import new_marker
from tierfs.store.tree.records import RECORD_BYTES_MAX, Observed, publish, read_record
from tierfs.store.write.staging import bury

ALIKE_BYTES_MAX = 32
NEWER = "a newer tierfs may have written it"
_NOTHING_READ = "it cannot be quarantined; saving or deleting the file replaces it"
_WRITE_ID, _RANDOM = slice(16, 32), slice(16, 24)  # the rest of a write id may be that of the host
_logger = logging.getLogger("tierfs.repair")


@dataclass(frozen=True, slots=True)
class RepairItem:
    """An action of a repair, or one that is still necessary.

    Attributes:
        key: The object concerned.
        problem: The problem, in words.
        how: The source of the right bytes, the key of the damaged bytes' copy, or the reason why nothing is done.
    """

    key: str
    problem: str
    how: str


@dataclass(frozen=True, slots=True)
class FileLoss:
    """The data that a file has lost.

    Attributes:
        path: Path of the file.
        ranges: Offset and length of each part that cannot be read.
        keys: The chunk objects at fault.
    """

    path: str
    ranges: tuple[tuple[int, int], ...]
    keys: tuple[str, ...]


@dataclass(slots=True)
class RepairReport:
    """The findings and actions of a repair.

    Attributes:
        dry_run: Whether nothing was changed: objects listed as mended or moved would be.
        records: Records that were read.
        chunks: Chunk objects that files need.
        mended: Objects that are sound again.
        moved: Objects that could not be saved, and where they are kept.
        left: Objects that were left unchanged, and why.
        vanished: Files whose record vanished without a tombstone, or the directory or key that shows that some have.
        lost: Files of which a part cannot be read. A file whose record was moved is in ``moved`` instead.
    """

    dry_run: bool = False
    records: int = 0
    chunks: int = 0
    mended: list[RepairItem] = field(default_factory=list)
    moved: list[RepairItem] = field(default_factory=list)
    left: list[RepairItem] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    lost: list[FileLoss] = field(default_factory=list)

    def mend(self, key: str, problem: str, source: str) -> None:
        self.mended.append(RepairItem(key, problem, source))

    def leave(self, key: str, problem: str, reason: str) -> None:
        self.left.append(RepairItem(key, problem, reason))

    @property
    def lost_files(self) -> list[str]:
        """The files whose record is lost: it was moved, or no byte of it can be read."""
        found = []
        for each in (*self.moved, *(left for left in self.left if left.how == _NOTHING_READ)):
            if each.key.startswith(keys.TREE):
                try:
                    found.append(keys.parse_record_key(each.key))
                except FormatError:
                    continue  # not the key of a record
        return found

    @property
    def losses(self) -> int:
        """The number of files that have lost data."""
        return len(self.lost) + len(self.lost_files) + len(self.vanished)

    @property
    def unread(self) -> list[RepairItem]:
        """The records that could not be read, or whose table could not. Nothing is known about the data of these files."""
        return [each for each in self.left if each.key.startswith(keys.TREE) and each.how != _NOTHING_READ]

    @property
    def is_whole(self) -> bool:
        """Whether every record was read, and no file has lost data."""
        return not (self.losses or self.unread)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values. ``rewritten`` is empty: no record is rewritten for a chunk."""
        return {**asdict(self), "rewritten": [], "lost_files": self.lost_files, "whole": self.is_whole}


class Mender:
    """Repairs records of one store, and moves objects aside.

    Args:
        store: The store, without its local tiers.
        replicas: Other copies of it.
        dry_run: Change nothing.
        report: Gets what was done.

    Attributes:
        unwritten: In a dry run, the records that a repair would have put, by path.
    """

    def __init__(self, store: Store, replicas: Sequence[Store], dry_run: bool, report: RepairReport) -> None:
        self._store = store
        self._replicas = replicas
        self._dry_run = dry_run
        self._report = report
        moment = datetime.fromtimestamp(store.clock.now_ns() / 1e9, timezone.utc)
        self._aside = f"{keys.LOST}{moment:%Y%m%dT%H%M%SZ}-{store.random_bytes(4).hex()}/"
        self.unwritten: dict[str, Record] = {}

    def record(self, path: str, info: ObjectInfo) -> Record | None:
        """Read a record, and repair it if it is damaged.

        Returns:
            The record; ``None`` if it was deleted or cannot be repaired.

        Raises:
            StoreError, ReadOnlyError, CapacityError: The object tier failed.
        """
        store, key = self._store, info.key
        where = store.where(key)
        data, version = b"", None

        def read() -> Record:
            nonlocal data, version
            version = None
            data, found = store.objects.read(key, RECORD_BYTES_MAX)
            version = found.version
            return decode_record(data, path, where)

        try:
            return twice(read)
        except NotFoundError:
            return None
        except (CorruptionError, FormatError) as error:
            problem, is_newer = str(error), isinstance(error, FormatError)
        if version is None:  # no byte of it was read, so it cannot be kept aside
            self._report.leave(key, problem, _NOTHING_READ)
            return None
        for source, candidate in self._candidates(path, key, data):
            try:
                record = decode_record(candidate, path, where)
            except (CorruptionError, FormatError):
                continue
            if is_newer and candidate[HEADER_BYTES:] != data[HEADER_BYTES:]:
                continue
            # An error of the object tier ends the repair: a record whose right bytes are known must not be replaced by
            # a tombstone.
            if self._put(key, candidate, version):
                self._report.mend(key, problem, source)
            if self._dry_run:
                self.unwritten[path] = record
            return record
        if is_newer:  # no copy shows that its header is damaged
            self._report.leave(key, problem, NEWER)
            return None
        try:
            return self._replace(path, key, data, version, problem)
        except (ConflictError, NotFoundError):
            return None  # another process saved it again

    def move(self, key: str, problem: str, limit: int) -> None:
        """Move an object of at most ``limit`` bytes aside, unless another process changes it meanwhile.

        Raises:
            StoreError, ReadOnlyError, CapacityError: The object tier failed.
        """
        try:
            target = "" if self._dry_run else self._move(key, limit)
        except CorruptionError as error:
            self._report.leave(key, problem, str(error))
        except (NotFoundError, ConflictError):
            return  # another process changed it meanwhile
        else:
            self._report.moved.append(RepairItem(key, problem, target))

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
        marker = new_marker(store) if path.endswith("/") else None
        known_by = ""
        if len(data) == TOMBSTONE_BYTES:  # every live record is longer
            marker, known_by = None, "its size"
        elif marker is not None and _is_bare(data, marker.encode(path)):
            known_by = "its name"
        target = ""
        if not self._dry_run:
            target = self._copy(key, data)
            if marker is not None:
                publish(store, observed, marker)
            else:
                bury(store, observed)
        if known_by:
            self._report.mend(key, problem, known_by)
        else:
            self._report.moved.append(RepairItem(key, problem, target))
        return marker

    def _copy(self, key: str, data: bytes) -> str:
        """Keep the bytes of an object; return the key of the copy."""
        target = self._aside + key.removeprefix(f"{keys.PRIVATE}/")
        put_idempotent(self._store.objects, target, data, mode=CREATE)
        _logger.warning("%s is kept as %s", self._store.where(key), target)
        return target

    def _move(self, key: str, limit: int) -> str:
        """Keep an object's bytes, and delete the object if it has not changed. Return the key of the copy."""
        data, info = self._store.objects.read(key, limit)
        target = self._copy(key, data)
        with contextlib.suppress(NotFoundError):  # an earlier try deleted it, and its response was lost
            self._store.objects.delete_version(key, info.version)
        return target

    def _put(self, key: str, data: bytes, version: Version) -> bool:
        """Replace a damaged object. Return whether it was replaced, or would be in a dry run."""
        if self._dry_run:
            return True
        try:
            put_idempotent(self._store.objects, key, data, mode=Update(version))
        except ConflictError:
            return False
        return True


def _is_bare(damaged: bytes, bare: bytes) -> bool:
    """Return whether a damaged marker had no attributes.

    It had none if there is no JSON between its fixed fields and its checksum, only the replaced version.
    """
    return len(damaged) >= len(bare) and not {*b"{}"} & {*damaged[len(bare) - CHECKSUM_BYTES : -CHECKSUM_BYTES]}


def _is_alike(damaged: bytes, candidate: bytes) -> bool:
    """Return whether a record may be the undamaged one: it has the same write id, or differs in few bytes."""
    if len(damaged) >= _RANDOM.stop and candidate[_WRITE_ID].startswith(damaged[_WRITE_ID]):
        return True
    if len(damaged) != len(candidate):
        return False
    return sum(a != b for a, b in zip(damaged, candidate, strict=True)) <= ALIKE_BYTES_MAX
