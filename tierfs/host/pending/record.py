"""A draft: the record of a file that was closed on this host and is not in the object tier yet.

It lies in a slab, and once it has reached the nvme tier in ``nvme.db`` and the arena. It is private to the host: a
newer tierfs refuses one of another version by name instead of guessing (docs/reference/local-tiers.md).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierfs import digest
from tierfs.errors import CorruptionError, FormatError
from tierfs.format.manifest import Manifest, Record, Tombstone, decode_record

if TYPE_CHECKING:
    from tierfs.host.slab.segment import Slot

__all__ = ["DRAFT_VERSION", "Draft", "ObservedBase", "SlotRef", "foreign_name", "local_name"]

DRAFT_VERSION = 1
_MAGIC = b"TFSDRAFT"
_HEAD = struct.Struct("<8sHHIII")
_SLOT = struct.Struct("<16sIQ")
_NO_SLOT = (bytes(16), 0, 0)
_CHECKSUM_BYTES = 16
_FOREIGN = 0xF0


@dataclass(frozen=True, slots=True)
class ObservedBase:
    """The version that a write observed at its path; it is published on condition that this is still there.

    Attributes:
        version: The record's in the object tier; ``None`` where there was none.
        write_id: The draft's that was pending at the path then; ``None`` where there was none. It takes precedence.
    """

    version: str | None = None
    write_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot of a segment, and which of the slot's lives is meant.

    Attributes:
        segment: The segment's id, 32 hexadecimal digits.
        index: The slot's.
        serial: Its life's.
    """

    segment: str
    index: int
    serial: int

    @classmethod
    def of(cls, slot: Slot) -> SlotRef:
        """The reference to a slot in the life that it was looked up in."""
        return cls(slot.segment.id, slot.index, slot.serial)


@dataclass(frozen=True, slots=True)
class Draft:
    """A change of one path, not published yet.

    Attributes:
        path: Relative to the store.
        record: The record to publish. A manifest's rows have a stored length of 0 where their chunk is not known to
            be in the object tier yet; a tombstone's check is filled in when it is published.
        base: The version that it replaces.
        slots: Per row of a manifest, which slot holds its chunk for this draft; ``None`` for a chunk that lies elsewhere.
        after: Write id of a draft that has to be published before, wherever it lies: a file that was moved is there
            before it is gone where it was.
        boot: The run of the kernel in which it was closed.
        stamp_ns: When, on that run's monotonic clock: what drafts are published in the order of.
    """

    path: str
    record: Record
    base: ObservedBase
    slots: tuple[SlotRef | None, ...] = ()
    after: bytes | None = None
    boot: str = ""
    stamp_ns: int = 0

    @property
    def write_id(self) -> bytes:
        """Names this change: 16 random bytes."""
        return self.record.write_id

    @property
    def length(self) -> int:
        """Bytes of the file; 0 for a removal."""
        return self.record.length if isinstance(self.record, Manifest) else 0

    @property
    def names(self) -> tuple[bytes, ...]:
        """Local names of the chunks, in order."""
        if isinstance(self.record, Tombstone):
            return ()
        kind = self.record.digest_kind
        return tuple(local_name(kind, row.name.digest) for row in self.record.rows)

    def turn(self, boot: str, number: int = 0) -> tuple[int, int, int]:
        """When it was closed, as something to compare.

        Args:
            boot: The run of the kernel now. Drafts of an earlier one come first.
            number: Its number in the nvme tier, which those are ordered by.
        """
        if self.boot != boot:
            return (0, number, 0)
        return (1, self.stamp_ns, int.from_bytes(self.write_id[:8], "big"))

    def encode(self) -> bytes:
        """The bytes that a slab and ``nvme.db`` hold."""
        base: dict[str, str] = {}
        if self.base.version is not None:
            base["version"] = self.base.version
        if self.base.write_id is not None:
            base["write_id"] = self.base.write_id.hex()
        after = self.after.hex() if self.after is not None else ""
        closed = {"boot": self.boot, "stamp_ns": self.stamp_ns}
        head = json.dumps({"path": self.path, "base": base, "after": after, **closed}).encode()
        record = self.record.encode(self.path)
        out = bytearray(_HEAD.pack(_MAGIC, DRAFT_VERSION, 0, len(head), len(record), len(self.slots)))
        out += head + record
        for slot in self.slots:
            known = _NO_SLOT if slot is None else (bytes.fromhex(slot.segment), slot.index, slot.serial)
            out += _SLOT.pack(*known)
        return bytes(out) + digest.checksum(out)

    @classmethod
    def decode(cls, data: bytes | memoryview, where: str) -> Draft:
        """Read a draft.

        Raises:
            CorruptionError: Damaged or cut short.
            FormatError: Written by another version of tierfs.
        """
        view = memoryview(data)
        if len(view) < _HEAD.size + _CHECKSUM_BYTES:
            raise CorruptionError(f"{where}: a draft of {len(view)} bytes was cut short", path=where)
        magic, version, _, head_length, record_length, slot_count = _HEAD.unpack_from(view)
        if magic == _MAGIC and version != DRAFT_VERSION:
            raise FormatError(
                f"{where}: a draft of version {version}, and this tierfs reads {DRAFT_VERSION}: let the tierfs that "
                "wrote it finish (`tierfs wait URL`)",
                path=where,
            )
        total = _HEAD.size + head_length + record_length + slot_count * _SLOT.size
        if magic != _MAGIC or total + _CHECKSUM_BYTES > len(view):
            raise CorruptionError(f"{where}: no draft, or one that was cut short", path=where)
        if digest.checksum(view[:total]) != bytes(view[total : total + _CHECKSUM_BYTES]):
            raise CorruptionError(f"{where}: a damaged draft", path=where)
        at = _HEAD.size
        head = json.loads(bytes(view[at : at + head_length]))
        at += head_length
        path, base = head["path"], head["base"]
        record = decode_record(view[at : at + record_length], path, where)
        at += record_length
        slots: list[SlotRef | None] = []
        for number in range(slot_count):
            segment, index, serial = _SLOT.unpack_from(view, at + number * _SLOT.size)
            slots.append(None if (segment, index, serial) == _NO_SLOT else SlotRef(segment.hex(), index, serial))
        write_id = bytes.fromhex(base["write_id"]) if "write_id" in base else None
        after = bytes.fromhex(head["after"]) or None
        return cls(
            path,
            record,
            ObservedBase(base.get("version"), write_id),
            tuple(slots),
            after,
            head["boot"],
            head["stamp_ns"],
        )


def local_name(kind: digest.DigestKind, chunk_digest: bytes) -> bytes:
    """The name in the local tiers of the chunk with this digest."""
    return bytes((kind,)) + chunk_digest


def foreign_name(key: str, version: str, offset: int) -> bytes:
    """The name in the local tiers of the chunk at ``offset`` of an object that tierfs did not write, at this version."""
    return bytes((_FOREIGN,)) + digest.checksum(key.encode(), b"\0", version.encode(), offset.to_bytes(8, "little"))
