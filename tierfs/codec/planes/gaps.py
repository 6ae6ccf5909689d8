"""Positions of elements in a block, stored as the gaps between them. FORMAT.md, "Codecs", gaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierfs.codec.damage import DamageError
from tierfs.codec.scratch import Elements

_SKIP = 255


def gaps_of(positions: NDArray[np.intp]) -> Elements:
    """Return how many elements lie between each position and the one before: a byte 255 for each 255, then the rest."""
    gaps = positions.astype(np.uint32)
    gaps[1:] -= gaps[:-1] + 1
    skips = gaps // _SKIP
    gaps -= skips * _SKIP
    skips += 1
    ends = np.cumsum(skips)
    encoded = np.full(int(ends[-1]) if ends.size else 0, _SKIP, np.uint8)
    ends -= 1
    encoded[ends] = gaps
    return encoded


def check_gaps(count: int, gap_bytes: int, size: int) -> None:
    """Check that ``count`` positions in ``size`` elements may take ``gap_bytes`` bytes, before memory is allocated.

    Raises:
        DamageError: They cannot.
    """
    if count > size or gap_bytes > count + (size - count) // _SKIP:
        raise DamageError(f"{count} positions in {gap_bytes} gap bytes do not fit {size} elements")


def positions_of(gaps: Elements, count: int, size: int) -> NDArray[np.intp]:
    """Return the positions, in order.

    Raises:
        DamageError: There are not ``count`` of them, or one is not among ``size`` elements.
    """
    ends = gaps != _SKIP
    after = np.cumsum(gaps + ends, dtype=np.intp)
    if int(np.count_nonzero(ends)) != count or (gaps.size and (not ends[-1] or after[-1] > size)):
        raise DamageError("gaps do not match the stated positions")
    positions: NDArray[np.intp] = after[ends]
    positions -= 1
    return positions


def rare_positions(flags: Elements) -> NDArray[np.intp]:
    """Return the positions of the ones in ``flags``: bytes that are 0 or 1, a multiple of eight in number.

    Fastest if ones are rare: words of eight bytes are tested first.
    """
    words = flags.view("<u8")
    found = np.flatnonzero(words != 0)
    within = np.flatnonzero(words.take(found).view(np.bool_))
    positions = found.take(within >> 3)
    positions *= 8
    within &= 7
    positions += within
    return positions
