"""Elements as differences to those of a base, in byte planes: of all elements, or of those that differ.

Two states of one tensor differ little, so the difference of their bit patterns is a small number. The zigzag puts its
sign last, so the upper planes become zeros. Subtraction beats XOR by 3 to 23 % of the bytes. FORMAT.md, "Codecs".

SPARSE stores only the elements that differ, and the gaps between them. It is for rows of embeddings and for bfloat16
weights, of which one step changes few. DERIVE is for elements that follow from those of the base, and stores only the
exceptions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tierfs import kernels
from tierfs.codec.frames import DamageError
from tierfs.codec.numbers import (
    WIDTHS,
    Elements,
    check_gaps,
    elements_of,
    gaps_of,
    positions_of,
    scratch,
    unzigzag,
    zigzag,
)
from tierfs.codec.packing import Mode, PlaneFit
from tierfs.codec.planes import (
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

_SPARSE_HEAD = struct.Struct("<BBII")
# Measured on bfloat16 weights: from 10 to 30 % on, planes of all differences are smaller and faster.
_SPARSE_MAX = 0.25
_DERIVED_HEAD = struct.Struct("<BII")
_BFLOAT16 = 1
_DERIVED_WIDTH = 2
_NAN = 0x7FFF
_PIECE = 1 << 18
# With more exceptions the block is not a copy of the base: only small tensors in it match, or elements by chance.
_EXCEPTIONS_MAX = 0.25


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
    writer = PlaneWriter(raw, width, out, _SPARSE_HEAD.size, 1 + width)
    numbers = difference(raw, width, base)
    differs = np.not_equal(numbers, 0, out=scratch("flags", 1, numbers.size).view(np.bool_))
    found = _exceptions(differs, numbers, _SPARSE_MAX) if writer.fits else None
    if found is None:
        return None
    gaps, values = found
    _SPARSE_HEAD.pack_into(out, 0, width, 0, values.size, gaps.size)
    put_planes(writer, gaps)
    put_planes(writer, zigzag(values))
    return writer.finish()


def _exceptions(differs: Any, elements: Elements, share_max: float) -> tuple[Elements, Elements] | None:
    """Return the gaps between the elements that differ, and these elements; None if they are more than a share."""
    count = int(np.count_nonzero(differs))
    if count > share_max * elements.size:
        return None
    positions = np.flatnonzero(differs)
    values = scratch("values", elements.itemsize, count)
    return gaps_of(positions), np.take(elements, positions, out=values, mode="clip")


def _take_exceptions(
    encoded: memoryview, head_bytes: int, count: int, gap_bytes: int, elements: Elements, tail: int
) -> tuple[PlaneReader, Any, Elements]:
    """Return the reader behind the exceptions, their positions, and their values. Raises `DamageError`."""
    check_gaps(count, gap_bytes, elements.size)
    planes = PlaneReader(encoded, head_bytes, [gap_bytes] + [count] * elements.itemsize, tail)
    positions = positions_of(planes.take(), count, elements.size)
    values = scratch("values", elements.itemsize, count)
    planes.merge(values)
    return planes, positions, values


def decode_sparse(encoded: memoryview, out: memoryview, base: memoryview) -> None:
    """Decode a SPARSE block into ``out``.

    Raises:
        DamageError: ``encoded`` is not a SPARSE block of this size.
    """
    if len(encoded) < _SPARSE_HEAD.size:
        raise DamageError("cut short")
    width, reserved, count, gap_bytes = _SPARSE_HEAD.unpack_from(encoded)
    if width not in WIDTHS or reserved:
        raise DamageError("invalid head of a sparse block")
    elements = elements_of(out, width)
    planes, positions, values = _take_exceptions(
        encoded, _SPARSE_HEAD.size, count, gap_bytes, elements, len(out) % width
    )
    out[:] = base
    elements[positions] += unzigzag(values)
    planes.finish(out)


def encode_derived(raw: memoryview, base: memoryview, out: memoryview) -> int | None:
    """Encode bfloat16 elements as DERIVE, if most are the rounded float32 elements of ``base``, twice as long.

    The exceptions are stored as they are.

    Returns:
        The encoded length; None if there are too many exceptions, or if the encoding does not pay.
    """
    elements = elements_of(raw, _DERIVED_WIDTH)
    writer = PlaneWriter(raw, _DERIVED_WIDTH, out, _DERIVED_HEAD.size, 1 + _DERIVED_WIDTH)
    derived = scratch("elements", _DERIVED_WIDTH, elements.size)
    derive(base, derived)
    differs = np.not_equal(elements, derived, out=scratch("flags", 1, elements.size).view(np.bool_))
    found = _exceptions(differs, elements, _EXCEPTIONS_MAX) if writer.fits else None
    if found is None:
        return None
    gaps, values = found
    _DERIVED_HEAD.pack_into(out, 0, _BFLOAT16, values.size, gaps.size)
    put_planes(writer, gaps)
    put_planes(writer, values)
    return writer.finish()


def decode_derived(encoded: memoryview, out: memoryview, base: memoryview) -> None:
    """Decode a DERIVE block into ``out``.

    Raises:
        DamageError: ``encoded`` is not a DERIVE block of this size.
    """
    if len(encoded) < _DERIVED_HEAD.size:
        raise DamageError("cut short")
    function, count, gap_bytes = _DERIVED_HEAD.unpack_from(encoded)
    if function != _BFLOAT16:
        raise DamageError("derived by an unknown function")
    elements = elements_of(out, _DERIVED_WIDTH)
    planes, positions, values = _take_exceptions(
        encoded, _DERIVED_HEAD.size, count, gap_bytes, elements, len(out) % _DERIVED_WIDTH
    )
    derive(base, elements)
    elements[positions] = values
    planes.finish(out)


def derive(base: memoryview, elements: Elements) -> None:
    """Fill in the elements that follow from those of ``base``, one for each."""
    sources = elements_of(base, 2 * _DERIVED_WIDTH)
    for at in range(0, elements.size, _PIECE):
        _round(sources[at : at + _PIECE], elements[at : at + _PIECE])


def _round(sources: Elements, target: Elements) -> None:
    """Round float32 to bfloat16, to the nearest, ties to even: overflow becomes infinity, as it should."""
    sources = sources[: target.size]
    sums = scratch("wide", 2 * _DERIVED_WIDTH, sources.size)
    np.right_shift(sources, 16, out=sums)
    np.bitwise_and(sums, 1, out=sums)
    np.add(sums, 0x7FFF, out=sums)
    np.add(sums, sources, out=sums)
    np.right_shift(sums, 16, out=target, casting="unsafe")
    is_nan = np.isnan(sources.view("<f4"), out=scratch("plane", 1, sources.size).view(np.bool_))
    if is_nan.any():
        target[is_nan] = _NAN
