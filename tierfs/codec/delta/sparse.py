"""Store only the elements that differ from the base: the gaps between them, and their differences.

For rows of embeddings and for bfloat16 weights: one step changes few of them. FORMAT.md, "Codecs".
"""

from __future__ import annotations

import struct

import numpy as np

from tierfs.codec.damage import DamageError
from tierfs.codec.delta.differences import difference
from tierfs.codec.planes.gaps import check_gaps, gaps_of, positions_of
from tierfs.codec.planes.planes import WIDTHS, PlaneReader, PlaneWriter, put_planes
from tierfs.codec.planes.zigzag import unzigzag, zigzag
from tierfs.codec.scratch import elements_of, scratch

_HEAD = struct.Struct("<BBII")
# Measured on bfloat16 weights: from 10 to 30 % on, planes of all differences are smaller and faster.
_DENSE = 0.25


def encode_sparse(raw: memoryview, width: int, base: memoryview, out: memoryview) -> int | None:
    """Encode a block as SPARSE against ``base``.

    Returns:
        The encoded length; None if too many elements differ, or if the encoding does not pay.
    """
    writer = PlaneWriter(raw, width, out, _HEAD.size, 1 + width)
    numbers = difference(raw, width, base)
    differs = np.not_equal(numbers, 0, out=scratch("flags", 1, numbers.size).view(np.bool_))
    count = int(np.count_nonzero(differs))
    if not writer.fits or count > _DENSE * numbers.size:
        return None
    positions = np.flatnonzero(differs)
    gaps = gaps_of(positions)
    values = np.take(numbers, positions, out=scratch("values", width, count), mode="clip")
    _HEAD.pack_into(out, 0, width, 0, count, gaps.size)
    put_planes(writer, gaps)
    put_planes(writer, zigzag(values))
    return writer.finish()


def decode_sparse(encoded: memoryview, out: memoryview, base: memoryview) -> None:
    """Decode a SPARSE block into ``out``.

    Raises:
        DamageError: ``encoded`` is not a SPARSE block of this size.
    """
    if len(encoded) < _HEAD.size:
        raise DamageError("cut short")
    width, reserved, count, gap_bytes = _HEAD.unpack_from(encoded)
    if width not in WIDTHS or reserved:
        raise DamageError("invalid head of a sparse block")
    elements = elements_of(out, width)
    check_gaps(count, gap_bytes, elements.size)
    planes = PlaneReader(encoded, _HEAD.size, [gap_bytes] + [count] * width, len(out) % width)
    positions = positions_of(planes.take(), count, elements.size)
    values = scratch("values", width, count)
    planes.merge(values)
    out[:] = base
    elements[positions] += unzigzag(values)
    planes.finish(out)
