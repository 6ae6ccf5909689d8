"""Damage objects in an object tier as a bad disk, a bug or an operator's mistake would.

Each function writes through the tier, so the object gets a new version and passes the tier's checks on writes.
"""

from __future__ import annotations

from tierfs.objects.protocol import ObjectTier


def flip_bit(tier: ObjectTier, key: str, bit: int) -> None:
    """Flip one bit of an object.

    Args:
        tier: Holds the object.
        key: The object's key.
        bit: 0 is the lowest bit of the first byte.
    """
    content = bytearray(_whole(tier, key))
    content[bit // 8] ^= 1 << bit % 8
    tier.put(key, [content])


def truncate(tier: ObjectTier, key: str, size: int) -> None:
    """Keep only the first ``size`` bytes of the object."""
    tier.put(key, [_whole(tier, key)[:size]])


def swap(tier: ObjectTier, key: str, other: str) -> None:
    """Swap the contents of two objects."""
    content, other_content = _whole(tier, key), _whole(tier, other)
    tier.put(key, [other_content])
    tier.put(other, [content])


def remove(tier: ObjectTier, key: str) -> None:
    """Delete an object.

    Raises:
        NotFoundError: There is no such object, so deleting it would be no damage.
    """
    tier.head(key)
    tier.delete([key])


def _whole(tier: ObjectTier, key: str) -> bytes:
    return tier.read(key, tier.head(key).size)[0]
