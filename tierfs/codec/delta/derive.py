"""Elements that follow from those of a base. Only the exceptions are stored. FORMAT.md, "Codecs"."""

from __future__ import annotations

import struct

import numpy as np

from tierfs.codec.damage import DamageError
from tierfs.codec.planes.gaps import check_gaps, gaps_of, positions_of
from tierfs.codec.planes.planes import PlaneReader, PlaneWriter, put_planes
from tierfs.codec.scratch import Elements, elements_of, scratch

_HEAD = struct.Struct("<BII")
_BFLOAT16 = 1
_WIDTH = 2
_NAN = 0x7FFF
_PIECE = 1 << 18
# With more exceptions the block is not a copy of the base: only small tensors in it match, or elements by chance.
_DENSE = 0.25


def encode_derived(raw: memoryview, base: memoryview, out: memoryview) -> int | None:
    """Encode bfloat16 elements as DERIVE, if most are the rounded float32 elements of ``base``, twice as long.

    The exceptions are stored as they are.

    Returns:
        The encoded length; None if there are too many exceptions, or if the encoding does not pay.
    """
    elements = elements_of(raw, _WIDTH)
    writer = PlaneWriter(raw, _WIDTH, out, _HEAD.size, 1 + _WIDTH)
    derived = scratch("elements", _WIDTH, elements.size)
    derive(base, derived)
    differs = np.not_equal(elements, derived, out=scratch("flags", 1, elements.size).view(np.bool_))
    count = int(np.count_nonzero(differs))
    if not writer.fits or count > _DENSE * elements.size:
        return None
    positions = np.flatnonzero(differs)
    gaps = gaps_of(positions)
    values = np.take(elements, positions, out=scratch("values", _WIDTH, count), mode="clip")
    _HEAD.pack_into(out, 0, _BFLOAT16, count, gaps.size)
    put_planes(writer, gaps)
    put_planes(writer, values)
    return writer.finish()


def decode_derived(encoded: memoryview, out: memoryview, base: memoryview) -> None:
    """Decode a DERIVE block into ``out``.

    Raises:
        DamageError: ``encoded`` is not a DERIVE block of this size.
    """
    if len(encoded) < _HEAD.size:
        raise DamageError("cut short")
    function, count, gap_bytes = _HEAD.unpack_from(encoded)
    if function != _BFLOAT16:
        raise DamageError("derived by an unknown function")
    elements = elements_of(out, _WIDTH)
    check_gaps(count, gap_bytes, elements.size)
    planes = PlaneReader(encoded, _HEAD.size, [gap_bytes, count, count], len(out) % _WIDTH)
    positions = positions_of(planes.take(), count, elements.size)
    values = scratch("values", _WIDTH, count)
    planes.merge(values)
    derive(base, elements)
    elements[positions] = values
    planes.finish(out)


def derive(base: memoryview, elements: Elements) -> None:
    """Fill in the elements that follow from those of ``base``, one for each."""
    sources = elements_of(base, 2 * _WIDTH)
    for at in range(0, elements.size, _PIECE):
        _round(sources[at : at + _PIECE], elements[at : at + _PIECE])


def _round(sources: Elements, target: Elements) -> None:
    """Round float32 to bfloat16, to the nearest, ties to even: overflow becomes infinity, as it should."""
    sources = sources[: target.size]
    sums = scratch("wide", 2 * _WIDTH, sources.size)
    np.right_shift(sources, 16, out=sums)
    np.bitwise_and(sums, 1, out=sums)
    np.add(sums, 0x7FFF, out=sums)
    np.add(sums, sources, out=sums)
    np.right_shift(sums, 16, out=target, casting="unsafe")
    is_nan = np.isnan(sources.view("<f4"), out=scratch("plane", 1, sources.size).view(np.bool_))
    if is_nan.any():
        target[is_nan] = _NAN
