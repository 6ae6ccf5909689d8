"""Blocks like those of training states, and harder ones; helpers that encode and decode them for the codec tests."""

from __future__ import annotations

import struct

import numpy as np

from tierfs.codec import Codec, Coding, decode_block, encode_block

WIDTHS = (1, 2, 4, 8)
FLOATS = {2: "<f2", 4: "<f4", 8: "<f8"}
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 1e-40, -1e-45, 6e-8, 3.4e38, 65504.0]
CONTENTS = ("noise", "constant", "zeros", "floats", "squares", "specials", "sorted", "rare", "text", "bfloat16")
RELATIONS = ("same", "near", "few", "unrelated")


def block(content: str, size: int, width: int, seed: int) -> bytes:
    """Return ``size`` bytes of one kind of content."""
    rng = np.random.default_rng(seed)
    count = size // width + 1
    if content == "constant":
        data = rng.bytes(width) * count
    elif content == "zeros":
        data = bytes(count * width)
    elif content == "floats":
        data = rng.normal(0, 0.02, count).astype(FLOATS.get(width, "<f4")).tobytes()
    elif content == "squares":
        data = np.square(rng.uniform(0.002, 0.02, count)).astype(FLOATS.get(width, "<f4")).tobytes()
    elif content == "specials":
        with np.errstate(over="ignore"):
            data = rng.choice(SPECIAL, count).astype(FLOATS.get(width, "<f4")).tobytes()
    elif content == "sorted":
        data = np.sort(rng.integers(0, 1 << 8 * width, count, dtype=f"u{width}")).tobytes()
    elif content == "rare":
        data = np.where(rng.random(count) < 0.01, rng.integers(0, 256, count), 0).astype(f"<u{width}").tobytes()
    elif content == "text":
        data = b"the quick brown fox jumps over the lazy dog; " * (count * width // 40 + 1)
    elif content == "bfloat16":
        data = (rng.normal(0, 0.02, count * 4).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = rng.bytes(count * width)
    return data[:size]


def base_of(raw: bytes, relation: str, width: int, seed: int) -> bytes:
    """Return a block that ``raw`` may have been a few steps earlier."""
    rng = np.random.default_rng(seed)
    if relation == "unrelated":
        return rng.bytes(len(raw))
    elements = np.frombuffer(raw, f"<u{width}", len(raw) // width).copy()
    if relation == "near":
        elements += rng.integers(-3, 4, elements.size).astype(f"i{width}").view(f"u{width}")
    elif relation == "few":
        elements[rng.random(elements.size) < 0.02] ^= 5
    return elements.tobytes() + raw[elements.nbytes :]


def shifted(data: bytes, offset: int, *, read_only: bool = True) -> memoryview:
    """Return a view of the same bytes, ``offset`` bytes behind an address that is a multiple of 8."""
    memory = np.zeros(len(data) + 16, np.uint8)
    start = -memory.ctypes.data % 8 + offset
    memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
    view = memoryview(memory)[start : start + len(data)]
    return view.toreadonly() if read_only else view


def encode(raw: bytes | memoryview, coding: Coding, base: bytes | memoryview | None = None) -> tuple[Codec, bytes]:
    """Return the codec and the encoded bytes."""
    out = bytearray(len(raw))
    source = memoryview(raw)
    codec, length = encode_block(source, coding, None if base is None else memoryview(base), memoryview(out))
    if codec is Codec.STORE:
        assert length == len(raw)
        return codec, bytes(raw)
    assert 0 < length < len(raw)
    return codec, bytes(out[:length])


def decode(codec: int, encoded: bytes, size: int, base: bytes | memoryview | None = None) -> bytes:
    out = bytearray(b"\xaa" * size)
    decode_block(codec, memoryview(encoded), memoryview(out), None if base is None else memoryview(base), "here")
    return bytes(out)


def head(mode: int, length: int) -> bytes:
    """Return the head of a plane."""
    return struct.pack("<BI", mode, length)


def run_frame(count: int, value: int) -> bytes:
    """Return a zstd frame that repeats one byte, built by hand from RFC 8878: one segment, one last RLE block."""
    size = bytes([0x20, count]) if count < 256 else bytes([0x60]) + struct.pack("<H", count - 256)
    return b"\x28\xb5\x2f\xfd" + size + (count << 3 | 1 << 1 | 1).to_bytes(3, "little") + bytes([value])


def stored_frame(data: bytes) -> bytes:
    """Return a zstd frame of fewer than 256 bytes, stored as they are: one segment, one last raw block."""
    return b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


def codes(first: int, outside: dict[int, int], pairs: bytes) -> bytes:
    """Return the data of a plane of codes with a given frame. ``outside`` maps positions to bytes without a code."""
    return struct.pack(f"<BI{len(outside)}I", first, len(outside), *outside) + bytes(outside.values()) + pairs
