"""Elements as byte planes: the first plane holds the most significant byte of every element, and so on.

In training states the exponents fill one plane, which shrinks to a third, while the mantissas are noise, best left alone:
two planes of noise are not even taken apart. FORMAT.md, "Codecs".

Two planes that lie beside each other are a *lane* of numbers of 2 bytes, which is what numpy works on here: whole elements are
cut into lanes, and put together from them, in the fewest passes over memory.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from tierfs import kernels
from tierfs.codec.damage import DamageError
from tierfs.codec.planes.packing import WORTH, Mode, PlaneCounts, PlaneFit, counts_of, fit_of, pack, unpack, unpack_wide
from tierfs.codec.planes.zigzag import unzigzag, zigzag
from tierfs.codec.scratch import Elements, elements_of, scratch
from tierfs.digest import Buffer

__all__ = [
    "PLANE_HEAD_BYTES",
    "WIDTHS",
    "PlaneOrder",
    "PlaneReader",
    "PlaneWriter",
    "counts_of_planes",
    "decode_elements",
    "decode_head",
    "decode_plane",
    "encode_elements",
    "encode_planes",
    "looks_of",
    "pairs_of",
    "put_planes",
    "put_planes_by_numpy",
]

WIDTHS = (1, 2, 4, 8)
PLANE_HEAD_BYTES = 5
_HEAD = struct.Struct("<BB")
_PLANE_HEAD = struct.Struct("<BI")
# How many elements are looked at; planes of less than so many are made frames without a look.
_SAMPLE, _LOOK_MIN = 512, 16 << 10
_LANE = 2
# A sign and what follows an exponent, in the upper lane of a float.
_REST = 0x807F


class PlaneOrder(enum.IntEnum):
    """Orders of the upper 16 bits of elements before they are taken apart. The number is stored in a block's head."""

    AS_IT_IS = 0
    SIGN_LAST = 1
    """The exponent goes first, to where it fills a plane; its place takes the sign, which is noise."""
    ZIGZAG = 2
    """They are zigzagged by themselves: what is below them is noise, whatever the sign."""


# The number in `tierfs._kernels` of differences that are zigzagged whole.
_ZIGZAG_WHOLE = 3


