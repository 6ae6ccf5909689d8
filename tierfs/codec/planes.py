"""Elements as byte planes: the first plane holds the most significant byte of every element, and so on.

In training states the exponents fill one plane, which shrinks to a third, while the mantissas are noise, best left alone:
two planes of noise are not even taken apart. FORMAT.md, "Codecs".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tierfs.codec.damage import DamageError
from tierfs.codec.packing import WORTH, Look, Mode, look, pack, unpack
from tierfs.codec.scratch import Elements, elements_of, scratch
from tierfs.digest import Buffer

__all__ = [
    "AS_IT_IS",
    "PLANE_HEAD_BYTES",
    "WIDTHS",
    "PlaneReader",
    "PlaneWriter",
    "decode_elements",
    "decode_head",
    "decode_plane",
    "encode_elements",
    "encode_planes",
    "put_planes",
]

WIDTHS = (1, 2, 4, 8)
PLANE_HEAD_BYTES = 5
_HEAD = struct.Struct("<BB")
_PLANE_HEAD = struct.Struct("<BI")
# The order of an element's bits: as it is; rotated left by so many; the upper 16 rotated left by one.
AS_IT_IS, _TURN_MAX, _SIGN_ASIDE = 0, 7, 8
# How many elements are looked at; planes of less than so many are made frames without a look.
_SAMPLE, _LOOK_MIN = 512, 16 << 10


class PlaneWriter:
    """Planes on their way into an encoded block: the heads of all, then their bytes.

    Args:
        raw: The block.
        width: Of its elements.
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

    def put(self, mode: Mode, data: Buffer) -> None:
        """Append a plane."""
        place = self.place(mode, len(data))
        if place is not None:
            place[:] = data

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
        aside: Whether the upper 16 bits of the elements are rotated.

    Raises:
        DamageError: They are not that.
    """

    def __init__(self, encoded: memoryview, at: int, sizes: Sequence[int], tail: int, *, aside: bool = False) -> None:
        start = at + len(sizes) * PLANE_HEAD_BYTES
        if start > len(encoded):
            raise DamageError("cut short")
        heads = [_PLANE_HEAD.unpack_from(encoded, at + index * PLANE_HEAD_BYTES) for index in range(len(sizes))]
        if start + sum(length for _, length in heads) + tail != len(encoded):
            raise DamageError("lengths of planes that do not add up")
        self._encoded = encoded
        self._at = start
        self._tail = tail
        self._left = [(mode, length, size) for (mode, length), size in zip(heads, sizes, strict=True)][::-1]
        self._aside = aside

    def take(self) -> Elements:
        """The next plane; it counts until the one behind it is asked for. Raises `DamageError`."""
        mode, length, size = self._left.pop()
        return unpack(mode, self._take(length), size)

    def merge(self, target: Elements) -> None:
        """Put elements together from their planes. Raises `DamageError`."""
        elements = self._elements(target.itemsize, target.size, target)
        if elements is not target:
            np.copyto(target, elements)

    def finish(self, out: memoryview) -> None:
        """Fill in the bytes of the block that are behind its last whole element."""
        out[len(out) - self._tail :] = self._encoded[len(self._encoded) - self._tail :]

    def _elements(self, width: int, count: int, out: Elements | None = None) -> Elements:
        """Half by half, in ``out`` or elsewhere: that takes fewer passes over wide elements than byte by byte."""
        if width == 1:
            return self.take()
        if width == 2 and self._left[-1][0] == Mode.WOVEN:  # noqa: PLR2004 - of two planes
            elements = self._woven()
        else:
            elements = scratch(f"half of {2 * width}", width, count) if out is None else out
            # Widened on the way, piece by piece: that takes longer than by itself, but has fewer calls that begin and end.
            np.left_shift(self._elements(width // 2, count), 4 * width, out=elements, dtype=elements.dtype)
            np.bitwise_or(elements, self._elements(width // 2, count), out=elements)
        if self._aside:
            self._aside = False
            elements = _rotated(elements, -1, scratch(f"half of {2 * width}", width, count) if out is None else out)
        return elements

    def _woven(self) -> Elements:
        _, length, size = self._left.pop()
        mode, nothing, _ = self._left.pop()
        if (mode, length, nothing) != (Mode.WOVEN, 2 * size, 0):
            raise DamageError(f"two planes of {size} bytes in {length}, then mode {mode} with {nothing}")
        return elements_of(self._take(length), 2)

    def _take(self, length: int) -> memoryview:
        self._at += length
        return self._encoded[self._at - length : self._at]


def encode_planes(raws: Sequence[memoryview], width: int, outs: Sequence[memoryview]) -> list[int | None]:
    """Encode blocks of numbers, all as long, as PLANE; return the encoded lengths, ``None`` where it does not pay.

    The sign of a float, which is noise, is put aside, so that the exponent fills the first plane.
    """
    order = AS_IT_IS if width == 1 else _SIGN_ASIDE
    return encode_elements(raws, [elements_of(raw, width) for raw in raws], order, outs)


def decode_plane(encoded: memoryview, out: memoryview) -> None:
    """Decode a PLANE block into ``out``.

    Raises:
        DamageError: It is none, or not of this size.
    """
    width, order = decode_head(encoded)
    if order > (_TURN_MAX if width == 1 else _SIGN_ASIDE):
        raise DamageError(f"bits in order {order}")
    elements = elements_of(out, width)
    decode_elements(encoded, elements, out, aside=order == _SIGN_ASIDE)
    if AS_IT_IS < order <= _TURN_MAX:
        _rotated(elements, -order, elements)


def encode_elements(
    raws: Sequence[memoryview], elements: Sequence[Elements], order: int, outs: Sequence[memoryview]
) -> list[int | None]:
    """Write blocks of ``elements``, as many of each; return their lengths, ``None`` where it does not pay."""
    width = elements[0].itemsize
    writers = [PlaneWriter(raw, width, out, _HEAD.size, width) for raw, out in zip(raws, outs, strict=True)]
    for writer, out in zip(writers, outs, strict=True):
        if writer.fits:
            _HEAD.pack_into(out, 0, width, order)
    put_planes(writers, elements, aside=order == _SIGN_ASIDE)
    return [writer.finish() for writer in writers]


def decode_head(encoded: memoryview) -> tuple[int, int]:
    """Width of a block that `encode_elements` wrote, and order of its bits."""
    if len(encoded) < _HEAD.size or encoded[0] not in WIDTHS:
        raise DamageError("not made of planes")
    return encoded[0], encoded[1]


def decode_elements(encoded: memoryview, elements: Elements, out: memoryview, *, aside: bool = False) -> None:
    """Read back what `encode_elements` wrote: the planes into ``elements``, what is behind the last of them into ``out``."""
    width = elements.itemsize
    planes = PlaneReader(encoded, _HEAD.size, [elements.size] * width, len(out) % width, aside=aside)
    planes.merge(elements)
    planes.finish(out)


def put_planes(writers: Sequence[PlaneWriter], elements: Sequence[Elements], *, aside: bool = False) -> None:
    """Write the planes of ``elements``, as many for each writer, with the upper 16 bits rotated left by one if ``aside``."""
    width, shape = elements[0].itemsize, (len(elements), elements[0].size)
    looks = _looks(elements, aside=aside)
    if width == 1:
        _put_plane(writers, elements[0].reshape(shape) if len(elements) == 1 else np.stack(elements), 0, looks[0])
        return
    for lane in reversed(range(width // 2)):
        low, high = looks[2 * lane : 2 * lane + 2]
        is_turned = aside and lane == width // 2 - 1
        if low.mode == high.mode == Mode.RAW and not is_turned:
            for writer, source in zip(writers, elements, strict=True):
                place = writer.place(Mode.WOVEN, 2 * source.size)
                writer.place(Mode.WOVEN, 0)
                if place is not None:
                    _cut(source, 16 * lane, elements_of(place, 2))
            continue
        half = scratch("half", 2, shape[0] * shape[1]).reshape(shape)
        for source, row in zip(elements, half, strict=True):
            _cut(source, 16 * lane, row)
        if is_turned:
            half = _rotated(half, 1, half)
        _put_plane(writers, half, 8, high)
        _put_plane(writers, half, 0, low)


def _looks(elements: Sequence[Elements], *, aside: bool) -> list[Look]:
    count, width = elements[0].size, elements[0].itemsize
    if count < _LOOK_MIN:
        return [Look(Mode.FRAME)] * width
    each = _SAMPLE // len(elements)
    step = (count - 1) // each
    sample, after = (
        np.concatenate([part[first : first + step * each : step] for part in elements]) for first in (0, 1)
    )
    if aside:
        for part in (sample, after):
            lane = part.view("<u2")[width // 2 - 1 :: width // 2]
            np.bitwise_or(lane << 1, lane >> 15, out=lane)
    return look(sample, after)


def _put_plane(writers: Sequence[PlaneWriter], elements: Elements, shift: int, look: Look) -> None:
    """Write the plane of bytes that begins at bit ``shift`` of the elements in each row."""
    if look.mode == Mode.RAW:
        for writer, row in zip(writers, elements, strict=True):
            place = writer.place(Mode.RAW, row.size)
            if place is not None:
                _cut(row, shift, elements_of(place, 1))
        return
    planes = scratch("plane", 1, elements.size).reshape(elements.shape)
    _cut(elements, shift, planes)
    for writer, kept in zip(writers, pack(planes, look), strict=True):
        writer.put(*kept)


def _cut(elements: Elements, shift: int, out: Elements) -> None:
    """The bits of each element from ``shift`` on that ``out`` has room for."""
    if shift:
        np.right_shift(elements, shift, out=out, casting="unsafe")
    else:
        np.copyto(out, elements, casting="unsafe")


def _rotated(elements: Elements, count: int, out: Elements) -> Elements:
    """Elements rotated left by ``count`` bits, or right by as many if it is negative, in ``out``, which may be the same."""
    bits = 8 * elements.itemsize
    left = count % bits
    low = scratch("plane", elements.itemsize, elements.size).reshape(elements.shape)
    np.right_shift(elements, bits - left, out=low)
    if elements.itemsize == 2:  # noqa: PLR2004 - bytes
        np.multiply(elements, 1 << left, out=out)  # three times as fast
    else:
        np.left_shift(elements, left, out=out)
    return np.bitwise_or(out, low, out=out)
