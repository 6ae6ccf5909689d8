"""How the bytes of a plane are stored. FORMAT.md, "Codecs", planes.

Exponents lie close together, and a window of 16 values holds nearly all of them. So two go into one byte, and zstd's
Huffman coder has half as many bytes to code. Mantissas are noise, and stay as they are. The upper bytes of differences
are nearly all the same, and only the others are stored. Counts of some bytes from all over a plane tell these cases
apart.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from tierfs import kernels
from tierfs.codec import frames
from tierfs.codec.frames import DamageError
from tierfs.codec.numbers import Elements, check_gaps, elements_of, gaps_of, positions_of, rare_positions, scratch
from tierfs.digest import Buffer

WORTH = 0.97
"""A plane must shrink to this share, and so must a block, or it is not worth the time to decode it."""
_CODES_HEAD, _MOSTLY_HEAD = struct.Struct("<BI"), struct.Struct("<BII")
_WINDOW = 16
# Each byte outside the window takes five bytes.
_OUTSIDE_MAX = 0.005
# Each byte that differs from the most frequent one takes two or three bytes. zstd takes as many, and four times as
# long.
_OTHERS_MAX = 1 / 64
# If more bytes are the same, zstd finds runs of them, and is as fast on the whole bytes.
_SAME_MAX = 0.9
# Chi squared of 512 bytes of a plane that stays as it is. At 425, a Huffman coder could save 3 %.
_CHI_SQUARED_MIN, _CHI_SQUARED_MAX = 150, 425
# Of random bytes, one in 256 is the same as the byte before.
_REPEATED_MAX = 0.05
# Bit 7 of each of eight bytes, and the shifts that move their other bits there.
_HIGHEST = np.uint64(0x8080808080808080)
_SHIFTS = np.arange(7, 0, -1, dtype=np.uint64)[:, None]
_SEVEN_PART = 64


class Mode(enum.IntEnum):
    """How a plane is stored. The number is stored in the plane's head."""

    RAW = 0
    CONSTANT = 1
    FRAME = 2
    CODES = 3
    SEVEN = 4
    WOVEN = 5
    MOSTLY = 6


Kept: TypeAlias = tuple[Mode, tuple[Buffer, ...]]
"""The mode of a stored plane, and the parts of its data."""


class PlaneFit(NamedTuple):
    """The mode that fits a plane.

    Attributes:
        mode: RAW, SEVEN, CODES, MOSTLY or FRAME.
        first: For CODES the first value of the window, for MOSTLY the most frequent byte.
    """

    mode: Mode
    first: int = 0


class PlaneCounts(NamedTuple):
    """Counts of a plane's bytes, in some elements from all over the block.

    Attributes:
        squares: The sum of the squared frequencies of all byte values.
        repeated: How many bytes are the same in the next element.
        upper: How many bytes are more than 127.
        most: The most frequent value, and the lowest such one.
        most_count: How often it occurs.
        first: The first value of the window that holds the most bytes.
        inside: How many bytes the window holds.
    """

    squares: int
    repeated: int
    upper: int
    most: int
    most_count: int
    first: int
    inside: int


def counts_of(pairs: Elements) -> list[PlaneCounts]:
    """Count the bytes of each plane, the most significant plane first.

    Args:
        pairs: Rows of an element and the next one, from all over the block.
    """
    (size, _), width = pairs.shape, pairs.itemsize
    elements = pairs[:, 0].copy()
    numbered = elements.view(np.uint8).reshape(size, width) + np.arange(0, 256 * width, 256, dtype=np.uint16)
    counts = np.bincount(numbered.reshape(-1), minlength=256 * width).reshape(width, 256)
    changes = (elements ^ pairs[:, 1]).view(np.uint8).reshape(size, width)
    sums = np.cumsum(np.concatenate((counts, counts[:, :_WINDOW]), axis=1), axis=1)
    inside = sums[:, _WINDOW:] - sums[:, :-_WINDOW]
    before = inside.argmax(axis=1)
    columns = (
        np.einsum("ij,ij->i", counts, counts),
        (changes == 0).sum(axis=0),
        counts[:, 128:].sum(axis=1),
        counts.argmax(axis=1),
        counts.max(axis=1),
        (before + 1) % 256,
        inside.max(axis=1),
    )
    return [PlaneCounts(*row) for row in reversed(list(zip(*(column.tolist() for column in columns), strict=True)))]


