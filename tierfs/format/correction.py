"""Find a single flipped bit in an object that ends with a checksum. Pure functions.

The checksum has 128 bits: of all objects that differ in one bit, only the written one matches it. So trying every bit
restores the object and never yields another one. The time grows with the square of the length: an object of 24 KiB
takes 0.4 s.
"""

from __future__ import annotations

import json

from tierfs import digest
from tierfs.digest import Buffer
from tierfs.errors import TierfsError
from tierfs.format.descriptor import Descriptor
from tierfs.format.envelope import ENVELOPE_BYTES_MAX
from tierfs.format.header import CHECKSUM_BYTES, HEADER_BYTES

CORRECTED_BYTES_MAX = 32 << 10
_LENGTH_AT = 12  # offset of the envelope's length in its header


def correct_sealed(data: Buffer) -> bytes | None:
    """Restore an object that ends with a checksum over all bytes before it, if one bit flipped.

    Returns:
        The object; ``None`` if more than one bit is wrong, or the object is longer than `CORRECTED_BYTES_MAX`.
    """
    if not HEADER_BYTES + CHECKSUM_BYTES <= len(data) <= CORRECTED_BYTES_MAX:
        return None
    body, stated = bytearray(data[:-CHECKSUM_BYTES]), bytes(data[-CHECKSUM_BYTES:])
    found = digest.checksum(body)
    differing = int.from_bytes(found, "big") ^ int.from_bytes(stated, "big")
    if differing.bit_count() <= 1:
        return bytes(body) + found
    for at in range(len(body)):
        for bit in range(8):
            body[at] ^= 1 << bit
            if digest.checksum(body) == stated:
                return bytes(body) + stated
            body[at] ^= 1 << bit
    return None


def correct_envelope(data: Buffer) -> bytes | None:
    """Restore the envelope at the beginning of a chunk object, if one bit flipped; else return ``None``."""
    head = bytearray(data[:ENVELOPE_BYTES_MAX])
    if len(head) < HEADER_BYTES:
        return None
    length = int.from_bytes(head[_LENGTH_AT:HEADER_BYTES], "little")
    for bit in range(8 * (HEADER_BYTES - _LENGTH_AT)):  # the flipped bit may be in the length itself
        other = length ^ 1 << bit
        if HEADER_BYTES + CHECKSUM_BYTES <= other <= len(head):
            tried = head[:other]
            tried[_LENGTH_AT:HEADER_BYTES] = other.to_bytes(4, "little")
            if digest.checksum(tried[:-CHECKSUM_BYTES]) == tried[-CHECKSUM_BYTES:]:
                return bytes(tried)
    return correct_sealed(head[:length]) if length <= len(head) else None


def correct_descriptor(data: bytes, where: str) -> bytes | None:
    """Restore a store's descriptor, if one bit flipped; else return ``None``."""
    if len(data) > CORRECTED_BYTES_MAX:
        return None
    tried = bytearray(data)
    for at in range(len(tried)):
        for bit in range(8):
            tried[at] ^= 1 << bit
            try:
                json.loads(tried)
                Descriptor.decode(bytes(tried), where)
            except (ValueError, TierfsError):
                tried[at] ^= 1 << bit
            else:
                return bytes(tried)
    return None
