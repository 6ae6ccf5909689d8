"""Map small differences of either sign to small numbers. FORMAT.md, "Codecs", zigzag."""

from __future__ import annotations

import numpy as np

from tierfs.codec.scratch import Elements, scratch


def zigzag(numbers: Elements) -> Elements:
    """Map 0, -1, 1, -2, 2 ... (two's complement) to 0, 1, 2, 3, 4 ..., in place."""
    signs = scratch("signs", numbers.itemsize, numbers.size).reshape(numbers.shape)
    signed = f"<i{numbers.itemsize}"
    np.right_shift(numbers.view(signed), 8 * numbers.itemsize - 1, out=signs.view(signed))
    np.add(numbers, numbers, out=numbers)
    return np.bitwise_xor(numbers, signs, out=numbers)


def unzigzag(numbers: Elements) -> Elements:
    """Invert `zigzag`, in place."""
    signs = scratch("signs", numbers.itemsize, numbers.size)
    np.bitwise_and(numbers, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(numbers, 1, out=numbers)
    return np.bitwise_xor(numbers, signs, out=numbers)
