"""Elements as byte planes: the first plane holds the most significant byte of every element, and so on.

In training states the exponents fill one plane, which a Huffman coder shrinks to a third, while the mantissas are
noise, best left alone. So each plane is kept as it is, as its one value, or as a zstd frame: a sample decides.
FORMAT.md, "Codecs".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from tierfs.codec import frames
from tierfs.codec.damage import DamageError
from tierfs.codec.scratch import Elements, elements_of, scratch

__all__ = [
    "PLANE_HEAD_BYTES",
    "WIDTHS",
    "decode_elements",
    "decode_head",
    "decode_plane",
    "encode_elements",
    "encode_plane",
    "limit_for",
    "merge",
    "put_planes",
    "put_tail",
    "take_planes",
    "take_tail",
]

WIDTHS = (1, 2, 4, 8)
_TURN_MAX = 7
PLANE_HEAD_BYTES = 5
_HEAD = struct.Struct("<BB")
_PLANE_HEAD = struct.Struct("<BI")
_RAW, _CONSTANT, _FRAME = range(3)
# A plane must shrink to this share, and a block to the same, or it is not worth the time to decode it.
_WORTH = 0.97
# What of a plane is tried first: short runs from all over it, 16 KiB together.
_RUN, _RUNS = 256, 64
# How many signs are looked at.
_SIGNS = 4096
# How many elements numpy takes at once where types differ: with its own 8,192, shifts to bytes take almost twice as long.
_BUFFER = 1024


def encode_plane(raw: memoryview, width: int, out: memoryview) -> int | None:
    """Encode a block of numbers as PLANE; return the encoded length, ``None`` where it does not pay.

    Elements wider than a byte are rotated: the sign of a float goes last, so that the exponent fills the first plane.
    """
    elements = elements_of(raw, width)
    return encode_elements(raw, elements, _turn_of(elements), out)


def decode_plane(encoded: memoryview, out: memoryview) -> None:
    """Decode a PLANE block into ``out``.

    Raises:
        DamageError: It is none, or not of this size.
    """
    width, turn = decode_head(encoded)
    if turn > _TURN_MAX:
        raise DamageError(f"rotated by {turn} bits")
    elements = elements_of(out, width)
    decode_elements(encoded, elements, out)
    if turn:
        _rotate_right(elements, turn)


def encode_elements(raw: memoryview, elements: Elements, turn: int, out: memoryview) -> int | None:
    """Write a block of ``elements``, each rotated left by ``turn`` bits; return its length, ``None`` where it does not pay."""
    width, limit = elements.itemsize, limit_for(raw, elements.itemsize)
    if limit < _HEAD.size:
        return None
    _HEAD.pack_into(out, 0, width, turn)
    end = put_planes([elements], out, _HEAD.size, limit, turn)
    return None if end is None else put_tail(raw, width, out, end)


def decode_head(encoded: memoryview) -> tuple[int, int]:
    """Width and rotation of a block that `encode_elements` wrote."""
    if len(encoded) < _HEAD.size or encoded[0] not in WIDTHS:
        raise DamageError("not made of planes")
    return encoded[0], encoded[1]


def decode_elements(encoded: memoryview, elements: Elements, out: memoryview) -> None:
    """Read back what `encode_elements` wrote: the planes into ``elements``, the tail into ``out``."""
    width = elements.itemsize
    planes = take_planes(encoded, [elements.size] * width, _HEAD.size, len(out) % width)
    merge(planes, elements)
    take_tail(encoded, width, out)


def limit_for(raw: memoryview, width: int) -> int:
    """Where the planes of a block must end to be worth it; behind them comes the tail."""
    return int(len(raw) * _WORTH) - len(raw) % width


def put_tail(raw: memoryview, width: int, out: memoryview, end: int) -> int:
    """Append to ``out`` the bytes of ``raw`` behind its last whole element; return the new end."""
    tail = len(raw) % width
    out[end : end + tail] = raw[len(raw) - tail :]
    return end + tail


def take_tail(encoded: memoryview, width: int, out: memoryview) -> None:
    """Fill in the bytes of ``out`` behind its last whole element."""
    tail = len(out) % width
    out[len(out) - tail :] = encoded[len(encoded) - tail :]


def put_planes(groups: list[Elements], out: memoryview, at: int, limit: int, turn: int = 0) -> int | None:
    """Write the heads of all planes of ``groups``, rotated left by ``turn`` bits, at ``at``, then the planes; return where they end.

    ``None`` if that is behind ``limit``; nothing is written there.
    """
    planes = [(group, byte) for group in groups for byte in reversed(range(group.itemsize))]
    end = at + len(planes) * PLANE_HEAD_BYTES
    before = np.setbufsize(_BUFFER)
    try:
        for group, byte in planes:
            fits = end + group.size <= limit
            plane = elements_of(out[end : end + group.size], 1) if fits else scratch("plane", 1, group.size)
            _cut(group, turn, byte, plane)
            mode, data = _shrunk(plane)
            if end + len(data) > limit:
                return None
            if mode != _RAW:
                out[end : end + len(data)] = data
            _PLANE_HEAD.pack_into(out, at, mode, len(data))
            at, end = at + PLANE_HEAD_BYTES, end + len(data)
    finally:
        np.setbufsize(before)
    return end


def take_planes(encoded: memoryview, sizes: list[int], at: int, tail: int) -> Iterator[Elements]:
    """Decode, one by one, planes of these sizes, whose heads begin at ``at``; ``tail`` bytes follow them.

    Raises:
        DamageError: They are not that, found before the first or with the plane that is damaged.
    """
    start = at + len(sizes) * PLANE_HEAD_BYTES
    if start > len(encoded):
        raise DamageError("cut short")
    heads = [_PLANE_HEAD.unpack_from(encoded, at + index * PLANE_HEAD_BYTES) for index in range(len(sizes))]
    if start + sum(length for _, length in heads) + tail != len(encoded):
        raise DamageError("lengths of planes that do not add up")
    for (mode, length), size in zip(heads, sizes, strict=True):
        yield _decode(mode, encoded[start : start + length], size)
        start += length


def merge(planes: Iterator[Elements], target: Elements) -> None:
    """Put elements together from their planes, pair by pair: half the passes over wide elements."""
    width = target.itemsize // 2
    if width:
        # Widened by themselves, in one go: a shift that widens does so piece by piece, and takes twice as long.
        np.copyto(target, _next_half(planes, width, target.size))
        np.left_shift(target, 8 * width, out=target)
        np.bitwise_or(target, _next_half(planes, width, target.size), out=target)
    else:
        np.copyto(target, next(planes))


def _next_half(planes: Iterator[Elements], width: int, count: int) -> Elements:
    if width == 1:
        return next(planes)
    half = scratch(f"half of {width}", width, count)
    merge(planes, half)
    return half


def _decode(mode: int, data: memoryview, size: int) -> Elements:
    if mode == _RAW and len(data) == size:
        return elements_of(data, 1)
    if mode == _CONSTANT and len(data) == 1 and size:
        plane = scratch("plane", 1, size)
        plane.fill(data[0])
        return plane
    if mode == _FRAME and len(data) < size:
        return elements_of(memoryview(frames.decompress(data, size)), 1)
    raise DamageError(f"a plane of mode {mode} with {len(data)} bytes for {size}")


def _cut(elements: Elements, turn: int, byte: int, plane: Elements) -> None:
    """One byte of each element, counted from the least significant, after a rotation to the left that nobody carries out.

    A shift that drops what does not fit is the fastest way that numpy has.
    """
    shift = 8 * byte - turn
    if shift > 0:
        np.right_shift(elements, shift, out=plane, casting="unsafe")
        return
    np.copyto(plane, elements, casting="unsafe")
    if turn:
        # Bytes are shifted to the left one by one, but multiplied by the dozen.
        np.multiply(plane, 1 << turn, out=plane)
        first = scratch("first bits", 1, plane.size)
        np.right_shift(elements, 8 * elements.itemsize - turn, out=first, casting="unsafe")
        np.bitwise_or(plane, first, out=plane)


def _shrunk(plane: Elements) -> tuple[int, bytes | memoryview]:
    """How a plane is kept, and as which bytes."""
    if plane.size and plane[0] == plane[-1] and plane.min() == plane.max():
        return _CONSTANT, plane[:1].tobytes()
    if plane.size <= _RUN * _RUNS or _shrinks(_sample(plane)):
        data = frames.pack_plane(plane.data)
        if len(data) < plane.size * _WORTH:
            return _FRAME, data
    return _RAW, plane.data


def _shrinks(sample: Elements) -> bool:
    return len(frames.pack_plane(sample.data)) < sample.size * _WORTH


def _sample(plane: Elements) -> Elements:
    runs = plane[: plane.size // _RUN * _RUN].reshape(-1, _RUN)
    return runs[:: len(runs) // _RUNS][:_RUNS].reshape(-1)


def _turn_of(elements: Elements) -> int:
    """By how many bits to rotate elements left. Measured on training states, docs/explanation/performance.md.

    The sign is noise and goes last. The bit at the top of a bfloat16's exponent hardly ever differs: it goes, too, and lets the first
    bit of the mantissa in, which makes 0.6 % and costs a float32 more time than that is worth. Where no sign is set, as in
    squares, two more bits go, which makes it faster as well.
    """
    width = elements.itemsize
    if width == 1:
        return 0
    sample = elements[:: max(1, elements.size // _SIGNS)]
    if sample.size and int(np.bitwise_or.reduce(sample)) >> (8 * width - 1) == 0:
        return 3
    return 2 if width == 2 else 1  # noqa: PLR2004 - bytes of a bfloat16


def _rotate_right(elements: Elements, turn: int) -> None:
    first = scratch("other", elements.itemsize, elements.size)
    np.left_shift(elements, 8 * elements.itemsize - turn, out=first)
    np.right_shift(elements, turn, out=elements)
    np.bitwise_or(elements, first, out=elements)
