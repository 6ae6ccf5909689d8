"""Elements as differences to those of a base, in byte planes: of all elements, or of those that differ.

Two states of one tensor differ little, so the difference of their bit patterns is a small number. The zigzag puts its
sign last, so the upper planes become zeros. Subtraction beats XOR by 3 to 23 % of the bytes. FORMAT.md, "Codecs".

SPARSE stores only the elements that differ, and the gaps between them. It is for rows of embeddings and for bfloat16
weights, of which one step changes few.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tierfs import kernels
from tierfs.codec.damage import DamageError
from tierfs.codec.planes.gaps import check_gaps, gaps_of, positions_of
from tierfs.codec.planes.packing import Mode, PlaneFit
from tierfs.codec.planes.planes import (
    WIDTHS,
    PlaneOrder,
    PlaneReader,
    PlaneWriter,
    decode_elements,
    decode_head,
    encode_elements,
    looks_of,
    pairs_of,
    put_planes,
)
from tierfs.codec.planes.zigzag import unzigzag, zigzag
from tierfs.codec.scratch import Elements, elements_of, scratch

_HEAD = struct.Struct("<BBII")
# Measured on bfloat16 weights: from 10 to 30 % on, planes of all differences are smaller and faster.
_DENSE = 0.25


def encode_differences(
    raws: Sequence[memoryview], width: int, bases: Sequence[memoryview], outs: Sequence[memoryview]
) -> list[int | None]:
    """Encode blocks of one length as DPLANE, each against its base. Return the lengths; None where it does not pay.

    The blocks share one survey, as in `encode_planes`.
    """
    pairs, references = (pairs_of([elements_of(data, width) for data in each]) for each in (raws, bases))
    order, looks = _order_of(pairs, references)
    lengths = []
    for raw, base, out in zip(raws, bases, outs, strict=True):
        if kernels.active is not None:
            elements, reference = elements_of(raw, width), elements_of(base, width)
            lengths.append(encode_elements(raw, elements, order, looks, out, reference))
            continue
        numbers = difference(raw, width, base)
        if order is PlaneOrder.AS_IT_IS:
            zigzag(numbers)
        lengths.append(encode_elements(raw, numbers, order, looks, out))
    return lengths


def decode_difference(encoded: memoryview, out: memoryview, base: memoryview) -> None:
    """Decode a DPLANE block into ``out``.

    Raises:
        DamageError: ``encoded`` is not a DPLANE block of this size.
    """
    width, order = decode_head(encoded, PlaneOrder.ZIGZAG)
    elements = elements_of(out, width)
    if kernels.active is not None:
        decode_elements(encoded, elements, out, order, elements_of(base, width))
        return
    decode_elements(encoded, elements, out, order)
    if order is PlaneOrder.AS_IT_IS:
        unzigzag(elements)
    np.add(elements, elements_of(base, width), out=elements)


def difference(raw: memoryview, width: int, base: memoryview) -> Elements:
    """Return the elements minus those of the base, modulo 2^(8 * width), in scratch memory."""
    elements = elements_of(raw, width)
    return np.subtract(elements, elements_of(base, width), out=scratch("elements", width, elements.size))


def _order_of(pairs: Elements, references: Elements) -> tuple[PlaneOrder, list[PlaneFit]]:
    """Choose the bits to zigzag by sampled differences: of wide elements only the upper 16 if all below are noise."""
    lower = pairs.itemsize - 2
    if lower > 0:
        looks = looks_of(pairs, PlaneOrder.ZIGZAG, references)
        if all(look.mode is Mode.RAW for look in looks[:lower]):
            return PlaneOrder.ZIGZAG, looks
    return PlaneOrder.AS_IT_IS, looks_of(pairs, PlaneOrder.AS_IT_IS, references)


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
