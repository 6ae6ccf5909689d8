"""Where in a block some elements are: how far apart. FORMAT.md, "Codecs", gaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierfs.codec.damage import DamageError
from tierfs.codec.scratch import Elements

__all__ = ["check_gaps", "gaps_of", "positions_of", "rare_positions"]

_SKIP = 255


def gaps_of(positions: NDArray[np.intp]) -> Elements:
    """How many elements lie before each position, back to the one before: 255 for so many, then what is left."""
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
    """Check that so many positions among ``size`` elements can take so many bytes, before anything is allocated for them.

    Raises:
        DamageError: They cannot.
    """
    if count > size or gap_bytes > count + (size - count) // _SKIP:
        raise DamageError(f"{count} positions with {gap_bytes} gaps in {size} elements")


def positions_of(gaps: Elements, count: int, size: int) -> NDArray[np.intp]:
    """The positions, in order.

    Raises:
        DamageError: They are not so many, or not among ``size`` elements.
    """
    ends = gaps != _SKIP
    after = np.cumsum(gaps + ends, dtype=np.intp)
    if int(np.count_nonzero(ends)) != count or (gaps.size and (not ends[-1] or after[-1] > size)):
        raise DamageError("gaps that do not fit")
    positions: NDArray[np.intp] = after[ends]
    positions -= 1
    return positions


def rare_positions(flags: Elements) -> NDArray[np.intp]:
    """Where a multiple of eight bytes, 0 or 1, is 1; fastest where that is rare: words of eight are looked at first."""
    words = flags.view("<u8")
    found = np.flatnonzero(words != 0)
    within = np.flatnonzero(words.take(found).view(np.bool_))
    positions = found.take(within >> 3)
    positions *= 8
    within &= 7
    positions += within
    return positions
