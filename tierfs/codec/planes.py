"""Elements as byte planes: the first plane holds the most significant byte of every element, and so on.

In training states the exponents fill one plane, which shrinks to a third. The mantissas are noise and stay as they are:
two adjacent planes of noise are not even separated. FORMAT.md, "Codecs".

Two adjacent planes form a *lane* of 2-byte numbers, and numpy works on lanes here. Elements are cut into lanes, and
joined from lanes, in the fewest passes over memory.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from tierfs import kernels
from tierfs.codec.frames import DamageError
from tierfs.codec.numbers import WIDTHS, Elements, elements_of, scratch, unzigzag, zigzag
from tierfs.codec.packing import WORTH, Mode, PlaneCounts, PlaneFit, counts_of, fit_of, pack, unpack, unpack_wide
from tierfs.digest import Buffer

PLANE_HEAD_BYTES = 5
_HEAD = struct.Struct("<BB")
_PLANE_HEAD = struct.Struct("<BI")
# Number of elements in a survey. Planes with fewer bytes than `_LOOK_MIN` become frames without a survey.
_SAMPLE, _LOOK_MIN = 512, 16 << 10
_LANE = 2
# The sign and the bits below the exponent, in the upper lane of a float.
_REST = 0x807F


class PlaneOrder(enum.IntEnum):
    """Orders of the upper 16 bits of elements before they are split. The number is stored in a block's head."""

    AS_IT_IS = 0
    SIGN_LAST = 1
    """The exponent moves up to fill a plane; the sign, which is noise, takes the place below it."""
    ZIGZAG = 2
    """The upper bits are zigzagged alone: the bits below them are noise, whatever the sign."""


# The order that `tierfs._kernels` knows for differences that are zigzagged whole.
_ZIGZAG_WHOLE = 3


class PlaneWriter:
    """Writes planes to an encoded block: first the heads of all planes, then their data.

    Args:
        out: The encoded block. The caller writes the bytes before the heads.
        at: Offset of the heads.
        count: How many planes there will be.

    Attributes:
        fits: Whether the block still pays. If not, further planes are dropped.
    """

    def __init__(self, raw: memoryview, width: int, out: memoryview, at: int, count: int) -> None:
        tail = len(raw) % width
        self._tail = raw[len(raw) - tail :]
        self._out = out
        self._at = at
        self._end = at + count * PLANE_HEAD_BYTES
        self._limit = int(len(raw) * WORTH) - tail
        self.fits = self._end <= self._limit

    def place(self, mode: Mode, length: int) -> memoryview | None:
        """Reserve memory for a plane of ``length`` bytes, which the caller fills. None if it does not fit."""
        end = self._end + length
        self.fits = self.fits and end <= self._limit
        if not self.fits:
            return None
        _PLANE_HEAD.pack_into(self._out, self._at, mode, length)
        place = self._out[self._end : end]
        self._at, self._end = self._at + PLANE_HEAD_BYTES, end
        return place

    def since(self, length: int) -> memoryview:
        """Return the last ``length`` bytes that were reserved."""
        return self._out[self._end - length : self._end]

    def put(self, mode: Mode, parts: Sequence[Buffer]) -> None:
        """Append a plane."""
        place = self.place(mode, sum(map(len, parts)))
        if place is not None:
            at = 0
            for part in parts:
                place[at : at + len(part)] = part
                at += len(part)

    def finish(self) -> int | None:
        """Append the bytes behind the last whole element. Return the encoded length; None if it does not pay."""
        end = self._end + len(self._tail)
        if self.fits:
            self._out[self._end : end] = self._tail
        return end if self.fits else None


