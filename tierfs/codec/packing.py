"""How the bytes of a plane are kept. FORMAT.md, "Codecs", planes.

Exponents lie close together: a window of 16 values holds nearly all of them, so two go into one byte before zstd's Huffman
coder sees them, which then has half as many bytes to do. Mantissas are noise, and stay as they are. Which of these a plane
is, counts tell, of some of its bytes from all over it.

What is worked on is a matrix, with a row for the plane of each block: numpy takes longer to begin than to do 64 KiB.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierfs.codec import frames
from tierfs.codec.damage import DamageError
from tierfs.codec.gaps import few_positions
from tierfs.codec.scratch import Elements, elements_of, scratch
from tierfs.digest import Buffer

__all__ = ["WORTH", "Kept", "Look", "Mode", "look", "pack", "unpack"]

WORTH = 0.97
"""What a plane has to shrink to, and a block as well, or it is not worth the time to decode it."""


class Mode(enum.IntEnum):
    """How a plane is kept. The number is stored in its head."""

    RAW = 0
    CONSTANT = 1
    FRAME = 2
    CODES = 3
    EVEN = 4
    WOVEN = 5


Kept: TypeAlias = tuple[Mode, Buffer]

_CODES_HEAD = struct.Struct("<BI")
_WINDOW = 16
# Each byte outside of it takes five.
_OUTSIDE_BYTES = 5
_OUTSIDE_MAX = 0.005
# Where more are the same, zstd finds runs of them, and is as fast with all bytes.
_SAME_MAX = 0.9
# What chi squared is of 512 bytes of a plane that is left as it is. At 425, a Huffman coder could save 3 %.
_CHI_SQUARED_MIN, _CHI_SQUARED_MAX = 150, 425
# Of random bytes, one in 256 is the same as the one before.
_REPEATED_MAX = 0.05
# Bit 0 of eight bytes, and by how much to shift the other bits of such bytes to get there.
_LOWEST = np.uint64(0x0101010101010101)
_SHIFTS = np.arange(1, 8, dtype=np.uint64)[:, None]
_EVEN_PART = 64


class Look(NamedTuple):
    """What a plane seems to be good for.

    Attributes:
        mode: RAW, EVEN, CODES or FRAME.
        first: Where the window begins, of CODES.
    """

    mode: Mode
    first: int = 0


def look(elements: Elements, after: Elements) -> list[Look]:
    """What to make of planes.

    Args:
        elements: Some elements, from all over the block.
        after: Those behind each.

    Returns:
        For each byte of an element, the least significant first.
    """
    size, width = elements.size, elements.itemsize
    planes, others = (part.view(np.uint8).reshape(size, width).T for part in (elements, after))
    numbered = planes + np.arange(0, 256 * width, 256, dtype=np.uint16)[:, None]
    counts = np.bincount(numbered.reshape(-1), minlength=256 * width).reshape(width, 256)
    # Chi squared: of random bytes 255, give or take 23.
    squared = np.einsum("ij,ij->i", counts, counts) * 256 / size - size
    return [_look(*found) for found in zip(counts, squared.tolist(), planes, others, strict=True)]


def _look(counts: NDArray[np.intp], squared: float, plane: Elements, after: Elements) -> Look:
    size = plane.size
    is_even = not counts[1::2].any()
    if is_even:
        squared -= size  # Random bytes among half as many are twice as often each.
    if _CHI_SQUARED_MIN <= squared <= _CHI_SQUARED_MAX and np.count_nonzero(plane == after) < _REPEATED_MAX * size:
        return Look(Mode.EVEN if is_even else Mode.RAW)
    sums = np.cumsum(np.concatenate((counts, counts[:_WINDOW])))
    inside = sums[_WINDOW:] - sums[:-_WINDOW]
    before = int(inside.argmax())
    if inside[before] >= (1 - _OUTSIDE_MAX) * size and counts.max() <= _SAME_MAX * size:
        return Look(Mode.CODES, (before + 1) % 256)
    return Look(Mode.FRAME)


def pack(planes: Elements, seen: Look) -> list[Kept]:
    """How each row of a matrix of bytes is kept, and as which bytes: perhaps its own."""
    if seen.mode == Mode.EVEN:
        room = scratch("codes", 1, planes.size).reshape(planes.shape)
        return [_even(plane, row) for plane, row in zip(planes, room, strict=True)]
    if seen.mode == Mode.CODES:
        return _codes(planes, seen.first)
    return [_frame(plane) for plane in planes]


def unpack(mode: int, data: memoryview, size: int) -> Elements:
    """A plane of ``size`` bytes: a view of ``data``, or this thread's until it asks for another.

    Raises:
        DamageError: It is none.
    """
    if mode == Mode.RAW and len(data) == size:
        return elements_of(data, 1)
    if mode == Mode.CONSTANT and len(data) == 1 and size:
        plane = scratch("plane", 1, size)
        plane.fill(data[0])
        return plane
    if mode == Mode.FRAME and len(data) < size:
        return elements_of(memoryview(frames.decompress(data, size)), 1)
    if mode == Mode.CODES and _CODES_HEAD.size < len(data) < size:
        return _from_codes(data, size)
    if mode == Mode.EVEN and size >= _EVEN_PART and len(data) == size - size // _EVEN_PART * 8:
        return _from_even(data, size)
    raise DamageError(f"a plane of mode {mode} with {len(data)} bytes for {size}")


def _frame(plane: Elements) -> Kept:
    if plane.size and plane[0] == plane[-1] and plane.min() == plane.max():
        return Mode.CONSTANT, plane[:1].tobytes()
    data = frames.pack_plane(plane.data)
    return (Mode.FRAME, data) if len(data) < plane.size * WORTH else (Mode.RAW, plane.data)


def _codes(planes: Elements, first: int) -> list[Kept]:
    rows, size = planes.shape
    whole = (size + 7) // 8 * 8
    codes = scratch("codes", 1, rows * whole).reshape(rows, whole)
    codes[:, size:] = 0
    np.subtract(planes, np.uint8(first), out=codes[:, :size])
    flags = scratch("outside", 1, rows * whole).reshape(rows, whole)
    np.greater_equal(codes, _WINDOW, out=flags.view(np.bool_))
    outside: list[bytes | None] = []
    for plane, row, is_outside in zip(planes, codes, flags, strict=True):
        positions = few_positions(is_outside)
        row[positions] = 0
        few = positions.size <= 2 * _OUTSIDE_MAX * size
        outside.append(positions.astype("<u4").tobytes() + plane[positions].tobytes() if few else None)
    # The code of every second byte to the upper half of the one before.
    pairs, room = codes.view("<u2"), flags.view("<u2")
    np.bitwise_or(pairs, np.right_shift(pairs, 4, out=room), out=pairs)
    packed = flags.reshape(-1)[: rows * whole // 2].reshape(rows, whole // 2)
    np.copyto(packed, pairs, casting="unsafe")
    return [
        _frame(plane) if others is None else _with_codes(first, others, row[: (size + 1) // 2])
        for plane, others, row in zip(planes, outside, packed, strict=True)
    ]


def _with_codes(first: int, outside: bytes, pairs: Elements) -> Kept:
    head = _CODES_HEAD.pack(first, len(outside) // _OUTSIDE_BYTES)
    return Mode.CODES, b"".join((head, outside, frames.pack_plane(pairs.data)))


def _from_codes(data: memoryview, size: int) -> Elements:
    first, count = _CODES_HEAD.unpack_from(data)
    values = _CODES_HEAD.size + 4 * count
    start = values + count
    if start >= len(data):
        raise DamageError(f"{count} bytes outside of a window, in {len(data)}")
    positions = elements_of(data[_CODES_HEAD.size : values], 4)
    if count and int(positions.max()) >= size:
        raise DamageError(f"a byte at {positions.max()} of a plane of {size}")
    half = (size + 1) // 2
    packed = elements_of(memoryview(frames.decompress(data[start:], half)), 1)
    # Widened on the way: that takes longer than by itself, but a call less, and others may go on in between.
    pairs = np.left_shift(packed, 4, out=scratch("codes", 2, half), dtype="<u2")
    np.bitwise_or(pairs, packed, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    plane: Elements = pairs.view(np.uint8)[:size]
    np.add(plane, np.uint8(first), out=plane)
    plane[positions] = elements_of(data[values:start], 1)
    return plane


def _even(plane: Elements, room: Elements) -> Kept:
    if int(np.bitwise_or.reduce(plane)) & 1:
        return Mode.RAW, plane.data
    part = plane.size // _EVEN_PART * 8
    whole = plane[: 8 * part].view("<u8").reshape(8, -1)
    packed = room[: plane.size - part]
    bits = packed[: 7 * part].view("<u8").reshape(7, -1)
    np.right_shift(whole[7], _SHIFTS, out=bits)
    np.bitwise_and(bits, _LOWEST, out=bits)
    np.bitwise_or(bits, whole[:7], out=bits)
    packed[7 * part :] = plane[8 * part :]
    return Mode.EVEN, packed.data


def _from_even(data: memoryview, size: int) -> Elements:
    part = size // _EVEN_PART * 8
    bits = elements_of(data[: 7 * part], 8).reshape(7, -1)
    plane = scratch("plane", 1, size)
    whole = plane[: 8 * part].view("<u8").reshape(8, -1)
    np.bitwise_and(bits, _LOWEST, out=whole[:7])
    np.left_shift(whole[:7], _SHIFTS, out=whole[:7])
    np.bitwise_or.reduce(whole[:7], axis=0, out=whole[7])
    np.bitwise_and(bits, ~_LOWEST, out=whole[:7])
    plane[8 * part :] = elements_of(data[7 * part :], 1)
    return plane
