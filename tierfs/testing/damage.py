"""Plant damage in an object tier, as a bad disk, a bug or a careless hand would leave it.

The tier takes each as a change of its own, so the object gets a new version; its checks on writing find nothing wrong.
"""

from __future__ import annotations

from tierfs.objects.protocol import ObjectTier

__all__ = ["flip_bit", "remove", "swap", "truncate"]


def flip_bit(tier: ObjectTier, key: str, bit: int) -> None:
    """Turn one bit of the object around.

    Args:
        tier: Where the object is.
        key: Which.
        bit: Counted from the first byte's lowest.
    """
    content = bytearray(_whole(tier, key))
    content[bit // 8] ^= 1 << bit % 8
    tier.put(key, [content])


def truncate(tier: ObjectTier, key: str, size: int) -> None:
    """Keep only the first ``size`` bytes of the object."""
    tier.put(key, [_whole(tier, key)[:size]])


def swap(tier: ObjectTier, key: str, other: str) -> None:
    """Put each of two objects where the other one was."""
    content, other_content = _whole(tier, key), _whole(tier, other)
    tier.put(key, [other_content])
    tier.put(other, [content])


def remove(tier: ObjectTier, key: str) -> None:
    """Take the object away.

    Raises:
        NotFoundError: Nothing was there, so this would have been no damage.
    """
    tier.head(key)
    tier.delete([key])


def _whole(tier: ObjectTier, key: str) -> bytes:
    return tier.read(key, tier.head(key).size)[0]
