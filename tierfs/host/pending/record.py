"""Drafts: a draft is a sealed change of one path that this host has not published yet.

A draft lies in a slab, or in a file of the nvme tier once it has reached that tier. The format is private to the host.
tierfs refuses a draft of another format version (docs/reference/local-tiers.md).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierfs import digest
from tierfs.checked_json import parse_object
from tierfs.errors import CorruptionError, FormatError, TierfsError
from tierfs.format.manifest import Manifest, Record, Tombstone, decode_record

if TYPE_CHECKING:
    from tierfs.host.nvme.batch import StoredDraft
    from tierfs.host.slab.segment import Slot

DRAFT_VERSION = 1
_MAGIC = b"TFSDRAFT"
_HEAD = struct.Struct("<8sHHIII")
_SLOT = struct.Struct("<16sIQ")
_NO_SLOT = (bytes(16), 0, 0)
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class ObservedBase:
    """The version that a writer observed at its path. The draft is published only if it is still there.

    Attributes:
        version: Version of the record in the object tier; ``None`` if there was none.
        write_id: Write id of that record, or of the draft that was pending at the path, which then has no version.
            ``None`` if nothing was there.
        is_tombstone: Whether that record or draft was a tombstone, which garbage collection may remove.
    """

    version: str | None = None
    write_id: bytes | None = None
    is_tombstone: bool = False


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A reference to one use of a slot.

    Attributes:
        segment: The segment's id, 32 hexadecimal digits.
        index: The slot's index in the segment's table.
        serial: Identifies the use of the slot. No serial repeats in a segment.
    """

    segment: str
    index: int
    serial: int

    @classmethod
    def of(cls, slot: Slot) -> SlotRef:
        """Return the reference to a slot as it was looked up."""
        return cls(slot.segment.id, slot.index, slot.serial)


@dataclass(frozen=True, slots=True)
class Draft:
    """A change of one path that is not published yet.

    Attributes:
        path: Relative to the store.
        record: The record to publish. A row of a manifest has a stored length of 0 if its chunk is not known to be in
            the object tier. A tombstone's check is filled in at publication.
        base: The version that the change replaces.
        slots: For each row of a manifest, the slot that holds its chunk, or ``None`` if the chunk lies elsewhere.
        after: Write id of a draft of any path that has to be published first. A rename thus publishes its target before
            it removes its source.
        boot: The boot id at the time the file was closed.
        stamp_ns: When the file was closed, on the monotonic clock of that boot. Drafts are published in this order.
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
        """16 random bytes that identify the change."""
        return self.record.write_id

    @property
    def length(self) -> int:
        """Bytes of the file; 0 for a tombstone."""
        return self.record.length if isinstance(self.record, Manifest) else 0

    @property
    def names(self) -> tuple[bytes, ...]:
        """Local names of the chunks, in the order of the manifest's rows; empty for a tombstone."""
        if isinstance(self.record, Tombstone):
            return ()
        kind = self.record.digest_kind
        return tuple(digest.local_name(kind, row.name.digest) for row in self.record.rows)

    def turn(self, boot: str, number: int = 0) -> tuple[int, int, int]:
        """Return the sort key of the closing order.

        Args:
            boot: The present boot id. Drafts of earlier boots come first.
            number: The draft's seq in the nvme tier, by which drafts of earlier boots are sorted.
        """
        if self.boot != boot:
            return (0, number, 0)
        return (1, self.stamp_ns, int.from_bytes(self.write_id[:8], "big"))

    def encode(self) -> bytes:
        """Encode the draft as the local tiers hold it."""
        base: dict[str, str | bool] = {}
        if self.base.version is not None:
            base["version"] = self.base.version
        if self.base.write_id is not None:
            base["write_id"] = self.base.write_id.hex()
        if self.base.is_tombstone:
            base["is_tombstone"] = True
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
    def in_slot(cls, slot: Slot) -> Draft | TierfsError | None:
        """Decode the draft in a slot. Raises as `Segment.read`, so that what cannot be read now is not taken for damage.

        Returns:
            None if the slot was reused; the error if its bytes are not a draft that this tierfs reads.
        """
        data = slot.segment.read_all(slot)
        try:
            return None if data is None else cls.decode(data, f"a draft in slab {slot.segment.id}")
        except TierfsError as error:
            return error

    @classmethod
    def in_nvme(cls, stored: StoredDraft) -> Draft:
        """Decode a draft in the nvme tier. Raises as `decode`; the error says how to discard a damaged draft."""
        where = f"{stored.path or 'a file of this host'}: draft {stored.seq} in the nvme tier"
        try:
            return cls.decode(stored.data, where)
        except CorruptionError as error:
            raise CorruptionError(f"{error}: {discard_advice(stored.path)}", path=stored.path, tier="nvme") from error

    @classmethod
    def decode(cls, data: bytes | memoryview, where: str) -> Draft:
        """Decode a draft. ``where`` names its location in errors.

        Raises:
            CorruptionError: The draft is damaged or cut short.
            FormatError: The draft has another format version.
        """
        view = memoryview(data)
        if len(view) < _HEAD.size + _CHECKSUM_BYTES:
            raise CorruptionError(f"{where}: a draft of {len(view)} bytes was cut short", path=where)
        magic, version, _, head_length, record_length, slot_count = _HEAD.unpack_from(view)
        if magic == _MAGIC and version != DRAFT_VERSION:
            raise FormatError(
                f"{where}: a draft of version {version}, but this tierfs reads {DRAFT_VERSION}: let the tierfs that "
                "wrote it finish (`tierfs wait URL`)",
                path=where,
            )
        total = _HEAD.size + head_length + record_length + slot_count * _SLOT.size
        if magic != _MAGIC or total + _CHECKSUM_BYTES > len(view):
            raise CorruptionError(f"{where}: not a draft, or cut short", path=where)
        if digest.checksum(view[:total]) != bytes(view[total : total + _CHECKSUM_BYTES]):
            raise CorruptionError(f"{where}: a damaged draft", path=where)
        at = _HEAD.size
        try:
            head = parse_object(view[at : at + head_length], where)
            known = head["base"]
            write_id = bytes.fromhex(known["write_id"]) if "write_id" in known else None
            base = ObservedBase(known.get("version"), write_id, known.get("is_tombstone", False))
            path, after = head["path"].encode().decode(), bytes.fromhex(head["after"]) or None
            boot, stamp_ns = str(head["boot"]), int(head["stamp_ns"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # from a peer, the checksum proves nothing
            raise CorruptionError(f"{where}: a damaged draft: {error!r:.200}", path=where) from error
        at += head_length
        record = decode_record(view[at : at + record_length], path, where)
        at += record_length
        slots: list[SlotRef | None] = []
        for number in range(slot_count):
            segment, index, serial = _SLOT.unpack_from(view, at + number * _SLOT.size)
            slots.append(None if (segment, index, serial) == _NO_SLOT else SlotRef(segment.hex(), index, serial))
        return cls(path, record, base, tuple(slots), after, boot, stamp_ns)


def discard_advice(path: str) -> str:
    """Return the advice for a draft that cannot be decoded. ``path`` is empty if it is unknown, too."""
    of = "" if path else " for the store's root"
    return f"discard it with `tierfs flusher discard`{of}, and write it again"
