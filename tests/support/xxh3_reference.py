"""XXH3-128 in NumPy, written from the specification alone: the reference for the kernels.

Specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Description".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Each class of lengths has its own formula.
_THREE_BYTES, _EIGHT_BYTES, _TINY_BYTES_MAX, _HALF_SHORT_BYTES_MAX, _SHORT_BYTES_MAX = 3, 8, 16, 128, 240

_MASK = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def hash_blocks_reference(blocks: Sequence[bytes]) -> bytes:
    """Return the XXH3-128 digests of ``blocks``, concatenated, computed without the xxhash library."""
    return b"".join(_digest(block) for block in blocks)


def _digest(data: bytes) -> bytes:
    length = len(data)
    if length <= _TINY_BYTES_MAX:
        low, high = _hash_16(data)
    elif length <= _SHORT_BYTES_MAX:
        low, high = _hash_240(data)
    else:
        low, high = _hash_long(data)
    return struct.pack(">QQ", high, low)


def _word(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little")


def _swap(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _fold(left: int, right: int) -> int:
    product = left * right
    return (product & _MASK) ^ (product >> 64)


def _avalanche(value: int) -> int:
    value ^= value >> 37
    value = value * 0x165667919E3779F9 & _MASK
    return value ^ value >> 32


def _avalanche_64(value: int) -> int:
    value = (value ^ value >> 33) * _P64_2 & _MASK
    value = (value ^ value >> 29) * _P64_3 & _MASK
    return value ^ value >> 32


def _hash_16(data: bytes) -> tuple[int, int]:
    length = len(data)
    if not length:
        flips = [_word(_SECRET, offset) ^ _word(_SECRET, offset + 8) for offset in (64, 80)]
        return _avalanche_64(flips[0]), _avalanche_64(flips[1])
    if length <= _THREE_BYTES:
        mixed = data[0] << 16 | data[length >> 1] << 24 | data[-1] | length << 8
        swapped = _swap(mixed, 4)
        turned = (swapped << 13 | swapped >> 19) & 0xFFFFFFFF
        secret = struct.unpack_from("<4I", _SECRET)
        return _avalanche_64(mixed ^ secret[0] ^ secret[1]), _avalanche_64(turned ^ secret[2] ^ secret[3])
    if length <= _EIGHT_BYTES:
        value = int.from_bytes(data[:4], "little") | int.from_bytes(data[-4:], "little") << 32
        product = (value ^ _word(_SECRET, 16) ^ _word(_SECRET, 24)) * (_P64_1 + (length << 2) & _MASK)
        low, high = product & _MASK, product >> 64
        high = high + (low << 1) & _MASK
        low ^= high >> 3
        low ^= low >> 35
        low = low * 0x9FB21C651E98DF25 & _MASK
        return low ^ low >> 28, _avalanche(high)
    first, last = _word(data, 0), _word(data, length - 8)
    product = (first ^ last ^ _word(_SECRET, 32) ^ _word(_SECRET, 40)) * _P64_1
    low = (product & _MASK) + ((length - 1) << 54) & _MASK
    last ^= _word(_SECRET, 48) ^ _word(_SECRET, 56)
    high = (product >> 64) + last + (last & 0xFFFFFFFF) * (_P32_2 - 1) & _MASK
    product = (low ^ _swap(high, 8)) * _P64_2
    return _avalanche(product & _MASK), _avalanche((product >> 64) + high * _P64_2 & _MASK)


def _hash_240(data: bytes) -> tuple[int, int]:
    length = len(data)
    low, high = length * _P64_1 & _MASK, 0

    def mix(offset: int, secret: int) -> int:
        return _fold(_word(data, offset) ^ _word(_SECRET, secret), _word(data, offset + 8) ^ _word(_SECRET, secret + 8))

    def add(first: int, second: int, secret: int) -> None:
        nonlocal low, high
        low = low + mix(first, secret) & _MASK
        low ^= _word(data, second) + _word(data, second + 8) & _MASK
        high = high + mix(second, secret + 16) & _MASK
        high ^= _word(data, first) + _word(data, first + 8) & _MASK

    if length <= _HALF_SHORT_BYTES_MAX:
        for step in reversed(range((length - 1) // 32 + 1)):
            add(16 * step, length - 16 * (step + 1), 32 * step)
    else:
        for start in range(0, 128, 32):
            add(start, start + 16, start)
        low, high = _avalanche(low), _avalanche(high)
        for start in range(128, length - 31, 32):
            add(start, start + 16, start - 128 + 3)
        add(length - 16, length - 32, 103)
    merged = low * _P64_1 + high * _P64_4 + length * _P64_2 & _MASK
    return _avalanche(low + high & _MASK), -_avalanche(merged) & _MASK


def _sums(stripes: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the terms that ``stripes`` [..., count, 8] add to the accumulators [..., 8]."""
    mixed = stripes ^ keys
    products = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
    swapped = stripes.reshape(*stripes.shape[:-1], 4, 2)[..., ::-1].reshape(stripes.shape)
    sums: npt.NDArray[np.uint64] = np.add.reduce(products + swapped, axis=-2, dtype=np.uint64)
    return sums


def _hash_long(data: bytes) -> tuple[int, int]:
    length = len(data)
    secret = np.frombuffer(_SECRET, "<u8")
    keys = np.lib.stride_tricks.sliding_window_view(secret, 8)
    rows, stripes = (length - 1) // 1024, (length - 1) % 1024 // 64
    accumulators = np.array(_START, np.uint64)
    for sums in _sums(np.frombuffer(data, "<u8", rows * 128).reshape(rows, 16, 8), keys[:16]):
        accumulators += sums
        accumulators ^= accumulators >> np.uint64(47)
        accumulators ^= secret[16:]
        accumulators *= np.uint64(_P32_1)
    rest = np.frombuffer(data, "<u8", stripes * 8, rows * 1024).reshape(stripes, 8)
    last = np.frombuffer(data, "<u8", 8, length - 64).reshape(1, 8)
    accumulators += _sums(rest, keys[:stripes]) + _sums(last, np.frombuffer(_SECRET, "<u8", 8, 121))
    merged = accumulators.tolist()

    def merge(start: int, offset: int) -> int:
        for pair in range(4):
            at = offset + 16 * pair
            start += _fold(merged[2 * pair] ^ _word(_SECRET, at), merged[2 * pair + 1] ^ _word(_SECRET, at + 8))
        return _avalanche(start & _MASK)

    return merge(length * _P64_1, 11), merge(~(length * _P64_2), 117)