class PlaneReader:
    """Reads the planes of an encoded block, one after the other.

    Args:
        at: Offset of the heads.
        sizes: Decoded bytes of each plane.
        tail: How many bytes follow the planes: those behind the last whole element.

    Raises:
        DamageError: The block is cut short, or its lengths do not add up.
    """

    def __init__(self, encoded: memoryview, at: int, sizes: Sequence[int], tail: int) -> None:
        start = at + len(sizes) * PLANE_HEAD_BYTES
        if start > len(encoded):
            raise DamageError("cut short")
        heads = [_PLANE_HEAD.unpack_from(encoded, at + index * PLANE_HEAD_BYTES) for index in range(len(sizes))]
        if start + sum(length for _, length in heads) + tail != len(encoded):
            raise DamageError("lengths of planes do not add up")
        self._encoded = encoded
        self._tail = tail
        self._left: list[tuple[int, memoryview, int]] = []
        for (mode, length), size in zip(heads, sizes, strict=True):
            self._left.append((mode, encoded[start : start + length], size))
            start += length

    def take(self) -> Elements:
        """Return the next plane, which is valid until the next call. Raises `DamageError`."""
        return unpack(*self._left.pop(0))

    def merge(self, target: Elements, order: PlaneOrder = PlaneOrder.AS_IT_IS, base: Elements | None = None) -> None:
        """Join elements from all planes that are left. Raises `DamageError`.

        Args:
            target: Receives the elements.
            order: The order of their upper 16 bits.
            base: The planes are differences to these elements, which are added; for the kernels only.
        """
        width, count = target.itemsize, target.size
        if kernels.active is not None:
            planes, woven = self._planes(width, order)
            how = _ZIGZAG_WHOLE if base is not None and order is PlaneOrder.AS_IT_IS else order
            kernels.active.merge(target, base, width, int(how), woven, planes)
            return
        if width == 1:
            np.copyto(target, self.take())
            return
        if width == _LANE:
            lane = self._lane(target, order)
            if lane is not target:
                np.copyto(target, lane)
            return
        # Decode all lanes first, the upper one before the others: so their sources leave the caches before the elements
        # enter.
        upper = self._lane(scratch("lane 0", _LANE, count), order)
        lanes = [upper, *(self._lane(scratch(f"lane {number}", _LANE, count)) for number in range(1, width // _LANE))]
        # The lowest lane is widened, several elements at a time. The others go to their places one element at a time.
        np.copyto(target, lanes.pop())
        places = target.view("<u2").reshape(count, width // _LANE).T
        for place, lane in zip(reversed(places), lanes, strict=False):
            np.copyto(place, lane)

    def finish(self, out: memoryview) -> None:
        """Copy the bytes behind the last whole element to ``out``."""
        out[len(out) - self._tail :] = self._encoded[len(self._encoded) - self._tail :]

    def _planes(self, width: int, order: PlaneOrder) -> tuple[tuple[Buffer | Elements, ...], int]:
        """Return all planes that are left, as the kernels take them, and a bit mask of the pairs that are woven."""
        found: list[Buffer | Elements] = []
        woven = 0
        if width == 1:
            return (self.take(),), 0
        for number in range(width // _LANE):
            if self._left[0][0] == Mode.WOVEN:
                found += [self._woven(PlaneOrder.AS_IT_IS if number else order), b""]
                woven |= 1 << number
                continue
            for side in range(_LANE):
                mode, data, size = self._left.pop(0)
                at = (_LANE * number + side) * size
                found.append(unpack(mode, data, size, scratch("planes", 1, width * size)[at : at + size]))
        return tuple(found), woven

    def _woven(self, order: PlaneOrder) -> memoryview:
        """Return the next two planes, which are woven."""
        (_, data, size), low = self._left.pop(0), self._left.pop(0)
        if order is not PlaneOrder.AS_IT_IS:
            raise DamageError("woven planes must not have reordered bits")
        if len(data) != _LANE * size or low[0] != Mode.WOVEN or len(low[1]):
            raise DamageError(f"two woven planes of {size} bytes in {len(data)}, then mode {low[0]} with {len(low[1])}")
        return data

    def _lane(self, out: Elements, order: PlaneOrder = PlaneOrder.AS_IT_IS) -> Elements:
        """Return the numbers of the next two planes, in ``out`` or elsewhere."""
        if self._left[0][0] == Mode.WOVEN:
            return elements_of(self._woven(order), _LANE)
        (mode, data, size), low = self._left.pop(0), self._left.pop(0)
        unpack_wide(mode, data, out, 7 if order is PlaneOrder.SIGN_LAST else 8)
        rest = scratch("rest", _LANE, size)
        if order is PlaneOrder.SIGN_LAST:
            # Sign extension copies bit 7, the sign, to all bits above it. The mask keeps only the uppermost of these.
            np.bitwise_and(unpack(*low).view("<i1"), _REST - (1 << 16), out=rest.view("<i2"), dtype="<i2")
        else:
            np.copyto(rest, unpack(*low))
        np.bitwise_or(out, rest, out=out)
        return unzigzag(out) if order is PlaneOrder.ZIGZAG else out


def encode_planes(raws: Sequence[memoryview], width: int, outs: Sequence[memoryview]) -> list[int | None]:
    """Encode blocks of numbers of one length as PLANE. Return the encoded lengths; None where it does not pay.

    The blocks share one survey, which takes as long for several blocks as for one.
    """
    blocks = [elements_of(raw, width) for raw in raws]
    order = PlaneOrder.AS_IT_IS if width == 1 else PlaneOrder.SIGN_LAST
    looks = looks_of(pairs_of(blocks), order)
    return [
        encode_elements(raw, elements, order, looks, out) for raw, elements, out in zip(raws, blocks, outs, strict=True)
    ]


def decode_plane(encoded: memoryview, out: memoryview) -> None:
    """Decode a PLANE block into ``out``.

    Raises:
        DamageError: ``encoded`` is not a PLANE block of this size.
    """
    width, order = decode_head(encoded, PlaneOrder.SIGN_LAST)
    decode_elements(encoded, elements_of(out, width), out, order)


def encode_elements(
    raw: memoryview,
    elements: Elements,
    order: PlaneOrder,
    looks: Sequence[PlaneFit],
    out: memoryview,
    base: Elements | None = None,
) -> int | None:
    """Encode ``elements`` as the block of ``raw``. They may be differences of its elements. ``base``: see `put_planes`.

    Returns:
        The encoded length; None if the encoding does not pay.
    """
    width = elements.itemsize
    writer = PlaneWriter(raw, width, out, _HEAD.size, width)
    if writer.fits:
        _HEAD.pack_into(out, 0, width, order)
        put_planes(writer, elements, looks, order, base)
    return writer.finish()


def decode_head(encoded: memoryview, upper: PlaneOrder) -> tuple[int, PlaneOrder]:
    """Return width and order of a block of `encode_elements`. The order must be AS_IT_IS or ``upper``.

    Raises:
        DamageError: The width or the order is invalid.
    """
    if len(encoded) < _HEAD.size or encoded[0] not in WIDTHS:
        raise DamageError("invalid head of a block of planes")
    width, order = encoded[0], encoded[1]
    if order != PlaneOrder.AS_IT_IS and (order != upper or width < _LANE):
        raise DamageError(f"invalid bit order {order} of elements of {width} bytes")
    return width, PlaneOrder(order)


def decode_elements(
    encoded: memoryview, elements: Elements, out: memoryview, order: PlaneOrder, base: Elements | None = None
) -> None:
    """Decode a block of `encode_elements`: its planes into ``elements``, its tail into ``out``."""
    width = elements.itemsize
    planes = PlaneReader(encoded, _HEAD.size, [elements.size] * width, len(out) % width)
    planes.merge(elements, order, base)
    planes.finish(out)


def pairs_of(blocks: Sequence[Elements]) -> Elements:
    """Sample elements from all over blocks of one length, each with the next element; none if the blocks are short."""
    count = blocks[0].size
    if count < _LOOK_MIN:
        return np.empty((0, 2), blocks[0].dtype)
    each = _SAMPLE // len(blocks)
    step = count // each - 1 | 1  # an odd step visits all columns of a matrix with an even number of them
    return np.concatenate([elements[: each * step].reshape(each, step)[:, :2] for elements in blocks])


def looks_of(pairs: Elements, order: PlaneOrder = PlaneOrder.AS_IT_IS, base: Elements | None = None) -> list[PlaneFit]:
    """Choose how to store the planes of elements like ``pairs``, the least significant plane first.

    The upper 16 bits are put in ``order`` first. With ``base``, the planes are those of the zigzagged differences to
    it.
    """
    if not pairs.size:
        return [PlaneFit(Mode.FRAME)] * pairs.itemsize
    return [fit_of(counts, len(pairs)) for counts in reversed(counts_of_planes(pairs, order, base))]


def counts_of_planes(pairs: Elements, order: PlaneOrder, base: Elements | None) -> list[PlaneCounts]:
    """Count the bytes of the planes that `looks_of` judges, the most significant plane first."""
    if kernels.active is None:
        return counts_of(_ordered(pairs, order, base))
    how = _ZIGZAG_WHOLE if base is not None and order is PlaneOrder.AS_IT_IS else order
    return [PlaneCounts(*each) for each in kernels.active.survey(pairs, base, pairs.itemsize, int(how))]


def _ordered(pairs: Elements, order: PlaneOrder, base: Elements | None) -> Elements:
    """Return the elements that the planes are made of."""
    pairs = pairs.copy() if base is None else pairs - base
    if order is PlaneOrder.AS_IT_IS:
        return pairs if base is None else zigzag(pairs)
    lanes = pairs.view("<u2")[:, pairs.itemsize // _LANE - 1 :: pairs.itemsize // _LANE]
    if order is PlaneOrder.ZIGZAG:
        lanes[:] = zigzag(lanes.copy())
    else:
        lanes[:] = (lanes & 0x7F80) << 1 | lanes & 0x7F | lanes >> 8 & 0x80
    return pairs


def put_planes(
    writer: PlaneWriter,
    elements: Elements,
    looks: Sequence[PlaneFit] | None = None,
    order: PlaneOrder = PlaneOrder.AS_IT_IS,
    base: Elements | None = None,
) -> None:
    """Write the planes of ``elements``, with their upper 16 bits in ``order``: the one that ``looks`` was made for.

    ``base`` is for the kernels only: the planes are those of the zigzagged differences to it.
    """
    looks = looks_of(pairs_of([elements]), order) if looks is None else looks
    if kernels.active is not None:
        _put_split(kernels.active, writer, elements, looks, order, base)
    else:
        put_planes_by_numpy(writer, elements, looks, order)


def put_planes_by_numpy(
    writer: PlaneWriter, elements: Elements, looks: Sequence[PlaneFit], order: PlaneOrder = PlaneOrder.AS_IT_IS
) -> None:
    """Write the same planes as `put_planes` without the kernels. Tests compare the two."""
    width, count = elements.itemsize, elements.size
    if width == 1:
        _put_plane(writer, elements, 0, looks[0])
        return
    upper = width // _LANE - 1
    for number in range(upper, -1, -1):
        low, high = looks[2 * number : 2 * number + 2]
        is_changed = order is not PlaneOrder.AS_IT_IS and number == upper
        if low.mode == high.mode == Mode.RAW and not is_changed:
            _put_cut(writer, elements, 16 * number, Mode.WOVEN)
            writer.place(Mode.WOVEN, 0)
            continue
        lane = scratch("upper", _LANE, count)
        _cut(elements, 16 * number, lane)
        if is_changed and order is PlaneOrder.SIGN_LAST:
            _put_plane(writer, lane, 7, high)
            np.bitwise_and(lane, _REST, out=lane)
            np.multiply(lane, 0x101, out=lane)  # no bit is carried: the upper byte gets the bits of both
            _put_plane(writer, lane, 8, low)
            continue
        if is_changed:
            zigzag(lane)
        _put_plane(writer, lane, 8, high)
        _put_plane(writer, lane, 0, low)


def _put_split(
    compiled: ModuleType,
    writer: PlaneWriter,
    elements: Elements,
    looks: Sequence[PlaneFit],
    order: PlaneOrder,
    base: Elements | None,
) -> None:
    """Write the same planes as `put_planes`, with the kernels.

    One pass over the elements splits off the planes that shrink. Each row of other planes takes one more pass, which
    writes them to their place in the block.
    """
    width, count = elements.itemsize, elements.size
    modes = [seen.mode for seen in reversed(looks)]
    woven = 0
    for number in range(width // _LANE):
        if modes[2 * number] == modes[2 * number + 1] == Mode.RAW and (number or order is PlaneOrder.AS_IT_IS):
            woven |= 1 << number
    how = int(_ZIGZAG_WHOLE if base is not None and order is PlaneOrder.AS_IT_IS else order)
    shrinking = [number for number in range(width) if modes[number] != Mode.RAW]
    planes = scratch("planes", 1, len(shrinking) * count)
    if shrinking:
        compiled.split(elements, base, width, how, woven, sum(1 << number for number in shrinking), planes)
    number = 0
    while number < width:
        if modes[number] != Mode.RAW:
            at = shrinking.index(number) * count
            writer.put(*pack(planes[at : at + count], looks[width - 1 - number]))
            number += 1
            continue
        length = wanted = 0
        while number < width and modes[number] == Mode.RAW:
            is_pair = woven >> number // _LANE & 1
            writer.place(Mode.WOVEN if is_pair else Mode.RAW, (1 + is_pair) * count)
            if is_pair:
                writer.place(Mode.WOVEN, 0)
            length += (1 + is_pair) * count
            wanted |= (1 + 2 * is_pair) << number
            number += 1 + is_pair
        if writer.fits:
            # The data of these planes are adjacent, since the heads of all planes come first.
            compiled.split(elements, base, width, how, woven, wanted, writer.since(length))


def _put_plane(writer: PlaneWriter, elements: Elements, shift: int, seen: PlaneFit) -> None:
    """Write the plane of bytes that begins at bit ``shift`` of the elements."""
    if seen.mode == Mode.RAW:
        _put_cut(writer, elements, shift, Mode.RAW)
        return
    plane = scratch("plane", 1, elements.size)
    _cut(elements, shift, plane)
    writer.put(*pack(plane, seen))


def _put_cut(writer: PlaneWriter, elements: Elements, shift: int, mode: Mode) -> None:
    """Write a part of each element as it is: 2 bytes for WOVEN, 1 for RAW."""
    width = _LANE if mode == Mode.WOVEN else 1
    place = writer.place(mode, width * elements.size)
    if place is not None:
        _cut(elements, shift, elements_of(place, width))


def _cut(elements: Elements, shift: int, out: Elements) -> None:
    """Copy the bits of each element from ``shift`` on that fit an element of ``out``."""
    if not shift:
        np.copyto(out, elements, casting="unsafe")
    elif shift % 8:
        np.right_shift(elements, shift, out=out, casting="unsafe")
    else:
        # View the memory from the byte where these bits begin. Truncating such numbers takes half as long as shifting
        # elements.
        begin = shift // 8
        shifted = elements.view(np.uint8)[begin : begin - elements.itemsize].view(elements.dtype)
        np.copyto(out[:-1], shifted, casting="unsafe")
        out[-1:] = elements[-1:] >> shift