def fit_of(found: PlaneCounts, size: int) -> PlaneFit:
    """Choose how to store a plane, by the counts of ``size`` of its bytes."""
    # Chi squared of random bytes is 255, give or take 23. If only half of the values occur, each is twice as frequent.
    squared = found.squares * 256 / size - size
    is_seven = not found.upper
    if is_seven:
        squared -= size
    if _CHI_SQUARED_MIN <= squared <= _CHI_SQUARED_MAX and found.repeated < _REPEATED_MAX * size:
        return PlaneFit(Mode.SEVEN if is_seven else Mode.RAW)
    if found.most_count >= (1 - _OTHERS_MAX) * size:
        return PlaneFit(Mode.MOSTLY, found.most)
    if found.inside >= (1 - _OUTSIDE_MAX) * size and found.most_count <= _SAME_MAX * size:
        return PlaneFit(Mode.CODES, found.first)
    return PlaneFit(Mode.FRAME)


def pack(plane: Elements, seen: PlaneFit) -> Kept:
    """Return the stored form of a plane. Its parts may be the plane's own memory."""
    if seen.mode == Mode.SEVEN:
        return _seven(plane)
    if seen.mode == Mode.CODES:
        return _codes(plane, seen.first)
    if seen.mode == Mode.MOSTLY:
        return _mostly(plane, seen.first)
    return _frame(plane)


def unpack(mode: int, data: memoryview, size: int, place: Elements | None = None) -> Elements:
    """Decode a plane of ``size`` bytes.

    A raw plane is a view of ``data``, and a frame's is its own memory. All others lie in ``place``: by default scratch
    memory of this thread, which is valid until the next plane.

    Raises:
        DamageError: ``data`` is not a plane of this mode and size.
    """
    if mode == Mode.RAW and len(data) == size:
        return elements_of(data, 1)
    if mode == Mode.FRAME and len(data) < size:
        return elements_of(memoryview(frames.decompress(data, size)), 1)
    plane = scratch("plane", 1, size) if place is None else place
    if mode == Mode.CONSTANT and len(data) == 1 and size:
        plane.fill(data[0])
    elif mode == Mode.CODES and _CODES_HEAD.size < len(data) < size:
        _from_codes(data, plane)
    elif mode == Mode.SEVEN and size >= _SEVEN_PART and len(data) == size - size // _SEVEN_PART * 8:
        _from_seven(data, plane)
    elif mode == Mode.MOSTLY and _MOSTLY_HEAD.size <= len(data) < size:
        _from_mostly(data, plane)
    else:
        raise DamageError(f"a plane of mode {mode} has {len(data)} encoded bytes for {size}")
    return plane


def unpack_wide(mode: int, data: memoryview, out: Elements, shift: int) -> None:
    """Decode a plane to 2-byte numbers, shifted left by 7 or 8 bits; in one step where that is less work.

    Raises:
        DamageError: ``data`` is not a plane of this mode and size.
    """
    if mode == Mode.CODES and _CODES_HEAD.size < len(data) < out.size:
        _from_codes(data, out, shift)
    elif mode == Mode.MOSTLY and _MOSTLY_HEAD.size <= len(data) < out.size:
        _from_mostly(data, out, shift)
    else:
        np.copyto(out, unpack(mode, data, out.size))
        np.multiply(out, 1 << shift, out=out)  # three times as fast as shifting 2-byte numbers