class PlaneWriter:
    """Planes on their way into an encoded block: the heads of all, then their bytes.

    Args:
        raw: The block.
        width: Its elements'.
        out: Where to. What comes before the heads is the caller's.
        at: Where the heads begin.
        count: How many planes there will be.

    Attributes:
        fits: Whether the block is worth it so far. If not, what is put is left out.
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
        """Memory for a plane of so many bytes, which the caller fills; ``None`` where that would not fit."""
        end = self._end + length
        self.fits = self.fits and end <= self._limit
        if not self.fits:
            return None
        _PLANE_HEAD.pack_into(self._out, self._at, mode, length)
        place = self._out[self._end : end]
        self._at, self._end = self._at + PLANE_HEAD_BYTES, end
        return place

    def since(self, length: int) -> memoryview:
        """The part that was placed last, of so many bytes in all."""
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
        """Append what is behind the last whole element; return the encoded length, ``None`` where it does not pay."""
        end = self._end + len(self._tail)
        if self.fits:
            self._out[self._end : end] = self._tail
        return end if self.fits else None


class PlaneReader:
    """Planes of an encoded block, one after the other.

    Args:
        encoded: The block.
        at: Where the heads begin.
        sizes: Bytes of each plane.
        tail: How many bytes follow the planes: those behind the last whole element.

    Raises:
        DamageError: They are not that.
    """

    def __init__(self, encoded: memoryview, at: int, sizes: Sequence[int], tail: int) -> None:
        start = at + len(sizes) * PLANE_HEAD_BYTES
        if start > len(encoded):
            raise DamageError("cut short")
        heads = [_PLANE_HEAD.unpack_from(encoded, at + index * PLANE_HEAD_BYTES) for index in range(len(sizes))]
        if start + sum(length for _, length in heads) + tail != len(encoded):
            raise DamageError("lengths of planes that do not add up")
        self._encoded = encoded
        self._tail = tail
        self._left: list[tuple[int, memoryview, int]] = []
        for (mode, length), size in zip(heads, sizes, strict=True):
            self._left.append((mode, encoded[start : start + length], size))
            start += length

    def take(self) -> Elements:
        """The next plane; it counts until another is asked for. Raises `DamageError`."""
        return unpack(*self._left.pop(0))

    def merge(self, target: Elements, order: PlaneOrder = PlaneOrder.AS_IT_IS, base: Elements | None = None) -> None:
        """Put elements together from all planes that are left. Raises `DamageError`.

        Args:
            target: For the elements.
            order: That of their upper 16 bits.
            base: The elements to add them to as differences; for the kernels only.
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
        # The lanes come first, the upper one before the others: what they are made of is out of the caches before the elements come in.
        upper = self._lane(scratch("lane 0", _LANE, count), order)
        lanes = [upper, *(self._lane(scratch(f"lane {number}", _LANE, count)) for number in range(1, width // _LANE))]
        # The lowest one is widened, several elements at a time; the others go to their places, which takes one each.
        np.copyto(target, lanes.pop())
        places = target.view("<u2").reshape(count, width // _LANE).T
        for place, lane in zip(reversed(places), lanes, strict=False):
            np.copyto(place, lane)

    def finish(self, out: memoryview) -> None:
        """Fill in the bytes of the block that are behind its last whole element."""
        out[len(out) - self._tail :] = self._encoded[len(self._encoded) - self._tail :]

    def _planes(self, width: int, order: PlaneOrder) -> tuple[tuple[Buffer | Elements, ...], int]:
        """All planes that are left, as the kernels take them, and which pairs of them are woven."""
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
        """The next two planes, which are together."""
        (_, data, size), low = self._left.pop(0), self._left.pop(0)
        if order is not PlaneOrder.AS_IT_IS:
            raise DamageError("planes that are together, and changed")
        if len(data) != _LANE * size or low[0] != Mode.WOVEN or len(low[1]):
            raise DamageError(f"two planes of {size} bytes in {len(data)}, then mode {low[0]} with {len(low[1])}")
        return data

    def _lane(self, out: Elements, order: PlaneOrder = PlaneOrder.AS_IT_IS) -> Elements:
        """The numbers of the next two planes, in ``out`` or elsewhere."""
        if self._left[0][0] == Mode.WOVEN:
            return elements_of(self._woven(order), _LANE)
        (mode, data, size), low = self._left.pop(0), self._left.pop(0)
        unpack_wide(mode, data, out, 7 if order is PlaneOrder.SIGN_LAST else 8)
        rest = scratch("rest", _LANE, size)
        if order is PlaneOrder.SIGN_LAST:
            # Bit 7, the sign, fills all bits above it on the way, of which the uppermost stays.
            np.bitwise_and(unpack(*low).view("<i1"), _REST - (1 << 16), out=rest.view("<i2"), dtype="<i2")
        else:
            np.copyto(rest, unpack(*low))
        np.bitwise_or(out, rest, out=out)
        return unzigzag(out) if order is PlaneOrder.ZIGZAG else out


def encode_planes(raws: Sequence[memoryview], width: int, outs: Sequence[memoryview]) -> list[int | None]:
    """Encode blocks of numbers, all as long, as PLANE; return the encoded lengths, ``None`` where it does not pay.

    They are looked at together: that takes as long for some as for one.
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
        DamageError: It is none, or not of this size.
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
    """Write a block of ``elements``, perhaps not those of ``raw``; return its length, ``None`` where it does not pay.

    ``base``: see `put_planes`.
    """
    width = elements.itemsize
    writer = PlaneWriter(raw, width, out, _HEAD.size, width)
    if writer.fits:
        _HEAD.pack_into(out, 0, width, order)
        put_planes(writer, elements, looks, order, base)
    return writer.finish()


def decode_head(encoded: memoryview, upper: PlaneOrder) -> tuple[int, PlaneOrder]:
    """Width and order of a block that `encode_elements` wrote: as they are, or in the order ``upper``. Raises `DamageError`."""
    if len(encoded) < _HEAD.size or encoded[0] not in WIDTHS:
        raise DamageError("not made of planes")
    width, order = encoded[0], encoded[1]
    if order != PlaneOrder.AS_IT_IS and (order != upper or width < _LANE):
        raise DamageError(f"bits of {width} bytes in order {order}")
    return width, PlaneOrder(order)


def decode_elements(
    encoded: memoryview, elements: Elements, out: memoryview, order: PlaneOrder, base: Elements | None = None
) -> None:
    """Read back what `encode_elements` wrote: the planes into ``elements``, what is behind the last of them into ``out``."""
    width = elements.itemsize
    planes = PlaneReader(encoded, _HEAD.size, [elements.size] * width, len(out) % width)
    planes.merge(elements, order, base)
    planes.finish(out)


def pairs_of(blocks: Sequence[Elements]) -> Elements:
    """Some elements from all over blocks of one length, each with the one behind it; none where they are too short to be worth a look."""
    count = blocks[0].size
    if count < _LOOK_MIN:
        return np.empty((0, 2), blocks[0].dtype)
    each = _SAMPLE // len(blocks)
    step = count // each - 1 | 1  # an odd one gets into all columns of a matrix that has an even number of them
    return np.concatenate([elements[: each * step].reshape(each, step)[:, :2] for elements in blocks])


def looks_of(pairs: Elements, order: PlaneOrder = PlaneOrder.AS_IT_IS, base: Elements | None = None) -> list[PlaneFit]:
    """How to keep the planes of elements like these, once their upper 16 bits are in that order: the least significant first.

    With ``base``, those of the differences to it, zigzagged.
    """
    if not pairs.size:
        return [PlaneFit(Mode.FRAME)] * pairs.itemsize
    return [fit_of(counts, len(pairs)) for counts in reversed(counts_of_planes(pairs, order, base))]


def counts_of_planes(pairs: Elements, order: PlaneOrder, base: Elements | None) -> list[PlaneCounts]:
    """Count the bytes of the planes that `looks_of` judges, the most significant one first."""
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
    """Write the planes of ``elements``, their upper 16 bits in an order that `looks_of` was asked for as well.

    ``base`` is for the kernels only: the planes are those of the differences to it, zigzagged.
    """
    looks = looks_of(pairs_of([elements]), order) if looks is None else looks
    if kernels.active is not None:
        _put_split(kernels.active, writer, elements, looks, order, base)
    else:
        put_planes_by_numpy(writer, elements, looks, order)


def put_planes_by_numpy(
    writer: PlaneWriter, elements: Elements, looks: Sequence[PlaneFit], order: PlaneOrder = PlaneOrder.AS_IT_IS
) -> None:
    """The same as `put_planes`, without the kernels: what they are compared with."""
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
            np.multiply(lane, 0x101, out=lane)  # nothing is carried: the upper byte gets the bits of both
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
    """The same as `put_planes`: planes that shrink in one pass over the elements, and each row of others in one more, to where they stay."""
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
            # They follow each other, since the heads of all planes come before.
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
    """Write a part of each element as it is: 2 bytes of WOVEN, one of RAW."""
    width = _LANE if mode == Mode.WOVEN else 1
    place = writer.place(mode, width * elements.size)
    if place is not None:
        _cut(elements, shift, elements_of(place, width))


def _cut(elements: Elements, shift: int, out: Elements) -> None:
    """The bits of each element from ``shift`` on that ``out`` has room for."""
    if not shift:
        np.copyto(out, elements, casting="unsafe")
    elif shift % 8:
        np.right_shift(elements, shift, out=out, casting="unsafe")
    else:
        # Where these bits begin, numbers begin whose lowest bits they are; to cut those off takes half as long as to shift the elements.
        begin = shift // 8
        shifted = elements.view(np.uint8)[begin : begin - elements.itemsize].view(elements.dtype)
        np.copyto(out[:-1], shifted, casting="unsafe")
        out[-1:] = elements[-1:] >> shift
