"""Where in a block some elements are: how far apart. FORMAT.md, "Codecs", gaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierfs.codec.damage import DamageError
from tierfs.codec.scratch import Elements

__all__ = ["SKIP", "WIDE_SKIP", "check_gaps", "gaps_of", "positions_of", "rare_positions"]

SKIP = 0xFF
"""The gap, of one byte, that says that so many elements are passed by, and the next gap is to be added."""
WIDE_SKIP = 0xFFFF
"""The same of gaps of two bytes."""


def gaps_of(positions: NDArray[np.intp], skip: int = SKIP) -> Elements:
    """How many elements lie before each position, back to the one before: ``skip`` for so many, then what is left."""
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // skip + 1) - 1
    encoded = np.full(ends[-1] + 1 if ends.size else 0, skip, np.uint8 if skip == SKIP else "<u2")
    encoded[ends] = gaps % skip
    return encoded


def check_gaps(count: int, gap_count: int, size: int, skip: int = SKIP) -> None:
    """Check that so many positions among ``size`` elements can take so many gaps, before anything is allocated for them.

    Raises:
        DamageError: They cannot.
    """
    if count > size or gap_count > count + (size - count) // skip:
        raise DamageError(f"{count} positions with {gap_count} gaps in {size} elements")


def positions_of(gaps: Elements, count: int, size: int, skip: int = SKIP) -> NDArray[np.intp]:
    """The positions, in order.

    Raises:
        DamageError: They are not so many, or not among ``size`` elements.
    """
    ends = gaps != skip
    after = np.cumsum(gaps, dtype=np.intp) + np.cumsum(ends, dtype=np.intp)
    if int(np.count_nonzero(ends)) != count or (gaps.size and (not ends[-1] or after[-1] > size)):
        raise DamageError("gaps that do not fit")
    positions: NDArray[np.intp] = after[ends]
    positions -= 1
    return positions


def rare_positions(flags: Elements) -> NDArray[np.intp]:
    """Where a multiple of eight bytes, 0 or 1, is 1; fastest where that is rare: words of eight are looked at first."""
    words = np.flatnonzero(flags.view("<u8") != 0)
    within = np.flatnonzero(flags.reshape(-1, 8)[words].view(np.bool_))
    positions: NDArray[np.intp] = words[within >> 3] * 8 + (within & 7)
    return positions