def _frame(plane: Elements) -> Kept:
    if plane.size and plane[0] == plane[-1] and plane.min() == plane.max():
        return Mode.CONSTANT, (plane[:1].tobytes(),)
    data = frames.pack_plane(plane.data)
    return (Mode.FRAME, (data,)) if len(data) < plane.size * WORTH else (Mode.RAW, (plane.data,))


def _codes(plane: Elements, first: int) -> Kept:
    size = plane.size
    if kernels.active is not None:
        limit = int(2 * _OUTSIDE_MAX * size)
        packed = scratch("codes", 1, (size + 1) // 2)
        where, values = scratch("flags", 4, limit), scratch("rest", 1, limit)
        count = kernels.active.pack_codes(plane, first, limit, where, values, packed)
        if count < 0:
            return _frame(plane)
        head = _CODES_HEAD.pack(first, count)
        return Mode.CODES, (head, where[:count].tobytes(), values[:count].tobytes(), frames.pack_plane(packed.data))
    whole = (size + 7) // 8 * 8
    codes = scratch("codes", 1, whole)
    codes[size:] = 0
    np.subtract(plane, np.uint8(first), out=codes[:size])
    flags = scratch("flags", 1, whole)
    np.greater_equal(codes, _WINDOW, out=flags.view(np.bool_))
    positions = rare_positions(flags)
    if positions.size > 2 * _OUTSIDE_MAX * size:
        return _frame(plane)
    codes[positions] = 0
    # Move the code of every second byte to the upper half of the byte before.
    pairs = codes.view("<u2")
    np.bitwise_or(pairs, np.right_shift(pairs, 4, out=flags.view("<u2")), out=pairs)
    packed = flags[: whole // 2]
    np.copyto(packed, pairs, casting="unsafe")
    head = _CODES_HEAD.pack(first, positions.size)
    outside = positions.astype("<u4").tobytes(), plane[positions].tobytes()
    return Mode.CODES, (head, *outside, frames.pack_plane(packed[: (size + 1) // 2].data))


def _from_codes(data: memoryview, out: Elements, shift: int = 0) -> None:
    """Decode to bytes, or to 2-byte numbers that hold the bytes shifted left."""
    first, count = _CODES_HEAD.unpack_from(data)
    values = _CODES_HEAD.size + 4 * count
    start = values + count
    if start >= len(data):
        raise DamageError(f"{count} bytes outside the window do not fit into {len(data)} encoded bytes")
    positions = elements_of(data[_CODES_HEAD.size : values], 4)
    if kernels.active is not None and out.itemsize == 1:
        frame = frames.decompress(data[start:], (out.size + 1) // 2)
        _call(kernels.active.unpack_codes, frame, first, positions, data[values:start], out)
        return
    if count and int(positions.max()) >= out.size:
        raise DamageError(f"a byte at position {positions.max()} of a plane of {out.size} bytes")
    half, width = (out.size + 1) // 2, out.itemsize
    packed = elements_of(memoryview(frames.decompress(data[start:], half)), 1)
    # Spread both codes of a byte over the memory of two numbers. The mask below removes the other bits.
    pairs = scratch("codes", 2 * width, half)
    np.copyto(pairs, packed)
    if width == 1:
        np.bitwise_or(pairs, np.left_shift(pairs, 4, out=scratch("flags", 2, half)), out=pairs)
    else:
        np.multiply(pairs, (1 << shift) + (1 << shift + 12), out=pairs)  # no bit is carried: they are 12 bits apart
    codes: Elements = pairs.view(out.dtype)[: out.size]
    np.bitwise_and(codes, (_WINDOW - 1) << shift, out=codes)
    np.add(codes, out.dtype.type(first << shift), out=out)
    if first + _WINDOW > 256:  # noqa: PLR2004 - values of a byte
        np.bitwise_and(out, 0xFF << shift, out=out)
    out[positions] = elements_of(data[values:start], 1).astype(out.dtype) << shift


def _mostly(plane: Elements, most: int) -> Kept:
    if kernels.active is not None:
        limit = int(1.5 * _OTHERS_MAX * plane.size)
        room, others = scratch("codes", 1, limit + plane.size // 255), scratch("flags", 1, limit)
        count, gap_bytes = kernels.active.pack_mostly(plane, most, limit, room, others)
        if not count:
            return Mode.CONSTANT, (bytes([most]),)
        if count < 0:
            return _frame(plane)
        head = _MOSTLY_HEAD.pack(most, count, gap_bytes)
        return Mode.MOSTLY, (head, room[:gap_bytes].tobytes(), others[:count].tobytes())
    whole = (plane.size + 7) // 8 * 8
    flags = scratch("flags", 1, whole)
    flags[plane.size :] = 0
    np.not_equal(plane, np.uint8(most), out=flags[: plane.size].view(np.bool_))
    positions = rare_positions(flags)
    if not positions.size:
        return Mode.CONSTANT, (bytes([most]),)
    if positions.size > 1.5 * _OTHERS_MAX * plane.size:
        return _frame(plane)
    gaps = gaps_of(positions)
    head = _MOSTLY_HEAD.pack(most, positions.size, gaps.size)
    return Mode.MOSTLY, (head, gaps.tobytes(), plane[positions].tobytes())


def _from_mostly(data: memoryview, out: Elements, shift: int = 0) -> None:
    """See `_from_codes`."""
    most, count, gap_bytes = _MOSTLY_HEAD.unpack_from(data)
    check_gaps(count, gap_bytes, out.size)
    values = _MOSTLY_HEAD.size + gap_bytes
    if values + count != len(data):
        raise DamageError(f"{count} other bytes and {gap_bytes} gap bytes do not add up to {len(data)}")
    if kernels.active is not None and out.itemsize == 1:
        _call(kernels.active.unpack_mostly, data[_MOSTLY_HEAD.size : values], data[values:], most, out)
        return
    positions = positions_of(elements_of(data[_MOSTLY_HEAD.size : values], 1), count, out.size)
    out.fill(most << shift)
    out[positions] = elements_of(data[values:], 1).astype(out.dtype) << shift


def _seven(plane: Elements) -> Kept:
    if kernels.active is not None:
        packed = scratch("codes", 1, plane.size - plane.size // _SEVEN_PART * 8)
        is_seven = kernels.active.pack_seven(plane, packed)
        return (Mode.SEVEN, (packed.data,)) if is_seven else (Mode.RAW, (plane.data,))
    if plane.max() > 0x7F:  # noqa: PLR2004 - bits
        return Mode.RAW, (plane.data,)
    part = plane.size // _SEVEN_PART * 8
    whole = plane[: 8 * part].view("<u8").reshape(8, -1)
    packed = scratch("codes", 1, plane.size - part)
    bits = packed[: 7 * part].view("<u8").reshape(7, -1)
    np.left_shift(whole[7], _SHIFTS, out=bits)
    np.bitwise_and(bits, _HIGHEST, out=bits)
    np.bitwise_or(bits, whole[:7], out=bits)
    packed[7 * part :] = plane[8 * part :]
    return Mode.SEVEN, (packed.data,)


def _from_seven(data: memoryview, plane: Elements) -> None:
    if kernels.active is not None:
        kernels.active.unpack_seven(data, plane)
        return
    part = plane.size // _SEVEN_PART * 8
    bits = elements_of(data[: 7 * part], 8).reshape(7, -1)
    whole = plane[: 8 * part].view("<u8").reshape(8, -1)
    np.bitwise_and(bits, _HIGHEST, out=whole[:7])
    np.right_shift(whole[:7], _SHIFTS, out=whole[:7])
    np.bitwise_or.reduce(whole[:7], axis=0, out=whole[7])
    np.bitwise_and(bits, ~_HIGHEST, out=whole[:7])
    plane[8 * part :] = elements_of(data[7 * part :], 1)


def _call(function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except ValueError as error:
        raise DamageError(str(error)) from None
